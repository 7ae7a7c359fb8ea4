"""Whole groups as samples, as a user asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ..datasets import CombinedHDF5Dataset, SequenceDataset, Sequences
from ..errors import H5ValueError
from ..loading.choose_order import Order
from ..order import LengthRecipe
from .options import SplitOptions

__all__ = ["SequenceOptions"]


@dataclass(frozen=True)
class SequenceOptions:
    """What makes a sequence; see the arguments of ``CombinedHDF5DataModule``.

    Attributes:
        key: the array with each row's group; None where samples are rows.
        sorted_by: the array that a sequence is sorted by.
        buckets: have batches of about the same length.

    Raises:
        H5ValueError: an order of no sequences.
    """

    key: str | None
    sorted_by: str | None
    buckets: bool

    def __post_init__(self) -> None:
        if self.key is None and self.sorted_by is not None:
            raise H5ValueError(f"sequence_order={self.sorted_by!r} was given without sequence_key. Pass both.")

    def check(self, split: SplitOptions, *, mixes: bool, weighs: bool) -> None:
        """Refuses sequences with what would take them apart.

        Args:
            split: how rows are cut.
            mixes: whether there is a mixture of sources.
            weighs: whether rows are weighted.

        Raises:
            H5ValueError: it would.
        """
        if self.key is None:
            return
        if mixes or weighs:
            raise H5ValueError(
                f"sequence_key={self.key!r} was given with a mixture of sources or with weights, which are of single "
                "rows. Leave them out."
            )
        if split.cuts_any and split.group_key != self.key:
            raise H5ValueError(
                f"sequence_key={self.key!r} and group_key={split.group_key!r}: splits would cut sequences apart. Pass "
                f"group_key={self.key!r}."
            )

    def dataset(self, rows: CombinedHDF5Dataset, column: Callable[[str, str], npt.NDArray[Any]]) -> SequenceDataset:
        """The sequences of some rows.

        Args:
            rows: the rows.
            column: gives the values of an array, one a row; also told the argument that names it.

        Raises:
            H5ValueError: a value is missing.
        """
        assert self.key is not None, "no sequences were asked for"
        order = None if self.sorted_by is None else column(self.sorted_by, "sequence_order")
        if order is not None and order.dtype.kind not in "biuf":
            raise H5ValueError(
                f"sequence_order={self.sorted_by!r} has values of {order.dtype}. Name an array with one number a row."
            )
        made = Sequences.of(column(self.key, "sequence_key"), order, names=(self.key, self.sorted_by))
        return SequenceDataset(rows, made, self.key)

    def order(self, order: Order, dataset: SequenceDataset) -> Order:
        """The order of epochs of a dataset's sequences, in batches of alike lengths where these are wanted."""
        if not self.buckets or order.mode == "none":
            return order
        order_inside = "in storage order" if self.sorted_by is None else f"sorted by {self.sorted_by!r}"
        text = f"{len(dataset):,} sequences of {self.key!r}, {order_inside}, by length"
        return order._replace(recipe=LengthRecipe(dataset.lengths, dataset.blocks(), text))
