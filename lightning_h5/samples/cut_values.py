"""The values that cut the rows of files into segments: lengths, first rows, flags, keys, or a coordinate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..catalog import StoredParts, pairs_of, values_of
from ..errors import H5ValueError
from ..hdf5 import OpenOptions
from ..options import SegmentOptions
from ..types import IntArray
from .segment_cuts import TimeUnit, by_coordinate, by_value, on_one_scale, ranges_in, steps_of, unit_of
from .segments import Segments

__all__ = ["CutValues"]


@dataclass(frozen=True, eq=False)
class CutValues:
    """The values of arrays that cut parts into segments, or have a value for each segment or step.

    Attributes:
        options: names the arrays that cut parts.
        paths: the file of each part.
        parts: for each part the values of each array.
        units: for each part the unit of the coordinate that joins files; empty if none does.
    """

    options: SegmentOptions
    paths: Sequence[str] = ()
    parts: Sequence[Mapping[str, npt.NDArray[Any]]] = ()
    units: Sequence[TimeUnit] = ()

    @classmethod
    def read(
        cls, stored: StoredParts, columns: Mapping[str, int], segments: SegmentOptions, options: OpenOptions
    ) -> CutValues:
        """Return the values of some arrays.

        Args:
            stored: the parts.
            columns: the column of each array in ``stored``.
            segments: names the arrays that cut parts.
            options: how files are opened.
        """
        parts, units = [], []
        for part in range(len(stored.files)) if columns else ():
            values = {}
            for key, column in columns.items():
                array = stored.one(part, column)
                has_pairs = key == segments.spans or (key == segments.offsets and array.row_shape == (2,))
                values[key] = pairs_of(array, options) if has_pairs else values_of(array, options)
            parts.append(values)
            if segments.join is not None:
                units.append(unit_of(stored.one(part, columns[segments.join]), options))
        return cls(segments, [stored.paths[file] for file in stored.files.tolist()], parts, units)

    def of_key(self, key: str) -> list[npt.NDArray[Any]]:
        """Return the values of an array, part by part."""
        return [values[key] for values in self.parts]

    def ranges(self, part: int, n_rows: int) -> tuple[IntArray, IntArray]:
        """Return the first rows and the lengths of the segments of a part (see ``ranges_in``)."""
        return ranges_in(self.options, self.parts[part], n_rows, self.paths[part])

    def order_of_files(self, files: npt.NDArray[np.int32]) -> list[int]:
        """Return the numbers of files in the order of the coordinate that joins them.

        Args:
            files: number of each part's file.
        """
        firsts = np.full(int(files.max()) + 1, np.inf)
        join = self.options.join
        if join is not None and all(values.dtype.kind in "iuf" for values in self.of_key(join)):
            for file, times in zip(files.tolist(), self._times(join), strict=True):
                firsts[file] = min([float(firsts[file]), *times[:1].tolist()])
        order: list[int] = np.argsort(firsts, kind="stable").tolist()
        return order

    def segments(self, starts: IntArray, kinds: tuple[int | None, ...]) -> tuple[Segments, IntArray]:
        """Return the segments that the values mark, and the number of each part's first one.

        Args:
            starts: first row of each part, and the number of rows at the end.
            kinds: see ``Segments``.
        """
        options, order = self.options, None
        if options.key is not None:
            sort_values = None if options.sort_key is None else self._steps_of_key(options.sort_key, starts)
            firsts, lengths, order = by_value(self._steps_of_key(options.key, starts), sort_values, options)
            first_rows = firsts if order is None else np.minimum.reduceat(order, firsts)
            first_segments = np.searchsorted(first_rows, starts)
        elif options.join is not None:
            self._steps_of_key(options.join, starts)  # checks that there is a value for each step
            firsts = by_coordinate(np.concatenate(self._times(options.join)), options.join)
            lengths = np.diff(np.append(firsts, starts[-1]))
            first_segments = np.searchsorted(firsts, starts)
        else:
            ranges = [self.ranges(part, n_rows) for part, n_rows in enumerate(np.diff(starts).tolist())]
            n_segments = [len(part_firsts) for part_firsts, _ in ranges]
            firsts = np.concatenate([part_firsts for part_firsts, _ in ranges]) + np.repeat(starts[:-1], n_segments)
            lengths = np.concatenate([part_lengths for _, part_lengths in ranges])
            # Not by their first rows: an empty last segment begins where the next part does.
            first_segments = np.cumsum([0, *n_segments], dtype=np.int64)
        return Segments((steps_of(firsts, lengths, starts),), kinds, order=order), first_segments

    def _times(self, join: str) -> list[npt.NDArray[Any]]:
        """Return the coordinate of each part, on one scale."""
        return on_one_scale(self.of_key(join), list(self.units), list(self.paths), join)

    def _steps_of_key(self, key: str, starts: IntArray) -> npt.NDArray[Any]:
        """Return the values of an array of all parts, one for each step."""
        values, n_rows = np.concatenate(self.of_key(key)), int(starts[-1])
        if len(values) != n_rows:
            raise H5ValueError(
                f"{key!r} has {len(values)} values and the data has {n_rows} steps. Name an array with one value a "
                "step."
            )
        return values
