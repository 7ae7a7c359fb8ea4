"""Options that define a sample: how steps are grouped into segments, and windows or patches cut from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import numpy as np

from ..errors import H5ValueError, listing, short_repr
from ..types import IntArray
from .base import Options, check_choice, check_whole
from .keywords import checks_keywords

__all__ = ["PatchOptions", "SegmentOptions", "StepRange", "WindowOptions", "value_of_field"]


class StepRange(NamedTuple):
    """The steps of one field in a window, relative to the window's own step.

    Attributes:
        start: first step.
        stop: end of the range, exclusive.
        step: distance between steps.
        is_single: a sample has one step, without an axis for steps.
    """

    start: int
    stop: int
    step: int = 1
    is_single: bool = False

    @property
    def last(self) -> int:
        """The last step."""
        return range(self.start, self.stop, self.step)[-1]

    @property
    def offsets(self) -> IntArray:
        """All steps, relative to the window's own step."""
        return np.arange(self.start, self.stop, self.step)

    def at_rate(self, rate: int) -> StepRange:
        """Return the range for a field whose steps each span ``rate`` of these steps; the window starts with one."""
        if rate == 1:
            return self
        start, last = self.start // rate, self.last // rate
        return StepRange(start, last + 1, max(1, self.step // rate), self.is_single)


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class SegmentOptions(Options):
    """How steps are grouped into segments: episodes, recordings, volumes, molecules. By default, a file is one segment.

    Shorthand: a pattern, ``groups``.

    Args:
        groups: pattern of group names, such as ``"data/*"``, or ``"*/*"`` for nested groups. Each matching group is a
            segment. Names with numbers sort as numbers (``demo_10`` after ``demo_9``). Names of arrays are then
            relative to the group. ``"@name[0]"`` is a field with the part of the name that the first ``*`` matches,
            ``"@name[1]"`` the second, and so on.
        key: array with one value per row: rows with the same value form a segment.
        sort_key: array that sorts the rows within a segment of ``key``. None keeps the storage order.
        lengths: array with the number of rows of each segment. Segments are stored one after the other.
        offsets: array with the first row of each segment, optionally followed by the total number of rows; or pairs as
            in ``spans``.
        ends: array, or several, with a flag that is set at the last row of each segment; or an array with the number
            of rows up to the end of each segment, such as ``meta/episode_ends``.
        spans: array of shape ``(n, 2)`` with the first row of each segment and the row after its last one.
        join: array with a coordinate of each row, such as a time. Files are joined in the order of this coordinate, and
            a segment ends where the coordinate does not advance by its usual step. Times of different ``units`` are
            converted to one scale.
        axis: axis of the arrays, as stored, with one segment per index: 0 for arrays of shape (trajectory, step, ...).
            A mapping from fields or patterns to axes if they differ, with None for a field without this axis.
        step_axis: axis of the steps, as stored. A mapping if fields differ, None for a field without steps.
        steps_per: mapping from slower fields, or patterns, to the number of steps that one of their steps spans, such
            as ``{"hypnogram": 7500}`` for one label per 30 s next to a signal of 250 Hz. Step t of a segment belongs to
            step ``t // 7500`` of the field. Fields that are not named have one value per step.
        constants: arrays without steps; they become fields even if no key names them. Each sample gets the value of its
            segment: the whole array, unless ``axis`` names one of its axes.
        missing: "drop" leaves out segments, or files, that lack an array, and logs their number; "error" raises.
        max_length: maximum number of steps per sample with ``sample="segment"``; longer segments are cropped at the
            end.
        bucket: form training batches of segments of similar length, in random order, with equal steps on all ranks.
        max_tokens: maximum number of steps per batch, instead of a fixed number of samples. Shorter samples are padded,
            so each one counts as many steps as the longest sample of the batch; with ``collate_fn="pack"`` it counts
            its own steps. Training batches have segments of similar length, in random order, even without ``bucket``,
            and all ranks have the same number of batches. With a mixture, each batch has one source. A sample longer
            than the limit raises an error; ``max_length`` crops it.
        keep_together: give all windows of a segment to one rank in evaluation. The number of batches may then differ
            between ranks.
    """

    shorthand = "a pattern of groups such as 'data/*'"

    groups: str | None = None
    key: str | None = None
    sort_key: str | None = None
    lengths: str | None = None
    offsets: str | None = None
    ends: str | list[str] | None = None
    spans: str | None = None
    join: str | None = None
    axis: int | dict[str, int | None] | None = None
    step_axis: int | dict[str, int | None] = 0
    steps_per: dict[str, int] | None = None
    constants: list[str] | tuple[str, ...] = ()
    missing: Literal["error", "drop"] = "error"
    max_length: int | None = None
    bucket: bool = False
    max_tokens: int | None = None
    keep_together: bool = False

    def __post_init__(self) -> None:
        arrays = {name: getattr(self, name) for name in ("key", "lengths", "offsets", "ends", "spans", "join")}
        cuts = [name for name, value in arrays.items() if value is not None]
        if len(cuts) > 1 or (cuts and self.axis is not None):
            names = [*cuts, *(["axis"] if self.axis is not None else [])]
            raise H5ValueError(f"segments was given with {listing(names)}, each of which defines segments. Pass one.")
        if self.groups is not None:
            counts = [level.count("*") for level in self.groups.split("/")]
            if max(counts) != 1:
                array = f", or segments={{'key': {self.groups!r}}} if this array has the segment of each row"
                likely = re.sub(r"\*[^/]*\*", "*", self.groups) if max(counts) else f"{self.groups.rstrip('/')}/*"
                raise H5ValueError(
                    f"segments.groups={self.groups!r} has {max(counts) or 'no'} '*' in a level. Pass a pattern with "
                    f"one for each level that varies, such as {likely!r}{'' if max(counts) else array}."
                )
        check_choice(self.missing, "segments.missing", ("error", "drop"))
        if self.sort_key is not None and self.key is None:
            raise H5ValueError(f"segments.sort_key={self.sort_key!r} was given without segments.key. Pass key too.")
        for name in ("axis", "step_axis"):
            axes = getattr(self, name)
            for axis in axes.values() if isinstance(axes, Mapping) else [axes]:
                if isinstance(axis, bool) or not isinstance(axis, int | None):
                    raise H5ValueError(
                        f"segments.{name}={axes!r} was given. Pass the number of an axis, as stored, or a mapping from "
                        "fields to axes."
                    )
        ends: Any = self.ends
        if not isinstance(ends, str | None) and not (
            isinstance(ends, list | tuple) and all(isinstance(key, str) for key in ends)
        ):
            raise H5ValueError(f"segments.ends={short_repr(ends)} was given. Pass the name of an array, or a list.")
        constants: Any = self.constants  # a configuration file may hold anything
        if isinstance(constants, str):
            raise H5ValueError(f"segments.constants={constants!r} is not a list. Pass [{constants!r}].")
        check_whole(self.max_length, "segments.max_length", 1)
        check_whole(self.max_tokens, "segments.max_tokens", 1)
        rates: Any = self.steps_per
        if rates is not None and not isinstance(rates, Mapping):
            raise H5ValueError(
                f"segments.steps_per={rates!r} is not a mapping. Pass a mapping from fields to numbers of steps, such "
                "as {'hypnogram': 7500}."
            )
        for name, rate in (rates or {}).items():
            check_whole(rate, f"segments.steps_per[{name!r}]", 1)
            if rate is None:
                raise H5ValueError(f"segments.steps_per[{name!r}] is None. Pass a whole number of at least 1.")
        if rates and cuts:
            raise H5ValueError(
                f"segments.steps_per cannot be combined with segments.{cuts[0]}, which cuts rows into segments and "
                "requires one value per row. Store each segment as a group or a file, or load fields with one value "
                "per row."
            )

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        return {"groups": value} if isinstance(value, str) else None

    @property
    def cut_keys(self) -> list[str]:
        """The arrays that define where segments begin or end."""
        ends = [self.ends] if isinstance(self.ends, str) else list(self.ends or [])
        keys = [self.key, self.sort_key, self.lengths, self.offsets, self.spans, self.join]
        return [key for key in keys if key is not None] + ends

    @property
    def are_ranges(self) -> bool:
        """Whether arrays mark which consecutive rows are a segment."""
        return any(value is not None for value in (self.lengths, self.offsets, self.ends, self.spans))

    @property
    def is_given(self) -> bool:
        """Whether segments are defined; otherwise each file is one."""
        return self.groups is not None or self.axis is not None or bool(self.cut_keys)


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class WindowOptions(Options):
    """How windows of steps are cut from segments; each window is a sample.

    Shorthand: an int, ``length``; a list ``[start, stop]`` or a mapping from fields, ``steps``.

    Args:
        length: number of steps, and the default of ``stride``.
        steps: steps relative to each step t of a segment: ``[start, stop]`` or ``[start, stop, step]``. For example,
            ``[-1, 3]`` selects t-1, t, t+1 and t+2. An int selects one step, without an axis for steps. A mapping from
            fields or patterns sets the steps of each field; a field of ``segments.steps_per`` counts its own steps.
        stride: steps from one window to the next. None is ``length``, or 1 with ``steps``.
        pad: None keeps only windows that lie inside their segment. "edge" repeats the segment's first or last step and
            "zeros" fills with zeros, so that each step of a segment has a window.
        mask: add ``"<field>_valid"`` to each sample, a dict: True for steps of the segment, False for padding.
        random: draw new windows in each epoch, uniformly over the segment; their number is the same as with ``stride``.
    """

    shorthand = "a number of steps, [start, stop] such as [-1, 3]"

    length: int | None = None
    steps: Any = None
    stride: int | None = None
    pad: Literal["edge", "zeros"] | None = None
    mask: bool = False
    random: bool = False

    def __post_init__(self) -> None:
        check_whole(self.length, "window.length", 1)
        check_whole(self.stride, "window.stride", 1)
        check_choice(self.pad, "window.pad", (None, "edge", "zeros"))
        if (self.length is None) == (self.steps is None):
            count = "both were" if self.length is not None else "none was"
            raise H5ValueError(f"a window needs either length or steps, and {count} given. Pass one of them.")
        for steps in self.steps.values() if isinstance(self.steps, Mapping) else [self.steps]:
            if steps is not None:
                _range_of(steps)

    @classmethod
    def _is_mapping_of_fields(cls, value: Mapping[Any, Any]) -> bool:
        return set(value) <= {field.name for field in fields(cls)}

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"length": value}
        return {"steps": value} if isinstance(value, Mapping | list | tuple) else None

    @property
    def n_between(self) -> int:
        """Steps from one window to the next."""
        return self.stride or self.length or 1

    def range_of(self, name: str, key: str, rate: int = 1) -> StepRange:
        """Return the steps of a field: its own entry of ``steps``, or the steps that all fields share.

        Args:
            name: the field's name in a sample.
            key: the field's array.
            rate: see ``SegmentOptions.steps_per``.

        Raises:
            H5ValueError: ``steps`` is a mapping without this field.
        """
        if self.length is not None:
            return StepRange(0, self.length).at_rate(rate)
        if not isinstance(self.steps, Mapping):
            return _range_of(self.steps).at_rate(rate)
        steps = value_of_field(self.steps, name, key, default=None)
        if steps is None:
            raise H5ValueError(
                f"window.steps has no entry for the field {name!r}; it names {listing(self.steps)}. Add an entry for "
                "each field except segments.constants, by name or by a pattern such as 'observations/*'."
            )
        return _range_of(steps)


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class PatchOptions(Options):
    """How patches are cut from volumes; each patch is a sample. Each segment is a volume: a file by default.

    Args:
        shape: size of a patch along each axis of the volume, starting at axis 0 (``segments.axis``, and axes that
            ``select`` reduces to one index, do not count). None is a whole axis, such as the channels. A mapping from
            fields or patterns to shapes if fields have different axes. All fields are cut at the same position.
        stride: distance from one patch to the next along the axes that are cut: one number for all axes, or a list
            with a number per axis. None is the size of a patch.
        random: number of patches to draw from each volume in each epoch, uniformly, instead of a grid.
        border: the last patch of an axis is moved back inside the volume ("shift"), left out ("drop"), or filled with
            zeros beyond the edge ("pad"). Volumes smaller than a patch have no sample, unless they are padded.
    """

    shape: Any
    stride: Any = None
    random: int | None = None
    border: Literal["shift", "drop", "pad"] = "shift"

    def __post_init__(self) -> None:
        shapes = list(self.shape.values()) if isinstance(self.shape, Mapping) else [self.shape]
        if not shapes or not all(_are_sizes(shape) for shape in shapes):
            raise H5ValueError(
                f"patch.shape={self.shape!r} was given. Pass a size for each axis of a volume, None for a whole axis, "
                "such as [32, 64, 64], or a mapping from fields to such lists."
            )
        check_whole(self.random, "patch.random", 1)
        check_choice(self.border, "patch.border", ("shift", "drop", "pad"))
        sizes = {cut for shape in shapes if (cut := _without_none(shape))}
        if len(sizes) != 1:
            problem = "differ" if sizes else "are None"
            raise H5ValueError(
                f"patch.shape={self.shape!r} was given, of which the sizes {problem}. Fields are cut at the same "
                "position: pass the same sizes for all fields that are cut, and None for other axes."
            )
        if self.stride is not None and self.random is not None:
            raise H5ValueError(
                f"patch.stride={self.stride!r} cannot be combined with patch.random={self.random}: random patches have "
                "no stride. Pass one of them."
            )
        n_axes = len(self.sizes)
        is_list = _are_sizes(self.stride) and len(_without_none(self.stride)) == n_axes
        if self.stride is not None and not is_list and not _are_sizes([self.stride]):
            raise H5ValueError(
                f"patch.stride={self.stride!r} was given, and patches are cut along {n_axes} axes. Pass a whole number "
                f"of at least 1, or {n_axes} of them."
            )

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        if isinstance(value, int) or _are_sizes(value):
            shape = [value] * 3 if isinstance(value, int) else list(value)
            raise H5ValueError(
                f"patch={value!r} was given. Pass patch={{'shape': {shape}}}, with a size for each axis of a volume."
            )
        return None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of a patch along the axes that are cut."""
        shapes = self.shape.values() if isinstance(self.shape, Mapping) else [self.shape]
        return next(cut for shape in shapes if (cut := _without_none(shape)))

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance from one patch to the next along the axes that are cut."""
        if self.stride is None:
            return self.sizes
        return (self.stride,) * len(self.sizes) if isinstance(self.stride, int) else _without_none(self.stride)

    def shape_of(self, name: str, key: str) -> tuple[int | None, ...]:
        """Return the shape of a patch of a field.

        Args:
            name: the field's name in a sample.
            key: the field's array.

        Raises:
            H5ValueError: ``shape`` is a mapping without this field.
        """
        if not isinstance(self.shape, Mapping):
            return tuple(self.shape)
        shape = value_of_field(self.shape, name, key, default=None)
        if shape is None:
            raise H5ValueError(
                f"patch.shape has no entry for the field {name!r}; it names {listing(self.shape)}. Add an entry for "
                "each field except segments.constants, by name or by a pattern such as 'volumes/*'."
            )
        return tuple(shape)


def _are_sizes(value: Any) -> bool:
    """Return whether a value is a list of sizes, with None for whole axes."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    sizes = [size for size in value if size is not None]
    return bool(value) and all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes)


def _without_none(shape: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(size for size in shape if size is not None)


def value_of_field(mapping: Mapping[str, Any], name: str, key: str, default: Any) -> Any:
    """Look up a field in a mapping from names or patterns.

    Args:
        mapping: names take precedence over patterns, and earlier patterns over later ones.
        name: the field's name in a sample.
        key: the field's array.
        default: returned if no entry matches.
    """
    for label in (name, key):
        if label in mapping:
            return mapping[label]
    for pattern, value in mapping.items():
        if fnmatchcase(name, pattern) or fnmatchcase(key, pattern):
            return value
    return default


def _range_of(steps: Any) -> StepRange:
    if isinstance(steps, int) and not isinstance(steps, bool):
        return StepRange(steps, steps + 1, is_single=True)
    is_list = isinstance(steps, Sequence) and not isinstance(steps, str) and 2 <= len(steps) <= 3
    if not is_list or not all(isinstance(number, int) and not isinstance(number, bool) for number in steps):
        raise H5ValueError(
            f"window steps {steps!r} were given. Pass [start, stop] or [start, stop, step] relative to a step, such as "
            "[-1, 3], or a whole number for one step."
        )
    step_range = StepRange(*steps)
    if step_range.step < 1 or step_range.stop <= step_range.start:
        raise H5ValueError(f"window steps {steps!r} are empty. Pass a stop after the start, and a step of 1 or more.")
    return step_range
