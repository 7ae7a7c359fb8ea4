"""Structures that other software keeps beside its data are never inferred, and loaded only if they are named."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5Error,
    H5KeyError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    check_files,
    compute_stats,
    inspect_file,
)
from lightning_h5.hdf5 import guess_keys, reading_of

N = 12


def placeholder(file: h5py.File) -> None:
    for name, size in (("row", N), ("column", 4)):
        file.create_dataset(name, (size,), ">f4").make_scale(
            f"This is a netCDF dimension but not a netCDF variable.{size:10d}"
        )


def coordinate(file: h5py.File) -> None:
    file["height"] = np.arange(float(N))
    file["height"].make_scale("height")


def pytables(file: h5py.File) -> None:
    for name in ("x", "y"):
        group = file.create_group(f"_i_table/{name}")
        group.attrs["CLASS"] = np.bytes_("INDEX")
        group["sortedLR"], group["ranges"] = np.zeros(500), np.zeros((N, 30))


def cells(file: h5py.File) -> None:
    names = file.create_dataset("#refs#/a", data=np.arange(600.0).reshape(N, 50))
    file["#refs#/b/inner"] = np.arange(float(N))
    array = file.create_dataset("cells", (1, 2), h5py.ref_dtype)
    array[0, 0], array[0, 1] = names.ref, file["#refs#/b"].ref


def empty(file: h5py.File) -> None:
    for name in ("labels", "target"):
        file[name] = np.zeros(N, "u8")  # more sizes than MATLAB has, so that it is as long as the data
        file[name].attrs["MATLAB_empty"] = np.uint8(1)


def keras(file: h5py.File) -> None:
    file["layers/dense/vars/0"], file["layers/dense/vars/1"] = np.zeros((N, 64), "f4"), np.zeros(N, "f4")
    file["layers/dense/vars"].attrs["name"] = "dense"
    file["model_weights/dense/kernel"], file["model_weights/dense/bias"] = np.zeros((N, 64)), np.zeros(N)
    file["model_weights"].attrs["layer_names"] = [b"dense"]


def pandas_index(file: h5py.File) -> None:
    file["axis1"] = np.arange(N)
    file["axis1"].attrs.update({"CLASS": np.bytes_("ARRAY"), "kind": np.bytes_("integer"), "name": np.bytes_("N.")})


def pickled(file: h5py.File) -> None:
    objects = file.create_dataset("block2_values", (N,), h5py.vlen_dtype("u1"))
    objects.attrs.update({"CLASS": np.bytes_("VLARRAY"), "PSEUDOATOM": np.bytes_("object")})


def nwb(file: h5py.File) -> None:
    for name, kind in (("spike_times_index", "VectorIndex"), ("id", "ElementIdentifiers")):
        file[name] = np.arange(1, N + 1)
        file[name].attrs["neurodata_type"] = kind
    file["series/timestamps"] = np.arange(float(N))
    file["series/timestamps"].attrs.update({"interval": 1, "unit": "seconds"})


BUILDERS = (placeholder, coordinate, pytables, cells, empty, keras, pandas_index, pickled, nwb)
STRUCTURES = {builder.__name__: builder for builder in BUILDERS}


def write(path: Path, structures: list[str], target: bool) -> str:
    with h5py.File(path, "w") as file:
        file["data/x"] = np.arange(N * 4, dtype="f4").reshape(N, 4)
        if target:
            file["data/y"] = np.arange(N) % 3
        for name in structures:
            STRUCTURES[name](file)
    return str(path)


@settings(max_examples=examples(25))
@given(st.lists(st.sampled_from(sorted(STRUCTURES)), min_size=1, unique=True), st.booleans())
def test_structures_of_other_software_change_no_guess_and_no_default(
    tmp_path_factory: Any, structures: list[str], target: bool
) -> None:
    path = write(tmp_path_factory.mktemp("structures") / "a.h5", structures, target)
    fields = ["data/x", *(["data/y"] if target else [])]
    assert guess_keys(path) == ("data/x", "data/y" if target else None)
    settings = inspect_file(path).advice.settings
    assert (settings["x_key"], settings.get("y_key")) == ("data/x", "data/y" if target else None)
    dataset = CombinedHDF5Dataset(path)
    assert sorted(dataset.fields.keys) == fields
    module = LazyH5DataModule(path)
    module.setup("fit")
    assert module.x_key == "data/x"
    if not target:
        assert [array.key for array in compute_stats(path).arrays] == ["data/x"]
    assert not check_files(path).errors


@pytest.mark.parametrize("name", ["coordinate", "pytables"])
def test_structures_with_values_are_loaded_if_they_are_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.h5", [name], True)
    key = {"coordinate": "height", "pytables": "_i_table/x/ranges"}[name]
    assert len(H5LazyDataset(path, "data/x", key)) == N
    assert set(CombinedHDF5Dataset(path, ["data/x", key]).fields.keys) == {"data/x", key}
    if name == "coordinate":
        by_time = CombinedHDF5Dataset(path, where={"height": {"min": 4}})
        assert set(by_time.fields.keys) >= {"data/x", "data/y"}
        assert len(by_time) == N - 4


def test_each_structure_says_how_it_is_used_or_why_it_is_no_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", sorted(STRUCTURES), True)
    structures = {array.structure for array in inspect_file(path).arrays if array.structure is not None}
    assert len(structures) == 11
    assert all(reading_of(structure) for structure in structures)


def test_a_file_of_weights_has_no_samples_in_it(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        keras(file)
    advice = inspect_file(tmp_path / "a.h5").advice
    assert advice.datamodule is None
    assert "no samples in it" in advice.reasons[0]


def test_a_file_of_dimension_scales_alone_has_them_as_data(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        coordinate(file)
    assert guess_keys(str(tmp_path / "a.h5")) == ("height", None)


def test_an_empty_array_of_matlab_has_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", ["empty"], False)
    for make in (
        lambda: H5LazyDataset(path, "data/x", "labels"),
        lambda: LazyH5DataModule(path, x_key="data/x", y_key="labels").setup("fit"),
        lambda: RankCachedH5DataModule(path, x_key="labels").setup("fit"),
        lambda: CombinedHDF5DataModule(path, fields=["data/x", "labels"]).setup("fit"),
        lambda: CombinedHDF5DataModule(path, fields=["data/x"], where={"labels": 0}).setup("fit"),
        lambda: compute_stats(path, "labels"),
    ):
        with pytest.raises(H5ValueError, match=r"'labels' in .* is an empty array of MATLAB"):
            make()


def test_a_dimension_of_netcdf_is_its_variable_or_has_no_values(tmp_path: Path) -> None:
    """netCDF stores ``depth(time, depth)`` under another name, beside an array of zeros with the name."""
    depth, paths = np.arange(18.0, dtype="f4").reshape(6, 3), [str(tmp_path / f"{at}.nc") for at in range(3)]
    for at, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            for group in (file, file.create_group("deep")):
                placeholder(group)
                group["_nc4_non_coord_column"] = depth + at
    for key in ("column", "deep/column"):
        assert np.array_equal(H5LazyDataset(paths, key).read_batch([1, 7, 13]), [depth[1] + at for at in range(3)])
        module = RankCachedH5DataModule(paths, x_key=key, shuffle=False)
        module.setup("fit")
        assert np.array_equal(next(iter(module.train_dataloader()))[:6], depth)
        for make in (
            lambda key: H5LazyDataset(paths, key),
            lambda key: CombinedHDF5DataModule(paths, fields=[key]).setup("fit"),
            lambda key: compute_stats(paths[0], key),
        ):
            with pytest.raises(H5ValueError, match="is a dimension of netCDF without values: it only has a length"):
                make(key.replace("column", "row"))
    assert not check_files(paths).errors


def test_an_empty_array_in_the_third_of_many_files_is_found(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{at}.mat") for at in range(4)]
    for at, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file["y"] = np.array([at, 1], "u8")
            file["y"].attrs["MATLAB_class"] = np.bytes_("double")
            if at == 2:
                file["y"].attrs["MATLAB_empty"] = np.uint8(1)
    with pytest.raises(H5ValueError, match=r"2\.mat' is an empty array of MATLAB"):
        H5LazyDataset(paths, "y")


def matlab_matrix(path: Path, dense: np.ndarray, index: str = "u8") -> str:
    """Write a matrix as MATLAB does: its columns one after the other."""
    rows, columns = np.nonzero(dense.T)[::-1]
    with h5py.File(path, "w", userblock_size=512) as file:
        group = file.create_group("X")
        group.attrs["MATLAB_sparse"], group.attrs["MATLAB_class"] = np.uint64(len(dense)), np.bytes_("double")
        group["data"], group["ir"] = dense[rows, columns], rows.astype(index)
        group["jc"] = np.concatenate([[0], np.cumsum(np.bincount(columns, minlength=dense.shape[1]))]).astype(index)
        file["y"] = np.arange(dense.shape[1])
    return str(path)


@settings(max_examples=examples(25))
@given(st.integers(1, 9), st.integers(2, 12), st.integers(0, 99), st.sampled_from(["u8", "i4"]))
def test_a_row_of_a_sparse_matrix_of_matlab_is_one_of_its_columns(
    tmp_path_factory: Any, n_rows: int, n_columns: int, seed: int, index: str
) -> None:
    dense = np.random.default_rng(seed).integers(0, 3, (n_rows, n_columns)).astype("f8")
    dense[0, 0] = 7.0
    path = matlab_matrix(tmp_path_factory.mktemp("sparse") / "a.mat", dense, index)
    order = np.random.default_rng(seed).permutation(n_columns)
    x, y = H5LazyDataset(path, "X", "y").read_batch(order)
    np.testing.assert_array_equal(x.numpy(), dense.T[order])
    assert y.tolist() == order.tolist()
    x = H5LazyDataset(path, "X", decode={"X": "csr"}).read_batch(order)
    np.testing.assert_array_equal(x.to_dense().numpy(), dense.T[order])


def test_a_sparse_matrix_of_matlab_is_suggested_as_one_input(tmp_path: Path) -> None:
    path = matlab_matrix(tmp_path / "a.mat", np.eye(10))
    settings = inspect_file(path).advice.settings
    assert settings["x_key"] == "X"
    module = LazyH5DataModule(**settings)
    module.setup("fit")
    assert next(iter(module.train_dataloader())).shape[1] == 10
    with pytest.raises(H5KeyError, match="x_key='X'"):
        guess_keys(path)


def test_a_damaged_sparse_matrix_of_matlab_is_an_error(tmp_path: Path) -> None:
    path = matlab_matrix(tmp_path / "a.mat", np.eye(10))
    with h5py.File(path, "a") as file:
        del file["X"].attrs["MATLAB_sparse"]
    with pytest.raises(H5Error, match="MATLAB_sparse"):
        H5LazyDataset(path, "X")
