"""Read many rows at once: each block is decoded once, directly to where its rows belong."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..hdf5 import ArrayLayout
from ..progress_bar import progress_bar
from ..types import IntArray
from .block_memory import BlockMemory
from .block_sources import BlockSource
from .thread_pool import usable_cores

__all__ = ["ArrayTarget", "BulkTarget", "BulkTask", "bulk_tasks", "do_tasks", "first_places", "run_with_progress"]

TASK_BYTES = 1 << 20  # decoded bytes per task: fits a core's cache while rows are cast or selected
MAX_SCRATCH = 64 << 20  # larger blocks are read chunk by chunk if only some of their rows are selected
MAX_AT_A_TIME = 128 << 20  # bytes that all threads read at a time, stored and decoded
POLL_SECONDS = 0.1


class BulkTarget(Protocol):
    """Receives rows.

    Attributes:
        array: memory of the readers' dtype, shape ``(n_rows, *row_shape)``, to write to directly; None if rows have to
            be passed to ``put``.
    """

    array: npt.NDArray[Any] | None

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """Take rows for the places from ``start`` on."""
        ...


class ArrayTarget:
    """Memory that rows are read into.

    Args:
        array: shape ``(n_rows, *row_shape)``.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array: npt.NDArray[Any] | None = array
        self._array = array

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        self._array[start : start + len(rows)] = rows


class BulkTask(NamedTuple):
    """A part of the reading that any thread can do.

    Attributes:
        n_bytes: decoded bytes of the rows that it reads.
        n_decoded: decoded bytes of the blocks that it reads.
        run: does the work.
        positions: positions of its rows among the requested ones.
    """

    n_bytes: int
    n_decoded: int
    run: Callable[[], None]
    positions: range | IntArray = range(0)


def bulk_tasks(
    source: BlockSource, layout: ArrayLayout, rows: range | IntArray, target: BulkTarget, first: int
) -> list[BulkTask]:
    """Return tasks that read rows of one file's array.

    Args:
        source: loads blocks.
        layout: the array.
        rows: rows of the array, each once, in ascending order.
        target: receives the rows.
        first: place of the first row in the target.
    """
    if not len(rows) or not layout.row_bytes:
        return []
    size, row_bytes = source.rows_per_block, layout.row_bytes
    blocks = _blocks_of(rows, size)
    starts = np.append(first_places(rows, blocks * size), len(rows))
    step = max(1, TASK_BYTES // max(1, size * row_bytes))
    scratch = _Scratch(layout)
    tasks = []
    for at in range(0, len(blocks), step):
        task_blocks, cuts = blocks[at : at + step], starts[at : at + step + 1]
        task = _BulkRead(source, rows, target, first, task_blocks, cuts, scratch)
        low, high = int(cuts[0]), int(cuts[-1])
        tasks.append(BulkTask((high - low) * row_bytes, len(task_blocks) * size * row_bytes, task, range(low, high)))
    return tasks


def do_tasks(tasks: Sequence[BulkTask], n_cores: int, report: Callable[[int], object]) -> None:
    """Run tasks in threads; all threads have ended when it returns or raises.

    Args:
        tasks: the tasks, in order.
        n_cores: maximum number of threads; fewer are used for large tasks, to bound memory.
        report: called regularly, in this thread, with the bytes done since the last call.
    """
    largest = max((task.n_decoded for task in tasks), default=1)
    n_threads = max(1, min(n_cores, len(tasks), MAX_AT_A_TIME // max(1, largest)))
    todo = iter(tasks)
    lock, over = threading.Lock(), threading.Event()
    n_done = 0

    def work() -> None:
        nonlocal n_done
        n_bytes = 0
        while not over.is_set():
            with lock:
                n_done += n_bytes
                if (task := next(todo, None)) is None:
                    return
            try:
                task.run()
            except BaseException as error:
                _clear_frames(error)
                raise
            n_bytes = task.n_bytes

    n_reported = 0
    with ThreadPoolExecutor(n_threads, thread_name_prefix="lightning_h5-load") as pool:
        try:
            running = {pool.submit(work) for _ in range(n_threads)}
            while running:
                ended, running = wait(running, timeout=POLL_SECONDS, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
                n_bytes = n_done  # threads add to it
                report(n_bytes - n_reported)
                n_reported = n_bytes
        finally:
            over.set()


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error: they reference the memory of all rows, as long as the user keeps the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _BulkRead:
    """Reads the requested rows of some consecutive blocks."""

    def __init__(
        self,
        source: BlockSource,
        rows: range | IntArray,
        target: BulkTarget,
        first: int,
        blocks: IntArray,
        cuts: IntArray,
        scratch: _Scratch,
    ) -> None:
        self._source, self._rows, self._target, self._first = source, rows, target, first
        self._blocks, self._cuts, self._scratch = blocks, cuts, scratch

    def __call__(self) -> None:
        source, target = self._source, self._target
        size = source.rows_per_block
        # The last block has the size of a whole one, which only fits into scratch memory.
        is_whole = (np.diff(self._cuts) == size) & (target.array is not None)
        if is_whole.any() and target.array is not None:
            memory = BlockMemory(target.array, self._first + self._cuts[:-1][is_whole], size)
            source.load(self._blocks[is_whole].tolist(), range(source.n_parts), memory)
        for start, stop in _runs_of_mask(~is_whole):
            self._pick(start, stop)

    def _pick(self, start: int, stop: int) -> None:
        """Read blocks of which only some rows are requested, or whose rows are converted."""
        source, blocks, cuts = self._source, self._blocks[start:stop], self._cuts[start : stop + 1]
        size = source.rows_per_block
        rows = self._rows[int(cuts[0]) : int(cuts[-1])]
        place = self._first + int(cuts[0])
        if source.picks_rows or (stop - start) * size * self._scratch.row_bytes > MAX_SCRATCH:
            for block, low, high in zip(blocks.tolist(), cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
                self._pick_slowly(block, low, high)
            return
        scratch = self._scratch.rows((stop - start) * size)
        source.load(blocks.tolist(), range(source.n_parts), BlockMemory(scratch, np.arange(stop - start) * size, size))
        if blocks[-1] - blocks[0] == stop - start - 1:  # rows have the same order in scratch memory as in the array
            low = int(blocks[0]) * size
            within = slice(rows[0] - low, rows[-1] - low + 1, rows.step) if isinstance(rows, range) else rows - low
        else:
            slots = np.repeat(np.arange(stop - start), np.diff(cuts))
            within = np.asarray(rows) + (slots - blocks[slots]) * size
        self._target.put(place, scratch[within])

    def _pick_slowly(self, block: int, low: int, high: int) -> None:
        """Read rows of a block that is too large for scratch memory, or that allows to read single rows."""
        within = np.asarray(self._rows[low:high]) - block * self._source.rows_per_block
        place = self._first + low
        if self._target.array is not None:
            self._source.pick(block, within, self._target.array[place : place + high - low])
            return
        picked = self._scratch.fresh(high - low)
        self._source.pick(block, within, picked)
        self._target.put(place, picked)


class _Scratch:
    """Memory of each thread for blocks of which only some rows are requested."""

    def __init__(self, layout: ArrayLayout) -> None:
        self._shape, self._dtype, self.row_bytes = layout.row_shape, layout.dtype, layout.row_bytes
        self._own = threading.local()

    def rows(self, n_rows: int) -> npt.NDArray[Any]:
        """Return memory that this thread's next call overwrites."""
        scratch_rows: npt.NDArray[Any] | None = getattr(self._own, "rows", None)
        if scratch_rows is None or len(scratch_rows) < n_rows:
            scratch_rows = self._own.rows = self.fresh(n_rows)
        return scratch_rows[:n_rows]

    def fresh(self, n_rows: int) -> npt.NDArray[Any]:
        """Return new memory."""
        return np.empty((n_rows, *self._shape), self._dtype)


def _blocks_of(rows: range | IntArray, size: int) -> IntArray:
    """Return the blocks that contain rows, in ascending order."""
    if isinstance(rows, range) and rows.step <= size:
        return np.arange(rows[0] // size, rows[-1] // size + 1)
    blocks: IntArray = np.asarray(rows) // size
    different: IntArray = blocks[np.concatenate([[True], blocks[1:] != blocks[:-1]])]
    return different


def run_with_progress(
    tasks: Sequence[BulkTask],
    name: str,
    *,
    delay: float = 2,
    shows_bar: bool = True,
    report: Callable[[int], object] | None = None,
) -> None:
    """Run tasks on all cores, with a progress bar (see ``progress_bar``).

    Args:
        tasks: the tasks.
        name: name of the work.
        delay: seconds before the bar is shown.
        shows_bar: whether to show the bar.
        report: called regularly, in this thread, with the bytes done since the last call.
    """
    n_bytes = sum(task.n_bytes for task in tasks)
    with progress_bar(n_bytes, name, shows_progress=shows_bar, delay=delay) as bar:

        def advance(n_bytes: int) -> None:
            bar.update(n_bytes)
            if report is not None:
                report(n_bytes)

        do_tasks(tasks, usable_cores(), advance)


def first_places(rows: range | IntArray, bounds: IntArray) -> IntArray:
    """Return for each bound the place of the first row that is not below it; ``len(rows)`` if all are.

    Args:
        rows: in ascending order.
        bounds: shape ``(n,)``.
    """
    places: IntArray
    if isinstance(rows, range):
        places = np.clip(-((rows.start - bounds) // rows.step), 0, len(rows))
    else:
        places = np.searchsorted(rows, bounds)
    return places


def _runs_of_mask(mask: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each run of True in a mask."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
