"""Dtypes of files as NumPy and torch have them, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import h5py
import numpy as np

from ..errors import H5ValueError, near, shown
from ..types import DTypeLike

__all__ = [
    "NumberKind",
    "dtype_of_numbers",
    "dtype_text",
    "enum_names",
    "is_bytes",
    "is_list",
    "kind_of",
    "native",
    "numpy_dtype",
    "torch_dtype",
    "unknown_dtype",
]

NumberKind = Literal["number", "text", "compound", "object"]

if TYPE_CHECKING:
    import torch

_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
"""Dtypes of torch, by the names that torch and NumPy have in common."""

_CODES = {np.dtype(name).str[1:] for name in _NAMES if name != "bfloat16"}
"""The same without bfloat16, which NumPy lacks, as NumPy codes them without a byte order: "f4"."""

MAX_MEMBERS = 6  # members of a compound to list in one line

_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "int": "int64", "long": "int64"}


def torch_dtype(dtype: DTypeLike, name: str) -> torch.dtype | None:
    """Return the torch dtype for a name, a NumPy dtype or a torch dtype; None for None.

    Args:
        dtype: such as ``"float16"``, ``np.float32`` or ``torch.bfloat16``.
        name: the argument's name, for the error.

    Raises:
        H5ValueError: the dtype does not exist, or torch has no equal.
    """
    if dtype is None:
        return None
    import torch  # slow to import, and not needed to inspect files

    if isinstance(dtype, torch.dtype):
        return dtype
    text = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    canonical = _ALIASES.get(text, text)
    try:
        dtype_name = canonical if canonical in _NAMES else np.dtype(dtype).newbyteorder("=").name
    except (TypeError, ValueError, SyntaxError):  # NumPy parses names such as "(2,f4" as Python
        dtype_name = ""
    if dtype_name not in _NAMES:
        raise H5ValueError(
            f"{name}={dtype!r} is not a dtype that a tensor can have; there are {', '.join(_NAMES)}."
            f"{near(text or str(dtype), _NAMES)} Pass one of these names."
        )
    tensor_dtype: torch.dtype = getattr(torch, dtype_name)
    return tensor_dtype


def kind_of(dtype: np.dtype[Any]) -> NumberKind:
    """Return whether values of a file's dtype become tensors (``number``), lists of str (``text``), or neither."""
    base = dtype.base
    if base.names is not None:
        return "compound"
    if base.kind in "biufc":
        return "number" if base.str[1:] in _CODES else "object"
    return "text" if base.kind in "SU" or h5py.check_string_dtype(base) is not None else "object"


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype in native byte order, without h5py's metadata of enums."""
    native_dtype = dtype.newbyteorder("=")
    return (
        np.dtype(native_dtype.str)
        if native_dtype.names is None and native_dtype.subdtype is None and native_dtype.kind != "O"
        else native_dtype
    )


def enum_names(stored: np.dtype[Any], members: Sequence[str] = ()) -> dict[int, str] | None:
    """Return the names of an enum's values, in the order of the values; None for other dtypes, and for ``bool``.

    Args:
        stored: dtype of an element in the file.
        members: path of a member in it, outermost first.
    """
    for member in members:
        stored = stored.base[member]
    names = h5py.check_enum_dtype(stored.base)
    return None if names is None else {value: name for name, value in sorted(names.items(), key=lambda item: item[1])}


def dtype_text(dtype: Any) -> str:
    """Return a description of a dtype; None is one that NumPy does not have."""
    if dtype is None:
        return "a number format that NumPy does not have"
    if dtype.kind in "biufc" and dtype.metadata is None:
        return _name_of(dtype)
    if (text := h5py.check_string_dtype(dtype)) is not None:
        return "text" if text.length is None else f"text of {text.length} bytes"
    if (base := h5py.check_vlen_dtype(dtype)) is not None:
        return f"lists of {base}"
    if (names := h5py.check_enum_dtype(dtype)) is not None:
        return f"one of {len(names)} names, as {dtype}"
    if h5py.check_ref_dtype(dtype) is not None:
        return "references"
    if dtype.names is not None:
        n_more = len(dtype.names) - MAX_MEMBERS
        return (
            f"table of {', '.join(map(shown, dtype.names[:MAX_MEMBERS]))}{f' and {n_more} more' if n_more > 0 else ''}"
        )
    return str(dtype)


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return str(dtype)


def is_list(dtype: np.dtype[Any]) -> bool:
    """Return whether elements are lists of numbers of variable length."""
    base = h5py.check_vlen_dtype(dtype)
    return isinstance(base, np.dtype) and base.kind in "biuf"


def dtype_of_numbers(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the numbers in lists; that of other elements."""
    base = h5py.check_vlen_dtype(dtype)
    return base if isinstance(base, np.dtype) else dtype


def is_bytes(dtype: np.dtype[Any]) -> bool:
    """Return whether elements are lists of bytes of variable length."""
    return bool(h5py.check_vlen_dtype(dtype) == np.dtype(np.uint8))


def numpy_dtype(array: Any) -> np.dtype[Any] | None:
    """Return an array's dtype; None if NumPy has no equal (HDF5's times, quadruple precision, names not in UTF-8)."""
    try:
        kind = (array.id if isinstance(array, h5py.Dataset) else array).get_type()
        if kind.get_class() != h5py.h5t.COMPOUND:
            dtype: np.dtype[Any] = kind.dtype
            return dtype
        return _dtype_of_table(kind.encode())
    except (TypeError, ValueError):
        return None


@lru_cache(maxsize=4)
def _dtype_of_table(encoded: bytes) -> np.dtype[Any]:
    """Return the dtype of a table: h5py takes milliseconds for hundreds of members, each time it is asked."""
    dtype: np.dtype[Any] = h5py.h5t.decode(encoded).dtype
    return dtype


def unknown_dtype(array: Any) -> str:
    """Return why NumPy has no dtype for an array, and what to do, for an error."""
    try:
        array.dtype  # noqa: B018
    except UnicodeDecodeError as error:
        return (
            f"a member or an enum's value with a name that is not UTF-8 ({error.object!r}). Write it again with "
            "another name."
        )
    except (TypeError, ValueError):
        pass
    return "a number format that NumPy does not have. Write it again as integers or floats of 8, 16, 32 or 64 bits."
