"""Mixtures in batches of at most so many steps: on any number of ranks, over epochs, and after a resume anywhere."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_mixture import source_of
from test_token_batches import MAX_TOKENS, cost, dealt, packs, pools, ranks, recipe
from test_weight_schedule import schedules

from lightning_h5.order import (
    BlockTable,
    Mixture,
    OrderParameters,
    PlanSampler,
    Position,
    Segment,
    SourceOrder,
    TokenMixtureRecipe,
    WeightSchedule,
)
from lightning_h5.order.weight_schedule import ShareIntegral

__all__ = ["pools"]  # a fixture

in_pools = pytest.mark.usefixtures("pools")
STRATEGIES = ("concat", "weighted", "round_robin", "alternating", "sequential")
orders = st.sampled_from([SourceOrder("none"), SourceOrder("global"), SourceOrder("chunks", 2, 3)])
lengths_of_a_source = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=40).map(np.array)
more_than_single = st.lists(st.integers(1, MAX_TOKENS // 4), min_size=20, max_size=40).map(np.array)


class Case:
    """A mixture of sequences, and its samplers."""

    def __init__(self, lengths, mixture, packs, source_orders):
        self.lengths, self.mixture, self.packs = np.concatenate(lengths), mixture, packs
        parts = [self.lengths] if mixture.strategy == "concat" else lengths
        tokens = [recipe(part, packs) for part in parts]
        self.recipe = TokenMixtureRecipe(mixture, [one.blocks for one in tokens], tokens)
        self.orders = tuple(source_orders[: len(parts)])

    def samplers(self, world_size, drop_last=False):
        blocks = BlockTable.of_sizes([len(self.lengths)])
        order = OrderParameters(mode="global", batch_size=MAX_TOKENS, recipe=self.recipe.text, sources=self.orders)
        options = {"recipe": self.recipe, "batch_size": MAX_TOKENS, "drop_last": drop_last, "world_size": world_size}
        return [PlanSampler(blocks, order, rank=rank, **options) for rank in range(world_size)]

    def batches(self, world_size, epoch):
        return dealt(self.samplers(world_size), epoch)

    def rows(self, numbers):
        return np.asarray(numbers) % len(self.lengths)

    def source(self, batch):
        (source,) = {source_of(self.mixture, number) for number in batch.tolist()}
        return source


def mixture_of(lengths, **options):
    return Mixture(names=tuple("abcd"[: len(lengths)]), n_rows=tuple(map(len, lengths)), **options)


@st.composite
def cases(draw, *, strategies=STRATEGIES, lengths=lengths_of_a_source, epoch_lengths=("sum", "max", "min", 3)):
    parts = draw(st.lists(lengths, min_size=1, max_size=4))
    n, strategy = len(parts), draw(st.sampled_from(strategies))
    options = {"strategy": strategy, "epoch_length": draw(st.sampled_from(epoch_lengths))}
    if strategy == "weighted":
        of_sources = st.lists(st.integers(0, 5).map(float), min_size=n, max_size=n).filter(any).map(tuple)
        options["weights"] = draw(st.none() | of_sources)
    if strategy == "alternating":
        options["pattern"] = tuple(draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=6)))
    return Case(parts, mixture_of(parts, **options), draw(packs), draw(st.lists(orders, min_size=n, max_size=n)))


@pytest.mark.wide
@in_pools
@given(cases(), ranks, st.integers(0, 3))
def test_all_ranks_have_equally_many_batches_of_one_source_within_the_limit(case, world_size, epoch):
    batches = case.batches(world_size, epoch)
    assert {len(list(one.tokens(epoch + 1))) * world_size for one in case.samplers(world_size)} == {len(batches)}
    for batch in batches:
        assert cost(case.lengths, case.rows(batch), case.packs) <= MAX_TOKENS
        assert case.mixture.strategy == "concat" or case.source(batch) >= 0


@pytest.mark.wide
@in_pools
@given(cases(epoch_lengths=("sum", 3), lengths=more_than_single), ranks)
def test_each_sequence_comes_once_a_cycle_of_its_source(case, world_size):
    counts, n_all = Counter(), len(case.lengths)
    for epoch in range(4):
        batches = case.batches(world_size, epoch)
        counts.update(number for batch in batches for number in batch.tolist())
    assert set(counts.values()) <= {1}
    for source, n_rows in enumerate(case.mixture.n_rows):
        cycles = [number // n_all for number in counts if source_of(case.mixture, number) == source]
        assert case.mixture.strategy == "concat" or all(
            cycles.count(at) == n_rows for at in range(max(cycles, default=0))
        )


@pytest.mark.wide
@in_pools
@given(cases(strategies=("concat", "weighted", "sequential"), epoch_lengths=("sum",), lengths=more_than_single), ranks)
def test_by_size_every_epoch_has_each_sequence_once(case, world_size):
    assume(case.mixture.weights is None)
    for epoch in range(3):
        rows = case.rows(np.concatenate(case.batches(world_size, epoch)))
        assert sorted(rows.tolist()) == list(range(len(case.lengths)))


@pytest.mark.wide
@in_pools
@given(cases(strategies=("weighted",), epoch_lengths=(2, 7)), ranks)
def test_shares_are_exact_to_a_batch_all_through_the_run(case, world_size):
    order = case.samplers(1)[0].present_order()
    shares = case.mixture.shares(case.recipe.n_cycle(order, drop_last=False))
    counts = [0] * len(shares)
    batches = [batch for epoch in range(4) for batch in case.batches(world_size, epoch)]
    assert len(batches) == 4 * world_size * case.mixture.epoch_length
    for n, batch in enumerate(batches, 1):
        counts[case.source(batch)] += 1
        assert all(abs(count - share * n) < 1 for count, share in zip(counts, shares, strict=True))


@settings(max_examples=15)
@given(schedules(most=3), st.data(), ranks)
def test_shares_follow_a_schedule_exact_to_a_batch(schedule, data, world_size):
    parts = data.draw(st.lists(more_than_single, min_size=len(schedule.weights[0]), max_size=len(schedule.weights[0])))
    mixture = mixture_of(parts, strategy="weighted", weights=schedule, epoch_length=6)
    case, integral = Case(parts, mixture, True, [SourceOrder("global")] * 3), ShareIntegral(schedule, 1)
    counts = [0] * integral.n_sources
    for n, batch in enumerate((batch for epoch in range(3) for batch in case.batches(world_size, epoch)), 1):
        counts[case.source(batch)] += 1
        assert all(abs(count - integral.before(source, n)) < 1 for source, count in enumerate(counts))


stretches = st.lists(st.tuples(ranks, st.integers(0, 5)), min_size=1, max_size=3)


@pytest.mark.wide
@in_pools
@given(cases(), stretches, ranks)
def test_an_epoch_broken_off_anywhere_goes_on_with_exactly_the_rest(case, stretches, last):
    """Whatever the number of ranks was in each stretch, and is now."""
    order = case.samplers(stretches[0][0])[0].position(2).order
    plan = case.recipe.sequence(order, 2, drop_last=False).plan(
        (), batch_size=MAX_TOKENS, world_size=1, rank=0, drop_last=False
    )
    whole = [row for step in range(plan.n_steps) for row in plan.rows(step).tolist()]
    consumed, segments = [], []
    for world_size, n_steps in [*stretches, (last, 10**6)]:
        own = case.samplers(world_size)
        for one in own:
            one.restore(Position.from_state(Position(2, tuple(segments), order).state(one), one))
        tokens = [[token.rows.tolist() for token in one.tokens(2)][:n_steps] for one in own]
        assert len({len(of_rank) for of_rank in tokens}) == 1
        consumed += [row for step in zip(*tokens, strict=True) for rows in step for row in rows]
        if tokens[0]:
            segments.append(Segment(MAX_TOKENS, world_size, len(tokens[0]) * world_size))
    assert consumed == whole[: len(consumed)]
    # A fixed number of steps is that of more ranks, of which fewer ranks take so many.
    assert case.mixture.epoch_length == 3 or len(whole) - len(consumed) < last


@pytest.mark.wide
@in_pools
@given(cases(), ranks, st.integers(0, 3))
def test_any_batch_is_reached_without_those_before_it(case, world_size, epoch):
    for one, again in zip(case.samplers(world_size), case.samplers(world_size), strict=True):
        plan = again.plan(epoch)
        for token in reversed(list(one.tokens(epoch))):
            assert plan.rows(token.step).tolist() == token.rows.tolist()
            assert plan.bounds(token.step)[0] == token.position


def two_sources(**options):
    rng = np.random.default_rng(1)
    parts = [rng.integers(1, 9, 400), rng.integers(20, 40, 60)]
    return Case(parts, mixture_of(parts, strategy="weighted", **options), True, [SourceOrder("global")] * 2)


def test_packed_shares_of_batches_are_about_those_of_steps():
    case = two_sources(weights=(1.0, 1.0), epoch_length=200)
    n_steps = [0, 0]
    for batch in case.batches(1, 0):
        n_steps[case.source(batch)] += case.lengths[case.rows(batch)].sum()
    assert n_steps[0] / sum(n_steps) == pytest.approx(0.5, abs=0.03)


def test_the_expected_shares_of_the_log_are_those_of_rows():
    case = two_sources(weights=(1.0, 1.0), epoch_length=200)
    rows = np.concatenate(case.batches(1, 0))
    expected = case.recipe.expected_shares(case.samplers(1)[0].present_order(), drop_last=False)
    assert np.mean([source_of(case.mixture, row) == 0 for row in rows]) == pytest.approx(expected["a"], abs=0.02)
    assert sum(expected.values()) == pytest.approx(1)


def test_the_text_names_the_limit_and_the_mixture():
    """A saved position does not go on with another limit."""
    case = two_sources(weights=WeightSchedule((0, 5), ((1.0, 1.0), (3.0, 1.0))), epoch_length=6)
    assert case.recipe.text.endswith("of batches of {'a': 400, 'b': 60}, in packed batches of at most 64 steps")
    padded = replace(case.recipe, tokens=[replace(one, packs=False) for one in case.recipe.tokens])
    assert padded.text != case.recipe.text


def test_the_order_is_the_same_in_every_version():
    """Pinned: a saved position counts in it."""
    batches = two_sources(weights=(2.0, 1.0), epoch_length=6).batches(1, 1)
    assert [batch[:3].tolist() for batch in batches] == [
        [92, 272, 270],
        [455, 457, 402],
        [236, 174, 44],
        [251, 58, 331],
        [452, 459],
        [146, 227, 27],
    ]
