"""Many rows at once: any rows in ascending order as h5py gives them, each chunk decoded once, no thread left behind."""

import os
import sys
import threading
import time
from functools import partial

import h5py
import numpy as np
import pytest
from factories import Stored, assert_same_rows, edit, random_values, rows_by_h5py
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import OPTIONS, can_be_pooled, look, n_decoded
from reader_conformance import FULL_SHAPES, arrays
from tiers import examples

from lightning_h5.counters import Counters
from lightning_h5.errors import H5CorruptError
from lightning_h5.hdf5 import process_pool
from lightning_h5.readers import BulkTask, ChunkLoader, bulk, bulk_tasks, do_tasks, open_source

WIDE = np.dtype("c16")  # holds any number
SHAPES = st.tuples(st.integers(0, 23), st.lists(st.sampled_from([1, 2, 3, 5, 7]), max_size=2))


class Memory:
    """A target that takes rows as they are, or one that has to be given them."""

    def __init__(self, n_rows, layout, *, casts):
        dtype = WIDE if casts else layout.dtype
        self.rows = random_values(dtype, (n_rows, *layout.row_shape), seed=7)
        self.before = self.rows.copy()
        self.array = None if casts else self.rows

    def put(self, start, rows):
        with np.errstate(all="ignore"):
            np.copyto(self.rows[start : start + len(rows)], rows, casting="unsafe")


def read(layout, rows, target, first=0, *, n_cores=3, counters=None):
    """Reads rows; the source they came from, and the tasks that did it."""
    source = open_source(layout, OPTIONS, 3, counters or Counters())
    tasks = bulk_tasks(source, layout, rows, target, first)
    do_tasks(tasks, n_cores, lambda n_bytes: None)
    return source, tasks


def loading_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_h5-load")]


@st.composite
def ascending(draw, n_rows):
    if not n_rows or draw(st.integers(0, 9)) == 0:
        return range(0)
    if draw(st.booleans()):
        start = draw(st.integers(0, n_rows - 1))
        return range(start, draw(st.integers(start + 1, n_rows)), draw(st.sampled_from([1, 1, 2, 3, 7])))
    return np.array(sorted(draw(st.sets(st.integers(0, n_rows - 1), min_size=1))), dtype=np.int64)


def check(make_h5, monkeypatch, data, stored, file):
    path = make_h5(x=stored, **file)
    layout = look(path)
    rows = data.draw(ascending(len(stored.values)))
    # Bytes of a task, and of scratch memory: a block a task, or all of them; read at once, or chunk by chunk.
    monkeypatch.setattr(bulk, "TASK_BYTES", data.draw(st.sampled_from([1, 100, 1 << 20])))
    monkeypatch.setattr(bulk, "MAX_SCRATCH", data.draw(st.sampled_from([0, 100, 64 << 20])))
    first, casts, counters = data.draw(st.integers(0, 3)), data.draw(st.booleans()), Counters()
    target = Memory(first + len(rows) + 2, layout, casts=casts)
    source, tasks = read(layout, rows, target, first, counters=counters)
    expected = rows_by_h5py(path, "x", rows)
    with np.errstate(all="ignore"):
        assert_same_rows(target.rows[first : first + len(rows)], expected.astype(WIDE) if casts else expected)
    for around in (slice(first), slice(first + len(rows), None)):
        assert_same_rows(target.rows[around], target.before[around])
    assert sum(task.n_bytes for task in tasks) == expected.nbytes
    if isinstance(source, ChunkLoader):
        blocks = np.unique(np.asarray(rows, dtype=np.int64) // layout.chunks[0])
        is_there = layout.table.offsets.reshape(-1, layout.table.per_row)[blocks] >= 0
        assert n_decoded(counters) == np.count_nonzero(is_there)
    process_pool().close()
    os.unlink(path)


@pytest.mark.wide
@given(data=st.data(), drawn=arrays(["contiguous", "contiguous", "compact", "virtual", "chunked"], SHAPES))
@settings(max_examples=examples(80))
def test_any_rows_of_any_numbers_are_those_of_h5py(make_h5, monkeypatch, data, drawn):
    check(make_h5, monkeypatch, data, *drawn)


@pytest.mark.wide
@given(data=st.data(), drawn=arrays(["chunked"], FULL_SHAPES))
@settings(max_examples=examples(120))
def test_any_rows_of_any_chunks_are_those_of_h5py_and_each_chunk_is_decoded_once(make_h5, monkeypatch, data, drawn):
    check(make_h5, monkeypatch, data, *drawn)


@pytest.mark.parametrize("rows", [range(50), range(3, 50, 4), np.array([0, 7, 8, 31, 49])], ids=str)
@pytest.mark.parametrize("options", [None, {"compression": "gzip", "shuffle": True}], ids=["contiguous", "gzip"])
def test_members_of_a_table_are_those_of_h5py(make_h5, options, rows):
    table = np.zeros(50, [("age", ">f4"), ("pair", "i2", (2,))])
    table["age"], table["pair"] = random_values("f4", (50,)), random_values("i2", (50, 2))
    stored = Stored(table) if options is None else Stored(table, "chunked", (8,), options)
    path = make_h5(table=stored)
    for member in table.dtype.names:
        layout = look(path, f"table/{member}")
        assert can_be_pooled(layout)
        target = Memory(len(rows), layout, casts=False)
        read(layout, rows, target)
        assert_same_rows(target.rows, rows_by_h5py(path, "table", rows, (member,)))


def test_a_chunk_that_does_not_decode_is_named_to_the_caller_and_ends_all_threads(make_h5, monkeypatch):
    monkeypatch.setattr(bulk, "TASK_BYTES", 1)
    path = make_h5(x=Stored(np.ones((400, 50)), "chunked", (5, 50), {"fletcher32": True}))
    with h5py.File(path) as file:
        edit(path, file["x"].id.get_chunk_info(3).byte_offset)
    layout = look(path)
    for n_cores in (1, 3):
        target = Memory(400, layout, casts=False)
        with pytest.raises(H5CorruptError, match=rf"chunk 3 \(rows 15 to 19\) of 'x' in '{path}'"):
            read(layout, range(400), target, n_cores=n_cores)
        assert loading_threads() == []
    target = Memory(15, layout, casts=False)
    read(layout, range(15), target)
    assert (target.rows == 1).all()


def test_an_interrupt_of_the_caller_ends_all_threads_before_their_work_is_done():
    n_done = []

    def interrupt(n_bytes):
        raise KeyboardInterrupt

    tasks = [BulkTask(1, 1, lambda: n_done.append(time.sleep(0.01))) for _ in range(1000)]
    with pytest.raises(KeyboardInterrupt):
        do_tasks(tasks, 3, interrupt)
    assert loading_threads() == []
    assert 0 < len(n_done) < 500


def test_after_a_failure_no_further_task_is_begun():
    begun = []

    def run(number):
        begun.append(number)
        if number == 2:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        do_tasks([BulkTask(1, 1, partial(run, i)) for i in range(9)], 1, lambda n_bytes: None)
    assert begun == [0, 1, 2]


def test_large_tasks_are_not_done_all_at_a_time():
    """Or memory for what is stored and decoded would be a multiple of what was promised."""
    at_once, most, lock = 0, 0, threading.Lock()

    def run():
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.005)
        with lock:
            at_once -= 1

    do_tasks([BulkTask(1, bulk.MAX_AT_A_TIME // 2, run) for _ in range(20)], 8, lambda n_bytes: None)
    assert most == 2


def test_every_byte_is_told_once(monkeypatch):
    """However threads take turns; the caller's bar would else run over its end."""
    monkeypatch.setattr(bulk, "POLL_SECONDS", 0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            told = []
            do_tasks([BulkTask(1, 1, lambda: None) for _ in range(500)], 3, told.append)
            assert sum(told) == 500
    finally:
        sys.setswitchinterval(interval)


def test_no_tasks_are_done_at_once():
    do_tasks([], 4, lambda n_bytes: None)
