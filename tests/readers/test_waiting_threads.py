"""While reads wait for a disk or a server, more threads than cores run tasks, and none of them stays."""

import threading
import time

import pytest
from guards import HANG

from lightning_h5.readers import thread_pool
from lightning_h5.readers.thread_pool import TaskQueue


class Count:
    """How many tasks run at the same time. They take until ``enough`` did, or some seconds."""

    def __init__(self, enough):
        self.now = self.most = self.done = 0
        self.enough, self.lock = enough, threading.Lock()

    def task(self):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        deadline = time.monotonic() + HANG
        time.sleep(0.001)
        while self.most < self.enough and time.monotonic() < deadline:
            time.sleep(0.001)
        with self.lock:
            self.now -= 1
            self.done += 1


@pytest.fixture
def work():
    work = TaskQueue()
    yield work
    work.end_waiting()


def run(work, n_tasks, enough=0):
    count = Count(enough)
    for _ in range(n_tasks):
        work.put(count.task)
    with work.helpers():
        while count.done < n_tasks:
            if not work.help():
                time.sleep(0.001)
    return count.most


def test_more_threads_than_cores_run_tasks_while_reads_wait(work, monkeypatch):
    monkeypatch.setattr(thread_pool, "usable_cores", lambda: 2)
    assert run(work, 40) <= 2
    work.pace._threads_per_core = 20.0
    assert 20 <= run(work, 400, enough=20) <= thread_pool.MAX_WAITING
    work.end_waiting()
    assert not work._waiting.n_unfinished
    assert 20 <= run(work, 400, enough=20) <= thread_pool.MAX_WAITING, "they start again"


def test_the_marks_of_a_team_stay_for_it(work):
    work.pace._threads_per_core = 20.0
    team = work.start_team(2)
    run(work, 100)
    work.end_team(2)
    for thread in team:
        thread.join(HANG)
        assert not thread.is_alive()
