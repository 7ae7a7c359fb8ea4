"""Agreement between ranks outside of training: all see the same data, or all stop; values that a node computes once.

Ranks talk through the key-value store by which they found each other. Knows torch's processes, not Lightning.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed

from . import errors
from .errors import H5Error, H5ValueError

__all__ = ["Exchange", "OncePerNode", "are_near", "exchange", "first_value", "own_store", "this_process"]

GRACE = 5.0  # seconds for other ranks to read the error before this process ends, and perhaps the store with it
POLL = 0.5  # seconds between checks of a rank that is late
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.02  # between polls of a waiting rank: most arrive within milliseconds
NODE_PATIENCE = 120.0  # seconds without progress, after which each process of a node computes the value itself
NODE_PROGRESS = 1.0  # seconds between reports of progress
_numbers: defaultdict[str, count[int]] = defaultdict(count)  # how often this process used each name


def _wait(is_done: Callable[[], bool], patience: float, progress: Callable[[], int] = lambda: 0) -> bool:
    """Wait until something is done; return whether it is.

    Args:
        is_done: asks for it.
        patience: seconds to wait; they begin again with each progress.
        progress: a number that grows.
    """
    end, seen, pause = time.monotonic() + patience, 0, FIRST_PAUSE
    while not (done := is_done()) and time.monotonic() < end:
        time.sleep(pause)
        pause = min(LONGEST_PAUSE, 1.1 * pause)  # longer each time, since all ranks ask the same store
        if (now := progress()) != seen:
            end, seen = time.monotonic() + patience, now
    return done


@contextmanager
def exchange(what: str, patience: float, is_alone: bool = False) -> Iterator[Exchange]:
    """Yield an exchange between all ranks: work inside, and end it with ``agree``.

    A rank that has not reached ``agree`` when the patience of the first rank there ends is late: all others raise, and
    it ends as well, so that no process is left behind. A thread of it watches for that. If it hangs in a place that
    lets no thread run (a library that waits for storage), the other ranks of its machine end it.

    Args:
        what: what the ranks do, for messages.
        patience: seconds to wait for the slowest rank.
        is_alone: this rank has its own data, although other processes exist.
    """
    store = None if is_alone else own_store()
    if store is None:
        yield Exchange(what, patience, None)
        return
    among_ranks = Exchange(what, patience, store)
    over = threading.Event()
    watch = threading.Thread(target=among_ranks.watch, args=(over,), name="lightning_h5-exchange", daemon=True)
    watch.start()
    try:
        yield among_ranks
    finally:
        over.set()
        watch.join()


class Exchange:
    """An exchange between ranks, or of one rank alone.

    Args:
        what: what the ranks do, for messages.
        patience: seconds to wait for the slowest rank.
        store: of the ranks; None if there is one alone.

    Attributes:
        rank: of this process, from 0.
    """

    def __init__(self, what: str, patience: float, store: Any) -> None:
        self._what, self._patience, self._store = what, patience, store
        self.rank = 0
        if store is None:
            return
        self._name = f"lightning_h5/{what}/{next(_numbers[what])}"
        self.rank, self._world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._keys = [f"{self._name}/{rank}" for rank in range(self._world_size)]
        self._is_here = False  # whether this rank has reached `agree`
        store.set(f"{self._keys[self.rank]}/process", json.dumps(this_process()))

    def progress(self) -> None:
        """Report that this rank makes progress: the time that others wait for it begins again."""
        if self._store is not None:
            with suppress(torch.distributed.DistError):  # reported when an answer is needed
                self._store.add(f"{self._name}/progress", 1)

    def agree(self, facts: Mapping[str, Any], failure: Exception | None, message: Any = None) -> list[Any]:
        """Share what this rank found, and raise on all ranks if one failed, differs, or does not arrive.

        Args:
            facts: what must be equal on all ranks; plain values.
            failure: what went wrong on this rank, if anything.
            message: JSON values for the other ranks; may differ between ranks.

        Returns:
            The messages, in the order of ranks.

        Raises:
            Exception: this rank's own failure, as it is, if there is one rank.
            H5Error: a rank failed, found something else or did not arrive; the same text on all, with rank and values.
        """
        if self._store is None:
            if failure is not None:
                raise failure
            return [message]
        self._is_here = True
        mine = {
            "error": None if failure is None else [type(failure).__name__, str(failure)],
            "facts": {name: repr(value) for name, value in facts.items()},
            "message": message,
        }
        every: list[Any] = []
        try:
            self._store.set(self._keys[self.rank], json.dumps(mine))
            late = self._wait_for_all()
            if late:
                kind, text = H5Error, self._late_text(late)
            else:
                every = [json.loads(self._store.get(key)) for key in self._keys]
                kind, text = self._verdict(every)
        except torch.distributed.DistError as error:
            raise H5Error(self._ended_text()) from (failure or error)
        self._leave(late)
        if text:
            raise kind(text) from failure
        return [one["message"] for one in every]

    def watch(self, over: threading.Event) -> None:
        """End this process if the others have ended without it; runs in a thread."""
        while not over.wait(POLL) and not self._is_here:
            try:
                decided = self._store.check([f"{self._name}/late"])
                late = json.loads(self._store.get(f"{self._name}/late")) if decided else []
                text = self._late_text(late) if self.rank in late else ""
                if text:
                    self._wait_for_others_to_leave(late)
            except torch.distributed.DistError:
                text = self._ended_text()
            if text and not self._is_here:
                sys.stderr.write(f"H5Error: {text}\n")
                sys.stderr.flush()
                os._exit(1)  # the main thread hangs, perhaps inside a library, and cannot raise

    def _wait_for_all(self) -> list[int]:
        """Wait until all ranks have arrived; return those that had not when the first rank's patience ended."""
        all_here = _wait(
            lambda: bool(self._store.check(self._keys)),
            self._patience,
            lambda: int(self._store.add(f"{self._name}/progress", 0)),
        )
        late = [] if all_here else [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
        # The first rank decides for all: a rank that is merely late must not continue alone.
        decided: list[int] = json.loads(self._store.compare_set(f"{self._name}/late", "", json.dumps(late)))
        return decided

    def _leave(self, late: Sequence[int]) -> None:
        """Wait a moment, so that all can read the messages: the store ends with the process that holds it."""
        with suppress(torch.distributed.DistError):  # that process was the first to leave
            self._store.add(f"{self._name}/left", 1)
        self._wait_for_others_to_leave(late)
        if late:
            time.sleep(2 * POLL)  # time for their watchdogs to notice
        for key in (f"{self._keys[rank]}/process" for rank in late):
            with suppress(torch.distributed.DistError):
                if self._store.check([key]):
                    end_process(json.loads(self._store.get(key)))

    def _wait_for_others_to_leave(self, late: Sequence[int]) -> None:
        here = self._world_size - len(late)
        with suppress(torch.distributed.DistError):
            _wait(lambda: bool(self._store.add(f"{self._name}/left", 0) >= here), GRACE)

    def _verdict(self, every: Sequence[Mapping[str, Any]]) -> tuple[type[H5Error], str]:
        """Return the error that all ranks raise; no text if there is none."""
        failed = {rank: one["error"] for rank, one in enumerate(every) if one["error"] is not None}
        if failed:
            lines = "".join(f"\n  rank {rank}: {kind}: {text}" for rank, (kind, text) in failed.items())
            kind = getattr(errors, next(iter(failed.values()))[0], H5ValueError)
            return kind, f"{self._what} failed on {len(failed)} of {len(every)} ranks:{lines}"
        facts = [one["facts"] for one in every]
        names = dict.fromkeys(name for one in facts for name in one)  # all ranks must compare the same ones
        differing = [name for name in names if len({one.get(name) for one in facts}) > 1]
        if not differing:
            return H5Error, ""
        lines = "".join(
            f"\n  {name}: " + ", ".join(f"rank {rank} has {one.get(name)}" for rank, one in enumerate(facts))
            for name in differing
        )
        return H5ValueError, (
            f"the ranks do not see the same data:{lines}\nGive all ranks the same files (complete copies, if each "
            "node has its own) and the same arguments. A seed that differs comes from seed_everything; pass seed= to "
            "the data module, or the same number there."
        )

    def _late_text(self, late: Sequence[int]) -> str:
        ranks = ", ".join(f"rank {rank}" for rank in late)
        return (
            f"{self._what} did not finish on {ranks} of {self._world_size} ranks within {self._patience:g} s "
            "(setup_timeout). Check what hangs there; if it is only slow, pass a larger setup_timeout. All ranks must "
            "call setup: call it neither in prepare_data nor under `if rank == 0`."
        )

    def _ended_text(self) -> str:
        return f"the other ranks ended while rank {self.rank} was {self._what}. Their output shows what went wrong."


_inherited: list[Any] = []


def own_store() -> Any:
    """Return the store of this process's group; None if there is one rank alone.

    A child that a rank forked has its parent's group and store. Both would talk through one connection, and each would
    get the other's answers: such a child is no rank.
    """
    store = _store()
    if store is None or any(store is one for one in _inherited) or torch.distributed.get_world_size() == 1:
        return None
    return store


def _store() -> Any:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    # torch has no public access to the store that `init_process_group` created.
    return torch.distributed.distributed_c10d._get_default_store()


def _remember_inherited() -> None:
    _inherited[:] = [_store()]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember_inherited)


def first_value(name: str, value: int) -> int:
    """Return the value of the first rank that calls this; its own if there is one rank.

    Args:
        name: of the value. The second call with a name is about another value.
        value: this rank's.
    """
    if (store := own_store()) is None:
        return value
    try:
        return int(store.compare_set(f"lightning_h5/first/{name}/{next(_numbers[name])}", "", str(value)))
    except torch.distributed.DistError:  # reported when all ranks agree
        return value


class OncePerNode:
    """A value that one process of each node computes; any process may ask for it, none has to.

    It goes through the key-value store by which ranks found each other. If there is none, or the system does not report
    which processes are of one machine, each process computes the value itself.

    Args:
        name: of the value. The second object with a name is about another value.

    Attributes:
        is_first: whether this process computes the value.
        has_others: whether other processes may wait for it.
        first: the process that computes it (see ``this_process``).
    """

    def __init__(self, name: str) -> None:
        self.first = me = this_process()
        self._store: Any = own_store() if me else None
        self._reported = time.monotonic()
        if self._store is not None:
            self._key = f"lightning_h5/{name}/{next(_numbers[name])}/{me[0]}/{me[1]}"
            try:
                self.first = json.loads(self._store.compare_set(f"{self._key}/first", "", json.dumps(me)))
            except torch.distributed.DistError:  # reported when all ranks agree
                self._store = None
        self.is_first = self.first == me
        self.has_others = self.is_first and self._store is not None

    def progress(self) -> None:
        """Report that the value is being computed: the time that others wait for it begins again."""
        if self.has_others and time.monotonic() > self._reported + NODE_PROGRESS:
            self._reported = time.monotonic()
            with suppress(torch.distributed.DistError):  # no other process is left
                self._store.add(f"{self._key}/progress", 1)

    def publish(self, value: Any) -> None:
        """Share the value; None makes the others compute it themselves.

        Args:
            value: as JSON has it.
        """
        with suppress(torch.distributed.DistError):  # no other process is left
            self._store.set(f"{self._key}/answer", json.dumps(value))

    def value(self) -> Any:
        """Return the value; None if the first process could not compute it, ended, or makes no progress for long."""
        answer = f"{self._key}/answer"
        try:
            _wait(
                lambda: self._store.check([answer]) or not is_alive(self.first),
                NODE_PATIENCE,
                lambda: int(self._store.add(f"{self._key}/progress", 0)),
            )
            return json.loads(self._store.get(answer)) if self._store.check([answer]) else None
        except torch.distributed.DistError:
            return None


# Processes of one machine ---------------------------------------------------------------------------------------


def this_process() -> list[str]:
    """Return what identifies this process among all machines; empty if the system does not report it (not Linux)."""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [machine, str(Path("/proc/self/ns/pid").readlink()), str(os.getpid()), _stat(os.getpid())[1]]
    return []


def are_near(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two processes are of one machine, and see each other by their process ids.

    Args:
        one: what ``this_process`` returned in one process.
        other: what it returned in the other.
    """
    return bool(one) and list(one[:2]) == list(other[:2])


def end_process(process: Sequence[str]) -> None:
    """Kill a process, if it is one of this machine and of the same namespace, and still the same.

    Args:
        process: what ``this_process`` returned there.
    """
    if are_near(process, this_process()) and is_alive(process):
        with suppress(OSError):
            os.kill(int(process[2]), signal.SIGKILL)


def is_alive(process: Sequence[str]) -> bool:
    """Return whether a process of this machine and namespace is running.

    Args:
        process: what ``this_process`` returned there.
    """
    try:
        state, start = _stat(int(process[2]))
    except OSError:
        return False
    return start == process[3] and state != "Z"  # a zombie has ended, but was not waited for


def _stat(pid: int) -> tuple[str, str]:
    """Return a process's state, and when it began, in ticks since boot: process ids are used again."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
