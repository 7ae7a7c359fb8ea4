"""How fast are shuffled epochs after one conversion: `repack`, the decoded store, the copies of other loaders?

    python examples/benchmarks/converted.py [--kinds images signals] [--rows 20000] [--rounds 5] [--json FILE]

Images and signals are stored as gzip with 32 rows a chunk. For each way: the seconds and bytes of the conversion, and
rows a second. Ways: the file as it is, by plain h5py and by `LazyH5DataModule`; copies that `lightning-h5 repack`
makes, contiguous, in uncompressed chunks, and with LZ4 or Zstd; later epochs with `staging={"decoded": True}`, whose
first epoch is the conversion; litdata and insitubatch, each with its own copy. Every way is checked first: each row
once, as written. Then all take turns in one run, over files in the page cache. Chunked files are read with 64 MiB for
decoded rows, which do not fit.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import h5py
from common import BATCH_SIZE, Contender, environment, line_of, measure, merge_json, report
from compressed import MOST, SLICE, team_of
from peers import CONVERTED, VERSIONS, find
from recipes import Ours, affordable_rows, plain
from rows import IMAGES, SIGNALS, Data, RowKind, lifelike
from tqdm import tqdm

from lightning_h5.tools.repack import repack_file

BUDGET = {"shuffle": {"buffer": "64 MiB"}, "files": {"cache_bytes": "64 MiB"}}
MAPPED = {"files": {"mmap": True}}
PLAIN, OURS, DECODED = "plain h5py", "lightning_h5, as stored", "lightning_h5, decoded store"
REPACKED = "lightning_h5, repacked"
KINDS = {kind.name: kind for kind in (IMAGES, SIGNALS)}
COPIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{REPACKED}, contiguous, mmap": ({"compression": "none"}, MAPPED),
    f"{REPACKED}, uncompressed chunks": ({"compression": "none", "rows_per_chunk": 32}, BUDGET),
    f"{REPACKED}, LZ4 and bitshuffle": ({"compression": "bitshuffle", "rows_per_chunk": 32}, BUDGET),
    f"{REPACKED}, Zstd and shuffle": ({"compression": "zstd", "rows_per_chunk": 32, "shuffle_filter": True}, BUDGET),
}


def repacked(data: Data, copy: Path, options: Mapping[str, Any]) -> Data:
    """Return the rows of a copy that ``repack`` makes; labels stay as they are."""
    repack_file(data.path, copy, keys=["x"], **options)
    with copy.open("rb") as written, h5py.File(copy) as file:
        os.fsync(written.fileno())
        array = file["x"]
        return replace(data, path=copy, chunks=array.chunks, stored_bytes=array.id.get_storage_size())


def run(kind: RowKind, n_rows: int, n_rounds: int, peers: Mapping[str, Any], progress: tqdm[Any]) -> dict[str, Any]:
    """Convert, check and measure rows of a kind."""
    about: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        data = Data.write(
            folder / "rows.h5",
            *lifelike(kind, n_rows),
            chunks=(32, *kind.shape),
            compression="gzip",
            shuffle=kind is SIGNALS,
        )
        some = affordable_rows(plain(data, 0), n_rows, SLICE)
        contenders = [
            Contender(name=f"{PLAIN}, {n} workers", team=PLAIN, epoch=plain(data, n, some), n_rows=some) for n in (0, 2)
        ]

        def note(names: list[str], seconds: float, n_bytes: int) -> None:
            about.update({each: {"convert_seconds": seconds, "bytes": n_bytes} for each in names})

        note([each.name for each in contenders] + [OURS], 0.0, data.path.stat().st_size)
        for name, peer in peers.items():
            place = folder / name
            place.mkdir()
            began = perf_counter()
            epochs = peer.open_epochs(data, place, stack)
            n_copies = 2 if name == "litdata" else 1  # of tensors and of arrays
            note(list(epochs), (perf_counter() - began) / n_copies, size_of(place) // n_copies)
            contenders += [Contender(name=n, team=f"{team_of(n)}*", epoch=e) for n, e in epochs.items()]
        ways: list[tuple[str, Data, Mapping[str, Any]]] = [(OURS, data, BUDGET)]
        for at, (title, (asked, options)) in enumerate(COPIES.items()):
            began = perf_counter()
            copy = repacked(data, folder / f"copy{at}.h5", asked)
            note([title], perf_counter() - began, copy.path.stat().st_size)
            ways.append((title, copy, options))
        for title, copy, options in ways:
            ours = Ours(copy, **options)
            stack.callback(ours.close)
            first = {"prepare": ours.open} if copy.chunks is not None else {}
            contenders.append(Contender(name=title, team=title, epoch=ours.epoch, **first))
        kept = Ours(data, **BUDGET, staging={"dir": folder / "decoded", "decoded": True})
        stack.callback(kept.close)
        began = perf_counter()
        for _ in kept.epoch(0):
            pass
        note([DECODED], perf_counter() - began, size_of(folder / "decoded"))
        contenders.append(Contender(name=DECODED, team=DECODED, epoch=kept.epoch, n_warm=1))
        timings = measure(contenders, data, n_rounds, progress, most_seconds=MOST)
    progress.write(f"\n{report(f'{kind}, gzip, 32 rows a chunk', timings, [], n_rows=n_rows)}\n")
    for timing in timings:
        done = about[timing.name]
        progress.write(f"{timing.name:46} {done['convert_seconds']:6.1f} s to {done['bytes'] / 2**20:6,.0f} MiB")
    return {
        "case": kind.name,
        "rows_are": str(kind),
        "title": "gzip, 32 rows a chunk",
        "contenders": [asdict(timing) | about[timing.name] for timing in timings],
    }


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Measure the kinds of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", choices=CONVERTED, default=CONVERTED)
    parser.add_argument("--json", type=Path, help="add the measurements to those in this file")
    given = parser.parse_args()
    for name in ("lightning_h5", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    peers, missing = find(given.peers)
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}")
    about = environment(VERSIONS)
    print(line_of(about))
    with tqdm(disable=True) as progress:
        results = [run(KINDS[kind], given.rows, given.rounds, peers, progress) for kind in given.kinds]
    settings = {"rows": given.rows, "rounds": given.rounds, "batch_size": BATCH_SIZE, "skipped": missing}
    merge_json(given.json, {"environment": about, **settings, "results": results}, "case", KINDS)


if __name__ == "__main__":
    main()
