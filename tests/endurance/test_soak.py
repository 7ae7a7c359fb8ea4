"""Long training from many files: memory and descriptors of all processes stay as they are after the first epoch."""

import gc
import json
import os
import subprocess
import sys
from functools import partial
from multiprocessing import active_children
from typing import NamedTuple

import h5py
import numpy as np
import pytest
from arguments import nested
from guards import HANG
from leftovers import nothing_is_left

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule
from lightning_h5.hdf5 import handles, process_pool
from lightning_h5.samples import row_table

FILES, WIDTH, BATCH, LOOKS = 50, 32, 250, 5  # looks in an epoch
MAX_OPEN = 8  # files in each process
MIB = 1 << 20


class Look(NamedTuple):
    """Memory and descriptors of this process and its workers."""

    n_bytes: int  # each page once, however many processes share it
    descriptors: int


def look():
    pids = [os.getpid(), *(child.pid for child in active_children())]
    return Look(sum(map(proportional_bytes, pids)), sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids))


def proportional_bytes(pid):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def write_files(folder, n_rows):
    rng, each = np.random.default_rng(0), n_rows // FILES
    for number in range(FILES):
        rows = np.arange(number * each, (number + 1) * each)
        with h5py.File(folder / f"{number:02d}.h5", "w") as file:
            x = rng.integers(0, 99, (each, WIDTH)).astype("f4")
            x[:, 0] = rows
            file.create_dataset("x", data=x, chunks=(200, WIDTH), compression="gzip", compression_opts=1)
            file["row"] = rows
    return str(folder)


MODULES = {
    "lazy": lambda folder, **options: LazyH5DataModule(folder, **nested(x_key="x", y_key="row", **options)),
    "combined": lambda folder, **options: CombinedHDF5DataModule(
        folder, **nested(fields=["x", "row"], cache_size=500, **options)
    ),
}


SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "n_rows", "n_epochs"),
    [
        pytest.param("lazy", 20_000, 4, id="lazy, 20,000 rows"),
        pytest.param("lazy", 1_000_000, 8, id="lazy, 1,000,000 rows", marks=SLOW),
        pytest.param("combined", 1_000_000, 8, id="combined, 1,000,000 rows", marks=SLOW),
    ],
)
def test_memory_and_descriptors_are_flat_from_the_second_epoch_on(tmp_path, kind, n_rows, n_epochs):
    """In an interpreter of its own: workers copy pages of a process that ran other tests as they touch its objects."""
    folder = write_files(tmp_path, n_rows)
    arguments = [sys.executable, __file__, kind, folder, str(n_rows), str(n_epochs)]
    path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    with nothing_is_left():
        done = subprocess.run(
            arguments, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    judge(kind, n_rows, json.loads(done.stdout.splitlines()[-1]))


def train_alone(kind, folder, n_rows, n_epochs):
    """Print what ``train`` returns, with workers that open and close files again and again."""
    row_table.HELD_BYTES = -1
    handles.HandlePool = partial(handles.HandlePool, MAX_OPEN)
    # A full collection writes to each object that it looks at, and the system then copies the pages that workers share
    # with this process: about 100 MiB, once, at any time.
    gc.freeze()
    print(json.dumps(train(kind, folder, int(n_rows), int(n_epochs))))


def train(kind, folder, n_rows, n_epochs):
    """Memory and descriptors in all epochs but the first; each row is seen once in each epoch."""
    row_bytes = WIDTH * 4
    options = {"shuffle": "chunks", "shuffle_bytes": n_rows * row_bytes // 10, "rank": 0, "world_size": 1}
    module = MODULES[kind](folder, batch_size=BATCH, num_workers=2, timeout=HANG, **options)
    looks, every = [], n_rows // BATCH // LOOKS
    module.setup("fit")
    loader = module.train_dataloader()
    for epoch in range(n_epochs):
        loader.sampler.set_epoch(epoch)
        seen = np.zeros(n_rows, np.int32)
        for step, batch in enumerate(loader, 1):
            x, row = (batch["x"], batch["row"]) if isinstance(batch, dict) else batch
            assert (x[:, 0] == row).all()
            seen[row.numpy()] += 1
            if step % every == 0 and epoch:
                looks.append(look())
        assert (seen == 1).all()
    loader.close()
    module.teardown("fit")
    process_pool().close()
    return looks


def judge(kind, n_rows, looks):
    n_bytes, descriptors = np.array(looks).T
    epochs = np.arange(len(looks)) / LOOKS
    memory_slope, descriptor_slope = (np.polyfit(epochs, each, 1)[0] for each in (n_bytes / MIB, descriptors))
    print(
        f"soak: {kind}, {n_rows:,} rows in {FILES} files, 2 workers, epochs 2 to {1 + len(looks) // LOOKS}: memory "
        f"{n_bytes.min() / MIB:.1f} to {n_bytes.max() / MIB:.1f} MiB, {memory_slope:+.3f} MiB an epoch; descriptors "
        f"{descriptors.min()} to {descriptors.max()}, {descriptor_slope:+.3f} an epoch"
    )
    first, last = slice(None, LOOKS), slice(-LOOKS, None)  # epochs
    assert descriptors[last].max() <= descriptors[first].max() + 2
    assert memory_slope < 8
    assert n_bytes[last].max() - n_bytes[first].max() < 16 * MIB


if __name__ == "__main__":
    train_alone(*sys.argv[1:])
