"""Collate samples to a batch: stack or pad them, or return a list; ``joined_steps`` joins them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import default_collate

from ..errors import H5ValueError
from ..readers.buffers import BufferPool, stacked

__all__ = ["Collate", "axis_length", "collated", "collated_samples", "of_one"]

Collate: TypeAlias = Literal["stack", "pad", "list", "pack"]
"""How to batch samples: stack equal shapes, pad with zeros to the longest, return a list, or join their steps."""


def collated(values: Any, how: Collate | None, buffers: BufferPool | None = None) -> Any:
    """Return one field of a batch.

    Args:
        values: a tensor with an entry for each sample, or a list with one value for each sample.
        how: how to batch the tensors of a list; None stacks them.
        buffers: provides memory for padded batches; None allocates it.

    Raises:
        H5ValueError: tensors to stack have different shapes.
    """
    if isinstance(values, torch.Tensor):
        return list(values) if how == "list" else values
    if how == "list" or not values:
        return values
    if any(isinstance(value, list) and value and isinstance(value[0], torch.Tensor) for value in values):
        raise H5ValueError(
            "samples have several rows each, with different shapes, which cannot be stacked. Pass "
            "collate_fn='list', use rows as samples (sample='row'), or decode rows to one shape (decode)."
        )
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    shapes = list(dict.fromkeys(tuple(value.shape) for value in values))
    if len(shapes) == 1:
        return stacked(values)
    if how != "pad" or len({len(shape) for shape in shapes}) > 1:
        raise H5ValueError(
            f"the samples of a batch have the shapes {', '.join(map(str, shapes[:3]))}{', ...' if shapes[3:] else ''}, "
            "which cannot be stacked. Pass collate_fn='pad' (zeros up to the longest, and 'length'), 'pack' or 'list', "
            "or crop samples to one shape in a transform."
        )
    shape = (len(values), *(max(sizes) for sizes in zip(*shapes, strict=True)))
    if buffers is None or values[0].device.type != "cpu" or 0 in shape:
        batch = values[0].new_empty(shape)
    else:
        batch = buffers.tensor(shape, values[0].dtype)
    for place, value in zip(batch, values, strict=True):
        place[tuple(map(slice, value.shape))] = value
        for axis, size in enumerate(value.shape):  # zeros beyond the value, each written once
            place[(*map(slice, value.shape[:axis]), slice(size, None))] = 0
    return batch


def of_one(column: Any, how: Collate | None) -> Any:
    """Return the only sample of a batch of one without a copy, since samples can be large."""
    if how != "list" and isinstance(column, list) and len(column) == 1 and isinstance(column[0], torch.Tensor):
        return column[0].unsqueeze(0)
    return column


def collated_samples(samples: Sequence[Any], how: Collate | None, buffers: BufferPool | None = None) -> Any:
    """Return a batch of samples, or of parts of samples, of any structure (see ``collated``)."""
    first = samples[0]
    if how is None:
        return default_collate(list(samples))
    if isinstance(first, Mapping):
        return {name: collated_samples([sample[name] for sample in samples], how, buffers) for name in first}
    if isinstance(first, list) and all(isinstance(value, str) for sample in samples for value in sample):
        return list(samples)  # text of each step
    if isinstance(first, tuple | list):
        return tuple(collated_samples(values, how, buffers) for values in zip(*samples, strict=True))
    if isinstance(first, torch.Tensor):
        return collated(list(samples), how, buffers)
    return default_collate(list(samples))


def axis_length(value: Any, axis: int) -> int:
    """Return the length of an axis of a sample's tensor; of axis 0 if a transform removed the axis."""
    if isinstance(value, torch.Tensor):
        return value.shape[axis if axis < value.ndim else 0] if value.ndim else 1
    return len(value) if hasattr(value, "__len__") else 1
