"""``(x - mean) * scale`` of rows: in place, or while rows are copied."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..jit import compiled
from ..readers import CopyChange, Unpack, checked_places, row_slices
from ..types import IntArray

__all__ = ["Affine"]

LARGE_MEAN = 4.0
"""A mean of more deviations than this is subtracted in two parts. Rounded to 24 bits it is 2e-7 deviations off."""

LONG_LOOP = 1 << 14
"""A mean that applies to fewer numbers is repeated for each of them: NumPy needs 0.2 microseconds per inner loop."""

SHORT_LOOP = 1 << 6
"""The same limit for compiled loops."""

MIN_ROW = 1 << 10
"""Smallest length of an array of repeated means, if rows are so long."""

COMPILED = frozenset(np.dtype(code) for code in ("u1", "i1", "u2", "i2", "f4", "f8"))
"""Dtypes that compiled loops copy."""

NOWHERE = np.empty(0, np.int64)


class _Constants(NamedTuple):
    """The numbers that change rows.

    Attributes:
        view: the shape to reshape rows to; the other arrays broadcast to it.
        high: value to subtract.
        low: value to subtract after that, if the rounding of ``high`` matters.
        scale: the factor.
    """

    view: tuple[int, ...]
    high: npt.NDArray[Any]
    low: npt.NDArray[Any] | None
    scale: npt.NDArray[Any]


class Affine:
    """A ``Change`` of rows of one shape to ``(x - mean) * scale``.

    With Numba, one pass computes and copies. Without Numba, two or three passes run over pieces that fit in a core's
    own cache. Both results are equal, bit by bit.

    Args:
        mean: value to subtract, an array that broadcasts to a row and has at most one axis longer than 1.
        scale: factor, of the same shape.
        row_shape: shape of a row.
        work: the floating dtype of the computation.

    Attributes:
        mean: see above.
        scale: see above.
        row_shape: see above.
        work: see above.
    """

    def __init__(
        self,
        mean: npt.NDArray[np.float64],
        scale: npt.NDArray[np.float64],
        row_shape: tuple[int, ...],
        work: np.dtype[Any],
    ) -> None:
        self.mean, self.scale, self.work, self.row_shape = mean, scale, work, row_shape
        self._by_shape: dict[tuple[int, ...], Affine] = {}
        self._on_devices: dict[torch.device, tuple[torch.Tensor, ...]] = {}  # scale, and what is subtracted
        self._by_numpy = _constants(mean, scale, row_shape, work, LONG_LOOP)
        view, high, low, scale_of = _constants(mean, scale, row_shape, work, SHORT_LOOP)
        n_numbers, n_after = math.prod(row_shape), view[2] if len(view) == 3 else 0
        if high.size == 1:
            n_after = n_numbers
        self._is_by_channel = bool(n_after)
        period = (high.size, n_after) if n_after else (high.size,)
        self._row_view = (n_numbers // max(1, math.prod(period)), *period)
        self._flat = high.ravel(), np.zeros(high.size, work) if low is None else low.ravel(), scale_of.ravel()

    def of_shape(self, row_shape: tuple[int, ...]) -> Affine:
        """Return the same change for rows of another shape, to which mean and scale broadcast."""
        if row_shape == self.row_shape:
            return self
        if (affine := self._by_shape.get(row_shape)) is None:
            affine = self._by_shape[row_shape] = Affine(self.mean, self.scale, row_shape, self.work)
        return affine

    def after(self, codec: Unpack) -> CopyChange:
        """See ``Change``. The result equals decoding followed by this change, bit by bit."""
        return _UnpackedAffine(self, codec)

    @property
    def takes_at_once(self) -> bool:
        """See ``Change``."""
        return self.loops() is not None

    def loops(self, loop: int | None = None) -> _AffineLoops | None:
        """Return the compiled loops (see ``_affine_loops``); None without Numba."""
        return _affine_loops(self.work, by_channel=self._is_by_channel, loop=loop)

    def compile(self, stored: np.dtype[Any]) -> None:
        """Compile the loops for rows of a dtype, with Numba: before processes fork, and not while they read.

        A process that forks while one of its threads compiles leaves its child a lock that is never released.
        """
        if (loops := self.loops()) is not None:
            work = np.empty((0, *self._row_view), self.work)
            loops.in_place(work, *self._flat)
            for dtype in {stored, self.work} & COMPILED:
                self.copy(loops, work.astype(dtype), NOWHERE, work, NOWHERE)

    def __call__(self, rows: npt.NDArray[Any]) -> None:
        """See ``Change``; rows have the dtype of the computation."""
        if not rows.size:
            return
        if _are_plain(rows) and (loops := self.loops()) is not None:
            loops.in_place(rows.reshape(len(rows), *self._row_view), *self._flat)
            return
        # NumPy, in this thread: torch would start threads that compete with the readers' threads.
        shape, high, low, scale = self._by_numpy
        view = rows.reshape(shape)
        with np.errstate(all="ignore"):  # stored values may be infinite or NaN
            np.subtract(view, high, out=view)
            if low is not None:
                np.subtract(view, low, out=view)
            np.multiply(view, scale, out=view)
        if not np.may_share_memory(view, rows):  # reshaping non-contiguous rows made a copy
            rows[...] = view.reshape(rows.shape)

    def applied(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return changed copies of rows, in the dtype of the computation."""
        out = np.empty(rows.shape, self.work)
        self.take(rows, None, out)
        return out

    def of_tensor(self, rows: torch.Tensor) -> torch.Tensor:
        """Return changed copies of rows on any device, in the dtype of the computation, with the same operations."""
        shape, high, low, scale = self._by_numpy
        constants = self._on_devices.get(rows.device)
        if constants is None:
            arrays = (scale, high) if low is None else (scale, high, low)
            constants = tuple(torch.from_numpy(array).to(rows.device) for array in arrays)
            self._on_devices[rows.device] = constants
        factor, *shifts = constants
        view = rows.to(factor.dtype, copy=True).view(shape)
        for shift in shifts:
            view -= shift
        view *= factor
        return view.view(rows.shape)

    def take(
        self, rows: npt.NDArray[Any], places: IntArray | None, out: npt.NDArray[Any], out_places: IntArray | None = None
    ) -> None:
        """See ``Change``; ``out`` has the dtype of the computation."""
        if not out.size:
            return
        if rows.dtype in COMPILED and _are_plain(rows, out) and (loops := self.loops()) is not None:
            self.copy(loops, rows, places, out, out_places)
            return
        n_rows = len(rows) if places is None else len(places)
        for part in row_slices(n_rows, max(rows[:1].nbytes, out[:1].nbytes)):
            with np.errstate(all="ignore"):
                stored = rows[part] if places is None else np.take(rows, places[part], axis=0, mode="clip")
                piece = out[part] if out_places is None else np.empty_like(stored, out.dtype)
                piece[...] = stored
            self(piece)
            if out_places is not None:
                out[out_places[part]] = piece

    def copy(
        self,
        loops: _AffineLoops,
        rows: npt.NDArray[Any],
        places: IntArray | None,
        out: npt.NDArray[Any],
        out_places: IntArray | None,
        codec: Unpack | None = None,
    ) -> None:
        """Copy rows by compiled loops (see ``Change.take``), which decode them first if there is a codec."""
        missing, factor, offset = rows[:0].ravel(), 1.0, 0.0
        if codec is not None:
            rows, missing = codec.seen(rows)
            factor, offset = codec.packing.scale, codec.packing.offset
        source, target = (array.reshape(len(array), *self._row_view) for array in (rows, out))
        n_rows = len(out if out_places is None else out_places)
        sources, targets = checked_places(places, n_rows, len(rows)), checked_places(out_places, n_rows, len(out))
        loops.take(source, sources, target, targets, *self._flat, missing, factor, offset)


class _UnpackedAffine:
    """A ``CopyChange`` that decodes packed numbers before an ``Affine``, in the same pass. It needs Numba.

    Args:
        affine: changes decoded rows.
        codec: decodes them.
    """

    def __init__(self, affine: Affine, codec: Unpack) -> None:
        self._affine, self._codec = affine, codec

    def compile(self, stored: np.dtype[Any]) -> None:
        """See ``CopyChange``."""
        rows: npt.NDArray[Any] = np.empty((0, *self._affine.row_shape), stored)
        if (loops := self._affine.loops(self._codec.loop)) is not None:
            self._affine.copy(loops, rows, NOWHERE, rows.astype(self._affine.work), NOWHERE, self._codec)

    def take(
        self, rows: npt.NDArray[Any], places: IntArray | None, out: npt.NDArray[Any], out_places: IntArray | None = None
    ) -> None:
        """See ``CopyChange``; ``out`` has the dtype of the computation."""
        if not out.size:
            return
        loops = self._affine.loops(self._codec.loop)
        if loops is None or not _are_plain(rows, out):
            raise TypeError(f"rows of {rows.dtype} are decoded only by Numba, and must be contiguous")
        self._affine.copy(loops, rows, places, out, out_places, self._codec)


def _are_plain(*arrays: npt.NDArray[Any]) -> bool:
    """Return whether compiled loops support these arrays."""
    return all(x.flags.c_contiguous and x.flags.aligned and x.dtype.isnative for x in arrays)


def _constants(
    mean: npt.NDArray[np.float64],
    scale: npt.NDArray[np.float64],
    row_shape: tuple[int, ...],
    work: np.dtype[Any],
    long_loop: int,
) -> _Constants:
    view, mean, scale = _laid_out(mean, scale, row_shape, long_loop)
    high = mean.astype(work)
    low = (mean - high).astype(work)
    is_large = bool(np.abs(mean * scale).max(initial=0) > LARGE_MEAN) and bool(low.any())
    return _Constants(view, high, low if is_large else None, scale.astype(work))


def _laid_out(
    mean: npt.NDArray[np.float64], scale: npt.NDArray[np.float64], shape: tuple[int, ...], long_loop: int
) -> tuple[tuple[int, ...], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and scale in a shape with long inner loops, and with few numbers to read in addition to rows."""
    axis = int(np.argmax(mean.shape)) if mean.size > 1 else None
    if axis is None:
        return (-1,), mean.ravel(), scale.ravel()
    n_channels, n_after = shape[axis], math.prod(shape[axis + 1 :])
    if n_after >= long_loop:
        return (-1, n_channels, n_after), mean.reshape(-1, 1), scale.reshape(-1, 1)
    # As long as a row, or as the part of it that repeats.
    first = axis
    while first and math.prod(shape[first:]) < MIN_ROW:
        first -= 1
    mean, scale = (np.broadcast_to(values[(0,) * first], shape[first:]).ravel() for values in (mean, scale))
    return (-1, len(mean)), mean, scale


class _AffineLoops(NamedTuple):
    """Compiled loops over rows, with a mean for each channel, or for each position in a row."""

    in_place: Callable[..., None]
    take: Callable[..., None]


@cache
def _affine_loops(work: np.dtype[Any], *, by_channel: bool, loop: int | None) -> _AffineLoops | None:
    """Return loops that compute in a dtype; None without Numba.

    Args:
        work: the dtype.
        by_channel: whether there is a mean for each channel, and not for each position in a row.
        loop: the way to decode rows while they are copied (see ``Unpack.loop``); None if rows are not packed.
    """
    cast = work.type

    def as_stored(value, missing, factor, offset):  # type: ignore[no-untyped-def]
        return cast(value)

    def unpacked(value, missing, factor, offset):  # type: ignore[no-untyped-def]
        return cast(np.float64(value) * factor + offset)

    def unpacked_or_missing(value, missing, factor, offset):  # type: ignore[no-untyped-def]
        number = cast(np.float64(value) * factor + offset)
        return cast(np.nan) if value == missing[0] else number

    def unpacked_or_one_of_several(value, missing, factor, offset):  # type: ignore[no-untyped-def]
        number = cast(np.float64(value) * factor + offset)
        is_missing = (value < missing[0]) | (value > missing[1])
        for m in range(2, len(missing)):
            is_missing |= value == missing[m]
        return cast(np.nan) if is_missing else number

    decoders = (unpacked, unpacked_or_missing, unpacked_or_one_of_several)
    load = compiled(as_stored if loop is None else decoders[loop])
    if load is None:
        return None

    def change_by_channel(rows, high, low, scale):  # type: ignore[no-untyped-def]
        for i in range(rows.shape[0]):
            for r in range(rows.shape[1]):
                for c in range(rows.shape[2]):
                    above, below, times = high[c], low[c], scale[c]
                    for k in range(rows.shape[3]):
                        rows[i, r, c, k] = ((rows[i, r, c, k] - above) - below) * times

    def take_by_channel(rows, places, out, targets, high, low, scale, missing, factor, offset):  # type: ignore[no-untyped-def]
        for i in range(len(places)):
            place, target = places[i], targets[i]
            for r in range(rows.shape[1]):
                for c in range(rows.shape[2]):
                    above, below, times = high[c], low[c], scale[c]
                    for k in range(rows.shape[3]):
                        number = load(rows[place, r, c, k], missing, factor, offset)
                        out[target, r, c, k] = ((number - above) - below) * times

    def change_by_place(rows, high, low, scale):  # type: ignore[no-untyped-def]
        for i in range(rows.shape[0]):
            for r in range(rows.shape[1]):
                for k in range(rows.shape[2]):
                    rows[i, r, k] = ((rows[i, r, k] - high[k]) - low[k]) * scale[k]

    def take_by_place(rows, places, out, targets, high, low, scale, missing, factor, offset):  # type: ignore[no-untyped-def]
        for i in range(len(places)):
            place, target = places[i], targets[i]
            for r in range(rows.shape[1]):
                for k in range(rows.shape[2]):
                    number = load(rows[place, r, k], missing, factor, offset)
                    out[target, r, k] = ((number - high[k]) - low[k]) * scale[k]

    in_place, take = (change_by_channel, take_by_channel) if by_channel else (change_by_place, take_by_place)
    compiled_in_place, compiled_take = compiled(in_place), compiled(take)
    if compiled_in_place is None or compiled_take is None:
        return None
    return _AffineLoops(compiled_in_place, compiled_take)
