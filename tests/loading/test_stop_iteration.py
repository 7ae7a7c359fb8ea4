"""A StopIteration out of a user's function is an error that names it, and never the end of an epoch."""

import numpy as np
import pytest
from arguments import nested, nested_files
from factories import Stored
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5Error,
    H5LazyDataset,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
)
from lightning_h5.loading import create_optimized_dataloader

ROWS, BATCH = 50, 8
SILENT = pytest.mark.parametrize("num_workers", [0, 1])


def rows_in(value):
    """The numbers of the rows in a sample or a batch, however it is made. They are stored from 1 on: padding is 0."""
    if isinstance(value, dict):
        value = value["x"]
    if isinstance(value, tuple):
        value = value[0]
    if isinstance(value, list):
        return set().union(*map(rows_in, value))
    return {int(number) - 1 for number in np.unique(value) if number}


class Stops:
    """Raises StopIteration when it comes to one of some rows."""

    def __init__(self, *rows):
        self.rows = set(rows)

    def __call__(self, value):
        if self.rows & rows_in(value):
            next(iter(()))
        return value


class Collates(Stops):
    """A ``collate_fn``, which has samples of sequences of different lengths too."""


class StopsAtOnce:
    def __call__(self, _):
        raise StopIteration


@pytest.fixture
def path(make_h5):
    return make_file(make_h5)


def make_file(make_h5, storage="contiguous"):
    rows = np.repeat(np.arange(1, ROWS + 1, dtype="f4")[:, None], 4, axis=1)
    arrays = {"x": rows, "y": rows.copy(), "group": np.arange(ROWS) // 3}
    if storage == "chunked":
        arrays["x"] = Stored(rows, "chunked", (6, 4), {"compression": "gzip"})
    return make_h5(arrays)


PLACES = ["transform", "target_transform", "batch_transform", "collate_fn", "worker_init_fn"]
KINDS = ["lazy", "cached", "combined", "mixture", "rows of a mixture", "weighted", "sequences"]
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
}


def module_of(kind, path, place, function, **options):
    """A data module that calls the function at a place; None where it has no such place."""
    given = {"train_path": path, "batch_size": BATCH, "multiprocessing_context": "fork"} | {place: function} | options
    if not given.get("num_workers"):
        del given["multiprocessing_context"]
        if place == "worker_init_fn":
            return None
    if kind in ("lazy", "cached"):
        make = LazyH5DataModule if kind == "lazy" else RankCachedH5DataModule
        return make(**nested(x_key="x", y_key="y", **given))
    if place == "target_transform":
        return None
    paths = given.pop("train_path")
    given |= {"fields": ["x", "group"]}
    if kind == "combined":
        return CombinedHDF5DataModule(paths, **nested(**given))
    if kind == "weighted":
        return CombinedHDF5DataModule(paths, **nested(balance_key="group", **given))
    if kind == "sequences":
        return CombinedHDF5DataModule(paths, **nested(sequence_key="group", **{"collate_fn": "pad"} | given))
    mix = "rows" if kind == "rows of a mixture" else "batches"
    return CombinedHDF5DataModule(
        **nested(
            sources={"a": paths, "b": paths}, sampling_strategy="round_robin", mix=mix, epoch_length="max", **given
        )
    )


@pytest.mark.wide
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@SILENT
def test_the_function_that_raised_it_is_named(path, kind, place, num_workers):
    function = (Collates if place == "collate_fn" else Stops)(*range(20, 30))
    module = module_of(
        kind, path, place, StopsAtOnce() if place == "worker_init_fn" else function, num_workers=num_workers
    )
    if module is None:
        pytest.skip("it has no such place")
    module.setup("fit")
    loader = module.train_dataloader()
    name = "workers.init_fn" if place == "worker_init_fn" else place
    with pytest.raises(RuntimeError, match=rf"{name} '\w+' raised StopIteration"):
        list(loader)
    loader.close()


@pytest.mark.parametrize("place", ["transform", "batch_transform"])
@pytest.mark.parametrize("kind", ["lazy", "cached", "combined"])
def test_it_ends_no_plain_loop_either(path, kind, place):
    options = {place: Stops(ROWS // 2)}
    if kind == "combined":
        dataset = CombinedHDF5Dataset(path, **nested_files(load_fields=["x"], **options))
    else:
        dataset = {"lazy": H5LazyDataset, "cached": RankMemCachedH5Dataset}[kind](path, "x", "y", **options)
    ways = [lambda: dataset.read_batch(range(ROWS)), lambda: list(create_optimized_dataloader(dataset, BATCH))]
    if place == "transform":
        ways += [lambda: list(dataset), lambda: list(DataLoader(dataset, batch_size=BATCH)), lambda: dataset[ROWS // 2]]
    for way in ways:
        with pytest.raises(RuntimeError, match=rf"{place} 'Stops' raised StopIteration"):
            way()


class Misses:
    def __call__(self, x):
        if x[0] == 20:
            raise IndexError("of my own")
        return x


def test_an_index_error_of_a_transform_ends_no_plain_loop(path):
    dataset = H5LazyDataset(path, "x", transform=Misses())
    with pytest.raises(IndexError, match="of my own"):
        list(dataset)
    assert len(list(H5LazyDataset(path, "x"))) == ROWS


def test_a_filter_that_raised_it_is_named(path):
    # True of what runs before there is an epoch, too.
    with pytest.raises(RuntimeError, match=r"where\['group'\] '.*' raised StopIteration, which loops take for"):
        CombinedHDF5Dataset(path, ["x"], where={"group": lambda column: next(iter(()))})
    with pytest.raises(RuntimeError, match=r"where '.*' raised StopIteration"):
        CombinedHDF5Dataset(path, ["x"], where=lambda columns: next(iter(())))


def collate_to_nothing(_):
    raise StopIteration


class Other(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, at):
        return at


def test_a_collate_fn_for_a_dataset_of_another_kind_is_named_too():
    loader = create_optimized_dataloader(Other(), 2, num_workers=0, collate_fn=collate_to_nothing)
    with pytest.raises(RuntimeError, match=r"collate_fn 'collate_to_nothing' raised StopIteration"):
        list(loader)


class OtherThatStops(Other):
    def __getitem__(self, at):
        if at == 3:
            raise StopIteration
        return at


class OtherThatStopsInBatches(Other):
    def __getitems__(self, rows):
        return [next(iter(())) if row == 3 else row for row in rows]


@pytest.mark.wide
@pytest.mark.parametrize("make", [OtherThatStops, OtherThatStopsInBatches])
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_of_another_kind_ends_no_epoch_with_it(make, is_training, num_workers):
    loader = create_optimized_dataloader(make(), 1, is_training, num_workers=num_workers)
    for _ in range(2):
        seen = []
        with pytest.raises(RuntimeError, match="raised StopIteration") as error:
            seen.extend(map(int, loader))
        assert 3 not in seen
        assert f"the epoch has 5 batches, but ended after {len(seen)}" in str(error.value)
    whole = create_optimized_dataloader(Other(), 1, is_training, num_workers=num_workers)
    for _ in range(2):
        assert sorted(batch.item() for batch in whole) == list(range(5))


class Model(BoringModel):
    def step(self, batch):
        return self.layer(batch[0].repeat(1, 8)).sum()

    def training_step(self, batch, at):
        return self.step(batch)

    validation_step = test_step = predict_step = training_step

    def on_train_epoch_end(self):
        pass

    on_validation_epoch_end = on_test_epoch_end = on_train_epoch_end


@pytest.mark.wide
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
@SILENT
def test_a_trainer_stops_with_the_error(path, tmp_path, stage, num_workers):
    place = "transform" if stage == "fit" else "eval_transform"
    paths = {f"{split}_path": path for split in ("train", "val", "test", "predict")}
    workers = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    module = LazyH5DataModule(
        **nested(**paths, x_key="x", y_key="y", batch_size=BATCH, **{place: Stops(20)}, **workers)
    )
    trainer = Trainer(max_epochs=1, num_sanity_val_steps=0, default_root_dir=tmp_path, **QUIET)
    with pytest.raises(RuntimeError, match=r"transform 'Stops' raised StopIteration"):
        getattr(trainer, stage)(Model(), datamodule=module)


# What no function of ours calls --------------------------------------------------------------------------------


class StopsInside:
    """Of a subclass that raises it in reading or in finishing."""

    def __init__(self, path, where, row):
        super().__init__(path, "x", with_index=True)
        self.where, self.row = where, row

    def begin(self, rows, epoch=None):
        if self.where == "begin" and self.row in rows:
            raise StopIteration
        return super().begin(rows, epoch)

    def gather(self, rows, epoch=None):
        return self.begin(rows, epoch)()

    def finish(self, raw, **options):
        if self.where == "finish" and self.row in raw.rows:
            raise StopIteration
        return super().finish(raw, **options)


class LazyStopsInside(StopsInside, H5LazyDataset):
    pass


class CachedStopsInside(StopsInside, RankMemCachedH5Dataset):
    pass


@pytest.mark.parametrize("make", [LazyStopsInside, CachedStopsInside])
@pytest.mark.parametrize("where", ["begin", "finish"])
@SILENT
def test_an_epoch_never_ends_before_its_last_step(path, make, where, num_workers):
    loader = create_optimized_dataloader(make(path, where, 30), 4, num_workers=num_workers)
    batches, seen = iter(loader), set()
    with pytest.raises((H5Error, RuntimeError), match="StopIteration"):
        seen.update(*map(rows_in, batches))
    assert 30 not in seen
    with pytest.raises(H5Error, match="has failed"):
        next(batches)
    loader.close()


# Any of them ---------------------------------------------------------------------------------------------------


def check_any(rng, paths, num_workers):
    """A random function raises it at a random row, or at none: an error that names it, or all rows."""
    kind, place = KINDS[rng.integers(len(KINDS))], PLACES[rng.integers(len(PLACES))]
    row = int(rng.integers(ROWS + 20))
    function = (Collates if place == "collate_fn" else Stops)(row)
    options = {"batch_size": int(rng.integers(2, 60)), "num_workers": num_workers, "seed": int(rng.integers(99))}
    options |= {"prefetch_factor": [None, 1, 4][rng.integers(3)], "shuffle": bool(rng.integers(2))}
    module = module_of(kind, paths[rng.integers(len(paths))], place, function, **options)
    if module is None or place == "worker_init_fn":
        return
    module.setup("fit")
    loader = module.train_dataloader()
    rows = [token.rows % len(loader.dataset) for token in loader.sampler.tokens(0)]
    if kind == "sequences":
        rows = [loader.dataset.table.indexer.rows_of(each).fields[0].rows for each in rows]
    at = next((at for at, each in enumerate(rows) if row in each % ROWS), len(rows))
    batches = iter(loader)
    for expected in rows[:at]:
        assert rows_in(next(batches)) == set(expected % ROWS)
    if at == len(rows):
        assert next(batches, None) is None
    else:
        with pytest.raises(RuntimeError, match=rf"{place} '\w+' raised StopIteration"):
            next(batches)
    loader.close()


def check_many(make_h5, number, n_threads, n_workers):
    paths = [make_file(make_h5), make_file(make_h5, "chunked")]
    for at in range(n_threads + n_workers):
        check_any(np.random.default_rng([number, at]), paths, int(at >= n_threads))


def test_any_function_at_any_row(make_h5):
    check_many(make_h5, 1, 95, 5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_function_at_any_row_2500_times(make_h5):
    check_many(make_h5, 2, 2200, 300)
