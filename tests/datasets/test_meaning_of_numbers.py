"""Numbers of a field mean the same in all files of all splits, or setup names the first difference."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lightning_h5 import H5LazyDataset, H5ValueError, LazyH5DataModule
from lightning_h5.hdf5 import ChangeGuard, OpenFile, annotations_of

Write = Callable[[h5py.File, Sequence[str]], None]

GENES = ["g0", "g1", "g2"]


def write_anndata(file: h5py.File, genes: Sequence[str]) -> None:
    rows = np.array([[int(gene[1:]) for gene in genes]] * 4, "f4")
    for name in ("X", "layers/raw", "raw/X", "rna/X"):
        file[name] = rows
    for name in ("var", "raw/var", "rna/var"):
        file.create_group(name).attrs["_index"] = "_index"
        file[f"{name}/_index"] = list(genes)


def write_old_anndata(file: h5py.File, genes: Sequence[str]) -> None:
    file["X"] = np.array([[int(gene[1:]) for gene in genes]] * 4, "f4")
    file["var"] = np.array([(gene.encode(), 0.0) for gene in genes], [("index", "S2"), ("n", "f4")])


def write_fixed_frame(file: h5py.File, names: Sequence[str]) -> None:
    file["df/block0_values"] = np.zeros((4, len(names)))
    file["df/block0_items"] = np.array(names, "S2")


def write_table_frame(file: h5py.File, names: Sequence[str]) -> None:
    kind = [("index", "i8"), ("values_block_0", "f8", (len(names),))]
    file["df/table"] = np.zeros(4, kind)
    file["df/table"].attrs["values_block_0_kind"] = np.bytes_(pickle.dumps(list(names), 0))


NAMED: dict[str, tuple[Write, str]] = {
    "AnnData": (write_anndata, "X"),
    "a layer": (write_anndata, "layers/raw"),
    "raw": (write_anndata, "raw/X"),
    "a modality": (write_anndata, "rna/X"),
    "a table of genes": (write_old_anndata, "X"),
    "a fixed frame": (write_fixed_frame, "df/block0_values"),
    "a frame in a table": (write_table_frame, "df/table/values_block_0"),
}


def pair(folder: Path, write: Callable[[h5py.File, Any], None], first: Any, other: Any) -> list[str]:
    """Write two files."""
    for name, value in (("a.h5", first), ("b.h5", other)):
        with h5py.File(folder / name, "w") as file:
            write(file, value)
    return [str(folder / "a.h5"), str(folder / "b.h5")]


@pytest.mark.parametrize("kind", NAMED)
def test_other_columns_are_an_error_that_names_the_first(kind: str, tmp_path: Path) -> None:
    write, key = NAMED[kind]
    paths = pair(tmp_path, write, GENES, ["g0", "g2", "g1"])
    with pytest.raises(H5ValueError, match=r"b\.h5.*column 1 is 'g1' and 'g2'.*data module for each kind"):
        H5LazyDataset(paths, key)
    with pytest.raises(H5ValueError, match="column 1 is 'g1' and 'g2'"):
        H5LazyDataset(paths, key, window=2)
    with pytest.raises(H5ValueError, match="column 1 is 'g1' and 'g2'"):
        LazyH5DataModule(paths[0], val_path=paths[1], x_key=key).setup("fit")
    assert len(H5LazyDataset(paths, key, decode={key: lambda row: row})) == 8
    assert len(H5LazyDataset(pair(tmp_path, write, GENES, GENES), key)) == 8


def test_columns_are_those_of_training_in_every_stage(tmp_path: Path) -> None:
    train, predict = pair(tmp_path, write_anndata, GENES, GENES[::-1])
    datamodule = LazyH5DataModule(train, predict_path=predict, x_key="X")
    datamodule.setup("fit")
    with pytest.raises(H5ValueError, match="column 0 is 'g0' and 'g2'"):
        datamodule.setup("predict")


def test_only_selected_columns_must_be_the_same(tmp_path: Path) -> None:
    paths = pair(tmp_path, write_anndata, GENES, ["g0", "g2", "g1"])
    dataset = H5LazyDataset(paths, "X", select={"X": {1: [0]}})
    assert [dataset[at].tolist() for at in (0, 7)] == [[0.0], [0.0]]
    with pytest.raises(H5ValueError, match="column 0 is 'g1' and 'g2'"):
        H5LazyDataset(paths, "X", select={"X": {1: {"start": 1}}})


def write_loom(file: h5py.File, genes: Sequence[str]) -> None:
    file["matrix"] = np.array([[int(gene[1:])] * 3 for gene in genes], "f4")
    file["row_attrs/Gene"], file["col_attrs/CellID"] = list(genes), list("abc")


def test_genes_of_loom_are_along_axis_0_unless_they_are_rows(tmp_path: Path) -> None:
    paths = pair(tmp_path, write_loom, GENES, GENES[::-1])
    with pytest.raises(H5ValueError, match=r"names along axis 0 of 'matrix'.*'g0' and 'g2'"):
        H5LazyDataset(paths, "matrix", segments={"step_axis": 1}, sample="row")
    assert len(H5LazyDataset(paths, "matrix")) == 6


def test_plain_arrays_with_these_names_need_no_names(tmp_path: Path) -> None:
    def write(file: h5py.File, _: Any) -> None:
        for key in ("X", "matrix", "layers/a", "block0_values", "g/indices"):
            file[key] = np.zeros((2, 3))

    keys = ["X", "matrix", "layers/a", "block0_values", "g/indices"]
    assert len(H5LazyDataset(pair(tmp_path, write, None, None), keys, sample="row")) == 4


# Units ------------------------------------------------------------------------------------------------------------


def write_units(file: h5py.File, units: Any) -> None:
    file["x"] = np.zeros((4, 2))
    if units is not None:
        file["x"].attrs["units"] = units


@pytest.mark.parametrize("other", ["degC", np.bytes_("degC")])
def test_other_units_are_an_error(other: Any, tmp_path: Path) -> None:
    paths = pair(tmp_path, write_units, "K", other)
    for options in ({}, {"window": 2}):
        with pytest.raises(H5ValueError, match=r"'x' has the units 'K' in .*a\.h5' and 'degC' in .*b\.h5'"):
            H5LazyDataset(paths, "x", **options)
    assert len(H5LazyDataset(paths, "x", decode={"x": lambda row: row})) == 8


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("K", None),
        (None, "K"),
        ("unknown", "K"),
        ("m/s", "m s-1"),
        ("m s**-1", "m.s^-1"),
        ("m/s/s", "m/s^2"),
        ("K", "kelvin"),
        ("Counts", "count"),
        ("kg m-2", "m-2 kg"),
        ("uV", "µV"),
        ("μV", "microvolts"),
        ("1", "dimensionless"),
        ("degrees_north", "degree_N"),
    ],
)
def test_units_in_another_spelling_are_no_error(first: Any, other: Any, tmp_path: Path) -> None:
    assert len(H5LazyDataset(pair(tmp_path, write_units, first, other), "x")) == 8


def test_labels_of_another_file_are_another_field_though_the_array_has_the_same_name(tmp_path: Path) -> None:
    images, labels = pair(tmp_path, write_units, "K", "m")
    datamodule = LazyH5DataModule(images, x_key="x", y_key={"path": labels, "key": "x"})
    datamodule.setup("fit")
    assert datamodule.train_dataloader() is not None


def test_files_are_compared_with_those_of_training_and_not_with_replaced_ones(tmp_path: Path) -> None:
    first, second = pair(tmp_path, write_units, "K", "degC")
    datamodule = LazyH5DataModule(predict_path=first, x_key="x")
    datamodule.setup("predict")
    datamodule.predict_path = second
    datamodule.setup("predict")
    datamodule = LazyH5DataModule(first, x_key="x", predict_path=first)
    datamodule.setup("fit")
    datamodule.predict_path = second
    with pytest.raises(H5ValueError, match="has the units 'K'"):
        datamodule.setup("predict")


def test_groups_with_other_names_may_be_other_things(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def write(file: h5py.File, units: str) -> None:
        file[f"{units}/x"] = np.zeros((4, 2))
        file[f"{units}/x"].attrs["units"] = units

    H5LazyDataset(pair(tmp_path, write, "mV", "degC"), "x", segments={"groups": "*"}, window=2)
    assert "has the units 'mV'" in caplog.text


def test_scales_are_known_by_their_name_whatever_group_they_are_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(file: h5py.File, group: str) -> None:
        file[f"{group}/x"], file[f"{group}/ch"] = np.zeros((4, 2)), [1.0, 2.0]
        file[f"{group}/ch"].make_scale("ch")
        file[f"{group}/x"].dims[1].attach_scale(file[f"{group}/ch"])

    H5LazyDataset(pair(tmp_path, write, "s1", "s2"), "x", segments={"groups": "*"}, window=2)
    assert caplog.messages == []


def test_units_are_compared_in_all_files_and_scales_in_the_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: h5py.File, names_and_units: tuple[str, str, str]) -> None:
        file["x"] = np.zeros((4, 2, 2))
        file["x"].attrs["units"] = names_and_units[2]
        for axis, name in enumerate(names_and_units[:2]):
            file[name] = np.arange(2.0)
            file[name].make_scale(name)
            file["x"].dims[axis + 1].attach_scale(file[name])

    paths = pair(tmp_path, write, ("a", "b", "K"), ("b", "a", "K"))
    with pytest.raises(H5ValueError, match=r"the axes of 'x' are .*'a', 'b' in .*'b', 'a' in"):
        H5LazyDataset(paths, "x")
    monkeypatch.setattr("lightning_h5.hdf5.alike.FILES_WITH_SCALES", 1)
    assert len(H5LazyDataset(paths, "x")) == 8
    with pytest.raises(H5ValueError, match="has the units 'K'"):
        H5LazyDataset(pair(tmp_path, write, ("a", "b", "K"), ("b", "a", "degC")), "x")


def test_one_scale_of_two_axes_is_no_other_order_of_axes(tmp_path: Path) -> None:
    def write(file: h5py.File, names: Sequence[str]) -> None:
        file["x"] = np.zeros((4, 2, 2))
        for axis, name in enumerate(names):
            scale = file.require_dataset(name, (2,), "f4")
            scale.make_scale(name)
            file["x"].dims[axis + 1].attach_scale(scale)

    assert len(H5LazyDataset(pair(tmp_path, write, ["c", "c"], ["c", "d"]), "x")) == 8


def test_units_are_compared_with_the_first_that_are_known(tmp_path: Path) -> None:
    paths = pair(tmp_path, write_units, None, "K")
    with h5py.File(tmp_path / "c.h5", "w") as file:
        write_units(file, "degC")
    with pytest.raises(H5ValueError, match="has the units 'K'"):
        H5LazyDataset([*paths, str(tmp_path / "c.h5")], "x")


def test_times_of_other_dates_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = pair(tmp_path, write_units, "hours since 2020-01-01", "hours since 2021-01-01")
    with h5py.File(tmp_path / "c.h5", "w") as file:
        write_units(file, "hours since 2022-01-01")
    with caplog.at_level(logging.WARNING, "lightning_h5"):
        assert len(H5LazyDataset([*paths, str(tmp_path / "c.h5")], "x")) == 12
    assert caplog.text.count("has the units 'hours since 2020-01-01'") == 1


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("units", ["K", "", "é" * 9, np.bytes_("m s-1"), 3, ["a", "b"], None])
def test_units_are_read_by_position_as_by_the_library(units: Any, libver: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w", libver=libver) as file:
        file["g/x"] = np.zeros((4, 2))
        file["g/x"].attrs["title"] = "other text in the same heap"
        if units is not None:
            file["g/x"].attrs["units"] = units
    guard = ChangeGuard.of(path)
    with OpenFile(path, guard) as by_position, h5py.File(path) as file, OpenFile(path, guard, file) as by_library:
        assert annotations_of(by_position, "g/x") == annotations_of(by_library, "g/x")


# Dimensions -------------------------------------------------------------------------------------------------------


def write_dimensions(file: h5py.File, axes: dict[str, Any]) -> None:
    shape = [len(values) for values in axes.values()]
    file["x"] = np.zeros(shape)
    for axis, (name, values) in enumerate(axes.items()):
        file[name] = values
        file[name].make_scale(name)
        file["x"].dims[axis].attach_scale(file[name])


TIME, LEVELS = [0.0, 1.0], [1000.0, 850.0, 500.0]


@pytest.mark.parametrize(
    ("first", "other", "error"),
    [
        ({"y": LEVELS, "x_": LEVELS}, {"x_": LEVELS, "y": LEVELS}, "axes of 'x' are 'time', 'y', 'x_'"),
        ({"plev": LEVELS}, {"plev": LEVELS[::-1]}, "coordinates along axis 1 of 'x'.*another order.*1000.0 and 500.0"),
        ({"lat": LEVELS}, {"lat": LEVELS[::-1]}, "coordinates along axis 1 of 'x'.*another order"),
        ({"band": ["r", "g"]}, {"band": ["g", "r"]}, "coordinates along axis 1 of 'x'.*'r' and 'g'"),
    ],
)
def test_axes_and_coordinates_in_another_order_are_an_error(
    first: dict[str, Any], other: dict[str, Any], error: str, tmp_path: Path
) -> None:
    paths = pair(tmp_path, write_dimensions, {"time": TIME, **first}, {"time": TIME, **other})
    with pytest.raises(H5ValueError, match=error):
        H5LazyDataset(paths, "x")


@pytest.mark.parametrize(
    ("first", "other", "note"),
    [
        ({"lat": [1.0, 2.0], "lon": [1.0, 2.0]}, {"lat": [3.0, 4.0], "lon": [7.0, 8.0]}, ""),
        ({"lat": [1.0, 2.0]}, {"lat": [4.0, 3.0]}, "descend in"),
        ({"plev": [1000.0, 500.0]}, {"plev": [850.0, 300.0]}, "are others in"),
        ({"lat": [1.0, 2.0]}, {"latitude": [1.0, 2.0]}, "an axis of 'x' is 'lat'"),
    ],
)
def test_coordinates_that_may_differ_are_logged_at_most(
    first: dict[str, Any], other: dict[str, Any], note: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = pair(tmp_path, write_dimensions, {"time": TIME, **first}, {"time": [7.0, 6.0], **other})
    with caplog.at_level(logging.WARNING, "lightning_h5"):
        assert len(H5LazyDataset(paths, "x")) == 4
    assert (note in caplog.text) if note else not caplog.text


# Enums and packed numbers -----------------------------------------------------------------------------------------


def write_enum(file: h5py.File, names: Sequence[str]) -> None:
    codes = {name: code for code, name in enumerate(names)}
    dtype = h5py.enum_dtype(codes, basetype="i1")
    file.create_dataset("y", data=[codes["CAT"], codes["DOG"]], dtype=dtype)
    table = np.zeros(2, [("y", dtype)])
    table["y"] = [codes["CAT"], codes["DOG"]]
    file["t"] = table
    file["b"] = np.array([True, False])


@pytest.mark.parametrize("options", [{}, {"window": 1}])
def test_enums_with_other_names_are_an_error(options: dict[str, Any], tmp_path: Path) -> None:
    paths = pair(tmp_path, write_enum, ["CAT", "DOG"], ["DOG", "CAT"])
    for key in ("y", "t/y"):
        with pytest.raises(H5ValueError, match=r"stand for \{0: 'CAT', 1: 'DOG'\} .*decode="):
            H5LazyDataset(paths, key, **options)
        dataset = H5LazyDataset(paths, key, decode={key: "category"}, **options)
        assert [int(dataset[at]) for at in range(4)] == [0, 1, 0, 1]
    assert H5LazyDataset(paths, "b")[3].tolist() is False
    paths = pair(tmp_path, write_enum, ["CAT", "DOG"], ["CAT", "DOG"])
    assert [int(H5LazyDataset(paths, "y")[at]) for at in range(4)] == [0, 1, 0, 1]


def test_a_function_may_decode_enums_of_other_names(tmp_path: Path) -> None:
    first, second = pair(tmp_path, write_enum, ["CAT", "DOG"], ["DOG", "CAT"])
    for paths in ({"train_path": [first, second]}, {"train_path": first, "val_path": second}):
        LazyH5DataModule(**paths, x_key="y", decode={"y": lambda row: row}).setup("fit")


def test_an_enum_may_have_further_names_in_another_file(tmp_path: Path) -> None:
    paths = pair(tmp_path, write_enum, ["CAT", "DOG"], ["CAT", "DOG", "EMU"])
    assert len(H5LazyDataset(paths, "y")) == len(H5LazyDataset(paths[0], "y")) + len(H5LazyDataset(paths[1], "y"))


def test_enums_as_categories_have_the_class_numbers_of_training(tmp_path: Path) -> None:
    train, val = pair(tmp_path, write_enum, ["DOG", "CAT"], ["CAT", "DOG", "EMU"])
    datamodule = LazyH5DataModule(train, val_path=val, x_key="b", y_key="y", decode={"y": "category"}, shuffle=False)
    datamodule.setup("fit")
    assert datamodule.categories == {"y": ("CAT", "DOG")}
    assert next(iter(datamodule.val_dataloader()))[1].tolist() == [0, 1]
    with pytest.raises(H5ValueError, match="stand for"):
        LazyH5DataModule(train, val_path=val, x_key="b", y_key="y").setup("fit")


def write_nwb(file: h5py.File, conversion: float) -> None:
    file.attrs["nwb_version"] = "2.6.0"
    file["es"] = np.arange(4, dtype="i2")
    file["es"].attrs["conversion"] = conversion


def test_another_conversion_is_an_error_unless_stored_numbers_are_requested(tmp_path: Path) -> None:
    paths = pair(tmp_path, write_nwb, 1e-6, 4e-6)
    with pytest.raises(H5ValueError, match=r"conversion=1e-06.*conversion=4e-06.*decode=\{'es': 'cf'\}.*'int16'"):
        H5LazyDataset(paths, "es")
    assert H5LazyDataset(paths, "es", x_dtype="int16")[5].item() == 1
    assert H5LazyDataset(paths, "es", decode={"es": "cf"})[5].item() == pytest.approx(4e-6)
    datamodule = LazyH5DataModule(paths[0], val_path=paths[1], x_key="es")
    with pytest.raises(H5ValueError, match="conversion=1e-06"):
        datamodule.setup("fit")
    LazyH5DataModule(paths[0], val_path=paths[1], x_key="es", x_dtype="int16").setup("fit")
    assert len(H5LazyDataset(pair(tmp_path, write_nwb, 1.95e-7, np.float32(1.95e-7)), "es")) == 8


# Categories -------------------------------------------------------------------------------------------------------


def write_frame(file: h5py.File, categories: Sequence[str]) -> None:
    table = np.zeros(4, [("index", "i8"), ("a", "f8"), ("kind", "i1"), ("n", "i2")])
    table["kind"] = [categories.index("B"), categories.index("T"), -1, categories.index("B")]
    file["df/table"] = table
    values = [(at, name.encode()) for at, name in enumerate(categories)]
    file["df/meta/kind/meta/table"] = np.array(values, [("index", "i8"), ("values", "S2")])


def write_old_column(file: h5py.File, categories: Sequence[str]) -> None:
    file["obs/kind"] = np.array([categories.index("B"), categories.index("T"), -1, categories.index("B")], "i1")
    file["obs/__categories/kind"] = list(categories)


@pytest.mark.parametrize(("write", "key"), [(write_frame, "df/table/kind"), (write_old_column, "obs/kind")])
def test_codes_of_categories_are_the_same_in_all_files(write: Write, key: str, tmp_path: Path) -> None:
    paths = []
    for at, categories in enumerate([["B", "T"], ["T", "B"], ["NK", "T", "B"], ["B", "T"], ["T", "B"]]):
        paths.append(str(tmp_path / f"{at}.h5"))
        with h5py.File(paths[-1], "w") as file:
            write(file, categories)
    dataset = H5LazyDataset(paths, key)
    codes = [int(dataset[at]) for at in range(20)]
    assert codes == codes[:4] * 5
    assert codes[2] == -1
    assert len(set(codes)) == 3
    assert len(H5LazyDataset([paths[0], paths[3]], key, window=2)) == 4
    with pytest.raises(H5ValueError, match=r"stand for 'B', 'T' in .*0\.h5.*and for 'T', 'B' in"):
        H5LazyDataset([paths[0], paths[1]], key, window=2)
    with pytest.raises(H5ValueError, match="and for 'T', 'B' in"):
        LazyH5DataModule(paths[0], val_path=paths[1], x_key=key, window=2).setup("fit")


def test_a_categorical_column_has_its_categories_beside_other_columns(tmp_path: Path) -> None:
    paths = pair(tmp_path, write_frame, ["B", "T"], ["T", "B"])
    datamodule = LazyH5DataModule(
        paths, x_key=["df/table/a", "df/table/n"], y_key="df/table/kind", where={"df/table/kind": "B"}, shuffle=False
    )
    datamodule.setup("fit")
    assert next(iter(datamodule.train_dataloader()))[1].tolist() == [0, 0, 0, 0]
    assert datamodule.categories == {"df/table/kind": ("B", "T")}
