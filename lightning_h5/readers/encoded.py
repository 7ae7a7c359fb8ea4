"""Rows that are decoded one by one, to arrays of several shapes, on all cores."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError
from ..hdf5 import ArrayLayout, RowCodec, bytes_of
from ..types import IntArray, RowReader
from .base import LayoutReader
from .thread_pool import TaskQueue

__all__ = ["EncodedReader", "images_alike"]

ROWS_OF_A_TASK = 8


class EncodedReader(LayoutReader):
    """Reads rows, and decodes each to an array of its own.

    Args:
        layout: the array with decoded rows.
        reader: reads rows as they are stored.
        work: shares decoding among threads; None decodes in this one.
        counters: counts bytes.
    """

    def __init__(
        self,
        layout: ArrayLayout,
        reader: RowReader,
        work: TaskQueue | None = None,
        counters: Counters | None = None,
    ) -> None:
        super().__init__(layout, counters)
        assert layout.decoding is not None, "rows are as stored"
        assert isinstance(layout.decoding.codec, RowCodec), "rows have one shape"
        self._reader, self._codec, self._work = reader, layout.decoding.codec, work
        self.fills_memory = self._codec.fills_memory

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        self.read_to(rows, out, np.arange(len(rows)))

    def read_to(
        self,
        rows: IntArray,
        out: npt.NDArray[Any],
        here: IntArray,
        memory: Sequence[npt.NDArray[Any]] | None = None,
    ) -> None:
        """Read rows to some places.

        Args:
            rows: of the array.
            out: objects.
            here: the place of each row in ``out``.
            memory: for each place memory that a row of its shape may be decoded to; it is then in ``out``.

        Raises:
            H5CorruptError: a row does not decode.
        """
        stored = self._reader.read(rows)
        is_bytes = stored.dtype.kind in "OV"

        def decode(places: range) -> None:
            for at, to in zip(places, here[places.start : places.stop].tolist(), strict=True):
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
