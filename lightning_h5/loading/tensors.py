"""The tensors of a batch, wherever they are in it: put into page-locked memory, or sent on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["each_tensor", "pin"]


def each_tensor(function: Callable[[torch.Tensor], Any], batch: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """The same batch with each tensor replaced; dicts, tuples and lists are looked into.

    Args:
        function: gives what takes a tensor's place.
        batch: stays as it is.
        other: likewise for what is neither; None leaves that.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: each_tensor(function, value, other) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(function, value, other) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(each_tensor(function, value, other) for value in batch)
    return batch if other is None else other(batch)


def pin(batch: Any) -> Any:
    """The same batch with its tensors in page-locked memory; what is no tensor stays as it is."""
    return each_tensor(
        lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor,
        batch,
        lambda value: value.pin_memory() if hasattr(value, "pin_memory") else value,
    )
