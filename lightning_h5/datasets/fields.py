"""The fields of a dataset, from what its user named: arrays, dtypes, and what a sample looks like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5ValueError, listing
from ..hdf5 import FieldNames, field_names, torch_dtype
from ..types import DTypeLike, IntArray, Keys
from .compatibility import Asked
from .sample_layout import Part, SampleStructure, Transform

__all__ = [
    "TARGET",
    "FieldMap",
    "Fields",
    "checked_names",
    "checked_rows",
    "keys_of",
    "numpy_dtype_like",
    "torch_dtype_of",
]

TARGET = "target"

FieldMap = Mapping[str, Any]
"""For a field's name here its array in the files; or ``{"key": ..., "layout": "NTC"}`` for ``target``."""


@dataclass(frozen=True)
class Fields:
    """What is read of each row.

    Attributes:
        keys: the arrays: the input's, and the target's after them.
        dtypes: for each what it becomes; None leaves it as stored.
        asked: the arrays as they are looked for in files. A target may hold text, and one of several inputs.
        structure: what a sample looks like.
    """

    keys: tuple[str, ...]
    dtypes: tuple[torch.dtype | None, ...]
    asked: tuple[Asked, ...]
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
        asked = _asked(x, dtypes, dtype_names[0], text_ok=x.kind != "single")
        if y is not None:
            dtypes += _dtypes(y_dtype, y, dtype_names[1])
            asked += _asked(y, dtypes[len(x.keys) :], dtype_names[1], text_ok=True)
        structure = SampleStructure(
            Part(x, transform, flags),
            None if y is None else Part(y, target_transform, argument="target_transform"),
            with_index,
        )
        return cls((*x.keys, *(y.keys if y else ())), tuple(dtypes), tuple(asked), structure)


def _dtypes(dtype: DTypeLike, names: FieldNames, argument: str) -> list[torch.dtype | None]:
    if not isinstance(dtype, Mapping):
        return [torch_dtype(dtype, argument)] * len(names.keys)
    unknown = [name for name in dtype if name not in names.names]
    if unknown:
        raise H5ValueError(
            f"{argument} names {listing(unknown)}; the fields are {listing(names.names)}. Use the fields' names."
        )
    return [torch_dtype(dtype.get(name), f"{argument}[{name!r}]") for name in names.names]


def _asked(names: FieldNames, dtypes: Sequence[torch.dtype | None], argument: str, *, text_ok: bool) -> list[Asked]:
    return [
        Asked(
            key=key,
            text_ok=text_ok,
            dtype=dtype,
            argument=f"{argument}={{}}" if names.kind == "single" else f"{argument}={{{name!r}: {{}}}}",
        )
        for key, name, dtype in zip(names.keys, names.names, dtypes, strict=True)
    ]


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


def keys_of(field_map: FieldMap | None) -> tuple[dict[str, str], str | None]:
    """Arrays by our names, and the target's axes where they are said.

    Raises:
        H5ValueError: a name is given no array, or one that another has.
    """
    keys: dict[str, str] = {}
    layout = None
    for name, given in (field_map or {}).items():
        said = {"key": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
        if not isinstance(said.get("key", name), str) or not said or set(said) - {"key", "layout"}:
            raise H5ValueError(
                f"field_map[{name!r}]={given!r} is no array. Pass its name in the files, or "
                "{'key': its name, 'layout': 'NTC'} for a target."
            )
        if "layout" in said and name != TARGET:
            raise H5ValueError(f"field_map[{name!r}] has a layout, which says where a target's classes are.")
        keys[name] = said.get("key", name).strip("/")
        layout = said.get("layout", layout)
    twice = [key for key in keys.values() if list(keys.values()).count(key) > 1]
    if twice:
        raise H5ValueError(f"field_map gives {listing(dict.fromkeys(twice))} several names. Give each array one.")
    return keys, layout


def checked_names(names: Any) -> list[str]:
    """Fields to load, each once.

    Raises:
        H5ValueError: these are no names, or one comes twice.
    """
    given = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else []
    if not given or not all(isinstance(name, str) and name.strip("/") for name in given):
        raise H5ValueError(f"load_fields={names!r} names no field. Pass a list of names, or None for all fields.")
    if len(set(given)) < len(given):
        raise H5ValueError(f"load_fields={names!r} names a field twice. A sample has each once.")
    return given
