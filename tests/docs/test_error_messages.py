"""Each message on the page of error messages is one that is raised, word for word, as far as it can be raised here."""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from guards import HANG
from test_docs import ROOT
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_h5 import H5LazyDataset

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### `(.*)`$", PAGE, flags=re.M)
OTHER_VERSIONS = {
    "Can't get local object",
    "Can't pickle local object",
    "Can't synchronously read data (inflate() failed)",
    "expected scalar type Long but found Int",
}
"""Messages of older or newer versions of Python, torch and HDF5."""
NOT_RAISED_HERE = {
    "CUDA out of memory",
    "Cannot re-initialize CUDA in forked subprocess",
    "Watchdog caught collective operation timeout",
    "does not have many workers which may be a bottleneck",
    "received 0 items of ancdata",
}
"""Messages that need a GPU, several of them, many cores, or a machine without resources."""

ROWS = torch.arange(12.0).reshape(4, 3)
UNKNOWN_FILTER = 40_000


def write(path="rows.h5", **options):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(400.0).reshape(100, 4), chunks=(10, 4), **options)
    return path


def linear_with_doubles():
    torch.nn.Linear(3, 1)(ROWS.double())


def product_with_doubles():
    torch.bmm(ROWS[None], ROWS[None].mT.double())


def convolution_of_doubles():
    torch.nn.Conv1d(3, 1, 1)(ROWS[..., None].double())


def loss_with_doubles():
    functional.binary_cross_entropy(torch.rand(4), torch.zeros(4, dtype=torch.float64))


def convolution_of_bytes():
    torch.nn.Conv2d(1, 1, 1)(torch.zeros(1, 1, 2, 2, dtype=torch.uint8))


def classes_of_four_bytes():
    functional.cross_entropy(ROWS, torch.zeros(4, dtype=torch.int32))


def targets_of_integers():
    functional.binary_cross_entropy(torch.rand(4), torch.zeros(4, dtype=torch.int64))


def targets_of_text():
    functional.cross_entropy(ROWS, ["cat"] * 4)


def samples_of_two_lengths():
    default_collate([ROWS, ROWS[:2]])


def samples_of_none():
    default_collate([None, None])


def file_that_is_none():
    Path("text.h5").write_text("text")
    h5py.File("text.h5")


def file_that_is_cut():
    os.truncate(write(), 3000)
    h5py.File("rows.h5")


def file_that_is_locked():
    with open(write(), "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        h5py.File("rows.h5", locking=True)


def too_many_files():
    write()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        h5py.File("rows.h5")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def array_that_is_not_there():
    with h5py.File(write()) as file:
        file["y"]


def rows_in_any_order():
    with h5py.File(write()) as file:
        file["x"][[3, 1]]


def chunk_that_does_not_decode():
    with h5py.File(write(compression="gzip")) as file:
        place = file["x"].id.get_chunk_info(0).byte_offset
    with open("rows.h5", "rb+") as file:
        file.seek(place)
        file.write(b"\xff" * 20)
    with h5py.File("rows.h5") as file:
        file["x"][0]


def filter_that_is_not_there():
    with h5py.File("rows.h5", "w") as file:
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk((4,))
        settings.set_filter(UNKNOWN_FILTER, h5py.h5z.FLAG_OPTIONAL)
        array = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT8, h5py.h5s.create_simple((4,)), settings)
        array.write_direct_chunk((0,), b"1234")
    with h5py.File("rows.h5") as file:
        file["x"][0]


def open_file_in_a_dataset():
    with h5py.File(write()) as file:
        pickle.dumps(file)


def function_in_a_function_for_workers():
    pickle.dumps(H5LazyDataset(write(), "x", transform=lambda x: x))


of_a_module = lambda x: x  # noqa: E731


def lambda_for_workers():
    pickle.dumps(H5LazyDataset(write(), "x", transform=of_a_module))


class Dies(Dataset):
    def __init__(self, number):
        self.number = number

    def __len__(self):
        return 4

    def __getitem__(self, index):
        os.kill(os.getpid(), self.number)


def worker_without_shared_memory():
    next(iter(DataLoader(Dies(signal.SIGBUS), num_workers=1)))


def worker_without_memory():
    next(iter(DataLoader(Dies(signal.SIGKILL), num_workers=1)))


def script_without_a_guard():
    script = f"""
from lightning_h5 import LazyH5DataModule
data = LazyH5DataModule({write()!r}, x_key="x", num_workers=1, workers={{"start_method": "spawn"}})
data.setup("fit")
next(iter(data.train_dataloader()))
"""
    Path("script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )
    raise RuntimeError(done.stderr)


def batch_of_two_sizes():
    from lightning.pytorch.utilities.data import extract_batch_size

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extract_batch_size({"x": ROWS, "y": ROWS[:2]})


CASES = {
    function.__name__: function
    for function in (
        linear_with_doubles,
        product_with_doubles,
        convolution_of_doubles,
        loss_with_doubles,
        convolution_of_bytes,
        classes_of_four_bytes,
        targets_of_integers,
        targets_of_text,
        samples_of_two_lengths,
        samples_of_none,
        file_that_is_none,
        file_that_is_cut,
        file_that_is_locked,
        too_many_files,
        array_that_is_not_there,
        rows_in_any_order,
        chunk_that_does_not_decode,
        filter_that_is_not_there,
        open_file_in_a_dataset,
        function_in_a_function_for_workers,
        lambda_for_workers,
        worker_without_shared_memory,
        worker_without_memory,
        script_without_a_guard,
        batch_of_two_sizes,
    )
}


def matching(error):
    """Headings of the page whose words, with "..." for anything, are in the message of an error or of its cause."""
    flat = " ".join(f"{error} {error.__cause__}".split())
    return [h for h in HEADINGS if re.search(".*".join(re.escape(part.strip()) for part in h.split("...")), flat)]


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_the_message_is_a_heading_of_the_page(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as error:  # noqa: PT011
        CASES[case]()
    assert matching(error.value), str(error.value)


@pytest.mark.wide
def test_each_heading_is_a_message_that_is_raised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raised = OTHER_VERSIONS | NOT_RAISED_HERE
    for case in CASES.values():
        try:
            case()
        except Exception as error:
            raised |= {*matching(error)}
    assert raised == set(HEADINGS)
