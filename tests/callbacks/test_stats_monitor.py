"""``H5StatsMonitor``: the keys it logs, and the table."""

import csv
import logging
import re
import time

import numpy as np
import pytest
import torch
from arguments import nested
from factories import Stored
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning_models import Recorder, quiet_trainer

from lightning_h5 import CombinedHDF5DataModule, H5StatsMonitor, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.callbacks.meters import REQUESTS, WAITS, TransferTimer
from lightning_h5.callbacks.summary_table import stage_table
from lightning_h5.counters import COUNTED, RequestTimes, WaitTimes
from lightning_h5.metrics import figures_of
from lightning_h5.staging import policy

KEYS = {
    "samples_per_second",
    "read_mib_per_second",
    "decoded_mib_per_second",
    "wait_fraction",
    "wait_ms",
    "cache_hit_rate",
    "cache_mib",
}
STAGED = {"origin_mib", "origin_requests", "origin_wait_ms", "mirror_hit_rate"}


@pytest.fixture
def file(make_h5):
    return make_h5({"x": np.zeros((64, 2), "f4"), "y": np.arange(64)})


def module(file, **options):
    return LazyH5DataModule(file, file, **nested(x_key="x", y_key="y", batch_size=8, with_index=True, **options))


class SlowStep(Recorder):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def slow(x):
    time.sleep(0.003)
    return x


def logged(file, tmp_path, model, monitor, **options):
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), callbacks=[monitor], log_every_n_steps=4)
    trainer.fit(model, datamodule=module(file, **options))
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        return trainer, list(csv.DictReader(text))


def table(text):
    """Cells of the printed table, by stage and by name of the figure; and the lines below it."""
    lines = text.split("\nlightning_h5: rows from HDF5")[1].splitlines()
    rules = [at for at, line in enumerate(lines) if line.startswith("---")]
    assert len(rules) == 3
    stages = lines[rules[1] - 1].split()
    cells = {stage: {} for stage in stages}
    for line in lines[rules[1] + 1 : rules[2]]:
        name, *values = re.split("  +", line)
        for stage, value in zip(stages, values, strict=True):
            cells[stage][name] = value
    return cells, lines[rules[2] + 1 :]


def column(lines, name):
    return [float(line[name]) for line in lines if line.get(name)]


def test_every_key_is_logged_by_steps_and_by_epochs(file, tmp_path):
    trainer, lines = logged(file, tmp_path, Recorder(), H5StatsMonitor(print_summary=False))
    for key in KEYS:
        assert len(column(lines, f"h5/{key}")) == 4  # two epochs of eight steps, each four
        assert len(column(lines, f"h5/{key}_epoch")) == 2
    assert {f"h5/{key}_epoch" for key in KEYS} <= set(trainer.callback_metrics)


def test_waiting_is_told_from_training(file, tmp_path):
    monitors = [H5StatsMonitor(print_summary=False) for _ in range(2)]
    _, busy = logged(file, tmp_path / "a", SlowStep(), monitors[0])
    _, starved = logged(file, tmp_path / "b", Recorder(), monitors[1], transform=slow, eval_transform=abs)
    shares_busy, shares_starved = (sorted(column(lines, "h5/wait_fraction")) for lines in (busy, starved))
    assert shares_busy[len(shares_busy) // 2] < shares_starved[len(shares_starved) // 2]  # on a busy machine, too
    assert min(column(starved, "h5/wait_ms")) >= 8 * 3
    assert all(0 <= share <= 1 for lines in (busy, starved) for share in column(lines, "h5/wait_fraction"))


def test_it_needs_no_logger_and_prints_a_column_a_stage(file, capsys):
    quiet_trainer(num_sanity_val_steps=0).fit(Recorder(), datamodule=module(file))
    cells, _ = table(capsys.readouterr().out)
    assert [*cells] == ["train", "validate"]
    assert all((each["batches"], each["rows"]) == ("16", "128") for each in cells.values())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_of_its_own_has_a_table_of_its_own(file, capsys, stage):
    datamodule = LazyH5DataModule(None, file, file, file, x_key="x", batch_size=8, with_index=True)
    getattr(quiet_trainer(), stage)(Recorder(), datamodule=datamodule)
    cells, _ = table(capsys.readouterr().out)
    assert [*cells] == [stage]
    assert (cells[stage]["batches"], cells[stage]["rows"]) == ("8", "64")


def test_the_table_can_be_left_out_and_the_prefix_chosen(file, tmp_path, capsys):
    _, lines = logged(file, tmp_path, Recorder(), H5StatsMonitor(2, print_summary=False, prefix="data/"))
    assert len(column(lines, "data/wait_ms")) == 8
    assert "lightning_h5" not in capsys.readouterr().out


def test_a_second_fit_begins_anew(file, capsys):
    datamodule = module(file)
    for _ in range(2):
        quiet_trainer(max_epochs=1, num_sanity_val_steps=0).fit(Recorder(), datamodule=datamodule)
        cells, _ = table(capsys.readouterr().out)
        assert (cells["train"]["batches"], cells["train"]["rows"]) == ("8", "64")


def test_a_senseless_interval_is_refused():
    with pytest.raises(H5ValueError, match="log_every_n_steps=0"):
        H5StatsMonitor(0)


class Notes(Logger):
    """A logger that takes what Lightning's own take (W&B's, MLflow's ...) and keeps it."""

    def __init__(self):
        super().__init__()
        self.metrics, self.name, self.version = [], "notes", 0

    name = version = None

    def log_metrics(self, metrics, step=None):
        assert isinstance(step, int)
        assert all(type(value) is float for name, value in metrics.items() if name.startswith("h5/"))
        self.metrics.append((step, metrics))

    def log_hyperparams(self, *given, **named):
        pass


def test_every_logger_gets_the_same_figures(file, tmp_path):
    loggers = [CSVLogger(tmp_path), Notes(), TensorBoardLogger(tmp_path)]
    trainer = quiet_trainer(logger=loggers, log_every_n_steps=4, max_epochs=1)
    trainer.fit(Recorder(), datamodule=module(file))
    with open(loggers[0].log_dir + "/metrics.csv") as text:
        in_csv = column(csv.DictReader(text), "h5/wait_ms")
    noted = [metrics["h5/wait_ms"] for _, metrics in loggers[1].metrics if "h5/wait_ms" in metrics]
    assert [step for step, metrics in loggers[1].metrics if "h5/wait_ms" in metrics] == [3, 7]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(loggers[2].log_dir)
    events.Reload()
    assert {f"h5/{key}" for key in KEYS} <= set(events.Tags()["scalars"])
    np.testing.assert_allclose([event.value for event in events.Scalars("h5/wait_ms")], noted, rtol=1e-6)
    np.testing.assert_allclose(in_csv, noted, rtol=1e-6)


def test_figures_can_be_shown_in_the_progress_bar(file):
    for shows in (False, True):
        trainer = quiet_trainer(max_epochs=1, log_every_n_steps=4, callbacks=[H5StatsMonitor(progress_bar=shows)])
        trainer.fit(Recorder(), datamodule=module(file))
        shown = {"h5/samples_per_second", "h5/wait_fraction"} & set(trainer.progress_bar_metrics)
        assert len(shown) == (2 if shows else 0)


class Stumbles:
    """Takes its time for one row."""

    def __call__(self, x):
        if x[0] == 37:
            time.sleep(3)
        return x


def test_a_slow_batch_is_reported_with_its_step(make_h5, caplog, capsys):
    path = make_h5(x=np.arange(64, dtype="f4")[:, None])
    monitor = H5StatsMonitor(slow_batch_seconds=1.5)
    data = LazyH5DataModule(path, x_key="x", batch_size=8, shuffle=False, transform=Stumbles(), with_index=True)
    with caplog.at_level(logging.WARNING):
        quiet_trainer(max_epochs=1, callbacks=[monitor]).fit(Recorder(), datamodule=data)
    (record,) = [record for record in caplog.records if "slow_batch_seconds" in record.message]
    assert re.match(r"rank 0 waited \d+\.\d s for batch 4 of epoch 0 \(step 4\)", record.message)
    assert "1 batch took longer than 1.5 s to arrive; the log has the steps." in capsys.readouterr().out


def test_rows_that_stay_decoded_are_hits_and_take_memory(make_h5, tmp_path, nothing_held):
    rows = np.zeros((64, 1024), "f4")
    path = make_h5(x=Stored(rows, "chunked", (16, 1024), options={"compression": "gzip"}))
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), max_epochs=3, log_every_n_steps=4)
    trainer.fit(Recorder(), datamodule=LazyH5DataModule(path, x_key="x", batch_size=8, with_index=True))
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        lines = list(csv.DictReader(text))
    first, *later = column(lines, "h5/cache_hit_rate_epoch")
    assert 0 <= first < 1
    assert later == [1, 1]
    assert column(lines, "h5/cache_mib")[-1] == rows.nbytes / 2**20


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_used_last_are_hits(make_h5, tmp_path, workers, nothing_held):
    path = make_h5(x=np.zeros((64, 256), "f4"))
    data = CombinedHDF5DataModule(
        path, fields=["x"], batch_size=8, row_cache=64, num_workers=workers, shuffle=False, with_index=True
    )
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), max_epochs=2)
    trainer.fit(Recorder(), datamodule=data)
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        lines = list(csv.DictReader(text))
    assert column(lines, "h5/cache_hit_rate_epoch")[1] == 1
    assert column(lines, "h5/cache_mib_epoch")[1] == 64 * 256 * 4 / 2**20


def test_a_shard_in_memory_is_counted_once(make_h5, tmp_path):
    path = make_h5(x=np.zeros((64, 256), "f4"))
    data = RankCachedH5DataModule(path, x_key="x", batch_size=8, num_workers=2, with_index=True)
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), max_epochs=1)
    trainer.fit(Recorder(), datamodule=data)
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        lines = list(csv.DictReader(text))
    assert column(lines, "h5/cache_mib_epoch") == [64 * 256 * 4 / 2**20]
    assert column(lines, "h5/cache_hit_rate_epoch") == [1]


def test_copies_to_a_device_are_timed_and_the_strategy_is_left_as_it_was():
    class Strategy:
        root_device = torch.device("meta")

        def batch_to_device(self, batch, device=None, dataloader_idx=0):
            time.sleep(0.02)
            return batch, device

    strategy = Strategy()
    timer = TransferTimer(strategy)
    assert strategy.batch_to_device("batch", device="there") == ("batch", "there")
    assert timer.seconds() >= 0.02
    timer.remove()
    assert "batch_to_device" not in vars(strategy)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_copies_to_a_gpu_are_logged(file, tmp_path):
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        logger=CSVLogger(tmp_path),
        max_epochs=1,
        log_every_n_steps=4,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Recorder(), datamodule=module(file))
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        assert min(column(list(csv.DictReader(text)), "h5/transfer_ms")) > 0


@pytest.mark.parametrize("options", [{"slow_batch_seconds": 0}, {"slow_batch_seconds": -1.0}], ids=str)
def test_a_senseless_limit_is_refused(options):
    with pytest.raises(H5ValueError, match="slow_batch_seconds"):
        H5StatsMonitor(**options)


def test_a_quantile_of_waiting_times_is_known_to_a_tenth():
    waits, seconds = WaitTimes(), np.random.default_rng(0).lognormal(-7, 2, 5000)
    for each in seconds:
        waits.add(each)
    for share in (0.05, 0.5, 0.95, 0.99):
        found = WaitTimes.quantile(waits.counts, share)
        assert found == pytest.approx(np.quantile(seconds, share), rel=0.1)
    assert sum(waits.counts) == 5000
    assert WaitTimes.quantile([0] * WaitTimes.N_CLASSES, 0.95) == 0


def test_a_quantile_of_request_times_is_known_to_a_fifth():
    seconds = np.random.default_rng(0).lognormal(-4, 2, 5000).clip(1e-4, 80)
    counts = np.bincount([RequestTimes.class_of(each) for each in seconds], minlength=RequestTimes.N_CLASSES)
    for share in (0.5, 0.99):
        found = RequestTimes.quantile(counts, share)
        assert np.quantile(seconds, share) <= found * 1.0001 <= 1.2 * np.quantile(seconds, share)
    assert [RequestTimes.class_of(each) for each in (0, 9e-5, 1e6)] == [0, 0, RequestTimes.N_CLASSES - 1]


def test_short_epochs_are_logged_by_steps_too(file, tmp_path):
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), max_epochs=5, log_every_n_steps=16)
    trainer.fit(Recorder(), datamodule=module(file))  # eight steps an epoch
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        lines = list(csv.DictReader(text))
    assert len(column(lines, "h5/wait_ms")) == 2


class Stops(Recorder):
    def validation_step(self, batch, batch_idx):
        raise RuntimeError("stop here")


def test_a_stage_that_was_broken_off_is_not_in_the_next_table(file, capsys, monkeypatch):
    monitor, data = H5StatsMonitor(), module(file)
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=0, callbacks=[monitor])
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(Stops(), datamodule=data)
    monkeypatch.setattr("lightning_h5.metrics.perf_counter", lambda: time.perf_counter() + 100_000)
    capsys.readouterr()
    trainer.validate(Recorder(), datamodule=data)
    cells, _ = table(capsys.readouterr().out)
    assert (cells["validate"]["batches"], cells["validate"]["rows"]) == ("8", "64")
    assert float(cells["validate"]["seconds"].lstrip("<").replace(",", "")) < 100_000


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule])
def test_rows_held_whole_have_no_hit_rate_and_nothing_that_is_zero(file, capsys, kind):
    data = kind(file, file, x_key="x", batch_size=8, with_index=True)
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0).fit(Recorder(), datamodule=data)
    cells, below = table(capsys.readouterr().out)
    for stage in cells.values():
        assert "cache hits" not in stage
        assert "MiB/s decoded" not in stage
        assert "waiting, worst rank" not in stage
    assert below[0].startswith("peak memory of a rank's main process: ")
    assert below[1].startswith("train: ")


def test_decoded_rows_that_are_used_again_have_a_hit_rate(make_h5, capsys, nothing_held):
    path = make_h5(x=Stored(np.zeros((64, 1024), "f4"), "chunked", (16, 1024), options={"compression": "gzip"}))
    quiet_trainer(max_epochs=3).fit(
        Recorder(), datamodule=LazyH5DataModule(path, x_key="x", batch_size=8, with_index=True)
    )
    cells, _ = table(capsys.readouterr().out)
    assert cells["train"]["cache hits"].endswith("%")
    assert cells["train"]["MiB/s decoded"] != cells["train"]["MiB/s read"]


# Files that are staged ----------------------------------------------------------------------------------------------


@pytest.fixture
def images(make_h5, monkeypatch, nothing_held):
    """A file that is staged: 8 chunks of 8 rows, each chunk 32 KiB."""
    monkeypatch.setattr(policy, "MIN_BYTES", 0)
    monkeypatch.setattr(policy, "_is_on", lambda device, folder: False)
    rows = np.random.default_rng(0).integers(0, 256, (64, 4096), dtype=np.uint8)
    return make_h5(x=Stored(rows, "chunked", (8, 4096), options={"compression": "gzip"}))


def fit_images(path, tmp_path, **options):
    """Lines of the log, and what was counted."""
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), max_epochs=3, log_every_n_steps=4)
    files = {"cache_bytes": "70 KiB"}  # two chunks: all are read in each epoch
    data = LazyH5DataModule(path, x_key="x", batch_size=8, shuffle=False, files=files, with_index=True, **options)
    trainer.fit(Recorder(), datamodule=data)
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        return list(csv.DictReader(text)), data.datasets["train"].counters.total()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_read_of_the_origin_is_logged_if_files_are_staged(images, tmp_path, workers, capsys):
    lines, counted = fit_images(images, tmp_path, staging=str(tmp_path / "local"), num_workers=workers)
    for key in STAGED:
        assert len(column(lines, f"h5/{key}")) == 6
        assert len(column(lines, f"h5/{key}_epoch")) == 3
    n_bytes, n_requests = column(lines, "h5/origin_mib_epoch"), column(lines, "h5/origin_requests_epoch")
    assert 8 * 32 / 1024 <= n_bytes[0] <= 10 * 32 / 1024
    assert 1 <= n_requests[0] <= 8
    assert n_bytes[1:] == n_requests[1:] == column(lines, "h5/origin_wait_ms_epoch")[1:] == [0, 0]
    hit_rates = column(lines, "h5/mirror_hit_rate_epoch")
    assert 0 <= hit_rates[0] < 0.6  # what the first epoch reads of the second one is in the mirror
    assert hit_rates[1:] == [1, 1]
    assert min(column(lines, "h5/origin_wait_ms_epoch")) >= 0
    cells, _ = table(capsys.readouterr().out)
    assert float(cells["train"]["from the origin, MiB"]) == pytest.approx(n_bytes[0], abs=0.01)
    assert int(cells["train"]["requests to the origin"]) == n_requests[0]
    share = 1 - counted["origin_bytes"] / (counted["mirror_bytes"] + counted["missed_bytes"])
    assert cells["train"]["in the mirror"] == f"{share:.1%}"
    assert float(cells["train"]["request, median, ms"]) <= float(cells["train"]["request, 99th percentile, ms"])


def test_nothing_is_logged_of_an_origin_if_nothing_is_staged(images, tmp_path, capsys):
    assert not [key for line in fit_images(images, tmp_path)[0] for key in line if "origin" in key or "mirror" in key]
    out = capsys.readouterr().out
    assert "MiB/s read" in out
    assert not re.search("origin|mirror|request", out)


@pytest.mark.parametrize(
    ("amounts", "found"),
    [
        ({"origin_bytes": 3 << 20, "mirror_bytes": 4 << 20}, (3, 0.25)),
        ({"origin_bytes": 3 << 20, "mirror_bytes": 1 << 20, "missed_bytes": 3 << 20}, (3, 0.25)),
        ({"origin_bytes": 3 << 20, "mirror_bytes": 1 << 20}, (3, 0)),  # fetched ahead, or granules
        ({"mirror_bytes": 1 << 20}, (0, 1)),
        ({}, (0, 1)),  # all rows were in memory
    ],
)
def test_hits_of_a_mirror_are_what_is_not_read_of_the_origin(amounts, found):
    counted = dict.fromkeys(AMOUNTS, 0.0) | {"is_staged": 2.0, "batches": 4.0, "origin_seconds": 0.002} | amounts
    figures = figures_of(counted, 2)
    assert (figures["origin_mib"], figures["mirror_hit_rate"]) == found
    assert figures["origin_wait_ms"] == 0.5
    assert not STAGED & set(figures_of(counted | {"is_staged": 0.0}, 2))


def test_requests_of_all_ranks_are_in_the_table():
    ranks = [dict.fromkeys(AMOUNTS, 0.0) | {"seconds": 1.0, "is_staged": 1.0} for _ in range(2)]
    for rank, seconds in zip(ranks, (0.012, 0.08), strict=True):
        rank[REQUESTS[RequestTimes.class_of(seconds)]] = 1000.0
        rank |= {"origin_requests": 1000.0, "origin_bytes": 2.0**20, "mirror_bytes": 2.0**20, "missed_bytes": 2.0**20}
    unstaged = [dict.fromkeys(AMOUNTS, 0.0) | {"seconds": 1.0}]
    cells, _ = table(stage_table("lightning_h5: rows from HDF5", {"train": ranks, "validate": unstaged}, []))
    assert (
        cells["train"]
        | {
            "from the origin, MiB": "2.00",
            "requests to the origin": "2,000",
            "request, median, ms": "12.8",
            "request, 99th percentile, ms": "86.1",
            "in the mirror": "50.0%",
        }
        == cells["train"]
    )
    assert cells["validate"]["in the mirror"] == "-"


AMOUNTS = (*COUNTED, "bytes_given", "seconds", "transfer_seconds", "n_slow", "is_staged", *WAITS, *REQUESTS)
REMARK = "train: 56% of the time was spent waiting for data. Decoding is the bottleneck: " + "use something else. " * 9


@given(data=st.data(), n_ranks=st.integers(1, 64), n_stages=st.integers(1, 2), columns=st.sampled_from([80, 100, 120]))
def test_the_table_fits_whatever_was_counted(data, n_ranks, n_stages, columns):
    number = st.just(0.0) | st.floats(0, 1e12)
    drawn = dict.fromkeys([*COUNTED, "bytes_given", "is_staged", *WAITS[:2], *REQUESTS[-2:]], number)
    drawn |= {"seconds": st.floats(1, 1e7), "wait_seconds": st.floats(0, 1e7)}
    stages = {
        stage: [dict.fromkeys(AMOUNTS, 0.0) | data.draw(st.fixed_dictionaries(drawn)) for _ in range(min(n_ranks, 2))]
        * (n_ranks // 2 or 1)
        for stage in ("train", "validate")[:n_stages]
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        text = stage_table("lightning_h5: rows from HDF5, over all ranks", stages, [REMARK])
    assert max(map(len, text.splitlines())) <= min(columns, 100)
    cells, _ = table(text)
    names = [*next(iter(cells.values()))]
    assert all([*stage] == names for stage in cells.values())
    for name in names[4:]:
        assert {stage[name] for stage in cells.values()} - {"0", "0.0%", "-"}
    for stage, ranks in stages.items():
        has_cache = any(rank[name] for rank in ranks for name in ("cache_hits", "cache_misses", "blocks_used"))
        assert has_cache or cells[stage].get("cache hits", "-") == "-"
