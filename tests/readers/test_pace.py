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
    counters.add(bytes_read=1 << 30, chunks_decoded=1000, read_seconds=0.2, decode_seconds=1.0)
    pace.look(counters)
    assert not pace.may_be_slow
    counters.add(read_seconds=0.001)  # too little to judge by
    pace.look(counters)
    assert not pace.is_slow


def test_reads_stay_slow_as_long_as_the_system_fetches_ahead(looks):
    """They only copy then, and would wait if it did not."""
    pace, counters = looks
    counters.add(bytes_read=1 << 20, chunks_decoded=10, read_seconds=1.0, decode_seconds=0.01)
    pace.look(counters)
    counters.add(bytes_read=1 << 30, chunks_decoded=1000, read_seconds=0.2, decode_seconds=1.0, fetched_bytes=1 << 30)
    pace.look(counters)
    assert pace.is_slow
    assert pace.threads(2, 64) < 6
    counters.add(bytes_read=1 << 30, chunks_decoded=1000, read_seconds=0.2, decode_seconds=1.0)
    pace.look(counters)
    assert not pace.is_slow
