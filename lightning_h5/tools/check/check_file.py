"""All checks of one file: small generators of problems in its metadata, then every chunk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import H5CorruptError, H5Error, H5FileError, H5KeyError, H5ValueError, listing, short_repr
from ...hdf5 import (
    CELLS,
    Annotations,
    ArrayLayout,
    AxisNames,
    ChangeGuard,
    Entry,
    OpenFile,
    annotations_of,
    entries_of,
    enum_names,
    file_identity,
    find_array,
    is_text,
    kind_of,
    layout_of,
    open_h5,
    overlaps,
    process_pool,
    resolve_path,
    unmapped_rows,
)
from ...readers import BulkTask, do_tasks, fallback_reason
from .check_rows import ArrayDecoder, Problem, error, is_of_memory, warning

MANY_CHUNKS = 16  # per row: a row takes as many reads and decodings
LARGE_BLOCK = 16 << 20  # decoded bytes of the chunks of a row
SLOW_BYTES = 16 << 20  # smaller arrays are read once and held in memory


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of a check.

    Attributes:
        names: arrays that each file must have; None checks all arrays.
        decode: read all rows.
        folder: the working directory of the process that will read the files.
    """

    names: Sequence[str] | None = None
    decode: bool = True
    folder: str = ""


@dataclass(eq=False, kw_only=True)
class Findings:
    """The findings in one file, as plain data.

    Attributes:
        path: the file.
        is_open: whether the file could be read.
        arrays: for each array with rows, its dtype and shape of a row in words, and its number of rows.
        annotations: what the file says about the numbers of an array, if it does.
        numbers: what stored numbers stand for, in words: names of an enum, or a conversion that is not applied.
        problems: the problems, in the order of the checks.
        integrity: integrity level of each array, 0 to 3 (see ``INTEGRITY``).
        identity: the identity of the data; None if it is unknown.
        n_decoded: bytes that were decoded.
    """

    path: str
    is_open: bool = False
    arrays: dict[str, tuple[str, int]] = field(default_factory=dict)
    annotations: dict[str, Annotations] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    integrity: dict[str, int] = field(default_factory=dict)
    identity: str | None = None
    n_decoded: int = 0


def check_file(path: str, options: CheckOptions, n_cores: int, report: Callable[[int], object]) -> Findings:
    """Check a file in this process: first its metadata, then all its rows.

    Args:
        path: the file.
        options: the options of the check.
        n_cores: number of threads that decode.
        report: called from time to time, in this thread, with the bytes of the file that were checked since the last
            call.
    """
    findings = Findings(path=path)
    try:
        with open_h5(path) as file:
            guard, n_bytes = ChangeGuard.of_open(file, path), os.path.getsize(path)
            contents = look_at(file, path, options)
            for check in FILE_CHECKS:
                findings.problems += check(contents)
    except Exception as why:  # any exception: the other files are still checked
        text = f"{why}" if isinstance(why, H5Error) else f"{path!r} cannot be opened: {type(why).__name__}: {why}"
        findings.problems.append(error(path, None, "memory" if is_of_memory(why) else "open", text))
        return findings
    _note_contents(findings, contents)
    if options.decode:
        misplaced = {problem.array for problem in findings.problems if problem.kind == "place"}
        layouts = [layout for key, layout in contents.layouts.items() if key not in misplaced]
        decoders = [ArrayDecoder(layout) for layout in layouts]
        tasks = [task for decoder in decoders for task in decoder.tasks()]
        do_reading(path, tasks, n_cores, report)
        report(max(0, n_bytes - sum(task.n_bytes for task in tasks)))
        for decoder in decoders:
            findings.n_decoded += decoder.n_decoded
            findings.problems += decoder.problems()
    try:
        guard.check()
    except H5Error as why:
        findings.problems.append(error(path, None, "changed", why))
    return findings


def _note_contents(findings: Findings, contents: FileMetadata) -> None:
    """Add arrays, integrity and identity from the metadata of a file."""
    findings.is_open = True
    names = {entry.name for entry in contents.entries}
    for entry in contents.entries:
        if entry.is_data and entry.shape and (entry.name in contents.layouts or entry.name in contents.refused):
            findings.arrays[entry.name] = look_of(entry.dtype, entry.shape), entry.shape[0]
    for key, layout in contents.layouts.items():
        if layout.n_stored_bytes:
            findings.integrity[key] = layout.integrity
        if key not in names:  # a member of a table, which is not a separate entry
            dtype = "text" if kind_of(layout.dtype) == "text" else str(layout.dtype)
            findings.arrays[key] = look_of(dtype, (layout.n_rows, *layout.row_shape)), layout.n_rows
    findings.annotations = {key: said for key, said in contents.annotations.items() if said is not None}
    for key, layout in contents.data.items():
        if (words := _meaning_of_numbers(layout)) is not None:
            findings.numbers[key] = words
    if contents.layouts:
        findings.identity = file_identity(findings.path, contents.layouts.values())


def _meaning_of_numbers(layout: ArrayLayout) -> str | None:
    """Return what stored numbers stand for, in words; None if they are the values, or decoded by default."""
    if (names := enum_names(layout.stored, layout.members)) is not None:
        return short_repr(names)
    packing = layout.packing
    return f"{packing}" if packing is not None and packing.policy == "keep" and not packing.only_misses else None


def look_of(dtype: str, shape: tuple[int, ...]) -> str:
    """Return the dtype and row shape of an array in words; text of any length has one name."""
    return f"{'text' if dtype.startswith('text') else dtype} {shape[1:]}"


def findings_from_json(path: str, reported: Any) -> Findings:
    """Return findings from JSON values. The values are not trusted, and are converted to text and numbers."""

    def text(value: Any) -> str | None:
        return None if value is None else str(value)

    def annotations(of_array: Sequence[Any]) -> Annotations:
        key, n_axes, units, dimensions, names = of_array
        along = tuple(
            AxisNames(
                int(axis), str(source), str(digest), str(content), bool(are), bool(varies), ascends and bool(ascends)
            )
            for axis, source, digest, content, are, varies, ascends in names
        )
        return Annotations(str(key), max(1, int(n_axes)), text(units), tuple(map(str, dimensions)), along)

    return Findings(
        path=path,
        is_open=bool(reported["is_open"]),
        annotations={str(name): annotations(of_array) for name, of_array in reported["annotations"].items()},
        numbers={str(name): str(words) for name, words in reported["numbers"].items()},
        arrays={str(name): (str(look), int(n_rows)) for name, (look, n_rows) in reported["arrays"].items()},
        problems=[
            (error if problem["severity"] == "error" else warning)(
                path, text(problem["array"]), str(problem["kind"]), str(problem["text"])
            )
            for problem in reported["problems"]
        ],
        integrity={str(name): min(max(0, int(level)), 3) for name, level in reported["integrity"].items()},
        identity=text(reported["identity"]),
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


# Metadata ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class FileMetadata:
    """The metadata of an open file.

    Attributes:
        file: the open file.
        path: its path.
        folders: folders that HDF5 searches for linked files: the file's own, and the working directory.
        entries: all names in the file, or only the names in ``keys``.
        layouts: the readable arrays, by key, in the order of the file.
        annotations: what the file says about the numbers of an array, by key.
        refused: the reason why an array cannot be read, by key.
        unmapped: number of rows of a virtual array without a source, by key; None if it is unknown.
    """

    file: Any
    path: str
    folders: tuple[str, str]
    entries: tuple[Entry, ...] = ()
    layouts: dict[str, ArrayLayout] = field(default_factory=dict)
    annotations: dict[str, Annotations | None] = field(default_factory=dict)
    refused: dict[str, Exception] = field(default_factory=dict)
    unmapped: dict[str, int | None] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, ArrayLayout]:
        """The readable arrays, without structures that other software stores beside its data."""
        structures = {entry.name for entry in self.entries if not entry.is_data}
        return {key: layout for key, layout in self.layouts.items() if key not in structures}

    def exists(self, name: str) -> bool:
        """Return whether another file that this one names exists."""
        return any(os.path.exists(os.path.join(folder, name)) for folder in self.folders)


def look_at(file: Any, path: str, options: CheckOptions) -> FileMetadata:
    """Describe the arrays of an open file. Reads no rows; faults inside the file are recorded, not raised."""
    keys = options.names
    contents = FileMetadata(file=file, path=path, folders=(os.path.dirname(os.path.abspath(path)), options.folder))
    try:
        contents.entries = tuple(entry for entry in entries_of(file) if keys is None or entry.name in keys)
    except Exception as why:  # h5py can raise anything for a damaged file
        contents.entries = (Entry(name="/", kind="unreadable", target=f"{why}"),)
    opened = OpenFile(path, ChangeGuard.of_open(file, path), file)
    for key in keys if keys is not None else [e.name for e in contents.entries if e.kind == "array" and e.shape]:
        try:
            handle = find_array(file, key)
            layout = layout_of(handle, path, key)
            if layout.storage == "virtual" and layout.n_rows:
                contents.unmapped[key] = unmapped_rows(handle.array)
            contents.layouts[key] = layout
            blocks = [name for name in layout.stored.names or () if name.startswith("values_block_")]  # of pandas
            for name in [key, *(f"{key}/{block}" for block in blocks)]:
                contents.annotations[name] = annotations_of(opened, name)
        except Exception as why:
            contents.refused[key] = why
    return contents


def _refused(contents: FileMetadata) -> Iterator[Problem]:
    """Find arrays that cannot be described, or lie in other files."""
    kinds = {H5CorruptError: "chunk index", H5KeyError: "missing", H5FileError: "filter"}
    structures = {entry.name for entry in contents.entries if entry.structure is not None}
    for key, why in contents.refused.items():
        if key in structures and isinstance(why, H5ValueError):
            continue  # no data, such as an empty array of MATLAB
        kind = next((kind for of, kind in kinds.items() if isinstance(why, of)), "damaged")
        if (problem := _in_other_files(contents, key)) is not None:
            yield problem
        elif is_of_memory(why):
            text = f"no memory is left to read its metadata: {f'{why}' or type(why).__name__}"
            yield error(contents.path, key, "memory", text)
        elif kind == "damaged" and isinstance(why, H5ValueError):
            yield warning(contents.path, key, "not read", why)
        else:
            yield error(contents.path, key, kind, why if kind != "damaged" else f"{type(why).__name__}: {why}")


def _in_other_files(contents: FileMetadata, key: str) -> Problem | None:
    """Return a warning if the rows of an array are in other files, which are not opened."""
    path, file = contents.path, contents.file
    if not is_text(key):
        return None
    try:
        array, _ = resolve_path(file, key, allow_external=False)
        names = [name for name, _, _ in array.external or ()]
        names += [source.file_name for source in array.virtual_sources()] if array.is_virtual else []
        other_files = [name for name in dict.fromkeys(names) if name not in (".", file.filename)]
        if not other_files:
            return None
    except H5ValueError:  # a link leads out of the file
        other_files = []
    except Exception:  # the reason is reported where the array is described
        return None
    if missing := [name for name in other_files if "%b" not in name and not contents.exists(name)]:
        text = f"its rows are in {listing(missing)}, which is missing: HDF5 itself would read them as fill values"
        return warning(path, key, "link", text)
    place = listing(other_files) if other_files else "the file that a link leads to"
    text = f"its rows lie in {place}, and were not read. Check that by itself; to train through this file, pass"
    return warning(path, key, "not read", f"{text} files=FileOptions(allow_external=True)")


def _find_broken_names(contents: FileMetadata) -> Iterator[Problem]:
    """Find names that cannot be opened, and links that lead nowhere, or out of the file."""
    path = contents.path
    for entry in contents.entries:
        target = entry.target or ""
        if entry.kind == "unreadable":
            yield error(path, entry.name, "damaged", f"it is listed, but cannot be opened: {target}")
        elif entry.kind == "soft link":
            try:
                find_array(contents.file, entry.name)
            except H5KeyError:
                yield warning(path, entry.name, "link", f"this soft link leads to {target!r}, which does not exist")
            except Exception:  # the target is reported under its own name
                pass
        elif entry.kind == "external link":
            file, _, name = target.rpartition(":")
            tail = "it was not followed; check that file itself" if contents.exists(file) else "which does not exist"
            yield warning(path, entry.name, "link", f"this link leads to {name!r} in the file {file!r}: {tail}")


def _behind_the_end(contents: FileMetadata) -> Iterator[Problem]:
    """Find chunks and rows that lie beyond the end of the file."""
    end = os.path.getsize(contents.path)
    for layout in contents.layouts.values():
        places = layout.pieces()
        # Not as a sum, which may overflow.
        invalid = places[(places[:, 1] > end) | (places[:, 0] > end - places[:, 1])]
        if not len(invalid):
            continue
        rows = "the rows"
        if layout.table is not None:
            chunk = int(np.flatnonzero(layout.table.offsets == invalid[0, 0])[0])
            first = chunk // layout.table.per_row * layout.rows_per_chunk
            last = min(first + layout.rows_per_chunk, layout.n_rows) - 1
            suffix = f" and {len(invalid) - 1:,} more" if len(invalid) > 1 else ""
            rows = f"chunk {chunk} (rows {first} to {last}){suffix}"
        text = (
            f"{rows} should begin at byte {int(invalid[0, 0]):,}, and end behind byte {end:,}, which is the end of the "
            "file. It was truncated or damaged; copy it again."
        )
        yield error(contents.path, layout.key, "place", text)


def _overlaps(contents: FileMetadata) -> Iterator[Problem]:
    """Find bytes that two chunks, or two arrays, both have."""
    reported = set()
    for layout, other, text in overlaps(list(contents.layouts.values())):
        if (layout.name, other.name) not in reported:
            reported.add((layout.name, other.name))
            yield error(contents.path, layout.key, "place", text)


def _unwritten(contents: FileMetadata) -> Iterator[Problem]:
    """Find rows that were never written, or have no source in a virtual array, and read as the fill value."""
    for key, layout in contents.data.items():
        rows = f"{layout.n_rows:,} rows"
        if layout.storage == "virtual" and layout.n_rows:
            n_rows, part = contents.unmapped[key], ", in part at least" if layout.axes else ""
            if n_rows == 0:
                continue
            text = "it is virtual, with too many pieces to check whether rows have no source, which read as"
            if n_rows is not None:
                text = f"it is virtual, and {n_rows:,} of {rows} have no source{part}: they read as"
        elif layout.table is not None and (missing := np.flatnonzero(layout.table.offsets < 0)).size:
            firsts = np.unique(missing // layout.table.per_row) * layout.rows_per_chunk
            n_rows = int(np.minimum(firsts + layout.rows_per_chunk, layout.n_rows).sum() - firsts.sum())
            part = "parts of " if layout.table.per_row > 1 else ""
            chunks = f"{len(missing):,} of {len(layout.table.offsets):,} chunks were never written"
            text = f"{chunks}: {part}{n_rows:,} of {rows} read as"
        elif layout.storage == "contiguous" and layout.offset is None and not layout.n_stored_bytes and layout.n_rows:
            text = f"none of it was ever written: {layout.n_rows:,} of {rows} read as"
        else:
            continue
        is_number = kind_of(layout.stored) == "number" and not layout.stored.shape
        has_fill = is_number and len(layout.fill) == layout.stored.itemsize
        fill = f" {np.frombuffer(layout.fill, layout.stored)[0]}" if has_fill else ""
        yield warning(contents.path, key, "unwritten", f"{text} the fill value{fill}")


def _no_fields(contents: FileMetadata) -> Iterator[Problem]:
    """Find arrays that no batch can hold."""
    has_cells = any(entry.structure == CELLS for entry in contents.entries)
    references = {entry.name for entry in contents.entries if has_cells and entry.dtype == "references"}
    for layout in contents.data.values():
        if kind_of(layout.dtype) == "object" and layout.references is None and layout.key not in references:
            text = f"its dtype {layout.stored} is not supported by tensors: it cannot be a field"
            yield warning(contents.path, layout.key, "no field", text)


def _missing_as_stored(contents: FileMetadata) -> Iterator[Problem]:
    """Find floats with declared missing values, which training reads as any other number."""
    for layout in contents.data.values():
        for text in layout.missing_as_stored:
            yield warning(contents.path, layout.key, "missing values", text)


def _slow(contents: FileMetadata) -> Iterator[Problem]:
    """Find layouts that make training slow."""
    for layout in contents.data.values():
        if kind_of(layout.dtype) != "number" or layout.n_bytes <= SLOW_BYTES or layout.is_contiguous:
            continue
        n_chunks = layout.table.per_row if layout.table is not None else 1
        span = layout.chunk_span_bytes
        if n_chunks > MANY_CHUNKS:
            text = f"a row spans {n_chunks:,} chunks, {span / 2**20:,.1f} MiB decoded"
        elif layout.rows_per_chunk > 1 and span > LARGE_BLOCK:
            text = f"{layout.rows_per_chunk:,} rows share chunks of {span / 2**20:,.1f} MiB in total, decoded"
        elif (why := fallback_reason(layout)) is not None:
            text = f"only the HDF5 library can read it, one thread at a time: {why}"
        else:
            continue
        yield warning(contents.path, layout.key, "slow", f"{text}. `lightning-h5 repack` writes a faster copy.")


FILE_CHECKS: tuple[Callable[[FileMetadata], Iterator[Problem]], ...] = (
    _refused,
    _find_broken_names,
    _behind_the_end,
    _overlaps,
    _unwritten,
    _no_fields,
    _missing_as_stored,
    _slow,
)
"""The checks of the metadata of each file, in this order."""


# Rows -------------------------------------------------------------------------------------------------------------
