"""From what a user says of segments to a table of their steps, and of the samples that they make."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..catalog import WITHOUT_THEM, Asked, Catalog, Skip, collector_paused, each_readable, with_stacks
from ..errors import H5ValueError
from ..hdf5 import GroupError, OpenOptions
from .indexer import Indexer
from .patch_tables import VolumeTable
from .row_filters import NoRowPassesError
from .row_table import RowTable
from .segment_builder import SegmentBuilder
from .segment_choice import SegmentChoice, samples_that_pass, samples_with_lines, values_of_segments
from .segment_fields import SampleOptions, SegmentField, fields_of
from .windows import samples_of

__all__ = ["segment_table"]


def segment_table(
    catalog: Catalog,
    paths: Sequence[str],
    asked: Sequence[Asked],
    names: Sequence[str],
    options: OpenOptions,
    given: SampleOptions,
    choice: SegmentChoice,
    *,
    singles: Collection[str] = (),
    skip: Skip | None = None,
    advice: str = WITHOUT_THEM,
) -> RowTable:
    """Return the steps of the segments of files, with the samples that they make. Reads metadata, and what cuts rows.

    Args:
        catalog: opens the files.
        paths: the files.
        asked: the arrays, relative to their group if segments are groups.
        names: what a sample calls them.
        options: how files are opened.
        given: what a sample is.
        choice: which of the segments are kept, and what else is asked of them.
        singles: names of fields of which a sample has one step.
        skip: called with files that are missing or broken, which are left out; None raises their errors.
        advice: what to do to train without broken files, for their errors.

    Raises:
        H5FileError: a file is missing or broken.
        H5KeyError: an array is missing, or no group or array matches the pattern.
        H5ValueError: arrays do not belong together, or no segment has a sample.
    """
    if options.swmr:
        raise H5ValueError(
            "files.swmr was given with segments, windows or patches, and where segments end is not known while a "
            "file is written. Wait until it is closed."
        )

    def build(fields: Sequence[SegmentField]) -> SegmentBuilder:
        volumes = None if given.patch is None else VolumeTable(fields, given.patch)
        builder = SegmentBuilder(catalog, options, fields, given.segments, choice.all_columns, volumes)
        try:
            with collector_paused():
                for path, (guard, found) in each_readable(paths, builder.look, skip, advice):
                    builder.add(path, guard, found)
        except GroupError as error:  # a list of names that is not of members of a table is one of arrays
            if (stacks := with_stacks([field.asked for field in fields], error)) is None:
                raise
            return build([replace(field, asked=one) for field, one in zip(fields, stacks, strict=True)])
        return builder

    fields = fields_of(asked, names, given, singles, catalog.joins.is_column)
    if choice.columns or choice.criteria or skip is not None:
        return _chosen(build(fields), given, choice)
    joined = catalog.joins.sources(asked)
    which = ("segments", tuple(paths), tuple(asked), tuple(names), options, repr(given), tuple(singles), joined)
    made = catalog.once(which, lambda: _chosen(build(fields), given, SegmentChoice()))
    subset = choice.subset
    return made if subset is None else replace(made, indexer=subset.of(made.indexer))


def _chosen(builder: SegmentBuilder, given: SampleOptions, choice: SegmentChoice) -> RowTable:
    """Return the samples of the segments that are kept."""
    made = builder.made()
    if builder.are_cells and given.sample is None and given.window is None:
        given = replace(given, sample="segment")
    indexer: Indexer
    if builder.volumes is None:
        segments, first_segments = builder.segments_of(made)
        name_of = replace(made, first_segments=first_segments).segment_name
        indexer = samples_of(segments, builder.fields, given, name_of)
    else:
        first_segments = builder.first_lines
        indexer = builder.volumes.indexer(made.starts, builder.n_lines, made.layouts[0], given.seed)
    made = replace(made, indexer=indexer, first_segments=first_segments)
    if builder.lines is not None:
        made = replace(made, indexer=samples_with_lines(made, builder.lines))
    if choice.subset is not None:
        made = replace(made, indexer=choice.subset.of(made.indexer))
    passes = None
    if choice.criteria:
        values = {key: builder.values_of(key) for key in choice.all_columns}
        indexer, passes = samples_that_pass(made, choice.criteria, choice.keys, values)
        made = replace(made, indexer=indexer)
        if passes is not None and not made.n_samples:
            raise NoRowPassesError(
                f"filters leave {int(passes.sum()):,} of {len(passes):,} steps, and no segment has enough of them for "
                "a sample. Loosen a filter, or take fewer steps."
            )
    builder.check_present(made, passes)
    return replace(made, columns={key: values_of_segments(made, key, builder.values_of(key)) for key in choice.columns})
