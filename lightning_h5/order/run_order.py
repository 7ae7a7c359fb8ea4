"""The order of a run: what its epochs visit, in which batches, on which replica. Positions are counted in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .plan import EpochRecipe, EpochSequence, OrderParameters, Segment
from .recipes import EachRowOnce
from .shards import Replica, resolve_replica
from .window import BlockTable

__all__ = ["RunOrder"]


class RunOrder:
    """The order of a run's epochs under its present settings.

    Args:
        blocks: the dataset's block table.
        parameters: the settings of the order.
        batch_size: rows of a batch on one rank.
        drop_last: drop the ragged end of an epoch (training only).
        rank: this replica; None resolves it when iteration starts.
        world_size: number of replicas; None resolves it when iteration starts.
        chooses: the package chose the mode: an interrupted epoch may have had another.
        recipe: how epochs visit rows; None for each row once.
        repeats: all epochs of a recipe are like the first (``overfit_batches``).
    """

    def __init__(
        self,
        blocks: BlockTable,
        parameters: OrderParameters,
        *,
        batch_size: int,
        drop_last: bool,
        rank: int | None,
        world_size: int | None,
        chooses: bool,
        recipe: EpochRecipe | None,
        repeats: bool,
    ) -> None:
        self.blocks = blocks
        self.recipe: EpochRecipe = EachRowOnce(blocks) if recipe is None else recipe
        self._repeats = repeats and recipe is not None
        self.parameters = parameters
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.chooses = chooses
        self._replica_arguments = (rank, world_size)

    @property
    def n_rows(self) -> int:
        """Rows of all ranks."""
        return self.blocks.n_rows

    @property
    def repeats(self) -> bool:
        """Whether all epochs are like the first."""
        return self._repeats

    @property
    def shards(self) -> dict[str, Any] | None:
        """Properties of shards that a position depends on, as plain values; None if ranks hold no shards."""
        return None

    @property
    def replica(self) -> Replica:
        """This replica, as given or as resolved now."""
        return resolve_replica(*self._replica_arguments)

    @property
    def mean_rows(self) -> int:
        """Rows of a batch on one rank on average, about."""
        return self.recipe.mean_rows(self.batch_size)

    def present_order(self) -> OrderParameters:
        """Return the settings of the order of an epoch that begins now."""
        world_size = self.replica.world_size
        order = replace(
            self.parameters,
            batch_size=self.batch_size,
            recipe=self.recipe.text,
            world_size=world_size if self.parameters.nodes else 0,
        )
        return replace(order, n_units=self.recipe.n_units(order, world_size, drop_last=self.drop_last))

    def sequence(self, epoch: int, order: OrderParameters) -> EpochSequence:
        """Return the sequence of an epoch of training, over all ranks.

        Args:
            epoch: from 0.
            order: the settings of its order.
        """
        return self.recipe.sequence(order, 0 if self._repeats else epoch, drop_last=self.drop_last)

    def merged(self, epoch: int, order: OrderParameters, segments: Sequence[Segment]) -> Segment:
        """Return one segment, of batches of one row, that has consumed the same rows of an epoch as several."""
        return Segment(1, 1, self.sequence(epoch, order).n_consumed(segments, drop_last=self.drop_last))
