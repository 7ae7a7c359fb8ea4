"""Memory for a shard, private to a process or shared by the processes of a machine."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5Error, H5ValueError

__all__ = ["ShardMemory"]

PAGE = mmap.PAGESIZE
NAME = "lightning_h5"


class ShardMemory:
    """Memory for columns of bytes. Shared memory has a descriptor and no name, so it ends with its last process.

    Args:
        sizes: for each column its rows and the bytes of a row.
        shared: whether other processes may map it, too.
        descriptor: of memory that another process shared. This object closes it.
        name: of shared memory, in the list of a process's mappings.

    Attributes:
        columns: the memory, shape ``(n_rows, row_bytes)`` each.

    Raises:
        H5Error: the system has too little memory.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        *,
        shared: bool = False,
        descriptor: int | None = None,
        name: str = NAME,
    ) -> None:
        self._sizes = list(sizes)
        self._pinned: list[int] = []
        self._fd: int | None = None
        self._block: mmap.mmap | None = None
        self._pid = os.getpid()
        if not shared:
            # NumPy uses huge pages for large arrays if available: filling them takes a sixth of the time.
            self.columns = [_allocate(shape) for shape in sizes]
            return
        starts, n_bytes = _places(sizes)
        self._fd = _descriptor(n_bytes, name) if descriptor is None else descriptor
        try:
            block = mmap.mmap(self._fd, n_bytes)
        except (OSError, ValueError) as error:
            self.close()
            raise H5Error(f"{n_bytes:,} bytes of shared memory cannot be mapped: {error}. {_ADVICE}") from error
        with suppress(OSError, AttributeError):
            block.madvise(mmap.MADV_HUGEPAGE)
        self._starts, self._block = starts, block
        self.columns = [
            np.frombuffer(block, np.uint8, n_rows * row_bytes, start).reshape(n_rows, row_bytes)
            for start, (n_rows, row_bytes) in zip(starts, sizes, strict=True)
        ]

    @classmethod
    def of_process(cls, pid: int, descriptor: int, sizes: Sequence[tuple[int, int]], name: str = NAME) -> Self:
        """Return memory that another process of this machine shared.

        Args:
            pid: the process.
            descriptor: of the memory, in that process.
            sizes: see the class.
            name: see the class.

        Raises:
            OSError: the system denies access to the other process's descriptors, or that process has ended.
            H5Error: the descriptor is not of such memory, or the memory cannot be mapped.
        """
        path = f"/proc/{pid}/fd/{descriptor}"
        if name not in os.readlink(path):
            raise H5Error(f"{path} is not shared memory of this package.")
        return cls(sizes, shared=True, descriptor=os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def n_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(n_rows * row_bytes for n_rows, row_bytes in self._sizes)

    @property
    def descriptor(self) -> int | None:
        """Descriptor of shared memory, in this process."""
        return self._fd

    def write(self, column: int, start: int, rows: npt.NDArray[Any]) -> None:
        """Write rows to a shared column by its descriptor.

        Writing through the map would end the process with SIGBUS if the system has no memory left. It is also slower,
        since the system clears each page first.

        Args:
            column: its number.
            start: the first row.
            rows: C-contiguous, with the column's bytes.

        Raises:
            H5Error: the system has no memory left.
        """
        assert self._fd is not None, "private memory is written to as it is"
        data, place = rows.reshape(-1).view(np.uint8), self._starts[column] + start * self._sizes[column][1]
        while len(data):
            try:
                n_written = os.pwrite(self._fd, data.data, place)
            except OSError as error:
                raise H5Error(
                    f"the system has no memory left for a shard of {self.n_bytes:,} bytes: {error}. {_ADVICE}"
                ) from error
            data, place = data[n_written:], place + n_written

    def discard(self, start: int, stop: int) -> None:
        """Return the pages between two bytes of shared memory to the system, for all processes that share it."""
        start, stop = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
        if self._block is not None and start < stop:
            with suppress(OSError, AttributeError):  # not supported by the system, or for this memory
                self._block.madvise(mmap.MADV_REMOVE, start, stop - start)

    def pin(self) -> str | None:
        """Lock the memory's pages for copies to a GPU, in place. Return the reason if CUDA refuses."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        for column in self.columns:
            start, n_bytes = column.__array_interface__["data"][0], column.nbytes
            if n_bytes and (code := int(runtime.cudaHostRegister(start, n_bytes, 0))):
                self.unpin()
                return f"cudaHostRegister gave error {code} for {n_bytes:,} bytes"
            self._pinned += [start] if n_bytes else []
        return None

    def unpin(self) -> None:
        """Unlock the pages."""
        if self._pinned and self._pid == os.getpid():  # locks are not inherited by forked children
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            for start in self._pinned:
                runtime.cudaHostUnregister(start)
        self._pinned = []

    def close(self) -> None:
        """Release the memory; other processes keep it. It must not be read after that."""
        self.unpin()
        self.columns = []
        self._block = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        if hasattr(self, "_pinned"):
            self.close()

    @property
    def can_be_sent(self) -> bool:
        """Whether a process is being started, and this shared memory can be sent to it."""
        return self._fd is not None and get_spawning_popen() is not None

    def __getstate__(self) -> dict[str, Any]:
        if self._fd is None or not self.can_be_sent:
            raise TypeError("only shared memory goes to another process, and only while that is being started")
        return {"sizes": self._sizes, "descriptor": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["sizes"], shared=True, descriptor=state["descriptor"].detach())  # type: ignore[misc]


_ADVICE = (
    "Hold less (a smaller dtype, fewer fields, more ranks), or read on demand, with the lazy dataset or data module."
)


def _allocate(shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
    try:
        return np.empty(shape, np.uint8)
    except MemoryError as error:
        raise H5Error(f"the system has no {math.prod(shape):,} bytes of memory. {_ADVICE}") from error


def _places(sizes: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Return the starts of columns in a block, each at a page boundary, and the block's bytes."""
    starts, end = [], 0
    for n_rows, row_bytes in sizes:
        starts.append(end)
        end += -(-n_rows * row_bytes // PAGE) * PAGE
    return starts, max(PAGE, end)


def _descriptor(n_bytes: int, name: str) -> int:
    """Return a descriptor of new memory without a name. The system frees it when its last process ends."""
    fd = None
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(name, os.MFD_CLOEXEC)
        else:  # pragma: no cover  # not Linux: a file that has no name any more
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, n_bytes)
    except OSError as error:
        if fd is not None:
            os.close(fd)
        raise H5ValueError(f"the system has no {n_bytes:,} bytes of shared memory: {error}. {_ADVICE}") from error
    return fd
