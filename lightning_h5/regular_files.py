"""Open files beside the data: tables, statistics, splits, digests. Pipes, devices and sockets are refused at once."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any, BinaryIO

__all__ = ["open_regular", "read_json"]


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading. Opening a pipe would wait for a writer, and a device may have no end.

    Args:
        path: the file, or a symbolic link to it.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    _check_regular(os.stat(path), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_regular(os.fstat(descriptor), path)  # another file may have taken its place
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_json(path: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: see ``open_regular``.
        ValueError: it is not JSON in UTF-8, or is nested too deeply.
    """
    with open_regular(path) as file:
        content = file.read()
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _check_regular(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file, but a pipe, a device or a socket", path)
