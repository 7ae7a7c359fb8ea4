"""``(x - mean) * scale``: what NumPy computes in 64 bits, and the same bits whether loops are compiled or not."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from guards import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import jit
from lightning_h5.datasets import multiply_add
from lightning_h5.datasets.multiply_add import Affine

WAYS = ("compiled", "by NumPy")
DTYPES = ("u1", "i1", "u2", "i2", "i4", "i8", "f2", "f4", "f8", "?", ">i2", ">f4")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Loops as they are compiled, or as where Numba is not installed."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(multiply_add, "_affine_loops", lambda *args, **kwargs: None)
    return request.param


@st.composite
def changes(draw, dtype=None):
    """What is done to rows, and rows to do it to: shape, axis of the channels, dtype, and how far the mean is off."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    if draw(st.booleans()):
        shape = (*shape, draw(st.sampled_from((63, 64, 65, 1100))))
    axis = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    wide = [size if at == axis else 1 for at, size in enumerate(shape)] if axis is not None else ()
    stored = np.dtype(draw(st.sampled_from(DTYPES)) if dtype is None else dtype)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    n_rows = draw(st.integers(0, 9))
    std = 10.0 ** draw(st.integers(-2, 2))
    mean = random.normal(size=wide) * std * 10.0 ** draw(st.integers(-1, 4))
    scale = 1 / (std * random.uniform(0.5, 2, size=wide))
    rows = random.normal(size=(n_rows, *shape)) * std + mean
    if stored.kind == "f":
        rows[random.random(rows.shape) < 0.02] = draw(st.sampled_from((np.nan, np.inf, -np.inf, -0.0, 0.0)))
        values = rows.clip(-6e4, 6e4) if stored.itemsize == 2 else rows
    elif stored.kind == "b":
        values = rows > 0
    else:
        values = np.rint(rows).clip(np.iinfo(stored).min, np.iinfo(stored).max)
    work = np.dtype("f8" if stored.str[1:] in ("i4", "i8", "f8") else "f4")
    return Affine(np.asarray(mean), np.asarray(scale), shape, work), values.astype(stored), random


def in_64_bits(change, rows):
    with np.errstate(all="ignore"):
        return (rows.astype("f8") - change.mean) * change.scale


def assert_near(found, expected):
    with np.errstate(all="ignore"):
        error = np.abs(found - expected) / np.maximum(1, np.abs(expected))
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    is_finite = np.isfinite(expected)
    assert np.array_equal(found[~is_finite], expected[~is_finite], equal_nan=True)
    assert error[is_finite].max(initial=0) < 1e-6


@pytest.mark.wide
@settings(max_examples=examples(150))
@given(given_=changes())
def test_copied_rows_are_what_64_bits_give(way, given_):
    change, rows, random = given_
    places = random.integers(0, max(1, len(rows)), len(rows) and 12)
    out = np.full((len(places), *rows.shape[1:]), 77, change.work)
    kept = rows.copy()
    change.take(rows, places, out)
    assert_near(out, in_64_bits(change, rows[places]))
    assert rows.tobytes() == kept.tobytes()
    everything = np.full(rows.shape, 77, change.work)
    change.take(rows, None, everything)
    assert_near(everything, in_64_bits(change, rows))
    scattered = np.full((2 * len(out), *rows.shape[1:]), 77, change.work)
    here = random.permutation(len(scattered))[: len(out)]
    change.take(rows, places, scattered, here)
    assert scattered[here].tobytes() == out.tobytes()
    assert (np.delete(scattered, here, axis=0) == 77).all()


@settings(max_examples=examples(100))
@given(given_=changes() | changes("f4") | changes("f8"))
def test_rows_in_place_become_what_64_bits_give(way, given_):
    change, rows, _ = given_
    found = rows.astype(change.work)
    change(found)
    assert_near(found, in_64_bits(change, rows))


@settings(max_examples=examples(200))
@given(given_=changes())
def test_compiled_loops_give_the_very_bits_of_numpy(given_):
    pytest.importorskip("numba")
    change, rows, random = given_
    places = random.permutation(len(rows))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in WAYS:
            copied, in_place = np.empty((len(rows), *rows.shape[1:]), change.work), rows.astype(change.work)
            change.take(rows, places, copied)
            change(in_place)
            seen.append((copied[~np.isnan(copied)].tobytes(), in_place[~np.isnan(in_place)].tobytes()))
            patch.setattr(multiply_add, "_affine_loops", lambda *args, **kwargs: None)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("places", [[3], [-1], [0, 1, 2], [0]])
def test_a_loop_that_looks_at_no_end_gets_no_place_behind_it(places):
    pytest.importorskip("numba")
    change = Affine(np.zeros(2), np.ones(2), (2,), np.dtype("f4"))
    with pytest.raises(IndexError, match="were given, not 2 places below 3"):
        change.take(np.zeros((3, 2), "f4"), np.array(places), np.zeros((2, 2), "f4"))


def test_rows_that_do_not_lie_in_one_piece_are_copied_all_the_same(way):
    rows = np.arange(48, dtype="f4").reshape(2, 3, 8).transpose(1, 0, 2)
    out = np.empty((2, 2, 8), "f4")
    Affine(np.array(3.0), np.array(2.0), (2, 8), np.dtype("f4")).take(rows, np.array([2, 0]), out)
    assert np.array_equal(out, (rows[[2, 0]] - 3) * 2)


def test_rows_that_do_not_lie_in_one_piece_are_changed_all_the_same(way):
    rows = np.arange(48, dtype="f4").reshape(2, 3, 8).transpose(1, 0, 2)
    expected = (rows - 3) * 2
    Affine(np.array(3.0), np.array(2.0), (2, 8), np.dtype("f4"))(rows)
    assert np.array_equal(rows, expected)


def test_a_change_travels_to_other_processes(way):
    change = pickle.loads(pickle.dumps(Affine(np.array([1.0, 2]), np.array([1.0, 3]), (2,), np.dtype("f4"))))
    rows = np.array([[1, 3]], "f4")
    change(rows)
    assert rows.tolist() == [[0, 3]]


def test_nothing_is_compiled_while_rows_are_read():
    numba = pytest.importorskip("numba")
    change = Affine(np.array([1.0, 2]), np.array([1.0, 3]), (2,), np.dtype("f8"))
    change.compile(np.dtype("i1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.core.compiler.CompilerBase, "compile_extra", _fail)
        rows = np.array([[1, 2], [3, 4]], "i1")
        out = np.empty((2, 2))
        change.take(rows, np.array([1, 0]), out)
        change(out)
        with pytest.raises(AssertionError, match="compiles"):  # else this test would see nothing
            numba.njit(lambda x: x + 1)(1)


def _fail(*args, **kwargs):
    raise AssertionError("it compiles")


@pytest.mark.parametrize("error", [ImportError("Numba needs NumPy 2.5 or less"), ModuleNotFoundError("numba")])
def test_where_numba_cannot_be_imported_numpy_does_the_work(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(jit.importlib, "import_module", fail)
    jit._numba.cache_clear()
    try:
        assert jit.compiled(lambda x: None) is None
    finally:
        jit._numba.cache_clear()


@pytest.mark.wide
def test_who_does_not_normalise_does_not_import_numba(make_h5):
    path = make_h5(x=np.zeros((9, 4), "f4"), y=np.arange(9))
    code = f"""
import sys
from lightning_h5.datasets import H5LazyDataset
assert len(H5LazyDataset({str(path)!r}, x_key="x", y_key="y").read_batch([3, 1])[0]) == 2
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=HANG)
