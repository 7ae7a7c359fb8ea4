"""Exact resume of loops in which a step of the Trainer is not one batch of our loader."""

import h5py
import lightning
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning_models import Recorder, SaveOnException, quiet_trainer
from packaging.version import Version
from torch.utils.data import DataLoader

from lightning_h5 import CombinedHDF5DataModule, H5ResumeError, LazyH5DataModule, RankCachedH5DataModule

skips_otherwise = pytest.mark.xfail(
    Version(lightning.__version__) < Version("2.5"),
    reason="Lightning 2.4 trains on after a batch start that returned -1, or counts the epoch otherwise",
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument in the"),
]
KINDS = [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule]
ROWS, BATCH = 36, 4  # nine batches


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "rows.h5"
    with h5py.File(path, "w") as h5:
        h5["x"] = np.arange(ROWS, dtype="f4")
    return str(path)


def module(file, kind=LazyH5DataModule, **options):
    names = {"fields": ["x"]} if kind is CombinedHDF5DataModule else {"x_key": "x"}
    return kind(file, **names, **({"batch_size": BATCH, "with_index": True, "seed": 1} | options))


class TakesBatches(LightningModule):
    """Steps take some batches each, the number in turn; after ``fail_at`` steps one fails with its batches in hand."""

    def __init__(self, takes=(2,), fail_at=None):
        super().__init__()
        self.takes, self.fail_at, self.layer = takes, fail_at, torch.nn.Linear(1, 1)
        self.train_rows, self.validated, self.n_steps = {}, [], 0

    def training_step(self, dataloader_iter):
        rows = []
        for _ in range(self.takes[self.global_step % len(self.takes)]):
            batch, _, _ = next(dataloader_iter)
            rows += (batch[-1] if isinstance(batch, list | tuple) else batch["index"]).tolist()
        if self.n_steps == self.fail_at:
            raise RuntimeError("stop here")
        self.n_steps += 1
        self.train_rows.setdefault(self.current_epoch, []).extend(rows)
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.current_epoch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def run(model, datamodule, ckpt_path=None, **options):
    trainer = quiet_trainer(**({"max_epochs": 3} | options))
    trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    return trainer


def together(*models):
    rows = {}
    for model in models:
        for epoch, new in model.train_rows.items():
            rows.setdefault(epoch, []).extend(new)
    return rows


@pytest.mark.wide
@given(
    takes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    stop=st.integers(0, 10),
    way=st.sampled_from(["fails", "max_steps", "every step"]),
    kind=st.sampled_from(KINDS),
    accumulate=st.sampled_from([1, 2]),
)
@settings(max_examples=25, deadline=None)
def test_steps_that_take_batches_themselves_resume_exactly(tmp_path_factory, file, takes, stop, way, kind, accumulate):
    folder = tmp_path_factory.mktemp("kept")
    takes = takes if accumulate == 1 else takes[:1]  # `global_step` counts optimizer steps
    options = {"accumulate_grad_batches": accumulate}
    whole, broken, resumed = TakesBatches(takes), TakesBatches(takes, stop), TakesBatches(takes)
    run(whole, module(file, kind), **options)
    path = folder / "kept.ckpt"
    if way == "max_steps":
        assume((stop + 1) * accumulate < whole.n_steps)
        broken.fail_at = None
        trainer = run(broken, module(file, kind), max_epochs=-1, max_steps=stop + 1, **options)
        trainer.save_checkpoint(path)
    else:
        keep = SaveOnException(folder, "kept")
        if way == "every step":
            keep = ModelCheckpoint(folder, filename="kept", every_n_train_steps=1, enable_version_counter=False)
            stop += accumulate == 2 and stop % 2
            broken.fail_at = stop = max(stop, accumulate)
            options["enable_checkpointing"] = True
        assume(stop < whole.n_steps)
        with pytest.raises(RuntimeError, match="stop here"):
            run(broken, module(file, kind), callbacks=[keep], **options)
    run(resumed, module(file, kind), path, **options)
    assert together(broken, resumed) == whole.train_rows


def test_the_epoch_that_was_resumed_is_validated(tmp_path, file):
    whole, broken, resumed = TakesBatches((3,)), TakesBatches((3,), 4), TakesBatches((3,))
    options = {"val_path": file, "eval_batch_size": ROWS}
    run(whole, module(file, **options), num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match="stop here"):
        run(broken, module(file, **options), num_sanity_val_steps=0, callbacks=[SaveOnException(tmp_path, "kept")])
    run(resumed, module(file, **options), tmp_path / "kept.ckpt", num_sanity_val_steps=0)
    assert broken.validated + resumed.validated == whole.validated == [(0, 0), (1, 0), (2, 0)]


class SkipsRest(Recorder):
    """Skips the rest of each epoch at its third batch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


@skips_otherwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.wide)])
def test_rows_that_on_train_batch_start_skipped_stay_skipped(tmp_path, file, kind, num_workers):
    whole, first, resumed = SkipsRest(), SkipsRest(), SkipsRest()
    run(whole, module(file, kind))
    keep = ModelCheckpoint(tmp_path, filename="kept", save_on_train_epoch_end=True)
    options = {"num_workers": num_workers}
    run(first, module(file, kind, **options), max_epochs=1, callbacks=[keep], enable_checkpointing=True)
    run(resumed, module(file, kind, **options), tmp_path / "kept.ckpt")
    assert together(first, resumed) == whole.train_rows
    assert [len(rows) for rows in whole.train_rows.values()] == [2 * BATCH] * 3


@skips_otherwise
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_an_epoch_that_is_resumed_and_then_skipped_is_over(tmp_path, file, stop):
    whole, broken, resumed, last = SkipsRest(), SkipsRest(fail_at=(1, min(stop, 1))), SkipsRest(), SkipsRest()
    run(whole, module(file))
    with pytest.raises(RuntimeError, match="stop here"):
        run(broken, module(file), callbacks=[SaveOnException(tmp_path, "kept")])
    keep = ModelCheckpoint(tmp_path, filename="next", save_on_train_epoch_end=True)
    run(resumed, module(file), tmp_path / "kept.ckpt", max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    run(last, module(file), tmp_path / "next.ckpt")
    assert together(broken, resumed, last) == whole.train_rows


class Zipped(LazyH5DataModule):
    def train_dataloader(self):
        return CombinedLoader([super().train_dataloader(), DataLoader(torch.zeros(80), batch_size=4)])


class TakesPairs(TakesBatches):
    def training_step(self, dataloader_iter):
        (batch, _), _, _ = next(dataloader_iter)
        if self.n_steps == self.fail_at:
            raise RuntimeError("stop here")
        self.n_steps += 1
        self.train_rows.setdefault(self.current_epoch, []).extend(batch[-1].tolist())
        return self.layer(torch.ones(1, 1)).sum()


def test_a_position_that_cannot_be_known_is_refused(tmp_path, file):
    with pytest.raises(RuntimeError, match="stop here"):
        run(TakesPairs(fail_at=3), module(file, Zipped), callbacks=[SaveOnException(tmp_path, "kept")])
    with pytest.raises(H5ResumeError, match="batches that the interrupted epoch was trained on are unknown"):
        run(TakesPairs(), module(file, Zipped), tmp_path / "kept.ckpt")
    again, options = TakesPairs(), {"distributed": {"on_resume_mismatch": "restart_epoch"}}
    with pytest.warns(UserWarning, match="epoch 0 starts over"):
        run(again, module(file, Zipped, **options), tmp_path / "kept.ckpt")
    assert set(again.train_rows[0]) == set(range(ROWS))
