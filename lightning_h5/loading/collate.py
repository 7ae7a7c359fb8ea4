"""What becomes of a batch after its rows were read: the user's ``collate_fn``, page-locked memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..datasets import Samples, asked_for, fresh_draws, generators, note_rows
from ..errors import stop_iteration

__all__ = ["Collate", "SampleCollate", "pin"]


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
        """The batch of these samples."""
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
        # The stream that fresh draws come from begins anew with each batch, so these follow the batch as well.
        return generators(self._asks_for, fresh_draws()) if self._asks_for else {}


class Collate:
    """What a loader runs on each batch: the user's ``collate_fn``, if there is one.

    Args:
        user: that function.
    """

    def __init__(self, user: Callable[[Any], Any] | None) -> None:
        self.user = user

    def __call__(self, data: Any) -> Any:
        """The batch of what the dataset gave."""
        if self.user is None:
            return data
        try:
            return self.user(data)
        except StopIteration as error:
            raise stop_iteration("collate_fn", self.user) from error


def pin(batch: Any) -> Any:
    """The same batch with its tensors in page-locked memory; what is no tensor stays as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory() if batch.device.type == "cpu" else batch
    if isinstance(batch, dict):
        return {key: pin(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(pin(value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(pin(value) for value in batch)
    return batch.pin_memory() if hasattr(batch, "pin_memory") else batch
