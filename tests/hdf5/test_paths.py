"""From what a user passes as a path to a list of files."""

import errno
import os
import re
import resource

import h5py
import pytest
from factories import run_forked
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.errors import H5FileError, H5ValueError
from lightning_h5.hdf5 import expand_paths, open_h5
from lightning_h5.natural_order import natural_order


def from_here(paths):
    """The paths as seen from the working directory, after looking that they do not depend on it."""
    assert all(os.path.isabs(path) for path in paths)
    return tuple(os.path.relpath(path) for path in paths)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("b.h5", "a.hdf5", "c.h5ad", "notes.txt", "10.h5", "9.h5"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_is_itself_as_str_or_path(folder):
    assert from_here(expand_paths("b.h5")) == ("b.h5",)
    assert expand_paths(folder / "b.h5") == (str(folder / "b.h5"),)
    assert from_here(expand_paths("notes.txt")) == ("notes.txt",)  # a name says little about the content


def test_a_directory_gives_its_hdf5_files_sorted(folder):
    assert [os.path.basename(path) for path in expand_paths(folder)] == ["9.h5", "10.h5", "a.hdf5", "b.h5", "c.h5ad"]


def test_a_glob_gives_its_files_sorted(folder):
    assert from_here(expand_paths("*.h5")) == ("9.h5", "10.h5", "b.h5")
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "z.h5").touch()
    assert from_here(expand_paths("**/z.h5")) == (os.path.join("deep", "er", "z.h5"),)


@given(st.lists(st.text("ab_-/09", min_size=1), unique=True), st.integers(1, 9))
def test_names_are_sorted_as_text_but_numbers_in_them_by_value(names, width):
    padded = {re.sub("[0-9]+", lambda number: f"{int(number[0]):020}", name): name for name in names}
    expected = [padded[name] for name in sorted(padded)]
    found = sorted(names, key=natural_order)
    assert [name for name in found if name in expected] == expected  # of equal numbers one is in the mapping
    numbers = [f"m_{'9' * 5000}.h5", *(f"m_{at:0{width}}.h5" for at in range(1200, 0, -7))]
    assert sorted(numbers, key=natural_order) == numbers[::-1]


@given(st.lists(st.integers(0, 9999), unique=True), st.integers(1, 4))
def test_decimals_in_names_are_sorted_by_value(numbers, places):
    values = sorted({round(number / 10_000, places) for number in numbers})
    names = [f"tcool_{value}.hdf5" for value in values if "e" not in f"{value}"]
    assert sorted(names, key=natural_order) == names
    padded = [f"t{value * 40:.4f}/x" for value in values]
    assert sorted(padded, key=natural_order) == padded
    versions = ["v1.9", "v1.10", "v2.0.1", "v2.0.10", "v10.1"]
    assert sorted(versions, key=natural_order) == versions


def test_a_list_keeps_its_order_and_may_hold_globs_and_directories(folder):
    (folder / "more").mkdir()
    (folder / "more" / "x.h5").touch()
    assert from_here(expand_paths(["notes.txt", "?.h5", "more"])) == (
        "notes.txt",
        "9.h5",
        "b.h5",
        os.path.join("more", "x.h5"),
    )


def test_a_file_whose_name_looks_like_a_glob_is_taken_as_a_file(folder):
    (folder / "run[1].h5").touch()
    assert from_here(expand_paths("run[1].h5")) == ("run[1].h5",)


def test_the_home_directory_may_be_written_as_a_tilde(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert expand_paths("~/b.h5") == (str(folder / "b.h5"),)


@pytest.mark.parametrize(
    "paths",
    [
        *(["b.h5", "b.h5"], ["b.h5", "*.h5"], ["b.h5", "./b.h5"], [".", "b.h5"], ["b.h5", "link.h5"]),
        *(["b.h5", "hard.h5"], ["link.h5", "hard.h5", "b.h5"], "*.h5", "."),
    ],
    ids=[
        *("same name", "in a glob", "other spelling", "in a directory", "symbolic link"),
        *("hard link", "both links", "links in a glob", "links in a directory"),
    ],
)
def test_a_file_that_is_named_twice_is_refused(folder, paths):
    if "link.h5" in paths:
        os.symlink("b.h5", "link.h5")
    if "hard.h5" in paths or paths in ("*.h5", "."):
        os.link("b.h5", "hard.h5")
    with pytest.raises(H5ValueError, match=r"'\S*b\.h5'.* more than once"):
        expand_paths(paths)


def test_files_without_inode_numbers_are_told_apart_by_their_names(folder, monkeypatch):
    look = os.stat

    def without_inodes(path, **how):
        found = list(look(path, **how))
        found[1] = 0
        return os.stat_result(found)

    monkeypatch.setattr("os.stat", without_inodes)
    (folder / "c.h5").touch()
    assert from_here(expand_paths(["b.h5", "c.h5"])) == ("b.h5", "c.h5")
    with pytest.raises(H5ValueError, match="more than once"):
        expand_paths(["b.h5", "./b.h5"])


@pytest.mark.parametrize("paths", [[], ()])
def test_an_empty_list_is_refused(paths):
    with pytest.raises(H5ValueError, match=r"train_path=.* names no file"):
        expand_paths(paths, "train_path")


def test_a_missing_file_names_what_is_there_and_what_was_perhaps_meant(folder):
    with pytest.raises(H5FileError) as error:
        expand_paths("a.hdf", "val_path")
    for part in ("val_path='a.hdf' does not exist", "'c.h5ad'", "Did you mean 'a.hdf5'?", str(folder)):
        assert part in str(error.value)


@pytest.mark.parametrize("missing", ["nothing.h5", "notes.text", "secrets.yml"])
def test_a_missing_file_names_the_hdf5_files_that_exist_and_no_others(folder, missing):
    """By suffix or signature: what else lies in a folder is no data, and does not belong into a log."""
    for name in (".hidden.h5", "secrets.yaml"):
        (folder / name).touch()
    os.mkfifo(folder / "pipe")
    for name, block in (("run.dat", 0), ("run.nc", 512), ("no_suffix", 2048)):
        with h5py.File(folder / name, "w", userblock_size=block) as file:
            file["x"] = [1]
    with pytest.raises(H5FileError) as error:
        expand_paths(missing)
    files = ("9.h5", "10.h5", "a.hdf5", "b.h5", "c.h5ad", "no_suffix", "run.dat", "run.nc")
    assert f"'.' has the HDF5 files {', '.join(map(repr, files))}." in str(error.value)
    assert not any(name in str(error.value) for name in ("notes.txt", "secrets.yaml", ".hidden", "pipe"))


def test_a_missing_file_in_a_folder_without_hdf5_files_says_so_and_names_a_folder_that_was_perhaps_meant(folder):
    (folder / "runs").mkdir()
    (folder / "runs" / "training").mkdir()
    (folder / "runs" / "notes.txt").touch()
    with pytest.raises(H5FileError, match=r"'runs' has no HDF5 files\. Did you mean 'training'\?"):
        expand_paths("runs/trainings")


def test_a_directory_with_very_many_files_is_not_looked_through_for_a_message(folder, monkeypatch):
    looked_at = []
    monkeypatch.setattr("lightning_h5.hdf5.paths._has_signature", lambda path: looked_at.append(path))
    for number in range(1000):
        (folder / f"{number:04}.txt").touch()
    with pytest.raises(H5FileError, match="the HDF5 files '9"):
        expand_paths("nothing.h5")
    assert len(looked_at) == 200


def test_one_file_is_not_called_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File("other.dat", "w"):
        pass
    with pytest.raises(H5FileError, match=r"has the HDF5 file 'other\.dat'\."):
        expand_paths("rows.h5")


def test_a_missing_directory_is_named(folder):
    with pytest.raises(H5FileError, match="there is no directory 'nowhere'"):
        expand_paths("nowhere/a.h5")


def test_a_glob_without_a_match_and_a_directory_without_hdf5_files_are_refused(folder):
    with pytest.raises(H5FileError, match=r"'\*\.nothing' matches no file; '\.' has the HDF5 files '9\.h5'"):
        expand_paths("*.nothing")
    with pytest.raises(H5FileError, match=r"'no/\*\.h5' matches no file; there is no directory 'no'"):
        expand_paths("no/*.h5")
    (folder / "empty").mkdir()
    (folder / "empty" / "readme.md").touch()
    with pytest.raises(H5FileError, match=r"directory without HDF5 files \(\*\.h5.*\)\. Pass an HDF5 file") as error:
        expand_paths("empty")
    assert "readme.md" not in str(error.value)


def test_the_advice_for_a_directory_without_hdf5_names_can_be_followed(folder):
    (folder / "runs" / "one").mkdir(parents=True)
    (folder / "runs" / "one" / "a.h5").touch()
    with pytest.raises(H5FileError) as error:
        expand_paths("runs")
    assert "its folders 'one' are not searched" in str(error.value)
    assert from_here(expand_paths(advised(error))) == (os.path.join("runs", "one", "a.h5"),)
    with h5py.File(folder / "runs" / "a.dat", "w"):
        pass
    with pytest.raises(H5FileError) as error:
        expand_paths("runs")
    assert "by other names it has 'a.dat'" in str(error.value)
    assert from_here(expand_paths(advised(error))) == (os.path.join("runs", "a.dat"),)


def advised(error):
    """The path that an error's last words name."""
    return re.search(r"'([^']*)'\.$", str(error.value))[1]


def test_a_dangling_symbolic_link_is_refused(folder):
    os.symlink("gone.h5", "dangling.h5")
    with pytest.raises(H5FileError, match=r"'dangling\.h5' does not exist"):
        expand_paths("dangling.h5")


def test_a_fifo_is_refused_without_hanging(folder):
    """Opening a FIFO for reading waits for somebody to write into it."""
    os.mkfifo(folder / "pipe.h5")
    with pytest.raises(H5FileError, match=r"pipe\.h5' is not a regular file"):
        expand_paths("pipe.h5")
    with pytest.raises(H5FileError, match=r"pipe\.h5' is not a regular file"):
        open_h5(str(folder / "pipe.h5"))


def test_a_later_change_of_the_working_directory_leads_nowhere_else(folder, monkeypatch):
    paths = expand_paths("b.h5")
    monkeypatch.chdir("/")
    assert os.path.exists(paths[0])


def test_hidden_files_of_a_directory_are_left_out(tmp_path):
    for name in ("a.h5", "._a.h5"):
        (tmp_path / name).touch()
    assert expand_paths(tmp_path) == (str(tmp_path / "a.h5"),)


@pytest.mark.parametrize("paths", [5, b"a.h5", {"a.h5"}, [None]])
def test_what_is_no_path_is_refused(paths):
    with pytest.raises(H5ValueError, match="neither a path nor a list"):
        expand_paths(paths)


def test_a_directory_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(H5FileError, match="cannot be listed: Permission denied"):
        expand_paths(tmp_path)


CURES = {
    errno.EMFILE: r"Raise `ulimit -n`",
    errno.ENFILE: r".*fs\.file-max",
    errno.ENOMEM: "Free some memory",
    errno.EIO: "Check the disk",
    errno.EACCES: "Check the permissions of the path",
}


@pytest.mark.parametrize("number", CURES, ids=errno.errorcode.get)
@pytest.mark.parametrize("path", [".", "*.nothing", "gone.h5"], ids=["directory", "glob", "missing file"])
def test_what_keeps_a_directory_from_being_looked_into_has_its_own_remedy(folder, monkeypatch, number, path):
    def refuse(path):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(H5FileError, match=rf"cannot be listed: {os.strerror(number)}\. {CURES[number]}"):
        expand_paths(path)


def test_a_directory_without_a_descriptor_left_says_to_raise_the_limit(folder):
    def scan():
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        for path in (".", "*.h5"):
            with pytest.raises(H5FileError, match=r"cannot be listed: Too many open files\. Raise `ulimit -n`"):
                expand_paths(path)

    assert run_forked(scan) == 0
