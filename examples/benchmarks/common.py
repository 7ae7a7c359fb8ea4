"""What the benchmarks share: contenders, checking and timing them, promised ratios, tables."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, TypeAlias

import h5py
import numpy as np
import torch
from rows import Data
from torch import Tensor
from tqdm import tqdm

BATCH_SIZE = 64
REST = 0.05
"""Seconds before each timing: OpenMP's threads, which torch starts for `index_select` and for collating, keep a core
busy for some milliseconds after their last work, and who came next would pay for that."""

N_EPOCHS = 5
"""Epochs of a timing of who has all rows in memory: one takes 20 milliseconds, five of the scheduler's ticks."""

Epoch: TypeAlias = Callable[[int], Iterator[tuple[Any, Tensor]]]
"""Starts the epoch of a number: batches of rows and their labels."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to make shuffled batches of the rows.

    Attributes:
        name: which way.
        epoch: what is timed.
        team: contenders of which the better, or the worse, is meant in a ratio; its own name where empty.
        n_rows: rows of an epoch; None are all.
        n_warm: epochs after the one that is checked and before the first that is timed.
        n_epochs: epochs of a timing, one after the other: one of milliseconds is as long as the scheduler's ticks.
        prepare: runs before each timing, outside the time.
    """

    name: str
    epoch: Epoch
    team: str = ""
    n_rows: int | None = None
    n_warm: int = 0
    n_epochs: int = 1
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A ratio that is promised.

    Attributes:
        of: the team that is held to it, by its slowest.
        against: the team it is compared with, by its fastest.
        least: the promise; None shows the ratio for information.
        name: what is compared with what, where the teams' names do not say it.
    """

    of: str
    against: str
    least: float | None
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"{self.of} / {self.against}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A target beside what was seen."""

    name: str
    target: float | None
    seen: float
    met: bool | None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What was measured of a contender.

    Attributes:
        name: the contender.
        team: its team.
        n_rows: rows of each timed epoch.
        rows_per_second: of each round it was timed in.
    """

    name: str
    team: str
    n_rows: int
    rows_per_second: list[float]

    @property
    def median(self) -> float:
        """Rows a second."""
        return statistics.median(self.rows_per_second)


def verify(name: str, batches: Iterator[tuple[Any, Tensor]], data: Data, n_rows: int | None = None) -> None:
    """Checks that an epoch gives every row exactly once, and each as it was written, beside its own label.

    Args:
        name: whose epoch.
        batches: the epoch.
        data: what was written.
        n_rows: rows of the epoch, none of them twice; None are all.

    Raises:
        SystemExit: it does not; there is nothing to time.
    """
    n_rows = len(data.x) if n_rows is None else n_rows
    row_of = torch.from_numpy(np.argsort(data.labels))
    expected, counts = torch.from_numpy(data.x), torch.zeros(len(data.x), dtype=torch.int64)
    for x, labels in batches:
        rows = row_of[torch.as_tensor(labels)]
        if not torch.equal(torch.as_tensor(x), torch.index_select(expected, 0, rows)):
            raise SystemExit(f"{name!r} gives rows that differ from those written")
        counts += torch.bincount(rows, minlength=len(counts))
    missing, repeated = n_rows - int((counts > 0).sum()), int((counts > 1).sum())
    if missing or repeated:
        raise SystemExit(f"{name!r} leaves out {missing} rows and repeats {repeated}")


def seconds_of(contender: Contender, number: int, n_rows: int) -> float:
    """Seconds of an epoch, from asking for the iterator to its end; the mean of a contender's epochs."""
    contender.prepare()
    sleep(REST)
    n_seen, began = 0, perf_counter()
    for epoch in range(number * contender.n_epochs, (number + 1) * contender.n_epochs):
        for _, labels in contender.epoch(epoch):
            n_seen += len(labels)
    seconds = (perf_counter() - began) / contender.n_epochs
    if n_seen != n_rows * contender.n_epochs:
        raise SystemExit(f"{contender.name!r} gave {n_seen} rows of {n_rows} while it was timed")
    return seconds


def measure(
    contenders: Sequence[Contender], data: Data, n_rounds: int, progress: tqdm[Any], *, most_seconds: float = math.inf
) -> list[Timing]:
    """Rows a second of each contender in each round; each round begins with another one.

    Args:
        contenders: whom to time, those that start processes first.
        data: what they read.
        n_rounds: timings of each.
        progress: goes on by a step for each contender and round, and one for checking it.
        most_seconds: who was timed for so long altogether is not timed again.
    """
    timings = [
        Timing(name=each.name, team=each.team or each.name, n_rows=each.n_rows or len(data.x), rows_per_second=[])
        for each in contenders
    ]
    for contender, timing in zip(contenders, timings, strict=True):  # also the warm-up: workers start, files are opened
        progress.set_postfix_str(f"verify {contender.name}")
        contender.prepare()
        verify(contender.name, contender.epoch(0), data, contender.n_rows)
        for number in range(1, contender.n_warm + 1):
            seconds_of(contender, number, timing.n_rows)
        progress.update()
    spent = dict.fromkeys((each.name for each in contenders), 0.0)
    turns = list(zip(contenders, timings, strict=True))
    for number in range(1, n_rounds + 1):
        first = number % len(turns)
        for contender, timing in turns[first:] + turns[:first]:
            progress.set_postfix_str(contender.name)
            if spent[contender.name] < most_seconds:
                seconds = seconds_of(contender, number + contender.n_warm, timing.n_rows)
                spent[contender.name] += seconds
                timing.rows_per_second.append(timing.n_rows / seconds)
            progress.update()
    return timings


def judge(timings: Sequence[Timing], targets: Sequence[Target]) -> list[Verdict]:
    """Each target whose teams took part, with the ratio of medians that was seen."""
    teams: dict[str, list[float]] = {}
    for timing in timings:
        teams.setdefault(timing.team, []).append(timing.median)
    verdicts = []
    for target in targets:
        if target.of in teams and target.against in teams:
            seen = min(teams[target.of]) / max(teams[target.against])
            met = None if target.least is None else seen >= target.least
            verdicts.append(Verdict(name=str(target), target=target.least, seen=seen, met=met))
    return verdicts


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Text in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    sides = [str.ljust] + [str.rjust] * (len(header) - 1)
    return "\n".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True))
        for line in (header, rule, *lines)
    )


def met(verdict: bool | None) -> str:
    """The word for a target that is met, or not, or for information."""
    return {None: "-", True: "yes", False: "NO"}[verdict]


def report(title: str, timings: Sequence[Timing], verdicts: Sequence[Verdict], *, n_rows: int) -> str:
    """The tables of an array: rows a second of each contender, then the ratios."""
    partly = any(timing.n_rows < n_rows for timing in timings)
    lines = [
        (
            timing.name,
            f"{timing.median:,.0f}",
            f"{max(timing.rows_per_second):,.0f}",
            f"{min(timing.rows_per_second):,.0f}",
            *([f"{timing.n_rows:,} x {len(timing.rows_per_second)}"] if partly else []),
        )
        for timing in timings
    ]
    ratios = [
        (
            verdict.name,
            "-" if verdict.target is None else f">= {verdict.target:,.2f}",
            f"{verdict.seen:,.2f}",
            met(verdict.met),
        )
        for verdict in verdicts
    ]
    header = ("rows/s of an epoch", "median", "best", "worst", *(["rows timed"] if partly else []))
    tables = [table(header, lines), *([table(("ratio of medians", "target", "seen", "met"), ratios)] if ratios else [])]
    return "\n\n".join([title, *tables])


def environment(packages: Sequence[str] = ()) -> dict[str, Any]:
    """What the numbers were measured with; nothing that names a machine.

    Args:
        packages: more distributions whose versions matter; those that are not there are left out.
    """
    about: dict[str, Any] = {
        "date": date.today().isoformat(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
        "numpy": np.__version__,
    }
    for package in packages:
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            continue
    return about


def line_of(about: Mapping[str, Any]) -> str:
    """An environment in one line."""
    return ", ".join(f"{name} {value}" for name, value in about.items())


def setting_of(about: Mapping[str, Any], script: str) -> str:
    """Where and when figures were measured, as a sentence for the documentation."""
    return f"Measured on {about['date']} with {about['cpus']} cores by `examples/benchmarks/{script}.py`"


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``write_outputs``."""
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--page", type=Path, help="write the documentation's tables to this file")


def write_outputs(
    given: argparse.Namespace, results: Mapping[str, Any], page: Callable[[Mapping[str, Any]], str]
) -> None:
    """Writes measurements, and the page made of them, where files are asked for."""
    write_json(given.json, results)
    if given.page is not None:
        given.page.write_text(page(json.loads(json.dumps(results))))


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    """Writes all measurements, where a file is asked for."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")


def merge_json(path: Path | None, results: Mapping[str, Any], key: str, order: Iterable[str]) -> None:
    """Writes measurements, where a file is asked for, and keeps the other results that are in it.

    Args:
        path: the file.
        results: the measurements; a list of results among them.
        key: the name of a result.
        order: all names.
    """
    if path is None:
        return
    written = json.loads(path.read_text()) if path.exists() else {"results": []}
    by_name = {each[key]: each for each in [*written["results"], *results["results"]]}
    write_json(path, {**results, "results": [by_name[name] for name in order if name in by_name]})
