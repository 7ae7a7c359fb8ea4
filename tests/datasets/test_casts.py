"""A cast gives the values of the file, or an error: no integer in place of NaN, and no wrapped number."""

import h5py
import numpy as np
import pytest

from lightning_h5 import CombinedHDF5DataModule, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.datasets import H5LazyDataset, RankMemCachedH5Dataset

MODULES = pytest.mark.parametrize("module", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
CASES = {
    "NaN as int64": ([0.0, np.nan, 2.0], "int64", "nan"),
    "infinity as int32": ([0.0, np.inf, 2.0], "int32", "inf"),
    "NaN as bool": ([0.0, np.nan, 1.0], "bool", "nan"),
    "280.5 as uint8": ([0.0, 280.5, 2.0], "uint8", "280.5"),
    "-1 as uint8": (np.array([0, -1, 2], "i2"), "uint8", "-1"),
    "2**63 as int64": (np.array([0, 2**63, 2], "u8"), "int64", str(2**63)),
    "2.0**63 as int64": ([0.0, 2.0**63, 2.0], "int64", "9.22"),
}


def batches_of(module, path, **how):
    datamodule = module(path, shuffle=False, batch_size=2, **how)
    datamodule.setup("fit")
    return list(datamodule.train_dataloader())


@MODULES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("storage", [{}, {"chunks": (2,), "compression": "gzip"}], ids=["contiguous", "gzip"])
def test_values_that_a_requested_dtype_cannot_hold_are_errors(tmp_path, module, case, storage):
    values, dtype, shown = CASES[case]
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((3, 2), "f4")
        file.create_dataset("y", data=values, **storage)
    with pytest.raises(H5ValueError, match=f"'y' has the value {shown}.*, which y_dtype='{dtype}' cannot hold"):
        batches_of(module, path, x_key="x", y_key="y", y_dtype=dtype)
    kept = batches_of(module, path, x_key="x", y_key="y", y_dtype=dtype, where={"y": {"min": 0, "max": 2}})
    assert [y.tolist() for _, y in kept] == [[0, np.array([values[2]]).astype(dtype)[0]]]


@MODULES
def test_fractions_are_cut_off_as_the_dtype_asks_for(make_h5, module):
    path = make_h5(x=np.array([-0.5, 255.9, 3.25]), y=np.array([0.25, 0, -2]))
    read = batches_of(module, path, x_key={"x": "x", "y": "y"}, x_dtype={"x": "uint8", "y": "bool"})
    assert [batch["x"].tolist() for batch in read] == [[0, 255], [3]]
    assert [batch["y"].tolist() for batch in read] == [[True, False], [True]]


@MODULES
def test_a_real_dtype_of_complex_numbers_is_refused_in_setup(make_h5, module):
    path = make_h5(x=np.arange(4) + 1j)
    for how in ({"x_key": "x", "x_dtype": "float32"}, {"x_key": {"x": "x"}, "x_dtype": {"x": "int64"}}):
        with pytest.raises(H5ValueError, match=r"would drop their imaginary part. Pass decode={'x': 'real'}"):
            module(path, **how).setup("fit")
    pairs = batches_of(module, path, x_key="x", x_dtype="float32", decode={"x": "real"})
    assert pairs[1].tolist() == [[2, 1], [3, 1]]


def test_patches_lists_and_decoded_rows_are_checked(tmp_path):
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file["volume"] = np.full((3, 3), 300.0)
        file["lists"] = np.array([np.array([1.0, 2.0]), np.array([np.nan])], h5py.vlen_dtype("f8"))
    patch = {"shape": [2, 2], "border": "pad"}
    for make in (H5LazyDataset, RankMemCachedH5Dataset):
        dataset = make(path, "volume", x_dtype="int16", patch=patch)  # padding has any memory
        assert [dataset[at].sum() for at in range(4)] == [1200, 600, 600, 300]
        with pytest.raises(H5ValueError, match=r"300\.0"):
            make(path, "volume", x_dtype="uint8", patch=patch)[0]
        for how in ({}, {"decode": {"lists": np.abs}}):
            lists = make(path, "lists", x_dtype="int64", collate_fn="list", **how)
            assert sorted(lists[0].tolist()) == [1, 2]
            with pytest.raises(H5ValueError, match="'lists' has the value nan"):
                lists[1]


def test_a_missing_value_of_netcdf_does_not_become_an_integer(tmp_path):
    path = str(tmp_path / "a.nc")
    with h5py.File(path, "w") as file:
        file.attrs["Conventions"] = "CF-1.8"
        file["x"] = np.array([21, 22, -9], "i2")
        file["x"].attrs.update({"scale_factor": 0.5, "add_offset": 270.0, "_FillValue": np.int16(-9)})
    for dtype in ("int64", "uint8", "bool"):
        with pytest.raises(H5ValueError, match=f"which x_dtype='{dtype}' cannot hold"):
            H5LazyDataset(path, "x", x_dtype=dtype).read_batch([1, 2])
    assert H5LazyDataset(path, "x", x_dtype="int64").read_batch([0, 1]).tolist() == [280, 281]
