"""Chunks that are decoded on a device, many in each launch, into a cache in its memory.

``pieces`` finds what can be decoded independently in stored chunks, a ``BatchCodec`` decodes it, ``undo`` reverses the
other filters, ``loader`` puts these together, and ``reader`` copies rows of batches out of the cache. All of it is
ordinary torch code that runs on any device, except for the codec and the streams of CUDA in ``cuda``.
"""

from .cuda import CudaDevice
from .device import DEVICES, BatchCodec, DecodingDevice, open_device
from .loader import why_not_on_device
from .reader import ChangeTensor, DeviceReader, open_on_device

__all__ = [
    "DEVICES",
    "BatchCodec",
    "ChangeTensor",
    "CudaDevice",
    "DecodingDevice",
    "DeviceReader",
    "open_device",
    "open_on_device",
    "why_not_on_device",
]
