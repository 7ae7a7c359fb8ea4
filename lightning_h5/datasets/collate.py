"""Batches of samples that may have several shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import default_collate

from ..errors import H5ValueError

__all__ = ["Collate", "collated", "collated_samples", "length_of", "stacked"]

Collate: TypeAlias = Literal["stack", "pad", "list"]
"""How tensors of the samples of a batch become one: of one shape, padded with zeros to the longest, or as a list."""


def collated(values: Any, how: Collate | None) -> Any:
    """Return one field of a batch.

    Args:
        values: a tensor with an entry for each sample, or a list of these.
        how: what becomes of the tensors of a list; None stacks them.

    Raises:
        H5ValueError: tensors have several shapes, and are to be stacked.
    """
    if isinstance(values, torch.Tensor):
        return list(values) if how == "list" else values
    if how == "list" or not values or not all(isinstance(value, torch.Tensor) for value in values):
        return values
    shapes = list(dict.fromkeys(tuple(value.shape) for value in values))
    if len(shapes) == 1:
        return stacked(values)
    if how != "pad" or len({len(shape) for shape in shapes}) > 1:
        raise H5ValueError(
            f"the samples of a batch have the shapes {', '.join(map(str, shapes[:3]))}{', ...' if shapes[3:] else ''}, "
            "which cannot be stacked. Pass collate_fn='pad' (zeros up to the longest, and 'length') or 'list', or crop "
            "samples to one shape in a transform."
        )
    batch = values[0].new_zeros((len(values), *(max(sizes) for sizes in zip(*shapes, strict=True))))
    for place, value in zip(batch, values, strict=True):
        place[tuple(map(slice, value.shape))] = value
    return batch


def stacked(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors of one shape as one; images with their channels last in memory as a batch of such."""
    if values[0].ndim == 3 and not values[0].is_contiguous():
        moved = [value.movedim(0, -1) for value in values]
        if all(value.is_contiguous() for value in moved):
            return torch.stack(moved).movedim(-1, 1)
    return torch.stack(list(values))


def collated_samples(samples: Sequence[Any], how: Collate | None) -> Any:
    """Return a batch of samples, or of parts of samples, of any structure; see ``collated``."""
    first = samples[0]
    if how is None:
        return default_collate(list(samples))
    if isinstance(first, Mapping):
        return {name: collated_samples([sample[name] for sample in samples], how) for name in first}
    if isinstance(first, list) and all(isinstance(value, str) for sample in samples for value in sample):
        return list(samples)  # text of each step
    if isinstance(first, tuple | list):
        return tuple(collated_samples(values, how) for values in zip(*samples, strict=True))
    if isinstance(first, torch.Tensor):
        return collated(list(samples), how)
    return default_collate(list(samples))


def length_of(value: Any, axis: int) -> int:
    """Return the length of an axis of a sample's tensor; of axis 0 if a transform took the axis away."""
    if isinstance(value, torch.Tensor):
        return value.shape[axis if axis < value.ndim else 0] if value.ndim else 1
    return len(value) if hasattr(value, "__len__") else 1
