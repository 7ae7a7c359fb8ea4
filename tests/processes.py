"""Real processes for ranks: started together from a server that has imported everything, watched, never left behind."""

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from guards import HANG

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "lightning.pytorch",
        "lightning.pytorch.cli",
        "torchmetrics",
        "sklearn.datasets",
        "lightning_h5.datamodules",
        "frozen",
    ]
)


PR_SET_PDEATHSIG = 1


class Outcome(NamedTuple):
    """How a rank ended.

    ``exitcode`` is negative for a signal; ``value`` what the function gave; ``error`` the exception's type and text;
    ``output`` all that it printed.
    """

    exitcode: int | None
    value: Any
    error: str | None
    output: str


def run_ranks(target, world_size, folder, *arguments, patience=HANG) -> list[Outcome]:
    """Runs ``target(rank, *arguments)`` in a process for each rank, as Lightning's own launcher would start them.

    Ranks find each other under ``Trainer(devices=world_size, strategy="ddp")``. ``target`` is a function of a test
    module. When one rank has ended badly, the others have ``patience`` seconds before they are killed: fewer than by
    default only where they wait for the one that was killed, and it does not matter how they end. Nothing
    that was started is alive when this returns.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [folder / f"rank{rank}.{time.monotonic_ns()}.log" for rank in range(world_size)]
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        CONTEXT.Process(
            target=_rank,
            args=(rank, world_size, port, target, arguments, pipes[rank][1], str(logs[rank])),
            daemon=False,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    told = _watch(processes, [receiver for receiver, _ in pipes], patience)
    return [
        Outcome(process.exitcode, *told.get(rank, (None, None)), logs[rank].read_text() if logs[rank].exists() else "")
        for rank, process in enumerate(processes)
    ]


class Done(NamedTuple):
    """How a program ended: its exit code, negative for a signal, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


PACKAGES = ("lightning", "pytorch_lightning", "lightning_h5")


def run_program(code, folder, *, cwd=None, path=(), **environment) -> Done:
    """Runs a program as ``python -c`` does, and imports Lightning and this package anew, without torch's seconds.

    Args:
        code: the program.
        folder: for what it prints.
        cwd: where it runs.
        path: folders to import from, before all others.
        environment: more variables of the environment, set before anything of ours or of Lightning's is imported.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    errors = Path(folder) / f"errors.{time.monotonic_ns()}.log"
    arguments = (code, str(errors), None if cwd is None else str(cwd), [*map(str, path)], environment)
    (outcome,) = run_ranks(_program, 1, folder, *arguments)
    return Done(outcome.exitcode or outcome.value, outcome.output, errors.read_text())


def _program(rank, code, errors, cwd, path, environment):
    with open(errors, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 2)
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    os.environ |= environment
    sys.path[:0] = path
    if cwd is not None:
        os.chdir(cwd)
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(code, "<string>", "exec"), main.__dict__)
    except SystemExit as end:  # not an error for the rank to report
        return end.code or 0
    return 0


def values(outcomes):
    """What the ranks gave, after looking that all ended well."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.exitcode == 0, f"rank {rank} ended with {outcome.exitcode}:\n{outcome.output[-4000:]}"
    return [outcome.value for outcome in outcomes]


def _watch(processes, receivers, patience):
    told: dict[int, tuple[Any, str | None]] = {}
    end = time.monotonic() + HANG
    open_receivers = dict(enumerate(receivers))
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            for ready in wait([*open_receivers.values(), *(p.sentinel for p in processes if p.is_alive())], 0.2):
                _receive(ready, open_receivers, told)
            if any(process.exitcode not in (None, 0) for process in processes):
                end = min(end, time.monotonic() + patience)
                patience = float("inf")
        for receiver in list(open_receivers.values()):
            if receiver.poll():
                _receive(receiver, open_receivers, told)
    finally:
        for process in processes:  # each leads its own process group, with its workers
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
    return told


def _receive(ready, open_receivers, told):
    for rank, receiver in list(open_receivers.items()):
        if receiver is ready:
            try:
                told[rank] = receiver.recv()
            except EOFError:
                del open_receivers[rank]


def _rank(rank, world_size, port, target, arguments, sender, log):
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a loader that started the forkserver had it block some
    if sys.platform == "linux":  # ranks are children of the forkserver, and must end if the tests are killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A child of a forkserver would start its own forkserver for its workers; users' processes fork them.
    multiprocessing.set_start_method("fork", force=True)
    with open(log, "wb", buffering=0) as file:  # only its descriptor is used
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in list(os.environ):
        if name.startswith(("PL_", "MASTER_", "LOCAL_", "NODE_", "WORLD_", "RANK")):
            del os.environ[name]
    if world_size > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    import torch

    torch.set_num_threads(1)
    try:
        sender.send((target(rank, *arguments), None))
    except BaseException as error:
        traceback.print_exc()
        sender.send((None, f"{type(error).__name__}: {error}"))
        sys.stderr.flush()
        raise SystemExit(error.code if isinstance(error, SystemExit) else 1) from None
