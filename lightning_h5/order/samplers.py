"""The replica of this process, and torch samplers over its plans."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch.distributed
from torch.utils.data import DistributedSampler, SequentialSampler

from ..errors import H5ValueError
from ..types import BatchToken
from .epoch import EachRowOnce, EpochPlan, EpochRecipe, EpochSequence, EvaluationBatches, OrderParameters
from .position import Position
from .window import BlockTable

__all__ = [
    "EpochSource",
    "PlanSampler",
    "Replica",
    "launched_replica",
    "resolve_replica",
]


class Replica(NamedTuple):
    """One data-parallel copy of the model.

    Attributes:
        rank: this copy, from 0.
        world_size: number of copies.
    """

    rank: int
    world_size: int


def resolve_replica(rank: int | None = None, world_size: int | None = None) -> Replica:
    """Return the replica given, or that of an initialized ``torch.distributed``, or 0 of 1.

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


def launched_replica() -> Replica | None:
    """Return the replica that the environment names in ``RANK`` and ``WORLD_SIZE``, as ``torchrun`` sets them.

    Returns:
        None if it names none, or if ``torch.distributed`` is initialized, which knows better.

    Raises:
        H5ValueError: the two make no sense.
    """
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank and world_size) or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if not (rank.isdecimal() and world_size.isdecimal()):
        raise H5ValueError(
            f"the environment has RANK={rank!r} and WORLD_SIZE={world_size!r}. Set both to numbers, as torchrun does, "
            "or neither; or pass rank and world_size."
        )
    return resolve_replica(int(rank), int(world_size))


class EpochSource(Protocol):
    """What knows the epoch better than the sampler: a data module, from its trainer."""

    @property
    def is_attached(self) -> bool:
        """Whether it has a trainer that trains."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values."""
        ...

    def start_epoch(self, sampler: PlanSampler) -> int | None:
        """Return the epoch of an iteration that starts now, and restore the sampler's position in it.

        Return None if no trainer keeps them.

        Raises:
            H5ResumeError: a position was loaded and not applied.
        """
        ...


class PlanSampler(DistributedSampler[Any], SequentialSampler):
    """Yields one ``BatchToken`` per step: the rows of this rank's batches, in the order of the plan.

    By type it is both a ``DistributedSampler`` and a ``SequentialSampler``: by the first Lightning knows not to
    shard it again, by the second not to replace it under ``overfit_batches``.

    Args:
        blocks: the dataset's block table.
        parameters: what decides the order.
        batch_size: rows of a batch on one rank.
        drop_last: drop the ragged end of an epoch (training only).
        evaluation: contiguous shards, unpadded, instead of the training plan.
        rank: this replica; None resolves it when iteration starts.
        world_size: number of replicas; None resolves it when iteration starts.
        samples: ask for lists of samples instead of collated batches.
        epoch_source: what keeps epoch and position (a data module under a trainer), if anything.
        chooses: the package chose the mode: an interrupted epoch may have had another.
        recipe: what epochs visit; None for each row once.
        repeats: all epochs of a recipe are like the first (``overfit_batches``).
    """

    # The two parents' constructors want a sized dataset, and resolve the rank at once.
    def __init__(  # pylint: disable=super-init-not-called
        self,
        blocks: BlockTable,
        parameters: OrderParameters,
        *,
        batch_size: int,
        drop_last: bool = False,
        evaluation: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        samples: bool = False,
        epoch_source: EpochSource | None = None,
        chooses: bool = False,
        recipe: EpochRecipe | None = None,
        repeats: bool = False,
    ) -> None:
        self.blocks = blocks
        self.recipe: EpochRecipe = EachRowOnce(blocks) if recipe is None else recipe
        self._repeats = repeats and recipe is not None
        self.parameters = parameters
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.evaluation = evaluation
        self.samples = samples
        self.chooses = chooses
        self.epoch = 0
        self.shuffle = parameters.mode != "none"
        self.seed = parameters.seed
        self._given = (rank, world_size)
        # Weak, since the source holds its loader, and so this.
        self._epoch_source = None if epoch_source is None else weakref.ref(epoch_source)
        self._restored: Position | None = None
        self._resumed_epoch: int | None = None
        self._epoch_offset = 0  # for callers that count epochs from the process's start

    @property
    def n_rows(self) -> int:
        """Rows of all ranks."""
        return self.blocks.n_rows

    @property
    def shards(self) -> dict[str, Any] | None:
        """If ranks hold shards, what else a position depends on, as plain values."""
        return None

    @property
    def replica(self) -> Replica:
        """This replica, as given or as resolved now."""
        return resolve_replica(*self._given)

    # What torch's `DistributedSampler` has as attributes, set by a constructor that is not called here.

    @property
    def rank(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Number of this replica, from 0."""
        return self.replica.rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Number of replicas."""
        return self.replica.world_size

    def __repr__(self) -> str:
        if self.evaluation:
            order = "in storage order"
        else:
            what = f"of {self.recipe.text}" if self.recipe.text else repr(self.parameters.mode)
            order = f"order {what}, seed {self.seed}, epoch {self.epoch}"
        return (
            f"{type(self).__name__}({self.n_rows:,} rows, rank {self.rank} of {self.num_replicas}, "
            f"batch_size {self.batch_size}, {order})"
        )

    # Epoch and position ----------------------------------------------------------------------------------------

    @property
    def epoch_source(self) -> EpochSource | None:
        """What keeps epoch and position, while it is attached; None if this sampler keeps them itself."""
        source = self._source()
        return source if source is not None and source.is_attached else None

    def _source(self) -> EpochSource | None:
        return None if self._epoch_source is None else self._epoch_source()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epoch_source": None}  # a copy in another process has no trainer

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, if no trainer keeps it.

        Fabric calls this with the number of iterations since the process began. So if a position was loaded, and the
        first call after it names an earlier epoch, that call means the loaded epoch, and later ones those after.
        """
        if self._resumed_epoch is not None:
            self._epoch_offset = max(0, self._resumed_epoch - epoch)
            self._resumed_epoch = None
        self.epoch = self._epoch_offset + epoch

    def resume_epoch(self, epoch: int) -> None:
        """Make the next iteration one of this epoch, which an earlier process left in its middle."""
        self.epoch, self._epoch_offset, self._resumed_epoch = epoch, 0, epoch

    def starting_epoch(self) -> int:
        """Return the epoch of an iteration that starts now."""
        source = self._source()
        epoch = None if source is None else source.start_epoch(self)
        return self.epoch if epoch is None else epoch

    def restore(self, position: Position | None) -> None:
        """Set the position from which iterations of its epoch go on; None for the start of every epoch."""
        self._restored = position

    def position(self, epoch: int) -> Position:
        """Return the position at which an iteration of an epoch begins: as restored, or the epoch's start."""
        restored = self._restored
        return restored if restored and restored.epoch == epoch else Position(epoch, (), self.present_order())

    def present_order(self) -> OrderParameters:
        """Return what decides the order of an epoch that begins now."""
        n_units = self.recipe.n_units(self.batch_size, self.replica.world_size, drop_last=self.drop_last)
        return replace(self.parameters, batch_size=self.batch_size, recipe=self.recipe.text, n_units=n_units)

    # Plans -----------------------------------------------------------------------------------------------------

    def sequence(self, epoch: int, order: OrderParameters) -> EpochSequence:
        """Return what an epoch of training visits, on all ranks together.

        Args:
            epoch: from 0.
            order: what decides its order.
        """
        return self.recipe.sequence(order, 0 if self._repeats else epoch, drop_last=self.drop_last)

    def plan(self, epoch: int) -> EpochPlan:
        """Return this rank's plan of what is left of an epoch."""
        if self.evaluation:
            return self._evaluation_plan()
        plan = self._training_plan(self.position(epoch))
        # An epoch of a fixed number of steps that more ranks began has more of them left for fewer.
        return plan if plan.n_steps <= len(self) else replace(plan, n_steps=len(self))

    def _training_plan(self, position: Position) -> EpochPlan:
        rank, world_size = self.replica
        return self.sequence(position.epoch, position.order).plan(
            position.segments, batch_size=self.batch_size, world_size=world_size, rank=rank, drop_last=self.drop_last
        )

    def _evaluation_plan(self) -> EpochPlan:
        rank, world_size = self.replica
        return EvaluationBatches(self.blocks.n_rows, self.batch_size, world_size, rank).plan()

    def n_left(self, epoch: int) -> int:
        """Return the rows of an epoch that are not consumed, over all ranks."""
        position = self.position(epoch)
        sequence = self.sequence(epoch, position.order)
        return sequence.n_rows - sequence.n_consumed(position.segments, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[BatchToken]:  # type: ignore[override]  # a token is what our datasets take
        return self.tokens(self.starting_epoch())

    @property
    def first_position(self) -> int:
        """Place in the epoch's sequence, over all ranks, that this rank's plan counts from."""
        return 0

    def tokens(self, epoch: int) -> Iterator[BatchToken]:
        """Yield what is left of an epoch on this rank; steps are counted from the start of the whole epoch."""
        plan = self.plan(epoch)
        first_step = len(self) - plan.n_steps
        return (
            BatchToken(
                epoch,
                first_step + step,
                plan.rows(step),
                self.samples,
                self.seed,
                self.first_position + plan.bounds(step)[0],
            )
            for step in range(plan.n_steps)
        )

    def __len__(self) -> int:
        """Steps of a whole epoch on this rank, also if a part of it is consumed."""
        if self.evaluation:
            return self._evaluation_plan().n_steps
        return self._training_plan(Position(0, (), self.present_order())).n_steps
