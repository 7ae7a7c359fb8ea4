"""The change guard (was this file touched?) and the identity (do two files hold the same?)."""

import os
import shutil

import h5py
import numpy as np
import pytest
from factories import edit, make_older

from lightning_h5.errors import H5DataChangedError
from lightning_h5.hdf5 import ChangeGuard, file_identity, find_array, layout_of, open_h5


@pytest.fixture
def path(make_h5):
    path = make_h5(x=np.arange(1000), y=np.arange(10))
    make_older(path)
    return path


def identity(path, *keys):
    with open_h5(path) as file:
        return file_identity(path, [layout_of(find_array(file, key), path, key) for key in keys])


def replace(path):
    shutil.copy(path, path + ".new")
    os.replace(path + ".new", path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: os.truncate(path, 100), "had [0-9,]+ bytes and has 100"),
        (lambda path: edit(path, 3000), "was written to"),
        (replace, "was replaced by another file"),
        (os.unlink, "existed when training was set up and cannot be found"),
    ],
    ids=["truncate", "edit", "replace", "delete"],
)
def test_a_file_that_was_touched_is_noticed(path, change, words):
    guard = ChangeGuard.of(path)
    guard.check()
    change(path)
    with pytest.raises(H5DataChangedError, match=words) as error:
        guard.check()
    assert path in str(error.value)


def test_a_file_that_hides_that_it_was_written_to_is_noticed_where_digests_are_relied_on(path):
    guard, before = ChangeGuard.of(path, strict=True), os.stat(path)
    with open(path, "r+b") as file:
        file.write(b"\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(H5DataChangedError, match="was written to and had its time reset"):
        guard.check()


def test_reading_and_renaming_back_is_no_change(path):
    guard = ChangeGuard.of(path)
    with open_h5(path) as file:
        file["x"][:]
    os.rename(path, path + ".away")
    os.rename(path + ".away", path)
    guard.check()


def test_copies_have_the_same_identity_whatever_their_name_and_time(path, tmp_path):
    copy = str(tmp_path / "elsewhere.h5")
    shutil.copyfile(path, copy)
    assert identity(copy, "x", "y") == identity(path, "x", "y")


def test_every_byte_of_a_small_file_counts(path):
    before = identity(path, "x")
    with h5py.File(path) as file:
        offset = file["x"].id.get_offset()
    for at in (offset, offset + 3999, offset + 7999):
        edit(path, at)
        assert identity(path, "x") != before
        edit(path, at)
        assert identity(path, "x") == before


def test_the_ends_of_a_large_file_count(make_h5):
    path = make_h5(x=np.zeros(1 << 20, "u1"))
    before = identity(path, "x")
    edit(path, os.path.getsize(path) - 1)
    assert identity(path, "x") != before


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.attrs.create("note", 1),
        lambda file: file["x"].write_direct(np.arange(1000)[::-1].copy()),
        lambda file: file.move("x", "z") or file.move("y", "x"),
    ],
    ids=["attribute", "content", "other array of that name"],
)
def test_an_edit_through_the_library_changes_the_identity(path, change):
    before = identity(path, "x")
    with h5py.File(path, "a") as file:
        change(file)
    assert identity(path, "x") != before


def test_the_arrays_used_are_part_of_the_identity(path):
    assert len({identity(path, "x"), identity(path, "y"), identity(path, "x", "y"), identity(path, "y", "x")}) == 4


def test_the_same_numbers_stored_otherwise_have_another_identity(make_h5):
    same = {"a.h5": np.arange(10, dtype="i8"), "b.h5": np.arange(10, dtype="i4"), "c.h5": np.arange(10, dtype=">i8")}
    assert len({identity(make_h5(x=values, name=name), "x") for name, values in same.items()}) == 3


def test_what_other_files_hold_is_part_of_the_identity_and_their_names_are_not(path, make_h5, tmp_path):
    other, copy = make_h5(x=np.arange(5)), str(tmp_path / "copy.h5")
    shutil.copyfile(other, copy)
    before = file_identity(path, [], others=[other])
    assert before != file_identity(path, [])
    assert before == file_identity(path, [], others=[copy])
    edit(copy, 2048)
    assert before != file_identity(path, [], others=[copy])
