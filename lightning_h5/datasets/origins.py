"""The origin of samples: file, row, segment and step; and batches that are read from the files again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..types import BatchToken, IntArray
from .base import RowDataset
from .file_dataset import FileDataset
from .held_dataset import HeldDataset
from .mixture import MixtureDataset
from .raw_batch import RawBatch
from .table_dataset import TableDataset, places_columns
from .user_functions import own_streams

__all__ = ["Origin", "origins_of", "read_again"]


class Origin(NamedTuple):
    """The origin of a sample.

    Attributes:
        file: path of the file.
        row: row in the arrays of the file, or of the group: the row of a window's own step, the number of a whole
            segment in its file or group, or the number of a patch.
        segment: name of the segment; None if samples are rows.
        step: step in the segment, or the first index of a patch along each axis that is cut; None if samples are rows.
        source: source in a mixture; None without a mixture, or if sources have no names.
    """

    file: str
    row: int
    segment: str | None = None
    step: int | tuple[int, ...] | None = None
    source: str | None = None


def origins_of(dataset: RowDataset, numbers: IntArray, epoch: int) -> list[Origin]:
    """Return the origins of samples.

    Args:
        dataset: the samples of all ranks.
        numbers: numbers of the samples, as plans count them over all ranks.
        epoch: the epoch of the request, which selects random windows.
    """
    if isinstance(dataset, MixtureDataset):
        origins: list[Any] = [None] * len(numbers)
        for share in dataset.shares(numbers, epoch):
            source = None if dataset.names is None else dataset.names[share.source]
            of_source = _origins_of_table(dataset.sources[share.source], share.rows, share.cycle)
            for place, origin in zip(share.places.tolist(), of_source, strict=True):
                origins[place] = origin._replace(source=source)
        return origins
    return _origins_of_table(dataset, numbers % dataset.n_rows, epoch)


def _origins_of_table(dataset: RowDataset, numbers: IntArray, epoch: int | None) -> list[Origin]:
    if not isinstance(dataset, TableDataset):  # of another package
        return [Origin(file, row) for file, row in dataset.places_of(numbers)]
    table = dataset.table
    files, rows = dataset.files_and_rows(numbers, epoch)
    paths = [table.paths[file] for file in files.tolist()]
    if not table.indexer.has_places:
        return [Origin(file, row) for file, row in zip(paths, rows.tolist(), strict=True)]
    segments, steps = places_columns(table, table.indexer.places(dataset.located(numbers), epoch))
    return [
        Origin(file, row, segment, tuple(step) if isinstance(step, list) else step)
        for file, row, segment, step in zip(paths, rows.tolist(), segments, steps.tolist(), strict=True)
    ]


def read_again(dataset: RowDataset, token: BatchToken, collate: Callable[[Any], Any] | None = None) -> Any:
    """Read the batch of a token from the files again, with the same random draws.

    Args:
        dataset: the samples; they are not loaded into memory.
        token: the batch; its rows are counted over all ranks.
        collate: collates samples, if the token requests samples.
    """
    raw = _raw(dataset, token.rows, token.epoch)
    if not (dataset.has_transforms or token.samples):
        return dataset.finish(raw)
    with own_streams(token.draws):
        batch = dataset.finish_token(raw, token)
        return batch if collate is None else collate(batch)


def _raw(dataset: RowDataset, numbers: IntArray, epoch: int) -> RawBatch:
    if not isinstance(dataset, HeldDataset):
        return dataset.gather(numbers, epoch)
    files = FileDataset(
        dataset.table, dataset.fields, batch_transform=None, indices=dataset.indices, options=dataset.options
    )
    with files:
        return files.gather(numbers % dataset.n_rows, epoch)._replace(rows=numbers)
