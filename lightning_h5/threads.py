"""Threads that end before Python does.

A daemon thread that still runs while the interpreter is finalized is killed as soon as it asks for the interpreter's
lock. Before Python 3.14 this unwinds the thread's stack, and compiled code in it (torch, Numba, object stores) aborts
the process. So all threads of this package are ended, and waited for, before that.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

__all__ = ["EndingThread"]

END_SECONDS = 5.0
"""How long Python's exit waits for all threads: one may wait for a server or a file system that does not answer."""


class EndingThread(threading.Thread):
    """A daemon thread that is ended when Python exits, however it comes to that.

    Args:
        target: what it runs.
        args: arguments of the target.
        name: for stacks and debuggers.
        end: makes the target return soon; called in another thread, also if the target has returned. It waits for
            nothing.
    """

    def __init__(
        self, target: Callable[..., Any], args: tuple[Any, ...] = (), *, name: str, end: Callable[[], object]
    ) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self.end = end

    def start(self) -> None:
        """Start the thread."""
        # Exit functions run in reverse order. Registered now, this one precedes those of all modules that threads use.
        if not _exits:
            _exits.append(atexit.register(_end_all))
        super().start()


_exits: list[Any] = []


def _end_all() -> None:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, EndingThread)]
    for thread in threads:
        thread.end()
    deadline = monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
