"""A user's own way from samples to a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["SampleCollate"]


class SampleCollate:
    """A ``collate_fn`` over samples, and the ``batch_transform`` after it; a class, so that it pickles for spawn.

    Args:
        collate_fn: makes a batch of a list of samples.
        batch_transform: runs on the batch.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], batch_transform: Callable[[Any], Any] | None) -> None:
        self._collate_fn, self._batch_transform = collate_fn, batch_transform

    def __call__(self, samples: list[Any]) -> Any:
        """The batch of these samples."""
        batch = self._collate_fn(samples)
        return batch if self._batch_transform is None else self._batch_transform(batch)
