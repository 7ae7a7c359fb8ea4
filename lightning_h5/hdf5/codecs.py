"""Codecs: how stored rows become values of another dtype or shape, one row like the other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import H5CorruptError, H5ValueError

if TYPE_CHECKING:
    from .layout import ArrayLayout

__all__ = ["Bits", "Codec", "MatrixRows", "RealParts", "Recode", "codec_of"]


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


@dataclass(frozen=True)
class MatrixRows:
    """Rows of a sparse matrix, which is no single array.

    Args:
        as_csr: batches are in CSR form, not dense.
    """

    as_csr: bool

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        raise _not_decodable(array, "csr" if self.as_csr else "dense", "sparse matrices: groups with 'indptr'")

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See ``Codec.decode``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Recode:
    """Codes of categories as other codes; those of missing values stay -1.

    Args:
        codes: what each code of the file becomes.
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
        """Raise an ``H5CorruptError`` if a code is of no category."""
        if codes.size and not -1 <= codes.min() <= codes.max() < len(self.codes):
            name = "a categorical column" if array is None else f"{array.key!r} in {array.path!r}"
            raise H5CorruptError(
                f"{name} has codes from {codes.min()} to {codes.max()}, and {len(self.codes)} categories. The file is "
                "damaged there; copy or write it again."
            )


def _not_decodable(array: ArrayLayout, how: str, what: str) -> H5ValueError:
    return H5ValueError(
        f"decode={how!r} was given for {array.key!r} in {array.path!r}, which has rows of {array.dtype} and the shape "
        f"{array.row_shape}, and decodes {what}. Leave this field out of decode."
    )


def codec_of(given: Any, field: str) -> Codec:
    """Return the codec that a user named.

    Args:
        given: ``"real"``, ``"bits:N"``, ``"dense"`` or ``"csr"``.
        field: the field that it is for, for errors.

    Raises:
        H5ValueError: there is no such codec.
    """
    if given == "real":
        return RealParts()
    if given in ("dense", "csr"):
        return MatrixRows(given == "csr")
    if isinstance(given, str) and (found := re.fullmatch(r"bits:([1-9][0-9]*)", given)):
        return Bits(int(found[1]))
    raise H5ValueError(
        f"decode={{{field!r}: {given!r}}} was given. Pass 'real' (complex numbers as pairs), 'bits:527' (so many "
        "packed bits), 'dense' or 'csr' (rows of a sparse matrix)."
    )
