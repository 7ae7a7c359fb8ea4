"""Two real ranks that train on batches of at most so many steps, and go on after they were stopped."""

import h5py
import numpy as np
import pytest
from lightning_models import Recorder, SaveOnException, quiet_trainer
from processes import run_ranks, values

from lightning_h5 import LazyH5DataModule, RankCachedH5DataModule

LENGTHS = np.random.default_rng(2).integers(2, 40, 91)
KINDS = {"lazy": LazyH5DataModule, "in memory": RankCachedH5DataModule}


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "sequences.h5", "w") as file:
        file["x"], file["n"] = np.repeat(np.arange(len(LENGTHS)), LENGTHS), LENGTHS
    return tmp_path / "sequences.h5"


def module(file, kind):
    segments = {"lengths": "n", "max_tokens": 128}
    return KINDS[kind](file, file, fields=["x"], segments=segments, collate_fn="pack", with_index=True)


def run(rank, file, kind):
    whole, broken, resumed = Recorder(), Recorder(fail_at=(1, 3)), Recorder()
    trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=2)
    trainer.fit(whole, datamodule=module(file, kind))
    stops = SaveOnException(file.parent)
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(devices=2, strategy="ddp", max_epochs=2, callbacks=[stops]).fit(
            broken, datamodule=module(file, kind)
        )
    quiet_trainer(devices=2, strategy="ddp", max_epochs=2).fit(
        resumed, datamodule=module(file, kind), ckpt_path=stops.path
    )
    return whole.train_rows, broken.train_rows, resumed.train_rows, whole.rows["val"]


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_take_each_sample_once_also_after_a_stop(file, tmp_path, kind):
    ranks = values(run_ranks(run, 2, tmp_path, file, kind))
    for whole, broken, resumed, _ in ranks:
        assert broken[1] + resumed[1] == whole[1]
    for epoch in range(2):
        assert sorted(row for whole, *_ in ranks for row in whole[epoch]) == list(range(len(LENGTHS)))
    assert sorted(row for *_, val in ranks for row in set(val)) == list(range(len(LENGTHS)))
