"""Rows in, ndarray out. Which reader an array gets follows from its layout, never from the user."""

from ..files import ArrayLayout, OpenOptions
from ..stats import Counters
from ..types import RowReader
from .contiguous import ContiguousReader, MappedReader
from .held import HeldReader
from .plain import PlainReader

__all__ = ["ContiguousReader", "HeldReader", "MappedReader", "PlainReader", "open_reader"]


def open_reader(
    layout: ArrayLayout,
    options: OpenOptions,
    *,
    mmap: bool = False,
    held_bytes: int = 0,
    counters: Counters | None = None,
) -> RowReader:
    """The reader for an array. Opens nothing yet.

    Args:
        layout: the array.
        options: how its file is opened where the HDF5 library reads.
        mmap: map contiguous arrays into memory (see ``MappedReader`` for the risk).
        held_bytes: keep all rows in memory after the first read, if text does not turn out longer; 0 does not.
        counters: where bytes read and decoded are counted.
    """
    reader: RowReader
    if layout.offset is None:
        reader = PlainReader(layout, options, counters)
    else:
        reader = MappedReader(layout, counters) if mmap and not held_bytes else ContiguousReader(layout, counters)
    return HeldReader(reader, held_bytes) if held_bytes else reader
