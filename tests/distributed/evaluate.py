"""Evaluates files of several lengths on two CPU processes; started by test_evaluation.py."""

import json
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torchmetrics.classification import BinaryAccuracy

from lightning_h5 import LazyH5DataModule


class Judge(LightningModule):
    def __init__(self):
        super().__init__()
        self.accuracy = BinaryAccuracy()
        self.n_batches = 0
        self.layer = torch.nn.Linear(1, 1)

    def test_step(self, batch, batch_idx):
        x, y, _ = batch
        self.accuracy(x, y)
        self.n_batches += 1
        self.log("accuracy", self.accuracy)

    validation_step = test_step

    def predict_step(self, batch, batch_idx):
        return batch[-1]


def main():
    out, files, devices = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
    warnings.filterwarnings("ignore", message="Total length of")  # an empty rank is what is tested
    found = {}
    for file in files:
        datamodule = LazyH5DataModule(
            None, file, file, file, x_key="x", y_key="y", x_dtype="float32", with_index=True, eval_batch_size=2
        )
        model = Judge()
        trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            strategy="ddp" if devices > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        batches = trainer.predict(model, datamodule=datamodule) or []  # Lightning gives None where there are no rows
        predicted = [row for batch in batches for row in batch.tolist()]
        found[file] = {"predicted": predicted}
        if not file.endswith("one.h5"):
            found[file]["test"] = trainer.test(model, datamodule=datamodule, verbose=False)[0]["accuracy"]
            found[file]["n_batches"] = model.n_batches
            found[file]["val"] = trainer.validate(model, datamodule=datamodule, verbose=False)[0]["accuracy"]
        rank = trainer.global_rank
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
