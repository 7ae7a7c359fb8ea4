"""``bench_file``: what is measured are the rows of the file, the advice follows from the rates, nothing is left."""

import multiprocessing
import os
import pickle
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from factories import Stored
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from lightning_h5 import H5CorruptError, H5Error, H5FileError, H5KeyError, H5ValueError
from lightning_h5.tools import bench
from lightning_h5.tools.bench import bench_file
from lightning_h5.tools.contest import plain_recipe
from lightning_h5.tools.contest import runs as bench_runs
from lightning_h5.tools.contest.chart import chart_of_bench, check_chart, save_chart
from lightning_h5.tools.contest.choice import NEARLY, choose, reasons_for
from lightning_h5.tools.contest.contenders import Contender, contenders_for, find_rows
from lightning_h5.tools.contest.plain_recipe import PlainDataset, plain_loader, rows_at_a_time
from lightning_h5.tools.contest.rates import take_for
from lightning_h5.tools.contest.running import Running
from lightning_h5.tools.contest.runs import MOST_FINALISTS, NEAR, Measuring, finalists_of

ROWS = 50
FAST = {"seconds": 0.01, "rounds": 2, "batch_size": 8}
STORED = {
    "contiguous": {"storage": "contiguous"},
    "gzip": {"storage": "chunked", "chunks": (6, 3, 2), "options": {"compression": "gzip"}},
    "no filter": {"storage": "chunked", "chunks": (6, 3, 4)},
}
WAYS = [
    Contender(way="plain"),
    Contender(way="plain", num_workers=2),
    Contender(way="lazy"),
    Contender(way="lazy", num_workers=2),
    Contender(way="lazy", mmap=True),
    Contender(way="lazy", shuffle_bytes=2 << 30),
    Contender(way="lazy", shuffle_bytes=300, num_workers=1),
    Contender(way="cached"),
    Contender(way="cached", prefetch_factor=8),
    Contender(way="cached", num_workers=2),
]


def values(n_rows=ROWS):
    return np.random.default_rng(0).normal(size=(n_rows, 3, 4)).astype("f4")


@pytest.fixture
def make_rows(make_h5, nothing_held):
    def makes(stored="gzip", batch_size=8):
        y = np.arange(ROWS)
        y = Stored(y) if stored == "contiguous" else Stored(y, "chunked", (6,))
        path = make_h5(x=Stored(values(), **STORED[stored]), y=y)
        return find_rows(path, "x", "y", batch_size)

    return makes


@pytest.fixture
def rows(make_rows):
    return make_rows()


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
    end = time.monotonic() + 10
    while len(threads()) > n_threads and time.monotonic() < end:  # they were told to end
        time.sleep(0.01)
    assert len(threads()) <= n_threads, threads()


def _file_of(fd):
    """What a descriptor is open on; other threads may have closed it meanwhile."""
    with suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{fd}")


@pytest.fixture
def measuring(rows):
    return Measuring(rows, seconds=0.01, rounds=3, free=1 << 40, bar=tqdm(total=1, disable=True))


# Who takes part -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("contender", WAYS, ids=lambda each: each.name)
def test_every_contender_gives_each_row_once_an_epoch_as_h5py_reads_it(make_rows, leaves_nothing, contender, stored):
    rows = make_rows(stored)
    with h5py.File(rows.table.paths[0]) as file:
        expected, orders = file["x"][:], []
    with closing(Running(contender, rows)) as running:
        for _ in range(2):
            seen = []
            while not seen or running.n_left:
                x, y = running.next_batch()
                assert np.array_equal(x.numpy(), expected[y.numpy()])
                seen += y.tolist()
            assert sorted(seen) == list(range(ROWS))
            orders.append(seen)
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


def test_a_contender_takes_part_where_it_changes_anything_and_fits(make_rows):
    def names(stored, free=1 << 40, **more):
        found, out = contenders_for(
            replace(make_rows(stored), **more), num_workers=[0, 2], free=free, plain=stored == "gzip"
        )
        return [each.name for each in found], {each.name: each.why for each in out}

    lazy = ["LazyH5DataModule", "LazyH5DataModule, num_workers=2"]
    mapped = ["LazyH5DataModule, mmap=True", "LazyH5DataModule, mmap=True, num_workers=2"]
    plain, cached = ["plain recipe", "plain recipe, num_workers=2"], ["RankCachedH5DataModule"]
    ahead = "{}, prefetch_factor=8".format  # of rows in memory
    assert names("no filter") == ([*lazy, *cached, ahead(*cached)], {})
    assert names("contiguous") == ([*lazy, *mapped, *cached, ahead(*cached)], {})
    assert names("gzip") == ([*plain, *lazy, *cached, ahead(lazy[0]), ahead(*cached)], {})
    large = {"row_bytes": 20 << 20, "decoded_bytes": 1000 << 20}
    all_rows = ["LazyH5DataModule, shuffle_bytes=1000 MiB", "LazyH5DataModule, shuffle_bytes=2000 MiB, num_workers=2"]
    aheads = [ahead(all_rows[0]), ahead(*cached)]
    assert names("gzip", **large) == (plain + lazy + all_rows + cached + aheads, {})
    found, out = names("gzip", free=3000 << 20, **large)
    assert found == plain + lazy + all_rows[:1] + cached + aheads
    assert out == {all_rows[1]: "it holds 2.0 GiB of rows, and half of the free memory is 1.5 GiB"}
    found, out = names("gzip", free=None, **large)
    assert found == plain + lazy
    assert list(out) == all_rows + cached
    assert set(out.values()) == {"the system does not say how much memory is free"}


def test_what_a_small_file_holds_whole_has_no_settings(path):
    found, _ = contenders_for(find_rows(path, "x", "y", 8), num_workers=[0], free=1 << 40, plain=False)
    both = [Contender(way="lazy"), Contender(way="cached")]
    assert found == both + [replace(each, prefetch_factor=8) for each in both]


def decodes(running):
    return running._loader.counters.total()["chunks_decoded"]


def test_who_is_said_to_keep_all_rows_decodes_none_in_the_second_epoch(make_h5, make_rows):
    zeros = np.zeros((1200, 1 << 16), "u1")  # 75 MiB, more than reading ahead has room for
    large = make_h5(x=Stored(zeros, "chunked", (4, 1 << 16), {"compression": "gzip", "compression_opts": 1}))
    little = Contender(way="lazy", shuffle_bytes=1 << 20)
    for contender, rows, keeps in [
        (little, find_rows(large, "x", None, 8), False),
        (little, make_rows(), True),
        (Contender(way="lazy"), make_rows(), True),
        (Contender(way="cached"), make_rows(), True),
        (Contender(way="lazy"), make_rows("contiguous"), False),
    ]:
        assert contender.keeps_rows(rows) == keeps
        with closing(Running(contender, rows)) as running:
            take_for(running, 0, 60, least_rows=rows.n_rows)
            decoded = decodes(running)
            take_for(running, 0, 60, least_rows=rows.n_rows)
            assert (decodes(running) == decoded) == (keeps or not rows.is_decoded)


# The plain recipe -----------------------------------------------------------------------------------------------


def test_the_plain_recipe_reads_fields_of_every_kind_from_several_files(make_h5):
    table = np.zeros(4, [("a", ">f4", (2,)), ("b", "i2")])
    table["a"], table["b"] = np.arange(8).reshape(4, 2), np.arange(4)
    paths = [make_h5(t=table, text=np.array([b"p", b"q", b"r", b"s"]), n=np.arange(4) + 4 * at) for at in range(2)]
    dataset = PlainDataset(paths, [0, 4, 8], {"one": "t/a", "two": "t/b"}, ["text", "n"])
    again = pickle.loads(pickle.dumps(dataset))
    x, y = again[5]
    assert x["one"].tolist() == [2, 3]
    assert (x["two"].item(), x["two"].dtype) == (1, torch.int16)
    assert y[0] == "q"
    assert y[1].item() == 5
    again.close()
    assert len(dataset) == 8


def test_a_batch_of_the_plain_recipe_has_fewer_rows_where_rows_are_slow(path, monkeypatch):
    dataset = PlainDataset([path], [0, ROWS], "x", "y")
    assert rows_at_a_time(dataset, 1e-9, 32) == 1
    assert rows_at_a_time(dataset, 3600, 32) == 32
    monkeypatch.setattr(bench_runs, "rows_at_a_time", lambda *_: 3)
    report = bench_file(path, "x", "y", num_workers=0, **FAST)
    assert report.results[0].note == "in batches of 3: a whole one takes too long"


def test_very_many_rows_are_drawn_without_a_permutation(path, monkeypatch):
    dataset = PlainDataset([path], [0, ROWS], "x", "y")
    assert not plain_loader(dataset, 8, 0).sampler.replacement
    monkeypatch.setattr(plain_recipe, "MOST_DRAWN", ROWS - 1)
    assert plain_loader(dataset, 8, 0).sampler.replacement


def test_a_plain_recipe_that_fails_is_left_out(path, monkeypatch):
    def fails(self, index):
        raise TypeError("no tensor\ncan hold this")

    monkeypatch.setattr(PlainDataset, "__getitem__", fails)
    report = bench_file(path, "x", "y", num_workers=0, **FAST)
    assert [(each.name, each.why) for each in report.left_out] == [
        ("plain recipe", "it failed: TypeError: can hold this")
    ]
    assert report.results[0].times_plain is None


# How long -------------------------------------------------------------------------------------------------------


class Steady:
    """Batches that take a time each, by a clock of their own; epochs of so many batches."""

    def __init__(self, seconds, n_batches):
        self.now, self.seconds, self.n_batches, self.n_taken = 0.0, seconds, n_batches, 0

    def take(self):
        self.now += self.seconds
        self.n_taken += 1
        return 2

    @property
    def n_left(self):
        return 2 * (-self.n_taken % self.n_batches)

    def clock(self):
        return self.now


@given(
    seconds=st.integers(1, 50),
    n_batches=st.integers(1, 30),
    least=st.integers(0, 300),
    more=st.integers(0, 300),
    rows=st.integers(0, 100),
)
def test_a_stretch_lasts_long_enough_and_not_much_longer_and_ends_with_an_epoch_that_is_near(
    seconds, n_batches, least, more, rows
):
    batches, most = Steady(seconds, n_batches), least + more
    stretch = take_for(batches, least, most, least_rows=rows, clock=batches.clock)
    assert stretch == (2 * batches.n_taken, batches.now)
    assert stretch.rate == pytest.approx(2 / seconds)
    assert stretch.seconds < most + seconds or batches.n_taken == 1
    needed = max(-(-least // seconds), -(-rows // 2), 1)
    if seconds * needed <= most:
        assert stretch.seconds >= least
        assert stretch.n_rows >= rows
        epoch_ends = -(-needed // n_batches) * n_batches
        if seconds * epoch_ends < most:
            assert batches.n_taken == epoch_ends


def test_who_is_near_the_fastest_is_measured_again():
    ours = [Contender(way="lazy", num_workers=n) for n in range(8)]
    assert finalists_of({ours[0]: 100, ours[1]: 100 * NEAR - 1, ours[2]: 100 * NEAR}) == [ours[0], ours[2]]
    rates = {each: 100 - each.num_workers for each in ours}
    assert finalists_of(rates) == ours[:MOST_FINALISTS]
    plain = Contender(way="plain")
    assert finalists_of({plain: 1000, ours[0]: 10}) == [plain, ours[0]]
    rates[ours[0]] = 60  # the simplest takes part where it is near at all
    assert finalists_of(rates) == [*ours[1:MOST_FINALISTS], ours[0]]


def test_who_takes_turns_has_a_rate_of_each_round(measuring):
    lazy, cached, slow = Contender(way="lazy"), Contender(way="cached"), Contender(way="plain")
    measuring.rates = {slow: [1e-9], lazy: [1.0], cached: [0.9]}
    measuring.measure_in_turn()
    assert {each.way: len(rates) for each, rates in measuring.rates.items()} == {"plain": 1, "lazy": 3, "cached": 3}
    assert list(measuring.rates) == [slow, lazy, cached]
    assert measuring.finalists == [lazy, cached]


def test_a_figure_of_its_own_decides_nothing(path, monkeypatch):
    """Who was fast once, while the machine was quiet, and took no turns is not advised."""

    class OnceFast(Measuring):
        def measure_in_turn(self):
            super().measure_in_turn()
            self.rates[Contender(way="cached")] = [1e12]

    monkeypatch.setattr(bench, "Measuring", OnceFast)
    monkeypatch.setattr(bench_runs, "finalists_of", lambda rates: [each for each in rates if each.way == "lazy"])
    report = bench_file(path, "x", "y", num_workers=(0, 1), plain=False, **FAST)
    assert (1e12,) in [each.rates for each in report.results]
    assert report.datamodule == "LazyH5DataModule"


def test_those_that_do_not_fit_the_memory_together_are_opened_one_after_the_other(rows, monkeypatch, leaves_nothing):
    n_open = []

    class Watched(Running):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            n_open.append(1)
            assert sum(n_open) == 1

        def close(self):
            super().close()
            n_open.append(-1)

    monkeypatch.setattr(bench_runs, "Running", Watched)
    measuring = Measuring(rows, seconds=0.01, rounds=2, free=100, bar=tqdm(total=1, disable=True))
    measuring.rates = {Contender(way="lazy", num_workers=1): [1.0], Contender(way="cached"): [1.0]}
    measuring.measure_in_turn()
    assert n_open == [1, -1] * 4


def test_a_first_epoch_that_would_take_for_ever_is_not_begun(measuring):
    measuring.rates = {Contender(way="lazy"): [ROWS / 3600]}
    measuring.measure_once(Contender(way="cached"))
    assert [(each.name, each.why) for each in measuring.left_out] == [
        ("RankCachedH5DataModule", "its first epoch takes about 3,600 s; more `seconds` wait for it")
    ]
    assert len(measuring.rates) == 1


def test_a_first_epoch_that_is_broken_off_is_said(measuring, monkeypatch):
    monkeypatch.setattr(bench_runs, "MOST_FIRST", 0)
    monkeypatch.setattr(measuring, "_first_takes", lambda contender: 0)
    contender = Contender(way="lazy")
    measuring.measure_once(contender)
    assert measuring.notes == {contender: "its first epoch was not over: later ones are faster"}
    assert measuring.first == {}


# What is advised ------------------------------------------------------------------------------------------------

some_contenders = st.builds(
    Contender,
    way=st.sampled_from(["plain", "lazy", "cached"]),
    num_workers=st.integers(0, 2),
    mmap=st.booleans(),
    shuffle_bytes=st.sampled_from([512 << 20, 1 << 30]),
)


@given(rates=st.dictionaries(some_contenders, st.floats(0.1, 10), min_size=1), ours=st.floats(0.1, 10))
def test_the_advice_is_the_simplest_that_is_about_as_fast_as_the_fastest(rates, ours):
    rates = {**rates, Contender(way="lazy"): ours}
    chosen = choose(rates)
    able = [each for each, rate in rates.items() if each.way != "plain"]
    fastest = max(rates[each] for each in able)
    assert chosen.way != "plain"
    assert rates[chosen] >= NEARLY * fastest
    assert all(rates[each] < NEARLY * fastest for each in able if each.rank < chosen.rank)


def test_settings_are_simpler_in_this_order():
    large = 1 << 30
    simplest_first = [
        Contender(way="lazy"),
        Contender(way="lazy", prefetch_factor=8),
        Contender(way="lazy", mmap=True),
        Contender(way="lazy", shuffle_bytes=large),
        Contender(way="lazy", shuffle_bytes=large, mmap=True),
        Contender(way="cached"),
        Contender(way="lazy", num_workers=1),
        Contender(way="cached", num_workers=1),
        Contender(way="lazy", num_workers=2),
    ]
    ranks = [each.rank for each in simplest_first]
    assert ranks == sorted(set(ranks))


def test_reasons_say_what_there_is_to_know(rows):
    lazy, mapped, cached, workers, plain = (
        Contender(way="lazy"),
        Contender(way="lazy", mmap=True),
        Contender(way="cached"),
        Contender(way="lazy", num_workers=2),
        Contender(way="plain"),
    )

    def told(chosen, rates, **more):
        return " ".join(reasons_for(chosen, rates, rows, **more))

    assert "LazyH5DataModule is the fastest: 100 rows/s." in told(lazy, {lazy: 100, plain: 10})
    assert "the simplest that has 95 % or more of what the fastest has (RankCachedH5DataModule): 96 %, 96 rows/s" in (
        told(lazy, {lazy: 96, cached: 100})
    )
    assert "that ends the process" in told(mapped, {mapped: 100})
    assert "several ranks hold a shard each" in told(cached, {cached: 100})
    ahead = replace(lazy, prefetch_factor=8)
    assert "slow where other programs use them" in told(ahead, {ahead: 100})
    assert "Transforms were not measured" in told(lazy, {lazy: 100})
    assert "Transforms were not measured" not in told(workers, {workers: 100})
    assert "The plain recipe is as fast here (99 rows/s)" in told(lazy, {lazy: 100, plain: 99})
    assert "The plain recipe is faster here (120 rows/s)" in told(lazy, {lazy: 100, plain: 120})
    assert "plain" not in told(lazy, {lazy: 100, plain: 50})
    assert "differ by 60 %: other programs use the machine" in told(lazy, {lazy: 100}, spread=0.6)


# All of it ------------------------------------------------------------------------------------------------------


def test_a_report_has_every_figure(path, leaves_nothing):
    report = bench_file(path, "x", "y", num_workers=[0, 1, 1], **FAST)
    assert report.files == (path,)
    assert (report.x_key, report.y_key, report.n_rows, report.row_bytes, report.batch_size) == ("x", "y", 50, 56, 8)
    assert [each.name for each in report.results] == [
        "plain recipe",
        "plain recipe, num_workers=1",
        "LazyH5DataModule",
        "LazyH5DataModule, num_workers=1",
        "RankCachedH5DataModule",
        "LazyH5DataModule, prefetch_factor=8",
        "RankCachedH5DataModule, prefetch_factor=8",
    ]
    plain = max(each.rows_per_second for each in report.results[:2])
    for each in report.results:
        assert min(each.rates) <= each.rows_per_second <= max(each.rates)
        assert each.mib_per_second == pytest.approx(each.rows_per_second * 56 / 2**20)
        assert each.times_plain == pytest.approx(each.rows_per_second / plain)
        assert (each.spread is None) == (len(each.rates) == 1)
        assert (each.first_epoch is None) == (each.datamodule != "RankCachedH5DataModule")
    chosen = next(each for each in report.results if each.name == report.chosen)
    assert (report.datamodule, report.is_warm) == (chosen.datamodule, True)
    assert report.settings == {"train_path": path, "x_key": "x", "y_key": "y", "batch_size": 8} | chosen.settings
    assert {"cores", "python", "torch", "h5py", "numpy", "lightning_h5"} <= report.environment.keys()


def test_keys_are_guessed_where_the_file_leaves_no_doubt(path):
    report = bench_file(path, num_workers=0, plain=False, **FAST)
    assert (report.x_key, report.y_key) == ("x", "y")
    assert all(each.datamodule for each in report.results)


def test_several_files_and_keys_are_one_data_set(make_h5, leaves_nothing):
    paths = [make_h5(x=values(), z=values(), y=np.arange(ROWS)) for _ in range(2)]
    report = bench_file(paths, ["x", "z"], {"label": "y"}, num_workers=0, **FAST)
    assert (report.n_rows, report.x_key, report.y_key) == (2 * ROWS, ["x", "z"], {"label": "y"})
    assert report.settings["train_path"] == paths
    assert len(report.results) == 5


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((), {"batch_size": 0}, H5ValueError, "batch_size=0 was given. Pass a whole number of at least 1"),
        ((), {"batch_size": 2.5}, H5ValueError, "batch_size=2.5 was given"),
        (("x", "y"), {"batch_size": 51}, H5ValueError, "there are 50 rows. Pass a batch_size of at most 50"),
        ((), {"seconds": 0}, H5ValueError, "seconds=0 was given. Pass a time of more than 0"),
        ((), {"seconds": float("inf")}, H5ValueError, "seconds=inf"),
        ((), {"rounds": 0}, H5ValueError, "rounds=0"),
        ((), {"num_workers": -1}, H5ValueError, "num_workers=-1"),
        ((), {"num_workers": ()}, H5ValueError, "Pass one number or several"),
        (("X2",), {}, H5KeyError, "Did you mean 'x2'?"),
        (("text",), {}, H5ValueError, "'text' in .* holds text, and a tensor cannot"),
        (("x", "few"), {}, H5ValueError, "'x' has 50 rows and 'few' has 3"),
        ((None, "y"), {}, H5ValueError, "y_key='y' was given without x_key. Pass both."),
        ((), {}, H5KeyError, "leaves a doubt"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_anything_is_measured(
    make_h5, monkeypatch, leaves_nothing, arguments, options, error, text
):
    monkeypatch.setattr(bench, "Measuring", None)
    path = make_h5(x=values(), x2=values(), y=np.arange(ROWS), few=np.arange(3), text=np.array([b"a"] * ROWS))
    with pytest.raises(error, match=text):
        bench_file(path, *arguments, **options)


def test_a_file_that_is_missing_or_empty_or_no_hdf5_is_refused(make_h5, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "Measuring", None)
    with pytest.raises(H5FileError, match="does not exist"):
        bench_file(tmp_path / "none.h5")
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(H5FileError, match="not an HDF5 file"):
        bench_file(tmp_path / "text.h5", "x")
    with pytest.raises(H5ValueError, match=r"there are 0 rows. Pass files that have some"):
        bench_file(make_h5(x=np.zeros((0, 3))), "x")


def test_a_filter_that_is_missing_is_said_before_anything_is_measured(path, monkeypatch):
    monkeypatch.setattr(bench, "Measuring", None)
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
        bench_file(path, "x", "y", num_workers=(2, 0), **FAST)


@pytest.mark.parametrize("at", [1, 4, 9, 14])
def test_whoever_interrupts_it_finds_nothing_left(path, monkeypatch, leaves_nothing, at):
    n_calls = []

    def interrupted(*arguments, **named):
        n_calls.append(1)
        if len(n_calls) == at:
            raise KeyboardInterrupt
        return take_for(*arguments, **named)

    monkeypatch.setattr(bench_runs, "take_for", interrupted)
    monkeypatch.setattr(bench_runs, "NEAR", 0)  # all take turns
    with pytest.raises(KeyboardInterrupt):
        bench_file(path, "x", "y", num_workers=(0, 2), **FAST)


def test_workers_that_are_killed_leave_their_contender_out(path, monkeypatch, leaves_nothing):
    real = Running.next_batch

    def killed(self):
        if getattr(self._loader, "num_workers", 0):
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
        return real(self)

    monkeypatch.setattr(Running, "next_batch", killed)
    report = bench_file(path, "x", "y", num_workers=(0, 2), plain=False, **FAST)
    assert [each.name for each in report.left_out] == ["LazyH5DataModule, num_workers=2"]
    assert "is killed by signal" in report.left_out[0].why
    monkeypatch.setattr(Running, "__init__", lambda self, *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    monkeypatch.setattr(Measuring, "read_once", lambda self: None)
    with pytest.raises(H5Error, match=r"no data module could be measured here: .*no memory"):
        bench_file(path, "x", "y", num_workers=0, plain=False, **FAST)


# The picture ----------------------------------------------------------------------------------------------------


def test_bars_show_the_rates(path, tmp_path):
    report = bench_file(path, "x", "y", num_workers=0, **FAST)
    (axes,) = report.plot().axes
    bars = axes.patches
    assert [bar.get_width() for bar in bars[::-1]] == [each.rows_per_second for each in report.results]
    assert [label.get_text() for label in axes.get_yticklabels()[::-1]] == [each.name for each in report.results]
    chosen = [bar for bar in bars if bar.get_facecolor() != bars[-1].get_facecolor()]
    assert [bar.get_width() for bar in chosen] == [
        each.rows_per_second for each in report.results if each.name == report.chosen
    ]
    for suffix in ("png", "svg", "PDF"):
        save_chart(report, tmp_path / f"out.{suffix}")
        assert (tmp_path / f"out.{suffix}").stat().st_size > 1000
    with pytest.raises(H5FileError, match="is there already and is never written over"):
        save_chart(report, tmp_path / "out.png")
    assert sorted(name for name in os.listdir(tmp_path) if "out" in name) == ["out.PDF", "out.png", "out.svg"]


def test_a_picture_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(H5ValueError, match=r"ends in no format that is known; there are '.pdf', '.png', '.svg'"):
        check_chart(tmp_path / "out.bmp")
    with pytest.raises(H5FileError, match="there is no folder"):
        check_chart(tmp_path / "none" / "out.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(H5Error, match=r"Run `pip install 'lightning-h5\[plot\]'`"):
        check_chart(tmp_path / "out.png")
    with pytest.raises(H5Error, match="needs matplotlib"):
        chart_of_bench(type("Report", (), {"results": ()})())
