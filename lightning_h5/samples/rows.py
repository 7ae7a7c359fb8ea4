"""Samples that are rows: the number of a sample is the number of its row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..options import StepRange
from ..order import BlockTable, condensed, places_in
from ..types import IntArray
from .assemblers import Assembler
from .indexer import HeldSamples, Indexer, Units, rows_of_all
from .sample_rows import BatchRows, FieldRows, Places
from .segments import BoolArray, Segments, Steps
from .windows import Windows

__all__ = ["Rows"]


@dataclass(frozen=True, eq=False)
class Rows(Indexer):
    """Samples that are the rows of files, one after the other.

    Attributes:
        segments: the rows of each file.
    """

    noun = "rows"
    numbers_are_rows = True
    has_places = False

    @classmethod
    def of(cls, starts: IntArray, n_fields: int) -> Rows:
        """Return the rows of files.

        Args:
            starts: the first row of each file, and the number of rows at the end.
            n_fields: number of fields.
        """
        return cls(Segments((Steps(starts),), (0,) * n_fields))

    def __len__(self) -> int:
        return int(self.segments.steps[0].starts[-1])

    def places(self, samples: IntArray, epoch: int | None = None) -> Places:
        """See ``Indexer.places``."""
        return Places(*self.segments.inside(samples))

    def rows(self, places: Places) -> tuple[FieldRows, ...]:
        """See ``Indexer.rows``."""
        return self._of_all_fields(self.segments.steps[0].firsts_of(places.segments) + places.steps)

    def rows_of(self, samples: IntArray, epoch: int | None = None) -> BatchRows:
        """See ``Indexer.rows_of``."""
        return BatchRows(self._of_all_fields(samples))

    def _of_all_fields(self, rows: IntArray) -> tuple[FieldRows, ...]:
        return (FieldRows(rows),) * len(self.segments.kinds)

    def rows_of_any_epoch(self, samples: IntArray) -> Iterator[IntArray]:
        """See ``Indexer.rows_of_any_epoch``."""
        yield samples

    def rows_held(self, samples: range | IntArray, n_rows: int) -> Sequence[range | IntArray]:
        """See ``Indexer.rows_held``: the samples, in ascending order."""
        if not isinstance(samples, range) and (np.diff(samples) <= 0).any():
            samples = np.unique(samples)
        return (condensed(samples),) * len(self.segments.kinds)

    def over(self, rows: Sequence[range | IntArray | None], samples: range | IntArray) -> HeldSamples:
        """See ``Indexer.over``: each sample's place is looked up once."""
        held = next(field_rows for field_rows in rows if field_rows is not None)  # all fields have the same
        return HeldSamples(self, condensed(places_in(held, samples)), (range(len(held)),) * len(rows))

    def first_rows(self, samples: IntArray, epoch: int | None = None) -> IntArray:
        """See ``Indexer.first_rows``."""
        return samples

    def assembler(self, field: int, *, is_ragged: bool, place: int) -> Assembler:
        """See ``Indexer.assembler``."""
        return Assembler()

    @property
    def _as_windows(self) -> Windows:
        """The same samples, as windows of one step."""
        return Windows(self.segments, (StepRange(0, 1, is_single=True),) * len(self.segments.kinds))

    def among(self, segments: IntArray) -> Indexer:
        """See ``Indexer.among``."""
        return self._as_windows.among(segments)

    def keeping(self, is_kept: BoolArray) -> Indexer:
        """See ``Indexer.keeping``."""
        return self._as_windows.keeping(is_kept)

    def in_parts(self, low: IntArray, high: IntArray) -> Indexer:
        """See ``Indexer.in_parts``."""
        return self._as_windows.in_parts(low, high)

    def digest(self) -> bytes:
        """See ``Indexer.digest``. Rows depend on the arrays alone."""
        return b""

    def n_before(self, rows: IntArray) -> IntArray:
        """See ``Indexer.n_before``."""
        return rows

    def n_reads_before(self, rows: IntArray, field: int) -> IntArray:
        """See ``Indexer.n_reads_before``."""
        return rows

    def mean_bytes(self, sizes: Sequence[int]) -> int:
        """See ``Indexer.mean_bytes``."""
        return sum(sizes)

    def blocks(self, units: Units, samples: IntArray | None) -> BlockTable:
        """See ``Indexer.blocks``: rows that share a chunk of the coarsest array."""
        steps = units.rows_per_block
        if samples is None:
            sizes = [
                size
                for step, n in zip(steps.tolist(), np.diff(units.starts).tolist(), strict=True)
                for size in [step] * (n // step) + [n % step]
            ]
            return BlockTable.of_sizes(sizes)
        files, inside = self.segments.inside(samples)
        return BlockTable.of_runs(files, inside // steps[files])

    def block_bytes(self, units: Units, row_bytes: IntArray) -> int:
        """See ``Indexer.block_bytes``."""
        return int(max(1, (units.rows_per_block * row_bytes).max()))

    def summary(self, n_samples: int) -> str:
        """See ``Indexer.summary``."""
        return rows_of_all(n_samples, len(self))
