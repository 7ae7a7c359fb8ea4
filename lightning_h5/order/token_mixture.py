"""Mixtures in batches with a maximum number of steps: sources take turns, and each batch has samples of one source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..types import IntArray
from .batches import BatchSequence
from .plan import OrderParameters
from .recipes import MixedBatches, MixtureRecipe
from .token_batches import TokenRecipe

__all__ = ["TokenMixtureRecipe"]


@dataclass(frozen=True, eq=False)
class TokenMixtureRecipe(MixtureRecipe):
    """Epochs of a mixture in batches with a maximum number of steps.

    Each source has the batches of its own recipe, one cycle after the other, with each sequence once a cycle. Shares
    are counted in batches. All sources fill batches up to the same limit, so shares of steps are about the same.

    Attributes:
        tokens: the recipe of each source; of all sequences together for ``concat``.
    """

    tokens: Sequence[TokenRecipe]

    @property
    def text(self) -> str:
        """See ``EpochRecipe``."""
        return f"{self.mixture.text}, {self.tokens[0].limit_text}"

    @property
    def in_batches(self) -> bool:
        """See ``MixtureRecipe``; also for ``concat``."""
        return True

    def n_cycle(self, order: OrderParameters, *, drop_last: bool) -> list[int]:
        """See ``MixtureRecipe``."""
        orders = (of_source for _, of_source in self.of_sources(order))
        return [recipe.n_batches(order, 1)[0] for recipe, order in zip(self.tokens, orders, strict=True)]

    def n_units(self, order: OrderParameters, world_size: int, *, drop_last: bool) -> int:
        """See ``EpochRecipe``; as many batches on each rank, unless an epoch has each sequence once.

        Epochs with other sequences may have too few that can be shared, and all need the same number of steps.
        """
        mixture, n_cycle = self.mixture, self.n_cycle(order, drop_last=drop_last)
        n_units = super().n_units(order, world_size, drop_last=drop_last)
        shares = [] if self.continues else mixture.shares(n_cycle)
        if [share * n_units for share in shares] == n_cycle:
            return n_units
        n_steps = n_units // world_size if mixture.epoch_length == "min" else -(-n_units // world_size)
        return n_steps * world_size

    def n_batches(self, order: OrderParameters, world_size: int) -> tuple[int, int]:
        """See ``EpochRecipe``."""
        n_full, n_rest = divmod(order.n_units, world_size)
        n_rows = sum(table.n_rows for table in self.blocks)  # an epoch has each once if there is a rest
        return order.n_units, n_rest if n_rows < (n_full + 1) * world_size else 0

    def mean_rows(self, batch_size: int) -> int:
        """See ``EpochRecipe``; of the source with the shortest sequences, which needs the most memory for rows."""
        return max(recipe.mean_rows(batch_size) for recipe in self.tokens)

    def expected_shares(
        self, order: OrderParameters, *, drop_last: bool, units: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """See ``EpochRecipe``; a source with shorter sequences has more rows in a batch."""
        if self.mixture.strategy == "concat":
            return super().expected_shares(order, drop_last=drop_last)
        n_cycle = self.n_cycle(order, drop_last=drop_last)
        shares = zip(self.unit_shares(order, n_cycle, units), self.blocks, n_cycle, strict=True)
        amounts = [share * table.n_rows / n_batches for share, table, n_batches in shares]
        return {name: amount / sum(amounts) for name, amount in zip(self.mixture.names, amounts, strict=True)}

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> BatchSequence:
        """See ``EpochRecipe``."""
        n_all = sum(table.n_rows for table in self.blocks)
        streams = [
            _TokenStream(recipe, first, n_all, of_source)
            for recipe, (first, of_source) in zip(self.tokens, self.of_sources(order), strict=True)
        ]
        schedule = self.schedule(order, epoch, drop_last=drop_last)
        return BatchSequence(MixedBatches(schedule, streams), order.batch_size)


class _TokenStream:
    """A source's batches, of one order after the other.

    Args:
        recipe: of the source's cycles.
        first: the row of the mixture that is its first.
        n_all: rows of the mixture.
        order: the settings of its order.
    """

    def __init__(self, recipe: TokenRecipe, first: int, n_all: int, order: OrderParameters) -> None:
        self._first, self._n_all, self._n_rows = first, n_all, len(recipe.lengths)
        self._n_batches, _ = recipe.n_batches(order, 1)
        self._cycle = lru_cache(maxsize=2)(lambda cycle: recipe.sequence(order, cycle, drop_last=False).batches)

    def batch(self, number: int) -> IntArray:
        """See ``BatchStream``."""
        cycle, batch = divmod(number, self._n_batches)
        rows: IntArray = self._cycle(cycle).rows(batch) + (cycle * self._n_all + self._first)
        return rows

    def n_rows_before(self, number: int) -> int:
        """See ``BatchStream``."""
        cycle, batch = divmod(number, self._n_batches)
        return cycle * self._n_rows + self._cycle(cycle).start(batch)
