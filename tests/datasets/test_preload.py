"""Who of a machine holds and loads what: the sums that processes which share memory have to agree on."""

import gc
import os
import resource

import numpy as np
import pytest
from factories import run_forked
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.datasets.preload import Crew, my_part, places_in, union
from lightning_h5.datasets.shard_memory import PAGE, ShardMemory
from lightning_h5.errors import H5Error, H5ValueError
from lightning_h5.readers import BulkTask
from lightning_h5.sampling import BlockTable, RankShard


@st.composite
def shards(draw):
    """The rows of some ranks, one or all of them among these, as any draw gives them."""
    world_size = draw(st.integers(1, 7))
    blocks = BlockTable.of_sizes(draw(st.lists(st.integers(1, 5), max_size=12)))
    shard = RankShard(blocks, world_size, 0, draw(st.sampled_from(["contiguous", "interleave"])), 1, 3)
    ranks = draw(st.sets(st.integers(0, world_size - 1), min_size=1) | st.just(set(range(world_size))))
    number = draw(st.integers(0, 2))
    return [shard.rows(number, rank) for rank in sorted(ranks)]


@given(shards())
def test_the_union_of_shards_is_all_their_rows_in_ascending_order(each):
    found = union(each)
    assert list(found) == sorted(row for rows in each for row in rows)


@given(st.integers(0, 40), st.integers(1, 9), st.sampled_from(["contiguous", "interleave"]))
def test_the_union_of_all_shards_takes_no_memory_as_long_as_none_was_drawn_anew(n_rows, world_size, mode):
    shard = RankShard(BlockTable.of_sizes([n_rows]), world_size, 0, mode)
    assert union([shard.rows(0, rank) for rank in range(world_size)]) == range(n_rows)


@given(shards(), st.data())
def test_places_are_where_rows_stand_among_those_held(each, data):
    held, rows = union(each), data.draw(st.sampled_from(each))
    places = np.asarray(places_in(held, rows), dtype=np.int64)
    assert np.asarray(held, dtype=np.int64)[places].tolist() == list(rows)
    if isinstance(held, range) and isinstance(rows, range):
        assert isinstance(places_in(held, rows), range)


@given(st.sets(st.integers(0, 60), min_size=1).map(sorted), st.data())
def test_places_of_picked_rows_may_come_in_any_order_and_again(held, data):
    rows = np.array(data.draw(st.lists(st.sampled_from(held), max_size=30)), dtype=np.int64)
    places = places_in(np.array(held), rows)
    assert np.array(held)[places].tolist() == rows.tolist()


@given(st.lists(st.integers(1, 1 << 26), max_size=60), st.integers(1, 9))
def test_a_crew_does_each_task_once_and_each_about_as_much(sizes, n_processes):
    tasks = [BulkTask(number, size, lambda: None) for number, size in enumerate(sizes)]
    parts = [list(my_part(tasks, Crew((0,), place, n_processes))) for place in range(n_processes)]
    assert [task.n_bytes for part in parts for task in part] == list(range(len(tasks)))
    largest = max(sizes, default=0)
    assert all(abs(sum(t.n_decoded for t in part) - sum(sizes) / n_processes) <= largest for part in parts)


# Shared memory -----------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    made = ShardMemory([(3, 5), (1000, PAGE), (0, 7), (4, 0), (64, 16)], shared=True)
    yield made
    made.close()


def test_columns_lie_apart_and_are_there_for_who_opens_the_memory_again(memory, monkeypatch):
    """Also where the system writes less at a time than it was asked to."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, place: real(fd, data[: max(1, len(data) // 2)], place))
    shapes = [column.shape for column in memory.columns]
    for number, shape in enumerate(shapes):
        half = shape[0] // 2
        for start, stop in ((half, shape[0]), (0, half)):
            memory.write(number, start, np.full((stop - start, shape[1]), number + 1, np.uint8))
    other = ShardMemory(shapes, shared=True, descriptor=os.dup(memory.descriptor))
    for one in (memory, other):
        assert [column.shape for column in one.columns] == shapes
        assert all((column == number + 1).all() for number, column in enumerate(one.columns))
    other.close()
    assert (memory.columns[1] == 2).all()


def test_memory_that_the_system_has_not_is_an_error_and_no_signal(memory):
    """A write to the map would end the process. A limit on files stands in for a full machine."""

    def write_too_much():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 * PAGE, 100 * PAGE))
        with pytest.raises(H5Error, match=r"no memory left for a shard of 4,097,039 bytes: .* Hold less"):
            memory.write(1, 0, np.ones((1000, PAGE), np.uint8))
        with pytest.raises(H5ValueError, match=r"no 819,200 bytes of shared memory: .* Hold less"):
            ShardMemory([(200, PAGE)], shared=True)

    assert run_forked(write_too_much) == 0


def test_memory_that_cannot_be_mapped_closes_its_descriptor_once():
    """A second time it would be somebody else's."""
    descriptor = os.memfd_create("too short")
    with pytest.raises(H5Error, match=r"12,288 bytes of shared memory cannot be mapped: .* Hold less"):
        ShardMemory([(3, PAGE)], shared=True, descriptor=descriptor)
    another = os.memfd_create("another")
    gc.collect()  # the error held what had failed
    os.close(another)
    assert another == descriptor


def test_memory_of_one_process_alone_does_not_travel():
    for shared in (False, True):
        with pytest.raises(TypeError, match="only while that is being started"):
            ShardMemory([(3, 5)], shared=shared).__getstate__()
