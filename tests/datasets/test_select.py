"""A part of each array (``select``): samples stay what they are without it, and what is not there is refused."""

import itertools

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
    compute_stats,
)

NUMBERS = itertools.count()  # no example writes to a file that is open
STORAGE = [{}, {"chunks": True}, {"chunks": True, "compression": "gzip"}, {"chunks": True, "compression": "lzf"}]
MODULES = [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule]


def taken_of(n):
    """What can be taken of an axis of a length, as an argument and as NumPy's index."""
    index = st.integers(-n, n - 1)
    indices = st.lists(index, min_size=1, max_size=4)  # some twice
    bounds = st.tuples(st.integers(0, n - 1), st.integers(1, n), st.integers(1, 3)).map(
        lambda b: {"start": min(b[0], b[1] - 1), "stop": b[1], "step": b[2]}
    )
    return index | indices | bounds


def picked(x, select):
    for axis in sorted(select, reverse=True):
        one = select[axis]
        one = slice(one["start"], one["stop"], one["step"]) if isinstance(one, dict) else one
        x = x[(slice(None),) * axis + (one,)]
    return x


@given(
    n_files=st.integers(1, 2),
    n=st.integers(3, 9),
    storage=st.sampled_from(STORAGE),
    data=st.data(),
    seed=st.integers(0),
)
def test_selected_parts_of_rows_are_those_that_numpy_takes(tmp_path, n_files, n, storage, data, seed):
    rng = np.random.default_rng(seed)
    shape = (n, *rng.integers(1, 6, 2).tolist())
    axes = data.draw(st.sets(st.sampled_from([1, 2]), min_size=1))
    select = {axis: data.draw(taken_of(shape[axis])) for axis in sorted(axes)}
    paths, x = [], rng.integers(-99, 99, (n_files, *shape)).astype(rng.choice(["f4", "i2", "u1"]))
    for one in x:
        paths.append(str(tmp_path / f"{next(NUMBERS):06}.h5"))
        with h5py.File(paths[-1], "w") as file:
            file.create_dataset("x", data=one, **storage)
            file["row"] = np.arange(n)
    expected = picked(np.concatenate(x), select)
    keys, options = {"x": "x", "row": "row"}, {"select": {"x": select}, "with_index": True}
    order = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=9))
    combined = {"load_fields": ["x", "row"], "dtype": None, "where": {"row": {"min": 0}}}
    for dataset in (H5LazyDataset(paths, keys, **options), CombinedHDF5Dataset(paths, **combined, **options)):
        with dataset:
            assert len(dataset) == len(expected)
            for _ in range(2):  # from the file, and from a cache
                batch = dataset.read_batch(order)
                np.testing.assert_array_equal(batch["x"].numpy(), expected[order])
                assert batch["row"].tolist() == [number % n for number in order]
                assert set(batch) == {"x", "row", "index"}
    for rank in range(2):
        with RankMemCachedH5Dataset(
            paths, keys, x_dtype=None, **options, rank=rank, world_size=2, preload=False
        ) as shard:
            batch = shard.read_batch(range(len(shard)))
            np.testing.assert_array_equal(batch["x"].numpy(), expected[batch["index"].numpy()])


@pytest.fixture
def files(make_h5):
    x = np.arange(300.0).reshape(100, 3)
    arrays = {"x": x, "y": np.arange(100) % 4, "patient": np.repeat(np.arange(10), 10), "id": np.arange(100)}
    return [make_h5(arrays), make_h5(arrays)]


SPLITS = [
    {"val_fraction": 0.2},
    {"val_fraction": 0.2, "group_key": "patient"},
    {"val_fraction": 0.2, "stratify_key": "y"},
    {"num_folds": 5, "fold": 1},
]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: ", ".join(split))
def test_splits_divide_the_same_rows_with_and_without_a_selection(files, module, split):
    found = []
    for select in (None, {"x": {1: [0, 2]}}):
        names = {"fields": ["x", "id"]} if module is CombinedHDF5DataModule else {"x_key": {"x": "x", "id": "id"}}
        datamodule = module(files, **names, select=select, split=split, weights="y", seed=3, batch_size=16)
        datamodule.setup("fit")
        val = [row for batch in datamodule.val_dataloader() for row in batch["id"].tolist()]
        train = [row for batch in datamodule.train_dataloader() for row in batch["id"].tolist()]
        found.append((val, train))
        (batch, *_) = datamodule.val_dataloader()
        columns = [0, 1, 2] if select is None else [0, 2]
        assert batch["x"].tolist() == [[3.0 * row + column for column in columns] for row in batch["id"].tolist()]
    assert found[0] == found[1]
    assert len(found[0][0]) == 40


def test_a_selection_is_of_fields_in_other_files_too(files, make_h5):
    other = make_h5({"z": np.arange(400).reshape(100, 4)})
    keys = {"x": "x", "z": {"path": other, "key": "z"}}
    with H5LazyDataset(files[0], keys, select={"x": {1: 2}, "z": {1: [3, 0]}}) as dataset:
        batch = dataset.read_batch([7, 3])
    assert batch["x"].tolist() == [23.0, 11.0]
    assert batch["z"].tolist() == [[31, 28], [15, 12]]


def test_arrays_beside_a_sparse_matrix_are_selected_from(make_h5):
    matrix = {"X/data": np.ones(5, "f4"), "X/indices": np.arange(5), "X/indptr": np.arange(6)}
    path = make_h5({**matrix, "obsm": np.arange(20).reshape(5, 4)})
    with h5py.File(path, "r+") as file:
        file["X"].attrs["shape"] = (5, 5)
    with H5LazyDataset(path, {"X": "X", "obsm": "obsm"}, select={"obsm": {1: [0, 3]}}) as dataset:
        assert dataset.read_batch([4, 1])["obsm"].tolist() == [[16, 19], [4, 7]]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("samples", [{}, {"window": 2}, {"segments": {"axis": 0, "step_axis": 2}, "window": 2}])
@pytest.mark.parametrize(
    ("select", "words"),
    [
        ({1: [0, 3]}, "index 3 of axis 1"),
        ({1: 5}, "index 5 of axis 1"),
        ({1: -4}, "index -4 of axis 1"),
        ({1: {"stop": 4}}, "a slice with the stop 4 of axis 1"),
        ({1: {"start": 2, "stop": 2}}, "an empty slice from 2 to 2 of axis 1"),
    ],
)
def test_what_an_axis_does_not_have_is_refused_with_array_axis_and_length(make_h5, module, samples, select, words):
    paths = [make_h5({"maps": np.zeros((6, n, 8))}) for n in (20, 3)]  # the second file has too few
    if "empty" in words or "-4" in words:
        paths = paths[1:]
    names = {"fields": ["maps"]} if module is CombinedHDF5DataModule else {"x_key": "maps"}
    with pytest.raises(H5ValueError, match=rf"{words} of 'maps' in '{paths[-1]}', .* length 3 \(shape \(6, 3, 8\)\)"):
        module(paths, **names, **samples, select={"maps": select}).setup("fit")


@pytest.mark.parametrize("part", [[True, False, True], {"end": 3}, "0", 1.0, {"step": 0}, {"stop": "2"}])
def test_a_selection_that_is_no_index_is_refused(files, part):
    with pytest.raises(H5ValueError, match=r"select takes .* of 'x'. Pass an index, a list of indices, or a slice"):
        H5LazyDataset(files[0], "x", select={"x": {1: part}})


def test_a_selection_along_the_rows_is_refused(files):
    for axis in (0, -2):
        with pytest.raises(H5ValueError, match=rf"select names axis {axis} of 'x' .* rows along axis 0"):
            H5LazyDataset(files[0], "x", select={"x": {axis: [0]}})


@pytest.mark.parametrize("window", [None, 1])
def test_an_index_taken_twice_is_no_overlap_with_the_array_behind(tmp_path, window):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["behind"] = np.arange(40, dtype="i1").reshape(20, 2), np.arange(20)
    keys = {"x": "x", "behind": "behind"}
    with H5LazyDataset(tmp_path / "a.h5", keys, select={"x": {1: [0, 0, 1]}}, window=window) as dataset:
        x = dataset.read_batch([3, 19])["x"].reshape(2, 3)
    assert x.tolist() == [[6, 6, 7], [38, 38, 39]]


def test_statistics_of_a_selection_are_those_of_its_rows(files):
    report = compute_stats(files[0], "x", select={"x": {1: [0, 2]}}, rows=range(10, 20))
    x = np.arange(300.0).reshape(100, 3)[10:20, [0, 2]]
    (found,) = report.arrays
    np.testing.assert_allclose([np.ravel(found.mean)[0], np.ravel(found.std)[0]], [x.mean(), x.std()])


def test_a_part_of_long_rows_is_read_from_files_with_and_without_chunks(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 20, 1000)).astype("f4")
    paths = [str(tmp_path / "plain.h5"), str(tmp_path / "chunks.h5")]
    for path, storage in zip(paths, ({}, {"chunks": (8, 20, 1000), "compression": "lzf"}), strict=True):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=x, **storage)
    select = {"x": {1: {"stop": 12}}}
    dataset = H5LazyDataset(paths, "x", select=select)
    assert (dataset.read_batch([39, 5, 79]).numpy() == x[[39, 5, 39], :12]).all()
    (stats,) = compute_stats(paths[:1], "x", select=select).arrays
    np.testing.assert_allclose(stats.mean, x[:, :12].mean(dtype="f8"), rtol=1e-9)
