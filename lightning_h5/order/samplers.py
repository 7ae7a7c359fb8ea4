"""Which replica this process is, and thin torch samplers over its plans."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch.distributed
from torch.utils.data import DistributedSampler, SequentialSampler

from ..errors import H5ValueError
from ..types import BatchToken
from .epoch import EachRowOnce, EpochRecipe, EpochSequence, FirstSteps, ShardRows
from .permutation import permutation
from .plan import EpochPlan, EvaluationCut, EvaluationPlan, OrderParameters, Segment, tokens_of
from .shards import RankShard
from .window import BlockTable

__all__ = [
    "EpochShuffleSampler",
    "EpochSource",
    "PlanSampler",
    "Replica",
    "ShardSampler",
    "launched_replica",
    "resolve_replica",
]


EPOCH_SHUFFLE = 9  # purpose of the random stream


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


def launched_replica() -> Replica | None:
    """The replica that the environment names in ``RANK`` and ``WORLD_SIZE``, as ``torchrun`` sets them.

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
        epoch_source: who keeps the epoch (a data module under a trainer), if anybody.
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
        self._keeper = (
            None if epoch_source is None else weakref.ref(epoch_source)
        )  # which holds its loader, and so this
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
        kept = epoch_source.start_epoch(self) if (epoch_source := self._kept_by()) is not None else None
        return self.epoch if kept is None else kept

    @property
    def is_kept(self) -> bool:
        """Whether somebody else keeps epoch and position."""
        return (epoch_source := self._kept_by()) is not None and epoch_source.is_attached

    def kept_state(self) -> dict[str, Any] | None:
        """The keeper's position; None where nobody else keeps it."""
        return (
            epoch_source.state_dict()
            if (epoch_source := self._kept_by()) is not None and epoch_source.is_attached
            else None
        )

    def _kept_by(self) -> EpochSource | None:
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
        # An epoch of a fixed number of steps that more ranks began has more of them left for fewer.
        return plan if plan.n_steps <= len(self) else FirstSteps(plan, len(self))

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
        return self.recipe.sequence(order, 0 if self._repeats else epoch, drop_last=self.drop_last)

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
        return tokens_of(
            plan,
            epoch=epoch,
            first_step=len(self) - plan.n_steps,
            first_position=self.first_position,
            samples=self.samples,
            seed=self.seed,
        )

    def __len__(self) -> int:
        """Steps of a whole epoch on this rank, also where a part of it is consumed."""
        if self.evaluation:
            return self.evaluation_plan().n_steps
        return self._plan(self.sequence(0, self.present_order()), ()).n_steps

    def present_order(self) -> OrderParameters:
        """What decides the order of an epoch that begins now."""
        n_units = self.recipe.n_units(self.batch_size, self.replica.world_size, drop_last=self.drop_last)
        return replace(self.parameters, batch_size=self.batch_size, recipe=self.recipe.text, n_units=n_units)


class ShardSampler(PlanSampler):
    """Yields one ``BatchToken`` a step of rows that this rank holds, counted from 0 in its shard.

    All ranks take equally many steps. A position is one within each rank's own order, so it holds for the same number
    of ranks alone.

    Args:
        shard: what this rank holds.
        parameters: what decides the order: the seed, and whether rows are shuffled.
        batch_size: rows of a batch on one rank.
        drop_last: drop the ragged end of an epoch (training only).
        evaluation: all rows of the shard in storage order, instead of the training plan.
        samples: ask for lists of samples instead of collated batches.
        epoch_source: who keeps the epoch, if anybody.
        rotates: other rows sit out each epoch; else all epochs have the same.
        is_given: somebody said which replica this is. Else it is looked at when iteration starts: rows that are held
            cannot become another rank's.

    Raises:
        H5ValueError: when iteration starts, where the shard is not this rank's.
    """

    def __init__(
        self,
        shard: RankShard,
        parameters: OrderParameters,
        *,
        batch_size: int,
        drop_last: bool = False,
        evaluation: bool = False,
        samples: bool = False,
        epoch_source: EpochSource | None = None,
        rotates: bool = True,
        is_given: bool = True,
    ) -> None:
        self.shard, self._is_given = shard, is_given
        blocks = BlockTable.of_sizes([shard.n_trained])
        super().__init__(
            blocks,
            parameters,
            batch_size=batch_size,
            drop_last=drop_last,
            evaluation=evaluation,
            rank=0,  # of one: what others hold is none of its business
            world_size=1,
            samples=samples,
            epoch_source=epoch_source,
            recipe=ShardRows(blocks, shard, rotates),
        )

    @property
    def n_rows(self) -> int:
        """Rows of all ranks."""
        return self.shard.n_rows

    @property
    def rank(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Number of the replica that holds these rows, from 0."""
        return self.shard.rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Number of replicas that hold a shard each."""
        return self.shard.world_size

    @property
    def shards(self) -> dict[str, Any]:
        """What a position in a shard depends on besides, as plain values."""
        shard = self.shard
        return {"mode": shard.mode, "world_size": shard.world_size, "reshard_every": shard.reshard_every}

    def starting_epoch(self) -> int:
        """See ``PlanSampler.starting_epoch``."""
        now, held = resolve_replica(), Replica(self.shard.rank, self.shard.world_size)
        if not self._is_given and now != held:
            raise H5ValueError(
                f"batches were asked for by rank {now.rank} of {now.world_size}, and the rows were loaded for rank "
                f"{held.rank} of {held.world_size}. Pass the data module to the Trainer (datamodule=), which sets it "
                "up once there are ranks; or pass rank and world_size to it."
            )
        return super().starting_epoch()

    @property
    def first_position(self) -> int:
        """Places in the epoch's sequence count over all ranks, one after the other."""
        return 0 if self.evaluation else self.shard.rank * self.blocks.n_rows

    def evaluation_plan(self) -> EvaluationPlan:
        """This rank's plan of every evaluation: of all rows that it holds."""
        shard = self.shard
        cut = EvaluationCut(shard.n_rows, self.batch_size, shard.world_size, shard.rank)
        return EvaluationPlan(cut, first=cut.shard[0])


class EpochShuffleSampler(DistributedSampler[Any]):
    """Indices of a dataset that holds one rank's rows, in an order of their own for each epoch and rank.

    For ``DataLoader(dataset, sampler=...)``; the data modules of this package have a sampler of theirs. By type it is a
    ``DistributedSampler``, so that Lightning does not shard the rank's rows once more, and calls ``set_epoch``.

    Args:
        data_len: rows of this rank, ``len(dataset)``.
        seed: of the order. Neighbouring seeds, epochs and ranks have orders that have nothing in common.
        shuffle: False gives the rows in storage order.
        num_samples: rows that an epoch takes, where ranks hold different numbers of them and must make equally many
            steps: pass ``dataset.rows_on_each_rank``. Those that sit out are others each epoch. None takes all.

    Raises:
        H5ValueError: a number makes no sense.
    """

    # The parent's constructor wants a sized dataset, and a rank at once.
    def __init__(  # pylint: disable=super-init-not-called
        self, data_len: int, seed: int = 0, shuffle: bool = True, *, num_samples: int | None = None
    ) -> None:
        if data_len < 0 or not 0 <= (data_len if num_samples is None else num_samples) <= data_len:
            raise H5ValueError(
                f"EpochShuffleSampler(data_len={data_len}, num_samples={num_samples}) was asked for. Pass the number "
                "of rows of this rank, and at most as many for an epoch."
            )
        self.data_len, self.seed, self.shuffle = data_len, seed, shuffle
        self.num_samples = data_len if num_samples is None else num_samples
        self.epoch = 0

    # The rank is looked at when it is needed: a sampler may be made before the process group is.

    @property
    def rank(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Rank of this process in the process group; 0 without one. The order depends on it."""
        return resolve_replica().rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Number of ranks in the process group; 1 without one."""
        return resolve_replica().world_size

    def __repr__(self) -> str:
        order = f"shuffled with seed {self.seed}, epoch {self.epoch}" if self.shuffle else "in storage order"
        return (
            f"{type(self).__name__}({self.num_samples:,} of {self.data_len:,} rows, rank {self.rank} of "
            f"{self.num_replicas}, {order})"
        )

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch for the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        n_absent = self.data_len - self.num_samples
        rows = np.arange(self.data_len)
        if n_absent:
            rows = np.sort(np.roll(rows, -self.epoch * n_absent)[n_absent:])
        if self.shuffle:
            place = 1 + self.rank
            rows = rows[permutation(len(rows), self.seed, self.epoch, EPOCH_SHUFFLE, place)(0, len(rows))]
        return iter(rows.tolist())

    def __len__(self) -> int:
        return self.num_samples
