"""Virtual arrays are read as training would read them, and rows that are made of nothing are told of."""

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import H5CorruptError, H5KeyError, H5LazyDataset
from lightning_h5.hdf5 import links
from lightning_h5.hdf5.links import unmapped_rows
from lightning_h5.tools.check import check_files

FILL = -1
VALUES = np.arange(256, dtype="f4").reshape(64, 4)


def found(report):
    return [(p.severity, p.kind, p.array) for p in (*report.errors, *report.warnings)]


def map_whole(file, source, shape):
    layout = h5py.VirtualLayout(shape, "f4")
    layout[:] = h5py.VirtualSource(".", source, shape, "f4")
    file.create_virtual_dataset("x", layout)


BROKEN = {
    "a table's member": (np.ones(64, [("a", "f4"), ("b", "f4")]), "s/a", (64,)),
    "too few rows": (VALUES[:10], "s", (64, 4)),
    "text": (np.array([b"abc"] * 64), "s", (64,)),
}


@pytest.mark.parametrize("options", [{}, {"keys": ["x"]}], ids=["all", "by name"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_virtual_array_that_cannot_be_trained_from_is_an_error(tmp_path, kind, options):
    path = str(tmp_path / "v.h5")
    values, source, shape = BROKEN[kind]
    with h5py.File(path, "w") as file:
        file["s"] = values
        map_whole(file, source, shape)
    with pytest.raises((H5CorruptError, H5KeyError)):
        H5LazyDataset(path, "x").__getitems__(range(64))
    (problem,) = check_files(path, **options).errors
    assert problem.array == "x"


def test_the_error_of_a_virtual_array_says_what_to_look_at(tmp_path):
    path = str(tmp_path / "v.h5")
    with h5py.File(path, "w") as file:
        file["s"] = VALUES[:10]
        map_whole(file, "s", (64, 4))
    (problem,) = check_files(path).errors
    assert problem.kind == "virtual"
    assert problem.text.startswith("it is virtual, and cannot be read from row 0 on: ")
    assert "Check its sources" in problem.text


def test_a_damaged_chunk_is_an_error_of_its_array_and_of_the_virtual_one_over_it(tmp_path):
    path = str(tmp_path / "v.h5")
    with h5py.File(path, "w") as file:
        array = file.create_dataset("s", data=VALUES, chunks=(8, 4), compression="gzip")
        array.id.write_direct_chunk((8, 0), b"no gzip at all")
        map_whole(file, "s", (64, 4))
    assert found(check_files(path)) == [("error", "decode", "s"), ("error", "virtual", "x")]
    with pytest.raises(H5CorruptError):
        H5LazyDataset(path, "x").__getitems__(range(64))


def test_rows_that_are_made_of_nothing_are_a_warning(tmp_path):
    path = str(tmp_path / "v.h5")
    with h5py.File(path, "w") as file:
        file["s"] = VALUES
        layout = h5py.VirtualLayout((128, 4), "f4")
        layout[:64] = h5py.VirtualSource(".", "s", (64, 4), "f4")
        file.create_virtual_dataset("x", layout, fillvalue=7)
    for decode in (True, False):
        (problem,) = check_files(path, decode=decode).warnings
        assert (problem.kind, problem.array) == ("unwritten", "x")
        assert "64 of 128 rows have no source, in part at least: they read as the fill value 7.0" in problem.text


@given(data=st.data())
@settings(max_examples=examples(150))
def test_rows_made_of_nothing_are_those_that_read_as_the_fill_value(tmp_path_factory, data):
    shape = (data.draw(st.integers(1, 12)), *data.draw(st.lists(st.integers(1, 4), max_size=2)))
    path = tmp_path_factory.mktemp("v") / "v.h5"
    layout = h5py.VirtualLayout(shape, "i4")
    taken = np.zeros(shape, bool)
    for _ in range(data.draw(st.integers(0, 4))):
        where = tuple(
            slice(data.draw(st.integers(0, size)), data.draw(st.integers(0, size)), data.draw(st.integers(1, 3)))
            for size in shape
        )
        if data.draw(st.booleans()):
            where = (sorted(data.draw(st.sets(st.integers(0, shape[0] - 1), min_size=1))), *where[1:])
        piece = np.zeros(shape)[where].shape
        if 0 in piece or taken[where].any():
            continue
        taken[where] = True
        layout[where] = h5py.VirtualSource(".", "s", shape, "i4")[tuple(slice(size) for size in piece)]
    with h5py.File(path, "w") as file:
        file["s"] = np.zeros(shape, "i4")
        array = file.create_virtual_dataset("x", layout, fillvalue=FILL)
        expected = (array[()] == FILL).reshape(shape[0], -1).any(axis=1).sum() if taken.any() else shape[0]
        assert not array.is_virtual or unmapped_rows(array) == expected


def test_a_virtual_array_that_grows_is_looked_at_up_to_its_present_end(tmp_path):
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("s", data=VALUES, maxshape=(None, 4))
        layout = h5py.VirtualLayout((64, 4), "f4", maxshape=(None, 4))
        source = h5py.VirtualSource(file["s"])
        layout[: h5py.h5s.UNLIMITED, :] = source[: h5py.h5s.UNLIMITED, :]
        assert unmapped_rows(file.create_virtual_dataset("x", layout)) == 0
        layout = h5py.VirtualLayout((64, 4), "f4", maxshape=(None, 4))
        layout[: h5py.h5s.UNLIMITED, 1:] = source[: h5py.h5s.UNLIMITED, 1:]
        assert unmapped_rows(file.create_virtual_dataset("part", layout)) == 64


def test_a_mapping_of_too_many_pieces_is_said_to_be_unknown(tmp_path, monkeypatch):
    path = str(tmp_path / "v.h5")
    with h5py.File(path, "w") as file:
        file["s"] = VALUES
        layout = h5py.VirtualLayout((64, 4), "f4")
        for first in (0, 1):
            layout[first::2] = h5py.VirtualSource(".", "s", (64, 4), "f4")[first::2]
        file.create_virtual_dataset("x", layout)
    assert found(check_files(path)) == []
    monkeypatch.setattr(links, "MAX_RUNS", 63)
    (problem,) = check_files(path).warnings
    assert "too many pieces to check" in problem.text


def test_arrays_in_other_files_are_said_to_be_not_read(tmp_path):
    path = str(tmp_path / "v.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["s"] = VALUES
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((64, 4), "f4")
        layout[:] = h5py.VirtualSource("other.h5", "s", (64, 4), "f4")
        file.create_virtual_dataset("v", layout)
        file["link"] = h5py.ExternalLink("other.h5", "/s")
    texts = {problem.array: problem.text for problem in check_files(path, keys=["v"]).warnings}
    assert "its rows lie in 'other.h5', and were not read. Check that by itself" in texts["v"]
    (problem, _) = check_files(path, keys=["link"]).warnings
    assert "its rows lie in the file that a link leads to, and were not read" in problem.text
