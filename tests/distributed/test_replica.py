"""Which replica a rank is: from the trainer, as given, or from torch.distributed; tensor-parallel peers are one."""

import socket

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from arguments import nested
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_models import Recorder, quiet_trainer
from processes import run_ranks, values

from lightning_h5 import LazyH5DataModule

ROWS, BATCH = 30, 4


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as h5:
        h5["x"] = np.arange(ROWS, dtype="f4")
    return str(path)


def module(file, **options):
    return LazyH5DataModule(file, file, file, file, **nested(**({"batch_size": BATCH, "with_index": True} | options)))


class Parallel(Recorder):
    """A model that is there once for each column of the mesh; nothing in it needs to be split for the data's sake."""

    def configure_model(self):
        self.mesh = self.device_mesh

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, foreach=False)


def rows_on_a_mesh(rank, file, data_parallel, tensor_parallel, options):
    strategy = ModelParallelStrategy(data_parallel_size=data_parallel, tensor_parallel_size=tensor_parallel)
    model, datamodule = Parallel(), module(file, **options)
    trainer = Trainer(
        accelerator="cpu",
        devices=data_parallel * tensor_parallel,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule)
    trainer.predict(model, datamodule=datamodule)
    return {"replica": [datamodule.rank, datamodule.world_size], "train": model.train_rows, **model.rows}


@pytest.mark.wide
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["no workers", "a worker"])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_tensor_parallel_peers_see_the_same_rows_and_replicas_share_all(file, tmp_path, mesh, options):
    ranks = values(run_ranks(rows_on_a_mesh, mesh[0] * mesh[1], tmp_path, file, *mesh, options))
    for rank, seen in enumerate(ranks):
        assert seen["replica"] == [rank // mesh[1], mesh[0]]
        assert seen == ranks[rank // mesh[1] * mesh[1]]
    replicas = ranks[:: mesh[1]]
    for epoch in (0, 1):
        assert sorted(row for seen in replicas for row in seen["train"][epoch]) == list(range(ROWS))
    for stage in ("test", "predict"):
        assert [row for seen in replicas for row in seen[stage]] == list(range(ROWS))


def rows_with_a_replica_of_ones_own(rank, file, replicas):
    model = Recorder()
    own, world_size = replicas[rank]
    quiet_trainer(devices=2, strategy="ddp", max_epochs=1).fit(
        model, datamodule=module(file, rank=own, world_size=world_size)
    )
    return model.train_rows[0]


@pytest.mark.wide
def test_a_replica_that_is_given_comes_before_the_trainers(file, tmp_path):
    """For strategies of one's own, with groups of ranks that the trainer does not know of."""
    same = values(run_ranks(rows_with_a_replica_of_ones_own, 2, tmp_path, file, [(0, 1), (0, 1)]))
    assert same[0] == same[1]
    assert sorted(same[0]) == list(range(ROWS))
    first, second = values(run_ranks(rows_with_a_replica_of_ones_own, 2, tmp_path, file, [(1, 2), (0, 2)]))
    assert sorted(first + second) == list(range(ROWS))
    one, _ = values(run_ranks(rows_of_a_loader_alone, 2, tmp_path, file, 0))
    assert second == one["train"][0]


def rows_of_a_loader_alone(rank, file, num_workers):
    datamodule = module(file, num_workers=num_workers)
    datamodule.setup()
    model, trainer = Recorder(), quiet_trainer(devices=2, strategy="ddp", num_sanity_val_steps=0)
    trainer.fit(model, train_dataloaders=datamodule.train_dataloader(), val_dataloaders=datamodule.val_dataloader())
    trainer.test(model, dataloaders=datamodule.test_dataloader())
    trainer.predict(model, dataloaders=datamodule.predict_dataloader())
    return {"train": model.train_rows, **model.rows}


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_without_its_data_module_shards_too(file, tmp_path, num_workers):
    """It was made before there were ranks; torch.distributed tells it when its iteration begins."""
    first, second = values(run_ranks(rows_of_a_loader_alone, 2, tmp_path, file, num_workers))
    for epoch in (0, 1):
        assert sorted(first["train"][epoch] + second["train"][epoch]) == list(range(ROWS))
        assert len(first["train"][epoch]) == ROWS // 2
    for stage, times in (("val", 2), ("test", 1), ("predict", 1)):
        assert sorted(first[stage] + second[stage]) == sorted(list(range(ROWS)) * times)


def rows_without_lightning(rank, file, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    datamodule = module(file)
    datamodule.setup("fit")
    replica = datamodule.rank, datamodule.world_size
    rows = [row for batch in datamodule.train_dataloader() for row in batch[-1].tolist()]
    dist.destroy_process_group()
    return replica, rows


def test_without_a_trainer_torch_distributed_says_which_replica_it_is(file, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (first, rows), (second, others) = values(run_ranks(rows_without_lightning, 2, tmp_path, file, port))
    assert (first, second) == ((0, 2), (1, 2))
    assert sorted(rows + others) == list(range(ROWS))
