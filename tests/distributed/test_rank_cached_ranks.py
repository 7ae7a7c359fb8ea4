"""``RankCachedH5DataModule`` on two and three real ranks: each holds its shard, all take equally many steps."""

import json
import os
import re
import shutil
import signal
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import h5py
import lightning
import numpy as np
import pytest
import torch
from arguments import nested
from factories import assert_same_rows, edit
from guards import HANG
from killing import Job, newest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_models import Recorder, SaveOnException, quiet_trainer, together
from packaging.version import Version
from processes import run_ranks, values
from test_kills import Start, run, saved_steps, stopped_as_asked
from torchmetrics.classification import BinaryAccuracy

from lightning_h5 import RankCachedH5DataModule
from lightning_h5.datasets import RankMemCachedH5Dataset, shard_loading
from lightning_h5.datasets.shard_loading import AvailableMemory
from lightning_h5.readers import bulk
from lightning_h5.samples import row_table

MODES = ["contiguous", "interleave"]


def write(folder, n_rows, chunk=3):
    """Rows that say which they are, and a target that is the row's answer in two of three of them."""
    path = folder / f"{n_rows}.h5"
    with h5py.File(path, "w") as file:
        answer = np.random.default_rng(n_rows).integers(0, 2, n_rows)
        file["answer"] = answer
        file["y"] = np.where(np.arange(n_rows) % 3 > 0, answer, 1 - answer)
        rows = np.arange(n_rows, dtype="f4")[:, None] * np.array([1, 10], "f4")
        file.create_dataset("x", data=rows, chunks=(min(chunk, n_rows), 2), compression="gzip", shuffle=True)
    return str(path)


def module(path, **options):
    """A data module with all splits from one file."""
    paths = dict.fromkeys(("train_path", "val_path", "test_path", "predict_path"), path)
    common = {"x_key": {"x": "x", "answer": "answer"}, "y_key": "y", "batch_size": 2, "with_index": True}
    return RankCachedH5DataModule(**nested(**(paths | common | options)))


def ddp(world_size, **options):
    return quiet_trainer(**({"devices": world_size, "strategy": "ddp", "num_sanity_val_steps": 0} | options))


class Judge(Recorder):
    """Looks that each row is the one that it should be, counts steps, and judges how many targets are the answer."""

    def __init__(self, fail_at=None):
        super().__init__(fail_at)
        self.accuracy = BinaryAccuracy()
        self.steps = {}

    def look(self, batch):
        x, index = batch[0]["x"], batch[-1]
        assert_same_rows(x.numpy(), (index[:, None] * torch.tensor([1.0, 10.0])).numpy())

    def training_step(self, batch, batch_idx):
        self.look(batch)
        loss = super().training_step(batch, batch_idx)
        self.steps[self.current_epoch] = self.steps.get(self.current_epoch, 0) + 1
        return loss

    def judge(self, batch):
        self.look(batch)
        self.accuracy(batch[0]["answer"], batch[1])
        self.log("accuracy", self.accuracy)

    def validation_step(self, batch, batch_idx):
        self.judge(batch)
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.judge(batch)
        super().test_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        self.look(batch)
        return super().predict_step(batch, batch_idx)


def error_of(function):
    """The error that a function ends with, as text; None where it does not."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# Rows ------------------------------------------------------------------------------------------------------------

EPOCHS = 3


def through_all_stages(rank, world_size, cases):
    """What a rank saw of each file, in each stage."""
    found = []
    for path, options in cases:
        datamodule, model, trainer = module(path, **options), Judge(), ddp(world_size, max_epochs=EPOCHS)
        trainer.fit(model, datamodule=datamodule)
        judged = [
            getattr(trainer, stage)(model, datamodule=datamodule, verbose=False)[0]["accuracy"]
            for stage in ("validate", "test")
        ]
        trainer.predict(model, datamodule=datamodule)
        found.append((model.train_rows, model.steps, model.rows, judged))
    return found


def look_at(ranks, path, batch_size=2):
    trained, steps, rows, judged = zip(*ranks, strict=True)
    with h5py.File(path) as file:
        right = float(np.float32((file["y"][:] == file["answer"][:]).mean()))
        n_rows = len(file["y"])
    assert len({json.dumps(each) for each in steps}) == 1, "equal steps"
    epochs = [[row for rank in trained for row in rank[epoch]] for epoch in range(EPOCHS)]
    n_left_out = n_rows % len(ranks) if batch_size == 1 else 0  # single rows cannot be halved for another step
    for epoch in epochs:
        assert len({*epoch}) == len(epoch) == n_rows - n_left_out
    for some, others in pairwise(epochs):
        assert {*some, *others} == {*range(n_rows)}, "who sits out comes in the next epoch"
    for stage, times in (("val", EPOCHS + 1), ("test", 1), ("predict", 1)):
        assert sorted(row for rank in rows for row in rank[stage]) == sorted([*range(n_rows)] * times)
    assert [*judged] == [[right, right]] * len(ranks), "the value of one process"


N_ROWS = {2: [3, 7, 12], 3: [3, 8]}


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_any_number_of_rows_makes_equal_steps_and_each_row_comes_once(tmp_path, which, world_size):
    """But for fewer rows than ranks, in batches of one row, that sit out an epoch of training.

    In an order that is not shuffled they come in the next.
    """
    if which == "some":
        cases = [(write(tmp_path, n), {"mode": MODES[at % 2]}) for at, n in enumerate(N_ROWS[world_size])]
    else:
        cases = [
            (
                write(tmp_path, n),
                {"mode": mode, "num_workers": n % 2, "batch_size": (2, 1, 5)[n % 3], "shuffle": n % 3 != 1},
            )
            for n in range(world_size, 26)
            for mode in MODES
        ]
    ranks = values(run_ranks(through_all_stages, world_size, tmp_path, world_size, cases))
    for found, (path, options) in zip(zip(*ranks, strict=True), cases, strict=True):
        look_at(found, path, options.get("batch_size", 2))


def with_too_few_rows(rank, world_size, path):
    """The error of each stage, and what is predicted of fewer rows than ranks."""
    errors = [
        error_of(lambda: getattr(ddp(world_size), stage)(Judge(), datamodule=module(path)))  # noqa: B023
        for stage in ("fit", "validate", "test")
    ]
    model = Judge()
    ddp(world_size).predict(model, datamodule=module(path))
    return errors, model.rows["predict"]


@pytest.mark.wide
def test_fewer_rows_than_ranks_are_refused_with_the_numbers_but_can_be_predicted(tmp_path):
    ranks = values(run_ranks(with_too_few_rows, 3, tmp_path, 3, write(tmp_path, 2)))
    for number, split in enumerate(("train", "val", "test")):
        (error,) = {errors[number] for errors, _ in ranks}
        assert error.startswith("H5ValueError: setting up the data")
        assert f"the split {split!r} has 2 rows and there are 3 ranks" in error
    assert [rows for _, rows in ranks] == [[0], [1], []]


def loaders_alone(rank, path):
    """Loaders that were made before there were ranks, without their data module."""
    datamodule, model = module(path), Judge()
    datamodule.setup("fit")
    trainer = ddp(2, max_epochs=1)
    return error_of(lambda: trainer.fit(model, datamodule.train_dataloader())), model.train_rows


@pytest.mark.wide
def test_loaders_that_were_made_before_there_were_ranks_are_refused(tmp_path):
    """Each rank holds all rows then, and would train on all of them."""
    for error, rows in values(run_ranks(loaders_alone, 2, tmp_path, write(tmp_path, 12))):
        assert rows == {}
        assert error.startswith("H5ValueError")


class Parallel(Judge):
    def configure_model(self):
        self.mesh = self.device_mesh

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, foreach=False)


def tensor_parallel_peers(rank, path, options):
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    datamodule, model = module(path, val_path=None, **options), Parallel()
    ddp(2, strategy=strategy).fit(model, datamodule=datamodule)
    dataset = datamodule._datasets["train"]
    return model.train_rows, memory_of(dataset), dataset.counters.total()["chunks_decoded"]


def memory_of(dataset):
    """What tells shared memory from any other."""
    descriptor = dataset._held.descriptor
    return None if descriptor is None else os.fstat(descriptor).st_ino


@pytest.mark.wide
def test_tensor_parallel_peers_see_the_same_rows_and_may_hold_them_once(tmp_path):
    path = write(tmp_path, 25)
    (first, *alone), (second, *others) = values(run_ranks(tensor_parallel_peers, 2, tmp_path, path, {}))
    assert first == second
    assert sorted(first[0]) == [*range(25)]
    assert alone == others == [None, 9]
    shared = values(run_ranks(tensor_parallel_peers, 2, tmp_path, path, {"share_memory": True}))
    assert [rows for rows, _, _ in shared] == [first, first]
    assert len({memory for _, memory, _ in shared}) == 1
    assert sum(n_chunks for _, _, n_chunks in shared) == 9


def in_each_way(rank, path, all_options):
    """Rows, memory and decoded chunks of each way to hold a shard."""
    found = []
    for options in all_options:
        datamodule, model = module(path, val_path=None, **options), Judge()
        ddp(2).fit(model, datamodule=datamodule)
        dataset = datamodule._datasets["train"]
        found.append((model.train_rows, memory_of(dataset), dataset.counters.total()["chunks_decoded"]))
    return found


@pytest.mark.wide
def test_ranks_that_hold_rows_together_train_on_the_same_and_decode_each_chunk_once(tmp_path):
    """Of 25 rows in chunks of 3 the middle chunk is cut, and decoded twice where each rank holds its own rows."""
    ways = [{"mode": mode, **more} for mode in MODES for more in ({}, {"share_memory": True}, {"num_workers": 2})]
    found = [*zip(*values(run_ranks(in_each_way, 2, tmp_path, write(tmp_path, 25), ways)), strict=True)]
    rows = [[rows for rows, _, _ in ranks] for ranks in found]
    assert rows[0] == rows[1] == rows[2] != rows[3] == rows[4] == rows[5]
    assert [{row % 2 for row in rows[0]} for rows in rows[3]] == [{0}, {1}]
    assert [len({memory for _, memory, _ in ranks}) for ranks in found] == [1] * 6
    assert [ranks[0][1] is not None for ranks in found] == [False, True, False, True, True, True]
    assert [sum(n_chunks for _, _, n_chunks in ranks) for ranks in found] == [10, 9, 10, 9, 9, 9]


CLASSES, SORTED_ROWS = 10, 4_000


def classes_of(rank, path, all_options):
    """For each choice of options the classes that a rank trained on, the warnings, and the chunks that it decoded."""
    bulk.TASK_BYTES, found, load = 1, [], shard_loading.run_with_progress
    if rank == 1:  # targets are not compared before the slowest has loaded its part

        def slowly(*arguments, **options):
            time.sleep(1)
            load(*arguments, **options)

        shard_loading.run_with_progress = slowly
    for options in all_options:
        datamodule, model = module(path, val_path=None, batch_size=50, **options), Judge()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ddp(2, max_epochs=2).fit(model, datamodule=datamodule)
            ddp(2).fit(model, datamodule=datamodule)
        classes = [sorted({row * CLASSES // SORTED_ROWS for row in rows}) for rows in model.train_rows.values()]
        about = [str(each.message) for each in told if "different targets" in str(each.message)]
        found.append((classes, about, datamodule._datasets["train"].counters.total()["chunks_decoded"]))
    return found


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_each_rank_sees_all_classes_of_a_sorted_file_and_a_choice_that_prevents_it_warns_once(tmp_path, kind):
    path = write(tmp_path, SORTED_ROWS, chunk=100)
    with h5py.File(path, "a") as file:
        del file["y"]
        rows = np.arange(SORTED_ROWS)
        file["y"] = rows * CLASSES // SORTED_ROWS if kind == "classes" else rows / 7
    ways = [{}, {"mode": "contiguous"}, {"mode": "contiguous", "reshard_every_n_epochs": 1}]
    ranks = run_ranks(classes_of, 2, tmp_path, path, ways)
    (first, *others), (second, *more) = values(ranks)
    assert first[0] == second[0] == [[*range(CLASSES)]] * 2
    assert first[1] == second[1] == others[1][1] == more[1][1] == []
    assert first[2] + second[2] == SORTED_ROWS // 100, "each chunk is decoded once on the machine"
    assert [others[0][0][0], more[0][0][0]] == [[*range(5)], [*range(5, 10)]]
    (warning,) = others[0][1]
    assert "the rows are sorted by the target 'y', and mode='contiguous'" in warning
    assert more[0][1] == [], "the same on all ranks, and said by the first"
    for text in (
        "train: rank 0 of 2 holds 2,000 of 4,000 rows (one of every 2)",
        "global over the rows that each rank holds, 2,000 of 4,000 (one of every 2)",
        "global over the rows that each rank holds, 2,000 of 4,000 (neighboring rows)",
        "global over the rows that each rank holds, 2,000 of 4,000 (redrawn each epoch)",
    ):
        assert text in ranks[0].output


@pytest.mark.wide
def test_targets_that_repeat_with_the_number_of_ranks_warn_once(tmp_path):
    path = write(tmp_path, SORTED_ROWS, chunk=100)
    with h5py.File(path, "a") as file:
        file["y"][:] = np.arange(SORTED_ROWS) % 2
    ways = [{}, {"reshard_every_n_epochs": 1}, {"mode": "contiguous"}]
    (first, *_), (second, *_) = both = values(run_ranks(classes_of, 2, tmp_path, path, ways))
    (warning,) = first[1]
    assert "the values of the target 'y' repeat with the number of ranks" in warning
    assert "Pass reshard_every_n_epochs=1, or shuffle" in warning
    assert second[1] == [], "the same on all ranks, and said by the first"
    assert all(about == [] for found in both for _, about, _ in found[1:])


def launched_by_lightning(rank, strategy, path, folder):
    model = WritesRows(folder)
    datamodule = module(path, mode="interleave", share_memory=True, num_workers=1)
    trainer = ddp(2, strategy=strategy, max_epochs=2)
    trainer.fit(model, datamodule=datamodule)
    trainer.predict(model, datamodule=datamodule, return_predictions=False)


class WritesRows(Judge):
    """What a process remembers is lost with it, so each writes its rows to a file."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_predict_end(self):
        Path(f"{self.folder}/predicted{self.global_rank}.json").write_text(json.dumps(self.rows["predict"]))

    def on_train_end(self):
        Path(f"{self.folder}/{self.global_rank}.json").write_text(json.dumps([*self.train_rows.values()]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_ranks_that_lightning_forks_or_spawns_share_memory_too(tmp_path, strategy):
    path = write(tmp_path, 12)
    values(run_ranks(launched_by_lightning, 1, tmp_path, strategy, path, str(tmp_path)))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for rank, epochs in enumerate((first, second)):
        assert [sorted(epoch) for epoch in epochs] == [[*range(rank, 12, 2)]] * 2
        predicted = json.loads((tmp_path / f"predicted{rank}.json").read_text())
        assert predicted == [*range(6 * rank, 6 * rank + 6)]


# Drawn anew ------------------------------------------------------------------------------------------------------


def drawn_anew(rank, world_size, cases, folder):
    """Epochs of an unbroken run, of one that is broken off, and of one that goes on with it."""
    row_table.HELD_BYTES = -1  # blocks are chunks, as those of large arrays are
    found = []
    for path, options in cases:
        whole, broken, resumed = Judge(), Judge(fail_at=(2, 1)), Judge()
        ddp(world_size, max_epochs=4).fit(whole, datamodule=module(path, **options))
        keep = SaveOnException(Path(folder))
        trainer = ddp(world_size, max_epochs=4, callbacks=[keep])
        assert "stop here" in error_of(lambda: trainer.fit(broken, datamodule=module(path, **options)))  # noqa: B023
        ddp(world_size, max_epochs=4).fit(resumed, datamodule=module(path, **options), ckpt_path=keep.path)
        found.append((whole.train_rows, together(broken.train_rows, resumed.train_rows), whole.rows["val"]))
    return found


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shards_that_are_drawn_anew_hold_other_rows_and_all_of_them_once(tmp_path, world_size):
    ways = [{"reshard_every_n_epochs": 1, "mode": mode} for mode in MODES]
    ways += [{"reshard_every_n_epochs": 2, "num_workers": 1, "share_memory": True}]
    cases = [(write(tmp_path, n), options) for n, options in zip((24, 25, 25), ways, strict=True)]
    ranks = values(run_ranks(drawn_anew, world_size, tmp_path, world_size, cases, str(tmp_path)))
    for (path, options), *found in zip(cases, *ranks, strict=True):
        n_rows = int(Path(path).stem)
        for whole, again, val in found:
            assert again == whole, "a run that was broken off goes on with the same"
            assert len(val) == 4 * len({*val})
        for epoch in range(4):
            rows = [row for whole, _, _ in found for row in whole[epoch]]
            assert len({*rows}) == len(rows) == n_rows
        shards = [{*found[0][0][epoch]} for epoch in range(4)]
        for epoch in range(1, 4):
            n_new = len(shards[epoch] - shards[epoch - 1])
            if epoch % options["reshard_every_n_epochs"] == 0:
                assert n_new > 1
            else:
                assert n_new <= 1, "another row sits out, at most"


# Resuming --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """The file of ``killing.Historian``; one of its rows sits out on two ranks."""
    path = tmp_path_factory.mktemp("ranks") / "rows.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(61, dtype="f4")[:, None] / 64, chunks=(4, 1))
    return str(path)


def job(file, folder, start, data, resume=None):
    data = {"mode": "contiguous"} | data
    common = {"kind": RankCachedH5DataModule, "world_size": start.world_size, "batch_size": start.batch_size}
    way = {"way": start.way, "at": start.at, "every": start.every, "resume": resume}
    return Job(file=file, folder=str(folder), data=data, **common, **way)


@pytest.fixture(scope="module")
def unbroken(numbers, tmp_path_factory):
    """History and weights of a run that nothing stops, trained once for each set of options."""
    found = {}

    def train_through(world_size, data):
        key = (world_size, json.dumps(data))
        if key not in found:
            start = Start(None, 0, world_size)
            found[key] = values(run(job(numbers, tmp_path_factory.mktemp("whole"), start, data)))[0]
        return found[key]

    return train_through


def play(starts, data, numbers, folder, unbroken):
    """Each start goes on from the newest checkpoint of those before; every history is a head of the unbroken one."""
    whole, weights = unbroken(starts[0].world_size, data)
    resume, history = None, []
    for start in starts:
        before = len(history)
        stopped_as_asked(start, run(job(numbers, folder, start, data, resume)))
        resume, history = newest(folder)
        assert history == whole[: len(history)]
        assert len(history) == saved_steps(start, before, "plain"), "it stopped somewhere else"
    last = starts[-1]._replace(way=None, at=0)
    found, found_weights = values(run(job(numbers, folder, last, data, resume)))[0]
    assert found == whole
    assert found_weights == weights


SHARED = {"mode": "interleave", "num_workers": 2, "reshard_every_n_epochs": 1}
CHAINS = {
    "two kills": ([Start("one rank killed", 10, 2), Start("killed after a save", 5, 2)], {}),
    "at an epoch's end": ([Start("saved at an epoch's end and killed", 8, 2)], SHARED),
    "an epoch's checkpoint": ([Start("killed after an epoch's checkpoint", 13, 2)], {"share_memory": True}),
    "in a step": ([Start("failed in a step", 9, 2), Start("SIGTERM", 2, 2)], SHARED),
    "at an epoch's start": ([Start("saved at an epoch's start and killed", 7, 2)], {"drop_last": True}),
    "while writing": ([Start("killed while writing", 12, 2)], {"num_workers": 2}),
    "three ranks": ([Start("killed batches after a save", 9, 3, every=2), Start("one rank killed", 3, 3)], SHARED),
}
TRIED = ["two kills", "at an epoch's end"]


@pytest.mark.parametrize(
    "chain", [pytest.param(name, marks=[] if name in TRIED else pytest.mark.slow) for name in CHAINS]
)
def test_as_many_ranks_go_on_after_a_kill_with_exactly_the_rest(chain, numbers, tmp_path, unbroken):
    play(*CHAINS[chain], numbers, tmp_path, unbroken)


def saved_in_each_way(rank, world_size, path, folder):
    """Breaks off in epoch 1 after two batches; checkpoints of each batch, of the exception, and of the epoch's end."""
    each = ModelCheckpoint(folder, filename="each", every_n_train_steps=1, save_top_k=1)
    end = ModelCheckpoint(folder, filename="end", every_n_epochs=1, save_on_train_epoch_end=True)
    callbacks = [each, end, SaveOnException(Path(folder))]
    trainer = ddp(world_size, max_epochs=EPOCHS, enable_checkpointing=True, callbacks=callbacks)
    return error_of(lambda: trainer.fit(Judge(fail_at=(1, 2)), datamodule=module(path)))


def resumed_in_each_way(rank, world_size, path, folder):
    """An unbroken run, then for each checkpoint the rows after it, where training ended, and what was warned of."""
    whole = Judge()
    ddp(world_size, max_epochs=EPOCHS).fit(whole, datamodule=module(path))
    found = {}
    for name in ("each", "exception", "end"):
        model, trainer = Judge(), ddp(world_size, max_epochs=EPOCHS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, datamodule=module(path), ckpt_path=f"{folder}/{name}.ckpt")
        said = [str(one.message) for one in caught if "starts over" in str(one.message)]
        found[name] = model.train_rows, model.rows["val"], trainer.current_epoch, trainer.global_step, said
    return whole.train_rows, found


@pytest.mark.wide
@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 3), pytest.param(3, 2, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)],
)
def test_another_number_of_ranks_starts_a_broken_epoch_over_and_says_so(tmp_path, before, after):
    """And goes on after a whole epoch without a word."""
    path = write(tmp_path, 24)
    errors = values(run_ranks(saved_in_each_way, before, tmp_path, before, path, str(tmp_path)))
    assert all("stop here" in error for error in errors)
    steps, steps_now = 24 // before // 2, 24 // after // 2
    for rank, (whole, found) in enumerate(
        values(run_ranks(resumed_in_each_way, after, tmp_path, after, path, str(tmp_path)))
    ):
        for name, (rows, val, epoch, step, said) in found.items():
            assert rows == {1: whole[1], 2: whole[2]}
            if Version(lightning.__version__) >= Version("2.5"):
                # Before, the first validation after a resume stops where that of the saved run had been.
                assert val == sorted(val[: len(val) // 2]) * 2
            assert epoch == EPOCHS
            assert step == steps + 2 * (name != "end") + 2 * steps_now
            assert len(said) == (rank == 0 and name != "end")
            assert all(
                f"epoch 1 starts over: the position was saved in the middle of epoch 1 by {before}" in s for s in said
            )


# Failing together ------------------------------------------------------------------------------------------------


def fails(rank, paths, options):
    """The errors of one try after the other, and whether rows were loaded."""
    datamodule = module(paths[rank], val_path=None, **options)
    found = []
    for _ in range(2):
        error = error_of(lambda: ddp(2).fit(Judge(), datamodule=datamodule))
        found.append((error, datamodule._datasets["train"].is_loaded))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_chunk_of_one_rank_stops_all_with_the_same_words(tmp_path, mode):
    path = write(tmp_path, 24)
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(7)
    edit(path, chunk.byte_offset, b"\0" * chunk.size)
    ranks = values(run_ranks(fails, 2, tmp_path, [path, path], {"mode": mode}))
    assert [error for error, _ in ranks[0]] == [error for error, _ in ranks[1]]
    for error, is_loaded in ranks[0] + ranks[1]:
        assert re.match(r"H5CorruptError: loading shards failed on 1 of 2 ranks:\n  rank [01]: H5CorruptError", error)
        assert path in error
        assert not is_loaded


def changes_while_it_loads(rank, paths):
    if rank == 1:
        do = bulk.do_tasks
        bulk.do_tasks = lambda *arguments: (do(*arguments), os.utime(paths[1], (1, 1)))
    return fails(rank, paths, {})[:1]


@pytest.mark.wide
def test_a_copy_that_changes_while_one_rank_loads_it_stops_all_with_the_same_words(tmp_path):
    path = write(tmp_path, 24)
    paths = [path, shutil.copy(path, tmp_path / "copy.h5")]
    outcomes = run_ranks(changes_while_it_loads, 2, tmp_path, paths)
    ((first, _),), ((second, _),) = values(outcomes)
    assert first == second
    assert "rank 1: H5DataChangedError" in first


def gives_room_at_its_leisure(rank, path, folder):
    """As if memory were short until both ranks gave up what they hold of the fit; one of them takes its time."""
    datamodule, trainer, model = module(path, val_path=None), ddp(2, max_epochs=1), Judge()
    trainer.fit(model, datamodule=datamodule)
    close = RankMemCachedH5Dataset.close

    def close_slowly(dataset):
        if dataset.is_loaded:
            time.sleep(rank)
            close(dataset)
            (Path(folder) / f"given back by {rank}").touch()

    RankMemCachedH5Dataset.close = close_slowly
    shard_loading.available_memory = lambda: AvailableMemory(
        shard_loading.HEADROOM * len([*Path(folder).glob("given back *")]), "the machine's memory"
    )
    return error_of(lambda: trainer.test(model, datamodule=datamodule)), model.rows["test"]


@pytest.mark.wide
def test_a_rank_waits_until_all_have_given_back_what_they_can_spare(tmp_path):
    """The room that is looked for is that of the machine."""
    ranks = values(run_ranks(gives_room_at_its_leisure, 2, tmp_path, write(tmp_path, 12), str(tmp_path)))
    assert ranks == [(None, [*range(6)]), (None, [*range(6, 12)])]


def slowly(rank, path, seconds):
    """Rank 1 takes so long over each of its tasks."""
    shard_loading.HEARTBEAT, bulk.TASK_BYTES = 0.1, 1  # a task for each chunk
    if rank == 1:
        do = bulk.do_tasks
        bulk.do_tasks = lambda tasks, *others: do(
            [task._replace(run=partial(late, task, seconds)) for task in tasks], *others
        )
    model = Judge()
    datamodule = module(path, val_path=None, distributed={"setup_timeout": 5})
    ddp(2, max_epochs=1).fit(model, datamodule=datamodule)
    return model.train_rows[0]


def late(task, seconds):
    time.sleep(seconds)
    task.run()


@pytest.mark.wide
def test_a_rank_that_loads_slowly_is_waited_for(tmp_path):
    """All in all longer than ``setup_timeout``, which is for a rank that makes no progress."""
    ranks = values(run_ranks(slowly, 2, tmp_path, write(tmp_path, 24), 0.5))
    assert sorted(ranks[0] + ranks[1]) == [*range(24)]


@pytest.mark.wide
def test_a_rank_that_hangs_while_it_loads_is_named_and_ends_too(tmp_path):
    outcomes = run_ranks(slowly, 2, tmp_path, write(tmp_path, 24), 1000)
    told = "loading shards did not finish on rank 1 of 2 ranks within 5 s"
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    assert all(told in outcome.output for outcome in outcomes)


# Nothing is left -------------------------------------------------------------------------------------------------


class Dies(Callback):
    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_end(self, trainer, *_):
        if trainer.current_epoch == 1 and trainer.global_rank == self.rank:
            die()


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def dies(rank, dying, where, path, folder):
    """One rank is killed; the other looks what is left of it, and of itself, once it has come to know."""
    (Path(folder) / f"{rank}.pid").write_text(str(os.getpid()))
    if where == "loading" and rank == dying:
        bulk.do_tasks = lambda tasks, *others: (tasks[0].run(), die())
    options = {"mode": "interleave", "share_memory": True, "num_workers": 2, "setup_timeout": 2}
    datamodule, model = module(path, **options), Judge()
    error = error_of(lambda: ddp(2, max_epochs=1000, callbacks=[Dies(dying)]).fit(model, datamodule=datamodule))
    pids = [int((Path(folder) / f"{other}.pid").read_text()) for other in range(2)]
    end = time.monotonic() + HANG
    while time.monotonic() < end and (left := [*what_is_left(pids)]):
        time.sleep(0.1)
    return error, left


def what_is_left(sessions):
    """Processes of some sessions but for this one, their files in /dev/shm, and shared memory that they have."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pid, fields = int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) not in sessions or fields[0] == "Z":
                continue
            if pid != os.getpid():
                yield f"process {pid}: {(folder / 'cmdline').read_text()}"
            yield from (line for line in (folder / "maps").read_text().splitlines() if "memfd:lightning_h5" in line)
            opened = [os.readlink(one) for one in (folder / "fd").iterdir()]
            yield from (name for name in opened if "memfd:lightning_h5" in name)
        except (OSError, ValueError):
            continue
    for name in os.listdir("/dev/shm"):
        if "lightning" in name or any(f"_{pid}_" in name for pid in sessions):
            yield name


@pytest.mark.parametrize(
    ("where", "dying"),
    [("loading", 0), ("loading", 1), ("training", 1), pytest.param("training", 0, marks=pytest.mark.slow)],
)
def test_of_ranks_that_share_memory_nothing_is_left_where_one_is_killed(tmp_path, where, dying):
    outcomes = run_ranks(dies, 2, tmp_path, dying, where, write(tmp_path, 24), str(tmp_path), patience=40)
    assert outcomes[dying].exitcode == -signal.SIGKILL
    other = outcomes[1 - dying]
    if other.exitcode == 1:  # on a busy machine, what watches the other ranks ends it before a call of torch returns
        assert "the other ranks ended while" in other.output
    else:
        ((error, left),) = values([other])
        assert error is not None
        assert left == []
    assert [*what_is_left([int((tmp_path / f"{rank}.pid").read_text()) for rank in range(2)])] == []
