"""``CombinedHDF5Dataset`` against a model: a list of dicts for its rows, an ``OrderedDict`` for those used last."""

import pickle
from collections import OrderedDict

import h5py
import numpy as np
import pytest
import torch
from arguments import nested_files
from factories import Stored, in_threads, run_forked
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiers import examples

from lightning_h5.datasets import CombinedHDF5Dataset
from lightning_h5.errors import H5ValueError

N, T = 14, 4
RANDOM = np.random.default_rng(3)
ARRAYS = {
    "signal": RANDOM.normal(size=(N, 6)).astype("f4"),
    "target": RANDOM.integers(0, 4, (N, T)).astype("f4"),
    "weight": RANDOM.integers(0, 2, (N, T)).astype("u1"),
    "epoch": RANDOM.integers(-3, 4, N).astype("f4"),
    "cs_label": RANDOM.integers(0, 2, N).astype("u1"),
    "bg_label": RANDOM.integers(0, 2, N).astype("u1"),
    "id": np.arange(N, dtype="u2"),
    "guid": np.array([f"p{i}".encode() for i in RANDOM.integers(0, 4, N)], object),
}
ROWS = [
    {
        name: bool(values[row]) if "_label" in name else values[row].decode() if name == "guid" else values[row]
        for name, values in ARRAYS.items()
    }
    for row in range(N)
]
FILTERS = {
    "allowed_guids": st.lists(
        st.sampled_from([f"p{i}" for i in sorted({int(r["guid"][1:]) for r in ROWS})]), min_size=1
    ),
    "cs_label": st.booleans(),
    "bg_label": st.booleans(),
    "epoch_min": st.integers(-3, 1),
    "epoch_max": st.integers(1, 4),
    "label": st.integers(0, 3),
    "where": st.one_of(
        st.builds(lambda low: {"id": {"min": low}}, st.integers(0, 8)),
        st.builds(lambda ids: {"id": ids}, st.lists(st.integers(0, N), min_size=1, max_size=9)),
        st.sampled_from([3, 5]).map(lambda n: {"id": lambda ids: ids % n != 0}),
        st.sampled_from([2, 4]).map(lambda n: lambda columns: (columns["id"] % n == 0) | (columns["guid"] == "p1")),
    ),
    "valid_mask": st.just("weight"),
    "indices": st.lists(st.integers(0, N - 1), min_size=1),
}


def passes(row, asked):
    """Whether a row, a dict, passes all that is asked."""
    where = asked.get("where", {})
    if callable(where):
        is_there = bool(where({"id": np.array([row["id"]]), "guid": np.array([row["guid"]], object)})[0])
    else:
        wanted = where.get("id")
        if callable(wanted):
            is_there = bool(wanted(row["id"]))
        elif isinstance(wanted, dict):
            is_there = row["id"] >= wanted["min"]
        else:
            is_there = wanted is None or row["id"] in wanted
    counts = row["weight"] != 0 if "valid_mask" in asked else np.ones(T, bool)
    return (
        is_there
        and row["guid"] in asked.get("allowed_guids", [row["guid"]])
        and asked.get("cs_label", row["cs_label"]) == row["cs_label"]
        and asked.get("bg_label", row["bg_label"]) == row["bg_label"]
        and asked.get("epoch_min", -99) <= row["epoch"] <= asked.get("epoch_max", 99)
        and ("label" not in asked or bool(((row["target"] == asked["label"]) & counts).any()))
    )


class LastUsed:
    """What the cache should do, a row at a time."""

    def __init__(self, size):
        self.size, self.hits, self.misses, self.rows = size, 0, 0, OrderedDict()

    def read(self, rows):
        hits, misses = [row for row in rows if row in self.rows], [row for row in rows if row not in self.rows]
        self.hits, self.misses = self.hits + len(hits), self.misses + len(misses)
        for row in hits + misses:
            self.rows[row] = None
            self.rows.move_to_end(row)
        while len(self.rows) > self.size:
            self.rows.popitem(last=False)


def check_sample(sample, row):
    assert list(sample) == list(row)
    for name, expected in row.items():
        if isinstance(expected, str | bool):
            assert (type(sample[name]), sample[name]) == (type(expected), expected)
        else:
            assert sample[name].numpy().dtype == expected.dtype
            assert np.array_equal(sample[name].numpy(), expected)


def spoil(sample):
    for value in sample.values():
        if isinstance(value, torch.Tensor):
            value.copy_(torch.zeros_like(value))


class Model(RuleBasedStateMachine):
    def __init__(self, paths):
        super().__init__()
        self.paths, self.dataset = paths, None

    @initialize(cache_size=st.integers(1, 6))
    def open_all(self, cache_size):
        self.open({}, cache_size)

    @rule(asked=st.fixed_dictionaries({}, optional=FILTERS), cache_size=st.integers(1, 6))
    def open(self, asked, cache_size):
        if "label" not in asked:
            asked = {name: value for name, value in asked.items() if name != "valid_mask"}
        among = asked.get("indices", range(N))
        chosen = [row for row in among if passes(ROWS[row], asked)]
        make = {**asked, "load_fields": list(ARRAYS), "cache_size": cache_size, "dtype": None}
        if not chosen:
            with pytest.raises(H5ValueError, match="no row"):
                CombinedHDF5Dataset(self.paths, **nested_files(**make))
            return
        self.dataset, self.rows, self.model = (
            CombinedHDF5Dataset(self.paths, **nested_files(**make)),
            chosen,
            LastUsed(cache_size),
        )

    @rule(data=st.data())
    def read_a_batch(self, data):
        places = data.draw(st.lists(st.integers(-len(self.rows), len(self.rows) - 1), min_size=1, max_size=9))
        batch = self.dataset.read_batch(places)
        rows = [self.rows[place] for place in places]
        for at, row in enumerate(rows):
            check_sample({n: bool(v[at]) if "_label" in n else v[at] for n, v in batch.items()}, ROWS[row])
        self.model.read(rows)
        spoil(batch)

    @rule(data=st.data())
    def read_samples(self, data):
        places = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=5))
        samples = self.dataset.__getitems__(places)
        for sample, place in zip(samples, places, strict=True):
            check_sample(sample, ROWS[self.rows[place]])
            spoil(sample)
        self.model.read([self.rows[place] for place in places])

    @rule(data=st.data())
    def read_one(self, data):
        place = data.draw(st.integers(-len(self.rows), len(self.rows) - 1))
        sample = self.dataset[place]
        check_sample(sample, ROWS[self.rows[place]])
        self.model.read([self.rows[place]])
        spoil(sample)

    @rule()
    def clear(self):
        self.dataset.clear_cache()
        self.model.rows.clear()

    @rule()
    def close(self):
        self.dataset.close()
        self.model.rows.clear()

    @rule()
    def go_on_with_a_pickled_copy(self):
        self.dataset = pickle.loads(pickle.dumps(self.dataset))
        self.model.rows.clear()

    @rule(data=st.data())
    def fork(self, data):
        """A child begins with nothing in its cache, and leaves its parent's alone; they count together."""
        places = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=9))
        rows = [self.rows[place] for place in places]
        of_child = LastUsed(self.model.size)
        for _ in range(2):
            of_child.read(rows)

        def read():
            for _ in range(2):
                batch = self.dataset.read_batch(places)
                for at, row in enumerate(rows):
                    check_sample({n: bool(v[at]) if "_label" in n else v[at] for n, v in batch.items()}, ROWS[row])
                spoil(batch)
            assert len(self.dataset._cache) == len(of_child.rows)

        assert run_forked(read) == 0
        self.model.hits += of_child.hits
        self.model.misses += of_child.misses

    @precondition(lambda self: self.dataset is not None)
    @invariant()
    def what_was_counted_and_kept_is_as_in_the_model(self):
        found = self.dataset.get_stats()
        assert (found["cache_hits"], found["cache_misses"]) == (self.model.hits, self.model.misses)
        assert found["access_count"] == self.model.hits + self.model.misses
        assert found["cache_size"] == len(self.dataset._cache) == len(self.model.rows)
        assert self.dataset._cache.has(np.array(list(self.model.rows), np.int64)).all()
        assert found["total_samples"] == len(self.dataset) == len(self.rows)

    def teardown(self):
        if self.dataset is not None:
            self.dataset.close()


def write(make_h5):
    paths = []
    for rows in (slice(0, 5), slice(5, 6), slice(6, N)):
        guid = Stored(ARRAYS["guid"][rows], "chunked", (1,), dtype=h5py.string_dtype())
        signal = Stored(ARRAYS["signal"][rows], "chunked", (2, 6), {"compression": "lzf"})
        paths.append(make_h5({**{n: v[rows] for n, v in ARRAYS.items()}, "guid": guid, "signal": signal}))
    return paths


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:filters name:UserWarning")
@pytest.mark.parametrize("held", [True, False], ids=["held", "read each time"])
def test_whatever_is_done_in_whatever_order_the_model_says_what_comes(make_h5, request, held):
    if not held:
        request.getfixturevalue("nothing_held")
    paths = write(make_h5)
    run_state_machine_as_test(
        lambda: Model(paths), settings=settings(settings.default, max_examples=examples(15), stateful_step_count=20)
    )


def test_threads_that_read_at_once_get_their_own_rows(make_h5, nothing_held):
    dataset = CombinedHDF5Dataset(write(make_h5), cache_size=5, dtype=None)

    def read(seed):
        random = np.random.default_rng(seed)
        for turn in range(60):
            places = random.integers(0, N, random.integers(1, 7))
            batch = dataset.read_batch(places)
            assert batch["id"].tolist() == places.tolist()
            assert np.array_equal(batch["signal"], ARRAYS["signal"][places])
            assert batch["guid"] == [ROWS[place]["guid"] for place in places]
            if turn % 20 == seed:
                dataset.clear_cache()

    in_threads(*(lambda seed=seed: read(seed) for seed in range(4)))
    assert len(dataset._cache) <= 5
