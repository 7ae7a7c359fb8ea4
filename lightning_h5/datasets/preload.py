"""Loading shards: who of a machine loads what, whether there is room, and the loading itself."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ..cores import local_ranks
from ..errors import H5ValueError
from ..ranks import Exchange, are_near, exchange, this_process
from ..readers import BulkTask
from ..sizes import bytes_text
from .doing import do_with_bar
from .room import Room, room

__all__ = ["Crew", "ShardHolder", "load_shards", "my_part"]

HEARTBEAT = 2.0  # seconds between words to the ranks that wait
HEADROOM = 256 << 20  # what loading takes beside the shard itself


@dataclass(frozen=True)
class Crew:
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


class ShardHolder(Protocol):
    """Who holds a shard: a dataset. What is asked of it when its shard is loaded."""

    @property
    def rank(self) -> int:
        """Its replica."""
        ...

    @property
    def shares(self) -> bool:
        """Whether processes of a machine hold their rows together."""
        ...

    def terms(self) -> Mapping[str, Any]:
        """What must be equal on all processes that hold rows together."""
        ...

    def bytes_needed(self, ranks: Sequence[int]) -> int:
        """Bytes of this machine's memory that the rows of these ranks take, held together."""
        ...

    def make_room(self, crew: Crew, descriptor: int | None = None) -> int | None:
        """Takes memory for a crew's rows, or that behind a descriptor; gives its descriptor, where it is shared."""
        ...

    def tasks(self, crew: Crew) -> list[BulkTask]:
        """What this process has to load of it."""
        ...

    def finish_loading(self, name: str) -> None:
        """This process's part is loaded; ``name`` is what the rows are called in messages."""
        ...

    def close(self) -> None:
        """Gives all memory back."""
        ...


def load_shards(
    holders: Mapping[str, ShardHolder],
    *,
    is_alone: bool,
    patience: float = 120.0,
    shows_bar: bool = True,
    spare: Sequence[ShardHolder] = (),
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
        crews, near = _meet(job, holders)
        _make_sure_of_room(job, holders, crews, near, spare)
        if not _share_memory(job, holders, crews):  # some machine lets no process look at another's descriptors
            if not all(job.near):
                crews = {name: Crew((holder.rank,)) for name, holder in holders.items()}
            _make_sure_of_room(job, holders, crews, near, spare)
        for name, holder in holders.items():
            job.do("loading shards", partial(_load_one, name, holder, crews[name], shows_bar))
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


def _meet(job: _Job, holders: Mapping[str, ShardHolder]) -> tuple[dict[str, Crew], dict[str, list[int]]]:
    """Finds out who is on this machine: who loads with whom, and the ranks of all processes, by name."""
    facts = {"shards": list(holders)} | {f"shard {name!r}": holder.terms() for name, holder in holders.items()}
    job.do("meeting the ranks", lambda _: {name: holder.rank for name, holder in holders.items()}, facts)
    is_everyone = len(job.near) == len(job.told)
    near = {name: [int(one[name]) for one in job.near] for name in holders}
    crews = {
        name: Crew(tuple(sorted(set(near[name]))), job.place, len(job.near), is_everyone)
        if holder.shares and len(job.near) > 1 and _can_share()
        else Crew((holder.rank,))
        for name, holder in holders.items()
    }
    return crews, near


def _make_sure_of_room(
    job: _Job,
    holders: Mapping[str, ShardHolder],
    crews: Mapping[str, Crew],
    near: Mapping[str, Sequence[int]],
    spare: Sequence[ShardHolder],
) -> None:
    needed = 0
    for name, holder in holders.items():
        together = [crews[name].ranks] if crews[name].size > 1 else [[rank] for rank in near[name]]
        needed += sum(map(holder.bytes_needed, together))
    n_processes = len(job.near)
    if job.is_alone:  # others of this machine load theirs, and nobody asks them
        n_processes = local_ranks()
        needed *= n_processes
    job.do("looking for memory", lambda _: not _is_enough(room(), needed))
    if any(job.told):
        job.do("giving back memory", partial(_give_back, spare if any(job.near) else ()))
    job.do("looking for memory", lambda _: _check_room(needed, n_processes, list(holders)))


def _give_back(spare: Sequence[ShardHolder], _: Exchange) -> None:
    for holder in spare:
        holder.close()
    gc.collect()  # what was forgotten and hangs together in a circle


def _is_enough(found: Room | None, needed: int) -> bool:
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


def _share_memory(job: _Job, holders: Mapping[str, ShardHolder], crews: Mapping[str, Crew]) -> bool:
    """The first of each crew makes the memory, the others open it; whether they could, on all machines."""
    shared = [name for name, crew in crews.items() if crew.size > 1]
    is_first = job.place == 0
    if len(job.told) == 1 or not any(holder.shares for holder in holders.values()):  # the same on all ranks
        return True

    def make(_: Exchange) -> dict[str, Any]:
        return {name: [os.getpid(), holders[name].make_room(crews[name])] for name in shared if is_first}

    def open_it(handles: Mapping[str, Any], _: Exchange) -> bool:
        with suppress(Exception):
            for name, (pid, fd) in () if is_first else handles.items():
                holders[name].make_room(crews[name], os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
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


def _load_one(name: str, holder: ShardHolder, crew: Crew, shows_bar: bool, ranks: Exchange) -> None:
    if crew.size == 1:
        holder.make_room(crew)
    tasks = holder.tasks(crew)
    said = time.monotonic()

    def tell(n_bytes: int) -> None:
        nonlocal said
        if n_bytes and time.monotonic() > said + HEARTBEAT:
            said = time.monotonic()
            ranks.progress()

    shows_bar = shows_bar and ranks.rank == 0
    do_with_bar(tasks, f"loading {name}".rstrip(), delay=0.5, shows_bar=shows_bar, tell=tell)
    holder.finish_loading(name)


def _can_share() -> bool:
    return hasattr(os, "memfd_create")


def my_part(tasks: Sequence[BulkTask], crew: Crew) -> Iterator[BulkTask]:
    """This process's part of a crew's tasks, of about as many bytes as the others'."""
    total, before = sum(task.n_decoded for task in tasks), 0
    for task in tasks:
        if (2 * before + task.n_decoded) * crew.size // max(1, 2 * total) == crew.place:
            yield task
        before += task.n_decoded


def _size(n_bytes: int) -> str:
    return bytes_text(n_bytes, least="MiB", most="GiB", digits=2 if n_bytes >= 2**30 else 1)
