"""Read what can be read of damaged data: what cannot is found by reading halves."""

from __future__ import annotations

from collections.abc import Callable

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
) -> list[tuple[IntArray, Exception]]:
    """Read at some places; where that fails read halves, down to single places or blocks.

    Args:
        read: reads at some places.
        places: all of them; shape ``(n,)``.
        blocks: the block of each place, if a block fails as a whole; None if places fail one by one.
        is_of_places: whether an error belongs to some of the places; others are raised.

    Returns:
        Places that cannot be read, with their errors, in the order of ``places``.
    """
    if not len(places):
        return []
    try:
        read(places)
    except Exception as error:
        if not is_of_places(error):
            raise
        if len(places) == 1 or (blocks is not None and (blocks == blocks[0]).all()):
            return [(places, error.with_traceback(None))]  # frames would keep what was read
    else:
        return []
    half = len(places) // 2
    halves = (slice(None, half), slice(half, None))
    return [
        failure
        for part in halves
        for failure in salvaged(
            read, places[part], blocks=None if blocks is None else blocks[part], is_of_places=is_of_places
        )
    ]
