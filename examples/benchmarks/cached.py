"""How fast a rank's shard is loaded into memory and served from it, beside what people write themselves and the limits.

    python examples/benchmarks/cached.py [--rows 20000] [--rounds 5] [--json FILE]

writes pictures and signals, compressed with gzip, 32 rows a chunk, to temporary files. First it times how long it takes
to have all rows in memory: by `array[a:b]`, by `RankMemCachedH5Dataset` on one rank, and on two ranks of one machine,
each a process of its own, with contiguous and interleaved shards. Then shuffled epochs of batches out of memory, of 64
and of 1,024 rows, also of twenty times as many rows of 128 bytes. Each contender is first checked to give every row
once and as it was written; then all take turns, in one run, with the files in the page cache. Ratios are of medians
over the rounds. Last comes the memory that loading takes beside the rows.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from common import (
    BATCH_SIZE,
    N_EPOCHS,
    Contender,
    Epoch,
    Target,
    environment,
    judge,
    line_of,
    measure,
    report,
    write_json,
)
from decoding import N_THREADS, bare_decode
from probes import forget_peak, on_disk, resident_mib
from ranks import CONTEXT, Ranks
from recipes import Cached, tensors
from rows import IMAGES, SIGNALS, Data, RowKind, lifelike, noise
from torch import Tensor
from tqdm import tqdm

from lightning_h5 import RankMemCachedH5Dataset

N_TOGETHER = 32
BATCH_SIZES = (64, 1024)
TABLE, N_TIMES = RowKind(name="table", shape=(32,), dtype="f4"), 20
N_LOADERS, N_SERVERS = 7, 2 * len(BATCH_SIZES)

PLAIN, BARE, OURS, FLOAT = "array[a:b] of h5py", "bare decode loop", "lightning_h5", "lightning_h5, as float32"
SHARED, CONTIGUOUS, INTERLEAVE = "lightning_h5, share_memory", "contiguous, 2 ranks", "interleave, 2 ranks"
MEMORY, SERVED, LOADER = "index_select", "lightning_h5", "DataLoader(TensorDataset), 2 workers"
IN_PROCESS = "DataLoader(TensorDataset), 0 workers"

STORAGE: dict[str, dict[str, Any]] = {
    "images": {"compression": "gzip"},
    "signals": {"compression": "gzip", "shuffle": True},
    "table": {},
}
LOAD_TARGETS = {
    "images": (
        Target(of=OURS, against=PLAIN, least=2.0),
        Target(of=OURS, against=BARE, least=0.8),
        Target(of=INTERLEAVE, against=CONTIGUOUS, least=1 / 1.5, name="interleave / contiguous, on two ranks"),
    ),
    # These decode so fast that memory is the limit, and the bare loop fills none.
    "signals": (
        Target(of=OURS, against=PLAIN, least=2.0),
        Target(of=OURS, against=BARE, least=None),
        Target(of=INTERLEAVE, against=CONTIGUOUS, least=None, name="interleave / contiguous, on two ranks"),
    ),
}
SERVE_TARGETS = tuple(Target(of=f"{SERVED}, {n}", against=f"{MEMORY}, {n}", least=0.8) for n in BATCH_SIZES)
TENSOR_TARGETS = (
    Target(of=f"{SERVED}, 64", against=LOADER, least=10.0),
    Target(of=f"{SERVED}, 64", against=IN_PROCESS, least=None),
)


def h5py_slice(data: Data) -> Epoch:
    """All rows by one slice of h5py."""

    def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
        with h5py.File(data.path, "r") as file:
            yield torch.from_numpy(file["x"][0 : len(data.x)]), torch.from_numpy(file["labels"][:])

    return epoch


def loaded(data: Data, **options: Any) -> Epoch:
    """All rows in memory, as one rank has them; copied out of it where they are checked."""

    def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
        dataset = RankMemCachedH5Dataset(data.path, "x", "labels", **options)
        yield dataset.read_batch(np.arange(len(dataset))) if number == 0 else (None, torch.from_numpy(data.labels))
        dataset.close()

    return epoch


class Shards:
    """Two ranks of one machine, which load their shards when they are told to.

    Args:
        data: what to read.
    """

    def __init__(self, data: Data) -> None:
        self._ranks = Ranks(partial(Loading, data.path))
        self._labels = torch.from_numpy(data.labels)
        self.close = self._ranks.close

    def epoch(self, mode: str) -> Epoch:
        """Both ranks load their shards."""

        def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
            told = self._ranks.ask((mode, number == 0))
            if number:
                yield None, self._labels
            else:
                yield tuple(torch.cat([torch.from_numpy(one[i]) for one in told]) for i in range(2))

        return epoch


class Loading:
    """What the process of a rank does."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path

    def __call__(self, asked: tuple[str, bool]) -> list[Any] | None:
        """Loads the shard; gives its rows where they are asked for."""
        mode, keep = asked
        dataset = RankMemCachedH5Dataset(self._path, "x", "labels", mode=mode, x_dtype=None)
        rows = dataset.read_batch(np.arange(len(dataset))) if keep else None
        dataset.close()
        return rows and [tensor.numpy() for tensor in rows]


def loaders(data: Data, stack: ExitStack) -> list[Contender]:
    """Who has all rows in memory at the end."""
    ranks = Shards(data)
    stack.callback(ranks.close)
    bare = Contender(name=f"{BARE}, {N_THREADS} threads", team=BARE, epoch=bare_decode(data, stack))
    return [
        Contender(name=CONTIGUOUS, epoch=ranks.epoch("contiguous")),
        Contender(name=INTERLEAVE, epoch=ranks.epoch("interleave")),
        Contender(name=PLAIN, epoch=h5py_slice(data)),
        bare,
        Contender(name=OURS, epoch=loaded(data, x_dtype=None)),
        Contender(name=SHARED, epoch=loaded(data, x_dtype=None, share_memory=True)),
        Contender(name=FLOAT, epoch=loaded(data, x_dtype="float32")),
    ]


def selected(data: Data, batch_size: int) -> Epoch:
    """The same fields by ``index_select`` from memory, into new memory for each batch, in an order drawn beforehand."""
    x, labels = torch.from_numpy(data.x), torch.from_numpy(data.labels)
    batches = torch.from_numpy(np.random.default_rng(1).permutation(len(x))).split(batch_size)
    return lambda number: ((torch.index_select(x, 0, rows), torch.index_select(labels, 0, rows)) for rows in batches)


def servers(data: Data, stack: ExitStack) -> list[Contender]:
    """Who makes batches of rows that are in memory."""
    contenders = []
    if data.chunks is not None:
        contenders.append(Contender(name=LOADER, epoch=tensors(data, 2)))
        contenders.append(Contender(name=IN_PROCESS, epoch=tensors(data, 0), n_epochs=N_EPOCHS))
    for n in BATCH_SIZES:
        cached = Cached(data, batch_size=n)
        stack.callback(cached.close)
        contenders.append(Contender(name=f"{SERVED}, {n}", epoch=cached.epoch, n_epochs=N_EPOCHS))
        contenders.append(Contender(name=f"{MEMORY}, {n}", epoch=selected(data, n), n_epochs=N_EPOCHS))
    return contenders


def peak_of(path: Path, n_rows: int, dtype: str | None, pipe: Connection) -> None:
    """Tells the most memory that loading took over what the process held before, in MiB."""
    data = on_disk(path, n_rows)
    RankMemCachedH5Dataset(data.path, "labels", x_dtype=None).close()  # warm-up: imports on first use
    forget_peak()
    before = resident_mib("VmRSS")
    dataset = RankMemCachedH5Dataset(data.path, "x", "labels", x_dtype=dtype)
    pipe.send((resident_mib("VmHWM") - before, dataset.cost.row_bytes * n_rows / 2**20))
    dataset.close()


def beside_the_shard(data: Data, dtype: str | None) -> float:
    """MiB that loading takes beside the shard itself, in a process of its own."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=peak_of, args=(data.path, len(data.x), dtype, theirs), daemon=True)
    process.start()
    peak, shard = ours.recv()
    process.join()
    return float(peak - shard)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each array (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each contender (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to a file")
    options = parser.parse_args()
    if options.rows < 2 * BATCH_SIZE or options.rounds < 1:
        parser.error(f"--rows takes {2 * BATCH_SIZE} or more and --rounds 1 or more")
    return options


def run(kind: RowKind, path: Path, options: argparse.Namespace, progress: tqdm[Any]) -> dict[str, Any]:
    """Measures an array and prints its tables."""
    progress.set_postfix_str(f"write {kind.name}")
    storage = STORAGE[kind.name] and {"chunks": (N_TOGETHER, *kind.shape), **STORAGE[kind.name]}
    rows = lifelike(kind, options.rows) if storage else noise(kind, N_TIMES * options.rows)
    data = Data.write(path, *rows, **storage)
    written: dict[str, Any] = {"rows_are": kind.name, "stored_bytes": data.stored_bytes}
    parts: list[tuple[str, Callable[..., list[Contender]], tuple[Target, ...]]] = []
    if storage:
        parts.append(("loading", loaders, LOAD_TARGETS[kind.name]))
    parts.append(("batches", servers, SERVE_TARGETS + (TENSOR_TARGETS if storage else ())))
    for name, contenders, targets in parts:
        with ExitStack() as stack:
            timings = measure(contenders(data, stack), data, options.rounds, progress)
        verdicts = judge(timings, targets)
        progress.write(f"\n{report(f'{kind}, {name}; {data.storage}', timings, verdicts, n_rows=len(data.x))}")
        written[name] = {
            "contenders": [asdict(timing) for timing in timings],
            "ratios": [asdict(verdict) for verdict in verdicts],
        }
    if storage:
        beside = {dtype or "as stored": beside_the_shard(data, dtype) for dtype in (None, "float32")}
        written["mib_beside_the_shard"] = beside
        for dtype, n_mib in beside.items():
            progress.write(f"\n{kind.name}, {dtype}: loading took {n_mib:,.0f} MiB beside the shard (256 are allowed)")
    data.path.unlink()
    return written


def main() -> None:
    """Measures both arrays, prints their tables, and writes them as JSON where asked."""
    options = arguments()
    # Before Python 3.13 the forkserver does not find modules next to this file.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hides the messages about the order
    about = environment(("deflate", "imagecodecs", "zlib-into"))
    print(line_of(about))
    print(f"{options.rows:,} rows, {options.rounds} rounds, warm page cache")
    kinds = (IMAGES, SIGNALS, TABLE)
    steps = (options.rounds + 1) * (2 * (N_LOADERS + 2) + len(kinds) * N_SERVERS)
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=steps, desc="rounds", leave=False, disable=None) as progress,
    ):
        results = [run(kind, Path(folder) / f"{kind.name}.h5", options, progress) for kind in kinds]
    settings = {"rows": options.rows, "rounds": options.rounds, "batch_sizes": BATCH_SIZES}
    write_json(options.json, {"environment": about, **settings, "results": results})


if __name__ == "__main__":
    main()
