"""The fields of a dataset, from what its user named: arrays, dtypes, and what a sample looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5ValueError, listing
from ..files import FieldNames, field_names, torch_dtype
from ..types import DTypeLike, IntArray, Keys
from .structure import Part, SampleStructure, Transform

__all__ = ["Fields", "checked_rows", "numpy_dtype_like", "torch_dtype_of"]


@dataclass(frozen=True)
class Fields:
    """What is read of each row.

    Attributes:
        keys: the arrays: the input's, and the target's after them.
        dtypes: for each what it becomes; None leaves it as stored.
        text_ok: for each whether it may hold text: a target may, and one of several inputs.
        structure: what a sample looks like.
    """

    keys: tuple[str, ...]
    dtypes: tuple[torch.dtype | None, ...]
    text_ok: tuple[bool, ...]
    structure: SampleStructure

    @property
    def names(self) -> tuple[str, ...]:
        """What the fields are called in a sample, or their arrays where they have no names there."""
        return (*self.structure.x.fields.names, *(self.structure.y.fields.names if self.structure.y else ()))

    @classmethod
    def of(
        cls,
        x_key: Keys,
        y_key: Keys | None,
        *,
        x_dtype: DTypeLike,
        y_dtype: DTypeLike,
        transform: Transform | None,
        target_transform: Transform | None,
        with_index: bool,
        flags: tuple[bool, ...] = (),
        dtype_names: tuple[str, str] = ("x_dtype", "y_dtype"),
    ) -> Fields:
        """The fields of datasets with an input and a target; see ``H5LazyDataset`` for the arguments.

        Args:
            x_key: the input.
            y_key: the target.
            x_dtype: dtype of the input.
            y_dtype: dtype of the target.
            transform: runs on each sample's input.
            target_transform: runs on each sample's target.
            with_index: add each row's index.
            flags: for each input field whether a sample has it as a bool; none where empty.
            dtype_names: what the dataset calls the dtypes.

        Raises:
            H5ValueError: a name or dtype makes no sense.
        """
        x = field_names(x_key, "x_key")
        y = None if y_key is None else field_names(y_key, "y_key")
        if y is None and target_transform is not None:
            raise H5ValueError("target_transform was given without y_key. Pass y_key, or leave target_transform out.")
        dtypes = _dtypes(x_dtype, x, dtype_names[0])
        text_ok = [x.kind != "single"] * len(x.keys)
        if y is not None:
            dtypes += _dtypes(y_dtype, y, dtype_names[1])
            text_ok += [True] * len(y.keys)
        structure = SampleStructure(
            Part(x, transform, flags), None if y is None else Part(y, target_transform), with_index
        )
        return cls((*x.keys, *(y.keys if y else ())), tuple(dtypes), tuple(text_ok), structure)


def _dtypes(dtype: DTypeLike, names: FieldNames, argument: str) -> list[torch.dtype | None]:
    if not isinstance(dtype, Mapping):
        return [torch_dtype(dtype, argument)] * len(names.keys)
    unknown = [name for name in dtype if name not in names.names]
    if unknown:
        raise H5ValueError(
            f"{argument} names {listing(unknown)}; the fields are {listing(names.names)}. Use the fields' names."
        )
    return [torch_dtype(dtype.get(name), f"{argument}[{name!r}]") for name in names.names]


def numpy_dtype_like(dtype: torch.dtype | None, stored: np.dtype[Any]) -> np.dtype[Any]:
    """The NumPy dtype to gather into: as asked, where NumPy has it and casts to it as torch does; else as stored."""
    try:
        wanted = stored if dtype is None else np.dtype(str(dtype).removeprefix("torch."))
    except TypeError:  # bfloat16
        return stored
    # Torch rounds twice on the way to 16 bits, by way of 32.
    is_same = wanted != np.float16 or stored in (np.float16, np.float32, np.uint8, np.int8, np.bool_)
    return wanted if is_same and np.can_cast(stored, wanted, "same_kind") else stored


def torch_dtype_of(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of a NumPy one that has one."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def checked_rows(indices: npt.ArrayLike | None, n_rows: int) -> IntArray | None:
    """Rows that a user picked, as indices.

    Args:
        indices: integers, shape ``(n,)``, or a mask over all rows; None stays None.
        n_rows: rows that there are.

    Raises:
        H5ValueError: they are neither.
    """
    if indices is None:
        return None
    given = np.asarray(indices)
    if given.dtype.kind == "b" and given.shape == (n_rows,):
        return np.flatnonzero(given)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise H5ValueError(
            f"indices have shape {given.shape} and dtype {given.dtype}; the data has {n_rows} rows. "
            f"Pass integers, shape (n,), or a mask of shape ({n_rows},)."
        )
    if given.size and (given.min() < 0 or given.max() >= n_rows):
        raise H5ValueError(
            f"indices run from {given.min()} to {given.max()}; the data has {n_rows} rows. "
            f"Pass rows from 0 to {n_rows - 1}."
        )
    return given.astype(np.int64)
