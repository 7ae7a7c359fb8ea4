"""Rows a second with 1, 2, 4 ... processor cores: our loader, the bare decoding loop, and plain h5py with workers.

    python examples/benchmarks/cores.py [--cores 1 2 4 8 16] [--cases images-gzip-32 ...] [--json FILE]

Each number of cores is a process of its own that may run on these cores only (`os.sched_setaffinity`), as a job of a
cluster is. The rows, their files and the checks are those of compressed.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import decoding
import h5py
import numpy as np
from cases import BUDGET, CASES, DECODE, PLAIN
from common import Contender, environment, line_of, measure, table, write_json
from recipes import Ours, affordable_rows, plain
from rows import Data, lifelike
from tqdm import tqdm

OURS = "lightning_h5"


def contenders(data: Data, n_cores: int, stack: ExitStack) -> list[Contender]:
    """Who is timed with so many cores; the plain way has a worker for each."""
    workers = n_cores if n_cores > 1 else 0
    some = affordable_rows(plain(data, 0), len(data.x), 0.5)
    many = None if some is None else min(some * n_cores, len(data.x))
    ours = Ours(data, **BUDGET)
    stack.callback(ours.close)
    found = [
        Contender(name=PLAIN, epoch=plain(data, workers, many), n_rows=many),
        Contender(name=OURS, epoch=ours.epoch, n_warm=1),
    ]
    if data.chunks is not None:
        decoding.N_THREADS = n_cores
        found.append(Contender(name=DECODE, epoch=decoding.bare_decode(data, stack)))
    return found


def child(cores: list[int], written: Path, n_rounds: int) -> None:
    """Times a case on these cores, and prints the timings as JSON."""
    os.sched_setaffinity(0, cores)
    x, labels = (np.load(written.with_suffix(f".{part}.npy")) for part in ("x", "labels"))
    with h5py.File(written) as file:
        data = Data(written, x, labels, chunks=file["x"].chunks)
    with ExitStack() as stack, tqdm(disable=True) as progress:
        timings = measure(contenders(data, len(cores), stack), data, n_rounds, progress, most_seconds=10)
    print(json.dumps([asdict(timing) | {"median": timing.median} for timing in timings]))


def main() -> None:
    """Starts a process for each number of cores, and prints their figures side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cores", type=int, nargs="+", help="numbers of cores (default: 1, 2, 4 ... as many as there are)"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each array (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each contender (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to a file")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        written, *on = options.child
        child([*map(int, on)], Path(written), options.rounds)
        return
    mine = sorted(os.sched_getaffinity(0))
    numbers = options.cores or [2**i for i in range(len(mine).bit_length()) if 2**i <= len(mine)]
    about = environment(("deflate", "zlib-into", "numba", "imagecodecs"))
    print(line_of(about), flush=True)
    results: dict[str, dict[int, Any]] = {}
    for name in options.cases:
        case, results[name] = CASES[name], {}
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / f"{name}.h5"
            data = Data.write(written, *lifelike(case.kind, options.rows), **case.storage())
            np.save(written.with_suffix(".x.npy"), data.x)
            np.save(written.with_suffix(".labels.npy"), data.labels)
            for n in numbers:
                command = [sys.executable, __file__, "--rounds", str(options.rounds), "--child", str(written)]
                command += map(str, mine[:n])
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                results[name][n] = json.loads(done.stdout.splitlines()[-1])
        teams = [timing["name"] for timing in results[name][numbers[0]]]
        rows = [(team, *(f"{results[name][n][at]['median']:,.0f}" for n in numbers)) for at, team in enumerate(teams)]
        print(f"\n{case}\n\n{table(('rows/s', *(f'{n} cores' for n in numbers)), rows)}", flush=True)
    write_json(options.json, {"environment": about, "rows": options.rows, "results": results})


if __name__ == "__main__":
    main()
