"""Sparse matrices: groups with values, columns and starts of rows, of AnnData, 10x, SciPy, MATLAB and BIOM."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from ..errors import H5Error, H5ValueError
from .contents import has_arrays, resolve_path
from .open import FAULTS, translate_h5py_errors
from .structures import BIOM_MATRICES, SPARSE_PARTS, biom_shape

__all__ = ["SparseGroup", "names_of_variables", "sparse_group"]

MOST = 1 << 40
"""Rows or columns of a matrix, at most: more are damage, and could overflow the number of a value."""


@dataclass(frozen=True)
class SparseGroup:
    """A sparse matrix of which each row can be read by itself.

    Attributes:
        key: the group.
        n_rows: rows; of a file of 10x Genomics cells, and of MATLAB columns: these are stored one after the other.
        n_columns: values of a row.
        names: array with the names of the columns, such as genes; None if there is none.
        parts: names of the arrays in the group.
    """

    key: str
    n_rows: int
    n_columns: int
    names: str | None = None
    parts: tuple[str, ...] = SPARSE_PARTS[0]

    @property
    def keys(self) -> tuple[str, str, str]:
        """The arrays: stored values, their columns, and where each row begins among them."""
        data, indices, starts = (f"{self.key}/{name}" for name in self.parts)
        return data, indices, starts


def sparse_group(file: Any, path: str, key: str, *, allow_external: bool = False) -> SparseGroup | None:
    """Return a group of an open file as a sparse matrix; None if it is none.

    Args:
        file: the open file.
        path: its path.
        key: name of the group.
        allow_external: follow links into other files.

    Raises:
        H5ValueError: its rows cannot be read one by one, or its shape is not known.
    """
    key = key.strip("/")
    if (group := _group(file, key, allow_external=allow_external)) is None:
        return None
    if (parts := next((parts for parts in SPARSE_PARTS if has_arrays(group, *parts)), None)) is None:
        return None
    if parts != SPARSE_PARTS[0]:
        return _of_matlab(group, path, key, parts)
    with translate_h5py_errors(path, repr(key)):
        n_rows = group["indptr"].shape[0] - 1
        shape, form, has_barcodes = _shape(group), _matrix_form(group), has_arrays(group, "barcodes")
        if shape is None:
            raise H5ValueError(
                f"{key!r} in {path!r} has the arrays of a sparse matrix, and neither an attribute nor an array "
                "'shape'. Write the attribute shape=(rows, columns), as AnnData does."
            )
        if form is None:
            form = "csr" if shape[0] == n_rows and not has_barcodes else "csc"
        is_of_10x = form == "csc" and has_barcodes
        if form == "csc" and not is_of_10x:
            raise H5ValueError(
                f"{key!r} in {path!r} is stored by columns (CSC, shape {shape}), so that a row lies all over the file. "
                "Write it by rows, such as adata.X = adata.X.tocsr() with AnnData."
            )
        n_expected, n_columns = shape[::-1] if is_of_10x else shape
        if n_expected != n_rows:
            raise H5ValueError(
                f"{key!r} in {path!r} has the shape {shape}, and 'indptr' is of {n_rows} rows. Write the file again."
            )
        return SparseGroup(key, n_rows, n_columns, _names_of_columns(file, group, key, is_of_10x=is_of_10x))


def _of_matlab(group: Any, path: str, key: str, parts: tuple[str, ...]) -> SparseGroup:
    """Return a sparse matrix of MATLAB: its columns, which are stored one after the other, are the rows here."""
    with translate_h5py_errors(path, repr(key)):
        n_values = group.attrs.get("MATLAB_sparse")
        if n_values is None or np.ndim(n_values) or int(n_values) < 1:
            raise H5ValueError(
                f"{key!r} in {path!r} has the arrays of a sparse matrix of MATLAB, and no attribute MATLAB_sparse with "
                "its number of rows. Write it again from MATLAB."
            )
        return SparseGroup(key, int(np.prod(group[parts[2]].shape)) - 1, int(n_values), parts=parts)


def _group(file: Any, key: str, *, allow_external: bool = False) -> Any:
    """Return the group that a name leads to, with each link checked before it is followed; None if there is none."""
    with suppress(H5Error, *FAULTS):  # describing the arrays raises a better error
        item, members = resolve_path(file, key, allow_external=allow_external)
        if isinstance(item, h5py.Group) and not members:
            return item
    return None


def _shape(group: Any) -> tuple[int, int] | None:
    """Return rows and columns, as the file counts them."""
    for name in ("shape", "h5sparse_shape"):
        value = group.attrs.get(name)
        if value is None and name == "shape" and has_arrays(group, name):
            array = group[name]
            value = array[...] if array.shape == (2,) and array.dtype.kind in "iu" else None
        if value is not None and np.shape(value) == (2,):
            return _checked_shape(value)
    shape = biom_shape(group)
    return None if shape is None else _checked_shape(shape)


def _checked_shape(shape: Any) -> tuple[int, int]:
    n_rows, n_columns = (int(n) for n in shape)
    if not 0 <= min(n_rows, n_columns) <= max(n_rows, n_columns) <= MOST:
        raise ValueError(f"its shape is ({n_rows}, {n_columns})")
    return n_rows, n_columns


def _matrix_form(group: Any) -> str | None:
    """Return "csr" or "csc" if an attribute says so."""
    for name in ("encoding-type", "h5sparse_format"):
        value = group.attrs.get(name)
        text = value.decode() if isinstance(value, bytes) else value
        if isinstance(text, str) and text[:3] in ("csr", "csc"):
            return text[:3]
    return None


def _names_of_columns(file: Any, group: Any, key: str, *, is_of_10x: bool) -> str | None:
    """Return the array with the names of a matrix's columns."""
    if key in BIOM_MATRICES:
        names = "sample/ids" if key == BIOM_MATRICES[0] else "observation/ids"
        return names if has_arrays(file, names) else None
    if is_of_10x:
        features = _group(file, f"{key}/features")
        if features is not None and has_arrays(features, "id"):
            return f"{key}/features/id"
        return f"{key}/genes" if has_arrays(group, "genes") else None
    return names_of_variables(file, key)


def names_of_variables(file: Any, key: str) -> str | None:
    """Return the array with the names of the columns of ``X`` or a layer of AnnData; None if there is none.

    Args:
        file: the open file.
        key: the matrix, sparse or dense.
    """
    group_name, _, last = key.rpartition("/")
    if group_name.rpartition("/")[2] == "layers":
        root = group_name.rpartition("/")[0]
    elif last == "X":
        root = group_name
    else:
        return None
    name = f"{root}/var".strip("/")
    var = _group(file, name)
    if var is None:  # a table, as AnnData wrote it until version 0.6
        with suppress(H5Error, *FAULTS):
            members = resolve_path(file, name, allow_external=False)[0].dtype.names or ()
            return next((f"{name}/{member}" for member in ("index", "_index") if member in members), None)
        return None
    index = var.attrs.get("_index")
    text = index.decode() if isinstance(index, bytes) else index
    if not isinstance(text, str):
        return None
    if has_arrays(var, text):
        return f"{name}/{text}"
    return f"{name}/{text}/values" if has_arrays(var, f"{text}/values") else None
