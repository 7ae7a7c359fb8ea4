"""Samples that cannot be read or transformed are left out of their batches, by name; everything else still raises."""

import errno
import os
import urllib.error
from collections import Counter
from unittest.mock import patch

import h5py
import numpy as np
import pytest
import torch
from bad_rows import (
    BAD_FILES,
    GZIP,
    ROWS,
    STEP,
    WIDTH,
    BadFile,
    chunk_of_rows,
    damage_chunk,
    flip,
    images,
    numbered,
    refuse_some,
    windows,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_models import Recorder, quiet_trainer, together
from processes import run_ranks, values
from torch.utils.data import DataLoader

from lightning_h5 import (
    BadRowOptions,
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5CorruptError,
    H5DataChangedError,
    H5Error,
    H5LazyDataset,
    H5MemoryError,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
    check_files,
    create_optimized_dataloader,
)
from lightning_h5.samples import row_table

MODULES = {"lazy": LazyH5DataModule, "cached": RankCachedH5DataModule, "combined": CombinedHDF5DataModule}
ALL = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
EPOCHS = 2


def index_of(batch, case):
    """The index of a batch that is a tuple, after its input and target if it has one; or of a dict."""
    return (batch["index"] if isinstance(batch, dict) else batch[2 if "y_key" in case.arguments else 1]).tolist()


def ledger_of(datamodule):
    return {entry.sample.number: entry for entry in datamodule._ledger.entries()}


def epochs_of(module, case, *, rank=0, world_size=1, **options):
    """The batches of some epochs, by their indices, and the data module."""
    options = {"batch_size": 4, "with_index": True, "on_bad_row": "skip"} | case.arguments | options
    datamodule = module(case.path, distributed={"rank": rank, "world_size": world_size}, **options)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    epochs = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        epochs.append([index_of(batch, case) for batch in loader])
        assert len(epochs[-1]) == len(loader)
    counts = loader.counters.total()
    assert counts["rows"] == sum(len(batch) for epoch in epochs for batch in epoch)
    assert counts["left_out"] == sum(entry.n_times for entry in datamodule._ledger.entries())
    datamodule.teardown()
    return epochs, datamodule


def check_ranks(module, case, world_size, **options):
    """All good samples come once an epoch over all ranks, all bad ones are in a ledger, and steps are equal."""
    runs = [epochs_of(module, case, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for epoch in range(EPOCHS):
        batches = [epochs[epoch] for epochs, _ in runs]
        assert len({len(of_rank) for of_rank in batches}) == 1
        assert sorted(i for of_rank in batches for batch in of_rank for i in batch) == sorted(
            {*range(case.n_samples)} - case.bad
        )
    ledgers = [ledger_of(datamodule) for _, datamodule in runs]
    times = sum((Counter({at: entry.n_times for at, entry in ledger.items()}) for ledger in ledgers), Counter())
    assert times == dict.fromkeys(case.bad, EPOCHS)
    samples = {at: entry.sample for ledger in ledgers for at, entry in ledger.items()}
    assert all(sample.file == case.path for sample in samples.values())
    assert {at: samples[at].place for at in case.places} == case.places
    assert any(case.cause in sample.cause for sample in samples.values())


@pytest.mark.parametrize("name", ["chunk_of_rows", "images", "windows", "failing_transform"])
@pytest.mark.parametrize("module", [LazyH5DataModule, RankCachedH5DataModule])
def test_bad_samples_are_left_out(tmp_path, name, module):
    check_ranks(module, BAD_FILES[name](str(tmp_path / "a.h5")), 1)


@pytest.mark.wide
@ALL
@pytest.mark.parametrize("is_held", [True, False], ids=["held", "read"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_samples_of_every_kind(tmp_path, name, module, is_held, request):
    """In all data modules, on 1 to 3 ranks, without workers and with two."""
    if not is_held:
        request.getfixturevalue("nothing_held")
    case = BAD_FILES[name](str(tmp_path / "a.h5"))
    for world_size in (1, 2) if case.n_samples < 9 else (1, 2, 3):
        for n_workers in (0, 2):
            batch_size = 4 if case.n_samples > 9 else 3  # two of them have a good sample on each rank
            check_ranks(module, case, world_size, num_workers=n_workers, batch_size=batch_size)


@pytest.mark.wide
@pytest.mark.parametrize(
    "options", [{"shuffle": "chunks"}, {"shuffle": False, "batch_size": 8}, {"prefetch_factor": 9}]
)
@ALL
def test_bad_samples_in_any_order(tmp_path, module, options, nothing_held):
    check_ranks(module, chunk_of_rows(str(tmp_path / "a.h5")), 2, **options)


@pytest.mark.wide
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_started_afresh_report_them(tmp_path, method):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    check_ranks(LazyH5DataModule, case, 1, num_workers=1, workers={"start_method": method})


# What is not left out ----------------------------------------------------------------------------------------------


@ALL
def test_the_error_is_raised_by_default(tmp_path, module):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    with pytest.raises(H5CorruptError, match=r"chunk 5 \(rows 20 to 23\) of 'x' in .*a\.h5"):
        epochs_of(module, case, on_bad_row="raise")


@pytest.mark.parametrize("n_workers", [0, pytest.param(2, marks=pytest.mark.wide)])
def test_a_batch_is_never_empty(tmp_path, n_workers):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    with pytest.raises(H5CorruptError, match=r"chunk 5 \(rows 20 to 23\) of 'x' in .*a\.h5"):
        epochs_of(LazyH5DataModule, case, shuffle=False, num_workers=n_workers)


def refuse_all(x):
    raise KeyError("every one")


def test_a_transform_that_fails_for_all_samples_raises_at_once(tmp_path):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    with pytest.raises(KeyError, match="every one") as error:
        epochs_of(LazyH5DataModule, case, transform=refuse_all)
    assert "by transform 'refuse_all' for 'x', row" in error.value.__notes__[0]


def test_evaluation_raises_unless_it_is_named(tmp_path):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    for stages in (("train",), ("train", "val"), "val"):
        datamodule = LazyH5DataModule(
            case.path, case.path, x_key="x", on_bad_row={"stages": stages}, batch_size=5, with_index=True
        )
        datamodule.setup("fit")
        for stage in ("train", "val"):
            loader = getattr(datamodule, f"{stage}_dataloader")()
            if stage in stages:
                rows = [row for _, index in loader for row in index.tolist()]
                assert sorted(rows) == sorted({*range(ROWS)} - case.bad)
            else:
                with pytest.raises(H5CorruptError):
                    list(loader)
        assert {entry.sample.stage for entry in datamodule._ledger.entries()} == {*np.atleast_1d(stages)}
        datamodule.teardown()


def resource(error):
    """A transform that raises an error for one sample."""

    def transform(x):
        if int(x[0]) == 9:
            raise error
        return x

    return transform


OF_NO_SAMPLE = [
    MemoryError("no memory"),
    H5MemoryError("no memory"),
    torch.OutOfMemoryError("no memory of the GPU"),
    ConnectionResetError("peer"),
    TimeoutError("late"),
    urllib.error.URLError("no route"),
    OSError(errno.EIO, "disk"),
    OSError(errno.EMFILE, "too many files"),
    H5DataChangedError("another file"),
    StopIteration(),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OF_NO_SAMPLE, ids=lambda error: type(error).__name__)
def test_errors_that_are_of_no_sample_are_raised(tmp_path, error):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    expected = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(expected):
        epochs_of(LazyH5DataModule, case, transform=resource(error))


def test_errors_of_decoding_functions_that_are_of_no_row_are_raised(tmp_path):
    case = images(str(tmp_path / "a.h5"))

    def decode(stored):
        raise ConnectionResetError("the service that decodes is away")

    with pytest.raises(H5CorruptError, match="service that decodes"):
        epochs_of(LazyH5DataModule, case, decode={"image": decode})


@pytest.mark.parametrize("argument", ["batch_transform", "collate_fn"])
def test_errors_of_whole_batches_are_raised(tmp_path, argument):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    with pytest.raises(KeyError, match="every one"):
        epochs_of(LazyH5DataModule, case, **{argument: refuse_all})


@ALL
@pytest.mark.parametrize("n_workers", [0, pytest.param(2, marks=pytest.mark.wide)])
def test_a_file_that_changes_is_never_left_out(tmp_path, module, n_workers):
    """Neither if it is written to nor if it is truncated, which damages chunks."""
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    datamodule = module(case.path, x_key="x", on_bad_row="skip", batch_size=4, num_workers=n_workers)
    if module is RankCachedH5DataModule:
        datamodule.load = lambda splits: (os.truncate(case.path, 4000), module.load(datamodule, splits))
        with pytest.raises(H5DataChangedError):
            datamodule.setup("fit")
        return
    datamodule.setup("fit")
    os.truncate(case.path, 4000)
    with pytest.raises(H5DataChangedError):
        list(datamodule.train_dataloader())
    datamodule.teardown()
    assert not datamodule._ledger.entries()


# The limit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [LazyH5DataModule, pytest.param(RankCachedH5DataModule, marks=pytest.mark.wide)])
@pytest.mark.parametrize("n_workers", [0, 2])
def test_more_than_the_limit_stop_the_run(tmp_path, module, n_workers):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    with pytest.raises(
        H5Error, match=r"4 different samples .* 3 at most .*row 2\d of .*lightning-h5 check .*limit': 30"
    ):
        epochs_of(module, case, on_bad_row={"limit": 3}, num_workers=n_workers)
    epochs, _ = epochs_of(module, case, on_bad_row=BadRowOptions(limit=4), num_workers=n_workers)
    assert len(epochs) == EPOCHS  # the same ones in each epoch


MISTAKES = {
    "another word": ("skp", r"on_bad_row='skp' was given. Pass 'raise', 'skip', BadRowOptions"),
    "a number": (3, "on_bad_row=3 was given"),
    "no limit": ({"limit": 0}, "on_bad_row.limit=0"),
    "another field": ({"limits": 3}, "Did you mean 'limit'"),
    "another stage": ({"stages": "validation"}, r"on_bad_row\.stages='validation' was given.*'val'"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("make", [LazyH5DataModule, H5LazyDataset])
def test_mistakes_are_answered(tmp_path, name, make):
    value, text = MISTAKES[name]
    with pytest.raises(H5ValueError, match=text):
        make(chunk_of_rows(str(tmp_path / "a.h5")).path, x_key="x", on_bad_row=value)


# Resume and the ledger ---------------------------------------------------------------------------------------------


class Batches(Recorder):
    """Remembers batch after batch, and the ledger at the end."""

    ledger = None

    def on_train_end(self):
        self.ledger = {at: entry.n_times for at, entry in ledger_of(self.trainer.datamodule).items()}

    def training_step(self, batch, batch_idx):
        rows = self.train_rows.setdefault(self.current_epoch, [])
        if self.fail_at == (self.current_epoch, batch_idx):
            raise RuntimeError("stop here")
        rows.append(batch[-1].tolist())
        return self.layer(torch.ones(1, 1)).sum()


def fit(module, case, *, fail_at=None, ckpt_path=None, callbacks=(), **options):
    model = Batches(fail_at)
    options = {"batch_size": 5, "with_index": True, "on_bad_row": "skip"} | case.arguments | options
    datamodule = module(case.path, **options)
    trainer = quiet_trainer(
        max_epochs=3, callbacks=list(callbacks), enable_checkpointing=bool(callbacks), num_sanity_val_steps=0
    )
    trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    return model.train_rows, datamodule


def refuse_nine(y):
    if int(y) == 9:
        raise ValueError("odd")
    return y


@ALL
@pytest.mark.parametrize("n_workers", [0, pytest.param(2, marks=pytest.mark.wide)])
@pytest.mark.parametrize("stop", [(1, 4), pytest.param((0, 9), marks=pytest.mark.wide)])
def test_a_resumed_run_has_the_batches_and_the_ledger_of_an_unbroken_one(tmp_path, module, n_workers, stop):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    options = {"num_workers": n_workers, "target_transform": refuse_nine}
    unbroken, datamodule = fit(module, case, **options)
    entries = {at: (entry.n_times, entry.sample) for at, entry in ledger_of(datamodule).items()}
    assert {at: n for at, (n, _) in entries.items()} == dict.fromkeys(case.bad | {9}, 3)
    save = ModelCheckpoint(tmp_path, filename="each", every_n_train_steps=1, save_top_k=1)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(module, case, fail_at=stop, callbacks=[save], **options)
    state = torch.load(tmp_path / "each.ckpt", weights_only=True)[module.__qualname__]
    assert {sample[1] for sample in state["bad_samples"]} <= case.bad | {9}
    resumed, datamodule = fit(module, case, ckpt_path=tmp_path / "each.ckpt", **options)
    broken = {epoch: rows for epoch, rows in unbroken.items() if epoch < stop[0]}
    broken[stop[0]] = unbroken[stop[0]][: stop[1]]
    assert together(broken, resumed) == unbroken
    assert {at: (entry.n_times, entry.sample) for at, entry in ledger_of(datamodule).items()} == entries


def test_a_second_fit_begins_a_new_ledger(tmp_path):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    datamodule = LazyH5DataModule(case.path, x_key="x", on_bad_row="skip", batch_size=5, with_index=True)
    for _ in range(2):
        quiet_trainer(max_epochs=1).fit(Recorder(), datamodule=datamodule)
        assert {at: entry.n_times for at, entry in ledger_of(datamodule).items()} == dict.fromkeys(case.bad, 1)


def test_a_batch_that_comes_again_counts_once(tmp_path):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    datamodule = LazyH5DataModule(case.path, x_key="x", on_bad_row="skip", batch_size=5)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    loader.set_epoch(0)
    for _ in zip(loader, loader, strict=True):
        pass
    assert {entry.n_times for entry in datamodule._ledger.entries()} == {1}


def test_each_is_logged_once_and_the_table_counts_them(tmp_path, caplog, capsys):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    fit(LazyH5DataModule, case)
    lines = [text for text in caplog.messages if "leaves out a sample" in text]
    assert len(lines) == len(case.bad)
    assert all("rank 0 leaves out a sample: row 2" in line and "chunk 5" in line for line in lines)
    table = capsys.readouterr().out
    assert "samples left out" in table
    assert "4 samples left out (on_bad_row, limit 100), 12 times in all: row 2" in " ".join(table.split())


def test_a_large_ledger_keeps_numbers_alone(tmp_path):
    """So that a checkpoint stays small, and the limit counts them after a resume."""
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file["x"] = numbered(1000)
    datamodule = LazyH5DataModule(
        path, x_key="x", on_bad_row={"limit": 900}, transform=refuse_most, batch_size=250, with_index=True
    )
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Recorder(), datamodule=datamodule)
    entries = datamodule._ledger.entries()
    assert len(entries) == 875
    state = datamodule._ledger.state()
    assert sum(bool(cause) for *_, cause, _, _, _ in state) == 100
    datamodule._ledger.load(state)
    assert {entry.sample.number for entry in datamodule._ledger.entries()} == {e.sample.number for e in entries}


def refuse_most(x):
    if int(x[0]) % 8:
        raise ValueError(f"row {int(x[0])}")
    return x


# Batches -----------------------------------------------------------------------------------------------------------


def test_collate_fn_and_batch_transform_get_the_samples_that_are_left(tmp_path):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    sizes = []

    def collate(samples):
        sizes.append(len(samples))
        return [
            torch.stack([sample[part] for sample in samples])
            if part < 2
            else torch.tensor([sample[part] for sample in samples])
            for part in range(3)
        ]

    epochs_of(LazyH5DataModule, case, collate_fn=collate, batch_transform=lambda batch: batch)
    assert sum(sizes) == EPOCHS * (ROWS - len(case.bad))


def test_random_transforms_draw_the_same_for_the_other_samples(tmp_path):
    """By generators of their own, whatever became of the samples before them."""
    case = chunk_of_rows(str(tmp_path / "a.h5"))

    def draw(x, rng):
        if int(x[0]) == 9:
            raise ValueError("odd")
        return x + int(rng.integers(1 << 20))

    def plain_draw(x, rng):
        return x + int(rng.integers(1 << 20))

    def rows_of(transform):
        datamodule = LazyH5DataModule(
            case.path, x_key="x", transform=transform, on_bad_row="skip", batch_size=5, with_index=True
        )
        datamodule.setup("fit")
        return {
            row: x
            for batch, index in datamodule.train_dataloader()
            for x, row in zip(batch, index.tolist(), strict=True)
        }

    some, others = rows_of(draw), rows_of(plain_draw)
    assert others.keys() - some.keys() == {9}
    assert all(torch.equal(x, others[row]) for row, x in some.items())


def test_padded_batches_lengths_and_places_are_those_of_the_samples_that_are_left(tmp_path):
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        for number in range(6):
            file.create_dataset(f"d/{number}/x", data=numbered(5 + number), **GZIP)
    damage_chunk(path, "d/2/x", (4, 0))
    datamodule = LazyH5DataModule(
        path,
        fields=["x"],
        segments="d/*",
        sample="segment",
        collate_fn="pad",
        on_bad_row="skip",
        transform=lambda sample: sample if len(sample["x"]) != 9 else 1 / 0,
        batch_size=6,
        with_index=True,
    )
    datamodule.setup("fit")
    (batch,) = datamodule.train_dataloader()
    assert sorted(batch["index"].tolist()) == [0, 1, 3, 5]
    assert batch["segment"] == [f"d/{index}" for index in batch["index"].tolist()]
    assert batch["length"].tolist() == [5 + index for index in batch["index"].tolist()]
    for x, index in zip(batch["x"], batch["index"].tolist(), strict=True):
        assert np.array_equal(x[: 5 + index].numpy(), numbered(5 + index))


@pytest.mark.wide
@pytest.mark.parametrize("persists", [True, False])
def test_mixtures_and_weights_leave_out_samples_of_their_sources(tmp_path, persists):
    a, b = (chunk_of_rows(str(tmp_path / name)) for name in ("a.h5", "b.h5"))
    datamodule = LazyH5DataModule(
        mixture={"a": a.path, "b": b.path},
        fields=["x", "y"],
        on_bad_row="skip",
        batch_size=4,
        with_index=True,
        num_workers=2,
        workers={"persistent": persists},
    )
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    rows = [row for batch in loader for row in batch["index"].tolist()]
    bad = a.bad | {ROWS + row for row in b.bad}
    assert not bad & {*rows}
    assert {at: (entry.sample.file, entry.sample.place) for at, entry in ledger_of(datamodule).items()} == {
        at: ((a if at < ROWS else b).path, f"row {at % ROWS}") for at in bad
    }
    datamodule.teardown()


def refuse_rows_of_samples(sample):
    """Fail for two rows of each source."""
    return sample | {"x": refuse_some(sample["x"])}


@pytest.mark.parametrize("n_workers", [0, 1])
def test_rows_of_a_source_are_those_that_were_delivered(tmp_path, n_workers):
    """Neither rows of a damaged chunk count, nor those that a transform refuses."""
    a, b = (chunk_of_rows(str(tmp_path / name)) for name in ("a.h5", "b.h5"))
    datamodule = LazyH5DataModule(
        mixture={"a": a.path, "b": b.path},
        fields=["x", "y"],
        transform=refuse_rows_of_samples,
        on_bad_row="skip",
        batch_size=9,
        num_workers=n_workers,
    )
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    sources = Counter(source for batch in loader for source in batch["source"])
    counts = loader.counters.total()
    assert counts["left_out"] == 2 * (STEP + 2)
    assert sources == dict.fromkeys("ab", ROWS - STEP - 2)
    assert {name: counts[f"rows of {name}"] for name in "ab"} == sources
    datamodule.teardown()


@pytest.mark.parametrize("module", [LazyH5DataModule, RankCachedH5DataModule])
def test_rows_that_are_drawn_several_times_are_one_bad_sample(tmp_path, module):
    path = chunk_of_rows(str(tmp_path / "a.h5")).path
    with h5py.File(path, "a") as file:
        file["w"] = np.where(np.isin(np.arange(ROWS), [20, 1, 2, 3, 4]), 1.0, 0.0)
    datamodule = module(path, x_key="x", weights="w", on_bad_row="skip", batch_size=12, with_index=True)
    datamodule.setup("fit")
    rows = [row for _, index in datamodule.train_dataloader() for row in index.tolist()]
    (entry,) = datamodule._ledger.entries()
    assert (entry.sample.number, entry.sample.place) == (20, "row 20")
    assert {*rows} == {1, 2, 3, 4}
    assert len(rows) + int(datamodule.train_dataset.counters.total()["left_out"]) == ROWS


# Datasets ----------------------------------------------------------------------------------------------------------


DATASETS = {
    "lazy": lambda path, **options: H5LazyDataset(path, "x", with_index=True, **options),
    "cached": lambda path, **options: RankMemCachedH5Dataset(path, "x", with_index=True, **options),
    "combined": lambda path, **options: CombinedHDF5Dataset(path, ["x"], with_index=True, **options),
}


@pytest.mark.parametrize("name", DATASETS)
def test_datasets_leave_them_out_of_batches(tmp_path, name):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    dataset = DATASETS[name](case.path, on_bad_row="skip")
    batch = dataset.read_batch([19, 20, 21, 24])
    assert (batch["index"] if isinstance(batch, dict) else batch[-1]).tolist() == [19, 24]
    for workers in (0, 2):
        index = [
            row
            for batch in DataLoader(dataset, batch_size=5, num_workers=workers)
            for row in (batch["index"] if isinstance(batch, dict) else batch[-1]).tolist()
        ]
        assert index == sorted({*range(ROWS)} - case.bad)
    with pytest.raises(H5CorruptError, match="chunk 5"):
        dataset[21]
    with pytest.raises(H5CorruptError, match="chunk 5"):
        dataset.read_batch([20, 22])
    dataset.close()


def test_the_loader_for_own_loops_leaves_them_out(tmp_path):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    loader = create_optimized_dataloader(case.path, batch_size=5, load_fields=["x", "y"], on_bad_row="skip")
    assert sorted(row for batch in loader for row in batch["y"].tolist()) == sorted({*range(ROWS)} - case.bad)


def test_rows_of_a_small_damaged_array_are_those_that_h5py_reads(tmp_path):
    """Also by default: an error belongs to the rows of the damaged chunk."""
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    dataset = H5LazyDataset(case.path, "x")
    good = sorted({*range(ROWS)} - case.bad)
    assert np.array_equal(dataset.read_batch(good).numpy(), numbered()[good])
    with pytest.raises(H5CorruptError, match="chunk 5"):
        dataset[20]


def test_a_small_array_with_many_damaged_chunks_is_read_on_demand(tmp_path):
    """Not each of its chunks is tried at once; rows that can be read are right, in any order."""
    path = str(tmp_path / "a.h5")
    values = numbered(400)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(1, WIDTH), compression="gzip")
    bad = [row for row in range(400) if row % 4]
    for row in bad:
        damage_chunk(path, "x", (row, 0))
    dataset = H5LazyDataset(path, "x")
    good = [row for row in range(400) if row not in bad]
    assert np.array_equal(dataset.read_batch(good[::-1]).numpy(), values[good[::-1]])
    for row in bad[::20]:
        with pytest.raises(H5CorruptError, match=rf"rows {row} to {row}\)"):
            dataset[row]
    assert np.array_equal(dataset.read_batch(good).numpy(), values[good])


def test_bad_samples_are_not_tried_again(tmp_path, nothing_held, monkeypatch):
    """A second epoch reads each batch with one twice: as a whole, and without it."""
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    dataset = H5LazyDataset(case.path, "x", on_bad_row="skip")
    reads = []
    begin = H5LazyDataset.begin

    def counted(self, rows, epoch=None, **options):
        reads.append(len(rows))
        return begin(self, rows, epoch, **options)

    monkeypatch.setattr(H5LazyDataset, "begin", counted)
    for n_reads in (9, 2):
        assert len(dataset.read_batch([19, 20, 21, 24])) == 2
        assert len(reads) <= n_reads
        reads.clear()


def test_random_windows_may_come_to_other_rows_in_another_epoch(tmp_path):
    case = windows(str(tmp_path / "a.h5"))
    arguments = case.arguments | {"window": {"length": 4, "random": True, "stride": 2}}
    differ = []
    for seed in range(9):
        epochs, datamodule = epochs_of(LazyH5DataModule, case, seed=seed, **arguments)
        left_out = [{*range(case.n_samples)} - {i for batch in epoch for i in batch} for epoch in epochs]
        assert left_out[0]
        assert left_out[0] | left_out[1] == {entry.sample.number for entry in datamodule._ledger.entries()}
        differ.append(left_out[0] != left_out[1])
    assert any(differ)


# Ranks -------------------------------------------------------------------------------------------------------------


def fit_on_rank(rank, world_size, path, options, module=LazyH5DataModule, ckpt_path=None, save=None):
    model = Batches()
    datamodule = module(
        path,
        x_key="x",
        y_key="y",
        with_index=True,
        **{"on_bad_row": "skip", "batch_size": 4} | options,
    )
    trainer = quiet_trainer(devices=world_size, strategy="ddp", max_epochs=2, num_sanity_val_steps=0)
    try:
        trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    except Exception as error:
        error.args = (f"{error} {getattr(error, '__notes__', '')}",)
        raise
    if save is not None:
        trainer.save_checkpoint(save)
    return model.train_rows, model.ledger


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["threads", "workers"])
@ALL
def test_all_ranks_know_what_any_of_them_left_out(tmp_path, world_size, options, module):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    ranks = values(run_ranks(fit_on_rank, world_size, tmp_path, world_size, case.path, options, module))
    for epoch in range(2):
        assert len({len(rows[epoch]) for rows, _ in ranks}) == 1
        assert sorted(i for rows, _ in ranks for batch in rows[epoch] for i in batch) == sorted(
            {*range(ROWS)} - case.bad
        )
    for _, ledger in ranks:
        assert ledger == dict.fromkeys(case.bad, 2)


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["contiguous", "interleave"])
def test_ranks_that_hold_rows_together_know_what_the_others_could_not_load(tmp_path, mode):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    options = {"memory": {"mode": mode, "share": True}}
    ranks = values(run_ranks(fit_on_rank, 2, tmp_path, 2, case.path, options, RankCachedH5DataModule))
    assert sorted(i for rows, _ in ranks for batch in rows[0] for i in batch) == sorted({*range(ROWS)} - case.bad)
    assert all(ledger == dict.fromkeys(case.bad, 2) for _, ledger in ranks)


@pytest.mark.wide
def test_the_limit_is_over_all_ranks(tmp_path):
    """Each of two ranks has fewer bad samples than the limit allows, and both have more."""
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    options = {"on_bad_row": {"limit": 3}}
    outcomes = run_ranks(fit_on_rank, 2, tmp_path, 2, case.path, options)
    assert all(outcome.exitcode for outcome in outcomes)
    text = "4 different samples could not be read or transformed, and on_bad_row leaves out 3 at most (limit)"
    assert any(outcome.error is not None and text in outcome.error for outcome in outcomes)


@pytest.mark.wide
def test_the_ledger_of_a_checkpoint_is_of_all_ranks(tmp_path):
    case = chunk_of_rows(str(tmp_path / "a.h5"))
    path = str(tmp_path / "last.ckpt")
    values(run_ranks(fit_on_rank, 2, tmp_path, 2, case.path, {}, LazyH5DataModule, None, path))
    (state,) = (
        value
        for value in torch.load(path, weights_only=True).values()
        if isinstance(value, dict) and "bad_samples" in value
    )
    assert {number: n_times for _, number, *_, n_times in state["bad_samples"]} == dict.fromkeys(case.bad, 2)


@pytest.mark.wide
def test_ranks_know_all_of_long_ledgers(tmp_path):
    """Each rank has more bad samples than it posts together."""
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = numbered(600), np.arange(600)
    options = {"on_bad_row": {"limit": 900}, "transform": refuse_most, "batch_size": 100, "shuffle": False}
    ranks = values(run_ranks(fit_on_rank, 2, tmp_path, 2, path, options))
    expected = {row: 2 for row in range(600) if row % 8}
    assert all(ledger == expected for _, ledger in ranks)


# Blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_bytes", [4000, 0], ids=["cache", "no cache"])
def test_good_rows_of_a_block_with_several_chunks_are_read(tmp_path, nothing_held, n_bytes):
    """Stacked arrays have blocks of the largest chunks; a smaller one that is damaged has fewer rows."""
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        for key, rows in (("a", 6), ("b", 2)):
            file.create_dataset(key, data=numbered(), chunks=(rows, WIDTH), compression="gzip")
    damage_chunk(path, "b", (20, 0))
    dataset = H5LazyDataset(path, {"x": ["a", "b"]}, files={"cache_bytes": n_bytes})
    good = sorted({*range(ROWS)} - {20, 21})
    assert np.array_equal(dataset.read_batch(good)["x"], np.stack([numbered()[good]] * 2, -1))
    with pytest.raises(H5CorruptError, match=r"rows 20 to 21\) of 'b'"):
        dataset.read_batch([19, 21])


def test_good_rows_of_a_run_without_chunks_are_read(tmp_path, nothing_held):
    """An order of runs reads a megabyte together; a digest is of less."""
    n_rows, width = 24, 1 << 16
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(n_rows, dtype="i4")[:, None] + np.zeros(width, "i4")
        offset = file["x"].id.get_offset()
    assert check_files(path, write_digests=True).digested
    flip(path, offset + 13 * 4 * width + 99)
    case = BadFile(path, {"x_key": "x", "files": {"verify": "digest"}}, {13}, n_rows, "digest")
    check_ranks(LazyH5DataModule, case, 1, shuffle="chunks")


def rows_of_mixture(rank, a, b):
    datamodule = LazyH5DataModule(
        mixture={"a": a, "b": b},
        fields=["x"],
        on_bad_row="skip",
        batch_size=8,
        with_index=True,
        files={"cache_bytes": 16 * 4 * WIDTH},
    )
    with patch.object(row_table, "HELD_BYTES", -1):
        datamodule.setup("fit")
    return sorted(row for batch in datamodule.train_dataloader() for row in batch["index"].tolist())


@pytest.mark.wide
def test_sources_of_a_mixture_give_back_their_places_after_an_error(tmp_path):
    """Otherwise the cache of a source is full once as many batches failed, and reading waits forever."""
    a, b = (str(tmp_path / name) for name in ("a.h5", "b.h5"))
    for path in (a, b):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=numbered(), chunks=(1, WIDTH), compression="gzip")
    for row in range(0, ROWS, 3):
        damage_chunk(a, "x", (row, 0))
    (rows,) = values(run_ranks(rows_of_mixture, 1, tmp_path, a, b))  # which are killed if they hang
    assert rows == sorted({*range(2 * ROWS)} - {*range(0, ROWS, 3)})
