"""Orders that mix runs have the system read each run in one piece, once an epoch, before its rows are asked for."""

import os

import numpy as np
import pytest
from arguments import nested
from factories import Stored
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import LazyH5DataModule
from lightning_h5.datasets.read_costs import ReadaheadHints
from lightning_h5.hdf5 import find_array, layout_of, open_h5
from lightning_h5.readers import ContiguousReader, MappedReader, contiguous

ROWS, WIDTH = 900, 4096  # bytes a row: a run of a megabyte is 256 rows
VALUES = np.random.default_rng(0).integers(0, 256, (ROWS, WIDTH), dtype="u1")

pytestmark = pytest.mark.usefixtures("nothing_held")


@pytest.fixture
def named(monkeypatch):
    """What readers were told, as (path, first row, row after the last)."""
    calls = []
    for kind in (ContiguousReader, MappedReader):
        monkeypatch.setattr(kind, "will_need", lambda own, rows: calls.append((own.layout.path, rows.start, rows.stop)))
    return calls


def loader_of(paths, **options):
    module = LazyH5DataModule(paths, **nested(**({"x_key": "x", "batch_size": 32, "with_index": True} | options)))
    module.setup("fit")
    return module, module.train_dataloader()


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("n_files", [1, 2])
def test_each_run_is_named_once_an_epoch(make_h5, named, mmap, n_files):
    paths = [make_h5(x=VALUES) for _ in range(n_files)]
    module, loader = loader_of(paths, shuffle="window", files={"mmap": mmap})
    for epoch in range(2):
        named.clear()
        loader.sampler.set_epoch(epoch)
        assert sum(len(rows) for _, rows in loader) == n_files * ROWS
        runs = [(start, min(start + 256, ROWS)) for start in range(0, ROWS, 256)]
        assert sorted(named) == sorted((path, *run) for path in paths for run in runs)
    module.teardown()


@pytest.mark.parametrize("shuffle", ["global", False, True])
def test_other_orders_name_none(make_h5, named, shuffle):
    module, loader = loader_of([make_h5(x=VALUES)], shuffle=shuffle)
    assert sum(len(rows) for _, rows in loader) == ROWS
    assert named == []
    module.teardown()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fraction", [0, 0.3])
def test_rows_are_those_of_the_file_whoever_reads(make_h5, num_workers, fraction):
    module, loader = loader_of([make_h5(x=VALUES)], shuffle="window", num_workers=num_workers, split=fraction)
    seen = []
    for x, rows in loader:
        own = rows if loader.dataset.indices is None else loader.dataset.indices[rows]
        assert (x.numpy() == VALUES[own]).all()
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(loader.dataset)))
    module.teardown()


@given(st.data(), st.integers(1, 9), st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_runs_are_new_once_an_epoch(data, step, n_rows):
    ahead, seen, last = ReadaheadHints([step] * len(n_rows), n_rows), set(), None
    for epoch in data.draw(st.lists(st.integers(0, 2), max_size=12)):
        if epoch != last:
            seen, last = set(), epoch
        file = data.draw(st.integers(0, len(n_rows) - 1))
        rows = data.draw(st.lists(st.integers(0, n_rows[file] - 1), max_size=9))
        new = sorted({row // step for row in rows} - {run for of, run in seen if of == file})
        expected = [range(run * step, min(run * step + step, n_rows[file])) for run in new]
        assert ahead.new(file, np.array(rows, dtype=np.int64), epoch) == expected
        seen |= {(file, run) for run in new}


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
@pytest.mark.parametrize("kind", ["contiguous", "mapped", "small chunks", "large chunks"])
def test_the_system_is_told_where_the_rows_lie(make_h5, monkeypatch, kind):
    n_together = {"small chunks": 7, "large chunks": 512}.get(kind)
    stored = Stored(VALUES, "chunked", (n_together, WIDTH)) if n_together else Stored(VALUES, "contiguous")
    path = make_h5(x=stored)
    with open_h5(path) as file:
        layout = layout_of(find_array(file, "x"), path, "x")
    reader = (MappedReader if kind == "mapped" else ContiguousReader)(layout)
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, place, n_bytes, advice: told.append((place, n_bytes, advice)))
    monkeypatch.setattr(contiguous, "_is_cached", lambda fd, place: False)
    for rows in (range(0), range(10, 60), range(500, 550), range(512, 768), range(899, 900)):
        told.clear()
        reader.will_need(rows)
        with open(path, "rb") as file:
            content = file.read()
        found = b"".join(content[place : place + n_bytes] for place, n_bytes, _ in told)
        assert found == VALUES[rows.start : rows.stop].tobytes()
        assert {advice for *_, advice in told} <= {os.POSIX_FADV_WILLNEED}
        assert bool(told) == bool(rows)


def test_what_the_system_has_is_not_asked_for_again(make_h5, monkeypatch):
    path = make_h5(x=VALUES)
    with open_h5(path) as file:
        layout = layout_of(find_array(file, "x"), path, "x")
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: told.append(args), raising=False)
    monkeypatch.setattr(os, "preadv", lambda fd, memory, place, flags: 1)
    ContiguousReader(layout).will_need(range(256))
    assert told == []


@pytest.mark.parametrize("trouble", ["a file system that takes no advice", "a file that is gone"])
def test_advice_that_cannot_be_given_stops_nobody(make_h5, monkeypatch, trouble):
    path = make_h5(x=VALUES)
    with open_h5(path) as file:
        layout = layout_of(find_array(file, "x"), path, "x")
    reader = ContiguousReader(layout)
    if trouble.endswith("gone"):
        os.unlink(path)
    else:
        monkeypatch.setattr(contiguous, "_is_cached", lambda fd, place: False)

        def refuse(*args):
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    reader.will_need(range(256))
