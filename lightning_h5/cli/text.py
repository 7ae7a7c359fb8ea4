"""Reports of the tools as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from ..errors import listing
from ..hdf5 import INTEGRITY, Entry
from ..sizes import bytes_text
from .terminal import bold, faint, line_width, paragraphs, safe, table

if TYPE_CHECKING:  # these modules import torch
    from ..tools.bench import BenchReport
    from ..tools.check import CheckReport
    from ..tools.index_file import IndexReport
    from ..tools.inspect import ArrayReport, FileReport, FolderReport, SampleCost, StoreCost
    from ..tools.repack import RepackReport, StoredAs
    from ..tools.stats import ArrayStats, StatsReport

MAX_NAME = 36  # characters of a name in a table
MAX_ARRAYS = 20
MIN_ROOM = 30  # characters for the text after a name in the tree
MAX_PROBLEMS = 200
MAX_UNCHECKED = 6
MAX_CHANNELS = 24
SMALL_REQUEST = 256 << 10  # bytes, below which a request takes as long as one of this size
NO_GAIN = 0.95  # relative to the size without compression


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def file_text(report: FileReport, depth: int | None) -> Iterator[str]:
    """Yield the report of ``inspect`` on a file, as far as ``depth`` levels."""
    kinds = [entry.kind for entry in report.entries]
    listed = ("group", "array", "soft link", "hard link", "external link")
    counts = ", ".join(_counted(kinds.count(kind), kind) for kind in listed if kind in kinds)
    yield f"{bold(report.path)}  {bytes_text(report.n_bytes)}: {counts or 'empty'}"
    yield ""
    yield from _tree(report, depth)
    yield from _rows(report)
    yield from _advice_lines(report)


def folder_text(report: FolderReport, depth: int | None) -> Iterator[str]:
    """Yield the report of ``inspect`` on several files."""
    n_files = len(report.paths)
    cost = report.example.advice.cost
    rows = f"{report.n_rows:,} rows" if cost is None else _counted(cost.n_samples, "sample")
    rows = f"{rows} in files with the same arrays"
    yield f"{bold(f'{n_files:,} files')}  {bytes_text(report.n_bytes)}, {rows}"
    yield ""
    yield f"{report.n_alike:,} of {n_files:,} have the same arrays, for example {report.example.path}:"
    yield ""
    yield from _tree(report.example, depth)
    yield from _rows(report.example)
    if report.outliers:
        yield ""
        yield bold(f"{len(report.outliers):,} differ")
        yield from (f"  {path}: {text}" for path, text in report.outliers.items())
    yield from _advice_lines(report.example)


def _tree(report: FileReport, depth: int | None) -> Iterator[str]:
    """Yield a line for each name, indented by its depth; text that does not fit goes below the name."""
    arrays = {array.name: array for array in report.arrays}
    entries = [entry for entry in report.entries if depth is None or entry.name.count("/") < depth]
    names = ["  " * (1 + entry.name.count("/")) + safe(entry.name.rpartition("/")[2]) for entry in entries]
    width = min(48, max(map(len, names), default=0))
    yield "/"
    for entry, name in zip(entries, names, strict=True):
        text = _entry_text(entry, arrays.get(entry.name))
        line = f"{name:<{width}}  {text}".rstrip()
        if len(line) <= line_width() or not text:
            yield line
            continue
        yield name
        indent = " " * (len(name) - len(name.lstrip()) + 4)
        room = max(line_width() - len(indent), MIN_ROOM)
        lines = [text] if "link" in entry.kind else wrap(text, room, break_long_words=False)
        yield from (indent + part for part in lines)
    if n_hidden := len(report.entries) - len(entries):
        yield faint(f"... and {n_hidden} below; --depth shows more")


def _entry_text(entry: Entry, array: ArrayReport | None) -> str:
    attributes = f"  {_counted(entry.n_attributes, 'attribute')}" if entry.n_attributes else ""
    if "link" in entry.kind:
        return f"-> {safe(entry.target or '')}  ({entry.kind})"
    if entry.kind == "unreadable":
        return f"unreadable: {safe(entry.target or '')}"
    if array is None:
        return faint(f"{'a named datatype, ' + entry.dtype if entry.kind == 'type' else ''}{attributes}".strip())
    parts = ["(no shape)" if entry.shape is None else f"({', '.join(map(str, entry.shape))})", entry.dtype]
    if array.storage is not None:
        parts.append(f"chunks ({', '.join(map(str, array.chunks))})" if array.chunks else array.storage)
        parts += [" + ".join(array.filters)] if array.filters else []
        parts += [f"{array.ratio:.1f}:1"] if array.filters and array.ratio else []
        parts += [f"packed: {array.packing}"] if array.packing else []
    return "  ".join(parts) + attributes


def _rows(report: FileReport) -> Iterator[str]:
    """Yield the cost of a random row of each array, the largest first, and the arrays that cannot be read."""
    # The cost of text is meaningless: the size of a row is that of a pointer.
    row_costs = [(a, a.row) for a in report.arrays if a.row and a.n_bytes and not a.dtype.startswith("text")]
    row_costs.sort(key=lambda pair: -pair[0].n_bytes)
    lines, notes = [["a random row of", "has", "reads", "decodes", "chunks"]], []
    for array, row in row_costs[:MAX_ARRAYS]:
        name = array.name if len(array.name) <= MAX_NAME else f"...{array.name[3 - MAX_NAME :]}"
        sizes = (array.n_bytes / max(1, (array.shape or (1,))[0]), row.bytes_read, row.bytes_decoded)
        lines.append([name, *map(bytes_text, sizes), str(row.n_chunks or "-")])
        if row.why_slow:
            notes.append(f"{array.name} is read through the HDF5 library, in one thread: {row.why_slow}")
    if row_costs:
        yield ""
        yield table(lines)
    if len(row_costs) > MAX_ARRAYS:
        yield faint(f"... and {len(row_costs) - MAX_ARRAYS} smaller arrays; --json has all")
    notes += [f"{a.name}: {a.problem}" for a in report.arrays if a.problem is not None and a.row is None]
    yield from (line for note in notes for line in wrap(safe(note), line_width(), subsequent_indent="  "))


def _advice_lines(report: FileReport) -> Iterator[str]:
    advice = report.advice
    yield ""
    if report.integrity is not None:
        yield f"{bold('integrity')}  {report.integrity}"
    if advice.datamodule is not None:
        names = safe(", ".join((*advice.x_keys, *advice.y_keys)))
        unit = "rows" if advice.cost is None else "steps"
        yield paragraphs("in memory  ", [f"{bytes_text(advice.cached_bytes)} for all {unit} of {names}"])
    if (cost := advice.cost) is not None:
        yield paragraphs("samples    ", [_cost_text(cost)])
    if report.store is not None:
        yield paragraphs("requests   ", [_store_text(report.store)])
    yield paragraphs("use        ", advice.reasons)
    if advice.datamodule is not None:
        yield ""
        yield _wrapped_lines(advice.python)
    if advice.other is not None:
        yield ""
        yield paragraphs("unsure     ", [f"If that is wrong: {advice.other.reasons[0]}"])
        yield ""
        yield _wrapped_lines(advice.other.python)
    if advice.datamodule is not None:
        yield ""
        yield advice.yaml


def _wrapped_lines(text: str) -> str:
    return "\n".join(map(safe, text.split("\n")))


def _cost_text(cost: SampleCost) -> str:
    of_segments = f" of {_counted(cost.n_segments, 'segment')}" if cost.n_segments else ""
    sample = f"{_counted(cost.n_samples, 'sample')}{of_segments}; one has {bytes_text(cost.n_bytes)}"
    if not cost.n_chunks:
        return f"{sample}, stored without chunks: nothing is decoded."
    chunks = "1 chunk" if cost.n_chunks == 1 else f"{cost.n_chunks:g} chunks"
    plain, ordered = bytes_text(cost.bytes_decoded), bytes_text(cost.bytes_decoded_in_chunk_order)
    return f"{sample} in {chunks}. Reading one at random decodes {plain}, or {ordered} with shuffle='chunks'."


def _store_text(cost: StoreCost) -> str:
    n_bytes = cost.n_bytes / max(1, cost.n_requests)
    text = (
        f"An epoch takes at most {_counted(cost.n_requests, 'request')} for {bytes_text(cost.n_bytes)}; at "
        f"{cost.seconds * 1000:.0f} ms each and {cost.n_together} at a time {cost.epoch_seconds:,.1f} s, if the "
        "network is fast enough. Later epochs are read from the mirror."
    )
    if cost.n_requests > cost.n_together and n_bytes < SMALL_REQUEST:
        text += (
            f" A request fetches {bytes_text(n_bytes)}: write larger chunks with `lightning-h5 repack --rows-per-chunk "
            "auto --for-object-store`."
        )
    return text


def check_text(report: CheckReport, *, decoded: bool) -> Iterator[str]:
    """Yield the output of ``check``: problems by file, and a summary."""
    place = {path: at for at, path in enumerate(report.files)}
    problems = sorted([*report.errors, *report.warnings], key=lambda problem: place[problem.file])
    # Names and texts come from the file, or from a process that a crafted file took over: `safe` escapes line ends.
    for path, of_file in groupby(problems[:MAX_PROBLEMS], key=lambda problem: problem.file):
        yield bold(safe(path))
        for problem in of_file:
            array = "" if problem.array is None else f"{problem.array}: "
            yield safe(f"  {problem.severity} ({problem.kind}): {array}{problem.text}")
    if (n_hidden := len(problems) - MAX_PROBLEMS) > 0:
        yield faint(f"and {n_hidden:,} more problems; --json has all of them")
    read = f"{bytes_text(report.n_bytes)} decoded" if decoded else "metadata alone"
    sandboxed = ", each file in a process of its own" if report.sandboxed else ""
    totals = f"{_counted(len(report.errors), 'error')}, {_counted(len(report.warnings), 'warning')}"
    files, arrays = _counted(len(report.files), "file"), _counted(report.n_arrays, "array")
    yield f"{files}, {arrays}, {read}{sandboxed}: {bold(totals)}"
    if report.digested:
        yield f"digests written for {_counted(len(report.digested), 'file')}"
    elif report.integrity is not None:
        names = listing(report.unchecked, MAX_UNCHECKED)
        unchecked = f"most damage to the values of {names} would go unnoticed (no checksums)"
        meaning = INTEGRITY[report.integrity] if report.integrity else unchecked
        yield faint(f"integrity level {report.integrity} of 4: {meaning}")


def bench_text(report: BenchReport) -> Iterator[str]:
    """Yield the report of ``bench``: a table of rates, and the settings to use."""
    title = report.files[0] if len(report.files) == 1 else f"{len(report.files):,} files"
    rows = f"{_counted(report.n_rows, 'row')} of {bytes_text(report.row_bytes)}"
    state = "cold" if report.cold else "warm"
    yield f"{bold(title)}  {rows}, in shuffled batches of {report.batch_size}, {state}"
    yield ""
    plain = next((result.rows_per_second for result in report.results if result.datamodule is None), None)
    lines = [["", "rows/s", "MiB/s", "vs h5py"]]
    for result in report.results:
        rate = result.rows_per_second
        times = "-" if plain is None else f"{rate / plain:,.{1 if rate < 10 * plain else 0}f}x"
        name = f"{'*' if result.name == report.chosen.name else ' '} {result.name}"
        lines.append([name, f"{rate:,.0f}", f"{rate * report.row_bytes / 2**20:,.1f}", times])
    yield table(lines)
    for name, why in report.left_out.items():
        yield faint(f"not measured: {name}: {why}")
    yield ""
    yield paragraphs("use  ", report.reasons)
    yield ""
    yield report.yaml


def repack_text(report: RepackReport) -> Iterator[str]:
    """Yield the report of ``repack``: how each array was stored before and after."""
    rows = [["array", "chunks", "filters", "stored", "a row costs"]]
    for array in report.arrays:
        name = array.name + (" (rows shuffled)" if array.is_shuffled else "")
        rows.append([name, *_stored_cells(array.before)])
        rows.append(["", *_stored_cells(array.after)] if array.is_rewritten else ["", "as before", "", "", ""])
    yield table(rows)
    yield from (faint(f"{array.name} {array.note}.") for array in report.arrays if array.note)
    rewritten_arrays = [array for array in report.arrays if array.is_rewritten]
    compressed_arrays = [array for array in rewritten_arrays if set(array.after.filters) - {"shuffle", "fletcher32"}]
    if no_gain := [array.name for array in compressed_arrays if array.after.n_bytes > NO_GAIN * array.n_bytes]:
        yield f"Compressed, {listing(no_gain, 3)} takes as much space as without: --compression none reads faster."
    speed = sum(array.n_bytes for array in rewritten_arrays) / 2**20 / max(1e-9, report.seconds)
    verified = "" if report.verify_seconds is None else f"; verified in {report.verify_seconds:.1f} s"
    yield (
        f"{bytes_text(report.n_bytes_before)} became {bytes_text(report.n_bytes_after)} "
        f"({report.n_bytes_after / report.n_bytes_before:.2f} times) in {report.seconds:.1f} s, {speed:,.0f} MiB/s "
        f"decoded{verified}."
    )


def index_text(report: IndexReport) -> Iterator[str]:
    """Yield the lines for an index that was written."""
    share = report.n_index_bytes / max(1, report.n_bytes)
    yield (
        f"{safe(report.index)}: {bytes_text(report.n_index_bytes)}, {share:.2%} of the file, for "
        f"{_counted(report.n_arrays, 'array')}"
    )
    yield f"Store it next to the file, as <name of the file>.index. Next: lightning-h5 inspect {safe(report.path)}"


def _stored_cells(stored: StoredAs) -> list[str]:
    chunks = "none" if stored.chunks is None else " x ".join(map(str, stored.chunks))
    return [chunks, "+".join(stored.filters) or "none", bytes_text(stored.n_bytes), bytes_text(stored.row_cost)]


def stats_text(report: StatsReport) -> list[str]:
    """Return the report of ``stats``: a table for each array, with a line for each channel."""
    of_files = "" if len(report.files) == 1 else f" in {len(report.files)} files"
    text: list[str] = []
    for array in report.arrays:
        of_rows = "" if array.n_rows == report.n_rows_of_files else f" of {report.n_rows_of_files:,}"
        shape = "of several shapes," if array.row_shape is None else "x".join(map(str, array.row_shape)) or "1"
        head = f"{bold(array.key)}: {array.n_rows:,} rows{of_rows}{of_files}, each {shape} of {array.dtype}"
        text += [*([""] if text else []), head, table(_channel_rows(array))]
        if (n_hidden := array.mean.size - MAX_CHANNELS) > 0:
            text.append(faint(f"and {n_hidden:,} more channels; --json and --output have all of them"))
    return text


def _channel_rows(array: ArrayStats) -> list[list[str]]:
    """Return a line for each channel; columns of NaN and infinite values if there are any."""
    columns = {name: getattr(array, name) for name in ("mean", "std", "min", "max")}
    columns |= {name: n for name, n in (("NaN", array.n_nan), ("infinite", array.n_infinite)) if n.any()}
    channels_of_columns = [np.atleast_1d(column)[:MAX_CHANNELS].tolist() for column in columns.values()]
    lines = [["channel" if array.mean.ndim else "", *columns]]
    for channel, numbers in enumerate(zip(*channels_of_columns, strict=True)):
        lines.append([str(channel) if array.mean.ndim else "all values", *map(_number_text, numbers)])
    return lines


def _number_text(value: float) -> str:
    """Return a number with 7 digits; integers with all of theirs."""
    return f"{value:,}" if isinstance(value, int) else "-" if value != value else f"{value:.7g}"


def stats_doubts(report: StatsReport) -> Iterator[str]:
    """Yield warnings to consider before the statistics are used."""
    for array in report.arrays:
        n_nan, n_infinite = int(array.n_nan.sum()), int(array.n_infinite.sum())
        if n_nan or n_infinite:
            yield f"{array.key!r} has {n_nan:,} NaN and {n_infinite:,} infinite values, which the statistics exclude."
        constant_channels = np.flatnonzero(np.atleast_1d(array.std == 0)).tolist()
        if constant_channels:
            numbers = f"{', '.join(map(str, constant_channels[:12]))}{' ...' if len(constant_channels) > 12 else ''}"
            channels = f"channels {numbers} of " if array.mean.ndim else ""
            yield f"{channels}{array.key!r}: all values are equal (std 0) and normalize to 0."
