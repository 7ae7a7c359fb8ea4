"""Loops without a Trainer: Lightning Fabric, and a bare loop of PyTorch, alone and over processes."""

import gc
import multiprocessing
import os
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed
from arguments import nested
from lightning.fabric import Fabric
from lightning_models import index_of
from processes import run_ranks, values

from lightning_h5 import H5LazyDataset, LazyH5DataModule
from lightning_h5.loading import H5DataLoader
from lightning_h5.order import OrderParameters, PlanSampler

ROWS, BATCH, STEPS = 60, 8, 8
ALL = list(range(ROWS))
STOPS = [1, 5, 8]  # batches of the epoch that were given out; 8 are all of it


@pytest.fixture
def file(make_h5):
    return make_h5({"x": np.arange(ROWS)})


WORKERS = pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": False}],
    ids=["no workers", "persistent workers", "new workers each epoch"],
)


def loader_of(file, **options):
    """As a user without a Trainer gets it: from a data module that was set up by hand."""
    options = {"batch_size": BATCH, "with_index": True} | options
    datamodule = LazyH5DataModule(file, **nested(**options))
    datamodule.setup("fit")
    return datamodule.train_dataloader()


def rows_of(batches):
    return [row for batch in batches for row in index_of(batch)]


def epochs_of(loader, n, first=0):
    """Rows of epochs of a bare loop, which tells the sampler the epoch, as with any distributed sampler."""
    seen = []
    for epoch in range(first, n):
        loader.sampler.set_epoch(epoch)
        seen.append(rows_of(loader))
    return seen


@pytest.fixture
def whole(file):
    return epochs_of(loader_of(file), 4)


def take(iterable, n):
    return [batch for _, batch in zip(range(n), iterable, strict=False)]


# A bare loop -----------------------------------------------------------------------------------------------------


@WORKERS
def test_a_bare_loop_has_every_row_once_in_an_order_of_each_epoch(file, whole, options):
    assert epochs_of(loader_of(file, **options), 4) == whole
    assert all(sorted(rows) == ALL for rows in whole)
    assert len({tuple(rows) for rows in whole}) == 4


@pytest.mark.wide
@WORKERS
@pytest.mark.parametrize("n", STOPS)
def test_a_bare_loop_saved_in_an_epoch_goes_on_with_the_rest_and_with_whole_epochs(file, whole, options, n):
    loader = loader_of(file, **options)
    epochs_of(loader, 1)
    loader.sampler.set_epoch(1)
    batches = iter(loader)
    seen = rows_of(take(batches, n))
    state = loader.state_dict()
    again = loader_of(file, **options)
    again.load_state_dict(state)
    assert seen + rows_of(again) == whole[1]
    assert epochs_of(again, 4, first=2) == whole[2:]


def test_a_state_taken_before_the_first_batch_of_an_epoch_has_all_of_it_left(file, whole):
    loader, again = loader_of(file), loader_of(file)
    epochs_of(loader, 1)
    loader.sampler.set_epoch(1)
    again.load_state_dict(loader.state_dict())
    assert rows_of(again) == whole[1]


@WORKERS
def test_a_state_taken_after_the_epoch_says_that_nothing_of_it_is_left(file, whole, options):
    loader, again = loader_of(file, **options), loader_of(file, **options)
    epochs_of(loader, 2)
    again.load_state_dict(loader.state_dict())
    assert again.sampler.epoch == 1
    assert rows_of(again) == []
    assert epochs_of(again, 4, first=2) == whole[2:]


@WORKERS
def test_after_break_the_next_iteration_is_a_whole_epoch(file, whole, options):
    loader = loader_of(file, **options)
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)
        for _, _batch in zip(range(3), loader, strict=False):
            pass
        assert rows_of(loader) == whole[epoch]


@WORKERS
def test_a_state_taken_after_break_goes_on_with_the_rest(file, whole, options):
    loader, seen = loader_of(file, **options), []
    loader.sampler.set_epoch(2)
    for batch in loader:
        seen += index_of(batch)
        if len(seen) == 24:
            break
    state = loader.state_dict()
    again = loader_of(file, **options)
    again.load_state_dict(state)
    assert seen + rows_of(again) == whole[2]


def test_the_same_loader_may_go_back_to_a_state_of_its_own(file, whole):
    loader = loader_of(file)
    loader.sampler.set_epoch(1)
    take(loader, 3)
    state = loader.state_dict()
    epochs_of(loader, 4)
    loader.load_state_dict(state)
    assert rows_of(loader) == whole[1][24:]
    assert epochs_of(loader, 4, first=2) == whole[2:]


def test_stopped_twice_in_one_epoch_nothing_is_lost(file, whole):
    seen, state = [], None
    for n in (2, 3, STEPS):
        loader = loader_of(file)
        if state is None:
            loader.sampler.set_epoch(1)
        else:
            loader.load_state_dict(state)
        seen += rows_of(take(loader, n))
        state = loader.state_dict()
    assert seen == whole[1]


def test_teardown_ends_persistent_workers(file):
    datamodule = LazyH5DataModule(file, batch_size=BATCH, with_index=True, num_workers=2)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    assert sorted(rows_of(loader)) == ALL
    assert len(multiprocessing.active_children()) == 2
    datamodule.teardown("fit")
    assert not multiprocessing.active_children()
    assert sorted(rows_of(loader)) == ALL, "they start again where they are needed"
    datamodule.teardown("fit")


def test_a_loader_that_is_dropped_is_forgotten_at_once(file):
    """Not when the collector comes: it would wait for workers that nobody told to end."""
    datamodule = LazyH5DataModule(file, batch_size=BATCH, num_workers=1)
    datamodule.setup("fit")
    kept = weakref.ref(datamodule.train_dataloader())
    assert kept() is not None
    gc.disable()
    try:
        del datamodule
        assert kept() is None
    finally:
        gc.enable()


def test_two_iterations_at_once_do_not_disturb_each_other(file, whole):
    loader = loader_of(file)
    pairs = list(zip(loader, loader, strict=True))
    assert rows_of(first for first, _ in pairs) == rows_of(second for _, second in pairs) == whole[0]


def test_a_dataset_and_sampler_without_a_data_module_give_the_same(file, whole):
    dataset = H5LazyDataset(file, "x", with_index=True)
    parameters = OrderParameters(mode="global", batch_size=BATCH)
    loader = H5DataLoader(dataset, sampler=PlanSampler(dataset.blocks(), parameters, batch_size=BATCH))
    assert epochs_of(loader, 4) == whole


# Processes that were told of each other by hand ------------------------------------------------------------------


def leaves_at_once(rank, file):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 0:
        time.sleep(0.3)  # the other one waits for it by then
    loader = loader_of(file)
    if rank == 0:
        os._exit(0)
    return len(rows_of(loader))


@pytest.mark.wide
def test_a_rank_may_end_while_others_are_still_reading(file, tmp_path):
    assert [outcome.value for outcome in run_ranks(leaves_at_once, 2, tmp_path, file)] == [None, ROWS // 2]


def by_hand(rank, file, world_size, n, state, epochs, early, num_workers):
    """Stops in epoch 1 after ``n`` batches, or goes on from ``state``; the loader may be there before the ranks."""
    if early:
        loader = loader_of(file, num_workers=num_workers)
    if world_size > 1:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    if not early:
        loader = loader_of(file, num_workers=num_workers)
    if state is not None:
        loader.load_state_dict(state)
        return [rows_of(loader), *epochs_of(loader, epochs, first=2)], None
    seen = epochs_of(loader, 1)
    loader.sampler.set_epoch(1)
    batches = take(loader, n)
    return [*seen, [index_of(batch) for batch in batches]], loader.state_dict()


def in_order(ranks):
    """Rows of all ranks in the order of the plan: step by step, rank by rank."""
    return [row for step in zip(*ranks, strict=True) for batch in step for row in batch]


def every(ranks):
    return sorted(row for rank in ranks for row in rank)


@pytest.mark.wide
@pytest.mark.parametrize(("early", "num_workers"), [(False, 0), (True, 2)], ids=["loader after", "before, workers"])
def test_two_processes_by_hand_share_each_epoch(file, tmp_path, whole, early, num_workers):
    (first, _), (second, _) = values(run_ranks(by_hand, 2, tmp_path, file, 2, STEPS, None, 2, early, num_workers))
    assert len(first[0]) == len(second[0]) == ROWS // 2
    assert every([first[0], second[0]]) == ALL
    assert in_order([first[1], second[1]]) == whole[1]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("before", "after", "num_workers"), [(2, 1, 0), (1, 2, 0), (2, 3, 0), (3, 2, 2), (2, 2, 2)], ids=str
)
def test_a_state_goes_on_over_another_number_of_processes(file, tmp_path, whole, before, after, num_workers):
    saved = values(run_ranks(by_hand, before, tmp_path, file, before, 2, None, 2, False, num_workers))
    state, seen = saved[0][1], in_order([rows[1] for rows, _ in saved])
    assert all(other == state for _, other in saved), "any rank's state will do"
    assert seen == whole[1][: len(seen)]
    resumed = values(run_ranks(by_hand, after, tmp_path, file, after, 0, state, 3, False, num_workers))
    assert every([seen, *(rows[0] for rows, _ in resumed)]) == ALL
    assert every(rows[1] for rows, _ in resumed) == ALL


# Fabric ----------------------------------------------------------------------------------------------------------


def fabric_of(devices=1):
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    return fabric


@WORKERS
def test_fabric_has_every_row_once_in_an_order_of_each_epoch(file, whole, options):
    loader = fabric_of().setup_dataloaders(loader_of(file, **options))
    assert [rows_of(loader) for _ in range(4)] == whole


def fabric_on_a_rank(rank, file, early, num_workers):
    loader = loader_of(file, num_workers=num_workers) if early else None
    fabric = fabric_of(devices=2)
    loader = fabric.setup_dataloaders(loader or loader_of(file, num_workers=num_workers))
    return [[index_of(batch) for batch in loader] for _ in range(2)]


@pytest.mark.wide
@pytest.mark.parametrize(("early", "num_workers"), [(False, 0), (True, 2)], ids=["loader after", "before, workers"])
def test_fabric_over_two_ranks_has_each_row_once(file, tmp_path, whole, early, num_workers):
    first, second = values(run_ranks(fabric_on_a_rank, 2, tmp_path, file, early, num_workers))
    assert [in_order([first[epoch], second[epoch]]) for epoch in (0, 1)] == whole[:2]


@pytest.mark.wide
@WORKERS
@pytest.mark.parametrize("n", STOPS)
def test_fabric_goes_on_from_its_checkpoint_with_the_rest_and_with_whole_epochs(file, whole, tmp_path, options, n):
    """Its own count of epochs begins anew in a new process."""
    fabric, ours = fabric_of(), loader_of(file, **options)
    loader = fabric.setup_dataloaders(ours)
    assert rows_of(loader) == whole[0]
    seen = rows_of(take(loader, n))
    fabric.save(tmp_path / "state.ckpt", {"loader": ours.state_dict(), "epoch": 1})

    fabric, ours = fabric_of(), loader_of(file, **options)
    loader = fabric.setup_dataloaders(ours)
    saved = fabric.load(tmp_path / "state.ckpt")
    ours.load_state_dict(saved["loader"])
    assert seen + rows_of(loader) == whole[1]
    assert [rows_of(loader), rows_of(loader)] == whole[2:]


def test_fabric_restores_a_loader_with_batches_of_another_size(file, whole, tmp_path):
    fabric, ours = fabric_of(), loader_of(file)
    seen = rows_of(take(fabric.setup_dataloaders(ours), 2))
    fabric.save(tmp_path / "state.ckpt", {"loader": ours})
    fabric, ours = fabric_of(), loader_of(file, batch_size=5)
    fabric.load(tmp_path / "state.ckpt", {"loader": ours})
    assert seen + rows_of(fabric.setup_dataloaders(ours)) == whole[0]


def fabric_resumed_on_a_rank(rank, file, folder, world_size, n):
    fabric, ours = fabric_of(world_size), loader_of(file)
    loader = fabric.setup_dataloaders(ours)
    if n is None:
        ours.load_state_dict(fabric.load(f"{folder}/state.ckpt")["loader"])
        seen = [rows_of(loader), rows_of(loader)]
    else:
        rows_of(loader)
        seen = [index_of(batch) for batch in take(loader, n)]
        fabric.save(f"{folder}/state.ckpt", {"loader": ours.state_dict()})
    return seen


@pytest.mark.wide
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_fabric_goes_on_over_another_number_of_ranks(file, tmp_path, whole, before, after):
    broken = values(run_ranks(fabric_resumed_on_a_rank, before, tmp_path, file, str(tmp_path), before, 2))
    resumed = values(run_ranks(fabric_resumed_on_a_rank, after, tmp_path, file, str(tmp_path), after, None))
    seen = in_order(broken)
    assert seen == whole[1][: 16 * before]
    assert every([seen, *(rest for rest, _ in resumed)]) == ALL
    assert every(rows for _, rows in resumed) == ALL
