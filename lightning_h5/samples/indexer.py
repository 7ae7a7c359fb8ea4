"""The interface of all kinds of samples: the rows of samples, their blocks, and the assembly of batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from ..order import BlockTable, as_array, condensed, find_places, rows_at
from ..types import IntArray, cached_property
from .assemblers import Assembler
from .sample_rows import BatchRows, FieldRows, Places
from .segments import BoolArray, Segments

__all__ = ["HeldSamples", "Indexer", "PartsOfSegments", "Units", "rows_of_all"]

SAMPLES_AT_A_TIME = 1 << 14  # maximum number of samples whose rows are listed at a time


class Units(Protocol):
    """The rows of files, divided into units that an order may shuffle."""

    @property
    def rows_per_block(self) -> IntArray:
        """Rows per chunk of the coarsest array of each part; the last chunk may have fewer."""
        ...

    @property
    def rows_per_unit(self) -> IntArray:
        """Rows per block of each part, if samples have several rows."""
        ...

    @property
    def bounds(self) -> IntArray:
        """The first row of each unit, part by part, and the number of rows at the end."""
        ...

    @property
    def starts(self) -> IntArray:
        """First row of each part, and the number of rows at the end."""
        ...


@dataclass(frozen=True, eq=False)
class Indexer(ABC):
    """Maps samples to rows: one class per kind of sample, without memory per sample.

    A custom kind of sample implements the abstract methods, and is passed as a ``MakesIndexer``.

    Attributes:
        segments: the segments of the samples; parts of files, if samples are rows.
        noun: plural name of the samples in messages.
        numbers_are_rows: a sample is one row of each field, and has the number of the row.
        is_known_by_row: messages name the row of a sample; otherwise its number, or its segment.
        has_places: whether ``with_index`` adds a sample's segment and step to its number.
        is_whole: each segment is one sample.
        passes_whole: filters keep or drop whole segments, which are then called ``segment_noun``.
        segment_noun: name of a segment in messages.
    """

    segments: Segments
    noun: ClassVar[str]
    numbers_are_rows: ClassVar[bool] = False
    is_known_by_row: ClassVar[bool] = True
    has_places: ClassVar[bool] = True
    is_whole: ClassVar[bool] = False
    passes_whole: ClassVar[bool] = False
    segment_noun: ClassVar[str] = "segment"

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    # Rows ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def places(self, samples: IntArray, epoch: int | None = None) -> Places:
        """Return the segment and step of each sample."""

    @abstractmethod
    def rows(self, places: Places) -> tuple[FieldRows, ...]:
        """Return the rows of samples, for each field."""

    def rows_of(self, samples: IntArray, epoch: int | None = None) -> BatchRows:
        """Return the rows of samples.

        Args:
            samples: numbers of samples.
            epoch: the epoch, for random draws; None without a plan.
        """
        places = self.places(samples, epoch)
        return BatchRows(self.rows(places), places)

    def rows_of_any_epoch(self, samples: IntArray) -> Iterator[IntArray]:
        """Yield the rows that samples can have in any epoch; rows may repeat."""
        of_fields = zip(self.rows(self.places(samples)), self.segments.kinds, strict=True)
        return (rows.rows for rows, kind in of_fields if kind is not None)

    def first_rows(self, samples: IntArray, epoch: int | None = None) -> IntArray:
        """Return the central or first row of each sample in an epoch; None without a plan."""
        places, segments = self.places(samples, epoch), self.segments
        return segments.rows_at(segments.steps[0].firsts_of(places.segments) + places.steps)

    def cuts(self, field: int) -> bool:
        """Return whether samples are cut out of a field's rows, as patches are out of cells."""
        return False

    def shape_read(self, field: int, row_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one read of a field: a row, or a patch."""
        return row_shape

    @abstractmethod
    def assembler(self, field: int, *, is_ragged: bool, place: int) -> Assembler:
        """Return the assembler of a field's batches: one entry per sample.

        Args:
            field: number of the field, which has steps.
            is_ragged: its rows have several shapes.
            place: axis of the steps in a sample.
        """

    def counted_field(self, fields: Sequence[int]) -> int | None:
        """Return the field whose steps define the length of a sample; None if all samples have one length."""
        return None

    def group_of_steps(self, field: int) -> int | None:
        """Return a number that fields share if their samples have equally many steps.

        None for a field with one value per sample, or with one length of all samples.
        """
        return None if self.counted_field([field]) is None else 0

    # In memory -----------------------------------------------------------------------------------------------

    def rows_held(self, samples: range | IntArray, n_rows: int) -> Sequence[range | IntArray]:
        """Return for each field the rows that samples need in any epoch, in ascending order.

        Row numbers are the same for all fields, and all fields hold the rows of any field.

        Args:
            samples: numbers of samples.
            n_rows: number of rows of all files.
        """
        is_needed = np.zeros(n_rows, dtype=np.bool_)
        for start in range(0, len(samples), SAMPLES_AT_A_TIME):
            for rows in self.rows_of_any_epoch(as_array(samples[start : start + SAMPLES_AT_A_TIME])):
                is_needed[rows] = True
        return (condensed(np.flatnonzero(is_needed)),) * len(self.segments.kinds)

    def over(self, rows: Sequence[range | IntArray | None], samples: range | IntArray) -> HeldSamples:
        """Return samples over rows in memory.

        Args:
            rows: the rows in memory of each field, in ascending order; None for a field that is not in memory.
            samples: numbers of the samples, in their order.
        """
        return HeldSamples(self, samples, rows)

    # Some of them --------------------------------------------------------------------------------------------

    def among(self, segments: IntArray) -> Indexer:
        """Return the samples of some segments."""
        return replace(self, segments=self.segments.among(segments))

    def keeping(self, is_kept: BoolArray) -> Indexer:
        """Return the samples without some rows of the files: a segment ends before a row that is left out."""
        return replace(self, segments=self.segments.keeping(is_kept, in_runs=True))

    def in_parts(self, low: IntArray, high: IntArray) -> Indexer:
        """Return the samples of the steps from ``low`` to below ``high`` of each segment."""
        return replace(self, segments=self.segments.parts(low, high))

    def of_fields(self, fields: Sequence[int]) -> Indexer:
        """Return the same samples with some of their fields."""
        return replace(self, segments=self.segments.of_fields(fields))

    def digest(self) -> bytes:
        """Return bytes that identify these samples among others of the same arrays, in all processes.

        A kind with an array among its settings overrides it: the ``repr`` of a long array omits numbers.
        """
        names = [field.name for field in fields(self) if field.name != "segments"]
        settings = [(name, getattr(self, name)) for name in names]
        return repr((type(self).__name__, settings)).encode() + self.segments.digest()

    # Blocks and costs ----------------------------------------------------------------------------------------

    @property
    def reach(self) -> int:
        """Steps from the first of a sample to its last; 1 if samples share no steps."""
        return 1

    @abstractmethod
    def n_before(self, rows: IntArray) -> IntArray:
        """Return the number of samples whose central or first step is before each of some rows."""

    def n_reads_before(self, rows: IntArray, field: int) -> IntArray | None:
        """Return the number of rows of a field that an epoch reads before each of some rows; None if unknown.

        If unknown, chunks stay in memory until the epoch ends, as far as there is room.
        """
        return None

    @abstractmethod
    def mean_bytes(self, sizes: Sequence[int]) -> int:
        """Return the mean bytes of a sample, from the bytes of one read of each field."""

    def blocks(self, units: Units, samples: IntArray | None) -> BlockTable:
        """Return the blocks of some samples: a block has the samples of one unit of rows.

        Args:
            units: the rows of the files.
            samples: numbers of the samples, in this order; None for all.
        """
        if not len(self):
            return BlockTable.of_sizes([0])
        bounds = units.bounds
        if samples is None and self.segments.are_ascending:
            before = self.n_before(bounds)
            before[-1] = len(self)  # a segment without steps may be at the very end
            return BlockTable.of_sizes(np.diff(before, prepend=0) if len(before) == 1 else np.diff(before))
        samples = np.arange(len(self)) if samples is None else samples
        return BlockTable.of_runs(np.searchsorted(bounds, self.first_rows(samples), side="right"))

    def is_cheap(self, *, by_rows: bool, by_steps: bool, n_parts: int) -> bool:
        """Return whether random access is as cheap as sequential access.

        Args:
            by_rows: random access to single rows is cheap.
            by_steps: random access to consecutive steps is cheap, since nothing is decoded.
            n_parts: parts of the files.
        """
        return by_steps or (by_rows and self.reach == 1)

    def block_bytes(self, units: Units, row_bytes: IntArray) -> int:
        """Return the maximum decoded bytes of a block, from the bytes of a row of each part."""
        n_rows = np.minimum(units.rows_per_unit, np.diff(units.starts))
        return int(max(1, (n_rows * row_bytes).max()))

    # Messages ------------------------------------------------------------------------------------------------

    def summary(self, n_samples: int) -> str:
        """Return how many samples a dataset has, as text."""
        return f"{n_samples:,} {self.noun} of {len(self.segments):,} segments"

    def left_out(self) -> str | None:
        """Return a text with the number of segments without a sample; None if all have one."""
        return None

    def warning(self) -> str | None:
        """Return a warning about samples that are missing; None if none is."""
        return None

    @property
    def lengths(self) -> IntArray | None:
        """Number of steps of each sample, for batches of similar cost; None if all samples have one length."""
        return None

    @property
    def step_counts(self) -> IntArray | None:
        """Maximum number of rows of each sample over all fields, for ``max_tokens``; None if all have one length."""
        return self.lengths

    @property
    def ends_of_segments(self) -> IntArray | None:
        """Number of samples up to each segment's end; None if samples are not parts of segments."""
        return None


class PartsOfSegments(Indexer):
    """Samples that are parts of segments, numbered segment by segment."""

    @abstractmethod
    def counts(self) -> IntArray:
        """Return the number of samples of each segment."""

    @property
    @abstractmethod
    def shortage(self) -> str:
        """The reason why segments have no sample, as a predicate for messages."""

    @cached_property
    def ends(self) -> IntArray:
        """Number of samples up to each segment's end; shape ``(n_segments,)``."""
        return np.cumsum(self.counts())

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def before(self, segments: IntArray) -> IntArray:
        """Return the number of samples before each of some segments."""
        return np.where(segments > 0, self.ends[np.maximum(segments, 1) - 1], 0)

    def left_out(self) -> str | None:
        """See ``Indexer.left_out``."""
        n = int(np.count_nonzero(np.diff(self.ends, prepend=0) == 0))
        return f"{n:,} of {len(self.segments):,} {self.segment_noun}s {self.shortage} and have no sample" if n else None


class HeldSamples(NamedTuple):
    """Some samples, numbered from 0, over rows in memory.

    Attributes:
        indexer: all samples.
        samples: numbers of these samples among all.
        rows: the rows in memory of each field, in ascending order; None for a field that is not in memory.
    """

    indexer: Indexer
    samples: range | IntArray
    rows: Sequence[range | IntArray | None]

    def rows_of(self, indices: IntArray, epoch: int | None = None) -> BatchRows:
        """Return the rows of samples (see ``Indexer.rows_of``); rows in memory as positions there.

        Args:
            indices: numbers of samples among these.
            epoch: see ``Indexer.rows_of``.
        """
        batch = self.indexer.rows_of(rows_at(self.samples, indices), epoch)
        places: dict[int, FieldRows] = {}  # fields in memory with the same rows share their places
        for rows, own_rows in zip(batch.fields, self.rows, strict=True):
            if own_rows is not None and id(rows) not in places:
                places[id(rows)] = rows._replace(rows=find_places(own_rows, rows.rows))
        pairs = zip(batch.fields, self.rows, strict=True)
        return batch._replace(fields=tuple(rows if own_rows is None else places[id(rows)] for rows, own_rows in pairs))


def rows_of_all(n_rows: int, n_all: int) -> str:
    """Return how many rows of how many, as text."""
    return f"{n_rows:,} rows" if n_rows == n_all else f"{n_rows:,} of {n_all:,} rows"
