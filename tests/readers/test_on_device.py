"""Chunks decoded on a device, with the codecs of the CPU in place of its kernels: many at a time, and never wrong.

Values of all layouts are compared in ``test_readers_match_h5py``, damaged chunks in ``test_damaged_chunks``.
"""

import re
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from factories import Stored, in_threads, known_filters, random_values
from fake_decoding import FakeCodec, FakeDevice
from hypothesis import given
from hypothesis import strategies as st
from pools import EVERYTHING, look, n_decoded, open_pool, open_pool_on_device

from lightning_h5 import H5Error, H5MemoryError
from lightning_h5.counters import Counters
from lightning_h5.hdf5 import Filter
from lightning_h5.readers import TaskQueue
from lightning_h5.readers.filters.pipeline import SHUFFLE, decoder_of
from lightning_h5.readers.on_device import loader, why_not_on_device
from lightning_h5.readers.on_device.pieces import zstd_pieces
from lightning_h5.readers.on_device.undo import adler32, unshuffled, without_bitshuffle

ROWS = 40
COMPRESSORS = ["gzip", "gzip 9", "lz4", "zstd", "bitshuffle lz4", "bitshuffle lz4, 16", "bitshuffle zstd"]
SUPPORTED = [
    (*before, name, *after)
    for name in COMPRESSORS
    if name in known_filters()
    for before in ([(), ("shuffle",)] if not name.startswith("bitshuffle") else [()])
    for after in ((), ("fletcher32",))
]


def array(filters, chunks=(5, 30), **options):
    values = np.repeat(random_values("i4", (ROWS // 5, 30), seed=3), 5, axis=0)  # chunks get smaller
    return Stored(values, "chunked", chunks, filters=filters, **options)


# What torch undoes ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 3), st.integers(0, 12_000), st.sampled_from(["noise", "ones", "zeros"]), st.integers(0, 9))
def test_checksums_are_those_of_zlib(n_chunks, n_bytes, kind, seed):
    fill = {"ones": 255, "zeros": 0}
    noise = np.random.default_rng(seed).integers(0, 256, (n_chunks, n_bytes), np.uint8)
    chunks = noise if kind == "noise" else np.full_like(noise, fill[kind])
    assert adler32(torch.from_numpy(chunks)).tolist() == [zlib.adler32(chunk.tobytes()) for chunk in chunks]


def test_checksums_of_more_chunks_than_are_summed_together(monkeypatch):
    chunks = np.random.default_rng(0).integers(0, 256, (7, 5000), np.uint8)
    monkeypatch.setattr("lightning_h5.readers.on_device.undo.SLICE_BYTES", 11_000)
    assert adler32(torch.from_numpy(chunks)).tolist() == [zlib.adler32(chunk.tobytes()) for chunk in chunks]


@given(st.integers(1, 3), st.integers(0, 200), st.integers(1, 16), st.integers(0, 9))
def test_shuffled_bytes_are_put_back(n_chunks, n_bytes, size, seed):
    chunks = np.random.default_rng(seed).integers(0, 256, (n_chunks, n_bytes), np.uint8)
    expected = np.empty_like(chunks)
    for chunk, out in zip(chunks, expected, strict=True):
        decoder_of(Filter(SHUFFLE, "shuffle", (size,)), size)(chunk, out)
    assert np.array_equal(unshuffled(torch.from_numpy(chunks), size).numpy(), expected)


@given(st.integers(1, 3), st.integers(1, 500), st.sampled_from([1, 2, 4, 8]), st.integers(1, 9), st.integers(0, 9))
def test_shuffled_bits_are_put_back(n_chunks, n_numbers, size, n_block, seed):
    imagecodecs = pytest.importorskip("imagecodecs")
    values = np.random.default_rng(seed).integers(0, 256, (n_chunks, n_numbers * size), np.uint8)
    shuffled = np.stack(
        [
            np.frombuffer(imagecodecs.bitshuffle_encode(row.tobytes(), itemsize=size, blocksize=8 * n_block), np.uint8)
            for row in values
        ]
    )
    assert np.array_equal(without_bitshuffle(torch.from_numpy(shuffled), size, 8 * n_block * size).numpy(), values)


# What is decoded there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [1, 16, 64])
@pytest.mark.parametrize("chunks", [(5, 30), (7, 30), (5, 8)], ids=["whole rows", "an edge", "split rows"])
@pytest.mark.parametrize("filters", SUPPORTED, ids=" + ".join)
def test_all_chunks_are_decoded_there(make_h5, filters, chunks, alignment, monkeypatch):
    def fail(*arguments):
        raise AssertionError("a chunk was decoded on the CPU")

    stored = array(filters, chunks)
    layout = look(make_h5(x=stored))
    if layout.table.masks.any():
        pytest.skip("a filter left out chunks that it would not make smaller")
    monkeypatch.setattr("lightning_h5.readers.chunk_loader.ChunkLoader.load", fail)
    device, counters = FakeDevice(alignment), Counters()
    reader = open_pool_on_device(device, layout, counters=counters)
    rows = np.random.default_rng(0).permutation(ROWS)
    assert np.array_equal(reader.read(rows), stored.values[rows])
    assert n_decoded(counters) == len(layout.table.offsets)
    assert counters.total()["bytes_read"] == layout.table.sizes.sum()
    assert len(device.launches) == 1


def test_blocks_that_lz4_does_not_make_smaller_are_copied(make_h5):
    if "lz4, 64 bytes" not in known_filters():
        pytest.skip("LZ4 cannot be written here")
    stored = Stored(random_values("i4", (ROWS, 30), seed=3), "chunked", (5, 30), filters=("lz4, 64 bytes",))
    device = FakeDevice()
    reader = open_pool_on_device(device, look(make_h5(x=stored)))
    assert np.array_equal(reader.read(np.arange(ROWS)), stored.values)
    assert device.launches == []


@pytest.mark.parametrize("filters", SUPPORTED, ids=" + ".join)
def test_pieces_that_the_device_refuses_are_decoded_on_the_cpu(make_h5, filters):
    stored = array(filters)
    layout = look(make_h5(x=stored))
    for nth in (1, 3):
        seen = []

        def refuses(data, seen=seen, nth=nth):
            seen.append(len(data))
            return len(seen) % nth == 0

        reader = open_pool_on_device(FakeDevice(refuses=refuses), layout)
        assert np.array_equal(reader.read(np.arange(ROWS)), stored.values)


def test_what_a_device_does_not_decode_is_said(make_h5):
    reasons = {
        "lzf": array(("lzf",)),
        "none": array(()),
        "big": Stored(random_values(">i4", (ROWS, 3), seed=0), "chunked", (5, 3), dtype=">i4", filters=("gzip",)),
        "checksum": array(("fletcher32", "gzip")),
        "contiguous": Stored(random_values("i4", (ROWS, 3), seed=0)),
    }
    path = make_h5(**reasons)
    found = {name: why_not_on_device(look(path, name), FakeDevice()) for name in reasons}
    assert found == {
        "lzf": "a device does not undo its filters (lzf)",
        "none": "a device does not undo its filters (none)",
        "big": "its numbers are >i4",
        "checksum": "a device does not undo its filters (fletcher32, deflate)",
        "contiguous": "it has no chunks that are read by position",
    }


# Many at a time, in bounded memory ------------------------------------------------------------------------------------


def test_all_blocks_that_wait_are_decoded_in_one_launch(make_h5):
    stored = array(("gzip",))
    device, work = FakeDevice(), TaskQueue()
    reader = open_pool_on_device(device, look(make_h5(x=stored)), work=work)
    for row in range(0, ROWS, 5):
        reader.prefetch(reader.map.boxes(np.array([row])))
    while work.help():
        pass
    assert device.launches == [ROWS // 5]
    assert np.array_equal(reader.read(np.arange(ROWS)), stored.values)
    assert device.launches == [ROWS // 5]


def test_chunks_of_files_that_are_alike_are_decoded_in_one_launch(make_h5):
    files = [array(("gzip",)) for _ in range(20)]
    layouts = [look(make_h5(x=stored)) for stored in files]
    device = FakeDevice()
    reader = open_pool_on_device(device, *layouts)
    assert np.array_equal(reader.read(np.arange(20 * ROWS)), np.concatenate([stored.values for stored in files]))
    assert device.launches == [20 * ROWS // 5]


def test_a_file_that_cannot_be_read_fails_alone(make_h5):
    files = [array(("gzip",)) for _ in range(3)]
    layouts = [look(make_h5(x=stored)) for stored in files]
    reader = open_pool_on_device(FakeDevice(), *layouts)
    Path(layouts[1].path).write_bytes(b"\x89HDF")
    for start in (0, 2 * ROWS):
        assert np.array_equal(reader.read(start + np.arange(ROWS)), files[0].values)
    with pytest.raises(OSError, match=re.escape(layouts[1].path)):
        reader.read(np.arange(3 * ROWS))


@pytest.mark.parametrize("names", [("lz4", "lz4, 64 bytes"), ("bitshuffle lz4", "bitshuffle lz4, 16")])
def test_files_with_blocks_of_several_sizes(make_h5, names, monkeypatch):
    if not {*names} <= {*known_filters()}:
        pytest.skip("these filters cannot be written here")
    files = [array((name,)) for name in names]
    layouts = [look(make_h5(x=stored)) for stored in files]
    monkeypatch.setattr("lightning_h5.readers.chunk_loader.ChunkLoader.load", None)
    reader = open_pool_on_device(FakeDevice(), *layouts)
    assert np.array_equal(reader.read(np.arange(2 * ROWS)), np.concatenate([stored.values for stored in files]))


def test_an_interrupt_in_a_launch_leaves_no_read_waiting(make_h5, monkeypatch):
    stored, interrupts = array(("gzip",)), [KeyboardInterrupt]
    monkeypatch.setattr(loader, "LAUNCH_BYTES", 1)

    def refuses(data):
        if interrupts:
            raise interrupts.pop()
        return False

    work = TaskQueue()
    reader = open_pool_on_device(FakeDevice(refuses=refuses), look(make_h5(x=stored)), work=work)
    read = reader.begin(reader.map.boxes(np.arange(ROWS)), reader.copy_to(reader.memory((ROWS, 30), torch.int32)))
    with pytest.raises(KeyboardInterrupt):
        work.help()
    with pytest.raises(H5Error, match="Read again"):
        in_threads(read.finish)
    assert np.array_equal(reader.read(np.arange(ROWS)), stored.values)


def test_a_codec_that_fails_leaves_all_to_the_cpu_and_says_so(make_h5, caplog):
    class Broken(FakeCodec):
        def decode(self, *arguments):
            raise H5Error("status 11")

    class Device(FakeDevice):
        def codec(self, compression):
            return Broken(self, compression)

    stored = array(("gzip",))
    reader = open_pool_on_device(Device(), look(make_h5(x=stored)), n_blocks=2)
    assert np.array_equal(reader.read(np.arange(ROWS)), stored.values)
    assert caplog.text.count("chunks are decoded on the CPU: status 11") == 1


def test_frames_of_zstandard_with_a_checksum_are_decoded_on_the_cpu(make_h5):
    if "zstd" not in known_filters():
        pytest.skip("Zstandard cannot be written here")
    path = make_h5(x=array(("zstd",)))
    with h5py.File(path) as file:
        frames = [np.frombuffer(file["x"].id.read_direct_chunk((row, 0))[1], np.uint8) for row in (0, 5, 10)]
    frames[1] = frames[1].copy()
    frames[1][4] |= 4  # the flag of a checksum in the frame's descriptor
    stops = np.cumsum([len(frame) for frame in frames])
    starts = stops - [len(frame) for frame in frames]
    parsed = zstd_pieces(np.concatenate(frames), starts, stops, 5 * 30 * 4)
    assert parsed.is_wrong.tolist() == [False, True, False]
    assert parsed.pieces.chunks.tolist() == [0, 2]


def test_a_launch_has_a_bounded_size(make_h5, monkeypatch):
    stored = array(("shuffle", "gzip"))
    monkeypatch.setattr(loader, "LAUNCH_BYTES", 3 * 5 * 30 * 4)
    device = FakeDevice()
    reader = open_pool_on_device(device, look(make_h5(x=stored)))
    assert np.array_equal(reader.read(np.arange(ROWS)), stored.values)
    assert device.launches == [3, 3, 2]


def test_arrays_of_several_files_share_launches(make_h5):
    files = [array(("gzip",)), array(("gzip",), (4, 30)), array(("shuffle", "gzip"))]
    layouts = [look(make_h5(x=stored)) for stored in files]
    device = FakeDevice()
    reader = open_pool_on_device(device, *layouts)
    rows = np.random.default_rng(0).permutation(3 * ROWS)
    assert np.array_equal(reader.read(rows), np.concatenate([stored.values for stored in files])[rows])
    assert sum(device.launches) == 8 + 10 + 8


@pytest.mark.parametrize("n_blocks", [1, 2, 3, EVERYTHING])
def test_memory_is_bounded_by_the_cache(make_h5, n_blocks):
    stored = array(("gzip",))
    reader = open_pool_on_device(FakeDevice(), look(make_h5(x=stored)), n_blocks=n_blocks)
    rows = np.random.default_rng(0).permutation(ROWS)
    for part in np.split(rows, 8):
        assert np.array_equal(reader.read(part, epoch=0), stored.values[part])
    cache = reader._cache
    assert cache.rows.nbytes == min(n_blocks, 8) * 5 * 30 * 4
    assert reader.kept_bytes == 0  # of this machine's memory


def test_a_device_without_memory_says_what_to_do(make_h5, monkeypatch):
    class Full(FakeDevice):
        def host_memory(self, n_bytes):
            raise torch.OutOfMemoryError("no memory")

    reader = open_pool_on_device(Full(), look(make_h5(x=array(("gzip",)))))
    with pytest.raises(H5MemoryError, match=r"not enough memory left to decode chunks.*smaller files\.cache_bytes"):
        reader.read(np.arange(ROWS))


# Damage ---------------------------------------------------------------------------------------------------------------


def test_a_wrong_adler_32_is_found(make_h5):
    path = make_h5(x=array(("gzip",)))
    with h5py.File(path) as file:
        found = file["x"].id.get_chunk_info(3)
    with open(path, "rb+") as file:
        file.seek(found.byte_offset + found.size - 1)
        last = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([last[0] ^ 1]))
    layout, device = look(path), FakeDevice()
    reader = open_pool_on_device(device, layout)
    with pytest.raises(OSError, match=re.escape("chunk 3 (rows 15 to 19) of 'x'")) as error:
        reader.read(np.arange(ROWS))
    with pytest.raises(OSError, match="chunk 3") as by_cpu:
        open_pool(layout).read(np.arange(ROWS))
    assert str(error.value) == str(by_cpu.value)
    assert device.launches == [8]
