"""Decode rows one by one, to arrays of several shapes: images as JPEG or PNG, lists, and functions of a user."""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..hdf5 import IMAGE_SIGNATURES, ArrayLayout, Codec, is_list

__all__ = ["Function", "Image", "Ragged", "RowCodec", "bytes_of"]

JPEG, PNG = IMAGE_SIGNATURES
JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers before width and height
JPEG_ALONE = {0, 1, *range(0xD0, 0xDA)}  # markers without a segment
PNG_CHANNELS = {0: 1, 2: 3, 3: 4, 4: 2, 6: 4}  # by the type of color; a palette becomes up to four
MAX_PIXEL_BYTES = 256 << 20
MAX_PIXEL_RATIO = 100
"""An image with more decoded bytes than the first limit, and than so many times its own, was made to exhaust memory."""

JPEG_SCAN, JPEG_END = b"\xff\xda", b"\xff\xd9"


class RowCodec(Codec):
    """Decodes rows one by one to arrays of different shapes, which are stored as objects.

    Attributes:
        fills_memory: whether rows are decoded to memory that is passed.
    """

    fills_memory: ClassVar[bool] = False

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        return np.dtype(object), ()

    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See ``Codec.decode``."""
        for at, stored in enumerate(rows):
            out[at] = self.row(stored)

    @abstractmethod
    def row(self, stored: Any, out: npt.NDArray[Any] | None = None) -> Any:
        """Return a decoded row.

        Args:
            stored: a row as it is stored; bytes for rows of bytes.
            out: memory to decode to, and then return, if it has the shape and dtype of the row.
        """


@dataclass(frozen=True)
class Ragged(RowCodec):
    """Lists of numbers, each an array of one axis."""

    def row(self, stored: Any, out: npt.NDArray[Any] | None = None) -> Any:
        """See ``RowCodec.row``."""
        if isinstance(stored, bytes):
            return np.frombuffer(stored, np.uint8).copy()
        row = np.array(stored)
        return row.astype(row.dtype.newbyteorder("="), copy=False)


@dataclass(frozen=True)
class Image(RowCodec):
    """JPEG and PNG as arrays of the shape (channels, height, width), by imagecodecs, without the interpreter's lock."""

    fills_memory: ClassVar[bool] = True

    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """See ``Codec.decoded``."""
        import importlib.util

        if importlib.util.find_spec("imagecodecs") is None:
            raise H5ValueError(
                f"decode={{{array.key!r}: 'image'}} was given, and imagecodecs, which decodes images, is not "
                "installed. Run `pip install 'lightning-h5[images]'`."
            )
        is_bytes = is_list(array.dtype) or array.dtype.kind in "SVO" or array.dtype == np.uint8
        if not is_bytes or array.dtype.names is not None:
            raise H5ValueError(
                f"decode={{{array.key!r}: 'image'}} was given, and {array.key!r} in {array.path!r} has rows of "
                f"{array.dtype} and the shape {array.row_shape}, not bytes. Leave this field out of decode."
            )
        return super().decoded(array)

    def row(self, stored: Any, out: npt.NDArray[Any] | None = None) -> Any:
        """See ``RowCodec.row``."""
        import imagecodecs

        data = bytes(stored)
        _check_size(data)
        if data.startswith(JPEG):
            if not data.endswith(JPEG_END) and data.rfind(JPEG_END) < data.rfind(JPEG_SCAN):
                n_bytes = len(data.rstrip(bytes(1)))
                raise ValueError(f"a JPEG of {n_bytes} bytes has no end")  # decoders fill it with gray
            decode: Callable[..., npt.NDArray[Any]] = imagecodecs.jpeg8_decode
        elif data.startswith(PNG):
            decode = imagecodecs.png_decode
        else:
            raise ValueError(f"{len(data)} bytes that begin with {data[:4]!r} are neither JPEG nor PNG")
        if out is not None:
            memory = out[0] if len(out) == 1 else np.moveaxis(out, 0, -1)
            with suppress(ValueError):  # of another shape
                if decode(data, out=memory) is memory:  # decoders drop axes of one pixel
                    return out
        pixels = decode(data)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        return np.moveaxis(pixels, -1, 0)  # channels stay together in memory, as cuDNN likes them


def _check_size(data: bytes) -> None:
    """Check the size that an image declares, before a decoder allocates memory for it.

    Raises:
        ValueError: it is large, and out of proportion to its bytes.
    """
    width, height, depth = _declared_size(data)
    if (n_bytes := width * height * depth) > max(MAX_PIXEL_BYTES, MAX_PIXEL_RATIO * len(data)):
        raise ValueError(
            f"it declares {width:,} x {height:,} pixels, which are {n_bytes:,} bytes, and has {len(data):,}. If that "
            "is intended, decode it by a function of your own"
        )


def _declared_size(data: bytes) -> tuple[int, int, int]:
    """Return width and height of a JPEG or PNG as it declares them, and the bytes of a pixel; zeros if it is cut."""
    if data.startswith(PNG):
        if len(data) < 26:
            return 0, 0, 0
        width, height, depth, color = struct.unpack_from(">IIBB", data, 16)
        return width, height, PNG_CHANNELS.get(color, 4) * (2 if depth == 16 else 1)
    at, size = 2, (0, 0, 0)
    while (at := data.find(b"\xff", at)) >= 0:  # decoders skip bytes between segments
        while data[at : at + 1] == b"\xff":  # and fills before a marker
            at += 1
        marker, length = int.from_bytes(data[at : at + 1]), int.from_bytes(data[at + 1 : at + 3])
        if marker == JPEG_SCAN[1] or at + 9 > len(data):
            break
        if marker in JPEG_FRAMES:
            height, width, channels = struct.unpack_from(">HHB", data, at + 4)
            size = max(size, (width, height, channels), key=math.prod)
        at += 1 if marker in JPEG_ALONE else 1 + length
    return size


@dataclass(frozen=True)
class Function(RowCodec):
    """Decodes a row by a function of the user, which gets bytes or an array.

    Args:
        function: takes a stored row, and returns an array, a tensor or a number.
    """

    function: Callable[[Any], Any]

    def row(self, stored: Any, out: npt.NDArray[Any] | None = None) -> Any:
        """See ``RowCodec.row``."""
        value = self.function(stored)
        return value if isinstance(value, str) else np.asarray(value)

    def __repr__(self) -> str:  # part of a file's identity: without an address
        return f"Function({getattr(self.function, '__qualname__', type(self.function).__qualname__)})"


def bytes_of(stored: Any) -> Any:
    """Return rows of bytes, of any h5py type, as ``bytes``; other rows unchanged."""
    if isinstance(stored, np.ndarray) and stored.dtype == np.uint8 and stored.ndim == 1:
        return stored.tobytes()
    if isinstance(stored, np.void):
        return stored.tobytes()
    return stored.encode("utf-8", "surrogateescape") if isinstance(stored, str) else stored
