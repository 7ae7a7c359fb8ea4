"""Sums over the rows of arrays, a piece at a time, and the file that they are written to."""
