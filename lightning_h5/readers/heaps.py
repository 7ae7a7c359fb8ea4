"""A look at the heaps that hold a file's text, before the HDF5 library walks them: it may walk for ever.

Text of any length lies in collections of objects elsewhere in the file, and a row has a reference to it. A hole of
zeros in a collection, which a lost block of a disk leaves, is an object that ends where it begins: the library never
gets past it, and takes its lock with it. In a table it walks them for the numbers beside text, too.
"""

from __future__ import annotations

import os
import struct
import threading
from typing import Any

import numpy as np

from ..errors import H5CorruptError
from ..files import ArrayLayout, OpenOptions, process_pool
from ..stats import Counters
from ..types import IntArray
from .codecs import why_not_decodable
from .placed import PlacedReader
from .slabs import SlotMemory
from .sources import ChunkSource, ReaderSource, SlabSource

__all__ = ["HeapGuard", "heap_guard"]

REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("number", "<u4")])
HEADER = 16
OBJECT = struct.Struct("<HHIQ")  # number, users, nothing, bytes
NOWHERE = 2**64 - 1
REFERENCES = 4096  # that are looked at together where they do not lie in chunks


def heap_guard(layout: ArrayLayout, options: OpenOptions) -> HeapGuard | None:
    """What looks at an array's text before it is read; None where it is no such text, or only the library finds it."""
    stored = layout.references
    if stored is None or options.swmr:  # a live writer moves the chunk that it writes to
        return None
    source: SlabSource
    if stored.is_placed:
        source = ReaderSource(PlacedReader(stored), REFERENCES)
    elif why_not_decodable(stored) is None:
        source = ChunkSource(stored, Counters())
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
        self._lock = threading.Lock()

    def check(self, rows: IntArray) -> None:
        """Makes sure that the text of rows can be read.

        Raises:
            H5CorruptError: a collection is damaged, or there is none.
        """
        with self._lock:
            new = [
                slab for slab in np.unique(rows // self._references.rows_per_slab).tolist() if slab not in self._slabs
            ]
        for slab in new:
            addresses = self._addresses(slab)
            with process_pool().descriptor(self._layout.path) as fd:
                n_file = os.fstat(fd).st_size
                for address in sorted(addresses - self._heaps):
                    if (why := _damage(fd, address + self._user_block, n_file)) is not None:
                        raise H5CorruptError(
                            f"text in rows of {self._layout.key!r} in {self._layout.path!r} (from row "
                            f"{slab * self._references.rows_per_slab} on) cannot be read: {why}. The file is damaged "
                            "there; copy it again."
                        )
            with self._lock:
                self._heaps |= addresses
                self._slabs.add(slab)

    def _addresses(self, slab: int) -> set[int]:
        source, axes = self._references, self._layout.axes
        rows = np.zeros((source.rows_per_slab, *axes), dtype=(stored := self._stored))
        memory = SlotMemory(rows, np.zeros(1, dtype=np.int64), source.rows_per_slab)
        source.load([slab], range(source.n_parts), memory)
        addresses: set[int] = set()
        for name in stored.names or ():
            found = np.ascontiguousarray(rows[: source.n_rows - slab * source.rows_per_slab][name]).view(REFERENCE)
            addresses |= set(found["address"][found["length"] > 0].tolist())
        return addresses - {0, NOWHERE}


def _damage(fd: int, address: int, n_file: int) -> str | None:
    """What is wrong with the collection at an address; None where nothing is."""
    head = os.pread(fd, HEADER, address) if address < n_file else b""
    n_bytes = int.from_bytes(head[8:], "little")
    if head[:5] != b"GCOL\x01" or not HEADER < n_bytes <= n_file - address:
        return f"at byte {address:,} should be a heap of text, and is none"
    heap = os.pread(fd, n_bytes, address)
    at = HEADER
    while at + OBJECT.size <= len(heap):
        number, _, _, size = OBJECT.unpack_from(heap, at)
        step = OBJECT.size + (size + 7) // 8 * 8 if number else size  # what is free says its size with its header
        if step < OBJECT.size or step > len(heap) - at:
            return f"the heap of text at byte {address:,} is damaged at its byte {at:,}"
        at += step
    return None
