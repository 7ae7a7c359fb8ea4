"""Recognize samples in files: rules that group steps by names, shapes and dtypes, with reasons.

Every rule returns arguments of a data module, which are tried on the files afterwards (see ``sample_advice``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, TypeAlias

import numpy as np

from ...errors import H5Error, listing
from ...hdf5 import (
    COMPLEX_MEMBERS,
    FAULTS,
    OpenOptions,
    ScalarError,
    field_groups_among,
    find_array,
    is_attribute_key,
    is_bytes,
    keys_in,
    layout_of,
    names_rows,
    open_h5,
    words_in,
)
from ...readers import Image, bytes_of, open_reader
from .recognize_parts import (
    ACTIONS,
    LONGER,
    MAX_CHANNELS,
    MAX_STEPS,
    SERIES,
    TARGETS,
    TIMES,
    AlikeParts,
    FileLooks,
    Guess,
    Look,
    Reader,
    Settings,
    attributes_that_vary,
    have_classes,
    is_rate,
    names_of,
    target_among,
)
from .recognize_software import MIN_SERIES, recognize_software, sparse_rows, split_in_order

__all__ = ["recognize", "why_one_of_many"]

FLAG = re.compile(
    r"(is_)?(episode_)?(terminal|timeout|done|truncation|termination|truncated|terminated|last|end)s?", re.IGNORECASE
)
LENGTHS, OFFSETS = (
    {"length", "len", "count", "size", "n", "num"},
    {"indptr", "ptr", "offset", "start", "begin", "first"},
)
EPISODES = {"episode", "trajectory", "traj", "demo", "sequence", "rollout"}
WELL = re.compile(r"t\d_fields/")
MAX_NESTED = 100  # maximum number of groups to search for nested groups
MAX_LEVELS = 3  # maximum number of levels of groups that have their own names
NEARLY_ALL = 0.9  # share of groups with an array
MIN_OWN_NAMES = 9  # minimum number of arrays with names of their own, in several groups
SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # of JPEG and PNG files
MAX_READ = 16  # maximum number of arrays to read a row of
N_DECODED = 8  # number of images with shapes to compare
MIN_NAMES = 2  # minimum number of images with their own names
MIN_ROWS = 10  # minimum number of rows for a validation split


def recognize(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Return guesses, the likeliest first; empty if an index along axis 0 of each array is a sample.

    Args:
        files: the arrays of each file; the rules read the first one.
        reader: reads columns and attributes for the rules.
    """
    if guesses := recognize_software(files, reader) or sparse_rows(files, reader):
        return guesses
    if guesses := _complex_rows(files[0]) or _images(files) or _named_images(files[0]) or _lists(files):
        return guesses
    if guesses := _cells_of_references(files[0], reader):
        return guesses
    files = [replace(file, arrays=_without_tables(file)) for file in files]
    if not files[0].arrays:
        return []
    if (siblings := _siblings(files)) is not None:
        while any(_siblings([part]) is not None for part in siblings.parts[:MAX_NESTED]):
            nested = _groups_in_groups(siblings)
            if nested is None:
                why = _why_two_levels(siblings.pattern, siblings.parts[0])
                return [Guess(settings=None, why=why, is_sure=False)]
            siblings = nested
        guesses = AlikeParts(siblings.parts, reader, {"groups": siblings.pattern}).guesses()
        split = _lists_of_splits(files[0], siblings.parts, reader)
        guesses = [
            replace(
                guess,
                settings=(guess.settings or {}) | split | siblings.dropping(guess),
                why=f"{siblings.why(guess)} {guess.why}".strip(),
                is_sure=guess.is_sure and siblings.is_sure,
            )
            for guess in (guesses if siblings.is_sure else guesses[:1])
        ]
        by_row = Guess(settings={}, why="An index along axis 0 of all arrays is a sample.")
        return guesses if siblings.is_sure or not guesses else [*guesses, by_row]
    for rule in (_cut_rows, _labeled_lines, _arrays_alike, _one_recording, _trajectories, _joined_files, _last_axis):
        if guesses := rule(files, reader):
            return guesses
    of_files = AlikeParts(files, reader, {})
    if len(files) == 1 and of_files.shapes and of_files.are_volumes:
        return [*of_files.guesses()[:1], Guess(settings={}, why="An index along axis 0 of all arrays is a sample.")]
    return of_files.guesses() if of_files.are_segments else []


def why_one_of_many(file: FileLooks, key: str) -> str | None:
    """Return why the rows of an array may not be all samples: groups side by side have such an array; None if not.

    Args:
        file: the file.
        key: the array, or a member of a table.
    """
    looks = {**file.arrays, **file.tables}
    name = key if key in looks else key.rpartition("/")[0]
    if name not in looks:
        return None
    look, levels = looks[name], name.split("/")
    elsewhere = [
        other
        for other, other_look in looks.items()
        if len(other_look.shape) == len(look.shape)
        and other.count("/") == len(levels) - 1
        and other.split("/")[:-1] != levels[:-1]
    ]
    form = re.sub(r"\d+", "0", levels[-1])
    same_names = [other for other in elsewhere if re.sub(r"\d+", "0", other.rpartition("/")[2]) == form]
    alike = same_names or [n for n in elsewhere if looks[n].dtype == look.dtype and _repeats_group(n)]
    if not same_names and (len(alike) < MIN_OWN_NAMES or not _repeats_group(name)):
        return None
    names_of_levels = [set(texts) for texts in zip(levels, *(other.split("/") for other in alike), strict=True)]
    first, *_, last = [at for at, names in enumerate(names_of_levels) if len(names) > 1] * 2
    pattern = ["*" if len(names) > 1 else level for level, names in zip(levels, names_of_levels, strict=True)]
    lengths = {looks[other].shape[0] for other in (name, *alike)}
    n_groups = min(last + 1, len(levels) - 1)
    outside = [n for n in looks if not (n.count("/") >= n_groups and _fits_levels(n.split("/"), pattern[:n_groups]))]
    is_field = len(lengths) == 1 and any(looks[n].shape[:1] == look.shape[:1] for n in outside)
    if names_of_levels[first] <= set(SPLITS) or is_field:
        return None
    argument = f"x_key={'/'.join(pattern)!r}"
    if last < len(levels) - 1:
        argument = f"segments={'/'.join(pattern[:n_groups])!r}, with keys relative to the group"
    return (
        f"{name!r} is one of {1 + len(alike):,} such arrays in groups side by side, and the call reads no other. If "
        f"each is a segment, pass a pattern such as {argument}."
    )


def _arrays_alike(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Arrays side by side that differ in names and lengths are samples; a single number is not."""
    arrays = {name: look for name, look in files[0].arrays.items() if look.n_values > 1 and look.dtype[:4] != "text"}
    is_numbered = False
    if (own_names := _own_names(files[0], arrays)) is not None:
        of_sample = dict([own_names])
    else:
        of_sample, is_numbered = _in_one_group(files[0], arrays)
    if not of_sample:
        return []
    names = next(iter(of_sample.values()))
    looks = [arrays[name] for name in names]
    lengths, rows = {look.shape[0] for look in looks}, {look.shape[1:] for look in looks}
    if len(looks) < 3 and not is_numbered:
        return []
    if len(lengths) == 1 and not (is_numbered or len(looks) > 8):
        return []
    keys = dict(zip(("x_key", "y_key"), of_sample, strict=False))
    kinds_text = f"{len(looks):,} arrays such as {listing(names[:2])} are of one kind"
    why = f"{kinds_text} and have {'several lengths' if len(lengths) > 1 else 'one length'}: each is a sample."
    if len(of_sample) == 1:
        parts = [FileLooks(path=files[0].path, group=name, arrays={}) for name in names]
        target = target_among(attributes_that_vary(reader.attributes(parts, [])))
        if target is not None:
            keys["y_key"] = target
            why += f" {target!r}, a target by its name, is an attribute of each."
    settings = {**keys, "collate_fn": "list" if len(rows) > 1 else "pad"}
    guess = Guess(settings=settings | ({"split": 0.1} if len(looks) >= 10 else {}), why=why)
    if len(lengths) > 1:
        return [guess]
    return [replace(guess, is_sure=False), Guess(settings={}, why="Index i of all arrays is a sample.")]


def _in_one_group(file: FileLooks, arrays: Mapping[str, Look]) -> tuple[dict[str, list[str]], bool]:
    """Return the arrays of each pattern if all arrays of a file are in one group, and whether they are numbered.

    Args:
        file: the file.
        arrays: arrays of it with several numbers.
    """
    groups = {name.rpartition("/")[0] for name in arrays}
    if len(groups) != 1 or len(arrays) < 2 or len(arrays) != len(file.arrays):
        return {}, False
    patterns: dict[str, list[str]] = {}
    for name in arrays:
        patterns.setdefault(re.sub(r"\d+", "*", name, count=1) if re.search(r"\d", name) else name, []).append(name)
    is_numbered = all(
        "*" in pattern and pattern.count("*") == 1 and len(names) > 1 for pattern, names in patterns.items()
    )
    kinds = {(len(look.shape), look.dtype) for look in arrays.values()}
    group = next(iter(groups))
    if len(kinds) == 1 and not (is_numbered and len(patterns) == 2):
        return {"*" if not group else f"{group}/*": list(arrays)}, is_numbered
    if is_numbered and len(patterns) == 2 and len({len(names) for names in patterns.values()}) == 1:
        return dict(sorted(patterns.items(), key=lambda item: -arrays[item[1][0]].n_values)), is_numbered
    return {}, is_numbered


def _own_names(file: FileLooks, arrays: Mapping[str, Look]) -> tuple[str, list[str]] | None:
    """Return a pattern and its arrays, if these are in groups side by side and their names repeat those of the groups.

    Args:
        file: the file.
        arrays: arrays of it with several numbers.
    """
    kinds: dict[tuple[str, int, str], list[str]] = {}  # by the group above their groups
    for name, look in arrays.items():
        group, slash, _ = name.rpartition("/")
        if slash and _repeats_group(name):
            above = group.rpartition("/")
            kinds.setdefault(("".join(above[:2]), len(look.shape), look.dtype), []).append(name)
    parent, names = max(
        ((above, names) for (above, *_), names in kinds.items()), key=lambda item: len(item[1]), default=("", [])
    )
    groups = {name.rpartition("/")[0] for name in names}
    if len(names) < MIN_OWN_NAMES or len(groups) < 2:
        return None
    if 2 * sum(arrays[name].n_values for name in names) < sum(look.n_values for look in arrays.values()):
        return None
    own = set(names)
    others = {
        name[len(parent) :]
        for name in (*file.arrays, *file.of_bytes)
        if name.startswith(parent) and name.count("/", len(parent)) == 1 and name not in own
    }
    pattern = _pattern_of({name[len(parent) :] for name in names}, others)
    return None if any(_fits(other, pattern) for other in others) else (parent + pattern, names)


def _repeats_group(name: str) -> bool:
    """Return whether the name of an array begins with the name of its group, as traces of ASDF: ``N.A/N.A..BHZ``."""
    *_, group, last = "/", *name.split("/")
    return last.startswith(group)


def _cut_rows(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Rows of all segments in one array: flags, lengths, first rows or segment numbers mark the ends."""
    arrays = {name: look for name, look in files[0].arrays.items() if look.shape and look.dtype[:4] != "text"}
    if not arrays:
        return []
    main = max(arrays, key=lambda name: (len(arrays[name].shape) > 1, arrays[name].n_values))
    n = arrays[main].shape[0]
    columns = [name for name, look in arrays.items() if len(look.shape) == 1 and name != main]
    ends = [name for name in columns if FLAG.fullmatch(name.rpartition("/")[2]) and arrays[name].shape[0] == n]
    ends = [name for name in ends if _look_like_flags(reader.values(name))]
    segments: Settings = {}
    n_segments = 0
    if ends:
        segments = {"ends": ends if len(ends) > 1 else ends[0]}
        why = f"{listing(ends)}: {'flags' if len(ends) > 1 else 'a flag'} of each row, set at the last of an episode."
    else:
        integer_columns = [name for name in columns if arrays[name].dtype.startswith(("int", "uint")) and n > 1]
        for name in integer_columns:
            values, words = reader.values(name), words_in(name)
            if values is None or not len(values):
                continue
            values = values.astype(np.int64)
            if words & LENGTHS and len(values) < n and (values >= 0).all() and values.sum() == n:
                n_segments = len(values)
                segments, why = {"lengths": name}, f"{name!r} adds up to the {n:,} rows: they are lengths of segments."
            elif (
                words & OFFSETS and 1 < len(values) <= n + 1 and values[0] == 0 and (np.diff(values) >= 0).all()
            ) and values[-1] <= n:
                n_segments = len(values) - int(values[-1] == n)
                segments, why = {"offsets": name}, f"{name!r} ascends from 0 up to {n:,} rows: first rows of segments."
            elif ("end" in words and 1 < len(values) < n and values[0] > 0 and (np.diff(values) > 0).all()) and values[
                -1
            ] == n:
                n_segments = len(values)
                segments, why = {"ends": name}, f"{name!r} ascends up to the {n:,} rows: ends of segments."
            elif words & EPISODES and len(values) == n and 1 < len(np.unique(values)) < n:
                segments, why = {"key": name}, f"{name!r} has one number for all rows of a segment."
            if segments:
                break
    if not segments:
        return []
    cuts = [*ends, *(value for value in segments.values() if isinstance(value, str))]
    part_arrays = {name: look for name, look in arrays.items() if look.shape[0] == n and name not in cuts}
    if n_segments > 1:
        part_arrays |= {name: look for name, look in arrays.items() if look.shape[0] == n_segments and name not in cuts}
    parts = AlikeParts([FileLooks(path=file.path, arrays=part_arrays) for file in files], reader, segments)
    parts.attributes, parts.mixed, parts.scalars, parts.texts = {}, [], [], []
    part_words = set().union(*map(words_in, part_arrays))
    texts = {
        name
        for name, look in files[0].arrays.items()
        if look.dtype[:4] == "text" and look.shape in ((n,), (n_segments,)) and have_classes(reader.values(name))
    }
    target = None if part_words & ACTIONS else target_among(texts)
    guesses = []
    for guess in parts.guesses()[:1]:
        settings, text = guess.settings or {}, f"{why} {guess.why}"
        if target is not None and "y_key" not in settings:
            settings = {**settings, "y_key": target, "decode": {target: "category"}}
            text += f" {target!r} is a target by its name."
        guesses.append(replace(guess, settings=settings, why=text))
    return guesses


def _look_like_flags(values: Any) -> bool:
    return values is not None and bool(np.isin(values, (0, 1)).all() and 0 < np.count_nonzero(values) < len(values))


def _one_recording(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """One array of shape (channel, time) alone in a file, or one recording with its rate."""
    numbers = {name: look for name, look in files[0].arrays.items() if look.dtype[:4] != "text"}
    arrays = {name: look for name, look in numbers.items() if look.n_values > 1}
    name = max(arrays, key=lambda name: arrays[name].n_values, default=None)
    if name is None or len(files) > 1 or len(arrays[name].shape) != 2:
        return []
    shape = arrays[name].shape
    rate = next((single for single in numbers if single not in arrays and is_rate(single)), None)
    if rate is not None and LONGER * min(shape) <= max(shape) and all(max(shape) in a.shape for a in arrays.values()):
        axis, n_steps = int(shape[1] > shape[0]), max(shape)
        why = f"{rate!r} is a rate by its name: axis {axis} of {name!r}, with {n_steps:,} steps, may be time. "
        settings: Settings = {"x_key": name, **({"segments": {"step_axis": 1}} if axis else {})}
        settings["window"] = min(MAX_STEPS, max(1, n_steps // (2 * MIN_ROWS)))
        if n_steps >= MIN_SERIES:
            settings["split"] = {"val_fraction": 0.1, "by": "time"}
        recording = Guess(settings=settings, why=f"{why}A sample is a window of steps.", is_sure=False)
        return [recording, Guess(settings={}, why="An index along axis 0 is a sample.")]
    if len(arrays) > 1 or LONGER * shape[0] > shape[1] or shape[0] > MAX_CHANNELS:
        return []
    recording = Guess(
        settings={"x_key": name, "segments": {"step_axis": 1}, "window": min(MAX_STEPS, shape[1])},
        why=f"{name!r} has the shape {shape}, and axis 1 may be time. A sample is a window of steps.",
    )
    if words_in(name) & SERIES:
        return [recording]
    return [Guess(settings={}, why="An index along axis 0 is a sample.", is_sure=False), recording]


def _trajectories(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Arrays of shape (trajectory, step, ...): by the names of The Well, or a coordinate of time along axis 1."""
    arrays = {name: look for name, look in files[0].arrays.items() if look.shape and look.dtype[:4] != "text"}
    volumes = [name for name, look in arrays.items() if len(look.shape) > 2]
    is_well = bool([name for name in volumes if WELL.match(name)])
    volumes = [name for name in volumes if WELL.match(name)] if is_well else volumes
    if not volumes:
        return []
    main = (
        min(volumes, key=lambda name: (-arrays[name].n_values // 4, name))
        if not is_well
        else min(volumes, key=lambda name: (name[:2], -arrays[name].n_values))
    )
    shape = arrays[main].shape
    times = [name for name, look in arrays.items() if words_in(name) & TIMES and len(look.shape) == 1]
    lengths = [arrays[name].shape[0] for name in times]
    step_times = [name for name, n in zip(times, lengths, strict=True) if n - shape[1] in (0, 1)]
    if not is_well and (not step_times or shape[0] in lengths):
        return []
    fields = [name for name in volumes if arrays[name].shape[:2] == shape[:2]]
    space = shape[2:]
    constants = [name for name in arrays if is_well and WELL.match(name) and arrays[name].shape[: len(space)] == space]
    constants = [name for name in constants if name not in fields and len(space)]
    names = names_of((*fields, *constants))
    name_of = {key: name for name, key in names.items()}
    segments: Settings = {"axis": 0, "step_axis": 1}
    if constants:
        segments["axis"] = {name_of[key]: 0 if key in fields else None for key in names.values()}
        segments["constants"] = [name_of[key] for key in constants]
    evidence = "the names of The Well" if is_well else f"{step_times[0]!r}, which has as many values as axis 1"
    why = (
        f"{main!r} has the shape {shape}: {shape[0]} trajectories of {shape[1]} steps, by {evidence}. A sample is a "
        "window of steps."
    )
    x_key: Any = names if len(names) > 1 else next(iter(names.values()))
    window = {"length": min(5, shape[1]), "stride": 1}
    return [Guess(settings={"x_key": x_key, "segments": segments, "window": window}, why=why)]


def _joined_files(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """A coordinate of time along axis 0 that advances by one step: files are parts of one series."""
    arrays = {name: look for name, look in files[0].arrays.items() if look.shape and look.dtype[:4] != "text"}
    times = [name for name, look in arrays.items() if words_in(name) & TIMES and len(look.shape) == 1]
    fields_below: dict[tuple[str, int], list[str]] = {}  # by a group and the number of rows
    for field, look in arrays.items():
        *groups, _ = field.split("/")
        if len(look.shape) > 1 and "/".join((*groups, "id")) not in files[0].coordinates:  # no column of a table
            for depth in range(len(groups) + 1):
                fields_below.setdefault(("/".join(groups[:depth]), look.shape[0]), []).append(field)
    fields_of_times: dict[str, list[str]] = {}
    for name in [name for name in times if not names_rows(name)]:
        # A coordinate applies to the arrays beside and below it.
        if fields := fields_below.get((name.rpartition("/")[0], arrays[name].shape[0])):
            fields_of_times[name] = fields
    for name in sorted(
        fields_of_times, key=lambda name: -sum(arrays[field].n_values for field in fields_of_times[name])
    ):
        values = reader.values(name)
        if values is None or len(values) < 3 or values.dtype.kind not in "iuf":
            continue
        steps = np.diff(values.astype(np.float64))
        stride = float(np.median(steps))
        if not stride > 0 or np.mean(abs(steps - stride) <= stride / 1000) < 0.5:
            continue
        as_long = [other for other in fields_of_times if arrays[other].shape == arrays[name].shape and other != name]
        same_times = [name, *(o for o in as_long[:MAX_READ] if np.array_equal(reader.values(o), values))]
        fields = list(dict.fromkeys(field for other in same_times for field in fields_of_times[other]))
        x_key: Any = names_of(fields) if len(fields) > 1 else fields[0]
        why = (
            f"{name!r} advances by {stride:g} from row to row, so that rows are steps in time, also from file to file. "
            "A sample is two consecutive steps."
        )
        settings: Settings = {"x_key": x_key, "segments": {"join": name}, "window": [0, 2]}
        if sum(file.arrays[name].shape[0] for file in files if name in file.arrays) >= MIN_SERIES:
            settings["split"] = {"val_fraction": 0.1, "by": "time"}
            why += " The last tenth is held out for validation."
        return [Guess(settings=settings, why=why)]
    return []


def _labeled_lines(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Arrays of MATLAB with samples along their last axis; a recording with its rate only if it has a target."""
    if files[0].software != "MATLAB":
        return []
    guesses = _last_axis(files, reader)
    has_target = any("y_key" in (guess.settings or {}) for guess in guesses)
    return guesses if has_target or not any(map(is_rate, files[0].arrays)) else []


def _last_axis(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Arrays with samples along their last axis, as MATLAB writes columns: all of them, or only the target."""
    arrays = {name: look for name, look in files[0].arrays.items() if look.dtype[:4] != "text" and look.n_values > 1}
    main = max(arrays, key=lambda name: (len(arrays[name].shape), arrays[name].n_values), default=None)
    if main is None or len(arrays[main].shape) < 2:
        return []
    shape = arrays[main].shape
    targets = [name for name in arrays if words_in(name) & TARGETS and name != main]
    rows = [name for name in targets if arrays[name].shape == (1, shape[0])]
    if len(rows) == 1 and shape[0] > 1:
        ((target,), pair) = rows, {"x_key": main, "y_key": rows[0]}
        why = (
            f"{main!r} has {shape[0]:,} along axis 0 and {target!r}, a target by its name, along axis 1: index i is a "
            "sample."
        )
        along_first = {**pair, "segments": {"step_axis": {main: 0, target: 1}}}
        guesses = [_in_order_of(files, reader, along_first, shape[0], why)]
        if files[0].software == "MATLAB" and shape[0] == shape[-1]:
            why = (
                f"{main!r} has {shape[0]:,} along its first and last axis, and {target!r} is a target by its name: an "
                "index of the last axis is a sample, as MATLAB stores a matrix with a row for each sample."
            )
            along_last = _in_order_of(files, reader, {**pair, "segments": {"step_axis": -1}}, shape[-1], why)
            guesses.insert(0, replace(along_last, is_sure=False))
        return guesses
    n = shape[-1]
    fields = [name for name, look in arrays.items() if look.shape[-1] == n and len(look.shape) > 1]
    lines = [name for name in fields if arrays[name].shape == (1, n)]
    firsts = [look.shape[0] for name, look in arrays.items() if len(look.shape) > 1 and name not in lines]
    is_longest = all(n >= max(look.shape) for look in arrays.values())
    groups = {name.rpartition("/")[0] for name in fields}
    columns = [name for name in targets if arrays[name].shape == (shape[0], 1)]
    if len(fields) < 2 or n in firsts or columns or len(groups) > 1:
        return []
    if len(set(firsts)) < len(firsts) and not (lines and files[0].software == "MATLAB"):
        return []
    target = next((name for name in fields if name in targets), "")
    if not is_longest and target not in lines:
        return []
    inputs, others = fields, list[str]()
    if target in lines:
        inputs, others = [name for name in fields if name not in lines], [name for name in lines if name != target]
    elif len(fields) == 2 and target:
        inputs = [main]
    else:
        target = ""
    settings: Settings = {"x_key": main if len(inputs) == 1 else names_of(inputs)}
    settings |= {"y_key": target} if target else {}
    settings["segments"] = {"step_axis": -1}
    why = f"{listing(fields, 4)} have {n:,} along their last axis, as MATLAB stores samples: its index i is a sample."
    if target in lines:
        why += f" {target!r} is a target by its name." + (f" Not used: {listing(others, 4)}." if others else "")
    return [_in_order_of(files, reader, settings, n, why)]


def _in_order_of(files: Sequence[FileLooks], reader: Reader, settings: Settings, n: int, why: str) -> Guess:
    """Return a guess for ``n`` samples that are not along axis 0 of all arrays, with a split in their order."""
    target = settings.get("y_key")
    if target is not None and files[0].arrays[target].shape == (1, n):
        settings = {**settings, "select": {target: {0: 0}}}
    split, why_split = split_in_order(n, reader.values(target) if target else None) if len(files) == 1 else ({}, "")
    return Guess(settings={**settings, "sample": "row", **split}, why=f"{why} {why_split}".strip())


def _without_tables(file: FileLooks) -> dict[str, Look]:
    """Return arrays without groups that are one field: such groups have one structure, and are not segments."""
    held = field_groups_among(file.arrays)
    return {name: look for name, look in file.arrays.items() if name.rpartition("/")[0] not in held}


_Groups: TypeAlias = dict[tuple[int, str], dict[str, Look]]
"""The arrays of groups, by number of the file and name of the group."""

_Structure: TypeAlias = frozenset[tuple[str, int, str]]
"""Name, number of axes and dtype of arrays."""


@dataclass(frozen=True, kw_only=True)
class _Siblings:
    """Groups with the same arrays.

    Attributes:
        pattern: matches their names.
        parts: the groups.
        others: groups that the pattern matches, too, and that lack arrays of ``parts``.
        is_sure: whether each group is surely a segment.
    """

    pattern: str
    parts: list[FileLooks]
    others: list[FileLooks]
    is_sure: bool

    def _lacking(self, guess: Guess) -> tuple[list[FileLooks], list[str]]:
        """Return the other groups without all arrays of a guess, and the arrays that they lack."""
        settings = guess.settings or {}
        keys = [key for key in keys_in(settings.get("x_key"), settings.get("y_key")) if not is_attribute_key(key)]
        groups = [part for part in self.others if not set(keys) <= set(part.arrays)]
        return groups, [key for key in keys if any(key not in part.arrays for part in groups)]

    def dropping(self, guess: Guess) -> Settings:
        """Return ``segments`` for a guess: groups that lack an array are left out."""
        segments = (guess.settings or {}).get("segments")
        groups, _ = self._lacking(guess)
        if not groups:
            return {}
        return {"segments": {**(segments if isinstance(segments, dict) else {"groups": segments}), "missing": "drop"}}

    def why(self, guess: Guess) -> str:
        """Return the reason why the groups are segments, as sentences."""
        n, (groups, names) = len(self.parts) + len(self.others), self._lacking(guess)
        if not self.others:
            return f"{self.pattern!r}: {n:,} groups have the same arrays, so that each is a segment."
        why = f"{self.pattern!r}: {len(self.parts):,} of {n:,} groups have the same arrays, so that each is a segment."
        if groups:
            lack = f"{groups[0].group!r} lacks" if len(groups) == 1 else f"{len(groups):,} groups lack"
            why += f" {lack} {listing(names, 4)}: missing='drop' leaves out groups that lack an array."
        return why


def _siblings(files: Sequence[FileLooks]) -> _Siblings | None:
    """Return groups with one structure, as few levels down as possible.

    If groups side by side have no names in common, the groups in them are compared: ``S001/S001R01``, ``S002/S002R01``.
    """
    by_parent: dict[str, _Groups] = {}
    for at, file in enumerate(files):
        for name, look in file.arrays.items():
            start = 0
            while (end := name.find("/", start)) >= 0:
                groups = by_parent.setdefault(name[:start], {})
                groups.setdefault((at, name[start:end]), {})[name[end + 1 :]] = look
                start = end + 1
    for parent, groups in sorted(by_parent.items(), key=lambda item: (item[0].count("/"), item[0])):
        for _ in range(MAX_LEVELS):
            kinds = {at: _structure_of(looks) for at, looks in groups.items()}
            structures = [each for each in _structures([*kinds.values()]) if _holds_most(each, groups, kinds)]
            if structures:
                alike = [_alike(files, parent, groups, kinds, structure) for structure in structures]
                if (siblings := min(filter(None, alike), key=lambda each: len(each.others), default=None)) is not None:
                    return siblings
                break
            groups = {
                (at, f"{name}/{below}"): looks
                for name in dict.fromkeys(name for _, name in groups)
                for (at, below), looks in by_parent.get(f"{parent}{name}/", {}).items()
            }
    return None


def _structures(kinds: Sequence[_Structure]) -> list[_Structure]:
    """Return the arrays that groups may have in common: all of the most usual groups, and those of nearly all groups.

    Args:
        kinds: all arrays of each group.
    """
    usual, n_usual = Counter(kinds).most_common(1)[0] if kinds else (frozenset(), 0)
    counts = Counter(chain.from_iterable(kinds)) if n_usual < len(kinds) > 2 else {}
    common = frozenset(array for array, n in counts.items() if n >= NEARLY_ALL * len(kinds))
    return [*([usual] if n_usual > 1 else []), *([common] if common and common != usual else [])]


def _holds_most(structure: _Structure, groups: _Groups, kinds: Mapping[tuple[int, str], _Structure]) -> bool:
    """Return whether arrays have at least half of the values of the groups with these arrays."""
    names = {name for name, *_ in structure}
    alike = [looks for at, looks in groups.items() if structure <= kinds[at]]
    n_values = sum(look.n_values for looks in alike for look in looks.values())
    return 2 * sum(looks[name].n_values for looks in alike for name in names) >= n_values


def _structure_of(looks: Mapping[str, Look]) -> _Structure:
    return frozenset((name, len(look.shape), look.dtype) for name, look in looks.items())


def _alike(
    files: Sequence[FileLooks],
    parent: str,
    groups: _Groups,
    kinds: Mapping[tuple[int, str], _Structure],
    structure: _Structure,
) -> _Siblings | None:
    """Return the groups with the given arrays; None if they are splits, or fields of one row, or may be anything.

    Args:
        files: the arrays of each file.
        parent: the name in front of the groups' names.
        groups: all groups on some level below it.
        kinds: all arrays of each of them.
        structure: the given arrays.
    """
    alike_groups = {at: looks for at, looks in groups.items() if structure <= kinds[at]}
    names = {name for _, name in alike_groups}
    first_names = {name.partition("/")[0] for name in names}
    if len(first_names) < 2 or first_names <= set(SPLITS):
        return None
    n_levels = 1 + next(iter(names)).count("/")
    lengths = {
        at: frozenset(look.shape[0] for look in looks.values() if look.shape) for at, looks in alike_groups.items()
    }
    lengths_outside = [_lengths_outside(file, parent, n_levels, structure) for file in files]
    if all(lengths[at] & lengths_outside[at[0]] for at in alike_groups):
        return None  # an array outside has a value for each row: all are fields of one row
    pattern = _pattern_of(names, {name for _, name in groups} - names)
    others = {at: looks for at, looks in groups.items() if at not in alike_groups and _fits(at[1], pattern)}
    n_forms = len({re.sub(r"\d+", "0", name) for name in names})
    is_sure = n_forms == 1 or len(names) > 4
    if n_levels > 1:
        is_sure = 4 * n_forms <= len(names)
    if n_levels > 1 or others or sum(kinds[at] == structure for at in alike_groups) < 2:
        if not is_sure or len(others) >= len(alike_groups):
            return None
    elif len(set(lengths.values())) > 1:
        is_sure = True
    parts, rest = (
        [FileLooks(path=files[at].path, group=f"{parent}{name}", arrays=looks) for (at, name), looks in found.items()]
        for found in (alike_groups, others)
    )
    return _Siblings(pattern=parent + pattern, parts=parts, others=rest, is_sure=is_sure)


def _lengths_outside(file: FileLooks, parent: str, n_levels: int, structure: _Structure) -> set[int]:
    """Return the lengths of the arrays of a file outside of groups below another, and of groups like these."""
    inside: dict[str, list[tuple[str, int, str]]] = {}  # by the last part of the name
    for array in structure:
        inside.setdefault(array[0].rpartition("/")[2], []).append(array)
    return {
        look.shape[0]
        for name, look in file.arrays.items()
        if look.shape
        and not (name.startswith(parent) and name.count("/", len(parent)) >= n_levels)
        and not any(
            name.endswith(f"/{array}") and (len(look.shape), look.dtype) == (n_axes, dtype)
            for array, n_axes, dtype in inside.get(name.rpartition("/")[2], ())
        )
    }


def _pattern_of(names: Collection[str], others: Collection[str]) -> str:
    """Return the pattern that fits all ``names``, and as few of ``others`` as possible."""
    levels = []
    for level in zip(*(name.split("/") for name in names), strict=True):
        prefix = re.sub(r"\d+$", "", _common_prefix(level))
        suffix = re.sub(r"^\d+", "", _common_prefix([text[::-1] for text in level])[::-1])
        levels.append(dict.fromkeys(("*", f"{prefix}*", f"*{suffix}")))
    patterns = ("/".join(pattern) for pattern in product(*levels))
    return min(patterns, key=lambda pattern: sum(_fits(other, pattern) for other in others))


def _fits(name: str, pattern: str) -> bool:
    """Return whether a pattern fits a name with as many levels."""
    return _fits_levels(name.split("/"), pattern.split("/"))


def _fits_levels(levels: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether a pattern, with a ``*`` or none, fits each of the first levels of a name."""
    parts = [pattern.partition("*") for pattern in patterns]
    return all(
        level.startswith(prefix) and level.endswith(suffix) if star else level == prefix
        for level, (prefix, star, suffix) in zip(levels, parts, strict=False)
    )


def _common_prefix(names: Collection[str]) -> str:
    first, last = min(names), max(names)
    return first[: next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def _groups_in_groups(siblings: _Siblings) -> _Siblings | None:
    """Return the groups with one structure inside groups; None if they have no array in common."""
    found = [nested for part in siblings.parts if (nested := _siblings([part])) is not None]
    depths = {group.group.count("/") for nested in found for group in nested.parts}
    structure = frozenset.intersection(*(_structure_of(group.arrays) for nested in found for group in nested.parts))
    if len(depths) != 1 or not structure:
        return None
    (depth,) = depths
    alike: list[FileLooks] = []
    rest: list[FileLooks] = []
    for part in (*siblings.parts, *siblings.others):
        for group in _groups_in(part, depth + 1):
            (alike if structure <= _structure_of(group.arrays) else rest).append(group)
    names = {_last_levels(group, depth + 1) for group in alike}
    pattern = _pattern_of(names, {_last_levels(group, depth + 1) for group in rest} - names)
    others = [group for group in rest if _fits(_last_levels(group, depth + 1), pattern)]
    if len(others) >= len(alike):
        return None
    is_sure = siblings.is_sure and all(nested.is_sure for nested in found)
    return _Siblings(pattern=f"{siblings.pattern}/{pattern}", parts=alike, others=others, is_sure=is_sure)


def _groups_in(part: FileLooks, n_levels: int) -> list[FileLooks]:
    """Return the groups so many levels below a group."""
    groups: dict[str, dict[str, Look]] = {}
    for name, look in part.arrays.items():
        levels = name.split("/", n_levels)
        if len(levels) > n_levels:
            groups.setdefault("/".join(levels[:-1]), {})[levels[-1]] = look
    return [replace(part, group=f"{part.group}/{name}", arrays=arrays) for name, arrays in groups.items()]


def _last_levels(part: FileLooks, n_levels: int) -> str:
    """Return the last levels of a group's name."""
    return "/".join(part.group.split("/")[-n_levels:])


def _why_two_levels(pattern: str, part: FileLooks) -> str:
    """Return a sentence about groups nested in groups that no pattern fits."""
    return (
        f"Groups in groups have the same arrays ({pattern!r}, and below each such as {part.group!r}), but no pattern "
        f"matches all names. Pass a pattern with a '*' for each level, such as segments={pattern + '/*'!r}, or write "
        "each group to a file."
    )


def _lists_of_splits(file: FileLooks, parts: Sequence[FileLooks], reader: Reader) -> Settings:
    """Return arrays that list the groups of each split, for example ``mask/train``."""
    group_names = {part.group.rpartition("/")[2] for part in parts} | {part.group for part in parts}
    lists: dict[str, str] = {}
    for name, look in file.arrays.items():
        split = SPLITS.get(name.rpartition("/")[2])
        if split and len(look.shape) == 1 and look.dtype.startswith("text"):
            values = reader.values(name)
            texts = [v.decode() if isinstance(v, bytes) else str(v) for v in ([] if values is None else values)]
            if texts and {text.strip("/") for text in texts} <= group_names:
                lists.setdefault(split, name)
    return {"split": {"key": lists}} if "train" in lists else {}


def _images(files: Sequence[FileLooks]) -> list[Guess]:
    """Return a guess for the only array of encoded images; none without images."""
    arrays = files[0].arrays
    looks = {**arrays, **files[0].of_bytes}
    candidates = [
        *(name for name, look in files[0].of_bytes.items() if look.shape),
        *(name for name, look in arrays.items() if _may_hold_bytes(look)),
    ]
    rows_of_arrays = {name: rows for name in candidates[:MAX_READ] if (rows := _first(files[0].path, name))}
    if len(rows_of_arrays) != 1:
        return []
    ((name, rows),) = rows_of_arrays.items()
    n_rows = looks[name].shape[0]
    columns = [column for column, look in arrays.items() if look.shape == (n_rows,) and column != name]
    numbers = [column for column in columns if arrays[column].dtype.startswith(("int", "uint", "float"))]
    targets = [column for column in numbers if words_in(column) & TARGETS]
    settings: Settings = {"x_key": name, **({"y_key": targets[0]} if len(targets) == 1 else {})}
    settings["decode"] = {name: "image"}
    if len(_shapes(rows)) > 1:
        settings["collate_fn"] = "list"
    if n_rows >= MIN_ROWS:
        settings["split"] = 0.1
    kind = "JPEG" if rows[0].startswith(BEGINNINGS[0]) else "PNG"
    return [Guess(settings=settings, why=f"{name!r} holds {kind} files, one per row, which are decoded to images.")]


def _complex_rows(file: FileLooks) -> list[Guess]:
    """Return a guess for the largest array if it is a table of the parts of complex numbers."""
    name = max(file.complexes, key=lambda name: file.complexes[name].n_values, default=None)
    if name is None or any(look.n_values > 2 * file.complexes[name].n_values for look in file.arrays.values()):
        return []
    n_rows = file.complexes[name].shape[0]
    targets = [
        column
        for column, look in file.arrays.items()
        if look.shape in ((n_rows,), (n_rows, 1)) and look.dtype[:4] != "text" and words_in(column) & TARGETS
    ]
    members = next(m for m in COMPLEX_MEMBERS if file.complexes[name].dtype.endswith(", ".join(m)))
    settings: Settings = {"x_key": {name.rpartition("/")[2]: [f"{name}/{member}" for member in members]}}
    why = f"{name!r} is a table of the parts of complex numbers, which are stacked on a new last axis."
    if len(targets) == 1:
        settings["y_key"] = targets[0]
        why += f" {targets[0]!r} is a target by its name."
        if len(file.arrays[targets[0]].shape) > 1:
            settings["select"] = {targets[0]: {1: 0}}
    if n_rows >= MIN_ROWS:
        settings["split"] = 0.1
    return [Guess(settings=settings, why=why)]


def _named_images(file: FileLooks) -> list[Guess]:
    """Return a guess for images that are opaque scalars, each with its own name."""
    names = [name for name, look in file.of_bytes.items() if not look.shape]
    groups = {name.rpartition("/")[0] for name in names}
    if len(names) < MIN_NAMES or len(groups) > 1 or any(name.rpartition("/")[0] in groups for name in file.arrays):
        return []
    rows = [row for name in names[:N_DECODED] for row in _first(file.path, name)]
    if not rows:
        return []
    group = next(iter(groups))
    pattern = f"{group}/*" if group else "*"
    settings: Settings = {"x_key": {"image": pattern}, "decode": {"image": "image"}, "sample": "segment"}
    if len(_shapes(rows)) > 1:
        settings["collate_fn"] = "list"
    if len(names) >= MIN_ROWS:
        settings["split"] = 0.1
    return [Guess(settings=settings, why=f"{len(names):,} opaque values are images, each with its own name.")]


def _lists(files: Sequence[FileLooks]) -> list[Guess]:
    """Return a guess for rows that are lists of numbers; none if another array has several numbers in a row."""
    arrays = files[0].arrays
    lists = {name: look for name, look in files[0].of_bytes.items() if len(look.shape) == 1 and "list" in look.dtype}
    if not lists:
        return []
    n_rows = max(look.shape[0] for look in lists.values())
    inputs = [name for name, look in lists.items() if look.shape[0] == n_rows]
    if not n_rows or any(len(look.shape) > 1 for look in arrays.values()):
        return []
    numbers = [name for name, look in arrays.items() if look.shape == (n_rows,) and look.dtype[:4] != "text"]
    targets = [name for name in numbers if words_in(name) & TARGETS] or (numbers if len(numbers) == 1 else [])
    settings: Settings = {"x_key": inputs[0] if len(inputs) == 1 else inputs, "collate_fn": "pad"}
    if len(targets) == 1:
        settings["y_key"] = targets[0]
    if n_rows >= MIN_ROWS:
        settings["split"] = 0.1
    return [Guess(settings=settings, why=f"Rows of {listing(inputs)} are lists of several lengths, padded in a batch.")]


def _may_hold_bytes(look: Look) -> bool:
    return (look.dtype == "uint8" and len(look.shape) == 2) or (look.dtype[:4] == "text" and len(look.shape) == 1)


def _first(path: str, name: str) -> list[bytes]:
    """Return the first rows of an array as bytes; none if the first row does not begin like an image."""
    try:
        with open_h5(path) as file:
            try:
                layout = layout_of(find_array(file, name), path, name)  # opens no other file
            except ScalarError:
                value = bytes(file[name][()])
                return [value] if value.startswith(BEGINNINGS) else []
        if layout.dtype.kind == "S" and not layout.row_shape:  # not text
            n_bytes = np.dtype(f"V{layout.dtype.itemsize}")
            layout = layout.with_changes(stored=n_bytes, dtype=n_bytes)
        is_padded = layout.dtype == np.uint8 and len(layout.row_shape) == 1
        if not (is_padded or (not layout.row_shape and (is_bytes(layout.dtype) or layout.dtype.kind == "V"))):
            return []
        reader = open_reader(layout, OpenOptions())
        rows = [bytes(bytes_of(row)) for row in reader.read(np.arange(min(1, layout.n_rows)))]
        if rows and rows[0].startswith(BEGINNINGS):
            return rows + [bytes(bytes_of(row)) for row in reader.read(np.arange(1, min(N_DECODED, layout.n_rows)))]
    except (H5Error, *FAULTS):  # checking the file reports it
        pass
    return []


def _shapes(rows: Sequence[bytes]) -> set[tuple[int, ...]]:
    """Return the shapes of images; none if the images cannot be decoded on this machine."""
    with suppress(Exception):  # trying the settings reports why
        return {Image().row(row).shape for row in rows}
    return set()


def _cells_of_references(file: FileLooks, reader: Reader) -> list[Guess]:
    """Return a guess for the arrays that cells of MATLAB refer to, each a segment."""
    holders = [name for name in file.references if reader.holds_arrays(name)]
    cells = {name: looks for name in holders if (looks := reader.cells(name))}
    if not cells:
        return []
    main = max(cells, key=lambda name: sum(look.n_values for look in cells[name] if look.dtype != "text"))
    n = len(cells[main])
    other_arrays = file.arrays
    if any(look.n_values > sum(cell.n_values for cell in cells[main]) for look in other_arrays.values()):
        return []
    cells = {name: looks for name in file.references if len(looks := cells.get(name) or reader.cells(name)) == n}
    looks_of_segments = [{name: looks[at] for name, looks in cells.items()} for at in range(n)]
    segments = [
        FileLooks(path=file.path, group=f"{main}[{at}]", arrays=segment_looks)
        for at, segment_looks in enumerate(looks_of_segments)
    ]
    parts = AlikeParts(segments, reader, {})
    shapes = [look.shape for look in cells[main]]
    if {len(shape) for shape in shapes} == {2} and len({a for a, _ in shapes}) == 1 < len({b for _, b in shapes}):
        parts.step_axis, parts.axis_is_sure = 1, False
    values = [name for name, looks in cells.items() if looks[0].dtype == "text"]
    values += [name for name, look in other_arrays.items() if look.n_values == n]
    target = [name for name in values if words_in(name) & TARGETS]
    guesses = parts.guesses()
    segment_guesses = [guess for guess in guesses if (guess.settings or {}).get("sample") == "segment"]
    if len(target) == 1 and segment_guesses:
        guesses = [
            replace(guess, settings={**(guess.settings or {}), "y_key": target[0]}, is_sure=True)
            for guess in segment_guesses
        ]
    why = f"{main!r} refers to {n:,} arrays, each of which is a segment."
    return [replace(guess, why=f"{why} {guess.why}") for guess in guesses]
