"""Reading ahead in this process: threads decode and gather batches, the consumer transforms them.

What is decoded is looked up ahead of the batches that need it, a block at a time, by a team of threads. One thread more
gathers batches. A consumer that comes too early does not wait: it gathers a batch itself that the thread has not begun,
and decodes for it. While a model trains, the threads have the next batches ready; where nothing is trained, all cores
read. (Measured on two cores, rows of 12 KiB from a contiguous array, rows a second: one thread and helping 445,000, two
threads and helping 350,000, two threads without 310,000, four threads 250,000: they wait for the interpreter's lock.)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

import numpy as np

from ..datasets import RawBatch
from ..errors import H5Error
from ..readers import TaskQueue
from ..types import BatchToken, IntArray

__all__ = ["BatchSource", "ReadAhead"]

CLOSED = "reading was closed in the middle of an epoch. Start a new iteration of the loader."

Finish: TypeAlias = Callable[[Any, BatchToken], Any]


class BatchSource(Protocol):
    """What batches are read from: a dataset."""

    work: TaskQueue

    def begin(self, rows: IntArray, epoch: int | None = None) -> Callable[[], RawBatch]:
        """Begins to read rows; called for one batch, or several together, after the other. What it gives reads them."""
        ...

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """Has what rows need decoded or read; False where there was not room for all of it."""
        ...


class _Reading:
    """Some batches that are read together: what looking up and copying cost besides is the same for eight as for one.

    A lock tells when they are read; the standard library's executor and futures would cost 24 microseconds, not 11.

    Args:
        tokens: what to read.
        error: what came instead of the token after these.
    """

    __slots__ = ("_error", "_raws", "_tokens", "done")

    def __init__(self, tokens: Sequence[BatchToken], error: BaseException | None = None) -> None:
        self._tokens = deque(tokens)
        self._raws: deque[RawBatch] = deque()
        self._error = error
        self.done = threading.Lock()
        self.done.acquire()

    def rows(self) -> IntArray:
        """Rows of all batches."""
        rows = [token.rows for token in self._tokens]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def read(self, source: BatchSource, turn: threading.Lock) -> None:
        """Reads them; gives up the turn once all that they need is on its way."""
        try:
            try:
                self._read_all(source, turn)
            except Exception:
                if len(self._tokens) == 1:
                    raise
                for token in self._tokens:  # those before the one that cannot be read are as good as ever
                    self._raws.append(source.begin(token.rows, token.epoch)())
        except BaseException as error:  # it belongs to the one who takes this batch
            self._error = error
            if not isinstance(error, Exception):
                raise  # an interrupt ends the loop at once
        finally:
            self.done.release()

    def _read_all(self, source: BatchSource, turn: threading.Lock) -> None:
        try:
            complete = source.begin(self.rows(), self._tokens[0].epoch) if self._tokens else None
        finally:
            turn.release()
        if complete is not None:
            self._raws.extend(complete().split([len(token.rows) for token in self._tokens]))

    def prefetch(self, source: BatchSource) -> bool:
        """Has what they need decoded or read; False where there was not room for all of it."""
        return not self._tokens or source.prefetch(self.rows(), self._tokens[0].epoch)

    def is_done(self) -> bool:
        """Whether they are read."""
        return not self.done.locked()

    def wait(self) -> None:
        """Waits until they are."""
        with self.done:
            pass

    def is_used_up(self) -> bool:
        """Whether all was taken, once they are read."""
        return not self._raws and self._error is None

    def take(self) -> tuple[Any, BatchToken]:
        """The next batch, as it was read; raises what went wrong with it."""
        if not self._raws and self._error is not None:
            raise self._error
        return self._raws.popleft(), self._tokens.popleft()


class ReadAhead:
    """Iterates over batches while threads read the next ones.

    Batches come in the order of the tokens. The threads end with the iteration, with an error, with ``close``,
    and when this object is forgotten. An error while reading is raised by the ``next()`` whose batch it was.

    Args:
        source: what to read from.
        finish: makes a batch of what was read for a token; called where the batch is taken.
        tokens: what to read. The first are asked for here, the others by whoever is about to read, one at a time.
        depth: batches that are read ahead, at least; those that are read together may be one round more.
        together: batches that are read together.
        lookahead: batches after these whose blocks are decoded ahead, as far as there is room.
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
        self._queue = _Queue(source, tokens, together, -(-depth // together), -(-lookahead // together))
        self._current: _Reading | None = None
        self._ended = self._closed = False
        self._n_team = team
        # The threads must not hold this object, or it would never be forgotten.
        self._threads = source.work.start_team(team)
        self._threads.append(
            threading.Thread(target=_work, args=(self._queue,), name="lightning_h5-read-ahead", daemon=True)
        )
        self._threads[-1].start()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._current is None or self._current.is_used_up():
            self._current = self._next_reading()
        try:
            raw, token = self._current.take()
        except BaseException:
            self._end()
            raise
        return self._finish(raw, token)

    def _next_reading(self) -> _Reading:
        if self._ended:
            raise StopIteration
        try:
            reading = self._queue.take()
            if reading is None:
                if self._closed:
                    raise H5Error(CLOSED)
                raise StopIteration
            # Instead of waiting, read what the thread has not begun.
            while not reading.is_done() and self._queue.read_next():
                pass
            reading.wait()
        except BaseException:
            self._end()
            raise
        return reading

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
        self._queue.end()

    def __del__(self) -> None:
        # The collector may call this while its thread holds a lock that our thread waits for: never wait here.
        if hasattr(self, "_threads"):
            self._dismiss()


class _Queue:
    """What is to be read, in order, by the thread and by a consumer who has to wait.

    Whoever has the turn begins to read the oldest, and gives the turn up once that has begun: so all begin in order.
    Tokens are asked for outside of it, so that the thread can do so ahead while the consumer reads.
    """

    def __init__(
        self, source: BatchSource, tokens: Iterator[BatchToken], together: int, depth: int, lookahead: int
    ) -> None:
        self.source = source
        self._tokens: Iterator[BatchToken] | None = tokens
        self._together, self._depth, self._lookahead = together, depth, lookahead
        self._later: deque[_Reading] = deque()  # what comes next, as far as tokens were asked for
        self._n_decoded = 0  # of these, those whose blocks are all on their way
        self._begun: deque[_Reading] = deque()  # and not taken yet
        self._asking, self._turn = threading.Lock(), threading.Lock()
        self._is_ended = False
        self._calls: SimpleQueue[bool] = SimpleQueue()  # wakes the thread; False ends it
        self._ask_for(1)

    def take(self) -> _Reading | None:
        """The oldest that was begun, by the caller if by nobody else; None after the last one."""
        while not self._begun:
            if not self.read_next() and not self._begun:
                return None
        try:
            reading = self._begun.popleft()
        except IndexError:  # forgotten meanwhile
            return None
        self._calls.put(True)
        return reading

    def end(self) -> None:
        """Forgets all, and ends the thread. Waits for nothing: the collector may call it from anywhere."""
        self._is_ended = True
        self._begun.clear()
        self._calls.put(False)

    def wait_for_call(self) -> bool:
        """Waits until there may be more to do; False where there never will be."""
        return self._calls.get() and not self._is_ended

    def read_next(self) -> bool:
        """Reads the next batches; False where there are none, or as many are begun as are wanted."""
        reading = None
        self._turn.acquire()
        try:
            if len(self._begun) < self._depth and not self._is_ended and self._ask_for(1):
                reading = self._later.popleft()
                self._n_decoded = max(0, self._n_decoded - 1)
                self._begun.append(reading)
        finally:
            if reading is None:
                self._turn.release()
        if reading is not None:
            reading.read(self.source, self._turn)
        return reading is not None

    def decode_ahead(self) -> None:
        """Has blocks decoded in the order in which batches need them, until there is no room for more."""
        while not self._is_ended and (place := self._n_decoded) <= self._lookahead:
            if not self._ask_for(place + 1) or not self._turn.acquire(blocking=False):
                return
            try:
                if place == self._n_decoded and place < len(self._later):  # nobody was faster
                    if not self._later[place].prefetch(self.source):
                        return
                    self._n_decoded += 1
            finally:
                self._turn.release()

    def _ask_for(self, n: int) -> bool:
        """Asks for tokens until so many readings come next; False where there are no more."""
        if len(self._later) >= n:
            return True
        with self._asking:
            while len(self._later) < n:
                tokens: list[BatchToken] = []
                error = None
                try:
                    tokens.extend(islice(self._tokens or (), self._together))
                except Exception as raised:  # it belongs to the one who takes this batch
                    self._tokens, error = None, raised
                if not tokens and error is None:
                    return False
                self._later.append(_Reading(tokens, error))
        return True


def _work(queue: _Queue) -> None:
    is_wanted = True
    while is_wanted:
        queue.decode_ahead()
        is_wanted = queue.read_next() or queue.wait_for_call()
