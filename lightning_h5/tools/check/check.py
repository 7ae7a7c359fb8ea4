"""``check_files``: list the errors and possible problems of files; an error in one file does not stop the others."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ...catalog import differences
from ...errors import H5Error, H5KeyError, H5ValueError, listing
from ...hdf5 import (
    SPARSE_PARTS,
    Annotations,
    ArrayDigests,
    ArrayLayout,
    ChangeGuard,
    OpenOptions,
    digests_path,
    expand_paths,
    field_names,
    library_text,
    open_h5,
    read_digests,
    with_digests,
)
from ...hdf5 import write_digests as write_digest_file
from ...progress_bar import progress_bar
from ...readers import BulkTask, digest_tasks, empty_digests, usable_cores, verify_tasks
from ...types import Paths
from .check_file import CheckOptions, Findings, check_file, do_reading, findings_from_json, look_at
from .check_rows import Problem, error, warning
from .sandbox import SandboxError, SandboxLimits, run_in_sandbox

NEARLY = 0.011
"""Two arrays of a file probably belong together if their numbers of rows differ by less than this share."""

FEW = 90
"""Number of rows up to which such a small difference may be chance."""

MIN_SHAPES = 3
"""Number of different shapes from which an array is assumed to vary, as recordings and images do."""

MIN_ALIKE, MANY_ALIKE = 3, 40
"""Numbers of alike arrays from which they are segments: if their names differ in numbers, and for any names."""

MAX_KINDS = 3
"""Number of kinds of files to name."""

ONCE = ("slow", "no field", "rows", "meaning")
"""Kinds of warnings that are reported once for all files: they depend on the program that wrote the files."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of ``check_files``.

    Attributes:
        files: the checked files, in order.
        n_arrays: arrays with rows in all files.
        n_bytes: bytes that were decoded.
        errors: problems that keep rows from being read as they were written, in the order of the files.
        warnings: possible problems, and layouts that make training slow.
        unchecked: arrays of values without checksums: most damage to them goes unnoticed.
        integrity: the lowest integrity level of all arrays, 0 to 3; None if no array stores values.
        sandboxed: each file was opened in a separate process, and never in this one.
        digested: files for which digests were written.
        library: versions of h5py and HDF5, and the number of published vulnerabilities of this HDF5.
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
    library: str = field(default_factory=library_text)


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
    """Check that files are suitable for training, and consistent with each other.

    Checks that every file opens; that arrays, dtypes, shapes and numbers of rows agree with most files; that chunk
    tables are consistent; and that every chunk decodes, on all cores, and matches its checksum if it has one. Links to
    other files are listed, not followed. Virtual arrays are read through the HDF5 library, as in training; virtual
    arrays over other files are not read, and the report names them. Without decoding, only metadata is read: about a
    millisecond per array.

    Needs memory for a few chunks per core. Values without a checksum can be wrong without any error: ``unchecked``
    lists these arrays. If digests are stored next to a file, rows are compared with them.

    A file that is damaged in an unlucky place, or on purpose, can crash or hang the HDF5 library, and with it the
    process. ``sandbox`` runs the same checks in a subprocess with limits, one file after the other, and costs 0.2 s per
    file. A file that exceeds the limits is a problem of the kind "crashed" (the text names the signal), "hung",
    "memory" or "died", and the check continues with the other files. The documentation's page on security lists the
    limits.

    Args:
        paths: a file, a glob, a directory, or a list of files, globs and directories.
        decode: read all rows.
        keys: arrays to check, which each file must have; None checks all arrays.
        sandbox: never open a file in this process. Only for Linux.
        sandbox_memory: address space of the subprocess, in bytes or as text; more than 256 MiB, which Python and the
            libraries need.
        sandbox_seconds: time limit for a file in seconds, plus one second per 10 MB of the file.
        write_digests: write a digest of each piece of each array to ``FILE.digests.json`` if the file has no errors;
            ``verify="digest"`` compares rows with the digests. Existing digests are replaced, and not compared.
        shows_progress: show progress on the standard error: a bar on a terminal, otherwise a line every 30 seconds.

    Raises:
        H5FileError: a path does not exist, or matches nothing; or digests cannot be written.
        H5KeyError: no file has an array with a name in ``keys``.
        H5ValueError: an argument is invalid, or a file is passed twice.
        H5WorkerError: the sandbox cannot be started.
    """
    if write_digests and (sandbox or not decode):
        raise H5ValueError(
            "write_digests=True needs to read all rows in this process, and cannot be combined with sandbox=True or "
            "decode=False. Check untrusted files with sandbox=True first; then write digests without these arguments."
        )
    limits = SandboxLimits.of(sandbox_memory, sandbox_seconds)
    names = None if keys is None else tuple(key.strip("/") for key in field_names(keys, "keys").keys)
    folder = ""
    with suppress(OSError):  # it was removed
        folder = os.getcwd()
    options = CheckOptions(names=names, decode=decode, folder=folder)
    files = expand_paths(paths, "paths")
    guards = {path: ChangeGuard.of(path) for path in files if os.path.isfile(path)}
    n_bytes = sum(guard.n_bytes for guard in guards.values())
    all_findings = []
    with progress_bar(n_bytes, "checking", shows_progress=shows_progress) as bar:
        for path in files:
            if sandbox:
                all_findings.append(_check_in_sandbox(path, options, limits))
                bar.update(guards[path].n_bytes if path in guards else 0)
            else:
                all_findings.append(check_file(path, options, usable_cores(), bar.update))
    open_files = [findings for findings in all_findings if findings.is_open]
    problems = [problem for findings in all_findings for problem in findings.problems]
    for check in SET_CHECKS:
        if names is None or check is not _same_kinds:  # missing named arrays were already reported
            problems += check(open_files)
    if names is not None:
        _ensure_known(names, all_findings, problems)
    files_with_errors = {problem.file for problem in problems if problem.severity == "error"}
    digested = [path for path in guards if write_digests and path not in files_with_errors]
    for path in digested:
        problems += _write_digests(path, options, guards[path])
    for path in guards if not sandbox and not write_digests else ():
        if os.path.lexists(digests_path(path)):
            problems += _compare_digests(path, options)
    levels = [(name, level) for findings in all_findings for name, level in findings.integrity.items()]
    place = {path: at for at, path in enumerate(files)}
    ordered = sorted(_reported_once(problems), key=lambda problem: place[problem.file])
    return CheckReport(
        files=files,
        n_arrays=sum(len(findings.arrays) for findings in open_files),
        n_bytes=sum(findings.n_decoded for findings in all_findings),
        errors=tuple(problem for problem in ordered if problem.severity == "error"),
        warnings=tuple(problem for problem in ordered if problem.severity == "warning"),
        unchecked=tuple(sorted({name for name, level in levels if not level})),
        integrity=min((level for _, level in levels), default=None),
        sandboxed=sandbox,
        digested=tuple(digested),
    )


def _ensure_known(names: Sequence[str], all_findings: Sequence[Findings], problems: Iterable[Problem]) -> None:
    """Raise an error if no file has an array with a name in ``keys``, which is probably misspelled."""
    available = {name for findings in all_findings for name in findings.arrays}
    available |= {problem.array for problem in problems if problem.array is not None and problem.kind != "missing"}
    unknown = next((problem.text for problem in problems if problem.kind == "missing"), None)
    if unknown is not None and not available.issuperset(names):
        raise H5KeyError(unknown)


def _reported_once(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Yield problems; warnings that are the same for many files are joined."""
    times = Counter((problem.kind, problem.array) for problem in problems if problem.severity == "warning")
    for problem in problems:
        n = 1
        if problem.severity == "warning" and problem.kind in ONCE:
            n = times.pop((problem.kind, problem.array), 0)
        if n:
            suffix = f" (the same in {n - 1} more files)" if n > 1 else ""
            yield replace(problem, text=f"{problem.text}{suffix}")


def same_arrays(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find files that lack arrays of most files, or have additional arrays."""
    return _differences([(findings, tuple(findings.arrays)) for findings in files])


def _same_kinds(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find files that share no array with others, and compare the files that do. Used without ``keys``."""
    kinds = _kinds_of_files(files)
    if len(kinds) > 1:
        examples = ", ".join(
            f"{len(kind):,} like {kind[0][0].path!r} with {listing(kind[0][1], 3)}" for kind in kinds[:MAX_KINDS]
        )
        others = f" and {len(kinds) - MAX_KINDS:,} more kinds" if len(kinds) > MAX_KINDS else ""
        text = f"there are {len(kinds):,} kinds of files without common arrays: {examples}{others}. Train on one kind."
        yield warning(kinds[1][0][0].path, None, "kinds", text)
    for kind in kinds:
        yield from _differences(kind)


def _differences(files: Sequence[tuple[Findings, Sequence[str]]]) -> Iterator[Problem]:
    total = len(files)
    holders = Counter(name for _, names in files for name in names)
    usual_names = [name for name, n in holders.items() if 2 * n >= total]
    for findings, names in files:
        for name in usual_names:
            if name not in names:
                yield error(
                    findings.path, name, "missing", f"{holders[name]} of {total} files have it, but this one does not"
                )
        for name in names:
            if 2 * holders[name] < total:
                text = f"{holders[name]} of {total} files have it, but the others do not"
                yield warning(findings.path, name, "extra", text)


def _kinds_of_files(files: Sequence[Findings]) -> list[list[tuple[Findings, Sequence[str]]]]:
    """Return files in kinds that share no array, the most common kind first, each with its arrays (``_families``)."""
    kind_of_name: dict[str, list[tuple[Findings, Sequence[str]]]] = {}
    empty: list[tuple[Findings, Sequence[str]]] = []
    for findings in files:
        names = tuple(dict.fromkeys(_families(findings).values()))
        kinds = {id(kind_of_name[name]): kind_of_name[name] for name in names if name in kind_of_name}
        largest = max(kinds.values(), key=len, default=empty if not names else [])
        for kind in kinds.values():
            if kind is not largest:
                largest += kind
                kind_of_name.update({name: largest for _, kind_names in kind for name in kind_names})
        largest.append((findings, names))
        kind_of_name.update(dict.fromkeys(names, largest))
    kinds_of_files = sorted({id(kind): kind for kind in kind_of_name.values()}.values(), key=len, reverse=True)
    if kinds_of_files:
        kinds_of_files[0] += empty  # files without arrays lack the arrays of most files
    return kinds_of_files


def _families(findings: Findings) -> dict[str, str]:
    """Return the name of each array, with ``*`` for the differing part of alike arrays, which are segments.

    Alike arrays have the same dtype and number of axes; their names differ in numbers, or a group has very many.
    """
    numbered: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, (look, _) in findings.arrays.items():
        numbered[re.sub(r"\d+", "*", name), _kind_of_look(look)].append(name)
    families = {
        name: pattern if len(names) >= MIN_ALIKE else name for (pattern, _), names in numbered.items() for name in names
    }
    beside: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, (look, _) in findings.arrays.items():
        beside[name.rpartition("/")[0], _kind_of_look(look)].append(name)
    for (group, _), names in beside.items():
        if len(names) >= MANY_ALIKE:
            families.update(dict.fromkeys(names, f"{group}/*".lstrip("/")))
    return {name: families[name] for name in findings.arrays}


def _kind_of_look(look: str) -> str:
    """Return the dtype, and commas for the axes of a row."""
    dtype, _, shape = look.rpartition(" (")
    return f"{dtype} {',' * len([size for size in shape.rstrip(')').split(',') if size.strip()])}"


def same_looks(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find arrays with another dtype or shape of a row than in most files."""
    of_name: dict[str, Counter[str]] = defaultdict(Counter)
    for findings in files:
        for name, (look, _) in findings.arrays.items():
            of_name[name][look] += 1
    usual_looks = {name: (*looks.most_common(1)[0], looks.total()) for name, looks in of_name.items()}
    for findings in files:
        families = _families(findings)
        for name, (look, _) in findings.arrays.items():
            usual_look, n, total = usual_looks[name]
            if look == usual_look or _are_segments(of_name[name]) or "*" in families[name]:
                continue
            yield error(
                findings.path, name, "schema", f"{n} of {total} files have it as {usual_look}; here it is {look}"
            )


def _same_meanings(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find arrays of numbers that mean something else than in most files."""
    of_name: dict[str, Counter[Any]] = defaultdict(Counter)
    for findings in files:
        for name, meaning in _meanings(findings).items():
            of_name[name][meaning] += 1
    usual = {name: meanings.most_common(1)[0][0] for name, meanings in of_name.items()}
    first: dict[str, str] = {}
    for findings in files:
        for name, meaning in _meanings(findings).items():
            if meaning == usual[name]:
                first.setdefault(name, findings.path)
    for findings in files:
        for name, (found, numbers) in _meanings(findings).items():
            expected, usual_numbers = usual[name]
            if numbers is not None and usual_numbers is not None and numbers != usual_numbers:
                text = f"its numbers stand for {numbers}, and in {first[name]!r} for {usual_numbers}"
                yield error(findings.path, name, "meaning", text)
            if found is None or expected is None or found == expected:
                continue
            rows = {0} - {names.axis for names in found.names if names.are_names}
            for difference in differences(first[name], expected, findings.path, found, rows):
                source = "" if difference.names is None else f" ({difference.names[1].source!r})"
                text = difference.text if source in difference.text else f"{difference.text}{source}"
                if difference.is_error:
                    yield error(findings.path, name, "meaning", text)
                elif source:  # other dates are no problem
                    yield warning(findings.path, name, "meaning", text)


def _meanings(findings: Findings) -> dict[str, tuple[Annotations | None, str | None]]:
    names = dict.fromkeys([*findings.annotations, *findings.numbers])
    return {name: (findings.annotations.get(name), findings.numbers.get(name)) for name in names}


def _are_segments(looks: Counter[str]) -> bool:
    """Return whether the shape of an array varies from file to file, as for recordings and images.

    This is the case if there are several shapes, and most files share none of them. Otherwise a few files differ from
    the usual shape.
    """
    _, n = looks.most_common(1)[0]
    return len(looks) >= MIN_SHAPES and 2 * n <= looks.total() and len(set(map(_kind_of_look, looks))) == 1


def _same_rows(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find arrays that have equal lengths in most files, and different lengths in a few."""
    usual_groups, n = _usual_groups(files)
    for findings in files:
        for group in usual_groups:
            rows = {name: findings.arrays[name][1] for name in group if name in findings.arrays}
            if len(set(rows.values())) > 1:
                counts = ", ".join(f"{name!r} {count:,}" for name, count in rows.items())
                text = f"rows are missing: it has {counts} rows; these numbers are equal in {n} of {len(files)} files"
                yield error(findings.path, None, "rows", text)


def _nearly_same_rows(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find lengths that differ by a little, in a single file or in all files."""
    usual_groups, _ = _usual_groups(files)
    group_of = {name: number for number, group in enumerate(usual_groups) for name in group}
    for findings in files:
        families = _families(findings)
        rows = {
            name: count
            for name, (_, count) in findings.arrays.items()
            if not _is_of_a_layout(name) and "*" not in families[name]
        }
        names = sorted(rows, key=lambda name: -rows[name])
        # Negative numbers ascend, for binary search: a file may have a hundred thousand arrays.
        negative_counts = [-rows[name] for name in names]
        for name in names:
            count = rows[name]
            longest = names[bisect_left(negative_counts, -(count * (1 + NEARLY)))]  # among arrays of similar length
            is_usual = name in group_of and group_of[name] == group_of.get(longest)
            if FEW < count < rows[longest] and not is_usual:
                n_longest = rows[longest]
                text = (
                    f"it has {count:,} rows, {longest!r} has {n_longest:,}: if they belong together, rows are missing"
                )
                yield warning(findings.path, name, "rows", text)


def _is_of_a_layout(name: str) -> bool:
    """Return whether an array is part of a sparse matrix: its parts have different lengths."""
    return any(name.rpartition("/")[2] in parts[1:] for parts in SPARSE_PARTS)


def _same_data(files: Sequence[Findings]) -> Iterator[Problem]:
    """Find files that are copies, as far as samples of their bytes show."""
    first: dict[str, str] = {}
    for findings in files:
        if findings.identity is not None and first.setdefault(findings.identity, findings.path) != findings.path:
            text = (
                f"its size, arrays and samples of its bytes equal those of {first[findings.identity]!r}: if it is a "
                "copy, training would use its rows twice"
            )
            yield warning(findings.path, None, "duplicate", text)


def _usual_groups(files: Sequence[Findings]) -> tuple[tuple[tuple[str, ...], ...], int]:
    """Return the usual groups of arrays with the same number of rows, and the number of files with each group."""
    group_counts = Counter(_groups(findings) for findings in files)
    return max(group_counts.items(), key=lambda item: (item[1], -len(item[0])), default=((), 0))


def _groups(findings: Findings) -> tuple[tuple[str, ...], ...]:
    """Return the arrays of a file, grouped by number of rows."""
    by_rows: dict[int, list[str]] = defaultdict(list)
    for name, (_, count) in findings.arrays.items():
        by_rows[count].append(name)
    return tuple(sorted(tuple(sorted(names)) for names in by_rows.values()))


SET_CHECKS: tuple[Callable[[Sequence[Findings]], Iterator[Problem]], ...] = (
    _same_kinds,
    same_looks,
    _same_meanings,
    _same_rows,
    _nearly_same_rows,
    _same_data,
)
"""The checks over all files, in this order."""


def _check_in_sandbox(path: str, options: CheckOptions, limits: SandboxLimits) -> Findings:
    """Check a file in a subprocess. It is not opened in this process."""
    try:
        findings = findings_from_json(path, run_in_sandbox(path, options, limits, usable_cores()))
    except SandboxError as why:
        return Findings(path=path, problems=[error(path, None, why.kind, why)])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as why:
        text = f"its check returned an invalid report ({type(why).__name__}). Do not open it."
        return Findings(path=path, problems=[error(path, None, "died", text)])
    advice = f". If you trust its source, pass more than sandbox_memory={limits.memory:,} bytes."
    findings.problems = [replace(p, text=p.text + advice) if p.kind == "memory" else p for p in findings.problems]
    return findings


def _layouts_of(path: str, options: CheckOptions) -> dict[str, ArrayLayout]:
    """Return the arrays of a file that can be read, each under its own name."""
    with open_h5(path) as file:
        return {layout.name: layout for layout in look_at(file, path, options).layouts.values()}


def _write_digests(path: str, options: CheckOptions, guard: ChangeGuard) -> Iterator[Problem]:
    """Write the digests of a file; reads its arrays again, as stored.

    Args:
        path: the file.
        options: selects the arrays.
        guard: state of the file when it was checked.

    Yields:
        Warnings about arrays without digests.
    """
    digests: dict[str, ArrayDigests] = {}
    tasks: list[BulkTask] = []
    for name, layout in _layouts_of(path, options).items():
        if (empty := empty_digests(layout)) is None:
            text = f"its dtype {layout.stored} is not supported by digests: verify='digest' refuses it"
            yield warning(path, layout.key, "no digest", text)
        else:
            digests[name] = empty
            tasks += digest_tasks(layout, OpenOptions(), empty)
    do_reading(path, tasks, usable_cores())
    guard.check()
    write_digest_file(path, digests)


def _compare_digests(path: str, options: CheckOptions) -> Iterator[Problem]:
    """Compare a file with its digests."""
    try:
        digests, layouts = read_digests(path), _layouts_of(path, options)
    except H5Error as why:
        yield error(path, None, "digest", why)
        return
    for name in digests.keys() - layouts.keys() if options.names is None else ():
        yield error(path, name.strip("/"), "digest", "it has digests, but is missing or cannot be accessed")
    for name in digests.keys() & layouts.keys():
        try:
            layout = with_digests(layouts[name], digests)
            do_reading(path, verify_tasks(layout, OpenOptions(), digests[layout.name]), usable_cores())
        except H5Error as why:
            yield error(path, layouts[name].key, "digest", why)
