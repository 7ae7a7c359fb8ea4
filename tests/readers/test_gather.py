"""``take_rows`` and ``FasterWay``: the values are NumPy's whichever way copies; mostly the faster one is used."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.readers import base as gather
from lightning_h5.readers.base import TRIAL_SHARE, TRIAL_USES, FasterWay, take_rows


@pytest.fixture(params=[0, 1], ids=["one thread", "torch's threads"])
def way(request, monkeypatch):
    class Fixed(FasterWay):
        def next(self):
            return request.param

    monkeypatch.setattr(gather, "_ways", Fixed())


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8", "c8", "c16"])
@pytest.mark.parametrize("row_shape", [(), (3,), (64, 3)], ids=str)
@pytest.mark.parametrize("all_cores", [False, True])
def test_both_ways_copy_what_numpy_copies(way, monkeypatch, dtype, row_shape, all_cores):
    monkeypatch.setattr(gather, "MIN_SHARED_BYTES", 1)
    rng = np.random.default_rng(0)
    source = rng.integers(0, 100, (50, *row_shape)).astype(dtype)
    for places in (rng.integers(0, 50, 200), np.arange(50)[::-1].copy(), np.empty(0, np.int64)):
        out = np.empty((len(places), *row_shape), dtype)
        assert take_rows(source, places, out, all_cores=all_cores) is out
        assert np.array_equal(out, source[places])


def test_small_copies_and_threads_of_this_package_start_no_threads_of_torch(monkeypatch):
    monkeypatch.setattr(torch, "index_select", None)
    source = np.random.default_rng(0).random((64, 1024))
    for n_rows, all_cores in ((8, True), (64, False)):
        places = np.arange(n_rows)
        out = take_rows(source, places, np.empty((n_rows, 1024)), all_cores=all_cores)
        assert np.array_equal(out, source[places])


def copied(ways, seconds_of, n_copies):
    """Seconds spent on each way, if way 0 and 1 take so many seconds a copy."""
    spent, used = [0.0, 0.0], []
    for _ in range(n_copies):
        way = ways.next()
        seconds = next(seconds_of[way])
        ways.note(way, 1 << 20, seconds)
        spent[way] += seconds
        used.append(way)
    return spent, used


@given(
    seconds=st.tuples(st.floats(1e-4, 1e-1), st.floats(1e-4, 1e-1)).filter(lambda s: max(s) > 1.01 * min(s)),
    n_copies=st.integers(2, 5000),
)
def test_the_slower_way_takes_a_small_share_of_the_time(seconds, n_copies):
    spent, _ = copied(FasterWay(), [itertools.repeat(each) for each in seconds], n_copies)
    slower = int(seconds[1] > seconds[0])
    assert spent[slower] <= 2 * TRIAL_USES * seconds[slower] + spent[1 - slower] / TRIAL_SHARE


def test_the_time_to_wake_threads_does_not_count():
    """Threads that take long in the first copy are used again once the machine is idle, since further ones are fast."""
    ways, used, n_in_turn = FasterWay(), [], 0
    for seconds in [3.0] * 200 + [0.5] * 2000:
        way = ways.next()
        n_in_turn = n_in_turn + 1 if way else 0
        ways.note(way, 1 << 20, 5.0 if n_in_turn == 1 else seconds if way else 1.0)
        used.append(way)
    assert np.mean(used[:200]) < 0.1
    assert np.mean(used[-1000:]) > 0.8


@given(factor=st.floats(1.5, 50), n_before=st.integers(2, 2000))
def test_the_choice_follows_a_machine_that_becomes_busy_and_idle_again(factor, n_before):
    """Torch's threads take half of the time on idle cores, and ``factor`` times as long as one thread on busy ones."""
    ways = FasterWay()
    for slow in (0.5, factor, 0.5):
        n_until_seen = int(TRIAL_SHARE * TRIAL_USES * 2 * factor) + 50
        copied(ways, [itertools.repeat(1.0), itertools.repeat(slow)], n_before + n_until_seen)
        _, used = copied(ways, [itertools.repeat(1.0), itertools.repeat(slow)], 100)
        assert np.mean(np.array(used) == (slow < 1)) > 0.8
