"""Files beside the data: pipes, devices and sockets are refused at once, and damage is an error of this package."""

import os
import shutil
import socket
import subprocess
import sys

import h5py
import numpy as np
import pytest
from guards import HANG

from lightning_h5 import H5Error, H5KeyError, LazyH5DataModule

CHILD = """
import ast, sys
from lightning_h5 import H5Error, LazyH5DataModule
for given in ast.literal_eval(sys.argv[1]):
    try:
        LazyH5DataModule(x_key="x", **given).setup("fit")
    except H5Error as error:
        print(error)
"""


def sides(name):
    """Arguments that name a file beside the data."""
    return [
        {"table": {"path": f"{name}.csv"}, "y_key": "table/v"},
        {"table": {"path": f"{name}.csv.gz"}, "y_key": "table/v"},
        {"table": {"path": f"{name}.parquet"}, "y_key": "table/v"},
        {"normalize": f"{name}.json"},
        {"split": {"val_fraction": 0.1, "file": f"{name}.json"}},
        {"files": {"verify": "digest"}},
    ]


@pytest.fixture
def data(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.arange(64.0)
    return str(tmp_path / "data.h5")


@pytest.mark.wide
def test_pipes_devices_and_sockets_are_refused_at_once(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    os.mkfifo("a-pipe")
    given = []
    for kind in ("pipe", "device", "socket", "link"):
        shutil.copy(data, f"{kind}.h5")
        for end in ("csv", "csv.gz", "parquet", "json", "h5.digests.json"):
            name = f"{kind}.{end}"
            if kind == "socket":
                with socket.socket(socket.AF_UNIX) as server:
                    server.bind(name)
            elif kind == "pipe":
                os.mkfifo(name)
            else:
                os.symlink("/dev/zero" if kind == "device" else "a-pipe", name)
        given += [{"train_path": f"{kind}.h5", **arguments} for arguments in sides(kind)]
    command = [sys.executable, "-c", CHILD, repr(given)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True).stdout.splitlines()
    assert len(said) == len(given)
    assert all("not a regular file" in text for text in said)


@pytest.mark.parametrize("given", sides("side")[3:5])
@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b"{"])
def test_json_that_cannot_be_read_is_an_error_of_this_package(data, tmp_path, monkeypatch, given, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "side.json").write_bytes(content)
    with pytest.raises(H5Error, match=r"side\.json"):
        LazyH5DataModule(data, x_key="x", **given).setup("fit")


@pytest.mark.parametrize("key", ["mask/{split}", {"train": "mask/train", "val": "mask/val"}])
def test_lists_of_splits_that_no_file_has_are_named_with_the_arrays_that_exist(tmp_path, key):
    path = str(tmp_path / "demos.h5")
    with h5py.File(path, "w") as file:
        for number in range(3):
            file[f"data/d{number}/x"] = np.arange(4.0)
    datamodule = LazyH5DataModule(path, x_key="x", segments="data/*", split={"key": key})
    with pytest.raises(H5KeyError, match=r"'mask/train'.*'data/d0/x', 'data/d1/x'"):
        datamodule.setup("fit")
