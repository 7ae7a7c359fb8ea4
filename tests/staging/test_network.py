"""The process that talks to stores answers its workers, and no other process can connect to it."""

import os
import socket
import threading
from contextlib import suppress

import pytest
from guards import HANG

from lightning_h5 import H5Error, H5FileError
from lightning_h5.staging.network import _Network
from lightning_h5.threads import EndingThread


@pytest.fixture
def owner(monkeypatch):
    monkeypatch.setattr("lightning_h5.staging.stores.Stores.head", lambda self, url, options: (url, options))
    others = {*threading.enumerate()}  # this process may have stores of its own
    owner = _Network()
    owner.others = others
    yield owner
    end(owner)


def end(owner):
    owner._end()
    for thread in {*threading.enumerate()} - owner.others:
        if thread.name.startswith("lightning_h5-store"):
            thread.end()
            thread.join(HANG)


def ask(worker):
    return worker.ask("head", "s3://b/k", None)


def test_silent_connections_keep_no_worker_waiting(owner):
    worker = _Network(owner.door)
    silent = [worker._connection() for _ in range(5)]
    assert ask(worker) == ("s3://b/k", None)
    for connection in silent:
        connection.close()


def test_no_process_can_connect_that_was_not_given_the_socket(owner):
    """Names of sockets are for all users of the machine, also where files or processes are hidden from them."""
    worker = _Network(owner.door)
    assert ask(worker)
    links = [os.readlink(f"/proc/self/fd/{fd.fileno()}") for fd in (owner.door, owner._inside, *owner._workers)]
    assert len(links) == 3
    with open("/proc/net/unix") as file:
        inodes = {line.split()[6]: line.split()[7:] for line in file.readlines()[1:]}
    assert all(inodes[link.removeprefix("socket:[").rstrip("]")] == [] for link in links), "they have no name"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_finds_nothing_to_connect_to(owner):
    child = os.fork()
    if child == 0:
        try:
            for fd in (owner.door, owner._inside):
                fd.close()
            os.setuid(65534)
            code = 0
            for fd in range(3, 256):
                with suppress(OSError):
                    os.open(f"/proc/{owner.pid}/fd/{fd}", os.O_RDWR)
                    code = 1
            os._exit(code)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(_Network(owner.door))


def test_a_worker_that_gets_no_thread_tries_again(owner, monkeypatch):
    """And so does one whose connection is lost since the other process has no descriptor left."""
    failing = iter([True, True])
    start = EndingThread.start

    def limited(self):
        if next(failing, False):
            raise H5Error("the thread cannot be started")
        start(self)

    monkeypatch.setattr(EndingThread, "start", limited)
    assert ask(_Network(owner.door)) == ("s3://b/k", None)
    assert next(failing, None) is None


def test_an_owner_that_never_accepts_is_an_error_that_says_what_it_may_lack(owner, monkeypatch):
    def refused(self):
        raise H5Error("the thread cannot be started")

    monkeypatch.setattr(EndingThread, "start", refused)
    monkeypatch.setattr("lightning_h5.staging.network.TRIES", 2)
    with pytest.raises(H5FileError, match="too few descriptors or threads"):
        ask(_Network(owner.door))


def test_an_owner_that_has_ended_is_an_error_at_once(owner):
    with owner.door.dup() as door:
        worker = _Network(door)
        assert ask(worker)
        end(owner)
        with pytest.raises(H5FileError, match=r"has ended\. See its error"):
            ask(worker)


def test_a_forked_process_keeps_no_connection_of_its_parent_open(owner, monkeypatch):
    """Or a worker would wait for its answer as long as another one lives."""
    monkeypatch.setattr("lightning_h5.staging.network._network", owner)
    worker = _Network(owner.door)
    assert ask(worker)
    inodes = {os.fstat(fd.fileno()).st_ino for fd in (owner._inside, *owner._workers)}
    read, write = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            kept = 0
            for fd in map(int, os.listdir("/proc/self/fd")):
                with suppress(OSError):
                    kept += os.fstat(fd).st_ino in inodes
            write.send(bytes([len(inodes), kept]))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert list(read.recv(2)) == [2, 0]
    read.close()
    write.close()
