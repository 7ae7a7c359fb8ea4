"""What h5py says of damaged files, in words of ours: it raises whatever comes, often without the file's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import H5CorruptError, H5Error

__all__ = ["FAULTS", "translate_h5py_errors"]

FAULTS = (KeyError, OSError, RuntimeError, TypeError, ValueError)
"""What h5py raises where a file is damaged, or has something that it does not know."""


@contextmanager
def translate_h5py_errors(path: str, what: str) -> Iterator[None]:
    """Inside, whatever h5py raises is blamed on the file.

    Args:
        path: the file.
        what: is being looked at, for the message.

    Raises:
        H5CorruptError: something was raised that is none of our errors.
    """
    try:
        yield
    except (H5Error, MemoryError):  # a machine without memory is no damage
        raise
    except Exception as error:  # of any kind: damage leads anywhere
        raise H5CorruptError(
            f"{what} in {path!r} cannot be looked at: {type(error).__name__}: {error}. The file is damaged there; copy "
            "it again, and see `lightning-h5 check` for what else is."
        ) from error
