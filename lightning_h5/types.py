"""Small types that several parts share: what a path, a key and a dtype may be, and the seams between parts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "BatchToken",
    "DTypeLike",
    "Draws",
    "Identity",
    "IntArray",
    "Keys",
    "PathLike",
    "Paths",
    "RowReader",
    "cached_property",
]

PathLike: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = Sequence[PathLike] | PathLike
"""One file, a glob, a directory, or a list of them. The list is the first type, since jsonargparse tries types in
order, and would otherwise turn the text of a list into one path."""

Keys: TypeAlias = str | Sequence[str] | Mapping[str, str | int | Sequence[str] | Mapping[str, Any]]
"""One array, several (a tuple in the sample), or names for several (a dict in the sample). In a mapping, a list of
arrays of one shape, or of members of one table, is one field, as ``{"stack": [...], "axis": 0}`` is, and
``{"path": ..., "key": ...}`` is an array of another file."""

DTypeLike: TypeAlias = Any
"""A dtype's name, a NumPy dtype or a torch dtype. ``Any``, since torch is not imported here and
jsonargparse takes names only from an unrestricted type."""

IntArray: TypeAlias = npt.NDArray[np.int64]

Identity: TypeAlias = Mapping[str, str]
"""Digests of the data by how it was read: ``sampled``, or ``whole``. Data differ if digests of one name do."""

_T = TypeVar("_T")


class cached_property(functools.cached_property[_T]):  # noqa: N801, TID251  # the name of what it replaces
    """``functools.cached_property`` without a lock, as since Python 3.12.

    All instances share that lock. A process that is forked while another thread computes the property of any of them
    would wait for it forever.
    """

    def __init__(self, func: Callable[[Any], _T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()


class Draws(NamedTuple):
    """The numbers that decide the random draws of a batch's transforms; neither rank nor worker is among them.

    Attributes:
        seed: seed of the run.
        epoch: from 0.
        position: place of the batch's first row in the epoch's sequence of rows.
    """

    seed: int
    epoch: int
    position: int


class BatchToken(NamedTuple):
    """The sampler's request for the rows of one step, which the dataset reads.

    The epoch travels with the rows because persistent workers see nothing else of the main process.

    Attributes:
        epoch: epoch the rows belong to, from 0.
        step: step of this rank within the epoch, from 0.
        rows: indices into the dataset, in the order of the batch, shape ``(batch,)``.
        samples: True asks for a list of samples (for a user's ``collate_fn``) instead of a collated batch.
        seed: seed of the run.
        position: place of the first row in the epoch's sequence of rows, over all ranks.
    """

    epoch: int
    step: int
    rows: IntArray
    samples: bool = False
    seed: int = 0
    position: int = 0

    @property
    def draws(self) -> Draws:
        """The numbers that decide the random draws of the batch's transforms."""
        return Draws(self.seed, self.epoch, self.position)


class RowReader(Protocol):
    """Rows of one array in, one ndarray out: the seam behind which all ways of reading stand."""

    dtype: np.dtype[Any]
    """Dtype of rows as ``read`` returns them, in native byte order; ``object`` for text."""
    row_shape: tuple[int, ...]

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def read(self, rows: IntArray, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return rows in the requested order.

        Args:
            rows: any integers in ``[0, len(self))``: unsorted, repeated, none at all.
            out: C-contiguous array of shape ``(len(rows), *row_shape)`` and this reader's dtype to read into.

        Returns:
            ``out``, or a new array of that shape.
        """
        ...

    def close(self) -> None:
        """Release the memory of this reader. Files belong to the handle pool."""
        ...
