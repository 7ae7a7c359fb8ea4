"""Batches read in this process: ahead of use by threads, or on demand if their rows are in memory.

A team of threads decodes ahead of the batches that need it, a chunk at a time. One more thread gathers batches. If no
batch is ready, the consumer reads the next unstarted batch itself instead of waiting. So while a model trains, threads
have the next batches ready; without one, all cores read. (More gathering threads are slower: they wait for the
interpreter's lock.)
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import numpy as np

from ..datasets import RawBatch
from ..errors import H5Error
from ..readers import TaskQueue
from ..threads import EndingThread
from ..types import BatchToken, IntArray
from .pass_tokens import PassTokens

__all__ = ["CLOSED", "BatchSource", "Batches", "FinishAll", "InMemoryIterator", "ReadAhead"]

CLOSED = "reading was closed in the middle of an epoch. Start a new iteration of the loader."

FinishAll: TypeAlias = Callable[[RawBatch, Sequence[BatchToken]], Iterator[Any]]


class BatchSource(Protocol):
    """The source of batches: a dataset."""

    work: TaskQueue

    def begin(self, rows: IntArray, epoch: int | None = None) -> Callable[[], RawBatch]:
        """Begin to read rows, in the order of the batches; return a function that completes the reading."""
        ...

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """Start to decode or read rows; return False if there was not room for all of them."""
        ...

    def gather(self, rows: IntArray, epoch: int | None = None) -> RawBatch:
        """Read rows in the caller's thread, on all cores; without bad ones if these are to be left out."""
        ...

    def read_others(self, rows: IntArray, epoch: int | None, error: Exception) -> RawBatch:
        """Read a batch again without its bad rows; raise the error if none is to be left out."""
        ...


class Batches(Protocol):
    """How batches come to an iteration: read by threads of this process, or by worker processes.

    After the batches of a pass come those of the next one, if it is sure to follow (see ``PassTokens``): an iteration
    counts the batches of its pass, and leaves the object to the next one. Otherwise the iterator ends.

    An implementation that raised an error holds nothing afterwards that would keep another pass from beginning.
    """

    def __next__(self) -> Any:
        """Return the next batch. Raises H5Error if it was closed before the last one."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether ``next`` would neither wait nor read."""
        ...

    @property
    def can_go_on(self) -> bool:
        """Whether another pass may have its batches from here: nothing was closed, and no worker has ended."""
        ...

    def end_pass(self) -> None:
        """Release what is left of a pass after its last batch was taken."""
        ...

    def close(self) -> None:
        """End the pass; calling it again has no effect."""
        ...


class _Reading:
    """Some batches that are read together: the overhead of looking up and copying is the same for eight as for one.

    A lock marks when they are read; an executor's futures would cost 24 microseconds, not 11.

    Args:
        tokens: the batches to read.
        error: raised instead of the token after these.
    """

    __slots__ = ("_error", "_parts", "_tokens", "done")

    def __init__(self, tokens: Sequence[BatchToken], error: BaseException | None = None) -> None:
        self._tokens = tokens
        self._parts: list[tuple[RawBatch, Sequence[BatchToken]]] = []  # what was read, and for which of them
        self._error = error
        self.done = threading.Lock()
        self.done.acquire()

    def __len__(self) -> int:
        return len(self._tokens)

    def rows(self) -> IntArray:
        """Return the rows of all batches."""
        rows = [token.rows for token in self._tokens]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def read(self, source: BatchSource, turn: threading.Lock) -> None:
        """Read them; release the turn once all that they need is under way."""
        try:
            try:
                self._read_all(source, turn)
            except Exception as error:
                if len(self._tokens) == 1:
                    token = self._tokens[0]
                    self._parts.append((source.read_others(token.rows, token.epoch, error), self._tokens))
                    return
                for token in self._tokens:  # the batches before a failing one are fine
                    self._parts.append((_read_alone(source, token), [token]))
        except BaseException as error:  # raised when this batch is consumed
            self._error = error
            if not isinstance(error, Exception):
                raise  # an interrupt ends the loop immediately
        finally:
            self.done.release()

    def _read_all(self, source: BatchSource, turn: threading.Lock) -> None:
        try:
            complete = source.begin(self.rows(), self._tokens[0].epoch) if self._tokens else None
        finally:
            turn.release()
        if complete is not None:
            self._parts.append((complete(), self._tokens))

    def prefetch(self, source: BatchSource) -> bool:
        """Start to decode or read their rows; return False if there was not room for all of them."""
        return not self._tokens or source.prefetch(self.rows(), self._tokens[0].epoch)

    def is_done(self) -> bool:
        """Return whether they are read."""
        return not self.done.locked()

    def wait(self) -> None:
        """Wait until they are read."""
        with self.done:
            pass

    def batches(self, finish_all: FinishAll) -> Iterator[Any]:
        """Yield the batches, once they are read, and raise the error of one that could not be read."""
        for raw, tokens in self._parts:
            yield from finish_all(raw, tokens)
        if self._error is not None:
            raise self._error


def _read_alone(source: BatchSource, token: BatchToken) -> RawBatch:
    """Return a batch, as it was read; without its bad rows, if these are to be left out."""
    try:
        return source.begin(token.rows, token.epoch)()
    except Exception as error:
        return source.read_others(token.rows, token.epoch, error)


class ReadAhead:
    """Iterates over batches while threads read the next ones.

    Batches come in the order of the tokens. The threads end with the iteration, with an error, with ``close``,
    and when this object is collected. An error while reading is raised by the ``next()`` of its batch.

    Args:
        source: the source of rows.
        finish_all: makes batches of the rows that were read for some tokens, each when it is taken.
        tokens: the batches to read. The first are taken here, others by the thread that reads next, one at a time.
        depth: batches that are read ahead.
        passes: the tokens, if passes may follow theirs; None if reading ends with them.
        together: batches that are read together, from one up to so many in the first readings of a pass.
        lookahead: batches after these with chunks that are decoded ahead, as far as there is room.
        far: the same while reads wait for a disk or a server.
        team: threads that decode.
    """

    def __init__(
        self,
        source: BatchSource,
        finish_all: FinishAll,
        tokens: Iterator[BatchToken],
        depth: int,
        *,
        passes: PassTokens | None = None,
        together: int = 1,
        lookahead: int = 0,
        far: int = 0,
        team: int = 0,
    ) -> None:
        self._finish_all = finish_all
        near, far = (-(-n // together) * together for n in (lookahead, max(lookahead, far)))
        self._queue = _Queue(source, tokens, passes, together, depth, (near, far))
        self._batches: Iterator[Any] | None = None  # of the present reading
        self._n_left = 0  # number of batches of the present reading that were not yielded
        self._ended = self._closed = False
        # The threads must not hold this object, or it would never be collected.
        self._n_team = len(source.work.start_team(team))
        self._thread = EndingThread(
            _work, (self._queue,), name="lightning_h5-read-ahead", end=partial(_dismiss, weakref.ref(self))
        )
        self._thread.start()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        try:
            for batch in self._batches or ():
                self._n_left -= 1
                return batch
            reading = self._next_reading()
            self._batches, self._n_left = reading.batches(self._finish_all), len(reading) - 1
            return next(self._batches)
        except BaseException:
            self._end()
            raise

    def _next_reading(self) -> _Reading:
        if self._ended:
            raise StopIteration
        reading = self._queue.take()
        if reading is None:
            if self._closed:
                raise H5Error(CLOSED)
            raise StopIteration
        # Instead of waiting, read a batch that the thread has not begun; but the first batch waits for no other.
        while self._batches is not None and not reading.is_done() and self._queue.read_next():
            pass
        reading.wait()
        return reading

    def _end(self) -> None:
        self._ended = True
        self.close()

    @property
    def is_ready(self) -> bool:
        """See ``Batches.is_ready``."""
        return self._n_left > 0 or self._queue.is_ready()

    @property
    def can_go_on(self) -> bool:
        """See ``Batches.can_go_on``."""
        return not self._closed

    def end_pass(self) -> None:
        """See ``Batches.end_pass``: the present reading has batches of that pass alone."""
        self._batches, self._n_left = iter(()), 0

    def close(self) -> None:
        """End the threads; wait until their present reads are done."""
        self._end_queue()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._end_team()  # after the last tasks of that thread
        self._queue.source.work.wait_for_ends()
        if self._queue.passes is not None:
            self._queue.passes.close()
        self._queue.source.work.end_waiting()

    def _dismiss(self) -> None:
        self._end_queue()
        self._end_team()

    def _end_queue(self) -> None:
        self._closed = True
        self._batches = None
        self._queue.end()

    def _end_team(self) -> None:
        self._queue.source.work.end_team(self._n_team)
        self._n_team = 0

    def __del__(self) -> None:
        # The garbage collector may call this in a thread with a lock that our thread waits for: never wait here.
        if hasattr(self, "_thread"):
            self._dismiss()


def _dismiss(reference: weakref.ref[ReadAhead]) -> None:
    if (reading := reference()) is not None:
        reading._dismiss()


class _Queue:
    """Batches to read, in order, by the thread and by a consumer that would have to wait.

    The thread that has the turn begins to read the oldest, and releases the turn once that has begun: so all begin in
    order. Tokens are taken outside of it, so that the thread can do so ahead while the consumer reads.

    A reading has batches of one pass. For a pass that the consumer has not come to, blocks are decoded as far ahead as
    while reads wait for a disk: a pass needs many new blocks at its start, and the one before it few at its end.
    """

    def __init__(
        self,
        source: BatchSource,
        tokens: Iterator[BatchToken],
        passes: PassTokens | None,
        together: int,
        depth: int,
        lookaheads: tuple[int, int],
    ) -> None:
        self.source, self.passes = source, passes
        self._tokens: Iterator[BatchToken] | None = tokens
        self._together, self._depth, self._lookaheads = together, depth, lookaheads
        self._n_next = 1  # batches of the next reading: the first one does not wait for others
        self._later: deque[_Reading] = deque()  # batches not begun, as far as tokens were taken
        self._n_decoded = 0  # the first of these batches, whose chunks are all being decoded
        self._begun: deque[_Reading] = deque()  # begun and not consumed
        self._taking, self._turn = threading.Lock(), threading.Lock()
        self._is_ended = False
        self._calls: SimpleQueue[bool] = SimpleQueue()  # wakes the thread; False stops it
        if passes is not None:
            passes.when_planned = partial(self._calls.put, True)
        self._take_tokens(1)

    def take(self) -> _Reading | None:
        """Return the oldest that was begun, by the caller if necessary; None after the last one."""
        while not self._begun:
            if not self.read_next(only_oldest=True) and not self._begun:
                return None
        try:
            reading = self._begun.popleft()
        except IndexError:  # dropped in the meantime
            return None
        self._calls.put(True)
        return reading

    def is_ready(self) -> bool:
        """Return whether the oldest batches are read."""
        oldest = next(iter(tuple(self._begun)), None)
        return oldest is not None and oldest.is_done()

    def end(self) -> None:
        """Drop all, and end the thread. Waits for nothing: the collector may call it from anywhere."""
        self._is_ended = True
        self._begun.clear()
        self._calls.put(False)

    def wait_for_call(self) -> bool:
        """Wait until there may be more to do; return False if there never will be."""
        return self._calls.get() and not self._is_ended

    def read_next(self, *, only_oldest: bool = False) -> bool:
        """Read the next batches; return False if there are none, or enough are begun.

        Args:
            only_oldest: read none if others were begun and not consumed, also by another thread in the meantime.
        """
        reading = None
        self._turn.acquire()
        try:
            is_wanted = not (self._is_ended or (only_oldest and self._begun))
            if is_wanted and self._take_tokens(1, waits=only_oldest) and self._has_room():
                reading = self._later.popleft()
                self._n_decoded = max(0, self._n_decoded - 1)
                self._begun.append(reading)
        finally:
            if reading is None:
                self._turn.release()
        if reading is not None:
            reading.read(self.source, self._turn)
        return reading is not None

    def _has_room(self) -> bool:
        """Return whether the next reading may begin."""
        readings = (*self._begun, self._later[0])
        return len(readings) == 1 or sum(map(len, readings)) <= self._depth

    def _n_ahead(self) -> int:
        """Return up to how many batches from the next one on are decoded ahead."""
        is_far = self.source.work.pace.is_slow or (self.passes is not None and self.passes.are_ahead)
        return self._lookaheads[is_far]

    def decode_ahead(self) -> None:
        """Start to decode chunks in the order in which batches need them, until there is no room for more."""
        while not self._is_ended:
            place = self._n_decoded
            if sum(map(len, tuple(self._later)[:place])) > self._n_ahead():
                return
            if not self._take_tokens(place + 1) or not self._turn.acquire(blocking=False):
                return
            try:
                if place == self._n_decoded and place < len(self._later):  # unless another thread was faster
                    if not self._later[place].prefetch(self.source):
                        return
                    self._n_decoded += 1
            finally:
                self._turn.release()

    def _begins_next_pass(self, *, waits: bool) -> bool:
        if self._tokens is None or self.passes is None or not self.passes.begin_next(waits=waits):
            return False
        self._n_next = 1
        return True

    def _take_tokens(self, n: int, *, waits: bool = False) -> bool:
        """Take tokens until so many readings come next; return False if there are no more, or none are planned yet.

        Args:
            n: number of readings.
            waits: wait for the plan of the next pass.
        """
        if len(self._later) >= n:
            return True
        with self._taking:
            while len(self._later) < n:
                tokens: list[BatchToken] = []
                error = None
                try:
                    tokens.extend(islice(self._tokens or (), self._n_next))
                    if not tokens and self._begins_next_pass(waits=waits):
                        continue
                except Exception as failure:  # raised when this batch is consumed
                    self._tokens, error = None, failure
                if not tokens and error is None:
                    return False
                self._later.append(_Reading(tokens, error))
                self._n_next = min(self._together, 2 * self._n_next)
        return True


def _work(queue: _Queue) -> None:
    is_wanted = True
    while is_wanted:
        queue.decode_ahead()
        is_wanted = queue.read_next() or queue.wait_for_call()


class InMemoryIterator:
    """Iterates over batches of rows in memory; reads ahead once the consumer was away longer than copying rows took.

    Rows of a batch are copied in some fifty microseconds on all cores. A thread that did it ahead of a consumer that
    returns at once would only compete with it for the interpreter's lock, and keep a core from the copying.

    Args:
        source: the source of rows.
        finish_all: makes batches of the rows that were read for some tokens, each when it is taken.
        tokens: the batches to read.
        together: batches that are read together: Python's work for one is noticeable next to copying it.
        start_ahead: begins to read ahead, for the tokens that are left.
    """

    def __init__(
        self,
        source: BatchSource,
        finish_all: FinishAll,
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
        arrival = perf_counter()
        if self._left is not None:
            self._elsewhere += arrival - self._left
            if self._elsewhere > self._reading:
                self._batches = self._ahead = self._start_ahead(self._tokens)
                return
        self._is_over = True  # also after an error
        if tokens := list(islice(self._tokens, self._together)):
            self._batches = self._batches_of(tokens)
            self._is_over = False
        self._left = perf_counter()
        self._reading += self._left - arrival

    def _batches_of(self, tokens: Sequence[BatchToken]) -> Iterator[Any]:
        """Read batches together; one by one if rows of some of them cannot be read."""
        rows, epoch = np.concatenate([token.rows for token in tokens]), tokens[0].epoch
        raw = self._source.gather(rows, epoch)
        if not raw.bad:
            return self._finish_all(raw, tokens)
        return (
            batch for token in tokens for batch in self._finish_all(self._source.gather(token.rows, epoch), [token])
        )

    @property
    def is_ready(self) -> bool:
        """See ``Batches.is_ready``: rows in memory are copied at once."""
        return not self._is_over if self._ahead is None else self._ahead.is_ready

    @property
    def can_go_on(self) -> bool:
        """See ``Batches.can_go_on``: rows in memory are not read ahead of a pass."""
        return False

    def end_pass(self) -> None:
        """See ``Batches.end_pass``."""

    def close(self) -> None:
        """End the iteration, and the threads if any."""
        self._is_closed = True
        if self._ahead is None:
            self._batches = iter(())
        else:
            self._ahead.close()
