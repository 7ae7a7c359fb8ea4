"""The plan of an epoch: one sequence of batches, the same on every rank, as a pure function of a few numbers.

Rank ``r`` of ``W`` takes batch ``t * W + r`` at step ``t``. What has been consumed is therefore always a prefix
of the sequence, and the position of a run is a list of segments ``(batch_size, world_size, batches)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from ..errors import H5ValueError
from ..types import IntArray
from .blocks import BlockTable
from .cuts import EvaluationCut, TrainingCut
from .permutation import permutation
from .window import WindowOrder

__all__ = [
    "PLAN_VERSION",
    "EpochPlan",
    "EvaluationPlan",
    "Mode",
    "Order",
    "OrderParameters",
    "Segment",
    "SourceOrder",
    "TrainingPlan",
    "consumed_rows",
    "order_rows",
]

PLAN_VERSION = 1
"""Part of every saved state: raised when the order of any mode changes."""

Mode = Literal["global", "window", "none"]
Order: TypeAlias = Callable[[int, int], IntArray]


class SourceOrder(NamedTuple):
    """The order of a source's rows; see ``OrderParameters``."""

    mode: Mode
    lanes: int = 1
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class OrderParameters:
    """What decides the order of rows, together with the epoch and the block table.

    Attributes:
        mode: ``global`` (one permutation of all rows), ``window`` (blocks mixed a window at a time) or
            ``none`` (storage order).
        seed: seed of the run.
        batch_size: rows of a batch when the epoch began; lanes take turns by batches.
        lanes: independent streams of blocks (``window``).
        window: blocks of a lane that are mixed at a time (``window``).
        version: of the orders' definition.
        recipe: what the sequence is made of where that is more than each row once; "" where it is not.
        n_units: batches or rows of such an epoch when it began.
        sources: the order of each source of a mixture.
    """

    mode: Mode
    seed: int = 0
    batch_size: int = 1
    lanes: int = 1
    window: int = 0
    version: int = PLAN_VERSION
    recipe: str = ""
    n_units: int = 0
    sources: tuple[SourceOrder, ...] = ()


class Segment(NamedTuple):
    """A stretch of an epoch that was consumed under the same settings.

    Attributes:
        batch_size: rows of a batch on one rank.
        world_size: number of ranks.
        n_batches: batches consumed, over all ranks.
    """

    batch_size: int
    world_size: int
    n_batches: int


class EpochPlan(Protocol):
    """What one rank does in one epoch."""

    @property
    def n_steps(self) -> int:
        """Batches that are left for this rank."""
        ...

    def rows(self, step: int) -> IntArray:
        """Indices into the dataset for a step, counted from 0 at the first that is left."""
        ...

    def bounds(self, step: int) -> tuple[int, int]:
        """First position in the epoch's sequence, and the one after the last, of a step's rows."""
        ...


def order_rows(blocks: BlockTable, parameters: OrderParameters, epoch: int, place: int = 0) -> Order:
    """The sequence of an epoch's rows, as a function from positions ``[start, stop)`` to row indices.

    Args:
        blocks: the rows.
        parameters: what decides the order.
        epoch: which epoch.
        place: sets orders apart that have the same parameters (``global`` alone).

    Raises:
        H5ValueError: the order belongs to another version of this package, or ``window`` has a number below 1.
    """
    if parameters.version != PLAN_VERSION:
        raise H5ValueError(
            f"an order of version {parameters.version} was asked for; this package has version {PLAN_VERSION}. "
            "Install the version of lightning_h5 that began the run, or start a new run."
        )
    if parameters.mode == "none":
        return lambda start, stop: np.arange(start, stop, dtype=np.int64)
    if parameters.mode == "global":
        # Drawn when the first rows are asked for: who counts steps or batches' sizes pays for no permutation.
        drawn = cache(lambda: permutation(blocks.n_rows, parameters.seed, epoch, place=place))
        return lambda start, stop: drawn()(start, stop)
    return WindowOrder(
        blocks=blocks,
        seed=parameters.seed,
        epoch=epoch,
        batch_size=parameters.batch_size,
        lanes=parameters.lanes,
        window=parameters.window,
    )


def consumed_rows(n_rows: int, segments: Sequence[Segment], drop_last: bool, epoch: int = 0) -> int:
    """Rows of the sequence that the segments have used up.

    Args:
        n_rows: rows of the epoch.
        segments: what was consumed, in the order of time; each cuts what the ones before it left.
        drop_last: whether a ragged end is dropped.
        epoch: which epoch.

    Raises:
        H5ValueError: a segment has more batches than were left.
    """
    done = 0
    for segment in segments:
        cut = TrainingCut(n_rows - done, segment.batch_size, segment.world_size, drop_last, epoch, done)
        if segment.n_batches > cut.n_steps * cut.world_size:
            raise H5ValueError(
                f"{segment} was asked for, and {n_rows - done} rows are left of {n_rows}. Ask for fewer batches."
            )
        done += cut.stop(segment.n_batches - 1)
    return done


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """This rank's share of what is left of the sequence.

    Attributes:
        order: the epoch's sequence of rows.
        cut: how the rest of it is cut into batches.
        rank: this rank.
        consumed: rows of the sequence that are used up already.
    """

    order: Order
    cut: TrainingCut
    rank: int
    consumed: int = 0

    @property
    def n_steps(self) -> int:
        """Steps that are left, equal on all ranks."""
        return self.cut.n_steps

    def rows(self, step: int) -> IntArray:
        """Indices into the dataset for a step, shape ``(batch,)``."""
        return self.order(*self.bounds(step))

    def bounds(self, step: int) -> tuple[int, int]:
        """First position in the epoch's sequence, and the one after the last, of a step's rows."""
        batch = step * self.cut.world_size + self.rank
        start, stop = self.cut.bounds(batch)
        return self.consumed + start, self.consumed + stop


@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """This rank's contiguous shard in storage order.

    Attributes:
        cut: how the shard is cut into batches.
        first: row that is index 0 of the dataset.
    """

    cut: EvaluationCut
    first: int = 0

    @property
    def n_steps(self) -> int:
        """Batches of this rank."""
        return self.cut.n_steps

    def rows(self, step: int) -> IntArray:
        """Indices into the dataset for a step, shape ``(batch,)``."""
        start, stop = self.bounds(step)
        return np.arange(start - self.first, stop - self.first, dtype=np.int64)

    def bounds(self, step: int) -> tuple[int, int]:
        """First row, and the row after the last, of a step, counted over all ranks."""
        return self.cut.bounds(step)
