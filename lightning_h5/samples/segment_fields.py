"""Parsed sample options: the kind of sample, the axes of each field, and the selected steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from ..catalog import ArrayRequest, Span
from ..errors import H5ValueError, listing, near, short_repr
from ..hdf5 import ArrayLayout, is_attribute_key
from ..options import PatchOptions, SegmentOptions, WindowOptions, value_of_field
from ..types import IntArray
from .indexer import Indexer
from .segments import Segments

__all__ = ["MakesIndexer", "SampleKind", "SampleOptions", "SegmentField", "Select", "fields_of", "selected"]

SampleKind: TypeAlias = Literal["row", "window", "segment"]

Select: TypeAlias = Mapping[str, Mapping[int, Any]]
"""The selection along each axis of a field, by the field's name or pattern."""


@runtime_checkable
class MakesIndexer(Protocol):
    """A custom kind of sample, passed as ``sample``.

    Its ``repr`` must be unique to its settings: opened files are reused by it.
    """

    def indexer(self, segments: Segments, fields: Sequence[SegmentField]) -> Indexer:
        """Return the samples of segments.

        Args:
            segments: the segments of the files.
            fields: the fields with their axes.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The options that define a sample.

    Attributes:
        sample: "row", "window", "segment", or a custom kind of sample; None derives it from the other options.
        segments: the options that divide steps into segments.
        window: the steps of a window; None without windows.
        select: the selection along axes of fields.
        seed: seed of random windows and patches.
        patch: the shape of a patch; None without patches.
    """

    sample: SampleKind | MakesIndexer | None
    segments: SegmentOptions
    window: WindowOptions | None
    select: Select
    seed: int = 0
    patch: PatchOptions | None = None

    @classmethod
    def parse(
        cls,
        sample: Any,
        segments: Any,
        window: Any,
        select: Any,
        seed: int = 0,
        patch: Any = None,
        *,
        makes_batches: bool = True,
    ) -> SampleOptions:
        """Parse the arguments of a dataset or data module.

        Args:
            sample: see the attributes.
            segments: see the attributes.
            window: see the attributes.
            select: see the attributes.
            seed: see the attributes.
            patch: see the attributes.
            makes_batches: whether the caller decides which samples share a batch; a dataset does not.

        Raises:
            H5ValueError: an argument is invalid, or conflicts with another one.
        """
        is_known = sample is None or isinstance(sample, MakesIndexer) or sample in ("row", "window", "segment")
        if not is_known:
            raise H5ValueError(f"sample={sample!r} was given. Pass 'row', 'window', 'segment' or None.")
        segment_options = SegmentOptions.parse(segments, "segments")
        if segment_options.max_tokens is not None and not makes_batches:
            raise H5ValueError(
                f"segments.max_tokens={segment_options.max_tokens} was given to a dataset, but loaders decide which "
                "samples share a batch. Pass it to a data module; after setup(), its train_dataloader() works in any "
                "loop."
            )
        window_options = None if window is None else WindowOptions.parse(window, "window")
        if window_options is not None and (isinstance(sample, MakesIndexer) or sample in ("row", "segment")):
            raise H5ValueError(f"window was given with sample={sample!r}. Pass sample='window', or leave one out.")
        if window_options is None and sample == "window":
            raise H5ValueError("sample='window' was given without window. Pass window=200, or window=[-1, 3].")
        patch_options = None if patch is None else PatchOptions.parse(patch, "patch")
        if patch_options is not None:
            _check_patches(sample, segment_options, window_options)
        return cls(
            sample=sample,
            segments=segment_options,
            window=window_options,
            select=_checked_select(select),
            seed=seed,
            patch=patch_options,
        )

    @property
    def has_mask(self) -> bool:
        """Whether samples have masks of their steps."""
        return self.window is not None and self.window.mask

    @property
    def maker(self) -> MakesIndexer | None:
        """The custom kind of sample; None for the kinds of this package."""
        return self.sample if isinstance(self.sample, MakesIndexer) else None

    def kind(self, keys: Sequence[str]) -> SampleKind:
        """Return the kind of sample of these arrays."""
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
        has_axes = has_axes or self.segments.bucket or self.segments.max_length is not None  # of segments alone
        has_segments = self.segments.is_given or any("*" in key or is_attribute_key(key) for key in keys)
        return self.kind(keys) != "row" or has_segments or has_axes


def _check_patches(sample: Any, segments: SegmentOptions, window: WindowOptions | None) -> None:
    """Raise an ``H5ValueError`` if patches were given with options on steps."""
    is_given = {
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
        "segments.max_tokens": segments.max_tokens is not None,
    }
    if conflicts := [name for name in is_given if is_given[name]]:
        raise H5ValueError(
            f"patch was given with {listing(conflicts)}, which {'applies' if len(conflicts) == 1 else 'apply'} to "
            "samples made of steps. Pass one of the two; volumes are files, segments.groups, arrays or indices of "
            "segments.axis."
        )


@dataclass(frozen=True)
class SegmentField:
    """One field, with the meaning of its axes.

    Attributes:
        name: name of the field in a sample.
        request: the array.
        axis: stored axis of which each index is a segment; None if there is none.
        step_axis: axis of the steps; None without steps.
        selection: the selection along other axes.
        is_single: a sample has the value of one step: its own, or the first of its segment.
        patch: shape of a patch along the remaining axes; None for a field without patches.
        is_whole: the whole array is one row: a scalar with bytes, or the bytes of one image.
        rate: number of steps of the other fields per step of this one.
    """

    name: str
    request: ArrayRequest
    axis: int | None
    step_axis: int | None
    selection: Mapping[int, Any]
    is_single: bool = False
    patch: tuple[int | None, ...] | None = None
    is_whole: bool = False
    rate: int = 1

    @property
    def is_as_stored(self) -> bool:
        """Whether rows are indices along axis 0 of the stored array."""
        return self.axis is None and self.step_axis == 0 and not (self.selection or self.is_whole)

    def check_axes(self, layout: ArrayLayout) -> None:
        """Check that an array has the named axes.

        Raises:
            H5ValueError: an axis does not exist, or is named twice.
        """
        n_axes = 1 + len(layout.axes)
        step_axis = self.step_axis if self.patch is None else None
        axes = [axis for axis in (self.axis, step_axis, *self.selection) if axis is not None]
        for axis in axes:
            if not -n_axes <= axis < n_axes:
                raise H5ValueError(
                    f"axis {axis} of {layout.key!r} was named, but it has the shape {(layout.n_rows, *layout.axes)} in "
                    f"{layout.path!r}. Name one of its axes, or None for this field if it has none."
                )
        if len({axis % n_axes for axis in axes}) < len(axes):
            raise H5ValueError(
                f"segments.axis={self.axis}, segments.step_axis={self.step_axis} and select={dict(self.selection)} "
                f"name an axis of {self.name!r} twice. Name each once"
                f"{', such as step_axis=1' if self.axis == self.step_axis == 0 and n_axes > 1 else ''}."
            )

    def seen(self, layout: ArrayLayout, period: int, n_values: int | None) -> ArrayLayout:
        """Return the array with its steps as rows; without steps, with a row for each segment, or as one row.

        Args:
            layout: the stored array.
            period: number of steps per segment of the longest array, if segments are along an axis.
            n_values: length of axis 0 of an array with one value per segment; None if there is none.
        """
        if self.is_whole:
            return self.request.decoded(layout if layout.is_scalar else layout.seen(()))
        n_axes = 1 + len(layout.axes)
        row_axes = [axis % n_axes for axis in (self.axis, self.step_axis) if axis is not None]
        if not row_axes and layout.n_rows == n_values:
            row_axes = [0]
        selection = {axis % n_axes: _checked_index(index, self.name) for axis, index in self.selection.items()}
        is_shorter = len(row_axes) == 2 and self.length(layout, row_axes[1]) < period
        return self.request.decoded(layout.seen(row_axes, selection, keeps_axes=is_shorter))

    def indices(self, layout: ArrayLayout) -> list[int | IntArray]:
        """Return the selected index, or indices, of each axis of an array.

        Raises:
            H5ValueError: the axis has no such index.
        """
        indices: list[Any] = [np.arange(n) for n in (layout.n_rows, *layout.axes)]
        for axis, selection in self.selection.items():
            index = _checked_index(selection, self.name)
            try:
                selected_indices = indices[axis][index]
            except IndexError:
                raise H5ValueError(
                    f"select takes {selection!r} of axis {axis} of {layout.key!r}, which has {len(indices[axis])} "
                    f"indices in {layout.path!r}. Pass indices below that."
                ) from None
            indices[axis] = int(selected_indices) if isinstance(index, int) else selected_indices
        return indices

    def length(self, layout: ArrayLayout, axis: int) -> int:
        """Return the length of an axis."""
        return 1 if self.is_whole else (layout.n_rows, *layout.axes)[axis]

    def step_place(self, layout: ArrayLayout) -> int:
        """Return the axis of the steps in a sample."""
        if self.step_axis is None:
            return 0
        n_axes = 1 + len(layout.axes)
        step = self.step_axis % n_axes
        dropped_axes = [self.axis, *(axis for axis, index in self.selection.items() if isinstance(index, int))]
        return step - sum(axis is not None and axis % n_axes < step for axis in dropped_axes)


def _checked_select(select: Any) -> dict[str, dict[int, Any]]:
    """Return the argument ``select`` with numbers of axes as integers: keys of a configuration may be text.

    Raises:
        H5ValueError: the argument is not a mapping from fields to axes.
    """
    if select is None:
        return {}
    if not isinstance(select, Mapping):
        raise H5ValueError(
            f"select={short_repr(select)} was given. Pass a mapping from fields to axes, such as "
            "select={'image': {1: [0, 2]}}."
        )
    checked = {}
    for name, axes in select.items():
        if not isinstance(axes, Mapping) or not all(re.fullmatch(r"-?\d+", str(axis)) for axis in axes):
            raise H5ValueError(
                f"select={{{name!r}: {short_repr(axes)}}} was given. Pass a mapping from the stored axis to the "
                f"selected indices, such as select={{{name!r}: {{1: [0, 2]}}}}."
            )
        checked[name] = {int(axis): part for axis, part in axes.items()}
    return checked


def _checked_index(selection: Any, name: str) -> int | slice | list[int]:
    """Return the index, indices or slice that is selected along an axis of a field.

    Raises:
        H5ValueError: the selection is not an index, a list of indices or a slice.
    """
    index = selection
    if isinstance(index, Mapping) and not set(index) - {"start", "stop", "step"}:
        index = slice(index.get("start"), index.get("stop"), index.get("step"))
    if isinstance(index, slice):
        bounds = (index.start, index.stop, index.step)
        if index.step != 0 and all(bound is None or type(bound) is int for bound in bounds):
            return index
    elif type(index) is int:
        return index
    elif isinstance(index, Sequence) and index and all(type(number) is int for number in index):
        return list(index)
    raise H5ValueError(
        f"select takes {index!r} of {name!r}. Pass an index, a list of indices, or a slice (a mapping with start, "
        "stop, step)."
    )


def selected(requests: Sequence[ArrayRequest], names: Sequence[str], options: SampleOptions) -> list[ArrayRequest]:
    """Return the arrays with the part of each row that ``select`` names; samples are rows along axis 0.

    Args:
        requests: the arrays.
        names: names of the fields in a sample.
        options: the options that define a sample.

    Raises:
        H5ValueError: ``select`` names no field, or has an invalid index.
    """
    if not options.select:
        return list(requests)
    _check_names(requests, names, options)
    return [
        replace(
            request,
            selection=tuple(
                (axis, _hashable(_checked_index(selection, name)))
                for axis, selection in value_of_field(options.select, name, request.key, {}).items()
            ),
        )
        for request, name in zip(requests, names, strict=True)
    ]


def _hashable(index: int | slice | list[int]) -> int | Span | tuple[int, ...]:
    if isinstance(index, slice):
        return Span(index.start, index.stop, index.step)
    return tuple(index) if isinstance(index, list) else index


def fields_of(
    requests: Sequence[ArrayRequest],
    names: Sequence[str],
    options: SampleOptions,
    singles: Collection[str] = (),
    is_column: Callable[[str], bool] = lambda _: False,
) -> list[SegmentField]:
    """Return the fields with the meaning of their axes.

    Args:
        requests: the arrays.
        names: names of the fields in a sample.
        options: the options that define a sample.
        singles: names of fields with one step per sample.
        is_column: returns whether a name is a column of a side table.

    Raises:
        H5ValueError: an option names no field, or no field has steps.
    """
    _check_names(requests, names, options)
    segments = options.segments
    fields = [
        _field_of(
            request,
            name,
            options,
            is_single=name in singles,
            has_axes=not (is_attribute_key(request.key) or is_column(request.key)),
        )
        for request, name in zip(requests, names, strict=True)
    ]
    if isinstance(axes := segments.axis, Mapping):
        with_steps = [field for field in fields if field.step_axis is not None]
        absent = [field.name for field in with_steps if value_of_field(axes, field.name, field.request.key, "") == ""]
        if absent:
            raise H5ValueError(
                f"segments.axis={axes!r} has no entry for {listing(absent)}, whose segments would be joined. Name "
                "the axis of each field with steps, or None for a field without one."
            )
    labels = {*names, *(request.key for request in requests)}
    if unknown := [name for name in segments.constants if name not in labels]:
        raise H5ValueError(
            f"segments.constants names {listing(unknown)}; the fields are {listing(names)}. Name some of these."
        )
    if all(field.step_axis is None for field in fields):
        attributes = [request.key for request in requests if is_attribute_key(request.key)]
        arrays = f", or write {attributes[0] + '/'!r} for an array of this name" if attributes else ""
        raise H5ValueError(
            f"none of the fields {listing(names)} has steps (segments.step_axis, segments.constants, or an attribute, "
            f"which '@' stands for). Add one{arrays}."
        )
    if all(field.rate > 1 for field in fields if field.step_axis is not None):
        raise H5ValueError(
            f"segments.steps_per={segments.steps_per} names all fields that have steps, and counts the steps of "
            "the others. Add a field that it does not name, or leave it out."
        )
    return fields


def _field_of(
    request: ArrayRequest, name: str, options: SampleOptions, *, is_single: bool, has_axes: bool
) -> SegmentField:
    """Return a field with the meaning of its axes.

    Args:
        request: the array.
        name: name of the field in a sample.
        options: the options that define a sample.
        is_single: a sample has the value of one step.
        has_axes: the field is an array, not an attribute or a column.
    """
    segments, key = options.segments, request.key

    def axis_of(option: Any, default: int | None) -> Any:
        return value_of_field(option, name, key, default) if isinstance(option, Mapping) else option

    is_constant = not has_axes or bool({name, key} & set(segments.constants))
    is_axis_named = has_axes and (isinstance(segments.axis, Mapping) or not is_constant)
    axis = axis_of(segments.axis, None) if is_axis_named else None
    step_axis = None if is_constant else axis_of(segments.step_axis, 0)
    patch = None if options.patch is None or step_axis is None else options.patch.shape_of(name, key)
    if patch is not None and request.stacks is not None and request.stacks.axis is not None:
        raise H5ValueError(
            f"{name!r} stacks arrays along axis {request.stacks.axis}, but patches have the new axis last. Leave the "
            "axis of the stack out."
        )
    return SegmentField(
        name,
        request,
        axis,
        step_axis,
        dict(value_of_field(options.select, name, key, {})),
        is_single or (segments.key is not None and key == segments.key),
        patch,
        rate=value_of_field(segments.steps_per or {}, name, key, 1),
    )


def _check_names(requests: Sequence[ArrayRequest], names: Sequence[str], options: SampleOptions) -> None:
    """Raise an ``H5ValueError`` if a mapping has a name or a pattern that fits no field."""
    values = {
        "segments.axis": options.segments.axis,
        "segments.step_axis": options.segments.step_axis,
        "segments.steps_per": options.segments.steps_per,
        "select": options.select,
        "window.steps": None if options.window is None else options.window.steps,
        "patch.shape": None if options.patch is None else options.patch.shape,
    }
    labels = {*names, *(request.key for request in requests)}
    for option, value in values.items():
        if not isinstance(value, Mapping):
            continue
        unused = [
            pattern
            for pattern in value
            if pattern not in labels and not any(fnmatchcase(label, pattern) for label in labels)
        ]
        if unused:
            settings = ""
            if option == "window.steps":
                settings = f", or settings of a window: {listing(field.name for field in fields(WindowOptions))}"
            raise H5ValueError(
                f"{option} names {listing(unused)}; the fields are {listing(names)}.{near(str(unused[0]), names)} Name "
                f"some of these{settings}."
            )
