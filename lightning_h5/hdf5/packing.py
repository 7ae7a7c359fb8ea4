"""Packed integers of the CF and netCDF conventions: attributes of an array that say what its stored values mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from .headers import short_text

__all__ = ["Packing", "packing_of"]

SCALING = ("scale_factor", "add_offset")
MISSING = ("_FillValue", "missing_value")
UNSIGNED = "_Unsigned"
ATTRIBUTES = {name.encode() for name in (*SCALING, *MISSING, UNSIGNED)}
"""Attributes that say what stored integers mean; no others do."""

MAX_VALUES = 64
"""Values of an attribute that are read; there is one, or a few that mean missing."""

EXACT_IN_FLOAT64 = 1 << 53


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What the attributes of an array of integers say about its values.

    Attributes:
        attributes: their names and values, as text.
        scale: each stored value is multiplied by this.
        offset: and this is added.
        missing: stored values that stand for missing ones.
        dtype: of decoded values.
        stored: dtype that stored values are to be seen as, if it is another (``_Unsigned``).
        unclear: name of an attribute that does not say how values are decoded, such as text; or None.
    """

    attributes: tuple[tuple[str, str], ...]
    scale: float = 1.0
    offset: float = 0.0
    missing: tuple[int, ...] = ()
    dtype: str = "float64"
    stored: str | None = None
    unclear: str | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.attributes)

    @property
    def only_misses(self) -> bool:
        """Whether values mean themselves, but for those that stand for missing ones."""
        return self.scale == 1 and self.offset == 0 and self.stored is None and self.unclear is None

    @property
    def formula(self) -> str:
        """How a value ``x`` is decoded, in words."""
        parts = [] if self.stored is None else [f"x seen as {self.stored}"]
        values = dict(self.attributes)
        terms = "x"
        if self.scale != 1:
            terms += f" * {values['scale_factor']}"
        if self.offset:
            terms += f" + {values['add_offset']}" if self.offset > 0 else f" - {values['add_offset'].lstrip('-')}"
        if terms != "x":
            parts.append(terms)
        if self.missing:
            parts.append(f"{' or '.join(map(str, self.missing))} means missing")
        return "; ".join(parts) if self.unclear is None else f"as {self.unclear} says"

    def decode(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what stored values mean: floats with NaN for missing ones, or integers if these mean themselves.

        Args:
            values: as stored.

        Raises:
            H5ValueError: an attribute does not say how, or values are too large for a float.
        """
        if self.unclear is not None:
            raise H5ValueError(
                f"{self} cannot be decoded: what {self.unclear} means is not known. Decode the values yourself."
            )
        is_missing = np.isin(values, np.array(self.missing, values.dtype))
        seen = values if self.stored is None else values.view(self.stored)
        is_scaled = self.scale != 1 or self.offset != 0
        if not is_scaled and not is_missing.any():
            return seen
        if not is_scaled and seen.dtype.itemsize == 8 and seen.size and _largest(seen) > EXACT_IN_FLOAT64:
            raise H5ValueError(f"{self}: values beyond 2**53 beside missing ones fit no float. Decode them yourself.")
        dtype = np.dtype(self.dtype)
        decoded: npt.NDArray[Any] = seen.astype(dtype) * dtype.type(self.scale) + dtype.type(self.offset)
        decoded[is_missing] = np.nan
        return decoded


def packing_of(array: Any, element: np.dtype[Any]) -> Packing | None:
    """Look whether the attributes of an array say that its integers are no plain numbers.

    Args:
        array: an h5py dataset.
        element: dtype of its elements, in native byte order.

    Returns:
        None for other arrays than those of integers, and if the attributes change nothing.
    """
    if element.kind not in "iu":
        return None
    found: dict[str, npt.NDArray[Any] | str] = {}
    for name in (*SCALING, *MISSING, UNSIGNED):
        if (value := _attribute(array, name)) is not None:
            found[name] = value
    if not found:
        return None
    unclear = next((name for name in (*SCALING, *MISSING) if isinstance(found.get(name), str)), None)
    scale, offset = (_number(found.get(name), neutral) for name, neutral in zip(SCALING, (1, 0), strict=True))
    unclear = unclear or next((n for n, v in zip(SCALING, (scale, offset), strict=True) if v is None), None)
    is_unsigned = _yes_or_no(found.get(UNSIGNED), default=element.kind == "u")
    if is_unsigned is None:
        unclear = unclear or UNSIGNED
    is_reseen = is_unsigned is not None and is_unsigned != (element.kind == "u")
    stored = f"{'uint' if is_unsigned else 'int'}{8 * element.itemsize}" if is_reseen else None
    values = [value for name in MISSING for value in _values(found.get(name))]
    wholes = (_whole(value, element, is_reseen=is_reseen) for value in values)
    missing = dict.fromkeys(whole for whole in wholes if whole is not None)
    if unclear is None and scale == 1 and offset == 0 and not missing and stored is None:
        return None
    numbers = [value for name in SCALING if isinstance(value := found.get(name), np.ndarray)]
    dtype = np.result_type(stored or element, *(value.dtype for value in numbers))
    return Packing(
        attributes=tuple((name, _text(value)) for name, value in found.items()),
        scale=1.0 if scale is None else float(scale),
        offset=0.0 if offset is None else float(offset),
        missing=tuple(missing),
        dtype=dtype.name if dtype in (np.float32, np.float64) else "float64",
        stored=stored,
        unclear=unclear,
    )


def _attribute(array: Any, name: str) -> npt.NDArray[Any] | str | None:
    """Numbers of an attribute, flat; what it has instead, in words; or None if it is missing or empty.

    Text of any length lies in a heap, which the HDF5 library may never get through if it is damaged: it is read without
    the library if it is short, and otherwise not at all.
    """
    if not h5py.h5a.exists(array.id, name.encode()):
        return None
    attribute = h5py.h5a.open(array.id, name.encode())
    kind, space = attribute.get_type(), attribute.get_space()
    n_values = space.get_simple_extent_npoints() if space.get_simple_extent_type() != h5py.h5s.NULL else 0
    if not n_values:
        return None
    if kind.get_class() == h5py.h5t.STRING and not kind.is_variable_str() and kind.get_size() * n_values <= MAX_VALUES:
        text = np.empty(attribute.shape, f"S{kind.get_size()}")
        attribute.read(text)
        return repr(b"".join(text.reshape(-1).tolist()).decode(errors="replace").rstrip("\0 "))
    if kind.get_class() == h5py.h5t.STRING:
        found = short_text(array, name, MAX_VALUES) if kind.is_variable_str() and n_values == 1 else None
        return "text that was not read" if found is None else repr(found.decode(errors="replace").rstrip("\0 "))
    if kind.get_class() not in (h5py.h5t.INTEGER, h5py.h5t.FLOAT):
        return "no number and no text"
    if n_values > MAX_VALUES:
        return f"{n_values:,} values"
    try:
        values = np.empty(attribute.shape, attribute.dtype)
    except (TypeError, ValueError):
        return "a number format that NumPy does not have"
    attribute.read(values)
    return np.atleast_1d(values.astype(values.dtype.newbyteorder("="))).reshape(-1)


def _number(value: npt.NDArray[Any] | str | None, neutral: float) -> Any:
    """The one number that an attribute has; a neutral one without it, and None if it is none or several."""
    if value is None:
        return neutral
    is_one = isinstance(value, np.ndarray) and value.size == 1 and math.isfinite(value[0])
    return value[0] if is_one else None


def _values(value: npt.NDArray[Any] | str | None) -> list[Any]:
    return list(value) if isinstance(value, np.ndarray) else []


def _whole(value: Any, element: np.dtype[Any], *, is_reseen: bool) -> int | None:
    """The stored integer that a value of an attribute equals; None for one that no element can have."""
    if not math.isfinite(value) or value != int(value):
        return None
    limits, whole = np.iinfo(element), int(value)
    if is_reseen and not limits.min <= whole <= limits.max:  # named as it is seen, and not as it is stored
        span = 1 << limits.bits
        whole += span if whole < 0 else -span
    return whole if limits.min <= whole <= limits.max else None


def _yes_or_no(value: npt.NDArray[Any] | str | None, *, default: bool) -> bool | None:
    """What an attribute says that is "true" or "false", or a number; None if it says something else."""
    if value is None:
        return default
    if isinstance(value, str):
        return {"'true'": True, "'false'": False}.get(value.casefold())
    return bool(value.any())


def _largest(values: npt.NDArray[Any]) -> int:
    return max(abs(int(values.min())), abs(int(values.max())))


def _text(value: npt.NDArray[Any] | str) -> str:
    if isinstance(value, str):
        return value
    return str(value[0]) if value.size == 1 else str([one.item() for one in value])
