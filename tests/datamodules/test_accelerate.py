"""Under Hugging Face Accelerate a prepared loader is the loader: its rows, its order, its shards."""

import os

import numpy as np
import pytest
from lightning_models import index_of
from processes import run_ranks, values

from lightning_h5 import LazyH5DataModule

pytest.importorskip("accelerate")
ROWS = 40


@pytest.fixture
def path(make_h5):
    return make_h5({"x": np.arange(ROWS)})


def epochs(rank, path, num_workers, world_size):
    """Two epochs as a script of Accelerate trains them, and the batch after the first three of another one."""
    from accelerate import Accelerator

    if world_size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world_size
    module = LazyH5DataModule(path, x_key="x", batch_size=4, num_workers=num_workers, with_index=True)
    module.setup("fit")
    loader = module.train_dataloader()
    assert accelerator.prepare(loader) is loader
    seen = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        seen.append([])
        for batch in loader:
            assert batch[0].tolist() == index_of(batch)
            seen[-1] += index_of(batch)
    accelerator.end_training()
    return seen


@pytest.mark.parametrize(
    ("world_size", "num_workers"),
    [(1, 2), *(pytest.param(*case, marks=pytest.mark.wide) for case in [(1, 0), (2, 0), (2, 2)])],
)
def test_each_row_comes_once_an_epoch(path, tmp_path, world_size, num_workers):
    ranks = values(run_ranks(epochs, world_size, tmp_path, path, num_workers, world_size))
    for epoch in range(2):
        rows = [row for rank in ranks for row in rank[epoch]]
        assert sorted(rows) == list(range(ROWS))
    assert ranks[0][0] != ranks[0][1]
    assert all(len(rank[0]) == ROWS // world_size for rank in ranks)
