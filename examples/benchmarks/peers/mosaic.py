"""mosaicml-streaming: shards of serialized samples, read through its own dataset and torch's loader."""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from common import BATCH_SIZE, Epoch
from rows import Data
from torch.utils.data import DataLoader

from peers import LoaderEpochs


def import_streaming() -> Any:
    """The package ``streaming``, also where torchvision is absent.

    It imports torchvision for data sets that nobody here uses. There are no wheels of that on PyPI that go with a
    CPU-only torch: installed beside one, they break ``import lightning`` too.
    """
    used = {"datasets": "VisionDataset", "transforms": "", "transforms.functional": "to_tensor"}
    names = [] if find_spec("torchvision") else ["torchvision", *(f"torchvision.{name}" for name in used)]
    for name in names:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
        setattr(sys.modules[name], used.get(name.partition(".")[2]) or "__doc__", object)
    try:
        return importlib.import_module("streaming")
    finally:
        for name in names:
            del sys.modules[name]


streaming = import_streaming()
clean_stale_shared_memory = importlib.import_module("streaming.base.util").clean_stale_shared_memory


def open_epochs(data: Data, folder: Path, stack: ExitStack) -> dict[str, Epoch]:
    """Epochs with two workers and without."""
    convert(data, folder)
    clean_stale_shared_memory()  # left by killed runs, with which it refuses to start
    stack.callback(clean_stale_shared_memory)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # from its decoder
    return {f"mosaicml-streaming, {n} workers": loader(folder, n, stack) for n in (2, 0)}


def convert(data: Data, folder: Path) -> None:
    """Writes the rows, without a compression."""
    shape = ",".join(map(str, data.x.shape[1:]))
    columns = {"x": f"ndarray:{data.x.dtype.name}:{shape}", "label": "int"}
    with streaming.MDSWriter(out=str(folder), columns=columns) as writer:
        for row, label in zip(data.x, data.labels.tolist(), strict=True):
            writer.write({"x": row, "label": label})


def loader(folder: Path, n_workers: int, stack: ExitStack) -> Epoch:
    """Shuffled batches; the worker processes stay."""
    tempdir, tempfile.tempdir = tempfile.tempdir, str(folder)  # for its lock files
    try:
        dataset = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH_SIZE)
    finally:
        tempfile.tempdir = tempdir
    batches = DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=n_workers, persistent_workers=n_workers > 0)
    return LoaderEpochs(batches, stack)
