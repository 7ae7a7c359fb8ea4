"""``RankCachedH5DataModule`` in one process: the right rows out of memory, loaded once, given back when asked."""

import gc
import inspect
import json
import os
import pickle
import re
import warnings
import weakref
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from arguments import nested
from factories import Stored, assert_same_rows, edit, rows_by_h5py
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning_models import Recorder, index_of, quiet_trainer, together
from test_resume import at_each_batch, on_exception, rows_of_a_whole_run, stop_and_go_on
from tiers import examples

from lightning_h5 import H5ResumeError, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.cli import main
from lightning_h5.datasets import shard_loading
from lightning_h5.datasets.shard_loading import HEADROOM, AvailableMemory
from lightning_h5.errors import H5CorruptError, H5FileError
from lightning_h5.readers import bulk

ROWS, BATCH = 60, 8
ALL = list(range(ROWS))
STAGES = ("fit", "validate", "test", "predict")


@pytest.fixture
def file(make_h5):
    random = np.random.default_rng(0)
    x = Stored(random.normal(size=(ROWS, 2)).astype("f4"), "chunked", (7, 2), {"compression": "gzip", "shuffle": True})
    patients = Stored(np.array([f"p{row // 6}" for row in range(ROWS)], object), dtype=h5py.string_dtype())
    return make_h5(x=x, y=np.arange(ROWS), patient=patients, raw=random.integers(0, 256, (ROWS, 3), dtype="u1"))


@pytest.fixture
def loads(monkeypatch):
    """The bytes of each load, of one split at a time."""
    found = []

    def do_tasks(tasks, *arguments):
        found.append(sum(task.n_bytes for task in tasks))
        return do(tasks, *arguments)

    do = bulk.do_tasks
    monkeypatch.setattr(bulk, "do_tasks", do_tasks)
    return found


def module(file, kind=RankCachedH5DataModule, **options):
    """A data module with all splits from one file."""
    common = {"x_key": "x", "y_key": "y", "batch_size": BATCH, "with_index": True}
    paths = dict.fromkeys(("train_path", "val_path", "test_path", "predict_path"), file)
    if any(name.endswith("_fraction") or name == "num_folds" for name in options):
        paths |= {"val_path": None, "test_path": None}
    return kind(**nested(**(paths | common | options)))


def lazy(file, **options):
    return module(file, LazyH5DataModule, **options)


class Witness(Recorder):
    """Keeps the batches, too."""

    def __init__(self, fail_at=None):
        super().__init__(fail_at)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.batches.append(batch)
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.batches.append(batch)
        super().test_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        self.batches.append(batch)
        return super().predict_step(batch, batch_idx)


def fit(datamodule, model=None, **options):
    model = Recorder() if model is None else model
    quiet_trainer(**({"num_sanity_val_steps": 0} | options)).fit(model, datamodule=datamodule)
    return model


def by_hand(datamodule, stage, epoch=0):
    """The batches of a stage without a Trainer."""
    datamodule.setup(stage)
    split = {"fit": "train", "validate": "val"}.get(stage, stage)
    loader = getattr(datamodule, f"{split}_dataloader")()
    loader.sampler.set_epoch(epoch)
    return list(loader)


def rows_of(batches):
    return [row for batch in batches for row in index_of(batch)]


def is_held(datamodule):
    """The splits whose rows are in memory."""
    return {split for split, dataset in datamodule._datasets.items() if dataset.is_loaded}


# Rows ------------------------------------------------------------------------------------------------------------

KINDS = {
    "plain": {},
    "interleaved": {"mode": "interleave"},
    "shared": {"share_memory": True},
    "with workers": {"num_workers": 2},
    "interleaved, shared, with workers": {"mode": "interleave", "share_memory": True, "num_workers": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_four_stages_give_the_rows_of_h5py_each_once(file, kind):
    datamodule, model, trainer = module(file, **KINDS[kind]), Witness(), quiet_trainer(num_sanity_val_steps=0)
    for stage in STAGES:
        getattr(trainer, stage)(model, datamodule=datamodule)
    assert [sorted(rows) for rows in model.train_rows.values()] == [ALL] * 2
    assert model.rows == {"val": ALL * 3, "test": ALL, "predict": ALL}
    for x, y, index in model.batches:
        assert_same_rows(x.numpy(), rows_by_h5py(file, "x", index))
        assert_same_rows(y.numpy(), rows_by_h5py(file, "y", index))


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides(file, num_workers):
    runs = [fit(module(file, seed=seed, num_workers=num_workers), max_epochs=3).train_rows for seed in (1, 1, 2)]
    orders = [tuple(run[epoch]) for run in (runs[0], runs[2]) for epoch in range(3)]
    assert runs[0] == runs[1]
    assert len({*orders, tuple(ALL)}) == 7


def test_the_global_seed_is_taken(file, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    first = rows_of(by_hand(module(file), "fit"))
    assert first == rows_of(by_hand(module(file, seed=11), "fit"))
    assert first != rows_of(by_hand(module(file, seed=12), "fit"))


WITHOUT_EFFECT = {
    "chunks": {"shuffle": "chunks"},
    "global": {"shuffle": "global"},
    "streams": {"streams": 4},
    "bytes": {"shuffle_bytes": "1 KiB", "cache_bytes": "1 KiB"},
    "interleave": {"mode": "interleave"},
    "shared": {"share_memory": True},
    "mmap": {"mmap": True},
    "pins": {"pin_host_memory": False},
    "prefetch_factor": {"prefetch_factor": 3},
    "timeout": {"num_workers": 1, "timeout": 60.0},
    "workers": {"num_workers": 2},
}


@pytest.mark.wide
@pytest.mark.parametrize("option", WITHOUT_EFFECT)
def test_the_order_of_one_process_follows_from_the_seed_alone(file, option):
    assert fit(module(file, **WITHOUT_EFFECT[option])).train_rows == fit(module(file)).train_rows


def test_without_shuffling_rows_keep_the_storage_order(file):
    assert fit(module(file, shuffle=False)).train_rows == {0: ALL, 1: ALL}


def test_batches_are_even_and_drop_last_drops_the_ragged_end(file):
    assert [len(y) for _, y, _ in by_hand(module(file), "fit")] == [8] * 6 + [6, 6]
    assert [len(y) for _, y, _ in by_hand(module(file, drop_last=True), "fit")] == [8] * 7
    assert [len(y) for _, y, _ in by_hand(module(file, eval_batch_size=25), "validate")] == [25, 18, 17]


def test_it_takes_every_argument_of_the_lazy_one_with_the_same_default():
    lazy, cached = (dict(inspect.signature(kind).parameters) for kind in (LazyH5DataModule, RankCachedH5DataModule))
    assert {name: str(cached[name]) for name in lazy} == {name: str(parameter) for name, parameter in lazy.items()}
    assert [*lazy] == [name for name in cached if name in lazy]


def test_several_inputs_are_a_tuple_and_a_mapping_is_a_dict(file):
    (x, raw), y, _ = by_hand(module(file, x_key=["x", "raw"], shuffle=False), "fit")[0]
    assert_same_rows(x.numpy(), rows_by_h5py(file, "x", range(8)))
    assert_same_rows(raw.numpy(), rows_by_h5py(file, "raw", range(8)))
    batch = by_hand(module(file, x_key={"signal": "x", "who": "patient"}, y_key=None), "fit")[0]
    assert set(batch) == {"signal", "who", "index"}
    assert batch["who"] == [f"p{row // 6}" for row in batch["index"].tolist()]
    assert y.tolist() == list(range(8))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_target_may_be_text(file, num_workers):
    for _, who, index in by_hand(module(file, y_key="patient", num_workers=num_workers), "fit"):
        assert who == [f"p{row // 6}" for row in index.tolist()]


def test_rows_are_held_in_the_dtype_that_was_asked_for_and_else_in_the_files(file):
    assert by_hand(module(file, x_key="raw"), "fit")[0][0].dtype == torch.uint8
    datamodule = module(file, x_key="raw", x_dtype="float16", y_dtype="int32")
    for x, y, index in by_hand(datamodule, "fit"):
        assert_same_rows(x.numpy(), rows_by_h5py(file, "raw", index).astype("f2"))
        assert_same_rows(y.numpy(), index.numpy().astype("i4"))
    assert datamodule._datasets["train"].cost.row_bytes == 3 * 2 + 4


CUTS = {
    "by fraction": {"val_fraction": 0.2, "test_fraction": 0.1},
    "by another seed": {"val_fraction": 0.2, "test_fraction": 0.1, "split_seed": 3},
    "by group": {"val_fraction": 0.3, "test_fraction": 0.2, "group_key": "patient"},
    "by fold": {"num_folds": 3, "fold": 1, "test_fraction": 0.1, "group_key": "patient"},
}


@pytest.mark.parametrize("cut", CUTS)
def test_splits_hold_the_rows_of_the_lazy_one_and_the_index_counts_in_the_split(file, cut):
    held = {}
    for stage in ("fit", "validate", "test"):
        batches = by_hand(module(file, **CUTS[cut]), stage)
        rows = {i: y for _, ys, index in batches for i, y in zip(index.tolist(), ys.tolist(), strict=True)}
        others = by_hand(lazy(file, **CUTS[cut]), stage)
        assert rows == {i: y for _, ys, index in others for i, y in zip(index.tolist(), ys.tolist(), strict=True)}
        assert sorted(rows) == list(range(len(rows)))
        for x, y, _ in batches:
            assert_same_rows(x.numpy(), rows_by_h5py(file, "x", y))
        held[stage] = rows.values()
    assert sorted(row for rows in held.values() for row in rows) == ALL


def test_splits_by_the_key_and_by_files(make_h5, tmp_path):
    arrays = {f"{split}/x": np.full((n, 1), n, "f4") for split, n in (("train", 9), ("val", 4), ("test", 3))}
    datamodule = RankCachedH5DataModule(make_h5(arrays), x_key="{split}/x")
    assert [torch.cat(by_hand(datamodule, stage)).flatten().tolist() for stage in ("fit", "validate", "test")] == [
        [9] * 9,
        [4] * 4,
        [3] * 3,
    ]
    for name, rows in (("a", [0, 1, 2]), ("b", [3, 4]), ("val", [5])):
        make_h5({"x": np.array(rows)}, name=f"{name}.h5")
    datamodule = RankCachedH5DataModule(str(tmp_path / "[ab].h5"), tmp_path / "val.h5", shuffle=False)
    assert torch.cat(by_hand(datamodule, "fit")).tolist() == [0, 1, 2, 3, 4]
    assert torch.cat(by_hand(datamodule, "validate")).tolist() == [5]


def test_predictions_go_back_to_their_rows_by_the_index_and_need_no_target(file, make_h5):
    other = make_h5({"x": np.arange(10, dtype="f4").reshape(5, 2)}, name="new.h5")
    model = Recorder()
    quiet_trainer().predict(model, datamodule=module(file, predict_path=other))
    assert model.rows["predict"] == [0, 1, 2, 3, 4]


class SpoilsBatches(Witness):
    def training_step(self, batch, batch_idx):
        loss = super().training_step([part.clone() for part in batch], batch_idx)
        batch[0].fill_(float("nan"))
        return loss


def test_a_batch_that_is_changed_in_place_changes_no_row(file):
    model = fit(module(file), SpoilsBatches(), max_epochs=3)
    for x, _, index in model.batches:
        assert_same_rows(x.numpy(), rows_by_h5py(file, "x", index))


# Transforms ------------------------------------------------------------------------------------------------------


def jitter(x, rng):
    return x + rng.normal()


def turn(y, generator):
    return y + torch.randint(1000, (), generator=generator)


def noise(x):
    return x + torch.rand(()) + float(np.random.random())  # noqa: NPY002  # the global streams are the point


def with_ten(batch):
    return (batch[0] + 10, *batch[1:])


def minus(x):
    return -x


def draws_of(datamodule):
    """What each row became in each epoch."""
    return {
        epoch: {
            i: (x.tolist(), y)
            for xs, ys, index in by_hand(datamodule, "fit", epoch)
            for i, x, y in zip(index.tolist(), xs, ys.tolist(), strict=True)
        }
        for epoch in (0, 1)
    }


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"batch_size": 5}], ids=["plain", "workers", "batches"])
def test_draws_of_a_row_are_those_that_the_lazy_one_makes(file, options):
    transforms = {"transform": jitter, "target_transform": turn, "seed": 5}
    found = draws_of(module(file, **transforms, **options))
    assert found == draws_of(lazy(file, **transforms))
    assert not any(found[0][row] == found[1][row] for row in ALL)


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
def test_draws_from_the_global_streams_follow_from_the_seed(file, num_workers):
    options = {"transform": noise, "num_workers": num_workers}
    assert draws_of(module(file, **options)) == draws_of(module(file, transform=noise))
    assert draws_of(module(file, **options)) != draws_of(module(file, seed=1, **options))


def test_transforms_run_where_they_should(file):
    datamodule = module(file, transform=torch.zeros_like, eval_transform=minus, batch_transform=with_ten, shuffle=False)
    x = rows_by_h5py(file, "x", range(8))
    assert by_hand(datamodule, "fit")[0][0].tolist() == [[10, 10]] * 8
    for stage in STAGES[1:]:
        assert_same_rows(by_hand(datamodule, stage)[0][0].numpy(), 10 - x)


def as_lists(samples):
    return [y for _, y, _ in samples], torch.tensor([index for _, _, index in samples])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_fn_gets_the_samples(file, num_workers):
    model = fit(module(file, collate_fn=as_lists, num_workers=num_workers))
    assert model.train_rows == fit(module(file)).train_rows
    for y, index in by_hand(module(file, collate_fn=as_lists), "fit"):
        assert torch.stack(y).tolist() == index.tolist()


# Loaded once -----------------------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("same", [True, False], ids=["the same trainer", "a trainer each"])
def test_what_a_stage_has_loaded_no_later_one_loads_again(file, loads, same, num_workers):
    datamodule, shared = module(file, num_workers=num_workers), quiet_trainer()
    n_loads = []
    for stage in (*STAGES, "validate", "fit", "test", "predict"):
        trainer = shared if same else quiet_trainer()
        getattr(trainer, stage)(Recorder(), datamodule=datamodule)
        n_loads.append(len(loads))
    assert n_loads == [2, 2, 3, 4, 4, 4, 4, 4]
    assert loads == [ROWS * 16] * 4
    assert is_held(datamodule) == {"train", "val", "test", "predict"}


def test_a_second_fit_is_like_the_first(file, loads):
    datamodule = module(file)
    assert fit(datamodule).train_rows == fit(datamodule).train_rows == fit(module(file)).train_rows
    assert len(loads) == 4


def test_another_seed_loads_nothing_again(file, loads):
    """As in a loop over seeds: shards that are not drawn anew are the same."""
    datamodule, runs = module(file), []
    for seed in (1, 2):
        seed_everything(seed, verbose=False)
        runs.append(fit(datamodule).train_rows)
    assert runs[0] != runs[1]
    assert len(loads) == 2


def test_another_batch_size_loads_nothing_again(file, loads):
    datamodule = module(file)
    fit(datamodule)
    datamodule.batch_size = 5
    assert sorted(fit(datamodule).train_rows[1]) == ALL
    assert len(loads) == 2


def test_setup_loads_and_loaders_are_cheap(file, loads):
    datamodule = module(file)
    datamodule.setup(None)
    assert len(loads) == 4
    for split in ("train", "val", "test", "predict"):
        assert len(getattr(datamodule, f"{split}_dataloader")()) == 8
    datamodule.setup("fit")
    assert len(loads) == 4
    assert is_held(datamodule) == {"train", "val", "test", "predict"}


def test_only_what_a_stage_needs_is_loaded(file, loads):
    datamodule = module(file)
    quiet_trainer().validate(Recorder(), datamodule=datamodule)
    assert is_held(datamodule) == {"val"}
    fit(datamodule)
    assert is_held(datamodule) == {"train", "val"}
    assert len(loads) == 2


def test_loaders_that_are_made_anew_load_nothing(file, loads):
    assert fit(module(file), reload_dataloaders_every_n_epochs=1).train_rows == fit(module(file)).train_rows
    assert len(loads) == 4


@pytest.mark.parametrize("profiler", [SimpleProfiler, AdvancedProfiler])
def test_loading_is_in_the_trainers_profile(file, tmp_path, profiler):
    fit(module(file), profiler=profiler(dirpath=tmp_path, filename="profile"))
    (profile,) = tmp_path.glob("*profile.txt")
    assert "[RankCachedH5DataModule]load" in profile.read_text()


def test_no_file_is_read_after_setup(file):
    class TakeAway(Callback):
        def on_fit_start(self, trainer, pl_module):
            os.rename(file, f"{file}.away")

    whole = fit(module(file)).train_rows
    datamodule = module(file)
    assert fit(datamodule, callbacks=[TakeAway()]).train_rows == whole
    with pytest.raises(H5FileError, match="does not exist"):
        fit(datamodule)


def change_a_key(datamodule, path):
    datamodule.x_key = "raw"


def write_rows(datamodule, path):
    with h5py.File(path, "r+") as h5:
        h5["x"][5:9] = 7


def replace(datamodule, path):
    with h5py.File(f"{path}.new", "w") as h5:
        h5["x"], h5["y"] = np.zeros((50, 2), "f4"), np.arange(50)
    os.replace(f"{path}.new", path)


CHANGES = {"another key": change_a_key, "rows written": write_rows, "another file": replace}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_between_two_runs_is_loaded_anew(file, loads, change):
    datamodule = module(file)
    fit(datamodule)
    CHANGES[change](datamodule, file)
    model = fit(datamodule, Witness())
    assert len(loads) == 4
    for x, _, index in model.batches:
        assert_same_rows(x.numpy(), rows_by_h5py(file, datamodule.x_key, index))


def test_a_row_that_was_written_in_the_middle_of_a_large_file_is_loaded_anew(make_h5):
    """Where no sample of the file's content is taken; the time of writing tells."""
    path = make_h5(x=np.zeros((1000, 1024), "f4"))
    datamodule = RankCachedH5DataModule(path, with_index=True, batch_size=100)
    fit(datamodule, max_epochs=1)
    with h5py.File(path, "r+") as h5:
        h5["x"][510, 0] = 7
    batches = fit(datamodule, Witness(), max_epochs=1).batches
    assert {i: x[0].item() for xs, index in batches for i, x in zip(index.tolist(), xs, strict=True)}[510] == 7


class InsideAFit(Callback):
    """Runs another stage, in mid-epoch, with a trainer of its own and the data module of the fit."""

    def __init__(self, stage):
        self.stage, self.model = stage, Recorder()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 3:
            datamodule = trainer.datamodule
            getattr(quiet_trainer(), self.stage)(self.model, datamodule=datamodule)
            datamodule.trainer = trainer


@pytest.mark.wide
@pytest.mark.parametrize("stage", STAGES[1:])
def test_another_trainer_may_use_it_in_the_middle_of_a_fit(file, loads, stage):
    inside = InsideAFit(stage)
    assert fit(module(file), callbacks=[inside]).train_rows == fit(module(file)).train_rows
    assert inside.model.rows[{"validate": "val"}.get(stage, stage)] == ALL * 2
    assert len(loads) == 4 + (stage != "validate")


# Given back ------------------------------------------------------------------------------------------------------


def memory_files():
    """Shared memory of ours that this process has open or mapped, but for what nobody can reach any more."""
    gc.collect()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:lightning_h5" in line]
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return maps + [name for name in opened if "memfd:lightning_h5" in name]


def resident_bytes():
    gc.collect()
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


@pytest.mark.wide
@pytest.mark.parametrize("stage", [None, "fit"])
def test_teardown_by_hand_gives_the_memory_back(make_h5, stage):
    datamodule = RankCachedH5DataModule(make_h5(x=np.ones((1600, 65536), "u1")), with_index=True)
    fit(datamodule, limit_train_batches=2, max_epochs=1)
    before = resident_bytes()
    assert is_held(datamodule) == {"train"}
    datamodule.teardown(stage)
    assert not is_held(datamodule)
    assert before - resident_bytes() > 95 << 20


def test_teardown_by_hand_leaves_nothing_of_shared_memory(file):
    datamodule = module(file, share_memory=True)
    fit(datamodule)
    assert len(memory_files()) > 1
    datamodule.teardown()
    assert not memory_files()


def test_rows_that_were_given_back_are_loaded_again_when_they_are_asked_for(file, loads):
    datamodule = module(file)
    whole = fit(datamodule).train_rows
    loader = datamodule.train_dataloader()
    datamodule.teardown()
    assert rows_of(loader) == whole[0]
    assert len(loads) == 3
    datamodule.teardown()
    assert fit(datamodule).train_rows == whole
    assert len(loads) == 5


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_in_training_gives_the_memory_back(file, num_workers):
    datamodule = module(file, share_memory=True, num_workers=num_workers)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(datamodule, Recorder(fail_at=(1, 3)))
    assert not is_held(datamodule)
    assert not memory_files()
    assert fit(datamodule).train_rows == fit(module(file)).train_rows


def test_an_interrupt_while_rows_are_loaded_gives_the_memory_back(file, monkeypatch):
    def interrupted(tasks, *arguments):
        tasks[0].run()
        raise KeyboardInterrupt

    monkeypatch.setattr(bulk, "do_tasks", interrupted)
    datamodule = module(file, share_memory=True)
    with pytest.raises(KeyboardInterrupt):
        datamodule.setup("fit")
    assert not is_held(datamodule)
    assert not memory_files()


def test_a_data_module_that_is_forgotten_takes_its_rows_along(file):
    datamodule = module(file, share_memory=True)
    fit(datamodule)
    assert memory_files()
    gone = weakref.ref(datamodule)
    del datamodule
    gc.collect()
    assert gone() is None
    assert not memory_files()


def test_it_pickles_after_a_run_without_its_rows(make_h5):
    path = make_h5(x=np.arange(1 << 20))
    datamodule = RankCachedH5DataModule(path, batch_size=1 << 15, with_index=True)
    first = rows_of(by_hand(datamodule, "fit"))
    content = pickle.dumps(datamodule)
    assert len(content) < 100_000
    assert rows_of(by_hand(pickle.loads(content), "fit")) == first
    assert is_held(datamodule) == {"train"}


# Room ------------------------------------------------------------------------------------------------------------


def test_shards_without_room_are_refused_with_the_sum_before_training(make_h5, monkeypatch, loads):
    path = make_h5(x=np.zeros((6, 1 << 20), "u1"))
    monkeypatch.setattr(
        shard_loading, "available_memory", lambda: AvailableMemory(HEADROOM + (11 << 20), "the machine's memory")
    )
    model = Recorder()
    datamodule = RankCachedH5DataModule(path, path, batch_size=2, with_index=True)
    told = (
        r"the shards of 'train', 'val' take 12\.0 MiB on this rank, and 256\.0 MiB while they are loaded; 267\.0 MiB "
        r"are left \(the machine's memory\)\. 11\.0 MiB would fit: .* with LazyH5DataModule"
    )
    with pytest.raises(H5ValueError, match=told):
        fit(datamodule, model)
    assert (model.train_rows, loads, is_held(datamodule)) == ({}, [], set())
    monkeypatch.setattr(
        shard_loading, "available_memory", lambda: AvailableMemory(HEADROOM + (12 << 20), "the machine's memory")
    )
    assert sorted(fit(datamodule, model).train_rows[1]) == list(range(6))


def test_what_a_stage_does_not_need_is_given_up_where_there_is_no_room_and_kept_where_there_is(
    make_h5, monkeypatch, loads
):
    path = make_h5(x=np.zeros((6, 1 << 20), "u1"))
    datamodule = RankCachedH5DataModule(path, path, path, path, batch_size=2, with_index=True)

    def room(size=18 << 20):
        """As of a machine of 18 MiB."""
        return AvailableMemory(HEADROOM + size - 6 * len(is_held(datamodule)) * (1 << 20), "the machine's memory")

    monkeypatch.setattr(shard_loading, "available_memory", room)
    fit(datamodule)
    quiet_trainer().test(Recorder(), datamodule=datamodule)
    assert is_held(datamodule) == {"train", "val", "test"}
    quiet_trainer().predict(Recorder(), datamodule=datamodule)
    assert is_held(datamodule) == {"predict"}
    assert sorted(fit(datamodule).train_rows[0]) == list(range(6))
    assert len(loads) == 6


def test_shards_that_no_machine_could_hold_are_refused_by_what_the_system_says(make_h5):
    path = make_h5({})
    with h5py.File(path, "r+") as h5:
        h5.create_dataset("x", (1 << 15, 1 << 31), "u1", chunks=(1, 1 << 31))
    with pytest.raises(H5ValueError, match=r"the shards of 'train' take 65,536\.00 GiB on this rank"):
        fit(
            RankCachedH5DataModule(
                path,
                files={"trusted": True},
            )
        )


# Workers ---------------------------------------------------------------------------------------------------------


WORKERS = [
    ("fork", True, True),
    ("fork", False, True),
    ("spawn", True, False),
    ("forkserver", False, False),
    *(
        pytest.param(method, persistent, True, marks=pytest.mark.slow)
        for method in ("spawn", "forkserver")
        for persistent in (True, False)
    ),
]


# Lightning's own advice, where workers are spawned.
@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`:UserWarning")
@pytest.mark.parametrize(("method", "persistent", "validates"), WORKERS)
def test_workers_read_the_one_copy_however_they_are_started(file, loads, capfd, method, persistent, validates):
    workers = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": persistent}
    options = {"x_key": {"x": "x", "who": "patient"}, "y_key": None, "val_path": file if validates else None}
    datamodule = module(file, **workers, **options)
    model = fit(datamodule, Witness())
    assert model.train_rows == fit(module(file, val_path=None)).train_rows
    for batch in model.batches:
        assert_same_rows(batch["x"].numpy(), rows_by_h5py(file, "x", batch["index"]))
        assert batch["who"] == [f"p{row // 6}" for row in batch["index"].tolist()]
    counted = {split: dataset.counters.total()["bytes_decoded"] for split, dataset in datamodule._datasets.items()}
    alone = module(file, **options)
    alone.setup("fit")
    assert counted == {split: dataset.counters.total()["bytes_decoded"] for split, dataset in alone._datasets.items()}
    assert "once more" not in capfd.readouterr().err
    assert len(loads) == 3 + 2 * validates
    datamodule.teardown()
    assert not memory_files()


# Options of the Trainer ------------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
def test_options_of_the_trainer_take_the_batches_they_should(file, num_workers):
    whole = fit(module(file)).train_rows
    again = lambda **options: fit(module(file, num_workers=num_workers), **options)  # noqa: E731
    assert again(overfit_batches=2).train_rows == {0: ALL[:16], 1: ALL[:16]}
    assert again(limit_train_batches=3).train_rows == {0: whole[0][:24], 1: whole[1][:24]}
    assert again(limit_val_batches=0.5).rows["val"] == ALL[:32] * 2
    assert again(fast_dev_run=2).train_rows == {0: whole[0][:16]}
    assert again(val_check_interval=3, max_epochs=1).rows["val"] == ALL * 2


@pytest.mark.parametrize(("n_rows", "every"), [(13, 0), (12, 1)], ids=["a row sits out", "drawn anew"])
def test_overfit_batches_repeats_the_same_batches_on_ranks(make_h5, n_rows, every):
    options = {"rank": 0, "world_size": 2, "mode": "interleave", "reshard_every_n_epochs": every}
    datamodule = RankCachedH5DataModule(
        make_h5(x=np.arange(n_rows)), **nested(batch_size=2, with_index=True, **options)
    )
    rows = fit(datamodule, overfit_batches=2, max_epochs=3).train_rows
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.parametrize("mode", ["contiguous", "interleave"])
@pytest.mark.parametrize("every", [1, 2])
def test_drawing_shards_anew_moves_nothing_on_one_process(file, loads, every, mode):
    options = {"mode": mode, "reshard_every_n_epochs": every}
    model = fit(module(file, **options), Witness(), max_epochs=5)
    assert [sorted(rows) for rows in model.train_rows.values()] == [ALL] * 5
    assert len({tuple(rows) for rows in model.train_rows.values()}) == 5
    for x, _, index in model.batches:
        assert_same_rows(x.numpy(), rows_by_h5py(file, "x", index))
    assert len(loads) == 2


@pytest.mark.parametrize("mode", ["contiguous", "interleave"])
def test_shards_of_a_small_file_are_drawn_anew_too(make_h5, mode):
    """Of 24 rows in chunks of two a rank of two meets others than its first twelve."""
    x = Stored(np.arange(24), "chunked", (2,), {"compression": "gzip"})
    options = {"rank": 0, "world_size": 2, "mode": mode, "reshard_every_n_epochs": 1, "with_index": True}
    datamodule = RankCachedH5DataModule(make_h5(x=x), **nested(**options))
    shards = [{*rows_of(by_hand(datamodule, "fit", epoch))} for epoch in range(4)]
    assert [len(shard) for shard in shards] == [12] * 4
    assert len(set.union(*shards)) > 12


def test_a_batch_size_finder_loads_once(file, loads, tmp_path):
    trainer, datamodule = quiet_trainer(default_root_dir=tmp_path), module(file, batch_size=2)
    Tuner(trainer).scale_batch_size(Recorder(), datamodule=datamodule, max_trials=2, steps_per_trial=1)
    assert datamodule.batch_size > 2
    assert len(loads) == 2


# Ranks, one after the other --------------------------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(data=st.data())
def test_ranks_take_equally_many_steps_and_each_row_once_but_for_fewer_than_ranks(make_h5, data):
    world_size = data.draw(st.integers(1, 5), "ranks")
    n_rows = data.draw(st.integers(world_size, 30), "rows")
    batch_size, drop_last = data.draw(st.integers(1, 7), "batch"), data.draw(st.booleans(), "drop_last")
    every = data.draw(st.integers(0, 2), "every")
    assume(not drop_last or n_rows // world_size >= batch_size)
    options = {
        "mode": data.draw(st.sampled_from(["contiguous", "interleave"])),
        "shuffle": data.draw(st.booleans()),
        "seed": data.draw(st.integers(0, 3)),
    }
    x = Stored(np.arange(n_rows) * 3, "chunked", (data.draw(st.integers(1, 9)),))
    path, n_epochs = make_h5(x=x), 4
    seen = []
    for rank in range(world_size):
        datamodule = RankCachedH5DataModule(
            path,
            **nested(
                batch_size=batch_size,
                drop_last=drop_last,
                reshard_every_n_epochs=every,
                world_size=world_size,
                rank=rank,
                with_index=True,
                **options,
            ),
        )
        datamodule.setup("fit")
        loader, epochs = datamodule.train_dataloader(), []
        for epoch in range(n_epochs):
            loader.sampler.set_epoch(epoch)
            batches = list(loader)
            assert len(loader) == len(batches)
            assert all((rows == index * 3).all() for rows, index in batches)
            epochs.append([index_of(batch) for batch in batches])
        seen.append(epochs)
        datamodule.teardown()
    n_trained = n_rows // world_size * world_size if batch_size == 1 else n_rows
    n_trained -= n_trained % (batch_size * world_size) if drop_last else 0
    for epoch in range(n_epochs):
        sizes = [[len(batch) for batch in epochs[epoch]] for epochs in seen]
        assert all(max(step) - min(step) <= 1 for step in zip(*sizes, strict=True)), "ranks have as many batches"
        rows = rows_in(seen, [epoch])
        assert len(rows) == len({*rows}) == n_trained


def rows_in(seen, epochs):
    return [row for rank in seen for epoch in epochs for batch in rank[epoch] for row in batch]


@pytest.mark.parametrize("mode", ["contiguous", "interleave"])
def test_evaluation_on_ranks_is_each_row_once_in_contiguous_shards(make_h5, mode):
    path = make_h5(x=np.arange(17))
    found = []
    for rank in range(3):
        options = {"rank": rank, "world_size": 3, "mode": mode, "batch_size": 4, "with_index": True}
        datamodule = RankCachedH5DataModule(path, path, path, path, **nested(**options))
        found.append([rows_of(by_hand(datamodule, stage)) for stage in STAGES[1:]])
    assert found == [[[*range(6)]] * 3, [[*range(6, 12)]] * 3, [[*range(12, 17)]] * 3]


# Resuming --------------------------------------------------------------------------------------------------------

STOPS = [(0, 1), (0, 7), (1, 0), (1, 5), (2, 7)]
WAYS = {"at each batch": at_each_batch, "on exception": on_exception}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stop", STOPS)
def test_a_run_broken_off_goes_on_with_exactly_the_rest(file, tmp_path, way, stop):
    make = lambda: module(file)  # noqa: E731
    assert together(*stop_and_go_on(tmp_path, make, stop, WAYS[way](tmp_path))) == rows_of_a_whole_run(make)


OTHERWISE = {
    "workers": {"num_workers": 2},
    "workers of each epoch": {"num_workers": 2, "persistent_workers": False},
    "another batch size": {"batch_size": 5},
    "a larger batch": {"batch_size": 16},
    "another batch size, workers": {"batch_size": 3, "num_workers": 2},
    "shared memory": {"share_memory": True},
}


@pytest.mark.wide
@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_it_goes_on_with_the_rest_also_otherwise(file, tmp_path, otherwise):
    make, other = (lambda: module(file)), (lambda: module(file, **OTHERWISE[otherwise]))
    runs = stop_and_go_on(tmp_path, make, (1, 3), on_exception(tmp_path), go_on=other)
    assert together(*runs) == rows_of_a_whole_run(make)


SETTINGS = {
    "unshuffled": {"shuffle": False},
    "drop_last": {"drop_last": True},
    "chunks": {"shuffle": "chunks"},
    "interleaved": {"mode": "interleave"},
    "drawn anew": {"reshard_every_n_epochs": 1},
    "of two ranks": {"rank": 0, "world_size": 2, "val_path": None},
    "of two ranks, one row sits out": {"rank": 0, "world_size": 2, "val_path": None, "test_fraction": 0.05},
    "of two ranks, drawn anew": {
        "rank": 1,
        "world_size": 2,
        "val_path": None,
        "mode": "interleave",
        "reshard_every_n_epochs": 1,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_way_to_train_is_gone_on_with_exactly(file, tmp_path, name):
    make = lambda: module(file, **SETTINGS[name])  # noqa: E731
    runs = stop_and_go_on(tmp_path, make, (1, 2), on_exception(tmp_path))
    assert together(*runs) == rows_of_a_whole_run(make)


def test_the_saved_position_is_plain_and_small(file, tmp_path):
    keep = ModelCheckpoint(tmp_path, filename="each", every_n_train_steps=3, save_top_k=1)
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=[keep], default_root_dir=tmp_path, max_steps=11)
    trainer.fit(Recorder(), datamodule=module(file, mode="interleave", reshard_every_n_epochs=2))
    state = torch.load(tmp_path / "each.ckpt", weights_only=True)["RankCachedH5DataModule"]
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 1000
    assert (state["epoch"], state["segments"]) == (1, [[BATCH, 1, 1]])
    assert state["shards"] == {"mode": "interleave", "world_size": 1, "reshard_every": 2}


@pytest.mark.wide
def test_the_state_stays_small_after_many_changes_within_an_epoch(file, tmp_path):
    """Each start of the program trains one batch, of another size than the last."""
    path, seen = None, []
    for start in range(40):
        model, trainer = Recorder(), quiet_trainer(max_epochs=-1, max_steps=start + 1)
        trainer.fit(model, datamodule=module(file, val_path=None, batch_size=1 + start % 2), ckpt_path=path)
        seen += [row for rows in model.train_rows.values() for row in rows]
        path = tmp_path / f"{start}.ckpt"
        trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["RankCachedH5DataModule"]
    assert len(json.dumps(state)) < 4096
    assert seen == [row for rows in fit(module(file, val_path=None)).train_rows.values() for row in rows][: len(seen)]


@pytest.fixture
def saved(tmp_path):
    """Makes a checkpoint in the middle of epoch 1, and gives its path."""

    def save(datamodule):
        trainer = quiet_trainer(max_epochs=-1, max_steps=11)
        trainer.fit(Recorder(), datamodule=datamodule)
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        return tmp_path / "saved.ckpt"

    return save


REFUSED = {
    "a lazy one's": (lazy, module, {}, "shards' mode: saved None, present 'interleave'"),
    "by a lazy one": (module, lazy, {}, "shards' mode: saved 'interleave', present None"),
    "another mode": (module, module, {"mode": "contiguous"}, "mode: saved 'interleave', present 'contiguous'"),
    "drawn otherwise": (module, module, {"reshard_every_n_epochs": 2}, "reshard_every: saved 0, present 2"),
    "another seed": (module, module, {"seed": 5}, "seed: saved 0, present 5"),
    "unshuffled": (module, module, {"shuffle": False}, "order: saved '.*', present 'none'"),
    "other rows": (module, module, {"test_fraction": 0.1}, "rows: saved 60, present 54"),
}


@pytest.mark.wide
@pytest.mark.parametrize("case", REFUSED)
def test_a_position_of_other_data_or_settings_is_refused_with_both_values(file, saved, case):
    make, other, options, told = REFUSED[case]
    path = saved(make(file))
    with pytest.raises(H5ResumeError, match=f"belongs to other data or settings:\n(.*\n)*  .*{told}"):
        quiet_trainer(max_epochs=3).fit(Recorder(), datamodule=other(file, **options), ckpt_path=path)
    model = Recorder()
    willing = other(file, **options, distributed={"on_resume_mismatch": "restart_epoch"})
    with pytest.warns(UserWarning, match="epoch 1 starts over"):
        quiet_trainer(max_epochs=3).fit(model, datamodule=willing, ckpt_path=path)
    whole = fit(other(file, **options), max_epochs=3).train_rows
    assert model.train_rows == {1: whole[1], 2: whole[2]}


def of_ranks(file, world_size, **options):
    return module(file, **({"val_path": None, "batch_size": 4, "rank": 0, "world_size": world_size} | options))


@pytest.mark.parametrize("make", [module, lazy])
@pytest.mark.parametrize("stop", [(1, 3), (1, 7)], ids=["in the middle", "in the last batch"])
def test_an_epoch_that_is_to_start_over_is_trained_on_whole(file, tmp_path, make, stop):
    other = lambda: make(file, seed=1, distributed={"on_resume_mismatch": "restart_epoch"})  # noqa: E731
    with pytest.warns(UserWarning, match="epoch 1 starts over"):
        _, resumed = stop_and_go_on(tmp_path, lambda: make(file), stop, on_exception(tmp_path), go_on=other)
    whole = fit(make(file, seed=1), max_epochs=3).train_rows
    assert resumed == {1: whole[1], 2: whole[2]}


BATCHES = {1: 15, 2: 8, 3: 5}  # of four rows, of each number of ranks


@pytest.mark.wide
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stop", [1, 3, -1], ids=["after a batch", "after three", "in the last"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_in_mid_epoch_another_number_of_ranks_begins_the_epoch_anew_and_says_so(
    file, tmp_path, way, stop, before, after
):
    whole = fit(of_ranks(file, after), max_epochs=3).train_rows
    make, other = (lambda: of_ranks(file, before)), (lambda: of_ranks(file, after))
    with pytest.warns(UserWarning, match=rf"epoch 1 starts over.*by {before} ranks, and there are {after} now"):
        broken, resumed = stop_and_go_on(tmp_path, make, (1, stop % BATCHES[before]), WAYS[way](tmp_path), go_on=other)
    assert len(broken[0]) == ROWS // before
    assert resumed == {1: whole[1], 2: whole[2]}


def test_a_limit_of_steps_in_mid_epoch_and_another_number_of_ranks_begin_the_epoch_anew(file, saved):
    """Lightning counts the epoch that was broken off as done."""
    path, model = saved(of_ranks(file, 2)), Recorder()
    with pytest.warns(UserWarning, match="epoch 1 starts over"):
        quiet_trainer(max_epochs=3).fit(model, datamodule=of_ranks(file, 3), ckpt_path=path)
    whole = fit(of_ranks(file, 3), max_epochs=3).train_rows
    assert model.train_rows == {1: whole[1], 2: whole[2]}


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_that_began_anew_may_be_broken_off_again(file, tmp_path, way):
    """By as many ranks it is gone on with exactly, by others it begins anew once more."""
    whole = {n: fit(of_ranks(file, n), max_epochs=3).train_rows for n in (2, 3)}
    path, stops = None, [(2, (1, 3)), (3, (1, 2)), (3, (1, 3)), (2, (1, 1)), (2, None)]
    expected = [
        {0: whole[2][0], 1: whole[2][1][:12]},
        {1: whole[3][1][:8]},
        {1: whole[3][1][8:12]},
        {1: whole[2][1][:4]},
        {1: whole[2][1][4:], 2: whole[2][2]},
    ]
    for number, ((world_size, stop), rows) in enumerate(zip(stops, expected, strict=True)):
        model, folder = Recorder(fail_at=stop), tmp_path / str(number)
        folder.mkdir()
        callback = WAYS[way](folder)
        options = {"callbacks": [callback], "enable_checkpointing": isinstance(callback, ModelCheckpoint)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                quiet_trainer(max_epochs=3, **options).fit(model, datamodule=of_ranks(file, world_size), ckpt_path=path)
            except RuntimeError:
                assert stop
        assert any("starts over" in str(one.message) for one in caught) == (number in (1, 3))
        assert model.train_rows == rows
        path = next(folder.glob("*.ckpt"), None)


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("after", [1, 3])
def test_at_an_epochs_end_another_number_of_ranks_goes_on_without_a_word(file, tmp_path, after, limit):
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=limit)
    trainer.fit(Recorder(), datamodule=of_ranks(file, 2))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    model = Recorder()
    again = quiet_trainer(max_epochs=3, limit_train_batches=limit)
    again.fit(model, datamodule=of_ranks(file, after), ckpt_path=tmp_path / "end.ckpt")
    whole = fit(of_ranks(file, after), max_epochs=3, limit_train_batches=limit).train_rows
    assert model.train_rows == {1: whole[1], 2: whole[2]}


# Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "striped"}, "mode='striped' was given. Pass 'contiguous', 'interleave'"),
        ({"cache_device": "cuda", "num_workers": 2}, "worker processes cannot read a GPU's memory. Pass num_workers=0"),
        ({"reshard_every_n_epochs": -1}, "reshard_every_n_epochs=-1 was given. Pass a whole number of at least 0"),
        ({"reshard_every_n_epochs": 1.5}, "reshard_every_n_epochs=1.5 was given"),
        ({"batch_size": 0}, "batch_size=0 was given"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "leave 0 for training"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(file, options, told):
    with pytest.raises(H5ValueError, match=re.escape(told)):
        RankCachedH5DataModule(file, **nested(x_key="x", **options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_in_setup(file, loads):
    with pytest.raises(H5ValueError, match="cache_device='cuda' was given, and this machine has no such device"):
        fit(module(file, cache_device="cuda"))
    assert loads == []


def test_a_device_that_there_is_not_is_refused_in_setup(file, loads):
    with pytest.raises(H5ValueError, match="cache_device='gpu' was given"):
        fit(module(file, cache_device="gpu"))
    assert loads == []


def test_memory_of_a_gpu_is_not_shared(file):
    with pytest.raises(H5ValueError, match="a GPU's memory is not shared"):
        fit(module(file, cache_device="cuda", share_memory=True))


def test_a_damaged_chunk_ends_in_an_error_with_file_and_array_before_training(file):
    with h5py.File(file) as h5:
        chunk = h5["x"].id.get_chunk_info(3)
    edit(file, chunk.byte_offset, b"\0" * chunk.size)
    datamodule, model = module(file), Recorder()
    with pytest.raises(H5CorruptError, match=rf"(?s){file}.*'x'|'x'.*{file}"):
        fit(datamodule, model)
    assert model.train_rows == {}
    assert not is_held(datamodule)


def test_fewer_rows_than_ranks_are_refused_with_the_numbers_but_can_be_predicted(make_h5):
    path = make_h5(x=np.arange(2))

    def of_rank(rank):
        return RankCachedH5DataModule(
            path,
            path,
            path,
            path,
            distributed={"rank": rank, "world_size": 3},
        )

    for stage, split in (("fit", "train"), ("validate", "val"), ("test", "test")):
        with pytest.raises(H5ValueError, match=f"the split '{split}' has 2 rows and there are 3 ranks"):
            of_rank(0).setup(stage)
    assert [[x.tolist() for x in by_hand(of_rank(rank), "predict")] for rank in range(3)] == [[[0]], [[1]], []]


def test_rows_that_sit_out_are_spoken_of(make_h5, caplog):
    fit(
        RankCachedH5DataModule(
            make_h5(x=np.arange(8)), distributed={"rank": 0, "world_size": 3}, batch_size=1, with_index=True
        )
    )
    assert (
        "batch_size=1 on 3 ranks: 2 of 8 rows, different ones each epoch, are left out so that all ranks take the same "
        "number of steps" in caplog.text
    )


# Command line ----------------------------------------------------------------------------------------------------


@pytest.fixture
def config(file, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        f"""
seed_everything: 3
trainer:
  {{max_epochs: 1, default_root_dir: {tmp_path}, accelerator: cpu, logger: false, enable_progress_bar: false}}
model: {{class_path: lightning_models.Recorder}}
data:
  class_path: RankCachedH5DataModule
  init_args:
    train_path: [{file}]
    val_path: {file}
    test_path: {file}
    predict_path: {file}
    x_key: {{signal: x, who: patient}}
    y_key: y
    y_dtype: float32
    memory: {{mode: interleave, share: true, pin: false, device: cpu, reshard_every_n_epochs: 1}}
    with_index: true
"""
    )
    return path


@pytest.mark.wide
@pytest.mark.parametrize("verb", STAGES)
def test_each_verb_runs_from_a_config(config, verb, capsys):
    main([verb, "--config", str(config)])
    out = capsys.readouterr().out
    assert re.search(rf"^ .* {'train' if verb == 'fit' else verb}\b", out, re.MULTILINE)
    assert re.findall(r"^rows +([\d,]+)", out, re.MULTILINE)[0] == str(ROWS)


def test_a_mode_that_there_is_not_is_wrong_usage(config, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", str(config), "--data.memory.mode=striped"])
    assert ended.value.code in (1, 2)
    assert "striped" in capsys.readouterr().err


def test_the_help_explains_what_is_its_own(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--data.help=RankCachedH5DataModule"])
    text = capsys.readouterr().out
    assert "Untyped" not in text
    assert re.search(r"--data\.(init_args\.)?memory MEMORY", text)  # the oldest jsonargparse writes the longer form
    for name in ("mode", "share", "device", "pin", "reshard_every_n_epochs"):
        assert f"``{name}``" in text
