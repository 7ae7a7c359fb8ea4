"""Cross-validation by patient, compared with cross-validation by row.

    python examples/patients.py [FOLDER]

Each patient has several similar recordings. If rows are split, recordings of the same patient are in training and in
validation, and the network is correct by recognizing the patient. ``group_key`` keeps the recordings of a patient in
one fold; the accuracy is then the one to expect for a new patient.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_h5 import H5StatsMonitor, LazyH5DataModule

DATA = Path(__file__).parent / "data"
FOLDS, STEPS = 5, 64


def write_patients(path: Path, n_patients: int = 50, n_each: int = 12) -> None:
    """Write recordings of patients, half of them ill.

    A recording is the sum of the patient's own curve, noise, and a small wave if the patient is ill.
    """
    rng = np.random.default_rng(0)
    time = np.linspace(0, 2 * np.pi, STEPS)
    waves = np.stack([wave(k * time) for k in range(1, 6) for wave in (np.sin, np.cos)])
    ill = np.arange(n_patients) % 2 == 0
    own = rng.normal(size=(n_patients, len(waves))) @ waves + 2.0 * ill[:, None] * waves[4]
    patient = np.repeat(np.arange(n_patients), n_each)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["signal"] = (own[patient] + rng.normal(size=(len(patient), STEPS))).astype("f4")
        file["ill"] = ill[patient].astype("i8")
        file["patient"] = [f"patient-{number:02d}" for number in patient]


class IllnessNet(LightningModule):
    """Predicts illness, and records the patients that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(STEPS, 32), nn.ReLU(), nn.Linear(32, 2))
        self.accuracy = MulticlassAccuracy(2, average="micro")
        self.trained_on: set[str] = set()
        self.validated_on: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, ill = batch
        self.trained_on.update(inputs["patient"])  # text is a list of str
        return nn.functional.cross_entropy(self.layers(inputs["signal"]), ill)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, ill = batch
        self.validated_on.update(inputs["patient"])
        self.accuracy(self.layers(inputs["signal"]), ill)
        self.log("accuracy", self.accuracy, batch_size=len(ill))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def run_fold(path: Path, fold: int, group_key: str | None) -> tuple[float, int]:
    """Train on all folds but one; return the accuracy on this fold, and the number of patients on both sides."""
    seed_everything(fold, verbose=False)
    datamodule = LazyH5DataModule(
        path,
        x_key={"signal": "signal", "patient": "patient"},
        y_key="ill",
        split={"num_folds": FOLDS, "fold": fold, "group_key": group_key, "stratify_key": "ill"},
        batch_size=32,
    )
    model = IllnessNet()
    trainer = Trainer(
        max_epochs=12,
        accelerator="cpu",
        check_val_every_n_epoch=12,
        num_sanity_val_steps=0,
        callbacks=[H5StatsMonitor(print_summary=False)],  # no table for each of ten runs
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=datamodule)
    return float(trainer.callback_metrics["accuracy"]), len(model.trained_on & model.validated_on)


def main(folder: Path = DATA) -> None:
    """Run the folds twice: split by patient, and split by row."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    path = folder / "patients.h5"
    write_patients(path)
    for name, group_key in (("by patient", "patient"), ("by row", None)):
        results = [run_fold(path, fold, group_key) for fold in range(FOLDS)]
        accuracies, on_both_sides = zip(*results, strict=True)
        each_fold = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
        print(
            f"cut {name}: mean accuracy {np.mean(accuracies):.3f} (folds: {each_fold}); "
            f"patients on both sides: {max(on_both_sides)}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
