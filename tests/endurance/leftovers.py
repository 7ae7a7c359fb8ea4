"""What a process holds of the system, before and after: processes, threads, descriptors, shared memory."""

import gc
import os
import re
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from typing import NamedTuple

from guards import HANG

SERVERS = ("resource_tracker", "forkserver")  # started by Python once per process, and ended with it


class Held(NamedTuple):
    """Numbers of children; threads by name; what descriptors lead to; names of shared memory."""

    children: set
    threads: Counter
    descriptors: Counter
    shared: set


def held():
    """What this process holds now."""
    return Held(_children(), _threads(), Counter(_descriptors()), _shared())


@contextmanager
def nothing_is_left():
    """After the block, and a moment, this process holds nothing that it did not hold before."""
    before = held()
    yield
    gc.collect()  # errors keep their frames alive
    end = time.monotonic() + HANG
    while (left := _more(before, held())) and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    assert not left, left


def _more(before, after):
    """What there is now and was not before, in words; empty where that is nothing."""
    children = {pid: line for pid in after.children - before.children if not _is_server(line := command_of(pid))}
    found = {
        "processes": children,
        "threads": after.threads - before.threads,
        "descriptors": after.descriptors - before.descriptors,
        "shared memory": after.shared - before.shared,
    }
    return {what: more for what, more in found.items() if more}


def _is_server(command):
    return not command or any(name in command for name in SERVERS)


def command_of(pid):
    """A process's command line; empty where it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().replace("\0", " ")
    except OSError:
        return ""


def _children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(pid) for pid in file.read().split()}


def _threads():
    """Those of this process, but for tqdm's one that watches all bars there ever are."""
    return Counter(thread.name for thread in threading.enumerate() if thread.name != "tqdm_monitor")


def _descriptors():
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if not name.startswith("/proc/"):  # skip the folder being listed
                yield re.sub(r"\[\d+\]", "", name)  # pipes and sockets are counted, not distinguished


def _shared():
    found = set()
    with open("/proc/self/maps") as file:
        for line in file:
            name = line.split(maxsplit=5)[-1].strip()
            if ("/dev/shm" in name or "memfd" in name) and "/sem." not in name:
                found.add((name, line.split()[4]))
    return found
