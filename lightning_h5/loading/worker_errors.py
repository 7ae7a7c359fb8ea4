"""What is said when workers cannot be started, end or hang."""

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
from ..types import BatchToken

__all__ = ["close_pipes_of_fork", "how_it_ended", "what_it_did", "what_ran_out", "which_cannot_be_pickled"]

MAX_ROWS = 8  # of a batch, in a message

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

_RAN_OUT = {
    errno.EMFILE: "this process has no descriptors left ({}). Take fewer workers, or raise the limit: "
    "`ulimit -n 4096`.",
    errno.ENFILE: "this machine has no descriptors left ({}). Take fewer workers.",
    errno.EAGAIN: "the limit of processes is reached ({}). Take fewer workers, or raise the limit: `ulimit -u`, or "
    "pids.max of the container.",
    errno.ENOMEM: "there is no memory left ({}). Take fewer workers, or hold fewer rows in memory.",
    errno.ENOSPC: "there is no room for what processes share ({}). Make /dev/shm larger, or take fewer workers.",
}


def how_it_ended(code: int | None) -> str:
    """Return how a process ended, in words.

    Args:
        code: its exit code.
    """
    if code is None:
        return "broke its connection;"
    if code >= 0:
        return f"ended with exit code {code} (a library or a transform called exit);"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
    cause = _CAUSES.get(-code)
    return f"was ended by {name}{f': {cause}' if cause else ''};"


def what_it_did(tokens: Sequence[BatchToken], dataset: RowDataset, begun: tuple[int, int] | None) -> str:
    """Return which batch a worker was at: the one that it began last, or what it would have begun next.

    Args:
        tokens: what it was asked for and has not answered, in order.
        dataset: what it reads.
        begun: epoch and step of the batch that it began last.
    """
    if not tokens:
        return "it had nothing to read."
    token = next((token for token in tokens if (token.epoch, token.step) >= (begun or (0, 0))), tokens[0])
    rows = token.rows.tolist()
    more = f" and {len(rows) - MAX_ROWS} more" if rows[MAX_ROWS:] else ""
    files = dataset.files_of(token.rows)
    where = f" of {listing(files, 3)}" if files else ""
    return (
        f"it was to give step {token.step} of epoch {token.epoch}, rows {', '.join(map(str, rows[:MAX_ROWS]))}{more}"
        f"{where}."
    )


def what_ran_out(error: BaseException, n_workers: int) -> str | None:
    """Return what the system had no more of when workers were started; None if it was something else.

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


def which_cannot_be_pickled(loader: Any, method: str, error: BaseException) -> str | None:
    """Return which of the user's functions cannot be pickled; None if that was not the matter.

    Args:
        loader: whose workers were to be started.
        method: how they start.
        error: of starting them.
    """
    if method == "fork" or not isinstance(error, AttributeError | TypeError | PicklingError):
        return None
    sample_layout = loader.dataset.sample_layout
    arguments = {
        "transform": getattr(getattr(sample_layout, "x", None), "transform", None),
        "target_transform": getattr(getattr(sample_layout, "y", None), "transform", None),
        "batch_transform": loader.dataset.batch_transform,
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
    }
    names = [name for name, value in arguments.items() if not _is_picklable(value)]
    if not names and not isinstance(error, PicklingError):
        return None
    return (
        f"workers that start by {method} get what they need pickled, and {' and '.join(names) or 'an argument'} cannot "
        f"be: {error}. Define it at the top of a module, as a function or a class, not as a lambda; or pass "
        "multiprocessing_context='fork'."
    )


def _is_picklable(value: Any) -> bool:
    try:
        ForkingPickler.dumps(value)
    except Exception:
        return False
    return True


def close_pipes_of_fork(error: BaseException) -> None:
    """Closes the pipes that ``multiprocessing`` opens and forgets if the system refuses to fork.

    Args:
        error: of starting a process.
    """
    at = error.__traceback__
    while at is not None:
        code, found = at.tb_frame.f_code, at.tb_frame.f_locals
        if code.co_name == "_launch" and code.co_filename.endswith("popen_fork.py") and "code" in found:
            for name in ("parent_r", "child_w", "child_r", "parent_w"):
                with suppress(OSError, KeyError):
                    os.close(found[name])
        at = at.tb_next
