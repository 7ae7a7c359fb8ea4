"""Output files: checked before the computation, and written atomically."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ..errors import H5FileError

NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}


def check_output(path: str, inputs: Sequence[str] = (), *, overwrite: bool | None = None) -> None:
    """Check an output path before the computation.

    Args:
        path: the file to write.
        inputs: files that are read.
        overwrite: whether an existing file may be replaced; None if there is no such option.

    Raises:
        H5FileError: the file exists, is one of the inputs, or its folder is missing or not writable.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        why = f"there is no directory {folder!r}. Create it"
    elif os.path.realpath(path) in map(os.path.realpath, inputs):
        why = "it would overwrite its own input. Name another file"
    elif os.path.isdir(path):
        why = "that is a directory. Name a file in it"
    elif os.path.lexists(path) and not overwrite:
        why = "it exists. Name another file" + (
            "" if overwrite is None else ", or replace it (overwrite=True, --force)"
        )
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = f"you have no permission to write to {folder!r}. Name another folder"
    else:
        return
    raise H5FileError(f"{path!r} cannot be written: {why}.")


@contextmanager
def new_file(target: str) -> Iterator[str]:
    """Yield a temporary name for a file; rename the file when it is complete, or remove it after an error.

    The temporary name is in the same folder and begins with a dot. Only a process that is killed without a chance to
    clean up leaves it behind.

    Args:
        target: the final name.

    Raises:
        H5FileError: another program has created a file with the final name.
    """
    folder, name = os.path.split(os.path.abspath(target))
    partial = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        _sync(partial)
        try:
            _rename(partial, target)
        except FileExistsError as error:
            raise H5FileError(
                f"{target!r} was created by another program in the meantime and is not overwritten; the copy is "
                "discarded. Name another file."
            ) from error
    finally:
        with suppress(OSError):
            if not os.path.exists(target) or not os.path.samefile(partial, target):
                os.truncate(partial, 0)  # frees the space even if the library failed to close the file
            os.unlink(partial)
    with suppress(OSError):  # some file systems cannot sync a folder
        _sync(folder)


def _rename(partial: str, target: str) -> None:
    """Rename without ever replacing: a hard link fails if the name is taken, `os.rename` would not."""
    try:
        os.link(partial, target)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # reserves the name
        os.replace(partial, target)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
