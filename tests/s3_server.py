"""A server with the protocol of S3, in a process of its own: moto's, where it is installed."""

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

BUCKET = "bucket-of-tests"


def moto_server():
    """The program, next to this Python or on the PATH; None if it is not installed."""
    beside = Path(sys.executable).parent / "moto_server"
    return str(beside) if beside.exists() else shutil.which("moto_server")


@contextmanager
def s3_server():
    """Run a server with an empty bucket; yields the options of the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([moto_server(), "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with suppress(OSError), urllib.request.urlopen(f"{endpoint}/moto-api/"):
                break
            time.sleep(0.1)
        key = "Credential=test/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        request = urllib.request.Request(
            f"{endpoint}/{BUCKET}", method="PUT", headers={"Authorization": f"AWS4-HMAC-SHA256 {key}"}
        )
        with urllib.request.urlopen(request):
            pass
        yield {
            "endpoint": endpoint,
            "access_key_id": "test",
            "secret_access_key": "a-secret-of-tests",
            "region": "us-east-1",
        }
    finally:
        process.kill()
        process.wait()
