"""Options that select samples: splits, weights, mixtures, tables and the cache of rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import numpy as np

from ..errors import H5ValueError, short_repr
from ..sizes import parse_bytes, whole
from ..types import PathLike
from .base import Options, check_choice, check_fraction, check_whole
from .keywords import checks_keywords

__all__ = ["MixtureOptions", "RowCacheOptions", "SplitOptions", "TableOptions", "WeightOptions"]

SUM_TOLERANCE = 1e-6
"""Tolerance for the sum of all fractions: thirds are rounded when written."""


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class SplitOptions(Options):
    r"""How one set of files is split into training, validation and test rows.

    Shorthand: a float, ``val_fraction``; or the fractions of all splits, ``[train, val]`` or ``[train, val, test]``,
    which sum to 1.

    Args:
        val_fraction: fraction of the training files' rows for validation, from 0 to below 1.
        test_fraction: fraction of the training files' rows for testing, from 0 to below 1.
        group_key: array with each row's group, such as a patient or a recording. Groups are never divided.
        group_pattern: regular expression, searched in the name of each segment or its file. Its first group is the
            segment's group: ``"(patient\d+)_"``.
        stratify_key: array with each row's class, or with one-hot rows. All splits and folds get about the same share
            of each class.
        num_folds: number of folds for cross-validation over the training rows.
        fold: the validation fold, from 0.
        seed: seed of the assignment of rows to splits. Separate from the training seed, so that a new training seed
            moves no row between training and test.
        file: JSON file with the assignment of rows to splits. Read if it exists, written otherwise. A file that was
            written with other fractions or folds, or that lacks a group, raises an error.
        key: arrays of the training files that list the names of the segments of each split, as
            ``{"train": "mask/train", "val": "mask/valid"}`` or one pattern, ``"mask/{split}"``; or a table's column
            with "train", "val", "test" or "predict" for each row or segment, ``"table/split"``.
        by: the unit of a split: "row", "segment", or "time", which divides each segment in time, training first.
            Without segments, "time" divides the rows of each file in their order. "auto" is "segment" if samples are
            segments or cut from segments, and "row" otherwise.
        gap: steps between the parts of a segment that is divided in time. None is the reach of a window less 1, so that
            no step is in two splits; without windows there is no gap.
    """

    shorthand = "a number such as 0.1, [train, val], [train, val, test]"

    val_fraction: float = 0.0
    test_fraction: float = 0.0
    group_key: str | None = None
    stratify_key: str | None = None
    num_folds: int | None = None
    fold: int | None = None
    seed: int = 0
    file: PathLike | None = None
    group_pattern: str | None = None
    key: str | dict[str, str] | None = None
    by: Literal["auto", "row", "segment", "time"] = "auto"
    gap: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.by, "split.by", ("auto", "row", "segment", "time"))
        check_whole(self.gap, "split.gap", 0)
        if self.gap is not None and self.by != "time":
            raise H5ValueError(f"split.gap={self.gap} was given without split.by='time', which alone leaves gaps.")
        if self.by == "time":
            self._check_time()
        if self.group_key is not None and self.group_pattern is not None:
            raise H5ValueError("split.group_key cannot be combined with split.group_pattern. Pass one of them.")
        if self.key is not None and (self.has_fractions or self.file is not None):
            raise H5ValueError("split.key was given with fractions, folds or a file. Pass one of them.")
        val, test = self.val_fraction, self.test_fraction
        check_fraction(val, "val_fraction")
        check_fraction(test, "test_fraction")
        check_whole(self.num_folds, "num_folds", 2)
        check_whole(self.fold, "fold", 0)
        check_whole(self.seed, "split.seed", 0)
        if val + test >= 1:
            raise H5ValueError(
                f"val_fraction={val} and test_fraction={test} leave {1 - val - test:g} for training. "
                "Pass fractions from 0 to 1 that add up to less than 1."
            )
        if (self.num_folds is None) != (self.fold is None):
            raise H5ValueError(
                f"num_folds={self.num_folds} and fold={self.fold} were given. Pass both, or neither: fold is the one "
                f"to validate on{'' if self.num_folds is None else f', from 0 to {self.num_folds - 1}'}."
            )
        if self.num_folds is not None and self.fold is not None and self.fold >= self.num_folds:
            raise H5ValueError(
                f"fold={self.fold} was given with num_folds={self.num_folds}. Folds are counted from 0: pass 0 to "
                f"{self.num_folds - 1}."
            )
        if self.num_folds is not None and val:
            raise H5ValueError(
                f"num_folds={self.num_folds} and val_fraction={val} were given; both choose the validation rows. "
                "Pass one of them."
            )
        uses = (
            ("group_key", self.is_given),
            ("group_pattern", self.has_fractions),
            ("stratify_key", self.has_fractions),
        )
        for name, is_used in uses:
            if getattr(self, name) is not None and not is_used:
                raise H5ValueError(
                    f"{name}={getattr(self, name)!r} was given, but nothing is split. Pass val_fraction, "
                    f"test_fraction or num_folds and fold, or leave {name} out."
                )

    def _check_time(self) -> None:
        """Raise an ``H5ValueError`` for settings that a split in time would ignore."""
        others = ("group_key", "group_pattern", "stratify_key", "num_folds", "file", "key")
        if conflicts := [f"split.{name}" for name in others if getattr(self, name) is not None]:
            raise H5ValueError(
                f"split.by='time' cannot be combined with {' and '.join(conflicts)}: it divides every segment at the "
                "same fractions. Pass one of them."
            )
        if not self.has_fractions:
            raise H5ValueError(
                "split.by='time' was given without fractions. Pass val_fraction, test_fraction or both, as split={"
                "'val_fraction': 0.1, 'by': 'time'}."
            )

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        if _is_number(value):
            return {"val_fraction": value}
        if not isinstance(value, Sequence) or isinstance(value, str):
            return None
        fractions = list(value)
        if len(fractions) not in (2, 3) or not all(_is_number(fraction) and fraction >= 0 for fraction in fractions):
            raise H5ValueError(
                f"split={value!r} was given. Pass the fractions [train, val] or [train, val, test], such as "
                "[0.8, 0.1, 0.1]."
            )
        if round(abs(sum(fractions) - 1), 9) > SUM_TOLERANCE:
            raise H5ValueError(
                f"split={value!r} was given, whose fractions sum to {sum(fractions):g}. Pass fractions [train, val] or "
                "[train, val, test] that sum to 1."
            )
        return dict(zip(("val_fraction", "test_fraction"), fractions[1:], strict=False))

    @property
    def has_fractions(self) -> bool:
        """Whether fractions or folds are set."""
        return bool(self.val_fraction or self.test_fraction or self.num_folds)

    @property
    def is_given(self) -> bool:
        """Whether the training files are split at all."""
        return self.has_fractions or self.file is not None or self.key is not None

    def fills(self, split: str) -> bool:
        """Whether fractions, folds or lists assign rows of the training files to a split."""
        if self.key is not None:
            return self.list_of(split) is not None
        if split == "val":
            return bool(self.val_fraction) or self.num_folds is not None
        return split == "test" and bool(self.test_fraction)

    @property
    def columns(self) -> list[str]:
        """The arrays, or columns of a table, that assign rows or segments to splits."""
        return [key for key in (self.group_key, self.stratify_key, self.column) if key is not None]

    @property
    def column(self) -> str | None:
        """The column of a table that names the split of each row or segment; None if there is none."""
        is_column = isinstance(self.key, str) and self.key.startswith("table/") and "{split}" not in self.key
        return self.key if is_column and isinstance(self.key, str) else None

    def list_of(self, split: str) -> str | None:
        """Return the array that lists the segments of a split; None if there is none."""
        if isinstance(self.key, str):
            return self.key.replace("{split}", split) if split in ("train", "val", "test") else None
        return None if self.key is None else self.key.get(split)

    def may_fill(self, split: str) -> bool:
        """Whether fractions, folds or the split file may assign rows to a split."""
        return self.fills(split) or (self.file is not None and split in ("val", "test"))

    def recipe(self) -> dict[str, Any]:
        """The settings that decide a split, as written to the split file; empty without fractions and folds."""
        names = ("val_fraction", "test_fraction", "num_folds", "fold", "seed", "stratify_key")
        return {name: getattr(self, name) for name in names} if self.has_fractions else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class WeightOptions(Options):
    """How often each training row is drawn. An epoch has as many draws as rows; evaluation reads each row once.

    Shorthand: the name of an array, ``weight_key``.

    Args:
        weight_key: array with each row's weight, 0 or more.
        balance_key: array with each row's class. All classes are drawn equally often, or by ``class_weights``.
        class_weights: weight of each class of ``balance_key``; all classes need one.
    """

    shorthand = "the name of an array with the weight of each row"

    weight_key: str | None = None
    balance_key: str | None = None
    class_weights: dict[Any, float] | None = None

    def __post_init__(self) -> None:
        if self.weight_key is not None and self.balance_key is not None:
            raise H5ValueError(
                f"weight_key={self.weight_key!r} and balance_key={self.balance_key!r} were given; both decide how "
                "often rows are drawn. Pass one of them."
            )
        if self.class_weights is None:
            return
        if self.balance_key is None:
            raise H5ValueError("class_weights was given without balance_key. Pass the array with the classes as well.")
        class_weights: Any = self.class_weights  # a configuration file may contain anything
        if not isinstance(class_weights, Mapping):
            raise H5ValueError(f"class_weights={class_weights!r} is not a mapping from classes to weights. Pass one.")
        for name, weight in class_weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float | np.number) or not 0 <= weight < np.inf:
                raise H5ValueError(f"the weight of class {name!r} is {weight!r}. Pass a number of 0 or more.")

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        return {"weight_key": value} if isinstance(value, str) else None

    @property
    def is_given(self) -> bool:
        """Whether rows are weighted at all."""
        return self.weight_key is not None or self.balance_key is not None

    @property
    def keys(self) -> list[str]:
        """The arrays that define the weights."""
        return [key for key in (self.weight_key, self.balance_key) if key is not None]


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class MixtureOptions(Options):
    """The sources of a data module, and how they are mixed.

    Shorthand: the sources, unless they are a mapping with a key ``"sources"``.

    Args:
        sources: mapping from each source's name to its files, or to a mapping with ``paths`` and optional fields and
            filters (``fields``, ``x_key``, ``y_key``, ``where``, ``label``, ``valid_mask``) that replace the data
            module's. Samples that are dicts contain the source's name as ``"source"``.
        strategy: "concat" joins all rows. "weighted" draws sources by ``weights``. "round_robin" cycles through the
            sources. "alternating" follows ``pattern``. "sequential" reads one source after the other. An exhausted
            source starts again in a new order, and the next epoch continues at its position.
        weights: weights of the sources, in their order or by name, 0 or more. None uses the sources' sizes. A mapping
            from steps to weights, ``{0: {"a": 1, "b": 1}, 10000: {"a": 3, "b": 1}}``, changes them during the run.
            Steps count batches of all ranks since the start of the run.
        between: "step" keeps the weights of a step until the next entry. "linear" interpolates the sources' shares
            linearly between entries.
        epoch_length: "sum" (as many rows as all sources together), "max" (until every source was read completely),
            "min" (until the first source is exhausted, or one batch less if shares are rounded: no row is repeated),
            or a number of steps.
        mix: "batches" fills each batch from one source (not for "concat"). "rows" mixes the sources within batches.
        pattern: names of sources in the order of their turns, for "alternating": ``["a", "a", "b"]``.
    """

    shorthand = "a mapping from names of sources to their files"

    sources: Any = None
    strategy: Literal["concat", "weighted", "round_robin", "alternating", "sequential"] = "concat"
    weights: list[float] | dict[str, float] | dict[int, dict[str, float] | list[float]] | None = None
    between: Literal["step", "linear"] = "step"
    epoch_length: int | Literal["sum", "max", "min"] = "sum"
    mix: Literal["batches", "rows"] = "batches"
    pattern: list[str] | None = None

    def __post_init__(self) -> None:
        check_choice(
            self.strategy, "mixture.strategy", ("concat", "weighted", "round_robin", "alternating", "sequential")
        )
        check_choice(self.mix, "mixture.mix", ("batches", "rows"))
        check_choice(self.between, "mixture.between", ("step", "linear"))
        if self.between != "step" and not self.has_schedule:
            raise H5ValueError(
                f"between={self.between!r} was given, and weights={short_repr(self.weights)} does not change. Pass "
                "weights for several steps, such as {0: {...}, 10000: {...}}, or leave between out."
            )
        for name, strategy in (("weights", "weighted"), ("pattern", "alternating")):
            if getattr(self, name) is not None and self.strategy != strategy:
                raise H5ValueError(
                    f"{name}={getattr(self, name)!r} was given with strategy={self.strategy!r}, which does not use it. "
                    f"Pass strategy={strategy!r}, or leave {name} out."
                )
        if isinstance(self.epoch_length, str):
            if self.epoch_length not in ("sum", "max", "min"):
                raise H5ValueError(
                    f"epoch_length={self.epoch_length!r} was given. Pass 'sum', 'max', 'min' or a number of steps."
                )
        else:
            whole(self.epoch_length, "epoch_length", least=1)

    @property
    def has_schedule(self) -> bool:
        """Whether the weights change during the run."""
        weights = self.weights
        return isinstance(weights, Mapping) and any(
            isinstance(value, Mapping | list | tuple) for value in weights.values()
        )

    @classmethod
    def _is_mapping_of_fields(cls, value: Mapping[Any, Any]) -> bool:
        return "sources" in value or set(value) <= {field.name for field in fields(cls)}

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return {"sources": value} if isinstance(value, Mapping) or is_list else None


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class RowCacheOptions(Options):
    """Size of the cache of recently used rows in each process.

    Shorthand: an int, ``size``.

    Args:
        size: number of rows; 0 turns the cache off.
        max_bytes: memory limit of a rank, divided among its workers. With "240 MiB", a rank with four workers over a
            thousand files of rows of 300 KB uses less than 1 GiB, torch included.
    """

    shorthand = "a number of rows"

    size: int = 1000
    max_bytes: int | str = "240 MiB"

    def __post_init__(self) -> None:
        check_whole(self.size, "row_cache.size (cache_size of a dataset)", 0, allow_none=False)
        parse_bytes(self.max_bytes, "row_cache.max_bytes")

    @property
    def n_bytes(self) -> int:
        """``max_bytes`` as a number of bytes."""
        return parse_bytes(self.max_bytes, "row_cache.max_bytes")

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        return {"size": value} if isinstance(value, int) and not isinstance(value, bool) else None


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class TableOptions(Options):
    """A table with one line per sample or segment: CSV, TSV or Parquet. Its columns become fields ``table/<column>``.

    Shorthand: a path.

    Args:
        path: the table's file.
        on: the join: the name of a column and of the array with the same values; or a mapping from a column to the
            array, to ``"@stem"`` (the file's name without suffix), ``"@file"`` (the file's name), ``"@name"`` (the name
            of a segment: its group or array) or to another attribute, such as ``"@patient"``. The array has one value
            per row, segment or step, or one for a whole segment. Names may be slices such as ``bucket0$3,:3,:600``,
            with segments along an axis. None joins line i with row i, over all files.
        missing: "error", or "drop" to leave out rows and segments without a line and log their number.
    """

    shorthand = "the path of a table"

    path: PathLike
    on: str | dict[str, str] | None = None
    missing: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        check_choice(self.missing, "table.missing", ("error", "drop"))
        if not isinstance(self.path, str | os.PathLike):
            raise H5ValueError(f"table.path={self.path!r} was given. Pass the path of a CSV, TSV or Parquet file.")
        is_pair = (
            isinstance(self.on, Mapping) and len(self.on) == 1 and all(isinstance(v, str) for v in self.on.values())
        )
        if not (self.on is None or isinstance(self.on, str) or is_pair):
            raise H5ValueError(
                f"table.on={self.on!r} was given. Pass a column, or a mapping from one column to an array, '@stem', "
                "'@file', '@name' or another attribute."
            )

    @classmethod
    def parse(cls, value: Any, argument: str) -> Self:
        """See ``Options.parse``. YAML reads ``on`` without quotes as True."""
        if isinstance(value, Mapping):
            value = {"on" if name is True else name: entry for name, entry in value.items()}
        return super().parse(value, argument)

    @property
    def join(self) -> tuple[str | None, str | None]:
        """The column, and the array or attribute to join it with; None for both if lines are joined by position."""
        if isinstance(self.on, Mapping):
            return next(iter(self.on.items()))
        return self.on, self.on

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        return {"path": value} if isinstance(value, str | os.PathLike) else None
