"""A folder of files behind a slow network: a file system of its own, with a delay and a bandwidth.

It speaks the kernel's FUSE protocol by itself, since mounting it then needs no library; it needs root, and Linux. The
kernel reads ahead and keeps pages, as of other network file systems; `forget` drops them, as if memory were full.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

N_THREADS = 64
MAX_BYTES = 1 << 20  # of an answer
REQUEST_BYTES = 8192  # of a request, at most: nothing is written
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 17, 18, 25, 26
OPENDIR, READDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 27, 28, 29, 36, 42
ASYNC_READ, LARGE_REQUESTS = 1, 1 << 22
IN, OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
ROOT, VALID = 1, 3600  # number of the folder; seconds that attributes are kept
READ_ONLY, DETACH, KEEP_CACHE = 1, 2, 2


class _Server:
    """Answers the kernel.

    Args:
        folder: whose files are shown.
        device: descriptor of the connection.
        delay: seconds that each read takes.
        bandwidth: bytes a second, of all reads together.
    """

    def __init__(self, folder: Path, device: int, delay: float, bandwidth: float) -> None:
        self.folder, self.device, self.delay, self.bandwidth = folder, device, delay, bandwidth
        self.names = sorted(os.listdir(folder))
        self.files = [os.open(folder / name, os.O_RDONLY) for name in self.names]
        self.is_free_at, self.lock = 0.0, threading.Lock()

    def run(self) -> None:
        """Answer requests until the folder is unmounted."""
        memory = memoryview(bytearray(MAX_BYTES))
        while True:
            try:
                request = os.read(self.device, REQUEST_BYTES)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return
            _, code, number, node, *_ = IN.unpack_from(request)
            if code in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            answer = self.answer(code, node, request[IN.size :], memory)
            failed, data = (-answer, b"") if isinstance(answer, int) else (0, answer)
            with contextlib.suppress(OSError):
                os.writev(self.device, [OUT.pack(OUT.size + len(data), failed, number), data])

    def answer(self, code: int, node: int, data: bytes, memory: memoryview) -> bytes | memoryview | int:
        """Return the answer to a request, which may be in memory, or the number of an error."""
        if code == INIT:
            major, minor, readahead, flags = struct.unpack_from("<4I", data)
            flags &= ASYNC_READ | LARGE_REQUESTS
            head = (major, min(minor, 31), readahead, flags, N_THREADS, N_THREADS, 4096, 1, MAX_BYTES // 4096, 0)
            return struct.pack("<4IHHIIHH", *head) + bytes(32)
        if code == LOOKUP:
            name = data.rstrip(b"\0").decode()
            if name not in self.names:
                return errno.ENOENT
            node = self.names.index(name) + 2
            return struct.pack("<4Q2I", node, 0, VALID, VALID, 0, 0) + self.attributes(node)
        if code == GETATTR:
            return struct.pack("<Q2I", VALID, 0, 0) + self.attributes(node)
        if code in (OPEN, OPENDIR):
            return struct.pack("<Q2I", 0, KEEP_CACHE if code == OPEN else 0, 0)
        if code == READ:
            _, offset, n_bytes = struct.unpack_from("<QQI", data)
            n_read = os.preadv(self.files[node - 2], [memory[:n_bytes]], offset)
            self.wait(n_read)
            return memory[:n_read]
        if code == READDIR:
            return b"" if struct.unpack_from("<QQ", data)[1] else self.entries()
        if code == STATFS:
            return bytes(80)
        return b"" if code in (RELEASE, FLUSH, RELEASEDIR) else errno.ENOSYS

    def wait(self, n_bytes: int) -> None:
        """Take as long as the network would."""
        with self.lock:
            self.is_free_at = max(self.is_free_at, time.monotonic()) + n_bytes / self.bandwidth
            end = self.is_free_at + self.delay
        time.sleep(max(0.0, end - time.monotonic()))

    def attributes(self, node: int) -> bytes:
        """Return what the kernel asks of a file, or of the folder."""
        found = os.stat(self.folder) if node == ROOT else os.fstat(self.files[node - 2])
        times = [getattr(found, f"st_{name}time_ns") for name in "amc"]
        seconds, rest = [each // 10**9 for each in times], [each % 10**9 for each in times]
        last = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)
        return ATTRIBUTES.pack(node, found.st_size, found.st_blocks, *seconds, *rest, *last)

    def entries(self) -> bytes:
        """Return the names in the folder."""
        found = b""
        for at, name in enumerate(self.names):
            text = name.encode()
            found += struct.pack("<QQII", at + 2, at + 1, len(text), 8) + text + bytes(-len(text) % 8)
        return found


def _serve(folder: Path, target: Path, delay: float, bandwidth: float, is_ready: Event) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    given = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other,max_read={MAX_BYTES}"
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(b"slow", str(target).encode(), b"fuse", READ_ONLY, given.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    server = _Server(folder, device, delay, bandwidth)
    for _ in range(N_THREADS - 1):
        threading.Thread(target=server.run, daemon=True).start()
    is_ready.set()
    server.run()


def forget(path: Path) -> None:
    """Drop what the page cache has of a file."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@contextlib.contextmanager
def slow_files(folder: Path, target: Path, *, delay: float, bandwidth: float) -> Iterator[Path]:
    """Show the files of a folder in another one, slowly.

    Args:
        folder: has the files, in no folders below it.
        target: an empty folder.
        delay: seconds that each read takes.
        bandwidth: bytes a second, of all reads together.

    Raises:
        RuntimeError: this user may not mount it.
    """
    context = multiprocessing.get_context("spawn")
    is_ready = context.Event()
    server = context.Process(target=_serve, args=(folder, target, delay, bandwidth, is_ready), daemon=True)
    server.start()
    try:
        while not is_ready.wait(0.1):
            if not server.is_alive():
                raise RuntimeError("a FUSE file system cannot be mounted here: that takes /dev/fuse and root")
        yield target
    finally:
        ctypes.CDLL(None).umount2(str(target).encode(), DETACH)
        server.join(5)
        server.kill()
        server.join()
