"""How long copying batches to the device takes, where there is one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

__all__ = ["TransferTimer"]


class _Clock(Protocol):
    def around(self, copy: Callable[[], Any]) -> Any:
        """Times a copy, and gives what it gives."""

    def seconds(self) -> float:
        """Seconds of all copies that are known to be over."""


class TransferTimer:
    """Times what a strategy copies to its device, without waiting for the device.

    Lightning has no hook around that copy that a user's own may not take; so the strategy's method is wrapped for as
    long as a stage runs.

    Args:
        strategy: a Trainer's.
        clock: what times; None takes events of the device's stream on CUDA, and the time of the call elsewhere.
    """

    def __init__(self, strategy: Any, clock: _Clock | None = None) -> None:
        self._strategy = strategy
        on_cuda = strategy.root_device.type == "cuda"
        self._clock: _Clock = clock or (_EventClock() if on_cuda else _CallClock())
        copy = strategy.batch_to_device

        def timed(*arguments: Any, **named: Any) -> Any:
            return self._clock.around(lambda: copy(*arguments, **named))

        strategy.batch_to_device = timed

    def seconds(self) -> float:
        """Seconds so far."""
        return self._clock.seconds()

    def remove(self) -> None:
        """Gives the strategy its own method back."""
        self._strategy.__dict__.pop("batch_to_device", None)


class _CallClock:
    """The time that the call takes; right where it waits for the copy."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def around(self, copy: Callable[[], Any]) -> Any:
        began = perf_counter()
        given = copy()
        self._seconds += perf_counter() - began
        return given

    def seconds(self) -> float:
        return self._seconds


class _EventClock:
    """Events in the stream of the copies; read once they are over, so that nobody waits for the device."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: deque[tuple[Any, Any]] = deque()

    def around(self, copy: Callable[[], Any]) -> Any:
        event: Any = torch.cuda.Event  # torch leaves it unannotated
        events = event(enable_timing=True), event(enable_timing=True)
        events[0].record()
        given = copy()
        events[1].record()
        self._pending.append(events)
        self._collect()
        return given

    def seconds(self) -> float:
        self._collect()
        return self._seconds

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._seconds += first.elapsed_time(last) / 1000
