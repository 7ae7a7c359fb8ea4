"""Reading ahead in this process: threads decode and gather batches, the consumer transforms them.

What is decoded is looked up ahead of the batches that need it, a slab at a time, by a team of threads. One thread more
gathers batches. A consumer that comes too early does not wait: it gathers a batch itself that the thread has not begun,
and decodes for it. While a model trains, the threads have the next batches ready; where nothing is trained, all cores
read. (Measured on two cores, rows of 12 KiB from a contiguous array, rows a second: one thread and helping 445,000, two
threads and helping 350,000, two threads without 310,000, four threads 250,000: they wait for the interpreter's lock.)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

import numpy as np

from ..datasets import RawBatch
from ..errors import H5Error
from ..readers import Work
from ..types import BatchToken, IntArray

__all__ = ["BatchSource", "ReadAhead"]

Finish: TypeAlias = Callable[[Any, BatchToken], Any]


class BatchSource(Protocol):
    """What batches are read from: a dataset."""

    work: Work

    def begin(self, rows: IntArray, epoch: int | None = None) -> Callable[[], RawBatch]:
        """Begins to read rows; called for one batch, or several together, after the other. What it gives reads them."""
        ...

    def prefetch(self, rows: IntArray) -> bool:
        """Has what rows need decoded; False where there was not room for all of it."""
        ...


class _Reading:
    """Some batches that are read together: what looking up and copying cost besides is the same for eight as for one.

    A lock tells when they are read; the standard library's executor and futures would cost 24 microseconds, not 11.
    """

    __slots__ = ("done", "error", "is_begun", "raws", "tokens")

    def __init__(self, tokens: Sequence[BatchToken]) -> None:
        self.tokens = deque(tokens)
        self.raws: deque[RawBatch] = deque()
        self.error: BaseException | None = None  # of the batch after those in `raws`
        self.is_begun = False
        self.done = threading.Lock()
        self.done.acquire()

    def rows(self) -> IntArray:
        """Rows of all batches."""
        return self.tokens[0].rows if len(self.tokens) == 1 else np.concatenate([token.rows for token in self.tokens])

    def read(self, source: BatchSource, turn: threading.Lock) -> None:
        """Reads them; gives up the turn once all that they need is on its way."""
        try:
            try:
                self._read_all(source, turn)
            except Exception:
                if len(self.tokens) == 1:
                    raise
                for token in self.tokens:  # those before the one that cannot be read are as good as ever
                    self.raws.append(source.begin(token.rows, token.epoch)())
        except BaseException as error:  # it belongs to the one who takes this batch
            self.error = error
            if not isinstance(error, Exception):
                raise  # an interrupt ends the loop at once
        finally:
            self.done.release()

    def _read_all(self, source: BatchSource, turn: threading.Lock) -> None:
        try:
            complete = source.begin(self.rows(), self.tokens[0].epoch)
        finally:
            turn.release()
        self.raws.extend(complete().split(len(token.rows) for token in self.tokens))

    def is_done(self) -> bool:
        """Whether they are read."""
        return not self.done.locked()

    def wait(self) -> None:
        """Waits until they are."""
        with self.done:
            pass

    def take(self) -> tuple[Any, BatchToken]:
        """The next batch, as it was read; raises what went wrong with it."""
        if not self.raws and self.error is not None:
            raise self.error
        return self.raws.popleft(), self.tokens.popleft()


class ReadAhead:
    """Iterates over batches while threads read the next ones.

    Batches come in the order of the tokens. The threads end with the iteration, with an error, with ``close``,
    and when this object is forgotten. An error while reading is raised by the ``next()`` whose batch it was.

    Args:
        source: what to read from.
        finish: makes a batch of what was read for a token; called where the batch is taken.
        tokens: what to read; consumed by ``next()``, never by a thread.
        depth: batches that are read ahead, at least; those that are read together may be one round more.
        together: batches that are read together.
        lookahead: batches after these whose slabs are decoded ahead, as far as there is room.
        team: threads that decode.
    """

    def __init__(
        self,
        source: BatchSource,
        finish: Finish,
        tokens: Iterator[BatchToken],
        depth: int,
        *,
        together: int = 1,
        lookahead: int = 0,
        team: int = 0,
    ) -> None:
        self._finish = finish
        self._tokens, self._together = tokens, together
        self._queue = _Queue(source)
        self._ahead: deque[_Reading] = deque()
        self._later: deque[_Reading] = deque()  # what comes after those, to look at
        self._current: _Reading | None = None
        self._ended = self._closed = False
        self._lookahead, self._n_team = -(-lookahead // together), team
        for _ in range(-(-depth // together)):
            self._read_more()
        # The threads must not hold this object, or it would never be forgotten.
        self._threads = source.work.start_team(team)
        self._threads.append(
            threading.Thread(target=_work, args=(self._queue,), name="lightning_h5-read-ahead", daemon=True)
        )
        self._threads[-1].start()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._current is None or not self._current.tokens:
            self._current = self._next_reading()
        try:
            raw, token = self._current.take()
        except BaseException:
            self._end()
            raise
        return self._finish(raw, token)

    def _next_reading(self) -> _Reading:
        if self._closed and not self._ended:
            raise H5Error("reading ahead was closed in the middle of an epoch. Start a new iteration of the loader.")
        if not self._ahead:
            self._end()
            raise StopIteration
        reading = self._ahead.popleft()
        self._read_more()
        try:
            while not reading.is_done() and self._help():
                pass
            reading.wait()
        except BaseException:
            self._end()
            raise
        return reading

    def _help(self) -> bool:
        """Reads batches here that the thread has not begun, instead of waiting; False where there are none."""
        return self._queue.read_next(wait=False)

    def _read_more(self) -> None:
        while len(self._later) <= self._lookahead and (tokens := list(islice(self._tokens, self._together))):
            reading = _Reading(tokens)
            self._later.append(reading)
            self._queue.wanted.append(reading)
        if self._later:
            reading = self._later.popleft()
            self._ahead.append(reading)
            self._queue.put(reading)

    def _end(self) -> None:
        self._ended = True
        self.close()

    def close(self) -> None:
        """Ends the threads; waits for what they are reading."""
        self._dismiss()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _dismiss(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.source.work.end_team(self._n_team)
        self._current = None
        self._ahead.clear()
        self._later.clear()
        self._queue.end()

    def __del__(self) -> None:
        # The collector may call this while its thread holds a lock that our thread waits for: never wait here.
        if hasattr(self, "_threads"):
            self._dismiss()


class _Queue:
    """What is to be read, in order, by the thread and by a consumer who has to wait.

    Whoever has the turn takes the oldest, and keeps the turn until that has begun: so all begin in order.
    """

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self.wanted: deque[_Reading] = deque()  # whose slabs are not all decoded ahead yet
        self._readings: deque[_Reading] = deque()
        self._permits: SimpleQueue[bool] = SimpleQueue()  # one for each of those; False ends the thread
        self._turn = threading.Lock()

    def put(self, reading: _Reading) -> None:
        """Adds one at the end."""
        self._readings.append(reading)
        self._permits.put(True)

    def end(self) -> None:
        """Forgets all, and ends the thread."""
        with suppress(Empty):
            while True:
                self._permits.get_nowait()
        self.wanted.clear()
        self._readings.clear()
        self._permits.put(False)

    def read_next(self, *, wait: bool) -> bool:
        """Reads the oldest; False where there is none, or, for who waits, none any more."""
        try:
            if not self._permits.get(block=wait):
                self._permits.put(False)
                return False
        except Empty:
            return False
        self._turn.acquire()
        try:
            reading = self._readings.popleft()
        except IndexError:  # forgotten meanwhile
            self._turn.release()
            return False
        reading.is_begun = True
        reading.read(self.source, self._turn)
        return True

    def decode_ahead(self) -> None:
        """Has slabs decoded in the order in which batches need them, until there is no room for more."""
        while self.wanted and self._turn.acquire(blocking=False):
            try:
                reading = self.wanted[0]
                if not reading.is_begun and not self.source.prefetch(reading.rows()):
                    return
                self.wanted.popleft()
            except IndexError:  # forgotten meanwhile
                return
            finally:
                self._turn.release()


def _work(queue: _Queue) -> None:
    queue.decode_ahead()
    while queue.read_next(wait=True):
        queue.decode_ahead()
