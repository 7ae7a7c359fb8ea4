"""``bench_file``: rows per second from your files on this machine, and the settings to use."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..datasets import LazyFileDataset, room
from ..datasets.catalog import held_fields
from ..errors import H5Error, H5ValueError
from ..hdf5 import OpenOptions, expand_paths, guess_keys, keys_in
from ..progress_bar import progress_bar
from ..readers import is_pooled
from ..sizes import bytes_text, whole
from ..types import Keys, Paths
from .advice import (
    MAX_OF_ROOM,
    SHUFFLE_BYTES,
    Advice,
    further_settings,
    group_key_in,
    map_files,
    mix_bytes,
    sample_setting,
    use_workers,
    yaml_of,
)
from .inspection import about_columns, column_of, inspect_with_layouts
from .measuring import BenchResult, Candidate, measure_in_turn
from .suggestions import trained_row_bytes

__all__ = ["BenchReport", "bench_file"]

NEARLY = 0.95
"""A setting with this share of the fastest rate counts as equally fast: runs differ by as much."""

NOISY = 0.25
"""A spread above this says more about the machine than about the settings."""


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What ``bench_file`` measured, and what to use.

    Attributes:
        files: the files.
        n_rows: rows of all files.
        row_bytes: bytes of a row, decoded.
        batch_size: rows of a batch.
        results: what was measured.
        left_out: settings that were not measured, and why.
        chosen: the recommended result; its settings are exactly those that were measured.
        reasons: why, and what to know about it, in sentences.
        yaml: the recommendation as the ``data`` part of a configuration.
    """

    files: tuple[str, ...]
    n_rows: int
    row_bytes: int
    batch_size: int
    results: tuple[BenchResult, ...]
    left_out: dict[str, str]
    chosen: BenchResult
    reasons: tuple[str, ...]
    yaml: str


def bench_file(
    path: Paths,
    x_key: Keys | None = None,
    y_key: Keys | None = None,
    *,
    batch_size: int | None = None,
    num_workers: int = 2,
    seconds: float = 2.0,
    rounds: int = 3,
    shows_progress: bool = False,
) -> BenchReport:
    """Measure how fast shuffled training batches come from files with several settings, and recommend one.

    Plain h5py (one ``array[i]`` per sample, in this process) is compared with the training loaders of
    ``LazyH5DataModule`` with its defaults, with worker processes, with the setting that suits the storage (``mmap`` for
    contiguous arrays, ``shuffle_bytes`` for all rows if the default holds only a part), and of
    ``RankCachedH5DataModule``. All take turns, after an epoch or some seconds to warm up, and medians decide. Each data
    module has exactly the settings that are reported: dtypes, split and batch size are those that ``inspect`` suggests.
    Transforms, the model and copies to a GPU are not measured.

    Args:
        path: a file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of these.
        x_key: the input array, a list of arrays, or a mapping. None takes the arrays that ``inspect`` suggests.
        y_key: the target, in the same forms. None gives inputs alone.
        batch_size: rows of a batch. None takes what ``inspect`` suggests: 64, fewer if rows are few or large.
        num_workers: worker processes of the setting that has some; 0 leaves it out.
        seconds: time for each measurement; up to twice as long if an epoch ends by then.
        rounds: measurements of each setting.
        shows_progress: show progress on the standard error: a bar on a terminal, otherwise a line every 30 seconds.

    Raises:
        H5ValueError: an argument makes no sense, or there are fewer rows than a batch; before anything is measured.
        H5KeyError: an array is missing; before anything is measured.
        H5FileError: a file is missing, damaged, or needs a filter that is not installed; before anything is measured.
        H5CorruptError: rows do not decode.

    Cost:
        About a minute with the defaults. All settings together take at most half of the free memory besides what the
        default settings take; what needs more is left out.

    Example:
        >>> report = bench_file("digits.h5", "train/images", "train/labels")
        >>> print(report.yaml)
    """
    batch_size = None if batch_size is None else whole(batch_size, "batch_size", least=1)
    num_workers, rounds = whole(num_workers, "num_workers", least=0), whole(rounds, "rounds", least=1)
    if not 0 < seconds < math.inf:
        raise H5ValueError(f"seconds={seconds!r} was given. Pass a time of more than 0, such as 2.")
    if x_key is None and y_key is not None:
        raise H5ValueError(f"y_key={y_key!r} was given without x_key. Pass both.")
    paths = expand_paths(path)
    if x_key is None:
        suggested = inspect_with_layouts(paths[0])[0].advice.settings
        x_key, y_key = (suggested["x_key"], suggested.get("y_key")) if suggested else guess_keys(paths[0])
    with closing(LazyFileDataset(paths, x_key, y_key, sample="row")) as dataset:
        settings, comments = _settings(dataset, keys_in(x_key), keys_in(y_key), batch_size)
        given = {"train_path": path, "x_key": x_key} | ({} if y_key is None else {"y_key": y_key})
        settings = {name: _plain(value) for name, value in given.items()} | settings
        candidates, left_out = _candidates(dataset, settings, len(keys_in(x_key)), num_workers)
    with progress_bar(len(candidates) * (1 + rounds), "bench", shows_progress=shows_progress, unit="run") as bar:
        found, failed = measure_in_turn(candidates, dataset.table, seconds=seconds, rounds=rounds, bar=bar)
    left_out |= failed
    ours = {each: found[each] for each in candidates if each.datamodule is not None and each in found}
    if not ours:
        why = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise H5Error(f"no data module could be measured: {why}. Pass other arrays or files.")
    fastest = max(ours.values(), key=lambda result: result.rows_per_second)
    simplest = next(each for each in ours if ours[each].rows_per_second >= NEARLY * fastest.rows_per_second)
    chosen = ours[simplest]
    plain = next((result for each, result in found.items() if each.datamodule is None), None)
    return BenchReport(
        files=dataset.table.paths,
        n_rows=len(dataset),
        row_bytes=dataset.cost.row_bytes,
        batch_size=settings["batch_size"],
        results=tuple(found[each] for each in candidates if each in found),
        left_out=left_out,
        chosen=chosen,
        reasons=(*_reasons(chosen, simplest.note, fastest, plain), *comments),
        yaml=yaml_of(Advice(datamodule=chosen.datamodule, settings=chosen.settings, comments=tuple(comments))),
    )


def _settings(
    dataset: LazyFileDataset, x_keys: list[str], y_keys: list[str], batch_size: int | None
) -> tuple[dict[str, Any], list[str]]:
    """The settings that ``inspect`` suggests for these arrays, and sentences that belong into the configuration."""
    table, n_rows = dataset.table, len(dataset)
    if not n_rows or (batch_size or 0) > n_rows:
        there_are = "there is 1 row" if n_rows == 1 else f"there are {n_rows} rows"
        to_do = f"Pass a batch_size of at most {n_rows}." if n_rows else "Pass files that have some."
        raise H5ValueError(f"batch_size={batch_size} was asked for, and {there_are}. {to_do}")
    arrays = table.layouts[0]
    columns = about_columns(inspect_with_layouts(table.paths[0], reads_columns=False)[0].arrays)["columns"]
    group_key = group_key_in(columns, arrays[0].n_rows, [*x_keys, *y_keys])
    x, y = arrays[: len(x_keys)], arrays[len(x_keys) :]
    settings, _ = further_settings(x, y, n_rows, group_key, partial(column_of, table.paths))
    sample, comments = sample_setting(arrays, np.diff(table.starts).tolist())
    return settings | ({} if batch_size is None else {"batch_size": batch_size}) | sample, comments


def _candidates(
    dataset: LazyFileDataset, settings: dict[str, Any], n_inputs: int, num_workers: int
) -> tuple[list[Candidate], dict[str, str]]:
    """The settings to measure, the simplest first, and why others do not fit the free memory."""
    lazy, table = "LazyH5DataModule", dataset.table
    fields = zip(zip(*table.layouts, strict=True), held_fields(table), strict=True)
    loose = [layout for layouts, is_held in fields if not is_held for layout in layouts]
    found = [Candidate(None, settings), Candidate(lazy, settings)]
    if any(layout.offset is not None and layout.is_contiguous for layout in loose):
        note = "mmap needs files that nothing truncates while they are read: that ends the process."
        found.append(Candidate(lazy, settings, map_files(), note=note))
    large = []
    if dataset.cost.decoded_bytes > SHUFFLE_BYTES and any(is_pooled(layout, OpenOptions()) for layout in loose):
        note = "All rows are decoded in the first epoch and stay in memory, on each rank."
        large.append(Candidate(lazy, settings, mix_bytes(dataset.cost.decoded_bytes), dataset.cost.decoded_bytes, note))
    x, y = table.layouts[0][:n_inputs], table.layouts[0][n_inputs:]
    row_bytes = trained_row_bytes(x, settings.get("x_dtype")) + trained_row_bytes(y, settings.get("y_dtype"))
    n_bytes = row_bytes * len(dataset)
    note = f"All rows are loaded before the first step: {bytes_text(n_bytes)}, divided over the ranks."
    large.append(Candidate("RankCachedH5DataModule", settings, {}, n_bytes, note))
    left_out, memory = {}, room()
    free = 0 if memory is None else memory.n_bytes // MAX_OF_ROOM
    for each in large:
        if each.memory <= free:
            found.append(each)
            free -= each.memory
        elif memory is None:
            left_out[each.name] = "the system does not report its free memory"
        else:
            left_out[each.name] = (
                f"it holds {bytes_text(each.memory)} of rows, and {bytes_text(free)} of memory are left for it"
            )
    if num_workers:
        found.append(Candidate(lazy, settings, use_workers(num_workers)))
    return found, left_out


def _reasons(chosen: BenchResult, note: str, fastest: BenchResult, plain: BenchResult | None) -> list[str]:
    """Why a result is recommended, and what to know about it."""
    rate = chosen.rows_per_second
    if chosen is fastest:
        found = [f"{chosen.name} is the fastest: {rate:,.0f} rows/s."]
    else:
        share = 100 * rate / fastest.rows_per_second
        found = [f"{chosen.name} is the simplest of the fastest: {share:.0f} % of {fastest.name}."]
    found += [note] if note else []
    if plain is not None and rate < plain.rows_per_second / NEARLY:
        found.append("Plain h5py is as fast here: a data module shards, shuffles and resumes, and saves no time.")
    if max(chosen.spread, fastest.spread) > NOISY:
        found.append(
            f"Its rounds differ by {100 * max(chosen.spread, fastest.spread):.0f} %: other programs use the machine. "
            "Measure again when it is quiet."
        )
    return found


def _plain(value: Paths | Keys) -> Any:
    """Paths or keys as YAML can have them."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    return dict(value) if isinstance(value, Mapping) else [os.fspath(each) for each in value]
