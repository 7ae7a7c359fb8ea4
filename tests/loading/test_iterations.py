"""Several iterations of one loader: each has every row once, whatever becomes of the others."""

import gc
from itertools import islice

import h5py
import numpy as np
import pytest
import torch
from factories import Stored
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5Error,
    H5LazyDataset,
    H5ResumeError,
    LazyH5DataModule,
    RankMemCachedH5Dataset,
)
from lightning_h5.loading import H5DataLoader, create_optimized_dataloader

ROWS, BATCH = 50, 8
SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": 0},
        {"num_workers": 1, "persistent_workers": False, "multiprocessing_context": "fork"},
        {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"},
    ],
    ids=["threads", "workers", "persistent workers"],
)


@pytest.fixture
def path(make_h5):
    return make_h5({"x": np.arange(ROWS * 32, dtype="f4").reshape(ROWS, 32), "y": np.arange(ROWS)})


def loader_of(path, batch_size=BATCH, *, epoch=0, **settings):
    """A loader whose epoch is set; if it is None, complete passes advance it."""
    dataset = H5LazyDataset(path, "x", "y")
    loader = with_settings(create_optimized_dataloader(dataset, batch_size), settings)
    if epoch is not None:
        loader.set_epoch(epoch)
    return loader


def with_settings(loader, settings):
    return H5DataLoader(loader.dataset, sampler=loader.sampler, collate_fn=loader.collate_fn, **settings)


def rows_of(batches):
    return [row for _, y in batches for row in y.tolist()]


def workers_of(loader):
    return {worker.pid for worker in loader._iterator.processes}


@SETTINGS
def test_two_iterators_at_a_time_have_the_whole_epoch_each(path, settings):
    loader = loader_of(path, **settings)
    expected = rows_of(loader)
    pairs = list(zip(loader, loader, strict=True))
    assert [rows_of(batches) for batches in zip(*pairs, strict=True)] == [expected, expected]
    assert sorted(expected) == list(range(ROWS))
    loader.close()


@SETTINGS
def test_looking_at_a_batch_takes_none_from_the_loop(path, settings):
    loader = loader_of(path, **settings)
    expected, seen = rows_of(loader), []
    for step, batch in enumerate(loader):
        seen += rows_of([batch])
        if step in (0, 3, 4):
            assert rows_of([next(iter(loader))]) == expected[:BATCH]
    assert seen == expected
    loader.close()


@SETTINGS
def test_loops_inside_loops_have_the_whole_epoch_each(path, settings):
    loader = loader_of(path, batch_size=25, **settings)
    expected = rows_of(loader)
    seen = [(rows_of([batch]), rows_of(loader)) for batch in loader]
    assert seen == [(expected[:25], expected), (expected[25:], expected)]
    loader.close()


def test_persistent_workers_that_nothing_reads_from_are_used_again(path):
    loader = loader_of(path, num_workers=1, persistent_workers=True)
    expected, first = rows_of(loader), workers_of(loader)
    for _ in loader:
        break
    counted = iter(loader)
    assert rows_of(islice(counted, len(loader))) == expected  # never asked for its end, as by Lightning
    assert rows_of(loader) == expected
    assert workers_of(loader) == first
    assert list(counted) == []
    loader.close()


def test_workers_that_another_iteration_uses_persist_until_its_end(path):
    loader = loader_of(path, num_workers=1, persistent_workers=True)
    older = iter(loader)
    next(older)
    (process,) = loader._iterator.processes
    assert len(rows_of(loader)) == ROWS
    second = workers_of(loader)
    assert process.is_alive()
    assert process.pid not in second
    assert len(rows_of(older)) == ROWS - BATCH
    assert not process.is_alive()
    assert len(rows_of(loader)) == ROWS
    assert workers_of(loader) == second
    loader.close()


def test_the_end_of_an_iteration_leaves_workers_alone_that_another_one_began_to_use(path):
    loader = loader_of(path, num_workers=1, persistent_workers=True)
    first = iter(loader)
    assert len(rows_of(islice(first, len(loader)))) == ROWS  # its end is not asked for
    second = iter(loader)
    seen = rows_of([next(second)])  # the same workers
    third = iter(loader)
    next(third)  # its own
    assert list(first) == []
    assert sorted(seen + rows_of(second)) == list(range(ROWS))
    loader.close()


def test_an_error_in_one_iteration_leaves_the_other_alone(path):
    loader = loader_of(path, num_workers=1, persistent_workers=True)
    older = iter(loader)
    seen = rows_of([next(older)])
    younger = iter(loader)
    next(younger)
    younger._batches.close()
    with pytest.raises(H5Error, match="reading was closed"):
        next(younger)
    assert sorted(seen + rows_of(older)) == list(range(ROWS))
    loader.close()


# The position ------------------------------------------------------------------------------------------------


@pytest.mark.wide
@SETTINGS
def test_a_position_counts_the_batches_of_the_loop_alone(path, settings):
    loader = loader_of(path, **settings)
    expected = rows_of(loader)
    batches = iter(loader)
    seen = rows_of([next(batches), next(batches)])
    next(iter(loader))
    seen += rows_of([next(batches)])
    again = loader_of(path)
    again.load_state_dict(loader.state_dict())
    assert seen + rows_of(again) == expected
    loader.close()


@pytest.mark.wide
@SETTINGS
def test_loops_that_count_batches_go_on_from_a_position(path, settings):
    expected = rows_of(loader_of(path))
    first = loader_of(path, **settings)
    assert rows_of(islice(iter(first), 4)) == expected[: 4 * BATCH]
    loader = loader_of(path, **settings)
    loader.load_state_dict(first.state_dict())
    counted = iter(loader)
    assert rows_of(islice(counted, 3)) == expected[4 * BATCH :]  # never asked for its end
    assert loader.state_dict()["segments"] == [[BATCH, 1, 7]]
    assert rows_of(loader) == expected  # the loaded epoch is over
    assert list(counted) == []
    first.close(), loader.close()


@pytest.mark.wide
def test_a_position_is_refused_while_iterations_are_at_different_batches(path):
    loader = loader_of(path)
    older, younger = iter(loader), iter(loader)
    for _ in range(3):
        next(older)
    next(younger)
    with pytest.raises(
        H5ResumeError, match=r"they have yielded 1 of epoch 0, 3 of epoch 0\. .*Delete the other iterators"
    ):
        loader.state_dict()
    next(younger), next(younger)
    state = loader.state_dict()  # both are at the same batch
    assert state["segments"] == [[BATCH, 1, 3]]
    next(younger)
    del older
    gc.collect()
    assert loader.state_dict()["segments"] == [[BATCH, 1, 4]]


@pytest.mark.wide
@SETTINGS
@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "kept"])
def test_a_look_at_a_batch_that_moves_the_position_back_is_refused(path, settings, is_kept):
    loader, kept = loader_of(path, **settings), []
    for step, _ in enumerate(loader):
        if step == len(loader) - 1:
            assert loader.state_dict()["segments"] == [[BATCH, 1, 7]]
            kept.append(iter(loader))
            next(kept[-1])
            if not is_kept:
                kept.clear()
            with pytest.raises(H5ResumeError, match=r"they have yielded 1 of epoch 0, 7 of epoch 0\."):
                loader.state_dict()
    kept.clear()
    loader.sampler.set_epoch(1)  # each epoch has a position of its own
    for step, _ in enumerate(loader):
        assert loader.state_dict()["segments"] == [[BATCH, 1, step + 1]]
    loader.close()


@SETTINGS
def test_a_loop_that_repeats_its_epoch_has_a_position(path, settings):
    loader = loader_of(path, **settings)
    for _ in range(2):
        for step, _ in enumerate(loader):
            assert loader.state_dict()["segments"] == [[BATCH, 1, step + 1]]
        assert loader.state_dict()["segments"] == [[BATCH, 1, 7]]
    loader.close()


class LooksAtBatches(Callback):
    """Looks at a batch of the loader that is being trained, or validated, on."""

    def __init__(self):
        self.seen, self.validated, self.workers = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, step):
        self.seen += batch["index"].tolist()
        if step in (1, 4):
            next(iter(trainer.train_dataloader))

    def on_validation_batch_end(self, trainer, module, outputs, batch, step, dataloader_idx=0):
        self.validated += batch["index"].tolist()
        if step == 0:
            next(iter(trainer.val_dataloaders))

    def on_train_epoch_end(self, trainer, module):
        self.workers.append(trainer.train_dataloader.num_workers and workers_of(trainer.train_dataloader))


class Model(BoringModel):
    def step(self, batch):
        return super().step(batch["x"])

    def training_step(self, batch, at):
        return {"loss": self.step(batch)}

    def validation_step(self, batch, at):
        return self.step(batch)

    def on_train_epoch_end(self):
        pass

    def on_validation_epoch_end(self):
        pass


def fit(path, folder, num_workers, callbacks, ckpt_path=None, **options):
    datamodule = LazyH5DataModule(
        path,
        val_path=path,
        x_key={"x": "x"},
        batch_size=BATCH,
        with_index=True,
        num_workers=num_workers,
        workers={"start_method": "fork" if num_workers else None},
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "default_root_dir": folder} | quiet | options
    trainer = Trainer(callbacks=callbacks, enable_checkpointing=False, **options)
    trainer.fit(Model(), datamodule=datamodule, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_callback_may_look_at_batches_in_training_and_validation(path, tmp_path, num_workers):
    looks = LooksAtBatches()
    fit(path, tmp_path, num_workers, [looks])
    assert [sorted(looks.seen[at : at + ROWS]) for at in (0, ROWS)] == [list(range(ROWS))] * 2
    assert looks.validated == [*range(ROWS)] * 2


class SavesAfterLooking(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, step):
        if step == 2:
            self.iterator = iter(trainer.train_dataloader)
            next(self.iterator)
            trainer.save_checkpoint(f"{trainer.default_root_dir}/looked.ckpt")
            trainer.should_stop = True


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 1])
def test_looking_at_a_batch_leaves_the_position_of_a_fit_alone(path, tmp_path, num_workers):
    fit(path, tmp_path, num_workers, [SavesAfterLooking()], max_epochs=1, limit_val_batches=0)
    rest, whole = LooksAtBatches(), LooksAtBatches()
    checkpoint = f"{tmp_path}/looked.ckpt"
    fit(path, tmp_path, num_workers, [rest], checkpoint, max_epochs=1, limit_val_batches=0)
    fit(path, tmp_path, 0, [whole], max_epochs=1, limit_val_batches=0)
    assert rest.seen == whole.seen[3 * BATCH :]


class WorkersOfEpochs(Callback):
    def __init__(self):
        self.workers = []

    def on_train_epoch_end(self, trainer, module):
        self.workers.append(workers_of(trainer.train_dataloader))


@pytest.mark.wide
@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 3, "limit_val_batches": 2}], ids=["whole", "limited"])
def test_the_epochs_of_a_fit_share_their_workers(path, tmp_path, limits):
    found = WorkersOfEpochs()
    fit(path, tmp_path, 1, [found], max_epochs=3, **limits)
    assert found.workers == [found.workers[0]] * 3


# Passes that are counted -------------------------------------------------------------------------------------


def epochs_of(path, n):
    loaders = [loader_of(path, epoch=epoch) for epoch in range(n)]
    return [rows_of(loader) for loader in loaders]


@SETTINGS
@pytest.mark.parametrize("counts_batches", [False, True])
def test_a_loop_that_never_sets_the_epoch_has_another_order_in_each(path, settings, counts_batches):
    loader, expected = loader_of(path, epoch=None, **settings), epochs_of(path, 3)
    for rows in expected:
        next(iter(loader))  # no pass
        assert rows_of(islice(iter(loader), len(loader)) if counts_batches else loader) == rows
    loader.set_epoch(1)
    assert rows_of(loader) == rows_of(loader) == expected[1]
    loader.close()


def test_draws_differ_in_each_pass_of_a_loop_that_never_sets_the_epoch(path):
    dataset = H5LazyDataset(path, "x", transform=lambda x, rng: torch.tensor(rng.normal()))
    loader = create_optimized_dataloader(dataset, BATCH)
    drawn = [{draw for batch in loader for draw in batch.tolist()} for _ in range(2)]
    assert not drawn[0] & drawn[1]


def test_passes_of_evaluation_are_alike(path):
    dataset = H5LazyDataset(path, "y", transform=lambda y, rng: y + rng.normal())
    loader = create_optimized_dataloader(dataset, BATCH, is_training=False)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in loader]


def test_iterators_that_are_left_or_nested_leave_the_order_of_the_loop_alone(path):
    expected = epochs_of(path, 3)
    loader = loader_of(path, epoch=None)
    kept = iter(loader)
    next(kept)
    for epoch in range(3):
        seen = []
        for batch in loader:
            seen += rows_of([batch])
            if len(seen) < 20:
                assert sorted(rows_of(loader)) == list(range(ROWS))
        assert seen == expected[epoch]
    assert rows_of(kept) == expected[0][BATCH:]


@pytest.mark.parametrize("n", [3, 7])
def test_a_loop_that_never_sets_the_epoch_goes_on_from_its_position(path, n):
    expected = epochs_of(path, 3)
    loader = loader_of(path, epoch=None)
    rows_of(loader)
    between = loader.state_dict()
    batches = iter(loader)
    assert rows_of(islice(batches, n)) == expected[1][: n * BATCH]
    for state, rest in [(between, expected[1]), (loader.state_dict(), expected[1][n * BATCH :])]:
        again = loader_of(path, epoch=None)
        again.load_state_dict(state)
        assert [rows_of(again), rows_of(again)] == [rest, expected[2]]


def test_a_position_is_refused_while_loops_over_counted_passes_are_nested(path):
    loader = loader_of(path, epoch=None)
    for step, _ in enumerate(loader):
        assert loader.state_dict()["segments"] == [[BATCH, 1, step + 1]]
        if step == 1:
            rows_of(loader)
            with pytest.raises(H5ResumeError, match=r"they have yielded 2 of epoch 0, 7 of epoch 0\."):
                loader.state_dict()


# Any order of events -----------------------------------------------------------------------------------------


def make_files(folder):
    """Files of each kind of storage, and what h5py reads from them."""
    rng = np.random.default_rng(3)
    values = rng.normal(size=(61, 3)).astype("f4")
    stored = {
        "contiguous": Stored(values),
        "gzip": Stored(values, "chunked", (7, 3), {"compression": "gzip"}),
        "chunked": Stored(values, "chunked", (5, 2)),
    }
    return {name: folder({"x": array, "y": np.arange(61)}) for name, array in stored.items()}


def any_loader(rng, files, num_workers):
    """A loader of a random kind, and how many rows an epoch has; None for one that repeats rows."""
    batch_size = int(rng.integers(3, 30))
    settings = {"num_workers": num_workers, "prefetch_factor": [None, 1, 3][rng.integers(3)]}
    if num_workers:
        settings |= {"persistent_workers": bool(rng.integers(4)), "multiprocessing_context": "fork"}
    path = files[list(files)[rng.integers(len(files))]]
    kind = ["lazy", "cached", "mixture"][rng.integers(3)]
    if kind == "mixture":
        datamodule = CombinedHDF5DataModule(
            mixture={
                "sources": dict(files),
                "strategy": ["concat", "weighted", "round_robin"][rng.integers(3)],
                "mix": ["batches", "rows"][rng.integers(2)],
            },
            batch_size=batch_size,
            fields=["x", "y"],
            seed=int(rng.integers(9)),
            row_cache=int(rng.integers(2)) * 40,
        )
        datamodule.setup("fit")
        return with_settings(datamodule.train_dataloader(), settings), None
    make = H5LazyDataset if kind == "lazy" else RankMemCachedH5Dataset
    dataset = make(path, "x", "y")
    training = bool(rng.integers(2))
    made = create_optimized_dataloader(
        dataset,
        batch_size,
        training,
        seed=int(rng.integers(9)),
        shuffle={"buffer": [1, "512 MiB"][rng.integers(2)]},
    )
    return with_settings(made, settings), 61


class Watched:
    """An iterator, and the rows that it is to give."""

    def __init__(self, loader):
        self.batches, self.expected, self.n, self.has_ended = iter(loader), None, 0, False

    def step(self, loader, truth, n_rows):
        if self.expected is None:
            self.epoch = loader.sampler.epoch
            self.expected = [token.rows % len(loader.dataset) for token in loader.sampler.tokens(self.epoch)]
            if n_rows is not None:
                assert sorted(np.concatenate(self.expected).tolist()) == list(range(n_rows))
        if self.n == len(self.expected):
            assert next(self.batches, None) is None
            is_news, self.has_ended = not self.has_ended, True
            return is_news
        batch = next(self.batches)
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        rows = self.expected[self.n]
        assert y.tolist() == (rows % len(truth)).tolist()
        assert np.array_equal(x.numpy(), truth[rows % len(truth)])
        self.n += 1
        return True


def check_any_events(rng, files, num_workers):
    """Iterators that begin, go on and are left in a random order: each gives its epoch, and positions are right."""
    loader, n_rows = any_loader(rng, files, num_workers)
    with h5py.File(files["contiguous"]) as file:
        truth = file["x"][:]
    running, last = [], None
    sets_epoch = bool(rng.integers(2))  # otherwise complete passes advance it
    for _ in range(int(rng.integers(6, 40))):
        event = rng.choice(["begin", "next", "leave", "epoch", "state"], p=[0.2, 0.6, 0.08, 0.04, 0.08])
        if event == "begin" and len(running) < 3:
            running.append(Watched(loader))
        elif event == "next" and running:
            one = running[rng.integers(len(running))]
            for _ in range(int(rng.integers(1, 5))):
                last = one if one.step(loader, truth, n_rows) else last
        elif event == "leave" and running:
            del running[rng.integers(len(running))]
            one = None
        elif event == "epoch" and sets_epoch:
            loader.sampler.set_epoch(int(rng.integers(3)))
        elif event == "state":
            check_state(loader, running, last)
    one = last = None
    for one in running:
        while one.step(loader, truth, n_rows):
            pass
    loader.close()


def check_state(loader, running, last):
    epoch, counts = loader.sampler.epoch, loader.sampler.counts_passes
    begun = {(one.epoch, one.n) for one in running if one.n and not one.has_ended and (counts or one.epoch == epoch)}
    if last is not None and (counts or last.epoch == epoch):
        begun.add((last.epoch, last.n))
    try:
        state = loader.state_dict()
    except H5ResumeError:
        assert len(begun) > 1
        return
    assert len(begun) <= 1
    if not begun or (counts and last.has_ended):
        begun = {(epoch, 0)}
    assert {(state["epoch"], sum(n for _, _, n in state["segments"]))} == begun


@pytest.mark.wide
def test_any_order_of_events_gives_each_iteration_its_epoch(make_h5):
    files = make_files(make_h5)
    for number in range(95):
        check_any_events(np.random.default_rng([7, number]), files, num_workers=0)
    for number in range(5):
        check_any_events(np.random.default_rng([8, number]), files, num_workers=1 + number % 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_order_of_events_gives_each_iteration_its_epoch_2000_times(make_h5):
    files = make_files(make_h5)
    for number in range(1700):
        check_any_events(np.random.default_rng([9, number]), files, num_workers=0)
    for number in range(300):
        check_any_events(np.random.default_rng([10, number]), files, num_workers=1 + number % 2)
