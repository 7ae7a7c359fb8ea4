"""Error messages about worker processes that did not start, ended or were killed."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from typing import Any

from ..datasets import RowDataset
from ..errors import listing
from ..threads import task_limits
from ..types import BatchToken

__all__ = [
    "close_pipes_of_fork",
    "resource_that_ran_out",
    "unpicklable_arguments",
    "what_it_was_loading",
    "why_it_ended",
    "why_it_was_killed",
]

MAX_ROWS = 8  # rows of a batch to list in a message

_CAUSES: dict[int, str] = {
    signal.SIGKILL: "by a user, or by the system for lack of memory (see `dmesg`; use fewer workers, or a smaller "
    "cache_bytes)",
    signal.SIGBUS: "memory behind a file is missing: /dev/shm is full, or a mapped file was truncated",
    signal.SIGSEGV: "a library crashed: run `lightning-h5 check --sandbox` on the files, and check transforms with "
    "native code",
}


def why_it_ended(worker: str, code: int | None, loading: str, *, has_begun: bool, method: str) -> str:
    """Return the message about a worker that has ended.

    Args:
        worker: name of the worker.
        code: exit code.
        loading: sentence about the batch that it was loading.
        has_begun: whether it had begun a batch.
        method: start method of workers.
    """
    if code is None:
        how = "broke its connection;"
    elif code < 0:
        name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
        how = f"was ended by {name}{f': {_CAUSES[-code]}' if -code in _CAUSES else ''};"
    elif has_begun:
        how = f"ended with exit code {code} (a library or a transform called exit);"
    else:
        guard = (
            ""
            if method == "fork"
            else (
                f" Workers that start by {method} import the script: put the code that trains under "
                '`if __name__ == "__main__":` there.'
            )
        )
        return (
            f"{worker} ended with exit code {code} while it started; {loading} See its output above, and check "
            f"workers.init_fn.{guard}"
        )
    return f"{worker} {how} {loading} The files are closed; start again to continue."


def why_it_was_killed(worker: str, seconds: float, loading: str, *, has_begun: bool) -> str:
    """Return the message about a worker that took too long.

    Args:
        worker: name of the worker.
        seconds: time limit.
        loading: sentence about the batch that it was loading.
        has_begun: whether it had begun a batch.
    """
    if has_begun:
        return (
            f"{worker} returned no batch for {seconds:g} s (timeout) and was killed; {loading} The storage or a "
            "transform hangs: check both, or raise timeout."
        )
    return (
        f"{worker} has not started after {seconds:g} s and was killed; {loading} workers.init_fn or an import of the "
        "worker hangs, or the machine is overloaded: check these, or use fewer workers."
    )


def what_it_was_loading(tokens: Sequence[BatchToken], dataset: RowDataset, begun: tuple[int, int] | None) -> str:
    """Return a sentence about the batch that a worker was loading: the last one it began, or the next one.

    Args:
        tokens: tokens of the requested batches that it has not returned, in order.
        dataset: the dataset.
        begun: epoch and step of the last batch that it began.
    """
    if not tokens:
        return "it had nothing to load."
    token = next((token for token in tokens if (token.epoch, token.step) >= (begun or (0, 0))), tokens[0])
    rows = token.rows.tolist()
    more = f" and {len(rows) - MAX_ROWS} more" if rows[MAX_ROWS:] else ""
    files = dataset.files_of(token.rows)
    where = f" of {listing(files, 3)}" if files else ""
    return (
        f"it was loading step {token.step} of epoch {token.epoch}, rows {', '.join(map(str, rows[:MAX_ROWS]))}{more}"
        f"{where}."
    )


def unpicklable_arguments(loader: Any, method: str, error: BaseException) -> str | None:
    """Return the message about user functions that cannot be pickled; None for another error.

    Args:
        loader: the loader of the workers.
        method: start method of workers.
        error: error of starting workers.
    """
    if method == "fork" or not isinstance(error, AttributeError | TypeError | PicklingError):
        return None
    sample_layout = loader.dataset.sample_layout
    arguments = {
        "transform": getattr(getattr(sample_layout, "x", None), "transform", None),
        "target_transform": getattr(getattr(sample_layout, "y", None), "transform", None),
        "batch_transform": loader.dataset.batch_transform,
        "collate_fn": loader.collate_fn,
        "workers.init_fn": loader.worker_init_fn,
    }
    names = [name for name, value in arguments.items() if not _can_be_pickled(value)]
    if not names and not isinstance(error, PicklingError):
        return None
    return (
        f"workers that start by {method} receive their arguments pickled, and {' and '.join(names) or 'an argument'} "
        f"cannot be pickled: {error}. Define it at the top of a module, as a function or a class, not as a lambda; or "
        "pass workers={'start_method': 'fork'}."
    )


def _can_be_pickled(value: Any) -> bool:
    try:
        ForkingPickler.dumps(value)
    except Exception:
        return False
    return True


_RAN_OUT = {
    errno.EMFILE: "this process has no descriptors left ({}). Use fewer workers, or raise the limit: `ulimit -n 4096`.",
    errno.ENFILE: "this machine has no descriptors left ({}). Use fewer workers.",
    errno.EAGAIN: "the limit of processes is reached ({}; {limits}). Use fewer workers, or raise the limit.",
    errno.ENOMEM: "there is no memory left ({}). Use fewer workers, or hold fewer rows in memory.",
    errno.ENOSPC: "there is no space left for shared memory ({}). Make /dev/shm larger, or use fewer workers.",
}


def resource_that_ran_out(error: BaseException, n_workers: int) -> str | None:
    """Return the message about a system limit that was reached when starting workers; None for another error.

    Args:
        error: error of starting workers.
        n_workers: number of workers.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        number = errno.EAGAIN
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    if number not in _RAN_OUT:
        return None
    return f"{n_workers} workers could not be started: {_RAN_OUT[number].format(error, limits=task_limits())}"


def close_pipes_of_fork(error: BaseException) -> None:
    """Close the pipes that ``multiprocessing`` opens and forgets if the system refuses to fork.

    Args:
        error: error of starting a process.
    """
    at = error.__traceback__
    while at is not None:
        code, variables = at.tb_frame.f_code, at.tb_frame.f_locals
        if code.co_name == "_launch" and code.co_filename.endswith("popen_fork.py") and "code" in variables:
            for name in ("parent_r", "child_w", "child_r", "parent_w"):
                with suppress(OSError, KeyError):
                    os.close(variables[name])
        at = at.tb_next
