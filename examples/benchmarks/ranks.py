"""Ranks of one machine, each a process that waits for what to do."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["common", "decoding", "probes", "recipes"])

N_RANKS = 2


class Ranks:
    """Processes that are ranks of each other; ``close`` ends them.

    Args:
        make: called in each process with its rank; gives what is called there for each message of ``ask``.
    """

    def __init__(self, make: Callable[[int], Callable[[Any], Any]]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pipes = [CONTEXT.Pipe() for _ in range(N_RANKS)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            CONTEXT.Process(target=be_rank, args=(rank, port, make, theirs)) for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for pipe in self._pipes:
            pipe.recv()

    def ask(self, message: Any) -> list[Any]:
        """Has all of them do something, at the same time; gives their answers."""
        for pipe in self._pipes:
            pipe.send(message)
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def be_rank(rank: int, port: int, make: Callable[[int], Callable[[Any], Any]], pipe: Connection) -> None:
    """What the process of a rank does."""
    # By default, a child of the forkserver starts its own forkserver for its workers, which imports everything again.
    multiprocessing.set_start_method("fork", force=True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(N_RANKS)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=N_RANKS)
    serve = make(rank)
    pipe.send(None)
    while (message := pipe.recv()) is not None:
        pipe.send(serve(message))
    torch.distributed.destroy_process_group()
