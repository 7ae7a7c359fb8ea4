"""Single-cell files as AnnData and Cell Ranger write them: see ``projects``."""

import h5py
import numpy as np
from projects import GZIP, RNG, Layout, normal, project


def counts(n_rows, n_columns):
    """A sparse matrix with rows without any value, as a dense one."""
    dense = RNG.poisson(0.4, (n_rows, n_columns)).astype("f4")
    dense[[0, n_rows // 2, n_rows - 1]] = 0
    return dense


def write_csr(group, dense, **options):
    """The arrays of a matrix in CSR form."""
    rows, columns = np.nonzero(dense)
    group.create_dataset("data", data=dense[rows, columns], chunks=(11,), maxshape=(None,), **options)
    group.create_dataset("indices", data=columns.astype("i4"), chunks=(7,), maxshape=(None,), **options)
    ends = np.cumsum(np.bincount(rows, minlength=len(dense)))
    group.create_dataset("indptr", data=np.concatenate([[0], ends]).astype("i4"), maxshape=(None,))


@project
def anndata_files(folder):
    """CSR matrices with a layer, columns of ``obs``, categories that differ between files, and coordinates."""
    samples, names, order = [], ["B cell", "NK", "T cell"], {"a": ["T cell", "B cell"], "b": ["B cell", "NK", "T cell"]}
    for name, n in (("a", 17), ("b", 6)):
        x, spliced, pca = counts(n, 12), counts(n, 12), normal(n, 3)
        codes = RNG.integers(-1, len(order[name]), n).astype("i1")
        with h5py.File(folder / f"{name}.h5ad", "w") as file:
            for key, dense in (("X", x), ("layers/spliced", spliced)):
                group = file.create_group(key)
                group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": dense.shape})
                write_csr(group, dense, **GZIP)
            file["var/_index"] = np.array([f"gene {i}" for i in range(12)], dtype=h5py.string_dtype())
            file["var"].attrs["_index"] = "_index"
            kind = file.create_group("obs/cell_type")
            kind.attrs.update({"encoding-type": "categorical", "ordered": False})
            kind["codes"], kind["categories"] = codes, np.array(order[name], dtype=h5py.string_dtype())
            file["obs/n_counts"] = x.sum(axis=1)
            file.create_dataset("obsm/X_pca", data=pca, chunks=(4, 3), **GZIP)
        labels = [names.index(order[name][code]) if code >= 0 else -1 for code in codes]
        rows = zip(x, spliced[:, [5, 1]], labels, x.sum(axis=1), pca, strict=True)
        fields = ("x", "spliced", "type", "n", "pca")
        samples += [dict(zip(fields, (*row[:2], np.int64(row[2]), *row[3:]), strict=True)) for row in rows]
    keys = {"x": "X", "spliced": "layers/spliced", "type": "obs/cell_type", "n": "obs/n_counts", "pca": "obsm/X_pca"}
    select = {"spliced": {1: [5, 1]}}
    return Layout({"path": str(folder / "*.h5ad"), "x_key": keys, "select": select}, samples, are_rows=True)


@project
def cell_ranger(folder):
    """A matrix of genes x cells in CSC form, of which a cell is a column."""
    dense = counts(21, 8)
    with h5py.File(folder / "filtered_feature_bc_matrix.h5", "w") as file:
        matrix = file.create_group("matrix")
        write_csr(matrix, dense, shuffle=True, **GZIP)
        matrix["shape"] = np.array([8, 21], "i4")
        matrix["barcodes"] = np.array([f"cell{i}".encode() for i in range(21)])
        matrix["features/id"] = np.array([f"ENSG{i}".encode() for i in range(8)])
    arguments = {"path": str(folder / "filtered_feature_bc_matrix.h5"), "x_key": {"x": "matrix"}}
    return Layout(arguments, [{"x": row} for row in dense], are_rows=True)
