"""The order of a training epoch, chosen from the cost of single rows and the memory for mixing them.

Single rows of an array without chunks cost no more than neighbors if they are in memory. From a disk they cost ten
times as much and more: if the system's page cache cannot hold all rows, runs of rows are mixed instead, as chunks are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..datasets import RowDataset
from ..memory import FREE_SHARE
from ..options import ShuffleOptions
from ..order import EpochRecipe, MixtureRecipe, Mode
from ..readers import ROOM_AHEAD
from ..sizes import bytes_text

__all__ = [
    "FEW_BLOCKS",
    "LARGE_ROW",
    "Order",
    "blocks_mixed",
    "bytes_to_mix",
    "choose_mixed_order",
    "choose_order",
]

FEW_BLOCKS = 32
"""Number of blocks below which batches of a sorted file are visibly less mixed (see the table in the docs)."""


LARGE_ROW = 512 << 10
"""Bytes of a row from which single rows are read as fast as runs of rows."""


class Order(NamedTuple):
    """An order, its reason and its needs.

    Attributes:
        mode: mode of the order.
        streams: number of independent streams of blocks.
        window: number of blocks of a stream that are mixed at a time; 0 outside of ``chunks``.
        why: the reason, for the user.
        cache_bytes: memory for decoded rows on a rank that is enough to decode each chunk once per epoch.
        enough: ``shuffle.buffer`` with which ``FEW_BLOCKS`` blocks or all rows are mixed at a time; 0 outside of
            ``chunks``.
        recipe: recipe of epochs; None for each row once.
        sources: the orders of a mixture's sources.
        nodes: number of nodes that blocks are assigned to; 0 without ``scope="node"``.
        node_bytes: memory for all decoded rows of a node on a rank; 0 if ``nodes`` is 0.
        exceeds_memory: whether the rows exceed the page cache, which then cannot keep them until the next epoch.
    """

    mode: Mode
    streams: int
    window: int
    why: str
    cache_bytes: int
    enough: int = 0
    recipe: EpochRecipe | None = None
    sources: tuple[Order, ...] = ()
    nodes: int = 0
    node_bytes: int = 0
    exceeds_memory: bool = False

    def retain(self, cache_bytes: int) -> bool | None:
        """Return whether decoded rows are kept for the next epoch: with all rows of a node; None if all rows fit.

        Args:
            cache_bytes: memory for decoded rows on a rank.
        """
        return True if self.nodes > 1 and cache_bytes >= self.node_bytes else None


def choose_order(
    dataset: RowDataset,
    shuffle: ShuffleOptions,
    *,
    world_size: int,
    num_workers: int,
    nodes: int = 0,
    memory: int | None = None,
    saved_mode: Mode | None = None,
) -> Order:
    """Return the order of training epochs.

    Args:
        dataset: the dataset to train on.
        shuffle: the user's options. With ``streams``, all streams share ``buffer``, so that the order is the same for
            any number of ranks and workers.
        world_size: number of ranks.
        num_workers: number of worker processes of a rank, each with its own cache.
        nodes: number of nodes that blocks are assigned to; 0 without ``scope="node"``.
        memory: bytes of memory for pages of files on each node, the minimum over all nodes; None if it is unknown.
        saved_mode: the mode of the interrupted run, which is kept independent of the free memory; None for a new run.
    """
    cost = dataset.cost
    block, total = cost.block_bytes, cost.decoded_bytes
    if nodes > 1:  # a node reads no more than its rows; the first and last of its blocks may be divided
        total = min(total, -(-total // nodes) + 2 * block)
    consumers = max(1, num_workers)
    mode, buffer_bytes = shuffle.mode, shuffle.buffer_bytes
    request = f"as requested by shuffle={mode!r}"
    if mode == "auto" and saved_mode in ("global", "chunks"):
        mode, request = saved_mode, "as in the resumed run"
    fits = total * consumers <= buffer_bytes
    node_stored_bytes = cost.stored_bytes // max(1, nodes)
    exceeds_memory = memory is not None and node_stored_bytes > memory * FREE_SHARE
    is_cheap = cost.has_cheap_random_access and not (exceeds_memory and cost.row_bytes < LARGE_ROW)
    read_ahead_bytes = 4 * block * consumers + (64 << 20)  # for rows read ahead
    if mode == "none":
        return Order("none", 1, 0, "as requested by shuffle=False", read_ahead_bytes, exceeds_memory=exceeds_memory)
    node_bytes = total * consumers if nodes else 0
    if mode == "global" or (mode == "auto" and (fits or is_cheap)):
        if mode == "global":
            why = request
        elif is_cheap:
            why = "random access is as cheap as sequential access"
        else:
            why = f"all decoded rows{' of a node' if nodes > 1 else ''} ({_buffer_size(total)}) fit shuffle.buffer"
        cache_bytes = max(read_ahead_bytes, total * consumers if fits else buffer_bytes)
        return Order(
            "global", 1, 0, why, cache_bytes, nodes=nodes, node_bytes=node_bytes, exceeds_memory=exceeds_memory
        )
    streams_per_node = -(-(shuffle.streams or world_size * consumers) // max(1, nodes))
    n_streams = streams_per_node * max(1, nodes)
    streams_per_rank = -(-n_streams // world_size)
    sharers = streams_per_rank if shuffle.streams is None else streams_per_node
    window, enough_bytes = blocks_mixed(buffer_bytes, block, sharers), bytes_to_mix(FEW_BLOCKS, block, sharers)
    if mode == "auto":  # mix as many rows as fit
        enough_bytes = min(enough_bytes, total * consumers)
    if mode == "chunks":
        why = request
    elif cost.has_cheap_random_access and memory is not None:
        why = (
            f"the rows{' of a node' if nodes > 1 else ''} ({_buffer_size(node_stored_bytes)}) exceed {FREE_SHARE:.0%} "
            f"of the {_buffer_size(memory)} that are free to keep them: runs of rows are read from the disk instead of "
            "single rows"
        )
    else:
        why = f"a single row costs a block of {_buffer_size(block)}"
    cache_bytes = max(buffer_bytes, 2 * streams_per_rank * block) + read_ahead_bytes
    return Order(
        "chunks",
        n_streams,
        window,
        why,
        cache_bytes,
        enough_bytes,
        nodes=nodes,
        node_bytes=node_bytes,
        exceeds_memory=exceeds_memory,
    )


def choose_mixed_order(
    recipe: MixtureRecipe,
    datasets: Sequence[RowDataset],
    shuffle: ShuffleOptions,
    *,
    world_size: int,
    num_workers: int,
    memory: int | None = None,
    saved_modes: Sequence[Mode] = (),
) -> Order:
    """Return the order of a mixture's epochs: one for each source. They share the memory by the size of their blocks.

    Args:
        recipe: recipe of epochs over the sources.
        datasets: the sources; for ``concat``, one dataset of all sources.
        shuffle: see ``choose_order``; ``buffer`` is for all sources together.
        world_size: number of ranks.
        num_workers: worker processes of a rank.
        memory: see ``choose_order``; for all sources together.
        saved_modes: see ``choose_order``; of each source, or none.
    """
    mixture, costs = recipe.mixture, [dataset.cost for dataset in datasets]
    stored_bytes = sum(cost.stored_bytes for cost in costs)
    exceeds_memory = memory is not None and stored_bytes > memory * FREE_SHARE
    total = sum(0 if cost.has_cheap_random_access and not exceeds_memory else cost.block_bytes for cost in costs)
    buffer_bytes = shuffle.buffer_bytes
    # Consumers take turns by batch: a stream belongs to one consumer only if sources have fixed turns.
    has_fixed_turns = recipe.in_batches and mixture.strategy != "weighted"
    modes = saved_modes if len(saved_modes) == len(costs) else [None] * len(costs)
    source_orders = (
        choose_order(
            dataset,
            replace(
                shuffle,
                buffer=buffer_bytes * cost.block_bytes // total if total else buffer_bytes,
                streams=shuffle.streams if has_fixed_turns or mixture.strategy == "concat" else 1,
            ),
            world_size=world_size,
            num_workers=num_workers,
            memory=None if memory is None else memory * cost.stored_bytes // max(1, stored_bytes),
            saved_mode=mode,
        )
        for dataset, cost, mode in zip(datasets, costs, modes, strict=True)
    )
    orders = tuple(
        order._replace(enough=-(-order.enough * total // cost.block_bytes)) if order.enough else order
        for order, cost in zip(source_orders, costs, strict=True)
    )
    mode: Mode = "none" if shuffle.mode == "none" else "global"
    names = mixture.names if len(orders) > 1 else ["all"]
    descriptions = "; ".join(f"{name}: {order.mode}, {order.why}" for name, order in zip(names, orders, strict=True))
    why = f"{recipe.text} ({descriptions})"
    return Order(mode, 1, 0, why, sum(order.cache_bytes for order in orders), 0, recipe, orders)


def blocks_mixed(buffer_bytes: int, block_bytes: int, streams: int) -> int:
    """Return the number of blocks of a stream that are mixed at a time.

    Args:
        buffer_bytes: decoded bytes of all streams that are mixed or being loaded.
        block_bytes: bytes of a block.
        streams: number of streams that share the buffer.
    """
    room = buffer_bytes // (block_bytes * streams)
    return max(1, room - max(1, room // ROOM_AHEAD))


def bytes_to_mix(n_blocks: int, block_bytes: int, streams: int) -> int:
    """Return the smallest ``shuffle.buffer`` that mixes a number of blocks of a stream (see ``blocks_mixed``)."""
    room = n_blocks + max(1, n_blocks // (ROOM_AHEAD - 1))
    while room > 1 and (room - 1) - max(1, (room - 1) // ROOM_AHEAD) >= n_blocks:
        room -= 1
    return room * block_bytes * streams


def _buffer_size(n_bytes: int) -> str:
    return bytes_text(n_bytes, least="KiB", most="MiB")
