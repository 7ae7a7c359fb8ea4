"""``CombinedHDF5Dataset``: fields, dtypes, the rows that were used last, worker processes. Filters are next door."""

import logging
import os
import pickle
import shutil

import h5py
import numpy as np
import pytest
import torch
from arguments import nested_files
from dataset_conformance import bits
from factories import Stored
from torch.utils.data import DataLoader, default_collate

from lightning_h5.datasets import CombinedHDF5Dataset
from lightning_h5.errors import H5FileError, H5KeyError, H5ValueError


def write_recordings(folder, n_rows=120, n_files=3, n_guids=12, n_steps=20):
    """Files as the data of the original has them: resizable, one row a chunk, LZF, text of any length."""
    random, paths = np.random.default_rng(0), []
    guids = [f"patient_{number:03d}" for number in range(n_guids)]
    for number, rows in enumerate(np.array_split(np.arange(n_rows), n_files)):
        n = len(rows) - 3 * number if n_files > 1 else n_rows  # no two files of the same length
        n += 3 * sum(range(n_files)) if number == 0 and n_files > 1 else 0
        is_valid = (random.random((n, n_steps)) > 0.3).astype("f4")
        score = random.normal(size=n)
        score[::11] = np.nan
        epoch = np.round(random.uniform(-100, 100, n)).astype("f4")
        epoch[::13] = np.nan
        arrays = {
            "fhr": random.normal(size=(n, 4 * n_steps)).astype("f4"),
            "fhr_st": random.normal(size=(n, 3, n_steps)).astype("f4"),
            "fhr_up_ph": random.normal(size=(n, 5, n_steps)),
            "target": random.integers(1, 4, (n, 1)).astype("f4") * is_valid,
            "weight": is_valid,
            "epoch": epoch,
            "cs_label": random.integers(0, 2, n).astype("u1"),
            "bg_label": random.integers(0, 2, n).astype("u1"),
            "guid": np.array([guids[i] for i in random.integers(0, n_guids, n)], object),
            "meta/age": random.integers(18, 45, n).astype("i2"),
            "meta/score": score,
            "meta/site": np.array([b"A", b"B", b"CC", "Ü".encode()])[random.integers(0, 4, n)],
            "meta/visit": random.integers(0, 9, n),
        }
        paths.append(os.path.join(folder, f"train{number + 1}.h5"))
        with h5py.File(paths[-1], "w", libver="latest") as file:
            for name, values in arrays.items():
                file.create_dataset(
                    name,
                    data=values,
                    dtype=h5py.string_dtype() if values.dtype == object else values.dtype,
                    chunks=(1, *values.shape[1:]),
                    maxshape=(None, *values.shape[1:]),
                    compression="lzf",
                )
    return paths


def rows_of(paths):
    """The oracle: for each row its file, its place there, and what h5py has for each field."""
    found = []
    for number, path in enumerate(paths):
        with h5py.File(path) as file:
            arrays = {}
            file.visititems(
                lambda name, item, arrays=arrays: arrays.update({name: item[()]} if hasattr(item, "dtype") else {})
            )
            for row in range(len(file["guid"])):
                values = {name: array[row] for name, array in arrays.items()}
                found.append((number, row, {n: v.decode() if isinstance(v, bytes) else v for n, v in values.items()}))
    return found


def assert_holds(dataset, expected, dtype=None):
    """That a dataset has these rows of the oracle, in their order, in all fields."""
    files, rows = dataset.index
    assert list(zip(files.tolist(), rows.tolist(), strict=True)) == [(file, row) for file, row, _ in expected]
    assert len(dataset) == len(expected)
    assert_batch(dataset.read_batch(range(len(dataset))), [values for _, _, values in expected], dtype)


def assert_batch(batch, expected, dtype=None):
    for name, column in batch.items():
        values = [row[name] for row in expected]
        if isinstance(values[0], str):
            assert column == values
            continue
        stacked = torch.from_numpy(np.stack(values))
        if name in ("cs_label", "bg_label"):
            stacked = stacked.bool()
        elif dtype is not None and stacked.ndim > 1 and stacked.is_floating_point() and name != "target":
            stacked = stacked.to(dtype)
        assert column.dtype == stacked.dtype, name
        assert_same(column, stacked)


def assert_same(a, b):
    """Bit by bit: NaN equals NaN."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert bits(a) == bits(b)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return write_recordings(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="module")
def oracle(recordings):
    return rows_of(recordings)


@pytest.fixture
def own(recordings, tmp_path):
    """Recordings that a test may change."""
    return [shutil.copy(path, tmp_path) for path in recordings]


def stats(dataset):
    found = dataset.get_stats()
    return found["cache_hits"], found["cache_misses"], found["cache_size"]


# Rows and fields ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False], ids=["held", "read each time"])
def test_without_filters_all_rows_come_in_the_order_of_the_files(recordings, oracle, request, held):
    if not held:
        request.getfixturevalue("nothing_held")
    dataset = CombinedHDF5Dataset(recordings, dtype=None)
    assert_holds(dataset, oracle)
    assert set(dataset[0]) == set(oracle[0][2])
    backwards = [(2 - file, row, values) for file, row, values in sorted(oracle, key=lambda one: (-one[0], one[1]))]
    assert_holds(CombinedHDF5Dataset(recordings[::-1], dtype=None), backwards)


@pytest.mark.parametrize("kind", ["directory", "glob"])
def test_a_directory_and_a_glob_are_the_files_by_name(recordings, oracle, kind):
    folder = os.path.dirname(recordings[0])
    dataset = CombinedHDF5Dataset(folder if kind == "directory" else os.path.join(folder, "train*.h5"), dtype=None)
    assert_holds(dataset, oracle)


def test_one_file_may_be_given_as_it_is(recordings, oracle):
    assert_holds(CombinedHDF5Dataset(recordings[1], dtype=None), [(0, row, v) for file, row, v in oracle if file == 1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", torch.float64, None], ids=str)
def test_only_floating_fields_with_an_axis_beside_the_rows_become_the_dtype(recordings, oracle, dtype):
    dataset = CombinedHDF5Dataset(recordings, dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for _ in range(2):  # read, and from the cache
        assert_holds(dataset, oracle, wanted)
    assert dataset[0]["target"].dtype == torch.float32
    assert dataset[0]["meta/score"].dtype == torch.float64
    assert dataset[0]["epoch"].dtype == torch.float32
    assert dataset[0]["meta/visit"].dtype == torch.int64


@pytest.mark.parametrize("cache_size", [0, 10])
def test_flags_are_bool_in_samples_and_batches_whatever_number_is_stored(make_h5, cache_size):
    flags = np.array([0, 1, 2, 255, 0], np.uint8)
    path = make_h5(cs_label=Stored(flags, "chunked", (1,)), bg_label=flags.astype("i8") * 256, x=np.zeros((5, 2)))
    dataset = CombinedHDF5Dataset(path, cache_size=cache_size)
    for _ in range(2):
        assert [dataset[row]["cs_label"] for row in range(5)] == [False, True, True, True, False]
        assert {type(dataset[row][name]) for row in range(5) for name in ("cs_label", "bg_label")} == {bool}
        for name in ("cs_label", "bg_label"):
            assert dataset.read_batch(range(5))[name].dtype == torch.bool
            assert dataset.read_batch(range(5))[name].tolist() == [False, True, True, True, False]
            assert default_collate(dataset.__getitems__(range(5)))[name].dtype == torch.bool


def test_load_fields_are_the_sample_in_their_order(recordings, oracle):
    names = ["weight", "meta/age", "guid", "fhr"]
    dataset = CombinedHDF5Dataset(recordings, names, cs_label=True, epoch_min=0, label=2, dtype=None)
    assert list(dataset[0]) == list(dataset.read_batch([0])) == names
    chosen = [one for one in oracle if one[2]["cs_label"] and one[2]["epoch"] >= 0 and (one[2]["target"] == 2).any()]
    assert_holds(dataset, chosen)


def test_a_field_map_gives_arrays_other_names_and_filters_use_them(recordings, oracle):
    names = {"patient": "guid", "cs_label": "bg_label", "epoch": "meta/age", "bg_label": "/cs_label", "age": "epoch"}
    dataset = CombinedHDF5Dataset(recordings, field_map=names, dtype=None, cs_label=True, epoch_min=30)
    assert {"patient", "age", "epoch", "fhr"} <= set(dataset[0])
    assert not {"guid", "meta/age"} & set(dataset[0])
    renamed = {theirs.strip("/"): name for name, theirs in names.items()}
    chosen = [
        (file, row, {renamed.get(name, name): value for name, value in values.items()})
        for file, row, values in oracle
        if values["bg_label"] and values["meta/age"] >= 30
    ]
    assert_holds(dataset, chosen)
    assert set(dataset[0]) == set(chosen[0][2])


def test_filters_look_at_arrays_that_are_not_loaded(recordings, oracle):
    dataset = CombinedHDF5Dataset(recordings, ["fhr"], where={"age": 20}, field_map={"age": "meta/age"}, dtype=None)
    assert_holds(dataset, [one for one in oracle if one[2]["meta/age"] == 20])
    assert list(dataset[0]) == ["fhr"]


def test_all_arrays_with_the_same_rows_are_fields_and_others_are_left_out(make_h5, caplog):
    path = make_h5(
        {
            "a": np.zeros((4, 2)),
            "g/b": np.arange(4),
            "g/h/c": np.array([b"x"] * 4),
            "other": np.zeros(7),
            "one": np.array(3),
        },
        table=np.zeros(4, [("p", "i4")]),
    )
    with caplog.at_level(logging.WARNING, "lightning_h5"):
        assert set(CombinedHDF5Dataset(path)[0]) == {"a", "g/b", "g/h/c"}
    assert all(name in caplog.text for name in ("other", "one", "table"))


def test_a_doubt_about_what_a_row_is_is_an_error(make_h5):
    path = make_h5(a=np.zeros(3), b=np.zeros(4))
    with pytest.raises(H5KeyError, match="load_fields"):
        CombinedHDF5Dataset(path)
    assert len(CombinedHDF5Dataset(path, ["b"])) == 4


@pytest.mark.parametrize(
    "second",
    [
        {"x": np.zeros((3, 2), "f4")},
        {"x": np.zeros((3, 2), "f4"), "y": np.zeros(3), "z": np.zeros(3)},
        {"x": np.zeros((3, 2), "f8"), "y": np.zeros(3)},
        {"x": np.zeros((3, 4), "f4"), "y": np.zeros(3)},
        {"x": np.zeros((3, 2), "f4"), "y": np.array([b"t"] * 3)},
    ],
    ids=["field missing", "field more", "dtype", "shape of a row", "text for numbers"],
)
def test_files_that_differ_are_both_named(make_h5, second):
    paths = [make_h5(x=np.zeros((5, 2), "f4"), y=np.zeros(5)), make_h5(second)]
    with pytest.raises(H5ValueError) as error:
        CombinedHDF5Dataset(paths)
    assert all(path in str(error.value) for path in paths)


def test_two_fields_never_get_one_name(make_h5):
    path = make_h5(target=np.arange(3), y=np.arange(3) + 10)
    with pytest.raises(H5ValueError, match="target"):
        CombinedHDF5Dataset(path, field_map={"target": "y"})


def test_an_array_that_is_not_there_is_named(recordings):
    for ask in ({"load_fields": ["fhr", "fhr_sst"]}, {"where": {"fhr_sst": 1}}):
        with pytest.raises(H5KeyError, match="'fhr_sst'"):
            CombinedHDF5Dataset(recordings, **nested_files(**ask))


def test_a_file_without_rows_is_no_trouble(make_h5):
    none = {"x": np.zeros((0, 2), "f4"), "guid": np.array([], "S3"), "target": np.zeros((0, 4))}
    some = {"x": np.ones((3, 2), "f4"), "guid": np.array([b"a", b"b", b"a"]), "target": np.array([[1.0, 0, 3, 0]] * 3)}
    dataset = CombinedHDF5Dataset([make_h5(none), make_h5(some), make_h5(none)], allowed_guids=["a"], label=3)
    assert [one.tolist() for one in dataset.index] == [[1, 1], [0, 2]]
    assert dataset.read_batch([1, 0])["guid"] == ["a", "a"]


@pytest.mark.parametrize("how", ["missing", "no HDF5", "cut short", "no file of a glob"])
def test_a_bad_file_is_an_error_or_is_left_out_and_logged(own, oracle, how, caplog):
    bad = own[1]
    os.unlink(bad) if how in ("missing", "no file of a glob") else None
    if how == "no HDF5":
        with open(bad, "w") as file:
            file.write("not HDF5 at all")
    elif how == "cut short":
        os.truncate(bad, 300)
    elif how == "no file of a glob":
        bad = own[1] = bad.replace("train2", "none*")
    with pytest.raises(H5FileError) as error:
        CombinedHDF5Dataset(own)
    assert bad in str(error.value)
    left = [(file // 2, row, values) for file, row, values in oracle if file != 1]
    for ask in ({}, {"load_fields": ["fhr", "guid"]}):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lightning_h5"):
            dataset = CombinedHDF5Dataset(own, **nested_files(on_bad_file="skip", dtype=None, **ask))
        assert [bad in record.getMessage() for record in caplog.records] == [True]
        assert_holds(dataset, left)
        assert dataset.get_stats()["num_files"] == 2


def test_when_all_files_are_bad_skipping_them_is_an_error(tmp_path):
    broken = tmp_path / "broken.h5"
    broken.write_text("no")
    for paths in ([broken], [tmp_path / "missing.h5"], [broken, tmp_path / "missing.h5"]):
        for load_fields in (None, ["x"]):
            with pytest.raises(H5FileError):
                CombinedHDF5Dataset(list(map(str, paths)), load_fields, on_bad_file="skip")


def test_files_that_differ_are_an_error_also_where_bad_ones_are_left_out(make_h5):
    paths = [make_h5(x=np.zeros(3)), make_h5(x=np.zeros((3, 2)))]
    with pytest.raises(H5ValueError):
        CombinedHDF5Dataset(paths, on_bad_file="skip")


def test_indices_choose_among_the_rows_and_keep_their_order(recordings, oracle):
    rows = np.array([70, 3, 119, 3, 55, 1, 90, 40])
    mask = np.zeros(len(oracle), bool)
    mask[rows] = True
    expected = [oracle[row] for row in rows]
    assert_holds(CombinedHDF5Dataset(recordings, indices=rows, dtype=None), expected)
    flagged = [one for one in expected if one[2]["cs_label"]]
    assert_holds(CombinedHDF5Dataset(recordings, indices=rows, cs_label=True, dtype=None), flagged)
    ascending = [oracle[row] for row in np.unique(rows)]
    assert_holds(CombinedHDF5Dataset(recordings, indices=mask, dtype=None), ascending)


# The rows that were used last --------------------------------------------------------------------------------


def test_who_was_not_used_for_longest_leaves_first(recordings):
    dataset = CombinedHDF5Dataset(recordings, cache_size=2)
    for row, expected in [
        (0, (0, 1, 1)),
        (1, (0, 2, 2)),
        (0, (1, 2, 2)),
        (2, (1, 3, 2)),
        (0, (2, 3, 2)),
        (1, (2, 4, 2)),
    ]:
        dataset[row]
        assert stats(dataset) == expected
    assert len(dataset._cache) == 2


def test_a_row_that_comes_last_in_a_batch_is_kept_although_it_came_before(recordings):
    dataset = CombinedHDF5Dataset(recordings, cache_size=1)
    dataset.read_batch([5, 3, 5])
    dataset[5]
    assert stats(dataset) == (1, 3, 1)


def test_the_last_rows_of_a_batch_larger_than_the_cache_are_kept(recordings):
    dataset = CombinedHDF5Dataset(recordings, cache_size=3)
    dataset.read_batch(range(10))
    assert stats(dataset) == (0, 10, 3)
    dataset.read_batch([7, 8, 9])
    assert stats(dataset) == (3, 10, 3)
    dataset.read_batch([6])
    assert stats(dataset) == (3, 11, 3)


def test_the_cache_is_bounded_by_bytes(make_h5):
    path = make_h5(x=np.zeros((50, 25), "f4"), names=np.array([b"name"] * 50))
    dataset = CombinedHDF5Dataset(
        path,
        cache_size={"max_bytes": 1050},
    )
    dataset.read_batch(range(50))
    assert len(dataset._cache) == 10
    assert (
        len(CombinedHDF5Dataset(path, cache_size={"max_bytes": "1 KiB"}, dtype="float16")._cache._columns[0]._bytes)
        == 20
    )
    too_large = CombinedHDF5Dataset(
        path,
        cache_size={"max_bytes": 99},
    )
    for _ in range(2):
        assert too_large.read_batch(range(50))["x"].shape == (50, 25)
    assert len(too_large._cache) == 0


@pytest.mark.parametrize(
    "none", [{"cache_size": 0}, {"cache_size": {"max_bytes": 0}}, {"cache_size": {"max_bytes": 1}}], ids=str
)
def test_without_a_cache_rows_asked_for_are_counted_all_the_same(recordings, oracle, none):
    dataset = CombinedHDF5Dataset(recordings, **nested_files(dtype=None, **none))
    for _ in range(2):
        assert_holds(dataset, oracle)
    found = dataset.get_stats()
    assert (found["cache_size"], found["cache_hits"]) == (0, 0)
    assert (found["access_count"], found["cache_misses"]) == (2 * len(oracle), 2 * len(oracle))


def test_what_was_counted_says_what_was_done(recordings):
    dataset = CombinedHDF5Dataset(recordings, cs_label=True)
    found = dataset.get_stats()
    names = "total_samples num_files cache_size cache_hits cache_misses hit_rate access_count dtype bytes_read"
    assert set(names.split()) <= set(found)
    assert (found["total_samples"], found["num_files"], found["dtype"]) == (len(dataset), 3, "torch.float32")
    assert (found["hit_rate"], found["access_count"]) == (0, 0)
    dataset.read_batch([0, 1, 2])
    dataset.read_batch([2])
    found = dataset.get_stats()
    assert (found["cache_size"], found["cache_hits"], found["cache_misses"], found["access_count"]) == (3, 1, 3, 4)
    assert found["hit_rate"] == 0.25
    assert found["bytes_read"] > 0
    assert all(type(value) in (int, float, str, bool) for value in found.values())


def test_clear_cache_forgets_the_rows_and_keeps_what_was_counted(recordings):
    dataset = CombinedHDF5Dataset(recordings)
    dataset.read_batch([0, 1])
    dataset.clear_cache()
    assert len(dataset._cache) == 0
    assert stats(dataset) == (0, 2, 0)
    dataset.read_batch([1, 2])
    assert stats(dataset) == (0, 4, 2)


@pytest.mark.parametrize("count", [-1, 1.5, "10", True], ids=repr)
def test_a_cache_size_that_is_no_number_of_rows_is_an_error(recordings, count):
    with pytest.raises(H5ValueError, match="cache_size"):
        CombinedHDF5Dataset(recordings, cache_size=count)


# Other processes ---------------------------------------------------------------------------------------------


def test_a_pickled_copy_has_the_same_rows_and_an_empty_cache(recordings, oracle):
    dataset = CombinedHDF5Dataset(
        recordings, where={"meta/age": lambda age: age > 30}, cs_label=True, indices=np.arange(100), dtype=None
    )
    dataset.read_batch(range(10))
    other = pickle.loads(pickle.dumps(dataset))
    assert len(other._cache) == 0
    assert len(dataset._cache) == 10
    chosen = [one for one in oracle[:100] if one[2]["meta/age"] > 30 and one[2]["cs_label"]]
    for one in (other, dataset, pickle.loads(pickle.dumps(other))):
        assert_holds(one, chosen)


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_rows_that_workers_read_are_counted(recordings, start_method):
    dataset = CombinedHDF5Dataset(recordings, ["guid"])
    n_batches = len(list(DataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context=start_method)))
    assert n_batches == 15
    assert dataset.get_stats()["access_count"] == 120


def test_no_rows_to_choose_among_are_not_all_of_them(recordings):
    with pytest.raises(H5ValueError, match="no row"):
        CombinedHDF5Dataset(recordings, label=2, indices=[])


# What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [[], (), "", ["fhr", "fhr"], [3], ["fhr", ""], 3], ids=repr)
def test_load_fields_name_each_field_once(recordings, names):
    with pytest.raises(H5ValueError, match="load_fields"):
        CombinedHDF5Dataset(recordings, names)


@pytest.mark.parametrize(
    ("field_map", "text"),
    [
        ({"a": 3}, "field_map"),
        ({"a": {}}, "field_map"),
        ({"a": {"key": "fhr", "axes": "NT"}}, "field_map"),
        ({"a": {"key": 3}}, "field_map"),
        ({"a": {"key": "fhr", "layout": "NT"}}, "layout"),
        ({"a": "fhr", "b": "/fhr"}, "several names"),
        ({"target": "fhr"}, r"renames other arrays to 'target'.* Name the fields to load \(load_fields\)"),
    ],
    ids=repr,
)
def test_a_field_map_that_makes_no_sense_is_refused(recordings, field_map, text):
    with pytest.raises(H5ValueError, match=text):
        CombinedHDF5Dataset(recordings, field_map=field_map)


def test_on_bad_file_is_error_or_skip(recordings):
    with pytest.raises(H5ValueError, match="on_bad_file"):
        CombinedHDF5Dataset(recordings, on_bad_file="ignore")


def test_fields_with_other_numbers_of_rows_are_refused(make_h5):
    path = make_h5(x=np.zeros(4), y=np.zeros(4), z=np.zeros(5))
    with pytest.raises(H5ValueError, match="rows"):
        CombinedHDF5Dataset(path, ["x", "z"])
    with pytest.raises(H5ValueError, match="rows"):
        CombinedHDF5Dataset(path, ["x"], where={"z": 0})


def test_the_index_names_the_file_and_the_row_of_each_sample(recordings):
    dataset = CombinedHDF5Dataset(recordings, load_fields=["guid"], cs_label=True)
    index = dataset._build_index()
    assert len(index) == len(dataset) > 0
    for sample, (path, row) in zip(dataset, index, strict=True):
        with h5py.File(path) as file:
            assert file["cs_label"][row]
            assert file["guid"].asstr()[row] == sample["guid"]
