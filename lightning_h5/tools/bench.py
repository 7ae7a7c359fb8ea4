"""``bench_file``: rows a second of one's own files on this machine, and the settings to take."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from .._version import __version__
from ..datasets import room
from ..errors import H5ValueError
from ..readers import usable_cores
from ..sizes import whole
from ..types import Keys, Paths
from .advice import Advice, yaml_of
from .contest.choice import choose, reasons_for
from .contest.contenders import BenchRows, Contender, LeftOut, contenders_for, find_rows
from .contest.runs import Measuring
from .progress import progress_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BenchReport", "BenchResult", "bench_file"]

PACKAGES = ("torch", "h5py", "numpy", "deflate", "imagecodecs", "hdf5plugin")


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What was measured of a contender.

    Attributes:
        name: the data module and its settings, for people.
        datamodule: the data module's name; None for the plain recipe.
        settings: its arguments, as far as they are not the defaults.
        rows_per_second: median of ``rates``.
        mib_per_second: the same in MiB of decoded rows.
        rates: rows a second, each time it was measured; of who is near the fastest by turns with the others.
        spread: the largest of these less the smallest, over the median; None where it was measured once.
        first_epoch: rows a second of the first epoch, from opening the files on, where later ones find all rows in
            memory; None elsewhere.
        times_plain: rows a second over those of the plain recipe, the better of them; None where there is none.
        note: what to know of the figures, or None.
    """

    name: str
    datamodule: str | None
    settings: dict[str, Any]
    rows_per_second: float
    mib_per_second: float
    rates: tuple[float, ...]
    spread: float | None
    first_epoch: float | None
    times_plain: float | None
    note: str | None


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """How fast rows come from some files on this machine, and what to take.

    Attributes:
        files: the files.
        x_key: the input.
        y_key: the target, or None.
        n_rows: rows of all files.
        row_bytes: bytes of a row, decoded.
        batch_size: rows of a batch.
        results: what was measured, in the order of measuring.
        left_out: what was not, and why.
        chosen: name of the result that is advised.
        datamodule: the data module that is advised.
        settings: its arguments.
        reasons: why, and what to know, in sentences.
        yaml: the same as the ``data`` part of a configuration.
        is_warm: whether the system keeps the files in memory and had read them before, so that no figure but a first
            epoch's is of storage.
        environment: cores and versions.
    """

    files: tuple[str, ...]
    x_key: Keys
    y_key: Keys | None
    n_rows: int
    row_bytes: int
    batch_size: int
    results: tuple[BenchResult, ...]
    left_out: tuple[LeftOut, ...]
    chosen: str
    datamodule: str
    settings: dict[str, Any]
    reasons: tuple[str, ...]
    yaml: str
    is_warm: bool
    environment: dict[str, Any]

    def plot(self) -> Figure:
        """Bars of rows a second.

        Raises:
            H5Error: matplotlib is not installed.
        """
        figure: Figure = import_module("lightning_h5.tools.contest.chart").chart_of_bench(self)
        return figure


def bench_file(
    path: Paths,
    x_key: Keys | None = None,
    y_key: Keys | None = None,
    *,
    batch_size: int = 64,
    num_workers: int | Sequence[int] = (0, 2),
    seconds: float = 2.0,
    rounds: int = 3,
    plain: bool = True,
    shows_progress: bool = False,
) -> BenchReport:
    """Measures how fast shuffled training batches come from files, in several ways, and says which to take.

    First the system reads what it can keep of the files. Then each way is measured once, one after the other: the
    plain recipe (one ``array[i]`` a sample in torch's own loader), ``LazyH5DataModule`` with its defaults, with
    ``mmap`` where arrays are contiguous, with ``shuffle_bytes`` that hold all rows where the default does not, and
    ``RankCachedH5DataModule``; where rows are in memory, with ``prefetch_factor``, too. What needs more than half of
    the free memory is left out. The fastest few take turns
    after that, and medians decide. Transforms, copies to a GPU and the model are not part of it.

    Args:
        path: one file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of these.
        x_key: the input array, a list of arrays, or a mapping. None takes what the first file leaves no doubt about.
        y_key: the target, likewise. None gives inputs alone.
        batch_size: rows of a batch.
        num_workers: worker processes to try, one number or several; all but rows in memory are tried with each.
        seconds: how long each way is measured each time; up to three times as long where an epoch ends by then.
        rounds: times that the fastest are measured again.
        plain: measure the plain recipe, too.
        shows_progress: show a bar on the standard error, where that is a terminal.

    Raises:
        H5ValueError: an argument makes no sense, or there are fewer rows than a batch; before anything is measured.
        H5KeyError: an array is not in the file, likewise.
        H5FileError: a file is missing, damaged, or needs a filter that is not installed, likewise.
        H5CorruptError: rows do not decode.

    Cost:
        About a minute with the defaults; more where the first epoch of who keeps all rows takes long, 15 times
        ``seconds`` at most. Memory is what the data modules take, each alone or half of what is free.

    Example:
        >>> report = bench_file("digits.h5", "train/images", "train/labels")
        >>> print(report.yaml)
    """
    batch_size, rounds = whole(batch_size, "batch_size", least=1), whole(rounds, "rounds", least=1)
    seconds = _time(seconds, "seconds")
    workers = _several(num_workers)
    rows = find_rows(path, x_key, y_key, batch_size)
    found = room()
    free = None if found is None else found.n_bytes
    contenders, left_out = contenders_for(rows, num_workers=workers, free=free, plain=plain)
    with progress_bar(1 + len(contenders), "bench", shows_progress=shows_progress, unit="run", delay=0) as bar:
        measuring = Measuring(rows, seconds=seconds, rounds=rounds, free=free, bar=bar)
        measuring.read_once()
        for contender in contenders:
            measuring.measure_once(contender)
        measuring.measure_in_turn()
    return _report(measuring, rows, path, left_out)


def _report(measuring: Measuring, rows: BenchRows, path: Paths, left_out: Iterable[LeftOut]) -> BenchReport:
    medians = {contender: statistics.median(rates) for contender, rates in measuring.rates.items()}
    of_plain = {contender: rate for contender, rate in medians.items() if contender.way == "plain"}
    plain = max(of_plain.values(), default=None)
    decisive = of_plain | {contender: medians[contender] for contender in measuring.finalists}
    chosen = choose(decisive)
    given: dict[str, Any] = {"train_path": _as_given(path), "x_key": _plain_keys(rows.x_key)}
    if rows.y_key is not None:
        given["y_key"] = _plain_keys(rows.y_key)
    settings = given | {"batch_size": rows.batch_size} | chosen.settings
    name = chosen.datamodule or ""
    results = tuple(_result(each, measuring, medians[each], rows, plain) for each in measuring.rates)
    spread = max((result.spread for result in results if result.spread is not None), default=0.0)
    return BenchReport(
        files=rows.table.paths,
        x_key=rows.x_key,
        y_key=rows.y_key,
        n_rows=rows.n_rows,
        row_bytes=rows.row_bytes,
        batch_size=rows.batch_size,
        results=results,
        left_out=(*left_out, *measuring.left_out),
        chosen=chosen.name,
        datamodule=name,
        settings=settings,
        reasons=reasons_for(chosen, decisive, rows, spread=spread),
        yaml=yaml_of(Advice(datamodule=name, settings=settings)),
        is_warm=measuring.is_warm,
        environment=_environment(),
    )


def _result(
    contender: Contender, measuring: Measuring, median: float, rows: BenchRows, plain: float | None
) -> BenchResult:
    rates = measuring.rates[contender]
    return BenchResult(
        name=contender.name,
        datamodule=contender.datamodule,
        settings=contender.settings,
        rows_per_second=median,
        mib_per_second=median * rows.row_bytes / 2**20,
        rates=tuple(rates),
        spread=(max(rates) - min(rates)) / median if len(rates) > 1 else None,
        first_epoch=measuring.first.get(contender),
        times_plain=median / plain if plain else None,
        note=measuring.notes.get(contender),
    )


def _environment() -> dict[str, Any]:
    """What decides about the figures; nothing that names the machine."""
    about: dict[str, Any] = {
        "cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "lightning_h5": __version__,
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            about[package] = version(package)
    return about


def _as_given(path: Paths) -> str | list[str]:
    return os.fspath(path) if isinstance(path, str | os.PathLike) else [os.fspath(each) for each in path]


def _plain_keys(keys: Keys) -> Any:
    """As YAML can have them."""
    if isinstance(keys, str):
        return keys
    return dict(keys) if isinstance(keys, Mapping) else list(keys)


def _time(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise H5ValueError(f"{name}={value!r} was given. Pass a time of more than 0, such as 2.")
    return float(value)


def _several(num_workers: int | Sequence[int]) -> list[int]:
    given = list(num_workers) if isinstance(num_workers, Iterable) else [num_workers]
    if not given:
        raise H5ValueError("num_workers=[] was given. Pass one number or several, such as (0, 2).")
    return list(dict.fromkeys(whole(each, "num_workers", least=0) for each in given))
