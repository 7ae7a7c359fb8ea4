"""The loop that looks at one file after the other, and builds a table of their samples."""

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
    """Collects the contents of files, and builds a table of their samples. Subclasses build one kind of table each."""

    @abstractmethod
    def look(self, path: str) -> Any:
        """Return the contents of a file.

        Raises:
            H5FileError: it is missing or broken.
        """

    @abstractmethod
    def add(self, path: str, contents: Any) -> None:
        """Add a file with the contents that ``look`` returned.

        Raises:
            H5ValueError: it does not fit the files before it.
        """

    @abstractmethod
    def table(self) -> RowTable:
        """Return the table of all samples of the files.

        Raises:
            H5ValueError: there is no sample, or arrays do not belong together.
        """

    def values_of(self, key: str) -> list[npt.NDArray[Any]]:
        """Return the values of a column, part by part: one for each segment, or one for each step."""
        raise NotImplementedError

    @property
    def cut_by(self) -> list[str]:
        """Columns that cut rows into segments. Rows that pass filters must have a value in them."""
        return []


def collected(
    make: Callable[[Sequence[ArrayRequest]], Builder],
    requests: Sequence[ArrayRequest],
    paths: Sequence[str],
    *,
    skip: Skip | None = None,
    advice: str = WITHOUT_THEM,
) -> Builder:
    """Return a builder that has collected some arrays of files.

    Args:
        make: returns a builder for some arrays.
        requests: the arrays.
        paths: the files.
        skip: called with missing or broken files, which are left out; None raises their errors.
        advice: the way to train without broken files, for their errors.

    Raises:
        H5FileError: a file is missing or broken, or all of them are.
        H5KeyError: an array is missing.
        H5ValueError: arrays do not belong together.
    """
    builder = make(requests)
    shows_progress = len(paths) >= MIN_FILES_OF_BAR and resolve_replica().rank == 0  # all ranks look at them
    bar = with_bar(paths, "looking at files", unit="file", shows_progress=shows_progress, delay=2)
    try:
        with collector_paused():
            for path, contents in each_readable(paths, builder.look, skip, advice, bar):
                builder.add(path, contents)
    except GroupError as error:  # a list of names was taken for members of a table, and names arrays of a group
        if (stacks := with_stacks(requests, error)) is None:
            raise
        return collected(make, stacks, paths, skip=skip, advice=advice)
    return builder
