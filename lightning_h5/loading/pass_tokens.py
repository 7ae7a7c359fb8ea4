"""What comes next: the tokens of one pass after the other, for threads and workers that read ahead of use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from ..order import PlanSampler
from ..threads import EndingThread, start_helpers
from ..types import BatchToken

__all__ = ["PassTokens"]


class PassTokens(Iterator[BatchToken]):
    """The tokens of a pass, and then those of the next one, if it is sure to come.

    Iterating ends with the pass. Once ``begin_next`` returned True, it goes on with the tokens of the next one. One
    thread at a time may do either; the consumer of the batches may call the other methods meanwhile.

    Args:
        sampler: the loader's.
        epoch: of the first pass.
        n_taken: batches of it that are taken; None for all.

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
            epoch: of the pass.
            following: the epoch of the pass that is sure to follow; None if none is.
            n_taken: batches of the pass that are taken; None for all.
            n_following: the same of the pass that follows.
        """
        self._consumed = _Consumed(epoch, n_taken, following, n_following)

    @property
    def n_taken(self) -> int | None:
        """Batches that are taken of the pass that is consumed now; None for all."""
        return self._consumed.n_taken

    @property
    def expects_more(self) -> bool:
        """Whether another pass is sure to follow the one that is consumed now."""
        return self._consumed.following is not None

    @property
    def are_ahead(self) -> bool:
        """Whether tokens are taken of a pass that the consumer of the batches has not come to."""
        return self._pass.epoch == self._consumed.following

    def begin_next(self, *, waits: bool = False) -> bool:
        """Begin the next pass, once all tokens of the present one were taken.

        A thread plans it, which takes seconds for 10^7 rows.

        Args:
            waits: wait for the plan.

        Returns:
            False if no pass is sure to follow, or the next one is not planned yet.
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
        """Return whether a pass over an epoch that starts now is the expected one, and has the tokens that follow.

        Args:
            epoch: of the pass.
            n_taken: batches of it that are taken; None for all.
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
    """The pass that is consumed, and the one that is sure to follow."""

    epoch: int
    n_taken: int | None
    following: int | None
    n_following: int | None


class _Pass:
    """A pass over a loader.

    Args:
        sampler: the loader's.
        epoch: of the pass.
        n_taken: batches of it that are taken; None for all.

    Attributes:
        epoch: of the pass.
        settings: what its tokens depend on.
        tokens: of its batches that were not taken.
        is_planned: whether the first token can be taken at once, or an error will be raised.
    """

    def __init__(self, sampler: PlanSampler, epoch: int, n_taken: int | None) -> None:
        self.epoch, self.settings = epoch, _settings_of(sampler, epoch)
        self.tokens: Iterator[BatchToken] = islice(sampler.tokens(epoch), n_taken)
        self.is_planned = False
        self._threads: list[EndingThread] = []

    def plan(self, when_planned: Callable[[], object]) -> None:
        """Have a thread draw the first token, for which the order of the epoch is made."""
        thread = EndingThread(self._draw, (when_planned,), name="lightning_h5-plan", end=_do_nothing)
        self._threads = start_helpers([thread])
        self.is_planned |= not self._threads  # it is planned when its first token is taken

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
    """Return what the tokens of an epoch depend on, as values that can be compared."""
    plain = (sampler.replica, sampler.batch_size, sampler.drop_last, sampler.samples, sampler.seed)
    objects = (id(sampler.blocks), id(sampler.recipe))  # they live as long as the tokens
    return (sampler.position(epoch), *plain, *objects)


def _raise(error: Exception) -> BatchToken:
    raise error


def _do_nothing() -> None: ...
