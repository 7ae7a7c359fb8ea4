"""A kind of sample that the package does not have: every n-th row of a segment, from each of its first n rows on."""

from dataclasses import dataclass

import numpy as np

from lightning_h5.samples import FieldRows, Places
from lightning_h5.samples.assemblers import SegmentAssembler
from lightning_h5.samples.indexer import Indexer


@dataclass(frozen=True)
class EveryNth:
    n: int

    def indexer(self, segments, fields):
        return EveryNthRow(segments, self.n)


@dataclass(frozen=True, eq=False)
class EveryNthRow(Indexer):
    n: int = 1
    noun = "thinned segments"

    @property
    def _counts(self):
        return np.minimum(self.segments.lengths, self.n)

    def __len__(self):
        return int(self._counts.sum())

    def places(self, samples, epoch=None):
        ends = np.cumsum(self._counts)
        segments = np.searchsorted(ends, samples, side="right")
        return Places(segments, samples - (ends - self._counts)[segments])

    def rows(self, places):
        return tuple(self._rows(places, kind) for kind in self.segments.kinds)

    def _rows(self, places, kind):
        if kind is None:
            return FieldRows(self.segments.numbers_of(places.segments))
        steps = self.segments.steps[kind]
        lengths = -(-(steps.lengths_of(places.segments) - places.steps) // self.n)
        firsts = np.repeat(steps.firsts_of(places.segments) + places.steps, lengths)
        inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return FieldRows(self.segments.rows_at(firsts + self.n * inside), lengths)

    def assembler(self, field, *, is_ragged, place):
        return SegmentAssembler(is_ragged, place)

    def n_before(self, rows):
        segments, inside = self.segments.inside(rows)
        counts = self._counts[segments]
        return np.cumsum(self._counts)[segments] - counts + np.clip(inside, 0, counts)

    def mean_bytes(self, sizes):
        return sum(sizes) * int(self.segments.lengths.sum()) // max(1, len(self))
