"""Open files of this process: opened on first use, bounded in number, never shared with a forked child."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import H5FileError
from .door import ArrayHandle, find_array, open_h5
from .layout import ArrayLayout, ensure_filters

__all__ = ["HandlePool", "OpenOptions", "drop_inherited", "process_pool"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a file is opened through the HDF5 library (see ``open_h5``)."""

    rdcc_nbytes: int | None = None
    rdcc_nslots: int | None = None
    rdcc_w0: float | None = None
    swmr: bool = False
    allow_external: bool = False


class H5Handle:
    """An open file and the arrays that were looked up in it."""

    def __init__(self, path: str, options: OpenOptions) -> None:
        self._allow_external = options.allow_external
        self._file = open_h5(
            path,
            rdcc_nbytes=options.rdcc_nbytes,
            rdcc_nslots=options.rdcc_nslots,
            rdcc_w0=options.rdcc_w0,
            swmr=options.swmr,
        )
        self._arrays: dict[str, Any] = {}

    def array(self, layout: ArrayLayout) -> Any:
        """The h5py dataset of a layout, looked up through the door once."""
        array = self._arrays.get(layout.name)
        if array is None:
            ensure_filters(layout.filters, layout.path, layout.key)
            found: ArrayHandle = find_array(self._file, layout.name, allow_external=self._allow_external)
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
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise H5FileError(
                f"{path!r} cannot be opened: {error.strerror}. Check that it is still there and `ulimit -n`."
            ) from error

    def close(self) -> None:
        os.close(self.fd)


@dataclass
class _Entry:
    handle: Any
    users: int = 0
    doomed: bool = False


class HandlePool:
    """Least recently used handles are closed when there are more than ``most``; one in use never is.

    Safe to use from threads. A handle belongs to the process that opened it.

    Args:
        most: handles kept open. The default is a quarter of the process's descriptor limit, since the
            files of data sets may be thousands and the limit is often 1,024.
    """

    def __init__(self, most: int | None = None) -> None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = most or max(8, min(512, (1024 if soft < 0 else soft) // 4))
        self._entries: OrderedDict[tuple[str, OpenOptions | None], _Entry] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def h5(self, path: str, options: OpenOptions) -> Iterator[H5Handle]:
        """A file open through the HDF5 library, held open inside the ``with`` block."""
        with self._use((path, options), lambda: H5Handle(path, options)) as handle:
            yield handle

    @contextmanager
    def descriptor(self, path: str) -> Iterator[int]:
        """A descriptor of a file, held open inside the ``with`` block."""
        with self._use((path, None), lambda: Descriptor(path)) as handle:
            yield handle.fd

    @contextmanager
    def _use(self, key: tuple[str, OpenOptions | None], opener: Callable[[], T]) -> Iterator[T]:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(opener())
                self._evict(keep=key)
            else:
                self._entries.move_to_end(key)
            entry.users += 1
        try:
            yield entry.handle
        finally:
            with self._lock:
                entry.users -= 1
                if entry.doomed and not entry.users:
                    entry.handle.close()
                if len(self._entries) > self.most:  # more were in use at a time than are kept
                    self._evict(keep=key)

    def _evict(self, keep: tuple[str, OpenOptions | None]) -> None:
        idle = [key for key, entry in self._entries.items() if not entry.users and key != keep]
        for key in idle[: max(0, len(self._entries) - self.most)]:
            self._entries.pop(key).handle.close()

    def close(self, path: str | None = None) -> None:
        """Closes the handles of one file, or all; one in use is closed when its user is done."""
        with self._lock:
            for key in [key for key in self._entries if path in (None, key[0])]:
                entry = self._entries.pop(key)
                entry.doomed = True
                if not entry.users:
                    entry.handle.close()


_pools: dict[int, HandlePool] = {}  # by process id: a forked child must not use its parent's handles


def process_pool() -> HandlePool:
    """The pool of this process, made on first use."""
    pool = _pools.get(os.getpid())
    if pool is None:
        drop_inherited()
        pool = _pools.setdefault(os.getpid(), HandlePool())
    return pool


def drop_inherited() -> None:
    """Closes this process's copies of handles that a parent process had open when it forked."""
    for pid in [pid for pid in list(_pools) if pid != os.getpid()]:
        inherited = _pools.pop(pid, None)
        if inherited is None:
            continue  # another thread was faster
        inherited._lock = threading.RLock()  # the parent's lock may have been held by a thread that is not here
        for entry in inherited._entries.values():
            entry.handle.close()
