"""Expand path arguments to a list of files."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from ..errors import H5FileError, H5ValueError, listing, near, short_repr
from ..natural_order import natural_order
from ..options import StagingOptions
from ..staging import check_url, expand_url, is_url, look_ahead, use_staging
from ..types import PathLike, Paths

SUFFIXES = (".h5", ".hdf5", ".h5ad")
SIGNATURE = b"\x89HDF\r\n\x1a\n"
SIGNATURE_OFFSETS = (0, 512, 1024, 2048)  # after a user block
ZARR_NAMES = {".zgroup", ".zarray", ".zattrs", "zarr.json"}
MAX_LOOKS = 200
"""Maximum number of entries of a directory that are opened for a message: it may have a million."""

__all__ = ["SUFFIXES", "expand_paths", "expand_user", "file_number", "name_objects"]


def expand_user(path: PathLike) -> str:
    """Return the path as text, with the home directory in place of a leading ``~`` or ``~user``.

    Variables such as ``$HOME`` are not expanded, as in h5py and PyTorch: a ``$`` can be part of a name.
    """
    text = os.fspath(path)
    return text if is_url(text) else os.path.expanduser(text)


def expand_paths(paths: Paths, name: str = "path", staging: StagingOptions | None = None) -> tuple[str, ...]:
    """Return the files that a path argument names.

    Args:
        paths: a file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of files, globs and directories;
            paths or URLs. Files of a glob or a directory are sorted by the numbers in their names (``m_2.h5`` before
            ``m_10.h5``); a list keeps its order.
        name: the argument's name, for errors.
        staging: how objects of stores are read.

    Returns:
        One or more absolute paths, without duplicates.

    Raises:
        H5FileError: a file does not exist, or is not a regular file.
        H5ValueError: the list is empty, or names a file twice.
    """
    items = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(items, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in items):
        raise H5ValueError(
            f"{name}={short_repr(paths)} is neither a path nor a list of paths. {_instead_of_paths(paths)}"
        )
    if not items:
        raise H5ValueError(f"{name}=[] names no file. Pass a file, a glob, a directory or a list of paths.")
    files = [file for path in items for file in _expand_one(path, name, staging)]
    times = Counter(numbers := [file_number(file) for file in files])
    if len(times) < len(files):
        duplicates = sorted({file for file, number in zip(files, numbers, strict=True) if times[number] > 1})
        raise H5ValueError(
            f"{name} names {listing(duplicates)} more than once (links count as their target), so an epoch would have "
            "its rows twice. Name each file once."
        )
    look_ahead([file for file in files if is_url(file)])
    # Absolute, so that changing the working directory later has no effect.
    return tuple(file if is_url(file) else os.path.abspath(file) for file in files)


def _instead_of_paths(value: Any) -> str:
    """Return a sentence with the remedy for a value that is not a path."""
    if (file := getattr(getattr(value, "file", value), "filename", None)) is not None:  # of h5py
        return f"Pass the path, {file!r}, not an open file."
    if isinstance(value, bytes):
        return f"Pass text: {os.fsdecode(value)!r}."
    if isinstance(value, Mapping):
        return "Pass a list of paths, or several sources as mixture."
    if hasattr(value, "shape"):
        return "Pass the path of an HDF5 file. Arrays in memory are the samples of torch.utils.data.TensorDataset."
    if isinstance(value, list | tuple):
        return "Pass a flat list of paths."
    if isinstance(value, Iterable) and not hasattr(value, "read") and not hasattr(value, "__len__"):
        return "Pass list(...) of it."
    if isinstance(value, AbstractSet):
        return "Pass a list, whose order is the order of the rows."
    return "Pass the path of an HDF5 file, not an open file."


def name_objects(*paths: Any) -> bool:
    """Return whether any path argument names objects of a store."""
    return any(is_url(path) or (isinstance(path, list | tuple) and name_objects(*path)) for path in paths)


def file_number(path: str) -> tuple[int, int] | str:
    """Return a key that is equal for all names of one file: other spellings, symbolic links and hard links."""
    if is_url(path):
        return path
    try:
        status = os.stat(path)
    except OSError:  # open raises the error
        return os.path.realpath(path)
    # A file system without inode numbers reports 0 for all files.
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(path)


def _expand_one(path: PathLike, name: str, staging: StagingOptions | None) -> Sequence[str]:
    if isinstance(path, str) and is_url(path):
        check_url(path)
        use_staging(path, staging)
        return expand_url(path, SUFFIXES, name)
    text = expand_user(path)
    if os.path.isdir(text):
        entries = _names_in(text, text, name)
        files = [os.path.join(text, entry) for entry in entries if _has_suffix(entry)]
        if not files:
            raise H5FileError(
                f"{name}={text!r} is a directory without HDF5 files ({', '.join('*' + s for s in SUFFIXES)})"
                f"{_other_ways(text, entries)}"
            )
        return files
    if not os.path.lexists(text) and glob.has_magic(text):
        files = sorted(glob.glob(text, recursive=True), key=natural_order)
        if not files:
            folder = os.path.dirname(re.split(r"[*?[]", text)[0]) or "."
            reason = f"there is no directory {folder!r}"
            if os.path.isdir(folder):  # a glob skips directories that it cannot read
                reason = _has(folder, _h5_files(folder, _names_in(folder, text, name)))
            hint = _unexpanded(text) + _other_spelling(text)
            raise H5FileError(
                f"{name}={text!r} matches no file; {reason}.{hint} Check the pattern, or pass the files (relative "
                f"paths start at {os.getcwd()!r})."
            )
        return files
    return [_regular_file(text, name)]


def _names_in(folder: str, path: str, name: str) -> list[str]:
    """Return the entries of a directory on a path, in natural order."""
    try:
        return sorted(os.listdir(folder), key=natural_order)
    except OSError as error:
        relation = "is a directory that" if folder == path else f"lies in {folder!r}, which"
        raise H5FileError(f"{name}={path!r} {relation} cannot be listed: {error.strerror}. {_cure(error)}") from error


def _h5_files(folder: str, names: Sequence[str]) -> list[str]:
    """Return the HDF5 files among a directory's entries, by suffix or signature."""
    looks = [name for name in names if not name.startswith(".") and not _has_suffix(name)][:MAX_LOOKS]
    signed = {name for name in looks if _has_signature(os.path.join(folder, name))}
    return [name for name in names if _has_suffix(name) or name in signed]


def _has(folder: str, names: Sequence[str]) -> str:
    files = "file" if len(names) == 1 else "files"
    return f"{folder!r} has {f'the HDF5 {files} {listing(names)}' if names else 'no HDF5 files'}"


def _has_signature(path: str) -> bool:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a FIFO blocks until it has a writer
            return False
        with open(path, "rb") as file:
            start = file.read(SIGNATURE_OFFSETS[-1] + len(SIGNATURE))
    except OSError:
        return False
    return any(start[offset:].startswith(SIGNATURE) for offset in SIGNATURE_OFFSETS)


def _folders(folder: str, names: Sequence[str]) -> list[str]:
    """Return the directories that are not hidden among the first entries of a directory."""
    visible = [name for name in names if not name.startswith(".") and not _has_suffix(name)]
    return [name for name in visible[:MAX_LOOKS] if os.path.isdir(os.path.join(folder, name))]


def _other_ways(folder: str, names: Sequence[str]) -> str:
    """Return the end of a sentence with the remedy for a directory without HDF5 suffixes."""
    if files := _h5_files(folder, names):
        suffix = os.path.splitext(files[0])[1]
        pattern = os.path.join(folder, "*" + suffix)
        return f"; by other names it has {listing(files)}. Pass a glob such as {pattern!r}."
    if folders := _folders(folder, names):
        pattern = os.path.join(folder, "**", "*.h5")
        return f"; its folders {listing(folders)} are not searched. Pass a glob such as {pattern!r}."
    if ZARR_NAMES & {*names}:
        return (
            ". It is a Zarr store, which is another format. Write its arrays to an HDF5 file (h5py: file['x'] = array)."
        )
    return ". Pass an HDF5 file, or a directory with HDF5 files."


def _cure(error: OSError | ValueError) -> str:
    """Return the remedy if the system denied access to a path."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return "Raise `ulimit -n`, or close other files of this process."
    if number == errno.ENFILE:
        return "Close programs on this machine, or have its limit raised (`sysctl fs.file-max`)."
    if number in (errno.ENOMEM, errno.ENOBUFS):
        return "Free some memory, or use fewer workers."
    if number in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN):
        return "Check the disk or the network file system, then start again."
    if number in (errno.EACCES, errno.EPERM):
        return "Check the permissions of the path and of all folders above it."
    return "Check the path and its permissions."


def _array_in_path(path: str) -> str:
    """Return a sentence about a path that continues inside of a file, such as "a.h5/images", with a leading space."""
    for match in re.finditer("[:/]+", path):
        if os.path.isfile(path[: match.start()]) and (key := path[match.end() :]):
            return (
                f" A path names a file, and a key the array in it: pass {path[: match.start()]!r}, and {key!r} as the "
                "key."
            )
    return ""


def _unexpanded(path: str) -> str:
    """Return a sentence about a variable in a path that does not exist, with a leading space; empty without one."""
    if os.path.expandvars(path) != path:
        return " Variables are not expanded: pass os.path.expandvars(path)."
    if re.search(r"\$\w|\$\{|%\w+%", path):
        return " Variables are not expanded, and this one is not set. Write the path out."
    return ""


def _other_spelling(path: str) -> str:
    """Return a sentence about a path that exists in another spelling, with a leading space; empty if there is none."""
    if "\\" in path:
        unix = re.sub(r"^[A-Za-z]:", "", path).replace("\\", "/")
        return f" Did you mean {unix!r}?" if os.path.exists(unix) else " Folders are separated by '/' here."
    pieces = [piece.strip(" \t\r\n[]()'\"") for piece in path.split(",")]
    if pieces == [path] or not all(piece and os.path.exists(piece) for piece in pieces):
        return ""
    return f" Did you mean {pieces[0]!r}?" if len(pieces) == 1 else f" Pass a list of files: {pieces!r}."


def _has_suffix(name: str) -> bool:
    """Return whether a file of a directory is used; hidden ones are not, as in a glob."""
    return name.endswith(SUFFIXES) and not name.startswith(".")


def _regular_file(path: str, name: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(path) or "."
        if os.path.islink(path):
            reason, guess = f"it is a link to {os.readlink(path)!r}, which does not exist", ""
        elif not os.path.isdir(folder):
            reason = f"there is no directory {folder!r}"
            guess = _other_spelling(path)
        else:
            entries = _names_in(folder, path, name)
            files, folders = _h5_files(folder, entries), _folders(folder, entries)
            reason = _has(folder, files)
            same_stem = [file for file in files if file.rpartition(".")[0] == os.path.basename(path)]
            guess = (
                f" Did you mean {same_stem[0]!r}?" if same_stem else near(os.path.basename(path), [*files, *folders])
            )
            guess = _array_in_path(path) or _other_spelling(path) or guess
        raise H5FileError(
            f"{name}={path!r} does not exist; {reason}.{guess}{_unexpanded(path)} Pass the path of an HDF5 file "
            f"(relative paths start at {os.getcwd()!r})."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: the path has a null character
        cure = _array_in_path(path) or f" {_cure(error)}"
        raise H5FileError(f"{name}={path!r} cannot be accessed: {error}.{cure}") from error
    if not stat.S_ISREG(mode):
        # open() would block on a FIFO, and read from a device.
        raise H5FileError(f"{name}={path!r} is not a regular file. Pass the path of an HDF5 file.")
    return path
