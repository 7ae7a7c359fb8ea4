"""Rows counted along any axes, or parts of an array: equal to what NumPy takes of the whole array."""

import itertools
import os

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import OPTIONS, look

from lightning_h5.counters import Counters
from lightning_h5.errors import H5Error
from lightning_h5.hdf5 import layout
from lightning_h5.readers import TaskQueue, open_chunked, open_reader
from lightning_h5.readers.contiguous import RunsReader

NUMBERS = itertools.count()  # no example writes to a file that is open

TABLE = np.dtype([("a", "f4"), ("b", "i2", (2,))])


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    storage = draw(st.sampled_from(["contiguous", "gzip", "gzip", "chunks", "virtual", "table", "big", "text", "none"]))
    chunks = tuple(draw(st.integers(1, n)) for n in shape)
    axes = draw(st.permutations(range(len(shape))))
    row_axes = tuple(axes[: draw(st.integers(0, min(2, len(shape))))])
    taken = {}
    for axis in axes[len(row_axes) :]:
        n = shape[axis]
        bounds = st.none() | st.integers(-n, n)
        slices = st.builds(slice, bounds, bounds, st.none() | st.integers(1, 3))
        slices = slices.filter(lambda one, n=n: len(range(n)[one]))  # an empty one is refused
        indices = st.lists(st.integers(-n, n - 1), min_size=1, max_size=5)
        if (one := draw(st.none() | st.integers(-n, n - 1) | slices | indices)) is not None:
            taken[axis] = one
    return shape, storage, chunks, row_axes, taken


def write(path, shape, storage, chunks):
    rng = np.random.default_rng(0)
    values = rng.integers(-1000, 1000, shape).astype({"big": ">i4", "text": "i2"}.get(storage, "f4"))
    with h5py.File(path, "w") as file:
        if storage == "table":
            whole = np.zeros(shape, TABLE)
            whole["a"], whole["b"] = values, values[..., None]
            file.create_dataset("x", data=whole, chunks=chunks, compression="gzip")
            return whole["b"], "x/b"
        if storage == "text":
            values = values.astype(str).astype(object)
            file.create_dataset("x", data=values, dtype=h5py.string_dtype(), chunks=chunks)
        elif storage == "virtual":
            file["source"] = values
            layout = h5py.VirtualLayout(shape, "f4")
            layout[...] = h5py.VirtualSource(file["source"])
            file.create_virtual_dataset("x", layout)
        elif storage == "none":
            file.create_dataset("x", shape, "f4", chunks=chunks, compression="gzip", fillvalue=3)
            return np.full(shape, 3, "f4"), "x"
        else:
            how = {"gzip": {"compression": "gzip", "chunks": chunks}, "chunks": {"chunks": chunks}}.get(storage, {})
            file.create_dataset("x", data=values, **how)
    return values, "x"


def expected_rows(values, row_axes, taken):
    """The rows as NumPy has them: taken axis by axis, with the axes of rows in front."""
    for axis in sorted(taken, reverse=True):
        values = values[(slice(None),) * axis + (taken[axis],)]
    gone = [axis for axis, one in taken.items() if isinstance(one, int)]
    front = [axis - sum(other < axis for other in gone) for axis in row_axes]
    moved = np.moveaxis(values, front, range(len(front)))
    return moved.reshape(-1, *moved.shape[len(front) :])


@pytest.fixture(params=[layout.MIN_RUN, 1], ids=["short runs by the library", "all runs by position"])
def min_run(request, monkeypatch):
    monkeypatch.setattr(layout, "MIN_RUN", request.param)


@pytest.mark.usefixtures("min_run")
@given(cases(), st.data())
def test_rows_of_a_view_are_what_numpy_takes(tmp_path, case, data):
    shape, storage, chunks, row_axes, taken = case
    path = str(tmp_path / f"{next(NUMBERS)}.h5")
    values, key = write(path, shape, storage, chunks)
    expected = expected_rows(values, row_axes, taken)
    view = look(path, key).seen(row_axes, taken)
    assert view.row_shape == expected.shape[1:]
    rows = np.array(data.draw(st.lists(st.integers(0, view.n_rows - 1), max_size=9)), np.int64)
    for held_bytes in (0, 1 << 20):
        found = open_reader(view, OPTIONS, held_bytes=held_bytes).read(rows)
        np.testing.assert_array_equal(found, expected[rows])
    if storage == "text":
        return
    for n_blocks in (0, 1, 2, 1000):
        counters = Counters()
        n_bytes = n_blocks * view.rows_per_chunk * view.row_bytes
        more = {"rows_per_run": [3], "n_bytes": n_bytes, "work": TaskQueue(), "counters": counters}
        reader = open_chunked([view], OPTIONS, **more)
        np.testing.assert_array_equal(reader.read(rows), expected[rows])
        if n_blocks == 1000 and len(rows):
            everything = reader.read(np.arange(view.n_rows))
            np.testing.assert_array_equal(everything, expected)
            assert reader.map.rows_of_blocks().sum() == view.n_rows


def test_long_parts_of_rows_are_read_by_position_and_a_missing_byte_names_its_row(tmp_path):
    path = str(tmp_path / "fields.h5")
    with h5py.File(path, "w") as file:
        file["fields"] = values = np.random.default_rng(0).random((5, 21, 91, 60), "f4")
        offset = file["fields"].id.get_offset()
    view = look(path, "fields").seen((0,), {1: slice(20), 2: slice(90)})
    counters = Counters()
    reader = open_reader(view, OPTIONS, counters=counters)
    assert type(reader) is RunsReader
    np.testing.assert_array_equal(reader.read(np.array([3, 0, 3])), values[[3, 0, 3], :20, :90])
    assert counters.total()["bytes_read"] == 3 * 20 * 90 * 60 * 4
    assert open_reader(look(path, "fields").seen((0,), {3: slice(30)}), OPTIONS).layout.runs is None, "runs are short"
    os.truncate(path, offset + 4 * values[0].nbytes)
    with pytest.raises(H5Error, match="row 4"):
        reader.read(np.array([1, 4]))


def test_arrays_of_several_files_are_numbered_one_after_the_other(tmp_path):
    views, expected = [], []
    for number, shape in enumerate([(4, 9), (3, 5), (1, 12)]):
        path = str(tmp_path / f"{number}.h5")
        with h5py.File(path, "w") as file:
            values = np.arange(np.prod(shape)).reshape(shape) + 1000 * number
            file.create_dataset("x", data=values, chunks=(min(2, shape[0]), 4), compression="gzip")
        views.append(look(path).seen((0, 1)))
        expected.append(values.reshape(-1))
    expected = np.concatenate(expected)
    reader = open_chunked(views, OPTIONS, rows_per_run=[3] * 3, n_bytes=1 << 20, work=TaskQueue(), counters=Counters())
    rows = np.random.default_rng(0).permutation(len(expected))
    np.testing.assert_array_equal(reader.read(rows), expected[rows])


@pytest.mark.parametrize("n_channels", [1, 3])
def test_each_chunk_of_a_recording_is_decoded_once(tmp_path, n_channels):
    path = str(tmp_path / "x.h5")
    values = np.random.default_rng(0).standard_normal((4, 100)).astype("f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(n_channels, 10), compression="gzip")
    counters = Counters()
    view = look(path).seen((1,))
    reader = open_chunked([view], OPTIONS, rows_per_run=[3], n_bytes=1 << 20, work=TaskQueue(), counters=counters)
    for start in range(0, 95, 5):
        np.testing.assert_array_equal(reader.read(np.arange(start, start + 6)), values.T[start : start + 6])
    assert counters.total()["chunks_decoded"] == 10 * -(-4 // n_channels)


def test_only_chunks_with_something_taken_are_decoded(tmp_path):
    path = str(tmp_path / "x.h5")
    values = np.random.default_rng(0).standard_normal((6, 20, 30)).astype("f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(1, 5, 10), compression="gzip")
    for taken, n_chunks in [({1: [3, 1], 2: slice(10)}, 1), ({1: 7}, 3), ({2: [0, 29]}, 8)]:
        counters = Counters()
        view = look(path).seen((0,), taken)
        reader = open_chunked([view], OPTIONS, rows_per_run=[3], n_bytes=1 << 20, work=TaskQueue(), counters=counters)
        reader.read(np.array([2]))
        assert counters.total()["chunks_decoded"] == n_chunks
