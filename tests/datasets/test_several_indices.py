"""Several indices at once give a batch, as torch's own datasets do; so torch's ``BatchSampler`` reads whole batches."""

import numpy as np
import pytest
import torch
from factories import Stored
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import examples
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

from lightning_h5 import CombinedHDF5DataModule, H5ValueError, LazyH5DataModule
from lightning_h5.datasets import CombinedHDF5Dataset, H5LazyDataset, RankMemCachedH5Dataset

N = 23


def double(value):
    return {name: each * 2 for name, each in value.items()} if isinstance(value, dict) else value * 2


def dataset_of(datamodule):
    datamodule.setup("fit")
    return datamodule.train_dataloader().dataset


KINDS = {
    "lazy": lambda path: H5LazyDataset(path, "x", "y", with_index=True),
    "lazy, transformed": lambda path: H5LazyDataset(path, "x", "y", transform=double, batch_transform=tuple),
    "lazy, some rows": lambda path: H5LazyDataset(path, {"x": "x", "y": "y"}, indices=np.arange(N)[::-1]),
    "cached": lambda path: RankMemCachedH5Dataset(path, "x", "y", with_index=True),
    "combined": lambda path: CombinedHDF5Dataset(path, ["x", "y"], with_index=True),
    "mixture": lambda path: dataset_of(
        CombinedHDF5DataModule(mixture={"all": path}, load_fields=["x", "y"], shuffle=False)
    ),
    "weighted": lambda path: dataset_of(LazyH5DataModule(path, x_key="x", y_key="y", weights="y", shuffle=False)),
    "sequences": lambda path: dataset_of(
        CombinedHDF5DataModule(
            path, load_fields=["x", "group"], segments={"key": "group", "bucket": True}, shuffle=False
        )
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    from factories import H5Factory

    x = Stored(np.arange(3 * N, dtype="f4").reshape(N, 3), "chunked", (4, 3), {"compression": "gzip"})
    return H5Factory(tmp_path_factory.mktemp("data"))({"x": x, "y": np.arange(1, N + 1), "group": np.arange(N)})


@pytest.fixture(scope="module", params=KINDS)
def dataset(request, path):
    return KINDS[request.param](path)


def same(a, b):
    if isinstance(a, dict):
        assert list(a) == list(b)
        return all(same(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.wide
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(-N, N - 1), min_size=1, max_size=9))
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda rows: np.array(rows, "i4")])
def test_a_list_or_an_array_of_indices_gives_what_read_batch_gives(dataset, kind, rows):
    assert same(dataset[kind(rows)], dataset.read_batch(rows))


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.slices(N))
def test_a_slice_or_a_range_gives_what_read_batch_gives(dataset, rows):
    wanted = list(range(N))[rows]
    if wanted:
        assert same(dataset[rows], dataset.read_batch(wanted))
        assert same(dataset[range(N)[rows]], dataset.read_batch(wanted))


@pytest.mark.parametrize("row", [3, -1, np.int64(3), np.array(3), torch.tensor(3)], ids=repr)
def test_one_index_gives_a_sample_whatever_kind_of_integer_it_is(dataset, row):
    assert same(dataset[row], dataset.__getitems__([int(row)])[0])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_batch_sampler_reads_whole_batches(dataset, num_workers):
    sampler = BatchSampler(SequentialSampler(dataset), 5, drop_last=False)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=num_workers)
    expected = [dataset.read_batch(rows) for rows in sampler]
    assert len(expected) == 5
    assert all(same(plain(a), plain(b)) for a, b in zip(loader, expected, strict=True))
    shuffled = DataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), 5, drop_last=True), batch_size=None)
    assert len(list(shuffled)) == 4


def plain(batch):
    """A batch with tuples for lists: torch's ``default_convert`` makes one of the other."""
    if isinstance(batch, dict):
        return {name: plain(each) for name, each in batch.items()}
    return tuple(map(plain, batch)) if isinstance(batch, list | tuple) else batch


def test_a_subset_takes_several_indices(dataset):
    assert same(Subset(dataset, [7, 3, 5, 1])[[2, 0]], dataset.read_batch([5, 7]))


@pytest.mark.parametrize(
    ("index", "advice"),
    [
        ((1, 2), r"read_batch\(\[3, 1, 2\]\)"),
        ([[1, 2]], r"read_batch\(\[3, 1, 2\]\)"),
        (np.zeros((2, 2), int), r"read_batch\(\[3, 1, 2\]\)"),
        ([True, False], "np.flatnonzero"),
        (torch.ones(N, dtype=torch.bool), "np.flatnonzero"),
        ([0.5], "Pass integers"),
        ("x", "Pass integers"),
        (None, "Pass integers"),
    ],
    ids=repr,
)
def test_what_is_no_list_of_indices_is_refused_with_what_to_pass(dataset, index, advice):
    with pytest.raises(H5ValueError, match=advice):
        dataset[index]


@pytest.mark.parametrize("index", [N, -N - 1, [0, N], np.array([-N - 1])], ids=repr)
def test_an_index_outside_is_an_index_error(dataset, index):
    with pytest.raises(IndexError, match=f"a dataset with {N} rows"):
        dataset[index]


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("options", [{}, {"batch_size": 3}], ids=str)
def test_a_batch_sampler_without_batch_size_none_says_how_it_is_passed(dataset, num_workers, options):
    sampler = BatchSampler(SequentialSampler(dataset), 9, drop_last=False)  # the last batch is shorter
    loader = DataLoader(dataset, sampler=sampler, num_workers=num_workers, **options)
    with pytest.raises(ValueError, match=r"batch_sampler=\.\.\., or as sampler=\.\.\. together with batch_size=None"):
        list(loader)


@pytest.mark.parametrize(
    ("index", "shown"),
    [
        ((1, 2), r"\(1, 2\) was"),
        ([[1, 2]], r"\[\[1, 2\]\] was"),
        ([[1, 2], [3]], r"\[\[1, 2\], \[3\]\] was"),
        (np.zeros((2, 2), int), r"an array of dtype int64 and shape \(2, 2\) was"),
        ([0.5], r"\[0\.5\] was"),
        ("x", "'x' was"),
        (1.0, r"1\.0 was"),
    ],
    ids=repr,
)
def test_what_was_passed_is_named(dataset, index, shown):
    with pytest.raises(H5ValueError, match=rf"^{shown} passed as (an index|indices);"):
        dataset[index]
