"""``RankMemCachedH5Dataset``: each rank's rows, in memory, as h5py reads them from the files; and nothing left over."""

import gc
import logging
import os
import pickle
import re
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from arguments import nested_files
from dataset_conformance import same
from factories import H5Factory, Stored, edit, make_older, rows_by_h5py
from hypothesis import given
from hypothesis import strategies as st
from test_lazy_dataset import N, write
from torch.utils.data import DataLoader

from lightning_h5 import EpochShuffleSampler, RankMemCachedH5Dataset
from lightning_h5.datasets import shard_loading
from lightning_h5.datasets.shard_loading import AvailableMemory
from lightning_h5.errors import H5CorruptError, H5DataChangedError, H5Error, H5ValueError
from lightning_h5.hdf5 import process_pool
from lightning_h5.readers import bulk

MODES = ["contiguous", "interleave"]


def on_a_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")(test))


def shared_maps(*before):
    """Memory that was made to be shared and is mapped in this process; without what was before."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "memfd:lightning_h5" in line}.difference(*before)


def n_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same rows in one file and in three, and what h5py reads from these."""
    make = H5Factory(tmp_path_factory.mktemp("files"))
    paths = {n_files: write(make, n_files) for n_files in (1, 3)}
    stored = {
        key: np.concatenate([rows_by_h5py(path, key, range(n)) for path, n in zip(paths[3], (8, 8, 7), strict=True)])
        for key in ("images", "g/signals", "labels", "names")
    }
    stored["names"] = np.array([str(name) for name in stored["names"]], object)
    return paths, stored


# Values ------------------------------------------------------------------------------------------------------------

INDICES = st.one_of(
    st.none(),
    st.lists(st.booleans(), min_size=N, max_size=N).map(np.array),
    st.lists(st.integers(0, N - 1), max_size=2 * N).map(partial(np.array, dtype=int)),  # in any order, and again
)


DTYPES = [(None, None), ("float32", torch.float32), (np.float16, torch.float16), (torch.bfloat16, torch.bfloat16)]


@pytest.mark.wide
@given(
    mode=st.sampled_from(MODES),
    world_size=st.integers(1, 7),
    n_files=st.sampled_from([1, 3]),
    x_key=st.sampled_from(["images", "g/signals", "labels"]),
    dtypes=st.sampled_from(DTYPES),
    y_key=st.sampled_from([None, ["labels"], ["names"], ["labels", "g/signals", "names"]]),
    indices=INDICES,
    share_memory=st.booleans(),
)
def test_the_shards_of_all_ranks_are_the_rows_that_h5py_reads(
    files, mode, world_size, n_files, x_key, dtypes, y_key, indices, share_memory
):
    paths, stored = files
    chosen = np.arange(N)
    if indices is not None:
        chosen = chosen[indices]
    seen = []
    for rank in range(world_size):
        dataset = RankMemCachedH5Dataset(
            paths[n_files],
            x_key,
            y_key,
            mode=mode,
            x_dtype=dtypes[0],
            indices=indices,
            share_memory=share_memory,
            rank=rank,
            world_size=world_size,
            with_index=True,
        )
        x, *y, index = dataset.read_batch(range(len(dataset)))
        rows = chosen[index.numpy()]
        assert same(x, torch.from_numpy(stored[x_key][rows]).to(dtypes[1]))
        for key, found in zip(y_key or [], y[0] if y else [], strict=True):
            expected = stored[key][rows]
            assert same(found, expected.tolist() if key == "names" else torch.from_numpy(expected))
        assert dataset.rows.tolist() == index.tolist()
        seen += index.tolist()
        dataset.close()
    assert sorted(seen) == list(range(len(chosen)))


def test_inputs_are_float32_and_targets_as_stored_where_nothing_is_said(files):
    x, y = RankMemCachedH5Dataset(files[0][1], "images", "labels")[3]
    assert (x.dtype, y.dtype, y.shape) == (torch.float32, torch.int16, ())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("share_memory", [False, True])
def test_a_rank_without_rows_has_an_empty_shard(make_h5, mode, share_memory):
    path = make_h5(x=np.arange(6.0).reshape(2, 3), y=np.array([b"a", b"b"]))
    dataset = RankMemCachedH5Dataset(path, "x", "y", mode=mode, share_memory=share_memory, rank=3, world_size=4)
    assert (len(dataset), dataset.rows_on_each_rank, dataset.rows.tolist()) == (0, 0, [])
    x, y = dataset.read_batch([])
    assert (x.shape, x.dtype, y) == ((0, 3), torch.float32, [])
    assert dataset.__getitems__([]) == list(DataLoader(dataset)) == list(EpochShuffleSampler(len(dataset))) == []
    with pytest.raises(IndexError, match="0 rows"):
        dataset[0]


@pytest.mark.parametrize("share_memory", [False, True])
@pytest.mark.parametrize(("given_as", "dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_single_row_of_single_numbers_is_a_shard_too(make_h5, mode, given_as, dtype, share_memory):
    """What is picked with a step has strides that mean nothing where one is picked."""
    path = make_h5(x=np.arange(3, dtype="i2"))
    options = {"dtype_x": given_as, "share_memory": share_memory, "rank": 1, "world_size": 4}
    dataset = RankMemCachedH5Dataset(path, "x", **nested_files(mode=mode, **options))
    assert same(dataset.read_batch([0]), torch.tensor([1], dtype=dtype or torch.int16))
    assert same(dataset.read_batch([]), torch.empty(0, dtype=dtype or torch.int16))


@pytest.mark.parametrize("storage", ["contiguous", "chunked"])
@pytest.mark.parametrize("text", [False, True], ids=["numbers", "text"])
def test_rows_that_take_no_memory_are_rows_too(make_h5, storage, text):
    x = Stored(np.zeros((6, 0)), storage, (4, 1) if storage == "chunked" else None)
    path = make_h5(x=x, y=np.zeros((6, 0), "S3") if text else np.arange(6))
    x, y = RankMemCachedH5Dataset(path, "x", "y", rank=1, world_size=2).read_batch([2, 0])
    assert x.shape == (2, 0)
    assert (y == [[], []]) if text else (y.tolist() == [5, 3])


def test_files_with_a_live_writer_are_read_through_the_library(make_h5):
    x = Stored(np.arange(40.0).reshape(20, 2), "chunked", (3, 2), {"compression": "gzip"})
    path = make_h5(x=x, libver="latest")
    dataset = RankMemCachedH5Dataset(path, "x", swmr=True, rdcc_nbytes=1 << 20, rdcc_nslots=1009, rdcc_w0=0.5)
    assert torch.equal(dataset.read_batch(range(20)), torch.arange(40.0).reshape(20, 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_shard_that_is_drawn_anew_has_the_rows_of_that_draw(files, mode, world_size):
    options = {"mode": mode, "rank": 0, "world_size": world_size, "reshard_every_n_epochs": 1, "seed": 4}
    for y_key in ("labels", "names"):
        dataset = RankMemCachedH5Dataset(files[0][3], "labels", y_key, **nested_files(x_dtype=None, **options))
        for draw in (2, 1, 0):
            dataset.reshard(draw)
            dataset.load()
            expected = np.asarray(dataset.shard.rows(draw))
            x, y = dataset.read_batch(range(len(dataset)))
            assert x.tolist() == dataset.rows.tolist() == expected.tolist()
            assert (y if y_key == "names" else y.tolist()) == files[1][y_key][expected].tolist()


# Replicas ----------------------------------------------------------------------------------------------------------


def test_without_a_process_group_one_rank_holds_all(files):
    dataset = RankMemCachedH5Dataset(files[0][1], "labels")
    assert (len(dataset), dataset.shard.rank, dataset.shard.world_size) == (N, 0, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "blocks"}, "mode='blocks' .*'contiguous' or 'interleave'"),
        ({"cache_device": "gpu"}, "cache_device='gpu' .*'cuda'"),
        ({"cache_device": "cuda", "share_memory": True}, "share_memory=True and cache_device='cuda'"),
        ({"rank": 1}, "rank=1 and world_size=None .*both, or neither"),
        ({"rank": 2, "world_size": 2}, "rank=2 of world_size=2"),
        ({"x_dtype": "flaot32"}, "x_dtype='flaot32'.*Did you mean 'float32'"),
        ({"indices": [N]}, f"indices .*{N} rows"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(files, options, words):
    with pytest.raises(H5ValueError, match=words):
        RankMemCachedH5Dataset(files[0][1], "images", **nested_files(**options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_refused(files):
    with pytest.raises(H5ValueError, match=r"cache_device='cuda' .*no such device"):
        RankMemCachedH5Dataset(files[0][1], "images", cache_device="cuda")


# Processes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_alone(make_h5):
    """Makes a dataset whose files are gone once it is loaded."""

    def make(**options):
        path = make_h5(x=np.arange(80.0).reshape(40, 2), y=np.array([f"{i}".encode() for i in range(40)]))
        dataset = RankMemCachedH5Dataset(path, "x", "y", **nested_files(rank=1, world_size=2, **options))
        process_pool().close()
        os.unlink(path)
        return dataset

    return make


def assert_second_half(batches):
    assert torch.cat([x for x, _ in batches])[:, 0].tolist() == [2.0 * i for i in range(20, 40)]
    assert [text for _, y in batches for text in y] == [str(i) for i in range(20, 40)]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("context", "share_memory"), [("fork", False), ("fork", True), ("forkserver", True), ("spawn", True)]
)
def test_workers_are_given_the_rows_and_read_no_file(make_alone, context, share_memory):
    dataset = make_alone(share_memory=share_memory)
    in_shm = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    loader = DataLoader(dataset, batch_size=6, num_workers=2, multiprocessing_context=context, persistent_workers=True)
    for _ in range(2):
        assert_second_half(list(loader))
    del loader
    assert_second_half([dataset.read_batch(range(20))])
    assert not [name for name in os.listdir("/dev/shm") if name not in in_shm and str(os.getpid()) in name]
    dataset.close()


@pytest.mark.wide
def test_a_worker_that_is_not_given_the_rows_loads_them_again_and_says_so(make_h5, capfd):
    path = make_h5(x=np.arange(80.0).reshape(40, 2))
    dataset = RankMemCachedH5Dataset(path, "x", rank=1, world_size=2)
    loaded = dataset.counters.total()["bytes_read"]
    batches = list(DataLoader(dataset, batch_size=6, num_workers=1, multiprocessing_context="spawn"))
    assert torch.equal(torch.cat(batches), dataset.read_batch(range(20)))
    assert dataset.counters.total()["bytes_read"] == 2 * loaded > 0
    assert "they then all read the same copy" in capfd.readouterr().err


@pytest.mark.parametrize("share_memory", [False, True])
def test_a_pickled_dataset_carries_no_rows_and_loads_them_where_it_is_used(make_h5, share_memory):
    path = make_h5(x=np.random.default_rng(0).normal(size=(400, 50)), y=np.arange(400))
    options = {"mode": "interleave", "rank": 1, "world_size": 2, "share_memory": share_memory, "with_index": True}
    dataset = RankMemCachedH5Dataset(path, "x", "y", **nested_files(preload=False, **options))
    before = pickle.dumps(dataset)
    assert not dataset.is_loaded
    expected = dataset.read_batch([4, 0, 1])  # loads
    after = pickle.dumps(dataset)
    assert len(after) < len(before) + 1000
    for pickled in (before, after):
        other = pickle.loads(pickled)
        assert not other.is_loaded
        assert same(other.read_batch([4, 0, 1]), expected)
        other.close()


# Memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_memory", [False, True])
def test_closing_gives_everything_back_and_a_later_read_loads_again(make_h5, share_memory):
    path = make_h5(x=Stored(np.arange(60.0).reshape(30, 2), "chunked", (4, 2), {"compression": "gzip"}))
    mapped = shared_maps()
    dataset = RankMemCachedH5Dataset(path, "x", share_memory=share_memory)
    assert len(shared_maps(mapped)) == share_memory
    dataset.close()
    assert not shared_maps(mapped)
    before = n_descriptors()
    for n_loads in (2, 3, 4):
        assert torch.equal(dataset.read_batch([29, 3]), torch.tensor([[58.0, 59], [6, 7]]))
        assert dataset.counters.total()["chunks_decoded"] == n_loads * 8
        dataset.close()
        dataset.close()
        assert n_descriptors() == before


def damage(path, monkeypatch):
    found = os.stat(path)
    with h5py.File(path) as file:
        edit(path, file["x"].id.get_chunk_info(5).byte_offset)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))  # as a disk does it, which tells no time
    return H5CorruptError, r"chunk 5 \(rows 20 to 23\) of 'x'"


def touch(path, monkeypatch):
    os.utime(path)
    return H5DataChangedError, "was written to"


def replace_by_a_smaller_one(path, monkeypatch):
    """A chunk is then missing, or holds other bytes; the reason is the change."""
    with h5py.File(f"{path}.new", "w") as file:
        file["x"] = np.zeros((30, 2))
    os.replace(f"{path}.new", path)
    return H5DataChangedError, re.escape(path)


def interrupt(path, monkeypatch):
    def do_half(tasks, n_cores, tell):
        for task in tasks[: len(tasks) // 2]:
            task.run()
        raise KeyboardInterrupt

    monkeypatch.setattr(bulk, "do_tasks", do_half)
    return KeyboardInterrupt, None


def leave_no_room(path, monkeypatch):
    monkeypatch.setattr(shard_loading, "available_memory", lambda: AvailableMemory(5, "a test"))
    return H5ValueError, r"0\.0 MiB are left \(a test\)"


def give_no_memory(path, monkeypatch):
    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    return H5Error, r"no memory left for a shard of 240 bytes: .*No space left on device.* Hold less"


TROUBLES = pytest.mark.parametrize(
    "trouble", [damage, touch, replace_by_a_smaller_one, interrupt, leave_no_room, give_no_memory]
)


@pytest.fixture
def not_yet_loaded(make_h5):
    x = Stored(np.arange(60.0).reshape(30, 2), "chunked", (4, 2), {"fletcher32": True})
    path = make_h5(x=x, y=np.array([b"text"] * 30))
    make_older(path)
    return RankMemCachedH5Dataset(path, "x", "y", preload=False, share_memory=True)


@TROUBLES
def test_a_load_that_fails_holds_nothing(not_yet_loaded, monkeypatch, trouble):
    dataset, before, n_open = not_yet_loaded, shared_maps(), []
    with monkeypatch.context() as patch:
        error, words = trouble(dataset.table.paths[0], patch)
        for _ in range(3):
            with pytest.raises(error, match=words):
                dataset.load()
            assert not dataset.is_loaded
            process_pool().close()
            gc.collect()  # errors and the frames that they passed through hold each other
            n_open.append(n_descriptors())
    assert len(set(n_open)) == 1
    assert not shared_maps(before)
    if trouble not in (damage, touch, replace_by_a_smaller_one):
        assert dataset.read_batch([29])[0].tolist() == [[58.0, 59.0]]
        dataset.close()


@TROUBLES
def test_a_load_that_failed_holds_nothing_while_its_error_is_looked_at(not_yet_loaded, monkeypatch, trouble):
    """As in a notebook, which keeps the last one; a smaller shard would not fit beside it."""
    before = shared_maps()
    error, _ = trouble(not_yet_loaded.table.paths[0], monkeypatch)
    with pytest.raises(error) as caught:
        not_yet_loaded.load()
    assert not shared_maps(before), caught.traceback


@pytest.fixture
def large(tmp_path):
    """Four GiB as float32, one as stored, of which nothing was ever written."""
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1 << 20, 1 << 10), "u1", chunks=(1 << 12, 1 << 10))
    return str(path)


@pytest.mark.parametrize(
    ("options", "n_local", "taken"),
    [
        ({}, 1, "4.00 GiB on this rank"),
        ({"dtype_x": "float64"}, 1, "8.00 GiB on this rank"),
        ({"rank": 1, "world_size": 4, "dtype_x": "float64"}, 2, "4.00 GiB on 2 ranks of this machine"),
    ],
    ids=["alone", "float64", "beside others"],
)
def test_a_shard_that_does_not_fit_is_refused_with_the_sum_and_what_would(large, monkeypatch, options, n_local, taken):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(n_local))
    monkeypatch.setattr(
        shard_loading,
        "available_memory",
        lambda: AvailableMemory((2 << 30) + shard_loading.HEADROOM, "the control group's memory.max"),
    )
    with pytest.raises(H5ValueError) as error:
        RankMemCachedH5Dataset(large, "x", **nested_files(**options))
    assert str(error.value).startswith(
        f"the shards take {taken}, and 256.0 MiB while they are loaded; 2.25 GiB are left (the control group's "
        "memory.max). 2.00 GiB would fit: use a smaller dtype"
    )
    assert "H5LazyDataset" in str(error.value)


def test_what_no_machine_has_is_refused_by_this_one_or_by_its_system(tmp_path, monkeypatch):
    path = tmp_path / "huge.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1 << 10, 1 << 40), "u1")
    with pytest.raises(H5ValueError, match=r"1,048,576\.00 GiB on this rank.* GiB would fit"):
        RankMemCachedH5Dataset(path, "x", x_dtype=None, files={"trusted": True})
    monkeypatch.setattr(shard_loading, "available_memory", lambda: None)
    for share_memory in (False, True):
        with pytest.raises(H5Error, match=r"1,125,899,906,842,624 bytes.* Hold less"):
            RankMemCachedH5Dataset(
                path,
                "x",
                x_dtype=None,
                share_memory=share_memory,
                files={"trusted": True},
            )
        gc.collect()


def test_what_was_loaded_is_said_in_one_line(files, caplog):
    lines = []
    RankMemCachedH5Dataset(files[0][1], "g/signals", "names", rank=1, world_size=3, log_fn=lines.append)
    with caplog.at_level(logging.INFO, "lightning_h5"):
        RankMemCachedH5Dataset(files[0][1], "g/signals", "names", rank=1, world_size=3)
    (line,), (record,) = lines, caplog.records
    for text in (line, record.getMessage()):
        assert text.startswith(f"rank 1 of 3 holds 8 of {N} rows (neighboring rows), 0.0 MiB, loaded in ")


# GPU ---------------------------------------------------------------------------------------------------------------


@on_a_gpu
@pytest.mark.parametrize("share_memory", [False, True])
def test_the_shard_is_pinned_where_it_lies(files, share_memory):
    before = shared_maps()
    dataset = RankMemCachedH5Dataset(files[0][1], "images", "g/signals", share_memory=share_memory)
    columns = [torch.from_numpy(column) for column in dataset._held._memory.columns]
    assert all(column.is_pinned() for column in columns)
    assert len(shared_maps(before)) == share_memory  # it is still shared
    expected = torch.from_numpy(files[1]["images"]).float()
    assert torch.equal(dataset.read_batch(range(N))[0].to("cuda", non_blocking=True).cpu(), expected)
    dataset.close()


@on_a_gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_shard_on_the_gpu_gives_batches_there(files, mode):
    path, stored = files[0][3], files[1]
    dataset = RankMemCachedH5Dataset(
        path, "images", ["labels", "names"], mode=mode, rank=1, world_size=2, cache_device="cuda"
    )
    x, (y, names) = dataset.read_batch([3, 0, 3])
    rows = dataset.rows[[3, 0, 3]]
    assert x.device.type == y.device.type == "cuda"
    assert torch.equal(x.cpu(), torch.from_numpy(stored["images"][rows]).float())
    assert torch.equal(y.cpu(), torch.from_numpy(stored["labels"][rows]))
    assert names == stored["names"][rows].tolist()


@on_a_gpu
def test_a_shard_that_the_gpu_does_not_take_is_refused_with_the_sizes(large, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    with pytest.raises(H5ValueError, match=r"takes 4\.00 GiB, and 1\.00 of the 80\.00 GiB of 'cuda'"):
        RankMemCachedH5Dataset(large, "x", cache_device="cuda")
