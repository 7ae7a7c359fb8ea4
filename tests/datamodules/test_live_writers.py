"""Files that another process writes to meanwhile: read up to the rows that were there in setup, and no further."""

import multiprocessing
import time

import h5py
import numpy as np
import pytest

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5DataChangedError,
    H5FileError,
    LazyH5DataModule,
    RankCachedH5DataModule,
)

CONTEXT = multiprocessing.get_context("fork")


def write(path, has_begun, is_over):
    """Appends rows, whose values are their numbers, until it is told to stop."""
    with h5py.File(path, "w", libver="latest") as file:
        options = {"maxshape": (None,), "compression": "gzip"}
        x = file.create_dataset("x", data=np.arange(64.0), chunks=(16,), **options)
        y = file.create_dataset("y", data=np.arange(64), chunks=(1000,), **options)
        file.swmr_mode = True
        has_begun.set()
        while not is_over.is_set():
            n = len(x)
            for array in (x, y):  # y first has the rows that x has: lengths differ for a moment otherwise
                array.resize((n + 8,))
                array[n:] = np.arange(n, n + 8)
                array.flush()
            time.sleep(0.001)


@pytest.fixture
def live(tmp_path):
    path, has_begun, is_over = str(tmp_path / "live.h5"), CONTEXT.Event(), CONTEXT.Event()
    writer = CONTEXT.Process(target=write, args=(path, has_begun, is_over), daemon=True)
    writer.start()
    assert has_begun.wait(20)
    yield path
    is_over.set()
    writer.join(20)
    assert writer.exitcode == 0


MODULES = {
    "lazy": lambda path, **more: LazyH5DataModule(path, x_key="x", **more),
    "cached": lambda path, **more: RankCachedH5DataModule(path, x_key="x", **more),
    "combined": lambda path, **more: CombinedHDF5DataModule(path, load_fields=["x"], dtype=None, **more),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", MODULES)
def test_rows_of_setup_are_read_while_the_file_grows(live, kind, num_workers):
    module = MODULES[kind](live, swmr=True, with_index=True, batch_size=8, num_workers=num_workers)
    module.setup("fit")
    loader = module.train_dataloader()
    n_rows = []
    for _ in range(2):
        seen = []
        for batch in loader:
            x, index = (batch["x"], batch["index"]) if isinstance(batch, dict) else batch
            assert x.tolist() == index.tolist()
            seen += index.tolist()
        assert sorted(seen) == list(range(len(seen)))
        n_rows.append(len(seen))
    assert n_rows[0] == n_rows[1] >= 64
    with h5py.File(live, swmr=True) as file:
        assert len(file["x"]) > n_rows[0], "the writer went on meanwhile"
    module.teardown("fit")


@pytest.mark.parametrize("kind", MODULES)
def test_without_swmr_the_file_is_refused_and_the_cause_named(live, kind):
    with pytest.raises(H5FileError, match=r"live\.h5.*(write|lock)"):
        MODULES[kind](live).setup("fit")


def test_another_file_in_its_place_is_a_change_all_the_same(live, tmp_path):
    module = LazyH5DataModule(live, x_key="x", swmr=True, batch_size=8)
    module.setup("fit")
    loader = module.train_dataloader()
    assert len(list(loader)) >= 8
    with h5py.File(tmp_path / "other.h5", "w", libver="latest") as file:
        file["x"] = np.zeros(200)
    (tmp_path / "other.h5").rename(live)
    with pytest.raises(H5DataChangedError, match="replaced by another file"):
        list(loader)
    module.teardown("fit")
