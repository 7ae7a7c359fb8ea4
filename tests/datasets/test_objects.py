"""Datasets, samplers and loaders as Python objects: what they print, ``with`` blocks, and what is left when they go."""

import gc
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from dataset_conformance import is_open
from factories import Stored, run_forked
from guards import HANG
from torch.utils.data import DataLoader

from lightning_h5 import CombinedHDF5Dataset, H5LazyDataset, RankMemCachedH5Dataset
from lightning_h5.datasets import mixture_dataset
from lightning_h5.hdf5 import ChangeGuard, process_pool

ROWS = 12


def sequences(path):
    return CombinedHDF5Dataset(path, ["x", "y"], segments={"key": "t"}, collate_fn="pad")


def mixture(path):
    sources = {name: CombinedHDF5Dataset(path, ["x", "y"]) for name in "ab"}
    return mixture_dataset(sources, mixes=True, transform=None, batch_transform=None, with_index=False)


DATASETS = {
    "lazy": lambda path: H5LazyDataset(path, "x", "y"),
    "lazy, compressed": lambda path: H5LazyDataset(path, ["x", "z"], indices=range(5)),
    "lazy, mapped": lambda path: H5LazyDataset(
        path,
        "x",
        files={"mmap": True},
    ),
    "cached": lambda path: RankMemCachedH5Dataset(path, "x", "y"),
    "cached, not loaded": lambda path: RankMemCachedH5Dataset(path, "x", "y", preload=False),
    "combined": lambda path: CombinedHDF5Dataset(path, where={"y": [1, 2, 3, 4]}),
    "combined, no cache": lambda path: CombinedHDF5Dataset(path, ["x", "t"], cache_size=0),
    "mixture": mixture,
    "sequences": sequences,
}
ALL = pytest.mark.parametrize("make", DATASETS.values(), ids=list(DATASETS))


@pytest.fixture
def path(make_h5):
    gzip = Stored(np.arange(ROWS * 4.0).reshape(ROWS, 4), "chunked", (3, 4), {"compression": "gzip"})
    text = np.array([f"row {i}".encode() for i in range(ROWS)])
    return make_h5(x=np.arange(ROWS * 6.0, dtype="f4").reshape(ROWS, 2, 3), y=np.arange(ROWS), z=gzip, t=text)


def test_an_error_in_the_block_closes_too_and_is_raised(path):
    with pytest.raises(IndexError), H5LazyDataset(path, "z") as dataset:
        dataset.read_batch([1, ROWS])
    assert not is_open(path)


def test_another_dataset_of_the_same_file_goes_on(path, nothing_held):
    kept, other = H5LazyDataset(path, "z"), H5LazyDataset(path, "z")
    before = kept.read_batch([3, 4])
    other.read_batch([3, 4])
    del other
    assert torch.equal(kept.read_batch([3, 4]), before)
    assert torch.equal(kept.read_batch([9]), H5LazyDataset(path, "z").read_batch([9]))


def test_what_the_collector_finds_while_the_pool_is_busy_is_closed_after_that(make_h5):
    """The collector may run at any point of Python code, inside the pool as well."""
    path, other = make_h5(x=np.arange(4)), make_h5(x=np.arange(4))
    pool = process_pool()
    with pool.descriptor(path, ChangeGuard.of(path)):
        pass
    with pool._lock:
        pool.close_soon([path])
        assert is_open(path)
    with pool.descriptor(other, ChangeGuard.of(other)):
        pass
    assert not is_open(path)


def test_a_file_in_use_is_closed_when_its_user_is_done(make_h5):
    path, pool = make_h5(x=np.arange(4)), process_pool()
    with pool.descriptor(path, ChangeGuard.of(path)) as fd:
        pool.close_soon([path])
        assert os.pread(fd, 4, 0) == b"\x89HDF"
    assert not is_open(path)


def test_a_forked_child_leaves_the_files_of_its_parent_open(path, nothing_held):
    dataset = H5LazyDataset(path, "z")
    dataset.read_batch([1])

    def child():
        nonlocal dataset
        del dataset
        gc.collect()
        assert is_open(path)

    assert run_forked(child) == 0
    assert dataset.read_batch([1]).shape == (1, 4)


@pytest.mark.wide
def test_datasets_of_workers_and_at_the_end_of_python_leave_no_warning(path, tmp_path):
    """Warnings of what was left open, and errors in finalizers, would be on stderr."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import sys
        from torch.utils.data import DataLoader
        from lightning_h5 import CombinedHDF5Dataset, H5LazyDataset, RankMemCachedH5Dataset, h5_worker_init_fn

        if __name__ == "__main__":
            made = [H5LazyDataset({path!r}, "z", "y"), CombinedHDF5Dataset({path!r}, ["x", "z"])]
            made.append(RankMemCachedH5Dataset({path!r}, "x", share_memory=True))
            for dataset, start in zip([*made, made[0]], ["fork", "fork", "fork", "spawn"]):
                dataset.read_batch([1])
                loader = DataLoader(
                    dataset, 4, num_workers=1, multiprocessing_context=start, worker_init_fn=h5_worker_init_fn
                )
                print(sum(1 for _ in loader))
            made.append(made)  # a cycle, for the collector at the end
            sys.held = H5LazyDataset({path!r}, "z")  # and one that a module holds
            sys.held.read_batch([1])
        """)
    )
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, cwd=os.getcwd(), check=False)
    assert (ended.returncode, ended.stdout.split()) == (0, ["3"] * 4), ended.stderr
    for trouble in ("Exception ignored", "ResourceWarning", "Traceback"):
        assert trouble not in ended.stderr, ended.stderr


@ALL
def test_a_dataset_prints_what_it_holds_without_reading(make, path, monkeypatch):
    dataset = make(path)
    os.rename(path, f"{path}.gone")
    text = repr(dataset)
    assert os.path.basename(path) in text
    assert "row" in text or "segment" in text
    assert "float32 (2, 3)" in text or "float64 (4,)" in text
    assert "\n" not in text
    dataset.close()
    assert repr(dataset).split("(")[0] == type(dataset).__name__


def test_what_a_dataset_prints(path):
    lazy = H5LazyDataset(path, {"image": "x"}, ["y", "t"], x_dtype="float16", indices=[3, 4])
    assert repr(lazy) == f"H5LazyDataset({path!r}, 2 of 12 rows, image: float16 (2, 3), y: int64 (), t: text ())"
    cached = RankMemCachedH5Dataset(path, "x", rank=1, world_size=2, preload=False)
    assert repr(cached) == (
        f"RankMemCachedH5Dataset({path!r}, rank 1 of 2 holds 6 of 12 rows, not loaded, x: float32 (2, 3))"
    )
    cached.load()
    assert "0.0 MiB" in repr(cached)


def test_many_files_and_fields_print_short(make_h5):
    fields = {f"field_{i}": np.arange(3) for i in range(20)}
    paths = [make_h5(fields, name=f"{'deep/' * 30}{i}.h5") for i in range(5)]
    text = repr(CombinedHDF5Dataset(paths, list(fields)))
    assert "5 files from" in text
    assert "8 more fields" in text
    assert len(text) < 1000


def test_plain_loaders_take_datasets_as_before(path):
    with H5LazyDataset(path, "x", "y") as dataset:
        assert [y.tolist() for _, y in DataLoader(dataset, 5)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
