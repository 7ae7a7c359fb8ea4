"""Whole groups of rows as samples: sequences of different lengths, padded where they are in one batch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5ValueError
from ..hdf5 import ArrayLayout
from ..order import BlockTable
from ..types import Draws, IntArray
from .base import MAX_ROWS, RawBatch, ReadCost, RowDataset
from .file_dataset import FileDataset
from .row_cache import bytes_of, copy_rows
from .sample_layout import Column
from .user_functions import fresh_draws, rows_text

__all__ = ["LENGTHS", "MASK", "SequenceDataset", "Sequences"]

MASK, LENGTHS = "mask", "lengths"
"""Where a batch says which steps are rows, and how many each sequence has."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Which rows make which sequence.

    Attributes:
        rows: rows of a dataset, sequence by sequence, each in its order.
        starts: where each sequence begins among these, and their number at the end; shape ``(n_sequences + 1,)``.
    """

    rows: IntArray
    starts: IntArray

    @classmethod
    def of(
        cls, groups: npt.NDArray[Any], order: npt.NDArray[Any] | None, *, names: tuple[str, str | None]
    ) -> Sequences:
        """All rows of a group are a sequence; sequences follow each other as their first rows do.

        Args:
            groups: each row's group.
            order: what each sequence is sorted by; equal values, and None, keep the order of storage.
            names: of the two columns, for errors.

        Raises:
            H5ValueError: a value is missing, or a column has more than one a row.
        """
        for column, name in zip((groups, order), names, strict=True):
            if column is None:
                continue
            if column.ndim != 1:
                raise H5ValueError(
                    f"{name!r} has rows of the shape {column.shape[1:]}. Name an array of one value a row."
                )
            if (is_missing := _is_missing(column)).any():
                raise H5ValueError(
                    f"{name!r} has no value (NaN or empty) in {int(is_missing.sum())} of {len(column)} rows, first in "
                    f"row {int(is_missing.argmax())}. Leave these rows out by a filter (where), or fill them in."
                )
        _, first, codes = np.unique(groups, return_index=True, return_inverse=True)
        place = np.argsort(np.argsort(first))[codes]
        rows = np.argsort(place, kind="stable") if order is None else np.lexsort((order, place))
        counts = np.bincount(place)
        return cls(rows.astype(np.int64), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def lengths(self) -> IntArray:
        """Rows of each sequence."""
        return np.diff(self.starts)

    def rows_of(self, sequences: IntArray) -> IntArray:
        """Rows of some sequences, one after the other."""
        lengths = self.lengths[sequences]
        before = np.repeat(self.starts[sequences] - (np.cumsum(lengths) - lengths), lengths)
        return self.rows[before + np.arange(int(lengths.sum()))]


@dataclass(frozen=True, eq=False)
class RawSequences:
    """Sequences as they were read.

    Attributes:
        rows: numbers of the sequences, shape ``(batch,)``.
        columns: for each field its rows, of all sequences one after the other.
        lengths: of the sequences, shape ``(batch,)``.
    """

    rows: IntArray
    columns: tuple[Column, ...]
    lengths: IntArray

    def split(self, sizes: Sequence[int]) -> list[RawSequences]:
        """Batches of these sizes, which look into the memory of this one."""
        parts = []
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        for size, stop in zip(sizes, accumulate(sizes), strict=True):
            low, high = int(ends[stop - size]), int(ends[stop])
            columns = tuple(column[low:high] for column in self.columns)
            parts.append(RawSequences(self.rows[stop - size : stop], columns, self.lengths[stop - size : stop]))
        return parts


class SequenceDataset(RowDataset):
    """Sequences of a dataset's rows. A sample is a dict of fields with a step axis in front.

    A batch has them padded with zeros (text with "") to its longest, ``"mask"`` (True at rows, shape ``(batch,
    steps)``) and ``"lengths"`` (shape ``(batch,)``). The field that names the group comes once for each sequence.

    Args:
        dataset: the rows, with samples that are dicts; what it has of transforms runs on whole sequences.
        sequences: which rows make which.
        group: the field that names the group, where it is loaded.
    """

    def __init__(self, dataset: FileDataset, sequences: Sequences, group: str | None) -> None:
        structure = dataset.structure
        names = structure.x.fields.names
        if structure.y is not None or structure.x.fields.kind != "dict":
            raise H5ValueError("sequences are made of samples that are dicts. Pass x_key as a mapping, without y_key.")
        if taken := [name for name in (MASK, LENGTHS) if name in names]:
            raise H5ValueError(
                f"the data has a field {taken[0]!r}, where a batch of sequences has its own. Give it another name."
            )
        of_arrays = dict(zip(structure.x.fields.keys, names, strict=True))
        self.dataset, self.sequences = dataset, sequences
        self._group = group if group in names else of_arrays.get(group or "")
        transform, batch_transform = structure.x.transform, dataset.batch_transform
        super().__init__(structure, batch_transform)
        self.transform = transform
        self.counters = dataset.counters
        self._join()

    def _reset(self) -> None:
        super()._reset()
        self._pid = os.getpid()

    def _join(self) -> None:
        self.dataset.join(self.counters, self.work)

    def __len__(self) -> int:
        return len(self.sequences)

    # Reading -------------------------------------------------------------------------------------------------

    def gather(self, rows: IntArray, epoch: int | None = None) -> Any:
        """See ``RowDataset.gather``."""
        return self._as_read(rows, self.dataset.gather(self._rows(rows), epoch))

    def begin(self, rows: IntArray, epoch: int | None = None) -> Callable[[], Any]:
        """See ``RowDataset.begin``."""
        return partial(self._complete, rows, self.dataset.begin(self._rows(rows), epoch))

    def _complete(self, rows: IntArray, read: Callable[[], RawBatch]) -> RawSequences:
        return self._as_read(rows, read())

    def _as_read(self, rows: IntArray, raw: RawBatch) -> RawSequences:
        return RawSequences(rows, raw.columns, self.sequences.lengths[rows])

    def prepare_workers(self, num_workers: int) -> None:
        """See ``RowDataset.prepare_workers``."""
        self.dataset.prepare_workers(num_workers)

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """See ``RowDataset.prefetch``."""
        return self.dataset.prefetch(self._rows(rows), epoch)

    def _rows(self, sequences: IntArray) -> IntArray:
        if self._pid != os.getpid():  # a forked child has neither our threads nor what they were about to do
            self._reset()
            self._join()
        return self.sequences.rows_of(sequences)

    def finish(self, raw: Any, *, samples: bool = False, draws: Draws | None = None) -> Any:
        """See ``RowDataset.finish``."""
        asks = self.structure.asks or self._batch_asks_for
        draws = draws or (fresh_draws() if asks else Draws(0, 0, 0))
        if samples or self.transform is not None:
            each = [self._sample(one, draws) for one in raw.split([1] * len(raw.rows))]
            if samples:
                numbered = zip(each, raw.rows.tolist(), strict=True)
                return [one | {"index": row} for one, row in numbered] if self.structure.with_index else each
            lengths = np.array([self._length_of(one, n) for one, n in zip(each, raw.lengths.tolist(), strict=True)])
            batch = _collated(each, lengths) | _told(lengths)
        else:
            batch = self._batch(raw.columns, raw.lengths) | _told(raw.lengths)
        if self.structure.with_index:
            batch["index"] = torch.from_numpy(raw.rows.copy())
        return self._transformed(batch, raw.rows, draws)

    def _sample(self, raw: RawSequences, draws: Draws) -> dict[str, Any]:
        """One sequence, transformed."""
        part = self.structure.x
        sample = {
            name: column[0] if name == self._group else column
            for name, column in zip(part.fields.names, raw.columns, strict=True)
        }
        if self.transform is not None:
            sample = part.transformed(sample, int(raw.rows[0]), draws, self.describe)
            if not isinstance(sample, dict):
                raise H5ValueError(
                    f"the transform gave a {type(sample).__name__} for a sequence, and a sample is a dict of fields. "
                    "Give a dict, or make something else of whole batches (batch_transform)."
                )
        return sample

    def _length_of(self, sample: dict[str, Any], length: int) -> int:
        """Steps of a sequence, of which a transform may have taken a part."""
        if taken := [name for name in (MASK, LENGTHS) if name in sample]:
            raise H5ValueError(
                f"the transform gave {taken[0]!r}, where a batch of sequences has its own. Give it another name."
            )
        steps = {
            len(value)
            for name in self.structure.x.fields.names
            if name != self._group and isinstance(value := sample.get(name), torch.Tensor) and value.ndim
        }
        if len(steps) > 1 and length not in steps:
            raise H5ValueError(
                f"the transform gave fields of {sorted(steps)} steps for a sequence of {length}. Give all of them "
                "equally many."
            )
        return steps.pop() if len(steps) == 1 else length

    def _batch(self, columns: Sequence[Column], lengths: IntArray) -> dict[str, Any]:
        n_steps = int(lengths.max(initial=0))
        firsts = np.cumsum(lengths) - lengths
        steps = np.arange(int(lengths.sum())) - np.repeat(firsts, lengths)
        places = np.repeat(np.arange(len(lengths)) * n_steps, lengths) + steps
        batch: dict[str, Any] = {}
        for name, column in zip(self.structure.x.fields.names, columns, strict=True):
            if name == self._group:
                each = [column[first] for first in firsts.tolist()]
                batch[name] = torch.stack(each) if isinstance(column, torch.Tensor) else each
            elif isinstance(column, torch.Tensor):
                padded = column.new_zeros((len(lengths) * n_steps, *column.shape[1:]))
                copy_rows(bytes_of(padded), places, bytes_of(column.contiguous()), np.arange(len(column)))
                batch[name] = padded.view(len(lengths), n_steps, *column.shape[1:])
            else:
                ends = np.cumsum(lengths).tolist()
                batch[name] = [
                    [*column[end - length : end], *[""] * (n_steps - length)]
                    for end, length in zip(ends, lengths.tolist(), strict=True)
                ]
        return batch

    # What it is ----------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> IntArray:
        """Rows of each sequence."""
        return self.sequences.lengths

    @property
    def is_passthrough(self) -> bool:
        """Never: a batch is padded."""
        return False

    def layouts(self) -> Iterator[ArrayLayout]:
        """The arrays that rows are read from, of all files."""
        return self.dataset.layouts()

    def identity(self) -> str:
        """A digest of the rows, and of which make which sequence."""
        found = hashlib.sha256(self.dataset.identity().encode())
        found.update(self.sequences.rows.tobytes())
        found.update(self.sequences.starts.tobytes())
        return found.hexdigest()[:32]

    def blocks(self) -> BlockTable:
        """Sequences whose first rows lie together on disk."""
        firsts = np.minimum.reduceat(self.sequences.rows, self.sequences.starts[:-1])
        owners = np.searchsorted(self.dataset.blocks().starts, firsts, side="right")
        return BlockTable.of_sizes(np.diff(np.flatnonzero(np.diff(owners, prepend=-1, append=-1))))

    def describe(self, numbers: IntArray) -> str:
        """See ``RowDataset.describe``."""
        which = ", ".join(map(str, numbers[:MAX_ROWS].tolist())) + (", ..." if numbers[MAX_ROWS:].size else "")
        rows = self.sequences.rows_of(numbers)
        places = self.dataset.places_of(rows[:MAX_ROWS])
        return f"sequence{'s' if len(numbers) != 1 else ''} {which} ({rows_text(places, len(rows))})"

    def files_of(self, rows: IntArray) -> list[str]:
        """The files that sequences are read from."""
        return self.dataset.files_of(self.sequences.rows_of(rows))

    @property
    def is_in_memory(self) -> bool:
        """Whether all rows are in memory now."""
        return self.dataset.is_in_memory

    @property
    def cost(self) -> ReadCost:
        """See ``RowDataset.cost``: of sequences, on average."""
        found, n_rows, n = self.dataset.cost, len(self.sequences.rows), len(self)
        return replace(
            found,
            row_bytes=-(-found.row_bytes * n_rows // max(1, n)),
            rows_per_chunk=-(-found.rows_per_chunk * n // max(1, n_rows)),
            rows_per_run=-(-found.rows_per_run * n // max(1, n_rows)),
        )

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows that this process keeps in memory now."""
        return self.dataset.kept_bytes

    def read_with(self, cache_bytes: int, *, keeps: bool | None = None, in_runs: bool = False) -> None:
        """See ``RowDataset.read_with``."""
        self.in_runs = in_runs
        self.dataset.read_with(cache_bytes, keeps=keeps, in_runs=in_runs)

    def summary(self) -> list[str]:
        """See ``RowDataset.summary``."""
        lengths = self.lengths
        rows = f" of {lengths.min():,} to {lengths.max():,} rows" if len(lengths) else ""
        return [f"{len(self):,} sequences{rows}", repr(self.dataset)]

    def close(self) -> None:
        """Gives back what this process holds; the next read gets it again."""
        self.dataset.close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join()


def _told(lengths: IntArray) -> dict[str, torch.Tensor]:
    """The mask and the lengths of a batch."""
    steps = torch.arange(int(lengths.max(initial=0)))
    found = torch.from_numpy(lengths.copy())
    return {MASK: steps < found[:, None], LENGTHS: found}


def _collated(samples: Sequence[Mapping[str, Any]], lengths: IntArray) -> dict[str, Any]:
    """Samples that a transform made: what has a step axis still is padded along it, the rest is stacked or listed."""
    batch: dict[str, Any] = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        if not isinstance(first, torch.Tensor):
            batch[name] = values
        elif first.ndim and all(len(value) == length for value, length in zip(values, lengths.tolist(), strict=True)):
            batch[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
        else:
            try:
                batch[name] = torch.stack(values)
            except RuntimeError as error:
                shapes = [tuple(value.shape) for value in values]
                raise H5ValueError(
                    f"the transform gave {name!r} in the shapes {shapes}, for sequences of {lengths.tolist()} steps: "
                    "neither one value a step nor all alike. Keep the step axis, or give tensors of one shape."
                ) from error
    return batch


def _is_missing(column: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    missing: npt.NDArray[np.bool_] = np.zeros(len(column), dtype=np.bool_)
    if column.dtype.kind == "f":
        missing = np.isnan(column)
    elif column.dtype.kind in "UO":
        missing = column == ""
    return missing
