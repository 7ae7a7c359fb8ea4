"""AnnData: cells as rows of a sparse matrix, and what is known of them in columns."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

TYPES = ["B cell", "NK cell", "T cell"]


def write(folder: Path, size: float) -> None:
    """Write two donors of 20,000 cells (150 in tests) and 3,000 genes (300), of which a tenth is expressed."""
    rng = np.random.default_rng(0)
    n_cells, n_genes = (20_000, 3000) if size >= 0.5 else (150, 300)
    for donor in ("donor1", "donor2"):
        counts = rng.binomial(n_genes, 0.1, n_cells)
        indptr = np.concatenate([[0], np.cumsum(counts)])
        indices = np.concatenate([np.sort(rng.choice(n_genes, n, replace=False)) for n in counts.tolist()])
        with h5py.File(folder / f"{donor}.h5ad", "w") as file:
            x = file.create_group("X")
            x.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [n_cells, n_genes]})
            data = rng.poisson(2, len(indices)).astype(np.float32) + 1
            for name, values in {"data": data, "indices": indices.astype("i4"), "indptr": indptr.astype("i4")}.items():
                x.create_dataset(name, data=values, compression="gzip", maxshape=(None,))
            var = file.create_group("var")
            var.attrs["_index"] = "_index"
            var["_index"] = [f"gene{number}" for number in range(n_genes)]
            kind = file.create_group("obs/cell_type")
            kind.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
            kind["codes"] = rng.integers(0, len(TYPES), n_cells).astype("i1")
            kind["categories"] = TYPES


class BackedCells(Dataset[Any]):
    """As a backed AnnData in a loader: the row pointers are in memory, values and columns are read for each cell."""

    def __init__(self) -> None:
        self._files: list[Any] = []
        self._pointers, self._codes = [], []
        for path in self._paths():
            with h5py.File(path) as file:
                self._n_genes = int(file["X"].attrs["shape"][1])
                self._pointers.append(file["X/indptr"][:])
                self._codes.append(file["obs/cell_type/codes"][:])
        self._ends = list(accumulate(len(codes) for codes in self._codes))

    @staticmethod
    def _paths() -> list[Path]:
        return sorted(Path().glob("*.h5ad"))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not self._files:
            self._files = [h5py.File(path, "r")["X"] for path in self._paths()]
        number = bisect_right(self._ends, index)
        cell = index - (self._ends[number - 1] if number else 0)
        first, last = self._pointers[number][cell : cell + 2].tolist()
        group, row = self._files[number], np.zeros(self._n_genes, np.float32)
        row[group["indices"][first:last]] = group["data"][first:last]
        return row, int(self._codes[number][cell])


COMMUNITY = Community(
    title="Single cells: AnnData",
    loader="cells of a backed AnnData",
    sample="cells",
    write=write,
    dataset=BackedCells,
    options={
        "train_path": "*.h5ad",
        "x_key": "X",
        "y_key": "obs/cell_type",
        "split": {"val_fraction": 0.1, "stratify_key": "obs/cell_type"},
        "batch_size": 128,
    },
    batch_size=128,
    their_arrays=lambda sample: (sample[0], np.asarray(sample[1])),
    our_arrays=lambda sample: (sample[0].numpy(), np.asarray(sample[1])),
)
