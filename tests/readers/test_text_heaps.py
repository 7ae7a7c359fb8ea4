"""Text of any length: a heap that the HDF5 library would never get past is an error, and sound ones are read."""

import zlib

import h5py
import numpy as np
import pytest
from factories import Stored

from lightning_h5 import H5CorruptError, H5LazyDataset
from lightning_h5.hdf5.describe import REFERENCE
from lightning_h5.samples import row_table

TEXT = np.array([f"{i} " + "long " * (i % 50) for i in range(300)], dtype=object)
WAYS = {
    "compact": ("compact", None, {}),
    "contiguous": ("contiguous", None, {}),
    "chunked": ("chunked", (40,), {}),
    "gzip": ("chunked", (40,), {"compression": "gzip", "shuffle": True}),
}


def write(make_h5, way, text=TEXT, **how):
    storage, chunks, options = WAYS[way]
    return make_h5(x=np.arange(len(text)), y=Stored(text, storage, chunks, options, dtype=h5py.string_dtype()), **how)


def read(path, rows=None):
    dataset = H5LazyDataset(path, "x", "y")
    return dataset.read_batch(np.arange(len(dataset)) if rows is None else rows)[1]


@pytest.mark.parametrize("how", [{}, {"userblock": 1024}], ids=["", "user block"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "compact"])  # of which no reference is looked at
def test_a_hole_in_a_heap_is_an_error_and_no_endless_loop(make_h5, way, how):
    path = write(make_h5, way, **how)
    with open(path, "r+b") as file:
        content = file.read()
        heap = content.index(b"GCOL")
        file.seek(heap + 512)
        file.write(bytes(512))
    with pytest.raises(H5CorruptError) as error:
        read(path)
    for part in (path, "'y'", "heap of text", f"{heap:,}", "copy it again"):
        assert part in str(error.value)


def test_a_reference_to_no_heap_is_an_error(make_h5):
    path = write(make_h5, "contiguous")
    with h5py.File(path) as file:
        offset = file["y"].id.get_offset()
    with open(path, "r+b") as file:
        file.seek(offset + 7 * 16 + 4)
        file.write((17).to_bytes(8, "little"))
    with pytest.raises(H5CorruptError, match="at byte 17 a heap of text is missing"):
        read(path, [7])


def test_rows_elsewhere_are_read_though_a_heap_is_damaged(make_h5, monkeypatch):
    text = np.array(["x" * 3000] * 200, dtype=object)
    path = make_h5(y=Stored(text, "chunked", (40,), {"compression": "gzip"}, dtype=h5py.string_dtype()))
    first, last = (heaps_of(path, row) for row in (0, 160))
    with open(path, "r+b") as file:
        file.seek(min(last - first))
        file.write(bytes(64))
    monkeypatch.setattr(row_table, "HELD_BYTES", -1)  # text that is held is read whole
    dataset = H5LazyDataset(path, {"y": "y"})
    assert dataset.read_batch([0, 39])["y"] == ["x" * 3000] * 2
    with pytest.raises(H5CorruptError, match="a heap of text is missing"):
        dataset.read_batch(range(160, 200))


def heaps_of(path, first):
    """Where the text of a chunk's rows lies."""
    with h5py.File(path) as file:
        _, stored = file["y"].id.read_direct_chunk((first,))
    return set(np.frombuffer(zlib.decompress(stored), REFERENCE)["address"].tolist())


def test_much_text_that_rows_share_is_read_and_not_kept(make_h5):
    text = np.full(3000, "", dtype=object)
    text[0] = "a" * (1 << 17)
    path = make_h5(
        x=np.arange(3000), y=Stored(text, "chunked", (3000,), {"compression": "gzip"}, dtype=h5py.string_dtype())
    )
    with h5py.File(path, "a") as file:
        array = file["y"].id
        reference = zlib.decompress(array.read_direct_chunk((0,))[1])[:16]
        array.write_direct_chunk((0,), zlib.compress(reference * 3000))
    dataset = H5LazyDataset(path, "x", "y")
    assert dataset.read_batch([0, 1, 2])[1] == ["a" * (1 << 17)] * 3
    assert dataset.kept_bytes < 1 << 20
