"""Rows drawn by their weights: how often each comes, on any number of ranks, and where a broken epoch goes on."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import H5ValueError
from lightning_h5.order import (
    BlockTable,
    OrderParameters,
    PlanSampler,
    Position,
    RankShard,
    RowWeights,
    Segment,
    ShardSampler,
    WeightedRecipe,
    as_array,
)

MODES = ["none", "global", "chunks"]
EPOCHS = 200
modes = st.sampled_from(MODES)
values = st.one_of(st.just(0.0), st.integers(1, 9).map(float), st.floats(1e-3, 1e3))
weightings = st.lists(values, min_size=1, max_size=80).filter(any).map(np.array)
sizes = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def blocks_of(n_rows, sizes):
    """Blocks of these sizes, again and again."""
    ends = np.cumsum(np.resize(sizes, n_rows))
    return BlockTable(np.unique(np.minimum(np.concatenate([[0], ends]), n_rows)))


def sampler(weights, rank=0, world_size=1, *, mode="global", seed=0, sizes=(5,), batch_size=4, **options):
    weights = np.asarray(weights, dtype=np.float64)
    parameters = OrderParameters(mode=mode, seed=seed, batch_size=batch_size, streams=2, window=3)
    blocks = blocks_of(len(weights), list(sizes))
    weighted = RowWeights(weights, "by 'w'")
    recipe = WeightedRecipe(weighted, blocks)
    return PlanSampler(
        blocks, parameters, recipe=recipe, batch_size=batch_size, rank=rank, world_size=world_size, **options
    )


def dealt(ranks, epoch):
    """Numbers that the ranks are given, in the order of the sequence: step by step, rank by rank."""
    steps = [list(one.tokens(epoch)) for one in ranks]
    assert len({len(tokens) for tokens in steps}) == 1, "all ranks take equally many steps"
    return [number for tokens in zip(*steps, strict=True) for token in tokens for number in token.rows.tolist()]


def drawn(weights, epoch=0, world_size=1, **options):
    ranks = [sampler(weights, rank, world_size, **options) for rank in range(world_size)]
    found = dealt(ranks, epoch)
    if epoch == 0:
        assert {len(one) for one in ranks} == {len(list(ranks[0].tokens(0)))}
    return np.array(found)


def counts_of(numbers, n_rows):
    return np.bincount(numbers % n_rows, minlength=n_rows)


@given(weightings, sizes, modes, st.integers(0, 2**31), st.integers(0, 50))
def test_an_epoch_draws_as_many_rows_as_there_are_each_as_often_as_its_weight_says(weights, sizes, mode, seed, epoch):
    n_rows = len(weights)
    numbers = drawn(weights, epoch, mode=mode, seed=seed, sizes=sizes)
    counts, expected = counts_of(numbers, n_rows), weights / weights.sum() * n_rows
    assert len(numbers) == n_rows
    assert (counts >= np.floor(expected - 1e-9) - 1).all()
    assert (counts <= np.ceil(expected + 1e-9) + 1).all()
    assert not counts[weights == 0].any()


@given(weightings, sizes, modes, st.integers(0, 50))
def test_the_numbers_of_a_row_that_comes_again_are_all_different_and_count_its_draws(weights, sizes, mode, epoch):
    n_rows = len(weights)
    numbers = drawn(weights, epoch, mode=mode, sizes=sizes)
    counts = counts_of(numbers, n_rows)
    assert len(np.unique(numbers)) == n_rows
    for row in np.flatnonzero(counts):
        assert sorted(numbers[numbers % n_rows == row] // n_rows) == list(range(counts[row]))


@given(st.integers(1, 120), st.floats(1e-6, 1e6), sizes, modes, st.integers(0, 50))
def test_rows_of_equal_weights_come_once_each(n_rows, weight, sizes, mode, epoch):
    numbers = drawn(np.full(n_rows, weight), epoch, mode=mode, sizes=sizes)
    assert sorted(numbers.tolist()) == list(range(n_rows))


@pytest.mark.wide
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["uniform", "zeros among them", "one heavy row", "log-normal"])
def test_over_many_epochs_each_row_comes_as_often_as_its_weight_says(mode, kind):
    random = np.random.default_rng(3)
    weights = random.random(60)
    if kind == "zeros among them":
        weights *= random.random(60) < 0.6
    elif kind == "one heavy row":
        weights[17] = 20
    elif kind == "log-normal":
        weights = random.lognormal(0, 1.5, 60)
    expected = weights / weights.sum() * 60
    counts = np.array([counts_of(drawn(weights, epoch, mode=mode, seed=1), 60) for epoch in range(EPOCHS)])
    # A row has whole parts of the sum, which are sure, and a share of one more at each end at most.
    ends = np.cumsum(expected)
    shares = np.stack([ends % 1, (ends - expected) % 1])
    spread = np.sqrt((shares * (1 - shares)).sum(0) / EPOCHS)
    z = (counts.mean(0) - expected) / np.maximum(spread, 1e-3)
    assert np.abs(z).max() < 4
    assert np.square(z).mean() < 2


@pytest.mark.parametrize("mode", MODES)
def test_neighbouring_epochs_draw_other_rows(mode):
    weights = np.random.default_rng(0).random(50)
    epochs = [counts_of(drawn(weights, epoch, mode=mode), 50).tolist() for epoch in range(20)]
    assert all(first != second for first, second in pairwise(epochs))


def test_another_seed_draws_other_rows():
    weights = np.random.default_rng(0).random(50)
    assert len({tuple(drawn(weights, seed=seed)) for seed in range(20)}) == 20


@pytest.mark.parametrize("mode", MODES)
def test_repeating_epochs_are_all_like_the_first(mode):
    weights = np.random.default_rng(0).random(50)
    first = drawn(weights, 0, mode=mode).tolist()
    assert [drawn(weights, epoch, mode=mode, repeats=True).tolist() for epoch in range(4)] == [first] * 4


@given(weightings.filter(lambda weights: len(weights) >= 4), st.integers(2, 9), st.integers(2, 4), modes, st.data())
def test_the_sequence_is_the_same_for_every_world_size(weights, batch_size, world_size, mode, data):
    epoch = data.draw(st.integers(0, 9))
    options = {"mode": mode, "batch_size": batch_size}
    assert drawn(weights, epoch, world_size, **options).tolist() == drawn(weights, epoch, **options).tolist()


@given(
    weightings.filter(lambda weights: len(weights) >= 4),
    st.lists(st.tuples(st.integers(2, 9), st.integers(1, 4), st.integers(0, 6)), max_size=3),
    modes,
)
def test_an_epoch_broken_off_anywhere_goes_on_with_exactly_the_rest(weights, stretches, mode):
    """Whatever the batch size and the world size of each stretch were."""
    whole = drawn(weights, 2, mode=mode).tolist()
    order = sampler(weights, mode=mode).present_order()
    seen, segments = [], []
    for batch_size, world_size, steps in [*stretches, (3, 1, 10**6)]:
        ranks = [sampler(weights, rank, world_size, mode=mode, batch_size=batch_size) for rank in range(world_size)]
        if len(weights) - len(seen) < world_size:
            break
        for one in ranks:
            one.restore(Position(2, tuple(segments), order))
            assert one.n_left(2) == len(whole) - len(seen)
        tokens = [list(one.tokens(2))[:steps] for one in ranks]
        seen += [number for step in zip(*tokens, strict=True) for token in step for number in token.rows.tolist()]
        if tokens[0]:
            segments.append(Segment(batch_size, world_size, len(tokens[0]) * world_size))
    else:
        assert seen == whole
    assert seen == whole[: len(seen)]


@given(weightings, sizes, modes, st.integers(0, 9))
def test_any_batch_is_reached_without_those_before_it(weights, sizes, mode, epoch):
    one = sampler(weights, mode=mode, sizes=sizes)
    plan = one.plan(epoch)
    for token in reversed(list(one.tokens(epoch))):
        assert plan.rows(token.step).tolist() == token.rows.tolist()


@pytest.mark.parametrize("batch_size", [7, 32])
def test_draws_of_a_block_come_together_in_the_order_of_windows(batch_size):
    """So that a block is decoded once, however often its rows come."""
    random = np.random.default_rng(2)
    n_blocks, size, window = 200, 10, 4
    weights = random.lognormal(0, 1, n_blocks * size)
    parameters = OrderParameters(mode="chunks", seed=5, batch_size=batch_size, streams=1, window=window)
    blocks = BlockTable.of_sizes([size] * n_blocks)
    one = PlanSampler(
        blocks,
        parameters,
        recipe=WeightedRecipe(RowWeights(weights, "by 'w'"), blocks),
        batch_size=batch_size,
        rank=0,
        world_size=1,
    )
    blocks = np.concatenate([token.rows for token in one.tokens(1)]) % len(weights) // size
    places = np.arange(len(blocks))
    spans = [np.ptp(places[blocks == block]) for block in np.unique(blocks)]
    at_a_time = [len(np.unique(blocks[start : start + 40])) for start in range(0, len(blocks) - 40, 40)]
    assert len(spans) > 0.95 * n_blocks
    assert max(spans) < len(blocks) / 10
    assert np.mean(at_a_time) < 4 * window


def test_blocks_that_have_no_draws_are_left_out():
    weights = np.repeat([0.0, 1.0, 0.0, 2.0, 0.0], 10)
    for mode in MODES:
        numbers = drawn(weights, mode=mode, sizes=(10,))
        assert sorted(set((numbers % 50 // 10).tolist())) == [1, 3]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_number_of_0_or_more_is_refused_with_its_row(bad):
    with pytest.raises(H5ValueError, match=rf"by 'w': row 2 has the weight {bad}, and 1 of 4 rows"):
        RowWeights(np.array([1.0, 0.0, bad, 2.0]), "by 'w'")


def test_weights_that_are_all_0_are_refused():
    with pytest.raises(H5ValueError, match="all 4 weights are 0"):
        RowWeights(np.zeros(4), "by 'w'")


@pytest.mark.parametrize("scale", [1e-310, 1e-300, 1e300, 1e307])
def test_only_the_ratios_of_weights_count_however_small_or_large_they_are(scale):
    numbers = drawn(np.array([1.0, 2.0, 0.0, 3.0] * 9) * scale, mode="none")
    assert counts_of(numbers, 36).reshape(9, 4)[:, [1, 3]].min() >= 1
    assert counts_of(numbers, 36).reshape(9, 4)[:, 2].max() == 0
    assert len(numbers) == 36


def test_what_the_weights_are_is_part_of_what_a_position_depends_on():
    recipes = [sampler(weights).present_order().recipe for weights in ([1, 2, 3], [1, 3, 2], [1, 2, 3])]
    assert recipes[0] == recipes[2] != recipes[1]


@given(
    st.lists(st.floats(0.01, 100), min_size=4, max_size=60).map(np.array),
    st.integers(1, 4),
    st.sampled_from(["contiguous", "interleave"]),
    st.sampled_from(["none", "global"]),
    st.integers(0, 3),
    st.integers(0, 20),
)
def test_ranks_that_hold_rows_draw_among_them_equally_often_and_as_their_weights_say(
    weights, world_size, mode, order, reshard_every, epoch
):
    weighted = RowWeights(weights, "by 'w'")
    steps = set()
    for rank in range(world_size):
        shard = RankShard(BlockTable.of_sizes([len(weights)]), world_size, rank, mode, reshard_every, 7)
        parameters = OrderParameters(mode=order, seed=7, batch_size=3, streams=1, window=0)
        sampler = ShardSampler(shard, parameters, weights=weighted, batch_size=3)
        numbers = [number for token in sampler.tokens(epoch) for number in token.rows.tolist()]
        assert len(set(numbers)) == len(numbers) == shard.n_held, "numbers of one epoch are unlike"
        counts = np.bincount(np.array(numbers) % shard.n_held, minlength=shard.n_held)
        held = weights[as_array(shard.rows(shard.draw(epoch)))]
        assert (np.abs(counts - held / held.sum() * shard.n_held) < 2).all()
        steps.add(len(list(sampler.tokens(epoch))))
    assert len(steps) == 1


def test_a_rank_whose_rows_have_no_weight_has_nothing_to_draw():
    shard = RankShard(BlockTable.of_sizes([6]), 2, 1, "contiguous")
    parameters = OrderParameters(mode="global", seed=0, batch_size=3, streams=1, window=0)
    sampler = ShardSampler(
        shard, parameters, weights=RowWeights(np.array([1.0, 1, 1, 0, 0, 0]), "by 'w'"), batch_size=3
    )
    with pytest.raises(H5ValueError, match="weights are 0"):
        list(sampler.tokens(0))
