"""Checking files in this process: what their metadata say, then all their rows; and what was found, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...errors import H5Error, H5KeyError
from ...files import process_pool
from ...readers import BulkTask, do_tasks
from .file_checks import FILE_CHECKS
from .looking import FileFacts, look_at
from .problems import Problem, error, is_of_memory
from .read_checks import ArrayReading
from .set_checks import Schema, schema_of

__all__ = ["Findings", "Wanted", "check_here"]

GROUP_BYTES = 1 << 30  # decoded bytes of files that are read together, so that cores do not wait at the end of each
GROUP_FILES = 64


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be looked at.

    Attributes:
        names: arrays that each file has to have; None takes all there are.
        decode: read all rows.
        finite: count what is not finite.
        folder: see ``look_at``.
    """

    names: tuple[str, ...] | None = None
    decode: bool = True
    finite: bool = False
    folder: str | None = None


@dataclass(eq=False)
class Findings:
    """What was found in files.

    Attributes:
        schemas: of each file that could be looked at, what it has.
        problems: with these files; those of a file and array in the order in which they are told.
        order: place of each name in its file.
        unchecked: arrays whose values have no checksum in any filter.
        unknown: of the first file without an array that was named, what is said of it.
        n_decoded: bytes that were decoded.
    """

    schemas: list[Schema] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    order: dict[tuple[str, str], int] = field(default_factory=dict)
    unchecked: set[str] = field(default_factory=set)
    unknown: str | None = None
    n_decoded: int = 0

    def add(self, other: Findings) -> None:
        """Adds what was found in files that come behind these."""
        self.schemas += other.schemas
        self.problems += other.problems
        self.order |= other.order
        self.unchecked |= other.unchecked
        self.unknown = self.unknown or other.unknown
        self.n_decoded += other.n_decoded


def check_here(files: Sequence[str], wanted: Wanted, n_cores: int, tell: Callable[[int], object]) -> Findings:
    """Checks files, one after the other, each for itself.

    Args:
        files: which.
        wanted: what to look at.
        n_cores: threads that decode.
        tell: called now and then, in this thread, with the bytes of files that were done since the last time.
    """
    check = _Check(wanted, n_cores, tell)
    for path in files:
        check.look(path)
        check.read_if_enough()
    check.read()
    return check.found


class _Check:
    """The state of a check: what is still to be read, and what is kept of files that have been."""

    def __init__(self, wanted: Wanted, n_cores: int, tell: Callable[[int], object]) -> None:
        self._wanted, self._n_cores, self._tell = wanted, n_cores, tell
        self._waiting: list[FileFacts] = []
        self._readings: list[ArrayReading] = []
        self._tasks: list[BulkTask] = []
        self.found = Findings()

    def look(self, path: str) -> None:
        """Looks at a file's metadata."""
        found = self.found
        try:
            facts = look_at(path, self._wanted.names, folder=self._wanted.folder)
        except Exception as why:  # of any kind: the other files are checked all the same
            found.problems.append(error(path, None, "memory" if is_of_memory(why) else "open", _why_not(path, why)))
            return
        self._waiting.append(facts)
        found.schemas.append(schema_of(facts))
        found.order |= {(path, name): at for at, name in enumerate(facts.order())}
        found.unchecked |= {key for key, a in facts.layouts.items() if a.n_stored_bytes and not a.integrity}
        missing = (f"{why}" for why in facts.refused.values() if isinstance(why, H5KeyError))
        found.unknown = found.unknown or next(missing, None)
        for of_file in FILE_CHECKS:
            found.problems += of_file(facts)
        if self._wanted.decode:
            for layout in facts.layouts.values():
                reading = ArrayReading(layout, finite=self._wanted.finite)
                self._readings.append(reading)
                self._tasks += reading.tasks()

    def read_if_enough(self) -> None:
        """Reads what has come together, once it keeps all cores at work for a while."""
        if len(self._waiting) >= GROUP_FILES or sum(task.n_decoded for task in self._tasks) >= GROUP_BYTES:
            self.read()

    def read(self) -> None:
        """Reads the rows of all files that wait for it."""
        do_tasks(self._tasks, self._n_cores, self._told)
        rest = sum(facts.n_bytes for facts in self._waiting) - sum(task.n_bytes for task in self._tasks)
        self._tell(max(0, rest))  # what of the files is no row of theirs
        self.found.n_decoded += sum(reading.n_decoded for reading in self._readings)
        for reading in self._readings:
            self.found.problems += reading.problems()
        for facts in self._waiting:
            self.found.problems += _changes(facts)
        self._tasks, self._readings, self._waiting = [], [], []

    def _told(self, n_bytes: int) -> None:
        self._tell(n_bytes)


def _changes(facts: FileFacts) -> Iterator[Problem]:
    """Lets go of a file; whether it changed while it was checked."""
    process_pool().close(facts.path)
    try:
        facts.guard.check()
    except H5Error as why:
        yield error(facts.path, None, "changed", why)


def _why_not(path: str, why: Exception) -> str:
    if isinstance(why, H5Error):
        text = f"{why}"
        if "consistency flags" in text:
            return (
                f"{path!r} is marked as open for writing: a program has it open, or ended before it closed it. Close "
                "that program; if none has it open, run `h5clear -s` on the file."
            )
        return text
    return f"{path!r} cannot be opened: {type(why).__name__}: {why}. Copy it again."
