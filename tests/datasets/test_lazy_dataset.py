"""``H5LazyDataset``: its arguments, what it refuses, and what it counts. Its values are claimed for all datasets."""

import os

import h5py
import numpy as np
import pytest
import torch
from arguments import nested_files
from dataset_conformance import same
from factories import Stored, edit, random_values
from torch.utils.data import DataLoader

from lightning_h5.datasets import H5LazyDataset
from lightning_h5.errors import H5CorruptError, H5KeyError, H5ValueError

N = 23
RNG = np.random.default_rng(5)
DATA = {
    "images": RNG.integers(0, 256, (N, 3, 4), dtype=np.uint8),
    "signals": RNG.normal(size=(N, 5)),
    "labels": np.arange(N, dtype=">i2"),
    "names": np.array([f"row {i} ü".encode() for i in range(N)], object),
}
TABLE = np.zeros(N, [("age", ">f4"), ("pair", "i2", (2,))])
TABLE["age"], TABLE["pair"] = RNG.normal(size=N), RNG.integers(0, 9, (N, 2))


def write(make_h5, n_files=1):
    """The data, cut over files; images chunked and compressed, the rest contiguous."""
    paths = []
    for part in np.array_split(np.arange(N), n_files):
        images = Stored(DATA["images"][part], "chunked", (4, 2, 4), {"compression": "gzip"})
        names = Stored(DATA["names"][part], dtype=h5py.string_dtype())
        arrays = {"images": images, "g/signals": DATA["signals"][part], "labels": DATA["labels"][part]}
        paths.append(make_h5({**arrays, "names": names, "table": TABLE[part]}))
    return paths


@pytest.mark.parametrize(
    ("x_dtype", "expected"),
    [
        ("float16", torch.float16),
        (np.float32, torch.float32),
        (np.dtype(">f8"), torch.float64),
        (torch.bfloat16, torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        (None, torch.uint8),
        ({"images": "float64"}, torch.float64),
    ],
    ids=str,
)
def test_a_dtype_is_a_name_a_numpy_or_a_torch_dtype_or_a_mapping(make_h5, x_dtype, expected):
    dataset = H5LazyDataset(write(make_h5), "images", x_dtype=x_dtype)
    assert dataset[3].dtype == dataset.read_batch([3]).dtype == expected
    assert torch.equal(dataset[3], torch.from_numpy(DATA["images"][3]).to(expected))


def test_dtypes_may_be_given_for_some_fields_and_text_is_left_alone(make_h5):
    keys = {"a": "images", "b": "g/signals", "n": "names"}
    path = write(make_h5)
    dataset = H5LazyDataset(path, keys, "names", x_dtype={"b": "float16"})
    x, y = dataset[2]
    assert (x["a"].dtype, x["b"].dtype, x["n"], y) == (torch.uint8, torch.float16, "row 2 ü", "row 2 ü")
    with pytest.raises(H5ValueError, match=r"y_dtype='float32' was given.*holds text.*decode"):
        H5LazyDataset(path, keys, "names", y_dtype="float32")


def test_indices_choose_rows_in_their_order_and_a_mask_keeps_the_files_order(make_h5):
    path = write(make_h5)
    chosen = H5LazyDataset(path, "labels", indices=[4, 2, 2, 9])
    assert (len(chosen), chosen.read_batch(range(4)).tolist(), int(chosen[-1])) == (4, [4, 2, 2, 9], 9)
    masked = H5LazyDataset(path, "labels", indices=DATA["labels"] % 5 == 0)
    assert masked.read_batch(range(len(masked))).tolist() == [0, 5, 10, 15, 20]
    empty = H5LazyDataset(path, "labels", indices=[])
    assert len(empty) == 0
    with pytest.raises(IndexError):
        empty[0]


@pytest.mark.parametrize("indices", [[0, N], [-1], [[0, 1]], [0.5], np.ones(N - 1, bool)], ids=str)
def test_indices_that_are_no_rows_are_refused(make_h5, indices):
    with pytest.raises(H5ValueError, match=rf"indices .*{N} rows"):
        H5LazyDataset(write(make_h5), "labels", indices=indices)


@pytest.mark.parametrize("how", ["glob", "directory", "list", "Path"])
def test_several_files_are_one_dataset(make_h5, tmp_path, how):
    paths = write(make_h5, 3)
    given_as = {"glob": str(tmp_path / "*.h5"), "directory": str(tmp_path), "list": paths, "Path": tmp_path}[how]
    dataset = H5LazyDataset(given_as, "labels")
    assert dataset.read_batch(range(N)).tolist() == list(range(N))


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (np.zeros((4, 2)), np.zeros((4, 3)), r"shape of a row \(2,\) in .*\(3,\) in"),
        (np.zeros((4, 2)), np.zeros((4, 2), "f4"), r"dtype float64 in .*float32 in"),
        (np.zeros(4, "i4"), np.array([b"a"] * 4), r"dtype int32 in "),
    ],
    ids=["shape", "dtype", "text"],
)
def test_files_that_do_not_belong_together_are_refused_by_both_names(make_h5, first, second, what):
    paths = [make_h5(x=np.zeros(4), y=first), make_h5(x=np.zeros(4), y=second)]
    with pytest.raises(H5ValueError, match=what) as error:
        H5LazyDataset(paths, "x", "y")
    assert all(path in str(error.value) for path in paths)


def test_a_key_missing_in_one_of_several_files_names_that_file(make_h5):
    paths = [make_h5(x=np.zeros(4)), make_h5(z=np.zeros(4))]
    with pytest.raises(H5KeyError, match=rf"'x' is not in '{paths[1]}'"):
        H5LazyDataset(paths, "x")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.array([b"a", b"b"])}, r"'x' in .* holds text, and a tensor cannot. Pass it as y_key"),
        ({"x": np.zeros(2, [("a", "i4"), ("b", "f4")])}, "'x' in .* is a table.*'x/a', 'x/b'"),
        ({"x": np.zeros(2, "longdouble")}, r"'x' in .* has the dtype .*float128"),
        (
            {"x": Stored(np.array([["a"], ["b", "c"]], object), dtype=h5py.vlen_dtype(h5py.string_dtype()), written=0)},
            "has the dtype object",
        ),
        ({"x": np.zeros(2), "y": np.zeros(3)}, "'x' has 2 rows and 'y' has 3 in "),
        ({"x": np.zeros(2), "y": np.zeros(2, [("a", "i4")])}, "'y' in .* is a table"),
    ],
    ids=["text", "table", "longdouble", "ragged", "row counts", "table as y"],
)
def test_what_cannot_be_trained_from_is_refused_at_construction(make_h5, arrays, words):
    arrays = {name: a if isinstance(a, Stored) else Stored(a) for name, a in arrays.items()}
    path = make_h5(arrays)
    with pytest.raises(H5ValueError, match=words) as error:
        H5LazyDataset(path, "x", "y" if "y" in arrays else None)
    assert path in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x_dtype": "flaot32"}, r"x_dtype='flaot32'.*Did you mean 'float32'"),
        ({"y_key": "labels", "y_dtype": "string"}, "y_dtype='string'"),
        ({"x_key": {"a": "images"}, "x_dtype": {"b": "float32"}}, "x_dtype names 'b'; the fields are 'a'"),
        ({"x_key": {"a": "images"}, "x_dtype": {"a": "floaty"}}, r"x_dtype\['a'\]='floaty'"),
        ({"target_transform": abs}, "target_transform was given without y_key"),
        ({"cache_bytes": "lots"}, "cache_bytes='lots' is not a size"),
        ({"rdcc_nbytes": -1}, "rdcc_nbytes=-1 is not a size"),
        ({"x_key": []}, "x_key=.* does not name an array"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(make_h5, arguments, words):
    with pytest.raises(H5ValueError, match=words):
        H5LazyDataset(write(make_h5), **nested_files(**{"x_key": "images", **arguments}))


def test_arrays_outside_the_file_need_to_be_allowed(make_h5, tmp_path):
    make_h5(data=np.arange(6.0), name="other.h5")
    path = make_h5(data=np.arange(6.0) + 100)
    with h5py.File(path, "a") as file:
        file["x"] = h5py.ExternalLink("other.h5", "/data")
    with pytest.raises(H5ValueError, match="allow_external=True"):
        H5LazyDataset(path, "x")
    for mmap in (False, True):
        dataset = H5LazyDataset(
            path,
            "x",
            "data",
            files={"allow_external": True, "mmap": mmap},
        )
        assert [part.tolist() for part in dataset.read_batch([5, 0])] == [[5.0, 0.0], [105.0, 100.0]]


@pytest.mark.usefixtures("nothing_held")
def test_a_damaged_chunk_is_an_error_that_names_file_array_and_rows(make_h5):
    path = make_h5(x=Stored(np.zeros((20, 50)), "chunked", (5, 50), {"fletcher32": True}))
    with h5py.File(path) as file:
        edit(path, file["x"].id.get_chunk_info(1).byte_offset)
    dataset = H5LazyDataset(path, "x")
    assert dataset.read_batch([0, 19]).sum() == 0
    with pytest.raises(H5CorruptError, match=rf"rows 5 to 9\) of 'x' in '{path}'"):
        dataset[7]


def test_the_standard_loader_reads_a_batch_in_one_go(make_h5, monkeypatch):
    dataset = H5LazyDataset(write(make_h5), "images", "labels")
    asked = []
    real = dataset.gather
    monkeypatch.setattr(dataset, "gather", lambda rows: asked.append(rows.tolist()) or real(rows))
    batches = list(DataLoader(dataset, batch_size=10))
    assert asked == [list(range(10)), list(range(10, 20)), [20, 21, 22]]
    assert torch.equal(torch.cat([y for _, y in batches]), torch.arange(N, dtype=torch.int16))


def test_an_error_in_a_worker_reaches_the_parent_with_its_text(make_h5, nothing_held):
    dataset = H5LazyDataset(write(make_h5, 2), "g/signals", "names")
    path = dataset.table.paths[1]
    os.truncate(path, 100)
    loader = DataLoader(dataset, batch_size=N, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(OSError, match=path):
        list(loader)


def test_a_batch_transform_runs_once_on_the_collated_batch(make_h5):
    calls = []

    def transform(batch):
        calls.append(batch)
        return batch[0].float(), batch[1]

    dataset = H5LazyDataset(write(make_h5), "images", "labels", batch_transform=transform)
    x, y = dataset.read_batch([1, 2, 3])
    assert (x.dtype, y.tolist(), len(calls)) == (torch.float32, [1, 2, 3], 1)
    assert same(dataset[1], H5LazyDataset(write(make_h5), "images", "labels")[1])


@pytest.mark.usefixtures("nothing_held")
def test_counters_count_the_bytes_read(make_h5):
    dataset = H5LazyDataset(make_h5(x=np.zeros((50, 100), "f4"), z=np.zeros(50)), "x")
    dataset.read_batch([1, 2, 3, 3])
    assert dataset.counters.total()["bytes_read"] == 4 * 400
    dataset[7]
    assert dataset.counters.total()["bytes_read"] == dataset.counters.total()["bytes_decoded"] == 5 * 400


def test_counters_tell_decoded_bytes_from_bytes_read(make_h5, nothing_held):
    x = Stored(np.zeros((40, 100), "f4"), "chunked", (10, 100), {"compression": "gzip"})
    dataset = H5LazyDataset(make_h5(x=x), "x")
    dataset.read_batch([1, 11])
    total = dataset.counters.total()
    assert total["bytes_decoded"] == 2 * 10 * 400
    assert 0 < total["bytes_read"] < 8000 / 10


def test_small_arrays_are_read_once(make_h5, monkeypatch, single_reads):
    """Labels and ids are asked for in every batch; a file on a network answers each read in milliseconds."""
    dataset = H5LazyDataset(write(make_h5), "g/signals", "labels")
    calls = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: calls.append(args) or real(*args))
    for _ in range(3):
        dataset.read_batch(range(5))
        dataset[9]
    assert len([args for args in calls if len(args) == 3]) == 2  # those with a flag look into the page cache
    assert dataset.counters.total()["bytes_read"] == N * (5 * 8 + 2)


def test_random_values_of_every_dtype_reach_the_batch_unchanged(make_h5, nothing_held):
    for dtype in ("?", "i1", "i2", "i4", "i8", "u1", "u2", ">u4", "u8", "f2", ">f4", "f8", "c8", ">c16"):
        values = random_values(dtype, (9, 2))
        batch = H5LazyDataset(make_h5(x=values), "x").read_batch([8, 0, 0])
        assert batch.numpy().tobytes() == values[[8, 0, 0]].astype(values.dtype.newbyteorder("=")).tobytes()
