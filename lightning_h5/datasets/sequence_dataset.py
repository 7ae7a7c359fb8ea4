"""Whole groups of rows as samples: sequences of different lengths, padded if they are in one batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5ValueError
from ..order import BlockTable
from ..types import Draws, IntArray
from .base import MAX_ROWS, ReadCost, RowDataset
from .buffers import Column, bytes_of, copy_rows
from .file_dataset import FileDataset
from .user_functions import rows_text

__all__ = ["LENGTHS", "MASK", "SequenceDataset", "Sequences"]

MASK, LENGTHS = "mask", "lengths"
"""The fields of a batch with the steps that are rows, and how many each sequence has."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Which rows make which sequence.

    Attributes:
        rows: rows of a dataset, sequence by sequence, each in its order.
        starts: first place of each sequence among these, and their number at the end; shape ``(n_sequences + 1,)``.
    """

    rows: IntArray
    starts: IntArray

    @classmethod
    def of(
        cls, groups: npt.NDArray[Any], order: npt.NDArray[Any] | None, *, names: tuple[str, str | None]
    ) -> Sequences:
        """Return the rows of each group as a sequence, in the order of their first rows.

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
                    f"{name!r} has rows of the shape {column.shape[1:]}. Name an array with one value per row."
                )
            if (is_missing := _is_missing(column)).any():
                raise H5ValueError(
                    f"{name!r} has no value (NaN or empty) in {int(is_missing.sum())} of {len(column)} rows, first in "
                    f"row {int(is_missing.argmax())}. Exclude these rows with a filter (where), or fill them in."
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
        """Return the rows of some sequences, one after the other."""
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
        """Return batches of these sizes, which are views of this one."""
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
        dataset: the rows, with samples that are dicts; its transforms run on whole sequences.
        sequences: which rows make which sequence.
        group: the field that names the group, if it is loaded.
    """

    def __init__(self, dataset: FileDataset, sequences: Sequences, group: str | None) -> None:
        sample_layout = dataset.sample_layout
        names = sample_layout.x.fields.names
        if sample_layout.y is not None or sample_layout.x.fields.kind != "dict":
            raise H5ValueError("sequences require samples that are dicts. Pass x_key as a mapping, without y_key.")
        if taken := [name for name in (MASK, LENGTHS) if name in names]:
            raise H5ValueError(
                f"the data has a field {taken[0]!r}, a name that batches of sequences use themselves. Rename the field."
            )
        of_arrays = dict(zip(sample_layout.x.fields.keys, names, strict=True))
        self.dataset, self.sequences = dataset, sequences
        self._group = group if group in names else of_arrays.get(group or "")
        self.transform = sample_layout.x.transform
        super().__init__(sample_layout, dataset.batch_transform, sources=[dataset], counters=dataset.counters)

    def __len__(self) -> int:
        return len(self.sequences)

    # Reading -------------------------------------------------------------------------------------------------

    def begin(self, rows: IntArray, epoch: int | None = None, *, at_once: bool = False) -> Callable[[], Any]:
        """See ``RowDataset.begin``."""
        self._check_process()
        read = self.dataset.begin(self.sequences.rows_of(rows), epoch, at_once=at_once)
        return lambda: RawSequences(rows, read().columns, self.sequences.lengths[rows])

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """See ``RowDataset.prefetch``."""
        self._check_process()
        return self.dataset.prefetch(self.sequences.rows_of(rows), epoch)

    def finish(self, raw: Any, *, samples: bool = False, draws: Draws | None = None) -> Any:
        """See ``RowDataset.finish``."""
        draws = self._draws(draws)
        if samples or self.transform is not None:
            each = [self._sample(one, draws) for one in raw.split([1] * len(raw.rows))]
            if samples:
                numbered = zip(each, raw.rows.tolist(), strict=True)
                return [one | {"index": row} for one, row in numbered] if self.sample_layout.with_index else each
            if not each:
                raise H5ValueError(
                    "an empty batch was requested, but the transform runs on single sequences. Pass at least one."
                )
            lengths = np.array([self._length_of(one, n) for one, n in zip(each, raw.lengths.tolist(), strict=True)])
            batch = _collated(each, lengths) | _mask_and_lengths(lengths)
        else:
            batch = self._batch(raw.columns, raw.lengths) | _mask_and_lengths(raw.lengths)
        if self.sample_layout.with_index:
            batch["index"] = torch.from_numpy(raw.rows.copy())
        return self._transformed(batch, raw.rows, draws)

    def _sample(self, raw: RawSequences, draws: Draws) -> dict[str, Any]:
        """Return one sequence, transformed."""
        part = self.sample_layout.x
        sample = {
            name: column[0] if name == self._group else column
            for name, column in zip(part.fields.names, raw.columns, strict=True)
        }
        if self.transform is not None:
            sample = part.transformed(sample, int(raw.rows[0]), draws, self.describe)
            if not isinstance(sample, dict):
                raise H5ValueError(
                    f"the transform returned a {type(sample).__name__} for a sequence, but a sample is a dict of "
                    "fields. Return a dict, or convert whole batches (batch_transform)."
                )
        return sample

    def _length_of(self, sample: dict[str, Any], length: int) -> int:
        """Return the number of steps of a sequence, which a transform may have cropped."""
        if taken := [name for name in (MASK, LENGTHS) if name in sample]:
            raise H5ValueError(
                f"the transform returned a field {taken[0]!r}, a name that batches of sequences use themselves. Rename "
                "the field."
            )
        steps = {
            len(value)
            for name in self.sample_layout.x.fields.names
            if name != self._group and isinstance(value := sample.get(name), torch.Tensor) and value.ndim
        }
        if len(steps) > 1 and length not in steps:
            raise H5ValueError(
                f"the transform returned fields of {sorted(steps)} steps for a sequence of {length}. Return the same "
                "number of steps for all fields."
            )
        return steps.pop() if len(steps) == 1 else length

    def _batch(self, columns: Sequence[Column], lengths: IntArray) -> dict[str, Any]:
        n_steps = int(lengths.max(initial=0))
        firsts = np.cumsum(lengths) - lengths
        steps = np.arange(int(lengths.sum())) - np.repeat(firsts, lengths)
        places = np.repeat(np.arange(len(lengths)) * n_steps, lengths) + steps
        batch: dict[str, Any] = {}
        for name, column in zip(self.sample_layout.x.fields.names, columns, strict=True):
            if name == self._group:
                is_tensor = isinstance(column, torch.Tensor)
                batch[name] = column[torch.from_numpy(firsts)] if is_tensor else [column[at] for at in firsts.tolist()]
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

    # Description ---------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> IntArray:
        """Rows of each sequence."""
        return self.sequences.lengths

    @property
    def is_passthrough(self) -> bool:
        """Never: a batch is padded."""
        return False

    def identity(self) -> str:
        """See ``RowDataset.identity``: of the rows, and of which make which sequence."""
        found = hashlib.sha256(self.dataset.identity().encode())
        found.update(self.sequences.rows.tobytes())
        found.update(self.sequences.starts.tobytes())
        return found.hexdigest()[:32]

    def blocks(self) -> BlockTable:
        """See ``RowDataset.blocks``: of sequences with first rows in one block."""
        firsts = np.minimum.reduceat(self.sequences.rows, self.sequences.starts[:-1])
        owners = np.searchsorted(self.dataset.blocks().starts, firsts, side="right")
        return BlockTable.of_sizes(np.diff(np.flatnonzero(np.diff(owners, prepend=-1, append=-1))))

    def describe(self, numbers: IntArray) -> str:
        """See ``RowDataset.describe``."""
        which = ", ".join(map(str, numbers[:MAX_ROWS].tolist())) + (", ..." if numbers[MAX_ROWS:].size else "")
        rows = self.sequences.rows_of(numbers)
        places = self.dataset.places_of(rows[:MAX_ROWS])
        return f"sequence{'s' if len(numbers) != 1 else ''} {which} ({rows_text(places, len(rows))})"

    def places_of(self, numbers: IntArray) -> list[tuple[str, int]]:
        """See ``RowDataset.places_of``: of all rows of the sequences."""
        return self.dataset.places_of(self.sequences.rows_of(numbers))

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

    def summary(self) -> list[str]:
        """See ``RowDataset.summary``."""
        lengths = self.lengths
        rows = f" of {lengths.min():,} to {lengths.max():,} rows" if len(lengths) else ""
        return [f"{len(self):,} sequences{rows}", repr(self.dataset)]


def _mask_and_lengths(lengths: IntArray) -> dict[str, torch.Tensor]:
    """Return the mask and the lengths of a batch."""
    steps = torch.arange(int(lengths.max(initial=0)))
    found = torch.from_numpy(lengths.copy())
    return {MASK: steps < found[:, None], LENGTHS: found}


def _collated(samples: Sequence[Mapping[str, Any]], lengths: IntArray) -> dict[str, Any]:
    """Collate samples that a transform made: pad what still has a step axis; stack or list the rest."""
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
                    f"the transform returned {name!r} in the shapes {shapes}, for sequences of {lengths.tolist()} "
                    "steps: neither one value per step nor one shape for all. Keep the step axis, or give tensors of "
                    "one shape."
                ) from error
    return batch


def _is_missing(column: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    missing: npt.NDArray[np.bool_] = np.zeros(len(column), dtype=np.bool_)
    if column.dtype.kind == "f":
        missing = np.isnan(column)
    elif column.dtype.kind in "UO":
        missing = column == ""
    return missing
