"""Decoded chunks of an array on a local disk, which later epochs, workers, ranks and jobs read instead of decoding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5Error
from ..hdf5 import ArrayLayout, process_pool
from ..staging import MIN_BYTES, DecodedArray, DecodedMirror
from ..types import IntArray
from .many_reads import advise_pieces, are_cached, forget_pieces, read_pieces

__all__ = ["KeptChunks", "keeps_decoded"]


def keeps_decoded(layout: ArrayLayout) -> bool:
    """Return whether decoded chunks of an array are kept: it has filters to undo, is not small, and its file may be."""
    table = layout.table
    return (
        layout.guard.decoded is not None
        and table is not None
        and bool(layout.filters)
        and len(table.offsets) * layout.chunk_bytes >= MIN_BYTES
    )


class KeptChunks:
    """Reads chunks of an array that were decoded before, and keeps what is decoded now.

    Args:
        layout: an array of which ``keeps_decoded`` is true.
        counters: counts bytes that were read.
    """

    def __init__(self, layout: ArrayLayout, counters: Counters) -> None:
        options, table = layout.guard.decoded, layout.table
        if options is None or table is None:
            raise ValueError(f"decoded chunks of {layout.key!r} are not kept")
        self._layout, self._counters = layout, counters
        digests = "" if layout.digests is None else hashlib.sha256(layout.digests.pieces.tobytes()).hexdigest()
        identity = f"{layout.name} {layout.chunks} {layout.axes} {layout.stored} {layout.filters} {digests}"
        self._array = DecodedArray(options, identity, len(table.offsets), layout.chunk_bytes)

    @contextmanager
    def _mirror(self) -> Iterator[DecodedMirror]:
        with process_pool().decoded(self._layout.path, self._layout.guard, self._array) as mirror:
            yield mirror

    @property
    def n_bytes(self) -> int:
        """Bytes of all chunks."""
        return self._array.n_chunks * self._array.chunk_bytes

    def has(self, chunks: IntArray) -> npt.NDArray[np.bool_]:
        """Return which chunks are kept. Never raises."""
        with suppress(OSError, H5Error), self._mirror() as mirror:
            return mirror.has(chunks)
        return np.zeros(len(chunks), np.bool_)

    def read_rows(
        self, chunks: IntArray, within: IntArray, sizes: IntArray, out: npt.NDArray[np.uint8], starts: IntArray
    ) -> bool:
        """Read pieces of chunks; return whether all are there, and right.

        Args:
            chunks: the chunk of each piece, shape ``(n,)``.
            within: where each begins in its chunk, in bytes.
            sizes: bytes of each.
            out: memory to read into.
            starts: where each goes in it.
        """
        began = perf_counter()
        with self._mirror() as mirror:
            if not mirror.read_within(chunks, within, sizes, out, starts, read_pieces):
                return False
        n_bytes = int(sizes.sum())
        self._counters.add(bytes_read=n_bytes, decoded_mirror_bytes=n_bytes, read_seconds=perf_counter() - began)
        return True

    def lacking(self, chunks: IntArray) -> IntArray:
        """Return the chunks that are not kept, and have the system fetch those that are. Never raises."""
        with suppress(OSError, H5Error), self._mirror() as mirror:
            has = mirror.has(chunks)
            if has.any():
                advise_pieces(mirror.fd, *mirror.places(chunks[has]))
            lacking: IntArray = chunks[~has]
            return lacking
        return chunks

    def read(self, chunks: IntArray, out: npt.NDArray[np.uint8], firsts: IntArray) -> npt.NDArray[np.bool_]:
        """Read those chunks that are kept to places in memory; return which these are."""
        began = perf_counter()
        with self._mirror() as mirror:
            has_cached = are_cached(mirror.fd, *mirror.places(chunks))
            is_read = mirror.read(chunks, out, firsts, read_pieces)
        n_bytes, took = int(is_read.sum()) * self._array.chunk_bytes, perf_counter() - began
        if n_bytes:
            self._counters.add(
                bytes_read=n_bytes,
                cached_bytes=n_bytes * has_cached,
                decoded_mirror_bytes=n_bytes,
                read_seconds=took,
                decode_seconds=-took,
            )
        return is_read

    def keep(self, chunks: IntArray, out: npt.NDArray[np.uint8], firsts: IntArray) -> None:
        """Keep chunks that were decoded to places in memory, as far as there is room."""
        with self._mirror() as mirror:
            if mirror.takes_more:
                self._layout.guard.check()  # what was decoded may be of a file that has changed
                mirror.put(chunks, out, firsts)

    def give_back(self, chunks: IntArray) -> None:
        """Have chunks leave the page cache."""
        with suppress(OSError, H5Error), self._mirror() as mirror:
            forget_pieces(mirror.fd, *mirror.places(chunks))
