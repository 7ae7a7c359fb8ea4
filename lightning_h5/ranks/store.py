"""The key-value store by which ranks found each other: that of this process, not one that a parent had."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed

__all__ = ["own_store"]

_inherited: list[Any] = []


def own_store() -> Any:
    """The store of this process's group; None where there is one rank alone.

    A child that a rank forked has its parent's group and store. Both would talk through one connection, and each would
    get the other's answers: such a child is no rank.
    """
    store = _store()
    if store is None or any(store is one for one in _inherited) or torch.distributed.get_world_size() == 1:
        return None
    return store


def _store() -> Any:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    # torch has no public name for the store that `init_process_group` made.
    return torch.distributed.distributed_c10d._get_default_store()


def _remember() -> None:
    _inherited[:] = [_store()]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember)
