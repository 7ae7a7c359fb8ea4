"""Values of columns for comparisons: decoded, and with the names of categories instead of codes.

``Categories`` makes codes mean the same in all files, which need not have the same names of categories.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError, H5ResumeError, H5ValueError, listing
from ..hdf5 import ArrayLayout, OpenOptions, enum_names
from ..readers import Recode, open_reader, unpacked
from ..types import IntArray

__all__ = [
    "Categories",
    "check_same",
    "classes_of",
    "column_of_codes",
    "decoded",
    "flat_values_of",
    "names_in",
    "names_of_codes",
    "pairs_of",
    "texts_of",
    "values_of",
]


N_TRIED = 100  # rows of an array that may be one-hot


class Categories:
    """The categories that codes stand for, the same in all files.

    The names of the first files have the first codes, in their order if all of these files have the same names, and
    sorted otherwise. Names that only other files have follow, sorted.

    Args:
        known: names by array, in the order of their codes.
    """

    def __init__(self, known: dict[str, tuple[Any, ...]] | None = None) -> None:
        self.known = known or {}

    def digests(self) -> dict[str, list[Any]]:
        """Return for each array how many names have codes, and a digest of them in their order."""
        return {key: [len(names), _digest_of_names(names)] for key, names in self.known.items()}

    def check(self, saved: Mapping[str, Sequence[Any]]) -> None:
        """Check that codes have the same names as when their digests were saved; new names may follow.

        Raises:
            H5ResumeError: they do not.
        """
        for key, (n, digest) in saved.items():
            names = self.known.get(key)
            if names is not None and _digest_of_names(names[:n]) != digest:
                raise H5ResumeError(
                    f"the codes of {key!r} stood for {n} other categories when the checkpoint was saved; now they are "
                    f"{listing(map(str, names))}. Pass the same training files, whose categories have the first codes."
                )

    def recoded(
        self,
        layouts: Sequence[tuple[ArrayLayout, ...]],
        options: OpenOptions,
        first: Callable[[str], Sequence[ArrayLayout]],
    ) -> list[tuple[ArrayLayout, ...]]:
        """Return arrays with codes of categories that mean the same in all files.

        Args:
            layouts: of each file.
            options: how files are opened.
            first: returns an array in the files with the first names, if these are other files.
        """
        if not layouts or all(array.categories is None for array in layouts[0]):
            return list(layouts)
        by_field = [list(arrays) for arrays in zip(*layouts, strict=True)]
        for at, arrays in enumerate(by_field):
            coded = _coded(array for array in arrays if array.decoding is None)
            if len(coded) == len(arrays):
                by_field[at] = self._of_field(coded, options, first)
        return list(zip(*by_field, strict=True))

    def numbered(
        self, key: str, texts: Sequence[npt.NDArray[Any]], first: Callable[[], Sequence[npt.NDArray[Any]]]
    ) -> list[IntArray]:
        """Return text as class numbers, which mean the same in all files.

        Args:
            key: the array.
            texts: its values in each file.
            first: returns the values in the files with the first names; none if these are the files.
        """
        if key not in self.known:
            self.known[key] = tuple(sorted(_distinct(first() or texts)))
        self.known[key] += tuple(sorted(_distinct(texts) - {*self.known[key]}))
        number = {name: code for code, name in enumerate(self.known[key])}.__getitem__
        return [
            np.fromiter(map(number, values.ravel().tolist()), np.int64, values.size).reshape(values.shape)
            for values in texts
        ]

    def _of_field(
        self,
        coded: Sequence[tuple[ArrayLayout, ArrayLayout]],
        options: OpenOptions,
        first: Callable[[str], Sequence[ArrayLayout]],
    ) -> list[ArrayLayout]:
        key = coded[0][0].key
        by_file = [names_in(categories, options) for _, categories in coded]
        if key not in self.known:
            lists = [names_in(categories, options) for _, categories in _coded(first(key))] or by_file
            is_one = all(names == lists[0] for names in lists)
            self.known[key] = tuple(lists[0] if is_one else sorted({name for names in lists for name in names}))
        further = {name for names in by_file for name in names} - set(self.known[key])
        self.known[key] += tuple(sorted(further))
        codes = {name: code for code, name in enumerate(self.known[key])}
        return [
            layout.decoded(Recode(tuple(codes[name] for name in names)))
            for (layout, _), names in zip(coded, by_file, strict=True)
        ]


def _distinct(texts: Iterable[npt.NDArray[Any]]) -> set[str]:
    return {text for values in texts for text in values.ravel().tolist()}


def _coded(layouts: Iterable[ArrayLayout]) -> list[tuple[ArrayLayout, ArrayLayout]]:
    """Return the arrays that hold codes of categories, each with the array of its categories."""
    return [(layout, layout.categories) for layout in layouts if layout.categories is not None]


def column_of_codes(key: str) -> str | None:
    """Return the categorical column that an array of codes belongs to; None for any other array."""
    column, _, last = key.rpartition("/")
    return column if column and last == "codes" else None


def check_same(column: str, arrays: Sequence[Any], options: OpenOptions, advice: str) -> None:
    """Check that codes, as they are stored, mean the same in all files.

    Args:
        column: the categorical column.
        arrays: the array with its category names in each file; any other value if a file has none.
        options: how files are opened.
        advice: what to do, for the error.

    Raises:
        H5ValueError: they do not.
    """
    described = [array for array in arrays if isinstance(array, ArrayLayout)]
    if len(described) < len(arrays):
        return
    first, *others = (names_in(array, options) for array in described)
    for array, names in zip(described[1:], others, strict=True):
        if names != first:
            raise H5ValueError(
                f"the codes of {column!r} stand for {listing(map(str, first))} in {described[0].path!r} and for "
                f"{listing(map(str, names))} in {array.path!r}. {advice}"
            )


def _digest_of_names(names: Sequence[Any]) -> str:
    return hashlib.sha256(repr(tuple(names)).encode()).hexdigest()[:16]


def names_of_codes(layout: ArrayLayout, names: Sequence[Any], codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the categories that codes of an array stand for; empty text, or NaN, for missing codes.

    Args:
        layout: the array.
        names: its categories, in the order of the stored codes.
        codes: as they are stored, or as the array's codec changes them.

    Raises:
        H5CorruptError: there is no such name.
    """
    if layout.decoding is not None and isinstance(layout.decoding.codec, Recode):
        stored = np.full(max(layout.decoding.codec.codes, default=0) + 2, -1)  # -1 is the last
        stored[list(layout.decoding.codec.codes)] = np.arange(len(names))
        codes = stored[codes]
    Recode(tuple(range(len(names)))).check(codes, layout)
    is_text = not names or isinstance(names[0], str)
    blank = [] if not is_text and (codes >= 0).all() else ["" if is_text else np.nan]
    labels: npt.NDArray[Any] = np.array([*names, *blank], dtype=object if is_text else None)[codes]  # -1 is the last
    return labels


def names_in(array: ArrayLayout, options: OpenOptions) -> list[Any]:
    """Return the names of categories in an array."""
    if array.row_shape:
        raise H5CorruptError(
            f"{array.key!r} in {array.path!r} has rows of the shape {array.row_shape}, and codes stand for single "
            "names. Write the column again."
        )
    values = open_reader(array, options, counters=Counters()).read(np.arange(array.n_rows)).tolist()
    return [name.decode() if isinstance(name, bytes) else name for name in values]


def decoded(layout: ArrayLayout, column: npt.NDArray[Any], options: OpenOptions) -> npt.NDArray[Any]:
    """Return a column for comparisons. Packed numbers are decoded, missing ones to NaN; codes become names."""
    if (categories := layout.categories) is not None:
        return names_of_codes(layout, names_in(categories, options), column)
    is_kept = layout.packing is None or layout.packing.policy in ("keep", "stored")
    return column if is_kept or layout.packing is None else unpacked(column, layout.packing)


def classes_of(values: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Return one class for each row: the value itself, or the position of the 1 in a one-hot row.

    Args:
        values: a value for each row, or a row of zeros with a single 1.
        name: noun for the values, for messages.

    Raises:
        H5ValueError: rows have several values, and are not one-hot.
    """
    if values.ndim == 1:
        return values
    if values.ndim == 2 and values.shape[1] == 1:
        return values[:, 0]
    if values.ndim == 2 and values.dtype.kind in "biuf":
        is_one = values == 1
        is_one_hot = (is_one | (values == 0)).all(axis=1) & (is_one.sum(axis=1) == 1)
        if is_one_hot.all():
            return np.asarray(is_one.argmax(axis=1))
        raise H5ValueError(
            f"{name} has values of shape {values.shape}, and row {int(np.argmin(is_one_hot))} of them is not one-hot: "
            "zeros with a single 1. Name an array with one class per row, or with one-hot rows."
        )
    raise H5ValueError(
        f"{name} has values of shape {values.shape}. Name an array with one class per row, or with one-hot rows."
    )


def values_of(array: ArrayLayout, options: OpenOptions) -> npt.NDArray[Any]:
    """Return the values of an array for comparisons, one a row: text as ``str``, one-hot rows as classes.

    Raises:
        H5ValueError: it has rows of another shape.
    """
    if len(array.row_shape) == 1 and array.row_shape[0] > 1 and array.value is None and array.dtype.kind in "biuf":
        reader = open_reader(array, options, counters=Counters())
        with suppress(H5ValueError):
            classes_of(reader.read(np.arange(min(array.n_rows, N_TRIED))), "")  # most others need no more
            return classes_of(reader.read(np.arange(array.n_rows)), "")
    if array.row_shape not in ((), (1,)):
        raise H5ValueError(
            f"{array.key!r} in {array.path!r} has rows of the shape {array.row_shape}. Name an array with one "
            "value a row, or with one-hot rows."
        )
    return flat_values_of(array, options)


def pairs_of(array: ArrayLayout, options: OpenOptions) -> npt.NDArray[Any]:
    """Return the values of an array in its shape (see ``values_of``)."""
    return flat_values_of(array, options).reshape(array.n_rows, *array.row_shape)


def texts_of(array: ArrayLayout, options: OpenOptions) -> npt.NDArray[Any]:
    """Return the text of an array in its shape: of an enum the names of its values.

    Raises:
        H5ValueError: a value of an enum has no name.
    """
    values, names = pairs_of(array, options), enum_names(array.stored, array.members)
    if names is None or array.categories is not None or array.value is not None:
        return values
    if unknown := {*np.unique(values).tolist()} - {*names}:
        raise H5ValueError(
            f"{array.key!r} in {array.path!r} has the value {min(unknown)}, and its enum has names for "
            f"{listing(names)}. Leave it out of decode, or write the file again."
        )
    texts = np.array([names[value] for value in values.ravel().tolist()], dtype=object)
    return texts.reshape(values.shape)


def flat_values_of(array: ArrayLayout, options: OpenOptions) -> npt.NDArray[Any]:
    """Return all values of an array of any shape, one after the other (see ``values_of``)."""
    values = array.value
    if values is None:
        values = open_reader(array, options, counters=Counters()).read(np.arange(array.n_rows))
    values = decoded(array, values.reshape(-1), options)
    if values.dtype.kind in "OS":
        texts = (text.decode() if isinstance(text, bytes) else text for text in values.tolist())
        values = np.fromiter(texts, dtype=object, count=len(values))
    return values
