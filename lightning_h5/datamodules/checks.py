"""Arguments and numbers that cannot work out, found before training starts."""

from __future__ import annotations

from typing import Any

from ..errors import H5ValueError
from ..order import EvaluationBatches, TrainBatches

__all__ = ["check_equal_batches", "check_rows"]

_GATHER_IN_FORWARD = {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}


def check_rows(split: str, n_rows: int, world_size: int, cut: TrainBatches | None) -> str | None:
    """Whether a split has enough rows for all ranks.

    Args:
        split: its name.
        n_rows: its rows, at least one.
        world_size: number of ranks.
        cut: how an epoch is cut into batches, for training.

    Returns:
        What the user should hear once, if anything.

    Raises:
        H5ValueError: a rank would have no row (only predicting allows that), or ``drop_last`` leaves nothing.
    """
    if n_rows < world_size and split != "predict":
        raise H5ValueError(
            f"the split {split!r} has {n_rows} rows and there are {world_size} ranks; each needs at least one. "
            "Use fewer devices, or more rows."
        )
    if cut is None:
        return None
    if cut.n_steps == 0:
        raise H5ValueError(
            f"drop_last leaves nothing of the {n_rows} rows of 'train': a step takes batch_size {cut.batch_size} x "
            f"{world_size} ranks = {cut.batch_size * world_size} rows. Make batch_size smaller, or leave drop_last out."
        )
    if cut.n_left_out and not cut.drop_last:
        return (
            f"batch_size=1 on {world_size} ranks: {cut.n_left_out} of {n_rows} rows, other ones each epoch, sit "
            "out so that all ranks take equally many steps"
        )
    return None


def check_equal_batches(split: str, n_rows: int, batch_size: int, world_size: int, strategy: Any) -> None:
    """Refuses evaluation where some ranks have a batch more, and the others would be waited for in ``forward``.

    Args:
        split: its name.
        n_rows: its rows, at least one.
        batch_size: rows of a batch of evaluation on one rank.
        world_size: number of ranks.
        strategy: the trainer's.

    Raises:
        H5ValueError: the counts differ, under a strategy that gathers parameters in ``forward``.
    """
    cuts = [EvaluationBatches(n_rows, batch_size, world_size, rank) for rank in (0, world_size - 1)]
    most, least = (cut.n_steps for cut in cuts)  # the first ranks have the larger shards
    names = {kind.__name__ for kind in type(strategy).__mro__}
    if most != least and names & _GATHER_IN_FORWARD:
        raise H5ValueError(
            f"the {n_rows} rows of {split!r} make {most} batches of {batch_size} on some of {world_size} ranks and "
            f"{least} on others, which {type(strategy).__name__} would wait for, since it gathers parameters in "
            "forward. Pass eval_batch_size=2 or more, and have a row or more for each rank."
        )
