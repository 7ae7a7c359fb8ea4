"""Batches of at most so many steps: each sequence once an epoch, on any number of ranks, with hardly a step unused."""

import pickle

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_h5 import H5ValueError
from lightning_h5.order import (
    BlockTable,
    OrderParameters,
    PlanSampler,
    Position,
    RankShard,
    Segment,
    ShardSampler,
    TokenRecipe,
)

MODES = ["global", "chunks", "none"]
PACKS = [False, True]
MAX_TOKENS = 64
PROTEINS = np.clip(np.random.default_rng(5).lognormal(5.54, 0.6, 60_000), 20, 2_000).astype(np.int64)  # mean 300
RECORDINGS = np.clip(np.random.default_rng(6).lognormal(9.5, 0.5, 20_000), 1_000, 60_000).astype(np.int64)

modes, packs, ranks = st.sampled_from(MODES), st.booleans(), st.integers(1, 7)
some_lengths = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=90).map(np.array)
sizes = st.integers(1, 9) | st.just(MAX_TOKENS)


@pytest.fixture(params=[3, 1024], ids=["small pools", "large pools"])
def pools(request, monkeypatch):
    """Few sequences are one pool, unless pools are small."""
    monkeypatch.setattr("lightning_h5.order.token_batches.STRETCH_BATCHES", request.param)


in_pools = pytest.mark.usefixtures("pools")


def recipe(lengths, packs, max_tokens=MAX_TOKENS, shard=None):
    n = len(lengths)
    blocks = BlockTable.of_sizes([10] * (n // 10) + [n % 10] * (n % 10 > 0))
    return TokenRecipe(np.asarray(lengths), blocks, max_tokens, packs, shard)


def samplers(plan, world_size, *, mode="global", seed=0, batch_size=None, **options):
    batch_size = plan.max_tokens if batch_size is None else batch_size
    order = OrderParameters(mode=mode, seed=seed, batch_size=batch_size, streams=2, window=3, recipe=plan.text)
    common = {"recipe": plan, "batch_size": batch_size} | options
    return [PlanSampler(plan.blocks, order, rank=rank, world_size=world_size, **common) for rank in range(world_size)]


def dealt(ranks, epoch):
    """Batches in the order of the sequence: step by step, rank by rank."""
    steps = [list(rank.tokens(epoch)) for rank in ranks]
    assert {len(tokens) for tokens in steps} == {len(ranks[0])}, "all ranks take as many steps as their length says"
    return [token.rows for tokens in zip(*steps, strict=True) for token in tokens]


def cost(lengths, batch, packs):
    return int(lengths[batch].sum()) if packs else int(lengths[batch].max()) * len(batch)


def costs(lengths, batches, packs):
    return np.array([cost(lengths, batch, packs) for batch in batches])


@pytest.mark.wide
@in_pools
@given(some_lengths, packs, ranks, modes, sizes, st.integers(0, 9))
def test_each_sequence_comes_once_in_batches_within_the_limit(lengths, packs, world_size, mode, size, epoch):
    batches = dealt(samplers(recipe(lengths, packs), world_size, mode=mode, batch_size=size), epoch)
    assert all(len(batch) <= size for batch in batches)
    assert all(cost(lengths, batch, packs) <= MAX_TOKENS for batch in batches)
    rows = np.concatenate([np.empty(0, np.int64), *batches])
    assert len(np.unique(rows)) == len(rows)
    n_left_out = len(lengths) - len(rows)
    # Without enough sequences for another step of all ranks, those beyond the last whole step are left out.
    assert n_left_out == 0 or (n_left_out < world_size and len(lengths) < len(batches) + world_size)


@pytest.mark.wide
@in_pools
@given(some_lengths, packs, ranks, modes, sizes, st.booleans())
def test_every_epoch_has_equally_many_steps(lengths, packs, world_size, mode, size, drop_last):
    ranks = samplers(recipe(lengths, packs), world_size, mode=mode, batch_size=size, drop_last=drop_last)
    assert {len(list(rank.tokens(epoch))) for rank in ranks for epoch in range(6)} == {len(ranks[0])}


@pytest.mark.wide
@in_pools
@given(some_lengths, packs, ranks, st.sampled_from(["global", "chunks"]), st.integers(0, 9))
def test_where_the_end_is_dropped_whole_batches_are(lengths, packs, world_size, mode, epoch):
    plan = recipe(lengths, packs)
    alone = [batch.tolist() for batch in dealt(samplers(plan, 1, mode=mode), epoch)]
    dropped = [batch.tolist() for batch in dealt(samplers(plan, world_size, mode=mode, drop_last=True), epoch)]
    assert dropped == alone[: len(alone) // world_size * world_size]


@pytest.mark.wide
@in_pools
@given(some_lengths, packs, modes, sizes, st.lists(st.tuples(ranks, st.integers(0, 5)), min_size=1, max_size=3), ranks)
def test_an_epoch_broken_off_anywhere_goes_on_with_exactly_the_rest(lengths, packs, mode, size, stretches, last):
    """Whatever the number of ranks was in each stretch, and is now."""
    assume(size > 1)
    order = samplers(recipe(lengths, packs), 1, mode=mode, batch_size=size)[0].present_order()
    whole = np.concatenate(dealt(samplers(recipe(lengths, packs), 1, mode=mode, batch_size=size), 2))
    consumed, segments = [], []
    for world_size, n_steps in [*stretches, (last, 10**6)]:
        ranks = samplers(recipe(lengths, packs), world_size, mode=mode, batch_size=size)
        for rank in ranks:
            rank.restore(Position(2, tuple(segments), order))
            assert rank.n_left(2) == len(lengths) - sum(map(len, consumed))
        tokens = [[token.rows for token in rank.tokens(2)][:n_steps] for rank in ranks]
        assert len({len(of_rank) for of_rank in tokens}) == 1
        consumed += [rows for step in zip(*tokens, strict=True) for rows in step]
        assert all(cost(lengths, rows, packs) <= MAX_TOKENS for rows in consumed)
        if tokens[0]:
            segments.append(Segment(size, world_size, len(tokens[0]) * world_size))
    rows = np.concatenate([np.empty(0, np.int64), *consumed])
    assert rows.tolist() == whole[: len(rows)].tolist()
    assert len(whole) - len(rows) < last, "no more is left than cannot be shared"


@pytest.mark.wide
@in_pools
@given(some_lengths, packs, ranks, modes, st.data())
def test_resumed_on_as_many_ranks_each_batch_is_the_one_of_an_unbroken_epoch(lengths, packs, world_size, mode, data):
    whole = dealt(samplers(recipe(lengths, packs), world_size, mode=mode), 3)
    n_steps = data.draw(st.integers(0, len(whole) // world_size))
    ranks = samplers(recipe(lengths, packs), world_size, mode=mode)
    segments = (Segment(MAX_TOKENS, world_size, n_steps * world_size),) if n_steps else ()
    for rank in ranks:
        rank.restore(Position(3, segments, rank.present_order()))
        assert [token.step for token in rank.tokens(3)] == list(range(n_steps, len(rank)))
    rest = [[token.rows.tolist() for token in rank.tokens(3)] for rank in ranks]
    found = [rows for step in zip(*rest, strict=True) for rows in step]
    assert found == [rows.tolist() for rows in whole[n_steps * world_size :]]


@pytest.mark.wide
@given(some_lengths, packs, ranks, sizes, st.booleans())
def test_an_evaluation_takes_each_sequence_once_in_storage_order(lengths, packs, world_size, size, has_ends):
    ends = np.unique(np.append(np.arange(5, len(lengths), 5), len(lengths))) if has_ends else None
    ranks = samplers(recipe(lengths, packs), world_size, mode="none", batch_size=size, evaluation=True, ends=ends)
    of_ranks = [[token.rows for token in rank.tokens(0)] for rank in ranks]
    batches = [rows for of_rank in of_ranks for rows in of_rank]
    assert np.concatenate(batches).tolist() == list(range(len(lengths)))
    assert all(0 < len(rows) <= size and cost(lengths, rows, packs) <= MAX_TOKENS for rows in batches)
    n_steps = [len(of_rank) for of_rank in of_ranks]
    assert n_steps == [len(rank) for rank in ranks]
    n_rows = [sum(map(len, of_rank)) for of_rank in of_ranks]
    assert n_steps == [min(max(n_steps), n) for n in n_rows], "fewer only where a rank has fewer sequences"
    assert ranks[0].has_idle_rank == (min(n_rows) == 0)


@pytest.mark.wide
@in_pools
@given(some_lengths, packs, ranks, st.sampled_from(["interleave", "contiguous"]), st.sampled_from(MODES[::2]), sizes)
def test_ranks_that_hold_their_sequences_take_equally_many_steps(lengths, packs, world_size, kind, mode, size):
    assume(len(lengths) >= world_size)
    blocks, held = recipe(lengths, packs).blocks, []
    for rank in range(world_size):
        shard = RankShard(blocks, world_size, rank, mode=kind)
        plan = recipe(lengths, packs, shard=shard)
        order = OrderParameters(mode=mode, batch_size=size, recipe=plan.text)
        sampler = ShardSampler(shard, order, recipe=plan, batch_size=size, drop_last=False)
        own = np.asarray(shard.rows())
        epochs = [[own[token.rows] for token in sampler.tokens(epoch)] for epoch in range(2)]
        assert {len(batches) for batches in epochs} == {len(sampler)}
        half = len(sampler) // 2
        sampler.restore(Position(1, (Segment(size, 1, half),) if half else (), sampler.present_order()))
        assert [own[token.rows].tolist() for token in sampler.tokens(1)] == [rows.tolist() for rows in epochs[1][half:]]
        held.append(epochs[1])
    assert len({len(batches) for batches in held}) == 1
    rows = np.concatenate([rows for batches in held for rows in batches])
    assert len(np.unique(rows)) == len(rows)
    assert all(cost(lengths, batch, packs) <= MAX_TOKENS for batches in held for batch in batches)
    least = min(len(lengths) // world_size, len(held[0]))
    assert len(rows) == len(lengths) or least == len(lengths) // world_size, "a rank has a batch of each sequence"


@pytest.mark.parametrize("world_size", [1, 4, 7])
@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize(("lengths", "max_tokens"), [(PROTEINS, 16_384), (RECORDINGS, 250_000)])
def test_at_most_one_percent_of_packed_batches_is_unused(lengths, max_tokens, mode, world_size):
    plan = recipe(lengths, True, max_tokens)
    for epoch in range(2):
        n_steps = costs(lengths, dealt(samplers(plan, world_size, mode=mode), epoch), True)
        assert n_steps.mean() >= 0.99 * max_tokens
        assert np.quantile(n_steps, 0.05) >= 0.99 * max_tokens


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("mode", MODES[:2])
def test_padded_batches_are_within_three_percent_of_the_limit_and_hardly_padded(mode, world_size):
    batches = dealt(samplers(recipe(PROTEINS, False, 16_384), world_size, mode=mode), 1)
    n_steps = costs(PROTEINS, batches, False)
    assert n_steps.mean() >= 0.97 * 16_384
    assert 1 - PROTEINS.sum() / n_steps.sum() <= 0.03


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("packs", PACKS)
@in_pools
def test_lengths_do_not_drift_over_an_epoch(packs, mode):
    """Also in files that are sorted by length."""
    lengths = np.sort(PROTEINS[:20_000])
    for epoch in range(3):
        batches = dealt(samplers(recipe(lengths, packs, 4_096), 1, mode=mode, seed=epoch), epoch)
        means = np.array([lengths[batch].mean() for batch in batches])
        place = np.linspace(-1, 1, len(means))
        slope = np.polyfit(place, means, 1)[0]
        # As far as the slope of shuffled batches: 4 standard errors.
        assert abs(slope) < 4 * means.std() / np.sqrt((place**2).sum())


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("packs", PACKS)
@in_pools
def test_who_shares_a_batch_changes_from_epoch_to_epoch(packs, mode):
    ranks = samplers(recipe(PROTEINS[:2_000], packs, 16_384), 1, mode=mode)

    def pairs(epoch):
        batches = dealt(ranks, epoch)
        return {(a, b) for batch in map(np.sort, batches) for at, a in enumerate(batch) for b in batch[at + 1 :]}

    first, second = pairs(0), pairs(1)
    # Neighbors in length share padded batches more often.
    assert len(first & second) < (0.5 if packs else 0.8) * len(first)


@pytest.mark.parametrize("packs", PACKS)
def test_sequences_of_one_length_are_mixed_as_any_rows_are(packs):
    ranks = samplers(recipe(np.full(200, 8), packs), 1)
    first, second = ({tuple(sorted(batch)) for batch in dealt(ranks, epoch)} for epoch in range(2))
    assert len(first) == 25
    assert not first & second


def test_an_epoch_that_needs_more_batches_than_others_uses_a_reference_order(monkeypatch):
    """Lengths of a half or a third of the limit fit well or badly, as the order is."""
    from lightning_h5.order import token_batches

    monkeypatch.setattr(token_batches, "MAX_REFERENCES", 1)
    monkeypatch.setattr(token_batches, "STRETCH_BATCHES", 4)
    used, reference = [], token_batches._reference
    monkeypatch.setattr(token_batches, "_reference", lambda *arguments: used.append(arguments) or reference(*arguments))
    lengths = np.random.default_rng(0).choice([33, 31, 22, 21, 20], 120)
    ranks = samplers(recipe(lengths, True), 1)
    n_steps = len(ranks[0])
    used.clear()
    for epoch in range(20):
        batches = dealt(ranks, epoch)
        assert len(batches) == n_steps
        assert sorted(np.concatenate(batches)) == list(range(120))
    assert used


def test_without_shuffling_batches_are_runs_of_the_file():
    lengths = np.array([10, 20, 30, 40, 50, 60, 5, 5, 5])
    packed = [batch.tolist() for batch in dealt(samplers(recipe(lengths, True), 1, mode="none"), 0)]
    assert packed == [[0, 1, 2], [3], [4], [5], [6, 7, 8]]
    padded = [batch.tolist() for batch in dealt(samplers(recipe(lengths, False), 1, mode="none"), 0)]
    assert padded == [[0, 1], [2], [3], [4], [5], [6, 7, 8]]


def test_the_order_is_the_same_in_every_version():
    """Pinned: a saved position counts in it."""
    lengths = np.random.default_rng(1).integers(1, MAX_TOKENS, 24)
    packed = [batch.tolist() for batch in dealt(samplers(recipe(lengths, True), 1, seed=3), 1)]
    padded = [batch.tolist() for batch in dealt(samplers(recipe(lengths, False), 1, seed=3), 1)]
    assert packed[:8] == [[22], [17, 11, 19], [13, 5], [12, 14], [20], [3], [7], [21, 8]]
    assert padded[:8] == [[5, 18, 4, 19], [22], [23], [13], [0, 11], [10], [7], [6]]


def test_a_recipe_travels_to_another_process_without_the_epochs_that_it_made():
    plan = recipe(PROTEINS[:500], True, 16_384)
    first = dealt(samplers(plan, 1), 0)
    copy = pickle.loads(pickle.dumps(plan))
    assert not copy._recent
    assert [batch.tolist() for batch in dealt(samplers(copy, 1), 0)] == [batch.tolist() for batch in first]


def test_the_rest_of_an_epoch_with_another_limit_of_samples_is_refused():
    plan = recipe(np.arange(1, 41), True)
    begun = samplers(plan, 1, batch_size=4)[0].present_order()
    (other,) = samplers(plan, 1, batch_size=5)
    other.restore(Position(0, (Segment(4, 1, 3),), begun))
    with pytest.raises(H5ValueError, match="begun with batches of 4 rows"):
        list(other.tokens(0))
