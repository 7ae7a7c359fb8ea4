"""A mirror gives the bytes of its source, whatever happens to it."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from factories import edit, in_threads, run_forked
from guards import wait_until
from hypothesis import given
from hypothesis import strategies as st
from origins import GRANULE, CountingOrigin, content_of, expected, open_folder, open_mirror, read

from lightning_h5.counters import Counters, RequestTimes
from lightning_h5.staging import Mirror, folder, mirror, mirror_file
from lightning_h5.staging.granules import granules_of, length_of, marks_at, runs_of, widened

SIZE = 40 * GRANULE + 100
CONTENT = content_of(SIZE)
MANY = [(at, 5000) for at in range(0, SIZE - 5000, 7001)]

places = st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 3 * GRANULE)), min_size=1, max_size=20)


def within(pieces):
    return [(at, min(n, SIZE - at)) for at, n in pieces]


def on_disk(path):
    return sum(os.stat(Path(path) / name).st_blocks * 512 for name in os.listdir(path))


# Ranges -------------------------------------------------------------------------------------------------------------


@given(places)
def test_granules_are_all_that_a_piece_has_bytes_in(pieces):
    offsets, sizes = (np.array(each) for each in zip(*pieces, strict=True))
    granules, starts = granules_of(offsets, sizes)
    of_pieces = [list(range(at // GRANULE, (at + n - 1) // GRANULE + 1)) for at, n in pieces]
    assert granules.tolist() == [each for some in of_pieces for each in some]
    assert starts.tolist() == np.cumsum([0, *map(len, of_pieces)])[:-1].tolist()


@given(st.sets(st.integers(0, 60)), st.integers(1, 9))
def test_runs_are_neighbors_and_no_longer_than_asked(granules, longest):
    runs = list(runs_of(np.array(sorted(granules), dtype=np.int64), longest))
    assert [each for run in runs for each in range(*run)] == sorted(granules)
    assert all(stop - start <= longest for start, stop in runs)


def test_neighbors_are_those_of_a_grid_inside_the_array():
    assert widened(np.array([5]), 4, (0, 100 * GRANULE)).tolist() == [4, 5, 6, 7]
    assert widened(np.array([5]), 4, (5 * GRANULE + 1, 6 * GRANULE + 1)).tolist() == [5, 6]


# One process --------------------------------------------------------------------------------------------------------


@given(st.lists(places, min_size=1, max_size=4))
def test_any_pieces_are_those_of_the_source(tmp_path_factory, rounds):
    mirrored, origin = open_mirror(tmp_path_factory.mktemp("mirror"), CONTENT)
    for pieces in map(within, rounds):
        found, is_there = read(mirrored, pieces)
        assert found == expected(CONTENT, pieces)
        assert is_there.all()
        n = len(origin.requests)
        assert read(mirrored, pieces)[0] == found
        assert len(origin.requests) == n, "the second time nothing is read of the source"
    assert origin.n_bytes <= len(CONTENT), "each byte once"


def test_only_what_was_asked_for_is_on_the_disk(tmp_path):
    mirrored, origin = open_mirror(tmp_path, CONTENT)
    read(mirrored, [(10 * GRANULE + 5, 100), (20 * GRANULE - 5, 10)])
    assert sorted(origin.requests) == [(10 * GRANULE, 11 * GRANULE), (19 * GRANULE, 21 * GRANULE)]
    assert on_disk(tmp_path) <= 3 * GRANULE + 5 * 4096  # with marks, lock and uses


def test_neighbors_of_rows_are_fetched_together(tmp_path):
    mirrored, origin = open_mirror(tmp_path, CONTENT)
    read(mirrored, [(at * GRANULE, 10) for at in (1, 3, 20)], around=(0, SIZE))
    assert sorted(origin.requests) == [(0, 32 * GRANULE)]


def test_many_requests_are_in_flight(tmp_path):
    content = content_of(600 * GRANULE)
    mirrored, origin = open_mirror(tmp_path, content, n_together=20)
    found, _ = read(mirrored, pieces := [(at * GRANULE * 9, 50) for at in range(64)])
    assert found == expected(content, pieces)
    assert origin.most_at_once >= 20


def test_prefetched_pieces_are_read_once(tmp_path):
    mirrored, origin = open_mirror(tmp_path, CONTENT, delay=0.02)
    offsets, sizes = (np.array(each) for each in zip(*MANY, strict=True))
    mirrored.prefetch(offsets, sizes)
    mirrored.prefetch(offsets, sizes)
    assert read(mirrored, MANY)[0] == expected(CONTENT, MANY)
    assert origin.n_bytes <= SIZE


def test_threads_that_ask_for_the_same_read_the_source_once(tmp_path):
    mirrored, origin = open_mirror(tmp_path, CONTENT, delay=0.01)
    for found, is_there in in_threads(*[partial(read, mirrored, MANY)] * 6):
        assert found == expected(CONTENT, MANY)
        assert is_there.all()
    assert origin.n_bytes <= SIZE


def test_pieces_beyond_the_end_are_left_to_the_source(tmp_path):
    mirrored, _ = open_mirror(tmp_path, CONTENT)
    (found,), is_there = read(mirrored, [(SIZE - 10, 3 * GRANULE)])
    assert (found, is_there.tolist()) == (CONTENT[-10:], [False])


def test_a_source_that_fails_once_costs_a_second_request(tmp_path):
    failing = [True]

    def fail(start, stop):
        if failing:
            failing.clear()
            raise OSError(errno.EIO, "flaky")

    mirrored, origin = open_mirror(tmp_path, CONTENT, fail=fail)
    (found,), is_there = read(mirrored, [(0, 100)])
    assert (found, is_there.tolist(), len(origin.requests)) == (CONTENT[:100], [False], 2)


def test_a_source_that_fails_raises_its_error(tmp_path):
    def fail(start, stop):
        raise OSError(errno.EIO, "broken")

    mirrored, _ = open_mirror(tmp_path, CONTENT, fail=fail)
    with pytest.raises(OSError, match="broken"):
        read(mirrored, [(0, 100)])


def test_a_source_that_changed_is_not_kept(tmp_path):
    mirrored, origin = open_mirror(tmp_path, CONTENT)
    origin.version = "2"
    assert not read(mirrored, [(0, 100)])[1].any()
    assert not mirror.is_present(mirrored._marks).any()


def test_another_version_is_another_mirror(tmp_path):
    mirrored, _ = open_mirror(tmp_path, CONTENT, key="old")
    read(mirrored, MANY)
    other = content_of(SIZE, seed=1)
    changed, _ = open_mirror(tmp_path, other, key="new")
    assert read(changed, MANY)[0] == expected(other, MANY)


def test_a_later_job_finds_what_an_earlier_one_left(tmp_path):
    mirrored, _ = open_mirror(tmp_path, CONTENT)
    read(mirrored, MANY)
    mirrored.close()
    later, origin = open_mirror(tmp_path, CONTENT)
    assert read(later, MANY)[0] == expected(CONTENT, MANY)
    assert not origin.requests


def test_a_file_of_another_length_is_replaced(tmp_path):
    path = tmp_path / f"key-{SIZE}.mirror"
    path.write_bytes(b"\xff" * 1000)
    mirrored, origin = open_mirror(tmp_path, CONTENT)
    assert read(mirrored, MANY)[0] == expected(CONTENT, MANY)
    assert origin.requests


def test_a_folder_that_was_removed_leaves_the_source(tmp_path):
    mirrored, origin = open_mirror(tmp_path / "mirrors", CONTENT)
    read(mirrored, [(0, 100)])
    for path in (tmp_path / "mirrors").iterdir():
        path.unlink()
    (tmp_path / "mirrors").rmdir()
    origin.requests.clear()
    assert read(mirrored, MANY)[0] == expected(CONTENT, MANY)
    assert not read(mirrored, [(30 * GRANULE, 10)])[1].any(), "nothing is written any more"


# The budget ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_requests(monkeypatch):
    """Requests of a few granules: there is room for a request, or none."""
    monkeypatch.setattr(CountingOrigin, "longest", 4)


@pytest.mark.usefixtures("small_requests")
@pytest.mark.parametrize("n_granules", [0, 1, 7, 30])
def test_the_budget_is_kept_on_the_disk(tmp_path, n_granules):
    limit = n_granules * GRANULE + (128 << 10)
    mirrored, _ = open_mirror(tmp_path, CONTENT, limit=limit)
    for _ in range(3):
        assert read(mirrored, MANY)[0] == expected(CONTENT, MANY)
        assert on_disk(tmp_path) <= limit
    assert on_disk(tmp_path) > (n_granules - 8) * GRANULE


def test_mirrors_that_nobody_uses_make_room(tmp_path):
    old, _ = open_mirror(tmp_path, CONTENT, key="old")
    read(old, MANY)
    old._folder.close()  # as when its process ends
    other = content_of(SIZE, seed=1)
    new, _ = open_mirror(tmp_path, other, limit=45 * GRANULE + (128 << 10), key="new")
    found, is_there = read(new, MANY)
    assert found == expected(other, MANY)
    assert is_there.all()
    assert not list(tmp_path.glob("old*"))


@pytest.mark.usefixtures("small_requests")
def test_a_mirror_in_use_keeps_what_it_has_and_others_read_past_it(tmp_path):
    limit = 42 * GRANULE + (128 << 10)
    first, origin = open_mirror(tmp_path, CONTENT, limit=limit, key="first")
    assert read(first, MANY)[1].all()
    origin.requests.clear()
    other = content_of(SIZE, seed=1)
    second, _ = open_mirror(tmp_path, other, limit=limit, key="second")
    for _ in range(3):
        assert read(second, MANY)[0] == expected(other, MANY)
        assert read(first, MANY)[0] == expected(CONTENT, MANY)
        assert on_disk(tmp_path) <= limit
        second._no_room_until = 0.0
    assert not origin.requests


@pytest.mark.usefixtures("small_requests")
def test_a_folder_that_is_full_has_room_for_the_first_bytes_of_another_file(tmp_path):
    limit, pieces = 16 << 20, [(at, GRANULE) for at in range(0, 16 << 20, GRANULE)]
    large, other = content_of(16 << 20), content_of(SIZE, seed=1)
    first, _ = open_mirror(tmp_path, large, limit=limit, key="first")
    assert read(first, pieces)[0] == expected(large, pieces)
    assert not read(first, pieces)[1].all()
    second, origin = open_mirror(tmp_path, other, limit=limit, key="second")
    assert read(second, MANY[:20])[1].all()
    origin.requests.clear()
    assert read(second, MANY[:20])[0] == expected(other, MANY[:20])
    assert not origin.requests
    assert on_disk(tmp_path) <= limit


def test_a_read_during_which_bytes_are_dropped_is_right(tmp_path):
    mirrored, origin = open_mirror(tmp_path, CONTENT)
    read(mirrored, MANY)
    dropping, _ = open_mirror(tmp_path, CONTENT)
    origin.requests.clear()
    n_reads = [0, 0]

    def are_read():
        return min(n_reads) >= 20 and origin.n_bytes > 40 * GRANULE

    def drop_often():
        while not are_read():
            dropping.forget(np.array([5 * GRANULE]), np.array([20 * GRANULE]))

    def read_often(reader):
        while not are_read():
            assert read(mirrored, MANY)[0] == expected(CONTENT, MANY)
            n_reads[reader] += 1

    in_threads(drop_often, partial(read_often, 0), partial(read_often, 1))


def test_bytes_that_went_and_came_again_while_they_were_read_count_as_changed(tmp_path):
    mirrored, _ = open_mirror(tmp_path, CONTENT)
    offsets, sizes = np.array([0]), np.array([100])
    staged = mirrored.stage(offsets, sizes)
    assert mirrored.is_unchanged(staged).all()
    mirrored.forget(offsets, sizes)
    assert not mirrored.is_unchanged(staged).any()
    assert mirrored.stage(offsets, sizes).is_there.all()
    assert not mirrored.is_unchanged(staged).any()


# The disk -----------------------------------------------------------------------------------------------------------


# Damage -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, length_of(SIZE) - 1), st.integers(1, 255)), min_size=1, max_size=6))
def test_damage_anywhere_in_a_mirror_is_repaired_from_the_source(tmp_path_factory, flips):
    path = tmp_path_factory.mktemp("mirror")
    first, _ = open_mirror(path, CONTENT)
    read(first, MANY[::2])
    first.close()
    with open(path / first.name, "r+b") as file:
        for at, difference in flips:
            file.seek(at)
            value = file.read(1)[0]
            file.seek(at)
            file.write(bytes([value ^ difference]))
    for _ in range(2):
        mirrored, origin = open_mirror(path, CONTENT)
        assert read(mirrored, MANY)[0] == expected(CONTENT, MANY)
        mirrored.close()
    assert not origin.requests, "the mirror is whole again"


def test_damage_is_noticed_by_a_process_that_has_read_there_before(tmp_path, caplog):
    mirrored, origin = open_mirror(tmp_path, CONTENT)
    read(mirrored, MANY)
    time.sleep(0.02)  # the kernel's clock for files
    edit(tmp_path / mirrored.name, 5 * GRANULE)
    assert read(mirrored, MANY)[0] == expected(CONTENT, MANY)
    assert "differ from their checksums" in caplog.text
    n = len(origin.requests)
    assert read(mirrored, MANY)[0] == expected(CONTENT, MANY)
    assert len(origin.requests) == n


def test_a_granule_that_stays_wrong_is_read_from_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "sums_of", lambda data: np.arange(-(-len(data) // GRANULE)) + int(time.monotonic_ns()))
    mirrored, _ = open_mirror(tmp_path, CONTENT)
    found, is_there = read(mirrored, MANY)
    assert found == expected(CONTENT, MANY)
    assert not is_there.any()


def test_what_is_mapped_has_its_disk_space(tmp_path, monkeypatch, caplog):
    mirrored, _ = open_mirror(tmp_path, content := content_of(3000 * GRANULE))
    assert os.fstat(mirrored.fd).st_blocks * 512 >= length_of(len(content)) - marks_at(len(content))
    mirrored.close()

    def full(fd, start, n):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    mirrored, _ = open_mirror(tmp_path / "other", CONTENT)
    found, is_there = read(mirrored, MANY)
    assert found == expected(CONTENT, MANY)
    assert not is_there.any()
    assert "No space left on device" in caplog.text


def test_a_full_disk_leaves_the_source_and_warns_once(tmp_path, monkeypatch, caplog):
    mirrored, _ = open_mirror(tmp_path, CONTENT)
    write, is_full = os.pwrite, [False]

    def pwrite(fd, data, offset):
        if fd == mirrored.fd and is_full[0]:
            write(fd, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    read(mirrored, [(0, 100)])
    is_full[0] = True
    for _ in range(3):
        assert read(mirrored, MANY)[0] == expected(CONTENT, MANY)
        mirrored._no_room_until = mirrored._folder._no_writes_until = 0.0
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    is_full[0] = False
    assert read(mirrored, MANY)[1].all()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with 1 MiB; skipped if this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a file system takes root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_is_full_indeed(small_disk, caplog):
    content = content_of(4 << 20)
    mirrored, _ = open_mirror(small_disk, content, limit=1 << 30)
    pieces = [(at, 10_000) for at in range(0, (4 << 20) - 10_000, 50_000)]
    for _ in range(3):
        assert read(mirrored, pieces)[0] == expected(content, pieces)
        mirrored._no_room_until = mirrored._folder._no_writes_until = 0.0
    assert len(caplog.records) == 1
    assert mirror.is_present(mirrored._marks).sum() > 20


def test_a_mirror_that_cannot_be_made_leaves_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(folder.MirrorFolder, "open_mirror", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "")))
    broken, _ = open_mirror(tmp_path, CONTENT, key="other")
    assert broken.fd == -1
    offsets, sizes = (np.array(each) for each in zip(*MANY, strict=True))
    assert not broken.stage(offsets, sizes).is_there.any()
    memory = bytearray(100)
    assert broken.read_origin(memoryview(memory), [(0, 100, 7)]) == 100
    assert bytes(memory) == CONTENT[7:107]


# Processes ----------------------------------------------------------------------------------------------------------


def test_a_process_that_is_stopped_with_a_lock_holds_up_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "PATIENCE", 0.2)
    monkeypatch.setattr(folder, "PATIENCE", 0.2)
    stopped, _ = open_mirror(tmp_path, CONTENT)
    assert folder.try_lock(stopped._folder._fd)
    assert folder.try_lock(stopped.fd, 0, 5)
    with pytest.raises(TimeoutError):
        open_folder(tmp_path)
    folder.unlock(stopped._folder._fd)
    other, _ = open_mirror(tmp_path, CONTENT)
    found, is_there = read(other, [(0, 100), (10 * GRANULE, 100)])
    assert found == expected(CONTENT, [(0, 100), (10 * GRANULE, 100)])
    assert is_there.tolist() == [False, True]


def test_a_forked_child_keeps_no_lock_of_its_parent(tmp_path):
    mirrored, _ = open_mirror(tmp_path, CONTENT)

    def child():
        mirror_file.drop_inherited_mirrors()
        mirrored.close()  # does not wait for threads that it has not got
        assert mirrored.fd == -1

    mirrored._changed.acquire()
    mirrored._busy.add(1)
    assert run_forked(child) == 0
    mirrored._busy.clear()
    mirrored._changed.release()
    assert mirrored.fd >= 0


JOB = """
import sys
sys.path[:0] = {path!r}
from origins import *
from lightning_h5.staging import Mirror
content = content_of({size})
rng = np.random.default_rng(int(sys.argv[1]))
mirrored = Mirror(CountingOrigin(content), open_folder({folder!r}, {limit}), sys.argv[2])
print("ready", flush=True)
while True:
    pieces = [(int(at), 5000) for at in rng.integers(0, {size} - 5000, 20)]
    assert read(mirrored, pieces)[0] == expected(content, pieces)
    mirrored._no_room_until = 0.0
    if {drops}:
        mirrored.forget(np.array([5 * GRANULE]), np.array([30 * GRANULE]))
"""


@pytest.fixture(autouse=True)
def _end_jobs():
    """End the jobs of a test that fails before it does so itself."""
    yield
    while JOBS:
        JOBS.pop().kill()


JOBS = []


def start(tmp_path, seed, key="key", limit=None, drops=True):
    code = JOB.format(path=sys.path, size=SIZE, folder=str(tmp_path), limit=limit, drops=drops)
    JOBS.append(
        subprocess.Popen(
            [sys.executable, "-c", code, str(seed), key], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    )
    return JOBS[-1]


def assert_whole(tmp_path, keys=("key",), limit=None):
    for key in keys:
        mirrored, _ = open_mirror(tmp_path, CONTENT, limit=limit, key=key)
        has = np.flatnonzero(mirror.is_present(mirrored._marks))
        pieces = within([(granule * GRANULE, GRANULE) for granule in has.tolist()] or [(0, 1)])
        assert read(mirrored, pieces)[0] == expected(CONTENT, pieces)
        assert read(mirrored, MANY)[0] == expected(CONTENT, MANY)
        mirrored.close()
        mirrored._folder.close()


def kill_at_random(tmp_path, n_rounds, seed):
    rng = np.random.default_rng(seed)
    jobs = [start(tmp_path, number) for number in range(3)]
    for job in jobs:
        assert job.stdout.readline() == "ready\n", job.stderr.read()
    for number in range(n_rounds):
        time.sleep(rng.uniform(0, 0.05))
        which = int(rng.integers(0, 3))
        assert jobs[which].poll() is None, jobs[which].stderr.read()
        jobs[which].send_signal(signal.SIGKILL)
        jobs[which].communicate()
        assert_whole(tmp_path)
        jobs[which] = start(tmp_path, 10 + number)
        assert jobs[which].stdout.readline() == "ready\n"
    for job in jobs:
        assert job.poll() is None, job.stderr.read()
        job.kill()
        job.communicate()
    assert_whole(tmp_path)


def test_processes_that_are_killed_at_any_moment_leave_nothing_wrong(tmp_path):
    kill_at_random(tmp_path, 3, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(4))
def test_processes_that_are_killed_at_more_moments_leave_nothing_wrong(tmp_path, seed):
    kill_at_random(tmp_path, 100, seed)


@pytest.mark.wide
def test_two_jobs_share_a_budget(tmp_path):
    limit = 45 * GRANULE + (128 << 10)
    jobs = [start(tmp_path, number, key, limit, drops=False) for number, key in enumerate(("first", "second"))]
    for job in jobs:
        assert job.stdout.readline() == "ready\n", job.stderr.read()
    most = 0
    for number in itertools.count():
        most = max(most, on_disk(tmp_path))
        if number > 500 and most > 25 * GRANULE:
            break
        time.sleep(0.002)
    for job in jobs:
        assert job.poll() is None, job.stderr.read()
        job.kill()
        job.communicate()
    assert 25 * GRANULE < most <= limit
    assert_whole(tmp_path, ("first", "second"), limit)


def test_files_of_dead_processes_are_deleted(tmp_path):
    job = start(tmp_path, 0)
    assert job.stdout.readline() == "ready\n"
    job.kill()
    job.communicate()
    mirrored, _ = open_mirror(tmp_path, CONTENT, limit=GRANULE, key="other")
    read(mirrored, MANY)
    with suppress(OSError):
        mirrored.close()
    assert [path.name for path in tmp_path.glob("key*")] == []
    assert len(list(tmp_path.glob("*.uses"))) == 1


def test_a_mirror_is_closed_after_its_threads(tmp_path):
    mirrored = Mirror(origin := CountingOrigin(CONTENT, delay=0.1), open_folder(tmp_path), "key")
    mirrored.prefetch(np.array([0]), np.array([100]))
    mirrored.close()
    assert mirrored.fd >= 0
    wait_until(lambda: mirrored.fd < 0)
    assert (mirrored.fd, len(origin.requests)) == (-1, 1)


# What is counted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_are_counted_for_the_reader_that_makes_them(tmp_path, ahead):
    mirrored, origin = open_mirror(tmp_path, CONTENT, delay=0.002)
    offsets, sizes, counters, other = np.array([10, 5 * GRANULE]), np.array([100, GRANULE]), Counters(), Counters()
    if ahead:
        mirrored.prefetch(offsets, sizes, None, counters)
    mirrored.stage(offsets, sizes, None, counters)
    mirrored.stage(offsets, sizes, None, other)
    counted = counters.total()
    assert (counted["origin_requests"], counted["origin_bytes"]) == (2, 2 * GRANULE)
    assert ahead or counted["origin_seconds"] >= 0.002
    assert counters.request_times().sum() == 2
    assert RequestTimes.quantile(counters.request_times(), 0.01) >= 0.002
    assert not any(other.total().values())
    mirrored.read_origin(memoryview(bytearray(30)), [(0, 10, 7), (10, 30, GRANULE)], other)
    counted = other.total()
    assert [counted[name] for name in ("origin_requests", "origin_bytes", "missed_bytes")] == [2, 30, 30]
    assert counted["origin_seconds"] >= 0.002
    assert len(origin.requests) == 4
