"""The local file of a mirror: pieces of equal size at the places that they have in the source, and tables at its end.

The tables are marks for the pieces that the file has, and their checksums. Bytes are written first, then their
checksums, then their marks: a process may be killed at any moment.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import numpy as np
import numpy.typing as npt

from ..sizes import bytes_text
from .checksums import SUM, WRITE_BYTES, sums_of_pieces
from .folder import MIRROR, MirrorFolder
from .granules import MARK, length_of, marks_at, sums_at

__all__ = ["MirrorFile", "drop_inherited_mirrors"]

ALLOCATED_BYTES = 128 << 10
"""Bytes from which on disk space is allocated before it is written to. 256 KiB are then written at 8.2 GB/s, not 5.7,
and 768 KiB at 8.9, not 5.7; but 32 KiB at 2.8, not 3.4 (Linux 6.18, ext4, 2026-11-29)."""

_log = logging.getLogger(__name__)


class MirrorFile:
    """A mirror's file, as this process has it open.

    Args:
        folder: where it is; None if that folder cannot be used any more.
        key: name of this version of the source.
        n_bytes: size of the source.
        piece_bytes: bytes of a piece; the last one may have fewer.
        sum_bytes: bytes of a piece that have a checksum of their own; None for all of them.

    Attributes:
        fd: its descriptor; -1 if it could not be opened, and all is read from the source.
        name: its name.
        n_bytes: size of the source.
    """

    def __init__(
        self, folder: MirrorFolder | None, key: str, n_bytes: int, piece_bytes: int, sum_bytes: int | None = None
    ) -> None:
        self._folder, self._piece_bytes, self.n_bytes = folder, piece_bytes, n_bytes
        self._sum_bytes = piece_bytes if sum_bytes is None else sum_bytes
        self._n_sums = -(-piece_bytes // self._sum_bytes)  # of a piece
        self.name = f"{key}-{n_bytes}{MIRROR}"
        self._has_warned = False
        self.fd = -1
        self._marks, self._sums = np.zeros(0, MARK), np.zeros(0, SUM)
        with suppress(OSError, ValueError):
            if folder is None:
                return
            tables, n_pieces = marks_at(n_bytes), -(-n_bytes // piece_bytes)
            length = length_of(n_bytes, piece_bytes, self._n_sums)
            self.fd = folder.open_mirror(self.name, length, tables)
            memory = mmap.mmap(self.fd, length - tables, access=mmap.ACCESS_READ, offset=tables)
            self._sums = np.frombuffer(memory, SUM, n_pieces * self._n_sums, sums_at(n_bytes, piece_bytes) - tables)
            self._marks = np.frombuffer(memory, MARK, n_pieces)
        _open_files.add(self)

    def drop(self) -> None:
        """Close the file: after a fork, it would keep locks of a parent process that dies."""
        if self.fd >= 0:
            fd, self.fd, self._marks, self._sums = self.fd, -1, np.zeros(0, MARK), np.zeros(0, SUM)
            if self._folder is not None:
                self._folder.release(fd)
            os.close(fd)

    def _put(self, first: int, data: memoryview) -> None:
        """Write pieces, their checksums and their marks, of which the file has none. Others may write the same ones.

        Raises:
            OSError: the disk is full or broken.
        """
        size = self._piece_bytes
        at, n_written = first * size, 0
        if len(data) >= ALLOCATED_BYTES:
            _allocate(self.fd, at, len(data))
        while n_written < len(data):
            n_written += os.pwrite(self.fd, data[n_written : n_written + WRITE_BYTES], at + n_written)
        starts = np.arange(0, len(data), size)
        stops = np.minimum(starts + size, len(data))
        sums = sums_of_pieces(np.frombuffer(data, np.uint8), starts, stops, self._sum_bytes)
        os.pwrite(self.fd, sums.tobytes(), sums_at(self.n_bytes, size) + first * self._n_sums * SUM.itemsize)
        self._write_marks(first, self._marks[first : first + len(starts)] | np.uint16(1))

    def _write_marks(self, first: int, marks: npt.NDArray[np.uint16]) -> None:
        os.pwrite(self.fd, marks.tobytes(), marks_at(self.n_bytes) + first * MARK.itemsize)

    def _warn_of_damage(self, n_pieces: int) -> None:
        """Warn once that pieces differ from their checksums."""
        if self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "staging: %s of the mirror %r differ from their checksums, and are read again from the original "
            "file. Check the disk that mirrors are on if this repeats.",
            f"{n_pieces:,} pieces of {bytes_text(self._piece_bytes)}",
            self.name if self._folder is None else os.path.join(self._folder.path, self.name),
        )


def _allocate(fd: int, start: int, n_bytes: int) -> None:
    """Allocate disk space of a file, if its file system can. Python's own function would write zeros otherwise.

    Raises:
        OSError: there is no space left.
    """
    if (function := _allocating_function()) is not None and function(fd, 0, start, n_bytes):
        error = ctypes.get_errno()
        if error in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error, os.strerror(error))


@cache
def _allocating_function() -> Callable[[int, int, int, int], int] | None:
    library = ctypes.CDLL(None, use_errno=True)
    with suppress(AttributeError):
        function = library.fallocate
        function.argtypes, function.restype = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64], ctypes.c_int
        return function
    return None


_open_files: weakref.WeakSet[MirrorFile] = weakref.WeakSet()


def drop_inherited_mirrors() -> None:
    """Close a forked child's copies of its parent's mirrors."""
    for file in list(_open_files):
        file.drop()
    _open_files.clear()
