"""A process that checks one file, seen from the one that started it: its limits, what it tells, how it ended."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ...errors import H5ValueError, H5WorkerError
from ...sizes import parse_bytes
from .checking import Findings, Wanted
from .looking import working_folder
from .problems import error
from .telling import NotToldError, hear

__all__ = ["Child", "SandboxLimits", "child_command"]

LEAST_MEMORY = 256 << 20
"""Python, NumPy, HDF5 and the decoders take 130 MB of address space before a file is opened."""

SLOWEST = 10_000_000
"""Bytes of a file that are checked in a second on the slowest disk that is not taken for a hang."""

MOST_TOLD = 16 << 20
"""What a process may tell: a file with 100,000 arrays takes about 10 MB."""

POLL = 0.1  # seconds between looks at processes that tell nothing
MOST_DYING = 10  # seconds that the system may take to end a process that was killed
JUST_ENDING = 0.002  # seconds until a process that has closed its pipe has ended, as a rule

AGAIN = "Copy the file again; if that does not help, do not open it."

KEPT = ("LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LC_", "HDF5_", "TZ")
"""How names of environment variables begin that the HDF5 library and its filters need, or Python to read names."""

# Threads and arenas of memory that are not used would count as address space.
FEW = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}

START = "import sys; sys.path[:] = sys.argv[2:]; from lightning_h5.tools.checks.child import main; main(sys.argv[1])"


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What the process that checks a file may take.

    Attributes:
        memory: bytes of address space.
        seconds: until it has to have ended, and one more for each 10 MB of the file.
    """

    memory: int
    seconds: float

    @classmethod
    def of(cls, memory: int | str, seconds: float) -> SandboxLimits:
        """Limits as a user names them.

        Args:
            memory: a number of bytes, or a text such as ``"4 GiB"``.
            seconds: more than 0.

        Raises:
            H5ValueError: they make no sense.
        """
        n_bytes = parse_bytes(memory, "sandbox_memory")
        if n_bytes <= LEAST_MEMORY:
            raise H5ValueError(
                f"sandbox_memory={memory!r} is {n_bytes:,} bytes, and Python with its libraries takes up to "
                f"{LEAST_MEMORY:,} itself. Pass more, such as '4 GiB'."
            )
        if isinstance(seconds, bool) or not 0 < seconds < math.inf:
            raise H5ValueError(f"sandbox_seconds={seconds!r} is no time. Pass seconds, more than 0.")
        return cls(memory=n_bytes, seconds=float(seconds))

    def seconds_of(self, path: str) -> float:
        """Seconds that the check of a file may take."""
        try:
            found = os.stat(path)
        except OSError:
            return self.seconds
        # By what it takes on the disk: a file may claim any size.
        return self.seconds + min(found.st_size, found.st_blocks * 512) / SLOWEST


class Child:
    """A process that checks one file.

    It is a fresh interpreter, and not a fork of this process or of a server: a file that takes it over finds nothing of
    this process's memory in it, it takes no torch along, no lock of a thread that is not there, and its limits hold
    before the HDF5 library is loaded. That costs 0.2 s a file, where a fork would cost 5 ms.

    Its working directory is empty, and gone already: nothing can be put there. Libraries look for plugins where they
    are started, which may be the folder of the very files that are not trusted. Of the environment it has no more than
    it needs: what is found by ``PATH`` or ``PYTHONPATH`` is none of its business, and neither are passwords.
    """

    def __init__(self, path: str, wanted: Wanted, limits: SandboxLimits, n_threads: int) -> None:
        self.path = path
        self.is_silent = False
        self._limits = limits
        self._seconds = limits.seconds_of(path)
        self._end = time.monotonic() + self._seconds
        self._told = bytearray()
        self._is_late = False
        task = {
            "path": os.path.abspath(path),
            "folder": working_folder(),
            "names": wanted.names,
            "decode": wanted.decode,
            "finite": wanted.finite,
            "memory": limits.memory,
            "cpu": math.ceil(self._seconds * n_threads) + 1,
            "threads": n_threads,
            "parent": os.getpid(),
        }
        self._process = _start(path, child_command(json.dumps(task)))
        assert self._process.stdout is not None
        self.pipe = self._process.stdout.fileno()
        os.set_blocking(self.pipe, False)

    def patience(self) -> float:
        """Seconds until it has to be looked at."""
        return max(0.0, min(JUST_ENDING if self.is_silent else POLL, self._end - time.monotonic()))

    def listen(self) -> bool:
        """Takes what it has told; False where it tells no more."""
        with suppress(BlockingIOError):
            while len(self._told) <= MOST_TOLD:
                piece = os.read(self.pipe, 1 << 16)
                if not piece:
                    self.is_silent = True
                    return False
                self._told += piece
        return True

    def has_ended(self) -> bool:
        """Whether it ended, or has to."""
        if self._process.poll() is not None:
            return True
        self._is_late = time.monotonic() >= self._end
        return self._is_late or len(self._told) > MOST_TOLD

    def kill(self) -> None:
        """Kills it, and what it may have started, if that did not leave its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Sees to it that it has ended."""
        self.kill()
        with suppress(subprocess.TimeoutExpired):  # a disk that does not answer holds it; the system ends it then
            self._process.wait(MOST_DYING)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def findings(self) -> Findings:
        """What it told, or how it ended; once it has."""
        code = self._process.returncode
        if self._is_late or code == -signal.SIGXCPU:
            return self._problem(
                "hung",
                f"its check had not ended after {self._seconds:,.0f} s and was stopped. If you trust its source, and "
                f"it may be slow, pass more than sandbox_seconds={self._limits.seconds:g}; if not, do not open it.",
            )
        if len(self._told) > MOST_TOLD:
            return self._problem(
                "died",
                f"its check told more than {MOST_TOLD:,} bytes and was stopped. If you trust its source, and it has "
                "very many arrays, name those that you need as keys; if not, do not open it.",
            )
        if code < 0:
            return self._problem(
                "crashed",
                f"its check was ended by {_name(-code)}. Any program that opens it may crash in the same way: do not "
                "open it, and copy or write it again.",
            )
        if code > 0:
            return self._problem("died", f"its check ended with exit code {code} and told nothing. {AGAIN}")
        try:
            found = hear(self.path, bytes(self._told))
        except MemoryError:
            return self._problem("memory", f"its check took more memory than it may. {self._more_memory()}")
        except NotToldError as why:
            return self._problem("died", f"its check told nothing that can be used: {why}. {AGAIN}")
        found.problems = [
            replace(problem, text=f"{problem.text}. {self._more_memory()}") if problem.kind == "memory" else problem
            for problem in found.problems
        ]
        return found

    def _more_memory(self) -> str:
        return f"If you trust its source, pass more than sandbox_memory={self._limits.memory:,} bytes."

    def _problem(self, kind: str, text: str) -> Findings:
        return Findings(problems=[error(self.path, None, kind, text)])


def child_command(task: str) -> list[str]:
    """The command that starts a process for a check.

    Args:
        task: what to do, as JSON.
    """
    # -I: neither the environment nor the working directory changes what is imported. -B: nothing is written.
    return [sys.executable, "-I", "-B", "-c", START, task, *_places()]


def _places() -> list[str]:
    """Where to import from: as here, but for the working directory, unless this package lies there."""
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    places = [os.path.abspath(place or os.curdir) for place in sys.path]
    return [place for place in places if place == ours or place != working_folder()]


def _start(path: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name.startswith(KEPT)} | FEW
    try:
        # It has entered the folder once it is started; who is in it stays there when it is removed.
        with tempfile.TemporaryDirectory(prefix="lightning_h5-") as empty:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,  # a closed one would give its number to the next file that is opened
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=empty,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to this process alone, which ends the others
            )
    except OSError as why:
        raise H5WorkerError(
            f"no process could be started to check {path!r} in: {why.strerror}. Look for room for processes, memory, "
            "open files (`ulimit -a`) and in the folder of temporary files, or leave sandbox=True out if you trust the "
            "file."
        ) from why


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
