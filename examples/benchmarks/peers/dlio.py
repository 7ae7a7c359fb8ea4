"""The data loader that DLIO runs with this package: `data_loader_classname: peers.dlio.OurLoader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dlio_benchmark.common.enumerations import DataLoaderType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader

from lightning_h5 import LazyH5DataModule

BUDGET = {"shuffle": {"buffer": "64 MiB"}, "files": {"cache_bytes": "64 MiB"}}


class OurLoader(BaseDataLoader):  # type: ignore[misc]
    """DLIO's files, read by the training loader of this package."""

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)

    def read(self) -> None:
        """Open the files."""
        module = LazyH5DataModule(
            self._args.file_list_train, x_key="records", batch_size=self.batch_size, drop_last=True, **BUDGET
        )
        module.setup("fit")
        self._loader = module.train_dataloader()

    def next(self) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        self._loader.sampler.set_epoch(self.epoch_number)
        self.epoch_number += 1
        yield from self._loader

    def finalize(self) -> None:
        """Nothing is left to do after an epoch."""
