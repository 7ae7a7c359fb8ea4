"""Decoded fields have the values that NumPy computes from what h5py reads, in all datasets, rows or windows."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from lightning_h5 import CombinedHDF5Dataset, H5LazyDataset, H5ValueError, RankMemCachedH5Dataset

N_ROWS = 60
ROWS = [3, 1, 59, 0, 17]


@pytest.fixture
def path(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    waves = (rng.normal(size=(N_ROWS, 4, 3)) + 1j * rng.normal(size=(N_ROWS, 4, 3))).astype(np.complex64)
    with h5py.File(tmp_path / "coded.h5", "w") as file:
        file["waves"] = waves
        file.create_dataset("waves_gzip", data=waves, chunks=(7, 2, 3), compression="gzip")
        bits = rng.integers(0, 256, size=(N_ROWS, 7), dtype=np.uint8)
        file.create_dataset("bits", data=bits, chunks=(10, 7), compression="gzip")
        file["labels"] = np.arange(N_ROWS)
    return str(tmp_path / "coded.h5")


def datasets_of(path: str, key: str, **arguments: Any) -> list[Any]:
    return [
        H5LazyDataset(path, {"x": key}, **arguments),
        RankMemCachedH5Dataset(path, {"x": key}, x_dtype=None, **arguments),
        CombinedHDF5Dataset(path, ["x"], field_map={"x": key}, dtype=None, **arguments),
    ]


@pytest.mark.parametrize("key", ["waves", "waves_gzip"])
def test_real_gives_pairs_of_floats(path: str, key: str) -> None:
    with h5py.File(path) as file:
        expected = torch.view_as_real(torch.from_numpy(file[key][...]))
    for dataset in datasets_of(path, key, decode={"x": "real"}):
        assert torch.equal(dataset.read_batch(ROWS)["x"], expected[ROWS])
    for dataset in datasets_of(path, key, decode={"x": "real"}, window=4, select={"x": {1: [0, 2]}}):
        assert torch.equal(dataset[1]["x"], expected[4:8][:, [0, 2]])


def test_bits_gives_so_many_of_each_row(path: str) -> None:
    with h5py.File(path) as file:
        expected = np.unpackbits(file["bits"][...], axis=1)[:, :50]
    for dataset in datasets_of(path, "bits", decode={"*": "bits:50"}):
        assert (dataset.read_batch(ROWS)["x"].numpy() == expected[ROWS]).all()


@pytest.mark.parametrize(
    ("key", "decode", "says"),
    [
        ("labels", {"x": "real"}, "decodes complex numbers"),
        ("bits", {"x": "bits:57"}, "have 56 bits"),
        ("labels", {"x": "bits:8"}, "rows of bytes"),
        ("labels", {"y": "real"}, "the fields are 'x'"),
        ("labels", {"x": "zip"}, "Pass 'real'"),
        ("labels", "real", "Pass a mapping"),
    ],
)
def test_what_cannot_be_decoded_is_an_error(path: str, key: str, decode: Any, says: str) -> None:
    with pytest.raises(H5ValueError, match=says):
        H5LazyDataset(path, {"x": key}, decode=decode)
