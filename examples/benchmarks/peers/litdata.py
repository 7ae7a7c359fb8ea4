"""litdata: chunks of serialized samples, read through its own dataset and loader.

Rows are stored both ways that its users write: as tensors, which it deserializes again and again (0.2.76 on two cores,
rows/s of images: 6,000 without workers and 9,000 with two), and as NumPy arrays (65,000 and 3,000 to 20,000).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import litdata
import numpy as np
import torch
from common import BATCH_SIZE, Epoch
from rows import Data

from peers import LoaderEpochs

CHUNK_BYTES = "64MB"  # as its documentation recommends


def open_epochs(data: Data, folder: Path, stack: ExitStack) -> dict[str, Epoch]:
    """Epochs over tensors and over arrays, with two workers and without."""
    for name in ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER"):
        os.environ[name] = str(folder / name.lower())
    kinds = {"litdata": torch.from_numpy, "litdata with arrays": np.asarray}
    for kind, make in kinds.items():
        convert(data, folder / kind, make)
    return {f"{kind}, {n} workers": loader(folder / kind, n, stack) for n in (2, 0) for kind in kinds}


def convert(data: Data, folder: Path, make: Callable[[Any], Any]) -> None:
    """Writes the rows, without a compression, and without its many words."""
    interrupted = signal.getsignal(signal.SIGINT)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        litdata.optimize(
            fn=partial(sample, data, make),
            inputs=list(range(len(data.x))),
            output_dir=str(folder),
            chunk_bytes=CHUNK_BYTES,
            num_workers=1,
            start_method="fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn",
            verbose=False,
        )
    signal.signal(signal.SIGINT, interrupted)  # it installs a handler that ends the process immediately


def sample(data: Data, make: Callable[[Any], Any], row: int) -> dict[str, Any]:
    """A row as litdata stores it."""
    return {"x": make(data.x[row]), "label": int(data.labels[row])}


def loader(folder: Path, n_workers: int, stack: ExitStack) -> Epoch:
    """Shuffled batches; the worker processes stay."""
    dataset = litdata.StreamingDataset(str(folder), shuffle=True, drop_last=False)
    batches = litdata.StreamingDataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=n_workers, persistent_workers=n_workers > 0
    )
    return LoaderEpochs(batches, stack)
