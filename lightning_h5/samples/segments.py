"""Segments: steps that belong together, as rows of arrays.

Nothing is kept for a sample. A segment takes two numbers, its first row and the samples before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..types import IntArray, cached_property

__all__ = ["BoolArray", "Segments", "Steps"]

BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Steps:
    """Where the steps of segments are among the rows of an array.

    Attributes:
        starts: first row of each segment; also the end of the last one, if there are no ``lengths``.
        lengths: steps of each segment; None if each segment ends where the next one begins.
        rate: steps of a segment that one step of the array spans (``segments.steps_per``).
    """

    starts: IntArray
    lengths: IntArray | None = None
    rate: int = 1

    def __len__(self) -> int:
        return len(self.starts) - (self.lengths is None)

    def firsts_of(self, segments: IntArray | slice = slice(None)) -> IntArray:
        """Return the first row of some segments, or of all."""
        return self.starts[: len(self)][segments]

    def lengths_of(self, segments: IntArray | slice = slice(None)) -> IntArray:
        """Return the steps of some segments, or of all."""
        if self.lengths is not None:
            return self.lengths[segments]
        if isinstance(segments, slice):
            return np.diff(self.starts)[segments]
        return self.starts[segments + 1] - self.starts[segments]

    def spans_of(self, segments: IntArray | slice = slice(None)) -> IntArray:
        """Return how many steps of a segment the array's own steps span, for some segments, or all."""
        return self.lengths_of(segments) * self.rate

    def among(self, segments: IntArray) -> Steps:
        """Return some segments."""
        return Steps(self.firsts_of(segments), self.lengths_of(segments), self.rate)


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of the rows of several fields.

    Attributes:
        steps: where the steps are: fields with the same steps share an entry. The first rows are the same for all,
            except for the rows of several sparse matrices.
        kinds: for each field its entry in ``steps``; None for a field with one value for each segment.
        numbers: number of each segment among all of the files; None if these are all, in their order.
        cut: the first step of each segment, if it is a part of a longer one; None if it is whole.
        order: the row at each place that ``steps`` count, if segments do not have consecutive rows; None if they do.
    """

    steps: tuple[Steps, ...]
    kinds: tuple[int | None, ...]
    numbers: IntArray | None = None
    cut: IntArray | None = None
    order: IntArray | None = None

    def __len__(self) -> int:
        return len(self.steps[0])

    def places_of(self, segments: IntArray | slice, lengths: IntArray, kind: int = 0) -> IntArray:
        """Return the places of the first ``lengths`` steps of some segments, one segment after the other."""
        before = self.steps[kind].firsts_of(segments) - (np.cumsum(lengths) - lengths)
        return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(np.asarray(before, dtype=np.int64), lengths)

    def rows_at(self, places: IntArray) -> IntArray:
        """Return the rows at places that ``steps`` count."""
        return places if self.order is None else self.order[places]

    def numbers_of(self, segments: IntArray) -> IntArray:
        """Return the numbers of some segments among all of the files."""
        return segments if self.numbers is None else self.numbers[segments]

    def among(self, segments: IntArray) -> Segments:
        """Return some segments."""
        return replace(
            self,
            steps=tuple(steps.among(segments) for steps in self.steps),
            numbers=self.numbers_of(segments),
            cut=None if self.cut is None else self.cut[segments],
        )

    def keeping(self, is_kept: BoolArray, *, in_runs: bool) -> Segments:
        """Return the segments without some rows.

        Args:
            is_kept: for each row of the files whether it stays.
            in_runs: end a segment at each row that is left out, so that its rows follow each other; else the rows
                that stay are the steps of one segment.

        Raises:
            H5ValueError: some steps of a segment are left out, and fields have different numbers of steps.
        """
        firsts = self.steps[0].firsts_of()
        lengths = np.maximum.reduce([steps.lengths_of() for steps in self.steps])
        owners, places = np.repeat(np.arange(len(firsts)), lengths), self.places_of(slice(None), lengths)
        stays = is_kept[self.rows_at(places)]
        n_kept = np.bincount(owners[stays], minlength=len(firsts))
        if ((n_kept == 0) | (n_kept == lengths)).all():
            return self.among(np.flatnonzero(n_kept))
        if len(self.steps) > 1:
            raise H5ValueError(
                "a filter leaves out some steps of a segment, and its fields have different numbers of steps. Filter "
                "by values of whole segments, or load fields with equally many steps."
            )
        owners, places = owners[stays], places[stays]
        is_cut = np.diff(owners, prepend=-1) != 0
        if in_runs:
            is_cut |= np.diff(places, prepend=-2) != 1
        begins = np.flatnonzero(is_cut)
        segments, inside = owners[begins], places[begins] - firsts[owners[begins]]
        ends = np.append(begins, len(owners))
        cut = inside if self.cut is None else self.cut[segments] + inside
        steps = Steps(places[begins], np.diff(ends)) if in_runs else Steps(ends)
        order = self.order if in_runs else self.rows_at(places)
        return replace(self, steps=(steps,), numbers=self.numbers_of(segments), cut=cut, order=order)

    def of_fields(self, fields: Sequence[int]) -> Segments:
        """Return the segments of some fields."""
        return replace(self, kinds=tuple(self.kinds[at] for at in fields))

    def digest(self) -> bytes:
        """Return bytes that identify these segments among others of the same arrays."""
        arrays = [array for steps in self.steps for array in (steps.firsts_of(), steps.lengths_of())]
        arrays += [] if self.order is None else [self.order]
        rates = [steps.rate for steps in self.steps]
        of_rates = repr(rates).encode() if max(rates) > 1 else b""
        return repr(self.kinds).encode() + b"".join(array.tobytes() for array in arrays) + of_rates

    @cached_property
    def are_ascending(self) -> bool:
        """Whether each segment begins at the end of the one before it, or after it."""
        firsts, lengths = self.steps[0].firsts_of(), self.steps[0].lengths_of()
        return self.order is None and bool((firsts[1:] >= (firsts + lengths)[:-1]).all())

    def inside(self, rows: IntArray, kind: int = 0) -> tuple[IntArray, IntArray]:
        """Return the last segment that begins at or before each row, and how far into it the row is."""
        firsts = self.steps[kind].firsts_of()
        segments = np.maximum(np.searchsorted(firsts, rows, side="right") - 1, 0)
        return segments, rows - firsts[np.minimum(segments, len(firsts) - 1)]

    @cached_property
    def lengths(self) -> IntArray:
        """Steps that all fields of a segment have."""
        return np.asarray(np.minimum.reduce([steps.spans_of() for steps in self.steps]), dtype=np.int64)

    def rate_of(self, field: int) -> int:
        """Return how many steps of a segment one step of a field spans."""
        kind = self.kinds[field]
        return 1 if kind is None else self.steps[kind].rate

    @property
    def beat(self) -> int:
        """Steps after which steps of all fields begin together; 1 if all fields have the same rate."""
        return math.lcm(*(steps.rate for steps in self.steps))

    def parts(self, low: IntArray, high: IntArray) -> Segments:
        """Return the steps from ``low`` to below ``high`` of each segment; a part to the end has all that follow.

        ``low`` is a multiple of ``beat``.
        """
        parts = []
        for steps in self.steps:
            lengths, first = steps.lengths_of(), low // steps.rate
            ends = np.where(high >= self.lengths, lengths, np.minimum(high // steps.rate, lengths))
            parts.append(Steps(steps.firsts_of() + first, np.maximum(ends - first, 0), steps.rate))
        return replace(self, steps=tuple(parts), cut=low if self.cut is None else self.cut + low)
