"""The names in a file, each with its kind, shape and dtype, whether or not the array was opened."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5.hdf5 import contents, entries_of

STORAGES: list[dict[str, Any]] = [{}, {"chunks": True}, {"chunks": True, "maxshape": True}, {"compression": "gzip"}]
ATTRIBUTES: list[dict[str, Any]] = [{}, {"units": "m"}, {"units": "s"}, {f"note {n}": n for n in range(12)}]


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    """Few values of each setting, so that two arrays often differ in one thing alone."""
    shape = (draw(st.integers(0, 3)), *draw(st.sampled_from([(), (2,), (3,)])))
    return {
        "name": f"{draw(st.sampled_from(['a', 'b']))}{draw(st.sampled_from(['', '1', '02']))}",
        "shape": shape if draw(st.integers(0, 9)) else (),
        "dtype": draw(st.sampled_from(["<f4", "<f4", "<i4", "S4", h5py.string_dtype()])),
        "storage": draw(st.sampled_from(STORAGES)),
        "attributes": draw(st.sampled_from(ATTRIBUTES)),
        "is_written": draw(st.booleans()),
        "linked": draw(st.sampled_from([None, None, None, "hard", "soft"])),
    }


def write(path: Path, groups: Sequence[Sequence[dict[str, Any]]], libver: str) -> None:
    with h5py.File(path, "w", libver=libver) as file:
        for number, made in enumerate(groups):
            group = file.create_group(f"part{number}")
            for one in made:
                name, shape, storage = one["name"], one["shape"], dict(one["storage"])
                if not all(shape) or not shape:
                    storage = {}
                if "maxshape" in storage:
                    storage["maxshape"] = (None, *shape[1:])
                if name in group:
                    continue
                array = group.create_dataset(name, shape, one["dtype"], **storage)
                array.attrs.update(one["attributes"])
                if one["is_written"] and one["dtype"] in ("<f4", "<i4"):
                    array[...] = 1
                if one["linked"] == "hard":
                    group[f"{name}_again"] = array
                elif one["linked"] == "soft":
                    group[f"{name}_again"] = h5py.SoftLink(array.name)


@settings(max_examples=examples(60))
@given(groups=st.lists(st.lists(arrays(), max_size=4), max_size=6), libver=st.sampled_from(["earliest", "latest"]))
def test_each_entry_is_as_by_h5py(groups: list[list[dict[str, Any]]], libver: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.h5"
        write(path, groups, libver)
        with h5py.File(path) as file:
            found = {entry.name: entry for entry in entries_of(file)}
            links = {f"{name}/{child}" for name in file for child in file[name]}
            assert set(found) == {*file, *links}
            first_names: dict[Any, str] = {}
            for name, entry in found.items():
                if entry.kind == "soft link":
                    assert entry.target == file.get(name, getlink=True).path
                    continue
                item = file[name]
                first = first_names.setdefault(h5py.h5o.get_info(item.id).addr, name)
                if first != name:
                    assert (entry.kind, entry.target) == ("hard link", first)
                    continue
                assert entry.n_attributes == len(item.attrs)
                if isinstance(item, h5py.Dataset):
                    words = "text" if item.dtype.kind == "O" else str(item.dtype)
                    assert (entry.kind, entry.shape) == ("array", item.shape)
                    assert entry.dtype.startswith(words) or item.dtype.kind == "S"


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_an_array_whose_header_was_seen_is_not_opened(
    tmp_path: Path, libver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "a.h5", []
    with h5py.File(path, "w", libver=libver) as file:
        for number in range(9):
            array = file.create_dataset(f"part{number}/x{number}", data=np.ones((number + 1, 2)))
            array.attrs["scale"] = 2  # a text would lie outside of the header, at a place of its own
    shape_of = contents.shape_of
    monkeypatch.setattr(contents, "shape_of", lambda array: opened.append(array) or shape_of(array))
    with h5py.File(path) as file:
        arrays = [entry for entry in entries_of(file) if entry.kind == "array"]
    assert [entry.shape for entry in arrays] == [(number + 1, 2) for number in range(9)]
    assert {(entry.dtype, entry.n_attributes) for entry in arrays} == {("float64", 1)}
    assert len(opened) == 1


@pytest.mark.parametrize("field", ["place", "size"])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_an_array_that_the_library_refuses_is_not_taken_for_one_that_was_seen(
    tmp_path: Path, libver: str, field: str
) -> None:
    """Old headers have no checksum: the library computes the size, and newer releases look whether the file has it."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver=libver) as file:
        places = [file.create_dataset(f"x{number}", data=np.ones((5, 2))).id.get_offset() for number in range(3)]
    data = path.read_bytes()
    at = data.index(places[-1].to_bytes(8, "little") + (80).to_bytes(8, "little")) + (0 if field == "place" else 8)
    path.write_bytes(data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :])
    with h5py.File(path) as file:
        by_library = [name for name in file if _opens(file, name)]
        found = [entry.name for entry in entries_of(file) if entry.kind == "array"]
    assert found == by_library
    if libver == "latest" or field == "size":
        assert ("x2" in by_library) == (libver == "earliest")


def _opens(file: h5py.File, name: str) -> bool:
    try:
        file[name]
    except (OSError, KeyError):
        return False
    return True
