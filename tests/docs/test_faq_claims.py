"""What users try first is among the questions, each with an answer that a test looks at."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from doubling import double
from guards import HANG
from test_docs import ROOT, benchmark, blocks

from lightning_h5 import H5FileError, H5KeyError, H5LazyDataset, H5ValueError, LazyH5DataModule
from lightning_h5.hdf5 import open_h5

FAQ = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

FIRST_THINGS = {
    "one path and nothing else": "Do I have to name the arrays?",
    "workers under spawn": "`Can't pickle <function <lambda>`",
    "two GPUs and the default flags": "Do I need `use_distributed_sampler=False` for multiple GPUs?",
    "resume from last.ckpt": "How do I resume?",
    "what a Trainer limits and finds": (
        "Do `overfit_batches`, `limit_train_batches`, `fast_dev_run` and the batch size finder work?"
    ),
    "predict": "Which rows do the predictions belong to?",
    "rows that do not fit": "What if they do not fit after all?",
    "locks of network file systems": (
        "`unable to lock file, errno = 11, error message = 'Resource temporarily unavailable'`"
    ),
    "Ctrl-C while rows are loaded": "Can I press Ctrl-C while rows are loading?",
    "an unknown filter": "`can't open directory (...). Please verify its existence`",
}
"""What users try first, and its heading. Code under a heading is run by test_docs.py."""


@pytest.fixture
def signals(tmp_path):
    path = tmp_path / "signals.h5"
    with h5py.File(path, "w") as file:
        file["signals"] = np.arange(64, dtype="f4").reshape(32, 2)
    return str(path)


def answer(heading):
    start = FAQ.index(f"### {heading}\n")
    return re.split(r"\n##+ ", FAQ[start:])[0]


@pytest.mark.parametrize("heading", FIRST_THINGS.values(), ids=FIRST_THINGS)
def test_each_of_the_first_things_has_an_answer(heading):
    assert len(answer(heading).splitlines()) > 2


@pytest.mark.parametrize(
    "thing",
    [
        "one path and nothing else",
        "workers under spawn",
        "resume from last.ckpt",
        "what a Trainer limits and finds",
        "predict",
        "rows that do not fit",
    ],
)
def test_answers_with_code_that_is_run_have_it(thing):
    code = answer(FIRST_THINGS[thing])
    assert "```python\n" in code
    assert code.count("```python\n") <= len(blocks(ROOT / "docs" / "troubleshooting.md", "python"))


def test_two_arrays_that_could_both_be_the_input_are_listed(tmp_path):
    with h5py.File(tmp_path / "two.h5", "w") as file:
        file["left"], file["right"] = np.zeros((8, 2)), np.zeros((8, 2))
    with pytest.raises((H5KeyError, H5ValueError), match=r"(?s)left.*right"):
        LazyH5DataModule(tmp_path / "two.h5").setup("fit")


@pytest.mark.wide
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_function_of_a_module_goes_to_workers_and_a_lambda_does_not(signals, method):
    def batches(transform):
        datamodule = LazyH5DataModule(
            signals,
            shuffle=False,
            transform=transform,
            num_workers=1,
            workers={"start_method": method},
        )
        datamodule.setup("fit")
        try:
            return torch.cat(list(datamodule.train_dataloader()))
        finally:
            datamodule.teardown()

    assert torch.equal(batches(double), 2 * torch.arange(64, dtype=torch.float32).reshape(32, 2))
    with pytest.raises(Exception, match=r"(?i)pickle"):
        batches(lambda rows: 2 * rows)
    assert not multiprocessing.active_children()


def test_a_locked_file_is_told_with_the_variable_of_the_answer(signals, monkeypatch):
    monkeypatch.setattr(h5py.h5f, "open", refuse)
    with pytest.raises(H5FileError, match="HDF5_USE_FILE_LOCKING=FALSE before Python starts"):
        open_h5(signals)
    assert "HDF5_USE_FILE_LOCKING=FALSE python train.py" in answer(FIRST_THINGS["locks of network file systems"])


def refuse(*arguments, **options):
    raise OSError(37, "unable to lock file, errno = 37, error message = 'No locks available'")


LOADS_UNTIL_INTERRUPTED = """
import sys, time
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_h5 import RankCachedH5DataModule
from lightning_h5.readers import bulk

def never_done(tasks, *arguments, **options):
    print("loading", flush=True)
    time.sleep(100)

bulk.do_tasks = never_done
trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(BoringModel(), datamodule=RankCachedH5DataModule(sys.argv[1]))
"""


@pytest.mark.wide
def test_ctrl_c_while_rows_are_loaded_ends_the_program(signals, tmp_path):
    script = tmp_path / "loads.py"
    script.write_text(LOADS_UNTIL_INTERRUPTED)
    with subprocess.Popen(
        [sys.executable, str(script), signals],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said = ""
            while "loading" not in said and process.poll() is None:
                said += process.stdout.readline()
            assert "loading" in said, said
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=HANG)
        finally:
            process.kill()
    assert process.returncode != 0
    assert "Detected KeyboardInterrupt" in rest
    assert not list(Path("/dev/shm").glob("*lightning_h5*"))


@pytest.mark.parametrize("path", ["s3://bucket/rows.h5", "https://example.org/rows.h5", "file:///tmp/rows.h5"])
def test_addresses_are_no_paths(path):
    with pytest.raises(H5FileError, match=re.escape(repr(path))):
        LazyH5DataModule(path, x_key="x").setup("fit")


def test_the_table_and_the_drawing_of_layouts_are_what_was_measured_and_computed():
    parts = ROOT / "docs" / "_parts"
    layouts = benchmark("layouts")
    measured = json.loads((parts / "layouts.json").read_text())
    assert layouts.table(measured["results"]) == (parts / "layouts.md").read_text()
    assert layouts.drawing() == (parts / "chunk_cost.html").read_text()


@pytest.mark.parametrize("rows_per_chunk", [1, 32, 256])
def test_bytes_for_a_row_alone_are_what_is_decoded_for_it(tmp_path, rows_per_chunk):
    """The drawing's arithmetic, against what the reader counts."""
    path, shape = tmp_path / "rows.h5", (1536, 3, 64, 64)  # 18 MiB: not held whole
    chunks = (rows_per_chunk, *shape[1:])
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.ones(shape, "u1"), chunks=chunks, compression="gzip", compression_opts=1)
    dataset = H5LazyDataset(path, "x")
    assert int(dataset[7].sum()) == 12288
    assert (
        dataset.counters.total()["bytes_decoded"]
        == benchmark("layouts").Layout("", shape[1:], 12288, chunks).bytes_alone
    )
    dataset.close()
