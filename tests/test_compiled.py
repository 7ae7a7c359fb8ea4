"""Machine code that is kept on disk: found by the next process, and never taken for what it is not."""

import ctypes
import errno
import importlib
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from guards import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import jit as module
from lightning_h5.jit import compiled

numba = pytest.importorskip("numba")

X = np.arange(5.0)


@contextmanager
def kept_in(folder):
    """Machine code is kept in a folder for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(folder))
        numba.config.reload_config()
        yield
    numba.config.reload_config()
    module._versions.cache_clear()


@pytest.fixture
def folder(tmp_path):
    with kept_in(tmp_path / "cache"):
        yield tmp_path / "cache"


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def run(machine, *arguments):
    """What a loop gives, and how often its machine code came from disk and from the compiler."""
    found = machine(*arguments)
    return found, sum(machine.stats.cache_hits.values()), sum(machine.stats.cache_misses.values())


def doubled_sum(x):
    total = 0.0
    for each in x:
        total += 2.0 * each
    return total


def test_what_was_compiled_once_is_loaded_afterwards(folder):
    assert run(compiled(doubled_sum), X) == (20.0, 0, 1)
    assert run(compiled(doubled_sum), X) == (20.0, 1, 0)
    assert run(compiled(doubled_sum), X.astype("i2")) == (20.0, 0, 1), "compiled for each dtype"
    assert len(files(folder)) == 2


SAME_NAMES = """
import sys
import numpy as np
from lightning_h5.jit import compiled

def make(k):
    def inner(x, n):  # too long to become a part of what calls it
        t = 0.0
        for i in range(n):
            if x[i] > 3: t += x[i] * k
            elif x[i] < -3: t -= x[i] / k
            else:
                for j in range(i): t += np.sin(x[j]) * k
        for i in range(n):
            for j in range(n):
                if x[i] > x[j]: t += np.tan(x[i] - x[j]) * k
                elif x[i] < x[j]: t -= np.log(1.0 + abs(x[i] - x[j])) * k
        return t * 0.0 + k
    inner = compiled(inner)
    def loop(x):
        return inner(x, len(x)) + inner(x, len(x) - 1)
    return compiled(loop)

print(*(make(int(k))(np.arange(5.0)) for k in sys.argv[1:]))
"""


@pytest.mark.wide
def test_loops_of_one_name_are_kept_apart_whichever_process_compiled_them(tmp_path):
    """Numba numbers functions of one name anew in each process, and machine code from disk keeps its numbers."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(module.__file__).parents[1])}
    for numbers in (["5"], ["7", "5"], ["9", "5", "7"]):
        command = [sys.executable, "-c", SAME_NAMES, *numbers]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=HANG)
        assert [float(each) for each in said.stdout.split()] == [2.0 * float(k) for k in numbers]


# Damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A file of machine code, and what is in it."""
    folder = tmp_path_factory.mktemp("kept")
    with kept_in(folder):
        compiled(doubled_sum)(X)
        (path,) = files(folder)
        yield path, path.read_bytes()


def gives_right_values_and_repairs(path, data):
    path.write_bytes(data)
    assert run(compiled(doubled_sum), X) == (20.0, 0, 1)
    assert run(compiled(doubled_sum), X) == (20.0, 1, 0)


damage = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True)),
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(0, 7)),
    st.tuples(st.just("zeros"), st.floats(0, 1, exclude_max=True)),
    st.tuples(st.just("longer"), st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("other"), st.binary(max_size=300)),
)


def damaged(data, kind, *how):
    at = int(len(data) * how[0]) if isinstance(how[0], float) else 0
    if kind == "cut":
        return data[:at]
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << how[1]]) + data[at + 1 :]
    if kind == "zeros":
        return data[:at] + bytes(len(data) - at)
    return data + how[0] if kind == "longer" else how[0]


@pytest.mark.wide
@given(damage)
def test_a_damaged_file_is_compiled_anew_and_replaced(kept, how):
    path, data = kept
    found = damaged(data, *how)
    if found != data:
        gives_right_values_and_repairs(path, found)


@pytest.mark.slow
def test_no_damaged_file_is_loaded(kept):
    path, whole = kept
    machine = compiled(doubled_sum)
    load = partial(machine._cache.load_overload, (numba.typeof(X),), machine.targetctx)
    path.write_bytes(whole)
    assert load() is not None

    @settings(max_examples=examples(5000))
    @given(damage)
    def look(how):
        if (found := damaged(whole, *how)) != whole:
            path.write_bytes(found)
            assert load() is None

    look()


def test_a_file_in_the_place_of_another_is_not_taken_for_it(folder):
    assert compiled(doubled_sum)(X) == 20.0
    (path,) = files(folder)
    assert compiled(doubled_sum)(X.astype("f4")) == 20.0
    (other,) = {*files(folder)} - {path}
    path.write_bytes(other.read_bytes())
    assert run(compiled(doubled_sum), X) == (20.0, 0, 1)


def test_a_folder_in_the_place_of_a_file_is_left_alone(folder):
    compiled(doubled_sum)(X)
    (path,) = files(folder)
    path.unlink()
    path.mkdir()
    assert run(compiled(doubled_sum), X) == (20.0, 0, 1)
    assert files(folder) == []


# What decides the machine code -----------------------------------------------------------------------------------

CALLER = """
{imports}
FACTOR = {factor}

def make(compiled, cell):
    inner = compiled(helper) if {is_compiled} else None
    def loop(x, plus={plus}):
        total = 0.0
        for each in x:
            {body}
        return total
    return loop
"""
HELPER = """
def helper(x):
    return x * {times}
"""
BODIES = {
    "helper": "total += inner(each)",
    "constant": "total += each * {times}",
    "module's constant": "total += each * FACTOR",
    "cell": "total += each * cell",
    "default": "total += each * plus",
}


def write_and_import(folder, name, body, times, stamp):
    """A module and one that it calls; both of the same size and time, whatever they compute."""
    texts = {
        f"{name}_helper": HELPER.format(times=times),
        name: CALLER.format(
            imports=f"from {name}_helper import helper",
            factor=times,
            plus=times,
            is_compiled=body == "helper",
            body=BODIES[body].format(times=times),
        ),
    }
    for module_name, text in texts.items():
        path = folder / f"{module_name}.py"
        path.write_text(text)
        os.utime(path, (stamp, stamp))
        sys.modules.pop(module_name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


@pytest.mark.parametrize("body", BODIES)
def test_a_change_of_anything_that_a_loop_uses_is_seen(folder, tmp_path, monkeypatch, body):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be taken for that of the text of the same stamp
    hits = []
    for times in (2, 3, 2):
        loops = write_and_import(tmp_path, "changing_loops", body, times, 1_600_000_000)
        found, *counts = run(compiled(loops.make(compiled, times)), X)
        assert found == times * X.sum()
        hits.append(counts[0])
    assert hits == [0, 0, 1]


def test_settings_of_numba_and_versions_decide_too(folder, monkeypatch):
    assert run(compiled(doubled_sum), X)[1:] == (0, 1)
    for name, value in (("NUMBA_LOOP_VECTORIZE", "0"), ("NUMBA_OPT", "1")):
        monkeypatch.setenv(name, value)
        module._versions.cache_clear()
        assert run(compiled(doubled_sum), X)[1:] == (0, 1)
    monkeypatch.setattr("llvmlite.__version__", "0.0")
    module._versions.cache_clear()
    assert run(compiled(doubled_sum), X)[1:] == (0, 1)
    monkeypatch.undo()
    module._versions.cache_clear()
    assert run(compiled(doubled_sum), X)[1:] == (1, 0)


def test_what_calls_an_address_of_this_process_is_not_kept(folder):
    function = ctypes.CDLL(None).labs
    function.argtypes, function.restype = [ctypes.c_long], ctypes.c_long

    def loop(x):
        return function(x)

    assert run(compiled(loop), -3) == (3, 0, 1)
    assert run(compiled(loop), -3) == (3, 0, 1)
    assert files(folder) == []


def test_an_address_that_is_given_is_called(folder):
    address = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value
    call = module.c_call()

    def loop(address, x):
        return call(address, (x,))

    assert run(compiled(loop), address, -(2**40)) == (2**40, 0, 1)
    assert run(compiled(loop), address, -5) == (5, 1, 0)


# Where it is kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mkstemp", "replace", "makedirs"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_costs_only_time(folder, monkeypatch, name, code):
    machine = compiled(doubled_sum)

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile if name == "mkstemp" else os, name, refuse)
    assert run(machine, X) == (20.0, 0, 1)
    monkeypatch.undo()
    assert files(folder) == []


def test_without_a_folder_to_write_to_nothing_is_kept(monkeypatch):
    caching = importlib.import_module("numba.core.caching")
    for locator in caching.CompileResultCacheImpl._locator_classes:
        monkeypatch.setattr(locator, "from_function", classmethod(lambda cls, *_: None))
    machine = compiled(doubled_sum)
    assert machine._cache.cache_path is None
    assert run(machine, X) == (20.0, 0, 1)


def test_internals_of_an_unknown_numba_cost_only_time(folder, monkeypatch):
    monkeypatch.delattr("numba.core.caching.CompileResultCacheImpl")
    module._disk_cache.cache_clear()
    assert compiled(doubled_sum)(X) == 20.0
    monkeypatch.undo()
    module._disk_cache.cache_clear()


def test_with_numba_turned_off_there_is_no_machine_code(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    module._numba.cache_clear()
    assert compiled(doubled_sum) is None
    monkeypatch.undo()
    module._numba.cache_clear()


# The package's own loops -----------------------------------------------------------------------------------------

PROGRAM = """
import ctypes, sys, zlib
import h5py, numpy as np
from lightning_h5.datasets.multiply_add import Affine, _affine_loops
from lightning_h5.hdf5 import Filter
from lightning_h5.readers.filters import compiled as loops, decoders, pipeline

class Step(tuple):
    id = property(lambda self: self[0])
    options = ()

def stored(number, data):
    if number == decoders.GZIP:
        return zlib.compress(data)
    library = ctypes.CDLL(h5py.h5z.__file__)
    out = ctypes.create_string_buffer(len(data))
    n = library.lzf_compress(data, len(data), out, len(data) - 1)
    return out.raw[:n]

machines = []
for number, size in ((decoders.GZIP, 4), (decoders.LZF, 1)):
    rows = np.arange(500, dtype="f4") // 7
    octets = rows.view("u1").reshape(-1, size)
    data = stored(number, np.ascontiguousarray(octets.T).tobytes())
    with open(sys.argv[1], "wb") as file:
        file.write(b"head" + data)
    loop = loops.loop_of(pipeline.decoder_of(Step((number,)), 4), size)
    out = np.zeros(rows.nbytes, "u1")
    with open(sys.argv[1], "rb") as file:
        seconds = loop(file.fileno(), np.array([4]), np.array([len(data)]), rows.nbytes, out, np.array([0]))
    assert seconds is not None and np.array_equal(out.view("f4"), rows), (number, size)
    machines.append(loop._loop)
affine = Affine(np.full((3, 1), 2.0), np.full((3, 1), 0.5), (3, 4), np.dtype("f4"))
affine.compile(np.dtype("u1"))
rows, out = np.arange(24, dtype="u1").reshape(2, 3, 4), np.empty((2, 3, 4), "f4")
affine.take(rows, None, out)
assert np.array_equal(out, (rows.astype("f4") - 2) * 0.5)
machines += _affine_loops(np.dtype("f4"), by_channel=affine._is_by_channel, loop=None)
print(sum(sum(each.stats.cache_hits.values()) for each in machines))
print(sum(sum(each.stats.cache_misses.values()) for each in machines))
"""


def start(folder, number=0):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache")}
    environment["PYTHONPATH"] = str(Path(module.__file__).parents[1])
    command = [sys.executable, "-c", PROGRAM, str(folder / f"chunk{number}")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def counts(process):
    out, _ = process.communicate(timeout=HANG)
    assert process.returncode == 0
    return [*map(int, out.split())]


@pytest.mark.wide
@pytest.mark.skipif(sys.platform == "win32", reason="there are no loops that read")
def test_all_loops_are_kept_for_the_next_process_however_many_compile_them_at_once(tmp_path):
    pytest.importorskip("deflate")
    together = [counts(process) for process in [start(tmp_path, number) for number in range(2)]]
    n_loops = {sum(each) for each in together}
    assert len(n_loops) == 1
    assert not [path for path in files(tmp_path / "cache") if path.suffix == ".tmp"]
    assert counts(start(tmp_path)) == [*n_loops, 0]
