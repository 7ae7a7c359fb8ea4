"""Samplers as objects: torch's names for the replica, and what they print."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lightning_h5 import EpochShuffleSampler, H5ValueError
from lightning_h5.order import (
    BlockTable,
    OrderParameters,
    PlanSampler,
    RankShard,
    Replica,
    RowWeights,
    ShardSampler,
    WeightedRecipe,
)


def parameters(mode):
    return OrderParameters(mode=mode, seed=7, batch_size=4, streams=1, window=3, recipe="", sources=())


def plan_sampler(n_rows, rank, world_size, mode="global", **options):
    blocks = BlockTable.of_sizes([n_rows])
    return PlanSampler(blocks, parameters(mode), batch_size=4, rank=rank, world_size=world_size, **options)


def shard_sampler(n_rows, rank, world_size, mode="global", **options):
    shard = RankShard(BlockTable.of_sizes([n_rows]), world_size, rank, "contiguous", 0, 0)
    return ShardSampler(shard, parameters(mode), batch_size=4, **options)


def weighted_sampler(n_rows, rank, world_size, mode="global", **options):
    recipe = WeightedRecipe(RowWeights(np.ones(n_rows), "by 'w'"), BlockTable.of_sizes([n_rows]))
    return plan_sampler(n_rows, rank, world_size, mode, recipe=recipe, **options)


@pytest.mark.parametrize("make", [plan_sampler, shard_sampler, weighted_sampler])
@pytest.mark.parametrize("evaluation", [False, True])
@given(st.data())
def test_a_sampler_says_which_replica_it_is_of(make, evaluation, data):
    world_size = data.draw(st.integers(1, 9))
    rank = data.draw(st.integers(0, world_size - 1))
    n_rows = data.draw(st.integers(world_size, 10**6))
    sampler = make(n_rows, rank, world_size, data.draw(st.sampled_from(["global", "chunks", "none"])))
    sampler.evaluation = evaluation
    assert (sampler.rank, sampler.num_replicas) == (rank, world_size)
    assert isinstance(sampler, DistributedSampler)
    text = repr(sampler)
    assert text.startswith(f"{type(sampler).__name__}({n_rows:,} rows, rank {rank} of {world_size}, batch_size 4")
    assert ("storage order" in text) == evaluation
    assert "\n" not in text


def test_the_replica_of_a_sampler_that_was_given_none_is_that_of_the_process_group(monkeypatch):
    samplers = [plan_sampler(9, None, None), EpochShuffleSampler(9, num_samples=8)]
    assert all((each.rank, each.num_replicas) == (0, 1) for each in samplers)
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
    group.get_rank, group.get_world_size = (lambda: 2), (lambda: 5)
    monkeypatch.setattr("torch.distributed", group)
    assert all((each.rank, each.num_replicas) == (2, 5) for each in samplers)
    assert samplers[0].replica == Replica(2, 5)
    assert repr(samplers[1]) == "EpochShuffleSampler(8 of 9 rows, rank 2 of 5, shuffled with seed 0, epoch 0)"


def test_a_replica_that_is_half_given_is_refused():
    with pytest.raises(H5ValueError, match="Pass both"):
        assert plan_sampler(9, 1, None).rank
