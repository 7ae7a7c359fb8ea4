"""Tasks that any thread may do: those started for it, and those that would have to wait otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

# NumPy's `unique` imports it when it is first called. A process that is forked while a thread of ours does that has the
# import's lock held for ever.
import numpy.ma  # noqa: F401

from ..cores import cores_of_a_rank
from ..counters import worker_number

__all__ = ["TaskQueue", "usable_cores"]

MAX_THREADS = 16  # more decode faster than any GPU is fed, and wait for the interpreter's lock

Task: TypeAlias = Callable[[], None]
"""Raises nothing: what went wrong is told to who waits for the result."""


class TaskQueue:
    """A queue of tasks, first come first served. Ends with its process: threads do not survive a fork."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[Task | None] = SimpleQueue()
        self._team = 0

    def put(self, task: Task) -> None:
        """Adds a task."""
        self._todo.put(task)

    def help(self) -> bool:
        """Does one task; False where there is none."""
        task, n_ends = None, 0
        with suppress(Empty):
            while (task := self._todo.get_nowait()) is None:
                n_ends += 1  # meant for threads of the team; there may be tasks behind it
        for _ in range(n_ends):
            self._todo.put(None)
        if task is not None:
            task()
        return task is not None

    def start_team(self, n_threads: int) -> list[threading.Thread]:
        """Starts threads that do tasks until ``end_team``."""
        # The threads must not hold this object's owner, or it would never be forgotten.
        team = [
            threading.Thread(target=_do_tasks, args=(self._todo,), name="lightning_h5-decode", daemon=True)
            for _ in range(n_threads)
        ]
        self._team += n_threads
        for thread in team:
            thread.start()
        return team

    def end_team(self, n_threads: int) -> None:
        """Ends as many threads, once they have done what was put before."""
        self._team -= n_threads
        for _ in range(n_threads):
            self._todo.put(None)

    def clear(self) -> None:
        """Forgets all tasks; for when nobody waits for them any more."""
        n_ends = 0  # which threads of a team that was ended have still to see
        with suppress(Empty):
            while True:
                n_ends += self._todo.get_nowait() is None
        for _ in range(n_ends):
            self._todo.put(None)

    @contextmanager
    def helpers(self) -> Iterator[None]:
        """Threads for the time of one read, where there is no team and there are tasks and cores for them."""
        n_threads = 0 if self._team else min(self._todo.qsize(), usable_cores()) - 1
        team = [threading.Thread(target=self._do_what_is_there, daemon=True) for _ in range(n_threads)]
        for thread in team:
            thread.start()
        try:
            yield
        finally:
            for thread in team:
                thread.join()

    def _do_what_is_there(self) -> None:
        while self.help():
            pass


def _do_tasks(todo: SimpleQueue[Task | None]) -> None:
    while (task := todo.get()) is not None:
        task()
        del task  # while this thread waits, it holds no memory of a task


def usable_cores() -> int:
    """Cores that this process may decode on: its own, shared with other ranks of the machine; 1 in a worker process."""
    if worker_number() is not None:
        return 1
    return max(1, min(MAX_THREADS, cores_of_a_rank()))
