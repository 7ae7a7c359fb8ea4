"""What crafted files and digests say of themselves: chunks, checksums, names and sizes that are not so."""

import re
import resource

import h5py
import numpy as np
import pytest

from lightning_h5 import (
    H5CorruptError,
    H5KeyError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    check_files,
    compute_stats,
    inspect_file,
)
from lightning_h5.hdf5 import digests_path, translate_h5py_errors
from lightning_h5.hdf5.describe import MAX_UNWRITTEN


def test_chunks_that_were_never_written_take_no_memory(tmp_path):
    """A file of 1 KB with three arrays of 67 million chunks each."""
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w", libver="latest") as file:
        for name in "xyz":
            file.create_dataset(name, (1 << 26,), "u1", chunks=(1,), maxshape=(None,), fillvalue=7)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dataset = H5LazyDataset(path, {name: name for name in "xyz"})
    assert dataset.read_batch([5, 1 << 25])["y"].tolist() == [7, 7]
    inspect_file(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


@pytest.mark.parametrize(("n_chunks", "is_plain"), [(MAX_UNWRITTEN, False), (MAX_UNWRITTEN + 1, True)])
def test_sparse_arrays_have_a_table_up_to_a_bound(tmp_path, n_chunks, is_plain):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", (n_chunks,), "u1", chunks=(1,), maxshape=(None,))[9] = 3
    (array,) = inspect_file(path).arrays
    assert ("too many for a table" in str(array)) == is_plain
    assert H5LazyDataset(path, "x").read_batch([8, 9]).tolist() == [0, 3]


def test_filters_that_chunks_passed_over_unseen_raise_no_integrity_level(tmp_path):
    """Numbers that only the HDF5 library reads: nobody looks at the masks of their chunks."""
    path, odd = str(tmp_path / "x.h5"), h5py.h5t.STD_I32LE.copy()
    odd.set_precision(31)
    with h5py.File(path, "w", libver="latest") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((8,))
        plist.set_deflate(4)
        plist.set_fletcher32()
        array = h5py.h5d.create(file.id, b"x", odd, h5py.h5s.create_simple((8,)), plist)
        array.write_direct_chunk((0,), np.arange(8, dtype="i4").tobytes(), filter_mask=3)
    assert inspect_file(path).arrays[0].integrity == 0
    with pytest.raises(H5ValueError, match=r"min_integrity=1 was requested, but 'x' .* has level 0"):
        LazyH5DataModule(
            path,
            x_key="x",
            files={"min_integrity": 1},
        ).setup("fit")


@pytest.mark.parametrize("shape", [(10, 0), (10, 3, 0)])
def test_rows_of_no_values_are_no_division_by_zero(tmp_path, shape):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", shape, "f4", chunks=(2,) * len(shape), maxshape=(None,) * len(shape))
    assert compute_stats(path, "x").arrays[0].n_rows == 10
    assert not check_files(path).errors
    assert H5LazyDataset(path, "x").read_batch([0, 9]).shape == (2, *shape[1:])


def test_a_name_in_another_encoding_is_no_damage(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(20)
        for name in (b"\xe9t\xe9", b"\xff\xfe"):
            h5py.h5d.create(file.id, name, h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((20,)))
    module = LazyH5DataModule(path, batch_size=4)
    module.setup("fit")
    module.teardown("fit")


def test_a_nul_ends_no_name(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file["x"], file["g/y"] = np.arange(20), np.arange(20)
    for key in ("x\0y", "g\0/y", "g/y\0", "\0"):
        with pytest.raises(H5KeyError, match="is not in"):
            H5LazyDataset(path, key)


def test_want_of_memory_is_not_blamed_on_the_file():
    with pytest.raises(MemoryError), translate_h5py_errors("a.h5", "'x'"):
        raise MemoryError


def write_digested(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(40, dtype="f4").reshape(10, 4)
    assert check_files(path, write_digests=True).digested
    return path


def change_digests(path, pattern, text):
    with open(digests_path(path), encoding="utf-8") as file:
        content = file.read()
    with open(digests_path(path), "w", encoding="utf-8") as file:
        file.write(re.sub(pattern, lambda found: text, content))


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ('"schema": "[^"]*"', '"schema": "\\u001b[31m' + "a" * 100_000 + '"'),
        ('"pieces": "[^"]*"', '"pieces": "\\u001b[31m' + "a" * 100_000 + '"'),
        ('"version": 1', '"version": "\\u001b[31m' + "a" * 100_000 + '"'),
    ],
    ids=["schema", "pieces", "version"],
)
def test_what_digests_say_is_quoted_and_cut(tmp_path, pattern, text):
    path = write_digested(tmp_path)
    change_digests(path, pattern, text)
    with pytest.raises((H5CorruptError, H5ValueError)) as error:
        H5LazyDataset(
            path,
            "x",
            files={"verify": "digest"},
        )
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 2000


def test_an_error_says_what_is_different_about_pieces(tmp_path):
    path = write_digested(tmp_path)
    change_digests(path, '"rows_per_piece": [0-9]*', '"rows_per_piece": 3')
    with pytest.raises(H5CorruptError, match=r"in 1 rows, now .* in 4"):
        H5LazyDataset(
            path,
            "x",
            files={"verify": "digest"},
        )
