"""Numbers that cannot work out, found before training starts."""

from __future__ import annotations

from ..errors import H5ValueError
from ..sampling import TrainingCut

__all__ = ["check_batch_size", "check_rows"]


def check_batch_size(batch_size: int | None, name: str) -> None:
    """Refuses a batch size that is no whole number above zero; None passes.

    Raises:
        H5ValueError: it is not.
    """
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise H5ValueError(f"{name}={batch_size!r} was given. Pass a whole number of rows, at least 1.")


def check_rows(split: str, n_rows: int, world_size: int, cut: TrainingCut | None) -> str | None:
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
    if cut.n_sitting_out and not cut.drop_last:
        return (
            f"batch_size=1 on {world_size} ranks: {cut.n_sitting_out} of {n_rows} rows, other ones each epoch, sit "
            "out so that all ranks take equally many steps"
        )
    return None
