"""Blosc2: whatever a chunk names or claims, no code is loaded for it and no more memory taken than its array has."""

import tracemalloc

import h5py
import numpy as np
import pytest
from arguments import nested_files
from factories import Stored

from lightning_h5 import H5CorruptError, H5FileError, H5LazyDataset, H5ValueError, check_files
from lightning_h5.hdf5 import Filter
from lightning_h5.hdf5.checks import ensure_filters
from lightning_h5.readers.filters.blosc2 import check_frame
from lightning_h5.readers.filters.decoders import BLOSC2
from lightning_h5.readers.filters.pipeline import decoder_of

blosc2 = pytest.importorskip("blosc2")
plugin = pytest.importorskip("hdf5plugin")

ROWS = np.arange(64 * 64, dtype="f4").reshape(64, 64)
ONE_CHUNK = Stored(ROWS, "chunked", (64, 64), dict(plugin.Blosc2(cname="zstd")))
PLACE_OF_HEADER, PLACE_OF_STORED = 11, 39  # sizes that the frame says of itself


def frame_of(path):
    with h5py.File(path) as file:
        return bytearray(file["x"].id.read_direct_chunk((0, 0))[1])


def with_frame(make_h5, frame):
    path = make_h5(x=ONE_CHUNK)
    with h5py.File(path, "a") as file:
        file["x"].id.write_direct_chunk((0, 0), bytes(frame))
    return path


def chunk_in(frame):
    """Where the one chunk of a frame begins, and where the chunk that says where chunks begin."""
    header = int.from_bytes(frame[PLACE_OF_HEADER : PLACE_OF_HEADER + 4], "big")
    return header, header + int.from_bytes(frame[PLACE_OF_STORED : PLACE_OF_STORED + 8], "big")


def name_codec(frame, at, number):
    frame[at + 2] = frame[at + 2] & 0x1F | 6 << 5
    frame[at + 22] = number


def codec_of_the_chunk(frame, number):
    name_codec(frame, chunk_in(frame)[0], number)


def codec_of_the_index(frame, number):
    name_codec(frame, chunk_in(frame)[1], number)


def codec_of_the_frame(frame, number):
    frame[27] = frame[27] & 0xF0 | 6
    frame[77] = number


def filter_of_the_chunk(frame, number):
    frame[chunk_in(frame)[0] + 16] = number


def filter_of_the_index(frame, number):
    frame[chunk_in(frame)[1] + 21] = number


def filter_of_the_frame(frame, number):
    frame[71] = number


PLACES = [
    codec_of_the_chunk,
    codec_of_the_index,
    codec_of_the_frame,
    filter_of_the_chunk,
    filter_of_the_index,
    filter_of_the_frame,
]


@pytest.mark.parametrize("number", [36, 37, 32, 35, 160, 255])
@pytest.mark.parametrize("name", PLACES, ids=lambda place: place.__name__)
def test_a_codec_or_filter_that_is_not_built_in_is_refused_and_nothing_imported(
    make_h5, tmp_path, monkeypatch, name, number
):
    for module in ("grok", "openhtj2k"):
        (tmp_path / f"blosc2_{module}.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    frame = frame_of(make_h5(x=ONE_CHUNK))
    name(frame, number)
    path = with_frame(make_h5, frame)
    with pytest.raises(H5CorruptError) as error:
        H5LazyDataset(path, "x")[0]
    assert not (tmp_path / "owned").exists(), "code was run"
    for part in (path, "'x'", "chunk 0 (rows 0 to 63)", "as a plugin"):
        assert part in str(error.value)
    assert "as a plugin" in check_files(path).errors[0].text
    assert not (tmp_path / "owned").exists(), "code was run"


def lazy(frame, at):
    frame[at + 31] |= 8


def of_a_later_version(frame, at):
    frame[at] = 6


def of_an_older_header(frame, at):
    frame[at + 2] &= ~1


def larger_than_the_frame(frame, at):
    frame[at + 4 : at + 8] = (1 << 30).to_bytes(4, "little")


def longer_than_is_stored(frame, at):
    frame[at + 12 : at + 16] = (1 << 30).to_bytes(4, "little")


def of_no_blocks(frame, at):
    frame[at + 8 : at + 12] = bytes(4)


@pytest.mark.parametrize("which", [0, 1], ids=["chunk", "index"])
@pytest.mark.parametrize(
    "spoil",
    [lazy, of_a_later_version, of_an_older_header, larger_than_the_frame, longer_than_is_stored, of_no_blocks],
    ids=lambda spoil: spoil.__name__,
)
def test_headers_that_cannot_be_are_refused_before_they_are_believed(make_h5, spoil, which):
    frame = frame_of(make_h5(x=ONE_CHUNK))
    spoil(frame, chunk_in(frame)[which])
    with pytest.raises(ValueError, match="of its piece at byte 0 cannot be"):
        check_frame(bytes(frame), ROWS.nbytes)


@pytest.mark.parametrize("n_bytes", [65_536, 300 << 20, 6000 << 20])
def test_a_frame_that_claims_another_size_takes_no_memory(n_bytes):
    pieces = (min(n_bytes, 100 << 20),)  # left to the library, they follow the machine's caches, and may be more in all
    frame = np.frombuffer(blosc2.zeros((n_bytes,), dtype="u1", chunks=pieces).to_cframe(), np.uint8)
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"{n_bytes:,} bytes in pieces of .*, not to 16,384"):
        decoder_of(Filter(BLOSC2, "blosc2", ()), 1)(frame, np.empty(16_384, np.uint8))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("keep", [0, 1, 86, 119, 200])
def test_a_frame_that_is_cut_off_is_refused(make_h5, keep):
    with pytest.raises(ValueError, match=r"it has|it is not|it declares|what it declares|a piece"):
        check_frame(bytes(frame_of(make_h5(x=ONE_CHUNK)))[:keep], ROWS.nbytes)


def test_a_place_of_a_chunk_that_is_not_in_the_frame_is_refused(make_h5):
    frame = frame_of(make_h5(x=ONE_CHUNK))
    at = chunk_in(frame)[1] + 32
    frame[at : at + 8] = (1 << 20).to_bytes(8, "little")
    with pytest.raises(ValueError, match="a piece of it should be at its byte 1,048,576"):
        check_frame(bytes(frame), ROWS.nbytes)


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


def refusal(path, **asked):
    with pytest.raises(H5ValueError) as error:
        H5LazyDataset(path, "x", **nested_files(**asked))
    for part in (path, "is compressed with Blosc2, and only the HDF5 library could read it", "another compression"):
        assert part in str(error.value)
    return str(error.value)


def test_blosc2_never_reaches_the_librarys_own_filter(make_h5, monkeypatch):
    """Which cannot be looked at before: odd numbers, virtual arrays, live writers, two compressors, too many chunks."""
    odd = h5py.h5t.STD_I32LE.copy()
    odd.set_precision(31)
    path = make_h5()
    with h5py.File(path, "a") as file:
        plist = file.create_dataset("like", (16,), "i4", chunks=(4,), **plugin.Blosc2()).id.get_create_plist()
        h5py.h5d.create(file.id, b"x", odd, h5py.h5s.create_simple((16,)), plist)
    assert "does not exist in NumPy" in refusal(path)
    path = make_h5(s=ONE_CHUNK)
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout(ROWS.shape, "f4")
        layout[:] = h5py.VirtualSource(".", "s", ROWS.shape)
        file.create_virtual_dataset("x", layout)
    assert "'x' is a virtual array over it" in refusal(path)
    for filters in ([1, BLOSC2], [BLOSC2, 2], [BLOSC2, BLOSC2]):
        with pytest.raises(H5ValueError, match="other filters, which only the library can undo"):
            ensure_filters(tuple(Filter(number, "", ()) for number in filters), path, "x")
    monkeypatch.setattr("lightning_h5.hdf5.describe.MAX_CHUNKS", 0)
    assert "too many for a table" in refusal(make_h5(x=ONE_CHUNK))
    monkeypatch.setattr("lightning_h5.hdf5.checks.find_spec", lambda name: None)
    with pytest.raises(H5FileError, match=r"requires the package `blosc2`.*pip install"):
        H5LazyDataset(make_h5(x=ONE_CHUNK), "x")
