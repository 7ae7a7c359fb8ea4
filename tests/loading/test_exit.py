"""A program that ends while batches are read ahead ends with its own exit status, and without threads of ours.

A thread that outlives the interpreter aborts the process once in some thirty runs. So the tests look for threads at the
last moment before that, which is an exit function that was registered first.
"""

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from guards import HANG

ROOT = Path(__file__).parents[2]

PROGRAM = """
import atexit, os, sys, tempfile, threading
from lightning.pytorch import Callback
from lightning_models import Recorder, quiet_trainer
from lightning_h5 import LazyH5DataModule
from lightning_h5.staging import policy

path, folder = sys.argv[1:]

def show_threads():
    names = sorted(t.name for t in threading.enumerate() if t.name.startswith("lightning_h5"))
    os.write(1, f"{way}: {names}\\n".encode())

class Stop(Callback):
    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_step == 2:
            sys.exit(5)

def begun(**arguments):
    global loader, iterator
    module = LazyH5DataModule(path, x_key="x", batch_size=5, **arguments)
    module.setup("fit")
    loader = module.train_dataloader()
    iterator = iter(loader)
    next(iterator)
    assert any(t.name.startswith("lightning_h5-") for t in threading.enumerate())

WAYS = ("an iterator is left", "an exception", "sys.exit in a callback", "a mirror", "an exit in a thread")

def one_way():
    for name in WAYS:
        child = os.fork()
        if not child:
            return name
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(1, f"{name} ended with {status}\\n".encode())
    os._exit(0)

way = one_way()
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
atexit.register(show_threads)
if way == "an iterator is left":
    begun()
elif way == "an exception":
    begun(shuffle="chunks")
    raise ValueError
elif way == "sys.exit in a callback":
    module = LazyH5DataModule(path, x_key="x", batch_size=5, with_index=True)
    quiet_trainer(callbacks=[Stop()]).fit(Recorder(), module)
elif way == "a mirror":
    policy._is_on = lambda device, folder: False
    begun(staging=folder)
else:
    thread = threading.Thread(target=begun)
    thread.start()
    thread.join()
    sys.exit(3)
"""

ENDS = {
    "an iterator is left": 0,
    "an exception": 1,
    "sys.exit in a callback": 5,
    "a mirror": 0,
    "an exit in a thread": 3,
}


@pytest.mark.wide
def test_no_thread_of_ours_is_left_when_python_ends_in_any_way(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        rows = np.random.default_rng(0).random((400, 4000))
        file.create_dataset("x", data=rows, chunks=(20, 4000), compression="gzip")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "rows.h5"), str(tmp_path / "mirrors")]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if " ended with " in line] == [f"{way} ended with {n}" for way, n in ENDS.items()]
    assert [line for line in lines if ": [" in line] == [f"{way}: []" for way in ENDS]
