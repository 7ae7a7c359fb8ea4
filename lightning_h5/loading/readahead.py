"""Reading ahead in this process: a thread gathers batches, the consumer transforms them.

A consumer that comes too early does not wait: it reads a batch itself that the thread has not begun. While a model
trains, the thread has the next batches ready; where nothing is trained, two cores read. (Measured on two cores,
rows of 12 KiB from a contiguous array, rows a second: one thread and helping 445,000, two threads and helping
350,000, two threads without 310,000, four threads 250,000: they wait for the interpreter's lock.)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from ..errors import H5Error
from ..types import BatchToken, IntArray

__all__ = ["ReadAhead"]

Gather: TypeAlias = Callable[[IntArray], Any]


class _Reading:
    """A batch that is being read.

    A lock tells when it is; the standard library's executor and futures would cost 24 microseconds a batch, not 11.
    """

    __slots__ = ("done", "error", "raw", "token")

    def __init__(self, token: BatchToken) -> None:
        self.token = token
        self.raw: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def read(self, gather: Gather) -> None:
        """Reads it."""
        try:
            self.raw = gather(self.token.rows)
        except BaseException as error:  # it belongs to the one who takes this batch
            self.error = error
            if not isinstance(error, Exception):
                raise  # an interrupt ends the loop at once
        finally:
            self.done.release()

    def is_done(self) -> bool:
        """Whether it is read."""
        return not self.done.locked()

    def result(self) -> Any:
        """What was read, once it is; raises what went wrong."""
        self.done.acquire()
        if self.error is not None:
            raise self.error
        return self.raw


class ReadAhead:
    """Iterates over batches while a thread reads the next ones.

    Batches come in the order of the tokens. The thread ends with the iteration, with an error, with ``close``,
    and when this object is forgotten. An error while reading is raised by the ``next()`` whose batch it was.

    Args:
        gather: reads rows; called by the thread and by the consumer at the same time.
        finish: makes a batch of what was read for a token; called where the batch is taken.
        tokens: what to read; consumed by ``next()``, never by the thread.
        depth: batches that are read ahead at most.
    """

    def __init__(
        self, gather: Gather, finish: Callable[[Any, BatchToken], Any], tokens: Iterator[BatchToken], depth: int
    ) -> None:
        self._gather, self._finish = gather, finish
        self._tokens = tokens
        self._todo: SimpleQueue[_Reading | None] = SimpleQueue()
        self._ahead: deque[_Reading] = deque()
        self._ended = self._closed = False
        # The thread must not hold this object, or it would never be forgotten.
        self._thread = threading.Thread(
            target=_work, args=(gather, self._todo), name="lightning_h5-read-ahead", daemon=True
        )
        for _ in range(depth):
            self._read_one_more()
        self._thread.start()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._closed and not self._ended:
            raise H5Error("reading ahead was closed in the middle of an epoch. Start a new iteration of the loader.")
        if not self._ahead:
            self._end()
            raise StopIteration
        reading = self._ahead.popleft()
        self._read_one_more()
        try:
            while not reading.is_done() and self._help():
                pass
            raw = reading.result()
        except BaseException:
            self._end()
            raise
        return self._finish(raw, reading.token)

    def _help(self) -> bool:
        """Reads a batch here that the thread has not begun, instead of waiting; False where there is none."""
        with suppress(Empty):
            reading = self._todo.get_nowait()
            if reading is not None:
                reading.read(self._gather)
                return True
        return False

    def _read_one_more(self) -> None:
        token = next(self._tokens, None)
        if token is not None:
            reading = _Reading(token)
            self._ahead.append(reading)
            self._todo.put(reading)

    def _end(self) -> None:
        self._ended = True
        self.close()

    def close(self) -> None:
        """Ends the thread; waits for the batch that it is reading."""
        self._dismiss()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _dismiss(self) -> None:
        self._closed = True
        self._ahead.clear()
        with suppress(Empty):
            while True:
                self._todo.get_nowait()
        self._todo.put(None)

    def __del__(self) -> None:
        # The collector may call this while its thread holds a lock that our thread waits for: never wait here.
        if hasattr(self, "_thread"):
            self._dismiss()


def _work(gather: Gather, todo: SimpleQueue[_Reading | None]) -> None:
    while (reading := todo.get()) is not None:
        reading.read(gather)
        del reading  # while this thread waits, it holds no batch
