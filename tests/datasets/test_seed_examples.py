"""Every usage example of the documents that our datasets were first described in runs as it is written there.

The import line alone is made true by a stand-in module; torchvision, which is not a dependency, by another; and where
there is no GPU, what an example says to one is said to the CPU.
"""

import os
import random
import socket
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_h5 import EpochShuffleSampler, H5LazyDataset, RankMemCachedH5Dataset, h5_worker_init_fn
from lightning_h5.order import _balanced_contiguous_shard, _interleaved_indices

BASIC = """
import torch
from torch.utils.data import DataLoader
from src.nn_handler.dataloaders.h5_dataloader import H5LazyDataset, h5_worker_init_fn

# Create a dataset from an HDF5 file with input-target pairs
dataset = H5LazyDataset(
    path="data/my_dataset.h5",
    x_key="images",
    y_key="labels",
    x_dtype=np.float32,
    y_dtype=np.int64
)

# Create a DataLoader with worker initialization
dataloader = DataLoader(
    dataset,
    batch_size=32,
    shuffle=True,
    num_workers=4,
    worker_init_fn=h5_worker_init_fn
)

# Use the dataloader in a training loop
for inputs, targets in dataloader:
    seen(inputs, targets)
"""

TRANSFORMS = """
import torch
import torchvision.transforms as T
from torch.utils.data import DataLoader
from src.nn_handler.dataloaders.h5_dataloader import H5LazyDataset, h5_worker_init_fn

# Define transformations
transform = T.Compose([
    T.ToPILImage(),
    T.RandomHorizontalFlip(),
    T.ToTensor(),
    T.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
])

target_transform = lambda y: torch.tensor(y, dtype=torch.long)

# Create a dataset with transformations
dataset = H5LazyDataset(
    path="data/my_dataset.h5",
    x_key="images",
    y_key="labels",
    transform=transform,
    target_transform=target_transform
)

# Create a DataLoader
dataloader = DataLoader(
    dataset,
    batch_size=32,
    shuffle=True,
    num_workers=4,
    worker_init_fn=h5_worker_init_fn
)
"""

INPUT_ONLY = """
import torch
from torch.utils.data import DataLoader
from src.nn_handler.dataloaders.h5_dataloader import H5LazyDataset, h5_worker_init_fn

# Create a dataset with only input data (no targets)
dataset = H5LazyDataset(
    path="data/features.h5",
    x_key="embeddings",
    y_key=None,  # No targets
    x_dtype=np.float32
)

# Create a DataLoader
dataloader = DataLoader(
    dataset,
    batch_size=64,
    shuffle=False,
    num_workers=2,
    worker_init_fn=h5_worker_init_fn
)

# Use for inference or feature extraction
for features in dataloader:
    seen(features)
"""

DISTRIBUTED = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.nn.parallel import DistributedDataParallel as DDP
from src.nn_handler.dataloaders.rank_cached_h5_dataloader import RankMemCachedH5Dataset, EpochShuffleSampler

# Initialize distributed environment (typically done with torch.distributed.launch or torchrun)
dist.init_process_group(backend="nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)

# Create dataset with rank-specific sharding
dataset = RankMemCachedH5Dataset(
    path="data/large_dataset.h5",
    x_key="images",
    y_key="labels",
    mode="contiguous",  # Each rank gets a contiguous slice
    pin_host_memory=True,  # Pin memory for faster GPU transfer
)

# Create sampler with epoch-based shuffling
sampler = EpochShuffleSampler(
    data_len=len(dataset),
    seed=42,  # Ensure reproducible shuffling across runs
    shuffle=True
)

# Create DataLoader (no need for DistributedSampler as sharding is handled by the dataset)
dataloader = DataLoader(
    dataset,
    batch_size=32,
    sampler=sampler,  # Use our custom sampler
    num_workers=4,  # Can use multiple workers safely
    pin_memory=False,  # Already pinned in dataset
)

# Model setup
model = YourModel().cuda()
model = DDP(model, device_ids=[local_rank])

# Training loop
for epoch in range(num_epochs):
    # Set epoch for reproducible shuffling
    sampler.set_epoch(epoch)

    for inputs, targets in dataloader:
        inputs = inputs.cuda(non_blocking=True)
        targets = targets.cuda(non_blocking=True)

        # Training step
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        # ... rest of training loop
        seen(inputs, targets)
"""

INTERLEAVED = """
# Create dataset with interleaved sharding for better class balance
dataset = RankMemCachedH5Dataset(
    path="data/imbalanced_dataset.h5",
    x_key="images",
    y_key="labels",
    mode="interleave",  # Each rank gets samples at stride=world_size
    dtype_x=np.float32,
    dtype_y=np.int64,
)
"""

EXTRACTION = """
# Create dataset with only input data (no targets)
dataset = RankMemCachedH5Dataset(
    path="data/features.h5",
    x_key="embeddings",
    y_key=None,  # No targets
    mode="contiguous",
    dtype_x=np.float32,
)

# Create sampler without shuffling for deterministic order
sampler = EpochShuffleSampler(
    data_len=len(dataset),
    shuffle=False  # No shuffling for feature extraction
)

# Create DataLoader
dataloader = DataLoader(
    dataset,
    batch_size=64,
    sampler=sampler,
    num_workers=4,
)

# Feature extraction loop
features_list = []
for features in dataloader:
    features = features.cuda(non_blocking=True)
    # Process or store features
    processed_features = model(features)
    features_list.append(processed_features.cpu())
"""

IMAGES = np.random.default_rng(0).integers(0, 256, (100, 3, 4, 5), dtype=np.uint8)
LABELS = np.arange(100, dtype="u2")
EMBEDDINGS = np.random.default_rng(1).normal(size=(130, 7))
N_STARTED = "ignore:This DataLoader will create"


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def __call__(self, image):
        return (image - self.mean) / self.std


def transforms_stand_in():
    """What the example uses of torchvision, for tensors; the flip is left out, to have one right answer."""
    module = types.ModuleType("torchvision.transforms")
    module.Compose, module.Normalize = Compose, Normalize
    module.ToPILImage = module.RandomHorizontalFlip = lambda: torch.clone
    module.ToTensor = lambda: lambda image: image.float() / 255
    return module


@pytest.fixture
def run_example(make_h5, monkeypatch, tmp_path):
    make_h5(images=IMAGES, labels=LABELS, name="data/my_dataset.h5")
    make_h5(embeddings=EMBEDDINGS, name="data/features.h5")
    monkeypatch.chdir(tmp_path)
    home = types.ModuleType("src.nn_handler.dataloaders.h5_dataloader")
    home.H5LazyDataset, home.h5_worker_init_fn = H5LazyDataset, h5_worker_init_fn
    for name in ("src", "src.nn_handler", "src.nn_handler.dataloaders", "torchvision"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    transforms = transforms_stand_in()
    monkeypatch.setitem(sys.modules, "torchvision.transforms", transforms)
    sys.modules["torchvision"].transforms = transforms

    def run(text, names=()):
        batches = []
        namespace = {"np": np, "seen": lambda *batch: batches.append(batch), **dict(names)}
        with warnings.catch_warnings():
            # The example makes a tensor of what is one already; torch has an opinion about that.
            warnings.filterwarnings("ignore", message="To copy construct from a tensor")
            exec(text, namespace)
            return namespace, batches or list(namespace["dataloader"])

    return run


@pytest.fixture
def run_distributed(run_example, make_h5, monkeypatch):
    """Runs an example in a process group, of this process alone."""
    for name in ("large", "imbalanced"):
        make_h5(images=IMAGES, labels=LABELS.astype("i4"), name=f"data/{name}_dataset.h5")
    home = types.ModuleType("src.nn_handler.dataloaders.rank_cached_h5_dataloader")
    home.RankMemCachedH5Dataset, home.EpochShuffleSampler = RankMemCachedH5Dataset, EpochShuffleSampler
    monkeypatch.setitem(sys.modules, home.__name__, home)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        as_torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "LOCAL_RANK": "0"}
    for name, value in (as_torchrun | {"RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    if not torch.cuda.is_available():
        begin, parallel = torch.distributed.init_process_group, torch.nn.parallel.DistributedDataParallel
        monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: begin("gloo"))
        monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda model, device_ids: parallel(model))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, non_blocking: tensor)
        monkeypatch.setattr(torch.nn.Module, "cuda", lambda module: module)

    def run(text):
        names = {
            "os": os,
            "num_epochs": 2,
            "YourModel": lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 2)),
            "criterion": lambda outputs, targets: (outputs.mean(dim=1) - targets).square().mean(),
        }
        return run_example(text, names)

    yield run
    torch.distributed.destroy_process_group()


def in_order(batches):
    """Inputs sorted by their labels, which are the row numbers."""
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    order = targets.argsort()
    return inputs[order], targets[order]


def test_basic_usage(run_example):
    _, batches = run_example(BASIC)
    assert [len(inputs) for inputs, _ in batches] == [32, 32, 32, 4]
    inputs, targets = in_order(batches)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert np.array_equal(inputs.numpy(), IMAGES.astype(np.float32))
    assert targets.tolist() == list(range(100))
    assert torch.cat([targets for _, targets in batches]).tolist() != list(range(100))  # shuffled


def test_with_transformations(run_example):
    namespace, batches = run_example(TRANSFORMS)
    inputs, targets = in_order(batches)
    assert targets.dtype == torch.int64
    assert targets.tolist() == list(range(100))
    expected = torch.stack([namespace["transform"](torch.from_numpy(image)) for image in IMAGES])
    assert torch.equal(inputs, expected)


def test_input_only_dataset(run_example):
    _, batches = run_example(INPUT_ONLY)
    assert [len(features) for (features,) in batches] == [64, 64, 2]
    assert np.array_equal(torch.cat([features for (features,) in batches]), EMBEDDINGS.astype(np.float32))


def test_distributed_training(run_distributed):
    _, batches = run_distributed(DISTRIBUTED)
    assert [len(inputs) for inputs, _ in batches] == [32, 32, 32, 4] * 2
    orders = []
    for epoch in (batches[:4], batches[4:]):
        inputs, targets = in_order(epoch)
        assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int32)
        assert np.array_equal(inputs.cpu().numpy(), IMAGES.astype(np.float32))
        assert targets.tolist() == list(range(100))
        orders.append(torch.cat([targets for _, targets in epoch]).tolist())
    assert orders[0] != orders[1]


def test_interleaved_sharding(run_distributed):
    before, after = DISTRIBUTED.split("# Create sampler", 1)
    rest = f"# Create sampler{after}"  # "the same as the basic example"
    _, batches = run_distributed(before.split("# Create dataset")[0] + INTERLEAVED + rest)
    inputs, targets = in_order(batches[:4])
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert np.array_equal(inputs.cpu().numpy(), IMAGES.astype(np.float32))


def test_feature_extraction(run_distributed):
    before = DISTRIBUTED.split("# Create dataset")[0]
    namespace, _ = run_distributed(before + "model = torch.nn.Identity()\n" + EXTRACTION)
    assert [len(features) for features in namespace["features_list"]] == [64, 64, 2]
    assert np.array_equal(torch.cat(namespace["features_list"]), EMBEDDINGS.astype(np.float32))


def test_every_argument_of_the_rank_cached_document_is_taken(make_h5):
    path, lines = make_h5({"images": IMAGES, "labels": LABELS}, libver="latest"), []
    dataset = RankMemCachedH5Dataset(
        path,
        "images",
        "labels",
        mode="contiguous",
        dtype_x=np.float32,
        dtype_y=np.int64,
        transform=torch.clone,
        target_transform=torch.clone,
        pin_host_memory=True,
        share_memory=True,
        rdcc_nbytes=256 * 1024**2,
        rdcc_nslots=1_000_003,
        rdcc_w0=0.75,
        swmr=True,
        log_fn=lines.append,
    )
    assert (len(dataset), len(lines)) == (100, 1)
    image, label = dataset[7]
    assert (image.dtype, label.dtype, label.shape, int(label)) == (torch.float32, torch.int64, (), 7)


def test_the_helper_functions_of_the_document_are_there():
    assert [_balanced_contiguous_shard(10, 3, rank) for rank in range(3)] == [(0, 4), (4, 7), (7, 10)]
    assert _interleaved_indices(10, 3, 1).tolist() == [1, 4, 7]


def test_every_argument_of_the_document_is_taken_by_position_and_by_name(make_h5):
    path = make_h5(images=IMAGES, labels=LABELS)
    identity = torch.clone
    by_position = H5LazyDataset(
        path, "images", "labels", np.float32, np.int64, identity, identity, 256 * 1024**2, 1_000_003, 0.75, True
    )
    by_name = H5LazyDataset(
        path=path,
        x_key="images",
        y_key="labels",
        x_dtype=np.float32,
        y_dtype=np.int64,
        transform=identity,
        target_transform=identity,
        rdcc_nbytes=256 * 1024**2,
        rdcc_nslots=1_000_003,
        rdcc_w0=0.75,
        swmr=True,
    )
    for dataset in (by_position, by_name):
        assert len(dataset) == 100
        image, label = dataset[7]
        assert (image.dtype, label.dtype, label.shape, int(label)) == (torch.float32, torch.int64, (), 7)
        dataset.close()
        assert torch.equal(dataset[7][0], image)  # a closed dataset opens its files again


def test_a_deleted_dataset_leaves_no_error(make_h5):
    dataset = H5LazyDataset(make_h5(x=IMAGES), "x")
    dataset[0]
    del dataset


def test_the_worker_function_gives_workers_streams_of_their_own(make_h5):
    dataset = H5LazyDataset(make_h5(x=np.zeros((8, 1))), "x", transform=draw)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, worker_init_fn=h5_worker_init_fn)
    drawn = torch.cat([batch for _ in range(2) for batch in loader])
    for stream in drawn.T.tolist():  # Python's, NumPy's and torch's
        assert len(set(stream)) == 16  # other numbers for each row, worker and epoch


def draw(x):
    # The old NumPy stream is the one that transforms draw from.
    return torch.tensor([random.random(), np.random.random(), torch.rand(()).item()])  # noqa: NPY002
