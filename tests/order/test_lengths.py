"""Batches of sequences of about the same length: each once an epoch, on any number of ranks, with little padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import H5ValueError
from lightning_h5.order import BlockTable, LengthRecipe, OrderParameters, PlanSampler, Position, Segment

MODES = ["global", "chunks"]
modes = st.sampled_from(MODES)
some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=120).map(np.array)
enough_lengths = some_lengths.filter(lambda lengths: len(lengths) >= 4)


@pytest.fixture(params=[3, 1024], ids=["short stretches", "long stretches"])
def stretches(request, monkeypatch):
    """Few sequences are one stretch, which is all of them, unless stretches are short."""
    monkeypatch.setattr("lightning_h5.order.batches.STRETCH_BATCHES", request.param)


in_stretches = pytest.mark.usefixtures("stretches")


def sampler(lengths, rank=0, world_size=1, *, mode="global", seed=0, batch_size=4, **options):
    n = len(lengths)
    blocks = BlockTable.of_sizes([10] * (n // 10) + [n % 10])
    parameters = OrderParameters(mode=mode, seed=seed, batch_size=batch_size, streams=1, window=20, recipe="by length")
    recipe = LengthRecipe(np.asarray(lengths), blocks, "by length")
    return PlanSampler(
        blocks, parameters, recipe=recipe, batch_size=batch_size, rank=rank, world_size=world_size, **options
    )


def dealt(ranks, epoch):
    """Batches that the ranks are given, in the order of the sequence: step by step, rank by rank."""
    steps = [list(one.tokens(epoch)) for one in ranks]
    assert len({len(tokens) for tokens in steps}) == 1, "all ranks take equally many steps"
    return [token.rows.tolist() for tokens in zip(*steps, strict=True) for token in tokens]


def batches_of(lengths, epoch=0, world_size=1, **options):
    ranks = [sampler(lengths, rank, world_size, **options) for rank in range(world_size)]
    found = dealt(ranks, epoch)
    assert all(len(one) * world_size == len(found) for one in ranks)
    return found


def waste_of(lengths, batches):
    """Which part of all padded batches is padding."""
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    return 1 - sum(int(lengths[batch].sum()) for batch in batches) / padded


def log_normal(n, sigma):
    return np.maximum(1, np.random.default_rng(7).lognormal(4, sigma, n)).astype(np.int64)


@pytest.mark.wide
@in_stretches
@given(enough_lengths, st.integers(2, 12), st.integers(1, 4), st.integers(0, 9), modes)
def test_each_sequence_comes_once_an_epoch_with_equal_steps_on_all_ranks(lengths, size, world_size, epoch, mode):
    batches = batches_of(lengths, epoch, world_size, batch_size=size, mode=mode)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= size for batch in batches)


@pytest.mark.wide
@in_stretches
@given(some_lengths, st.integers(1, 12), st.integers(1, 4), modes, st.booleans())
def test_every_epoch_has_as_many_steps_as_its_length_says(lengths, size, world_size, mode, drop_last):
    options = {"batch_size": size, "mode": mode, "drop_last": drop_last}
    ranks = [sampler(lengths, rank, world_size, **options) for rank in range(world_size)]
    assert {len(list(one.tokens(epoch))) for one in ranks for epoch in range(5)} == {len(ranks[0])}


@pytest.mark.wide
@in_stretches
@given(enough_lengths, st.integers(1, 12), st.integers(1, 4), st.integers(0, 9), modes)
def test_where_the_end_is_dropped_whole_batches_are(lengths, size, world_size, epoch, mode):
    alone = batches_of(lengths, epoch, batch_size=size, mode=mode)
    dropped = batches_of(lengths, epoch, world_size, batch_size=size, mode=mode, drop_last=True)
    assert dropped == alone[: len(alone) // world_size * world_size]


@pytest.mark.wide
@in_stretches
@given(
    enough_lengths,
    st.integers(2, 9),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), max_size=3),
    modes,
)
def test_an_epoch_broken_off_anywhere_goes_on_with_exactly_the_rest(lengths, size, stretches, mode):
    """Whatever the world size of each stretch was."""
    options = {"batch_size": size, "mode": mode}
    whole = batches_of(lengths, 1, **options)
    order = sampler(lengths, **options).present_order()
    seen, segments = [], []
    for world_size, steps in [*stretches, (1, 10**6)]:
        ranks = [sampler(lengths, rank, world_size, **options) for rank in range(world_size)]
        for one in ranks:
            one.restore(Position(1, tuple(segments), order))
            assert one.n_left(1) == len(lengths) - sum(map(len, seen))
        if ranks[0].n_left(1) < world_size:
            break
        tokens = [list(one.tokens(1))[:steps] for one in ranks]
        seen += [token.rows.tolist() for step in zip(*tokens, strict=True) for token in step]
        if tokens[0]:
            segments.append(Segment(size, world_size, len(tokens[0]) * world_size))
    flat = [row for batch in whole for row in batch]
    found = [row for batch in seen for row in batch]
    assert found == flat[: len(found)]
    if world_size == 1 and steps == 10**6:
        assert found == flat


@pytest.mark.wide
@in_stretches
@given(enough_lengths, st.integers(2, 9), st.integers(1, 4), modes, st.data())
def test_resumed_on_as_many_ranks_each_batch_is_the_one_of_an_unbroken_epoch(lengths, size, world_size, mode, data):
    options = {"batch_size": size, "mode": mode}
    whole = batches_of(lengths, 3, world_size, **options)
    steps = data.draw(st.integers(0, len(whole) // world_size))
    ranks = [sampler(lengths, rank, world_size, **options) for rank in range(world_size)]
    for one in ranks:
        segments = (Segment(size, world_size, steps * world_size),) if steps else ()
        one.restore(Position(3, segments, one.present_order()))
        assert len(one) * world_size == len(whole)
        assert [token.step for token in one.tokens(3)] == list(range(steps, len(one)))
    assert dealt(ranks, 3) == whole[steps * world_size :]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("n", "sigma"), [(2_000, 0.5), (20_000, 1.0)])
def test_little_of_a_batch_is_padding_where_plain_shuffling_wastes_almost_half(mode, world_size, n, sigma):
    lengths = log_normal(n, sigma)
    plain = np.random.default_rng(0).permutation(n)
    assert waste_of(lengths, [plain[start : start + 32] for start in range(0, n, 32)]) > 0.4
    for epoch in range(2):
        batches = batches_of(lengths, epoch, world_size, mode=mode, batch_size=32)
        assert waste_of(lengths, batches) <= 0.05
        assert max(map(len, batches)) == 32


def test_many_stretches_of_the_order_window_have_little_padding_too_and_whole_batches():
    lengths = log_normal(80_000, 1.0)
    batches = batches_of(lengths, 0, mode="chunks", batch_size=32)
    assert waste_of(lengths, batches) < 0.1
    assert {len(batch) for batch in batches} == {32}


def test_the_order_window_keeps_stretches_of_the_file_together(monkeypatch):
    """So that what is decoded together is used together, also by sequences of other lengths."""
    monkeypatch.setattr("lightning_h5.order.batches.STRETCH_BATCHES", 8)
    rows = np.concatenate(batches_of(log_normal(2_000, 0.5), 1, mode="chunks", batch_size=8))
    blocks = rows // 10
    assert max(len(np.unique(blocks[start : start + 64])) for start in range(0, 1_984, 64)) < 60
    spans = [np.ptp(np.flatnonzero(blocks == block)) for block in range(200)]
    assert np.mean(spans) < 300


@pytest.mark.parametrize("mode", MODES)
@in_stretches
def test_batches_do_not_come_by_length(mode):
    lengths = log_normal(2_000, 0.5)
    longest = np.array([lengths[batch].max() for batch in batches_of(lengths, 1, mode=mode, batch_size=32)])
    rises = np.diff(longest) > 0
    assert 0.3 < rises.mean() < 0.7
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.35


@pytest.mark.parametrize("mode", MODES)
@in_stretches
def test_who_shares_a_batch_changes_from_epoch_to_epoch(mode):
    lengths = log_normal(2_000, 0.5)

    def pairs(epoch):
        batches = batches_of(lengths, epoch, mode=mode, batch_size=32)
        return {(a, b) for batch in map(sorted, batches) for at, a in enumerate(batch) for b in batch[at + 1 :]}

    first, second = pairs(0), pairs(1)
    assert len(first & second) < 0.8 * len(first)


@pytest.mark.parametrize("mode", MODES)
def test_sequences_of_one_length_are_mixed_as_any_rows_are(mode):
    batches = batches_of(np.full(200, 7), 0, mode=mode, batch_size=8)
    other = batches_of(np.full(200, 7), 1, mode=mode, batch_size=8)
    assert [len(batch) for batch in batches] == [8] * 25
    assert not {tuple(sorted(batch)) for batch in batches} & {tuple(sorted(batch)) for batch in other}


def test_in_the_order_global_the_longest_few_come_in_smaller_batches():
    lengths = log_normal(2_000, 1.0)
    batches = batches_of(lengths, 0, batch_size=32)
    assert len(next(batch for batch in batches if int(lengths.argmax()) in batch)) < 32
    assert min(map(len, batches)) >= 1


def test_the_rest_of_an_epoch_in_other_batches_is_refused():
    one = sampler(np.arange(1, 41), batch_size=4)
    begun = one.present_order()
    other = sampler(np.arange(1, 41), batch_size=5)
    other.restore(Position(0, (Segment(4, 1, 3),), begun))
    with pytest.raises(H5ValueError, match="begun with batches of 4 rows"):
        list(other.tokens(0))
