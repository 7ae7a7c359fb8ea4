"""Readers of fields on demand: decoded ahead for all files, sample by sample, or row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..counters import Counters
from ..hdf5 import OpenOptions
from ..readers import Boxes, ChunkedReader, EncodedReader, TaskQueue, images_alike, is_pooled, open_chunked
from ..readers.buffers import BufferPool, tensor_of
from ..readers.on_device import DecodingDevice, open_on_device, why_not_on_device
from ..samples import RowTable, RowUnits, SparseRows, reads_of_blocks
from ..types import IntArray, RowReader
from .sample_layout import FieldPlan

__all__ = ["EncodedRows", "RowsByPart", "open_chunked_fields", "read_each", "why_decoded_on_cpu"]

RowsByPart: TypeAlias = dict[int, tuple[IntArray | None, IntArray]]
"""For each part, the positions of its rows in the batch (None for all) and their row numbers in the part."""


def open_chunked_fields(
    table: RowTable,
    plans: Sequence[FieldPlan],
    fields: Sequence[int],
    options: OpenOptions,
    *,
    n_bytes: int,
    samples: IntArray | None,
    located: Callable[[], IntArray],
    retain: bool | None,
    in_runs: bool,
    work: TaskQueue,
    counters: Counters,
    device: DecodingDevice | None = None,
) -> dict[int, ChunkedReader]:
    """Return the readers of the fields that are decoded ahead, each for all files, by field number.

    Args:
        table: the files.
        plans: plans of all fields.
        fields: numbers of the fields that are read on demand.
        options: how files are opened.
        n_bytes: memory for the decoded rows of all fields.
        samples: samples of an epoch; None for all.
        located: returns the numbers of these samples in the table.
        retain: see ``RowDataset.read_with``.
        in_runs: see ``RowDataset.read_with``.
        work: threads that decode.
        counters: counters of rows, bytes and seconds.
        device: device that decodes fields, as far as it can; None decodes all on the CPU.
    """
    kinds, indexer = table.layouts.examples, table.indexer
    of_segments = {*table.fields_of_segments}
    of_rows = {*table.fields_of_rows, *of_segments}
    chunked = [
        field
        for field in fields
        if field in of_rows and any(is_pooled(arrays[field], options, in_runs=in_runs) for arrays in kinds)
    ]
    row_bytes = [array.row_bytes for array in kinds[0]] if kinds else []
    for field in set(chunked) & of_segments:  # other fields have several rows in a sample
        row_bytes[field] = max(1, row_bytes[field] * table.n_segments // max(1, table.n_rows))
    total, rows_per_run = sum(row_bytes[field] for field in chunked), RowUnits(table).rows_per_block

    def rows_used(field: int) -> IntArray | None:
        return indexer.segments.numbers_of(located()) if field in of_segments else None  # samples are whole segments

    changed_later = {field for field in chunked if indexer.cuts(field) or plans[field].guards}
    readers: dict[int, ChunkedReader] = {}
    for field in chunked:
        layouts, share = table.layouts.of_field(field), n_bytes * row_bytes[field] // total
        rows = rows_used(field)
        reads = None if field in of_segments else partial(reads_of_blocks, table, samples, field)
        if device is not None and why_decoded_on_cpu(table, plans, field, options, device) is None:
            readers[field] = open_on_device(
                device,
                layouts,
                options,
                n_bytes=share,
                work=work,
                counters=counters,
                rows=rows,
                retain=retain,
                reads=reads,
            )
            continue
        readers[field] = open_chunked(
            layouts,
            options,
            rows_per_run=rows_per_run,
            n_bytes=share,
            work=work,
            counters=counters,
            rows=rows,
            reads=reads,
            retain=retain,
            prepare=None if field in changed_later else plans[field].affine,
            dtype=None if field in changed_later else plans[field].gathered,
        )
    return readers


def why_decoded_on_cpu(
    table: RowTable, plans: Sequence[FieldPlan], field: int, options: OpenOptions, device: DecodingDevice
) -> str | None:
    """Return why a field is decoded on the CPU, in a few words; None if a device decodes it.

    Args:
        table: the files.
        plans: plans of all fields.
        field: number of the field.
        options: how files are opened.
        device: the device.
    """
    if plans[field].guards:
        return "its values are checked, for missing ones or for the range of a dtype"
    if isinstance(table.indexer, SparseRows):
        return "rows of a sparse matrix are put together on the CPU"
    if table.indexer.cuts(field):
        return "its rows are cut into patches"
    if options.swmr or options.gives_back:
        return "its file has a live writer" if options.swmr else "its chunks leave the page cache"
    arrays = [arrays[field] for arrays in table.layouts.examples]
    return next((why for array in arrays if (why := why_not_on_device(array, device)) is not None), None)


def read_each(
    boxes: Boxes, lengths: IntArray | None, n_samples: int | None, reader_of: Callable[[int], RowReader]
) -> list[npt.NDArray[Any]]:
    """Return the stored rows of each sample, for a field with rows of several shapes.

    Args:
        boxes: the rows.
        lengths: number of rows of each sample; None if all samples have the same number.
        n_samples: number of samples; None if each has one value, without an axis of steps.
        reader_of: returns the reader of a part.
    """
    rows = boxes.rows
    parts: list[int] = np.broadcast_to(boxes.part_of_rows, rows.shape).tolist()
    if n_samples is None:
        values = [reader_of(part).read(rows[at : at + 1])[0] for at, part in enumerate(parts)]
        return [np.asarray(value) if isinstance(value, np.generic) else value for value in values]
    lengths = np.full(n_samples, len(rows) // max(1, n_samples)) if lengths is None else lengths
    ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    return [reader_of(parts[low]).read(rows[low:high]) for low, high in pairwise(ends)]


class EncodedRows:
    """Reads rows of a field that are decoded one by one, such as images.

    Rows are expected to have the shape of the last batch's rows, and are then decoded into one tensor.
    """

    def __init__(self) -> None:
        self._alike: tuple[tuple[int, ...], np.dtype[Any]] | None = None  # shape and dtype of the last batch's rows

    def read(
        self, n_rows: int, by_part: RowsByPart, reader_of: Callable[[int], RowReader], buffers: BufferPool
    ) -> npt.NDArray[Any] | torch.Tensor:
        """Return rows, as one tensor if they have the expected shape.

        Args:
            n_rows: number of rows.
            by_part: the rows.
            reader_of: returns the reader of a part.
            buffers: memory for the tensor.
        """
        block: npt.NDArray[Any] | None = None
        memory: list[npt.NDArray[Any]] | None = None
        if self._alike is not None:
            (n_channels, *sizes), dtype = self._alike
            block = buffers.array((n_rows, *sizes, n_channels), dtype)
            memory = list(np.moveaxis(block, -1, 1))
        rows, fills_memory = np.empty(n_rows, dtype=object), False
        for part, (positions, rows_of_part) in by_part.items():
            reader = reader_of(part)
            positions = np.arange(n_rows) if positions is None else positions
            if isinstance(reader, EncodedReader):
                reader.read_to(rows_of_part, rows, positions, memory)
                fills_memory = reader.fills_memory
            else:
                rows[positions] = reader.read(rows_of_part)
        if block is not None and memory is not None:
            is_there = [row is own for row, own in zip(rows, memory, strict=True)]
            if all(is_there):
                return tensor_of(block).movedim(-1, 1)
            for at in np.flatnonzero(is_there).tolist():
                rows[at] = rows[at].copy("K")  # the block's memory is used again
        self._alike = images_alike(rows) if fills_memory else None
        return rows
