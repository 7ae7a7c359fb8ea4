"""An open file, in each way that it is read: through the HDF5 library, by position, or from a mirror."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..errors import H5DataChangedError, H5FileError, H5ValueError
from ..options import FileOptions, StagingOptions
from ..staging import (
    Mirror,
    MirrorFolder,
    ObjectStatus,
    PosixOrigin,
    ensure_folder,
    mirror_name,
    mirror_of,
    use_staging,
)
from .checks import ensure_filters
from .identity import ChangeGuard, stat_of
from .layout import ArrayLayout
from .links import find_array
from .open import open_h5

__all__ = ["Descriptor", "FileKey", "H5Handle", "OpenOptions", "StagedFile", "open_file"]


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a file is opened through the HDF5 library (see ``open_h5``), and read.

    Attributes:
        gives_back: what was read leaves the system's page cache.
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
            status=guard.status if guard.is_remote else None,
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
        opened = Descriptor(path)
        self.stat = opened.stat
        try:
            guard.compare(opened.stat)
            folder: MirrorFolder | None = None
            with suppress(H5ValueError):  # it was removed since it was checked: all is read from the file itself
                folder = ensure_folder(staging)
            self.mirror = Mirror(PosixOrigin(opened.fd), folder, mirror_name(path, guard.version))
        except BaseException:
            opened.close()
            raise

    def close(self) -> None:
        """Close file and mirror."""
        self.mirror.close()


FileKey: TypeAlias = tuple[str, OpenOptions | StagingOptions | None]
"""A file, and how it is opened: through the HDF5 library, by a descriptor (None), or with a mirror."""


def open_file(key: FileKey, guard: ChangeGuard) -> H5Handle | Descriptor | StagedFile:
    """Open a file, and compare it with its guard."""
    path, options = key
    if isinstance(options, StagingOptions):
        return StagedFile(path, guard, options)
    handle = Descriptor(path) if options is None else H5Handle(path, options, guard)
    try:
        guard.compare(handle.stat)
    except H5DataChangedError:
        handle.close()
        raise
    return handle
