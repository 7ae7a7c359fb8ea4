"""What is done to whole batches before any transform: normalising fields, and moving channels to the last axis."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5KeyError, H5ValueError, listing
from ..files import ArrayLayout, OpenOptions, find_array, kind_of, open_h5
from ..readers import Change
from ..types import PathLike
from .affine import Affine
from .buffers import BufferPool
from .fields import Fields, torch_dtype_of
from .stats_file import FieldStats, read_stats
from .structure import Column
from .table import FileTable

__all__ = ["Normalize", "Preparation", "preparation_of"]

Normalize: TypeAlias = PathLike | Mapping[str, FieldStats]
"""A file with statistics, or what is in one."""

EXACT_IN_FLOAT32 = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.bool, torch.float16, torch.bfloat16)


class _Step(NamedTuple):
    """What is done to one field.

    Attributes:
        moves: channels go from the first axis of a row to its last.
        of: how it is normalised; None where it is not.
    """

    moves: bool
    of: Affine | None = None


def preparation_of(
    normalize: Normalize | None,
    channels_last: Sequence[str] | None,
    fields: Fields,
    table: FileTable,
    *,
    options: OpenOptions,
) -> tuple[Preparation | None, Fields]:
    """What is done to batches of a dataset, and its fields as they are to be read for that.

    Args:
        normalize: see ``Preparation``.
        channels_last: see ``Preparation``.
        fields: of the dataset.
        table: the files.
        options: how the files are opened.

    Returns:
        None, and the fields as they are, where nothing is done. Fields that are normalised are read without loss: in
        16 bits, or 32 instead of 64, something of a large mean's deviations would be gone.
    """
    if normalize is None and not channels_last:
        return None, fields

    def is_array(key: str) -> bool:
        with open_h5(table.paths[0], swmr=options.swmr) as file:
            try:
                find_array(file, key, options.trust)
            except H5KeyError:
                return False
        return True

    done = Preparation(
        normalize,
        channels_last,
        fields=fields.names,
        keys=fields.keys,
        arrays=table.layouts[0],
        dtypes=fields.dtypes,
        is_array=is_array,
    )
    dtypes = list(fields.dtypes)
    for at, array in enumerate(table.layouts[0][: len(dtypes)]):
        if done.normalises(at):
            is_exact = torch_dtype_of(array.dtype) in EXACT_IN_FLOAT32
            dtypes[at] = torch.float32 if is_exact else None  # cast where it is copied anyway
    return done, replace(fields, dtypes=tuple(dtypes))


class Preparation:
    """Normalises fields of whole batches, as ``(x - mean) / std``, and moves channels last.

    Fields of integers become float32, where no dtype is asked for. A channel that is constant (``std`` 0) becomes 0.

    Args:
        normalize: statistics by field; None leaves all as they are.
        channels_last: fields whose rows are stored channels first, ``(C, ...)``, and are wanted as ``(..., C)``.
        fields: names of the fields that are loaded, by which the others name them.
        keys: their arrays, by which they may be named as well.
        arrays: what they are in the files.
        dtypes: what they are to become; None leaves floating ones as they are.
        is_array: whether the files have an array that is not loaded.

    Raises:
        H5ValueError: the statistics are of other fields, shapes or numbers of channels; or a field to move has no
            channels.
    """

    def __init__(
        self,
        normalize: Normalize | None,
        channels_last: Sequence[str] | None,
        *,
        fields: Sequence[str],
        keys: Sequence[str],
        arrays: Sequence[ArrayLayout],
        dtypes: Sequence[torch.dtype | None],
        is_array: Callable[[str], bool],
    ) -> None:
        stats = {} if normalize is None else normalize if isinstance(normalize, Mapping) else read_stats(normalize)
        moved = _checked_names(channels_last, fields)
        places = {name.strip("/"): at for names in (keys, fields) for at, name in enumerate(names)}
        found = {places[name.strip("/")]: of_field for name, of_field in stats.items() if name.strip("/") in places}
        of_loaded = [name for name in stats if name.strip("/") in places]
        if len(found) < len(of_loaded):
            raise H5ValueError(
                f"the statistics name a field twice, by its name and by its array, among {listing(of_loaded)}. Leave "
                "one of the two out."
            )
        unknown = [name for name in stats if name.strip("/") not in places and not is_array(name)]
        if unknown or (stats and not found):
            raise H5ValueError(
                f"the statistics are of the fields {listing(stats)}; the data has {listing(fields)}"
                f"{f' and no {listing(unknown)}' if unknown else ''}. Make them of these files."
            )
        self._dtypes, self._stored = tuple(dtypes), [array.dtype for array in arrays]
        for at in found:
            if (dtype := dtypes[at]) is not None and not dtype.is_floating_point:
                raise H5ValueError(f"{fields[at]!r} is to be normalised, and to be {dtype}. Ask for a floating dtype.")
        self._steps: list[_Step | None] = []
        for at, (name, array) in enumerate(zip(fields, arrays, strict=True)):
            moves = name in moved
            if moves and (len(array.row_shape) < 2 or kind_of(array.dtype) != "number"):
                raise H5ValueError(
                    f"channels_last names {name!r}, whose rows have the shape {array.row_shape}: there are no channels "
                    "to move. Name fields that are stored as (C, ...)."
                )
            step = _Step(moves) if moves else None
            self._steps.append(_normalising(found[at], name, array, moves) if at in found else step)
        self._buffers = BufferPool()
        told = repr(([_plain(step) for step in self._steps], self._dtypes))
        self.digest = hashlib.sha256(told.encode()).hexdigest()[:32]

    def touches(self, field: int) -> bool:
        """Whether anything is done to a field."""
        return self._steps[field] is not None

    def normalises(self, field: int) -> bool:
        """Whether a field is normalised."""
        step = self._steps[field]
        return step is not None and step.of is not None

    def change(self, field: int, dtype: np.dtype[Any]) -> Change | None:
        """Normalises rows of a field that are read as a dtype; None where it is not, or they become another dtype."""
        step = self._steps[field]
        return None if step is None or step.of is None or step.of.work != dtype else step.of

    def of_batch(self, field: int, column: Column, *, is_normalised: bool = False) -> Column:
        """A field's rows as they should be; where they can be, they are changed in place.

        Args:
            field: which one.
            column: its rows, as they are stored.
            is_normalised: what ``change`` gives has run on them.
        """
        step = self._steps[field]
        if step is None or not isinstance(column, torch.Tensor):
            return column
        return self._worked(column, step, is_normalised=is_normalised).to(self.dtype_of(field))

    def dtype_of(self, field: int) -> torch.dtype:
        """What a field becomes, which is a number."""
        stored = torch_dtype_of(self._stored[field])
        plain = torch.float32 if self.normalises(field) and not stored.is_floating_point else stored
        return self._dtypes[field] or plain

    def shape_of(self, field: int, row_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that rows of a field become."""
        step = self._steps[field]
        return (*row_shape[1:], row_shape[0]) if step is not None and step.moves else row_shape

    def rows(self, field: int, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rows of a field as they should be, but for the last cast; what is given stays as it is."""
        step = self._steps[field]
        if step is None:
            return rows
        found: npt.NDArray[Any] = self._worked(torch.from_numpy(rows).clone(), step).numpy()
        return found

    def _worked(self, column: torch.Tensor, step: _Step, *, is_normalised: bool = False) -> torch.Tensor:
        """A column as it should be, in the dtype that it is computed in; the given memory may be used for it."""
        if step.of is not None and not is_normalised:
            column = self._normalised(column, step.of)
        return self._copied(column.movedim(1, -1), column.dtype) if step.moves else column

    def _normalised(self, column: torch.Tensor, affine: Affine) -> torch.Tensor:
        rows = column.numpy()
        if rows.dtype == affine.work:
            affine(rows)
            return column
        out = self._buffers.tensor(tuple(column.shape), torch_dtype_of(affine.work))
        affine.take(rows, None, out.numpy())
        return out

    def _copied(self, given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if torch.bfloat16 in (given.dtype, dtype):
            return given.to(dtype, memory_format=torch.contiguous_format, copy=True)
        out = self._buffers.tensor(tuple(given.shape), dtype)
        np.copyto(out.numpy(), given.numpy(), casting="unsafe")
        return out


def _checked_names(names: Sequence[str] | None, fields: Sequence[str]) -> list[str]:
    given = [names] if isinstance(names, str) else list(names or ())
    if unknown := [name for name in given if name not in fields]:
        raise H5ValueError(f"channels_last names {listing(unknown)}; the fields are {listing(fields)}.")
    return given


def _normalising(stats: FieldStats, name: str, array: ArrayLayout, moves: bool) -> _Step:
    """The step for a field.

    Raises:
        H5ValueError: the statistics are of other rows than these.
    """
    shape, axis = array.row_shape, stats.channel_axis
    if kind_of(array.dtype) != "number" or array.dtype.kind == "c":
        what = "of complex numbers" if array.dtype.kind == "c" else "text"
        raise H5ValueError(f"the statistics have {name!r}, which is {what} in {array.path!r}. Leave it out of them.")
    if stats.row_shape is not None and stats.row_shape != shape:
        raise H5ValueError(
            f"the statistics of {name!r} were made of rows of the shape {stats.row_shape}; those of {array.path!r} "
            f"have {shape}. Make them of these files."
        )
    n_channels = stats.mean.size if stats.mean.ndim else 0
    wide = np.ones(len(shape), dtype=np.int64)
    if n_channels:
        there = shape[axis] if axis is not None and -len(shape) <= axis < len(shape) else "no such axis"
        if there != n_channels:
            raise H5ValueError(
                f"the statistics of {name!r} are of {n_channels} channels along axis {axis} of a row; rows of "
                f"{array.path!r} have the shape {shape}, {there} there. Make them of these files."
            )
        wide[axis] = n_channels
    mean, std = (each.reshape(wide) if n_channels else each for each in (stats.mean, stats.std))
    with np.errstate(all="ignore"):
        scale = 1 / std
    is_float32 = array.dtype == np.float32 or torch_dtype_of(array.dtype) in EXACT_IN_FLOAT32
    work = np.dtype(np.float32 if is_float32 else np.float64)
    affine = Affine(mean, np.where(np.isfinite(scale), scale, 0.0), shape, work)
    affine.compile(array.dtype)
    return _Step(moves, affine)


def _plain(step: _Step | None) -> Any:
    """What is done to a field, as numbers."""
    numbers = () if step is None or step.of is None else (step.of.mean, step.of.scale)
    return step is not None and step.moves, [(each.shape, each.ravel().tolist()) for each in numbers]
