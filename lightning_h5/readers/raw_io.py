"""Read stored bytes of a file by position: one piece, or many with one system call."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import repeat
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError, H5Error, H5FileError
from ..hdf5 import ArrayLayout, process_pool, size_of
from ..types import IntArray

__all__ = ["forget_stored", "prefetch_stored", "read_pieces", "read_stored", "read_with"]


def read_stored(
    layout: ArrayLayout,
    out: npt.NDArray[np.uint8],
    starts: IntArray,
    stops: IntArray,
    offsets: IntArray,
    name: Callable[[int, int], str],
    counters: Counters,
) -> None:
    """Read pieces of an array's file in one call, without the interpreter's lock.

    Args:
        layout: the array.
        out: contiguous memory that the pieces fill.
        starts: where in ``out`` each piece begins, shape ``(n_pieces,)``.
        stops: where in ``out`` each piece ends.
        offsets: where in the file each piece begins.
        name: returns the name of a piece, from its number and the number of a missing byte, for the error.
        counters: counts where bytes came from if the file is staged.

    Raises:
        H5CorruptError: the file ends too early.
        H5FileError: the file cannot be read.
        H5DataChangedError: it has changed since it was described.
    """
    try:
        if layout.guard.staging is not None and _read_staged(layout, out, starts, stops, offsets, counters):
            return
        if not layout.guard.is_remote:
            with process_pool().descriptor(layout.path, layout.guard) as fd:
                # No piece is longer than requested, so the sum is right only if all are complete.
                if read_pieces(fd, out, starts, stops, offsets) == len(out):
                    return
        with process_pool().reading(layout.path, layout.guard) as pread:
            pieces = zip(starts.tolist(), stops.tolist(), offsets.tolist(), strict=True)
            _read_slowly(layout, pread, out.data, pieces, name)
    except H5Error:  # some are also an OSError
        raise
    except OSError as error:
        raise H5FileError(
            f"reading {layout.key!r} from {layout.path!r} failed: {error.strerror}. "
            "Check the disk or the network file system, then resume."
        ) from error


def _read_staged(
    layout: ArrayLayout,
    out: npt.NDArray[np.uint8],
    starts: IntArray,
    stops: IntArray,
    offsets: IntArray,
    counters: Counters,
) -> bool:
    """Read pieces of a file from its mirror on a local disk, and what that lacks from the file; see ``read_stored``.

    Returns False if some piece was short.
    """
    with process_pool().mirror(layout.path, layout.guard) as mirror:
        sizes = stops - starts
        staged = mirror.stage(offsets, sizes, _neighbors(layout), counters)
        here, is_read = staged.is_there, False
        with suppress(OSError):  # of the local disk
            if here.all():
                is_read = read_pieces(mirror.fd, out, starts, stops, offsets) == len(out)
            elif here.any():
                is_read = read_pieces(mirror.fd, out, starts[here], stops[here], offsets[here]) == sizes[here].sum()
        here = mirror.is_unchanged(staged) & is_read
        counters.add(mirror_bytes=int(sizes[here].sum()))
        if here.all():
            return True
        rest = ~here
        pieces = list(zip(starts[rest].tolist(), stops[rest].tolist(), offsets[rest].tolist(), strict=True))
        return mirror.read_origin(out.data, pieces, counters) == int(sizes[rest].sum())


def read_with(
    layout: ArrayLayout,
    offsets: IntArray,
    sizes: IntArray,
    read: Callable[[int], float | None],
    counters: Counters,
) -> float | None:
    """Have a function read pieces of an array's file from a descriptor; return the seconds that reading took.

    Args:
        layout: the array.
        offsets: where in the file each piece begins.
        sizes: bytes of each.
        read: reads them; returns the seconds of reading, None if it failed.
        counters: see ``read_stored``.

    Returns:
        None if ``read`` failed; also if the file is staged, and its mirror does not have all of the pieces.

    Raises:
        H5DataChangedError: the file has changed since it was described.
    """
    if layout.guard.staging is None:
        with process_pool().descriptor(layout.path, layout.guard) as fd:
            return read(fd)
    with process_pool().mirror(layout.path, layout.guard) as mirror:
        began = perf_counter()
        staged = mirror.stage(offsets, sizes, _neighbors(layout), counters)
        waited = perf_counter() - began
        found = read(mirror.fd) if staged.is_there.all() else None
        if found is None or not mirror.is_unchanged(staged).all():
            return None
        counters.add(mirror_bytes=int(sizes.sum()))
        return found + waited


def prefetch_stored(layout: ArrayLayout, offsets: IntArray, sizes: IntArray, counters: Counters) -> None:
    """Begin to fetch pieces of a file that is staged to its mirror. Does not wait, and never raises."""
    with suppress(OSError), process_pool().mirror(layout.path, layout.guard) as mirror:
        mirror.prefetch(offsets, sizes, _neighbors(layout), counters)


def forget_stored(layout: ArrayLayout, offsets: IntArray, sizes: IntArray) -> bool:
    """Drop pieces of a staged file from its mirror, which may be damaged; return whether the file is staged."""
    if layout.guard.staging is None:
        return False
    with process_pool().mirror(layout.path, layout.guard) as mirror:
        mirror.forget(offsets, sizes)
    return True


def _neighbors(layout: ArrayLayout) -> tuple[int, int] | None:
    """Return first and last byte of an array whose rows lie in one piece; None for others.

    Rows are small, and an epoch reads most of them: fetching one alone would take as long as fetching many.
    """
    if (extent := layout.extent) is None:
        return None
    offset, n_bytes = extent
    return offset, offset + n_bytes


def _read_slowly(
    layout: ArrayLayout,
    pread: Callable[[int, int], bytes],
    memory: memoryview,
    pieces: Iterable[tuple[int, int, int]],
    name: Callable[[int, int], str],
) -> None:
    """Read pieces again, of which some were short: the kernel stops at 2 GiB, at a signal, or at the file's end."""
    for piece, (start, stop, offset) in enumerate(pieces):
        at = start
        while at < stop:
            position = offset + at - start
            data = pread(stop - at, position)
            memory[at : at + len(data)] = data
            if not data:
                raise H5CorruptError(
                    f"{layout.path!r} ends inside {name(piece, at - start)} of {layout.key!r}: byte {position:,} was "
                    f"requested, but the file has {size_of(layout.path):,}. It was truncated; copy it again."
                )
            at += len(data)


MAX_PIECES = 256  # per call: the kernel grants each queue about this many, from a machine-wide limit

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents and io_submit, which the C library does not wrap."""

_REQUEST = np.dtype(
    [
        ("data", "u8"),
        ("key", "u4"),
        ("rw_flags", "i4"),
        ("operation", "u2"),  # 0 is a read
        ("priority", "i2"),
        ("fd", "u4"),
        ("address", "u8"),
        ("n_bytes", "u8"),
        ("offset", "i8"),
        ("reserved", "u8"),
        ("flags", "u4"),
        ("event_fd", "u4"),
    ]
)  # struct iocb of linux/aio_abi.h, little endian
_EVENT = np.dtype([("data", "u8"), ("request", "u8"), ("result", "i8"), ("result2", "i8")])


class _Queue:
    """A queue of the kernel for asynchronous reads. For one thread at a time.

    Raises:
        OSError: the kernel grants no queue.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._call: Any = ctypes.CDLL(None, use_errno=True).syscall
        setup, self._destroy, self._getevents, self._submit = map(ctypes.c_long, _CALLS[platform.machine()])
        self._id = ctypes.c_ulong(0)
        if self._call(setup, ctypes.c_long(MAX_PIECES), ctypes.byref(self._id)):
            raise OSError(ctypes.get_errno(), "io_setup")
        requests, events = np.zeros(MAX_PIECES, _REQUEST), np.zeros(MAX_PIECES, _EVENT)
        pointers = requests.ctypes.data + np.arange(MAX_PIECES, dtype=np.uint64) * _REQUEST.itemsize
        self._pointers, self._events = ctypes.c_void_p(pointers.ctypes.data), events.ctypes.data
        self._memory = (requests, events, pointers)  # keeps the memory of both pointers alive
        self._fd, self._address = requests["fd"], requests["address"]
        self._n_bytes, self._offset = requests["n_bytes"], requests["offset"]
        self._result = events["result"]

    def __del__(self) -> None:
        # An interrupted read does not return its queue; destroying the queue waits for the kernel's pending writes.
        if getattr(self, "_id", None) and self.pid == os.getpid():
            self._call(self._destroy, self._id)

    def read(self, fd: int, address: npt.NDArray[np.uint64], n_bytes: IntArray, offset: IntArray) -> int:
        """Read up to ``MAX_PIECES`` pieces; return the bytes that were read, or -1 if the kernel did not accept all."""
        n = len(offset)
        self._fd[:n] = fd
        self._address[:n] = address
        self._n_bytes[:n] = n_bytes
        self._offset[:n] = offset
        count = ctypes.c_long(n)
        taken = self._call(self._submit, self._id, count, self._pointers)
        self._wait(max(0, taken))
        return int(self._result[:n].sum()) if taken == n and self._result[:n].min() >= 0 else -1

    def _wait(self, n: int) -> None:
        """Wait until the kernel has finished all reads that it accepted: it writes to this memory."""
        done = 0
        while done < n:
            left = ctypes.c_long(n - done)
            into = ctypes.c_void_p(self._events + done * _EVENT.itemsize)
            got = self._call(self._getevents, self._id, left, left, into, None)
            if got < 0 and ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), "io_getevents")
            done += max(0, got)


_queues: deque[_Queue] = deque()  # idle queues: as many as threads ever read at the same time
_refused: set[int] = set()  # ids of processes that were refused a queue


def read_pieces(fd: int, out: npt.NDArray[np.uint8], starts: IntArray, stops: IntArray, offsets: IntArray) -> int:
    """Read pieces of a file into memory.

    Args:
        fd: the file.
        out: memory to read into, contiguous.
        starts: where in ``out`` each piece begins, shape ``(n_pieces,)``.
        stops: where in ``out`` each piece ends.
        offsets: where in the file each piece begins.

    Returns:
        Bytes that were read: less than requested if some piece was short.

    Raises:
        OSError: the file cannot be read.
    """
    if len(offsets) == 1:
        return os.preadv(fd, [out.data[int(starts[0]) : int(stops[0])]], int(offsets[0]))
    queue = _take_queue()
    if queue is not None:
        address = out.__array_interface__["data"][0] + starts.astype(np.uint64)
        total = 0
        for first in range(0, len(offsets), MAX_PIECES):
            part = slice(first, first + MAX_PIECES)
            n_bytes = queue.read(fd, address[part], stops[part] - starts[part], offsets[part])
            if n_bytes < 0:
                break
            total += n_bytes
        else:
            _queues.append(queue)
            return total
        _queues.append(queue)
    memory = out.data
    pieces = [[memory[start:stop]] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return sum(map(os.preadv, repeat(fd), pieces, offsets.tolist()))


def _take_queue() -> _Queue | None:
    pid = os.getpid()
    try:
        queue = _queues.pop()
    except IndexError:
        pass
    else:
        if queue.pid == pid:
            return queue
        _queues.clear()  # a forked child does not inherit the kernel's queue
    if pid in _refused or sys.platform != "linux" or platform.machine() not in _CALLS:
        return None
    try:
        return _Queue()
    except OSError:
        _refused.add(pid)
        return None
