"""What a user says of samples: what one is, how each field's axes are seen, and which steps a sample has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import numpy as np

from ..catalog import ArrayRequest, Span
from ..errors import H5ValueError, listing, near
from ..hdf5 import ArrayLayout, is_attribute_key
from ..options import PatchOptions, SegmentOptions, WindowOptions, value_of_field
from ..types import IntArray
from .indexer import MakesIndexer

__all__ = ["SampleKind", "SampleOptions", "SegmentField", "Select", "fields_of", "selected"]

SampleKind: TypeAlias = Literal["row", "window", "segment"]

Select: TypeAlias = Mapping[str, Mapping[int, Any]]
"""For fields, by name or pattern, what is taken of axes."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """What a sample is, as the user says.

    Attributes:
        sample: "row", "window", "segment", or what makes samples of another kind; None follows from the others.
        segments: which steps belong together.
        window: which steps of a segment make a sample; None if no window was given.
        select: what is taken of fields.
        seed: of random windows and patches.
        patch: which part of a segment makes a sample; None if no patch was given.
    """

    sample: SampleKind | MakesIndexer | None
    segments: SegmentOptions
    window: WindowOptions | None
    select: Select
    seed: int = 0
    patch: PatchOptions | None = None

    @classmethod
    def parse(
        cls, sample: Any, segments: Any, window: Any, select: Any, seed: int = 0, patch: Any = None
    ) -> SampleOptions:
        """Return the options that arguments stand for.

        Raises:
            H5ValueError: they make no sense, or not together.
        """
        is_known = sample is None or isinstance(sample, MakesIndexer) or sample in ("row", "window", "segment")
        if not is_known:
            raise H5ValueError(f"sample={sample!r} was given. Pass 'row', 'window', 'segment' or None.")
        made = SegmentOptions.parse(segments, "segments")
        windows = None if window is None else WindowOptions.parse(window, "window")
        if windows is not None and (isinstance(sample, MakesIndexer) or sample in ("row", "segment")):
            raise H5ValueError(f"window was given with sample={sample!r}. Pass sample='window', or leave one out.")
        if windows is None and sample == "window":
            raise H5ValueError("sample='window' was given without window. Pass window=200, or window=[-1, 3].")
        patches = None if patch is None else PatchOptions.parse(patch, "patch")
        if patches is not None:
            _check_patches(sample, made, windows)
        return cls(sample=sample, segments=made, window=windows, select=dict(select or {}), seed=seed, patch=patches)

    @property
    def has_mask(self) -> bool:
        """Whether samples have masks of their steps."""
        return self.window is not None and self.window.mask

    @property
    def maker(self) -> MakesIndexer | None:
        """What makes samples of a kind of the user's own."""
        return self.sample if isinstance(self.sample, MakesIndexer) else None

    def kind(self, keys: Sequence[str]) -> SampleKind:
        """Return what a sample of these arrays is, or is made of."""
        if isinstance(self.sample, MakesIndexer):
            return "segment"
        if self.sample is not None:
            return self.sample
        if self.window is not None:
            return "window"
        return "segment" if self.segments.is_given or any("*" in key for key in keys) else "row"

    def are_rows(self, keys: Sequence[str]) -> bool:
        """Whether samples are rows of arrays along axis 0, or parts of these, for all that the user says."""
        is_named = any("*" in key or is_attribute_key(key) for key in keys)
        return self.patch is None and self.kind(keys) == "row" and not (self.segments.is_given or is_named)

    def needs_segments(self, keys: Sequence[str]) -> bool:
        """Whether samples are anything but rows of arrays along axis 0."""
        if self.patch is not None:
            return True
        has_axes = self.segments.step_axis != 0 or bool(self.segments.constants or self.segments.steps_per)
        has_axes = has_axes or self.segments.missing != "error"
        has_segments = self.segments.is_given or any("*" in key or is_attribute_key(key) for key in keys)
        return self.kind(keys) != "row" or has_segments or has_axes


def _check_patches(sample: Any, segments: SegmentOptions, window: WindowOptions | None) -> None:
    """Raise an ``H5ValueError`` if patches were given with options on steps."""
    given = {
        f"sample={sample!r}": sample is not None,
        "window": window is not None,
        **{
            f"segments.{name}": getattr(segments, name) is not None
            for name in ("key", "lengths", "offsets", "ends", "spans")
        },
        "segments.join": segments.join is not None,
        "segments.step_axis": segments.step_axis != 0,
        "segments.steps_per": bool(segments.steps_per),
        "segments.max_length": segments.max_length is not None,
        "segments.bucket": segments.bucket,
    }
    if found := [name for name, is_given in given.items() if is_given]:
        raise H5ValueError(
            f"patch was given with {listing(found)}, which {'is' if len(found) == 1 else 'are'} of samples made of "
            "steps. Pass one of the two; volumes are files, segments.groups, arrays or indices of segments.axis."
        )


@dataclass(frozen=True)
class SegmentField:
    """How the user wants an array to be seen.

    Attributes:
        name: what a sample calls it.
        asked: the array.
        axis: axis of which each index is a segment, as stored; None if there is none.
        step_axis: axis of the steps; None if it has none.
        taken: what is taken of other axes.
        is_single: a sample has the value at its own step, or at the first of its segment.
        patch: shape of a patch, along the axes that are left; None for a field without patches.
        is_whole: all of the array is one row: a scalar with bytes, or the bytes of one image.
        rate: steps of the other fields that one step spans.
    """

    name: str
    asked: ArrayRequest
    axis: int | None
    step_axis: int | None
    taken: Mapping[int, Any]
    is_single: bool = False
    patch: tuple[int | None, ...] | None = None
    is_whole: bool = False
    rate: int = 1

    @property
    def is_as_stored(self) -> bool:
        """Whether rows are those of the array as it is stored."""
        return self.axis is None and self.step_axis == 0 and not (self.taken or self.is_whole)

    def check_axes(self, layout: ArrayLayout) -> None:
        """Check that an array has the axes that were named.

        Raises:
            H5ValueError: it has not, or one of them is named twice.
        """
        n_axes = 1 + len(layout.axes)
        step_axis = self.step_axis if self.patch is None else None
        named = [axis for axis in (self.axis, step_axis, *self.taken) if axis is not None]
        for axis in named:
            if not -n_axes <= axis < n_axes:
                raise H5ValueError(
                    f"axis {axis} of {layout.key!r} was named, which has the shape {(layout.n_rows, *layout.axes)} in "
                    f"{layout.path!r}. Name one of its axes, or None for this field if it has none."
                )
        if len({axis % n_axes for axis in named}) < len(named):
            raise H5ValueError(
                f"segments.axis={self.axis}, segments.step_axis={self.step_axis} and select={dict(self.taken)} name an "
                f"axis of {self.name!r} twice. Name each once"
                f"{', such as step_axis=1' if self.axis == self.step_axis == 0 and n_axes > 1 else ''}."
            )

    def seen(self, layout: ArrayLayout, period: int, n_values: int | None) -> ArrayLayout:
        """Return the array with its steps as rows; without steps, with a row for each segment, or as one row.

        Args:
            layout: the array as it is stored.
            period: steps of the longest array's segments, if segments are along an axis.
            n_values: length of axis 0 of an array with a value for each segment; None if there is none.
        """
        if self.is_whole:
            return self.asked.decoded(layout if layout.is_scalar else layout.seen(()))
        n_axes = 1 + len(layout.axes)
        row_axes = [axis % n_axes for axis in (self.axis, self.step_axis) if axis is not None]
        if not row_axes and layout.n_rows == n_values:
            row_axes = [0]
        taken = {axis % n_axes: _taken_of_axis(one, self.name) for axis, one in self.taken.items()}
        is_shorter = len(row_axes) == 2 and self.length(layout, row_axes[1]) < period
        return self.asked.decoded(layout.seen(row_axes, taken, keeps_axes=is_shorter))

    def indices(self, layout: ArrayLayout) -> list[int | IntArray]:
        """Return what is taken of each axis of an array: an index, or indices.

        Raises:
            H5ValueError: the axis has no such index.
        """
        shape: list[Any] = [np.arange(n) for n in (layout.n_rows, *layout.axes)]
        for axis, one in self.taken.items():
            taken = _taken_of_axis(one, self.name)
            try:
                indices = shape[axis][taken]
            except IndexError:
                raise H5ValueError(
                    f"select takes {one!r} of axis {axis} of {layout.key!r}, which has {len(shape[axis])} indices in "
                    f"{layout.path!r}. Take some of these."
                ) from None
            shape[axis] = int(indices) if isinstance(taken, int) else indices
        return shape

    def length(self, layout: ArrayLayout, axis: int) -> int:
        """Return the length of an axis."""
        return 1 if self.is_whole else (layout.n_rows, *layout.axes)[axis]

    def step_place(self, layout: ArrayLayout) -> int:
        """Return the axis of a sample that its steps are along."""
        if self.step_axis is None:
            return 0
        n_axes = 1 + len(layout.axes)
        step = self.step_axis % n_axes
        gone = [self.axis, *(axis for axis, one in self.taken.items() if isinstance(one, int))]
        return step - sum(axis is not None and axis % n_axes < step for axis in gone)


def _taken_of_axis(given: Any, name: str) -> int | slice | list[int]:
    """Return what a user takes of an axis.

    Raises:
        H5ValueError: it is no index, list of indices or slice.
    """
    if isinstance(given, Mapping) and not set(given) - {"start", "stop", "step"}:
        given = slice(given.get("start"), given.get("stop"), given.get("step"))
    if isinstance(given, slice):
        limits = (given.start, given.stop, given.step)
        if given.step != 0 and all(one is None or type(one) is int for one in limits):
            return given
    elif type(given) is int:
        return given
    elif isinstance(given, Sequence) and not isinstance(given, str) and all(type(one) is int for one in given):
        return list(given)
    raise H5ValueError(
        f"select takes {given!r} of {name!r}. Pass an index, a list of indices, or a slice (a mapping with start, "
        "stop, step)."
    )


def selected(asked: Sequence[ArrayRequest], names: Sequence[str], given: SampleOptions) -> list[ArrayRequest]:
    """Return arrays of which samples are rows along axis 0, with the part of each row that ``select`` takes.

    Args:
        asked: the arrays.
        names: what a sample calls them.
        given: what a sample is.

    Raises:
        H5ValueError: ``select`` names no field, or takes what is no index.
    """
    if not given.select:
        return list(asked)
    _check_names(asked, names, given)
    found = []
    for one, name in zip(asked, names, strict=True):
        taken: list[tuple[int, int | Span | tuple[int, ...]]] = []
        for axis, part in value_of_field(given.select, name, one.key, {}).items():
            checked = _taken_of_axis(part, name)
            if isinstance(checked, slice):
                taken.append((int(axis), Span(checked.start, checked.stop, checked.step)))
            else:
                taken.append((int(axis), tuple(checked) if isinstance(checked, list) else checked))
        found.append(replace(one, selection=tuple(taken)))
    return found


def fields_of(
    asked: Sequence[ArrayRequest],
    names: Sequence[str],
    given: SampleOptions,
    singles: Collection[str] = (),
    is_column: Callable[[str], bool] = lambda _: False,
) -> list[SegmentField]:
    """Return how the arrays are to be seen.

    Args:
        asked: the arrays.
        names: what a sample calls them.
        given: what a sample is.
        singles: names of fields of which a sample has one step.
        is_column: returns whether a name is that of a column of a side table.

    Raises:
        H5ValueError: an option names no field, or no field has steps.
    """
    _check_names(asked, names, given)
    fields, lacking = [], []
    for one, name in zip(asked, names, strict=True):
        axes = []
        for option, default in ((given.segments.axis, None), (given.segments.step_axis, 0)):
            axes.append(value_of_field(option, name, one.key, default) if isinstance(option, Mapping) else option)
        has_no_steps = is_attribute_key(one.key) or is_column(one.key)
        is_constant = bool({name, one.key} & set(given.segments.constants)) or has_no_steps
        taken = value_of_field(given.select, name, one.key, {})
        axis = None if has_no_steps or (is_constant and not isinstance(given.segments.axis, Mapping)) else axes[0]
        step_axis = None if is_constant else axes[1]
        axis_of = given.segments.axis
        if step_axis is not None and isinstance(axis_of, Mapping) and value_of_field(axis_of, name, one.key, "") == "":
            lacking.append(name)
        is_single = name in singles or (given.segments.key is not None and one.key == given.segments.key)
        patch = given.patch.shape_of(name, one.key) if given.patch is not None and step_axis is not None else None
        if patch is not None and one.stacks is not None and one.stacks.axis is not None:
            raise H5ValueError(
                f"{name!r} stacks arrays along axis {one.stacks.axis}, and patches have the new axis last. Leave the "
                "axis of the stack out."
            )
        of_axes = {int(k): v for k, v in taken.items()}
        rate = value_of_field(given.segments.steps_per or {}, name, one.key, 1)
        fields.append(SegmentField(name, one, axis, step_axis, of_axes, is_single, patch, rate=rate))
    if lacking:
        raise H5ValueError(
            f"segments.axis={given.segments.axis!r} has no entry for {listing(lacking)}, whose segments would all be "
            "one. Name the axis of each field with steps, or None for a field without one."
        )
    known = {each for field in fields for each in (field.name, field.asked.key)}
    if unknown := [name for name in given.segments.constants if name not in known]:
        raise H5ValueError(
            f"segments.constants names {listing(unknown)}; the fields are {listing(names)}. Name some of these."
        )
    if all(field.step_axis is None for field in fields):
        attributes = [one.key for one in asked if is_attribute_key(one.key)]
        arrays = f", or write {attributes[0] + '/'!r} for an array of this name" if attributes else ""
        raise H5ValueError(
            f"none of the fields {listing(names)} has steps (segments.step_axis, segments.constants, or an attribute, "
            f"which '@' stands for). Add one{arrays}."
        )
    if all(field.rate > 1 for field in fields if field.step_axis is not None):
        raise H5ValueError(
            f"segments.steps_per={given.segments.steps_per} names all fields that have steps, and counts the steps of "
            "the others. Add a field that it does not name, or leave it out."
        )
    return fields


def _check_names(asked: Sequence[ArrayRequest], names: Sequence[str], given: SampleOptions) -> None:
    """Raise an ``H5ValueError`` if a mapping has a name or a pattern that fits no field."""
    window = None if given.window is None else given.window.steps
    options = {
        "segments.axis": given.segments.axis,
        "segments.step_axis": given.segments.step_axis,
        "segments.steps_per": given.segments.steps_per,
        "select": given.select,
        "window.steps": window,
        "patch.shape": None if given.patch is None else given.patch.shape,
    }
    known = {*names, *(one.key for one in asked)}
    for option, value in options.items():
        if not isinstance(value, Mapping):
            continue
        if unused := [name for name in value if not any(fnmatchcase(one, name) for one in known) and name not in known]:
            settings = ""
            if option == "window.steps":
                settings = f", or settings of a window: {listing(field.name for field in fields(WindowOptions))}"
            raise H5ValueError(
                f"{option} names {listing(unused)}; the fields are {listing(names)}.{near(str(unused[0]), names)} Name "
                f"some of these{settings}."
            )
