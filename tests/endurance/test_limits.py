"""Little memory, few descriptors, full or read-only disks, disks that cannot be read: an error that says which."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import limited
import numpy as np
import pytest
import spaces
from guards import HANG
from limited import WRITERS, write_rows
from processes import run_ranks, values

needs_mounts = pytest.mark.skipif(not spaces.can_leave(), reason="needs mounts of its own")

ROWS = 1600  # of 4 KiB


@pytest.fixture
def path(tmp_path):
    return write_rows(tmp_path / "rows.h5", ROWS, chunks=(20, limited.WIDTH), compression="gzip", compression_opts=1)


def run(target, tmp_path, *arguments):
    (found,) = values(run_ranks(target, 1, tmp_path / "run", *map(str_of, arguments)))
    return found


def str_of(value):
    return str(value) if isinstance(value, Path) else value


@needs_mounts
def test_batches_and_shards_larger_than_dev_shm_are_right(path, tmp_path):
    """What a transform makes far larger goes torch's way, which is an error and no hang."""
    _, text, is_ours = run(limited.train_with_little_shared_memory, tmp_path, path, ROWS)
    assert is_ours, text
    assert "workers hand over batches through shared memory, and the system has none left: No space left" in text


@needs_mounts
def test_workers_need_no_room_in_dev_shm(path, tmp_path):
    assert run(limited.train_with_no_shared_memory, tmp_path, path, ROWS) is None  # no error


@pytest.mark.wide
def test_many_more_files_than_descriptors(tmp_path):
    for number in range(200):
        write_rows(tmp_path / f"{number:03d}.h5", 2, first=2 * number, chunks=(1, limited.WIDTH), compression="lzf")
    run(limited.train_with_few_descriptors, tmp_path, tmp_path, 400)


@pytest.mark.wide
def test_memory_that_is_not_there_is_an_error_that_says_how_much_and_with_it_all_goes(tmp_path):
    n_rows = 16 << 10  # 64 MiB
    path = write_rows(tmp_path / "rows.h5", n_rows, chunks=(64, limited.WIDTH), compression="lzf")
    found = run(limited.load_into_little_memory, tmp_path, path, n_rows)
    for kind, error in found.items():
        assert error is not None, kind
        types, text, is_ours = error
        assert is_ours or MemoryError in types, (kind, types, text)
        assert re.search(r"67,108,864 bytes of (shared )?memory|array of 67,108,864 bytes|allocate 64.0 MiB", text), (
            kind,
            text,
        )


@needs_mounts
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_what_cannot_be_written_is_an_error_of_ours_and_nothing_is_left_of_it(path, tmp_path, how):
    folder = tmp_path / "folder"
    folder.mkdir()
    target = limited.write_to_a_full_disk if how == "full" else limited.write_to_a_read_only_folder
    found = run(target, tmp_path, path, folder, list(WRITERS))
    assert set(found) == set(WRITERS)
    left = [limited.INSIDE, *(["taken"] if how == "full" else [])]
    bad = {name: told for name, told in found.items() if not says_why(told[0], str(folder)) or told[1] != left}
    assert bad == {}, str(bad)


CAUSES = ("No space left", "MiB free", "Read-only", "may not be written to", "no permission")


def says_why(error, folder):
    """Whether an error is ours, and names the folder and the cause."""
    return error is not None and error[2] and folder in error[1] and any(cause in error[1] for cause in CAUSES)


# Disks that cannot be read -----------------------------------------------------------------------------------------

STORAGE = {
    "contiguous": {},
    "gzip": {"chunks": (20, limited.WIDTH), "compression": "gzip", "compression_opts": 1},
    "HDF5 library": {"chunks": (20, limited.WIDTH), "scaleoffset": 0},
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """A library that has reads fail while a file is there."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler, and Linux")
    built = tmp_path_factory.mktemp("shim") / "failing_reads.so"
    source = Path(__file__).with_name("failing_reads.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True)
    return built


@pytest.mark.wide
def test_a_disk_that_cannot_be_read_is_an_error_that_says_so_and_a_retry_goes_on(shim, tmp_path):
    folder = tmp_path / "bad_disk"
    folder.mkdir()
    for name, options in STORAGE.items():
        rows = np.arange(1000)
        with h5py.File(folder / f"{name}.h5", "w") as file:
            x = np.repeat(rows[:, None], limited.WIDTH, axis=1)
            file.create_dataset("x", data=x.astype("i4" if "scaleoffset" in options else "f4"), **options)
            file["index"] = rows
    environment = os.environ | {
        "LD_PRELOAD": str(shim),
        "FAILING_READS": str(tmp_path / "marker"),
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("failing_disk.py")
    paths = os.pathsep.join([str(script.parents[2]), str(script.parents[1]), str(script.parent)])
    ended = subprocess.run(
        [sys.executable, script, folder, tmp_path / "told.json"],
        env=environment | {"PYTHONPATH": paths},
        timeout=HANG,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert len(told) == 3 * 12
    for case, (name, is_ours, text) in told.items():
        assert is_ours, (case, name, text)
        assert str(folder) in text
        assert "Input/output error" in text, (case, text)
