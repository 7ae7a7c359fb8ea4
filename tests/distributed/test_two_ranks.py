"""Two real processes under the Trainer, with none of its flags set: each row once an epoch, in all four stages."""

import json
import runpy
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from arguments import nested
from lightning.pytorch import LightningModule
from lightning_models import Recorder, quiet_trainer
from processes import run_ranks, values

from lightning_h5 import LazyH5DataModule
from lightning_h5.datamodules import base
from lightning_h5.samples import row_table

ROWS = 101


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as h5:
        h5["x"] = np.repeat(np.arange(ROWS, dtype="f4")[:, None], 3, axis=1)
        h5["y"] = np.arange(ROWS)
    return str(path)


class Witness(LightningModule):
    """Notes the targets of each batch by stage, and looks that each belongs to its input."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen = {"train": [], "val": [], "validate": [], "test": [], "predict": []}

    def note(self, stage, batch):
        x, y = batch
        assert torch.equal(x[:, 0].long(), y)
        self.seen[stage].append([self.current_epoch if stage in ("train", "val") else 0, y.tolist()])

    def training_step(self, batch, batch_idx):
        self.note("train", batch)
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.note("val" if self.trainer.state.fn == "fit" else "validate", batch)

    def test_step(self, batch, batch_idx):
        self.note("test", batch)

    def predict_step(self, batch, batch_idx):
        self.note("predict", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(rank, file, options):
    options = {"val_fraction": 0.2, "test_fraction": 0.1, "batch_size": 8, "eval_batch_size": 8} | options
    datamodule = LazyH5DataModule(file, **nested(predict_path=file, x_key="x", y_key="y", **options))
    trainer, model = quiet_trainer(devices=2, strategy="ddp"), Witness()
    trainer.fit(model, datamodule=datamodule)
    trainer.validate(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule)
    trainer.predict(model, datamodule=datamodule)
    return model.seen


def epochs_of(seen, stage):
    """The rows of each epoch over both ranks, after looking that both took equally many steps."""
    epochs = sorted({epoch for rank in seen for epoch, _ in rank[stage]})
    for epoch in epochs:
        steps = [sum(e == epoch for e, _ in rank[stage]) for rank in seen]
        assert steps[0] == steps[1] > 0
    return [[row for rank in seen for e, rows in rank[stage] if e == epoch for row in rows] for epoch in epochs]


def look_at(seen):
    rows = {stage: epochs_of(seen, stage) for stage in seen[0]}
    assert [len(epochs) for epochs in rows.values()] == [2, 2, 1, 1, 1]
    for epochs in rows.values():
        assert all(len(epoch) == len(set(epoch)) for epoch in epochs), "no row comes twice in an epoch"
        assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs), "every epoch has the same rows"
    assert sorted(rows["predict"][0]) == list(range(ROWS))
    assert sorted(rows["validate"][0]) == sorted(rows["val"][0])
    assert sorted(rows["train"][0] + rows["val"][0] + rows["test"][0]) == list(range(ROWS))
    orders = [[ys for e, ys in seen[0]["train"] if e == epoch] for epoch in (0, 1)]
    assert orders[0] != orders[1], "each epoch has an order of its own"


WORKERS = {
    "no workers": {},
    "two workers": {"num_workers": 2, "persistent_workers": False},
    "two persistent workers": {"num_workers": 2},
    "batches that do not come out even": {"batch_size": 33},
}


@pytest.mark.parametrize("options", WORKERS)
def test_each_row_comes_once_an_epoch_over_both_ranks_in_all_four_stages(file, tmp_path, options):
    look_at(values(run_ranks(run, 2, tmp_path, file, WORKERS[options])))


@pytest.mark.wide
def test_with_batches_of_one_row_another_row_sits_out_each_epoch(file, tmp_path):
    seen = values(run_ranks(run, 2, tmp_path, file, {"batch_size": 1, "shuffle": False}))
    epochs = [set(rows) for rows in epochs_of(seen, "train")]
    assert [len(epoch) for epoch in epochs] == [70, 70]
    assert len(epochs[0] | epochs[1]) == 71


def as_a_script(rank, script):
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.wide
def test_with_lightnings_own_launcher_too(file, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, sys\n"
        f"sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:3]]!r}\n"
        "from test_two_ranks import run\n"
        "rank = int(os.environ.get('LOCAL_RANK', '0'))\n"
        f"seen = run(rank, {file!r}, {{}})\n"
        f"open({str(tmp_path)!r} + f'/{{rank}}.json', 'w').write(json.dumps(seen))\n"
    )
    # The first rank is forked; the other one is started by Lightning, as it starts those of any script.
    values(run_ranks(as_a_script, 1, tmp_path / "logs", str(script)))
    look_at([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)])


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_fewer_rows_than_ranks_are_refused_with_the_numbers(tmp_path, stage):
    few = tmp_path / "few.h5"
    with h5py.File(few, "w") as h5:
        h5["x"] = np.zeros((1, 3), dtype="f4")
        h5["y"] = np.zeros(1, dtype="i8")
    outcomes = run_ranks(refused, 2, tmp_path, str(few), stage)
    split = {"fit": "train"}.get(stage, stage)
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    assert all(f"{split!r} has 1 rows and there are 2 ranks" in outcome.error for outcome in outcomes)


def refused(rank, file, stage):
    datamodule = LazyH5DataModule(file, test_path=file, x_key="x", y_key="y")
    getattr(quiet_trainer(devices=2, strategy="ddp"), stage)(Witness(), datamodule=datamodule)


def decide(rank, file):
    """The order of one of two ranks, on machines with much memory and with hardly any, and its rows."""
    base.page_cache_memory = lambda: (1 << 40, 1)[rank]
    row_table.HELD_BYTES = -1
    module = LazyH5DataModule(file, x_key="large", batch_size=100, with_index=True, shuffle={"buffer": "1 MiB"})
    trainer, model = quiet_trainer(devices=2, strategy="ddp", max_epochs=1), Recorder()
    trainer.fit(model, datamodule=module)
    return module.train_dataloader().sampler.parameters, model.train_rows[0]


def test_ranks_with_different_memory_decide_alike(tmp_path):
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as file:
        file["large"] = np.arange(6000.0 * 128).reshape(6000, 128)
    outcomes = run_ranks(decide, 2, tmp_path, str(path))
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].output
    (one, rows), (other, others) = (outcome.value for outcome in outcomes)
    assert one == other
    assert one.mode == "chunks"
    assert sorted(rows + others) == list(range(6000))
