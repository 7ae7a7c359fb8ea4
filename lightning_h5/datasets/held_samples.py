"""Samples made of what a rank holds in memory: which rows they need, and how they are put together."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from ..counters import Counters
from ..hdf5 import OpenOptions
from ..readers import TaskQueue
from ..readers.buffers import BufferPool, Column
from ..samples import SAMPLES_AT_A_TIME, BatchRows, RowTable
from ..types import IntArray
from .fields import Fields
from .file_dataset import FileDataset
from .held_rows import HeldRows

__all__ = ["HeldSamples"]


class HeldSamples:
    """Samples of the rows that a rank holds, and of fields that are read and kept file by file.

    Args:
        table: the files.
        fields: what is read.
        options: how the HDF5 library opens files.

    Attributes:
        table: the files with the fields that are held.
        plans: what a row of each of these is in memory.
    """

    def __init__(self, table: RowTable, fields: Fields, options: OpenOptions) -> None:
        plans = self._all_plans = fields.plans(table.as_read)
        self._all, self._fields = table, table.fields_of_rows
        self._assemblers = [table.assembler(field) for field in range(table.n_fields)]
        self.table = table.with_fields(self._fields)
        self.plans = [plans[field] for field in self._fields]
        self.has_cells = table.indexer.held_as == "cells"
        if self.has_cells:  # held as they are stored
            self.plans = list(fields.among(self._fields).as_stored().plans(self.table.layouts[0]))
        self._others: FileDataset | None = None
        if others := [field for field in range(len(plans)) if field not in self._fields]:
            self._others = FileDataset(
                table.with_fields(others),
                fields.among(others),
                batch_transform=None,
                indices=None,
                options=options,
                holds_all=True,
            )

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """See ``RowDataset.join``."""
        if self._others is not None:
            self._others.join(counters, work)

    def rows_needed(self, samples: IntArray) -> list[IntArray]:
        """Return the rows that samples of the table have, ascending; of each field that is held if they are cells."""
        indexer = self._all.indexer
        if indexer.held_as == "rows":
            return [np.unique(samples)]
        needed = np.zeros((len(self.plans) if self.has_cells else 1, self._all.n_rows), dtype=np.bool_)
        for start in range(0, len(samples), SAMPLES_AT_A_TIME):
            some = samples[start : start + SAMPLES_AT_A_TIME]
            for number, rows in enumerate(indexer.rows_of_any_epoch(some)):
                needed[number if self.has_cells else 0, rows] = True
        return [np.flatnonzero(one) for one in needed]

    def n_bytes(self, samples: IntArray) -> int:
        """Return the bytes of all rows that samples of the table have."""
        sizes = [plan.row_bytes for plan in self.plans]
        return sum(size * len(some) for size, some in zip(sizes, cycle(self.rows_needed(samples)), strict=False))

    def columns(
        self,
        held: HeldRows,
        numbers: IntArray,
        asked: BatchRows,
        of_rank: IntArray,
        buffers: BufferPool,
        *,
        all_cores: bool,
    ) -> list[Column]:
        """Return each field with an entry for each sample.

        Args:
            held: the rows in memory.
            numbers: of the samples among all that are sharded.
            asked: the rows that they have.
            of_rank: the rows that are held, ascending; of no use if these are cells.
            buffers: where memory for batches comes from.
            all_cores: copy with torch's threads if these are faster.
        """
        others = iter(self._columns_of_others(numbers, asked))
        places: dict[int, IntArray] = {}  # fields with the same rows share them
        columns: list[Column] = []
        for field, found in enumerate(asked.fields):
            if field not in self._fields:
                columns.append(next(others))
                continue
            at = self._fields.index(field)
            if found.patches is not None:
                column = held.patches(at, found, self._all_plans[field], buffers)
            else:
                if id(found) not in places:
                    places[id(found)] = np.searchsorted(of_rank, found.rows)
                column = held.take_of(at, places[id(found)], buffers, all_cores=all_cores)
            columns.append(self._assemblers[field].column(found, column, buffers))
        return columns

    def _columns_of_others(self, numbers: IntArray, asked: BatchRows) -> tuple[Column, ...]:
        """Return the columns of the fields that are not held by rows."""
        if self._others is None:
            return ()
        fields = [found for field, found in enumerate(asked.fields) if field not in self._fields]
        read = self._others.begin_rows(numbers, BatchRows(tuple(fields), asked.places), None, at_once=True)
        return read().columns
