"""The fields of samples that are dicts: names, arrays and dtypes as a user gives them, and as files have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..catalog import (
    SKIP_THEM,
    TARGET,
    ArrayRequest,
    Catalog,
    FieldMap,
    checked_names,
    keys_of,
    names_to_load,
    paths_of,
    stacks_of,
)
from ..errors import H5ValueError, listing, without_frames
from ..hdf5 import ArrayLayout, OpenOptions, torch_dtype
from ..samples import KindOfSamples, RowTable, SampleOptions, SegmentChoice, SparseField, open_table, with_matrices
from ..types import DTypeLike, cached_property
from .fields import Decode, Fields, codecs_of
from .sample_layout import Transform

__all__ = ["FieldsOfFiles", "NamedFields"]

FLAGS = ("cs_label", "bg_label")


@dataclass(frozen=True, eq=False)
class FieldsOfFiles:
    """What files have of the fields that a user names.

    Attributes:
        table: the files with the fields of a sample and, after these, those of filters.
        names: of the fields of a sample.
        numbers: the number of each field in the table, that of a sparse matrix counted once.
        arrays: of the first file, by the names of fields; rows of sparse matrices as if they were dense.
        matrices: sparse matrices among them (see ``open_table``).
        kind: what samples are.
    """

    table: RowTable
    names: Sequence[str]
    numbers: Mapping[str, int]
    arrays: Mapping[str, ArrayLayout]
    matrices: Mapping[int, SparseField]
    kind: KindOfSamples


class NamedFields:
    """Fields as a user names them.

    Args:
        load_fields: names of the fields; None for all arrays with the same rows.
        field_map: for a name its array in the files.
        samples: what a sample is.
        dtype: of floating fields with several values, or of fields by their names.
        decode: what decodes rows.

    Attributes:
        keys: the arrays that names stand for, if these are called otherwise in the files.
        target_axes: order of the axes of the target, if it is given.
        dtype: of floating fields with several values; None leaves them as they are stored.

    Raises:
        H5ValueError: a name or a dtype makes no sense.
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
            self._named_dtypes = {name: torch_dtype(one, f"dtype[{name!r}]") for name, one in dtype.items()}
        else:
            self.dtype = torch_dtype(dtype, "dtype")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise H5ValueError(f"dtype={dtype!r} is for floating fields. Pass a floating dtype, or None to leave all.")
        self.keys, self.target_axes = keys_of(field_map)
        if isinstance(load_fields, Sequence) and not isinstance(load_fields, str):
            known = {*load_fields, *map(self.key, load_fields)}
            load_fields = [*load_fields, *(name for name in samples.segments.constants if name not in known)]
        self._load_fields, self._field_map, self._decode = load_fields, field_map, decode

    def key(self, name: str) -> str:
        """Return the array of a field."""
        return self.keys.get(name, name)

    @cached_property
    def arrays(self) -> list[str]:
        """The arrays of the fields that were named."""
        return [] if self._load_fields is None else [self.key(name) for name in checked_names(self._load_fields)]

    @property
    def of_other_files(self) -> list[str]:
        """Names of the fields whose arrays are in other files."""
        mapped = list(self._field_map or {})
        pairs = zip(mapped, paths_of(self._field_map, mapped), strict=True)
        return [name for name, others in pairs if others is not None]

    @without_frames
    def look(
        self,
        catalog: Catalog,
        paths: Sequence[str],
        options: OpenOptions,
        kind: KindOfSamples,
        choice: SegmentChoice,
        *,
        columns: Sequence[str] = (),
        of_label: Sequence[str] = (),
        bad: dict[str, str] | None = None,
        takes_packed: bool = False,
    ) -> FieldsOfFiles:
        """Return what files have of these fields.

        Args:
            catalog: opens the files.
            paths: the files.
            options: how they are opened.
            kind: what samples are.
            choice: see ``open_table``.
            columns: names of further arrays that filters ask for.
            of_label: names of arrays that say which steps have a label.
            bad: see ``open_table``.
            takes_packed: accept packed integers as they are stored.

        Raises:
            H5Error: see ``open_table``.
        """
        if kind.options.segments.groups is not None and self._load_fields is None:
            raise H5ValueError("segments.groups was given without load_fields. Name the fields, relative to a group.")
        names = names_to_load(catalog, paths, options, self._load_fields, self.keys, [*columns, *of_label], bad)
        wanted = list(dict.fromkeys([*names, *columns, *of_label]))
        if unknown := [name for name in self._named_dtypes if name not in wanted]:
            raise H5ValueError(f"dtype names {listing(unknown)}; the fields are {listing(wanted)}. Use their names.")
        stacks = stacks_of(self._field_map, wanted)
        codecs = codecs_of(self._decode, names, list(map(self.key, names)), stacks[: len(names)])
        codecs += [None] * (len(wanted) - len(names))
        others = paths_of(self._field_map, wanted)
        asked = [
            ArrayRequest.of(
                self.key(name),
                codec,
                stack,
                dtype=self._named_dtypes.get(name),
                argument=f"dtype={{{name!r}: {{}}}}",
                # Columns that only filters read are decoded for them.
                takes_packed=takes_packed or name not in (*names, *of_label),
                paths=of_name,
            )
            for name, codec, stack, of_name in zip(wanted, codecs, stacks, others, strict=True)
        ]
        singles = wanted[len(names) :]
        table, _, matrices = open_table(
            catalog, paths, asked, wanted, options, kind, choice, singles=singles, bad=bad, advice=SKIP_THEM
        )
        layouts = iter(enumerate(table.layouts[0]))
        arrays = {}
        for name, (at, array) in zip(names, layouts, strict=False):
            arrays[name] = array
            if at in matrices:
                arrays[name] = array.with_changes(row_shape=(matrices[at].n_columns,))
                next(layouts)
        numbers = {name: number for number, name in enumerate(wanted)}
        return FieldsOfFiles(table, names, numbers, arrays, matrices, kind)

    def fields(self, found: FieldsOfFiles, *, transform: Transform | None, with_index: bool) -> Fields:
        """Return the fields of a dataset of what files have.

        Args:
            found: what they have.
            transform: runs on each sample.
            with_index: add each sample's index.
        """
        fields = Fields.of(
            {name: self.key(name) for name in found.names},
            None,
            x_dtype={name: self._dtype_of(name, array) for name, array in found.arrays.items()},
            y_dtype=None,
            transform=transform,
            target_transform=None,
            with_index=with_index,
            flags=tuple(self._is_flag(name, array) for name, array in found.arrays.items()),
            decode=self._decode,
        )
        if not found.matrices:
            return fields
        asked, _ = with_matrices(fields.asked, found.names, found.kind.matrices, found.kind.options)
        return replace(fields, asked=tuple(asked), matrices=found.matrices)

    def _is_flag(self, name: str, array: ArrayLayout) -> bool:
        is_integer = not array.row_shape and array.dtype.kind in ("b", "i", "u")
        return name in FLAGS and is_integer and name not in self._named_dtypes

    def _dtype_of(self, name: str, array: ArrayLayout) -> torch.dtype | None:
        """Return what a field becomes; None leaves it as stored."""
        if name in self._named_dtypes:
            return self._named_dtypes[name]
        if self._is_flag(name, array):
            return torch.bool
        return self.dtype if array.dtype.kind == "f" and array.row_shape and name != TARGET else None
