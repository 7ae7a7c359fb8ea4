"""Loaders for training loops of one's own: the order and the sharding of the data modules, without one."""

import inspect
import time
from functools import partial

import h5py
import numpy as np
import pytest
import torch
from arguments import nested_files
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_h5 import (
    CombinedHDF5Dataset,
    EpochShuffleSampler,
    H5LazyDataset,
    H5ValueError,
    RankMemCachedH5Dataset,
    balanced_contiguous_shard,
    calculate_optimal_batch_size,
    create_multi_dataloaders,
    create_optimized_dataloader,
    diagnose_dataloader_speed,
    ensure_deterministic_dataloader,
    get_optimal_num_workers,
    h5_worker_init_fn,
    interleaved_indices,
    set_reproducible_training,
)
from lightning_h5.cores import cores_of_a_rank

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


@pytest.mark.parametrize(
    "named",
    [
        lambda files: files,
        lambda files: tuple(map(str, files)),
        lambda files: str(files[0].parent),
        lambda files: files[0].parent / "*.h5",
        lambda files: str(files[0]),
    ],
    ids=["a list", "a tuple of text", "a folder", "a glob", "a file"],
)
def test_files_are_taken_in_the_place_of_the_dataset(files, named):
    given = named(files)
    loaders = [
        create_optimized_dataloader(given, 4, True, 0, seed=5),
        create_optimized_dataloader(hdf5_files=given, batch_size=4, seed=5),
        create_multi_dataloaders({"all": given}, 4, seed=5)[0][0],
        create_multi_dataloaders({"all": (given, 4)}, seed=5)[0][0],
    ]
    rows = [rows_of(loader) for loader in loaders]
    assert rows[0] == rows[1] == rows[2] == rows[3]
    assert set(rows[0]) == set(rows_of(create_optimized_dataloader(CombinedHDF5Dataset(given), is_training=False)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    "given",
    [
        [1, 2, 3],
        [np.zeros(3), np.ones(3)],
        ["a.h5", 3],
        ["a.h5", {"x": 1}],
        [["a.h5", "b.h5"]],
        (torch.zeros(3), torch.ones(3)),
        range(3),
        {"x": [1, 2]},
        {"a.h5", "b.h5"},
        np.zeros((4, 2)),
        torch.zeros(4, 2),
        Stream(),
        object(),
        3,
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_neither_a_dataset_nor_paths_is_refused(given):
    with pytest.raises(
        H5ValueError, match=rf"(?s)^dataset has the type '{type(given).__name__}'.*Pass a path.*map-style dataset"
    ):
        create_optimized_dataloader(given, 32, True)
    with pytest.raises(H5ValueError, match="map-style dataset"):
        create_multi_dataloaders({"one": given}, 32)


def test_what_a_refused_list_has_in_it_is_named():
    with pytest.raises(H5ValueError, match="the type 'list' with 'dict', 'str' in it"):
        create_optimized_dataloader(["a.h5", {"x": 1}])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "samples",
    [
        [{"x": n} for n in range(10)],
        [(torch.tensor(n), torch.ones(2)) for n in range(10)],
        [[n, "text"] for n in range(10)],
        [torch.tensor(n) for n in range(10)],
    ],
    ids=["dicts", "tuples", "lists", "tensors"],
)
def test_a_list_of_samples_is_a_dataset(samples, num_workers):
    found = list(create_optimized_dataloader(samples, 2, False, num_workers))
    first = [
        batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch for batch in found
    ]
    assert torch.cat(first).tolist() == [*range(10)]
    (loader,), _ = create_multi_dataloaders({"one": (samples, 5)}, num_workers=num_workers)
    assert len(list(loader)) == 2


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, None, True])
@pytest.mark.parametrize("given", ["files", "torch", "lazy"])
def test_a_batch_size_below_one_is_refused_at_once(files, given, batch_size):
    dataset = {"files": files, "torch": TensorDataset(torch.arange(4)), "lazy": H5LazyDataset(files[0], "row")}[given]
    with pytest.raises(H5ValueError, match="batch_size"):
        create_optimized_dataloader(dataset, batch_size)


def test_an_open_file_or_array_is_not_taken_for_a_dataset(files):
    with h5py.File(files[0]) as file:
        for given in (file, file["x"]):
            with pytest.raises(H5ValueError, match="Pass a path"):
                create_optimized_dataloader(given)


def test_a_list_without_a_path_names_no_file():
    with pytest.raises(H5ValueError, match="names no file"):
        create_optimized_dataloader([])


def test_a_dataset_need_not_inherit_from_torch():
    class Squares:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return index * index

    loader = create_optimized_dataloader(Squares(), 2, False, 0)
    assert torch.cat(list(loader)).tolist() == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("source", ["files", "lazy", "torch", "shard"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_environment_names_the_rank(files, monkeypatch, source, world_size):
    found = []
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        dataset = {
            "files": lambda: files[0],
            "lazy": lambda: H5LazyDataset(files[0], {"row": "row"}),
            "torch": lambda: TensorDataset(torch.arange(ROWS)),
            "shard": lambda rank=rank: RankMemCachedH5Dataset(
                files[0], {"row": "row"}, x_dtype=None, rank=rank, world_size=world_size
            ),
        }[source]()
        loader = create_optimized_dataloader(dataset, 4, False, 0)
        found.append([row for (b,) in loader for row in b.tolist()] if source == "torch" else rows_of(loader))
    assert {row for rows in found for row in rows} == set(range(ROWS))
    if source != "torch":  # whose sampler gives each rank equally many
        assert sorted(row for rows in found for row in rows) == list(range(ROWS))


@pytest.mark.parametrize(("rank", "world_size"), [("one", "2"), ("0", "two"), ("2", "2"), ("-1", "2")])
def test_an_environment_that_makes_no_sense_is_an_error(files, monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(H5ValueError, match=r"(?i)rank='?(one|0|2|-1)"):
        create_optimized_dataloader(files, 4)
    assert len(rows_of(create_optimized_dataloader(files, 4, world_size=1))) == 2 * ROWS


def test_a_loader_of_another_rank_than_the_shards_is_an_error(files, monkeypatch):
    given = RankMemCachedH5Dataset(files[0], {"row": "row"}, x_dtype=None, rank=1, world_size=2)
    for rank, world_size in ((0, 2), (1, 3), (None, 1)):
        with pytest.raises(H5ValueError, match="holds the rows of rank 1 of 2"):
            create_optimized_dataloader(given, 4, world_size=world_size, rank=rank)
    earlier = RankMemCachedH5Dataset(files[0], {"row": "row"})
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")  # replicas of two processes each
    assert len(rows_of(create_optimized_dataloader(given, 4))) == len(given)
    with pytest.raises(H5ValueError, match="rank 3 of 4 was requested, but the dataset holds the rows of rank 0 of 1"):
        create_optimized_dataloader(earlier, 4)
    assert len(rows_of(create_optimized_dataloader(RankMemCachedH5Dataset(files[0], {"row": "row"}), 4))) == ROWS // 4


def test_pinning_can_be_turned_off(files, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for given in (files, CombinedHDF5Dataset(files), TensorDataset(torch.arange(4))):
        assert [create_optimized_dataloader(given, 2, pin_memory=pins).pin_memory for pins in (True, False)] == [1, 0]
    assert not create_optimized_dataloader(CombinedHDF5Dataset(files, pin_memory=False), 2).pin_memory


# As the documents that these functions were first described in have them.
DESCRIBED = {
    create_optimized_dataloader: "dataset batch_size is_training=True num_workers world_size rank seed=42",
    create_multi_dataloaders: "datasets_dict batch_sizes num_workers",
    get_optimal_num_workers: "device_type='cuda'",
    calculate_optimal_batch_size: "model input_shape device='cuda'",
    set_reproducible_training: "seed=42",
    ensure_deterministic_dataloader: "dataset batch_size",
    diagnose_dataloader_speed: "dataloader",
    EpochShuffleSampler: "data_len seed=0 shuffle=True",
    balanced_contiguous_shard: "total world_size rank",
    interleaved_indices: "total world_size rank",
    h5_worker_init_fn: "worker_id",
    H5LazyDataset: "path x_key y_key=None x_dtype=None y_dtype=None transform=None target_transform=None rdcc_nbytes "
    "rdcc_nslots rdcc_w0 swmr",
    RankMemCachedH5Dataset: "path x_key y_key=None",
    CombinedHDF5Dataset: "paths load_fields=None allowed_guids=None cs_label=None bg_label=None epoch_min=None "
    "epoch_max=None label=None cache_size=1000 pin_memory=True dtype='float32'",
}


@pytest.mark.parametrize("function", DESCRIBED, ids=lambda function: function.__name__)
def test_positions_names_and_defaults_are_as_first_described(function):
    parameters = list(inspect.signature(function).parameters.values())
    for parameter, text in zip(parameters, DESCRIBED[function].split(), strict=False):
        name, _, default = text.partition("=")
        assert parameter.name == name
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert not default or repr(parameter.default) == default


def test_a_shard_takes_by_name_what_was_first_described():
    found = inspect.signature(RankMemCachedH5Dataset).parameters
    described = {
        "mode": "contiguous",
        "x_dtype": "float32",
        "y_dtype": None,
        "transform": None,
        "target_transform": None,
        "pin_host_memory": True,
        "share_memory": False,
    }
    assert {name: found[name].default for name in described} == described
    assert {"dtype_x", "dtype_y", "rdcc_nbytes", "rdcc_nslots", "rdcc_w0", "swmr", "log_fn"} <= set(found)


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
    dataset = RankMemCachedH5Dataset(files[0], {"row": "row"}, x_dtype=None, rank=1, world_size=2)
    found = rows_of(create_optimized_dataloader(dataset, 4))
    assert set(found) <= set(dataset.rows.tolist())
    assert len(set(found)) == len(found) == len(dataset)


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
    assert create_optimized_dataloader(hdf5_files=files).dataset.cache_bytes != 3 << 20
    for kind in (CombinedHDF5Dataset, partial(H5LazyDataset, x_key="row")):
        assert create_optimized_dataloader(kind(files, files={"cache_bytes": "3 MiB"})).dataset.cache_bytes == 3 << 20


@pytest.mark.wide
@pytest.mark.parametrize(("method", "num_workers"), [("fork", 2), ("forkserver", 2), ("spawn", 1)])
def test_workers_start_as_they_are_told(files, method, num_workers):
    dataset = CombinedHDF5Dataset(files)
    loader = create_optimized_dataloader(
        dataset,
        4,
        num_workers=num_workers,
        workers={"start_method": method},
    )
    assert sorted(rows_of(loader)) == sorted([*range(ROWS), *range(100, 100 + ROWS)])
    assert loader.multiprocessing_context.get_start_method() == method


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_prefetch_depth_is_that_of_the_loader(files, num_workers):
    for dataset in (CombinedHDF5Dataset(files), TensorDataset(torch.arange(9))):
        loaders = [
            create_optimized_dataloader(dataset, 4, num_workers=num_workers, prefetch_factor=depth)
            for depth in (3, None)
        ]
        assert [loader.prefetch_factor for loader in loaders] == ([3, 2] if num_workers else [None, None])
    with pytest.raises(H5ValueError, match="prefetch_factor=0 was given"):
        create_optimized_dataloader(files, prefetch_factor=0)


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
    loaders, config = create_multi_dataloaders(datasets, {"a": 2, "b": 3, "c": 4}, 4)
    assert config.dataloader_names == ["a", "b", "c"]
    assert [loader.num_workers for loader in loaders] == [2, 1, 1]
    assert [loader.sampler.batch_size for loader in loaders] == [2, 3, 4]
    as_written, _ = create_multi_dataloaders({"a": (datasets["a"], 5)})
    assert [loader.sampler.batch_size for loader in as_written] == [5]
    with pytest.raises(H5ValueError, match="one for each"):
        create_multi_dataloaders(datasets, [1, 2])
    with pytest.raises(H5ValueError, match="batch_sizes=6 was given, and 'a' has the batch size 5"):
        create_multi_dataloaders({"a": (datasets["a"], 5)}, 6)


def test_only_datasets_of_others_get_workers_by_themselves(files, monkeypatch):
    monkeypatch.setattr("lightning_h5.loading.factory.get_optimal_num_workers", lambda: 5)
    datasets = {"ours": CombinedHDF5Dataset(files), "files": files, "torch": TensorDataset(torch.arange(4))}
    loaders, _ = create_multi_dataloaders(datasets, 2)
    assert [loader.num_workers for loader in loaders] == [0, 0, 1]


def test_a_model_on_the_cpu_gets_no_workers(monkeypatch):
    monkeypatch.setattr("lightning_h5.loading.factory.cores_of_a_rank", lambda: 8)
    found = [
        get_optimal_num_workers(kind) for kind in ("cpu", torch.device("cpu"), "cuda", "cuda:1", torch.device("mps"))
    ]
    assert found == [0, 0, 7, 7, 7]
    assert get_optimal_num_workers() == get_optimal_num_workers(device_type="cuda") == 7
    for other in ("tpu", "/", 3.5, None):
        with pytest.raises(H5ValueError, match="device_type="):
            get_optimal_num_workers(other)


@pytest.mark.parametrize(
    ("quota", "local_ranks", "expected"),
    [("max 100000", 1, None), ("250000 100000", 1, 2), ("400000 100000", 2, 1), ("50000 100000", 1, 0)],
)
def test_workers_are_as_many_as_cores_that_are_left(tmp_path, monkeypatch, quota, local_ranks, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota)
    monkeypatch.setattr("lightning_h5.loading.factory.cores_of_a_rank", partial(cores_of_a_rank, tmp_path))
    assert get_optimal_num_workers() == (7 if expected is None else expected)


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
    [({}, "is the bottleneck: "), ({"transform": lambda x: time.sleep(0.005) or x}, "Transforms are the bottleneck")],
)
def test_a_diagnosis_says_what_limits_a_loader(files, options, advice):
    loader = create_optimized_dataloader(CombinedHDF5Dataset(files, **nested_files(**options)), 4)
    report = diagnose_dataloader_speed(loader, 5, 1)
    assert (report.n_batches, report.n_rows) == (5, 20)
    assert advice in str(report)
    assert sorted(rows_of(loader)) == sorted([*range(ROWS), *range(100, 100 + ROWS)])


def test_a_diagnosis_of_another_loader_counts_its_batches():
    report = diagnose_dataloader_speed(DataLoader(TensorDataset(torch.arange(40)), batch_size=4), 4)
    assert (report.n_batches, report.n_rows) == (4, 16)
    with pytest.raises(H5ValueError, match="no batch after"):
        diagnose_dataloader_speed(DataLoader(TensorDataset(torch.arange(4)), batch_size=4), 4)
