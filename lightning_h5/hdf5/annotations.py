"""What the numbers of an array mean, as its file says: their units, its dimensions, and the names along its axes."""

from __future__ import annotations

import hashlib
import math
import pickletools
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from ..errors import H5Error, H5KeyError, H5ValueError
from .contents import resolve_path, text_of
from .links import find_array
from .object_headers import SCALES, UNITS, units_at
from .open import FAULTS, is_in_other_file, translate_h5py_errors
from .open_file import OpenFile
from .sparse import names_of_variables, sparse_group
from .structures import SPARSE_PARTS

__all__ = ["Annotations", "AxisNames", "annotations_of", "names_at"]

MAX_NAMES = 1 << 22
"""Maximum number of names along an axis to read."""

MAX_COORDINATES = 1 << 12
"""Maximum number of coordinates along an axis to read: longer axes count rows."""

UNREADABLE = (*FAULTS, struct.error, IndexError, OverflowError)
"""Exceptions for bytes that only the library reads."""

PLACES = re.compile("(grid_?)?(lat(itude)?|lon(gitude)?|x|y|xc|yc|time|date|t|valid_time|easting|northing)", re.I)
"""Names of coordinates that differ between tiles of a map, and between periods."""

PLACE_UNITS = re.compile(r"degrees?_?(north|east|n|e)\b|.* since ", re.I)

MADE_UP = "This is a netCDF dimension but not a netCDF variable"

WORDS = {"STRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING"}
WORDS |= {"INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINBYTES", "BINBYTES"}
"""Operations of a pickle that hold a name. It is listed, and never loaded: a pickle can run code."""


class AxisNames(NamedTuple):
    """The names, or coordinates, along one axis of an array.

    Attributes:
        axis: the axis.
        source: the array that holds them, or an attribute (``array@name``).
        digest: of the values.
        content: of the values in any order; empty for names.
        are_names: whether other values are other things, as other genes are; coordinates may differ between files.
        varies: whether they are coordinates of places or times, which are usually different in each file.
        ascends: whether coordinates ascend; None for others.
    """

    axis: int
    source: str
    digest: str
    content: str = ""
    are_names: bool = True
    varies: bool = False
    ascends: bool | None = None


class Annotations(NamedTuple):
    """What a file says about the numbers of an array.

    Attributes:
        key: the array, or the group that is a sparse matrix.
        n_axes: number of its axes, if it has dimensions; otherwise 2.
        units: units of its values; None if they are unknown.
        dimensions: names of its axes; none if they are unknown.
        names: names along some of its axes.
    """

    key: str
    n_axes: int
    units: str | None = None
    dimensions: tuple[str, ...] = ()
    names: tuple[AxisNames, ...] = ()


class _Scale(NamedTuple):
    """A dimension scale: its name, and the coordinates that it has."""

    name: str
    names: AxisNames | None


def annotations_of(
    file: OpenFile, key: str, *, may_have_attributes: bool = True, with_scales: bool = True
) -> Annotations | None:
    """Return what an open file says about an array; None if that is nothing. The names along its axes are read.

    Args:
        file: the open file.
        key: the array.
        may_have_attributes: whether the array may have units or dimensions (see ``ArrayLayout.is_annotated``).
        with_scales: whether attached dimension scales are looked at, for which a file is opened through the library.

    Raises:
        H5CorruptError: the names along an axis are damaged.
    """
    key = key.strip("/")
    owner, names = key, None
    if (source := _source_of_names(file, key)) is not None:
        owner, axis, name = source
        with suppress(H5KeyError, H5ValueError):  # not an array of names
            names = AxisNames(axis, name, _digest_of_names(names_at(file.h5, name)))
    named = () if names is None else (names,)
    array = None
    if may_have_attributes:
        parts = [part.encode(errors="surrogateescape") for part in key.split("/")]
        with suppress(*UNREADABLE):
            if file.places is not None and file.headers is not None:
                address = file.places.address_of(parts)
                units = None if address is None else _stripped(units_at(file.headers, address, with_scales=with_scales))
                return Annotations(owner, 2, units, (), named) if units or named else None
        array = _array_at(file, key)
    if array is None:
        return Annotations(owner, 2, names=named) if named else None
    scales, n_axes = list[tuple[int, Any]](), len(array.shape)
    units = None
    with suppress(*FAULTS):  # attributes of another form
        units = next((text for name in UNITS if (text := _text_of_attribute(array, name))), None)
    with suppress(*FAULTS):
        if with_scales and h5py.h5a.exists(array.id, SCALES):
            group = array.name.rpartition("/")[0]
            scales = [(axis, _scale_at(file, scale, group)) for axis in range(n_axes) for scale in _scales(array, axis)]
    found = {axis: scale.name for axis, scale in scales}
    dimensions = tuple(found.get(axis, "") for axis in range(n_axes)) if found else ()
    along = [scale.names._replace(axis=axis) for axis, scale in scales if scale.names is not None]
    annotations = Annotations(owner, n_axes, units, dimensions, (*named, *along))
    return annotations if units or dimensions or annotations.names else None


def names_at(file: Any, source: str) -> npt.NDArray[Any]:
    """Return the names, or coordinates, along an axis: text as ``str``, or numbers.

    Args:
        file: the open file.
        source: see ``AxisNames.source``.

    Raises:
        H5Error: they cannot be read.
    """
    with translate_h5py_errors(file.filename, repr(source)):
        name, _, attribute = source.partition("@")
        if attribute:
            array, _ = resolve_path(file, name, allow_external=False)
            return np.array(_words_of_pickle(array.attrs.get(attribute)), dtype=object)
        handle = find_array(file, name)
        if math.prod(handle.array.shape) > MAX_NAMES:
            raise H5ValueError(f"{source!r} has more than {MAX_NAMES:,} names.")
        values = handle.array[()]
        for member in handle.members:
            values = values[member]
    values = np.ravel(values)
    if values.dtype.kind not in "OSU":
        return values
    return _texts(values)


def _texts(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    texts = [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values.tolist()]
    return np.array(texts, dtype=object)


# Names ------------------------------------------------------------------------------------------------------------


def _source_of_names(file: OpenFile, key: str) -> tuple[str, int, str] | None:
    """Return the array or matrix that has names along an axis, this axis, and where the names are."""
    group, _, last = key.rpartition("/")
    outer, _, folder = group.rpartition("/")
    if (block := re.fullmatch(r"block(\d+)_values", last)) is not None:  # pandas, in the fixed format
        items = f"{group}/block{block[1]}_items".strip("/")
        return (key, 1, items) if _exists(file, items) else None
    if last.startswith("values_block_") and folder == "table":  # pandas, in the table format
        return key, 1, f"{group}@{last}_kind"
    if group and last in {columns for _, columns, _ in SPARSE_PARTS}:
        with suppress(H5Error):  # raised again where its rows are described
            matrix = sparse_group(file.h5, file.path, group)
            return None if matrix is None or matrix.names is None else (group, 1, matrix.names)
        return None
    root = outer if folder == "layers" else group
    if (last == "X" or folder == "layers") and _exists(file, f"{root}/var".strip("/")):  # AnnData
        names = names_of_variables(file.h5, key)
        return None if names is None else (key, 1, names)
    if key == "matrix" or group == "layers":  # loom
        genes = (f"row_attrs/{name}" for name in ("Gene", "Accession", "var_names"))
        return next(((key, 0, name) for name in genes if _exists(file, name)), None)
    return None


def _exists(file: OpenFile, name: str) -> bool:
    """Return whether a file has an object, without opening it."""
    if file.places is not None:
        with suppress(*UNREADABLE):
            return file.places.address_of([part.encode() for part in name.split("/")]) is not None
    with suppress(*FAULTS):
        return name in file.h5
    return False


def _words_of_pickle(value: Any) -> list[Any]:
    """Return the names in a pickled list, without loading it; what is stored if it has none."""
    stored = bytes(value) if isinstance(value, bytes) else str(value).encode(errors="replace")
    words = list[Any]()
    with suppress(ValueError):  # not a pickle
        words = [str(argument) for code, argument, _ in pickletools.genops(stored) if code.name in WORDS]
    return words or [stored.decode(errors="replace")]


def _digest_of_names(names: npt.NDArray[Any]) -> str:
    """Return a digest of names; numbers have that of their text."""
    return hashlib.blake2b("\0".join(map(str, names.tolist())).encode(errors="surrogatepass")).hexdigest()[:32]


# Units, dimensions and coordinates --------------------------------------------------------------------------------


def _array_at(file: OpenFile, key: str) -> Any:
    """Return h5py's dataset; None for members of tables, and for arrays in other files."""
    with suppress(H5Error, *FAULTS):
        array, members = resolve_path(file.h5, key, allow_external=False)
        if isinstance(array, h5py.Dataset) and not members and not is_in_other_file(file.h5, array):
            return array
    return None


def _text_of_attribute(item: Any, name: bytes) -> str | None:
    if not h5py.h5a.exists(item.id, name):
        return None
    value = item.attrs[name.decode()]
    value = value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return _stripped(text) if isinstance(text, str) else None


def _stripped(text: str | None) -> str | None:
    return None if text is None else text.partition("\0")[0].strip() or None


def _scales(array: Any, axis: int) -> Iterator[Any]:
    """Yield the first dimension scale of an axis, as h5py's low-level dataset."""
    if h5py.h5ds.get_num_scales(array.id, axis):
        found: list[Any] = []
        h5py.h5ds.iterate(array.id, axis, found.append, 0)
        yield from found[:1]


def _scale_at(file: OpenFile, scale: Any, group: str) -> _Scale:
    """Return a dimension scale of an array in a group; each is looked at once."""
    address = h5py.h5o.get_info(scale).addr
    if address not in file.scales:
        label = text_of(h5py.h5ds.get_scale_name(scale) or b"")
        is_made_up = label.startswith(MADE_UP)
        source = _name_of(file, scale, address, group, "" if is_made_up else label)
        file.scales[address] = found = _Scale(source.rpartition("/")[2], None)
        with suppress(H5Error, *FAULTS):
            file.scales[address] = found._replace(names=None if is_made_up else _coordinates(scale, source))
    known: _Scale = file.scales[address]
    return known


def _name_of(file: OpenFile, scale: Any, address: int, group: str, label: str) -> str:
    """Return the name of a dimension scale in its file: in the array's group or one above, as netCDF has it.

    The library would search all links of the file for it, which is the last resort.
    """
    while label:
        with suppress(*FAULTS):
            if h5py.h5o.get_info(file.h5.id, f"{group}/{label}".encode(errors="surrogateescape")).addr == address:
                return f"{group}/{label}".strip("/")
        if not group:
            break
        group = group.rpartition("/")[0]
    return text_of(h5py.h5i.get_name(scale) or b"").strip("/")


def _coordinates(scale: Any, source: str) -> AxisNames | None:
    """Return the coordinates that a dimension scale has; None if it has none, or very many."""
    item = h5py.Dataset(scale)
    if not source or len(item.shape) != 1 or item.shape[0] > MAX_COORDINATES:
        return None
    values = item[()]
    if values.dtype.kind in "OS":
        values = _texts(values)
    if values.dtype.kind not in "biufO":
        return None
    name, units = source.rpartition("/")[2], _text_of_attribute(item, UNITS[0]) or ""
    is_number = values.dtype.kind != "O"
    order = np.sort(values) if is_number else np.array(sorted(values), dtype=object)
    ascends = bool(np.median(np.sign(np.diff(values.astype("f8")))) > 0) if is_number and len(values) > 1 else None
    has_axis = (_text_of_attribute(item, b"axis") or "").upper() in ("X", "Y", "T")
    varies = has_axis or bool(PLACES.fullmatch(name) or PLACE_UNITS.match(units))
    return AxisNames(0, source, _digest_of(values), _digest_of(order), are_names=False, varies=varies, ascends=ascends)


def _digest_of(values: npt.NDArray[Any]) -> str:
    """Return a digest of coordinates; numbers that are equal in single precision have the same one."""
    if values.dtype.kind == "O":
        return _digest_of_names(values)
    with np.errstate(over="ignore"):
        return hashlib.blake2b(values.astype("<f4").tobytes()).hexdigest()[:32]
