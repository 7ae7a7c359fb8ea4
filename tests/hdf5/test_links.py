"""Looking arrays up: what may be named, what is refused because it leaves the file, and what errors say."""

import os

import h5py
import numpy as np
import pytest
from factories import assert_same_rows

from lightning_h5 import FileOptions, LazyH5DataModule
from lightning_h5.errors import H5Error, H5FileError, H5KeyError, H5ValueError
from lightning_h5.hdf5 import OpenOptions, find_array, layout_of, list_arrays, open_h5
from lightning_h5.readers import open_reader
from lightning_h5.tools.check import check_files

MINE, THEIRS = np.arange(100.0, 106.0), np.arange(6.0)


def rows(path, key, allow_external=False, **how):
    """All rows by the way of a dataset: looked up once, then read by a reader that opens the file itself."""
    with open_h5(path) as file:
        layout = layout_of(find_array(file, key, FileOptions(allow_external=allow_external)), path, key)
    reader = open_reader(layout, OpenOptions(files=FileOptions(allow_external=allow_external)), **how)
    return reader.read(np.arange(len(reader))[::-1])[::-1]


@pytest.fixture
def files(make_h5):
    """A file that leaves itself in every way, and the other file. Names inside the two collide on purpose."""
    table = np.zeros(6, [("a", "f8"), ("b", "i4")])
    table["a"] = THEIRS
    other = make_h5({"group/data": THEIRS, "data": THEIRS, "table": table}, name="other.h5")
    path = make_h5({"group/data": MINE, "data": MINE, "table": np.zeros(3, [("a", "f8")])}, name="main.h5")
    with h5py.File(path, "a") as file:
        file["inside"] = h5py.SoftLink("/group/data")
        file["group/beside"] = h5py.SoftLink("data")
        file["inside/"[:-1] + "2"] = h5py.SoftLink("inside")
        file["group_link"] = h5py.SoftLink("/group")
        file["table_link"] = h5py.SoftLink("table")
        file["hard"] = file["group/data"]
        file["outside"] = h5py.ExternalLink("other.h5", "/data")
        file["outside_group"] = h5py.ExternalLink("other.h5", "/group")
        file["outside_table"] = h5py.ExternalLink("other.h5", "/table")
        file["soft_outside"] = h5py.SoftLink("/outside")
        file["soft_outside_group"] = h5py.SoftLink("/outside_group")
        file["lost"] = h5py.ExternalLink("gone.h5", "/data")
        file["dangling"] = h5py.SoftLink("/elsewhere/data")
        file["round"] = h5py.SoftLink("/and_round")
        file["and_round"] = h5py.SoftLink("/round")
        layout = h5py.VirtualLayout((6,), "f8")
        layout[:] = h5py.VirtualSource(other, "data", (6,))
        file.create_virtual_dataset("virtual", layout)
        layout = h5py.VirtualLayout((6,), "f8")
        layout[:] = h5py.VirtualSource(os.path.join(os.path.dirname(other), "gone.h5"), "data", (6,))
        file.create_virtual_dataset("virtual_lost", layout)
        layout = h5py.VirtualLayout((6,), "f8")
        layout[:] = h5py.VirtualSource(".", "virtual", (6,))
        file.create_virtual_dataset("virtual_over_virtual", layout)
        layout = h5py.VirtualLayout((6,), "f8")
        layout[:] = h5py.VirtualSource(".", "not_there", (6,))
        file.create_virtual_dataset("virtual_over_nothing", layout)
        layout = h5py.VirtualLayout((6,), "f8")
        layout[:] = h5py.VirtualSource(".", "virtual_over_itself", (6,))
        file.create_virtual_dataset("virtual_over_itself", layout)
        raw = os.path.join(os.path.dirname(other), "raw.bin")
        THEIRS.tofile(raw)
        file.create_dataset("external_storage", (6,), "f8", external=[(raw, 0, 48)])
        file["scalar"] = 3.0
        file["no_shape"] = h5py.Empty("f8")
        file["named_type"] = np.dtype("f4")
        file.create_group("empty_group")
    return path


@pytest.mark.parametrize("allow_external", [False, True])
@pytest.mark.parametrize(
    "key",
    ["data", "/group/data", "group//./data", "inside", "inside2", "group/beside", "group_link/data", "hard"],
)
def test_links_inside_the_file_are_followed(files, key, allow_external):
    assert_same_rows(rows(files, key, allow_external), MINE)


@pytest.mark.parametrize("allow_external", [False, True])
def test_a_member_is_found_through_a_link_to_its_table(files, allow_external):
    assert rows(files, "table_link/a", allow_external).tolist() == [0.0, 0.0, 0.0]


FOREIGN = {
    "outside": "external link.*other.h5",
    "outside_group/data": "external link.*other.h5",
    "soft_outside": "external link.*other.h5",
    "soft_outside_group/data": "external link.*other.h5",
    "outside_table/a": "external link.*other.h5",
    "external_storage": "keeps its bytes in other files: .*raw.bin",
    "virtual": "virtual array over other files.*other.h5",
    "virtual_over_virtual": "virtual array over other files.*other.h5",
}


@pytest.mark.parametrize("key", FOREIGN)
def test_an_array_that_leaves_the_file_is_refused(files, key):
    with pytest.raises(H5ValueError, match=FOREIGN[key]) as error, open_h5(files) as file:
        find_array(file, key)
    assert "main.h5" in str(error.value)
    assert "allow_external=True" in str(error.value)


@pytest.mark.parametrize("how", [{}, {"held_bytes": 1 << 20}, {"mmap": True}], ids=["", "held", "mmap"])
@pytest.mark.parametrize("key", FOREIGN)
def test_an_array_that_leaves_the_file_is_read_rightly_where_that_is_allowed(files, key, how):
    """Both files have arrays of these names at these offsets, so a mix-up would read the wrong numbers."""
    assert_same_rows(rows(files, key, allow_external=True, **how), THEIRS)


def test_a_way_round_the_links_does_not_get_past_the_second_look(files):
    """Whatever lookup says, an object that lies in another file is refused."""
    with h5py.File(files) as file:
        from lightning_h5.hdf5.checks import check_in_file

        with pytest.raises(H5ValueError, match="lies in another file"):
            check_in_file(file, file["outside"], "outside")


@pytest.mark.parametrize("allow_external", [False, True])
@pytest.mark.parametrize("key", ["round", "dangling", "virtual_over_nothing", "virtual_over_itself"])
def test_links_that_lead_nowhere_end_in_an_error_that_names_them(files, key, allow_external):
    with pytest.raises(H5Error, match=rf"'{key}' in |is not in") as error, open_h5(files) as file:
        find_array(file, key, FileOptions(allow_external=allow_external))
    assert "main.h5" in str(error.value)


@pytest.mark.parametrize("key", ["lost", "virtual_lost"])
def test_a_missing_other_file_is_an_error_not_fill_values(files, key):
    with pytest.raises(H5FileError, match=rf"'{key}'.*(gone\.h5|other file)"), open_h5(files) as file:
        find_array(file, key, FileOptions(allow_external=True))


def test_a_dangling_link_names_its_target(files):
    with (
        pytest.raises(H5KeyError, match="soft link to '/elsewhere/data', which does"),
        open_h5(files) as file,
    ):
        find_array(file, "dangling")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("group", "'group' in .* is a group.*'group/data'.*Name one of them, such as 'group/data'"),
        ("/", "is a group"),
        ("empty_group", "is a group.*nothing"),
        ("scalar", "'scalar' in .* is a scalar"),
        ("no_shape", "'no_shape' in .* has no shape"),
        ("named_type", "'named_type' in .* is a named datatype"),
    ],
)
def test_what_is_not_an_array_of_rows_is_refused_with_what_to_name_instead(files, key, words):
    with pytest.raises(H5ValueError, match=words), open_h5(files) as file:
        find_array(file, key)


@pytest.mark.parametrize(
    ("key", "guess"),
    [("dta", "data"), ("group/dat", "group/data"), ("Group/Data", "group/data"), ("images/scalr", "scalar")],
)
def test_a_missing_key_lists_the_arrays_and_a_near_match(files, key, guess):
    with pytest.raises(H5KeyError) as error, open_h5(files) as file:
        find_array(file, key)
    text = str(error.value)
    assert text.startswith(f"{key!r} is not in {files!r}. ")
    assert "arrays" in text
    assert f"Did you mean {guess!r}?" in text
    assert "'group/data'" in text


def test_a_missing_member_lists_the_members(make_h5):
    path = make_h5({"t": np.zeros(3, [("label", "i4"), ("deep", [("x", "f4")])]), "flat": np.zeros(3)})
    with open_h5(path) as file:
        with pytest.raises(H5KeyError, match=r"'/t' is an array .* members 'label', 'deep'. Did you mean 'label'"):
            find_array(file, "t/labl")
        with pytest.raises(H5KeyError, match="has the members 'x'"):
            find_array(file, "t/deep/y")
        with pytest.raises(H5KeyError, match="has no members"):
            find_array(file, "flat/x")
        with pytest.raises(H5KeyError, match="has no members"):
            find_array(file, "t/label/x")
        assert find_array(file, "t/deep/x").members == ("deep", "x")


def test_arrays_are_listed_without_leaving_the_file(files):
    with open_h5(files) as file:
        names = list_arrays(file)
    assert {"data", "table", "virtual", "scalar"} <= set(names)
    assert not any("outside" in name for name in names)


def test_a_number_format_that_numpy_does_not_know_is_named(make_h5):
    path = make_h5()
    with h5py.File(path, "a") as file:
        odd = h5py.h5t.STD_I32LE.copy()
        odd.set_size(3)
        h5py.h5d.create(file.id, b"x", odd, h5py.h5s.create_simple((5,)))
    with pytest.raises(H5ValueError, match=rf"'x' in '{path}' has a number format"), open_h5(path) as file:
        find_array(file, "x")


def test_names_that_are_not_utf8_are_refused_by_name(make_h5):
    path, latin = make_h5(y=np.arange(5)), "temp\u00e9rature".encode("latin-1")
    with h5py.File(path, "a") as file:
        file[latin] = np.arange(5.0)
        kind = h5py.h5t.create(h5py.h5t.COMPOUND, 12)
        kind.insert(latin, 0, h5py.h5t.NATIVE_FLOAT)
        kind.insert(b"v", 4, h5py.h5t.NATIVE_DOUBLE)
        h5py.h5d.create(file.id, b"table", kind, h5py.h5s.create_simple((5,)))
    for key in (os.fsdecode(latin), "table", "table/v"):
        with pytest.raises(H5ValueError, match=r"name that is not UTF-8.* (Rename it|Write it again)") as error:
            LazyH5DataModule(path, x_key=key, y_key="y").setup("fit")
        assert r"temp\xe9rature" in str(error.value)
    report = check_files(path)
    assert not report.errors
    assert [problem.kind for problem in report.warnings] == ["not read"] * 2
    assert all("not UTF-8" in problem.text for problem in report.warnings)


def test_errors_are_builtin_ones_too_and_print_as_written(files):
    with pytest.raises(KeyError) as error, open_h5(files) as file:
        find_array(file, "nothing like it")
    assert not str(error.value).startswith(("'\"", '"'))


def test_a_virtual_array_over_a_tables_member_is_refused(make_h5):
    """HDF5 finds nothing there: older versions of it read fill values."""
    path = make_h5()
    with h5py.File(path, "a") as file:
        file["t"] = np.ones(20, [("a", "f4"), ("b", "f4")])
        layout = h5py.VirtualLayout((20,), "f4")
        layout[:] = h5py.VirtualSource(".", "t/a", (20,), "f4")
        file.create_virtual_dataset("x", layout)
    with (
        pytest.raises(H5KeyError, match=r"'x' in .* over 't/a' in .*"),
        open_h5(path) as file,
    ):
        find_array(file, "x")
