"""Rows of sparse matrices in a batch: their stored values and columns as a dense tensor, or as one in CSR form."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, overload

import numpy as np

from ..errors import H5CorruptError, H5ValueError
from ..hdf5 import SparseGroup
from ..lazy_torch import torch
from ..readers import DecodeRequest, MatrixRows
from ..readers.buffers import BufferPool
from ..types import IntArray, cached_property
from .assemblers import Assembler
from .indexer import rows_of_all
from .windows import WholeSegments

__all__ = ["CsrRows", "SparseField", "SparseRows", "sparse_field"]


class CsrRows(Sequence["torch.Tensor"]):
    """Some rows of a matrix in CSR form. A slice of them is of the same kind, a single row is dense.

    Args:
        values: the stored values, row by row.
        columns: the column of each value.
        ends: values up to the end of each row, shape ``(n_rows,)``.
        n_columns: values of a dense row.
        is_in_order: whether the columns of each row are known to ascend.
    """

    def __init__(
        self, values: torch.Tensor, columns: IntArray, ends: IntArray, n_columns: int, *, is_in_order: bool = False
    ) -> None:
        self.values, self.columns, self.ends, self.n_columns = values, columns, ends, n_columns
        self._is_known_in_order = is_in_order

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, at: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, at: slice) -> CsrRows: ...

    def __getitem__(self, at: int | slice) -> CsrRows | torch.Tensor:
        if isinstance(at, int):
            at = range(len(self))[at]
            return self[at : at + 1].dense(BufferPool())[0]
        rows = range(len(self))[at]
        if rows.step != 1:
            raise ValueError("rows are taken one after the other")
        ends = self.ends[rows.start : rows.stop]
        first = int(self.ends[rows.start - 1]) if rows.start else 0
        last = int(ends[-1]) if len(ends) else first
        values, columns, is_in_order = self.values[first:last], self.columns[first:last], self._is_in_order
        return CsrRows(values, columns, ends - first, self.n_columns, is_in_order=is_in_order)

    @cached_property
    def _places(self) -> IntArray:
        """Position of each value in the concatenated dense rows."""
        lengths = np.diff(self.ends, prepend=0)
        places: IntArray = np.repeat(np.arange(len(self)) * self.n_columns, lengths) + self.columns
        return places

    @cached_property
    def _is_in_order(self) -> bool:
        """Whether the columns of each row ascend strictly; checked once for rows that are read together."""
        return self._is_known_in_order or bool((np.diff(self._places) > 0).all())

    def dense(self, buffers: BufferPool) -> torch.Tensor:
        """Return the rows, shape ``(n_rows, n_columns)``; values of one place are added up, as SciPy does."""
        out = buffers.tensor((len(self), self.n_columns), self.values.dtype)
        out.view(torch.uint8).numpy()[...] = 0
        _put(out.view(-1), self._places, self.values, adds=not self._is_in_order)
        return out

    def csr(self) -> torch.Tensor:
        """Return the rows as a ``torch.sparse_csr`` tensor; values of one place are added up."""
        values, columns, ends = self.values, self.columns, self.ends
        if not self._is_in_order:
            places, inverse = np.unique(self._places, return_inverse=True)
            sums = values.new_zeros(len(places))
            _put(sums, inverse, values, adds=True)
            values = sums
            columns = places % self.n_columns
            ends = np.searchsorted(places, np.arange(1, len(self) + 1) * self.n_columns)
        _warn_of_nothing()
        first = np.concatenate([[0], ends])
        parts = torch.from_numpy(first), torch.from_numpy(columns), values
        shape = (len(self), self.n_columns)
        return torch.sparse_csr_tensor(*parts, size=shape, check_invariants=False)  # columns were checked

    @classmethod
    def placed(cls, parts: Sequence[tuple[IntArray, CsrRows]]) -> CsrRows:
        """Return rows of several, each at its place.

        Args:
            parts: rows, and the place of each.
        """
        places = np.argsort(np.concatenate([places for places, _ in parts]))
        lengths = np.concatenate([np.diff(rows.ends, prepend=0) for _, rows in parts])
        firsts = np.cumsum(lengths) - lengths
        ends = np.cumsum(lengths[places])
        order = np.arange(int(lengths.sum())) + np.repeat(firsts[places] - (ends - lengths[places]), lengths[places])
        values, columns = (torch.cat([rows.values for _, rows in parts]), np.concatenate([r.columns for _, r in parts]))
        return cls(values[torch.from_numpy(order)], columns[order], ends, parts[0][1].n_columns)


@dataclass(frozen=True, eq=False)
class SparseRows(WholeSegments):
    """Samples that are rows of sparse matrices: each is a segment of the stored values, which may be empty.

    Attributes:
        n_all: rows of the matrices of all files.
    """

    n_all: int = 0

    noun = "rows"
    segment_noun = "row of the sparse matrix"
    is_known_by_row = False
    has_places = False
    passes_whole = True

    def assembler(self, field: int, *, is_ragged: bool, place: int) -> Assembler:
        """See ``Indexer.assembler``: stored values stay together with their columns."""
        return Assembler()

    def counted_field(self, fields: Sequence[int]) -> None:
        """See ``Indexer.counted_field``."""

    def summary(self, n_samples: int) -> str:
        """See ``Indexer.summary``."""
        return rows_of_all(n_samples, self.n_all)


@cache
def _warn_of_nothing() -> None:
    """Suppress torch's warning that CSR tensors are in beta: the user requested them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)


def _put(out: torch.Tensor, places: IntArray, values: torch.Tensor, *, adds: bool) -> None:
    """Put values at places of zeros, or add them up there."""
    if values.dtype == torch.bfloat16:  # NumPy lacks it; torch lacks sums of others
        out.index_put_((torch.from_numpy(places),), values, accumulate=adds)
    elif adds:
        np.add.at(out.numpy(), places, values.numpy())
    else:
        out.numpy()[places] = values.numpy()


@dataclass(frozen=True, eq=False)
class SparseField:
    """A field with the rows of a sparse matrix.

    Attributes:
        group: the matrix, as it is in the first file.
        columns: the columns that rows have, in this order; None for all.
        as_csr: batches are in CSR form.
    """

    group: SparseGroup
    columns: IntArray | None = None
    as_csr: bool = False

    @property
    def n_columns(self) -> int:
        """Values of a dense row."""
        return self.group.n_columns if self.columns is None else len(self.columns)

    def column(
        self, values: torch.Tensor, stored: torch.Tensor, lengths: IntArray, buffers: BufferPool
    ) -> torch.Tensor | CsrRows:
        """Return rows with their values, as an entry of a batch for each.

        Args:
            values: the stored values, row by row.
            stored: the column of each value in the file.
            lengths: stored values of each row.
            buffers: allocates memory.

        Raises:
            H5CorruptError: a value is of a column that the matrix does not have.
        """
        columns = stored.numpy().astype(np.int64, copy=False)
        ends = np.cumsum(lengths)
        if columns.size and columns.view(np.uint64).max() >= self.group.n_columns:  # negative ones are huge
            wrong = int(columns.min()) if columns.min() < 0 else int(columns.max())
            raise H5CorruptError(
                f"{self.group.keys[1]!r} names the column {wrong}, and a row of {self.group.key!r} has "
                f"{self.group.n_columns}. The file is damaged there; copy or write it again."
            )
        if self._place_of_column is not None:
            columns = self._place_of_column[columns]
            stays = columns >= 0
            ends = np.concatenate([[0], np.cumsum(stays)])[ends]
            columns, values = columns[stays], values[torch.from_numpy(stays)]
        rows = CsrRows(values, columns, ends, self.n_columns)
        return rows if self.as_csr else rows.dense(buffers)

    @cached_property
    def _place_of_column(self) -> IntArray | None:
        """Place of each column of the matrix in a row, or -1; None if rows have all columns."""
        if self.columns is None:
            return None
        places = np.full(self.group.n_columns, -1, dtype=np.int64)
        places[self.columns] = np.arange(len(self.columns))
        return places


def sparse_field(
    group: SparseGroup, name: str, selection: Mapping[int, Any], codec: DecodeRequest | None
) -> SparseField:
    """Return a field of a sparse matrix.

    Args:
        group: the matrix.
        name: name of the field in a sample.
        selection: the columns to take (``select``).
        codec: the requested codec; None for dense rows.

    Raises:
        H5ValueError: these make no sense.
    """
    if not isinstance(codec, MatrixRows | None):
        raise H5ValueError(
            f"decode names {codec} for {name!r}, and {group.key!r} is a sparse matrix. Pass 'dense' or 'csr'."
        )
    if set(selection) - {1, -1}:
        raise H5ValueError(
            f"select takes axes {sorted(selection)} of {name!r}, a sparse matrix. Take some of axis 1, its columns."
        )
    columns = None
    for value in selection.values():
        index = slice(value.get("start"), value.get("stop"), value.get("step")) if isinstance(value, Mapping) else value
        if isinstance(index, int):
            raise H5ValueError(f"select takes the column {index} of {name!r}, a sparse matrix. Pass a list or a slice.")
        try:
            columns = np.arange(group.n_columns)[index]
        except IndexError:
            raise H5ValueError(
                f"select takes {value!r} of axis 1 of {name!r}, which has {group.n_columns} columns. Take some of "
                "these."
            ) from None
    if columns is not None and len(np.unique(columns)) < len(columns):
        raise H5ValueError(f"select takes a column of {name!r} twice. Name each once.")
    return SparseField(group, columns, codec is not None and codec.as_csr)
