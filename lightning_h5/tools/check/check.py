"""``check_files``: list the errors and possible problems of files; no file stops the check of another."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ...errors import H5Error, H5KeyError, H5ValueError
from ...hdf5 import (
    SPARSE_PARTS,
    ArrayDigests,
    ArrayLayout,
    ChangeGuard,
    OpenOptions,
    digests_path,
    expand_paths,
    field_names,
    open_h5,
    read_digests,
    with_digests,
)
from ...hdf5 import write_digests as write_digest_file
from ...progress_bar import progress_bar
from ...readers import BulkTask, digest_tasks, empty_digests, usable_cores, verify_tasks
from ...types import Paths
from .check_file import Findings, Wanted, check_file, do_reading, findings_from_json, look_at
from .check_rows import Problem, error, warning
from .sandbox import SandboxError, SandboxLimits, run_in_sandbox

NEARLY = 0.011
"""Two arrays of one file whose numbers of rows differ by less than this share were probably meant to have the same."""

FEW = 90
"""Up to so many rows such a small difference may be chance."""

ONCE = ("slow", "no field", "rows")
"""Kinds of warnings that are reported of one file for all: they follow from how the files were written."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What ``check_files`` found.

    Attributes:
        files: the checked files, in order.
        n_arrays: arrays with rows in all files.
        n_bytes: bytes that were decoded.
        errors: problems that keep rows from being read as they were written, in the order of the files.
        warnings: possible problems, and what makes training slow.
        unchecked: arrays with values that have no checksum in any filter: most damage to them would not show.
        integrity: how reliably damage is detected, 0 to 3, in the array where it is least; None if no array stores
            anything.
        sandboxed: each file was opened in a separate process, and never in this one.
        digested: files for which digests were written.
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


def check_files(
    paths: Paths,
    *,
    decode: bool = True,
    keys: str | Sequence[str] | None = None,
    sandbox: bool = False,
    sandbox_memory: int | str = "4 GiB",
    sandbox_seconds: float = 60.0,
    write_digests: bool = False,
    shows_progress: bool = False,
) -> CheckReport:
    """Check that files can be trained from, and belong together.

    Checks that every file opens; that arrays, dtypes, shapes and numbers of rows agree with those of most files; that
    chunk tables are consistent; and that every chunk decodes, on all cores, and matches its checksum if it has one.
    Links out of a file are listed, not followed. Virtual arrays are read like others, through the HDF5 library, as
    training would; those over other files are not read, and the report names them. Without decoding, only metadata are
    read: about a millisecond an array.

    Takes the memory of a few chunks per core. Values without a checksum can be wrong without any error: ``unchecked``
    lists their arrays. Digests next to a file are compared with it, too.

    A file that is damaged in an unlucky place, or on purpose, can crash or hang the HDF5 library, and the process with
    it. ``sandbox`` runs the same checks of each file in a subprocess with limits, one file after the other, and costs
    0.2 s a file. A file that exceeds its limits is a problem of the kind "crashed" (the text names the signal), "hung",
    "memory" or "died", and the others are checked all the same. The documentation's page on security lists what
    this does not do.

    Args:
        paths: a file, a glob, a directory, or a list of these.
        decode: read all rows.
        keys: arrays to check, all of which each file must have; None checks all arrays.
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
        H5ValueError: an argument is not valid, or a file is given twice.
        H5WorkerError: the sandbox cannot be started.
    """
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
    wanted = Wanted(names=names, decode=decode, folder=folder)
    files = expand_paths(paths, "paths")
    guards = {path: ChangeGuard.of(path) for path in files if os.path.isfile(path)}
    n_bytes = sum(guard.n_bytes for guard in guards.values())
    found = []
    with progress_bar(n_bytes, "checking", shows_progress=shows_progress) as bar:
        for path in files:
            if sandbox:
                found.append(_check_in_sandbox(path, wanted, limits))
                bar.update(guards[path].n_bytes if path in guards else 0)
            else:
                found.append(check_file(path, wanted, usable_cores(), bar.update))
    opened = [each for each in found if each.is_open]
    problems = [problem for each in found for problem in each.problems]
    for check in SET_CHECKS:
        if names is None or check is not same_arrays:  # missing named arrays were already reported
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
    place = {path: at for at, path in enumerate(files)}
    ordered = sorted(_reported_once(problems), key=lambda problem: place[problem.file])
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


def _ensure_known(names: Sequence[str], found: Sequence[Findings], problems: Iterable[Problem]) -> None:
    """Refuse names that no file has: they were misspelled."""
    known = {name for each in found for name in each.arrays}
    known |= {problem.array for problem in problems if problem.array is not None and problem.kind != "missing"}
    unknown = next((problem.text for problem in problems if problem.kind == "missing"), None)
    if unknown is not None and not known.issuperset(names):
        raise H5KeyError(unknown)


def _reported_once(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Yield problems, and warnings that are the same for many files once."""
    times = Counter((problem.kind, problem.array) for problem in problems if problem.severity == "warning")
    for problem in problems:
        n = 1
        if problem.severity == "warning" and problem.kind in ONCE:
            n = times.pop((problem.kind, problem.array), 0)
        if n:
            more = f" (the same in {n - 1} more files)" if n > 1 else ""
            yield replace(problem, text=f"{problem.text}{more}")


def same_arrays(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find files that lack arrays of most files, or have others. Used if no arrays were asked for."""
    total = len(files)
    holders = Counter(name for found in files for name in found.arrays)
    usual = [name for name, n in holders.items() if 2 * n >= total]
    for found in files:
        for name in usual:
            if name not in found.arrays:
                yield error(
                    found.path, name, "missing", f"{holders[name]} of {total} files have it, but this one does not"
                )
        for name in found.arrays:
            if 2 * holders[name] < total:
                text = f"{holders[name]} of {total} files have it, but the others do not"
                yield warning(found.path, name, "extra", text)


def same_looks(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find arrays with another dtype or shape of a row than in most files."""
    of_name: dict[str, Counter[str]] = defaultdict(Counter)
    for found in files:
        for name, (look, _) in found.arrays.items():
            of_name[name][look] += 1
    usual = {name: (*looks.most_common(1)[0], looks.total()) for name, looks in of_name.items()}
    for found in files:
        for name, (look, _) in found.arrays.items():
            most, n, total = usual[name]
            if look != most:
                yield error(found.path, name, "schema", f"{n} of {total} files have it as {most}; here it is {look}")


def _same_rows(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find files in which arrays differ in length that have equal lengths in most files."""
    usual, n = _usual_groups(files)
    for found in files:
        for group in usual:
            rows = {name: found.arrays[name][1] for name in group if name in found.arrays}
            if len(set(rows.values())) > 1:
                each = ", ".join(f"{name!r} {count:,}" for name, count in rows.items())
                text = f"rows are missing: it has {each} rows; in {n} of {len(files)} files these are equal"
                yield error(found.path, None, "rows", text)


def _nearly_same_rows(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find lengths that differ by a little, in a single file or if all files are so."""
    usual, _ = _usual_groups(files)
    group_of = {name: number for number, group in enumerate(usual) for name in group}
    for found in files:
        rows = {name: count for name, (_, count) in found.arrays.items() if not _is_of_a_layout(name)}
        names = sorted(rows, key=lambda name: -rows[name])
        falling = [-rows[name] for name in names]  # for binary search: a file may have a hundred thousand arrays
        for name in names:
            count = rows[name]
            near = names[bisect_left(falling, -(count * (1 + NEARLY)))]  # the longest array that is not much longer
            is_usual = name in group_of and group_of[name] == group_of.get(near)
            if FEW < count < rows[near] and not is_usual:
                text = f"it has {count:,} rows, {near!r} {rows[near]:,}: if they belong together, some are missing"
                yield warning(found.path, name, "rows", text)


def _is_of_a_layout(name: str) -> bool:
    """Return whether an array is part of a sparse matrix: these arrays have lengths of their own."""
    return any(name.rpartition("/")[2] in parts[1:] for parts in SPARSE_PARTS)


def _same_data(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find files that are copies, as far as samples of their bytes show."""
    first: dict[str, str] = {}
    for found in files:
        if found.identity is not None and first.setdefault(found.identity, found.path) != found.path:
            text = (
                f"its size, its arrays and samples of its bytes are those of {first[found.identity]!r}: if it is a "
                "copy, its rows would be trained on twice"
            )
            yield warning(found.path, None, "duplicate", text)


def _usual_groups(files: Sequence[Findings]) -> tuple[tuple[tuple[str, ...], ...], int]:
    """Return the usual groups of arrays with equally many rows, and how many files have them."""
    found = Counter(_groups(each) for each in files)
    return max(found.items(), key=lambda item: (item[1], -len(item[0])), default=((), 0))


def _groups(found: Findings) -> tuple[tuple[str, ...], ...]:
    """Return the arrays of a file, those with equally many rows together."""
    by_rows: dict[int, list[str]] = defaultdict(list)
    for name, (_, count) in found.arrays.items():
        by_rows[count].append(name)
    return tuple(sorted(tuple(sorted(names)) for names in by_rows.values()))


SET_CHECKS: tuple[Callable[[Sequence[Findings]], Iterator[Problem]], ...] = (
    same_arrays,
    same_looks,
    _same_rows,
    _nearly_same_rows,
    _same_data,
)
"""The checks over all files, in this order."""


def _check_in_sandbox(path: str, wanted: Wanted, limits: SandboxLimits) -> Findings:
    """Check a file in a subprocess. It is not opened in this process."""
    try:
        found = findings_from_json(path, run_in_sandbox(path, wanted, limits, usable_cores()))
    except SandboxError as why:
        return Findings(path=path, problems=[error(path, None, why.kind, why)])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as why:
        text = f"its check returned an invalid report ({type(why).__name__}). Do not open it."
        return Findings(path=path, problems=[error(path, None, "died", text)])
    more = f". If you trust its source, pass more than sandbox_memory={limits.memory:,} bytes."
    found.problems = [replace(p, text=p.text + more) if p.kind == "memory" else p for p in found.problems]
    return found


def _layouts_of(path: str, wanted: Wanted) -> dict[str, ArrayLayout]:
    """Return the arrays of a file that can be read, each under its own name."""
    with open_h5(path) as file:
        return {layout.name: layout for layout in look_at(file, path, wanted).layouts.values()}


def _write_digests(path: str, wanted: Wanted, guard: ChangeGuard) -> Iterator[Problem]:
    """Write the digests of a file; reads its arrays again, as stored.

    Args:
        path: the file.
        wanted: which arrays.
        guard: how the file looked when it was checked.

    Yields:
        Arrays of which no digests can be made.
    """
    made: dict[str, ArrayDigests] = {}
    tasks: list[BulkTask] = []
    for name, layout in _layouts_of(path, wanted).items():
        if (empty := empty_digests(layout)) is None:
            text = f"its dtype {layout.stored} is not supported by digests: verify='digest' refuses it"
            yield warning(path, layout.key, "no digest", text)
        else:
            made[name] = empty
            tasks += digest_tasks(layout, OpenOptions(), empty)
    do_reading(path, tasks, usable_cores())
    guard.check()
    write_digest_file(path, made)


def _compare_digests(path: str, wanted: Wanted) -> Iterator[Problem]:
    """Compare a file with its digests."""
    try:
        known, layouts = read_digests(path), _layouts_of(path, wanted)
    except H5Error as why:
        yield error(path, None, "digest", why)
        return
    for name in known.keys() - layouts.keys() if wanted.names is None else ():
        yield error(path, name.strip("/"), "digest", "it has digests, but is missing or cannot be accessed")
    for name in known.keys() & layouts.keys():
        try:
            do_reading(path, verify_tasks(with_digests(layouts[name], known), OpenOptions()), usable_cores())
        except H5Error as why:
            yield error(path, layouts[name].key, "digest", why)
