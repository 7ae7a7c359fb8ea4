"""Decoded chunks of an array on a local disk, which later epochs, workers, ranks and jobs read instead of decoding."""

from __future__ import annotations

import hashlib
import logging
import threading
from contextlib import AbstractContextManager, suppress
from time import perf_counter

import numpy as np
import numpy.typing as npt

from ..counters import Counters, worker_number
from ..errors import H5Error
from ..hdf5 import ArrayLayout, process_pool
from ..memory import page_cache_memory
from ..sizes import bytes_text
from ..staging import MIN_BYTES, RIGHT, UNREAD, DecodedArray, DecodedMirror, compile_sums
from ..types import IntArray
from .block_memory import compile_copies, copy_runs, scratch
from .many_reads import advise_pieces, are_cached, compile_reads, forget_pieces, read_pieces
from .thread_pool import usable_cores

__all__ = ["CACHE_SHARE", "KeptChunks", "keeps_decoded"]

_log = logging.getLogger(__name__)

JUDGED_BYTES = 16 << 20
"""Decoded bytes after which "auto" decides."""

SUM_BYTES = 4096
"""Bytes of a checksum if rows have fewer."""

CACHE_SHARE = 0.8
"""Share of the memory for pages of files that decoded chunks may take, so that later epochs find them there."""

LEAST_GAIN = 1.5
"""How much faster than decoding the disk has to be."""


def keeps_decoded(layout: ArrayLayout) -> bool:
    """Return whether decoded chunks are stored on a local disk: for large arrays with filters, if staging allows."""
    table = layout.table
    return (
        layout.guard.decoded is not None
        and table is not None
        and bool(layout.filters)
        and len(table.offsets) * layout.chunk_bytes >= MIN_BYTES
    )


class KeptChunks:
    """Reads chunks of an array that were decoded before, and stores newly decoded ones.

    Args:
        layout: an array of which ``keeps_decoded`` is true.
        counters: counts bytes that were read.

    Attributes:
        sum_bytes: bytes of a checksum, from the start of each chunk on: the unit in which parts of a chunk are read.
    """

    def __init__(self, layout: ArrayLayout, counters: Counters) -> None:
        options, table = layout.guard.decoded, layout.table
        if options is None or table is None:
            raise ValueError(f"decoded chunks of {layout.key!r} are not kept")
        self._layout, self._counters = layout, counters
        digests = "" if layout.digests is None else hashlib.sha256(layout.digests.pieces.tobytes()).hexdigest()
        self.sum_bytes = _sum_bytes(layout)
        identity = f"{layout.name} {layout.chunks} {layout.axes} {layout.stored} {layout.filters} {digests}"
        identity += f" {self.sum_bytes}"
        self._array = DecodedArray(options, identity, len(table.offsets), layout.chunk_bytes, self.sum_bytes)
        self._judge = _Judge(layout.key, self.n_bytes) if options.decoded == "auto" else None

    @staticmethod
    def compile() -> None:
        """Compile reading, if that is possible."""
        compile_reads()
        compile_sums()
        compile_copies()

    def _mirror(self) -> AbstractContextManager[DecodedMirror]:
        return process_pool().decoded(self._layout.path, self._layout.guard, self._array)

    @property
    def n_bytes(self) -> int:
        """Bytes of all chunks."""
        return self._array.n_chunks * self._array.chunk_bytes

    def has(self, chunks: IntArray) -> npt.NDArray[np.bool_]:
        """Return a mask of the stored chunks. Never raises."""
        with suppress(OSError, H5Error), self._mirror() as mirror:
            return mirror.has(chunks)
        return np.zeros(len(chunks), np.bool_)

    def read(
        self,
        chunks: IntArray,
        out: npt.NDArray[np.uint8],
        starts: IntArray,
        within: IntArray | None = None,
        sizes: IntArray | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Read the stored ones of some chunks, or pieces of them, to positions in memory; return a mask of these.

        Args:
            chunks: the chunk of each piece, shape ``(n,)``.
            out: memory to read into.
            starts: position of each in ``out``.
            within: where each begins in its chunk, in bytes; None for whole chunks.
            sizes: bytes of each; None for whole chunks.
        """
        began = perf_counter()
        with self._mirror() as mirror:
            if not (is_read := mirror.has(chunks)).any():
                return is_read
            within = np.zeros(len(chunks), np.int64) if within is None else within
            sizes = np.full(len(chunks), self._array.chunk_bytes) if sizes is None else sizes
            most = min(self._array.chunk_bytes, int(sizes.max()) + 2 * self.sum_bytes)
            states = mirror.read_cached(chunks, within, sizes, out, starts, scratch("with neighbors", most))
            is_cached = True
            if states is None:
                is_read[:] = True
            else:
                is_read = states == RIGHT
                if len(others := np.flatnonzero(states == UNREAD)):
                    pieces = chunks[others], within[others], sizes[others]
                    is_cached = are_cached(mirror.fd, mirror.places(pieces[0])[0] + pieces[1], pieces[2])
                    is_read[others] = self._read_units(mirror, *pieces, out, starts[others])
        if n_bytes := int((sizes if states is None else sizes[is_read]).sum()):
            self._count(n_bytes, perf_counter() - began, is_cached=is_cached)
        return is_read

    def _read_units(
        self,
        mirror: DecodedMirror,
        chunks: IntArray,
        within: IntArray,
        sizes: IntArray,
        out: npt.NDArray[np.uint8],
        starts: IntArray,
    ) -> npt.NDArray[np.bool_]:
        """Read pieces (see ``read``), and what else their checksums are of."""
        unit, ends = self.sum_bytes, within + sizes
        lows = within // unit * unit
        highs = np.minimum(-(-ends // unit) * unit, self._array.chunk_bytes)
        n_bytes = highs - lows
        if (n_bytes == sizes).all():
            return mirror.read(chunks, within, sizes, out, starts, read_pieces)
        stops = np.cumsum(n_bytes)
        firsts, memory = stops - n_bytes, scratch("with neighbors", int(stops[-1]))
        is_read = mirror.read(chunks, lows, n_bytes, memory, firsts, read_pieces)
        copy_runs(memory, firsts + within - lows, out, starts, sizes)
        return is_read

    def _count(self, n_bytes: int, seconds: float, *, is_cached: bool) -> None:
        """Count bytes that were read, from the page cache or the disk."""
        cached_bytes = n_bytes if is_cached else 0
        self._counters.add(
            bytes_read=n_bytes, cached_bytes=cached_bytes, decoded_mirror_bytes=n_bytes, read_seconds=seconds
        )

    def lacking(self, chunks: IntArray) -> IntArray:
        """Return the chunks that are not stored, and ask the system to fetch the others. Never raises."""
        with suppress(OSError, H5Error), self._mirror() as mirror:
            has = mirror.has(chunks)
            if has.any():
                advise_pieces(mirror.fd, *mirror.places(chunks[has]))
            absent_chunks: IntArray = chunks[~has]
            return absent_chunks
        return chunks

    def keep(self, chunks: IntArray, out: npt.NDArray[np.uint8], firsts: IntArray, seconds: float) -> None:
        """Keep chunks that were decoded to places in memory, as far as there is room.

        Args:
            chunks: the chunks, shape ``(n,)``.
            out: memory that has them.
            firsts: where each begins in it, shape ``(n,)``.
            seconds: that decoding them took.
        """
        if self._judge is not None and self._judge.is_worthwhile is False:
            return
        with self._mirror() as mirror:
            if not mirror.takes_more:
                return
            self._layout.guard.check()  # the chunks may be of a file that has changed
            if mirror.put(chunks, out, firsts) and self._judge is not None:
                self._judge.note(mirror, chunks, seconds)

    def give_back(self, chunks: IntArray) -> None:
        """Have chunks leave the page cache."""
        with suppress(OSError, H5Error), self._mirror() as mirror:
            forget_pieces(mirror.fd, *mirror.places(chunks))


def _sum_bytes(layout: ArrayLayout) -> int:
    """Return the bytes of a checksum: of a row, or of as many as have ``SUM_BYTES``."""
    if layout.chunks is None:
        return layout.chunk_bytes
    row_bytes = max(1, layout.chunk_bytes // layout.chunks[0])
    return max(1, SUM_BYTES // row_bytes) * row_bytes


class _Judge:
    """Decides whether reading decoded chunks is faster than decoding: once some were written, by reading these again.

    Args:
        key: of the array.
        n_bytes: of all chunks. If they fit into the page cache, later epochs read them from there, otherwise from the
            disk.

    Attributes:
        is_worthwhile: the decision; None before it.
    """

    def __init__(self, key: str, n_bytes: int) -> None:
        self._key, self._n_bytes = key, n_bytes
        self._lock = threading.Lock()
        self._chunks: list[IntArray] = []
        self._decoded = self._seconds = 0.0
        self.is_worthwhile: bool | None = None

    def note(self, mirror: DecodedMirror, chunks: IntArray, seconds: float) -> None:
        """Note chunks that were decoded and written; decide once there are enough."""
        with self._lock:
            if self.is_worthwhile is not None:
                return
            self._chunks.append(chunks)
            self._decoded += len(chunks) * mirror.piece_bytes
            self._seconds += seconds
            if self._decoded < min(JUDGED_BYTES, self._n_bytes / 2):
                return
            self._decide(mirror)

    def _decide(self, mirror: DecodedMirror) -> None:
        """Read the written chunks again, and compare the time with decoding."""
        decoding = usable_cores() * self._decoded / max(self._seconds, 1e-9)
        chunks, is_cached = np.concatenate(self._chunks), self._n_bytes <= CACHE_SHARE * (page_cache_memory() or 0)
        reading = mirror.read_rate(chunks, read_pieces, None if is_cached else forget_pieces)
        self.is_worthwhile = reading >= LEAST_GAIN * decoding
        self._chunks = []
        if worker_number() is None:
            _log.info(
                "staging: decoded chunks of %r are %s: decoding gives %s a second (threads: %d), and %s %s",
                self._key,
                "kept" if self.is_worthwhile else "not kept",
                bytes_text(decoding),
                usable_cores(),
                "the page cache" if is_cached else "the disk",
                bytes_text(reading),
            )
