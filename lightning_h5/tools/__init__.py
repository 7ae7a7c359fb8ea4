"""Tools for files, as functions that return data; the verbs of the command line print it.

Nothing is imported here: inspecting a file takes less time than importing torch.
"""
