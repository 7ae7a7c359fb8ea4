"""A data module parses each option once, asks its files once what a sample is, and makes one dataset for each split."""

from collections import Counter

import h5py
import numpy as np
import pytest

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.datasets import table_dataset
from lightning_h5.options import FileOptions, PatchOptions, SegmentOptions, ShuffleOptions, SplitOptions, WindowOptions
from lightning_h5.samples import kinds

OPTIONS = (FileOptions, PatchOptions, SegmentOptions, ShuffleOptions, SplitOptions, WindowOptions)


@pytest.fixture
def counts(monkeypatch):
    """How often each option object is made of what a user passes, files are asked, and a dataset is made."""
    counts = Counter()

    def counted(owner, name, label):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            counts[label] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for option in OPTIONS:
        counted(option, "__post_init__", option.__name__)
    counted(kinds, "matrices_in", "asked for matrices")
    counted(kinds, "are_cells", "asked for references")
    counted(table_dataset.TableDataset, "__init__", "datasets")
    return counts


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for number in range(10):
            file[f"{number}/x"] = np.full((20, 3), number, np.float32)
        file["rows"] = np.zeros((200, 3), np.float32)
    return path


SEGMENTS = {
    "x_key": "x",
    "segments": {"groups": "*", "missing": "drop"},
    "window": {"length": 4},
    "split": {"val_fraction": 0.2, "test_fraction": 0.2},
    "files": {"mmap": False},
    "shuffle": {"mode": "global"},
}
ROWS = {"x_key": "rows", "split": {"val_fraction": 0.2}, "files": {"mmap": False}, "shuffle": {"mode": "global"}}


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule])
def test_windows_of_segments(kind, path, counts):
    module = kind(path, **SEGMENTS)
    module.setup()
    assert {split: len(dataset) for split, dataset in module.datasets.items()} == {"train": 30, "val": 10, "test": 10}
    for name in ("FileOptions", "SegmentOptions", "WindowOptions", "SplitOptions", "ShuffleOptions"):
        assert counts[name] == 1, name
    assert not counts["PatchOptions"]
    assert counts["asked for matrices"] == counts["asked for references"] == 0, "the user says what samples are"
    of_other_fields = 3 if kind is RankCachedH5DataModule and counts["datasets"] > 3 else 0
    assert counts["datasets"] == 3 + of_other_fields


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule])
def test_rows(kind, path, counts):
    module = kind(path, **ROWS)
    module.setup()
    assert {split: len(dataset) for split, dataset in module.datasets.items()} == {"train": 160, "val": 40}
    assert counts["FileOptions"] == counts["SplitOptions"] == 1
    assert counts["asked for matrices"] == counts["asked for references"] == 1
    assert counts["datasets"] == 2


def test_combined_files(path, counts):
    arguments = {name: value for name, value in SEGMENTS.items() if name != "x_key"}
    module = CombinedHDF5DataModule(path, fields=["x"], **arguments)
    module.setup()
    assert {split: len(dataset) for split, dataset in module.datasets.items()} == {"train": 30, "val": 10, "test": 10}
    for name in ("FileOptions", "SegmentOptions", "WindowOptions", "SplitOptions", "ShuffleOptions"):
        assert counts[name] == 1, name
    assert counts["datasets"] == 3


def test_combined_rows(path, counts):
    module = CombinedHDF5DataModule(path, fields=["rows"], split=0.2)
    module.setup()
    assert {split: len(dataset) for split, dataset in module.datasets.items()} == {"train": 160, "val": 40}
    assert counts["FileOptions"] == counts["SplitOptions"] == 1
    assert counts["asked for matrices"] == counts["asked for references"] == 1
    assert counts["datasets"] == 2
