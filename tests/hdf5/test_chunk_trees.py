"""Chunk indexes that are read from a file's bytes are those that the library reads."""

import struct

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5.hdf5.chunk_index import chunk_table, tree_table
from lightning_h5.hdf5.object_headers import HeaderFile, header_address, read_header


def both(path):
    """The table of an array by its bytes, and by the library."""
    with h5py.File(path) as handle:
        array, file = handle["x"], HeaderFile.of(handle)
        header = read_header(file, header_address(h5py.h5g.get_objinfo(handle.id, b"x").objno))
        own = tree_table(file.read, header.tree, array.shape, array.chunks, file.user_block)
        return own, chunk_table(array.id, array.shape, array.chunks)


def assert_same(own, other):
    assert own.grid == other.grid
    for name in ("offsets", "sizes", "masks"):
        left, right = getattr(own, name), getattr(other, name)
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_any_chunks_in_any_order(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    chunks = tuple(data.draw(st.integers(1, size)) for size in shape)
    path = tmp_path_factory.mktemp("tree") / "x.h5"
    with h5py.File(path, "w", userblock_size=data.draw(st.sampled_from([0, 512, 4096]))) as file:
        options = data.draw(st.sampled_from([{}, {"compression": "gzip"}, {"fletcher32": True, "shuffle": True}]))
        array = file.create_dataset("x", shape, "i2", chunks=chunks, **options)
        grid = [-(-size // step) for size, step in zip(shape, chunks, strict=True)]
        numbers = data.draw(st.lists(st.integers(0, int(np.prod(grid)) - 1), max_size=300, unique=True))
        for number in numbers:
            corner = tuple(int(at) * step for at, step in zip(np.unravel_index(number, grid), chunks, strict=True))
            size = int(np.prod(chunks)) * 2
            array.id.write_direct_chunk(corner, bytes(size + number % 3), data.draw(st.sampled_from([0, 1])))
    assert_same(*both(path))


@pytest.mark.parametrize("n_chunks", [0, 1, 2, 64, 65, 5000])
def test_trees_of_several_levels(tmp_path, n_chunks):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        array = file.create_dataset("x", (max(1, n_chunks) * 2,), "f4", chunks=(2,), maxshape=(None,))
        for number in np.random.default_rng(0).permutation(n_chunks).tolist():
            array.id.write_direct_chunk((2 * number,), bytes(8))
    own, other = both(tmp_path / "x.h5")
    assert_same(own, other)
    assert (own.offsets >= 0).sum() == n_chunks


@pytest.mark.parametrize("at", [0, 4, 5, 6, 7])  # signature, kind, level, number of entries
@pytest.mark.parametrize("n_chunks", [1, 9])
def test_a_damaged_tree_is_refused(tmp_path, at, n_chunks):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(4 * n_chunks), chunks=(4,))
    octets = bytearray(path.read_bytes())
    place = octets.index(b"TREE\x01")
    octets[place + at] ^= 0x40
    with h5py.File(path) as handle:
        array = handle["x"]
        read = lambda n_bytes, address: bytes(octets[address : address + n_bytes])  # noqa: E731
        with pytest.raises((ValueError, struct.error)):
            tree_table(read, place, array.shape, array.chunks, 0)


@pytest.mark.parametrize("n_chunks", [1, 9, 40])
def test_a_tree_that_is_cut_off_between_two_entries_is_refused(tmp_path, n_chunks):
    """Chunks that lack an entry would read as fill values."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(4 * n_chunks), chunks=(4,))
    octets = path.read_bytes()
    place, entry_bytes = octets.index(b"TREE\x01"), 8 + 8 * 3  # size and mask; corner, its end and the chunk's address
    octets = octets[: place + 24 + (n_chunks - 1) * entry_bytes]
    read = lambda n_bytes, address: octets[address : address + n_bytes]  # noqa: E731
    with pytest.raises((ValueError, struct.error)):
        tree_table(read, place, (4 * n_chunks,), (4,), 0)
