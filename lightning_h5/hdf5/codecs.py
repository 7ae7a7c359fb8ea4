"""Codecs: how stored rows become values of another dtype or shape, one row like the other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError

if TYPE_CHECKING:
    from .layout import ArrayLayout

__all__ = ["Bits", "Codec", "RealParts", "codec_of"]


class Codec(Protocol):
    """Decodes rows. A codec is plain data: it is pickled, compared, and its text is part of a file's identity."""

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return dtype and shape of a decoded row.

        Args:
            array: the array, as it is seen before it is decoded.

        Raises:
            H5ValueError: the array does not hold what this decodes.
        """
        ...

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Decode rows into memory of as many."""
        ...


@dataclass(frozen=True)
class RealParts:
    """Complex numbers as pairs of a real and an imaginary part, on a new last axis."""

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        if array.dtype.kind != "c":
            raise _not_decodable(array, "real", "complex numbers")
        return np.dtype(f"f{array.dtype.itemsize // 2}"), (*array.row_shape, 2)

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See ``Codec.decode``."""
        out[...] = np.ascontiguousarray(rows).reshape(*rows.shape, 1).view(out.dtype)


@dataclass(frozen=True)
class Bits:
    """Packed bits, the first in the highest bit of a byte, as one ``uint8`` each.

    Args:
        n_bits: bits of a row; those after them are padding.
    """

    n_bits: int

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        if array.dtype != np.uint8 or not array.row_shape:
            raise _not_decodable(array, f"bits:{self.n_bits}", "rows of bytes (uint8)")
        if self.n_bits > 8 * array.row_shape[-1]:
            raise H5ValueError(
                f"decode='bits:{self.n_bits}' was given for {array.key!r} in {array.path!r}, whose rows of the shape "
                f"{array.row_shape} have {8 * array.row_shape[-1]} bits. Name as many, or fewer."
            )
        return array.dtype, (*array.row_shape[:-1], self.n_bits)

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See ``Codec.decode``."""
        out[...] = np.unpackbits(rows, axis=-1, count=self.n_bits)


def _not_decodable(array: ArrayLayout, how: str, what: str) -> H5ValueError:
    return H5ValueError(
        f"decode={how!r} was given for {array.key!r} in {array.path!r}, which has rows of {array.dtype} and the shape "
        f"{array.row_shape}, and decodes {what}. Leave this field out of decode."
    )


def codec_of(given: Any, field: str) -> Codec:
    """Return the codec that a user named.

    Args:
        given: ``"real"`` or ``"bits:N"``.
        field: the field that it is for, for errors.

    Raises:
        H5ValueError: there is no such codec.
    """
    if given == "real":
        return RealParts()
    if isinstance(given, str) and (found := re.fullmatch(r"bits:([1-9][0-9]*)", given)):
        return Bits(int(found[1]))
    raise H5ValueError(
        f"decode={{{field!r}: {given!r}}} was given. Pass 'real' (complex numbers as pairs), or 'bits:527' (so many "
        "packed bits)."
    )
