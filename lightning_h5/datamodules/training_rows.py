"""The rows of training: some more often than others, or whole segments as samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..datasets import MixtureDataset, Patches, RowDataset, TableDataset, WholeSegments, Windows
from ..errors import H5ValueError, listing
from ..loading.choose_order import Order
from ..options import SegmentOptions, WeightOptions
from ..order import LengthRecipe, RowWeights
from ..types import IntArray

__all__ = ["row_weights", "segment_ends", "segment_order", "segments_left_out", "weights_of"]


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


def segment_order(order: Order, dataset: RowDataset, segments: SegmentOptions) -> Order:
    """Return the order of epochs of a dataset, in batches of segments of similar lengths if these are wanted."""
    sampling = dataset.table.sampling if isinstance(dataset, TableDataset) else None
    if not segments.bucket or order.mode == "none" or not isinstance(sampling, WholeSegments):
        return order
    lengths = sampling.segments.lengths
    return order._replace(recipe=LengthRecipe(lengths, dataset.blocks(), f"{len(lengths):,} segments, by length"))


def segments_left_out(dataset: RowDataset) -> Iterator[str]:
    """Yield how many segments are too short for a window, or too small for a patch."""
    for each in dataset.sources or [dataset]:
        sampling = each.table.sampling if isinstance(each, TableDataset) else None
        if isinstance(sampling, Patches) and (n := sampling.n_left_out):
            yield (
                f"{n:,} of {len(sampling.segments):,} volumes are smaller than a patch {sampling.options.sizes} and "
                "have no sample"
            )
        if isinstance(sampling, Windows) and (n := sampling.n_left_out):
            yield (
                f"{n:,} of {len(sampling.segments):,} segments are shorter than a window ({sampling.reach} steps) and "
                "have no sample"
            )


def segment_ends(dataset: RowDataset) -> IntArray | None:
    """Return how many samples there are up to the end of each segment; None if samples are no parts of segments."""
    found: list[IntArray] = []
    for each in dataset.sources or [dataset]:
        sampling = each.table.sampling if isinstance(each, TableDataset) and each.indices is None else None
        if not isinstance(sampling, Windows):
            return None
        found.append(sampling.ends + (found[-1][-1] if found else 0))
    return np.concatenate(found)
