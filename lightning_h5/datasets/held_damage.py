"""Rows in memory that could not be read when they were loaded: reading them raises the error that loading them met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError
from ..hdf5 import ArrayLayout, OpenOptions
from ..order import Rows, as_array
from ..readers import BulkTask, fallback_reason, open_reader, salvaged
from ..types import IntArray

__all__ = ["DamagedRows", "HeldDamage", "LoadedRows"]


class DamagedRows(NamedTuple):
    """Consecutive places in memory whose rows could not be read. Plain values, for JSON.

    Attributes:
        field: number of the field in memory.
        start: the first place.
        stop: the place after the last one.
        cause: text of the error.
    """

    field: int
    start: int
    stop: int
    cause: str


class TakesRows(Protocol):
    """Memory for the rows of a field."""

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """Take rows for the places from ``start`` on."""
        ...


@dataclass(frozen=True, eq=False)
class LoadedRows:
    """Rows of one array that tasks load.

    Attributes:
        layout: the array.
        rows: the rows, as the array numbers them.
        target: receives the rows.
        places: the place of each row in the target.
        field: number of the field in memory.
        memory_places: the place of each row in memory, if that is another one; None if it is the same.
    """

    layout: ArrayLayout
    rows: Rows
    target: TakesRows
    places: Rows
    field: int
    memory_places: Rows | None = None


class HeldDamage:
    """Rows in memory that could not be read."""

    def __init__(self) -> None:
        self.known: list[DamagedRows] = []

    def __bool__(self) -> bool:
        return bool(self.known)

    def noting(
        self, tasks: Sequence[BulkTask], loaded: LoadedRows, options: OpenOptions, counters: Counters
    ) -> list[BulkTask]:
        """Return the same tasks, which note rows that cannot be read instead of raising.

        Args:
            tasks: read the rows.
            loaded: the rows.
            options: how the file is opened if the HDF5 library reads.
            counters: counts what is read.
        """

        def noted(task: BulkTask) -> BulkTask:
            def run() -> None:
                try:
                    task.run()
                except H5CorruptError:
                    self._read_in_pieces(loaded, as_array(task.positions), options, counters)

            return task._replace(run=run)

        return [noted(task) for task in tasks]

    def _read_in_pieces(
        self, loaded: LoadedRows, positions: IntArray, options: OpenOptions, counters: Counters
    ) -> None:
        """Read the rows of a task that failed, as far as possible; others are zeros, and noted."""
        layout, rows = loaded.layout, as_array(loaded.rows)
        reader = open_reader(layout, options, in_blocks=True, counters=counters)

        def read(positions: IntArray) -> None:
            _put(loaded, positions, reader.read(rows[positions]))

        is_by_chunk = layout.storage == "chunked" and layout.view is None and layout.decoding is None
        is_by_chunk = is_by_chunk and not layout.stacked and fallback_reason(layout) is None
        blocks = rows // layout.rows_per_chunk if is_by_chunk else None
        for failed, error in salvaged(read, positions, blocks=None if blocks is None else blocks[positions]):
            if layout.dtype.kind != "O":  # a part of them may have been written
                _put(loaded, failed, np.zeros((len(failed), *layout.row_shape), layout.dtype))
            places = as_array(loaded.places if loaded.memory_places is None else loaded.memory_places)[failed]
            runs = _runs_of(places)
            self.known += [DamagedRows(loaded.field, int(run[0]), int(run[-1]) + 1, str(error)) for run in runs]

    def note(self, damaged: Iterable[Sequence[Any]]) -> None:
        """Note rows that other processes could not read into the memory that this one shares with them."""
        self.known = list(dict.fromkeys([*self.known, *(DamagedRows(*values) for values in damaged)]))

    def check(self, field: int, places: IntArray) -> None:
        """Raise if rows could not be read.

        Args:
            field: number of the field in memory.
            places: places in memory of the rows.

        Raises:
            H5CorruptError: one could not, with the text of the error.
        """
        for damaged in self.known:
            if damaged.field == field and ((places >= damaged.start) & (places < damaged.stop)).any():
                raise H5CorruptError(damaged.cause)


def _put(loaded: LoadedRows, positions: IntArray, rows: npt.NDArray[Any]) -> None:
    places = as_array(loaded.places)[positions]
    for run in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(places) != 1) + 1):
        loaded.target.put(int(places[run[0]]), rows[run])


def _runs_of(places: IntArray) -> list[IntArray]:
    """Return runs of consecutive places."""
    return np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
