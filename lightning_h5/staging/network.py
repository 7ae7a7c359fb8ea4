"""The one process of a rank that talks to object stores. Others, such as its workers, ask it through sockets.

The connections of obstore hang in a forked process. One process also limits the number of requests in flight, and
credentials in one place.

A worker inherits the *door*, one end of a pair of sockets without a name, and passes its connections through it. No
other process can connect, and no file is left behind if a process is killed.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from ..cores import local_ranks
from ..errors import H5Error, H5FileError
from ..threads import EndingThread
from .stores import Stores

__all__ = ["IN_FLIGHT", "Address", "ask_store", "network_address", "use_network"]

IN_FLIGHT = 64
"""Requests to stores at a time, of all ranks of a machine together."""

PAUSE = 0.1  # seconds after a connection failed: this process, or the other, may have no descriptor or thread left
TRIES = 100
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux

Address: TypeAlias = socket.socket
"""The door. A process that is forked has it, and one that is spawned receives it as an argument."""


class _Network:
    """The stores of this process, or the connections to the process that has them.

    Args:
        door: of the process that has the stores; None if this process has them.
    """

    def __init__(self, door: Address | None = None) -> None:
        self.pid = os.getpid()
        self.is_owner = door is None
        self._idle: deque[Connection] = deque()
        if door is not None:
            self.door = door
            return
        self._stores = Stores()
        self._turns = threading.BoundedSemaphore(max(4, IN_FLIGHT // local_ranks()))
        self._is_over = False
        self._workers: set[Connection] = set()
        self._inside, self.door = socket.socketpair(type=socket.SOCK_DGRAM)
        EndingThread(self._accept, name="lightning_h5-stores", end=self._end).start()

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of ``Stores``, here or in the process that owns the connections."""
        if self.is_owner:
            with self._turns:
                return getattr(self._stores, method)(*args)
        is_done, result = self._ask_owner(method, args)
        if not is_done:
            raise result
        return memoryview(result) if isinstance(result, bytes) else result

    def _ask_owner(self, method: str, args: tuple[Any, ...]) -> Any:
        for n_left in reversed(range(TRIES)):
            try:
                connection = self._connection()
            except ConnectionError as error:
                raise H5FileError(
                    f"{args[0]!r} cannot be read: the process that reads object stores for this one has ended. See "
                    "its error, then resume."
                ) from error
            try:
                connection.send((method, args))
                answer = connection.recv()
            except (EOFError, OSError) as error:
                connection.close()
                if not n_left:
                    raise H5FileError(
                        f"{args[0]!r} cannot be read: the process that reads object stores for this one accepts no "
                        "connection. It may have too few descriptors or threads; raise `ulimit -n` and `ulimit -u`, or "
                        "use fewer workers."
                    ) from error
                time.sleep(PAUSE)
                continue
            self._idle.append(connection)
            return answer
        raise AssertionError("the last try returns or raises")

    def _connection(self) -> Connection:
        """Return a connection that is idle, or a new one.

        Raises:
            ConnectionError: the process that has the stores has ended.
        """
        with suppress(IndexError):
            return self._idle.pop()
        own_end, other_end = socket.socketpair()
        with own_end, other_end:
            socket.send_fds(self.door, [b"+"], [other_end.fileno()])
            return Connection(own_end.detach())

    def close_inherited(self) -> None:
        """Close a forked child's copies: connections to them would wait forever once this process has ended."""
        self._inside.close()
        for connection in self._workers:
            connection.close()

    def _end(self) -> None:
        self._is_over = True
        self.door.close()
        with suppress(OSError):
            self._inside.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        """Answer each connection that comes through the door in a thread."""
        with self._inside:
            while not self._is_over:
                try:
                    _, descriptors, _, _ = socket.recv_fds(self._inside, 1, 1, CLOSE_ON_EXEC)
                except OSError:
                    descriptors = []
                if not descriptors:
                    time.sleep(PAUSE)
                for descriptor in descriptors:
                    connection: Connection = Connection(descriptor)
                    try:
                        self._workers.add(connection)
                        end = partial(_shut, connection)
                        EndingThread(self._answer, (connection,), name="lightning_h5-store", end=end).start()
                    except H5Error:  # the limit of threads
                        self._let_go(connection)

    def _answer(self, connection: Connection) -> None:
        try:
            while True:
                method, args = connection.recv()
                try:
                    result = self.ask(method, *args)
                    answer = True, bytes(result) if isinstance(result, memoryview) else result
                except (H5Error, MemoryError) as error:
                    answer = False, error
                connection.send(answer)
        except (EOFError, OSError):
            pass
        finally:
            self._let_go(connection)

    def _let_go(self, connection: Connection) -> None:
        self._workers.discard(connection)
        connection.close()


def _shut(connection: Connection) -> None:
    """Wake the thread that waits at a connection."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as peer:
        peer.shutdown(socket.SHUT_RDWR)


_network: _Network | None = None
_inherited: list[_Network] = []  # of a parent process, whose stores must not be used, not even to delete them
_lock = threading.Lock()


def _network_of_process() -> _Network:
    global _network  # state of the process
    with _lock:
        if _network is None:
            _network = _Network()
        elif _network.pid != os.getpid():  # forked: the threads of the parent are not here
            _inherited.append(_network)
            _network = _Network(_network.door)
        return _network


def _forget_process() -> None:
    global _lock  # another thread of the parent may have held it
    _lock = threading.Lock()
    if _network is not None and _network.is_owner:
        _network.close_inherited()


os.register_at_fork(after_in_child=_forget_process)


def ask_store(method: str, *args: Any) -> Any:
    """Have the process that talks to stores call a method of ``Stores``.

    Args:
        method: name of the method.
        args: its arguments.

    Raises:
        H5Error: the error of the method; or the process has ended.
    """
    return _network_of_process().ask(method, *args)


def network_address() -> Address | None:
    """Return how other processes ask this one; None if no store was used."""
    return None if _network is None else _network_of_process().door


def use_network(address: Address | None) -> None:
    """Ask another process from now on, in a worker that was not forked."""
    global _network  # state of the process
    if address is not None and _network is None:
        _network = _Network(address)
