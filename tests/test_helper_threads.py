"""Threads that run tasks start when there are some, run each once, and end; none of them waits forever."""

import threading
import time

import pytest
from factories import run_forked
from guards import HANG, wait_until
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.threads import HelperThreads


def threads_of(helpers):
    return [thread for thread in threading.enumerate() if thread.name == helpers.name]


@pytest.fixture
def helpers(request):
    helpers = HelperThreads(request.node.name, 4, idle_seconds=0.01)
    yield helpers
    helpers.end()


@given(rests=st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.003]), max_size=30), most=st.integers(1, 5))
def test_each_task_is_run_once_and_then_all_threads_end(rests, most):
    helpers, done = HelperThreads("test-once", most, idle_seconds=0.002), []
    for number, rest in enumerate(rests):
        assert helpers.put(lambda number=number: done.append(number))
        assert len(threads_of(helpers)) <= most
        time.sleep(rest)
    wait_until(lambda: len(done) == len(rests))
    wait_until(lambda: not threads_of(helpers))
    assert sorted(done) == list(range(len(rests)))
    assert helpers.n_unfinished == 0


def test_there_is_a_thread_for_each_task_up_to_the_limit(helpers):
    meet = threading.Barrier(4)
    for _ in range(8):
        helpers.put(lambda: meet.wait(HANG))
    wait_until(lambda: not helpers.n_unfinished)
    assert not meet.broken


def test_threads_end_though_each_was_woken_for_a_task_that_another_took(helpers):
    """So does Python's ``SimpleQueue.get`` wait forever, once its timeout is over when the thread resumes."""
    for _ in range(300):
        for _ in range(4):
            helpers.put(lambda: None)
        time.sleep(0.001)
    wait_until(lambda: not threads_of(helpers))


def test_the_end_waits_for_tasks_that_run_and_drops_the_others(helpers):
    may_go_on, done = threading.Event(), []
    for number in range(9):
        helpers.put(lambda number=number: (may_go_on.wait(HANG), done.append(number)))
    timer = threading.Timer(0.05, may_go_on.set)
    timer.start()
    helpers.end()
    timer.join()
    assert 1 <= len(done) <= 4
    assert not threads_of(helpers)
    assert helpers.n_unfinished == 0
    helpers.put(lambda: done.append("again"))
    wait_until(lambda: "again" in done)


def test_a_forked_child_has_threads_of_its_own(helpers):
    may_go_on = threading.Event()
    for _ in range(9):
        helpers.put(lambda: may_go_on.wait(HANG))

    def child():
        assert helpers.n_unfinished == 0
        helpers.end()
        done = threading.Event()
        helpers.put(done.set)
        assert done.wait(HANG)

    assert run_forked(child) == 0
    may_go_on.set()


def test_a_task_without_any_thread_is_given_back(helpers, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    assert not helpers.put(lambda: None)
    assert helpers.n_unfinished == 0
