"""Filters and checksums of chunks, undone and computed by torch: on any device, for many chunks at a time."""

from __future__ import annotations

import torch

__all__ = ["adler32", "unshuffled", "without_bitshuffle"]

ADLER = 65521  # the largest prime below 2**16
LINE = 4096  # bytes summed at a time, so that 255 times the sum of their numbers fits into 32 bits
SLICE_BYTES = 4 << 20  # of chunks that are summed at a time; they take four times as much memory


def unshuffled(chunks: torch.Tensor, size: int) -> torch.Tensor:
    """Undo HDF5's filter ``shuffle``.

    Args:
        chunks: bytes, shape ``(n_chunks, n_bytes)``.
        size: bytes of a number.
    """
    n_chunks, n_bytes = chunks.shape
    n = n_bytes // size
    body = chunks[:, : n * size].reshape(n_chunks, size, n).transpose(1, 2).reshape(n_chunks, n * size)
    return body if n * size == n_bytes else torch.cat([body, chunks[:, n * size :]], dim=1)


def without_bitshuffle(chunks: torch.Tensor, size: int, block: int) -> torch.Tensor:
    """Undo the filter ``bitshuffle``.

    Args:
        chunks: bytes, shape ``(n_chunks, n_bytes)``.
        size: bytes of a number.
        block: bytes of a block, a multiple of ``8 * size``. Bits of different blocks are not mixed.
    """
    n_chunks, n_bytes = chunks.shape
    whole = n_bytes // (8 * size) * 8 * size  # the remainder is stored as it is
    n_blocks = whole // block
    parts = []
    if n_blocks:
        blocks = chunks[:, : n_blocks * block].reshape(n_chunks * n_blocks, block)
        parts.append(_bits_together(blocks, size).reshape(n_chunks, n_blocks * block))
    if n_blocks * block < whole:
        parts.append(_bits_together(chunks[:, n_blocks * block : whole], size))
    if whole < n_bytes:
        parts.append(chunks[:, whole:])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _bits_together(blocks: torch.Tensor, size: int) -> torch.Tensor:
    """Return the bytes of numbers, from blocks that have a plane of bits for each bit of a number."""
    n_blocks, n_bytes = blocks.shape
    n = n_bytes // size
    planes = blocks.reshape(n_blocks, size, 8, n // 8, 1)
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    octets = torch.zeros((n_blocks, size, n // 8, 8), dtype=torch.uint8, device=blocks.device)
    for bit in range(8):
        octets |= (planes[:, :, bit] >> bits & 1) << bit
    return octets.reshape(n_blocks, size, n).transpose(1, 2).reshape(n_blocks, n_bytes)


def adler32(chunks: torch.Tensor) -> torch.Tensor:
    """Return the Adler-32 of chunks (RFC 1950), shape ``(n_chunks,)``, as ``int64``.

    Args:
        chunks: bytes, shape ``(n_chunks, n_bytes)``.
    """
    n_chunks, n_bytes = chunks.shape
    step = max(1, SLICE_BYTES // max(1, n_bytes))
    if n_chunks > step:
        return torch.cat([adler32(part) for part in torch.split(chunks, step)])
    n_lines = n_bytes // LINE
    low = torch.ones(n_chunks, dtype=torch.int64, device=chunks.device)
    high = torch.full((n_chunks,), n_bytes % ADLER, dtype=torch.int64, device=chunks.device)
    for start, lines, length in ((0, n_lines, LINE), (n_lines * LINE, 1, n_bytes - n_lines * LINE)):
        if not lines * length:
            continue
        part = chunks[:, start : start + lines * length].reshape(n_chunks, lines, length).to(torch.int32)
        sums = part.sum(-1)
        weighted = (part * torch.arange(length, dtype=torch.int32, device=chunks.device)).sum(-1)
        left = n_bytes - start - length * torch.arange(lines, dtype=torch.int64, device=chunks.device)
        low += sums.sum(-1)
        high += ((left % ADLER * sums - weighted) % ADLER).sum(-1)
    return high % ADLER << 16 | low % ADLER
