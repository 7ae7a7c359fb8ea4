"""Train on a cluster, stop at any moment, and continue with any number of nodes.

    torchrun --nproc-per-node 2 train.py runs/1                                   one node
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 9 \
        --rdzv-backend c10d --rdzv-endpoint node0:29400 train.py runs/1           one node or two, on each of them
    srun python train.py runs/1                                                   SLURM (see ``job.sbatch``)
    mpirun -n 2 python train.py runs/1                                            MPI (pip install mpi4py)
    python train.py runs/1 --devices 2                                            Lightning's own launcher

The data module is the same with all launchers. After a stop, start the script again with the same folder: it resumes
from the newest checkpoint. At the end it checks that each row was trained on once per epoch, despite any stops.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import KubeflowEnvironment

from lightning_h5 import LazyH5DataModule, SaveOnPreemption

ROWS, EPOCHS = 2000, 3


class Net(LightningModule):
    """A linear model with a count of training passes for each row, which is saved in its checkpoints."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.seconds = seconds
        self.n_trained: torch.Tensor
        self.register_buffer("n_trained", torch.zeros(ROWS, dtype=torch.int64))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch, and count its rows over all ranks."""
        x, index = batch
        time.sleep(self.seconds)
        trained = torch.zeros_like(self.n_trained).index_fill_(0, index, 1)
        self.n_trained += self.trainer.strategy.reduce(trained, reduce_op="sum")
        loss: torch.Tensor = (self.layer(x) - x.sum(1, keepdim=True)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def launched(devices: int) -> dict[str, Any]:
    """Return the launcher's number of processes per node and of nodes: the Trainer needs the same numbers."""
    known = os.environ
    if "TORCHELASTIC_RUN_ID" in known:
        return {"devices": int(known["LOCAL_WORLD_SIZE"]), "num_nodes": int(known["GROUP_WORLD_SIZE"])}
    if "SLURM_NTASKS_PER_NODE" in known:
        return {"devices": int(known["SLURM_NTASKS_PER_NODE"]), "num_nodes": int(known["SLURM_NNODES"])}
    if "OMPI_COMM_WORLD_SIZE" in known:
        n_local = int(known["OMPI_COMM_WORLD_LOCAL_SIZE"])
        return {"devices": n_local, "num_nodes": int(known["OMPI_COMM_WORLD_SIZE"]) // n_local}
    if "KUBERNETES_PORT" in known and "WORLD_SIZE" in known:  # a process for each pod
        return {"devices": 1, "num_nodes": int(known["WORLD_SIZE"]), "plugins": [KubeflowEnvironment()]}
    return {"devices": devices, "num_nodes": 1}


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of all callbacks."""
    return max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)


def train(folder: Path, *, devices: int = 1, num_workers: int = 0, seconds: float = 0.0) -> None:
    """Train on ``rows.h5`` in a folder, from its newest checkpoint."""
    datamodule = LazyH5DataModule(
        str(folder / "rows.h5"), x_key="x", batch_size=16, with_index=True, seed=1, num_workers=num_workers
    )
    trainer = Trainer(
        **launched(devices),
        accelerator="cpu",
        strategy="ddp",
        max_epochs=EPOCHS,
        default_root_dir=folder,
        callbacks=[
            ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=2, monitor="step", mode="max"),
            SaveOnPreemption(),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    model = Net(seconds)
    trainer.fit(model, datamodule=datamodule, ckpt_path=newest(folder))
    assert (model.n_trained == EPOCHS).all(), "rows were lost or repeated"
    if trainer.is_global_zero:
        print(f"each of {ROWS:,} rows was trained on {EPOCHS} times")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="folder of data and checkpoints, on storage that all nodes share")
    parser.add_argument("--devices", type=int, default=1, help="number of processes, without a launcher")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="extra time per step, to have time to stop the run")
    arguments = parser.parse_args()
    train(arguments.folder, devices=arguments.devices, num_workers=arguments.num_workers, seconds=arguments.seconds)
