"""Reports of the tools as lines of text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from ..errors import listing
from ..hdf5 import INTEGRITY, Entry, field_groups_among, reading_of
from ..sizes import bytes_text
from .terminal import bold, faint, line_width, paragraphs, safe, table

if TYPE_CHECKING:  # these modules import torch
    from ..tools.bench import BenchReport
    from ..tools.check import CheckReport
    from ..tools.index_file import IndexReport
    from ..tools.inspect import Advice, ArrayReport, FileReport, FolderReport, SampleCost, StoreCost
    from ..tools.inspect.outline import Branch
    from ..tools.repack import RepackReport, StoredAs
    from ..tools.stats import ArrayStats, StatsReport

MAX_NAME = 36  # characters of a name in a table
COSTS = (20, 6, 3)  # most lines of costs: as many as let the report fit a screen
MAX_FIELDS = 6  # above which only the arrays of the call have a line with their cost
MAX_NAMES = 3
MAX_NOTES = 8
MAX_OUTLIERS = 20
SCREEN = 40  # lines of a screen; reports on alike groups are shortened to fit
MIN_ROOM = 30  # characters for the text after a name in the tree
MAX_PROBLEMS = 200
MAX_UNCHECKED = 3
MAX_CHANNELS = 24
SMALL_REQUEST = 256 << 10  # bytes; smaller requests take as long as requests of this size
NO_GAIN = 0.95  # relative to the size without compression
MIN_GAIN = 64 << 10  # bytes of an array; the compression of smaller arrays is not reported if there are larger ones
MAX_ATTRIBUTES = 6  # attributes of the root to show
MAX_REPACKED = 12  # arrays to show: the largest that were rewritten


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def file_text(report: FileReport, depth: int | None) -> Iterator[str]:
    """Yield the report of ``inspect`` on a file, to ``depth`` levels: first the call to copy, and the reasons."""
    kinds = [entry.kind for entry in report.entries]
    listed = ("group", "array", "soft link", "hard link", "external link")
    counts = ", ".join(_counted(kinds.count(kind), kind) for kind in listed if kind in kinds)
    software = "" if report.software is None else f", {report.software}"
    head = f"{bold(safe(report.path))}  {bytes_text(report.n_bytes)}{software}: {counts or 'empty'}"
    yield from _with_yaml(report.advice, [*_call(report.advice), head], report, depth, report.path)


def folder_text(report: FolderReport, depth: int | None) -> Iterator[str]:
    """Yield the report of ``inspect`` on several files."""
    n_files, example = len(report.paths), report.example
    cost = example.advice.cost
    rows = f"{report.n_rows:,} rows" if cost is None else _counted(cost.n_samples, "sample")
    rows = f"{rows} in files with the same arrays"
    alike = f"{report.n_alike:,} of {n_files:,} have the same arrays, for example {safe(example.path)}:"
    lines = [
        *_call(example.advice),
        f"{bold(f'{n_files:,} files')}  {bytes_text(report.n_bytes)}, {rows}",
        *wrap(alike, line_width(), break_long_words=False),
    ]
    if report.outliers:
        outliers = list(report.outliers.items())
        lines += ["", bold(f"{len(report.outliers):,} differ")]
        lines += [safe(f"  {path}: {text}") for path, text in outliers[:MAX_OUTLIERS]]
        if (n_hidden := len(outliers) - MAX_OUTLIERS) > 0:
            lines.append(faint(f"  ... and {n_hidden:,} more; --json has all of them"))
        lines.append("")
    path = example.advice.settings.get("train_path", "...")
    yield from _with_yaml(example.advice, lines, example, depth, path if isinstance(path, str) else "...")


def _with_yaml(advice: Advice, lines: Sequence[str], report: FileReport, depth: int | None, path: str) -> Iterator[str]:
    """Yield lines, the contents of a file, and the settings as YAML.

    If alike names are folded, the report is shortened to fit a screen: it has fewer costs, and only names the command
    that writes the YAML.
    """
    from ..tools.inspect.outline import outline_of

    outline = outline_of(report.entries, report.arrays)
    tree, facts = list(_tree(outline, depth, report.attributes)), list(_facts(report))
    has_yaml = advice.datamodule is not None
    is_folded = has_yaml and any(branch.has_folded for branch in outline)
    if is_folded:
        facts.append(f"{bold('as YAML')}    lightning-h5 inspect {safe(path)} --yaml")
    for max_costs in COSTS if is_folded else COSTS[:1]:
        texts = [*lines, *tree, *_rows(report, outline, max_costs), *facts]
        if sum(text.count("\n") + 1 for text in texts) <= SCREEN:
            break
    yield from texts
    if has_yaml and not is_folded:
        yield ""
        yield advice.yaml


def _call(advice: Advice) -> Iterator[str]:
    """Yield the call to copy, the reasons for it, and an alternative call if another reading is as likely."""
    if advice.datamodule is not None:
        yield _wrapped_lines(advice.python)
        yield ""
    yield paragraphs("use        " if advice.datamodule is not None else "no call    ", advice.reasons)
    yield ""
    if advice.other is not None:
        yield paragraphs("not sure   ", [f"If that is wrong: {advice.other.reasons[0]}"])
        yield ""
        if advice.other.datamodule is not None:
            yield _wrapped_lines(advice.other.python)
            yield ""


def _tree(outline: Sequence[Branch], depth: int | None, attributes: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each attribute of the root, and for each name or several alike names, indented by depth.

    Long text goes on the next line.
    """
    lines = [(f"  @{safe(name)}", safe(text)) for name, text in list(attributes.items())[:MAX_ATTRIBUTES]]
    if (n_more := len(attributes) - MAX_ATTRIBUTES) > 0:
        lines.append(
            (f"  ... and {n_more:,} more of {_counted(len(attributes), 'attribute')}; --json has all of them", "")
        )
    lines += _tree_lines(outline, 1, depth)
    width = min(48, max((len(name) for name, text in lines if text), default=0))
    yield "/"
    for name, text in lines:
        line = f"{name:<{width}}  {text}".rstrip()
        if len(line) <= line_width() or not text:
            yield line
            continue
        yield name
        indent = " " * (len(name) - len(name.lstrip()) + 4)
        room = max(line_width() - len(indent), MIN_ROOM)
        texts = [text] if " link)" in text else wrap(text, room, break_long_words=False)
        yield from (indent + part for part in texts)
    n_hidden = 0 if depth is None else sum(_count_below(branch, 1, depth) for branch in outline)
    if n_hidden:
        yield faint(f"... and {n_hidden} below; --depth shows more")


def _tree_lines(outline: Sequence[Branch], level: int, depth: int | None) -> Iterator[tuple[str, str]]:
    if depth is not None and level > depth:
        return
    for branch in outline:
        entry, name = branch.entries[0], "  " * level + safe(branch.label)
        if branch.is_folded:
            noun = "group" if entry.kind == "group" else "array"
            yield f"{name}: {_counted(len(branch.names), noun)}, each", _alike_text(branch)
        elif entry.kind == "group" and entry.structure is not None and branch.has_arrays:
            n_arrays = sum(len(leaf.entries) for _, leaf in branch.leaves())
            yield name, f"{_counted(n_arrays, 'array')}, no data: {_structure_text(entry.structure)}"
        elif entry.kind == "group" and (kind := _field_group(branch)) is not None:
            yield name, f"{kind}: {_alike_text(branch)}"
        else:
            yield name, _entry_text(entry, branch.reports[0] if branch.reports else None)
            yield from _tree_lines(branch.branches, level + 1, depth)


def _count_below(branch: Branch, level: int, depth: int) -> int:
    """Return how many names of the outline lie deeper than ``depth``."""
    own = len(branch.names) if level > depth else 0
    return own + sum(_count_below(below, level + 1, depth) for below in branch.branches)


def _field_group(branch: Branch) -> str | None:
    """Return the kind of a group that is one field, such as a sparse matrix, in words; None for other groups."""
    names = [f"/{name}" for below in branch.branches for name in below.names]
    return field_groups_among(names and [f"group{name}" for name in names]).get("group")


def _alike_text(branch: Branch) -> str:
    """Return the shapes and dtypes of alike arrays, or of the arrays in alike groups."""
    if branch.entries[0].kind == "array":
        return _array_text(branch)
    leaves = list(branch.leaves())
    structures = {leaf.entries[0].structure for _, leaf in leaves}
    if len(structures) == 1 and (structure := structures.pop()) is not None:
        return f"{_counted(len(leaves), 'array')}, no data: {_structure_text(structure)}"
    return ", ".join(_texts_below(branch))


def _texts_below(branch: Branch, prefix: str = "") -> Iterator[str]:
    """Yield the arrays below a branch; groups with the same arrays are joined."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for below in branch.branches:
        name = f"{prefix}{safe(below.label)}"
        if not below.branches:
            if below.entries[0].kind == "array":
                yield f"{name} {_array_text(below)}"
        else:
            groups.setdefault(tuple(_texts_below(below)), []).append(name)
    for texts, (*others, name) in groups.items():
        names = f"{' and '.join([*others, name])}/"
        yield from (f"{names}{text}" for text in texts) if not others else [f"{names}({', '.join(texts)})"]


def _array_text(branch: Branch) -> str:
    entry = branch.entries[0]
    filters = sorted({" + ".join(report.filters) for report in branch.reports if report.filters})
    structure = "" if entry.structure is None else f"; {entry.structure}"
    return f"{branch.shape_text} {' '.join([entry.dtype, *filters])}{structure}"


def _structure_text(structure: str) -> str:
    return f"{structure} ({reading})" if (reading := reading_of(structure)) else structure


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
    if array.structure is not None:
        parts.append(array.structure if array.is_data else f"no data: {_structure_text(array.structure)}")
        attributes = ""
    return "  ".join(parts) + attributes


def _rows(report: FileReport, outline: Sequence[Branch], max_costs: int) -> Iterator[str]:
    """Yield the cost of a random row of each field, the largest first, and the arrays that cannot be read."""
    from ..tools.inspect.outline import patterns_of

    patterns, advice = patterns_of(outline), report.advice
    used_keys = {key.strip("/") for key in (*advice.x_keys, *advice.y_keys)}
    parts = field_groups_among([array.name for array in report.arrays])  # groups that are one field
    fields: dict[str, list[ArrayReport]] = {}
    for array in report.arrays:
        # The cost of text is meaningless: the size of a row is the size of a pointer.
        group = array.name.rpartition("/")[0]
        is_other = array.structure is not None or group in parts or array.dtype.startswith("text")
        if array.row and array.n_bytes and (not is_other or array.name in used_keys):
            fields.setdefault(patterns.get(array.name, array.name), []).append(array)
    n_all = len(fields)
    if advice.cost is not None and len(fields) > MAX_FIELDS:  # with many arrays, only the arrays of the call
        used = {key: a for key, a in fields.items() if _is_among(key, used_keys)}
        fields = used or fields
    segments = advice.settings.get("segments")
    if isinstance(segments, Mapping) and "step_axis" in segments:  # a row is not a step: samples have their own line
        fields, n_all = {}, 0
    costs = sorted(fields.items(), key=lambda item: -sum(array.n_bytes for array in item[1]))
    lines, notes = [["a random row of", "has", "reads", "decodes", "chunks"]], []
    for name, arrays in costs[:max_costs]:
        label = name if len(name) <= MAX_NAME else f"...{name[3 - MAX_NAME :]}"
        n_rows = sum((array.shape or (1,))[0] for array in arrays)
        rows = [array.row for array in arrays if array.row is not None]
        sizes = (
            sum(array.n_bytes for array in arrays) / max(1, n_rows),
            sum(row.bytes_read for row in rows) / len(rows),
            sum(row.bytes_decoded for row in rows) / len(rows),
        )
        n_chunks = sum(row.n_chunks for row in rows) / len(rows)
        lines.append([label, *(bytes_text(round(size)) for size in sizes), f"{n_chunks:.3g}" if n_chunks else "-"])
        why_slow = next((row.why_slow for row in rows if row.why_slow), None)
        if why_slow and (not used_keys or _is_among(name, used_keys)):
            notes.append(f"{name} is read through the HDF5 library, in one thread: {why_slow}")
    if costs:
        yield ""
        yield table(lines)
    if n_hidden := n_all - len(costs[:max_costs]):
        yield faint(f"... and {_counted(n_hidden, 'other array')}; --json has all")
    unreadable = [array for array in report.arrays if array.problem is not None and array.row is None and array.is_data]
    unreadable = [array for array in unreadable if array.shape]  # the tree shows scalars and empty arrays
    notes += [f"{array.name}: {array.problem}" for array in unreadable[:MAX_NOTES]]
    if (n_hidden := len(unreadable) - MAX_NOTES) > 0:
        notes.append(f"... and {_counted(n_hidden, 'other array')} that cannot be read; --json has the reasons")
    yield from (line for note in notes for line in wrap(safe(note), line_width(), subsequent_indent="  "))


def _is_among(pattern: str, keys: Collection[str]) -> bool:
    """Return whether a name, or a pattern with ``*``, belongs to a key; keys may be relative to a group."""
    return any(pattern == key or pattern.endswith(f"/{key}") or pattern.startswith(f"{key}/") for key in keys)


def _facts(report: FileReport) -> Iterator[str]:
    advice = report.advice
    yield ""
    if advice.datamodule is not None:
        keys = (*advice.x_keys, *advice.y_keys)
        names = safe(", ".join(keys)) if len(keys) <= MAX_NAMES else f"{len(keys)} fields"
        unit = "steps" if advice.cost is not None and advice.cost.n_segments else "rows"
        yield paragraphs("in memory  ", [f"{bytes_text(advice.cached_bytes)} for all {unit} of {names}"])
    if (cost := advice.cost) is not None:
        yield paragraphs("samples    ", [_cost_text(cost)])
    if report.store is not None:
        yield paragraphs("requests   ", [_store_text(report.store)])
    if report.integrity is not None:
        yield f"{bold('integrity')}  {report.integrity}"


def _wrapped_lines(text: str) -> str:
    return "\n".join(map(safe, text.split("\n")))


def _cost_text(cost: SampleCost) -> str:
    of_segments = f" of {_counted(cost.n_segments, 'segment')}" if cost.n_segments else ""
    sample = f"{_counted(cost.n_samples, 'sample')}{of_segments}; {bytes_text(cost.n_bytes)} each"
    if not cost.n_chunks:
        return f"{sample}, stored without chunks"
    chunks = "1 chunk" if cost.n_chunks == 1 else f"{cost.n_chunks:g} chunks"
    plain, ordered = bytes_text(cost.bytes_decoded), bytes_text(cost.bytes_decoded_in_chunk_order)
    return f"{sample}, in {chunks}. Reading a sample at random decodes {plain}, or {ordered} with shuffle='chunks'."


def _store_text(cost: StoreCost) -> str:
    n_bytes = cost.n_bytes / max(1, cost.n_requests)
    text = (
        f"The first epoch needs at most {_counted(cost.n_requests, 'request')} for {bytes_text(cost.n_bytes)}: "
        f"{cost.epoch_seconds:,.1f} s at {cost.seconds * 1000:.0f} ms per request and {cost.n_together} requests at a "
        "time, if the network is fast enough. Later epochs are read from the mirror."
    )
    if cost.n_requests > cost.n_together and n_bytes < SMALL_REQUEST:
        text += (
            f" A request fetches only {bytes_text(n_bytes)}: write larger chunks with `lightning-h5 repack "
            "--rows-per-chunk auto --for-object-store`."
        )
    return text


def check_text(report: CheckReport, *, decoded: bool) -> Iterator[str]:
    """Yield the output of ``check``: problems by file, and a summary."""
    place = {path: at for at, path in enumerate(report.files)}
    problems = sorted([*report.errors, *report.warnings], key=lambda problem: place[problem.file])
    # Names and texts are from the file, or from a process that a crafted file took over: `safe` escapes line ends.
    for path, of_file in groupby(problems[:MAX_PROBLEMS], key=lambda problem: problem.file):
        yield bold(safe(path))
        for problem in of_file:
            array = "" if problem.array is None else f"{problem.array}: "
            yield safe(f"  {problem.severity} ({problem.kind}): {array}{problem.text}")
    if (n_hidden := len(problems) - MAX_PROBLEMS) > 0:
        yield faint(f"and {n_hidden:,} more problems; --json has all of them")
    read = f"{bytes_text(report.n_bytes)} decoded" if decoded else "only metadata"
    sandboxed = ", each file in its own process" if report.sandboxed else ""
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
    yield faint(report.library)


def bench_text(report: BenchReport) -> Iterator[str]:
    """Yield the report of ``bench``: a table of rates, and the settings to use."""
    title = report.files[0] if len(report.files) == 1 else f"{len(report.files):,} files"
    rows = f"{_counted(report.n_rows, report.unit)} of {bytes_text(report.row_bytes)}"
    state = "cold" if report.cold else "warm"
    yield f"{bold(title)}  {rows}, in shuffled batches of {report.batch_size}, {state}"
    yield ""
    plain = next((result.rows_per_second for result in report.results if result.datamodule is None), None)
    lines = [["", f"{report.unit}s/s", "MiB/s", "vs h5py"]]
    for result in report.results:
        rate = result.rows_per_second
        times = "-" if plain is None else f"{rate / plain:,.{1 if rate < 10 * plain else 0}f}x"
        name = f"{'*' if result.name == report.chosen.name else ' '} {result.name}"
        lines.append([name, f"{rate:,.0f}", f"{rate * report.row_bytes / 2**20:,.1f}", times])
    costs = [f"{result.loading_cost:.1%}" for result in report.results if result.loading_cost is not None]
    if costs:
        lines = [[*line, cost] for line, cost in zip(lines, ["loading costs", *costs], strict=True)]
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
    arrays = report.arrays
    if len(arrays) > MAX_REPACKED:
        arrays = tuple(array for array in arrays if array.is_rewritten)
    largest = sorted(arrays, key=lambda array: -array.n_bytes)[:MAX_REPACKED]
    shown_arrays = [array for array in report.arrays if array in largest]
    for array in shown_arrays:
        name = array.name + (" (rows shuffled)" if array.is_shuffled else "")
        rows.append([name, *_stored_cells(array.before)])
        rows.append(["", *_stored_cells(array.after)] if array.is_rewritten else ["", "as before", "", "", ""])
    yield table(rows)
    if n_hidden := len(report.arrays) - len(shown_arrays):
        yield faint(f"... and {_counted(n_hidden, 'other array')}, smaller or as before; --json has all")
    names_of_notes: dict[str, list[str]] = {}
    for array in report.arrays:
        if array.note:
            names_of_notes.setdefault(array.note, []).append(array.name)
    for note, names in names_of_notes.items():
        others = f" ({_counted(len(names) - 1, 'other')} as well)" if len(names) > 1 else ""
        yield faint(f"{names[0]} {note}{others}.")
    rewritten_arrays = [array for array in report.arrays if array.is_rewritten]
    compressed_arrays = [array for array in rewritten_arrays if set(array.after.filters) - {"shuffle", "fletcher32"}]
    large_arrays = [array for array in compressed_arrays if array.n_bytes >= MIN_GAIN] or compressed_arrays
    if no_gain := [array.name for array in large_arrays if array.after.n_bytes > NO_GAIN * array.n_bytes]:
        verb = "does" if len(no_gain) == 1 else "do"
        yield f"{listing(no_gain, 3)} {verb} not get smaller by compression: --compression none reads faster."
    speed = sum(array.n_bytes for array in rewritten_arrays) / 2**20 / max(1e-9, report.seconds)
    verified = "" if report.verify_seconds is None else f"; verified in {report.verify_seconds:.1f} s"
    yield (
        f"{bytes_text(report.n_bytes_before)} became {bytes_text(report.n_bytes_after)} "
        f"({report.n_bytes_after / report.n_bytes_before:.2f} times the size) in {report.seconds:.1f} s, at "
        f"{speed:,.0f} MiB/s of decoded data{verified}."
    )
    yield f"Next: lightning-h5 {'inspect' if report.verify_seconds is not None else 'check'} {safe(report.target)}"


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
    """Return a line for each channel, with columns for NaN and infinite values if there are any."""
    columns = {name: getattr(array, name) for name in ("mean", "std", "min", "max")}
    columns |= {name: n for name, n in (("NaN", array.n_nan), ("infinite", array.n_infinite)) if n.any()}
    channels_of_columns = [np.atleast_1d(column)[:MAX_CHANNELS].tolist() for column in columns.values()]
    lines = [["channel" if array.mean.ndim else "", *columns]]
    for channel, numbers in enumerate(zip(*channels_of_columns, strict=True)):
        lines.append([str(channel) if array.mean.ndim else "all values", *map(_number_text, numbers)])
    return lines


def _number_text(value: float) -> str:
    """Return a number with 7 digits, or an integer with all digits."""
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
