"""Who of a machine holds and loads what: the sums that processes which share memory have to agree on."""

import gc
import os
import resource

import numpy as np
import pytest
from factories import run_forked
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.datasets.shard_loading import NodeGroup, my_part
from lightning_h5.datasets.shard_memory import PAGE, ShardMemory
from lightning_h5.errors import H5Error, H5ValueError
from lightning_h5.readers import BulkTask


@given(st.lists(st.integers(1, 1 << 26), max_size=60), st.integers(1, 9))
def test_a_crew_does_each_task_once_and_each_about_as_much(sizes, n_processes):
    tasks = [BulkTask(number, size, lambda: None) for number, size in enumerate(sizes)]
    parts = [list(my_part(tasks, NodeGroup((0,), place, n_processes))) for place in range(n_processes)]
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
