"""Which rows an optimizer step was trained on, from the history of the run: ``rows_of_step`` of data modules."""

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
    """A sample of an optimizer step, and where it comes from.

    Attributes:
        rank: the rank that trained on it.
        batch: number of its batch in the epoch on that rank, from 0 (``batch_idx``).
        file: path of its file.
        row: its row in the arrays of its file, or of its group. Of a window the row of its step, of a whole segment its
            number in its file or group, of a patch the number of the sample.
        segment: name of its segment; None if samples are rows.
        step: its step in the segment; of a patch its first index along each axis that is cut; None if samples are rows.
        source: its source in a mixture whose samples are dicts; None otherwise.
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
        step: the step: ``trainer.global_step`` before it.
        epoch: from 0.
        world_size: number of ranks.
        n_batches: batches of the step on each rank.
        samples: in the order of ranks, then of batches, then in the order of each batch.
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
        dataset: the samples of all ranks, or of this one; nothing needs to be loaded.
        seed: of the run.
        identity: of the data.
    """

    dataset: RowDataset
    seed: int
    identity: Identity


class _FoundStep(NamedTuple):
    """An optimizer step, found in the history.

    Attributes:
        stretch: that it belongs to.
        dataset: the training data.
        batches: its batches on the requested ranks.
    """

    stretch: Stretch
    dataset: RowDataset
    batches: list[StepBatch]


class NamesRows(TransformsOnDevice):
    """A data module that names the rows of any optimizer step.

    Bases are in one line: old versions of jsonargparse list a class once for each way to its base.

    Args:
        arguments: the constructor's arguments by name.
    """

    @without_frames
    def rows_of_step(self, step: int, rank: int | None = None) -> StepRows:
        """Return which rows an optimizer step was, or will be, trained on. Reads no rows.

        Step ``n`` takes the weights from ``trainer.global_step == n`` to ``n + 1``. Loggers show its loss at step
        ``n``, and a checkpoint named ``step=n`` has the weights before it. With ``accumulate_grad_batches`` a step has
        several batches. Steps after the present one are those of a run that goes on with the present settings.

        Call it during or after a fit, or on a data module that was loaded from a checkpoint:
        ``LazyH5DataModule.load_from_checkpoint("last.ckpt").rows_of_step(48213)``.

        Args:
            step: the step, from 0.
            rank: the samples of one rank; None for all ranks.

        Raises:
            H5ValueError: the step is not determined: it comes before the history in the checkpoint, or the model steps
                its optimizers itself.
            H5ResumeError: the step was trained on other files, or with other settings, than the present ones.
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
        """Return the batches of an optimizer step as the loader yielded them, with the draws of their transforms.

        They are read from the files now, on the CPU. What the trainer does after that is left out: moving batches to a
        device, and its hooks.

        Args:
            step: see ``rows_of_step``, as for ``rank`` and errors.
            rank: see above.

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
            raise H5ValueError(f"the rows of rank {rank} were requested; step {step} had ranks 0 to {n_ranks - 1}.")
        data = self.training_data(stretch.order.seed)
        recipe_of = self.recipes_of_ranks(data.dataset, stretch.order, n_ranks)
        check_run(stretch, seed=data.seed, n_rows=data.dataset.n_rows, recipe=recipe_of(0), identity=data.identity)
        ranks = range(n_ranks) if rank is None else [rank]
        return _FoundStep(stretch, data.dataset, list(batches_of_step(stretch, step, recipe_of, ranks)))

    def training_data(self, seed: int) -> TrainingData:
        """Return the data of a run: that of the last ``setup``, or opened now.

        Args:
            seed: of the run.
        """
        raise NotImplementedError

    def recipes_of_ranks(
        self, dataset: RowDataset, order: OrderParameters, world_size: int
    ) -> Callable[[int], EpochRecipe]:
        """Return a function that returns how a rank's epochs visit rows.

        Args:
            dataset: the training data.
            order: the settings of the order of a run.
            world_size: number of ranks.
        """
        recipe = self.order_of(dataset, shuffles=order.mode != "none").recipe or EachRowOnce(dataset.blocks())
        return lambda rank: recipe
