"""Normalization of fields, ``(x - mean) / std``: the file of statistics, and the fields of a dataset that it changes.

This module decides how each field is normalized when a dataset is created. Each row is normalized once (see
``FieldPlan``): by the reader, as it copies rows out of decoded chunks; otherwise after a batch is read, or when a shard
is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..catalog import Catalog
from ..errors import H5FileError, H5ValueError, listing, near, short_repr
from ..hdf5 import ArrayLayout, OpenOptions, expand_user, is_attribute_key, kind_of
from ..regular_files import read_json
from ..samples import RowTable
from ..types import PathLike
from .fields import Fields, torch_dtype_of
from .multiply_add import Affine

__all__ = ["FORMAT", "FieldStats", "Normalize", "normalized", "read_stats", "write_stats"]

FORMAT = "lightning_h5 stats"
KEYS = ("mean", "std", "channel_axis", "row_shape")
"""Keys of a field's statistics in a mapping."""


@dataclass(frozen=True, eq=False)
class FieldStats:
    """Mean and standard deviation of all values of a field, or of each of its channels.

    Attributes:
        mean: shape ``()`` or ``(n_channels,)``.
        std: of the same shape.
        channel_axis: the axis of channels in a stored row; None without channels.
        row_shape: shape of a stored row; None if it is unknown.
    """

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    channel_axis: int | None = None
    row_shape: tuple[int, ...] | None = None

    def of_part(self) -> FieldStats:
        """Return the statistics for patches of rows or of volumes, which have the same last axes."""
        axis, shape = self.channel_axis, self.row_shape
        if axis is not None and shape is not None and axis >= 0:
            axis -= len(shape)
        return replace(self, channel_axis=axis, row_shape=None)


Normalize: TypeAlias = PathLike | Mapping[str, FieldStats | Mapping[str, Any]]
"""A file with statistics, or its fields."""


def read_stats(normalize: Normalize) -> dict[str, FieldStats]:
    """Return statistics by field.

    The smallest valid file is ``{"fields": {"x": {"mean": 1.5, "std": 0.5}}}``. Statistics of channels are lists.

    Args:
        normalize: the file, or a mapping from fields to their statistics: ``{"x": {"mean": 1.5, "std": 0.5}}``.

    Raises:
        H5FileError: the file is missing, or is not JSON.
        H5ValueError: an entry is missing or not a number, a deviation is negative, or a mapping has an unknown key.
    """
    if isinstance(normalize, Mapping):
        return _mapped_stats(normalize)
    if not isinstance(normalize, str | os.PathLike):
        raise H5ValueError(
            f"normalize={short_repr(normalize)} was given. Pass a file that `lightning-h5 stats` has written, or a "
            "mapping from fields, such as {'x': {'mean': 0.5, 'std': 0.2}}."
        )
    path = expand_user(normalize)
    try:
        text = read_json(path)
    except (OSError, ValueError) as error:
        raise H5FileError(
            f"the statistics {path!r} cannot be read: {error}. Pass the path of a JSON file with statistics."
        ) from error
    fields = text.get("fields") if isinstance(text, Mapping) else None
    if isinstance(text, Mapping) and (text.get("format", FORMAT), text.get("version", 1)) != (FORMAT, 1):
        raise H5ValueError(
            f"{path!r} is {text.get('format')!r}, version {text.get('version')!r}; this package reads {FORMAT!r}, "
            "version 1. Compute the statistics again."
        )
    if not isinstance(fields, Mapping) or not fields:
        raise H5ValueError(
            f"{path!r} has no fields. Write it as "
            '{"fields": {"name": {"mean": [...], "std": [...], "channel_axis": 0}}}.'
        )
    return {str(name): _field(f"{path!r}, field {str(name)!r}", entry) for name, entry in fields.items()}


def _mapped_stats(normalize: Mapping[str, Any]) -> dict[str, FieldStats]:
    """Return the statistics of a mapping. Unlike a file, it cannot have further keys."""
    if not normalize:
        raise H5ValueError(
            "normalize={} was given, which has no fields. Pass {'name': {'mean': ..., 'std': ...}}, or None."
        )
    stats = {}
    for name, entry in normalize.items():
        where = f"normalize[{name!r}]"
        if isinstance(entry, FieldStats):
            stats[str(name)] = entry
            continue
        if not isinstance(entry, Mapping):
            raise H5ValueError(f"{where}={short_repr(entry)} was given. Pass {{'mean': ..., 'std': ...}}.")
        for key in entry:
            if key not in KEYS:
                raise H5ValueError(f"{where} has no key {key!r}.{near(str(key), KEYS)} Its keys are {listing(KEYS)}.")
        if missing := [key for key in ("mean", "std") if key not in entry]:
            raise H5ValueError(
                f"{where} has {listing(entry)} and no {listing(missing)}. Pass mean and std, each a number or a list "
                "with one number per channel."
            )
        stats[str(name)] = _field(where, {key: _as_json(value) for key, value in entry.items()})
    return stats


def _as_json(value: Any) -> Any:
    """Return numbers as plain Python values, as in a JSON file."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def write_stats(path: PathLike, fields: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a file of statistics atomically.

    Args:
        path: the file.
        fields: for each field ``mean`` and ``std`` at least, as plain numbers and lists.

    Raises:
        H5FileError: it cannot be written.
    """
    text = json.dumps({"format": FORMAT, "version": 1, "fields": fields}, indent=1)
    path = expand_user(path)
    partial = Path(f"{path}.{os.getpid()}.partial")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise H5FileError(
            f"statistics cannot be written to {path!r}: {error.strerror}. Name a file in an existing, writable folder "
            "with enough space."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _checked_numbers(numbers: Any) -> Any:
    for value in numbers if isinstance(numbers, list) else [numbers]:
        if isinstance(value, bool | str):
            raise TypeError(f"{value!r} is not a number")
    return numbers


def _field(where: str, entry: Any) -> FieldStats:
    stats: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    numbers = []
    for name in ("mean", "std"):
        try:
            numbers.append(np.asarray(_checked_numbers(stats[name]), dtype=np.float64))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise H5ValueError(
                f"{where}: {name!r} is {stats.get(name)!r}. Write a number, or a list of them."
            ) from error
    mean, std = numbers
    if mean.shape != std.shape or mean.ndim > 1 or not mean.size:
        raise H5ValueError(
            f"{where}: the mean has the shape {mean.shape} and the deviation {std.shape}. Write one number each, or a "
            "list with one for each channel."
        )
    if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std >= 0).all()):
        raise H5ValueError(f"{where}: mean {mean.tolist()}, std {std.tolist()}. All must be finite, std not negative.")
    axis, shape = stats.get("channel_axis", 0), stats.get("row_shape")
    if mean.ndim and type(axis) is not int:
        raise H5ValueError(
            f"{where}: channel_axis is {axis!r}. Write the axis of a row that has the channels: 0, 1, ..."
        )
    if shape is not None and not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)):
        raise H5ValueError(f"{where}: row_shape is {shape!r}. Write a list of whole numbers, or leave it out.")
    return FieldStats(mean, std, axis if mean.ndim else None, None if shape is None else tuple(shape))


EXACT_IN_FLOAT32 = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.bool, torch.float16, torch.bfloat16)


def normalized(
    fields: Fields, normalize: Normalize | None, table: RowTable, catalog: Catalog, options: OpenOptions
) -> Fields:
    """Return a dataset's fields with their normalization and the resulting dtypes. Integers become float32.

    Args:
        fields: fields of the dataset.
        normalize: statistics by the names of fields or of their arrays; None leaves all fields unchanged.
        table: the files.
        catalog: opens the files.
        options: how the files are opened.

    Raises:
        H5ValueError: the statistics have other fields, shapes or numbers of channels.
    """
    if normalize is None:
        return fields
    stats = read_stats(normalize)
    arrays = table.as_read
    places = {name.strip("/"): at for names in (fields.keys, fields.names) for at, name in enumerate(names)}
    loaded = [name for name in stats if name.strip("/") in places]
    by_place = {places[name.strip("/")]: stats[name] for name in loaded}
    if sparse := [name for name in loaded if places[name.strip("/")] in fields.matrices]:
        raise H5ValueError(
            f"normalize has statistics of {listing(sparse)}, a sparse matrix, whose rows would no longer be sparse. "
            "Leave them out, and normalize in a batch_transform."
        )
    if len(by_place) < len(loaded):
        raise H5ValueError(
            f"the statistics name a field twice, by its name and by its array, among {listing(loaded)}. Leave one of "
            "the two out."
        )
    # Statistics of arrays that are not loaded are ignored.
    plain = OpenOptions(files=options.files)
    group = (
        "" if table.parts is None else f"{table.parts.name(0)}/"
    )  # a group, which names are relative to, or an array
    unknown = [
        name
        for name in stats
        if not (name in loaded or is_attribute_key(name) or "*" in name)
        and not any(catalog.has(table.paths[0], [key], plain) for key in (name, group + name))
    ]
    if unknown or not by_place:
        absent = f" and no {listing(unknown)}.{near(unknown[0], fields.names)}" if unknown else "."
        raise H5ValueError(
            f"the statistics are of the fields {listing(stats)}; the data has {listing(fields.names)}{absent} Name "
            "fields of the data, or compute the statistics from these files."
        )
    affines, dtypes = {}, [request.dtype for request in fields.requests]
    for at, of_field in by_place.items():
        if (dtype := dtypes[at]) is not None and not dtype.is_floating_point:
            raise H5ValueError(
                f"{fields.names[at]!r} is to be normalized, but {dtype} was requested. Pass a floating dtype."
            )
        is_patch = table.indexer.cuts(at)
        examples = [arrays[at]] if is_patch else [of_part[at] for of_part in table.layouts.examples]
        affines[at] = _affine(of_field.of_part() if is_patch else of_field, fields.names[at], examples)
        stored = torch_dtype_of(arrays[at].dtype)
        dtypes[at] = dtype or (stored if stored.is_floating_point else torch.float32)
    numbers = {
        at: [(values.shape, values.ravel().tolist()) for values in (affine.mean, affine.scale)]
        for at, affine in sorted(affines.items())
    }
    digest = hashlib.sha256(repr((numbers, dtypes)).encode()).hexdigest()[:32]
    requests = tuple(replace(request, dtype=dtype) for request, dtype in zip(fields.requests, dtypes, strict=True))
    return replace(fields, requests=requests, affines=affines, normalization=digest)


def _affine(stats: FieldStats, name: str, arrays: Sequence[ArrayLayout]) -> Affine:
    """Return the change that normalizes rows of a field.

    Raises:
        H5ValueError: the statistics do not fit the rows.
    """
    shapes = {array.row_shape: array for array in arrays}
    array, axis = arrays[0], stats.channel_axis
    shape = array.row_shape
    if kind_of(array.dtype) != "number" or array.dtype.kind == "c":
        content = "of complex numbers" if array.dtype.kind == "c" else "text"
        raise H5ValueError(f"the statistics have {name!r}, which is {content} in {array.path!r}. Leave it out.")
    if other_shapes := [row_shape for row_shape in shapes if stats.row_shape not in (None, row_shape)]:
        raise H5ValueError(
            f"the statistics of {name!r} were computed from rows of shape {stats.row_shape}; rows of "
            f"{shapes[other_shapes[0]].path!r} have the shape {other_shapes[0]}. Compute statistics from these files."
        )
    n_channels = stats.mean.size if stats.mean.ndim else 0
    wide = np.ones(len(shape), dtype=np.int64)
    for row_shape, example in shapes.items() if n_channels else []:
        length = row_shape[axis] if axis is not None and -len(row_shape) <= axis < len(row_shape) else "no such axis"
        if length != n_channels or len(row_shape) != len(shape):
            raise H5ValueError(
                f"the statistics of {name!r} have {n_channels} channels along axis {axis} of a row; rows of "
                f"{example.path!r} have the shape {row_shape}, {length} there. Compute statistics from these files."
            )
    if n_channels and axis is not None:
        wide[axis] = n_channels
    mean, std = (values.reshape(wide) if n_channels else values for values in (stats.mean, stats.std))
    with np.errstate(all="ignore"):
        scale = 1 / std
    is_float32 = array.dtype == np.float32 or torch_dtype_of(array.dtype) in EXACT_IN_FLOAT32
    work = np.dtype(np.float32 if is_float32 else np.float64)  # keeps small deviations from a large mean
    affine = Affine(mean, np.where(np.isfinite(scale), scale, 0.0), shape, work)  # constant values become 0
    affine.compile(array.dtype)
    return affine
