"""Transforms that are assigned to a dataset act, as those of torchvision's datasets do."""

import numpy as np
import pytest
import torch
from arguments import nested, nested_files
from torch.utils.data import DataLoader

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
)
from lightning_h5.loading import create_optimized_dataloader

N = 24


def ten_times(x):
    return x * 10


def plus_one(x):
    return x + 1


def of_x(change):
    """The same for samples that are dicts."""
    return lambda sample: sample | {"x": change(sample["x"])}


def halved_length(x):
    return x[: 1 + int(x[0]) % 2]


@pytest.fixture
def path(make_h5):
    return make_h5({"x": np.arange(N, dtype="f4")[:, None] * [1, 1], "y": np.arange(N)})


DATASETS = {
    "lazy": lambda path, **options: H5LazyDataset(path, "x", "y", **options),
    "windows": lambda path, **options: H5LazyDataset(path, "x", "y", window=1, **options),
    "rank-cached": lambda path, **options: RankMemCachedH5Dataset(path, "x", "y", rank=0, world_size=1, **options),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_an_assigned_transform_acts_on_samples_and_batches(path, kind):
    dataset = DATASETS[kind](path)
    expected = DATASETS[kind](path, transform=ten_times, target_transform=plus_one)
    assert (dataset.transform, dataset.target_transform, expected.transform) == (None, None, ten_times)
    before = dataset.read_batch([3, 1])
    dataset.transform, dataset.target_transform = ten_times, plus_one
    for row in (0, 5):
        assert all(torch.equal(a, b) for a, b in zip(dataset[row], expected[row], strict=True))
    for ours, theirs in zip(dataset.read_batch([3, 1]), expected.read_batch([3, 1]), strict=True):
        assert torch.equal(ours, theirs)
    dataset.transform = dataset.target_transform = None
    assert all(torch.equal(a, b) for a, b in zip(dataset.read_batch([3, 1]), before, strict=True))


def test_a_transform_that_is_assigned_to_cached_samples_acts(path):
    dataset = CombinedHDF5Dataset(path, cache_size=100)
    before = [dataset[row]["x"] for row in range(N)]
    dataset.transform = of_x(ten_times)
    assert all(torch.equal(dataset[row]["x"], 10 * before[row]) for row in range(N))
    dataset.batch_transform = of_x(plus_one)
    assert torch.equal(dataset.read_batch([2])["x"][0], 10 * before[2] + 1)


def test_a_target_transform_needs_a_target(path):
    dataset = H5LazyDataset(path, "x")
    dataset.target_transform = None
    with pytest.raises(H5ValueError, match=r"no target of their own\. Pass y_key"):
        dataset.target_transform = ten_times


def test_samples_of_other_shapes_have_their_lengths_counted(path):
    dataset = H5LazyDataset(path, "x", collate_fn="pad")
    expected = H5LazyDataset(path, "x", collate_fn="pad", transform=halved_length).read_batch([0, 1])
    dataset.transform = halved_length
    batch = dataset.read_batch([0, 1])
    assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True))
    assert batch[1].tolist() == [1, 2]


def test_an_assigned_transform_may_ask_for_a_generator(path):
    dataset = H5LazyDataset(path, "x")
    dataset.transform = lambda x, rng: x * 0 + rng.random()
    assert float(dataset[0][0]) != float(dataset[0][0])


def sums(loader):
    return [float(batch[0].sum()) if isinstance(batch, tuple | list) else float(batch["x"].sum()) for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchs_loader_applies_it_from_the_next_epoch_on(path, num_workers):
    dataset = H5LazyDataset(path, "x", "y")
    loader = DataLoader(dataset, batch_size=8, num_workers=num_workers)
    before = sums(loader)
    dataset.transform = ten_times
    assert sums(loader) == [10 * value for value in before]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
def test_persistent_workers_of_ours_get_it_with_the_next_epoch(path, kind, num_workers):
    options = {"fields": ["x", "y"]} if kind is CombinedHDF5DataModule else {"x_key": "x", "y_key": "y"}
    datamodule = kind(path, **nested(batch_size=8, num_workers=num_workers, shuffle=False, **options))
    datamodule.setup("fit")
    loader, dataset = datamodule.train_dataloader(), datamodule.datasets["train"]
    before = sums(loader)
    for factor, change in ((10, ten_times), (1, None)):
        dataset.transform = of_x(change) if change and kind is CombinedHDF5DataModule else change
        assert sums(loader) == [factor * value for value in before]
    datamodule.teardown("fit")


def collate(samples):
    return {"x": torch.stack([sample[0] for sample in samples])}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_transform_acts_after_a_collate_fn(path, num_workers):
    dataset = H5LazyDataset(path, "x", "y")
    loader = create_optimized_dataloader(dataset, 8, num_workers=num_workers, collate_fn=collate, shuffle=False)
    before = sums(loader)
    dataset.batch_transform = of_x(ten_times)
    assert sums(loader) == [10 * value for value in before]
    loader.close()


def test_a_loader_in_this_process_applies_it_at_once(path):
    dataset = H5LazyDataset(path, "x", **nested_files())
    batches = iter(create_optimized_dataloader(dataset, 8, shuffle=False))
    first = next(batches)
    dataset.transform = lambda x: x * 0
    assert float(first.sum()) > 0
    assert float(next(batches).sum()) == 0
