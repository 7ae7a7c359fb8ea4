"""The rows of training: some more often than others, or whole segments as samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..datasets import CombinedHDF5Dataset, MixtureDataset, RowDataset, SequenceDataset, Sequences
from ..errors import H5ValueError, listing
from ..loading.choose_order import Order
from ..options import SegmentOptions, SplitOptions, WeightOptions
from ..order import LengthRecipe, RowWeights

DEFAULT, OF_ROWS = SegmentOptions(), ("key", "sort_key", "bucket")

__all__ = ["check_segments", "row_weights", "segment_dataset", "segment_order", "weights_of"]


def row_weights(options: WeightOptions, column: Callable[[str, str], npt.NDArray[Any]]) -> RowWeights:
    """Return the weights of a dataset's rows.

    Args:
        options: what weights follow from.
        column: returns the values of an array, one a row; also gets the argument that names it.

    Raises:
        H5ValueError: they are missing, negative, all 0, or of classes that are not there.
    """
    if options.weight_key is not None:
        values = column(options.weight_key, "weight_key")
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise H5ValueError(
                f"weight_key={options.weight_key!r} has values of {values.dtype}, shape {values.shape}. Name an array "
                "with one number per row."
            )
        return RowWeights(values.astype(np.float64), f"by {options.weight_key!r}")
    labels = column(options.keys[0], "balance_key")
    if labels.ndim != 1 or (labels.dtype.kind == "f" and np.isnan(labels).any()):
        raise H5ValueError(
            f"balance_key={options.balance_key!r} has values of shape {labels.shape}, or rows without one (NaN). Name "
            "an array with one class per row."
        )
    classes, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    wanted = _class_weights(options, classes)
    text = f"by class of {options.balance_key!r}, {_classes_text(classes, wanted)}"
    return RowWeights((wanted / counts)[codes], text)


def _class_weights(options: WeightOptions, classes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    if options.class_weights is None:
        return np.ones(len(classes))
    is_number = classes.dtype.kind in "biuf"
    there = [_plain(value, is_number=is_number) for value in classes.tolist()]
    given = {_plain(name, is_number=is_number): weight for name, weight in options.class_weights.items()}
    if given.keys() != set(there) or len(given) != len(options.class_weights):
        raise H5ValueError(
            f"class_weights names {listing(options.class_weights)}; the classes of {options.balance_key!r} are "
            f"{listing(there)}. Name each once; 0 leaves one out."
        )
    return np.array([given[name] for name in there], dtype=np.float64)


def _classes_text(classes: npt.NDArray[Any], wanted: npt.NDArray[np.float64]) -> str:
    if len(classes) > 12:
        return f"{len(classes)} classes"
    return ", ".join(f"{name}: {weight:g}" for name, weight in zip(classes.tolist(), wanted.tolist(), strict=True))


def _plain(name: Any, *, is_number: bool) -> Any:
    """A class so that all ways to write it are equal, as 1, 1.0 and True are: keys of a configuration may be text."""
    if not is_number:
        return str(name)
    if not isinstance(name, str):
        return name
    text = {"true": "1", "false": "0"}.get(name.lower(), name)
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def weights_of(dataset: RowDataset) -> RowWeights | None:
    """Return how often each row of a dataset is drawn in training; None for once each."""
    return dataset.weights if isinstance(dataset, MixtureDataset) else None


def check_segments(segments: SegmentOptions, split: SplitOptions, *, mixes: bool, weighs: bool) -> None:
    """Raise an ``H5ValueError`` if other arguments would divide segments.

    Args:
        segments: what makes a segment.
        split: how the training files are split.
        mixes: whether there is a mixture of sources.
        weighs: whether rows are weighted.
    """
    later = [
        name
        for name, value in vars(segments).items()
        if name not in OF_ROWS and value not in (getattr(DEFAULT, name), [])
    ]
    if later:
        raise H5ValueError(
            f"segments was given with {listing(later)}, which CombinedHDF5DataModule does not have yet; it has "
            f"{listing(OF_ROWS)}. Use LazyH5DataModule or RankCachedH5DataModule."
        )
    if of_segments := [name for name in ("key", "group_pattern") if getattr(split, name) is not None]:
        raise H5ValueError(
            f"split.{of_segments[0]} was given, which CombinedHDF5DataModule does not have yet. Use LazyH5DataModule "
            "or RankCachedH5DataModule."
        )
    if segments.key is None:
        return
    if mixes or weighs:
        raise H5ValueError(
            f"segments.key={segments.key!r} was given with a mixture of sources or with weights, which apply to single "
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
    assert segments.key is not None, "no segments were requested"
    order = None if segments.sort_key is None else column(segments.sort_key, "segments.sort_key")
    if order is not None and order.dtype.kind not in "biuf":
        raise H5ValueError(
            f"segments.sort_key={segments.sort_key!r} has values of {order.dtype}. Name an array with one number per "
            "row."
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
