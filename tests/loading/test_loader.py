"""The loader: late start, reading ahead, tokens, errors, position."""

import gc
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from arguments import nested_files
from factories import Stored
from guards import HANG, wait_until

from lightning_h5 import H5Error, H5LazyDataset, H5ResumeError, LazyH5DataModule
from lightning_h5.loading import H5DataLoader
from lightning_h5.order import OrderParameters, PlanSampler


@pytest.fixture
def make_dataset(make_h5):
    rows = np.arange(50 * 4, dtype="f4").reshape(50, 4)
    path = make_h5({"x": rows, "y": np.arange(50)})
    return lambda **options: H5LazyDataset(path, "x", "y", **nested_files(with_index=True, **options))


@pytest.fixture
def dataset(make_dataset):
    return make_dataset()


def loader_of(dataset, batch_size=8, mode="global", **options):
    parameters = OrderParameters(mode=mode, batch_size=batch_size)
    return H5DataLoader(dataset, sampler=PlanSampler(dataset.blocks(), parameters, batch_size=batch_size), **options)


def read_ahead_threads():
    """Threads of loaders; the one that reads from stores lives as long as its process."""
    names = ("lightning_h5-read-ahead", "lightning_h5-decode", "lightning_h5-pin")
    return [thread for thread in threading.enumerate() if thread.name in names]


def rows_of(batches):
    return [row for batch in batches for row in batch[-1].tolist()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_has_every_row_once_with_its_own_target(dataset, num_workers):
    batches = list(loader_of(dataset, num_workers=num_workers))
    assert sorted(rows_of(batches)) == list(range(50))
    for x, y, index in batches:
        assert torch.equal(y, index)
        assert torch.equal(x, torch.from_numpy(np.arange(200, dtype="f4").reshape(50, 4))[index])


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 3}, {"prefetch_factor": 1}])
def test_workers_and_reading_ahead_never_change_the_order(dataset, options):
    assert rows_of(loader_of(dataset, **options)) == rows_of(loader_of(dataset))


def test_batches_that_were_read_while_the_consumer_was_away_come_in_their_order(dataset):
    loader = loader_of(dataset, batch_size=4, prefetch_factor=4)
    batches, rows = iter(loader), []
    for batch in batches:
        rows += rows_of([batch])
        (reading,) = loader._reading
        if len(rows) < 30:
            wait_until(lambda reading=reading: len(reading._queue._begun) >= 2)
    assert rows == rows_of(loader_of(dataset, batch_size=4, num_workers=1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iter_starts_nothing(dataset, num_workers):
    """What Lightning restores between ``iter`` and the first ``next`` must still count."""
    loader = loader_of(dataset, num_workers=num_workers)
    batches = iter(loader)
    assert not read_ahead_threads()
    loader.sampler.set_epoch(3)
    expected = loader_of(dataset)
    expected.sampler.set_epoch(3)
    assert rows_of(batches) == rows_of(expected)


def test_persistent_workers_see_each_epoch(dataset):
    loader = loader_of(dataset, num_workers=2, persistent_workers=True)
    seen = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        seen.append(tuple(rows_of(loader)))
    assert len(set(seen)) == 3
    assert all(sorted(rows) == list(range(50)) for rows in seen)


def test_the_thread_ends_after_break(dataset):
    for _ in loader_of(dataset, prefetch_factor=1):
        break
    gc.collect()
    wait_until(lambda: not read_ahead_threads())  # nobody waits for the thread, which first ends what it was reading


def test_the_thread_ends_with_the_epoch(dataset):
    batches = iter(loader_of(dataset))
    rows_of(batches)
    assert not read_ahead_threads()
    with pytest.raises(StopIteration):
        next(batches)


def test_reading_ahead_is_bounded(dataset):
    loader = loader_of(dataset, batch_size=1, prefetch_factor=3)
    asked = []
    begin = dataset.begin
    dataset.begin = lambda rows, epoch: asked.append(rows) or begin(rows, epoch)
    batches = iter(loader)
    next(batches)
    wait_until(lambda: len(asked) >= 4)
    assert len(asked) == 4  # one given out, three ahead of it
    time.sleep(0.05)
    assert len(asked) == 4


@pytest.mark.parametrize("at", [0, 2])
def test_an_error_while_reading_surfaces_at_next(dataset, at):
    loader = loader_of(dataset)
    begin, tokens = dataset.begin, list(loader.sampler.tokens(0))
    bad = {row for token in tokens[at:] for row in token.rows.tolist()}

    def failing(rows, epoch):
        if bad & set(rows.tolist()):
            raise OSError("the disk is gone")
        return begin(rows, epoch)

    dataset.begin = failing
    batches = iter(loader)
    for _ in range(at):
        next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert not read_ahead_threads()
    with pytest.raises(H5Error, match="has failed"):
        next(batches)


class FailingTransform:
    def __call__(self, x):
        raise ZeroDivisionError("in the transform")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_transform_surfaces_at_next(make_dataset, num_workers):
    dataset = make_dataset(transform=FailingTransform())
    with pytest.raises(ZeroDivisionError, match="in the transform"):
        next(iter(loader_of(dataset, num_workers=num_workers)))


def test_transforms_run_in_the_consumer(make_dataset):
    names = []
    dataset = make_dataset(transform=lambda x: names.append(threading.current_thread().name) or x)
    rows_of(loader_of(dataset))
    assert set(names) == {threading.main_thread().name}


def as_list(samples):
    return samples


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_fn_gets_samples(dataset, num_workers):
    parameters = OrderParameters(mode="none", batch_size=8)
    sampler = PlanSampler(dataset.blocks(), parameters, batch_size=8, samples=True)
    first = next(iter(H5DataLoader(dataset, sampler=sampler, collate_fn=as_list, num_workers=num_workers)))
    assert isinstance(first, list)
    assert [int(y) for _, y, _ in first] == list(range(8))


def test_the_length_is_that_of_a_whole_epoch(dataset):
    loader = loader_of(dataset)
    assert len(loader) == 7
    state = state_after(loader, 3)
    again = loader_of(dataset)
    again.load_state_dict(state)
    assert len(again) == 7
    assert len(list(again)) == 4


def state_after(loader, n_batches, epoch=0):
    loader.sampler.set_epoch(epoch)
    batches = iter(loader)
    for _ in range(n_batches):
        next(batches)
    return loader.state_dict()


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("n_batches", [0, 1, 3, 6, 7])
def test_a_bare_loop_goes_on_with_exactly_the_rest(dataset, n_batches, num_workers):
    whole = loader_of(dataset)
    whole.sampler.set_epoch(2)
    batches = [batch[-1].tolist() for batch in whole]
    again = loader_of(dataset, num_workers=num_workers)
    again.load_state_dict(state_after(loader_of(dataset, num_workers=num_workers), n_batches, epoch=2))
    assert [batch[-1].tolist() for batch in again] == batches[n_batches:]


def test_a_state_of_other_data_is_refused_with_both_values(dataset, make_h5):
    other = H5LazyDataset(make_h5({"x": np.zeros((9, 1), "f4")}), "x")
    with pytest.raises(H5ResumeError, match=r"rows: saved 50, present 9"):
        loader_of(other).load_state_dict(state_after(loader_of(dataset), 1))


def test_the_state_is_plain_and_small(dataset):
    state = state_after(loader_of(dataset), 2)
    assert len(pickle.dumps(state)) < 1000
    assert torch.load(saved(state), weights_only=True) == state


def saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_what_is_read_is_counted_in_this_process_and_in_workers(dataset):
    n_bytes = 50 * (4 * 4 + 8)  # small arrays: each process reads them whole, once
    for num_workers, times in ((2, 2), (0, 1)):
        before = dataset.counters.total()
        rows_of(loader_of(dataset, num_workers=num_workers))
        counted = {name: value - before[name] for name, value in dataset.counters.total().items()}
        assert (counted["rows"], counted["batches"]) == (50, 7)
        assert counted["wait_seconds"] > 0
        assert counted["bytes_read"] == times * n_bytes


def test_an_iterator_that_is_collected_never_waits_for_its_thread(dataset):
    """The collector may run while its thread holds a lock that the reading thread waits for."""
    gate, reached, begin = threading.Event(), threading.Event(), dataset.begin

    def wait_and_begin(rows, epoch):
        reached.set()
        return gate.wait(HANG) and begin(rows, epoch)

    dataset.begin = wait_and_begin
    reading, *_ = loader_of(dataset).start(None)
    assert reached.wait(HANG)
    del reading
    gc.collect()
    assert read_ahead_threads()  # it still stands at the gate
    gate.set()


def test_after_the_rest_of_an_epoch_the_next_pass_is_a_whole_one(dataset):
    again = loader_of(dataset)
    again.load_state_dict(state_after(loader_of(dataset), 3))
    assert [len(rows_of(again)), len(rows_of(again))] == [26, 50]


def test_a_state_taken_at_the_end_of_the_rest_says_that_the_epoch_is_done(dataset):
    again = loader_of(dataset)
    again.load_state_dict(state_after(loader_of(dataset), 3))
    rows_of(again)
    assert [again.state_dict()[name] for name in ("epoch", "segments")] == [1, []]
    again.set_epoch(0)
    rows_of(again)
    assert [again.state_dict()[name] for name in ("epoch", "segments")] == [0, [[8, 1, 7]]]


def test_it_pickles_in_the_middle_of_an_iteration(dataset):
    loader = loader_of(dataset)
    batches = iter(loader)
    next(batches)
    assert len(rows_of(pickle.loads(pickle.dumps(loader)))) == 50


def test_pinning_without_a_gpu_changes_nothing(dataset):
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert len(rows_of(loader_of(dataset, pin_memory=True))) == 50


def test_an_iteration_that_was_closed_does_not_end_as_if_it_were_done(dataset):
    loader = loader_of(dataset)
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(H5Error, match="closed in the middle"):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_draws_its_permutation_once(dataset, num_workers, monkeypatch):
    """At ten million rows it takes a second and 160 MB."""
    from lightning_h5.order import plan

    drawn, draw = [], plan.permutation
    monkeypatch.setattr(plan, "permutation", lambda *args, **more: drawn.append(args) or draw(*args, **more))
    loader = loader_of(dataset, num_workers=num_workers)
    assert len(loader) == 7
    assert not drawn
    assert sorted(rows_of(loader)) == list(range(50))
    assert len(drawn) == 1


@pytest.mark.parametrize("n_good", [0, 1, 3, 29])
def test_an_error_in_the_sampler_surfaces_after_the_batches_before_it(dataset, n_good, monkeypatch):
    loader = loader_of(dataset)
    tokens = list(loader.sampler.tokens(0))

    def failing(sampler, epoch):
        yield from tokens[:n_good]
        raise ZeroDivisionError

    monkeypatch.setattr(PlanSampler, "tokens", failing)
    seen = []
    with pytest.raises(ZeroDivisionError):
        seen.extend(batch[-1].tolist() for batch in loader)
    assert seen == [token.rows.tolist() for token in tokens[:n_good]]
    assert read_ahead_threads() == []


def test_an_iterator_that_ended_stays_at_its_end(dataset):
    batches = iter(loader_of(dataset))
    assert len(list(batches)) == len(loader_of(dataset))
    assert list(batches) == []


@pytest.mark.parametrize("n_cores", [1, 3, 4, 9])
def test_epochs_are_the_same_on_any_number_of_cores(make_h5, nothing_held, monkeypatch, n_cores):
    """With four or more, reads leave decoding to the team, which begins more chunks ahead."""
    rows = np.arange(600 * 3).reshape(600, 3)
    path = make_h5(x=Stored(rows, "chunked", (4, 3), {"compression": "gzip"}))
    monkeypatch.setattr("lightning_h5.readers.thread_pool.cores_of_a_rank", lambda: n_cores)
    options = {"shuffle": {"mode": "chunks", "buffer": 4000}, "files": {"cache_bytes": 4000}}
    module = LazyH5DataModule(path, x_key="x", batch_size=7, with_index=True, seed=5, **options)
    module.setup("fit")
    loader = module.train_dataloader()
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        expected = [token.rows.tolist() for token in loader.sampler.tokens(epoch)]
        batches = list(loader)
        assert [index.tolist() for _, index in batches] == expected
        assert all(np.array_equal(x, rows[index]) for x, index in batches)
    module.teardown("fit")
