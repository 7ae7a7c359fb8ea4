"""What stored numbers mean: dtypes, and packed numbers of the CF, netCDF and NWB conventions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import h5py
import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError, near, shown
from ..types import DTypeLike

__all__ = [
    "ATTRIBUTES",
    "NumberKind",
    "Packing",
    "dtype_text",
    "kind_of",
    "native",
    "numpy_dtype",
    "packing_of",
    "torch_dtype",
]

NumberKind = Literal["number", "text", "compound", "object"]

if TYPE_CHECKING:
    import torch

_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
"""Dtypes of torch, by the names that torch and NumPy have in common."""

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
    known = _ALIASES.get(text, text)
    try:
        found = known if known in _NAMES else np.dtype(dtype).newbyteorder("=").name
    except (TypeError, ValueError, SyntaxError):  # NumPy parses names such as "(2,f4" as Python
        found = ""
    if found not in _NAMES:
        raise H5ValueError(
            f"{name}={dtype!r} is not a dtype that a tensor can have; there are {', '.join(_NAMES)}."
            f"{near(text or str(dtype), _NAMES)} Pass one of these names."
        )
    torch_has: torch.dtype = getattr(torch, found)
    return torch_has


def kind_of(dtype: np.dtype[Any]) -> NumberKind:
    """Return whether values of a file's dtype become tensors (``number``), lists of str (``text``), or neither."""
    base = dtype.base
    if base.names is not None:
        return "compound"
    if h5py.check_string_dtype(base) is not None or base.kind in "SU":
        return "text"
    if base.kind in "biufc" and base.newbyteorder("=").name in _NAMES:
        return "number"
    return "object"


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype in native byte order, without h5py's metadata of enums."""
    plain = dtype.newbyteorder("=")
    return np.dtype(plain.str) if plain.names is None and plain.subdtype is None and plain.kind != "O" else plain


def dtype_text(dtype: Any) -> str:
    """Return a description of a dtype; None is one that NumPy does not have."""
    if dtype is None:
        return "a number format that NumPy does not have"
    if (text := h5py.check_string_dtype(dtype)) is not None:
        return "text" if text.length is None else f"text of {text.length} bytes"
    if (base := h5py.check_vlen_dtype(dtype)) is not None:
        return f"lists of {base}"
    if (names := h5py.check_enum_dtype(dtype)) is not None:
        return f"one of {len(names)} names, as {dtype}"
    if h5py.check_ref_dtype(dtype) is not None:
        return "references"
    if dtype.names is not None:
        more = len(dtype.names) - MAX_MEMBERS
        return f"table of {', '.join(map(shown, dtype.names[:MAX_MEMBERS]))}{f' and {more} more' if more > 0 else ''}"
    return str(dtype)


def numpy_dtype(array: Any) -> np.dtype[Any] | None:
    """Return an array's dtype; None if NumPy has no equal (HDF5's times, quadruple precision ...)."""
    try:
        dtype: np.dtype[Any] = array.dtype
    except (TypeError, ValueError):
        return None
    return dtype


# Packed numbers ---------------------------------------------------------------------------------------------------

SCALING = ("scale_factor", "add_offset")
NWB_SCALING = ("conversion", "offset")
MISSING = ("_FillValue", "missing_value")
UNSIGNED = "_Unsigned"
ATTRIBUTES = {name.encode() for name in (*SCALING, *NWB_SCALING, *MISSING, UNSIGNED)}
"""The attributes that declare how stored numbers are decoded."""

Policy = Literal["decode", "refuse", "keep"]
"""What becomes of packed numbers if the user names neither a decoder nor the stored dtype."""

MAX_VALUES = 64
"""Values of an attribute that are read; there is one, or a few that stand for missing values."""

EXACT_IN_FLOAT64 = 1 << 53


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How the attributes of an array declare that its values are decoded.

    Attributes:
        attributes: their names and values, as text.
        scale: each stored value is multiplied by this.
        offset: and this is added.
        missing: stored values that stand for missing values.
        dtype: of decoded values.
        stored: dtype that stored values are viewed as, if it is another (``_Unsigned``).
        unclear: name of an attribute that cannot be interpreted, such as text; or None.
        policy: what becomes of stored values by default: netCDF files are "decoded", and integers of other files
            "refused"; floats there, and numbers of NWB files, are "kept".
    """

    attributes: tuple[tuple[str, str], ...]
    scale: float = 1.0
    offset: float = 0.0
    missing: tuple[float, ...] = ()
    dtype: str = "float64"
    stored: str | None = None
    unclear: str | None = None
    policy: Policy = "refuse"

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.attributes)

    @property
    def only_misses(self) -> bool:
        """Whether values are plain integers, apart from those that stand for missing values."""
        return self.scale == 1 and self.offset == 0 and self.stored is None and self.unclear is None

    @property
    def formula(self) -> str:
        """How a value ``x`` is decoded, as text."""
        parts = [] if self.stored is None else [f"x seen as {self.stored}"]
        values = dict(self.attributes)
        scale, offset = (values.get(name, values.get(other)) for name, other in zip(SCALING, NWB_SCALING, strict=True))
        terms = "x"
        if self.scale != 1:
            terms += f" * {scale}"
        if self.offset and offset is not None:
            terms += f" + {offset}" if self.offset > 0 else f" - {offset.lstrip('-')}"
        if terms != "x":
            parts.append(terms)
        if self.missing:
            parts.append(f"{' or '.join(map(str, self.missing))} means missing")
        return "; ".join(parts) if self.unclear is None else f"as {self.unclear} says"

    def check(self) -> None:
        """Raise an ``H5ValueError`` if an attribute cannot be interpreted."""
        if self.unclear is not None:
            raise H5ValueError(
                f"{self} cannot be decoded: what {self.unclear} means is not known. Decode the values yourself."
            )

    def decode(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return decoded values: floats with NaN for missing values, or integers if nothing has to be decoded.

        Args:
            values: as stored.

        Raises:
            H5ValueError: an attribute cannot be interpreted, or values are too large for a float.
        """
        self.check()
        is_missing = np.isin(values, np.array(self.missing, values.dtype))
        seen = values if self.stored is None else values.view(self.stored)
        is_scaled = self.scale != 1 or self.offset != 0
        if not is_scaled and not is_missing.any():
            return seen
        if not is_scaled and seen.dtype.itemsize == 8 and seen.size and _largest(seen) > EXACT_IN_FLOAT64:
            raise H5ValueError(
                f"{self}: values beyond 2**53 next to missing ones do not fit a float. Decode them yourself."
            )
        dtype = np.dtype(self.dtype)
        decoded: npt.NDArray[Any] = seen.astype(dtype) * dtype.type(self.scale) + dtype.type(self.offset)
        decoded[is_missing] = np.nan
        return decoded


def packing_of(array: Any, element: np.dtype[Any]) -> Packing | None:
    """Return how the attributes of an array declare that its integers are decoded.

    Args:
        array: an h5py dataset.
        element: dtype of its elements, in native byte order.

    Returns:
        None if the array has other values than numbers, or the attributes change nothing.
    """
    if element.kind not in "iuf":
        return None
    found: dict[str, npt.NDArray[Any] | str] = {}
    for name in (*SCALING, *MISSING, *((UNSIGNED,) if element.kind != "f" else ())):
        if (value := _attribute(array, name)) is not None:
            found[name] = value
    policy: Policy = "refuse" if element.kind != "f" else "keep"
    if not found and (found := _nwb_scaling(array)):
        policy = "keep"
    if not found:
        return None
    attributes = tuple((name, _text(value)) for name, value in found.items())
    for name, other in zip(SCALING, NWB_SCALING, strict=True):
        if other in found:
            found[name] = found.pop(other)
    if policy != "keep" or element.kind == "f":
        policy = "decode" if _is_netcdf(array) else policy
    unclear = next((name for name in (*SCALING, *MISSING) if isinstance(found.get(name), str)), None)
    scale, offset = (_number(found.get(name), neutral) for name, neutral in zip(SCALING, (1, 0), strict=True))
    unclear = unclear or next((n for n, v in zip(SCALING, (scale, offset), strict=True) if v is None), None)
    is_unsigned = _yes_or_no(found.get(UNSIGNED), default=element.kind == "u")
    if is_unsigned is None:
        unclear = unclear or UNSIGNED
    is_reseen = element.kind != "f" and is_unsigned is not None and is_unsigned != (element.kind == "u")
    stored = f"{'uint' if is_unsigned else 'int'}{8 * element.itemsize}" if is_reseen else None
    values = [value for name in MISSING for value in _values(found.get(name))]
    if element.kind == "f":  # NaN needs no decoding
        marks = (float(element.type(value)) for value in values if not math.isnan(value))
        missing: dict[float, None] = dict.fromkeys(marks)
    else:
        wholes = (_whole(value, element, is_reseen=is_reseen) for value in values)
        missing = dict.fromkeys(whole for whole in wholes if whole is not None)
    if unclear is None and scale == 1 and offset == 0 and not missing and stored is None:
        return None
    numbers = [value for name in SCALING if isinstance(value := found.get(name), np.ndarray)]
    dtype = np.result_type(stored or element, *(value.dtype for value in numbers))
    return Packing(
        attributes=attributes,
        scale=1.0 if scale is None else float(scale),
        offset=0.0 if offset is None else float(offset),
        missing=tuple(missing),
        dtype=dtype.name if dtype in (np.float32, np.float64) else "float64",
        stored=stored,
        unclear=unclear,
        policy=policy,
    )


def _nwb_scaling(array: Any) -> dict[str, npt.NDArray[Any] | str]:
    """Return the attributes that declare units in a file of Neurodata Without Borders."""
    if not h5py.h5a.exists(array.id, NWB_SCALING[0].encode()) or not _has_attribute(array, "nwb_version"):
        return {}
    each = {name: _attribute(array, name) for name in NWB_SCALING}
    return {name: value for name, value in each.items() if value is not None}


def _is_netcdf(array: Any) -> bool:
    """Return whether an array is a variable of a netCDF file: by what the library writes, or by its conventions."""
    if any(h5py.h5a.exists(array.id, name) for name in (b"_Netcdf4Dimid", b"_Netcdf4Coordinates", b"DIMENSION_LIST")):
        return True
    return _has_attribute(array, "_NCProperties") or _has_attribute(array, "Conventions")


def _has_attribute(array: Any, name: str) -> bool:
    """Return whether the root of an array's file has an attribute."""
    return bool(h5py.h5a.exists(h5py.h5o.open(h5py.h5i.get_file_id(array.id), b"/"), name.encode()))


def _attribute(array: Any, name: str) -> npt.NDArray[Any] | str | None:
    """Return the numbers of an attribute, flat; text that describes another value; None if it is missing or empty."""
    if not h5py.h5a.exists(array.id, name.encode()):
        return None
    attribute = h5py.h5a.open(array.id, name.encode())
    kind, space = attribute.get_type(), attribute.get_space()
    n_values = space.get_simple_extent_npoints() if space.get_simple_extent_type() != h5py.h5s.NULL else 0
    if not n_values:
        return None
    is_text = kind.get_class() == h5py.h5t.STRING
    if not is_text and kind.get_class() not in (h5py.h5t.INTEGER, h5py.h5t.FLOAT):
        return "neither numbers nor text"
    if n_values > MAX_VALUES or (is_text and n_values > 1):
        return f"{n_values:,} values"
    if is_text:
        found = array.attrs[name]
        text = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
        return repr(shown(text.rstrip("\0 ")))
    try:
        values = np.empty(attribute.shape, attribute.dtype)
    except (TypeError, ValueError):
        return "a number format that NumPy does not have"
    attribute.read(values)
    return np.atleast_1d(values.astype(values.dtype.newbyteorder("="))).reshape(-1)


def _number(value: npt.NDArray[Any] | str | None, neutral: float) -> Any:
    """Return the number of an attribute; the neutral one without it, and None if it is not one number."""
    if value is None:
        return neutral
    is_one = isinstance(value, np.ndarray) and value.size == 1 and math.isfinite(value[0])
    return value[0] if is_one else None


def _values(value: npt.NDArray[Any] | str | None) -> list[Any]:
    return list(value) if isinstance(value, np.ndarray) else []


def _whole(value: Any, element: np.dtype[Any], *, is_reseen: bool) -> int | None:
    """Return the stored integer that equals a value of an attribute; None if no element can have it."""
    if not math.isfinite(value) or value != int(value):
        return None
    limits, whole = np.iinfo(element), int(value)
    if is_reseen and not limits.min <= whole <= limits.max:  # given in the viewed dtype, not in the stored one
        span = 1 << limits.bits
        whole += span if whole < 0 else -span
    return whole if limits.min <= whole <= limits.max else None


def _yes_or_no(value: npt.NDArray[Any] | str | None, *, default: bool) -> bool | None:
    """Return the meaning of "true", "false" or a number; None for another value."""
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
