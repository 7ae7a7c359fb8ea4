"""Tools for files, as functions that return data; the verbs of the command line print it.

Nothing is imported here: to look at a file takes no torch, which takes longer to import than most looks do.
"""
