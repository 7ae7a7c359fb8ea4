"""The compiled LZF decodes what the library decodes, to the same bytes, and refuses what that refuses."""

import ctypes
import itertools

import h5py
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import jit
from lightning_h5.readers.filters.compiled import LZF_REPEAT, LZF_WIDTH, lzf_loop

_LIBRARY = ctypes.CDLL(h5py.h5z.__file__)
for _name in ("lzf_compress", "lzf_decompress"):
    getattr(_LIBRARY, _name).argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    getattr(_LIBRARY, _name).restype = ctypes.c_uint
GUARD = 64


def by_library(stored, n_out):
    """What h5py's own copy of the library makes of it; None where it refuses."""
    out = ctypes.create_string_buffer(n_out + 1)
    n = _LIBRARY.lzf_decompress(stored, len(stored), out, n_out)
    return out.raw[:n_out] if n == n_out else None


def compress(data):
    """As the library does it; None where that would not be shorter."""
    out = ctypes.create_string_buffer(len(data) + 1)
    n = _LIBRARY.lzf_compress(data, len(data), out, max(0, len(data) - 1))
    return out.raw[:n] if n else None


def _loops():
    found = {"as Python": lzf_loop(lambda function: function)}
    machine_code = jit.compiled(lzf_loop(jit.compiled)) if jit._numba() else None
    return found | ({"compiled": machine_code} if machine_code else {})


LOOPS = _loops()


def decode(loop, stored, n_out):
    """What a loop makes of it; it writes to nothing around the memory that it is given."""
    memory = np.full(n_out + 2 * GUARD, 0xA5, np.uint8)
    data = np.frombuffer(stored, np.uint8)
    with np.errstate(over="ignore"):
        is_done = loop(data, len(data), memory[GUARD : GUARD + n_out])
    assert (memory[:GUARD] == 0xA5).all()
    assert (memory[GUARD + n_out :] == 0xA5).all()
    return memory[GUARD : GUARD + n_out].tobytes() if is_done else None


def literal(data):
    return bytes([len(data) - 1]) + data


def repeat(n, back):
    """``n`` bytes (3 to 264) from so far back."""
    high, low = divmod(back - 1, 256)
    n -= 2
    return bytes([n << 5 | high, low]) if n < 7 else bytes([7 << 5 | high, n - 7, low])


@st.composite
def streams(draw):
    """Runs and repeats of all lengths and distances, and what they decode to."""
    data, stored = b"", b""
    for _ in range(draw(st.integers(1, 40))):
        if not data or draw(st.booleans()):
            n = draw(st.integers(1, 32))
            run = np.random.default_rng(draw(st.integers(0, 999))).bytes(n)
            data, stored = data + run, stored + literal(run)
        else:
            n = draw(st.one_of(st.integers(3, 40), st.integers(3, LZF_REPEAT)))
            back = draw(st.one_of(st.integers(1, min(40, len(data))), st.integers(1, min(8192, len(data)))))
            stored += repeat(n, back)
            data += bytes(itertools.islice(itertools.cycle(data[-back:]), n))
    return stored, data


NOISE = np.random.default_rng(0).bytes(32)
EDGES = {  # what is stored, and how many bytes it decodes to
    "the longest repeat comes last": (literal(NOISE) + repeat(LZF_REPEAT, LZF_WIDTH), 32 + LZF_REPEAT),
    "a repeat overlaps its source": (literal(NOISE) + repeat(40, LZF_WIDTH - 1) + 10 * literal(NOISE), 32 + 40 + 320),
}


@pytest.mark.parametrize("way", LOOPS)
@pytest.mark.parametrize("edge", EDGES)
def test_repeats_that_wide_copies_could_spoil_decode(way, edge):
    stored, n_out = EDGES[edge]
    expected = by_library(stored, n_out)
    assert expected is not None
    assert decode(LOOPS[way], stored, n_out) == expected


@pytest.mark.wide
@pytest.mark.parametrize("way", LOOPS)
@settings(max_examples=examples(300))
@given(stream=streams())
@example(stream=(literal(b"a") + repeat(LZF_REPEAT, 1), b"a" * (LZF_REPEAT + 1)))
def test_runs_and_repeats_of_all_kinds_decode(way, stream):
    stored, data = stream
    assert by_library(stored, len(data)) == data
    assert decode(LOOPS[way], stored, len(data)) == data
    for n_out in {0, 1, len(data) - 1, len(data) + 1} - {len(data)}:  # to that length, or not at all
        assert decode(LOOPS[way], stored, n_out) is None


@pytest.mark.wide
@pytest.mark.parametrize("way", LOOPS)
@settings(max_examples=examples(300))
@given(stream=streams(), data=st.data())
def test_what_is_damaged_is_refused_where_the_library_refuses_it_and_the_same_bytes_where_not(way, stream, data):
    stored, n_out = bytearray(stream[0]), len(stream[1])
    for _ in range(data.draw(st.integers(0, 3))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    stored = bytes(stored[: data.draw(st.one_of(st.just(len(stored)), st.integers(1, len(stored))))])
    assert decode(LOOPS[way], stored, n_out) == by_library(stored, n_out)


@pytest.mark.parametrize("way", LOOPS)
@settings(max_examples=examples(300))
@given(stored=st.binary(min_size=1, max_size=400), n_out=st.integers(1, 2000))
def test_garbage_is_what_the_library_takes_it_for(way, stored, n_out):
    assert decode(LOOPS[way], stored, n_out) == by_library(stored, n_out)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["noise", "steps", "text", "zeros", "waves"])
@pytest.mark.parametrize("n", [300, 5_000, 100_000])
def test_what_the_library_compresses_comes_back(kind, n):
    random = np.random.default_rng(n)
    data = {
        "noise": random.integers(0, 4, n).astype(np.uint8).tobytes(),
        "steps": np.repeat(random.integers(0, 99, n), random.integers(1, 30, n)).astype("i4").tobytes()[:n],
        "text": b" ".join(random.choice([b"shuffle", b"chunk", b"row", b"of"], n))[:n],
        "zeros": bytes(n),
        "waves": np.rint(60 * np.sin(np.arange(n) / 50)).astype("i1").tobytes(),
    }[kind]
    stored = compress(data)
    assert stored is not None
    for loop in LOOPS.values():
        assert decode(loop, stored, n) == data
