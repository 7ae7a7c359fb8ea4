"""Which rows a rank holds, and in what order it takes them: without a row too many, too few, or twice."""

from itertools import pairwise

import numpy as np
import pytest
import torch.distributed
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_h5 import EpochShuffleSampler, H5ValueError
from lightning_h5.order import (
    BlockTable,
    OrderParameters,
    Position,
    RankShard,
    Segment,
    ShardSampler,
    balanced_contiguous_shard,
    interleaved_indices,
    note_length,
)

MODES = ["contiguous", "interleave"]
modes = st.sampled_from(MODES)
seeds = st.integers(0, 2**70)


@st.composite
def block_tables(draw):
    """Blocks of any sizes; alike, as in a file, or not, as after filtering."""
    if draw(st.booleans()):
        return BlockTable.of_sizes(draw(st.lists(st.integers(1, 9), max_size=40)))
    n_rows, size = draw(st.integers(0, 200)), draw(st.integers(1, 20))
    return BlockTable.of_sizes([size] * (n_rows // size) + [n_rows % size])


def all_ranks(n_rows, world_size, mode="contiguous", **options):
    blocks = n_rows if isinstance(n_rows, BlockTable) else BlockTable.of_sizes([n_rows])
    return [RankShard(blocks, world_size, rank, mode, **options) for rank in range(world_size)]


# Shards ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(1, 40))
def test_contiguous_pieces_follow_each_other_and_differ_by_at_most_one_row(total, world_size):
    bounds = [balanced_contiguous_shard(total, world_size, rank) for rank in range(world_size)]
    sizes = [stop - start for start, stop in bounds]
    assert [bounds[0][0], *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), total]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.integers(0, 500), st.integers(1, 40), st.data())
def test_interleaved_indices_are_every_nth_row(total, world_size, data):
    rank = data.draw(st.integers(0, world_size - 1))
    found = interleaved_indices(total, world_size, rank)
    assert found.dtype == np.int64
    assert found.tolist() == [row for row in range(total) if row % world_size == rank]


@pytest.mark.parametrize("cut", [balanced_contiguous_shard, interleaved_indices])
@pytest.mark.parametrize("numbers", [(-1, 2, 0), (10, 0, 0), (10, 2, 2), (10, 2, -1)], ids=str)
def test_numbers_that_make_no_sense_are_refused(cut, numbers):
    total, world_size, rank = numbers
    with pytest.raises(H5ValueError, match=f"total={total} .* rank={rank} of world_size={world_size}"):
        cut(*numbers)


@given(block_tables(), st.integers(1, 9), modes, st.integers(0, 3), seeds)
def test_each_row_is_held_by_one_rank_in_every_draw(blocks, world_size, mode, draw, seed):
    shards = all_ranks(blocks, world_size, mode, seed=seed)
    rows = [np.asarray(shard.rows(draw), dtype=np.int64) for shard in shards]
    assert sorted(np.concatenate(rows).tolist()) == list(range(blocks.n_rows))
    assert all((np.diff(some) > 0).all() for some in rows)
    sizes = [len(some) for some in rows]
    assert sizes == [shard.n_held for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) == shards[0].n_least
    for rank, some in enumerate(rows):  # also as another rank sees them
        assert np.array_equal(shards[0].rows(draw, rank), some)


@given(block_tables(), st.integers(1, 9), st.integers(1, 3), seeds)
def test_blocks_drawn_anew_stay_whole_but_for_those_at_the_cuts(blocks, world_size, draw, seed):
    owner = np.full(blocks.n_rows, -1)
    for rank, shard in enumerate(all_ranks(blocks, world_size, seed=seed)):
        owner[shard.rows(draw)] = rank
    ranks_of = [np.unique(owner[start:stop]) for start, stop in pairwise(blocks.starts)]
    assert sum(len(ranks) - 1 for ranks in ranks_of) <= world_size - 1


@pytest.mark.parametrize("mode", MODES)
def test_draws_and_seeds_have_shards_of_their_own(mode):
    blocks = BlockTable.of_sizes([5] * 20)
    shards = {
        tuple(RankShard(blocks, 4, 1, mode, seed=seed).rows(draw)) for seed in range(5) for draw in range(1, 5)
    } | {tuple(RankShard(blocks, 4, 1, mode).rows())}
    assert len(shards) == 21


def test_shards_that_are_drawn_anew_never_change():
    """A resumed run must find the rows that it trained on."""
    blocks = BlockTable.of_sizes([3, 3, 3, 2])
    assert RankShard(blocks, 3, 1, "contiguous", seed=5).rows(2).tolist() == [4, 5, 9, 10]
    assert RankShard(blocks, 3, 1, "interleave", seed=5).rows(2).tolist() == [3, 4, 7, 8]


@given(st.integers(0, 30), st.integers(1, 5))
def test_shards_are_drawn_anew_every_so_many_epochs_or_never(epoch, every):
    assert all_ranks(9, 2)[0].draw(epoch) == 0
    assert all_ranks(9, 2, reshard_every=every)[0].draw(epoch) == epoch // every


# Samplers of shards ------------------------------------------------------------------------------------------------


def samplers(n_rows, batch_size, world_size, *, mode="global", seed=0, epoch=0, **options):
    parameters = OrderParameters(mode=mode, seed=seed, batch_size=batch_size)
    found = [ShardSampler(s, parameters, batch_size=batch_size, **options) for s in all_ranks(n_rows, world_size)]
    for one in found:
        one.set_epoch(epoch)
    return found


def order(one):
    """What a rank takes, as numbers of its own rows."""
    return [row for token in one for row in token.rows.tolist()]


def rows_taken(ranks):
    """For each rank what it takes, as numbers among all rows."""
    return [np.asarray(one.shard.rows())[order(one)].tolist() for one in ranks]


def n_left_out(n_rows, batch_size, world_size):
    """Rows that cannot be trained on in equally many steps."""
    return n_rows % world_size if batch_size == 1 or n_rows < world_size else 0


@given(
    st.integers(0, 150),
    st.integers(1, 12),
    st.integers(1, 9),
    st.sampled_from(["global", "none"]),
    st.booleans(),
    st.integers(0, 20),
)
def test_ranks_take_equally_many_steps_and_each_row_comes_once(n_rows, batch_size, world_size, mode, drop_last, epoch):
    ranks = samplers(n_rows, batch_size, world_size, mode=mode, drop_last=drop_last, epoch=epoch)
    sizes = [[len(token.rows) for token in one] for one in ranks]
    assert [len(some) for some in sizes] == [len(one) for one in ranks]
    for step in zip(*sizes, strict=True):  # no rank has one step more
        assert 0 < min(step) <= max(step) <= min(batch_size, min(step) + 1)
    taken = [row for rows in rows_taken(ranks) for row in rows]
    assert len(taken) == len(set(taken))
    if drop_last:
        assert {size for some in sizes for size in some} <= {batch_size}
        assert n_rows - len(taken) < batch_size * world_size
    else:
        assert n_rows - len(taken) == n_left_out(n_rows, batch_size, world_size)


@given(st.integers(1, 40), st.integers(1, 7), st.sampled_from(["global", "none"]))
def test_nobody_sits_out_for_ever(n_rows, world_size, mode):
    """Single rows on each rank: a remainder has no step, and in storage order it is another one each epoch."""
    assume(n_rows >= world_size)
    seen = set()
    for epoch in range(-(-n_rows // world_size)):
        ranks = rows_taken(samplers(n_rows, 1, world_size, mode=mode, epoch=epoch))
        absent = set(range(n_rows)) - {row for rows in ranks for row in rows}
        assert len(absent) == n_rows % world_size
        assert mode != "none" or not absent & seen
        seen |= absent


@given(st.integers(0, 150), st.integers(1, 12), st.integers(1, 9))
def test_evaluation_takes_each_row_of_each_shard_once_in_its_order(n_rows, batch_size, world_size):
    ranks = samplers(n_rows, batch_size, world_size, evaluation=True)
    for one in ranks:
        assert order(one) == list(range(one.shard.n_held))
        assert len(list(one)) == len(one)
    if batch_size > 1 and n_rows >= world_size:
        assert len({len(one) for one in ranks}) == 1


@given(
    st.integers(1, 120),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), max_size=3),
    st.integers(0, 9),
    st.sampled_from(["global", "none"]),
    st.booleans(),
)
def test_a_run_broken_off_goes_on_with_exactly_the_rest_of_each_shard(
    n_rows, world_size, stretches, epoch, mode, is_merged
):
    """Whatever the batch size of each stretch was, all ranks take equally many steps of it."""
    assume(n_rows >= world_size)
    segments = []
    seen = [[] for _ in range(world_size)]
    for batch_size, steps in [*stretches, (3, 10**6)]:
        ranks = samplers(n_rows, batch_size, world_size, mode=mode, epoch=epoch)
        for one, rows in zip(ranks, seen, strict=True):
            one.restore(Position(epoch, tuple(segments), one.present_order()))
            tokens = list(one)[:steps]
            assert len(tokens) == min(steps, one.plan(epoch).n_steps)
            rows += [row for token in tokens for row in token.rows.tolist()]
        assert len({one.plan(epoch).n_steps for one in ranks}) == 1
        segments.append(Segment(batch_size, 1, len(tokens)))
        if is_merged:  # as the state of very many changes is kept small, on the first rank
            segments = [ranks[0].merged(epoch, ranks[0].present_order(), segments)]
    for one, rows in zip(samplers(n_rows, 5, world_size, mode=mode, epoch=epoch), seen, strict=True):
        whole = order(one)
        assert sorted(whole) == list(range(one.shard.n_held))
        missing = [row for row in whole if row not in rows]
        assert rows == [row for row in whole if row not in missing]
        assert len(missing) <= (1 in dict(stretches))


@given(st.integers(2, 100), st.integers(1, 9), st.integers(1, 6), st.booleans())
def test_batches_of_all_ranks_have_draws_of_their_own(n_rows, batch_size, world_size, evaluation):
    """The place in the epoch's sequence decides the random draws of a batch's transforms."""
    places = [
        place
        for one in samplers(n_rows, batch_size, world_size, evaluation=evaluation)
        for token in one
        for place in range(token.position, token.position + len(token.rows))
    ]
    assert len(places) == len(set(places))


def test_no_two_of_ranks_seeds_and_epochs_share_an_order():
    """Also not rank 1 of one seed and rank 0 of the next, or one epoch's rank 1 and the next one's rank 0."""
    orders = {
        (rank, seed, epoch): tuple(order(one))
        for seed in range(5)
        for epoch in range(5)
        for rank, one in enumerate(samplers(120, 8, 4, seed=seed, epoch=epoch))
    }
    assert len(set(orders.values())) == len(orders) == 100


def test_the_order_of_a_shard_never_changes():
    """Saved runs rely on it; another order is another version of the plan."""
    ranks = samplers(23, 4, 3, seed=9, epoch=2)
    assert [order(one) for one in ranks] == [
        [3, 6, 4, 0, 2, 5, 1, 7],
        [6, 0, 5, 7, 1, 3, 2, 4],
        [3, 0, 6, 5, 2, 1, 4],
    ]


def test_lightning_leaves_a_sampler_of_a_shard_alone_by_its_type():
    (one,) = samplers(4, 2, 1)
    assert isinstance(one, DistributedSampler)
    assert isinstance(one, SequentialSampler)


# EpochShuffleSampler -----------------------------------------------------------------------------------------------


def epoch_shuffled(data_len, epoch, *, seed=0, **options):
    one = EpochShuffleSampler(data_len, seed, **options)
    one.set_epoch(epoch)
    return list(one)


@given(st.integers(0, 300), seeds, st.integers(0, 10**6))
def test_epoch_shuffle_takes_every_row_once(data_len, seed, epoch):
    found = epoch_shuffled(data_len, epoch, seed=seed)
    assert sorted(found) == list(range(data_len))
    assert all(type(row) is int for row in found)
    assert epoch_shuffled(data_len, epoch, seed=seed) == found


@given(st.integers(0, 100), st.integers(0, 50), st.data())
def test_epoch_shuffle_without_shuffling_gives_the_rows_in_their_order(data_len, epoch, data):
    assert epoch_shuffled(data_len, epoch, shuffle=False) == list(range(data_len))
    some = epoch_shuffled(data_len, epoch, shuffle=False, num_samples=data.draw(st.integers(0, data_len)))
    assert some == sorted(set(some))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000), st.booleans())
def test_epoch_shuffle_leaves_out_others_each_epoch_and_each_row_as_often(n_taken, n_absent, epoch, shuffle):
    data_len = n_taken + n_absent
    one = EpochShuffleSampler(data_len, 3, shuffle, num_samples=n_taken)
    assert len(one) == n_taken
    counts = np.zeros(data_len, dtype=int)
    for later in range(data_len):
        one.set_epoch(epoch + later)
        rows = list(one)
        assert len(set(rows)) == len(rows) == n_taken
        counts[rows] += 1
    assert set(counts.tolist()) == {n_taken}


def test_epoch_shuffle_has_orders_of_its_own_for_each_rank_seed_and_epoch(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 5)
    orders = set()
    for rank in range(5):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        orders |= {tuple(epoch_shuffled(50, epoch, seed=seed)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 125


def test_the_order_of_epoch_shuffle_never_changes():
    assert epoch_shuffled(12, 2, seed=9) == [5, 9, 8, 10, 7, 4, 1, 2, 3, 0, 11, 6]


def test_epoch_shuffle_counts_complete_iterations_until_an_epoch_is_set():
    one = EpochShuffleSampler(data_len=7, seed=1, shuffle=True)
    assert isinstance(one, DistributedSampler)
    assert [list(one) for _ in range(3)] == [epoch_shuffled(7, epoch, seed=1) for epoch in range(3)]
    next(iter(one))
    assert one.epoch == 3
    one.set_epoch(5)
    assert list(one) == list(one) == epoch_shuffled(7, 5, seed=1)
    assert len(one) == 7


@pytest.mark.parametrize("numbers", [(-1, None), (5, 6), (5, -1), (0, 1)], ids=str)
def test_epoch_shuffle_of_rows_that_are_not_there_is_refused(numbers):
    data_len, num_samples = numbers
    with pytest.raises(H5ValueError, match=rf"data_len={data_len}, num_samples={num_samples}\)"):
        EpochShuffleSampler(data_len, num_samples=num_samples)


@given(st.integers(1, 60), st.integers(1, 9), st.booleans())
def test_ranks_that_pass_the_lengths_of_their_shards_take_equally_many_rows(n_rows, world_size, shuffle):
    assume(n_rows >= world_size)
    shards = all_ranks(n_rows, world_size)
    samplers = [EpochShuffleSampler(note_length(shard), 5, shuffle) for shard in shards]
    if not shuffle:
        assert [len(one) for one in samplers] == [shard.n_held for shard in shards]
        return
    assert {len(one) for one in samplers} == {n_rows // world_size}
    assert len(EpochShuffleSampler(shards[0].n_held, num_samples=shards[0].n_held)) == shards[0].n_held
    absent = []
    for epoch in range(shards[0].n_held):
        samplers[0].set_epoch(epoch)
        absent += sorted({*range(shards[0].n_held)} - {*samplers[0]})
    assert len(absent) == len(set(absent)) == (shards[0].n_held if n_rows % world_size else 0)


def test_a_length_that_is_no_shards_is_taken_whole():
    note_length(all_ranks(9, 2)[0])
    assert len(EpochShuffleSampler(7)) == 7
    assert len(EpochShuffleSampler(5)) == 4
