"""Criteria that select rows by the values of whole columns. Reads no file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..catalog import TARGET
from ..errors import H5ValueError, listing, stop_iteration

__all__ = ["Columns", "Criterion", "Filters", "Mask", "NoRowPassesError", "Where", "criteria_of", "values_text"]

MAX_VALUES = 12  # of a column, to list in a message

Mask: TypeAlias = npt.NDArray[np.bool_]

Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""One-dimensional arrays of a file by name; text as ``object``. All have as many values as the file has rows."""

Where: TypeAlias = Mapping[str, Any] | Callable[[Columns], npt.ArrayLike]
"""Maps an array's name to a value, a list of values, a range ``{"min": 3, "max": 5}`` (both bounds included, either may
be left out), or a function from the column to a mask. Or one function from all columns to a mask."""


class NoRowPassesError(H5ValueError):
    """No row passes the filters."""


def values_text(values: npt.NDArray[Any]) -> str:
    """Return which values a column has, as text for a message: all if they are few, otherwise some or their range."""
    distinct = np.unique(values.astype(str) if values.dtype.kind == "O" else values)
    if not len(distinct):
        return "none"
    if distinct.dtype.kind in "iuf" and len(distinct) > MAX_VALUES:
        return f"{distinct[0].item()!r} to {distinct[-1].item()!r}"
    return listing(distinct.tolist(), most=MAX_VALUES)


@dataclass(frozen=True)
class Criterion:
    """One condition on a file's rows.

    Attributes:
        text: the condition as the user wrote it.
        column: the array to test; None for a function of all columns.
        test: returns a mask for that column, or for all columns.
        key: equal for equal conditions, in any process; None for a function.
        expected: text that at least one row should have.
    """

    text: str
    column: str | None
    test: Callable[[Any], npt.ArrayLike]
    key: str | None
    expected: frozenset[str] = frozenset()

    def mask(self, columns: Columns, n_rows: int) -> Mask:
        """Return a mask of the rows of a file that pass.

        Raises:
            H5ValueError: a function did not return a mask.
        """
        try:
            mask = np.asarray(self.test(columns if self.column is None else columns[self.column]))
        except StopIteration as error:
            raise stop_iteration(self.text.partition("=")[0], self.test) from error
        if mask.dtype != np.bool_ or mask.shape != (n_rows,):
            raise H5ValueError(
                f"{self.text} returned an array of shape {mask.shape} and dtype {mask.dtype}. "
                f"Return a mask: bool, shape ({n_rows},), True for rows to keep."
            )
        return mask


@dataclass(frozen=True, kw_only=True, eq=False)
class Filters:
    """The filters of rows or steps.

    Attributes:
        criteria: conditions on columns.
        label: a class that the target has at a step that counts; None asks for none.
        valid_mask: name of an array that is not 0 at steps that count; None if all do.
        target: name of the array with classes.
        target_axes: the declared axes of the target, if any.
        keys: arrays by the name in a filter, if names differ from the files; without names of fields.
        paths: other files that have an array, by its name.

    Raises:
        H5ValueError: the label is no class, or there is a mask and no label.
    """

    criteria: Sequence[Criterion] = ()
    label: int | None = None
    valid_mask: str | None = None
    target: str = TARGET
    target_axes: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.label is None and self.valid_mask is not None:
            raise H5ValueError(
                f"valid_mask={self.valid_mask!r} selects the steps that count for `label`. Pass label as well."
            )
        if self.label is not None and (isinstance(self.label, bool) or not isinstance(self.label, int | np.integer)):
            raise H5ValueError(f"label={self.label!r} is not a class number. Pass an integer; for text use `where`.")

    @property
    def columns(self) -> list[str]:
        """Names of the arrays that conditions look at, as far as it is known; a function may ask for any field."""
        columns = [criterion.column for criterion in self.criteria]
        return [*(name for name in columns if name is not None), *(self.paths if None in columns else ())]

    @property
    def of_label(self) -> list[str]:
        """Names of the arrays that say which steps have the label."""
        return [] if self.label is None else [self.target, *([] if self.valid_mask is None else [self.valid_mask])]


def criteria_of(
    *,
    allowed_guids: Iterable[str] | None = None,
    cs_label: bool | None = None,
    bg_label: bool | None = None,
    epoch_min: float | None = None,
    epoch_max: float | None = None,
    where: Where | None = None,
) -> list[Criterion]:
    """Return the user's conditions on columns, by the names of fields.

    Args:
        allowed_guids: values of ``guid`` to keep.
        cs_label: keep rows with the flag ``cs_label`` set (True), or not set (False).
        bg_label: the same for ``bg_label``.
        epoch_min: smallest ``epoch`` to keep.
        epoch_max: largest ``epoch`` to keep.
        where: see ``Where``.

    Raises:
        H5ValueError: a condition is malformed, or no row can meet it.
    """
    criteria = []
    if allowed_guids is not None:
        guids: Any = [allowed_guids] if isinstance(allowed_guids, str) else allowed_guids
        if not isinstance(guids, Iterable):
            raise H5ValueError(f"allowed_guids={guids!r} is not a list of guids. Pass the values to keep.")
        criteria.append(_one_of("guid", list(guids), "allowed_guids"))
    for name, flag in (("cs_label", cs_label), ("bg_label", bg_label)):
        if flag is not None:
            criteria.append(_flag(name, flag))
    if epoch_min is not None or epoch_max is not None:
        ends = {"min": epoch_min, "max": epoch_max}
        bounds = {end: bound for end, bound in ends.items() if bound is not None}
        criteria.append(_between("epoch", bounds, " and ".join(f"epoch_{end}={b}" for end, b in bounds.items())))
    if callable(where):
        return [*criteria, Criterion(f"where={_name_of_function(where)}", None, where, None)]
    if where is not None and not isinstance(where, Mapping):
        raise H5ValueError(
            f"where={where!r} is neither a mapping from arrays to values nor a function of columns. "
            "Pass for example where={'age': {'min': 3}, 'site': ['A', 'B']}."
        )
    return [*criteria, *(_of_where(name, condition) for name, condition in (where or {}).items())]


def _of_where(name: str, condition: Any) -> Criterion:
    text = f"where[{name!r}]"
    if callable(condition):
        return Criterion(f"{text}={_name_of_function(condition)}", name, condition, None)
    if isinstance(condition, Mapping):
        return _between(name, dict(condition), f"{text}={dict(condition)!r}")
    if isinstance(condition, set | frozenset):
        return _one_of(name, sorted(condition, key=repr), text)
    if isinstance(condition, list | tuple | range) or (isinstance(condition, np.ndarray) and condition.ndim):
        return _one_of(name, list(condition), text)
    _check_value(condition, f"{text}={condition!r}")
    criterion = _one_of(name, [condition], text)
    return Criterion(f"{text}={condition!r}", name, criterion.test, criterion.key)


def _flag(name: str, flag: bool) -> Criterion:
    if flag not in (0, 1):
        raise H5ValueError(f"{name}={flag!r} is not a flag. Pass True, False, or None to keep all rows.")

    def test(column: npt.NDArray[Any]) -> Any:
        if column.dtype.kind not in "buif":
            raise H5ValueError(f"{name}={flag} asks for a flag, and the array holds {_described(column)}. Use `where`.")
        return ((column != 0) == bool(flag)) & (column == column)  # NaN is neither

    return Criterion(f"{name}={bool(flag)}", name, test, f"{name}:{bool(flag)}")


def _one_of(name: str, values: list[Any], argument: str) -> Criterion:
    text = f"{argument}=[{listing(values, most=6) if values else ''}]"
    if not values:
        raise H5ValueError(f"{argument}=[] selects nothing. Pass the values to keep, or leave it out to keep all rows.")
    for value in values:
        _check_value(value, text)

    def test(column: npt.NDArray[Any]) -> Any:
        for value in values:
            _check_comparable(column, value, text)
        if column.dtype.kind == "f":  # 0.1 matches the nearest 32-bit number; values beyond 32 bits match none
            rounded = [_rounded(value, column.dtype) for value in values]
            near = [number for number in rounded if isinstance(number, np.floating)]
            return np.isin(column, np.array(near, column.dtype))
        if column.dtype.kind != "O":
            column = column.view(np.uint8) if column.dtype.kind == "b" else column
            return np.isin(column, np.array(_whole_numbers(values, np.iinfo(column.dtype)), column.dtype))
        texts = set(values)
        return np.fromiter((item in texts for item in column), dtype=np.bool_, count=len(column))

    expected = frozenset(value for value in values if isinstance(value, str))
    return Criterion(text, name, test, f"{name} in {values!r}", expected)


def _between(name: str, bounds: Mapping[str, Any], text: str) -> Criterion:
    if not bounds or not set(bounds) <= {"min", "max"}:
        raise H5ValueError(f"{text} is not a range. Pass {{'min': ..., 'max': ...}}; either may be left out.")
    for bound in bounds.values():
        is_number = isinstance(bound, int | float | np.integer | np.floating) and not isinstance(bound, bool)
        if not is_number or bound != bound:  # isnan raises for large integers
            raise H5ValueError(f"{text} has the bound {bound!r}. Pass numbers; both belong to the range.")
    low, high = bounds.get("min", -math.inf), bounds.get("max", math.inf)
    if low > high:
        raise H5ValueError(f"{text} is an empty range: {low} is above {high}. Pass the smaller number as min.")

    def test(column: npt.NDArray[Any]) -> Any:
        if column.dtype.kind not in "buif":
            raise H5ValueError(f"{text} is a range, and the array holds {_described(column)}. Name the values to keep.")
        if column.dtype.kind == "f":
            return _float_between(column, low, high)
        if column.dtype.kind == "b":
            column = column.view(np.uint8)
        return (column >= low) & (column <= high)

    return Criterion(text, name, test, f"{low!r}<={name}<={high!r}")


def _whole_numbers(values: Iterable[Any], limits: np.iinfo[Any]) -> list[int]:
    """Return the whole numbers among values that lie between the limits of a dtype."""
    whole = [int(value) for value in values if not isinstance(value, float | np.floating) or float(value).is_integer()]
    return [value for value in whole if limits.min <= value <= limits.max]


def _rounded(value: Any, dtype: np.dtype[Any]) -> np.floating[Any] | float:
    """Round a number to a dtype of floats; infinite as a Python float if it is finite and too large for the dtype."""
    with np.errstate(over="ignore"):
        near: np.floating[Any] = dtype.type(float(value) if abs(value) < 1e308 else math.copysign(math.inf, value))
    return near if np.isfinite(near) or value in (math.inf, -math.inf) else math.copysign(math.inf, value)


def _float_between(column: npt.NDArray[Any], low: Any, high: Any) -> Mask:
    """Return a mask of floats that lie in a range. NaN is in none."""
    below, above = _rounded(low, column.dtype), _rounded(high, column.dtype)
    # A finite bound that overflows must not become infinite.
    over = column > below if not isinstance(below, np.floating) and below < 0 else column >= below
    under = column < above if not isinstance(above, np.floating) and above > 0 else column <= above
    mask: Mask = over & under & ~np.isnan(column)
    return mask


def _check_value(value: Any, text: str) -> None:
    if isinstance(value, str | bool | int | np.integer | np.bool_):
        return
    if isinstance(value, float | np.floating) and not math.isnan(value):
        return
    raise H5ValueError(
        f"{text} asks for {value!r}, which no row equals. Pass numbers and text, or a function that returns a mask."
    )


def _check_comparable(column: npt.NDArray[Any], value: Any, text: str) -> None:
    """Refuse to compare numbers with text, which are never equal: such a filter would silently drop all rows."""
    if isinstance(value, str) != (column.dtype.kind == "O"):
        raise H5ValueError(
            f"{text} asks for {value!r}, and the array holds {_described(column)}. Pass values of its kind."
        )


def _described(column: npt.NDArray[Any]) -> str:
    example = f", such as {column[0]!r}" if len(column) else ""
    return f"text{example}" if column.dtype.kind == "O" else f"numbers ({column.dtype}{example})"


def _name_of_function(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))
