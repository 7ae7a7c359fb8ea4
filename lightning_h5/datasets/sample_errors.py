"""Errors of reading or transforming samples, and whether a single sample causes them."""

from __future__ import annotations

import errno
from typing import TypeAlias

import torch

from ..errors import H5CorruptError, H5FileError

__all__ = ["SampleErrors", "is_of_sample"]

SampleErrors: TypeAlias = dict[int, Exception]
"""The errors of a batch's samples, by their places in it."""

NEVER = (MemoryError, StopIteration, ConnectionError, TimeoutError, torch.OutOfMemoryError)
"""Errors of the machine, the network or the program, independent of the sample."""

NETWORK = frozenset(
    ("aiohttp", "botocore", "http", "httpcore", "httpx", "obstore", "requests", "socket", "ssl", "urllib", "urllib3")
)
"""Libraries that raise network errors without a builtin type."""

OF_MACHINE = {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC, errno.ESTALE}
OF_MACHINE |= {errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ETIMEDOUT}
"""Numbers of an ``OSError`` of this machine, or that a retry may fix."""


def is_of_sample(error: BaseException) -> bool:
    """Return whether a single sample causes an error of reading or transforming samples.

    This is not the case for files that changed or cannot be reached, for network errors, and for a lack of memory.
    """
    if isinstance(error, H5FileError):
        is_damage = isinstance(error, H5CorruptError)
        return is_damage and (error.__cause__ is None or is_of_sample(error.__cause__))
    if isinstance(error, NEVER) or isinstance(error.__cause__, StopIteration) or not isinstance(error, Exception):
        return False
    if isinstance(error, OSError) and error.errno in OF_MACHINE:
        return False
    return not any(kind.__module__.partition(".")[0] in NETWORK for kind in type(error).__mro__)
