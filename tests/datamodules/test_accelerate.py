"""Under Hugging Face Accelerate a prepared loader is the loader: its rows, its order, its shards."""

import os

import numpy as np
import pytest
import torch
from lightning_models import index_of
from processes import run_ranks, values
from torch.utils.data import DataLoader

from lightning_h5 import H5LazyDataset, LazyH5DataModule
from lightning_h5.loading import create_optimized_dataloader

pytest.importorskip("accelerate")
ROWS = 40


@pytest.fixture(autouse=True)
def no_other_loops():
    """No loops of other tests of this process are under way, which the garbage collector may not have ended yet."""
    from accelerate.state import GradientState

    GradientState._reset_state()


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
    for _ in range(2):
        seen.append([])
        for batch in loader:
            assert batch[0].tolist() == index_of(batch)
            seen[-1] += index_of(batch)
    accelerator.end_training()
    return seen


@pytest.mark.wide
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


def steps_of(loader):
    """The (epoch, batch) of each optimizer step of a script that accumulates gradients of four batches."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1)
    model, loader = accelerator.prepare(model, loader)
    seen = []
    for epoch in range(2):
        for batch, x in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(x.float()[:, None]).mean())
            seen += [(epoch, batch)] if accelerator.sync_gradients else []
        assert not accelerator.gradient_state.in_dataloader
    return seen


def test_gradients_are_not_accumulated_past_the_end_of_a_pass(path):
    ours = create_optimized_dataloader(H5LazyDataset(path, "x"), 4)
    plain = DataLoader(H5LazyDataset(path, "x"), batch_size=4)
    assert steps_of(ours) == steps_of(plain) == [(epoch, batch) for epoch in range(2) for batch in (3, 7, 9)]


def test_a_loop_that_is_left_is_no_longer_under_way(path):
    from accelerate.state import GradientState

    loader = create_optimized_dataloader(H5LazyDataset(path, "x"), 4)
    for _ in loader:
        next(iter(loader))
        assert GradientState().in_dataloader
        break
    assert not GradientState().in_dataloader


@pytest.mark.parametrize("collate_fn", [None, torch.stack], ids=["batches", "samples"])
def test_the_first_batches_of_an_epoch_are_skipped(path, collate_fn):
    from accelerate import skip_first_batches

    dataset = H5LazyDataset(path, "x", transform=lambda x, rng: x + torch.tensor(rng.normal()) + torch.rand(()))
    loader = create_optimized_dataloader(dataset, 4, collate_fn=collate_fn)
    expected = [[batch.tolist() for batch in loader] for _ in range(3)]
    rest = skip_first_batches(loader, 3)
    assert len(rest) == 7
    rest.batch_sampler.batch_sampler.set_epoch(1)  # as the Trainer of Hugging Face does
    assert [batch.tolist() for batch in rest] == expected[1][3:]

    loader = create_optimized_dataloader(dataset, 4, collate_fn=collate_fn)
    assert [batch.tolist() for batch in skip_first_batches(loader, 3)] == expected[0][3:]
    assert [batch.tolist() for batch in loader] == expected[1]
