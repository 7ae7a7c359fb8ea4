"""Checksums of pieces of memory, copies of runs, writes and reads: the same by compiled code and without it."""

import ctypes
import errno
import os
import tempfile
import zlib
from contextlib import closing, contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.options import StagingOptions
from lightning_h5.readers import block_memory
from lightning_h5.staging import DecodedArray, DecodedMirror, checksums, decoded, mirror_file
from lightning_h5.staging.folder import MirrorFolder

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


# Writes -------------------------------------------------------------------------------------------------------------

PWRITE = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)


@contextmanager
def mirror(n_chunks, chunk_bytes, sum_bytes):
    """A mirror of decoded chunks that has none of them."""
    with tempfile.TemporaryDirectory() as path, closing(MirrorFolder(path, None)) as folder:
        array = DecodedArray(StagingOptions(dir=path), "an array", n_chunks, chunk_bytes, sum_bytes)
        each = DecodedMirror(folder, "key", array)
        yield each
        each.drop()


def file_of(each):
    """The bytes of a mirror's file."""
    return os.pread(each.fd, os.fstat(each.fd).st_size, 0)


def written(case, fails_at=None, short=False, plain_fails_at=None):
    """The file of a mirror that chunks were put into; the n-th compiled write fails, or plain ones from the n-th on."""
    chunks, order, chunk_bytes, sum_bytes, allocated = case
    memory = np.concatenate([MEMORY, MEMORY[::-1], MEMORY])
    calls, plain_calls, pwrite = [0], [0], os.pwrite

    def failing(fd, address, n_bytes, place):
        calls[0] += 1
        if fails_at is not None and calls[0] == fails_at + 1:
            return -1
        return pwrite(fd, ctypes.string_at(address, n_bytes // 2 + 1 if short and n_bytes > 64 else n_bytes), place)

    def plain_failing(fd, data, place):
        plain_calls[0] += 1
        if plain_fails_at is not None and plain_calls[0] > plain_fails_at:
            raise OSError(errno.ENOSPC, "full")
        return pwrite(fd, data, place)

    callback = PWRITE(failing)
    functions = checksums._functions()
    replaced = functions[0], ctypes.cast(callback, ctypes.c_void_p).value, *functions[2:]
    with mirror(40, chunk_bytes, sum_bytes) as each, pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoded, "ALLOCATED_BYTES", allocated)
        patch.setattr(mirror_file.os, "pwrite", plain_failing)
        if fails_at is not None or short:
            patch.setattr(checksums, "_functions", lambda: replaced)
        firsts = np.array(order) * chunk_bytes
        n_bytes = each.put(np.array(chunks), memory, firsts)
        patch.undo()
        for chunk, first in zip(chunks, firsts.tolist(), strict=True):
            if each.has(np.array([chunk]))[0]:
                at = chunk * chunk_bytes
                assert os.pread(each.fd, chunk_bytes, at) == memory[first : first + chunk_bytes].tobytes()
                sums = each._sums[chunk * each._n_sums : (chunk + 1) * each._n_sums].tolist()
                assert sums == [
                    zlib.crc32(memory[first + low : first + min(low + sum_bytes, chunk_bytes)])
                    for low in range(0, chunk_bytes, sum_bytes)
                ]
        if fails_at is None and plain_fails_at is None:
            assert n_bytes == len(chunks) * chunk_bytes
        return file_of(each), int((each._marks & 1).sum())


@st.composite
def puts(draw):
    """Chunks, neighbors or apart in file and memory, and sizes of chunks and checksums."""
    chunks = sorted(draw(st.sets(st.integers(0, 39), min_size=1, max_size=12)))
    order = draw(st.permutations(range(len(chunks)))) if draw(st.booleans()) else list(range(len(chunks)))
    return chunks, order, draw(st.integers(1, 900)), draw(st.integers(1, 1_000)), draw(st.sampled_from([0, 1 << 20]))


def plain_file(case):
    """What the plain path writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoded, "write_loop", lambda: None)
        return written(case)


@given(puts(), st.booleans())
def test_a_compiled_write_leaves_the_file_that_a_plain_one_does(case, short):
    assert written(case, short=short) == plain_file(case)


@given(puts(), st.integers(0, 8))
def test_a_compiled_write_that_fails_is_done_again(case, fails_at):
    assert written(case, fails_at=fails_at) == plain_file(case)


@given(puts(), st.integers(0, 8), st.integers(0, 8))
def test_chunks_that_a_full_disk_does_not_take_are_not_marked(case, fails_at, plain_fails_at):
    _, n_marked = written(case, fails_at=fails_at, plain_fails_at=plain_fails_at)
    assert n_marked <= len(case[0])


def test_a_compiled_write_to_a_file_that_cannot_be_written_tells_of_it():
    if (loop := checksums.write_loop()) is None:
        return
    with mirror(4, 10, 4) as each:
        before, fd = file_of(each), os.open(f"/proc/self/fd/{each.fd}", os.O_RDONLY)
        runs, marks, sums = np.array([[0, 20, 10]]), np.ones(2, checksums.MARK), np.empty(6, checksums.SUM)
        places = mirror_file.marks_at(each.n_bytes), mirror_file.marks_at(each.n_bytes) + 8
        assert not loop(fd, MEMORY, runs, marks, sums, 10, 4, *places, 1 << 20)
        os.close(fd)
        assert file_of(each) == before


# Reads --------------------------------------------------------------------------------------------------------------

PREADV2 = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_int, ctypes.c_int64, ctypes.c_int
)
CRC = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
N_CHUNKS = 6


@st.composite
def reads(draw):
    """Sizes of chunks and checksums, which chunks are there, and parts of chunks to read."""
    chunk_bytes, sum_bytes = draw(st.integers(1, 800)), draw(st.integers(1, 900))
    there = sorted(draw(st.sets(st.integers(0, N_CHUNKS - 1))))
    part = st.integers(0, chunk_bytes - 1).flatmap(
        lambda low: st.tuples(st.integers(0, N_CHUNKS - 1), st.just(low), st.integers(1, chunk_bytes - low))
    )
    return chunk_bytes, sum_bytes, there, draw(st.lists(part, min_size=1, max_size=8))


@contextmanager
def filled(chunk_bytes, sum_bytes, there):
    """A mirror with some of ``N_CHUNKS`` chunks, and their bytes."""
    memory = MEMORY[: N_CHUNKS * chunk_bytes].copy()
    with mirror(N_CHUNKS, chunk_bytes, sum_bytes) as each:
        each.put(np.array(there, np.int64), memory, np.array(there, np.int64) * chunk_bytes)
        yield each, memory


def read_parts(each, parts):
    """The state of each part that a compiled read returns, and its bytes."""
    chunks, within, sizes = np.array(parts, np.int64).T
    starts, out = np.cumsum(sizes) - sizes, np.zeros(int(sizes.sum()), np.uint8)
    states = each.read_cached(chunks, within, sizes, out, starts, np.empty(each.piece_bytes, np.uint8))
    states = [checksums.RIGHT] * len(parts) if states is None else states.tolist()
    return states, [out[at : at + n] for at, n in zip(starts.tolist(), sizes.tolist(), strict=True)]


def calling(patch, number, function):
    """Have compiled loops call a function in place of a library's, by its number among those that they call."""
    functions = list(checksums._functions())
    functions[number] = ctypes.cast(function, ctypes.c_void_p).value
    patch.setattr(checksums, "_functions", lambda: tuple(functions))


@pytest.fixture(scope="module")
def compiled_loops():
    return checksums._compile_loops()


@pytest.fixture
def compiled(monkeypatch, compiled_loops):
    """Loops are compiled, if that is possible."""
    monkeypatch.setattr(checksums, "_loops", [compiled_loops])


def is_compiled():
    return checksums.read_loop() is not None


@given(reads())
def test_a_compiled_read_returns_the_parts_that_are_there(case):
    chunk_bytes, sum_bytes, there, parts = case
    with filled(chunk_bytes, sum_bytes, there) as (each, memory):
        for _ in range(2):  # before and after they were compared
            states, found = read_parts(each, parts)
            if not is_compiled():
                assert states == [checksums.UNREAD] * len(parts)
                return
            for (chunk, low, n), state, octets in zip(parts, states, found, strict=True):
                assert state == (checksums.RIGHT if chunk in there else checksums.ABSENT)
                first = chunk * chunk_bytes + low
                assert state == checksums.ABSENT or np.array_equal(octets, memory[first : first + n])


@given(reads(), st.lists(st.integers(0, N_CHUNKS * 800 - 1), min_size=1, max_size=3))
def test_a_compiled_read_returns_no_damaged_part(case, places):
    chunk_bytes, sum_bytes, there, parts = case
    with filled(chunk_bytes, sum_bytes, there) as (each, memory):
        read_parts(each, parts)
        os.utime(each.fd, ns=(0, 0))
        for place in {place % (N_CHUNKS * chunk_bytes) for place in places}:
            os.pwrite(each.fd, bytes([int(memory[place]) ^ 255]), place)
        for (chunk, low, n), state, octets in zip(parts, *read_parts(each, parts), strict=True):
            first = chunk * chunk_bytes + low
            assert state != checksums.RIGHT or np.array_equal(octets, memory[first : first + n])
            assert state != checksums.ABSENT or chunk not in there or not each.has(np.array([chunk]))[0]


@given(reads(), st.integers(0, 8), st.booleans())
def test_parts_that_the_page_cache_lacks_are_left_to_the_caller(case, n_cached, is_short):
    if not is_compiled():
        return
    n_calls, preadv = [0], os.preadv

    def failing(fd, vector, _, place, flags):
        n_calls[0] += 1
        if n_calls[0] > n_cached:
            return vector[1] - 1 if is_short else -1
        return preadv(fd, [(ctypes.c_char * vector[1]).from_address(vector[0])], place, flags)

    chunk_bytes, sum_bytes, there, parts = case
    with filled(chunk_bytes, sum_bytes, there) as (each, memory), pytest.MonkeyPatch.context() as patch:
        function = PREADV2(failing)
        calling(patch, 3, function)
        states, found = read_parts(each, parts)
        n_there = sum(chunk in there for chunk, _, _ in parts)
        assert states.count(checksums.RIGHT) == min(n_cached, n_there)
        assert states.count(checksums.UNREAD) == n_there - min(n_cached, n_there)
        for (chunk, low, n), state, octets in zip(parts, states, found, strict=True):
            first = chunk * chunk_bytes + low
            assert state != checksums.RIGHT or np.array_equal(octets, memory[first : first + n])


@pytest.mark.usefixtures("compiled")
def test_a_chunk_that_went_and_came_while_it_was_read_is_absent():
    if not is_compiled():
        return
    preadv = os.preadv

    def changing(fd, vector, _, place, flags):
        each._write_marks(1, each._marks[1:2] + np.uint16(2))
        return preadv(fd, [(ctypes.c_char * vector[1]).from_address(vector[0])], place, flags)

    with filled(100, 10, [0, 1]) as (each, _), pytest.MonkeyPatch.context() as patch:
        function = PREADV2(changing)
        calling(patch, 3, function)
        assert read_parts(each, [(1, 5, 20)])[0] == [checksums.ABSENT]
        assert read_parts(each, [(0, 5, 20)])[0] == [checksums.RIGHT]
        assert each.has(np.arange(2)).all()


@pytest.mark.usefixtures("compiled")
def test_checksums_of_a_part_are_computed_once_and_those_of_a_whole_chunk_each_time():
    if not is_compiled():
        return
    n_sums = []

    def counted(_, address, n_bytes):
        n_sums.append(n_bytes)
        return zlib.crc32(ctypes.string_at(address, n_bytes))

    with filled(100, 30, [0, 1, 2]) as (each, memory), pytest.MonkeyPatch.context() as patch:
        function = CRC(counted)
        calling(patch, 0, function)
        for parts, expected in (
            ([(1, 35, 10)], [30]),
            ([(1, 30, 30)], []),
            ([(1, 20, 80)], [30, 30, 30, 10]),
            ([(1, 0, 99), (1, 99, 1)], []),
            ([(1, 0, 100)], [30, 30, 30, 10]),
            ([(2, 95, 5)], [10]),
        ):
            states, found = read_parts(each, parts)
            assert states == [checksums.RIGHT] * len(parts)
            assert n_sums == expected
            n_sums.clear()
            for (chunk, low, n), octets in zip(parts, found, strict=True):
                assert np.array_equal(octets, memory[chunk * 100 + low :][:n])


@pytest.mark.parametrize(
    ("chunk", "low", "n", "start"),
    [(-1, 0, 5, 0), (6, 0, 5, 0), (0, -1, 5, 0), (0, 96, 5, 0), (0, 0, 0, 0), (0, 0, 5, -1), (0, 0, 5, 7)],
)
def test_nothing_outside_of_a_mirror_or_the_memory_is_touched(chunk, low, n, start):
    with filled(100, 30, range(N_CHUNKS)) as (each, _):
        out = np.zeros(11, np.uint8)
        request = (np.array([number]) for number in (chunk, low, n))
        states = each.read_cached(*request, out, np.array([start]), np.empty(100, np.uint8))
        assert states.tolist() == [checksums.UNREAD]
        assert not out.any()
        states = each.read_cached(
            *(np.array([number]) for number in (0, 5, 3)), out, np.array([0]), np.empty(4, np.uint8)
        )
        assert states.tolist() == [checksums.UNREAD]
