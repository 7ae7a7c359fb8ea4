"""The fields of a dataset in memory: those held row by row, and those that are read and kept file by file."""

from __future__ import annotations

from collections.abc import Sequence

from ..counters import Counters
from ..hdf5 import OpenOptions
from ..order import Rows
from ..readers import TaskQueue
from ..readers.buffers import BufferPool, Column
from ..samples import BatchRows, HeldSamples, RowTable
from .fields import Fields
from .file_dataset import FileDataset
from .held_rows import HeldField, HeldRows

__all__ = ["HeldFields"]


class HeldFields:
    """The fields of samples, as a rank has them in memory.

    Args:
        table: the files.
        fields: what is read.
        options: how the HDF5 library opens files.

    Attributes:
        table: the files, with the fields that are held row by row.
        held: these fields.
    """

    def __init__(self, table: RowTable, fields: Fields, options: OpenOptions) -> None:
        self._table, self._numbers = table, table.fields_of_rows
        self.table = table.with_fields(self._numbers)
        plans, stored = fields.plans(table.as_read), fields.as_stored().plans(table.layouts[0])
        self.held = [
            HeldField(stored[field], plans[field]) if field in table.fields_cut else HeldField(plans[field])
            for field in self._numbers
        ]
        self._on_demand: FileDataset | None = None
        if fields_on_demand := [field for field in range(len(plans)) if field not in self._numbers]:
            self._on_demand = FileDataset(
                table.with_fields(fields_on_demand),
                fields.among(fields_on_demand),
                batch_transform=None,
                indices=None,
                options=options,
                holds_all=True,
            )

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """See ``RowDataset.join``."""
        if self._on_demand is not None:
            self._on_demand.join(counters, work)

    def rows_of(self, samples: Rows) -> list[Rows]:
        """Return the rows that samples of the table have of each field that is held, in ascending order."""
        rows = self._table.indexer.rows_held(samples, self._table.n_rows)
        return [rows[field] for field in self._numbers]

    def n_bytes_of(self, samples: Rows) -> int:
        """Return the bytes of the rows that samples of the table have."""
        return sum(
            len(rows) * field.plan.row_bytes for rows, field in zip(self.rows_of(samples), self.held, strict=True)
        )

    def over(self, rows: Sequence[Rows], samples: Rows) -> HeldSamples:
        """Return samples of the table over rows in memory, those of each field that is held."""
        held = dict(zip(self._numbers, rows, strict=True))
        return self._table.indexer.over([held.get(field) for field in range(self._table.n_fields)], samples)

    def columns(
        self, held: HeldRows, n_samples: int, batch: BatchRows, buffers: BufferPool, *, all_cores: bool
    ) -> list[Column]:
        """Return the rows of each field.

        Args:
            held: the rows in memory.
            n_samples: number of samples.
            batch: their rows, as places in memory if the field is held.
            buffers: gives memory.
            all_cores: copy with torch's threads if these are faster.
        """
        columns: dict[int, Column] = {
            field: held.read(number, batch.fields[field], buffers, all_cores=all_cores)
            for number, field in enumerate(self._numbers)
        }
        if self._on_demand is not None:
            fields_on_demand = [field for field in range(self._table.n_fields) if field not in columns]
            rows = BatchRows(tuple(batch.fields[field] for field in fields_on_demand), batch.places)
            read = self._on_demand.begin_rows(n_samples, rows, None, at_once=True)
            columns.update(zip(fields_on_demand, read(), strict=True))
        return [columns[field] for field in range(self._table.n_fields)]
