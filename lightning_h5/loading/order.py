"""Which order a training epoch takes, from how dear single rows are and how much memory may mix them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..datasets import RowDataset
from ..sampling import Mode

__all__ = ["FEW_BLOCKS", "Order", "blocks_mixed", "choose_order"]

FEW_BLOCKS = 32
"""Below so many blocks mixed at a time a batch of a sorted file is visibly less mixed (see the table in the docs)."""


ROOM_AHEAD = 4
"""One in so many of the blocks that fit ``shuffle_bytes``, and at least one, is not mixed but decoded ahead."""


class Order(NamedTuple):
    """An order and what it needs.

    Attributes:
        mode: of the plan.
        lanes: independent streams of blocks.
        window: blocks of a lane that are mixed at a time; 0 outside of ``window``.
        why: the reason, for the user.
        cache_bytes: memory for decoded rows on a rank with which each chunk is decoded once an epoch.
    """

    mode: Mode
    lanes: int
    window: int
    why: str
    cache_bytes: int


def choose_order(
    dataset: RowDataset,
    shuffle: bool | Literal["global", "window"],
    *,
    shuffle_bytes: int,
    lanes: int | None,
    world_size: int,
    num_workers: int,
) -> Order:
    """The order of training epochs.

    Args:
        dataset: what is trained on.
        shuffle: what the user asked for.
        shuffle_bytes: decoded bytes that are mixed at a time on a rank.
        lanes: the user's number of lanes; then ``shuffle_bytes`` is what all of them mix together, so that the order
            is the same for any number of ranks and workers.
        world_size: number of ranks.
        num_workers: worker processes of a rank, each with a cache of its own.
    """
    block, total = dataset.block_bytes, dataset.decoded_bytes
    consumers = max(1, num_workers)
    fits = total * consumers <= shuffle_bytes
    few = 4 * block * consumers + (64 << 20)  # for what is read ahead
    if shuffle is False:
        return Order("none", 1, 0, "as shuffle=False asks", few)
    if shuffle == "global" or (shuffle is True and (fits or dataset.is_free)):
        if shuffle == "global":
            why = "as shuffle='global' asks"
        elif dataset.is_free:
            why = "single rows cost no more than rows in company"
        else:
            why = f"all decoded rows ({_size(total)}) fit shuffle_bytes"
        return Order("global", 1, 0, why, max(few, total * consumers if fits else shuffle_bytes))
    n_lanes = lanes or world_size * consumers
    on_a_rank = -(-n_lanes // world_size)
    window = blocks_mixed(shuffle_bytes, block, on_a_rank if lanes is None else lanes)
    why = "as shuffle='window' asks" if shuffle == "window" else f"a single row costs a block of {_size(block)}"
    return Order("window", n_lanes, window, why, max(shuffle_bytes, 2 * on_a_rank * block) + few)


def blocks_mixed(shuffle_bytes: int, block_bytes: int, lanes: int) -> int:
    """Blocks of a lane that are mixed at a time.

    Args:
        shuffle_bytes: decoded bytes of all lanes that are mixed or being loaded.
        block_bytes: of a block.
        lanes: lanes that share them.
    """
    room = shuffle_bytes // (block_bytes * lanes)
    return max(1, room - max(1, room // ROOM_AHEAD))


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB" if n_bytes >= 2**20 else f"{n_bytes / 2**10:,.1f} KiB"
