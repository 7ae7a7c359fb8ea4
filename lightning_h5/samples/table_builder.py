"""One loop that looks at files, one after the other, and makes a table of their samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy.typing as npt

from ..catalog import WITHOUT_THEM, ArrayRequest, Skip, collector_paused, each_readable, with_stacks
from ..hdf5 import GroupError
from ..order import resolve_replica
from ..progress_bar import with_bar
from .row_table import RowTable

__all__ = ["TableBuilder", "collected"]

MIN_FILES_OF_BAR = 50

Builder = TypeVar("Builder", bound="TableBuilder")


class TableBuilder(ABC):
    """Collects what files have, and makes a table of it. One class for each kind of table."""

    @abstractmethod
    def look(self, path: str) -> Any:
        """Return what a file has.

        Raises:
            H5FileError: it is missing or broken.
        """

    @abstractmethod
    def add(self, path: str, contents: Any) -> None:
        """Add a file, with what ``look`` returned of it.

        Raises:
            H5ValueError: it does not belong with those before it.
        """

    @abstractmethod
    def table(self) -> RowTable:
        """Return the table of all samples of the files.

        Raises:
            H5ValueError: there are none, or arrays do not belong together.
        """

    def values_of(self, key: str) -> list[npt.NDArray[Any]]:
        """Return the values of a column, part by part: one for each segment, or one for each step."""
        raise NotImplementedError

    @property
    def cut_by(self) -> list[str]:
        """Columns that cut rows into segments: each row that filters keep has a value."""
        return []


def collected(
    make: Callable[[Sequence[ArrayRequest]], Builder],
    asked: Sequence[ArrayRequest],
    paths: Sequence[str],
    *,
    skip: Skip | None = None,
    advice: str = WITHOUT_THEM,
) -> Builder:
    """Return what has collected some arrays of files.

    Args:
        make: returns what collects files with some arrays.
        asked: the arrays.
        paths: the files.
        skip: called with files that are missing or broken, which are left out; None raises their errors.
        advice: what to do to train without broken files, for their errors.

    Raises:
        H5FileError: a file is missing or broken, or all of them are.
        H5KeyError: an array is missing.
        H5ValueError: arrays do not belong together.
    """
    builder = make(asked)
    shows_progress = len(paths) >= MIN_FILES_OF_BAR and resolve_replica().rank == 0  # all ranks look at them
    bar = with_bar(paths, "looking at files", unit="file", shows_progress=shows_progress, delay=2)
    try:
        with collector_paused():
            for path, contents in each_readable(paths, builder.look, skip, advice, bar):
                builder.add(path, contents)
    except GroupError as error:  # a list of names that is not of members of a table is one of arrays
        if (stacks := with_stacks(asked, error)) is None:
            raise
        return collected(make, stacks, paths, skip=skip, advice=advice)
    return builder
