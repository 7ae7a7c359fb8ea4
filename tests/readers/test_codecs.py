"""Every decoder of every filter, the slower ones too; and what happens where there is none."""

import bz2
import ctypes
import sys
import tracemalloc
import zlib
from dataclasses import replace
from importlib import metadata

import h5py
import numpy as np
import pytest
from factories import Stored, assert_same_rows, is_decodable, known_filters, random_values
from pools import OPTIONS, can_be_pooled, look, n_decoded, open_pool

from lightning_h5 import FileOptions, H5CorruptError, H5MemoryError, H5ValueError
from lightning_h5.counters import Counters
from lightning_h5.hdf5 import Filter, OpenOptions, describe_array
from lightning_h5.readers import ContiguousReader, MappedReader, fallback_reason, is_pooled, open_reader, open_source
from lightning_h5.readers.filters import native as native_decoders
from lightning_h5.readers.filters.pipeline import NativeDecoder, decoder_of

PLUGINS = "C functions in hdf5plugin"
LIBRARIES = ["imagecodecs", "deflate", "zlib_into", "blosc2", PLUGINS]


@pytest.fixture
def without(monkeypatch):
    """As where some libraries are not installed."""
    decoder_of.cache_clear()

    def forbid(names):
        for name in set(names) - {PLUGINS}:
            monkeypatch.setitem(sys.modules, name, None)
        if PLUGINS in names:
            monkeypatch.setattr(native_decoders, "_plugin", missing)
            for made in (native_decoders._zstd, native_decoders._lz4, native_decoders._bitshuffle):
                made.cache_clear()

    def missing(name):
        raise ImportError(name)

    yield forbid
    decoder_of.cache_clear()


def numbers(kind, dtype, shape):
    values = random_values(dtype, shape, 4)
    return values if kind == "noise" else np.resize(values.reshape(-1)[:5], shape)


def native(values):
    return values.astype(values.dtype.newbyteorder("="))


def takes_any_size():
    """Whether imagecodecs is new enough for bitshuffled numbers of other sizes than 1, 2, 4 and 8 bytes."""
    year, month, _ = map(int, metadata.version("imagecodecs").split("."))
    return (year, month) >= (2025, 11)


def assert_decoded_here(layout, counters):
    assert fallback_reason(layout) is None
    # HDF5 leaves out a filter where a chunk would grow.
    assert n_decoded(counters) == (0 if layout.is_contiguous else len(layout.table.offsets))


SHAPES = [((23, 40), (5, 40)), ((23, 41), (7, 13)), ((9, 3, 5), (4, 3, 2)), ((50,), (11,))]
WAYS = {
    "as installed": [],
    "without imagecodecs": ["imagecodecs"],
    "without imagecodecs and deflate": ["imagecodecs", "deflate", "zlib_into"],
    "imagecodecs alone": ["deflate", "zlib_into", "blosc2", PLUGINS],
}


@pytest.mark.wide
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "filters", [("gzip",), ("lzf",), ("shuffle",), ("shuffle", "gzip", "fletcher32")], ids=" + ".join
)
def test_filters_that_need_no_extra_are_decoded_whatever_is_installed(make_h5, without, filters, way):
    without(WAYS[way])
    for kind in ("noise", "repeats"):
        for dtype in ("u1", "i2", ">i4", "c16"):
            arrays = {
                str(at): Stored(numbers(kind, dtype, shape), "chunked", chunks, filters=filters)
                for at, (shape, chunks) in enumerate(SHAPES)
            }
            path = make_h5(arrays)
            for key, stored in arrays.items():
                layout, counters = look(path, key), Counters()
                found = open_pool(layout, counters=counters).read(np.arange(len(stored.values))[::-1])
                assert_same_rows(found, native(stored.values[::-1]))
                assert_decoded_here(layout, counters)


@pytest.mark.wide
@pytest.mark.parametrize("name", [n for n in known_filters() if n not in ("shuffle", "fletcher32")])
@pytest.mark.parametrize("way", ["as installed", "imagecodecs alone"])
@pytest.mark.parametrize("dtype", ["u1", ">i2", "i8", "c16", "3 bytes", "pairs"])
def test_each_option_of_each_filter_is_decoded(make_h5, without, name, dtype, way):
    """Sizes of numbers that are no powers of two, chunks shorter than a block, and many blocks a chunk, too."""
    if not is_decodable(name) or (way == "imagecodecs alone" and "blosc2" in name):
        pytest.skip("its decoder is not installed")
    without(WAYS[way])
    dtype = {"3 bytes": np.dtype([("a", "u1"), ("b", ">u2")]), "pairs": np.dtype([("a", "f4", (2,))])}.get(dtype, dtype)
    arrays, shapes = {}, [*SHAPES, ((7,), (3,)), ((40, 3000), (10, 3000))]
    for at, (shape, chunks) in enumerate(shapes):
        values = np.zeros(shape, dtype)
        fill = values if values.dtype.names is None else values["a"]
        fill[...] = np.resize(random_values(fill.dtype, (9,), 2), fill.shape)
        arrays[str(at)] = Stored(values, "chunked", chunks, filters=(name,))
    path = make_h5(arrays)
    for at, (shape, _) in enumerate(shapes):
        member = "" if np.dtype(dtype).names is None else "/a"
        layout, counters = look(path, f"{at}{member}"), Counters()
        found = open_pool(layout, counters=counters).read(np.arange(shape[0]))
        values = arrays[str(at)].values
        assert_same_rows(found, native(values["a"] if member else values))
        is_native = isinstance(decoder_of(layout.filters[0], 1), NativeDecoder)
        if name.startswith("bitshuffle") and not (
            is_native or np.dtype(dtype).itemsize in (1, 2, 4, 8) or takes_any_size()
        ):
            assert "bitshuffle" in fallback_reason(layout)
        else:
            assert_decoded_here(layout, counters)
    assert not layout.is_contiguous  # the last one, whose chunks are large


@pytest.mark.parametrize("name", ["zstd", "blosc", "lz4", "bitshuffle lz4"])
def test_a_filter_without_a_decoder_is_left_to_the_library_and_the_reason_says_what_to_install(make_h5, without, name):
    if name not in known_filters():
        pytest.skip("it cannot be written here")
    without(LIBRARIES)
    values = np.resize(np.arange(9), (20, 30))
    path = make_h5(
        many=Stored(values, "chunked", (6, 30), filters=(name,)),
        one=Stored(values, "chunked", (1, 30), filters=(name,)),
    )
    for key in ("many", "one"):
        layout = look(path, key)
        assert "pip install --upgrade 'lightning-h5[filters]'" in fallback_reason(layout)
        assert is_pooled(layout, OPTIONS) == (key == "many")  # a chunk of one row is no one else's
        counters = Counters()
        rows = np.array([19, 3, 3, 0])
        assert_same_rows(open_pool(layout, counters=counters).read(rows), values[rows])
        assert_same_rows(open_reader(layout, OPTIONS).read(rows), values[rows])
        assert n_decoded(counters) == 0


def test_zlib_alone_decodes_no_more_than_a_chunk_has(without):
    """And no less: a stream that is cut off is none."""
    without(["imagecodecs", "deflate"])
    decode = decoder_of(Filter(1, "gzip", ()), 1)
    out = np.empty(1000, np.uint8)
    decode(np.frombuffer(zlib.compress(b"7" * 1000), np.uint8), out)
    assert (out == ord("7")).all()
    streams = [zlib.compress(bytes(30 << 20)), zlib.compress(bytes(999)), zlib.compress(bytes(1000))[:-1]]
    tracemalloc.start()
    for wrong in streams:
        with pytest.raises(ValueError, match=r"stream|decodes to"):
            decode(np.frombuffer(wrong, np.uint8), out)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


BOMBS = {
    "gzip": lambda n: zlib.compress(bytes(n)),
    "bzip2": lambda n: bz2.compress(bytes(n)),
    "lzf": lambda n: b"\0\0" + b"\xe0\xff\0" * (n // 264),  # a zero, then repeats of 264 bytes
    "zstd": lambda n: pytest.importorskip("imagecodecs").zstd_encode(bytes(n)),
    "blosc": lambda n: pytest.importorskip("imagecodecs").blosc_encode(bytes(n)),
    "lz4": lambda n: n.to_bytes(8, "big") + (1 << 20).to_bytes(4, "big"),
    "bitshuffle lz4": lambda n: n.to_bytes(8, "big") + (8192).to_bytes(4, "big"),
}


@pytest.mark.parametrize(
    "filters",
    [
        ("gzip", "gzip"),
        ("shuffle", "lzf", "fletcher32", "gzip"),
        ("gzip", "gzip", "gzip"),
        ("gzip", "shuffle"),
        ("gzip", "shuffle", "bzip2"),
        *(("gzip", name) for name in BOMBS if name != "gzip"),
        ("lz4", "fletcher32", "bitshuffle", "blosc", "fletcher32"),
    ],
    ids=" + ".join,
)
def test_what_was_compressed_before_is_decoded_here_within_bounds(make_h5, filters):
    if not all(name in known_filters() and is_decodable(name) for name in filters):
        pytest.skip("it cannot be written here")
    values = np.resize(np.arange(9), (20, 30))
    path = make_h5(x=Stored(values, "chunked", (6, 30), filters=filters))
    layout = look(path)
    assert fallback_reason(layout) is None
    assert_same_rows(open_pool(layout).read(np.arange(20)), values)
    assert_same_rows(open_reader(layout, OPTIONS).read(np.arange(20)), values)
    if filters[-1] not in BOMBS:
        return
    with h5py.File(path, "r+") as file:
        file["x"].id.write_direct_chunk((6, 0), BOMBS[filters[-1]](40 << 20), 0)
    tracemalloc.start()
    for reader in (open_pool(look(path)), open_reader(look(path), OPTIONS)):
        with pytest.raises(H5CorruptError, match="does not decode"):
            reader.read(np.arange(20))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("filters", [("scaleoffset", "lzf", "gzip"), ("lzf", "szip"), ("szip", "shuffle"), ("bzip2",)])
def test_what_only_the_library_decodes_without_bounds_is_refused_unless_trusted(make_h5, monkeypatch, filters):
    """Neither its rows nor a part of them: the library would allocate whatever a chunk decodes to."""
    numbers = {name: number for name, (number, _) in known_filters().items()} | {"szip": 4, "scaleoffset": 6}
    monkeypatch.setattr("lightning_h5.readers.select.why_not_decodable", lambda layout: "as with a live writer")
    layout = look(make_h5(x=Stored(np.zeros((20, 30)), "chunked", (6, 30), filters=("gzip",))))
    layout = replace(layout, filters=tuple(Filter(numbers.get(name, 307), name, ()) for name in filters))
    for array in (layout, layout.seen((0,), {1: 3})):
        with pytest.raises(H5ValueError, match="trusted=True"):
            open_source(array, OpenOptions(), 1, Counters())
        open_source(array, OpenOptions(files=FileOptions(trusted=True)), 1, Counters())


def test_a_virtual_array_over_what_was_compressed_twice_is_refused_unless_trusted(make_h5):
    path = make_h5(a=Stored(np.arange(40).reshape(20, 2), "chunked", (6, 2), filters=("gzip", "gzip")))
    with h5py.File(path, "r+") as file:
        layout = h5py.VirtualLayout((20, 2), "i8")
        layout[...] = h5py.VirtualSource(file["a"])
        file.create_virtual_dataset("x", layout)
    with pytest.raises(H5ValueError, match=r"'/a' in .* is compressed with 'deflate', 'deflate'.*trusted=True"):
        look(path)
    trusted = FileOptions(trusted=True)
    with h5py.File(path) as file:
        layout = describe_array(file, path, "x", trusted)
    found = open_reader(layout, OpenOptions(files=trusted)).read(np.arange(20))
    assert_same_rows(found, np.arange(40).reshape(20, 2))


@pytest.mark.parametrize("name", ["nbit", "scaleoffset"])
def test_options_of_a_filter_that_state_larger_chunks_are_damage(make_h5, name):
    layout = look(make_h5(x=Stored(np.zeros((20, 30), "i4"), "chunked", (6, 30), {"scaleoffset": 0})))
    right = layout.filters[0].options
    assert right[2] * right[4] == layout.chunk_bytes, "they are the options with which the library allocates"
    number = {"nbit": 5, "scaleoffset": 6}[name]
    open_source(replace(layout, filters=(Filter(number, name, right),)), OpenOptions(), 1, Counters())
    crafted = (*right[:2], 1 << 30, *right[3:])
    with pytest.raises(H5CorruptError, match="declares chunks of"):
        open_source(replace(layout, filters=(Filter(number, name, crafted),)), OpenOptions(), 1, Counters())


def test_szip_that_states_more_than_a_chunk_is_not_given_to_the_library(make_h5):
    values = np.resize(np.arange(9, dtype="i4"), (20, 30))
    path = make_h5(x=Stored(values, "chunked", (6, 30), {"compression": "szip"}))
    with h5py.File(path, "r+") as file:
        mask, chunk = file["x"].id.read_direct_chunk((6, 0))
        assert not mask, "the filter was applied"
        file["x"].id.write_direct_chunk((6, 0), (1 << 31).to_bytes(4, "little") + chunk[4:], 0)
    reader = open_reader(look(path), OPTIONS)
    assert_same_rows(reader.read(np.arange(6)), values[:6])
    with pytest.raises(H5CorruptError, match="states that it decodes to 2,147,483,648 bytes"):
        reader.read(np.arange(6, 12))


def test_a_lack_of_memory_in_the_library_is_no_damage(make_h5, monkeypatch):
    layout = look(make_h5(x=Stored(np.zeros((20, 30), "i4"), "chunked", (6, 30), {"scaleoffset": 0})))
    for error in (OSError("memory allocation failed for scaleoffset decompression"), MemoryError()):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(h5py.Dataset, "__getitem__", fail)
        with pytest.raises(H5MemoryError, match="not enough memory to decode rows 0 to 3"):
            open_reader(layout, OPTIONS).read(np.arange(4))


@pytest.mark.parametrize("options", [{"scaleoffset": 0}, {"compression": "szip"}], ids=str)
def test_filters_that_only_the_library_knows_are_named(make_h5, options):
    values = np.resize(np.arange(9), (20, 30))
    layout = look(make_h5(x=Stored(values.astype("i4"), "chunked", (6, 30), options)))
    assert "there is no decoder for its filter" in fallback_reason(layout)
    assert is_pooled(layout, OPTIONS)
    assert_same_rows(open_pool(layout).read(np.arange(20)), values.astype("i4"))


def test_a_file_with_a_live_writer_is_not_pooled(make_h5):
    """Its last chunk is written again and again, and may move."""
    layout = look(make_h5(x=Stored(np.zeros((20, 30)), "chunked", (6, 30), filters=("gzip",)), libver="latest"))
    assert is_pooled(layout, OPTIONS)
    assert not is_pooled(layout, OpenOptions(files=FileOptions(swmr=True)))


def test_a_stream_with_something_behind_it_is_read_as_the_library_reads_it(make_h5):
    values = np.resize(np.arange(9), (12, 30))
    path = make_h5(x=Stored(values, "chunked", (6, 30), filters=("gzip",)))
    with h5py.File(path, "a") as file:
        file["x"].id.write_direct_chunk((6, 0), zlib.compress(values[6:].tobytes()) + b"\0" * 9)
        assert np.array_equal(file["x"], values)
    assert_same_rows(open_pool(look(path)).read(np.arange(12)), values)


def test_options_that_no_decoder_knows_leave_an_array_to_the_library(make_h5):
    layout = look(make_h5(x=Stored(np.arange(40).reshape(10, 4), "chunked", (3, 4), filters=("gzip",))))
    for options in [(), (0, 4), (0, 4, 8, 0, 9)]:  # bitshuffle's: too few, and a compressor of the future
        strange = replace(layout, filters=(Filter(32008, "", options),))
        assert "bitshuffle" in fallback_reason(strange)


# Corners of the file format that h5py does not write, and other programs do ------------------------------------


def library():
    """The HDF5 library that h5py is linked to."""
    found = ctypes.CDLL(h5py.h5p.__file__)
    try:
        found.H5Pset_chunk_opts.argtypes = [ctypes.c_int64, ctypes.c_uint]
        found.H5Pset_fill_value.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    except AttributeError:
        pytest.skip("its functions are not to be found on this system")
    return found


@pytest.mark.parametrize("filters", [("gzip",), ("shuffle",), ("fletcher32",), ("shuffle", "lzf")], ids=" + ".join)
@pytest.mark.parametrize(
    ("shape", "chunks"), [((22, 14), (4, 4)), ((22, 12), (4, 12)), ((24, 14), (4, 4)), ((22,), (4,))]
)
def test_chunks_at_the_edge_that_were_left_unfiltered_are_read_right(make_h5, filters, shape, chunks):
    """H5Pset_chunk_opts: such chunks go through no filter, and their filter masks do not say so."""
    values = np.resize(np.arange(1000, 1013, dtype="i4"), shape)
    path = make_h5(libver="latest")
    with h5py.File(path, "a", libver="latest") as file:
        dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        dcpl.set_chunk(chunks)
        assert library().H5Pset_chunk_opts(dcpl.id, 2) == 0
        for name in filters:
            number, options = known_filters()[name]
            dcpl.set_filter(number, 0 if name == "fletcher32" else h5py.h5z.FLAG_OPTIONAL, options)
        space = h5py.h5s.create_simple(shape)
        h5py.Dataset(h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, dcpl))[...] = values
    layout = look(path)
    assert_same_rows(open_pool(layout).read(np.arange(shape[0])), values)
    assert_same_rows(open_pool(layout, n_blocks=0).read(np.arange(shape[0])), values)


def test_where_it_cannot_be_told_whether_chunks_at_the_edge_are_filtered_the_library_reads(make_h5, monkeypatch):
    monkeypatch.setattr("lightning_h5.hdf5.describe.leaves_edges_plain", lambda plist: None)
    values = np.resize(np.arange(9), (22, 12))
    options = {"over the edge": ((4, 12), ("gzip",)), "even": ((2, 4), ("gzip",)), "unfiltered": ((4, 5), ())}
    path = make_h5({key: Stored(values, "chunked", chunks, filters=f) for key, (chunks, f) in options.items()})
    for key in options:
        layout = look(path, key)
        assert (fallback_reason(layout) is None) == (key != "over the edge")
        assert_same_rows(open_pool(layout).read(np.arange(22)), values)
    assert "edge" in fallback_reason(look(path, "over the edge"))


@pytest.mark.parametrize("chunks", [None, (4, 4)], ids=["contiguous", "chunked"])
def test_an_array_without_a_fill_value_is_read(make_h5, chunks):
    values = np.resize(np.arange(1, 14, dtype="i4"), (12, 8))
    path = make_h5()
    with h5py.File(path, "a") as file:
        dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if chunks:
            dcpl.set_chunk(chunks)
        assert library().H5Pset_fill_value(dcpl.id, h5py.h5t.NATIVE_INT32.id, None) == 0
        space = h5py.h5s.create_simple((12, 8))
        array = h5py.Dataset(h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, dcpl))
        array[:8] = values[:8]
    assert_same_rows(open_pool(look(path)).read(np.arange(8)), values[:8])
    assert open_pool(look(path)).read(np.arange(12)).shape == (12, 8)  # what was never written may be anything


def test_a_map_of_chunks_that_lie_apart_is_refused(make_h5):
    """Each of their rows has a place, but not the array as a whole."""
    values = np.arange(40).reshape(10, 4)
    layout = look(make_h5(x=Stored(values, "chunked", (3, 4))))
    assert layout.is_contiguous
    assert type(open_reader(layout, OPTIONS, mmap=True)) is ContiguousReader
    with pytest.raises(ValueError, match="'x'"):
        MappedReader(layout)


def test_chunks_that_are_only_an_element_each_are_read(make_h5):
    """As many chunks as numbers; people have made such files."""
    values = random_values("f4", (30, 7))
    path = make_h5(x=Stored(values, "chunked", (1, 1), filters=("gzip",)), y=Stored(values, "chunked", (1, 1)))
    for key in "xy":
        layout = look(path, key)
        assert can_be_pooled(layout)
        assert_same_rows(open_pool(layout, n_blocks=3).read(np.arange(30)[::-1]), values[::-1])
