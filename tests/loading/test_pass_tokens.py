"""``PassTokens``: the tokens of one pass after the other; what workers do with those that are announced to them."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from guards import HANG

from lightning_h5 import H5Error
from lightning_h5.loading.pass_tokens import PassTokens
from lightning_h5.loading.worker_process import ComingBatches
from lightning_h5.loading.workers import PinnedBatches
from lightning_h5.order import BlockTable, OrderParameters, PlanSampler
from lightning_h5.types import BatchToken


@pytest.fixture
def sampler():
    blocks = BlockTable.of_sizes([5, 5])
    return PlanSampler(blocks, OrderParameters(mode="global", seed=2), batch_size=4, rank=0, world_size=1)


def steps(tokens):
    return [token[:2] for token in tokens]


def rows(tokens):
    return [token.rows.tolist() for token in tokens]


def test_iterating_ends_with_each_pass(sampler):
    tokens = PassTokens(sampler, 3)
    tokens.consume(3, 4)
    assert rows(tokens) == rows(sampler.tokens(3))
    assert [*tokens] == []
    assert not tokens.are_ahead
    assert tokens.begin_next(waits=True)
    assert tokens.are_ahead
    assert not tokens.begin_next(waits=True)  # the consumer has not come to epoch 4
    tokens.consume(4, 5)
    assert rows(tokens) == rows(sampler.tokens(4))
    assert tokens.begin_next(waits=True)
    assert steps(tokens) == [(5, 0), (5, 1), (5, 2)]


def test_nothing_follows_unless_it_is_expected(sampler):
    tokens = PassTokens(sampler, 0)
    assert not tokens.expects_more
    assert len([*tokens]) == 3
    assert not tokens.begin_next(waits=True)
    assert not tokens.goes_on_with(1)


def test_a_pass_that_starts_before_its_tokens_were_taken_has_them_all(sampler):
    tokens = PassTokens(sampler, 0)
    tokens.consume(0, 1)
    assert len([*tokens]) == 3
    assert tokens.goes_on_with(1)
    tokens.consume(1, 2)
    assert tokens.begin_next(waits=True)
    assert steps(tokens) == [(1, 0), (1, 1), (1, 2)]
    assert tokens.begin_next(waits=True)
    assert steps(tokens) == [(2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize("is_begun", [False, True])
def test_only_the_expected_pass_goes_on(sampler, is_begun):
    tokens = PassTokens(sampler, 0)
    tokens.consume(0, 1)
    assert len([*tokens]) == 3
    assert not is_begun or tokens.begin_next(waits=True)
    assert [epoch for epoch in range(4) if tokens.goes_on_with(epoch)] == [1]


CHANGES = {
    "batch_size": 5,
    "drop_last": True,
    "samples": True,
    "seed": 3,
    "parameters": OrderParameters(mode="none"),
    "blocks": BlockTable.of_sizes([10]),
    "_replica_arguments": (1, 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_sampler_makes_other_tokens(sampler, name):
    tokens = PassTokens(sampler, 0)
    tokens.consume(0, 1)
    assert len([*tokens]) == 3
    assert tokens.begin_next(waits=True)
    assert tokens.goes_on_with(1)
    setattr(sampler, name, CHANGES[name])
    assert not tokens.goes_on_with(1)


def test_a_plan_that_takes_long_keeps_nobody_waiting(sampler, monkeypatch):
    gate, is_planned, original = threading.Event(), threading.Event(), PlanSampler.tokens

    def slow(sampler, epoch):
        assert gate.wait(HANG)
        yield from original(sampler, epoch)

    tokens = PassTokens(sampler, 0)
    tokens.when_planned = is_planned.set
    tokens.consume(0, 1)
    assert len([*tokens]) == 3
    monkeypatch.setattr(PlanSampler, "tokens", slow)
    assert not tokens.begin_next()
    assert not tokens.begin_next()
    assert tokens.goes_on_with(1)
    gate.set()
    assert is_planned.wait(HANG)
    assert tokens.begin_next()
    assert steps(tokens) == [(1, 0), (1, 1), (1, 2)]
    tokens.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "lightning_h5-plan"]


def test_an_error_of_the_plan_is_raised_by_its_first_token(sampler, monkeypatch):
    def failing(sampler, epoch):
        raise H5Error("no plan")
        yield

    tokens = PassTokens(sampler, 0)
    tokens.consume(0, 1)
    assert len([*tokens]) == 3
    monkeypatch.setattr(PlanSampler, "tokens", failing)
    assert tokens.begin_next(waits=True)
    with pytest.raises(H5Error, match="no plan"):
        next(tokens)


# Workers -----------------------------------------------------------------------------------------------------------


class Dataset:
    """Has room for so many batches; a task for each block of them."""

    def __init__(self, room):
        self.room, self.tasks, self.prefetched = room, 0, []
        self.work = SimpleNamespace(help=self._help)

    def prefetch(self, rows, epoch):
        if rows[0] < 0:
            raise H5Error("damaged")
        if not self.room:
            return False
        self.room -= 1
        self.tasks += len(rows)
        self.prefetched.append((epoch, rows.tolist()))
        return True

    def _help(self):
        self.tasks -= self.tasks > 0
        return self.tasks > 0


def token(epoch, step, *rows):
    return BatchToken(epoch, step, np.array(rows))


def test_a_worker_decodes_for_announced_batches_in_their_order():
    dataset = Dataset(room=2)
    coming = ComingBatches(dataset)
    assert not coming.decode()
    coming.add([token(0, 4, 1, 2), token(0, 6, 3), token(1, 0, 4)])
    while coming.decode():
        pass
    assert dataset.prefetched == [(0, [1, 2]), (0, [3])]  # there is no room for more
    assert not dataset.tasks
    coming.drop_until(token(0, 4))
    dataset.room = 1
    while coming.decode():
        pass
    assert dataset.prefetched[2:] == [(1, [4])]


def test_a_worker_forgets_what_was_requested_or_belongs_to_another_pass():
    dataset = Dataset(room=9)
    coming = ComingBatches(dataset)
    coming.add([token(0, 4, 1), token(0, 6, 2), token(1, 0, 3)])
    coming.drop_until(token(0, 6))
    assert coming.decode()
    assert dataset.prefetched == [(1, [3])]
    coming.add([token(1, 2, 4)])
    coming.drop_until(None)
    while coming.decode():
        pass
    assert dataset.prefetched == [(1, [3])]


def test_damage_that_a_worker_meets_ahead_is_left_to_the_request():
    coming = ComingBatches(Dataset(room=9))
    coming.add([token(0, 4, -1), token(0, 6, 2)])
    assert not coming.decode()


# Page-locked memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_passes", [1, 3])
def test_a_thread_that_pins_goes_on_with_the_next_pass_until_there_is_none(monkeypatch, n_passes):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    batches = iter(range(5 * n_passes))

    class OfWorkers:
        can_go_on = True

        def __next__(self):
            return next(batches)

        def close(self):
            pass

    pinned = PinnedBatches(OfWorkers())
    found = []
    for _ in range(n_passes):
        assert pinned.can_go_on
        found += [next(pinned) for _ in range(5)]
    assert found == list(range(5 * n_passes))
    with pytest.raises(StopIteration):
        next(pinned)
    assert not pinned.can_go_on
