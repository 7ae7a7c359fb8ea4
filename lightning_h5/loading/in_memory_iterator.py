"""Batches of rows at hand: read where they are asked for, until the consumer has other things to do meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from ..datasets import RawBatch
from ..errors import H5Error
from ..types import BatchToken, IntArray
from .prefetch import CLOSED, ReadAhead

__all__ = ["InMemoryIterator", "RowsAtHand"]


class RowsAtHand(Protocol):
    """What batches are read from: a dataset that holds its rows."""

    def gather(self, rows: IntArray, epoch: int | None = None) -> RawBatch:
        """Reads rows in the caller's thread, on all cores."""
        ...


class InMemoryIterator:
    """Iterates over batches; reads ahead from when the consumer was longer elsewhere than copying rows took.

    Rows of a batch are copied in some fifty microseconds on all cores. A thread that did it ahead of a consumer who
    comes right back would only take turns with that one at the interpreter's lock, and keep a core from the copying.

    Args:
        source: what to read from.
        finish_all: makes batches of what was read for some tokens; each where it is taken.
        tokens: what to read.
        together: batches that are read together: what Python does for one is seen beside copying it.
        start_ahead: begins to read ahead what is left of the tokens.
    """

    def __init__(
        self,
        source: RowsAtHand,
        finish_all: Callable[[RawBatch, Sequence[BatchToken]], Iterator[Any]],
        tokens: Iterator[BatchToken],
        together: int,
        start_ahead: Callable[[Iterator[BatchToken]], ReadAhead],
    ) -> None:
        self._source, self._finish_all, self._tokens, self._together = source, finish_all, tokens, together
        self._start_ahead = start_ahead
        self._batches: Iterator[Any] = iter(())
        self._ahead: ReadAhead | None = None
        self._is_over = self._is_closed = False
        self._left: float | None = None
        self._reading = self._elsewhere = 0.0  # seconds

    def __iter__(self) -> InMemoryIterator:
        return self

    def __next__(self) -> Any:
        for batch in self._batches:
            return batch
        if self._ahead is None and not self._is_over:
            if self._is_closed:
                raise H5Error(CLOSED)
            self._read_some()
            for batch in self._batches:
                return batch
        raise StopIteration

    def _read_some(self) -> None:
        came = perf_counter()
        if self._left is not None:
            self._elsewhere += came - self._left
            if self._elsewhere > self._reading:
                self._batches = self._ahead = self._start_ahead(self._tokens)
                return
        self._is_over = True  # with an error too
        if tokens := list(islice(self._tokens, self._together)):
            raw = self._source.gather(np.concatenate([token.rows for token in tokens]), tokens[0].epoch)
            self._batches = self._finish_all(raw, tokens)
            self._is_over = False
        self._left = perf_counter()
        self._reading += self._left - came

    def close(self) -> None:
        """Ends the iteration, and the threads if any."""
        self._is_closed = True
        if self._ahead is None:
            self._batches = iter(())
        else:
            self._ahead.close()
