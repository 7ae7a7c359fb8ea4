"""All checks of one file: its metadata, whether every chunk decodes, and whether values are finite."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError, H5Error, H5KeyError
from ..hdf5 import ArrayLayout, OpenOptions, kind_of, process_pool
from ..readers import BlockSource, BulkTask, bulk_tasks, do_tasks, open_reader, open_source
from .file_checks import FILE_CHECKS, FileFacts, Problem, error, is_of_memory, look_at, warning

OPTIONS = OpenOptions()
STEP_BYTES = 4 << 20  # decoded bytes of a task
MAX_ROWS_BYTES = 1 << 30  # of rows that share their chunks and are put together
MAX_PROBLEMS = 10  # of an array that are reported one by one


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be looked at.

    Attributes:
        names: arrays that each file has to have; None takes all.
        decode: read all rows.
        finite: count what is not finite.
        folder: the working directory of the process that will read the files.
    """

    names: tuple[str, ...] | None = None
    decode: bool = True
    finite: bool = False
    folder: str = ""


@dataclass(eq=False, kw_only=True)
class Findings:
    """What was found in one file, as plain data.

    Attributes:
        path: the file.
        is_open: whether it could be looked at.
        arrays: for each array with rows, its dtype and shape of a row in words, and its number of rows.
        problems: in the order in which they are reported.
        order: names in the file's order.
        integrity: how surely damage to each array shows, 0 to 3 (see ``INTEGRITY``).
        identity: of what the file holds; None if that is unknown.
        unknown: the error about an array that was named and that the file lacks.
        n_decoded: bytes that were decoded.
    """

    path: str
    is_open: bool = False
    arrays: dict[str, tuple[str, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    integrity: dict[str, int] = field(default_factory=dict)
    identity: str | None = None
    unknown: str | None = None
    n_decoded: int = 0


def check_file(path: str, wanted: Wanted, n_cores: int, report: Callable[[int], object]) -> Findings:
    """Check a file in this process: first its metadata, then all its rows.

    Args:
        path: the file.
        wanted: what to look at.
        n_cores: threads that decode.
        report: called now and then, in this thread, with the bytes of the file that were done since the last time.
    """
    found = Findings(path=path)
    try:
        facts = look_at(path, wanted.names, wanted.folder)
    except Exception as why:  # of any kind: the other files are checked all the same
        text = f"{why}" if isinstance(why, H5Error) else f"{path!r} cannot be opened: {type(why).__name__}: {why}"
        found.problems.append(error(path, None, "memory" if is_of_memory(why) else "open", text))
        return found
    _note(found, facts)
    if wanted.decode:
        misplaced = {problem.array for problem in found.problems if problem.kind == "place"}
        decoders = [ArrayDecoder(a, finite=wanted.finite) for key, a in facts.layouts.items() if key not in misplaced]
        tasks = [task for decoder in decoders for task in decoder.tasks()]
        do_reading(path, tasks, n_cores, report)
        report(max(0, facts.n_bytes - sum(task.n_bytes for task in tasks)))
        for decoder in decoders:
            found.n_decoded += decoder.n_decoded
            found.problems += decoder.problems()
    try:
        facts.guard.check()
    except H5Error as why:
        found.problems.append(error(path, None, "changed", why))
    return found


def _note(found: Findings, facts: FileFacts) -> None:
    """Add what the metadata of a file contain."""
    found.is_open, found.identity = True, facts.identity
    for entry in facts.entries:
        if entry.kind == "array" and entry.shape and (entry.name in facts.layouts or entry.name in facts.refused):
            # Text of any length becomes a list of str.
            dtype = "text" if entry.dtype.startswith("text") else entry.dtype
            found.arrays[entry.name] = f"{dtype} {entry.shape[1:]}", entry.shape[0]
    for key, layout in facts.layouts.items():
        if layout.n_stored_bytes:
            found.integrity[key] = layout.integrity
        if key not in found.arrays:  # a member of a table, which is no entry of its own
            dtype = "text" if kind_of(layout.dtype) == "text" else str(layout.dtype)
            found.arrays[key] = f"{dtype} {layout.row_shape}", layout.n_rows
    found.order = list(dict.fromkeys([*(entry.name for entry in facts.entries), *facts.layouts, *facts.refused]))
    found.unknown = next((f"{why}" for why in facts.refused.values() if isinstance(why, H5KeyError)), None)
    for check in FILE_CHECKS:
        found.problems += check(facts)


def findings_from_json(path: str, reported: Any) -> Findings:
    """Return findings from values that JSON has. They can be anything, and become text and numbers here."""

    def text(value: Any) -> str | None:
        return None if value is None else str(value)

    return Findings(
        path=path,
        is_open=bool(reported["is_open"]),
        arrays={str(name): (str(look), int(n_rows)) for name, (look, n_rows) in reported["arrays"].items()},
        problems=[
            (error if one["severity"] == "error" else warning)(
                path, text(one["array"]), str(one["kind"]), str(one["text"])
            )
            for one in reported["problems"]
        ],
        order=[str(name) for name in reported["order"]],
        integrity={str(name): min(max(0, int(level)), 3) for name, level in reported["integrity"].items()},
        identity=text(reported["identity"]),
        unknown=text(reported["unknown"]),
        n_decoded=int(reported["n_decoded"]),
    )


def do_reading(
    path: str, tasks: Sequence[BulkTask], n_cores: int, report: Callable[[int], object] = lambda n_bytes: None
) -> None:
    """Do tasks that read a file, and close it."""
    try:
        do_tasks(tasks, n_cores, report)
    finally:
        process_pool().close(path)


class ArrayDecoder:
    """Reads all rows of one array, in tasks for any number of threads, and notes what is wrong with them.

    Chunks that were never written are skipped. Virtual arrays are read as others are: even if the arrays that they are
    made of can be read, they may lie elsewhere, or be something else, than the virtual one declares.

    Args:
        layout: the array.
        finite: count numbers that are NaN or infinite.

    Attributes:
        n_decoded: bytes that were decoded.
    """

    def __init__(self, layout: ArrayLayout, *, finite: bool) -> None:
        self.n_decoded = 0
        self._layout = layout
        self._finite = finite
        self._lock = threading.Lock()
        self._broken: dict[int, Exception] = {}  # by the first row that was read
        self._unreadable: Exception | None = None
        self._found = _NotFinite(layout.n_rows, counts=finite)

    def tasks(self) -> Iterator[BulkTask]:
        """Yield what has to be read."""
        layout = self._layout
        is_stored = layout.n_stored_bytes or layout.storage == "virtual"
        if not is_stored or not layout.row_bytes or not layout.n_rows:
            return
        source: BlockSource | None = None
        if kind_of(layout.dtype) in ("number", "compound"):
            source = open_source(layout, OPTIONS, max(1, STEP_BYTES // layout.row_bytes), Counters())
        size = layout.rows_per_chunk if layout.chunks else max(1, STEP_BYTES // layout.row_bytes)
        step = max(1, STEP_BYTES // (size * layout.row_bytes)) * size
        starts = np.arange(0, layout.n_rows, step)
        if layout.table is not None and not (self._finite and _fill_is_infinite(layout)):
            written = np.flatnonzero(layout.table.offsets >= 0) // layout.table.per_row * size
            starts = np.unique(written // step) * step
        share = layout.n_stored_bytes / layout.n_rows
        for start in starts.tolist():
            rows = range(start, min(start + step, layout.n_rows))
            n_decoded = -(-len(rows) // size) * size * layout.row_bytes
            yield BulkTask(round(len(rows) * share), n_decoded, partial(self._read, source, rows, size))

    def problems(self) -> Iterator[Problem]:
        """Yield what was found, once all tasks are done."""
        path, key, found = self._layout.path, self._layout.key, self._found
        if self._unreadable is not None:
            yield error(path, key, "decode", self._unreadable)
        for first, why in sorted(self._broken.items())[:MAX_PROBLEMS]:
            if is_of_memory(why):
                text = f"no memory is left to read it from row {first:,} on: {f'{why}' or type(why).__name__}"
                yield error(path, key, "memory", text)
            elif self._layout.storage == "virtual":
                text = (
                    f"it is virtual, and cannot be read from row {first:,} on: {why.__cause__ or why}. Look at what it "
                    "is made of: arrays of that size, not members of tables, whose values can be made what it holds"
                )
                yield error(path, key, "virtual", text)
            else:
                yield error(path, key, "decode", why)
        if (more := len(self._broken) - MAX_PROBLEMS) > 0:
            yield error(path, key, "decode", f"{more:,} more pieces of it cannot be read")
        if found.n_nan or found.n_infinite:
            text = f"{found.n_nan:,} NaN and {found.n_infinite:,} infinite values, the first in row {found.first}"
            yield error(path, key, "not finite", text)

    def _read(self, source: BlockSource | None, rows: range, size: int) -> None:
        """Read rows; if that fails, those of each chunk by themselves, so that each damaged one is named."""
        if self._unreadable is not None:
            return
        try:
            found = self._read_once(source, rows)
            with self._lock:
                self.n_decoded += len(rows) * self._layout.row_bytes
                self._found.add(found)
        except Exception as why:  # of any kind: all that is wrong with a file belongs into the report
            if len(rows) > size:
                for start in range(rows.start, rows.stop, size):
                    self._read(source, range(start, min(start + size, rows.stop)), size)
                return
            with self._lock:
                if isinstance(why, OSError) and not isinstance(why, H5CorruptError):
                    self._unreadable = why  # the file, or its disk: the same for every chunk
                else:
                    self._broken[rows.start] = why

    def _read_once(self, source: BlockSource | None, rows: range) -> _NotFinite:
        layout, found = self._layout, _NotFinite(self._layout.n_rows, counts=self._finite)
        if source is None:
            open_reader(layout, OPTIONS).read(np.arange(rows.start, rows.stop))
            return found
        step = max(1, MAX_ROWS_BYTES // layout.row_bytes)
        for start in range(rows.start, rows.stop, step):
            for task in bulk_tasks(source, layout, range(start, min(start + step, rows.stop)), found, start):
                task.run()
        return found


class _NotFinite:
    """A ``BulkTarget`` that counts what is not finite, and keeps no row.

    Args:
        n_rows: of the array.
        counts: whether it counts at all.

    Attributes:
        n_nan: values that are no number.
        n_infinite: infinite values.
        first: first row that has one of them.
    """

    array: npt.NDArray[Any] | None = None

    def __init__(self, n_rows: int, *, counts: bool) -> None:
        self.n_nan, self.n_infinite, self.first = 0, 0, n_rows
        self._counts = counts

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        for numbers in _numbers(rows) if self._counts else ():
            is_finite = np.isfinite(numbers)
            if not is_finite.all():
                n_nan = int(np.isnan(numbers).sum())
                self.n_nan += n_nan
                self.n_infinite += int(is_finite.size - is_finite.sum()) - n_nan
                rows_with = np.flatnonzero(~is_finite.reshape(len(numbers), -1).all(axis=1))
                self.first = min(self.first, start + int(rows_with[0]))

    def add(self, other: _NotFinite) -> None:
        """Add what was counted in other rows."""
        self.n_nan += other.n_nan
        self.n_infinite += other.n_infinite
        self.first = min(self.first, other.first)


def _numbers(rows: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield what of rows may be infinite: they themselves, or members of a table."""
    for name in rows.dtype.names or ():
        yield from _numbers(rows[name])
    if rows.dtype.kind in "fc":
        yield rows


def _fill_is_infinite(layout: ArrayLayout) -> bool:
    if len(layout.fill) != layout.stored.itemsize:
        return False
    fill = np.frombuffer(layout.fill, layout.stored).reshape(1, *layout.stored.shape)
    return any(not np.isfinite(numbers).all() for numbers in _numbers(fill))
