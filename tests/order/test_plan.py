"""The sequence of an epoch, over ranks, and where a broken run goes on."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_h5 import H5ValueError
from lightning_h5.order import BlockTable, OrderParameters, PlanSampler, Position, Segment, order_rows

modes = st.sampled_from(["global", "chunks", "none"])


def sampler(n_rows, batch_size, rank=0, world_size=1, mode="global", seed=0, **options):
    size = max(7, n_rows // 50)
    blocks = BlockTable.of_sizes([size] * (n_rows // size) + [n_rows % size])
    parameters = OrderParameters(mode=mode, seed=seed, batch_size=batch_size, streams=2, window=3)
    return PlanSampler(blocks, parameters, batch_size=batch_size, rank=rank, world_size=world_size, **options)


def epoch_of(n_rows, batch_size, world_size, epoch=0, **options):
    """Rows of an epoch in the order of the sequence: step by step, rank by rank."""
    ranks = [sampler(n_rows, batch_size, rank, world_size, **options) for rank in range(world_size)]
    for one in ranks:
        one.set_epoch(epoch)
    steps = [list(one) for one in ranks]
    assert len({len(tokens) for tokens in steps}) == 1
    assert all(len(one) == len(tokens) for one, tokens in zip(ranks, steps, strict=True))
    return [row for tokens in zip(*steps, strict=True) for token in tokens for row in token.rows.tolist()]


@given(st.integers(1, 200), st.integers(2, 12), st.integers(1, 6), st.integers(0, 3), modes)
def test_every_row_comes_once_an_epoch_over_all_ranks_with_equal_steps(n_rows, batch_size, world_size, epoch, mode):
    if n_rows >= world_size:
        rows = epoch_of(n_rows, batch_size, world_size, epoch, mode=mode)
        assert sorted(rows) == list(range(n_rows))


@given(st.integers(8, 200), st.integers(2, 12), st.integers(1, 6), st.integers(0, 3), modes)
def test_the_order_of_rows_is_the_same_for_every_world_size(n_rows, batch_size, world_size, epoch, mode):
    assert epoch_of(n_rows, batch_size, world_size, epoch, mode=mode) == epoch_of(
        n_rows, batch_size, 1, epoch, mode=mode
    )


def test_the_order_of_an_epoch_never_changes():
    """Saved runs rely on it; another order is another version of the plan."""
    assert epoch_of(12, 5, 1, 2, seed=9) == [8, 4, 9, 10, 2, 0, 3, 5, 11, 6, 1, 7]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(epoch_of(40, 8, 1, epoch, seed=seed)) for epoch in range(4) for seed in range(4)}
    assert len(orders) == 16


def test_storage_order_is_storage_order():
    assert epoch_of(11, 4, 1, 3, mode="none") == list(range(11))


@given(
    st.integers(4, 150), st.lists(st.tuples(st.integers(2, 9), st.integers(1, 4), st.integers(0, 6)), max_size=3), modes
)
def test_a_run_broken_off_goes_on_with_exactly_the_rest(n_rows, stretches, mode):
    """Whatever the batch size and the world size of each stretch were."""
    whole = epoch_of(n_rows, 5, 1, epoch=1, mode=mode)
    order = sampler(n_rows, 5, mode=mode).parameters
    seen, segments = [], []
    for batch_size, world_size, steps in [*stretches, (3, 2, 10**6)]:
        ranks = [sampler(n_rows, batch_size, rank, world_size, mode=mode) for rank in range(world_size)]
        if n_rows - len(seen) < world_size:
            break
        for one in ranks:
            one.set_epoch(1)
            one.restore(Position(1, tuple(segments), order))
        tokens = [list(one)[:steps] for one in ranks]
        seen += [row for step in zip(*tokens, strict=True) for token in step for row in token.rows.tolist()]
        if tokens[0]:
            segments.append(Segment(batch_size, world_size, len(tokens[0]) * world_size))
        assert ranks[0].sequence(1, order).n_consumed(segments, drop_last=False) == len(seen)
    else:
        assert seen == whole
    assert seen == whole[: len(seen)]


def test_a_restored_position_belongs_to_its_epoch_alone():
    one = sampler(20, 4)
    one.restore(Position(2, (Segment(4, 1, 3),), one.present_order()))
    one.set_epoch(2)
    assert [token.step for token in one] == [3, 4]
    assert len(one) == 5
    one.set_epoch(3)
    assert len(list(one)) == 5


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5))
def test_evaluation_takes_each_row_once_in_contiguous_shards(n_rows, batch_size, world_size):
    ranks = [sampler(n_rows, batch_size, rank, world_size, evaluation=True) for rank in range(world_size)]
    assert [row for one in ranks for token in one for row in token.rows.tolist()] == list(range(n_rows))


def test_lightning_leaves_the_sampler_alone_by_its_type():
    assert isinstance(sampler(4, 2), DistributedSampler)
    assert isinstance(sampler(4, 2), SequentialSampler)


def test_a_plan_of_a_billion_rows_opens_at_once_and_reaches_any_batch():
    one = sampler(10**9, 64)
    plan = one.plan(0)
    rows = plan.rows(plan.n_steps // 2)
    assert len(set(rows.tolist())) == 64


def test_an_order_that_this_version_does_not_have_is_refused():
    with pytest.raises(H5ValueError, match="version"):
        order_rows(BlockTable.of_sizes([4]), OrderParameters(mode="global", version=99), 0)


def test_half_a_replica_is_refused():
    with pytest.raises(H5ValueError, match="both, or neither"):
        len(PlanSampler(BlockTable.of_sizes([4]), OrderParameters(mode="none"), batch_size=2, rank=1))


def test_a_block_table_leaves_out_blocks_without_rows():
    table = BlockTable.of_sizes([3, 0, 2])
    assert (table.n_blocks, table.n_rows) == (2, 5)
    assert np.array_equal(table.starts, [0, 3, 5])


@pytest.mark.parametrize("mode", ["global", "none"])
def test_a_billion_rows_in_a_million_blocks_take_little_memory(mode):
    tracemalloc.start()
    blocks = BlockTable.of_sizes(np.full(10**6, 1000))
    one = PlanSampler(blocks, OrderParameters(mode=mode, batch_size=64), batch_size=64, rank=6, world_size=7)
    rows = one.plan(3).rows(10**6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(rows.tolist())) == 64
    assert peak < 100 << 20
    assert blocks.n_rows == 10**9


@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 6), st.integers(0, 3), modes, st.booleans())
def test_any_batch_is_reached_without_those_before_it(n_rows, batch_size, world_size, epoch, mode, drop_last):
    for rank in range(world_size):
        one = sampler(n_rows, batch_size, rank, world_size, mode=mode, drop_last=drop_last)
        one.set_epoch(epoch)
        plan = one.plan(epoch)
        for token in reversed(list(one)):
            assert plan.rows(token.step).tolist() == token.rows.tolist()
            assert plan.bounds(token.step)[0] == token.position


@given(st.integers(2, 60), st.integers(2, 5), st.integers(0, 20), st.data())
def test_with_batches_of_one_row_a_resumed_epoch_leaves_out_the_same_rows(n_rows, world_size, epoch, data):
    whole = epoch_of(n_rows, 1, world_size, epoch, mode="none")
    steps = data.draw(st.integers(0, len(whole) // world_size))
    ranks = [sampler(n_rows, 1, rank, world_size, mode="none") for rank in range(world_size)]
    for one in ranks:
        segments = (Segment(1, world_size, steps * world_size),) if steps else ()
        one.restore(Position(epoch, segments, one.present_order()))
    rest = [token.rows[0] for tokens in zip(*(one.tokens(epoch) for one in ranks), strict=True) for token in tokens]
    assert whole[: steps * world_size] + rest == whole


@given(st.integers(1, 2000), st.integers(1, 12), st.integers(1, 3), st.integers(0, 3), modes, st.booleans())
def test_steps_that_are_looked_up_together_have_their_own_rows(n_rows, batch_size, world_size, epoch, mode, drop_last):
    if n_rows < world_size:
        return
    one = sampler(n_rows, batch_size, world_size - 1, world_size, mode=mode, drop_last=drop_last)
    plan = one.plan(epoch)
    steps = [(step, plan.bounds(step)[0], plan.rows(step).tolist()) for step in range(plan.n_steps)]
    assert [(token.step, token.position, token.rows.tolist()) for token in one.tokens(epoch)] == steps
