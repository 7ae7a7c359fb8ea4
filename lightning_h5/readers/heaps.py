"""A look at the heaps that hold a file's text, before the HDF5 library walks them: it may walk for ever.

Text of any length lies in collections of objects elsewhere in the file, and a row has a reference to it. A hole of
zeros in a collection, which a lost block of a disk leaves, is an object that ends where it begins: the library never
gets past it, and takes its lock with it. In a table it walks them for the numbers beside text, too.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from ..counters import Counters
from ..errors import H5CorruptError, H5ValueError
from ..hdf5 import ArrayLayout, OpenOptions, process_pool
from ..hdf5.checks import size_text
from ..hdf5.headers import NOWHERE, heap_damage
from ..types import IntArray
from .chunk_cache import SlotMemory
from .chunk_loader import ChunkLoader, ReaderSource, SlabSource
from .contiguous import ContiguousReader
from .filters import why_not_decodable

__all__ = ["HeapGuard", "heap_guard"]

REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("number", "<u4")])
MUCH = 16 << 20  # bytes of text in a slab, from which on it is counted row by row
MAX_BYTES, MAX_TIMES = 1 << 30, 10  # of text read together; of what the file has, where each row has text of its own
REFERENCES = 4096  # that are looked at together where they do not lie in chunks


def heap_guard(layout: ArrayLayout, options: OpenOptions) -> HeapGuard | None:
    """What looks at an array's text before it is read; None where it is no such text, or only the library finds it."""
    stored = layout.references
    if stored is None or options.swmr:  # a live writer moves the chunk that it writes to
        return None
    source: SlabSource
    if stored.is_placed:
        source = ReaderSource(ContiguousReader(stored), REFERENCES)
    elif why_not_decodable(stored) is None:
        source = ChunkLoader(stored, Counters())
    else:
        return None
    return HeapGuard(layout, source, stored.stored, layout.user_block)


class HeapGuard:
    """Looks once at each collection that rows refer to.

    Args:
        layout: an array with text of any length.
        references: gives the array's references, as stored.
        stored: of one element, with a field for each place of references.
        user_block: bytes at the start of the file that addresses leave out.
    """

    def __init__(self, layout: ArrayLayout, references: SlabSource, stored: np.dtype[Any], user_block: int) -> None:
        self._layout, self._references, self._user_block = layout, references, user_block
        self._stored = stored
        self._slabs: set[int] = set()
        self._heaps: set[int] = set()
        self._lengths: dict[int, IntArray] = {}  # of rows of slabs with much text
        self._lock = threading.Lock()

    def check(self, rows: IntArray) -> None:
        """Makes sure that the text of rows can be read.

        Raises:
            H5CorruptError: a collection is damaged, or there is none.
            H5ValueError: it is far more text than the file has: many rows refer to the same.
        """
        if (n_bytes := self.n_bytes(rows)) > MAX_BYTES:
            with process_pool().descriptor(self._layout.path, self._layout.guard) as fd:
                n_file = os.fstat(fd).st_size
            if n_bytes > MAX_TIMES * n_file:
                raise H5ValueError(
                    f"{len(rows):,} rows of {self._layout.key!r} in {self._layout.path!r} were asked; with what lies "
                    f"between them they are {size_text(n_bytes)} of text, and the file has {size_text(n_file)} in all: "
                    "rows refer to the same text again and again. Read fewer rows at a time, or do without the "
                    "array; the file may be made to exhaust memory."
                )

    def n_bytes(self, rows: IntArray) -> int:
        """Bytes of text that are read for rows, where there is much of it; what lies between them is read as well."""
        slabs, found = rows // self._references.rows_per_slab, 0
        self._look(slabs)
        for slab in set(self._lengths).intersection(slabs.tolist()):
            inside = rows[slabs == slab] - slab * self._references.rows_per_slab
            found += int(self._lengths[slab][inside.min() : inside.max() + 1].sum())
        return found

    def _look(self, slabs: IntArray) -> None:
        """Looks at the collections that rows of slabs refer to, where nobody has."""
        with self._lock:
            new = [slab for slab in np.unique(slabs).tolist() if slab not in self._slabs]
        for slab in new:
            addresses, lengths = self._references_of(slab)
            with process_pool().descriptor(self._layout.path, self._layout.guard) as fd:
                for address in sorted(addresses - self._heaps):
                    if (why := heap_damage(fd, address + self._user_block)) is not None:
                        raise H5CorruptError(
                            f"text in rows of {self._layout.key!r} in {self._layout.path!r} (from row "
                            f"{slab * self._references.rows_per_slab} on) cannot be read: {why}. The file is damaged "
                            "there; copy it again."
                        )
            with self._lock:
                self._heaps |= addresses
                if lengths.sum() > MUCH:
                    self._lengths[slab] = lengths
                self._slabs.add(slab)

    def _references_of(self, slab: int) -> tuple[set[int], IntArray]:
        """The collections that rows of a slab refer to, and how long the text of each row is."""
        source, axes = self._references, self._layout.axes
        rows = np.zeros((source.rows_per_slab, *axes), dtype=(stored := self._stored))
        memory = SlotMemory(rows, np.zeros(1, dtype=np.int64), source.rows_per_slab)
        source.load([slab], range(source.n_parts), memory)
        rows = rows[: source.n_rows - slab * source.rows_per_slab]
        addresses: set[int] = set()
        lengths = np.zeros(len(rows), dtype=np.int64)
        for name in stored.names or ():
            found = np.ascontiguousarray(rows[name]).view(REFERENCE)
            addresses |= set(found["address"][found["length"] > 0].tolist())
            lengths += found["length"].reshape(len(rows), -1).sum(axis=1, dtype=np.int64)
        return addresses - {0, NOWHERE}, lengths
