"""Training from a web server that takes some milliseconds for each request, as object stores do.

    python examples/benchmarks/objects.py [--delay 30] [--megabytes 100] [--json FILE]

A server of this machine answers requests for ranges after a delay, and sends to all of them together at a bandwidth.
Timed are `setup` for arrays with many chunks, with and without an index, and epochs of images; beside them stands h5py
over fsspec, which is what people write, for as many rows as it reads in some seconds. Each epoch has every row once.
"""

from __future__ import annotations

import argparse
import http.server
import multiprocessing
import os
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
from common import environment, line_of, table, write_json
from rows import IMAGES, Data, lifelike

from lightning_h5 import LazyH5DataModule
from lightning_h5.tools.index_file import write_index

CHUNK_BYTES, MANY = 3000, 200_000
BATCH_SIZE = 64
FSSPEC_SECONDS = 10.0


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers requests for ranges of the files of a folder."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    folder, delay, bandwidth = "", 0.0, 0.0
    counts = multiprocessing.Array("q", 2)
    turn, free_at = threading.Lock(), 0.0

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # as the library names it
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Answer with the size alone."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with a range, or all."""
        time.sleep(self.delay)
        path = os.path.join(self.folder, self.path.lstrip("/"))
        if not os.path.exists(path):
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        found = os.stat(path)
        start, stop = 0, found.st_size
        if given := self.headers.get("Range"):
            first, last = given.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1 if last else stop, stop)
        self.send_response(206 if given else 200)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{found.st_size}")
        self.send_header("ETag", f'"{found.st_mtime_ns:x}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        with self.turn:  # all connections share the bandwidth
            begins = max(time.monotonic(), Handler.free_at)
            Handler.free_at = begins + (stop - start) / self.bandwidth
        time.sleep(max(0.0, Handler.free_at - time.monotonic()))
        with open(path, "rb") as file:
            self.wfile.write(os.pread(file.fileno(), stop - start, start))
        with self.counts.get_lock():
            self.counts[0] += 1
            self.counts[1] += stop - start


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """A thread for each connection."""

    request_queue_size, daemon_threads = 256, True


def serve(folder: str, delay: float, bandwidth: float, connection: Connection) -> None:
    """Run a server, in a process of its own, until it is killed."""
    Handler.folder, Handler.delay, Handler.bandwidth = folder, delay, bandwidth
    server = Server(("127.0.0.1", 0), Handler)
    connection.send(f"http://127.0.0.1:{server.server_address[1]}/")
    server.serve_forever()


def timed(work: Callable[[], int]) -> tuple[float, int, int, int]:
    """Return seconds, what the work returns, and the requests and bytes that it took."""
    before, began = list(Handler.counts), time.perf_counter()
    found = work()
    seconds = time.perf_counter() - began
    return seconds, found, Handler.counts[0] - before[0], Handler.counts[1] - before[1]


def module(path: str, folder: str | None) -> LazyH5DataModule:
    """Return the data module of the default settings, with mirrors in a folder."""
    return LazyH5DataModule(path, x_key="x", batch_size=BATCH_SIZE, num_workers=0, staging=folder)


def set_up(path: str, folder: str | None) -> int:
    """Set a data module up, and end it."""
    datamodule = module(path, folder)
    datamodule.setup("fit")
    datamodule.teardown("fit")
    return 0


def epochs(path: str, folder: str | None, n: int, n_rows: int) -> list[tuple[float, int, int, int]]:
    """Time epochs, each of all rows."""
    datamodule = module(path, folder)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    found = []
    for epoch in range(n):
        loader.sampler.set_epoch(epoch)
        found.append(timed(lambda: sum(len(batch) for batch in loader)))
    datamodule.teardown("fit")
    if any(seen != n_rows for _, seen, _, _ in found):
        raise SystemExit("an epoch lacks rows")
    return found


def by_fsspec(url: str, n_rows: int) -> tuple[float, int, int, int]:
    """Rows one after another, in random order, through h5py over a file object of fsspec, for some seconds."""

    def read() -> int:
        end, n = time.perf_counter() + FSSPEC_SECONDS, 0
        with fsspec.open(url, block_size=1 << 19) as opened, h5py.File(opened) as file:
            array = file["x"]
            for row in np.random.default_rng(0).permutation(n_rows).tolist():
                array[row]
                n += 1
                if time.perf_counter() > end:
                    break
        return n

    return timed(read)


def main() -> None:
    """Runs all parts, and prints their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=30, help="milliseconds of a request (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=100, help="a second, of all requests (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=20_000, help="images (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=MANY, help="of the array for setup (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to a file")
    options = parser.parse_args()
    about = environment(("obstore", "fsspec", "numba"))
    print(line_of(about))
    print(f"{options.delay:g} ms a request, {options.megabytes:g} MB/s", flush=True)
    results: list[tuple[str, float, int, int, int]] = []

    def note(what: str, seen: tuple[float, int, int, int]) -> None:
        results.append((what, *seen))
        print(f"{what}: {seen[0]:.2f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        served = Path(folder) / "served"
        served.mkdir()
        rows = np.random.default_rng(0).integers(0, 256, (1000, CHUNK_BYTES), dtype="u1")
        with h5py.File(served / "many.h5", "w") as file:
            shape = (options.chunks, CHUNK_BYTES)
            array = file.create_dataset("x", shape, "u1", chunks=(1, CHUNK_BYTES), compression="gzip")
            for start in range(0, options.chunks, len(rows)):
                array[start : start + len(rows)] = rows[: options.chunks - start]
        data = Data.write(
            served / "images.h5", *lifelike(IMAGES, options.rows), chunks=(32, 3, 64, 64), compression="gzip"
        )
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        bandwidth = options.megabytes * 1e6
        server = context.Process(target=serve, args=(str(served), options.delay / 1000, bandwidth, theirs), daemon=True)
        server.start()
        root = ours.recv()
        set_up(str(served / "images.h5"), None)  # compiles
        note(
            f"setup, {options.chunks:,} chunks, from a local disk", timed(lambda: set_up(str(served / "many.h5"), None))
        )
        many = f"{root}many.h5"
        note("setup, from the server", timed(lambda: set_up(many, f"{folder}/a")))
        note("setup again, with the mirror", timed(lambda: set_up(many, f"{folder}/a")))
        write_index(served / "many.h5")
        note("setup with a published index", timed(lambda: set_up(many, f"{folder}/b")))
        local = epochs(str(served / "images.h5"), None, 2, options.rows)
        note(f"epoch of {options.rows:,} images, from a local disk", local[0])
        first, later = epochs(f"{root}images.h5", f"{folder}/c", 2, options.rows)
        note("epoch, from the server", first)
        note("later epoch", later)
        least = data.stored_bytes / bandwidth
        print(f"{data.stored_bytes / 1e6:,.0f} MB at {options.megabytes:g} MB/s take {least:.2f} s")
        seen = by_fsspec(f"{root}images.h5", options.rows)
        note(f"h5py over fsspec, {seen[1]:,} rows", seen)
        server.kill()
    lines = [(what, f"{seconds:.2f}", f"{n:,}", f"{n_bytes / 1e6:,.1f}") for what, seconds, _, n, n_bytes in results]
    print("\n" + table(("", "seconds", "requests", "MB"), lines))
    epoch = next(seen for seen in results if seen[0] == "epoch, from the server")
    rate = results[-1][2] / results[-1][1]
    print(
        f"\nfirst epoch / bandwidth: {epoch[1] / least:.2f}; h5py over fsspec would take {options.rows / rate:,.0f} s"
    )
    write_json(options.json, {"environment": about, "results": results, "bandwidth_seconds": least})


if __name__ == "__main__":
    main()
