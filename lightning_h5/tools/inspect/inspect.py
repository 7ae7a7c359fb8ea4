"""``inspect_file`` and ``inspect_folder``: the contents of files, the cost of a random row, and settings to use."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...errors import H5FileError
from ...hdf5 import (
    INTEGRITY,
    Entry,
    expand_paths,
    expand_user,
    size_of,
)
from ...progress_bar import with_bar
from ...staging import IN_FLIGHT, is_url, requests_for
from ...types import PathLike
from ..check.check import same_arrays, same_looks
from ..check.check_file import Findings, look_of
from ..check.check_rows import Problem
from .advice import Advice, advise
from .contents import ArrayReport, Contents, contents_of
from .recognize_parts import FileLooks, looks_of
from .sample_advice import with_samples


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """One file.

    Attributes:
        path: the file.
        n_bytes: its size.
        entries: all names in it, each group before its members.
        arrays: its arrays, each under one name.
        integrity: the lowest integrity level of the arrays of ``advice``, in words.
        advice: the data module and settings to use.
        store: the cost of reading it from an object store, if it is an object.
        software: the program or format that marks the file as its own; None if no mark is known.
        attributes: the attributes of the root group, as text.
    """

    path: str
    n_bytes: int
    entries: tuple[Entry, ...]
    arrays: tuple[ArrayReport, ...]
    integrity: str | None
    advice: Advice
    store: StoreCost | None = None
    software: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StoreCost:
    """The cost of reading an object from its store.

    Attributes:
        seconds: duration of one request, measured once.
        n_requests: maximum number of requests of an epoch over the arrays of ``advice``; adjacent chunks share a
            request.
        n_bytes: bytes of all requests.
        n_together: number of simultaneous requests.
    """

    seconds: float
    n_requests: int
    n_bytes: int
    n_together: int

    @property
    def epoch_seconds(self) -> float:
        """Time of the first epoch in seconds, if the network is not the limit."""
        return self.seconds * self.n_requests / self.n_together


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """Several files as one set.

    Attributes:
        paths: all files.
        n_bytes: size of all files.
        n_rows: rows of the arrays of ``advice``, over all files that have these arrays.
        example: the first file with the usual arrays.
        n_alike: number of files with the usual arrays.
        outliers: for each other file, the difference, or the reason why it cannot be read.
    """

    paths: tuple[str, ...]
    n_bytes: int
    n_rows: int
    example: FileReport
    n_alike: int
    outliers: dict[str, str]


def inspect_file(path: PathLike) -> FileReport:
    """Inspect one file: takes about a millisecond per array, and a second per million chunks.

    Reads metadata, and at most two columns of up to a million rows: the target's classes and the groups, to suggest a
    split.

    Args:
        path: the file.

    Raises:
        H5FileError: the file does not exist, is not an HDF5 file, or cannot be read.
    """
    path = expand_user(path)
    if not (is_url(path) or os.path.exists(path)):
        expand_paths(path)  # raises an error that names the existing files
    contents = contents_of(path)
    advice = with_samples(advise(path, contents, files=[path]), path, [looks_of(path, contents)], contents.described)
    return _report(path, contents, advice)


def _report(path: str, contents: Contents, advice: Advice) -> FileReport:
    return FileReport(
        path=path,
        n_bytes=size_of(path),
        entries=contents.entries,
        arrays=contents.arrays,
        integrity=None if advice.integrity is None else f"level {advice.integrity}: {INTEGRITY[advice.integrity]}",
        advice=advice,
        store=_store_cost(path, contents, (*advice.x_keys, *advice.y_keys)) if is_url(path) else None,
        software=contents.software,
        attributes=contents.attributes,
    )


def _store_cost(url: str, contents: Contents, keys: Sequence[str]) -> StoreCost:
    began = time.perf_counter()
    size_of(url)
    seconds = time.perf_counter() - began
    offsets: list[int] = []
    sizes: list[int] = []
    for layout in (contents.layouts[key] for key in keys if key in contents.layouts):
        if layout.table is not None:
            is_there = layout.table.offsets >= 0
            offsets += layout.table.offsets[is_there].tolist()
            sizes += layout.table.sizes[is_there].tolist()
        elif layout.offset is not None:
            offsets.append(layout.offset)
            sizes.append(layout.n_stored_bytes)
    n_requests, n_bytes = requests_for(offsets, sizes)
    return StoreCost(seconds=seconds, n_requests=n_requests, n_bytes=n_bytes, n_together=IN_FLIGHT)


def inspect_folder(path: PathLike | Sequence[PathLike], *, shows_progress: bool = False) -> FolderReport:
    """Inspect many files as one set, and name the files that differ from most.

    Args:
        path: a directory, a glob, or a list of files, globs and directories.
        shows_progress: show progress on the standard error: a bar on a terminal, otherwise a line every 30 seconds.

    Raises:
        H5FileError: no file matches, or none of the files can be read.
    """
    paths = expand_paths(path)
    errors: dict[str, str] = {}
    all_findings: list[Findings] = []
    looks: dict[str, FileLooks] = {}
    for file in with_bar(paths, "looking at files", shows_progress=shows_progress, unit="file"):
        try:
            contents = contents_of(file)
        except H5FileError as error:
            errors[file] = f"{error}"
            continue
        of_rows = {
            array.name: (look_of(array.dtype, array.shape), array.shape[0]) for array in contents.arrays if array.shape
        }
        all_findings.append(Findings(path=file, arrays=of_rows))
        looks[file] = looks_of(file, contents)
    if not all_findings:
        raise H5FileError(f"none of {len(paths)} files can be read: {next(iter(errors.values()))}")
    path_names = [os.fspath(name) for name in ([path] if isinstance(path, str | os.PathLike) else path)]
    train_path = _as_glob(path_names)
    missing_arrays = _texts(same_arrays(all_findings))
    differences = _texts([*same_arrays(all_findings), *same_looks(all_findings)])
    example_files = [findings for findings in all_findings if findings.path not in differences] or all_findings[:1]
    rows, n_rows = _advice_on_rows(train_path, example_files)
    outliers = differences
    # Segments may have rows of any shape; groups that are segments may have other names in each file.
    for files, outliers_of_files in (
        (all_findings, {}),
        ([findings for findings in all_findings if findings.path not in missing_arrays], missing_arrays),
    ):
        advice = with_samples(rows, train_path, [looks[findings.path] for findings in files]) if files else rows
        is_free = any("*" in f"{setting}" for setting in (advice.x_keys, advice.settings.get("segments")))
        is_free |= bool(files) and not set(advice.x_keys).isdisjoint(looks[files[0].path].references)
        if advice.cost is not None and (outliers_of_files is missing_arrays or is_free):
            example_files, outliers = files, outliers_of_files
            break
    else:
        advice = rows
    if len(all_findings) > 1 and not _is_shared(advice, example_files, all_findings):
        why = (
            f"These {len(all_findings)} files have different arrays and are not one dataset. Inspect one of them, or "
            "only the files that belong together, by their folder or a pattern such as 'run_*.h5'."
        )
        advice = Advice(datamodule=None, settings={}, reasons=(why,))
    outliers = errors | outliers
    return FolderReport(
        paths=tuple(paths),
        n_bytes=sum(size_of(file) for file in paths if is_url(file) or os.path.exists(file)),
        n_rows=n_rows,
        example=_report(example_files[0].path, contents_of(example_files[0].path), advice),
        n_alike=len(example_files),
        outliers={file: outliers[file] for file in paths if file in outliers},
    )


def _is_shared(advice: Advice, example_files: Sequence[Findings], all_findings: Sequence[Findings]) -> bool:
    """Return whether several files have the input of a suggestion; patterns and groups are always shared."""
    if advice.datamodule is None or len(example_files) > 1 or "segments" in advice.settings:
        return True
    (example,) = example_files
    names = [name for key in advice.x_keys for name in example.arrays if f"{key}/".startswith(f"{name}/")]
    others = [findings.arrays for findings in all_findings if findings is not example]
    return not names or any(name in arrays for arrays in others for name in names)


def _as_glob(names: list[str]) -> str | list[str]:
    """Return a glob for files that a shell listed, if it matches no other file; the names otherwise."""
    folders, suffixes = {os.path.dirname(name) for name in names}, {os.path.splitext(name)[1] for name in names}
    if len(names) == 1:
        return names[0]
    if len(folders) == len(suffixes) == 1 and not any(map(is_url, names)):
        first, last = (os.path.basename(name) for name in (min(names), max(names)))
        length = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
        prefix = re.sub(r"\d+$", "", first[:length])
        for start in dict.fromkeys(("", glob.escape(prefix))):
            pattern = os.path.join(glob.escape(next(iter(folders))), f"{start}*{next(iter(suffixes))}")
            if sorted(glob.glob(pattern)) == sorted(names):
                return pattern
    return names


def _texts(problems: Iterable[Problem]) -> dict[str, str]:
    """Return the first problem of each file, as text."""
    texts: dict[str, str] = {}
    for problem in problems:
        texts.setdefault(problem.file, f"{problem.array!r}: {problem.text}")
    return texts


def _advice_on_rows(train_path: str | list[str], files: Sequence[Findings]) -> tuple[Advice, int]:
    """Return the advice for files with the same arrays if rows are samples, and the number of rows."""
    example, n_rows = contents_of(files[0].path), 0
    if x_keys := advise(train_path, example, files=[]).x_keys:
        name = example.layouts[x_keys[0]].name.strip("/")  # name of the table, if these are members
        n_rows = sum(findings.arrays[name][1] for findings in files if name in findings.arrays)
    return advise(train_path, example, files=[findings.path for findings in files], n_rows=n_rows), n_rows
