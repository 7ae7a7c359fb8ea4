"""Filters of chunks, undone without the HDF5 library. ``readers`` imports the modules that register decoders."""
