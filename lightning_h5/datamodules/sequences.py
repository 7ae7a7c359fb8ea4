"""Whole segments as samples: which rows belong together, and their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from ..datasets import CombinedHDF5Dataset, SequenceDataset, Sequences
from ..errors import H5ValueError
from ..loading.choose_order import Order
from ..options import SegmentOptions, SplitOptions
from ..order import LengthRecipe

__all__ = ["check_segments", "segment_dataset", "segment_order"]


def check_segments(segments: SegmentOptions, split: SplitOptions, *, mixes: bool, weighs: bool) -> None:
    """Raise an ``H5ValueError`` if segments are combined with what would divide them.

    Args:
        segments: what makes a segment.
        split: how the training files are split.
        mixes: whether there is a mixture of sources.
        weighs: whether rows are weighted.
    """
    if segments.key is None:
        return
    if mixes or weighs:
        raise H5ValueError(
            f"segments.key={segments.key!r} was given with a mixture of sources or with weights, which are of single "
            "rows. Leave them out."
        )
    if split.is_given and split.group_key != segments.key:
        raise H5ValueError(
            f"segments.key={segments.key!r} and split.group_key={split.group_key!r}: splits would divide segments. "
            f"Pass split.group_key={segments.key!r}."
        )


def segment_dataset(
    rows: CombinedHDF5Dataset, segments: SegmentOptions, column: Callable[[str, str], npt.NDArray[Any]]
) -> SequenceDataset:
    """Return the segments that rows belong to.

    Args:
        rows: the rows.
        segments: what makes a segment; its key is not None.
        column: gets an array, and the argument that names it; returns its values, one a row.

    Raises:
        H5ValueError: a value is missing.
    """
    assert segments.key is not None, "no segments were asked for"
    order = None if segments.sort_key is None else column(segments.sort_key, "segments.sort_key")
    if order is not None and order.dtype.kind not in "biuf":
        raise H5ValueError(
            f"segments.sort_key={segments.sort_key!r} has values of {order.dtype}. Name an array with one number a row."
        )
    made = Sequences.of(column(segments.key, "segments.key"), order, names=(segments.key, segments.sort_key))
    return SequenceDataset(rows, made, segments.key)


def segment_order(order: Order, dataset: SequenceDataset, segments: SegmentOptions) -> Order:
    """Return the order of epochs of a dataset's segments, in batches of similar lengths if these are wanted."""
    if not segments.bucket or order.mode == "none":
        return order
    order_inside = "in storage order" if segments.sort_key is None else f"sorted by {segments.sort_key!r}"
    text = f"{len(dataset):,} sequences of {segments.key!r}, {order_inside}, by length"
    return order._replace(recipe=LengthRecipe(dataset.lengths, dataset.blocks(), text))
