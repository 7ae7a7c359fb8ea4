"""Evaluation over ranks gives the value of one process: no row is padded, repeated or left out."""

import h5py
import numpy as np
import pytest
import torch
from arguments import nested
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_models import quiet_trainer
from processes import run_ranks, values
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchmetrics.classification import BinaryAccuracy

from lightning_h5 import LazyH5DataModule

LENGTHS = [5, 7, 101]


def write(folder, n_rows):
    """A file, and the share of its rows whose x is their y."""
    y = np.random.default_rng(n_rows).integers(0, 2, n_rows)
    x = np.where(np.arange(n_rows) % 3 > 0, y, 1 - y)
    path = folder / f"{n_rows}.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = x, y
    return str(path), float(np.float32((x == y).mean()))


class Judge(LightningModule):
    def __init__(self):
        super().__init__()
        self.accuracy = BinaryAccuracy()
        self.layer = torch.nn.Linear(1, 1)
        self.n_batches = 0

    def test_step(self, batch, batch_idx):
        x, y, _ = batch
        self.layer(x[:, None])
        self.accuracy(x, y)
        self.n_batches += 1
        self.log("accuracy", self.accuracy)

    validation_step = test_step

    def predict_step(self, batch, batch_idx):
        self.layer(batch[0][:, None])
        return torch.stack([batch[-1], batch[0].long()])


class Sharded(Judge):
    """Its parameters are gathered from all ranks in each forward."""

    def configure_model(self):
        if not isinstance(self.layer, FSDPModule):  # called for each stage
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


def evaluate(rank, path, world_size, kind, batch_size):
    strategy = {"one": "auto", "ddp": "ddp"}.get(kind) or ModelParallelStrategy(
        data_parallel_size=world_size, tensor_parallel_size=1
    )
    model = Sharded() if kind == "sharded" else Judge()
    options = {"x_dtype": "float32", "with_index": True, "eval_batch_size": batch_size}
    datamodule = LazyH5DataModule(None, path, path, path, **nested(x_key="x", y_key="y", **options))
    trainer = quiet_trainer(devices=world_size, strategy=strategy)
    test = trainer.test(model, datamodule=datamodule, verbose=False)[0]["accuracy"]
    n_batches = model.n_batches
    validated = trainer.validate(model, datamodule=datamodule, verbose=False)[0]["accuracy"]
    predicted = torch.cat(trainer.predict(model, datamodule=datamodule), dim=1).tolist()
    return {"values": {test, validated}, "n_batches": n_batches, "predicted": predicted}


@pytest.mark.wide
@pytest.mark.parametrize("batch_size", [2, 32])
@pytest.mark.parametrize("kind", ["ddp", "sharded"])
@pytest.mark.parametrize("n_rows", LENGTHS)
def test_two_ranks_give_exactly_the_value_of_one_process(tmp_path, n_rows, kind, batch_size):
    """Also where ranks wait for each other in ``forward``: they have equally many batches."""
    path, right = write(tmp_path, n_rows)
    ranks = values(run_ranks(evaluate, 2, tmp_path, path, 2, kind, batch_size))
    (one,) = values(run_ranks(evaluate, 1, tmp_path, path, 1, "one", batch_size))
    assert one["values"] == {right}
    assert all(rank["values"] == {right} for rank in ranks)
    assert ranks[0]["n_batches"] == ranks[1]["n_batches"]
    indices, predictions = ([value for rank in ranks for value in rank["predicted"][i]] for i in (0, 1))
    assert indices == one["predicted"][0] == list(range(n_rows)), "the index brings each prediction back to its row"
    assert predictions == one["predicted"][1]


@pytest.mark.parametrize("n_rows", [5, 7])
def test_ddp_evaluates_exactly_with_a_batch_more_on_some_ranks(tmp_path, n_rows):
    path, right = write(tmp_path, n_rows)
    ranks = values(run_ranks(evaluate, 2, tmp_path, path, 2, "ddp", 1))
    assert all(rank["values"] == {right} for rank in ranks)
    assert ranks[0]["n_batches"] == ranks[1]["n_batches"] + 1


@pytest.mark.wide
def test_a_batch_more_on_some_ranks_is_refused_where_forward_gathers(tmp_path):
    path, _ = write(tmp_path, 5)
    outcomes = run_ranks(evaluate, 2, tmp_path, path, 2, "sharded", 1)
    for outcome in outcomes:
        assert outcome.exitcode == 1
        assert "the 5 rows of 'test' make 3 batches of 1 on some of 2 ranks and 2 on others" in outcome.error
        assert "eval_batch_size=2" in outcome.error


def predict(rank, path, world_size):
    datamodule = LazyH5DataModule(predict_path=path, x_key="x", y_key="y", x_dtype="float32", with_index=True)
    batches = quiet_trainer(devices=world_size, strategy="ddp").predict(Judge(), datamodule=datamodule)
    return [row for batch in batches or [] for row in batch[0].tolist()]  # Lightning gives None where there is none


@pytest.mark.wide
@pytest.mark.parametrize(("n_rows", "world_size"), [(1, 2), (2, 3), (1, 3)])
def test_fewer_rows_than_ranks_can_be_predicted(tmp_path, n_rows, world_size):
    path, _ = write(tmp_path, n_rows)
    ranks = values(run_ranks(predict, world_size, tmp_path, path, world_size))
    assert [row for rank in ranks for row in rank] == list(range(n_rows))
