"""Which replica this process is: the data-parallel rank, and how many there are."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed

from ..errors import H5ValueError

__all__ = ["Replica", "resolve_replica"]


class Replica(NamedTuple):
    """One data-parallel copy of the model.

    Attributes:
        rank: this copy, from 0.
        world_size: number of copies.
    """

    rank: int
    world_size: int


def resolve_replica(rank: int | None = None, world_size: int | None = None) -> Replica:
    """The replica given, else that of an initialised ``torch.distributed``, else 0 of 1.

    Raises:
        H5ValueError: only one of the two is given, or they make no sense.
    """
    if (rank is None) != (world_size is None):
        raise H5ValueError(f"rank={rank} and world_size={world_size} were given. Pass both, or neither.")
    if rank is not None and world_size is not None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise H5ValueError(
                f"rank={rank} of world_size={world_size} was given. Pass a rank from 0 to world_size - 1."
            )
        return Replica(rank, world_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Replica(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return Replica(0, 1)
