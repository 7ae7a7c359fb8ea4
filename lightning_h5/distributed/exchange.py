"""Agreement between ranks outside of training: all see the same data, or all stop."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from .. import errors
from ..errors import H5Error, H5ValueError
from ..lazy_torch import torch
from ..threads import EndingThread
from .process_group import agree_on_nonce, key_of, own_store, stop_answering, wait_until
from .processes import end_process, this_process

__all__ = ["Exchange", "exchange"]

GRACE = 5.0  # seconds for other ranks to read the error before this process ends, and perhaps the store with it
POLL = 0.5  # seconds between checks of a rank that is late
FIRST_PROCESS = "lightning_h5/first_process"  # key of the process of rank 0, known before ranks agree on other keys


@contextmanager
def exchange(what: str, patience: float, is_alone: bool = False) -> Iterator[Exchange]:
    """Yield an exchange between all ranks: work inside, and end it with ``agree``.

    The first rank that reaches ``agree`` waits for ``patience`` seconds. A rank that has not arrived by then is late:
    all other ranks raise, and the late rank ends as well, so that no process is left behind. A thread of each rank
    watches for this case. If a late rank hangs in a call that lets no thread run (a library that waits for storage),
    the other ranks of its machine end it.

    Args:
        what: the work of the ranks, for messages.
        patience: seconds to wait for the slowest rank.
        is_alone: this rank has its own data, although other processes exist.
    """
    store = None if is_alone else own_store()
    if store is None:
        yield Exchange(what, patience, None)
        return
    among_ranks = Exchange(what, patience, store)
    over = threading.Event()
    watch = EndingThread(among_ranks.watch, (over,), name="lightning_h5-exchange", end=over.set)
    watch.start()
    try:
        yield among_ranks
    finally:
        over.set()
        watch.join()


class Exchange:
    """An exchange between ranks, or of one rank alone.

    Args:
        what: the work of the ranks, for messages.
        patience: seconds to wait for the slowest rank.
        store: the store of the ranks; None for one rank alone.

    Attributes:
        rank: the rank of this process, from 0.

    Raises:
        H5Error: rank 0 does not begin.
    """

    def __init__(self, what: str, patience: float, store: Any) -> None:
        self._what, self._patience, self._store = what, patience, store
        self.rank = 0
        if store is None:
            return
        self.rank, self._world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        try:
            if self.rank == 0:
                store.set(FIRST_PROCESS, json.dumps(this_process()))
            if not agree_on_nonce(store, patience):
                time.sleep(GRACE)  # time for the others to find it, too
                with suppress(torch.distributed.DistError):
                    self._end_process(FIRST_PROCESS)
                raise H5Error(self._late_text([0]))
        except torch.distributed.DistError as error:
            raise H5Error(self._ended_text()) from error
        self._name = key_of(store, what)
        self._keys = [f"{self._name}/{rank}" for rank in range(self._world_size)]
        self._is_here = False  # whether this rank has reached `agree`
        store.set(f"{self._keys[self.rank]}/process", json.dumps(this_process()))

    def progress(self) -> None:
        """Report that this rank makes progress, which restarts the patience of other ranks."""
        if self._store is not None:
            with suppress(torch.distributed.DistError):  # reported when an answer is needed
                self._store.add(f"{self._name}/progress", 1)

    def agree(self, facts: Mapping[str, Any], failure: Exception | None, message: Any = None) -> list[Any]:
        """Share facts of this rank, and raise on all ranks if one failed, differs, or does not arrive.

        Args:
            facts: plain values that must be equal on all ranks; None for values that this rank does not know.
            failure: the exception on this rank, if there was one.
            message: JSON values for the other ranks; may differ between ranks.

        Returns:
            The messages, in the order of ranks.

        Raises:
            Exception: the failure itself, if there is one rank.
            H5Error: a rank failed, has other facts or did not arrive; the same text on all ranks, with rank and values.
        """
        if self._store is None:
            if failure is not None:
                raise failure
            return [message]
        self._is_here = True
        own_report = {
            "error": None if failure is None else [type(failure).__name__, str(failure)],
            "facts": {name: repr(value) for name, value in facts.items()},
            "message": message,
        }
        reports: list[Any] = []
        try:
            self._store.set(self._keys[self.rank], json.dumps(own_report))
            late = self._wait_for_all()
            if late:
                kind, text = H5Error, self._late_text(late)
            else:
                stop_answering()  # all ranks are here
                reports = [json.loads(self._store.get(key)) for key in self._keys]
                kind, text = self._verdict(reports)
        except torch.distributed.DistError as error:
            raise H5Error(self._ended_text()) from (failure or error)
        self._leave(late)
        if text:
            raise kind(text) from failure
        return [report["message"] for report in reports]

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
        all_here = wait_until(
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
        for rank in late:
            with suppress(torch.distributed.DistError):
                self._end_process(f"{self._keys[rank]}/process")

    def _end_process(self, key: str) -> None:
        """End a process of this machine that is named by a key of the store."""
        if self._store.check([key]):
            end_process(json.loads(self._store.get(key)))

    def _wait_for_others_to_leave(self, late: Sequence[int]) -> None:
        n_present = self._world_size - len(late)
        with suppress(torch.distributed.DistError):
            wait_until(lambda: bool(self._store.add(f"{self._name}/left", 0) >= n_present), GRACE)

    def _verdict(self, reports: Sequence[Mapping[str, Any]]) -> tuple[type[H5Error], str]:
        """Return the error that all ranks raise; no text if there is none."""
        failed = {rank: report["error"] for rank, report in enumerate(reports) if report["error"] is not None}
        if failed:
            lines = "".join(f"\n  rank {rank}: {kind}: {text}" for rank, (kind, text) in failed.items())
            kind = getattr(errors, next(iter(failed.values()))[0], H5ValueError)
            return kind, f"{self._what} failed on {len(failed)} of {len(reports)} ranks:{lines}"
        facts = [report["facts"] for report in reports]
        # A rank may lack a name, and all ranks must compare the same names.
        names = dict.fromkeys(name for rank_facts in facts for name in rank_facts)
        differing = [name for name in names if len({rank_facts.get(name) for rank_facts in facts} - {repr(None)}) > 1]
        if not differing:
            return H5Error, ""
        lines = "".join(
            f"\n  {name}: "
            + ", ".join(f"rank {rank} has {rank_facts.get(name)}" for rank, rank_facts in enumerate(facts))
            for name in differing
        )
        return H5ValueError, (
            f"the ranks do not see the same data:{lines}\nGive all ranks the same files (complete copies, if each "
            "node has its own) and the same arguments. If seeds differ, pass the same number to seed_everything on all "
            "ranks, or pass seed= to the data module."
        )

    def _late_text(self, late: Sequence[int]) -> str:
        ranks = ", ".join(f"rank {rank}" for rank in late)
        return (
            f"{self._what} did not finish on {ranks} of {self._world_size} ranks within {self._patience:g} s "
            "(setup_timeout). Find out where they hang; if they are only slow, pass a larger setup_timeout. All ranks "
            "must call setup: call it neither in prepare_data nor under `if rank == 0`."
        )

    def _ended_text(self) -> str:
        return f"the other ranks ended while rank {self.rank} was {self._what}. Their output shows what went wrong."
