"""The usage examples of the documents on many files and on loaders run as they are written there.

The import lines are made true; where there is no GPU, what an example says to one is said to the CPU; where an example
uses another framework's trainer, its Lightning form stands here.
"""

import sys
import types

import h5py
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning_models import quiet_trainer
from test_combined import write_recordings
from torch.utils.data import DataLoader

import lightning_h5

LOOP = """
for epoch in range(2):
    for batch in dataloader:
        inputs = batch["fhr_st"].cuda(non_blocking=True)
        targets = batch["target"].cuda(non_blocking=True)
        weights = batch["weight"].cuda(non_blocking=True)
        seen(inputs, targets, weights)
"""

BASIC = """
from hdf5_dataset import CombinedHDF5Dataset

dataset = CombinedHDF5Dataset(
    paths=["train1.h5", "train2.h5", "train3.h5"],
    cs_label=True,        # C-section cases only
    bg_label=False,       # Exclude background noise
    label=1,              # Target class 1 (one-hot)
    cache_size=2000,      # Cache 2000 samples
    pin_memory=True       # GPU optimization
)

from torch.utils.data import DataLoader
dataloader = DataLoader(dataset, batch_size=64, num_workers=8)
"""

ADVANCED = """
dataset = CombinedHDF5Dataset(
    paths=hdf5_files,
    allowed_guids=["patient_001", "patient_002"],  # Specific patients
    cs_label=True,
    epoch_min=10.0,       # Only epochs >= 10
    epoch_max=50.0,       # Only epochs <= 50
    label=2,              # Target class 2 presence
    load_fields=["fhr_st", "fhr_ph", "target", "weight"],  # Specific fields
    dtype=torch.float16   # Mixed precision
)
"""

SINGLE_GPU = """
dataset = CombinedHDF5Dataset(
    paths=hdf5_files,
    cache_size=5000,      # Large cache
    pin_memory=True,
    dtype=torch.float32
)

dataloader = DataLoader(
    dataset,
    batch_size=128,
    num_workers=12,       # High worker count
    pin_memory=True,
    persistent_workers=True,
    prefetch_factor=3
)
"""

DISTRIBUTED = """
from hdf5_dataset import create_optimized_dataloader

dataloader = create_optimized_dataloader(
    hdf5_files=["train1.h5", "train2.h5", "train3.h5"],
    batch_size=32,        # Per GPU
    num_workers=4,        # Per GPU
    rank=rank,
    world_size=world_size,
    # Dataset arguments
    cs_label=True,
    label=1,
    cache_size=1000
)
for epoch in range(num_epochs):
    dataloader.sampler.set_epoch(epoch)  # Important for proper shuffling

    for batch in dataloader:
        inputs = batch["fhr_st"].cuda(non_blocking=True)
        seen(inputs, batch["guid"])
"""

SPAWN = """
optimal_dataloader = DataLoader(
    dataset,
    batch_size=64,                    # Adjust based on GPU memory
    num_workers=2,
    pin_memory=True,                  # Essential for GPU training
    drop_last=True,                   # Consistent batch sizes
    persistent_workers=True,          # Faster epoch transitions
    prefetch_factor=2,                # Pre-load batches
    multiprocessing_context='spawn'   # Windows compatibility
)
"""

MONITORING = """
stats = dataset.get_stats()
print(f"Total samples: {stats['total_samples']}")
print(f"Cache hit rate: {stats['cache_size']} cached")
print(f"Access count: {stats['access_count']}")
print(f"Data type: {stats['dtype']}")
print(f"Cache size: {len(dataset._cache)} samples")
dataset.clear_cache()
print(f"Cache size: {len(dataset._cache)} samples")
"""

REPRODUCIBLE = """
seed_worker, generator = set_reproducible_training(42)

train_loader = DataLoader(
    dataset,
    batch_size=32,
    shuffle=True,
    num_workers=4,
    worker_init_fn=seed_worker,
    generator=generator  # For reproducible shuffling
)
"""

PER_EPOCH = """
from torch.utils.data import DistributedSampler

for epoch in range(num_epochs):
    if isinstance(train_loader.sampler, DistributedSampler):
        train_loader.sampler.set_epoch(epoch)
    orders.append([guid for batch in train_loader for guid in batch["guid"]])
"""


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What the examples take for granted."""
    monkeypatch.chdir(tmp_path)
    files = write_recordings(tmp_path)
    for path in files:
        with h5py.File(path, "r+", libver="latest") as file:
            file["fhr_ph"] = 2 * file["fhr_st"][:]
    module = types.ModuleType("hdf5_dataset")
    module.CombinedHDF5Dataset = lightning_h5.CombinedHDF5Dataset
    module.create_optimized_dataloader = lightning_h5.create_optimized_dataloader
    monkeypatch.setitem(sys.modules, "hdf5_dataset", module)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.Tensor, "cuda", lambda self, non_blocking=False: self)
    seen = []
    return {
        "torch": torch,
        "DataLoader": DataLoader,
        "hdf5_files": files,
        "seen": lambda *batch: seen.append(batch),
        "batches": seen,
        **{name: getattr(lightning_h5, name) for name in lightning_h5.__all__},
    }


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning", "ignore:.*pin_memory:UserWarning")
@pytest.mark.parametrize("example", [BASIC, SINGLE_GPU], ids=["basic", "single GPU"])
def test_examples_with_a_plain_data_loader(names, example):
    exec(example + LOOP, names)
    n_rows = len(names["dataset"])
    assert n_rows > 0
    assert sum(len(batch[0]) for batch in names["batches"]) == 2 * n_rows


def test_the_advanced_filters(names):
    # Of the few rows of a test's files none passes all of the example's filters: bounds are wider here.
    exec(ADVANCED.replace("10.0", "-100.0").replace("50.0", "100.0"), names)
    dataset = names["dataset"]
    sample = dataset[0]
    assert list(sample) == ["fhr_st", "fhr_ph", "target", "weight"]
    assert sample["fhr_st"].dtype == torch.float16
    assert all((row["target"] == 2).any() for row in dataset.__getitems__(list(range(len(dataset)))))


def test_the_distributed_example_on_two_ranks(names):
    found = {}
    for rank in range(2):
        names["batches"].clear()
        exec(DISTRIBUTED, names | {"rank": rank, "world_size": 2, "num_epochs": 2})
        found[rank] = [guid for _, guids in names["batches"] for guid in guids]
    n_rows = len(lightning_h5.CombinedHDF5Dataset(names["hdf5_files"], cs_label=True, label=1))
    assert len(found[0]) + len(found[1]) in (2 * n_rows, 2 * (n_rows - 1))


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
def test_a_loader_that_starts_fresh_processes(names):
    names["dataset"] = lightning_h5.CombinedHDF5Dataset(names["hdf5_files"])
    exec(SPAWN, names)
    assert sum(len(batch["guid"]) for batch in names["optimal_dataloader"]) == len(names["dataset"]) // 64 * 64
    del names["optimal_dataloader"]


def test_monitoring_says_what_is_kept(names, capsys):
    names["dataset"] = dataset = lightning_h5.CombinedHDF5Dataset(names["hdf5_files"], cache_size=50)
    dataset.read_batch(range(60))
    exec(MONITORING, names)
    said = capsys.readouterr().out
    assert f"Total samples: {len(dataset)}\nCache hit rate: 50 cached\nAccess count: 60" in said
    assert "Cache size: 50 samples\nCache size: 0 samples" in said


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_reproducible_loaders_give_the_same_order(names):
    names["dataset"] = lightning_h5.CombinedHDF5Dataset(names["hdf5_files"], ["fhr_st"])
    orders = []
    for _ in range(2):
        exec(REPRODUCIBLE, names)
        orders.append([value for batch in names["train_loader"] for value in batch["fhr_st"][:, 0, 0].tolist()])
    assert orders[0] == orders[1] != sorted(orders[0])


def test_the_order_changes_with_the_epoch(names):
    dataset = lightning_h5.CombinedHDF5Dataset(names["hdf5_files"], ["guid", "epoch"])
    names |= {"train_loader": lightning_h5.create_optimized_dataloader(dataset), "num_epochs": 3, "orders": []}
    exec(PER_EPOCH, names)
    assert len(set(map(tuple, names["orders"]))) == 3
    assert len({tuple(sorted(order)) for order in names["orders"]}) == 1


def test_the_complete_example_in_its_lightning_form(names):
    """Loaders for training and validation, a hook that times batches, and a trainer."""
    train, val = (
        lightning_h5.create_optimized_dataloader(
            lightning_h5.CombinedHDF5Dataset(files), batch_size=16, is_training=is_training, num_workers=0
        )
        for files, is_training in ((names["hdf5_files"][:2], True), (names["hdf5_files"][2:], False))
    )

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.LazyLinear(1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch["fhr_st"].flatten(1)).square().mean()

        def validation_step(self, batch, batch_idx):
            self.log("loss", self.training_step(batch, batch_idx), batch_size=len(batch["guid"]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Counting(Callback):
        n_batches = 0

        def on_train_batch_end(self, *_):
            self.n_batches += 1

    counting, model = Counting(), Model()
    model.layer(torch.zeros(1, int(np.prod(train.dataset[0]["fhr_st"].shape))))
    quiet_trainer(callbacks=[counting]).fit(model, train, val)
    assert counting.n_batches == 2 * len(train)
