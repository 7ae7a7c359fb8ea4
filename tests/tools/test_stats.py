"""Statistics equal exact ones, whatever the file looks like and however many threads read it."""

import itertools
import json
import math
import os
from fractions import Fraction

import h5py
import numpy as np
import pytest
from factories import Stored, edit, random_values
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import H5LazyDataset, LazyH5DataModule
from lightning_h5.datasets import read_stats
from lightning_h5.errors import H5CorruptError, H5DataChangedError, H5FileError, H5KeyError, H5ValueError
from lightning_h5.hdf5 import process_pool
from lightning_h5.readers import bulk
from lightning_h5.tools import stats
from lightning_h5.tools.stats import compute_stats, empty_stats, merge_stats, stats_of

DTYPES = ["f2", "f4", "f8", ">f8", ">f4", "u1", "i1", ">u2", "i2", "i4", "u4", "i8", "u8", ">i8", "?"]
NUMBERS = ("n_values", "n_nan", "n_infinite", "mean", "std", "min", "max")


def exact(values):
    """Mean and standard deviation of finite numbers, with no rounding but the last."""
    numbers = [Fraction(each) for each in values.tolist()]
    mean = sum(numbers) / len(numbers)
    variance = sum((each - mean) ** 2 for each in numbers) / len(numbers)
    # The root of a fraction that no float64 has room for: of its leading digits.
    scale = 2 ** (2 * max(0, 200 - variance.numerator.bit_length() + variance.denominator.bit_length()))
    root = math.isqrt(int(variance * scale))
    return float(mean), float(Fraction(root, math.isqrt(scale)))


def channels(values, axis):
    """The values of each channel; of all of them where there is no axis."""
    if axis is None:
        return [values.reshape(-1)]
    lines = np.moveaxis(values, axis + 1, 0)
    return list(lines.reshape(len(lines), math.prod(lines.shape[1:])))


def check(found, values, axis):
    """All numbers of a report against the values themselves."""
    numbers = [np.atleast_1d(getattr(found, name)) for name in NUMBERS]
    expected_shape = () if axis is None else (values.shape[axis + 1],)
    assert all(getattr(found, name).shape == expected_shape for name in NUMBERS)
    for line, n, n_nan, n_infinite, mean, std, least, largest in zip(channels(values, axis), *numbers, strict=True):
        as_float = line.astype("f8")
        finite = line[np.isfinite(as_float)]
        assert (n, n_nan, n_infinite) == (len(finite), np.isnan(as_float).sum(), np.isinf(as_float).sum())
        if not n:
            assert np.isnan([mean, std, least, largest]).all()
            continue
        assert (least.item(), largest.item()) == (finite.min().item(), finite.max().item())
        exact_mean, exact_std = exact(finite)
        size = float(np.abs(finite.astype("f8")).max())
        assert mean == pytest.approx(exact_mean, rel=1e-12, abs=1e-15 * size)
        assert std == pytest.approx(exact_std, rel=1e-11)
        assert (std == 0) == (least == largest)


@st.composite
def numbers(draw, shape):
    """Values of a dtype: over all of its range, or small deviations from some mean, with gaps."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    seed = draw(st.integers(0, 9))
    rng = np.random.default_rng(seed)
    if dtype.kind != "f":
        return random_values(dtype, shape, seed) if draw(st.booleans()) else np.full(shape, seed, dtype)
    values = rng.normal(size=shape) * draw(st.sampled_from([0, 1e-3, 1, 100])) + draw(st.sampled_from([0, 0.1, -1e3]))
    if dtype.itemsize == 8:
        values = values * draw(st.sampled_from([1, 1e-30, 1e100])) + draw(st.sampled_from([0, 1e8]))
    gaps = rng.random(shape) < draw(st.sampled_from([0, 0, 0.1, 0.9, 1]))
    values[gaps] = rng.choice([np.nan, np.inf, -np.inf], size=int(gaps.sum()))
    return values.astype(dtype)


@pytest.mark.wide
@given(data=st.data())
@settings(max_examples=examples(150))
def test_any_array_has_its_exact_statistics(make_h5, monkeypatch, data):
    shape = (data.draw(st.integers(0, 40)), *data.draw(st.lists(st.integers(1, 5), max_size=2)))
    values = data.draw(numbers(shape))
    axis = data.draw(st.sampled_from([None, *range(len(shape) - 1)]))
    chunks = tuple(data.draw(st.integers(1, max(1, size))) for size in shape)
    options = data.draw(st.sampled_from([{}, {"compression": "gzip"}, {"shuffle": True, "compression": "lzf"}]))
    stored = [Stored(values), Stored(values, "chunked", chunks, options)]
    kept = data.draw(st.sampled_from(stored))
    monkeypatch.setattr(bulk, "TASK_BYTES", data.draw(st.sampled_from([1, 100, 1 << 20])))
    monkeypatch.setattr(bulk, "MAX_SCRATCH", data.draw(st.sampled_from([0, 64 << 20])))
    monkeypatch.setattr(stats, "BLOCK_VALUES", data.draw(st.sampled_from([1, 7, 1 << 17])))
    monkeypatch.setattr(stats, "MIN_BLOCK", data.draw(st.sampled_from([1, 3, 16])))
    monkeypatch.setattr(stats, "MAX_BYTES", data.draw(st.sampled_from([1, 100, 1 << 30])))
    monkeypatch.setattr(stats, "RUN_BYTES", data.draw(st.sampled_from([1, 1 << 20])))
    cut = data.draw(st.integers(0, len(values)))
    if data.draw(st.booleans()):
        paths = [make_h5(x=kept)]
    else:
        paths = [make_h5(x=Stored(values[:cut])), make_h5(x=Stored(values[cut:]))]
    wanted = data.draw(st.none() | st.sets(st.integers(0, max(0, len(values) - 1)), max_size=len(values)))
    rows = None if wanted is None else list(wanted)
    report = compute_stats(paths, "x", channel_axis=axis, rows=rows)
    found = report.arrays[0]
    check(found, values if rows is None else values[sorted(rows)], axis)
    assert (found.n_rows, report.n_rows_of_files) == (len(values) if rows is None else len(rows), len(values))
    assert found.row_shape == shape[1:]
    process_pool().close()


def test_small_deviations_from_a_large_mean_are_right_to_ten_digits(make_h5):
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(3000, 4)) * 1e-3
    shifted = 1e8 + signal
    found = compute_stats(make_h5(x=Stored(shifted, "chunked", (100, 4))), channel_axis=0).arrays[0]
    exactly = shifted - 1e8  # without rounding, as the two are so near
    assert np.allclose(found.std, exactly.std(axis=0), rtol=1e-10, atol=0)
    assert np.allclose(found.mean, 1e8 + exactly.mean(axis=0), rtol=1e-16, atol=0)


def test_numpy_in_float64_gives_the_same_to_ten_digits(make_h5):
    rng = np.random.default_rng(0)
    for dtype in ("f2", "f4", "f8", "u1", "i4"):
        values = (rng.normal(size=(2000, 3, 20)) * [[1], [5], [20]] + 30).astype(dtype)
        found = compute_stats(make_h5(x=values), channel_axis=0).arrays[0]
        as_double = values.astype("f8")
        assert np.allclose(found.mean, as_double.mean(axis=(0, 2)), rtol=1e-10, atol=0)
        assert np.allclose(found.std, as_double.std(axis=(0, 2)), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "values",
    [
        np.array([2**64 - 1, 2**64 - 3, 2**64 - 1], dtype="u8"),
        np.array([-(2**63), 2**63 - 1, 0], dtype="i8"),
        np.array([2**63 - 1, 2**63 - 2, 2**63 - 5], dtype="i8"),
        1_700_000_000_000_000_000 + np.arange(1000, dtype="i8") % 7,
        np.array([1e308, -1e308, 1e308]) / 1e155,
        np.array([5e-324, 0, 5e-324]),
    ],
    ids=["u8", "i8", "i8 above", "nanoseconds", "large", "least"],
)
def test_the_ends_of_a_dtype_are_exact(make_h5, values):
    found = compute_stats(make_h5(x=values)).arrays[0]
    assert (found.min.item(), found.max.item()) == (values.min().item(), values.max().item())
    mean, std = exact(values)
    assert found.mean == pytest.approx(mean, rel=1e-15, abs=1e-16 * float(abs(values.astype("f8")).max()))
    if values.dtype.kind != "f" or values.max() > 1:
        assert found.std == pytest.approx(std, rel=1e-12)


def test_sums_that_no_float64_holds_leave_the_mean_and_refuse_to_normalise(make_h5, tmp_path):
    report = compute_stats(make_h5(x=np.full((3, 2), 1.5e308) - [0, 1e308]))
    assert report.arrays[0].mean == pytest.approx(1e308)
    with pytest.raises(H5ValueError, match="too large"):
        report.save(tmp_path / "s.json")


def test_a_constant_channel_has_no_deviation_at_all(make_h5):
    values = np.tile(np.array([0.1, 1e8 + 0.1, -3]), (70_001, 1))
    found = compute_stats(make_h5(x=Stored(values, "chunked", (999, 3))), channel_axis=-1).arrays[0]
    assert found.std.tolist() == [0, 0, 0]
    assert found.mean.tolist() == [0.1, 1e8 + 0.1, -3]
    assert found.channel_axis == 0


@pytest.mark.parametrize("kind", ["contiguous", "gzip", "split rows", "virtual", "compact"])
def test_the_number_of_threads_changes_no_bit(make_h5, monkeypatch, kind):
    values = np.random.default_rng(0).normal(size=(300, 4, 5)) + 1e3
    stored = {
        "contiguous": Stored(values),
        "gzip": Stored(values, "chunked", (7, 4, 5), {"compression": "gzip"}),
        "split rows": Stored(values, "chunked", (7, 3, 2), {"compression": "gzip"}),
        "virtual": Stored(values, "virtual"),
        "compact": Stored(values[:20], "compact"),
    }[kind]
    path = make_h5(x=stored)
    monkeypatch.setattr(bulk, "TASK_BYTES", 1)
    monkeypatch.setattr(stats, "RUN_BYTES", 500)
    seen = set()
    for n_threads in (1, 2, 3, 8, 8, 8):
        monkeypatch.setattr(stats, "usable_cores", lambda n=n_threads: n)
        found = compute_stats(path, "x", channel_axis=0).arrays[0]
        numbers = [getattr(found, name) for name in NUMBERS]
        seen.add(b"".join(each.tobytes() for each in numbers))
    assert len(seen) == 1


@given(
    pieces=st.lists(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=8), min_size=1, max_size=8),
    offset=st.sampled_from([0, 1e9]),
)
@example(pieces=[[], [1.0], []], offset=0)
def test_pieces_put_together_are_the_whole(pieces, offset):
    arrays = [np.array(piece, dtype="f8").reshape(-1, 1, 1) + offset for piece in pieces]
    total = empty_stats(1, np.dtype("f8"))
    for array in arrays:
        total = merge_stats(total, stats_of(array))
    values = np.concatenate(arrays).reshape(-1)
    finite = values[np.isfinite(values)]
    assert (total.n[0], total.n_nan[0]) == (len(finite), len(values) - len(finite))
    if len(finite):
        mean, std = exact(finite)
        assert total.mean[0] == pytest.approx(mean, rel=1e-14, abs=1e-15 * np.abs(finite).max())
        # Squares below 1e-300 have no digits left.
        assert total.std[0] == pytest.approx(std, rel=1e-11, abs=1e-140)


def test_a_member_of_a_table_and_rows_never_written_count_as_they_are_read(make_h5):
    table = np.zeros(50, dtype=[("a", "f4"), ("b", ">i2", (3,))])
    table["b"] = np.arange(150).reshape(50, 3)
    values = np.ones((40, 2), "f4")
    fill = Stored(values, "chunked", (10, 2), {"fillvalue": 7, "compression": "gzip"}, written=10)
    path = make_h5(t=Stored(table, "chunked", (7,), {"compression": "gzip"}), x=fill)
    member, x = compute_stats(path, ["t/b", "x"], channel_axis={"t/b": 0}).arrays
    check(member, table["b"].astype("i2"), 0)
    assert (float(x.mean), x.channel_axis) == (5.5, None)


def test_empty_arrays_have_no_statistics(make_h5, tmp_path):
    for shape, dtype in (((0, 3), "f4"), ((0,), "i8"), ((5, 0), "u1")):
        report = compute_stats(make_h5(x=np.zeros(shape, dtype)))
        found = report.arrays[0]
        assert found.n_values == 0
        assert np.isnan([found.mean, found.std, found.min, found.max]).all()
        with pytest.raises(H5ValueError, match=r"'x' cannot be normalized .* no finite value"):
            report.fields()
        with pytest.raises(H5ValueError, match="no finite value"):
            report.save(tmp_path / "stats.json")
    assert not list(tmp_path.glob("*.json*"))


def test_a_channel_of_nan_is_named_when_it_is_to_normalise(make_h5):
    values = np.ones((5, 3), "f4")
    values[:, 1] = np.nan
    report = compute_stats(make_h5(x=values), channel_axis=0)
    assert report.arrays[0].n_nan.tolist() == [0, 5, 0]
    with pytest.raises(H5ValueError, match=r"channel 1 of it has no finite value \(5 NaN"):
        report.fields()


# Which rows -------------------------------------------------------------------------------------------------


def test_rows_are_numbers_a_range_or_a_mask_over_all_files(make_h5):
    values = np.random.default_rng(0).normal(size=(30, 2))
    paths = [make_h5(x=values[:13]), make_h5(x=values[13:])]
    mask = np.zeros(30, dtype=bool)
    mask[5:25:3] = True
    for rows in (range(5, 25, 3), list(range(5, 25, 3))[::-1], np.arange(5, 25, 3, dtype="u2"), mask, mask.tolist()):
        found = compute_stats(paths, "x", rows=rows).arrays[0]
        assert found.n_rows == 7
        check(found, values[5:25:3], None)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([0, 30], "row 30 is out of range for 'x', which has 30 rows"),
        ([-1, 3], "row -1 is out of range"),
        (range(40), "row 39 is out of range"),
        ([3, 3], "some of them twice"),
        ([0.5], "Pass row numbers"),
        (np.ones(29, dtype=bool), r"Pass row numbers, or a mask of the shape \(30,\)"),
        ([[1, 2]], r"shape \(1, 2\)"),
    ],
    ids=str,
)
def test_rows_that_are_none_are_refused(make_h5, rows, text):
    with pytest.raises(H5ValueError, match=text):
        compute_stats(make_h5(x=np.arange(30.0)), rows=rows)


# Which arrays -----------------------------------------------------------------------------------------------


def test_without_a_key_the_input_is_taken_where_there_is_no_doubt(make_h5):
    assert compute_stats(make_h5(a=np.arange(4.0), names=np.array(["p", "q"], "S1"))).arrays[0].key == "a"
    assert compute_stats(make_h5(x=np.ones((4, 2)), y=np.arange(4))).arrays[0].key == "x"
    with pytest.raises(
        H5KeyError,
        match=r"no array was named, and .* has 'a', 'b', 'c'. 'a', 'b', 'c' are as likely. Name the input: keys=",
    ):
        compute_stats(make_h5(a=np.ones(4), b=np.ones(4), c=np.ones(4)))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("text", r"'text' in '.*' holds text \(dtype"),
        ("complex", "holds complex numbers"),
        ("table", r"'table' in '.*' is a table"),
        ("group", "is a group"),
        ("scalar", "is a scalar"),
    ],
)
def test_arrays_of_no_real_numbers_are_refused(make_h5, key, text):
    path = make_h5(
        text=np.array([b"a", b"b"]),
        complex=np.ones(2, "c8"),
        table=np.zeros(2, dtype=[("a", "f4")]),
        scalar=np.float32(1),
        **{"group/x": np.ones(2)},
    )
    with pytest.raises(H5ValueError, match=text):
        compute_stats(path, key)


def test_a_misspelled_key_is_guessed(make_h5):
    with pytest.raises(H5KeyError, match="Did you mean 'signal'"):
        compute_stats(make_h5(signal=np.ones(3)), "signals")


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_rows_do_not_have_is_refused(make_h5, axis):
    with pytest.raises(
        H5ValueError, match=rf"channel_axis={axis} was given for 'x', whose rows have the shape \(3, 4\)"
    ):
        compute_stats(make_h5(x=np.ones((2, 3, 4))), channel_axis=axis)


def test_each_array_may_have_its_own_axis_and_one_value_a_row_has_none(make_h5):
    path = make_h5(x=np.ones((4, 3, 5)), z=np.ones((4, 2)), y=np.arange(4.0))
    axes = [array.channel_axis for array in compute_stats(path, ["x", "z", "y"], channel_axis={"x": -1}).arrays]
    assert axes == [1, None, None]
    assert [array.channel_axis for array in compute_stats(path, ["x", "y"], channel_axis=0).arrays] == [0, None]
    with pytest.raises(H5ValueError, match="channel_axis names 'q'"):
        compute_stats(path, ["x"], channel_axis={"q": 0})
    with pytest.raises(H5ValueError, match="twice"):
        compute_stats(path, ["x", "x"])


def test_arrays_of_different_length_are_no_matter(make_h5):
    found = compute_stats(make_h5(x=np.ones((4, 3)), y=np.arange(9.0)), ["x", "y"]).arrays
    assert [array.n_rows for array in found] == [4, 9]


def test_files_that_differ_are_refused(make_h5):
    with pytest.raises(H5ValueError, match="has the dtype float32 in"):
        compute_stats([make_h5(x=np.ones(3, "f4")), make_h5(x=np.ones(3, "f8"))])


def test_a_chunk_that_does_not_decode_is_an_error(make_h5):
    path = make_h5(x=Stored(np.arange(400.0), "chunked", (50,), {"compression": "gzip"}))
    with h5py.File(path) as file:
        place = file["x"].id.get_chunk_info(3)
    edit(path, place.byte_offset + 5)
    with pytest.raises(H5CorruptError, match=r"chunk 3 \(rows 150 to 199\)"):
        compute_stats(path)


def test_a_file_that_is_written_to_meanwhile_is_an_error(make_h5, monkeypatch):
    path = make_h5(x=np.arange(400.0))
    real = stats.stats_of

    def work(values):
        os.utime(path, ns=(1, 1))
        return real(values)

    monkeypatch.setattr(stats, "stats_of", work)
    with pytest.raises(H5DataChangedError, match="was written to"):
        compute_stats(path)


# The file that normalize reads ------------------------------------------------------------------------------


@pytest.fixture
def signals(make_h5):
    rng = np.random.default_rng(0)
    signal = (rng.normal(size=(400, 3, 50)) * [[1], [5], [20]] + [[0], [100], [-7]]).astype("f4")
    return make_h5(signal=Stored(signal, "chunked", (16, 3, 50), {"compression": "gzip"}), y=np.arange(400))


def test_normalised_with_its_own_statistics_a_field_has_mean_0_and_deviation_1(signals, tmp_path):
    path = tmp_path / "stats.json"
    report = compute_stats(signals, "signal", channel_axis=0)
    report.save(path)
    for normalize in (path, report.fields()):
        dataset = H5LazyDataset(signals, "signal", normalize=normalize, x_dtype="float64")
        rows = dataset.read_batch(np.arange(400)).numpy()
        assert np.allclose(rows.mean(axis=(0, 2)), 0, atol=1e-6)
        assert np.allclose(rows.std(axis=(0, 2)), 1, atol=1e-6)
        dataset.close()


def test_statistics_of_the_training_rows_normalise_what_the_data_module_trains_on(signals, tmp_path):
    rows = np.arange(0, 400, 2)
    splits = {"train": [[row, row + 1] for row in rows.tolist()], "val": [[row + 1, row + 2] for row in rows.tolist()]}
    (tmp_path / "splits.json").write_text(json.dumps({"format": "lightning_h5 splits", "splits": splits}))
    compute_stats(signals, "signal", channel_axis=0, rows=rows).save(tmp_path / "stats.json")
    datamodule = LazyH5DataModule(
        signals,
        x_key="signal",
        split={"file": str(tmp_path / "splits.json")},
        normalize=str(tmp_path / "stats.json"),
        batch_size=50,
    )
    datamodule.setup("fit")
    seen = np.concatenate([batch.numpy() for batch in datamodule.train_dataloader()]).astype("f8")
    assert len(seen) == 200
    assert np.allclose(seen.mean(axis=(0, 2)), 0, atol=1e-5)
    assert np.allclose(seen.std(axis=(0, 2)), 1, atol=1e-5)
    datamodule.teardown("fit")


def test_the_file_says_what_was_found(signals, tmp_path):
    path = tmp_path / "stats.json"
    report = compute_stats(signals, ["signal", "y"], channel_axis=0)
    report.save(path)
    fields = json.loads(path.read_text())["fields"]
    assert fields["y"]["min"] == 0
    assert fields["y"]["max"] == 399
    for array in report.arrays:
        field, read = fields[array.key], read_stats(path)[array.key]
        assert read.mean.tolist() == array.mean.tolist()
        assert read.std.tolist() == array.std.tolist()
        assert (read.channel_axis, read.row_shape) == (array.channel_axis, array.row_shape)
        assert field["files"] == [signals]
        assert field["n_rows"] == 400
        assert field["n_values"] == array.n_values.tolist()


def test_a_file_that_is_there_is_replaced_only_when_asked(signals, tmp_path):
    path = tmp_path / "stats.json"
    path.write_text("mine")
    report = compute_stats(signals, "signal")
    with pytest.raises(H5FileError, match="it exists"):
        report.save(path)
    assert path.read_text() == "mine"
    report.save(path, overwrite=True)
    assert "signal" in read_stats(path)
    with pytest.raises(H5FileError, match="overwrite its own input"):
        report.save(signals, overwrite=True)
    with pytest.raises(H5FileError, match="there is no directory"):
        report.save(tmp_path / "none" / "stats.json")
    with pytest.raises(H5FileError, match="a directory"):
        report.save(tmp_path, overwrite=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")], ids=["Ctrl-C", "full"])
def test_what_goes_wrong_while_writing_leaves_nothing(signals, tmp_path, monkeypatch, error):
    report = compute_stats(signals, "signal")
    before = set(os.listdir(tmp_path))

    def fail(*args):
        raise error

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else H5FileError):
        report.save(tmp_path / "stats.json")
    assert set(os.listdir(tmp_path)) == before


def test_the_oracle_of_these_tests_is_right():
    for values in itertools.product([1.0, 2.0, 0.5], repeat=3):
        assert exact(np.array(values)) == pytest.approx((np.mean(values), np.std(values)), rel=1e-15)
