"""All ranks see the same data, or all ranks stop: one exchange at the end of ``setup``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed

from ..errors import H5Error, H5ValueError

__all__ = ["agree"]

TIMEOUT = timedelta(seconds=120)


def agree(facts: Mapping[str, Any], failure: Exception | None) -> None:
    """Exchanges what every rank found, and raises on all of them where one failed or they differ.

    Args:
        facts: what must be equal on all ranks; plain values.
        failure: what went wrong on this rank, if anything.

    Raises:
        Exception: this rank's own failure, as it is, where there is one.
        H5ValueError: another rank failed, or the ranks found different things; the text names rank and values.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_world_size() == 1:
        if failure is not None:
            raise failure
        return
    mine = (None if failure is None else f"{type(failure).__name__}: {failure}", dict(facts))
    # A group of its own: gloo needs no GPU, and its time limit is not the half hour of the training group.
    group = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)
    all_of_them: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(all_of_them, mine, group=group)
    torch.distributed.destroy_process_group(group)
    failed = {rank: error for rank, (error, _) in enumerate(all_of_them) if error is not None}
    if failed:
        told = "".join(f"\n  rank {rank}: {error}" for rank, error in failed.items())
        text = f"setting up the data failed on {len(failed)} of {len(all_of_them)} ranks:{told}"
        raise (type(failure) if isinstance(failure, H5Error) else H5ValueError)(text) from failure
    names = dict.fromkeys(name for _, found in all_of_them for name in found)  # all ranks must look at the same ones
    differing = [name for name in names if len({repr(found.get(name)) for _, found in all_of_them}) > 1]
    if differing:
        told = "".join(
            f"\n  {name}: "
            + ", ".join(f"rank {rank} has {found.get(name)!r}" for rank, (_, found) in enumerate(all_of_them))
            for name in differing
        )
        raise H5ValueError(
            f"the ranks do not see the same data:{told}\nGive all ranks the same files (complete copies, where each "
            "node has its own) and the same arguments."
        )
