"""What a training loop notices: how long it waits for batches, memory, open files, and what happens with more data.

    python examples/benchmarks/training.py [--json FILE]

writes pictures (u1, 3x64x64, gzip) to temporary files. Everything is measured in processes of its own, forked from one
that has imported what is needed and done nothing else.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from common import BATCH_SIZE, environment, line_of, table, write_json
from lines import HEADER, Line, apart
from probes import growth, many_chunks, memory, opening, plain_waiting, repeat, waiting
from rows import IMAGES, Data, lifelike
from tqdm import tqdm

MIB = 2**20
BUDGET_MIB = 64
BUDGET = {"shuffle": {"buffer": f"{BUDGET_MIB} MiB"}, "files": {"cache_bytes": f"{BUDGET_MIB} MiB"}}
N_TOGETHER = 32  # rows per chunk
N_EPOCHS, N_ROUNDS = 5, 3  # of the waiting loop; of the comparison with more rows


def write(folder: Path, n_rows: int) -> tuple[Path, Path]:
    """Writes the pictures twice: with many whole rows in a chunk, and with the chunks that h5py guesses."""
    rows = lifelike(IMAGES, n_rows)
    together = Data.write(folder / "gzip.h5", *rows, chunks=(N_TOGETHER, *IMAGES.shape), compression="gzip")
    return together.path, Data.write(folder / "guess.h5", *rows, compression="gzip").path


def lines_of_waiting(path: Path, options: argparse.Namespace) -> Iterator[Line]:
    """How long a loop waits, with steps of 2 ms."""
    for kind, words in (("sleep", "asleep"), ("work", "of torch on one thread")):
        seen = apart(waiting, path, options.rows, BUDGET, kind, N_EPOCHS)
        step = f"steps of {seen['step_ms']:.2f} ms {words}"
        yield Line(name=f"waiting, {step}, after ten batches", seen=seen["share"], unit="% of the time", target=5)
        yield Line(name=f"waiting, {step}, whole epochs", seen=seen["whole_share"], unit="% of the time")
    seen = apart(plain_waiting, path, options.rows)
    yield Line(name="waiting, plain h5py with 2 workers, steps asleep", seen=seen["share"], unit="% of the time")


def lines_of_memory(path: Path, options: argparse.Namespace, name: str) -> Iterator[Line]:
    """Memory with a small budget, and with one that holds everything."""
    for budget in (BUDGET_MIB, 512):
        bounds = {"shuffle": {"buffer": budget * MIB}, "files": {"cache_bytes": budget * MIB}}
        seen = apart(memory, path, options.rows, bounds, options.epochs)
        what = f"{name}, budget {budget} MiB"
        yield Line(name=f"peak memory, {what}", seen=seen["peak_mib"], unit="MiB", target=budget + 150)
        yield Line(name=f"its growth, {what}", seen=seen["slope"], unit="MiB an epoch", target=0.5)
        yield Line(
            name=f"open files more, {what}", seen=seen["descriptors"], unit=f"in {options.epochs} epochs", target=0
        )


def lines_of_growth(path: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Speed and opening with more data."""
    large = path.with_name("large.h5")
    apart(repeat, path, large, options.times)
    n_rows = options.times * options.rows
    seen = apart(growth, path, options.rows, large, n_rows, BUDGET, N_ROUNDS)
    large.unlink()
    name = f"rows/s of {n_rows:,} rows / of {options.rows:,} ({seen['many']:,.0f} / {seen['few']:,.0f})"
    yield Line(name=name, seen=seen["ratio"], unit="ratio", target=0.85, at_least=True)
    n_rows = apart(many_chunks, large, options.chunks)
    seen = apart(opening, large, n_rows)
    name = f"{options.chunks:,} chunks"
    yield Line(name=f"opening {name}", seen=seen["open_s"], unit="s", target=5)
    yield Line(name=f"first batch of {name}", seen=seen["first_batch_s"], unit="s")
    yield Line(name=f"memory after it, {name}", seen=seen["mib"], unit="MiB")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="pictures (default: %(default)s)")
    parser.add_argument(
        "--times", type=int, default=10, help="how much larger the larger file is (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the memory lines (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=10**6, help="of the file that is opened (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to a file")
    options = parser.parse_args()
    if options.rows < N_TOGETHER or options.rows % N_TOGETHER:
        parser.error(f"--rows takes multiples of {N_TOGETHER}")
    if min(options.times, options.epochs, options.chunks) < 1:
        parser.error("--times, --epochs and --chunks take 1 or more")
    return options


def main() -> None:
    """Measures everything, prints the table, and writes it as JSON where asked."""
    options, about = arguments(), environment(("deflate", "imagecodecs", "zlib-into"))
    if sys.platform != "linux":
        raise SystemExit("memory and open files are read from /proc, which only Linux has")
    print(line_of(about))
    print(f"{options.rows:,} pictures, gzip, batch {BATCH_SIZE}, budget {BUDGET_MIB} MiB where no other is named\n")
    folder = Path(tempfile.mkdtemp())
    try:
        gzip, guess = apart(write, folder, options.rows)
        measured = chain(
            lines_of_waiting(gzip, options),
            lines_of_memory(gzip, options, f"{N_TOGETHER} rows a chunk"),
            lines_of_memory(guess, options, "h5py's guess of chunks"),
            lines_of_growth(gzip, options),
        )
        lines = list(tqdm(measured, desc="lines", leave=False, disable=None))
    finally:
        shutil.rmtree(folder)
    print(table(HEADER, [line.cells() for line in lines]))
    results = [{**asdict(line), "met": line.met} for line in lines]
    write_json(options.json, {"environment": about, "settings": vars(options) | {"json": None}, "results": results})


if __name__ == "__main__":
    main()
