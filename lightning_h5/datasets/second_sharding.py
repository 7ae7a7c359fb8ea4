"""Detect samplers that shard a rank's rows again: most of the rows would never be trained on.

A dataset does not know the sampler that chooses its rows. But ``DistributedSampler`` calls ``len`` of the dataset, and
a loader without worker processes reads rows in a method of its iterator. So this module inspects the callers.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.utils.data import DistributedSampler
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from ..errors import H5ValueError
from ..order import EpochShuffleSampler, PlanSampler, Replica

__all__ = ["refuse_second_sharding"]

DEPTH = 12  # number of callers to inspect: samplers and datasets may be wrapped
_OF_SAMPLERS = (DistributedSampler.__init__.__code__, DistributedSampler.__iter__.__code__)
_OF_LOADERS = (_SingleProcessDataLoaderIter._next_data.__code__,)


def refuse_second_sharding(held: Replica) -> None:
    """Raise if this function's caller was called by a sampler that shards rows, or by a loader with one.

    Args:
        held: the replica that holds the rows.

    Raises:
        H5ValueError: the sampler would use only a part of the rank's rows.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(DEPTH):
        if frame is None:
            return
        if frame.f_code in _OF_SAMPLERS:
            _refuse_parts(frame.f_locals["self"], held)
        elif frame.f_code in _OF_LOADERS:
            _check_samplers(frame.f_locals["self"]._index_sampler, held)
        frame = frame.f_back


def _check_samplers(sampler: Any, held: Replica) -> None:
    """Raise if a sampler, or one inside it, shards rows that ranks hold."""
    for _ in range(DEPTH):
        if sampler is None or isinstance(sampler, EpochShuffleSampler | PlanSampler):
            return
        _refuse_parts(sampler, held)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def _refuse_parts(sampler: Any, held: Replica) -> None:
    n_parts = getattr(sampler, "num_replicas", None) or getattr(sampler, "num_processes", None)  # of Accelerate
    if not isinstance(n_parts, int) or n_parts < 2:
        return
    raise H5ValueError(
        f"a {type(sampler).__name__} for {n_parts} ranks was given a dataset that holds the rows of rank {held.rank} "
        f"of {held.world_size} alone: it would shard them again, and most rows would never be used. Pass "
        "sampler=EpochShuffleSampler(len(dataset)) to the DataLoader (with shuffle=False for evaluation): to such a "
        "loader no Trainer adds a DistributedSampler. Or use RankCachedH5DataModule. Or pass rank=0 and world_size=1 "
        "to the dataset, so that each rank holds all rows."
    )
