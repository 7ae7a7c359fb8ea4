"""Tasks are done once each, by whoever comes first; teams end when they are told, and leave nothing undone."""

import os
import threading
import weakref
from functools import partial

import pytest
from factories import in_threads, run_forked
from guards import HANG, wait_until

from lightning_h5.cores import share_cores
from lightning_h5.readers import LARGE_TEAM, TaskQueue, usable_cores
from lightning_h5.readers.pace import ReadPace


def test_tasks_are_done_in_the_order_they_were_put():
    work, done = TaskQueue(), []
    for number in range(5):
        work.put(partial(done.append, number))
    while work.help():
        pass
    assert done == [0, 1, 2, 3, 4]
    assert work.help() is False


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_team_does_what_was_put_before_it_was_ended(n_threads):
    work, done = TaskQueue(), []
    team = work.start_team(n_threads)
    for number in range(200):
        work.put(partial(done.append, number))
    work.end_team(n_threads)
    for thread in team:
        thread.join(HANG)
        assert not thread.is_alive()
    assert sorted(done) == list(range(200))


def test_helping_never_takes_the_end_from_a_team():
    """The sign that a thread is to end may be found by somebody who only wants to help."""
    work, done = TaskQueue(), []
    for _ in range(30):
        team = work.start_team(2)

        def help_and_put():
            for number in range(10):
                work.put(partial(done.append, number))
                work.help()

        helpers = [threading.Thread(target=help_and_put, daemon=True) for _ in range(3)]
        for helper in helpers:
            helper.start()
        work.end_team(2)
        for thread in (*helpers, *team):
            thread.join(HANG)
            assert not thread.is_alive()
        while work.help():
            pass
    assert len(done) == 30 * 3 * 10


def test_only_a_large_team_without_slow_reads_makes_use_of_large_tasks():
    for n_team in (0, LARGE_TEAM - 1, LARGE_TEAM):
        work = TaskQueue()
        work.start_team(n_team)
        assert work.n_sharing == (n_team if n_team == LARGE_TEAM else 0)
        work.pace = Slow()
        assert work.n_sharing == 0, "more reads are under way if each waits alone"
        work.end_team(n_team)
        work.wait_for_ends()


class Slow(ReadPace):
    """The pace of reads from a slow disk."""

    is_slow = True


def test_forgetting_tasks_does_not_forget_that_a_team_was_ended():
    """A thread of a team that is still busy when the dataset is closed would live on, and take the next team's end."""
    work, may_go_on, is_busy = TaskQueue(), threading.Event(), threading.Event()
    (thread,) = work.start_team(1)
    work.put(lambda: (is_busy.set(), may_go_on.wait(HANG)))
    is_busy.wait(HANG)
    work.end_team(1)
    work.clear()
    may_go_on.set()
    thread.join(HANG)
    assert not thread.is_alive()


def test_what_was_forgotten_is_not_done():
    work, done = TaskQueue(), []
    work.put(partial(done.append, 1))
    work.clear()
    assert work.help() is False
    assert done == []


def test_there_are_helpers_where_there_is_no_team(monkeypatch):
    monkeypatch.setattr("lightning_h5.readers.thread_pool.usable_cores", lambda: 3)
    work, who, meet = TaskQueue(), set(), threading.Barrier(3, timeout=HANG)

    def task():
        who.add(threading.get_ident())
        meet.wait()  # until three threads are at it

    for _ in range(3):
        work.put(task)
    with work.helpers():
        while work.help():
            pass
    assert len(who) == 3
    assert threading.get_ident() in who


@pytest.mark.parametrize(("n_team", "n_tasks", "n_cores"), [(1, 9, 4), (0, 1, 4), (0, 9, 1), (0, 0, 4)])
def test_there_are_no_helpers_for_one_task_or_core_nor_beside_a_team(monkeypatch, n_team, n_tasks, n_cores):
    monkeypatch.setattr("lightning_h5.readers.thread_pool.usable_cores", lambda: n_cores)
    work, may_go_on, is_busy = TaskQueue(), threading.Event(), threading.Event()
    team = work.start_team(n_team)
    if team:  # busy, so that the tasks stay where they are
        work.put(lambda: (is_busy.set(), may_go_on.wait(HANG)))
        assert is_busy.wait(HANG)
    for _ in range(n_tasks):
        work.put(lambda: None)
    before = threading.active_count()
    with work.helpers():
        assert threading.active_count() == before
    may_go_on.set()
    work.end_team(n_team)
    for thread in team:
        thread.join(HANG)


def test_a_task_is_forgotten_once_it_is_done():
    """It holds memory of blocks, and threads of a team wait for a long time."""
    work = TaskQueue()

    class Big:
        def __call__(self):
            pass

    big = Big()
    gone = weakref.ref(big)
    (thread,) = work.start_team(1)
    work.put(big)
    del big
    wait_until(lambda: gone() is None)
    work.end_team(1)
    thread.join(HANG)


def test_cores_are_shared_among_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("lightning_h5.cores._quota", lambda root: float("inf"))
    for n_ranks, expected in ((None, 8), ("2", 4), ("3", 2), ("8", 1), ("64", 1), ("0", 8)):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if n_ranks:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", n_ranks)
        assert usable_cores() == expected
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.setenv(name, "3")
        assert usable_cores() == 2
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(200)), raising=False)
    assert usable_cores() == 16
    monkeypatch.setattr("lightning_h5.cores._quota", lambda root: 2.5)  # a container may be granted less than it sees
    assert usable_cores() == 3


def test_ranks_count_where_no_launcher_says_so(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("lightning_h5.cores._quota", lambda root: float("inf"))
    monkeypatch.setattr("lightning_h5.cores._shared_ranks", 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    share_cores(4)
    assert usable_cores() == 2
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "8")
    assert usable_cores() == 2
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "32")  # SLURM gave each of four ranks eight cores of its own
    assert usable_cores() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert usable_cores() == 4


def test_a_worker_process_has_one_core(monkeypatch):
    monkeypatch.setattr("lightning_h5.readers.thread_pool.worker_number", lambda: 0)
    assert usable_cores() == 1


def test_work_made_in_a_forked_child_is_done_there():
    def child():
        work, done = TaskQueue(), []
        team = work.start_team(2)
        for number in range(20):
            work.put(partial(done.append, number))
        work.end_team(2)
        for thread in team:
            thread.join(HANG)
        assert sorted(done) == list(range(20))

    in_threads(lambda: None)
    assert run_forked(child) == 0


def test_a_thread_that_an_interrupt_ended_is_not_waited_for(monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda hooked: raised.append(hooked.exc_type))
    work = TaskQueue()
    (thread,) = work.start_team(1)

    def interrupt():
        raise SystemExit

    work.put(interrupt)
    work.end_team(1)
    waiting = threading.Thread(target=work.wait_for_ends, daemon=True)
    waiting.start()
    waiting.join(HANG)
    assert not waiting.is_alive()
    assert not thread.is_alive()
    assert raised == [SystemExit]
