"""Reading ahead in this process: a thread gathers batches, the consumer transforms them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from ..types import BatchToken, IntArray

__all__ = ["ReadAhead", "TokenDataset"]


class TokenDataset(Protocol):
    """A dataset whose reading can run apart from its transforms."""

    def gather(self, rows: IntArray) -> Any:
        """Reads rows; called in a thread."""
        ...

    def finish(self, raw: Any, *, samples: bool = False) -> Any:
        """Transforms and collates; called where the batch is taken."""
        ...


class _End:
    """What the thread says last: that there is no more, or what went wrong."""

    def __init__(self, reason: BaseException) -> None:
        self.reason = reason


class ReadAhead:
    """Iterates over batches while a thread reads the next ones.

    The thread ends with the iteration, with an error, with ``close``, and when this object is forgotten. An
    error in it is raised by the next ``next()``.

    Args:
        dataset: what reads.
        tokens: what to read; consumed in the thread.
        depth: batches that are read ahead at most.
    """

    def __init__(self, dataset: TokenDataset, tokens: Iterator[BatchToken], depth: int) -> None:
        self._dataset = dataset
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._ended = False
        # The thread must not hold this object, or it would never be forgotten.
        self._thread = threading.Thread(
            target=_gather, args=(dataset, tokens, self._ready, self._stop), name="lightning_h5-read-ahead", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._stop.is_set():
            raise RuntimeError(
                "reading ahead was closed in the middle of an epoch; start a new iteration of the loader"
            )
        item = self._ready.get()
        if isinstance(item, _End):
            self._ended = True
            self.close()
            raise item.reason
        token, raw = item
        return self._dataset.finish(raw, samples=token.samples)

    def close(self) -> None:
        """Ends the thread; waits for the batch that it is reading."""
        self._stop.set()
        while True:  # a thread that waits for room sees the stop only once there is some
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self.close()


def _gather(
    dataset: TokenDataset, tokens: Iterator[BatchToken], ready: queue.Queue[Any], stop: threading.Event
) -> None:
    try:
        for token in tokens:
            if stop.is_set():
                return
            ready.put((token, dataset.gather(token.rows)))
            if stop.is_set():
                return
        ready.put(_End(StopIteration()))
    except BaseException as error:  # whatever it is, it belongs to the consumer
        ready.put(_End(error))
