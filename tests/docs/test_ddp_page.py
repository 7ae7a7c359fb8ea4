"""The script on the page about several GPUs runs under each launcher, on two ranks, and its own claims hold."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from guards import HANG
from test_docs import ROOT, blocks, run_python

PAGE = ROOT / "docs" / "ddp.md"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run_on_two_ranks(launcher):
    """What train.py in this directory prints on two ranks; whatever was started is ended."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PL_", "LOCAL_", "RANK"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [sys.executable, *launcher, "train.py", "cpu"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # with its ranks it can be ended as one
    ) as process:
        try:
            output, _ = process.communicate(timeout=HANG)
        finally:
            if process.poll() is None:
                # Told so, torchrun ends its ranks, which are in sessions of their own.
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(HANG)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.mark.wide
@pytest.mark.parametrize(
    "launcher", [TORCHRUN, pytest.param([], marks=pytest.mark.slow)], ids=["torchrun", "lightning"]
)
def test_the_script_trains_and_tests_on_each_row_once(launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python(PAGE)  # makes the file
    (script,) = blocks(PAGE, "py")
    Path("train.py").write_text(script.text, encoding="utf-8")
    output = run_on_two_ranks(launcher)
    assert output.count("training order: ") == 1
    assert "lightning_h5: rows from HDF5, over all ranks" in output
    of_training = output.split("lightning_h5: rows from HDF5, over all ranks")[1]
    assert re.search(r"^ +train\b", of_training, re.MULTILINE)
    assert re.search(r"^rows +2,006\b", of_training, re.MULTILINE)
