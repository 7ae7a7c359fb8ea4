"""``check_files``: what is wrong with files, and what may be, as a list; no file stops the check of another."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import H5Error, H5FileError, H5KeyError, H5ValueError
from ..hdf5 import (
    ArrayDigests,
    ChangeGuard,
    OpenOptions,
    digests_path,
    expand_paths,
    expand_user,
    field_names,
    file_number,
    kind_of,
    process_pool,
    read_digests,
    with_digests,
)
from ..hdf5 import write_digests as write_digest_file
from ..progress_bar import progress_bar
from ..readers import BulkTask, digest_tasks, do_tasks, empty_digests, usable_cores, verify_tasks
from ..types import Paths
from .decode_check import ArrayDecoder
from .file_checks import FILE_CHECKS, FileFacts, Problem, error, is_of_memory, look_at, warning
from .sandbox import SandboxError, SandboxLimits, run_in_sandbox
from .set_checks import SET_CHECKS, same_arrays

__all__ = ["CheckReport", "Findings", "Problem", "Wanted", "check_files", "check_here"]

ONCE = ("slow", "no field", "rows")
"""Kinds of warnings that are reported of one file for all: they follow from how the files were written."""


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
        integrity: how surely damage to the arrays shows, 0 to 3, the least of all; None if no array stores anything.
        sandboxed: each file was opened in a process of its own, and never in this one.
        digested: files of which digests were written.
    """

    files: tuple[str, ...]
    n_arrays: int
    n_bytes: int
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    unchecked: tuple[str, ...] = ()
    integrity: int | None = None
    sandboxed: bool = False
    digested: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be looked at.

    Attributes:
        names: arrays that each file has to have; None takes all there are.
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


def check_files(
    paths: Paths,
    *,
    decode: bool = True,
    finite: bool = False,
    keys: str | Sequence[str] | None = None,
    sandbox: bool = False,
    sandbox_memory: int | str = "4 GiB",
    sandbox_seconds: float = 60.0,
    write_digests: bool = False,
    shows_progress: bool = False,
) -> CheckReport:
    """Check that files can be trained from, and belong together.

    All files open; their arrays, dtypes, shapes of rows and numbers of rows fit each other (the majority is right);
    chunk tables make sense; every chunk decodes, on all cores, and fits its checksum if it has one. Links out of
    a file are named, not followed. Virtual arrays are read like others, through the HDF5 library, as training would;
    those over other files are not read, which the report says. Without decoding, metadata alone are read: about a
    millisecond an array.

    Memory stays at some chunks for each core. What a file has no checksum for can be wrong all the same:
    ``unchecked`` names these arrays. Digests that lie beside a file are compared with it, too.

    A file that is damaged in an unlucky place, or on purpose, can crash or hang the HDF5 library, and the process with
    it. ``sandbox`` runs the same checks of each file in a subprocess with limits, one file after the other, and costs
    0.2 s a file. A file that exceeds its limits is a problem of the kind "crashed" (the text names the signal), "hung",
    "memory" or "died", and the others are checked all the same. The documentation's page on security says what this
    does not do.

    Args:
        paths: a file, a glob, a directory, or a list of these.
        decode: read all rows.
        finite: look for NaN and infinite values, too, which are errors then.
        keys: arrays to look at, of which each file has to have all; None takes all there are.
        sandbox: never open a file in this process. Made for Linux.
        sandbox_memory: address space of the subprocess, in bytes or as a text; more than 256 MiB, which Python and the
            libraries take themselves.
        sandbox_seconds: seconds that the check of a file may take, and one more for each 10 MB of the file.
        write_digests: write a digest of each piece of each array to ``FILE.digests.json`` if no error is found in a
            file; ``verify="digest"`` compares rows with them. Existing digests are replaced, and not compared.
        shows_progress: show progress on the standard error: a bar on a terminal, otherwise a line every 30 seconds.

    Raises:
        H5FileError: a path does not exist, or matches nothing; or digests cannot be written.
        H5KeyError: no file has an array of such a name.
        H5ValueError: arguments make no sense.
        H5WorkerError: the sandbox cannot be started.
    """
    if finite and not decode:
        raise H5ValueError("finite=True needs the values, and decode=False reads none. Leave one of them out.")
    if write_digests and (sandbox or not decode):
        raise H5ValueError(
            "write_digests=True vouches for files whose rows were all read, in this process. Check untrusted files "
            "with sandbox=True first; then write digests without it, and without decode=False."
        )
    limits = SandboxLimits.of(sandbox_memory, sandbox_seconds)
    names = None if keys is None else tuple(key.strip("/") for key in field_names(keys, "keys").keys)
    folder = ""
    with suppress(OSError):  # it was removed
        folder = os.getcwd()
    wanted = Wanted(names=names, decode=decode, finite=finite, folder=folder)
    files, problems = _expand(paths)
    guards = {path: ChangeGuard.of(path) for path in files if os.path.isfile(path)}
    n_bytes = sum(guard.n_bytes for guard in guards.values())
    found = []
    with progress_bar(n_bytes, "checking", shows_progress=shows_progress) as bar:
        for path in files:
            if sandbox:
                found.append(_check_in_sandbox(path, wanted, limits))
                bar.update(guards[path].n_bytes if path in guards else 0)
            else:
                found.append(check_here(path, wanted, usable_cores(), bar.update))
    opened = [each for each in found if each.is_open]
    problems += [problem for each in found for problem in each.problems]
    for check in SET_CHECKS:
        if names is None or check is not same_arrays:  # which of the named are missing is known already
            problems += check(opened)
    if names is not None:
        _ensure_known(names, found, problems)
    broken = {problem.file for problem in problems if problem.severity == "error"}
    digested = [path for path in guards if write_digests and path not in broken]
    for path in digested:
        problems += _write_digests(path, wanted, guards[path])
    for path in guards if not sandbox and not write_digests else ():
        if os.path.lexists(digests_path(path)):
            problems += _compare_digests(path, wanted)
    levels = [(name, level) for each in found for name, level in each.integrity.items()]
    ordered = _in_order(_reported_once(problems), found)
    return CheckReport(
        files=files,
        n_arrays=sum(len(each.arrays) for each in opened),
        n_bytes=sum(each.n_decoded for each in found),
        errors=tuple(problem for problem in ordered if problem.severity == "error"),
        warnings=tuple(problem for problem in ordered if problem.severity == "warning"),
        unchecked=tuple(sorted({name for name, level in levels if not level})),
        integrity=min((level for _, level in levels), default=None),
        sandboxed=sandbox,
        digested=tuple(digested),
    )


def _in_order(problems: Iterable[Problem], found: Sequence[Findings]) -> list[Problem]:
    """Return problems in the order of files, and of the arrays in each."""
    place = {each.path: at for at, each in enumerate(found)}
    rank = {(each.path, name): at for each in found for at, name in enumerate(("", *each.order))}
    return sorted(problems, key=lambda p: (place[p.file], rank.get((p.file, p.array or ""), len(rank))))


def _expand(paths: Paths) -> tuple[tuple[str, ...], list[Problem]]:
    """The files, each once, and a warning for each that was named twice."""
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, list | tuple) or not given:
        return expand_paths(paths, "paths"), []  # which raises
    found: list[str] = []
    for one in given:
        try:
            found += expand_paths(one, "paths")
        except H5FileError:  # what is there and is no file, such as a pipe, is a problem in the report
            name = expand_user(one)
            if not os.path.lexists(name) or os.path.isdir(name):
                raise
            found.append(os.path.abspath(name))
    first: dict[tuple[int, int] | str, str] = {}
    problems = []
    for path in found:
        other = first.setdefault(number := file_number(path), path)
        if number in first and other is not path:
            also = "" if path == other else f", as {path!r} as well"
            problems.append(warning(other, None, "duplicate", f"it is named twice{also}"))
    return tuple(first.values()), problems


def _ensure_known(names: Sequence[str], found: Sequence[Findings], problems: Iterable[Problem]) -> None:
    """Refuse names that no file has: they were misspelled."""
    known = {name for each in found for name in each.arrays}
    known |= {problem.array for problem in problems if problem.array is not None and problem.kind != "missing"}
    unknown = next((each.unknown for each in found if each.unknown is not None), None)
    if unknown is not None and not known.issuperset(names):
        raise H5KeyError(unknown)


def _reported_once(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Warnings that are the same for many files, once."""

    def group(problem: Problem) -> tuple[str, str | None] | None:
        is_one_of_many = problem.severity == "warning" and problem.kind in ONCE
        return (problem.kind, problem.array) if is_one_of_many else None

    times = Counter(map(group, problems))
    for problem in problems:
        n = 1 if (which := group(problem)) is None else times.pop(which, 0)
        if n:
            more = f" (the same in {n - 1} more files)" if n > 1 else ""
            yield replace(problem, text=f"{problem.text}{more}")


def check_here(path: str, wanted: Wanted, n_cores: int, report: Callable[[int], object]) -> Findings:
    """Check a file in this process: what its metadata say, then all its rows.

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
        _do(path, tasks, n_cores, report)
        report(max(0, facts.n_bytes - sum(task.n_bytes for task in tasks)))
        for decoder in decoders:
            found.n_decoded += decoder.n_decoded
            found.problems += decoder.problems()
    try:
        facts.guard.check()
    except H5Error as why:
        found.problems.append(error(path, None, "changed", why))
    return found


def _check_in_sandbox(path: str, wanted: Wanted, limits: SandboxLimits) -> Findings:
    """Check a file in a subprocess. It is not opened in this process."""
    try:
        found = _findings(path, run_in_sandbox(path, wanted, limits, usable_cores()))
    except SandboxError as why:
        return Findings(path=path, problems=[error(path, None, why.kind, why)])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as why:
        text = f"its check reported what makes no sense ({type(why).__name__}). Do not open it."
        return Findings(path=path, problems=[error(path, None, "died", text)])
    more = f". If you trust its source, pass more than sandbox_memory={limits.memory:,} bytes."
    found.problems = [replace(p, text=p.text + more) if p.kind == "memory" else p for p in found.problems]
    return found


def _findings(path: str, told: Any) -> Findings:
    """Findings from values that JSON has. They can be anything, and become text and numbers here."""

    def text(value: Any) -> str | None:
        return None if value is None else str(value)

    return Findings(
        path=path,
        is_open=bool(told["is_open"]),
        arrays={str(name): (str(look), int(n_rows)) for name, (look, n_rows) in told["arrays"].items()},
        problems=[
            (error if one["severity"] == "error" else warning)(
                path, text(one["array"]), str(one["kind"]), str(one["text"])
            )
            for one in told["problems"]
        ],
        order=[str(name) for name in told["order"]],
        integrity={str(name): min(max(0, int(level)), 3) for name, level in told["integrity"].items()},
        identity=text(told["identity"]),
        unknown=text(told["unknown"]),
        n_decoded=int(told["n_decoded"]),
    )


def _note(found: Findings, facts: FileFacts) -> None:
    """Keep what the metadata of a file say."""
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


def _write_digests(path: str, wanted: Wanted, guard: ChangeGuard) -> Iterator[Problem]:
    """Write the digests of a file; reads its arrays once more, as they are stored.

    Args:
        path: the file.
        wanted: which arrays.
        guard: how the file looked when it was checked.

    Yields:
        Arrays of which no digests can be made.
    """
    facts = look_at(path, wanted.names, wanted.folder)
    made: dict[str, ArrayDigests] = {}
    tasks: list[BulkTask] = []
    for layout in facts.layouts.values():
        if layout.name in made:
            continue
        if (empty := empty_digests(layout)) is None:
            text = f"its dtype {layout.stored} is one of which no digests are made: verify='digest' refuses it"
            yield warning(path, layout.key, "no digest", text)
        else:
            made[layout.name] = empty
            tasks += digest_tasks(layout, OpenOptions(), empty)
    _do(path, tasks, usable_cores())
    guard.check()
    write_digest_file(path, made)


def _compare_digests(path: str, wanted: Wanted) -> Iterator[Problem]:
    """Compare a file with its digests."""
    try:
        known = read_digests(path)
        facts = look_at(path, wanted.names, wanted.folder)
    except H5Error as why:
        yield error(path, None, "digest", why)
        return
    layouts = {layout.name: layout for layout in facts.layouts.values()}
    for name in known.keys() - layouts.keys() if wanted.names is None else ():
        yield error(path, name.strip("/"), "digest", "it has digests, and is missing, or cannot be looked at")
    for name in known.keys() & layouts.keys():
        try:
            _do(path, verify_tasks(with_digests(layouts[name], known), OpenOptions()), usable_cores())
        except H5Error as why:
            yield error(path, layouts[name].key, "digest", why)


def _do(
    path: str, tasks: Sequence[BulkTask], n_cores: int, report: Callable[[int], object] = lambda n_bytes: None
) -> None:
    try:
        do_tasks(tasks, n_cores, report)
    finally:
        process_pool().close(path)
