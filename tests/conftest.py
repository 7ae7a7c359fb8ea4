"""Fixtures for all tests."""

import faulthandler
import gc
import os
import signal
from collections import defaultdict

import numpy as np
import pytest
import tqdm
from factories import H5Factory
from lightning_utilities.core.rank_zero import WarningCache
from tiers import CASES, CASES_OF, CASES_WIDE, CASES_WIDE_OF, load_profile, some_of, spread

from lightning_h5.hdf5 import process_pool

load_profile()
gc.disable()  # until all tests are imported

# The conformance classes explain failed assertions as tests do.
pytest.register_assert_rewrite("dataset_conformance", "reader_conformance")

# tqdm's monitor thread starts with the first bar of a process, and many tests count threads.
tqdm.tqdm.monitor_interval = 0

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells ignore it for background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc):
    """Try the tests of a conformance class with each of its cases, or some if they have parameters of their own.

    All but a few, which the class names, are left to the wider tiers.
    """
    cases, few = getattr(metafunc.cls, "cases", {}), getattr(metafunc.cls, "few", ())
    for argument, names in {"case": list(cases), "some_case": [*few, *spread(list(cases), 3)]}.items():
        if cases and argument in metafunc.fixturenames:
            marks = {name: () if name in few else pytest.mark.wide for name in names}
            metafunc.parametrize(argument, [pytest.param(cases[n], marks=mark, id=n) for n, mark in marks.items()])


@pytest.hookimpl(tryfirst=True)  # before tests are selected by marks
def pytest_collection_modifyitems(items):
    """Mark what is left to the wider tiers: all but a few cases of a test; property tests run again there.

    Of a test with very many cases, some are left to the last tier.
    """
    cases, more = defaultdict(list), defaultdict(list)
    for item in items:
        if item.get_closest_marker("wide") is None and item.get_closest_marker("real") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")
    for name, of_test in cases.items():
        most = CASES_OF.get(of_test[0].path.parent.name, CASES)
        for item in set(of_test) - set(some_of(of_test, most, name)):
            item.add_marker("wide")
    for item in items:
        if item.get_closest_marker("wide") is not None and item.get_closest_marker("slow") is None:
            more[item.nodeid.partition("[")[0]].append(item)
    for name, of_test in more.items():
        most = CASES_WIDE_OF.get(of_test[0].path.parent.name, CASES_WIDE)
        for item in set(of_test) - set(some_of(of_test, most, name)):
            item.add_marker("slow")


def pytest_collection_finish():
    """What is there before the first test never goes: no collection looks at it again, and some tests have many."""
    gc.enable()
    gc.collect()
    gc.freeze()


class Frozen:
    """Whether all that was there before the first test is still kept out of collections."""

    def __init__(self):
        self._thaw, self.is_thawed = gc.unfreeze, False
        gc.unfreeze = self.thaw

    def thaw(self):
        self._thaw()
        self.is_thawed = True


FROZEN = Frozen()


@pytest.fixture(autouse=True)
def what_was_frozen_stays_so():
    """A collection while the HDF5 library reads an object of a store thaws all: the next ones would take a second."""
    yield
    if FROZEN.is_thawed:
        gc.collect(1)  # of all generations, it would take that second
        gc.freeze()
        FROZEN.is_thawed = False


@pytest.fixture
def make_h5(tmp_path):
    """Writes HDF5 files into this test's directory (see ``H5Factory``)."""
    return H5Factory(tmp_path)


@pytest.fixture(autouse=True)
def slow_tests_are_left_in_peace(request):
    """What shows where a test hangs would interrupt those that take long on purpose; they have limits of their own."""
    if request.node.get_closest_marker("slow") is not None:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def file_pool_is_empty():
    """No test inherits open files of the one before it."""
    yield
    process_pool().close()


@pytest.fixture(autouse=True)
def no_seed_is_left():
    """``seed_everything`` writes to the environment, and data modules of other tests would read it there."""
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def no_warning_is_kept_back(monkeypatch):
    """Lightning gives some warnings once in a process: which test sees one would depend on those before it."""
    monkeypatch.setattr(WarningCache, "__contains__", lambda cache, message: False, raising=False)


@pytest.fixture(autouse=True)
def signal_handlers_are_restored():
    """``lightning-h5 repack`` handles SIGTERM; workers that later tests fork would inherit that, and not die of it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def nothing_held(monkeypatch):
    """Arrays of a few rows are read from the file each time, as large ones are."""
    monkeypatch.setattr("lightning_h5.samples.row_table.HELD_BYTES", -1)


@pytest.fixture
def single_reads(monkeypatch):
    """Each piece is a call of ``os.preadv``: nothing is compiled, and the file system cannot say what it has cached."""
    monkeypatch.setattr("lightning_h5.readers.many_reads._compiled", [None])
    monkeypatch.setattr(
        "lightning_h5.readers.many_reads._PlainPieces.read_cached",
        lambda pieces: (0, np.arange(len(pieces._offsets)), False),
    )
