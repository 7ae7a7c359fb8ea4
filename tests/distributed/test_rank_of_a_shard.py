"""The rank of a dataset in memory that is older than the process group; samplers that would shard its rows again."""

import os
import pickle

import h5py
import numpy as np
import pytest
import torch.distributed as dist
from lightning_models import Recorder, quiet_trainer
from processes import run_ranks, values
from torch.utils.data import DataLoader, DistributedSampler, Subset, SubsetRandomSampler

from lightning_h5 import EpochShuffleSampler, H5ValueError, RankMemCachedH5Dataset

ROWS = 23


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as h5:
        h5["x"] = np.arange(ROWS, dtype="f4")
    return str(path)


def dataset(file, **options):
    return RankMemCachedH5Dataset(file, "x", **options)


def join(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def name_replica(rank, world_size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))


def rows_of(loader):
    return [int(row) for batch in loader for row in batch]


def error_of(function):
    """The error that a function raises, as text; what it returns otherwise."""
    try:
        return function()
    except H5ValueError as error:
        return str(error)


# The rank --------------------------------------------------------------------------------------------------------


def rows_of_a_dataset_made_before_the_group(rank, world_size, file, options, is_named, num_workers):
    if is_named:
        name_replica(rank, world_size)
    data = dataset(file, **options)
    repr(data)
    data = pickle.loads(pickle.dumps(data))
    join(rank, world_size)
    rows = error_of(
        lambda: rows_of(DataLoader(data, batch_size=4, sampler=EpochShuffleSampler(len(data)), num_workers=num_workers))
    )
    dist.barrier()  # gloo connects on both ranks before one ends
    return rows


CASES = {
    "named by the environment": ({}, True, 0),
    "named, with workers": ({}, True, 1),
    "named, interleaved": ({"mode": "interleave"}, True, 0),
    "not loaded yet": ({"preload": False}, False, 0),
    "not loaded yet, interleaved": ({"preload": False, "mode": "interleave"}, False, 0),
}


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_ranks_share_the_rows_of_a_dataset_that_is_made_before_the_process_group(file, tmp_path, case):
    ranks = values(run_ranks(rows_of_a_dataset_made_before_the_group, 2, tmp_path, 2, file, *CASES[case]))
    assert all(isinstance(rows, list) for rows in ranks), ranks
    rows = [row for some in ranks for row in some]
    assert len(rows) == len(set(rows)) >= ROWS - 1


@pytest.mark.wide
def test_rows_that_were_loaded_for_one_process_are_refused_to_ranks(file, tmp_path):
    for text in values(run_ranks(rows_of_a_dataset_made_before_the_group, 2, tmp_path, 2, file, {}, False, 0)):
        assert "of 2" in text
        assert "holds the rows of rank 0 of 1: it was made before the process group" in text


def held_before_and_after_the_group(rank, world_size, file):
    early, whole = dataset(file), dataset(file, rank=0, world_size=1)
    join(rank, world_size)
    errors = [error_of(lambda: early.read_batch([0])), error_of(lambda: early[0]), error_of(lambda: len(early))]
    dist.barrier()  # gloo connects on both ranks before one ends
    return errors, len(whole), whole.read_batch([ROWS - 1]).tolist(), repr(early)


@pytest.mark.wide
def test_a_dataset_that_is_to_hold_all_rows_on_each_rank_says_so(file, tmp_path):
    for errors, n_rows, last, shown in values(run_ranks(held_before_and_after_the_group, 2, tmp_path, 2, file)):
        assert all("made before the process group" in text for text in errors)
        assert (n_rows, last) == (ROWS, [ROWS - 1])
        assert "rank 0 of 1" in shown


def test_the_environment_names_the_rank(file, monkeypatch):
    held = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        held += dataset(file).rows.tolist()
    assert held == list(range(ROWS))
    assert len(dataset(file, rank=0, world_size=1)) == ROWS


# Samplers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_distributed_sampler_over_a_shard_is_refused(file, drop_last):
    shard = dataset(file, rank=1, world_size=2)
    with pytest.raises(H5ValueError, match=r"holds the rows of rank 1 of 2 alone.*EpochShuffleSampler\(len\(dataset\)"):
        DistributedSampler(shard, num_replicas=2, rank=1, drop_last=drop_last)
    assert len(DistributedSampler(shard, num_replicas=1, rank=0)) == len(shard)
    whole = dataset(file, rank=0, world_size=1)
    assert len(DistributedSampler(whole, num_replicas=2, rank=1)) == 12


def test_a_sampler_that_shards_is_noticed_below_other_datasets_and_samplers(file):
    shard = dataset(file, rank=1, world_size=2)
    some = Subset(shard, range(6))
    sampler = DistributedSampler(some, num_replicas=2, rank=1)
    with pytest.raises(H5ValueError, match="DistributedSampler for 2 ranks"):
        next(iter(DataLoader(some, batch_size=2, sampler=sampler)))
    assert len(rows_of(DataLoader(some, batch_size=2, shuffle=True))) == 6
    assert len(rows_of(DataLoader(shard, batch_size=2, sampler=EpochShuffleSampler(len(shard))))) == len(shard)


def fit_and_validate(rank, file, how):
    """Train, validate and predict with plain loaders, which Lightning may give a sampler."""

    class Net(Recorder):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch[:, None], batch.long()), batch_idx)

        def train_dataloader(self):
            data = dataset(file)
            samplers = {
                "shuffled": {"shuffle": True},
                "of its own": {"sampler": EpochShuffleSampler(len(data))},
                "of somebody": {"sampler": SubsetRandomSampler(range(len(data)))},
            }
            return DataLoader(data, batch_size=4, **samplers[how])

    model = Net()
    trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=1)
    told = error_of(lambda: trainer.fit(model))
    return told, model.train_rows


@pytest.mark.parametrize("how", ["shuffled", "of somebody"])
def test_a_plain_loader_of_a_shard_under_ddp_is_refused_before_training(file, tmp_path, how):
    for text, rows in values(run_ranks(fit_and_validate, 2, tmp_path, file, how)):
        assert "would shard them again" in text
        assert not rows


def test_a_loader_with_the_shards_sampler_trains_on_all_rows_under_ddp(file, tmp_path):
    ranks = values(run_ranks(fit_and_validate, 2, tmp_path, file, "of its own"))
    rows = [row for told, seen in ranks for row in seen[0]]
    assert [told for told, _ in ranks] == [None, None]
    assert len(rows) == len(set(rows)) >= ROWS - 1
