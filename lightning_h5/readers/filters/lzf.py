"""LZF, h5py's fast compressor, as a loop that Numba compiles.

The library's loop copies a byte at a time. Here sixteen are copied at once, and excess bytes are overwritten by the
next copy, as in LZ4 (https://github.com/lz4/lz4, "wild copies"). Measured in one thread, MiB/s: noisy images
760, for 430 with imagecodecs and 370 with h5py's own; shuffled signals 2,270, 1,340 and 680; text 1,520, 500 and 290;
numbers that repeat sixteen times 2,600, 2,800 and 1,100.

The format (https://oldhome.schmorp.de/marc/liblzf.html): a byte below 32 is followed by one literal byte more than it
says. Otherwise its three high bits say how many bytes, less two, are repeated, or 7, if the next byte has how many
more; its other bits and the byte after say how far back they are, less one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .pipeline import Bytes

__all__ = ["lzf_loop"]

LONGEST = 264  # maximum bytes of a repeat
LITERAL = 32  # maximum bytes of a literal run
WIDTH = 16  # bytes copied at once


def lzf_loop(compiled: Callable[..., Any]) -> Callable[[Bytes, int, Bytes], bool]:
    """Return the loop: it decodes a number of stored bytes into memory, and returns whether they fill it exactly.

    Args:
        compiled: compiles the functions that the loop calls.
    """
    copy = compiled(_copy_16)

    def decode(data: Bytes, n_data: int, out: Bytes) -> bool:
        n_out = len(out)
        at: Any = 0  # in the stored bytes
        end: Any = 0  # of the decoded bytes
        last_at, last_end = n_data - LITERAL, n_out - LONGEST - WIDTH  # up to here excess bytes can be copied
        while at < n_data:
            control = np.int64(data[at])
            at += 1
            if control < LITERAL:
                n = control + 1
                if at <= last_at and end <= last_end:
                    copy(out, end, data, at)
                    if n > WIDTH:
                        copy(out, end + WIDTH, data, at + WIDTH)
                elif at + n <= n_data and end + n <= n_out:
                    for i in range(n):
                        out[end + i] = data[at + i]
                else:
                    return False
                at += n
                end += n
                continue
            n = (control >> 5) + 2
            if n == 9:
                if at >= n_data:
                    return False
                n += np.int64(data[at])
                at += 1
            if at >= n_data:
                return False
            back = ((control & 31) << 8) + np.int64(data[at]) + 1
            at += 1
            if back > end:
                return False
            if back >= WIDTH and end <= last_end:
                for i in range(0, n, WIDTH):
                    copy(out, end + i, out, end - back + i)
            elif end + n <= n_out:
                for i in range(end, end + n):  # source and target can overlap
                    out[i] = out[i - back]
            else:
                return False
            end += n
        return bool(end == n_out)

    return decode


def _copy_16(target: Bytes, to: int, source: Bytes, start: int) -> None:
    """Load all bytes before storing one: the compiler makes a single load and a single store of that."""
    i, j = np.uint64(start), np.uint64(to)  # unsigned: an index cannot count from an array's end
    u = np.uint64
    a, b, c, d = source[i], source[i + u(1)], source[i + u(2)], source[i + u(3)]
    e, f, g, h = source[i + u(4)], source[i + u(5)], source[i + u(6)], source[i + u(7)]
    k, m, n, o = source[i + u(8)], source[i + u(9)], source[i + u(10)], source[i + u(11)]
    p, q, r, s = source[i + u(12)], source[i + u(13)], source[i + u(14)], source[i + u(15)]
    target[j], target[j + u(1)], target[j + u(2)], target[j + u(3)] = a, b, c, d
    target[j + u(4)], target[j + u(5)], target[j + u(6)], target[j + u(7)] = e, f, g, h
    target[j + u(8)], target[j + u(9)], target[j + u(10)], target[j + u(11)] = k, m, n, o
    target[j + u(12)], target[j + u(13)], target[j + u(14)], target[j + u(15)] = p, q, r, s
