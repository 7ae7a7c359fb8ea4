"""Loading shards: which process of a machine loads what, whether there is memory for it, and the loading itself.

All ranks of a job load together, in steps that fail on all ranks if they fail on one. Ranks of a machine that need the
same rows, or decode the same chunks, hold them in one memory, of which each fills a part.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cores import local_ranks
from ..distributed import Exchange, are_near, exchange, this_process
from ..errors import H5ValueError
from ..readers import BulkTask, run_with_progress
from ..sizes import bytes_text

if TYPE_CHECKING:
    from .rank_cached import RankMemCachedH5Dataset

__all__ = ["AvailableMemory", "NodeGroup", "load_shards", "my_part", "room"]

HEARTBEAT = 2.0  # seconds between words to the ranks that wait
HEADROOM = 256 << 20  # what loading takes beside the shard itself


@dataclass(frozen=True)
class NodeGroup:
    """The processes that fill one memory together; each fills a part of it.

    Attributes:
        ranks: their replicas' ranks, without repeats.
        place: this process among them, from 0.
        size: how many they are.
        is_everyone: whether all processes of the job are among them.
    """

    ranks: tuple[int, ...]
    place: int = 0
    size: int = 1
    is_everyone: bool = False


def load_shards(
    holders: Mapping[str, RankMemCachedH5Dataset],
    *,
    is_alone: bool,
    patience: float = 120.0,
    shows_bar: bool = True,
    spare: Sequence[RankMemCachedH5Dataset] = (),
) -> None:
    """Loads the shards of datasets, on all ranks at a time.

    Args:
        holders: what to load, by name; the same names on all ranks. Nothing of theirs is held yet.
        is_alone: do it without the other ranks, if any.
        patience: seconds to wait for a rank that makes no progress.
        shows_bar: show a progress bar, on the first rank.
        spare: who gives up what it holds where there is no room otherwise.

    Raises:
        H5Error: there is no room, or rows cannot be read, on any rank; nothing is held then.
    """
    if not holders:
        return
    job = _Job(is_alone, patience)
    try:
        groups_of, near = _meet(job, holders)
        _make_sure_of_room(job, holders, groups_of, near, spare)
        if not _share_memory(job, holders, groups_of):  # some machine lets no process look at another's descriptors
            if not all(job.near):
                groups_of = {name: NodeGroup((holder.rank,)) for name, holder in holders.items()}
            _make_sure_of_room(job, holders, groups_of, near, spare)
        for name, holder in holders.items():
            job.do("loading shards", partial(_load_one, name, holder, groups_of[name], shows_bar))
            # A step of its own: before it, parts of the rows that other processes load may be missing.
            job.do("comparing targets", partial(_sample, holder))
            holder.compare(job.told)
    except BaseException:
        for holder in holders.values():
            holder.close()
        raise


class _Job:
    """The ranks that load, in steps that all of them take.

    Args:
        is_alone: this rank loads by itself.
        patience: see ``load_shards``.
    """

    def __init__(self, is_alone: bool, patience: float) -> None:
        self.is_alone, self._patience, self._me = is_alone, patience, this_process()

    def do(self, what: str, step: Callable[[Exchange], Any], facts: Mapping[str, Any] | None = None) -> None:
        """Takes a step, which fails on all ranks where it fails on one.

        Args:
            what: the step, for messages.
            step: gives what the others should hear.
            facts: what must be equal on all ranks.
        """
        failure, mine = None, None
        with exchange(what, self._patience, self.is_alone) as ranks:
            try:
                mine = step(ranks)
            except Exception as error:
                failure = error
            told = ranks.agree(facts or {}, failure, {"process": self._me, "told": mine})
        is_near = [rank == ranks.rank or are_near(one["process"], self._me) for rank, one in enumerate(told)]
        self.told = [one["told"] for one in told]
        self.near = [one for one, near in zip(self.told, is_near, strict=True) if near]
        self.place = sum(is_near[: ranks.rank])

    # What all ranks told in the last step; those of this machine; and this rank's place among these.
    told: Sequence[Any] = ()
    near: Sequence[Any] = ()
    place = 0


def _meet(
    job: _Job, holders: Mapping[str, RankMemCachedH5Dataset]
) -> tuple[dict[str, NodeGroup], dict[str, list[int]]]:
    """Finds out who is on this machine: who loads with whom, and the ranks of all processes, by name."""
    facts = {"shards": list(holders)} | {f"shard {name!r}": holder.terms() for name, holder in holders.items()}
    job.do("meeting the ranks", lambda _: {name: holder.rank for name, holder in holders.items()}, facts)
    is_everyone = len(job.near) == len(job.told)
    near = {name: [int(one[name]) for one in job.near] for name in holders}
    groups_of = {
        name: NodeGroup(tuple(sorted(set(near[name]))), job.place, len(job.near), is_everyone)
        if holder.shares and len(job.near) > 1 and hasattr(os, "memfd_create")
        else NodeGroup((holder.rank,))
        for name, holder in holders.items()
    }
    return groups_of, near


def _make_sure_of_room(
    job: _Job,
    holders: Mapping[str, RankMemCachedH5Dataset],
    groups_of: Mapping[str, NodeGroup],
    near: Mapping[str, Sequence[int]],
    spare: Sequence[RankMemCachedH5Dataset],
) -> None:
    needed = 0
    for name, holder in holders.items():
        together = [groups_of[name].ranks] if groups_of[name].size > 1 else [[rank] for rank in near[name]]
        needed += sum(map(holder.bytes_needed, together))
    n_processes = len(job.near)
    if job.is_alone:  # others of this machine load theirs, and nobody asks them
        n_processes = local_ranks()
        needed *= n_processes
    job.do("looking for memory", lambda _: not _is_enough(room(), needed))
    if any(job.told):
        job.do("giving back memory", partial(_give_back, spare if any(job.near) else ()))
    job.do("looking for memory", lambda _: _check_room(needed, n_processes, list(holders)))


def _give_back(spare: Sequence[RankMemCachedH5Dataset], _: Exchange) -> None:
    for holder in spare:
        holder.close()
    gc.collect()  # what was forgotten and hangs together in a circle


def _is_enough(found: AvailableMemory | None, needed: int) -> bool:
    return found is None or needed + HEADROOM <= found.n_bytes


def _check_room(needed: int, n_processes: int, names: Sequence[str]) -> None:
    found = room()
    if found is None or _is_enough(found, needed):
        return
    what = f"the shards of {', '.join(map(repr, names))}" if names != [""] else "the shards"
    who = f"{n_processes} ranks of this machine" if n_processes > 1 else "this rank"
    raise H5ValueError(
        f"{what} take {_size(needed)} on {who}, and {_size(HEADROOM)} while they are loaded; {_size(found.n_bytes)} "
        f"are left ({found.limit}). {_size(max(0, found.n_bytes - HEADROOM))} would fit: take a smaller dtype (uint8 "
        "as stored is a quarter of float32, and the GPU can cast it), fewer fields, more machines, share_memory=True "
        "where ranks of a machine hold the same rows. Or read on demand, with LazyH5DataModule or H5LazyDataset."
    )


def _share_memory(job: _Job, holders: Mapping[str, RankMemCachedH5Dataset], groups_of: Mapping[str, NodeGroup]) -> bool:
    """The first of each crew makes the memory, the others open it; whether they could, on all machines."""
    shared = [name for name, group in groups_of.items() if group.size > 1]
    is_first = job.place == 0
    if len(job.told) == 1 or not any(holder.shares for holder in holders.values()):  # the same on all ranks
        return True

    def make(_: Exchange) -> dict[str, Any]:
        return {name: [os.getpid(), holders[name].make_room(groups_of[name])] for name in shared if is_first}

    def open_it(handles: Mapping[str, Any], _: Exchange) -> bool:
        with suppress(Exception):
            for name, (pid, fd) in () if is_first else handles.items():
                holders[name].make_room(groups_of[name], os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
            return True
        return False

    def close(_: Exchange) -> bool:
        for name in shared if not is_shared else ():
            holders[name].close()
        return is_shared

    job.do("sharing memory", make)
    job.do("opening shared memory", partial(open_it, job.near[0]))
    is_shared = all(job.near)
    if all(job.told):
        return True
    job.do("giving back shared memory", close)
    return False


def _load_one(name: str, holder: RankMemCachedH5Dataset, group: NodeGroup, shows_bar: bool, ranks: Exchange) -> None:
    if group.size == 1:
        holder.make_room(group)
    tasks = holder.tasks(group)
    said = time.monotonic()

    def tell(n_bytes: int) -> None:
        nonlocal said
        if n_bytes and time.monotonic() > said + HEARTBEAT:
            said = time.monotonic()
            ranks.progress()

    shows_bar = shows_bar and ranks.rank == 0
    run_with_progress(tasks, f"loading {name}".rstrip(), delay=0.5, shows_bar=shows_bar, report=tell)
    holder.finish_loading(name)


def _sample(holder: RankMemCachedH5Dataset, _: Exchange) -> Any:
    return holder.sample()


def my_part(tasks: Sequence[BulkTask], group: NodeGroup) -> Iterator[BulkTask]:
    """This process's part of a crew's tasks, of about as many bytes as the others'."""
    total, before = sum(task.n_decoded for task in tasks), 0
    for task in tasks:
        if (2 * before + task.n_decoded) * group.size // max(1, 2 * total) == group.place:
            yield task
        before += task.n_decoded


def _size(n_bytes: int) -> str:
    return bytes_text(n_bytes, least="MiB", most="GiB", digits=2 if n_bytes >= 2**30 else 1)


class AvailableMemory(NamedTuple):
    """How much memory may still be taken.

    Attributes:
        n_bytes: that many.
        limit: what sets the limit, in words.
    """

    n_bytes: int
    limit: str


def room(root: Path = Path("/")) -> AvailableMemory | None:
    """The memory that this process and its neighbours may still take: the least that anything grants.

    What the system would give up by itself (the page cache) counts as free. None where the system does not say (it is
    not Linux).

    Args:
        root: where the system's files are; for tests.
    """
    return min(_limits(root), default=None)


def _limits(root: Path) -> Iterator[AvailableMemory]:
    machine = _numbers(root / "proc/meminfo")
    if "MemAvailable" in machine:
        yield AvailableMemory(machine["MemAvailable"] << 10, "the machine's memory")
    with suppress(OSError, KeyError):
        if (root / "proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            left = machine["CommitLimit"] - machine["Committed_AS"]
            yield AvailableMemory(max(0, left) << 10, "vm.overcommit_memory=2")
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not path:
            continue
        if not controllers:
            yield from _of_group(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _of_group(root / "sys/fs/cgroup/memory", path, *names)


def _of_group(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[AvailableMemory]:
    """Limits of a control group and of those above it."""
    here = mount / path.lstrip("/")
    # In a container the path may be the host's, and the group is what is mounted.
    for group in [here, *here.parents] if here.is_dir() else [mount]:
        with suppress(OSError, ValueError):
            most = int((group / limit).read_text())
            used = int((group / usage).read_text())
            free = _numbers(group / "memory.stat").get(reclaimable, 0)
            yield AvailableMemory(max(0, most - used + free), f"the control group's {limit}")
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
