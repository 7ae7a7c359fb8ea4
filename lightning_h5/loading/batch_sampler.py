"""The batch sampler of a loader, for libraries that expect one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..datasets import RowDataset
from ..order import EpochPlan, PlanSampler
from ..types import BatchToken

__all__ = ["RowsOfBatches", "TokenBatchSampler"]


class TokenBatchSampler:
    """Yields the tokens of a loader's sampler, one for each batch; the loader's dataset accepts them as indices.

    ``accelerate.skip_first_batches`` creates a plain ``DataLoader`` from a loader's dataset and its batch sampler,
    without the first batches. Lightning recreates a loader with another batch sampler of the same type.

    Args:
        sampler: the loader's sampler.
        batch_size: ignored, as is ``drop_last``: Lightning passes the values of the attributes.
        drop_last: see ``batch_size``.
    """

    def __init__(self, sampler: PlanSampler, batch_size: int | None = None, drop_last: bool | None = None) -> None:
        self.sampler = sampler

    @property
    def batch_size(self) -> int:
        """Rows of a batch on one rank."""
        return self.sampler.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether the last rows of an epoch are dropped if they do not fill a batch."""
        return self.sampler.drop_last

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[BatchToken]:
        epoch = self.sampler.starting_epoch()
        yield from self.sampler.tokens(epoch)
        self.sampler.complete(epoch)

    def __len__(self) -> int:
        """Number of batches of a whole epoch on this rank."""
        return len(self.sampler)


class RowsOfBatches(Sequence[list[int]]):
    """The rows of each batch of an iteration, as numbered by ``with_index``; computed on demand.

    Args:
        dataset: the loader's dataset.
        plan: the plan of the iteration.
    """

    def __init__(self, dataset: RowDataset, plan: EpochPlan) -> None:
        self._dataset, self._plan = dataset, plan

    def __getitem__(self, batch: int) -> list[int]:  # type: ignore[override]  # no slices
        rows: list[int] = self._dataset.numbers_of(self._plan.rows(range(len(self))[batch])).tolist()
        return rows

    def __len__(self) -> int:
        return self._plan.n_steps
