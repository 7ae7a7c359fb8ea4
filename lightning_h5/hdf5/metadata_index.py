"""Published indexes: the bytes by which the HDF5 library finds arrays and chunks, in one object next to a file.

An index holds bytes of the file and their places, nothing else, so the library itself still reads and checks them. It
belongs to a file of the same size and the same sampled content, wherever that is.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from ..errors import H5FileError

__all__ = ["MetadataIndex"]

HEAD = struct.Struct("<8sQ32sQ")  # signature, bytes of the file, its sampled identity, pieces
SIGNATURE = b"LH5INDX1"
FREE, MAX_RATIO = 64 << 20, 100  # decompressed bytes, and times the stored ones. Zeros compress by a thousand.
MAX_PLAIN = 1 << 30  # bytes that an index may have once it is decompressed


class MetadataIndex:
    """Bytes of a file by their place.

    Args:
        n_bytes: size of the file.
        identity: of the file, see ``file_identity``.
        starts: where each piece begins, in ascending order, without overlaps.
        pieces: their bytes.
    """

    def __init__(self, n_bytes: int, identity: str, starts: Iterable[int], pieces: Iterable[bytes]) -> None:
        self.n_bytes, self.identity = n_bytes, identity
        self._starts, self._pieces = list(starts), list(pieces)

    def find(self, n_bytes: int, start: int) -> bytes | None:
        """Return bytes from a place; None if the index does not have all of them."""
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return None
        piece, offset = self._pieces[at], start - self._starts[at]
        return piece[offset : offset + n_bytes] if offset + n_bytes <= len(piece) else None

    def to_bytes(self) -> bytes:
        """Return the index as it is stored: a head, the compressed places, sizes and bytes, and a digest of all."""
        places = np.array([self._starts, [len(piece) for piece in self._pieces]], dtype="<i8")
        head = HEAD.pack(SIGNATURE, self.n_bytes, self.identity.encode(), len(self._pieces))
        data = head + zlib.compress(places.tobytes() + b"".join(self._pieces), 6)
        return data + hashlib.sha256(data).digest()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> MetadataIndex:
        """Return a stored index.

        Args:
            data: its bytes.
            name: for the error.

        Raises:
            H5FileError: it is damaged, or something else.
        """
        stored, digest = data[:-32], data[-32:]
        if not stored.startswith(SIGNATURE) or hashlib.sha256(stored).digest() != digest:
            raise H5FileError(f"{name!r} is no index, or damaged. Write it again: `lightning-h5 index`.")
        try:
            _, n_bytes, identity, n = HEAD.unpack_from(stored)
            inflate = zlib.decompressobj()
            content = inflate.decompress(stored[HEAD.size :], min(MAX_PLAIN, max(FREE, MAX_RATIO * len(stored))))
            if not inflate.eof or 16 * n > len(content):
                raise ValueError
            starts, sizes = np.frombuffer(content, "<i8", 2 * n).reshape(2, n)
            is_apart = n < 2 or bool((starts[1:] - starts[:-1] >= sizes[:-1]).all())
            if n and (not is_apart or starts[0] < 0 or sizes.min() < 0 or starts[-1] > n_bytes - sizes[-1]):
                raise ValueError
            ends = 16 * n + np.cumsum(sizes)
            pieces = [content[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]
            if [len(piece) for piece in pieces] != sizes.tolist():
                raise ValueError
            return cls(n_bytes, identity.decode(), starts.tolist(), pieces)
        except (ValueError, struct.error, zlib.error) as error:
            raise H5FileError(
                f"{name!r} has no tables of a file, or more than {MAX_RATIO} times its bytes. Write it again: "
                "`lightning-h5 index`."
            ) from error
