"""Fletcher's checksum is HDF5's, for data of any length and content."""

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.readers.filters.decoders import WORDS, fletcher32


@pytest.fixture(scope="module")
def file():
    with h5py.File("checksums", "w", driver="core", backing_store=False) as file:
        yield file


def by_hdf5(file, data):
    """The four bytes that HDF5 puts behind a chunk with these bytes, as a number."""
    array = file.create_dataset("x", data=data, chunks=data.shape, fletcher32=True)
    mask, stored = array.id.read_direct_chunk((0,))
    del file["x"]
    assert (mask, stored[:-4]) == (0, data.tobytes())
    return int.from_bytes(stored[-4:], "little")


CONTENTS = {
    "any bytes": lambda n: np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8),
    "zeros": lambda n: np.zeros(n, np.uint8),
    "ones": lambda n: np.full(n, 0xFF, np.uint8),
    "sums of 65535": lambda n: np.resize(np.array([0xFF, 0xFE, 0x00, 0x01], np.uint8), n),
    "one at the end": lambda n: np.arange(n) == n - 1,
    "one at the start": lambda n: np.arange(n) == 0,
}


@pytest.mark.parametrize("content", CONTENTS)
def test_data_of_any_length_has_the_checksum_that_hdf5_gives_it(file, content):
    line = 2 * WORDS
    edges = {at + more for at in (line, 2 * line, 3 * line, 64 * line) for more in range(-3, 4)}
    for n in sorted({*range(1, 70), *edges}):
        data = CONTENTS[content](n).astype(np.uint8)
        assert fletcher32(data) == by_hdf5(file, data), n


@given(
    pieces=st.lists(st.tuples(st.sampled_from([0, 1, 0xFF, None]), st.integers(0, 1500)), min_size=1, max_size=5),
    seed=st.integers(0, 999),
)
def test_runs_of_alike_bytes_have_the_checksum_that_hdf5_gives_them(file, pieces, seed):
    random = np.random.default_rng(seed)
    runs = [random.integers(0, 256, n, dtype=np.uint8) if b is None else np.full(n, b, np.uint8) for b, n in pieces]
    data = np.concatenate(runs)
    if len(data):
        assert fletcher32(data) == by_hdf5(file, data)


@pytest.mark.parametrize("content", ["any bytes", "ones", "zeros"])
def test_sums_of_large_data_do_not_overflow(file, content):
    data = CONTENTS[content]((16 << 20) + 1)
    assert fletcher32(data) == by_hdf5(file, data)


def test_data_need_not_be_aligned_or_writable():
    data = CONTENTS["any bytes"](5001)
    for start in range(1, 9):
        part = data[start:].copy()
        part.flags.writeable = False
        assert fletcher32(data[start:]) == fletcher32(part) == fletcher32(np.frombuffer(part.tobytes(), np.uint8))


def test_no_data_has_the_checksum_zero():
    assert fletcher32(np.empty(0, np.uint8)) == 0
