"""What is tried in processes with little memory, few descriptors, full or read-only disks; each gives what happened."""

import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import spaces
from arguments import nested
from guards import HANG

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5Error,
    LazyH5DataModule,
    RankCachedH5DataModule,
    check_files,
    compute_stats,
    repack_file,
)
from lightning_h5.hdf5 import process_pool
from lightning_h5.samples import row_table

WIDTH = 1024  # numbers per row of 4 KiB


def write_rows(path, n_rows, *, first=0, **options):
    rows = np.arange(first, first + n_rows)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.repeat(rows[:, None], WIDTH, axis=1).astype("f4"), **options)
        file["index"] = rows
    return str(path)


def assert_whole(loader, n_rows):
    """An epoch gives each row once, and rightly."""
    seen = np.zeros(n_rows, np.int64)
    for batch in loader:
        x = (batch["x"] if isinstance(batch, dict) else batch).numpy()
        assert (x[:, :WIDTH] == x[:, :1]).all()
        np.add.at(seen, x[:, 0].astype(np.int64), 1)
    assert (seen == 1).all()


def loader_of(kind, files, **options):
    kinds = {
        "lazy": lambda: LazyH5DataModule(files, **nested(x_key="x", **options)),
        "combined": lambda: CombinedHDF5DataModule(files, **nested(**options)),
        "rank cached": lambda: RankCachedH5DataModule(files, **nested(x_key="x", **options)),
        "rank cached, shared": lambda: RankCachedH5DataModule(files, **nested(x_key="x", share_memory=True, **options)),
    }
    module = kinds[kind]()
    module.setup("fit")
    return module.train_dataloader()


def attempt(function):
    """The type and text of the error that a function raises; None where there is none."""
    try:
        function()
    except Exception as error:
        return type(error).__mro__, str(error), isinstance(error, H5Error)
    return None


# Little shared memory ----------------------------------------------------------------------------------------------


def train_with_little_shared_memory(rank, path, n_rows):
    """Batches and shards are each larger than /dev/shm."""
    assert spaces.leave()
    assert spaces.small("/dev/shm", 2 << 20)
    for kind in ("lazy", "combined", "rank cached", "rank cached, shared"):
        loader = loader_of(kind, path, batch_size=n_rows // 2, num_workers=2, timeout=HANG)
        assert_whole(loader, n_rows)
        loader.close()
    assert os.listdir("/dev/shm") == []
    found = attempt(lambda: list(loader_of("lazy", path, batch_size=64, num_workers=2, batch_transform=enlarge)))
    assert os.listdir("/dev/shm") == []
    return found


def enlarge(batch):
    """Far more than there is a place for: torch's own way is left, through files in /dev/shm."""
    return batch.repeat(64, 1)


def train_with_no_shared_memory(rank, path, n_rows):
    """Every page of /dev/shm is taken by others."""
    assert spaces.leave()
    assert spaces.small("/dev/shm", 1 << 20)
    fill("/dev/shm/taken")
    loader = loader_of("lazy", path, batch_size=16, num_workers=2, timeout=HANG)
    found = attempt(lambda: assert_whole(loader, n_rows))
    os.unlink("/dev/shm/taken")
    assert_whole(loader, n_rows)
    loader.close()
    assert os.listdir("/dev/shm") == []
    return found


def fill(path):
    """Takes all room of a disk."""
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


# Few descriptors ---------------------------------------------------------------------------------------------------


def train_with_few_descriptors(rank, folder, n_rows):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    for held_bytes in (row_table.HELD_BYTES, -1):
        row_table.HELD_BYTES = held_bytes
        for kind, num_workers in (("lazy", 0), ("lazy", 2), ("combined", 2), ("rank cached", 2)):
            loader = loader_of(kind, folder, batch_size=32, num_workers=num_workers, timeout=HANG)
            assert_whole(loader, n_rows)
            loader.close()
            process_pool().close()


# Little address space ----------------------------------------------------------------------------------------------


@contextmanager
def little_more_memory(n_bytes):
    """No more address space than now and so many bytes."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + n_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def load_into_little_memory(rank, path, n_rows):
    """What shards and batches say that have no place; each is tried again with room."""
    found = {}
    for kind, options in {
        "rank cached": {},
        "rank cached, shared": {},
        "lazy": {"batch_size": n_rows},
        "combined": {"batch_size": n_rows},
    }.items():
        options = {"batch_size": 16} | options

        def go(kind=kind, options=options):
            assert_whole(loader_of(kind, path, **options), n_rows)

        with little_more_memory(32 << 20):
            found[kind] = attempt(go)
        process_pool().close()
        go()
    return found


# Full and read-only disks ------------------------------------------------------------------------------------------


def splits(path, folder):
    loader_of("lazy", path, split={"val_fraction": 0.5, "seed": 1, "file": str(folder / "split.json")}, batch_size=16)


def statistics(path, folder):
    compute_stats(path, "x").save(folder / "stats.json")


def repacked(path, folder):
    repack_file(path, folder / "copy.h5", compression="gzip", rows_per_chunk=16)


def digests(path, folder):
    check_files(folder / INSIDE, write_digests=True)


INSIDE = "rows.h5"  # a copy in the folder, next to which digests are written

WRITERS = {"split_file": splits, "stats": statistics, "repack": repacked, "digests": digests}


def write_to_a_full_disk(rank, path, folder, names):
    """For each writer its error; then there is room, and it goes."""
    folder, found = Path(folder), {}
    assert spaces.leave()
    for name in names:
        assert spaces.small(str(folder), 16 << 20)
        shutil.copyfile(path, folder / INSIDE)
        fill(folder / "taken")
        found[name] = attempt(lambda name=name: WRITERS[name](path, folder)), sorted(os.listdir(folder))
        os.unlink(folder / "taken")
        WRITERS[name](path, folder)
    return found


def write_to_a_read_only_folder(rank, path, folder, names):
    """For each writer its error, and what is in the folder after it."""
    folder = Path(folder)
    shutil.copyfile(path, folder / INSIDE)
    assert spaces.leave()
    assert spaces.read_only(str(folder))
    return {
        name: (attempt(lambda name=name: WRITERS[name](path, folder)), sorted(os.listdir(folder))) for name in names
    }
