"""A ``BasePredictionWriter`` is told which rows each batch holds, as with a loader of torch's."""

from itertools import chain

import numpy as np
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.demos.boring_classes import BoringModel
from processes import run_ranks, values

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5LazyDataset,
    LazyH5DataModule,
    RankCachedH5DataModule,
    create_optimized_dataloader,
)

ROWS, BATCH = 37, 4


@pytest.fixture
def path(make_h5):
    return make_h5({"x": np.arange(ROWS), "y": np.arange(ROWS)})


class Model(BoringModel):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch["index"].tolist()


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epoch = [], None

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        assert batch_indices == prediction
        self.batches.append((dataloader_idx, batch_indices))

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.epoch = batch_indices


def predicted(*loaders, devices=1, strategy="auto", **source):
    """What a writer was told: (number of the loader, rows) of each batch, and the rows of each batch by loader."""
    writer = Writer()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, callbacks=[writer], **quiet)
    trainer.predict(Model(), *loaders, **source)
    return writer.batches, writer.epoch


MODULES = {
    "lazy": lambda path, **options: LazyH5DataModule(predict_path=path, x_key={"x": "x"}, **options),
    "rank cached": lambda path, **options: RankCachedH5DataModule(predict_path=path, x_key={"x": "x"}, **options),
    "combined": lambda path, **options: CombinedHDF5DataModule(predict_path=path, fields=["x"], **options),
}


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.wide)])
@pytest.mark.parametrize("kind", MODULES)
def test_the_rows_of_each_batch_are_told(path, kind, num_workers):
    module = MODULES[kind](path, batch_size=BATCH, with_index=True, num_workers=num_workers)
    for _ in range(2):
        batches, (of_epoch,) = predicted(datamodule=module)
        assert [rows for _, rows in batches] == of_epoch
        assert list(chain(*of_epoch)) == list(range(ROWS))
        assert len(of_epoch) == -(-ROWS // BATCH)


def test_the_rows_of_several_loaders_are_told_by_loader(path):
    dataset = H5LazyDataset(path, {"x": "x"}, with_index=True)
    loaders = [create_optimized_dataloader(dataset, size, is_training=False) for size in (8, 16)]
    next(iter(loaders[0]))
    batches, by_loader = predicted(loaders)
    assert [list(chain(*rows)) for rows in by_loader] == [list(range(ROWS))] * 2
    assert [(number, rows) for number in range(2) for rows in by_loader[number]] == batches


def ranks_rows(rank, kind, path):
    module = MODULES[kind](path, batch_size=BATCH, with_index=True)
    return predicted(devices=2, strategy="ddp", datamodule=module)[1][0]


@pytest.mark.wide
@pytest.mark.parametrize("kind", MODULES)
def test_the_rows_are_those_among_all_ranks(path, tmp_path, kind):
    ranks = values(run_ranks(ranks_rows, 2, tmp_path, kind, path))
    assert [row for rank in ranks for rows in rank for row in rows] == list(range(ROWS))
