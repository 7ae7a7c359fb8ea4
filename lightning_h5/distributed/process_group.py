"""The key-value store by which the ranks of a process group found each other, and names in it."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

from ..lazy_torch import has_process_group, torch
from ..threads import EndingThread

__all__ = ["agree_on_nonce", "key_of", "own_store", "stop_answering", "wait_until"]

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.02  # between polls of a waiting rank: most arrive within milliseconds
LONGEST_PAUSE_OF_RANK_0 = 0.2  # between its looks for questions

_inherited: list[Any] = []


def own_store() -> Any:
    """Return the store of this process's group; None if there is only one rank.

    A child that a rank forked inherits the group and the store of its parent. Both would use one connection, and each
    would get answers for the other, so a forked child is not a rank and has no store.
    """
    store = _store()
    if store is None or any(store is inherited for inherited in _inherited) or torch.distributed.get_world_size() == 1:
        return None
    return store


def _store() -> Any:
    if not has_process_group():
        return None
    # torch has no public access to the store that `init_process_group` created.
    return torch.distributed.distributed_c10d._get_default_store()


def _remember_inherited() -> None:
    _inherited[:] = [_store()]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember_inherited)


# Names in the store ----------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """The state of this process in its process group.

    Attributes:
        store: the store of the group.
        nonce: random text that is unique to this group, and the same on all ranks; "" before it is known.
        numbers: the number of uses of each name in this process.
    """

    store: Any
    nonce: str
    numbers: defaultdict[str, count[int]]


_own: list[_Group] = []  # the one that was used last
_all_know = threading.Event()  # that rank 0 need not answer any more
_answering: list[EndingThread] = []


def key_of(store: Any, name: str) -> str:
    """Return the key of a name in the store, the same on all ranks. Each call with a name returns another key.

    Args:
        store: the store of the group. Before ``agree_on_nonce``, an earlier group may have used the key.
        name: a name, the same on all ranks.
    """
    return f"lightning_h5/{_of(store).nonce}/{name}/{next(_of(store).numbers[name])}"


def agree_on_nonce(store: Any, patience: float) -> bool:
    """Get the nonce of this group, which is part of all keys, from rank 0; return whether this rank has it.

    A store may have served an earlier group: the agent of ``torchrun`` may keep it when workers start again, or when a
    node joins. Rank 0 draws the nonce. Each other rank asks for it with a random word of its own, so that it cannot
    take an answer to an earlier rank. A collective would hang on a late rank.

    Args:
        store: the store of the group.
        patience: seconds to wait for rank 0.
    """
    if _of(store).nonce:
        return True
    own = secrets.token_hex(8)
    if torch.distributed.get_rank() == 0:
        stop_answering()
        _own[:] = [_Group(store, own, defaultdict(count))]
        _answering[:] = [EndingThread(_answer, (store, own), name="lightning_h5-nonce", end=_all_know.set)]
        _all_know.clear()
        _answering[0].start()
        return True
    answer = f"lightning_h5/answers/{own}"
    store.set(f"lightning_h5/questions/{store.add('lightning_h5/n_questions', 1)}", own)
    if not wait_until(lambda: bool(store.check([answer])), patience):
        return False
    _own[:] = [_Group(store, store.get(answer).decode(), defaultdict(count))]
    return True


def stop_answering() -> None:
    """End rank 0's answers: all ranks know the nonce, and no thread may run where processes are forked."""
    _all_know.set()
    for thread in _answering:
        thread.join()
    _answering.clear()


def _of(store: Any) -> _Group:
    if not _own or _own[0].store is not store:
        _own[:] = [_Group(store, "", defaultdict(count))]
    return _own[0]


def _answer(store: Any, nonce: str) -> None:
    """Answer all questions, of earlier groups too; runs in a thread."""
    n_seen, open_questions, pause = 0, set[int](), FIRST_PAUSE
    with suppress(torch.distributed.DistError):  # the group has ended
        while not _all_know.wait(pause):
            n_asked = store.add("lightning_h5/n_questions", 0)
            open_questions |= set(range(n_seen + 1, n_asked + 1))
            n_seen = n_asked
            for number in list(open_questions):
                if store.check([key := f"lightning_h5/questions/{number}"]):
                    store.set(f"lightning_h5/answers/{store.get(key).decode()}", nonce)
                    open_questions.remove(number)
            pause = min(LONGEST_PAUSE_OF_RANK_0, 1.1 * pause)


def wait_until(is_done: Callable[[], bool], patience: float, progress: Callable[[], int] = lambda: 0) -> bool:
    """Wait until a condition holds; return whether it does.

    Args:
        is_done: checks the condition.
        patience: seconds to wait; they begin again with each progress.
        progress: returns a number that grows with progress.
    """
    end, last_progress, pause = time.monotonic() + patience, 0, FIRST_PAUSE
    while not (done := is_done()) and time.monotonic() < end:
        time.sleep(pause)
        pause = min(LONGEST_PAUSE, 1.1 * pause)  # longer each time, since all ranks ask the same store
        if (current := progress()) != last_progress:
            end, last_progress = time.monotonic() + patience, current
    return done
