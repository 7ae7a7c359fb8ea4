"""A subprocess with limits on time and memory that checks one file, and returns the findings as plain data.

It is a fresh interpreter, not a fork: a file that takes it over cannot see this process's memory or open files. The
limits are set before the HDF5 library is loaded; until then, only the standard library is imported. This costs 0.2 s
per file.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import H5ValueError, H5WorkerError
from ...sizes import parse_bytes
from ...threads import task_limits

MIN_MEMORY = 256 << 20
"""Minimum address space: Python, NumPy, HDF5 and the decoders need 130 MB before a file is opened."""

BYTES_PER_SECOND = 10_000_000
"""Bytes per second that the slowest disk is assumed to read; a slower check counts as hanging."""

MAX_REPORT = 16 << 20
"""Maximum bytes of a report, and of any other output file; the report of 100,000 arrays has about 10 MB."""

KEPT = ("LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LC_", "HDF5_", "TZ")
"""Prefixes of environment variables that the HDF5 library and its filters need, or that Python needs to read names."""

# Unused threads and memory arenas would count as address space.
FEW = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}

START = "import sys; sys.path[:] = sys.argv[2:]; from lightning_h5.tools.check.sandbox import main; main(sys.argv[1])"

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38  # from linux/prctl.h


class SandboxError(Exception):
    """The check of a file did not end with a report.

    Attributes:
        kind: "crashed", "hung", "memory" or "died".
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits for the check of a file.

    Attributes:
        memory: bytes of address space.
        seconds: time limit, plus one second per 10 MB of the file.
    """

    memory: int
    seconds: float

    @classmethod
    def of(cls, memory: int | str, seconds: float) -> SandboxLimits:
        """Parse the limits that a user passed.

        Raises:
            H5ValueError: a limit is invalid.
        """
        n_bytes = parse_bytes(memory, "sandbox_memory")
        if n_bytes <= MIN_MEMORY:
            raise H5ValueError(
                f"sandbox_memory={memory!r} is {n_bytes:,} bytes, but Python and its libraries need up to "
                f"{MIN_MEMORY:,}. Pass more, such as '4 GiB'."
            )
        if isinstance(seconds, bool) or not 0 < seconds < math.inf:
            raise H5ValueError(f"sandbox_seconds={seconds!r} is not a time. Pass seconds, more than 0.")
        return cls(memory=n_bytes, seconds=float(seconds))

    def seconds_of(self, path: str) -> float:
        """Return the seconds that the check of a file may take."""
        try:
            status = os.stat(path)
        except OSError:
            return self.seconds
        # By its size on disk: a file may declare any size.
        return self.seconds + min(status.st_size, status.st_blocks * 512) / BYTES_PER_SECOND


def run_in_sandbox(path: str, options: Any, limits: SandboxLimits, n_threads: int) -> Any:
    """Check a file in a subprocess.

    Args:
        path: the file.
        options: ``CheckOptions`` of ``check_file``.
        limits: limits on memory and time.
        n_threads: threads that decode.

    Returns:
        The findings as JSON values. Do not trust them: the file may have taken over the subprocess.

    Raises:
        SandboxError: the subprocess crashed, exceeded the time or memory limit, or ended without a report.
        H5WorkerError: the subprocess cannot be started.
    """
    seconds = limits.seconds_of(path)
    task = {
        "path": os.path.abspath(path),
        "options": asdict(options),
        "memory": limits.memory,
        "cpu": math.ceil(seconds * n_threads) + 1,
        "threads": n_threads,
        "parent": os.getpid(),
    }
    # Libraries search for plugins in the working directory and in paths from the environment: the directory is empty,
    # and the environment minimal.
    environment = {name: value for name, value in os.environ.items() if name.startswith(KEPT)} | FEW
    try:
        with tempfile.TemporaryFile() as report, tempfile.TemporaryDirectory(prefix="lightning_h5-") as empty:
            code = subprocess.run(
                _command(json.dumps(task)),
                stdin=subprocess.DEVNULL,  # if closed, the next opened file would get its number
                stdout=report,
                stderr=subprocess.DEVNULL,
                cwd=empty,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the subprocess
                timeout=seconds,
                check=False,
            ).returncode
            report.seek(0)
            text = report.read(MAX_REPORT)
    except subprocess.TimeoutExpired:
        code, text = -signal.SIGXCPU, b""
    except OSError as why:
        raise H5WorkerError(
            f"no process could be started to check {path!r}: {why.strerror} ({task_limits()}). Check the limits of "
            "processes, memory and open files (`ulimit -a`) and the space in the temporary folder, or remove "
            "sandbox=True if you trust the file."
        ) from why
    if code == -signal.SIGXCPU:
        raise SandboxError(
            "hung",
            f"its check did not finish within {seconds:,.0f} s and was stopped. If you trust its source, and it may be "
            f"slow, pass more than sandbox_seconds={limits.seconds:g}; if not, do not open it.",
        )
    if code < 0:
        name = {number.value: number.name for number in signal.Signals}.get(-code, f"signal {-code}")
        raise SandboxError(
            "crashed",
            f"its check was ended by {name}. Any program that opens it may crash in the same way: do not open it, and "
            "copy or write it again.",
        )
    return _parsed(text, code, limits)


def _parsed(text: bytes, code: int, limits: SandboxLimits) -> Any:
    try:
        findings = json.loads(text)
    except (ValueError, RecursionError):
        findings = {"failed": f"exit code {code}, without a report"}
    failed = findings.get("failed") if isinstance(findings, Mapping) else "another report"
    if failed == "memory":
        cure = f"If you trust its source, pass more than sandbox_memory={limits.memory:,} bytes."
        raise SandboxError("memory", f"its check exceeded its memory limit. {cure}")
    if failed is not None or code:
        ending = f"its check ended with {str(failed or code)[:500]!r}."
        raise SandboxError("died", f"{ending} Copy the file again; if that does not help, do not open it.")
    return findings


def _command(task: str) -> list[str]:
    """The command that starts the subprocess."""
    # The same import path, without the working directory, unless this package is there.
    package_root = str(Path(__file__).absolute().parents[3])
    places = [os.path.abspath(place or os.curdir) for place in sys.path]
    import_path = [place for place in places if place == package_root or place != os.path.abspath(os.curdir)]
    # -I: imports depend neither on the environment nor on the working directory. -B: no bytecode is written.
    return [sys.executable, "-I", "-B", "-c", START, task, *import_path]


def main(request: str) -> None:
    """Check a file in this process, within limits, and write the findings to the standard output. Does not return.

    Args:
        request: the task of ``run_in_sandbox`` as JSON.
    """
    task = json.loads(request)
    report = os.dup(1)  # libraries may write to stdout, which is discarded from here on
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        _limit_process(task)
        text = json.dumps(_check_in_child(task))
    except MemoryError:
        text = '{"failed": "memory"}'
    except BaseException as why:
        text = json.dumps({"failed": f"{type(why).__name__}: {why}"[:2000]})
    with open(report, "wb") as file:
        file.write(text.encode("ascii"))
    os._exit(0)  # the report is written, and closing objects of a damaged file may crash


def _limit_process(task: Mapping[str, Any]) -> None:
    """Limit the resources of this process permanently, and end it with its parent."""
    limits = {
        resource.RLIMIT_AS: (task["memory"], task["memory"]),
        resource.RLIMIT_CPU: (task["cpu"], task["cpu"] + 5),  # the soft limit sends SIGXCPU, the hard limit kills
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_FSIZE: (MAX_REPORT, MAX_REPORT),
    }
    for limit, sizes in limits.items():
        maximum = resource.getrlimit(limit)[1]
        soft, hard = (size if maximum == resource.RLIM_INFINITY else min(size, maximum) for size in sizes)
        resource.setrlimit(limit, (soft, hard))
    if sys.platform == "linux":
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no core dumps, and no access to its memory from outside
    if os.getppid() != task["parent"]:  # the parent has already ended
        os._exit(1)


def _check_in_child(task: Mapping[str, Any]) -> dict[str, Any]:
    from .check_file import CheckOptions, check_file

    return asdict(check_file(task["path"], CheckOptions(**task["options"]), task["threads"], lambda n_bytes: None))
