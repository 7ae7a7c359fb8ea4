"""How surely damage shows: what a file says of its filters counts for what every chunk went through, and no more."""

import h5py
import numpy as np
import pytest

from lightning_h5.hdf5 import find_array, layout_of, open_h5

NUMBERS = np.arange(6400, dtype="f4").reshape(100, 64)
KINDS = {
    "numbers": (NUMBERS, (16, 64)),
    "parts of rows": (NUMBERS, (16, 10)),
    "text of a fixed length": (np.array([b"%d" % at for at in range(100)]), (16,)),
    "numbers that NumPy lacks": (NUMBERS.astype("i4"), (16, 64)),
}


def level_of(path):
    with open_h5(path) as file:
        return layout_of(find_array(file, "x"), path, "x").integrity


def write(path, kind, libver, *, passes_over=0):
    values, chunks = KINDS[kind]
    with h5py.File(path, "w", libver=libver) as file:
        if kind == "numbers that NumPy lacks":
            of_31_bits = h5py.h5t.NATIVE_INT32.copy()
            of_31_bits.set_precision(31)
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk(chunks)
            plist.set_deflate(4)
            plist.set_fletcher32()
            h5py.h5d.create(file.id, b"x", of_31_bits, h5py.h5s.create_simple(values.shape), plist)
            file["x"][...] = values
        else:
            file.create_dataset("x", data=values, chunks=chunks, compression="gzip", fletcher32=True)
        if passes_over:
            raw = bytes(int(np.prod(chunks)) * file["x"].dtype.itemsize)
            file["x"].id.write_direct_chunk((16, *(0 for _ in chunks[1:])), raw, passes_over)
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checksum_of_every_chunk_counts_whoever_reads_them(tmp_path, kind):
    assert level_of(write(tmp_path / "old.h5", kind, "earliest")) == 1
    assert level_of(write(tmp_path / "new.h5", kind, "latest")) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("passes_over", "level"), [(0b11, 0), (0b10, 1), (0b01, 2)], ids=["both", "checksum", "gzip"])
def test_one_chunk_that_passed_over_a_filter_takes_its_level_away(tmp_path, kind, passes_over, level):
    assert level_of(write(tmp_path / "x.h5", kind, "latest", passes_over=passes_over)) == level
