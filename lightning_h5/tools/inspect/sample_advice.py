"""Advice for samples that are segments or windows: try guesses on the files, and compute their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import numpy as np

from ...catalog import ArrayRequest, Catalog
from ...errors import H5Error, H5ValueError, listing
from ...hdf5 import (
    FAULTS,
    AlikeArrays,
    ArrayLayout,
    OpenOptions,
    ScalarError,
    field_names,
    find_array,
    is_matlab_text,
    is_text_of_matlab,
    keys_in,
    open_h5,
    referenced_arrays,
    with_constants,
)
from ...options import FileOptions, SplitOptions
from ...readers import BlockMap, Boxes, RowGrid, codecs_of
from ...samples import RowTable, SampleOptions, SegmentChoice, open_table, sample_kind, segments_by_time
from .advice import Advice, SampleCost, batch_size_for, read_column, suggest_dtypes
from .recognize import recognize, why_one_of_many
from .recognize_parts import FileLooks, Guess, Look, Reader
from .side_labels import labels_beside, tables_beside

__all__ = ["sample_setting", "with_samples"]

MAX_PARTS = 200  # maximum number of parts to read attributes of
MAX_TEXT = 64  # longer attributes are documents, not names
N_REFERENCES = 20  # number of references of an array to follow
N_MEASURED = 256  # number of samples with chunks to count
MAX_STEPS = 1 << 20  # maximum number of steps per segment to count chunks one by one, over all fields


def with_samples(
    rows: Advice, path: str | list[str], looks: Sequence[FileLooks], described: AlikeArrays | None = None
) -> Advice:
    """Return the advice for files: segments or windows if a guess fits, otherwise ``rows``.

    A guess that raises an error in a dataset is left out. Reads metadata, and small columns of the first file.

    Args:
        rows: the advice if rows are samples.
        path: the files in the form of the argument ``train_path``.
        looks: the arrays of each file.
        described: earlier descriptions of the arrays.
    """
    if rows.datamodule is None and all(look.has_only_coordinates for look in looks):
        return rows
    files = [look.path for look in looks]
    reader = Reader(
        lambda key: read_column(files[:1], key),
        _attributes,
        _texts,
        lambda key: _holds_arrays(files[0], key),
        lambda key: _cells(files[0], key),
    )
    advised: list[tuple[Guess, Advice]] = []
    refusals = []
    for guess in recognize(looks, reader):
        if guess.settings is None:
            advised.append((guess, Advice(datamodule=None, settings={}, reasons=(guess.why,))))
        elif not guess.settings:
            advised.append((guess, rows))
        else:
            try:
                advised.append((guess, _tried_with_labels(guess, path, files, described)))
            except H5Error as error:
                refusals.append(f"{guess.why} But: {error}")
    if not advised:
        whys = (why_one_of_many(looks[0], key) for key in rows.x_keys[:1])
        other = next((Advice(datamodule=None, settings={}, reasons=(why,)) for why in whys if why), None)
        return replace(rows, reasons=(*rows.reasons, *refusals), other=other)
    (guess, first), *alternatives = advised
    if guess.is_sure or not alternatives:
        return first
    return replace(first, other=alternatives[0][1])


def _attributes(parts: Sequence[FileLooks], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the attributes with one number or text that all parts have, on groups and on the named arrays."""
    attributes: list[dict[str, Any]] = []  # of each part
    for path, parts_of_file in groupby(parts[:MAX_PARTS], key=lambda part: part.path):
        attributes += _attributes_in(path, [part.group for part in parts_of_file], names)
    common_keys = [key for key in (attributes[0] if attributes else {}) if all(key in part for part in attributes)]
    return {key: [part[key] for part in attributes] for key in common_keys}


def _attributes_in(path: str, groups: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the attributes of each group of a file, and of the named arrays in it, up to the first unreadable one."""
    attributes_of_groups: list[dict[str, Any]] = [{} for _ in groups]
    with suppress(H5Error, *FAULTS), open_h5(path) as file:
        for group, attributes in zip(groups, attributes_of_groups, strict=True):
            with suppress(*FAULTS):
                for name in ("", *names):
                    item = file["/".join(filter(None, (group, name))) or "/"]
                    attributes |= {f"{name}@{key}": value for key in item.attrs if _is_plain(value := item.attrs[key])}
    return attributes_of_groups


def _texts(parts: Sequence[FileLooks], name: str) -> list[str]:
    """Return the text of an array with one value in each of the first parts; none if a part has no short text there."""
    texts: list[str] = []
    with suppress(H5Error, *FAULTS):
        for path, parts_of_file in groupby(parts[:MAX_PARTS], key=lambda part: part.path):
            with open_h5(path) as file:
                values = [_scalar_in(file, f"{part.group}/{name}".strip("/")) for part in parts_of_file]
            values = [np.ravel(value)[0] for value in values]
            texts += [value.decode() if isinstance(value, bytes) else str(value) for value in values]
        return texts if all(len(text) <= MAX_TEXT for text in texts) else []
    return []


def _scalar_in(file: Any, key: str) -> Any:
    """Return all values of an array, also of one without axes."""
    with suppress(ScalarError):
        return find_array(file, key).array[()]  # opens no other file
    return file[key][()]


def _holds_arrays(path: str, key: str) -> bool:
    """Return whether one of the first references of an array leads to an array of several numbers."""
    with suppress(H5Error, *FAULTS, ValueError), open_h5(path) as file:
        array = find_array(file, key).array
        references = array[tuple(slice(N_REFERENCES) for _ in array.shape)].reshape(-1)[:N_REFERENCES]
        cells = [file[reference] for reference in references if reference]
        # HDF5 searches the whole file for the name of an object that was reached by a reference.
        return any((getattr(cell, "size", 0) or 0) > 1 and not is_text_of_matlab(cell.id) for cell in cells)
    return False


def _cells(path: str, key: str) -> list[Look]:
    """Return the looks of the arrays that an array of references points to; none if it points to other objects."""
    with suppress(H5Error, *FAULTS), open_h5(path) as file:
        names = referenced_arrays(file, path, key, FileOptions())
        arrays = [(file[name], is_matlab_text(file, name)) for name in names]
        return [Look(array.shape, "text" if is_text else str(array.dtype)) for array, is_text in arrays]
    return []


def _is_plain(value: Any) -> bool:
    return (isinstance(value, str) and len(value) <= MAX_TEXT) or (
        isinstance(value, np.generic) and value.dtype.kind in "biuf"
    )


def _tried_with_labels(
    guess: Guess, path: str | list[str], files: Sequence[str], described: AlikeArrays | None
) -> Advice:
    """Return the advice for a guess, with targets from a table beside the files if the files have no target."""
    settings = guess.settings or {}
    if "y_key" not in settings and (tables := tables_beside(files)):
        with suppress(H5Error):
            labels = labels_beside(tables, files, _names_of_segments(files, settings, described), settings.get("split"))
            if labels is not None:
                joined = replace(guess, settings={**settings, **labels[0]}, why=f"{guess.why} {labels[1]}")
                return _tried(joined, path, files, described)
    return _tried(guess, path, files, described)


def _names_of_segments(files: Sequence[str], settings: Mapping[str, Any], described: AlikeArrays | None) -> list[str]:
    """Return the names of the groups or arrays that are segments; none if segments are files, or samples are rows."""
    table, *_ = _opened(files, settings, described)
    if table.parts is None:
        return []
    return [table.name_of_part(part).rpartition("/")[2] for part in range(table.n_parts)]


def _tried(guess: Guess, path: str | list[str], files: Sequence[str], described: AlikeArrays | None) -> Advice:
    """Return the advice for a guess.

    Raises:
        H5Error: the guess does not fit the files.
    """
    settings = dict(guess.settings or {})
    table, names, n_inputs, columns = _opened(files, settings, described)
    x_keys, y_keys = keys_in(settings["x_key"]), keys_in(settings.get("y_key"))
    if not table.n_samples:
        raise H5ValueError(f"there is no sample of {listing(x_keys)}")
    arrays = [layout for at, layout in enumerate(table.layouts[0]) if at not in columns]
    # By the names of the fields: the key of an array includes the name of its group.
    arrays = [array.with_changes(key=name) for array, name in zip(arrays, names, strict=True)]
    x, y = arrays[:n_inputs], arrays[n_inputs:]
    labels = read_column(files, y_keys[0]) if len(y_keys) == 1 else None
    dtypes, reasons = suggest_dtypes(x if len(x) == 1 else [layout for layout in x if layout.packing], y, labels)
    if len(x) > 1:
        dtypes, why = _with_dtypes_of(dict(zip(names, x, strict=False)), dtypes)
        reasons += why
    split = settings.get("split")
    if isinstance(split, Mapping) and split.get("by") == "time":
        try:
            segments_by_time(table, SplitOptions(**split))
        except H5ValueError:
            del settings["split"]
            reasons.append("split is left out: there are too few steps for a validation split.")
    if any(table.is_ragged):  # also a field without steps
        settings.setdefault("collate_fn", "pad")
    cost = _cost_of(table)
    batch_size = batch_size_for(cost.n_samples, cost.n_bytes)
    return Advice(
        datamodule="LazyH5DataModule",
        settings={"train_path": path, **_in_order(settings | dtypes), "batch_size": batch_size},
        x_keys=tuple(x_keys),
        y_keys=tuple(y_keys),
        cached_bytes=_n_bytes(table),
        reasons=(guess.why, *reasons),
        integrity=min(
            array.integrity for arrays in table.layouts.examples for array in arrays if array.storage != "attribute"
        ),
        cost=cost,
    )


def _opened(
    files: Sequence[str], settings: Mapping[str, Any], described: AlikeArrays | None
) -> tuple[RowTable, list[str], int, set[int]]:
    """Open the samples of a data module with the given settings.

    Returns:
        The table; the names of the fields; the number of input fields; the arrays of the table with column numbers of
        sparse matrices, which are not fields.

    Raises:
        H5Error: the settings do not fit the files.
    """
    samples = SampleOptions.parse(
        settings.get("sample"),
        settings.get("segments"),
        settings.get("window"),
        settings.get("select"),
        patch=settings.get("patch"),
    )
    x_key, y_key = settings["x_key"], settings.get("y_key")
    parts = [field_names(with_constants(x_key, y_key, samples.segments.constants), "x_key")]
    parts += [] if y_key is None else [field_names(y_key, "y_key")]
    names, keys = ([*chain(*texts)] for texts in zip(*((part.names, part.keys) for part in parts), strict=True))
    stacks = [stack for part in parts for stack in part.stacks or (None,) * len(part.keys)]
    codecs = codecs_of(settings.get("decode"), names, keys, stacks)
    is_text = [part.kind != "single" or part is not parts[0] for part in parts for _ in part.keys]
    requests = [
        ArrayRequest.of(key, codec, stack, text_ok=text_ok, takes_packed=True)
        for key, codec, stack, text_ok in zip(keys, codecs, stacks, is_text, strict=True)
    ]
    catalog, options = Catalog(described=described), OpenOptions()
    catalog.joins.use(settings.get("table"))
    kind = sample_kind(catalog, files, keys, options, samples)
    table, _, matrices = open_table(catalog, files, requests, names, options, kind, SegmentChoice())
    return table, names, len(parts[0].keys), {at + 1 for at in matrices}


def _n_bytes(table: RowTable) -> int:
    """Return the bytes of all rows of all fields."""
    layouts, n_bytes = table.layouts, 0
    for field in range(layouts.n_fields):
        if any(arrays[field].is_opaque for arrays in layouts.examples):  # their rows have no common size
            n_bytes += sum(layouts.one(part, field).n_bytes for part in range(len(layouts)))
        else:
            row_bytes = np.array([arrays[field].row_bytes for arrays in layouts.examples])[layouts.kinds]
            n_bytes += int((layouts.n_rows(field) * row_bytes).sum())
    return n_bytes


def _in_order(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in the order of a data module's arguments, the most important first."""
    first = (
        "x_key",
        "y_key",
        "table",
        "x_dtype",
        "y_dtype",
        "decode",
        "select",
        "sample",
        "segments",
        "window",
        "patch",
    )
    return {name: settings[name] for name in (*first, *settings) if name in settings}


def _with_dtypes_of(inputs: Mapping[str, ArrayLayout], dtypes: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return ``x_dtype`` for inputs that are not float32, as one name or one per field, and the reason.

    Whole numbers with one value per step may be indices, and are not converted; "auto" converts float64 anyway.
    """
    numbers = {name: array for name, array in inputs.items() if array.packing is None and array.dtype.kind in "biuf"}
    casts = {
        name: array
        for name, array in numbers.items()
        if array.dtype != np.float32 and (array.dtype.kind == "f" or len(array.row_shape) > 0)
    }
    dtypes.pop("x_dtype", None)
    if not casts:
        return dtypes, []
    is_one = all(name in casts or array.dtype == np.float32 for name, array in inputs.items())
    stored = ", ".join(dict.fromkeys(str(array.dtype) for array in casts.values()))
    subject = "inputs" if is_one else listing(casts, 4)
    verb = "are" if is_one or len(casts) > 1 else "is"
    why = f"x_dtype: float32, since {subject} {verb} stored as {stored}."
    return {"x_dtype": "float32" if is_one else dict.fromkeys(casts, "float32"), **dtypes}, [why]


def _cost_of(table: RowTable) -> SampleCost:
    """Return the cost of a sample, from the chunks of up to 256 of them."""
    n = table.n_samples
    is_long = len(table.step_fields) * table.n_rows > MAX_STEPS * max(1, table.n_segments)  # too many to count each
    samples = np.unique(np.linspace(0, n - 1, min(n, N_MEASURED)).astype(np.int64))
    rows = [] if is_long else table.indexer.rows_of(samples).fields
    n_chunks = bytes_at_random = bytes_in_chunk_order = 0.0
    boxes = table.boxes(rows) if rows else []
    for field in table.step_fields:
        # With many parts, only the parts of the samples.
        if is_long:
            parts = np.unique(np.linspace(0, table.n_parts - 1, min(table.n_parts, N_MEASURED)).astype(np.int64))
        else:
            part_of_rows = np.broadcast_to(boxes[field].part_of_rows, boxes[field].rows.shape)
            parts, part_of_rows = np.unique(part_of_rows, return_inverse=True)
        layouts = [table.layouts.one(part, field) for part in parts.tolist()]
        per_sample = table.n_rows // n if is_long else len(rows[field].rows) // len(samples)
        if all(layout.chunks is None for layout in layouts):
            bytes_at_random += per_sample * layouts[0].row_bytes
            bytes_in_chunk_order += per_sample * layouts[0].row_bytes
            continue
        grids = [RowGrid.of(layout, layout.rows_per_chunk) for layout in layouts]
        n_blocks = sum(grid.n_blocks for grid in grids) / len(parts) * table.n_parts
        if is_long:
            blocks_per_sample = n_blocks / table.n_segments
        elif rows[field].patches is not None:  # the cells of a patch, which differ in number, are a block each
            blocks_per_sample = len(rows[field].rows) / len(samples)
        else:
            blocks = BlockMap(grids).locate(Boxes(part_of_rows, boxes[field].rows))[0]
            lengths = rows[field].lengths
            counts = np.full(len(samples), per_sample) if lengths is None else lengths
            sample_of_row = np.repeat(np.arange(len(samples)), counts)
            blocks_per_sample = len(np.unique(sample_of_row * (int(blocks.max(initial=0)) + 1) + blocks)) / len(samples)
        block_bytes = layouts[0].chunk_span_bytes
        n_chunks += blocks_per_sample * max(1, block_bytes // max(1, layouts[0].chunk_bytes))
        bytes_at_random += blocks_per_sample * block_bytes
        bytes_in_chunk_order += n_blocks * block_bytes / n
    return SampleCost(
        n_samples=n,
        n_segments=table.n_segments if table.indexer.has_places else 0,
        n_bytes=table.indexer.mean_bytes([array.row_bytes for array in table.as_read]),
        n_chunks=round(n_chunks, 1),
        bytes_decoded=round(bytes_at_random),
        bytes_decoded_in_chunk_order=round(min(bytes_at_random, bytes_in_chunk_order)),
    )


def sample_setting(arrays: Sequence[ArrayLayout], rows_of_files: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """Return ``sample``, if a dataset raises an error without it, and the reason.

    Args:
        arrays: input and target of one file.
        rows_of_files: rows of each file.
    """
    from ...catalog import shape_of_images

    shape = shape_of_images(arrays, rows_of_files, len(rows_of_files))
    if shape is None:
        return {}, []
    why = (
        f"sample: row takes an index along axis 0 as a sample. All arrays have the shape {shape} in each file. If a "
        "file is one image or volume, pass sample: segment instead."
    )
    return {"sample": "row"}, [why]
