"""Mixtures on two real ranks: together they train on the one stream, and refuse the same things."""

from contextlib import suppress

import h5py
import numpy as np
import pytest
from arguments import nested
from lightning_models import Recorder, SaveOnException, quiet_trainer
from processes import run_ranks, values

from lightning_h5 import CombinedHDF5DataModule

SIZES = {"a": 50, "b": 21, "c": 9}
EPOCHS = 3


@pytest.fixture
def sources(tmp_path):
    files = {}
    for number, (name, n_rows) in enumerate(SIZES.items()):
        files[name] = str(tmp_path / f"{name}.h5")
        with h5py.File(files[name], "w") as file:
            file["row"] = np.arange(n_rows) + 1000 * number
            file.create_dataset("x", data=np.ones((n_rows, 2), "f4"), chunks=(4, 2), compression="gzip")
    return files


class BatchRecorder(Recorder):
    """Remembers each batch by itself, and that it is what its sources' names say."""

    def __init__(self, fail_at=None):
        super().__init__(fail_at)
        self.batches = []

    def training_step(self, batch, batch_idx):
        rows = batch["row"].tolist()
        assert list(batch["source"]) == ["abc"[row // 1000] for row in rows]
        loss = super().training_step({"index": batch["row"]}, batch_idx)
        self.batches.append((self.current_epoch, rows))
        return loss


MIXTURES = {
    "round robin": {"sampling_strategy": "round_robin"},
    "round robin of rows": {"sampling_strategy": "round_robin", "mix": "rows", "epoch_length": "max"},
    "weighted": {"sampling_strategy": "weighted", "weights": [5, 3, 2]},
    "weighted rows": {"sampling_strategy": "weighted", "weights": {"a": 2, "b": 1, "c": 1}, "mix": "rows"},
    "weights that change": {
        "sampling_strategy": "weighted",
        "weights": {0: {"a": 1, "b": 1, "c": 0}, 20: {"a": 1, "b": 2, "c": 2}},
        "between": "linear",
    },
    "in chunks, with workers": {
        "sampling_strategy": "round_robin",
        "shuffle": "chunks",
        "streams": 2,
        "shuffle_bytes": 1024,
        "num_workers": 1,
    },
}


def fit(rank, world_size, sources, options, fail_at=None, save_to=None, ckpt_path=None):
    datamodule = CombinedHDF5DataModule(**nested(sources=sources, batch_size=4, **options))
    many = {"devices": world_size, "strategy": "ddp"} if world_size > 1 else {}
    callbacks = [] if save_to is None else [SaveAfterBatch(save_to, fail_at)]
    trainer = quiet_trainer(max_epochs=EPOCHS, num_sanity_val_steps=0, callbacks=callbacks, **many)
    model = BatchRecorder()
    with suppress(StopHereError):
        trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    return model.batches


class StopHereError(RuntimeError):
    """What ends a run on all ranks at the same batch."""


class SaveAfterBatch(SaveOnException):
    """Saves after a batch, and ends the run."""

    def __init__(self, path, at):
        super().__init__(path)
        self.at = at

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            trainer.save_checkpoint(self.path)
            raise StopHereError

    def on_exception(self, *_):
        """Saved already, by all ranks together."""


def streams(ranks):
    """Each epoch's rows, step by step and rank by rank, after looking that all ranks took equally many steps."""
    assert len({len(batches) for batches in ranks}) == 1
    found = {}
    for step in zip(*ranks, strict=True):
        for epoch, rows in step:
            found.setdefault(epoch, []).extend(rows)
    return found


@pytest.mark.wide
@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_rows_of_two_ranks_together_are_the_stream_of_one(sources, tmp_path, mixture):
    options = MIXTURES[mixture]
    two = streams(values(run_ranks(fit, 2, tmp_path, 2, sources, options)))
    assert two == streams([fit(0, 1, sources, options)])


@pytest.mark.wide
def test_so_many_steps_have_two_ranks_go_twice_as_far(sources, tmp_path):
    options = {"sampling_strategy": "round_robin", "epoch_length": 5}
    ranks = values(run_ranks(fit, 2, tmp_path, 2, sources, options))
    assert [len(batches) for batches in ranks] == [5 * EPOCHS] * 2
    one, two = streams([fit(0, 1, sources, options | {"epoch_length": 10})]), streams(ranks)
    assert one == two


@pytest.mark.wide
@pytest.mark.parametrize("mixture", ["round robin", "weighted rows"])
def test_a_run_of_two_ranks_goes_on_exactly_on_one(sources, tmp_path, mixture):
    options, saved = MIXTURES[mixture], tmp_path / "saved"
    saved.mkdir()
    two = streams(values(run_ranks(fit, 2, tmp_path, 2, sources, options, (1, 3), saved)))
    (path,) = saved.glob("*.ckpt")
    rest = streams([fit(0, 1, sources, options, ckpt_path=path)])
    whole = streams([fit(0, 1, sources, options)])
    assert {epoch: two.get(epoch, []) + rest.get(epoch, []) for epoch in whole} == whole


@pytest.mark.wide
def test_a_run_of_one_rank_goes_on_along_the_same_stream_on_two(sources, tmp_path):
    """Also in later epochs, which have twice as many batches then."""
    options, saved = MIXTURES["weights that change"] | {"epoch_length": 6}, tmp_path / "saved"
    saved.mkdir()
    one = fit(0, 1, sources, options, (1, 3), saved)
    (path,) = saved.glob("*.ckpt")
    two = streams(values(run_ranks(fit, 2, tmp_path, 2, sources, options, None, None, path)))
    rows = [row for _, batch in one for row in batch] + [row for epoch in (1, 2) for row in two[epoch]]
    whole = [row for _, batch in fit(0, 1, sources, options | {"epoch_length": 8}) for row in batch]
    assert len(rows) > 80
    assert rows == whole[: len(rows)]


BAD = {
    "a source without rows that pass": {"sampling_strategy": "round_robin", "where": {"row": {"min": 1000}}},
    "a batch larger than a source": {"sampling_strategy": "round_robin", "drop_last": True, "batch_size": 10},
    "weights of others": {"sampling_strategy": "weighted", "weights": {"a": 1, "d": 1}},
    "too few rows for the ranks": {"sampling_strategy": "sequential", "drop_last": True, "batch_size": 50},
}


def refused(rank, sources, options):
    options = {"batch_size": 4} | options
    if options["batch_size"] == 50:
        sources = {"a": sources["a"]}
    datamodule = CombinedHDF5DataModule(**nested(sources=sources, **options))
    quiet_trainer(devices=2, strategy="ddp").fit(BatchRecorder(), datamodule=datamodule)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_on_every_rank_with_the_same_words(sources, tmp_path, case):
    outcomes = run_ranks(refused, 2, tmp_path, sources, BAD[case])
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    assert outcomes[0].error.startswith("H5ValueError: ")
    assert outcomes[0].error == outcomes[1].error
