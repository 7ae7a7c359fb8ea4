"""Open files of this process: opened on first use, bounded in number, never shared with a forked child.

A handle is a file as it is read: through the HDF5 library, by position, or from a mirror.

A path can lead to another file each time it is opened. So every handle is requested with the change guard of the file
that was described, and compared with it: nothing is read from another file, nor from an outdated handle.
"""

from __future__ import annotations

import os
import resource
import stat
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ..errors import H5DataChangedError, H5FileError, H5ValueError
from ..options import FileOptions, StagingOptions
from ..staging import (
    DecodedArray,
    DecodedMirror,
    Mirror,
    MirrorFolder,
    ObjectStatus,
    PosixOrigin,
    ensure_folder,
    is_url,
    mirror_name,
    mirror_of,
    use_staging,
)
from .change_guard import ChangeGuard, stat_of
from .checks import ensure_filters
from .layout import ArrayLayout
from .links import find_array
from .open import before_opening, open_h5

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
    """How a file is opened through the HDF5 library (see ``open_h5``), and read.

    Attributes:
        gives_back: drop bytes from the system's page cache once they are read.
    """

    rdcc_nbytes: int | None = None
    rdcc_nslots: int | None = None
    rdcc_w0: float | None = None
    files: FileOptions = field(default_factory=FileOptions)
    gives_back: bool = False

    @property
    def swmr(self) -> bool:
        """Whether the file has a live writer."""
        return self.files.swmr


_FileKey: TypeAlias = tuple[str, OpenOptions | StagingOptions | DecodedArray | None]
"""A file, and how it is opened: through the HDF5 library, by a descriptor (None), with a mirror, or with a mirror of
the decoded chunks of an array."""


@dataclass
class _Entry:
    handle: H5Handle | Descriptor | StagedFile | DecodedFile
    guard: ChangeGuard
    users: int = 0
    doomed: bool = False


class HandlePool:
    """Keeps handles open; closes the least recently used ones if there are too many. Handles in use stay open.

    Safe to use from threads. A handle belongs to the process that opened it.

    Args:
        max_handles: handles kept open. Defaults to a quarter of the process's descriptor limit, which is often 1,024.
        max_h5: of these, files that are open through the HDF5 library. Each takes about 0.7 MiB of memory.
    """

    def __init__(self, max_handles: int | None = None, max_h5: int = MAX_H5) -> None:
        soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.max_handles = max_handles or max(8, min(512, (1024 if soft_limit < 0 else soft_limit) // 4))
        self.max_h5 = min(self.max_handles, max_h5)
        self._n_h5 = 0
        self._entries: OrderedDict[_FileKey, _Entry] = OrderedDict()
        # Those that are not in use, the least recently used first: all, and those open through the HDF5 library.
        self._idle: OrderedDict[_FileKey, None] = OrderedDict()
        self._idle_h5: OrderedDict[_FileKey, None] = OrderedDict()
        self._lock: Any = threading.RLock()
        self._unused: deque[frozenset[str]] = deque()  # paths whose handles are to be closed

    def __len__(self) -> int:
        return len(self._entries)

    def h5(self, path: str, options: OpenOptions, guard: ChangeGuard) -> AbstractContextManager[H5Handle]:
        """Return a file open through the HDF5 library, which stays open inside the ``with`` block.

        Args:
            path: the file.
            options: how it is opened.
            guard: change guard of the file that was described.

        Raises:
            H5DataChangedError: the file has changed, or one of the other files that the library opens for it.
        """
        use = _Use(self, (path, options), guard)
        return _UseWithOthers(use, self, guard) if guard.others else use

    def descriptor(self, path: str, guard: ChangeGuard) -> AbstractContextManager[int]:
        """Return a descriptor of a file, which stays open inside the ``with`` block (see ``h5``)."""
        return _Use(self, (path, None), guard)

    def mirror(self, path: str, guard: ChangeGuard) -> AbstractContextManager[Mirror]:
        """Return the mirror of a file that is staged, which stays open inside the ``with`` block (see ``h5``)."""
        return _Use(self, (path, guard.staging), guard)

    def decoded(self, path: str, guard: ChangeGuard, array: DecodedArray) -> AbstractContextManager[DecodedMirror]:
        """Return the mirror of decoded chunks of an array, which stays open inside the ``with`` block (see ``h5``)."""
        return _Use(self, (path, array), guard)

    @contextmanager
    def reading(self, path: str, guard: ChangeGuard) -> Iterator[Callable[[int, int], bytes]]:
        """Return a function that reads bytes at a position of a file or an object (see ``h5``)."""
        if guard.is_remote:
            with self.mirror(path, guard) as mirror:
                yield mirror.pread
        else:
            with self.descriptor(path, guard) as fd:
                yield partial(os.pread, fd)

    def _take(self, key: _FileKey, guard: ChangeGuard) -> _Entry:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.guard is not guard:
                if guard.accepts(entry.handle.stat):
                    entry.guard = guard
                else:  # outdated, or of another file with this name
                    self._close(key)
                    entry = None
            if entry is None:
                entry = self._entries[key] = _Entry(_open_file(key, guard), guard)
                self._n_h5 += isinstance(key[1], OpenOptions)
                self._evict(keep=key)
            else:
                self._entries.move_to_end(key)
                self._idle.pop(key, None)
                self._idle_h5.pop(key, None)
            entry.users += 1
            return entry

    def _give_back(self, key: _FileKey, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
            if not entry.users:
                if entry.doomed:
                    entry.handle.close()
                else:
                    self._idle[key] = None
                    if isinstance(key[1], OpenOptions):
                        self._idle_h5[key] = None
            self._evict(keep=key)  # more may have been in use than are kept open
        if self._unused:
            self._close_unused()

    def _evict(self, keep: _FileKey) -> None:
        self._close_idle(self._idle_h5, self._n_h5 - self.max_h5, keep)
        self._close_idle(self._idle, len(self._entries) - self.max_handles, keep)

    def _close_idle(self, idle: OrderedDict[_FileKey, None], n: int, keep: _FileKey) -> None:
        """Close up to ``n`` handles, the least recently used first."""
        while n > 0 and (key := next((key for key in idle if key != keep), None)) is not None:
            self._drop(key).handle.close()
            n -= 1

    def _drop(self, key: _FileKey) -> _Entry:
        self._n_h5 -= isinstance(key[1], OpenOptions)
        self._idle.pop(key, None)
        self._idle_h5.pop(key, None)
        return self._entries.pop(key)

    def close_replaced(self, path: str) -> None:
        """Close the handles of a file that was replaced or written to, under any of its names.

        The HDF5 library would reuse an open file also under another name.
        """
        if not self._entries:
            return
        if is_url(path):  # each request names the state that is wanted
            return
        try:
            status = os.stat(path)
        except OSError:
            self.close(path)
            return
        with self._lock:
            for key, entry in list(self._entries.items()):
                handle_status = entry.handle.stat
                is_same = handle_status.st_ino == status.st_ino and handle_status.st_dev == status.st_dev
                if (is_same or key[0] == path) and _file_state(handle_status) != _file_state(status):
                    self._close(key)

    def close(self, path: str | None = None) -> None:
        """Close the handles of one file, or all; one in use is closed after its use."""
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
        # Another thread that holds the lock calls this after releasing it; this thread may hold it itself.
        while self._unused and not self._lock._is_owned() and self._lock.acquire(blocking=False):
            try:
                while self._unused:
                    paths = self._unused.popleft()
                    for key in [key for key in self._entries if key[0] in paths]:
                        self._close(key)
            finally:
                self._lock.release()

    def _close(self, key: _FileKey) -> None:
        entry = self._drop(key)
        entry.doomed = True
        if not entry.users:
            entry.handle.close()


def _file_state(status: os.stat_result | ObjectStatus) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class _Use:
    """A handle in use. A class, since it takes 1 microsecond instead of the 3 of a generator."""

    __slots__ = ("_entry", "_guard", "_key", "_pool")

    def __init__(self, pool: HandlePool, key: _FileKey, guard: ChangeGuard) -> None:
        self._pool, self._key, self._guard = pool, key, guard

    def __enter__(self) -> Any:
        self._entry = self._pool._take(self._key, self._guard)
        handle = self._entry.handle
        if isinstance(handle, Descriptor):
            return handle.fd
        return handle.mirror if isinstance(handle, StagedFile | DecodedFile) else handle

    def __exit__(self, *error: object) -> None:
        self._pool._give_back(self._key, self._entry)


class _UseWithOthers:
    """A handle in use of a file for which the library itself opens other files by name, and keeps them open.

    They are compared before and after the use; the handle is closed if one has changed.
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


def _open_file(key: _FileKey, guard: ChangeGuard) -> H5Handle | Descriptor | StagedFile | DecodedFile:
    """Open a file, and compare it with its guard."""
    path, options = key
    if isinstance(options, DecodedArray):
        return DecodedFile(path, guard, options)
    if isinstance(options, StagingOptions):
        return StagedFile(path, guard, options)
    handle = Descriptor(path) if options is None else H5Handle(path, options, guard)
    try:
        guard.compare(handle.stat)
    except H5DataChangedError:
        handle.close()
        raise
    return handle


class H5Handle:
    """A file open through the HDF5 library, and its arrays that were used."""

    def __init__(self, path: str, options: OpenOptions, guard: ChangeGuard) -> None:
        self._files = options.files
        if guard.is_remote:
            use_staging(path, options.files.staged)
        self._file = open_h5(
            path,
            rdcc_nbytes=options.rdcc_nbytes,
            rdcc_nslots=options.rdcc_nslots,
            rdcc_w0=options.rdcc_w0,
            swmr=options.swmr,
            status=guard.object_status,
        )
        self._arrays: dict[str, Any] = {}
        self.stat = stat_of(self._file)

    def array(self, layout: ArrayLayout) -> Any:
        """Return the h5py dataset of a layout."""
        array = self._arrays.get(layout.name)
        if array is None:
            ensure_filters(layout.filters, layout.path, layout.key)
            array = self._arrays[layout.name] = find_array(self._file, layout.name, self._files).array
        return array

    def close(self) -> None:
        """Close the file."""
        self._arrays.clear()
        with suppress(RuntimeError, OSError):  # closing a damaged file can raise, but closes it
            self._file.close()


class Descriptor:
    """A file descriptor, for reading by position without the HDF5 library."""

    def __init__(self, path: str) -> None:
        try:
            # O_NONBLOCK has no effect on regular files, but a FIFO in place of the file would block until it has a
            # writer.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise H5FileError(
                f"{path!r} cannot be opened: {error.strerror}. Check that it still exists, and `ulimit -n`."
            ) from error

        self.stat = os.fstat(self.fd)
        if not stat.S_ISREG(self.stat.st_mode):
            os.close(self.fd)
            raise H5FileError(f"{path!r} is not a regular file any more. Put the file back, and start again.")

    def close(self) -> None:
        """Close it."""
        with suppress(OSError):  # a file system that is gone can raise, but the descriptor is closed
            os.close(self.fd)


class StagedFile:
    """A file with a mirror on a local disk."""

    def __init__(self, path: str, guard: ChangeGuard, staging: StagingOptions) -> None:
        self.stat: os.stat_result | ObjectStatus
        if guard.is_remote:
            use_staging(path, staging)
            self.stat, self.mirror = guard.status, mirror_of(path, guard.status)
            return
        descriptor = Descriptor(path)
        self.stat = descriptor.stat
        try:
            guard.compare(descriptor.stat)
            folder: MirrorFolder | None = None
            with suppress(H5ValueError):  # it was removed since it was checked: all is read from the file itself
                folder = ensure_folder(staging)
            self.mirror = Mirror(PosixOrigin(descriptor.fd), folder, mirror_name(path, guard.version))
        except BaseException:
            descriptor.close()
            raise

    def close(self) -> None:
        """Close file and mirror."""
        self.mirror.close()


class DecodedFile:
    """The decoded chunks of an array of a file that a local disk has."""

    def __init__(self, path: str, guard: ChangeGuard, array: DecodedArray) -> None:
        self.stat = guard.status if guard.is_remote else os.stat(path)
        guard.compare(self.stat)
        folder: MirrorFolder | None = None
        with suppress(H5ValueError):  # it was removed since it was checked: all is decoded
            folder = ensure_folder(array.options)
        state = (guard.n_bytes, guard.etag, guard.mtime_ns) if guard.is_remote else guard.version
        name, leaves_tables = mirror_name(path, state, array.identity), guard.staging is not None
        self.mirror = DecodedMirror(folder, name, array, leaves_tables=leaves_tables)

    def close(self) -> None:
        """Close the mirror."""
        self.mirror.drop()


_pools: dict[int, HandlePool] = {}  # by process id: a forked child must not use its parent's handles


def process_pool() -> HandlePool:
    """Return the pool of this process."""
    pool = _pools.get(os.getpid())
    if pool is None:
        drop_inherited()
        pool = _pools.setdefault(os.getpid(), HandlePool())
    return pool


def close_when_collected(owner: object, paths: Sequence[str]) -> None:
    """Close this process's handles of some files when an object is collected, but not when Python exits.

    Other objects that read the same files reopen them at their next read.

    Args:
        owner: the object.
        paths: the files that it reads.
    """
    weakref.finalize(owner, _close_soon, os.getpid(), paths).atexit = False


def _close_soon(pid: int, paths: Sequence[str]) -> None:
    # A forked child has a copy of the object and must not use its parent's handles.
    if pid == os.getpid() and (pool := _pools.get(pid)) is not None:
        pool.close_soon(paths)


def _close_replaced(path: str) -> None:
    if (pool := _pools.get(os.getpid())) is not None:
        pool.close_replaced(path)


# The HDF5 library would reuse a file that is still open, with its cached metadata.
before_opening.append(_close_replaced)


def drop_inherited() -> None:
    """Close this process's copies of handles that a parent process had open when it forked."""
    for pid in [pid for pid in list(_pools) if pid != os.getpid()]:
        pool = _pools.pop(pid, None)
        if pool is None:
            continue  # another thread was faster
        pool._lock = threading.RLock()  # another thread of the parent may have held the lock
        for entry in pool._entries.values():
            entry.handle.close()
