"""Samples of several steps: what plain NumPy takes of the arrays, however segments are stored."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from segment_cases import expected_windows, layouts

from lightning_h5.datasets import H5LazyDataset, RankMemCachedH5Dataset
from lightning_h5.errors import H5ValueError


@st.composite
def steps(draw):
    """A number, or the steps from a start on."""
    start = draw(st.integers(-3, 3))
    if draw(st.booleans()):
        return start, start
    given = [start, start + draw(st.integers(1, 5)), draw(st.integers(1, 2))]
    return given, list(range(*given))


def assert_equal(found, expected):
    found = found.numpy() if isinstance(found, torch.Tensor) else found
    np.testing.assert_array_equal(found, expected)


def assert_samples(dataset, expected, order):
    """Single samples, samples that are read together, and batches are what is expected."""
    assert len(dataset) == len(expected)
    samples = dataset.__getitems__(order)
    batch = dataset.read_batch(order)
    for place, number in enumerate(order):
        alone = dataset[number] if place < 3 else samples[place]
        for name, value in expected[number].items():
            assert_equal(alone[name], value)
            assert_equal(samples[place][name], value)
            assert_equal(batch[name][place], value)
        assert alone["index"] == samples[place]["index"] == batch["index"][place] == number


@given(st.data())
def test_windows_are_what_numpy_takes(tmp_path, data):
    case = data.draw(layouts(tmp_path))
    fields = [field for field, axis in case.step_axes.items() if axis is not None]
    drawn = {field: data.draw(steps()) for field in fields}
    stride, pad = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([None, "edge", "zeros"]))
    expected = expected_windows(case, {field: one for field, (_, one) in drawn.items()}, stride=stride, pad=pad)
    window = {"steps": {field: one for field, (one, _) in drawn.items()}, "stride": stride, "pad": pad, "mask": True}
    make = {"segments": case.segments, "window": window, "with_index": True}
    if not expected:
        with pytest.raises(H5ValueError, match="no segment is as long as a window"):
            H5LazyDataset(case.files, case.keys, **make)
        return
    with H5LazyDataset(case.files, case.keys, **make) as dataset:
        order = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=12))
        assert_samples(dataset, expected, order)
        kept = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=5))
    with H5LazyDataset(case.files, case.keys, **make, indices=kept) as dataset:
        assert_samples(dataset, [expected[number] for number in kept], list(range(len(kept))))
    shards = [
        RankMemCachedH5Dataset(case.files, case.keys, x_dtype=None, **make, rank=rank, world_size=2, preload=False)
        for rank in range(min(2, len(expected)))
    ]
    for shard in shards:
        numbers = shard.rows.tolist()
        order = data.draw(st.permutations(range(len(shard))))
        batch = shard.read_batch(order)
        for place, number in enumerate(order):
            for name, value in expected[numbers[number]].items():
                assert_equal(batch[name][place], value)
            assert batch["index"][place] == numbers[number]
        shard.close()


@given(st.data())
def test_rows_of_segments_are_their_steps(tmp_path, data):
    case = data.draw(layouts(tmp_path))
    axes = {field: axis for field, axis in case.step_axes.items() if axis is not None}
    lengths = [{arrays[field].shape[axis] for field, axis in axes.items()} for arrays in case.arrays]
    if any(len(of_fields) > 1 for of_fields in lengths):
        with pytest.raises(H5ValueError, match="fields need equally many"):
            H5LazyDataset(case.files, case.keys, sample="row", segments=case.segments)
        return
    expected = expected_windows(case, {field: 0 for field, axis in case.step_axes.items() if axis is not None})
    expected = [{name: value for name, value in one.items() if "_valid" not in name} for one in expected]
    with H5LazyDataset(case.files, case.keys, sample="row", segments=case.segments, with_index=True) as dataset:
        if not expected:  # a field has no steps
            assert not len(dataset)
            return
        order = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=12))
        assert_samples(dataset, expected, order)


@given(st.data())
def test_whole_segments_are_all_their_steps(tmp_path, data):
    case = data.draw(layouts(tmp_path))
    max_length = data.draw(st.none() | st.integers(1, 5))
    how = data.draw(st.sampled_from(["pad", "list"]))
    segments = {**case.segments, "max_length": max_length}
    fields = [field for field, axis in case.step_axes.items() if axis is not None]
    expected = []
    for arrays, name in zip(case.arrays, case.names, strict=True):
        if all(arrays[field].shape[case.step_axes[field]] for field in fields):
            cut = {
                field: values
                if (axis := case.step_axes[field]) is None
                else np.take(values, range(values.shape[axis])[:max_length], axis=axis)
                for field, values in arrays.items()
            }
            expected.append({**cut, "segment": name, "step": 0})
    if not expected:
        return
    dataset = H5LazyDataset(case.files, case.keys, sample="segment", segments=segments, collate_fn=how, with_index=True)
    order = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=6))
    assert len(dataset) == len(expected)
    batch = dataset.read_batch(order)
    for place, number in enumerate(order):
        sample = dataset[number]
        for name, value in expected[number].items():
            assert_equal(sample[name], value)
            if name in ("segment", "step"):
                assert batch[name][place] == value
                continue
            found = batch[name][place]
            if how == "pad":
                inside = tuple(map(slice, value.shape))
                rest = found.clone()
                rest[inside] = 0
                assert not rest.any()
                found = found[inside]
            assert_equal(found, value)
        if how == "pad":
            first = fields[0]
            assert batch["length"][place] == expected[number][first].shape[case.step_axes[first]]
    dataset.close()


def test_a_field_without_an_axis_of_its_own_is_not_left_to_a_guess(make_h5):
    path = make_h5(density=np.zeros((3, 8, 4)), mask=np.zeros((8, 4)))
    keys = {"density": "density", "mask": "mask"}
    with pytest.raises(H5ValueError, match="has no entry for 'density', whose segments would be joined"):
        H5LazyDataset(path, keys, segments={"axis": {"mask": None}, "step_axis": 1, "constants": ["mask"]}, window=2)
    segments = {"axis": {"mask": None, "den*": 0}, "step_axis": 1, "constants": ["mask"]}
    assert len(H5LazyDataset(path, keys, segments=segments, window=2)) == 12


@pytest.mark.parametrize("kind", [H5LazyDataset, RankMemCachedH5Dataset])
@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 4, 5)], ids=["one length", "two lengths"])
def test_segments_of_one_length_are_a_batch_of_their_steps(make_h5, kind, lengths):
    arrays = {f"run{at}/x": np.random.default_rng(at).random((n, 3), "f4") for at, n in enumerate(lengths)}
    dataset = kind(make_h5(arrays), "x", segments="run*", sample="segment", collate_fn="pad")
    batch, found = dataset.read_batch([2, 0, 1])
    assert found.tolist() == [lengths[2], lengths[0], lengths[1]]
    for rows, number in zip(batch, (2, 0, 1), strict=True):
        assert_equal(rows[: lengths[number]], arrays[f"run{number}/x"])
    (alone,), _ = dataset.read_batch([1])
    assert_equal(alone, arrays["run1/x"])
