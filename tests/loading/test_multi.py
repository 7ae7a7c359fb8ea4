"""Several loaders as one: the schedule is exact, short loaders start again in a new order, and a resume is exact."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from lightning_h5 import (
    H5LazyDataset,
    H5ResumeError,
    H5ValueError,
    MultiDataLoader,
    MultiDataLoaderConfig,
    SamplingStrategy,
    create_multi_dataloaders,
    create_optimized_dataloader,
)

SIZES = {"a": 23, "b": 6, "c": 11}
BATCH = {"a": 4, "b": 3, "c": 2}
CONFIGS = {
    "round robin": {},
    "weighted": {"sampling_strategy": "weighted", "dataloader_weights": [0.5, 0.2, 0.3]},
    "by size": {"sampling_strategy": SamplingStrategy.WEIGHTED},
    "sequential": {"sampling_strategy": "sequential"},
    "alternating": {"sampling_strategy": "alternating", "alternating_pattern": ["a", "a", 1, "c"]},
    "until each was used up": {"epoch_length": "max"},
    "until one is used up": {"epoch_length": "min"},
    "seven steps": {"epoch_length": 7},
    "each batch once": {"cycle_short_loaders": False},
    "each batch once, weighted": {"cycle_short_loaders": False, "sampling_strategy": "weighted"},
    "each batch once, one whole": {"cycle_short_loaders": False, "sampling_strategy": "sequential"},
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    import h5py

    found = {}
    for number, (name, size) in enumerate(SIZES.items()):
        path = tmp_path_factory.mktemp("multi") / f"{name}.h5"
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(size) + 100 * number
        found[name] = H5LazyDataset(path, "x")
    return found


def multi(datasets, case, of_torch=()):
    """A mix of loaders, some of datasets that are not ours."""
    loaders = [
        create_optimized_dataloader(
            TensorDataset(torch.arange(SIZES[name]) + 100 * number) if name in of_torch else datasets[name],
            BATCH[name],
            num_workers=0,
        )
        for number, name in enumerate(SIZES)
    ]
    return MultiDataLoader(loaders, MultiDataLoaderConfig(dataloader_names=list(SIZES), **CONFIGS[case]))


def rows(batch):
    return (batch[0] if isinstance(batch, tuple | list) else batch).tolist()


def seen(batches):
    return [(name, number, rows(batch)) for batch, number, _, name in batches]


@pytest.mark.parametrize("case", CONFIGS)
def test_a_loaders_rows_come_once_before_any_comes_again(datasets, case):
    loader = multi(datasets, case)
    found = {name: [] for name in SIZES}
    for epoch in range(3):
        batches = list(loader)
        assert [batch.batch_idx for batch in batches] == list(range(len(loader)))
        assert loader.epoch == epoch + 1
        for batch, _, source, name in batches:
            assert list(SIZES)[source] == name
            found[name] += rows(batch)
        if not loader.config.cycle_short_loaders:
            assert {name: len(some) for name, some in found.items()} == {n: (epoch + 1) * SIZES[n] for n in SIZES}
    for name, some in found.items():
        passes = [some[start : start + SIZES[name]] for start in range(0, len(some), SIZES[name])]
        if "epoch_length" not in CONFIGS[case] or CONFIGS[case]["epoch_length"] == 7:  # others begin new orders
            assert all(max(Counter(one).values()) == 1 for one in passes)
            assert len(set(map(tuple, passes))) == len(passes), "each pass has another order"


def test_shares_are_exact(datasets):
    counts = Counter()
    loader = multi(datasets, "weighted")
    for number, batch in enumerate(loader, start=1):
        counts[batch.dataloader_name] += 1
        assert all(abs(counts[n] - number * share) < 1 for n, share in zip(SIZES, (0.5, 0.2, 0.3), strict=True))


def test_strategies_take_loaders_in_their_turn(datasets):
    names = {case: "".join(batch.dataloader_name for batch in multi(datasets, case)) for case in CONFIGS}
    assert names["round robin"] == "abcabcabcabcab"
    assert names["alternating"] == "aabcaabcaabcaa"
    assert names["sequential"] == "a" * 6 + "b" * 2 + "c" * 6
    assert names["each batch once"] == "abcabcacacacac"
    assert names["seven steps"] == "abcabca"


@given(st.sampled_from(sorted(CONFIGS)), st.integers(0, 30), st.sets(st.sampled_from("abc")))
def test_a_loop_that_stopped_goes_on_with_exactly_the_rest(datasets, case, n_taken, of_torch):
    whole = multi(datasets, case, of_torch)
    expected = seen(batch for _ in range(3) for batch in whole)
    broken, state, found = multi(datasets, case, of_torch), None, []
    for epoch in range(3):
        broken.set_epoch(epoch)
        for batch in broken:
            if len(found) == n_taken:
                break
            found += seen([batch])
            state = broken.state_dict()
        else:
            continue
        break
    again = multi(datasets, case, of_torch)
    if state is not None:
        again.load_state_dict(state)
    n_epochs = 3 - again.epoch
    assert found + seen(batch for _ in range(n_epochs) for batch in again) == expected


def test_two_ranks_take_equally_many_steps_and_all_rows(datasets):
    ranks = []
    for rank in range(2):
        loaders = [create_optimized_dataloader(d, 2, world_size=2, rank=rank) for d in datasets.values()]
        ranks.append(seen(MultiDataLoader(loaders, MultiDataLoaderConfig(cycle_short_loaders=False))))
    assert [name for name, _, _ in ranks[0]] == [name for name, _, _ in ranks[1]]
    assert len({row for rank in ranks for _, _, some in rank for row in some}) == sum(SIZES.values())


def test_the_configuration_of_the_helper_weights_all_loaders_alike(datasets):
    loaders, config = create_multi_dataloaders({name: (dataset, 4) for name, dataset in datasets.items()}, None, 0)
    assert config.sampling_strategy == SamplingStrategy.WEIGHTED == "weighted"
    assert (config.dataloader_weights, config.dataloader_names) == ([1.0] * 3, list(SIZES))
    counts = Counter(batch.dataloader_name for batch in MultiDataLoader(loaders, config))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_loader_that_cannot_be_repeated_cannot_be_resumed():
    make = lambda: MultiDataLoader([DataLoader(TensorDataset(torch.arange(9)), shuffle=True)])  # noqa: E731
    loader = make()
    next(iter(loader))
    again = make()
    again.load_state_dict(loader.state_dict())
    with pytest.raises(H5ResumeError, match="RandomSampler shuffles in a new order each time"):
        next(iter(again))


def test_a_position_of_other_loaders_is_refused(datasets):
    state = multi(datasets, "round robin").state_dict()
    with pytest.raises(H5ResumeError, match=r"saved position is of .round_robin"):
        multi(datasets, "sequential").load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sampling_strategy": "random"}, "sampling_strategy='random'"),
        ({"dataloader_weights": [1, 1, 1]}, "does not use it"),
        ({"sampling_strategy": "weighted", "dataloader_weights": [1]}, "a weight of 0 or more for each"),
        ({"sampling_strategy": "weighted", "dataloader_weights": [1, -1, 1]}, "a weight of 0 or more for each"),
        ({"sampling_strategy": "alternating"}, "needs alternating_pattern"),
        ({"sampling_strategy": "alternating", "alternating_pattern": ["z"]}, "names 'z'; the loaders are 'a'"),
        ({"dataloader_names": ["a", "a", "b"]}, "one name for each"),
        ({"epoch_length": 0}, "epoch_length"),
        ({"epoch_length": "min", "cycle_short_loaders": False}, "has each batch once"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_errors(datasets, options, told):
    loaders = [create_optimized_dataloader(dataset, 4) for dataset in datasets.values()]
    with pytest.raises(H5ValueError, match=told):
        MultiDataLoader(loaders, MultiDataLoaderConfig(**({"dataloader_names": list(SIZES)} | options)))
