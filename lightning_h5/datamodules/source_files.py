"""The files of a source in a split: their fields, rows and filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import numpy.typing as npt

from .._lightning import rank_zero_info
from ..catalog import SKIP_THEM, TARGET, Catalog, expand_those_there, filled, names_to_load, skip_into
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
    is_attribute_key,
    keys_in,
    matching_objects,
    resolve_path,
    target_of,
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
        files: how files are opened.
        kind: options that define a sample.
        collate: how to batch samples of several shapes.
        bad: collects bad files with their errors and leaves them out; None raises the errors.
        loads_all: without keys, all arrays that share axis 0 are fields; otherwise the input and the target are
            inferred.
        of_segments: arrays with one value per segment that splits and weights need.
        keeps_apart: numbers of the sources may differ in their meaning, since batches are made from one source each.
    """

    catalog: Catalog
    files: FileOptions
    kind: SampleOptions
    collate: Collate | None
    bad: dict[str, str] | None
    loads_all: bool
    of_segments: Sequence[str]
    keeps_apart: bool = False

    @property
    def options(self) -> OpenOptions:
        """How the HDF5 library opens files."""
        return OpenOptions(files=self.files)


class SourceFiles:
    """The files of a source in a split.

    Args:
        reading: how the files are read.
        source: the source.
        samples: arguments of the data module, replaced by the source's own arguments.
        group: value of ``{split}`` in keys.
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
        """The files; with ``on_bad_file="skip"``, missing files are left out."""
        catalog, source, skip = self.reading.catalog, self.source, skip_into(self.reading.bad)
        if skip is None:
            return catalog.files(source.paths, source.argument)
        return tuple(expand_those_there(source.paths, skip, source.argument, catalog.staging))

    @cached_property
    def first(self) -> str:
        """The first file; with ``on_bad_file="skip"``, the first readable file."""
        is_any_left_out = self.reading.bad is not None
        return next(filter(self._can_be_read, self.paths), self.paths[0]) if is_any_left_out else self.paths[0]

    @property
    def readable(self) -> Sequence[str]:
        """The files that can be read; others are left out."""
        return self.paths if self.reading.bad is None else list(filter(self._can_be_read, self.paths))

    def _can_be_read(self, path: str) -> bool:
        def nothing(file: Any) -> tuple[None, list[str]]:
            return None, []

        try:
            self.reading.catalog.search(path, self.reading.options, "nothing", nothing)
        except H5FileError:  # left out when its arrays are listed
            return False
        return True

    @cached_property
    def filters(self) -> Filters:
        """The filters of rows."""
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
        """The arrays of the input and of the target; inferred from the first file without keys."""
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
        """Return the name of an array in the files, from the name of its field or its own name."""
        by_name = {name: key for part in self._parts for name, key in zip(part.names, part.keys, strict=True)}
        name = self._filled(name)
        return by_name.get(name, name)

    def _others(self, name: str) -> Any:
        """Return the other files that hold the array of a field; None if the data's files hold it."""
        paths = {name: path for part in self._parts for name, path in zip(part.names, part.paths, strict=False)}
        return paths.get(self._filled(name))

    def _filled(self, name: str) -> str:
        return name.replace("{split}", self._group)

    @cached_property
    def _samples(self) -> SampleOptions:
        """Options that define a sample; entries for a missing target are removed."""
        kind = self.reading.kind
        if self._absent_target is None:
            return kind
        segments, window = kind.segments, kind.window
        steps = {name: self._of_present(getattr(segments, name)) for name in ("axis", "step_axis", "steps_per")}
        if window is not None:
            window = replace(window, steps=self._of_present(window.steps))
        return replace(
            kind, segments=replace(segments, **steps), window=window, select=self._of_present(kind.select) or {}
        )

    @property
    def _absent_target(self) -> Keys | None:
        """The target from the arguments, if the files lack it."""
        return self.samples.y_key if self.keys[1] is None else None

    def _of_present(self, mapping: Any) -> Any:
        """Remove the entries of a missing target from a mapping of fields; other values are returned unchanged."""
        if (target := self._absent_target) is None or not isinstance(mapping, Mapping):
            return mapping
        of_x, of_y = (field_names(keys, "key") for keys in (self.keys[0], fill_split(target, self._group)))
        inputs, targets = ({*fields.names, *fields.keys} for fields in (of_x, of_y))

        def is_of(pattern: str, names: set[str]) -> bool:
            return any(pattern == name or fnmatchcase(name, pattern) for name in names)

        return {
            pattern: value
            for pattern, value in mapping.items()
            if is_of(str(pattern), inputs) or not is_of(str(pattern), targets)
        }

    def _with_filled_names(self, mapping: Any) -> Any:
        """Replace ``{split}`` in the names of a mapping of fields; other values are returned unchanged."""
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
            decode=self._of_present(self._with_filled_names(samples.decode)),
        )
        return fields if self._group == "train" else self._with_classes_of_training(fields)

    def _with_classes_of_training(self, fields: Fields) -> Fields:
        """Return fields that share the categories of the training arrays."""
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
        """Open the rows, or the segments, that pass the filters.

        Args:
            rows: rows of the files to choose from, or segments; None is all.
            columns: additional arrays with a value for each segment, by name.
            transform: runs on each sample's input.
            target_transform: runs on each sample's target.
            batch_transform: runs on each batch.
        """
        self._compare_with_own()
        subset, indices = (rows, None) if isinstance(rows, SegmentSubset) else (None, rows)
        if subset is not None and not len(subset):
            raise NoRowPassesError("the split has no segment of it. Pass other fractions, or remove the source.")
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
            self._samples,
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
        """Log a message once for all splits."""
        self.reading.catalog.once(("logged", message), partial(rank_zero_info, message))

    def _compare_with_own(self) -> None:
        """Compare the meaning of numbers in further files with that of this source, or of all sources."""
        self.reading.catalog.agreement.source = self.source.name if self.reading.keeps_apart else ""

    @property
    def _statistics(self) -> Mapping[str, FieldStats] | None:
        """The statistics, by the names of the arrays in this split; all splits use those of the training arrays."""
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
        return sample_kind(reading.catalog, self.paths, self.arrays, reading.options, self._samples)

    @property
    def has_segments(self) -> bool:
        """Whether samples are segments or cut from segments; also for sparse matrices and object references."""
        return self._kind.has_segments

    def unfiltered(self, choice: SegmentChoice, *, as_rows: bool = False) -> RowTable:
        """Return all samples, before any filter.

        Args:
            choice: selects segments and their columns.
            as_rows: samples are rows, without inferring the kind of sample from the files.
        """
        self._compare_with_own()
        reading, options = self.reading, self.reading.options
        fields = self._fields(transform=None, target_transform=None, with_index=False)
        arrays = [replace(array, takes_packed=True) for array in fields.requests]
        kind = KindOfSamples(replace(self._samples, sample="row")) if as_rows else self._kind
        names, bad = fields.names, reading.bad
        table, _, _ = open_table(
            reading.catalog, self.paths, arrays, names, options, kind, choice, bad=bad, advice=SKIP_THEM
        )
        return table

    def column(self, table: RowTable, paths: Sequence[str], name: str, n_rows: int, argument: str) -> npt.NDArray[Any]:
        """Return an array with one value per row, for some of the files.

        Args:
            table: the table of all files.
            paths: the files.
            name: the array.
            n_rows: number of rows of the files.
            argument: the argument that names the array, for errors.
        """
        first = table.layouts[0][0].key if self.reading.files.swmr else None
        others = self._others(name)
        if others is not None and len(paths) < len(table.paths):
            raise H5ValueError(
                f"{argument}={name!r} is in another file, and several sources share a file. Name this file in one "
                "source only."
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
    """Return whether a file has all arrays and attributes of the keys; only the first of several groups is checked."""
    groups = reading.kind.segments.groups
    names = arrays_in(keys)
    if groups is not None:
        names = [name if name.startswith("/") else f"{groups.strip('/')}/{name}" for name in names]
    searched = [name for name in names if "*" in name or is_attribute_key(name)]
    arrays = [name for name in names if name not in searched]

    def has(file: Any, name: str) -> tuple[bool, list[str]]:
        return _has_name(file, path, name, allow_external=reading.files.allow_external), []

    catalog, options = reading.catalog, reading.options
    return all(catalog.search(path, options, f"has {name!r}", partial(has, name=name)) for name in searched) and (
        not arrays or catalog.has(path, arrays, options)
    )


def _has_name(file: Any, path: str, name: str, *, allow_external: bool) -> bool:
    """Return whether an open file has arrays that match a pattern, or an attribute."""
    owner, _, attribute = name.rpartition("@") if is_attribute_key(name) else (name, "", "")
    owner = owner.strip("/")
    if "*" in owner:
        kinds: tuple[Literal["group", "array"], ...] = ("group", "array") if attribute else ("array",)
        for kind in kinds:
            stars = matching_objects(file, path, owner, kind, allow_external=allow_external, may_lack=True)
            if stars:
                owner = filled(owner, next(iter(stars)))
                break
        else:
            return False
    elif owner and target_of(file, file, owner, allow_external=allow_external) is None:
        return False
    return not attribute or attribute in resolve_path(file, owner, allow_external=allow_external)[0].attrs
