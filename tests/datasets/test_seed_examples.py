"""Every usage example of the document that ``H5LazyDataset`` was first described in runs as it is written there.

The import line alone is made true by a stand-in module; torchvision, which is not a dependency, by another.
"""

import random
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_h5 import H5LazyDataset, h5_worker_init_fn

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

    def run(text):
        batches = []
        namespace = {"np": np, "seen": lambda *batch: batches.append(batch)}
        with warnings.catch_warnings():
            # The example makes a tensor of what is one already; torch has an opinion about that.
            warnings.filterwarnings("ignore", message="To copy construct from a tensor")
            exec(text, namespace)
            return namespace, batches or list(namespace["dataloader"])

    return run


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
