"""Blosc2 chunks: read as they are written, and a damaged frame is an error that takes no memory."""

import tracemalloc
from contextlib import suppress

import h5py
import numpy as np
import pytest
from factories import Stored

from lightning_h5 import H5CorruptError, H5LazyDataset
from lightning_h5.hdf5 import Filter
from lightning_h5.readers.filters.decoders import BLOSC2
from lightning_h5.readers.filters.pipeline import decoder_of

blosc2 = pytest.importorskip("blosc2")
plugin = pytest.importorskip("hdf5plugin")

ROWS = np.arange(64 * 64, dtype="f4").reshape(64, 64)
ONE_CHUNK = Stored(ROWS, "chunked", (64, 64), dict(plugin.Blosc2(cname="zstd")))


def frame_of(path):
    with h5py.File(path) as file:
        return bytearray(file["x"].id.read_direct_chunk((0, 0))[1])


def with_frame(make_h5, frame):
    path = make_h5(x=ONE_CHUNK)
    with h5py.File(path, "a") as file:
        file["x"].id.write_direct_chunk((0, 0), bytes(frame))
    return path


@pytest.mark.parametrize("n_bytes", [65_536, 300 << 20, 6000 << 20])
def test_a_frame_that_claims_another_size_takes_no_memory(n_bytes):
    pieces = (min(n_bytes, 100 << 20),)  # left to the library, they follow the machine's caches, and may be more in all
    frame = np.frombuffer(blosc2.zeros((n_bytes,), dtype="u1", chunks=pieces).to_cframe(), np.uint8)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"it decodes to .*, not (to )?16,384"):
        decoder_of(Filter(BLOSC2, "blosc2", ()), 1)(frame, np.empty(16_384, np.uint8))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("keep", [1, 86, 119, 200])
def test_a_frame_that_is_cut_off_is_refused(make_h5, keep):
    path = with_frame(make_h5, frame_of(make_h5(x=ONE_CHUNK))[:keep])
    with pytest.raises(H5CorruptError, match=r"chunk 0 \(rows 0 to 63\) of 'x'"):
        H5LazyDataset(path, "x")[0]


@pytest.mark.parametrize("number", range(0, 60, 3))
def test_a_frame_with_flipped_bytes_is_an_error_or_rows(make_h5, number):
    frame = frame_of(make_h5(x=ONE_CHUNK))
    frame[number] ^= 0x41
    path = with_frame(make_h5, frame)
    with suppress(H5CorruptError):
        assert H5LazyDataset(path, "x").read_batch(range(64)).shape == (64, 64)


@pytest.mark.parametrize("options", [{}, {"cname": "zstd"}, {"cname": "lz4hc"}, {"cname": "zlib"}], ids=str)
@pytest.mark.parametrize("kind", ["numbers", "zeros", "nan", "threes"])
def test_frames_as_they_are_written_are_read(make_h5, kind, options):
    values = {"numbers": ROWS, "zeros": 0 * ROWS, "nan": np.nan * ROWS, "threes": 0 * ROWS + 3}[kind]
    path = make_h5(x=Stored(values, "chunked", (50, 27), dict(plugin.Blosc2(**options))))
    np.testing.assert_array_equal(H5LazyDataset(path, "x").read_batch(range(64)), values)


def test_frames_of_many_pieces_are_read():
    values = np.arange(10_000, dtype="f4").reshape(100, 100)
    frame = blosc2.asarray(values, chunks=(30, 40), blocks=(7, 9)).to_cframe()
    out = np.empty(values.nbytes, np.uint8)
    decoder_of(Filter(BLOSC2, "blosc2", ()), 4)(np.frombuffer(frame, np.uint8), out)
    np.testing.assert_array_equal(out.view("f4"), values.reshape(-1))


def test_virtual_arrays_over_blosc2_are_read_through_the_hdf5_library(make_h5):
    path = make_h5(s=ONE_CHUNK)
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout(ROWS.shape, "f4")
        layout[:] = h5py.VirtualSource(".", "s", ROWS.shape)
        file.create_virtual_dataset("x", layout)
    np.testing.assert_array_equal(H5LazyDataset(path, "x").read_batch(range(64)), ROWS)
