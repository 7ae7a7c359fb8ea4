"""Read the undamaged rows of damaged data; the damaged ones are located by bisection."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import H5CorruptError
from ..types import IntArray

__all__ = ["salvaged"]


def _is_damage(error: Exception) -> bool:
    """Return whether an error belongs to the stored bytes of some rows."""
    return isinstance(error, H5CorruptError)


def salvaged(
    read: Callable[[IntArray], object],
    places: IntArray,
    *,
    blocks: IntArray | None = None,
    is_of_places: Callable[[Exception], bool] = _is_damage,
    most: int | None = None,
) -> list[tuple[IntArray, Exception]]:
    """Read at some places; where that fails read halves, down to single places or blocks.

    Args:
        read: reads at some places.
        places: all of them; shape ``(n,)``.
        blocks: the block of each place, if a block fails as a whole; None if places fail one by one.
        is_of_places: whether an error belongs to some of the places; others are raised.
        most: failures after which the rest is no longer tried, and counts as failed; None tries all.

    Returns:
        Places that cannot be read, with their errors, in the order of ``places``.
    """
    failures: list[tuple[IntArray, Exception]] = []

    def read_part(at: IntArray) -> None:
        if not len(at):
            return
        if most is not None and len(failures) >= most:
            failures.append((places[at], failures[-1][1]))
            return
        try:
            read(places[at])
        except Exception as error:
            if not is_of_places(error):
                raise
            if len(at) == 1 or (blocks is not None and (blocks[at] == blocks[at[0]]).all()):
                failures.append((places[at], error.with_traceback(None)))  # frames would keep the rows in memory
                return
        else:
            return
        half = len(at) // 2
        read_part(at[:half])
        read_part(at[half:])

    read_part(np.arange(len(places)))
    return failures
