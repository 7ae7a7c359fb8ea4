"""Schedules: the source of any unit, reached at once, and how near to its share each source is at every unit."""

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5.order import mixture
from lightning_h5.order.mixture import Pattern, Runs, even_schedule, largest_remainder

UNITS = 10_000
SHARES = [Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)]

quotas = st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any)
amounts = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


def shares_of(numbers):
    return [Fraction(number, sum(numbers)) for number in numbers]


@st.composite
def any_schedule(draw):
    """A schedule of a few sources, how many they are, and how many units to look at."""
    kind = draw(st.sampled_from(["pattern", "runs", "even"]))
    if kind == "pattern":
        n_sources = draw(st.integers(1, 4))
        pattern = draw(st.lists(st.integers(0, n_sources - 1), min_size=1, max_size=12))
        return Pattern(pattern, n_sources), n_sources, draw(st.integers(0, 60))
    numbers = draw(quotas)
    if kind == "runs":
        return Runs(numbers), len(numbers), sum(numbers)
    return even_schedule(numbers), len(numbers), draw(st.integers(1, 3)) * sum(numbers)


@pytest.fixture(params=["as they are", "small"], autouse=True)
def sizes(request, monkeypatch):
    """What is counted together, and dealt together, is also so small that an epoch of a few units has many of it."""
    mixture._even_pattern.cache_clear()
    if request.param == "small":
        for name, value in {"MAX_UNITS": 20, "PIECE_UNITS": 8, "COUNTED_TOGETHER": 4}.items():
            monkeypatch.setattr(mixture, name, value)
    yield request.param
    mixture._even_pattern.cache_clear()


@given(any_schedule(), st.data())
def test_what_is_counted_before_a_unit_is_what_the_units_before_it_are(made, data):
    schedule, n_sources, n_units = made
    for unit in data.draw(st.lists(st.integers(0, n_units), min_size=1, max_size=8)):
        found = np.bincount(schedule.sources(0, unit), minlength=n_sources)
        assert schedule.counts(unit).tolist() == found.tolist()


@given(any_schedule(), st.data())
def test_any_stretch_of_units_is_a_slice_of_them_all(made, data):
    schedule, n_sources, n_units = made
    whole = schedule.sources(0, n_units)
    assert len(whole) == n_units
    assert set(whole.tolist()) <= set(range(n_sources))
    start = data.draw(st.integers(0, n_units))
    stop = data.draw(st.integers(start, n_units))
    assert schedule.sources(start, stop).tolist() == whole[start:stop].tolist()


@given(amounts, st.integers(0, 300))
def test_what_is_shared_out_adds_up_and_is_next_to_the_exact_shares(numbers, n):
    shares = shares_of(numbers)
    found = largest_remainder(shares, n)
    assert sum(found) == n
    assert all(floor(share * n) <= quota <= ceil(share * n) for share, quota in zip(shares, found, strict=True))


@given(quotas)
def test_one_source_comes_whole_before_the_next(numbers):
    expected = [source for source, quota in enumerate(numbers) for _ in range(quota)]
    assert Runs(numbers).sources(0, sum(numbers)).tolist() == expected


def test_a_pattern_comes_again_and_again():
    assert Pattern([0, 0, 2], 3).sources(0, 8).tolist() == [0, 0, 2, 0, 0, 2, 0, 0]


def off_by(schedule, numbers):
    """The largest distance of a source's units from its share, at any unit."""
    n_units = sum(numbers)
    units = np.arange(n_units + 1)
    one_hot = schedule.sources(0, n_units)[:, None] == np.arange(len(numbers))
    counts = np.vstack([np.zeros((1, len(numbers)), dtype=np.int64), np.cumsum(one_hot, axis=0)])
    # In parts of 1 / n_units, so that all of it is whole numbers.
    distance = np.abs(counts * n_units - units[:, None] * np.asarray(numbers))
    return Fraction(int(distance.max()), n_units)


@given(quotas)
def test_even_units_add_up_to_the_quotas(numbers):
    assert even_schedule(numbers).counts(sum(numbers)).tolist() == numbers


@given(amounts, st.integers(1, 12))
def test_no_source_is_ever_a_whole_unit_off_its_share(sizes, numbers, times):
    if sizes == "as they are" or sum(numbers) <= mixture.MAX_UNITS:
        numbers = [number * times for number in numbers]
        assert off_by(even_schedule(numbers), numbers) < 1


@given(quotas)
def test_where_an_epoch_is_dealt_in_pieces_no_source_is_ever_far_off(numbers):
    """Two units, and half of one for each source that is rare: of pieces as small as these most are."""
    assert off_by(even_schedule(numbers), numbers) <= 2 + len(numbers) / 2


@settings(max_examples=examples(20))
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_after_ten_thousand_steps_each_source_has_its_exact_share_but_for_a_unit(weights):
    shares = shares_of(weights)
    schedule = even_schedule(largest_remainder(shares, UNITS))
    assert np.bincount(schedule.sources(0, UNITS), minlength=len(weights)).tolist() == schedule.counts(UNITS).tolist()
    for share, count in zip(shares, schedule.counts(UNITS).tolist(), strict=True):
        assert abs(count - share * UNITS) < 1


def test_a_long_epoch_of_uneven_quotas_is_dealt_within_two_units_too():
    numbers = [150_001, 40_000, 3, 0]
    schedule = even_schedule(numbers)
    assert schedule.counts(sum(numbers)).tolist() == numbers
    assert off_by(schedule, numbers) < 2
