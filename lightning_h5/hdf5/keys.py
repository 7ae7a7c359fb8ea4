"""Key arguments: the arrays that they name, ``{split}`` in keys, and inferred keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import H5KeyError, H5ValueError
from ..types import Keys
from .contents import is_text, list_data, shape_of
from .dtypes import dtype_text, kind_of, numpy_dtype
from .open import open_h5, translate_h5py_errors
from .structures import matrices_among

__all__ = [
    "GROUP_WORDS",
    "FieldNames",
    "StackedKeys",
    "arrays_in",
    "field_names",
    "fill_split",
    "guess_keys",
    "guess_keys_in",
    "in_other_file",
    "is_attribute_key",
    "keys_in",
    "names_rows",
    "stacked_keys",
    "without_slashes",
    "words_in",
]

GROUP_WORDS = {
    "guid",
    "uuid",
    "patient",
    "subject",
    "participant",
    "recording",
    "session",
    "donor",
    "writer",
}
"""Words in the name of a column that contains groups of rows."""

INDEX_WORDS = {"id", "idx", "index"}
"""Words in the name of a column of row numbers, which is not a target."""


@dataclass(frozen=True)
class StackedKeys:
    """Several arrays, or members of one table, that are stacked into one field.

    Attributes:
        names: names in the file, in the order of the new axis.
        axis: position of the new axis in a row; None for the last one.
    """

    names: tuple[str, ...]
    axis: int | None = None

    @property
    def group(self) -> str | None:
        """The common group, or the table, of all names.

        None for several groups, for the root of the file, and for patterns. Members of a table are never patterns.
        """
        if any("*" in name.rpartition("/")[2] for name in self.names) and not self.are_columns:
            return None
        groups = {name.rpartition("/")[0] for name in self.names}
        if len(groups) > 1 and self.are_columns:
            return "table"  # the name of a column may have a slash
        return next(iter(groups)) or None if len(groups) == 1 else None

    @property
    def are_columns(self) -> bool:
        """Whether all names are columns of a side table."""
        return all(name.startswith("table/") for name in self.names)

    @property
    def key(self) -> str:
        """The field's name in messages and for patterns: the name of the group, or all names."""
        return self.group or ", ".join(self.names)

    @property
    def members(self) -> tuple[str, ...]:
        """The names inside ``group``; whole names without one."""
        group = self.group
        return self.names if group is None else tuple(name[len(group) + 1 :] for name in self.names)

    def filled(self, split: str) -> StackedKeys:
        """Return the names with a split's name in place of ``{split}``."""
        return replace(self, names=tuple(name.replace("{split}", split) for name in self.names))


@dataclass(frozen=True)
class FieldNames:
    """The fields of one part of a sample (its x or its y).

    Attributes:
        kind: a single array, a tuple, or a dict.
        keys: the arrays, in order.
        names: their names in the dict, or their keys.
        stacks: per key the stacked arrays, or members of a table; None for a single array. Empty if nothing is stacked.
        paths: per key the other files that contain it; None for the data's own files. Empty if no key has other files.
    """

    kind: Literal["single", "tuple", "dict"]
    keys: tuple[str, ...]
    names: tuple[str, ...]
    stacks: tuple[StackedKeys | None, ...] = ()
    paths: tuple[Any, ...] = ()


def field_names(keys: Keys, argument: str) -> FieldNames:
    """Parse ``x_key`` or ``y_key``.

    Raises:
        H5ValueError: a name is empty, the list is empty, or the value has another type.
    """
    value: Any = keys  # values from a configuration file can have any type
    if isinstance(value, Mapping) and set(value) == {"path", "key"}:
        key, path = in_other_file(value, argument)
        return FieldNames("single", (key,), (key,), (), (path,))
    is_stack = isinstance(value, Mapping) and "stack" in value and not set(value) - {"stack", "axis"}
    if is_stack and (stacked := stacked_keys(value, argument)) is not None:
        return FieldNames("single", (stacked.key,), (stacked.key,), (stacked,))
    stacks: list[StackedKeys | None] = []
    paths: list[Any] = []
    if isinstance(value, Mapping):
        array_keys = []
        for name, part in value.items():
            stacked = stacked_keys(part, f"{argument}[{name!r}]")
            key, path = (stacked.key, None) if stacked else in_other_file(part, f"{argument}[{name!r}]")
            array_keys.append(key)
            stacks.append(stacked)
            paths.append(path)
    else:
        array_keys = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []
    if not array_keys or not all(isinstance(key, str) and key.strip("/") for key in array_keys):
        raise H5ValueError(
            f"{argument}={keys!r} does not name an array. Pass a name such as 'group/images', a list of names, "
            "or a mapping from names in the sample to names in the file."
        )
    if isinstance(keys, str):
        return FieldNames("single", (keys,), (keys,))
    if isinstance(keys, Mapping):
        of_others = tuple(paths) if any(path is not None for path in paths) else ()
        return FieldNames("dict", tuple(array_keys), tuple(keys), tuple(stacks) if any(stacks) else (), of_others)
    return FieldNames("tuple", tuple(array_keys), tuple(array_keys))


def in_other_file(value: Any, argument: str) -> tuple[Any, Any]:
    """Return the key of an array, and the other files that hold it; None for the data's own files.

    Args:
        value: a key, or ``{"path": ..., "key": ...}``.
        argument: the argument with the value, for errors.

    Raises:
        H5ValueError: a path or a key is missing.
    """
    if not isinstance(value, Mapping):
        return value, None
    if set(value) != {"path", "key"} or not isinstance(value["key"], str) or value["path"] is None:
        raise H5ValueError(
            f"{argument}={dict(value)!r} was given. Pass the name of an array, or {{'path': 'labels.h5', 'key': 'y'}} "
            "for one of another file."
        )
    return value["key"], value["path"]


def stacked_keys(value: Any, argument: str) -> StackedKeys | None:
    """Return the arrays that a list of keys, or ``{"stack": [...]}``, stacks; None for other values.

    Args:
        value: a key, a list of keys such as ``["signals/C3", "signals/F4"]``, or a mapping with such a list.
        argument: the argument with the value, for errors.

    Raises:
        H5ValueError: a key is not text or is repeated, the list is empty, or the axis is invalid.
    """
    stack, axis = value, None
    if isinstance(value, Mapping) and "stack" in value:
        if unknown := set(value) - {"stack", "axis"}:
            raise H5ValueError(
                f"{argument}={dict(value)!r} has the key {min(map(str, unknown))!r}. Pass {{'stack': names of arrays}} "
                "and, as 'axis', the place of the new axis in a row."
            )
        stack, axis = value["stack"], value.get("axis", -1)
        if type(axis) is not int or axis < -1:
            raise H5ValueError(
                f"{argument}={dict(value)!r} was given. Pass as axis the place of the new axis in a row, from 0 on, or "
                "-1 for the last one."
            )
    if (isinstance(stack, str) or not isinstance(stack, Sequence)) and stack is value:
        return None
    entries = [stack] if isinstance(stack, str) else stack if isinstance(stack, Sequence) else []
    names = tuple(without_slashes(name) for name in entries if isinstance(name, str))
    if not names or len(names) < len(entries) or "" in names:
        raise H5ValueError(
            f"{argument}={value!r} does not name arrays to stack. Pass names such as ['signals/C3', 'signals/F4']."
        )
    if len(set(names)) < len(names):
        raise H5ValueError(f"{argument}={value!r} names an array twice. Name each once.")
    return StackedKeys(names, None if axis == -1 else axis)


def fill_split(keys: Keys, split: str) -> Keys:
    """Replace ``{split}`` in every key by the split's name."""
    if isinstance(keys, str):
        return keys.replace("{split}", split)
    if isinstance(keys, Mapping):
        return {name: _filled(key, split) for name, key in keys.items()}
    return [key.replace("{split}", split) for key in keys]


def _filled(key: Any, split: str) -> Any:
    if isinstance(key, str):
        return key.replace("{split}", split)
    if isinstance(key, Mapping):
        return {name: _filled(value, split) for name, value in key.items()}
    if not isinstance(key, list | tuple):
        return key  # a path
    return [_filled(item, split) for item in key]


def with_constants(x_key: Keys, y_key: Keys | None, constants: Sequence[str]) -> Keys:
    """Return ``x_key`` with the constants of segments that neither key names.

    A mapping gets a field by the name of the array; one array, or a list, becomes a list with them at the end.
    """
    fields = [field_names(key, name) for name, key in (("x_key", x_key), ("y_key", y_key)) if key is not None]
    field_keys = {name for field in fields for name in (*field.names, *field.keys)}
    if not (new_names := [name for name in constants if name not in field_keys]):
        return x_key
    if fields[0].kind == "dict" and isinstance(x_key, Mapping):
        return {**x_key, **{name: name for name in new_names}}
    keys: Any = [x_key] if fields[0].kind == "single" else x_key
    return [*keys, *new_names]


def keys_in(*keys: Keys | None) -> list[str]:
    """Return all array names in several key arguments."""
    names: list[str] = []
    for key in keys:
        if key is not None:
            names += field_names(key, "key").keys
    return names


def arrays_in(*keys: Keys | None, of_others: bool = True) -> list[str]:
    """Return the names of the arrays in several key arguments, including each stacked array.

    Args:
        keys: the arguments.
        of_others: include arrays of other files.
    """
    names: list[str] = []
    for fields in (field_names(key, "key") for key in keys if key is not None):
        stacks, paths = (values or (None,) * len(fields.keys) for values in (fields.stacks, fields.paths))
        for key, stacked, path in zip(fields.keys, stacks, paths, strict=True):
            if path is None or of_others:
                names += [key] if stacked is None else stacked.names
    return names


def is_attribute_key(key: str) -> bool:
    """Return whether a key names an attribute: its last component has an ``@``, as in ``"images@units"``.

    An ``@`` in other components belongs to the name of a group. A key of an array with an ``@`` ends in a slash.
    """
    return "@" in key.rpartition("/")[2]


def without_slashes(key: str) -> str:
    """Return a key without slashes at its ends, except for a slash that distinguishes an array from an attribute."""
    stripped = key.strip("/")
    return f"{stripped}/" if key.endswith("/") and is_attribute_key(stripped) else stripped


def words_in(name: str) -> set[str]:
    """Return the words of the last component of a name, without a plural's s; for codes, of their group's name."""
    group, _, last = name.rpartition("/")
    if last == "codes" and group:
        last = group.rpartition("/")[2]
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", last).casefold().replace("_", " ").replace("-", " ").split()
    return {word.removesuffix("s") for word in words}


def names_rows(name: str) -> bool:
    """Return whether an array has group labels or row numbers, by its name: it is neither an input nor a target."""
    return bool(words_in(name) & (GROUP_WORDS | INDEX_WORDS))


def guess_keys(path: str, *, swmr: bool = False) -> tuple[str, str | None]:
    """Return the arrays for training, if exactly one choice qualifies (see ``guess_keys_in``).

    Args:
        path: the file.
        swmr: the file has a live writer.
    """
    with open_h5(path, swmr=swmr) as file:
        return guess_keys_in(file, path)


def guess_keys_in(file: Any, path: str) -> tuple[str, str | None]:
    """Return the arrays for training, if exactly one choice qualifies.

    A choice is the only array of numbers (x, without y), or two arrays with the same number of rows, one of which has
    one value per row (y).

    Args:
        file: the open file.
        path: its path.

    Returns:
        Names for x and for y (or None).

    Raises:
        H5KeyError: several choices qualify, or none; the message lists the arrays and the arguments to add.
    """
    with translate_h5py_errors(path, "what is"):
        # A name that is not UTF-8 cannot be passed as a key.
        data, other_names = list_data(file)
        matrices = sorted(matrices_among(other_names))
        arrays = {name: file[name] for name in data if is_text(name)}
        dtypes = {name: numpy_dtype(array) for name, array in arrays.items()}
        numbers = [name for name, dtype in dtypes.items() if dtype is not None and kind_of(dtype) == "number"]
        shapes = {name: shape_of(array.id) for name, array in arrays.items()}
        rows = {name: shape for name in numbers if (shape := shapes[name])}
        input_names = [name for name, shape in rows.items() if len(shape) > 1]
        target_names = [name for name, shape in rows.items() if len(shape) == 1]
        if len(rows) == 1 and not matrices:
            return next(iter(rows)), None
        if (
            len(input_names) == len(target_names) == 1
            and not matrices
            and rows[input_names[0]][0] == rows[target_names[0]][0]
            and not _are_apart(input_names[0], target_names[0])
        ):
            return input_names[0], target_names[0]
        shown_shapes = list(shapes.items())[:40]
        lines = "".join(f"\n  {name!r}: shape {shape}, {dtype_text(dtypes[name])}" for name, shape in shown_shapes)
        ellipsis = f"\n  and {len(arrays) - 40} more" if len(arrays) > 40 else ""
        raise H5KeyError(
            f"x_key was not given, and cannot be inferred from {path!r}; it has "
            f"{f'these arrays:{lines}{ellipsis}' if arrays else 'no arrays'}\n"
            + (
                f"{matrices[0]!r} is a sparse matrix: x_key={matrices[0]!r} has its rows."
                if matrices
                else _what_to_add([*input_names, *target_names], {name: shape[0] for name, shape in rows.items()})
            )
            + (
                " If groups or arrays are a sample each (episodes, subjects, molecules), "
                f"`lightning-h5 inspect {path}` shows the arguments to pass."
            )
            * (len(arrays) > 1)
        )


def _are_apart(x: str, y: str) -> bool:
    """Return whether two arrays seem to be two samples instead of two fields of one sample.

    This is the case if they have the same name in two groups, or if their groups differ in a number.
    """
    (a, _, x_name), (b, _, y_name) = x.rpartition("/"), y.rpartition("/")
    return a != b and (x_name == y_name or re.sub(r"\d+", "0", a) == re.sub(r"\d+", "0", b))


def _what_to_add(names: list[str], n_rows: dict[str, int]) -> str:
    if not names:
        return "None of them holds rows of numbers to train from. Pass the path of another file."
    x = names[0]
    y = [
        name
        for name in names[::-1]
        if name != x and n_rows[name] == n_rows[x] and not names_rows(name) and not _are_apart(x, name)
    ]
    return f"Choose one, for example x_key={x!r}" + (f", y_key={y[0]!r}." if y else ".")
