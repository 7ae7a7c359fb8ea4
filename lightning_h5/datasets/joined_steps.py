"""Join samples along their steps, with the boundaries of samples that variable-length attention needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

from ..errors import H5ValueError
from ..readers.buffers import BufferPool
from .collate import axis_length, collated

__all__ = ["JoinedField", "Joint", "columns_of", "joined_fields", "sample_ends"]


class Joint(NamedTuple):
    """How the samples of a field are joined.

    Attributes:
        group: fields of one group have the same number of steps in each sample.
        axis: axis of the steps in a sample.
    """

    group: int
    axis: int


class JoinedField(NamedTuple):
    """A field of a batch.

    Attributes:
        value: the samples, joined or stacked.
        joint: how they are joined; None if they are stacked.
        lengths: steps of each sample; empty if they are stacked.
    """

    value: Any
    joint: Joint | None = None
    lengths: tuple[int, ...] = ()


def joined_fields(
    columns: Mapping[str, Any], joints: Mapping[str, Joint | None], buffers: BufferPool | None
) -> dict[str, JoinedField]:
    """Return the fields of a batch, by name.

    Args:
        columns: a tensor or list for each field, with an entry for each sample.
        joints: how to join the samples of each field; None stacks them. A field that a transform added is joined if it
            has the same number of steps along its first axis as the first joined field, and stacked otherwise.
        buffers: provides memory; None allocates it.

    Raises:
        H5ValueError: steps have different shapes.
    """
    first, joint = next(((name, joint) for name in columns if (joint := joints.get(name)) is not None), ("", None))
    lengths = () if joint is None else _lengths(columns[first], joint.axis)
    fields = {}
    for name, column in columns.items():
        if name in joints:
            own = joints[name]
        else:
            own = Joint(joint.group, 0) if joint is not None and _have_lengths(column, lengths) else None
        if own is not None:
            fields[name] = JoinedField(_joined(column, own.axis, buffers), own, _lengths(column, own.axis))
        else:
            fields[name] = JoinedField(collated(column, None) if name in joints else default_collate(list(column)))
    return fields


def sample_ends(fields: Sequence[tuple[str, JoinedField]], counted: Joint | None) -> dict[str, Any]:
    """Return the boundaries of the samples in joined fields, and the length of the longest sample.

    Args:
        fields: fields of a batch with their names.
        counted: the joint of the field that defines the length of a sample.

    Returns:
        ``cu_seqlens``, int32 of shape ``(n_samples + 1,)``, and ``max_seqlen``; also with the name of each field that
        has another number of steps.

    Raises:
        H5ValueError: fields of one group have different numbers of steps in a sample.
    """
    joined = [(name, field.joint.group, field.lengths) for name, field in fields if field.joint is not None]
    group = joined[0][1] if counted is None else counted.group
    main, lengths = next(((name, own) for name, of, own in joined if of == group), (joined[0][0], joined[0][2]))
    ends = _boundaries("", lengths)
    for name, own_group, own_lengths in joined:
        if own_group != group:
            ends |= _boundaries(f"{name}_", own_lengths)
        elif own_lengths != lengths:
            counts = next(pair for pair in zip(lengths, own_lengths, strict=True) if pair[0] != pair[1])
            raise H5ValueError(
                f"{main!r} has {counts[0]:,} steps in a sample and {name!r} has {counts[1]:,}, but both are joined "
                "with the same boundaries. Return fields with the same number of steps from the transform, or pass "
                "collate_fn='list'."
            )
    return ends


def _boundaries(prefix: str, lengths: Sequence[int]) -> dict[str, Any]:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {f"{prefix}cu_seqlens": ends, f"{prefix}max_seqlen": max(lengths, default=0)}


def columns_of(samples: Sequence[Any], names: Sequence[str]) -> tuple[dict[str, Any], Callable[[Sequence[Any]], Any]]:
    """Convert the results of a transform to columns, by name, and return a function that builds a batch from columns.

    Args:
        samples: the results of the transform.
        names: names of the transform's input fields. They are also the names of a tuple's entries, if it has the same
            length; a single value has the first name.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        keys = list(first)
        return {key: [sample[key] for sample in samples] for key in keys}, lambda values: dict(
            zip(keys, values, strict=True)
        )
    if isinstance(first, tuple | list):
        names = names if len(names) == len(first) else [f"{names[0]}[{place}]" for place in range(len(first))]
        return dict(zip(names, map(list, zip(*samples, strict=True)), strict=True)), tuple
    return {names[0]: list(samples)}, lambda values: values[0]


def boundaries(lengths: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Return the boundaries of joined samples (int32) from their lengths, and the largest length."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32)
    return ends.cumsum(0, dtype=torch.int32), max(lengths, default=0)


def _lengths(column: Any, axis: int) -> tuple[int, ...]:
    return tuple(axis_length(value, axis) for value in column)


def _have_lengths(column: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Return whether values are tensors with the given numbers of steps along their first axis."""
    return all(
        isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == length
        for value, length in zip(column, lengths, strict=True)
    )


def _joined(column: Any, axis: int, buffers: BufferPool | None) -> Any:
    """Return the samples of a column joined along an axis of a sample."""
    if isinstance(column, torch.Tensor):
        axis = axis if axis < column.ndim - 1 else 0
        return column.movedim(0, axis).flatten(axis, axis + 1)
    if column and all(isinstance(value, list) for value in column):  # text of each step
        return [step for value in column for step in value]
    if not column or not all(isinstance(value, torch.Tensor) and value.ndim for value in column):
        return list(column)
    axis = axis if axis < min(value.ndim for value in column) else 0
    shapes = {(*value.shape[:axis], *value.shape[axis + 1 :]) for value in column}
    if len(shapes) > 1:
        raise H5ValueError(
            f"the samples of a batch have steps of the shapes {', '.join(map(str, sorted(shapes)[:3]))}, which cannot "
            "be joined. Pass collate_fn='pad' or 'list', or crop steps to one shape in a transform."
        )
    n_steps = sum(value.shape[axis] for value in column)
    shape = (*column[0].shape[:axis], n_steps, *column[0].shape[axis + 1 :])
    is_pooled = buffers is not None and 0 not in shape and all(value.device.type == "cpu" for value in column)
    batch = buffers.tensor(shape, column[0].dtype) if buffers is not None and is_pooled else column[0].new_empty(shape)
    start = 0
    for value in column:
        batch.narrow(axis, start, value.shape[axis]).copy_(value)
        start += value.shape[axis]
    return batch
