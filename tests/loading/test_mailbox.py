"""What workers send, read piece by piece: whole messages only, and never a wait for the rest of one."""

import multiprocessing
import os
import queue
import struct
import threading
import time

import pytest

from lightning_h5.loading.mailbox import Flag, Mailbox, close_queue

CONTEXT = multiprocessing.get_context("fork")


@pytest.fixture
def mailbox():
    box = Mailbox()
    yield box
    box.end()


def pipe_of(mailbox):
    """A queue that the mailbox takes from."""
    made = CONTEXT.Queue()
    mailbox.add(made)
    return made


@pytest.mark.parametrize("size", [0, 10, 20_000, 300_000])
def test_messages_of_any_size_come_whole_and_in_order(mailbox, size):
    first, second = pipe_of(mailbox), pipe_of(mailbox)
    for number in range(5):
        first.put((number, b"a" * size))
    second.put(("other", b""))
    got = [mailbox.get(timeout=10) for _ in range(6)]
    assert [one for one in got if one[0] != "other"] == [(number, b"a" * size) for number in range(5)]
    assert ("other", b"") in got
    for one in (first, second):  # whose threads hold their ends
        one.close()
        one.join_thread()


def test_a_length_of_eight_bytes_is_understood(mailbox):
    made = pipe_of(mailbox)
    body = multiprocessing.reduction.ForkingPickler.dumps("long")
    made._sem.acquire()
    os.write(made._writer.fileno(), struct.pack("!iQ", -1, len(body)) + bytes(body))
    assert mailbox.get(timeout=10) == "long"


def test_half_of_a_message_keeps_nobody_waiting(mailbox):
    half, whole = pipe_of(mailbox), pipe_of(mailbox)
    os.write(half._writer.fileno(), struct.pack("!i", 100) + b"." * 50)
    with pytest.raises(queue.Empty):
        mailbox.get(timeout=0.05)
    whole.put("of another worker")
    assert mailbox.get(timeout=10) == "of another worker"
    with pytest.raises(queue.Empty):
        mailbox.get(timeout=0)
    mailbox.close_writers()  # its worker ends
    with pytest.raises(queue.Empty):
        mailbox.get(timeout=0.05)
    whole.close()
    whole.join_thread()


def test_what_is_put_here_wakes_who_waits(mailbox):
    threading.Timer(0.1, mailbox.put, ["wake"]).start()
    began = time.monotonic()
    assert mailbox.get(timeout=60) == "wake"
    assert time.monotonic() - began < 30


def test_nothing_is_left_open():
    before = sorted(os.listdir("/proc/self/fd"))
    box = Mailbox()
    pipe_of(box)
    box.end()
    box.end()
    box.put("too late")
    other = CONTEXT.Queue()
    close_queue(other)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_flag_is_seen_by_other_processes():
    flag = Flag(CONTEXT)
    told = CONTEXT.SimpleQueue()

    def look():
        told.put(flag.is_set())
        while not flag.is_set():
            time.sleep(0.01)
        told.put(flag.is_set())

    process = CONTEXT.Process(target=look)
    process.start()
    assert told.get() is False
    flag.set()
    flag.set()
    assert told.get() is True
    process.join()
