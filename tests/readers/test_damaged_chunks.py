"""A chunk that does not decode is an error of the reads that need it, each time, and of no others. Nothing hangs."""

import os
import re
import struct
import threading
from functools import partial

import h5py
import numpy as np
import pytest
from factories import Stored, edit, encode, in_threads, is_decodable, known_filters, run_forked
from fake_decoding import FakeDevice
from guards import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import (
    EVERYTHING,
    OPTIONS,
    TASK_BYTES,
    can_be_pooled,
    load_at_a_time,
    look,
    open_pool,
    open_pool_on_device,
)
from tiers import examples

from lightning_h5.errors import H5CorruptError, H5FileError
from lightning_h5.hdf5 import process_pool
from lightning_h5.readers import ChunkLoader, TaskQueue, open_reader

ROWS, STEP = 40, 5
VALUES = np.resize(np.arange(11, dtype="i4"), (ROWS, 50))  # every compressor makes it smaller
LZ4, BITSHUFFLE = 32004, 32008
BAD = 3  # the block with the damaged chunk
BAD_ROWS, GOOD_ROWS = np.arange(15, 20), np.delete(np.arange(ROWS), np.arange(15, 20))


def array(filters, chunks=(STEP, 50)):
    return Stored(VALUES, "chunked", chunks, filters=filters)


def decodable(*pipelines):
    """Those of some filter pipelines that this installation decodes."""
    return [names for names in pipelines if all(name in known_filters() and is_decodable(name) for name in names)]


def place(path, block=BAD, key="x"):
    """Where the last chunk of a block lies, as HDF5 says it."""
    with h5py.File(path) as file:
        ids = file[key].id
        infos = [ids.get_chunk_info(at) for at in range(ids.get_num_chunks())]
    return max((i for i in infos if i.chunk_offset[0] == block * STEP), key=lambda i: i.chunk_offset)


def overwrite(path, content):
    """Puts other bytes over the bad chunk."""
    found = place(path)
    edit(path, found.byte_offset, content(found.size))


def replace(path, stored, n_rows, mask=0):
    """Writes the bad chunk again, as it would be if chunks had so many rows."""
    content = encode(np.resize(VALUES, (n_rows, *stored.chunks[1:])), stored, mask)[1]
    write_chunk(path, content, mask)


def write_chunk(path, content, mask=0):
    corner = place(path).chunk_offset
    with h5py.File(path, "a") as file:
        file["x"].id.write_direct_chunk(corner, content, mask)


def stored_bytes(path):
    found = place(path)
    with open(path, "rb") as file:
        file.seek(found.byte_offset)
        return file.read(found.size)


def name_of(layout):
    chunk = BAD * layout.table.per_row + layout.table.per_row - 1
    return f"chunk {chunk} (rows 15 to 19) of 'x' in {layout.path!r}"


def assert_only_bad_rows_fail(layout):
    """However often it is tried, and in whatever company; afterwards each slot of the pool is as good as before."""

    def check(n_blocks, *, is_large=False, device=None):
        if device is None:
            reader = open_pool(layout, n_blocks=n_blocks, is_large=is_large)
        elif (reader := open_pool_on_device(device, layout, n_blocks=n_blocks)) is None:
            return
        for rows in (np.array([15]), np.array([0, 39, 19, 4]), np.arange(ROWS)) * 2:
            with pytest.raises(H5CorruptError, match=re.escape(name_of(layout))) as error:
                reader.read(rows)
            text = str(error.value)
            with pytest.raises(H5CorruptError) as again:
                reader.read(rows, epoch=0)
            assert str(again.value) == text
            assert np.array_equal(reader.read(GOOD_ROWS), VALUES[GOOD_ROWS])
        for row in GOOD_ROWS.tolist() if n_blocks == 1 else ():  # in each slot there is
            assert np.array_equal(reader.read(np.array([row])), VALUES[[row]])
        assert np.array_equal(reader.read(GOOD_ROWS[::-1]), VALUES[GOOD_ROWS[::-1]])

    def check_all():
        for n_blocks in (0, 1, EVERYTHING):
            check(n_blocks)
            check(n_blocks, device=FakeDevice())
        check(2, is_large=True)

    if layout.filters[0].id in (LZ4, BITSHUFFLE):  # our own loops over blocks: one without end must not go on for ever
        assert run_forked(check_all) == 0
    else:
        in_threads(check_all)


COMPRESSED = [("gzip",), ("lzf",), ("shuffle", "gzip"), ("gzip", "fletcher32"), ("lzf", "fletcher32")]
PLUGINS = [(name,) for name in known_filters() if name not in ("shuffle", "fletcher32", "gzip", "gzip 9", "lzf")]
CHUNKS = pytest.mark.parametrize("chunks", [(STEP, 50), (STEP, 20)], ids=["whole rows", "split rows"])
GARBAGE = {
    "noise": lambda n: np.random.default_rng(1).bytes(n),
    "zeros": bytes,
    "ones": lambda n: b"\xff" * n,
}


@pytest.mark.wide
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("filters", decodable(*COMPRESSED, *PLUGINS), ids=" + ".join)
def test_garbage_in_a_compressed_chunk(make_h5, filters, garbage):
    if garbage == "ones" and filters in PLUGINS[1::2]:
        pytest.skip("one option of each such filter will do")
    path = make_h5(x=array(filters, (STEP, 50) if garbage == "zeros" else (STEP, 20)))
    if filters == ("bitshuffle",) or place(path).filter_mask:
        pytest.skip("all bytes are as good as any other")
    overwrite(path, GARBAGE[garbage])
    assert_only_bad_rows_fail(look(path))


@CHUNKS
@pytest.mark.parametrize(
    "filters", [("fletcher32",), ("shuffle", "fletcher32"), ("fletcher32", "gzip")], ids=" + ".join
)
def test_data_that_do_not_fit_their_checksum(make_h5, filters, chunks):
    path = make_h5(x=array(filters, chunks))
    if filters[0] == "fletcher32" and len(filters) == 2:  # the damage happened before it was compressed
        found = encode(VALUES[15:20, : chunks[1]], Stored(VALUES, "chunked", chunks, filters=("fletcher32",)))[1]
        wrong = bytes([found[0] ^ 1]) + found[1:]
        inner = Stored(np.frombuffer(wrong, "u1"), "chunked", (len(wrong),), filters=("gzip",))
        write_chunk(path, encode(inner.values, inner)[1])
    else:
        edit(path, place(path).byte_offset + 7)
    assert_only_bad_rows_fail(look(path))


@pytest.mark.wide
@pytest.mark.parametrize("n_rows", [STEP - 1, STEP + 1], ids="{} rows".format)
@pytest.mark.parametrize(
    "filters",
    decodable(*COMPRESSED, *PLUGINS, ("shuffle",), ("fletcher32",), ("shuffle", "lzf", "fletcher32")),
    ids=" + ".join,
)
def test_a_chunk_that_decodes_to_too_few_or_too_many_bytes(make_h5, filters, n_rows):
    stored = array(filters)
    path = make_h5(x=stored)
    replace(path, stored, n_rows)
    assert_only_bad_rows_fail(look(path))


@pytest.mark.parametrize("n_rows", [STEP - 1, STEP + 1])
def test_a_chunk_of_the_wrong_size_that_skipped_its_filters(make_h5, n_rows):
    path = make_h5(x=array(("gzip",)))
    replace(path, array(("gzip",)), n_rows, mask=1)
    assert_only_bad_rows_fail(look(path))


@pytest.mark.parametrize("n_rows", [STEP - 1, STEP + 1])
def test_chunks_of_the_wrong_size_are_noticed_also_where_all_chunks_skipped_their_filters(make_h5, n_rows):
    """Rows are then read where they lie, and must not be those of some other chunk."""
    stored = array(("lzf",))
    stored.masks = [1] * (ROWS // STEP)
    path = make_h5(x=stored)
    replace(path, stored, n_rows, mask=1)
    layout = look(path)
    assert not layout.is_contiguous
    assert_only_bad_rows_fail(layout)


@pytest.mark.parametrize(
    "filters",
    decodable(("gzip",), ("lzf",), ("fletcher32",), ("zstd",), ("blosc",), ("lz4",), ("bitshuffle lz4",)),
    ids=" + ".join,
)
@pytest.mark.parametrize("part", [0.01, 0.1, 0.5, 0.95])
def test_a_chunk_that_was_cut_off(make_h5, filters, part):
    path = make_h5(x=array(filters))
    content = stored_bytes(path)
    write_chunk(path, content[: max(1, int(len(content) * part))])
    assert_only_bad_rows_fail(look(path))


@given(
    filters=st.sampled_from(
        [("gzip",), ("shuffle", "gzip"), ("lzf", "fletcher32"), ("fletcher32",), ("shuffle", "fletcher32")]
    ),
    places=st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 255)), min_size=1, max_size=4),
)
@settings(max_examples=examples(60))
def test_bytes_that_changed_are_never_taken_for_data_where_there_is_a_checksum(make_h5, filters, places):
    path = make_h5(x=array(filters))
    content = bytearray(stored_bytes(path))
    for part, flip in places:
        content[int(part * len(content))] ^= flip
    overwrite(path, lambda n: bytes(content))
    reader = open_pool(look(path))
    try:
        found = reader.read(np.arange(ROWS))
    except H5CorruptError as error:
        assert name_of(look(path)) in str(error)  # noqa: PT017  (either is right)
    else:
        assert np.array_equal(found, VALUES)
    process_pool().close()
    os.unlink(path)


def test_checksums_whose_bytes_are_swapped_are_right_ones(make_h5):
    """Releases of HDF5 before 1.6.3 wrote them on some machines; the library takes them, too."""
    path = make_h5(x=array(("fletcher32",)))
    content = stored_bytes(path)
    write_chunk(path, content[:-4] + content[-3:-2] + content[-4:-3] + content[-1:] + content[-2:-1])
    with h5py.File(path) as file:
        assert np.array_equal(file["x"], VALUES)
    assert np.array_equal(open_pool(look(path)).read(np.arange(ROWS)), VALUES)


# Who hears of it ---------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, TASK_BYTES], ids=["a task a chunk", "one task"])
def damaged(request, make_h5, monkeypatch):
    """The layout of an array with one bad chunk, whose blocks are loaded one by one or all together."""
    load_at_a_time(monkeypatch, request.param)
    path = make_h5(x=array(("gzip",), (STEP, 20)))
    overwrite(path, bytes)
    return look(path)


@pytest.mark.parametrize("n_team", [0, 2])
def test_a_chunk_that_failed_ahead_of_time_is_no_matter_to_reads_of_others(damaged, n_team):
    work = TaskQueue()
    reader = open_pool(damaged, work=work)
    team = work.start_team(n_team)
    for _ in range(3):
        assert reader.prefetch(reader.map.boxes(np.arange(ROWS)))
        for row in (0, 14, 20, 39):
            assert np.array_equal(reader.read(np.array([row])), VALUES[[row]])
        for row in (15, 19):
            with pytest.raises(H5CorruptError, match=re.escape(name_of(damaged))):
                reader.read(np.array([row]))
        reader.close()
    work.end_team(n_team)
    for thread in team:
        thread.join(HANG)
        assert not thread.is_alive()


@pytest.mark.wide
@pytest.mark.parametrize("n_team", [0, 2])
@pytest.mark.parametrize("n_blocks", [0, 1, 3, EVERYTHING])
def test_of_many_threads_exactly_those_fail_that_need_the_chunk(damaged, n_blocks, n_team):
    work = TaskQueue()
    reader = open_pool(damaged, n_blocks=n_blocks, work=work)
    team = work.start_team(n_team)

    def read(seed):
        random = np.random.default_rng(seed)
        for _ in range(15):
            rows = random.integers(0, ROWS, 6) if seed % 2 else random.choice(GOOD_ROWS, 6)
            if seed % 3 == 0:
                reader.prefetch(reader.map.boxes(random.integers(0, ROWS, 6)))
            if np.isin(rows, BAD_ROWS).any():
                with pytest.raises(H5CorruptError, match=re.escape(name_of(damaged))):
                    reader.read(rows, epoch=seed % 2)
            else:
                assert np.array_equal(reader.read(rows, epoch=seed % 2), VALUES[rows])

    in_threads(*(partial(read, seed) for seed in range(8)))
    work.end_team(n_team)
    for thread in team:
        thread.join(HANG)
        assert not thread.is_alive()
    assert np.array_equal(reader.read(GOOD_ROWS), VALUES[GOOD_ROWS])


def test_two_who_wait_for_the_same_chunk_both_hear_that_it_is_damaged(damaged, monkeypatch):
    load_at_a_time(monkeypatch, TASK_BYTES)  # one task
    reader, is_loading, may_load = open_pool(damaged), threading.Event(), threading.Event()
    real = ChunkLoader.load

    def load(*args):
        is_loading.set()
        assert may_load.wait(HANG)
        return real(*args)

    def read():
        with pytest.raises(H5CorruptError, match=re.escape(name_of(damaged))):
            reader.read(BAD_ROWS)

    def read_too():
        assert is_loading.wait(HANG)
        threading.Timer(0.1, may_load.set).start()  # by then it waits, as there is nothing that it could do
        read()

    monkeypatch.setattr(ChunkLoader, "load", load)
    in_threads(read, read_too)


def test_an_interrupted_read_leaves_nothing_that_others_wait_for(make_h5, monkeypatch):
    """Ctrl+C in a notebook, then the cell again."""
    path = make_h5(x=array(("gzip",)))
    reader = open_pool(look(path))
    real, calls = ChunkLoader.load, []

    def load(*args):
        calls.append(threading.current_thread())
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(ChunkLoader, "load", load)
    monkeypatch.setattr("lightning_h5.readers.thread_pool.usable_cores", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        reader.read(np.arange(10))
    (found,) = in_threads(lambda: reader.read(np.arange(ROWS)))
    assert np.array_equal(found, VALUES)


def test_a_decoder_that_fails_in_any_way_is_a_damaged_chunk(make_h5, monkeypatch):
    path = make_h5(x=array(("shuffle", "gzip")))
    reader = open_pool(look(path), n_blocks=1)
    for wrong in (OSError(5, "Input/output error"), ZeroDivisionError(), RuntimeError("error -4")):

        def fail(*args, wrong=wrong):
            raise wrong

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_h5.readers.filters.pipeline.Pipeline.decode", fail)
            with pytest.raises(H5CorruptError, match=r"chunk 0 \(rows 0 to 4\) of 'x'"):
                reader.read(np.array([0]))
        assert np.array_equal(reader.read(np.array([0])), VALUES[:1])
        reader.close()


def test_an_interrupt_while_a_task_is_tried_again_leaves_nothing_to_wait_for(make_h5, monkeypatch):
    reader = open_pool(look(make_h5(x=array(("gzip",)))))
    load_one_by_one = iter([OSError(5, "Input/output error"), KeyboardInterrupt()])

    def fail(*args):
        raise next(load_one_by_one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_h5.readers.chunk_loader.ChunkLoader.load", fail)
        with pytest.raises(KeyboardInterrupt):
            reader.read(np.arange(len(VALUES)))
    assert not reader._cache._n_tasks.any()
    assert np.array_equal(reader.read(np.arange(len(VALUES))), VALUES)


# Bytes that are not there ------------------------------------------------------------------------------------


@CHUNKS
@pytest.mark.parametrize("n_blocks", [0, 1, EVERYTHING])
def test_a_file_truncated_while_open_still_gives_the_rows_before_the_cut(make_h5, chunks, n_blocks):
    path = make_h5(x=array(("gzip",), chunks))
    layout = look(path)
    reader = open_pool(layout, n_blocks=n_blocks)
    assert np.array_equal(reader.read(np.arange(ROWS)), VALUES)
    reader.close()
    cut = place(path).byte_offset + 3
    os.truncate(path, cut)
    is_whole = (layout.table.offsets + layout.table.sizes <= cut).reshape(ROWS // STEP, -1).all(axis=1)
    assert is_whole.any()
    whole, chunk = np.flatnonzero(np.repeat(is_whole, STEP)), BAD * layout.table.per_row + layout.table.per_row - 1
    for _ in range(2):
        with pytest.raises(
            H5CorruptError, match=re.escape(f"{path!r} ends inside chunk {chunk} (rows 15 to 19) of 'x'")
        ):
            reader.read(BAD_ROWS)
        assert np.array_equal(reader.read(whole), VALUES[whole])


def test_a_file_truncated_before_it_is_opened_is_refused_with_the_first_chunk_that_is_missing(make_h5):
    path = make_h5(x=array(("gzip",)))
    layout = look(path)
    os.truncate(path, place(path).byte_offset + 3)
    with pytest.raises(H5CorruptError, match=re.escape("chunk 3 (rows 15 to 19) of 'x'")) as error:
        open_pool(layout)
    assert path in str(error.value)


def test_a_file_that_is_gone_is_named(make_h5):
    path = make_h5(x=array(("gzip",)))
    layout = look(path)
    reader = open_pool(layout, n_blocks=1)
    os.unlink(path)
    for _ in range(2):
        with pytest.raises(H5FileError, match=re.escape(path)):
            reader.read(np.array([0]))
    with pytest.raises(H5FileError, match=re.escape(path)):
        open_pool(layout).read(np.array([0]))


WRONG_PLACES = {
    "the end of the file": lambda size: size - 3,
    "beyond the file": lambda size: size + 10_000,
    "almost 2**63": lambda size: 2**63 - 5,
    "2**63": lambda size: 2**63,
    "almost 2**64": lambda size: 2**64 - 3,
}


@pytest.mark.parametrize("where", WRONG_PLACES)
def test_a_chunk_index_that_points_outside_the_file_is_an_error_that_names_chunk_and_rows(make_h5, where):
    path = make_h5(x=array(("gzip",)))
    with open(path, "rb") as file:
        content = file.read()
    entry = struct.pack("<Q", place(path).byte_offset)
    assert content.count(entry) == 1
    edit(path, content.index(entry), struct.pack("<Q", WRONG_PLACES[where](len(content))))
    with pytest.raises(H5CorruptError) as error:
        open_pool(look(path)).read(BAD_ROWS)
    for part in (path, "'x'", "chunk 3", "rows 15 to 19"):
        assert part in str(error.value)


def test_a_chunk_index_with_places_outside_the_array_is_an_error_that_names_file_and_array(make_h5):
    path = make_h5(x=array(("gzip",)))
    found = place(path)
    with open(path, "rb") as file:
        content = file.read()
    entry = struct.pack("<IIQQ", found.size, 0, 15, 0)  # of a B-tree: bytes, mask, corner
    assert content.count(entry) == 1
    edit(path, content.index(entry), struct.pack("<IIQQ", found.size, 0, 15 + 64 * STEP, 0))
    with pytest.raises(H5CorruptError) as error:
        look(path)
    assert path in str(error.value)
    assert "'x'" in str(error.value)


def test_the_library_way_names_rows_too_and_goes_on(make_h5):
    """Filters that only the HDF5 library undoes are pooled as well."""
    values = np.resize(np.arange(11, dtype="i4"), (ROWS, 50))
    path = make_h5(x=Stored(values, "chunked", (STEP, 50), {"compression": "szip", "fletcher32": True}))
    edit(path, place(path).byte_offset + 5)
    layout = look(path)
    assert can_be_pooled(layout)
    for n_blocks in (0, 1, EVERYTHING):
        reader = open_pool(layout, n_blocks=n_blocks)
        for _ in range(2):
            with pytest.raises(H5CorruptError, match=re.escape(f"of 'x' in {path!r} cannot be read")):
                reader.read(BAD_ROWS)
            assert np.array_equal(reader.read(GOOD_ROWS), values[GOOD_ROWS])


def test_without_a_pool_the_library_reads_chunks_and_names_rows(make_h5):
    path = make_h5(x=array(("gzip",)))
    overwrite(path, bytes)
    with pytest.raises(H5CorruptError, match=re.escape(f"rows 15 to 15 of 'x' in {path!r}")):
        open_reader(look(path), OPTIONS).read(np.array([15]))


def test_a_chunk_with_more_filters_skipped_than_there_are_is_read_as_it_lies(make_h5):
    path = make_h5(x=array(("gzip",)))
    write_chunk(path, VALUES[15:20].tobytes(), 0xFFFFFFFF)
    with h5py.File(path) as file:
        assert np.array_equal(file["x"], VALUES)
    assert np.array_equal(open_pool(look(path)).read(np.arange(ROWS)), VALUES)
