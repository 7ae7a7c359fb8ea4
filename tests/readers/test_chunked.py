"""One reader over several files that lie differently, with room for few blocks or many: always what h5py gives."""

import os
import warnings
from functools import partial

import numpy as np
import pytest
from factories import Stored, assert_same_rows, in_threads, random_values, rows_by_h5py
from guards import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import (
    EVERYTHING,
    OPTIONS,
    TASK_BYTES,
    block_bytes,
    load_at_a_time,
    look,
    n_decoded,
    open_pool,
    rows_per_block,
)
from reader_conformance import chunked as chunked_layout
from tiers import examples

from lightning_h5.counters import Counters
from lightning_h5.hdf5 import process_pool
from lightning_h5.readers import LARGE_TEAM, TaskQueue, chunked, open_chunked

DTYPES = [("i4", ">i4"), ("f8", ">f8"), ("u1", "u1"), ("f2", ">f2"), ("c8", ">c8"), ("?", "?"), ("i8", ">i8")]
AXES = [(), (3,), (5, 2), (1,), (2, 1, 3)]
TASKS = st.sampled_from([1, 100, TASK_BYTES])  # bytes: a chunk a task, or some, or all of them
POOLS = st.sampled_from([0, 1, 2, 3, 7, EVERYTHING])


@st.composite
def several_files(draw):
    """Arrays of one row shape and dtype (in either byte order), each in a file and a storage of its own."""
    dtypes, axes = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(AXES))
    files = []
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(dtypes))
        values = random_values(dtype, (draw(st.integers(0, 14)), *axes), seed=number)
        storage = draw(st.sampled_from(["contiguous", "compact", "virtual", *["chunked"] * 6]))
        if storage == "virtual" and not len(values):
            storage = "contiguous"
        files.append(
            draw(chunked_layout(values, dtype)) if storage == "chunked" else Stored(values, storage, dtype=dtype)
        )
    return files


def write(make_h5, files):
    """The layouts of the files, and all rows as h5py reads them."""
    paths = [make_h5(x=stored) for stored in files]
    rows = [rows_by_h5py(path, "x", range(len(stored.values))) for path, stored in zip(paths, files, strict=True)]
    return [look(path) for path in paths], np.concatenate(rows)


def forget(layouts):
    process_pool().close()
    for layout in layouts:
        os.unlink(layout.path)


def some_rows(n_rows, most=40):
    return st.lists(st.integers(0, n_rows - 1), max_size=most) if n_rows else st.just([])


@pytest.fixture
def task_bytes(monkeypatch):
    """Sets how much is decoded in one go."""
    return partial(load_at_a_time, monkeypatch)


@pytest.mark.wide
@given(
    data=st.data(),
    n_bytes=TASKS,
    n_blocks=POOLS,
    retain=st.sampled_from([None, True, False]),
    n_team=st.sampled_from([0, 2, LARGE_TEAM]),
)
@settings(max_examples=examples(120))
def test_whatever_is_asked_before_each_answer_is_right(make_h5, task_bytes, data, n_bytes, n_blocks, retain, n_team):
    """Any reads, ahead of time or not, planned or not, with the memory given back between them."""
    task_bytes(n_bytes)
    layouts, values = write(make_h5, data.draw(several_files()))
    work = TaskQueue()
    reader = open_pool(*layouts, n_blocks=n_blocks, work=work, retain=retain)
    assert (len(reader), reader.row_shape, reader.dtype) == (len(values), values.shape[1:], values.dtype)
    steps = st.tuples(
        st.sampled_from(["read", "read", "into", "begin", "prefetch", "close"]),
        some_rows(len(values)),
        st.sampled_from([None, None, 0, 1]),
    )
    drawn = data.draw(st.lists(steps, max_size=12))  # before threads are started: drawing may break the example off
    team = work.start_team(n_team)
    for what, rows, epoch in drawn:
        rows = np.array(rows, dtype=np.int64)
        if what == "read":
            assert_same_rows(reader.read(rows, epoch=epoch), values[rows])
        elif what == "into":
            out = random_values(values.dtype, (len(rows), *values.shape[1:]), seed=5)
            assert reader.read(rows, out, epoch) is out
            assert_same_rows(out, values[rows])
        elif what == "begin":
            out = np.empty((len(rows), *values.shape[1:]), values.dtype)
            reader.begin(reader.map.boxes(rows), out, epoch).cancel()  # what was begun may be given up
            begun = reader.begin(reader.map.boxes(rows), out, epoch)
            reader.prefetch(reader.map.boxes(rows[::2]))
            begun.finish()
            assert_same_rows(out, values[rows])
        elif what == "prefetch":
            assert reader.prefetch(reader.map.boxes(rows)) in (True, False)
        else:
            reader.close()
    work.end_team(len(team))
    for thread in team:
        thread.join(HANG)
        assert not thread.is_alive()
    everything = np.arange(len(values))
    assert_same_rows(reader.read(everything), values)  # also where tasks were left undone
    forget(layouts)


@given(data=st.data(), n_bytes=TASKS, n_blocks=POOLS, retain=st.sampled_from([None, True, False]), subset=st.booleans())
@settings(max_examples=examples(60))
def test_planned_epochs_are_right_in_any_order_and_interleaved(
    make_h5, task_bytes, data, n_bytes, n_blocks, retain, subset
):
    task_bytes(n_bytes)
    layouts, values = write(make_h5, data.draw(several_files()))
    mine = np.array(data.draw(some_rows(len(values))) if subset else range(len(values)), dtype=np.int64)
    reader = open_pool(*layouts, n_blocks=n_blocks, retain=retain, rows=mine if subset else None)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    size = data.draw(st.integers(1, 9))
    epochs = []
    for epoch in range(3):
        order = mine[random.permutation(len(mine))]
        epochs.append([(epoch, order[at : at + size]) for at in range(0, len(order), size)])
    if data.draw(st.booleans()):  # a validation pass in the middle, or workers that are an epoch apart
        batches = [batch for pair in zip(*epochs, strict=True) for batch in pair]
    else:
        batches = [*epochs[0], *epochs[1], *epochs[2]]
    ahead = data.draw(st.integers(0, 3))
    for at, (epoch, rows) in enumerate(batches):
        for _, later in batches[at : at + ahead]:
            reader.prefetch(reader.map.boxes(later))
        assert_same_rows(reader.read(rows, epoch=epoch), values[rows])
    forget(layouts)


def test_an_epoch_that_was_left_early_leaves_all_slots_to_the_next_one(make_h5):
    values = np.arange(80).reshape(40, 2)
    layout = look(make_h5(x=Stored(values, "chunked", (4, 2), {"compression": "gzip"})))
    reader = open_pool(layout, n_blocks=5, retain=False)
    assert reader.prefetch(reader.map.boxes(np.arange(0, 20, 4)))
    assert_same_rows(reader.read(np.arange(0, 20, 4), epoch=0), values[:20:4])  # each block has more rows to read
    assert not reader.prefetch(reader.map.boxes(np.array([20])), epoch=0)
    assert not reader.prefetch(reader.map.boxes(np.array([20, 24])), epoch=1)  # epoch 0 may be about to end
    assert_same_rows(reader.read(np.array([0]), epoch=1), values[:1])
    assert reader.prefetch(reader.map.boxes(np.array([0, *range(20, 36, 4)])), epoch=1)


def test_the_last_batches_of_an_epoch_that_is_left_early_free_their_slots(make_h5):
    """They are under way while the next epoch begins."""
    values = np.arange(80).reshape(40, 2)
    layout = look(make_h5(x=Stored(values, "chunked", (4, 2), {"compression": "gzip"})))
    reader = open_pool(layout, n_blocks=3, retain=False)
    rows = [np.array([0, 4]), np.array([20])]
    out = [np.empty((len(of_batch), 2), dtype=np.int64) for of_batch in rows]
    last = reader.begin(reader.map.boxes(rows[0]), out[0], 0)
    first = reader.begin(reader.map.boxes(rows[1]), out[1], 1)
    last.finish()
    assert reader.prefetch(reader.map.boxes(np.array([24, 28])), epoch=1)
    first.finish()
    for of_batch, read in zip(rows, out, strict=True):
        assert_same_rows(read, values[of_batch])


CASTS = {
    "?": ["u1", "i8", "f4"],
    "u1": ["f4", "f8", "i4", "i2"],
    "i4": ["f8", "f4", "i8", "i2"],
    "f4": ["f8", "f2"],
    "c8": ["c16"],
    ">i2": ["i2", "f4", "u2"],
}


@pytest.mark.parametrize(("stored", "wanted"), [(a, b) for a, those in CASTS.items() for b in those])
@pytest.mark.parametrize("n_blocks", [0, 1, EVERYTHING])
def test_rows_are_read_into_memory_of_another_dtype_as_astype_casts(make_h5, stored, wanted, n_blocks):
    values = random_values(stored, (30, 4))
    if values.dtype.kind in "fc":
        values = np.random.default_rng(0).normal(size=values.shape).astype(stored)
    path = make_h5(x=Stored(values, "chunked", (7, 3), {"compression": "gzip"}))
    reader = open_pool(look(path), n_blocks=n_blocks)
    rows = np.array([29, 0, 3, 3, 14])
    for out in (np.empty((5, 4), wanted), np.empty((5, 8), wanted)[:, ::2]):
        assert reader.read(rows, out) is out
        assert_same_rows(np.ascontiguousarray(out), values[rows].astype(wanted))


@pytest.mark.parametrize("n_blocks", [0, 1, EVERYTHING])
def test_reading_no_rows_holds_nothing(make_h5, n_blocks):
    values = np.arange(40).reshape(20, 2)
    reader = open_pool(look(make_h5(x=Stored(values, "chunked", (6, 2), {"compression": "gzip"}))), n_blocks=n_blocks)

    def check():
        for rows in ([], [0], [], [], [19], [7], [0, 19], []):
            rows = np.array(rows, dtype=np.int64)
            assert_same_rows(reader.read(rows, epoch=0), values[rows])
            assert reader.prefetch(reader.map.boxes(np.array([], dtype=np.int64)))

    in_threads(check)


@pytest.fixture
def large(make_h5):
    """Three files of unlike layout with 15 to 40 blocks each, and their rows."""
    values = random_values("i4", (600, 4, 6), seed=1)
    files = [
        Stored(values[:240], "chunked", (6, 4, 6), filters=("shuffle", "gzip", "fletcher32")),
        Stored(values[240:300]),
        Stored(values[300:], "chunked", (20, 3, 4), filters=("lzf",)),
    ]
    layouts, found = write(make_h5, files)
    assert_same_rows(found, values)
    return layouts, values


def check_some(reader, values, seed, *, prefetches=False, epoch=None):
    random = np.random.default_rng(seed)
    for _ in range(4):
        rows = random.integers(0, len(values), random.integers(0, 60))
        if prefetches and random.integers(0, 2):
            reader.prefetch(reader.map.boxes(random.integers(0, len(values), 20)))
        found = reader.read(rows, epoch=epoch)
        assert np.array_equal(found, values[rows])


@pytest.mark.wide
@pytest.mark.parametrize(("n_team", "retain", "n_bytes"), [(0, None, 100), (2, False, 100), (0, False, 2000)])
@pytest.mark.parametrize("n_blocks", [0, 1, 2, 9, EVERYTHING])
def test_eight_threads_read_from_one_reader_at_a_time(large, task_bytes, n_blocks, retain, n_team, n_bytes):
    task_bytes(n_bytes)
    layouts, values = large
    work = TaskQueue()
    reader = open_pool(*layouts, n_blocks=n_blocks, work=work, retain=retain)
    team = work.start_team(n_team)
    epochs = [None, 0, 0, 1, None, 0, 1, 1]
    in_threads(
        *(
            partial(check_some, reader, values, seed, prefetches=seed % 2 == 1, epoch=epoch)
            for seed, epoch in enumerate(epochs)
        )
    )
    work.end_team(n_team)
    for thread in team:
        thread.join(HANG)
        assert not thread.is_alive()
    assert np.array_equal(reader.read(np.arange(len(values))), values)


@pytest.mark.parametrize("n_blocks", [1, 3, EVERYTHING])
def test_memory_may_be_given_back_while_other_threads_read(large, n_blocks):
    layouts, values = large
    reader = open_pool(*layouts, n_blocks=n_blocks)

    def close():
        for _ in range(60):
            reader.close()

    in_threads(*(partial(check_some, reader, values, seed, epoch=0) for seed in range(3)), close)


@pytest.mark.parametrize("n_blocks", [0, 1, EVERYTHING])
def test_numbers_too_large_for_a_dtype_become_infinite_and_nobody_is_warned(make_h5, n_blocks):
    """As torch has it; of a warning, users would hear in whatever thread reads ahead."""
    values = np.full((20, 3), 1e6)
    path = make_h5(x=Stored(values, "chunked", (4, 3), {"compression": "gzip"}))
    reader = open_pool(look(path), n_blocks=n_blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isposinf(reader.read(np.array([0, 19]), np.empty((2, 3), "f2"))).all()


@given(data=st.data(), n_bytes=st.integers(0, 4000))
@settings(max_examples=examples(40))
def test_the_memory_of_a_pool_is_within_its_budget(make_h5, data, n_bytes):
    layouts, values = write(make_h5, data.draw(several_files()))
    made = []
    real = chunked.ChunkCache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "ChunkCache", lambda *args: made.append(real(*args)) or made[-1])
        runs = [data.draw(st.integers(1, 9)) for _ in layouts]
        reader = open_chunked(
            layouts, OPTIONS, rows_per_run=runs, n_bytes=n_bytes, work=TaskQueue(), counters=Counters()
        )
        for _ in range(2):
            assert_same_rows(reader.read(np.arange(len(values))), values)
    assert sum(pool.rows.nbytes for pool in made) <= n_bytes
    if n_bytes >= reader.rows_per_block * values[:1].nbytes and len(values):
        assert len(made) == 1
    forget(layouts)


def test_a_pool_takes_no_more_memory_than_there_are_blocks(large):
    layouts, _ = large
    assert block_bytes(layouts) == rows_per_block(layouts) * 4 * 6 * 4
    counters = Counters()
    reader = open_pool(*layouts, counters=counters)
    reader.read(np.arange(600))
    n_blocks = 240 // 6 + 60 // 3 + 300 // 20
    assert reader._cache.rows.nbytes == n_blocks * block_bytes(layouts)
    assert n_decoded(counters) == 40 + 15 * 4
    assert counters.total()["blocks_loaded"] == n_blocks
