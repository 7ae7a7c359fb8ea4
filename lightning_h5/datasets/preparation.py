"""What is done to whole batches before any transform: normalising fields, and moving channels to the last axis."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5KeyError, H5ValueError, listing
from ..files import ArrayLayout, OpenOptions, find_array, kind_of, open_h5
from ..readers import Change
from ..types import PathLike
from .buffers import BufferPool
from .fields import Fields, torch_dtype_of
from .stats_file import FieldStats, read_stats
from .structure import Column
from .table import FileTable

__all__ = ["Normalize", "Preparation", "preparation_of"]

Normalize: TypeAlias = PathLike | Mapping[str, FieldStats]
"""A file with statistics, or what is in one."""

LARGE_MEAN = 4.0
"""A mean of more deviations than this is taken off in two parts: rounded to 24 bits it would be 2e-7 deviations off."""

LONG_LOOP = 1 << 14
"""Numbers that one mean is taken off, at least, for it not to be repeated for each of them: NumPy takes 0.2
microseconds to go from one mean to the next."""

LEAST_ROW = 1 << 10
"""Numbers of a repeated mean, at least."""

EXACT_IN_FLOAT32 = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.bool, torch.float16, torch.bfloat16)


class _Affine(NamedTuple):
    """``(x - mean) * scale``; both broadcast to a stored row."""

    mean: npt.NDArray[np.float64]
    scale: npt.NDArray[np.float64]


class _Constants(NamedTuple):
    """What rows are normalised with.

    Attributes:
        view: the shape that rows are looked at in, so that the others broadcast to it.
        high: what is taken off.
        low: what is taken off after that, where rounding ``high`` would show.
        scale: what is multiplied with.
    """

    view: tuple[int, ...]
    high: npt.NDArray[Any]
    low: npt.NDArray[Any] | None
    scale: npt.NDArray[Any]


class _Step(NamedTuple):
    """What is done to one field.

    Attributes:
        moves: channels go from the first axis of a row to its last.
        of: how it is normalised; None where it is not.
    """

    moves: bool
    of: _Affine | None = None


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
        told = repr(([_plain(step) for step in self._steps], self._dtypes))
        self.digest = hashlib.sha256(told.encode()).hexdigest()[:32]
        self._made: dict[Any, _Constants] = {}
        self._buffers = BufferPool()

    def touches(self, field: int) -> bool:
        """Whether anything is done to a field."""
        return self._steps[field] is not None

    def normalises(self, field: int) -> bool:
        """Whether a field is normalised."""
        step = self._steps[field]
        return step is not None and step.of is not None

    def in_place(self, field: int, dtype: np.dtype[Any]) -> Change | None:
        """Normalises rows of a field that were read as a dtype; None where it is not, or they become another dtype."""
        step = self._steps[field]
        if step is None or step.of is None or dtype not in (np.float32, np.float64):
            return None
        return partial(self._normalise, field)

    def of_batch(self, field: int, column: Column, *, is_normalised: bool = False) -> Column:
        """A field's rows as they should be; where they can be, they are changed in place.

        Args:
            field: which one.
            column: its rows, as they are stored.
            is_normalised: ``in_place`` has run on them.
        """
        step = self._steps[field]
        if step is None or not isinstance(column, torch.Tensor):
            return column
        return self._worked(column, step, field, is_normalised=is_normalised).to(self.dtype_of(field))

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
        found: npt.NDArray[Any] = self._worked(torch.from_numpy(rows).clone(), step, field).numpy()
        return found

    def _worked(self, column: torch.Tensor, step: _Step, field: int, *, is_normalised: bool = False) -> torch.Tensor:
        """A column as it should be, in the dtype that it is computed in; the given memory may be used for it."""
        if step.of is not None and not is_normalised:
            work = torch.float32 if column.dtype in (*EXACT_IN_FLOAT32, torch.float32) else torch.float64
            column = column if column.dtype == work else self._copied(column, work)
            self._normalise(field, column.numpy())
        return self._copied(column.movedim(1, -1), column.dtype) if step.moves else column

    def _normalise(self, field: int, rows: npt.NDArray[Any]) -> None:
        # By NumPy in this thread: torch would start others, which then wait for the cores that read ahead.
        if not rows.size:
            return
        shape, high, low, scale = self._constants(field, rows.dtype, rows.shape[1:])
        view = rows.reshape(shape)
        with np.errstate(all="ignore"):  # what is stored may be infinite, or no number
            np.subtract(view, high, out=view)
            if low is not None:
                np.subtract(view, low, out=view)
            np.multiply(view, scale, out=view)

    def _copied(self, given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if torch.bfloat16 in (given.dtype, dtype):
            return given.to(dtype, memory_format=torch.contiguous_format, copy=True)
        out = self._buffers.tensor(tuple(given.shape), dtype)
        np.copyto(out.numpy(), given.numpy(), casting="unsafe")
        return out

    def _constants(self, field: int, work: np.dtype[Any], shape: tuple[int, ...]) -> _Constants:
        key = field, work, shape
        if key not in self._made:
            step = self._steps[field]
            assert step is not None, "nothing is done to this field"
            assert step.of is not None, "this field is not normalised"
            view, mean, scale = _laid_out(step.of, shape)
            high = mean.astype(work)
            low = (mean - high).astype(work)
            is_large = bool(np.abs(mean * scale).max(initial=0) > LARGE_MEAN) and bool(low.any())
            self._made[key] = _Constants(view, high, low if is_large else None, scale.astype(work))
        return self._made[key]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": {}}


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
    return _Step(moves, _Affine(mean, np.where(np.isfinite(scale), scale, 0.0)))


def _laid_out(
    of: _Affine, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and scale so that NumPy's inner loops are long, and what they read beside the rows is short."""
    axis = int(np.argmax(of.mean.shape)) if of.mean.size > 1 else None
    if axis is None:
        return (-1,), of.mean.ravel(), of.scale.ravel()
    n_channels, n_after = shape[axis], math.prod(shape[axis + 1 :])
    if n_after >= LONG_LOOP:
        return (-1, n_channels, n_after), of.mean.reshape(-1, 1), of.scale.reshape(-1, 1)
    # As long as a row, or as what of it repeats.
    first = axis
    while first and math.prod(shape[first:]) < LEAST_ROW:
        first -= 1
    mean, scale = (np.broadcast_to(each, shape)[(0,) * first].ravel() for each in of)
    return (-1, len(mean)), mean, scale


def _plain(step: _Step | None) -> Any:
    """What is done to a field, as numbers."""
    numbers = step.of if step is not None and step.of is not None else ()
    return step is not None and step.moves, [(each.shape, each.ravel().tolist()) for each in numbers]
