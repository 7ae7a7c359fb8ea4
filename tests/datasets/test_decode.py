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


@pytest.mark.parametrize("members", [("real", "imag"), ("Re", "Im"), ("i", "r")])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_real_takes_compounds_of_two_floats(tmp_path: Path, members: tuple[str, str], dtype: str) -> None:
    waves = np.zeros((N_ROWS, 3), [(name, dtype) for name in members])
    for at, name in enumerate(members):
        waves[name] = np.random.default_rng(at).random((N_ROWS, 3))
    real, imag = sorted(members, key=lambda name: name.casefold() in ("imag", "im", "i"))
    table = np.zeros(N_ROWS, [("wave", waves.dtype), ("age", "i4")])
    table["wave"] = waves[:, 0]
    path = str(tmp_path / "matlab.h5")
    with h5py.File(path, "w") as file:
        file["waves"], file["table"] = waves, table
        file.create_dataset("waves_gzip", data=waves, chunks=(7, 3), compression="gzip")
    expected = torch.from_numpy(np.stack([waves[real], waves[imag]], axis=-1))
    for key in ("waves", "waves_gzip"):
        for dataset in datasets_of(path, key, decode={"x": "real"}):
            assert torch.equal(dataset.read_batch(ROWS)["x"], expected[ROWS])
        for dataset in datasets_of(path, key, decode={"x": "real"}, window=4, select={"x": {1: [0, 2]}}):
            assert torch.equal(dataset[1]["x"], expected[4:8][:, [0, 2]])
    for dataset in datasets_of(path, "table/wave", decode={"x": "real"}):
        assert torch.equal(dataset.read_batch(ROWS)["x"], expected[ROWS, 0])


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
        ("labels", {"x": "zip"}, "Pass 'category'"),
        ("labels", "real", "Pass a mapping"),
    ],
)
def test_what_cannot_be_decoded_is_an_error(path: str, key: str, decode: Any, says: str) -> None:
    with pytest.raises(H5ValueError, match=says):
        H5LazyDataset(path, {"x": key}, decode=decode)


JETS = np.dtype([("pt", "f4"), ("d0", "f8"), ("n", "u1"), ("valid", "?"), ("pair", "i4", (2,)), (">z0", ">f4")])


@pytest.fixture
def table(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    tracks = np.zeros((N_ROWS, 5), JETS)
    for name in ("pt", "d0", ">z0"):
        tracks[name] = rng.normal(size=(N_ROWS, 5))
    tracks["n"], tracks["valid"] = rng.integers(0, 9, (N_ROWS, 5)), rng.random((N_ROWS, 5)) < 0.5
    with h5py.File(tmp_path / "jets.h5", "w") as file:
        file["plain"] = tracks
        file.create_dataset("lzf", data=tracks, chunks=(7, 5), compression="lzf")
        file.create_dataset("cut", data=tracks, chunks=(7, 2), compression="gzip", shuffle=True)
        file["x"] = np.arange(N_ROWS)
    return str(tmp_path / "jets.h5")


@pytest.mark.parametrize("key", ["plain", "lzf", "cut"])
def test_members_of_a_table_are_stacked_as_floats(table: str, key: str) -> None:
    members = ["d0", "n", ">z0", "valid"]
    with h5py.File(table) as file:
        expected = np.stack([file[key][...][name].astype("f4") for name in members], axis=-1)
    keys = [f"{key}/{name}" for name in members]
    for dataset in (
        H5LazyDataset(table, {"tracks": keys, "mask": f"{key}/valid"}),
        RankMemCachedH5Dataset(table, {"tracks": keys}, x_dtype=None),
        CombinedHDF5Dataset(table, ["tracks"], field_map={"tracks": keys}),
    ):
        batch = dataset.read_batch(ROWS)
        np.testing.assert_array_equal(batch["tracks"].numpy(), expected[ROWS])
    for dataset in datasets_of(table, keys, window=4):
        np.testing.assert_array_equal(dataset[1]["x"].numpy(), expected[4:8])


def test_a_table_is_decoded_once_for_all_members_of_a_field(table: str) -> None:
    dataset = H5LazyDataset(table, {"x": ["lzf/pt", "lzf/d0", "lzf/n"]})
    dataset.read_batch(range(N_ROWS))
    assert dataset.counters.total()["chunks_decoded"] == -(-N_ROWS // 7)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (["lzf/pt", "lzf/pt"], "twice"),
        (["lzf/pt", "lzf/dO"], "its members are"),
        (["lzf/pt", "lzf/pair"], "single real numbers"),
        (["x/pt", "x/d0"], "neither a table nor a group"),
        (["pt", "d0"], "Its arrays are"),
    ],
)
def test_what_cannot_be_stacked_is_an_error(table: str, key: Any, says: str) -> None:
    with pytest.raises((H5ValueError, KeyError), match=says):
        H5LazyDataset(table, {"x": key})
