"""The plain recipe: what people write themselves, for others to be compared with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from ...files import FieldNames, field_names, find_array, open_h5
from ...types import Keys

__all__ = ["PlainDataset", "plain_loader", "rows_at_a_time"]

MOST_LABELS = 64 << 20  # bytes: people keep their labels in memory, as long as these are few
MOST_DRAWN = 10_000_000  # rows: torch makes a list of Python's integers of them each epoch
MOST_TRIED = 64  # rows


class PlainDataset(Dataset[Any]):
    """One ``array[i]`` a sample, through the HDF5 library; each process opens the files on first use.

    It is the better kind of these: arrays are looked up once, and labels are kept in memory.

    Args:
        paths: the files, one after the other.
        starts: first row of each, and the number of rows at the end.
        x_key: the input.
        y_key: the target; None gives inputs alone.
    """

    def __init__(self, paths: Sequence[str], starts: Sequence[int], x_key: Keys, y_key: Keys | None) -> None:
        self._paths, self._starts = tuple(paths), [int(start) for start in starts]
        self._parts = [field_names(x_key, "x_key"), *([] if y_key is None else [field_names(y_key, "y_key")])]
        self._open: dict[int, tuple[Any, list[Any]]] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        file = bisect_right(self._starts, index) - 1
        if file not in self._open:
            self._open[file] = self._arrays_of(self._paths[file])
        row, arrays = index - self._starts[file], iter(self._open[file][1])
        parts = [_part(names, [_value(next(arrays), row) for _ in names.keys]) for names in self._parts]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def close(self) -> None:
        """Closes the files; the next sample opens them again."""
        for file, _ in self._open.values():
            with suppress(RuntimeError, OSError):
                file.close()
        self._open = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def _arrays_of(self, path: str) -> tuple[Any, list[Any]]:
        file, arrays = open_h5(path), []
        for part, names in enumerate(self._parts):
            for key in names.keys:
                found = find_array(file, key)
                is_label = part == 1 and len(found.array.shape) == 1 and found.array.dtype.kind in "iufb"
                held = found.array[:] if is_label and found.array.nbytes <= MOST_LABELS else found.array
                arrays.append((held, found.members))
        return file, arrays


def plain_loader(dataset: PlainDataset, batch_size: int, num_workers: int) -> DataLoader[Any]:
    """Torch's own loader, shuffled, whose workers stay between epochs.

    Args:
        dataset: what to read.
        batch_size: rows of a batch.
        num_workers: worker processes.
    """
    # Above that torch's permutation would take gigabytes; what a row costs is the same where some come twice.
    sampler = RandomSampler(dataset, replacement=len(dataset) > MOST_DRAWN)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
    )


def rows_at_a_time(dataset: PlainDataset, seconds: float, most: int) -> int:
    """Rows that are read in so many seconds, after a few were tried; at least one.

    Where a row decodes many chunks, a whole batch takes seconds, and as long to be interrupted.

    Args:
        dataset: what to read; files of it are closed afterwards.
        seconds: time for the rows.
        most: rows, at most.
    """
    rows = np.random.default_rng(0).integers(0, len(dataset), min(most, MOST_TRIED)).tolist()
    try:
        dataset[rows[0]]  # files open
        began, n_read = perf_counter(), 0
        while n_read < len(rows) and perf_counter() - began < seconds:
            dataset[rows[n_read]]
            n_read += 1
        return max(1, min(most, int(n_read * seconds / max(1e-9, perf_counter() - began))))
    finally:
        dataset.close()


def _value(array: Any, row: int) -> Any:
    held, members = array
    value = held[row]
    for member in members:
        value = value[member]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, str):
        return value
    found = np.asarray(value)
    return torch.from_numpy(np.asarray(found, found.dtype.newbyteorder("=")))


def _part(names: FieldNames, values: list[Any]) -> Any:
    if names.kind == "single":
        return values[0]
    return dict(zip(names.names, values, strict=True)) if names.kind == "dict" else tuple(values)
