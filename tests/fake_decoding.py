"""A device that tests decode on: its codecs are those of the CPU, and its memory is this machine's.

Copies to its memory, decoding and copies out of it are those of the package; only the kernels and streams are missing.
"""

import zlib
from contextlib import contextmanager

import numpy as np
import torch

from lightning_h5.hdf5 import Filter
from lightning_h5.readers.filters.native import ZSTD
from lightning_h5.readers.filters.pipeline import decoder_of


class FakeDevice:
    """Decodes on this machine.

    Args:
        alignment: see ``BatchCodec``.
        refuses: pieces that it does not decode, as a function of their bytes.

    Attributes:
        launches: number of pieces of each launch.
        owned: columns of rows that were handed over.
    """

    def __init__(self, alignment=16, refuses=lambda stored: False):
        self.device = torch.device("cpu")
        self.alignment, self.refuses = alignment, refuses
        self.launches, self.owned = [], []

    def codec(self, compression):
        return FakeCodec(self, compression)

    @contextmanager
    def stream(self):
        yield

    work = stream

    def host_memory(self, n_bytes):
        return torch.full((n_bytes,), 0xAA, dtype=torch.uint8)

    def own(self, batch):
        self.owned.append(batch)


class FakeCodec:
    """Decodes pieces one by one."""

    def __init__(self, device, compression):
        self.device, self.alignment = device, device.alignment
        self.decode_one = {"deflate": inflated, "lz4": unpacked_lz4, "zstd": unpacked_zstd}[compression]

    def decode(self, stored, pieces, out):
        self.device.launches.append(len(pieces.starts))
        assert not (pieces.starts % self.alignment).any()
        failed = []
        each = zip(
            *(numbers.tolist() for numbers in (pieces.starts, pieces.sizes, pieces.firsts, pieces.lengths)), strict=True
        )
        for start, size, first, length in each:
            data, place = stored[start : start + size].numpy(), out[first : first + length].numpy()
            place[...] = 0x55
            try:
                failed.append(self.device.refuses(data) or not self.decode_one(data, place))
            except Exception:
                failed.append(True)
        return torch.tensor(failed)


def inflated(data, out):
    stream = zlib.decompressobj(wbits=-15)
    decoded = stream.decompress(data.tobytes(), len(out) + 1)
    out[...] = np.frombuffer(decoded, np.uint8)
    return stream.eof


def unpacked_zstd(data, out):
    decoder_of(Filter(ZSTD, "zstd", ()), 1)(data, out)
    return True


def unpacked_lz4(data, out):
    import imagecodecs

    return len(imagecodecs.lz4_decode(data, out=out)) == len(out)
