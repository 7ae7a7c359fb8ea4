"""Arrays are vouched for by digests beside their file, or beside what it is a link to; advice is such as can work."""

import os

import h5py
import numpy as np
import pytest
from factories import Stored, edit

from lightning_h5 import H5CorruptError, H5FileError, H5LazyDataset, H5ValueError
from lightning_h5.hdf5 import digests_path, find_array, layout_of, open_h5
from lightning_h5.tools.check import check_files

ROWS = np.arange(240, dtype="f4").reshape(40, 6)


@pytest.fixture
def path(make_h5):
    return make_h5(x=Stored(ROWS, "chunked", (7, 6), {"compression": "gzip"}))


@pytest.fixture
def link(path, tmp_path):
    (tmp_path / "links").mkdir()
    name = str(tmp_path / "links" / "link.h5")
    os.symlink(path, name)
    return name


def rows_of(path):
    return np.stack(
        H5LazyDataset(
            path,
            "x",
            files={"verify": "digest"},
        ).__getitems__(range(40))
    )


def test_a_level_that_no_copy_has_is_not_promised_of_one(path):
    with pytest.raises(H5ValueError) as error:
        H5LazyDataset(
            path,
            "x",
            files={"min_integrity": 4},
        )
    assert "repack" not in str(error.value)
    assert "Write digests by `lightning-h5 check --write-digests` and pass verify='digest'" in str(error.value)
    with pytest.raises(H5ValueError, match=r"Make a copy by `lightning-h5 repack .* level 3. Write digests by"):
        H5LazyDataset(path, "x", files={"min_integrity": 3})


def test_digests_beside_the_target_of_a_link_are_found(path, link):
    check_files(path, write_digests=True)
    assert (rows_of(link) == ROWS).all()
    with h5py.File(path) as file:
        edit(path, file["x"].id.get_chunk_info(3).byte_offset + 9)
    with pytest.raises(H5CorruptError):
        rows_of(link)
    assert "digest" in {problem.kind for problem in check_files(link).errors}


def test_digests_beside_a_link_go_before_those_beside_its_target(path, link):
    check_files(path, write_digests=True)
    check_files(link, write_digests=True)
    assert os.path.exists(digests_path(link))
    os.truncate(digests_path(path), 0)
    assert (rows_of(link) == ROWS).all()


def test_where_digests_of_a_link_were_looked_for_is_said(path, link):
    with pytest.raises(H5FileError) as error:
        H5LazyDataset(
            link,
            "x",
            files={"verify": "digest"},
        )
    for part in (repr(link), repr(digests_path(link)), repr(digests_path(path)), "--write-digests"):
        assert part in str(error.value)


MEMBERS = np.dtype(
    [("a", "<f4"), ("b", ">i2", (3,)), ("flag", "?"), ("m", "f8", (2, 2)), ("text", h5py.string_dtype())]
)


@pytest.mark.parametrize("how", [{}, {"chunks": (4,)}, {"chunks": (4,), "compression": "gzip"}], ids=str)
@pytest.mark.parametrize("names", [["a", "b", "flag", "m"], ["a", "b", "text"]], ids=" ".join)
def test_a_member_made_of_its_table_is_that_which_is_found_by_its_name(tmp_path, how, names):
    path = str(tmp_path / "table.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("g/x", (10,), np.dtype([(name, MEMBERS[name]) for name in names]), **how)
    with open_h5(path) as file:
        table = layout_of(find_array(file, "g/x"), path, "g/x")
        for name in names[:2]:
            alone = layout_of(find_array(file, f"g/x/{name}"), path, f"g/x/{name}")
            assert table.member(name) == alone
            assert (alone.table is None) == (table.table is None)
