"""A web server for the files of a folder, which answers requests for ranges, counts them, and fails as asked."""

import http.server
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate

from guards import HANG


@dataclass
class Request:
    """What was asked for; ``start`` and ``stop`` of a GET."""

    method: str
    name: str
    start: int = 0
    stop: int = 0


class RangeServer:
    """Serves a folder while it is entered.

    ``delay`` seconds pass before each answer. ``fault(number, request)`` returns how the answer to a GET fails, or
    None: "500", "503", "401", "403", "404", "reset" (in the middle of the body), "short" (the body ends early),
    "whole" (200 and all bytes), "wrong range" (another one), "etag" (of another state), "hang" (until ``release``).
    """

    def __init__(self, folder, delay=0.0, fault=None):
        self.folder, self.delay, self.fault = str(folder), delay, fault
        self.requests = []
        self.most_at_once = self._at_once = self.n_gets = 0
        self.has_etags = True
        self._lock, self._released = threading.Lock(), threading.Event()

    def __enter__(self):
        server, backlog = self, 256

        class Handler(_Handler):
            owner = server

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size, daemon_threads, block_on_close = backlog, True, False

            def handle_error(self, request, client_address):
                pass  # clients may go

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def url(self, name=""):
        return f"http://127.0.0.1:{self._server.server_address[1]}/{name}"

    def release(self):
        """Let requests that hang end."""
        self._released.set()

    def clear(self):
        """Count from zero."""
        with self._lock:
            self.requests, self.most_at_once = [], 0

    def count(self, method="GET"):
        return sum(each.method == method for each in self.requests)

    @property
    def n_bytes(self):
        return sum(each.stop - each.start for each in self.requests)

    def came(self, request):
        with self._lock:
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self.n_gets += request.method == "GET"
            number = self.n_gets
        time.sleep(self.delay)
        return self.fault(number, request) if self.fault is not None and request.method == "GET" else None

    def went(self):
        with self._lock:
            self._at_once -= 1

    def wait(self):
        self._released.wait(HANG)


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: RangeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = os.path.join(self.owner.folder, self.path.lstrip("/"))
        request = Request(self.command, self.path.lstrip("/"))
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        if self.command == "GET":
            request.start, request.stop = self._range(size)
        try:
            fault = self.owner.came(request)
            if fault is None and not os.path.isfile(path):
                fault = "404"
            if fault in ("401", "403", "404", "500", "503"):
                return self._status(int(fault))
            if fault == "hang":
                self.owner.wait()
                return self._reset()
            self._send(path, request, fault)
        finally:
            self.owner.went()

    def _range(self, size):
        given = self.headers.get("Range", "")
        if not given.startswith("bytes="):
            return 0, size
        first, last = given.removeprefix("bytes=").split("-")
        return int(first), min(int(last) + 1 if last else size, size)

    def _send(self, path, request, fault):
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            tag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
            wanted = self.headers.get("If-Match")
            if wanted is not None and wanted != tag and fault != "etag":
                return self._status(412)
            start, stop = request.start, request.stop
            if fault == "whole":
                start, stop = 0, found.st_size
            elif fault == "wrong range":
                start, stop = start + 1, min(stop + 1, found.st_size)
            is_part = "Range" in self.headers and self.command == "GET" and fault != "whole"
            self.send_response(206 if is_part else 200)
            if is_part:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{found.st_size}")
            if self.owner.has_etags:
                self.send_header("ETag", '"another"' if fault == "etag" else tag)
            self.send_header("Last-Modified", formatdate(found.st_mtime, usegmt=True))
            self.send_header("Accept-Ranges", "bytes")
            n_bytes = found.st_size if self.command == "HEAD" else stop - start
            self.send_header("Content-Length", str(n_bytes))
            self.end_headers()
            if self.command == "HEAD":
                return None
            body = os.pread(file.fileno(), stop - start, start)
        if fault in ("reset", "short"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            return self._reset() if fault == "reset" else self._end()
        self.wfile.write(body)
        return None

    def _status(self, status):
        body = b"<Error><Code>SlowDown</Code></Error>" if status == 503 else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self):
        with suppress(OSError):  # closing sends a reset instead of the end of the stream
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._end()

    def _end(self):
        self.close_connection = True
        with suppress(OSError):
            self.connection.close()
