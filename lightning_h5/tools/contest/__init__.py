"""Contenders that are measured on one's own files, and the choice among them."""
