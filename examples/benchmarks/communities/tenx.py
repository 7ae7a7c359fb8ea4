"""10x Genomics: what Cell Ranger writes, a sparse matrix of genes and cells in which a cell is a column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.sparse
from torch.utils.data import Dataset

from .base import Community

FILE = "filtered_feature_bc_matrix.h5"


def write(folder: Path, size: float) -> None:
    """Write 20,000 cells (300 in tests) and 6,000 genes (300), of which a twentieth is expressed."""
    rng = np.random.default_rng(0)
    n_cells, n_genes = (20_000, 6000) if size >= 0.5 else (300, 300)
    counts = rng.binomial(n_genes, 0.05, n_cells)
    indices = np.concatenate([np.sort(rng.choice(n_genes, n, replace=False)) for n in counts.tolist()])
    with h5py.File(folder / FILE, "w") as file:
        matrix = file.create_group("matrix")
        for name, values in {
            "data": rng.poisson(2, len(indices)).astype("i4") + 1,
            "indices": indices.astype("i8"),
            "indptr": np.concatenate([[0], np.cumsum(counts)]).astype("i8"),
        }.items():
            chunks = (min(80_000, len(values)),)
            matrix.create_dataset(name, data=values, chunks=chunks, compression="gzip", shuffle=True)
        matrix["shape"] = np.array([n_genes, n_cells], "i4")
        matrix["barcodes"] = np.array([f"AAAC{number}-1".encode() for number in range(n_cells)])
        matrix["features/id"] = np.array([f"ENSG{number:011}".encode() for number in range(n_genes)])
        matrix["features/name"] = np.array([f"GENE{number}".encode() for number in range(n_genes)])


class CellsInMemory(Dataset[Any]):
    """As with scanpy's `read_10x_h5`: the matrix is read into memory, and a cell is made dense for each sample."""

    def __init__(self) -> None:
        with h5py.File(FILE) as file:
            matrix = file["matrix"]
            n_genes, n_cells = matrix["shape"][:]
            parts = (matrix["data"][:].astype(np.float32), matrix["indices"][:], matrix["indptr"][:])
        self._cells = scipy.sparse.csr_matrix(parts, shape=(n_cells, n_genes))

    def __len__(self) -> int:
        return int(self._cells.shape[0])

    def __getitem__(self, index: int) -> Any:
        return self._cells[index].toarray()[0]


COMMUNITY = Community(
    title="Single cells: 10x Genomics",
    loader="cells of scanpy's `read_10x_h5` in memory",
    sample="cells",
    write=write,
    dataset=CellsInMemory,
    options={
        "train_path": FILE,
        "x_key": "matrix",
        "x_dtype": "float32",
        "split": 0.1,
        "batch_size": 128,
    },
    batch_size=128,
    their_arrays=lambda sample: (sample,),
    our_arrays=lambda sample: (sample.numpy(),),
)
