"""A record of samples that were left out since the start of a run: place, cause and count, over all ranks."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from ..distributed import Bulletin
from ..errors import H5Error, shown

__all__ = ["BadSample", "BadSampleLedger"]

logger = logging.getLogger(__name__)

MAX_NAMED = 100  # samples with details in logs, checkpoints and messages to other ranks; others only have a number
PAGE = 100  # number of samples that are posted together
MAX_SHOWN = 3  # number of samples that a message names


class BadSample(NamedTuple):
    """A sample that was left out of a batch.

    Attributes:
        stage: the stage, by the name of its split; "" for a dataset without a data module.
        number: number of the sample in its split, as added by ``with_index``.
        file: the file of the sample.
        place: its row, or its segment and step.
        cause: type and text of the error.
        epoch: epoch of its batch; -1 without a plan.
        position: position of its batch in the epoch; -1 without a plan.
    """

    stage: str
    number: int
    file: str
    place: str
    cause: str
    epoch: int = -1
    position: int = -1

    def __str__(self) -> str:
        return f"{self.place} of {shown(self.file)!r} ({self.cause})" if self.file else f"index {self.number}"


class LedgerEntry(NamedTuple):
    """A bad sample, as it was left out last, with a count."""

    sample: BadSample
    n_times: int

    def __str__(self) -> str:
        return f"{self.sample}{f', {self.n_times} times' if self.n_times > 1 else ''}"


Entries: TypeAlias = dict[tuple[str, int], LedgerEntry]


class BadSampleLedger:
    """The samples that were left out since the start of a run. Threads may share it.

    A sample counts when its batch is delivered, and once for each batch of the run's order: batches that are delivered
    again, after a resume or to a callback, do not count. Ranks read the posts of other ranks (see ``Bulletin``), so no
    rank waits for another.

    Args:
        limit: maximum number of different samples to leave out, over all ranks.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._bulletin: Bulletin | None = None
        self._restored: Entries = {}  # entries of a checkpoint, the same on all ranks
        self._own: Entries = {}  # later entries of this rank
        self._n_logged = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return BadSampleLedger, (self._limit,)  # a new process counts for itself

    def share(self, bulletin: Bulletin) -> None:
        """Exchange samples with other ranks through a bulletin, which all ranks have created."""
        with self._lock:
            self._bulletin = bulletin
            if self._own:
                bulletin.add(len(self._own))
                self._post(self._own)

    def clear(self) -> None:
        """Drop all samples at the start of another run."""
        with self._lock:
            self._restored, self._n_logged = {}, 0
            self._drop_own()

    # Samples -------------------------------------------------------------------------------------------------

    def add(self, samples: Iterable[BadSample]) -> list[BadSample]:
        """Count samples of a batch, and log new ones.

        Returns:
            The samples that were not counted for this batch before.

        Raises:
            H5Error: the number of different samples exceeds the limit, over all ranks.
        """
        with self._lock:
            counted = [sample for sample in samples if not self._was_counted(sample)]
            keys = {(sample.stage, sample.number) for sample in counted}
            n_new = len(keys - self._restored.keys() - self._own.keys())
            for sample in counted:
                self._count(sample)
            if not counted:
                return counted
            self._post(keys)
            n_ranks = len(self._own) if self._bulletin is None or not n_new else self._bulletin.add(n_new)
            may_exceed = len(self._restored) + n_ranks > self._limit  # several ranks may have left out the same one
            if may_exceed and (text := self._excess()):
                raise H5Error(text)
            return counted

    def _was_counted(self, sample: BadSample) -> bool:
        entry = self._own.get((sample.stage, sample.number)) or self._restored.get((sample.stage, sample.number))
        return entry is not None and sample.epoch >= 0 and _place_in_run(sample) <= _place_in_run(entry.sample)

    def _count(self, sample: BadSample) -> None:
        key = sample.stage, sample.number
        entry = self._own.get(key)
        if entry is None and key not in self._restored:
            self._n_logged += 1
            if self._n_logged <= MAX_NAMED:
                more = " Further samples are counted, but not logged." if self._n_logged == MAX_NAMED else ""
                rank = 0 if self._bulletin is None else self._bulletin.rank
                logger.warning("rank %d leaves out a sample: %s.%s", rank, sample, more)
        self._own[key] = LedgerEntry(sample, 1 if entry is None else entry.n_times + 1)

    def _drop_own(self) -> None:
        n_posted = len(self._own)
        self._own = {}
        self._post_pages(range(-(-n_posted // PAGE)))

    def _post(self, keys: Iterable[tuple[str, int]]) -> None:
        """Post counted samples, with the other samples of their pages."""
        places = {key: place for place, key in enumerate(self._own)}
        self._post_pages(sorted({places[key] // PAGE for key in keys}))

    def _post_pages(self, pages: Iterable[int]) -> None:
        if self._bulletin is not None:
            for page in pages:
                own = islice(self._own.items(), page * PAGE, (page + 1) * PAGE)
                self._bulletin.post(json.dumps(_as_lists(dict(own), MAX_NAMED - page * PAGE)), page)

    def excess(self) -> str:
        """Return the message about exceeding the limit, with the first samples; "" if it is not exceeded."""
        with self._lock:
            return self._excess()

    def _excess(self) -> str:
        if len(entries := self._entries()) <= self._limit:
            return ""
        first = sorted(entries.values(), key=lambda entry: _place_in_run(entry.sample))
        files = list(dict.fromkeys(entry.sample.file for entry in first if entry.sample.file))
        return (
            f"{len(entries):,} different samples could not be read or transformed, and on_bad_row leaves out "
            f"{self._limit:,} at most (limit). The first of them: {_listed(first)}. Run `lightning-h5 check "
            f"{shown(files[0]) if files else 'FILE'}` to find the damage, and repair the files or the transform. Or "
            f"raise the limit: on_bad_row={{'limit': {10 * self._limit}}}."
        )

    def _entries(self) -> Entries:
        """Return the samples of all ranks."""
        others = [] if self._bulletin is None else [_entries_of(json.loads(text)) for text in self._bulletin.others()]
        entries = dict(self._restored)
        for of_rank in (self._own, *others):
            for key, entry in of_rank.items():
                earlier = entries.get(key, LedgerEntry(entry.sample, 0))
                last = max(earlier.sample, entry.sample, key=_place_in_run)
                entries[key] = LedgerEntry(last, earlier.n_times + entry.n_times)
        return entries

    # Texts and state -----------------------------------------------------------------------------------------

    def entries(self) -> list[LedgerEntry]:
        """Return the samples of all ranks with their counts, in the order in which they were left out last."""
        with self._lock:
            return sorted(self._entries().values(), key=lambda entry: _place_in_run(entry.sample))

    def summary(self) -> str:
        """Return a sentence with the number of left-out samples and the first of them; "" if there are none."""
        if not (entries := self.entries()):
            return ""
        n_times, n = sum(entry.n_times for entry in entries), len(entries)
        samples = f"{n:,} sample{'s' if n > 1 else ''}"
        times = f", {n_times:,} times in all" if n_times > n else ""
        return f"{samples} left out (on_bad_row, limit {self._limit:,}){times}: {_listed(entries)}"

    def state(self) -> list[list[Any]]:
        """Return the samples of all ranks as plain values; the first 100 with details, others only by number."""
        with self._lock:
            return _as_lists(self._entries())

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """Continue with the samples of a checkpoint."""
        with self._lock:
            self._restored = _entries_of(state)
            self._drop_own()


def _place_in_run(sample: BadSample) -> tuple[int, int]:
    return sample.epoch, sample.position


def _listed(entries: Sequence[LedgerEntry]) -> str:
    more = f"; and {len(entries) - MAX_SHOWN:,} more" if len(entries) > MAX_SHOWN else ""
    return "; ".join(map(str, entries[:MAX_SHOWN])) + more


def _as_lists(entries: Entries, n_named: int = MAX_NAMED) -> list[list[Any]]:
    return [
        [*(sample if at < n_named else sample._replace(file="", place="", cause="")), n_times]
        for at, (sample, n_times) in enumerate(entries.values())
    ]


def _entries_of(lists: Sequence[Sequence[Any]]) -> Entries:
    entries = [LedgerEntry(BadSample(*values), n_times) for *values, n_times in lists]
    return {(entry.sample.stage, entry.sample.number): entry for entry in entries}
