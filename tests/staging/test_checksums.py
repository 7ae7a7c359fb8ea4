"""Checksums of pieces of memory, and copies of runs: the same by compiled code and without it."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.readers import block_memory
from lightning_h5.staging import checksums

MEMORY = np.random.default_rng(0).integers(0, 256, 5_000, dtype=np.uint8)


@pytest.fixture(params=["compiled", "plain"], autouse=True, scope="module")
def _either_way(request):
    with pytest.MonkeyPatch.context() as patch:
        for module, loops in ((checksums, "_loops"), (block_memory, "_copy_loops")):
            patch.setattr(module, loops, [])
        if request.param == "compiled":
            checksums.compile_sums()
            block_memory.compile_copies()
        yield


pieces = st.lists(st.tuples(st.integers(0, 4_000), st.integers(1, 1_000)), max_size=5)


@given(pieces, st.integers(1, 1_200))
def test_each_piece_has_the_checksums_of_its_parts(pieces, sum_bytes):
    starts, sizes = np.array(pieces, np.int64).reshape(-1, 2).T
    expected = [
        zlib.crc32(MEMORY[at : min(at + sum_bytes, start + size)])
        for start, size in pieces
        for at in range(start, start + size, sum_bytes)
    ]
    assert checksums.sums_of_pieces(MEMORY, starts, starts + sizes, sum_bytes).tolist() == expected


@given(pieces)
def test_runs_are_copied_to_their_places(runs):
    firsts, sizes = np.array(runs, np.int64).reshape(-1, 2).T
    starts = np.cumsum(sizes) - sizes
    out = np.zeros(int(sizes.sum()), np.uint8)
    block_memory.copy_runs(MEMORY, firsts, out, starts, sizes)
    assert out.tolist() == [octet for first, size in runs for octet in MEMORY[first : first + size].tolist()]


@pytest.mark.parametrize(("start", "size"), [(-1, 5), (4_999, 2), (6_000, 1)])
def test_nothing_outside_of_the_memory_is_read_or_written(start, size):
    starts, sizes, place = np.array([start]), np.array([size]), np.zeros(1, np.int64)
    with pytest.raises(IndexError):
        checksums.sums_of_pieces(MEMORY, starts, starts + sizes, 4)
    with pytest.raises(IndexError):
        block_memory.copy_runs(MEMORY, starts, np.zeros(size, np.uint8), place, sizes)
    with pytest.raises(IndexError):
        block_memory.copy_runs(np.zeros(size, np.uint8), place, MEMORY.copy(), starts, sizes)
