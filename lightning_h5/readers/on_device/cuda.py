"""Decoding on a CUDA device by nvCOMP, NVIDIA's library of compressors."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection

from ...errors import H5Error, H5FileError, H5ValueError
from .device import DEVICES, BatchCodec
from .pieces import Compression, StoredPieces

__all__ = ["CudaDevice"]

VERSION = 6
"""Major version of nvCOMP whose C functions are called; their arguments differ between major versions."""

NAMES: dict[Compression, str] = {"deflate": "Deflate", "lz4": "LZ4", "zstd": "Zstd"}


CUDA_BACKEND = b"\x02"
"""Decodes by kernels. The hardware engine of newer GPUs reports success for damaged input, and refuses long chunks."""

N_STREAMS = 4
"""Streams that the threads of a process share: the allocator keeps free memory for each."""


class _Options(ctypes.Structure):
    """Options of decoding: the backend, and others, of which zeros are the defaults."""

    _fields_ = [("octets", ctypes.c_char * 64)]  # as ctypes has it


class _Alignments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("input", "output", "temp")]


class CudaDevice:
    """The present CUDA device.

    Raises:
        H5ValueError: there is no CUDA device.
        H5FileError: nvCOMP is not installed, or is another major version.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise H5ValueError(
                "files.decode_on='cuda' was given, and this machine has no CUDA device that torch can use. Remove it; "
                "chunks are then decoded on the CPU, to the same values."
            )
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._library = _nvcomp()
        self._streams: list[torch.cuda.Stream] = [
            torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for _ in range(N_STREAMS)
        ]
        self._numbers, self._own = count(), threading.local()

    def codec(self, compression: Compression) -> BatchCodec | None:
        """See ``DecodingDevice.codec``."""
        with self.stream():
            return NvcompCodec(self._library, NAMES[compression], self.device)

    def _stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream | None = getattr(self._own, "stream", None)
        if stream is None:
            # Otherwise a thread of a rank would begin with the first device, and take memory of it.
            torch.cuda.set_device(self.device)
            stream = self._own.stream = self._streams[next(self._numbers) % N_STREAMS]
        return stream

    def stream(self) -> AbstractContextManager[object]:
        """See ``DecodingDevice.stream``."""
        return torch.cuda.stream(self._stream())

    @contextmanager
    def work(self) -> Iterator[None]:
        """See ``DecodingDevice.work``."""
        stream = self._stream()
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()

    def host_memory(self, n_bytes: int) -> torch.Tensor:
        """See ``DecodingDevice.host_memory``: page-locked memory, which torch uses again once copies have ended."""
        with suppress(RuntimeError):  # the system locks no more pages
            return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
        return torch.empty(n_bytes, dtype=torch.uint8)

    def own(self, batch: object) -> None:
        """See ``DecodingDevice.own``."""
        stream = torch.cuda.current_stream(self.device)

        def record(tensor: torch.Tensor) -> None:
            if tensor.device == self.device:
                tensor.record_stream(stream)

        apply_to_collection(batch, torch.Tensor, record)


class NvcompCodec:
    """One of nvCOMP's decoders of a batch.

    Args:
        library: nvCOMP.
        name: the name of the compression in its functions.
        device: the device.
    """

    def __init__(self, library: ctypes.CDLL, name: str, device: torch.device) -> None:
        self._device, self._name = device, name
        self._decompress = library[f"nvcompBatched{name}DecompressAsync"]
        self._temporary = library[f"nvcompBatched{name}DecompressGetTempSize"]
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._decompress.argtypes = [
            *(pointer, pointer, pointer, pointer, size, pointer, size, pointer),
            *(_Options, pointer, pointer),
        ]
        self._temporary.argtypes = [size, size, _Options, ctypes.POINTER(size), size, pointer]
        alignments, function = _Alignments(), library[f"nvcompBatched{name}DecompressGetRequiredAlignments"]
        function.argtypes = [_Options, ctypes.POINTER(_Alignments)]
        self._check(function(_Options(CUDA_BACKEND), ctypes.byref(alignments)))
        self.alignment = max(alignments.input, 16)

    def decode(self, stored: torch.Tensor, pieces: StoredPieces, out: torch.Tensor) -> torch.Tensor:
        """See ``BatchCodec.decode``."""
        n, stream = len(pieces.starts), torch.cuda.current_stream(self._device)
        numbers = torch.from_numpy(
            np.stack([stored.data_ptr() + pieces.starts, pieces.sizes, pieces.lengths, out.data_ptr() + pieces.firsts])
        )
        addresses = numbers.pin_memory().to(self._device, non_blocking=True)
        lengths = torch.zeros(n, dtype=torch.int64, device=self._device)
        statuses = torch.zeros(n, dtype=torch.int32, device=self._device)
        n_temporary, longest = ctypes.c_size_t(), int(pieces.lengths.max(initial=0))
        options, handle = _Options(CUDA_BACKEND), ctypes.c_void_p(stream.cuda_stream)
        total = int(pieces.lengths.sum())
        self._check(self._temporary(n, longest, options, ctypes.byref(n_temporary), total, handle))
        temporary = torch.empty(n_temporary.value, dtype=torch.uint8, device=self._device)
        sources, sizes, room, targets = (addresses[row].data_ptr() for row in range(4))
        self._check(
            self._decompress(
                *(sources, sizes, room, lengths.data_ptr(), n, temporary.data_ptr(), n_temporary, targets),
                *(options, statuses.data_ptr(), handle),
            )
        )
        return (statuses != 0) | (lengths != addresses[2])

    def _check(self, status: int) -> None:
        if status:
            raise H5Error(
                f"nvCOMP cannot decode a batch of {self._name} (status {status}). Remove files.decode_on, which "
                "decodes on the CPU, to the same values."
            )


@cache
def _nvcomp() -> ctypes.CDLL:
    """Return the shared library of nvCOMP."""
    has_nvidia = importlib.util.find_spec("nvidia") is not None
    spec = importlib.util.find_spec("nvidia.libnvcomp") if has_nvidia else None
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for path in Path(folder).glob(f"lib64/libnvcomp.so.{VERSION}"):
            return ctypes.CDLL(str(path))
    which = "is not installed" if spec is None else "is not the version that is installed"
    raise H5FileError(
        f"files.decode_on='cuda' needs nvCOMP {VERSION}, which {which}. Run: pip install 'lightning-h5[gpu]'"
    )


DEVICES["cuda"] = CudaDevice
