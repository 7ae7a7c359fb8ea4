"""Thin torch samplers over the plans."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch.utils.data import DistributedSampler, SequentialSampler

from ..types import BatchToken
from .blocks import BlockTable
from .cuts import EvaluationCut
from .plan import EpochPlan, EvaluationPlan, OrderParameters, Segment, order_rows
from .replica import Replica, resolve_replica
from .sequences import EpochSequence, FirstSteps, Recipe, RowSequence

__all__ = ["EpochKeeper", "PlanSampler"]


class EpochKeeper(Protocol):
    """Who knows the epoch better than the sampler: a data module, from its trainer."""

    @property
    def is_attached(self) -> bool:
        """Whether there is a trainer."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values."""
        ...

    def start_epoch(self, sampler: PlanSampler) -> int | None:
        """The epoch of an iteration that starts now, or None; may raise to refuse the start.

        Tells the sampler what of the epoch is consumed.
        """
        ...


class PlanSampler(DistributedSampler[Any], SequentialSampler):
    """Yields one ``BatchToken`` a step: the rows of this rank's batches, in the order of the plan.

    By type it is both a ``DistributedSampler`` and a ``SequentialSampler``: by the first Lightning knows not to
    shard it again, by the second not to replace it under ``overfit_batches``.

    Args:
        blocks: the dataset's block table.
        parameters: what decides the order.
        batch_size: rows of a batch on one rank.
        drop_last: drop the ragged end of an epoch (training only).
        evaluation: contiguous shards, unpadded, instead of the training plan.
        rank: this replica; None resolves it when iteration starts.
        world_size: number of replicas; None likewise.
        samples: ask for lists of samples instead of collated batches.
        keeper: who keeps the epoch (a data module under a trainer), if anybody.
        chooses: the mode was chosen for the user: an epoch that was broken off may have had another.
        recipe: what epochs go through; None for each row once.
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
        keeper: EpochKeeper | None = None,
        chooses: bool = False,
        recipe: Recipe | None = None,
        repeats: bool = False,
    ) -> None:
        self.blocks = blocks
        self.recipe, self._repeats = recipe, repeats
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
        self._keeper = None if keeper is None else weakref.ref(keeper)  # which holds its loader, and so this
        self._consumed: tuple[int, OrderParameters, tuple[Segment, ...]] | None = None
        self._go_on_from: int | None = None
        self._first_epoch = 0  # of who counts epochs from the process's start

    @property
    def n_rows(self) -> int:
        """Rows of all ranks."""
        return self.blocks.n_rows

    @property
    def shards(self) -> dict[str, Any] | None:
        """What a position depends on besides where ranks hold shards, as plain values; None where they do not."""
        return None

    @property
    def replica(self) -> Replica:
        """This replica, as given or as resolved now."""
        return resolve_replica(*self._given)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch for the next iteration, where no trainer keeps it.

        Fabric calls this with the number of iterations since the process began. So where a position was loaded, and
        the first call after it names an earlier epoch, that call means the loaded epoch, and later ones those after.
        """
        if self._go_on_from is not None:
            self._first_epoch = max(0, self._go_on_from - epoch)
            self._go_on_from = None
        self.epoch = self._first_epoch + epoch

    def go_on_from(self, epoch: int) -> None:
        """The next iteration is of this epoch, which was broken off in an earlier process."""
        self.epoch, self._first_epoch, self._go_on_from = epoch, 0, epoch

    def starting_epoch(self) -> int:
        """The epoch that an iteration started now would be."""
        kept = keeper.start_epoch(self) if (keeper := self._kept_by()) is not None else None
        return self.epoch if kept is None else kept

    @property
    def is_kept(self) -> bool:
        """Whether somebody else keeps epoch and position."""
        return (keeper := self._kept_by()) is not None and keeper.is_attached

    def kept_state(self) -> dict[str, Any] | None:
        """The keeper's position; None where nobody else keeps it."""
        return keeper.state_dict() if (keeper := self._kept_by()) is not None and keeper.is_attached else None

    def _kept_by(self) -> EpochKeeper | None:
        return None if self._keeper is None else self._keeper()

    def __getstate__(self) -> dict[str, Any]:
        # Nobody keeps a copy's epoch; the one in another process has no trainer.
        return self.__dict__ | {"_keeper": None}

    def restore(self, epoch: int, segments: Sequence[Segment], order: OrderParameters | None = None) -> None:
        """Marks a part of an epoch as consumed; the iteration of that epoch goes on with the rest.

        Args:
            epoch: the epoch that was broken off.
            segments: what of it is consumed.
            order: what decided its order; None takes the present parameters.
        """
        self._consumed = (epoch, order or self.parameters, tuple(segments))

    def forget(self) -> None:
        """No part of any epoch is consumed."""
        self._consumed = None

    def consumed(self, epoch: int) -> tuple[Segment, ...]:
        """What of an epoch is marked as consumed."""
        return self._consumed[2] if self._consumed and self._consumed[0] == epoch else ()

    def order_of(self, epoch: int) -> OrderParameters:
        """What decides the order of an epoch: as saved for one that was broken off, else the present."""
        return self._consumed[1] if self._consumed and self._consumed[0] == epoch else self.present_order()

    def plan(self, epoch: int) -> EpochPlan:
        """This rank's plan of what is left of an epoch."""
        if self.evaluation:
            return self.evaluation_plan()
        plan = self._plan(self.sequence(epoch, self.order_of(epoch)), self.consumed(epoch))
        # An epoch of so many steps that more ranks began has more of them left for fewer.
        return plan if self.recipe is None or plan.n_steps <= len(self) else FirstSteps(plan, len(self))

    def _plan(self, sequence: EpochSequence, consumed: Sequence[Segment]) -> EpochPlan:
        rank, world_size = self.replica
        return sequence.plan(
            consumed, batch_size=self.batch_size, world_size=world_size, rank=rank, drop_last=self.drop_last
        )

    def evaluation_plan(self) -> EvaluationPlan:
        """This rank's plan of every evaluation."""
        rank, world_size = self.replica
        return EvaluationPlan(EvaluationCut(self.blocks.n_rows, self.batch_size, world_size, rank))

    def sequence(self, epoch: int, order: OrderParameters) -> EpochSequence:
        """What an epoch of training goes through, on all ranks together.

        Args:
            epoch: from 0.
            order: what decides its order.
        """
        if self.recipe is not None:
            return self.recipe.sequence(order, 0 if self._repeats else epoch, drop_last=self.drop_last)
        return RowSequence(order_rows(self.blocks, order, epoch), self.blocks.n_rows, epoch)

    def n_left(self, epoch: int) -> int:
        """Rows of an epoch that are not consumed, over all ranks."""
        sequence = self.sequence(epoch, self.order_of(epoch))
        return sequence.n_rows - sequence.n_consumed(self.consumed(epoch), drop_last=self.drop_last)

    def __iter__(self) -> Iterator[BatchToken]:  # type: ignore[override]  # a token is what our datasets take
        return self.tokens(self.starting_epoch())

    @property
    def first_position(self) -> int:
        """Place in the epoch's sequence, over all ranks, that this rank's plan counts from."""
        return 0

    def tokens(self, epoch: int) -> Iterator[BatchToken]:
        """What is left of an epoch on this rank; steps are counted from the start of the whole epoch."""
        plan = self.plan(epoch)
        first, before = len(self) - plan.n_steps, self.first_position
        for step in range(plan.n_steps):
            start = before + plan.bounds(step)[0]
            yield BatchToken(epoch, first + step, plan.rows(step), self.samples, self.seed, start)

    def __len__(self) -> int:
        """Steps of a whole epoch on this rank, also where a part of it is consumed."""
        if self.evaluation:
            return self.evaluation_plan().n_steps
        return self._plan(self.sequence(0, self.present_order()), ()).n_steps

    def present_order(self) -> OrderParameters:
        """What decides the order of an epoch that begins now."""
        order = replace(self.parameters, batch_size=self.batch_size)
        if self.recipe is None:
            return order
        n_units = self.recipe.n_units(self.batch_size, self.replica.world_size, drop_last=self.drop_last)
        return replace(order, recipe=self.recipe.text, n_units=n_units)
