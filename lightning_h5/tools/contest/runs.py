"""Measuring contenders: one after the other, then the fastest in turn, with memory bounded and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from time import perf_counter
from typing import Any

from tqdm import tqdm

from ...errors import H5Error
from .contenders import MOST_OF_ROOM, BenchRows, Contender, LeftOut
from .plain_recipe import PlainDataset, rows_at_a_time
from .rates import settle, take_for
from .running import Running

__all__ = ["Measuring", "finalists_of"]

NEAR = 0.5
"""Who has this share of the fastest one's rows a second when each was measured once is measured again: where others
use the machine, too, a single figure may be wrong by as much."""

MOST_FINALISTS = 5
MOST_FIRST = 15
"""Times ``seconds`` that the first epoch of who keeps all rows may take."""

MOST_READ = 10
"""Times ``seconds`` that are spent on having the system read the files, before anything is measured."""

WARM = 0.25
"""Times ``seconds`` before each measuring: what was read ahead while others had their turn is gone by then."""

SLICES = 16
"""A batch of the plain recipe takes no more than one in so many of ``seconds``: else it would have fewer rows."""


class Measuring:
    """A benchmark that goes on.

    Args:
        rows: what is read.
        seconds: how long each contender is measured each time.
        rounds: times that the fastest are measured again.
        free: bytes of memory that are free; None where the system does not say.
        bar: of progress; a step for each time that something is measured.

    Attributes:
        rates: rows a second of each contender, in the order of measuring.
        first: rows a second of the first epoch of those that keep all rows, from opening the files on.
        notes: what to know of a contender's figures.
        left_out: who could not be measured.
        finalists: those that were near the fastest, whose rates were measured by turns; one of them is to be taken.
        is_warm: whether the system read all files before.
    """

    def __init__(self, rows: BenchRows, *, seconds: float, rounds: int, free: int | None, bar: tqdm[Any]) -> None:
        self._rows, self._seconds, self._rounds, self._free, self._bar = rows, seconds, rounds, free, bar
        self._plain_batch: int | None = None
        self.rates: dict[Contender, list[float]] = {}
        self.first: dict[Contender, float] = {}
        self.notes: dict[Contender, str] = {}
        self.left_out: list[LeftOut] = []
        self.finalists: list[Contender] = []
        self.is_warm = False

    def read_once(self) -> None:
        """Has the system read the files, where it can keep them: else who comes first would pay for the others."""
        stored = sum(layout.n_stored_bytes for layouts in self._rows.table.layouts for layout in layouts)
        self._bar.set_postfix_str("reading the files")
        if self._free is not None and stored <= self._free // MOST_OF_ROOM:
            with closing(Running(Contender(way="lazy"), self._rows)) as running:
                take_for(running, 0, MOST_READ * self._seconds, least_rows=self._rows.n_rows)
                self.is_warm = not running.n_left
        self._bar.update()

    def measure_once(self, contender: Contender) -> None:
        """Measures a contender, or finds out why it cannot be.

        Raises:
            H5Error: the rows cannot be read.
        """
        self._bar.set_postfix_str(contender.name)
        takes = self._first_takes(contender)
        if takes > MOST_FIRST * self._seconds:
            self._leave_out(contender, f"its first epoch takes about {takes:,.0f} s; more `seconds` wait for it")
        else:
            try:
                with self._running(contender) as running:
                    self.rates[contender] = [self._measure(running)]
            except H5Error:
                raise
            except Exception as error:  # of the plain recipe any; of ours a worker that was killed
                if contender.way != "plain" and not isinstance(error, RuntimeError):
                    raise
                self._leave_out(contender, f"it failed: {_last_line(error)}")
        self._bar.update()

    def measure_in_turn(self, also: Sequence[Contender] = ()) -> None:
        """Measures those that are near the fastest again, by turns; these figures take the place of their first ones.

        Args:
            also: others that were measured and take part, however fast they were.

        Raises:
            H5Error: nothing of this package was measured, or rows cannot be read.
        """
        if not any(contender.way != "plain" for contender in self.rates):
            raise H5Error(
                "no data module could be measured here: "
                + "; ".join(f"{each.name}: {each.why}" for each in self.left_out)
                + ". Pass other num_workers."
            )
        finalists = finalists_of({contender: rates[0] for contender, rates in self.rates.items()})
        finalists += [each for each in also if each not in finalists]
        self.finalists = finalists
        if len(finalists) < 2:
            return
        # A process that has threads is better not forked.
        finalists.sort(key=lambda each: -each.num_workers)
        self._bar.total = (self._bar.total or 0) + len(finalists) * self._rounds
        needed = sum(each.memory(self._rows) for each in finalists)
        found: dict[Contender, list[float]] = {each: [] for each in finalists}
        with ExitStack() as stack:
            running: dict[Contender, Running] = {}
            if self._free is not None and needed <= self._free // MOST_OF_ROOM:
                for each in finalists:
                    self._bar.set_postfix_str(f"starting {each.name}")
                    running[each] = stack.enter_context(self._running(each))
            for number in range(self._rounds):
                first = number % len(finalists)
                for each in finalists[first:] + finalists[:first]:
                    self._bar.set_postfix_str(each.name)
                    found[each].append(self._turn(each, running.get(each)))
                    self._bar.update()
        self.rates.update(found)

    def _turn(self, contender: Contender, running: Running | None) -> float:
        if running is None:
            with self._running(contender) as alone:
                return self._measure(alone)
        settle()
        take_for(running, WARM * self._seconds, self._seconds)
        return self._measure(running)

    def _measure(self, running: Running) -> float:
        return take_for(running, self._seconds, 3 * self._seconds).rate

    @contextmanager
    def _running(self, contender: Contender) -> Iterator[Running]:
        """A contender that is as fast as it gets: workers have started, files are open, windows are full."""
        began = perf_counter()
        with closing(Running(contender, self._rows, self._batch_size(contender))) as running:
            if contender.keeps_rows(self._rows):
                take_for(running, 0, MOST_FIRST * self._seconds, least_rows=self._rows.n_rows)
                if running.n_left:
                    self.notes[contender] = "its first epoch was not over: later ones are faster"
                else:
                    self.first.setdefault(contender, self._rows.n_rows / (perf_counter() - began))
                take_for(running, WARM * self._seconds, self._seconds)
            else:
                is_mixed = contender.way == "lazy" and self._rows.is_decoded
                window = contender.shuffle_bytes // max(1, self._rows.row_bytes) if is_mixed else 0
                take_for(running, WARM * self._seconds, 2 * self._seconds if is_mixed else 0, least_rows=window)
            yield running

    def _batch_size(self, contender: Contender) -> int | None:
        if contender.way != "plain":
            return None
        if self._plain_batch is None:
            rows = self._rows
            dataset = PlainDataset(rows.table.paths, rows.table.starts.tolist(), rows.x_key, rows.y_key)
            self._plain_batch = rows_at_a_time(dataset, self._seconds / SLICES, rows.batch_size)
        if self._plain_batch < self._rows.batch_size:
            self.notes[contender] = f"in batches of {self._plain_batch}: a whole one takes too long"
        return self._plain_batch

    def _first_takes(self, contender: Contender) -> float:
        """Seconds of the first epoch of who keeps all rows, as others decode; 0 where that is not known."""
        decoding = [self.first.get(other) or rates[0] for other, rates in self.rates.items() if other.way == "lazy"]
        if not contender.keeps_rows(self._rows) or not decoding:
            return 0.0
        return self._rows.n_rows / max(decoding)

    def _leave_out(self, contender: Contender, why: str) -> None:
        self.left_out.append(LeftOut(name=contender.name, why=why))


def finalists_of(rates: dict[Contender, float]) -> list[Contender]:
    """Who is near the fastest of ours, the plain recipe among them: the fastest few, and the simplest.

    Args:
        rates: rows a second of each.
    """
    fastest = max(rate for contender, rate in rates.items() if contender.way != "plain")
    near = sorted((each for each, rate in rates.items() if rate >= NEAR * fastest), key=lambda each: -rates[each])
    simplest = min((each for each in near if each.way != "plain"), key=lambda each: each.rank)
    found = near[:MOST_FINALISTS]
    return found if simplest in found else [*found[:-1], simplest]


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in f"{error}".splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'without a word'}"
