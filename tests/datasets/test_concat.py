"""Datasets one after the other: as torch's ``ConcatDataset``, but whole batches are read together."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset as TorchConcatDataset
from torch.utils.data import DataLoader, TensorDataset

from lightning_h5 import ConcatDataset, H5LazyDataset

SIZES = (7, 1, 12)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    import h5py

    found = []
    for number, size in enumerate(SIZES):
        path = tmp_path_factory.mktemp("concat") / f"{number}.h5"
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(size, dtype="f4") + 100 * number
        found.append(H5LazyDataset(path, "x", transform=[None, torch.neg, None][number]))
    return found


@given(st.lists(st.integers(-sum(SIZES), sum(SIZES) - 1), max_size=30))
def test_samples_are_those_of_torchs_class_in_the_same_order(datasets, rows):
    theirs = TorchConcatDataset(datasets)
    assert ConcatDataset(datasets).__getitems__(rows) == [theirs[row] for row in rows]


def test_each_dataset_reads_its_rows_of_a_batch_together(datasets, monkeypatch):
    asked = []
    read = H5LazyDataset.__getitems__

    def noted(self, rows):
        asked.append(sorted(rows))
        return read(self, rows)

    monkeypatch.setattr(H5LazyDataset, "__getitems__", noted)
    loader = DataLoader(ConcatDataset(datasets), batch_size=sum(SIZES), shuffle=True)
    (batch,) = loader
    assert sorted(batch.tolist()) == sorted(float(sample) for dataset in datasets for sample in dataset)
    assert asked == [list(range(size)) for size in SIZES]


def test_other_datasets_take_part(datasets):
    both = ConcatDataset([datasets[0], TensorDataset(torch.arange(3))])
    first, (second,) = both.__getitems__([2, 8])
    assert (float(first), int(second)) == (2, 1)


def test_an_index_outside_is_an_error(datasets):
    with pytest.raises(IndexError, match="index 20 is out of range"):
        ConcatDataset(datasets).__getitems__([3, 20])
