"""The fields of a dataset: the requested arrays and dtypes, and their conversion to a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from reprlib import Repr
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ..catalog import ArrayRequest, has_lists, hashable, is_encoded
from ..errors import H5ValueError, listing, near
from ..hdf5 import ArrayLayout, FieldNames, field_names, kind_of, torch_dtype
from ..readers import ClassNumbers, Decode, DecodeRequest, codecs_of
from ..samples import SparseField
from ..types import DTypeLike, IntArray, Keys
from .casts import CastGuard
from .collate import Collate
from .joined_steps import Joint
from .multiply_add import Affine
from .sample_layout import FieldPlan, SampleLayout, SamplePart, Transform

if TYPE_CHECKING:
    from ..samples import RowTable

__all__ = [
    "Decode",
    "Fields",
    "checked_rows",
    "row_numbers",
    "torch_dtype_of",
    "without_lacking",
]

_log = logging.getLogger(__name__)

PLACES = ("segment", "step")
"""Fields that ``with_index`` adds to samples of several steps."""


@dataclass(frozen=True)
class Fields:
    """The fields that are read for each row.

    Attributes:
        requests: the arrays to look for in files: the input's, followed by the target's. A target may hold text, and so
            may one of several inputs.
        sample_layout: the layout of a sample.
        affines: the normalization of rows, by field number.
        normalization: digest of the normalization and of the dtypes, the same in all processes; None without
            normalization.
        masked: numbers of the fields with a mask of their steps in each sample.
        matrices: sparse matrices, by the number of the array with their stored values; the array of their column
            numbers is the next one.
    """

    requests: tuple[ArrayRequest, ...]
    sample_layout: SampleLayout
    affines: Mapping[int, Affine] = field(default_factory=dict, compare=False)
    normalization: str | None = None
    masked: tuple[int, ...] = ()
    matrices: Mapping[int, SparseField] = field(default_factory=dict, compare=False)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(request.key for request in self.requests)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields in a sample, or of their arrays if a sample has no names."""
        layout = self.sample_layout
        names = [*layout.x.fields.names, *(layout.y.fields.names if layout.y else ())]
        for at in sorted(self.matrices):
            names.insert(at + 1, f"{names[at]}/indices")
        return tuple(names)

    @property
    def n_inputs(self) -> int:
        """Number of arrays of the input; the target's arrays follow."""
        n = len(self.sample_layout.x.fields.keys)
        for at in sorted(self.matrices):
            n += at < n
        return n

    def among(self, fields: Sequence[int]) -> Fields:
        """Return a subset of the fields, without masks; a sample is then a dict."""
        names = FieldNames("dict", tuple(self.keys[at] for at in fields), tuple(self.names[at] for at in fields))
        affines = {number: self.affines[at] for number, at in enumerate(fields) if at in self.affines}
        layout = SampleLayout(SamplePart(names), None, with_index=False)
        return Fields(tuple(self.requests[at] for at in fields), layout, affines, self.normalization)

    def as_stored(self) -> Fields:
        """Return the fields without requested dtypes and without normalization."""
        return replace(self, requests=tuple(replace(request, dtype=None) for request in self.requests), affines={})

    def plans(self, arrays: Sequence[ArrayLayout]) -> tuple[FieldPlan, ...]:
        """Return the conversion of each field.

        Args:
            arrays: the arrays of a file, in the order of the fields.
        """
        return tuple(
            FieldPlan(
                array.dtype,
                array.row_shape,
                request.dtype or torch_dtype_of(array.dtype),
                self.affines.get(number),
                guards=_guards_of(array, request, is_number=True),
            )
            if kind_of(array.dtype) == "number"
            else FieldPlan(
                array.dtype,
                array.row_shape,
                None,
                is_encoded=is_encoded(array),
                element=request.dtype,
                guards=_guards_of(array, request, is_number=False),
            )
            for number, (array, request) in enumerate(zip(arrays, self.requests, strict=True))
        )

    def of_samples(self, table: RowTable, *, mask: bool, collate: Collate | None) -> Fields:
        """Return the fields with the masks, places and joints of a table's samples.

        Args:
            table: the files and their samples.
            mask: add a mask of the steps that are not padding, for each field.
            collate: how to batch samples of several shapes.
        """
        layout, masked = self.sample_layout, tuple(table.step_fields) if mask else ()
        x, extras = layout.x, layout.extras
        names = tuple(f"{self.names[field]}_valid" for field in masked)
        if names:
            x = replace(x, fields=replace(x.fields, keys=x.fields.keys + names, names=x.fields.names + names))
        if layout.with_index and table.indexer.has_places:
            extras += PLACES
        joints = self._joints(table) if collate == "pack" else ()
        layout = replace(layout, x=x, extras=extras, collate=collate, joints=joints)
        return replace(self, masked=masked, sample_layout=replace(layout, length_of=self.length_of(table, layout)))

    def _joints(self, table: RowTable) -> tuple[Joint | None, ...]:
        """Return how the samples of each field are joined along their steps.

        Raises:
            H5ValueError: all samples have the same number of steps, or a field has a name that batches need.
        """
        joints = list[Joint | None]()
        for number in range(len(self.names)):
            group = table.indexer.group_of_steps(number) if table.has_steps[number] else None
            is_list = table.is_ragged[number] or has_lists(table.layouts[0][number])
            if group is not None:
                joints.append(Joint(group, table.step_places[number]))
            else:  # each row is a sample
                joints.append(Joint(-1, 0) if table.indexer.numbers_are_rows and is_list else None)
        if not any(joints):
            raise H5ValueError(
                f"collate_fn='pack' joins samples along their steps, and the samples here are {table.indexer.noun}, "
                "which all have the same number of steps. Remove collate_fn, or pass sample='segment'."
            )
        if added := [name for name in self.names if name.endswith(("cu_seqlens", "max_seqlen"))]:
            raise H5ValueError(
                f"collate_fn='pack' adds cu_seqlens and max_seqlen to batches, but the data has fields named "
                f"{listing(added)}. Load these fields under other names."
            )
        return tuple(joints)

    def length_of(self, table: RowTable, layout: SampleLayout) -> tuple[int, int] | None:
        """Return the input field and the axis that define a sample's length; None if all samples have the same length.

        Args:
            table: the files and their samples.
            layout: the layout of a sample.
        """
        if not layout.collate:
            return None
        steps = [field for field in table.step_fields if field < self.n_inputs] or table.step_fields
        counted = table.indexer.counted_field(steps)
        if counted is not None:
            return counted, table.step_places[counted]
        inputs = range(self.n_inputs)
        ragged = [field for field in inputs if table.is_ragged[field] and not table.indexer.cuts(field)]
        ragged = ragged or [field for field in inputs if has_lists(table.layouts[0][field])]
        if ragged:
            return ragged[0], 0
        return (0, 0) if layout.x.transform is not None else None  # which may give samples several lengths

    @classmethod
    def of(
        cls,
        x_key: Keys,
        y_key: Keys | None,
        *,
        x_dtype: DTypeLike,
        y_dtype: DTypeLike,
        transform: Transform | None,
        target_transform: Transform | None,
        with_index: bool,
        flags: tuple[bool, ...] = (),
        as_one: bool = False,
        decode: Decode | None = None,
        dtype_argument: str = "x_dtype",
    ) -> Fields:
        """Return the fields of a dataset with an input and a target; see ``H5LazyDataset`` for the arguments.

        Args:
            x_key: the input.
            y_key: the target.
            x_dtype: dtype of the input.
            y_dtype: dtype of the target.
            transform: runs on each sample's input.
            target_transform: runs on each sample's target.
            with_index: add each row's index.
            flags: for each input field, whether its values become bools; empty if none.
            as_one: samples are dicts of all fields, including the target's.
            decode: decoders of fields.
            dtype_argument: the argument with the dtype of the input, for messages.

        Raises:
            H5ValueError: a name or dtype is invalid.
        """
        x = field_names(x_key, "x_key")
        y = None if y_key is None else field_names(y_key, "y_key")
        if y is None and target_transform is not None:
            raise H5ValueError("target_transform was given without y_key. Pass y_key, or leave target_transform out.")
        parts = [x] if y is None else [x, y]
        names = tuple(name for part in parts for name in part.names)
        keys = tuple(key for part in parts for key in part.keys)
        stacks = [stack for part in parts for stack in part.stacks or (None,) * len(part.keys)]
        codecs = codecs_of(decode, names, keys, stacks)
        requests = _requests(x, x_dtype, dtype_argument, codecs, text_ok=x.kind != "single")
        if y is not None:
            requests += _requests(y, y_dtype, "y_dtype", codecs[len(x.keys) :], text_ok=True)
        if as_one:
            if target_transform is not None:
                raise H5ValueError(
                    "target_transform cannot be combined with window.mask, which makes samples dicts. Use transform."
                )
            x, y = FieldNames("dict", keys, names), None
        sample_layout = SampleLayout(
            SamplePart(x, transform, flags),
            None if y is None else SamplePart(y, target_transform, argument="target_transform"),
            with_index,
        )
        return cls(tuple(requests), sample_layout)


def _requests(
    names: FieldNames, dtype: DTypeLike, argument: str, codecs: Sequence[DecodeRequest | None], *, text_ok: bool
) -> list[ArrayRequest]:
    """Return the arrays of an input or a target, to look for in files."""
    by_name = dtype if isinstance(dtype, Mapping) else None
    if by_name is not None and (unknown := [name for name in by_name if name not in names.names]):
        raise H5ValueError(
            f"{argument} names {listing(unknown)}; the fields are {listing(names.names)}."
            f"{near(str(unknown[0]), names.names)} Use the fields' names."
        )
    return [
        ArrayRequest.of(
            key,
            codec,
            stacks,
            text_ok=text_ok or isinstance(codec, ClassNumbers),
            dtype=torch_dtype(dtype, argument)
            if by_name is None
            else torch_dtype(by_name.get(name), f"{argument}[{name!r}]"),
            argument=f"{argument}={{}}" if names.kind == "single" else f"{argument}={{{name!r}: {{}}}}",
            paths=hashable(paths),
        )
        for key, name, codec, stacks, paths in zip(
            names.keys,
            names.names,
            codecs,
            names.stacks or (None,) * len(names.keys),
            names.paths or (None,) * len(names.keys),
            strict=False,
        )
    ]


def _guards_of(
    array: ArrayLayout, request: ArrayRequest, *, is_number: bool
) -> tuple[Callable[[npt.NDArray[Any]], None], ...]:
    """Return the checks of stored values (see ``FieldPlan``)."""
    of_cast = CastGuard.of(array, request, is_number=is_number)
    of_missing = array.refuse_missing if is_number and array.is_guarded else None
    return tuple(guard for guard in (of_missing, of_cast) if guard is not None)


def torch_dtype_of(dtype: np.dtype[Any]) -> torch.dtype:
    """Return the torch dtype for a NumPy dtype that torch supports."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


# Rows and names that users pass ------------------------------------------------------------------------------------


def row_numbers(indices: Iterable[Any] | npt.NDArray[Any] | torch.Tensor, n_rows: int, passed: Any = None) -> IntArray:
    """Return indices as an array of row numbers; negative indices count from the end.

    Args:
        indices: several indices.
        n_rows: rows of the dataset.
        passed: the user's value, for messages; None if it is ``indices``.

    Raises:
        IndexError: an index is out of range, as for a list.
        H5ValueError: the values are not indices.
    """
    if not isinstance(indices, np.ndarray | torch.Tensor | Sequence):
        indices = list(indices)
    passed = indices if passed is None else passed
    try:
        rows = np.asarray(indices)
    except ValueError:  # lists of different lengths
        raise _nested(passed) from None
    if rows.dtype.kind == "b":
        raise H5ValueError(
            f"a mask of shape {rows.shape} was passed as an index; rows are selected by integers. Pass "
            "np.flatnonzero(mask)."
        )
    if rows.dtype.kind not in "iu" and rows.size:
        raise H5ValueError(
            f"{_shown_indices(passed)} was passed as an index; rows are selected by integers. Pass integers."
        )
    if rows.ndim > 1:
        raise _nested(passed)
    rows = np.atleast_1d(rows)
    outside = (rows < -n_rows) | (rows >= n_rows)
    if outside.any():
        raise IndexError(
            f"index {rows[outside][0]} is out of range for a dataset with {n_rows} rows. Pass -{n_rows} to "
            f"{n_rows - 1}."
        )
    rows = rows.astype(np.int64)
    return np.where(rows < 0, rows + n_rows, rows)


def _nested(passed: Any) -> H5ValueError:
    return H5ValueError(
        f"{_shown_indices(passed)} was passed as indices; several rows are selected by a flat list of integers. Pass "
        "a flat list, as in dataset[[3, 1, 2]] or read_batch([3, 1, 2]). Pass a torch BatchSampler to DataLoader as "
        "batch_sampler=..., or as sampler=... together with batch_size=None."
    )


def _shown_indices(passed: Any) -> str:
    """Return indices as short text for a message."""
    if isinstance(passed, np.ndarray | torch.Tensor):
        return f"an array of dtype {passed.dtype} and shape {tuple(passed.shape)}"
    return _short.repr(passed)


_short = Repr()


def checked_rows(indices: npt.ArrayLike | None, n_rows: int) -> IntArray | None:
    """Return the argument ``indices`` as row numbers.

    Args:
        indices: integers, shape ``(n,)``, or a mask over all rows; None stays None.
        n_rows: rows of the data.

    Raises:
        H5ValueError: the values are neither integers nor a mask.
    """
    if indices is None:
        return None
    rows = np.asarray(indices)
    if rows.dtype.kind == "b" and rows.shape == (n_rows,):
        return np.flatnonzero(rows)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise H5ValueError(
            f"indices have shape {rows.shape} and dtype {rows.dtype}; the data has {n_rows} rows. "
            f"Pass integers, shape (n,), or a mask of shape ({n_rows},)."
        )
    if rows.size and (rows.min() < 0 or rows.max() >= n_rows):
        raise H5ValueError(
            f"indices run from {rows.min()} to {rows.max()}; the data has {n_rows} rows. "
            f"Pass rows from 0 to {n_rows - 1}."
        )
    return rows.astype(np.int64)


def without_lacking(table: RowTable, indices: npt.ArrayLike | None) -> npt.ArrayLike | None:
    """Drop the rows without a matching line in the side table from ``indices``, and log their number."""
    if table.lacks is None:
        return indices
    rows = checked_rows(indices, table.n_rows)
    rows = np.arange(table.n_rows) if rows is None else rows
    _log.info("left out %d of %d rows without a line in the table", int(table.lacks[rows].sum()), len(rows))
    return rows[~table.lacks[rows]]
