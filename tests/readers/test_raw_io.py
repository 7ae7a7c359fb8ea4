"""A list of reads in one call gives what one call a piece gives."""

import os
import platform
import threading

import numpy as np
import pytest
from factories import run_forked
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.readers import raw_io

CONTENT = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)


@pytest.fixture(scope="module")
def fd(tmp_path_factory):
    path = tmp_path_factory.mktemp("scatter") / "content"
    path.write_bytes(CONTENT.tobytes())
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def queue():
    """Skips where this machine's kernel gives no queue, so that the tests cannot pass by the loop alone."""
    queue = raw_io._take_queue()
    if queue is None:
        pytest.skip("this kernel takes no list of reads")
    raw_io._queues.append(queue)


def read(fd, offsets, sizes):
    stops = np.cumsum(np.asarray(sizes, dtype=np.int64))
    out = np.zeros(int(stops[-1]) if len(stops) else 0, dtype=np.uint8)
    starts = stops - np.asarray(sizes, dtype=np.int64)
    return out, raw_io.read_pieces(fd, out, starts, stops, np.asarray(offsets, dtype=np.int64))


pieces = st.lists(st.tuples(st.integers(0, 4900), st.integers(1, 100)), min_size=1, max_size=600)


@given(pieces)
def test_any_pieces_in_any_order_are_read_where_they_belong(fd, queue, pieces):
    offsets, sizes = zip(*pieces, strict=True)
    out, n_bytes = read(fd, offsets, sizes)
    assert n_bytes == sum(sizes)
    assert out.tobytes() == b"".join(CONTENT[at : at + n].tobytes() for at, n in pieces)


@given(pieces)
def test_the_loop_gives_the_same(fd, pieces):
    offsets, sizes = zip(*pieces, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_io, "_take_queue", lambda: None)
        out, n_bytes = read(fd, offsets, sizes)
    assert n_bytes == sum(sizes)
    assert out.tobytes() == b"".join(CONTENT[at : at + n].tobytes() for at, n in pieces)


def test_a_piece_beyond_the_end_is_counted_as_far_as_it_goes(fd, queue):
    out, n_bytes = read(fd, [10, 4990, 5000], [20, 20, 20])
    assert n_bytes == 30
    assert out[:30].tobytes() == CONTENT[10:30].tobytes() + CONTENT[4990:].tobytes()


def test_an_error_of_one_piece_is_an_error(queue):
    closed = os.open("/", os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        read(closed, [0, 0], [4, 4])
    os.close(closed)


def test_a_forked_child_makes_a_queue_of_its_own(fd, queue):
    def child():
        out, n_bytes = read(fd, [7], [9])
        assert n_bytes == 9
        assert out.tobytes() == CONTENT[7:16].tobytes()

    assert run_forked(child) == 0
    test_a_piece_beyond_the_end_is_counted_as_far_as_it_goes(fd, queue)


def test_threads_do_not_share_a_queue(fd, queue, monkeypatch):
    monkeypatch.setattr(raw_io, "_queues", type(raw_io._queues)())
    wrong = []

    def many(seed):
        random = np.random.default_rng(seed)
        for _ in range(200):
            offsets = random.integers(0, 4900, 64)
            out, n_bytes = read(fd, offsets, [50] * 64)
            expected = np.stack([CONTENT[at : at + 50] for at in offsets])
            if n_bytes != 3200 or not np.array_equal(out.reshape(64, 50), expected):
                wrong.append(seed)

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 <= len(raw_io._queues) <= 4


def test_a_kernel_that_refuses_is_asked_once(fd, monkeypatch):
    asked = []

    def refuse(queue):
        asked.append(queue)
        raise OSError(38, "function not implemented")

    monkeypatch.setattr(raw_io, "_queues", type(raw_io._queues)())
    monkeypatch.setattr(raw_io, "_refused", set())
    monkeypatch.setattr(raw_io._Queue, "__init__", refuse)
    for _ in range(3):
        assert read(fd, [0, 5], [5, 5])[1] == 10
    assert len(asked) == 1


@pytest.mark.skipif(platform.machine() not in raw_io._CALLS, reason="no numbers for this processor")
def test_the_kernels_structures_have_their_sizes():
    assert (raw_io._REQUEST.itemsize, raw_io._EVENT.itemsize) == (64, 32)
