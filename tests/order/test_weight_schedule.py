"""Weights that change over a run: shares follow the integral of the schedule, and any unit is reached at once."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from test_mixture import joined, plain, sampler, source_of, stream_of

from lightning_h5.order import Position, WeightSchedule
from lightning_h5.order.mixture import ScheduledPieces
from lightning_h5.order.weight_schedule import ScheduledCounts, ShareIntegral


def exact_before(schedule, scale, n):
    """The integral of each source's share, unit by unit: the mean of the shares at both ends of each unit."""

    def shares_at(place, number):
        weights = [[Fraction(str(weight)) for weight in of_step] for of_step in schedule.weights]
        shares = [[weight / sum(of_step) for weight in of_step] for of_step in weights]
        if number + 1 == len(shares) or schedule.between == "step":
            return shares[number]
        low, high = (step * scale for step in schedule.steps[number : number + 2])
        part = Fraction(place - low, high - low)
        return [a + (b - a) * part for a, b in zip(*shares[number : number + 2], strict=True)]

    totals = [Fraction(0)] * len(schedule.weights[0])
    amounts = [totals]
    for unit in range(n):
        number = max(at for at, step in enumerate(schedule.steps) if step * scale <= unit)
        ends = zip(shares_at(unit, number), shares_at(unit + 1, number), strict=True)
        totals = [total + (a + b) / 2 for total, (a, b) in zip(totals, ends, strict=True)]
        amounts.append(totals)
    return amounts


@st.composite
def schedules(draw, most=8):
    n_sources = draw(st.integers(1, most))
    weight = st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0, 0.3, 1000.0]) | st.floats(0, 1).map(lambda x: round(x, 3))
    weights = st.lists(weight, min_size=n_sources, max_size=n_sources).filter(any).map(tuple)
    steps = (0, *sorted(draw(st.sets(st.integers(1, 120), max_size=4))))
    return WeightSchedule(steps, tuple(draw(weights) for _ in steps), draw(st.sampled_from(["step", "linear"])))


N_UNITS = 160


@settings(max_examples=25)
@given(schedules(), st.sampled_from([1, 2, 3]))
def test_the_integral_is_that_of_the_shares(schedule, scale):
    integral = ShareIntegral(schedule, scale)
    for unit, amounts in enumerate(exact_before(schedule, scale, N_UNITS)):
        assert [integral.before(source, unit) for source in range(integral.n_sources)] == amounts
        assert sum(amounts) == unit


@pytest.mark.wide
@settings(max_examples=200)
@given(schedules(), st.sampled_from([1, 2, 3, 8, 32, 256]))
def test_no_source_is_ever_a_unit_off_wherever_pieces_end(schedule, piece_units):
    """With pieces of one unit, the counts at borders are the whole schedule."""
    integral = ShareIntegral(schedule, 1)
    counts = ScheduledCounts(integral, piece_units)
    n_pieces = -(-N_UNITS // piece_units)
    sources = np.concatenate([counts.deal(piece) for piece in range(n_pieces)])
    n_had = np.zeros(integral.n_sources, dtype=np.int64)
    for unit, source in enumerate(sources.tolist()):
        if unit % piece_units == 0:
            assert counts.before(unit // piece_units) == tuple(n_had.tolist())
        n_had[source] += 1
        off = [abs(int(n) - integral.before(source, unit + 1)) for source, n in enumerate(n_had)]
        assert max(off) < 1


def deal_by_definition(counts, integral, piece, n_units):
    """Each place has the unit with the earliest deadline of those that may come, found in fractions."""
    after = range(piece * n_units + 1, (piece + 1) * n_units + 1)
    units = []
    for source, (low, high) in enumerate(zip(counts.before(piece), counts.before(piece + 1), strict=True)):
        amounts = [integral.before(source, unit) for unit in after]
        for number in range(low + 1, high + 1):
            release = next((at for at, amount in enumerate(amounts) if amount > number - 1), n_units - 1)
            deadline = next((at for at, amount in enumerate(amounts) if amount >= number), n_units)
            units.append((deadline, source, release))
    sources = []
    for place in range(n_units):
        unit = min(unit for unit in units if unit[2] <= place)
        units.remove(unit)
        sources.append(unit[1])
    return sources


@st.composite
def schedules_of_long_decimals(draw):
    """Schedules whose shares are fractions of many digits."""
    schedule = draw(schedules(most=3))
    weights = draw(st.lists(st.floats(1e-9, 1), min_size=2, max_size=2))
    longer = ((*of_step[:-1], of_step[-1] + weights[at % 2]) for at, of_step in enumerate(schedule.weights))
    return replace(schedule, weights=tuple(longer))


@settings(max_examples=25)
@given(
    schedules() | schedules_of_long_decimals(), st.sampled_from([1, 3, 64]), st.integers(0, 5) | st.integers(0, 10**9)
)
def test_units_are_dealt_as_the_definition_says(schedule, scale, piece):
    integral = ShareIntegral(schedule, scale)
    counts = ScheduledCounts(integral, 24)
    assert counts.deal(piece).tolist() == deal_by_definition(counts, integral, piece, 24)


SWAPPED = WeightSchedule((0, 1000), ((0.123456789012345, 0.987654321), (0.987654321, 0.123456789012345)), "linear")
"""Of long decimals, and after a thousand units each source should have had 500."""


@example(SWAPPED, 950)
@settings(max_examples=25)
@given(schedules() | schedules_of_long_decimals(), st.integers(0, 100) | st.integers(0, 10**12))
def test_rounded_integrals_are_exact(schedule, start):
    integral, units = ShareIntegral(schedule, 1), range(start + 1, start + 101)
    for source in range(integral.n_sources):
        floors, ceilings = integral.bounds(source, start, start + 100)
        amounts = [integral.before(source, unit) for unit in units]
        assert floors.tolist() == list(map(floor, amounts))
        assert ceilings.tolist() == list(map(ceil, amounts))


@settings(max_examples=15)
@given(schedules(most=4), st.randoms(use_true_random=False))
def test_any_piece_is_the_same_whatever_was_asked_for_before(schedule, random):
    integral = ShareIntegral(schedule, 1)
    pieces = list(range(20))
    random.shuffle(pieces)
    in_order, shuffled = (ScheduledCounts(integral, 8) for _ in range(2))
    dealt = {piece: shuffled.deal(piece).tolist() for piece in pieces}
    assert [in_order.deal(piece).tolist() for piece in range(20)] == [dealt[piece] for piece in range(20)]


RAMP = WeightSchedule((0, 20_000, 60_000), ((1.0, 1.0, 0.0), (3.0, 1.0, 0.5), (0.1, 0.7, 0.123457)), "linear")
JUMP = WeightSchedule(RAMP.steps, RAMP.weights, "step")


@pytest.mark.parametrize("schedule", [RAMP, JUMP], ids=["linear", "step"])
def test_shares_of_a_hundred_thousand_units(schedule):
    pieces, integral = ScheduledPieces(schedule, 1), ShareIntegral(schedule, 1)
    n = 100_000
    sources = pieces.sources(0, n)
    counts = np.cumsum(np.eye(3, dtype=np.int64)[sources], axis=0)
    for unit in (1, 10, 4095, 4096, 4097, 19_999, 20_001, 43_210, 60_000, n):
        exact = [integral.before(source, unit) for source in range(3)]
        assert all(abs(int(a) - b) < 1 for a, b in zip(counts[unit - 1], exact, strict=True))
        assert pieces.counts(unit).tolist() == counts[unit - 1].tolist()
    shares = np.diff(counts[[0, 9_999, 10_999]], axis=0)[1] / 1000
    assert np.abs(shares - integral.shares(10_000, 11_000)).max() <= 0.002
    if schedule is RAMP:
        assert integral.shares(10_000, 10_001)[0] == pytest.approx((1 / 2 + 3 / 4.5) / 2, abs=1e-4)


@pytest.mark.parametrize("schedule", [RAMP, JUMP], ids=["linear", "step"])
def test_a_far_unit_is_reached_at_once(schedule):
    pieces, far = ScheduledPieces(schedule, 64), 10**12 + 12_345
    pieces.sources(far, far + 1)  # unit by unit, it would take days
    off = [abs(int(n) - ShareIntegral(schedule, 64).before(source, far)) for source, n in enumerate(pieces.counts(far))]
    assert max(off) < 1
    assert pieces.sources(far - 5000, far + 5000).tolist()[5000] == pieces.sources(far, far + 1)[0]


def test_a_source_without_weight_has_no_unit_until_it_has_one():
    schedule = WeightSchedule((0, 100, 200), ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)))
    sources = ScheduledPieces(schedule, 1).sources(0, 400)
    assert sources[:200].tolist() == [0] * 100 + [1] * 100
    assert np.bincount(sources[200:]).tolist() == [100, 100]


def test_a_step_is_as_many_units_as_a_batch_has():
    schedule = WeightSchedule((0, 10), ((1.0, 0.0), (0.0, 1.0)))
    assert ScheduledPieces(schedule, 8).sources(0, 100).tolist() == [0] * 80 + [1] * 20


def test_the_text_names_the_weights_and_stays_short():
    schedule = WeightSchedule((0, 10), ((1.0, 0.5), (0.0, 1.0)))
    assert schedule.text == "{0: [1.0, 0.5], 10: [0.0, 1.0]}, step"
    many = [tuple((float(n + at), 1.0) for n in range(500)) for at in (0, 0, 1)]
    texts = [WeightSchedule(tuple(range(500)), weights, "linear").text for weights in many]
    assert len(texts[0]) < 100
    assert texts[0] == texts[1] != texts[2]


# In a run ------------------------------------------------------------------------------------------------------


LENGTHS = st.integers(2, 9)


@st.composite
def runs(draw, lengths=LENGTHS):
    """A mixture whose weights change within a few epochs, and how it is cut."""
    schedule = draw(schedules(most=3))
    n, batch_size = len(schedule.weights[0]), draw(st.integers(3, 6))
    return plain(
        tuple(draw(st.lists(st.integers(batch_size, 30), min_size=n, max_size=n))),
        batch_size=batch_size,
        strategy="weighted",
        weights=schedule,
        unit=draw(st.sampled_from(["batches", "rows"])),
        epoch_length=draw(lengths),
    )


def endless(case, n_rows):
    """The first rows of the run, as one long epoch."""
    mixture, *rest = case
    return joined(stream_of((replace(mixture, epoch_length=n_rows), *rest)))[:n_rows]


@settings(max_examples=25)
@given(runs(st.just("sum") | LENGTHS))
def test_epochs_are_one_endless_stream_in_which_each_source_keeps_its_order(case):
    mixture = case[0]
    rows = joined(joined(stream_of(case, 1, epoch) for epoch in range(4)))
    assert rows == endless(case, len(rows))
    n_all = sum(mixture.n_rows)
    for source, n_source in enumerate(mixture.n_rows):
        own = [row for row in rows if source_of(mixture, row) == source]
        assert [number // n_all for number in own] == [place // n_source for place in range(len(own))]
        assert len(set(own)) == len(own)


@settings(max_examples=25)
@given(runs(), st.integers(0, 5), st.integers(2, 3))
def test_a_run_goes_on_along_the_same_stream_on_more_ranks(case, n_steps, world_size):
    """Also in later epochs, which have other numbers of units by then, and after another resume at an epoch's end."""
    mixture = case[0]
    n_steps = min(n_steps, mixture.epoch_length)
    assume(not mixture.in_batches or (mixture.epoch_length - n_steps) % world_size == 0)  # nothing is halved
    alone, ranks = sampler(case), [sampler(case, rank, world_size) for rank in range(world_size)]
    batches = [token.rows.tolist() for epoch in (0, 1) for token in alone.tokens(epoch)]
    batches = batches[: mixture.epoch_length + n_steps]
    state = alone.position(1).after(alone, n_steps).state(alone)
    for epoch in (1, 2, 3):
        for one in ranks:
            if epoch == 1:
                one.restore(Position.from_state(state, one))
            if epoch == 3:
                state = one.position(2).after(one, len(one)).state(one)
                one.restore(None)
                one.continue_from(Position.from_state(state, one))
        steps = zip(*[list(one.tokens(epoch)) for one in ranks], strict=True)
        batches += [token.rows.tolist() for tokens in steps for token in tokens]
    rows = joined(batches)
    assert rows == endless(case, len(rows))


def test_a_run_that_never_changed_its_ranks_saves_what_other_mixtures_save():
    schedule = WeightSchedule((0, 5), ((1.0, 1.0), (3.0, 1.0)))
    case = plain((30, 10), strategy="weighted", weights=schedule, epoch_length=6)
    one, two = sampler(case), sampler(case, 0, 2)
    assert "first_unit" not in one.position(3).state(one)["order"]
    two.restore(one.position(3).after(one, 2))
    two.restore(None)
    assert [two.position(epoch).first_unit for epoch in (3, 4, 5)] == [18, 24, 36]
    assert two.position(5).state(two)["order"]["first_unit"] == 36
    assert two.unit(two.position(5).after(two, 2)) == 40


def test_epochs_that_repeat_are_all_like_the_first():
    schedule = WeightSchedule((0, 5), ((1.0, 0.0), (0.0, 1.0)))
    case = plain((30, 10), strategy="weighted", weights=schedule, epoch_length=6)
    one = sampler(case)
    one._repeats = True
    one.continue_from(one.position(2))
    epochs = [[token.rows.tolist() for token in one.tokens(epoch)] for epoch in (0, 4)]
    assert epochs[0] == epochs[1]


def test_expected_shares_are_those_of_the_units_that_were_had():
    schedule = WeightSchedule((0, 10), ((1.0, 1.0), (3.0, 1.0)), "linear")
    case = plain((30, 10), strategy="weighted", weights=schedule, epoch_length=6)
    recipe, order = sampler(case).recipe, sampler(case).present_order()
    shares = [recipe.expected_shares(order, drop_last=False, units=units)["a"] for units in pairwise([0, 2, 10, 20])]
    assert shares == pytest.approx([0.525, 0.65, 0.75])
