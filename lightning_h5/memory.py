"""How much memory is left, on this machine and in the control groups of this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["FREE_SHARE", "AvailableMemory", "available_memory", "page_cache_memory"]

FREE_SHARE = 0.8
"""Of the memory for pages of files that rows may fill: batches, blocks that are mixed, and other programs take some."""


class AvailableMemory(NamedTuple):
    """How much memory may still be taken.

    Attributes:
        n_bytes: bytes that may still be taken.
        limit: the origin of the limit, as text.
    """

    n_bytes: int
    limit: str


def available_memory(root: Path = Path("/")) -> AvailableMemory | None:
    """Return the memory that this process and its neighbors may still take: the smallest of all limits.

    The page cache counts as free. None if the limits are unknown: the system is not Linux.

    Args:
        root: the folder of the system's files; for tests.
    """
    return min((*_of_machine(root), *_left_by_control_groups(root, ["inactive_file"])), default=None)


def page_cache_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that pages of files may take, those that they take now included; None if that is unknown.

    Args:
        root: the folder of the system's files; for tests.
    """
    limits = [*_left_by_control_groups(root, ["inactive_file", "active_file"])]
    machine = _numbers_of_file(root / "proc/meminfo")
    if "MemAvailable" in machine:
        limits.append(AvailableMemory(machine["MemAvailable"] << 10, ""))
    return min(limits).n_bytes if limits else None


def _of_machine(root: Path) -> Iterator[AvailableMemory]:
    machine = _numbers_of_file(root / "proc/meminfo")
    if "MemAvailable" in machine:
        yield AvailableMemory(machine["MemAvailable"] << 10, "the machine's memory")
    with suppress(OSError, KeyError):
        if (root / "proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            n_left = machine["CommitLimit"] - machine["Committed_AS"]
            yield AvailableMemory(max(0, n_left) << 10, "vm.overcommit_memory=2")


def _left_by_control_groups(root: Path, pages: Sequence[str]) -> Iterator[AvailableMemory]:
    """Yield the memory that control groups leave, counting some of their pages of files, by the kernel's names."""
    for line in _lines_of_file(root / "proc/self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not path:
            continue
        if not controllers:
            yield from _of_group(root / "sys/fs/cgroup", path, "memory.max", "memory.current", pages)
        elif "memory" in controllers.split(","):
            names, pages_v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), [f"total_{name}" for name in pages]
            yield from _of_group(root / "sys/fs/cgroup/memory", path, *names, pages_v1)


def _of_group(mount: Path, path: str, limit: str, usage: str, reclaimable: Sequence[str]) -> Iterator[AvailableMemory]:
    """Yield the limits of a control group and of those above it."""
    folder = mount / path.lstrip("/")
    # In a container the path may be that of the host, while the group itself is mounted.
    for group in [folder, *folder.parents] if folder.is_dir() else [mount]:
        with suppress(OSError, ValueError):
            maximum = int((group / limit).read_text())
            n_used = int((group / usage).read_text())
            stat = _numbers_of_file(group / "memory.stat")
            n_free = sum(stat.get(name, 0) for name in reclaimable)
            yield AvailableMemory(max(0, maximum - n_used + n_free), f"the control group's {limit}")
        if group == mount:
            return


def _numbers_of_file(path: Path) -> Mapping[str, int]:
    """Return the names and numbers of a file, as the kernel writes them."""
    words = (line.replace(":", " ").split() for line in _lines_of_file(path))
    return {fields[0]: int(fields[1]) for fields in words if len(fields) > 1 and fields[1].isdigit()}


def _lines_of_file(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
