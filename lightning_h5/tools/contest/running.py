"""A contender at work: its dataset and loader as the data module of that name makes them, and their end."""

from __future__ import annotations

import multiprocessing
from typing import Any

from ...datasets import H5LazyDataset, RankMemCachedH5Dataset, load_shards
from ...files import process_pool
from ...loading import H5DataLoader, create_optimized_dataloader
from .contenders import BenchRows, Contender
from .plain_recipe import PlainDataset, plain_loader

__all__ = ["Running"]


class Running:
    """A contender at work: batches without end, epoch after epoch. Close it.

    Args:
        contender: who reads.
        rows: what is read.
        batch_size: rows of a batch, where they are not those of ``rows``.

    Raises:
        H5Error: the rows cannot be read.
    """

    def __init__(self, contender: Contender, rows: BenchRows, batch_size: int | None = None) -> None:
        self._loader: Any
        self._n_rows, self._n_taken, self._n_last, self._epoch = rows.n_rows, 0, 0, -1
        self._batches: Any = iter(())
        self._paths, self._loader = rows.table.paths, None
        size, table = batch_size or rows.batch_size, rows.table
        if contender.way == "plain":
            self._dataset: Any = PlainDataset(table.paths, table.starts.tolist(), rows.x_key, rows.y_key)
            self._loader = plain_loader(self._dataset, size, contender.num_workers)
            return
        self._dataset = _dataset_of(contender, rows)
        try:
            if isinstance(self._dataset, RankMemCachedH5Dataset):
                load_shards({"": self._dataset}, is_alone=True, shows_bar=False)
            self._loader = create_optimized_dataloader(
                self._dataset,
                size,
                num_workers=contender.num_workers,
                world_size=1,
                rank=0,
                seed=0,
                shuffle_bytes=contender.shuffle_bytes,
                prefetch_factor=contender.prefetch_factor,
            )
        except BaseException:
            self.close()
            raise

    @property
    def n_left(self) -> int:
        """Rows that are left of this epoch; 0 at its end."""
        return self._n_rows - self._n_taken

    def next_batch(self) -> Any:
        """The next batch, of the next epoch where one is over."""
        while True:
            for batch in self._batches:
                self._n_last = _rows_of(batch)
                self._n_taken += self._n_last
                return batch
            self._epoch, self._n_taken = self._epoch + 1, 0
            if isinstance(self._loader, H5DataLoader):
                self._loader.sampler.set_epoch(self._epoch)
            self._batches = iter(self._loader)

    def take(self) -> int:
        """Takes the next batch and drops it; its rows."""
        self.next_batch()
        return self._n_last

    def close(self) -> None:
        """Ends workers and threads, closes the files, and gives the memory back."""
        self._batches = iter(())
        if isinstance(self._loader, H5DataLoader):
            self._loader.close()
        elif (workers := getattr(self._loader, "_iterator", None)) is not None:
            workers._shutdown_workers()  # torch does it when the loader is forgotten, whenever that is
            self._loader._iterator = None
        self._dataset.close()
        for path in self._paths:
            process_pool().close(path)  # which whoever loaded rows into memory leaves open


def _dataset_of(contender: Contender, rows: BenchRows) -> H5LazyDataset | RankMemCachedH5Dataset:
    """As the data module of that name makes it."""
    if contender.way == "lazy":
        return H5LazyDataset(rows.table.paths, rows.x_key, rows.y_key, mmap=contender.mmap)
    dataset = RankMemCachedH5Dataset(
        rows.table.paths, rows.x_key, rows.y_key, dtype_x=None, rank=0, world_size=1, preload=False
    )
    dataset.for_workers = contender.num_workers > 0 and multiprocessing.get_context().get_start_method() != "fork"
    return dataset


def _rows_of(batch: Any) -> int:
    while isinstance(batch, dict | tuple | list):
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        if isinstance(first, str | bytes):
            break
        batch = first
    return len(batch)
