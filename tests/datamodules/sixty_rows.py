"""The data that tests of trainers' options and of users' ways share: 60 rows to train on, 20 for all other stages."""

import pytest
from arguments import nested

from lightning_h5 import LazyH5DataModule

ROWS, VAL_ROWS, BATCH = 60, 20, 8  # six full batches and two of 6; for validation 8, 6 and 6
ALL, VAL = list(range(ROWS)), list(range(VAL_ROWS))
WORKERS = pytest.mark.parametrize("num_workers", [0, 1])


def module(files, **options):
    """A data module over a file to train on, and one for all other stages."""
    train, val = files
    paths = {"train_path": train, "val_path": val, "test_path": val, "predict_path": val}
    common = {"batch_size": BATCH, "with_index": True}
    return LazyH5DataModule(**nested(**(paths | common | options)))
