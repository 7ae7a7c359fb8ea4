"""The rows of an optimizer step, from the history of the run: ``rows_of_step`` of data modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..datasets import RowDataset, origins_of, read_again
from ..errors import H5ValueError, without_frames
from ..loading import SampleCollate
from ..order import EachRowOnce, EpochRecipe, OrderParameters, StepBatch, Stretch, batches_of_step, check_run
from ..sizes import whole
from ..types import BatchToken, Identity
from .device_transform import TransformsOnDevice

__all__ = ["NamesRows", "StepRows", "StepSample", "TrainingData"]


@dataclass(frozen=True)
class StepSample:
    """A sample of an optimizer step, and its origin.

    Attributes:
        rank: the rank that trained on it.
        batch: number of its batch in the epoch on that rank, from 0 (``batch_idx``).
        file: path of its file.
        row: row in the arrays of the file, or of the group: the row of a window's own step, the number of a whole
            segment in its file or group, or the number of a patch.
        segment: name of the segment; None if samples are rows.
        step: step in the segment, or the first index of a patch along each axis that is cut; None if samples are rows.
        source: source in a mixture with dicts as samples; None otherwise.
        index: the number that ``with_index=True`` adds to the sample.
    """

    rank: int
    batch: int
    file: str
    row: int
    segment: str | None
    step: int | tuple[int, ...] | None
    source: str | None
    index: int


@dataclass(frozen=True)
class StepRows:
    """The samples of an optimizer step.

    Attributes:
        step: number of the step: the value of ``trainer.global_step`` before it.
        epoch: number of the epoch, from 0.
        world_size: number of ranks.
        n_batches: number of batches of the step on each rank.
        samples: the samples, sorted by rank, then by batch, then in the order of each batch.
    """

    step: int
    epoch: int
    world_size: int
    n_batches: int
    samples: tuple[StepSample, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[StepSample]:
        return iter(self.samples)


class TrainingData(NamedTuple):
    """The data that a data module trains on.

    Attributes:
        dataset: the samples of all ranks, or of this rank; rows need not be loaded.
        seed: seed of the run.
        identity: identity of the data.
    """

    dataset: RowDataset
    seed: int
    identity: Identity


class _FoundStep(NamedTuple):
    """An optimizer step, found in the history.

    Attributes:
        stretch: the part of the run with the step.
        dataset: the training data.
        batches: the step's batches on the requested ranks.
    """

    stretch: Stretch
    dataset: RowDataset
    batches: list[StepBatch]


class NamesRows(TransformsOnDevice):
    """A data module that names the rows of any optimizer step.

    The class has a single base: old versions of jsonargparse list a class once for each path to its base.

    Args:
        arguments: the constructor's arguments by name.
    """

    @without_frames
    def rows_of_step(self, step: int, rank: int | None = None) -> StepRows:
        """Return the rows of an optimizer step in the past or in the future. Does not read the rows.

        Step ``n`` changes the weights from ``trainer.global_step == n`` to ``n + 1``. Loggers show its loss at step
        ``n``, and a checkpoint named ``step=n`` has the weights before it. With ``accumulate_grad_batches`` a step has
        several batches. Future steps assume that the run continues with the present settings.

        Call it during or after a fit, or on a data module that was loaded from a checkpoint:
        ``LazyH5DataModule.load_from_checkpoint("last.ckpt").rows_of_step(48213)``.

        Args:
            step: the step, from 0.
            rank: the samples of one rank; None for all ranks.

        Raises:
            H5ValueError: the step cannot be determined: it is before the history in the checkpoint, or the model steps
                its optimizers itself.
            H5ResumeError: the files or settings have changed since the step.
        """
        parts = self._find_step(step, rank)
        samples: list[StepSample] = []
        for batch in parts.batches:
            origins = origins_of(parts.dataset, batch.rows, batch.epoch)
            indices = (batch.rows % parts.dataset.n_rows).tolist()
            samples += [
                StepSample(batch.rank, batch.batch, *origin, index)
                for origin, index in zip(origins, indices, strict=True)
            ]
        epoch, first, stop = parts.stretch.batches_of(step)
        return StepRows(step, epoch, parts.stretch.world_size, stop - first, tuple(samples))

    @without_frames
    def batches_of_step(self, step: int, rank: int | None = None) -> list[Any]:
        """Return the batches of an optimizer step as the loader yielded them, with the same random draws.

        The rows are read from the files now, on the CPU. Batches are not moved to a device, and hooks of the trainer
        do not run.

        Args:
            step: see ``rows_of_step``, which raises the same errors.
            rank: see ``rows_of_step``.

        Returns:
            The batches in the order of ranks: one for each rank, or several with ``accumulate_grad_batches``.
        """
        parts, function = self._find_step(step, rank), self._options.collate_function
        collate = None if function is None else SampleCollate(function, parts.dataset.batch_transform)
        seed = parts.stretch.order.seed
        return [
            read_again(
                parts.dataset,
                BatchToken(batch.epoch, batch.batch, batch.rows, collate is not None, seed, batch.position),
                collate,
            )
            for batch in parts.batches
        ]

    def _find_step(self, step: int, rank: int | None) -> _FoundStep:
        step = whole(step, "step", least=0)
        stretch = self.run_history.stretch_of(step)
        n_ranks = stretch.world_size
        if rank is not None and whole(rank, "rank", least=0) >= n_ranks:
            raise H5ValueError(
                f"the rows of rank {rank} were requested; step {step} has ranks 0 to {n_ranks - 1}. Pass one of them."
            )
        data = self.training_data(stretch.order.seed)
        recipe_of = self.recipes_of_ranks(data.dataset, stretch.order, n_ranks)
        check_run(stretch, seed=data.seed, n_rows=data.dataset.n_rows, recipe=recipe_of(0), identity=data.identity)
        ranks = range(n_ranks) if rank is None else [rank]
        return _FoundStep(stretch, data.dataset, list(batches_of_step(stretch, step, recipe_of, ranks)))

    def training_data(self, seed: int) -> TrainingData:
        """Return the data of a run, from the last ``setup``, or opened now.

        Args:
            seed: seed of the run.
        """
        raise NotImplementedError

    def recipes_of_ranks(
        self, dataset: RowDataset, order: OrderParameters, world_size: int
    ) -> Callable[[int], EpochRecipe]:
        """Return a function from a rank to the recipe of its epochs.

        Args:
            dataset: the training data.
            order: the settings of the order of a run.
            world_size: number of ranks.
        """
        recipe = self.order_of(dataset, shuffles=order.mode != "none").recipe or EachRowOnce(dataset.blocks())
        return lambda rank: recipe
