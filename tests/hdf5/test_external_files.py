"""The files beside its own that an array has rows from: all of them are found, however they are reached."""

import os

import h5py
import numpy as np
import pytest

from lightning_h5 import FileOptions
from lightning_h5.errors import H5FileError
from lightning_h5.hdf5 import external_guards, open_h5

TRUSTING = FileOptions(allow_external=True)
ROWS = np.arange(12.0).reshape(6, 2)


def virtual(path, sources, name="v"):
    """A file with an array that is made of others, one after the other."""
    layout = h5py.VirtualLayout((len(sources) * len(ROWS), 2), "f8")
    for at, (file, source) in enumerate(sources):
        layout[at * len(ROWS) : (at + 1) * len(ROWS)] = h5py.VirtualSource(file, source, ROWS.shape, "f8")
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset(name, layout)


@pytest.fixture
def folder(tmp_path):
    for name in ("part_0.h5", "part_1.h5", "linked.h5"):
        with h5py.File(tmp_path / name, "w") as file:
            file["g/x"] = ROWS
    with h5py.File(tmp_path / "main.h5", "w") as file:
        file["own"] = ROWS
        file["link"] = h5py.ExternalLink("linked.h5", "/g/x")
        file["below"] = h5py.ExternalLink("linked.h5", "/g")
        file.create_dataset("stored", ROWS.shape, "f8", external=[(str(tmp_path / "raw.bin"), 0, ROWS.nbytes)])[:] = (
            ROWS
        )
    virtual(tmp_path / "main.h5", [("part_0.h5", "g/x"), (".", "own"), ("part_1.h5", "g/x")], "over")
    virtual(tmp_path / "nested.h5", [("part_1.h5", "g/x")])
    virtual(tmp_path / "main.h5", [(".", "over"), ("nested.h5", "v")], "over all")
    with h5py.File(tmp_path / "part_1.h5", "a") as file:
        file["link"] = h5py.ExternalLink("linked.h5", "/g/x")
    virtual(tmp_path / "main.h5", [("part_1.h5", "link")], "over link")
    return tmp_path


def others(folder, *keys, files=TRUSTING):
    with open_h5(str(folder / "main.h5")) as file:
        guards = external_guards(file, keys, files)
    assert all(os.path.dirname(guard.path) == str(folder) for guard in guards)
    for guard in guards:
        guard.check()
    return [os.path.basename(guard.path) for guard in guards]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["own"], []),
        (["link"], ["linked.h5"]),
        (["below/x"], ["linked.h5"]),
        (["stored"], ["raw.bin"]),
        (["over"], ["part_0.h5", "part_1.h5"]),
        (["over all"], ["part_0.h5", "part_1.h5", "nested.h5"]),
        (["over link"], ["part_1.h5", "linked.h5"]),
        (["link", "own", "over", "below/x"], ["linked.h5", "part_0.h5", "part_1.h5"]),
    ],
    ids=lambda value: ", ".join(value) or "none",
)
def test_all_files_that_rows_come_from_are_found_each_once(folder, keys, expected):
    assert others(folder, *keys) == expected


def test_nothing_is_looked_for_where_nothing_is_followed(folder):
    assert others(folder, "own", files=FileOptions()) == []


def test_of_a_pattern_of_names_the_files_that_are_there_are_found(folder):
    unlimited = h5py.h5s.UNLIMITED
    with h5py.File(folder / "main.h5", "a") as file:
        create, step = h5py.h5p.create(h5py.h5p.DATASET_CREATE), ROWS.shape
        space = h5py.h5s.create_simple((12, 2), (unlimited, 2))
        space.select_hyperslab((0, 0), (unlimited, 1), step, step)
        create.set_virtual(space, b"part_%b.h5", b"g/x", h5py.h5s.create_simple(step))
        whole = h5py.h5s.create_simple((12, 2), (unlimited, 2))
        h5py.h5d.create(file.id, b"pattern", h5py.h5t.IEEE_F64LE, whole, create)
    assert others(folder, "pattern") == ["part_0.h5", "part_1.h5"]


def test_storage_that_is_gone_is_named(folder):
    os.unlink(folder / "raw.bin")
    with pytest.raises(H5FileError, match=r"raw\.bin' *, which cannot be accessed: No such file"):
        others(folder, "stored")
