"""Train with Ray Train on several workers; a failed job restarts from its newest checkpoint.

    pip install "ray[train]"
    python ray_train.py runs/1 --workers 2

``train`` is the function of ``train.py`` with three more objects, which connect Lightning to Ray's workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray
import ray.train
import ray.train.lightning
import ray.train.torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from train import EPOCHS, Net, newest

from lightning_h5 import LazyH5DataModule


def train(config: dict[str, str]) -> None:
    """Train on ``rows.h5`` in a folder, from its newest checkpoint; runs in each worker."""
    folder = Path(config["folder"])
    datamodule = LazyH5DataModule(
        str(folder / "rows.h5"),
        x_key="x",
        batch_size=16,
        with_index=True,
        seed=1,
        num_workers=int(config["num_workers"]),
        files={"verify": config["verify"] or None},
    )
    trainer = Trainer(
        devices="auto",
        accelerator="auto",
        strategy=ray.train.lightning.RayDDPStrategy(),
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        max_epochs=EPOCHS,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=2, monitor="step", mode="max")],
        logger=False,
        enable_progress_bar=False,
    )
    trainer = ray.train.lightning.prepare_trainer(trainer)
    model = Net()
    trainer.fit(model, datamodule=datamodule, ckpt_path=newest(folder))
    assert (model.n_trained == EPOCHS).all(), "rows were lost or repeated"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="folder of data and checkpoints, on storage that all nodes share")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--num-workers", type=int, default=0, help="number of reading processes of each worker")
    parser.add_argument("--gpus", action="store_true", help="use one GPU per worker")
    parser.add_argument("--verify", default="", help="'digest' compares rows with the digests next to the file")
    arguments = parser.parse_args()
    folder = str(arguments.folder.resolve())
    options = {"folder": folder, "num_workers": str(arguments.num_workers), "verify": arguments.verify}
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ray.train.ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpus),
        run_config=ray.train.RunConfig(storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    trainer.fit()
    print("each row was trained on once per epoch")
