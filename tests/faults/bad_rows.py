"""Files with rows that cannot be read, of every kind of sample, and which of their samples are bad."""

import io
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
from PIL import Image

from lightning_h5 import check_files

ROWS, STEP, WIDTH = 48, 4, 64
BAD = 5  # the damaged chunk, counted from 0
BAD_ROWS = {*range(BAD * STEP, (BAD + 1) * STEP)}
GZIP = {"chunks": (STEP, WIDTH), "compression": "gzip"}


@dataclass
class BadFile:
    """A file, how a data module reads it, and the samples that are to be left out."""

    path: str
    arguments: dict[str, Any]
    bad: set[int]
    n_samples: int
    cause: str
    places: dict[int, str] = field(default_factory=dict)


def numbered(n_rows=ROWS):
    """Rows that begin with their number."""
    values = np.random.default_rng(0).integers(0, 9, (n_rows, WIDTH)).astype("i4")
    values[:, 0] = np.arange(n_rows)
    return values


def flip(path, offset):
    """Change a bit."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def damage_chunk(path, key, at):
    """Change a bit in the middle of the chunk that has an index."""
    with h5py.File(path) as file:
        chunk = file[key].id.get_chunk_info_by_coord(at)
    flip(path, chunk.byte_offset + chunk.size // 2)


def chunk_of_rows(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=numbered(), **GZIP)
        file["y"] = np.arange(ROWS)
    damage_chunk(path, "x", (BAD * STEP, 0))
    return BadFile(path, {"x_key": "x", "y_key": "y"}, BAD_ROWS, ROWS, "chunk 5", {20: "row 20"})


def several_arrays(path):
    """The damage is in the second of three arrays, whose chunks are others."""
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=numbered(), **GZIP)
        file.create_dataset("b", data=numbered(), chunks=(6, 32), compression="gzip")
        file["c"] = np.arange(ROWS)
    damage_chunk(path, "b", (12, 32))
    return BadFile(path, {"fields": ["a", "b", "c"]}, {*range(12, 18)}, ROWS, "'b'")


def digests_of_contiguous_rows(path):
    """Rows without chunks: damage is noticed by digests of pieces."""
    n_rows, width = 24, 1 << 17
    values = np.arange(n_rows, dtype="i4")[:, None] + np.zeros(width, "i4")
    with h5py.File(path, "w") as file:
        file["x"] = values
        offset = file["x"].id.get_offset()
    assert check_files(path, write_digests=True).digested
    flip(path, offset + 13 * 4 * width + 99)
    arguments = {"x_key": "x", "files": {"verify": "digest"}}
    return BadFile(path, arguments, {13}, n_rows, "digest")


def lost_end(path):
    """A copy that was interrupted: its end was allocated, and has zeros."""
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(ROWS)
        file.create_dataset("x", data=numbered(), **GZIP)
    with h5py.File(path) as file:
        first = file["x"].id.get_chunk_info_by_coord((36, 0)).byte_offset
        last = file["x"].id.get_chunk_info_by_coord((44, 0))
    with open(path, "r+b") as file:
        file.seek(first)
        file.write(bytes(last.byte_offset + last.size - first))
    return BadFile(path, {"x_key": "x", "y_key": "y"}, {*range(36, 48)}, ROWS, "chunk 9")


def images(path):
    """Encoded images, of which two have lost bytes."""
    pictures = []
    for number in range(24):
        memory = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), number, "u1")).save(memory, "PNG")
        pictures.append(np.frombuffer(memory.getvalue(), "u1"))
    pictures[3], pictures[17] = pictures[3][:20], np.zeros(30, "u1")
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("image", (24,), h5py.vlen_dtype("u1"))
        for number, picture in enumerate(pictures):
            rows[number] = picture
        file["label"] = np.arange(24)
    arguments = {"x_key": "image", "y_key": "label", "decode": {"image": "image"}}
    return BadFile(path, arguments, {3, 17}, 24, "does not decode", {3: "row 3"})


def failing_transform(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=numbered(), **GZIP)
        file["y"] = np.arange(ROWS)
    arguments = {"x_key": "x", "y_key": "y", "transform": refuse_some, "target_transform": refuse_others}
    return BadFile(path, arguments, {7, 30, 31}, ROWS, "ZeroDivisionError: of row 7")


def refuse_some(x):
    if int(x[0]) in (7, 30):
        raise ZeroDivisionError(f"of row {int(x[0])}")
    return x


def refuse_others(y):
    if int(y) in (30, 31):
        raise LookupError(f"of target {int(y)}")
    return y


def segments(path):
    """Eight demonstrations of 12 steps, one of which has a damaged chunk."""
    with h5py.File(path, "w") as file:
        for number in range(8):
            file.create_dataset(f"data/demo_{number}/obs", data=numbered(12), **GZIP)
    damage_chunk(path, "data/demo_3/obs", (4, 0))
    return path


def windows(path):
    arguments = {"x_key": "obs", "segments": "data/*", "window": {"length": 4, "stride": 2}}
    # Windows begin at 0, 2, 4, 6 and 8, and rows 4 to 7 are damaged.
    places = {16: "step 2 of segment 'data/demo_3'"}
    return BadFile(segments(path), arguments, {16, 17, 18}, 40, "chunk 1", places)


def whole_segments(path):
    arguments = {"x_key": "obs", "segments": "data/*", "sample": "segment"}
    return BadFile(segments(path), arguments, {3}, 8, "chunk 1", {3: "segment 'data/demo_3'"})


def patches(path):
    """Two volumes in chunks of 8 cells along each axis, patches of 8 by 8 by 8."""
    with h5py.File(path, "w") as file:
        for number in range(2):
            volume = np.random.default_rng(number).integers(0, 99, (16, 16, 16)).astype("u1")
            file.create_dataset(f"volume{number}", data=volume, chunks=(8, 8, 8), compression="gzip")
    damage_chunk(path, "volume1", (8, 0, 8))
    arguments = {"x_key": "volume*", "patch": {"shape": [8, 8, 8]}}
    return BadFile(path, arguments, {8 + 5}, 16, "volume1")


def sparse_rows(path):
    """Rows of a CSR matrix; the chunk of values that is damaged has those of rows 8 to 11."""
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        chunks = {"chunks": (16,), "compression": "gzip"}
        group.create_dataset("data", data=np.arange(96, dtype="f4"), **chunks)
        group.create_dataset("indices", data=np.tile(np.arange(4), 24), **chunks)
        group["indptr"] = np.arange(0, 97, 4)
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (24, 6)})
    damage_chunk(path, "X/data", (32,))
    return BadFile(path, {"x_key": "X"}, {8, 9, 10, 11}, 24, "X/data")


def referenced_arrays(path):
    """Recordings that a MATLAB cell refers to, a sample each."""
    with h5py.File(path, "w") as file:
        hidden = file.create_group("#refs#")
        pointers = np.empty((1, 9), h5py.ref_dtype)
        for number in range(9):
            rows = hidden.create_dataset(f"r{number}", data=numbered(8), **GZIP)
            rows.attrs["MATLAB_class"] = np.bytes_("double")
            pointers[0, number] = rows.ref
        cell = file.create_dataset("recordings", data=pointers, dtype=h5py.ref_dtype)
        cell.attrs["MATLAB_class"] = np.bytes_("cell")
    damage_chunk(path, "#refs#/r6", (4, 0))
    return BadFile(path, {"x_key": "recordings", "sample": "segment"}, {6}, 9, "chunk 1")


BAD_FILES = {
    make.__name__: make
    for make in (
        chunk_of_rows,
        several_arrays,
        digests_of_contiguous_rows,
        lost_end,
        images,
        failing_transform,
        windows,
        whole_segments,
        patches,
        sparse_rows,
        referenced_arrays,
    )
}
