"""Open files: bounded in number, never closed under their user, never shared with a forked child."""

import errno
import os
import random
import resource
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from factories import run_forked
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.errors import H5DataChangedError, H5FileError
from lightning_h5.hdf5 import (
    ChangeGuard,
    HandlePool,
    OpenOptions,
    drop_inherited,
    find_array,
    layout_of,
    open_h5,
    process_pool,
)

OPTIONS = OpenOptions()


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def pool():
    pool = HandlePool(max_handles=2)
    yield pool
    pool.close()


@pytest.fixture
def paths(tmp_path):
    """Plain files that hold their own name, which is enough for descriptors."""
    made = [str(tmp_path / f"{name}.h5") for name in "abcdef"]
    for path in made:
        Path(path).write_text(path)
    return made


def content(fd):
    return os.pread(fd, 4096, 0).decode()


@given(uses=st.lists(st.integers(0, 5), max_size=30), most=st.integers(1, 6))
def test_the_least_recently_used_are_closed_and_no_more_are_kept_than_allowed(paths, uses, most):
    pool = HandlePool(max_handles=most)
    recent = []
    for use in uses:
        with pool.descriptor(paths[use], ChangeGuard.of(paths[use])) as fd:
            assert content(fd) == paths[use]
        recent = [other for other in recent if other != use] + [use]
        assert [path for path, _ in pool._entries] == [paths[other] for other in recent[-most:]]
    pool.close()
    assert len(pool) == 0


@given(uses=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30), most_h5=st.integers(1, 3))
def test_few_files_stay_open_through_the_library_however_many_descriptors_do(make_h5_files, uses, most_h5):
    pool, paths = HandlePool(max_handles=4, max_h5=most_h5), make_h5_files
    recent = []
    for use, by_library in uses:
        with (
            pool.h5(paths[use], OpenOptions(), ChangeGuard.of(paths[use]))
            if by_library
            else pool.descriptor(paths[use], ChangeGuard.of(paths[use]))
        ):
            pass
        recent = [other for other in recent if other != (use, by_library)] + [(use, by_library)]
        of_library = [one for one in recent if one[1]]
        recent = [one for one in recent if one not in of_library[:-most_h5]][-4:]
        assert [(path, options is not None) for path, options in pool._entries] == [
            (paths[other], library) for other, library in recent
        ]
    pool.close()
    assert len(pool) == pool._n_h5 == 0


@pytest.fixture
def make_h5_files(make_h5):
    return [make_h5(x=np.arange(3)) for _ in range(4)]


def test_a_handle_is_opened_once_while_it_is_kept(pool, paths):
    with pool.descriptor(paths[0], ChangeGuard.of(paths[0])) as first:
        pass
    with pool.descriptor(paths[0], ChangeGuard.of(paths[0])) as second:
        assert first == second
    with pool.descriptor(paths[1], ChangeGuard.of(paths[1])), pool.descriptor(paths[2], ChangeGuard.of(paths[2])):
        assert not is_open(first) or first in (fd.handle.fd for fd in pool._entries.values())


def test_a_handle_in_use_is_never_closed_to_make_room(pool, paths):
    with ExitStack() as stack:
        fds = [stack.enter_context(pool.descriptor(path, ChangeGuard.of(path))) for path in paths]
        assert len(pool) == len(paths)  # more than allowed, rather than failing or closing
        assert [content(fd) for fd in fds] == paths
    with pool.descriptor(paths[0], ChangeGuard.of(paths[0])):
        pass
    assert len(pool) <= 2


def test_a_handle_closed_while_in_use_closes_when_its_user_is_done(pool, paths):
    with pool.descriptor(paths[0], ChangeGuard.of(paths[0])) as fd:
        with pool.descriptor(paths[0], ChangeGuard.of(paths[0])) as same:
            assert same == fd
            pool.close(paths[0])
            assert len(pool) == 0
        assert content(fd) == paths[0]  # one user is left
        with pool.descriptor(paths[0], ChangeGuard.of(paths[0])) as fresh:
            assert fresh != fd
    assert not is_open(fd)
    assert is_open(fresh)


def test_closing_one_file_leaves_the_others_open(pool, paths):
    with (
        pool.descriptor(paths[0], ChangeGuard.of(paths[0])) as first,
        pool.descriptor(paths[1], ChangeGuard.of(paths[1])) as second,
    ):
        pass
    pool.close(paths[0])
    assert (is_open(first), is_open(second)) == (False, True)


def test_files_of_a_file_system_that_is_gone_are_all_closed_without_an_error(pool, paths, monkeypatch):
    close, closed = os.close, []

    def fail(fd):
        close(fd)
        closed.append(fd)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    for path in paths[:2]:
        with pool.descriptor(path, ChangeGuard.of(path)):
            pass
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", fail)
        pool.close_soon(paths[:2])
    assert len(closed) == 2


def test_a_user_that_fails_gives_its_handle_back(pool, paths):
    with pytest.raises(ZeroDivisionError), pool.descriptor(paths[0], ChangeGuard.of(paths[0])) as fd:
        raise ZeroDivisionError
    pool.close()
    assert not is_open(fd)


def test_a_file_that_cannot_be_opened_leaves_nothing_behind(pool, tmp_path):
    path = str(tmp_path / "gone")
    guard = ChangeGuard(path, 0, 0, 0, 0)
    for opened in (pool.descriptor(path, guard), pool.h5(path, OPTIONS, guard)):
        with pytest.raises(H5FileError, match="gone"), opened:
            pass
    assert len(pool) == 0


def test_files_open_through_the_library_look_their_arrays_up_once(pool, make_h5):
    path = make_h5(x=np.arange(4))
    with open_h5(path) as file:
        layout = layout_of(find_array(file, "x"), path, "x")
    with pool.h5(path, OPTIONS, ChangeGuard.of(path)) as handle:
        assert handle.array(layout) is handle.array(layout)
        array = handle.array(layout)
    with pool.h5(path, OpenOptions(rdcc_nbytes=0), ChangeGuard.of(path)) as other:
        assert other is not handle  # opened in another way is another handle
    assert len(pool) == 2
    pool.close(path)
    assert not array.id.valid


def test_threads_never_see_a_closed_or_a_wrong_file(paths):
    pool, failures = HandlePool(max_handles=2), []

    def work(seed):
        choose = random.Random(seed)
        try:
            for _ in range(300):
                path = choose.choice(paths)
                if choose.random() < 0.1:
                    pool.close(path)
                with pool.descriptor(path, ChangeGuard.of(path)) as fd:
                    assert content(fd) == path
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    before = len(os.listdir("/proc/self/fd"))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_quarter_of_the_descriptors_at_most_is_used():
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert HandlePool().max_handles == max(8, min(512, (1024 if soft < 0 else soft) // 4))


def test_a_forked_child_drops_what_it_inherited_and_opens_its_own(make_h5):
    path = make_h5(x=np.arange(4))
    with (
        process_pool().descriptor(path, ChangeGuard.of(path)) as fd,
        process_pool().h5(path, OPTIONS, ChangeGuard.of(path)),
    ):
        pass
    parents = process_pool()
    assert len(parents) == 2

    def child():
        assert is_open(fd)
        pool = process_pool()  # the first use in this process
        assert pool is not parents
        assert len(pool) == 0
        assert not is_open(fd)
        with pool.h5(path, OPTIONS, ChangeGuard.of(path)), pool.descriptor(path, ChangeGuard.of(path)) as own:
            assert os.pread(own, 4, 0) == b"\x89HDF"

    assert run_forked(child) == 0
    assert process_pool() is parents
    assert is_open(fd)


def test_a_child_forked_while_the_pool_was_locked_is_not_stuck(make_h5):
    path = make_h5(x=np.arange(4))
    with process_pool().descriptor(path, ChangeGuard.of(path)):
        pass
    locked, done = threading.Event(), threading.Event()

    def hold():
        with process_pool()._lock:
            locked.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()

    def child():
        drop_inherited()
        with process_pool().descriptor(path, ChangeGuard.of(path)):
            pass

    try:
        assert run_forked(child) == 0
    finally:
        done.set()
        thread.join()


def test_dropping_what_was_inherited_leaves_a_process_its_own_handles(make_h5):
    path = make_h5(x=np.arange(4))
    with process_pool().descriptor(path, ChangeGuard.of(path)) as fd:
        drop_inherited()
        assert is_open(fd)
    assert len(process_pool()) == 1


def opened(pool, path, by_library, guard):
    """A file held open, and what looks at its first row there."""
    if not by_library:
        return pool.descriptor(path, guard), lambda fd: os.pread(fd, 8, 2048)[0]
    with open_h5(path) as file:
        layout = layout_of(find_array(file, "x"), path, "x")
    return pool.h5(path, OPTIONS, guard), lambda handle: handle.array(layout)[0]


@pytest.fixture
def swapped(make_h5):
    """A file of ones, and what puts a file of twos in its place, and the file back."""
    path, other = make_h5(x=np.ones(4096, "u1")), make_h5(x=np.full(4096, 2, "u1"))

    def swap():
        os.rename(path, f"{path}.away")
        os.rename(other, path)

    def put_back():
        os.rename(path, other)
        os.rename(f"{path}.away", path)

    return path, swap, put_back


BY = pytest.mark.parametrize("by_library", [False, True], ids=["by position", "by the library"])


@BY
def test_no_other_file_than_the_one_that_is_meant_is_opened(pool, swapped, by_library):
    path, swap, put_back = swapped
    guard = ChangeGuard.of(path)
    swap()
    use, _ = opened(pool, path, by_library, guard)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(H5DataChangedError, match="was replaced by another file"), use:
        pass
    assert len(pool) == 0
    assert len(os.listdir("/proc/self/fd")) == before
    put_back()
    use, first = opened(pool, path, by_library, guard)
    with use as handle:
        assert first(handle) == 1


@BY
def test_a_file_that_was_opened_when_it_was_another_one_is_opened_again(pool, swapped, by_library):
    path, swap, put_back = swapped
    guards = [ChangeGuard.of(path)]
    swap()
    guards.append(ChangeGuard.of(path))
    use, first = opened(pool, path, by_library, guards[1])
    with use as handle:
        assert first(handle) == 2
        put_back()
        use, first = opened(pool, path, by_library, guards[0])
        with use as own:
            assert first(own) == 1
        assert first(handle) == 2  # whoever reads from it goes on
    assert len(pool) == 1


def test_other_files_are_compared_before_and_after_the_library_reads_and_no_handle_of_theirs_is_kept(
    pool, swapped, make_h5
):
    path, swap, put_back = swapped
    main = make_h5(x=np.zeros(4096, "u1"))
    guard = replace(ChangeGuard.of(main), others=(ChangeGuard.of(path),))
    with pytest.raises(H5DataChangedError, match=f"{path!r} was replaced"), pool.h5(main, OPTIONS, guard):
        swap()
    assert len(pool) == 0
    use = pool.h5(main, OPTIONS, guard)
    with pytest.raises(H5DataChangedError, match=f"{path!r} was replaced"), use:
        raise AssertionError("it was let in")
    put_back()
    with pool.h5(main, OPTIONS, guard):
        pass
    assert len(pool) == 1
