"""Packed numbers: the attributes that declare how to decode them, by the conventions of several formats."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError, listing, shown

__all__ = [
    "ATTRIBUTES",
    "FORMATS",
    "MARKERS",
    "NULLABLE",
    "OUTSIDE",
    "Packing",
    "file_format",
    "has_packing_outside",
    "is_of_netcdf",
    "packing_of",
]

_log = logging.getLogger(__name__)

SCALING = ("scale_factor", "add_offset")
NWB_SCALING = ("conversion", "offset")
MISSING = ("_FillValue", "missing_value")
UNSIGNED = "_Unsigned"
VALID = ("valid_range", "valid_min", "valid_max")

DEFAULT_FILLS: dict[str, float] = {
    "i2": -32767,
    "u2": 65535,
    "i4": -2147483647,
    "u4": 4294967295,
    "i8": -9223372036854775806,
    "u8": 18446744073709551614,
    "f4": float(np.float32(9.969209968386869e36)),
    "f8": 9.969209968386869e36,
}
"""Values of netCDF variables that were never written and declare no ``_FillValue``. Bytes have none."""


class Names(NamedTuple):
    """Names of attributes that declare a scale outside of the netCDF conventions.

    Attributes:
        scale: the factor. Without it, the other attributes have no effect.
        offset: the number to add.
        missing: a stored value that stands for a missing value.
        is_sure: whether all software of this format computes ``x * scale + offset``.
    """

    scale: str
    offset: str
    missing: str | None
    is_sure: bool


OTHER_NAMES = (
    Names("ScaleFactor", "Offset", "MissingValue", is_sure=False),  # HDF-EOS5
    Names("Slope", "Offset", None, is_sure=True),  # JAXA
)

ODIM = ("gain", "offset", "nodata", "undetect")
"""Attributes of a group ``what`` of ODIM_H5, beside an array or above it."""

MINC = ("image-min", "image-max")
"""Arrays beside the ``image`` of MINC2: the decoded values at the ends of ``valid_range``."""

CHANNELS = "channel_conversion"
"""The array beside the ``data`` of NWB's electrical series: a factor of each channel, in addition to ``conversion``."""

NULLABLE = ("values", "mask")
"""Arrays of AnnData's columns with missing values: the mask is True for a missing one."""

OUTSIDE = {b"image": MINC, b"data": (CHANNELS,), b"values": NULLABLE[1:]}
"""Arrays that declare the meaning of an array beside them, by its name. They count if all of them exist."""

ATTRIBUTES = {
    name.encode()
    for name in (
        *SCALING,
        *NWB_SCALING,
        *MISSING,
        UNSIGNED,
        *VALID,
        *(n for names in OTHER_NAMES for n in names[:3] if n),
    )
}
"""The attributes of an array that declare the decoding of its numbers."""

FORMATS = (b"_NCProperties", b"nwb_version", b"Conventions")
"""The attributes of the root that say which format a file follows."""

MARKERS = {b"_Netcdf4Dimid", b"_Netcdf4Coordinates", b"DIMENSION_LIST"}
"""The attributes that the netCDF library writes to arrays."""

Policy = Literal["decode", "refuse", "keep", "stored", "guard"]
"""How packed numbers are loaded without a decoder or the stored dtype in the arguments."""

MAX_VALUES = 64
"""Maximum number of values of an attribute to read; a few may stand for missing values."""

MAX_SLICES = 1 << 20
"""Maximum number of limits of a MINC2 image to read; there is one per slice."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The decoding of an array's values, as declared by its attributes.

    Attributes:
        attributes: names and values of the attributes, as text.
        scale: factor of stored values.
        offset: number that is added to the product.
        missing: stored values that stand for missing values.
        dtype: dtype of decoded values.
        stored: dtype that stored values are viewed as, if it differs from the array's (``_Unsigned``).
        unclear: name of an attribute that cannot be interpreted, such as text; or None.
        policy: how stored values are loaded by default: "decoded" in netCDF files, "refused" for integers of other
            files, "kept" for floats of other files and numbers of NWB files ("stored" if the user requested the stored
            dtype), and "guarded" for integers of netCDF files without a scale or a declared missing value: they remain
            integers, and a missing value raises an error.
        fill: netCDF's default fill value, which also stands for a missing value; None if there is none.
        least: smallest valid value, in the dtype that values are viewed as; None without a limit.
        most: largest valid value, in the same dtype; None without a limit.
        cure: advice on decoding if an attribute is unclear; None for the general advice.
    """

    attributes: tuple[tuple[str, str], ...]
    scale: float = 1.0
    offset: float = 0.0
    missing: tuple[float, ...] = ()
    dtype: str = "float64"
    stored: str | None = None
    unclear: str | None = None
    policy: Policy = "refuse"
    # Not in a codec's text, a part of a file's identity: these fields follow from the attributes, or the dtype.
    fill: float | None = field(default=None, repr=False)
    least: float | None = field(default=None, repr=False)
    most: float | None = field(default=None, repr=False)
    cure: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.attributes]
        return ", ".join(parts or ([] if self.fill is None else [f"default fill value {_short(self.fill)}"]))

    @property
    def marks(self) -> tuple[float, ...]:
        """Stored values that stand for missing values, including netCDF's default."""
        return self.missing if self.fill is None or self.fill in self.missing else (*self.missing, self.fill)

    @property
    def has_limits(self) -> bool:
        """Whether values beyond a limit are missing."""
        return self.least is not None or self.most is not None

    @property
    def only_misses(self) -> bool:
        """Whether values are plain integers, apart from missing values."""
        return self.scale == 1 and self.offset == 0 and self.stored is None and self.unclear is None

    @property
    def is_implied(self) -> bool:
        """Whether stored values are used unchanged, apart from missing values without an attribute."""
        return self.only_misses and not self.missing

    def missing_as_stored(self, key: str) -> str | None:
        """Return a sentence if values that stand for missing ones are loaded like any other; otherwise None.

        Args:
            key: the array.
        """
        if self.policy != "keep" or not self.missing:
            return None
        return (
            f"{key!r} declares missing values ({self}), which are loaded as the numbers that are stored. Pass "
            f"decode={{{key!r}: 'cf'}} for NaN."
        )

    @property
    def identity(self) -> str:
        """The part of a file's identity that covers the packing."""
        return "" if self.is_implied else str(self)

    @property
    def formula(self) -> str:
        """How a value ``x`` is decoded, as text."""
        if self.unclear is not None:
            return f"as declared by {self.unclear}"
        parts = [] if self.stored is None else [f"x seen as {self.stored}"]
        values = dict(self.attributes)
        terms = "x"
        if self.scale != 1:
            factors = [_first_of(values, _SCALES) or f"{self.scale:.7g}", values.get(CHANNELS)]
            terms += "".join(f" * {factor}" for factor in factors if factor)
        if self.offset:
            offset = _first_of(values, _OFFSETS) or f"{self.offset:.7g}"
            terms += f" + {offset}" if self.offset > 0 else f" - {offset.lstrip('-')}"
        if terms != "x":
            parts.append(terms)
        if self.marks:
            parts.append(f"{' or '.join(map(_short, self.marks))} means missing")
        if self.has_limits:
            low, high = ("" if bound is None else f"{bound:.7g}" for bound in (self.least, self.most))
            parts.append(f"values beyond {low} to {high} are missing".replace("  ", " "))
        return "; ".join(parts)

    def check(self, key: str = "...") -> None:
        """Raise an ``H5ValueError`` if an attribute cannot be interpreted.

        Args:
            key: the array.
        """
        if self.unclear is not None:
            reason = f": the meaning of {self.unclear} is unknown" if self.cure is None else " by one formula"
            raise H5ValueError(f"{self} cannot be decoded{reason}. {self.how(key)}.")

    def how(self, key: str) -> str:
        """Return how to decode values with attributes that cannot be interpreted, without a full stop."""
        name = key if key == "..." else repr(key)
        cure = self.cure or "Pass decode={{name}: function}, with a function from a stored row to its values"
        return cure.replace("{name}", name)

    def guard(self, values: npt.NDArray[Any], key: str) -> None:
        """Check that no integer stands for a missing value, since integers have no NaN.

        Args:
            values: stored values.
            key: the array.

        Raises:
            H5ValueError: a value stands for a missing value.
        """
        if (missing := self.is_missing(values)).any():
            value, kind = values[missing][0], f"its {values.dtype} numbers"
            reason = "netCDF's default fill value" if value == self.fill else f"not valid ({self})"
            raise H5ValueError(
                f"{key!r} has a missing value: {value} is {reason}, and integers have no NaN. Pass decode={{{key!r}: "
                f"'cf'}} for floats with NaN, or the dtype {str(values.dtype)!r} by name to load {kind} as they are."
            )

    def limits(self, dtype: np.dtype[Any]) -> tuple[Any, Any]:
        """Return the smallest and largest valid value of the dtype that values are viewed as."""
        ends = (-math.inf, math.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        least, most = (
            end if bound is None else bound for bound, end in zip((self.least, self.most), ends, strict=True)
        )
        return least, most

    def is_missing(self, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return a mask of the stored values that stand for missing values."""
        missing: npt.NDArray[np.bool_] = np.isin(values, np.array(self.marks, values.dtype))
        if self.has_limits:
            numbers = values if self.stored is None else values.view(self.stored)
            least, most = self.limits(numbers.dtype)
            missing |= (numbers < least) | (numbers > most)
        return missing


_SCALES = (SCALING[0], NWB_SCALING[0], "what/gain", *(names.scale for names in OTHER_NAMES))
_OFFSETS = (SCALING[1], NWB_SCALING[1], "what/offset", *(names.offset for names in OTHER_NAMES))

Value = npt.NDArray[Any] | str
"""Numbers of an attribute, flat; or text that describes another value."""


class _Text(str):
    """Text of an attribute, quoted."""

    __slots__ = ()


def packing_of(array: Any, element: np.dtype[Any]) -> Packing | None:
    """Return the packing that the attributes of an array declare.

    Args:
        array: an h5py dataset.
        element: dtype of its elements, in native byte order.

    Returns:
        The packing; None if the array has no numbers, or the attributes have no effect.
    """
    if element.kind not in "iuf":
        return None
    form = file_format(array)
    if form == "ODIM":
        return _packing_of_odim(array, element)
    if (minc := _packing_of_minc(array, element)) is not None:
        return minc
    values: dict[str, Value] = {}
    if h5py.h5a.get_num_attrs(array.id):
        values = _declared_attributes(array, (*SCALING, *MISSING, *((UNSIGNED,) if element.kind != "f" else ())))
        _ignore_text(values, array)
    is_netcdf = form == "netCDF" or _is_variable(array)
    cure = None
    policy: Policy = "decode" if is_netcdf else "refuse" if element.kind != "f" else "keep"
    if not values and form == "NWB" and (values := _declared_attributes(array, NWB_SCALING[:1])):
        values |= _declared_attributes(array, NWB_SCALING[1:]) | _factors_of_channels(array)
        policy = "decode" if is_netcdf and element.kind == "f" else "keep"
    names = SCALING if not set(values) & set(NWB_SCALING) else NWB_SCALING
    if not set(values) & set(names) and (alternative := _by_other_names(array)) is not None:
        names, cure, other_values = alternative
        values = other_values | values
    fill = _default_fill(array, element) if is_netcdf and not isinstance(values.get(MISSING[0]), np.ndarray) else None
    if not values and fill is None and not is_netcdf:
        return None
    valid = _declared_attributes(array, VALID) if is_netcdf or values else {}
    attributes = tuple((name, _value_text(value)) for name, value in values.items())
    missing_names = [name for name in values if name not in (*names, CHANNELS, UNSIGNED)]
    unclear = next((name for name in (*names, *missing_names) if isinstance(values.get(name), str)), None)
    scale, offset = (_single_number(values.get(name), neutral) for name, neutral in zip(names, (1, 0), strict=True))
    unclear = unclear or next((n for n, v in zip(names, (scale, offset), strict=True) if v is None), None)
    if cure is not None and unclear is None and offset:
        unclear = names[1]
    if unclear is None and isinstance(values.get(CHANNELS), str):
        unclear = CHANNELS
        cure = (
            f"Each channel has a factor of its own: x * {scale:g} * {CHANNELS} + {offset:g}, with the factors in the "
            f"array {CHANNELS} beside it. Pass decode={{{{name}}: function}}, with a function from a stored row to "
            "these values"
        )
    elif unclear is None:
        scale *= _single_number(values.get(CHANNELS), 1)
    is_unsigned = _yes_or_no(values.get(UNSIGNED), default=element.kind == "u")
    if is_unsigned is None:
        unclear = unclear or UNSIGNED
    is_reseen = element.kind != "f" and is_unsigned is not None and is_unsigned != (element.kind == "u")
    stored = f"{'uint' if is_unsigned else 'int'}{8 * element.itemsize}" if is_reseen else None
    marks = [value for name in missing_names for value in _as_values(values.get(name))]
    missing = dict.fromkeys(mark for value in marks if (mark := _mark(value, element, is_reseen=is_reseen)) is not None)
    least, most = _limits(valid, element, stored)
    attributes += (
        tuple((name, _value_text(value)) for name, value in valid.items()) if (least, most) != (None, None) else ()
    )
    is_scaled = not set(values).isdisjoint(names)
    is_changed = unclear is not None or scale != 1 or offset != 0 or bool(missing) or stored is not None
    has_others = (fill is not None and stored is None) or (least, most) != (None, None)
    if not is_changed and not (is_netcdf and has_others) and (element.kind == "f" or not is_scaled):
        return None
    if element.kind != "f" and not is_changed:
        policy = "keep" if not is_netcdf else "decode" if is_scaled else "guard"
    numbers = [value for name in names if isinstance(value := values.get(name), np.ndarray)]
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
        fill=fill if stored is None else None,
        least=least,
        most=most,
        cure=cure,
    )


def file_format(array: Any) -> Literal["netCDF", "ODIM", "NWB"] | None:
    """Return the format that the file of an open array, or an open file, follows; None for plain HDF5."""
    root = h5py.h5o.open(h5py.h5i.get_file_id(array.id), b"/")
    if not h5py.h5a.get_num_attrs(root):
        return None
    netcdf, nwb, conventions = (h5py.h5a.exists(root, name) for name in FORMATS)
    if netcdf or nwb:
        return "netCDF" if netcdf else "NWB"
    if not conventions:
        return None
    value = _numbers_of_attribute(h5py.Group(root), "Conventions")
    return "ODIM" if isinstance(value, str) and value.strip("'\"").startswith("ODIM") else "netCDF"


def has_packing_outside(group: Any, name: bytes) -> bool:
    """Return whether the packing of an array, in an open low-level group, is declared outside of its header."""
    if name not in OUTSIDE:
        return False
    try:
        return all(_is_array(group, other.encode()) for other in OUTSIDE[name])
    except (KeyError, ValueError, RuntimeError):
        return False


def _is_array(group: Any, name: bytes) -> bool:
    """Return whether a group has an array of this name, and no link to it."""
    return bool(h5py.h5g.get_objinfo(group, name, follow_link=False).type == h5py.h5g.DATASET)


def is_of_netcdf(array: Any) -> bool:
    """Return whether an array is a variable of a file that the netCDF library, or one for its format, has written."""
    return h5py.h5a.exists(array.id, b"_Netcdf4Dimid") or file_format(array) == "netCDF"


def _is_variable(array: Any) -> bool:
    """Return whether an array is a variable of a netCDF file, by the attributes that the library writes."""
    return any(h5py.h5a.exists(array.id, name) for name in MARKERS)


def _declared_attributes(item: Any, names: tuple[str, ...]) -> dict[str, Value]:
    """Return the values of the named attributes that an object has."""
    values = {name: _numbers_of_attribute(item, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _ignore_text(values: dict[str, Value], array: Any) -> None:
    """Remove missing values that are declared as text, which no number equals, with one log message."""
    for name in MISSING:
        if isinstance(value := values.get(name), _Text):
            _packing_note(f"{name}={value} of {str(array.name)!r} is text, which no number equals, and is ignored")
            del values[name]


@lru_cache(1000)
def _packing_note(text: str) -> None:
    _log.warning("%s", text)


def _by_other_names(array: Any) -> tuple[tuple[str, str], str | None, dict[str, Value]] | None:
    """Return a scale outside of netCDF's conventions: its names, advice if it is unclear, and all attributes."""
    for names in OTHER_NAMES:
        values = _declared_attributes(array, (names.scale, names.offset, *((names.missing,) if names.missing else ())))
        scale, offset = (
            _single_number(values.get(name), neutral) for name, neutral in ((names.scale, 1), (names.offset, 0))
        )
        if names.scale not in values or (names.is_sure and names.offset not in values) or (scale == 1 and offset == 0):
            continue
        cure = None
        if not names.is_sure and scale is not None and offset:
            cure = (
                f"Such files mean x * {scale:g} + {offset:g} or (x - {offset:g}) * {scale:g}; see the documentation of "
                f"the product. Pass decode={{{{name}}: lambda x: x * {scale:g} + {offset:g}}}, or the other formula"
            )
        return (names.scale, names.offset), cure, values
    return None


def _default_fill(array: Any, element: np.dtype[Any]) -> float | None:
    """Return netCDF's fill value of elements that were never written; None if the array has none."""
    fill = DEFAULT_FILLS.get(f"{element.kind}{element.itemsize}")
    if fill is None or h5py.check_enum_dtype(array.dtype) is not None:
        return None
    return None if array.id.get_create_plist().get_fill_time() == h5py.h5d.FILL_TIME_NEVER else fill


def _limits(valid: dict[str, Value], element: np.dtype[Any], stored: str | None) -> tuple[Any, Any]:
    """Return the smallest and largest valid value, as the netCDF4 library reads them; None for no limit."""
    ends = {name: _as_values(value) for name, value in valid.items()}
    pair = [_exact(value, element, stored) for value in ends.get(VALID[0], ())]
    if len(pair) == 2 and None not in pair:
        return pair[0], pair[1]
    least, most = (ends.get(name, []) for name in VALID[1:])
    low, high = (_exact(numbers[0], element, stored) if len(numbers) == 1 else None for numbers in (least, most))
    return low, high


def _exact(value: Any, element: np.dtype[Any], stored: str | None) -> Any:
    """Return a limit in the dtype that values are viewed as; None if no element equals it."""
    if element.kind == "f":
        with np.errstate(all="ignore"):
            return float(value) if element.type(value) == value else None
    integer = _stored_integer(value, element, is_reseen=stored is not None)
    if integer is None or stored is None:
        return integer
    return int(np.array(integer, element).view(stored))


def _factors_of_channels(array: Any) -> dict[str, Value]:
    """Return the factors of channels beside an array of NWB; one number if they are equal, and nothing if all are 1."""
    group_name, _, name = str(array.name).rpartition("/")
    parent = _child(array, group_name or "/")
    if name.encode(errors="replace") not in OUTSIDE or parent is None or not has_packing_outside(parent.id, b"data"):
        return {}
    factors = parent[CHANNELS]
    if factors.size > MAX_SLICES or factors.dtype.kind not in "iuf":
        return {CHANNELS: f"{factors.size:,} values of {factors.dtype}"}
    numbers = np.unique(factors[...])
    if numbers.size > 1 or not np.isfinite(numbers).all():
        return {CHANNELS: f"{factors.size:,} values"}
    return {CHANNELS: numbers} if (numbers != 1).any() else {}


def _packing_of_odim(array: Any, element: np.dtype[Any]) -> Packing | None:
    """Return the packing of an array in ODIM_H5, from the group ``what`` beside it or on a level above."""
    values: dict[str, Value] = {}
    group_name = str(array.name).rpartition("/")[0]
    while True:
        group = _child(array, f"{group_name}/what")
        for name, value in ({} if group is None else _declared_attributes(group, ODIM)).items():
            values.setdefault(name, value)
        if not group_name:
            break
        group_name = group_name.rpartition("/")[0]
    if "gain" not in values:
        return None
    scale, offset = (_single_number(values.get(name), neutral) for name, neutral in (("gain", 1), ("offset", 0)))
    marks = [_mark(value, element, is_reseen=False) for name in ODIM[2:] for value in _as_values(values.get(name))]
    missing = tuple(dict.fromkeys(mark for mark in marks if mark is not None))
    unclear = next((f"what/{name}" for name in ODIM if isinstance(values.get(name), str)), None)
    unclear = unclear or ("what/gain" if scale is None else "what/offset" if offset is None else None)
    if scale == 1 and offset == 0 and not missing:
        return None
    return Packing(
        attributes=tuple((f"what/{name}", _value_text(values[name])) for name in ODIM if name in values),
        scale=1.0 if scale is None else float(scale),
        offset=0.0 if offset is None else float(offset),
        missing=missing,
        unclear=unclear,
        policy="keep" if element.kind == "f" else "refuse",
    )


def _packing_of_minc(array: Any, element: np.dtype[Any]) -> Packing | None:
    """Return the packing of the array ``image`` in MINC2: the ends of its valid range map to two values per slice."""
    group_name, _, name = str(array.name).rpartition("/")
    parent = _child(array, group_name or "/")
    if element.kind == "f" or name != "image" or parent is None or not has_packing_outside(parent.id, b"image"):
        return None
    if any(parent[limit_name].size > MAX_SLICES or parent[limit_name].dtype.kind not in "iuf" for limit_name in MINC):
        raise ValueError(f"{listing(MINC)} have more than {MAX_SLICES:,} values, or values that are no numbers")
    low, high = ((parent[limit_name].shape, np.unique(parent[limit_name][...])) for limit_name in MINC)
    limits = np.iinfo(element)
    valid_range = _as_values(_declared_attributes(array, VALID).get(VALID[0]))
    least, most = sorted(map(float, valid_range)) if len(valid_range) == 2 else (float(limits.min), float(limits.max))
    attributes = [(VALID[0], f"[{least:g}, {most:g}]")]
    if len(low[1]) == len(high[1]) == 1 and most > least:
        low_value, high_value = float(low[1][0]), float(high[1][0])
        scale = (high_value - low_value) / (most - least)
        offset = low_value - least * scale
        if scale == 1 and offset == 0:
            return None
        attributes += [(MINC[0], f"{low_value:g}"), (MINC[1], f"{high_value:g}")]
        bounds = (int(least) if least > limits.min else None, int(most) if most < limits.max else None)
        return Packing(attributes=tuple(attributes), scale=scale, offset=offset, least=bounds[0], most=bounds[1])
    attributes += [
        (limit_name, f"{shape[0] if shape else 0} values")
        for limit_name, (shape, _) in zip(MINC, (low, high), strict=True)
    ]
    cure = (
        f"Each slice has a scale of its own: (x - {least:g}) / {most - least:g} * (image-max - image-min) + image-min. "
        "Load image-min and image-max as well, and compute the values in a transform"
    )
    return Packing(attributes=tuple(attributes), unclear=MINC[0], cure=cure)


def _child(array: Any, path: str) -> Any:
    """Return a group of the file of an open array, to which no links lead; None if there is none."""
    item = h5py.h5o.open(h5py.h5i.get_file_id(array.id), b"/")
    try:
        for part in path.encode(errors="surrogateescape").split(b"/"):
            if part:
                if h5py.h5g.get_objinfo(item, part, follow_link=False).type != h5py.h5g.GROUP:
                    return None
                item = h5py.h5g.open(item, part)
    except (KeyError, ValueError, RuntimeError):
        return None
    return h5py.Group(item)


def _numbers_of_attribute(array: Any, name: str) -> Value | None:
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
        value = array.attrs[name]
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        return _Text(repr(shown(text.rstrip("\0 "))))
    try:
        values = np.empty(attribute.shape, attribute.dtype)
    except (TypeError, ValueError):
        return "a number format that NumPy does not have"
    attribute.read(values)
    return np.atleast_1d(values.astype(values.dtype.newbyteorder("="))).reshape(-1)


def _single_number(value: Value | None, neutral: float) -> Any:
    """Return the number of an attribute; the neutral one without it, and None if it is not one number."""
    if value is None:
        return neutral
    is_single = isinstance(value, np.ndarray) and value.size == 1 and math.isfinite(value[0])
    return value[0] if is_single else None


def _as_values(value: Value | None) -> list[Any]:
    return list(value) if isinstance(value, np.ndarray) else []


def _mark(value: Any, element: np.dtype[Any], *, is_reseen: bool) -> float | None:
    """Return a missing value as stored; None if no element can have this value, or for NaN, which needs no decoding."""
    if element.kind != "f":
        return _stored_integer(value, element, is_reseen=is_reseen)
    return None if math.isnan(value) else float(element.type(value))


def _stored_integer(value: Any, element: np.dtype[Any], *, is_reseen: bool) -> int | None:
    """Return the stored integer that equals a value of an attribute; None if no element can have it."""
    if not math.isfinite(value) or value != int(value):
        return None
    limits, integer = np.iinfo(element), int(value)
    if is_reseen and not limits.min <= integer <= limits.max:  # declared in the viewed dtype, not in the stored one
        span = 1 << limits.bits
        integer += span if integer < 0 else -span
    return integer if limits.min <= integer <= limits.max else None


def _yes_or_no(value: Value | None, *, default: bool) -> bool | None:
    """Return the meaning of "true", "false" or a number; None for another value."""
    if value is None:
        return default
    if isinstance(value, str):
        return {"'true'": True, "'false'": False}.get(value.casefold())
    return bool(value.any())


def _first_of(values: dict[str, str], names: tuple[str, ...]) -> str | None:
    return next((values[name] for name in names if name in values), None)


def _short(number: float) -> str:
    return f"{number:.7g}" if not isinstance(number, int) and abs(number) > 1e15 else str(number)


def _value_text(value: Value) -> str:
    if isinstance(value, str):
        return value
    return str(value[0]) if value.size == 1 else str([number.item() for number in value])
