"""How many cells a second come from an AnnData file?

    python examples/benchmarks/cells.py [--cells 200000] [--genes 2000] [--rounds 3] [--json FILE]

writes counts of cells, 5 % of them filled, as AnnData writes them (CSR, gzip, chunks that h5py chooses), and times
shuffled batches of 256 cells: a `Dataset` that reads each row with h5py, in a `DataLoader` with 0 and with 2 workers,
and in SPDL's threads and processes; AnnData's backed mode, asked for a batch at a time; scDataset over it, in small
blocks and in large ones; annbatch over its own shuffled copy; and `LazyH5DataModule`, dense and in CSR form, with so
little memory for decoded chunks that all are decoded in each epoch. Each way is checked first to give every cell once,
with all its values. Each runs in a process of its own; all take turns. Ways whose package is not installed are left
out.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import h5py
import numpy as np
import torch
from common import environment, line_of, write_json
from peers import VERSIONS
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE = 256
PRELOADED = ("anndata", "annbatch", "scdataset", "spdl.pipeline")
"""Modules that the server of processes imports, if they are installed, so that each process starts at once."""
SECONDS = 3.0
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


def spdl_rows(path: str, kind: str) -> Iterator[torch.Tensor]:
    """Yield batches of the same rows by SPDL."""
    from peers import spdl

    with ExitStack() as stack:
        pool = spdl.processes(RowByRow(path), stack) if kind == "processes" else None
        yield from spdl.epoch(RowByRow(path), BATCH_SIZE, pool)


def sc_dataset(path: str, block_size: int, fetch_factor: int, num_workers: int) -> Iterator[torch.Tensor]:
    """Yield batches of scDataset over AnnData's backed mode."""
    import scdataset

    dataset = scdataset.scDataset(
        Rows(path),
        scdataset.BlockShuffling(block_size),
        BATCH_SIZE,
        fetch_factor,
        batch_transform=to_dense,
    )
    prefetch = {"prefetch_factor": fetch_factor + 1} if num_workers else {}  # as its quick start advises
    yield from DataLoader(dataset, batch_size=None, num_workers=num_workers, **prefetch)


def to_dense(rows: Any) -> torch.Tensor:
    """Return rows of SciPy as a dense tensor."""
    return torch.from_numpy(rows.toarray())


class Rows:
    """A matrix of AnnData's backed mode with a length, opened by each worker."""

    def __init__(self, path: str) -> None:
        self._path, self._matrix = path, None
        with h5py.File(path) as file:
            self._n_rows = int(file["X"].attrs["shape"][0])

    def __len__(self) -> int:
        return self._n_rows

    def __getitem__(self, indices: Any) -> Any:
        import anndata

        if self._matrix is None:
            self._matrix = anndata.read_h5ad(self._path, backed="r").X
        return self._matrix[np.asarray(indices)]


def annbatch_rows(path: str, form: str) -> Iterator[torch.Tensor]:
    """Yield batches of annbatch over its own copy, with the settings of its README."""
    import annbatch
    import anndata
    import zarr

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    loader = annbatch.Loader(batch_size=BATCH_SIZE, chunk_size=32, preload_nchunks=256, shuffle=True, to="torch")
    collection = annbatch.DatasetCollection(collection_of(path))
    loader.use_collection(collection, load_adata=lambda group: anndata.AnnData(X=anndata.io.sparse_dataset(group["X"])))
    for batch in loader:
        yield batch["X"].to_dense() if form == "dense" else batch["X"]


def convert_seconds(path: str) -> float:
    """Return the seconds of making annbatch's copy."""
    began = perf_counter()
    collection_of(path)
    return perf_counter() - began


def collection_of(path: str) -> str:
    """Return the place of annbatch's copy, which is made if it is not there."""
    place = Path(path).with_suffix(".zarr")
    if not place.exists():
        import annbatch

        annbatch.DatasetCollection(str(place)).add_adatas([path])
    return str(place)


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


Way = tuple[Callable[..., Iterator[torch.Tensor]], tuple[Any, ...], str]
WAYS: dict[str, Way] = {
    "plain h5py, 0 workers": (plain, (0,), ""),
    "plain h5py, 2 workers": (plain, (2,), ""),
    "SPDL with h5py, 2 threads": (spdl_rows, ("threads",), "spdl"),
    "SPDL with h5py, 2 processes": (spdl_rows, ("processes",), "spdl"),
    "anndata, backed": (backed, (), "anndata"),
    "scDataset, blocks of 4": (sc_dataset, (4, 16, 0), "scdataset"),
    "scDataset, blocks of 64": (sc_dataset, (64, 64, 0), "scdataset"),
    "scDataset, blocks of 64 and 2 workers": (sc_dataset, (64, 64, 2), "scdataset"),
    "annbatch*, dense": (annbatch_rows, ("dense",), "annbatch"),
    "annbatch*, CSR": (annbatch_rows, ("csr",), "annbatch"),
    "lightning_h5, dense": (ours, ("dense",), ""),
    "lightning_h5, CSR": (ours, ("csr",), ""),
}
"""Function, arguments and package of each way; a star for those that read a converted copy."""


def measure(path: str, name: str) -> float:
    """Return cells a second of a way."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    make, arguments, _ = WAYS[name]
    batches = make(path, *arguments)
    first = len(next(batches))
    began, n = perf_counter(), 0
    for batch in batches:
        n += len(batch)
        if perf_counter() - began > SECONDS and not name.startswith("lightning_h5"):
            break
    return (n or first) / (perf_counter() - began)


def prints(batch: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return a number for each cell, which depends on all its values and is exact for small whole numbers."""
    return (batch.to_dense().double() @ weights[:, None])[:, 0]


def check(path: str, name: str, expected: torch.Tensor, weights: torch.Tensor, most: int) -> None:
    """Check that the batches of a way have every cell once.

    Args:
        path: the file.
        name: the way.
        expected: the numbers of all cells, sorted.
        weights: of the genes.
        most: cells to look at, if the way is slow; then each is in the file and none comes twice.
    """
    make, arguments, _ = WAYS[name]
    found: list[torch.Tensor] = []
    for batch in make(path, *arguments):
        found.append(prints(batch, weights))
        if sum(map(len, found)) > most:
            break
    seen = torch.cat(found).sort().values
    at = torch.searchsorted(expected, seen).clamp(max=len(expected) - 1)
    is_whole = len(seen) == len(expected) or len(seen) > most
    if not is_whole or not torch.equal(expected[at], seen) or len(seen.unique()) < len(seen):
        raise SystemExit(f"{name!r} does not give each cell once and as it is stored")


def expected_prints(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sorted numbers of all cells, and the weights of the genes."""
    with h5py.File(path) as file:
        data, indices, indptr = (file[f"X/{name}"][...] for name in ("data", "indices", "indptr"))
        n_genes = int(file["X"].attrs["shape"][1])
    weights = np.random.default_rng(1).integers(1, 2**31, n_genes).astype(np.float64)
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    found = np.sort(np.bincount(rows, data * weights[indices], len(indptr) - 1))
    assert len(np.unique(found)) == len(found), "two cells are alike"
    return torch.from_numpy(found), torch.from_numpy(weights)


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
    missing = sorted({needs for name, (_, _, needs) in WAYS.items() if name not in ways})
    about = environment(VERSIONS)
    print(line_of(about))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/cells.h5ad"
        write_cells(path, given.cells, given.genes)
        expected = expected_prints(path)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lightning_h5", *PRELOADED])
        with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
            seconds = pool.submit(convert_seconds, path).result() if find_spec("annbatch") else 0.0
            for name in ways:
                most = given.cells if name.startswith(("annbatch", "lightning_h5")) else 2_000
                pool.submit(check, path, name, *expected, most).result()
            for _ in range(given.rounds):
                for name in ways:
                    rates[name].append(pool.submit(measure, path, name).result())
        sizes = {name: size_of(path if "*" not in name else collection_of(path)) for name in ways}
    print(f"{given.cells:,} cells of {given.genes:,} genes, 5 % filled; batches of {BATCH_SIZE}, shuffled")
    contenders = []
    for name, each in rates.items():
        print(f"  {name:38} {median(each):10,.0f} cells/s")
        converted = {"convert_seconds": seconds * ("*" in name), "bytes": sizes[name]}
        team = name if name.startswith(("annbatch", "lightning_h5")) else name.partition(",")[0]
        contenders.append({"name": name, "team": team, "rows_per_second": each, **converted})
    case = {
        "case": "cells",
        "rows_are": f"{given.cells:,} cells of {given.genes:,} genes",
        "title": "5 % filled, CSR, gzip, chunks of h5py's choice",
        "contenders": contenders,
    }
    settings = {"rows": given.cells, "rounds": given.rounds, "batch_size": BATCH_SIZE, "skipped": missing}
    write_json(given.json, {"environment": about, **settings, "results": [case]})


def size_of(path: str) -> int:
    """Return the bytes of a file, or of the files in a folder."""
    return sum(each.stat().st_size for each in (Path(path), *Path(path).rglob("*")) if each.is_file())


if __name__ == "__main__":
    main()
