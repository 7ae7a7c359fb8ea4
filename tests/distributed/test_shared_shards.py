"""Ranks of a machine that hold their rows together, without a Trainer: one memory, each chunk decoded once."""

import errno
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from arguments import nested_files
from factories import edit, make_older
from processes import run_ranks, values

from lightning_h5 import RankMemCachedH5Dataset
from lightning_h5.datasets import load_shards, shard_loading
from lightning_h5.datasets.shard_loading import AvailableMemory
from lightning_h5.hdf5 import process_pool
from lightning_h5.readers import bulk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no memory without a name")

ROWS = 61
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("f4")
NAMES = [f"row {row} ü" for row in range(ROWS)]
PICKED = [5, 60, 5, 0, 33, 32, 31, 5, 60, 17]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as h5:
        h5.create_dataset("x", data=X, chunks=(4, 2), compression="gzip", fletcher32=True)
        h5["name"] = NAMES
    make_older(path)
    return str(path)


def join(rank, world_size):
    """Makes this process a rank, and lets each chunk be a task of its own, so that all ranks have some to do."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    bulk.TASK_BYTES = 1


def shared_memory():
    """Device and inode of each shared memory that is mapped in this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted({tuple(line.split()[3:5]) for line in maps if "memfd:lightning_h5" in line})


def n_decoded(dataset):
    return int(dataset.counters.total()["chunks_decoded"])


def right(dataset, chosen):
    """Whether all of a rank's rows are those of the file."""
    x, *y, index = dataset.read_batch(range(len(dataset)))
    rows = chosen[index.numpy()]
    return (
        index.tolist() == dataset.rows.tolist()
        and np.array_equal(x.numpy(), X[rows])
        and (not y or y[0] == [NAMES[row] for row in rows])
    )


CASES = {
    "interleave": {"mode": "interleave"},
    "interleave, with text": {"mode": "interleave", "y_key": "name"},
    "interleave, cast": {"mode": "interleave", "dtype_x": "float64"},
    "interleave, picked rows": {"mode": "interleave", "indices": PICKED, "y_key": "name"},
    "contiguous, shared": {"mode": "contiguous", "share_memory": True},
    "contiguous, shared, picked rows": {"mode": "contiguous", "share_memory": True, "indices": PICKED},
}


def hold_together(rank, world_size, file):
    """For each case: whether all was right, the memory, the chunks that this rank decoded, and its rows."""
    join(rank, world_size)
    found = {}
    for name, options in CASES.items():
        chosen = np.array(options.get("indices", range(ROWS)))
        dataset = RankMemCachedH5Dataset(file, "x", **nested_files(**options, with_index=True))
        memory, decoded = shared_memory(), n_decoded(dataset)
        if rank > 0:
            dist.barrier()  # the first rank has given its part back; who made it need not live on
        is_right = right(dataset, chosen)
        dataset.close()
        if rank == 0:
            dist.barrier()
        found[name] = is_right, memory, decoded, dataset.rows.tolist(), shared_memory()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_hold_their_rows_in_one_memory_and_decode_each_chunk_once(file, tmp_path, world_size):
    ranks = values(run_ranks(hold_together, world_size, tmp_path, world_size, file))
    for name, options in CASES.items():
        is_right, memory, decoded, rows, left = zip(*(found[name] for found in ranks), strict=True)
        assert all(is_right), name
        assert len(memory[0]) == 1, name
        assert set(map(tuple, memory)) == {tuple(memory[0])}, name
        assert all(n > 0 for n in decoded), name
        picked = options.get("indices", range(ROWS))
        assert sum(decoded) == len({row // 4 for row in picked}) * 2, name
        assert sorted(row for some in rows for row in some) == list(range(len(picked))), name
        assert not any(left), name


def draw_anew(rank, world_size, file):
    join(rank, world_size)
    options = {"mode": "interleave", "reshard_every_n_epochs": 1, "with_index": True}
    dataset = RankMemCachedH5Dataset(file, "x", **nested_files(**options))
    decoded, found = n_decoded(dataset), []
    for draw in (1, 2, 0):
        assert dataset.reshard(draw)
        assert right(dataset, np.arange(ROWS))
        found.append(dataset.rows.tolist())
    assert n_decoded(dataset) == decoded
    return found


@pytest.mark.wide
def test_shards_drawn_anew_are_there_already_where_ranks_hold_all_rows_together(file, tmp_path):
    ranks = values(run_ranks(draw_anew, 2, tmp_path, 2, file))
    for some in zip(*ranks, strict=True):
        assert sorted(row for rows in some for row in rows) == list(range(ROWS))
    assert len({tuple(rows) for rows in ranks[0]}) == 3


def patches_of(rank, world_size, file):
    """Whether a rank has its patches, for shards that are drawn too, and the chunks that it decoded."""
    join(rank, world_size)
    options = {"patch": {"shape": [6, 2], "stride": [3, 1]}, "mode": "interleave", "reshard_every_n_epochs": 1}
    dataset = RankMemCachedH5Dataset(file, "x", with_index=True, **options)
    decoded, found = n_decoded(dataset), []
    for draw in (0, 1):
        assert dataset.reshard(draw)
        x, index, _, places = dataset.read_batch(range(len(dataset)))
        for patch, (row, column) in zip(x.numpy(), places.tolist(), strict=True):
            assert np.array_equal(patch, X[row : row + 6, column : column + 2])
        found.append(index.tolist())
    return decoded, found


@pytest.mark.wide
def test_ranks_hold_the_chunks_of_their_patches_together_and_decode_each_once(file, tmp_path):
    (first, ours), (second, theirs) = values(run_ranks(patches_of, 2, tmp_path, 2, file))
    assert first + second == 16 * 2
    n_patches = len({*range(0, ROWS - 6 + 1, 3), ROWS - 6}) * 2
    for some in zip(ours, theirs, strict=True):
        assert sorted(some[0] + some[1]) == list(range(n_patches))


def refusing_descriptors(real):
    def refuse(path, *arguments, **options):
        if str(path).startswith("/proc/") and "/fd/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *arguments, **options)

    return refuse


def cannot_look_at_others(rank, world_size, file):
    join(rank, world_size)
    if rank == 1:
        os.open = refusing_descriptors(os.open)
    n_open = []
    for _ in range(3):
        dataset = RankMemCachedH5Dataset(file, "x", "name", mode="interleave", with_index=True)
        found = right(dataset, np.arange(ROWS)), n_decoded(dataset), shared_memory()
        dataset.close()
        process_pool().close()
        dist.barrier()
        n_open.append(len(os.listdir("/proc/self/fd")))
    return *found, n_open[2] - n_open[1], len(np.unique(dataset.rows // 4)) * 2


@pytest.mark.wide
def test_where_a_rank_cannot_open_the_memory_each_loads_its_own_rows(file, tmp_path):
    for found in values(run_ranks(cannot_look_at_others, 3, tmp_path, 3, file)):
        is_right, decoded, memory, n_more_open, n_chunks = found
        assert is_right
        assert (decoded, memory, n_more_open) == (n_chunks, [], 0)


def have_room_for_one_copy(rank, world_size, file, is_refused):
    join(rank, world_size)
    if is_refused and rank == 1:
        os.open = refusing_descriptors(os.open)
    shard_loading.available_memory = lambda: AvailableMemory(shard_loading.HEADROOM + X.nbytes, "a test's limit")
    dataset = RankMemCachedH5Dataset(file, "x", rank=0, world_size=1, share_memory=True, preload=False)
    load_shards({"": dataset}, is_alone=False)  # as for peers that train one replica together
    return torch.equal(dataset.read_batch(range(ROWS)), torch.from_numpy(X)), shared_memory()


@pytest.mark.wide
def test_where_a_rank_cannot_open_the_memory_there_must_be_room_for_all_copies(file, tmp_path):
    (one, memory), (other, same_memory) = values(run_ranks(have_room_for_one_copy, 2, tmp_path, 2, file, False))
    assert (one, other, len(memory)) == (True, True, 1)
    assert memory == same_memory
    for outcome in run_ranks(have_room_for_one_copy, 2, tmp_path, 2, file, True):
        assert outcome.error.startswith("H5ValueError: checking memory failed on 2 of 2 ranks")
        assert "on 2 ranks of this machine" in outcome.error


# When something goes wrong -----------------------------------------------------------------------------------------


def load(rank, world_size, paths, of_rank, trouble):
    join(rank, world_size)
    if (wrong := trouble.get(rank)) is not None:
        wrong(paths[rank])
    dataset = RankMemCachedH5Dataset(
        paths[rank], "x", **nested_files(**({"mode": "interleave"} | of_rank.get(rank, {})))
    )
    dist.destroy_process_group()
    return len(dataset)


def fail_by_half(path):
    real = bulk.do_tasks

    def do_half(tasks, n_cores, tell):
        real(tasks[: len(tasks) // 2], n_cores, tell)
        raise ZeroDivisionError("no error of ours")

    bulk.do_tasks = do_half


def change_while_it_is_read(path):
    real = bulk.do_tasks

    def do_and_touch(tasks, n_cores, tell):
        real(tasks, n_cores, tell)
        os.utime(path)

    bulk.do_tasks = do_and_touch


def have_no_room(path):
    shard_loading.available_memory = lambda: AvailableMemory(1, "a test")


def cannot_tell_the_room(path):
    shard_loading.available_memory = lambda: {}["CommitLimit"]


def same_error(file, tmp_path, of_rank=None, trouble=None):
    """The one error that all ranks end with, each with a copy of the file."""
    paths = [file, *(shutil.copy2(file, tmp_path / f"copy {rank}.h5") for rank in (1, 2))]
    paths = [str(path) for path in paths]
    outcomes = run_ranks(load, 3, tmp_path, 3, paths, of_rank or {}, trouble or {})
    assert [outcome.exitcode for outcome in outcomes] == [1, 1, 1], [outcome.output[-2000:] for outcome in outcomes]
    assert len({outcome.error for outcome in outcomes}) == 1, [outcome.error for outcome in outcomes]
    return outcomes[0].error


def test_a_damaged_chunk_stops_all_ranks_with_the_words_of_the_one_that_read_it(file, tmp_path):
    with h5py.File(file) as h5:
        edit(file, h5["x"].id.get_chunk_info(2).byte_offset)
    error = same_error(file, tmp_path)
    assert error.startswith(
        "H5CorruptError: loading shards failed on 1 of 3 ranks:\n  rank 0: H5CorruptError: chunk 2 "
    )


@pytest.mark.wide
@pytest.mark.parametrize(
    ("failing", "wrong", "told"),
    [
        (0, fail_by_half, "ZeroDivisionError: no error of ours"),
        (2, have_no_room, "H5ValueError: the shards take "),
        (1, cannot_tell_the_room, "KeyError: 'CommitLimit'"),
        (0, change_while_it_is_read, "H5DataChangedError: "),
    ],
)
def test_a_rank_that_fails_stops_all_ranks_with_its_words(file, tmp_path, failing, wrong, told):
    error = same_error(file, tmp_path, trouble={failing: wrong})
    assert f"failed on 1 of 3 ranks:\n  rank {failing}: {told}" in error


@pytest.mark.wide
@pytest.mark.parametrize(
    "other",
    [{"indices": [*range(40), 50]}, {"dtype_x": "float64"}, {"share_memory": True}],
    ids=["other rows", "another dtype", "share_memory on one"],
)
def test_ranks_that_ask_for_other_rows_or_in_another_way_all_stop(file, tmp_path, other):
    """What one loads for another would not be what that one wants: an unseeded split would mix inputs and targets."""
    usual = {"indices": list(range(41)), "y_key": "name"}
    error = same_error(file, tmp_path, {0: usual, 1: usual | other, 2: usual})
    assert error.startswith("H5ValueError: the ranks do not see the same data")


def load_slowly(rank, world_size, file):
    join(rank, world_size)
    shard_loading.HEARTBEAT = 0.1
    dataset = RankMemCachedH5Dataset(file, "x", mode="interleave", with_index=True, preload=False)
    if rank == 1:
        real = bulk.do_tasks
        bulk.do_tasks = lambda tasks, n_cores, tell: [real([task], 1, tell) or time.sleep(0.7) for task in tasks]
    load_shards({"": dataset}, is_alone=False, patience=3.0)
    return right(dataset, np.arange(ROWS))


@pytest.mark.wide
def test_a_rank_that_loads_slowly_is_waited_for_as_long_as_it_goes_on(file, tmp_path):
    assert values(run_ranks(load_slowly, 2, tmp_path, 2, file)) == [True, True]


def die_in_the_middle(rank, world_size, file, folder):
    join(rank, world_size)
    real = bulk.do_tasks

    def do_half(tasks, n_cores, tell):
        real(tasks[: len(tasks) // 2], n_cores, tell)
        Path(folder, f"rank {rank}").write_text(f"{os.getpid()} {shared_memory()[0][1]}")
        while len(list(Path(folder).glob("rank ?"))) < world_size:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    bulk.do_tasks = do_half
    RankMemCachedH5Dataset(file, "x", mode="interleave", share_memory=True)


@pytest.mark.wide
def test_nothing_is_left_of_ranks_that_are_killed_while_they_load(file, tmp_path):
    before = set(os.listdir("/dev/shm"))
    outcomes = run_ranks(die_in_the_middle, 3, tmp_path, 3, file, str(tmp_path))
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * 3
    pids, inodes = zip(*(path.read_text().split() for path in tmp_path.glob("rank ?")), strict=True)
    assert len(set(inodes)) == 1
    assert not [name for name in set(os.listdir("/dev/shm")) - before if any(pid in name for pid in pids)]
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert not list(holders_of(inodes[0]))


def hold_and_read(rank, world_size, file, expected):
    join(rank, world_size)
    dataset = RankMemCachedH5Dataset(file, "x", mode="interleave", share_memory=True, with_index=True)
    found = []
    for _ in range(20):
        x, index = dataset.read_batch(range(len(dataset)))
        found.append(bool((x.numpy() == np.asarray(expected)[index.numpy()]).all()))
    inode = shared_memory()[0][1]
    dist.barrier()
    return all(found), inode


@pytest.mark.wide
def test_two_jobs_that_read_the_same_file_share_nothing_with_each_other(file, tmp_path):
    with h5py.File(file) as h5:
        expected = h5["x"][:].tolist()
    before = set(os.listdir("/dev/shm"))
    with ThreadPoolExecutor(2) as jobs:
        runs = [jobs.submit(run_ranks, hold_and_read, 2, tmp_path / f"{n}", 2, file, expected) for n in range(2)]
        found = [values(run.result()) for run in runs]
    assert all(is_right for job in found for is_right, _ in job)
    inodes = [{inode for _, inode in job} for job in found]
    assert [len(one) for one in inodes] == [1, 1]
    assert not inodes[0] & inodes[1]
    assert set(os.listdir("/dev/shm")) <= before
    assert not [holder for one in inodes for inode in one for holder in holders_of(inode)]


def holders_of(inode):
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
            if any("memfd:lightning_h5" in line and line.split()[4] == inode for line in lines):
                yield maps
        except OSError:
            continue
