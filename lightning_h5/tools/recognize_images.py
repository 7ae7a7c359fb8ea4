"""Images in arrays: rows of bytes that begin as JPEG or PNG files do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from ..errors import H5Error
from ..hdf5 import FAULTS, Image, OpenOptions, bytes_of, find_array, is_bytes, layout_of, open_h5, words_in
from ..readers import open_reader
from .recognize_parts import TARGETS, FileLooks, Guess, Look, Settings

__all__ = ["images"]

BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
MAX_READ = 16  # arrays of which a row is read
N_DECODED = 8  # images whose shapes are compared
MIN_ROWS = 10  # of which some are left to validate on


def images(files: Sequence[FileLooks]) -> list[Guess]:
    """Return how to read the only array of images in files; none if there is no such array."""
    arrays = files[0].arrays
    looks = {**arrays, **files[0].of_bytes}
    likely = [
        *(name for name, look in files[0].of_bytes.items() if look.shape),
        *(name for name, look in arrays.items() if _may_hold_bytes(look)),
    ]
    found = {name: rows for name in likely[:MAX_READ] if (rows := _first(files[0].path, name))}
    if len(found) != 1:
        return []
    ((name, rows),) = found.items()
    n_rows = looks[name].shape[0]
    columns = [other for other, look in arrays.items() if look.shape == (n_rows,) and other != name]
    numbers = [other for other in columns if arrays[other].dtype.startswith(("int", "uint", "float"))]
    targets = [other for other in numbers if words_in(other) & TARGETS]
    settings: Settings = {"x_key": name, **({"y_key": targets[0]} if len(targets) == 1 else {})}
    settings["decode"] = {name: "image"}
    if len(_shapes(rows)) > 1:
        settings["collate_fn"] = "list"
    if n_rows >= MIN_ROWS:
        settings["split"] = 0.1
    kind = "JPEG" if rows[0].startswith(BEGINNINGS[0]) else "PNG"
    return [Guess(settings=settings, why=f"{name!r} holds {kind} files, one a row, which are decoded to images.")]


def _may_hold_bytes(look: Look) -> bool:
    return (look.dtype == "uint8" and len(look.shape) == 2) or (look.dtype[:4] == "text" and len(look.shape) == 1)


def _first(path: str, name: str) -> list[bytes]:
    """Return the first rows of an array as bytes; none if the first one does not begin as an image does."""
    try:
        with open_h5(path) as file:
            layout = layout_of(find_array(file, name), path, name)  # opens no other file
        if layout.dtype.kind == "S" and not layout.row_shape:  # not text
            n_bytes = np.dtype(f"V{layout.dtype.itemsize}")
            layout = layout.with_changes(stored=n_bytes, dtype=n_bytes)
        is_padded = layout.dtype == np.uint8 and len(layout.row_shape) == 1
        if not (is_padded or (not layout.row_shape and (is_bytes(layout.dtype) or layout.dtype.kind == "V"))):
            return []
        reader = open_reader(layout, OpenOptions())
        rows = [bytes(bytes_of(row)) for row in reader.read(np.arange(min(1, layout.n_rows)))]
        if rows and rows[0].startswith(BEGINNINGS):
            return rows + [bytes(bytes_of(row)) for row in reader.read(np.arange(1, min(N_DECODED, layout.n_rows)))]
    except (H5Error, *FAULTS):  # checking the file reports it
        pass
    return []


def _shapes(rows: Sequence[bytes]) -> set[tuple[int, ...]]:
    """Return the shapes of images; none if they cannot be decoded here."""
    with suppress(Exception):  # trying the settings reports why
        return {Image().row(row).shape for row in rows}
    return set()
