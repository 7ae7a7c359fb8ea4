"""How fast rows of HDF5 files become shuffled batches, as the files are stored?

    python examples/benchmarks/compressed.py [--cases images-gzip-32 ...] [--json FILE]

writes pictures (u1, 3x64x64) and signals (f4, 4x1024) to temporary files as people store them, and times shuffled
epochs over them: `lightning_h5`, what people write themselves, other loaders that can read the file, and two limits.
Each contender is first checked to give every row once and as it was written; then all take turns, in one run, with the
files in the page cache. `page.py` makes the documentation's tables of the results, and `dots.py` the charts.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import CASES, DECODE, MEMORY, PLAIN, PREADV, WHOLE, Case, Way
from common import BATCH_SIZE, N_EPOCHS, Contender, environment, line_of, measure, merge_json, report
from decoding import N_THREADS, bare_decode
from peers import AS_STORED, VERSIONS, find
from recipes import Ours, affordable_rows, bare_preadv, in_memory, plain, whole_batches
from rows import Data, lifelike
from tqdm import tqdm

DECODERS = ("deflate", "imagecodecs", "zlib-into", "numba")
SLICE = 1.5  # seconds per timing of a slow reader, which reads as many rows as it can
MOST = 10.0  # seconds, after which a slow reader is not timed again


def contenders(case: Case, data: Data, peers: Mapping[str, Any], stack: ExitStack) -> list[Contender]:
    """All contenders, those that start processes first; what they hold open is closed with the stack."""
    n_all = len(data.x)
    some = affordable_rows(plain(data, 0), n_all, SLICE)
    fewer = affordable_rows(whole_batches(data, None, stack), n_all, SLICE)
    found = [
        Contender(name="plain h5py, 0 workers", team=PLAIN, epoch=plain(data, 0, some), n_rows=some),
        Contender(name="plain h5py, 2 workers", team=PLAIN, epoch=plain(data, 2, some), n_rows=some),
        Contender(name=WHOLE, epoch=whole_batches(data, fewer, stack), n_rows=fewer),
    ]
    for peer in peers.values():
        n_rows = some if peer.IS_ROW_BY_ROW else None
        epochs = peer.as_stored(data, stack, n_rows)
        found += [Contender(name=n, team=team_of(n), epoch=epoch, n_rows=n_rows) for n, epoch in epochs.items()]
    found += [our_contender(way, data, stack) for way in case.ways]
    if data.chunks is None:
        found.append(
            Contender(name="bare preadv, fresh memory", team=PREADV, epoch=bare_preadv(data, stack, fresh=True))
        )
        found.append(
            Contender(name="bare preadv, one buffer", team=PREADV, epoch=bare_preadv(data, stack, fresh=False))
        )
    else:
        found.append(Contender(name=f"{DECODE}, {N_THREADS} threads", team=DECODE, epoch=bare_decode(data, stack)))
    return [*found, Contender(name=MEMORY, epoch=in_memory(data), n_epochs=N_EPOCHS)]


def team_of(name: str) -> str:
    """Return the loader of a way to use it."""
    return name.rpartition(", ")[0]


def our_contender(way: Way, data: Data, stack: ExitStack) -> Contender:
    """Our data module, opened in the way that is asked for."""
    ours = Ours(data, **way.options)
    stack.callback(ours.close)
    prepare = {"prepare": ours.open} if way.is_first else {}
    return Contender(
        name=way.name, team=way.team, epoch=ours.epoch, n_warm=way.n_warm, n_epochs=way.n_epochs, **prepare
    )


def run(case: Case, data: Data, peers: Mapping[str, Any], n_rounds: int, progress: tqdm[Any]) -> dict[str, Any]:
    """Measures a case and prints its table."""
    with ExitStack() as stack:
        timings = measure(contenders(case, data, peers, stack), data, n_rounds, progress, most_seconds=MOST)
    progress.write(f"\n{report(f'{case}; {data.storage}', timings, [], n_rows=len(data.x))}")
    return {
        "case": case.name,
        "rows_are": case.kind.name,
        "title": case.title,
        "chunks": data.chunks,
        "stored_bytes": data.stored_bytes,
        "compression_ratio": data.gain,
        "contenders": [asdict(timing) for timing in timings],
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--peers", nargs="*", choices=AS_STORED, default=AS_STORED, metavar="PEER")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each array (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each contender (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the measurements to those in this file")
    options = parser.parse_args()
    if options.rows < 2 * BATCH_SIZE or options.rounds < 1:
        parser.error(f"--rows takes {2 * BATCH_SIZE} or more and --rounds 1 or more")
    return options


def main() -> None:
    """Measures the cases, prints their tables, and writes them as JSON where asked."""
    options = arguments()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hides the messages about the order
    about, (peers, missing) = environment((*VERSIONS, *DECODERS)), find(options.peers)
    print(line_of(about))
    print(f"{options.rows:,} rows, batch {BATCH_SIZE}, {options.rounds} rounds, shuffled, warm page cache")
    for name, reason in missing.items():
        print(f"skipped: {name}, which cannot be imported ({reason})")
    results, rows = [], None
    with tempfile.TemporaryDirectory() as folder, tqdm(desc="epochs", leave=False, disable=None) as progress:
        for case in sorted((CASES[name] for name in options.cases), key=lambda case: case.kind.name):
            progress.set_postfix_str(f"write {case.name}")
            if rows is None or rows[0] is not case.kind:
                rows = case.kind, *lifelike(case.kind, options.rows)
            data = Data.write(Path(folder) / f"{case.name}.h5", *rows[1:], **case.storage())
            results.append(run(case, data, peers, options.rounds, progress))
            data.path.unlink()
    settings = {"rows": options.rows, "rounds": options.rounds, "batch_size": BATCH_SIZE, "skipped": missing}
    merge_json(options.json, {"environment": about, **settings, "results": results}, "case", CASES)


if __name__ == "__main__":
    main()
