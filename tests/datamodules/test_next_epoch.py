"""The first batches of the next epoch are read while the last ones of this one train, if it is sure to come."""

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
from arguments import nested
from factories import Stored
from guards import HANG
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from lightning_models import Recorder, quiet_trainer

from lightning_h5 import LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.order import PlanSampler

ROWS, BATCH, PER_CHUNK = 96, 8, 4
CHUNKS = {"mode": "chunks", "streams": 2}
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])

pytestmark = pytest.mark.usefixtures("nothing_held")


@pytest.fixture
def file(make_h5):
    values = np.arange(ROWS * 3).reshape(ROWS, 3)
    return make_h5(x=Stored(values, "chunked", (PER_CHUNK, 3), {"compression": "gzip"}))


class WaitForNextEpoch(Callback):
    """Waits in the last step of an epoch until rows of the next one were read."""

    def __init__(self, epochs_read):
        self.epochs_read = epochs_read

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        next_epoch = trainer.train_dataloader.sampler.next_epoch(trainer.current_epoch)
        if trainer.is_last_batch and next_epoch is not None:
            wait_until(lambda: next_epoch in self.epochs_read())


@pytest.fixture
def epochs_begun(monkeypatch):
    """Training epochs whose tokens were requested, each with the trainer's epoch at that time."""
    begun, original = [], PlanSampler.tokens

    def tokens(sampler, epoch):
        source = sampler.epoch_source
        if source is not None:
            begun.append((epoch, source.trainer.current_epoch))
        return original(sampler, epoch)

    monkeypatch.setattr(PlanSampler, "tokens", tokens)
    return begun


def wait_until(is_true):
    deadline = time.monotonic() + HANG
    while not is_true():
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.005)


def module(path, kind=LazyH5DataModule, **options):
    """A data module with a cache of five chunks of the file's 24."""
    common = {"x_key": "x", "batch_size": BATCH, "with_index": True, "seed": 3, "cache_bytes": 5 * PER_CHUNK * 3 * 8}
    return kind(path, **nested(**(common | options)))


def fit(datamodule, model=None, callbacks=(), **options):
    model = Recorder() if model is None else model
    trainer = quiet_trainer(num_sanity_val_steps=0, callbacks=[*callbacks], **({"max_epochs": 4} | options))
    trainer.fit(model, datamodule=datamodule)
    return model.train_rows


def rows_of_epochs(path, epochs, **options):
    """The rows of each epoch in a loop of one's own, which reads nothing ahead of a pass."""
    datamodule = module(path, **options)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    rows = {}
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        rows[epoch] = [row for _, index in loader for row in index.tolist()]
    datamodule.teardown()
    return rows


def read_ahead(n):
    """What ``epochs_begun`` holds after so many epochs of which each but the first was begun during the one before."""
    return [(0, 0), *((epoch, epoch - 1) for epoch in range(1, n))]


def waiting(epochs_begun):
    return WaitForNextEpoch(lambda: {epoch for epoch, _ in epochs_begun})


@WORKERS
@pytest.mark.parametrize("batch_size", [BATCH, 40, ROWS], ids=["12 batches", "3 batches", "a batch an epoch"])
@pytest.mark.parametrize("shuffle", ["global", CHUNKS])
def test_epochs_have_their_rows_in_their_order(file, epochs_begun, num_workers, batch_size, shuffle):
    options = {"batch_size": batch_size, "shuffle": shuffle}
    expected = rows_of_epochs(file, 4, **options)
    assert fit(module(file, num_workers=num_workers, **options)) == expected
    assert [epoch for epoch, _ in epochs_begun] == [0, 1, 2, 3]
    epochs_begun.clear()
    fit(module(file, num_workers=num_workers, **options), callbacks=[waiting(epochs_begun)])
    assert epochs_begun == read_ahead(4)
    assert all(sorted(rows) == list(range(ROWS)) for rows in expected.values())


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 1}, {"batch_size": ROWS}], ids=str)
def test_rows_are_read_while_the_last_step_trains(file, options):
    datamodule, epochs_read = module(file, shuffle=CHUNKS, **options), set()

    class Watch(Callback):
        def on_train_start(self, trainer, pl_module):
            dataset = datamodule.train_dataset
            begin = dataset.begin
            dataset.begin = lambda rows, epoch=None, **more: (epochs_read.add(epoch), begin(rows, epoch, **more))[1]

    fit(datamodule, callbacks=[Watch(), WaitForNextEpoch(lambda: epochs_read)])
    assert epochs_read == {0, 1, 2, 3}


def test_workers_make_batches_while_the_last_step_trains(file):
    class Made(Callback):
        """Notes which batches workers were asked for, and waits for them."""

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.is_last_batch and trainer.current_epoch + 1 < trainer.max_epochs:
                batches, _ = trainer.train_dataloader._next_pass
                tokens = [task.token[:2] for task in batches._tasks]
                seen.append((trainer.current_epoch, tokens))

    seen = []
    fit(module(file, num_workers=2), callbacks=[Made()], max_epochs=3)
    assert seen == [(epoch, [(epoch + 1, step) for step in range(4)]) for epoch in (0, 1)]


LAST = {
    "the last epoch": ({"max_epochs": 3}, 3),
    "the last step": ({"max_epochs": -1, "max_steps": 36}, 3),
    "the last step, in the middle of an epoch": ({"max_epochs": 100, "max_steps": 30}, 3),
    "the last step of epochs that are left early": ({"max_epochs": -1, "max_steps": 15, "limit_train_batches": 5}, 3),
    "the last step with accumulated gradients": ({"max_epochs": -1, "max_steps": 9, "accumulate_grad_batches": 4}, 3),
}


@WORKERS
@pytest.mark.parametrize("case", LAST)
def test_no_epoch_is_begun_that_does_not_come(file, epochs_begun, num_workers, case):
    options, n_epochs = LAST[case]
    fit(module(file, num_workers=num_workers), callbacks=[waiting(epochs_begun)], **options)
    assert epochs_begun == read_ahead(n_epochs)


def test_nothing_is_read_ahead_if_another_loader_follows(file, epochs_begun):
    fit(module(file), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert epochs_begun == [(0, 0), (1, 1), (2, 2)]


LIMITS = pytest.mark.parametrize("limit", [1, 5, 11, 0.5])


@WORKERS
@LIMITS
@pytest.mark.parametrize("shuffle", ["global", CHUNKS])
def test_epochs_that_are_left_early_have_their_first_rows(file, epochs_begun, num_workers, limit, shuffle):
    expected = rows_of_epochs(file, 4, shuffle=shuffle)
    epochs_begun.clear()
    options = {"callbacks": [waiting(epochs_begun)], "limit_train_batches": limit}
    n_rows = BATCH * (limit if limit >= 1 else int(limit * ROWS / BATCH))
    rows = fit(module(file, num_workers=num_workers, shuffle=shuffle), **options)
    assert rows == {epoch: of_epoch[:n_rows] for epoch, of_epoch in expected.items()}
    assert epochs_begun == read_ahead(4)


def test_no_row_beyond_the_limit_is_read(file):
    datamodule, rows_read = module(file), {}

    class Watch(Callback):
        def on_train_start(self, trainer, pl_module):
            dataset = datamodule.train_dataset
            begin = dataset.begin
            dataset.begin = lambda rows, epoch=None, **more: (
                rows_read.setdefault(epoch, []).extend(rows.tolist()),
                begin(rows, epoch, **more),
            )[1]

    callbacks = [Watch(), WaitForNextEpoch(lambda: rows_read)]
    assert fit(datamodule, callbacks=callbacks, limit_train_batches=5) == rows_read


@WORKERS
def test_a_callback_that_iterates_over_the_loader_has_all_batches_of_an_epoch_that_is_left_early(file, num_workers):
    def look(loader, epoch):
        seen.append([row for _, index in loader for row in index.tolist()])

    expected, seen = rows_of_epochs(file, 4), []
    callbacks = [Change(look, "on_train_epoch_start"), Change(look, "on_train_epoch_end")]
    rows = fit(module(file, num_workers=num_workers), callbacks=callbacks, limit_train_batches=5)
    assert rows == {epoch: of_epoch[: 5 * BATCH] for epoch, of_epoch in expected.items()}
    assert seen == [expected[epoch] for epoch in range(4) for _ in range(2)]


@WORKERS
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_run_of_epochs_that_are_left_early_goes_on_with_the_next_row(file, tmp_path, num_workers, at):
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (1, at):
                time.sleep(0.1)  # batches are read ahead
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    options = {"shuffle": CHUNKS, "num_workers": num_workers}
    whole, model = fit(module(file, **options), callbacks=[Save()], limit_train_batches=5), Recorder()
    trainer = quiet_trainer(max_epochs=4, num_sanity_val_steps=0, limit_train_batches=5)
    trainer.fit(model, datamodule=module(file, **options), ckpt_path=tmp_path / "middle.ckpt")
    rest = {epoch: whole[epoch][BATCH * (at + 1) if epoch == 1 else 0 :] for epoch in (1, 2, 3)}
    assert model.train_rows == {epoch: rows for epoch, rows in rest.items() if rows}


def test_a_loader_that_is_reloaded_reads_ahead_in_between(file, epochs_begun):
    fit(module(file), callbacks=[waiting(epochs_begun)], reload_dataloaders_every_n_epochs=2)
    assert epochs_begun == [(0, 0), (1, 0), (2, 2), (3, 2)]


def test_nothing_is_read_ahead_beside_another_loader(file, epochs_begun):
    class Both(LazyH5DataModule):
        def train_dataloader(self):
            return CombinedLoader({"a": super().train_dataloader(), "b": [1, 2]}, "min_size")

    class Model(Recorder):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx)

    fit(module(file, Both), Model(), max_epochs=2)
    assert epochs_begun == [(0, 0), (1, 1)]


def test_nothing_is_read_ahead_without_a_trainer(file):
    datamodule = module(file)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    for _ in range(2):
        assert len([*loader]) == ROWS // BATCH
        assert loader._next_pass is None
    datamodule.teardown()


def test_shards_that_are_redrawn_are_not_read_ahead(file, epochs_begun):
    for every, expected in ((0, read_ahead(4)), (1, [(n, n) for n in range(4)])):
        epochs_begun.clear()
        memory = {"mode": "interleave", "reshard_every_n_epochs": every}
        datamodule = module(file, RankCachedH5DataModule, memory=memory, num_workers=1, rank=0, world_size=2)
        fit(datamodule, callbacks=[waiting(epochs_begun)])
        assert epochs_begun == expected


# What comes in between -------------------------------------------------------------------------------------------


class Stop(Callback):
    """Stops early, as ``EarlyStopping`` does, or by an error."""

    def __init__(self, error=None):
        self.error = error

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            wait_until(lambda: trainer.train_dataloader._next_pass is not None)
            if self.error is not None:
                raise self.error
            trainer.should_stop = True


def threads():
    """Threads that read. The one of object stores, which other tests may have started, lives as long as the process."""
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_h5")}
    return names - {"lightning_h5-stores"}


@WORKERS
@pytest.mark.parametrize("error", [None, RuntimeError("stop")], ids=["stopped early", "an error"])
def test_a_fit_that_stops_drops_what_was_read_ahead(file, num_workers, error):
    datamodule, model = module(file, num_workers=num_workers, shuffle=CHUNKS), Recorder()
    if error is None:
        fit(datamodule, model, callbacks=[Stop()])
    else:
        with pytest.raises(RuntimeError, match="stop"):
            fit(datamodule, model, callbacks=[Stop(error)])
    assert model.train_rows == rows_of_epochs(file, 2, shuffle=CHUNKS)
    loaders = [*datamodule._loaders["train"]]
    assert all(loader._next_pass is None for loader in loaders)
    gc.collect()
    wait_until(lambda: not threads())
    assert datamodule.train_dataset.kept_bytes == 0
    # The data module goes on as any other.
    assert fit(datamodule, max_epochs=2) == model.train_rows


def test_an_early_stop_returns_all_leases_and_slots(file):
    datamodule = module(file, shuffle=CHUNKS)

    class Look(Stop):
        def on_fit_end(self, trainer, pl_module):
            for loader in datamodule._loaders["train"]:
                loader.close()
            for reader in datamodule.train_dataset._chunked_readers().values():
                cache = reader._cache
                leases.append((cache._n_holders, cache._n_leases.any(), cache._n_tasks.any()))

    leases = []
    fit(datamodule, callbacks=[Look()])
    assert leases == [(0, False, False)]


@WORKERS
def test_validation_between_epochs_has_its_rows(file, num_workers):
    model = Recorder()
    rows = fit(module(file, num_workers=num_workers, val_path=file), model)
    assert rows == rows_of_epochs(file, 4)
    assert model.rows["val"] == 4 * list(range(ROWS))


class Change(Callback):
    """Calls a function at the end of each epoch's training or before its start."""

    def __init__(self, change, hook):
        self.change = change
        setattr(self, hook, self._call)

    def _call(self, trainer, pl_module):
        self.change(trainer.train_dataloader, trainer.current_epoch)


@WORKERS
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start"])
def test_a_transform_that_is_assigned_acts_on_the_whole_next_epoch(file, num_workers, hook):
    class Model(Recorder):
        def training_step(self, batch, batch_idx):
            shifts.setdefault(self.current_epoch, set()).update((batch[0][:, 0] - 3 * batch[1]).tolist())
            return super().training_step(batch, batch_idx)

    def assign(loader, epoch):
        shift = 1000 * (epoch + (hook == "on_train_epoch_end"))
        loader.dataset.transform = lambda x: x + shift

    shifts = {}
    fit(module(file, num_workers=num_workers), Model(), callbacks=[Change(assign, hook)])
    assert shifts == {epoch: {1000 * epoch} for epoch in range(4)}


@WORKERS
def test_another_batch_size_between_epochs_drops_what_was_read_ahead(file, epochs_begun, num_workers):
    def change(loader, epoch):
        loader.sampler.batch_size = ROWS if epoch == 1 else BATCH

    class Model(Recorder):
        def training_step(self, batch, batch_idx):
            sizes.setdefault(self.current_epoch, set()).add(len(batch[1]))
            return super().training_step(batch, batch_idx)

    sizes = {}
    callbacks = [Change(change, "on_train_epoch_start"), waiting(epochs_begun)]
    rows = fit(module(file, num_workers=num_workers), Model(), callbacks)
    assert sizes == {0: {BATCH}, 1: {ROWS}, 2: {BATCH}, 3: {BATCH}}
    assert all(sorted(of_epoch) == list(range(ROWS)) for of_epoch in rows.values())
    assert epochs_begun == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2)]


@WORKERS
def test_looking_at_a_batch_between_epochs_takes_none_away(file, num_workers):
    def look(loader, epoch):
        seen.append(next(iter(loader))[1].tolist())

    expected, seen = rows_of_epochs(file, 4), []
    callbacks = [Change(look, "on_train_epoch_start"), Change(look, "on_train_epoch_end")]
    assert fit(module(file, num_workers=num_workers), callbacks=callbacks) == expected
    assert seen == [expected[epoch][:BATCH] for epoch in range(4) for _ in range(2)]


def test_workers_that_end_between_epochs_are_replaced(file):
    def kill(loader, epoch):
        if epoch == 1:
            for process in loader._iterator.processes:
                os.kill(process.pid, signal.SIGKILL)
                process.join()

    rows = fit(module(file, num_workers=2), callbacks=[Change(kill, "on_train_epoch_end")])
    assert rows == rows_of_epochs(file, 4)


def test_checkpoints_of_an_epochs_end_count_no_batch_that_was_read_ahead(file, tmp_path):
    class Save(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                time.sleep(0.1)  # batches are read ahead
                trainer.save_checkpoint(tmp_path / "end.ckpt")

    whole = fit(module(file), callbacks=[Save()])
    model = Recorder()
    trainer = quiet_trainer(max_epochs=4, num_sanity_val_steps=0)
    trainer.fit(model, datamodule=module(file), ckpt_path=tmp_path / "end.ckpt")
    assert model.train_rows == {epoch: whole[epoch] for epoch in (2, 3)}


def test_draws_are_those_of_the_epoch(file):
    """Transforms in workers run ahead of their epoch, and draw what they would draw in it."""

    def drawing(x, rng):
        return x * 0 + int(rng.integers(1 << 30))

    class Model(Recorder):
        def training_step(self, batch, batch_idx):
            self.draws += [*zip(batch[1].tolist(), batch[0][:, 0].tolist(), strict=True)]
            return super().training_step(batch, batch_idx)

    draws = []
    for num_workers in (0, 2):
        model = Model()
        model.draws = []
        fit(module(file, num_workers=num_workers, transform=drawing), model)
        draws.append(model.draws)
    assert draws[0] == draws[1]
    assert len({*draws[0]}) == 4 * ROWS
