"""Statistics of fields as a file: what normalisation reads, and whoever computes statistics writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5FileError, H5ValueError
from ..types import PathLike

__all__ = ["FORMAT", "FieldStats", "read_stats", "write_stats"]

FORMAT = "lightning_h5 stats"


@dataclass(frozen=True, eq=False)
class FieldStats:
    """Mean and standard deviation of a field: of all its values, or of each channel.

    Attributes:
        mean: shape ``()`` or ``(n_channels,)``.
        std: likewise.
        channel_axis: the axis of a stored row that has the channels; None where there are none.
        row_shape: shape of a stored row; None where the file does not say.
    """

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    channel_axis: int | None = None
    row_shape: tuple[int, ...] | None = None


def read_stats(path: PathLike) -> dict[str, FieldStats]:
    """Statistics by field.

    The least that a file has is ``{"fields": {"x": {"mean": 1.5, "std": 0.5}}}``; numbers of channels are lists.

    Args:
        path: the file.

    Raises:
        H5FileError: it is not there, or is no JSON.
        H5ValueError: something is missing, is no number, or a deviation is negative.
    """
    try:
        text = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise H5FileError(
            f"the statistics {str(path)!r} cannot be read: {error}. Pass the path of a JSON file that has them."
        ) from error
    fields = text.get("fields") if isinstance(text, Mapping) else None
    if isinstance(text, Mapping) and (text.get("format", FORMAT), text.get("version", 1)) != (FORMAT, 1):
        raise H5ValueError(
            f"{str(path)!r} is {text.get('format')!r}, version {text.get('version')!r}; this package reads {FORMAT!r}, "
            "version 1. Make the statistics anew."
        )
    if not isinstance(fields, Mapping) or not fields:
        raise H5ValueError(
            f"{str(path)!r} has no fields. Write it as "
            '{"fields": {"name": {"mean": [...], "std": [...], "channel_axis": 0}}}.'
        )
    return {str(name): _field(f"{str(path)!r}, field {str(name)!r}", entry) for name, entry in fields.items()}


def write_stats(path: PathLike, fields: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes statistics; the file is there whole, or not at all.

    Args:
        path: the file.
        fields: for each field ``mean`` and ``std`` at least, as plain numbers and lists.

    Raises:
        H5FileError: it cannot be written.
    """
    text = json.dumps({"format": FORMAT, "version": 1, "fields": fields}, indent=1)
    partial = Path(f"{os.fspath(path)}.{os.getpid()}.partial")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise H5FileError(
            f"statistics cannot be written to {os.fspath(path)!r}: {error.strerror}. Name a file in a folder that is "
            "there, may be written to and has room."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _numbers(given: Any) -> Any:
    for value in given if isinstance(given, list) else [given]:
        if isinstance(value, bool | str):
            raise TypeError(f"{value!r} is no number")
    return given


def _field(where: str, entry: Any) -> FieldStats:
    given: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    numbers = []
    for name in ("mean", "std"):
        try:
            numbers.append(np.asarray(_numbers(given[name]), dtype=np.float64))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise H5ValueError(
                f"{where}: {name!r} is {given.get(name)!r}. Write a number, or a list of them."
            ) from error
    mean, std = numbers
    if mean.shape != std.shape or mean.ndim > 1 or not mean.size:
        raise H5ValueError(
            f"{where}: the mean has the shape {mean.shape} and the deviation {std.shape}. Write one number each, or a "
            "list with one for each channel."
        )
    if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std >= 0).all()):
        raise H5ValueError(f"{where}: mean {mean.tolist()}, std {std.tolist()}. All must be finite, std not negative.")
    axis, shape = given.get("channel_axis", 0), given.get("row_shape")
    if mean.ndim and type(axis) is not int:
        raise H5ValueError(
            f"{where}: channel_axis is {axis!r}. Write the axis of a row that has the channels: 0, 1, ..."
        )
    if shape is not None and not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)):
        raise H5ValueError(f"{where}: row_shape is {shape!r}. Write a list of whole numbers, or leave it out.")
    return FieldStats(mean, std, axis if mean.ndim else None, None if shape is None else tuple(shape))
