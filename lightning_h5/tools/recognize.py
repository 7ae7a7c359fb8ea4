"""How files store samples: which steps belong together, from names, shapes and dtypes by simple rules, and why.

Every rule returns arguments of a data module; whether these fit the files is tried afterwards (see ``sample_advice``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import listing
from ..hdf5 import matrices_among, words_in
from .recognize_parts import (
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
)
from .recognize_structures import (
    cells_of_references,
    groups_in_groups,
    images,
    lists,
    lists_of_splits,
    named_images,
    siblings,
    sparse_rows,
    why_two_levels,
)

__all__ = ["recognize"]

FLAG = re.compile(
    r"(is_)?(episode_)?(terminal|timeout|done|truncation|termination|truncated|terminated|last|end)s?", re.IGNORECASE
)
LENGTHS, OFFSETS = (
    {"length", "len", "count", "size", "n", "num"},
    {"indptr", "ptr", "offset", "start", "begin", "first"},
)
EPISODES = {"episode", "trajectory", "traj", "demo", "sequence", "rollout"}
WELL = re.compile(r"t\d_fields/")
MAX_NESTED = 100  # groups that are searched for groups of their own


def recognize(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Return ways to read files, the likeliest first; none if an index along axis 0 of each array is a sample.

    Args:
        files: what is in them; the rules take those of the first one for granted.
        reader: see there.
    """
    if guesses := sparse_rows(files) or images(files) or named_images(files[0]) or lists(files):
        return guesses
    if guesses := cells_of_references(files[0], reader):
        return guesses
    files = [replace(file, arrays=_without_tables(file.arrays)) for file in files]
    if not files[0].arrays:
        return []
    if (found := siblings(files)) is not None:
        pattern, parts, is_sure = found
        while any(siblings([part]) is not None for part in parts[:MAX_NESTED]):
            nested = groups_in_groups(parts)
            if nested is None:
                return [Guess(settings=None, why=why_two_levels(pattern, parts[0]), is_sure=False)]
            pattern, parts, is_sure = f"{pattern}/{nested[0]}", nested[1], is_sure and nested[2]
        guesses = AlikeParts(parts, reader, {"groups": pattern}).guesses()
        split = lists_of_splits(files[0], parts, reader)
        why = f"{pattern!r}: {len(parts):,} groups have the same arrays, so that each is a segment."
        return [
            replace(
                one,
                settings=(one.settings or {}) | split,
                why=f"{why} {one.why}".strip(),
                is_sure=one.is_sure and is_sure,
            )
            for one in (guesses if is_sure else guesses[:1])
        ] + ([] if is_sure else [Guess(settings={}, why="An index along axis 0 of all arrays is a sample.")])
    for rule in (_cut_rows, _arrays_alike, _one_recording, _trajectories, _joined_files, _last_axis):
        if guesses := rule(files, reader):
            return guesses
    of_files = AlikeParts(files, reader, {})
    if len(files) == 1 and of_files.shapes and of_files.are_volumes:
        return [*of_files.guesses()[:1], Guess(settings={}, why="An index along axis 0 of all arrays is a sample.")]
    return of_files.guesses() if of_files.are_segments else []


def _arrays_alike(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Arrays side by side that differ in their names and lengths are a sample each."""
    arrays = {name: look for name, look in files[0].arrays.items() if look.shape and look.dtype[:4] != "text"}
    groups = {name.rpartition("/")[0] for name in arrays}
    if len(groups) != 1 or len(arrays) < 2 or len(arrays) != len(files[0].arrays):
        return []
    patterns: dict[str, list[str]] = {}
    for name in arrays:
        patterns.setdefault(re.sub(r"\d+", "*", name, count=1) if re.search(r"\d", name) else name, []).append(name)
    numbered = all("*" in pattern and pattern.count("*") == 1 and len(each) > 1 for pattern, each in patterns.items())
    kinds = {(len(look.shape), look.dtype) for look in arrays.values()}
    group = next(iter(groups))
    if len(kinds) == 1 and not (numbered and len(patterns) == 2):
        of_sample = {"*" if not group else f"{group}/*": list(arrays)}
    elif numbered and len(patterns) == 2 and len({len(each) for each in patterns.values()}) == 1:
        of_sample = dict(sorted(patterns.items(), key=lambda item: -arrays[item[1][0]].n_values))
    else:
        return []
    looks = [arrays[name] for name in next(iter(of_sample.values()))]
    lengths, rows = {look.shape[0] for look in looks}, {look.shape[1:] for look in looks}
    if len(looks) < 3 and not numbered:
        return []
    if len(lengths) == 1 and not (numbered or len(looks) > 8):
        return []
    keys = dict(zip(("x_key", "y_key"), of_sample, strict=False))
    many = f"{len(looks):,} arrays such as {listing(list(of_sample)[:0] or list(arrays)[:2])} are of one kind"
    more = f"{many} and have {'several lengths' if len(lengths) > 1 else 'one length'}: each is a sample."
    settings = {**keys, "collate_fn": "list" if len(rows) > 1 else "pad"}
    sure = Guess(settings=settings | ({"split": 0.1} if len(looks) >= 10 else {}), why=more)
    if len(lengths) > 1:
        return [sure]
    return [replace(sure, is_sure=False), Guess(settings={}, why="Index i of all arrays is a sample.")]


def _cut_rows(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Rows of all segments in one array: flags, lengths, first rows or numbers of segments say where these end."""
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
        whole = [name for name in columns if arrays[name].dtype.startswith(("int", "uint")) and n > 1]
        for name in whole:
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
    inside = {name: look for name, look in arrays.items() if look.shape[0] == n and name not in cuts}
    if n_segments > 1:
        inside |= {name: look for name, look in arrays.items() if look.shape[0] == n_segments and name not in cuts}
    parts = AlikeParts([FileLooks(path=file.path, arrays=inside) for file in files], reader, segments)
    parts.attributes, parts.scalars = {}, []
    return [replace(one, why=f"{why} {one.why}") for one in parts.guesses()[:1]]


def _look_like_flags(values: Any) -> bool:
    return values is not None and bool(np.isin(values, (0, 1)).all() and 0 < np.count_nonzero(values) < len(values))


def _one_recording(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """One array of shape (channel, time) alone in a file."""
    arrays = {name: look for name, look in files[0].arrays.items() if look.shape and look.dtype[:4] != "text"}
    ((name, look),) = arrays.items() if len(arrays) == len(files) == 1 else ((None, Look((), "")),)
    if name is None or len(look.shape) != 2 or LONGER * look.shape[0] > look.shape[1] or look.shape[0] > MAX_CHANNELS:
        return []
    recording = Guess(
        settings={"x_key": name, "segments": {"step_axis": 1}, "window": min(MAX_STEPS, look.shape[1])},
        why=f"{name!r} has the shape {look.shape}, and axis 1 may be time. A sample is a window of steps.",
    )
    if words_in(name) & SERIES:
        return [recording]
    return [Guess(settings={}, why="An index along axis 0 is a sample.", is_sure=False), recording]


def _trajectories(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Arrays of shape (trajectory, step, ...): by the names of The Well, or a coordinate of time along axis 1."""
    arrays = {name: look for name, look in files[0].arrays.items() if look.shape and look.dtype[:4] != "text"}
    deep = [name for name, look in arrays.items() if len(look.shape) > 2]
    is_well = bool([name for name in deep if WELL.match(name)])
    deep = [name for name in deep if WELL.match(name)] if is_well else deep
    if not deep:
        return []
    main = (
        min(deep, key=lambda name: (-arrays[name].n_values // 4, name))
        if not is_well
        else min(deep, key=lambda name: (name[:2], -arrays[name].n_values))
    )
    shape = arrays[main].shape
    times = [name for name, look in arrays.items() if words_in(name) & TIMES and len(look.shape) == 1]
    lengths = [arrays[name].shape[0] for name in times]
    fits = [name for name, n in zip(times, lengths, strict=True) if n - shape[1] in (0, 1)]
    if not is_well and (not fits or shape[0] in lengths):
        return []
    fields = [name for name in deep if arrays[name].shape[:2] == shape[:2]]
    space = shape[2:]
    constants = [name for name in arrays if is_well and WELL.match(name) and arrays[name].shape[: len(space)] == space]
    constants = [name for name in constants if name not in fields and len(space)]
    names = {name.rpartition("/")[2]: name for name in (*fields, *constants)}
    here = {key: name for name, key in names.items()}
    segments: Settings = {"axis": 0, "step_axis": 1}
    if constants:
        segments["axis"] = {here[key]: 0 if key in fields else None for key in names.values()}
        segments["constants"] = [here[key] for key in constants]
    evidence = "the names of The Well" if is_well else f"{fits[0]!r}, which has as many values as axis 1"
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
    for name in [name for name, look in arrays.items() if words_in(name) & TIMES and len(look.shape) == 1]:
        n = arrays[name].shape[0]
        fields = [other for other, look in arrays.items() if look.shape[0] == n and len(look.shape) > 1]
        values = reader.values(name)
        if not fields or values is None or len(values) < 3 or values.dtype.kind not in "iuf":
            continue
        steps = np.diff(values.astype(np.float64))
        usual = float(np.median(steps))
        if not usual > 0 or np.mean(abs(steps - usual) <= usual / 1000) < 0.5:
            continue
        x_key: Any = {key.rpartition("/")[2]: key for key in fields} if len(fields) > 1 else fields[0]
        why = (
            f"{name!r} advances by {usual:g} from row to row, so that rows are steps in time, also from file to file. "
            "A sample is two steps that follow each other."
        )
        return [Guess(settings={"x_key": x_key, "segments": {"join": name}, "window": [0, 2]}, why=why)]
    return []


def _last_axis(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Arrays that share their last axis and not the first, as MATLAB writes them."""
    arrays = {name: look for name, look in files[0].arrays.items() if look.shape and look.dtype[:4] != "text"}
    main = max(arrays, key=lambda name: (len(arrays[name].shape), arrays[name].n_values), default=None)
    if main is None or len(arrays[main].shape) < 2:
        return []
    n = arrays[main].shape[-1]
    same = [name for name, look in arrays.items() if look.shape[-1] == n and len(look.shape) > 1]
    firsts = [look.shape[0] for look in arrays.values() if len(look.shape) > 1]
    is_longest = all(n >= max(look.shape) for look in arrays.values())
    groups = {name.rpartition("/")[0] for name in same}
    if len(same) < 2 or len(set(firsts)) < len(firsts) or n in firsts or not is_longest or len(groups) > 1:
        return []
    names = {name.rpartition("/")[2]: name for name in same}
    target = [name for name in same if words_in(name) & TARGETS and name != main]
    if len(target) == 1 and len(same) == 2:
        keys: Settings = {"x_key": main, "y_key": target[0]}
    else:
        keys = {"x_key": names}
    why = (
        f"{listing(same)} have {n:,} along their last axis and different lengths along axis 0, as MATLAB stores "
        "samples: an index of the last axis is a sample."
    )
    return [Guess(settings={**keys, "segments": {"step_axis": -1}, "sample": "row"}, why=why)]


def _without_tables(arrays: Mapping[str, Look]) -> dict[str, Look]:
    """Return arrays without sparse matrices and categories, whose groups have one structure and are no segments."""
    groups = {name.rpartition("/")[0] for name in arrays}
    held = {*matrices_among(arrays), *(group for group in groups if group and f"{group}/codes" in arrays)}
    return {name: look for name, look in arrays.items() if name.rpartition("/")[0] not in held}
