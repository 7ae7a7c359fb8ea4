"""Codes of categorical columns mean the same in all files and splits; filters, groups and strata see their names."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5CorruptError,
    H5LazyDataset,
    H5ResumeError,
    H5ValueError,
    LazyH5DataModule,
    RankMemCachedH5Dataset,
)

NAMES = {"a": ["T", "B", "mono"], "b": ["B", "NK"], "val": ["A", "B", "T"]}
CODES = {name: np.random.default_rng(0).integers(0, len(each), 40) for name, each in NAMES.items()}


@pytest.fixture(params=["groups", "beside"])
def paths(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """Columns as AnnData writes them: a group of codes and categories, or, until 0.7, codes with categories beside."""
    for name, codes in CODES.items():
        with h5py.File(tmp_path / f"{name}.h5ad", "w") as file:
            file["x"] = np.arange(len(codes), dtype="f4")
            at, of = ("kind/codes", "kind/categories") if request.param == "groups" else ("kind", "__categories/kind")
            file[f"obs/{at}"] = codes.astype("i2" if name == "b" else "i1")
            file[f"obs/{of}"] = np.array(NAMES[name], dtype=h5py.string_dtype())
    return {name: str(tmp_path / f"{name}.h5ad") for name in NAMES}


def names_of(*files: str) -> list[str]:
    return [NAMES[file][code] for file in files for code in CODES[file]]


@pytest.mark.parametrize("kind", ["lazy", "rank cached", "combined"])
def test_codes_mean_the_same_in_all_files(paths: dict[str, str], kind: str) -> None:
    files = [paths["a"], paths["b"]]
    dataset: Any
    if kind == "combined":
        dataset = CombinedHDF5Dataset(files, ["x", "obs/kind"])
        codes = dataset.read_batch(range(len(dataset)))["obs/kind"]
    else:
        dataset = {"lazy": H5LazyDataset, "rank cached": RankMemCachedH5Dataset}[kind](files, "x", "obs/kind")
        codes = dataset.read_batch(range(len(dataset)))[1]
    assert codes.dtype == torch.int64
    assert [["B", "NK", "T", "mono"][code] for code in codes] == names_of("a", "b")


def test_training_files_have_the_first_codes_whatever_is_set_up_first(paths: dict[str, str]) -> None:
    for stages in (("fit",), ("validate", "fit")):
        module = LazyH5DataModule([paths["a"], paths["b"]], paths["val"], x_key="x", y_key="obs/kind", batch_size=8)
        for stage in stages:
            module.setup(stage)
        assert module.categories == {"obs/kind": ("B", "NK", "T", "mono", "A")}
        found = [module.categories["obs/kind"][code] for _, y in module.val_dataloader() for code in y]
        assert found == names_of("val")


def test_files_that_agree_keep_their_order(paths: dict[str, str]) -> None:
    module = LazyH5DataModule(paths["a"], x_key="x", y_key="obs/kind", split=0.2)
    module.setup("fit")
    assert module.categories == {"obs/kind": ("T", "B", "mono")}


def test_filters_groups_and_strata_see_names(paths: dict[str, str]) -> None:
    files = [paths["a"], paths["b"]]
    kept = CombinedHDF5Dataset(files, ["x"], where={"obs/kind": ["NK", "T"]})
    assert len(kept) == sum(name in ("NK", "T") for name in names_of("a", "b"))
    for how in ("group_key", "stratify_key"):
        module = CombinedHDF5DataModule(
            files, fields=["x", "obs/kind"], split={"val_fraction": 0.25, how: "obs/kind"}, batch_size=8
        )
        module.setup("fit")
        train, val = (
            {int(code) for batch in loader for code in batch["obs/kind"]}
            for loader in (module.train_dataloader(), module.val_dataloader())
        )
        assert (train & val == set()) == (how == "group_key")


def test_a_checkpoint_of_other_codes_is_refused(paths: dict[str, str]) -> None:
    module = LazyH5DataModule(paths["a"], x_key="x", y_key="obs/kind")
    module.setup("fit")
    saved = {"categories": module._categories.digests()}
    module.load_state_dict(saved)  # they are the same
    other = LazyH5DataModule(paths["b"], x_key="x", y_key="obs/kind")
    other.setup("fit")
    with pytest.raises(H5ResumeError, match="stood for 3 other categories"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("paths", ["groups"], indirect=True)
def test_stored_codes_of_files_that_differ_are_an_error(paths: dict[str, str]) -> None:
    with pytest.raises(H5ValueError, match="Name 'obs/kind' instead"):
        H5LazyDataset([paths["a"], paths["val"]], "x", "obs/kind/codes")
    assert H5LazyDataset(paths["a"], "x", "obs/kind/codes").read_batch([0])[1].dtype == torch.int8


def test_a_code_without_a_name_is_an_error(paths: dict[str, str]) -> None:
    with h5py.File(paths["a"], "a") as file:
        codes = file["obs/kind/codes"] if "codes" in file["obs/kind"] else file["obs/kind"]
        codes[7] = 3
    with pytest.raises(H5CorruptError, match="3 categories"):
        H5LazyDataset(paths["a"], "x", "obs/kind").read_batch([7])
