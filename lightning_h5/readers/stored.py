"""Bytes as they are stored: pieces of a file into memory, all of them, or an error that says what is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from ..errors import H5CorruptError, H5FileError
from ..files import ArrayLayout, process_pool
from ..types import IntArray
from .scatter import read_pieces

__all__ = ["read_stored"]


def read_stored(
    layout: ArrayLayout,
    out: npt.NDArray[np.uint8],
    starts: IntArray,
    stops: IntArray,
    offsets: IntArray,
    name: Callable[[int, int], str],
) -> None:
    """Reads pieces of an array's file in one call, the interpreter's lock left free.

    Args:
        layout: the array.
        out: contiguous memory that the pieces fill.
        starts: where in ``out`` each piece begins, shape ``(n_pieces,)``.
        stops: where in ``out`` each piece ends.
        offsets: where in the file each piece begins.
        name: what to call a piece, by its number, of which a byte, by its number, is missing.

    Raises:
        H5CorruptError: the file ends too early.
        H5FileError: the file cannot be read.
        H5DataChangedError: it is not the one that the layout is of.
    """
    with process_pool().descriptor(layout.path, layout.guard) as fd:
        try:
            # No piece takes more than it holds: the sum is right only if all are full.
            if read_pieces(fd, out, starts, stops, offsets) != len(out):
                pieces = zip(starts.tolist(), stops.tolist(), offsets.tolist(), strict=True)
                _read_slowly(layout, fd, out.data, pieces, name)
        except H5CorruptError:  # an OSError too, and it has said what is wrong
            raise
        except OSError as error:
            raise H5FileError(
                f"reading {layout.key!r} from {layout.path!r} failed: {error.strerror}. "
                "Check the disk or the network file system, then resume."
            ) from error


def _read_slowly(
    layout: ArrayLayout,
    fd: int,
    memory: memoryview,
    pieces: Iterable[tuple[int, int, int]],
    name: Callable[[int, int], str],
) -> None:
    """The same where a piece came back short: the kernel stops at 2 GiB, at a signal, or at the file's end."""
    for piece, (start, stop, offset) in enumerate(pieces):
        at = start
        while at < stop:
            position = offset + at - start
            n = os.preadv(fd, [memory[at:stop]], position)
            if n == 0:
                raise H5CorruptError(
                    f"{layout.path!r} ends inside {name(piece, at - start)} of {layout.key!r}: byte {position:,} "
                    f"was asked and the file has {os.fstat(fd).st_size:,}. It was truncated; copy it again."
                )
            at += n
