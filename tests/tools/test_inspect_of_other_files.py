"""Ragged columns, lines of MATLAB, dates, coordinates and recordings: ``inspect`` knows them, or says what they are."""

import csv

import h5py
import numpy as np
import pytest

from lightning_h5 import LazyH5DataModule, compute_stats, inspect_file, inspect_folder
from lightning_h5.cli import main
from lightning_h5.tools.inspect.dates import are_dates

RNG = np.random.default_rng(0)


def batches_of(advice):
    """The first batch of the suggested call, in the order of the file, and the rows of its validation."""
    module = LazyH5DataModule(**{**advice.settings, "shuffle": False})
    module.setup("fit")
    n_val = len(module.val_dataset) if "split" in advice.settings else 0
    return next(iter(module.train_dataloader())), n_val


def write_units(path, lengths, n_series=0):
    """Write the units of an NWB file, and a series with a rate."""
    with h5py.File(path, "w") as file:
        file.attrs["nwb_version"] = "2.6.0"
        times = file.create_dataset("units/spike_times", data=np.sort(RNG.uniform(0, 9, sum(lengths))))
        ends = file.create_dataset("units/spike_times_index", data=np.cumsum(lengths).astype("u4"))
        ends.attrs["neurodata_type"], ends.attrs["target"] = "VectorIndex", times.ref
        ids = file.create_dataset("units/id", data=np.arange(len(lengths)))
        ids.attrs["neurodata_type"] = "ElementIdentifiers"
        file["units/depth"] = RNG.normal(size=len(lengths))
        if n_series:
            file["acquisition/lfp/data"], file["acquisition/lfp/starting_time"] = RNG.normal(size=(n_series, 4)), 0.0
        return times[()]


@pytest.mark.filterwarnings("ignore:1 segment has no steps:UserWarning")
def test_a_ragged_column_of_nwb_has_a_row_for_each_sample(tmp_path):
    lengths = [5, 0, 7, 4, *RNG.integers(1, 20, 20)]
    times = write_units(tmp_path / "a.nwb", lengths)
    advice = inspect_file(tmp_path / "a.nwb").advice
    assert advice.settings["segments"] == {"ends": "units/spike_times_index"}
    module = LazyH5DataModule(**advice.settings | {"split": None, "shuffle": False, "batch_size": 3, "x_dtype": None})
    module.setup("fit")
    x, n = next(iter(module.train_dataloader()))
    assert n.tolist() == [5, 7, 4]
    np.testing.assert_array_equal(x[1, :7], times[5:12])
    assert batches_of(advice)[1] > 0


def test_a_series_of_nwb_with_a_rate_has_windows(tmp_path):
    write_units(tmp_path / "a.nwb", [3, 4], n_series=600)
    advice = inspect_file(tmp_path / "a.nwb").advice
    assert (advice.x_keys, advice.settings["window"]) == (("acquisition/lfp/data",), 30)
    x, n_val = batches_of(advice)
    assert x.shape[1:] == (30, 4)
    assert n_val


def test_a_line_of_matlab_is_the_target_of_rows(tmp_path):
    images, labels = RNG.integers(0, 255, (60, 4, 5, 3)).astype("u1"), np.tile([1.0, 2.0, 3.0], 20)
    with h5py.File(tmp_path / "a.mat", "w") as file:
        file["images"], file["labels"], file["fs"] = images, labels[None], [[250.0]]
        file["images"].attrs["MATLAB_class"] = np.bytes_("uint8")
    advice = inspect_file(tmp_path / "a.mat").advice
    (x, y), n_val = batches_of(advice)
    np.testing.assert_array_equal(x, images[: len(x)])
    np.testing.assert_array_equal(y, labels[: len(y)])
    assert (advice.settings["split"], n_val) == ({"val_fraction": 0.1, "by": "time"}, 6)
    (array,) = compute_stats(tmp_path / "a.mat").arrays
    assert (array.key, array.n_rows) == ("images", 60)


LINES = {
    "a line of numbers": {"subject": np.arange(60.0)[None] // 20},
    "logical": {"good": (np.arange(60) % 2).astype("u1")[None]},
    "text with as many letters as columns": {"name": np.array([[ord(c)] for c in "study"], "u2")},
    "a rate": {"fs": np.array([[250.0]])},
    "a row with as many values as columns": {"mu": np.zeros((5, 1))},
    "several": {"age": np.zeros((1, 60)), "weights": np.ones((1, 60)), "fold": np.zeros((1, 60))},
}


def write_mat(path, arrays):
    """Write a file as MATLAB does: a matrix with a row for each sample has its samples on the last axis."""
    classes = {"uint8": "logical", "uint16": "char", "float64": "double"}
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, values in arrays.items():
            file[name] = values
            file[name].attrs["MATLAB_class"] = np.bytes_(classes[str(values.dtype)])


@pytest.mark.parametrize("others", LINES)
def test_rows_of_a_matrix_of_matlab_are_samples_whatever_else_is_stored(tmp_path, others):
    x, labels = RNG.normal(size=(5, 60)), np.arange(60.0) % 3
    write_mat(tmp_path / "a.mat", {"X": x, "Y": labels[None], **LINES[others]})
    advice = inspect_file(tmp_path / "a.mat").advice
    assert (advice.settings["x_key"], advice.settings["y_key"], advice.other) == ("X", "Y", None)
    (rows, y), n_val = batches_of(advice)
    np.testing.assert_allclose(rows, x.T[: len(rows)], rtol=1e-6)
    np.testing.assert_array_equal(y, labels[: len(y)])
    assert n_val == 6


def test_a_square_matrix_of_matlab_has_its_samples_on_the_last_axis_and_is_not_sure(tmp_path):
    x, labels = RNG.normal(size=(60, 60)), np.arange(60.0) % 3
    write_mat(tmp_path / "a.mat", {"X": x, "Y": labels[None]})
    advice = inspect_file(tmp_path / "a.mat").advice
    for each, samples in ((advice, x.T), (advice.other, x)):
        (rows, y), _ = batches_of(each)
        np.testing.assert_allclose(rows, samples[: len(rows)], rtol=1e-6)
        np.testing.assert_array_equal(y, labels[: len(y)])


def write_frame(path, **columns):
    """Write a table as pandas does, with the dtype and meta of each column as attributes."""
    with h5py.File(path, "w") as file:
        file.attrs["PYTABLES_FORMAT_VERSION"] = np.bytes_("2.1")
        rows = np.zeros(60, [("index", "i8"), *((name, column[0].dtype) for name, column in columns.items())])
        for name, (values, *_) in columns.items():
            rows[name] = values
        file["df/table"] = rows
        for name, (_, dtype, meta) in columns.items():
            file["df/table"].attrs[f"{name}_dtype"] = np.bytes_(dtype)
            file["df/table"].attrs[f"{name}_meta"] = np.bytes_(meta)


@pytest.mark.parametrize("name", ["kind", "label"])
@pytest.mark.parametrize("n_files", [1, 2])
def test_dates_and_category_codes_of_pandas_are_not_input(tmp_path, name, n_files):
    codes, numbers = (np.arange(60) % 2).astype("i1"), np.arange(60.0)
    for number in range(n_files):
        write_frame(
            tmp_path / f"{number}.h5",
            a=(numbers, "float64", "N."),
            b=(numbers, "float64", "N."),
            when=(np.arange(60) * 10**9, "datetime64[ns]", "N."),
            **{name: (codes, "int8", "category")},
        )
    advice = (inspect_file(tmp_path / "0.h5") if n_files == 1 else inspect_folder(tmp_path).example).advice
    assert advice.settings["x_key"] == ["df/table/a", "df/table/b"]
    assert "'df/table/when' holds dates or times, as marked by pandas, and is not an input." in advice.reasons
    # Codes of several files may stand for different categories.
    has_target = name == "label" and n_files == 1
    assert advice.settings.get("y_key") == ("df/table/label" if has_target else None)
    batch, _ = batches_of(advice)
    x, *y = batch if has_target else (batch,)
    for target in y:
        np.testing.assert_array_equal(target, x[0] % 2)


def test_blocks_of_dates_of_pandas_are_not_input(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["PYTABLES_FORMAT_VERSION"] = np.bytes_("2.1")
        for number, (names, value_type) in enumerate([(["a"], ""), (["start", "stop"], "datetime64")]):
            items = file.create_dataset(f"df/block{number}_items", data=np.array(names, "S5"))
            items.attrs.update({"CLASS": np.bytes_("ARRAY"), "kind": np.bytes_("string"), "name": np.bytes_("N.")})
            file[f"df/block{number}_values"] = np.zeros((60, len(names)), "i8" if value_type else "f4")
            if value_type:
                file[f"df/block{number}_values"].attrs["value_type"] = np.bytes_(value_type)
    advice = inspect_file(tmp_path / "a.h5").advice
    assert advice.x_keys == ("df/block0_values",)
    assert batches_of(advice)[0].shape[1:] == (1,)


def test_sorted_columns_have_no_split_that_lacks_a_class(tmp_path):
    with h5py.File(tmp_path / "a.loom", "w") as file:
        file["matrix"], file["col_attrs/ClusterID"] = RNG.integers(0, 9, (12, 50)), np.arange(50) // 10
        file["row_attrs/Gene"], file["attrs/LOOM_SPEC_VERSION"] = [f"g{at}" for at in range(12)], "3.0.0"
    advice = inspect_file(tmp_path / "a.loom").advice
    assert "split" not in advice.settings
    assert "No split: samples are sorted" in advice.reasons[0]
    with h5py.File(tmp_path / "a.loom", "a") as file:
        file["col_attrs/ClusterID"][...] = np.arange(50) % 5
    advice = inspect_file(tmp_path / "a.loom").advice
    assert batches_of(advice)[1] == 5
    assert compute_stats(tmp_path / "a.loom").arrays[0].n_values == 600


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["2020-01-31", "2020-02-01T10:00:00.5+01:00"], True),
        ([b"31.01.2020"], True),
        (["01/31/2020 10:11"], True),
        (["Mon, 31 Jan 2020 10:11:12 GMT"], True),
        ([20200131, 19991201], True),
        (["10:11:12"], True),
        ([20201331], False),
        (["2020-01/31"], False),
        (["a", "2020-01-31"], False),
        ([1, 2], False),
        ([""], False),
        ([], False),
    ],
    ids=str,
)
def test_dates_are_known_by_their_form(values, expected):
    assert are_dates(values) is expected


def test_dates_and_names_are_neither_input_nor_label(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for at in range(12):
            group = file.create_group(f"run_{at}")
            group["data"] = RNG.normal(size=(20 + at, 3))
            group.attrs.update(recorded=f"2020-01-{at // 2 + 1:02d}T10:00:00", name=f"s{at}", kind="ab"[at % 2], age=at)
    assert {*inspect_file(tmp_path / "a.h5").advice.x_keys} == {"data", "@kind", "@age"}
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"], file["day"] = RNG.normal(size=(60, 3)), 20200101 + np.arange(60) % 28
        file["label_date"] = [f"2020-01-{at % 28 + 1:02d}" for at in range(60)]
    advice = inspect_file(tmp_path / "b.h5").advice
    assert (advice.x_keys, advice.y_keys, advice.comments) == (("x",), (), ())


def test_a_date_beside_files_is_no_target(tmp_path):
    for at in range(4):
        with h5py.File(tmp_path / f"r{at}.h5", "w") as file:
            file["eeg"] = RNG.normal(size=(4, 900 + at))
    with open(tmp_path / "files.csv", "w", newline="") as file:
        csv.writer(file).writerows([["file", "day"], *([f"r{at}", f"2020-01-0{at + 1}"] for at in range(4))])
    assert inspect_folder(tmp_path).example.advice.y_keys == ()


def test_a_file_with_coordinates_alone_says_so(tmp_path):
    with h5py.File(tmp_path / "a.nc", "w") as file:
        for name, n in (("lat", 20), ("lon", 40), ("height", 30)):
            file[name] = np.arange(n) + 0.5
            file[name].make_scale(name)
    advice = inspect_file(tmp_path / "a.nc").advice
    assert advice.datamodule is None
    assert advice.reasons[0].startswith("The only arrays of numbers are coordinates: 'height', 'lat', 'lon'.")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["time"], file["date"] = np.arange(40.0), ["2020-01-01"] * 40
    assert inspect_file(tmp_path / "b.h5").advice.reasons == (
        "The only arrays are coordinates: 'time' has times, by the name.",
    )


def test_a_rate_beside_a_recording_makes_windows_and_is_not_sure(tmp_path):
    with h5py.File(tmp_path / "a.mat", "w") as file:
        file["data"], file["fs"], file["stim"] = RNG.normal(size=(900, 8)), [[250.0]], np.zeros((900, 1))
    advice = inspect_file(tmp_path / "a.mat").advice
    assert "'fs' is a rate by its name" in advice.reasons[0]
    assert advice.other.settings["x_key"] == "data"
    x, n_val = batches_of(advice)
    assert x.shape[1:] == (45, 8)
    assert n_val


def test_a_split_that_leaves_nothing_is_left_out(tmp_path):
    with h5py.File(tmp_path / "a.nwb", "w") as file:
        file.attrs["nwb_version"] = "2.6.0"
        file["acquisition/lfp/data"], file["acquisition/lfp/starting_time"] = RNG.normal(size=(50, 3, 8)), 0.0
    assert batches_of(inspect_file(tmp_path / "a.nwb").advice)[0].shape[1:] == (2, 3, 8)


def test_volumes_whose_patches_touch_different_numbers_of_cells(tmp_path):
    for at in range(4):
        with h5py.File(tmp_path / f"{at}.h5", "w") as file:
            options = {"chunks": (16, 16, 16), "compression": "gzip"}
            file.create_dataset("raw", data=RNG.integers(0, 9, (40, 40 + 3 * at, 40)), **options)
            file.create_dataset("label", data=RNG.integers(0, 3, (40, 40 + 3 * at, 40)), **options)
    advice = inspect_folder(tmp_path).example.advice
    assert advice.settings["patch"] == {"shape": [40, 40, 40]}
    assert advice.cost.n_chunks >= 2 * 27


def test_stats_of_a_sparse_matrix_count_its_zeros(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dense = np.where(RNG.random((40, 12)) < 0.2, RNG.normal(size=(40, 12)), 0)
    rows, columns = np.nonzero(dense)
    with h5py.File("a.h5ad", "w") as file:
        file.attrs["encoding-type"] = "anndata"
        file["X/data"], file["X/indices"] = dense[rows, columns], columns
        file["X/indptr"] = np.searchsorted(rows, np.arange(41))
        file["X"].attrs.update({"encoding-type": "csr_matrix", "shape": dense.shape})
    for rows, values in ((None, dense), ([3, 1, 30], dense[[1, 3, 30]])):
        (array,) = compute_stats("a.h5ad", rows=rows).arrays
        assert (array.key, array.n_values, array.n_rows) == ("X", values.size, len(values))
        numbers = [array.mean, array.std, array.min, array.max]
        np.testing.assert_allclose(numbers, [values.mean(), values.std(), values.min(), values.max()], rtol=1e-12)
    with pytest.raises(SystemExit) as ended:
        main(["stats", "a.h5ad"])
    assert ended.value.code == 0
    assert "Next: lightning-h5 bench a.h5ad" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["stats", "a.h5ad", "--output", "stats.json"])
    assert ended.value.code == 1
    assert "Scale its values in a transform" in capsys.readouterr().err
