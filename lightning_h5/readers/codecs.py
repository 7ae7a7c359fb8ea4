"""Undoing an array's filters without the HDF5 library, in any number of threads at a time."""

from __future__ import annotations

import numpy as np

from ..files import ArrayLayout
from .checksum import fletcher32
from .decoders import (
    FLETCHER32,
    SHUFFLE,
    Bytes,
    Decoder,
    NativeDecoder,
    decoder_of,
    ensure_same_size,
    is_known,
    shuffled,
)
from .loops import SORTED, ChunkLoop, loop_of

__all__ = ["Pipeline", "why_not_decodable"]

CHECKSUM_BYTES = 4


class Pipeline:
    """Undoes the filters of one array's chunks; holds no memory, and may be used by many threads.

    Args:
        layout: an array for which ``why_not_decodable`` finds no reason.

    Attributes:
        native: decodes chunks with no filter left out, where a single C function does; None where it takes more.
    """

    def __init__(self, layout: ArrayLayout) -> None:
        self._steps: list[Decoder | None] = [
            None if step.id == FLETCHER32 else decoder_of(step, layout.stored.itemsize) for step in layout.filters
        ]
        self._all = self._applied(0)
        first = self._all[0] if self._all else None
        self._first = first if isinstance(first, NativeDecoder) else None
        self.native = self._first if len(self._all) == 1 else None
        self._sizes = [shuffled(step, layout.stored.itemsize) for step in layout.filters if step.id == SHUFFLE]
        self._itemsize = layout.stored.itemsize

    def compile(self) -> ChunkLoop | None:
        """What reads chunks with no filter left out, and decodes them, in one call; None where nothing does.

        It is compiled when it is first asked for: that is to be before processes fork, and not while threads read.
        """
        sizes = [size for size in self._sizes if size != 1]
        if self._first is None or len(self._all) != 1 + len(self._sizes) or len(sizes) > 1:
            return None
        if not SORTED.issuperset(sizes) or any(self._itemsize % size for size in sizes):
            return None
        return loop_of(self._first, sizes[0] if sizes else 1)

    def decode(self, data: Bytes, mask: int, out: Bytes) -> None:
        """Decodes a chunk.

        Args:
            data: its bytes in the file.
            mask: bit ``i`` says that filter ``i`` was not applied.
            out: memory for exactly the bytes of a chunk.

        Raises:
            Exception: the bytes are not a chunk's; the text says why, of whatever type the decoder's error is.
        """
        steps = self._applied(mask) if mask else self._all
        checksums = steps.count(None)
        for n_left, step in zip(reversed(range(len(steps))), steps, strict=True):
            if step is None:
                data, checksums = _checked(data), checksums - 1
            elif not n_left:
                step(data, out)
                return
            else:
                # What is left to undo changes no size, apart from checksums.
                decoded = np.empty(out.nbytes + CHECKSUM_BYTES * checksums, dtype=np.uint8)
                step(data, decoded)
                data = decoded
        ensure_same_size(data, out)
        out[...] = data

    def _applied(self, mask: int) -> list[Decoder | None]:
        """What undoes the filters that a mask leaves, the last one first; None checks a checksum."""
        return [step for at, step in reversed(list(enumerate(self._steps))) if not mask >> at & 1]


def why_not_decodable(layout: ArrayLayout) -> str | None:
    """Why the HDF5 library has to decode an array, in a few words; None where it has not.

    Args:
        layout: a chunked array whose bytes others understand.
    """
    compressors = [f for f in layout.filters if f.id not in (FLETCHER32, SHUFFLE)]
    for found in compressors:
        if not is_known(found.id):
            return f"there is no decoder for its filter {found.label!r} but the HDF5 library's"
        if decoder_of(found, layout.stored.itemsize) is None:
            return (
                f"no decoder that is installed takes its filter {found.label!r} with its options; "
                "`pip install --upgrade 'lightning-h5[filters]'` brings more"
            )
    if len(compressors) > 1:
        return "it was compressed twice"
    ids = [f.id for f in layout.filters]
    if compressors and SHUFFLE in ids[ids.index(compressors[0].id) :]:
        return "it was shuffled after it was compressed"  # into a size that its chunks do not tell
    return None


def _checked(data: Bytes) -> Bytes:
    """The data without the checksum at its end."""
    body, stored = data[:-CHECKSUM_BYTES], int.from_bytes(data[-CHECKSUM_BYTES:].tobytes(), "little")
    found = fletcher32(body)
    # Releases of HDF5 before 1.6.3 wrote it with swapped bytes on some machines; the library takes both.
    swapped = (found & 0x00FF00FF) << 8 | (found >> 8) & 0x00FF00FF
    if stored not in (found, swapped):
        raise ValueError(f"its checksum is {found:#010x} and was {stored:#010x} when it was written")
    return body
