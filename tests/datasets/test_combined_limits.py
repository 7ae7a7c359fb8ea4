"""Many files: few are open, little memory is taken, in any number of processes."""

import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
from factories import run_forked

from lightning_h5 import CombinedHDF5Dataset, create_optimized_dataloader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

FILES, ROWS, STEPS = 120, 3, 40


@pytest.fixture
def folder(tmp_path):
    """Files of the layout that the many-file examples use: one row a chunk, LZF, text of varying length."""
    for number in range(FILES):
        rows = np.arange(number * ROWS, (number + 1) * ROWS)
        with h5py.File(tmp_path / f"{number:04}.h5", "w", libver="latest") as file:
            storage = {"compression": "lzf"}
            x = np.repeat(rows[:, None], STEPS, 1).astype("f4")
            file.create_dataset("x", data=x, chunks=(1, STEPS), maxshape=(None, STEPS), **storage)
            file.create_dataset("row", data=rows, chunks=(1,), maxshape=(None,), **storage)
            guids = file.create_dataset("guid", (ROWS,), h5py.string_dtype(), chunks=(1,), maxshape=(None,), **storage)
            guids[:] = [f"p{row % 7}" for row in rows]
    return tmp_path


def read_all(loader):
    seen = []
    for batch in loader:
        assert (batch["x"] == batch["row"][:, None]).all()
        assert batch["guid"] == [f"p{row % 7}" for row in batch["row"].tolist()]
        seen += batch["row"].tolist()
    return seen


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("held", [True, False], ids=["held", "read"])
def test_more_files_than_a_process_may_open(folder, num_workers, held, monkeypatch):
    if not held:
        monkeypatch.setattr("lightning_h5.samples.row_table.HELD_BYTES", -1)

    def with_few_descriptors():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        loader = create_optimized_dataloader(
            hdf5_files=folder, batch_size=16, num_workers=num_workers, allowed_guids=["p1", "p2", "p3"], cache_size=0
        )
        wanted = [row for row in range(FILES * ROWS) if row % 7 in (1, 2, 3)]
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            assert sorted(read_all(loader)) == wanted
        loader.close()

    assert run_forked(with_few_descriptors) == 0


def open_files(folder):
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith(str(folder)):
                yield name


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ten_epochs_leave_no_descriptor_open(folder, num_workers):
    loader = create_optimized_dataloader(hdf5_files=folder, batch_size=16, num_workers=num_workers)
    counts = []
    for epoch in range(10):
        loader.sampler.set_epoch(epoch)
        read_all(loader)
        counts.append(descriptors())
    assert counts[-1] <= counts[1]
    loader.close()


@pytest.mark.wide
def test_closing_a_dataset_closes_its_files(folder):
    dataset = CombinedHDF5Dataset(folder)
    dataset.read_batch(range(len(dataset)))
    assert len(list(open_files(folder))) > 20
    dataset.close()
    assert not list(open_files(folder))


@pytest.mark.slow
def test_a_thousand_files_and_four_workers_take_less_than_a_gibibyte(tmp_path):
    """The whole of it, torch included, with rows of 300 KB and everything as it comes."""
    script = Path(__file__).parents[2] / "examples" / "benchmarks" / "combined.py"
    done = subprocess.run(
        [sys.executable, script, "--parts", "memory", "--json", tmp_path / "out.json"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "NO" not in done.stdout
