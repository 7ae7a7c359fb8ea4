"""Find the files of a path argument, and their fields: named arrays, or all arrays with the same number of rows."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import numpy as np

from ..errors import H5FileError, H5KeyError, H5ValueError, listing
from ..hdf5 import (
    OpenOptions,
    StackedKeys,
    expand_paths,
    kind_of,
    list_data,
    numpy_dtype,
    segments_hint,
    shape_of,
    stacked_keys,
    translate_h5py_errors,
    without_slashes,
)
from ..options import StagingOptions
from ..types import Paths
from .catalog import Catalog
from .compatibility import Skip, each_readable

__all__ = [
    "SKIP_THEM",
    "TARGET",
    "FieldMap",
    "bad_files",
    "checked_names",
    "expand_those_there",
    "files_to_read",
    "hashable",
    "keys_of",
    "names_to_load",
    "paths_of",
    "skip_into",
    "stacks_of",
]

TARGET = "target"
"""The field that has labels, if nothing else is named."""

_log = logging.getLogger(__name__)

FieldMap = Mapping[str, Any]
"""For a field's name here its array in the files; or ``{"key": ..., "layout": "NTC"}`` for ``target``."""

SKIP_THEM = "Repair them, or pass on_bad_file='skip' to skip them, each with a warning."


def files_to_read(catalog: Catalog, paths: Paths, bad: dict[str, str] | None) -> list[str]:
    """Return the files that a path argument names.

    Args:
        catalog: catalog of the files.
        paths: the argument.
        bad: collects missing files with the reason; None raises their errors.
    """
    if bad is None:
        return list(catalog.files(paths, "paths"))
    return expand_those_there(paths, partial(_leave_out, bad), staging=catalog.staging)


def names_to_load(
    catalog: Catalog,
    files: Sequence[str],
    options: OpenOptions,
    fields: Sequence[str] | None,
    keys: Mapping[str, str],
    filter_names: Sequence[str],
    bad: dict[str, str] | None,
    argument: str = "load_fields",
) -> list[str]:
    """Return the fields to load, by their names here.

    Args:
        catalog: opens the files.
        files: the files.
        options: how they are opened.
        fields: the fields that the user named; None for all.
        keys: arrays that have another name here.
        filter_names: further arrays that filters name.
        bad: see ``files_to_read``.
        argument: the argument that names fields, for errors.

    Raises:
        H5Error: see ``fields_of_files``; or names do not fit the arrays.
    """
    if fields is not None:
        return checked_names(fields)
    of_filters = {keys.get(name, name).strip("/") for name in filter_names}
    named_arrays = {*keys.values(), *of_filters}
    arrays = fields_of_files(catalog, files, options, skip_into(bad), SKIP_THEM, named_arrays, argument=argument)
    name_of = {key: name for name, key in keys.items()}
    stripped = [array.strip("/") for array in arrays]
    names = [name_of.get(key, array) for key, array in zip(stripped, arrays, strict=True)]
    if absent := [key for key in keys.values() if key not in {*stripped, *of_filters}]:
        raise H5KeyError(f"field_map names {listing(absent)}; the fields of {files[0]!r} are {listing(arrays)}.")
    if twice := [name for name in keys if names.count(name) > 1]:
        raise H5ValueError(
            f"field_map renames other arrays to {listing(twice)}, but {files[0]!r} has arrays of these names. Name the "
            f"fields to load ({argument})."
        )
    return names


def bad_files(on_bad_file: str) -> dict[str, str] | None:
    """Return a mapping for files that are left out, with the reason; None if they raise errors."""
    if on_bad_file not in ("raise", "skip"):
        raise H5ValueError(f"on_bad_file={on_bad_file!r} was given. Pass 'raise' or 'skip'.")
    return {} if on_bad_file == "skip" else None


def skip_into(bad: dict[str, str] | None) -> Skip | None:
    """Return a function that logs a file that is left out, and records the reason; None if errors are raised."""
    return None if bad is None else partial(_leave_out, bad)


def _leave_out(bad: dict[str, str], path: str, error: H5FileError) -> None:
    if path not in bad:
        _log.warning("left out %s: %s", path, error)
    bad[path] = str(error)


def fields_of_files(
    catalog: Catalog,
    paths: Sequence[str],
    options: OpenOptions,
    skip: Skip | None,
    advice: str,
    named: Collection[str] = (),
    argument: str = "load_fields",
) -> list[str]:
    """Return the names of arrays of numbers and text that share axis 0; the same in all files.

    If a file has arrays of different lengths, the most frequent length counts. Arrays that may be samples of their own
    instead of fields of one row are refused, since equal lengths may be chance: arrays of one name in several groups
    (episodes, subjects), arrays that are all numbered, and arrays of one group that are all alike (a data set for each
    name). Reads metadata only.

    Args:
        catalog: opens the files.
        paths: the files.
        options: how they are opened.
        skip: called with missing or broken files, which are left out; None raises their errors.
        advice: advice for training without broken files, for their errors.
        named: arrays that other arguments name, such as filters; they are fields.
        argument: the argument that names fields, for errors.

    Raises:
        H5FileError: a file is missing or broken, or all of them are.
        H5KeyError: a file leaves a doubt about which arrays are meant, or has none.
        H5ValueError: files have different arrays.
    """
    name = f"fields {sorted(named)}"

    def look(path: str) -> list[str]:
        return catalog.search(path, options, name, partial(_search, path, named, argument))

    readable = each_readable(paths, look, skip, advice)
    first_path, fields = next(readable)  # raises an error if no file is readable
    for path, names in readable:
        only_first, only_second = sorted(set(fields) - set(names)), sorted(set(names) - set(fields))
        if only_first or only_second:
            raise H5ValueError(
                f"{first_path!r} and {path!r} have different fields: {listing(only_first)} only in the first, "
                f"{listing(only_second)} only in the second. Name those to load ({argument}), or leave one of the "
                "files out."
            )
    return fields


def _search(path: str, named: Collection[str], argument: str, file: Any) -> tuple[list[str], list[str]]:
    """Return the fields of an open file, and the arrays to open: the fields and the named arrays."""
    by_rows: dict[int, list[str]] = defaultdict(list)
    left_out = []
    looks: dict[str, _Look] = {}
    with translate_h5py_errors(path, "what is"):
        fields, others = list_data(file)
        if scales := [name for name in others if name not in named]:
            _log.info("%s: %s are left out; name them to load them", path, listing(scales))
        for name in [*fields, *(name for name in others if name in named)]:
            array = file[name]
            dtype, shape = numpy_dtype(array), shape_of(array.id)
            if dtype is not None and shape and kind_of(dtype) in ("number", "text"):
                by_rows[shape[0]].append(name)
                looks[name] = name.rpartition("/")[0], dtype, shape[1:]
            else:
                left_out.append(name)
    most = max(map(len, by_rows.values()), default=0)
    longest = [n_rows for n_rows, names in by_rows.items() if len(names) == most]
    if len(longest) != 1:
        lengths = "; ".join(f"{n_rows} rows: {listing(names)}" for n_rows, names in by_rows.items())
        raise H5KeyError(
            f"{argument} was not given, and it is unclear what a row of {path!r} is: it has "
            f"{lengths or 'no arrays of numbers or text'}. Name the arrays to load, as {argument}."
            f"{segments_hint(looks)}"
        )
    _refuse_groups(path, by_rows[longest[0]], looks, argument)
    if not any(name in named for name in by_rows[longest[0]]):
        _refuse_alike(path, by_rows[longest[0]], looks, argument)
    left_out += [name for n_rows, names in by_rows.items() if n_rows != longest[0] for name in names]
    if left_out:
        _log.warning(
            "%s: %s do not have one entry for each of its %s rows and are left out", path, listing(left_out), longest[0]
        )
    return by_rows[longest[0]], [*by_rows[longest[0]], *named]


_Look = tuple[str, np.dtype[Any], tuple[int, ...]]
"""An array's group, its dtype and the shape of its rows."""


def _refuse_groups(path: str, fields: Sequence[str], looks: Mapping[str, _Look], argument: str) -> None:
    """Refuse arrays of one name in several groups of one level, since each group may have rows of its own.

    Codes of categories are columns of one table (AnnData, pandas), each in a group of its own.
    """
    by_name: dict[tuple[int, str], list[str]] = defaultdict(list)
    for field in fields:
        group, _, name = field.rpartition("/")
        if name != "codes" or f"{group}/categories" not in looks:
            by_name[field.count("/"), name].append(field)
    same = max(by_name.values(), key=len, default=[])
    if len(same) <= 1:
        return
    parts = [name.split("/") for name in same]
    level = next(at for at, (a, b) in enumerate(zip(*parts[:2], strict=True)) if a != b)
    first, *others = ("/".join([*names[: level + 1], ""]) for names in parts)
    belong = [field for field in fields if field.startswith(first) or not field.startswith(tuple(others))]
    raise H5KeyError(
        f"{argument} was not given, and {path!r} has arrays of the same name in several groups: {listing(same)}. Each "
        "group may have its own rows, even if all have the same number. If so, name the arrays that belong to one "
        f"group, such as {argument}={belong!r}, or pass segments='*' and names relative to a group, so that each "
        "group has samples of its own; otherwise name all arrays that are fields of one row."
    )


def _refuse_alike(path: str, fields: Sequence[str], looks: Mapping[str, _Look], argument: str) -> None:
    """Refuse arrays that may be a sample each: they differ in their names alone.

    An array that is the only field of its dtype and shape of a row is no such sample.
    """
    kinds = Counter(looks[field][1:] for field in fields)
    for field in fields:
        others = [other for other, look in looks.items() if look == looks[field]]
        longer = [other for other in others if other not in fields]
        has_axes = len(looks[field][2]) > 0
        is_all = len(fields) > 1 and set(fields) <= set(others)
        if kinds[looks[field][1:]] > 1 and ((longer and has_axes) or (is_all and (longer or has_axes))):
            raise H5KeyError(
                f"{argument} was not given, and {path!r} has arrays of one dtype and one shape of a row in one group: "
                f"{listing(others)}{', of different lengths' if longer else ''}. Each may be a sample instead of a "
                f"field. If they are fields, name those to load, such as {argument}={fields[:4]!r}; otherwise make a "
                "data set for each array."
            )
    numbered: dict[Any, list[str]] = defaultdict(list)
    for field in fields:
        numbered[re.sub(r"\d+", "0", field), looks[field][1:]].append(field)
    if min(map(len, numbered.values())) > 1:
        first = [names[0] for names in numbered.values()]
        raise H5KeyError(
            f"{argument} was not given, and all arrays of {path!r} are numbered: {listing(fields)}. Each number may "
            "have its own rows, even if all have the same number of rows. If so, name the arrays of one number, such "
            f"as {argument}={first!r}, and make a data set for each number; otherwise name all arrays that are fields "
            "of one row."
        )


def expand_those_there(
    paths: Paths, skip: Skip, name: str = "paths", staging: StagingOptions | None = None
) -> list[str]:
    """Return the files that a path argument names, without those that are missing.

    Args:
        paths: see ``expand_paths``.
        skip: called with each that is left out, and its error.
        name: the argument's name, for errors.
        staging: how objects of stores are read.

    Raises:
        H5FileError: none of them exists.
    """
    patterns: list[Any] = list(paths) if isinstance(paths, list | tuple) else [paths]
    files: list[str] = []
    for pattern in patterns:
        try:
            files += expand_paths(pattern, name, staging)
        except H5FileError as error:
            skip(str(pattern), error)
    if not files:
        raise H5FileError(
            f"{name}={listing(map(str, patterns))}: none of them can be read. See the error that was logged for each."
        )
    return list(expand_paths(files, name, staging))


def stacks_of(field_map: FieldMap | None, names: Sequence[str]) -> list[StackedKeys | None]:
    """Return for each name what it stacks; None for a single array."""
    entries = field_map or {}
    return [stacked_keys(entries.get(name), f"field_map[{name!r}]") for name in names]


def paths_of(field_map: FieldMap | None, names: Sequence[str]) -> list[Any]:
    """Return for each name the other files that have its array; None for those of the data."""
    entries = [(field_map or {}).get(name) for name in names]
    return [hashable(entry.get("path")) if isinstance(entry, Mapping) else None for entry in entries]


def keys_of(field_map: FieldMap | None) -> tuple[dict[str, str], str | None]:
    """Return the array of each name in a field map, and the axes of the target if they are given.

    Raises:
        H5ValueError: a name has no array, or one that another name has.
    """
    keys: dict[str, str] = {}
    layout = None
    stacked = []
    for name, value in (field_map or {}).items():
        stacks = stacked_keys(value, f"field_map[{name!r}]")
        array = value if stacks is None else stacks.key
        stacked += [] if stacks is None else [array]
        entry = {"key": array} if isinstance(array, str) else dict(array) if isinstance(array, Mapping) else {}
        if not isinstance(entry.get("key", name), str) or not entry or set(entry) - {"key", "layout", "path"}:
            raise H5ValueError(
                f"field_map[{name!r}]={array!r} is not an array. Pass its name in the files, or "
                "{'key': its name, 'layout': 'NTC'} for a target."
            )
        if "layout" in entry and name != TARGET:
            raise H5ValueError(f"field_map[{name!r}] has a layout, which only a target can have.")
        keys[name] = without_slashes(entry.get("key", name))
        layout = entry.get("layout", layout)
    twice = [key for key in keys.values() if list(keys.values()).count(key) > 1 and key not in stacked]
    if twice:
        raise H5ValueError(f"field_map gives {listing(dict.fromkeys(twice))} several names. Give each array one.")
    return keys, layout


def checked_names(names: Any, argument: str = "load_fields") -> list[str]:
    """Return the fields to load, each once.

    Args:
        names: what was given.
        argument: the argument that it was given as, for errors.

    Raises:
        H5ValueError: these are no names, or one comes twice.
    """
    if isinstance(names, AbstractSet):
        raise H5ValueError(f"{argument}={names!r} is a set, which has no order. Pass a list of names.")
    fields = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else []
    if not fields or not all(isinstance(name, str) and name.strip("/") for name in fields):
        raise H5ValueError(f"{argument}={names!r} names no field. Pass a list of names, or None for all fields.")
    if len(set(fields)) < len(fields):
        raise H5ValueError(f"{argument}={names!r} names a field twice. A sample has each once.")
    return fields


def hashable(paths: Any) -> Any:
    """Return paths, one or several, as they can be compared."""
    return tuple(map(str, paths)) if isinstance(paths, list | tuple) else paths
