"""``check_files``: what is wrong with files, and what may be, as a list; no file stops the check of another."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from ..errors import H5Error, H5FileError, H5KeyError, H5ValueError
from ..files import expand_paths, field_names, process_pool
from ..readers import BulkTask, do_tasks, usable_cores
from ..types import Paths
from .checks.file_checks import FILE_CHECKS
from .checks.looking import FileFacts, look_at
from .checks.problems import Problem, error, warning
from .checks.read_checks import ArrayReading
from .checks.set_checks import SET_CHECKS, Schema, same_arrays, schema_of

__all__ = ["CheckReport", "Problem", "check_files"]

GROUP_BYTES = 1 << 30  # decoded bytes of files that are read together, so that cores do not wait at the end of each
GROUP_FILES = 64

ONCE = ("slow", "no field", "rows")
"""Kinds of warnings that are told of one file for all: they follow from how the files were written."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What ``check_files`` found.

    Attributes:
        files: that were looked at, in this order.
        n_arrays: arrays with rows in all files.
        n_bytes: bytes that were decoded.
        errors: what keeps rows from being read as they were written, in the order of files and arrays.
        warnings: what is worth knowing.
        unchecked: arrays whose values have no checksum in any filter: most damage to them would show nowhere.
    """

    files: tuple[str, ...]
    n_arrays: int
    n_bytes: int
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    unchecked: tuple[str, ...] = ()


def check_files(
    paths: Paths,
    *,
    decode: bool = True,
    finite: bool = False,
    keys: str | Sequence[str] | None = None,
    shows_progress: bool = False,
) -> CheckReport:
    """Checks that files can be trained from, and belong together.

    All files open; their arrays, dtypes, shapes of rows and numbers of rows fit each other (the majority is right);
    chunk tables make sense; every chunk decodes, on all cores, and fits its checksum where there is one. Links out of
    a file are named, not followed. Without decoding, metadata alone are read: about a millisecond an array.

    Memory stays at some chunks for each core. What a file has no checksum for can be wrong all the same:
    ``unchecked`` names these arrays.

    Args:
        paths: a file, a glob, a directory, or a list of these.
        decode: read all rows.
        finite: look for NaN and infinite values, too, which are errors then.
        keys: arrays to look at, of which each file has to have all; None takes all there are.
        shows_progress: show a bar, where the standard error is a terminal.

    Raises:
        H5FileError: a path is not there, or matches nothing.
        H5KeyError: no file has an array of such a name.
        H5ValueError: arguments make no sense.
    """
    if finite and not decode:
        raise H5ValueError("finite=True needs the values, and decode=False reads none. Leave one of them out.")
    names = None if keys is None else [key.strip("/") for key in field_names(keys, "keys").keys]
    files, problems = _expand(paths)
    check = _Check(files, names, decode=decode, finite=finite)
    with closing(_bar(files, shows_progress=shows_progress)) as bar:
        for path in files:
            problems += check.look(path)
            check.read_if_enough(bar)
        check.read(bar)
    problems += check.of_reading
    for of_set in SET_CHECKS:
        if names is None or of_set is not same_arrays:  # which of the named are missing is known already
            problems += of_set(check.schemas)
    if names is not None:
        _ensure_known(names, check, problems)
    ordered = _in_order(_told_once(problems), check.order, files)
    return CheckReport(
        files=files,
        n_arrays=sum(len(schema.looks) for schema in check.schemas),
        n_bytes=check.n_decoded,
        errors=tuple(problem for problem in ordered if problem.severity == "error"),
        warnings=tuple(problem for problem in ordered if problem.severity == "warning"),
        unchecked=tuple(sorted(check.unchecked)),
    )


class _Check:
    """The state of a check: what is still to be read, and what is kept of files that have been."""

    def __init__(self, files: Sequence[str], names: Sequence[str] | None, *, decode: bool, finite: bool) -> None:
        self._names, self._decode, self._finite = names, decode, finite
        self._waiting: list[FileFacts] = []
        self._readings: list[ArrayReading] = []
        self._tasks: list[BulkTask] = []
        self.schemas: list[Schema] = []
        self.of_reading: list[Problem] = []
        self.unknown: Exception | None = None  # of the first file without an array that was named
        self.order: dict[tuple[str, str], int] = {}  # place of each name in its file
        self.unchecked: set[str] = set()
        self.n_decoded = 0

    def look(self, path: str) -> Iterator[Problem]:
        """Looks at a file's metadata."""
        try:
            facts = look_at(path, self._names)
        except Exception as why:  # of any kind: the other files are checked all the same
            yield error(path, None, "open", _why_not(path, why))
            return
        self._waiting.append(facts)
        self.schemas.append(schema_of(facts))
        self.order |= {(path, name): at for at, name in enumerate(facts.order())}
        self.unchecked |= {key for key, a in facts.layouts.items() if a.n_stored_bytes and not a.integrity}
        missing = (why for why in facts.refused.values() if isinstance(why, H5KeyError))
        self.unknown = self.unknown or next(missing, None)
        for of_file in FILE_CHECKS:
            yield from of_file(facts)
        if self._decode:
            for layout in facts.layouts.values():
                reading = ArrayReading(layout, finite=self._finite)
                self._readings.append(reading)
                self._tasks += reading.tasks()

    def read_if_enough(self, bar: Any) -> None:
        """Reads what has come together, once it keeps all cores at work for a while."""
        if len(self._waiting) >= GROUP_FILES or sum(task.n_decoded for task in self._tasks) >= GROUP_BYTES:
            self.read(bar)

    def read(self, bar: Any) -> None:
        """Reads the rows of all files that wait for it."""

        def told(n_bytes: int) -> None:
            bar.update(n_bytes)

        do_tasks(self._tasks, usable_cores(), told)
        rest = sum(facts.n_bytes for facts in self._waiting) - sum(task.n_bytes for task in self._tasks)
        bar.update(max(0, rest))  # what of the files is no row of theirs
        self.n_decoded += sum(reading.n_decoded for reading in self._readings)
        for reading in self._readings:
            self.of_reading += reading.problems()
        for facts in self._waiting:
            process_pool().close(facts.path)
            try:
                facts.guard.check()
            except H5Error as why:
                self.of_reading.append(error(facts.path, None, "changed", why))
        self._tasks, self._readings, self._waiting = [], [], []


def _expand(paths: Paths) -> tuple[tuple[str, ...], list[Problem]]:
    """The files, each once; those that are there and are no files of ours stay among them, to be told of."""
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, list | tuple) or not given:
        return expand_paths(paths, "paths"), []  # which says what is wrong
    found: list[str] = []
    for path in given:
        try:
            found += expand_paths(path, "paths")
        except H5FileError:
            if not os.path.lexists(path) or os.path.isdir(path):
                raise
            found.append(os.path.abspath(path))
    first: dict[str, str] = {}
    problems = []
    for path in found:
        real = os.path.realpath(path)
        if real in first:
            other = "" if path == first[real] else f", as {path!r} as well"
            problems.append(warning(first[real], None, "duplicate", f"it is named twice{other}"))
        else:
            first[real] = path
    return tuple(first.values()), problems


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


def _ensure_known(names: Sequence[str], check: _Check, problems: Iterable[Problem]) -> None:
    """Refuses names that no file has: they were misspelled."""
    there = {name for schema in check.schemas for name in schema.looks}
    refused = {problem.array for problem in problems if problem.kind != "missing"}
    if check.unknown is not None and any(name not in there and name not in refused for name in names):
        raise check.unknown


def _told_once(problems: Sequence[Problem]) -> list[Problem]:
    """Warnings that are the same for many files, once."""

    def is_one_of_many(problem: Problem) -> bool:
        return problem.severity == "warning" and problem.kind in ONCE

    times = Counter((problem.kind, problem.array) for problem in problems if is_one_of_many(problem))
    kept: list[Problem] = []
    seen = set()
    for problem in problems:
        which = problem.kind, problem.array
        if not is_one_of_many(problem):
            kept.append(problem)
        elif which not in seen:
            seen.add(which)
            more = f" (likewise in {times[which] - 1} more files)" if times[which] > 1 else ""
            kept.append(replace(problem, text=f"{problem.text}{more}"))
    return kept


def _in_order(
    problems: Iterable[Problem], order: dict[tuple[str, str], int], files: Sequence[str]
) -> Iterable[Problem]:
    file = {path: at for at, path in enumerate(files)}
    last = len(order)
    return sorted(problems, key=lambda p: (file[p.file], -1 if p.array is None else order.get((p.file, p.array), last)))


def _bar(files: Sequence[str], *, shows_progress: bool) -> Any:
    sizes = (os.path.getsize(path) for path in files if os.path.isfile(path))
    return tqdm(
        total=sum(sizes),
        desc="checking",
        unit="iB",  # tqdm puts a K, an M or a G before it
        unit_scale=True,
        unit_divisor=1024,
        delay=1,
        leave=False,
        disable=None if shows_progress else True,
    )
