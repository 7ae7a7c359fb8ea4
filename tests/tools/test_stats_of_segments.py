"""Statistics of segments: those of NumPy over all steps, each once; and what is normalized with them."""

import json

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.cli import main
from lightning_h5.tools.stats import compute_stats

MODULES = [LazyH5DataModule, RankCachedH5DataModule]


def steps_of(parts, axis, channel=None):
    """All steps of parts as float64, with the steps first; by channel, or all values together."""
    rows = [np.moveaxis(np.asarray(part, "f8"), axis, 0) for part in parts]
    if channel is None:
        return np.concatenate([each.ravel() for each in rows])[None]
    return np.concatenate([np.moveaxis(each, 1 + channel, 0).reshape(each.shape[1 + channel], -1) for each in rows], 1)


def assert_stats(array, values):
    """Statistics are those of values of the shape (channel, value)."""
    expected = {"mean": values.mean(1), "std": values.std(1), "min": values.min(1), "max": values.max(1)}
    for name, numbers in expected.items():
        np.testing.assert_allclose(np.atleast_1d(getattr(array, name)), numbers, rtol=1e-9, atol=1e-9)
    assert np.atleast_1d(array.n_values).tolist() == [values.shape[1]] * len(values)


@st.composite
def arrays(draw, shape, dtype):
    values = np.random.default_rng(draw(st.integers(0, 99))).normal(3, 2, shape).astype(dtype)
    if draw(st.booleans()):
        return values, {}
    chunks = tuple(draw(st.integers(1, n)) for n in shape)
    return values, {"chunks": chunks, "compression": draw(st.sampled_from([None, "gzip"]))}


@settings(max_examples=examples(25))
@given(data=st.data())
def test_statistics_of_segments_are_those_of_all_their_steps(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("set")
    kind = data.draw(st.sampled_from(["groups", "arrays", "axis", "files", "cut"]))
    axis = data.draw(st.integers(0, 2))
    dtype, parts, files = data.draw(st.sampled_from("fdi")), [], []
    for number in range(1 if kind in ("axis", "cut") else data.draw(st.integers(1, 4))):
        sizes = [3, 2]
        sizes.insert(axis, data.draw(st.integers(1, 9)))
        values, stored = data.draw(arrays((4, *sizes) if kind == "axis" else tuple(sizes), dtype))
        parts.append(values)
        name = {"groups": f"g/{number}/x", "arrays": f"x{number}"}.get(kind, "x")
        path = folder / f"{number if kind == 'files' else ''}.h5"
        files = [*files, path] if path not in files else files
        with h5py.File(path, "a") as file:
            file.create_dataset(name, data=values, **stored)
    options = {
        "groups": {"segments": {"groups": "g/*", "step_axis": axis}},
        "arrays": {"segments": {"step_axis": axis}},
        "axis": {"segments": {"axis": 0, "step_axis": axis + 1}},
        "files": {"segments": {"step_axis": axis}, "sample": "segment"},
        "cut": {"segments": {"step_axis": axis}, "sample": "window"},
    }[kind]
    if kind == "axis":
        parts = list(parts[0])
    channel = data.draw(st.sampled_from([None, 0, 1]))
    key = "x*" if kind == "arrays" else "x"
    report = compute_stats(files, key, channel_axis=channel, **options)
    assert_stats(report.arrays[0], steps_of(parts, axis, channel))
    chosen = data.draw(st.lists(st.integers(0, len(parts) - 1), min_size=1, unique=True))
    some = compute_stats(files, key, channel_axis=channel, rows=chosen, **options)
    assert_stats(some.arrays[0], steps_of([parts[at] for at in chosen], axis, channel))


@pytest.fixture
def recordings(make_h5):
    """Recordings (channel, time) of several lengths, with a number of each, an attribute, and a rate for each step."""
    path = make_h5(name="recordings.h5")
    rng, made = np.random.default_rng(5), []
    with h5py.File(path, "a") as file:
        for number, n in enumerate([30, 7, 18]):
            eeg = (rng.normal(size=(3, n)) * [[1], [10], [100]] + [[5], [50], [-500]]).astype("f4")
            group = file.create_group(f"s{number}")
            group.create_dataset("eeg", data=eeg, chunks=(2, 7), compression="gzip")
            group["rate"], group["age"] = rng.normal(size=n), np.full(2, 20.0 + number)
            group.attrs["score"] = 10.0 * number
            made.append(eeg)
    return path, made


SEGMENTS = {"groups": "s*", "step_axis": {"eeg": 1, "rate": 0}, "constants": ["age"]}
KEYS = {"eeg": "eeg", "rate": "rate", "age": "age", "score": "@score"}


def test_constants_attributes_and_parts_of_arrays_have_statistics(recordings):
    path, eeg = recordings
    report = compute_stats(path, KEYS, segments=SEGMENTS)
    found = {array.key: array for array in report.arrays}
    assert_stats(found["eeg"], steps_of(eeg, 1))
    assert_stats(found["age"], np.array([[20.0, 20, 21, 21, 22, 22]]))
    assert_stats(found["@score"], np.array([[0.0, 10, 20]]))
    assert found["rate"].n_rows == 55
    part = compute_stats(
        path, "eeg", segments={"groups": "s*", "step_axis": 1}, select={"eeg": {0: [2, 0]}}, channel_axis=0
    )
    assert_stats(part.arrays[0], steps_of([one[[2, 0]] for one in eeg], 1, 0))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("pad", ["zeros", "edge", None])
def test_windows_and_segments_are_normalized_by_channel_and_padding_stays_zero(recordings, tmp_path, module, pad):
    path, eeg = recordings
    stats = tmp_path / "stats.json"
    report = compute_stats(path, KEYS, segments=SEGMENTS, channel_axis={"eeg": 0})
    report.save(stats)
    mean, std = (np.array(getattr(report.arrays[0], name))[:, None] for name in ("mean", "std"))
    wanted = [(one - mean) / std for one in eeg]
    scores = (np.array([0, 10, 20]) - 10) / np.std([0, 10, 20])
    options = {"x_key": KEYS, "segments": SEGMENTS, "normalize": stats, "with_index": True, "batch_size": 3}
    if pad is None:
        options |= {"collate_fn": "pad"}
    else:
        options |= {"window": {"steps": {"eeg": [-4, 5], "rate": 0}, "pad": pad, "mask": True}}
    data = module(path, **options)
    data.setup("fit")
    n_zeros = 0
    for batch in data.train_dataloader():
        for place, (segment, step) in enumerate(zip(batch["segment"], batch["step"].tolist(), strict=True)):
            number, found = int(segment[1:]), batch["eeg"][place].numpy()
            at = np.arange(found.shape[1]) if pad is None else np.arange(step - 4, step + 5)
            n = wanted[number].shape[1]
            is_there = (at >= 0) & (at < n)
            expected = wanted[number][:, np.clip(at, 0, n - 1)]
            expected = np.where(is_there | (pad == "edge"), expected, 0)
            np.testing.assert_allclose(found, expected, atol=1e-5)
            assert batch["score"][place] == pytest.approx(scores[number])
            n_zeros += int((~is_there).sum())
    assert n_zeros, "some windows reach over the ends"
    data.teardown("fit")


@pytest.mark.parametrize("module", MODULES)
def test_samples_of_several_shapes_are_normalized(make_h5, tmp_path, module):
    shapes, parts = [(5, 2, 6), (4, 2, 3), (6, 2, 6)], []
    for number, shape in enumerate(shapes):
        values = np.random.default_rng(number).normal(9, 4, shape) * [[[1], [50]]]
        make_h5({"x": values}, name=f"set/{number}.h5")
        parts.append(values)
    report = compute_stats(tmp_path / "set", "x", sample="segment", channel_axis=0)
    assert report.arrays[0].row_shape is None
    assert_stats(report.arrays[0], steps_of(parts, 0, 0))
    report.save(tmp_path / "stats.json")
    mean, std = (getattr(report.arrays[0], name)[:, None] for name in ("mean", "std"))
    data = module(
        tmp_path / "set",
        x_key="x",
        x_dtype=None,
        sample="segment",
        collate_fn="list",
        batch_size=3,
        normalize=tmp_path / "stats.json",
        shuffle=False,
    )
    data.setup("fit")
    (batch,) = data.train_dataloader()
    for found, values in zip(batch, parts, strict=True):
        torch.testing.assert_close(found, torch.from_numpy((values - mean) / std))


def test_statistics_of_fields_of_groups_that_are_not_loaded_are_ignored(recordings, tmp_path):
    path, _ = recordings
    compute_stats(path, KEYS, segments=SEGMENTS).save(tmp_path / "stats.json")
    for key, is_known in (("rate", True), ("nothing", False)):
        stats = json.loads((tmp_path / "stats.json").read_text())
        stats["fields"][key] = stats["fields"]["rate"]
        (tmp_path / "more.json").write_text(json.dumps(stats))
        options = {"segments": {"groups": "s*", "step_axis": 1}, "window": 5, "normalize": tmp_path / "more.json"}
        data = LazyH5DataModule(path, x_key="eeg", **options)
        if is_known:
            data.setup("fit")
            continue
        with pytest.raises(H5ValueError, match="no 'nothing'"):
            data.setup("fit")


def test_channels_that_differ_between_segments_are_refused(make_h5, tmp_path):
    for number in (2, 3):
        make_h5({"x": np.ones((4, number))}, name=f"set/{number}.h5")
    with pytest.raises(H5ValueError, match="Pass an axis of the same length in all files"):
        compute_stats(tmp_path / "set", "x", sample="segment", channel_axis=0)
    assert compute_stats(tmp_path / "set", "x", sample="segment").arrays[0].n_values == 20


def test_the_command_takes_segments(recordings, tmp_path, capsys):
    path, eeg = recordings
    output = tmp_path / "stats.json"
    arguments = [
        "--segments",
        "{groups: 's*', step_axis: 1}",
        "--select",
        "{eeg: {0: {stop: 2}}}",
        "--channel-axis",
        "0",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["stats", path, "--key", "eeg", *arguments, "--output", str(output)])
    assert ended.value.code == 0, capsys.readouterr().err
    mean = json.loads(output.read_text())["fields"]["eeg"]["mean"]
    np.testing.assert_allclose(mean, np.concatenate(eeg, axis=1)[:2].mean(1, dtype="f8"))
    with pytest.raises(SystemExit):
        main(["stats", path, "--key", "eeg", "--segments", "s*", "--split-file", "x.json"])
    assert "--rows" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["stats", path, "--key", "eeg", "--segments", "{step_axis: "])
    assert "not a mapping" in capsys.readouterr().err
