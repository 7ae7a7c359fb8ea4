"""Is what `lightning-h5 bench` advises as fast as the best of all settings?

    python examples/benchmarks/advice.py [--cases contiguous gzip-32 ...] [--rows 20000] [--seconds 1] [--rounds 5]
                                         [--torch-threads N] [--json FILE]

For each kind of file `bench_file` is asked first. Then all settings of a larger grid are measured once (worker
processes, `mmap`, `shuffle_bytes`, rows in memory, `prefetch_factor`), and the fastest of them take turns with what was
advised. The ratio is of rates in the same round, the median over the rounds, against the fastest of these rivals.

Where other programs use the machine, pass `--torch-threads 1`: rows in memory are copied in threads that wait for each
other unless `prefetch_factor` is given, and such threads suffer most, now more, now less.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import environment, line_of, met, table, write_json
from rows import IMAGES, Data, lifelike
from tqdm import tqdm

from lightning_h5.datasets import room
from lightning_h5.tools.bench import bench_file
from lightning_h5.tools.contest.contenders import BenchRows, Contender, contenders_for, find_rows
from lightning_h5.tools.contest.runs import Measuring

TARGET = 0.9
WORKERS, PREFETCH = (0, 1, 2, 4), (None, 8)
CHUNKS = (32, *IMAGES.shape)
CASES: dict[str, tuple[dict[str, Any], float]] = {  # arguments of create_dataset, share of the rows
    "contiguous": ({}, 1.0),
    "gzip-32": ({"chunks": CHUNKS, "compression": "gzip"}, 1.0),
    "gzip-guess": ({"compression": "gzip"}, 1.0),
    "chunked-32": ({"chunks": CHUNKS}, 1.0),
    "small": ({"chunks": CHUNKS, "compression": "gzip"}, 0.05),  # held whole
}


def grid(rows: BenchRows, free: int | None) -> Iterator[Contender]:
    """All settings that change anything for these rows and fit the memory."""
    basic, _ = contenders_for(rows, num_workers=WORKERS, free=free, plain=False)
    basic = [each for each in basic if each.prefetch_factor is None]
    cached = [each for each in basic if each.way == "cached"]
    lazy = [each for each in basic if each.way == "lazy"]
    of_workers = [dataclasses.replace(each, num_workers=n) for each in cached for n in WORKERS]
    for each, prefetch in product([*lazy, *of_workers], PREFETCH):
        yield dataclasses.replace(each, prefetch_factor=prefetch)


def measure(name: str, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """What is advised for a file, beside the best of all settings."""
    asked = {"batch_size": 64, "seconds": options.seconds, "rounds": options.rounds}
    report = bench_file(data.path, "x", "labels", plain=False, **asked)
    rows, found = find_rows(data.path, "x", "labels", 64), room()
    free = None if found is None else found.n_bytes
    contenders = list(grid(rows, free))
    advised = next(each for each in contenders if each.name == report.chosen)
    with tqdm(total=1 + len(contenders), desc=name, leave=False, disable=None) as bar:
        measuring = Measuring(rows, seconds=options.seconds, rounds=options.rounds, free=free, bar=bar)
        measuring.read_once()
        for contender in contenders:
            measuring.measure_once(contender)
        measuring.measure_in_turn(also=[advised])
    ours = measuring.rates[advised]
    ratios = {  # of those that took turns; an advice without a rival is the best by far
        each.name: statistics.median(a / b for a, b in zip(ours, measuring.rates[each], strict=True))
        for each in measuring.finalists
        if each != advised
    }
    best = min(ratios, key=lambda each: ratios[each], default=advised.name)
    seen = min(1.0, ratios.get(best, 1.0))
    return {
        "case": name,
        "storage": data.storage,
        "advised": advised.name,
        "best": advised.name if seen == 1.0 else best,
        "ratio": seen,
        "met": seen >= TARGET,
        "settings_tried": len(measuring.rates),
        "rates": {each.name: rates for each, rates in measuring.rates.items()},
        "advised_rates": next(result.rates for result in report.results if result.name == report.chosen),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch-threads", type=int, help="1 where other programs use the machine (see above)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores: on purpose
    if options.torch_threads is not None:
        torch.set_num_threads(options.torch_threads)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        x, labels = lifelike(IMAGES, options.rows)
        for name in options.cases:
            storage, share = CASES[name]
            n_rows = max(64, int(share * options.rows))
            data = Data.write(Path(folder, f"{name}.h5"), x[:n_rows], labels[:n_rows], **storage)
            results.append(measure(name, data, options))
            data.path.unlink()
    about = environment(["deflate", "imagecodecs"])
    lines = [
        (
            result["case"],
            result["advised"],
            result["best"],
            str(result["settings_tried"]),
            f"{result['ratio']:.2f}",
            f">= {TARGET}",
            met(result["met"]),
        )
        for result in results
    ]
    print(line_of(about))
    print(table(("file", "advised", "best of all", "settings", "advised / best", "target", "met"), lines))
    write_json(options.json, {"environment": about, "results": results})


if __name__ == "__main__":
    main()
