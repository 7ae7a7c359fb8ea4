"""Several row datasets as one: the rows of one source after the other, with the source's name in each sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..catalog import check_same_numbers
from ..counters import FORKED_WORKERS, Counters
from ..errors import H5ValueError, listing
from ..hdf5 import FieldNames
from ..order import BlockTable, RowWeights
from ..readers import TaskQueue
from ..readers.buffers import BufferPool, Column, put_rows
from ..samples import CsrRows
from ..types import Identity, IntArray
from .base import RowDataset
from .raw_batch import RawBatch
from .sample_layout import SampleLayout, SamplePart, Transform
from .table_dataset import TableDataset

__all__ = ["SOURCE", "MixtureDataset", "mixture_dataset", "rows_of", "weighted_dataset"]

SOURCE = "source"
"""The field of a sample with the name of its source."""


def rows_of(name: str) -> str:
    """Return the name of the counter of a source's rows."""
    return f"rows of {name}"


class SourceShare(NamedTuple):
    """The rows of a batch from one source.

    Attributes:
        source: number of the source.
        places: their places in the batch.
        rows: their numbers in the source.
        cycle: number of the source's cycle, which has an order of its own; None without a plan.
    """

    source: int
    places: IntArray
    rows: IntArray
    cycle: int | None


class MixedColumn(Sequence[Any]):
    """A field of a batch of sources with rows of different dtypes or shapes: one array per source.

    A slice is a plain column: the array of a source if all of its rows are of this source, else a list of rows.

    Args:
        parts: the rows of each source.
        places: their places in the batch, ascending.
    """

    def __init__(self, parts: Sequence[Column], places: Sequence[IntArray]) -> None:
        self._parts = parts
        n_rows = sum(map(len, places))
        self._numbers, self._rows = np.empty(n_rows, dtype=np.int64), np.empty(n_rows, dtype=np.int64)
        for number, places_of_part in enumerate(places):
            self._numbers[places_of_part] = number
            self._rows[places_of_part] = np.arange(len(places_of_part))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, int):
            return self._parts[self._numbers[at]][int(self._rows[at])]
        numbers, rows = self._numbers[at].tolist(), self._rows[at].tolist()
        if len(set(numbers)) > 1:
            return [self._parts[number][row] for number, row in zip(numbers, rows, strict=True)]
        # Consecutive places of one source have consecutive rows.
        return self._parts[numbers[0]][rows[0] : rows[-1] + 1] if rows else self._parts[0][:0]


def _completed(reads: Sequence[Callable[[], RawBatch]]) -> list[RawBatch]:
    """Complete reads, also after one of them failed: until then they hold places in the caches of their sources."""
    raws, failures = list[RawBatch](), list[BaseException]()
    for read in reads:
        try:
            raws.append(read())
        except BaseException as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return raws


def _are_alike(parts: Sequence[Column]) -> bool:
    """Return whether columns can be joined: tensors of one dtype and row shape, matrices of one width, or lists."""
    kinds: set[Any] = set()
    for part in parts:
        if isinstance(part, torch.Tensor):
            kinds.add((part.dtype, part.shape[1:]))
        elif isinstance(part, CsrRows):
            kinds.add((part.values.dtype, part.n_columns))
        else:
            kinds.add(type(part))
    return len(kinds) == 1


class MixtureDataset(RowDataset):
    """Rows of several datasets, one after the other.

    A row's number may include its cycle (see ``order.mixture``): ``cycle * len(self) + row``. Transforms draw
    differently in each cycle; ``with_index`` adds the number without the cycle.

    Args:
        sources: the datasets, without transforms of their own; batches that mix them need alike fields.
        names: of the sources; None leaves the name out of the sample (there is one source with repeated rows).
        sample_layout: the layout of a sample: the fields, followed by the source's name if there are names.
        batch_transform: runs once on each batch.
        plans: whether cycles are the cycles of the sources' orders. A source then drops rows when a cycle ends.

    Attributes:
        weights: number of times that each row is drawn in training; None for once.
    """

    weights: RowWeights | None = None
    _of_process = (*RowDataset._of_process, "_buffers")

    def __init__(
        self,
        sources: Sequence[RowDataset],
        names: Sequence[str] | None,
        sample_layout: SampleLayout,
        *,
        batch_transform: Transform | None,
        plans: bool = True,
    ) -> None:
        self.names = None if names is None else tuple(names)
        self._plans = plans
        self._ends: IntArray = np.cumsum([len(source) for source in sources])
        counters = Counters(tuple(map(rows_of, self.names or ())), FORKED_WORKERS)
        super().__init__(sample_layout, batch_transform, sources=sources, counters=counters)

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """See ``RowDataset.join``."""
        super().join(counters, work)
        self._buffers = BufferPool()

    def pin_batches(self, pins: bool) -> None:
        """See ``RowDataset.pin_batches``."""
        self._buffers.pins = pins

    def __len__(self) -> int:
        return int(self._ends[-1])

    def begin(self, rows: IntArray, epoch: int | None = None, *, at_once: bool = False) -> Callable[[], RawBatch]:
        """See ``RowDataset.begin``."""
        shares = self.shares(rows, epoch)
        reads: list[Callable[[], RawBatch]] = []
        try:
            reads.extend(self.sources[share.source].begin(share.rows, share.cycle, at_once=at_once) for share in shares)
        except BaseException:
            with suppress(Exception):
                _completed(reads)
            raise
        return lambda: self._together(rows, shares, _completed(reads))

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """See ``RowDataset.prefetch``."""
        shares = self.shares(rows, epoch)
        had_room = [self.sources[share.source].prefetch(share.rows, share.cycle) for share in shares]
        return all(had_room)

    def shares(self, rows: IntArray, epoch: int | None) -> list[SourceShare]:
        """Return which rows each source has of some."""
        self._check_process()
        cycles, numbers = np.divmod(rows, len(self))
        owners = np.searchsorted(self._ends, numbers, side="right")
        shares = []
        for source in np.unique(owners).tolist() or [0]:
            places = np.flatnonzero(owners == source)
            first = int(self._ends[source]) - len(self.sources[source])
            # If a batch spans two cycles, only the later one has rows left.
            cycle = int(cycles[places].max()) if self._plans and epoch is not None and len(places) else None
            shares.append(SourceShare(source, places, numbers[places] - first, cycle))
        return shares

    def _together(self, rows: IntArray, shares: Sequence[SourceShare], raws: Sequence[RawBatch]) -> RawBatch:
        columns = raws[0].columns
        if len(raws) > 1:
            columns = tuple(
                self._column_of([raw.columns[at] for raw in raws], shares, len(rows)) for at in range(len(columns))
            )
        if self.names is None:
            return RawBatch(rows, columns)
        names: Column = [""] * len(rows)
        for share in shares:
            put_rows(names, share.places, [self.names[share.source]] * len(share.places))
        n_inputs = len(self.sample_layout.x.fields.names) - 1
        return RawBatch(rows, (*columns[:n_inputs], names, *columns[n_inputs:]))

    def _column_of(self, parts: Sequence[Column], shares: Sequence[SourceShare], n_rows: int) -> Column:
        """Return one column with the rows of several sources."""
        if not _are_alike(parts):
            return MixedColumn(parts, [share.places for share in shares])
        if matrices := [part for part in parts if isinstance(part, CsrRows)]:  # all are, since they are alike
            return CsrRows.placed([(share.places, rows) for share, rows in zip(shares, matrices, strict=True)])
        column: Column = [None] * n_rows
        if isinstance(first := parts[0], torch.Tensor):
            column = self._buffers.tensor((n_rows, *first.shape[1:]), first.dtype)
        for share, part in zip(shares, parts, strict=True):
            put_rows(column, share.places, part)
        return column

    @property
    def is_passthrough(self) -> bool:
        """See ``RowDataset.is_passthrough``: named sources are counted in ``finish``."""
        return self.names is None and super().is_passthrough

    def finish(self, raw: RawBatch, **options: Any) -> Any:
        """See ``RowDataset.finish``."""
        columns = [column[:] if isinstance(column, MixedColumn) else column for column in raw.columns]
        return super().finish(raw._replace(columns=tuple(columns)), **options)

    def _count_finished(self, numbers: IntArray) -> None:
        """See ``RowDataset._count_finished``: the rows of each named source."""
        if self.names is not None:
            counts = np.bincount(np.searchsorted(self._ends, numbers % len(self), side="right"))
            self.counters.add(**{rows_of(self.names[at]): n for at, n in enumerate(counts.tolist()) if n})

    # Description ---------------------------------------------------------------------------------------------

    def places_of(self, numbers: IntArray) -> list[tuple[str, int]]:
        """See ``RowDataset.places_of``."""
        places: list[Any] = [None] * len(numbers)
        for share in self.shares(numbers, None):
            put_rows(places, share.places, self.sources[share.source].places_of(share.rows))
        return places

    def place_of(self, number: int) -> tuple[str, str]:
        """See ``RowDataset.place_of``."""
        (share,) = self.shares(np.array([number], np.int64), None)
        return self.sources[share.source].place_of(int(share.rows[0]))

    def identity(self) -> Identity:
        """See ``RowDataset.identity``."""
        names = self.names or [""] * len(self.sources)
        identities = [source.identity() for source in self.sources]

        def joined(entry: str) -> str:
            parts = [f"{name}\0{identity[entry]}\0" for name, identity in zip(names, identities, strict=True)]
            return hashlib.sha256("".join(parts).encode()).hexdigest()[:32]

        common = [entry for entry in identities[0] if all(entry in identity for identity in identities)]
        return {entry: joined(entry) for entry in common}

    def blocks(self) -> BlockTable:
        """See ``RowDataset.blocks``."""
        return BlockTable.of_sizes(np.concatenate([np.diff(source.blocks().starts) for source in self.sources]))

    def summary(self) -> list[str]:
        """See ``RowDataset.summary``."""
        names = self.names or ()
        shown = [f"{name}: {source!r}" for name, source in zip(names, self.sources, strict=False)]
        return [
            f"{len(self):,} rows" if self.weights is None else f"{len(self):,} rows weighted {self.weights.text}",
            *(shown or map(repr, self.sources)),
        ]


def weighted_dataset(dataset: RowDataset, weights: RowWeights) -> MixtureDataset:
    """Return a dataset that repeats rows by their weights.

    Args:
        dataset: the rows. The sources of a mixture keep their names.
        weights: of the rows.
    """
    sources, names, sample_layout = [dataset], None, replace(dataset.sample_layout, n_rows=len(dataset))
    if isinstance(dataset, MixtureDataset):
        sources, names, sample_layout = [*dataset.sources], dataset.names, dataset.sample_layout
    weighted = MixtureDataset(sources, names, sample_layout, batch_transform=dataset.batch_transform, plans=False)
    weighted.weights = weights
    return weighted


def mixture_dataset(
    sources: Mapping[str, TableDataset],
    *,
    mixes: bool,
    is_named: bool = True,
    transform: Transform | None,
    target_transform: Transform | None = None,
    batch_transform: Transform | None,
    with_index: bool,
) -> MixtureDataset:
    """Return the sources as one dataset.

    Args:
        sources: by name.
        mixes: whether a batch may have rows of several.
        is_named: whether samples that are dicts have their source's name.
        transform: runs on each sample's input.
        target_transform: runs on each sample's target.
        batch_transform: runs on each batch.
        with_index: add each row's index among those of all sources.

    Raises:
        H5ValueError: their rows cannot be in one dataset.
    """
    _check_sources_alike(sources, mixes=mixes)
    layout = next(iter(sources.values())).sample_layout
    fields, flags, y, n_inputs = layout.x.fields, layout.x.flags, layout.y, len(layout.x.fields.names)
    is_named = is_named and fields.kind == "dict"
    if is_named and SOURCE in fields.names:
        raise H5ValueError(
            f"the sources have a field {SOURCE!r}, which is the name of their source. Give the field another "
            f"name (fields={{'other_name': {SOURCE!r}}}), or name the fields to load without it."
        )
    if is_named:
        fields = FieldNames("dict", (*fields.keys, SOURCE), (*fields.names, SOURCE))
        flags = (*flags, False) if flags else ()
    sample_layout = replace(
        layout,
        x=SamplePart(fields, transform, flags),
        y=None if y is None else replace(y, transform=target_transform),
        with_index=with_index,
        n_rows=sum(map(len, sources.values())),
        joints=(*layout.joints[:n_inputs], *[None] * is_named, *layout.joints[n_inputs:]) if layout.joints else (),
    )
    names = list(sources) if is_named else None
    return MixtureDataset(list(sources.values()), names, sample_layout, batch_transform=batch_transform)


def _check_sources_alike(sources: Mapping[str, TableDataset], *, mixes: bool) -> None:
    """Refuse sources with different fields, or with rows that cannot be in one batch.

    Args:
        sources: datasets with dicts as samples, by name.
        mixes: whether a batch may have rows of several sources.

    Raises:
        H5ValueError: fields or rows differ.
    """
    (first, expected), *rest = sources.items()
    fields = _names_of(expected)
    for name, source in rest:
        if (names := _names_of(source)) != fields:
            raise H5ValueError(
                f"the source {first!r} has the fields {listing(fields)}, and {name!r} has {listing(names)}. Name the "
                "fields to load, and their arrays in each source (its fields)."
            )
        for left, right in zip(expected.table.layouts[0], source.table.layouts[0], strict=True):
            check_same_numbers(left, right)
        if not mixes:
            continue
        for field, a, b in zip(expected.fields.names, _rows_as_text(expected), _rows_as_text(source), strict=False):
            if a != b:
                raise H5ValueError(
                    f"{field!r} is {a} in the source {first!r}, and {b} in {name!r}: they cannot be in one batch. Make "
                    "each batch from one source (mix='batches', and separate validation files)."
                )


def _names_of(source: TableDataset) -> tuple[str, ...]:
    """Return the names of the fields, in the order of the table; of an input and a target their place, if alone."""
    layout = source.sample_layout
    return tuple(
        name
        for place, part in (("x", layout.x), ("y", layout.y))
        if part is not None
        for name in ((place,) if part.fields.kind == "single" else part.fields.names)
    )


def _rows_as_text(source: TableDataset) -> list[str]:
    """Return dtype and shape of a row of each field."""
    matrices = source.fields.matrices
    return [
        f"{plan.dtype_name} of {matrices[at].n_columns} columns" if at in matrices else str(plan)
        for at, plan in enumerate(source.plans)
    ]
