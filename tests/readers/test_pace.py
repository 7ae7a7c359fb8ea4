"""How many threads read follows from what reads wait for."""

import pytest

from lightning_h5.counters import Counters
from lightning_h5.readers import pace as pace_module
from lightning_h5.readers.pace import ReadPace


@pytest.fixture
def looks(monkeypatch):
    """Returns a pace that looks each time, and its counters."""
    monkeypatch.setattr(pace_module, "INTERVAL", 0.0)
    return ReadPace(), Counters()


def look_often(pace, counters, **reads):
    """Looks for a second, each time after the same reads."""
    for _ in range(50):
        counters.add(**reads)
        pace.look(counters)


def test_reads_that_only_copy_take_the_cores(looks):
    pace, counters = looks
    counters.add(bytes_read=1 << 30, chunks_decoded=1 << 14, read_seconds=0.3, decode_seconds=2.0)
    pace.look(counters)
    assert not pace.is_slow
    assert pace.threads(2, 64) == 2


def test_reads_that_wait_take_as_many_threads_as_keep_the_cores_busy(looks):
    pace, counters = looks
    counters.add(bytes_read=100 << 20, chunks_decoded=1000, read_seconds=10.0, decode_seconds=1.0)
    pace.look(counters)
    assert pace.is_slow
    assert 32 <= pace.threads(2, 64) <= 44  # ten seconds of each eleven are waited, and some wait for others
    assert pace.threads(2, 8) == 8
    assert pace.threads(16, 8) == 16


def test_the_pace_follows_the_last_reads(looks):
    pace, counters = looks
    assert pace.may_be_slow, "nothing may be cached"
    assert not pace.is_slow
    assert pace.threads(4, 64) == 4
    counters.add(bytes_read=1 << 20, chunks_decoded=10, read_seconds=1.0, decode_seconds=0.01)
    pace.look(counters)
    assert pace.threads(4, 64) == 64
    look_often(pace, counters, bytes_read=1 << 30, chunks_decoded=1000, read_seconds=0.2, decode_seconds=1.0)
    assert not pace.may_be_slow
    counters.add(read_seconds=0.001)  # too little to judge by
    pace.look(counters)
    assert not pace.is_slow


def test_reads_stay_slow_as_long_as_the_system_fetches_ahead(looks):
    """They only copy then, and would wait if it did not."""
    pace, counters = looks
    counters.add(bytes_read=1 << 20, chunks_decoded=10, read_seconds=1.0, decode_seconds=0.01)
    pace.look(counters)
    fast = {"bytes_read": 1 << 30, "chunks_decoded": 1000, "read_seconds": 0.2, "decode_seconds": 1.0}
    look_often(pace, counters, **fast, fetched_bytes=1 << 30)
    assert pace.is_slow
    assert pace.threads(2, 64) < 6
    look_often(pace, counters, **fast)
    assert not pace.is_slow


def test_a_fast_look_between_slow_ones_changes_little(looks):
    pace, counters = looks
    counters.add(bytes_read=1 << 20, chunks_decoded=10, read_seconds=1.0, decode_seconds=0.05)
    pace.look(counters)
    n_threads = pace.threads(2, 1000)
    counters.add(bytes_read=1 << 30, chunks_decoded=1000, read_seconds=0.2, decode_seconds=1.0)
    pace.look(counters)
    assert pace.threads(2, 1000) >= 0.8 * n_threads
