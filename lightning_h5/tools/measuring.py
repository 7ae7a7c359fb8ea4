"""The training loaders of data modules, and plain h5py, timed in turn."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from ..datasets.row_table import RowTable
from ..errors import H5Error
from ..hdf5 import find_array, keys_in, open_h5, process_pool
from ..progress_bar import Progress

__all__ = ["BenchResult", "Candidate", "Running", "measure_in_turn"]

MAX_WARM = 5
"""Times ``seconds`` (1 s or more) that an epoch may take before measuring begins."""

MAX_LOAD = 15
"""Times ``seconds`` (1 s or more) that loading all rows may take."""

MAX_LABELS = 64 << 20  # bytes: people keep their labels in memory


@dataclass(frozen=True, eq=False)
class Candidate:
    """A way to read the rows.

    Attributes:
        datamodule: the data module; None for plain h5py.
        shared: the arguments that all candidates have.
        extra: its own arguments.
        memory: bytes of rows that it holds besides what the defaults do.
        note: what to know before using it, a sentence.
    """

    datamodule: str | None
    shared: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    memory: int = 0
    note: str = ""

    @property
    def name(self) -> str:
        """The data module and its own arguments."""
        return ", ".join([self.datamodule or "plain h5py", *(f"{name}={value}" for name, value in self.extra.items())])

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments."""
        return {**self.shared, **self.extra}


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The rates of one setting.

    Attributes:
        name: the data module and what its settings change, or ``plain h5py``.
        datamodule: the data module; None for plain h5py.
        settings: all its arguments, as they were measured.
        rows_per_second: median of ``rates``.
        rates: rows per second in each round.
        is_first_epoch: whether the first epoch was not over when measuring began, so that chunks were decoded that
            later epochs may find in memory.
    """

    name: str
    datamodule: str | None
    settings: dict[str, Any]
    rows_per_second: float
    rates: tuple[float, ...]
    is_first_epoch: bool

    @property
    def spread(self) -> float:
        """The largest rate less the smallest, over the median."""
        return (max(self.rates) - min(self.rates)) / self.rows_per_second


class Running:
    """A candidate at work: batches without end, epoch after epoch. Close it.

    Args:
        candidate: what reads.
        table: the files.

    Attributes:
        n_left: batches left of this epoch; 0 at its end, and always for plain h5py.

    Raises:
        H5Error: the rows cannot be read.
    """

    def __init__(self, candidate: Candidate, table: RowTable) -> None:
        self.n_left = 0
        self._module: Any = None
        self._paths = table.paths
        self._batches: Generator[int]
        if candidate.datamodule is None:
            self._batches = _plain_batches(table, candidate.settings)
            return
        modules = import_module("lightning_h5.datamodules")  # brings Lightning, which no other tool needs
        self._module = getattr(modules, candidate.datamodule)(**candidate.settings)
        try:
            self._module.setup("fit")
            self._batches = self._epochs(self._module.train_dataloader())
        except BaseException:
            self._module.teardown("fit")
            raise

    def warm_up(self, most_seconds: float) -> float:
        """Take the first epoch, or the part of it that fits in a time. Return rows per second."""
        return self._take(lambda seconds, _: not self.n_left or seconds >= most_seconds)

    def measure(self, seconds: float) -> float:
        """Take batches for a time, and on to the end of the epoch if that is near. Return rows per second.

        Rows at the beginning of an epoch, which fill what is mixed, take longer than those at its end.
        """
        return self._take(
            lambda passed, n_batches: (
                passed >= seconds and passed * (1 + (self.n_left or math.inf) / n_batches) > 2 * seconds
            )
        )

    def _take(self, is_done: Callable[[float, int], bool]) -> float:
        n_rows, began = 0, perf_counter()
        for n_batches in count(1):
            n_rows += next(self._batches)
            seconds = perf_counter() - began
            if is_done(seconds, n_batches):
                break
        return n_rows / max(1e-9, seconds)

    def _epochs(self, loader: Any) -> Generator[int]:
        for epoch in count():
            loader.sampler.set_epoch(epoch)
            self.n_left = len(loader)
            for batch in loader:
                self.n_left -= 1
                yield _rows_in(batch)

    def close(self) -> None:
        """End workers and threads, close the files, and give the memory back."""
        self._batches.close()
        if self._module is not None:
            self._module.teardown("fit")
        for path in self._paths:
            process_pool().close(path)


def measure_in_turn(
    candidates: Sequence[Candidate], table: RowTable, *, seconds: float, rounds: int, bar: Progress
) -> tuple[dict[Candidate, BenchResult], dict[str, str]]:
    """Measure candidates in turn, round after round, after each has warmed up.

    Args:
        candidates: what to measure.
        table: the files.
        seconds: time for each measurement.
        rounds: measurements of each candidate.
        bar: advances with each measurement and each warm-up.

    Returns:
        The results, and why other candidates could not be measured, by name.

    Raises:
        H5Error: the rows cannot be read.
    """
    rates: dict[Candidate, list[float]] = {}
    left_out: dict[str, str] = {}
    running: dict[Candidate, Running] = {}
    in_first_epoch = set()
    decoding = 0.0  # rows per second of the fastest that reads on demand

    @contextmanager
    def leaving_out(candidate: Candidate) -> Iterator[None]:
        """Leave out what fails: plain h5py with any error, a data module if its worker was killed."""
        bar.set_postfix_str(candidate.name)
        try:
            yield
        except H5Error:
            raise
        except Exception as error:
            if candidate.datamodule is not None and not isinstance(error, RuntimeError):
                raise
            lines = f"{error}".strip().splitlines()
            left_out[candidate.name] = f"it failed: {type(error).__name__}: {lines[-1] if lines else ''}"
            rates.pop(candidate, None)
        bar.update()

    with ExitStack() as stack:
        # A process that has threads is better not forked: workers first. What loads all rows comes last.
        for each in sorted(candidates, key=lambda each: ("num_workers" not in each.extra, each.memory)):
            if each.memory and decoding and (needed := table.n_rows / decoding) > MAX_LOAD * max(seconds, 1):
                left_out[each.name] = f"its first epoch takes about {needed:,.0f} s; pass more seconds"
                continue
            with leaving_out(each):
                running[each] = stack.enter_context(closing(Running(each, table)))
                rate = running[each].warm_up(MAX_WARM * max(seconds, 1))
                decoding = max(rate, decoding) if each.datamodule is not None else decoding
                in_first_epoch |= {each} if running[each].n_left else set()
                rates[each] = []
        for number in range(rounds):
            order = list(rates)
            first = number % max(1, len(order))
            for each in order[first:] + order[:first]:
                with leaving_out(each):
                    _wait_until_idle()
                    running[each].measure(seconds / 4)  # what was read ahead in the meantime
                    rates[each].append(running[each].measure(seconds))
    results = {
        each: BenchResult(
            name=each.name,
            datamodule=each.datamodule,
            settings=each.settings,
            rows_per_second=median(own),
            rates=tuple(own),
            is_first_epoch=each in in_first_epoch,
        )
        for each, own in rates.items()
    }
    return results, left_out


def _wait_until_idle(most_seconds: float = 1.0) -> None:
    """Wait until the threads of this process rest: the other candidates read ahead for a while."""
    end = perf_counter() + most_seconds
    while perf_counter() < end:
        used = process_time()
        sleep(0.03)
        if process_time() - used < 0.2 * 0.03:
            return


def _rows_in(batch: Any) -> int:
    while isinstance(batch, dict | tuple | list):
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        if isinstance(first, str | bytes):
            break
        batch = first
    return len(batch)


def _plain_batches(table: RowTable, settings: Mapping[str, Any]) -> Generator[int]:
    """Read one ``array[i]`` per sample and field, as people do in a ``Dataset``, and collate batches; yield 1 per row.

    Rows come one by one, since a row that decodes many chunks takes long. Arrays are looked up once, and labels are
    kept in memory. Rows are drawn with replacement, which costs the same and needs no permutation.
    """
    starts, rng = table.starts.tolist(), np.random.default_rng(0)
    keys = [*keys_in(settings["x_key"]), *keys_in(settings.get("y_key"))]
    batch: list[Any] = []
    files: dict[int, list[tuple[Any, list[Sequence[str]]]]] = {}
    with ExitStack() as stack:
        while True:
            row = int(rng.integers(starts[-1]))
            file = bisect_right(starts, row) - 1
            if file not in files:
                opened = stack.enter_context(open_h5(table.paths[file]))
                files[file] = _arrays([find_array(opened, key) for key in keys])
            batch.append(tuple(value for each in files[file] for value in _values(*each, row - starts[file])))
            if len(batch) == settings["batch_size"]:
                default_collate(batch)
                batch = []
            yield 1


def _arrays(found: Sequence[Any]) -> list[tuple[Any, list[Sequence[str]]]]:
    """Each array once, with the members of it that are wanted: a table's row is read once, and labels are in memory."""
    members: dict[str, list[Sequence[str]]] = {}
    for each in found:
        members.setdefault(each.array.name, []).append(each.members)
    arrays = {each.array.name: each.array for each in found}
    return [(array[:] if _is_label(array) else array, members[name]) for name, array in arrays.items()]


def _is_label(array: Any) -> bool:
    return len(array.shape) == 1 and array.dtype.kind in "iufb" and array.nbytes <= MAX_LABELS


def _values(array: Any, members: Sequence[Sequence[str]], row: int) -> Iterator[Any]:
    stored = array[row]
    for names in members:
        value = stored
        for name in names:
            value = value[name]
        if not isinstance(value, bytes | str):
            found = np.asarray(value)
            value = torch.from_numpy(np.array(found, found.dtype.newbyteorder("=")))
        yield value
