"""Reading in tasks, on all cores, with a bar for who waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from tqdm import tqdm

from ..readers import BulkTask, do_tasks, usable_cores

__all__ = ["do_with_bar"]


def do_with_bar(
    tasks: Sequence[BulkTask],
    what: str,
    *,
    delay: float = 2,
    shows_bar: bool = True,
    tell: Callable[[int], None] | None = None,
) -> None:
    """Does tasks on all cores.

    Args:
        tasks: what to do.
        what: it is called by the bar.
        delay: seconds before the bar is shown.
        shows_bar: whether it is.
        tell: is called now and then, in this thread, with the bytes done since the last time.
    """
    with closing(
        tqdm(
            total=sum(task.n_bytes for task in tasks),
            desc=what,
            unit="iB",  # tqdm puts a K, an M or a G before it
            unit_scale=True,
            unit_divisor=1024,
            delay=delay,
            leave=False,
            disable=not shows_bar,
        )
    ) as bar:

        def done(n_bytes: int) -> None:
            bar.update(n_bytes)
            if tell is not None:
                tell(n_bytes)

        do_tasks(tasks, usable_cores(), done)
