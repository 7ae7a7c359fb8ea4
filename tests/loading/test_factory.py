"""Loaders for training loops of one's own: the order and the sharding of the data modules, without one."""

import time
from functools import partial

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_h5 import (
    CombinedHDF5Dataset,
    H5LazyDataset,
    H5ValueError,
    RankMemCachedH5Dataset,
    create_multi_dataloaders,
    create_optimized_dataloader,
    diagnose_dataloader_speed,
    ensure_deterministic_dataloader,
    get_optimal_num_workers,
    set_reproducible_training,
)

ROWS = 23


@pytest.fixture
def files(tmp_path):
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            rows = np.arange(ROWS) + 100 * number
            file.create_dataset("x", data=np.repeat(rows[:, None], 3, 1).astype("f4"), chunks=(1, 3), compression="lzf")
            file["row"], file["cs_label"] = rows, (rows % 2).astype("u1")
    return paths


def rows_of(loader):
    return [row for batch in loader for row in batch["row"].tolist()]


def test_files_and_filters_make_a_training_loader_that_shuffles_anew_each_epoch(files):
    loader = create_optimized_dataloader(hdf5_files=files, batch_size=4, cs_label=True, cache_size=10, seed=1)
    orders = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        orders.append(rows_of(loader))
    expected = [row + 100 * file for file in range(2) for row in range(1, ROWS, 2)]
    assert [sorted(order) for order in orders] == [expected] * 3
    assert len(set(map(tuple, [expected, *orders]))) == 4


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_take_different_rows_and_equally_many_steps(files, is_training, world_size):
    loaders = [
        create_optimized_dataloader(
            H5LazyDataset(files, {"row": "row"}), 4, is_training, world_size=world_size, rank=rank
        )
        for rank in range(world_size)
    ]
    each = [[batch["row"].tolist() for batch in loader] for loader in loaders]
    assert len({len(batches) for batches in each}) == 1
    assert sorted(row for batches in each for batch in batches for row in batch) == sorted(
        [*range(ROWS), *range(100, 100 + ROWS)]
    )


def test_evaluation_takes_rows_as_they_are_stored(files):
    loader = create_optimized_dataloader(hdf5_files=files, is_training=False)
    assert rows_of(loader) == [*range(ROWS), *range(100, 100 + ROWS)]


def test_a_shard_in_memory_is_served_too(files):
    dataset = RankMemCachedH5Dataset(files[0], {"row": "row"}, dtype_x=None, rank=1, world_size=2)
    found = rows_of(create_optimized_dataloader(dataset, 4))
    assert set(found) <= set(dataset.rows.tolist())
    assert len(set(found)) == len(found) == dataset.rows_on_each_rank


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_dataset_of_somebody_elses_has_a_sampler_that_takes_the_epoch(world_size):
    dataset = TensorDataset(torch.arange(20))
    found = []
    for rank in range(world_size):
        loader = create_optimized_dataloader(dataset, 4, num_workers=0, world_size=world_size, rank=rank)
        loader.sampler.set_epoch(1)
        found += [row for (batch,) in loader for row in batch.tolist()]
    assert sorted(found) == list(range(20))


@pytest.mark.parametrize(
    "arguments",
    [
        lambda files: {},
        lambda files: {"dataset": H5LazyDataset(files, "x"), "hdf5_files": files},
        lambda files: {"dataset": H5LazyDataset(files, "x"), "cs_label": True},
    ],
)
def test_a_dataset_and_what_makes_one_are_not_both_taken(files, arguments):
    with pytest.raises(H5ValueError, match=r"Pass one"):
        create_optimized_dataloader(**arguments(files))


def test_memory_for_decoded_rows_is_as_it_was_asked_for(files):
    loaders = [create_optimized_dataloader(hdf5_files=files, **given) for given in ({"cache_bytes": "3 MiB"}, {})]
    assert loaders[0].dataset.cache_bytes == 3 << 20 != loaders[1].dataset.cache_bytes
    for kind in (CombinedHDF5Dataset, partial(H5LazyDataset, x_key="row")):
        assert create_optimized_dataloader(kind(files, cache_bytes="3 MiB")).dataset.cache_bytes == 3 << 20


@pytest.mark.parametrize(("method", "num_workers"), [("fork", 2), ("forkserver", 2), ("spawn", 1)])
def test_workers_start_as_they_are_told(files, method, num_workers):
    dataset = CombinedHDF5Dataset(files)
    loader = create_optimized_dataloader(dataset, 4, num_workers=num_workers, multiprocessing_context=method)
    assert sorted(rows_of(loader)) == sorted([*range(ROWS), *range(100, 100 + ROWS)])
    assert loader.multiprocessing_context.get_start_method() == method


def test_a_loader_goes_on_where_its_state_was_taken(files):
    def make():
        return create_optimized_dataloader(hdf5_files=files, batch_size=4)

    loader, again = make(), make()
    loader.sampler.set_epoch(2)
    expected = [batch["row"].tolist() for batch in loader]
    seen = []
    for batch in loader:
        seen.append(batch["row"].tolist())
        if len(seen) == 5:
            break
    again.load_state_dict(loader.state_dict())
    assert seen + [batch["row"].tolist() for batch in again] == expected


def test_several_loaders_share_one_budget_of_workers(files):
    datasets = {name: CombinedHDF5Dataset(files) for name in ("a", "b", "c")}
    loaders, names = create_multi_dataloaders(datasets, {"a": 2, "b": 3, "c": 4}, 4)
    assert names == ["a", "b", "c"]
    assert [loader.num_workers for loader in loaders] == [2, 1, 1]
    assert [loader.sampler.batch_size for loader in loaders] == [2, 3, 4]
    as_written, _ = create_multi_dataloaders({"a": (datasets["a"], 5)})
    assert [loader.sampler.batch_size for loader in as_written] == [5]
    with pytest.raises(H5ValueError, match="one for each"):
        create_multi_dataloaders(datasets, [1, 2])


@pytest.mark.parametrize(
    ("quota", "local_ranks", "expected"),
    [("max 100000", 1, None), ("250000 100000", 1, 2), ("400000 100000", 2, 1), ("50000 100000", 1, 0)],
)
def test_workers_are_as_many_as_cores_that_are_left(tmp_path, monkeypatch, quota, local_ranks, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota)
    assert get_optimal_num_workers(tmp_path) == (7 if expected is None else expected)


def test_a_deterministic_loader_gives_the_same_twice(files):
    try:
        each = [rows_of(ensure_deterministic_dataloader(CombinedHDF5Dataset(files), 4)) for _ in range(2)]
        assert each[0] == each[1]
        assert torch.are_deterministic_algorithms_enabled()
        seed_worker, generator = set_reproducible_training(3)
        first = torch.rand(2).tolist(), np.random.rand(), generator.initial_seed()  # noqa: NPY002
        set_reproducible_training(3)
        assert (torch.rand(2).tolist(), np.random.rand(), 3) == first  # noqa: NPY002
        seed_worker(0)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize(
    ("options", "advice"),
    [({}, "limit"), ({"transform": lambda x: time.sleep(0.005) or x}, "Transforms limit it")],
)
def test_a_diagnosis_says_what_limits_a_loader(files, options, advice):
    loader = create_optimized_dataloader(CombinedHDF5Dataset(files, **options), 4)
    report = diagnose_dataloader_speed(loader, 5, 1)
    assert (report.n_batches, report.n_rows) == (5, 20)
    assert advice in str(report)
    assert sorted(rows_of(loader)) == sorted([*range(ROWS), *range(100, 100 + ROWS)])


def test_a_diagnosis_of_another_loader_counts_its_batches():
    report = diagnose_dataloader_speed(DataLoader(TensorDataset(torch.arange(40)), batch_size=4), 4)
    assert (report.n_batches, report.n_rows, report.reading) == (4, 16, None)
    with pytest.raises(H5ValueError, match="no batch after"):
        diagnose_dataloader_speed(DataLoader(TensorDataset(torch.arange(4)), batch_size=4), 4)
