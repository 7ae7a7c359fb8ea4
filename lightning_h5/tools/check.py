"""``check_files``: what is wrong with files, and what may be, as a list; no file stops the check of another."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from ..errors import H5FileError, H5KeyError, H5ValueError
from ..files import ChangeGuard, expand_paths, field_names
from ..readers import usable_cores
from ..types import Paths
from .checks.apart import SandboxLimits
from .checks.checking import Findings, Wanted, check_here
from .checks.digesting import compare_digests, make_digests
from .checks.problems import Problem, warning
from .checks.set_checks import SET_CHECKS, same_arrays
from .progress import progress_bar
from .sandbox import check_in_sandbox

__all__ = ["CheckReport", "Problem", "check_files"]

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
        sandboxed: each file was opened in a process of its own, and never in this one.
        digested: files of which digests were written.
    """

    files: tuple[str, ...]
    n_arrays: int
    n_bytes: int
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    unchecked: tuple[str, ...] = ()
    sandboxed: bool = False
    digested: tuple[str, ...] = ()


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
    """Checks that files can be trained from, and belong together.

    All files open; their arrays, dtypes, shapes of rows and numbers of rows fit each other (the majority is right);
    chunk tables make sense; every chunk decodes, on all cores, and fits its checksum where there is one. Links out of
    a file are named, not followed. Virtual arrays are read like others, through the HDF5 library, as training would; of
    those over other files it is said that they were not. Without decoding, metadata alone are read: about a millisecond
    an array.

    Memory stays at some chunks for each core. What a file has no checksum for can be wrong all the same:
    ``unchecked`` names these arrays.

    A file that is damaged in an unlucky place, or on purpose, can crash or hang the HDF5 library, and the process with
    it. ``sandbox`` opens each file in a process of its own with limits, as many at a time as there are cores. It is for
    files of strangers and for files that crashed something; starting a process costs 0.2 s a file. A file that breaks
    out of its limits is a problem of the kind "crashed" (the text names the signal), "hung", "memory" or "died", and
    the others are checked all the same. The documentation's page on security says what this does not do.

    Where digests lie beside a file, or beside what it is a link to, it is compared with them too, at the cost of a
    second, undecoded look at its bytes.

    Args:
        paths: a file, a glob, a directory, or a list of these.
        decode: read all rows.
        finite: look for NaN and infinite values, too, which are errors then.
        keys: arrays to look at, of which each file has to have all; None takes all there are.
        sandbox: never open a file in this process. Made for Linux.
        sandbox_memory: address space that such a process may take, in bytes or as a text; more than 256 MiB, which
            Python and the libraries take themselves.
        sandbox_seconds: seconds that the check of a file may take, and one more for each 10 MB of the file.
        write_digests: make digests of each file in which no error is found, and write them beside it, as
            ``FILE.digests.json``: whoever reads rows with ``verify="digest"`` compares them. Digests that are there
            already are replaced, and not compared.
        shows_progress: show a bar, where the standard error is a terminal.

    Raises:
        H5FileError: a path is not there, or matches nothing; or digests cannot be written.
        H5KeyError: no file has an array of such a name.
        H5ValueError: arguments make no sense.
        H5WorkerError: no process can be started for the sandbox.
    """
    if finite and not decode:
        raise H5ValueError("finite=True needs the values, and decode=False reads none. Leave one of them out.")
    if write_digests and (sandbox or not decode):
        raise H5ValueError(
            "write_digests=True vouches for files whose rows were all read, in this process. Check files of strangers "
            "with sandbox=True first; then write digests without it, and without decode=False."
        )
    limits = SandboxLimits.of(sandbox_memory, sandbox_seconds)
    names = None if keys is None else tuple(key.strip("/") for key in field_names(keys, "keys").keys)
    wanted = Wanted(names=names, decode=decode, finite=finite)
    files, problems = _expand(paths)
    guards = {path: ChangeGuard.of(path) for path in files if os.path.isfile(path)}
    with closing(_bar(files, shows_progress=shows_progress)) as bar:
        if sandbox:
            found = check_in_sandbox(files, wanted, limits, bar.update)
        else:
            found = check_here(files, wanted, usable_cores(), bar.update)
    problems += found.problems
    for of_set in SET_CHECKS:
        if names is None or of_set is not same_arrays:  # which of the named are missing is known already
            problems += of_set(found.schemas)
    if names is not None:
        _ensure_known(names, found, problems)
    digested = []
    for path in () if sandbox else guards:
        if not write_digests:
            problems += compare_digests(path, names)
        elif not any(problem.file == path and problem.severity == "error" for problem in problems):
            problems += make_digests(path, names, guards[path])
            digested.append(path)
    ordered = _in_order(_told_once(problems), found.order, files)
    return CheckReport(
        files=files,
        n_arrays=sum(len(schema.looks) for schema in found.schemas),
        n_bytes=found.n_decoded,
        errors=tuple(problem for problem in ordered if problem.severity == "error"),
        warnings=tuple(problem for problem in ordered if problem.severity == "warning"),
        unchecked=tuple(sorted(found.unchecked)),
        sandboxed=sandbox,
        digested=tuple(digested),
    )


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


def _ensure_known(names: Sequence[str], found: Findings, problems: Iterable[Problem]) -> None:
    """Refuses names that no file has: they were misspelled."""
    there = {name for schema in found.schemas for name in schema.looks}
    refused = {problem.array for problem in problems if problem.kind != "missing"}
    if found.unknown is not None and any(name not in there and name not in refused for name in names):
        raise H5KeyError(found.unknown)


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
    return progress_bar(sum(sizes), "checking", shows_progress=shows_progress)
