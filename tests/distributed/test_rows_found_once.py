"""Which rows pass is worked out by one rank of a machine, and by each where that cannot be."""

import os
import time

import numpy as np
import pytest
import torch.distributed
from processes import run_ranks, values

from lightning_h5 import CombinedHDF5DataModule, CombinedHDF5Dataset, H5ValueError
from lightning_h5.distributed import OncePerNode, processes
from lightning_h5.samples import selection
from lightning_h5.samples.selection import Selection

ROWS = 50


@pytest.fixture
def files(make_h5):
    rows = [np.arange(start, start + ROWS) for start in (0, 100)]
    return [make_h5(x=row, age=row % 7, guid=np.array([f"p{one % 5}" for one in row], "S")) for row in rows]


def expected(*ages):
    return [place for place, row in enumerate([*range(ROWS), *range(100, 100 + ROWS)]) if row % 7 in ages]


class Counting:
    """Counts how often rows are selected in this process."""

    def __init__(self):
        self.n = 0
        self._find = Selection.find
        Selection.find = lambda *arguments, **options: self(*arguments, **options)

    def __call__(self, *arguments, **options):
        self.n += 1
        time.sleep(0.3)  # the others are here by then
        return self._find(*arguments, **options)


def start(rank, world_size=3):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    return Counting()


def rank_that_filters(rank, files):
    counting = start(rank)
    dataset = CombinedHDF5Dataset(files, where={"age": [1, 2]})
    seen = counting.n, dataset.indices.tolist(), dataset.read_batch([0, -1])["x"].tolist()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return seen


def test_one_rank_finds_the_rows_and_all_have_them(files, tmp_path):
    seen = values(run_ranks(rank_that_filters, 3, tmp_path, files))
    assert sum(n for n, *_ in seen) == 1
    assert [rows for _, rows, _ in seen] == [expected(1, 2)] * 3
    assert [batch for *_, batch in seen] == [[1, 149]] * 3


def rank_that_chooses_among_some(rank, files):
    counting = start(rank)
    among = np.arange(2 * ROWS)[::-3]
    rows = CombinedHDF5Dataset(files, where={"age": [1, 2]}, indices=among).indices.tolist()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return counting.n, rows, [row for row in among.tolist() if row in expected(1, 2)]


@pytest.mark.wide
def test_rows_that_one_rank_finds_among_some_keep_their_order(files, tmp_path):
    seen = values(run_ranks(rank_that_chooses_among_some, 3, tmp_path, files))
    assert sum(n for n, *_ in seen) == 1
    assert all(rows == wanted for _, rows, wanted in seen)


def rank_with_its_own_order(rank, files):
    counting = start(rank)
    asked = [1, 2, 3] if rank else [3, 1, 2]
    found = {}
    for age in asked:
        found[age] = CombinedHDF5Dataset(files, where={"age": age}).indices.tolist()
    again = CombinedHDF5Dataset(files, where={"age": 1})  # of which some may have come and gone
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return counting.n, found, again.indices.tolist()


@pytest.mark.wide
def test_ranks_may_ask_in_any_order_and_again(files, tmp_path):
    for n, found, again in values(run_ranks(rank_with_its_own_order, 3, tmp_path, files)):
        assert found == {age: expected(age) for age in (1, 2, 3)}
        assert again == expected(1)
        assert n <= 4


def is_young(column):
    return column < 2


def rank_with_a_function(rank, files):
    counting = start(rank)
    rows = CombinedHDF5Dataset(files, where={"age": is_young}).indices.tolist()
    torch.distributed.destroy_process_group()
    return counting.n, rows


@pytest.mark.wide
def test_each_rank_asks_its_own_function(files, tmp_path):
    assert values(run_ranks(rank_with_a_function, 3, tmp_path, files)) == [(1, expected(0, 1))] * 3


def rank_whose_first_is_no_help(rank, files, how):
    counting = start(rank)
    if how == "slow":
        processes.NODE_PATIENCE = 0.2

        def find(*arguments, **options):
            """Does not end before all ranks look for rows, however late one of them begins."""
            torch.distributed.barrier()
            return counting(*arguments, **options)

        Selection.find = find
    if how == "too much to send":
        selection.MAX_SENT = 0
    rows = CombinedHDF5Dataset(files, where={"age": [1, 2]}).indices.tolist()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return counting.n, rows


def rank_that_takes_its_time(rank, files):
    counting = start(rank)
    processes.NODE_PATIENCE, processes.NODE_PROGRESS = 5.0, 0.05

    def find(selection, counters, progress, **options):
        for _ in range(25):
            time.sleep(0.25)
            progress()
        return counting(selection, counters, progress, **options)

    Selection.find = find
    dataset = CombinedHDF5Dataset(files, where={"age": [1, 2]})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return counting.n, dataset.indices.tolist()


@pytest.mark.wide
def test_ranks_wait_for_a_slow_one_that_goes_on(files, tmp_path):
    seen = values(run_ranks(rank_that_takes_its_time, 3, tmp_path, files))
    assert sum(n for n, _ in seen) == 1
    assert [rows for _, rows in seen] == [expected(1, 2)] * 3


class OpensInItsWorker(torch.utils.data.Dataset):
    """What people write who open files where they read them."""

    def __init__(self, files):
        self.files, self.dataset = files, None

    def __len__(self):
        return len(expected(1, 2))

    def __getitem__(self, place):
        if self.dataset is None:
            self.dataset = CombinedHDF5Dataset(self.files, where={"age": [1, 2]}, on_bad_file="skip")
        return self.dataset[place]["x"]


def rank_with_workers(rank, files):
    start(rank)
    time.sleep(0.3)  # before Python 3.11.10 a fork while another thread enters the interpreter hangs
    loader = torch.utils.data.DataLoader(OpensInItsWorker(files), num_workers=2, multiprocessing_context="fork")
    rows = [int(row) for _ in range(2) for row in loader]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return rows


@pytest.mark.wide
def test_a_worker_of_a_rank_is_no_rank(files, tmp_path):
    places = expected(1, 2)
    every = [*range(ROWS), *range(100, 100 + ROWS)]
    assert values(run_ranks(rank_with_workers, 3, tmp_path, files)) == [[every[place] for place in places] * 2] * 3


@pytest.mark.wide
@pytest.mark.parametrize("how", ["slow", "too much to send"])
def test_a_rank_does_it_itself_where_the_first_is_no_help(files, tmp_path, how):
    assert values(run_ranks(rank_whose_first_is_no_help, 3, tmp_path, files, how)) == [(1, expected(1, 2))] * 3


def rank_whose_first_ends(rank, files):
    counting = start(rank)
    torch.distributed.barrier()  # all are connected to all
    if rank == 1:
        Selection.find = lambda *_, **__: os._exit(0)
        CombinedHDF5Dataset(files, where={"age": [1, 2]})
    time.sleep(0.5)
    rows = CombinedHDF5Dataset(files, where={"age": [1, 2]}).indices.tolist()
    return counting.n, rows


def test_nobody_waits_for_a_rank_that_has_ended(files, tmp_path):
    outcomes = run_ranks(rank_whose_first_ends, 3, tmp_path, files)
    assert [outcomes[rank].error for rank in (0, 2)] == [None] * 2
    assert [outcomes[rank].value[1] for rank in (0, 2)] == [expected(1, 2)] * 2
    assert sum(outcomes[rank].value[0] for rank in (0, 2)) == 2


def rank_that_finds_none(rank, files):
    start(rank)
    with pytest.raises(H5ValueError) as caught:
        CombinedHDF5Dataset(files, where={"age": [1], "x": {"min": 1000}})
    datamodule = CombinedHDF5DataModule(
        files,
        where={"age": [1], "x": {"min": 1000}},
        distributed={"world_size": 3, "rank": rank},
    )
    with pytest.raises(H5ValueError) as in_setup:
        datamodule.setup("fit")
    torch.distributed.destroy_process_group()
    return str(caught.value), str(in_setup.value)


@pytest.mark.wide
def test_where_no_row_passes_all_ranks_say_so(files, tmp_path):
    told = values(run_ranks(rank_that_finds_none, 3, tmp_path, files))
    assert len(set(told)) == 1
    assert all("keeps 0" in text for text in told[0])


def rank_of_a_data_module(rank, files):
    counting = start(rank)
    datamodule = CombinedHDF5DataModule(
        files,
        where={"age": [1, 2, 3]},
        split=0.2,
        batch_size=2,
        distributed={"world_size": 3, "rank": rank},
    )
    datamodule.setup("fit")
    rows = [row for batch in datamodule.train_dataloader() for row in batch["x"].tolist()]
    n = counting.n
    datamodule.teardown("fit")
    torch.distributed.destroy_process_group()
    return n, rows


def test_a_data_module_filters_once_a_split_and_machine(files, tmp_path):
    seen = values(run_ranks(rank_of_a_data_module, 3, tmp_path, files))
    assert sum(n for n, _ in seen) == 2  # training and validation
    rows = [row for _, mine in seen for row in mine]
    assert len(set(rows)) == len(rows)


def test_alone_there_is_nobody_to_tell(files):
    question = OncePerNode("anything")
    assert question.is_first
    assert not question.has_others
    assert len(CombinedHDF5Dataset(files, where={"age": 1})) == len(expected(1))
