"""``SetEpochCallback``: what it tells, and that nothing goes wrong in silence without it."""

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_models import Recorder, quiet_trainer

from lightning_h5 import H5ResumeError, LazyH5DataModule, SetEpochCallback


class Counting(torch.utils.data.Dataset):
    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.zeros(1), torch.tensor(i)


@pytest.mark.parametrize("nested", [False, True])
def test_datasets_and_samplers_of_ones_own_are_told_the_epoch(nested):
    dataset = Counting()
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)

    class Model(LightningModule):
        configure_optimizers = Recorder.configure_optimizers

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(torch.ones(1, 1)).sum()

    loaders = {"a": loader} if nested else loader
    quiet_trainer(max_epochs=3, callbacks=[SetEpochCallback()]).fit(Model(), loaders)
    assert dataset.epochs == [0, 1, 2]


def test_a_restored_position_that_nobody_applies_stops_the_run(make_h5, tmp_path, monkeypatch):
    path = make_h5({"x": np.arange(16)})
    keep = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    trainer = quiet_trainer(callbacks=[keep], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(Recorder(fail_at=(0, 2)), datamodule=LazyH5DataModule(path, batch_size=4, with_index=True))

    monkeypatch.setattr(LazyH5DataModule, "_insert_callbacks", lambda self: None)
    data = LazyH5DataModule(path, batch_size=4, with_index=True)
    with pytest.raises(H5ResumeError, match="before its position was applied"):
        quiet_trainer().fit(Recorder(), datamodule=data, ckpt_path=tmp_path / "last.ckpt")
