"""Samples over rows in memory have the rows that they have in the files, and no others are held."""

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from lightning_h5 import RankMemCachedH5Dataset

LENGTHS = [5, 9, 2, 14, 8]
N = sum(LENGTHS)
KINDS = {
    "rows": {"y_key": "y"},
    "windows": {"y_key": "y", "segments": {"lengths": "lengths"}, "window": {"x": [-2, 3], "y": 0}},
    "padded windows": {"segments": {"lengths": "lengths"}, "window": {"steps": [-1, 3], "pad": "zeros"}},
    "random windows": {"segments": {"lengths": "lengths"}, "window": {"steps": [0, 3], "random": True}},
    "windows with text": {"x_key": {"x": "x", "text": "text"}, "segments": {"lengths": "lengths"}, "window": 3},
    "segments": {"segments": {"lengths": "lengths"}, "sample": "segment", "collate_fn": "list"},
    "patches": {"x_key": {"v": "v", "w": "w"}, "patch": {"shape": [3, 4], "border": "pad"}},
    "random patches": {"x_key": "v", "patch": {"shape": [3, 4], "random": 9}},
    "sparse rows": {"x_key": "X", "y_key": "of_row"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("held") / "a.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=rng.random((N, 3)), chunks=(4, 3), compression="gzip")
        file["y"], file["lengths"] = np.arange(N), LENGTHS
        file["text"] = [f"row {number}" for number in range(N)]
        file.create_dataset("v", data=rng.random((13, 17)), chunks=(4, 5), compression="gzip")
        file.create_dataset("w", data=rng.random((13, 17)), chunks=(6, 3), compression="gzip")
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [20, 30]})
        lengths = rng.integers(0, 6, 20)
        columns = np.concatenate([np.sort(rng.choice(30, length, replace=False)) for length in lengths])
        matrix["data"], matrix["indices"] = rng.random(len(columns)), columns.astype("i4")
        matrix["indptr"], file["of_row"] = np.concatenate([[0], np.cumsum(lengths)]), np.arange(20) // 5
    return path


def of_kind(path, kind, **arguments):
    return RankMemCachedH5Dataset(path, **{"x_key": "x"} | KINDS[kind] | {"rank": 0, "world_size": 1} | arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("some", ["all", "every third", "a few", "one"])
def test_rows_in_memory_are_those_of_the_samples(path, kind, some):
    """Exactly those, unless an epoch draws which rows a sample has."""
    table = of_kind(path, kind, preload=False).table
    indexer, n = table.indexer, table.n_samples
    samples = {"all": range(n), "every third": range(1, n, 3), "a few": np.array([n - 1, 2, 0, 3]), "one": range(4, 5)}
    numbers = np.asarray(samples[some])
    needed = indexer.rows_held(samples[some], table.n_rows)
    rows = [needed[field] if field in table.fields_of_rows else None for field in range(table.n_fields)]
    held = indexer.over(rows, samples[some])
    indices = np.random.default_rng(1).permutation(len(numbers))
    for epoch in (None, 0, 5):
        batch, places = indexer.rows_of(numbers[indices], epoch), held.rows_of(indices, epoch)
        for of_field, field, place in zip(rows, batch.fields, places.fields, strict=True):
            in_files = place.rows if of_field is None else np.asarray(of_field)[place.rows]
            assert in_files.tolist() == field.rows.tolist()
        if "random" not in kind:
            of_samples = {row for field in table.fields_of_rows for row in batch.fields[field].rows.tolist()}
            assert {row for field in table.fields_of_rows for row in np.asarray(rows[field]).tolist()} == of_samples


@pytest.mark.parametrize("kind", ["rows", "padded windows", "segments", "sparse rows"])
def test_numbers_of_rows_that_follow_each_other_take_no_memory(path, kind):
    held = of_kind(path, kind)._held
    assert all(isinstance(rows, range) for rows in held.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_make_the_samples_that_one_rank_makes(path, kind):
    def values(dataset):
        samples = [dataset[number] for number in range(len(dataset))]
        tensors = [sample if isinstance(sample, tuple | dict) else (sample,) for sample in samples]
        return [
            [value.tolist() if isinstance(value, torch.Tensor) else value for value in _values(each)]
            for each in tensors
        ]

    whole = values(of_kind(path, kind))
    for mode in ("contiguous", "interleave"):
        shards = [of_kind(path, kind, mode=mode, rank=rank, world_size=3, preload=False) for rank in range(3)]
        for shard in shards:
            shard.for_training = False
            assert values(shard) == [whole[number] for number in shard.rows.tolist()]


def _values(sample):
    return list(sample.values()) if isinstance(sample, dict) else list(sample)


@pytest.mark.parametrize("indices", [[5, 1, 1, 30, 2, 5], range(37, 3, -2), np.arange(10, 20)], ids=str)
def test_text_comes_in_any_order_and_again(path, indices):
    dataset = of_kind(path, "rows", y_key="text", indices=np.asarray(indices))
    x, text = dataset.read_batch([4, 0, 3, 1])
    with h5py.File(path) as file:
        numbers = np.asarray(indices)[[4, 0, 3, 1]]
        assert text == [f"row {number}" for number in numbers]
        assert x.tolist() == file["x"][()][numbers].astype("f4").tolist()


def test_an_indexer_over_memory_goes_to_another_process(path):
    dataset = of_kind(path, "windows", share_memory=True)
    samples = pickle.loads(pickle.dumps(dataset._held._samples))
    places = [field.rows.tolist() for field in samples.rows_of(np.array([2, 0])).fields]
    assert places == [field.rows.tolist() for field in dataset._held.rows_of(np.array([2, 0]), None).fields]
