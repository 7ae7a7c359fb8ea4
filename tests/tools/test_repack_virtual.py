"""Copies of virtual arrays, of arrays that claim more than they have, and of groups without end."""

import errno
import os

import h5py
import numpy as np
import pytest

from lightning_h5.errors import H5CorruptError, H5FileError, H5ValueError
from lightning_h5.tools.repack import repack_file
from lightning_h5.tools.repack.copy import FileCopy

ROWS = np.arange(10)


def show(file, name, *sources, rows=10, dtype="i8", fill=None):
    """A virtual array of the rows of others, each ``(file, array)``, one after the other."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if fill is not None:
        plist.set_fill_value(np.array(fill))
    for at, (where, array) in enumerate(sources):
        space = h5py.h5s.create_simple((rows * len(sources),))
        space.select_hyperslab((at * rows,), (rows,))
        plist.set_virtual(space, where.encode(), array.encode(), h5py.h5s.create_simple((rows,)))
    stored = dtype.id if isinstance(dtype, h5py.Datatype) else h5py.h5t.py_create(np.dtype(dtype))
    h5py.h5d.create(file.id, name.encode(), stored, h5py.h5s.create_simple((rows * len(sources),)), plist)


@pytest.fixture
def other(make_h5):
    return make_h5({"x": ROWS + 100}, name="other.h5")


@pytest.fixture
def path(make_h5):
    return make_h5({"x": ROWS, "y": ROWS})


def test_a_virtual_array_that_stays_so_keeps_type_fill_and_attributes(path, other):
    with h5py.File(path, "a") as file:
        file["type"] = np.dtype("i8")
        file.create_dataset("typed", data=ROWS, dtype=file["type"])
        show(file, "v", (".", "typed"), (other, "x"), dtype=file["type"], fill=7)
        file["v"].attrs["unit"] = "mm"
        show(file, "references", (".", "nowhere"), dtype=h5py.ref_dtype)
    repack_file(path, path + ".copy", compression="gzip", verify=True)
    with h5py.File(path + ".copy") as copy:
        assert copy["v"][:].tolist() == [*ROWS, *(ROWS + 100)]
        assert copy["v"].fillvalue == 7
        assert copy["v"].attrs["unit"] == "mm"
        assert copy["v"].dtype == copy["type"].dtype == np.dtype("i8")
        assert sorted(copy) == ["references", "type", "typed", "v", "x", "y"]


@pytest.mark.parametrize("change", ["source", "fill"])
def test_another_description_is_found_by_verify(path, other, monkeypatch, change):
    with h5py.File(path, "a") as file:
        show(file, "v", (other, "x"), fill=7)
    copy_attributes = FileCopy.copy_attributes

    def spoil(made):
        copy_attributes(made)
        del made.copy["v"]
        show(made.copy, "v", (other, "y" if change == "source" else "x"), fill=7 if change == "source" else 8)

    monkeypatch.setattr(FileCopy, "copy_attributes", spoil)
    with pytest.raises(H5CorruptError, match=r"'v'.* differs from it in its sources"):
        repack_file(path, path + ".copy", verify=True)
    assert not os.path.exists(path + ".copy")


@pytest.mark.parametrize("more", [{}, {"shuffle_rows": 0, "shuffle_keys": ["x"]}])
@pytest.mark.parametrize("kind", ["contiguous", "chunked", "virtual"])
def test_arrays_that_claim_far_more_than_is_stored_need_a_word(path, kind, more):
    rows = 1 << 30
    with h5py.File(path, "a") as file:
        if kind == "virtual":
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            space = h5py.h5s.create_simple((rows,))
            space.select_hyperslab((0,), (10,))
            plist.set_virtual(space, b".", b"x", h5py.h5s.create_simple((10,)))
            h5py.h5d.create(file.id, b"v", h5py.h5t.NATIVE_INT64, h5py.h5s.create_simple((rows,)), plist)
        else:
            file.create_dataset("v", (rows,), "i8", chunks=(1 << 20,) if kind == "chunked" else None)
    if kind == "virtual":
        if not more:
            repack_file(path, path + ".copy", verify=True)  # of which only its sources are compared
        return
    for way in ({"compression": "gzip"}, {"verify": True}):
        with pytest.raises(H5ValueError, match=r"'v' in .* 8\.00 GiB.*trusted=True"):
            repack_file(path, path + ".copy", **way, **more)
    repack_file(path, path + ".copy", compression="gzip", trusted=True, **more)
    with h5py.File(path + ".copy") as copy:
        assert copy["v"].shape == (rows,)
        assert copy["v"].id.get_storage_size() == 0


def test_large_chunks_need_a_word(path):
    with h5py.File(path, "a") as file:
        file.create_dataset("v", (1 << 28,), "i8", chunks=((1 << 27) + 1,))
    with pytest.raises(H5ValueError, match=r"'v' in .* has chunks of 1\.00 GiB.*trusted=True"):
        repack_file(path, path + ".copy", rows_per_chunk=1000)
    repack_file(path, path + ".copy", rows_per_chunk=1000, trusted=True)
    with h5py.File(path + ".copy") as copy:
        assert copy["v"].chunks == (1000,)


def test_groups_without_end_are_refused_and_deep_ones_are_copied(tmp_path):
    for levels, is_refused in ((1002, True), (300, False)):
        path = str(tmp_path / f"{levels}.h5")
        with h5py.File(path, "w", libver="latest") as file:
            group = file.id
            for _ in range(levels):
                group = h5py.h5g.create(group, b"g")
            h5py.Group(group)["x"] = ROWS
        if is_refused:
            with pytest.raises(H5ValueError, match="more than 1,000 deep"):
                repack_file(path, path + ".copy")
        else:
            repack_file(path, path + ".copy", verify=True)
            with h5py.File(path + ".copy") as copy:
                assert np.array_equal(copy["g/" * levels + "x"], ROWS)


# What is not opened -----------------------------------------------------------------------------------------


def leave(path, other):
    """Adds arrays whose rows are in another file, by each way that there is."""
    with h5py.File(path, "a") as file:
        show(file, "v", (other, "x"))
        file["link"] = h5py.ExternalLink(other, "/x")
        file.create_dataset("bytes", (4,), "f4", external=[("raw.bin", 0, 16)])


@pytest.mark.parametrize("argument", ["keys", "shuffle_keys"])
@pytest.mark.parametrize("key", ["v", "link", "bytes"])
def test_what_lies_in_other_files_is_refused_with_advice_that_repack_can_take(path, other, key, argument):
    leave(path, other)
    options = {"keys": [key]} if argument == "keys" else {"shuffle_rows": 0, "shuffle_keys": [key]}
    with pytest.raises(
        H5ValueError, match=rf"'{key}'.*[Rr]epack (the other files|these|that file).* leave it out"
    ) as error:
        repack_file(path, path + ".copy", **options)
    assert "allow_external" not in str(error.value)
    assert not os.path.exists(path + ".copy")


def test_a_virtual_array_over_its_own_file_is_refused_by_name_as_well(path):
    with h5py.File(path, "a") as file:
        show(file, "v", (".", "x"))
    with pytest.raises(H5ValueError, match=r"'v' is in keys, but is virtual and remains so\. Leave it out of keys"):
        repack_file(path, path + ".copy", keys=["v"])


# What could not be done -------------------------------------------------------------------------------------


def test_a_table_with_a_name_that_is_no_utf8_is_copied(path):
    with h5py.File(path, "a") as file:
        table = h5py.h5t.create(h5py.h5t.COMPOUND, 8)
        table.insert(b"\xff\xfe", 0, h5py.h5t.NATIVE_FLOAT)
        h5py.h5d.create(file.id, b"t", table, h5py.h5s.create_simple((5,)))
    repack_file(path, path + ".copy", verify=True)
    with h5py.File(path + ".copy") as copy:
        assert h5py.h5d.open(copy.id, b"t").get_type() == table


CAUSES = {
    "full": (OSError(errno.ENOSPC, "No space left on device"), "make room on the disk"),
    "full, as HDF5 says it": (OSError(f"write failed, errno = {errno.EDQUOT}, quota"), "make room on the disk"),
    "memory": (MemoryError(), "see the sizes in `lightning-h5 inspect`"),
    "memory, as HDF5 says it": (OSError("Can't read data (memory allocation failed for chunk)"), "see the sizes in"),
    "a broken disk": (OSError(errno.EIO, "Input/output error"), "look for damage .* check the disk"),
    "damage": (RuntimeError("wrong checksum"), "look for damage"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_to_do_follows_from_what_could_not_be_done(path, monkeypatch, cause):
    error, advice = CAUSES[cause]

    def fail(tree):
        raise error

    monkeypatch.setattr(FileCopy, "copy_structure", fail)
    with pytest.raises(H5FileError, match=rf"could not be copied to .*Nothing is left of the copy; .*{advice}") as told:
        repack_file(path, path + ".copy")
    assert ("room" in str(told.value)) == cause.startswith("full")
    assert not os.path.exists(path + ".copy")
