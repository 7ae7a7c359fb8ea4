"""How many cells a second come from an AnnData file, beside the usual ways to read one?

    python examples/benchmarks/sparse.py [--cells 200000] [--genes 2000] [--rounds 3] [--json FILE]

writes counts of cells, 5 % of them filled, as AnnData writes them (CSR, gzip, chunks that h5py chooses), and times
shuffled batches of 256 cells: a `Dataset` that reads each row with h5py, in a `DataLoader` with 0 and with 2 workers;
AnnData's backed mode, asked for a batch at a time; scDataset over it, in small blocks and in large ones; and
`LazyH5DataModule`, dense and in CSR form, with so little memory for decoded chunks that all are decoded in each epoch.
Each way runs in a process of its own, whose largest memory is shown; all take turns. Ratios are of medians. Ways whose
package is not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE = 256
SECONDS = 6.0
"""That a slow way is timed for; a faster one for a whole epoch, if that takes less."""


def write_cells(path: str, n_cells: int, n_genes: int) -> None:
    """Write an AnnData file."""
    rng = np.random.default_rng(0)
    lengths = rng.binomial(n_genes, 0.05, n_cells)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    indices = np.empty(indptr[-1], np.int32)
    for cell in range(n_cells):
        indices[indptr[cell] : indptr[cell + 1]] = np.sort(rng.choice(n_genes, lengths[cell], replace=False))
    data = (rng.negative_binomial(1, 0.3, indptr[-1]) + 1).astype(np.float32)
    with h5py.File(path, "w") as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [n_cells, n_genes]})
        for name, values in (("data", data), ("indices", indices), ("indptr", indptr.astype(np.int32))):
            matrix.create_dataset(name, data=values, compression="gzip", maxshape=(None,))
        for name, n, letter in (("obs", n_cells, "c"), ("var", n_genes, "g")):
            table = file.create_group(name)
            table.attrs.update(
                {"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index", "column-order": []}
            )
            table["_index"] = np.array([f"{letter}{i}" for i in range(n)], dtype=h5py.string_dtype())
            table["_index"].attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})


class RowByRow(Dataset[Any]):
    """Reads each row by itself."""

    def __init__(self, path: str) -> None:
        self._path, self._file = path, None
        with h5py.File(path) as file:
            self._indptr, self._n_genes = file["X/indptr"][...], int(file["X"].attrs["shape"][1])

    def __len__(self) -> int:
        return len(self._indptr) - 1

    def __getitem__(self, index: int) -> Any:
        if self._file is None:
            self._file = h5py.File(self._path)
        low, high = self._indptr[index : index + 2]
        row = np.zeros(self._n_genes, np.float32)
        row[self._file["X/indices"][low:high]] = self._file["X/data"][low:high]
        return row


def plain(path: str, num_workers: int) -> Iterator[torch.Tensor]:
    """Yield batches of a plain loader."""
    yield from DataLoader(RowByRow(path), BATCH_SIZE, shuffle=True, num_workers=num_workers)


def backed(path: str) -> Iterator[torch.Tensor]:
    """Yield batches of AnnData's backed mode."""
    import anndata

    matrix = anndata.read_h5ad(path, backed="r").X
    order = np.random.default_rng(0).permutation(matrix.shape[0])
    for start in range(0, len(order), BATCH_SIZE):
        yield torch.from_numpy(matrix[np.sort(order[start : start + BATCH_SIZE])].toarray())


class Rows:
    """A matrix of AnnData's with a length."""

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix

    def __len__(self) -> int:
        return int(self._matrix.shape[0])

    def __getitem__(self, indices: Any) -> Any:
        return self._matrix[np.asarray(indices)]


def sc_dataset(path: str, block_size: int, fetch_factor: int) -> Iterator[torch.Tensor]:
    """Yield batches of scDataset over AnnData's backed mode."""
    import anndata
    import scdataset

    dataset = scdataset.scDataset(
        Rows(anndata.read_h5ad(path, backed="r").X),
        scdataset.BlockShuffling(block_size),
        BATCH_SIZE,
        fetch_factor,
        batch_transform=lambda rows: torch.from_numpy(rows.toarray()),
    )
    yield from DataLoader(dataset, batch_size=None)


def ours(path: str, how: str, num_workers: int = 0) -> Iterator[torch.Tensor]:
    """Yield batches of this package."""
    from lightning_h5 import LazyH5DataModule

    module = LazyH5DataModule(
        path,
        x_key="X",
        decode={"X": how},
        batch_size=BATCH_SIZE,
        num_workers=num_workers,
        files={"cache_bytes": "64 MiB"},
        shuffle={"mode": "chunks", "buffer": "32 MiB"},
    )
    module.setup("fit")
    yield from module.train_dataloader()
    module.teardown("fit")


WAYS: dict[str, tuple[Callable[..., Iterator[torch.Tensor]], tuple[Any, ...], str]] = {
    "h5py, row by row, 0 workers": (plain, (0,), ""),
    "h5py, row by row, 2 workers": (plain, (2,), ""),
    "anndata, backed": (backed, (), "anndata"),
    "scDataset, blocks of 4": (sc_dataset, (4, 16), "scdataset"),
    "scDataset, blocks of 64": (sc_dataset, (64, 64), "scdataset"),
    "lightning_h5, dense": (ours, ("dense",), ""),
    "lightning_h5, csr": (ours, ("csr",), ""),
}


def measure(path: str, name: str) -> tuple[float, float]:
    """Return rows a second of a way, and the most memory of its process in MiB."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    make, arguments, _ = WAYS[name]
    batches = make(path, *arguments)
    first = len(next(batches))
    began, n = perf_counter(), 0
    for batch in batches:
        n += len(batch)
        if perf_counter() - began > SECONDS and not name.startswith("lightning"):
            break
    took = perf_counter() - began
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))  # rusage counts the parent's
    return (n or first) / took, peak / 1024


def check(path: str) -> None:
    """Check that batches have the rows of the file."""
    with h5py.File(path) as file:
        total = float(file["X/data"][...].sum(dtype=np.float64))
    for how in ("dense", "csr"):
        found = sum(float(batch.to_dense().sum(dtype=torch.float64)) for batch in ours(path, how))
        if found != total:
            raise AssertionError(f"{how}: the sum of all values is {found}, not {total}")


def main() -> None:
    """Measure all ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--genes", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    ways = [name for name, (_, _, needs) in WAYS.items() if not needs or find_spec(needs)]
    rates: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/cells.h5ad"
        write_cells(path, given.cells, given.genes)
        check(path)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
            for _ in range(given.rounds):
                for name in ways:
                    rate, peak = pool.submit(measure, path, name).result()
                    rates[name].append(rate)
                    memory[name] = max(memory.get(name, 0.0), peak)
    found = {name: median(each) for name, each in rates.items()}
    print(f"{given.cells:,} cells of {given.genes:,} genes, 5 % filled; batches of {BATCH_SIZE}, shuffled")
    for name, rate in found.items():
        print(f"  {name:28} {rate:10,.0f} rows/s   {memory[name]:7,.0f} MiB")
    by_row = max(rate for name, rate in found.items() if name.startswith("h5py"))
    others = max((rate for name, rate in found.items() if name.startswith(("anndata", "scDataset"))), default=0.0)
    for how in ("dense", "csr"):
        mine = found[f"lightning_h5, {how}"]
        print(f"  {how:5} {mine / by_row:6.1f} x rows by h5py (asked 20)", end="")
        print(f"   {mine / others:6.1f} x the best of the others (asked 3)" if others else "")
    if given.json:
        given.json.write_text(json.dumps({"rates": rates, "memory": memory}, indent=1))


if __name__ == "__main__":
    main()
