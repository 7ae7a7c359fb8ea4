"""A mirror: a local file with the bytes of a source that were needed so far, at the places that they have there.

It has holes for the rest (see ``mirror_file.py``). Each process compares a granule with its checksum before it reads
there first, and again once the file was written to. Nothing here raises because a mirror fails: what it lacks, or has
wrong, is read from the source.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..types import IntArray
from .folder import MirrorFolder
from .granules import (
    GRANULE,
    MARK,
    granules_of,
    is_present,
    marks_at,
    runs_of,
    sums_of,
    widened,
)
from .locks import lock_within, unlock
from .mirror_file import MirrorFile
from .origin import IN_FLIGHT, ObjectOrigin, Origin, fetch_later, fetch_now

__all__ = ["Mirror", "Staged", "requests_for"]

WIDTH = 16  # granules that are requested together if their neighbors will be needed, too
AT_A_TIME = 64  # granules that are compared with their checksums together: a MiB
PATIENCE = 20.0  # seconds to wait for another process or thread that fetches the same bytes


class Staged(NamedTuple):
    """Pieces of a file, and which of them a mirror had at a moment.

    Attributes:
        is_there: whether it had each piece, shape ``(n_pieces,)``.
        granules: see ``granules_of``.
        starts: see there.
        marks: of the granules at that moment.
    """

    is_there: npt.NDArray[np.bool_]
    granules: IntArray
    starts: IntArray
    marks: npt.NDArray[np.uint16]


class Mirror(MirrorFile):
    """A mirror that this process has open. Safe to use from threads.

    Args:
        origin: the source.
        folder: where mirrors are kept; None if that folder cannot be used any more.
        key: name of this version of the source.
    """

    def __init__(self, origin: Origin, folder: MirrorFolder | None, key: str) -> None:
        self.origin = origin
        n_bytes, self._version = origin.head()
        super().__init__(folder, key, n_bytes, GRANULE)
        self._changed = threading.Condition()
        self._busy: set[int] = set()  # granules that threads of this process fetch
        self._is_closing = False
        self._no_room_until = 0.0
        self._pid = os.getpid()
        # A granule was compared with its checksum if it has the number of the file's present state.
        self._checked, self._state, self._written = np.zeros(len(self._marks), np.uint32), 0, -1

    def close(self) -> None:
        """Close the files: now, or once threads that fetch have ended."""
        if self._pid == os.getpid():  # threads do not survive a fork
            with self._changed:
                self._is_closing = True
                if self._busy:
                    return
        self.drop()
        self.origin.close()

    # Reading --------------------------------------------------------------------------------------------------

    def stage(
        self,
        offsets: IntArray,
        sizes: IntArray,
        around: tuple[int, int] | None = None,
        counters: Counters | None = None,
    ) -> Staged:
        """Fetch missing bytes of some pieces, as far as there is room; return a mask of pieces in the mirror.

        Args:
            offsets: where each piece begins, shape ``(n_pieces,)``.
            sizes: bytes of each piece.
            around: first and last byte (exclusive) of an array whose other rows will be needed, too, so that neighbors
                are fetched together; None fetches nothing more.
            counters: counts requests, and the time that is waited for them.

        Raises:
            OSError: the source cannot be read, and it was tried again already.
        """
        granules, starts = granules_of(offsets, np.maximum(sizes, 1))
        marks = self._marks
        if not len(granules) or not len(marks) or granules.max() >= len(marks) or granules.min() < 0:
            return Staged(np.zeros(len(offsets), np.bool_), granules, starts, np.zeros(len(granules), MARK))
        granule_marks = marks[granules]
        has = is_present(granule_marks)
        if not has.all() and self._takes_more:
            began = time.perf_counter()
            errors = self._fetch(np.unique(granules[has == 0]), around, fetch_now, counters)
            if counters is not None:
                counters.add(origin_seconds=time.perf_counter() - began)
            if errors and self.origin.tries_again:
                raise errors[0]
            granule_marks = marks[granules]
            has = is_present(granule_marks)
        if len(unchecked := self._unchecked(granules[has == 1])):
            damaged = self._repaired(unchecked, counters)
            granule_marks = marks[granules]
            has = is_present(granule_marks)
            if len(damaged):
                has[np.isin(granules, damaged)] = 0
        if has.all():
            is_there = np.ones(len(offsets), np.bool_)
        else:
            is_there = np.bitwise_and.reduceat(has, starts).astype(np.bool_)
        return Staged(is_there, granules, starts, granule_marks)

    def prefetch(
        self,
        offsets: IntArray,
        sizes: IntArray,
        around: tuple[int, int] | None = None,
        counters: Counters | None = None,
    ) -> None:
        """Begin to fetch missing bytes of some pieces (see ``stage``). Does not wait."""
        granules, _ = granules_of(offsets, np.maximum(sizes, 1))
        granules = np.unique(granules)
        marks = self._marks
        granules = granules[granules < len(marks)]
        absent_granules = granules[is_present(marks[granules]) == 0]
        if len(absent_granules) and self._takes_more:
            self._fetch(absent_granules, around, fetch_later, counters)

    def forget(self, offsets: IntArray, sizes: IntArray) -> None:
        """Drop pieces that turned out to be wrong: they are fetched again when they are needed next.

        Args:
            offsets: where each piece begins.
            sizes: bytes of each piece.
        """
        granules = np.unique(granules_of(offsets, np.maximum(sizes, 1))[0])
        self._drop_granules(granules[granules < len(self._marks)])

    def is_unchanged(self, staged: Staged) -> npt.NDArray[np.bool_]:
        """Return a mask of the pieces that stayed in the mirror, so that reads in the meantime are valid."""
        marks = self._marks
        if not len(marks) or not staged.is_there.any():
            return np.zeros(len(staged.is_there), np.bool_)
        is_same = marks[staged.granules] == staged.marks
        if is_same.all():
            return staged.is_there
        still: npt.NDArray[np.bool_] = np.logical_and.reduceat(is_same, staged.starts)
        return still & staged.is_there

    def pread(self, n_bytes: int, start: int) -> bytes:
        """Return bytes as ``os.pread`` does, from here or from the source.

        Raises:
            OSError: the source cannot be read.
        """
        n_bytes = min(n_bytes, self.n_bytes - start)
        if n_bytes <= 0:
            return b""
        offsets, sizes = np.array([start]), np.array([n_bytes])
        staged, data = self.stage(offsets, sizes), b""
        if staged.is_there[0]:
            with suppress(OSError):  # of the local disk
                data = os.pread(self.fd, n_bytes, start)
        if len(data) == n_bytes and self.is_unchanged(staged)[0]:
            return data
        memory = memoryview(bytearray(n_bytes))
        return bytes(memory[: self.read_origin(memory, [(0, n_bytes, start)])])

    def read_origin(
        self, memory: memoryview, pieces: Sequence[tuple[int, int, int]], counters: Counters | None = None
    ) -> int:
        """Read pieces from the source, many at a time; return the bytes that were read.

        Args:
            memory: memory to read into.
            pieces: start and stop of each piece in memory, and its place in the source.
            counters: see ``stage``; counts these bytes as missed as well.

        Raises:
            OSError: the source cannot be read.
        """
        began, errors = time.perf_counter(), list[OSError]()
        n_read = [0] * len(pieces)

        def read(numbers: range) -> None:
            try:
                for number in numbers:
                    start, stop, offset = pieces[number]
                    data = self._read(offset, offset + stop - start, counters)
                    memory[start : start + len(data)] = data
                    n_read[number] = len(data)
            except OSError as error:
                errors.append(error)

        n_tasks = min(len(pieces), IN_FLIGHT)
        fetch_now([partial(read, range(at, len(pieces), n_tasks)) for at in range(n_tasks)])
        if counters is not None:
            counters.add(missed_bytes=sum(n_read), origin_seconds=time.perf_counter() - began)
        if errors:
            raise errors[0]
        return sum(n_read)

    # Checksums -------------------------------------------------------------------------------------------------

    def _unchecked(self, granules: IntArray) -> IntArray:
        """Return which granules were not compared with their checksums since the file was written to last."""
        write_time = os.fstat(self.fd).st_mtime_ns
        if write_time != self._written:
            self._written, self._state = write_time, self._state + 1
        is_checked = self._checked[granules] == self._state
        return granules[:0] if is_checked.all() else np.unique(granules[~is_checked])

    def _damaged(self, granules: IntArray) -> IntArray:
        """Compare granules with their checksums; return the granules that differ."""
        marks, sums, state = self._marks, self._sums, self._state
        before, is_right = marks[granules], np.zeros(len(granules), np.bool_)
        for first, stop in runs_of(granules, AT_A_TIME):
            n_bytes, data = min(stop * GRANULE, self.n_bytes) - first * GRANULE, b""
            with suppress(OSError):  # of the local disk
                data = os.pread(self.fd, n_bytes, first * GRANULE)
            if len(data) == n_bytes:
                is_right[np.searchsorted(granules, first) :][: stop - first] = sums_of(data) == sums[first:stop]
        is_same = marks[granules] == before  # if not, readers notice
        self._checked[granules[is_right & is_same]] = state
        damaged: IntArray = granules[~is_right & is_same]
        return damaged

    def _repaired(self, granules: IntArray, counters: Counters | None) -> IntArray:
        """Fetch granules again that differ from their checksums; return the granules that still differ."""
        damaged = self._damaged(granules)
        if not len(damaged):
            return damaged
        self._warn_of_damage(len(damaged))
        self._drop_granules(damaged)
        self._fetch(damaged, None, fetch_now, counters)  # an error of the source is raised when it is read instead
        return self._damaged(damaged[is_present(self._marks[damaged]) == 1])

    def _drop_granules(self, granules: IntArray) -> None:
        """Mark granules as missing. Their disk space stays theirs, for the same bytes."""
        for first, stop in runs_of(granules, AT_A_TIME):
            with suppress(OSError):
                if lock_within(self.fd, PATIENCE, first, stop - first):
                    try:
                        marks = self._marks[first:stop]
                        self._write_marks(first, marks + is_present(marks))
                    finally:
                        unlock(self.fd, first, stop - first)

    def _fetch(
        self,
        missing: IntArray,
        around: tuple[int, int] | None,
        run: Callable[[Sequence[Callable[[], None]]], None],
        counters: Counters | None,
    ) -> list[OSError]:
        """Fetch granules that no thread of this process fetches yet; return the errors of the source.

        Args:
            missing: the granules, in ascending order.
            around: see ``stage``.
            run: runs tasks; if it waits for them, other threads that fetch some of the granules are waited for, too.
            counters: see ``stage``.
        """
        if around is not None:
            near = widened(missing, WIDTH, around)
            near = near[near < len(self._marks)]
            missing = near[is_present(self._marks[near]) == 0]
        with self._changed:
            free = np.array([granule for granule in missing.tolist() if granule not in self._busy], dtype=np.int64)
            self._busy.update(free.tolist())
        errors, runs = list[OSError](), runs_of(free, self.origin.longest)
        run([partial(self._fetch_run, first, stop, errors, counters) for first, stop in runs])
        if run is fetch_now and len(free) < len(missing):
            self._wait_for(set(missing.tolist()))
        return errors

    def _wait_for(self, granules: set[int]) -> None:
        end = time.monotonic() + PATIENCE
        with self._changed:
            while not self._busy.isdisjoint(granules) and (seconds_left := end - time.monotonic()) > 0:
                self._changed.wait(seconds_left)

    def _fetch_run(self, first: int, stop: int, errors: list[OSError], counters: Counters | None) -> None:
        """Fetch neighbors that the mirror lacks, in a lock that keeps other processes from doing the same."""
        try:
            try:  # reading the source again raises its error
                has_all = partial(self._has, first, stop)
                if lock_within(self.fd, PATIENCE, first, stop - first, has_all):
                    try:
                        self._fetch_locked(first, stop, counters)
                    finally:
                        unlock(self.fd, first, stop - first)
                elif not has_all():  # the process that has it locked was stopped
                    self._no_room_until = time.monotonic() + PATIENCE
            except OSError as error:
                errors.append(error)
        finally:
            with self._changed:
                self._busy.difference_update(range(first, stop))
                self._changed.notify_all()
                is_last = self._is_closing and not self._busy
            if is_last:
                self.close()

    def _fetch_locked(self, first: int, stop: int, counters: Counters | None) -> None:
        absent_granules = np.flatnonzero(is_present(self._marks[first:stop]) == 0) + first
        for low, high in runs_of(absent_granules, self.origin.longest):
            if self._folder is None or not self._takes_more:
                return
            end = min(high * GRANULE, self.n_bytes)
            data = self._read(low * GRANULE, end, counters)
            if len(data) != end - low * GRANULE or self.origin.head() != (self.n_bytes, self._version):
                return  # it was changed: the comparison with the change guard raises
            put = partial(self._put, low, data)
            if (seconds := self._folder.write(self.fd, marks_at(self.n_bytes), len(data), put)) > 0:
                self._no_room_until = time.monotonic() + seconds
                return

    @property
    def _takes_more(self) -> bool:
        return self._folder is not None and self._folder.takes_writes and time.monotonic() >= self._no_room_until

    def _has(self, first: int, stop: int) -> bool:
        return bool(is_present(self._marks[first:stop]).all())

    def _read(self, start: int, stop: int, counters: Counters | None) -> memoryview:
        began = time.perf_counter()
        data = self.origin.read(start, stop)
        if counters is not None:
            counters.add_request(len(data), time.perf_counter() - began)
        return data


def requests_for(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Return how many requests fetch pieces of an object at most, and their bytes, if each is fetched once."""
    first, n_bytes = np.array([offsets, sizes], dtype=np.int64).reshape(2, -1)
    if not len(first):
        return 0, 0
    counts = (first + np.maximum(n_bytes, 1) - 1) // GRANULE + 1 - first // GRANULE
    n_granules = len(np.unique(granules_of(first, np.maximum(n_bytes, 1))[0]))
    return int((-(-counts // ObjectOrigin.longest)).sum()), n_granules * GRANULE
