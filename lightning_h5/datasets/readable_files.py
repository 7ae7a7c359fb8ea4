"""Look at one file after the other, without those that are missing or broken if the user asked for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ..errors import H5DataChangedError, H5FileError, listing

__all__ = ["WITHOUT_THEM", "Skip", "each_readable"]

WITHOUT_THEM = "Repair them, or pass a list of files without them; files are never skipped silently."
"""What to do about broken files in classes that have no argument for it."""

Skip = Callable[[str, H5FileError], None]
"""Called with a file that is missing or broken, and is left out, and its error."""

_T = TypeVar("_T")


def each_readable(
    paths: Sequence[str], look: Callable[[str], _T], skip: Skip | None, advice: str, bar: Iterable[str] | None = None
) -> Iterator[tuple[str, _T]]:
    """Yield files with what is found in them, one after the other, without broken ones if the user asked for that.

    Args:
        paths: the files.
        look: looks at one.
        skip: called with a file that is left out; None raises its error.
        advice: what to do to train without broken files, for the error.
        bar: yields the files and shows progress.

    Raises:
        H5FileError: a file is missing or broken, or all of them are.
    """
    n_found = 0
    for path in paths if bar is None else bar:
        try:
            found = look(path)
        except H5FileError as error:
            if skip is not None:
                skip(path, error)
                continue
            # System errors, such as locks, and changed files do not mean that a file is broken.
            is_broken = not isinstance(error, H5DataChangedError) and getattr(error.__cause__, "errno", None) is None
            if len(paths) > 1 and is_broken:
                find = "`lightning-h5 check` finds all unreadable files."
                error.args = (f"{error} It is one of {len(paths):,} files: {find} {advice}",)
            raise
        n_found += 1
        yield path, found
    if not n_found:
        raise H5FileError(f"none of {listing(paths)} can be read. See the error that was logged for each.")
