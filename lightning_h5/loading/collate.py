"""A user's own way from samples to a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..datasets import asked_for, fresh_draws, generators

__all__ = ["SampleCollate"]


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
        batch = self._collate_fn(samples)
        if self._batch_transform is None:
            return batch
        return self._batch_transform(batch, **self._generators())

    def _generators(self) -> dict[str, Any]:
        # The stream that fresh draws come from begins anew with each batch, so these follow the batch as well.
        return generators(self._asks_for, fresh_draws()) if self._asks_for else {}
