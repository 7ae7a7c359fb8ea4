"""The bar that tools show to who waits."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

__all__ = ["progress_bar"]


def progress_bar(total: int, what: str, *, shows_progress: bool, unit: str = "iB", delay: float = 1.0) -> tqdm[Any]:
    """A bar that goes once it is closed, and shows only where the standard error is a terminal.

    Args:
        total: of the units; ``update`` adds to what is done of them.
        what: it is called so.
        shows_progress: whether it is shown at all.
        unit: of what is counted; bytes unless told otherwise.
        delay: seconds before it is shown.
    """
    counts_bytes = unit == "iB"  # tqdm puts a K, an M or a G before it
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=counts_bytes,
        unit_divisor=1024 if counts_bytes else 1000,
        delay=delay,
        leave=False,
        disable=None if shows_progress else True,  # None: it looks whether somebody watches
    )
