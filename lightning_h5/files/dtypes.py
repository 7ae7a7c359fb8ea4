"""Dtypes: what users may pass, and what of a file can become a tensor."""

from __future__ import annotations

from typing import Any, Literal

import h5py
import numpy as np
import torch

from ..errors import H5ValueError, near
from ..types import DTypeLike

__all__ = ["NumberKind", "kind_of", "native", "torch_dtype"]

NumberKind = Literal["number", "text", "compound", "object"]

_TORCH_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    )
}
_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "int": "int64", "long": "int64"}


def torch_dtype(dtype: DTypeLike, name: str) -> torch.dtype | None:
    """The torch dtype that a name, a NumPy dtype or a torch dtype means; None for None.

    Args:
        dtype: such as ``"float16"``, ``np.float32`` or ``torch.bfloat16``.
        name: the argument's name, for the error.

    Raises:
        H5ValueError: there is no such dtype, or torch has none like it.
    """
    if dtype is None:
        return None
    if isinstance(dtype, torch.dtype):
        return dtype
    text = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    text = _ALIASES.get(text, text)
    if text in _TORCH_DTYPES:
        return _TORCH_DTYPES[text]
    try:
        return _TORCH_DTYPES[np.dtype(dtype).newbyteorder("=").name]
    except (TypeError, KeyError, ValueError, SyntaxError):  # NumPy parses names such as "(2,f4" as Python
        raise H5ValueError(
            f"{name}={dtype!r} is not a dtype that a tensor can have; there are {', '.join(_TORCH_DTYPES)}."
            f"{near(text or str(dtype), _TORCH_DTYPES)} Pass one of these names."
        ) from None


def kind_of(dtype: np.dtype[Any]) -> NumberKind:
    """Whether values of a file's dtype become tensors (``number``), lists of str (``text``), or neither."""
    base = dtype.base
    if base.names is not None:
        return "compound"
    if h5py.check_string_dtype(base) is not None or base.kind in "SU":
        return "text"
    if base.kind in "biufc" and base.newbyteorder("=").name in _TORCH_DTYPES:
        return "number"
    return "object"


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same numbers in this machine's byte order, without h5py's notes on enums."""
    plain = dtype.newbyteorder("=")
    return np.dtype(plain.str) if plain.names is None and plain.subdtype is None and plain.kind != "O" else plain
