"""From what a user passes as a path to a list of files."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence

from ..errors import H5FileError, H5ValueError, listing, near
from ..types import PathLike, Paths

SUFFIXES = (".h5", ".hdf5", ".h5ad")

__all__ = ["SUFFIXES", "expand_paths"]


def expand_paths(paths: Paths, name: str = "path") -> tuple[str, ...]:
    """The files that a path argument names.

    Args:
        paths: a file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of these. Files of a
            glob and of a directory come in sorted order, those of a list in the list's order.
        name: the argument's name, for errors.

    Returns:
        One path or more, none of them twice.

    Raises:
        H5FileError: nothing is there, or something that is not a regular file.
        H5ValueError: an empty list, or a file that is named twice.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in given):
        raise H5ValueError(
            f"{name}={paths!r} is neither a path nor a list of paths. Pass the path of an HDF5 file, not an open file."
        )
    if not given:
        raise H5ValueError(f"{name}=[] names no file. Pass a file, a glob, a directory or a list of these.")
    files = [file for path in given for file in _expand_one(path, name)]
    # By what they lead to: "a.h5" and "./a.h5" are one file, and so are a file and a symbolic link to it.
    real = [os.path.realpath(file) for file in files]
    if len(set(real)) < len(real):
        times = Counter(real)
        twice = sorted({file for file, place in zip(files, real, strict=True) if times[place] > 1})
        raise H5ValueError(
            f"{name} names {listing(twice)} more than once, and its rows would be trained on twice an epoch. "
            "Name each file once."
        )
    # Absolute, so that a later change of the working directory does not lead elsewhere.
    return tuple(os.path.abspath(file) for file in files)


def _expand_one(path: PathLike, name: str) -> Sequence[str]:
    text = os.path.expanduser(os.fspath(path))
    if os.path.isdir(text):
        inside = _names_in(text, text, name)
        files = [os.path.join(text, each) for each in inside if _is_ours(each)]
        if not files:
            raise H5FileError(
                f"{name}={text!r} is a directory without HDF5 files ({', '.join('*' + s for s in SUFFIXES)}); "
                f"it has {listing(inside)}. Pass a file, or a glob such as "
                f"{os.path.join(text, '*.dat')!r} if yours are named otherwise."
            )
        return files
    if not os.path.lexists(text) and glob.has_magic(text):
        files = sorted(glob.glob(text, recursive=True))
        if not files:
            folder = os.path.dirname(re.split(r"[*?[]", text)[0]) or "."
            if os.path.isdir(folder):
                _names_in(folder, text, name)  # a glob passes over what it cannot look into
            raise H5FileError(
                f"{name}={text!r} matches no file in {os.getcwd()!r}. Check the pattern, or pass the files."
            )
        return files
    return [_regular_file(text, name)]


def _names_in(folder: str, path: str, name: str) -> list[str]:
    """What a directory has, sorted, where a path leads to or through it."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        what = "is a directory that" if folder == path else f"lies in {folder!r}, which"
        raise H5FileError(f"{name}={path!r} {what} cannot be looked into: {error.strerror}. {_cure(error)}") from error


def _cure(error: OSError | ValueError) -> str:
    """What to do where the system did not let a path be looked at."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return "Raise `ulimit -n`, or close what this process has open."
    if number == errno.ENFILE:
        return "Close programs on this machine, or have its limit raised (`sysctl fs.file-max`)."
    if number in (errno.ENOMEM, errno.ENOBUFS):
        return "Make room in memory, or take fewer workers."
    if number in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN):
        return "Check the disk or the network file system, then start again."
    if number in (errno.EACCES, errno.EPERM):
        return "Check its permissions, and those of the folders above."
    return "Check the path and its permissions."


def _is_ours(name: str) -> bool:
    """Whether a directory's file is taken; hidden ones are not, as in a glob."""
    return name.endswith(SUFFIXES) and not name.startswith(".")


def _regular_file(path: str, name: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(path) or "."
        if os.path.islink(path):
            there, guess = f"it is a link to {os.readlink(path)!r}, which is not there", ""
        elif not os.path.isdir(folder):
            there = f"there is no directory {folder!r}"
            guess = ""
        else:
            others = _names_in(folder, path, name)
            there = f"{folder!r} has {listing(others)}"
            guess = near(os.path.basename(path), others)
        raise H5FileError(
            f"{name}={path!r} does not exist; {there}.{guess} Pass the path of an HDF5 file "
            f"(relative paths start at {os.getcwd()!r})."
        ) from None
    except (OSError, ValueError) as error:  # a ValueError for a path with a null character
        raise H5FileError(f"{name}={path!r} cannot be looked at: {error}. {_cure(error)}") from error
    if not stat.S_ISREG(mode):
        # A FIFO would block for ever in open(), a device would be read as one.
        raise H5FileError(f"{name}={path!r} is not a regular file. Pass the path of an HDF5 file.")
    return path
