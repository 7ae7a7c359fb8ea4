"""Rows of sparse matrices have the values of SciPy's form, whatever its order, chunks and dtypes; errors come first."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5CorruptError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
)


def write_matrix(path: Path, dense: Any, *, key: str = "X", **changes: Any) -> None:
    """Write a matrix in CSR form; ``changes`` replace its arrays, its attributes or how they are stored."""
    rows, columns = np.nonzero(dense)
    ends = np.cumsum(np.bincount(rows, minlength=len(dense)))
    arrays = {"data": dense[rows, columns], "indices": columns, "indptr": np.concatenate([[0], ends])}
    with h5py.File(path, "a") as file:
        group = file.create_group(key)
        for name, values in arrays.items():
            group.create_dataset(name, data=changes.get(name, values), **changes.get("options", {}))
        attributes = {"encoding-type": "csr_matrix", "shape": dense.shape} | changes.get("attributes", {})
        group.attrs.update({name: value for name, value in attributes.items() if value is not None})
        if "genes" in changes:
            file["var/index"] = np.array(changes["genes"], dtype=h5py.string_dtype())
            file["var"].attrs["_index"] = "index"


@st.composite
def matrices(draw: Any) -> tuple[Any, dict[str, Any], list[int]]:
    """A dense matrix, how it is stored, with columns in any order and some twice, and rows to ask for."""
    n_rows, n_columns = draw(st.integers(1, 30)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    lengths = rng.integers(0, n_columns + 1, n_rows)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    indices = rng.integers(0, n_columns, indptr[-1])
    dtype = draw(st.sampled_from(["f4", "f8", "i4", "i2"]))
    data = rng.integers(1, 50, indptr[-1]).astype(dtype)
    dense = np.zeros((n_rows, n_columns), dtype)
    np.add.at(dense, (np.repeat(np.arange(n_rows), lengths), indices), data)
    n_chunk = draw(st.sampled_from([None, 1, 3, 16]))
    options = {} if n_chunk is None else {"chunks": (n_chunk,), "maxshape": (None,), "compression": "gzip"}
    arrays = {"data": data, "indices": indices.astype(draw(st.sampled_from(["i4", "i8", "u4"]))), "indptr": indptr}
    return dense, {**arrays, "options": options}, draw(st.lists(st.integers(0, n_rows - 1), max_size=20))


@given(matrices(), st.booleans(), st.sampled_from(["dense", "csr"]))
def test_rows_are_those_of_the_dense_matrix(tmp_path_factory: Any, stored: Any, takes: bool, how: str) -> None:
    dense, arrays, rows = stored
    path = tmp_path_factory.mktemp("sparse") / "x.h5ad"
    write_matrix(path, dense, **arrays)
    select = {"select": {"x": {1: {"start": None, "stop": None, "step": -1}}}} if takes else {}
    expected = dense[rows, ::-1] if takes else dense[rows]
    for dataset in (
        H5LazyDataset(str(path), {"x": "X"}, decode={"x": how}, **select),
        RankMemCachedH5Dataset(str(path), {"x": "X"}, x_dtype=None, decode={"x": how}, **select),
        CombinedHDF5Dataset(str(path), ["x"], field_map={"x": "X"}, dtype=None, decode={"x": how}, **select),
    ):
        batch = dataset.read_batch(rows)["x"]
        assert batch.layout == (torch.sparse_csr if how == "csr" else torch.strided)
        np.testing.assert_array_equal(batch.to_dense().numpy(), expected)
        if how == "csr":  # what torch demands of such tensors
            torch._validate_sparse_csr_tensor_args(
                batch.crow_indices(), batch.col_indices(), batch.values(), batch.shape
            )
        for row in rows[:2]:
            np.testing.assert_array_equal(dataset[row]["x"].numpy(), expected[rows.index(row)])


@pytest.fixture
def dense() -> Any:
    return np.random.default_rng(0).poisson(0.5, (20, 6)).astype("f4")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"attributes": {"encoding-type": "csc_matrix", "shape": (6, 20)}}, H5ValueError, "stored by columns"),
        ({"attributes": {"shape": None}}, H5ValueError, "neither an attribute nor an array 'shape'"),
        ({"attributes": {"shape": (21, 6)}}, H5ValueError, "'indptr' is of 20 rows"),
        ({"indptr": np.arange(21)}, H5CorruptError, "rows end at 20"),
        ({"indices": np.zeros(3, "i4")}, H5CorruptError, "3 columns"),
        ({"attributes": {"shape": (20, 3)}}, H5CorruptError, "names the column 5"),
    ],
)
def test_a_matrix_that_cannot_be_read_is_an_error(
    tmp_path: Path, dense: Any, changes: Any, error: type[Exception], says: str
) -> None:
    write_matrix(tmp_path / "x.h5ad", dense, **changes)
    with pytest.raises(error, match=says):
        H5LazyDataset(str(tmp_path / "x.h5ad"), "X").read_batch(range(20))


def test_filters_take_rows_of_matrices_without_any_value(tmp_path: Path) -> None:
    for name, values in (("a.h5", np.zeros((6, 4), "f4")), ("b.h5", np.eye(6, 4, dtype="f4"))):
        write_matrix(tmp_path / name, values)
        with h5py.File(tmp_path / name, "a") as file:
            file["n"] = np.arange(6)
    for paths in (["a.h5"], ["a.h5", "b.h5"]):
        files = [str(tmp_path / name) for name in paths]
        module = CombinedHDF5DataModule(files, fields=["X", "n"], where={"n": {"min": 3}}, shuffle=False)
        module.setup("fit")
        (batch,) = module.train_dataloader()
        assert batch["n"].tolist() == [3, 4, 5] * len(files)
        assert batch["X"].sum() == len(files) - 1
        module.teardown("fit")
    module = CombinedHDF5DataModule(files, fields=["X", "n"], where={"n": {"min": 9}})
    with pytest.raises(H5ValueError, match=r"keeps 0 of 12"):
        module.setup("fit")


def test_a_filter_by_stored_values_is_an_error(tmp_path: Path) -> None:
    """They are no values of rows, and would drop none."""
    write_matrix(tmp_path / "a.h5", np.ones((3, 4), "f4"))
    module = CombinedHDF5DataModule(str(tmp_path / "a.h5"), fields=["X"], where={"X/data": {"min": 2}})
    with pytest.raises(H5ValueError, match="a value for each row of the sparse matrix"):
        module.setup("fit")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"window": 3}, "is a sparse matrix"),
        ({"segments": {"lengths": "n"}}, "is a sparse matrix"),
        ({"decode": {"X": "real"}}, "Pass 'dense' or 'csr'"),
        ({"select": {"X": {0: [1]}}}, "axis 1"),
        ({"select": {"X": {1: [1, 9]}}}, "has 6 columns"),
        ({"select": {"X": {1: [1, 1]}}}, "twice"),
        ({"normalize": {"X": {"mean": 0.0, "std": 1.0}}}, "batch_transform"),
    ],
)
def test_what_makes_no_sense_for_sparse_rows_is_an_error(
    tmp_path: Path, dense: Any, arguments: dict[str, Any], says: str
) -> None:
    write_matrix(tmp_path / "x.h5ad", dense)
    with pytest.raises(H5ValueError, match=says):
        H5LazyDataset(str(tmp_path / "x.h5ad"), "X", **arguments)


def test_files_with_other_genes_are_an_error_in_all_splits(tmp_path: Path, dense: Any) -> None:
    genes = [f"g{i}" for i in range(6)]
    write_matrix(tmp_path / "a.h5ad", dense, genes=genes)
    write_matrix(tmp_path / "b.h5ad", dense, genes=[*genes[:4], "other", "g5"])
    write_matrix(tmp_path / "c.h5ad", dense[:, :5], genes=genes[:5])
    a, b, c = (str(tmp_path / f"{name}.h5ad") for name in "abc")
    with pytest.raises(H5ValueError, match="column 4 is 'g4' and 'other'"):
        H5LazyDataset([a, b], "X")
    with pytest.raises(H5ValueError, match="has 5 columns"):
        H5LazyDataset([a, c], "X")
    with pytest.raises(H5ValueError, match="column 4 is 'g4' and 'other'"):
        LazyH5DataModule(a, b, x_key="X").setup("fit")


def test_columns_of_a_group_are_stacked_beside_a_matrix(tmp_path: Path, dense: Any) -> None:
    write_matrix(tmp_path / "a.h5", dense)
    ages = np.arange(len(dense), dtype=np.float32)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["obs/age"], file["obs/dose"] = ages, ages + 1
    keys = {"x": "X", "obs": ["obs/age", "obs/dose"]}
    datamodule = LazyH5DataModule(tmp_path / "a.h5", x_key=keys, batch_size=len(dense), shuffle=False)
    datamodule.setup("fit")
    (batch,) = datamodule.train_dataloader()
    assert np.array_equal(batch["x"], dense)
    assert np.array_equal(batch["obs"], np.stack([ages, ages + 1], axis=1))


def test_each_chunk_is_decoded_once_an_epoch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    dense = (rng.random((4000, 50)) < 0.1).astype("f4")
    write_matrix(tmp_path / "x.h5ad", dense, options={"chunks": (64,), "maxshape": (None,), "compression": "gzip"})
    files = {"cache_bytes": "64 KiB"}
    module = LazyH5DataModule(str(tmp_path / "x.h5ad"), x_key="X", files=files, shuffle=False, batch_size=16)
    module.setup("fit")
    assert sum(float(batch.sum()) for batch in module.train_dataloader()) == dense.sum()
    assert module.datasets["train"].counters.total()["chunks_decoded"] <= 2.2 * (dense.sum() / 64)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("y_key", [None, "y"])
@pytest.mark.parametrize("module", [LazyH5DataModule, RankCachedH5DataModule])
def test_loaders_give_csr_tensors_of_rows_in_files_and_in_memory(tmp_path: Path, module: Any, y_key: Any) -> None:
    dense = np.random.default_rng(0).integers(0, 3, (20, 6)).astype("f4")
    write_matrix(tmp_path / "a.h5", dense)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["y"] = np.arange(20)
    datamodule = module(
        tmp_path / "a.h5", x_key="X", y_key=y_key, decode={"X": "csr"}, batch_size=8, shuffle=False, num_workers=0
    )
    datamodule.setup("fit")
    batches = list(datamodule.train_dataloader())
    matrices = batches if y_key is None else [x for x, _ in batches]
    assert [matrix.layout for matrix in matrices] == [torch.sparse_csr] * 3
    np.testing.assert_array_equal(np.concatenate([matrix.to_dense() for matrix in matrices]), dense)


def test_both_matrices_of_a_biom_table_have_its_values(tmp_path: Path, dense: Any) -> None:
    path = tmp_path / "table.biom"
    write_matrix(path, dense, key="observation/matrix", attributes={"encoding-type": None, "shape": None})
    write_matrix(path, dense.T, key="sample/matrix", attributes={"encoding-type": None, "shape": None})
    with h5py.File(path, "a") as file:
        file.attrs["shape"] = dense.shape
    for key, values in (("observation/matrix", dense), ("sample/matrix", dense.T)):
        dataset = H5LazyDataset(path, key)
        assert np.array_equal(dataset.read_batch(range(len(dataset))).numpy(), values)


def test_values_of_anndata_itself(tmp_path: Path) -> None:
    anndata = pytest.importorskip("anndata")
    pandas, scipy = pytest.importorskip("pandas"), pytest.importorskip("scipy.sparse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = scipy.random(30, 8, 0.3, format="csr", dtype="f4", random_state=0)
        obs = pandas.DataFrame({"kind": pandas.Categorical(list("abcab") * 6)}, index=[f"c{i}" for i in range(30)])
        anndata.AnnData(x, obs=obs).write_h5ad(tmp_path / "x.h5ad", compression="gzip")
        theirs = anndata.read_h5ad(tmp_path / "x.h5ad")
    dataset = H5LazyDataset(str(tmp_path / "x.h5ad"), "X", "obs/kind")
    x, y = dataset.read_batch(range(30))
    np.testing.assert_array_equal(x.numpy(), theirs.X.toarray())
    np.testing.assert_array_equal(y.numpy(), theirs.obs["kind"].cat.codes)


@pytest.mark.parametrize("chunks", [None, 4])
@pytest.mark.parametrize("dtypes", list(itertools.permutations(["i4", "i8", "u4", "u2", "u8"], 2)))
def test_files_may_store_columns_in_integers_of_several_sizes(tmp_path: Path, dtypes: Any, chunks: int | None) -> None:
    dense = np.random.default_rng(1).integers(0, 3, (2, 6, 9)).astype("f4")
    options = {} if chunks is None else {"chunks": (chunks,), "compression": "gzip"}
    for at, dtype in enumerate(dtypes):
        indices = np.nonzero(dense[at])[1].astype(dtype)
        write_matrix(tmp_path / f"{at}.h5", dense[at], indices=indices, options=options)
    paths, expected = [tmp_path / "0.h5", tmp_path / "1.h5"], np.concatenate(dense)
    order = [11, 0, 7, 5, 6, 6]
    for kind in (H5LazyDataset, RankMemCachedH5Dataset):
        with kind(paths, "X") as dataset:
            np.testing.assert_array_equal(dataset.read_batch(order), expected[order])
    with CombinedHDF5Dataset(paths, ["X"], decode={"X": "csr"}) as combined:
        np.testing.assert_array_equal(combined.read_batch(order)["X"].to_dense(), expected[order])


def test_a_column_beyond_63_bits_is_damage_in_files_of_several_sizes(tmp_path: Path) -> None:
    dense = np.ones((2, 2), "f4")
    write_matrix(tmp_path / "0.h5", dense)
    write_matrix(tmp_path / "1.h5", dense, indices=np.array([0, 1, 2**63 + 1, 1], "u8"))
    with pytest.raises(H5CorruptError, match="names the column"):
        H5LazyDataset([tmp_path / "0.h5", tmp_path / "1.h5"], "X").read_batch([0, 3, 2])
