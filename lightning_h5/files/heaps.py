"""A look at a heap of a file: collections of objects of any size, such as text, that others refer to."""

from __future__ import annotations

import os
import struct

__all__ = ["NOWHERE", "heap_damage"]

NOWHERE = 2**64 - 1
HEADER = 16
OBJECT = struct.Struct("<HHIQ")  # number, users, nothing, bytes


def heap_damage(fd: int, address: int) -> str | None:
    """What is wrong with the heap at a place of a file; None where nothing is.

    A hole of zeros in it, which a lost block of a disk leaves, is an object that ends where it begins: the HDF5 library
    never gets past it, and takes its lock with it.

    Args:
        fd: the file, open.
        address: the heap's first byte.
    """
    n_file = os.fstat(fd).st_size
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
