"""Samples that are in training and in an evaluation are named in a warning, whatever leads to them."""

import logging
import os

import h5py
import numpy as np
import pytest

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule

MODULES = [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule]


@pytest.fixture
def folder(tmp_path):
    """Four files of five rows, with other names for the last one."""
    for number in range(4):
        with h5py.File(tmp_path / f"d{number}.h5", "w") as file:
            file["x"] = np.full((5, 2), number, "f4")
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "soft.h5").symlink_to(tmp_path / "d3.h5")
    os.link(tmp_path / "d3.h5", tmp_path / "val" / "hard.h5")
    with h5py.File(tmp_path / "val" / "own.h5", "w") as file:
        file["x"] = np.full((5, 2), 9, "f4")
    return tmp_path


def warnings_of(caplog, datamodule, stage="fit"):
    caplog.clear()
    datamodule.setup(stage)
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def opened(make, training, **paths):
    names = {"train": training, **paths}
    if make is CombinedHDF5DataModule:
        return make(**{f"{split}_path": path for split, path in names.items()}, fields=["x"], sample="row")
    return make(**{f"{split}_path": path for split, path in names.items()}, x_key="x")


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("name", ["d3.h5", "val/soft.h5", "val/hard.h5"])
@pytest.mark.parametrize("make", MODULES)
def test_a_file_that_training_has_is_named_by_both_names_before_training(folder, caplog, make, name, split):
    datamodule = opened(make, str(folder / "d*.h5"), **{split: str(folder / name)})
    (text,) = warnings_of(caplog, datamodule)
    assert f"training and {split!r} have data in common" in text
    assert str(folder / name) in text
    assert str(folder / "d3.h5") in text
    assert not warnings_of(caplog, datamodule)


@pytest.mark.parametrize("make", MODULES)
def test_other_files_and_shares_of_the_same_files_give_no_warning(folder, caplog, make):
    own = str(folder / "val" / "own.h5")
    assert not warnings_of(caplog, opened(make, str(folder / "d*.h5"), val=own, test=str(folder / "missing.h5")))
    kind = {"fields": ["x"], "sample": "row"} if make is CombinedHDF5DataModule else {"x_key": "x"}
    assert not warnings_of(
        caplog, make(str(folder / "d*.h5"), **kind, split={"val_fraction": 0.2, "test_fraction": 0.2})
    )


@pytest.fixture
def groups(tmp_path):
    """A file with arrays for each split, of which some are one object."""
    path = str(tmp_path / "groups.h5")
    with h5py.File(path, "w") as file:
        file["train/x"], file["val/x"] = np.arange(6.0), np.arange(6.0) + 10
        file["hard_train"], file["hard_val"] = file["train/x"], file["train/x"]
        file["soft_train"], file["soft_val"] = file["train/x"], h5py.SoftLink("/train/x")
        file["grid"] = np.arange(6.0)
    return path


@pytest.mark.parametrize(
    ("x_key", "name"),
    [
        ("{split}/x", None),
        (["{split}/x", "grid"], None),
        ("hard_{split}", "hard_val"),
        ("soft_{split}", "soft_val"),
    ],
)
def test_an_object_in_two_splits_is_named_and_arrays_that_are_shared_are_not(groups, caplog, x_key, name):
    said = warnings_of(caplog, LazyH5DataModule(groups, x_key=x_key))
    assert len(said) == (name is not None)


@pytest.mark.parametrize("make", [LazyH5DataModule, CombinedHDF5DataModule])
def test_segments_of_one_file_under_two_names_are_named(tmp_path, caplog, make):
    path, link = str(tmp_path / "demos.h5"), str(tmp_path / "link.h5")
    with h5py.File(path, "w") as file:
        file["mask"] = np.arange(4.0)
        for number in range(3):
            file[f"data/d{number}/x"], file[f"data/d{number}/mask"] = np.arange(4.0), file["mask"]
    os.link(path, link)
    keys = {"fields": ["x", "mask"]} if make is CombinedHDF5DataModule else {"x_key": ["x", "mask"]}
    (text,) = warnings_of(caplog, make(path, link, **keys, segments="data/*"))
    assert f"3 files or arrays in common: '{link}:data/d0' (in training as '{path}:data/d0')" in text


def test_parts_of_one_file_by_lines_of_a_table_are_compared_row_by_row(folder, caplog, tmp_path):
    path = str(tmp_path / "keyed.h5")
    with h5py.File(path, "w") as file:
        file["x"], file["id"] = np.arange(6.0), np.arange(6)
    for split, rows in {"train": (0, 1, 2), "val": (3, 4), "test": (2, 5)}.items():
        (tmp_path / f"{split}.csv").write_text("id,y\n" + "".join(f"{row},{row}\n" for row in rows))
    table = {"path": str(tmp_path / "{split}.csv"), "on": {"id": "id"}, "missing": "drop"}
    datamodule = LazyH5DataModule(path, val_path=path, test_path=path, x_key="x", y_key="table/y", table=table)
    assert not warnings_of(caplog, datamodule)
    assert next(iter(datamodule.val_dataloader()))[1].flatten().tolist() == [3, 4]
    assert "training and 'test'" in warnings_of(caplog, datamodule, "test")[0]
