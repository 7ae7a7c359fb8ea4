"""Columns of AnnData with missing values are floats with NaN, as pandas has them: no 0 in the place of one."""

import logging

import h5py
import numpy as np
import pytest

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    compute_stats,
    inspect_file,
)

AGE, IS_MISSING = np.array([40, 0, 60, 7]), np.array([False, True, False, False])


def write(path, *, values=AGE, mask=IS_MISSING):
    with h5py.File(path, "w") as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        file["X"] = np.arange(8.0, dtype="f4").reshape(4, 2)
        group = file.create_group("obs/age")
        group.attrs["encoding-type"] = "nullable-integer"
        group["values"], group["mask"] = values, mask
    return str(path)


@pytest.mark.parametrize("module", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
def test_the_group_is_a_field_with_nan(tmp_path, module):
    paths = [write(tmp_path / "a.h5ad"), write(tmp_path / "b.h5ad", mask=np.zeros(4, bool))]
    keys = {"x_key": "X", "y_key": "obs/age", "shuffle": False, "batch_size": 8}
    datamodule = module(paths, **keys)
    datamodule.setup("fit")
    ((_, age),) = datamodule.train_dataloader()
    assert np.array_equal(age, [40, np.nan, 60, 7, 40, 0, 60, 7], equal_nan=True)
    datamodule = module(paths, **keys, y_dtype="int64", where={"obs/age": {"max": 50}})
    datamodule.setup("fit")
    ((_, age),) = datamodule.train_dataloader()
    assert age.tolist() == [40, 7, 40, 0, 7]
    assert compute_stats(paths[0], "obs/age").arrays[0].mean == pytest.approx(107 / 3)


def test_the_values_as_stored_are_logged_to_have_missing_ones(tmp_path, caplog):
    paths = [write(tmp_path / "a.h5ad", mask=np.zeros(4, bool)), write(tmp_path / "b.h5ad")]
    with caplog.at_level(logging.WARNING):
        dataset = H5LazyDataset(paths, "X", "obs/age/values")
    (message,) = caplog.messages
    assert f"'obs/age/values' has rows without a value in files of {str(tmp_path)!r}" in message
    assert "Name 'obs/age' for NaN" in message
    assert [int(dataset[at][1]) for at in range(4, 8)] == [40, 0, 60, 7]


def test_text_and_large_integers_without_a_value_are_refused_with_their_number(tmp_path):
    text, large = np.array([b"a", b"", b"c", b"d"]), AGE + 2**60
    for name, values in {"text": text, "large": large}.items():
        path = write(tmp_path / f"{name}.h5ad", values=values)
        with pytest.raises(H5ValueError, match=r"has 1 of 4 rows without a value.*where={'obs/age/mask': False}"):
            H5LazyDataset(path, {"x": "X", "age": "obs/age"})
    complete = write(tmp_path / "complete.h5ad", values=text, mask=np.zeros(4, bool))
    assert H5LazyDataset(complete, "X", "obs/age")[3][1] == "d"


def test_inspect_names_the_column(tmp_path):
    assert "'obs/age'" in inspect_file(write(tmp_path / "a.h5ad")).advice.reasons[0]
