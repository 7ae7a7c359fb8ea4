"""What is done to whole batches before any transform: normalising fields, and moving channels to the last axis."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5KeyError, H5ValueError, listing
from ..files import ArrayLayout, find_array, kind_of, open_h5
from ..types import PathLike
from .buffers import BufferPool
from .fields import Fields
from .stats_file import FieldStats, read_stats
from .structure import Column
from .table import FileTable

__all__ = ["Normalize", "Preparation", "preparation_of"]

Normalize: TypeAlias = PathLike | Mapping[str, FieldStats]
"""A file with statistics, or what is in one."""

LARGE_MEAN = 2.0
"""A mean of more deviations than this is taken off in two parts: rounded to 24 bits it would be 1e-7 deviations off."""

EXACT_IN_FLOAT32 = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.bool, torch.float16, torch.bfloat16)


class _Affine(NamedTuple):
    """``(x - mean) * scale``, both shaped as a batch, in float64."""

    mean: torch.Tensor
    scale: torch.Tensor


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
    allow_external: bool,
) -> tuple[Preparation | None, Fields]:
    """What is done to batches of a dataset, and its fields as they are to be read for that.

    Args:
        normalize: see ``Preparation``.
        channels_last: see ``Preparation``.
        fields: of the dataset.
        table: the files.
        allow_external: follow links out of the files.

    Returns:
        None, and the fields as they are, where nothing is done. Fields that are normalised are read as they are
        stored: in 16 bits, or 32 instead of 64, something of a large mean's deviations would be lost.
    """
    if normalize is None and not channels_last:
        return None, fields

    def is_array(key: str) -> bool:
        with open_h5(table.paths[0]) as file:
            try:
                find_array(file, key, allow_external=allow_external)
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
    dtypes = tuple(None if done.normalises(at) else dtype for at, dtype in enumerate(fields.dtypes))
    return done, replace(fields, dtypes=dtypes)


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
        unknown = [name for name in stats if name.strip("/") not in places and not is_array(name)]
        if unknown or (stats and not found):
            raise H5ValueError(
                f"the statistics are of the fields {listing(stats)}; the data has {listing(fields)}"
                f"{f' and no {listing(unknown)}' if unknown else ''}. Make them of these files."
            )
        self._dtypes = tuple(dtypes)
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
        self._made: dict[Any, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = {}
        self._buffers = BufferPool()

    def touches(self, field: int) -> bool:
        """Whether anything is done to a field."""
        return self._steps[field] is not None

    def normalises(self, field: int) -> bool:
        """Whether a field is normalised."""
        step = self._steps[field]
        return step is not None and step.of is not None

    def __call__(self, columns: Sequence[Column]) -> tuple[Column, ...]:
        """Columns of a batch as they should be; those that can be are changed in place."""
        steps = [*self._steps, *[None] * (len(columns) - len(self._steps))]
        return tuple(
            column if step is None or not isinstance(column, torch.Tensor) else self._prepared(column, step, at)
            for at, (column, step) in enumerate(zip(columns, steps, strict=True))
        )

    def dtype_of(self, field: int, stored: torch.dtype) -> torch.dtype:
        """What a field becomes that is stored so."""
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

    def _prepared(self, column: torch.Tensor, step: _Step, at: int) -> torch.Tensor:
        return self._worked(column, step, at).to(self.dtype_of(at, column.dtype))

    def _worked(self, column: torch.Tensor, step: _Step, at: int) -> torch.Tensor:
        """A column as it should be, in the dtype that it is computed in; the given memory may be used for it."""
        given = column.movedim(1, -1) if step.moves else column
        if step.of is None:
            return self._copied(given, given.dtype)
        work = torch.float32 if column.dtype in (*EXACT_IN_FLOAT32, torch.float32) else torch.float64
        out = given if given.dtype == work and not step.moves else self._copied(given, work)
        flat = out.view(len(out), math.prod(out.shape[1:]))
        high, low, scale = self._constants(step.of, at, work, tuple(out.shape[1:]), column.device)
        if column.device.type == "cpu":
            # By NumPy in this thread: torch would start others, which then wait for the cores that read ahead.
            rows = flat.numpy()
            np.subtract(rows, high.numpy(), out=rows)
            if low is not None:
                np.subtract(rows, low.numpy(), out=rows)
            np.multiply(rows, scale.numpy(), out=rows)
        else:
            flat.sub_(high)
            if low is not None:
                flat.sub_(low)
            flat.mul_(scale)
        return out

    def _copied(self, given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if given.device.type != "cpu" or torch.bfloat16 in (given.dtype, dtype):
            return given.to(dtype, memory_format=torch.contiguous_format, copy=True)
        out = self._buffers.tensor(tuple(given.shape), dtype)
        np.copyto(out.numpy(), given.numpy(), casting="unsafe")
        return out

    def _constants(
        self, of: _Affine, at: int, work: torch.dtype, shape: tuple[int, ...], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """What is taken off in one or two parts, and multiplied with, as long as a row: the fastest to go through."""
        key = at, work, shape, device
        if key not in self._made:
            mean, scale = (each.expand(1, *shape).flatten() for each in of)
            high = mean.to(work)
            low = (mean - high.double()).to(work)
            is_large = bool((mean * scale).abs().max() > LARGE_MEAN) and bool(low.any())
            self._made[key] = high.to(device), low.to(device) if is_large else None, scale.to(work).to(device)
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
    if kind_of(array.dtype) != "number":
        raise H5ValueError(f"the statistics have {name!r}, which is text in {array.path!r}. Leave it out of them.")
    if stats.row_shape is not None and stats.row_shape != shape:
        raise H5ValueError(
            f"the statistics of {name!r} were made of rows of the shape {stats.row_shape}; those of {array.path!r} "
            f"have {shape}. Make them of these files."
        )
    n_channels = stats.mean.size if stats.mean.ndim else 0
    wide = np.ones(len(shape), dtype=np.int64)
    if n_channels:
        if axis is None or not -len(shape) <= axis < len(shape) or shape[axis] != n_channels:
            there = "no such axis" if axis is None or not -len(shape) <= axis < len(shape) else f"{shape[axis]} there"
            raise H5ValueError(
                f"the statistics of {name!r} are of {n_channels} channels along axis {axis} of a row; rows of "
                f"{array.path!r} have the shape {shape}, {there}. Make them of these files."
            )
        wide[axis] = n_channels
    if moves:
        wide = np.roll(wide, -1)
    mean = torch.from_numpy(np.broadcast_to(stats.mean, (max(1, n_channels),)).reshape(1, *wide).copy())
    std = torch.from_numpy(np.broadcast_to(stats.std, (max(1, n_channels),)).reshape(1, *wide).copy())
    scale = 1 / std
    return _Step(moves, _Affine(mean, torch.where(torch.isfinite(scale), scale, 0.0)))


def _plain(step: _Step | None) -> Any:
    """What is done to a field, as numbers."""
    numbers = step.of if step is not None and step.of is not None else ()
    return step is not None and step.moves, [(tuple(each.shape), each.flatten().tolist()) for each in numbers]
