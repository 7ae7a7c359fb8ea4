"""FFCV: one file of fixed-size samples in the system's page cache, gathered by compiled threads, random order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any

from common import BATCH_SIZE, Epoch
from ffcv.fields import IntField, NDArrayField
from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import Squeeze, ToTensor
from ffcv.writer import DatasetWriter
from rows import Data
from torch import Tensor


class Rows:
    """The rows as FFCV's writer wants them."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data.x)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.data.x[index], int(self.data.labels[index])


def open_epochs(data: Data, folder: Path, stack: ExitStack) -> dict[str, Epoch]:
    """Epochs with one and with two of its threads."""
    file = folder / "rows.beton"
    fields = {"x": NDArrayField(dtype=data.x.dtype, shape=data.x.shape[1:]), "label": IntField()}
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        DatasetWriter(str(file), fields, num_workers=1).from_indexed_dataset(Rows(data))
    return {f"ffcv, {n} thread{'s'[: n - 1]}": loader(file, n) for n in (1, 2)}


def loader(file: Path, n_threads: int) -> Epoch:
    """Shuffled batches, in memory that is used again."""
    batches = Loader(
        str(file),
        batch_size=BATCH_SIZE,
        num_workers=n_threads,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={
            "x": [NDArrayDecoder(), ToTensor()],
            "label": [IntDecoder(), ToTensor(), Squeeze(1)],
        },
    )

    def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
        yield from batches

    return epoch
