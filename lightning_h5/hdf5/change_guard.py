"""The change guard of a file, and what it is taken from.

It shows whether this very file was changed since ``setup``; it is valid on one machine, and cheap enough to compare
with every batch. Files are also compared with it when they are opened: between two uses of a path, another file may
have had that name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import h5py

from ..errors import H5DataChangedError
from ..options import StagingOptions
from ..staging import ObjectStatus, shown_url, staging_of, why_not_staged
from .remote_file import Read, remote_file_of, status_of

__all__ = ["ChangeGuard", "is_on_disk", "pread_of", "stat_of"]


@dataclass(frozen=True)
class ChangeGuard:
    """Device, inode, size and modification time of a file, and optionally the time when its inode changed.

    Attributes:
        etag: the store's name for the content of an object, which each request names. The numbers are then 0.
        is_remote: whether it is an object of a store.
        others: guards of other files that rows of this one come from.
        staging: where bytes of the file are kept on a local disk; None if they are read from the file itself.
        decoded: where decoded chunks of the file's arrays are kept; None if chunks are decoded each time.
        seen_ns: when the inode last changed before the guard was taken. Handles opened before that are outdated.
    """

    path: str
    device: int
    inode: int
    n_bytes: int
    mtime_ns: int
    grows: bool = False
    ctime_ns: int | None = None
    etag: str = ""
    is_remote: bool = False
    others: tuple[ChangeGuard, ...] = ()
    seen_ns: int = field(default=0, compare=False)
    staging: StagingOptions | None = field(default=None, compare=False, repr=False)
    decoded: StagingOptions | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, path: str, *, grows: bool = False, strict: bool = False) -> ChangeGuard:
        """Return the guard of the present file.

        Args:
            path: the file.
            grows: the file has a live writer: it may grow, but neither shrink nor be replaced.
            strict: detect changes also if the modification time was reset. New permissions and hard links count as
                changes then.
        """
        return cls._of(status_of(path), path, grows=grows, strict=strict)

    @classmethod
    def of_open(cls, file: Any, path: str) -> ChangeGuard:
        """Return the guard of an open file, even if its path leads to another one by now.

        Args:
            file: h5py's file.
            path: the path that it was opened by.
        """
        return cls._of(stat_of(file), path, grows=bool(file.swmr_mode))

    @classmethod
    def _of(
        cls, status: os.stat_result | ObjectStatus, path: str, *, grows: bool = False, strict: bool = False
    ) -> ChangeGuard:
        return cls(
            path,
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            grows,
            status.st_ctime_ns if strict and not grows else None,
            etag=status.etag if isinstance(status, ObjectStatus) else "",
            is_remote=isinstance(status, ObjectStatus),
            seen_ns=status.st_ctime_ns,
        )

    def staged(self, staging: StagingOptions | None) -> ChangeGuard:
        """Return the guard with the options of staging, as far as they apply to the file.

        Raises:
            H5ValueError: the folder cannot be used.
        """
        decoded = staging if staging is not None and staging.decoded and not self.grows else None
        if self.is_remote:
            return replace(self, staging=staging_of(self.path) if staging is None else staging, decoded=decoded)
        if staging is None:
            return self
        is_staged = why_not_staged(staging, self.device, self.n_bytes, grows=self.grows) is None
        return replace(self, staging=staging if is_staged else None, decoded=decoded)

    @property
    def status(self) -> ObjectStatus:
        """The state of an object."""
        return ObjectStatus(self.n_bytes, self.etag, self.mtime_ns)

    @property
    def object_status(self) -> ObjectStatus | None:
        """The state of an object; None for a file."""
        return self.status if self.is_remote else None

    @property
    def version(self) -> tuple[int, ...]:
        """The state of the file as numbers, another one after any change of its content."""
        return self.device, self.inode, self.n_bytes, self.mtime_ns, self.seen_ns

    def check(self) -> None:
        """Compare with the present file; takes about 2 microseconds per file, and nothing for objects of a store.

        Each request to a store names the state that is wanted.

        Raises:
            H5DataChangedError: the file, or one of the others, was truncated, edited, replaced or deleted.
        """
        if not self.is_remote:
            try:
                status = os.stat(self.path)
            except OSError as error:
                raise H5DataChangedError(
                    f"{self.path!r} existed when training was set up and cannot be found: {error.strerror}. "
                    "Put it back and resume from the last checkpoint."
                ) from error
            self.compare(status)
        for other in self.others:
            other.check()

    def matches(self, status: os.stat_result | ObjectStatus) -> bool:
        """Return whether a file with this status is the unchanged file."""
        is_same = status.st_ino == self.inode and status.st_dev == self.device
        if self.grows:
            return is_same and status.st_size >= self.n_bytes
        return (
            is_same
            and (status.etag if isinstance(status, ObjectStatus) else "") == self.etag
            and status.st_mtime_ns == self.mtime_ns
            and status.st_size == self.n_bytes
            and self.ctime_ns in (None, status.st_ctime_ns)
        )

    def accepts(self, status: os.stat_result | ObjectStatus) -> bool:
        """Return whether a handle may be used that was opened when the file had this status.

        The HDF5 library caches parts of a file, also if the file is rewritten and its time reset.
        """
        return self.matches(status) and (self.grows or status.st_ctime_ns >= self.seen_ns)

    def compare(self, status: os.stat_result | ObjectStatus) -> None:
        """Raise if a file has another status (see ``check``)."""
        if self.matches(status):
            return
        if (status.st_ino, status.st_dev) != (self.inode, self.device):
            change = "was replaced by another file"
        elif status.st_size != self.n_bytes:
            change = f"had {self.n_bytes:,} bytes and has {status.st_size:,}"
        elif status.st_mtime_ns != self.mtime_ns or self.is_remote:
            change = "was written to"
        else:
            change = "was written to and had its time reset, or got other permissions or another name,"
        raise H5DataChangedError(
            f"{shown_url(self.path)!r} {change} since training was set up, so its rows can no longer be trusted. "
            "Leave files alone while they are trained from, and start again."
        )


def stat_of(file: Any) -> os.stat_result | ObjectStatus:
    """Return the status of an open file, even if its path leads to another one by now."""
    if is_on_disk(file):
        return os.fstat(file.id.get_vfd_handle())
    remote = remote_file_of(file)
    return os.stat(file.filename) if remote is None else remote.status


def pread_of(file: Any) -> Read | None:
    """Return a function that reads bytes at a position of an open file; None if its driver does not support that."""
    if is_on_disk(file):
        return partial(os.pread, file.id.get_vfd_handle())
    remote = remote_file_of(file)
    return None if remote is None else remote.pread


def is_on_disk(file: Any) -> bool:
    """Return whether an open file has a descriptor; with a driver named in the environment it may have none."""
    if "is_on_disk" not in file.__dict__:  # called several times for thousands of files
        file.__dict__["is_on_disk"] = file.id.get_access_plist().get_driver() == h5py.h5fd.SEC2
    return bool(file.__dict__["is_on_disk"])
