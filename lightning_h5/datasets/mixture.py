"""Several row datasets as one: rows of each, one source after the other, and the source's name in each sample."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..counters import Counters
from ..errors import H5ValueError, listing
from ..hdf5 import ArrayLayout, FieldNames
from ..order import BlockTable, RowWeights
from ..types import IntArray
from .base import RawBatch, ReadCost, RowDataset
from .buffers import BufferPool
from .compatibility import different_packing
from .file_dataset import FileDataset
from .row_cache import bytes_of, copy_rows
from .sample_layout import Column, Part, SampleStructure, Transform

__all__ = ["SOURCE", "MixtureDataset", "mixture_dataset", "rows_of", "weighted_dataset"]

SOURCE = "source"
"""Where a sample has its source's name."""


def rows_of(name: str) -> str:
    """What a source's rows are counted under."""
    return f"rows of {name}"


@dataclass(frozen=True)
class _Share:
    """The rows of a batch that are of one source.

    Attributes:
        source: which one.
        places: where they are in the batch.
        rows: their numbers in the source.
        cycle: what tells the source's orders apart; None where nothing is planned.
    """

    source: int
    places: IntArray
    rows: IntArray
    cycle: int | None


class MixtureDataset(RowDataset):
    """Rows of several datasets, one after the other.

    A row's number may carry the cycle it is asked for in (see ``sampling.mixture``): ``cycle * len(self) + row``.
    Transforms draw anew in each cycle; ``with_index`` gives the row.

    Args:
        sources: the datasets, without transforms of their own; batches that mix them need fields that are alike.
        names: of the sources; None leaves the name out of the sample (there is one source, whose rows are repeated).
        structure: what a sample looks like, of the fields and, where there are names, the source's name after them.
        batch_transform: runs once on each batch.
        plans: whether the cycles are those of the sources' orders, so that a source may forget what a cycle had.

    Attributes:
        weights: how often each row is to come in training, if not once.
    """

    weights: RowWeights | None = None

    def __init__(
        self,
        sources: Sequence[RowDataset],
        names: Sequence[str] | None,
        structure: SampleStructure,
        *,
        batch_transform: Transform | None,
        plans: bool = True,
    ) -> None:
        self.sources, self.names = tuple(sources), None if names is None else tuple(names)
        self._plans = plans
        self._ends: IntArray = np.cumsum([len(source) for source in sources])
        super().__init__(structure, batch_transform)
        self.counters = Counters(tuple(map(rows_of, self.names or ())))
        self._join()

    def _reset(self) -> None:
        super()._reset()
        self._pid = os.getpid()
        self._buffers = BufferPool()

    def _join(self) -> None:
        """Has the sources count, and share out what is to be decoded, with us."""
        for source in self.sources:
            source.join(self.counters, self.work)

    def __len__(self) -> int:
        return int(self._ends[-1])

    # Reading -------------------------------------------------------------------------------------------------

    def gather(self, rows: IntArray, epoch: int | None = None) -> RawBatch:
        """See ``RowDataset.gather``."""
        shares = list(self._shares(rows, epoch))
        raws = [self.sources[share.source].gather(share.rows, share.cycle) for share in shares]
        return self._together(rows, shares, raws)

    def begin(self, rows: IntArray, epoch: int | None = None) -> Callable[[], RawBatch]:
        """See ``RowDataset.begin``."""
        shares = list(self._shares(rows, epoch))
        reads = [self.sources[share.source].begin(share.rows, share.cycle) for share in shares]
        return partial(self._complete, rows, shares, reads)

    def _complete(self, rows: IntArray, shares: Sequence[_Share], reads: Sequence[Callable[[], RawBatch]]) -> RawBatch:
        return self._together(rows, shares, [read() for read in reads])

    def prepare_workers(self, num_workers: int) -> None:
        """See ``RowDataset.prepare_workers``."""
        for source in self.sources:
            source.prepare_workers(num_workers)

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """See ``RowDataset.prefetch``."""
        had_room = [self.sources[one.source].prefetch(one.rows, one.cycle) for one in self._shares(rows, epoch)]
        return all(had_room)

    def _shares(self, rows: IntArray, epoch: int | None) -> Iterator[_Share]:
        if self._pid != os.getpid():  # a forked child has neither our threads nor what they were about to do
            self._reset()
            self._join()
        cycles, numbers = np.divmod(rows, len(self))
        found = np.searchsorted(self._ends, numbers, side="right")
        for source in np.unique(found).tolist() or [0]:
            places = np.flatnonzero(found == source)
            first = int(self._ends[source]) - len(self.sources[source])
            # Of two cycles in one batch the later one: what is left of the other is nothing.
            cycle = int(cycles[places].max()) if self._plans and epoch is not None and len(places) else None
            yield _Share(source, places, numbers[places] - first, cycle)

    def _together(self, rows: IntArray, shares: Sequence[_Share], raws: Sequence[RawBatch]) -> RawBatch:
        columns = raws[0].columns if len(raws) == 1 else self._merged(len(rows), shares, raws)
        if self.names is None:
            return RawBatch(rows, columns)
        names = [self.names[shares[0].source]] * len(rows)
        for share in shares[1:]:
            for place in share.places.tolist():
                names[place] = self.names[share.source]
        return RawBatch(rows, (*columns, names))

    def _merged(self, n_rows: int, shares: Sequence[_Share], raws: Sequence[RawBatch]) -> tuple[Column, ...]:
        merged: list[Column] = []
        for parts in zip(*(raw.columns for raw in raws), strict=True):
            first = parts[0]
            column: Column
            if isinstance(first, torch.Tensor):
                column = self._buffers.tensor((n_rows, *first.shape[1:]), first.dtype)
                for share, part in zip(shares, parts, strict=True):
                    assert isinstance(part, torch.Tensor), "fields are alike"
                    copy_rows(bytes_of(column), share.places, bytes_of(part.contiguous()), np.arange(len(part)))
            else:
                column = [None] * n_rows
                for share, part in zip(shares, parts, strict=True):
                    for place, value in zip(share.places.tolist(), part, strict=True):
                        column[place] = value
            merged.append(column)
        return tuple(merged)

    def finish(self, raw: RawBatch, **options: Any) -> Any:
        """See ``RowDataset.finish``."""
        if self.names is not None:
            counted = np.bincount(np.searchsorted(self._ends, raw.rows % len(self), side="right"))
            self.counters.add(**{rows_of(self.names[at]): n for at, n in enumerate(counted.tolist()) if n})
        return super().finish(raw, **options)

    # What it is ----------------------------------------------------------------------------------------------

    def files_of(self, rows: IntArray) -> list[str]:
        """The files that rows are read from."""
        paths = [path for one in self._shares(rows, None) for path in self.sources[one.source].files_of(one.rows)]
        return list(dict.fromkeys(paths))

    def places_of(self, numbers: IntArray) -> list[tuple[str, int]]:
        """See ``RowDataset.places_of``."""
        places = []
        for row in (numbers % len(self)).tolist():
            at = int(np.searchsorted(self._ends, row, side="right"))
            source = self.sources[at]
            places += source.places_of(np.array([row - int(self._ends[at]) + len(source)]))
        return places

    def layouts(self) -> Iterator[ArrayLayout]:
        """The arrays that rows are read from, of all files."""
        return chain.from_iterable(source.layouts() for source in self.sources)

    def identity(self) -> str:
        """A digest of the sources' rows, in their order."""
        names = self.names or [""] * len(self.sources)
        each = [f"{name}\0{source.identity()}\0" for name, source in zip(names, self.sources, strict=True)]
        return hashlib.sha256("".join(each).encode()).hexdigest()[:32]

    def blocks(self) -> BlockTable:
        """Which rows lie together on disk."""
        return BlockTable.of_sizes(np.concatenate([np.diff(source.blocks().starts) for source in self.sources]))

    @property
    def is_in_memory(self) -> bool:
        """Whether all rows are in memory now."""
        return all(source.is_in_memory for source in self.sources)

    @property
    def cost(self) -> ReadCost:
        """See ``RowDataset.cost``: rows as large, and read as far ahead, as of the source that has the largest."""
        each = [source.cost for source in self.sources]
        return ReadCost(
            max(one.row_bytes for one in each),
            all(one.has_cheap_random_access for one in each),
            max(one.block_bytes for one in each),
            sum(one.decoded_bytes for one in each),
            max(one.rows_per_chunk for one in each),
            max(one.rows_per_run for one in each),
        )

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows of all sources that this process keeps in memory now."""
        return sum(source.kept_bytes for source in self.sources)

    def read_with(self, cache_bytes: int, *, keeps: bool | None = None, in_runs: bool = False) -> None:
        """See ``RowDataset.read_with``: the sources share the memory, by what they hold."""
        sizes = [source.cost.decoded_bytes for source in self.sources]
        self.in_runs = in_runs
        for source, n_bytes in zip(self.sources, sizes, strict=True):
            source.read_with(cache_bytes * n_bytes // max(1, sum(sizes)), keeps=keeps, in_runs=in_runs)

    def summary(self) -> list[str]:
        """See ``RowDataset.summary``."""
        names = self.names or ()
        shown = [f"{name}: {source!r}" for name, source in zip(names, self.sources, strict=False)]
        return [
            f"{len(self):,} rows" if self.weights is None else f"{len(self):,} rows weighted {self.weights.text}",
            *(shown or map(repr, self.sources)),
        ]

    def close(self) -> None:
        """Gives back what this process holds; the next read gets it again."""
        for source in self.sources:
            source.close()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_buffers"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join()


def weighted_dataset(dataset: RowDataset, weights: RowWeights) -> MixtureDataset:
    """A dataset whose rows come as often as weights say.

    Args:
        dataset: the rows; a mixture keeps its sources' names.
        weights: of the rows.
    """
    if isinstance(dataset, MixtureDataset):
        weighted = MixtureDataset(
            dataset.sources,
            dataset.names,
            dataset.structure,
            batch_transform=dataset.batch_transform,
            plans=False,
        )
    else:
        structure = replace(dataset.structure, n_rows=len(dataset))
        weighted = MixtureDataset([dataset], None, structure, batch_transform=dataset.batch_transform, plans=False)
    weighted.weights = weights
    return weighted


def mixture_dataset(
    sources: Mapping[str, FileDataset],
    *,
    mixes: bool,
    is_named: bool = True,
    transform: Transform | None,
    batch_transform: Transform | None,
    with_index: bool,
) -> MixtureDataset:
    """The sources as one dataset, with samples that name their source.

    Args:
        sources: by name.
        mixes: whether a batch may have rows of several.
        is_named: whether samples have their source's name.
        transform: runs on each sample.
        batch_transform: runs on each batch.
        with_index: add each row's index among those of all sources.

    Raises:
        H5ValueError: their rows do not go together.
    """
    _check_alike(sources, mixes=mixes)
    first = next(iter(sources.values())).structure.x
    fields, flags = first.fields, first.flags
    if is_named and SOURCE in fields.names:
        raise H5ValueError(
            f"the sources have a field {SOURCE!r}, where samples have the name of their source. Give the field another "
            f"name (field_map={{'other_name': {SOURCE!r}}}), or name the fields to load without it."
        )
    if is_named:
        fields = FieldNames("dict", (*fields.keys, SOURCE), (*fields.names, SOURCE))
        flags = (*flags, False) if flags else ()
    structure = SampleStructure(
        Part(fields, transform, flags),
        None,
        with_index,
        sum(map(len, sources.values())),
    )
    names = list(sources) if is_named else None
    return MixtureDataset(list(sources.values()), names, structure, batch_transform=batch_transform)


def _check_alike(sources: Mapping[str, FileDataset], *, mixes: bool) -> None:
    """Refuses sources whose samples have other fields, or whose rows cannot be in one batch.

    Args:
        sources: datasets with samples that are dicts, by name.
        mixes: whether a batch may have rows of several.

    Raises:
        H5ValueError: they differ.
    """
    (first, expected), *others = sources.items()
    fields = expected.structure.x.fields.names
    for name, source in others:
        if (found := source.structure.x.fields.names) != fields:
            raise H5ValueError(
                f"the source {first!r} has the fields {listing(fields)}, and {name!r} has {listing(found)}. Name the "
                "fields to load (load_fields), and what they are called in each source (its field_map)."
            )
        for left, right in zip(expected.table.layouts[0], source.table.layouts[0], strict=True):
            if left.packing != right.packing:
                raise different_packing(left, right)
        for field, a, b in zip(fields, expected.kinds, source.kinds, strict=True) if mixes else ():
            if a != b:
                raise H5ValueError(
                    f"{field!r} is {a} in the source {first!r}, and {b} in {name!r}: they cannot be in one batch. "
                    "Have each batch be of one source (mix='batches', and files of their own to validate on)."
                )
