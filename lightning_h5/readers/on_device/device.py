"""What decoding needs of a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from .pieces import Compression, StoredPieces

__all__ = ["DEVICES", "BatchCodec", "DecodingDevice", "open_device"]


class BatchCodec(Protocol):
    """Decodes many compressed pieces at a time.

    Attributes:
        alignment: number of bytes of which positions of compressed pieces are multiples.
    """

    alignment: int

    def decode(self, stored: torch.Tensor, pieces: StoredPieces, out: torch.Tensor) -> torch.Tensor:
        """Decode pieces. The caller does not wait.

        Args:
            stored: bytes on the device that hold the compressed pieces.
            pieces: their positions; ``pieces.firsts`` are positions in ``out``.
            out: bytes on the device to decode into.

        Returns:
            Which pieces did not decode to their length, shape ``(n_pieces,)``, on the device.
        """
        ...


class DecodingDevice(Protocol):
    """A device, its codecs, and the streams that decoding uses beside those of the model.

    Attributes:
        device: the device.
    """

    device: torch.device

    def codec(self, compression: Compression) -> BatchCodec | None:
        """Return the codec of a compression; None if there is none."""
        ...

    def work(self) -> AbstractContextManager[object]:
        """Run a block on a stream beside the model's, and wait for its work at the end."""
        ...

    def stream(self) -> AbstractContextManager[object]:
        """Run a block on this thread's stream, and wait for nothing."""
        ...

    def host_memory(self, n_bytes: int) -> torch.Tensor:
        """Return memory of the host that is copied to the device without waiting."""
        ...

    def own(self, batch: object) -> None:
        """Let the caller's present stream own the memory of tensors that a stream of this device has filled.

        Otherwise their memory would be used again while work of that stream with them is under way.
        """
        ...


DEVICES: dict[str, Callable[[], DecodingDevice]] = {}
"""Makers of the devices that decode, by the value of ``decode_on``."""


def open_device(name: str) -> DecodingDevice:
    """Return the device of ``decode_on``.

    Raises:
        H5ValueError: this machine has no such device.
        H5FileError: the library that decodes there is not installed.
    """
    return DEVICES[name]()
