"""Read stored bytes of an array's file by position, from its mirror if it is staged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from time import perf_counter

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError, H5Error, H5FileError
from ..hdf5 import ArrayLayout, process_pool, size_of
from ..types import IntArray
from .filters.pipeline import ChunksRead
from .many_reads import advise_pieces, are_cached, forget_pieces, read_pieces

__all__ = ["forget_stored", "give_back", "prefetch_stored", "read_stored", "read_with"]


def read_stored(
    layout: ArrayLayout,
    out: npt.NDArray[np.uint8],
    starts: IntArray,
    stops: IntArray,
    offsets: IntArray,
    name: Callable[[int, int], str],
    counters: Counters,
) -> None:
    """Read pieces of an array's file in one call, without the interpreter's lock.

    Args:
        layout: the array.
        out: contiguous memory for the pieces.
        starts: where in ``out`` each piece begins, shape ``(n_pieces,)``.
        stops: where in ``out`` each piece ends.
        offsets: where in the file each piece begins.
        name: returns the name of a piece, from its number and the number of a missing byte, for the error.
        counters: counts where bytes came from if the file is staged.

    Raises:
        H5CorruptError: the file ends too early.
        H5FileError: the file cannot be read.
        H5DataChangedError: it has changed since it was described.
    """
    try:
        if layout.guard.staging is not None and _read_staged(layout, out, starts, stops, offsets, counters):
            return
        if not layout.guard.is_remote:
            with process_pool().descriptor(layout.path, layout.guard) as fd:
                _count_cached(fd, offsets, stops - starts, counters)
                # No piece is longer than requested, so the sum is right only if all are complete.
                if read_pieces(fd, out, starts, stops, offsets) == (stops - starts).sum():
                    return
        with process_pool().reading(layout.path, layout.guard) as pread:
            pieces = zip(starts.tolist(), stops.tolist(), offsets.tolist(), strict=True)
            _read_slowly(layout, pread, out.data, pieces, name)
    except H5Error:  # some are also an OSError
        raise
    except OSError as error:
        raise H5FileError(
            f"reading {layout.key!r} from {layout.path!r} failed: {error.strerror}. "
            "Check the disk or the network file system, then resume."
        ) from error


def _read_staged(
    layout: ArrayLayout,
    out: npt.NDArray[np.uint8],
    starts: IntArray,
    stops: IntArray,
    offsets: IntArray,
    counters: Counters,
) -> bool:
    """Read pieces of a file from its mirror on a local disk, or from the file if missing; see ``read_stored``.

    Returns False if some piece was short.
    """
    with process_pool().mirror(layout.path, layout.guard) as mirror:
        sizes = stops - starts
        staged = mirror.stage(offsets, sizes, _neighbors(layout), counters)
        is_there, is_complete = staged.is_there, False
        with suppress(OSError):  # of the local disk
            if is_there.all():
                _count_cached(mirror.fd, offsets, sizes, counters)
                is_complete = read_pieces(mirror.fd, out, starts, stops, offsets) == sizes.sum()
            elif is_there.any():
                n_read = read_pieces(mirror.fd, out, starts[is_there], stops[is_there], offsets[is_there])
                is_complete = n_read == sizes[is_there].sum()
        is_read = mirror.is_unchanged(staged) & is_complete
        counters.add(mirror_bytes=int(sizes[is_read].sum()))
        if is_read.all():
            return True
        rest = ~is_read
        pieces = list(zip(starts[rest].tolist(), stops[rest].tolist(), offsets[rest].tolist(), strict=True))
        return mirror.read_origin(out.data, pieces, counters) == int(sizes[rest].sum())


def read_with(
    layout: ArrayLayout,
    offsets: IntArray,
    sizes: IntArray,
    read: Callable[[int], ChunksRead | None],
    counters: Counters,
) -> float | None:
    """Have a function read pieces of an array's file from a descriptor; return the seconds that reading took.

    Args:
        layout: the array.
        offsets: where in the file each piece begins.
        sizes: bytes of each.
        read: reads them; returns None if it failed.
        counters: see ``read_stored``.

    Returns:
        None if ``read`` failed; also if the file is staged, and its mirror does not have all of the pieces.

    Raises:
        H5DataChangedError: the file has changed since it was described.
    """
    if layout.guard.staging is None:
        with process_pool().descriptor(layout.path, layout.guard) as fd:
            return _seconds(read(fd), sizes, counters)
    with process_pool().mirror(layout.path, layout.guard) as mirror:
        began = perf_counter()
        staged = mirror.stage(offsets, sizes, _neighbors(layout), counters)
        waited = perf_counter() - began
        took = None
        if staged.is_there.all():
            took = _seconds(read(mirror.fd), sizes, counters)
        if took is None or not mirror.is_unchanged(staged).all():
            return None
        counters.add(mirror_bytes=int(sizes.sum()))
        return took + waited


def _seconds(read: ChunksRead | None, sizes: IntArray, counters: Counters) -> float | None:
    """Return the seconds that reading took; count bytes that came from the page cache."""
    if read is None:
        return None
    if read.are_cached:
        counters.add(cached_bytes=int(sizes.sum()))
    return read.seconds


def _count_cached(fd: int, offsets: IntArray, sizes: IntArray, counters: Counters) -> None:
    if are_cached(fd, offsets, sizes):
        counters.add(cached_bytes=int(sizes.sum()))


def prefetch_stored(layout: ArrayLayout, offsets: IntArray, sizes: IntArray, counters: Counters) -> None:
    """Begin to fetch pieces of an array's file, to its mirror or the page cache. Does not wait, and never raises."""
    with suppress(OSError):
        if layout.guard.staging is not None:
            with process_pool().mirror(layout.path, layout.guard) as mirror:
                mirror.prefetch(offsets, sizes, _neighbors(layout), counters)
        elif not layout.guard.is_remote:
            with process_pool().descriptor(layout.path, layout.guard) as fd:
                if advise_pieces(fd, offsets, sizes):
                    counters.add(fetched_bytes=int(sizes.sum()))


def give_back(layout: ArrayLayout, offsets: IntArray, sizes: IntArray) -> None:
    """Have pieces of an array's file leave the page cache, if it is a local file. Never raises."""
    if layout.guard.staging is None and not layout.guard.is_remote:
        with suppress(OSError), process_pool().descriptor(layout.path, layout.guard) as fd:
            forget_pieces(fd, offsets, sizes)


def forget_stored(layout: ArrayLayout, offsets: IntArray, sizes: IntArray) -> bool:
    """Drop pieces of a staged file from its mirror, which may be damaged; return whether the file is staged."""
    if layout.guard.staging is None:
        return False
    with process_pool().mirror(layout.path, layout.guard) as mirror:
        mirror.forget(offsets, sizes)
    return True


def _neighbors(layout: ArrayLayout) -> tuple[int, int] | None:
    """Return the first and last byte of an array whose rows are stored in one piece; None for other arrays.

    Rows are small, and an epoch reads most of them: fetching one alone would take as long as fetching many.
    """
    if (extent := layout.extent) is None:
        return None
    offset, n_bytes = extent
    return offset, offset + n_bytes


def _read_slowly(
    layout: ArrayLayout,
    pread: Callable[[int, int], bytes],
    memory: memoryview,
    pieces: Iterable[tuple[int, int, int]],
    name: Callable[[int, int], str],
) -> None:
    """Read pieces again, of which some were short: the kernel stops at 2 GiB, at a signal, or at the file's end."""
    for piece, (start, stop, offset) in enumerate(pieces):
        at = start
        while at < stop:
            position = offset + at - start
            data = pread(stop - at, position)
            memory[at : at + len(data)] = data
            if not data:
                raise H5CorruptError(
                    f"{layout.path!r} ends inside {name(piece, at - start)} of {layout.key!r}: byte {position:,} was "
                    f"requested, but the file has {size_of(layout.path):,}. It was truncated; copy it again."
                )
            at += len(data)
