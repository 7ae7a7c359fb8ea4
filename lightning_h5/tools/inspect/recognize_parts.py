"""Guesses of samples for groups or files that are segments, from names, shapes and dtypes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import listing
from ...hdf5 import COMPLEX_MEMBERS, MATLAB_TEXT, keys_in, words_in
from ...types import cached_property
from .advice import TIMES, suggest_split
from .contents import Contents
from .dates import are_dates

__all__ = [
    "ACTIONS",
    "LONGER",
    "MAX_CHANNELS",
    "MAX_STEPS",
    "SERIES",
    "TARGETS",
    "TIMES",
    "AlikeParts",
    "FileLooks",
    "Guess",
    "Look",
    "Reader",
    "Settings",
    "attributes_that_vary",
    "have_classes",
    "is_rate",
    "looks_of",
    "names_of",
    "target_among",
]

ACTIONS = {"action", "control", "command"}
OBSERVATIONS = {"ob", "observation"}  # as `words_in` has them: without the s of a plural
BAGS = {"feature", "feat", "coord", "embedding", "token", "point", "hit", "particle", "node"}
SERIES = {"eeg", "ecg", "emg", "meg", "lfp", "signal", "waveform", "audio", "wave", "strain", "trace", "sensor"}
PICTURES = {"image", "img", "picture", "photo", "tile", "pixel", "scan", "slice", "mask", "micrograph", "frame"}
RATES = {"rate", "freq", "sfreq", "rsfreq", "dx", "dt", "delta", "hz", "conversion"}

TARGETS = {
    word.removesuffix("s")  # as `words_in` returns them
    for word in ("label", "target", "y", "class", "classes", "annotation", "segmentation", "diagnosis", "outcome")
}

PERSON = r"((?:patient|subject|subj|sub|case)[-_]?\w*?\d+)"
YEAR = re.compile(r"(19|20)\d\d")

MAX_CONSTANT = 1024  # maximum values of an array without steps, if a step has fewer
MAX_UNUSED = 3  # maximum number of unused arrays to name
MAX_PIXEL = 4  # values of a pixel, on the last axis
MAX_FIELDS, MAX_ATTRIBUTES, N_ACTIONS, MAX_STEPS = 12, 6, 8, 256
MIN_PICTURE = 16  # pixels of a side
MIN_SIDE, SIDE = 32, 64  # of volumes that are cut, and of a patch
MAX_CHANNELS, LONGER = 512, 8  # maximum number of channels, and minimum ratio of times to channels

Settings: TypeAlias = dict[str, Any]


LISTS_OR_BYTES = re.compile(r"lists of (u?int|float|bool)|\|V\d")
"""Dtypes in words for rows that may be lists of numbers, or encoded bytes."""

COMPLEX_TABLES = {f"table of {', '.join(members)}" for members in COMPLEX_MEMBERS}
"""Dtypes in words for tables that are complex numbers."""

OF_PACKING = {"scale_factor", "add_offset", "_FillValue", "missing_value"}
"""Attributes that describe the decoding of netCDF values; they are not fields."""


class Look(NamedTuple):
    """The shape of an array, and its dtype in words."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def n_values(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class FileLooks:
    """The arrays of a file or group by name.

    Attributes:
        path: the file.
        group: the group; "" for the file.
        arrays: numbers and text.
        of_bytes: lists and opaque values.
        references: arrays of references.
        complexes: tables of the parts of complex numbers.
        tables: all tables.
        coordinates: those of ``arrays`` that are neither input nor target.
        software: the program or format of the file, if it is marked.
    """

    path: str
    group: str = ""
    arrays: Mapping[str, Look]
    of_bytes: Mapping[str, Look] = field(default_factory=dict)
    references: Sequence[str] = ()
    complexes: Mapping[str, Look] = field(default_factory=dict)
    tables: Mapping[str, Look] = field(default_factory=dict)
    coordinates: Collection[str] = ()
    software: str | None = None

    @property
    def has_only_coordinates(self) -> bool:
        """Whether nothing else may be input or target."""
        return not (self.of_bytes or self.references or self.complexes) and set(self.arrays) <= set(self.coordinates)

    @property
    def name(self) -> str:
        """Name of the segment."""
        return self.group or re.split(r"[\\/]", self.path)[-1]


def looks_of(path: str, contents: Contents) -> FileLooks:
    """Return the arrays of a file that samples may consist of.

    Args:
        path: the file.
        contents: its contents.
    """
    arrays = [array for array in contents.arrays if array.shape is not None and array.name and array.is_data]
    looks = {
        array.name: Look(array.shape or (), "text" if array.structure == MATLAB_TEXT else array.dtype)
        for array in arrays
    }
    return FileLooks(
        path=path,
        arrays={name: look for name, look in looks.items() if _holds_values(look.dtype)},
        of_bytes={name: look for name, look in looks.items() if LISTS_OR_BYTES.match(look.dtype)},
        references=[array.name for array in arrays if array.dtype == "references" and array.structure is None],
        complexes={name: look for name, look in looks.items() if look.dtype in COMPLEX_TABLES and look.shape},
        tables={name: look for name, look in looks.items() if look.dtype.startswith("table of ") and look.shape},
        coordinates={array.name for array in arrays if array.structure is not None} | set(contents.pandas),
        software=contents.software,
    )


@cache
def _holds_values(dtype: str) -> bool:
    """Return whether a dtype in words is text or numbers."""
    with suppress(TypeError, ValueError):
        return dtype.startswith("text") or np.dtype(dtype).kind in "biufc"
    return False


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A guess of the samples in files.

    Attributes:
        settings: arguments of a data module; empty if rows are samples, None if no settings fit.
        why: the reason, as a sentence.
        is_sure: whether no other guess is likely.
    """

    settings: Settings | None
    why: str
    is_sure: bool = True


class Reader(NamedTuple):
    """Functions that read files for the rules.

    Attributes:
        values: returns all values of a column of the first file; None if it cannot be read.
        attributes: returns the attributes with one number or text, by name, for each part.
        texts: returns the text of an array without axes in each part; none if it cannot be read.
        holds_arrays: returns whether one of the first arrays that an array of references points to has several numbers.
        cells: returns the looks of the arrays that an array of the first file refers to; none if they are not segments.
    """

    values: Callable[[str], Any]
    attributes: Callable[[Sequence[FileLooks], Sequence[str]], dict[str, list[Any]]]
    texts: Callable[[Sequence[FileLooks], str], list[str]]
    holds_arrays: Callable[[str], bool]
    cells: Callable[[str], list[Look]]


class AlikeParts:
    """Parts with the same arrays, each a segment."""

    def __init__(self, parts: Sequence[FileLooks], reader: Reader, segments: Settings) -> None:
        self.parts, self.reader, self.segments = _with_steps(parts), reader, segments
        parts = self.parts
        names = [name for name, look in parts[0].arrays.items() if look.shape and not look.dtype.startswith("text")]
        names = [name for name in names if not name.startswith("next_")]
        shapes = {name: [part.arrays[name].shape for part in parts if name in part.arrays] for name in names}
        self.shapes = {
            name: part_shapes
            for name, part_shapes in shapes.items()
            if len(part_shapes) == len(parts) and len(set(map(len, part_shapes))) == 1 and all(map(all, part_shapes))
        }
        if not self.shapes:
            return
        self.main = max(
            self.shapes,
            key=lambda name: (len(self.shapes[name][0]) > 1, not words_in(name) & TARGETS, self._n_values(name)),
        )
        scalars = {
            name: {part.arrays[name].dtype for part in parts}
            for name, look in parts[0].arrays.items()
            if look.shape == () and look.dtype[:4] != "text" and all(name in part.arrays for part in parts)
        }
        self.scalars = [name for name, dtypes in scalars.items() if len(dtypes) == 1]
        attributes = reader.attributes(parts, [self.main])
        self.attributes = attributes_that_vary(attributes)
        self.mixed = [name for name, values in attributes.items() if len(_dtypes(values)) > 1]
        self.mixed += [name for name in scalars if name not in self.scalars]
        self.has_rate = any(is_rate(name.rpartition("@")[2]) for name in attributes)
        self.words = set[str]().union(*(words_in(name) for name in self.shapes))
        self.step_axis, self.axis_is_sure = self._step_axis()
        self.texts = [name for name in parts[0].arrays if words_in(name) & TARGETS and self._is_class_of_text(name)]

    def _is_class_of_text(self, name: str) -> bool:
        """Return whether an array has a text for each part, or for each step, that may be a class."""
        looks = [part.arrays[name] for part in self.parts if name in part.arrays]
        if len(looks) < len(self.parts) or any(look.dtype[:4] != "text" for look in looks):
            return False
        if all(look.shape in ((), (1,)) for look in looks):
            return _may_be_field(name, self.reader.texts(self.parts, name))
        if any(look.shape != (n_steps,) for look, n_steps in zip(looks, self.lengths, strict=True)):
            return False
        return have_classes(self.reader.values("/".join(filter(None, (self.parts[0].group, name)))))

    def _n_values(self, name: str) -> int:
        return sum(math.prod(shape) for shape in self.shapes[name])

    def _lengths(self, name: str, axis: int) -> list[int]:
        return [shape[axis] for shape in self.shapes[name]]

    def _is_fixed(self, name: str, axis: int) -> bool:
        return len(set(self._lengths(name, axis))) == 1

    def _step_axis(self) -> tuple[int, bool]:
        """Return the axis of the steps, and whether the guess is certain."""
        shapes = self.shapes[self.main]
        if len(shapes[0]) != 2:
            return 0, True
        is_wide = all(LONGER * a <= b and a <= MAX_CHANNELS for a, b in shapes)
        if not self._is_fixed(self.main, 0) or len(self.parts) == 1 or self.words & ACTIONS:
            return 0, True
        if not self._is_fixed(self.main, 1) and all(a < b for a, b in shapes):
            return 1, True
        if is_wide:
            return 1, self.has_rate or bool(words_in(self.main) & SERIES)
        return 0, True

    @cached_property
    def lengths(self) -> list[int]:
        """Number of steps of each part."""
        return self._lengths(self.main, self.step_axis)

    @cached_property
    def steps(self) -> dict[str, int]:
        """The axis of the steps of each field with as many steps as the main array, or one more or less."""
        axes_of_fields, max_difference = {}, 1 if self.words & ACTIONS else 0
        for name, shapes in self.shapes.items():
            axes = [self.step_axis, 0] if len(shapes[0]) == 2 else [0]
            for axis in axes:
                differences = np.subtract(self._lengths(name, axis), self.lengths)
                if (
                    abs(differences).max() <= max_difference
                    and len(set(differences.tolist())) == 1
                    and (self.parts[1:] or not differences.any())
                ):
                    axes_of_fields[name] = axis
                    break
        return axes_of_fields

    @cached_property
    def is_ragged(self) -> bool:
        """Whether rows have several shapes."""
        axes = [axis for axis in range(len(self.shapes[self.main][0])) if axis != self.step_axis]
        return not all(self._is_fixed(self.main, axis) for axis in axes)

    @cached_property
    def is_image(self) -> bool:
        """Whether all arrays have the shape of the main array, except for channels: an image or volume, and masks."""
        pixels = {tuple(map(_pixels, shapes)) for shapes in self.shapes.values()}
        return len(pixels) == 1

    @property
    def are_volumes(self) -> bool:
        """Whether arrays are volumes with masks: of one shape, with three axes that are all long."""
        shapes = self.shapes[self.main]
        return self.is_image and len(self.shapes) > 1 and all(len(s) == 3 and min(s) >= MIN_SIDE for s in shapes)

    def _patches(self) -> Guess:
        sizes = [min(SIDE, *self._lengths(self.main, axis)) for axis in range(3)]
        why = (
            f"{listing(self.shapes)} have one shape, with three long axes: they are volumes. A sample is a patch, at "
            "the same place in all of them."
        )
        settings = self._fields(sample="segment")
        del settings["sample"]
        return Guess(settings=settings | {"patch": {"shape": sizes}}, why=why, is_sure=False)

    @property
    def are_segments(self) -> bool:
        """Whether each file is a segment. Files of rows have one row shape, and often a column."""
        if len(self.parts) < 2 or not self.shapes:
            return False
        steps = self.steps
        columns = [name for name, axis in steps.items() if len(self.shapes[name][0]) == 1 and axis == 0]
        if len(self.shapes[self.main][0]) == 1:
            return self.has_rate or (len(set(self.lengths)) > 1 and not self._target)
        n_usual = Counter(shape[1:] for shape in self.shapes[self.main]).most_common(1)[0][1]
        has_one_length = len(set(self.lengths)) == 1
        are_rows = columns or has_one_length or (len(self.shapes) == 1 and len(self.shapes[self.main][0]) == 2)
        if self.is_ragged and are_rows and 2 * n_usual + has_one_length > len(self.parts):
            return False  # rows, and files that differ from most
        is_square = self.is_image and len(self.shapes) > 1 and len(self.shapes[self.main][0]) in (2, 3)
        if self.words & ACTIONS or self.is_ragged or self.step_axis or (is_square and self._looks_square):
            return True
        return not columns and (len(set(self.lengths)) > 1 or self._are_dated)

    @property
    def _are_dated(self) -> bool:
        return all(YEAR.search(part.name) for part in self.parts) and len(self.shapes[self.main][0]) > 2

    @property
    def _looks_square(self) -> bool:
        return all(min(shape[:2]) > 1 and max(shape[:2]) <= 4 * min(shape[:2]) for shape in self.shapes[self.main])

    @property
    def _is_picture(self) -> bool:
        """Whether the main array is a picture in each part: about as many rows as columns, and a few channels."""
        shapes = self.shapes[self.main]
        if self.has_rate or self.words & ACTIONS or any(len(self.shapes[name][0]) > 3 for name in self.shapes):
            return False
        sides = [tuple(size for size in shape if size > MAX_PIXEL) if len(shape) == 3 else shape for shape in shapes]
        has_sides = all(
            len(lengths) == 2 and min(lengths) >= MIN_PICTURE and max(lengths) <= 4 * min(lengths) for lengths in sides
        )
        has_channels = all(len(shape) == 3 for shape in shapes)
        return has_sides and (has_channels or bool(words_in(self.main) & PICTURES))

    @cached_property
    def _target(self) -> str | None:
        named_targets = [name for name in self.shapes if words_in(name) & TARGETS and name != self.main]
        return named_targets[0] if len(named_targets) == 1 else None

    @cached_property
    def _target_of_parts(self) -> str | None:
        """The attribute, number or text with one value per part that is a target by its name; None if none is."""
        if self._target is not None or self.words & ACTIONS:
            return None
        return target_among([*self.attributes, *self.scalars, *self.texts])

    def guesses(self) -> list[Guess]:
        """Return guesses of samples, the likeliest first."""
        if not self.shapes:
            return []
        return [
            replace(guess, why=f"{guess.why}{self._why_target(guess)}{self._unused(guess)}{_why_split(guess)}")
            for guess in self._guesses()
        ]

    def _why_target(self, guess: Guess) -> str:
        target = self._target_of_parts
        if target is None or (guess.settings or {}).get("y_key") != target:
            return ""
        is_of_steps = target in self.texts and self.parts[0].arrays[target].shape not in ((), (1,))
        return f" {target!r}, a target by its name, has one value for each {'step' if is_of_steps else 'segment'}."

    def _unused(self, guess: Guess) -> str:
        settings = guess.settings or {}
        used_keys = keys_in(settings.get("x_key"), settings.get("y_key"))
        unused_names = [
            name
            for name, look in self.parts[0].arrays.items()
            if name not in (*used_keys, *self.mixed) and look.dtype[:4] != "text"
        ]
        why = ""
        if self.mixed and not self.words & ACTIONS:
            why = f" Not used: {listing(self.mixed, MAX_UNUSED)}, since the dtype is not the same in all."
        if len(unused_names) > MAX_UNUSED:
            return f"{why} Not used: {len(unused_names)} other arrays."
        return f"{why} Not used: {listing(unused_names)}." if unused_names else why

    def _guesses(self) -> list[Guess]:
        row_settings = self._fields(sample="row")
        rows = Guess(settings=row_settings, why="Each step is a sample.")
        if self.is_ragged and not self.words & ACTIONS:
            n_axes = len(self.shapes[self.main][0])
            collate = "list" if n_axes > 3 else "pad"
            others = [name for name in self.steps if name != self.main]
            columns = [name for name in others if len(self.shapes[name][0]) != n_axes or not self.is_image]
            if columns and not self.is_image:
                why = f"{self.main!r} has rows of several shapes, as many as {columns[0]!r}: each row is a sample."
                return [Guess(settings=self._fields(sample="row", collate_fn=collate), why=why)]
            why = (
                f"{self.main!r} differs in shape along several axes: the whole array is a sample; the argument patch "
                "cuts pieces of one size from it."
            )
            segment_guess = Guess(settings=self._fields(sample="segment", collate_fn="list"), why=why)
            if self.are_volumes:
                return [self._patches(), segment_guess]
            if n_axes > 2 and not others:
                by_row = replace(rows, settings=row_settings | {"collate_fn": collate})
                return [replace(segment_guess, is_sure=False), by_row]
            return [segment_guess]
        are_images = self.is_image and len(self.shapes) > 1 and self._looks_square
        if not self.segments and are_images and not (self.words & ACTIONS or self.has_rate):
            why = "All arrays of a file have one shape: each file may be one image or volume."
            padded = {"collate_fn": "pad"} if len(set(self.lengths)) > 1 else {}
            segment_guess = Guess(settings=self._fields(sample="segment", **padded), why=why, is_sure=False)
            return [self._patches(), segment_guess] if self.are_volumes else [segment_guess, rows]
        if self.segments and self._is_picture:
            mark = "by its name" if words_in(self.main) & PICTURES else "by its shape"
            why = f"{self.main!r} is a picture in each, {mark}: the whole picture is a sample."
            ragged_settings = {"collate_fn": "list"} if len(set(self.shapes[self.main])) > 1 else {}
            return [Guess(settings=self._fields(sample="segment", **ragged_settings), why=why)]
        segment_guess = Guess(
            settings=self._fields(sample="segment", collate_fn="pad"), why="A sample is a whole segment."
        )
        ragged_settings = {"collate_fn": "pad"} if self.is_ragged else {}
        windows = Guess(settings=self._fields(window=self._window(), **ragged_settings), why=self._why_window())
        if self.words & ACTIONS and not self.step_axis:
            return [windows]
        label = self._target if self._target in self.steps and set(self.segments) <= {"groups"} else None
        has_values = label is not None and len(self.shapes[label][0]) == 1 < len(self.shapes[self.main][0])
        if has_values and self.step_axis == 0 and not self.words & BAGS:
            why = f"{label!r}, a target by its name, has one value for each step: each step is a sample."
            labeled_rows = replace(rows, why=why)
            is_sure = len(self.shapes[self.main][0]) > 2
            return [replace(labeled_rows, is_sure=is_sure), *([] if is_sure else [segment_guess])]
        if self.words & BAGS and not self.step_axis:
            bag = next(name for name in (self.main, *self.shapes) if words_in(name) & BAGS)
            why = f"{bag!r} is, by its name, a set of any number of rows: a sample is the whole set."
            return [replace(segment_guess, why=why), *([] if self.segments else [rows])]
        is_series = self.has_rate or bool(words_in(self.main) & SERIES) or self.step_axis == 1
        is_simulation = len(self.shapes[self.main][0]) > 2 and any(min(s[1:3]) > 1 for s in self.shapes[self.main])
        if is_series or is_simulation:
            return [replace(windows, is_sure=self.axis_is_sure), *([] if self.axis_is_sure else [segment_guess])]
        return [replace(segment_guess, is_sure=False), windows if self.segments else rows]

    def _window(self) -> Any:
        if self.words & ACTIONS:
            steps = {name: [0, N_ACTIONS] if words_in(name) & ACTIONS else 0 for name in names_of(self.steps)}
            return {"steps": steps, "pad": "edge"}
        if len(self.shapes[self.main][0]) > 2:
            return [0, min(2, *self.lengths)]
        return max(1, min(MAX_STEPS, int(np.percentile(self.lengths, 25, method="lower"))))

    def _why_window(self) -> str:
        parts = []
        if self.step_axis:
            n = self.shapes[self.main][0][0]
            sizes = self._lengths(self.main, 1)
            sizes_text = f"{min(sizes):,} to {max(sizes):,}" if len(set(sizes)) > 1 else f"{sizes[0]:,}"
            parts.append(f"{self.main!r} has {n} along axis 0 in each and {sizes_text} along axis 1, the axis of time.")
        elif len(self.parts) > 1 and self._are_dated:
            parts.append("Files are named by year: rows are steps in time.")
        elif len(set(self.lengths)) > 1:
            parts.append(f"The segments have {min(self.lengths):,} to {max(self.lengths):,} steps.")
        others = [name for name, axis in self.steps.items() if self._lengths(name, axis) != self.lengths]
        if others:
            name = others[0]
            parts.append(
                f"{name!r} has {self._lengths(name, self.steps[name])[0]} steps and {self.main!r} {self.lengths[0]}."
            )
        if self.words & ACTIONS:
            names = [name for name in self.steps if words_in(name) & ACTIONS]
            inputs = " and 'obs' the input" if any(_is_observation(name) for name in self.steps) else ""
            parts.append(
                f"By their names, {listing(names, 2)} are actions{inputs}: a sample has the observation at a step, and "
                f"{N_ACTIONS} actions from there on."
            )
        else:
            parts.append("A sample is a window of steps.")
        return " ".join(parts)

    def _fields(self, **sample_settings: Any) -> Settings:
        is_whole_array = sample_settings.get("sample") == "segment" and self.is_ragged
        steps = dict.fromkeys(self.shapes, 0) if is_whole_array else self.steps
        times = [name for name in steps if words_in(name) & TIMES and len(self.shapes[name][0]) == 1]
        steps = {name: axis for name, axis in steps.items() if name not in times or name == self.main}
        keys = sorted(steps, key=lambda name: -self._n_values(name))[:MAX_FIELDS]
        if self.words & ACTIONS:  # for any size
            keys += [name for name in steps if words_in(name) & ACTIONS and name not in keys]
            if any(_is_observation(name) for name in keys):
                keys = [name for name in keys if _is_observation(name) or words_in(name) & ACTIONS]
        keys = [name for name in self.shapes if name in keys]
        constants = [] if is_whole_array else [name for name in self.shapes if self._is_constant(name)][:MAX_FIELDS]
        column_names = [name for name in self.attributes if name != self._target_of_parts][:MAX_ATTRIBUTES]
        column_names = [
            name
            for name in column_names
            if [str(value) for value in self.attributes[name]] != [str(n) for n in self.lengths]
        ]
        column_names += [name for name in self.scalars if name != self._target_of_parts][:MAX_ATTRIBUTES]
        if self.words & ACTIONS:  # attributes of episodes describe them, and are not inputs of a policy
            column_names = []
        target = self._target if self._target in keys and not constants and not column_names else self._target_of_parts
        names = names_of([*(key for key in keys if key != target), *constants, *column_names])
        settings: Settings = {"x_key": names if len(names) > 1 else next(iter(names.values()))}
        if target is not None:
            settings["y_key"] = target
            if target in self.texts and self.parts[0].arrays[target].shape == (1,):
                settings["decode"] = {target: "category"}  # numbers the text of a segment instead of its steps
        segments = dict(self.segments)
        if self.step_axis:
            axes = {name: steps[key] for name, key in names.items() if key in steps}
            is_of_all = set(axes.values()) == {1} and not column_names and target in (None, self._target)
            segments["step_axis"] = 1 if is_of_all else axes
        if constants:
            segments["constants"] = [name for name, key in names.items() if key in constants]
        if segments:
            settings["segments"] = segments["groups"] if set(segments) == {"groups"} else segments
        window: Any = sample_settings.get("window")
        if "steps" in str(window):
            steps_of_fields = {name: offsets for name, offsets in window["steps"].items() if name in names}
            sample_settings = sample_settings | {"window": window | {"steps": steps_of_fields}}
        return settings | sample_settings | self._split()

    def _is_constant(self, name: str) -> bool:
        """Return whether an array without steps is small enough to be part of each sample."""
        row = self._n_values(self.main) // max(1, sum(self.lengths))
        return name not in self.steps and self._n_values(name) <= len(self.parts) * max(MAX_CONSTANT, row)

    def _split(self) -> Settings:
        if len(self.parts) < 10:
            return {}
        matches = [re.search(PERSON, part.name) for part in self.parts]
        persons = np.array([match.group(1) for match in matches if match])
        if all(matches) and len(set(persons.tolist())) < len(persons):
            by_person, _ = suggest_split(len(persons), None, None, "group_pattern", persons)
            if "group_key" in by_person:
                return {"split": {"val_fraction": by_person["val_fraction"], "group_pattern": PERSON}}
        return {"split": 0.1}


def _why_split(guess: Guess) -> str:
    split = (guess.settings or {}).get("split")
    if not isinstance(split, dict):
        return ""
    return " split.group_pattern keeps the segments of one person together, by their names."


def _with_steps(parts: Sequence[FileLooks]) -> Sequence[FileLooks]:
    """Return the parts with values in their largest array; an empty one shows nothing of the others."""
    sizes = Counter[str]()
    for part in parts:
        numbers = ((name, look) for name, look in part.arrays.items() if look.dtype[:4] != "text")
        sizes.update({name: look.n_values for name, look in numbers})
    if not any(sizes.values()):
        return parts
    ((largest, _),) = sizes.most_common(1)
    return [part for part in parts if largest not in part.arrays or part.arrays[largest].n_values]


def is_rate(name: str) -> bool:
    """Return whether an attribute or array is, by its name, a rate or the distance of two steps."""
    return bool(words_in(name) & RATES) or name.rpartition("/")[2].casefold() == "fs"


def names_of(keys: Iterable[str]) -> dict[str, str]:
    """Return the array of each name in a sample: the last part of its key, or of its group, or all of it."""
    parts_of_keys = {key: re.split(r"[/@]", key)[::-1] for key in keys}
    counts = Counter(part for parts in parts_of_keys.values() for part in dict.fromkeys(parts[:2]))
    last_counts = Counter(parts[0] for parts in parts_of_keys.values())
    names = {}
    for key, (last, *groups) in parts_of_keys.items():
        is_short = last_counts[last] == 1
        names[last if is_short else groups[0] if groups and counts[groups[0]] == 1 else key] = key
    return names


def target_among(names: Iterable[str]) -> str | None:
    """Return the one array or attribute that is a target by its name; None if there is none, or several."""
    targets = [name for name in names if words_in(name.rpartition("@")[2]) & TARGETS]
    return targets[0] if len(targets) == 1 else None


def attributes_that_vary(attributes: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the attributes that may be fields: their values differ, and are not names of the parts.

    Args:
        attributes: the value of each part, by attribute.
    """
    return {name: values for name, values in attributes.items() if _may_be_field(name, values)}


def _may_be_field(name: str, values: Sequence[Any]) -> bool:
    may_vary = len(set(values)) > 1 and name.rpartition("@")[2] not in OF_PACKING and not _are_names(values)
    return may_vary and len(_dtypes(values)) == 1


def _dtypes(values: Sequence[Any]) -> list[str]:
    """Return the dtypes of values in words, each once: a field has one."""
    return list(dict.fromkeys("text" if isinstance(value, str) else str(value.dtype) for value in values))


def have_classes(texts: npt.NDArray[Any] | None) -> bool:
    """Return whether a column of text may have classes: some values repeat, and they are not dates."""
    values = [] if texts is None else texts.astype(str).tolist()
    return len(set(values)) < len(values) and not are_dates(values)


def _are_names(values: Sequence[Any]) -> bool:
    """Return whether attributes of parts are text without common values: dates, or a different text in each part."""
    is_text = all(isinstance(value, str) for value in values)
    return is_text and (len(set(values)) == len(values) or are_dates(values))


def _is_observation(name: str) -> bool:
    """Return whether an array is in a group of observations, by the group's name."""
    return any(words_in(group) & OBSERVATIONS for group in name.split("/")[:-1])


def _pixels(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an image or volume without its channels."""
    return shape[:-1] if len(shape) > 2 and shape[-1] <= MAX_PIXEL else shape
