"""A cell of the matrix: one fault, one data module, some workers; in a process of its own, with a limit of time."""

import faulthandler
import gc
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
from arguments import nested
from guards import HANG
from matrix_case import REFUSED, RIGHT, Case
from tqdm import tqdm

from lightning_h5 import CombinedHDF5DataModule, H5Error, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.samples import row_table

LIMIT = HANG  # seconds that a cell may take once started
START = HANG  # seconds in which a process must start
LEAVE = HANG  # seconds in which started processes must end
BATCH, MIDDLE, EPOCHS = 4, 3, 2  # rows of a batch; batches before the last stage of a fault; epochs
HELD_BYTES = 1024  # so that x is read on demand and y is held, as large and small arrays would be

REMEDY = re.compile(
    r"(?<=[.:;,?] )(?:Add|Check|Choose|Close|Copy|copy|Encode|Install|Leave|Look|Make|Mend|Name|Pass|Put|Raise|Remove"
    r"|Run|Set|Start|Take|Train|Wait|Write)\b"
)
"""How the last part of a message begins: what to do."""


@dataclass(frozen=True)
class Cell:
    """What became of a cell: the verdict, and the error's text or what is wrong with it."""

    verdict: str  # refused, right; or silent, foreign, unnamed, hang, crash, leak
    text: str


def run_cell(fault, kind, n_workers, folder):
    """Runs a cell in a forked child that leads a group of its own; nothing of it is alive when this returns."""
    resource_tracker.ensure_running()  # otherwise each child would start its own tracker in a new interpreter
    folder.mkdir()
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiver)
        _be_child(fault, kind, n_workers, folder, sender)
    os.close(sender)
    try:
        cell = _wait_for(receiver, folder)
        if cell is None or cell.verdict != "hang":
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # not reaped yet, so its pid is not reused
        left = _group(pid)
    finally:
        os.close(receiver)
        for kill in (os.killpg, os.kill):  # it leads no process group before it starts
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if cell is None:
        return Cell("crash", f"the process ended with {code}: {_tail(folder)}")
    if cell.verdict in (REFUSED, RIGHT) and left:
        return Cell("leak", f"processes are left: {left}")
    return cell


def _wait_for(receiver, folder):
    """What the child tells, None where it ends without a word."""
    text, end = b"", time.monotonic() + START
    while not text.endswith(b"\n"):
        left = end - time.monotonic()
        if left <= 0 or not wait([receiver], left):
            return Cell("hang", f"no end after {LIMIT:g} s: {_tail(folder)}" if text else "it did not begin")
        if not (part := os.read(receiver, 1 << 16)):
            return None
        if not text:
            end = time.monotonic() + LIMIT + LEAVE
        text += part
    return Cell(**json.loads(text[1:]))


def _be_child(fault, kind, n_workers, folder, sender):
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(log)
        faulthandler.register(signal.SIGALRM, log)  # not its own timer, whose thread is in the parent only
        signal.alarm(int(LIMIT))
        logging.getLogger().handlers.clear()  # pytest's handlers keep records, and with them errors and their frames
        torch.set_num_threads(1)
        row_table.HELD_BYTES = HELD_BYTES
        _warm_up()
        os.write(sender, b"!")
        began = time.monotonic()
        cell = _verdict(fault, kind, n_workers, folder)
        if time.monotonic() - began > LIMIT + LEAVE / 2:
            cell = Cell("hang", f"it took {time.monotonic() - began:.1f} s; {cell.text}")
        os.write(sender, json.dumps(cell.__dict__).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _warm_up():
    """What stays open in a process once it was used is opened before the cell is looked at."""
    torch.empty(1).share_memory_()
    tqdm.get_lock()
    gc.freeze()  # so that cells neither scan nor copy the memory of imported modules


def _verdict(fault, kind, n_workers, folder):
    case = Case(str(folder))
    steps = fault.befall(case)
    before = Holdings()
    error, seen = _train(fault, case, kind, n_workers, steps)
    steps.close()
    for undo in case.undo:
        undo()
    if isinstance(seen, str):
        return Cell("silent", seen if error is None else f"{seen}; then {error}")
    if error is None:
        n_rows = len(case.truth["x"])
        if seen.tolist() != [EPOCHS] * n_rows:
            return Cell("silent", f"no error, and rows came {seen.tolist()} times")
        cell = Cell(RIGHT, "")
    else:
        cell = _judge(fault, case, error)
    del error
    if left := before.what_is_left():
        return Cell("leak", f"{cell.verdict}, and left are {left}")
    return cell


def _judge(fault, case, told):
    """Whether an error is one of ours that says what, where, and what to do."""
    kind, is_ours, text = told
    if not is_ours:
        return Cell("foreign", f"{kind}: {text}")
    wanted = [case.blamed] + ([repr(fault.key)] if fault.key else [])
    if missing := [name for name in wanted if name not in text]:
        return Cell("unnamed", f"{kind} does not name {missing}: {text}")
    if not re.search(fault.cause, f"{kind}: {text}"):
        return Cell("unnamed", f"{kind} does not say {fault.cause!r}: {text}")
    if not REMEDY.search(text):
        return Cell("unnamed", f"{kind} says nothing of what to do: {text}")
    return Cell(REFUSED, f"{kind}: {text}")


def _train(fault, case, kind, n_workers, steps):
    """Goes through all epochs; gives the error, if any, and how often each row came, or which came wrong."""
    seen = np.zeros(len(case.truth["x"]), dtype=int)
    error, module = None, None
    next(steps)
    try:
        module = _module(kind, case, n_workers, fault.options)
        module.setup("fit")
        next(steps)
        loader = module.train_dataloader()
        seen = np.zeros(len(case.truth["x"]), dtype=int)
        n_batches = 0
        for _ in range(EPOCHS):
            for batch in loader:
                rows, wrong = _compare(batch, case.truth)
                if wrong:
                    return None, wrong
                np.add.at(seen, rows, 1)
                n_batches += 1
                if n_batches == MIDDLE:
                    next(steps)
    except Exception as raised:
        error = type(raised).__name__, isinstance(raised, H5Error), str(raised)
        if not error[1]:
            traceback.print_exc()
            sys.stderr.flush()
    finally:
        if module is not None:
            module.teardown()
    return error, seen


def _module(kind, case, n_workers, options):
    common = {
        "batch_size": BATCH,
        "with_index": True,
        "num_workers": n_workers,
        "prefetch_factor": 2,  # so that most of the epoch is still unread in its middle
        "pin_memory": False,
        "seed": 0,
        "rank": 0,
        "world_size": 1,
        "multiprocessing_context": "fork" if n_workers else None,
        "timeout": HANG,
    }
    names = {"x": case.x_key, "y": "y"}
    if kind == "combined":
        return CombinedHDF5DataModule(
            case.paths,
            **nested(fields=names, x_dtype=None, cache_size=8, **common, **options),
        )
    options = {name: value for name, value in options.items() if name != "on_bad_file"}
    module = {"lazy": LazyH5DataModule, "cached": RankCachedH5DataModule}[kind]
    return module(case.paths, **nested(x_key={"x": case.x_key}, y_key="y", x_dtype=None, **common, **options))


def _compare(batch, truth):
    """The rows of a batch, and what is wrong with them."""
    if isinstance(batch, tuple | list):
        x, y, index = batch
        batch = {"x": x["x"], "y": y, "index": index}
    rows = batch["index"].numpy()
    for name, values in truth.items():
        expected = values[rows]
        found = batch[name].numpy() if isinstance(batch[name], torch.Tensor) else np.array(batch[name], dtype=object)
        same = found.dtype == expected.dtype.newbyteorder("=") or expected.dtype.kind == "O"
        if not same or (found.tolist() != expected.tolist() and found.tobytes() != _native(expected).tobytes()):
            return rows, f"{name} of rows {rows.tolist()} is {found.tolist()!s:.300} and should be {expected!s:.300}"
    return rows, None


def _native(values):
    return np.ascontiguousarray(values.astype(values.dtype.newbyteorder("=")))


class Holdings:
    """What this process holds of the system's: descriptors, children, threads, shared memory."""

    def __init__(self):
        self._before = self._now()

    def what_is_left(self):
        """What has come since and does not go."""
        end = time.monotonic() + LEAVE
        while True:
            gc.collect()  # errors keep their frames alive
            found = self._now() - self._before
            if not found or time.monotonic() > end:
                return sorted(found)
            time.sleep(0.01)

    @staticmethod
    def _now():
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add(f"descriptor {fd} of {os.readlink(f'/proc/self/fd/{fd}')}")
        with open("/proc/self/maps") as file:
            names = {line.split(maxsplit=5)[-1].strip() for line in file}
        found |= {f"map of {name}" for name in names if ("/dev/shm" in name or "memfd" in name)}
        found |= {f"thread {thread.name}" for thread in threading.enumerate() if thread.name != "tqdm_monitor"}
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            found |= {f"process {pid}" for pid in file.read().split()}
        # Entry names contain the process id; those of its workers end before it.
        found |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name}
        return {name for name in found if not name.endswith(f"/proc/{os.getpid()}/fd")}


def _group(pid):
    """Processes of a cell's group that live, the cell's own excepted."""
    try:
        os.killpg(pid, 0)
    except (ProcessLookupError, PermissionError):
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != pid:
            with suppress(OSError, ValueError):
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == pid and state != "Z":
                    found.append(f"{entry.name} {(entry / 'cmdline').read_text()[:80]}")
    return found


def _tail(folder):
    try:
        return (folder / "log").read_text()[-3000:]
    except OSError:
        return ""
