"""Batches in page-locked memory."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

import torch.distributed

from ..errors import H5Error
from ..threads import EndingThread
from .prefetch import CLOSED

if TYPE_CHECKING:
    from .workers import WorkerBatches

__all__ = ["PinnedBatches", "pin"]


def pin(batch: Any) -> Any:
    """Return the same batch with its tensors in page-locked memory; other values stay as they are."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory() if batch.device.type == "cpu" else batch
    if isinstance(batch, dict):
        return {key: pin(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(pin(value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(pin(value) for value in batch)
    return batch.pin_memory() if hasattr(batch, "pin_memory") else batch


class PinnedBatches:
    """Batches of workers in page-locked memory: a thread takes them ahead of use, and copies them there.

    Args:
        batches: the workers' batches.
    """

    def __init__(self, batches: WorkerBatches) -> None:
        self._pinned: Queue[tuple[Any, BaseException | None]] = Queue(1)
        self._is_over = threading.Event()
        device = torch.accelerator.current_device_index()
        # Neither the thread nor its end holds `self`, or it would never be collected.
        self._end = partial(_end, batches, self._pinned, self._is_over)
        arguments = (batches, self._pinned, self._is_over, device)
        self._thread = EndingThread(_pin_all, arguments, name="lightning_h5-pin", end=self._end)
        self._thread.start()

    def __iter__(self) -> PinnedBatches:
        return self

    def __next__(self) -> Any:
        if self._is_over.is_set():
            raise H5Error(CLOSED)
        batch, error = self._pinned.get()
        if error is not None:
            self.close()
            raise error
        return batch

    def close(self) -> None:
        """End the thread and the pass."""
        self._end()
        self._thread.join()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self._end()


def _end(batches: WorkerBatches, pinned: Queue[tuple[Any, BaseException | None]], is_over: threading.Event) -> None:
    is_over.set()
    batches.close()
    with suppress(Empty):
        pinned.get_nowait()  # room for the thread's batch


def _pin_all(
    batches: WorkerBatches, pinned: Queue[tuple[Any, BaseException | None]], is_over: threading.Event, device: int
) -> None:
    torch.accelerator.set_device_index(device)
    error: BaseException | None = None
    while error is None and not is_over.is_set():
        batch = None
        try:
            batch = pin(next(batches))
        except BaseException as raised:  # raised when this batch is consumed
            error = raised
        pinned.put((batch, error))
