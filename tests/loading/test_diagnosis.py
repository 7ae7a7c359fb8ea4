"""What limits training: the sentence at the end of a run, on runs that are made to be limited by one thing."""

import re
import time

import numpy as np
import pytest
from arguments import nested
from factories import Stored
from lightning_models import Recorder, quiet_trainer

from lightning_h5 import LazyH5DataModule
from lightning_h5.callbacks.stats_monitor import _limit_of
from lightning_h5.counters import COUNTED
from lightning_h5.loading import what_limits
from lightning_h5.readers import contiguous

QUIET = dict.fromkeys(COUNTED, 0.0) | {"transfer_seconds": 0.0, "seconds": 10.0, "batches": 100.0, "rows": 6400.0}
BUSY = QUIET | {"wait_seconds": 9.0, "decode_seconds": 18.0, "bytes_decoded": 1e9}


def limit_of_a_run(datamodule, capsys, model=None):
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0).fit(
        model or Recorder(), datamodule=datamodule
    )
    (text,) = re.findall(r"^train: .*(?:\n  .*)*", capsys.readouterr().out, re.MULTILINE)
    return " ".join(text.split())


class SlowStep(Recorder):
    """Steps that take at least fifteen times as long as their batch took to come, however busy the machine is."""

    def on_train_start(self):
        self.last = time.monotonic()

    def training_step(self, batch, batch_idx):
        time.sleep(max(0.02, 15 * (time.monotonic() - self.last)))
        loss = super().training_step(batch, batch_idx)
        self.last = time.monotonic()
        return loss


def slow(x):
    time.sleep(0.002)
    return x


@pytest.fixture
def noise():
    return np.random.default_rng(0).integers(0, 255, (600, 64, 64), dtype=np.uint8)


def test_a_slow_model_is_to_be_left_alone(make_h5, capsys):
    path = make_h5(x=np.zeros((640, 4), "f4"))
    line = limit_of_a_run(LazyH5DataModule(path, x_key="x", batch_size=32), capsys, SlowStep())
    assert re.search(r"train: \d\.\d% of the time was spent waiting for data\. The model is the bottleneck\.", line)


def test_slow_transforms_want_workers(make_h5, capsys):
    path = make_h5(x=np.zeros((200, 4), "f4"))
    line = limit_of_a_run(LazyH5DataModule(path, x_key="x", batch_size=8, transform=slow), capsys)
    assert "Transforms are the bottleneck: use workers" in line


def test_slow_transforms_in_workers_want_more_workers(make_h5, capsys):
    path = make_h5(x=np.zeros((400, 4), "f4"))
    line = limit_of_a_run(LazyH5DataModule(path, x_key="x", batch_size=8, transform=slow, num_workers=1), capsys)
    assert "Transforms are the bottleneck: use more workers than 1" in line


@pytest.mark.wide
def test_decoding_wants_another_compression_or_none(make_h5, capsys, monkeypatch, nothing_held):
    rows = np.random.default_rng(0).integers(0, 64, (800, 256, 256), dtype=np.uint8)
    path = make_h5(x=Stored(rows, "chunked", (4, 256, 256), options={"compression": "gzip", "compression_opts": 1}))
    module = LazyH5DataModule(
        path,
        x_key="x",
        batch_size=32,
        files={"cache_bytes": "4 MiB"},
        prefetch_factor=2,
    )
    line = limit_of_a_run(module, capsys)
    assert re.search(r"Decoding on \d+ cores? is the bottleneck: .* repack", line)


def test_slow_files_want_a_nearer_disk(make_h5, noise, capsys, monkeypatch, nothing_held):
    path = make_h5(x=noise)
    read = contiguous.read_stored

    def from_afar(*arguments):
        time.sleep(0.02)
        return read(*arguments)

    monkeypatch.setattr(contiguous, "read_stored", from_afar)
    line = limit_of_a_run(
        LazyH5DataModule(
            path,
            x_key="x",
            batch_size=32,
            prefetch_factor=2,
        ),
        capsys,
    )
    assert re.search(r"Reading files is the bottleneck: put them on a closer or faster disk", line)


@pytest.mark.wide
def test_what_the_library_reads_is_to_be_repacked(make_h5, capsys, nothing_held):
    values = np.random.default_rng(0).integers(0, 1000, (1600, 64, 64))
    path = make_h5(x=Stored(values, "chunked", (8, 64, 64), options={"scaleoffset": 0}))
    line = limit_of_a_run(
        LazyH5DataModule(
            path,
            x_key="x",
            batch_size=32,
            shuffle={"buffer": "2 MiB"},
            prefetch_factor=2,
        ),
        capsys,
    )
    assert "The HDF5 library, which serves one thread at a time, is the bottleneck: lightning-h5 inspect" in line


@pytest.mark.wide
def test_the_start_of_workers_is_told_from_the_rest(make_h5, capsys):
    path = make_h5(x=np.zeros((32, 4), "f4"))
    module = LazyH5DataModule(
        path,
        x_key="x",
        batch_size=2,
        num_workers=1,
        workers={"start_method": "spawn"},
    )
    line = limit_of_a_run(module, capsys)
    assert "for the first batches of epochs. This share shrinks in a longer run if" in line
    assert "persistent_workers" not in line  # they persist already


@pytest.mark.parametrize(
    ("amounts", "kind"),
    [
        ({"wait_seconds": 0.5}, "model"),
        ({"wait_seconds": 5.0, "start_seconds": 4.0}, "start"),
        ({"wait_seconds": 5.0, "finish_seconds": 4.5, "decode_seconds": 4.0}, "transforms"),
        ({"wait_seconds": 5.0, "finish_seconds": 1.0, "decode_seconds": 9.0}, "decode"),
        ({"wait_seconds": 5.0, "library_seconds": 4.5, "decode_seconds": 4.0}, "library"),
        ({"wait_seconds": 5.0, "read_seconds": 9.0, "decode_seconds": 4.0}, "disk"),
        ({"wait_seconds": 5.0, "read_seconds": 9.0, "origin_seconds": 5.0, "decode_seconds": 4.0}, "origin"),
        ({"wait_seconds": 5.0, "read_seconds": 9.0, "origin_seconds": 4.0, "decode_seconds": 4.0}, "disk"),
        ({"wait_seconds": 5.0, "read_seconds": 6.0, "origin_seconds": 5.0, "decode_seconds": 7.0}, "decode"),
        ({"wait_seconds": 5.0}, "copies"),
        ({"wait_seconds": 0.5, "transfer_seconds": 4.0}, "transfer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_takes_longest_is_what_limits(amounts, kind):
    assert what_limits(QUIET | amounts, n_workers=0, n_cores=2).kind == kind


STAGED = QUIET | {"wait_seconds": 5.0, "read_seconds": 9.0, "origin_seconds": 8.0, "origin_bytes": 2.0**30}
FILLING = STAGED | {"mirror_bytes": 95.0, "missed_bytes": 5.0, "origin_requests": 1024.0}
CROWDED = FILLING | {"mirror_bytes": 40.0, "missed_bytes": 60.0}
SMALL = {"origin_requests": 40 * 1024.0}
FILLS = "Filling the mirror is the bottleneck: later reads of the same rows use the local disk."
LATER = " Look at a later epoch before you change anything."
PAST = (
    "Reading past the mirror is the bottleneck: it had room for 40% of the bytes needed. Raise staging.max_bytes, if "
    "the disk has room."
)
CHUNKS = " A request has 26 KiB on average: larger chunks need fewer (lightning-h5 repack IN OUT)."


@pytest.mark.parametrize(
    ("amounts", "to_keep", "advice"),
    [
        (FILLING, "more", FILLS + LATER),
        (FILLING, None, FILLS),
        (CROWDED, "", PAST),
        (CROWDED, None, FILLS),
        (FILLING | SMALL, "more", FILLS + CHUNKS),
        (CROWDED | SMALL, "more", PAST + CHUNKS),
    ],
)
def test_a_slow_origin_wants_room_or_larger_requests_or_patience(amounts, to_keep, advice):
    limit = what_limits(amounts, n_workers=0, n_cores=2, to_keep=to_keep)
    assert limit.kind == "origin"
    assert limit.text == f"50% of the time was spent waiting for data. {advice}"


def test_work_that_is_shared_by_workers_counts_for_less():
    amounts = QUIET | {"wait_seconds": 5.0, "finish_seconds": 8.0, "decode_seconds": 6.0}
    assert what_limits(amounts, n_workers=0, n_cores=2).kind == "transforms"
    assert what_limits(amounts | {"decode_seconds": 9.0}, n_workers=4, n_cores=2).kind == "decode"


@pytest.mark.parametrize("n_batches", [1, 9, 10])
def test_few_batches_have_a_sentence_with_their_number(n_batches):
    text = what_limits(QUIET | {"batches": n_batches}, n_workers=0, n_cores=2).text
    assert (f"(Batches measured: {n_batches}. A longer run is more certain.)" in text) == (n_batches < 10)


@pytest.mark.parametrize("more", [{}, {"start_seconds": 4.5}, {"start_seconds": 4.5, "decode_seconds": 8.0}])
@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_longer_run_is_advised_once(more, n_workers):
    amounts = QUIET | {"batches": 1.0, "wait_seconds": 5.0} | more
    text = what_limits(amounts, n_workers=n_workers, n_cores=2).text
    assert "(Batches measured: 1." in text
    assert text.count("longer run") == 1


def test_nothing_is_said_of_no_batches():
    assert what_limits(QUIET | {"batches": 0.0}, n_workers=0, n_cores=2) is None


def test_a_run_of_one_batch_has_a_sentence(make_h5, capsys):
    path = make_h5(x=np.zeros((4, 4), "f4"))
    line = limit_of_a_run(LazyH5DataModule(path, x_key="x", batch_size=4, with_index=True), capsys)
    assert "Batches measured: 1." in line


def test_rows_that_are_decoded_for_a_first_batch_are_no_reason_to_change_anything():
    amounts = {"wait_seconds": 5.0, "start_seconds": 4.5, "decode_seconds": 8.0}
    assert "Look at a later epoch" in what_limits(QUIET | amounts, n_workers=0, n_cores=2).text


def test_files_that_the_system_has_in_memory_are_not_slow_ones():
    amounts = QUIET | {"wait_seconds": 5.0, "read_seconds": 9.0}
    assert what_limits(amounts | {"bytes_read": 2e9}, n_workers=0, n_cores=2).kind == "disk"
    assert what_limits(amounts | {"bytes_read": 2e10}, n_workers=0, n_cores=2).kind == "copies"


@pytest.mark.wide
@pytest.mark.parametrize("n_workers", [0, 2])
def test_the_buffer_that_is_advised_holds_all_decoded_rows(make_h5, noise, nothing_held, n_workers):
    path = make_h5(x=Stored(np.tile(noise, (40, 1, 1)), "chunked", (8, 64, 64), {"compression": "gzip"}))

    def loader_of(**options):
        datamodule = LazyH5DataModule(path, **nested(x_key="x", batch_size=8, num_workers=n_workers, **options))
        datamodule.setup("fit")
        return datamodule.train_dataloader()

    loader = loader_of(shuffle={"buffer": "1 MiB"})
    assert loader.sampler.present_order().mode == "chunks"
    text = _limit_of("train", BUSY, [loader])
    advised = re.search(r"shuffle\.buffer='(\d+ MiB)' holds all", text)[1]
    fitting = loader_of(shuffle={"buffer": advised})
    assert fitting.sampler.present_order().mode == "global"
    assert "until all rows are in memory. Look at a later epoch" in _limit_of("train", BUSY, [fitting])
    assert "shuffle.buffer that holds all" in what_limits(BUSY, n_workers=n_workers, n_cores=2).text


@pytest.mark.wide
@pytest.mark.parametrize("options", [{"shuffle": False}, {"cache_bytes": "1 MiB"}], ids=str)
def test_memory_that_the_buffer_does_not_decide_is_advised_by_its_name(make_h5, noise, nothing_held, options):
    path = make_h5(x=Stored(np.tile(noise, (40, 1, 1)), "chunked", (8, 64, 64), {"compression": "gzip"}))

    def loader_of(**more):
        datamodule = LazyH5DataModule(path, **nested(x_key="x", batch_size=64, **(options | more)))
        datamodule.setup("fit")
        return datamodule.train_dataloader()

    text = _limit_of("train", BUSY, [loader_of()])
    assert "shuffle.buffer" not in text
    loader = loader_of(files={"cache_bytes": re.search(r"cache_bytes='(\d+ MiB)' holds all", text)[1]})
    assert "Look at a later epoch" in _limit_of("train", BUSY, [loader])
    for _ in range(2):
        decoded = loader.counters.total()["bytes_decoded"]
        assert sum(len(x) for x in loader) == 24_000
    assert loader.counters.total()["bytes_decoded"] == decoded  # the second time none was decoded


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("kind", ["decode_seconds", "read_seconds"])
def test_no_cache_is_advised_for_a_stage_that_reads_each_row_once(make_h5, noise, stage, kind):
    datamodule = LazyH5DataModule(predict_path=make_h5(x=noise), x_key="x", batch_size=8)
    datamodule.setup("predict")
    text = _limit_of(stage, QUIET | {"wait_seconds": 9.0, kind: 18.0}, [datamodule.predict_dataloader()])
    assert "is the bottleneck" in text
    assert ("faster compression" in text) == (kind == "decode_seconds")
    assert not re.search("in memory|shuffle.buffer|cache_bytes|RankCached", text)
