"""Batches from worker processes, and what is said when a worker is gone or hangs."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from time import monotonic, sleep
from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..datasets import RowDataset
from ..errors import H5Error, H5ValueError, H5WorkerError, listing
from ..types import BatchToken
from .starting import LoaderStarting, Starting, what_cannot_travel, what_ran_out

__all__ = ["WorkerBatches", "end_with"]

POLL_SECONDS = 0.2
"""How often the workers are looked after while none has a batch ready; torch does every 5 seconds."""

GRACE_SECONDS = 1.0
"""A connection may break before the system says that the process at its other end is gone."""

START_SECONDS = 300.0
"""How long a worker may take to start, at least: on a busy machine that has nothing to do with how long it reads."""

FOLLOW_SECONDS = 1.0  # between two looks of a worker at whether its trainer lives: each takes 20 microseconds

MOST_ROWS = 8  # of a batch, in a message

_log = logging.getLogger(__name__)

_CAUSES: dict[int, str] = {
    signal.SIGKILL: "by somebody, or by the system for want of memory (`dmesg` tells; take fewer workers, or a smaller "
    "cache_bytes)",
    signal.SIGBUS: "memory behind a file was not there: /dev/shm is full, or a file that is mapped was truncated",
    signal.SIGSEGV: "a library crashed: run `lightning-h5 check --sandbox` on the files, and look at transforms with "
    "native code",
    signal.SIGABRT: "a library gave up: look at what it wrote above, and run `lightning-h5 check --sandbox` on the "
    "files",
    signal.SIGTERM: "somebody asked it to end",
}


class WorkerBatches(_MultiProcessingDataLoaderIter):
    """What torch gives for ``num_workers > 0``, with errors that say which worker went how, and over which rows.

    Torch tells of a worker's end by a signal handler, which raises in whatever line of the training process is running,
    or by a broken connection; and looks for itself every five seconds. Here the next batch is where it is told, within
    a second. The loader can be iterated again after that.

    Args:
        loader: whose workers to start.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._tokens: dict[int, BatchToken] = {}  # of batches on their way, by torch's number of them
        self._rows_of: RowDataset = loader.dataset  # type: ignore[assignment]  # ours, as its loader is
        self._have_given: set[int] = set()  # workers
        self._shutdown = True  # torch says otherwise once there is something to end
        context: Any = loader.multiprocessing_context or torch.multiprocessing
        self._method: str = context.get_start_method()
        self._starting = Starting(context) if sys.platform == "linux" else None
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # the error says it, too
                with _not_told_by_signals(self):
                    super().__init__(loader if self._starting is None else LoaderStarting(loader, self._starting))
        except BaseException as error:
            self._undo(error)
            if (cannot := what_cannot_travel(loader, self._method, error)) is not None:
                raise H5ValueError(cannot) from error
            if (ran_out := what_ran_out(error, loader.num_workers)) is not None:
                raise H5Error(ran_out) from error
            raise
        if self._starting is not None:
            self._starting.done()

    def _undo(self, error: BaseException) -> None:
        """Ends what was started; torch's way of ending takes it that all were."""
        if self._starting is None:
            return
        self._shutdown = True
        if (pinning := getattr(self, "_pin_memory_thread", None)) is not None:
            self._pin_memory_thread_done_event.set()
            self._worker_result_queue.put((None, None))
            pinning.join()
        self._starting.undo(error)

    def are_well(self) -> bool:
        """Whether all workers are there; says so in the log where one is gone that nobody asked to end."""
        gone = [(at, worker.exitcode) for at, worker in enumerate(self._workers) if not worker.is_alive()]
        for worker, code in gone:
            if code is not None and code < 0 and code != -signal.SIGINT:
                _log.warning("between two iterations worker %d %s others are started.", worker, _how(code))
        return not gone and not self._shutdown

    def _next_index(self) -> BatchToken:
        token: BatchToken = super()._next_index()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._tokens[self._send_idx] = token
        return token

    def _get_data(self) -> Any:
        since, has_begun = monotonic(), False
        while True:
            try:
                is_there, data = self._try_get_data(POLL_SECONDS)  # type: ignore[no-untyped-call]  # likewise
            except Exception as error:
                message = self._what_went_wrong()
                self.end_at_once()
                if message is None:
                    raise
                raise H5WorkerError(message) from error
            if is_there:
                self._tokens.pop(data[0], None)
                if (info := self._task_info.get(data[0])) is not None:
                    self._have_given.add(info[0])
                return data
            if self._timeout:
                if not has_begun and self._has_begun(self._awaited()):
                    since, has_begun = monotonic(), True
                if monotonic() - since >= (self._timeout if has_begun else max(self._timeout, START_SECONDS)):
                    message = self._who_hangs(has_begun)
                    self.end_at_once()
                    raise H5WorkerError(message)
            if self._pin_memory and not self._pin_memory_thread.is_alive():
                message = self._what_went_wrong()
                self.end_at_once()
                raise H5WorkerError(
                    message or "the thread that puts batches into page-locked memory has ended. Start again."
                )

    def _awaited(self) -> int:
        return self._task_info[self._rcvd_idx][0] if self._rcvd_idx in self._task_info else 0

    def _has_begun(self, worker: int) -> bool:
        return worker in self._have_given or self._rows_of.counters.begun_by(worker) is not None

    def _what_went_wrong(self) -> str | None:
        """Of the first worker that is gone: how it went, and what it was reading; None where all are there."""
        end = monotonic() + GRACE_SECONDS
        gone: list[int] = []
        while not gone and monotonic() < end:
            gone = [at for at, worker in enumerate(self._workers) if not worker.is_alive()]
        if not gone:
            return None
        worker, code = gone[0], self._workers[gone[0]].exitcode
        more = f" ({len(gone) - 1} more ended, too)" if len(gone) > 1 else ""
        if not self._has_begun(worker) and code is not None and code >= 0:
            how = f"ended with exit code {code} while it started;"
            return f"worker {worker}{more} {how} {self._doing(worker)} {self._look_at()}"
        return f"worker {worker}{more} {_how(code)} {self._doing(worker)} The files are closed; start again to go on."

    def _look_at(self) -> str:
        """What to look at where a worker ends while it starts."""
        if self._method == "fork":
            return "Look at what it wrote above, and at worker_init_fn."
        return (
            f"Look at what it wrote above. Workers that start by {self._method} import the script: what trains has to "
            'stand under `if __name__ == "__main__":` there.'
        )

    def _who_hangs(self, has_begun: bool) -> str:
        worker = self._awaited()
        if not has_begun:
            return (
                f"worker {worker} has not started after {max(self._timeout, START_SECONDS):g} s and was ended; "
                f"{self._doing(worker)} worker_init_fn hangs, or what a worker imports, or the machine does too much: "
                "look at these, or take fewer workers."
            )
        return (
            f"worker {worker} gave nothing for {self._timeout:g} s (timeout) and was ended; {self._doing(worker)} "
            "The storage or a transform hangs: look at both, or raise timeout."
        )

    def _doing(self, worker: int) -> str:
        """The batch that a worker was at: the one it began last, or what it would have begun next."""
        numbers = sorted(at for at, info in self._task_info.items() if len(info) == 1 and info[0] == worker)
        theirs = [self._tokens[at] for at in numbers]
        if not theirs:
            return "it had nothing to read."
        begun = self._rows_of.counters.begun_by(worker) or (0, 0)
        token = next((token for token in theirs if (token.epoch, token.step) >= begun), theirs[0])
        rows = token.rows.tolist()
        more = f" and {len(rows) - MOST_ROWS} more" if rows[MOST_ROWS:] else ""
        shown = ", ".join(map(str, rows[:MOST_ROWS])) + more
        files = self._rows_of.files_of(token.rows)
        where = f" of {listing(files, 3)}" if files else ""
        return f"it was to give step {token.step} of epoch {token.epoch}, rows {shown}{where}."

    def end_at_once(self) -> None:
        """Ends all workers: those that are well wait for one that is not, and torch would wait for each of them."""
        for worker in self._workers:
            with suppress(OSError, ValueError):
                worker.kill()
        self._shutdown_workers()

    def _shutdown_workers(self) -> None:
        super()._shutdown_workers()
        if self._starting is not None and self._starting.mailbox is not None and self._shutdown:
            self._starting.mailbox.end()


_handling: Any = _utils.signal_handling
_set_pids = _handling._set_worker_pids
_quiet: set[int] = set()  # iterators whose workers torch's signal handler is not to know


def _set_worker_pids(key: int, pids: tuple[int, ...]) -> None:
    if key not in _quiet:
        _set_pids(key, pids)


@contextmanager
def _not_told_by_signals(batches: WorkerBatches) -> Iterator[None]:
    """Inside, torch starts workers without telling its signal handler of them.

    It would raise wherever the training process is when one of them ends, in the midst of starting others, too. Other
    loaders are left as they are.
    """
    _handling._set_worker_pids = _set_worker_pids
    _quiet.add(id(batches))
    try:
        yield
    finally:
        _quiet.discard(id(batches))
        batches._worker_pids_set = False  # so that torch does not want them forgotten


def end_with(trainer: int) -> None:
    """Has this worker end within a second or two of the process that started it, however that one ended.

    Torch's workers look every five seconds whether their parent is another by now. They do not notice where it ended
    before their first look; nor do they end while a batch waits in their pipe, which is full and read by nobody: such
    workers of a killed trainer would live, and keep their memory, for ever. Does nothing on other systems than Linux.

    Args:
        trainer: number of the process that asked for workers; its child is this one, or a server that forked this one.
    """
    if sys.platform == "linux":
        Thread(target=_end_after, args=(trainer,), daemon=True, name="h5_end_with").start()


def _end_after(trainer: int) -> None:
    parent = os.getppid()
    while os.getppid() == parent and _lives(trainer):
        sleep(FOLLOW_SECONDS)
    os._exit(1)  # threads may wait for what never comes


def _lives(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb", buffering=0) as file:
            state = file.read().rpartition(b")")[2].split()[:1]
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # this process has no descriptor left, say: that tells nothing
        return True
    return state != [b"Z"]  # it has ended, and its parent has not looked yet


def _how(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "broke its connection;"
    if code >= 0:
        return f"ended with exit code {code} (a library or a transform called exit);"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
    cause = _CAUSES.get(-code)
    return f"was ended by {name}{f': {cause}' if cause else ''};"
