"""The file of statistics, written whole or not at all, and never over something else by mistake."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...datasets import write_stats
from ...errors import H5Error, H5FileError
from ...types import PathLike

__all__ = ["ensure_writable", "write_report"]


def ensure_writable(path: PathLike, files: Sequence[str], *, overwrite: bool) -> None:
    """Refuses an output before anything is computed for it.

    Args:
        path: the file to be written.
        files: that are read.
        overwrite: a file that is there may be replaced.

    Raises:
        H5FileError: it is there, is one of the files that are read, or its folder is missing or closed to us.
    """
    name = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(name))
    if not os.path.isdir(folder):
        raise H5FileError(f"the statistics {name!r} cannot be written: there is no directory {folder!r}. Make it.")
    if os.path.realpath(name) in {os.path.realpath(file) for file in files}:
        raise H5FileError(
            f"the statistics {name!r} would be written over the data they are made of. Name another file."
        )
    if os.path.isdir(name):
        raise H5FileError(f"the statistics {name!r} cannot be written: that is a directory. Name a file in it.")
    if os.path.lexists(name) and not overwrite:
        raise H5FileError(
            f"the statistics {name!r} are there already. Name another file, or say that it may be replaced "
            "(overwrite=True, --force)."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise H5FileError(f"the statistics {name!r} cannot be written: {folder!r} may not be written to. Name another.")


def write_report(
    path: PathLike, files: Sequence[str], fields: Mapping[str, Mapping[str, Any]], *, overwrite: bool
) -> None:
    """Writes statistics as ``normalize=`` reads them.

    Args:
        path: the file.
        files: that they were made of; each field notes them.
        fields: by key, as plain numbers and lists.
        overwrite: replace a file that is there.

    Raises:
        H5FileError: see ``ensure_writable``; or the disk is full.
    """
    ensure_writable(path, files, overwrite=overwrite)
    target = Path(os.fspath(path))
    try:
        write_stats(target, {key: {**field, "files": list(files)} for key, field in fields.items()})
    except H5Error:
        raise
    except OSError as error:
        raise H5FileError(f"the statistics {str(target)!r} cannot be written: {error.strerror}.") from error
    finally:
        with suppress(OSError):  # what is left of one that was interrupted
            Path(f"{target}.{os.getpid()}.partial").unlink()
