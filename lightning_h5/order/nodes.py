"""Blocks that are assigned to nodes once per run: each node has the same rows in all epochs, in a new order each epoch.

Each position of an epoch's sequence belongs to one rank, and so to one node. Each node has as many rows as positions.
Only the rows at the positions differ from an order of all rows: the consumed part is still a prefix of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..errors import H5ValueError
from ..types import IntArray, cached_property
from .permutation import KeyedPermutation, permutation, stream
from .plan import OrderParameters, RowOrder, TrainBatches, order_rows
from .shards import balanced_contiguous_shard, check_nodes
from .window import BlockTable

__all__ = [
    "N_LABELS",
    "DealtBlocks",
    "DealtRows",
    "NodeOrder",
    "NodeTurns",
    "deal_blocks",
    "epoch_order",
    "label_entropy",
]

DEAL, MIXING = 17, 18  # purposes of the random streams

MAX_DEALT = 1 << 20
"""Maximum number of pieces to assign, with neighboring blocks joined: this needs at most 0.1 s and 32 MB of memory."""

N_LABELS = 10
SAMPLED_BATCHES = 64


def epoch_order(blocks: BlockTable, parameters: OrderParameters, epoch: int, *, drop_last: bool) -> RowOrder:
    """Return the sequence of an epoch with each row once, over all rows or within each node.

    Args:
        blocks: the rows.
        parameters: the settings of the order. On one node it is the order of all rows.
        epoch: number of the epoch, from 0.
        drop_last: drop rows that do not fill a batch on every rank; this affects the number of positions of a node.
    """
    if parameters.nodes > 1:
        return NodeOrder(blocks, parameters, epoch, drop_last=drop_last)
    return order_rows(blocks, parameters, epoch)


class NodeTurn(NamedTuple):
    """Neighboring positions of the sequence that belong to one node: places ``[start, stop)`` of that node's order."""

    node: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class NodeTurns:
    """The node of each position of an epoch's sequence, by arithmetic, without memory for the rows.

    In each round, the batches of a node's ranks are consecutive. Positions in no batch are divided equally, so that a
    row is left out of one epoch only.

    Attributes:
        batches: the sequence, divided into batches for all ranks.
        nodes: number of nodes; each has the same number of ranks.

    Raises:
        H5ValueError: the number of ranks is not a multiple of the number of nodes.
    """

    batches: TrainBatches
    nodes: int

    def __post_init__(self) -> None:
        check_nodes(self.nodes, self.batches.world_size)

    def size(self, node: int) -> int:
        """Return the rows of a node."""
        return self._n_before(node, self._n_batched) + self._left_out(node)

    def turns(self, start: int, stop: int) -> Iterator[NodeTurn]:
        """Yield the turns of nodes that the positions ``[start, stop)`` belong to, in order."""
        while start < stop:
            node, place, end = self._turn(start)
            n_rows = min(stop, end) - start
            yield NodeTurn(node, place, place + n_rows)
            start += n_rows

    def _turn(self, position: int) -> tuple[int, int, int]:
        """Return the node of a position, the place in this node's order, and the end of the node's turn."""
        low, high = self.batches.left_out
        if low <= position < high:
            node, end = self._node_left_out(position - low)
            return node, self._n_before(node, low) + position - low - (end - self._left_out(node)), low + end
        n_skipped = high - low if position >= high else 0
        node, end = self._node_at(position - n_skipped)
        place = self._n_before(node, position - n_skipped) + (self._left_out(node) if n_skipped else 0)
        return node, place, end + n_skipped if n_skipped else min(end, low)

    @cached_property
    def _n_batched(self) -> int:
        """Number of rows in batches. The next properties and methods count only these rows."""
        return self.batches.n_rows - self.batches.n_left_out

    @cached_property
    def _n_turn(self) -> int:
        """Rows of a node in a round of full batches."""
        return self.batches.batch_size * (self.batches.world_size // self.nodes)

    @cached_property
    def _n_even(self) -> int:
        """Rows in all rounds of full batches."""
        return self.batches.n_even_rounds * self.batches.batch_size * self.batches.world_size

    @cached_property
    def _ragged_ends(self) -> list[int]:
        """Rows up to the end of each turn of the ragged rounds, of which there are two at most."""
        ranks_per_node = self.batches.world_size // self.nodes
        first_batch, last_batch = (
            n * self.batches.world_size for n in (self.batches.n_even_rounds, self.batches.n_steps)
        )
        return [
            self.batches.n_before(batch)
            for batch in range(first_batch + ranks_per_node, last_batch + 1, ranks_per_node)
        ]

    def _node_at(self, row: int) -> tuple[int, int]:
        """Return the node of a row in a batch, and the end of the node's turn."""
        if row < self._n_even:
            turn = row // self._n_turn
            return turn % self.nodes, (turn + 1) * self._n_turn
        turn = int(np.searchsorted(self._ragged_ends, row, side="right"))
        return turn % self.nodes, self._ragged_ends[turn]

    def _n_before(self, node: int, row: int) -> int:
        """Return the number of the node's rows in batches before this one."""
        rounds, offset = divmod(min(row, self._n_even), self.nodes * self._n_turn)
        n_before = rounds * self._n_turn + min(max(0, offset - node * self._n_turn), self._n_turn)
        for turn in range(node, len(self._ragged_ends), self.nodes):
            low, high = self._ragged_ends[turn - 1] if turn else self._n_even, self._ragged_ends[turn]
            n_before += min(max(0, row - low), high - low)
        return n_before

    def _left_out(self, node: int) -> int:
        """Return the number of the node's positions in no batch."""
        low, high = balanced_contiguous_shard(self.batches.n_left_out, self.nodes, node)
        return high - low

    def _node_left_out(self, row: int) -> tuple[int, int]:
        """Return the node of a position in no batch, and the end of the node's positions."""
        size, n_larger = divmod(self.batches.n_left_out, self.nodes)
        n_in_larger = n_larger * (size + 1)
        node = row // (size + 1) if row < n_in_larger else n_larger + (row - n_in_larger) // size
        return node, balanced_contiguous_shard(self.batches.n_left_out, self.nodes, node)[1]


@dataclass(frozen=True, eq=False)
class DealtRows:
    """The rows of a node, as runs of neighbors in storage order.

    Attributes:
        firsts: first row of each run, ascending; shape ``(n_runs,)``.
        begins: number of rows before each run, and in all runs; shape ``(n_runs + 1,)``.
    """

    firsts: IntArray
    begins: IntArray

    def rows(self, numbers: IntArray) -> IntArray:
        """Return the dataset's rows for row numbers of the node."""
        runs = np.searchsorted(self.begins, numbers, side="right") - 1
        rows: IntArray = self.firsts[runs] + (numbers - self.begins[runs])
        return rows

    def blocks(self, blocks: BlockTable) -> BlockTable:
        """Return the block table of the node's rows.

        Args:
            blocks: block table of all rows.
        """
        if blocks.n_blocks <= MAX_DEALT:
            return BlockTable(self.begins)
        runs = np.searchsorted(self.firsts, blocks.starts, side="right") - 1
        offsets = blocks.starts - self.firsts[runs]
        is_held = (runs >= 0) & (offsets < np.diff(self.begins)[runs])
        return BlockTable(np.union1d(self.begins, self.begins[runs[is_held]] + offsets[is_held]))


@dataclass(frozen=True, eq=False)
class DealtBlocks:
    """All blocks in one random order, the same in all epochs, divided among the nodes.

    Attributes:
        starts: first row of each block, or of each run of neighbors, and the number of rows at the end.
        order: the random order of the blocks.
        stops: number of rows up to and including each block, in this order.
    """

    starts: IntArray
    order: IntArray
    stops: IntArray

    def rows(self, low: int, high: int) -> DealtRows:
        """Return the rows at places ``[low, high)`` of this order; blocks at the borders are divided."""
        first = int(np.searchsorted(self.stops, low, side="right"))
        last = int(np.searchsorted(self.stops, high, side="left"))
        numbers, stops = self.order[first : last + 1], self.stops[first : last + 1]
        firsts = self.starts[numbers]
        sizes = self.starts[numbers + 1] - firsts
        n_before = np.maximum(low - (stops - sizes), 0)  # nonzero only for the first block
        n_after = np.maximum(stops - high, 0)  # nonzero only for the last block
        firsts, sizes = firsts + n_before, sizes - n_before - n_after
        order = np.argsort(firsts)
        return DealtRows(firsts[order], np.concatenate([[0], np.cumsum(sizes[order])]))


def deal_blocks(blocks: BlockTable, seed: int) -> DealtBlocks:
    """Return the order in which blocks are assigned to nodes.

    Args:
        blocks: the rows.
        seed: seed of the run.
    """
    starts = blocks.starts
    if blocks.n_blocks > MAX_DEALT:
        starts = np.append(starts[: -1 : -(-blocks.n_blocks // MAX_DEALT)], blocks.n_rows)
    order = permutation(len(starts) - 1, seed, 0, DEAL)(0, len(starts) - 1)
    return DealtBlocks(starts, order, np.cumsum(np.diff(starts)[order]))


class NodeOrder:
    """The sequence of an epoch's rows, with a node's rows at the node's positions.

    The order of a node is created on first use: a rank that reads its own batches creates one order. Time and memory
    are proportional to the number of blocks, at most ``MAX_DEALT`` in the order ``global``.

    Args:
        blocks: all rows.
        parameters: the settings of the order; ``streams`` counts the streams of all nodes.
        epoch: number of the epoch, from 0.
        drop_last: drop rows that do not fill a batch on every rank.
        draw: creates the order of a node's rows, from their block table, parameters and the epoch.

    Raises:
        H5ValueError: the number of ranks, or of streams, is not a multiple of the number of nodes.
    """

    def __init__(
        self,
        blocks: BlockTable,
        parameters: OrderParameters,
        epoch: int,
        *,
        drop_last: bool,
        draw: Callable[[BlockTable, OrderParameters, int], RowOrder] = order_rows,
    ) -> None:
        self._blocks, self._parameters, self._epoch, self._draw = blocks, parameters, epoch, draw
        self._turns = NodeTurns(
            TrainBatches(blocks.n_rows, parameters.batch_size, parameters.world_size, drop_last, epoch),
            parameters.nodes,
        )
        if parameters.mode == "chunks" and parameters.streams % parameters.nodes:
            raise H5ValueError(
                f"{parameters.streams} streams were requested for {parameters.nodes} nodes, which do not share "
                "streams. Pass a multiple of the number of nodes."
            )
        self._orders: dict[int, RowOrder] = {}

    def __call__(self, start: int, stop: int) -> IntArray:
        """Return the rows at the positions ``[start, stop)`` of the sequence, shape ``(stop - start,)``."""
        turns = self._turns.turns(start, stop)
        parts = [self._order(turn.node)(turn.start, turn.stop) for turn in turns]
        return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.empty(0, dtype=np.int64)

    def rows_of(self, node: int) -> DealtRows:
        """Return the rows of a node, the same in all epochs."""
        low = sum(map(self._turns.size, range(node)))
        return self._dealt.rows(low, low + self._turns.size(node))

    @cached_property
    def _dealt(self) -> DealtBlocks:
        return deal_blocks(self._blocks, self._parameters.seed)

    def _order(self, node: int) -> RowOrder:
        # Two threads may create the same order; either result may be kept.
        if node not in self._orders:
            self._orders[node] = self._order_within(node)
        return self._orders[node]

    def _order_within(self, node: int) -> RowOrder:
        node_rows, all_nodes = self.rows_of(node), self._parameters
        parameters = replace(
            all_nodes,
            seed=int(stream(all_nodes.seed, 0, DEAL, 1 + node).random_raw()),  # or nodes would be in step
            streams=max(1, all_nodes.streams // all_nodes.nodes),
            nodes=0,
            world_size=0,
        )
        blocks = node_rows.blocks(self._blocks) if parameters.mode == "chunks" else BlockTable(node_rows.begins)
        order = self._draw(blocks, parameters, self._epoch)
        return lambda start, stop: node_rows.rows(order(start, stop))


def label_entropy(blocks: BlockTable, parameters: OrderParameters, world_size: int, *, drop_last: bool) -> float:
    """Return a measure of mixing: the mean entropy of labels in batches of a file that is sorted by label, in nats.

    The file has ``N_LABELS`` equally frequent labels. The mean is over some batches of an epoch.

    Args:
        blocks: the rows.
        parameters: the settings of the order.
        world_size: number of ranks.
        drop_last: drop rows that do not fill a batch on every rank.
    """
    order = _any_order(blocks, parameters, 0)
    if parameters.nodes > 1:
        order = NodeOrder(blocks, parameters, 0, drop_last=drop_last, draw=_any_order)
    batches = TrainBatches(blocks.n_rows, parameters.batch_size, world_size, drop_last)
    n_batches = batches.n_steps * world_size
    sample = permutation(n_batches, parameters.seed, 0, MIXING)(0, min(n_batches, SAMPLED_BATCHES))
    entropies = []
    for batch in sample.tolist():
        labels = order(*batches.bounds(batch)) * N_LABELS // blocks.n_rows
        shares = np.bincount(labels) / len(labels)
        entropies.append(-float((shares * np.log(np.where(shares, shares, 1))).sum()))
    return float(np.mean(entropies)) if entropies else 0.0


def _any_order(blocks: BlockTable, parameters: OrderParameters, epoch: int) -> RowOrder:
    """Return an order that mixes like an epoch, without a table of all rows."""
    if parameters.mode == "global":
        return KeyedPermutation(blocks.n_rows, stream(parameters.seed, epoch, MIXING))
    return order_rows(blocks, parameters, epoch)
