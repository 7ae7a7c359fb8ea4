"""Fields at different rates: paired as the user says, and never by number where their lengths do not fit."""

import itertools

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import CombinedHDF5DataModule, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.datasets import CombinedHDF5Dataset, H5LazyDataset, RankMemCachedH5Dataset

NUMBERS = itertools.count()
MODULES = [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule]


def write_nights(folder, labels, rate, *, rest=0, store="groups"):
    """Recordings with one label for ``rate`` samples of a signal; the signal has the value of its label."""
    paths = [str(folder / f"{next(NUMBERS):06}.h5")]
    signals = [np.repeat(values, rate) for values in labels]
    signals = [np.concatenate([signal, np.full(rest, signal[-1] + 1)]) for signal in signals]
    if store == "axis":
        with h5py.File(paths[0], "w") as file:
            file["eeg"], file["stage"] = np.stack(signals), np.stack(labels)
        return paths, {"axis": 0, "step_axis": 1}
    if store == "files":
        paths = [paths[0].replace(".h5", f"_{at}.h5") for at in range(len(labels))]
    for at, (signal, values) in enumerate(zip(signals, labels, strict=True)):
        with h5py.File(paths[at % len(paths)], "a") as file:
            group = file if store == "files" else file.create_group(f"night_{at}")
            group.create_dataset("eeg", data=signal, chunks=(4,), compression="gzip")
            group["stage"] = values
    return paths, {"groups": "night_*"} if store == "groups" else {}


def make(kind, paths, **options):
    """A dataset of the signal and its labels."""
    if kind is CombinedHDF5Dataset:
        return kind(paths, ["eeg", "stage"], dtype=None, **options)
    return kind(paths, {"eeg": "eeg", "stage": "stage"}, **options)


@given(st.data())
def test_a_step_is_paired_with_the_label_that_spans_it(tmp_path, data):
    rate, rest = data.draw(st.integers(2, 6)), data.draw(st.integers(0, 1))
    store = data.draw(st.sampled_from(["groups", "files", "axis"]))
    n_labels = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    n_labels = [n_labels[0]] * len(n_labels) if store == "axis" else n_labels
    labels = [10 * at + np.arange(n) for at, n in enumerate(n_labels)]
    paths, segments = write_nights(tmp_path, labels, rate, rest=rest, store=store)
    segments = {**segments, "steps_per": {"stage": rate}}
    kind = data.draw(st.sampled_from([H5LazyDataset, RankMemCachedH5Dataset, CombinedHDF5Dataset]))

    with make(kind, paths, sample="row", segments=segments) as dataset:
        batch = dataset.read_batch(range(len(dataset)))
        assert len(dataset) == rate * sum(n_labels)
        assert torch.equal(batch["eeg"].long(), batch["stage"])

    with make(kind, paths, sample="segment", segments=segments, collate_fn="list") as dataset:
        batch = dataset.read_batch(range(len(dataset)))
        assert [each.tolist() for each in batch["stage"]] == [each.tolist() for each in labels]
        assert [len(each) for each in batch["eeg"]] == [n * rate + rest for n in n_labels]

    n_whole = data.draw(st.integers(1, 2))
    with make(kind, paths, segments=segments, window=n_whole * rate) as dataset:
        batch = dataset.read_batch(range(len(dataset)))
        assert len(dataset) == sum(n // n_whole for n in n_labels)
        assert torch.equal(batch["eeg"].long(), batch["stage"].repeat_interleave(rate, dim=1))

    stride = data.draw(st.integers(1, 2 * rate))
    pad = data.draw(st.sampled_from(["edge", "zeros"]))
    window = {"steps": {"eeg": 0, "stage": [-1, 2]}, "stride": stride, "pad": pad, "mask": True}
    with make(kind, paths, segments=segments, window=window) as dataset:
        batch = dataset.read_batch(range(len(dataset)))
        places = [
            (values, t // rate + np.arange(-1, 2)) for values in labels for t in range(0, len(values) * rate, stride)
        ]
        valid = [((at >= 0) & (at < len(values))).tolist() for values, at in places]
        stages = np.array([values[np.clip(at, 0, len(values) - 1)] for values, at in places])
        assert batch["eeg"].tolist() == stages[:, 1].tolist()
        assert batch["stage"].tolist() == (stages * valid if pad == "zeros" else stages).tolist()
        assert batch["stage_valid"].tolist() == valid


@pytest.mark.parametrize("module", MODULES)
def test_training_and_evaluation_pair_by_rate_with_splits_in_time(tmp_path, module):
    labels = [np.arange(11), 20 + np.arange(9)]
    (path,), segments = write_nights(tmp_path, labels, 4, rest=2)
    names = {"x_key": {"eeg": "eeg", "stage": "stage"}} if module is not CombinedHDF5DataModule else {}
    names = names or {"fields": ["eeg", "stage"]}
    datamodule = module(
        path,
        **names,
        segments={**segments, "steps_per": {"stage": 4}},
        window={"steps": {"eeg": [0, 4], "stage": 0}, "stride": 4},
        split={"val_fraction": 0.4, "by": "time"},
        batch_size=3,
        drop_last=False,
    )
    datamodule.setup("fit")
    seen = {}
    for split, loader in (("train", datamodule.train_dataloader()), ("val", datamodule.val_dataloader())):
        batches = list(loader)
        for batch in batches:
            assert torch.equal(batch["eeg"].long(), batch["stage"][:, None].expand(-1, 4))
        seen[split] = {int(label) for batch in batches for label in batch["stage"]}
    assert seen["train"]
    assert seen["val"]
    assert not seen["train"] & seen["val"]
    datamodule.teardown()


@given(
    st.integers(2, 9), st.integers(2, 6), st.integers(0, 3), st.sampled_from(["groups", "files", "axis"]), st.booleans()
)
def test_lengths_that_no_window_explains_are_an_error_with_both_names(tmp_path, rate, n, rest, store, is_row):
    paths, segments = write_nights(tmp_path, [np.arange(n)], rate, rest=rest, store=store)
    window = {"eeg": [0, rate], "stage": 0}
    is_row &= store != "files"  # rows of files are compared without segments
    how = {"sample": "row"} if is_row else {"window": window}
    with pytest.raises(H5ValueError, match="pair steps by number") as error:
        H5LazyDataset(paths, {"eeg": "eeg", "stage": "stage"}, segments=segments, **how)
    message = str(error.value)
    assert f"'eeg' has {rate * n + rest} steps" in message
    assert f"'stage' has {n} steps" in message
    if not rest:
        assert f"steps_per={{'stage': {rate}}}" in message


@pytest.mark.parametrize("more", [-7, -1, 0, 1])
def test_one_further_observation_and_the_reach_of_a_window_explain_lengths(tmp_path, more):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["action"], file["state"] = np.arange(30), np.arange(30 + more)
    window = {"steps": {"action": [0, 8], "state": [-1, 1]}}
    dataset = H5LazyDataset(str(tmp_path / "x.h5"), {"action": "action", "state": "state"}, window=window)
    batch = dataset.read_batch(range(len(dataset)))
    assert torch.equal(batch["action"][:, 0], batch["state"][:, 1])
    with h5py.File(tmp_path / "x.h5", "a") as file:
        del file["state"]
        file["state"] = np.arange(22)
    with pytest.raises(H5ValueError, match="'action' has 30 steps and 'state' has 22 steps"):
        H5LazyDataset(str(tmp_path / "x.h5"), {"action": "action", "state": "state"}, window=window)


def test_labels_that_do_not_fit_their_rate_are_an_error(tmp_path):
    (path,), segments = write_nights(tmp_path, [np.arange(6)], 5, rest=11)
    segments = {**segments, "steps_per": {"stage": 5}}
    with pytest.raises(H5ValueError, match="'eeg' has 41 steps and 'stage' has 6 steps of 5 each"):
        H5LazyDataset(path, {"eeg": "eeg", "stage": "stage"}, segments=segments, window=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per": 4}, "is not a mapping"),
        ({"steps_per": {"stage": 0}}, "steps_per"),
        ({"steps_per": {"stage": None}}, "steps_per"),
        ({"steps_per": {"hypnogram": 4}}, "names 'hypnogram'"),
        ({"steps_per": {"stage": 4, "eeg": 2}}, "names all fields"),
        ({"steps_per": {"stage": 4}, "key": "stage"}, "cuts rows"),
    ],
)
def test_a_rate_that_makes_no_sense_is_an_error(tmp_path, options, message):
    (path,), segments = write_nights(tmp_path, [np.arange(3)], 4)
    with pytest.raises(H5ValueError, match=message):
        H5LazyDataset(path, {"eeg": "eeg", "stage": "stage"}, segments={**segments, **options}, window=4)


@pytest.mark.parametrize("kind", [H5LazyDataset, RankMemCachedH5Dataset, CombinedHDF5Dataset])
def test_a_field_with_a_step_fewer_keeps_its_rows_beside_longer_fields(make_h5, kind):
    arrays = {}
    for at in range(3):  # text is held apart from numbers, and filters are read apart from fields
        arrays |= {f"run{at}/eeg": 10 * at + np.arange(4), f"run{at}/ok": np.ones(4)}
        arrays[f"run{at}/stage"] = np.array([f"stage {10 * at + step}" for step in range(3)], "S")
    options = {"where": {"ok": 1}} if kind is CombinedHDF5Dataset else {}
    with make(kind, make_h5(arrays), segments="run*", window={"*": 0}, **options) as dataset:
        batch = dataset.read_batch(range(len(dataset)))
        assert batch["stage"] == [f"stage {int(value)}" for value in batch["eeg"]]


@pytest.mark.parametrize("kind", [H5LazyDataset, RankMemCachedH5Dataset, CombinedHDF5Dataset])
def test_rows_of_fields_with_a_step_fewer_are_an_error_with_the_ways_out(make_h5, kind):
    """A vector of atoms may be as long as a list of conformations but for one, and a first label may be missing."""
    path = make_h5({"m0/eeg": np.arange(4), "m0/stage": np.arange(3), "m1/eeg": np.arange(5), "m1/stage": np.arange(4)})
    with pytest.raises(H5ValueError, match="pair steps by number") as error:
        make(kind, path, segments="m*", sample="row")
    for part in ("'eeg' has 4 steps and 'stage' has 3 steps", "segments.constants=['stage']", "window={'*': 0}"):
        assert part in str(error.value)
    with make(kind, path, segments={"groups": "m*", "constants": ["stage"]}, sample="row") as dataset:
        assert len(dataset) == 9
    with make(kind, path, segments="m*", window={"*": 0}) as dataset:
        assert len(dataset) == 7
