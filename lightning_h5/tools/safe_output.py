"""Files that are there whole or not at all: written under another name, and never over a file that exists."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import H5FileError

__all__ = ["check_room", "new_file", "refuse_existing"]

NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}


def refuse_existing(target: str) -> None:
    """Makes sure that a file can be made under a name.

    Raises:
        H5FileError: there is a file of that name, or no such folder, or it may not be written to.
    """
    folder = _folder_of(target)
    if os.path.lexists(target):
        raise H5FileError(f"{target!r} is there already and is never written over. Remove it, or name another file.")
    if not os.path.isdir(folder):
        raise H5FileError(f"{target!r} cannot be written: there is no folder {folder!r}. Make it first.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise H5FileError(
            f"{target!r} cannot be written: you have no permission to make files in {folder!r}. Name another folder."
        )


def check_room(target: str, n_bytes: int) -> None:
    """Makes sure that a file of about that size fits where it is to be written.

    Args:
        target: the file.
        n_bytes: what it takes, temporary files among it.

    Raises:
        H5FileError: there is less room.
    """
    folder = _folder_of(target)
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise H5FileError(
            f"{target!r} takes about {n_bytes / 2**20:,.1f} MiB and {folder!r} has {free / 2**20:,.1f} MiB free. "
            "Make room, or name a folder on another disk."
        )


@contextmanager
def new_file(target: str) -> Iterator[str]:
    """The name to write a file under until it is complete; then it gets its own, or vanishes after an error.

    The name lies in the same folder and begins with a dot. Only a process that is killed without a chance to clean up
    leaves it behind.

    Args:
        target: the name that it gets.

    Raises:
        H5FileError: somebody else has made a file of that name by then.
    """
    folder, name = os.path.split(os.path.abspath(target))
    partial = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        _sync(partial)
        _give_name(partial, target)
    finally:
        with suppress(OSError):
            os.stat(partial)
            if not os.path.exists(target) or not os.path.samefile(partial, target):
                os.truncate(partial, 0)  # a library that failed to close it would keep its room until the process ends
            os.unlink(partial)
    with suppress(OSError):  # some file systems cannot sync a folder
        _sync(folder)


def _give_name(partial: str, target: str) -> None:
    """Renames without ever replacing: a hard link fails where the name is taken, `os.rename` would not."""
    try:
        try:
            os.link(partial, target)
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # ours from here on
            os.replace(partial, target)
    except FileExistsError as error:
        raise H5FileError(
            f"{target!r} was made by somebody else in the meantime and is never written over; the copy is discarded. "
            "Name another file."
        ) from error


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder_of(target: str) -> str:
    return os.path.dirname(os.path.abspath(target))
