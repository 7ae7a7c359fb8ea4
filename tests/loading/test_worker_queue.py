"""What workers and the main process send each other, a piece at a time: never a wait for the rest of a message."""

import os
import socket
import threading

import pytest

from lightning_h5.loading.worker_process import HEADER, WorkerQueue


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield WorkerQueue(ours), theirs


def message(number, body):
    return HEADER.pack(len(body), number) + body


def read_until(queue, n):
    got = []
    while len(got) < n:
        if (one := queue.read()) is not None:
            got.append((one[0], bytes(one[1])))
    return got


@pytest.mark.parametrize("size", [1, 10, 20_000, 3_000_000])
def test_messages_of_any_size_come_whole_and_in_order(ends, size):
    queue, theirs = ends
    sent = [(number, bytes([number]) * size) for number in range(5)]
    sender = threading.Thread(target=lambda: [theirs.sendall(message(*one)) for one in sent])
    sender.start()
    assert read_until(queue, 5) == sent
    sender.join()
    assert queue.has_answered


def test_half_of_a_message_keeps_nobody_waiting(ends):
    queue, theirs = ends
    whole = message(3, b"." * 100)
    theirs.sendall(whole[:5])
    assert queue.read() is None
    theirs.sendall(whole[5:60])
    assert queue.read() is None
    assert not queue.is_closed
    theirs.sendall(whole[60:])
    assert queue.read() == (3, b"." * 100)


@pytest.mark.parametrize("n_sent", [0, 5, 60])
def test_a_worker_that_ends_inside_a_message_is_closed(ends, n_sent):
    queue, theirs = ends
    theirs.sendall(message(0, b"whole") + message(1, b"." * 100)[:n_sent])
    theirs.close()
    assert queue.read() == (0, b"whole")
    assert queue.read() is None
    assert queue.is_closed


def test_what_a_socket_does_not_hold_is_sent_later(ends):
    queue, theirs = ends
    body = os.urandom(2_000_000)
    queue.send(7, body)  # does not wait
    assert queue.flush()
    got = bytearray()
    while len(got) < HEADER.size + len(body):
        got += theirs.recv(1 << 20)
        queue.flush()
    assert got == message(7, body)
    assert not queue.flush()


def test_what_is_sent_to_a_worker_that_ended_is_dropped(ends):
    queue, theirs = ends
    theirs.close()
    queue.send(1, b"too late")
    assert not queue.flush()
