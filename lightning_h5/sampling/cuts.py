"""Where a sequence of rows is cut into batches, so that every rank takes the same number of steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .shards import balanced_contiguous_shard

__all__ = ["EvaluationCut", "TrainingCut"]


@dataclass(frozen=True)
class TrainingCut:
    """One sequence of rows cut into rounds of ``world_size`` batches; rank ``r`` takes batch ``t * world_size + r``.

    Whole rounds come first. A ragged end is dropped with ``drop_last``; else the last two rounds are cut anew
    into batches whose sizes differ by one row, so that nothing is dropped, nothing repeated and none is tiny.
    Where even that cannot be (``batch_size`` 1 and a remainder), the remainder sits out: the sequence's end in
    epoch 0, the rows before those in epoch 1, and so on to the sequence's start, and again from its end.

    Attributes:
        n_rows: length of the sequence.
        batch_size: rows of a batch on one rank.
        world_size: number of ranks.
        drop_last: drop the ragged end.
        epoch: decides who sits out.
        consumed: rows of the epoch that came before this sequence, so that a resumed run leaves out the same.
    """

    n_rows: int
    batch_size: int
    world_size: int
    drop_last: bool = False
    epoch: int = 0
    consumed: int = 0

    @cached_property
    def n_steps(self) -> int:
        """Steps that every rank takes."""
        full, rest = divmod(self.n_rows, self.batch_size * self.world_size)
        if not rest or self.drop_last or (self.batch_size == 1 and full):
            return full
        if not full:
            return 1 if self.n_rows >= self.world_size else 0
        return full + 1

    @property
    def n_left_out(self) -> int:
        """Rows of the sequence that are in no batch."""
        full, rest = divmod(self.n_rows, self.batch_size * self.world_size)
        return rest if self.n_steps == full else 0

    def bounds(self, batch: int) -> tuple[int, int]:
        """Position in the sequence of the first row of a batch, and of the one after the last."""
        if batch < self._n_plain:
            return batch * self.batch_size, (batch + 1) * self.batch_size
        return self.start(batch), self.stop(batch)

    def start(self, batch: int) -> int:
        """Position in the sequence of the first row of a batch (0 to ``n_steps * world_size``)."""
        return self._past_those_who_sit_out(self._before(batch))

    def stop(self, batch: int) -> int:
        """Position after the last row of a batch; 0 for batch -1."""
        return self._past_those_who_sit_out(self._before(batch + 1) - 1) + 1 if batch >= 0 else 0

    @cached_property
    def _n_even_rounds(self) -> int:
        """Rounds of full batches, before the ragged end."""
        full, rest = divmod(self.n_rows, self.batch_size * self.world_size)
        return self.n_steps if not rest or self.n_steps == full else max(0, full - 1)

    @cached_property
    def _n_plain(self) -> int:
        """Full batches at the sequence's start, before any row that sits out."""
        return min(self._n_even_rounds * self.world_size, self._first_who_sits_out // self.batch_size)

    @cached_property
    def _first_who_sits_out(self) -> int:
        if self.drop_last or not self.n_left_out:
            return self.n_rows
        last_place = self.consumed + self.n_rows - self.n_left_out
        return max(0, (last_place - self.epoch * self.n_left_out) % (last_place + 1) - self.consumed)

    def _before(self, batch: int) -> int:
        """Rows in the batches before a batch."""
        even = self._n_even_rounds * self.world_size
        if batch <= even:
            return batch * self.batch_size
        n_batches = self.n_steps * self.world_size - even
        n_rows = self.n_rows - even * self.batch_size
        return (
            even * self.batch_size + balanced_contiguous_shard(n_rows, n_batches, min(batch - even, n_batches) - 1)[1]
        )

    def _past_those_who_sit_out(self, position: int) -> int:
        """From a position among the rows in batches to one in the sequence."""
        return position + self.n_left_out if position >= self._first_who_sits_out else position


@dataclass(frozen=True)
class EvaluationCut:
    """A contiguous shard for each rank, cut into the same number of batches on every rank; every row exactly once.

    With ``batch_size`` 1 and a remainder some ranks get one batch more: there is no row left to make one of.

    Attributes:
        n_rows: rows of all ranks.
        batch_size: most rows of a batch.
        world_size: number of ranks.
        rank: this rank.
    """

    n_rows: int
    batch_size: int
    world_size: int
    rank: int

    @property
    def shard(self) -> tuple[int, int]:
        """First row, and the row after the last, of this rank."""
        return balanced_contiguous_shard(self.n_rows, self.world_size, self.rank)

    @property
    def n_steps(self) -> int:
        """Batches of this rank."""
        first, last = self.shard
        largest = -(-self.n_rows // self.world_size)
        return min(-(-largest // self.batch_size), last - first)

    def bounds(self, step: int) -> tuple[int, int]:
        """First row, and the row after the last, of a batch: full ones first, the last two share what is left."""
        first, last = self.shard
        full = max(0, self.n_steps - 2)
        if step < full:
            return first + step * self.batch_size, first + (step + 1) * self.batch_size
        start = first + full * self.batch_size
        low, high = balanced_contiguous_shard(last - start, self.n_steps - full, step - full)
        return start + low, start + high
