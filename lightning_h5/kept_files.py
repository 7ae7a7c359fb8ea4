"""Files that this package keeps between runs: written whole or not at all, and not used if they are damaged."""

from __future__ import annotations

import hashlib
import os
import tempfile

from .regular_files import open_regular

__all__ = ["kept_folder", "read_kept", "write_kept"]

DIGEST_BYTES = 32


def kept_folder() -> str:
    """Return the folder of this package in the user's cache folder (``XDG_CACHE_HOME``, or ``~/.cache``)."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "lightning_h5")


def read_kept(path: str) -> bytes | None:
    """Return the content of a file if its checksum is right; otherwise None.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        digest, data = file.read(DIGEST_BYTES), file.read()
    return data if digest == _digest_of_file(path, data) else None


def write_kept(path: str, data: bytes) -> None:
    """Write a file atomically: several processes may write it at a time.

    Raises:
        OSError: it cannot be written.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd, name = tempfile.mkstemp(dir=os.path.dirname(path), suffix=".tmp")
    try:
        with open(fd, "wb") as file:
            file.write(_digest_of_file(path, data) + data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _digest_of_file(path: str, data: bytes) -> bytes:
    return hashlib.sha256(os.path.basename(path).encode() + b"\0" + data).digest()
