"""The first batch waits for its own rows only; later ones are read several at a time."""

import threading

import h5py
import numpy as np
import torch
from guards import HANG
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import LazyH5DataModule
from lightning_h5.datasets import RawBatch
from lightning_h5.datasets.file_dataset import FileDataset
from lightning_h5.loading.prefetch import ReadAhead
from lightning_h5.readers import TaskQueue
from lightning_h5.types import BatchToken


class Source:
    """Batches of row numbers. Reading all but the first rows waits until the test is done with the first batch."""

    def __init__(self, n_first):
        self.work, self.sizes, self.has_first, self._n_first = TaskQueue(), [], threading.Event(), n_first

    def begin(self, rows, epoch=None):
        self.sizes.append(len(rows))
        if rows[-1] >= self._n_first:
            assert self.has_first.wait(HANG), "the first batch waits for rows of others"
        return lambda: RawBatch(rows, (torch.from_numpy(rows),))

    def prefetch(self, rows, epoch=None):
        return True


def finish_all(raw, tokens):
    return (part.rows for part in raw.split([len(token.rows) for token in tokens]))


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 7))
def test_the_first_batch_waits_for_no_other(together, n_batches, batch_size):
    rows = np.arange(n_batches * batch_size).reshape(n_batches, batch_size)
    source = Source(batch_size)
    tokens = iter([BatchToken(0, at, of_batch) for at, of_batch in enumerate(rows)])
    batches = ReadAhead(source, finish_all, tokens, 4, together=together)
    found = [next(batches)]
    source.has_first.set()
    found += batches
    assert np.array_equal(found, rows)
    expected, left = [], n_batches
    while left:
        expected.append(min(left, together, 2 ** len(expected)))
        left -= expected[-1]
    assert source.sizes == [n * batch_size for n in expected]


def test_of_many_small_files_the_first_batch_opens_those_of_its_rows(tmp_path, monkeypatch):
    for at in range(60):
        with h5py.File(tmp_path / f"{at:02}.h5", "w") as file:
            file["x"] = np.full((2, 3), at, "f4")
    sizes, original = [], FileDataset.begin
    monkeypatch.setattr(
        FileDataset, "begin", lambda self, rows, *a, **k: (sizes.append(len(rows)), original(self, rows, *a, **k))[1]
    )
    module = LazyH5DataModule(str(tmp_path), x_key="x", batch_size=4)
    module.setup("fit")
    batches = iter(module.train_dataloader())
    next(batches)
    assert sizes[:3] == [4, 8, 16][: len(sizes)]
    assert sum(1 for _ in batches) == 29
    module.teardown("fit")
