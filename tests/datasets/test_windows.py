"""Which steps a sample has, and how often rows are read: equal to counting them one by one."""

import os
import re
import tracemalloc

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.datasets import H5LazyDataset, RankMemCachedH5Dataset
from lightning_h5.errors import H5DataChangedError
from lightning_h5.options import StepRange
from lightning_h5.samples.segments import Segments, Steps
from lightning_h5.samples.windows import WholeSegments, Windows


@st.composite
def ranges(draw):
    start = draw(st.integers(-4, 4))
    if draw(st.booleans()):
        return StepRange(start, start + 1, 1, is_single=True)
    return StepRange(start, start + draw(st.integers(1, 6)), draw(st.integers(1, 3)))


@st.composite
def tables(draw):
    """Segments of two kinds of fields, and windows over them.

    The second field has up to two steps more or fewer, and one of its steps may span several of the first.
    """
    lengths = np.array(draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)))
    more = draw(st.integers(-2, 2))
    gaps = np.array(draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))))
    second = np.maximum(lengths + more, 0)
    starts = np.concatenate([[0], np.cumsum(np.maximum(lengths, second) + gaps)])
    follow = (lengths + gaps == np.diff(starts)).all() and not gaps.any()
    rate = draw(st.sampled_from([1, 1, 2, 3]))
    steps = Steps(starts) if follow else Steps(starts[:-1], lengths), Steps(starts[:-1], second, rate)
    segments = Segments(steps, (0, 1, None))
    windows = Windows(
        segments,
        (draw(ranges()), draw(ranges()), None),
        stride=draw(st.integers(1, 4)),
        pad=draw(st.sampled_from([None, "edge", "zeros"])),
    )
    return windows, (lengths, second)


def windows_by_hand(windows, lengths):
    """Each sample's segment and step."""
    found, rates = [], [steps.rate for steps in windows.segments.steps]
    for segment in range(len(lengths[0])):
        n = [each[segment] for each in lengths]
        fitting = [
            t
            for t in range(min(count * rate for count, rate in zip(n, rates, strict=True)))
            if windows.pad
            or all(
                0 <= t // rates[field] + offset < n[field]
                for field, one in enumerate(windows.ranges[:2])
                for offset in range(one.start, one.stop, one.step)
            )
        ]
        found += [(segment, t) for t in fitting[:: windows.stride]]
    return found


@given(tables())
def test_samples_are_the_windows_that_fit_in_the_order_of_segments_and_steps(table):
    windows, lengths = table
    expected = windows_by_hand(windows, lengths)
    assert len(windows) == len(expected)
    n_left_out = len(lengths[0]) - len({segment for segment, _ in expected})
    assert (windows.left_out() or "0 of").startswith(f"{n_left_out} of")
    if not expected:
        return
    places = windows.places(np.arange(len(windows)))
    assert list(zip(places.segments.tolist(), places.steps.tolist(), strict=True)) == expected
    for field, one in enumerate(windows.ranges[:2]):
        found = windows.rows(places)[field]
        offsets = range(one.start, one.stop, one.step)
        firsts, rate = windows.segments.steps[field].firsts_of(), windows.segments.steps[field].rate
        rows, valid = [], []
        for segment, t in expected:
            n = lengths[field][segment]
            rows += [firsts[segment] + min(max(t // rate + offset, 0), n - 1) for offset in offsets]
            valid += [0 <= t // rate + offset < n for offset in offsets]
        assert found.rows.tolist() == rows
        assert (found.is_valid is None) == (windows.pad is None)
        assert all(valid) if found.is_valid is None else found.is_valid.reshape(-1).tolist() == valid
    assert windows.rows(places)[2].rows.tolist() == places.segments.tolist()


@given(tables())
def test_reads_and_samples_before_a_row_are_counted_without_looking_at_samples(table):
    windows, lengths = table
    for samples in (windows, WholeSegments(windows.segments), WholeSegments(windows.segments, 3)):
        places = samples.places(np.arange(len(samples)))
        firsts = windows.segments.steps[0].firsts_of()
        bounds = np.arange(int((firsts + np.maximum(*lengths)).max()) + 3)
        around = firsts[places.segments] + places.steps
        assert samples.n_before(bounds).tolist() == [np.count_nonzero(around < bound) for bound in bounds]
        for field in (0, 1):
            read = samples.rows(places)[field].rows
            assert samples.n_reads_before(bounds, field).tolist() == [
                np.count_nonzero(read < bound) for bound in bounds
            ]


def test_counting_the_reads_of_long_windows_takes_no_longer_than_that_of_short_ones():
    length, n = 2_000_000, 10_000_000  # one step of a window at a time takes minutes
    windows = Windows(Segments((Steps(np.array([0, n])),), (0,)), (StepRange(0, length),), stride=length // 2)
    bounds = np.arange(0, n + 1, 2_500)
    firsts = np.arange(len(windows))[:, None] * (length // 2)
    assert windows.n_reads_before(bounds, 0).tolist() == np.clip(bounds - firsts, 0, length).sum(axis=0).tolist()


@given(tables(), st.data())
def test_some_segments_have_the_samples_that_they_have_among_all(table, data):
    windows, lengths = table
    chosen = np.array(data.draw(st.lists(st.integers(0, len(lengths[0]) - 1), unique=True)), np.int64)
    some = windows.among(chosen)
    everything = windows.places(np.arange(len(windows)))
    expected = [
        (segment, step)
        for segment in chosen.tolist()
        for step in everything.steps[everything.segments == segment].tolist()
    ]
    places = some.places(np.arange(len(some)))
    numbers = some.segments.numbers_of(places.segments)
    assert list(zip(numbers.tolist(), places.steps.tolist(), strict=True)) == expected


@given(tables(), st.integers(0, 2**40), st.integers(0, 5))
def test_random_windows_are_as_many_fit_and_depend_on_seed_epoch_and_segment(table, seed, epoch):
    windows, _ = table
    drawn = Windows(windows.segments, windows.ranges, windows.stride, windows.pad, is_random=True, seed=seed)
    assert len(drawn) == len(windows)
    if not len(drawn):
        return
    samples = np.arange(len(drawn))
    places = drawn.places(samples, epoch)
    fine = Windows(windows.segments, windows.ranges, 1, windows.pad)
    fitting = fine.places(np.arange(len(fine)))
    all_places = set(zip(fitting.segments.tolist(), fitting.steps.tolist(), strict=True))
    assert set(zip(places.segments.tolist(), places.steps.tolist(), strict=True)) <= all_places
    order = np.random.default_rng(0).permutation(samples)
    again = drawn.places(order, epoch)
    assert again.steps.tolist() == places.steps[order].tolist()
    last = np.array([len(drawn.segments) - 1])
    alone = drawn.among(last)
    if len(alone):
        assert alone.places(np.arange(len(alone)), epoch).steps.tolist() == places.steps[-len(alone) :].tolist()


def test_random_windows_cover_a_segment_evenly_and_differ_between_epochs():
    segments = Segments((Steps(np.array([0, 1000])),), (0,))
    windows = Windows(segments, (StepRange(0, 100),), stride=300, is_random=True, seed=7)
    assert len(windows) == 4
    starts = np.stack([windows.places(np.arange(4), epoch).steps for epoch in range(3000)])
    assert starts.min() == 0
    assert starts.max() == 900
    counts = np.histogram(starts, bins=9, range=(0, 901))[0]
    assert counts.min() > 0.9 * counts.mean()
    assert len({tuple(row) for row in starts.tolist()}) > 2990


@given(tables(), st.none() | st.integers(1, 5))
def test_whole_segments_have_all_their_steps_or_the_first_ones(table, max_length):
    windows, lengths = table
    whole = WholeSegments(windows.segments, max_length)
    places = whole.places(np.arange(len(whole))[::-1])
    for field in (0, 1):
        found = whole.rows(places)[field]
        firsts = windows.segments.steps[field].firsts_of()
        most = max_length and -(-max_length // windows.segments.steps[field].rate)
        expected = [range(first, first + n)[:most] for first, n in zip(firsts, lengths[field], strict=True)][::-1]
        assert found.lengths.tolist() == [len(each) for each in expected]
        assert found.rows.tolist() == [row for each in expected for row in each]


@pytest.mark.parametrize(("low", "high"), [(0, 5), (5, 9), (3, 100)])
def test_a_part_of_a_segment_counts_its_steps_from_where_it_begins(low, high):
    starts = np.array([0, 10])
    segments = Segments((Steps(starts, np.array([9, 3])), Steps(starts, np.array([10, 4]))), (0, 1))
    n = segments.lengths
    parts = segments.parts(np.minimum(low, n), np.minimum(high, n))
    assert parts.cut.tolist() == np.minimum(low, n).tolist()
    for kind, lengths in enumerate(([9, 3], [10, 4])):
        ends = [length if high >= each else min(high, length) for length, each in zip(lengths, [9, 3], strict=True)]
        expected = [end - min(low, each) for end, each in zip(ends, [9, 3], strict=True)]
        assert parts.steps[kind].lengths_of().tolist() == expected
        assert parts.steps[kind].firsts_of().tolist() == [min(low, 9), 10 + min(low, 3)]


def test_ten_million_windows_take_two_numbers_for_each_segment(make_h5):
    n_segments, n_steps = 1000, 10_003
    path = make_h5(x=np.broadcast_to(np.uint8(0), n_segments * n_steps), first=np.arange(n_segments) * n_steps)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        dataset = H5LazyDataset(path, {"x": "x"}, segments={"offsets": "first"}, window={"length": 4, "stride": 1})
        assert len(dataset) == 10_000_000
        dataset.table.indexer.rows_of(np.array([0, 5_000_000, 9_999_999]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    sampling = dataset.table.indexer
    assert sum(each.nbytes for each in (sampling.segments.steps[0].starts, sampling.ends)) <= 16 * (n_segments + 1)
    assert peak - before < 1 << 20  # a window of them all would take a byte for each


def test_any_file_of_a_window_that_reaches_over_several_is_looked_at(tmp_path):
    for number, n in enumerate((5, 1, 2, 5)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"], file["time"] = np.zeros(n), sum((5, 1, 2, 5)[:number]) + np.arange(n)
    dataset = H5LazyDataset(str(tmp_path), "x", segments={"join": "time"}, window={"length": 5, "stride": 1})
    assert len(dataset) == 9
    dataset.read_batch([4, 0])  # files 0, 1, 2 and 3, and file 0 alone
    os.utime(tmp_path / "1.h5")
    dataset.read_batch([0, 8])
    with pytest.raises(H5DataChangedError, match=re.escape(str(tmp_path / "1.h5"))):
        dataset.read_batch([0, 4])


@pytest.mark.parametrize("kind", [H5LazyDataset, RankMemCachedH5Dataset])
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i2", "f2", "c8", "?"])
@pytest.mark.parametrize("ragged", [False, True])
def test_windows_of_any_dtype_are_padded_with_zeros(make_h5, kind, dtype, ragged):
    arrays = {f"run{at}/x": np.ones((3, 2 + at * ragged), dtype) for at in range(2)}
    dataset = kind(make_h5(arrays), "x", x_dtype=None, segments="run*", window={"length": 4, "pad": "zeros"})
    for at, sample in enumerate((dataset[0], dataset[1])):
        assert sample.numpy().tolist() == [*np.ones((3, 2 + at * ragged), dtype).tolist(), [0] * (2 + at * ragged)]
