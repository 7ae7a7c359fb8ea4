"""Which order a training epoch takes, from how dear single rows are and how much memory may mix them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..datasets import RowDataset
from ..sampling import Mixture, MixtureRecipe, Mode, Recipe
from ..sizes import bytes_text

__all__ = ["FEW_BLOCKS", "Order", "blocks_mixed", "choose_mixed_order", "choose_order"]

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
        recipe: what epochs go through where that is more than each row once.
        sources: the orders of a mixture's sources.
    """

    mode: Mode
    lanes: int
    window: int
    why: str
    cache_bytes: int
    recipe: Recipe | None = None
    sources: tuple[Order, ...] = ()


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


def choose_mixed_order(
    mixture: Mixture,
    datasets: Sequence[RowDataset],
    shuffle: bool | Literal["global", "window"],
    *,
    shuffle_bytes: int,
    lanes: int | None,
    world_size: int,
    num_workers: int,
) -> Order:
    """The order of a mixture's epochs: one for each source. They share the memory by the size of their blocks.

    Args:
        mixture: how sources are mixed.
        datasets: the sources; all of them as one for ``concat``.
        shuffle: see ``choose_order``, as all of these.
        shuffle_bytes: decoded bytes of all sources that are mixed at a time on a rank.
        lanes: the user's number of lanes.
        world_size: number of ranks.
        num_workers: worker processes of a rank.
    """
    total = sum(0 if dataset.is_free else dataset.block_bytes for dataset in datasets)
    # Whose turn it is goes by batches: a lane is one consumer's own where these come in a fixed turn.
    in_turn = mixture.in_batches and mixture.strategy != "weighted"
    orders = tuple(
        choose_order(
            dataset,
            shuffle,
            shuffle_bytes=shuffle_bytes * dataset.block_bytes // total if total else shuffle_bytes,
            lanes=lanes if in_turn or mixture.strategy == "concat" else 1,
            world_size=world_size,
            num_workers=num_workers,
        )
        for dataset in datasets
    )
    mode: Mode = "none" if shuffle is False else "global"
    names = mixture.names if len(orders) > 1 else ["all"]
    each = "; ".join(f"{name}: {order.mode}, {order.why}" for name, order in zip(names, orders, strict=True))
    recipe = MixtureRecipe(mixture, [dataset.blocks() for dataset in datasets])
    why = f"{mixture.text} ({each})"
    return Order(mode, 1, 0, why, sum(order.cache_bytes for order in orders), recipe, orders)


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
    return bytes_text(n_bytes, least="KiB", most="MiB")
