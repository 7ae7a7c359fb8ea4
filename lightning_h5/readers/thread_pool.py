"""A queue of tasks, run by a team of threads and by threads that wait for results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue

# NumPy's `unique` imports it on the first call. A process forked while another thread runs that import would wait for
# the import lock forever.
import numpy.ma  # noqa: F401

from ..cores import cores_of_a_rank
from ..counters import worker_count, worker_number
from ..threads import EndingThread, HelperThreads, Task, start_helpers
from .pace import ReadPace

__all__ = ["LARGE_TEAM", "TaskQueue", "team_size", "usable_cores"]

MAX_THREADS = 16  # more would decode faster than any GPU needs, and wait for the GIL
MAX_WAITING = 64  # threads of a rank while reads wait for a server
LARGE_TEAM = 4
"""Threads of a team from which on reads wait for it. A read that decoded meanwhile would end later than the chunk that
it waits for, and no thread would copy rows or begin the next chunks."""

IDLE_SECONDS = 0.2  # until such a thread without a task ends


class TaskQueue:
    """A first-in-first-out queue of tasks. Belongs to one process: threads do not survive a fork.

    Attributes:
        pace: of the reads of the tasks.
    """

    def __init__(self) -> None:
        self.pace = ReadPace()
        self._todo: SimpleQueue[Task | None] = SimpleQueue()
        self._team = 0
        self._running = _Running()
        self._waiting = HelperThreads("lightning_h5-wait", MAX_WAITING, IDLE_SECONDS)
        self._over = threading.Event()

    def put(self, task: Task) -> None:
        """Add a task."""
        self._todo.put(task)
        if self.pace.is_slow:
            self._start_waiting()

    def help(self) -> bool:
        """Run one task; return False if there is none."""
        task, n_ends = None, 0
        with suppress(Empty):
            while (task := self._todo.get_nowait()) is None:
                n_ends += 1  # end marks for the threads of the team; tasks may follow
        for _ in range(n_ends):
            self._todo.put(None)
        if task is not None:
            task()
        return task is not None

    @property
    def has_large_team(self) -> bool:
        """Whether the team decodes faster if reads leave all tasks to it (see ``LARGE_TEAM``)."""
        return self._team >= LARGE_TEAM

    @property
    def n_sharing(self) -> int:
        """Threads of a large team, which share room for large tasks; 0 if tasks should be small.

        Reads that wait for a disk or a server stay small, since more of them are under way then.
        """
        return 0 if self._team < LARGE_TEAM or self.pace.is_slow else self._team

    def start_team(self, n_threads: int) -> list[EndingThread]:
        """Start threads that run tasks until ``end_team``; fewer, or none, if the system allows no more."""
        # The threads must not reference this object's owner, or it would never be collected.
        team = [
            EndingThread(
                _do_tasks, (self._todo, self._running), name="lightning_h5-decode", end=partial(self._todo.put, None)
            )
            for _ in range(n_threads)
        ]
        self._running.add(n_threads)
        n_started = len(team := start_helpers(team))
        self._running.add(n_started - n_threads)
        self._team += n_started
        return team

    def end_team(self, n_threads: int) -> None:
        """End this number of threads after all tasks that are queued now; the first threads that are free end."""
        self._team -= n_threads
        for _ in range(n_threads):
            self._todo.put(None)

    def wait_for_ends(self) -> None:
        """Wait until as many threads have ended as ``end_team`` was called for; the others may be anyone's."""
        self._running.wait(lambda: self._team)

    def clear(self) -> None:
        """Remove all tasks, when no read waits for them any more."""
        n_ends = 0  # end marks that threads of an ended team have not received yet
        with suppress(Empty):
            while True:
                n_ends += self._todo.get_nowait() is None
        for _ in range(n_ends):
            self._todo.put(None)

    @contextmanager
    def helpers(self) -> Iterator[None]:
        """Run threads during one read, as far as there are tasks for them, and the team has fewer than are useful."""
        if self.pace.is_slow:
            self._start_waiting()
            yield
            return
        n_threads = 0 if self._team else min(self._todo.qsize(), usable_cores()) - 1
        if n_threads <= 0:
            yield
            return
        over = threading.Event()
        team = start_helpers(
            EndingThread(self._help_until, (over,), name="lightning_h5-help", end=over.set) for _ in range(n_threads)
        )
        try:
            yield
        finally:
            for thread in team:
                thread.join()

    def _start_waiting(self) -> None:
        """Have threads run tasks while reads wait: more than there are cores, until tasks run out."""
        max_threads = MAX_WAITING // (worker_count() or 1)
        n_new = self.pace.threads(usable_cores(), max_threads) - 1 - self._team - self._waiting.n_unfinished
        for _ in range(min(self._todo.qsize(), n_new)):
            self._waiting.put(partial(self._help_until, self._over))

    def end_waiting(self) -> None:
        """End these threads; wait for the tasks that they run."""
        self._over.set()
        self._waiting.end()
        self._over = threading.Event()

    def _help_until(self, over: threading.Event) -> None:
        while not over.is_set() and self.help():
            pass


class _Running:
    """The threads of a queue's teams that run."""

    def __init__(self) -> None:
        self._n_threads = 0
        self._ended: list[threading.Thread] = []
        self._changed = threading.Condition()

    def add(self, n_threads: int) -> None:
        """Count threads that begin to run; a negative number subtracts threads that failed to start."""
        with self._changed:
            self._n_threads += n_threads

    def leave(self) -> None:
        """Note that the present thread ends."""
        with self._changed:
            self._n_threads -= 1
            self._ended = [*(thread for thread in self._ended if thread.is_alive()), threading.current_thread()]
            self._changed.notify_all()

    def wait(self, most: Callable[[], int]) -> None:
        """Wait until no more threads run than a function returns."""
        with self._changed:
            while self._n_threads > most():
                self._changed.wait()
            ended, self._ended = self._ended, []
        for thread in ended:
            thread.join()


def _do_tasks(todo: SimpleQueue[Task | None], running: _Running) -> None:
    try:
        while (task := todo.get()) is not None:
            task()
            del task  # a waiting thread must not keep a task's memory alive
    finally:  # also after an exception that is no error, which ends the thread
        running.leave()


def usable_cores() -> int:
    """Cores that this process may decode on: its own, shared with other ranks of the machine; 1 in a worker process."""
    if worker_number() is not None:
        return 1
    return max(1, min(MAX_THREADS, cores_of_a_rank()))


def team_size() -> int:
    """Threads of a team: a small one leaves a core to the reads, which decode while they wait."""
    n_cores = usable_cores()
    return n_cores if n_cores >= LARGE_TEAM else n_cores - 1
