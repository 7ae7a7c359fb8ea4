"""Starting workers: each with a pipe of its own, and with nothing left where one cannot be started."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from typing import Any

from .mailbox import Flag, Mailbox, close_queue

__all__ = ["LoaderStarting", "Starting", "what_cannot_travel", "what_ran_out"]

_RAN_OUT = {
    errno.EMFILE: "this process has no descriptors left ({}). Take fewer workers, or raise the limit: "
    "`ulimit -n 4096`.",
    errno.ENFILE: "this machine has no descriptors left ({}). Take fewer workers.",
    errno.EAGAIN: "the limit of processes is reached ({}). Take fewer workers, or raise the limit: `ulimit -u`, or "
    "pids.max of the container.",
    errno.ENOMEM: "there is no memory left ({}). Take fewer workers, or hold fewer rows in memory.",
    errno.ENOSPC: "there is no room for what processes share ({}). Make /dev/shm larger, or take fewer workers.",
}


class Starting:
    """What torch starts workers through, in place of ``multiprocessing``. Linux only.

    Args:
        context: how processes start.

    Attributes:
        processes: the workers so far.
    """

    def __init__(self, context: BaseContext) -> None:
        self._context = context
        self.mailbox: Mailbox | None = None
        self._queues: list[Queue[Any]] = []
        self.processes: list[BaseProcess] = []

    def Queue(self) -> Any:  # noqa: N802  # multiprocessing's name
        """First the one for all that workers send, then one to each worker."""
        if self.mailbox is None:
            self.mailbox = Mailbox()
            return self.mailbox
        self._queues.append(self._context.Queue())
        return self._queues[-1]

    def Event(self) -> Flag:  # noqa: N802  # likewise
        """One that tells workers to end."""
        return Flag(self._context)

    def Process(self, *, target: Any, args: tuple[Any, ...]) -> BaseProcess:  # noqa: N802  # likewise
        """A worker, who sends to a queue of its own."""
        if self.mailbox is None:
            raise RuntimeError("torch has asked for a worker, and for no queue of results before.")
        self.mailbox.close_writers()  # of those that have started: this one would keep them open
        own: Queue[Any] = self._context.Queue()
        self.mailbox.add(own)
        mine = tuple(own if argument is self.mailbox else argument for argument in args)
        self.processes.append(self._context.Process(target=target, args=mine))  # type: ignore[attr-defined]
        return self.processes[-1]

    def done(self) -> None:
        """All have started."""
        if self.mailbox is not None:
            self.mailbox.close_writers()

    def undo(self, error: BaseException) -> None:
        """Ends what was started, and closes what was opened.

        Args:
            error: why.
        """
        for process in self.processes:
            if process.pid is not None:
                process.kill()
                process.join()
                process.close()
        for queue in self._queues:
            close_queue(queue)
        if self.mailbox is not None:
            self.mailbox.end()
        _close_pipes_of_fork(error)


class LoaderStarting:
    """A loader, as torch's iterator reads it, with another way to start workers.

    Args:
        loader: the loader.
        context: that way.
    """

    def __init__(self, loader: Any, context: Any) -> None:
        self._loader = loader
        self.multiprocessing_context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _close_pipes_of_fork(error: BaseException) -> None:
    """Closes what ``multiprocessing`` has opened and forgotten, where the system refused to fork."""
    at = error.__traceback__
    while at is not None:
        code, found = at.tb_frame.f_code, at.tb_frame.f_locals
        if code.co_name == "_launch" and code.co_filename.endswith("popen_fork.py") and "code" in found:
            for name in ("parent_r", "child_w", "child_r", "parent_w"):
                with suppress(OSError, KeyError):
                    os.close(found[name])
        at = at.tb_next


def what_ran_out(error: BaseException, n_workers: int) -> str | None:
    """What the system had no more of when workers were started; None where it was something else.

    Args:
        error: of starting them.
        n_workers: how many.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        number = errno.EAGAIN
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    if number not in _RAN_OUT:
        return None
    return f"{n_workers} workers were to be started, and {_RAN_OUT[number].format(error)}"


def what_cannot_travel(loader: Any, method: str, error: BaseException) -> str | None:
    """Which of the user's functions cannot be pickled; None where that was not the matter.

    Args:
        loader: whose workers were to be started.
        method: how they start.
        error: of starting them.
    """
    if method == "fork" or not isinstance(error, AttributeError | TypeError | PicklingError):
        return None
    arguments = {
        "transform": getattr(getattr(loader.dataset.structure, "x", None), "transform", None),
        "target_transform": getattr(getattr(loader.dataset.structure, "y", None), "transform", None),
        "batch_transform": loader.dataset.batch_transform,
        "collate_fn": getattr(loader.collate_fn, "user", None),
        "worker_init_fn": getattr(loader.worker_init_fn, "user", None),
    }
    names = [name for name, value in arguments.items() if not _travels(value)]
    if not names and not isinstance(error, PicklingError):
        return None
    return (
        f"workers that start by {method} get what they need pickled, and {' and '.join(names) or 'an argument'} cannot "
        f"be: {error}. Define it at the top of a module, as a function or a class, not as a lambda; or pass "
        "multiprocessing_context='fork'."
    )


def _travels(value: Any) -> bool:
    try:
        ForkingPickler.dumps(value)
    except Exception:
        return False
    return True
