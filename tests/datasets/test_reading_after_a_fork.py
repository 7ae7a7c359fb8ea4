"""Rows are read in a process that was forked from one whose threads of torch had worked."""

import h5py
import numpy as np
import pytest
import torch
from factories import run_forked

from lightning_h5 import H5LazyDataset, RankMemCachedH5Dataset

SHAPE = (1024, 4096)  # enough that torch shares a copy of it among threads


@pytest.fixture
def two_threads():
    """Torch's threads have worked in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.rand(SHAPE).index_select(0, torch.arange(len(np.empty(SHAPE))))
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["mapped", "decoded", "shard"])
def test_a_forked_process_reads_without_torchs_threads(tmp_path, two_threads, nothing_held, kind):
    x = np.arange(np.prod(SHAPE), dtype="f4").reshape(SHAPE)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        packed = {"chunks": (64, SHAPE[1]), "compression": "lzf"} if kind == "decoded" else {}
        file.create_dataset("x", data=x, **packed)
    dataset = {
        "mapped": lambda: H5LazyDataset(
            tmp_path / "rows.h5",
            "x",
            files={"mmap": True},
        ),
        "decoded": lambda: H5LazyDataset(tmp_path / "rows.h5", "x"),
        "shard": lambda: RankMemCachedH5Dataset(tmp_path / "rows.h5", "x"),
    }[kind]()
    rows = np.arange(SHAPE[0])[::-1].copy()

    def read():
        for _ in range(2):  # of what is decoded, the second time is out of memory
            (column,) = dataset.gather(rows).columns
            assert np.array_equal(column.numpy(), x[rows])

    read()
    assert run_forked(read) == 0
    dataset.close()
