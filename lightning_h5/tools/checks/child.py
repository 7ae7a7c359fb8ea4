"""The process that checks one file: gives up what it may do, checks, tells what it found, ends.

Until the limits are set nothing is imported but the standard library.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

__all__ = ["main"]

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38  # of Linux


def main(asked: str) -> None:
    """Checks a file and tells what was found as JSON, on what was the standard output. Does not return.

    Args:
        asked: as JSON, what ``Child`` of ``checks/apart.py`` asks for.
    """
    task = json.loads(asked)
    told = os.dup(1)  # libraries may write to the standard output, which nobody listens to from here on
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        _give_up(task)
        text = json.dumps(_check(task))
    except MemoryError:
        text = '{"failed": "memory"}'
    except BaseException as why:
        text = json.dumps({"failed": f"{type(why).__name__}: {why}"[:2000]})
    with open(told, "wb") as pipe:
        pipe.write(text.encode("ascii"))
    os._exit(0)  # closing what a damaged file has left open may crash, and all is told


def _give_up(task: dict[str, Any]) -> None:
    """Limits what this process may take, for good, and binds its life to that of the one that started it."""
    limits = {
        resource.RLIMIT_AS: (task["memory"], task["memory"]),
        # The first is a signal that tells itself from others, the second kills.
        resource.RLIMIT_CPU: (task["cpu"], task["cpu"] + 5),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_FSIZE: (0, 0),  # it writes to the pipe alone
    }
    for which, wanted in limits.items():
        most = resource.getrlimit(which)[1]
        soft, hard = (size if most == resource.RLIM_INFINITY else min(size, most) for size in wanted)
        resource.setrlimit(which, (soft, hard))
    if sys.platform == "linux":
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no core to a handler either, and no look into its memory from others
    if os.getppid() != task["parent"]:  # it ended before that
        os._exit(1)


def _check(task: dict[str, Any]) -> dict[str, Any]:
    from .checking import Wanted, check_here
    from .telling import tell

    names = None if task["names"] is None else tuple(task["names"])
    wanted = Wanted(names=names, decode=task["decode"], finite=task["finite"], folder=task["folder"])
    return tell(check_here([task["path"]], wanted, task["threads"], lambda n_bytes: None))
