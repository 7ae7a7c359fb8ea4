"""Chunks read and decoded by compiled code: when it is used, that it counts the same, and that it stays in bounds.

That it gives the right rows, or the same errors, is among the claims about all readers.
"""

from dataclasses import replace

import numpy as np
import pytest
from factories import Stored, assert_same_rows, in_threads, known_filters, random_values
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import IS_COMPILED, look, open_pool
from tiers import examples

import lightning_h5.readers.select
from lightning_h5.counters import Counters
from lightning_h5.readers import BlockMemory, ChunkLoader, block_memory, chunk_loader
from lightning_h5.readers.filters import compiled
from lightning_h5.readers.filters.pipeline import Pipeline, decoder_of

ROWS, STEP, LENGTH = 40, 5, 60

PLUGINS = ("zstd", "lz4", "lz4, 64 bytes", "bitshuffle lz4", "bitshuffle lz4, 16", "bitshuffle zstd")
FILTERS = [
    *(("gzip",), ("lzf",), ("shuffle", "gzip"), ("shuffle", "lzf")),
    *((name,) for name in PLUGINS if name in known_filters()),
    *([("shuffle", "zstd")] if "zstd" in known_filters() else []),
]

needs_numba = pytest.mark.skipif(not IS_COMPILED, reason="numba is not installed")


@pytest.fixture
def calls(monkeypatch):
    """Chunks of each call of compiled code."""
    made, call = [], compiled.ChunkLoop.__call__

    def counted(self, fd, offsets, *more):
        made.append(len(offsets))
        return call(self, fd, offsets, *more)

    monkeypatch.setattr(compiled.ChunkLoop, "__call__", counted)
    return made


def compressible(dtype):
    return np.resize(random_values(np.dtype(dtype), (11,), 3), (ROWS, LENGTH))


def array(filters, dtype="f4", chunks=(STEP, LENGTH)):
    return Stored(compressible(dtype), "chunked", chunks, filters=filters)


@needs_numba
@pytest.mark.parametrize("chunks", [(STEP, LENGTH), (STEP, 25), (1, LENGTH)], ids=["rows", "parts of rows", "a row"])
@pytest.mark.parametrize("dtype", ["u1", "i2", ">i4", "f8"])
@pytest.mark.parametrize("filters", FILTERS, ids=" + ".join)
def test_all_chunks_of_a_large_array_go_through_it_and_are_counted_as_ever(make_h5, calls, filters, dtype, chunks):
    layout = look(make_h5(x=array(filters, dtype, chunks)))
    counted = {}
    for is_large in (False, True):
        counters = Counters()
        reader = open_pool(layout, n_blocks=2, counters=counters, is_large=is_large)
        calls.clear()
        assert_same_rows(reader.read(np.arange(ROWS)), compressible(dtype).astype(np.dtype(dtype).newbyteorder("=")))
        counted[is_large] = counters.total()
        assert sum(calls) == (len(layout.table.offsets) if is_large else 0)
    for name in ("bytes_read", "bytes_decoded", "chunks_decoded", "blocks_loaded"):
        assert counted[True][name] == counted[False][name] > 0
    assert counted[True]["read_seconds"] > 0
    assert counted[True]["decode_seconds"] > 0


@needs_numba
@pytest.mark.parametrize(
    ("filters", "dtype"),
    [
        (("gzip", "fletcher32"), "f4"),
        (("fletcher32", "gzip"), "f4"),
        (("shuffle", "gzip"), "c16"),
        (("shuffle",), "f4"),
    ],
    ids=["checksum", "checksum first", "numbers of 16 bytes", "not compressed"],
)
def test_what_it_does_not_know_goes_the_other_way(make_h5, calls, filters, dtype):
    reader = open_pool(look(make_h5(x=array(filters, dtype))), n_blocks=2, is_large=True)
    assert_same_rows(reader.read(np.arange(ROWS)), compressible(dtype))
    assert not calls


@needs_numba
def test_chunks_without_a_filter_or_never_written_go_the_other_way(make_h5, calls):
    """Noise does not shrink: LZF leaves such chunks as they are."""
    values = np.zeros((ROWS, LENGTH))
    values[: 2 * STEP] = random_values(np.dtype("f8"), (2 * STEP, LENGTH), 1)
    path = make_h5(x=Stored(values, "chunked", (STEP, LENGTH), filters=("lzf",)))
    layout = look(path)
    assert layout.table.masks.astype(bool).tolist() == [True, True] + [False] * 6
    reader = open_pool(layout, n_blocks=1, is_large=True)
    for row in range(0, ROWS, STEP):
        assert_same_rows(reader.read(np.array([row])), values[[row]])
    assert sum(calls) == 6


@pytest.mark.parametrize(
    ("n_blocks", "is_compiled"), [(2, IS_COMPILED), (8, False)], ids=["too large", "all of it fits"]
)
def test_it_is_for_arrays_that_are_decoded_anew_in_each_epoch(make_h5, calls, monkeypatch, n_blocks, is_compiled):
    layout = look(make_h5(x=array(("gzip",))))
    for least, expected in ((ROWS * LENGTH * 4, is_compiled), (ROWS * LENGTH * 4 + 1, False)):
        monkeypatch.setattr(lightning_h5.readers.select, "MIN_COMPILED", least)
        calls.clear()
        reader = lightning_h5.readers.open_chunked(
            [layout],
            lightning_h5.hdf5.OpenOptions(),
            rows_per_run=[STEP],
            n_bytes=n_blocks * STEP * LENGTH * 4,
            work=lightning_h5.readers.TaskQueue(),
            counters=Counters(),
        )
        assert_same_rows(reader.read(np.arange(ROWS)), compressible("f4"))
        assert bool(calls) is expected


def test_without_a_compiler_there_is_none(make_h5, calls, monkeypatch):
    monkeypatch.setattr(compiled, "compiled", lambda loop: None)
    monkeypatch.setattr(compiled, "_made", {})
    reader = open_pool(look(make_h5(x=array(("shuffle", "gzip")))), n_blocks=2, is_large=True)
    assert_same_rows(reader.read(np.arange(ROWS)), compressible("f4"))
    assert not calls


@needs_numba
def test_workers_compile_nothing(make_h5, calls, monkeypatch):
    monkeypatch.setattr(compiled, "_made", {})
    layout = look(make_h5(x=array(("shuffle", "gzip"))))
    for number, n_made in ((0, 0), (None, 1), (0, 1)):
        monkeypatch.setattr(compiled, "worker_number", lambda number=number: number)
        calls.clear()
        reader = open_pool(layout, n_blocks=2, is_large=True)
        assert_same_rows(reader.read(np.arange(ROWS)), compressible("f4"))
        assert (len(compiled._made), bool(calls)) == (n_made, n_made > 0)


def n_loops(x):
    return len(compiled._made)


@needs_numba
def test_workers_that_are_forked_have_what_was_compiled_before(make_h5, nothing_held, monkeypatch):
    monkeypatch.setattr(compiled, "_made", {})
    monkeypatch.setattr(lightning_h5.readers.select, "MIN_COMPILED", 0)
    data = lightning_h5.LazyH5DataModule(
        make_h5(x=array(("shuffle", "gzip"))),
        x_key="x",
        batch_size=5,
        num_workers=2,
        files={"cache_bytes": 4 * STEP * LENGTH * 4},
        workers={"start_method": "fork"},
        transform=n_loops,
    )
    data.setup("fit")
    found = [n for batch in data.train_dataloader() for n in batch.tolist()]
    data.teardown("fit")
    assert found == [1] * ROWS


@needs_numba
@given(
    filters=st.sampled_from(FILTERS),
    changes=st.lists(st.tuples(st.integers(0, 24) | st.integers(0, 10_000), st.integers(0, 255)), max_size=3),
    cut=st.none() | st.integers(0, 200),
    chunk_rows=st.sampled_from([1, 7]),
)
@settings(max_examples=examples(300))
def test_a_damaged_chunk_decodes_as_by_the_decoder_alone_or_not_at_all(make_h5, filters, changes, cut, chunk_rows):
    """Bytes that changed, mostly of the header, and a chunk that is cut off."""
    layout = look(make_h5(x=array(filters, "i4", (chunk_rows, 33))))
    loop, pipeline, n_bytes = Pipeline(layout).compile(), Pipeline(layout), layout.chunk_bytes
    at, size = int(layout.table.offsets[0]), int(layout.table.sizes[0])
    with open(layout.path, "r+b") as file:
        for place, byte in changes:
            file.seek(at + place % size)
            file.write(bytes([byte]))
        size = size if cut is None else max(1, size - cut)
        file.flush()
        file.seek(at)
        stored = np.frombuffer(file.read(size), np.uint8)
        found, expected = np.zeros(n_bytes, np.uint8), np.zeros(n_bytes, np.uint8)
        seconds = loop(file.fileno(), np.array([at]), np.array([size]), n_bytes, found, np.zeros(1, np.int64))
    try:
        pipeline.decode(stored, 0, expected)
    except Exception:  # decoders raise their own errors
        assert seconds is None
    else:
        assert seconds is not None
        assert np.array_equal(found, expected)


@needs_numba
@pytest.mark.parametrize("firsts", [[-1], [5], [0, 0], []], ids=["before", "behind", "too many", "too few"])
def test_memory_that_is_not_there_is_refused(make_h5, firsts):
    layout = look(make_h5(x=array(("gzip",))))
    loop = compiled.loop_of(decoder_of(layout.filters[0], 4), 1)
    n_bytes = layout.chunk_bytes
    out = np.zeros(n_bytes + 4, np.uint8)
    with open(layout.path, "rb") as file, pytest.raises(IndexError, match="do not fit into"):
        loop(file.fileno(), layout.table.offsets[:1], layout.table.sizes[:1], n_bytes, out, np.array(firsts, np.int64))
    assert not out.any()


@needs_numba
def test_it_is_compiled_once_for_all_chunk_sizes_and_options(make_h5, monkeypatch):
    monkeypatch.setattr(compiled, "_made", {})
    for filters in (("gzip",), ("gzip 9",), ("lzf",)):
        for rows in (1, 5, 7):
            open_pool(look(make_h5(x=array(filters, chunks=(rows, LENGTH)))), n_blocks=1, is_large=True)
    assert len(compiled._made) == 2


@pytest.mark.parametrize("size", [0, 3, 8], ids=["no number", "an odd size", "larger than a number"])
def test_a_shuffle_of_numbers_that_the_array_has_not_goes_the_other_way(make_h5, size):
    layout = look(make_h5(x=array(("shuffle", "gzip"))))
    shuffle, gzip = layout.filters
    foreign = replace(layout, filters=(replace(shuffle, options=(size,)), gzip))
    assert Pipeline(foreign).compile() is None
    assert (Pipeline(layout).compile() is not None) == IS_COMPILED


@pytest.mark.parametrize("is_compiled", [True, False])
def test_memory_for_decoding_does_not_grow_with_the_chunks_of_a_block(make_h5, is_compiled):
    """256 chunks of 64 KiB: sixteen of them are neighbours along the last axis, and come together."""
    values = np.arange(4 << 20, dtype="f4").reshape(4, 1024, 1024)
    layout = look(make_h5(x=Stored(values, "chunked", (4, 64, 64), filters=("gzip",))))
    source, rows = ChunkLoader(layout, Counters()), np.empty_like(values)
    if is_compiled:
        source.compile()

    def load():
        source.load([0], range(source.n_parts), BlockMemory(rows, np.zeros(1, np.int64), 4))
        return {use: len(held) for use, held in vars(block_memory._scratch).items()}

    (held,) = in_threads(load)
    assert np.array_equal(rows, values)
    assert held["decoded"] <= 2 * chunk_loader.TASK_BYTES
    assert held["stored"] <= 2 * chunk_loader.TASK_BYTES


@pytest.mark.parametrize("size", sorted(compiled.SORTED))
@pytest.mark.parametrize("n", [0, 1, 7, 64, 65])
def test_bytes_are_put_in_order_as_numpy_does_it(size, n):
    numbers = random_values(np.dtype(f"u{size}"), (n,), 5)
    planes = np.ascontiguousarray(numbers.view(np.uint8).reshape(n, size).T).reshape(-1)
    out = np.zeros(n * size, np.uint8)
    compiled._SORTS[size](planes, out)
    assert np.array_equal(out.view(numbers.dtype), numbers)
