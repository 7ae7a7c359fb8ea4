"""Files that other libraries write: the call that ``inspect`` prints has the data that a person would choose."""

import h5py
import numpy as np
import pytest

from lightning_h5 import LazyH5DataModule, check_files, inspect_file

RNG = np.random.default_rng(0)


def batch_of(path):
    """The first batch of the suggested call, and the advice."""
    advice = inspect_file(path).advice
    module = LazyH5DataModule(**{**advice.settings, "shuffle": False})
    module.setup("fit")
    return next(iter(module.train_dataloader())), advice


@pytest.fixture
def frame():
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("tables")
    frame = pandas.DataFrame(RNG.standard_normal((100, 4)), columns=list("abcd"))
    frame["target"], frame["name"] = np.arange(100) % 2, "x"
    return frame


@pytest.mark.filterwarnings("ignore")
def test_a_frame_of_fixed_format_has_its_blocks_and_no_index(frame, tmp_path):
    frame.to_hdf(tmp_path / "a.h5", key="df", mode="w")
    (x, y), advice = batch_of(tmp_path / "a.h5")
    np.testing.assert_array_equal(x[:5], frame[list("abcd")].to_numpy("f4")[:5])
    np.testing.assert_array_equal(y[:5], frame["target"][:5])
    assert "'target', a target by its name" in advice.reasons[0]
    assert not check_files(tmp_path / "a.h5").warnings


@pytest.mark.filterwarnings("ignore")
def test_a_frame_of_table_format_has_its_columns_and_no_index(frame, tmp_path):
    frame.to_hdf(tmp_path / "a.h5", key="df", mode="w", format="table", data_columns=["target"])
    (x, y), _ = batch_of(tmp_path / "a.h5")
    np.testing.assert_array_equal(x[:5], frame[list("abcd")].to_numpy("f4")[:5])
    np.testing.assert_array_equal(y[:5], frame["target"][:5])
    assert not check_files(tmp_path / "a.h5").warnings


@pytest.mark.filterwarnings("ignore:The 'future.infer_string' option is deprecated")  # anndata, with pandas 3
@pytest.mark.parametrize("dense", [False, True])
def test_cells_have_their_type_as_target_and_donors_stay_whole(tmp_path, dense):
    anndata, pandas = pytest.importorskip("anndata"), pytest.importorskip("pandas")
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random(120, 30, 0.3, format="csr", dtype="f4", random_state=0)
    cells = anndata.AnnData(x.toarray() if dense else x)
    cells.obs["cell_type"] = pandas.Categorical(RNG.choice(["B", "T"], 120))
    cells.obs["donor"] = pandas.Categorical(np.array(["d1", "d2", "d3", "d4"])[np.arange(120) % 4])
    cells.obsp["neighbors"] = sparse.random(120, 120, 0.1, format="csr")
    cells.write_h5ad(tmp_path / "a.h5ad")
    (rows, _), advice = batch_of(tmp_path / "a.h5ad")
    assert rows.shape[1] == 30
    settings = advice.settings
    assert (settings["x_key"], settings["y_key"], settings["split"]["group_key"]) == ("X", "obs/cell_type", "obs/donor")
    assert not check_files(tmp_path / "a.h5ad").warnings


def test_variables_of_netcdf_are_decoded_and_coordinates_no_input(tmp_path):
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, size in (("time", None), ("lat", 8), ("station", 5)):
            file.createDimension(name, size)
        file.createVariable("time", "f8", ("time",))[:] = np.arange(60.0) * 6
        file.createVariable("lat", "f8", ("lat",))[:] = np.arange(8.0)
        packed = file.createVariable("t2m", "i2", ("time", "lat", "station"), fill_value=-1)
        packed.scale_factor, packed.add_offset = 0.01, 270.0
        packed[:] = 270 + RNG.random((60, 8, 5))
    batch, advice = batch_of(tmp_path / "a.nc")
    assert batch.shape[1:] == (2, 8, 5)
    assert 269 < float(batch.min()) < 272
    assert advice.x_keys == ("t2m",)
    assert not check_files(tmp_path / "a.nc").warnings


def test_matrices_of_matlab_have_their_labels(tmp_path):
    hdf5storage = pytest.importorskip("hdf5storage")
    x, labels = RNG.standard_normal((6, 80)), (np.arange(80) % 3).astype("f8")[None]
    contents = {"X": x, "labels": labels, "none": np.zeros((0, 0)), "who": np.array(["a", "b"], object)}
    hdf5storage.savemat(str(tmp_path / "a.mat"), contents, format="7.3")
    (rows, y), _ = batch_of(tmp_path / "a.mat")
    np.testing.assert_allclose(rows[:5], x.T[:5], rtol=1e-6)
    assert y[:5].tolist() == [0, 1, 2, 0, 1]


def test_cells_of_matlab_are_segments(tmp_path):
    hdf5storage = pytest.importorskip("hdf5storage")
    cells = np.empty((12, 1), object)
    for number in range(12):
        cells[number, 0] = RNG.standard_normal((3, 20 + number))
    contents = {"trials": cells, "labels": (np.arange(12) % 2).astype("f8")[:, None]}
    hdf5storage.savemat(str(tmp_path / "a.mat"), contents, format="7.3")
    advice = inspect_file(tmp_path / "a.mat").advice
    assert (advice.settings["x_key"], advice.settings["y_key"]) == ("trials", "labels")
    assert advice.settings["y_dtype"] == "int64"
    assert not check_files(tmp_path / "a.mat").warnings


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_keras_has_no_samples_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(8)])
    for name in ("new.weights.h5", "whole.h5"):
        path = tmp_path / name
        model.save_weights(path) if "weights" in name else model.save(path)
        advice = inspect_file(path).advice
        assert advice.datamodule is None
        assert "no samples in it" in advice.reasons[0]


def test_a_table_of_biom_is_read_by_samples(tmp_path):
    biom = pytest.importorskip("biom")
    counts = RNG.poisson(0.5, (30, 20)).astype("f8")
    table = biom.Table(counts, [f"o{i}" for i in range(30)], [f"s{i}" for i in range(20)])
    with h5py.File(tmp_path / "a.biom", "w") as file:
        table.to_hdf5(file, "test")
    rows, _ = batch_of(tmp_path / "a.biom")
    np.testing.assert_array_equal(rows[:4], counts.T[:4])


def write_biom(path, counts):
    """A table as biom-format writes it, without the library."""
    with h5py.File(path, "w") as file:
        file.attrs["format-url"], file.attrs["shape"] = "http://biom-format.org", counts.shape
        for name, dense in (("observation", counts), ("sample", counts.T)):
            rows, columns = np.nonzero(dense)
            file[f"{name}/matrix/data"], file[f"{name}/matrix/indices"] = dense[rows, columns], columns.astype("i4")
            starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
            file[f"{name}/matrix/indptr"] = starts.astype("i4")
            file[f"{name}/ids"] = [f"{name} {at}" for at in range(len(dense))]


def test_both_forms_of_a_table_of_biom_have_its_shape(tmp_path):
    counts = RNG.poisson(0.5, (30, 20)).astype("f8")
    write_biom(tmp_path / "a.biom", counts)
    rows, advice = batch_of(tmp_path / "a.biom")
    assert advice.settings["x_key"] == "sample/matrix"
    np.testing.assert_array_equal(rows[:4], counts.T[:4])
    module = LazyH5DataModule(tmp_path / "a.biom", x_key="observation/matrix", shuffle=False, batch_size=4)
    module.setup("fit")
    np.testing.assert_array_equal(next(iter(module.train_dataloader())), counts[:4])


def test_cells_of_a_loom_file_are_samples(tmp_path):
    counts = RNG.integers(0, 9, (12, 50))
    with h5py.File(tmp_path / "a.loom", "w") as file:
        file["matrix"], file["col_attrs/ClusterID"] = counts, np.arange(50) % 3
        file["row_attrs/Gene"] = [f"g{at}" for at in range(12)]
        file["attrs/LOOM_SPEC_VERSION"] = "3.0.0"
    (x, y), _ = batch_of(tmp_path / "a.loom")
    np.testing.assert_array_equal(x[:4], counts.T[:4])
    assert y[:4].tolist() == [0, 1, 2, 0]
