"""Rows that are sorted by their targets are found in contiguous shards, and only there."""

import warnings

import h5py
import numpy as np
import pytest
import torch
from arguments import nested_files
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import RankMemCachedH5Dataset
from lightning_h5.datasets.target_order import MIN_SAMPLES, are_in_order, differ_clearly, sampled_places, sampled_values

ROWS = 4_000


def in_order(targets, world_size=2):
    """What ranks with contiguous shards of these targets find together."""
    values = []
    for shard in np.array_split(np.asarray(targets), world_size):
        places = sampled_places(len(shard), world_size)
        assert np.array_equal(places, np.unique(places))
        values += sampled_values(torch.from_numpy(shard[places].copy()))
    return are_in_order(values)


counts = st.lists(st.integers(100, 2_000), min_size=2, max_size=12)
worlds = st.integers(2, 9)


@given(counts, worlds, st.permutations(range(12)), st.sampled_from(["u1", "i8", "f4", "f8"]))
def test_classes_in_one_piece_each_are_found_in_any_order(counts, world_size, order, dtype):
    targets = np.repeat(np.array(order[: len(counts)]), counts).astype(dtype)
    assert in_order(targets, world_size)
    assert in_order(np.eye(12, dtype="f4")[targets.astype(int)], world_size), "one-hot"


@given(st.integers(MIN_SAMPLES, 5_000), worlds, st.booleans(), st.integers(0, 2**32 - 1))
def test_a_target_that_rises_or_falls_is_found(n_rows, world_size, falls, seed):
    targets = np.cumsum(np.random.default_rng(seed).random(n_rows))
    assert in_order(-targets if falls else targets, world_size)


@given(st.integers(200, 5_000), worlds, st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_targets_that_are_mixed_are_not_taken_for_sorted(n_rows, world_size, n_classes, seed):
    random = np.random.default_rng(seed)
    assert not in_order(random.integers(0, n_classes, n_rows), world_size)
    assert not in_order(random.random(n_rows), world_size)
    assert not in_order(random.permutation(n_rows), world_size)


@given(st.integers(200, 20_000), worlds, st.integers(2, 100))
def test_targets_that_repeat_are_not_taken_for_sorted(n_rows, world_size, period):
    assert not in_order(np.arange(n_rows) % min(period, n_rows // 4), world_size)


@pytest.mark.parametrize(
    "targets",
    [
        np.zeros(ROWS),
        np.full(ROWS, np.nan),
        np.arange(MIN_SAMPLES - 1),
        np.zeros((ROWS, 0)),
        np.zeros(ROWS, "c8"),
        np.where(np.arange(ROWS) % 7 == 0, np.nan, np.arange(ROWS)),
    ],
    ids=["one value", "no numbers", "few", "nothing in a row", "complex", "gaps"],
)
def test_what_has_no_order_is_left_alone(targets):
    values = sampled_values(torch.from_numpy(targets))
    assert values is None or not are_in_order(values)


def test_pictures_are_no_labels():
    assert sampled_values(torch.zeros(40, 64, 64)) is None


def shards_differ(targets, world_size):
    """What ranks with interleaved shards of these targets find together."""
    shards = [np.asarray(targets)[rank::world_size] for rank in range(world_size)]
    places = [sampled_places(len(shard), world_size) for shard in shards]
    return differ_clearly(
        [sampled_values(torch.from_numpy(shard[at].copy())) for shard, at in zip(shards, places, strict=True)]
    )


@given(worlds, st.integers(1, 4), st.integers(100, 3_000), st.sampled_from(["u1", "i8", "f4", "f8"]))
def test_values_that_repeat_with_the_ranks_are_found(world_size, times, n_rows, dtype):
    targets = np.arange(n_rows) % (world_size * min(times, n_rows // (8 * world_size) or 1))
    assert shards_differ(targets.astype(dtype), world_size)
    assert shards_differ(np.eye(36, dtype="f4")[targets], world_size), "one-hot"
    assert shards_differ(np.where(targets % world_size == 0, np.nan, 1), world_size), "missing on one rank"


@given(worlds, st.integers(1, 60), st.integers(200, 5_000), st.integers(0, 2**32 - 1))
def test_interleaved_values_that_are_mixed_or_sorted_or_all_the_same_do_not_differ(world_size, n_classes, n_rows, seed):
    random = np.random.default_rng(seed)
    mixed = random.choice(n_classes, n_rows, p=random.dirichlet(np.ones(n_classes)))
    for targets in (mixed, np.sort(mixed), np.full(n_rows, seed % 7), random.random(n_rows), np.full(n_rows, np.nan)):
        assert not shards_differ(targets, world_size)


@pytest.fixture
def make(tmp_path):
    def write(**targets):
        path = tmp_path / "rows.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.zeros((ROWS, 2), "f4"), chunks=(64, 2), compression="gzip")
            for name, values in targets.items():
                file[name] = values
        return path

    return write


SORTED = np.arange(ROWS) * 8 // ROWS


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    "targets",
    [
        SORTED,
        SORTED[::-1],
        np.random.default_rng(0).permutation(8)[SORTED],
        [f"class {7 - n}" for n in SORTED],
        SORTED / 7,
    ],
    ids=["rising", "falling", "in runs", "text", "numbers"],
)
def test_a_contiguous_shard_of_sorted_rows_warns_on_each_rank(make, rank, targets):
    with pytest.warns(
        UserWarning, match=r"sorted by the target 'y', and mode='contiguous'.*3 ranks.*mode='interleave'"
    ):
        RankMemCachedH5Dataset(make(y=targets), "x", "y", rank=rank, world_size=3)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "interleave"},
        {"world_size": 1, "rank": 0},
        {"indices": np.random.default_rng(0).permutation(ROWS)},
        {"reshard_every_n_epochs": 1},
        {"y_key": None},
        {"y_key": "mixed"},
        {"y_key": "mask"},
        {"y_key": "constant"},
        {"y_key": "constant", "mode": "interleave"},
        {"y_key": "mixed", "mode": "interleave"},
        {"y_key": "alternating", "mode": "interleave", "reshard_every_n_epochs": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_other_shard_warns(make, options):
    random = np.random.default_rng(1)
    path = make(
        y=SORTED,
        mixed=random.integers(0, 9, ROWS),
        mask=np.zeros((ROWS, 40, 40)),
        constant=np.ones(ROWS),
        alternating=np.arange(ROWS) % 2,
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        RankMemCachedH5Dataset(
            path, **nested_files(**{"x_key": "x", "y_key": "y", "rank": 1, "world_size": 2} | options)
        )
    assert not told


def test_each_of_several_targets_is_looked_at(make):
    path = make(mixed=np.random.default_rng(1).integers(0, 9, ROWS), site=SORTED)
    with pytest.warns(UserWarning, match="sorted by the target 'site'"):
        RankMemCachedH5Dataset(path, "x", {"class": "mixed", "where": "site"}, rank=1, world_size=2)


@pytest.mark.parametrize("targets", [torch.zeros(0), torch.zeros(0, 3, 4), []], ids=["numbers", "pictures", "text"])
def test_a_shard_without_rows_says_nothing(targets):
    assert sampled_values(targets) == []


@pytest.mark.parametrize("samples", [{"window": 2}, {"patch": {"shape": [2]}}], ids=["windows", "patches"])
def test_segments_and_steps_of_samples_are_no_targets(make, samples):
    path = make(mixed=np.random.default_rng(1).integers(0, 9, ROWS))
    with h5py.File(path, "a") as file:
        file["flat"] = np.arange(ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RankMemCachedH5Dataset(path, "flat", "mixed", rank=0, world_size=2, with_index=True, **samples)


def test_the_target_of_a_sparse_matrix_is_looked_at(make):
    """Its stored values and their columns are two arrays, and one field of a sample."""
    path = make(y=SORTED)
    with h5py.File(path, "a") as file:
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [ROWS, 3]})
        matrix["data"], matrix["indices"] = np.ones(ROWS, "f4"), np.arange(ROWS, dtype="i4") % 3
        matrix["indptr"] = np.arange(ROWS + 1)
    with pytest.warns(UserWarning, match="sorted by the target 'y'"):
        RankMemCachedH5Dataset(path, "X", "y", rank=1, world_size=2)
