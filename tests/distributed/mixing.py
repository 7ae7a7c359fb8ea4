"""Data modules of mixtures, weights, segments and windows whose batches are as ``killing.Historian`` wants them."""

import torch
from arguments import nested

from lightning_h5 import CombinedHDF5DataModule

SOURCES = {"many": {"max": 39}, "some": {"min": 40, "max": 53}, "few": {"min": 54}}


def pair(batch):
    """Rows and their numbers; of segments those that are no padding, of windows one after the other."""
    x, rows = batch["x"], batch["row"]
    if "length" in batch:
        is_step = torch.arange(x.shape[1]) < batch["length"][:, None]
        x, rows = x[is_step], rows[is_step]
    return x.reshape(-1, 1), rows.reshape(-1).to(torch.int64)


class Mixed(CombinedHDF5DataModule):
    def __init__(self, file, val_file, *, batch_size, with_index, **options):
        sources = {name: {"paths": file, "where": {"row": rows}} for name, rows in SOURCES.items()}
        options |= {"sources": sources, "val_path": val_file, "batch_size": batch_size, "cache_size": 0}
        super().__init__(batch_transform=pair, **nested(**options))


class Rows(CombinedHDF5DataModule):
    def __init__(self, file, val_file, *, batch_size, with_index, **options):
        super().__init__(file, val_file, batch_size=batch_size, batch_transform=pair, **nested(**options))
