"""Read many pieces of a file together, so that a disk or a server has many requests to work on.

A disk that is asked for one small piece after the other gives a tenth of what it can, and a network file system less.
So all pieces are requested before the first is waited for: the kernel copies those in its page cache, and begins to
fetch the others. If each read takes long all the same, a team of threads reads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import islice, repeat
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..counters import worker_count, worker_number
from ..jit import c_call, compiled
from ..threads import HelperThreads
from ..types import IntArray

__all__ = ["MIN_COMPILED", "advise_pieces", "compile_reads", "forget_pieces", "is_cached", "read_pieces"]

IN_FLIGHT = 64
"""Maximum number of simultaneous reads of a rank: more are not faster on a local disk, and 10 ms each make 6,400/s."""

LEAST_IN_FLIGHT = 4  # of a worker process

MIN_COMPILED = 1 << 15
"""Pieces from which on compiled loops are worth half a second: each saves up to a microsecond, in each epoch."""

PROBE_EVERY = 32  # reads of a slow file system, which may be cached by then
PROBED = 8  # pieces by which the pace is judged
SLOW = 100e-6  # seconds a piece: from the page cache it takes one or two, from a local disk with many requests 12
SLICES = 4  # for each read at a time, so that threads end together


def read_pieces(fd: int, out: npt.NDArray[np.uint8], starts: IntArray, stops: IntArray, offsets: IntArray) -> int:
    """Read pieces of a file into memory.

    Args:
        fd: the file.
        out: memory to read into, contiguous.
        starts: where in ``out`` each piece begins, shape ``(n_pieces,)``.
        stops: where in ``out`` each piece ends.
        offsets: where in the file each piece begins.

    Returns:
        Bytes that were read: less than requested if some piece was short, or could not be read. Of compiled code there
        is no other sign of an error.

    Raises:
        OSError: the file cannot be read.
    """
    if not len(offsets):
        return 0
    if len(offsets) == 1:
        return os.preadv(fd, [out.data[int(starts[0]) : int(stops[0])]], int(offsets[0]))
    loops = _compiled[0] if _compiled else _loops_after(len(offsets))
    pieces: _FilePieces
    if loops is None:
        pieces = _PlainPieces(fd, out, starts, stops, offsets)
    else:
        pieces = _CompiledPieces(loops, fd, out, starts, stops, offsets)
    device = os.fstat(fd).st_dev
    remaining, n_bytes = np.arange(len(offsets)), 0
    is_slow = is_known = _is_known_as_slow(device)
    if device not in _without_nowait and not is_slow:
        n_bytes, remaining, is_slow = pieces.read_cached()
        if len(remaining) == len(offsets) and not _has_nowait(fd):
            _without_nowait.add(device)
    if len(remaining) > PROBED and not is_slow:
        n_probed, is_slow = _probe(pieces, remaining[:PROBED])
        n_bytes, remaining = n_bytes + n_probed, remaining[PROBED:]
    if not is_slow or len(remaining) < 2:
        return n_bytes + (pieces.wait(remaining) if len(remaining) else 0)
    if not is_known:
        _slow_devices[device] = PROBE_EVERY
    return n_bytes + _read_by_team(pieces, remaining)


def _is_known_as_slow(device: int) -> bool:
    """Return whether each read of a file system took long the last time; it is probed again now and then."""
    n_left = _slow_devices.get(device, 0)
    if n_left > 1:
        _slow_devices[device] = n_left - 1
    else:
        _slow_devices.pop(device, None)
    return n_left > 0


def _probe(pieces: _FilePieces, numbers: IntArray) -> tuple[int, bool]:
    """Read some pieces; return their bytes, and whether most took long: other threads may have had Python's lock."""
    n_bytes, times = 0, []
    for at in range(len(numbers)):
        began = perf_counter()
        n_bytes += pieces.wait(numbers[at : at + 1])
        times.append(perf_counter() - began)
    return n_bytes, _are_slow(times)


def _are_slow(times: list[float]) -> bool:
    """Return whether most reads took long, whichever waited for Python's lock besides."""
    return sorted(times)[len(times) // 2] > SLOW


def advise_pieces(fd: int, offsets: IntArray, sizes: IntArray) -> bool:
    """Have the kernel fetch pieces to its page cache, unless it has the first and the last. Does not wait for them.

    Not on file systems that do not report cached pages, such as network file systems: they may ignore advice while they
    are busy, or block the caller. There, as many threads wait for reads (see ``ReadPace``).

    Args:
        fd: the file.
        offsets: where each piece begins, shape ``(n_pieces,)``.
        sizes: bytes of each.

    Returns:
        Whether they are being fetched.

    Raises:
        OSError: the file system takes no advice.
    """
    if not len(offsets) or not _WILLNEED:
        return False
    first = is_cached(fd, int(offsets[0]))
    if first is None or (first and is_cached(fd, int(offsets[-1] + sizes[-1] - 1))):
        return False
    if _compiled and (loops := _compiled[0]) is not None:
        loops.advise(_system_functions(), fd, np.ascontiguousarray(sizes), np.ascontiguousarray(offsets))
    else:
        _advise(fd, offsets, sizes, _WILLNEED)
    return True


def are_cached(fd: int, offsets: IntArray, sizes: IntArray) -> bool:
    """Return whether the page cache has the ends of the first and the last piece; False if that is unknown.

    Takes four microseconds. Arguments are as above.
    """
    if not len(offsets):
        return True
    ends = (offsets[0], offsets[-1] + sizes[-1] - 1) if len(offsets) > 1 else (offsets[0] + sizes[0] - 1,)
    return all(is_cached(fd, int(end)) for end in ends)


def forget_pieces(fd: int, offsets: IntArray, sizes: IntArray) -> None:
    """Have pieces leave the page cache; a page that is also of a neighbor stays. Arguments are as above."""
    if _DONTNEED:
        _advise(fd, offsets, sizes, _DONTNEED)


def _advise(fd: int, offsets: IntArray, sizes: IntArray, advice: int) -> None:
    for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
        os.posix_fadvise(fd, offset, size, advice)


def is_cached(fd: int, place: int) -> bool | None:
    """Return whether a byte of a file is in the page cache; None if the file system does not know."""
    if not _NOWAIT:
        return None
    try:
        return os.preadv(fd, [bytearray(1)], place, _NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError as error:
        return None if error.errno in (errno.EOPNOTSUPP, errno.EINVAL) else False


class _ReadLoops(NamedTuple):
    """Compiled loops over pieces.

    Attributes:
        read_cached: read pieces that are in the page cache.
        wait: read them one after the other.
        advise: have the kernel fetch them.
    """

    read_cached: Callable[..., tuple[int, int, bool]]
    wait: Callable[..., int]
    advise: Callable[..., None]


# Ways to read -----------------------------------------------------------------------------------------------------


class _FilePieces(Protocol):
    """Pieces of a file, and where in memory they go."""

    def read_cached(self) -> tuple[int, IntArray, bool]:
        """Read pieces that are in the page cache, and ask the kernel to fetch the others.

        Returns:
            The bytes read, the remaining pieces, and whether advice was slow, so that it stopped early.
        """
        ...

    def wait(self, numbers: IntArray) -> int:
        """Read pieces one after the other; return their bytes, of fewer after one that cannot be read."""
        ...


_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_WILLNEED = getattr(os, "POSIX_FADV_WILLNEED", 0)
_DONTNEED = getattr(os, "POSIX_FADV_DONTNEED", 0)
_without_nowait: set[int] = set()  # file systems that do not report cached pages
_slow_devices: dict[int, int] = {}  # file systems of which each read took long, and reads until they are probed again


def _has_nowait(fd: int) -> bool:
    """Return whether a file system reports cached pages."""
    return is_cached(fd, 0) is not None


class _PlainPieces:
    """Pieces that Python's own functions read, without the interpreter's lock during each."""

    def __init__(
        self, fd: int, out: npt.NDArray[np.uint8], starts: IntArray, stops: IntArray, offsets: IntArray
    ) -> None:
        self._fd, self._offsets = fd, offsets.tolist()
        memory = out.data
        self._memory = [memory[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def read_cached(self) -> tuple[int, IntArray, bool]:
        """See ``_FilePieces``."""
        memory, offsets, sizes = self._memory, self._offsets, list[int]()
        reads = map(os.preadv, repeat(self._fd), ([piece] for piece in memory), offsets, repeat(_NOWAIT))
        times, is_slow = list[float](), False
        while len(sizes) < len(memory) and not is_slow:
            began = perf_counter()
            try:
                sizes.extend(islice(reads, 1 if len(sizes) < PROBED else None))  # up to one that fails
            except OSError:
                sizes.append(0)
            times.append(perf_counter() - began)
            is_slow = len(sizes) == PROBED and _are_slow(times)
        remaining = [at for at, size in enumerate(sizes) if size < len(memory[at])]
        for at in remaining:
            sizes[at] = 0
            with suppress(OSError):
                os.posix_fadvise(self._fd, offsets[at], len(memory[at]), _WILLNEED)
        return sum(sizes), np.array([*remaining, *range(len(sizes), len(memory))], np.int64), is_slow

    def wait(self, numbers: IntArray) -> int:
        """See ``_FilePieces``."""
        return sum(os.preadv(self._fd, [self._memory[at]], self._offsets[at]) for at in numbers.tolist())


class _CompiledPieces:
    """Pieces that compiled loops read, without the interpreter's lock."""

    def __init__(
        self,
        loops: _ReadLoops,
        fd: int,
        out: npt.NDArray[np.uint8],
        starts: IntArray,
        stops: IntArray,
        offsets: IntArray,
    ) -> None:
        self._loops, self._fd, self._out = loops, fd, out  # the memory has to stay
        self._offsets = np.ascontiguousarray(offsets)
        self._memory = np.empty((len(offsets), 2), np.int64)  # as preadv takes it: address and bytes
        self._memory[:, 0] = out.__array_interface__["data"][0] + starts
        self._memory[:, 1] = stops - starts

    def read_cached(self) -> tuple[int, IntArray, bool]:
        """See ``_FilePieces``."""
        remaining = np.empty(len(self._offsets), np.int64)
        n_bytes, n_left, is_slow = self._loops.read_cached(
            _system_functions(), self._fd, self._memory, self._offsets, remaining
        )
        return n_bytes, remaining[:n_left], bool(is_slow)

    def wait(self, numbers: IntArray) -> int:
        """See ``_FilePieces``."""
        n_bytes: int = self._loops.wait(_system_functions(), self._fd, self._memory, self._offsets, numbers)
        return n_bytes


_compiled: list[_ReadLoops | None] = []  # one entry once it was tried
_n_plain = 0  # pieces that were read without compiled loops


def compile_reads() -> None:
    """Compile the loops that read pieces, if that is possible. Loading the machine code takes half a second.

    Forked worker processes inherit the loops of their parent; other workers have none.
    """
    if not _compiled and worker_number() is None:
        _compiled.append(_compile_read_loops() if _NOWAIT else None)


def _loops_after(n_pieces: int) -> _ReadLoops | None:
    """Return compiled loops once so many pieces are read that they are worth compiling; None before that."""
    global _n_plain  # state of the process
    _n_plain += n_pieces
    if _n_plain > MIN_COMPILED:
        compile_reads()
    return _compiled[0] if _compiled else None


def _compile_read_loops() -> _ReadLoops | None:
    functions = _system_functions()
    if functions is None or (read_cached := compiled(_cached_loop())) is None:
        return None
    if (wait := compiled(_waiting_loop())) is None or (advise := compiled(_advising_loop())) is None:
        return None
    memory, nothing = np.empty((0, 2), np.int64), np.empty(0, np.int64)
    read_cached(functions, 0, memory, nothing, nothing)
    wait(functions, 0, memory, nothing, nothing)
    advise(functions, 0, nothing, nothing)
    return _ReadLoops(read_cached, wait, advise)


_FUNCTIONS = ("pread", "preadv2", "posix_fadvise", "clock_gettime")


@cache
def _system_functions() -> tuple[int, ...] | None:
    """Return the addresses of the system functions that the loops call; None if one is missing."""
    library = ctypes.CDLL(None)
    try:
        return tuple(ctypes.cast(library[name], ctypes.c_void_p).value or 0 for name in _FUNCTIONS)
    except AttributeError:
        return None


def _cached_loop() -> Callable[..., tuple[int, int, bool]]:
    call, monotonic, probed, slow = c_call(), time.CLOCK_MONOTONIC, PROBED, int(PROBED * SLOW * 1e9)
    nowait, will_need = _NOWAIT, _WILLNEED

    def loop(
        functions: tuple[int, ...], fd: int, memory: IntArray, offsets: IntArray, left: IntArray
    ) -> tuple[int, int, bool]:
        n_bytes = n_left = 0
        is_slow = False
        clock = np.zeros(4, np.int64)  # seconds and nanoseconds, before and after the first pieces
        call(functions[3], (np.int32(monotonic), clock.ctypes.data))
        for at in range(len(offsets)):
            if at == probed:
                call(functions[3], (np.int32(monotonic), clock.ctypes.data + 16))
                is_slow = (clock[2] - clock[0]) * 1_000_000_000 + clock[3] - clock[1] > slow
            n, vector = memory[at, 1], memory.ctypes.data + 16 * at
            if not is_slow:
                if call(functions[1], (np.int32(fd), vector, np.int32(1), offsets[at], np.int32(nowait))) == n:
                    n_bytes += n
                    continue
                call(functions[2], (np.int32(fd), offsets[at], n, np.int32(will_need)))
            left[n_left] = at
            n_left += 1
        return n_bytes, n_left, is_slow

    return loop


def _waiting_loop() -> Callable[..., int]:
    call = c_call()

    def loop(functions: tuple[int, ...], fd: int, memory: IntArray, offsets: IntArray, numbers: IntArray) -> int:
        n_bytes = 0
        for at in numbers:
            n = call(functions[0], (np.int32(fd), memory[at, 0], memory[at, 1], offsets[at]))
            if n < 0:
                break
            n_bytes += n
        return n_bytes

    return loop


def _advising_loop() -> Callable[..., None]:
    call, will_need = c_call(), _WILLNEED

    def loop(functions: tuple[int, ...], fd: int, sizes: IntArray, offsets: IntArray) -> None:
        for at in range(len(offsets)):
            call(functions[2], (np.int32(fd), offsets[at], sizes[at], np.int32(will_need)))

    return loop


# A team of threads -------------------------------------------------------------------------------------------------


class _Request:
    """Slices of pieces that several threads read.

    Args:
        pieces: read each slice.
        slices: the slices.
    """

    def __init__(self, pieces: _FilePieces, slices: list[IntArray]) -> None:
        self._pieces, self._slices = pieces, deque(slices)
        self._n_readers = 0
        self._changed = threading.Condition()
        self._n_bytes = 0
        self._error: BaseException | None = None

    def help(self) -> None:
        """Read slices until none are left."""
        with self._changed:
            self._n_readers += 1
        n_bytes, error = 0, None
        try:
            while True:
                n_bytes += self._pieces.wait(self._slices.popleft())
        except IndexError:
            pass
        except BaseException as raised:
            error = raised
            self._slices.clear()
        with self._changed:
            self._n_readers -= 1
            self._n_bytes += n_bytes
            self._error = self._error or error
            self._changed.notify_all()

    def finish(self) -> int:
        """Help, and wait for the other threads; return the number of bytes read, or raise their error."""
        try:
            self.help()
        finally:
            self._slices.clear()  # after an interrupt
            with self._changed:
                while self._n_readers:  # they write to the caller's memory
                    self._changed.wait()
        if self._error is not None:
            raise self._error
        return self._n_bytes


_team = HelperThreads("lightning_h5-read", IN_FLIGHT, idle_seconds=1.0)


def _read_by_team(pieces: _FilePieces, numbers: IntArray) -> int:
    """Read pieces with many threads; return their bytes."""
    n_readers = min(len(numbers), max(LEAST_IN_FLIGHT, IN_FLIGHT // (worker_count() or 1)))
    request = _Request(pieces, np.array_split(numbers, min(len(numbers), SLICES * n_readers)))
    for _ in range(n_readers - 1):
        _team.put(request.help)
    return request.finish()
