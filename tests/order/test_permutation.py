"""Permutations from promised bit streams."""

import sys
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.order import KeyedPermutation, TablePermutation, permutation
from lightning_h5.order.permutation import PLACE_ROUNDS, TABLE_ROWS, shuffled_places, stream

KINDS = [TablePermutation, KeyedPermutation]


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6))
def test_every_row_comes_exactly_once(kind, n, seed, epoch):
    permuted = kind(n, stream(seed, epoch, 0))
    assert sorted(permuted(0, n)) == list(range(n))


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_gives_the_same_row_alone_and_among_others(kind):
    permuted = kind(1000, stream(3, 4, 0))
    whole = permuted(0, 1000)
    assert all(permuted(i, i + 1)[0] == whole[i] for i in range(0, 1000, 37))


@given(
    n=st.integers(1, 500),
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 100)),
    bounds=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 600)), max_size=5),
)
def test_parts_of_the_order_are_those_of_all_sorted_at_once(n, sizes, bounds):
    module = sys.modules[TablePermutation.__module__]
    whole = TablePermutation(n, stream(3, 4, 0))(0, n).tolist()
    with patch.multiple(module, PART_ROWS=sizes[0], SLICE_ROWS=sizes[1]):
        permuted = TablePermutation(n, stream(3, 4, 0))
        for start, stop in bounds:
            assert permuted(start, stop).tolist() == whole[start:stop]
        assert permuted(0, n).tolist() == whole


def test_reading_may_begin_at_any_position():
    """Its part is not always the one where it is expected: parts have different numbers of rows."""
    module, n = sys.modules[TablePermutation.__module__], 60
    whole = TablePermutation(n, stream(3, 4, 0))(0, n).tolist()
    with patch.multiple(module, PART_ROWS=7, SLICE_ROWS=13):
        for start in range(n):
            assert TablePermutation(n, stream(3, 4, 0))(start, n).tolist() == whole[start:]


@pytest.mark.parametrize(
    ("kind", "golden"),
    [
        (TablePermutation, [11, 13, 3, 16, 12, 10, 8, 4, 15, 7, 9, 18, 17, 19, 2, 5, 14, 0, 1, 6]),
        (KeyedPermutation, [7, 15, 19, 3, 14, 4, 11, 18, 17, 1, 12, 8, 9, 6, 16, 10, 13, 2, 0, 5]),
    ],
)
def test_the_order_of_version_1_never_changes(kind, golden):
    """Runs that were saved rely on it; another order is another version."""
    assert kind(20, stream(7, 1, 0))(0, 20).tolist() == golden


@pytest.mark.parametrize("kind", KINDS)
def test_neighbouring_seeds_and_epochs_share_no_order(kind):
    orders = {tuple(kind(50, stream(seed, epoch, 0))(0, 50)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize("kind", KINDS)
def test_rows_land_everywhere_alike(kind):
    """Chi-square over where each row lands: 4,000 permutations of 16 rows, 225 degrees of freedom."""
    counts = np.zeros((16, 16))
    for epoch in range(4000):
        counts[np.arange(16), kind(16, stream(1, epoch, 0))(0, 16)] += 1
    chi_square = ((counts - 250) ** 2 / 250).sum()
    assert 225 - 6 * np.sqrt(450) < chi_square < 225 + 6 * np.sqrt(450)


@pytest.mark.wide
def test_nothing_of_the_size_of_the_rows_is_held_above_the_table_limit():
    assert isinstance(permutation(TABLE_ROWS, 0, 0), TablePermutation)
    large = permutation(10**9, 0, 0)
    assert isinstance(large, KeyedPermutation)
    rows = large(10**9 - 1000, 10**9)
    assert len(set(rows.tolist())) == 1000
    assert rows.min() >= 0
    assert rows.max() < 10**9


def places_of(sizes, keys):
    """The places of all ranks of many permutations, made at once."""
    ranks = np.concatenate([np.arange(size) for size in sizes])
    words = stream(5, 1, 0).random_raw(PLACE_ROUNDS)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    places = shuffled_places(ranks, owners, np.array(sizes), np.array(keys, dtype=np.uint64), words)
    return np.split(places, np.cumsum(sizes)[:-1])


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2**64 - 1)), min_size=1, max_size=20))
def test_many_permutations_at_once_are_each_what_they_are_alone(pairs):
    sizes, keys = zip(*pairs, strict=True)
    for size, key, places in zip(sizes, keys, places_of(sizes, keys), strict=True):
        assert sorted(places.tolist()) == list(range(size))
        assert places.tolist() == places_of([size], [key])[0].tolist()


@pytest.mark.parametrize("sorted_rows", [0, 128])
@pytest.mark.parametrize("size", [2, 3, 7, 9, 16, 25])
def test_places_are_taken_alike(size, sorted_rows, monkeypatch):
    """Chi-square over where each rank lands, and over how far from the rank before it, in 10,000 permutations."""
    monkeypatch.setattr(sys.modules[shuffled_places.__module__], "SORTED_ROWS", sorted_rows)
    places = np.array(places_of([size] * 10_000, stream(1, 1, 0).random_raw(10_000)))
    landings = np.array([np.bincount(column, minlength=size) for column in places.T])
    steps = np.bincount((places[:, 1] - places[:, 0]) % size, minlength=size)[1:]
    assert ((landings - 10_000 / size) ** 2 / (10_000 / size)).sum() < (size - 1) ** 2 + 5 * np.sqrt(2) * (size - 1)
    assert ((steps - 10_000 / (size - 1)) ** 2 / (10_000 / (size - 1))).sum() < size - 2 + 5 * np.sqrt(2 * size)


def test_places_of_version_1_never_change():
    """Orders of mode ``chunks`` are made of them, and runs that were saved rely on those."""
    golden = [[2, 4, 1, 0, 3], [0], [6, 1, 4, 9, 10, 2, 5, 11, 7, 8, 3, 0]]
    *short, long = [places.tolist() for places in places_of([5, 1, 12, 200], [3, 4, 2**63, 3])]
    assert short == golden
    assert long[:10] == [98, 83, 21, 76, 168, 74, 81, 34, 0, 12]
