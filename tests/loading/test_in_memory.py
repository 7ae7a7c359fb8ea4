"""``InMemoryIterator``: the consumer copies rows in memory itself, until it has other things to do."""

import threading

import h5py
import numpy as np
import pytest

from lightning_h5 import LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.datasets import RawBatch
from lightning_h5.errors import H5Error
from lightning_h5.loading import prefetch
from lightning_h5.loading.prefetch import InMemoryIterator
from lightning_h5.readers import contiguous
from lightning_h5.types import BatchToken

ROWS = [np.arange(start, start + 4) for start in range(0, 40, 4)]


def new_threads(before):
    """Threads that began since then; some of an earlier test may have ended meanwhile."""
    return set(threading.enumerate()) - before


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(prefetch, "perf_counter", clock)
    return clock


class Source:
    """Gives rows' numbers; each call takes a second."""

    def __init__(self, clock, fail_at=None):
        self.clock, self.fail_at, self.asked = clock, fail_at, []

    def gather(self, rows, epoch=None):
        self.clock.now += 1
        self.asked.append(len(rows))
        if self.fail_at in rows:
            raise H5Error("cannot be read")
        return RawBatch(rows, (rows.tolist(),))


def tokens():
    for step, rows in enumerate(ROWS):
        yield BatchToken(0, step, rows)


def make(source, start_ahead, together=3):
    def finish_all(raw, some):
        return ((token.step, *part.columns[0]) for part, token in zip(raw.split([4] * len(some)), some, strict=True))

    return InMemoryIterator(source, finish_all, tokens(), together, start_ahead)


def never(left):
    raise AssertionError("nobody should read ahead")


def told_ahead(left):
    return iter([("ahead", token.step) for token in left])


BATCHES = [(step, *rows.tolist()) for step, rows in enumerate(ROWS)]


def test_a_consumer_who_comes_right_back_is_served_some_batches_at_a_time(clock):
    source = Source(clock)
    assert list(make(source, never)) == BATCHES
    assert source.asked == [12, 12, 12, 4]


def test_nobody_reads_ahead_as_long_as_the_consumer_is_away_for_less_than_reading_takes(clock):
    seen = []
    for batch in make(Source(clock), never):
        seen.append(batch)
        clock.now += 0.3  # 0.9 between readings
    assert seen == BATCHES


def test_what_is_left_is_read_ahead_once_the_consumer_was_away_longer_than_reading_took(clock):
    seen = []
    for batch in make(Source(clock), told_ahead):
        seen.append(batch)
        clock.now += 0.5
    assert seen == BATCHES[:3] + [("ahead", step) for step in range(3, 10)]


def test_what_cannot_be_read_is_told_and_ends_the_iteration(clock):
    batches = make(Source(clock, fail_at=17), never)
    assert [next(batches) for _ in range(3)] == BATCHES[:3]
    with pytest.raises(H5Error, match="cannot be read"):
        next(batches)
    assert list(batches) == []


@pytest.mark.parametrize("n_taken", [0, 1, 3])
def test_an_iteration_that_was_closed_says_so(clock, n_taken):
    batches = make(Source(clock), never)
    for _ in range(n_taken):
        next(batches)
    batches.close()
    with pytest.raises(H5Error, match="closed in the middle of an epoch"):
        next(batches)


def test_an_epoch_out_of_memory_starts_no_thread_for_a_consumer_who_is_fast(make_h5, monkeypatch):
    monkeypatch.setattr(prefetch, "perf_counter", lambda: 0.0)
    data = RankCachedH5DataModule(make_h5({"x": np.arange(64.0)}), x_key="x", batch_size=4, with_index=True)
    data.setup("fit")
    before, rows = set(threading.enumerate()), []
    for x, index in data.train_dataloader():
        assert not new_threads(before)
        assert x.tolist() == index.tolist()
        rows += index.tolist()
    assert sorted(rows) == list(range(64))
    data.teardown("fit")


def test_an_epoch_out_of_memory_is_the_same_whoever_reads_it(make_h5, monkeypatch):
    path, orders = make_h5({"x": np.arange(640.0)}), []
    monkeypatch.setattr("lightning_h5.loading.loader.MAX_TOGETHER", 2)
    for pace in (0.0, 1.0):  # of a clock that stands still, and one that goes on at each look
        looks = iter(range(10_000))
        monkeypatch.setattr(prefetch, "perf_counter", lambda pace=pace, looks=looks: pace * next(looks) ** 2)
        data = RankCachedH5DataModule(path, x_key="x", batch_size=4, with_index=True)
        data.setup("fit")
        before, order = set(threading.enumerate()), []
        for _, index in data.train_dataloader():
            n_new = len(new_threads(before))
            order.append(index.tolist())
        assert n_new == (pace > 0)
        orders.append(order)
        data.teardown("fit")
    assert orders[0] == orders[1]


@pytest.mark.parametrize("is_cached", [True, False])
def test_rows_of_a_mapped_file_are_in_memory_where_the_page_cache_has_them(
    tmp_path, nothing_held, monkeypatch, is_cached
):
    monkeypatch.setattr(prefetch, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(contiguous, "is_cached", lambda fd, place: is_cached)
    x = np.arange(4096.0).reshape(512, 8)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("x", data=x)
    data = LazyH5DataModule(tmp_path / "rows.h5", batch_size=4, with_index=True, files={"mmap": True})
    data.setup("fit")
    loader, before = data.train_dataloader(), set(threading.enumerate())
    assert loader.dataset.cost.is_in_memory == is_cached
    rows = []
    for batch, index in loader:
        assert bool(new_threads(before)) != is_cached
        assert np.array_equal(batch.numpy(), x[index.numpy()])
        rows += index.tolist()
    assert sorted(rows) == list(range(512))
    assert loader.dataset.counters.total()["bytes_read"] == x.nbytes
    data.teardown("fit")


def test_rows_of_mapped_files_that_are_put_together_are_read_ahead(tmp_path, nothing_held):
    for name in "ab":
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=np.zeros((512, 8)))
    data = LazyH5DataModule(
        [tmp_path / "a.h5", tmp_path / "b.h5"],
        batch_size=4,
        files={"mmap": True},
    )
    data.setup("fit")
    assert not data.train_dataloader().dataset.cost.is_in_memory
    data.teardown("fit")


def test_decoded_rows_that_all_fit_are_in_memory_from_the_second_epoch_on(tmp_path, nothing_held, monkeypatch):
    monkeypatch.setattr(prefetch, "perf_counter", lambda: 0.0)
    x = np.arange(4096.0).reshape(512, 8)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(16, 8), compression="gzip")
    data = LazyH5DataModule(tmp_path / "rows.h5", batch_size=4, with_index=True)
    data.setup("fit")
    loader, before = data.train_dataloader(), set(threading.enumerate())
    for epoch, n_more in ((0, True), (1, False), (2, False)):
        loader.sampler.set_epoch(epoch)
        assert loader.dataset.cost.is_in_memory == (epoch > 0)
        rows = []
        for batch, index in loader:
            assert bool(new_threads(before)) == n_more
            assert np.array_equal(batch.numpy(), x[index.numpy()])
            rows += index.tolist()
        assert sorted(rows) == list(range(512))
    data.teardown("fit")
