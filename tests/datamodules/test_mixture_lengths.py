"""How long an epoch of a mixture is: what `epoch_length` promises, over all ranks, held to what h5py reads."""

from collections import Counter

import h5py
import numpy as np
import pytest
from arguments import nested

from lightning_h5 import CombinedHDF5DataModule, H5ValueError

SIZES = (1, 2, 5, 7, 9, 12, 16, 23)
STRATEGIES = ("concat", "weighted", "weighted", "weighted", "round_robin", "alternating", "sequential")


def make_sources(make_h5):
    """Files of different sizes, and what h5py reads from each."""
    rng = np.random.default_rng(5)
    paths = [make_h5({"x": rng.normal(size=(n, 2)).astype("f4"), "row": np.arange(n)}) for n in SIZES]
    truths = []
    for path in paths:
        with h5py.File(path) as file:
            truths.append(file["x"][:])
    return paths, truths


def any_mixture(rng, paths):
    """Arguments of a mixture, some of which are refused; and for each source its file."""
    names = "abcd"[: int(rng.integers(1, 5))]
    chosen = {name: int(at) for name, at in zip(names, rng.integers(len(paths), size=len(names)), strict=True)}
    strategy = STRATEGIES[rng.integers(len(STRATEGIES))]
    given = {
        "sources": {name: paths[at] for name, at in chosen.items()},
        "sampling_strategy": strategy,
        "epoch_length": ["max", "max", "min", "min", "sum", int(rng.integers(1, 9))][rng.integers(6)],
        "mix": ["batches", "rows"][rng.integers(2)],
        "batch_size": int(rng.integers(1, 13)),
        "seed": int(rng.integers(1000)),
        "shuffle": bool(rng.integers(4)),
        "fields": ["x", "row"],
        "cache_size": 0,
    }
    if strategy == "weighted" and rng.integers(4):
        weights = rng.integers(0, 6, size=len(names)).tolist()
        given["weights"] = weights if any(weights) else None
    if strategy == "alternating":
        given["pattern"] = rng.choice(list(names), size=int(rng.integers(1, 6))).tolist()
    return given, chosen


def epoch_of(given, rank, world_size, epoch):
    """Each batch of a rank: for each of its rows the source and the number, and what was read of it."""
    datamodule = CombinedHDF5DataModule(**nested(**given, rank=rank, world_size=world_size))
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return [list(zip(b["source"], b["row"].tolist(), b["x"].numpy(), strict=True)) for b in loader]


def check_any_length(rng, paths, truths):
    given, chosen = any_mixture(rng, paths)
    world_size, epoch = int(rng.integers(1, 4)), int(rng.integers(4))
    try:
        ranks = [epoch_of(given, rank, world_size, epoch) for rank in range(world_size)]
    except H5ValueError:
        return "too few rows for the ranks"
    assert len(set(map(len, ranks))) == 1, "ranks take equally many steps"
    samples = [sample for rank in ranks for batch in rank for sample in batch]
    for source, row, x in samples:
        assert np.array_equal(x, truths[chosen[source]][row])
    check_promise(given, chosen, world_size, [(source, row) for source, row, _ in samples], len(ranks[0]))
    return "right"


def check_promise(given, chosen, world_size, seen, n_steps):
    length, counts = given["epoch_length"], Counter(seen)
    sizes = {name: SIZES[at] for name, at in chosen.items()}
    shares = Counter(given.get("pattern") or list(chosen))
    if given.get("weights"):
        shares = dict(zip(chosen, given["weights"], strict=True))
    of_source = {name: [row for source, row in counts if source == name] for name in chosen}
    if length == "max":
        # Single rows that make no whole round of the ranks sit out.
        missing = sum(sizes[name] - len(of_source[name]) for name in chosen if shares.get(name))
        assert missing <= (world_size - 1 if given["batch_size"] == 1 or world_size > 1 else 0)
    elif length == "min":
        assert set(counts.values()) <= {1}, "no row twice"
        unit = 1 if given["mix"] == "rows" or given["sampling_strategy"] == "concat" else given["batch_size"]
        left = min(sizes[name] - len(of_source[name]) for name in chosen if shares.get(name))
        assert left <= unit + world_size - 1
    elif length != "sum":
        assert n_steps == length


def check_many(make_h5, number, n):
    paths, truths = make_sources(make_h5)
    ends = Counter(check_any_length(np.random.default_rng([number, at]), paths, truths) for at in range(n))
    assert ends["right"] > n // 2


@pytest.mark.wide
def test_an_epoch_of_any_mixture_is_as_long_as_promised(make_h5):
    check_many(make_h5, 1, 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_epoch_of_any_mixture_is_as_long_as_promised_2500_times(make_h5):
    check_many(make_h5, 2, 2500)
