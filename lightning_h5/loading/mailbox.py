"""What worker processes send, read piece by piece: one that ends in the middle of a message keeps nobody waiting.

Torch has one pipe for all workers, and a lock for who may write to it. A worker that is killed while it writes leaves
the lock taken, and half of a message, for whose other half the trainer would wait for ever. Here each worker has a
pipe of its own, and what has come is taken without waiting for the rest.
"""

from __future__ import annotations

import os
import pickle
import select
import struct
from collections import deque
from contextlib import suppress
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from queue import Empty
from time import monotonic
from typing import Any

__all__ = ["Flag", "Mailbox", "close_queue"]

LENGTH, LONG_LENGTH = struct.Struct("!i"), struct.Struct("!Q")  # before a message, as multiprocessing writes it


class _Pipe:
    """The receiver's end of a worker's queue, and what has come of a message."""

    def __init__(self, queue: Queue[Any]) -> None:
        self.queue = queue
        self.descriptor = queue._reader.fileno()  # type: ignore[attr-defined]  # of all of Python's own queues
        os.set_blocking(self.descriptor, False)
        self._expect(LENGTH, LENGTH.size)

    def _expect(self, kind: struct.Struct | None, n_bytes: int) -> None:
        self._kind, self._n_here, self._buffer = kind, 0, bytearray(n_bytes)
        self._left = memoryview(self._buffer)

    def read(self) -> bytearray | None:
        """The next message, if all of it is here.

        Raises:
            EOFError: nothing more will come.
        """
        while True:
            try:
                n_bytes = os.readv(self.descriptor, [self._left])
            except BlockingIOError:
                return None
            if not n_bytes:
                raise EOFError
            self._left = self._left[n_bytes:]
            if self._left:
                continue
            if self._kind is None:
                message = self._buffer
                self._expect(LENGTH, LENGTH.size)
                self.queue._sem.release()  # type: ignore[attr-defined]  # as the queue's own receiver does
                return message
            (length,) = self._kind.unpack(self._buffer)
            if length < 0:
                self._expect(LONG_LENGTH, LONG_LENGTH.size)
            else:
                self._expect(None, length)


class Mailbox:
    """In place of torch's queue of results, on the trainer's side: takes from the workers' queues, whichever has come.

    One thread at a time may take from it; any may put something in.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._pipes: dict[int, _Pipe] = {}
        self._messages: deque[bytearray] = deque()
        self._put: deque[Any] = deque()  # by this process
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._bell, select.POLLIN)

    def add(self, queue: Queue[Any]) -> None:
        """Takes from one worker's queue, too."""
        pipe = _Pipe(queue)
        self._pipes[pipe.descriptor] = pipe
        self._poll.register(pipe.descriptor, select.POLLIN)

    def close_writers(self) -> None:
        """Forgets the ends that workers write to, once these have started; so that theirs are the last."""
        for pipe in self._pipes.values():
            pipe.queue._writer.close()  # type: ignore[attr-defined]  # likewise

    def get(self, timeout: float) -> Any:
        """What came first, and has come whole.

        Args:
            timeout: seconds to wait for it.

        Raises:
            queue.Empty: that is not so.
        """
        end = monotonic() + timeout
        left = timeout
        while not self._messages:
            if self._put:
                return self._put.popleft()
            self._take_in(left)
            if (left := end - monotonic()) <= 0:
                break
        if not self._messages:
            raise Empty
        return pickle.loads(self._messages.popleft())

    def _take_in(self, seconds: float) -> None:
        for descriptor, _ in self._poll.poll(seconds * 1000):
            pipe = self._pipes.get(descriptor)
            if pipe is None:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                continue
            try:
                message = pipe.read()
            except EOFError:  # that its worker has ended is found where workers are looked after
                self._poll.unregister(descriptor)
                continue
            if message is not None:
                self._messages.append(message)

    def put(self, item: Any) -> None:
        """Has ``get`` give something of this process, and wakes it."""
        self._put.append(item)
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def cancel_join_thread(self) -> None:
        """Does nothing: no thread writes here. Torch asks for it."""

    def close(self) -> None:
        """Does nothing: workers are still there when torch calls it. See ``end``."""

    def end(self) -> None:
        """Closes all pipes; what was not taken is gone."""
        self._messages.clear()
        for pipe in self._pipes.values():
            with suppress(KeyError):  # of a worker that has ended
                self._poll.unregister(pipe.descriptor)
            close_queue(pipe.queue)
        self._pipes.clear()
        if self._bell >= 0:
            self._poll.unregister(self._bell)
            os.close(self._bell)
            self._bell = -1

    def __del__(self) -> None:
        if getattr(self, "_bell", -1) >= 0:
            os.close(self._bell)


def close_queue(queue: Queue[Any]) -> None:
    """Closes both ends of a queue into which this process has put nothing."""
    queue.close()
    queue._reader.close()  # type: ignore[attr-defined]  # likewise
    queue._writer.close()  # type: ignore[attr-defined]


class Flag:
    """In place of an event that several processes look at: one that no process can end while it holds a lock of it.

    Args:
        context: how the processes start.
    """

    def __init__(self, context: BaseContext) -> None:
        self._semaphore = context.Semaphore(0)

    def set(self) -> None:
        """Sets it, for all and for good."""
        if not self.is_set():
            self._semaphore.release()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._semaphore.get_value() > 0
