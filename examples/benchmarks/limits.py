"""What limits reading from gzip files: milliseconds of processor time for an epoch, by what they were spent on.

    python examples/benchmarks/limits.py [--rows 20000] [--rounds 5] [--json FILE] [--page FILE]

The bare loop of `compressed.py` decodes each chunk into memory that stays in the cores' caches. The data module
decodes the same chunks into its chunk cache, copies rows out of it into batches, and does everything else in Python:
order, tasks, labels, batches. Processor time is of all threads, and counted by thread where a function is wrapped. The
elapsed time of both is from runs without these wrappers. Medians of epochs after the second; decoded rows have 64 MiB.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Any

from cases import BUDGET, CASES
from common import Epoch, add_outputs, environment, line_of, setting_of, write_outputs
from decoding import bare_decode
from recipes import Ours
from rows import Data, lifelike

from lightning_h5.readers.copies import Copy
from lightning_h5.readers.filters import compiled

NAMES = ("images-gzip-32", "signals-gzip-32")
PARTS = {"decoding": (compiled.ChunkLoop, "__call__"), "copying rows": (Copy, "__call__")}


class Clock:
    """Adds up the processor time of calls, over all threads."""

    def __init__(self) -> None:
        self.seconds, self._lock = 0.0, threading.Lock()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is counted."""

        @wraps(function)
        def counted(*args: Any, **options: Any) -> Any:
            began = thread_time()
            try:
                return function(*args, **options)
            finally:
                with self._lock:
                    self.seconds += thread_time() - began

        return counted


@contextmanager
def clocks() -> Iterator[dict[str, Clock]]:
    """Count the parts while this is open."""
    found, before = {name: Clock() for name in PARTS}, {}
    for name, (home, attribute) in PARTS.items():
        before[name] = getattr(home, attribute)
        setattr(home, attribute, found[name].around(before[name]))
    try:
        yield found
    finally:
        for name, (home, attribute) in PARTS.items():
            setattr(home, attribute, before[name])


def timed(epoch: Epoch, numbers: range) -> list[tuple[float, float]]:
    """Return elapsed and processor seconds of each epoch."""
    found = []
    for number in numbers:
        began, cpu = perf_counter(), process_time()
        for _ in epoch(number):
            pass
        found.append((perf_counter() - began, process_time() - cpu))
    return found


def run(name: str, n_rows: int, n_rounds: int) -> dict[str, float]:
    """Return the milliseconds of a case."""
    case, numbers = CASES[name], range(2, 2 + n_rounds)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        data = Data.write(Path(folder) / "rows.h5", *lifelike(case.kind, n_rows), **case.storage())
        bare, ours = bare_decode(data, stack), Ours(data, **BUDGET)
        stack.callback(ours.close)
        for epoch in (bare, ours.epoch):
            timed(epoch, range(1, 3))
        of_bare, of_ours, parts = [], [], []
        for number in numbers:
            of_bare += timed(bare, range(number, number + 1))
            of_ours += timed(ours.epoch, range(number, number + 1))
            with clocks() as counted:
                ((_, cpu),) = timed(ours.epoch, range(number, number + 1))
            parts.append({part: clock.seconds for part, clock in counted.items()} | {"all": cpu})
    found = {
        "bare loop, elapsed": median(elapsed for elapsed, _ in of_bare),
        "bare loop": median(cpu for _, cpu in of_bare),
        "elapsed": median(elapsed for elapsed, _ in of_ours),
        "processor": median(cpu for _, cpu in of_ours),
        **{part: median(each[part] for each in parts) for part in PARTS},
    }
    found["everything else"] = median(each["all"] - sum(each[part] for part in PARTS) for each in parts)
    return {what: 1000 * seconds for what, seconds in found.items()} | {
        "ratio": found["bare loop, elapsed"] / found["elapsed"]
    }


def page(results: Mapping[str, Any]) -> str:
    """Return the table for the documentation."""
    names = list(results["results"])
    lines = [f"| ms of an epoch | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    rows = [what for what in results["results"][names[0]] if what != "ratio"]
    for what in rows:
        values = (f"{results['results'][name][what]:,.0f}" for name in names)
        lines.append(f"| {what} | {' | '.join(values)} |")
    ratios = (f"{results['results'][name]['ratio']:.2f}" for name in names)
    lines.append(f"| of the bare loop's speed | {' | '.join(ratios)} |")
    about, bounds = results["environment"], []
    for name in names:
        found = results["results"][name]
        bounds.append(found["bare loop, elapsed"] * about["cpus"] / (found["decoding"] + found["everything else"]))
    lines.append(f"| of its speed, if no row were copied | {' | '.join(f'{bound:.2f}' for bound in bounds)} |")
    return "\n".join([*lines, "", f"{results['n_rows']:,} rows. {setting_of(about, 'limits')}."]) + "\n"


def main() -> None:
    """Measure images and signals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    add_outputs(parser)
    given = parser.parse_args()
    for name in ("lightning_h5", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    about = environment(("deflate", "numba"))
    print(line_of(about))
    results = {name: run(name, given.rows, given.rounds) for name in NAMES}
    for what in results[NAMES[0]]:
        print(f"{what:20} " + "  ".join(f"{results[name][what]:12,.2f}" for name in NAMES))
    written = {"environment": about, "n_rows": given.rows, "results": results}
    write_outputs(given, written, page)


if __name__ == "__main__":
    main()
