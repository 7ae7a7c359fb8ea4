"""The contents of a file: names, arrays, their storage, and the cost of a random row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...errors import H5Error, short_repr
from ...hdf5 import (
    AXIS,
    COORDINATES,
    FAULTS,
    AlikeArrays,
    ArrayLayout,
    ChangeGuard,
    Entry,
    OpenFile,
    axes_of,
    entries_of,
    filters_of,
    kind_of,
    open_h5,
    software_of,
)
from ...options import FileOptions
from ...readers import fallback_reason

DIGITS = re.compile(r"\d+")

TIMES_OF_PANDAS, CODES_OF_PANDAS = "dates or times", "category codes"

MAX_VALUES = 8  # maximum number of values of an attribute to show


@dataclass(frozen=True, kw_only=True)
class RowCost:
    """The cost of reading a single row, with nothing kept in memory.

    Attributes:
        bytes_read: bytes read from the file, on average.
        bytes_decoded: bytes after decoding; more than the row, if rows share a chunk.
        n_chunks: number of chunks with a part of the row; 0 if the array is not chunked.
        why_slow: the reason why only the HDF5 library can read the array, under its lock; None if bytes are read by
            position.
    """

    bytes_read: int
    bytes_decoded: int
    n_chunks: int
    why_slow: str | None


@dataclass(frozen=True, kw_only=True)
class ArrayReport:
    """One array of a file.

    Attributes:
        name: name in the file.
        shape: shape of the array; None for an empty dataspace.
        dtype: dtype in words.
        storage: storage layout; None if it is unknown.
        chunks: shape of a chunk, or None.
        filters: names of its filters, in the order of writing, with their level if they have one.
        n_bytes: bytes of all rows as read.
        n_stored_bytes: bytes of the array in the file.
        ratio: compression ratio, ``n_bytes / n_stored_bytes``; None if no bytes are stored.
        row: the cost of a random row; None if the array has no rows for training.
        integrity: integrity level, 0 to 3 (see ``INTEGRITY``).
        problem: the reason why the array cannot be used for training, or None.
        packing: attributes that declare the decoding of its integers, or None.
        structure: its role in the file format of other software; None for data.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    storage: str | None = None
    chunks: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()
    n_bytes: int = 0
    n_stored_bytes: int = 0
    ratio: float | None = None
    row: RowCost | None = None
    integrity: int | None = None
    problem: str | None = None
    packing: str | None = None
    structure: str | None = None

    @property
    def is_data(self) -> bool:
        """Whether the array may have values for training."""
        return self.structure is None or self.structure in COORDINATES


class Contents(NamedTuple):
    """The contents of a file.

    Attributes:
        entries: all names.
        arrays: the reports of all arrays.
        layouts: trainable arrays and members of tables, by key.
        texts: arrays and members of tables with one text per row, by key.
        columns: number of rows of each array, or member of a table, with one number or text per row.
        software: the program or format that marks the file as its own; None if no mark is known.
        described: the descriptions of all arrays, for a catalog of the file.
        attributes: the attributes of the file, which are those of its root group, as text.
        pandas: arrays and members of tables with dates, times or category codes of pandas, by key, in words.
    """

    entries: tuple[Entry, ...]
    arrays: tuple[ArrayReport, ...]
    layouts: dict[str, ArrayLayout]
    texts: dict[str, ArrayLayout]
    columns: dict[str, int]
    software: str | None
    described: AlikeArrays
    attributes: dict[str, str]
    pandas: dict[str, str]


def contents_of(path: str) -> Contents:
    """Return the contents of a file."""
    layouts: dict[str, ArrayLayout] = {}
    texts: dict[str, ArrayLayout] = {}
    columns: dict[str, int] = {}
    with open_h5(path) as file:
        entries, software = tuple(entries_of(file)), software_of(file)
        describe = _Describer(file, path, entries, layouts, texts, columns)
        arrays = tuple(describe(entry) for entry in entries if entry.kind == "array")
        pandas = _marked_by_pandas(file, layouts.values()) if software == "PyTables" else {}
        attributes = _attributes_of(file)
        return Contents(entries, arrays, layouts, texts, columns, software, describe.alike, attributes, pandas)


def _marked_by_pandas(file: Any, layouts: Iterable[ArrayLayout]) -> dict[str, str]:
    """Return arrays and members of tables that hold dates, times or category codes, by the attributes of pandas."""
    marked: dict[str, str] = {}
    for layout in layouts:
        with suppress(*FAULTS):
            attributes, column = file[layout.name].attrs, layout.key.rpartition("/")[2]
            dtype = attributes.get(f"{column}_dtype" if layout.members else "value_type", "")
            dtype = dtype.decode(errors="replace") if isinstance(dtype, bytes) else str(dtype)
            if dtype.startswith(("datetime64", "timedelta64")):
                marked[layout.key] = TIMES_OF_PANDAS
            elif layout.members and attributes.get(f"{column}_meta") in ("category", b"category"):
                marked[layout.key] = CODES_OF_PANDAS
    return marked


def _attributes_of(file: Any) -> dict[str, str]:
    """Return the attributes of the root as text; the shape and dtype of those with many values."""
    attributes: dict[str, str] = {}
    with suppress(*FAULTS):
        for name in file.attrs:
            try:
                attributes[name] = _attribute_text(file.attrs, name)
            except FAULTS as error:
                attributes[name] = f"unreadable: {error}"
    return attributes


def _attribute_text(attributes: Any, name: str) -> str:
    stored = attributes.get_id(name)
    if stored.shape is None:
        return "empty"
    if math.prod(stored.shape) > MAX_VALUES:
        return f"{stored.shape} {stored.dtype}"
    value = attributes[name]
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    return short_repr(value.decode(errors="replace") if isinstance(value, bytes) else value)


class _Describer:
    """Reports on the arrays of an open file, and notes their layouts and columns.

    Arrays with the same structure share a description (see ``AlikeArrays``).
    """

    def __init__(
        self,
        file: Any,
        path: str,
        entries: Iterable[Entry],
        layouts: dict[str, ArrayLayout],
        texts: dict[str, ArrayLayout],
        columns: dict[str, int],
    ) -> None:
        self._file, self._path, self._layouts, self._texts, self._columns = file, path, layouts, texts, columns
        self._files, self._guard = FileOptions(), ChangeGuard.of_open(file, path)
        self._opened = OpenFile(path, self._guard, file)
        self.alike = AlikeArrays(remembers=True)
        # By group; groups without attributes declare no axis.
        self._axes = {entry.name: set[str]() for entry in entries if entry.kind == "group" and not entry.n_attributes}
        self._reports: dict[Any, ArrayReport] = {}  # by template, rows and stored bytes

    def __call__(self, entry: Entry) -> ArrayReport:
        group, _, last = entry.name.rpartition("/")
        if group not in self._axes:
            self._axes[group] = axes_of(self._file, group)
        structure = entry.structure or (AXIS if last in self._axes[group] else None)
        report = ArrayReport(name=entry.name, shape=entry.shape, dtype=entry.dtype, structure=structure)
        if not report.is_data:
            return replace(report, problem=f"it is {entry.structure}, not data")
        alike = f"{DIGITS.sub('#', last)} {entry.dtype} {(entry.shape or ())[1:]}"
        try:
            layout, template = self.alike.describe_alike(
                self._opened, self._path, entry.name, self._files, self._guard, alike=alike
            )
        except (H5Error, *FAULTS) as error:
            report = replace(report, problem=f"{error}")
            with suppress(*FAULTS):
                array = self._file[entry.name]
                filters = tuple(_filter_text(step.label, ()) for step in filters_of(array))
                report = replace(report, chunks=array.chunks, filters=filters)
            return report
        self._note(entry.name, layout)
        key = None if template is None else (template, layout.n_rows, layout.n_stored_bytes, structure)
        if key not in self._reports or key is None:
            self._reports[key] = _with_layout(report, layout)
        return replace(self._reports[key], name=entry.name)

    def _note(self, name: str, layout: ArrayLayout) -> None:
        n_rows = layout.n_rows
        kind, members = kind_of(layout.dtype), [member for member in layout.stored.names or () if "/" not in member]
        if kind == "number" and n_rows:
            self._layouts[name] = layout
        elif kind == "compound" and n_rows:
            columns = [layout.member(member) for member in members if kind_of(layout.stored[member].base) == "number"]
            self._layouts.update({column.key: column for column in columns})
        if kind == "compound" and not layout.row_shape:
            single = [member for member in members if not layout.stored[member].shape]
            keys = [f"{name}/{member}" for member in single if kind_of(layout.stored[member]) in ("number", "text")]
            self._columns.update(dict.fromkeys(keys, n_rows))
            text = [layout.member(member) for member in single if kind_of(layout.stored[member]) == "text"]
            self._texts.update({column.key: column for column in text})
        elif not layout.row_shape:
            self._columns[name] = n_rows
            if kind == "text":
                self._texts[name] = layout


def _with_layout(report: ArrayReport, layout: ArrayLayout) -> ArrayReport:
    stored, n_rows = layout.n_stored_bytes, layout.n_rows
    return replace(
        report,
        storage=layout.storage,
        chunks=layout.chunks,
        filters=tuple(_filter_text(step.label, step.options) for step in layout.filters),
        n_bytes=layout.n_bytes,
        n_stored_bytes=stored,
        ratio=layout.stored_row_bytes * n_rows / stored if stored else None,
        row=_row_cost(layout) if n_rows else None,
        integrity=layout.integrity,
        problem=_problem(layout),
        packing=None if layout.packing is None else str(layout.packing),
    )


def _row_cost(layout: ArrayLayout) -> RowCost:
    n_chunks, n_read, n_decoded = 0, layout.stored_row_bytes, layout.stored_row_bytes
    if layout.chunks:
        n_chunks = math.prod(-(-size // step) for size, step in zip(layout.axes, layout.chunks[1:], strict=True))
        if not layout.is_contiguous:
            n_read = round(layout.n_stored_bytes / max(1, -(-layout.n_rows // layout.rows_per_chunk)))
            n_decoded = layout.chunk_span_bytes
    return RowCost(bytes_read=n_read, bytes_decoded=n_decoded, n_chunks=n_chunks, why_slow=fallback_reason(layout))


def _filter_text(label: str, options: tuple[int, ...]) -> str:
    return f"gzip {options[0]}" if label == "deflate" and options else {"deflate": "gzip"}.get(label, label)


def _problem(layout: ArrayLayout) -> str | None:
    """Return the reason why an array cannot be used for training; None if it can."""
    kind = kind_of(layout.dtype)
    if not layout.n_rows:
        return "it has no rows"
    if kind == "compound":
        return "it is a table: name its members"
    if kind == "text":
        return "it is text, a list of str in a batch: use it as a target, or as one of several inputs"
    return None if kind == "number" else f"a tensor cannot hold {layout.stored}"
