"""The data modules on a CUDA device: batches are pinned, arrive there, and hold the right rows."""

from importlib.util import find_spec

import h5py
import numpy as np
import pytest
import torch
from arguments import nested
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

ROWS, BATCH = 200, 16
QUIET = {
    "accelerator": "gpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

SOURCES = {
    "lazy": (LazyH5DataModule, {}),
    "lazy with workers": (LazyH5DataModule, {"num_workers": 2}),
    "lazy with spawned workers": (LazyH5DataModule, {"num_workers": 2, "multiprocessing_context": "spawn"}),
    "rank cached": (RankCachedH5DataModule, {}),
    "rank cached, shared": (RankCachedH5DataModule, {"memory": {"share": True}}),
    "on the device": (RankCachedH5DataModule, {"memory": {"device": "cuda"}}),
    "combined": (CombinedHDF5DataModule, {}),
    "combined with workers": (CombinedHDF5DataModule, {"num_workers": 2}),
}


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as handle:
        handle.create_dataset("x", data=stored().numpy(), chunks=(7, 3, 1024), compression="gzip")
        handle["y"] = np.arange(ROWS)
    return tmp_path / "rows.h5"


def module(name, file, **options):
    kind, own = SOURCES[name]
    keys = {"fields": {"x": "x", "y": "y"}} if kind is CombinedHDF5DataModule else {"x_key": "x", "y_key": "y"}
    found = kind(file, **nested(**keys | {"batch_size": BATCH} | own | options))
    found.before = set()

    def look(batch, dataloader_idx):
        found.before |= {(t.device.type, t.device.type == "cuda" or t.is_pinned()) for t in pair(batch)}
        return batch

    found.on_before_batch_transfer = look
    return found


class Rows(BoringModel):
    """Checks each batch, and keeps their rows and devices."""

    def __init__(self, stored):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3 * 1024, 2)
        self.stored, self.rows, self.after = stored, [], set()

    def training_step(self, batch, batch_idx):
        x, y = pair(batch)
        self.after |= {x.device.type, y.device.type}
        assert torch.equal(x.cpu(), self.stored[y.cpu()])
        self.rows += y.tolist()
        return self.layer(x.flatten(1) / 1e6).mean()


def pair(batch):
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else batch


def stored():
    return torch.arange(ROWS * 3 * 1024, dtype=torch.float32).reshape(ROWS, 3, 1024)


@pytest.mark.parametrize("name", SOURCES)
def test_batches_are_pinned_and_arrive_on_the_device(name, file):
    model, datamodule = Rows(stored()), module(name, file)
    Trainer(max_epochs=2, **QUIET).fit(model, datamodule=datamodule)
    assert sorted(model.rows[:ROWS]) == sorted(model.rows[ROWS:]) == list(range(ROWS))
    assert datamodule.before == {("cuda" if name == "on the device" else "cpu", True)}
    assert model.after == {"cuda"}


@pytest.mark.parametrize("name", SOURCES)
def test_a_run_that_stops_in_an_epoch_goes_on_with_its_rows(name, file, tmp_path):
    whole = Rows(stored())
    Trainer(max_epochs=2, **QUIET).fit(whole, datamodule=module(name, file))

    class Stops(Callback):
        def on_train_batch_end(self, trainer, *rest):
            if trainer.global_step == 17:
                trainer.save_checkpoint(tmp_path / "stopped.ckpt")
                trainer.should_stop = True
                raise KeyboardInterrupt

    first = Rows(stored())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        Trainer(max_epochs=2, callbacks=[Stops()], **QUIET).fit(first, datamodule=module(name, file))
    second = Rows(stored())
    Trainer(max_epochs=2, **QUIET).fit(second, datamodule=module(name, file), ckpt_path=tmp_path / "stopped.ckpt")
    assert first.rows + second.rows == whole.rows
    torch.testing.assert_close(second.layer.weight, whole.layer.weight, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["lazy", "lazy with workers", "rank cached", "combined"])
def test_memory_is_not_used_again_while_a_copy_of_it_is_under_way(name, file):
    datamodule, expected = module(name, file, pin_memory=True), stored()
    datamodule.setup("fit")
    there = []
    for batch in datamodule.train_dataloader():
        torch.cuda._sleep(20_000_000)  # the copies wait for some milliseconds, and the loop does not
        there.append([one.to("cuda", non_blocking=True) for one in pair(batch)])
        del batch
    assert len(there) == -(-ROWS // BATCH)
    for x, y in there:
        assert torch.equal(x.cpu(), expected[y.cpu()])
    datamodule.teardown("fit")


@pytest.mark.parametrize("name", ["lazy", "lazy with workers", "rank cached", "combined"])
def test_batches_that_are_copied_ahead_keep_their_values_until_their_step_has_run(name, file):
    kind, own = SOURCES[name]
    keys = {"fields": {"x": "x", "y": "y"}} if kind is CombinedHDF5DataModule else {"x_key": "x", "y_key": "y"}
    datamodule = kind(file, **nested(**keys | own | {"batch_size": BATCH, "prefetch_to_device": 2}))

    class Late(Rows):
        def training_step(self, batch, batch_idx):
            torch.cuda._sleep(20_000_000)  # the step runs some milliseconds later, and the loop does not wait
            x, y = pair(batch)
            assert x.device.type == y.device.type == "cuda"
            self.rows.append((x.double().sum((1, 2)), y.clone()))
            return self.layer(x.flatten(1) / 1e6).mean()

    model, sums = Late(stored()), stored().double().sum((1, 2))
    Trainer(max_epochs=2, **QUIET).fit(model, datamodule=datamodule)
    rows = torch.cat([y for _, y in model.rows]).cpu()
    assert sorted(rows.tolist()) == sorted([*range(ROWS)] * 2)
    assert torch.equal(torch.cat([x for x, _ in model.rows]).cpu(), sums[rows])


COMPRESSED = {
    "gzip": {"compression": "gzip"},
    "shuffle and gzip": {"compression": "gzip", "shuffle": True},
    "gzip and checksum": {"compression": "gzip", "fletcher32": True},
    "split rows": {"compression": "gzip", "chunks": (7, 2, 500)},
}


def write_compressed(path, name):
    options = {"chunks": (7, 3, 1024)}
    if name in COMPRESSED:
        options |= COMPRESSED[name]
    else:
        plugin = pytest.importorskip("hdf5plugin")
        filters = {
            "lz4": plugin.LZ4(),
            "zstd": plugin.Zstd(),
            "bitshuffle lz4": plugin.Bitshuffle(),
            "bitshuffle zstd": plugin.Bitshuffle(cname="zstd"),
        }
        options |= filters[name]
    with h5py.File(path, "w") as handle:
        handle.create_dataset("x", data=stored().numpy(), **options)
        handle["y"] = np.arange(ROWS)


@pytest.mark.skipif(find_spec("nvidia") is None or find_spec("nvidia.libnvcomp") is None, reason="nvCOMP is missing")
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("name", [*COMPRESSED, "lz4", "zstd", "bitshuffle lz4", "bitshuffle zstd"])
def test_chunks_are_decoded_on_the_device(name, ahead, tmp_path, monkeypatch):
    def fail(*arguments):
        raise AssertionError("a chunk was decoded on the CPU")

    monkeypatch.setattr("lightning_h5.samples.row_table.HELD_BYTES", -1)
    monkeypatch.setattr("lightning_h5.readers.chunk_loader.ChunkLoader.load", fail)
    write_compressed(tmp_path / "rows.h5", name)
    datamodule = LazyH5DataModule(
        tmp_path / "rows.h5",
        x_key="x",
        y_key="y",
        batch_size=BATCH,
        prefetch_to_device=ahead,
        files={"decode_on": "cuda", "cache_bytes": 40 * 3 * 1024 * 4},
    )
    model = Rows(stored())
    Trainer(max_epochs=3, **QUIET).fit(model, datamodule=datamodule)
    assert sorted(model.rows) == sorted([*range(ROWS)] * 3)
    assert model.after == {"cuda"}


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["lazy with workers", "on the device"])
def test_strategies_for_gpus_get_each_row_once(name, strategy, file):
    model = Rows(stored())
    trainer = Trainer(max_epochs=2, strategy=strategy, **QUIET)
    trainer.fit(model, datamodule=module(name, file))
    assert sorted(model.rows[:ROWS]) == sorted(model.rows[ROWS:]) == list(range(ROWS))
    assert trainer.strategy.root_device.type == "cuda"
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("decode", ["dense", "csr"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_sparse_rows_arrive_on_the_device(decode, num_workers, tmp_path):
    dense = torch.rand(ROWS, 50) * (torch.rand(ROWS, 50) < 0.1)
    matrix = dense.to_sparse_csr()
    with h5py.File(tmp_path / "cells.h5ad", "w") as handle:
        group = handle.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": dense.shape})
        group["data"], group["indices"], group["indptr"] = matrix.values(), matrix.col_indices(), matrix.crow_indices()
        handle["y"] = np.arange(ROWS)
    seen = []

    class Checks(BoringModel):
        def training_step(self, batch, batch_idx):
            x, y = batch
            assert x.device.type == y.device.type == "cuda"
            assert (x.layout == torch.sparse_csr) == (decode == "csr")
            assert torch.equal(x.to_dense().cpu(), dense[y.cpu()])
            seen.extend(y.tolist())
            return self.layer(torch.ones(1, 32, device=self.device)).mean()

    options = {"decode": {"X": decode}} if decode == "csr" else {}
    datamodule = LazyH5DataModule(
        tmp_path / "cells.h5ad", x_key="X", y_key="y", batch_size=BATCH, num_workers=num_workers, **options
    )
    Trainer(max_epochs=1, **QUIET).fit(Checks(), datamodule=datamodule)
    assert sorted(seen) == list(range(ROWS))
