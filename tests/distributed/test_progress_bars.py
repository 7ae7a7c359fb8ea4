"""Two real ranks, of which rank 0 has a progress bar: what is logged over ranks and our figures do not cross."""

import h5py
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, RichProgressBar, TQDMProgressBar
from lightning_models import Recorder
from processes import run_ranks, values
from torchmetrics import MeanMetric

from lightning_h5 import H5StatsMonitor, LazyH5DataModule


class Barrier(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        torch.distributed.barrier()


CALLBACKS = {
    "the default bar": list,
    "tqdm": lambda: [TQDMProgressBar()],
    "rich": lambda: [RichProgressBar()],
    "the monitor before the bar": lambda: [H5StatsMonitor(progress_bar=True), TQDMProgressBar()],
    "the monitor after the bar": lambda: [TQDMProgressBar(), H5StatsMonitor(2, progress_bar=True)],
    "a collective of the user's after both": lambda: [H5StatsMonitor(), TQDMProgressBar(), Barrier()],
    "early stopping": lambda: [EarlyStopping("loss_epoch", patience=5), TQDMProgressBar()],
}


class LogsOverRanks(Recorder):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(float(self.trainer.global_rank))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log(
            "largest", torch.tensor(float(self.trainer.global_rank)), on_epoch=True, sync_dist=True, reduce_fx="max"
        )
        self.log("mean", self.mean, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", float(self.trainer.global_rank), sync_dist=True, prog_bar=True)

    def on_train_epoch_end(self):
        assert self.all_gather(torch.tensor(1.0)).shape == (2,)
        self.log("late", float(self.trainer.global_rank), sync_dist=True, prog_bar=True)


def fit(rank, path, callbacks, folder):
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=CALLBACKS[callbacks](),
        default_root_dir=folder,
    )
    trainer.fit(LogsOverRanks(), datamodule=LazyH5DataModule(path, path, x_key="x", batch_size=5, with_index=True))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.wide
@pytest.mark.parametrize("callbacks", CALLBACKS)
def test_values_logged_over_ranks_go_together_with_a_progress_bar(callbacks, tmp_path):
    if callbacks == "rich":
        pytest.importorskip("rich")
    path = str(tmp_path / "rows.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((40, 3), "f4")
    logged = values(run_ranks(fit, 2, tmp_path, path, callbacks, str(tmp_path)))
    assert logged[0] == logged[1]
    expected = {"largest": 1, "mean": 0.5, "val": 0.5, "late": 0.5}
    assert {name: logged[0][name] for name in expected} == expected
    assert logged[0]["h5/samples_per_second_epoch"] > 0
