"""Batches that are read before they are yielded, so that a loop runs some steps without loading."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["HeldBatches", "HoldLimits"]


class HoldLimits(NamedTuple):
    """The limits of held batches. On a device, only one batch is held, since its memory may be full.

    Attributes:
        n_batches: maximum number of batches.
        n_bytes: maximum bytes of all batches.
        seconds: maximum time to read the batches.
    """

    n_batches: int = 20
    n_bytes: int = 256 << 20
    seconds: float = 1.0


class HeldBatches:
    """The next batches of an iteration, read before they are taken."""

    def __init__(self) -> None:
        self._batches: deque[Any] = deque()
        self._error: Exception | None = None  # error of the batch after the held ones
        self.seconds = 0.0  # that it took to read them

    def add(self, next_batch: Callable[[], Any]) -> None:
        """Read a batch. Its error is raised when the batch is taken.

        Args:
            next_batch: reads the batch.
        """
        try:
            self._batches.append(next_batch())
        except Exception as error:
            self._error = error

    def read(self, next_batch: Callable[[], Any], limits: HoldLimits) -> None:
        """Read several batches, up to the first error.

        Args:
            next_batch: reads the next batch.
            limits: limits of reading; at least one batch is read.
        """
        n_bytes, began, self.seconds = 0, perf_counter(), 0.0
        while len(self._batches) < limits.n_batches and n_bytes < limits.n_bytes:
            self.add(next_batch)
            self.seconds = perf_counter() - began
            if self.has_failed:
                return
            tensors = [leaf for leaf in tree_leaves(self._batches[-1]) if isinstance(leaf, torch.Tensor)]
            n_bytes += sum(tensor.nbytes for tensor in tensors)
            if self.seconds > limits.seconds or any(tensor.device.type != "cpu" for tensor in tensors):
                return

    @property
    def has_failed(self) -> bool:
        """Whether a batch could not be read."""
        return self._error is not None

    def __len__(self) -> int:
        return len(self._batches)

    def __bool__(self) -> bool:
        return bool(self._batches) or self.has_failed

    def take(self) -> Any:
        """Return the next batch; raise the error of a batch that could not be read."""
        if self._error is None or self._batches:
            return self._batches.popleft()
        error, self._error = self._error, None
        raise error
