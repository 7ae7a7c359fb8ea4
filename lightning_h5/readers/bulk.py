"""Many rows at once into memory for all of them: each slab is decoded once, straight to where its rows belong."""

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
from .chunk_cache import SlotMemory
from .chunk_loader import SlabSource
from .thread_pool import usable_cores

__all__ = ["ArrayTarget", "BulkTarget", "BulkTask", "bulk_tasks", "do_tasks", "first_places", "run_with_progress"]

TASK_BYTES = 1 << 20  # decoded bytes of a task: what is cast or picked from is still in the core's cache
MAX_SCRATCH = 64 << 20  # a slab above this is read a chunk at a time where its rows are picked from
MAX_AT_A_TIME = 128 << 20  # of what threads read at a time, stored and decoded
POLL = 0.1  # seconds between looks of who waits


class BulkTarget(Protocol):
    """Where rows go.

    Attributes:
        array: memory of the readers' own dtype, shape ``(n_rows, *row_shape)``, to be written to as it is; None where
            rows have to be ``put``.
    """

    array: npt.NDArray[Any] | None

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """Takes rows for the places from ``start`` on."""
        ...


class ArrayTarget:
    """Memory that rows are read into as they are.

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
    """A part of the reading that any thread may do.

    Attributes:
        n_bytes: of the rows that it reads, decoded.
        n_decoded: of the slabs that it decodes.
        run: does it.
    """

    n_bytes: int
    n_decoded: int
    run: Callable[[], None]


def bulk_tasks(
    source: SlabSource, layout: ArrayLayout, rows: range | IntArray, target: BulkTarget, first: int
) -> list[BulkTask]:
    """Tasks that read rows of one file's array.

    Args:
        source: where slabs come from.
        layout: the array.
        rows: rows of the array, each once, in ascending order.
        target: where they go.
        first: place of the first row.
    """
    if not len(rows) or not layout.row_bytes:
        return []
    size, row_bytes = source.rows_per_slab, layout.row_bytes
    slabs = _slabs_of(rows, size)
    starts = np.append(first_places(rows, slabs * size), len(rows))
    step = max(1, TASK_BYTES // max(1, size * row_bytes))
    scratch = _Scratch(layout)
    tasks = []
    for at in range(0, len(slabs), step):
        some, cuts = slabs[at : at + step], starts[at : at + step + 1]
        read = _BulkRead(source, rows, target, first, some, cuts, scratch)
        tasks.append(BulkTask(int(cuts[-1] - cuts[0]) * row_bytes, len(some) * size * row_bytes, read))
    return tasks


def do_tasks(tasks: Sequence[BulkTask], n_cores: int, tell: Callable[[int], object]) -> None:
    """Does tasks in threads; has ended all of them when it returns or raises.

    Args:
        tasks: what to do, in this order.
        n_cores: threads, at most: fewer where tasks are so large that memory would be a multiple of what was promised.
        tell: called now and then, in this thread, with the bytes done since the last time.
    """
    largest = max((task.n_decoded for task in tasks), default=1)
    n_threads = max(1, min(n_cores, len(tasks), MAX_AT_A_TIME // max(1, largest)))
    todo = iter(tasks)
    lock, over = threading.Lock(), threading.Event()
    done = 0

    def work() -> None:
        nonlocal done
        n_bytes = 0
        while not over.is_set():
            with lock:
                done += n_bytes
                if (task := next(todo, None)) is None:
                    return
            try:
                task.run()
            except BaseException as error:
                _let_go(error)
                raise
            n_bytes = task.n_bytes

    told = 0
    with ThreadPoolExecutor(n_threads, thread_name_prefix="lightning_h5-load") as pool:
        try:
            left = {pool.submit(work) for _ in range(n_threads)}
            while left:
                ended, left = wait(left, timeout=POLL, return_when=FIRST_EXCEPTION)
                for one in ended:
                    one.result()
                seen = done
                tell(seen - told)
                told = seen
        finally:
            over.set()


def _let_go(error: BaseException | None) -> None:
    """Empties the frames of an error, which lives as long as its user keeps it: they hold the memory of all rows."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _BulkRead:
    """Reads the wanted rows of some slabs that follow each other."""

    def __init__(
        self,
        source: SlabSource,
        rows: range | IntArray,
        target: BulkTarget,
        first: int,
        slabs: IntArray,
        cuts: IntArray,
        scratch: _Scratch,
    ) -> None:
        self._source, self._rows, self._target, self._first = source, rows, target, first
        self._slabs, self._cuts, self._scratch = slabs, cuts, scratch

    def __call__(self) -> None:
        source, target = self._source, self._target
        size = source.rows_per_slab
        # Also beyond the array's end a slab has the bytes of a whole one, which only scratch memory takes.
        is_whole = (np.diff(self._cuts) == size) & (target.array is not None)
        if is_whole.any() and target.array is not None:
            memory = SlotMemory(target.array, self._first + self._cuts[:-1][is_whole], size)
            source.load(self._slabs[is_whole].tolist(), range(source.n_parts), memory)
        for start, stop in _runs(~is_whole):
            self._pick(start, stop)

    def _pick(self, start: int, stop: int) -> None:
        """Rows of slabs of which not all are wanted, or that become something else."""
        source, slabs, cuts = self._source, self._slabs[start:stop], self._cuts[start : stop + 1]
        size = source.rows_per_slab
        rows = self._rows[int(cuts[0]) : int(cuts[-1])]
        place = self._first + int(cuts[0])
        if source.picks_rows or (stop - start) * size * self._scratch.row_bytes > MAX_SCRATCH:
            for slab, low, high in zip(slabs.tolist(), cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
                self._pick_slowly(slab, low, high)
            return
        scratch = self._scratch.rows((stop - start) * size)
        source.load(slabs.tolist(), range(source.n_parts), SlotMemory(scratch, np.arange(stop - start) * size, size))
        if slabs[-1] - slabs[0] == stop - start - 1:  # rows lie in the scratch memory as in the array
            low = int(slabs[0]) * size
            within = slice(rows[0] - low, rows[-1] - low + 1, rows.step) if isinstance(rows, range) else rows - low
        else:
            slots = np.repeat(np.arange(stop - start), np.diff(cuts))
            within = np.asarray(rows) + (slots - slabs[slots]) * size
        self._target.put(place, scratch[within])

    def _pick_slowly(self, slab: int, low: int, high: int) -> None:
        """Rows of a slab that is too large for scratch memory in each thread, or can be read without the others."""
        within = np.asarray(self._rows[low:high]) - slab * self._source.rows_per_slab
        place = self._first + low
        if self._target.array is not None:
            self._source.pick(slab, within, self._target.array[place : place + high - low])
            return
        picked = self._scratch.fresh(high - low)
        self._source.pick(slab, within, picked)
        self._target.put(place, picked)


class _Scratch:
    """Memory of each thread for slabs of which not all rows are wanted."""

    def __init__(self, layout: ArrayLayout) -> None:
        self._shape, self._dtype, self.row_bytes = layout.row_shape, layout.dtype, layout.row_bytes
        self._own = threading.local()

    def rows(self, n_rows: int) -> npt.NDArray[Any]:
        """Memory that this thread's next call writes over."""
        held: npt.NDArray[Any] | None = getattr(self._own, "rows", None)
        if held is None or len(held) < n_rows:
            held = self._own.rows = self.fresh(n_rows)
        return held[:n_rows]

    def fresh(self, n_rows: int) -> npt.NDArray[Any]:
        """Memory that nobody else has."""
        return np.empty((n_rows, *self._shape), self._dtype)


def _slabs_of(rows: range | IntArray, size: int) -> IntArray:
    """The slabs that rows lie in, in ascending order."""
    if isinstance(rows, range) and rows.step <= size:
        return np.arange(rows[0] // size, rows[-1] // size + 1)
    slabs: IntArray = np.asarray(rows) // size
    different: IntArray = slabs[np.concatenate([[True], slabs[1:] != slabs[:-1]])]
    return different


def run_with_progress(
    tasks: Sequence[BulkTask],
    what: str,
    *,
    delay: float = 2,
    shows_bar: bool = True,
    tell: Callable[[int], object] | None = None,
) -> None:
    """Do tasks on all cores, with a bar (see ``progress_bar``).

    Args:
        tasks: what to do.
        what: the name of the work.
        delay: seconds before the bar is shown.
        shows_bar: whether it is.
        tell: is called now and then, in this thread, with the bytes done since the last time.
    """
    n_bytes = sum(task.n_bytes for task in tasks)
    with progress_bar(n_bytes, what, shows_progress=shows_bar, delay=delay) as bar:

        def done(n_bytes: int) -> None:
            bar.update(n_bytes)
            if tell is not None:
                tell(n_bytes)

        do_tasks(tasks, usable_cores(), done)


def first_places(rows: range | IntArray, bounds: IntArray) -> IntArray:
    """For each bound the place of the first row that is not below it; ``len(rows)`` where all are.

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


def _runs(mask: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Where a mask is True: first place of each run, and the one after its last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
