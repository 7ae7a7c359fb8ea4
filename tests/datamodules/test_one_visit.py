"""``setup`` opens each file once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from arguments import nested

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.hdf5 import open as opening

ROWS = 12


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    made = []
    for number in range(5):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w", libver="latest") as file:
            file.create_dataset("x", data=rng.random((ROWS, 3)), chunks=(4, 3), compression="gzip", maxshape=(None, 3))
            for name, values in {
                "y": rng.integers(0, 2, ROWS),
                "patient": np.full(ROWS, number),
                "label": np.arange(ROWS) % 2,
                "weight": rng.random(ROWS),
                "age": np.arange(ROWS),
            }.items():
                file.create_dataset(name, data=values)
            file.swmr_mode = True
        made.append(str(path))
    return made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was opened through the HDF5 library."""
    counts: Counter[str] = Counter()

    class Counted(opening._File):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            counts[self.filename] += 1

    monkeypatch.setattr(opening, "_File", Counted)
    return counts


CUT = {"val_fraction": 0.2, "test_fraction": 0.2, "group_key": "patient", "stratify_key": "label"}
KEYS = {"x_key": "x", "y_key": "y"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (LazyH5DataModule, KEYS),
    "cut": (LazyH5DataModule, KEYS | CUT),
    "windows": (LazyH5DataModule, KEYS | {"window": 3}),
    "windows, cut": (LazyH5DataModule, KEYS | {"val_fraction": 0.4, "group_key": "patient", "window": 3}),
    "windows, filtered and cut": (
        CombinedHDF5DataModule,
        {"fields": ["x"], "window": 3, "where": {"age": {"min": 1}}, "val_fraction": 0.4, "group_key": "patient"},
    ),
    "weighted": (LazyH5DataModule, KEYS | CUT | {"weight_key": "weight"}),
    "balanced": (LazyH5DataModule, KEYS | {"balance_key": "label"}),
    "external": (LazyH5DataModule, KEYS | CUT | {"allow_external": True}),
    "integrity": (LazyH5DataModule, KEYS | CUT | {"trusted": True}),
    "cached": (RankCachedH5DataModule, KEYS | CUT),
    "combined": (CombinedHDF5DataModule, {"fields": ["x", "y"]} | CUT),
    "combined, all fields": (CombinedHDF5DataModule, dict(CUT)),
    "combined, skipping": (CombinedHDF5DataModule, {"fields": ["x"], "on_bad_file": "skip"} | CUT),
    "filtered": (
        CombinedHDF5DataModule,
        {"fields": ["x"], "where": {"age": {"min": 3}}, "balance_key": "label"} | CUT,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_file_is_opened_once_whatever_is_asked(case: str, paths: list[str], opened: Counter[str]) -> None:
    kind, settings = CASES[case]
    kind(paths, **nested(**settings)).setup("fit" if kind is RankCachedH5DataModule else None)
    assert opened == dict.fromkeys(paths, 1)


def test_each_file_is_opened_once_where_keys_are_guessed(tmp_path: Path, opened: Counter[str]) -> None:
    paths = []
    for number in range(4):
        paths.append(str(tmp_path / f"{number}.h5"))
        with h5py.File(paths[-1], "w", libver="latest") as file:
            file["images"], file["classes"] = np.zeros((9, 2)), np.arange(9)
    LazyH5DataModule(
        paths,
        split={"val_fraction": 0.3, "stratify_key": "classes"},
    ).setup()
    assert opened == dict.fromkeys(paths, 1)


def test_files_with_a_live_writer_are_described_by_one_opening(paths: list[str], opened: Counter[str]) -> None:
    LazyH5DataModule(paths, **nested(**KEYS, val_fraction=0.2, swmr=True)).setup()
    assert opened == dict.fromkeys(paths, 1)


def test_values_are_those_of_the_files(paths: list[str]) -> None:
    datamodule = LazyH5DataModule(paths, **nested(**KEYS, **CUT))
    datamodule.setup("fit")
    indices = datamodule.datasets["train"].indices  # type: ignore[attr-defined]
    assert len({row // ROWS for row in indices.tolist()}) * ROWS == len(indices)  # no patient is cut apart


def test_what_was_found_is_forgotten_after_setup(paths: list[str], opened: Counter[str]) -> None:
    datamodule = LazyH5DataModule(paths, **nested(**KEYS))
    datamodule.setup("fit")
    with h5py.File(paths[0], "a") as file:
        file["y"][0] = 7
    datamodule.setup("fit")
    assert opened == dict.fromkeys(paths, 2)
