"""What normalising costs, how much of a batch of sequences is padding, and how fast and how exact mixtures are.

    python examples/benchmarks/studies.py [--rows 8000] [--rounds 7] [--parts normalize lengths mixtures] [--json FILE]

Normalising: epochs with `normalize` beside epochs without, in turns, of rows that are decoded, held in memory, or
copied out of the page cache. Each batch is first checked against NumPy in 64 bits. Lengths: batches of sequences whose
lengths are log-normal, bucketed and plainly shuffled, as they are dealt to 1 to 4 ranks. Mixtures: epochs of three
compressed sources by each strategy beside the same rows as one (`concat`), and the shares after ten thousand steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from common import BATCH_SIZE, N_EPOCHS, Contender, environment, line_of, met, seconds_of, table, write_json
from rows import IMAGES, SIGNALS, RowKind, lifelike
from tqdm import tqdm

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.order import BlockTable, LengthRecipe, OrderParameters, PlanSampler

PARTS = ("normalize", "lengths", "mixtures")
N_STEPS = 10_000
MIN_NORMALIZED = 0.95
MAX_WASTE = 0.05
WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}


@dataclass(frozen=True)
class Case:
    """Rows as they are stored, and the settings that they are read with."""

    name: str
    kind: RowKind
    storage: dict[str, Any]
    module: type[Any]
    settings: dict[str, Any]
    is_promised: bool


# Decoded bytes are not kept: each chunk is decoded once per epoch.
IN_CHUNKS = {"shuffle": {"mode": "chunks", "buffer": "16 MiB"}, "files": {"cache_bytes": "24 MiB"}}
LONG = RowKind(name="recordings", shape=(43, 1760), dtype="f4")  # 300 KB per row, as in recordings of hours

CASES = (
    Case("recordings, LZF, 1 row a chunk", LONG, {"chunks": (1, 43, 1760), "compression": "lzf"}, LazyH5DataModule,
         {"shuffle": {"buffer": "16 MiB"}, "files": {"cache_bytes": "16 MiB"}}, True),
    Case("signals, gzip and shuffle, 32 rows a chunk", SIGNALS,
         {"chunks": (32, 4, 1024), "compression": "gzip", "shuffle": True}, LazyH5DataModule, IN_CHUNKS, True),
    Case("signals, the same, all decoded rows in memory", SIGNALS,
         {"chunks": (32, 4, 1024), "compression": "gzip", "shuffle": True}, LazyH5DataModule, {}, True),
    Case("images, gzip, 32 rows a chunk", IMAGES, {"chunks": (32, 3, 64, 64), "compression": "gzip"}, LazyH5DataModule,
         {"x_dtype": "float32", **IN_CHUNKS}, True),
    Case("signals, a rank's shard in memory", SIGNALS, {}, RankCachedH5DataModule, {}, True),
    Case("signals, contiguous, in the page cache", SIGNALS, {}, LazyH5DataModule, {}, False),
)  # fmt: skip


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8000, help="rows of signals and images (recordings: a tenth)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=N_STEPS, help="steps after which shares are looked at")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hides the messages about the order
    about = environment(("deflate", "imagecodecs"))
    print(line_of(about))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            results[part] = {"normalize": normalizing, "lengths": bucketing, "mixtures": mixing}[part](
                Path(folder), options
            )
    write_json(options.json, {"environment": about, "rows": options.rows, "rounds": options.rounds, **results})


# Normalization -----------------------------------------------------------------------------------------------------


def normalizing(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows a second with and without."""
    lines, results = [], []
    for number, case in enumerate(tqdm(CASES, desc="normalize", leave=False, disable=None)):
        n_rows = max(BATCH_SIZE, options.rows // (10 if case.kind is LONG else 1))
        rows = _rows(case.kind, n_rows)
        path, stats = folder / f"{number}.h5", folder / f"{number}.json"
        _write(path, rows, case.storage)
        axes = tuple(axis for axis in range(rows.ndim) if axis != 1)
        mean, std = rows.mean(axes, dtype=np.float64), rows.std(axes, dtype=np.float64)
        entry = {"mean": mean.tolist(), "std": std.tolist(), "row_shape": list(case.kind.shape)}
        stats.write_text(json.dumps({"fields": {"x": entry}}))
        loaders = [_loader(case, path, None), _loader(case, path, stats)]
        _check(loaders[1], rows, mean, std)
        seen = _in_turns([_epochs(loader) for loader in loaders], options.rounds, n_rows)
        ratio = median(seen[1]) / median(seen[0])
        target = f">= {MIN_NORMALIZED}" if case.is_promised else "-"
        verdict = met(ratio >= MIN_NORMALIZED if case.is_promised else None)
        lines.append((case.name, f"{median(seen[0]):,.0f}", f"{median(seen[1]):,.0f}", f"{ratio:.3f}", target, verdict))
        results.append({"case": case.name, "plain": seen[0], "normalized": seen[1], "ratio": ratio})
        for loader in loaders:
            loader.close()
        path.unlink()
    print("\nrows a second, medians of rounds in turns")
    print(table(("rows", "as stored", "normalized", "ratio", "target", "met"), lines))
    return results


def _rows(kind: RowKind, n_rows: int) -> npt.NDArray[Any]:
    if kind is LONG:
        rng = np.random.default_rng(0)
        steps = rng.normal(size=(n_rows, *kind.shape)).astype(kind.dtype)
        rows: npt.NDArray[Any] = np.round(steps.cumsum(axis=-1), 1).astype(kind.dtype) + 100
        return rows
    return lifelike(kind, n_rows)[0]


def _write(path: Path, rows: npt.NDArray[Any], storage: dict[str, Any]) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=rows, **storage)
        file["labels"] = np.arange(len(rows))


def _loader(case: Case, path: Path, stats: Path | None) -> Any:
    settings = {"batch_size": BATCH_SIZE, **case.settings}
    module = case.module(str(path), x_key="x", y_key="labels", normalize=stats and str(stats), **settings)
    module.setup("fit")
    return module.train_dataloader()


def _check(loader: Any, rows: npt.NDArray[Any], mean: npt.NDArray[np.float64], std: npt.NDArray[np.float64]) -> None:
    shape = (-1, *[1] * (rows.ndim - 2))
    for x, labels in loader:
        expected = (rows[labels.numpy()] - mean.reshape(shape)) / std.reshape(shape)
        error = np.abs(x.numpy() - expected) / np.maximum(1, np.abs(expected))
        if error.max() > 1e-6:
            raise SystemExit(f"normalised rows are {error.max():.2g} off")


def _epochs(loader: Any) -> Callable[[int], Iterator[Any]]:
    def epoch(number: int) -> Iterator[Any]:
        loader.sampler.set_epoch(number)
        return iter(loader)

    return epoch


def _in_turns(epochs: list[Callable[[int], Iterator[Any]]], n_rounds: int, n_rows: int) -> list[list[float]]:
    # A single epoch of a few milliseconds would be as short as a tick of the scheduler.
    contenders = [Contender(name=str(at), epoch=epoch, n_epochs=N_EPOCHS) for at, epoch in enumerate(epochs)]
    seen: list[list[float]] = [[] for _ in contenders]
    for number in range(n_rounds + 1):
        for at in range(len(contenders)):
            turn = (at + number) % len(contenders)
            seconds = seconds_of(contenders[turn], number, n_rows)
            if number:  # the first epoch warms up
                seen[turn].append(n_rows / seconds)
    return seen


# Lengths -----------------------------------------------------------------------------------------------------------


def bucketing(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The share of batches that is padding."""
    lines, results = [], []
    for n, batch_size, sigma in ((2000, 16, 0.5), (2000, 32, 0.5), (20_000, 32, 0.5), (20_000, 32, 1.0)):
        lengths = np.maximum(1, np.random.default_rng(0).lognormal(4, sigma, n)).astype(np.int64)
        plain = _waste(lengths, _dealt(lengths, batch_size, 1, None))
        bucketed = []
        for n_ranks in (1, 2, 3, 4):
            recipe = LengthRecipe(lengths, BlockTable.of_sizes([n]), "by length")
            bucketed.append(_waste(lengths, _dealt(lengths, batch_size, n_ranks, recipe)))
        lines.append(
            (
                f"{n:,} sequences, batches of {batch_size}, sigma {sigma}",
                f"{plain:.1%}",
                *(f"{waste:.1%}" for waste in bucketed),
                met(max(bucketed) <= MAX_WASTE),
            )
        )
        results.append({"n": n, "batch_size": batch_size, "sigma": sigma, "plain": plain, "bucketed": bucketed})
    print("\npadding of batches, lengths log-normal; bucketed at most 5 %, equal steps on all ranks")
    print(table(("lengths", "plain", "1 rank", "2 ranks", "3 ranks", "4 ranks", "met"), lines))
    return results


def _dealt(
    lengths: npt.NDArray[np.int64], batch_size: int, n_ranks: int, recipe: LengthRecipe | None
) -> list[npt.NDArray[np.int64]]:
    blocks = BlockTable.of_sizes([len(lengths)])
    order = OrderParameters(mode="global", batch_size=batch_size)
    ranks = [
        PlanSampler(blocks, order, batch_size=batch_size, rank=rank, world_size=n_ranks, recipe=recipe)
        for rank in range(n_ranks)
    ]
    steps = [[token.rows for token in rank.tokens(0)] for rank in ranks]
    if len({len(of_rank) for of_rank in steps}) > 1:
        raise SystemExit("ranks do not take equally many steps")
    batches = [rows for step in zip(*steps, strict=True) for rows in step]
    if sorted(np.concatenate(batches).tolist()) != list(range(len(lengths))):
        raise SystemExit("not each sequence came once")
    return batches


def _waste(lengths: npt.NDArray[np.int64], batches: list[npt.NDArray[np.int64]]) -> float:
    return 1 - float(lengths.sum()) / sum(int(lengths[rows].max()) * len(rows) for rows in batches)


# Mixtures ----------------------------------------------------------------------------------------------------------


def mixing(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rows a second of each strategy, and the shares of a long epoch."""
    sizes = {"a": options.rows // 2, "b": options.rows // 3, "c": options.rows - options.rows // 2 - options.rows // 3}
    sources = {}
    for name, n_rows in sizes.items():
        sources[name] = str(folder / f"{name}.h5")
        _write(Path(sources[name]), lifelike(SIGNALS, n_rows)[0], {"chunks": (32, 4, 1024), "compression": "gzip"})
    strategies: dict[str, dict[str, Any]] = {
        "concat": {},
        "sequential": {"strategy": "sequential"},
        "round_robin": {"strategy": "round_robin"},
        "weighted": {"strategy": "weighted", "weights": WEIGHTS},
        "weighted, rows mixed": {"strategy": "weighted", "weights": WEIGHTS, "mix": "rows"},
    }
    n_steps = max(1, options.rows // BATCH_SIZE)
    loaders = {}
    for name, settings in strategies.items():
        module = CombinedHDF5DataModule(
            mixture={"sources": sources, "epoch_length": n_steps, **settings},
            batch_size=BATCH_SIZE,
            drop_last=True,
            row_cache=0,
            **IN_CHUNKS,
        )
        module.setup("fit")
        loaders[name] = module.train_dataloader()
    seen = _in_turns([_pairs(loader) for loader in loaders.values()], options.rounds, n_steps * BATCH_SIZE)
    base = median(seen[0])
    lines = [
        (name, f"{median(rates):,.0f}", f"{median(rates) / base:.2f}")
        for name, rates in zip(loaders, seen, strict=True)
    ]
    print("\nrows a second of three compressed sources, medians of rounds in turns")
    print(table(("strategy", "rows/s", "beside concat"), lines))
    shares, lines = _shares(sources, options.steps), []
    for name, weight in WEIGHTS.items():
        off = shares[name] - weight * options.steps
        lines.append((name, f"{weight:.2f}", f"{shares[name]:,}", f"{off:+.1f}", "1.0", met(abs(off) <= 1)))
    print(f"\nbatches of each source after {options.steps:,} steps")
    print(table(("source", "weight", "batches", "off by", "at most", "met"), lines))
    return {"rows_per_second": dict(zip(loaders, seen, strict=True)), "shares": shares}


def _pairs(loader: Any) -> Callable[[int], Iterator[Any]]:
    def epoch(number: int) -> Iterator[Any]:
        loader.sampler.set_epoch(number)
        return ((batch["x"], batch["labels"]) for batch in loader)

    return epoch


def _shares(sources: dict[str, str], n_steps: int) -> dict[str, int]:
    module = CombinedHDF5DataModule(
        mixture={"sources": sources, "strategy": "weighted", "epoch_length": n_steps, "weights": WEIGHTS},
        fields=["labels"],
        batch_size=1,
    )
    module.setup("fit")
    counts = dict.fromkeys(WEIGHTS, 0)
    for batch in module.train_dataloader():
        counts[batch["source"][0]] += 1
    return counts


if __name__ == "__main__":
    main()
