"""Forked workers open files of their own, and errors in them reach the parent. What they read is claimed elsewhere."""

import os

import numpy as np
import pytest
import torch
from dataset_conformance import no_files_are_inherited
from factories import Stored
from torch.utils.data import DataLoader

from lightning_h5.datasets import H5LazyDataset
from lightning_h5.hdf5 import process_pool

N = 40
X = np.random.default_rng(0).normal(size=(N, 6)).astype("f4")
NAMES = np.array([f"name {i}".encode() for i in range(N)])


@pytest.fixture
def dataset(make_h5, nothing_held):
    paths = []
    for part in (slice(0, 25), slice(25, N)):
        x = Stored(X[part], "chunked", (7, 6), {"compression": "gzip", "shuffle": True})
        paths.append(make_h5(x=x, raw=X[part], y=np.arange(N)[part], names=NAMES[part]))
    return H5LazyDataset(paths, {"x": "x", "raw": "raw", "name": "names"}, "y", transform=tag)


def tag(x):
    """Says which process the sample was read in."""
    return {**x, "pid": os.getpid()}


def check(batches):
    rows = torch.cat([y for _, y in batches])
    assert sorted(rows.tolist()) == list(range(N))
    for name in ("x", "raw"):
        assert np.array_equal(torch.cat([x[name] for x, _ in batches]), X[rows])
    assert [name for x, _ in batches for name in x["name"]] == [NAMES[row].decode() for row in rows]
    return {pid for x, _ in batches for pid in x["pid"].tolist()}


@pytest.mark.parametrize("worker_init_fn", [no_files_are_inherited, None], ids=["with init function", "without"])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used by the parent"])
def test_forked_workers_open_files_of_their_own(dataset, used, worker_init_fn):
    if used:
        dataset.read_batch(range(N))
        assert len(process_pool()) > 0
    loader = DataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        num_workers=2,
        worker_init_fn=worker_init_fn,
        multiprocessing_context="fork",
    )
    for _ in range(2):
        pids = check(list(loader))
        assert len(pids) == 2
        assert os.getpid() not in pids
    if used:
        assert check([dataset.read_batch(range(N))]) == {os.getpid()}  # the parent's own files still work


def test_an_error_in_a_worker_reaches_the_parent_with_its_text(dataset):
    os.truncate(dataset.table.paths[1], 100)
    loader = DataLoader(dataset, batch_size=N, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(OSError, match=dataset.table.paths[1]):
        list(loader)
