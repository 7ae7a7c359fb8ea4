"""An error of a user's function names file and row, and stays the error it is: its type, its text, its place."""

import pickle
import re
import traceback

import numpy as np
import pytest
import torch
from arguments import nested
from factories import Stored
from hypothesis import given
from hypothesis import strategies as st
from lightning_models import Recorder, quiet_trainer
from torch.utils.data import DataLoader

from lightning_h5 import CombinedHDF5DataModule, H5Error, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.datasets import CombinedHDF5Dataset, H5LazyDataset, RankMemCachedH5Dataset
from lightning_h5.datasets.user_functions import WorkerFailure

N, BAD, BATCH = 24, 17, 4  # rows of all files, the one that no function takes, rows of a batch
FILE, ROW = "second.h5", 5  # where that one is
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


class TwoArgumentsError(Exception):
    """Is not made of what it keeps in ``args``, so that pickle cannot make it again."""

    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")
        self.where = where


class Thing:
    """Is shown as its address."""


class Fails:
    """Fails for the value of one row, or for a batch that has it."""

    def __init__(self, kind=ValueError, *args):
        self.kind, self.args = kind, args or ("no such row",)

    def __call__(self, given):
        if BAD in values_of(given):
            self.fail()
        return given

    def fail(self):
        raise self.kind(*self.args)


def values_of(given):
    """All numbers in a sample or a batch."""
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, list | tuple):
        return [value for each in given for value in values_of(each)]
    return given.reshape(-1).tolist() if isinstance(given, torch.Tensor) else []


def stack(samples):
    return torch.utils.data.default_collate(Fails()(samples))


@pytest.fixture
def paths(make_h5):
    x = np.arange(N, dtype="f4").reshape(-1, 1)
    return [
        make_h5(
            x=Stored(x[rows], "chunked", (3, 1), {"compression": "gzip"}),
            y=np.arange(100, 100 + N)[rows],
            group=np.arange(N)[rows],
            name=name,
        )
        for name, rows in ((("first.h5"), slice(0, 12)), (FILE, slice(12, N)))
    ]


MODULES = {
    "lazy": lambda paths, **options: LazyH5DataModule(paths, **nested(x_key="x", y_key="y", **options)),
    "weighted": lambda paths, **options: LazyH5DataModule(
        paths, **nested(x_key="x", y_key="y", balance_key="y", **options)
    ),
    "cached": lambda paths, **options: RankCachedH5DataModule(paths, **nested(x_key="x", y_key="y", **options)),
    "combined": lambda paths, **options: CombinedHDF5DataModule(paths, **nested(fields=["x", "y"], **options)),
    "mixture": lambda paths, **options: CombinedHDF5DataModule(
        **nested(sources={"one": paths[0], "two": paths[1]}, fields=["x", "y"], **options)
    ),
    "sequences": lambda paths, **options: CombinedHDF5DataModule(
        paths, **nested(fields=["x", "y", "group"], sequence_key="group", **{"collate_fn": "pad"} | options)
    ),
}
FUNCTIONS = {
    "transform": {"transform": Fails()},
    "batch_transform": {"batch_transform": Fails()},
    "collate_fn": {"collate_fn": stack},
    "transform before collate_fn": {"transform": Fails(), "collate_fn": stack},
    "batch_transform after collate_fn": {"collate_fn": list, "batch_transform": Fails()},
}


def loader_of(kind, paths, **options):
    datamodule = MODULES[kind](paths, batch_size=BATCH, rank=0, world_size=1, **options)
    datamodule.setup("fit")
    return datamodule.train_dataloader()


def read_epochs(loader):
    for _ in range(20):  # with weights a row may be left out of an epoch
        for _ in loader:
            pass


def shown(error):
    return "".join(traceback.format_exception(error))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "which", "num_workers"),
    [
        *[(kind, which, 0) for kind in MODULES for which in FUNCTIONS],
        *[(kind, "transform", 2) for kind in MODULES],
        *[("lazy", which, 2) for which in FUNCTIONS if which != "transform"],
    ],
)
def test_an_error_of_a_users_function_names_file_and_row(kind, which, num_workers, paths):
    loader = loader_of(kind, paths, num_workers=num_workers, **FUNCTIONS[which])
    with pytest.raises(ValueError, match="no such row") as error:
        read_epochs(loader)
    assert type(error.value) is ValueError
    note = error.value.__notes__[0]
    name = which.split()[0]
    assert f"by {name} {'stack' if name == 'collate_fn' else 'Fails'!r} for " in note
    if name == "transform":
        assert f" {ROW} of '{paths[1]}'" in note
        assert f"(index {BAD})" in note or kind == "sequences"
        assert "'x'" in note
    else:
        rows = note.partition(" for ")[2]
        assert f"{ROW} of '{paths[1]}'" in rows or f"{ROW}," in rows
        assert "sequences" in rows or "rows" in rows
    assert len([line for line in error.value.__notes__ if line.startswith("Raised")]) == 1
    # The line that failed is in the traceback, that of a worker too.
    assert "raise self.kind" in shown(error.value) or "in stack" in shown(error.value)
    assert (error.value.__notes__[-1] in ("In worker process 0.", "In worker process 1.")) == bool(num_workers)
    loader.close()


@WORKERS
def test_an_error_of_the_target_transform_names_the_array(num_workers, paths):
    fails = FailsForTarget()
    loader = loader_of("lazy", paths, num_workers=num_workers, target_transform=fails)
    with pytest.raises(KeyError) as error:
        list(loader)
    assert error.value.args == ("no such label",)
    note = error.value.__notes__[0]
    assert note == (f"Raised by target_transform 'FailsForTarget' for 'y', row {ROW} of {paths[1]!r} (index {BAD}).")


class FailsForTarget:
    def __call__(self, label):
        if int(label) == 100 + BAD:
            raise KeyError("no such label")
        return label


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_under_a_trainer_it_is_the_same_error(stage, paths):
    split = {"validate": "val"}.get(stage, stage)
    datamodule = LazyH5DataModule(
        **nested(**{f"{split}_path": paths}, x_key="x", eval_transform=Fails(), with_index=True)
    )
    with pytest.raises(ValueError, match="no such row") as error:
        getattr(quiet_trainer(), stage)(Recorder(), datamodule=datamodule)
    assert f"'x', row {ROW} of {paths[1]!r}" in error.value.__notes__[0]


# Torch waits 10 s for workers that failed.
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    "dataset",
    [
        lambda paths: H5LazyDataset(paths, "x", transform=Fails()),
        lambda paths: H5LazyDataset(paths, "x", transform=Fails(), indices=np.arange(N)[::-1]),
        lambda paths: RankMemCachedH5Dataset(paths, "x", transform=Fails()),
        lambda paths: RankMemCachedH5Dataset(paths, "x", transform=Fails(), mode="interleave", rank=1, world_size=2),
        lambda paths: CombinedHDF5Dataset(paths, ["x"], transform=Fails()),
    ],
    ids=["lazy", "lazy, reversed", "cached", "second shard", "combined"],
)
def test_torchs_own_loader_has_the_note_too(dataset, num_workers, paths):
    with pytest.raises(ValueError, match="no such row") as error:
        list(DataLoader(dataset(paths), batch_size=BATCH, num_workers=num_workers))
    assert f"row {ROW} of {paths[1]!r} (index " in shown(error.value)


def test_direct_reads_have_the_note(paths):
    dataset = H5LazyDataset(paths, {"a": "x", "b": "y"}, transform=Fails())
    for read in (lambda: dataset[BAD], lambda: dataset.read_batch([3, BAD]), lambda: dataset[10:20]):
        with pytest.raises(ValueError, match="no such row") as error:
            read()
        assert len(error.value.__notes__) == 1
        assert f"'x', 'y', row {ROW} of {paths[1]!r} (index {BAD})" in error.value.__notes__[0]


@WORKERS
def test_samples_that_cannot_be_stacked_are_named(num_workers, paths):
    with pytest.raises(RuntimeError, match="stack expects each tensor") as error:
        list(loader_of("lazy", paths, num_workers=num_workers, transform=grow, shuffle=False))
    assert (
        "Raised while stacking what transform 'grow' returned for 'x', rows 0, 1, 2, 3 of" in error.value.__notes__[0]
    )


def grow(x):
    return x.repeat(1 + int(x[0]))


@pytest.mark.wide
@WORKERS
@pytest.mark.parametrize("which", ["transform", "batch_transform", "collate_fn"])
def test_a_stop_iteration_does_not_end_the_epoch(which, num_workers, paths):
    loader = loader_of("lazy", paths, num_workers=num_workers, **{which: exhausted})
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(loader)


def exhausted(given):
    return next(iter(()))


def test_an_index_error_of_a_transform_does_not_end_a_loop_over_the_dataset(paths):
    dataset = H5LazyDataset(paths, "x", transform=Fails(IndexError, "no such class"))
    with pytest.raises(IndexError, match="no such class"):
        list(dataset)
    assert len(list(H5LazyDataset(paths, "x"))) == N


def unknown_error():
    class UnknownError(Exception):
        """Cannot be pickled: its name leads nowhere."""

    return UnknownError("not to be pickled")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("method", "kind", "args"),
    [
        ("fork", TwoArgumentsError, ("lost", "the end")),
        ("spawn", TwoArgumentsError, ("lost", "the end")),
        ("fork", UnicodeDecodeError, ("utf-8", b"abc", 1, 2, "no letter")),
        ("fork", OSError, (28, "No space left", "/tmp/x")),
        ("fork", H5ValueError, ("an error of this package",)),
        ("fork", ValueError, ("several\nlines",)),
        ("fork", ValueError, (Thing(),)),
        ("spawn", KeyError, ("text", [Thing(), len])),
    ],
)
def test_errors_leave_a_worker_as_they_are(method, kind, args, paths):
    error = kind(*args)
    options = {"num_workers": 1, "multiprocessing_context": method}
    with pytest.raises(kind) as found:
        list(loader_of("lazy", paths, transform=Fails(kind, *args), **options))
    assert type(found.value) is kind
    texts = [re.sub("0x[0-9a-f]+", "0x", str(each)) for each in (found.value, error)]  # copies have other addresses
    assert texts[0] == texts[1]
    assert [type(arg) for arg in found.value.args] == [type(arg) for arg in error.args]
    assert found.value.args == error.args or any(isinstance(arg, Thing | list) for arg in args)
    assert getattr(found.value, "where", None) == getattr(error, "where", None)
    # Errors of this package say all that there is to say; of others the worker's traceback is the cause.
    assert (found.value.__cause__ is None) == isinstance(error, H5Error)


def test_an_error_that_cannot_leave_a_worker_is_an_error_with_its_text_and_not_a_timeout(paths):
    with pytest.raises(RuntimeError, match="UnknownError: not to be pickled") as found:
        list(loader_of("lazy", paths, transform=raise_unknown, num_workers=1, multiprocessing_context="fork"))
    assert "raise_unknown" in shown(found.value)
    assert f"row {ROW} of" in str(found.value)


def raise_unknown(x):
    if int(x[0]) == BAD:
        raise unknown_error()
    return x


@pytest.mark.wide
@given(st.lists(st.one_of(st.text(), st.integers(), st.none(), st.binary()), max_size=3))
def test_a_failure_keeps_type_arguments_and_notes(args):
    for kind in (ValueError, RuntimeError, H5Error, TypeError, ArithmeticError):
        error = kind(*args)
        error.add_note("a note")
        with pytest.raises(kind) as found:
            pickle.loads(pickle.dumps(WorkerFailure(error))).raise_again()
        assert type(found.value) is kind
        assert found.value.args == tuple(args)
        assert found.value.__notes__[0] == "a note"
