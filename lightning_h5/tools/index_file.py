"""Write an index of a file: the bytes that the HDF5 library reads to find arrays and chunks (see ``MetadataIndex``)."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import H5Error, H5FileError
from ..hdf5 import (
    FAULTS,
    MetadataIndex,
    entries_of,
    expand_user,
    find_array,
    layout_of,
    open_recorded,
    opened,
    sampled_identity,
)
from ..progress_bar import with_bar
from ..staging import INDEX_SUFFIX, shown_url
from ..types import IntArray, PathLike
from .output_files import check_output

__all__ = ["IndexReport", "write_index"]


@dataclass(frozen=True)
class IndexReport:
    """The result of ``write_index``.

    Attributes:
        path: the file.
        index: path of the index.
        n_bytes: size of the file.
        n_index_bytes: size of the index.
        n_arrays: number of arrays.
    """

    path: str
    index: str
    n_bytes: int
    n_index_bytes: int
    n_arrays: int


def write_index(
    path: PathLike, output: PathLike | None = None, *, overwrite: bool = False, shows_progress: bool = False
) -> IndexReport:
    """Write an index of a file, to store next to it in an object store, as ``<name of the file>.index``.

    Setting up training then needs a few requests per file, for any number of chunks. Reads only metadata.

    Args:
        path: a file, or the URL of an object.
        output: path of the index. None writes ``<name of the file>.index`` next to a file, or to the working directory
            for a URL.
        overwrite: replace an existing file.
        shows_progress: show progress on the standard error.

    Raises:
        H5FileError: the file cannot be read, or the index cannot be written.
    """
    path = expand_user(path)
    with opened(path) as (n_bytes, pread, _):
        beside = f"{path if os.path.exists(path) else os.path.basename(path)}{INDEX_SUFFIX}"
        target = beside if output is None else expand_user(output)
        check_output(target, [path], overwrite=overwrite)
        n_arrays, read = 0, list[tuple[int, int]]()
        with open_recorded(n_bytes, pread, read) as file:
            names = [entry.name for entry in entries_of(file) if entry.kind == "array"]
            for name in with_bar(names, "looking at arrays", shows_progress=shows_progress, unit="array"):
                n_arrays += 1
                with suppress(H5Error, *FAULTS):  # training cannot read this array
                    layout_of(find_array(file, name), path, name)
        starts, sizes = _merged(read)
        pieces = [pread(size, start) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
        index = MetadataIndex(n_bytes, sampled_identity(path), starts.tolist(), pieces).to_bytes()
    partial = Path(f"{target}.{os.getpid()}.partial")
    try:
        partial.write_bytes(index)
        partial.replace(target)
    except OSError as error:
        raise H5FileError(
            f"the index of {shown_url(path)!r} cannot be written to {target!r}: {error.strerror}. Check that its "
            "folder is writable, and that the disk is not full."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return IndexReport(path, target, n_bytes, len(index), n_arrays)


def _merged(read: list[tuple[int, int]]) -> tuple[IntArray, IntArray]:
    """Return start and size of each stretch that was read."""
    starts, sizes = np.array(sorted(read), dtype=np.int64).reshape(-1, 2).T
    ends = np.maximum.accumulate(starts + sizes)
    firsts = np.flatnonzero(np.concatenate([[True], starts[1:] > ends[:-1]]))
    lasts = np.append(firsts[1:] - 1, len(starts) - 1)
    return starts[firsts], ends[lasts] - starts[firsts]
