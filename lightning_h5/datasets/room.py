"""Memory that is left on this machine, before any of it is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Room", "room"]


class Room(NamedTuple):
    """How much memory may still be taken.

    Attributes:
        n_bytes: that many.
        limit: what sets the limit, in words.
    """

    n_bytes: int
    limit: str


def room(root: Path = Path("/")) -> Room | None:
    """The memory that this process and its neighbours may still take: the least that anything grants.

    What the system would give up by itself (the page cache) counts as free. None where the system does not say (it is
    not Linux).

    Args:
        root: where the system's files are; for tests.
    """
    return min(_limits(root), default=None)


def _limits(root: Path) -> Iterator[Room]:
    machine = _numbers(root / "proc/meminfo")
    if "MemAvailable" in machine:
        yield Room(machine["MemAvailable"] << 10, "the machine's memory")
    with suppress(OSError, KeyError):
        if (root / "proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            left = machine["CommitLimit"] - machine["Committed_AS"]
            yield Room(max(0, left) << 10, "vm.overcommit_memory=2")
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not path:
            continue
        if not controllers:
            yield from _of_group(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _of_group(root / "sys/fs/cgroup/memory", path, *names)


def _of_group(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[Room]:
    """Limits of a control group and of those above it."""
    here = mount / path.lstrip("/")
    # In a container the path may be the host's, and the group is what is mounted.
    for group in [here, *here.parents] if here.is_dir() else [mount]:
        with suppress(OSError, ValueError):
            most = int((group / limit).read_text())
            used = int((group / usage).read_text())
            free = _numbers(group / "memory.stat").get(reclaimable, 0)
            yield Room(max(0, most - used + free), f"the control group's {limit}")
        if group == mount:
            return


def _numbers(path: Path) -> Mapping[str, int]:
    """A file of names and numbers, as the kernel writes them."""
    words = (line.replace(":", " ").split() for line in _lines(path))
    return {some[0]: int(some[1]) for some in words if len(some) > 1 and some[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
