"""Open files of this process: opened on first use, bounded in number, never shared with a forked child.

A path says which file is opened only at that moment, and what was looked at before may have been another one. So every
handle is asked for with the guard of the file that is meant, and what is open is compared with it: nothing is read from
another file, nor from this one as it was before the guard.
"""

from __future__ import annotations

import os
import resource
import stat
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..errors import H5DataChangedError, H5FileError
from ..options import FileOptions
from .checks import ensure_filters
from .identity import ChangeGuard, looks_of
from .layout import ArrayLayout
from .open import ArrayHandle, before_opening, find_array, open_h5

__all__ = [
    "MAX_H5",
    "HandlePool",
    "OpenOptions",
    "close_when_collected",
    "drop_inherited",
    "process_pool",
]

MAX_H5 = 16
"""Files that a process keeps open through the HDF5 library."""


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a file is opened through the HDF5 library (see ``open_h5``)."""

    rdcc_nbytes: int | None = None
    rdcc_nslots: int | None = None
    rdcc_w0: float | None = None
    trust: FileOptions = field(default_factory=FileOptions)

    @property
    def swmr(self) -> bool:
        """Whether the file has a live writer."""
        return self.trust.swmr


class H5Handle:
    """An open file and the arrays that were looked up in it."""

    def __init__(self, path: str, options: OpenOptions) -> None:
        self._trust = options.trust
        self._file = open_h5(
            path,
            rdcc_nbytes=options.rdcc_nbytes,
            rdcc_nslots=options.rdcc_nslots,
            rdcc_w0=options.rdcc_w0,
            swmr=options.swmr,
        )
        self._arrays: dict[str, Any] = {}
        self.looks = looks_of(self._file)

    def array(self, layout: ArrayLayout) -> Any:
        """The h5py dataset of a layout, looked up through the door once."""
        array = self._arrays.get(layout.name)
        if array is None:
            ensure_filters(layout.filters, layout.path, layout.key)
            found: ArrayHandle = find_array(self._file, layout.name, self._trust)
            array = self._arrays[layout.name] = found.array
        return array

    def close(self) -> None:
        self._arrays.clear()
        with suppress(RuntimeError, OSError):  # a damaged file may complain only now; it is closed all the same
            self._file.close()


class Descriptor:
    """A plain file descriptor, for reading by position without the HDF5 library."""

    def __init__(self, path: str) -> None:
        try:
            # Not waiting for a writer, where a FIFO has taken the file's place; without effect on a file.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise H5FileError(
                f"{path!r} cannot be opened: {error.strerror}. Check that it is still there and `ulimit -n`."
            ) from error

        self.looks = os.fstat(self.fd)
        if not stat.S_ISREG(self.looks.st_mode):
            os.close(self.fd)
            raise H5FileError(f"{path!r} is not a regular file any more. Put the file back, and start again.")

    def close(self) -> None:
        os.close(self.fd)


_Key: TypeAlias = tuple[str, OpenOptions | None]
"""A file, and how it is open: through the HDF5 library, or None to be read by position."""


@dataclass
class _Entry:
    handle: H5Handle | Descriptor
    guard: ChangeGuard
    users: int = 0
    doomed: bool = False


class HandlePool:
    """Least recently used handles are closed when there are more than ``most``; one in use never is.

    Safe to use from threads. A handle belongs to the process that opened it.

    Args:
        most: handles kept open. The default is a quarter of the process's descriptor limit, since the
            files of data sets may be thousands and the limit is often 1,024.
        most_h5: of these, files that are open through the HDF5 library. They take memory: 0.7 MiB each of ten small
            arrays, most of it a table that the library makes for every file.
    """

    def __init__(self, most: int | None = None, most_h5: int = MAX_H5) -> None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = most or max(8, min(512, (1024 if soft < 0 else soft) // 4))
        self.most_h5 = min(self.most, most_h5)
        self._n_h5 = 0
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._lock: Any = threading.RLock()
        self._unused: deque[frozenset[str]] = deque()  # paths whose handles are to be closed

    def __len__(self) -> int:
        return len(self._entries)

    def h5(self, path: str, options: OpenOptions, guard: ChangeGuard) -> AbstractContextManager[H5Handle]:
        """A file open through the HDF5 library, held open inside the ``with`` block.

        Args:
            path: the file.
            options: how it is opened.
            guard: of the file that is meant.

        Raises:
            H5DataChangedError: the file is another one by now, or was when the block began or ended one of those that
                the library opens for it.
        """
        use = _Use(self, (path, options), guard)
        return _UseWithOthers(use, self, guard) if guard.others else use

    def descriptor(self, path: str, guard: ChangeGuard) -> AbstractContextManager[int]:
        """A descriptor of a file, held open inside the ``with`` block (see ``h5``)."""
        return _Use(self, (path, None), guard)

    def _take(self, key: _Key, guard: ChangeGuard) -> _Entry:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.guard is not guard:
                if guard.takes(entry.handle.looks):
                    entry.guard = guard
                else:  # it was opened when another file had this name, or this one was another
                    self._close(key)
                    entry = None
            if entry is None:
                entry = self._entries[key] = _Entry(_open(key, guard), guard)
                self._n_h5 += key[1] is not None
                self._evict(keep=key)
            else:
                self._entries.move_to_end(key)
            entry.users += 1
            return entry

    def _give_back(self, key: _Key, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
            if entry.doomed and not entry.users:
                entry.handle.close()
            self._evict(keep=key)  # more may have been in use at a time than are kept
        if self._unused:
            self._close_unused()

    def _evict(self, keep: _Key) -> None:
        if len(self._entries) <= self.most and self._n_h5 <= self.most_h5:
            return
        idle = [key for key, entry in self._entries.items() if not entry.users and key != keep]
        of_h5 = [key for key in idle if key[1] is not None][: max(0, self._n_h5 - self.most_h5)]
        others = [key for key in idle if key not in of_h5]
        for key in of_h5 + others[: max(0, len(self._entries) - len(of_h5) - self.most)]:
            self._drop(key).handle.close()

    def _drop(self, key: _Key) -> _Entry:
        self._n_h5 -= key[1] is not None
        return self._entries.pop(key)

    def close_replaced(self, path: str) -> None:
        """Closes the handles of a file that is another one by now: its name leads elsewhere, or it was written to.

        Under any of its names: the HDF5 library takes what it has open of a file for that of another name, too.
        """
        if not self._entries:
            return
        try:
            now = os.stat(path)
        except OSError:
            self.close(path)
            return
        with self._lock:
            for key, entry in list(self._entries.items()):
                looks = entry.handle.looks
                is_same = looks.st_ino == now.st_ino and looks.st_dev == now.st_dev
                if (is_same or key[0] == path) and _distinct(looks) != _distinct(now):
                    self._close(key)

    def close(self, path: str | None = None) -> None:
        """Closes the handles of one file, or all; one in use is closed when its user is done."""
        with self._lock:
            for key in [key for key in self._entries if path in (None, key[0])]:
                self._close(key)
        self._close_unused()

    def close_soon(self, paths: Sequence[str]) -> None:
        """Close the handles of some files: now, or after the present use of the pool.

        For finalizers. The garbage collector runs them at any moment, also while this thread is inside the pool.

        Args:
            paths: the files.
        """
        self._unused.append(frozenset(paths))
        self._close_unused()

    def _close_unused(self) -> None:
        # A thread that has the lock comes here after it is released; this thread may have it itself.
        while self._unused and not self._lock._is_owned() and self._lock.acquire(blocking=False):
            try:
                while self._unused:
                    paths = self._unused.popleft()
                    for key in [key for key in self._entries if key[0] in paths]:
                        self._close(key)
            finally:
                self._lock.release()

    def _close(self, key: _Key) -> None:
        entry = self._drop(key)
        entry.doomed = True
        if not entry.users:
            entry.handle.close()


def _open(key: _Key, guard: ChangeGuard) -> H5Handle | Descriptor:
    """Opens a file, which has to be the one that is meant."""
    path, options = key
    handle = Descriptor(path) if options is None else H5Handle(path, options)
    try:
        guard.compare(handle.looks)
    except H5DataChangedError:
        handle.close()
        raise
    return handle


def _distinct(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class _Use:
    """A handle that is held open for a while. A class, as each task takes one: 1 microsecond, not 3."""

    __slots__ = ("_entry", "_guard", "_key", "_pool")

    def __init__(self, pool: HandlePool, key: _Key, guard: ChangeGuard) -> None:
        self._pool, self._key, self._guard = pool, key, guard

    def __enter__(self) -> Any:
        self._entry = self._pool._take(self._key, self._guard)
        handle = self._entry.handle
        return handle.fd if isinstance(handle, Descriptor) else handle

    def __exit__(self, *error: object) -> None:
        self._pool._give_back(self._key, self._entry)


class _UseWithOthers:
    """The same where the library opens other files by name, when it comes to them, and keeps them open.

    Nobody sees which ones those are. They are compared before and after: only while rows are read can another file have
    been there. The handle goes where one is.
    """

    def __init__(self, use: _Use, pool: HandlePool, guard: ChangeGuard) -> None:
        self._use, self._pool, self._guard = use, pool, guard

    def __enter__(self) -> Any:
        self._check()
        return self._use.__enter__()

    def __exit__(self, *error: object) -> None:
        self._use.__exit__()
        self._check()

    def _check(self) -> None:
        try:
            for other in self._guard.others:
                other.check()
        except H5DataChangedError:
            self._pool.close(self._guard.path)
            raise


_pools: dict[int, HandlePool] = {}  # by process id: a forked child must not use its parent's handles


def process_pool() -> HandlePool:
    """The pool of this process, made on first use."""
    pool = _pools.get(os.getpid())
    if pool is None:
        drop_inherited()
        pool = _pools.setdefault(os.getpid(), HandlePool())
    return pool


def close_when_collected(owner: object, paths: Sequence[str]) -> None:
    """Close this process's handles of some files when an object is collected; nothing is done when Python ends.

    Other objects that read the same files open them again at their next read.

    Args:
        owner: the object.
        paths: the files that it reads.
    """
    weakref.finalize(owner, _close_soon, os.getpid(), paths).atexit = False


def _close_soon(pid: int, paths: Sequence[str]) -> None:
    # A forked child has a copy of the object, and must not touch the handles of its parent.
    if pid == os.getpid() and (pool := _pools.get(pid)) is not None:
        pool.close_soon(paths)


def _close_replaced(path: str) -> None:
    if (pool := _pools.get(os.getpid())) is not None:
        pool.close_replaced(path)


# What the HDF5 library still has open of a file, it would take for what is opened now, with all that it has read of it.
before_opening.append(_close_replaced)


def drop_inherited() -> None:
    """Closes this process's copies of handles that a parent process had open when it forked."""
    for pid in [pid for pid in list(_pools) if pid != os.getpid()]:
        inherited = _pools.pop(pid, None)
        if inherited is None:
            continue  # another thread was faster
        inherited._lock = threading.RLock()  # the parent's lock may have been held by a thread that is not here
        for entry in inherited._entries.values():
            entry.handle.close()
