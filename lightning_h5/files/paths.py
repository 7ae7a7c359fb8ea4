"""From what a user passes as a path to a list of files."""

from __future__ import annotations

import glob
import os
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
        try:
            files = sorted(entry.path for entry in os.scandir(text) if _is_ours(entry.name))
        except OSError as error:
            raise H5FileError(
                f"{name}={text!r} is a directory that cannot be looked into: {error.strerror}. Check its permissions."
            ) from error
        if not files:
            raise H5FileError(
                f"{name}={text!r} is a directory without HDF5 files ({', '.join('*' + s for s in SUFFIXES)}); "
                f"it has {listing(sorted(os.listdir(text)))}. Pass a file, or a glob such as "
                f"{os.path.join(text, '*.dat')!r} if yours are named otherwise."
            )
        return files
    if not os.path.lexists(text) and glob.has_magic(text):
        files = sorted(glob.glob(text, recursive=True))
        if not files:
            raise H5FileError(
                f"{name}={text!r} matches no file in {os.getcwd()!r}. Check the pattern, or pass the files."
            )
        return files
    return [_regular_file(text, name)]


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
            others = sorted(os.listdir(folder))
            there = f"{folder!r} has {listing(others)}"
            guess = near(os.path.basename(path), others)
        raise H5FileError(
            f"{name}={path!r} does not exist; {there}.{guess} Pass the path of an HDF5 file "
            f"(relative paths start at {os.getcwd()!r})."
        ) from None
    except (OSError, ValueError) as error:  # a ValueError for a path with a null character
        raise H5FileError(
            f"{name}={path!r} cannot be looked at: {error}. Check the path and its permissions."
        ) from error
    if not stat.S_ISREG(mode):
        # A FIFO would block for ever in open(), a device would be read as one.
        raise H5FileError(f"{name}={path!r} is not a regular file. Pass the path of an HDF5 file.")
    return path
