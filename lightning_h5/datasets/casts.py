"""Casts to integers and bools: an error for values that they cannot hold, of which torch makes other numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..catalog import ArrayRequest
from ..errors import H5ValueError
from ..hdf5 import ArrayLayout

__all__ = ["CastGuard"]


@dataclass(frozen=True)
class CastGuard:
    """Checks values of a field before they are cast. Fractions are cut off, as 280.5 is to 280 in ``int64``.

    Attributes:
        key: the array, for messages.
        argument: the argument with the dtype, for messages.
        dtype: dtype of the result, integers or bools.
    """

    key: str
    argument: str
    dtype: torch.dtype

    @classmethod
    def of(cls, array: ArrayLayout, request: ArrayRequest, *, is_number: bool) -> CastGuard | None:
        """Return the guard of a field; None if the requested dtype holds all values that the array may have.

        Args:
            array: the array.
            request: has the requested dtype.
            is_number: whether the array has one dtype of numbers. Otherwise its values are checked one by one.

        Raises:
            H5ValueError: the values are complex, and the requested dtype is not.
        """
        dtype = request.dtype
        if dtype is None or dtype.is_complex:
            return None
        name = str(dtype).removeprefix("torch.")
        argument = "the dtype {}" if request.argument is None else request.argument
        guard = cls(array.key, argument.replace("{}", repr(name)), dtype)
        if is_number and array.dtype.kind == "c":
            raise guard.refusal_of_complex(f"{array.key!r} in {array.path!r}", array.dtype)
        return None if is_number and _limits(array.dtype, dtype) is None else guard

    def __call__(self, values: npt.NDArray[Any]) -> None:
        """Check values.

        Raises:
            H5ValueError: the dtype cannot hold a value.
        """
        if values.dtype.kind == "c":
            raise self.refusal_of_complex(repr(self.key), values.dtype)
        limits = _limits(values.dtype, self.dtype)
        if limits is None or not values.size:
            return
        with np.errstate(invalid="ignore"):
            low, high = values.min().item(), values.max().item()  # both are NaN if any value is
        if math.isfinite(low) and math.isfinite(high) and limits[0] <= int(low) and int(high) <= limits[1]:
            return
        wrong = low if not math.isfinite(low) or int(low) < limits[0] else high
        raise H5ValueError(
            f"{self.key!r} has the value {wrong!r}, which {self.argument} cannot hold. Pass another dtype, or leave "
            f"out rows with such values, as with where={{{self.key!r}: {{'min': ...}}}}: NaN is outside every range."
        )

    def refusal_of_complex(self, array: str, dtype: np.dtype[Any]) -> H5ValueError:
        """Return the error for complex values."""
        return H5ValueError(
            f"{array} has complex numbers ({dtype}), and {self.argument} would drop their imaginary part. Pass "
            f"decode={{{self.key!r}: 'real'}} for pairs of real and imaginary part, or None or a complex dtype instead."
        )


@cache
def _limits(stored: np.dtype[Any], dtype: torch.dtype) -> tuple[float, float] | None:
    """Return the smallest and largest value of a dtype; None if it holds all stored values, at most rounded."""
    if dtype.is_floating_point or stored.kind not in "iuf":
        return None
    if dtype == torch.bool:
        return None if stored.kind != "f" else (-math.inf, math.inf)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if stored.kind != "f" and least <= np.iinfo(stored).min and np.iinfo(stored).max <= most:
        return None
    return least, most
