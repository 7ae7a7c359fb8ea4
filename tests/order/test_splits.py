"""Cutting rows and groups into splits."""

import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import H5ValueError, group_split, k_fold

groups = st.lists(st.integers(0, 12), min_size=1, max_size=120).map(np.array)


@given(st.one_of(st.integers(1, 300), groups), st.integers(0, 5))
def test_splits_are_disjoint_and_cover_every_row(n_or_groups, seed):
    splits = group_split(n_or_groups, [0.6, 0.25, 0.15], seed)
    n_rows = n_or_groups if isinstance(n_or_groups, int) else len(n_or_groups)
    assert sorted(np.concatenate(splits).tolist()) == list(range(n_rows))
    assert all((np.diff(split) > 0).all() for split in splits)


@given(groups, st.integers(0, 5))
def test_no_group_is_on_two_sides(values, seed):
    splits = group_split(values, [0.5, 0.3, 0.2], seed)
    sides = [set(values[split].tolist()) for split in splits]
    assert sum(len(side) for side in sides) == len(set.union(*sides))


@given(st.integers(1, 2000), st.floats(0, 0.4), st.floats(0, 0.4))
def test_rows_of_their_own_are_cut_at_the_rounded_fraction(n_rows, val, test):
    splits = group_split(n_rows, [1 - val - test, val, test])
    for split, share in zip(splits, [1 - val - test, val, test], strict=True):
        assert abs(len(split) - share * n_rows) <= 1


def test_a_split_of_share_zero_gets_no_group():
    values = np.repeat(np.arange(9), 5)
    assert len(group_split(values, [0.5, 0.0, 0.5], 1)[1]) == 0


def test_groups_of_equal_size_come_close_to_the_shares():
    sizes = [len(split) for split in group_split(np.repeat(np.arange(100), 10), [0.7, 0.2, 0.1], 3)]
    assert all(abs(size - share) <= 10 for size, share in zip(sizes, [700, 200, 100], strict=True))


def test_another_split_seed_draws_another_cut():
    first, second = (group_split(1000, [0.8, 0.2], seed)[1] for seed in (0, 1))
    assert 0 < len(set(first) & set(second)) < 200


def test_the_cut_of_a_seed_never_changes():
    assert group_split(20, [0.5, 0.5], 4)[1].tolist() == [0, 3, 4, 5, 6, 7, 9, 13, 16, 19]


def test_the_cut_of_a_seed_and_classes_never_changes():
    labels, pairs = np.arange(20) % 3, np.arange(20) // 2
    assert group_split(20, [0.5, 0.5], 4, labels=labels)[1].tolist() == [0, 3, 4, 5, 7, 8, 9, 14, 19]
    assert k_fold(20, 3, 1, 4, labels=labels)[1].tolist() == [4, 7, 11, 12, 14, 16, 18]
    assert group_split(pairs, [0.5, 0.5], 4, labels=labels)[1].tolist() == list(range(10, 20))
    assert k_fold(pairs, 3, 1, 4, labels=labels)[1].tolist() == [0, 1, 4, 5, 8, 9, 12, 13]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.sampled_from(["i1", "u2", "i8", "f4", "U", "S"]))
def test_classes_of_any_dtype_are_cut_alike(labels, dtype):
    values = np.array(labels) + 3
    if dtype == "i1":
        values = values * 42 - 126  # the distance of these values is more than their dtype can hold
    expected = group_split(len(labels), [0.6, 0.4], 1, labels=labels)
    parts = group_split(len(labels), [0.6, 0.4], 1, labels=values.astype(dtype))
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]


def _calls_of(function):
    """Return how often a function and what it calls call C functions."""
    counts = Counter()
    sys.setprofile(lambda _, event, __: counts.update([event]))
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts["c_call"]


def test_the_work_for_rows_does_not_grow_with_the_number_of_classes():
    few, many = (
        _calls_of(lambda n=n: (group_split(600, [0.8, 0.2], labels=np.arange(600) % n), k_fold(600, 3, 0)))
        for n in (2, 300)
    )
    assert many < few + 20


def test_the_memory_of_a_cut_does_not_grow_with_groups_times_classes():
    groups = np.arange(4000) // 2
    tracemalloc.start()
    group_split(groups, [0.8, 0.2], labels=np.arange(4000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20, "a number for each group and class would take 64 MB"


@given(
    st.one_of(st.integers(5, 200), st.lists(st.sampled_from("abcdefgh"), min_size=20, max_size=90)), st.integers(0, 3)
)
def test_the_folds_held_out_are_everything_once(n_or_groups, seed):
    values = n_or_groups if isinstance(n_or_groups, int) else np.array(n_or_groups)
    n_rows = values if isinstance(values, int) else len(values)
    num_folds = 2 if isinstance(values, int) else min(2, len(set(values.tolist())))
    if num_folds < 2:
        return
    held = []
    for fold in range(num_folds):
        kept, out = k_fold(values, num_folds, fold, seed)
        assert sorted([*kept, *out]) == list(range(n_rows))
        if not isinstance(values, int):
            assert not set(values[kept].tolist()) & set(values[out].tolist())
        held += out.tolist()
    assert sorted(held) == list(range(n_rows))


labelled = st.lists(st.tuples(st.integers(0, 15), st.sampled_from("abc")), min_size=4, max_size=150)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=200), st.integers(0, 3), st.floats(0, 0.5))
def test_each_class_is_cut_at_its_rounded_fraction(labels, seed, share):
    splits = group_split(len(labels), [1 - share, share], seed, labels=labels)
    assert sorted(np.concatenate(splits).tolist()) == list(range(len(labels)))
    for label in set(labels):
        n_rows = labels.count(label)
        for split, wanted in zip(splits, [1 - share, share], strict=True):
            assert abs(sum(labels[row] == label for row in split) - wanted * n_rows) <= 0.5 + 1e-9


@given(st.lists(st.sampled_from("abcd"), min_size=5, max_size=200), st.integers(2, 5), st.integers(0, 3))
def test_folds_have_as_many_of_each_class_but_for_one(labels, num_folds, seed):
    held_out = [k_fold(len(labels), num_folds, fold, seed, labels=labels)[1] for fold in range(num_folds)]
    assert sorted(np.concatenate(held_out).tolist()) == list(range(len(labels)))
    for label in set(labels):
        counts = [sum(labels[row] == label for row in rows) for rows in held_out]
        assert max(counts) - min(counts) <= 1
    assert max(map(len, held_out)) - min(map(len, held_out)) <= 1


@given(labelled, st.integers(2, 5), st.integers(0, 3))
def test_folds_of_groups_of_one_class_are_within_a_group_of_the_ideal(rows, num_folds, seed):
    groups = np.array([f"{group}{label}" for group, label in rows])  # a group has the class that its name ends in
    labels = np.array([label for _, label in rows])
    num_folds = min(num_folds, len(set(groups)))
    if num_folds < 2:
        return
    held_out = [k_fold(groups, num_folds, fold, seed, labels=labels)[1] for fold in range(num_folds)]
    assert sorted(np.concatenate(held_out).tolist()) == list(range(len(rows)))
    assert sum(len(set(groups[rows])) for rows in held_out) == len(set(groups)), "no group is cut apart"
    for label in set(labels):
        largest = max((groups == group).sum() for group in set(groups[labels == label]))
        for rows in held_out:
            assert abs((labels[rows] == label).sum() - (labels == label).sum() / num_folds) <= largest


@given(labelled, st.integers(0, 3))
def test_splits_of_groups_of_one_class_are_within_a_group_of_their_share(rows, seed):
    groups, labels = np.array([f"{group}{label}" for group, label in rows]), np.array([label for _, label in rows])
    shares = [0.5, 0.3, 0.2]
    for split, share in zip(group_split(groups, shares, seed, labels=labels), shares, strict=True):
        for label in set(labels):
            largest = max((groups == group).sum() for group in set(groups[labels == label]))
            assert abs((labels[split] == label).sum() - share * (labels == label).sum()) <= largest


@given(labelled, st.integers(0, 3))
def test_splits_of_groups_of_several_classes_keep_them_whole(rows, seed):
    groups, labels = np.array([group for group, _ in rows]), [label for _, label in rows]
    splits = group_split(groups, [0.5, 0.0, 0.5], seed, labels=labels)
    assert sorted(np.concatenate(splits).tolist()) == list(range(len(rows)))
    assert not set(groups[splits[0]]) & set(groups[splits[2]])
    assert not len(splits[1])


def test_groups_of_several_classes_are_dealt_by_what_a_fold_lacks():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(200), 10)
    rare = np.repeat(rng.random(200) < 0.1, 10)
    labels = np.where(rare & (rng.random(2000) < 0.5), 1, 0)
    shares = [labels[k_fold(groups, 5, fold, labels=labels)[1]].mean() for fold in range(5)]
    alone = [labels[k_fold(groups, 5, fold)[1]].mean() for fold in range(5)]
    assert np.ptp(shares) < 0.01 < np.ptp(alone)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: group_split(10, [0.5, 0.6]), "add up to 1.1"),
        (lambda: group_split(10, [1.5, -0.5]), "shares from 0 to 1"),
        (lambda: group_split(np.array([1.0, np.nan]), [0.5, 0.5]), "row 1"),
        (lambda: group_split(np.array(["a", ""], dtype=object), [0.5, 0.5]), "missing"),
        (lambda: group_split(np.zeros((3, 2)), [0.5, 0.5]), "shape (3, 2)"),
        (lambda: k_fold(np.array([1, 1, 2]), 3, 0), "for 2 groups"),
        (lambda: k_fold(5, 6, 0), "for 5 rows"),
        (lambda: k_fold(5, 5, 5), "fold=5"),
        (lambda: k_fold(3, 2, 0, labels=[1, 2]), "2 labels for 3 rows"),
        (lambda: group_split(2, [0.5, 0.5], labels=np.array([1.0, np.nan])), "the label is missing"),
    ],
)
def test_bad_arguments_are_refused_with_the_numbers(call, words):
    with pytest.raises(H5ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        call()


@pytest.mark.parametrize("split_seed", range(3))
@pytest.mark.parametrize("labelled", [False, True])
def test_each_split_has_its_share_of_large_and_of_small_groups(split_seed, labelled):
    """Validating on small groups alone would be validating on another population."""
    random = np.random.default_rng(7)
    sizes = np.maximum(1, random.lognormal(2, 0.6, 400)).astype(int)
    groups = np.repeat(np.arange(400), sizes)
    labels = (random.random(400) < 0.3).astype(int)[groups] if labelled else None
    for rows in group_split(groups, [0.7, 0.2, 0.1], split_seed, labels=labels):
        assert 0.85 < sizes[np.unique(groups[rows])].mean() / sizes.mean() < 1.15
    chosen = [tuple(group_split(groups, [0.8, 0.2], seed, labels=labels)[1]) for seed in range(4)]
    assert len(set(chosen)) == 4
