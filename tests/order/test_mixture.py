"""The stream of a mixture: over ranks, over epochs, and where a broken run goes on."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lightning_h5 import H5ValueError
from lightning_h5.order import (
    BlockTable,
    Mixture,
    MixtureRecipe,
    OrderParameters,
    PlanSampler,
    Position,
    Segment,
    SourceOrder,
)
from lightning_h5.order.mixture import check_mixture
from lightning_h5.order.position import _digest_of_state

STRATEGIES = ("concat", "weighted", "round_robin", "alternating", "sequential")
EXACT = ("sum", "max", "min")

orders = st.one_of(
    st.sampled_from([SourceOrder("none"), SourceOrder("global")]),
    st.builds(SourceOrder, st.just("chunks"), st.integers(1, 3), st.integers(1, 3)),
)


@st.composite
def mixtures(draw, *, strategies=STRATEGIES, units=("batches", "rows"), lengths=None, **own):
    """A mixture, the order of each of its sources, and how it is cut."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    strategy, unit = draw(st.sampled_from(strategies)), draw(st.sampled_from(units))
    # Single rows that make no whole round sit out, others in each epoch: see the tests of the plan.
    batch_size = draw(st.integers(1 if unit == "batches" and strategy != "concat" else 2, 12))
    drop_last = own["drop_last"] if "drop_last" in own else draw(st.booleans())
    if drop_last and unit == "batches" and strategy != "concat":
        sizes = [max(size, batch_size) for size in sizes]
    n, weights, pattern = len(sizes), None, ()
    if strategy == "weighted":
        given_weights = st.lists(st.integers(0, 5).map(float), min_size=n, max_size=n).filter(any).map(tuple)
        weights = None if own.get("by_size") else draw(st.none() | given_weights)
    if strategy == "alternating":
        pattern = tuple(draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=6)))
    length = draw(lengths if lengths is not None else st.sampled_from(EXACT) | st.integers(1, 6))
    mixture = Mixture(
        names=tuple("abcd"[:n]),
        n_rows=tuple(sizes),
        strategy=strategy,
        unit=unit,
        weights=weights,
        pattern=pattern,
        epoch_length=length,
    )
    chosen = draw(st.lists(orders, min_size=n, max_size=n))
    return mixture, (chosen[:1] if strategy == "concat" else chosen), batch_size, drop_last


def plain(n_rows, *, batch_size=10, drop_last=False, mode="global", **options):
    names = tuple("abcd"[: len(n_rows)])
    n_orders = 1 if options["strategy"] == "concat" else len(n_rows)
    return (
        Mixture(names=names, n_rows=n_rows, **options),
        [SourceOrder(mode, 1, 3 if mode == "chunks" else 0)] * n_orders,
        batch_size,
        drop_last,
    )


def blocks_of(mixture):
    tables = [BlockTable.of_sizes([4] * (n // 4) + [n % 4]) for n in mixture.n_rows]
    if mixture.strategy == "concat":
        return [BlockTable.of_sizes(np.concatenate([np.diff(table.starts) for table in tables]))]
    return tables


def sampler(case, rank=0, world_size=1, batch_size=None, seed=0):
    mixture, chosen, size, drop_last = case
    parameters = OrderParameters(mode="global", seed=seed, batch_size=size, recipe=mixture.text, sources=tuple(chosen))
    blocks = blocks_of(mixture)
    return PlanSampler(
        BlockTable.of_sizes(np.concatenate([np.diff(table.starts) for table in blocks])),
        parameters,
        recipe=MixtureRecipe(mixture, blocks),
        batch_size=batch_size or size,
        drop_last=drop_last,
        rank=rank,
        world_size=world_size,
    )


def stream_of(case, world_size=1, epoch=0, **options):
    """Batches of an epoch in the order of the stream: step by step, rank by rank."""
    ranks = [sampler(case, rank, world_size, **options) for rank in range(world_size)]
    steps = [list(one.tokens(epoch)) for one in ranks]
    assert len({len(tokens) for tokens in steps}) == 1, "all ranks take equally many steps"
    assert all(len(one) == len(tokens) for one, tokens in zip(ranks, steps, strict=True))
    return [token.rows.tolist() for tokens in zip(*steps, strict=True) for token in tokens]


def joined(batches):
    return [row for batch in batches for row in batch]


def source_of(mixture, number):
    """Which source a row's number is of."""
    return int(np.searchsorted(np.cumsum(mixture.n_rows), number % sum(mixture.n_rows), side="right"))


def by_source(mixture, numbers):
    found = {source: [] for source in range(len(mixture.n_rows))}
    for number in numbers:
        found[source_of(mixture, number)].append(number)
    return found


def rows_of(mixture, source):
    first = sum(mixture.n_rows[:source])
    return range(first, first + mixture.n_rows[source])


world_sizes, epochs = st.integers(2, 4), st.integers(0, 3)


# Over ranks ----------------------------------------------------------------------------------------------------


@given(mixtures(lengths=st.sampled_from(EXACT)), world_sizes, epochs)
def test_the_stream_of_rows_is_the_same_for_every_world_size(case, world_size, epoch):
    one, several = joined(stream_of(case, 1, epoch)), joined(stream_of(case, world_size, epoch))
    common = min(len(one), len(several))
    assert several[:common] == one[:common]
    mixture, _, batch_size, drop_last = case
    left_out = world_size * batch_size if drop_last else world_size if not mixture.in_batches else None
    assert left_out is None or len(one) - len(several) < left_out


@given(mixtures(strategies=("concat", "round_robin", "alternating"), lengths=st.integers(1, 6)), world_sizes)
def test_of_so_many_steps_more_ranks_go_further_along_the_same_stream(case, world_size):
    one, several = stream_of(case), stream_of(case, world_size)
    assert len(several) == world_size * len(one) == world_size * case[0].epoch_length
    assert several[: len(one)] == one


@given(mixtures(lengths=st.integers(1, 6)), st.integers(1, 4), epochs)
def test_every_epoch_of_so_many_steps_has_so_many_on_every_rank(case, world_size, epoch):
    mixture, _, batch_size, _ = case
    batches = stream_of(case, world_size, epoch)
    assert len(batches) == world_size * mixture.epoch_length
    assert mixture.in_batches or {len(batch) for batch in batches} == {batch_size}


@given(mixtures(), world_sizes)
def test_each_source_gives_its_rows_in_the_same_order_for_every_world_size(case, world_size):
    mixture = case[0]
    one, several = (by_source(mixture, joined(stream_of(case, size))) for size in (1, world_size))
    for source in one:
        common = min(len(one[source]), len(several[source]))
        assert several[source][:common] == one[source][:common]


@given(mixtures(units=("batches",), strategies=STRATEGIES[1:]), st.integers(1, 4), epochs)
def test_each_batch_is_of_one_source_where_batches_are_mixed(case, world_size, epoch):
    mixture, _, batch_size, drop_last = case
    for batch in stream_of(case, world_size, epoch):
        assert len({source_of(mixture, row) for row in batch}) == 1
        assert len(batch) == batch_size if drop_last else 1 <= len(batch) <= batch_size


@pytest.mark.wide
@given(mixtures(), st.integers(1, 4), epochs)
def test_any_batch_is_reached_without_those_before_it(case, world_size, epoch):
    for rank in range(world_size):
        one = sampler(case, rank, world_size)
        tokens, again = list(one.tokens(epoch)), sampler(case, rank, world_size).plan(epoch)
        for token in reversed(tokens):
            assert again.rows(token.step).tolist() == token.rows.tolist()
            assert again.bounds(token.step)[0] == token.position


# What an epoch has ---------------------------------------------------------------------------------------------


@given(
    mixtures(
        strategies=("concat", "sequential", "weighted"),
        lengths=st.just("sum"),
        draws=("exact",),
        by_size=True,
        drop_last=False,
    ),
    epochs,
)
def test_as_much_as_all_sources_have_is_each_row_once_an_epoch(case, epoch):
    mixture = case[0]
    rows = [number % sum(mixture.n_rows) for number in joined(stream_of(case, 1, epoch))]
    assert sorted(rows) == list(range(sum(mixture.n_rows)))


@example(plain((1, 9), strategy="alternating", pattern=(0, 0, 1, 1, 1), unit="rows", epoch_length="min"), 1, 0)
@example(plain((1, 9), strategy="alternating", pattern=(0, 0, 1, 1, 1), epoch_length="min"), 1, 0)
@example(plain((20, 14), strategy="round_robin", unit="rows", epoch_length="min"), 1, 1)
@given(mixtures(lengths=st.just("min")), st.integers(1, 4), epochs)
def test_until_the_first_source_is_used_up_no_row_comes_twice(case, world_size, epoch):
    mixture = case[0]
    rows = [number % sum(mixture.n_rows) for number in joined(stream_of(case, world_size, epoch))]
    assert len(rows) == len(set(rows))


@example(plain((1, 1), strategy="alternating", pattern=(0, 0, 0, 1, 1), unit="rows", epoch_length="max"), 0)
@example(plain((1, 1), strategy="alternating", pattern=(0, 0, 0, 1, 1), epoch_length="max"), 0)
@example(plain((20, 14), strategy="round_robin", unit="rows", epoch_length="max"), 1)
@given(mixtures(lengths=st.just("max"), drop_last=False), epochs)
def test_until_each_source_was_seen_whole_means_every_row_of_each_that_has_a_share(case, epoch):
    mixture, _, batch_size, drop_last = case
    shares = mixture.shares(mixture.n_cycle(batch_size, drop_last))
    seen = {number % sum(mixture.n_rows) for number in joined(stream_of(case, 1, epoch))}
    for source, share in enumerate(shares):
        assert not share or seen >= set(rows_of(mixture, source))


@given(mixtures(lengths=st.sampled_from(["max", "min"])))
def test_epochs_as_long_as_the_longest_or_shortest_source_begin_a_new_order_each(case):
    numbers = [set(joined(stream_of(case, 1, epoch))) for epoch in range(4)]
    assert sum(map(len, numbers)) == len(set.union(*numbers))


@pytest.mark.parametrize("epoch_length", ["min", "max"])
@pytest.mark.parametrize("unit", ["batches", "rows"])
def test_weights_are_the_decimals_that_were_written(epoch_length, unit):
    """Seven tenths is no number of two's powers: what is nearest to it would make an epoch a batch too long."""
    case = plain((70, 20, 10), strategy="weighted", weights=(0.7, 0.2, 0.1), epoch_length=epoch_length, unit=unit)
    assert sorted(joined(stream_of(case))) == list(range(100))


@given(mixtures(strategies=("weighted",), units=("rows",), lengths=st.just("sum"), drop_last=False))
def test_rows_keep_the_shares_of_the_weights_at_every_place(case):
    mixture = case[0]
    rows = joined(stream_of(case))
    shares = mixture.shares(list(mixture.n_rows))
    counts = Counter()
    for place, number in enumerate(rows, start=1):
        counts[source_of(mixture, number)] += 1
        assert all(abs(counts[source] - share * place) < 2 for source, share in enumerate(shares))


# Over epochs ---------------------------------------------------------------------------------------------------


def look_at_cycles(case, n_epochs=6):
    mixture, _, _, drop_last = case
    n_all = sum(mixture.n_rows)
    seen = by_source(mixture, joined(joined(stream_of(case, 1, epoch) for epoch in range(n_epochs))))
    for source, numbers in seen.items():
        counted = Counter(numbers)
        assert all(times == 1 for times in counted.values()), "no row twice within a cycle"
        cycles = [number // n_all for number in numbers]
        if mixture.strategy != "concat":
            assert cycles == sorted(cycles)
        if not drop_last:
            for cycle in range(max(cycles, default=0)):
                assert {cycle * n_all + row for row in rows_of(mixture, source)} <= counted.keys()


lasting = st.just("sum") | st.integers(1, 6)


@pytest.mark.wide
@given(mixtures(lengths=lasting))
def test_a_source_goes_on_over_epochs_and_gives_each_row_once_before_any_comes_again(case):
    look_at_cycles(case)


@pytest.mark.parametrize("mode", ["global", "chunks"])
def test_a_short_source_starts_again_in_a_new_order(mode):
    case = plain((20, 60), strategy="round_robin", epoch_length="max", mode=mode)
    short = [number % 80 for number in by_source(case[0], joined(stream_of(case)))[0]]
    cycles = [tuple(short[start : start + 20]) for start in range(0, 60, 20)]
    assert all(sorted(cycle) == list(range(20)) for cycle in cycles)
    assert len(set(cycles)) == 3


def test_sources_of_one_size_are_not_in_step_with_each_other():
    case = plain((30, 30), strategy="round_robin")
    found = by_source(case[0], joined(stream_of(case)))
    assert found[0] != [number - 30 for number in found[1]]


def test_seeds_have_streams_of_their_own():
    case = plain((30, 10), strategy="round_robin")
    assert len({tuple(joined(stream_of(case, seed=seed))) for seed in range(4)}) == 4


# Where a broken run goes on ------------------------------------------------------------------------------------


def rest_of(case, order, segments, world_size, steps, batch_size=None, epoch=1):
    """Rows of the next steps after what the segments have used up, and the segments with them."""
    ranks = [sampler(case, rank, world_size, batch_size) for rank in range(world_size)]
    for one in ranks:
        one.restore(Position(epoch, tuple(segments), order))
    tokens = [list(one.tokens(epoch)) for one in ranks]
    assert len({len(each) for each in tokens}) == 1
    taken = [each[:steps] for each in tokens]
    size, n_steps = ranks[0].batch_size, len(taken[0])
    rows = [row for step in zip(*taken, strict=True) for token in step for row in token.rows.tolist()]
    return rows, [*segments, Segment(size, world_size, n_steps * world_size)] if n_steps else segments


def whole_of(case, order, epoch=1):
    """All rows of an epoch that began in this order."""
    sequence = sampler(case).sequence(epoch, order)
    plan = sequence.plan((), batch_size=order.batch_size, world_size=1, rank=0, drop_last=False)
    return [row for step in range(plan.n_steps) for row in plan.rows(step).tolist()]


stretches = st.lists(st.tuples(st.integers(2, 9), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=4)


@given(mixtures(drop_last=False), stretches)
def test_a_run_broken_off_goes_on_with_exactly_the_rest(case, stretches):
    """Whatever the world size of each stretch was; and, where rows are mixed, the batch size."""
    mixture = case[0]
    first_size, first_world = (None if mixture.in_batches else stretches[0][0]), stretches[0][1]
    began = sampler(case, 0, first_world, first_size)
    order = began.position(1).order
    whole, seen, segments = whole_of(case, order), [], []
    for batch_size, world_size, steps in stretches:
        batch_size = None if mixture.in_batches else batch_size
        rows, segments = rest_of(case, order, segments, world_size, steps, batch_size)
        seen += rows
        assert seen == whole[: len(seen)]
        assert began.sequence(1, order).n_consumed(segments, drop_last=False) == len(seen)
    rest, after = rest_of(case, order, segments, 1, 10**6)
    assert seen + rest == whole[: len(seen) + len(rest)]
    if isinstance(mixture.epoch_length, int) and len(seen) + len(rest) < len(whole):
        assert after[-1].n_batches == mixture.epoch_length, "it has as many steps as any other"
    else:
        assert seen + rest == whole


@given(
    mixtures(units=("batches",), strategies=STRATEGIES[1:]), st.integers(1, 4), st.integers(1, 3), st.integers(13, 15)
)
def test_batches_of_one_source_cannot_be_cut_anew_in_mid_epoch(case, world_size, steps, batch_size):
    order = sampler(case, 0, world_size).position(1).order
    _, segments = rest_of(case, order, [], world_size, steps)
    assume(segments)
    with pytest.raises(
        H5ValueError, match=rf"batches of {case[2]} rows, .* batches of {batch_size}:.* cannot be split"
    ):
        rest_of(case, order, segments, world_size, 1, batch_size)


@pytest.mark.parametrize("unit", ["batches", "rows"])
def test_a_run_broken_off_more_often_than_a_position_tells_goes_on_exactly(unit):
    case = plain((300, 90, 41), strategy="weighted", weights=(3.0, 2.0, 1.0), batch_size=4, unit=unit)
    order = sampler(case).position(1).order
    whole, seen, position = whole_of(case, order), [], Position(1, (), order)
    for stop in range(50):
        world_size = 1 + stop % 3
        rows, now = rest_of(case, order, list(position.segments), world_size, 1)
        seen += rows
        one = sampler(case, 0, world_size)
        position = position.after(one, now[-1].n_batches // world_size)
        position = Position.from_state(position.state(one), one)
        assert position.order == order
        assert len(position.segments) <= 32
        assert seen == whole[: len(seen)]
    rest, _ = rest_of(case, order, list(position.segments), 1, 10**6)
    assert seen + rest == whole


def test_a_position_that_has_the_old_word_for_the_order_of_sources_is_the_same():
    case = plain((30, 10), strategy="round_robin", mode="chunks")
    one = sampler(case)
    position = one.position(1).after(one, 2)
    state = position.state(one)
    state["order"]["sources"] = [["window", *numbers] for _, *numbers in state["order"]["sources"]]
    assert Position.from_state(state | {"digest": _digest_of_state(state)}, one) == position


def test_an_epoch_that_more_ranks_began_ends_for_fewer_with_as_many_steps_as_any_other():
    case = plain((30, 10), strategy="round_robin", epoch_length=6)
    order = sampler(case, 0, 4).position(1).order
    _, segments = rest_of(case, order, [], 4, 1)
    _, segments = rest_of(case, order, segments, 1, 10**6)
    assert segments[-1].n_batches == 6


# What cannot be mixed ------------------------------------------------------------------------------------------


def test_a_source_without_rows_is_refused_by_name():
    mixture = plain((30, 0), strategy="round_robin")[0]
    with pytest.raises(H5ValueError, match="the source 'b' has no rows"):
        check_mixture(mixture, 4, False)


def test_a_source_that_drop_last_leaves_nothing_of_is_refused_with_the_numbers():
    mixture = plain((30, 7), strategy="round_robin")[0]
    with pytest.raises(H5ValueError, match=r"the source 'b' has 7 rows, and batch_size is 8"):
        check_mixture(mixture, 8, True)
    check_mixture(mixture, 7, True)
    check_mixture(mixture, 8, False)
    check_mixture(plain((30, 7), strategy="round_robin", unit="rows")[0], 8, True)
