"""How fast rows of contiguous arrays become shuffled batches, beside the plain recipe and the limits.

    python examples/benchmarks/contiguous.py

writes images (u1, 3x64x64) and signals (f4, 4x1024) with labels to temporary files, checks that every
contender gives each row exactly once and as it was written, and times epochs of all of them in turn, in one
run, with the files in the page cache. Ratios are of medians over the rounds.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from common import BATCH_SIZE, Contender, Target, environment, judge, line_of, measure, report, write_json
from recipes import Ours, bare_preadv, in_memory, plain
from rows import IMAGES, SIGNALS, Data, noise
from tqdm import tqdm

PLAIN = "plain h5py"
OURS = "lightning_h5"
MAPPED = "lightning_h5, mmap"
PREADV = "bare preadv"
MEMORY = "index_select in memory"
N_CONTENDERS = 7

CASES = (IMAGES, SIGNALS)
TARGETS = (
    Target(of=OURS, against=PLAIN, least=3.5),
    Target(of=MAPPED, against=PLAIN, least=6.0, name="lightning_h5 mmap / plain h5py"),
    Target(of=OURS, against=PREADV, least=0.9),
    Target(of=OURS, against=MEMORY, least=None, name="lightning_h5 / index_select"),
    Target(of=MAPPED, against=MEMORY, least=None, name="lightning_h5 mmap / index_select"),
)


def contenders(data: Data, stack: ExitStack) -> list[Contender]:
    """All contenders; what they hold open is closed with the stack."""
    unmapped, mapped = Ours(data), Ours(data, files={"mmap": True})
    stack.callback(unmapped.close)
    stack.callback(mapped.close)
    return [
        Contender(name="plain h5py, 0 workers", team=PLAIN, epoch=plain(data, 0)),
        Contender(name="plain h5py, 2 workers", team=PLAIN, epoch=plain(data, 2)),
        Contender(name=OURS, epoch=unmapped.epoch),
        Contender(name=MAPPED, epoch=mapped.epoch),
        Contender(name="bare preadv, fresh memory", team=PREADV, epoch=bare_preadv(data, stack, fresh=True)),
        Contender(name="bare preadv, one buffer", team=PREADV, epoch=bare_preadv(data, stack, fresh=False)),
        Contender(name=MEMORY, epoch=in_memory(data)),
    ]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Rows a second of lightning_h5 and others, contiguous arrays.")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each array (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timings of each contender (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to a file")
    options = parser.parse_args()
    if options.rows < BATCH_SIZE or options.rounds < 1:
        parser.error(f"--rows takes {BATCH_SIZE} or more and --rounds 1 or more")
    return options


def main() -> None:
    """Measures all cases, prints their tables, and writes them as JSON where asked."""
    options = arguments()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hides the messages about the order
    about = environment()
    print(line_of(about))
    print(f"{options.rows:,} rows, batch {BATCH_SIZE}, {options.rounds} rounds, shuffled, warm page cache")
    results = []
    steps = len(CASES) * (options.rounds + 1) * N_CONTENDERS
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=steps, desc="epochs", leave=False, disable=None) as progress,
    ):
        for kind in CASES:
            progress.set_postfix_str(f"write {kind.name}")
            data = Data.write(Path(folder) / f"{kind.name}.h5", *noise(kind, options.rows))
            with ExitStack() as stack:
                timings = measure(contenders(data, stack), data, options.rounds, progress)
            verdicts = judge(timings, TARGETS)
            data.path.unlink()
            progress.write(f"\n{report(str(kind), timings, verdicts, n_rows=options.rows)}")
            results.append(
                {
                    "case": asdict(kind),
                    "rows_per_second": {timing.name: timing.rows_per_second for timing in timings},
                    "ratios": [asdict(verdict) for verdict in verdicts],
                }
            )
    settings = {"rows": options.rows, "rounds": options.rounds, "batch_size": BATCH_SIZE}
    write_json(options.json, {"environment": about, **settings, "results": results})


if __name__ == "__main__":
    main()
