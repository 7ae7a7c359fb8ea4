"""The chunk table says of every chunk what the HDF5 library says of it, and is read once."""

import itertools
import os
import pickle

import h5py
import numpy as np
import pytest
from factories import Stored, known_filters, random_values
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5.datasets import H5LazyDataset
from lightning_h5.hdf5 import find_array, layout_of, open_h5
from lightning_h5.hdf5.chunk_index import chunk_table


def look(path, key="x"):
    with open_h5(path) as file:
        return layout_of(find_array(file, key), path, key)


@st.composite
def grids(draw):
    """Chunked arrays whose chunks are partly never written, in files with each kind of chunk index."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    maxshape = draw(st.sampled_from(["any", "first", "fixed"])) if all(shape) else "any"
    chunks = tuple(draw(st.integers(1, max(1, size))) for size in shape)
    values = random_values("i2", shape, 3)
    filters = draw(st.sampled_from([(), ("gzip",), ("shuffle", "lzf"), ("lzf", "fletcher32")]))
    stored = Stored(values, "chunked", chunks, maxshape=maxshape, filters=filters)
    if maxshape == "fixed":
        stored.early = draw(st.booleans())
    grid = [-(-size // step) for size, step in zip(shape, chunks, strict=True)]
    mask = st.one_of(st.none(), st.integers(0, (1 << len(filters)) - 1))
    n = int(np.prod(grid))
    stored.masks = draw(st.one_of(st.just([None] * n), st.lists(mask, min_size=n, max_size=n)))
    libver = draw(st.sampled_from(["earliest", "latest", ("v108", "v110"), ("v110", "latest")]))
    return stored, {"userblock": draw(st.sampled_from([0, 512])), "libver": libver}


def assert_is_what_the_library_says(path, key="x"):
    table = look(path, key).table
    with h5py.File(path) as file:
        array = file[key]
        grid = tuple(-(-size // step) for size, step in zip(array.shape, array.chunks, strict=True))
        assert table.grid == grid
        assert table.per_row == int(np.prod(grid[1:]))
        found = {
            tuple(np.array(info.chunk_offset) // array.chunks): info
            for info in map(array.id.get_chunk_info, range(array.id.get_num_chunks()))
        }
    assert {len(table.offsets), len(table.sizes), len(table.masks)} == {int(np.prod(grid))}
    for at, place in enumerate(itertools.product(*map(range, grid))):
        info = found.pop(place, None)
        assert (table.sizes[at], table.masks[at]) == ((0, 0) if info is None else (info.size, info.filter_mask))
        if info is None:
            assert table.offsets[at] == -1
        else:
            # The bytes decide: what older libraries call a chunk's place leaves the user block out.
            with h5py.File(path) as file, open(path, "rb") as raw:
                assert table.offsets[at] in (info.byte_offset, info.byte_offset + file.userblock_size)
                raw.seek(table.offsets[at])
                stored = file[key].id.read_direct_chunk(tuple(info.chunk_offset))[1]
                assert raw.read(info.size) == stored
    assert found == {}
    return table


@given(grids())
@settings(max_examples=examples(80))
def test_a_table_says_what_the_library_says_of_each_chunk(make_h5, drawn):
    stored, file = drawn
    path = make_h5(x=stored, **file)
    table = assert_is_what_the_library_says(path)
    if not stored.early:
        assert (table.offsets >= 0).tolist() == [mask is not None for mask in stored.masks]
    # Rows that no filter changed are read where they lie.
    skip_all = table.masks == (1 << len(stored.filters)) - 1
    is_plain = bool((skip_all & (table.offsets >= 0)).all())
    assert look(path).is_contiguous == (is_plain and stored.chunks[1:] == stored.values.shape[1:])
    os.unlink(path)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_an_array_that_grew_or_shrank_has_the_chunks_of_its_present_shape(make_h5, libver):
    values = random_values("i4", (20, 9))
    path = make_h5(x=Stored(values, "chunked", (3, 4), {"compression": "gzip"}), libver=libver)
    for shape in ((11, 9), (30, 9), (30, 13), (7, 3), (2, 2), (0, 2), (8, 8)):
        with h5py.File(path, "a") as file:
            file["x"].resize(shape)
        assert_is_what_the_library_says(path)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_chunks_that_moved_when_they_were_written_again_are_found(make_h5, libver):
    path = make_h5(x=Stored(np.zeros((40, 64), "i4"), "chunked", (4, 64), {"compression": "gzip"}), libver=libver)
    with h5py.File(path, "a") as file:
        for start in (36, 4, 20):
            file["x"][start : start + 4] = random_values("i4", (4, 64), start)
    assert_is_what_the_library_says(path)


def test_a_table_of_many_chunks_is_built_once_and_travels_as_bare_numbers(make_h5, monkeypatch):
    n_chunks, calls = 20_000, []
    path = make_h5(x=Stored(np.arange(n_chunks, dtype="u2"), "chunked", (1,)), y=np.arange(n_chunks))
    monkeypatch.setattr(
        "lightning_h5.hdf5.describe.chunk_table", lambda *args, **more: calls.append(args) or chunk_table(*args, **more)
    )
    dataset = H5LazyDataset(path, "x", "y")
    rows = np.array([19_999, 0, 777])
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 20 * n_chunks + 20_000  # two numbers of eight bytes and one of four
    for _ in range(2):
        for mine in (dataset, pickle.loads(pickled)):
            assert mine.read_batch(rows)[0].tolist() == rows.tolist()
            mine.close()
            assert mine.read_batch(rows)[0].tolist() == rows.tolist()
    assert len(calls) == 1


def test_an_array_without_a_table_is_not_looked_for_chunks(make_h5, monkeypatch):
    """Odd formats are the library's; their index, of maybe a million chunks, is not read."""
    monkeypatch.setattr("lightning_h5.hdf5.describe.chunk_table", lambda *args, **more: pytest.fail("it was read"))
    path = make_h5(contiguous=np.arange(4), fixed=Stored(np.array([b"a"] * 4), "chunked", (2,)))
    assert [look(path, key).table for key in ("contiguous", "fixed")] == [None] * 2


def test_every_filter_that_can_be_written_here_is_tried(make_h5):
    """What ``known_filters`` lists can be written, and the library reads it: else other tests would skip in silence."""
    values = np.resize(np.arange(7, dtype="i4"), (12, 40))
    for name in known_filters():
        path = make_h5(x=Stored(values, "chunked", (5, 16), filters=(name,)))
        with h5py.File(path) as file:
            assert np.array_equal(file["x"], values)
        assert [f.id for f in look(path).filters] == [known_filters()[name][0]]
