"""``files.decode_on``: the same batches in the same steps as without, decoded on a fake device."""

import re
import shutil

import h5py
import numpy as np
import pytest
import torch
from fake_decoding import FakeDevice
from fake_device import FakeStream
from lightning_models import Recorder, SaveOnException, quiet_trainer, together

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5FileError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
)
from lightning_h5.loading.device_ahead import STREAMS
from lightning_h5.readers.on_device import DEVICES
from lightning_h5.samples import row_table

N_ROWS, BATCH = 120, 8
ON_DEVICE = {"files": {"decode_on": "cuda"}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("decoding") / "rows.h5"
    values = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        image = values.integers(0, 256, (N_ROWS, 3, 8, 8), np.uint8) // 16
        file.create_dataset("image", data=image, chunks=(7, 3, 8, 8), compression="gzip", shuffle=True)
        signal = values.normal(5, 3, (N_ROWS, 20))
        file.create_dataset("signal", data=signal, chunks=(5, 12), compression="gzip", fletcher32=True)
        depth = values.integers(0, 1 << 16, (N_ROWS, 6), np.uint16) & 15
        file.create_dataset("depth", data=depth, chunks=(9, 6), compression="gzip")
        file.create_dataset("other", data=signal[:, :4], chunks=(9, 4), compression="lzf")
        file["y"] = np.arange(N_ROWS)
    return str(path)


@pytest.fixture
def devices(monkeypatch):
    """The devices that were opened."""
    opened = []

    def open_one():
        opened.append(FakeDevice())
        return opened[-1]

    monkeypatch.setitem(DEVICES, "cuda", open_one)
    monkeypatch.setattr(row_table, "HELD_BYTES", -1)  # otherwise small arrays are held in this machine's memory
    return opened


class Seen(Recorder):
    """Keeps copies of all batches."""

    def __init__(self, fail_at=None):
        super().__init__(fail_at)
        self.batches = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        values = torch.utils._pytree.tree_leaves(batch)
        self.batches.append([value.clone() for value in values if isinstance(value, torch.Tensor)])
        return loss


def trained(path, model=None, trainer_options=None, **options):
    model = Seen() if model is None else model
    arguments = {"x_key": "image", "y_key": "y", "batch_size": BATCH, "with_index": True} | options
    quiet_trainer(**(trainer_options or {})).fit(model, datamodule=LazyH5DataModule(path, **arguments))
    return model


def assert_same(ours, others):
    assert len(ours) == len(others)
    for one, other in zip(ours, others, strict=True):
        assert [tensor.dtype for tensor in one] == [tensor.dtype for tensor in other]
        assert all(map(torch.equal, one, other))


STATS = {"signal": {"mean": 5.25, "std": 3.1}, "image": {"mean": [1.0, 2.0, 3.5], "std": [0.5, 2.0, 1.5]}}
OPTIONS = {
    "rows": {},
    "several fields": {"x_key": ["image", "signal", "depth", "other"]},
    "normalized": {"x_key": ["image", "signal", "other"], "normalize": STATS},
    "normalized to half": {"x_key": "signal", "normalize": {"signal": STATS["signal"]}, "x_dtype": "float16"},
    "far from zero": {"x_key": "signal", "normalize": {"signal": {"mean": 1e4 + 0.123, "std": 0.01}}},
    "cast": {"x_dtype": "float32"},
    "bfloat16": {"x_key": "signal", "x_dtype": "bfloat16"},
    "unsigned": {"x_key": "depth"},
    "unsigned, cast": {"x_key": "depth", "x_dtype": "int64"},
    "windows": {"x_key": "signal", "window": {"length": 4, "stride": 3}},
    "padded windows": {"x_key": "depth", "window": {"length": 50, "pad": "zeros"}},
    "in storage order": {"shuffle": False},
    "by chunks": {"shuffle": {"mode": "chunks", "buffer": "2 KiB"}},
    "transforms": {"transform": lambda x: x.flip(0), "batch_transform": lambda batch: [batch[0] * 2, *batch[1:]]},
    "ahead": {"prefetch_to_device": 2},
    "little memory": {"files": {"cache_bytes": "6 KiB"}},
    "almost no memory": {"files": {"cache_bytes": 100}},
}


N_SAMPLES = {"windows": 39, "padded windows": 3}


@pytest.mark.parametrize("case", OPTIONS)
def test_steps_get_the_batches_that_the_cpu_decodes(path, devices, monkeypatch, case):
    monkeypatch.setitem(STREAMS, "cpu", FakeStream)
    options = OPTIONS[case]
    expected = trained(path, **options).batches
    assert not devices
    files = options.get("files", {}) | ON_DEVICE["files"]
    assert_same(trained(path, **options | {"files": files}).batches, expected)
    (device,) = {*devices}
    assert bool(device.launches) == (case != "almost no memory")
    assert sum(len(columns[-1]) for columns in device.owned) == 2 * N_SAMPLES.get(case, N_ROWS)  # each of them once


def test_a_run_that_stopped_in_an_epoch_continues_with_its_rows(path, devices, tmp_path):
    whole = trained(path).train_rows
    first, save = Seen(fail_at=(1, 6)), SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        trained(path, first, {"callbacks": [save]}, **ON_DEVICE)
    for options in (ON_DEVICE, {}):  # a checkpoint does not depend on where chunks were decoded
        second = Seen()
        module = LazyH5DataModule(path, x_key="image", y_key="y", batch_size=BATCH, with_index=True, **options)
        quiet_trainer().fit(second, datamodule=module, ckpt_path=save.path)
        assert together(first.train_rows, second.train_rows) == whole


def test_chunks_are_decoded_once_an_epoch_and_many_at_a_time(path, devices):
    trained(path, trainer_options={"max_epochs": 1}, **ON_DEVICE)
    n_chunks = -(-N_ROWS // 7)
    assert sum(devices[0].launches) == n_chunks
    assert len(devices[0].launches) < n_chunks / 2


def test_damaged_chunks_stop_the_run_or_are_left_out(path, devices, tmp_path):
    broken = tmp_path / "broken.h5"
    shutil.copy(path, broken)
    with h5py.File(broken) as file:
        found = file["image"].id.get_chunk_info(4)
    with open(broken, "rb+") as file:
        file.seek(found.byte_offset + found.size // 2)
        file.write(bytes(8))
    with pytest.raises(OSError, match=re.escape("chunk 4 (rows 28 to 34) of 'image'")):
        trained(str(broken), **ON_DEVICE)
    model = trained(str(broken), on_bad_row="skip", trainer_options={"max_epochs": 1}, **ON_DEVICE)
    by_cpu = trained(str(broken), on_bad_row="skip", trainer_options={"max_epochs": 1})
    assert model.train_rows == by_cpu.train_rows
    assert sorted(model.train_rows[0]) == [row for row in range(N_ROWS) if not 28 <= row < 35]


def test_reads_of_a_file_that_changed_end(path, devices, tmp_path):
    copy = tmp_path / "copy.h5"
    shutil.copy(path, copy)
    dataset = H5LazyDataset(copy, "image", files={"decode_on": "cuda"})
    complete = dataset.begin(np.arange(30))
    dataset._forget()  # as another thread does that finds the file changed
    assert len(complete().columns[0]) == 30
    dataset.close()


def test_rows_of_sparse_matrices_stay_on_the_cpu(devices, tmp_path):
    with h5py.File(tmp_path / "cells.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (40, 7)})
        for name, values in (
            ("data", np.arange(80.0)),
            ("indices", np.arange(80) % 7),
            ("indptr", np.arange(0, 81, 2)),
        ):
            group.create_dataset(name, data=values, chunks=(10,), compression="gzip")
    dataset = H5LazyDataset(tmp_path / "cells.h5ad", "X", files={"decode_on": "cuda"})
    assert "rows of a sparse matrix are put together on the CPU" in dataset.decoded_on_cpu().values()
    assert dataset.read_batch([5, 3]).shape == (2, 7)
    assert not devices[0].launches


def test_what_is_decoded_on_the_cpu_is_logged(path, devices, caplog):
    caplog.set_level("INFO")
    trained(path, x_key=["image", "other"], trainer_options={"max_epochs": 1}, **ON_DEVICE)
    assert (
        "files.decode_on: 'other' is decoded on the CPU, since a device does not undo its filters (lzf)" in caplog.text
    )
    assert "'image' is decoded on the CPU" not in caplog.text


def test_a_dataset_decodes_on_the_device_in_this_process_alone(path, devices):
    dataset = H5LazyDataset(path, "image", "y", files={"decode_on": "cuda"})
    plain = H5LazyDataset(path, "image", "y")
    assert all(map(torch.equal, dataset.read_batch([50, 3, 77]), plain.read_batch([50, 3, 77])))
    assert devices[0].launches
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=1)
    with pytest.raises(H5ValueError, match=r"a worker process reads the rows\. Pass num_workers=0"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (RankCachedH5DataModule, {}, "to RankCachedH5DataModule, which keeps decoded rows elsewhere"),
        (CombinedHDF5DataModule, {}, "to CombinedHDF5DataModule, which keeps decoded rows elsewhere"),
        (LazyH5DataModule, {"num_workers": 2}, "with num_workers=2; a GPU's memory is not shared with workers"),
        (LazyH5DataModule, {"mixture": [{"path": "rows.h5"}]}, "with mixture, whose batches are put together"),
    ],
)
def test_what_does_not_decode_there_is_refused(path, kind, options, message):
    paths = [] if "mixture" in options else [path]
    with pytest.raises(H5ValueError, match=rf"files\.decode_on='cuda' was given {message}"):
        kind(*paths, **ON_DEVICE, **options)
    with pytest.raises(H5ValueError, match=r"decode_on='gpu' was given.* Pass 'cpu', 'cuda'"):
        LazyH5DataModule(path, files={"decode_on": "gpu"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_a_device_says_so_in_setup(path):
    with pytest.raises(H5ValueError, match=r"this machine has no CUDA device.*decoded on the CPU, to the same values"):
        LazyH5DataModule(path, x_key="image", **ON_DEVICE).setup("fit")


def test_a_missing_library_is_named_with_the_extra(monkeypatch):
    from lightning_h5.readers.on_device import cuda

    cuda._nvcomp.cache_clear()
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(H5FileError, match=r"needs nvCOMP 6, which is not installed.*pip install 'lightning-h5\[gpu\]'"):
        cuda._nvcomp()
