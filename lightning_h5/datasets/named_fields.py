"""The fields of samples that are dicts: requested names, arrays and dtypes, resolved in the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..catalog import TARGET, Catalog, FieldMap, keys_of, names_to_load, paths_of
from ..errors import H5ValueError, without_frames
from ..hdf5 import ArrayLayout, OpenOptions, stacked_keys, torch_dtype
from ..samples import Filters, SampleOptions
from ..types import DTypeLike
from .fields import Decode, Fields
from .sample_layout import Transform

__all__ = ["NamedFields"]

FLAGS = ("cs_label", "bg_label")


class NamedFields:
    """The requested fields, by name.

    Args:
        load_fields: names of the fields; None for all arrays with the same number of rows.
        field_map: mapping from names to arrays in the files.
        samples: options that define a sample.
        dtype: dtype of floating fields with several values, or a mapping from names to dtypes.
        decode: decoders of fields.

    Attributes:
        keys: mapping from names to arrays, for arrays with another name in the files.
        target_axes: order of the axes of the target, if ``field_map`` has it.
        dtype: dtype of floating fields with several values; None keeps the stored one.

    Raises:
        H5ValueError: a name or a dtype is invalid.
    """

    def __init__(
        self,
        load_fields: Sequence[str] | None,
        field_map: FieldMap | None,
        samples: SampleOptions,
        *,
        dtype: DTypeLike | Mapping[str, DTypeLike] = None,
        decode: Decode | None = None,
    ) -> None:
        self.dtype: torch.dtype | None = None
        self._named_dtypes: dict[str, torch.dtype | None] = {}
        if isinstance(dtype, Mapping):
            self._named_dtypes = {name: torch_dtype(value, f"dtype[{name!r}]") for name, value in dtype.items()}
        else:
            self.dtype = torch_dtype(dtype, "dtype")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise H5ValueError(
                f"dtype={dtype!r} is not a floating dtype, but converts floating fields. Pass a floating dtype, or "
                "None to keep all dtypes."
            )
        self.keys, self.target_axes = keys_of(field_map)
        if isinstance(load_fields, Sequence) and not isinstance(load_fields, str):
            names_and_keys = {*load_fields, *map(self.key, load_fields)}
            constants = [name for name in samples.segments.constants if name not in names_and_keys]
            load_fields = [*load_fields, *constants]
        self._load_fields, self._field_map, self._decode, self._samples = load_fields, field_map, decode, samples

    def key(self, name: str) -> str:
        """Return the name of a field's array."""
        return self.keys.get(name, name)

    @property
    def of_other_files(self) -> dict[str, Any]:
        """The other files that hold a field's array, by the name of the field."""
        mapped = list(self._field_map or {})
        pairs = zip(mapped, paths_of(self._field_map, mapped), strict=True)
        return {name: paths for name, paths in pairs if paths is not None}

    @without_frames
    def in_files(
        self,
        catalog: Catalog,
        paths: Sequence[str],
        options: OpenOptions,
        filters: Filters,
        bad: dict[str, str] | None,
        *,
        transform: Transform | None,
        with_index: bool,
    ) -> Fields:
        """Return the fields of a dataset of files, before ``settled`` sets their dtypes.

        Args:
            catalog: opens the files.
            paths: the files.
            options: how the files are opened.
            filters: if all arrays are loaded, the arrays of filters are fields as well.
            bad: see ``open_table``.
            transform: runs on each sample.
            with_index: add each sample's index.

        Raises:
            H5Error: see ``names_to_load``.
        """
        if self._samples.segments.groups is not None and self._load_fields is None:
            raise H5ValueError("segments.groups was given without load_fields. Name the fields, relative to a group.")
        of_filters = [*filters.columns, *filters.of_label]
        names = names_to_load(catalog, paths, options, self._load_fields, self.keys, of_filters, bad)
        mapped, other_files = self._field_map or {}, self.of_other_files
        keys: dict[str, Any] = {}
        for name in names:
            key = mapped[name] if stacked_keys(mapped.get(name), name) else self.key(name)
            keys[name] = {"path": other_files[name], "key": key} if name in other_files else key
        return Fields.of(
            keys,
            None,
            x_dtype=self._named_dtypes,
            y_dtype=None,
            transform=transform,
            target_transform=None,
            with_index=with_index,
            decode=self._decode,
            dtype_argument="dtype",
        )

    def settled(self, fields: Fields, arrays: Sequence[ArrayLayout]) -> Fields:
        """Set the dtypes and flags of fields from the stored arrays."""
        named = list(zip(fields.names, arrays, strict=False))
        dtypes = [self._dtype_of(name, array) for name, array in named]
        requests = tuple(replace(request, dtype=dtype) for request, dtype in zip(fields.requests, dtypes, strict=True))
        flags = tuple(self._is_flag(name, array) for name, array in named)
        layout = fields.sample_layout
        return replace(fields, requests=requests, sample_layout=replace(layout, x=replace(layout.x, flags=flags)))

    def _is_flag(self, name: str, array: ArrayLayout) -> bool:
        is_integer = not array.row_shape and array.dtype.kind in ("b", "i", "u")
        return name in FLAGS and is_integer and name not in self._named_dtypes

    def _dtype_of(self, name: str, array: ArrayLayout) -> torch.dtype | None:
        """Return the dtype of a field; None keeps the stored one."""
        if name in self._named_dtypes:
            return self._named_dtypes[name]
        if self._is_flag(name, array):
            return torch.bool
        return self.dtype if array.dtype.kind == "f" and array.row_shape and name != TARGET else None
