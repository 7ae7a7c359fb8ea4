"""Random runs with stops and resumes, and what each optimizer step was really trained on, as the model saw it.

Ranks run one after the other in this process: the data module is told rank and number of ranks. A run resumes on
another number of ranks, with another batch size or accumulation, from the checkpoint of its first rank.
"""

import random
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning_models import SaveOnException, quiet_trainer

from lightning_h5 import CombinedHDF5DataModule, H5ResumeError, H5StatsMonitor, LazyH5DataModule, RankCachedH5DataModule

ROWS = (61, 38)
SLOPE = {0: {"a": 1, "b": 0}, 30: {"a": 0, "b": 1}}
LENGTHS = (9, 17, 4, 23, 12, 30, 6, 11, 8, 19)


def noisy(sample, rng):
    """A transform that draws."""
    return sample | {"x": sample["x"] + rng.normal()}


def write_files(folder):
    """Two files of rows with weights, and one of groups with steps."""
    for name, n_rows in zip("ab", ROWS, strict=True):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=np.arange(n_rows, dtype="f4")[:, None], chunks=(5, 1), compression="gzip")
            file["id"] = np.arange(n_rows) + 1000 * (name == "b")
            file["weight"] = np.arange(n_rows) % 4
    with h5py.File(folder / "segments.h5", "w") as file:
        for number, length in enumerate(LENGTHS):
            file[f"g{number}/x"] = np.arange(length, dtype="f4")[:, None] + 100 * number
            file[f"g{number}/id"] = np.arange(length) + 100 * number


class Seen(NamedTuple):
    """A batch as training had it: its place, the samples' numbers, segments and steps, and their values.

    ``ids`` are those of each sample's rows, by which the files know them.
    """

    epoch: int
    batch: int
    index: list
    segment: list | None
    step: list | None
    ids: list
    x: object


class Watcher(LightningModule):
    """Notes each batch under the optimizer step that it belongs to."""

    def __init__(self, fail_after=None):
        super().__init__()
        self.layer, self.seen, self.fail_after = torch.nn.Linear(1, 1), [], fail_after

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.fail_after:
            raise RuntimeError("stop here")
        names = ("index", "segment", "step")
        x, index, segment, step = (batch["x"], *(batch.get(name) for name in names))
        steps = None if step is None else step.tolist()
        ids = [{*values} for values in batch["id"].reshape(len(index), -1).tolist()]
        seen = Seen(self.current_epoch, batch_idx, index.tolist(), segment, steps, ids, x)
        self.seen.append((self.trainer.global_step, seen))
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Life(NamedTuple):
    """One start of the program: how it trains, and whether it fails after ``n_batches`` or ends."""

    world_size: int
    batch_size: int
    accumulated: int
    n_batches: int
    fails: bool


class Run(NamedTuple):
    """A run: its data module and options of it and of the Trainer, and its lives."""

    kind: type
    data: dict
    trainer: dict
    lives: list

    @classmethod
    def drawn(cls, seed):
        draw = random.Random(seed)
        kind = draw.choice([LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
        data = {"fields": ["x", "id"], "with_index": True, "seed": draw.choice([None, 0, 5])}
        data |= draw.choice(kinds_of_samples(kind))
        if "sample" not in data:  # of ten segments nothing may be left
            data |= draw.choice([{}, {"drop_last": True}])
        if kind is RankCachedH5DataModule:
            memory = {
                "mode": draw.choice(["contiguous", "interleave"]),
                "reshard_every_n_epochs": draw.choice([0, 1, 2]),
            }
            if "max_tokens" in str(data):
                memory["reshard_every_n_epochs"] = 0
            data["memory"] = memory
        if "shuffle" not in data:
            data["shuffle"] = draw.choice([True, True, False, "chunks", "global", {"mode": "chunks", "streams": 3}])
        trainer = draw.choice([{}, {}, {}, {"limit_train_batches": draw.choice([3, 0.6])}, {"overfit_batches": 4}])
        lives, first = [], Life(draw.randint(1, 4), draw.randint(1, 6), draw.choice([1, 1, 2, 3]), 0, False)
        for _ in range(draw.randint(1, 4)):
            first = first._replace(n_batches=draw.randint(3, 30), fails=draw.random() < 0.6)
            lives.append(first)
            if draw.random() < 0.5:
                world_size, batch_size = draw.randint(1, 4), draw.randint(1, 6)
                first = first._replace(world_size=world_size, batch_size=batch_size, accumulated=draw.randint(1, 3))
        return cls(kind, data, trainer, lives)


def kinds_of_samples(kind):
    """Options of data modules that decide which samples there are, and how often they come."""
    both, groups = ["a.h5", "b.h5"], {"train_path": "segments.h5", "segments": "*"}
    options = [
        {"train_path": "a.h5"},
        {"train_path": both},
        {"train_path": both, "where": {"id": {"min": 10}}},
        {"train_path": both, "split": 0.2},
        {"train_path": both, "weights": "weight"},
        groups | {"window": 3},
        groups | {"window": {"steps": [-1, 2], "stride": 2, "pad": "edge"}},
        groups | {"window": {"length": 4, "stride": 2, "random": True}},
        groups | {"sample": "segment", "collate_fn": "pad"},
        groups | {"sample": "segment", "collate_fn": "pad", "segments": {"groups": "*", "max_tokens": 40}},
        groups | {"window": 2, "split": 0.3},
    ]
    if kind is not RankCachedH5DataModule:
        options += [groups | {"sample": "segment", "collate_fn": "pad", "segments": {"groups": "*", "bucket": True}}]
        sources = {"a": "a.h5", "b": "b.h5"}
        options += [
            {"mixture": {"sources": sources} | how}
            for how in (
                {"strategy": "concat"},
                {"strategy": "weighted", "weights": [0.7, 0.3]},
                {"strategy": "weighted", "weights": [0.7, 0.3], "mix": "rows", "epoch_length": "max"},
                {"strategy": "weighted", "weights": {0: {"a": 1, "b": 1}, 9: {"a": 4, "b": 1}}, "epoch_length": 8},
                {"strategy": "weighted", "weights": SLOPE, "between": "linear", "mix": "rows"},
                {"strategy": "round_robin", "epoch_length": 6},
                {"strategy": "alternating", "pattern": ["a", "a", "b"], "mix": "rows"},
                {"strategy": "sequential"},
            )
        ]
    return options


class Played(NamedTuple):
    """What came of a run.

    Attributes:
        datamodule: of the last life's first rank.
        checkpoint: of the last life.
        seen: for each optimizer step the batches of each rank, as the model saw them.
        n_resumed: lives that went on with a checkpoint.
    """

    datamodule: object
    checkpoint: Path
    seen: dict
    n_resumed: int


def play(run, folder):
    """Train through all lives of a run."""
    seen, checkpoint, datamodule, n_resumed = {}, None, None, 0
    for number, life in enumerate(run.lives):
        saved = folder / f"life{number}.ckpt"
        started = None if checkpoint is None else torch.load(checkpoint, weights_only=True)["global_step"]
        by_step = defaultdict(dict)
        try:
            for rank in range(life.world_size):
                module, batches = train(run, life, rank, saved if rank == 0 else None, checkpoint)
                datamodule = module if rank == 0 else datamodule
                for step, batch in batches:
                    by_step[step].setdefault(rank, []).append(batch)
        except H5ResumeError:  # batches of one length, or of one source, keep their size within an epoch
            break
        n_resumed += started is not None
        n_steps = torch.load(saved, weights_only=True)["global_step"]
        seen = {step: batches for step, batches in seen.items() if step < (started or 0)}
        seen |= {step: batches for step, batches in by_step.items() if step < n_steps}
        checkpoint, last = saved, datamodule
    return Played(last, checkpoint, seen, n_resumed)


def train(run, life, rank, saved, checkpoint):
    """One life on one rank: the data module, and the batches with their steps."""
    model = Watcher(fail_after=life.n_batches if life.fails else None)
    datamodule = run.kind(
        **run.data,
        batch_size=life.batch_size,
        transform=noisy,
        distributed={"rank": rank, "world_size": life.world_size},
    )
    callbacks = [H5StatsMonitor(print_summary=False)]
    callbacks += [] if saved is None else [SaveOnException(saved.parent, saved.stem)]
    before = 0 if checkpoint is None else torch.load(checkpoint, weights_only=True)["global_step"]
    options = {"max_epochs": -1, "max_steps": before + life.n_batches if not life.fails else -1}
    trainer = quiet_trainer(
        **options, **run.trainer, accumulate_grad_batches=life.accumulated, callbacks=callbacks, num_sanity_val_steps=0
    )
    try:
        trainer.fit(model, datamodule=datamodule, ckpt_path=checkpoint)
    except RuntimeError as error:
        if str(error) != "stop here":
            raise
    if saved is not None and not saved.exists():
        trainer.save_checkpoint(saved)
    return datamodule, model.seen


def wrong_answers(run, played, draw, n):
    """Ask for ``n`` random steps and ranks; return the questions that were answered wrongly, with both answers."""
    wrong = []
    loaded = run.kind.load_from_checkpoint(played.checkpoint, transform=noisy)
    for _ in range(n):
        step = draw.choice([*played.seen])
        batches = played.seen[step]
        rank = draw.choice([None, *batches])
        datamodule = draw.choice([loaded, played.datamodule])
        expected = [
            (number, batch) for number in sorted(batches) for batch in batches[number] if rank in (None, number)
        ]
        report = datamodule.rows_of_step(step, rank)
        if [line_of(report, sample) for sample in report] != [line for at in expected for line in lines_of(*at)]:
            wrong.append((step, rank, report, expected))
            continue
        ids = [ids for _, batch in expected for ids in batch.ids]
        if not all(id_of(sample) in own for sample, own in zip(report, ids, strict=True)):
            wrong.append((step, rank, report, expected))
            continue
        copies = datamodule.batches_of_step(step, rank)
        if not all(torch.equal(copy["x"], batch.x) for copy, (_, batch) in zip(copies, expected, strict=True)):
            wrong.append((step, rank, copies, expected))
    return wrong


def line_of(report, sample):
    return sample.rank, report.epoch, sample.batch, sample.index, sample.segment, sample.step


def id_of(sample):
    """What the file has in the row that is named, or in the segment's step."""
    with h5py.File(sample.file) as file:
        return int(file["id"][sample.row] if sample.segment is None else file[sample.segment]["id"][sample.step])


def lines_of(rank, batch):
    """The lines of the answer for a batch."""
    segments, steps = (values or [None] * len(batch.index) for values in (batch.segment, batch.step))
    return [
        (rank, batch.epoch, batch.batch, index, segment, step)
        for index, segment, step in zip(batch.index, segments, steps, strict=True)
    ]
