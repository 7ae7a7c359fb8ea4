"""The files of a source in a split: which arrays its fields are, and its rows, opened with their filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy.typing as npt

from .._lightning import rank_zero_info
from ..catalog import SKIP_THEM, TARGET, Catalog, expand_those_there, names_to_load, skip_into
from ..datasets import Fields, FieldStats, FileSamples, open_samples, read_stats
from ..datasets.collate import Collate
from ..errors import H5FileError, H5ValueError
from ..hdf5 import (
    FieldNames,
    OpenOptions,
    arrays_in,
    field_names,
    fill_split,
    guess_keys_in,
    keys_in,
    matching_objects,
    with_constants,
)
from ..options import FileOptions
from ..readers import ClassNumbers
from ..samples import (
    Filters,
    KindOfSamples,
    NoRowPassesError,
    RowTable,
    SampleOptions,
    SegmentChoice,
    SegmentSubset,
    column_of,
    criteria_of,
    open_table,
    sample_kind,
)
from ..types import IntArray, Keys, cached_property
from .arguments import SampleArguments, parsed_fields
from .dtypes_of_fields import is_settled_late, settled
from .training_rows import Source

__all__ = ["Reading", "SourceFiles", "has_keys"]


@dataclass(frozen=True, eq=False)
class Reading:
    """How the files of all sources are read.

    Attributes:
        catalog: contents of the files.
        files: how they are opened.
        kind: what a sample is.
        collate: how samples of several shapes become a batch.
        bad: gets files that are left out, with what is wrong with them; None raises their errors.
        loads_all: without keys, all arrays that share axis 0 are fields; otherwise the input and the target are
            inferred.
        of_segments: arrays with values of segments that splits and weights ask for.
    """

    catalog: Catalog
    files: FileOptions
    kind: SampleOptions
    collate: Collate | None
    bad: dict[str, str] | None
    loads_all: bool
    of_segments: Sequence[str]

    @property
    def options(self) -> OpenOptions:
        """How the HDF5 library opens files."""
        return OpenOptions(files=self.files)


class SourceFiles:
    """The files of a source in a split.

    Args:
        reading: how they are read.
        source: the source.
        samples: arguments of the data module, with those that the source has of its own.
        group: what ``{split}`` stands for in keys.
        without_target: leave the target out if the files lack it.
    """

    def __init__(
        self, reading: Reading, source: Source, samples: SampleArguments, group: str, *, without_target: bool = False
    ) -> None:
        self.source, self.samples, self._group = source, samples, group
        select: Any = self._with_filled_names(reading.kind.select)
        self.reading = replace(reading, kind=replace(reading.kind, select=select))
        self._without_target = without_target

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The files; those that are missing are left out if the user asked for that."""
        catalog, source, skip = self.reading.catalog, self.source, skip_into(self.reading.bad)
        if skip is None:
            return catalog.files(source.paths, source.argument)
        return tuple(expand_those_there(source.paths, skip, source.argument, catalog.staging))

    @cached_property
    def first(self) -> str:
        """The first file, or the first that can be read if others are left out."""

        def nothing(file: Any) -> tuple[None, list[str]]:
            return None, []

        for path in self.paths if self.reading.bad is not None else ():
            try:
                self.reading.catalog.search(path, self.reading.options, "nothing", nothing)
            except H5FileError:  # left out when its arrays are looked at
                continue
            return path
        return self.paths[0]

    @cached_property
    def filters(self) -> Filters:
        """Which rows are kept."""
        samples, where = self.samples, self.samples.where
        where = self._with_filled_names(where)
        named, axes = parsed_fields(samples.fields)
        target = TARGET
        if named is None and samples.y_key is not None:
            of_target = field_names(fill_split(samples.y_key, self._group), "y_key")
            target = of_target.names[0] if of_target.kind == "single" else TARGET
        mask = samples.valid_mask
        return Filters(
            criteria=criteria_of(where=where),
            label=samples.label,
            valid_mask=None if mask is None else self._filled(mask),
            target=target,
            target_axes=axes,
        )

    @property
    def _is_settled_late(self) -> bool:
        samples = self.samples
        is_of_fields = samples.fields is not None or (samples.x_key is None and self.reading.loads_all)
        return is_settled_late(samples.x_dtype, is_of_fields=is_of_fields)

    @cached_property
    def keys(self) -> tuple[Keys, Keys | None]:
        """The arrays of the input and of the target; guessed from the first file if none are named."""
        samples = self.samples
        named, _ = parsed_fields(samples.fields)
        x_key, y_key = (samples.x_key, samples.y_key) if named is None else (named, None)
        constants = self.reading.kind.segments.constants
        if x_key is None and self.reading.loads_all:
            x_key = self._all_arrays()
        elif x_key is None:
            x_key, y_key = self._guessed()
        x_key = fill_split(with_constants(x_key, y_key, constants), self._group)
        y_key = None if y_key is None else fill_split(y_key, self._group)
        if self._without_target and y_key is not None:
            own, joins = arrays_in(y_key, of_others=False), self.reading.catalog.joins
            is_elsewhere = any(map(joins.is_column, own)) or own != arrays_in(y_key)
            if is_elsewhere or not has_keys(self.reading, self.first, y_key):
                rank_zero_info(f"predicting without a target: {y_key!r} is not in {self.first!r}")
                y_key = None
        return x_key, y_key

    def _guessed(self) -> tuple[str, str | None]:
        path = self.first

        def guess(file: Any) -> tuple[tuple[str, str | None], list[str]]:
            keys = guess_keys_in(file, path)
            return keys, keys_in(*keys)

        return self.reading.catalog.search(path, self.reading.options, "keys", guess)

    def _all_arrays(self) -> dict[str, str]:
        reading = self.reading
        if reading.kind.segments.groups is not None:
            raise H5ValueError("segments.groups was given without fields. Name the fields, relative to a group.")
        of_filters = [*self.filters.columns, *self.filters.of_label]
        names = names_to_load(
            reading.catalog, self.paths, reading.options, None, {}, of_filters, reading.bad, argument="fields"
        )
        return {name: name for name in names}

    @cached_property
    def _parts(self) -> list[FieldNames]:
        return [field_names(key, "key") for key in self.keys if key is not None]

    @property
    def arrays(self) -> list[str]:
        """The arrays of all fields."""
        return [key for part in self._parts for key in part.keys]

    def key(self, name: str) -> str:
        """Return what the files call an array: that of a field, or the one of this name."""
        by_name = {name: key for part in self._parts for name, key in zip(part.names, part.keys, strict=True)}
        name = self._filled(name)
        return by_name.get(name, name)

    def _others(self, name: str) -> Any:
        """Return the other files that have the array of a field; None for those of the data."""
        paths = {name: path for part in self._parts for name, path in zip(part.names, part.paths, strict=False)}
        return paths.get(self._filled(name))

    def _filled(self, name: str) -> str:
        return name.replace("{split}", self._group)

    def _with_filled_names(self, mapping: Any) -> Any:
        """Return a mapping from fields with ``{split}`` filled in their names; any other value unchanged."""
        is_mapping = isinstance(mapping, Mapping)
        return {self._filled(str(name)): value for name, value in mapping.items()} if is_mapping else mapping

    def _fields(self, *, transform: Any, target_transform: Any, with_index: bool) -> Fields:
        (x_key, y_key), samples = self.keys, self.samples
        has_target = y_key is not None
        fields = Fields.of(
            x_key,
            y_key,
            x_dtype=None if self._is_settled_late else self._with_filled_names(samples.x_dtype),
            y_dtype=self._with_filled_names(samples.y_dtype) if has_target else None,
            transform=transform,
            target_transform=target_transform if has_target else None,
            with_index=with_index,
            as_one=self.reading.kind.has_mask,
            decode=self._with_filled_names(samples.decode),
        )
        return fields if self._group == "train" else self._with_classes_of_training(fields)

    def _with_classes_of_training(self, fields: Fields) -> Fields:
        """Return fields whose categories are known by the names that arrays have in training."""
        named = arrays_in(self.samples.x_key, self.samples.y_key, parsed_fields(self.samples.fields)[0])
        of_training = {self._filled(key): str(fill_split(key, "train")) for key in named}
        requests = [
            replace(request, codec=ClassNumbers(of_training.get(request.key))) if request.is_category else request
            for request in fields.requests
        ]
        return replace(fields, requests=tuple(requests))

    def open(
        self,
        rows: IntArray | SegmentSubset | None,
        *,
        columns: Sequence[str] = (),
        transform: Any,
        target_transform: Any,
        batch_transform: Any,
    ) -> FileSamples:
        """Return the rows, or the segments, that pass the filters.

        Args:
            rows: rows of the files to choose among, or segments; None are all.
            columns: further arrays with a value for each segment, by their names here.
            transform: runs on each sample's input.
            target_transform: runs on each sample's target.
            batch_transform: runs on each batch.
        """
        subset, indices = (rows, None) if isinstance(rows, SegmentSubset) else (None, rows)
        if subset is not None and not len(subset):
            raise NoRowPassesError("the split has no segment of it. Pass other fractions, or leave the source out.")
        reading, samples = self.reading, self.samples
        of_others = columns if subset is None else reading.of_segments
        settle = partial(
            settled,
            names=self._parts[0].names,
            x_dtype=samples.x_dtype,
            target=self.filters.target,
            log=self._log_once,
        )
        return open_samples(
            self.paths,
            self._fields(transform=transform, target_transform=target_transform, with_index=samples.with_index),
            reading.kind,
            reading.files,
            reading.catalog,
            normalize=self._statistics,
            collate=reading.collate,
            choice=SegmentChoice(
                subset=subset, columns=list(map(self.key, columns)), other_columns=list(map(self.key, of_others))
            ),
            indices=indices,
            batch_transform=batch_transform,
            filters=self.filters,
            bad=reading.bad,
            advice=SKIP_THEM,
            settle=settle if self._is_settled_late else None,
        )

    def _log_once(self, message: str) -> None:
        """Log a message that all splits have in common."""
        self.reading.catalog.once(("logged", message), partial(rank_zero_info, message))

    @property
    def _statistics(self) -> Mapping[str, FieldStats] | None:
        """Statistics by what the arrays are called in a split: those of the training arrays hold for all."""
        if self.samples.normalize is None:
            return None
        stats = read_stats(self.samples.normalize)
        for key in keys_in(self.samples.x_key, self.samples.y_key, parsed_fields(self.samples.fields)[0]):
            own, train = self._filled(key), str(fill_split(key, "train"))
            for name in (key, train):
                if name != own and own not in stats and name in stats:
                    stats[own] = stats.pop(name)
        return stats

    @property
    def _kind(self) -> KindOfSamples:
        reading = self.reading
        return sample_kind(reading.catalog, self.paths, self.arrays, reading.options, reading.kind)

    @property
    def has_segments(self) -> bool:
        """Whether samples are of segments: also rows of sparse matrices, and what references lead to."""
        return self._kind.has_segments

    def unfiltered(self, choice: SegmentChoice, *, as_rows: bool = False) -> RowTable:
        """Return all samples, before any filter.

        Args:
            choice: which segments, and what else is asked of them.
            as_rows: samples are rows, whatever the files may be, which is checked when they are opened.
        """
        reading, options = self.reading, self.reading.options
        fields = self._fields(transform=None, target_transform=None, with_index=False)
        arrays = [replace(array, takes_packed=True) for array in fields.requests]
        kind = KindOfSamples(replace(reading.kind, sample="row")) if as_rows else self._kind
        names, bad = fields.names, reading.bad
        table, _, _ = open_table(
            reading.catalog, self.paths, arrays, names, options, kind, choice, bad=bad, advice=SKIP_THEM
        )
        return table

    def column(self, table: RowTable, paths: Sequence[str], name: str, n_rows: int, argument: str) -> npt.NDArray[Any]:
        """Return one value of each row of some of the files.

        Args:
            table: of all of them.
            paths: these.
            name: the array.
            n_rows: rows of these.
            argument: what it was given as, for errors.
        """
        first = table.layouts[0][0].key if self.reading.files.swmr else None
        others = self._others(name)
        if others is not None and len(paths) < len(table.paths):
            raise H5ValueError(
                f"{argument}={name!r} is of another file, and several sources have a file in common. Name it once."
            )
        return column_of(
            paths,
            self.key(name),
            n_rows,
            argument=argument,
            files=self.reading.files,
            same_rows_as=first,
            catalog=self.reading.catalog,
            others=others,
        )


def has_keys(reading: Reading, path: str, keys: Keys | None) -> bool:
    """Return whether a file has all arrays that keys name."""
    names, options = arrays_in(keys), reading.options
    patterns = [name for name in names if "*" in name]
    for pattern in patterns:

        def matches(file: Any, pattern: str = pattern) -> tuple[bool, list[str]]:
            allow_external = reading.files.allow_external
            objects = matching_objects(file, path, pattern, "array", allow_external=allow_external, may_lack=True)
            return bool(objects), []

        if not reading.catalog.search(path, options, f"arrays like {pattern!r}", matches):
            return False
    others = [name for name in names if name not in patterns]
    return not others or reading.catalog.has(path, others, options)
