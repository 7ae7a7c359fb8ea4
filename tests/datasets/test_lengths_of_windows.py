"""Samples of several steps to which a transform gives several lengths are padded, and their lengths are counted."""

import h5py
import numpy as np
import torch

from lightning_h5 import H5LazyDataset


def cut(x):
    return x[: 1 + int(x[0]) % 3]


def test_windows_of_several_lengths_have_a_length(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(12)
    expected = [1, 2, 3]
    for dataset in (
        H5LazyDataset(tmp_path / "a.h5", "x", window=4, collate_fn="pad", transform=cut, with_index=True),
        assigned(H5LazyDataset(tmp_path / "a.h5", "x", window=4, collate_fn="pad", with_index=True)),
    ):
        x, *more = dataset.read_batch([0, 1, 2])
        lengths = [1 + 4 * window % 3 for window in range(3)]
        assert sorted(lengths) == expected
        assert x.shape == (3, 3)
        assert any(torch.equal(column, torch.tensor(lengths)) for column in more if isinstance(column, torch.Tensor))


def assigned(dataset):
    dataset.transform = cut
    return dataset
