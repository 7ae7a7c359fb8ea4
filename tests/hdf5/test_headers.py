"""Maps of virtual arrays: a heap that the HDF5 library would never get past is an error before an array is opened."""

import h5py
import numpy as np
import pytest
from factories import run_forked

from lightning_h5 import H5CorruptError, H5KeyError, H5LazyDataset, check_files, inspect_file
from lightning_h5.hdf5 import list_arrays, open_h5

ROWS = np.arange(20.0).reshape(10, 2)
HOW = {
    "earliest": {"libver": "earliest"},
    "latest": {"libver": "latest"},
    "user block": {"userblock_size": 1024},
    "latest, user block": {"libver": "latest", "userblock_size": 1024},
}


def write(tmp_path, n_attributes=0, *, is_damaged=False, **how):
    path = str(tmp_path / "virtual.h5")
    with h5py.File(path, "w", **how) as file:
        file["s"] = ROWS
        layout = h5py.VirtualLayout(ROWS.shape, "f8")
        layout[:] = h5py.VirtualSource(".", "s", ROWS.shape)
        array = file.create_virtual_dataset("g/x", layout)
        for at in range(n_attributes):  # which move messages into further blocks
            array.attrs[f"a{at}"] = np.arange(at + 3)
    if is_damaged:
        with open(path, "r+b") as file:
            file.seek(file.read().index(b"GCOL") + 16)
            file.write(bytes(64))
    return path


@pytest.mark.parametrize("n_attributes", [0, 6, 40])
@pytest.mark.parametrize("how", HOW)
def test_sound_virtual_arrays_are_read(tmp_path, how, n_attributes):
    dataset = H5LazyDataset(write(tmp_path, n_attributes, **HOW[how]), "g/x")
    np.testing.assert_array_equal(dataset.read_batch(range(10)), ROWS)


@pytest.mark.parametrize("n_attributes", [0, 6, 40])
@pytest.mark.parametrize("how", HOW)
def test_a_hole_in_a_map_is_an_error_and_no_endless_loop(tmp_path, how, n_attributes):
    path = write(tmp_path, n_attributes, is_damaged=True, **HOW[how])

    def look():
        with pytest.raises(H5CorruptError) as error:
            H5LazyDataset(path, "g/x")
        for part in (path, "'x'", "heap", "copy it again"):
            assert part in str(error.value)
        np.testing.assert_array_equal(H5LazyDataset(path, "s").read_batch(range(10)), ROWS)
        with pytest.raises(H5KeyError):  # which lists arrays
            H5LazyDataset(path, "t")
        with open_h5(path) as file:
            assert list_arrays(file) == ["s"]
        assert "unreadable" in [entry.kind for entry in inspect_file(path).entries]
        assert "heap" in check_files(path).errors[0].text

    assert run_forked(look, seconds=20) == 0
