"""What limits training: the sentence at the end of a run, on runs that are made to be limited by one thing."""

import re
import time

import numpy as np
import pytest
from factories import Stored
from lightning_models import Recorder, quiet_trainer

from lightning_h5 import LazyH5DataModule
from lightning_h5.callbacks.bottleneck import what_limits
from lightning_h5.readers import placed
from lightning_h5.stats import COUNTED

QUIET = dict.fromkeys(COUNTED, 0.0) | {"transfer_seconds": 0.0, "seconds": 10.0, "batches": 100.0, "rows": 6400.0}


def limit_of_a_run(datamodule, capsys, model=None):
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0).fit(
        model or Recorder(), datamodule=datamodule
    )
    (text,) = re.findall(r"^what limits .*(?:\n  .*)*", capsys.readouterr().out, re.MULTILINE)
    assert text.startswith("what limits train: ")
    return " ".join(text.split())


class SlowStep(Recorder):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def slow(x):
    time.sleep(0.002)
    return x


@pytest.fixture
def noise():
    return np.random.default_rng(0).integers(0, 255, (600, 64, 64), dtype=np.uint8)


def test_a_slow_model_is_to_be_left_alone(make_h5, capsys):
    path = make_h5(x=np.zeros((640, 4), "f4"))
    line = limit_of_a_run(LazyH5DataModule(path, x_key="x", batch_size=32), capsys, SlowStep())
    assert "leave the loader as it is" in line


def test_slow_transforms_want_workers(make_h5, capsys):
    path = make_h5(x=np.zeros((200, 4), "f4"))
    line = limit_of_a_run(LazyH5DataModule(path, x_key="x", batch_size=8, transform=slow), capsys)
    assert "for transforms: take workers" in line


def test_slow_transforms_in_workers_want_more_workers(make_h5, capsys):
    path = make_h5(x=np.zeros((400, 4), "f4"))
    line = limit_of_a_run(LazyH5DataModule(path, x_key="x", batch_size=8, transform=slow, num_workers=1), capsys)
    assert "for transforms: take more workers than 1" in line


def test_decoding_wants_another_compression_or_none(make_h5, capsys, monkeypatch, nothing_held):
    rows = np.random.default_rng(0).integers(0, 64, (800, 256, 256), dtype=np.uint8)
    path = make_h5(x=Stored(rows, "chunked", (4, 256, 256), options={"compression": "gzip", "compression_opts": 1}))
    module = LazyH5DataModule(path, x_key="x", batch_size=32, shuffle_bytes="4 MiB", prefetch_factor=2)
    line = limit_of_a_run(module, capsys)
    assert re.search(r"for decoding, [\d,]+ MiB/s by \d cores?, which are busy: .* repack", line)


def test_slow_files_want_a_nearer_disk(make_h5, noise, capsys, monkeypatch, nothing_held):
    path = make_h5(x=noise)
    read = placed.read_stored

    def from_afar(*arguments):
        time.sleep(0.02)
        return read(*arguments)

    monkeypatch.setattr(placed, "read_stored", from_afar)
    line = limit_of_a_run(LazyH5DataModule(path, x_key="x", batch_size=32, prefetch_factor=2), capsys)
    assert re.search(r"for files, which give [\d.,]+ MiB/s: put them on a nearer or faster disk", line)


def test_what_the_library_reads_is_to_be_repacked(make_h5, capsys, nothing_held):
    values = np.random.default_rng(0).integers(0, 1000, (1600, 64, 64))
    path = make_h5(x=Stored(values, "chunked", (8, 64, 64), options={"scaleoffset": 0}))
    line = limit_of_a_run(
        LazyH5DataModule(path, x_key="x", batch_size=32, shuffle_bytes="2 MiB", prefetch_factor=2), capsys
    )
    assert "for the HDF5 library, which serves one thread at a time: lightning-h5 inspect" in line


def test_the_start_of_workers_is_told_from_the_rest(make_h5, capsys):
    path = make_h5(x=np.zeros((32, 4), "f4"))
    module = LazyH5DataModule(path, x_key="x", batch_size=2, num_workers=1, multiprocessing_context="spawn")
    assert "for the first batches of epochs: keep workers" in limit_of_a_run(module, capsys)


@pytest.mark.parametrize(
    ("amounts", "kind"),
    [
        ({"wait_seconds": 0.5}, "model"),
        ({"wait_seconds": 5.0, "start_seconds": 4.0}, "start"),
        ({"wait_seconds": 5.0, "finish_seconds": 4.5, "decode_seconds": 4.0}, "transforms"),
        ({"wait_seconds": 5.0, "finish_seconds": 1.0, "decode_seconds": 9.0}, "decode"),
        ({"wait_seconds": 5.0, "library_seconds": 4.5, "decode_seconds": 4.0}, "library"),
        ({"wait_seconds": 5.0, "read_seconds": 9.0, "decode_seconds": 4.0}, "disk"),
        ({"wait_seconds": 5.0}, "copies"),
        ({"wait_seconds": 0.5, "transfer_seconds": 4.0}, "transfer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_takes_longest_is_what_limits(amounts, kind):
    assert what_limits(QUIET | amounts, n_workers=0, n_cores=2).kind == kind


def test_work_that_is_shared_by_workers_counts_for_less():
    amounts = QUIET | {"wait_seconds": 5.0, "finish_seconds": 8.0, "decode_seconds": 6.0}
    assert what_limits(amounts, n_workers=0, n_cores=2).kind == "transforms"
    assert what_limits(amounts | {"decode_seconds": 9.0}, n_workers=4, n_cores=2).kind == "decode"


@pytest.mark.parametrize("n_batches", [0, 9])
def test_nothing_is_said_of_too_few_batches(n_batches):
    assert what_limits(QUIET | {"batches": n_batches}, n_workers=0, n_cores=2) is None


def test_rows_that_are_decoded_for_a_first_batch_are_no_reason_to_change_anything():
    amounts = {"wait_seconds": 5.0, "start_seconds": 4.5, "decode_seconds": 8.0}
    assert "look at a later epoch" in what_limits(QUIET | amounts, n_workers=0, n_cores=2).text


def test_files_that_the_system_has_in_memory_are_not_slow_ones():
    amounts = QUIET | {"wait_seconds": 5.0, "read_seconds": 9.0}
    assert what_limits(amounts | {"bytes_read": 2e9}, n_workers=0, n_cores=2).kind == "disk"
    assert what_limits(amounts | {"bytes_read": 2e10}, n_workers=0, n_cores=2).kind == "copies"
