"""Many files, filters and a cache: samples a second beside the original approach, filters, memory, open files.

    python examples/benchmarks/combined.py [--parts table filters memory] [--rows 2000] [--rounds 5] [--workers 4]
                                           [--warm 5] [--json FILE]

writes recordings to temporary files: LZF, one row a chunk, resizable arrays, text of varying length. The table has
shuffled epochs, read sample by sample, field by field, as the original of this dataset does, and by
`create_optimized_dataloader` in the same configuration; each contender is first checked to give every row once, as it
was written. The filters have more files, of columns alone. The memory is that of all processes over a thousand files.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import h5py
import recordings
import torch
from common import (
    BATCH_SIZE,
    Contender,
    Epoch,
    Target,
    environment,
    judge,
    line_of,
    measure,
    report,
    table,
    write_json,
)
from lines import HEADER, Line, apart
from memory import memory_of_epochs
from ranks import N_RANKS, Ranks
from rows import Data
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from lightning_h5 import CombinedHDF5Dataset, create_optimized_dataloader

CACHE_SIZE = 1000
N_FILES, N_FILTER_FILES, N_MANY = 3, 10, 1000
N_GUIDS = 10  # number of allowed guids
ORIGINAL, OURS, BETTER = "the original approach", "lightning_h5", "the same, arrays looked up once"
N_CONFIGURATIONS = 4
PARTS = ("table", "filters", "memory")
LEAST = 3.0


# Samples a second ---------------------------------------------------------------------------------------------


def batches(loader: Any, number: int) -> Iterator[tuple[Any, Tensor]]:
    """An epoch of a loader; in the first, which is the one that is checked, with the rows themselves."""
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(number)
    for batch in loader:
        yield None if number else recordings.side_by_side(batch), batch["epoch"].long()


def original(paths: Sequence[Path], fields: Sequence[str], rank: int | None, **options: Any) -> Any:
    """A loader of the original approach."""
    n_workers = options.pop("num_workers")
    dataset = recordings.SampleBySample(paths, fields, options.pop("cache_size"), **options)
    sampler = None if rank is None else DistributedSampler(dataset, N_RANKS, rank)
    return DataLoader(
        dataset,
        BATCH_SIZE,
        shuffle=rank is None,
        sampler=sampler,
        num_workers=n_workers,
        persistent_workers=n_workers > 0,
    )


def ours(paths: Sequence[Path], fields: Sequence[str], rank: int | None, **options: Any) -> Any:
    """Our loader, in the same configuration."""
    ranks = {} if rank is None else {"rank": rank, "world_size": N_RANKS}
    return create_optimized_dataloader(hdf5_files=paths, batch_size=BATCH_SIZE, load_fields=fields, **ranks, **options)


def alone(
    make: Callable[..., Any], paths: Sequence[Path], fields: Sequence[str], stack: ExitStack, **options: Any
) -> Epoch:
    """Epochs in this process."""
    loader = make(paths, fields, None, **options)
    stack.callback(getattr(loader, "close", lambda: None))
    return partial(batches, loader)


def on_ranks(
    make: Callable[..., Any], paths: Sequence[Path], fields: Sequence[str], stack: ExitStack, **options: Any
) -> Epoch:
    """Epochs of two ranks at a time, each in a process of its own."""
    ranks = Ranks(partial(RankLoader, make, paths, fields, options))
    stack.callback(ranks.close)

    def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
        for rows, labels in ranks.ask(number + 1):  # None ends a rank, and is not 0
            yield None if rows is None else torch.from_numpy(rows), torch.from_numpy(labels)

    return epoch


class RankLoader:
    """What the process of a rank does: an epoch when it is told to."""

    def __init__(
        self, make: Callable[..., Any], paths: Sequence[Path], fields: Sequence[str], options: dict[str, Any], rank: int
    ) -> None:
        torch.set_num_threads(1)
        quiet()
        self._loader = make(paths, fields, rank, **options)

    def __call__(self, asked: int) -> tuple[Any, Any]:
        """The rows and labels of an epoch; the rows where they are checked."""
        seen = list(batches(self._loader, asked - 1))
        rows = None if asked > 1 else torch.cat([row for row, _ in seen]).numpy()
        return rows, torch.cat([label for _, label in seen]).numpy()


def table_of(
    paths: Sequence[Path], fields: Sequence[str], options: argparse.Namespace, progress: tqdm[Any]
) -> list[Any]:
    """Each configuration, the original and ours in turn."""
    data = recordings.in_memory(paths, fields)
    n_all, n_each, cache = options.workers, options.workers // N_RANKS, f"cache of {CACHE_SIZE:,}"
    configurations: list[tuple[str, Callable[..., Epoch], dict[str, Any]]] = [
        ("no workers", alone, {"num_workers": 0, "cache_size": 0}),
        (f"{n_all} workers", alone, {"num_workers": n_all, "cache_size": 0}),
        (f"{n_all} workers, {cache}", alone, {"num_workers": n_all, "cache_size": CACHE_SIZE}),
        (
            f"{N_RANKS} ranks, {n_each} workers each, {cache}",
            on_ranks,
            {"num_workers": n_each, "cache_size": CACHE_SIZE},
        ),
    ]
    return [
        one_configuration(name, run, settings, paths, fields, data, options, progress)
        for name, run, settings in configurations
    ]


def one_configuration(
    name: str,
    run: Callable[..., Epoch],
    settings: dict[str, Any],
    paths: Sequence[Path],
    fields: Sequence[str],
    data: Data,
    options: argparse.Namespace,
    progress: tqdm[Any],
) -> dict[str, Any]:
    """Measures a row of the table and prints it."""
    as_it_comes, targets = f"{OURS}, as it comes", [Target(of=OURS, against=ORIGINAL, least=LEAST)]
    n_warm = options.warm if settings["cache_size"] else 0
    with ExitStack() as stack:
        contenders = [
            Contender(name=ORIGINAL, epoch=run(original, paths, fields, stack, **settings), n_warm=n_warm),
            Contender(
                name=BETTER, epoch=run(original, paths, fields, stack, **settings, looks_up=False), n_warm=n_warm
            ),
            Contender(
                name=f"{OURS}, the same settings",
                team=OURS,
                epoch=run(ours, paths, fields, stack, **settings),
                n_warm=n_warm,
            ),
            Contender(name=as_it_comes, team=OURS, epoch=run(ours, paths, fields, stack), n_warm=n_warm),
        ]
        timings = measure(contenders, data, options.rounds, progress)
    targets.append(Target(of=OURS, against=BETTER, least=None))
    verdicts = judge(timings, targets)
    progress.write(f"\n{report(f'{name}, {len(fields)} fields', timings, verdicts, n_rows=len(data.x))}")
    return {
        "configuration": name,
        "fields": list(fields),
        "contenders": [asdict(timing) for timing in timings],
        "ratios": [asdict(verdict) for verdict in verdicts],
    }


# Filters ------------------------------------------------------------------------------------------------------


def lines_of_filters(folder: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Seconds until a dataset is made of rows that pass three filters, beside reading the three columns alone."""
    guids = [f"patient_{number:03}" for number in range(N_GUIDS)]
    for rows_per_chunk, n_rows in ((1000, options.filter_rows), (1, options.filter_rows // 10)):
        here = folder / f"chunks of {rows_per_chunk}"
        here.mkdir()
        written = ["target", "epoch", *recordings.FLAGS, "guid"]
        paths = recordings.write(here, N_FILTER_FILES, n_rows, rows_per_chunk, written)
        asked: dict[str, dict[str, Any]] = {
            "two flags, a range": {"cs_label": True, "bg_label": True, "epoch_min": n_rows / 2},
            "guids, a flag, a range": {"allowed_guids": guids, "cs_label": True, "epoch_min": n_rows / 2},
        }
        for name, filters in asked.items():
            columns = ["guid" if key == "allowed_guids" else key.removesuffix("_min") for key in filters]
            filtered = best_of(options.rounds, partial(CombinedHDF5Dataset, paths, ["target"], **filters))
            read = best_of(options.rounds, partial(read_columns, paths, columns))
            what = f"{name}; {N_FILTER_FILES} files, {n_rows:,} rows, {rows_per_chunk:,} a chunk"
            most, least = (2.0, None) if rows_per_chunk > 1 else (None, 0.8)
            yield Line(name=f"filtering by {what}", seen=filtered, unit="s", target=most)
            yield Line(
                name="as fast as h5py reads the columns", seen=read / filtered, unit="x", target=least, at_least=True
            )


def read_columns(paths: Sequence[Path], columns: Sequence[str]) -> None:
    """The bare reading of columns."""
    for path in paths:
        with h5py.File(path, "r") as file:
            for name in columns:
                file[name][:]


def best_of(n_times: int, function: Callable[[], Any]) -> float:
    """Seconds of the fastest call."""
    seconds = []
    for _ in range(n_times):
        began = perf_counter()
        function()
        seconds.append(perf_counter() - began)
    return min(seconds)


# Memory -------------------------------------------------------------------------------------------------------


def lines_of_memory(folder: Path, options: argparse.Namespace) -> Iterator[Line]:
    """What all processes take over very many files, and how many descriptors they hold, epoch after epoch."""
    paths = recordings.write(folder, options.files, 4 * options.files)
    seen = apart(memory_of_epochs, paths, options.workers, options.epochs)
    what = f"{options.files:,} files, {options.workers} workers, {options.epochs} epochs"
    yield Line(name=f"memory of all processes, {what}", seen=seen["mib"], unit="MiB", target=1024)
    yield Line(name="its growth from the fifth epoch on", seen=seen["growth"], unit="MiB an epoch", target=5)
    yield Line(name="descriptors more than after the second epoch", seen=seen["descriptors"], unit="", target=0)


# Everything ---------------------------------------------------------------------------------------------------


def quiet() -> None:
    """No news of orders and worker counts."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--rows", type=int, default=2000, help="rows of the table (default: %(default)s)")
    parser.add_argument(
        "--filter-rows", type=int, default=1_000_000, help="rows that are filtered (default: %(default)s)"
    )
    parser.add_argument("--files", type=int, default=N_MANY, help="files of the memory lines (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of the memory lines (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each contender (default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, default=4, help="worker processes of all ranks together (default: %(default)s)"
    )
    parser.add_argument(
        "--warm", type=int, default=5, help="epochs until caches have what they will have (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to a file")
    options = parser.parse_args()
    if options.rows < 2 * BATCH_SIZE or min(options.rounds, options.epochs, options.files, options.warm) < 1:
        parser.error(f"--rows takes {2 * BATCH_SIZE} or more; --rounds, --epochs, --files and --warm take 1 or more")
    if options.workers < N_RANKS or options.workers % N_RANKS:
        parser.error(f"--workers takes multiples of {N_RANKS}")
    return options


def main() -> None:
    """Measures what was asked for, prints the tables, and writes them as JSON where asked."""
    options = arguments()
    if "memory" in options.parts and sys.platform != "linux":
        raise SystemExit("memory and open files are read from /proc, which only Linux has: pass --parts table filters")
    # Before Python 3.13 the forkserver does not find modules next to this file.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    quiet()
    about = environment(("deflate", "imagecodecs", "zlib-into"))
    print(line_of(about))
    results: dict[str, Any] = {}
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "memory" in options.parts:  # first, since it forks processes while this one is small
            lines += measured_lines(lines_of_memory, folder / "many", options)
        if "filters" in options.parts:
            lines += measured_lines(lines_of_filters, folder / "columns", options)
        if "table" in options.parts:
            results["table"] = measured_table(folder / "table", options)
    if lines:
        print(f"\n{table(HEADER, [line.cells() for line in lines])}")
        results["lines"] = [{**asdict(line), "met": line.met} for line in lines]
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    write_json(options.json, {"environment": about, "settings": settings, **results})


def measured_lines(
    part: Callable[[Path, argparse.Namespace], Iterator[Line]], folder: Path, options: argparse.Namespace
) -> list[Line]:
    """The lines of a part, whose files are there meanwhile."""
    folder.mkdir()
    return list(tqdm(part(folder, options), desc="lines", leave=False, disable=None))


def measured_table(folder: Path, options: argparse.Namespace) -> list[Any]:
    """The table, for all fields and for few."""
    folder.mkdir()
    print(f"{options.rows:,} rows in {N_FILES} files, batch {BATCH_SIZE}, {options.rounds} rounds, warm page cache")
    paths = recordings.write(folder, N_FILES, options.rows)
    n_steps = 2 * N_CONFIGURATIONS * 4 * (options.rounds + 1)
    with tqdm(total=n_steps, desc="rounds", leave=False, disable=None) as progress:
        return [
            result
            for fields in (recordings.FIELDS, recordings.FEW_FIELDS)
            for result in table_of(paths, fields, options, progress)
        ]


if __name__ == "__main__":
    main()
