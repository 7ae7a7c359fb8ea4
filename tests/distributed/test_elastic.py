"""Ranks that start again, on the same number of nodes or another: they find nothing that earlier ranks left behind."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from guards import HANG
from processes import run_ranks

from lightning_h5.distributed import exchange, process_group
from lightning_h5.errors import H5Error

SECONDS = timedelta(seconds=HANG)


def agree(rank, port, group, world_size, numbers, patience):
    """What a rank of a group agrees on, with a store that earlier groups used: each group of torch has its own part."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=SECONDS)
    process_group._store = lambda: store  # the same names for all groups
    own = dist.PrefixStore(f"group {group}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=SECONDS)
    found = []
    for _ in range(2):
        try:
            with exchange("setup", patience) as ranks:
                if numbers[rank] is None:  # this one does not arrive
                    dist.barrier()  # the others are there
                    raise SystemExit(0)
                if None in numbers:
                    dist.barrier()
                found.append(ranks.agree({"number": numbers[rank]}, None, [group, rank]))
        except H5Error as error:
            found.append(str(error))
            break
    if None not in numbers:
        dist.barrier()
    return found


def groups(n):
    """World sizes and what each rank has: equal numbers, or another one on the last rank, or a rank that ends."""
    for group in range(n):
        world_size = (2, 3)[group % 3 == 2]
        last = {0: group, 1: group + 1, 3: None}.get(group % 4, group)
        yield group, world_size, [group] * (world_size - 1) + [last]


def check(tmp_path, n):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for group, world_size, numbers in groups(n):
        patience = 5.0 if None in numbers else float(HANG)
        arguments = (server.port, group, world_size, numbers, patience)
        outcomes = run_ranks(agree, world_size, tmp_path / str(group), *arguments)
        for rank, outcome in enumerate(outcomes):
            if numbers[rank] is None:
                continue
            assert outcome.error is None, outcome.output
            if None in numbers:
                assert f"did not finish on rank {world_size - 1}" in outcome.value[-1]
            elif len(set(numbers)) == 1:
                assert outcome.value == [[[group, one] for one in range(world_size)]] * 2
            else:
                assert f"rank {world_size - 1} has {numbers[-1]}" in outcome.value[-1]


@pytest.mark.wide
def test_ranks_that_start_again_with_the_same_store_find_nothing_of_earlier_ones(tmp_path):
    check(tmp_path, 2)


@pytest.mark.wide
def test_twenty_groups_of_ranks_with_one_store_agree_on_their_own_numbers(tmp_path):
    check(tmp_path, 20)


def begin_late(rank, port, seconds, patience):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=SECONDS)
    dist.init_process_group("gloo", store=dist.PrefixStore(str(patience), store), rank=rank, world_size=2)
    time.sleep(seconds[rank])
    try:
        with exchange("setup", patience) as ranks:
            return ranks.agree({}, None, rank)
    except H5Error as error:
        return str(error)


@pytest.mark.wide
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_begins_late_is_waited_for_as_long_as_asked(tmp_path, late):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = server.port, [15.0 if rank == late else 0.0 for rank in range(2)]
    outcomes = run_ranks(begin_late, 2, tmp_path / "long", *arguments, float(HANG))
    assert [outcome.value for outcome in outcomes] == [[0, 1]] * 2
    outcomes = run_ranks(begin_late, 2, tmp_path / "short", *arguments, 3.0)
    assert f"did not finish on rank {late} of 2" in outcomes[1 - late].value
