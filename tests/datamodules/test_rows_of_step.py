"""``rows_of_step``: the rows of any optimizer step, equal to what training recorded, however the run was resumed."""

import random
import tracemalloc
from typing import ClassVar

import h5py
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning_models import Recorder, quiet_trainer
from step_runs import Run, play, write_files, wrong_answers

from lightning_h5 import H5ResumeError, H5ValueError, LazyH5DataModule, RankCachedH5DataModule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def ask(seeds, n, tmp_path, monkeypatch):
    """The number of right answers about ``n`` steps of each run, and the wrong ones."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    n_right, n_resumed, wrong = 0, 0, []
    for seed in seeds:
        run, folder = Run.drawn(seed), tmp_path / str(seed)
        folder.mkdir()
        played = play(run, folder)
        n_resumed += played.n_resumed
        mistakes = wrong_answers(run, played, random.Random(seed), n)
        n_right += n - len(mistakes)
        wrong += [(seed, run, mistake) for mistake in mistakes]
    assert n_resumed >= len(seeds) // 2
    return n_right, wrong


def test_rows_of_random_steps_of_random_runs(tmp_path, monkeypatch):
    assert ask(range(3), 20, tmp_path, monkeypatch) == (60, [])


@pytest.mark.wide
def test_rows_of_random_steps_of_more_runs(tmp_path, monkeypatch):
    assert ask(range(3, 13), 20, tmp_path, monkeypatch) == (200, [])


@pytest.mark.slow
def test_a_thousand_answers_are_right(tmp_path, monkeypatch):
    n_right, wrong = ask(range(100, 200), 10, tmp_path, monkeypatch)
    print(f"{n_right} of 1,000 answers are right")
    assert (n_right, wrong) == (1000, [])


@pytest.fixture
def path(make_h5):
    return make_h5(x=np.arange(60.0)[:, None])


def fit(path, model=None, kind=LazyH5DataModule, **options):
    datamodule = kind(path, x_key="x", with_index=True, batch_size=4)
    trainer = quiet_trainer(**options)
    trainer.fit(Recorder() if model is None else model, datamodule=datamodule)
    return trainer, datamodule


class Manual(Recorder):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().step()


class Iterating(Recorder):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Skipping(Recorder):
    """Leaves out the rest of each epoch after some batches, another number each time."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 + self.current_epoch else None


@pytest.mark.parametrize(
    ("model", "reason"), [(Manual, "steps its optimizers itself"), (Iterating, "training_step takes batches itself")]
)
def test_what_is_not_determined_is_an_error(path, model, reason):
    _, datamodule = fit(path, model())
    with pytest.raises(H5ValueError, match=reason):
        datamodule.rows_of_step(0)


def test_without_a_run_there_is_nothing_to_name(path):
    with pytest.raises(H5ValueError, match="nothing is known of the run"):
        LazyH5DataModule(path).rows_of_step(0)


def test_epochs_that_the_model_skipped_the_rest_of(path):
    model = Skipping()
    _, datamodule = fit(path, model, max_epochs=4)
    rows = [row for epoch in model.train_rows.values() for row in epoch]
    steps = [datamodule.rows_of_step(step) for step in range(3 + 4 + 5 + 6)]
    assert [sample.index for report in steps for sample in report] == rows


def test_accumulation_that_changes_between_epochs(path):
    model, scheduler = Recorder(), GradientAccumulationScheduler({1: 4, 2: 2})
    _, datamodule = fit(path, model, max_epochs=3, callbacks=[scheduler])
    steps = [datamodule.rows_of_step(step) for step in range(15 + 4 + 8)]
    assert [report.n_batches for report in steps] == [1] * 15 + [4, 4, 4, 3] + [2] * 7 + [1]
    rows = [row for epoch in model.train_rows.values() for row in epoch]
    assert [sample.index for report in steps for sample in report] == rows


def test_a_second_fit_of_the_same_trainer_goes_on_with_the_history(path):
    trainer, datamodule = fit(path, max_epochs=1)
    first = datamodule.rows_of_step(5)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, datamodule=datamodule)
    assert datamodule.rows_of_step(5) == first
    assert len(datamodule.run_history.stretches) == 1


def test_an_unbroken_run_and_one_resumed_at_epochs_ends_are_one_stretch(path, tmp_path):
    trainer, _ = fit(path, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    datamodule = LazyH5DataModule(path, x_key="x", with_index=True, batch_size=4)
    model = Recorder()
    quiet_trainer(max_epochs=4).fit(model, datamodule=datamodule, ckpt_path=tmp_path / "end.ckpt")
    assert len(datamodule.run_history.stretches) == 1
    assert [sample.index for sample in datamodule.rows_of_step(30)] == model.train_rows[2][:4]


def test_a_checkpoint_of_an_older_version_answers_from_there_on(path, tmp_path):
    trainer, _ = fit(path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=True)
    del checkpoint["LazyH5DataModule"]["history"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    datamodule = LazyH5DataModule(path, x_key="x", with_index=True, batch_size=4)
    quiet_trainer(max_epochs=2).fit(Recorder(), datamodule=datamodule, ckpt_path=tmp_path / "old.ckpt")
    assert datamodule.rows_of_step(15).epoch == 1
    with pytest.raises(H5ValueError, match="history in the checkpoint begins with step 15"):
        datamodule.rows_of_step(14)


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule])
def test_files_that_changed_are_an_error_by_identity(path, tmp_path, kind):
    trainer, _ = fit(path, kind=kind)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert len(kind.load_from_checkpoint(tmp_path / "end.ckpt").rows_of_step(3)) == 4
    with h5py.File(path, "a") as file:
        file["x"][7] = 0.5
    with pytest.raises(H5ResumeError, match=r"files \(whole\): trained '\w+', present '\w+'"):
        kind.load_from_checkpoint(tmp_path / "end.ckpt").rows_of_step(3)


def test_a_rank_that_there_was_not_is_an_error(path):
    _, datamodule = fit(path)
    with pytest.raises(H5ValueError, match="step 3 has ranks 0 to 0"):
        datamodule.rows_of_step(3, rank=1)


def own_collate(samples):
    return [float(x) + np.random.random() for x, _ in samples]  # noqa: NPY002  # the stream of the batch


def test_the_users_collate_fn_draws_the_same_again(path):
    class Keeps(Recorder):
        batches: ClassVar[list] = []

        def training_step(self, batch, batch_idx):
            self.batches.append(batch)
            return self.layer(torch.ones(1, 1)).sum()

    datamodule = LazyH5DataModule(path, x_key="x", with_index=True, batch_size=4, collate_fn=own_collate)
    quiet_trainer().fit(Keeps(), datamodule=datamodule)
    assert [datamodule.batches_of_step(step) for step in range(30)] == [[batch] for batch in Keeps.batches]


@pytest.mark.wide
def test_a_step_of_a_hundred_million_rows_needs_no_list_of_them(make_h5):
    path = make_h5()
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (10**8, 1), "u1")  # a hole in the file
    datamodule = LazyH5DataModule(path, x_key="x", batch_size=64, shuffle="global", files={"trusted": True})
    quiet_trainer(max_epochs=1, max_steps=2).fit(Recorder(), datamodule=datamodule)
    tracemalloc.start()
    report = datamodule.rows_of_step(1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20  # row numbers have 800 MB
    assert len(report) == 64
