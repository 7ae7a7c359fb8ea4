"""The torch samplers: over the plans of an epoch, for all rows or for the rows of one rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DistributedSampler, SequentialSampler

from ..errors import H5ValueError
from ..types import BatchToken, IntArray
from .permutation import permutation
from .plan import EpochPlan, EpochRecipe, OrderParameters, Segment, evaluation_plan
from .position import Position
from .recipes import RowWeights
from .run_order import RunOrder
from .shard_rows import ShardRows
from .shards import (
    EvaluationBatches,
    RankShard,
    Replica,
    equal_rows,
    present_replica,
    resolve_replica,
)
from .window import BlockTable

__all__ = ["EpochShuffleSampler", "EpochSource", "PlanSampler", "ShardSampler"]

EPOCH_SHUFFLE = 9  # purpose of the random stream


class EpochSource(Protocol):
    """The owner of the epoch, if it is not the sampler: a data module, which has it from its trainer."""

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

    def next_epoch(self, sampler: PlanSampler, epoch: int) -> int | None:
        """Return the epoch that follows one that starts now over all batches of a sampler, if one is sure to."""
        ...

    def n_taken(self, sampler: PlanSampler, epoch: int, iteration: object) -> int | None:
        """Return the number of batches that the owner takes of an epoch that starts now, or next; None for all.

        Args:
            sampler: the sampler.
            epoch: the epoch.
            iteration: over the loader; only the owner's own ends early.
        """
        ...


class PlanSampler(RunOrder, DistributedSampler[Any], SequentialSampler):
    """Yields one ``BatchToken`` per step: the rows of this rank's batches, in the order of the plan.

    It is a subclass of ``DistributedSampler``, so that Lightning does not shard it again, and of ``SequentialSampler``,
    so that Lightning does not replace it under ``overfit_batches``.

    Args:
        blocks: the dataset's block table.
        parameters: the settings of the order.
        batch_size: rows of a batch on one rank.
        drop_last: drop the ragged end of an epoch (training only).
        evaluation: contiguous shards, unpadded, instead of the training plan.
        rank: this replica; None resolves it when iteration starts.
        world_size: number of replicas; None resolves it when iteration starts.
        samples: request lists of samples instead of collated batches.
        epoch_source: the owner of epoch and position (a data module under a trainer), if it is not the sampler.
        chooses: whether the package chose the mode; an interrupted epoch may have had another mode.
        recipe: recipe of epochs; None for each row once.
        repeats: whether all epochs of a recipe equal the first one (``overfit_batches``).
        ends: rows at which the shards of an evaluation may end; None for all.
    """

    def __init__(
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
        ends: IntArray | None = None,
    ) -> None:
        # torch's constructors are not called: they require a sized dataset and resolve the rank immediately.
        RunOrder.__init__(
            self,
            blocks,
            parameters,
            batch_size=batch_size,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            chooses=chooses,
            recipe=recipe,
            repeats=repeats,
        )
        self.ends = ends
        self.evaluation = evaluation
        self.samples = samples
        self.epoch = 0
        self.shuffle = parameters.mode != "none"
        self.seed = parameters.seed
        # Weak, since the source refers to its loader, and so to this sampler.
        self._epoch_source = None if epoch_source is None else weakref.ref(epoch_source)
        self._restored: Position | None = None
        self._earlier: Position | None = None  # in an epoch that later ones continue from
        self._resumed_epoch: int | None = None
        self._epoch_offset = 0  # for callers that count epochs from the start of the process
        self._is_epoch_set = False

    # Attributes of torch's `DistributedSampler`, whose constructor is not called.

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
            order_text = f"of {self.recipe.text}" if self.recipe.text else repr(self.parameters.mode)
            order_text += f" within {self.parameters.nodes} nodes" if self.parameters.nodes > 1 else ""
            order = f"order {order_text}, seed {self.seed}, epoch {self.epoch}"
        return (
            f"{type(self).__name__}({self.n_rows:,} rows, rank {self.rank} of {self.num_replicas}, "
            f"batch_size {self.batch_size}, {order})"
        )

    # Epoch and position ----------------------------------------------------------------------------------------

    @property
    def epoch_source(self) -> EpochSource | None:
        """The owner of epoch and position, while it is attached; None if this sampler keeps them itself."""
        source = self._source()
        return source if source is not None and source.is_attached else None

    def _source(self) -> EpochSource | None:
        return None if self._epoch_source is None else self._epoch_source()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epoch_source": None}  # no trainer in another process

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, if no trainer keeps it. From then on, complete passes do not advance it.

        Fabric calls this with the number of iterations since the start of the process. So if a position was loaded, and
        the first call after loading names an earlier epoch, this call means the loaded epoch, and later calls the
        epochs after it.
        """
        if self._resumed_epoch is not None:
            self._epoch_offset = max(0, self._resumed_epoch - epoch)
            self._resumed_epoch = None
        self.epoch = self._epoch_offset + epoch
        self._is_epoch_set = True

    @property
    def counts_passes(self) -> bool:
        """Whether a complete pass advances the epoch: it was never set, and no trainer keeps it."""
        return not (self._is_epoch_set or self.evaluation or self.epoch_source)

    def complete(self, epoch: int) -> None:
        """Note that a pass over an epoch is complete: the next one is over the next epoch, if passes are counted."""
        if self.counts_passes:
            self.epoch, self._resumed_epoch = epoch + 1, None

    def resume_epoch(self, epoch: int) -> None:
        """Let the next iteration continue this epoch, which an earlier process has interrupted."""
        self.epoch, self._epoch_offset, self._resumed_epoch = epoch, 0, epoch

    def starting_epoch(self) -> int:
        """Return the epoch of an iteration that starts now."""
        source = self._source()
        epoch = None if source is None else source.start_epoch(self)
        return self.epoch if epoch is None else epoch

    def next_epoch(self, epoch: int) -> int | None:
        """Return the epoch after one that starts now; None if no epoch is certain, or no trainer keeps epochs."""
        source = self._source()
        return None if source is None else source.next_epoch(self, epoch)

    def n_taken(self, epoch: int, iteration: object) -> int | None:
        """Return the number of batches that an iteration takes of an epoch that starts now, or next; None for all."""
        source = self._source()
        return None if source is None else source.n_taken(self, epoch, iteration)

    def restore(self, position: Position | None) -> None:
        """Set the position at which iterations of its epoch continue; None for the start of every epoch."""
        self._restored = position
        if position is not None:
            self.continue_from(position)

    def continue_from(self, position: Position) -> None:
        """Set a position of this run. The next epoch begins at the end of its epoch.

        Epochs of a mixture with weights that change count all earlier units, and there may have been more ranks then.
        """
        self._earlier = position

    def order_in_epoch(self, epoch: int) -> OrderParameters:
        """Return the settings of the order of an epoch that begins now."""
        order, earlier = self.present_order(), self._earlier
        if not self.recipe.continues or self._repeats or earlier is None or epoch < earlier.epoch:
            return order
        first = earlier.first_unit
        if epoch > earlier.epoch:
            first += earlier.order.n_units + (epoch - earlier.epoch - 1) * order.n_units
        return order if first == epoch * order.n_units else replace(order, first_unit=first)

    def unit(self, position: Position) -> int:
        """Return the batches, or rows, of the run before a position, over all ranks; for a recipe that continues."""
        return position.first_unit + self.recipe.n_units_of(position.segments)

    def position(self, epoch: int) -> Position:
        """Return the position at which an iteration of an epoch begins: as restored, or the epoch's start."""
        restored = self._restored
        return restored if restored and restored.epoch == epoch else Position(epoch, (), self.order_in_epoch(epoch))

    # Plans -----------------------------------------------------------------------------------------------------

    def plan(self, epoch: int) -> EpochPlan:
        """Return this rank's plan for the rest of an epoch."""
        if self.evaluation:
            return self._evaluation_plan()
        plan = self._training_plan(self.position(epoch))
        # An epoch with a fixed number of steps that was begun on more ranks has more steps left on fewer ranks.
        return plan if plan.n_steps <= len(self) else replace(plan, n_steps=len(self))

    def _training_plan(self, position: Position) -> EpochPlan:
        rank, world_size = self.replica
        return self.sequence(position.epoch, position.order).plan(
            position.segments, batch_size=self.batch_size, world_size=world_size, rank=rank, drop_last=self.drop_last
        )

    def _evaluation_plan(self) -> EpochPlan:
        return evaluation_plan(self._evaluation_batches())

    def _evaluation_batches(self) -> EvaluationBatches:
        rank, world_size = self.replica
        return self.recipe.evaluation(self.blocks.n_rows, self.batch_size, world_size, rank, self.ends)

    @property
    def has_idle_rank(self) -> bool:
        """Whether some rank has no batch in evaluation, the same on all ranks. Lightning skips its loop there."""
        return self.evaluation and self._evaluation_batches().has_idle_rank

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
        """Yield the rest of an epoch on this rank; steps are counted from the start of the whole epoch."""
        plan = self.plan(epoch)
        return plan.tokens(
            epoch,
            len(self) - plan.n_steps,
            first_position=self.first_position,
            samples=self.samples,
            seed=self.seed,
        )

    def __len__(self) -> int:
        """Steps of a whole epoch on this rank, also if a part of it is consumed."""
        if self.evaluation:
            return self._evaluation_plan().n_steps
        return self._training_plan(Position(0, (), self.present_order())).n_steps


class ShardSampler(PlanSampler):
    """Yields one ``BatchToken`` per step of rows that this rank holds, counted from 0 in its shard.

    All ranks run the same number of steps. A position counts in each rank's own order, so it is valid only for the same
    number of ranks.

    Args:
        shard: the rows that this rank holds.
        parameters: the settings of the order: the seed, and whether rows are shuffled.
        recipe: recipe of epochs over the shard's rows; None for each row once, or for draws by ``weights``.
        weights: weights of the rows of all ranks; None for each row once.
        is_given: the caller named the replica. If False, it is checked when iteration starts: rows that are held
            cannot become another rank's.
        options: others of ``PlanSampler``. ``evaluation`` is all rows of the shard in storage order.

    Raises:
        H5ValueError: when iteration starts, if the shard is not this rank's.
    """

    def __init__(
        self,
        shard: RankShard,
        parameters: OrderParameters,
        *,
        recipe: EpochRecipe | None = None,
        weights: RowWeights | None = None,
        is_given: bool = True,
        **options: Any,
    ) -> None:
        self.shard, self._is_given = shard, is_given
        blocks, recipe = BlockTable.of_sizes([shard.n_held]), recipe or ShardRows(shard, weights)
        # Rank 0 of 1: a position counts the batches of each rank.
        super().__init__(blocks, parameters, rank=0, world_size=1, recipe=recipe, **options)

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
        """See ``RunOrder.shards``."""
        shard = self.shard
        shards = {"mode": shard.mode, "world_size": shard.world_size, "reshard_every": shard.reshard_every}
        # Version 0.1.0 left out rows of larger shards: its positions mean other rows.
        return shards | ({"sizes": "differ"} if shard.n_rows % shard.world_size else {})

    def starting_epoch(self) -> int:
        """See ``PlanSampler.starting_epoch``."""
        replica, owner = resolve_replica(), Replica(self.shard.rank, self.shard.world_size)
        if not self._is_given and replica != owner:
            raise H5ValueError(
                f"batches were requested by rank {replica.rank} of {replica.world_size}, but the rows were loaded for "
                f"rank {owner.rank} of {owner.world_size}. Pass the data module to the Trainer (datamodule=), which "
                "sets it up once there are ranks; or pass rank and world_size to it."
            )
        return super().starting_epoch()

    def merged(self, epoch: int, order: OrderParameters, segments: Sequence[Segment]) -> Segment:
        """See ``RunOrder.merged``: rows of all ranks, as ``ShardSequence`` counts them."""
        return super().merged(epoch, order, segments)._replace(world_size=self.shard.world_size)

    @property
    def first_position(self) -> int:
        """See ``PlanSampler.first_position``."""
        return 0 if self.evaluation else self.recipe.first_position

    def _evaluation_plan(self) -> EpochPlan:
        batches = self._evaluation_batches()
        return evaluation_plan(batches, first=batches.shard[0])

    def _evaluation_batches(self) -> EvaluationBatches:
        shard = self.shard
        return self.recipe.evaluation(shard.n_rows, self.batch_size, shard.world_size, shard.rank, shard.ends)


class EpochShuffleSampler(DistributedSampler[Any]):
    """Yields indices of a dataset that holds one rank's rows, in a different order for each epoch and rank.

    For ``DataLoader(dataset, sampler=...)``; the data modules of this package have their own sampler. It is a subclass
    of ``DistributedSampler``, so that Lightning does not shard the rank's rows again, and calls ``set_epoch``. In a
    loop that never calls ``set_epoch``, a complete iteration advances the epoch.

    Args:
        data_len: number of rows of this rank, ``len(dataset)``.
        seed: seed of the order. Orders of neighboring seeds, epochs and ranks are unrelated.
        shuffle: shuffle the rows; False yields them in storage order.
        num_samples: number of rows per epoch; each epoch leaves out different rows. None uses all rows. With shuffling,
            and if ``data_len`` is ``len(dataset)`` of a ``RankMemCachedH5Dataset``, None uses the rows of the smallest
            shard (``dataset.rows_on_each_rank``), so that ranks run the same number of steps.

    Raises:
        H5ValueError: a number is out of range.
    """

    # The parent's constructor requires a sized dataset and a rank.
    def __init__(  # pylint: disable=super-init-not-called
        self, data_len: int, seed: int = 0, shuffle: bool = True, *, num_samples: int | None = None
    ) -> None:
        if data_len < 0 or not 0 <= (data_len if num_samples is None else num_samples) <= data_len:
            raise H5ValueError(
                f"EpochShuffleSampler(data_len={data_len}, num_samples={num_samples}) was requested. Pass the number "
                "of rows of this rank, and at most the same number per epoch."
            )
        self.data_len, self.seed, self.shuffle = data_len, seed, shuffle
        if num_samples is None:
            num_samples = equal_rows(data_len) if shuffle else data_len
        self.num_samples = num_samples
        self.epoch = 0
        self._is_epoch_set = False

    # The rank is resolved on demand: a sampler may be created before the process group.

    @property
    def rank(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Rank of this process in the process group, else in the environment, else 0. The order depends on it."""
        return present_replica().rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Number of ranks in the process group, else in the environment, else 1."""
        return present_replica().world_size

    def __repr__(self) -> str:
        order = f"shuffled with seed {self.seed}, epoch {self.epoch}" if self.shuffle else "in storage order"
        return (
            f"{type(self).__name__}({self.num_samples:,} of {self.data_len:,} rows, rank {self.rank} of "
            f"{self.num_replicas}, {order})"
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. From then on, iterations do not advance it."""
        self.epoch, self._is_epoch_set = epoch, True

    def __iter__(self) -> Iterator[int]:
        epoch, n_absent = self.epoch, self.data_len - self.num_samples
        rows = np.arange(self.data_len)
        if n_absent:
            rows = np.sort(np.roll(rows, -epoch * n_absent)[n_absent:])
        if self.shuffle:
            rows = rows[permutation(len(rows), self.seed, epoch, EPOCH_SHUFFLE, 1 + self.rank)(0, len(rows))]
        yield from rows.tolist()
        if not self._is_epoch_set:
            self.epoch = epoch + 1

    def __len__(self) -> int:
        return self.num_samples
