"""A real training run on several CPU processes; started by test_two_ranks.py, and by Lightning for each rank.

Writes what each rank saw, by stage, to ``OUT/rank.json``. ``trouble`` makes one rank see something else. With
``kill`` all ranks save a checkpoint after that epoch and batch and are killed; with ``resume`` they go on from it.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_h5 import H5Error, LazyH5DataModule


class Recorder(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen = {"train": [], "val": [], "validate": [], "test": [], "predict": []}

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        assert torch.equal(x[:, 0].long(), y), "a row's input and target belong together"
        self.seen["train"].append([self.current_epoch, y.tolist(), index.tolist()])
        return self.layer(x).mean()

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            stage = "val" if self.trainer.state.fn == "fit" else "validate"
            self.seen[stage].append([self.current_epoch, batch[1].tolist(), batch[2].tolist()])

    def test_step(self, batch, batch_idx):
        self.seen["test"].append([0, batch[1].tolist(), batch[2].tolist()])

    def predict_step(self, batch, batch_idx):
        self.seen["predict"].append([0, batch[1].tolist(), batch[2].tolist()])
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class KilledHere(Callback):
    def __init__(self, where, out):
        self.where, self.out = where, out

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if [trainer.current_epoch, batch_idx] == self.where:
            trainer.save_checkpoint(self.out / "killed.ckpt")
            (self.out / f"{trainer.global_rank}.json").write_text(json.dumps(model.seen))
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    out, arguments = Path(sys.argv[1]), json.loads(sys.argv[2])
    trouble = arguments.pop("trouble", None)
    devices, kill, resume = arguments.pop("devices", 2), arguments.pop("kill", None), arguments.pop("resume", None)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if trouble is not None and rank == 1:
        arguments.update(trouble)
    seed_everything(5)
    datamodule = LazyH5DataModule(**arguments, x_key="x", y_key="y", with_index=True)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        strategy="ddp",
        callbacks=[KilledHere(kill, out)] if kill else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Recorder()
    try:
        trainer.fit(model, datamodule=datamodule, ckpt_path=resume)
        trainer.validate(model, datamodule=datamodule)
        trainer.test(model, datamodule=datamodule)
        trainer.predict(model, datamodule=datamodule)
    except H5Error as error:
        (out / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(3) from error
    (out / f"{rank}.json").write_text(json.dumps(model.seen))


if __name__ == "__main__":
    main()
