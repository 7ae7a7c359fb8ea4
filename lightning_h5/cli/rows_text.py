"""The report of ``rows``: a table of the samples of an optimizer step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from .terminal import bold, faint, line_width, safe

if TYPE_CHECKING:  # imports torch
    from ..datamodules.step_rows import StepRows, StepSample

__all__ = ["rows_text"]

MAX_LINES = 40
MIN_ROOM = 24  # characters for rows


class _Place(NamedTuple):
    """The place that the samples of a line share."""

    rank: int
    batch: int
    source: str
    file: str
    segment: str


def rows_text(report: StepRows) -> Iterator[str]:
    """Yield the lines of the report; a line has the samples of one batch in one file, or one segment."""
    samples = report.samples
    files = {sample.file for sample in samples}
    ranks = len({sample.rank for sample in samples})
    of_ranks = "" if report.world_size == 1 else f", {ranks} of {report.world_size} ranks"
    batches = "" if report.n_batches == 1 else f", {report.n_batches} batches a rank"
    n_files = f"{len(files)} file{'' if len(files) == 1 else 's'}"
    yield bold(f"step {report.step}: epoch {report.epoch}{of_ranks}{batches}, {len(samples):,} samples of {n_files}")
    if len(files) == 1:
        yield safe(*files)
    yield ""
    folder = os.path.commonpath([os.path.dirname(file) for file in files]) if files else ""
    lines = list(_lines(samples, folder, has_files=len(files) > 1))
    yield from _columns(lines[: MAX_LINES + 1])
    if (n_hidden := len(lines) - 1 - MAX_LINES) > 0:
        yield faint(f"and {n_hidden:,} more lines; --json has all samples in order")


def _lines(samples: Sequence[StepSample], folder: str, *, has_files: bool) -> Iterator[list[str]]:
    """Yield the cells of each line, the header first; columns with a single value are left out."""
    has_segments = any(sample.segment is not None for sample in samples)
    has_sources = any(sample.source is not None for sample in samples)
    shown = [True, True, has_sources, has_files, has_segments]
    heads = ["rank", "batch", "source", "file", "segment"]
    yield [*(head for head, is_shown in zip(heads, shown, strict=True) if is_shown), "samples", _head(samples)]

    def place(sample: StepSample) -> _Place:
        file = os.path.relpath(sample.file, folder) if folder and "://" not in sample.file else sample.file
        return _Place(sample.rank, sample.batch, sample.source or "", file, sample.segment or "")

    for common, group in groupby(sorted(samples, key=place), place):
        members = list(group)
        cells = [str(value) for value, is_shown in zip(common, shown, strict=True) if is_shown]
        yield [*cells, f"{len(members):,}", _numbers(members)]


def _head(samples: Sequence[StepSample]) -> str:
    return "rows" if all(sample.step is None for sample in samples) else "steps"


def _numbers(samples: Sequence[StepSample]) -> str:
    """Return the rows, or steps, of samples in ascending order, with a dash for consecutive ones."""
    values: list[Any] = sorted(sample.row if sample.step is None else sample.step for sample in samples)
    if values and isinstance(values[0], tuple):
        return ", ".join(f"({', '.join(map(str, value))})" for value in values)
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _columns(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield lines of cells under each other; a last cell that is too long is cut."""
    lines = [[safe(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    room = max(MIN_ROOM, line_width() - sum(widths) - 2 * len(widths))
    for number, (*cells, last) in enumerate(lines):
        left = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        line = "  ".join(
            [*left, last if len(last) <= room else f"{last[: room - 5].rpartition(', ')[0]}, ..."]
        ).rstrip()
        yield line if number else bold(line)
