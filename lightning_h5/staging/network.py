"""The one process of a rank that talks to object stores. Others, such as its workers, ask it through a local socket.

The connections of obstore hang in a forked process. One process also keeps what is in flight within bounds, and
credentials in one place.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from ..cores import local_ranks
from ..errors import H5Error, H5FileError
from .stores import Stores

__all__ = ["IN_FLIGHT", "Address", "ask_store", "network_address", "use_network"]

IN_FLIGHT = 64
"""Requests to stores at a time, of all ranks of a machine together."""

BACKLOG = 128  # connections that wait to be accepted

Address = tuple[str, bytes]
"""Name of the socket, and the key that both sides know."""


class _Network:
    """The stores of this process, or the connections to the process that has them."""

    def __init__(self, address: Address | None = None) -> None:
        self.pid = os.getpid()
        self.is_owner = address is None
        self.address = address or (f"\0lightning_h5-{self.pid}-{secrets.token_hex(8)}", secrets.token_bytes(16))
        self._idle: deque[Connection] = deque()
        if self.is_owner:
            self._stores = Stores()
            self._turns = threading.BoundedSemaphore(max(4, IN_FLIGHT // local_ranks()))
            self._listener = Listener(self.address[0], "AF_UNIX", backlog=BACKLOG, authkey=self.address[1])
            threading.Thread(target=self._accept, name="lightning_h5-stores", daemon=True).start()

    def ask(self, what: str, *args: Any) -> Any:
        """Return what a method of ``Stores`` does."""
        if self.is_owner:
            with self._turns:
                return getattr(self._stores, what)(*args)
        try:
            connection = self._connection()
            connection.send((what, args))
            is_done, found = connection.recv()
        except (EOFError, OSError) as error:
            raise H5FileError(
                f"{args[0]!r} cannot be read: the process that reads object stores for this one has ended. See "
                "its error, then resume."
            ) from error
        self._idle.append(connection)
        if not is_done:
            raise found
        return memoryview(found) if isinstance(found, bytes) else found

    def stop_listening(self) -> None:
        """Close a forked child's copy of the socket: connections to it would wait forever."""
        with suppress(OSError):
            self._listener.close()

    def _connection(self) -> Connection:
        with suppress(IndexError):
            return self._idle.pop()
        return Client(self.address[0], "AF_UNIX", authkey=self.address[1])

    def _accept(self) -> None:
        while True:
            with suppress(Exception):  # another program knocked: it does not have the key
                connection = self._listener.accept()
                threading.Thread(
                    target=self._answer, args=(connection,), name="lightning_h5-store", daemon=True
                ).start()

    def _answer(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):
            while True:
                what, args = connection.recv()
                try:
                    found = self.ask(what, *args)
                    answer = True, bytes(found) if isinstance(found, memoryview) else found
                except H5Error as error:
                    answer = False, error
                connection.send(answer)


_network: _Network | None = None
_inherited: list[_Network] = []  # of a parent process, whose stores must not be touched, not even to delete them
_lock = threading.Lock()


def _of_process() -> _Network:
    global _network  # state of the process
    with _lock:
        if _network is None:
            _network = _Network()
        elif _network.pid != os.getpid():  # forked: the threads of the parent are not here
            _inherited.append(_network)
            _network = _Network(_network.address)
        return _network


def _after_fork() -> None:
    global _lock  # another thread of the parent may have held it
    _lock = threading.Lock()
    if _network is not None and _network.is_owner:
        _network.stop_listening()


os.register_at_fork(after_in_child=_after_fork)


def ask_store(what: str, *args: Any) -> Any:
    """Have the process that talks to stores call a method of ``Stores``.

    Args:
        what: name of the method.
        args: its arguments.

    Raises:
        H5Error: what the method raises; or that process has ended.
    """
    return _of_process().ask(what, *args)


def network_address() -> Address | None:
    """Return how other processes ask this one; None if no store was used."""
    return None if _network is None else _of_process().address


def use_network(address: Address | None) -> None:
    """Ask another process from now on, in a worker that was not forked."""
    global _network  # state of the process
    if address is not None and _network is None:
        _network = _Network(address)
