"""Arguments of data modules that are set as attributes between two runs: all of them act, or are refused."""

import inspect
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback
from lightning_models import Recorder, index_of, quiet_trainer

from lightning_h5 import CombinedHDF5DataModule, H5Error, H5ValueError, LazyH5DataModule, RankCachedH5DataModule

KINDS = [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule]
ALL = pytest.mark.parametrize("kind", KINDS)
N_ROWS = {"a": 12, "b": 20}
BASE = {"batch_size": 4, "with_index": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    import h5py

    folder = tmp_path_factory.mktemp("two")
    for number, (name, n_rows) in enumerate(N_ROWS.items()):
        rows = np.arange(n_rows * 2, dtype="f4").reshape(n_rows, 2) + 1000 * number
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["x"], file["z"], file["y"], file["keep"] = rows, -rows, np.arange(n_rows) % 2, np.arange(n_rows) % 3
    return {name: str(folder / f"{name}.h5") for name in N_ROWS}


def seen(datamodule):
    """All batches of a fit's loaders, as plain values."""
    datamodule.setup("fit")
    loaders = datamodule.train_dataloader(), datamodule.val_dataloader()
    batches = [[torch.utils._pytree.tree_leaves(batch) for batch in loader] for loader in loaders]
    return [[[repr(leaf) for leaf in batch] for batch in each] for each in batches]


def doubled(x):
    return {name: 2 * value for name, value in x.items()} if isinstance(x, dict) else 2 * x


CHANGES = {
    "train_path": "b",
    "val_path": "b",
    "x_key": "z",
    "x_dtype": "float64",
    "transform": doubled,
    "batch_transform": "stays",  # names that are values of `VALUES`
    "eval_batch_size": 3,
    "batch_size": 5,
    "shuffle": False,
    "drop_last": True,
    "seed": 7,
    "with_index": False,
    "split": 0.25,
    "weights": {"weight_key": "keep"},
    "select": {"x": {1: [0]}},
    "decode": None,
    "window": None,
    "files": {"mmap": True},
    "workers": {"timeout": 30},
    "prefetch_factor": 3,
    "num_workers": 0,
}


def negative(batch):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.neg, batch)


VALUES = {"stays": negative}


@pytest.mark.wide
@ALL
@given(names=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=4, unique=True), data=st.data())
@settings(max_examples=25, deadline=None)
def test_arguments_that_are_set_have_the_effect_of_the_constructor(kind, files, names, data):
    def value(name):
        found = VALUES.get(CHANGES[name], CHANGES[name]) if isinstance(CHANGES[name], str) else CHANGES[name]
        return files.get(found, found) if isinstance(found, str) else found

    first = {"train_path": files["a"], "x_key": "x"} | BASE
    changes = {name: value(name) for name in names}
    datamodule = kind(**first)
    if data.draw(st.booleans(), label="used before"):
        seen(datamodule)
    try:
        expected = seen(kind(**first | changes))
    except H5Error as error:
        with pytest.raises(type(error)):
            seen_after(datamodule, changes)
        return
    found = seen_after(datamodule, changes)
    assert {name: getattr(datamodule, name) for name in changes} == changes
    assert found == expected
    assert datamodule.hparams == kind(**first | changes).hparams
    assert pickle.loads(pickle.dumps(datamodule)).hparams == datamodule.hparams


def seen_after(datamodule, changes):
    for name, value in changes.items():
        setattr(datamodule, name, value)
    return seen(datamodule)


@ALL
def test_the_next_fit_trains_on_new_files(kind, files):
    model, other = Recorder(), Recorder()
    datamodule = kind(files["a"], x_key="x", **BASE)
    quiet_trainer(max_epochs=1).fit(model, datamodule=datamodule)
    datamodule.train_path = files["b"]
    quiet_trainer(max_epochs=1).fit(other, datamodule=datamodule)
    assert [sorted(each.train_rows[0]) for each in (model, other)] == [list(range(n)) for n in N_ROWS.values()]
    assert datamodule.hparams_initial[next(iter(inspect.signature(kind).parameters))] == files["b"]


@ALL
@pytest.mark.parametrize("depth", [None, 1, 5])
def test_the_prefetch_depth_is_an_argument_as_in_torch(kind, files, depth):
    arguments = {"train_path": files["a"], "x_key": "x"} | BASE
    for num_workers in (0, 1):
        datamodule = kind(**arguments, num_workers=num_workers, prefetch_factor=depth)
        datamodule.setup("fit")
        loader = datamodule.train_dataloader()
        assert loader._depth == depth
        assert loader.prefetch_factor == (depth or 2 if num_workers else None)
        assert sorted(row for batch in loader for row in index_of(batch)) == list(range(N_ROWS["a"]))
        datamodule.teardown("fit")
    with pytest.raises(H5ValueError, match="prefetch_factor=0"):
        kind(**arguments, prefetch_factor=0)
    with pytest.raises(H5ValueError, match="workers has no field 'prefetch_factor'"):
        kind(**arguments, workers={"prefetch_factor": 2})


@ALL
def test_every_argument_can_be_read_and_set_to_its_value(kind, files):
    datamodule = kind(files["a"], x_key="x", **BASE)
    before = seen(datamodule), dict(datamodule.hparams)
    for name in inspect.signature(kind).parameters:
        setattr(datamodule, name, getattr(datamodule, name))
    assert (seen(datamodule), dict(datamodule.hparams)) == before


@ALL
def test_an_invalid_value_is_refused_at_once_and_nothing_changes(kind, files):
    datamodule = kind(files["a"], x_key="x", **BASE)
    before = seen(datamodule)
    for name, value in {"seed": -1, "shuffle": "sorted", "num_workers": -1, "rank": 1, "world_size": 2}.items():
        with pytest.raises(H5ValueError, match=name):
            setattr(datamodule, name, value)
    assert seen(datamodule) == before


def test_loaders_wait_for_a_setup_with_the_new_value(files):
    datamodule = LazyH5DataModule(files["a"], x_key="x")
    datamodule.setup("fit")
    datamodule.x_key = "z"
    with pytest.raises(H5ValueError, match=r"setup\(\) was not called after 'x_key' was set"):
        datamodule.train_dataloader()


def test_keys_that_were_guessed_are_guessed_again_for_new_files(make_h5):
    first, second = make_h5(signals=np.zeros((8, 2))), make_h5(images=np.ones((6, 3)))
    datamodule = LazyH5DataModule(first)
    datamodule.setup("fit")
    datamodule.train_path = second
    datamodule.setup("fit")
    assert (datamodule.x_key, next(iter(datamodule.train_dataloader())).shape) == ("images", (6, 3))


class SetsInside(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.datamodule.train_path = "other.h5"


def test_setting_during_a_fit_is_refused(files):
    with pytest.raises(H5ValueError, match="train_path was set during a fit"):
        quiet_trainer(callbacks=[SetsInside()]).fit(Recorder(), LazyH5DataModule(files["a"], x_key="x", **BASE))


class Folder(LazyH5DataModule):
    """Sets attributes of its own before our constructor, and an argument before each setup."""

    def __init__(self, path):
        self.split, self.path = "mine", path
        super().__init__(None, x_key="x", **BASE)

    def setup(self, stage=None):
        self.train_path = self.path
        super().setup(stage)


def test_a_subclass_may_set_arguments_in_its_setup_and_have_attributes_of_its_own(files):
    datamodule, model = Folder(files["b"]), Recorder()
    quiet_trainer(max_epochs=2).fit(model, datamodule=datamodule)
    assert datamodule.split == "mine"
    assert [sorted(rows) for rows in model.train_rows.values()] == [list(range(N_ROWS["b"]))] * 2
    assert set(datamodule.hparams) == {"path"}
