"""At the limit of threads and processes: fewer threads that only help, and an error that names the limits."""

import os
import resource
import threading
from functools import partial

import pytest
from factories import run_forked
from guards import HANG

from lightning_h5 import H5Error
from lightning_h5.loading import worker_process
from lightning_h5.readers import TaskQueue
from lightning_h5.staging import origin
from lightning_h5.threads import EndingThread, HelperThreads, task_limits


def refuse_threads(monkeypatch, after):
    """Let a number of threads start, as many as the system may still have."""
    starts = iter(range(1000))
    start = threading.Thread.start

    def limited(self):
        if next(starts) >= after:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr("threading.Thread.start", limited)


@pytest.mark.parametrize("n_allowed", [0, 1])
def test_a_team_is_as_large_as_the_system_allows(monkeypatch, n_allowed):
    refuse_threads(monkeypatch, n_allowed)
    work, done = TaskQueue(), []
    team = work.start_team(3)
    assert len(team) == n_allowed
    for number in range(20):
        work.put(partial(done.append, number))
    with work.helpers():
        while work.help():
            pass
    work.end_team(len(team))
    for thread in team:
        thread.join(HANG)
    assert sorted(done) == list(range(20))


def test_ending_a_team_waits_for_as_many_threads_whichever_they_are():
    """A thread of another team may take the end mark first."""
    work = TaskQueue()
    threads = work.start_team(1)
    for _ in range(50):
        threads += work.start_team(1)
        work.end_team(1)
        work.wait_for_ends()
        threads = [thread for thread in threads if thread.is_alive()]
        assert len(threads) == 1
    work.end_team(1)
    work.wait_for_ends()
    assert not threads[0].is_alive()


@pytest.mark.parametrize("n_allowed", [0, 1])
def test_ranges_are_fetched_by_as_many_threads_as_the_system_allows(monkeypatch, n_allowed):
    monkeypatch.setattr(origin, "_threads", HelperThreads("lightning_h5-fetch", 3, idle_seconds=0.01))
    refuse_threads(monkeypatch, n_allowed)
    done = []
    for _ in range(2):
        origin.fetch_now([partial(done.append, number) for number in range(5)])
    assert sorted(done) == sorted([*range(5)] * 2)


def test_a_thread_that_is_needed_is_an_error_with_the_limits(monkeypatch):
    refuse_threads(monkeypatch, 0)
    thread = EndingThread(print, name="lightning_h5-test", end=int)
    with pytest.raises(H5Error, match=r"'lightning_h5-test' cannot be started: .*`ulimit -u` is .*Use fewer workers"):
        thread.start()


def test_a_worker_without_threads_answers_with_this_error(monkeypatch):
    refuse_threads(monkeypatch, 0)
    ours, theirs = worker_process.socket.socketpair()
    with ours, theirs:
        for number in (3, 4):
            ours.send(worker_process.HEADER.pack(2, number) + b"{}")
        ours.shutdown(worker_process.socket.SHUT_WR)
        monkeypatch.setattr(worker_process.signal, "signal", lambda *_: None)
        job = worker_process.WorkerJob(None, None, None, 0, 0, 1, None, (), None)
        worker_process.serve(job, theirs, 0)
        ours.setblocking(False)
        answers = worker_process.WorkerQueue(ours)
        for number in (3, 4):
            found, message = answers.read()
            assert found == number
            with pytest.raises(H5Error, match="limit of threads and processes is reached"):
                worker_process.pickle.loads(bytes(message)).raise_again()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, ""),
        ({"sys/fs/cgroup/pids.max": "max"}, ""),
        ({"sys/fs/cgroup/pids.max": "512"}, " and pids.max of the container is 512"),
        ({"sys/fs/cgroup/pids/pids.max": "1024"}, " and pids.max of the container is 1,024"),
        (
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/pids.max": "max", "sys/fs/cgroup/a/pids.max": "99"},
            " and pids.max of the container is 99",
        ),
    ],
    ids=str,
)
def test_limits_of_the_user_and_of_the_container_are_named(tmp_path, monkeypatch, files, said):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (7000, 7000))
    assert task_limits(str(tmp_path)) == "`ulimit -u` is 7,000" + said
    monkeypatch.setattr(resource, "getrlimit", lambda which: (-1, -1))
    assert task_limits(str(tmp_path)) == "`ulimit -u` is unlimited" + said


def at_the_limit():
    os.setgroups([])
    os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    work = TaskQueue()
    assert not work.start_team(2)
    with pytest.raises(H5Error, match=r"`ulimit -u` is 1[ )]"):
        EndingThread(print, name="x", end=int).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="the limit is of all processes of a user, so another user is needed")
def test_a_real_limit_is_met_in_the_same_way():
    assert run_forked(at_the_limit) == 0
