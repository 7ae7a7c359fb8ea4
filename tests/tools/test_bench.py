"""``bench_file``: the settings that are reported are measured, the advice follows from the rates, nothing is left."""

import multiprocessing
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
import yaml
from factories import Stored
from guards import HANG

import lightning_h5.datamodules
from lightning_h5 import H5CorruptError, H5Error, H5FileError, H5KeyError, H5ValueError
from lightning_h5.cli.text import bench_text
from lightning_h5.datasets import LazyFileDataset
from lightning_h5.progress_bar import progress_bar
from lightning_h5.tools import bench
from lightning_h5.tools.bench import NEARLY, Candidate, bench_file

ROWS = 50
FAST = {"seconds": 0.01, "rounds": 2, "batch_size": 8}
STORED = {
    "contiguous": {"storage": "contiguous"},
    "gzip": {"storage": "chunked", "chunks": (6, 3, 2), "options": {"compression": "gzip"}},
    "no filter": {"storage": "chunked", "chunks": (6, 3, 4)},
}


def values(n_rows=ROWS):
    return np.random.default_rng(0).normal(size=(n_rows, 3, 4)).astype("f4")


@pytest.fixture
def make_file(make_h5, nothing_held):
    def makes(stored="gzip"):
        y = np.arange(ROWS)
        return make_h5(
            x=Stored(values(), **STORED[stored]), y=y if stored == "contiguous" else Stored(y, "chunked", (6,))
        )

    return makes


@pytest.fixture
def path(make_h5):
    return make_h5(x=Stored(values(), **STORED["gzip"]), y=np.arange(ROWS))


def names_in(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _was_left(name):
    """Whether torch's shared memory is of this process, or of one that is gone; others here may have theirs."""
    pid = name.split("_")[1] if name.startswith("torch_") else ""
    return pid.isdigit() and (int(pid) == os.getpid() or not os.path.exists(f"/proc/{pid}"))


@pytest.fixture
def leaves_nothing():
    """No process, thread, open file or shared memory more than before."""

    def found():
        shared = [name for name in names_in("/dev/shm") if _was_left(name)]
        files = filter(None, map(_file_of, os.listdir("/proc/self/fd")))
        return shared, sorted(name for name in files if name.endswith(".h5"))

    def threads():
        return [each for each in threading.enumerate() if each.name != "tqdm_monitor"]

    before, n_threads = found(), len(threads())
    yield
    assert multiprocessing.active_children() == []
    assert found() == before
    end = time.monotonic() + HANG
    while len(threads()) > n_threads and time.monotonic() < end:  # they were asked to end
        time.sleep(0.01)
    assert len(threads()) <= n_threads, threads()


def _file_of(fd):
    """What a descriptor is open on; other threads may have closed it meanwhile."""
    with suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{fd}")


# What is measured -----------------------------------------------------------------------------------------------


def test_the_settings_that_are_measured_are_all_that_are_reported(make_h5, monkeypatch, leaves_nothing):
    made = []
    for name in ("LazyH5DataModule", "RankCachedH5DataModule"):
        real = getattr(lightning_h5.datamodules, name)

        def makes(_name=name, _real=real, **settings):
            made.append((_name, settings))
            return _real(**settings)

        monkeypatch.setattr(lightning_h5.datamodules, name, makes)
    path = make_h5(
        image=Stored(np.zeros((80, 6, 6), "u1")), label=np.arange(80, dtype="i4") % 4, patient=np.arange(80) // 5
    )
    report = bench_file(path, num_workers=1, seconds=0.01, rounds=1)
    reported = [(each.datamodule, each.settings) for each in report.results if each.datamodule]
    assert sorted(made, key=str) == sorted(reported, key=str)
    assert report.chosen.settings["y_dtype"] == "int64"
    assert report.chosen.settings["split"].items() >= {"group_key": "patient", "stratify_key": "label"}.items()
    data = yaml.safe_load(report.yaml)["data"]
    assert data == {"class_path": report.chosen.datamodule, "init_args": report.chosen.settings}


def test_a_candidate_takes_part_if_it_changes_anything_and_fits(make_file, monkeypatch):
    def names(stored, free=1 << 40, num_workers=2, **more):
        monkeypatch.setattr(bench, "available_memory", lambda: None if free is None else SimpleNamespace(n_bytes=free))
        dataset = LazyFileDataset([make_file(stored)], "x", "y", sample="row")
        monkeypatch.setattr(type(dataset), "cost", replace(dataset.cost, **more))
        found, out = bench._candidates(dataset, {}, 1, num_workers)
        dataset.close()
        return [each.name for each in found], out

    lazy, cached, workers = "LazyH5DataModule", "RankCachedH5DataModule", "LazyH5DataModule, num_workers=2"
    assert names("no filter") == (["plain h5py", lazy, cached, workers], {})
    assert names("contiguous", num_workers=0) == (["plain h5py", lazy, f"{lazy}, files.mmap=True", cached], {})
    large, all_rows = {"decoded_bytes": 1000 << 20}, f"{lazy}, shuffle.buffer=1000 MiB"
    assert names("gzip", **large) == (["plain h5py", lazy, all_rows, cached, workers], {})
    found, out = names("gzip", free=1500 << 20, **large)
    assert found == ["plain h5py", lazy, cached, workers]
    assert out == {all_rows: "it needs 1,000.0 MiB for rows, and 750.0 MiB of memory are available"}
    found, out = names("gzip", free=None, **large)
    assert found == ["plain h5py", lazy, workers]
    assert set(out) == {all_rows, cached}
    assert set(out.values()) == {"the system does not report its free memory"}


def test_all_candidates_together_take_half_of_the_free_memory(make_file, monkeypatch):
    monkeypatch.setattr(bench, "available_memory", lambda: SimpleNamespace(n_bytes=2000 << 20))
    with LazyFileDataset([make_file()], "x", sample="row") as dataset:
        monkeypatch.setattr(type(dataset), "cost", replace(dataset.cost, decoded_bytes=900 << 20))
        monkeypatch.setattr(bench, "trained_row_bytes", lambda x, y, settings: (200 << 20) // ROWS)
        found, out = bench._candidates(dataset, {}, 1, 0)
    assert sum(each.n_bytes for each in found) <= 1000 << 20
    assert list(out) == ["RankCachedH5DataModule"]


def test_plain_h5py_reads_fields_of_every_kind_from_several_files(make_h5, monkeypatch):
    table = np.zeros(4, [("a", ">f4", (2,)), ("b", "i2")])
    table["a"], table["b"] = np.arange(8).reshape(4, 2), np.arange(4)
    paths = [make_h5(t=table, text=np.array([b"p", b"q", b"r", b"s"]), n=np.arange(4) + 4 * at) for at in range(2)]
    seen = []
    monkeypatch.setattr(bench, "default_collate", lambda batch: seen.extend(batch))
    choices = {"x_key": {"one": "t/a", "two": "t/b"}, "y_key": ["text", "n"], "batch_size": 4}
    with LazyFileDataset(paths, "t/a", sample="row") as dataset:
        batches = bench._plain_batches(dataset.table, choices)
        assert list(islice(batches, 400)) == [1] * 400
        batches.close()
    rows = Counter(int(sample[3]) for sample in seen)
    assert set(rows) == set(range(8))
    for one, two, text, n in seen:
        row = int(n) % 4
        assert one.tolist() == [2 * row, 2 * row + 1]
        assert (two.item(), two.dtype) == (row, torch.int16)
        assert text == b"pqrs"[row : row + 1]


def test_plain_h5py_that_fails_is_left_out(path, monkeypatch):
    def fails(batch):
        raise TypeError("no tensor\ncan hold this")

    monkeypatch.setattr(bench, "default_collate", fails)
    report = bench_file(path, "x", "y", num_workers=0, **FAST)
    assert report.left_out == {"plain h5py": "it failed: TypeError: can hold this"}
    assert [each.name for each in report.results] == ["LazyH5DataModule", "RankCachedH5DataModule"]


CHOICES = {"x_key": "x", "y_key": "y", "batch_size": 8}


def measure(path, *candidates, seconds=0.01, rounds=3, cold=False):
    with LazyFileDataset([path], "x", "y", sample="row") as dataset:
        table = dataset.table
    bar = progress_bar(1, "", shows_progress=False)
    choices = CHOICES | {"train_path": path}
    return bench._measure(candidates, choices, table, seconds=seconds, rounds=rounds, cold=cold, bar=bar)


def test_candidates_take_turns_and_have_a_rate_of_each_round(path, monkeypatch, leaves_nothing):
    order, real = [], bench._rate
    monkeypatch.setattr(
        bench, "_rate", lambda batches, *given, **more: (order.append(batches), real(batches, *given, **more))[1]
    )
    lazy, cached = Candidate("LazyH5DataModule"), Candidate("RankCachedH5DataModule", n_bytes=1)
    rates, out = measure(path, lazy, cached)
    assert out == {}
    assert [len(rates[each]) for each in (lazy, cached)] == [3, 3]
    a, b = order[:2]  # they warm up
    assert order[2:] == [a, a, b, b] * 3


@pytest.mark.parametrize("cold", [False, True])
def test_files_leave_the_page_cache_before_each_measurement_if_asked(path, monkeypatch, cold):
    dropped, real = [], os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: (dropped.append(given[1:]), real(*given)))
    measure(path, Candidate("LazyH5DataModule"), Candidate(None), cold=cold)
    assert dropped.count((0, 0, os.POSIX_FADV_DONTNEED)) == (2 * 3 if cold else 0)


def test_workers_start_before_threads_do_and_what_loads_rows_comes_last(path, monkeypatch):
    order, real = [], bench._batches
    monkeypatch.setattr(bench, "_batches", lambda each, choices: order.append(each) or real(each, choices))
    cached = Candidate("RankCachedH5DataModule", n_bytes=5)
    lazy, workers = Candidate("LazyH5DataModule"), Candidate("LazyH5DataModule", {"num_workers": 1})
    measure(path, cached, lazy, workers, rounds=1)
    assert order == [workers, lazy, cached]


# What is advised ------------------------------------------------------------------------------------------------


def with_rates(monkeypatch, **rates):
    """Makes up the rates of candidates, by the name of the data module or what it is changed by."""

    def measured(candidates, choices, table, **_):
        def key(each):
            return next(iter(each.choices), {None: "plain", "LazyH5DataModule": "lazy"}.get(each.datamodule, "cached"))

        return {each: [rates[key(each)]] for each in candidates}, {}

    monkeypatch.setattr(bench, "_measure", measured)


@pytest.mark.parametrize(
    ("rates", "name", "reason"),
    [
        ({"lazy": 100, "cached": 99, "num_workers": 98}, "LazyH5DataModule", "is the fastest: 100 rows/s."),
        (
            {"lazy": 96, "cached": 100, "num_workers": 101},
            "LazyH5DataModule",
            "is the simplest of the fastest: 95 % of LazyH5DataModule, num_workers=2.",
        ),
        ({"lazy": 90, "cached": 100, "num_workers": 101}, "RankCachedH5DataModule", "is the simplest of the fastest"),
        ({"lazy": 90, "cached": 90, "num_workers": 101}, "LazyH5DataModule, num_workers=2", "is the fastest"),
    ],
    ids=str,
)
def test_the_advice_is_the_simplest_that_is_about_as_fast_as_the_fastest(path, monkeypatch, rates, name, reason):
    with_rates(monkeypatch, plain=10, **rates)
    report = bench_file(path, "x", "y")
    assert (report.chosen.name, NEARLY) == (name, 0.95)
    assert f"{name} {reason}" in report.reasons[0]


def test_reasons_say_what_there_is_to_know(make_file, monkeypatch):
    def reasons(**rates):
        with_rates(monkeypatch, **{"plain": 1, "lazy": 1, "cached": 1, "files": 1} | rates)
        return " ".join(bench_file(make_file("contiguous"), "x", "y", num_workers=0).reasons)

    assert "that would kill the process" in reasons(files=10)
    assert "divided among the ranks" in reasons(cached=10)
    assert "is as fast or faster" in reasons(plain=1.2)
    assert "Plain h5py" not in reasons(lazy=10)


# All of it ------------------------------------------------------------------------------------------------------


def test_a_report_has_every_figure(path, leaves_nothing):
    report = bench_file(path, "x", "y", num_workers=1, **FAST)
    assert (report.files, report.n_rows, report.row_bytes, report.batch_size) == ((path,), 50, 56, 8)
    assert [each.name for each in report.results] == [
        "plain h5py",
        "LazyH5DataModule",
        "RankCachedH5DataModule",
        "LazyH5DataModule, num_workers=1",
    ]
    assert all(len(each.rates) == 2 for each in report.results)
    assert report.chosen in report.results
    given = {"train_path": path, "x_key": "x", "y_key": "y", "batch_size": 8, "split": 0.1}
    assert report.results[1].settings == given
    assert report.results[3].settings == given | {"num_workers": 1}


def test_a_step_follows_each_batch_and_steps_alone_show_what_loading_costs(path, leaves_nothing):
    sizes = set()

    def step(batch):
        x, y = batch
        assert len(x) == len(y)
        sizes.add(len(x))
        time.sleep(0.001)

    report = bench_file(path, "x", "y", num_workers=1, step=step, **FAST)
    assert max(sizes) == 8
    assert len(report.results) == 4
    assert all(each.rows_per_second <= 8 / 0.001 for each in report.results)
    assert 0 < report.unloaded_rows_per_second <= 8 / 0.001
    assert any(reason.startswith("Steps alone run at") for reason in report.reasons)
    assert "loading costs" in "\n".join(bench_text(report))
    assert bench_file(path, "x", "y", num_workers=0, step=1, **FAST).unloaded_rows_per_second <= 8 / 0.001
    assert bench_file(path, "x", "y", num_workers=0, **FAST).unloaded_rows_per_second is None


def test_without_keys_those_of_inspect_are_taken(make_h5):
    subjects = np.arange(ROWS) // 5
    path = make_h5(img=values(), meta=np.zeros((ROWS, 2)), label=np.arange(ROWS) % 3, subject_id=subjects)
    settings = bench_file(path, num_workers=0, seconds=0.01, rounds=1).chosen.settings
    assert settings["split"]["group_key"] == "subject_id"
    assert settings.items() >= {"x_key": "img", "y_key": "label"}.items()


def test_several_files_and_keys_are_one_data_set(make_h5, leaves_nothing):
    paths = [make_h5(x=values(), z=values(), y=np.arange(ROWS)) for _ in range(2)]
    report = bench_file(paths, ("x", "z"), {"label": "y"}, num_workers=0, **FAST)
    assert report.n_rows == 2 * ROWS
    assert report.chosen.settings.items() >= {"train_path": paths, "x_key": ["x", "z"], "y_key": {"label": "y"}}.items()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((), {"batch_size": 0}, H5ValueError, "batch_size=0 was given. Pass a whole number of at least 1"),
        ((), {"batch_size": 2.5}, H5ValueError, "batch_size=2.5 was given"),
        (("x", "y"), {"batch_size": 51}, H5ValueError, "there are 50 rows. Pass a batch_size of at most 50"),
        ((), {"seconds": 0}, H5ValueError, "seconds=0 was given. Pass a time of more than 0"),
        ((), {"seconds": float("inf")}, H5ValueError, "seconds=inf"),
        ((), {"rounds": 0}, H5ValueError, "rounds=0"),
        ((), {"step": -1}, H5ValueError, "step=-1 was given. Pass milliseconds of at least 0, or a function"),
        ((), {"step": float("nan")}, H5ValueError, "step=nan"),
        ((), {"num_workers": -1}, H5ValueError, "num_workers=-1"),
        (("X2",), {}, H5KeyError, "Did you mean 'x2'?"),
        (("text",), {}, H5ValueError, "'text' in .* holds text, and a tensor cannot"),
        (("x", "few"), {}, H5ValueError, "'x' has 50 rows and 'few' has 3"),
        ((None, "y"), {}, H5ValueError, "y_key='y' was given without x_key. Pass both."),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_anything_is_measured(
    make_h5, monkeypatch, leaves_nothing, arguments, options, error, text
):
    monkeypatch.setattr(bench, "_measure", None)
    path = make_h5(x=values(), x2=values(), y=np.arange(ROWS), few=np.arange(3), text=np.array([b"a"] * ROWS))
    with pytest.raises(error, match=text):
        bench_file(path, *arguments, **options)


def test_a_file_that_is_missing_or_empty_or_no_hdf5_is_refused(make_h5, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_measure", None)
    with pytest.raises(H5FileError, match="does not exist"):
        bench_file(tmp_path / "none.h5")
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(H5FileError, match="not an HDF5 file"):
        bench_file(tmp_path / "text.h5", "x")
    with pytest.raises(H5ValueError, match=r"there are 0 rows. Pass files with rows"):
        bench_file(make_h5(x=np.zeros((0, 3))), "x")


def test_a_filter_that_is_missing_is_reported_before_anything_is_measured(path, monkeypatch):
    monkeypatch.setattr(bench, "_measure", None)
    monkeypatch.setattr("h5py.h5z.filter_avail", lambda number: False)
    with pytest.raises(H5FileError, match=r"compressed with .* which this installation cannot decode"):
        bench_file(path, "x", "y")


def test_damaged_rows_are_an_error_and_leave_nothing(make_h5, nothing_held, leaves_nothing):
    path = make_h5(x=Stored(values(), **STORED["gzip"]), y=np.arange(ROWS))
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(3)
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(b"\0" * chunk.size)
    with pytest.raises(H5CorruptError):
        bench_file(path, "x", "y", num_workers=2, **FAST)


@pytest.mark.parametrize("at", [1, 4, 9, 14])
def test_an_interrupt_leaves_nothing(path, monkeypatch, leaves_nothing, at):
    n_calls, real = [], bench._rate

    def interrupted(*arguments, **named):
        n_calls.append(1)
        if len(n_calls) == at:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(bench, "_rate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_file(path, "x", "y", num_workers=2, **FAST)


def test_workers_that_are_killed_leave_their_candidate_out(path, monkeypatch, leaves_nothing):
    real, doomed = bench._batches, ["LazyH5DataModule, num_workers=2"]

    def killed():
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
        yield

    monkeypatch.setattr(bench, "_batches", lambda each, given: killed() if each.name in doomed else real(each, given))
    report = bench_file(path, "x", "y", num_workers=2, **FAST)
    assert list(report.left_out) == doomed
    assert "is killed by signal" in report.left_out[doomed[0]]
    doomed += ["LazyH5DataModule", "RankCachedH5DataModule"]
    with pytest.raises(H5Error, match=r"no data module could be measured: .*is killed by signal"):
        bench_file(path, "x", "y", num_workers=2, **FAST)
