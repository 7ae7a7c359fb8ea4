"""Memory that this machine has left for pages of files, also in the control group of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["free_memory"]

_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
_V2 = "memory.max", "memory.current", ("active_file", "inactive_file")
"""Files of a control group, by version: its limit, what it uses, and what of that are pages of files."""


def free_memory(root: str | os.PathLike[str] = "/") -> int | None:
    """Return the bytes of memory that pages of files may take, those that they take now included.

    Args:
        root: root of the system's files, for tests.

    Returns:
        None if the system does not say.
    """
    found = [*_of_machine(Path(root)), *_of_groups(Path(root))]
    return max(0, min(found)) if found else None


def _of_machine(root: Path) -> Iterator[int]:
    with suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        yield 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def _of_groups(root: Path) -> Iterator[int]:
    """Yield what the limits leave of the control groups of this process, of version 1 and 2, and those above them."""
    groups = [("sys/fs/cgroup", _V2), ("sys/fs/cgroup/memory", _V1)]  # as seen inside a container
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            if number == "0" or "memory" in kinds.split(","):
                place, files = groups[number != "0"]
                groups += [(f"{place}/{above}".rstrip("/."), files) for above in _up(path.strip("/"))]
    for place, (limit, usage, of_files) in dict.fromkeys(groups):
        with suppress(OSError, ValueError):  # "max" is no limit
            most, used = (int((root / place / name).read_text()) for name in (limit, usage))
            stat = dict(line.split() for line in (root / place / "memory.stat").read_text().splitlines())
            yield most - used + sum(int(stat.get(name, 0)) for name in of_files)


def _up(path: str) -> list[str]:
    return [path, *map(str, Path(path).parents)] if path else []
