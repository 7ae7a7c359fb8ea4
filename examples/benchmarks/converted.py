"""Convert, or not? Files as they are stored, after one `repack` command, and in the formats of other loaders.

    python examples/benchmarks/converted.py [--rows 20000] [--rounds 5] [--json FILE] [--page FILE]

Images and signals are stored as gzip with 32 rows a chunk. For each way: the seconds and bytes of the conversion, rows
a second of shuffled epochs, and the memory that a loader takes. Ways: the file as it is, by plain h5py and by
`LazyH5DataModule`; copies that `lightning-h5 repack` makes, contiguous, in uncompressed chunks, and with LZ4 or Zstd;
litdata, mosaicml-streaming and FFCV, each with its own copy. Every way is checked first: each row once, as written.
Then all take turns in one run, over files in the page cache. Chunked files are read with 64 MiB for decoded rows, which
do not fit. Memory is what one epoch adds to the resident anonymous memory of a process without workers.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import h5py
from common import (
    Contender,
    Target,
    add_outputs,
    environment,
    judge,
    line_of,
    measure,
    report,
    setting_of,
    write_outputs,
)
from compressed import MOST, SLICE, VERSIONS, find_peers
from peers import PEERS
from recipes import Ours, affordable_rows, plain
from rows import IMAGES, SIGNALS, Data, RowKind, lifelike
from tqdm import tqdm

from lightning_h5.tools.repack import repack_file

BUDGET = {"shuffle": {"buffer": "64 MiB"}, "files": {"cache_bytes": "64 MiB"}}
MAPPED = {"files": {"mmap": True}}
PLAIN, OURS, REPACKED, TRAINED = "plain h5py", "lightning_h5, as stored", "lightning_h5, repacked", "contiguous"
COPIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{REPACKED}, {TRAINED}, mmap": ({"compression": "none"}, MAPPED),
    f"{REPACKED}, uncompressed chunks": ({"compression": "none", "rows_per_chunk": 32}, BUDGET),
    f"{REPACKED}, LZ4 and bitshuffle": ({"compression": "bitshuffle", "rows_per_chunk": 32}, BUDGET),
    f"{REPACKED}, Zstd and shuffle": ({"compression": "zstd", "rows_per_chunk": 32, "shuffle_filter": True}, BUDGET),
}
TARGETS = (
    Target(of=OURS, against=PLAIN, least=1.0),
    Target(of=TRAINED, against="ffcv", least=1.0, name="repacked (contiguous, mmap) / ffcv"),
    Target(of=TRAINED, against="litdata", least=1.0, name="repacked (contiguous, mmap) / litdata"),
    Target(
        of=TRAINED, against="mosaicml-streaming", least=1.0, name="repacked (contiguous, mmap) / mosaicml-streaming"
    ),
)


def repacked(data: Data, copy: Path, options: Mapping[str, Any]) -> Data:
    """Return the rows of a copy that ``repack`` makes; labels stay as they are."""
    repack_file(data.path, copy, keys=["x"], **options)
    with copy.open("rb") as written, h5py.File(copy) as file:
        os.fsync(written.fileno())
        array = file["x"]
        return replace(data, path=copy, chunks=array.chunks, stored_bytes=array.id.get_storage_size())


def run(kind: RowKind, n_rows: int, n_rounds: int, peers: Mapping[str, Any], progress: tqdm[Any]) -> dict[str, Any]:
    """Convert, check and measure rows of a kind."""
    about: dict[str, dict[str, float | None]] = {}
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
        for peer, opened in peers.items():
            place = folder / peer
            place.mkdir()
            began = perf_counter()
            epochs = opened(data, place, stack)
            seconds = perf_counter() - began
            note(list(epochs), seconds, sum(each.stat().st_size for each in place.rglob("*") if each.is_file()))
            contenders += [
                Contender(name=n, team=n.split(",")[0].split(" with ")[0], epoch=e) for n, e in epochs.items()
            ]
        ways: list[tuple[str, str, Data, Mapping[str, Any]]] = [(OURS, OURS, data, BUDGET)]
        for at, (title, (asked, options)) in enumerate(COPIES.items()):
            began = perf_counter()
            copy = repacked(data, folder / f"copy{at}.h5", asked)
            note([title], perf_counter() - began, copy.path.stat().st_size)
            ways.append((title, TRAINED if TRAINED in title else REPACKED, copy, options))
        for title, team, copy, options in ways:
            ours = Ours(copy, **options)
            stack.callback(ours.close)
            first = {"prepare": ours.open} if copy.chunks is not None else {}
            contenders.append(Contender(name=title, team=team, epoch=ours.epoch, **first))
        timings = measure(contenders, data, n_rounds, progress, most_seconds=MOST)
        for contender in contenders:
            about[contender.name]["memory"] = memory_of(contender)
    verdicts = judge(timings, TARGETS)
    progress.write(f"\n{report(f'{kind}, gzip, 32 rows a chunk', timings, verdicts, n_rows=n_rows)}\n")
    ways_seen = {each.name: about[each.name] | {"rows_per_second": each.median} for each in timings}
    for title, each in ways_seen.items():
        progress.write(
            f"{title:46} converted in {each['convert_seconds']:6.1f} s to {each['bytes'] / 2**20:6,.0f} MiB"
            + ("" if each["memory"] is None else f", memory {each['memory'] / 2**20:6,.0f} MiB")
        )
    ratios = {each.name: {"seen": each.seen, "asked": each.target} for each in verdicts}
    return {"rows_are": str(kind), "n_rows": n_rows, "ways": ways_seen, "ratios": ratios}


def memory_of(contender: Contender) -> float | None:
    """Return bytes that an epoch adds to a forked process.

    None if it has workers, whose memory would be missing, or does not run in a forked process.
    """
    if "2 workers" in contender.name:
        return None
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_most_memory, args=(contender, sender))
    process.start()
    sender.close()
    try:
        return max(0.0, float(receiver.recv()))
    except EOFError:
        return None
    finally:
        process.join()


def _most_memory(contender: Contender, sender: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a loader that refuses to run here says so at length
    before, most = anonymous_memory(), 0
    contender.prepare()
    for number, _ in enumerate(contender.epoch(1)):
        if number % 8 == 0:
            most = max(most, anonymous_memory())
    sender.send(most - before)
    sender.close()
    os._exit(0)


def anonymous_memory() -> int:
    """Return bytes of resident memory that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


# The page -------------------------------------------------------------------------------------------------------------


def page(results: Mapping[str, Any]) -> str:
    """Return the tables for the documentation."""
    about = results["environment"]
    parts = []
    for result in results["results"]:
        plain_rate = max(way["rows_per_second"] for name, way in result["ways"].items() if name.startswith(PLAIN))
        lines = ["| | convert, s | MiB | rows/s | times plain h5py | memory, MiB |", "|---|---:|---:|---:|---:|---:|"]
        for name, way in result["ways"].items():
            title = f"**{name}**" if name.startswith("lightning_h5") else name
            seconds = f"{way['convert_seconds']:.1f}" if way["convert_seconds"] else "-"
            memory = "-" if way["memory"] is None else f"{way['memory'] / 2**20:,.0f}"
            rate = way["rows_per_second"]
            cells = (
                title,
                seconds,
                f"{way['bytes'] / 2**20:,.0f}",
                f"{rate:,.0f}",
                f"{rate / plain_rate:,.1f}",
                memory,
            )
            lines.append(f"| {' | '.join(cells)} |")
        seen = ", ".join(f"{name} {each['seen']:.2f}" for name, each in result["ratios"].items())
        parts.append(
            "\n".join(
                [f"### {result['rows_are'][0].upper()}{result['rows_are'][1:]}", "", *lines, "", f"Ratios: {seen}."]
            )
        )
    versions = ", ".join(f"{name} {about[name]}" for name in ("h5py", *VERSIONS[:3]) if name in about)
    parts.append(
        f"{setting_of(about, 'converted')}: "
        f"{results['results'][0]['n_rows']:,} rows, gzip, 32 rows per chunk, files in the page cache. "
        f"Versions: {versions}."
    )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure both kinds of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    add_outputs(parser)
    given = parser.parse_args()
    for name in ("lightning_h5", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    peers, missing = find_peers(given.peers)
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}")
    written: dict[str, Any] = {"environment": environment(VERSIONS), "results": []}
    print(line_of(written["environment"]))
    with tqdm(disable=True) as progress:
        for kind in (IMAGES, SIGNALS):
            written["results"].append(run(kind, given.rows, given.rounds, peers, progress))
    write_outputs(given, written, page)


if __name__ == "__main__":
    main()
