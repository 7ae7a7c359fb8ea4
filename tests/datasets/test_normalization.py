"""Normalised fields and channels moved last: what NumPy computes in 64 bits, in all datasets and data modules."""

import json
import pickle
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from arguments import nested_files
from factories import Stored
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.cli import LightningCLI
from lightning_models import Recorder
from tiers import examples

from lightning_h5 import CombinedHDF5DataModule, H5FileError, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.datasets import (
    CombinedHDF5Dataset,
    FieldStats,
    H5LazyDataset,
    RankMemCachedH5Dataset,
    multiply_add,
    read_stats,
    write_stats,
)

N = 24
DTYPES = ("u1", "i2", "i4", "i8", "f2", "f4", "f8")
SPREADS = {"u1": (100, 20), "i2": (-900, 700), "i4": (10**8, 10**5), "i8": (10**12, 10**7), "f2": (3, 1)}
DATASETS = ("lazy", "combined", "rank cached")


def values_of(dtype, shape, seed):
    """Values within 8 deviations of their mean."""
    mean, std = SPREADS.get(dtype, (100, 3) if dtype == "f4" else (1e5, 1e-1))
    drawn = np.random.default_rng(seed).normal(size=shape).clip(-5, 5) * std + mean
    return (np.rint(drawn) if dtype[0] in "iu" else drawn).astype(dtype)


def stats_of(values, channel_axis=None):
    """What a file of statistics has of a field, computed in 64 bits."""
    wide = values.astype("f8")
    axes = tuple(
        axis for axis in range(wide.ndim) if channel_axis is None or axis != channel_axis % (wide.ndim - 1) + 1
    )
    found = {"mean": wide.mean(axes).tolist(), "std": wide.std(axes).tolist(), "row_shape": list(wide.shape[1:])}
    return found if channel_axis is None else found | {"channel_axis": channel_axis}


def by_numpy(values, stats):
    """The oracle: all in 64 bits."""
    wide, mean, std = values.astype("f8"), np.array(stats["mean"]), np.array(stats["std"])
    if mean.ndim:
        shape = [1] * wide.ndim
        shape[1:][stats["channel_axis"]] = 1
        shape[stats["channel_axis"] % (wide.ndim - 1) + 1] = -1
        mean, std = mean.reshape(shape), std.reshape(shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(std > 0, (wide - mean) / std, 0.0)


def dataset_of(kind, path, field="x", *, dtype=None, **options):
    if kind == "lazy":
        return H5LazyDataset(path, {field: field}, **nested_files(x_dtype=dtype, **options))
    if kind == "combined":
        return CombinedHDF5Dataset(path, [field], **nested_files(dtype=dtype, **options))
    return RankMemCachedH5Dataset(path, {field: field}, **nested_files(x_dtype=dtype, rank=0, world_size=1, **options))


def stored(values, is_chunked):
    return Stored(values, "chunked", (5, *values.shape[1:]), {"compression": "gzip"}) if is_chunked else values


def stats_file(folder, fields):
    path = folder / "stats.json"
    path.write_text(json.dumps({"fields": fields}))
    return path


@pytest.mark.wide
@pytest.mark.parametrize("kind", DATASETS)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    st.sampled_from([None, "float32", "float16"]),
    st.data(),
)
@settings(max_examples=examples(60))
def test_batches_and_samples_are_what_numpy_computes_in_64_bits(make_h5, tmp_path, kind, dtype, shape, asked, data):
    values = values_of(dtype, (N, *shape), data.draw(st.integers(0, 99)))
    channel_axis = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1)) if shape else None
    stats = stats_of(values, channel_axis)
    dataset = dataset_of(
        kind,
        make_h5(x=stored(values, data.draw(st.booleans()))),
        dtype=asked,
        normalize=stats_file(tmp_path, {"x": stats}),
    )
    expected = by_numpy(values, stats)
    rows = data.draw(st.lists(st.integers(0, N - 1), min_size=1, max_size=8) | st.just(list(range(N))))
    got = dataset.read_batch(rows)["x"]
    wanted = {"float32": torch.float32, "float16": torch.float16, None: torch_dtype_of(dtype)}[asked]
    if kind == "combined" and (not shape or dtype[0] in "iu"):
        wanted = torch_dtype_of(dtype)  # its dtype is for floating fields with an axis beside the rows
    assert got.dtype == wanted
    assert got.shape == expected[rows].shape
    within = np.abs(expected) < 8
    for _ in range(2):  # nothing is done to what is kept in memory
        got = dataset.read_batch(rows)["x"].double().numpy()
        allowed = 1e-6 if wanted != torch.float16 else 1e-6 + np.abs(expected[rows]) * 2**-11 + 2**-25
        assert (np.abs(got - expected[rows]) <= allowed)[within[rows]].all()
        sample = dataset[rows[0]]["x"].double().numpy()
        assert np.array_equal(sample, got[0])
    dataset.close()


def torch_dtype_of(dtype):
    return {"f2": torch.float16, "f8": torch.float64}.get(dtype, torch.float32)


@pytest.mark.wide
@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e3), st.integers(0, 99))
def test_a_large_mean_costs_no_digits(make_h5, tmp_path, mean, std, seed):
    values = np.random.default_rng(seed).normal(size=(N, 3)).clip(-5, 5) * std + mean
    stats = stats_of(values, 0)
    path, file = make_h5(d=values), stats_file(tmp_path, {"d": stats})
    expected = by_numpy(values, stats)
    for dtype in ("float32", None):
        got = H5LazyDataset(path, "d", x_dtype=dtype, normalize=file).read_batch(range(N))
        assert got.dtype == (torch.float64 if dtype is None else torch.float32)
        assert np.abs(got.double().numpy() - expected).max() < 1e-6


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["u1", "i4", "f4", "f8", "u2", "u4", "?"])
@pytest.mark.parametrize("n", [4, 40_000])
def test_large_batches_are_as_small_ones(make_h5, tmp_path, dtype, n):
    """Also where memory of earlier batches is used again."""
    random = np.random.default_rng(0)
    values = (random.integers(0, 2, (n, 3, 5)) if dtype == "?" else random.integers(0, 200, (n, 3, 5))).astype(dtype)
    stats = stats_of(values, 1)
    dataset = H5LazyDataset(make_h5(x=values), "x", normalize=stats_file(tmp_path, {"x": stats}))
    expected = by_numpy(values, stats)
    kept = [dataset.read_batch(range(start, start + n // 4)) for start in range(0, n, n // 4)]
    assert np.abs(np.concatenate(kept) - expected).max() < 1e-6


@pytest.mark.parametrize("kind", DATASETS)
def test_a_channel_that_is_constant_becomes_0(make_h5, tmp_path, kind):
    values = np.random.default_rng(0).normal(size=(N, 3, 4)).astype("f4")
    values[:, 1] = 7.25
    stats = stats_of(values, 0)
    assert stats["std"][1] == 0
    dataset = dataset_of(kind, make_h5(x=values), normalize=stats_file(tmp_path, {"x": stats}))
    got = dataset.read_batch(range(N))["x"].numpy()
    assert not got[:, 1].any()
    assert np.abs(got - by_numpy(values, stats)).max() < 1e-6
    assert np.isfinite(got).all()


def test_values_that_are_missing_stay_missing(make_h5, tmp_path):
    values = np.random.default_rng(0).normal(size=(N, 4)).astype("f4")
    values[3, 1] = np.nan
    stats = {"mean": [0.5] * 4, "std": [2.0] * 4}
    got = H5LazyDataset(make_h5(x=values), "x", normalize=stats_file(tmp_path, {"x": stats})).read_batch(range(N))
    assert np.argwhere(np.isnan(got.numpy())).tolist() == [[3, 1]]


def mixed(make_h5, **more):
    random = np.random.default_rng(1)
    arrays = {
        "x": random.normal(size=(N, 3, 4)).astype("f4"),
        "z": random.integers(0, 9, (N, 3, 4)).astype("i2"),
        "y": random.integers(0, 3, N),
        "name": np.array([f"row {row}".encode() for row in range(N)]),
    }
    return make_h5({**arrays, **more}), arrays


@pytest.mark.parametrize("kind", DATASETS)
def test_fields_without_statistics_are_untouched(make_h5, tmp_path, kind):
    path, arrays = mixed(make_h5)
    stats = stats_of(arrays["x"], 0)
    options = {"normalize": stats_file(tmp_path, {"x": stats})}
    names = {name: name for name in arrays}
    if kind == "combined":
        dataset = CombinedHDF5Dataset(path, list(arrays), **nested_files(**options))
    elif kind == "lazy":
        dataset = H5LazyDataset(path, names, **nested_files(**options))
    else:
        dataset = RankMemCachedH5Dataset(path, {"x": "x", "z": "z", "y": "y"}, **nested_files(x_dtype=None, **options))
    batch = dataset.read_batch([5, 1])
    assert np.abs(batch["x"].numpy() - by_numpy(arrays["x"], stats)[[5, 1]]).max() < 1e-6
    for name in ("z", "y"):
        assert batch[name].numpy().tobytes() == arrays[name][[5, 1]].tobytes()
    if kind != "rank cached":
        assert batch["name"] == ["row 5", "row 1"]


def test_inputs_and_targets_may_both_be_normalized(make_h5, tmp_path):
    path, arrays = mixed(make_h5)
    stats = {"x": stats_of(arrays["x"], 0), "y": stats_of(arrays["y"])}
    file = stats_file(tmp_path, stats)
    x, y = H5LazyDataset(path, "x", "y", normalize=file).read_batch(range(N))
    assert np.abs(x.numpy() - by_numpy(arrays["x"], stats["x"])).max() < 1e-6
    assert np.abs(y.numpy() - by_numpy(arrays["y"], stats["y"])).max() < 1e-6


def test_fields_may_be_named_as_samples_or_as_files_have_them(make_h5, tmp_path):
    values = np.random.default_rng(0).normal(size=(N, 3)).astype("f4")
    path, stats = make_h5({"raw/signal": values}), stats_of(values, 0)
    for name in ("raw/signal", "/raw/signal", "x"):
        file = stats_file(tmp_path, {name: stats})
        got = H5LazyDataset(path, {"x": "raw/signal"}, normalize=file).read_batch(range(N))["x"]
        assert np.abs(got.numpy() - by_numpy(values, stats)).max() < 1e-6


def test_statistics_may_be_given_as_they_are(make_h5):
    values = np.random.default_rng(0).normal(size=(N, 3)).astype("f4")
    stats = stats_of(values, 0)
    given_stats = FieldStats(np.array(stats["mean"]), np.array(stats["std"]), 0, (3,))
    got = H5LazyDataset(make_h5(x=values), "x", normalize={"x": given_stats}).read_batch(range(N))
    assert np.abs(got.numpy() - by_numpy(values, stats)).max() < 1e-6


MODULES = pytest.mark.parametrize(
    "kind",
    [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule],
    ids=["lazy", "rank cached", "combined"],
)


@MODULES
@pytest.mark.parametrize("form", ["lists", "arrays", "tensors", "tuples", "objects"])
def test_a_mapping_of_numbers_is_as_a_file(make_h5, tmp_path, kind, form):
    values = values_of("i2", (N, 3, 5), 0)
    path, stats = make_h5(x=values), stats_of(values, 0)
    entry = {
        "lists": stats,
        "arrays": stats | {name: np.array(stats[name]) for name in ("mean", "std")},
        "tensors": stats | {name: torch.tensor(stats[name], dtype=torch.float64) for name in ("mean", "std")},
        "tuples": stats | {name: tuple(stats[name]) for name in ("mean", "std", "row_shape")},
        "objects": FieldStats(np.array(stats["mean"]), np.array(stats["std"]), 0, (3, 5)),
    }[form]
    keys = {} if kind is CombinedHDF5DataModule else {"x_key": {"x": "x"}}
    batches = []
    for normalize in ({"x": entry}, stats_file(tmp_path, {"x": stats})):
        datamodule = kind(path, batch_size=N, shuffle=False, normalize=normalize, **keys)
        datamodule.setup("fit")
        batches.append(next(iter(datamodule.train_dataloader()))["x"])
    assert torch.equal(*batches)
    hparams = kind(path, normalize={"x": entry}, **keys).hparams
    assert json.loads(json.dumps(hparams["normalize"])) == {"x": stats}


@MODULES
@pytest.mark.parametrize(
    ("normalize", "words"),
    [
        ({}, "normalize={} was given, which has no fields. Pass {'name': {'mean': ..., 'std': ...}}"),
        ({"x": 3}, "normalize['x']=3 was given. Pass {'mean': ..., 'std': ...}"),
        ({"x": {"mean": 0.5}}, "normalize['x'] has 'mean' and no 'std'. Pass mean and std"),
        ({"x": {}}, "and no 'mean', 'std'. Pass mean and std"),
        (
            {"x": {"mean": 0.5, "sdt": 1}},
            "no key 'sdt'. Did you mean 'std'? Its keys are 'mean', 'std', 'channel_axis'",
        ),
        ({"x": {"mean": "many", "std": 1.0}}, "normalize['x']: 'mean' is 'many'. Write a number"),
        ({"x": {"mean": True, "std": 1.0}}, "normalize['x']: 'mean' is True. Write a number"),
        ({"x": {"mean": 0.5, "std": -1.0}}, "normalize['x']: mean 0.5, std -1.0"),
        ({"x": {"mean": [0.0] * 3, "std": [1.0] * 2}}, "normalize['x']: the mean has the shape (3,)"),
        ({"x": {"mean": [0.0], "std": [1.0], "channel_axis": "first"}}, "normalize['x']: channel_axis is 'first'"),
    ],
    ids=str,
)
def test_a_mapping_with_mistakes_is_refused_at_once(kind, normalize, words):
    with pytest.raises(H5ValueError, match=re.escape(words)):
        kind("absent.h5", normalize=normalize)


@MODULES
def test_a_mapping_of_other_names_is_refused_with_the_fields_that_there_are(make_h5, kind):
    path = make_h5(signal=np.zeros((9, 3)), outcome=np.zeros(9))
    keys = {} if kind is CombinedHDF5DataModule else {"x_key": {"signal": "signal", "outcome": "outcome"}}
    datamodule = kind(path, normalize={"signals": {"mean": 0, "std": 1}}, **keys)
    with pytest.raises(H5ValueError, match=r"data has .* and no 'signals'\. Did you mean 'signal'\? Name fields"):
        datamodule.setup("fit")


# Before transforms, and once ----------------------------------------------------------------------------------------


def note(seen):
    def transform(sample):
        seen.append((sample["x"] if isinstance(sample, dict) else sample).numpy().copy())
        return sample

    return transform


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_transform_sees_normalized_values_each_time_a_row_is_read(make_h5, tmp_path, kind, is_chunked):
    values = np.random.default_rng(0).normal(50, 3, size=(N, 3, 4)).astype("f4")
    stats = stats_of(values, 0)
    seen = []
    dataset = dataset_of(
        kind,
        make_h5(x=stored(values, is_chunked)),
        normalize=stats_file(tmp_path, {"x": stats}),
        transform=note(seen),
    )
    expected = by_numpy(values, stats)
    for _ in range(3):
        seen.clear()
        batch = dataset.read_batch(range(N))["x"]
        assert np.abs(batch.numpy() - expected).max() < 1e-6
        assert np.abs(np.stack(seen) - expected).max() < 1e-6


@pytest.mark.parametrize("kind", ["lazy", "combined", "mapped", "rank cached", "rank cached, shared"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_what_a_user_does_to_a_batch_reaches_no_row_that_is_read_later(make_h5, tmp_path, kind, is_chunked):
    values = np.random.default_rng(0).normal(50, 3, size=(N, 3)).astype("f4")
    stats = stats_of(values, 0)
    path = make_h5(x=stored(values, is_chunked))
    before = Path(path).read_bytes()
    options = {"normalize": stats_file(tmp_path, {"x": stats})}
    name, _, more = kind.partition(", ")
    options |= {"mmap": True} if name == "mapped" else {}
    options |= {"share_memory": True} if more else {}
    dataset = dataset_of("lazy" if name == "mapped" else name, path, **options)
    expected = by_numpy(values, stats)
    for rows in (range(N), range(4, 9), [3], range(N), [3, 3, 5], range(N)):
        batch = dataset.read_batch(rows)["x"]
        assert np.abs(batch.numpy() - expected[list(rows)]).max() < 1e-6
        batch.fill_(99)
        sample = dataset[rows[0]]["x"]
        assert np.abs(sample.numpy() - expected[rows[0]]).max() < 1e-6
        sample.fill_(99)
    assert Path(path).read_bytes() == before


def test_rows_in_the_cache_are_not_normalized_twice(make_h5, tmp_path):
    values = np.random.default_rng(0).normal(50, 3, size=(N, 3)).astype("f4")
    stats = stats_of(values, 0)
    dataset = CombinedHDF5Dataset(make_h5(x=values), normalize=stats_file(tmp_path, {"x": stats}), cache_size=N)
    for rows in ([1, 2, 3], [2, 3, 4], [1, 2, 3, 4], [4, 9]):
        assert np.abs(dataset.read_batch(rows)["x"].numpy() - by_numpy(values, stats)[rows]).max() < 1e-6
    assert dataset.get_stats()["cache_hits"] == 2 + 4 + 1


@pytest.mark.parametrize("kind", DATASETS)
def test_a_pickled_dataset_normalizes_as_well(make_h5, tmp_path, kind):
    values = np.random.default_rng(0).normal(50, 3, size=(N, 3)).astype("f4")
    stats = stats_of(values, 0)
    file = stats_file(tmp_path, {"x": stats})
    dataset = dataset_of(kind, make_h5(x=values), normalize=file)
    dataset.read_batch([0])
    file.unlink()
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy.read_batch(range(N))["x"], dataset.read_batch(range(N))["x"])


# What is refused ----------------------------------------------------------------------------------------------------

X = {"mean": [0.0] * 3, "std": [1.0] * 3}
REFUSED = {
    "another field": ({"other": X}, r"fields 'other'; the data has 'x', 'z', 'y', 'name' and no 'other'"),
    "another field as well": ({"x": X, "other": X}, r"and no 'other'"),
    "another number of channels": ({"x": {"mean": [0.0] * 4, "std": [1.0] * 4}}, r"'x' have 4 channels .*3 there"),
    "another shape of rows": (
        {"x": X | {"row_shape": [3, 5]}},
        r"'x' were computed from rows of shape \(3, 5\).*\(3, 4\)",
    ),
    "text": ({"name": {"mean": 0.0, "std": 1.0}}, r"have 'name', which is text"),
    "a mean that is NaN": ({"x": {"mean": float("nan"), "std": 1.0}}, r"'x': mean nan, std 1.0"),
    "a negative deviation": ({"x": {"mean": 0.5, "std": -1.0}}, r"'x': mean 0.5, std -1.0"),
    "an infinite deviation": ({"x": {"mean": 0.5, "std": float("inf")}}, r"'x': mean 0.5, std inf"),
    "other lengths": ({"x": {"mean": [0.0] * 3, "std": [1.0] * 2}}, r"'x': the mean has the shape \(3,\) .*\(2,\)"),
    "a matrix": ({"x": {"mean": [[0.0]], "std": [[1.0]]}}, r"'x': the mean has the shape \(1, 1\)"),
    "nothing": ({"x": {"mean": [], "std": []}}, r"'x': the mean has the shape \(0,\)"),
    "no deviation": ({"x": {"mean": 0.0}}, r"'x': 'std' is None"),
    "words": ({"x": {"mean": "many", "std": 1.0}}, r"'x': 'mean' is 'many'"),
    "no mapping": ({"x": 3}, r"'x': 'mean' is None"),
    "an axis that is not there": ({"x": X | {"channel_axis": 2}}, r"3 channels along axis 2 .*\(3, 4\), no such axis"),
    "an axis below those": ({"x": X | {"channel_axis": -3}}, r"3 channels along axis -3 .*no such axis"),
    "an axis of another length": ({"x": X | {"channel_axis": 1}}, r"3 channels along axis 1 .*4 there"),
    "an axis that is no number": ({"x": X | {"channel_axis": "first"}}, r"channel_axis is 'first'"),
    "a shape that is none": ({"x": X | {"row_shape": 3}}, r"'x'.*row_shape"),
    "no fields": ({}, r"has no fields"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_statistics_that_do_not_fit_are_refused_with_both_sides(make_h5, tmp_path, case):
    fields, text = REFUSED[case]
    path, arrays = mixed(make_h5)
    with pytest.raises(H5ValueError, match=text):
        H5LazyDataset(path, {name: name for name in arrays}, normalize=stats_file(tmp_path, fields))


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("case", ["another number of channels", "another shape of rows"])
def test_all_datasets_refuse_statistics_of_other_rows(make_h5, tmp_path, kind, case):
    fields, text = REFUSED[case]
    path, _ = mixed(make_h5)
    with pytest.raises(H5ValueError, match=text):
        dataset_of(kind, path, normalize=stats_file(tmp_path, fields))


@pytest.mark.parametrize("content", [None, "{", "[1, 2]", '{"fields": [1]}', "\x00\xff"])
def test_a_file_that_is_no_file_of_statistics_is_refused_with_its_path(make_h5, tmp_path, content):
    file = tmp_path / "some.json"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    error = H5ValueError if content and content[0] in "[{" and len(content) > 1 else H5FileError
    with pytest.raises(error, match=r"some\.json"):
        H5LazyDataset(mixed(make_h5)[0], "x", normalize=file)


def test_statistics_of_more_fields_than_are_loaded_are_taken_where_the_file_has_them(make_h5, tmp_path):
    path, arrays = mixed(make_h5)
    stats = stats_of(arrays["x"], 0)
    file = stats_file(tmp_path, {"x": stats, "z": stats_of(arrays["z"]), "y": stats_of(arrays["y"])})
    got = H5LazyDataset(path, "x", normalize=file).read_batch(range(N))
    assert np.abs(got.numpy() - by_numpy(arrays["x"], stats)).max() < 1e-6
    other = make_h5(x=arrays["x"], z=arrays["z"])
    with pytest.raises(H5ValueError, match="and no 'y'"):
        H5LazyDataset(other, "x", normalize=file)


def test_statistics_of_none_of_the_fields_that_are_loaded_are_refused(make_h5, tmp_path):
    path, arrays = mixed(make_h5)
    with pytest.raises(H5ValueError, match="statistics are of the fields 'z'; the data has 'x'"):
        H5LazyDataset(path, "x", normalize=stats_file(tmp_path, {"z": stats_of(arrays["z"])}))


def test_a_field_that_is_normalized_cannot_be_of_integers(make_h5, tmp_path):
    path, arrays = mixed(make_h5)
    file = stats_file(tmp_path, {"x": stats_of(arrays["x"])})
    with pytest.raises(H5ValueError, match=r"'x' is to be normalized, but torch.int16 was requested"):
        H5LazyDataset(path, "x", x_dtype="int16", normalize=file)


def test_files_with_other_shapes_than_the_first_are_refused(make_h5, tmp_path):
    values = np.zeros((N, 3, 4), "f4")
    paths = [make_h5(x=values), make_h5(x=np.zeros((N, 4, 4), "f4"))]
    with pytest.raises(H5ValueError):
        H5LazyDataset(paths, "x", normalize=stats_file(tmp_path, {"x": X}))


# Data modules -------------------------------------------------------------------------------------------------------


def splits_file(make_h5):
    random = np.random.default_rng(2)
    values = {split: random.normal(9, 4, size=(N, 3, 5)).astype("f4") for split in ("train", "val", "test")}
    arrays = {f"{split}/x": rows for split, rows in values.items()}
    return make_h5({**arrays, **{f"{split}/y": np.arange(N) for split in values}}), values


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule], ids=["lazy", "rank cached"])
@pytest.mark.parametrize("name", ["train/x", "{split}/x"])
def test_statistics_of_the_training_array_hold_for_all_splits_of_a_file(make_h5, tmp_path, kind, name):
    path, values = splits_file(make_h5)
    stats = stats_of(values["train"], 0)
    file = stats_file(tmp_path, {name: stats})
    options = {"x_key": "{split}/x", "y_key": "{split}/y", "normalize": file}
    datamodule = kind(path, batch_size=7, **options)
    datamodule.setup()
    for split in ("train", "val", "test"):
        expected = by_numpy(values[split], stats)
        for x, y in getattr(datamodule, f"{split}_dataloader")():
            assert x.shape[1:] == (3, 5)
            assert np.abs(x.numpy() - expected[y.numpy()]).max() < 1e-6


@pytest.mark.parametrize("num_workers", [0, 2])
@MODULES
def test_every_data_module_normalizes_each_epoch_alike(make_h5, tmp_path, kind, num_workers):
    values = values_of("i2", (40, 3, 5), 0)
    stats = stats_of(values, 0)
    options = {"normalize": str(stats_file(tmp_path, {"x": stats})), "split": 0.25}
    keys = {} if kind is CombinedHDF5DataModule else {"x_key": {"x": "x", "row": "row"}}
    path = make_h5(x=stored(values, True), row=np.arange(40))
    datamodule = kind(path, batch_size=7, num_workers=num_workers, **keys, **options)
    datamodule.setup("fit")
    expected, seen = by_numpy(values, stats), []
    for loader in [*[datamodule.train_dataloader()] * 2, datamodule.val_dataloader()]:
        for batch in loader:
            assert batch["x"].dtype == torch.float32
            assert np.abs(batch["x"].numpy() - expected[batch["row"].numpy()]).max() < 1e-6
            seen += batch["row"].tolist()
    assert sorted(np.unique(seen)) == list(range(40))
    datamodule.teardown()


@pytest.mark.parametrize("kind", ["LazyH5DataModule", "RankCachedH5DataModule", "CombinedHDF5DataModule"])
@pytest.mark.parametrize("is_file", [True, False], ids=["file", "mapping"])
def test_a_config_can_say_it(make_h5, tmp_path, kind, is_file):
    values = values_of("i2", (N, 3, 5), 0)
    stats = stats_of(values, 0)
    path, file = make_h5(x=values), stats_file(tmp_path, {"x": stats})
    normalize = file if is_file else json.dumps({"x": stats})
    config = tmp_path / "config.yaml"
    keys = "" if kind == "CombinedHDF5DataModule" else "x_key: {x: x}"
    config.write_text(f"""
seed_everything: 3
trainer: {{accelerator: cpu, logger: false}}
model: {{class_path: lightning_models.Recorder}}
data:
  class_path: lightning_h5.{kind}
  init_args:
    train_path: {path}
    normalize: {normalize}
    with_index: true
    {keys}
""")
    cli = LightningCLI(args=["--config", str(config)], run=False, save_config_callback=None)
    assert isinstance(cli.model, Recorder)
    cli.datamodule.setup("fit")
    expected = by_numpy(values, stats)
    for batch in cli.datamodule.train_dataloader():
        assert np.abs(batch["x"].numpy() - expected[batch["index"].numpy()]).max() < 1e-6


# Files of statistics ------------------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
deviation = st.floats(0, allow_nan=False, allow_infinity=False)


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.lists(st.tuples(finite, deviation), max_size=4), min_size=1))
def test_what_is_written_is_read_again_to_the_last_bit(tmp_path, fields):
    path = tmp_path / "written.json"
    entries = {}
    for name, channels in fields.items():
        mean, std = [pair[0] for pair in channels], [pair[1] for pair in channels]
        entries[name] = (
            {"mean": mean, "std": std, "channel_axis": 1, "row_shape": [2, len(mean)]}
            if channels
            else {"mean": 1.5, "std": 0.1}
        )
    write_stats(path, entries)
    found = read_stats(path)
    assert list(found) == list(entries)
    for name, entry in entries.items():
        assert found[name].mean.tolist() == entry["mean"]
        assert found[name].std.tolist() == entry["std"]
        assert found[name].channel_axis == entry.get("channel_axis")
        assert found[name].row_shape == (tuple(entry["row_shape"]) if "row_shape" in entry else None)


def test_a_list_without_an_axis_is_of_the_first_one(tmp_path):
    found = read_stats(stats_file(tmp_path, {"x": X, "y": {"mean": 1.5, "std": 2}}))
    assert (found["x"].channel_axis, found["y"].channel_axis) == (0, None)
    assert (found["y"].mean.shape, float(found["y"].std)) == ((), 2.0)


def test_writing_leaves_the_file_whole_and_nothing_beside_it(tmp_path):
    path = tmp_path / "stats.json"
    write_stats(path, {"x": X})
    with pytest.raises(TypeError):
        write_stats(path, {"x": {"mean": np.zeros(3)}})
    assert read_stats(path)["x"].mean.tolist() == [0.0] * 3
    assert [one.name for one in tmp_path.iterdir()] == ["stats.json"]


@pytest.fixture(params=[1, 128 << 10], ids=["by the chunk", "as they are copied"])
def decodes_in_company(monkeypatch, request):
    """Arrays as small as a test's are not held whole; their chunks are changed one by one, or not."""
    monkeypatch.setattr("lightning_h5.samples.row_table.HELD_BYTES", 0)
    monkeypatch.setattr("lightning_h5.datasets.file_dataset.HELD_BYTES", 0)
    monkeypatch.setattr("lightning_h5.readers.select.MIN_PREPARED", request.param)


LAYOUTS = {
    "contiguous": {},
    "whole rows a chunk": {"chunks": (5, 3, 8), "compression": "gzip"},
    "one row a chunk": {"chunks": (1, 3, 8), "compression": "lzf"},
    "parts of rows a chunk": {"chunks": (4, 2, 5), "compression": "gzip", "shuffle": True},
    "a filter of others": {"chunks": (6, 3, 8), "scaleoffset": 6},
}


def assert_rows_are_normalized_once(tmp_path, layout, dtype, cache_bytes, kind):
    """Reads rows of two files, of which the first has this layout, several times."""
    values = values_of(dtype.strip(">"), (N, 3, 8), 1).astype(dtype)
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    for path, part in zip(paths, (values[:11], values[11:]), strict=True):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=part, **LAYOUTS[layout if path.name == "a.h5" else "whole rows a chunk"])
    with h5py.File(paths[0]) as file:
        values[:11] = file["x"][:]  # as the filter has them
    stats = stats_of(values, 0)
    dataset = dataset_of(
        kind,
        paths,
        normalize=stats_file(tmp_path, {"x": stats}),
        files={"cache_bytes": cache_bytes},
        **({"cache_size": 7} if kind == "combined" else {}),
    )
    expected = by_numpy(values, stats)
    random = np.random.default_rng(0)
    for _ in range(6):
        rows = random.choice(N, 9)
        found = dataset.read_batch(rows)["x"].numpy()
        assert found.shape == (9, 3, 8)
        assert np.abs(found - expected[rows]).max() < 2e-6
    dataset.close()
    assert np.abs(dataset.read_batch([3, 20])["x"].numpy() - expected[[3, 20]]).max() < 2e-6


@pytest.mark.parametrize("cache_bytes", [0, "1 MiB"], ids=["not kept", "kept"])
def test_decoded_rows_are_normalized_once(decodes_in_company, tmp_path, cache_bytes):
    """Whether they are normalized as chunks or as they are copied, and whether the chunks stay in memory or not."""
    assert_rows_are_normalized_once(tmp_path, "whole rows a chunk", "f4", cache_bytes, "lazy")


@pytest.mark.wide
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", ">f4"])
@pytest.mark.parametrize("cache_bytes", [0, "1 KiB", "1 MiB"])
@pytest.mark.parametrize("kind", ["lazy", "combined"])
@pytest.mark.parametrize("way", ["compiled", "by NumPy"])
def test_rows_that_are_decoded_in_company_are_normalized_once(
    decodes_in_company, monkeypatch, tmp_path, layout, dtype, cache_bytes, kind, way
):
    if way == "by NumPy":  # which goes another way with blocks that do not stay
        monkeypatch.setattr(multiply_add, "_affine_loops", lambda *args, **kwargs: None)
    if layout == "a filter of others" and dtype[-2] != "f":
        pytest.skip("the filter keeps six decimals of floats")
    assert_rows_are_normalized_once(tmp_path, layout, dtype, cache_bytes, kind)


def test_complex_fields_are_not_normalized(make_h5, tmp_path):
    path = make_h5({"x": np.ones((6, 2)) + 1j})
    with pytest.raises(H5ValueError, match="complex"):
        H5LazyDataset(path, "x", normalize=stats_file(tmp_path, {"x": {"mean": 0, "std": 1}}))


def test_statistics_of_a_field_by_two_names_are_refused(make_h5, tmp_path):
    path = make_h5({"y": np.ones((6, 2))})
    stats = stats_file(tmp_path, {"x": {"mean": 0, "std": 1}, "y": {"mean": 5, "std": 1}})
    with pytest.raises(H5ValueError, match="twice"):
        H5LazyDataset(path, {"x": "y"}, normalize=stats)


@pytest.mark.parametrize("number", [True, "3", [True, False]])
def test_statistics_are_numbers(make_h5, tmp_path, number):
    path = make_h5({"x": np.ones((6, 2))})
    with pytest.raises(H5ValueError, match="mean"):
        H5LazyDataset(path, "x", normalize=stats_file(tmp_path, {"x": {"mean": number, "std": 1}}))


def test_sources_of_other_dtypes_are_mixed_once_they_are_normalized(make_h5, tmp_path):
    stats = stats_file(tmp_path, {"x": {"mean": 2, "std": 4}})
    sources = {
        "bytes": make_h5({"x": np.full((9, 3), 6, dtype="u1")}, name="a.h5"),
        "floats": make_h5({"x": np.full((9, 3), 6, dtype="f4")}, name="b.h5"),
    }
    module = CombinedHDF5DataModule(mixture=sources, normalize=stats, batch_size=6)
    module.setup("fit")
    assert all((batch["x"] == 1).all() for batch in module.train_dataloader())
    other = CombinedHDF5DataModule(mixture=sources, normalize=stats, batch_size=6, x_dtype="float16")
    with pytest.raises(H5ValueError, match="'x' is float32"):
        other.setup("fit")
