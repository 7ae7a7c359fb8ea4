"""Batches that are read before they are handed out, so that a loop takes some steps with no loader beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["HeldBatches", "HoldLimits"]


class HoldLimits(NamedTuple):
    """How much is held at most; of batches on a device, whose memory may have no room, a single one.

    Attributes:
        n_batches: batches.
        n_bytes: their bytes.
        seconds: of reading them.
    """

    n_batches: int = 20
    n_bytes: int = 256 << 20
    seconds: float = 1.0


class HeldBatches:
    """The next batches of an iteration, which are read together."""

    def __init__(self) -> None:
        self._batches: deque[Any] = deque()
        self._error: Exception | None = None  # of the batch after these

    def read(self, next_batch: Callable[[], Any], limits: HoldLimits) -> None:
        """Read batches.

        Args:
            next_batch: reads the next one. An error is raised when its batch is taken.
            limits: how many are read. At least one is.
        """
        n_bytes, began = 0, perf_counter()
        while len(self._batches) < limits.n_batches and n_bytes < limits.n_bytes:
            try:
                batch = next_batch()
            except Exception as error:
                self._error = error
                return
            self._batches.append(batch)
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            n_bytes += sum(tensor.nbytes for tensor in tensors)
            if perf_counter() - began > limits.seconds or any(tensor.device.type != "cpu" for tensor in tensors):
                return

    def __len__(self) -> int:
        return len(self._batches)

    def __bool__(self) -> bool:
        return bool(self._batches) or self._error is not None

    def take(self) -> Any:
        """Return the next of them; raise the error of one that could not be read."""
        if self._error is None or self._batches:
            return self._batches.popleft()
        error, self._error = self._error, None
        raise error
