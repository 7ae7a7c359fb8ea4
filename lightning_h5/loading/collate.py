"""What happens to a batch after its rows were read: the user's ``collate_fn``, page-locked memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

import torch

from ..datasets import Samples, asked_for, fresh_draws, generators, note_rows
from ..errors import H5Error, stop_iteration
from .prefetch import CLOSED

if TYPE_CHECKING:
    from .worker_pool import WorkerBatches

__all__ = ["Collate", "PinnedBatches", "SampleCollate", "pin"]


class SampleCollate:
    """A ``collate_fn`` over samples, and the ``batch_transform`` after it; a class, so that it pickles for spawn.

    Args:
        collate_fn: makes a batch of a list of samples.
        batch_transform: runs on the batch.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], batch_transform: Callable[..., Any] | None) -> None:
        self._collate_fn, self._batch_transform = collate_fn, batch_transform
        self._asks_for = asked_for(batch_transform)

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of these samples."""
        describe = samples.describe if isinstance(samples, Samples) else lambda: f"{len(samples)} samples"
        function, argument = self._collate_fn, "collate_fn"
        try:
            batch = function(list(samples))
            if self._batch_transform is None:
                return batch
            function, argument = self._batch_transform, "batch_transform"
            return function(batch, **self._generators())
        except Exception as error:
            note_rows(error, argument, function, describe)
            raise

    def _generators(self) -> dict[str, Any]:
        # The stream of fresh draws is seeded for each batch, so these follow the batch as well.
        return generators(self._asks_for, fresh_draws()) if self._asks_for else {}


class Collate:
    """What a loader runs on each batch: the user's ``collate_fn``, if there is one.

    Args:
        user: that function.
    """

    def __init__(self, user: Callable[[Any], Any] | None) -> None:
        self.user = user

    def __call__(self, data: Any) -> Any:
        """Return the batch of what the dataset returned."""
        if self.user is None:
            return data
        try:
            return self.user(data)
        except StopIteration as error:
            raise stop_iteration("collate_fn", self.user) from error


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
        self._batches = batches
        self._pinned: Queue[tuple[Any, BaseException | None]] = Queue(1)
        self._is_over = threading.Event()
        device = torch.accelerator.current_device_index()
        arguments = (batches, self._pinned, self._is_over, device)  # not this object, or it would never be collected
        self._thread = threading.Thread(target=_pin_all, args=arguments, name="lightning_h5-pin", daemon=True)
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

    def _end(self) -> None:
        self._is_over.set()
        self._batches.close()
        with suppress(Empty):
            self._pinned.get_nowait()  # room for what the thread has

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self._end()


def _pin_all(
    batches: WorkerBatches, pinned: Queue[tuple[Any, BaseException | None]], is_over: threading.Event, device: int
) -> None:
    torch.accelerator.set_device_index(device)
    error: BaseException | None = None
    while error is None and not is_over.is_set():
        batch = None
        try:
            batch = pin(next(batches))
        except BaseException as raised:  # it is raised when this batch is taken
            error = raised
        pinned.put((batch, error))
