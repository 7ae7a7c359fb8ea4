"""Which rows have a class among the steps of their target: class ids, or one-hot vectors along either axis."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from .row_filters import Mask

__all__ = ["TargetLayout", "TargetSearch", "layouts_possible"]

TargetLayout = Literal["N", "NT", "NC", "NTC", "NCT"]
"""Axes of a target: N rows, T steps, C classes. Without C its values are class ids, with C they are one-hot."""


def layouts_possible(
    row_shape: tuple[int, ...], told: str | None, n_steps: int | None, where: str
) -> list[TargetLayout]:
    """What the axes of a target may mean, as far as shapes say.

    Two axes are rows and steps: class ids. Three are one-hot, along either axis: their values tell which.

    Args:
        row_shape: of the target.
        told: what its user says, or None.
        n_steps: steps of a mask or weight of each row, where there is one.
        where: names the array, for messages.

    Raises:
        H5ValueError: the shape has no such meaning.
    """
    of_shape: dict[int, list[TargetLayout]] = {0: ["N"], 1: ["NT", "NC"], 2: ["NTC", "NCT"]}
    possible = of_shape.get(len(row_shape), [])
    if told is not None:
        if told not in possible:
            raise H5ValueError(
                f"the target {where} is said to have the axes {told!r}, and its rows have the shape {row_shape}. "
                f"Say one of {', '.join(map(repr, get_args(TargetLayout)))} that has {len(row_shape) + 1} axes."
            )
        return [one for one in possible if one == told]
    if not possible:
        raise H5ValueError(
            f"the target {where} has rows of shape {row_shape}; a label is looked for in rows of up to two axes, steps "
            "and classes. Pass a function as `where`, or rows you chose as `indices`."
        )
    if len(row_shape) == 1:
        return ["NT"]
    if n_steps is not None and row_shape[0] != row_shape[1]:
        possible = [one for one in possible if row_shape[0 if one == "NTC" else 1] == n_steps] or possible
    return possible


class TargetSearch:
    """Looks for a class in targets, a piece at a time, under all meanings that are left; safe to use from threads.

    Args:
        label: the class.
        n_rows: rows that are looked at.
        possible: what the target's axes may mean.
        where: names the array, for messages.
        one_file: says the same of the mask, where there is one.
    """

    def __init__(self, label: int, n_rows: int, possible: list[TargetLayout], where: str) -> None:
        self._label, self._where = label, where
        self._found: dict[TargetLayout, Mask] = {one: np.zeros(n_rows, dtype=np.bool_) for one in possible}
        self._why_not: dict[TargetLayout, str] = {}

    def look(self, start: int, target: npt.NDArray[Any], valid: npt.NDArray[Any] | None = None) -> None:
        """Looks at rows.

        Args:
            start: place of the first of them.
            target: shape ``(n, *row_shape)``.
            valid: shape ``(n, n_steps)`` or ``(n,)``; steps where it is zero do not count.
        """
        for layout, found in self._found.items():
            if layout in self._why_not:
                continue
            steps = self._steps(layout, target)
            if steps is None:
                continue
            if valid is not None:
                steps = steps & self._valid(layout, steps, valid)
            found[start : start + len(target)] = steps.any(axis=1) if steps.ndim > 1 else steps

    def _steps(self, layout: TargetLayout, target: npt.NDArray[Any]) -> Mask | None:
        """At which steps the class is; None where the values do not have this meaning."""
        if "C" not in layout:
            return np.asarray(target == self._label, dtype=np.bool_)
        axis = layout.index("C")
        if not 0 <= self._label < target.shape[axis]:
            self._why_not[layout] = f"it would have {target.shape[axis]} classes, from 0"
            return None
        is_one = target == 1
        if not (is_one | (target == 0)).all():
            self._why_not[layout] = "it has values other than 0 and 1"
            return None
        if (is_one.sum(axis=axis) > 1).any():
            self._why_not[layout] = "steps would have several classes"
            return None
        return np.asarray(np.take(is_one, self._label, axis=axis), dtype=np.bool_)

    def _valid(self, layout: TargetLayout, steps: Mask, valid: npt.NDArray[Any]) -> Mask:
        counts = np.asarray(valid != 0, dtype=np.bool_)
        if counts.ndim < steps.ndim:
            counts = counts.reshape(len(counts), *[1] * (steps.ndim - 1))
        elif counts.shape != steps.shape:
            raise H5ValueError(
                f"valid_mask has rows of shape {valid.shape[1:]}, and the target {self._where} has rows of "
                f"{steps.shape[1] if steps.ndim > 1 else 'no'} steps (its axes are {layout}). "
                "Name an array with one value a step, or one a row."
            )
        return counts

    def mask(self) -> Mask:
        """Which rows have the class at a step that counts.

        Raises:
            H5ValueError: the values have none of the meanings, or several that differ.
        """
        left = [layout for layout in self._found if layout not in self._why_not]
        if not left:
            why = "; ".join(f"as {layout!r} {reason}" for layout, reason in self._why_not.items())
            raise H5ValueError(
                f"label={self._label} was asked for, and the target {self._where} cannot be looked at: {why}. Say what "
                "its axes are, with field_map={'target': {'key': ..., 'layout': 'NTC'}}, or pass a function as `where`."
            )
        first = self._found[left[0]]
        if any((self._found[other] != first).any() for other in left[1:]):
            raise H5ValueError(
                f"label={self._label} was asked for, and the target {self._where} could be one-hot along either axis. "
                "Say which, with field_map={'target': {'key': ..., 'layout': 'NTC'}} (rows, steps, classes) or 'NCT'."
            )
        return first
