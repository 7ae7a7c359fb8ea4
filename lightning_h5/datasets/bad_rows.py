"""Samples that cannot be read or transformed: raise their error, or leave them out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import numpy as np
from torch.utils.data import get_worker_info

from ..counters import Counters
from ..errors import H5CorruptError
from ..options import BadRowOptions
from ..readers import salvaged
from ..types import Draws, IntArray
from .bad_sample_ledger import BadSample, BadSampleLedger
from .raw_batch import RawBatch
from .sample_errors import SampleErrors, is_of_sample

__all__ = ["RaiseBadRows", "SkipBadRows"]

MAX_KNOWN = 1 << 16  # number of bad samples to remember
MAX_CAUSE = 200  # maximum letters of an error's text


def _is_of_rows(error: Exception) -> bool:
    """Return whether an error of reading a batch is caused by some of its rows."""
    return isinstance(error, H5CorruptError) and is_of_sample(error)


def _cause(error: Exception) -> str:
    """Return type and text of an error, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= MAX_CAUSE else f"{text[: MAX_CAUSE - 4]} ..."


def _others(n_samples: int, bad: Collection[int]) -> IntArray:
    """Return the places of a batch's other samples."""
    return np.array([place for place in range(n_samples) if place not in bad], np.int64)


class SampleSource(Protocol):
    """The samples that may be left out: a ``RowDataset``."""

    counters: Counters

    @property
    def has_same_rows_each_epoch(self) -> bool:
        """Whether a sample consists of the same rows in each epoch."""
        ...

    def begin(self, rows: IntArray, epoch: int | None = None) -> Callable[[], RawBatch]:
        """Begin to read samples; return a function that completes the reading."""
        ...

    def numbers_of(self, rows: IntArray) -> IntArray:
        """Return the numbers that ``with_index`` adds for indices into the dataset."""
        ...

    def shown_numbers(self, raw: RawBatch) -> IntArray:
        """Return the numbers that ``with_index`` adds for rows of a batch."""
        ...

    def place_of(self, number: int) -> tuple[str, str]:
        """Return the file of a sample, and its place in the file as text."""
        ...


class RaiseBadRows:
    """Raises the errors of rows and of transforms: the default."""

    skips = False

    def read_others(self, dataset: SampleSource, rows: IntArray, epoch: int | None, error: Exception) -> RawBatch:
        """Return the readable samples of a batch; raise the error if samples are not left out.

        Args:
            dataset: the samples.
            rows: rows of the batch that failed.
            epoch: see ``RowDataset.gather``.
            error: the error.
        """
        raise error

    def errors(self) -> SampleErrors | None:
        """Return a mapping for transforms to store errors of samples in; None if errors are raised."""
        return None

    def left_out(self, dataset: SampleSource, raw: RawBatch, errors: SampleErrors | None, draws: Draws | None) -> None:
        """Record the samples that a batch leaves out, when it is delivered or sent to the main process.

        Args:
            dataset: the samples.
            raw: the batch before transforms.
            errors: errors of its transforms.
            draws: epoch and position of the batch; None without a plan.
        """

    def record(self, dataset: SampleSource, samples: Iterable[BadSample]) -> None:
        """Count samples that were left out of a batch that is being delivered."""

    def report(self) -> None:
        """Collect left-out samples for the main process, in a worker of its loader."""

    def reported(self) -> tuple[BadSample, ...]:
        """Return the samples that were left out since the last call."""
        return ()

    def remark(self) -> str:
        """Return a sentence with the number of left-out samples; "" if there are none."""
        return ""


class SkipBadRows(RaiseBadRows):
    """Leaves out samples that cannot be read or transformed, and records them. A batch without good samples raises.

    A readable batch has no additional cost. If reading fails, the batch is bisected until the bad samples are known.
    They are remembered, unless samples have other rows in another epoch.

    Args:
        options: limit of samples to leave out.
        ledger: records the samples.
        stage: the stage of the dataset.
    """

    skips = True

    def __init__(self, options: BadRowOptions, ledger: BadSampleLedger, stage: str = "") -> None:
        self._options, self._ledger, self._stage = options, ledger, stage
        self._known: dict[int, str] = {}  # causes by the numbers of samples
        self._outbox: deque[BadSample] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": {}, "_outbox": None}

    def read_others(self, dataset: SampleSource, rows: IntArray, epoch: int | None, error: Exception) -> RawBatch:
        """See ``RaiseBadRows.read_others``.

        Raises:
            H5Error: no sample of the batch can be read, or no sample causes the error.
        """
        if not _is_of_rows(error):
            raise error
        numbers = dataset.numbers_of(rows).tolist()
        bad = {at: self._known[number] for at, number in enumerate(numbers) if number in self._known}
        raw: RawBatch | None = None

        def read(places: IntArray) -> None:
            nonlocal raw
            raw = dataset.begin(rows[places], epoch)()

        failures = salvaged(read, _others(len(rows), bad), is_of_places=_is_of_rows)
        bad |= {int(places[0]): _cause(failure) for places, failure in failures}
        others = _others(len(rows), bad)
        if not len(others):
            raise error
        if raw is None or len(raw.rows) < len(others):  # only parts were read
            raw = dataset.begin(rows[others], epoch)()
        if dataset.has_same_rows_each_epoch and len(self._known) < MAX_KNOWN:
            self._known |= {numbers[at]: cause for at, cause in bad.items()}
        samples = [self._sample(dataset, numbers[at], cause) for at, cause in sorted(bad.items())]
        return raw._replace(bad=tuple(samples))

    def _sample(self, dataset: SampleSource, number: int, cause: str) -> BadSample:
        return BadSample(self._stage, number, *dataset.place_of(number), cause)

    def errors(self) -> SampleErrors | None:
        """See ``RaiseBadRows.errors``."""
        return {}

    def left_out(self, dataset: SampleSource, raw: RawBatch, errors: SampleErrors | None, draws: Draws | None) -> None:
        """See ``RaiseBadRows.left_out``."""
        numbers = dataset.shown_numbers(raw)
        samples = [
            self._sample(dataset, int(numbers[at]), _cause(error)) for at, error in sorted((errors or {}).items())
        ]
        samples = [*raw.bad, *samples]
        if draws is not None:
            samples = [sample._replace(epoch=draws.epoch, position=draws.position) for sample in samples]
        if self._outbox is not None and get_worker_info() is not None:
            self._outbox.extend(samples)
        else:
            self.record(dataset, samples)

    def record(self, dataset: SampleSource, samples: Iterable[BadSample]) -> None:
        """See ``RaiseBadRows.record``.

        Raises:
            H5Error: too many samples were left out.
        """
        counted = self._ledger.add(samples)
        n_planned = sum(sample.epoch >= 0 for sample in counted)
        dataset.counters.add(left_out=len(counted), rows=-n_planned)

    def report(self) -> None:
        """See ``RaiseBadRows.report``."""
        self._outbox = deque()

    def reported(self) -> tuple[BadSample, ...]:
        """See ``RaiseBadRows.reported``."""
        if not self._outbox:
            return ()
        samples, self._outbox = tuple(self._outbox), deque()
        return samples

    def remark(self) -> str:
        """See ``RaiseBadRows.remark``."""
        return self._ledger.summary()
