"""Rows that are decoded one by one, to arrays of several shapes, on all cores."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError
from ..hdf5 import ArrayLayout, RowCodec, bytes_of
from ..types import IntArray, RowReader
from .base import LayoutReader
from .thread_pool import TaskQueue

__all__ = ["EncodedReader"]

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

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        stored = self._reader.read(rows)
        if self._work is None or len(rows) <= ROWS_OF_A_TASK:
            self._decode(range(len(rows)), rows, stored, out)
            return
        pieces = [range(at, min(at + ROWS_OF_A_TASK, len(rows))) for at in range(0, len(rows), ROWS_OF_A_TASK)]
        pending = _Pending(len(pieces))
        for piece in pieces:
            self._work.put(partial(pending.run, partial(self._decode, piece, rows, stored, out)))
        with self._work.helpers():
            while not pending.is_over:
                if not self._work.help():
                    pending.over.wait()
        if pending.error is not None:
            raise pending.error

    def _decode(self, places: range, rows: IntArray, stored: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        is_bytes = stored.dtype.kind in "OV"
        for at in places:
            try:
                out[at] = self._codec.row(bytes_of(stored[at]) if is_bytes else stored[at])
            except Exception as error:
                layout = self.layout
                raise H5CorruptError(
                    f"row {int(rows[at])} of {layout.key!r} in {layout.path!r} does not decode: "
                    f"{type(error).__name__}: {error}. Write it again, or leave it out."
                ) from error

    def close(self) -> None:
        """Close the reader of stored rows."""
        self._reader.close()


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
