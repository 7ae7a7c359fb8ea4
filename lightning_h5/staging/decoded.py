"""A mirror of decoded chunks on a local disk, so that each chunk is decoded once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..options import StagingOptions
from ..types import IntArray
from .checksums import ABSENT, DAMAGED, SUM, UNREAD, n_sums, read_loop, sums_of_pieces, write_loop
from .folder import MirrorFolder
from .granules import is_present, marks_at, sums_at
from .mirror_file import ALLOCATED_BYTES, MirrorFile

__all__ = ["DecodedArray", "DecodedMirror", "ReadPieces"]

RESERVED_BYTES, RESERVED_SHARE = 32 << 20, 256
"""Bytes that are reserved in the folder at a time, at most, and at most this part of its limit."""

BLOCK_BYTES = 4096  # of file systems: a chunk that is no multiple of it takes up to one more than its bytes

RETRY = 1.0  # seconds until a folder that cannot be used is tried again

COMPARE_EVERY = 60.0
"""Seconds after which pieces are compared with their checksums again. Windows that overlap read each of their frames
several times in an epoch."""

ReadPieces = Callable[[int, npt.NDArray[np.uint8], IntArray, IntArray, IntArray], int]
"""Reads pieces of a file: descriptor, memory, where each piece begins and ends in it, and where it begins in the file.
Returns the bytes that were read."""


@dataclass(frozen=True)
class DecodedArray:
    """An array whose decoded chunks are stored.

    Attributes:
        options: where.
        identity: a text that identifies the decoding; decoded chunks depend on it and on the state of the file.
        n_chunks: their number.
        chunk_bytes: decoded bytes of each.
        sum_bytes: bytes of a checksum, from the start of each chunk on: parts of a chunk are read with these as unit.
    """

    options: StagingOptions
    identity: str
    n_chunks: int
    chunk_bytes: int
    sum_bytes: int

    def __hash__(self) -> int:
        return hash(self.identity)  # a key of open files, looked up several times for each read


class DecodedMirror(MirrorFile):
    """The decoded chunks of an array that a local disk has. Safe to use from threads.

    All that is read is compared with checksums: whole chunks each time, parts of chunks once in ``COMPARE_EVERY``
    seconds, and again after the file was written to. What is lacking, or wrong, is decoded again: nothing here raises
    because the disk fails.

    Args:
        folder: where mirrors are kept; None if that folder cannot be used any more.
        key: name of this version of the array.
        array: the array.
        leaves_tables: leave the room for the first bytes of mirrors (see ``MirrorFolder.reserve``).
    """

    def __init__(
        self, folder: MirrorFolder | None, key: str, array: DecodedArray, *, leaves_tables: bool = True
    ) -> None:
        super().__init__(folder, key, array.n_chunks * array.chunk_bytes, array.chunk_bytes, array.sum_bytes)
        self._leaves_tables = leaves_tables
        self._no_room_until = 0.0
        self._lock = threading.Lock()
        self._reserved = 0  # bytes
        self._compared = (0, 0), np.zeros(0, np.bool_)  # a state of the file, and which checksums were compared in it

    def has(self, chunks: IntArray) -> npt.NDArray[np.bool_]:
        """Return which chunks are there."""
        marks = self._marks
        if not len(marks):
            return np.zeros(len(chunks), np.bool_)
        return is_present(marks[chunks]).astype(np.bool_)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a chunk."""
        return self._piece_bytes

    def read_rate(self, chunks: IntArray, read: ReadPieces, forget: Callable[..., None] | None) -> float:
        """Return the bytes a second at which chunks are read, or 0 if they cannot be read.

        Args:
            chunks: chunks that are there.
            read: reads pieces of a file.
            forget: drops pieces from the page cache, once they are on the disk; None keeps them there.
        """
        size, out = self._piece_bytes, np.empty(self._piece_bytes, np.uint8)
        with suppress(OSError):  # of the local disk
            if forget is not None:
                os.fdatasync(self.fd)
                forget(self.fd, *self.places(chunks))
            began, none = time.perf_counter(), np.zeros(1, np.int64)
            for place in (chunks * size).tolist():
                if read(self.fd, out, none, none + size, np.array([place])) != size:
                    return 0.0
            return len(chunks) * size / max(time.perf_counter() - began, 1e-9)
        return 0.0

    def places(self, chunks: IntArray) -> tuple[IntArray, IntArray]:
        """Return where in the file chunks begin, and the bytes of each."""
        return chunks * self._piece_bytes, np.full(len(chunks), self._piece_bytes)

    def read_cached(
        self,
        chunks: IntArray,
        within: IntArray,
        sizes: IntArray,
        out: npt.NDArray[np.uint8],
        starts: IntArray,
        room: npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.int8] | None:
        """Read pieces of chunks that the page cache has, in one call of compiled code.

        Returns the state of each (see ``checksums``), or None if all were read. Without compiled code all are
        ``UNREAD``. A damaged piece is marked as missing, and ``ABSENT``.

        Args:
            chunks: the chunk of each piece, shape ``(n,)``.
            within: where each begins in its chunk, in bytes.
            sizes: bytes of each.
            out: memory to read into.
            starts: position of each in ``out``.
            room: memory for a piece with what else its checksums are of.
        """
        marks, sums, states = self._marks, self._sums, np.full(len(chunks), UNREAD, np.int8)
        if (loop := read_loop()) is None or not len(marks):
            return states
        compared = None
        with suppress(OSError):  # of the local disk
            compared = self._compared_now()
        if compared is None or not len(compared):
            return states
        places = (np.ascontiguousarray(numbers) for numbers in (chunks, within, sizes))
        starts, sizes_of = np.ascontiguousarray(starts), (self._piece_bytes, self._sum_bytes)
        n_right = loop(self.fd, marks, sums, compared, *places, out, starts, room, states, *sizes_of)
        if n_right == len(states):
            return None
        if (is_damaged := states == DAMAGED).any():
            self._forget(np.unique(chunks[is_damaged]))
            states[is_damaged] = ABSENT
        return states

    def read(
        self,
        chunks: IntArray,
        within: IntArray,
        sizes: IntArray,
        out: npt.NDArray[np.uint8],
        starts: IntArray,
        read: ReadPieces,
    ) -> npt.NDArray[np.bool_]:
        """Read pieces of chunks; return a mask of the pieces that are there, and right.

        Args:
            chunks: the chunk of each piece, shape ``(n,)``.
            within: where each begins in its chunk, in bytes: where a checksum does.
            sizes: bytes of each, up to the end of a checksum.
            out: memory to read into.
            starts: position of each in ``out``.
            read: reads pieces of a file.
        """
        marks = self._marks
        if not len(marks):
            return np.zeros(len(chunks), np.bool_)
        before = marks[chunks]
        is_read = is_present(before).astype(np.bool_)
        if not is_read.all():
            if is_read.any():
                those = chunks[is_read], within[is_read], sizes[is_read]
                is_read[is_read] = self.read(*those, out, starts[is_read], read)
            return is_read
        n_read = 0
        with suppress(OSError):  # of the local disk
            compared = self._compared_now()
            n_read = read(self.fd, out, starts, starts + sizes, chunks * self._piece_bytes + within)
        if n_read != int(sizes.sum()):
            return np.zeros(len(chunks), np.bool_)
        is_right, is_same = self._are_right(chunks, within, sizes, out, starts, compared), marks[chunks] == before
        if not is_right.all() and len(damaged := chunks[~is_right & is_same]):
            self._forget(np.unique(damaged))
        is_right &= is_same
        return is_right

    def _compared_now(self) -> npt.NDArray[np.bool_]:
        """Return which checksums were compared since the file was written to, a minute ago at most (to be noted in)."""
        state = os.fstat(self.fd).st_mtime_ns, int(time.monotonic() // COMPARE_EVERY)
        compared_in, compared = self._compared
        if compared_in != state:
            compared = np.zeros(len(self._sums), np.bool_)
            self._compared = state, compared
        return compared

    def _are_right(
        self,
        chunks: IntArray,
        within: IntArray,
        sizes: IntArray,
        out: npt.NDArray[np.uint8],
        starts: IntArray,
        compared: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Compare pieces with their checksums (see ``read``), unless these were compared, and note which are right."""
        size, counts = self._sum_bytes, n_sums(sizes, self._sum_bytes)
        firsts = np.cumsum(counts) - counts
        at = (np.arange(int(counts.sum())) - np.repeat(firsts, counts)) * size  # in the piece
        numbers = np.repeat(chunks * self._n_sums + within // size, counts) + at // size
        are_right = compared[numbers] & np.repeat(sizes < self._piece_bytes, counts)
        if len(others := np.flatnonzero(~are_right)):
            begin, end = np.repeat(starts, counts) + at, np.repeat(starts + sizes, counts)
            end = np.minimum(begin + size, end)
            others_right = sums_of_pieces(out, begin[others], end[others], size) == self._sums[numbers[others]]
            are_right[others] = compared[numbers[others]] = others_right
        is_right: npt.NDArray[np.bool_] = np.logical_and.reduceat(are_right, firsts)
        return is_right

    def put(self, chunks: IntArray, out: npt.NDArray[np.uint8], firsts: IntArray) -> int:
        """Keep decoded chunks, or the first of them, as far as there is room; return the bytes that were written.

        Args:
            chunks: the chunks, shape ``(n,)``.
            out: memory that has them.
            firsts: where each begins in it, shape ``(n,)``.
        """
        if not self.takes_more or not len(self._marks) or not len(chunks):
            return 0
        room = self._piece_bytes + (self._piece_bytes % BLOCK_BYTES > 0) * BLOCK_BYTES
        while (seconds := self._reserve(len(chunks) * room)) and len(chunks) > 1:
            chunks, firsts = chunks[: len(chunks) // 2], firsts[: len(chunks) // 2]
        if not seconds:
            try:
                return self._put_lacking(chunks, out.data, firsts)
            except OSError as error:
                seconds = 0.0 if self._folder is None else self._folder.pause(error)
        self._no_room_until = time.monotonic() + seconds
        return 0

    def _reserve(self, n_bytes: int) -> float:
        """Reserve room for chunks: from earlier reservations, or from the folder, for more chunks if there is room.

        Returns:
            Seconds after which to try again; 0 if there is room.
        """
        folder = self._folder
        if folder is None:
            return RETRY
        with self._lock:
            seconds = 0.0
            if self._reserved < n_bytes:
                for more in (max(n_bytes, min(RESERVED_BYTES, folder.limit // RESERVED_SHARE)), n_bytes):
                    seconds = folder.reserve(self.fd, marks_at(self.n_bytes), more, leaves_tables=self._leaves_tables)
                    if not seconds:
                        self._reserved += more
                        break
            if not seconds:
                self._reserved -= n_bytes
            return seconds

    @property
    def takes_more(self) -> bool:
        """Whether there may be room for more."""
        return self._folder is not None and self._folder.takes_writes and time.monotonic() >= self._no_room_until

    def _put_lacking(self, chunks: IntArray, memory: memoryview, firsts: IntArray) -> int:
        """Write chunks that other processes have not written meanwhile; return their bytes."""
        absent_numbers = np.flatnonzero(~self.has(chunks))
        if len(absent_numbers):
            self._put_runs(chunks[absent_numbers], memory, firsts[absent_numbers])
        return len(absent_numbers) * self._piece_bytes

    def _put_runs(self, chunks: IntArray, memory: memoryview, firsts: IntArray) -> None:
        """Write chunks, neighbors in file and memory together."""
        size = self._piece_bytes
        is_first = np.ones(len(chunks), np.bool_)
        is_first[1:] = (chunks[1:] - chunks[:-1] != 1) | (firsts[1:] - firsts[:-1] != size)
        lows = np.flatnonzero(is_first)
        n_chunks = np.append(lows[1:], len(chunks)) - lows
        runs = np.empty((len(lows), 3), np.int64)
        runs[:, 0], runs[:, 1], runs[:, 2] = firsts[lows], n_chunks * size, chunks[lows] * size
        if self._put_at_once(chunks, memory, runs):
            return
        for first, n_bytes, place in runs.tolist():
            self._put(place // size, memory[first : first + n_bytes])

    def _put_at_once(self, chunks: IntArray, memory: memoryview, runs: IntArray) -> bool:
        """Write runs of chunks (see ``write_loop``); return False if that failed: ``_put`` then finds out why."""
        if (loop := write_loop()) is None:
            return False
        sums, marks = np.empty(len(chunks) * self._n_sums, SUM), self._marks[chunks] | np.uint16(1)
        n_bytes, size = self.n_bytes, self._piece_bytes
        places = marks_at(n_bytes), sums_at(n_bytes, size)
        decoded = np.frombuffer(memory, np.uint8)
        return loop(self.fd, decoded, runs, marks, sums, size, self._sum_bytes, *places, ALLOCATED_BYTES)

    def _forget(self, chunks: IntArray) -> None:
        """Mark damaged chunks as missing: they are written again once they are decoded."""
        self._warn_of_damage(len(chunks))

        def forget() -> None:
            for chunk in chunks.tolist():
                marks = self._marks[chunk : chunk + 1]
                self._write_marks(chunk, marks + is_present(marks))

        if self._folder is not None:
            self._folder.write(self.fd, marks_at(self.n_bytes), 0, forget)
