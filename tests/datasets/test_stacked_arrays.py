"""Arrays of one shape are one field with a new axis: in all datasets, for any storage, rows, windows or segments."""

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5KeyError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
    compute_stats,
)

N_ROWS = 1000
ROWS = [3, 1, 999, 0, 17, 512]
CHANNELS = ("C3", "F4", "chin")
STORAGES: dict[str, list[dict[str, Any]]] = {
    "contiguous": [{}, {}, {}],
    "chunks": [{"chunks": (64,), "compression": "gzip"}] * 3,
    "chunks that differ": [{"chunks": (n,), "compression": "gzip"} for n in (64, 100, 7)],
    "mixed": [{}, {"chunks": (64,), "compression": "gzip"}, {"chunks": (64,)}],
}


def write(path: Path, storages: list[dict[str, Any]], row_shape: tuple[int, ...] = ()) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(0)
    each = [rng.normal(size=(N_ROWS, *row_shape)).astype("f4") for _ in CHANNELS]
    with h5py.File(path, "w") as file:
        for name, values, storage in zip(CHANNELS, each, storages, strict=True):
            whole = dict(storage)
            if "chunks" in whole:
                whole["chunks"] = (*storage["chunks"], *row_shape)
            file.create_dataset(f"eeg/{name}", data=values, **whole)
    return np.stack(each, axis=-1)


def datasets_of(path: Path, keys: Any, **arguments: Any) -> list[Any]:
    return [
        H5LazyDataset(path, {"x": keys}, **arguments),
        RankMemCachedH5Dataset(path, {"x": keys}, x_dtype=None, **arguments),
        CombinedHDF5Dataset(path, ["x"], field_map={"x": keys}, dtype=None, **arguments),
    ]


KEYS = [f"eeg/{name}" for name in CHANNELS]


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("storage", STORAGES)
def test_rows_and_windows_match_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str, held: bool) -> None:
    if not held:
        monkeypatch.setattr("lightning_h5.samples.row_table.HELD_BYTES", 0)
    expected = write(tmp_path / "a.h5", STORAGES[storage])
    for dataset in datasets_of(tmp_path / "a.h5", KEYS):
        assert (dataset.read_batch(ROWS)["x"].numpy() == expected[ROWS]).all()
        assert (dataset.read_batch(range(N_ROWS))["x"].numpy() == expected).all()
    for dataset in datasets_of(tmp_path / "a.h5", KEYS, window=[-3, 60, 2]):
        assert (dataset[500]["x"].numpy() == expected[500:563:2]).all()


def test_segments_that_are_groups_have_an_array_per_channel(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    nights = {f"night_{at}": rng.normal(size=(n, 2)).astype("f4") for at, n in enumerate((50, 41, 63))}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for at, (name, night) in enumerate(nights.items()):
            for column, channel in enumerate(("C3", "F4")):
                storage: dict[str, Any] = {"chunks": (8 + at,), "compression": "gzip"} if at + column else {}
                file.create_dataset(f"{name}/eeg/{channel}", data=night[:, column], **storage)
            file[f"{name}/stage"] = np.arange(len(night)) + 1000 * at
    keys = {"x": ["eeg/F4", "eeg/C3"], "stage": "stage"}
    whole = np.concatenate([night[:40, ::-1].reshape(-1, 20, 2) for night in nights.values()][:2])
    for dataset in (
        H5LazyDataset(tmp_path / "a.h5", keys, segments="*", window=20),
        RankMemCachedH5Dataset(tmp_path / "a.h5", keys, segments="*", window=20),
        CombinedHDF5Dataset(tmp_path / "a.h5", list(keys), field_map=keys, segments="*", window=20),
    ):
        assert (dataset.read_batch(range(4))["x"].numpy() == whole).all()
    dataset = H5LazyDataset(tmp_path / "a.h5", keys, segments="*")
    for at, night in enumerate(nights.values()):
        sample = dataset[at]
        assert (sample["x"].numpy() == night[:, ::-1]).all()
        assert sample["stage"][0] == 1000 * at


@pytest.mark.parametrize("missing", ["error", "drop"])
@pytest.mark.parametrize(
    "keys", [["eeg/C3_*", "emg/chin_*"], ["eeg/C3_*", "eeg/F4_*"], ["nights/*/eeg/C3", "nights/*/eeg/F4"]]
)
def test_arrays_that_match_a_pattern(tmp_path: Path, keys: list[str], missing: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for key in {*keys}:
            for at in (0, 2, 10):
                file[key.replace("*", str(at))] = np.full(4, at if "C3" in key else -at)
    dataset = H5LazyDataset(tmp_path / "a.h5", {"x": keys}, segments={"missing": missing})
    assert [sample["x"].tolist() for sample in dataset] == [[[at, -at]] * 4 for at in (0, 2, 10)]


def test_arrays_that_match_a_pattern_are_stacked_by_the_text_in_place_of_the_star(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for key in ("eeg/C3_0", "eeg/C3_1", "eeg/F4_0", "eeg/F4_2"):
            file[key] = np.zeros(4)
    with pytest.raises(H5KeyError, match="'eeg/F4_1' is not in"):
        H5LazyDataset(tmp_path / "a.h5", {"x": ["eeg/C3_*", "eeg/F4_*"]})


@pytest.mark.parametrize("storage", STORAGES)
def test_segments_along_an_axis(tmp_path: Path, storage: str) -> None:
    expected = write(tmp_path / "a.h5", STORAGES[storage], (6, 2))
    segments = {"axis": 0, "step_axis": 1}
    for dataset in datasets_of(tmp_path / "a.h5", KEYS, segments=segments, window=2, select={"x": {2: [1]}}):
        assert (dataset[7]["x"].numpy() == expected[2, 2:4, [1]].swapaxes(0, 1)).all()
        assert (dataset.read_batch([2999, 5])["x"].numpy() == expected[[999, 1], 4:6, 1:]).all()


@pytest.mark.parametrize("storage", STORAGES)
def test_a_part_of_rows_and_patches(tmp_path: Path, storage: str) -> None:
    expected = write(tmp_path / "a.h5", STORAGES[storage], (6, 4))
    for dataset in datasets_of(tmp_path / "a.h5", KEYS, select={"x": {1: {"stop": 4}, 2: 1}}):
        assert (dataset.read_batch(ROWS)["x"].numpy() == expected[ROWS, :4, 1]).all()
    patches = H5LazyDataset(tmp_path / "a.h5", {"x": KEYS}, patch={"shape": [500, 6, 2]})
    assert (patches[3]["x"].numpy() == expected[500:, :, 2:]).all()


def test_the_new_axis_can_have_another_place(tmp_path: Path) -> None:
    expected = np.moveaxis(write(tmp_path / "a.h5", STORAGES["chunks"], (6, 4)), -1, 1)
    keys = {"stack": KEYS, "axis": 0}
    for dataset in datasets_of(tmp_path / "a.h5", keys):
        assert (dataset.read_batch(ROWS)["x"].numpy() == expected[ROWS]).all()
    for dataset in datasets_of(tmp_path / "a.h5", keys, window=5):
        assert (dataset[1]["x"].numpy() == expected[5:10]).all()
    single = H5LazyDataset(tmp_path / "a.h5", {"stack": KEYS, "axis": 1})
    assert single[7].shape == (6, 3, 4)
    with pytest.raises(H5ValueError, match=re.escape("Pass an axis from 0 to 2")):
        H5LazyDataset(tmp_path / "a.h5", {"x": {"stack": KEYS, "axis": 3}})
    with pytest.raises(H5ValueError, match="new axis last"):
        H5LazyDataset(tmp_path / "a.h5", {"x": keys}, patch={"shape": [500, 6, 2]})


def test_members_of_a_table_can_be_stacked_along_the_first_axis(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["jets"] = np.ones((9, 5), [("pt", "f4"), ("eta", "f8")])
        file["others"] = np.ones((9, 5), [("pt", "f4")])
    assert H5LazyDataset(tmp_path / "a.h5", {"stack": ["jets/pt", "jets/eta"], "axis": 0})[3].shape == (2, 5)
    assert H5LazyDataset(tmp_path / "a.h5", {"x": ["jets/pt", "others/pt"]})[3]["x"].shape == (5, 2)


def test_numbers_are_promoted_if_a_dtype_holds_all(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["small"], file["large"] = np.arange(5, dtype="i1"), np.arange(5, dtype="f4") / 2
        file["huge"] = np.arange(5)
    dataset = H5LazyDataset(tmp_path / "a.h5", {"x": ["small", "large"]})
    assert dataset.read_batch([3])["x"].tolist() == [[3, 1.5]]
    with pytest.raises(H5ValueError, match="no dtype represents the numbers of all"):
        H5LazyDataset(tmp_path / "a.h5", {"x": ["huge", "large"]})


def test_packed_numbers_are_decoded_each_by_its_own_scale(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for at, scale in enumerate((0.5, 0.25)):
            file[f"packed_{at}"] = np.arange(5, dtype="i2")
            file[f"packed_{at}"].attrs["scale_factor"] = scale
    dataset = H5LazyDataset(tmp_path / "a.h5", {"x": ["packed_0", "packed_1"]}, decode={"x": "cf"})
    assert dataset.read_batch([3])["x"].tolist() == [[1.5, 0.75]]
    with pytest.raises(H5ValueError, match=r"decode=\{'packed_0, packed_1': 'cf'\}"):
        H5LazyDataset(tmp_path / "a.h5", {"x": ["packed_0", "packed_1"]})


def test_missing_values_of_a_stacked_array_are_an_error(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["_NCProperties"] = "version=2,netcdf=4.9.2,hdf5=1.14.3"  # -32767 is the default fill value
        file["small"], file["counts"] = np.arange(5, dtype="i1"), np.array([1, 2, -32767, 4, 5], dtype="i2")
    dataset = H5LazyDataset(tmp_path / "a.h5", {"x": ["small", "counts"]})
    assert dataset.read_batch([3])["x"].tolist() == [[3, 4]]
    with pytest.raises(H5ValueError, match="'counts'"):
        dataset.read_batch([2])


@pytest.mark.parametrize("segments", [None, "*"])
def test_arrays_of_several_shapes_are_an_error_that_names_them(tmp_path: Path, segments: str | None) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for at in range(3):
            file[f"night_{at}/a"], file[f"night_{at}/b"] = np.zeros(5 + at), np.zeros(5 + at + at // 2)
            file[f"night_{at}/names"] = ["a"] * (5 + at)
    prefix = "" if segments else "night_2/"
    says = r"'night_2/a' has the shape \(7,\) and 'night_2/b' has \(8,\)"
    for keys in ([f"{prefix}a", f"{prefix}b"], {"stack": [f"{prefix}a", f"{prefix}b"]}):
        with pytest.raises(H5ValueError, match=says):
            H5LazyDataset(tmp_path / "a.h5", {"x": keys}, segments=segments)
    with pytest.raises(H5ValueError, match="arrays of numbers are stacked"):
        H5LazyDataset(tmp_path / "a.h5", {"x": [f"{prefix}a", f"{prefix}names"]}, segments=segments)


def test_each_chunk_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_h5.samples.row_table.HELD_BYTES", 0)
    write(tmp_path / "a.h5", STORAGES["chunks"])
    dataset = H5LazyDataset(tmp_path / "a.h5", {"x": KEYS})
    dataset.read_batch(range(N_ROWS))
    assert dataset.counters.total()["chunks_decoded"] == len(CHANNELS) * -(-N_ROWS // 64)


def test_other_channels_are_other_data(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", STORAGES["contiguous"])
    each = [H5LazyDataset(tmp_path / "a.h5", {"x": keys}).table.identity for keys in (KEYS, KEYS[::-1], KEYS[:2])]
    assert len(set(each)) == 3


def test_data_modules_and_statistics_take_stacked_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = {split: rng.normal(3, 2, size=(40, 2)).astype("f4") for split in ("train", "val")}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for split, values in x.items():
            file[f"{split}/C3"], file[f"{split}/F4"] = values.T
    keys = {"x": ["{split}/C3", "{split}/F4"]}
    path, common = str(tmp_path / "a.h5"), {"batch_size": 2, "window": 20, "shuffle": False}
    for module in (LazyH5DataModule(path, x_key=keys, **common), RankCachedH5DataModule(path, x_key=keys, **common)):
        module.setup("fit")
        for split, loader in (("train", module.train_dataloader()), ("val", module.val_dataloader())):
            assert (next(iter(loader))["x"].numpy() == x[split].reshape(2, 20, 2)).all()
    train = {"x": ["train/F4", "train/C3"]}
    (stats,) = compute_stats(path, train, channel_axis=-1).arrays
    np.testing.assert_allclose(stats.mean, x["train"][:, ::-1].mean(axis=0), rtol=1e-5)
    combined = CombinedHDF5DataModule(path, fields=train, **common)
    combined.setup("fit")
    assert (next(iter(combined.train_dataloader()))["x"].numpy() == x["train"][:, ::-1].reshape(2, 20, 2)).all()
