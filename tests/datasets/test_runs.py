"""Orders that mix runs read each run in one piece, once an epoch, and the system fetches it before it is asked for."""

import ctypes
import errno
import mmap
import os

import numpy as np
import pytest
from arguments import nested
from factories import Stored

from lightning_h5 import LazyH5DataModule
from lightning_h5.hdf5 import find_array, layout_of, open_h5
from lightning_h5.readers import ContiguousReader, MappedReader, many_reads
from lightning_h5.readers.base import LayoutReader

ROWS, WIDTH = 2300, 4096  # bytes a row: a run of a megabyte is 256 rows
VALUES = np.random.default_rng(0).integers(0, 256, (ROWS, WIDTH), dtype="u1")

pytestmark = pytest.mark.usefixtures("nothing_held")


@pytest.fixture
def reads(monkeypatch):
    """The rows of each read of arrays without chunks, as (path, first row, row after the last)."""
    calls = []

    def read(own, rows, out=None):
        calls.append((own.layout.path, int(rows[0]), int(rows[-1]) + 1))
        assert (np.diff(rows) == 1).all(), "it is one piece"
        return LayoutReader.read(own, rows, out)

    monkeypatch.setattr(ContiguousReader, "read", read, raising=False)
    return calls


def loader_of(paths, **options):
    module = LazyH5DataModule(paths, **nested(**({"x_key": "x", "batch_size": 32, "with_index": True} | options)))
    module.setup("fit")
    return module, module.train_dataloader()


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("n_files", [1, 2])
def test_each_run_is_read_once_an_epoch_in_one_piece(make_h5, reads, mmap, n_files):
    paths = [make_h5(x=VALUES) for _ in range(n_files)]
    module, loader = loader_of(
        paths, shuffle={"mode": "chunks", "buffer": 1 << 21}, files={"mmap": mmap, "cache_bytes": 6 << 20}
    )
    for epoch in range(2):
        reads.clear()
        loader.sampler.set_epoch(epoch)
        assert sum(len(rows) for _, rows in loader) == n_files * ROWS
        runs = {(path, start, min(start + 256, ROWS)) for path in paths for start in range(0, ROWS, 256)}
        assert len(set(reads)) == len(reads)
        assert set(reads) <= runs if epoch else set(reads) == runs, "some are still in memory"
    module.teardown()


def test_windows_of_arrays_without_chunks_are_cut_out_of_runs(make_h5, reads):
    module, loader = loader_of(
        [make_h5(x=VALUES)],
        shuffle={"mode": "chunks", "buffer": 1 << 21},
        window=16,
        files={"cache_bytes": 7 << 20},
    )
    seen = []
    for x, *_, starts in loader:
        for start, rows in zip(starts.tolist(), x.numpy(), strict=True):
            assert (rows == VALUES[start : start + 16]).all()
        seen += starts.tolist()
    assert sorted(seen) == list(range(0, ROWS - 15, 16))
    assert len(reads) <= 18, "the last window of a run may be in two"
    module.teardown()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fraction", [0, 0.3])
def test_rows_are_those_of_the_file_whoever_reads(make_h5, num_workers, fraction):
    module, loader = loader_of([make_h5(x=VALUES)], shuffle="chunks", num_workers=num_workers, split=fraction)
    seen = []
    for x, rows in loader:
        own = rows if loader.dataset.indices is None else loader.dataset.indices[rows]
        assert (x.numpy() == VALUES[own]).all()
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(loader.dataset)))
    module.teardown()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
@pytest.mark.parametrize("kind", ["contiguous", "mapped", "small chunks", "large chunks"])
def test_the_system_is_told_where_the_rows_lie(make_h5, monkeypatch, kind):
    n_together = {"small chunks": 7, "large chunks": 512}.get(kind)
    stored = Stored(VALUES, "chunked", (n_together, WIDTH)) if n_together else Stored(VALUES, "contiguous")
    path = make_h5(x=stored)
    with open_h5(path) as file:
        layout = layout_of(find_array(file, "x"), path, "x")
    reader = (MappedReader if kind == "mapped" else ContiguousReader)(layout)
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, place, n_bytes, advice: told.append((place, n_bytes, advice)))
    monkeypatch.setattr(many_reads, "is_cached", lambda fd, place: False)
    monkeypatch.setattr(many_reads, "_compiled", [None])
    for rows in (range(0), range(10, 60), range(500, 550), range(512, 768), range(ROWS - 1, ROWS)):
        told.clear()
        reader.will_need(rows)
        with open(path, "rb") as file:
            content = file.read()
        found = b"".join(content[place : place + n_bytes] for place, n_bytes, _ in told)
        assert found == VALUES[rows.start : rows.stop].tobytes()
        assert {advice for *_, advice in told} <= {os.POSIX_FADV_WILLNEED}
        assert bool(told) == bool(rows)


@pytest.mark.parametrize("answer", ["it is there", "unknown"])
def test_what_the_system_has_is_not_asked_for_again(make_h5, monkeypatch, answer):
    """Nor what it may have: such a file system may drop advice, and is read by many threads."""
    path = make_h5(x=VALUES)
    with open_h5(path) as file:
        layout = layout_of(find_array(file, "x"), path, "x")

    def preadv(fd, memory, place, flags):
        if answer == "unknown":
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return 1

    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: told.append(args), raising=False)
    monkeypatch.setattr(os, "preadv", preadv)
    ContiguousReader(layout).will_need(range(256))
    assert told == []


@pytest.mark.parametrize("trouble", ["a file system that takes no advice", "a file that is gone"])
def test_advice_that_cannot_be_given_stops_nobody(make_h5, monkeypatch, trouble):
    path = make_h5(x=VALUES)
    with open_h5(path) as file:
        layout = layout_of(find_array(file, "x"), path, "x")
    reader = ContiguousReader(layout)
    if trouble.endswith("gone"):
        os.unlink(path)
    else:
        monkeypatch.setattr(many_reads, "is_cached", lambda fd, place: False)
        monkeypatch.setattr(many_reads, "_compiled", [None])

        def refuse(*args):
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    reader.will_need(range(256))


def cached_share(path):
    """How much of a file the page cache has. Asked without a read, which would have the kernel read ahead."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content = np.frombuffer(mapped, np.uint8)
        is_there = np.empty(-(-len(content) // mmap.PAGESIZE), np.uint8)
        arguments = [ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(len(content))]
        assert ctypes.CDLL(None).mincore(*arguments, ctypes.c_void_p(is_there.ctypes.data)) == 0
        del content  # the mapping cannot be closed before
    return (is_there & 1).mean()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
@pytest.mark.parametrize("filters", [{}, {"compression": "gzip"}])
@pytest.mark.parametrize("exceeds_memory", [False, True])
def test_pages_are_given_back_if_the_rows_exceed_memory(make_h5, monkeypatch, filters, exceeds_memory):
    memory = 1 if exceeds_memory else 1 << 40
    monkeypatch.setattr("lightning_h5.datamodules.base.page_cache_memory", lambda: memory)
    path = make_h5(x=Stored(VALUES, "chunked", (64, WIDTH), filters) if filters else Stored(VALUES))
    with open(path, "rb+") as file:
        os.fsync(file.fileno())  # pages that are not written yet stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share(path) > 0:
        pytest.skip("this file system keeps pages")
    module, loader = loader_of([path], shuffle={"buffer": "1 MiB"}, files={"cache_bytes": 6 << 20})
    assert sum(len(rows) for _, rows in loader) == ROWS
    share = cached_share(path)
    assert share < 0.3 if exceeds_memory else share > 0.9
    module.teardown()
