"""How fast batches come: stretches of time that begin and end where it is fair."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time, sleep
from typing import NamedTuple, Protocol

__all__ = ["Batches", "Stretch", "settle", "take_for"]

GLANCE = 0.03  # seconds
IDLE = 0.2  # of a core


class Batches(Protocol):
    """Batches without end, epoch after epoch."""

    def take(self) -> int:
        """Takes the next batch and drops it; its rows."""

    @property
    def n_left(self) -> int:
        """Rows that are left of this epoch; 0 at its end."""


class Stretch(NamedTuple):
    """Rows that were taken in a time.

    Attributes:
        n_rows: so many.
        seconds: that it took.
    """

    n_rows: int
    seconds: float

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.n_rows / max(1e-9, self.seconds)


def take_for(
    batches: Batches,
    least_seconds: float,
    most_seconds: float,
    *,
    least_rows: int = 0,
    clock: Callable[[], float] = perf_counter,
) -> Stretch:
    """Takes batches for a time, and on to the end of the epoch where that is near.

    Rows are dearer at some places of an epoch than at others: its beginning fills the window that is mixed, its end
    decodes nothing. Whole epochs have their share of both.

    Args:
        batches: what is timed.
        least_seconds: time to take batches for.
        most_seconds: time after which no end of an epoch is waited for.
        least_rows: rows to take, where that is done before ``most_seconds``.
        clock: seconds; for tests.
    """
    n_rows, began = 0, clock()
    while True:
        n_rows += batches.take()
        seconds = clock() - began
        if seconds >= most_seconds:
            break
        if seconds >= least_seconds and n_rows >= least_rows:
            n_left = batches.n_left
            if not n_left or seconds + n_left * seconds / max(1, n_rows) > most_seconds:
                break
    return Stretch(n_rows, seconds)


def settle(most_seconds: float = 1.0) -> None:
    """Waits until the threads of this process rest: who is not asked for batches reads ahead for a while.

    Args:
        most_seconds: time to wait at most.
    """
    end = perf_counter() + most_seconds
    while perf_counter() < end:
        used = process_time()
        sleep(GLANCE)
        if process_time() - used < GLANCE * IDLE:
            return
