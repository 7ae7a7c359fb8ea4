"""Rows drawn by their weights: an epoch's draws laid out in storage order, then mixed as any rows are.

An epoch draws as many rows as there are. The sum of all weights is cut into as many equal parts, and one row is drawn
in each (stratified resampling: Kitagawa, "Monte Carlo filter and smoother", Journal of Computational and Graphical
Statistics 5, 1996). So each row comes as often as its weight asks on average, and always within two times of that;
single draws with replacement would leave out a third of all rows if weights are equal.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..types import IntArray
from .epoch import EpochRecipe, OrderParameters, RowOrder, RowSequence, order_rows
from .permutation import GAMMA, mix, stream
from .window import BlockTable

__all__ = ["RowWeights", "WeightedRecipe"]

PLACES = 12  # purpose of the random stream


@dataclass(frozen=True, eq=False)
class RowWeights:
    """How often each row is to come.

    Attributes:
        weights: of each row, 0 or more, shape ``(n_rows,)``; only their ratios count.
        text: what they are, for the user.

    Raises:
        H5ValueError: one is negative or no number, or all are 0.
    """

    weights: npt.NDArray[np.float64]
    text: str

    def __post_init__(self) -> None:
        bad = np.flatnonzero(~(np.isfinite(self.weights) & (self.weights >= 0)))
        if len(bad):
            raise H5ValueError(
                f"rows weighted {self.text}: row {bad[0]} has the weight {self.weights[bad[0]]}, and {len(bad)} of "
                f"{len(self.weights)} rows have none of 0 or more. Write weights of 0 or more."
            )
        if not self.weights.any():
            raise H5ValueError(
                f"rows weighted {self.text}: all {len(self.weights)} weights are 0, which leaves nothing to train on."
            )

    @cached_property
    def ends(self) -> npt.NDArray[np.float64]:
        """Draws of each row and those before it, expected in an epoch of as many as there are rows."""
        sums = np.cumsum(self.weights / self.weights.max())
        ends: npt.NDArray[np.float64] = sums * (len(sums) / sums[-1])
        ends[self.weights.nonzero()[0][-1] :] = len(sums)  # whatever rounding made of it
        return ends


class _Draws:
    """The draws of an epoch, in storage order: draw ``k`` falls somewhere in ``[k, k + 1)`` of the rows' ends.

    Args:
        weights: of the rows.
        word: which draws.
    """

    def __init__(self, weights: RowWeights, word: np.uint64) -> None:
        self._ends, self._word = weights.ends, word
        self._n_bits = 52 - len(weights.ends).bit_length()  # so that no place is rounded up to the next draw's

    def before(self, rows: IntArray) -> IntArray:
        """Return the number of draws of all rows before these."""
        starts = np.where(rows > 0, self._ends[rows - 1], 0.0)
        draws = starts.astype(np.int64)
        return draws + (self._places(draws) < starts)

    def rows(self, draws: IntArray) -> IntArray:
        """Return the row of each draw."""
        return np.searchsorted(self._ends, self._places(draws), side="right").astype(np.int64)

    def _places(self, draws: IntArray) -> npt.NDArray[np.float64]:
        words = mix(self._word + draws.astype(np.uint64) * GAMMA)
        places: npt.NDArray[np.float64] = (
            draws + (words >> np.uint64(64 - self._n_bits)).astype(np.float64) / 2**self._n_bits
        )
        return places


def weighted_order(blocks: BlockTable, weights: RowWeights, parameters: OrderParameters, epoch: int) -> RowOrder:
    """Return the sequence of an epoch's draws. A row that comes again has a number larger by ``n_rows``, each time.

    Args:
        blocks: the rows.
        weights: of the rows.
        parameters: what decides the order.
        epoch: from 0.
    """
    word = np.asarray(stream(parameters.seed, epoch, PLACES).random_raw(1), dtype=np.uint64)[0]
    draws = _Draws(weights, word)
    order = order_rows(BlockTable.of_sizes(np.diff(draws.before(blocks.starts))), parameters, epoch)

    def numbers(start: int, stop: int) -> IntArray:
        drawn = order(start, stop)
        rows = draws.rows(drawn)
        return rows + (drawn - draws.before(rows)) * blocks.n_rows

    return numbers


@dataclass(frozen=True, eq=False)
class WeightedRecipe(EpochRecipe):
    """Epochs of rows drawn by their weights.

    Attributes:
        weights: of the rows.
        blocks: the rows.
    """

    weights: RowWeights
    blocks: BlockTable

    @property
    def text(self) -> str:
        """See ``EpochRecipe``."""
        digest = hashlib.sha256(self.weights.weights.tobytes()).hexdigest()[:16]
        return f"rows weighted {self.weights.text} ({digest})"

    def n_units(self, batch_size: int, world_size: int, *, drop_last: bool) -> int:
        """See ``EpochRecipe``: draws, as many as there are rows."""
        return self.blocks.n_rows

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> RowSequence:
        """See ``EpochRecipe``."""
        return RowSequence(weighted_order(self.blocks, self.weights, order, epoch), order.n_units, epoch)
