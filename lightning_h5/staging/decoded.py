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
from deflate import crc32

from ..options import StagingOptions
from ..types import IntArray
from .folder import MirrorFolder
from .granules import is_present, marks_at
from .mirror_file import MirrorFile

__all__ = ["DecodedArray", "DecodedMirror", "ReadPieces"]

RESERVED_BYTES, RESERVED_SHARE = 32 << 20, 64
"""Bytes that are reserved in the folder at a time, at most, and at most this part of its limit."""

RETRY = 1.0  # seconds until a folder that cannot be used is tried again

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
    """

    options: StagingOptions
    identity: str
    n_chunks: int
    chunk_bytes: int


class DecodedMirror(MirrorFile):
    """The decoded chunks of an array that a local disk has. Safe to use from threads.

    Each chunk is compared with its checksum whenever it is read as a whole, and before parts of it are read: once, and
    again after the file was written to. What is lacking, or wrong, is decoded again: nothing here raises because the
    disk fails.

    Args:
        folder: where mirrors are kept; None if that folder cannot be used any more.
        key: name of this version of the array.
        array: the array.
    """

    def __init__(self, folder: MirrorFolder | None, key: str, array: DecodedArray) -> None:
        super().__init__(folder, key, array.n_chunks * array.chunk_bytes, array.chunk_bytes)
        self._no_room_until = 0.0
        self._lock = threading.Lock()
        self._n_writing = self._reserved = 0
        # A chunk was compared with its checksum, or written here, if it has the number of the file's present state.
        self._checked, self._state, self._written = np.zeros(len(self._marks), np.uint32), 0, -1

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

    def read(
        self, chunks: IntArray, out: npt.NDArray[np.uint8], firsts: IntArray, read: ReadPieces
    ) -> npt.NDArray[np.bool_]:
        """Read the stored ones of some chunks; return a mask of chunks with a matching checksum.

        Args:
            chunks: the chunks, shape ``(n,)``.
            out: memory to read into.
            firsts: position of each in ``out``, shape ``(n,)``.
            read: reads pieces of a file.
        """
        marks, size = self._marks, self._piece_bytes
        is_read = self.has(chunks)
        if not is_read.any() or not len(marks):
            return is_read
        read_numbers = np.flatnonzero(is_read)
        before, n_read = marks[chunks[read_numbers]], 0
        with suppress(OSError):  # of the local disk
            n_read = read(self.fd, out, firsts[read_numbers], firsts[read_numbers] + size, chunks[read_numbers] * size)
        if n_read != len(read_numbers) * size:
            return np.zeros(len(chunks), np.bool_)
        memory = out.data
        sums = [crc32(memory[first : first + size]) for first in firsts[read_numbers].tolist()]
        is_right = np.array(sums, np.uint32) == self._sums[chunks[read_numbers]]
        is_same = marks[chunks[read_numbers]] == before
        is_read[read_numbers] = is_right & is_same
        if not is_right.all():
            self._forget(chunks[read_numbers[~is_right & is_same]])
        return is_read

    def read_within(
        self,
        chunks: IntArray,
        within: IntArray,
        sizes: IntArray,
        out: npt.NDArray[np.uint8],
        starts: IntArray,
        read: ReadPieces,
    ) -> bool:
        """Read pieces of chunks; return whether all chunks are there, and right.

        Args:
            chunks: the chunk of each piece, shape ``(n,)``.
            within: where each begins in its chunk, in bytes.
            sizes: bytes of each.
            out: memory to read into.
            starts: position of each in ``out``.
            read: reads pieces of a file.
        """
        marks = self._marks
        if not len(marks):
            return False
        before, n_read = marks[chunks], 0
        if not is_present(before).all():
            return False
        with suppress(OSError):  # of the local disk
            if not self._are_right(chunks):
                return False
            n_read = read(self.fd, out, starts, starts + sizes, chunks * self._piece_bytes + within)
        return n_read == int(sizes.sum()) and bool((marks[chunks] == before).all())

    def _are_right(self, chunks: IntArray) -> bool:
        """Compare chunks with their checksums that were not compared since the file was written to last."""
        with self._lock:
            state = self._present_state()
        size = self._piece_bytes
        unchecked = np.unique(chunks[self._checked[chunks] != state])
        if not len(unchecked):
            return True
        memory, damaged = memoryview(bytearray(size)), list[int]()
        for chunk, checksum in zip(unchecked.tolist(), self._sums[unchecked].tolist(), strict=True):
            if os.preadv(self.fd, [memory], chunk * size) != size or crc32(memory) != checksum:
                damaged.append(chunk)
            else:
                self._checked[chunk] = state
        if damaged:
            self._forget(np.array(damaged))
        return not damaged

    def put(self, chunks: IntArray, out: npt.NDArray[np.uint8], firsts: IntArray) -> int:
        """Keep decoded chunks if there is room for them; return the bytes that were written.

        Args:
            chunks: the chunks, shape ``(n,)``.
            out: memory that has them.
            firsts: where each begins in it, shape ``(n,)``.
        """
        if not self.takes_more or not len(self._marks) or not len(chunks):
            return 0
        seconds = self._reserve(len(chunks) * self._piece_bytes)
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
                    seconds = folder.reserve(self.fd, marks_at(self.n_bytes), more)
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
        with self._lock:
            state = self._present_state()
            self._n_writing += 1
        try:
            absent_numbers = np.flatnonzero(~self.has(chunks))
            self._put_runs(chunks[absent_numbers], memory, firsts[absent_numbers])
            self._checked[chunks[absent_numbers]] = state
            return len(absent_numbers) * self._piece_bytes
        finally:
            with self._lock:
                self._n_writing -= 1
                self._written = os.fstat(self.fd).st_mtime_ns

    def _present_state(self) -> int:
        """Return the number of the file's state: another one after it was written to, other than by this object."""
        write_time = os.fstat(self.fd).st_mtime_ns
        if write_time != self._written and not self._n_writing:
            self._written, self._state = write_time, self._state + 1
        return self._state

    def _put_runs(self, chunks: IntArray, memory: memoryview, firsts: IntArray) -> None:
        """Write chunks, neighbors in file and memory together."""
        size = self._piece_bytes
        cuts = np.flatnonzero((np.diff(chunks) != 1) | (np.diff(firsts) != size)) + 1
        for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(chunks)], strict=True):
            if low < high:
                first = int(firsts[low])
                self._put(int(chunks[low]), memory[first : first + (high - low) * size])

    def _forget(self, chunks: IntArray) -> None:
        """Mark damaged chunks as missing: they are written again once they are decoded."""
        self._warn_of_damage(len(chunks))

        def forget() -> None:
            for chunk in chunks.tolist():
                marks = self._marks[chunk : chunk + 1]
                self._write_marks(chunk, marks + is_present(marks))

        if self._folder is not None and len(chunks):
            self._folder.write(self.fd, marks_at(self.n_bytes), 0, forget)
