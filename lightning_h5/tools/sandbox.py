"""Checking files in processes of their own, as many at a time as there are cores."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from selectors import EVENT_READ, DefaultSelector
from typing import Self

from ..readers import usable_cores
from .checks.apart import Child, SandboxLimits
from .checks.checking import Findings, Wanted

__all__ = ["check_in_sandbox"]


def check_in_sandbox(
    files: Sequence[str], wanted: Wanted, limits: SandboxLimits, tell: Callable[[int], object]
) -> Findings:
    """Checks each file in a process of its own, some at a time. No process is left when it returns or raises.

    Args:
        files: which. They are not opened in this process.
        wanted: what to look at.
        limits: what each of the processes may take.
        tell: called with the bytes of each file that is done.

    Raises:
        H5WorkerError: a process cannot be started.
    """
    n_children = max(1, min(usable_cores(), len(files)))
    n_threads = max(1, usable_cores() // n_children)
    found: dict[str, Findings] = {}
    todo = deque(files)
    with _Children() as children:
        while todo or children.running:
            while todo and len(children.running) < n_children:
                children.start(todo.popleft(), wanted, limits, n_threads)
            for child in children.wait():
                found[child.path] = child.findings()
                tell(os.path.getsize(child.path) if os.path.isfile(child.path) else 0)
    all_found = Findings()
    for path in files:
        all_found.add(found[path])
    return all_found


class _Children:
    """Processes that check files: none is left at its end, however that comes."""

    def __init__(self) -> None:
        self.running: list[Child] = []
        self._selector = DefaultSelector()

    def start(self, path: str, wanted: Wanted, limits: SandboxLimits, n_threads: int) -> None:
        """Starts one more."""
        with _interrupts_held():  # so that no child is started and not known
            self.running.append(Child(path, wanted, limits, n_threads))
        self._selector.register(self.running[-1].pipe, EVENT_READ, self.running[-1])

    def wait(self) -> Iterator[Child]:
        """Waits until something happens; those that have ended."""
        for key, _ in self._selector.select(min(child.patience() for child in self.running)):
            if not key.data.listen():
                self._selector.unregister(key.fd)
        for child in [child for child in self.running if child.has_ended()]:
            if not child.is_silent:
                self._selector.unregister(child.pipe)
                child.listen()
            child.end()
            self.running.remove(child)
            yield child

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with _interrupts_held():
            for child in self.running:
                child.kill()
        for child in self.running:
            child.end()
        self._selector.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until what is inside is done."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield  # no other thread is interrupted
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)
