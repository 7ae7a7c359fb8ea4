"""Rows that come more often than others: by a column of weights, or so that classes are balanced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..datasets import MixtureDataset, RowDataset
from ..errors import H5ValueError, listing
from ..order import RowWeights

__all__ = ["WeightOptions", "weights_of"]


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """Which rows come how often; see the data modules' arguments of the same names.

    Raises:
        H5ValueError: arguments that contradict each other.
    """

    weight_key: str | None
    balance_key: str | None
    class_weights: Mapping[Any, float] | None

    def __post_init__(self) -> None:
        if self.weight_key is not None and self.balance_key is not None:
            raise H5ValueError(
                f"weight_key={self.weight_key!r} and balance_key={self.balance_key!r} were given; both say how often "
                "rows come. Pass one."
            )
        if self.class_weights is None:
            return
        if self.balance_key is None:
            raise H5ValueError("class_weights was given without balance_key. Pass the array with the classes as well.")
        if not isinstance(self.class_weights, Mapping):
            raise H5ValueError(f"class_weights={self.class_weights!r} is no mapping from classes to weights. Pass one.")
        given: Mapping[Any, Any] = self.class_weights  # what comes from a configuration file is not checked before
        for name, weight in given.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float | np.number) or not 0 <= weight < np.inf:
                raise H5ValueError(f"the weight of the class {name!r} is {weight!r}. Pass a number of 0 or more.")

    @property
    def is_given(self) -> bool:
        """Whether rows are weighted at all."""
        return self.weight_key is not None or self.balance_key is not None

    @property
    def columns(self) -> list[str]:
        """The arrays that weights follow from."""
        return [key for key in (self.weight_key, self.balance_key) if key is not None]

    def weights(self, column: Callable[[str, str], npt.NDArray[Any]]) -> RowWeights:
        """The weights of a dataset's rows.

        Args:
            column: gives the values of an array, one a row; also told the argument that names it.

        Raises:
            H5ValueError: they are missing, negative, all 0, or of classes that are not there.
        """
        if self.weight_key is not None:
            values = column(self.weight_key, "weight_key")
            if values.ndim != 1 or values.dtype.kind not in "biuf":
                raise H5ValueError(
                    f"weight_key={self.weight_key!r} has values of {values.dtype}, shape {values.shape}. Name an array "
                    "with one number a row."
                )
            return RowWeights(values.astype(np.float64), f"by {self.weight_key!r}")
        assert self.balance_key is not None, "no weights were asked for"
        labels = column(self.balance_key, "balance_key")
        if labels.ndim != 1 or (labels.dtype.kind == "f" and np.isnan(labels).any()):
            raise H5ValueError(
                f"balance_key={self.balance_key!r} has values of shape {labels.shape}, or rows without one (NaN). Name "
                "an array with one class a row."
            )
        classes, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        wanted = self._of_classes(classes)
        return RowWeights((wanted / counts)[codes], f"by class of {self.balance_key!r}, {self._told(classes, wanted)}")

    def _of_classes(self, classes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        if self.class_weights is None:
            return np.ones(len(classes))
        is_number = classes.dtype.kind in "biuf"
        there = {_plain(value, is_number=is_number): at for at, value in enumerate(classes.tolist())}
        given = {_plain(name, is_number=is_number): weight for name, weight in self.class_weights.items()}
        if given.keys() != there.keys() or len(given) != len(self.class_weights):
            raise H5ValueError(
                f"class_weights names {listing(self.class_weights)}; the classes of {self.balance_key!r} are "
                f"{listing(there)}. Name each once; 0 leaves one out."
            )
        wanted = np.zeros(len(classes))
        for name, weight in given.items():
            wanted[there[name]] = weight
        return wanted

    @staticmethod
    def _told(classes: npt.NDArray[Any], wanted: npt.NDArray[np.float64]) -> str:
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
    """How often each row of a dataset is to come in training; None where it is once."""
    return dataset.weights if isinstance(dataset, MixtureDataset) else None
