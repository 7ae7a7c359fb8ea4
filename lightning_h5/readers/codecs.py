"""Codecs: convert stored rows to values of another dtype or shape, the same for all rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import H5CorruptError, H5KeyError, H5ValueError, listing, near
from ..hdf5 import ArrayLayout, Codec, Packing, StackedKeys, enum_names, kind_of
from ..jit import compiled
from ..options import value_of_field
from ..types import IntArray
from .row_codecs import Function, Image

__all__ = [
    "Bits",
    "ClassNumbers",
    "Conventions",
    "Decode",
    "DecodeRequest",
    "MatrixRows",
    "MoveLast",
    "RealParts",
    "Recode",
    "Stack",
    "Unpack",
    "UnpackLoops",
    "Widen",
    "codecs_of",
    "unpack_loops",
    "unpacked",
]

FIRST = np.zeros(1, np.int64)

SEVERAL = 2
"""The compiled loop for several missing values, or limits of valid ones."""

PIECE = 1 << 14
"""Count of numbers that NumPy decodes at a time; they fit the cache of one core."""

EXACT_IN_FLOAT64 = 1 << 53

DECODERS = ("category", "cf", "image", "real", "bits:8", "dense", "csr")

UnpackLoops: TypeAlias = tuple[Any, Any, Any]
"""The compiled loops of ``Unpack``: without a missing value, with one, and with several or limits."""

Decode: TypeAlias = Mapping[str, Any]
"""The decoder of each field (see ``codec_of``), by its name, array or pattern."""


@dataclass(frozen=True)
class Conventions:
    """A request to decode arrays by their CF attributes. Arrays without such attributes are returned as stored."""


@dataclass(frozen=True)
class MatrixRows:
    """A request for rows of a sparse matrix, which is stored as several arrays.

    Args:
        as_csr: return batches in CSR form; otherwise dense.
    """

    as_csr: bool

    def refusal(self, array: ArrayLayout) -> H5ValueError:
        """Return the error for an array that is not a sparse matrix."""
        return _not_decodable(array, "csr" if self.as_csr else "dense", "sparse matrices: groups with 'indptr'")


@dataclass(frozen=True)
class ClassNumbers:
    """A request for text as class numbers, which depend on the text of all files (see ``Categories``).

    Args:
        key: array that defines the classes, if its name differs between splits; None for the array itself.
    """

    key: str | None = None

    def check(self, array: ArrayLayout) -> None:
        """Raise an ``H5ValueError`` for an array without text. Codes of categories are class numbers already."""
        has_names = array.categories is not None or enum_names(array.stored, array.members) is not None
        if kind_of(array.dtype) != "text" and not has_names:
            raise _not_decodable(array, "category", "text, or the names of an enum")


DecodeRequest: TypeAlias = Codec | Conventions | MatrixRows | ClassNumbers
"""A parsed entry of ``decode``: a codec, or a request that depends on the files of the field."""


@dataclass(frozen=True)
class RealParts(Codec):
    """Complex numbers as pairs of a real and an imaginary part, on a new last axis.

    They are stored as numbers of HDF5, as h5py writes them (members "r" and "i"), or in a compound of two floats of one
    dtype, such as the members "real" and "imag" of MATLAB.
    """

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        if array.dtype.kind == "c":
            return np.dtype(f"f{array.dtype.itemsize // 2}"), (*array.row_shape, 2)
        members = _parts_of_complex(array.dtype)
        dtypes = {array.dtype[name] for name in members}
        if len(dtypes) != 1 or (dtype := dtypes.pop()).kind != "f" or dtype.shape:
            raise _not_decodable(array, "real", "complex numbers, or compounds of 'real' and 'imag'")
        return dtype, (*array.row_shape, 2)

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See ``Codec.decode``."""
        if rows.dtype.kind == "c":
            out[...] = np.ascontiguousarray(rows).reshape(*rows.shape, 1).view(out.dtype)
            return
        for at, name in enumerate(_parts_of_complex(rows.dtype)):
            out[..., at] = rows[name]


def _parts_of_complex(dtype: np.dtype[Any]) -> list[str]:
    """Return the members with the real and the imaginary part, in this order; none if it has other members."""
    names = {name.casefold(): name for name in dtype.names or ()}
    pairs = (("real", "imag"), ("re", "im"), ("r", "i"))
    return next(([names[part] for part in pair] for pair in pairs if set(names) == set(pair)), [])


@dataclass(frozen=True)
class Bits(Codec):
    """Packed bits, the first in the highest bit of a byte, as one ``uint8`` each.

    Args:
        n_bits: number of bits of a row; all further bits are padding.
    """

    n_bits: int

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        if array.dtype != np.uint8 or not array.row_shape:
            raise _not_decodable(array, f"bits:{self.n_bits}", "rows of bytes (uint8)")
        if self.n_bits > 8 * array.row_shape[-1]:
            raise H5ValueError(
                f"decode='bits:{self.n_bits}' was given for {array.key!r} in {array.path!r}, whose rows of the shape "
                f"{array.row_shape} have {8 * array.row_shape[-1]} bits. Pass as many, or fewer."
            )
        return array.dtype, (*array.row_shape[:-1], self.n_bits)

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See ``Codec.decode``."""
        out[...] = np.unpackbits(rows, axis=-1, count=self.n_bits)


@dataclass(frozen=True)
class Recode(Codec):
    """Map codes of categories to other codes; missing values stay -1.

    Args:
        codes: the new code for each code of the file.
    """

    codes: tuple[int, ...]

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        if array.dtype.kind not in "iu":
            raise H5ValueError(f"{array.key!r} in {array.path!r} has codes of {array.dtype}. Write integers.")
        return np.dtype(np.int64), array.row_shape

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See ``Codec.decode``."""
        self.check(rows)
        out[...] = np.array([*self.codes, -1])[rows]  # -1 is the last

    def check(self, codes: npt.NDArray[Any], array: ArrayLayout | None = None) -> None:
        """Raise an ``H5CorruptError`` if a code has no category."""
        if codes.size and not -1 <= codes.min() <= codes.max() < len(self.codes):
            name = "a categorical column" if array is None else f"{array.key!r} in {array.path!r}"
            raise H5CorruptError(
                f"{name} has codes from {codes.min()} to {codes.max()}, and {len(self.codes)} categories. The file is "
                "damaged there; copy or write it again."
            )


@dataclass(frozen=True)
class Widen(Codec):
    """Convert integers to int64, for files that store them in several sizes."""

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        if array.dtype.kind not in "iu":
            raise H5ValueError(f"{array.key!r} in {array.path!r} has values of {array.dtype}. Write integers.")
        return np.dtype(np.int64), array.row_shape

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See ``Codec.decode``. Numbers from 2**63 on would become negative; columns do not contain them."""
        out[...] = rows.astype(np.int64)


@dataclass(frozen=True)
class Stack(Codec):
    """Stack members of a table, or arrays of a group, along a new axis in float32. Table rows are decoded once.

    Args:
        members: names of the members, in the order of the new axis.
        axis: position of the new axis in a row; None for the last one.
        of_each: codec of each array of a group; None for stored values, and for members of a table.
    """

    members: tuple[str, ...]
    axis: int | None = None
    of_each: DecodeRequest | None = None

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        names = array.dtype.names
        if names is None or array.members:
            raise H5ValueError(
                f"{[f'{array.key}/{name}' for name in self.members]} were named as one field, but {array.key!r} in "
                f"{array.path!r} is neither a table nor a group, but an array of {array.dtype}. Name members of a "
                "table, or arrays."
            )
        if self.of_each is not None:
            raise H5ValueError(
                f"{[f'{array.key}/{name}' for name in self.members]} are members of a table, but decode applies to "
                "arrays. Leave the field out of decode."
            )
        if absent_names := [name for name in self.members if name not in names]:
            raise H5KeyError(
                f"{array.key!r} in {array.path!r} has no {listing(absent_names)}; its members are {listing(names)}."
                f"{near(absent_names[0], names)} Name some of these."
            )
        if wrong_names := [
            name for name in self.members if array.dtype[name].shape or array.dtype[name].kind not in "biuf"
        ]:
            raise H5ValueError(
                f"{listing(wrong_names)} of {array.key!r} in {array.path!r} are {array.dtype[wrong_names[0]]}, but "
                "only single real numbers can be stacked. Leave them out, or name them as separate fields."
            )
        return np.dtype(np.float32), with_axis(array, array.row_shape, len(self.members), self.axis)

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See ``Codec.decode``."""
        with np.errstate(all="ignore"):  # numbers too large for float32 become infinite
            stacked = out if self.axis is None else np.moveaxis(out, 1 + self.axis, -1)
            for at, member in enumerate(self.members):
                stacked[..., at] = rows[member]


@dataclass(frozen=True)
class MoveLast(Codec):
    """Move the last axis of a row to another position.

    Args:
        axis: the new position.
    """

    axis: int

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        return array.dtype, with_axis(array, array.row_shape[:-1], array.row_shape[-1], self.axis)

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See ``Codec.decode``."""
        out[...] = np.moveaxis(rows, -1, 1 + self.axis)


def with_axis(array: ArrayLayout, row_shape: tuple[int, ...], n: int, axis: int | None) -> tuple[int, ...]:
    """Return the shape of a row with a new axis.

    Args:
        array: the array, for messages.
        row_shape: the shape without the new axis.
        n: length of the new axis.
        axis: position of the new axis; None for the last one.

    Raises:
        H5ValueError: a row has fewer axes than ``axis``.
    """
    axis = len(row_shape) if axis is None else axis
    if axis > len(row_shape):
        raise H5ValueError(
            f"rows of {array.key!r} in {array.path!r} are stacked along the new axis {axis}, but a row has the shape "
            f"{row_shape}. Pass an axis from 0 to {len(row_shape)}, or leave it out for the last one."
        )
    return *row_shape[:axis], n, *row_shape[axis:]


@dataclass(frozen=True)
class Unpack(Codec):
    """Decode packed numbers to floats, with NaN for missing values; computed in float64, and rounded once.

    Integers of up to 16 bits become float32, floats keep their dtype, and all others become float64.

    Args:
        packing: the declarations of the attributes.
        is_compiled: whether to decode with Numba, in one pass.
    """

    packing: Packing
    is_compiled: bool = False

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        self.packing.check(array.key)
        if array.dtype.kind == "f":
            return array.dtype, array.row_shape
        return np.dtype(np.float32 if array.dtype.itemsize <= 2 else np.float64), array.row_shape

    @property
    def identity(self) -> str:
        """See ``Codec.identity``."""
        return "" if self.packing.is_implied else repr(self)

    def compiled(self) -> Unpack:
        """Return an equal codec that runs compiled code, if that is possible."""
        return replace(self, is_compiled=unpack_loops() is not None)

    def take(
        self,
        loops: UnpackLoops,
        rows: npt.NDArray[Any],
        places: IntArray,
        out: npt.NDArray[Any],
        targets: IntArray,
    ) -> None:
        """Decode some rows with Numba, in one pass.

        Args:
            loops: see ``unpack_loops``.
            rows: stored rows, in one piece.
            places: numbers of the rows to decode; not checked.
            out: memory for decoded rows, in one piece.
            targets: positions of the decoded rows in ``out``; not checked.
        """
        packing = self.packing
        rows, missing = self.seen(rows)
        source, destination = (array.reshape(len(array), -1) for array in (rows, out))
        loops[self.loop](source, places, missing, packing.scale, packing.offset, destination, targets)

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See ``Codec.decode``."""
        loops = unpack_loops() if self.is_compiled and rows.flags.c_contiguous and out.flags.c_contiguous else None
        if loops is not None:
            self.take(loops, rows[None], FIRST, out[None], FIRST)  # as one row
            return
        packing = self.packing
        rows, missing = self.seen(rows)
        step = max(1, PIECE // max(1, math.prod(rows.shape[1:])))
        for start in range(0, len(rows), step):
            stored = rows[start : start + step]
            values = stored.astype(np.float64)
            with np.errstate(all="ignore"):  # stored floats may be infinite
                values *= packing.scale
                values += packing.offset
                for mark in missing if self.loop < SEVERAL else missing[2:]:
                    values[stored == mark] = np.nan
                if self.loop == SEVERAL:
                    values[(stored < missing[0]) | (stored > missing[1])] = np.nan
                out[start : start + step] = values

    @property
    def loop(self) -> int:
        """Number of the loop: 0 or 1 for that many missing values, ``SEVERAL`` for more, or for limits."""
        n_missing = len(self.packing.marks)
        return SEVERAL if n_missing > 1 or self.packing.has_limits else n_missing

    def seen(self, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return stored rows and missing values in the dtype that the attributes declare.

        The missing values are preceded by the smallest and the largest valid value, if ``loop`` is ``SEVERAL``.
        """
        packing, missing = self.packing, np.array(self.packing.marks, rows.dtype)
        if packing.stored is not None:
            rows, missing = rows.view(packing.stored), missing.view(packing.stored)
        if self.loop == SEVERAL:
            missing = np.concatenate([np.array(packing.limits(rows.dtype), rows.dtype), missing])
        return rows, missing


def unpacked(values: npt.NDArray[Any], packing: Packing) -> npt.NDArray[Any]:
    """Return decoded values of a whole column: floats with NaN for missing values, or integers if nothing is decoded.

    Unlike ``Unpack``, which has one dtype for all rows, it keeps integers exact.

    Args:
        values: as stored.
        packing: the declarations of the attributes.

    Raises:
        H5ValueError: an attribute cannot be interpreted, or values are too large for a float.
    """
    packing.check()
    is_missing = packing.is_missing(values)
    numbers = values if packing.stored is None else values.view(packing.stored)
    is_scaled = packing.scale != 1 or packing.offset != 0
    if not is_scaled and not is_missing.any():
        return numbers
    if (
        not is_scaled
        and numbers.dtype.itemsize == 8
        and numbers.size
        and _largest(numbers[~is_missing]) > EXACT_IN_FLOAT64
    ):
        raise H5ValueError(
            f"{packing}: values beyond 2**53 next to missing ones do not fit a float. Decode them yourself."
        )
    dtype = np.dtype(packing.dtype)
    decoded: npt.NDArray[Any] = numbers.astype(dtype) * dtype.type(packing.scale) + dtype.type(packing.offset)
    decoded[is_missing] = np.nan
    return decoded


def _largest(values: npt.NDArray[Any]) -> int:
    return max(abs(int(values.min())), abs(int(values.max()))) if values.size else 0


@cache
def unpack_loops() -> UnpackLoops | None:
    """Return the compiled loops of ``Unpack``; None without Numba."""

    def plain(rows, places, missing, scale, offset, out, targets):  # type: ignore[no-untyped-def]
        for i in range(len(places)):
            place, target = places[i], targets[i]
            for k in range(rows.shape[1]):
                out[target, k] = np.float64(rows[place, k]) * scale + offset

    def with_missing(rows, places, missing, scale, offset, out, targets):  # type: ignore[no-untyped-def]
        mark = missing[0]
        for i in range(len(places)):
            place, target = places[i], targets[i]
            for k in range(rows.shape[1]):
                value = np.float64(rows[place, k]) * scale + offset
                out[target, k] = (
                    np.nan if rows[place, k] == mark else value
                )  # without a branch, so that it is vectorized

    def with_several(rows, places, missing, scale, offset, out, targets):  # type: ignore[no-untyped-def]
        least, most = missing[0], missing[1]
        for i in range(len(places)):
            place, target = places[i], targets[i]
            for k in range(rows.shape[1]):
                stored = rows[place, k]
                is_missing = (stored < least) | (stored > most)
                for m in range(2, len(missing)):
                    is_missing |= stored == missing[m]
                value = np.float64(stored) * scale + offset
                out[target, k] = np.nan if is_missing else value

    plain_loop, missing_loop, several_loop = compiled(plain), compiled(with_missing), compiled(with_several)
    return (
        None
        if plain_loop is None or missing_loop is None or several_loop is None
        else (plain_loop, missing_loop, several_loop)
    )


def _not_decodable(array: ArrayLayout, decoder: str, values: str) -> H5ValueError:
    return H5ValueError(
        f"decode={decoder!r} was given for {array.key!r} in {array.path!r}, which has rows of {array.dtype} and the "
        f"shape {array.row_shape}. It decodes {values}. Leave this field out of decode."
    )


def codec_of(decoder: Any, field: str) -> DecodeRequest:
    """Return the codec, or the request, of one entry of ``decode``.

    Args:
        decoder: ``"category"``, ``"cf"``, ``"image"``, ``"real"``, ``"bits:N"``, ``"dense"``, ``"csr"``, or a function
            of a stored row.
        field: name of the field, for errors.

    Raises:
        H5ValueError: the codec does not exist.
    """
    if decoder == "real":
        return RealParts()
    if decoder == "cf":
        return Conventions()
    if decoder == "category":
        return ClassNumbers()
    if decoder == "image":
        return Image()
    if callable(decoder):
        return Function(decoder)
    if decoder in ("dense", "csr"):
        return MatrixRows(decoder == "csr")
    if isinstance(decoder, str) and (match := re.fullmatch(r"bits:([1-9][0-9]*)", decoder)):
        return Bits(int(match[1]))
    hint = near(decoder, DECODERS) if isinstance(decoder, str) else ""
    raise H5ValueError(
        f"decode={{{field!r}: {decoder!r}}} was given.{hint} Pass 'category' (text as class numbers), 'cf' (scale, "
        "offset and fill value), 'image' (JPEG and PNG), 'real' (complex numbers as pairs), 'bits:527' (527 packed "
        "bits), 'dense' or 'csr' (rows of a sparse matrix), or a function of the stored row."
    )


def codecs_of(
    decode: Decode | None,
    names: Sequence[str],
    keys: Sequence[str],
    stacks: Sequence[StackedKeys | None] = (),
) -> list[DecodeRequest | None]:
    """Return the codec, or the request, of each field; None for fields that are returned as stored.

    Args:
        decode: the argument ``decode``.
        names: names of the fields.
        keys: arrays of the fields.
        stacks: for each field its stacked arrays; empty if no field is stacked.

    Raises:
        H5ValueError: a codec or a field does not exist; or columns of a side table are stacked and decoded.
    """
    decode = decode or {}
    if not isinstance(decode, Mapping):
        raise H5ValueError(f"decode={decode!r} was given. Pass a mapping from fields to their decoders.")
    names_and_keys = {*names, *keys}
    unused = [
        pattern
        for pattern in decode
        if not any(pattern == name or fnmatchcase(name, pattern) for name in names_and_keys)
    ]
    if unused:
        raise H5ValueError(
            f"decode names {listing(unused)}; the fields are {listing(names)}.{near(str(unused[0]), names)} Name some "
            "of these."
        )
    decoders = [value_of_field(decode, name, key, None) for name, key in zip(names, keys, strict=True)]
    codecs = [
        None if decoder is None else codec_of(decoder, name) for decoder, name in zip(decoders, names, strict=True)
    ]
    for at, stacked in enumerate(stacks):
        if stacked is not None and stacked.are_columns and codecs[at] is not None:
            raise H5ValueError(f"decode names {names[at]!r}, which stacks columns of a table. Leave it out of decode.")
        if stacked is not None and isinstance(codecs[at], ClassNumbers):
            raise H5ValueError(
                f"decode={{{names[at]!r}: 'category'}} was given for several arrays. Name each as a separate field."
            )
        if stacked is not None and stacked.group is not None:  # it may be a table
            codecs[at] = Stack(stacked.members, stacked.axis, codecs[at])
    return codecs
