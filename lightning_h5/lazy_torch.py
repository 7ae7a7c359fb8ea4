"""``torch``, imported when one of its names is first used: inspecting a file takes less time than importing it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["has_process_group", "torch"]

if TYPE_CHECKING:
    import torch
    import torch.distributed
else:

    class _LazyTorch(ModuleType):
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _LazyTorch("torch")


def has_process_group() -> bool:
    """Return whether ``torch.distributed`` is initialized. Imports nothing: before its import it cannot be."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed is not None and bool(distributed.is_available() and distributed.is_initialized())
