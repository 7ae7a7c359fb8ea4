"""Where samples come from: the file, row, segment and step of each; and their batches, read from the files again."""

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
    """Where a sample comes from.

    Attributes:
        file: path of its file.
        row: its row in the arrays of its file, or of its group. Of a window the row of its step, of a whole segment its
            number in its file or group, of a patch the number of the sample.
        segment: name of its segment; None if samples are rows.
        step: its step in the segment; of a patch its first index along each axis that is cut; None if samples are rows.
        source: its source in a mixture; None if there is none, or if sources have no names.
    """

    file: str
    row: int
    segment: str | None = None
    step: int | tuple[int, ...] | None = None
    source: str | None = None


def origins_of(dataset: RowDataset, numbers: IntArray, epoch: int) -> list[Origin]:
    """Return where samples come from.

    Args:
        dataset: the samples; of all ranks.
        numbers: numbers of the samples, as plans count them over all ranks.
        epoch: that asks for them.
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
    """Return the batch of a token as a loader yields it, with the draws that it had, read from the files now.

    Args:
        dataset: the samples; nothing is loaded into memory for it.
        token: its rows are numbers among those of all ranks.
        collate: makes a batch of samples, if the token asks for these.
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
