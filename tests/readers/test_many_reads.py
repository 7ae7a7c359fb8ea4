"""Many pieces read together are what one call a piece gives, in every way that they can be read."""

import os
import threading
import time

import numpy as np
import pytest
from factories import run_forked
from guards import HANG
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import jit
from lightning_h5.readers import many_reads
from lightning_h5.readers.many_reads import read_pieces
from lightning_h5.threads import HelperThreads

CONTENT = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)


@pytest.fixture(scope="module")
def fd(tmp_path_factory):
    path = tmp_path_factory.mktemp("pieces") / "content"
    path.write_bytes(CONTENT.tobytes())
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """What was seen of file systems before is forgotten."""
    monkeypatch.setattr(many_reads, "_slow_devices", {})
    monkeypatch.setattr(many_reads, "_without_nowait", set())


def plain(patch):
    patch.setattr(many_reads, "_compiled", [None])


def compiled(patch):
    patch.setattr(many_reads, "_compiled", [])
    many_reads.compile_reads()
    if many_reads._compiled[0] is None:
        pytest.skip("there is no compiler")


def by_team(patch):
    patch.setattr(many_reads, "SLOW", 0)
    patch.setattr(many_reads._PlainPieces, "read_cached", nothing_cached)
    patch.setattr(many_reads._CompiledPieces, "read_cached", nothing_cached)


def nothing_cached(pieces):
    return 0, np.arange(len(pieces._offsets)), False


def without_nowait(patch):
    patch.setattr(many_reads, "_has_nowait", lambda fd: False)
    patch.setattr(many_reads, "_NOWAIT", 1 << 30)  # no such flag
    patch.setattr(many_reads, "_without_nowait", set())


WAYS = {
    "plain": [plain],
    "compiled": [compiled],
    "plain, by a team": [plain, by_team],
    "compiled, by a team": [compiled, by_team],
    "plain, without a flag": [plain, without_nowait],
    "plain, without a flag, by a team": [plain, without_nowait, by_team],
}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    for change in WAYS[request.param]:
        change(monkeypatch)
    return request.param


def read(fd, offsets, sizes):
    stops = np.cumsum(np.asarray(sizes, dtype=np.int64))
    out = np.zeros(int(stops[-1]) if len(stops) else 0, dtype=np.uint8)
    return out, read_pieces(fd, out, stops - sizes, stops, np.asarray(offsets, dtype=np.int64))


pieces = st.lists(st.tuples(st.integers(0, 4900), st.integers(1, 100)), max_size=600)


@given(pieces=pieces)
def test_any_pieces_in_any_order_are_read_where_they_belong(fd, way, pieces):
    offsets, sizes = zip(*pieces, strict=True) if pieces else ((), ())
    out, n_bytes = read(fd, offsets, sizes)
    assert n_bytes == sum(sizes)
    assert out.tobytes() == b"".join(CONTENT[at : at + n].tobytes() for at, n in pieces)


def test_a_piece_beyond_the_end_is_counted_as_far_as_it_goes(fd, way):
    out, n_bytes = read(fd, [10, 4990, 5000], [20, 20, 20])
    assert n_bytes == 30
    assert out[:30].tobytes() == CONTENT[10:30].tobytes() + CONTENT[4990:].tobytes()


def test_pieces_that_cannot_be_read_raise_or_are_missing_from_the_sum(way):
    folder = os.open("/", os.O_RDONLY)
    try:
        n_bytes = read(folder, range(100), [4] * 100)[1]
    except IsADirectoryError:
        n_bytes = 0
    finally:
        os.close(folder)
    assert n_bytes == 0


def test_a_forked_child_reads_with_a_team_of_its_own(fd, way):
    def child():
        out, n_bytes = read(fd, range(200), [9] * 200)
        assert n_bytes == 1800
        assert out[-9:].tobytes() == CONTENT[199:208].tobytes()

    child()
    assert run_forked(child) == 0
    child()


def test_threads_read_at_the_same_time(fd, way):
    wrong = []

    def many(seed):
        random = np.random.default_rng(seed)
        for _ in range(50):
            offsets = random.integers(0, 4900, 64)
            out, n_bytes = read(fd, offsets, [50] * 64)
            expected = np.stack([CONTENT[at : at + 50] for at in offsets])
            if n_bytes != 3200 or not np.array_equal(out.reshape(64, 50), expected):
                wrong.append(seed)

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class SlowPieces:
    """Pieces of which each takes a while, and a count of those that are read at the same time.

    Reads take until ``enough`` have been under way at the same time, or some seconds.
    """

    def __init__(self, enough=0):
        self.now = self.most = 0
        self.enough, self.lock = enough, threading.Lock()

    def read_cached(self):
        return 0, np.arange(2000), False

    def wait(self, which):
        for _ in which:
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            deadline = time.monotonic() + HANG
            time.sleep(0.001)
            while self.now > 8 and self.most < self.enough and time.monotonic() < deadline:
                time.sleep(0.001)
            with self.lock:
                self.now -= 1
        return len(which)


def test_slow_reads_are_many_at_a_time_and_their_threads_end(fd, monkeypatch):
    slow = SlowPieces(enough=32)
    monkeypatch.setattr(many_reads, "SLOW", 0)
    monkeypatch.setattr(many_reads, "_compiled", [None])
    monkeypatch.setattr(many_reads, "_PlainPieces", lambda *_: slow)
    team = HelperThreads("lightning_h5-read-test", many_reads.IN_FLIGHT, idle_seconds=0.05)
    monkeypatch.setattr(many_reads, "_team", team)
    assert read(fd, range(2000), [1] * 2000)[1] == 2000
    assert 32 <= slow.most <= many_reads.IN_FLIGHT
    deadline = time.monotonic() + HANG
    while any(thread.name == team.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the threads do not end"
        time.sleep(0.01)


def test_an_error_of_one_thread_is_raised_once_all_have_ended(fd, monkeypatch):
    class Failing(SlowPieces):
        def wait(self, which):
            n = super().wait(which)
            if 777 in which:
                raise OSError(5, "a disk that fails")
            return n

    failing = Failing()
    monkeypatch.setattr(many_reads, "_compiled", [None])
    monkeypatch.setattr(many_reads, "_PlainPieces", lambda *_: failing)
    with pytest.raises(OSError, match="a disk that fails"):
        read(fd, range(2000), [1] * 2000)
    assert failing.now == 0


def test_loops_are_compiled_once_many_pieces_were_read(fd, monkeypatch):
    compiled = []
    monkeypatch.setattr(many_reads, "_compiled", [])
    monkeypatch.setattr(many_reads, "_n_plain", 0)
    monkeypatch.setattr(many_reads, "_compile_read_loops", lambda: compiled.append(many_reads._n_plain))
    while not compiled:
        read(fd, range(1000), [1] * 1000)
    assert compiled == [33_000]


def test_any_number_of_pieces_is_read_without_numba(fd, monkeypatch):
    monkeypatch.setattr(jit, "_numba", lambda: None)
    monkeypatch.setattr(many_reads, "c_call", jit.c_call.__wrapped__)  # not the result that is kept
    monkeypatch.setattr(many_reads, "_compiled", [])
    monkeypatch.setattr(many_reads, "_n_plain", many_reads.MIN_COMPILED)
    out, n_bytes = read(fd, range(1000), [1] * 1000)
    assert n_bytes == 1000
    assert out.tobytes() == CONTENT[:1000].tobytes()
    assert many_reads._compiled == [None]


def test_a_slow_file_system_is_read_by_a_team_at_once_and_probed_again(fd, monkeypatch):
    probed = []
    monkeypatch.setattr(many_reads, "_compiled", [None])
    monkeypatch.setattr(many_reads, "PROBE_EVERY", 3)
    monkeypatch.setattr(many_reads, "_PlainPieces", lambda *_: SlowPieces())
    monkeypatch.setattr(many_reads, "_probe", lambda pieces, which: (probed.append(which), (len(which), True))[1])
    when = []
    for _ in range(8):
        assert read(fd, range(2000), [1] * 2000)[1] == 2000
        when.append(len(probed))
    assert when == [1, 1, 1, 1, 2, 2, 2, 2], "the first time, and after three others"
