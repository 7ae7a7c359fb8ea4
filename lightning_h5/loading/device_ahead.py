"""Batches that are copied to a device before they are requested, while the model computes on earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from ..errors import H5ValueError
from .held_batches import HeldBatches

__all__ = ["STREAMS", "CudaStream", "DeviceAhead", "DeviceStream", "parts_of"]


class DeviceStream(Protocol):
    """Copies batches beside the computations of a device."""

    def begin(self, batch: Any) -> Any:
        """Begin to copy a batch to the device; return the pending copy."""
        ...

    def end(self, pending: Any) -> Any:
        """Return a copied batch, whose use on the device waits for the copy. The caller does not wait."""
        ...


class CudaStream:
    """A CUDA stream for copies.

    Args:
        device: the device to copy to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream_of(device)

    def begin(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """See ``DeviceStream.begin``. Copies from page-locked memory do not block the caller."""
        with torch.cuda.stream(self._stream):
            copied = apply_to_collection(batch, _Movable, partial(_moved, device=self._device))
        return copied, self._stream.record_event()

    def end(self, pending: tuple[Any, torch.cuda.Event]) -> Any:
        """See ``DeviceStream.end``.

        The memory of the copy belongs to the stream of copies. It is not used for another copy before the work that
        uses this batch has ended, because the present stream is recorded for it.

        Raises:
            H5ValueError: the batch has objects whose memory cannot be recorded.
        """
        copied, event = pending
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        apply_to_collection(copied, _Movable, partial(_record, stream=stream))
        return copied


@cache  # the allocator keeps free memory for each stream, so iterations share one
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


STREAMS: dict[str, Callable[[torch.device], DeviceStream]] = {"cuda": CudaStream}
"""Streams by type of device. Batches are not copied ahead to devices of other types."""


class DeviceAhead:
    """The next batches of an iteration, of which some are already being copied to a device.

    Args:
        stream: copies batches.
        depth: maximum number of copies ahead of the batch that is returned.
    """

    def __init__(self, stream: DeviceStream, depth: int) -> None:
        self._stream, self._depth = stream, depth
        self._pending = HeldBatches()

    def __len__(self) -> int:
        return len(self._pending)

    def next(self, read: Callable[[], Any], is_ready: Callable[[], bool], n_left: int) -> Any:
        """Return the next batch, and begin to copy those after it that can be read without waiting.

        Args:
            read: reads a batch. Its error is raised when that batch would be returned.
            is_ready: returns whether ``read`` would not wait.
            n_left: number of batches that this method has yet to return.
        """
        wanted = min(n_left, self._depth + 1)
        while not self._pending or (len(self._pending) < wanted and not self._pending.has_failed and is_ready()):
            self._pending.add(lambda: self._stream.begin(read()))
        return self._stream.end(self._pending.take())


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold the values of a tensor; the tensor itself unless it is sparse."""
    if tensor.layout == torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,)


@runtime_checkable
class _Movable(Protocol):
    """A tensor, or an object that moves itself to devices, such as a graph of torch_geometric."""

    def to(self, device: torch.device) -> Any: ...


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value.to(device)


def _record(value: Any, stream: torch.cuda.Stream) -> None:
    """Record that a stream uses the memory of a value."""
    if isinstance(value, torch.Tensor):
        for part in parts_of(value):
            part.record_stream(stream)
        return
    if not hasattr(value, "record_stream"):
        raise H5ValueError(
            f"prefetch_to_device was given, but a batch has an object of the class {type(value).__name__}, which has a "
            "method to() and no method record_stream(), so its memory could be used again too early. Remove "
            "prefetch_to_device, or let collate_fn return tensors."
        )
    value.record_stream(stream)
