"""Fields in other files come with the rows of the data's, are watched for changes, and must have as many rows."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5DataChangedError,
    H5FileError,
    H5KeyError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
)

N = 30


@pytest.fixture
def files(tmp_path: Path) -> tuple[list[str], list[str]]:
    for number in range(2):
        with h5py.File(tmp_path / f"data{number}.h5", "w") as file:
            file["x"] = np.arange(N) + N * number
        with h5py.File(tmp_path / f"labels{number}.h5", "w") as file:
            labels = (np.arange(N) + N * number) * 2
            file.create_dataset("y", data=labels, chunks=(7,), compression="gzip")
            file["short"] = labels[1:]
    return tuple([str(tmp_path / f"{name}{number}.h5") for number in range(2)] for name in ("data", "labels"))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
def test_rows_of_other_files_belong_to_those_of_the_data(files: Any, make: Any, num_workers: int) -> None:
    data, labels = files
    keys: Any = {"x": "x", "y": {"path": labels, "key": "y"}}
    given = {"fields": keys} if make is CombinedHDF5DataModule else {"x_key": keys}
    module = make(data, **given, split=0.25, batch_size=8, num_workers=num_workers)
    module.setup("fit")
    seen = []
    for batch in (*module.train_dataloader(), *module.val_dataloader()):
        assert (batch["y"] == 2 * batch["x"]).all()
        seen += batch["x"].tolist()
    assert sorted(seen) == list(range(2 * N))
    module.teardown("fit")


@pytest.mark.parametrize(
    ("other", "error", "says"),
    [
        (lambda labels: {"path": labels[0], "key": "y"}, H5ValueError, "in 1 other files.*data has 2 files"),
        (lambda labels: {"path": labels, "key": "short"}, H5ValueError, "'x' has 30 rows and 'short' has 29"),
        (lambda labels: {"path": labels, "key": "z"}, H5KeyError, "'z' is not in .*labels0"),
        (lambda labels: {"path": labels[0] + "x", "key": "y"}, H5FileError, "does not exist"),
        (lambda labels: {"path": labels}, H5ValueError, "'path': 'labels.h5', 'key': 'y'"),
    ],
)
def test_what_does_not_belong_together_is_an_error(files: Any, other: Any, error: Any, says: str) -> None:
    data, labels = files
    with pytest.raises(error, match=says):
        H5LazyDataset(data, {"x": "x", "y": other(labels)})


def test_a_change_of_the_other_file_is_noticed(files: Any) -> None:
    data, labels = files
    dataset = H5LazyDataset(data, {"x": "x", "y": {"path": labels, "key": "y"}})
    identity = dataset.identity()
    with h5py.File(labels[1], "a") as file:
        file["y"][0] = 7
    with pytest.raises(H5DataChangedError, match="labels1"):
        dataset.read_batch([N])
    assert H5LazyDataset(data, {"x": "x", "y": {"path": labels, "key": "y"}}).identity() != identity


@pytest.mark.parametrize("make", [H5LazyDataset, RankMemCachedH5Dataset])
def test_samples_of_segments_have_no_fields_of_other_files(files: Any, make: Any) -> None:
    data, labels = files
    with pytest.raises(H5ValueError, match="matched row by row"):
        make(data, {"x": "x", "y": {"path": labels, "key": "y"}}, window=3)
    with pytest.raises(H5ValueError, match="matched row by row"):
        CombinedHDF5Dataset(data, ["x", "y"], field_map={"y": {"path": labels, "key": "y"}}, window=3)
