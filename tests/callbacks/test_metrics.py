"""Figures of loaders as torchmetrics metrics, with and without the callback."""

import copy
import logging
import pickle

import h5py
import numpy as np
import pytest
import torch
import torch.distributed
import torchmetrics
from lightning.pytorch import LightningModule
from lightning_models import Recorder, quiet_trainer
from processes import run_ranks, values
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import lightning_h5
from lightning_h5 import H5LazyDataset, H5StatsMonitor, H5ValueError, LazyH5DataModule, create_optimized_dataloader
from lightning_h5.metrics import CacheMib, LoaderMetrics, SamplesPerSecond, WaitFraction, WaitMs

SINGLE = [name for name, home in lightning_h5._HOME_OF.items() if home == "metrics" and name != "LoaderMetrics"]


@pytest.fixture
def file(make_h5):
    return make_h5({"x": np.arange(103 * 4, dtype="f4").reshape(103, 4)})


def rows(metric):
    return metric.counts()["rows"]


def test_each_figure_is_a_metric_and_they_agree(file):
    loader = create_optimized_dataloader(H5LazyDataset(file, "x"), 8)
    every, single = LoaderMetrics(loader), [getattr(lightning_h5, name)(loader) for name in SINGLE]
    for _ in loader:
        pass
    for metric in (every, *single):
        assert isinstance(metric, torchmetrics.Metric)
        metric.stop()
        metric.update(loader)
    figures = every.compute()
    assert {metric.figure for metric in single} == set(figures)
    for metric in single:
        metric.amounts = every.amounts.clone()  # their clocks were stopped one after the other
        assert float(metric.compute()) == float(figures[metric.figure])
    assert all(value.shape == () and value.dtype == torch.float64 for value in figures.values())


def test_an_interval_counts_from_the_last_reset_and_no_row_twice(file):
    loader = create_optimized_dataloader(H5LazyDataset(file, "x"), 8)
    metric, batches, counted = LoaderMetrics(loader), iter(loader), []
    for n in (1, 3, 2):
        for _ in range(n):
            next(batches)
        metric.update(loader)
        metric.update(loader)  # nothing new
        counted.append(rows(metric))
        metric.reset()
    assert counted == [8, 24, 16]
    late = LoaderMetrics()
    late.update(loader)  # not known before: since the loader was made
    assert rows(late) == 48


def test_a_stopped_clock_adds_no_time_but_rows_count(file):
    loader = create_optimized_dataloader(H5LazyDataset(file, "x"), 8)
    metric = LoaderMetrics(loader)
    metric.stop()
    seconds = metric.counts()["seconds"]
    for _ in loader:
        pass
    metric.update(loader)
    assert metric.counts()["seconds"] == seconds
    assert rows(metric) == 103
    metric.start()
    metric.update(loader)
    assert metric.counts()["seconds"] > seconds


def test_forward_gives_this_rank_and_keeps_counting(file):
    loader = create_optimized_dataloader(H5LazyDataset(file, "x"), 8)
    metric = CacheMib(loader)
    values = [float(metric(loader)) for _ in loader]
    assert len(values) == len(loader)
    assert rows(metric) == 103


def test_copies_go_on_where_the_original_was(file):
    loader = create_optimized_dataloader(H5LazyDataset(file, "x"), 8)
    metric, batches = LoaderMetrics(loader), iter(loader)
    next(batches)
    metric.update(loader)
    clone = copy.deepcopy(metric)
    next(batches)
    clone.update(loader)
    assert (rows(metric), rows(clone)) == (8, 16)
    assert rows(pickle.loads(pickle.dumps(metric))) == 8


def test_a_module_logs_a_figure_as_any_metric(file):
    class Logs(Recorder):
        def on_train_start(self):
            self.waited = WaitMs(self.trainer.train_dataloader)

        def training_step(self, batch, batch_idx):
            self.waited.update(self.trainer.train_dataloader)
            self.log("waited", self.waited, on_epoch=True, on_step=False)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Logs(), datamodule=LazyH5DataModule(file, x_key="x", batch_size=8, with_index=True))
    assert float(trainer.callback_metrics["waited"]) > 0


def test_a_loader_of_other_data_is_refused():
    with pytest.raises(H5ValueError, match="reads no dataset of lightning_h5"):
        LoaderMetrics().update(DataLoader(TensorDataset(torch.zeros(3))))


# Torch's own loader -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: Subset(data, range(103)), lambda d: ConcatDataset([d])]
)
def test_rows_of_torch_loaders_are_counted_and_waiting_is_left_out(file, workers, wrap):
    dataset = H5LazyDataset(file, "x", with_index=True)
    loader = DataLoader(wrap(dataset), batch_size=8, num_workers=workers)
    monitor = Kept(2, print_summary=False)
    for _ in range(2):  # a second fit begins again
        quiet_trainer(max_epochs=1, callbacks=[monitor]).fit(Trains(), loader)
        assert monitor.rows == 103
    assert {"h5/samples_per_second_epoch", "h5/cache_mib_epoch"} <= set(monitor.logged)
    assert not {"h5/wait_ms_epoch", "h5/wait_fraction_epoch"} & set(monitor.logged)
    assert monitor.logged["h5/samples_per_second_epoch"] > 0
    waiting = WaitFraction(loader)
    waiting.update(loader)
    assert waiting.compute().isnan()


class Trains(LightningModule):
    """Has no validation, about which Lightning would warn."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Kept(H5StatsMonitor):
    """Keeps what it logged and counted."""

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        if "train" in self._meters:
            self._meters["train"].whole.update(trainer.train_dataloader)
            self.rows = self._meters["train"].whole.counts()["rows"]

    def on_train_end(self, trainer, pl_module):
        self.logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "h5/" in name}


def test_loaders_of_other_data_have_no_figures_and_that_is_said_once(caplog):
    monitor = Kept(1)
    index = torch.arange(20)
    loader = DataLoader(TensorDataset(torch.zeros(20, 2), index), batch_size=4)
    with caplog.at_level(logging.WARNING, "lightning_h5"):
        quiet_trainer(max_epochs=2, callbacks=[monitor]).fit(Trains(), loader)
    assert monitor.logged == {}
    assert [record.message.split(":")[0] for record in caplog.records if "H5StatsMonitor" in record.message] == [
        "H5StatsMonitor logs no figures of 'train'"
    ]


def test_rows_that_a_callback_reads_are_not_counted_for_a_loader(file):
    dataset = H5LazyDataset(file, "x")
    loader = create_optimized_dataloader(dataset, 8)
    metric = LoaderMetrics(loader)
    for _ in loader:
        dataset[3], dataset.read_batch([1, 2])
    metric.update(loader)
    assert rows(metric) == 103


# Ranks --------------------------------------------------------------------------------------------------------------


def count_of_rank(rank, path):
    calls, gather = [], torch.distributed.all_gather
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        loader = create_optimized_dataloader(H5LazyDataset(path, "x"), 8, rank=rank, world_size=2)
        every, speed = LoaderMetrics(loader), SamplesPerSecond(loader)
        for _ in loader:
            pass
        for metric in (every, speed):
            metric.update(loader)
        torch.distributed.all_gather = lambda *a, **k: (calls.append(1), gather(*a, **k))[1]
        figures = every.compute()
        n_calls = len(calls)
        return (
            n_calls,
            rows(every),
            every.counts()["seconds"],
            float(figures["samples_per_second"]),
            float(speed.compute()),
        )
    finally:
        torch.distributed.all_gather = gather
        torch.distributed.destroy_process_group()


@pytest.mark.wide
def test_ranks_are_summed_in_one_collective(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as h5:
        h5["x"] = np.zeros((103, 4), "f4")
    ranks = values(run_ranks(count_of_rank, 2, tmp_path / "ranks", path))
    assert [rank[0] for rank in ranks] == [1, 1]
    assert sum(rank[1] for rank in ranks) == 103
    seconds = sum(rank[2] for rank in ranks) / 2
    assert all(rank[3] == pytest.approx(103 / seconds) for rank in ranks)
    assert ranks[0][4] == ranks[1][4]
