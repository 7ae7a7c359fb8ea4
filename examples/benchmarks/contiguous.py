"""How fast rows of contiguous arrays become shuffled batches, beside the plain recipe and the limits.

    python examples/benchmarks/contiguous.py

writes images (u1, 3x64x64) and signals (f4, 4x1024) with labels to temporary files, checks that every
contender gives each row exactly once and as it was written, and times epochs of all of them in turn, in one
run, with the files in the page cache. Ratios are of medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from lightning_h5 import LazyH5DataModule

BATCH_SIZE = 64
PLAIN = ("plain h5py, 0 workers", "plain h5py, 2 workers")
OURS = "lightning_h5"
MAPPED = "lightning_h5, mmap=True"
PREADV = ("bare preadv, fresh memory", "bare preadv, one buffer")
MEMORY = "index_select in memory"
N_CONTENDERS = 7

Epoch: TypeAlias = Callable[[int], Iterator[tuple[Any, Tensor]]]
"""Starts the epoch of a number: batches of rows and their labels."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An array to read from.

    Attributes:
        name: what its rows are.
        shape: of a row.
        dtype: of its numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        row_bytes = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return f"{self.name} {self.dtype} {'x'.join(map(str, self.shape))} ({row_bytes / 1024:g} KiB a row)"


CASES = (
    Case(name="images", shape=(3, 64, 64), dtype="u1"),
    Case(name="signals", shape=(4, 1024), dtype="f4"),
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A ratio that is promised.

    Attributes:
        name: what is compared with what.
        of: the contender that is held to it.
        against: contenders it is compared with: with the fastest of them.
        least: the promise; None shows the ratio for information.
    """

    name: str
    of: str
    against: tuple[str, ...]
    least: float | None


TARGETS = (
    Target(name="lightning_h5 / plain h5py", of=OURS, against=PLAIN, least=3.5),
    Target(name="lightning_h5 mmap / plain h5py", of=MAPPED, against=PLAIN, least=6.0),
    Target(name="lightning_h5 / bare preadv", of=OURS, against=PREADV, least=0.9),
    Target(name="lightning_h5 / index_select", of=OURS, against=(MEMORY,), least=None),
    Target(name="lightning_h5 mmap / index_select", of=MAPPED, against=(MEMORY,), least=None),
)


@dataclass(frozen=True, eq=False)
class Data:
    """Rows on disk and the same rows in memory.

    Attributes:
        path: the HDF5 file, with the arrays "x" and "labels".
        x: the rows, shape ``(n_rows, *row_shape)``.
        labels: another number for each row, so that a batch says which rows it holds; shape ``(n_rows,)``.
    """

    path: Path
    x: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]

    @classmethod
    def write(cls, path: Path, case: Case, n_rows: int) -> Data:
        """Makes random rows and writes them the way ``create_dataset(data=...)`` does: contiguous."""
        rng = np.random.default_rng(0)
        if case.dtype == "f4":
            x: npt.NDArray[Any] = rng.standard_normal((n_rows, *case.shape), dtype=np.float32)
        else:
            x = rng.integers(0, 256, (n_rows, *case.shape), dtype=case.dtype)
        labels = rng.permutation(n_rows)
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=x)
            file.create_dataset("labels", data=labels)
        with path.open("rb") as written:
            os.fsync(written.fileno())  # else the system writes it out while the clock runs
        return cls(path, x, labels)


class PlainDataset(Dataset[tuple[Tensor, Tensor]]):
    """What people write themselves: one ``array[i]`` a sample, the file opened by each worker on first use.

    It is the better kind: arrays are looked up once, and labels are kept in memory.
    """

    def __init__(self, path: Path, n_rows: int) -> None:
        self.path, self.n_rows = path, n_rows
        self._file: h5py.File | None = None

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._file is None:
            self._file = h5py.File(self.path, "r")
            self._x = self._file["x"]
            self._labels = torch.from_numpy(self._file["labels"][:])
        return torch.from_numpy(self._x[index]), self._labels[index]


def plain(data: Data, n_workers: int) -> Epoch:
    """The plain recipe. Its workers stay between epochs, so that their start is not timed."""
    dataset = PlainDataset(data.path, len(data.x))
    loader = DataLoader(
        dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=n_workers, persistent_workers=n_workers > 0
    )
    return lambda epoch: iter(loader)


def ours(data: Data, *, mmap: bool, stack: ExitStack) -> Epoch:
    """The data module's training loader, whole: sampler, order, read-ahead, labels."""
    module = LazyH5DataModule(
        data.path, x_key="x", y_key="labels", shuffle=True, num_workers=0, batch_size=BATCH_SIZE, mmap=mmap
    )
    module.setup("fit")
    stack.callback(module.teardown, "fit")
    loader = module.train_dataloader()

    def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
        loader.sampler.set_epoch(number)
        return iter(loader)

    return epoch


def shuffled_batches(data: Data) -> list[tuple[npt.NDArray[np.int64], Tensor]]:
    """Rows and labels of each batch, in an order drawn beforehand: the limits pay for reading alone."""
    order = np.random.default_rng(1).permutation(len(data.x))
    batches = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
    return [(rows, torch.from_numpy(data.labels[rows])) for rows in batches]


def bare_preadv(data: Data, *, fresh: bool, stack: ExitStack) -> Epoch:
    """One ``os.preadv`` a row in one thread, into new memory for each batch or into the same again."""
    with h5py.File(data.path, "r") as file:
        first = file["x"].id.get_offset()
    fd = os.open(data.path, os.O_RDONLY)
    stack.callback(os.close, fd)
    n_bytes = data.x[0].nbytes
    batches = [((first + rows * n_bytes).tolist(), labels) for rows, labels in shuffled_batches(data)]

    def memory() -> tuple[npt.NDArray[Any], list[memoryview]]:
        buffer = np.empty((BATCH_SIZE, *data.x.shape[1:]), data.x.dtype)
        view = buffer.data.cast("B")
        return buffer, [view[start : start + n_bytes] for start in range(0, len(view), n_bytes)]

    def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
        buffer, views = memory()
        for offsets, labels in batches:
            if fresh:
                buffer, views = memory()
            for view, offset in zip(views, offsets, strict=False):  # the last batch may be smaller
                os.preadv(fd, [view], offset)
            yield buffer[: len(offsets)], labels

    return epoch


def in_memory(data: Data) -> Epoch:
    """``index_select`` from the whole array in memory, into new memory for each batch."""
    x = torch.from_numpy(data.x)
    batches = [(torch.from_numpy(rows), labels) for rows, labels in shuffled_batches(data)]
    return lambda number: ((torch.index_select(x, 0, rows), labels) for rows, labels in batches)


@contextmanager
def contenders(data: Data) -> Iterator[dict[str, Epoch]]:
    """All contenders by name; what they hold open is closed at the end of the ``with`` block."""
    with ExitStack() as stack:
        yield {
            PLAIN[0]: plain(data, 0),
            PLAIN[1]: plain(data, 2),
            OURS: ours(data, mmap=False, stack=stack),
            MAPPED: ours(data, mmap=True, stack=stack),
            PREADV[0]: bare_preadv(data, fresh=True, stack=stack),
            PREADV[1]: bare_preadv(data, fresh=False, stack=stack),
            MEMORY: in_memory(data),
        }


def verify(name: str, batches: Iterator[tuple[Any, Tensor]], data: Data) -> None:
    """Checks that an epoch gives every row exactly once, and each as it was written, beside its own label.

    Raises:
        SystemExit: it does not; there is nothing to time.
    """
    row_of = torch.from_numpy(np.argsort(data.labels))
    expected, counts = torch.from_numpy(data.x), torch.zeros(len(data.x), dtype=torch.int64)
    for x, labels in batches:
        rows = row_of[labels]
        if not torch.equal(torch.as_tensor(x), expected[rows]):
            raise SystemExit(f"{name!r} gives rows that differ from those written")
        counts += torch.bincount(rows, minlength=len(counts))
    if not bool((counts == 1).all()):
        missing, repeated = int((counts == 0).sum()), int((counts > 1).sum())
        raise SystemExit(f"{name!r} leaves out {missing} rows and repeats {repeated}")


def rows_per_second(batches: Callable[[], Iterator[tuple[Any, Tensor]]], n_rows: int) -> float:
    """Rows a second of an epoch, from asking for the iterator to its end."""
    began = perf_counter()
    for _ in batches():
        pass
    return n_rows / (perf_counter() - began)


def measure(data: Data, n_rounds: int, progress: tqdm[Any]) -> dict[str, list[float]]:
    """Rows a second of each contender in each round; each round begins with another one."""
    speeds: dict[str, list[float]] = {}
    with contenders(data) as epochs:
        names = list(epochs)
        for name in names:  # also the warm-up: workers start, files open, memory is mapped
            progress.set_postfix_str(f"verify {name}")
            verify(name, epochs[name](0), data)
            speeds[name] = []
            progress.update()
        for number in range(1, n_rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                progress.set_postfix_str(name)
                speeds[name].append(rows_per_second(lambda: epochs[name](number), len(data.x)))  # noqa: B023
                progress.update()
    return speeds


def judge(speeds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Each target with the ratio of medians that was seen, against the fastest it is compared with."""
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    judged = []
    for target in TARGETS:
        seen = medians[target.of] / max(medians[name] for name in target.against)
        met = None if target.least is None else seen >= target.least
        judged.append({"name": target.name, "target": target.least, "seen": seen, "met": met})
    return judged


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Text in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    sides = [str.ljust] + [str.rjust] * (len(header) - 1)
    return "\n".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True))
        for line in (header, rule, *lines)
    )


def report(case: Case, speeds: dict[str, list[float]], judged: Sequence[dict[str, Any]]) -> str:
    """The tables of an array: rows a second of each contender, then the targets."""
    lines = [
        (name, f"{statistics.median(values):,.0f}", f"{max(values):,.0f}", f"{min(values):,.0f}")
        for name, values in speeds.items()
    ]
    ratios = [
        (
            str(entry["name"]),
            "-" if entry["target"] is None else f">= {entry['target']:.2f}",
            f"{entry['seen']:.2f}",
            {None: "-", True: "yes", False: "NO"}[entry["met"]],
        )
        for entry in judged
    ]
    return "\n\n".join(
        [
            str(case),
            table(("rows/s of an epoch", "median", "best", "worst"), lines),
            table(("ratio of medians", "target", "seen", "met"), ratios),
        ]
    )


def environment() -> dict[str, Any]:
    """What the numbers were measured with; nothing that names a machine."""
    return {
        "date": date.today().isoformat(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
        "numpy": np.__version__,
    }


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
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # the order it took is no news here
    about = environment()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{options.rows:,} rows, batch {BATCH_SIZE}, {options.rounds} rounds, shuffled, warm page cache")
    results = []
    steps = len(CASES) * (options.rounds + 1) * N_CONTENDERS
    with tempfile.TemporaryDirectory() as folder, tqdm(total=steps, desc="epochs", leave=False) as progress:
        for case in CASES:
            progress.set_postfix_str(f"write {case.name}")
            data = Data.write(Path(folder) / f"{case.name}.h5", case, options.rows)
            speeds = measure(data, options.rounds, progress)
            judged = judge(speeds)
            data.path.unlink()
            progress.write(f"\n{report(case, speeds, judged)}")
            results.append({"case": asdict(case), "rows_per_second": speeds, "ratios": judged})
    if options.json is not None:
        settings = {"rows": options.rows, "rounds": options.rounds, "batch_size": BATCH_SIZE}
        text = json.dumps({"environment": about, **settings, "results": results}, indent=2)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
