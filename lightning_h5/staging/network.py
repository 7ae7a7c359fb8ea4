"""The one process of a rank that talks to object stores. Others, such as its workers, ask it through a local socket.

The connections of obstore hang in a forked process. One process also keeps what is in flight within bounds, and
credentials in one place.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

from ..cores import local_ranks
from ..errors import H5Error, H5FileError
from ..threads import EndingThread
from .stores import Stores

__all__ = ["IN_FLIGHT", "Address", "ask_store", "network_address", "use_network"]

IN_FLIGHT = 64
"""Requests to stores at a time, of all ranks of a machine together."""

BACKLOG = 128  # connections that wait to be accepted
PAUSE = 0.1  # seconds after a connection could not be accepted: this process may have no descriptor left
PEER = struct.Struct("iII")  # process, user and group at the other end of a socket

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
            self._is_over = False
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self.address[0])
            self._listener.listen(BACKLOG)
            EndingThread(self._accept, name="lightning_h5-stores", end=self._end).start()

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

    def _end(self) -> None:
        self._is_over = True
        _shut(self._listener)

    def _accept(self) -> None:
        """Accept connections; any user of the machine can connect to the socket."""
        while not self._is_over:
            try:
                peer, _ = self._listener.accept()
                user = PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[1]
            except OSError:
                time.sleep(PAUSE)
                continue
            if user != os.geteuid():
                peer.close()
                continue
            EndingThread(self._answer, (peer,), name="lightning_h5-store", end=partial(_shut, peer)).start()
        self._listener.close()

    def _answer(self, peer: socket.socket) -> None:
        """Answer a worker, once both sides have shown that they know the key; others keep only this thread."""
        connection = Connection(os.dup(peer.fileno()))
        with peer, connection, suppress(EOFError, OSError, AuthenticationError):
            deliver_challenge(connection, self.address[1])
            answer_challenge(connection, self.address[1])
            while True:
                what, args = connection.recv()
                try:
                    found = self.ask(what, *args)
                    answer = True, bytes(found) if isinstance(found, memoryview) else found
                except H5Error as error:
                    answer = False, error
                connection.send(answer)


def _shut(peer: socket.socket) -> None:
    """Wake the thread that waits at a socket."""
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


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
