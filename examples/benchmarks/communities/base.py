"""What is known of a community: its files, its own loader, and the call that reads the same samples here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

Arrays = tuple[np.ndarray[Any, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Community:
    """Files of a community and two ways to load them.

    Paths are relative: everything runs in the folder of the files.

    Attributes:
        title: as the page is called.
        loader: the loader of theirs that is rebuilt here.
        sample: what a sample is, in the plural.
        write: writes the files into a folder, as the community's own programs do; the argument is their size: 1 is for
            measurements, and tests take a few hundredths. There are at least two batches of training samples.
        dataset: makes their dataset, as they wrote it.
        collate_fn: theirs; None is torch's.
        loader_of: makes their loader of their dataset and a number of workers, if it is not an ordinary `DataLoader`.
        batch_size: of both loaders.
        options: of the data module, as on the page.
        data_module: its class.
        their_arrays: the arrays of a sample of their dataset.
        our_arrays: those of the same sample of ours, in the same order.
    """

    title: str
    loader: str
    sample: str
    write: Callable[[Path, float], None]
    dataset: Callable[[], Dataset[Any]]
    options: Mapping[str, Any]
    their_arrays: Callable[[Any], Arrays]
    our_arrays: Callable[[Any], Arrays]
    collate_fn: Callable[[list[Any]], Any] | None = None
    loader_of: Callable[[Any, int], DataLoader[Any]] | None = None
    batch_size: int = 32
    data_module: str = "LazyH5DataModule"

    def their_loader(self, num_workers: int) -> DataLoader[Any]:
        """Return their loader: shuffled, with torch's usual settings."""
        if self.loader_of is not None:
            return self.loader_of(self.dataset(), num_workers)
        return DataLoader(
            self.dataset(),
            self.batch_size,
            shuffle=True,
            num_workers=num_workers,
            collate_fn=self.collate_fn,
        )

    def pairs(self, ours: Any, most: int) -> Iterator[tuple[Arrays, Arrays]]:
        """Yield the arrays of samples of theirs beside those of ours, after looking that there are equally many.

        Args:
            ours: the dataset of this package.
            most: samples, spread over all.
        """
        theirs: Any = self.dataset()
        assert len(theirs) == len(ours), f"they have {len(theirs):,} samples, this package has {len(ours):,}"
        for number in np.unique(np.linspace(0, len(theirs) - 1, most).astype(int)).tolist():
            yield self.their_arrays(theirs[number]), self.our_arrays(ours[number])
