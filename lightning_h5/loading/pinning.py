"""Page-locked memory for batches, where a GPU will copy from it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["pin"]


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
