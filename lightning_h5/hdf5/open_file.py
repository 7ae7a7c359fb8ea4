"""A file that is open by position, and through the HDF5 library once something asks for that."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from ..staging import ObjectStatus
from ..types import cached_property
from .change_guard import ChangeGuard, pread_of, stat_of
from .group_links import ObjectPlaces
from .object_headers import HeaderFile
from .open import FAULTS, open_h5
from .remote_file import Read

__all__ = ["OpenFile"]

WITHOUT_LOCKS = ("FALSE", "0")  # values of HDF5_USE_FILE_LOCKING with which the library takes no locks


class OpenFile:
    """A file that is looked at in ``setup``.

    Opening and closing thousands of small files through the library takes longer than all that is asked of them. So a
    file is opened by position first, if it is one that the library would open: its superblock is whole, and no writer
    has locked it. It is opened through the library when ``h5`` is first used.

    Args:
        path: the file.
        guard: its state.
        h5: the file, if it is open already; it is not closed here.
    """

    def __init__(self, path: str, guard: ChangeGuard, h5: Any = None) -> None:
        self.path, self._guard = path, guard
        self.scales: dict[int, Any] = {}  # the dimension scales that were looked at, by their address
        self._descriptor: int | None = None
        self._is_own, self._h5 = h5 is None, h5
        if h5 is None and not guard.is_remote and not guard.grows and "HDF5_DRIVER" not in os.environ:
            self._open_by_position()
        if self._h5 is None and self._descriptor is None:
            self._h5 = self._opened()

    def _open_by_position(self) -> None:
        headers: HeaderFile | None = None
        try:  # O_NONBLOCK: a pipe would wait for its writer
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return  # the library reports it
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and _is_unlocked(descriptor):
                headers = HeaderFile.by_position(partial(os.pread, descriptor), status.st_size)
        except OSError:
            pass
        finally:
            if headers is None:
                os.close(descriptor)
            else:
                self._descriptor, self.headers = descriptor, headers

    @property
    def h5(self) -> Any:
        """The file, open through the library.

        Raises:
            H5FileError: it cannot be opened.
        """
        if self._h5 is None:
            self._h5 = self._opened()
            self._guard.compare(stat_of(self._h5))
        return self._h5

    def _opened(self) -> Any:
        guard = self._guard
        return open_h5(self.path, swmr=guard.grows, status=guard.object_status, takes_index=True)

    @cached_property
    def headers(self) -> HeaderFile | None:
        """The file as it is read by position; None if that is not possible."""
        h5 = self.h5
        with suppress(*FAULTS):  # the library reports what is wrong once an array is described
            return HeaderFile.of(h5)
        return None

    @cached_property
    def places(self) -> ObjectPlaces | None:
        """The places of objects; None if only the library knows them."""
        return None if self.headers is None or self.headers.root is None else ObjectPlaces(self.headers)

    @property
    def pread(self) -> Read | None:
        """Reads bytes at a position; None if the file's driver does not support that."""
        return pread_of(self._h5) if self._descriptor is None else partial(os.pread, self._descriptor)

    @property
    def stat(self) -> os.stat_result | ObjectStatus:
        """The status of the open file, even if its path leads to another one by now."""
        return stat_of(self.h5) if self._descriptor is None else os.fstat(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._is_own and self._h5 is not None:
            self._h5.close()


def _is_unlocked(descriptor: int) -> bool:
    """Take the lock of a reader, as the library does; False if there is a writer, or no way to know."""
    if os.environ.get("HDF5_USE_FILE_LOCKING", "").upper() in WITHOUT_LOCKS:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
