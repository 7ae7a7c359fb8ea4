"""Where Lightning and a loader of one's own go wrong together, and in silence: each trap, and that this package is out.

Every test runs twice: on what people write (``plain.py``), where it must fail, and on ``LazyH5DataModule``.
"""

import builtins
import json
import os
import pickle
import random
import sys
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import h5py
import lightning
import numpy as np
import plain
import pytest
import torch
from arguments import nested
from factories import H5Factory
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_models import Recorder, index_of, quiet_trainer
from packaging.version import Version
from processes import run_program, run_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchmetrics.classification import BinaryAccuracy

from lightning_h5 import LazyH5DataModule

ROWS, BATCH, STEPS, EPOCHS = 24, 4, 6, 3
ALL_ROWS = list(range(ROWS))
BEFORE_2_5, BEFORE_2_5_3 = (Version(lightning.__version__) < Version(version) for version in ("2.5", "2.5.3"))
WARNS = pytest.mark.filterwarnings("ignore")  # Lightning warns of some traps, and warnings are errors here


def trap(reason, kind="plain", *values, raises=AssertionError, more=()):
    """Parameters of which the first is a kind that must fail, and how."""
    fails = pytest.mark.xfail(strict=True, reason=reason, raises=raises)
    return pytest.param(kind, *values, marks=[fails, WARNS, *more])


PLAIN = {
    "plain": plain.PlainDataModule,
    "plain subset": plain.SubsetPerRank,
    "plain sampler": plain.SamplerPerRank,
    "plain distributed": plain.WithDistributedSampler,
    "plain batch sampler": plain.WithBatchSampler,
    "plain whole batches": plain.ReadsWholeBatches,
    "plain open": plain.OpensAtOnce,
    "plain epochs": plain.WithEpochs,
    "plain files": plain.FilePerRank,
    "plain arguments": plain.KeepsItsArguments,
}


def data(kind, file, **options):
    """A data module of a kind over one file; its batches are x, y and the rows' indices."""
    options = {"batch_size": BATCH} | options
    if kind in PLAIN:
        return PLAIN[kind](file, **options)
    return LazyH5DataModule(file, file, file, file, **nested(x_key="x", y_key="y", with_index=True, **options))


@pytest.fixture
def file(make_h5):
    return numbered(make_h5, ROWS)


def numbered(make_h5, n_rows):
    return make_h5({"x": np.arange(n_rows, dtype="f4"), "y": np.arange(n_rows)})


class Seen(Recorder):
    """Keeps the rows of each batch apart, by stage; takes a row alone for a batch of one."""

    def __init__(self, fail_at=None):
        super().__init__(fail_at)
        self.batches = {}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        batch = [torch.atleast_1d(part) for part in batch]
        self.batches.setdefault(self.trainer.state.stage.value, []).append(index_of(batch))
        return batch


class RankError(Exception):
    """A rank ended badly, in no error that Python has a name for."""


def ranks(n, folder, target, *arguments):
    """What the ranks give; the error of one that failed, as it was there."""
    outcomes = run_ranks(target, n, folder, *arguments)
    failed = [outcome for outcome in outcomes if outcome.exitcode != 0]
    if failed:
        first = min(failed, key=lambda outcome: "gloo" in (outcome.error or ""))  # not of one that lost its peer
        raise as_it_was(first.error or f"RankError: ended with {first.exitcode}", first.output)
    return [outcome.value for outcome in outcomes]


def as_it_was(told, output):
    name, _, text = told.partition(": ")
    kind = getattr(builtins, name, None)
    error = RankError(told) if kind is None else kind(text)
    error.add_note(output[-4000:])
    return error


def flat(lists):
    return list(chain.from_iterable(lists))


# Shards ------------------------------------------------------------------------------------------------------

STAGES = {"fit": "train", "validate": "validate", "test": "test", "predict": "predict"}
TWICE = "Lightning shards once more what is sharded by hand, pytorch-lightning#21447"


def batches_of_stages(rank, kind, file):
    model, seen = Seen(), {}
    trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=1)
    for stage in STAGES:
        getattr(trainer, stage)(model, datamodule=data(kind, file))
        seen[stage], model.batches = model.batches[STAGES[stage]], {}
    return seen


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """The batches of each rank, by stage; for each kind one run."""
    folder = tmp_path_factory.mktemp("stages")
    file = numbered(H5Factory(folder), ROWS)
    return cache(lambda kind: ranks(2, folder, batches_of_stages, kind, file))


@pytest.mark.wide
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [trap(TWICE, "plain subset"), trap(TWICE, "plain sampler"), "ours"])
def test_two_ranks_see_each_row_once(on_two_ranks, kind, stage):
    assert sorted(flat(flat(batches[stage] for batches in on_two_ranks(kind)))) == ALL_ROWS


NOT_SHARDED = "without a Trainer at hand the sampler takes itself for the only replica, and Lightning leaves it alone"


def batches_of_loader(rank, kind, file, stage):
    module, model = data(kind, file), Seen()
    module.setup(stage)
    loader = module.train_dataloader() if stage == "fit" else module.val_dataloader()
    getattr(quiet_trainer(devices=2, strategy="ddp", max_epochs=1), stage)(model, loader)
    return model.batches[STAGES[stage]]


@pytest.mark.wide
@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("kind", [trap(NOT_SHARDED, "plain distributed"), "ours"])
def test_two_ranks_see_each_row_once_from_a_loader_without_its_data_module(tmp_path, file, kind, stage):
    seen = ranks(2, tmp_path, batches_of_loader, kind, file, stage)
    assert sorted(flat(flat(seen))) == ALL_ROWS


SIZE_ONE = "Lightning makes a batch sampler over a DistributedSampler anew, with a batch size of 1"


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        *(trap(SIZE_ONE, "plain batch sampler", stage) for stage in ("fit", "validate", "test")),
        ("plain batch sampler", "predict"),
        *(("ours", stage) for stage in STAGES),
    ],
)
def test_batches_of_two_ranks_have_the_size_asked_for(on_two_ranks, kind, stage):
    for batches in on_two_ranks(kind):
        assert [len(rows) for rows in batches[stage]] == [BATCH] * 3


ROW_ALONE = "overfit_batches puts a sampler of rows in the place of one of batches"


@pytest.mark.parametrize("kind", [trap(ROW_ALONE, "plain whole batches"), "ours"])
def test_overfitting_sees_the_same_whole_batches_each_epoch(file, kind):
    model = Seen()
    quiet_trainer(overfit_batches=2).fit(model, datamodule=data(kind, file))
    first, second = model.batches["train"][:2], model.batches["train"][2:]
    assert [len(rows) for rows in first] == [BATCH] * 2
    assert first == second


LENGTHS = "ranks that take unequally many steps average gradients of different steps, pytorch-lightning#3325"


def steps_of_unequal_ranks(rank, kind, files):
    trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=3, use_distributed_sampler=kind == "ours")
    module = data(kind, files if kind == "plain files" else files[rank])
    try:
        trainer.fit(Recorder(), datamodule=module)
    except (RuntimeError, ValueError) as error:
        return trainer.global_step, str(error)
    return trainer.global_step, ""


@pytest.mark.wide
@pytest.mark.parametrize("kind", [trap(LENGTHS, "plain files"), "ours"])
def test_ranks_of_unequal_lengths_stop_before_the_first_step(tmp_path, make_h5, kind):
    files = [numbered(make_h5, n_rows) for n_rows in (3 * BATCH, 4 * BATCH)]
    steps, errors = zip(*ranks(2, tmp_path, steps_of_unequal_ranks, kind, files), strict=True)
    assert steps == (0, 0)
    assert all("rank 0 has 12, rank 1 has 16" in error for error in errors)


MESH = "trainer.global_rank is not the data-parallel rank"


class Meshed(Seen):
    """Cut over tensor-parallel peers, and over replicas where there are any."""

    def configure_model(self):
        self.layer = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
        cuts = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(self.layer, self.device_mesh["tensor_parallel"], cuts)
        if self.device_mesh["data_parallel"].size() > 1:
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


def rows_on_a_mesh(rank, kind, file, replicas, peers):
    model = Meshed()
    strategy = ModelParallelStrategy(data_parallel_size=replicas, tensor_parallel_size=peers)
    trainer = quiet_trainer(devices=replicas * peers, strategy=strategy, max_epochs=1)
    trainer.fit(model, datamodule=data(kind, file))
    return {stage: flat(model.batches[stage]) for stage in ("train", "validate")}


@pytest.mark.wide
@pytest.mark.parametrize(("replicas", "peers"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("kind", [trap(MESH, "plain distributed"), "ours"])
def test_tensor_parallel_peers_share_rows_that_replicas_do_not(tmp_path, file, kind, replicas, peers):
    seen = ranks(replicas * peers, tmp_path, rows_on_a_mesh, kind, file, replicas, peers)
    assert seen == [seen[rank - rank % peers] for rank in range(len(seen))]
    for stage in seen[0]:
        assert sorted(flat(rank[stage] for rank in seen[::peers])) == ALL_ROWS


# Evaluation --------------------------------------------------------------------------------------------------

PADDED = "the sampler that Lightning puts in repeats rows until all ranks have as many, pytorch-lightning#7929"


class Judge(LightningModule):
    def __init__(self):
        super().__init__()
        self.accuracy = BinaryAccuracy()
        self.layer = torch.nn.Linear(1, 1)

    def test_step(self, batch, batch_idx):
        self.accuracy(batch[0], batch[1])
        self.log("accuracy", self.accuracy)

    validation_step = test_step


def accuracies(rank, kind, file):
    trainer = quiet_trainer(devices=2, strategy="ddp")
    stages = (trainer.validate, trainer.test)
    return [stage(Judge(), datamodule=data(kind, file), verbose=False)[0]["accuracy"] for stage in stages]


@pytest.mark.wide
@pytest.mark.parametrize("n_rows", [5, 7, 101])
@pytest.mark.parametrize("kind", [trap(PADDED), "ours"])
def test_accuracy_over_two_ranks_counts_each_row_once(tmp_path, make_h5, kind, n_rows):
    y = np.ones(n_rows, dtype="i8")
    file = make_h5({"x": (np.arange(n_rows) == 0).astype("f4"), "y": y})
    found = ranks(2, tmp_path, accuracies, kind, file)
    assert np.array(found) == pytest.approx(1 / n_rows)


EMPTY_RANK = "the sampler that Lightning puts in asserts that each rank has a row"


@pytest.mark.parametrize("kind", [trap(EMPTY_RANK), "ours"])
def test_one_row_is_predicted_by_two_ranks(tmp_path, make_h5, kind):
    seen = ranks(2, tmp_path, rows_predicted, kind, numbered(make_h5, 1))
    assert flat(seen) == [0]


def rows_predicted(rank, kind, file):
    model = Recorder()
    quiet_trainer(devices=2, strategy="ddp").predict(model, datamodule=data(kind, file))
    return model.rows["predict"]


# Epochs and worker processes ---------------------------------------------------------------------------------

FIRST_EPOCH = "persistent workers keep the dataset of the first epoch, pytorch-lightning#20407"


@pytest.mark.parametrize("kind", [trap(FIRST_EPOCH, "plain epochs"), "ours"])
def test_each_epoch_has_its_order_in_persistent_workers(file, kind):
    model = Recorder()
    module = data(kind, file, num_workers=2, persistent_workers=True)
    quiet_trainer(max_epochs=EPOCHS, limit_val_batches=0).fit(model, datamodule=module)
    assert len({tuple(rows) for rows in model.train_rows.values()}) == EPOCHS


RELOADED = "Lightning makes the iterator of a reloaded loader twice, pytorch-lightning#20812"


def leave_a_trace(folder, worker_id):
    (folder / str(os.getpid())).touch()


@pytest.mark.wide
@pytest.mark.parametrize("kind", [trap(RELOADED), "ours"])
def test_reloading_each_epoch_starts_workers_once_an_epoch(tmp_path, file, kind):
    traces = tmp_path / "workers"
    traces.mkdir()
    module = data(kind, file, num_workers=2, worker_init_fn=partial(leave_a_trace, traces))
    trainer = quiet_trainer(max_epochs=EPOCHS, reload_dataloaders_every_n_epochs=1, limit_val_batches=0)
    trainer.fit(Recorder(), datamodule=module)
    assert len(list(traces.iterdir())) == 2 * EPOCHS


SAME_DRAWS = "Lightning seeds workers by rank only where they have no worker_init_fn"


class Echo(LightningModule):
    def predict_step(self, batch, batch_idx):
        return batch[0]


def draw(x):
    return torch.tensor([random.random(), np.random.random(), torch.rand(())], dtype=torch.float64)  # noqa: NPY002


def nothing(worker_id):
    pass


def draws_of_workers(rank, kind, file):
    seed_everything(7, workers=True)
    options = {"num_workers": 2, "worker_init_fn": nothing, "multiprocessing_context": "fork"}
    module = data(kind, file, transform=draw, **options)
    drawn = quiet_trainer(devices=2, strategy="ddp").predict(Echo(), datamodule=module)
    return torch.cat(drawn).T.tolist()


@pytest.mark.parametrize("kind", [trap(SAME_DRAWS), "ours"])
def test_no_two_ranks_or_workers_draw_the_same(tmp_path, file, kind):
    for drawn in zip(*ranks(2, tmp_path, draws_of_workers, kind, file), strict=True):
        assert len(set(flat(drawn))) == ROWS


OPEN_FILE = "an open h5py file does not pickle"


@pytest.mark.parametrize(
    ("kind", "reads_first"),
    [
        ("plain", False),
        trap(OPEN_FILE, "plain", True, raises=TypeError),
        trap(OPEN_FILE, "plain open", False, raises=TypeError),
        trap(OPEN_FILE, "plain open", True, raises=TypeError),
        ("ours", False),
        ("ours", True),
    ],
)
def test_workers_that_start_afresh_read_before_and_after_this_process_did(file, kind, reads_first):
    module = data(kind, file, num_workers=1, multiprocessing_context="forkserver")
    module.setup("fit")
    loader = module.train_dataloader()
    if reads_first:
        assert loader.dataset[3][1] == 3
    assert sorted(flat(index_of(batch) for batch in loader)) == ALL_ROWS


# Resume ------------------------------------------------------------------------------------------------------

LOST_PLACE = "Lightning begins the epoch anew and stops early, pytorch-lightning#18780"
EPOCH_0 = "the first epoch after a resume has the order of epoch 0, pytorch-lightning#21938"


class SavesIn(Callback):
    """Saves a checkpoint in a hook."""

    def __init__(self, hook, path):
        setattr(self, hook, lambda trainer, *_: trainer.save_checkpoint(path))


class Way(NamedTuple):
    """How a run breaks off: where its step fails, in which hook it has saved, and options of trainers."""

    fails_at: tuple[int, int] | None
    hook: str
    options: dict = {}  # noqa: RUF012  # nobody writes to it
    ends: dict = {}  # noqa: RUF012  # of the trainer that breaks off, alone


WAYS = {
    "batch end": Way((1, 2), "on_train_batch_end"),
    "exception": Way((1, 2), "on_exception"),
    "validation end": Way((1, 2), "on_validation_end", {"val_check_interval": 2, "limit_val_batches": 1}),
    "epoch end": Way((1, 0), "on_train_epoch_end"),
    "max_steps": Way(None, "on_train_end", ends={"max_epochs": -1, "max_steps": STEPS + 2}),
}
WORKERS = {
    "no workers": {},
    "workers": {"num_workers": 2, "persistent_workers": False},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


class OneCycle(Recorder):
    """Asks for the number of steps before Lightning has restored anything, as OneCycleLR needs it."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = max(int(self.trainer.estimated_stepping_batches), EPOCHS * STEPS)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


MODELS = {"no schedule": Recorder, "OneCycleLR": OneCycle}


def train(model, module, saved=None, **options):
    """Trains until the end, or until the step that is to fail; gives the rows of each epoch."""
    options = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "limit_val_batches": 0} | options
    try:
        quiet_trainer(**options).fit(model, datamodule=module, ckpt_path=saved)
    except RuntimeError as error:
        if model.fail_at is None or str(error) != "stop here":
            raise
    return model.train_rows


def together(*runs):
    return {epoch: flat(run.get(epoch, []) for run in runs) for epoch in sorted(set().union(*runs))}


def resumes():
    """The trap itself is one of Lightning's loops, whatever the workers: with these it is slow."""
    for way, workers, schedule in product(WAYS, WORKERS, MODELS):
        is_long = (workers, schedule) == ("workers", "OneCycleLR")
        yield pytest.param("ours", way, workers, schedule, marks=[pytest.mark.slow] * is_long)
        slow = [pytest.mark.slow] * (workers != "no workers")
        if way == "epoch end" and (workers == "no workers" or BEFORE_2_5_3):
            yield pytest.param("plain distributed", way, workers, schedule, marks=[WARNS, *slow])
        else:
            reason = EPOCH_0 if way == "epoch end" else LOST_PLACE
            one_step_more = (way, schedule) == ("batch end", "OneCycleLR") and BEFORE_2_5
            raises = ValueError if one_step_more else AssertionError
            yield trap(reason, "plain distributed", way, workers, schedule, raises=raises, more=slow)


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "way", "workers", "schedule"), [*resumes()])
def test_a_run_goes_on_with_the_rest_of_its_epoch(tmp_path, file, kind, way, workers, schedule):
    saved, way, model = tmp_path / "saved.ckpt", WAYS[way], MODELS[schedule]
    module = partial(data, kind, file, **WORKERS[workers])
    before = train(model(way.fails_at), module(), callbacks=[SavesIn(way.hook, saved)], **way.options | way.ends)
    after = train(model(), module(), saved, **way.options)
    assert together(before, after) == train(Recorder(), data(kind, file))


@pytest.mark.parametrize("kind", [trap(LOST_PLACE, "plain distributed"), "ours"])
def test_a_run_that_broke_off_twice_in_an_epoch_goes_on_with_its_rest(tmp_path, file, kind):
    runs, saved = [], None
    for stop in ((1, 2), (1, 4), None):
        keep = SavesIn("on_exception", tmp_path / f"{stop}.ckpt")
        runs.append(train(Recorder(stop), data(kind, file), saved, callbacks=[keep]))
        saved = tmp_path / f"{stop}.ckpt"
    assert together(*runs) == train(Recorder(), data(kind, file))


def part_of_a_run(rank, kind, file, devices, stop, saved):
    options = {"devices": devices, "strategy": "ddp"}
    if stop is None:
        return train(Recorder(), data(kind, file), saved, **options)
    return train(Recorder(stop), data(kind, file), callbacks=[SavesIn("on_train_batch_end", saved)], **options)


@pytest.mark.wide
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", [trap(LOST_PLACE, "plain distributed"), "ours"])
def test_a_run_goes_on_on_another_number_of_ranks(tmp_path, file, kind, before, after):
    saved = str(tmp_path / "saved.ckpt")
    parts = ranks(before, tmp_path, part_of_a_run, kind, file, before, (1, 2), saved)
    parts += ranks(after, tmp_path, part_of_a_run, kind, file, after, None, saved)
    seen = together(*parts)
    assert {epoch: sorted(rows) for epoch, rows in seen.items()} == dict.fromkeys(range(EPOCHS), ALL_ROWS)


# What a data module leaves behind ----------------------------------------------------------------------------

LEFT_OPEN = "Lightning does not call teardown after an exception, pytorch-lightning#19594"


@pytest.mark.parametrize("kind", [trap(LEFT_OPEN, raises=OSError), "ours"])
def test_an_exception_closes_the_file(file, kind):
    module = data(kind, file)
    train(Recorder((0, 2)), module)
    with h5py.File(file, "r+") as opened:
        assert opened["x"].shape == (ROWS,)


UNSAFE = "a checkpoint holds the data module's arguments, and torch loads plain values alone, pytorch-lightning#21757"


def with_argument(kind, file, argument):
    """A data module with an argument that is no plain value."""
    path = Path(file) if argument == "path" else file
    fraction = np.float64(0.25) if argument == "fraction" else 0.25
    dtype = np.dtype("float64") if argument == "dtype" else "float64"
    if kind == "ours":
        return LazyH5DataModule(path, x_key="x", y_key="y", x_dtype=dtype, split=fraction, with_index=True)
    return PLAIN[kind](path, fraction, dtype)


@pytest.mark.parametrize("argument", ["path", "fraction", "dtype"])
@pytest.mark.parametrize("kind", [trap(UNSAFE, "plain arguments", raises=pickle.UnpicklingError), "ours"])
def test_a_checkpoint_loads_as_weights_only(tmp_path, file, kind, argument):
    saved = tmp_path / "saved.ckpt"
    train(Recorder(), with_argument(kind, file, argument), max_epochs=1, callbacks=[SavesIn("on_train_end", saved)])
    assert "state_dict" in torch.load(saved, weights_only=True)
    assert list(train(Recorder(), with_argument(kind, file, argument), saved, max_epochs=2)) == [1]


APPENDED = "setup runs for every fit, pytorch-lightning#9865"


@pytest.mark.parametrize("kind", [trap(APPENDED, "plain epochs"), "ours"])
def test_two_fits_add_callbacks_once(file, kind):
    module, trainer = data(kind, file), quiet_trainer(limit_val_batches=0)
    for _ in range(2):
        trainer.fit(Recorder(), datamodule=module)
    kinds = [type(callback).__name__ for callback in trainer.callbacks]
    assert sorted(kinds) == sorted(set(kinds))


# Command line, and the other package -------------------------------------------------------------------------

NO_DTYPE = "jsonargparse takes no name for a numpy dtype"


def command_line(config, *more):
    arguments = ["fit", "--config", str(config), *more]
    modes = {"subclass_mode_model": True, "subclass_mode_data": True, "save_config_callback": None}
    return LightningCLI(LightningModule, LightningDataModule, args=arguments, **modes)


def config_of(kind, file):
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    ours = {"train_path": file, "x_key": "x", "y_key": "y", "x_dtype": "float64", "with_index": True}
    plain_arguments = {"path": file, "dtype": "float64"}
    return {
        "seed_everything": False,
        "trainer": {"max_epochs": 1, "limit_val_batches": 0, "enable_model_summary": False, **quiet},
        "model": {"class_path": "lightning_models.Recorder"},
        "data": {
            "class_path": "lightning_h5.LazyH5DataModule" if kind == "ours" else "plain.KeepsItsArguments",
            "init_args": ours if kind == "ours" else plain_arguments,
        },
    }


@pytest.mark.wide
@pytest.mark.parametrize("kind", [trap(NO_DTYPE, "plain arguments"), "ours"])
def test_what_the_command_line_prints_runs(tmp_path, capsys, file, kind):
    first, again = tmp_path / "first.yaml", tmp_path / "again.yaml"
    first.write_text(json.dumps(config_of(kind, file)))
    with pytest.raises(SystemExit) as ended:
        command_line(first, "--print_config")
    printed = capsys.readouterr()
    assert ended.value.code in (None, 0), printed.err
    again.write_text(printed.out)
    assert sorted(command_line(again).model.train_rows[0]) == ALL_ROWS


UNRELATED = "the two Lightning packages hold unrelated classes, pytorch-lightning#17485"
MAKES = {
    "plain": "plain.PlainDataModule({!r})",
    "ours": "lightning_h5.LazyH5DataModule(predict_path={!r}, x_key='x', with_index=True)",
}
PREDICTS = """
import HOME
from pytorch_lightning import LightningModule, Trainer

class Model(LightningModule):
    def predict_step(self, batch, batch_idx):
        return batch[-1]

options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
batches = Trainer(accelerator="cpu", **options).predict(Model(), datamodule=MODULE)
print([row for batch in batches for row in batch.tolist()])
"""


@pytest.mark.parametrize("kind", [trap(UNRELATED, raises=ValueError), "ours"])
def test_a_trainer_of_the_other_package_takes_the_data_module(tmp_path, file, kind):
    made = MAKES[kind].format(file)
    program = PREDICTS.replace("HOME", made.split(".")[0]).replace("MODULE", made)
    done = run_program(program, tmp_path / "logs", path=sys.path, LIGHTNING_H5_IMPORT="pytorch_lightning")
    if done.returncode:
        raise as_it_was(done.stderr.strip().splitlines()[-1], done.stderr)
    assert json.loads(done.stdout.splitlines()[-1]) == ALL_ROWS
