"""Chunked, compressed arrays in a dataset: several fields that lie differently, one budget, any process and thread."""

import re
import threading
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from factories import Stored, edit, in_threads, run_forked
from guards import HANG
from torch.utils.data import DataLoader

from lightning_h5.datasets import H5LazyDataset
from lightning_h5.errors import H5CorruptError
from lightning_h5.readers import ChunkLoader, chunked

N = 67
RNG = np.random.default_rng(3)
DATA = {
    "images": np.resize(RNG.integers(0, 256, (7, 3, 8, 8), dtype=np.uint8), (N, 3, 8, 8)),
    "signals": RNG.normal(size=(N, 6)),
    "masks": RNG.integers(0, 2, (N, 5)).astype(bool),
    "raw": RNG.normal(size=(N, 2)).astype("f4"),
    "labels": np.arange(N),
}
LAYOUTS = {
    # As h5py guesses chunks: a row takes part in many, and they hold many rows.
    "images": [((20, 1, 4, 4), ("gzip",)), ((3, 3, 8, 8), ("shuffle", "gzip")), ((5, 3, 3, 8), ("lzf", "fletcher32"))],
    "signals": [((8, 6), ("shuffle", "lzf")), ((1, 6), ("gzip",)), ((6, 4), ("fletcher32",))],
    "masks": [((30, 5), ("gzip",)), ((7, 2), ()), ((2, 5), ("shuffle",))],
}
FIELDS = {name: name for name in ("images", "signals", "masks", "raw")}


def write(make_h5, n_files=3):
    paths = []
    for file, part in enumerate(np.array_split(np.arange(N), n_files)):
        arrays = {}
        for name, values in DATA.items():
            if name in LAYOUTS:
                chunks, filters = LAYOUTS[name][file % 3]
                arrays[name] = Stored(values[part], "chunked", chunks, filters=filters)
            else:
                arrays[name] = values[part]
        paths.append(make_h5(arrays))
    return paths


@pytest.fixture
def paths(make_h5, nothing_held):
    return write(make_h5)


@pytest.fixture
def pools(monkeypatch):
    """The pools of decoded rows that were made, as they were made."""
    made, real = [], chunked.ChunkCache
    monkeypatch.setattr(chunked, "ChunkCache", lambda *args: made.append(real(*args)) or made[-1])
    return made


def check_batch(batch, rows):
    x, y = batch
    assert y.tolist() == list(rows)
    for name in x:
        assert np.array_equal(x[name], DATA[name][list(rows)]), name


def test_a_child_that_was_forked_while_a_thread_was_counting_counts_for_itself(paths):
    """The lock that the thread held is locked for ever in the child."""
    dataset = H5LazyDataset(
        paths,
        FIELDS,
        "labels",
        files={"cache_bytes": 20_000},
    )
    check_batch(dataset.read_batch(range(N)), range(N))
    with dataset.counters._lock:
        assert run_forked(lambda: check_batch(dataset.read_batch(range(N)), range(N))) == 0


def test_a_process_that_forks_while_its_threads_decode_does_not_hang_the_child(paths):
    dataset = H5LazyDataset(
        paths,
        FIELDS,
        "labels",
        files={"cache_bytes": 20_000},
    )
    check_batch(dataset.read_batch(range(N)), range(N))  # NumPy imports some of its modules when they are first used
    stop = threading.Event()
    team = dataset.work.start_team(2)

    def read():
        random = np.random.default_rng(0)
        while not stop.is_set():
            rows = random.integers(0, N, 20)
            dataset.prefetch(rows)
            check_batch(dataset.read_batch(rows), rows)

    def child():
        in_threads(lambda: check_batch(dataset.read_batch(range(N)), range(N)))

    def fork():
        for _ in range(4):
            assert run_forked(child) == 0
        stop.set()

    try:
        in_threads(read, fork)
    finally:
        stop.set()
        dataset.work.end_team(2)
    for thread in team:
        thread.join(HANG)


def test_a_dataset_that_was_handed_to_workers_counts_on_where_it_did(paths):
    """Torch moves what it hands to another process to shared memory, and frees the place where it was."""
    dataset = H5LazyDataset(paths, FIELDS, "labels")
    dataset.read_batch(range(N))
    before = dataset.counters.total()["blocks_used"]
    assert before > 0

    def child():  # memory that is written to after it was freed may end the process
        dataset.read_batch(range(N))
        ForkingPickler.dumps(dataset)
        dataset.read_batch(range(N))
        assert dataset.counters.total()["blocks_used"] == 3 * before

    assert run_forked(child) == 0


@pytest.mark.parametrize("cache_bytes", [0, 6000, 20_000, 100_000, 10**7])
@pytest.mark.parametrize("fields", [["images"], ["images", "signals"], ["images", "signals", "masks", "raw"]], ids=len)
def test_decoded_rows_take_no_more_memory_than_the_budget_whatever_the_number_of_fields(
    paths, pools, cache_bytes, fields
):
    dataset = H5LazyDataset(
        paths,
        {name: name for name in fields},
        "labels",
        files={"cache_bytes": cache_bytes},
    )
    for _ in range(2):
        check_batch(dataset.read_batch(range(N)), range(N))
    assert sum(pool.rows.nbytes for pool in pools) <= cache_bytes
    if cache_bytes == 10**7:  # room for all: a pool for each compressed field, no larger than its blocks
        assert len(pools) == len([name for name in fields if name in LAYOUTS])


@pytest.mark.parametrize("n_workers", [1, 4])
def test_workers_share_the_budget(paths, pools, monkeypatch, n_workers):
    monkeypatch.setattr(
        "lightning_h5.datasets.file_dataset.get_worker_info", lambda: SimpleNamespace(id=0, num_workers=n_workers)
    )
    dataset = H5LazyDataset(
        paths,
        FIELDS,
        "labels",
        files={"cache_bytes": 60_000},
    )
    check_batch(dataset.read_batch(range(N)), range(N))
    assert 0 < sum(pool.rows.nbytes for pool in pools) <= 60_000 // n_workers


def test_a_smaller_budget_takes_the_place_of_a_larger_one(paths, pools):
    dataset = H5LazyDataset(
        paths,
        FIELDS,
        "labels",
        files={"cache_bytes": 10**7},
    )
    check_batch(dataset.read_batch(range(N)), range(N))
    n_pools = len(pools)
    dataset.read_with(20_000, retain=False)
    check_batch(dataset.read_batch(range(N)), range(N))
    assert sum(pool.rows.nbytes for pool in pools[n_pools:]) <= 20_000
    dataset.read_with(20_000, retain=False)  # nothing new, nothing is lost
    before = dataset.counters.total()["chunks_decoded"]
    n_pools = len(pools)
    dataset.read_batch([N - 1])
    assert len(pools) == n_pools
    assert dataset.counters.total()["chunks_decoded"] <= before + 9


def test_rows_that_were_decoded_stay_decoded_within_the_budget(paths):
    dataset = H5LazyDataset(paths, FIELDS, "labels")
    dataset.read_batch(range(N))
    decoded = dataset.counters.total()["chunks_decoded"]
    assert decoded > 0
    for _ in range(3):
        dataset.read_batch(RNG.permutation(N))
        dataset[5]
    assert dataset.counters.total()["chunks_decoded"] == decoded
    dataset.close()
    dataset.read_batch(range(N))
    assert dataset.counters.total()["chunks_decoded"] == 2 * decoded


@pytest.mark.parametrize("n_blocks", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("keys", [["x"], ["x", "z"]], ids=["one field", "two fields"])
def test_threads_that_begin_batches_in_their_order_and_read_them_at_their_leisure_do_not_hang(
    make_h5, nothing_held, keys, n_blocks
):
    """As reading ahead does it: one thread at a time begins a batch, and each reads what it began."""
    values = np.resize(np.arange(11), (40, 25))
    arrays = {"x": ((4, 25), ("gzip",)), "z": ((5, 10), ("lzf",))}
    path = make_h5({k: Stored(values, "chunked", c, filters=f) for k, (c, f) in arrays.items()} | {"y": np.arange(40)})
    dataset = H5LazyDataset(path, keys, "y", files={"cache_bytes": n_blocks * 5 * values[:1].nbytes * len(keys)})
    orders = [np.random.default_rng(epoch).permutation(40) for epoch in range(4)]
    batches = iter([(epoch, order[at : at + 6]) for epoch, order in enumerate(orders) for at in range(0, 40, 6)])
    turn, team = threading.Lock(), dataset.work.start_team(1)

    def read():
        while True:
            with turn:
                epoch, rows = next(batches, (None, None))
                if epoch is None:
                    return
                begun = dataset.begin(rows, epoch)
            x, y = dataset.finish(begun())
            assert all(np.array_equal(column, values[rows]) for column in x)
            assert y.tolist() == rows.tolist()

    in_threads(*[read] * 4)
    dataset.work.end_team(1)
    team[0].join(HANG)
    assert not team[0].is_alive()


DTYPES = ["float16", "bfloat16", "float32", "float64", "int64", "uint8", "bool", None]


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", ["f8", ">f4", "u1", "i8", "?"])
def test_a_dtype_gives_the_same_numbers_however_the_array_lies_in_its_file(make_h5, nothing_held, stored, x_dtype):
    """Bit by bit: also where numbers are rounded, and where they are too large, of which nobody is warned."""
    values = RNG.normal(size=(60, 50)) * 100
    if np.dtype(stored).kind == "f":
        values[0] = 10.0 ** np.arange(-25, 25)
        values[1] = 1 + 2.0**-11 + 2.0 ** -np.arange(20, 70)  # rounded twice, these are others
    values = np.abs(values)
    if x_dtype in ("int64", "uint8"):  # larger numbers are errors
        values = np.minimum(values, {"int64": 2.0**62, "uint8": 255}[x_dtype])
    values = values.astype(stored)
    path = make_h5(contiguous=values, chunked=Stored(values, "chunked", (7, 11), {"compression": "gzip"}))
    plain, here = (H5LazyDataset(path, key, x_dtype=x_dtype) for key in ("contiguous", "chunked"))
    a, b = plain.read_batch(range(60)), here.read_batch(range(60))
    assert a.dtype == b.dtype
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    expected = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
    expected = expected if x_dtype is None else expected.to(getattr(torch, x_dtype))
    assert torch.equal(b.view(torch.uint8), expected.view(torch.uint8))


def test_a_damaged_chunk_is_named_and_other_batches_are_read(make_h5, nothing_held):
    values = np.resize(np.arange(11, dtype="f4"), (40, 50))
    path = make_h5(x=Stored(values, "chunked", (5, 50), {"compression": "gzip"}))
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(3)
    edit(path, chunk.byte_offset, bytes(chunk.size))
    dataset = H5LazyDataset(path, "x")
    name = re.escape(f"chunk 3 (rows 15 to 19) of 'x' in {path!r}")
    with pytest.raises(H5CorruptError, match=name):
        list(DataLoader(dataset, batch_size=10))
    good = [range(10), range(20, 30)]
    for batch, rows in zip(DataLoader(dataset, batch_sampler=good), good, strict=True):
        assert np.array_equal(batch, values[rows])


@pytest.mark.parametrize("keys", [["images"], ["images", "other"]], ids=["one field", "two fields"])
def test_a_batch_of_one_block_is_decoded_by_all_cores(make_h5, nothing_held, monkeypatch, keys):
    """A row may take part in hundreds of chunks, as where h5py guessed them, or there may be several fields."""
    monkeypatch.setattr("lightning_h5.readers.thread_pool.usable_cores", lambda: 2)
    values = np.zeros((8, 1024, 1024), "u1")  # chunks of a megabyte
    chunks = (8, 1024, 128) if len(keys) == 1 else (8, 1024, 1024)
    path = make_h5({key: Stored(values, "chunked", chunks, {"compression": "gzip"}) for key in keys})
    dataset = H5LazyDataset(path, keys if len(keys) > 1 else keys[0])
    meet, who, real = threading.Barrier(2), set(), ChunkLoader.load

    def load(*args):
        who.add(threading.get_ident())
        if not meet.broken:
            try:
                meet.wait(HANG)  # two threads are at it at a time
            except threading.BrokenBarrierError:
                pytest.fail("one thread decodes alone")
        return real(*args)

    monkeypatch.setattr(ChunkLoader, "load", load)
    dataset.read_batch([0])
    assert len(who) == 2
