"""The process that talks to stores answers its workers, whoever else connects to its socket."""

import os
import socket
import time
from multiprocessing import AuthenticationError

import pytest

from lightning_h5.staging.network import _Network


@pytest.fixture
def owner(monkeypatch):
    monkeypatch.setattr("lightning_h5.staging.stores.Stores.head", lambda self, url, options: (url, options))
    owner = _Network()
    yield owner
    owner._end()
    while owner._listener.fileno() >= 0:  # closed by the thread that accepts
        time.sleep(0.01)


def test_silent_connections_keep_no_worker_waiting(owner):
    silent = [socket.socket(socket.AF_UNIX) for _ in range(5)]
    for connection in silent:
        connection.connect(owner.address[0])
    worker = _Network(owner.address)
    assert worker.ask("head", "s3://b/k", None) == ("s3://b/k", None)
    for connection in silent:
        connection.close()


def test_another_program_without_the_key_gets_no_answer(owner):
    name, _ = owner.address
    with pytest.raises(AuthenticationError):
        _Network((name, b"another key")).ask("head", "s3://b/k", None)
    assert _Network(owner.address).ask("head", "s3://b/k", None)


def test_connections_of_other_users_are_closed_at_once(owner, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with socket.socket(socket.AF_UNIX) as other:
        other.settimeout(20)
        other.connect(owner.address[0])
        assert other.recv(1) == b""
