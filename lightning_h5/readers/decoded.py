"""Rows that are decoded after they were read: to one shape and dtype, or one by one to arrays of several shapes."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError, H5MemoryError
from ..hdf5 import ArrayLayout, Codec, Decoding
from ..types import IntArray, RowReader
from .base import LayoutReader, checked_places, row_slices
from .block_memory import BlockMemory, scratch
from .block_sources import BlockSource
from .codecs import Unpack, UnpackLoops
from .kept_chunks import KeptChunks
from .row_codecs import RowCodec, bytes_of
from .thread_pool import TaskQueue

__all__ = ["DecodedCopies", "DecodedReader", "DecodedSource", "EncodedReader", "images_alike"]


ROWS_OF_A_TASK = 8  # that are decoded one by one

NOWHERE = np.empty(0, np.int64)


def compiled_codec(layout: ArrayLayout, decoding: Decoding) -> Codec:
    """Return the codec of an array's rows, compiled if possible."""
    stored, codec = decoding.array, decoding.codec
    if not isinstance(codec, Unpack) or stored.dtype == np.float16:  # Numba has no float16
        return codec
    codec = codec.compiled()
    codec.decode(np.empty((0, *stored.row_shape), stored.dtype), np.empty((0, *layout.row_shape), layout.dtype))
    return codec


def _stored_memory(n_rows: int, of: ArrayLayout | RowReader) -> npt.NDArray[Any]:
    """Return this thread's memory for rows as they are stored."""
    shape = (n_rows, *of.row_shape)
    return np.ndarray(shape, of.dtype, scratch("before decoding", math.prod(shape) * of.dtype.itemsize))


class DecodedReader(LayoutReader):
    """Reads rows, and decodes them.

    Args:
        layout: the array with decoded rows.
        decoding: how they are decoded.
        reader: reads rows as they are stored.
        counters: counts bytes.
    """

    def __init__(
        self, layout: ArrayLayout, decoding: Decoding, reader: RowReader, counters: Counters | None = None
    ) -> None:
        super().__init__(layout, counters)
        self._reader, self._decoding, self._codec = reader, decoding, decoding.codec

    def compile(self) -> None:
        """Compile the codec of the rows, if possible."""
        self._codec = compiled_codec(self.layout, self._decoding)

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        for cut in row_slices(len(rows), max(1, self.layout.row_bytes)):
            stored = None if self._reader.dtype.hasobject else _stored_memory(len(rows[cut]), self._reader)
            self._codec.decode(self._reader.read(rows[cut], stored), out[cut])

    def close(self) -> None:
        """Close the reader of stored rows."""
        self._reader.close()


class DecodedSource:
    """Loads blocks from another source, and decodes their rows.

    Args:
        layout: the array with decoded rows.
        decoding: how they are decoded.
        source: loads its rows as they are stored.
    """

    n_parts = 1
    kept: KeptChunks | None = None

    def __init__(self, layout: ArrayLayout, decoding: Decoding, source: BlockSource) -> None:
        self.stored, self._codec = source, decoding.codec
        self._layout, self._decoding = layout, decoding
        self.n_rows, self.rows_per_block, self.grid = source.n_rows, source.rows_per_block, source.grid
        self.parts_together, self.picks_rows = max(1, source.parts_together // source.n_parts), source.picks_rows

    def compile(self) -> None:
        """Compile the codec of the rows, if possible."""
        self._codec = compiled_codec(self._layout, self._decoding)

    def will_need(self, blocks: IntArray) -> None:
        """See ``BlockSource.will_need``."""
        self.stored.will_need(blocks)

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        rows = _stored_memory(self.rows_per_block, self._decoding.array)
        stored = BlockMemory(rows, np.zeros(1, np.int64), self.rows_per_block)
        for block, out in zip(blocks, memory, strict=True):
            self.stored.load([block], range(self.stored.n_parts), stored)
            self._codec.decode(rows[: len(out)], out)

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``BlockSource.pick``."""
        array = self._decoding.array
        stored: npt.NDArray[Any] = np.empty((len(rows), *array.row_shape), array.dtype)
        self.stored.pick(block, rows, stored)
        self._codec.decode(stored, out)


class DecodedCopies:
    """Decodes packed numbers as rows are copied out of blocks; a ``CopyChange``.

    Blocks then stay as they are stored, which takes half the memory or less, and numbers are written once, to a batch.

    Args:
        codec: decodes.
        loops: its compiled loops.
        dtype: of decoded rows.
    """

    def __init__(self, codec: Unpack, loops: UnpackLoops, dtype: np.dtype[Any]) -> None:
        self._codec, self._loops, self._dtype = codec, loops, dtype

    def compile(self, stored: np.dtype[Any]) -> None:
        """See ``CopyChange``."""
        self._codec.take(self._loops, np.empty((1, 1), stored), NOWHERE, np.empty((1, 1), self._dtype), NOWHERE)

    def take(
        self, rows: npt.NDArray[Any], places: IntArray | None, out: npt.NDArray[Any], out_places: IntArray | None = None
    ) -> None:
        """See ``CopyChange``; ``out`` is of the dtype of decoded rows."""
        if not out.size:
            return
        n_rows = len(out if out_places is None else out_places)
        places, out_places = checked_places(places, n_rows, len(rows)), checked_places(out_places, n_rows, len(out))
        self._codec.take(self._loops, rows, places, out, out_places)


class EncodedReader(LayoutReader):
    """Reads rows, and decodes each to an array of its own.

    Args:
        layout: the array with decoded rows.
        codec: decodes a row.
        reader: reads rows as they are stored.
        work: shares decoding among threads; None decodes in this one.
        counters: counts bytes.
    """

    def __init__(
        self,
        layout: ArrayLayout,
        codec: RowCodec,
        reader: RowReader,
        work: TaskQueue | None = None,
        counters: Counters | None = None,
    ) -> None:
        super().__init__(layout, counters)
        self._reader, self._codec, self._work = reader, codec, work
        self.fills_memory, self._is_scalar = codec.fills_memory, layout.is_scalar

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        self.read_to(rows, out, np.arange(len(rows)))

    def read_to(
        self,
        rows: IntArray,
        out: npt.NDArray[Any],
        out_places: IntArray,
        memory: Sequence[npt.NDArray[Any]] | None = None,
    ) -> None:
        """Read rows to some places.

        Args:
            rows: of the array.
            out: objects.
            out_places: the place of each row in ``out``.
            memory: for each place memory that a row of its shape may be decoded to; it is then in ``out``.

        Raises:
            H5CorruptError: a row does not decode.
        """
        stored = self._reader.read(rows)
        is_bytes = stored.dtype.kind in "OV" or self._is_scalar

        def decode(places: range) -> None:
            for at, to in zip(places, out_places[places.start : places.stop].tolist(), strict=True):
                row = bytes_of(stored[at]) if is_bytes else stored[at]
                out[to] = self._decoded(row, int(rows[at]), None if memory is None else memory[to])

        if self._work is None or len(rows) <= ROWS_OF_A_TASK:
            decode(range(len(rows)))
            return
        pieces = [range(at, min(at + ROWS_OF_A_TASK, len(rows))) for at in range(0, len(rows), ROWS_OF_A_TASK)]
        pending = _Pending(len(pieces))
        for piece in pieces:
            self._work.put(partial(pending.run, partial(decode, piece)))
        with self._work.helpers():
            while not pending.is_over:
                if not self._work.help():
                    pending.over.wait()
        if pending.error is not None:
            raise pending.error

    def _decoded(self, stored: Any, row: int, memory: npt.NDArray[Any] | None) -> Any:
        try:
            return self._codec.row(stored, memory)
        except MemoryError as error:
            layout = self.layout
            raise H5MemoryError(
                f"there is not enough memory to decode row {row} of {layout.key!r} in {layout.path!r}. Pass a smaller "
                "batch_size or a smaller num_workers."
            ) from error
        except Exception as error:
            layout = self.layout
            raise H5CorruptError(
                f"row {row} of {layout.key!r} in {layout.path!r} does not decode: {type(error).__name__}: {error}. "
                "Write it again, or leave it out."
            ) from error

    def close(self) -> None:
        """Close the reader of stored rows."""
        self._reader.close()


def images_alike(rows: npt.NDArray[Any]) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
    """Return shape and dtype of decoded images, their channels first, if all have the same; otherwise None."""
    kinds = {(row.shape, row.dtype) for row in rows if _is_image(row)}
    return kinds.pop() if len(kinds) == 1 and all(map(_is_image, rows)) else None


def _is_image(row: Any) -> bool:
    return isinstance(row, np.ndarray) and row.ndim == 3 and np.moveaxis(row, 0, -1).flags.c_contiguous


class _Pending:
    """Tasks of one read, and the first error of them."""

    def __init__(self, n: int) -> None:
        self._left, self._lock = n, threading.Lock()
        self.over = threading.Event()
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    def run(self, task: Any) -> None:
        try:
            if self.error is None:
                task()
        except BaseException as error:
            self.error = error
        finally:
            with self._lock:
                self._left -= 1
                if not self._left:
                    self.over.set()
