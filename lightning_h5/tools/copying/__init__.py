"""A copy of a file: its plan, its structure, its rows, and the comparison with the source."""
