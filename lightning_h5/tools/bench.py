"""``bench_file``: rows per second from your files on this machine, and the settings to use."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count, cycle, islice
from statistics import median
from time import perf_counter, sleep
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from ..datasets import LazyFileDataset
from ..errors import H5Error, H5ValueError
from ..hdf5 import OpenOptions, expand_paths, find_array, guess_keys, keys_in, open_h5, process_pool
from ..loading import HoldLimits
from ..memory import available_memory
from ..progress_bar import Progress, progress_bar
from ..readers import is_pooled
from ..samples import RowTable
from ..sizes import bytes_text, whole
from ..types import Keys, Paths
from .inspect import Advice, inspect_file, inspect_folder
from .inspect.advice import MEMORY_SHARE, SHUFFLE_BYTES, group_key_in, suggest, trained_row_bytes, yaml_of
from .inspect.contents import contents_of
from .inspect.sample_advice import sample_setting

NEARLY = 0.95  # share of the fastest rate that counts as equally fast: runs vary by 5 %

WARM_UP = 5  # times ``seconds`` that the first epoch may take before measuring begins

PlainReader: TypeAlias = Callable[[RowTable, Mapping[str, Any]], Generator[int]]
"""Reads samples through h5py, from all samples and the arguments of data modules; yields numbers of samples."""

Step: TypeAlias = float | Callable[[Any], object]
"""A training step as a function of a batch, or its duration in milliseconds."""

MAX_LABELS = 64 << 20  # bytes: labels up to this size are usually kept in memory


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The rates of one setting.

    Attributes:
        name: the data module and its own settings, or ``plain h5py``.
        datamodule: the data module; None for plain h5py.
        settings: the measured arguments of the data module.
        rows_per_second: median of ``rates``.
        rates: rows per second in each round.
        loading_cost: share by which this rate is below the rate of steps alone, from 0 to 1; None without a step.
    """

    name: str
    datamodule: str | None
    settings: dict[str, Any]
    rows_per_second: float
    rates: tuple[float, ...]
    loading_cost: float | None = None


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The measurements of ``bench_file``, and the recommended settings.

    Attributes:
        files: the files.
        n_rows: number of rows of all files, or of windows, segments, patches or rows of a sparse matrix.
        row_bytes: bytes of a row or sample, decoded.
        batch_size: rows or samples of a batch.
        cold: whether the files were dropped from the page cache before each measurement.
        results: the measurements.
        left_out: settings that were not measured, and why.
        chosen: the recommended result, with exactly the measured settings.
        reasons: sentences that explain the recommendation.
        yaml: the recommendation as the ``data`` part of a configuration.
        unit: "row", or "sample" if a sample is not a row.
        unloaded_rows_per_second: rate of steps alone, on batches in memory; None without a step.
    """

    files: tuple[str, ...]
    n_rows: int
    row_bytes: int
    batch_size: int
    cold: bool
    results: tuple[BenchResult, ...]
    left_out: dict[str, str]
    chosen: BenchResult
    reasons: tuple[str, ...]
    yaml: str
    unit: str = "row"
    unloaded_rows_per_second: float | None = None


@dataclass(frozen=True, eq=False)
class Candidate:
    """A way to read the rows.

    Attributes:
        datamodule: the data module; None for plain h5py.
        choices: arguments of this candidate only.
        n_bytes: bytes of rows that it holds in memory in addition to the defaults.
        note: a sentence to read before using it.
        title: name of a candidate that is neither a data module nor plain h5py.
    """

    datamodule: str | None
    choices: Mapping[str, Any] = field(default_factory=dict)
    n_bytes: int = 0
    note: str = ""
    title: str = ""

    @property
    def name(self) -> str:
        """The data module and its own choices."""
        if self.title:
            return self.title
        choices = []
        for name, value in self.choices.items():
            fields = value if isinstance(value, Mapping) else {"": value}
            choices += [f"{name}{field and '.'}{field}={setting}" for field, setting in fields.items()]
        return ", ".join([self.datamodule or "plain h5py", *choices])


UNLOADED = Candidate(None, title="steps alone")


def bench_file(
    path: Paths,
    x_key: Keys | None = None,
    y_key: Keys | None = None,
    *,
    batch_size: int | None = None,
    num_workers: int = 2,
    seconds: float = 2.0,
    rounds: int = 3,
    cold: bool = False,
    step: Step | None = None,
    shows_progress: bool = False,
) -> BenchReport:
    """Measure the speed of shuffled training batches with several settings, and recommend one.

    Plain h5py (one ``array[i]`` per sample, in this process) is compared with the training loaders of
    ``LazyH5DataModule`` with its defaults, with worker processes, with the setting for the storage (``files.mmap`` for
    contiguous arrays, ``shuffle.buffer`` for all rows if the default holds only a part), and of
    ``RankCachedH5DataModule``. The settings take turns, after an epoch or some seconds of warm-up, and medians are
    compared. Each data module has exactly the reported settings: dtypes, split and batch size as ``inspect`` suggests
    them. Transforms and copies to a GPU are not measured. The model is measured only as ``step``: a step then follows
    each batch, and the rate of steps alone shows the cost of loading.

    Takes about a minute with the defaults. All settings together take at most half of the free memory in addition to
    the default settings; settings that need more are left out.

    Args:
        path: a file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of files, globs and directories.
        x_key: the input array, a list of arrays, or a mapping; measures rows of these arrays. None measures the
            suggestion of ``inspect``: rows, windows, segments or patches.
        y_key: the target, in the same forms. None measures only inputs.
        batch_size: rows of a batch. None uses the suggestion of ``inspect``: 64, or less for few or large rows.
        num_workers: number of worker processes for the setting with workers; 0 leaves this setting out.
        seconds: time for each measurement.
        rounds: measurements of each setting.
        cold: drop the files from the system's page cache before each measurement, as if they were larger than memory.
            False measures files in memory, as far as they fit.
        step: a training step: a function of a batch, such as a forward and a backward pass, which returns when the
            device has finished; or its milliseconds, without load on the cores, as on a GPU. It is called with batches
            that were read before, so that all settings, including plain h5py, run the same steps. None runs no steps.
        shows_progress: show progress on the standard error: a bar on a terminal, otherwise a line every 30 seconds.

    Raises:
        H5ValueError: an argument is invalid, or there are fewer rows than a batch; raised before measuring.
        H5KeyError: an array is missing; raised before measuring.
        H5FileError: a file is missing, damaged, or needs a filter that is not installed; raised before measuring.
        H5CorruptError: rows do not decode.
    """
    batch_size = None if batch_size is None else whole(batch_size, "batch_size", least=1)
    num_workers, rounds = whole(num_workers, "num_workers", least=0), whole(rounds, "rounds", least=1)
    if cold and not hasattr(os, "posix_fadvise"):
        raise H5ValueError("cold=True is not supported: this system cannot drop a file from its page cache. Remove it.")
    if not 0 < seconds < math.inf:
        raise H5ValueError(f"seconds={seconds!r} was given. Pass a time of more than 0, such as 2.")
    if step is not None and not callable(step) and not 0 <= step < math.inf:
        raise H5ValueError(f"step={step!r} was given. Pass milliseconds of at least 0, or a function of a batch.")
    if x_key is None and y_key is not None:
        raise H5ValueError(f"y_key={y_key!r} was given without x_key. Pass both.")
    paths = expand_paths(path)
    advice = _advice_on(paths, path) if x_key is None else None
    if advice is not None and advice.cost is not None:
        task = _task_of_samples(paths, advice, {"train_path": _yaml_value(path)}, batch_size)
    else:
        if advice is not None:
            advised = {name: _of_training(key) for name, key in advice.settings.items() if name in ("x_key", "y_key")}
            x_key, y_key = (advised["x_key"], advised.get("y_key")) if advised else guess_keys(paths[0])
        task = _task_of_rows(paths, x_key or "", y_key, {"train_path": _yaml_value(path)}, batch_size)
    choices, comments = task.choices, task.comments
    steps = None if step is None else _Steps(step, choices, choices["batch_size"] * task.sample_bytes)
    with closing(task.dataset) as dataset:
        candidates, left_out = _candidates(dataset, choices, task.n_inputs, num_workers, held_bytes=task.held_bytes)
    n_runs = (len(candidates) + (steps is not None)) * (1 + rounds)
    with progress_bar(n_runs, "bench", shows_progress=shows_progress, unit="run") as bar:
        rates, failed = _measure(
            candidates,
            choices,
            dataset.table,
            plain=task.plain,
            steps=steps,
            seconds=seconds,
            rounds=rounds,
            cold=cold,
            bar=bar,
        )
    unloaded = median(rates[UNLOADED]) if UNLOADED in rates else None
    results = {
        candidate: BenchResult(
            name=candidate.name,
            datamodule=candidate.datamodule,
            settings=choices | dict(candidate.choices),
            rows_per_second=median(rates[candidate]),
            rates=tuple(rates[candidate]),
            loading_cost=None if unloaded is None else max(0.0, 1 - median(rates[candidate]) / unloaded),
        )
        for candidate in candidates
        if candidate in rates
    }
    left_out |= failed
    own_results = {candidate: result for candidate, result in results.items() if candidate.datamodule is not None}
    if not own_results:
        why = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise H5Error(f"no data module could be measured: {why}. Pass other arrays or files.")
    fastest = max(own_results.values(), key=lambda result: result.rows_per_second)
    simplest = next(
        candidate
        for candidate in own_results
        if own_results[candidate].rows_per_second >= NEARLY * fastest.rows_per_second
    )
    chosen = own_results[simplest]
    plain = next((result for candidate, result in results.items() if candidate.datamodule is None), None)
    reasons = [
        *_reasons(chosen, fastest, plain, unloaded, task.unit),
        *([simplest.note] if simplest.note else []),
        *comments,
    ]
    return BenchReport(
        files=dataset.table.paths,
        n_rows=len(dataset),
        row_bytes=task.sample_bytes,
        batch_size=choices["batch_size"],
        cold=cold,
        results=tuple(results.values()),
        left_out=left_out,
        chosen=chosen,
        reasons=tuple(reasons),
        yaml=yaml_of(chosen.datamodule or "", chosen.settings, comments),
        unit=task.unit,
        unloaded_rows_per_second=unloaded,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Workload:
    """The samples to measure.

    Attributes:
        dataset: the dataset of the samples.
        choices: arguments of all data modules.
        comments: sentences for the configuration.
        n_inputs: number of arrays of the input.
        held_bytes: bytes of all rows in the dtypes of ``choices``; None if rows are samples.
        sample_bytes: bytes of a sample.
        unit: see ``BenchReport``.
        plain: reads samples through h5py.
    """

    dataset: LazyFileDataset
    choices: dict[str, Any]
    comments: Sequence[str]
    n_inputs: int
    held_bytes: int | None
    sample_bytes: int
    unit: str
    plain: PlainReader


def _advice_on(paths: Sequence[str], path: Paths) -> Advice:
    """Return the workload that ``inspect`` suggests."""
    if len(paths) == 1:
        return inspect_file(paths[0]).advice
    return inspect_folder(path).example.advice


def _of_training(key: Any) -> Any:
    """Return keys with the name of the training split for ``{split}``."""
    return key.replace("{split}", "train") if isinstance(key, str) else key


def _task_of_samples(
    paths: Sequence[str], advice: Advice, train_path: dict[str, Any], batch_size: int | None
) -> _Workload:
    """Return windows, segments, patches or sparse rows, as ``inspect`` suggests them."""
    choices = advice.settings | train_path | ({} if batch_size is None else {"batch_size": batch_size})
    arguments = {name: value for name, value in choices.items() if name not in ("train_path", "split", "batch_size")}
    dataset = LazyFileDataset(paths, **arguments)
    _ensure_enough(dataset, batch_size, "sample")
    return _Workload(
        dataset=dataset,
        choices=choices,
        comments=(),
        n_inputs=dataset.fields.n_inputs,
        held_bytes=advice.cached_bytes,
        sample_bytes=advice.cost.n_bytes if advice.cost is not None else 0,
        unit="sample",
        plain=_plain_samples,
    )


def _task_of_rows(
    paths: Sequence[str], x_key: Keys, y_key: Keys | None, train_path: dict[str, Any], batch_size: int | None
) -> _Workload:
    """Return rows along axis 0 of arrays."""
    dataset = LazyFileDataset(paths, x_key, y_key, sample="row")
    x_keys, y_keys = keys_in(x_key), keys_in(y_key)
    choices, comments = _choices(dataset, x_keys, y_keys, batch_size)
    keys = {"x_key": _yaml_value(x_key)} | ({} if y_key is None else {"y_key": _yaml_value(y_key)})
    return _Workload(
        dataset=dataset,
        choices=train_path | keys | choices,
        comments=comments,
        n_inputs=len(x_keys),
        held_bytes=None,
        sample_bytes=dataset.cost.row_bytes,
        unit="row",
        plain=_plain_batches,
    )


def _ensure_enough(dataset: LazyFileDataset, batch_size: int | None, unit: str) -> None:
    n = len(dataset)
    if not n or (batch_size or 0) > n:
        there_are = f"there is 1 {unit}" if n == 1 else f"there are {n} {unit}s"
        to_do = f"Pass a batch_size of at most {n}." if n else f"Pass files with {unit}s."
        raise H5ValueError(f"batch_size={batch_size} was given, but {there_are}. {to_do}")


def _choices(
    dataset: LazyFileDataset, x_keys: list[str], y_keys: list[str], batch_size: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that ``inspect`` suggests for the arrays, and comments for the configuration."""
    table, n_rows = dataset.table, len(dataset)
    _ensure_enough(dataset, batch_size, "row")
    arrays = table.layouts[0]
    group_key = group_key_in(contents_of(table.paths[0]).columns, arrays[0].n_rows, [*x_keys, *y_keys])
    x, y = arrays[: len(x_keys)], arrays[len(x_keys) :]
    choices, _ = suggest(x, y, n_rows, group_key, table.paths)
    sample, comments = sample_setting(arrays, np.diff(table.starts).tolist())
    return choices | ({} if batch_size is None else {"batch_size": batch_size}) | sample, comments


def _candidates(
    dataset: LazyFileDataset,
    choices: Mapping[str, Any],
    n_inputs: int,
    num_workers: int,
    *,
    held_bytes: int | None = None,
) -> tuple[list[Candidate], dict[str, str]]:
    """Return candidates, the simplest first, and the reasons for leaving others out.

    Args:
        dataset: the samples.
        choices: arguments of all data modules.
        n_inputs: number of arrays of the input; the others are the target.
        num_workers: number of worker processes of the candidate with workers.
        held_bytes: bytes of all rows in memory; None computes them from the rows of the arrays.
    """
    lazy, table = "LazyH5DataModule", dataset.table
    fields = zip(zip(*table.layouts, strict=True), table.held, strict=True)
    on_demand = [layout for layouts, is_held in fields if not is_held for layout in layouts]
    candidates = [Candidate(None), Candidate(lazy)]
    if any(layout.offset is not None and layout.is_contiguous for layout in on_demand):
        note = "Use files.mmap only if nothing truncates the files while they are read: that would kill the process."
        candidates.append(Candidate(lazy, {"files": {"mmap": True}}, note=note))
    large = []
    if (n_bytes := dataset.cost.decoded_bytes) > SHUFFLE_BYTES and any(
        is_pooled(layout, OpenOptions()) for layout in on_demand
    ):
        note = "All rows are decoded in the first epoch and stay in memory, on each rank."
        large.append(Candidate(lazy, {"shuffle": {"buffer": f"{-(-n_bytes >> 20)} MiB"}}, n_bytes, note))
    n_bytes = held_bytes or 0
    if held_bytes is None:
        x, y = table.layouts[0][:n_inputs], table.layouts[0][n_inputs:]
        n_bytes = trained_row_bytes(x, y, choices) * len(dataset)
    note = f"All rows are loaded before the first step: {bytes_text(n_bytes)}, divided among the ranks."
    large.append(Candidate("RankCachedH5DataModule", {}, n_bytes, note))
    left_out: dict[str, str] = {}
    memory = available_memory()
    if dataset.fields.matrices:
        left_out[candidates.pop(0).name] = "a row of a sparse matrix is not a row of one array"
    free = 0 if memory is None else memory.n_bytes // MEMORY_SHARE
    for candidate in large:
        if candidate.n_bytes <= free:
            candidates.append(candidate)
            free -= candidate.n_bytes
        elif memory is None:
            left_out[candidate.name] = "the system does not report its free memory"
        else:
            left_out[candidate.name] = (
                f"it needs {bytes_text(candidate.n_bytes)} for rows, and {bytes_text(free)} of memory are available"
            )
    if num_workers:
        candidates.append(Candidate(lazy, {"num_workers": num_workers}))
    return candidates, left_out


def _measure(
    candidates: Sequence[Candidate],
    choices: Mapping[str, Any],
    table: RowTable,
    *,
    plain: PlainReader | None = None,
    steps: _Steps | None = None,
    seconds: float,
    rounds: int,
    cold: bool,
    bar: Progress,
) -> tuple[dict[Candidate, list[float]], dict[str, str]]:
    """Return the rates of candidates, which take turns after warming up, and the reasons for failed candidates."""
    rates: dict[Candidate, list[float]] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        running: dict[Candidate, Generator[int]] = {}
        # Start workers first, since a process with threads should not be forked. Candidates that load all rows are
        # last.
        for candidate in sorted(
            candidates, key=lambda candidate: ("num_workers" not in candidate.choices, candidate.n_bytes)
        ):
            if candidate.datamodule is None:
                batches = (plain or _plain_batches)(table, choices)
            else:
                batches = _batches(candidate, choices)
            if steps is not None:
                batches = steps.after(batches)
            running[candidate] = stack.enter_context(closing(batches))
        if steps is not None:
            running[UNLOADED] = steps.alone()
        for number in range(1 + rounds):
            for candidate, batches in list(running.items()):
                bar.set_postfix_str(candidate.name)
                try:
                    if number == 0:
                        _rate(batches, WARM_UP * seconds, ends_with_epoch=True)
                    else:
                        _rate(batches, seconds / 4)  # consumes batches read ahead in the meantime
                        if cold:
                            _drop_pages(table.paths)
                        rates.setdefault(candidate, []).append(_rate(batches, seconds))
                except Exception as error:
                    # Not all data modules accept all arguments; but a bad file fails for all of them.
                    if isinstance(error, H5Error) and not (isinstance(error, H5ValueError) and plain is _plain_samples):
                        raise
                    lines = f"{error}".strip().splitlines()
                    failed[candidate.name] = f"it failed: {type(error).__name__}: {lines[-1] if lines else ''}"
                    del running[candidate]
                    rates.pop(candidate, None)
                bar.update()
    for path in table.paths:
        process_pool().close(path)
    return rates, failed


def _drop_pages(paths: Iterable[str]) -> None:
    """Drop files from the system's page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _rate(batches: Iterator[int], seconds: float, *, ends_with_epoch: bool = False) -> float:
    """Return the rows per second of the batches that fit in a time."""
    n_rows, began = 0, perf_counter()
    for n in batches:
        n_rows += n
        passed = perf_counter() - began
        if passed >= seconds or (ends_with_epoch and not n):
            break
    return n_rows / max(1e-9, passed)


class _Steps:
    """Training steps with batches that were read before.

    Args:
        step: the step as a function of a batch, or its milliseconds.
        choices: arguments of a data module that reads the batches.
        batch_bytes: bytes of a batch.
    """

    def __init__(self, step: Step, choices: Mapping[str, Any], batch_bytes: int) -> None:
        self._step = step if callable(step) else lambda batch: sleep(step / 1000)
        limits = HoldLimits()
        n_batches = max(1, min(limits.n_batches, limits.n_bytes // max(1, batch_bytes)))
        with closing(_epochs(Candidate("LazyH5DataModule"), choices)) as epochs:
            self._batches = list(islice(next(epochs), n_batches))
        self._step(self._batches[0])  # raises its errors here, not as failures of a setting
        is_list = choices.get("collate_fn") == "list"
        self._sizes = [_samples_in(batch, is_list=is_list) for batch in self._batches]

    def after(self, sizes: Generator[int]) -> Generator[int]:
        """Take a step after each batch that is read; ``sizes`` yields its samples, and 0 at the end of an epoch."""
        batches = cycle(self._batches)
        with closing(sizes):
            for n in sizes:
                if n:
                    self._step(next(batches))
                yield n

    def alone(self) -> Generator[int]:
        """Take steps; yield the samples of each."""
        while True:
            for n, batch in zip(self._sizes, self._batches, strict=True):
                self._step(batch)
                yield n
            yield 0


def _epochs(candidate: Candidate, choices: Mapping[str, Any]) -> Generator[Iterable[Any]]:
    """Yield the batches of a data module, epoch after epoch."""
    modules = import_module("lightning_h5.datamodules")  # imports Lightning, which no other tool needs
    module = getattr(modules, candidate.datamodule or "")(**choices, **candidate.choices)
    try:
        module.setup("fit")
        loader = module.train_dataloader()
        for epoch in count():
            loader.sampler.set_epoch(epoch)
            yield loader
    finally:
        module.teardown("fit")


def _batches(candidate: Candidate, choices: Mapping[str, Any]) -> Generator[int]:
    """Yield the rows of each batch of a data module, epoch after epoch; 0 at the end of each."""
    with closing(_epochs(candidate, choices)) as epochs:
        for batches in epochs:
            for batch in batches:
                yield _samples_in(batch, is_list=choices.get("collate_fn") == "list")
            yield 0


def _samples_in(batch: Any, *, is_list: bool) -> int:
    """Return the number of samples of a batch; ``is_list`` if a field is a list of samples."""
    while isinstance(batch, dict | tuple | list):
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        if isinstance(first, str | bytes) or (is_list and isinstance(batch, list) and not isinstance(first, list)):
            break
        batch = first
    return len(batch)


def _plain_batches(table: RowTable, choices: Mapping[str, Any]) -> Generator[int]:
    """Read one ``array[i]`` per sample and field, as in a hand-written ``Dataset``, and collate batches.

    Yields 1 per row.

    Rows are drawn with replacement, which costs the same and needs no permutation.
    """
    starts, rng = table.starts.tolist(), np.random.default_rng(0)
    keys = [*keys_in(choices["x_key"]), *keys_in(choices.get("y_key"))]
    files: dict[int, list[tuple[Any, Sequence[str]]]] = {}
    batch: list[Any] = []
    with ExitStack() as stack:
        while True:
            row = int(rng.integers(starts[-1]))
            at = bisect_right(starts, row) - 1
            if at not in files:
                file = stack.enter_context(open_h5(table.paths[at]))
                files[at] = [_opened(find_array(file, key)) for key in keys]
            batch.append(tuple(_value(*array, row - starts[at]) for array in files[at]))
            if len(batch) == choices["batch_size"]:
                default_collate(batch)
                batch.clear()
            yield 1


def _plain_samples(table: RowTable, choices: Mapping[str, Any]) -> Generator[int]:
    """Read the steps of one sample, or one patch, by slicing each array, as in a hand-written ``Dataset``.

    Yields 1 per sample.

    Samples are drawn with replacement. Batches are collated if all samples have one shape.
    """
    rng, has_one_shape = np.random.default_rng(0), "collate_fn" not in choices
    arrays: dict[tuple[int, int], Any] = {}
    batch: list[Any] = []
    with ExitStack() as stack:
        files: dict[str, Any] = {}

        def array_of(part: int, field: int) -> Any:
            if (part, field) not in arrays:
                layout = table.layouts.one(part, field)
                if layout.path not in files:
                    files[layout.path] = stack.enter_context(open_h5(layout.path))
                arrays[part, field] = files[layout.path][layout.name]
            return arrays[part, field]

        while True:
            values = []
            if "patch" in choices:
                part = int(rng.integers(table.n_parts))
                sizes = choices["patch"]["shape"]
                shape = array_of(part, 0).shape
                starts = [int(rng.integers(max(1, n - size + 1))) for n, size in zip(shape, sizes, strict=False)]
                place = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
                values = [array_of(part, field)[place] for field in table.step_fields]
            else:
                sample = np.array([rng.integers(table.n_samples)])
                boxes = table.boxes(table.indexer.rows_of(sample).fields)
                for field in table.step_fields:
                    parts, rows = boxes[field].part_of_rows, boxes[field].rows
                    part = parts if isinstance(parts, int) else int(parts[0]) if len(parts) else 0
                    view = table.layouts.one(part, field).view
                    axis = 0 if view is None else view.row_axes[-1]
                    first, last = (int(rows.min()), int(rows.max())) if len(rows) else (0, -1)
                    values.append(array_of(part, field)[(slice(None),) * axis + (slice(first, last + 1),)])
            batch.append(tuple(torch.from_numpy(np.array(value)) for value in values))
            if len(batch) == choices["batch_size"]:
                if has_one_shape:
                    with suppress(RuntimeError):  # clipped at the end of a segment
                        default_collate(batch)
                batch.clear()
            yield 1


def _opened(handle: Any) -> tuple[Any, Sequence[str]]:
    """Return an array, in memory if it has labels, and the path of the requested member in its rows."""
    array = handle.array
    is_label = len(array.shape) == 1 and array.dtype.kind in "iufb" and array.nbytes <= MAX_LABELS
    return array[:] if is_label else array, handle.members


def _value(array: Any, members: Sequence[str], row: int) -> Any:
    value = array[row]
    for name in members:
        value = value[name]
    if isinstance(value, bytes | str):
        return value
    number = np.asarray(value)
    return torch.from_numpy(np.array(number, number.dtype.newbyteorder("=")))


def _reasons(
    chosen: BenchResult, fastest: BenchResult, plain: BenchResult | None, unloaded: float | None, unit: str
) -> Iterator[str]:
    """Yield the reasons for recommending a result."""
    rate = chosen.rows_per_second
    if chosen is fastest:
        yield f"{chosen.name} is the fastest: {rate:,.0f} {unit}s/s."
    else:
        share = 100 * rate / fastest.rows_per_second
        yield f"{chosen.name} is the simplest of the fastest: {share:.0f} % of {fastest.name}."
    if plain is not None and rate < plain.rows_per_second / NEARLY:
        yield "Plain h5py, without converting dtypes, is as fast or faster, but does not shard, shuffle or resume."
    if unloaded is not None:
        cost = f"loading costs {chosen.loading_cost:.1%} of the training speed"
        yield f"Steps alone run at {unloaded:,.0f} {unit}s/s: with {chosen.name}, {cost}."


def _yaml_value(value: Paths | Keys) -> Any:
    """Return paths or keys as values that YAML supports."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    return dict(value) if isinstance(value, Mapping) else [os.fspath(path) for path in value]
