"""How often the HDF5 library is asked: each call on a compressed array may decode a chunk."""

import h5py
import numpy as np
import pytest
from factories import Stored
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import H5CorruptError
from lightning_h5.counters import Counters
from lightning_h5.hdf5 import OpenOptions, find_array, layout_of, open_h5
from lightning_h5.readers import H5pyReader


@pytest.fixture
def asked(monkeypatch):
    """What was asked of h5py arrays, in order."""
    calls = []
    real = h5py.Dataset.__getitem__

    def getitem(array, args, *more, **options):
        calls.append(args)
        return real(array, args, *more, **options)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", getitem)
    return calls


def reader_of(path, counters=None):
    with open_h5(path) as file:
        return H5pyReader(layout_of(find_array(file, "x"), path, "x"), OpenOptions(), counters)


def assert_slices(calls):
    """Never a list of rows: h5py's fancy indexing is several times slower than single reads."""
    assert all(isinstance(call, slice) and call.step is None for call in calls)


@given(rows=st.lists(st.integers(0, 99), min_size=1, max_size=80))
def test_one_call_for_each_chunk_that_holds_many_rows(make_h5, rows):
    with pytest.MonkeyPatch.context() as patch:
        path = make_h5(x=Stored(np.arange(300).reshape(100, 3), "chunked", (10, 2), {"compression": "gzip"}))
        reader = reader_of(path)
        calls = []
        real = h5py.Dataset.__getitem__
        patch.setattr(h5py.Dataset, "__getitem__", lambda a, key, *m, **o: calls.append(key) or real(a, key, *m, **o))
        assert reader.read(np.array(rows))[:, 0].tolist() == [3 * row for row in rows]
        assert_slices(calls)
        assert sorted(call.start // 10 for call in calls) == sorted({row // 10 for row in rows})
        assert all(call.start // 10 == (call.stop - 1) // 10 for call in calls)


def test_one_call_for_a_run_of_rows_where_chunks_hold_one(make_h5, asked):
    path = make_h5(x=Stored(np.arange(300).reshape(100, 3), "chunked", (1, 3), {"compression": "gzip"}))
    reader = reader_of(path)
    rows = [50, 3, 1, 2, 51, 52, 2, 99]
    assert reader.read(np.array(rows))[:, 0].tolist() == [3 * row for row in rows]
    assert_slices(asked)
    assert [(call.start, call.stop) for call in asked] == [(1, 4), (50, 53), (99, 100)]


def test_a_member_of_a_table_is_read_without_the_others(make_h5, asked):
    table = np.zeros(40, dtype=[("a", "i4"), ("b", "f8", (100,))])
    table["a"] = range(40)
    path = make_h5(x=Stored(table, "chunked", (10,)))
    with open_h5(path) as file:
        reader = H5pyReader(layout_of(find_array(file, "x/a"), path, "x/a"), OpenOptions())
    assert reader.read(np.array([35, 5, 6])).tolist() == [35, 5, 6]
    assert len(asked) == 2
    assert_slices(asked)


def test_no_rows_ask_for_nothing(make_h5, asked):
    reader = reader_of(make_h5(x=Stored(np.arange(8), "chunked", (4,))))
    assert reader.read(np.array([], dtype=np.int64)).shape == (0,)
    assert asked == []


def test_whole_chunks_are_counted_as_read_and_decoded(make_h5):
    counters = Counters()
    reader = reader_of(make_h5(x=Stored(np.arange(25, dtype="i8"), "chunked", (10,))), counters)
    reader.read(np.array([3]))
    assert counters.total()["bytes_decoded"] == 80
    reader.read(np.array([24, 24]))  # the edge chunk has five rows
    assert counters.total()["bytes_decoded"] == 80 + 40
    assert counters.total()["bytes_read"] > 0


@pytest.mark.parametrize(
    "values", [["Ada", "Bo", "Jörg"], [["Ada", "Bo"], ["Al", "Ed"], ["Jörg", "Bo"]]], ids=["1-D", "2-D"]
)
@pytest.mark.parametrize("kind", ["S5", h5py.string_dtype("ascii")], ids=["fixed", "variable"])
def test_text_that_is_not_utf8_is_an_error_with_its_row(tmp_path, values, kind):
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.char.encode(values, "latin-1").astype(kind))
    reader = reader_of(path)
    assert reader.read([1, 0]).ravel()[-1] in ("Ada", "Bo")
    with pytest.raises(H5CorruptError, match=r"text in row 2 of 'x' .* is not UTF-8"):
        reader.read([0, 2, 1])
