"""How many steps of batches of sequences are unused, and how far the times of training steps are apart.

    python examples/benchmarks/tokens.py [--samples 20000] [--rounds 3] [--json FILE]

Lengths are log-normal: of proteins 300 on average, of recordings 2,000. Each is trained on in four ways: plain batches
of as many samples as make `max_tokens` steps on average, padded; the same with `segments.bucket`;
`segments.max_tokens`, padded; and `max_tokens` with `collate_fn="pack"`. "unused" is the share of `max_tokens` that no
sample fills. There are 0.4 times as many recordings as proteins; few batches leave more of the last one empty. The
model is small and runs on one core: two linear layers over all steps, and a mean over each sample. Its time is the
processor's, so that other programs count little. Each epoch is checked: all samples once, each with its own steps.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from common import environment, line_of, met, table, write_json
from tqdm import tqdm

from lightning_h5 import LazyH5DataModule

MAX_UNUSED = 0.01
MAX_MISSED = 0.03
WIDTH = 4


@dataclass(frozen=True)
class Case:
    """Sequences of several lengths.

    Attributes:
        name: what they are.
        mean: steps of a sequence, on average.
        sigma: of the logarithm of lengths.
        bounds: the shortest and the longest.
        max_tokens: steps of a batch.
        share: of ``--samples``.
    """

    name: str
    mean: float
    sigma: float
    bounds: tuple[int, int]
    max_tokens: int
    share: float = 1.0

    def lengths(self, n: int) -> npt.NDArray[np.int64]:
        """Lengths of ``n`` sequences."""
        mean_of_log = np.log(self.mean) - self.sigma**2 / 2
        lengths = np.random.default_rng(0).lognormal(mean_of_log, self.sigma, n)
        return np.clip(lengths, *self.bounds).astype(np.int64)


CASES = (
    Case("proteins", 300, 0.6, (20, 2_000), 16_384),
    Case("recordings", 2_000, 0.5, (200, 10_000), 65_536, 0.4),
)


def main() -> None:
    """Trains on each kind of sequences in each way, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3, help="epochs in each way")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hides the messages about the order
    torch.set_num_threads(1)
    about = environment()
    print(line_of(about))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            lengths = case.lengths(max(32, round(options.samples * case.share)))
            results[case.name] = compare(case, lengths, Path(folder) / f"{case.name}.h5", options.rounds)
    write_json(options.json, {"environment": about, "rounds": options.rounds, "results": results})


def compare(case: Case, lengths: npt.NDArray[np.int64], path: Path, n_rounds: int) -> dict[str, Any]:
    """Returns the figures of each way to make batches, after it has printed them."""
    write(path, lengths)
    batch_size = max(1, round(case.max_tokens / lengths.mean()))
    ways: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        f"plain, batches of {batch_size}": ("pad", {}, {"batch_size": batch_size}),
        f"bucket, batches of {batch_size}": ("pad", {"bucket": True}, {"batch_size": batch_size}),
        "max_tokens": ("pad", {"max_tokens": case.max_tokens}, {}),
        "max_tokens and pack": ("pack", {"max_tokens": case.max_tokens}, {}),
    }
    loaders = {}
    for name, (collate, segments, settings) in ways.items():
        module = LazyH5DataModule(
            path,
            fields=["x"],
            segments={"lengths": "lengths", **segments},
            collate_fn=collate,
            with_index=True,
            **settings,
        )
        module.setup("fit")
        loaders[name] = module.train_dataloader()
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = {name: list[tuple[int, int, float]]() for name in loaders}
    progress = tqdm(total=n_rounds * len(loaders), desc=case.name, leave=False, disable=None)
    for epoch in range(n_rounds):
        for name, loader in loaders.items():
            loader.sampler.set_epoch(epoch)
            steps[name] += train(loader, lengths, model, optimizer)
            progress.update()
    progress.close()
    figures = {name: figures_of(case, np.array(of_way)) for name, of_way in steps.items()}
    figures["max_tokens"]["met"] = bool(figures["max_tokens"]["missed"] <= MAX_MISSED)
    figures["max_tokens and pack"]["met"] = bool(figures["max_tokens and pack"]["unused"] <= MAX_UNUSED)
    lines = [
        (
            name,
            f"{way['padding']:.1%}",
            "-" if "max" not in name else f"{way['unused']:.2%}",
            f"{way['steps']:,.0f}",
            f"{way['most']:,}",
            f"{1e3 * way['seconds']:.1f}",
            f"{way['spread']:.2f}",
            f"{way['rate'] / 1e6:.2f}",
            met(way.get("met")),
        )
        for name, way in figures.items()
    ]
    print(f"\n{case.name}: {len(lengths):,} of {lengths.mean():,.0f} steps, at most {case.max_tokens:,} a batch")
    header = ("batches", "padding", "unused", "steps", "most", "ms", "p95 / p5", "million steps/s", "met")
    print(table(header, lines))
    return figures


def write(path: Path, lengths: npt.NDArray[np.int64]) -> None:
    """Writes sequences one after the other; the first value of each step is its sequence's number."""
    with h5py.File(path, "w") as file:
        values = file.create_dataset("x", (int(lengths.sum()), WIDTH), "f4")
        values[:, 0] = np.repeat(np.arange(len(lengths)), lengths)
        file["lengths"] = lengths


def train(
    loader: Any, lengths: npt.NDArray[np.int64], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[int, int, float]]:
    """Trains for an epoch; yields for each batch its steps, those that are no padding, and the processor's seconds
    of the update.

    Raises:
        SystemExit: samples are missing, come twice, or have other steps than those written.
    """
    counts = np.zeros(len(lengths), dtype=np.int64)
    for batch in loader:
        x, numbers = batch["x"], batch["index"].numpy()
        counts[numbers] += 1
        n_steps = int(lengths[numbers].sum())
        owners = np.repeat(numbers, lengths[numbers])
        is_step = mask_of(batch)
        if not np.array_equal(x[is_step][:, 0].numpy() if is_step is not None else x[:, 0].numpy(), owners):
            raise SystemExit("a batch has other steps than those written")
        began = thread_time()
        values = model(x / len(lengths)).squeeze(-1)
        if is_step is None:
            ends = batch["cu_seqlens"].long()
            sums = torch.segment_reduce(values, "sum", lengths=ends.diff())
        else:
            sums = (values * is_step).sum(1)
        loss = (sums / torch.from_numpy(lengths[numbers])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield x[..., 0].numel(), n_steps, thread_time() - began
    if not (counts == 1).all():
        raise SystemExit("not each sample came once")


def mask_of(batch: dict[str, Any]) -> torch.Tensor | None:
    """Which steps of a padded batch are no padding; None if it is packed."""
    return torch.arange(batch["x"].shape[1]) < batch["length"][:, None] if "length" in batch else None


def figures_of(case: Case, steps: npt.NDArray[np.float64]) -> dict[str, Any]:
    """The figures of a way, from the steps, the real steps and the seconds of each batch."""
    n_steps, n_real, seconds = steps.T
    low, high = np.quantile(seconds, [0.05, 0.95])
    return {
        "batches": len(steps),
        "padding": 1 - n_real.sum() / n_steps.sum(),
        "unused": 1 - n_real.sum() / (case.max_tokens * len(steps)),
        "missed": 1 - n_steps.mean() / case.max_tokens,
        "steps": n_steps.mean(),
        "most": int(n_steps.max()),
        "seconds": float(np.median(seconds)),
        "spread": float(high / low),
        "rate": float(n_real.sum() / seconds.sum()),
    }


if __name__ == "__main__":
    main()
