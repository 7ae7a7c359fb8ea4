"""Load shards: divide them between the processes of a machine, check that they fit into memory, and read them.

All ranks of a job load together, in steps that fail on all ranks if they fail on one. Ranks of a machine that need the
same rows, or decode the same chunks, share one block of memory, and each fills a part of it. Once
rows are loaded, a sample of a few thousand targets shows whether the shards that ranks keep have different targets.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, Protocol

import torch

from ..cores import local_ranks
from ..distributed import are_near, exchange, this_process
from ..errors import H5ValueError
from ..memory import AvailableMemory, available_memory
from ..readers import BulkTask, run_with_progress
from ..sizes import bytes_text
from .held_rows import HeldRows

__all__ = ["Comparison", "HoldsShard", "NodeGroup", "load_shards", "my_part"]


HEARTBEAT = 2.0  # seconds between signs of life for waiting ranks
HEADROOM = 256 << 20  # bytes that loading needs in addition to the shard


class Comparison(NamedTuple):
    """A comparison between the ranks after loading.

    Attributes:
        name: the step, for messages.
        answer: returns this rank's answer, for JSON.
        compare: receives the answers of all ranks.
    """

    name: str
    answer: Callable[[], Any]
    compare: Callable[[Sequence[Any]], None]


class HoldsShard(Protocol):
    """A dataset that loads its shard together with other ranks.

    Attributes:
        pins_memory: lock the pages of memory that no other rank shares.
    """

    pins_memory: bool

    @property
    def rank(self) -> int:
        """This replica."""
        ...

    @property
    def shares(self) -> bool:
        """Whether processes of a machine hold their rows together."""
        ...

    def terms(self) -> Mapping[str, Any]:
        """Return the values that must be equal on all ranks that load together."""
        ...

    def n_host_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's rows in this machine's memory."""
        ...

    def memory(self, ranks: Sequence[int], *, shared: bool, owner: tuple[int, int] | None = None) -> HeldRows:
        """Return memory for the rows of some ranks: new, or mapped from another process, the owner."""
        ...

    def load_tasks(self, held: HeldRows) -> tuple[list[BulkTask], list[BulkTask]]:
        """Return the tasks that fill memory: for all processes that share it, and for this one alone."""
        ...

    def note_damage(self, answers: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Note rows that could not be read, as the processes that filled the memory returned them."""
        ...

    def check_unchanged(self) -> None:
        """Raise ``H5DataChangedError`` if a file has changed."""
        ...

    def use(self, held: HeldRows, *, has_all: bool) -> None:
        """Serve rows from filled memory; ``has_all`` is whether it has the rows of all ranks."""
        ...

    def log_loaded(self, name: str, seconds: float) -> None:
        """Log that the shard was loaded."""
        ...

    def comparisons(self) -> Iterable[Comparison]:
        """Return the comparisons between the ranks after loading."""
        ...

    def close(self) -> None:
        """Release the memory."""
        ...


@dataclass(frozen=True)
class NodeGroup:
    """The processes of a machine that fill one memory together; each fills a part of it.

    Attributes:
        ranks: ranks of their replicas, without repeats.
        place: number of this process in the group, from 0.
        size: number of processes in the group.
        is_everyone: whether the group has all processes of the job.
    """

    ranks: tuple[int, ...]
    place: int = 0
    size: int = 1
    is_everyone: bool = False


def load_shards(
    holders: Mapping[str, HoldsShard],
    *,
    is_alone: bool,
    patience: float = 120.0,
    shows_bar: bool = True,
    spare: Sequence[HoldsShard] = (),
) -> None:
    """Load the shards of datasets, on all ranks at once.

    Args:
        holders: datasets to load, by name; the same names on all ranks. They must not be in memory yet.
        is_alone: load without the other ranks, if any.
        patience: seconds to wait for a rank that makes no progress.
        shows_bar: show a progress bar, on the first rank.
        spare: datasets that release their rows if there is not enough memory otherwise.

    Raises:
        H5Error: memory is too small, or rows cannot be read, on any rank; all memory is released then.
    """
    if not holders:
        return
    loading = _Loading(holders, is_alone, patience)
    try:
        loading.meet()
        loading.check_memory(spare)
        if not loading.share_memory():  # a machine forbids access to another process's descriptors
            loading.check_memory(spare)
        for name, holder in holders.items():
            loading.do("loading shards", partial(loading.load, name, shows_bar))
            holder.note_damage(loading.answers_of_group(name))
            # Separate steps: before them, rows loaded by other processes may be missing.
            for comparison in holder.comparisons():
                loading.do(comparison.name, comparison.answer)
                comparison.compare(loading.answers)
    except BaseException:
        loading.give_up()
        raise


class _Loading:
    """Loading on all ranks, in common steps.

    Args:
        holders: see ``load_shards``.
        is_alone: see ``load_shards``.
        patience: see ``load_shards``.

    Attributes:
        answers: the answers of all ranks in the last step.
        near: the answers of this machine's ranks.
        place: number of this rank among the ranks of its machine.
    """

    answers: Sequence[Any] = ()
    near: Sequence[Any] = ()
    place = 0

    def __init__(self, holders: Mapping[str, HoldsShard], is_alone: bool, patience: float) -> None:
        self._holders, self._is_alone, self._patience, self._me = holders, is_alone, patience, this_process()
        self._groups: dict[str, NodeGroup] = {}
        self._filling: dict[str, HeldRows] = {}

    def meet(self) -> None:
        """Determine the group of this machine's processes that load each dataset together."""
        holders = self._holders
        facts = {"shards": list(holders)} | {f"shard {name!r}": holder.terms() for name, holder in holders.items()}
        self.do("meeting the ranks", lambda: {name: holder.rank for name, holder in holders.items()}, facts)
        self._ranks = {name: [int(ranks[name]) for ranks in self.near] for name in holders}  # on this machine
        n_near = len(self.near)
        for name, holder in holders.items():
            group = NodeGroup((holder.rank,))
            if holder.shares and n_near > 1 and hasattr(os, "memfd_create"):
                ranks = tuple(sorted(set(self._ranks[name])))
                group = NodeGroup(ranks, self.place, n_near, is_everyone=n_near == len(self.answers))
            self._groups[name] = group

    def give_up(self) -> None:
        """Release all memory."""
        for held in self._filling.values():
            held.close()
        for holder in self._holders.values():
            holder.close()

    def do(self, name: str, step: Callable[[], Any], facts: Mapping[str, Any] | None = None) -> None:
        """Run a step, which fails on all ranks if it fails on one.

        Args:
            name: the step, for messages.
            step: returns an answer for all ranks.
            facts: values that must be equal on all ranks.
        """
        failure, answer = None, None
        with exchange(name, self._patience, self._is_alone) as ranks:
            try:
                self._exchange = ranks
                answer = step()
            except Exception as error:
                failure = error
            messages = ranks.agree(facts or {}, failure, {"process": self._me, "answer": answer})
        is_near = [
            rank == ranks.rank or are_near(message["process"], self._me) for rank, message in enumerate(messages)
        ]
        self.answers = [message["answer"] for message in messages]
        self.near = list(compress(self.answers, is_near))
        self.place = sum(is_near[: ranks.rank])

    def check_memory(self, spare: Sequence[HoldsShard]) -> None:
        """Check that this machine has memory for all shards of its ranks; release other datasets if necessary.

        Raises:
            H5ValueError: a machine does not have enough memory.
        """
        needed = 0
        for name, holder in self._holders.items():
            group = self._groups[name]
            for ranks in [group.ranks] if group.size > 1 else [[rank] for rank in self._ranks[name]]:
                needed += sum(holder.n_host_bytes(rank) for rank in ranks)
        n_processes = len(self.near)
        if self._is_alone:  # other ranks of this machine load independently
            n_processes = local_ranks()
            needed *= n_processes

        def give_back() -> None:
            for holder in spare if any(self.near) else ():
                holder.close()
            gc.collect()  # dropped datasets with reference cycles

        self.do("checking memory", lambda: _lacks(available_memory(), needed))
        if any(self.answers):
            self.do("giving back memory", give_back)
            self.do("checking memory", lambda: _check_memory(needed, n_processes, list(self._holders)))

    def share_memory(self) -> bool:
        """Create memory in the first process of each group, and open it in the others.

        Returns:
            Whether all machines allow this. Otherwise each process holds its own rows.
        """
        if len(self.answers) == 1 or not any(holder.shares for holder in self._holders.values()):
            return True  # same result on all ranks
        shared = [name for name, group in self._groups.items() if group.size > 1]

        def make() -> dict[str, Any]:
            if self.place:
                return {}
            return {name: [os.getpid(), self._hold(name).descriptor] for name in shared}

        def open_it() -> bool:
            try:
                for name, (pid, descriptor) in owners.items() if self.place else ():
                    self._hold(name, (pid, descriptor))
            except Exception:
                return False
            return True

        self.do("sharing memory", make)
        owners: Mapping[str, Any] = self.near[0]
        self.do("opening shared memory", open_it)
        if not all(self.near):
            self.give_up()
            self._filling.clear()
            for name in shared:
                self._groups[name] = NodeGroup((self._holders[name].rank,))
        return all(self.answers)

    def _hold(self, name: str, owner: tuple[int, int] | None = None) -> HeldRows:
        """Create memory for the rows of a dataset's group, or open the memory of another process."""
        group = self._groups[name]
        self._filling[name] = self._holders[name].memory(group.ranks, shared=group.size > 1, owner=owner)
        return self._filling[name]

    def answers_of_group(self, name: str) -> Sequence[Any]:
        """Return the answers of the processes that filled the memory of a dataset together, in the last step."""
        return self.near if self._groups[name].size > 1 else [self.near[self.place]]

    def load(self, name: str, shows_bar: bool) -> list[Any]:
        """Load this process's part of a dataset, and report progress to the ranks that wait.

        Returns:
            Rows that could not be read, if they are skipped.
        """
        holder, group, ranks = self._holders[name], self._groups[name], self._exchange
        held = self._filling.get(name) or self._hold(name)
        began = last = time.monotonic()

        def report(n_bytes: int) -> None:
            nonlocal last
            if n_bytes and time.monotonic() > last + HEARTBEAT:
                last = time.monotonic()
                ranks.progress()

        shows_bar = shows_bar and ranks.rank == 0
        try:
            shared, own = holder.load_tasks(held)
            tasks = [*my_part(shared, group), *own]
            run_with_progress(tasks, f"loading {name}".rstrip(), delay=0.5, shows_bar=shows_bar, report=report)
        except OSError:  # if a file has changed, that is the error to raise
            holder.check_unchanged()
            raise
        holder.use(self._filling.pop(name), has_all=group.is_everyone)
        # Each rank would lock the pages of all ranks, although batches are copied into page-locked memory anyway.
        if holder.pins_memory and len(group.ranks) == 1 and torch.cuda.is_available() and (why := held.pin()):
            warnings.warn(f"the shard's pages are not locked: {why}. Copies to the GPU still work.", stacklevel=2)
        holder.log_loaded(name, time.monotonic() - began)
        return list(held.damage.known)


def my_part(tasks: Sequence[BulkTask], group: NodeGroup) -> Iterator[BulkTask]:
    """Yield this process's part of a group's tasks; the parts have about the same number of bytes."""
    total, before = sum(task.n_decoded for task in tasks), 0
    for task in tasks:
        if (2 * before + task.n_decoded) * group.size // max(1, 2 * total) == group.place:
            yield task
        before += task.n_decoded


def _lacks(memory: AvailableMemory | None, needed: int) -> bool:
    return memory is not None and needed + HEADROOM > memory.n_bytes


def _check_memory(needed: int, n_processes: int, names: Sequence[str]) -> None:
    memory = available_memory()
    if memory is None or not _lacks(memory, needed):
        return
    shards = f"the shards of {', '.join(map(repr, names))}" if names != [""] else "the shards"
    ranks = f"{n_processes} ranks of this machine" if n_processes > 1 else "this rank"
    raise H5ValueError(
        f"{shards} take {_memory_size(needed)} on {ranks}, and {_memory_size(HEADROOM)} while they are loaded; "
        f"{_memory_size(memory.n_bytes)} are left ({memory.limit}). "
        f"{_memory_size(max(0, memory.n_bytes - HEADROOM))} would fit: use a smaller dtype (uint8 as stored is a "
        "quarter of float32, and the GPU can cast it), fewer fields, more machines, or share_memory=True if ranks of a "
        "machine hold the same rows. Or read on demand, with LazyH5DataModule or H5LazyDataset."
    )


def _memory_size(n_bytes: int) -> str:
    return bytes_text(n_bytes, least="MiB", most="GiB", digits=2 if n_bytes >= 2**30 else 1)
