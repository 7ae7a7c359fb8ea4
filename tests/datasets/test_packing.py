"""Packed integers (CF, netCDF): an error that says how to decode them, or decoded values; raw only if asked for."""

from contextlib import nullcontext, suppress

import h5py
import numpy as np
import pytest
import yaml
from arguments import nested, nested_files
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    compute_stats,
    inspect_file,
)
from lightning_h5.datasets import CombinedHDF5Dataset, H5LazyDataset, RankMemCachedH5Dataset

N = 8
VALUES = np.arange(-4, N * 3 - 4, dtype="i2").reshape(N, 3)
SCALED = {"scale_factor": np.float32(0.01), "add_offset": np.array([273.15]), "_FillValue": np.array([-4], "i2")}
LABELS = np.array([1, 2, -9, 3, 1, 2, 1, 2], "i4")


@pytest.fixture
def write(make_h5):
    """Writes a file of arrays, with attributes for each."""

    def write(attributes, **arrays):
        path = make_h5(arrays)
        with h5py.File(path, "a") as file:
            for name, each in attributes.items():
                for attribute, value in each.items():
                    file[name].attrs[attribute] = value
        return path

    return write


@pytest.fixture
def packed(write):
    return write({"t2m": SCALED, "station": {"_FillValue": np.int32(-9)}}, t2m=VALUES, station=LABELS, y=np.arange(N))


def shard(path, *keys, **how):
    return RankMemCachedH5Dataset(path, *keys, **nested_files(rank=0, world_size=1, **how))


REFUSED = {
    "lazy": (lambda path: H5LazyDataset(path, "t2m"), "x_dtype='int16'"),
    "lazy, cast": (lambda path: H5LazyDataset(path, "t2m", x_dtype="float32"), "x_dtype='int16'"),
    "lazy, mapping": (lambda path: H5LazyDataset(path, {"t": "t2m"}), "x_dtype={'t': 'int16'}"),
    "lazy, target": (
        lambda path: H5LazyDataset(path, "y", "t2m"),
        "y_dtype='int16' to load them as they are stored, and decode them in a target_transform",
    ),
    "shard": (lambda path: shard(path, "t2m"), "x_dtype='int16'"),
    "shard, as stored": (lambda path: shard(path, "t2m", dtype_x=None), "x_dtype='int16'"),
    "shard, target": (
        lambda path: shard(path, "y", "t2m"),
        "y_dtype='int16' to load them as they are stored, and decode them in a target_transform",
    ),
    "combined": (lambda path: CombinedHDF5Dataset(path, ["t2m"]), "dtype={'t2m': 'int16'}"),
    "combined, as stored": (lambda path: CombinedHDF5Dataset(path, ["t2m"], dtype=None), "dtype={'t2m': 'int16'}"),
    "combined, found": (lambda path: CombinedHDF5Dataset(path), "int16'}"),
    "statistics": (lambda path: compute_stats(path, "t2m"), "decode={'t2m': 'cf'}"),
    "lazy data module": (lambda path: LazyH5DataModule(path, x_key="t2m").setup("fit"), "x_dtype='int16'"),
    "cached data module": (lambda path: RankCachedH5DataModule(path, x_key="t2m").setup("fit"), "x_dtype='int16'"),
    "combined data module": (
        lambda path: CombinedHDF5DataModule(path, fields=["t2m"]).setup("fit"),
        "dtype={'t2m': 'int16'}",
    ),
    "mixture": (
        lambda path: CombinedHDF5DataModule(mixture={"a": path}, fields=["t2m"]).setup("fit"),
        "dtype={'t2m': 'int16'}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_packed_integers_are_refused_with_the_formula_and_the_way_round(write, name):
    make, cure = REFUSED[name]
    with pytest.raises(H5ValueError) as error:
        make(write({"t2m": SCALED}, t2m=VALUES, y=np.arange(N)))
    assert "scale_factor=0.01, add_offset=273.15, _FillValue=-4" in str(error.value)
    assert "x * 0.01 + 273.15; -4 means missing" in str(error.value)
    assert cure in str(error.value)


def test_the_stored_dtype_by_name_loads_integers_as_they_are_stored(packed):
    assert np.array_equal(H5LazyDataset(packed, "t2m", x_dtype=np.int16).read_batch(range(N)), VALUES)
    x, y = H5LazyDataset(packed, {"t": "t2m"}, "station", x_dtype={"t": "int16"}, y_dtype="int32").read_batch(range(N))
    assert np.array_equal(x["t"], VALUES)
    assert np.array_equal(y, LABELS)
    assert np.array_equal(shard(packed, "t2m", dtype_x="int16").read_batch(range(N)), VALUES)
    batch = CombinedHDF5Dataset(packed, dtype={"t2m": "int16", "station": "int32"}).read_batch(range(N))
    assert np.array_equal(batch["t2m"], VALUES)
    assert np.array_equal(batch["station"], LABELS)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: LazyH5DataModule(
            path,
            x_key="t2m",
            x_dtype="int16",
            split={"val_fraction": 0.5, "group_key": "y"},
        ),
        lambda path: RankCachedH5DataModule(
            path,
            x_key="t2m",
            x_dtype="int16",
            split={"val_fraction": 0.5, "group_key": "y"},
        ),
        lambda path: CombinedHDF5DataModule(
            path,
            fields=["t2m"],
            x_dtype={"t2m": "int16"},
            split={"val_fraction": 0.5, "group_key": "y"},
        ),
    ],
    ids=["lazy", "cached", "combined"],
)
def test_data_modules_load_them_as_they_are_stored_and_cut_them_into_splits(packed, make):
    datamodule = make(packed)
    datamodule.setup("fit")
    found = []
    for batch in (*datamodule.train_dataloader(), *datamodule.val_dataloader()):
        found += (batch["t2m"] if isinstance(batch, dict) else batch).tolist()
    assert sorted(found) == VALUES.tolist()


def test_filters_compare_decoded_values_and_no_missing_one_passes(packed):
    def rows(**how):
        dataset = CombinedHDF5Dataset(packed, ["y"], **nested_files(**how))
        return dataset.read_batch(range(len(dataset)))

    assert rows(where={"station": [1, -9]})["y"].tolist() == [0, 4, 6]
    assert rows(where={"station": {"max": 1}})["y"].tolist() == [0, 4, 6]
    assert rows(where={"station": lambda column: ~np.isnan(column)})["y"].tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert rows(where=lambda columns: np.isnan(columns["station"]))["y"].tolist() == [2]


def test_flags_that_are_missing_are_neither_set_nor_not(write):
    flags = np.array([1, 0, -1, 1, 0, 1, 0, 1], "i1")
    path = write({"cs_label": {"_FillValue": np.int8(-1)}}, cs_label=flags, y=np.arange(N))
    for flag in (True, False):
        dataset = CombinedHDF5Dataset(path, ["y"], cs_label=flag)
        assert dataset.read_batch(range(len(dataset)))["y"].tolist() == np.flatnonzero(flags == flag).tolist()


@pytest.mark.parametrize("argument", ["group_key", "stratify_key", "balance_key", "weight_key"])
def test_a_missing_value_is_no_group_class_or_weight(packed, argument):
    how = {"val_fraction": 0.5} if argument in ("group_key", "stratify_key") else {}
    for make in (LazyH5DataModule, CombinedHDF5DataModule):
        fields = {"x_key": "y"} if make is LazyH5DataModule else {"fields": ["y"]}
        with pytest.raises(H5ValueError, match=rf"{argument}='station' has 1 rows .* without a value"):
            make(packed, **nested(**fields, **how, **{argument: "station"})).setup("fit")


def test_integers_with_a_mark_for_missing_values_and_none_are_columns_as_they_are(write):
    path = write({"station": {"_FillValue": np.int32(-77)}}, station=LABELS, y=np.arange(N))
    datamodule = LazyH5DataModule(path, x_key="y", split={"val_fraction": 0.5, "group_key": "station"}, seed=1)
    datamodule.setup("fit")
    sides = [
        {int(LABELS[y]) for y in batch} for batch in (*datamodule.train_dataloader(), *datamodule.val_dataloader())
    ]
    assert not sides[0] & sides[1]


def scaled_by(factor):
    return {"t2m": {"scale_factor": factor}}


def test_files_that_are_packed_differently_are_not_decoded_by_one_formula(write):
    a, b, plain = (write(one, t2m=VALUES) for one in (scaled_by(0.1), scaled_by(0.2), {}))
    for paths in ([a, b], [a, plain], [plain, a]):
        with pytest.raises(H5ValueError, match="one formula does not decode both"):
            H5LazyDataset(paths, "t2m", x_dtype="int16")
        with pytest.raises(H5ValueError, match="one formula does not decode both"):
            shard(paths, "t2m", dtype_x="int16")
        with pytest.raises(H5ValueError, match="one formula does not decode both"):
            CombinedHDF5Dataset(paths, ["t2m"], dtype={"t2m": "int16"})
        with pytest.raises(H5ValueError, match="one formula does not decode both"):
            LazyH5DataModule(paths[0], paths[1], x_key="t2m", x_dtype="int16").setup("fit")
        with pytest.raises(H5ValueError, match="one formula does not decode both"):
            CombinedHDF5DataModule(
                mixture={"sources": {"a": paths[0], "b": paths[1]}, "strategy": "round_robin"},
                fields=["t2m"],
                x_dtype={"t2m": "int16"},
            ).setup("fit")


def test_columns_are_decoded_file_by_file(write):
    paths = [write({"t": {"scale_factor": factor}}, t=np.arange(N), y=np.arange(N)) for factor in (1.5, 2.0)]
    dataset = CombinedHDF5Dataset(paths, ["y"], where={"t": {"min": 9}})
    assert dataset.read_batch(range(len(dataset)))["y"].tolist() == [6, 7, 5, 6, 7]


def test_attributes_that_are_no_numbers_are_refused_too(write):
    for value in ("0.01", np.bytes_(b"0.01"), np.arange(3.0), [b"a", b"b"]):
        path = write({"x": {"scale_factor": value}}, x=VALUES, y=np.arange(N))
        with pytest.raises(H5ValueError, match="packed integers"):
            H5LazyDataset(path, "x")
        assert np.array_equal(H5LazyDataset(path, "x", x_dtype="int16").read_batch(range(N)), VALUES)


@pytest.mark.parametrize(
    ("dtype", "attributes"),
    [
        ("f4", SCALED),
        ("i2", {"scale_factor": 1.0, "add_offset": 0}),
        ("i2", {"_FillValue": np.nan, "missing_value": 1e20}),
        ("i2", {"units": "K", "valid_range": [0, 9]}),
        ("i2", {"_Unsigned": "false"}),
        ("u1", {"_Unsigned": "true"}),
        ("i2", {"scale_factor": h5py.Empty("f4")}),
    ],
)
def test_attributes_that_change_no_value_change_nothing(write, dtype, attributes):
    path = write({"x": attributes}, x=VALUES.astype(dtype))
    assert np.array_equal(H5LazyDataset(path, "x").read_batch(range(N)), VALUES.astype(dtype))


def test_a_file_that_inspect_describes_trains_with_its_settings(write):
    path = write({"t2m": SCALED}, t2m=np.arange(60, dtype="i2").reshape(20, 3), y=np.arange(20))
    report = inspect_file(path)
    assert [array.packing for array in report.arrays] == ["scale_factor=0.01, add_offset=273.15, _FillValue=-4", None]
    assert any("x * 0.01 + 273.15; -4 means missing" in reason for reason in report.advice.reasons)
    arguments = yaml.safe_load(report.advice.yaml)["data"]["init_args"]
    assert arguments["decode"] == {"t2m": "cf"}
    LazyH5DataModule(**nested(**arguments)).setup("fit")


@pytest.mark.wide
@pytest.mark.parametrize("stored", ["i1", "u1", "i2", "u2", "i4", "u4", "i8"])
@pytest.mark.parametrize("named", ["int8", "uint8", "int16", "int32", "int64", "float32", "float64", "bool"])
def test_integers_of_which_some_are_missing_are_taken_as_any_integers_that_hold_them(write, stored, named):
    values = np.array([1, 2, np.iinfo(stored).max, 3], stored)
    marked = {"labels": {"_FillValue": values.dtype.type(np.iinfo(stored).max)}}
    path = write(marked, labels=values, x=np.zeros((4, 2)))
    readers = [
        lambda: H5LazyDataset(path, "x", "labels", y_dtype=named).read_batch(range(4))[1],
        lambda: shard(path, "x", "labels", dtype_y=named).read_batch(range(4))[1],
        lambda: CombinedHDF5Dataset(path, ["labels"], dtype={"labels": named}).read_batch(range(4))["labels"],
    ]
    for read in readers:
        if np.dtype(named).kind in "iu" and np.can_cast(stored, named):
            assert read().tolist() == values.tolist()
        else:
            with pytest.raises(H5ValueError, match="holds packed integers"):
                read()


@pytest.mark.parametrize("more", [{"scale_factor": 2.0}, {"add_offset": 1}, {"_Unsigned": "true"}])
def test_other_integers_are_taken_by_their_stored_dtype_alone(write, more):
    path = write({"x": {"_FillValue": np.int8(-1), **more}}, x=np.array([-1, 0, 1], "i1"))
    for named in ("int16", "int64"):
        with pytest.raises(H5ValueError, match="holds packed integers"):
            H5LazyDataset(path, "x", x_dtype=named)
    assert H5LazyDataset(path, "x", x_dtype="int8").read_batch(range(3)).tolist() == [-1, 0, 1]


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("user_block", [0, 512])
@pytest.mark.parametrize("name", ["units", "_Unsigned"])  # is in the header with another attribute before it, or first
@pytest.mark.parametrize("kind", [str, np.bytes_, lambda text: np.array(text, h5py.string_dtype("ascii"))])
def test_unsigned_means_the_same_as_text_of_any_kind(tmp_path, libver, user_block, name, kind):
    values = np.array([-1, 0, 1], "i1")
    for says, expected in (("true", [255, 0, 1]), ("True", [255, 0, 1]), ("false", [-1, 0, 1])):
        path = str(tmp_path / f"{says}.h5")
        with h5py.File(path, "w", libver=libver, userblock_size=user_block) as file:
            file["x"], file["y"] = values, np.arange(3)
            file["x"].attrs[name] = kind("K" if name == "units" else says)
            file["x"].attrs["_Unsigned"] = kind(says)
        seen = []

        def look(column, seen=seen):
            seen.append(column.tolist())
            return np.ones(len(column), bool)

        CombinedHDF5Dataset(path, ["y"], where={"x": look})
        assert seen == [expected]


@pytest.mark.parametrize(
    "says",
    ["true" * 100, "maybe", np.bytes_(b"maybe"), ["false", "true"]],
    ids=["long", "another word", "another word of a fixed length", "two"],
)
def test_integers_are_refused_if_it_is_not_known_whether_they_are_unsigned(write, says):
    path = write({"x": {"_Unsigned": says}}, x=np.array([-1, 0, 1], "i1"), y=np.arange(3))
    with pytest.raises(H5ValueError, match="packed integers") as error:
        H5LazyDataset(path, "x")
    assert "or something else" not in str(error.value)
    with pytest.raises(H5ValueError, match="the meaning of _Unsigned is unknown"):
        CombinedHDF5Dataset(path, ["y"], where={"x": -1})


def test_text_outside_of_the_header_of_an_array_is_read(tmp_path):
    path = str(tmp_path / "dense.h5")
    with h5py.File(path, "w", libver="latest") as file:
        file["x"] = np.array([-1, 0, 1], "i1")
        for at in range(12):  # more than a header keeps
            file["x"].attrs[f"a{at}"] = "false"
        file["x"].attrs["_Unsigned"] = "false"
    assert H5LazyDataset(path, "x").read_batch([0, 1, 2]).tolist() == [-1, 0, 1]


# Any attributes ------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([np.float32, np.float64, np.int16, np.int32])
SMALL = st.sampled_from([0, 1, 2, 10, -3, 7])


@st.composite
def arrays(draw):
    """Integers or floats, and attributes of the conventions for some."""
    dtype = np.dtype(draw(st.sampled_from(["i1", "u1", "i2", "u2", "i4", "i8", "f4", "f8", ">i2"])))
    shape = (N, *draw(st.sampled_from([(), (3,)])))
    low = max(-4, np.iinfo(dtype).min) if dtype.kind in "iu" else -4
    values = (np.arange(np.prod(shape)).reshape(shape) % 11 + low).astype(dtype)
    attributes = {}
    for name in ("scale_factor", "add_offset", "_FillValue", "missing_value"):
        if draw(st.booleans()):
            value = draw(NUMBERS)(draw(SMALL)) * (draw(st.sampled_from([1, 0.5])) if name == "scale_factor" else 1)
            attributes[name] = np.array([value]) if draw(st.booleans()) else value
    if dtype.kind in "iu" and draw(st.integers(0, 3)) == 0:
        attributes["_Unsigned"] = draw(st.sampled_from([str, np.bytes_]))(draw(st.sampled_from(["true", "false"])))
    return values, attributes


def expected_values(values, attributes):
    """What a reader of the conventions gives, one value at a time; None for missing ones."""
    native = values.astype(values.dtype.newbyteorder("="))
    if values.dtype.kind == "f":
        return native.reshape(-1).tolist()
    scale = float(np.ravel(attributes.get("scale_factor", 1))[0])
    offset = float(np.ravel(attributes.get("add_offset", 0))[0])
    marks = {float(np.ravel(attributes[name])[0]) for name in ("_FillValue", "missing_value") if name in attributes}
    bits = 8 * native.dtype.itemsize
    found = []
    for value in native.reshape(-1).tolist():
        seen = value
        if attributes.get("_Unsigned") in ("true", b"true") and value < 0:
            seen = value + 2**bits
        if attributes.get("_Unsigned") in ("false", b"false") and value >= 2 ** (bits - 1):
            seen = value - 2**bits
        found.append(None if value in marks or seen in marks else seen * scale + offset)
    return found


def check_any_attributes(make_h5, values, attributes):
    path = make_h5(v=values, y=np.arange(N))
    with h5py.File(path, "a") as file:
        file["v"].attrs.update(attributes)
        stored = file["v"][:]
    means = expected_values(values, attributes)
    is_plain = means == stored.reshape(-1).tolist()
    raw = str(stored.dtype.newbyteorder("="))
    readers = [
        lambda dtype: H5LazyDataset(path, "v", x_dtype=dtype).read_batch(range(N)),
        lambda dtype: shard(path, "v", dtype_x=dtype or "float64").read_batch(range(N)),
        lambda dtype: CombinedHDF5Dataset(path, ["v"], dtype=dtype and {"v": dtype}).read_batch(range(N))["v"],
    ]
    for read in readers:
        if values.dtype.kind == "f" or not attributes:
            assert np.array_equal(read(None).numpy(), stored)
        elif not is_plain:
            with pytest.raises(H5ValueError, match="packed integers"):
                read(None)
        else:  # refused only if it says that some value would be missing
            with suppress(H5ValueError):
                assert np.array_equal(read(None).numpy(), stored)
        assert np.array_equal(read(raw).numpy(), stored)  # asked for by name
    if values.ndim == 1:
        seen = []

        def look(column):
            seen.append(column.copy())
            return np.ones(len(column), bool)

        is_beyond = None in means and max(abs(value or 0) for value in means) > 2**53
        with suppress(H5ValueError) if is_beyond else nullcontext():  # some such values fit no float
            CombinedHDF5Dataset(path, ["y"], where={"v": look})
        if is_beyond and not seen:
            return
        decoded = np.array([np.nan if value is None else value for value in means])
        assert np.allclose(seen[0].astype("f8"), decoded, rtol=1e-6, atol=1e-6, equal_nan=True)


BEYOND_FLOATS = np.arange(-4, N - 4), {"missing_value": np.float32(0), "_Unsigned": "true"}


@pytest.mark.wide
@given(case=arrays())
@example(case=BEYOND_FLOATS)
@example(case=(BEYOND_FLOATS[0], {"add_offset": np.float32(1), "_FillValue": np.float32(0), "_Unsigned": "true"}))
def test_any_attributes_give_plain_values_or_an_error(make_h5, case):
    check_any_attributes(make_h5, *case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=examples(2500))
@given(case=arrays())
def test_thousands_of_attributes_give_plain_values_or_an_error(make_h5, case):
    check_any_attributes(make_h5, *case)


# Scales by the conventions of other formats ----------------------------------------------------------------------

RAW = np.arange(12, dtype="u1").reshape(4, 3)


def of_hdfeos(path, offset=0.0):
    with h5py.File(path, "w") as file:
        array = file.create_dataset("HDFEOS/SWATHS/a/Data Fields/x", data=RAW.astype("i2"))
        array.attrs["ScaleFactor"], array.attrs["Offset"] = np.array([0.5]), np.array([offset])
        array.attrs["_FillValue"], array.attrs["MissingValue"] = np.int16(3), np.int16(4)
    return "HDFEOS/SWATHS/a/Data Fields/x", np.where(np.isin(RAW, (3, 4)), np.nan, RAW * 0.5)


def of_jaxa(path):
    with h5py.File(path, "w") as file:
        file["Image_data/x"] = RAW.astype("u2")
        file["Image_data/x"].attrs.update({"Slope": np.float32([0.5]), "Offset": np.float32([-8])})
    return "Image_data/x", RAW * 0.5 - 8


def of_odim(path, gain=0.5, level="dataset1/data1"):
    with h5py.File(path, "w") as file:
        file.attrs["Conventions"] = np.bytes_("ODIM_H5/V2_2")
        file["dataset1/data1/data"] = RAW
        file.create_group(f"{level}/what").attrs.update(
            {"gain": gain, "offset": -32.0, "nodata": 11.0, "undetect": 0.0}
        )
    return "dataset1/data1/data", np.where(np.isin(RAW, (0, 11)), np.nan, RAW * gain - 32)


def of_minc(path, high=1.1):
    with h5py.File(path, "w") as file:
        group = file.create_group("minc-2.0/image/0")
        group["image"] = RAW
        group["image"].attrs["valid_range"] = [0.0, 10.0]
        group["image-min"], group["image-max"] = 0.1, high
    return "minc-2.0/image/0/image", np.where(RAW > 10, np.nan, RAW / 10 * (high - 0.1) + 0.1)


FORMATS = {"HDF-EOS5": of_hdfeos, "JAXA": of_jaxa, "ODIM_H5": of_odim, "MINC2": of_minc}


@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_other_formats_are_refused_or_decoded_whole(tmp_path, name):
    path = str(tmp_path / "a.h5")
    key, expected = FORMATS[name](path)
    stored = str(h5py.File(path)[key].dtype)
    with pytest.raises(H5ValueError, match="packed integers"):
        H5LazyDataset(path, key, sample="row")
    decoded = H5LazyDataset(path, key, decode={key: "cf"}, sample="row").read_batch(range(4))
    np.testing.assert_allclose(decoded.numpy(), expected, rtol=1e-6)
    raw = H5LazyDataset(path, key, x_dtype=stored, sample="row").read_batch(range(4))
    np.testing.assert_array_equal(raw.numpy(), RAW)
    assert inspect_file(path).advice.settings["decode"] == {key: "cf"}


def test_a_scale_with_several_meanings_is_refused_with_both(tmp_path):
    path = str(tmp_path / "a.h5")
    key, _ = of_hdfeos(path, offset=273.15)
    for asked in ({}, {"decode": {key: "cf"}}):
        with pytest.raises(H5ValueError) as error:
            H5LazyDataset(path, key, **asked)
        assert "x * 0.5 + 273.15 or (x - 273.15) * 0.5" in str(error.value)
        assert f"decode={{{key!r}: lambda x: x * 0.5 + 273.15}}" in str(error.value)
    decoded = H5LazyDataset(path, key, decode={key: lambda x: x * 0.5 + 273.15}, sample="row").read_batch([1])
    np.testing.assert_allclose(decoded.numpy(), RAW[[1]] * 0.5 + 273.15)


def test_scales_outside_of_an_array_are_those_of_its_own_file(tmp_path):
    """Arrays whose headers are equal are described from one another, but not what is declared elsewhere."""
    for number, (write, values) in enumerate({of_odim: (0.5, 0.25, 2.0, 0.5), of_minc: (1.1, 2.1, 3.1, 1.1)}.items()):
        paths = [str(tmp_path / f"{number}_{at}.h5") for at in range(4)]
        made = [write(path, value) for path, value in zip(paths, values, strict=True)]
        key = made[0][0]
        decoded = H5LazyDataset(paths, key, decode={key: "cf"}, sample="row").read_batch(range(16))
        np.testing.assert_allclose(decoded.numpy(), np.concatenate([one for _, one in made]), rtol=1e-6)


def test_a_scale_of_each_slice_is_refused(tmp_path):
    path = str(tmp_path / "a.mnc")
    key, _ = of_minc(path)
    with h5py.File(path, "a") as file:
        del file["minc-2.0/image/0/image-max"]
        file["minc-2.0/image/0/image-max"] = [1.1, 1.2, 1.3, 1.4]
    with pytest.raises(H5ValueError, match="Each slice has a scale of its own"):
        H5LazyDataset(path, key, decode={key: "cf"})


@pytest.mark.parametrize("level", ["dataset1", "dataset1/data1"])
def test_odim_declares_a_scale_at_any_level(tmp_path, level):
    key, expected = of_odim(str(tmp_path / "a.h5"), level=level)
    decoded = H5LazyDataset(str(tmp_path / "a.h5"), key, decode={key: "cf"}, sample="row").read_batch(range(4))
    np.testing.assert_allclose(decoded.numpy(), expected, rtol=1e-6)
