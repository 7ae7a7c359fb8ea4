"""A forked child inherits no lock that another thread holds: imports end before, and cached properties have none."""

import importlib
import sys
import threading

import pytest
from factories import run_forked

from lightning_h5.hdf5 import forks
from lightning_h5.types import cached_property


@pytest.fixture
def slow_module(tmp_path, monkeypatch):
    """Name of a module whose import lasts until the event in ``sys.h5_test`` is set."""
    (tmp_path / "imported_slowly.py").write_text(
        "import sys\nstarted, may_end = sys.h5_test\nstarted.set()\nmay_end.wait()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "h5_test", events(), raising=False)
    yield "imported_slowly"
    sys.h5_test[1].set()
    sys.modules.pop("imported_slowly", None)


def events():
    return threading.Event(), threading.Event()


def test_a_fork_waits_for_the_import_of_another_thread(slow_module):
    started, may_end = sys.h5_test
    threading.Thread(target=importlib.import_module, args=(slow_module,)).start()
    started.wait()
    threading.Timer(0.1, may_end.set).start()
    assert run_forked(lambda: importlib.import_module(slow_module), 20) == 0


def test_a_fork_inside_an_import_and_beside_an_endless_one_goes_on(slow_module, monkeypatch):
    monkeypatch.setattr(forks, "PATIENCE", 0.05)
    started, may_end = sys.h5_test
    thread = threading.Thread(target=importlib.import_module, args=(slow_module,))
    thread.start()
    started.wait()
    assert run_forked(lambda: importlib.import_module("wave"), 20) == 0
    may_end.set()
    thread.join()
    assert run_forked(lambda: None, 20) == 0  # both locks are free again


def test_a_fork_waits_for_the_compilation_of_another_thread():
    lock, started, may_end = pytest.importorskip("numba.core.compiler_lock").global_compiler_lock, *events()

    def compile_slowly():
        with lock:
            started.set()
            may_end.wait()

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    started.wait()
    threading.Timer(0.1, may_end.set).start()

    def compile_in_child():
        assert lock._lock.acquire(timeout=20)

    assert run_forked(compile_in_child) == 0
    thread.join()
    with lock:  # free again
        pass


def test_a_child_computes_a_property_that_another_thread_computes_at_the_fork():
    started, may_end = events()

    class Table:
        def __init__(self, waits):
            self.waits = waits

        @cached_property
        def starts(self):
            if self.waits:
                started.set()
                may_end.wait()
            return 1

    thread = threading.Thread(target=lambda: Table(waits=True).starts)
    thread.start()
    started.wait()
    try:
        assert run_forked(lambda: Table(waits=False).starts, 20) == 0
    finally:
        may_end.set()
        thread.join()
    table = Table(waits=False)
    assert table.starts is table.starts
