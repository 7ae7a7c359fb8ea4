"""Weighted rows on two real ranks with none of Lightning's flags set: together they have the shares that were asked."""

import h5py
import numpy as np
import pytest
from arguments import nested
from lightning_models import Recorder, SaveOnException, quiet_trainer
from processes import run_ranks, values

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule

ROWS, EPOCHS = 901, 2
LABELS = np.select([np.arange(ROWS) % 50 == 3, np.arange(ROWS) % 9 == 1], [2, 1], 0)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as h5:
        h5.create_dataset("x", data=np.repeat(np.arange(ROWS, dtype="f4")[:, None], 3, 1), chunks=(16, 3))
        h5["row"], h5["y"] = np.arange(ROWS), LABELS
        h5["w"] = np.where(LABELS == 0, 0.5, 2.0)
    return str(path)


class RowRecorder(Recorder):
    """Remembers rows, and looks that each sample is whole."""

    def training_step(self, batch, batch_idx):
        assert batch["x"][:, 0].tolist() == batch["row"].tolist()
        loss = super().training_step({"index": batch["row"]}, batch_idx)
        self.steps = getattr(self, "steps", 0) + 1
        return loss

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            super().validation_step({"index": batch["row"]}, batch_idx)


def datamodule(kind, file, options):
    options = {"val_fraction": 0.2, "batch_size": 16} | options
    if kind != "combined":
        module = LazyH5DataModule if kind == "lazy" else RankCachedH5DataModule
        return module(file, **nested(x_key={"x": "x", "row": "row"}, **options))
    return CombinedHDF5DataModule(file, **nested(fields=["x", "row"], **options))


def fit(rank, kind, file, options, stop=None, folder=None, ckpt_path=None, devices=2):
    model = RowRecorder(fail_at=stop)
    saving = [] if folder is None else [SaveOnException(folder)]
    flags = {"devices": devices, "strategy": "ddp"} if devices > 1 else {}
    trainer = quiet_trainer(max_epochs=EPOCHS, callbacks=saving, **flags)
    try:
        trainer.fit(model, datamodule=datamodule(kind, file, options), ckpt_path=ckpt_path)
    except RuntimeError as error:
        if "stop here" not in str(error):
            raise
    return model.train_rows, model.rows["val"], model.steps


OPTIONS = {
    "balanced": {"balance_key": "y"},
    "balanced, with workers": {"balance_key": "y", "num_workers": 2},
    "balanced in chunks": {"balance_key": "y", "shuffle": "chunks", "shuffle_bytes": "4 KiB"},
    "class weights": {"balance_key": "y", "class_weights": {0: 1, 1: 2, 2: 1}},
    "a column": {"weight_key": "w"},
}


def wanted(options):
    if "weight_key" in options:
        return None
    weights = np.array(list(options.get("class_weights", {0: 1, 1: 1, 2: 1}).values()))
    return weights / weights.sum()


def options_and_kinds():
    """What makes the order is the same for both: of the second, two are enough for the short suite."""
    for options in OPTIONS:
        yield pytest.param(options, "lazy")
        is_long = options not in ("balanced, with workers", "a column")
        yield pytest.param(options, "combined", marks=[pytest.mark.slow] * is_long)
    yield pytest.param("balanced, with workers", "rank_cached")


@pytest.mark.wide
@pytest.mark.parametrize(("options", "kind"), [*options_and_kinds()])
def test_ranks_together_have_classes_as_often_as_asked_and_evaluate_each_row_once(file, tmp_path, kind, options):
    seen = values(run_ranks(fit, 2, tmp_path, kind, file, OPTIONS[options]))
    assert seen[0][2] == seen[1][2] > 0
    evaluated = sorted(row for _, rows, _ in seen for row in rows)
    assert evaluated == sorted([*set(evaluated)] * EPOCHS)
    for epoch in range(EPOCHS):
        rows = [row for train, _, _ in seen for row in train[epoch]]
        assert len(rows) + len(set(evaluated)) == ROWS
        assert not set(rows) & set(evaluated)
        shares = np.bincount(LABELS[rows], minlength=3) / len(rows)
        if (expected := wanted(OPTIONS[options])) is None:
            trained_on = np.setdiff1d(np.arange(ROWS), evaluated)
            weights = np.where(LABELS[trained_on] == 0, 0.5, 2.0)
            expected = np.bincount(LABELS[trained_on], weights, minlength=3) / weights.sum()
        assert np.abs(shares - expected).max() < 0.02


@pytest.mark.wide
@pytest.mark.parametrize(
    ("options", "kind"), [("balanced", "lazy"), ("balanced, with workers", "lazy"), ("balanced", "rank_cached")]
)
def test_a_run_of_two_ranks_stopped_in_the_middle_goes_on_exactly(file, tmp_path, options, kind):
    options = OPTIONS[options]
    whole = values(run_ranks(fit, 2, tmp_path / "whole", kind, file, options))
    broken = values(run_ranks(fit, 2, tmp_path / "broken", kind, file, options, (1, 4), tmp_path))
    saved = str(tmp_path / "exception.ckpt")
    resumed = values(run_ranks(fit, 2, tmp_path / "resumed", kind, file, options, None, None, saved))
    for rank in range(2):
        assert broken[rank][0][0] == whole[rank][0][0]
        assert broken[rank][0][1] + resumed[rank][0][1] == whole[rank][0][1]
