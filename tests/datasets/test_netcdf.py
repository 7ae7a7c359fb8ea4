"""Packed numbers are decoded as netCDF4 decodes them, each file by its own formula; in netCDF files without asking."""

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

import lightning_h5.readers.select
import lightning_h5.samples.row_table
from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
    check_files,
    compute_stats,
)
from lightning_h5.datasets.normalize import write_stats
from lightning_h5.hdf5 import Packing
from lightning_h5.readers import Unpack

N = 24


@pytest.fixture
def months(tmp_path: Path) -> tuple[list[str], dict[str, Any]]:
    """Two months as archives write them: other scales, missing values, an unlimited axis; what netCDF4 reads."""
    netcdf = pytest.importorskip("netCDF4")
    rng, paths, values = np.random.default_rng(0), [], {"t2m": [], "sst": [], "flag": []}
    for month in range(2):
        paths.append(str(tmp_path / f"{month}.nc"))
        with netcdf.Dataset(paths[-1], "w") as file:
            for name, size in (("time", None), ("lat", 3), ("lon", 40)):
                file.createDimension(name, size)
            time = file.createVariable("time", "i4", ("time",))
            time.units, time[:] = "hours since 1900-01-01", np.arange(N) + N * month
            axes = ("time", "lat", "lon")
            options = {"zlib": True, "shuffle": True, "chunksizes": (5, 3, 40)}
            packed = file.createVariable("t2m", "i2", axes, fill_value=-32767, **options)
            packed.scale_factor, packed.add_offset = 0.0012 + month * 1e-4, 273.15 + month
            field = np.ma.masked_array(280 + 3 * rng.normal(size=(N, 3, 40)), rng.random((N, 3, 40)) < 0.1)
            packed[:] = field
            file.createVariable("sst", "f4", axes, fill_value=9.96921e36, **options)[:] = field
            file.createVariable("flag", "i1", ("time",))[:] = np.arange(N) % 3
        with netcdf.Dataset(paths[-1]) as file:
            for name, each in values.items():
                each.append(np.ma.filled(file[name][:].astype("f8"), np.nan))
    return paths, {name: np.concatenate(each) for name, each in values.items()}


def assert_close(found: Any, expected: Any) -> None:
    """Equal but for the rounding to float32."""
    np.testing.assert_allclose(found, expected, rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["lazy", "rank cached", "combined"])
def test_netcdf_files_are_decoded_without_asking(months: Any, kind: str, num_workers: int) -> None:
    paths, expected = months
    more: dict[str, Any] = {"num_workers": num_workers, "batch_size": 5, "with_index": True, "sample": "row"}
    module: Any
    if kind == "combined":
        module = CombinedHDF5DataModule(paths, fields=["t2m", "sst", "flag"], **more)
    else:
        made = {"lazy": LazyH5DataModule, "rank cached": RankCachedH5DataModule}[kind]
        module = made(paths, x_key={"t2m": "t2m", "sst": "sst", "flag": "flag"}, **more)
    module.setup("fit")
    seen = []
    for batch in module.train_dataloader():
        rows = batch["index"].numpy()
        assert batch["t2m"].dtype == batch["sst"].dtype == torch.float32
        for name in ("t2m", "sst"):
            assert_close(batch[name].numpy(), expected[name][rows])
        assert batch["flag"].tolist() == expected["flag"][rows].tolist()  # without attributes as it is stored
        seen += rows.tolist()
    assert sorted(seen) == list(range(2 * N))
    module.teardown("fit")


def test_windows_reach_over_files_and_patches_are_decoded(months: Any) -> None:
    paths, expected = months
    dataset = H5LazyDataset(paths, "t2m", segments={"join": "time"}, window=[0, 2])
    assert len(dataset) == 2 * N - 1
    assert_close(dataset[N - 1].numpy(), expected["t2m"][N - 1 : N + 1])
    patches = H5LazyDataset(paths, "t2m", patch={"shape": [4, 2, 16], "stride": [4, 1, 8]})
    assert_close(patches[0].numpy(), expected["t2m"][:4, :2, :16])


def test_statistics_and_normalization_are_of_decoded_values(months: Any, tmp_path: Path) -> None:
    paths, expected = months
    compute_stats(paths, "t2m").save(tmp_path / "stats.json")
    batch = H5LazyDataset(paths, "t2m", normalize=tmp_path / "stats.json", sample="row").read_batch(range(2 * N))
    wanted = (expected["t2m"] - np.nanmean(expected["t2m"])) / np.nanstd(expected["t2m"])
    np.testing.assert_allclose(batch.numpy(), wanted, atol=2e-5)


def test_the_stored_dtype_by_name_loads_integers_as_they_are_stored(months: Any) -> None:
    paths, _ = months
    with h5py.File(paths[0]) as file:
        stored = file["t2m"][...]
    dataset = H5LazyDataset(paths[0], "t2m", x_dtype="int16", sample="row")
    np.testing.assert_array_equal(dataset.read_batch(range(N)).numpy(), stored)


@pytest.mark.parametrize("make", [H5LazyDataset, RankMemCachedH5Dataset])
def test_other_files_are_decoded_if_that_is_asked_for(tmp_path: Path, make: Any) -> None:
    paths = [str(tmp_path / name) for name in ("a.h5", "b.h5", "c.h5")]
    for path, scale in zip(paths, (0.5, 0.25, None), strict=True):
        with h5py.File(path, "w") as file:
            values = np.arange(12, dtype="i2").reshape(4, 3)
            file["x"] = values if scale is not None else values.astype("f4")
            if scale is not None:
                file["x"].attrs.update({"scale_factor": scale, "_FillValue": np.int16(7)})
    with pytest.raises(H5ValueError, match="'cf'"):
        make(paths[:2], "x", x_dtype=None)
    batch = make(paths, "x", x_dtype=None, decode={"*": "cf"}).read_batch(range(12)).numpy()
    plain = np.arange(12, dtype="f4").reshape(4, 3)
    packed = np.where(plain == 7, np.nan, plain)
    np.testing.assert_array_equal(batch, np.concatenate([packed * 0.5, packed * 0.25, plain]))


def test_floats_and_nwb_are_decoded_only_if_that_is_asked_for(tmp_path: Path) -> None:
    path = str(tmp_path / "session.nwb")
    with h5py.File(path, "w") as file:
        file.attrs["nwb_version"] = "2.7.0"
        file["raw"] = np.arange(8, dtype="i2").reshape(4, 2)
        file["raw"].attrs.update({"conversion": 0.125, "offset": 1.0})
        file["filled"] = np.array([1.0, -99.0, 3.0, 4.0], "f4")
        file["filled"].attrs["missing_value"] = np.float32(-99)
    stored = H5LazyDataset(path, ["raw", "filled"])[1]
    assert stored[0].tolist() == [2, 3]
    assert float(stored[1]) == -99
    raw, filled = H5LazyDataset(path, ["raw", "filled"], decode={"*": "cf"})[1]
    assert raw.tolist() == [1.25, 1.375]
    assert torch.isnan(filled)


@pytest.mark.parametrize("options", [{}, {"zlib": True, "chunksizes": (2, 5)}], ids=["contiguous", "gzip"])
def test_characters_along_the_last_axis_are_one_text(tmp_path: Path, options: Any) -> None:
    netcdf, paths = pytest.importorskip("netCDF4"), [str(tmp_path / f"{at}.nc") for at in range(3)]
    names = np.array(["alpha", "be", "gäm", "be"])
    for path in paths:
        with netcdf.Dataset(path, "w") as file:
            for name, size in {"row": 4, "word": 2, "length": 5}.items():
                file.createDimension(name, size)
            file.createVariable("x", "f4", ("row",))[:] = range(4)
            letters = np.char.encode(names, "utf8").astype("S5")[:, None].view("S1")
            file.createVariable("name", "S1", ("row", "length"), **options)[:] = letters
            words = file.createVariable("words", "S1", ("row", "word", "length"))
            words[:] = np.array([[b"ab", b"c"], [b"de", b"fgh"]] * 2, "S5")[..., None].view("S1")
    text = [*names, *names, *names]
    for make in (H5LazyDataset, RankMemCachedH5Dataset):
        assert make(paths, "x", "name").read_batch(range(12))[1] == text
        assert make(paths, "x", "words").read_batch([1])[1] == [["de", "fgh"]]
    assert len(CombinedHDF5Dataset(paths, ["x"], where={"name": "be"})) == 6
    for module in (LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule):
        datamodule = module(paths, x_key="x", y_key="name", decode={"name": "category"}, shuffle=False)
        datamodule.setup("fit")
        ((_, classes),) = datamodule.train_dataloader()
        assert [datamodule.categories["name"][number] for number in classes] == text
    part = H5LazyDataset(paths, "x", "words", select={"words": {1: 1}})
    assert part[1][1] == ["f", "g", "h", "", ""]  # a part of the array has characters
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["x"], file["dna"] = np.arange(2), np.array([[b"A", b"C"], [b"G", b"T"]])
        file["base"] = np.arange(2)
        file["base"].make_scale("base")
        file["dna"].dims[1].attach_scale(file["base"])
    assert H5LazyDataset(str(tmp_path / "plain.h5"), "x", "dna")[1][1] == ["G", "T"]
    assert not check_files(paths).errors


def test_floats_with_missing_values_that_are_loaded_as_stored_are_logged(tmp_path: Path, caplog: Any) -> None:
    paths = [str(tmp_path / f"{at}.h5") for at in range(2)]
    text = "'y' declares missing values (_FillValue=-9999.0), which are loaded as the numbers that are stored"
    for path in paths:
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = np.zeros((4, 2), "f4"), np.array([1, -9999, 3, 4], "f4")
            file["y"].attrs["_FillValue"] = np.float32(-9999)
            file["x"].attrs["_FillValue"] = np.float32(np.nan)
    for module in (LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule):
        caplog.clear()
        datamodule = module(paths[0], paths[1], x_key="x", y_key="y")
        for _ in range(2):
            datamodule.setup("fit")
        assert [text in message for message in caplog.messages if "missing" in message] == [True]
    caplog.clear()
    compute_stats(paths, "y")
    assert [text in message for message in caplog.messages] == [True]
    problems = [problem for problem in check_files(paths).warnings if problem.kind == "missing values"]
    assert [problem.array for problem in problems] == ["y", "y"]
    caplog.clear()
    LazyH5DataModule(paths[0], x_key="x", y_key="y", decode={"y": "cf"}).setup("fit")
    compute_stats(paths, "y", decode={"y": "cf"})
    assert not [message for message in caplog.messages if "missing" in message]


def test_the_factors_of_nwb_channels_are_applied_or_an_error_names_them(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.nwb") for number in range(4)]
    for path, factors in zip(paths, ([2.0, 2.0], [1.0, 1.0], [1.0, 10.0], [1.0, np.nan]), strict=True):
        with h5py.File(path, "w") as file:
            file.attrs["nwb_version"] = "2.7.0"
            file["es/data"] = np.arange(8, dtype="i2").reshape(4, 2)
            file["es/data"].attrs.update({"conversion": 0.5, "offset": 3.0})
            file["es/channel_conversion"] = factors
    equal = H5LazyDataset(paths[:2], "es/data", decode={"*": "cf"}, sample="row")
    assert equal.read_batch([1, 5]).tolist() == [[5, 6], [4, 4.5]]  # of files with headers that are alike
    for path in paths[2:]:
        with pytest.raises(H5ValueError, match=r"Each channel has a factor of its own: x \* 0.5 \* channel_conversion"):
            H5LazyDataset(path, "es/data", decode={"*": "cf"})
        assert H5LazyDataset(path, "es/data")[1].tolist() == [2, 3]
    mine = H5LazyDataset(paths[2], "es/data", decode={"es/data": lambda x: x * 0.5 * np.array([1, 10]) + 3})
    assert mine[0].tolist() == [3, 8]


@pytest.mark.wide
@given(
    st.sampled_from(["i1", "u1", "i2", "u2", "i4", "f4", "f8"]),
    st.floats(-10, 10).filter(bool),
    st.floats(-1e3, 1e3),
    st.lists(st.integers(0, 100), max_size=3),
    st.integers(0, 40),
)
def test_loops_and_numpy_decode_the_same(dtype: str, scale: float, offset: float, missing: Any, n: int) -> None:
    rows = np.random.default_rng(n).integers(0, 100, (n, 3)).astype(dtype)
    packing = Packing(attributes=(), scale=scale, offset=offset, missing=tuple(missing))
    expected = np.where(np.isin(rows, np.array(missing, dtype)), np.nan, rows.astype("f8") * scale + offset)
    for codec in (Unpack(packing), Unpack(packing).compiled()):
        out = np.empty(rows.shape, "f4")
        codec.decode(rows, out)
        np.testing.assert_array_equal(out, expected.astype("f4"))


def of_formulas(path: Path, n_formulas: int, dtype: str, missing: list[int], grouped: bool) -> tuple[list[str], Any]:
    """Return files of packed numbers, and what they mean in 64 bits."""
    rng, paths, values = np.random.default_rng(0), [], []
    for number in range(3):
        paths.append(str(path / f"{number}.h5"))
        stored = rng.integers(0, 100, (11, 2, 5)).astype(dtype)
        scale, offset = 0.7 + number % n_formulas, 3.1 - number % n_formulas
        with h5py.File(paths[-1], "w") as file:
            array = file.create_dataset("a/x" if grouped else "x", data=stored, chunks=(3, 1, 5), compression="gzip")
            array.attrs.update({"scale_factor": scale, "add_offset": offset})
            if missing:
                array.attrs["_FillValue"] = np.array(missing[0], dtype)
            if missing[1:]:
                array.attrs["missing_value"] = np.array(missing[1], dtype)
        values.append(np.where(np.isin(stored, missing), np.nan, stored * scale + offset))
    return paths, np.concatenate(values)


STATS = [None, ("mean", 20.0, 3.0), ("channel", [20.0, 30.0], [3.0, 0.0])]


@pytest.mark.wide
@settings(max_examples=examples(30))
@given(
    st.integers(1, 3),
    st.sampled_from(["u1", "i2", "i4", "f2", "f4", "f8"]),
    st.sampled_from([[], [7], [7, 9]]),
    st.booleans(),
    st.sampled_from(STATS),
    st.integers(0, 2000) | st.just(1 << 20),
)
def test_numbers_decoded_as_they_are_copied_are_those_decoded_in_blocks(
    tmp_path_factory: Any, n_formulas: int, dtype: str, missing: Any, windows: bool, stats: Any, cache_bytes: int
) -> None:
    compare_ways(tmp_path_factory.mktemp("formulas"), n_formulas, dtype, missing, windows, stats, cache_bytes)


@pytest.mark.parametrize("cache_bytes", [700, 1 << 20])
def test_packed_integers_are_decoded_as_they_are_copied(tmp_path: Path, cache_bytes: int) -> None:
    compare_ways(tmp_path, 2, "i2", [7], False, STATS[2], cache_bytes)


def compare_ways(
    folder: Path, n_formulas: int, dtype: str, missing: Any, windows: bool, stats: Any, cache_bytes: int
) -> None:
    """Read the same rows decoded either way, twice, and compare them with each other and with 64 bits."""
    pytest.importorskip("numba")
    paths, expected = of_formulas(folder, n_formulas, dtype, missing, windows)
    more: dict[str, Any] = {"segments": "*", "window": {"length": 2, "stride": 1}} if windows else {"sample": "row"}
    if stats is not None:
        of_field = {"mean": stats[1], "std": stats[2], **({"channel_axis": 0} if stats[0] == "channel" else {})}
        write_stats(folder / "stats.json", {"x": of_field})
        more["normalize"] = folder / "stats.json"
    rows = np.random.default_rng(1).integers(0, 30 if windows else 33, 40)
    found = []
    for least in (0, 1 << 60):
        with (
            mock.patch.object(lightning_h5.readers.select, "MIN_COMPILED", least),
            mock.patch.object(lightning_h5.samples.row_table, "HELD_BYTES", 0),
        ):
            dataset = H5LazyDataset(paths, "x", decode={"x": "cf"}, **more)
            dataset.read_with(cache_bytes=cache_bytes, retain=False)
            found.append(dataset.read_batch(rows).numpy())
            np.testing.assert_array_equal(dataset.read_batch(rows).numpy(), found[-1])  # with all chunks in memory
            (reader,) = dataset._chunked_readers().values()
        is_stored = least == 0 and dtype[0] != "f"
        assert (reader.dtype == dtype) == (is_stored or dtype[0] == "f")
    np.testing.assert_array_equal(found[0], found[1])
    if windows:
        starts = np.array([one for file in range(3) for one in range(11 * file, 11 * file + 10)])
        wanted = np.stack([expected[starts[rows]], expected[starts[rows] + 1]], axis=1)
    else:
        wanted = expected[rows]
    if stats is not None:
        mean, std = (np.array(one).reshape((-1, 1) if np.ndim(one) else ()) for one in stats[1:])
        wanted = np.where(std == 0, np.where(np.isnan(wanted), np.nan, 0), (wanted - mean) / np.where(std, std, 1))
    np.testing.assert_allclose(
        found[0], wanted, rtol=2e-3 if dtype == "f2" else 1e-5, atol=2e-2 if dtype == "f2" else 2e-5
    )


def test_combined_decodes_a_field_that_filters_see_too(months: Any) -> None:
    paths, expected = months
    dataset = CombinedHDF5Dataset(paths, ["t2m"], where={"flag": [1, 2]}, sample="row")
    kept = np.flatnonzero(expected["flag"] > 0)
    assert len(dataset) == len(kept)
    assert_close(dataset.read_batch([0, 5])["t2m"].numpy(), expected["t2m"][kept[[0, 5]]])


# The netCDF4 library as the oracle ----------------------------------------------------------------------------------

MARK, LOW, HIGH = 7, 3, 90


@st.composite
def variables(draw: st.DrawFn) -> dict[str, Any]:
    """A dtype, and attributes that the netCDF4 library looks at, all exact in that dtype."""
    dtype = np.dtype(draw(st.sampled_from(["i1", "u1", "i2", "u2", "i4", "u4", "i8", "f4", "f8"])))
    attributes: dict[str, Any] = {}
    if draw(st.booleans()):
        attributes["scale_factor"] = draw(st.sampled_from([1.0, 0.5, -2.0, np.float32(0.25)]))
    if draw(st.booleans()):
        attributes["add_offset"] = draw(st.sampled_from([0.0, 1.5, -100.0]))
    if draw(st.booleans()):
        attributes["missing_value"] = draw(st.sampled_from([dtype.type(MARK), np.array([MARK, 9], dtype), "-1.e+34f"]))
    limits = draw(st.sampled_from(["none", "range", "min", "max", "both", "wide"]))
    if limits in ("range", "wide"):
        attributes["valid_range"] = np.array([LOW, HIGH], "i8" if limits == "wide" else dtype)
    if limits in ("min", "both"):
        attributes["valid_min"] = dtype.type(LOW)
    if limits in ("max", "both"):
        attributes["valid_max"] = draw(st.sampled_from([dtype.type(HIGH), "ninety", 1e300]))
    if dtype.kind == "i" and dtype.itemsize > 1 and draw(st.booleans()):  # netCDF4 itself fails for bytes
        attributes["_Unsigned"] = draw(st.sampled_from(["true", "True", "false"]))
    fill = draw(st.sampled_from([None, None, 11]))
    return {"dtype": dtype, "attributes": attributes, "fill": fill, "has_default": draw(st.booleans())}


def write_variable(path: Path, dtype: np.dtype[Any], attributes: Any, fill: Any, has_default: bool) -> tuple[Any, Any]:
    """Return what the netCDF4 library reads, with NaN for masked values, and the dtype that it reads."""
    netcdf = pytest.importorskip("netCDF4")
    stored = np.array([0, 1, LOW, MARK, 9, 11, 50, HIGH, 100, 101], dtype).reshape(5, 2)
    if has_default and dtype.itemsize > 1:
        stored[2, 1] = netcdf.default_fillvals[dtype.str[1:]]
    with netcdf.Dataset(path, "w") as file:
        file.createDimension("row", None)
        file.createDimension("column", 2)
        variable = file.createVariable("x", dtype, ("row", "column"), fill_value=fill, chunksizes=(2, 2))
        variable.set_auto_maskandscale(False)
        variable[:] = stored
        for name, value in attributes.items():
            variable.setncattr(name, value)
    with warnings.catch_warnings(), netcdf.Dataset(path) as file:
        warnings.simplefilter("ignore")  # of attributes that it ignores
        read = file["x"][:]
    return np.ma.filled(read.astype("f8"), np.nan), read.dtype


@pytest.mark.filterwarnings("error")
@settings(max_examples=examples(60))
@given(variables())
def test_variables_are_masked_and_scaled_as_netcdf4_does(tmp_path_factory: Any, variable: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("netcdf") / "a.nc"
    expected, dtype = write_variable(path, **variable)
    floats = H5LazyDataset(str(path), "x", decode={"x": "cf"}, sample="row").read_batch(range(5))
    np.testing.assert_allclose(floats.numpy(), expected, rtol=1e-6)
    dataset = H5LazyDataset(str(path), "x", sample="row")
    columns = CombinedHDF5Dataset(str(path), ["x"], dtype=None, sample="row")
    stays = not dataset.plans[0].dtype.is_floating_point
    assert stays <= (dtype.kind in "iu")
    if stays and np.isnan(expected).any():
        for read in (lambda: dataset.read_batch(range(5)), lambda: columns.read_batch(range(5))):
            with pytest.raises(H5ValueError, match=r"'x' has a missing value.*decode=\{'x': 'cf'\}"):
                read()
        rows = np.flatnonzero(~np.isnan(expected).any(axis=1))
        np.testing.assert_array_equal(dataset.read_batch(rows).numpy(), expected[rows])
    else:
        np.testing.assert_allclose(dataset.read_batch(range(5)).numpy(), expected, rtol=1e-6)
        np.testing.assert_allclose(columns.read_batch(range(5))["x"].numpy(), expected, rtol=1e-6)


def of_counts(path: Path, **options: Any) -> str:
    """Write whole numbers of a netCDF file: labels, and counts of which one was never written."""
    with h5py.File(path, "w") as file:
        file.attrs["_NCProperties"] = np.bytes_("version=2,netcdf=4.9.2,hdf5=1.14.3")
        counts = np.arange(40, dtype="i4").reshape(20, 2)
        counts[13, 1] = -2147483647
        file.create_dataset("counts", data=counts, chunks=(4, 2), **options)
        file["labels"] = np.arange(20, dtype="i8") % 3
    return str(path)


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {}], ids=["compressed", "plain"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
def test_whole_numbers_of_netcdf_stay_whole_and_a_default_fill_is_an_error(
    tmp_path: Path, make: Any, num_workers: int, options: Any
) -> None:
    path = of_counts(tmp_path / "counts.nc", **options)
    is_combined = make is CombinedHDF5DataModule

    def first(key: str, **more: Any) -> torch.Tensor:
        fields = {"fields": [key]} if is_combined else {"x_key": key}
        module = make(
            path, **fields, **{"x_dtype": None, **more}, batch_size=20, shuffle=False, num_workers=num_workers
        )
        module.setup("fit")
        batch = next(iter(module.train_dataloader()))
        module.teardown("fit")
        return batch[key] if is_combined else batch

    assert first("labels").tolist() == [n % 3 for n in range(20)]
    assert first("labels").dtype == torch.int64
    with pytest.raises(H5ValueError, match="-2147483647 is netCDF's default fill value"):
        first("counts")
    floats = {"x_dtype": {"counts": "float32"} if is_combined else "float32"}
    for more in (floats, {"decode": {"counts": "cf"}}):
        values = first("counts", **more)
        assert values.dtype.is_floating_point
        assert torch.isnan(values).sum() == 1
    raw = first("counts", x_dtype={"counts": "int32"} if is_combined else "int32")
    assert raw[13].tolist() == [26, -2147483647]


def test_a_default_fill_is_no_value_for_statistics_filters_and_normalization(tmp_path: Path) -> None:
    path = of_counts(tmp_path / "counts.nc")
    with pytest.raises(H5ValueError, match="'counts' has a missing value"):
        compute_stats(path, "counts")
    stats = compute_stats(path, "counts", decode={"counts": "cf"})
    assert stats.arrays[0].n_nan == 1
    assert compute_stats(path, "labels").arrays[0].max == 2
    stats.save(tmp_path / "stats.json")
    with pytest.raises(H5ValueError, match="'counts' has a missing value"):
        H5LazyDataset(path, "counts", normalize=tmp_path / "stats.json").read_batch([13])
    mean, std = float(stats.arrays[0].mean), float(stats.arrays[0].std)
    whole = H5LazyDataset(path, "counts", normalize=tmp_path / "stats.json").read_batch([3])
    np.testing.assert_allclose(whole.numpy(), [[(6 - mean) / std, (7 - mean) / std]], rtol=1e-5)


def test_nothing_is_missing_in_bytes_and_in_variables_without_filling(tmp_path: Path) -> None:
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("row", 4)
        for name, dtype, fill in (("bytes", "u1", None), ("counts", "i4", False), ("reals", "f4", False)):
            variable = file.createVariable(name, dtype, ("row",), fill_value=fill)
            variable.set_auto_mask(False)
            variable[:] = np.array([1, netcdf.default_fillvals[dtype], 3, 4], dtype)
    for name in ("bytes", "counts", "reals"):
        with h5py.File(tmp_path / "a.nc") as file:
            stored = file[name][...]
        np.testing.assert_array_equal(H5LazyDataset(str(tmp_path / "a.nc"), name).read_batch(range(4)), stored)


def test_text_for_a_missing_value_is_ignored_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file.attrs["_NCProperties"] = np.bytes_("version=2,netcdf=4.9.2,hdf5=1.14.3")
        file["noted"] = np.arange(6, dtype="f4")
        file["noted"].attrs["missing_value"] = "-1.e+34f"
    for _ in range(2):
        assert H5LazyDataset(str(tmp_path / "a.nc"), "noted").read_batch(range(6)).tolist() == list(range(6))
    assert [text for text in caplog.messages if "missing_value='-1.e+34f'" in text and "is ignored" in text] == [
        text for text in caplog.messages if "noted" in text
    ][:1]


def test_a_scale_of_one_makes_floats(tmp_path: Path) -> None:
    for name, is_netcdf in (("a.nc", True), ("a.h5", False)):
        with h5py.File(tmp_path / name, "w") as file:
            if is_netcdf:
                file.attrs["Conventions"] = "CF-1.8"
            file["x"] = np.arange(6, dtype="i2")
            file["x"].attrs["scale_factor"] = 1.0
        asked = {} if is_netcdf else {"decode": {"x": "cf"}}
        assert H5LazyDataset(str(tmp_path / name), "x", **asked).read_batch([2]).dtype == torch.float32
    assert H5LazyDataset(str(tmp_path / "a.h5"), "x").read_batch([2]).dtype == torch.int16
