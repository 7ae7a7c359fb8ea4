"""The tokens of consecutive passes, for threads and workers that read ahead of use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from ..order import PlanSampler
from ..threads import EndingThread, start_helpers
from ..types import BatchToken

__all__ = ["PassTokens"]


class PassTokens(Iterator[BatchToken]):
    """The tokens of a pass, and of the next pass if it is certain.

    Iterating ends with the pass. After ``begin_next`` has returned True, it continues with the tokens of the next pass.
    Only one thread at a time may do either; the consumer of the batches may call the other methods at the same time.

    Args:
        sampler: the loader's sampler.
        epoch: epoch of the first pass.
        n_taken: number of its batches that the consumer takes; None for all.

    Attributes:
        when_planned: called, in another thread, when the next pass can begin.
    """

    def __init__(self, sampler: PlanSampler, epoch: int, n_taken: int | None = None) -> None:
        self._sampler = sampler
        self._pass = _Pass(sampler, epoch, n_taken)
        self._next: _Pass | None = None  # while it is planned
        self._consumed = _Consumed(epoch, n_taken, None, None)
        self.when_planned: Callable[[], object] = _do_nothing

    def consume(
        self, epoch: int, following: int | None, *, n_taken: int | None = None, n_following: int | None = None
    ) -> None:
        """Note that the batches of a pass are consumed from now on.

        Args:
            epoch: epoch of the pass.
            following: epoch of the next pass; None if it is not certain.
            n_taken: number of batches that the consumer takes of this pass; None for all.
            n_following: number of batches that the consumer takes of the next pass; None for all.
        """
        self._consumed = _Consumed(epoch, n_taken, following, n_following)

    @property
    def n_taken(self) -> int | None:
        """Number of batches that the consumer takes of the present pass; None for all."""
        return self._consumed.n_taken

    @property
    def of_pass(self) -> Iterator[BatchToken]:
        """The tokens of the present pass that were not read: for readers that do not go on to the next pass."""
        return self._pass.tokens

    @property
    def expects_more(self) -> bool:
        """Whether another pass is certain to follow the present one."""
        return self._consumed.following is not None

    @property
    def are_ahead(self) -> bool:
        """Whether tokens are read of a pass that the consumer of the batches has not reached."""
        return self._pass.epoch == self._consumed.following

    def begin_next(self, *, waits: bool = False) -> bool:
        """Begin the next pass, after all tokens of the present one were read.

        A thread plans it, which takes seconds for 10^7 rows.

        Args:
            waits: wait for the plan.

        Returns:
            False if the next pass is not certain, or not planned yet.
        """
        if self._next is None:
            consumed, last = self._consumed, self._pass.epoch
            is_next = last in (consumed.epoch, consumed.following)
            epoch = consumed.following if is_next else consumed.epoch
            n_taken = consumed.n_following if is_next else consumed.n_taken
            if epoch in (None, last):
                return False
            self._next = _Pass(self._sampler, epoch, n_taken)
            self._next.plan(self.when_planned)
        if not (waits or self._next.is_planned):
            return False
        self._next.wait()
        self._pass, self._next = self._next, None
        return True

    def goes_on_with(self, epoch: int, n_taken: int | None = None) -> bool:
        """Return whether a pass that starts now is the expected one, with the same tokens.

        Args:
            epoch: epoch of the pass.
            n_taken: number of batches that the consumer takes; None for all.
        """
        last = self._next or self._pass
        is_expected = (epoch, n_taken) == (self._consumed.following, self._consumed.n_following)
        return is_expected and (last.epoch != epoch or last.settings == _settings_of(self._sampler, epoch))

    def __next__(self) -> BatchToken:
        return next(self._pass.tokens)

    def close(self) -> None:
        """Wait for the thread that plans a pass."""
        if (following := self._next) is not None:
            following.wait()


class _Consumed(NamedTuple):
    """The present pass, and the next one if it is certain."""

    epoch: int
    n_taken: int | None
    following: int | None
    n_following: int | None


class _Pass:
    """A pass over a loader.

    Args:
        sampler: the loader's sampler.
        epoch: epoch of the pass.
        n_taken: number of batches that the consumer takes; None for all.

    Attributes:
        epoch: epoch of the pass.
        settings: the settings that its tokens depend on.
        tokens: tokens of its remaining batches.
        is_planned: whether the first token can be read at once, or an error will be raised.
    """

    def __init__(self, sampler: PlanSampler, epoch: int, n_taken: int | None) -> None:
        self.epoch, self.settings = epoch, _settings_of(sampler, epoch)
        self.tokens: Iterator[BatchToken] = islice(sampler.tokens(epoch), n_taken)
        self.is_planned = False
        self._threads: list[EndingThread] = []

    def plan(self, when_planned: Callable[[], object]) -> None:
        """Draw the first token in a thread, which creates the order of the epoch."""
        thread = EndingThread(self._draw, (when_planned,), name="lightning_h5-plan", end=_do_nothing)
        self._threads = start_helpers([thread])
        self.is_planned |= not self._threads  # without threads, reading the first token plans the pass

    def _draw(self, when_planned: Callable[[], object]) -> None:
        try:
            self.tokens = chain([*islice(self.tokens, 1)], self.tokens)
        except Exception as error:  # raised when the first batch is consumed
            self.tokens = map(_raise, [error])
        self.is_planned = True
        when_planned()

    def wait(self) -> None:
        """Wait for the plan."""
        for thread in self._threads:
            thread.join()


def _settings_of(sampler: PlanSampler, epoch: int) -> tuple[Any, ...]:
    """Return the settings that the tokens of an epoch depend on, as comparable values."""
    plain = (sampler.replica, sampler.batch_size, sampler.drop_last, sampler.samples, sampler.seed)
    objects = (id(sampler.blocks), id(sampler.recipe))  # they live as long as the tokens
    return (sampler.position(epoch), *plain, *objects)


def _raise(error: Exception) -> BatchToken:
    raise error


def _do_nothing() -> None: ...
