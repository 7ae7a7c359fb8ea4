"""Samples of segments from many files: filters, splits, weights and mixtures, against what h5py reads."""

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import CombinedHDF5DataModule, H5ValueError, create_optimized_dataloader
from lightning_h5.datasets import CombinedHDF5Dataset

LENGTHS = {"a": [9, 3, 14, 6], "b": [5, 11, 1]}


@pytest.fixture
def folder(tmp_path):
    """Episodes in groups, with a value for each episode, and a flag for each step."""
    for number, (name, lengths) in enumerate(LENGTHS.items()):
        rng = np.random.default_rng(number)
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for episode, n in enumerate(lengths):
                group = file.create_group(f"data/demo_{episode}")
                group.create_dataset("x", data=rng.normal(size=(n, 3)), chunks=(min(n, 4), 3), compression="gzip")
                group["t"] = 1000 * number + 100 * episode + np.arange(n)
                group["ok"] = (np.arange(n) % 5 > 0).astype("u1")
                group["task"] = np.array([f"task {episode % 2}"], h5py.string_dtype())
                group.attrs["score"] = float(episode)
                group.attrs["site"] = name
    return tmp_path


def dataset(folder, names="ab", **options):
    given = {"segments": "data/*", "dtype": None, "with_index": True} | options
    return CombinedHDF5Dataset([folder / f"{name}.h5" for name in names], ["x", "t"], **given)


def episodes(folder, names="ab"):
    """For each episode what h5py has of it."""
    for name in names:
        with h5py.File(folder / f"{name}.h5") as file:
            for episode in range(len(LENGTHS[name])):
                group = file[f"data/demo_{episode}"]
                arrays = {each: group[each][()] for each in ("x", "t", "ok")}
                yield arrays | dict(group.attrs) | {"task": group["task"].asstr()[0], "name": group.name[1:]}


def windows_of(one, length, stride, is_kept):
    """The windows that lie in consecutive steps that are kept."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], is_kept, [0]])))
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        for step in range(start, stop - length + 1, stride):
            yield one["name"], step, one["t"][step : step + length], one["x"][step : step + length]


FILTERS = {
    "none": ({}, lambda one: True),
    "an attribute": ({"@score": {"min": 1}}, lambda one: one["score"] >= 1),
    "text of a segment": ({"task": ["task 1"]}, lambda one: one["task"] == "task 1"),
    "text of an attribute": ({"@site": "b"}, lambda one: one["site"] == "b"),
    "a function": ({"@score": lambda scores: scores != 2}, lambda one: one["score"] != 2),
    "a flag of each step": ({"ok": 1}, lambda one: one["ok"] == 1),
    "a range of steps": ({"t": {"min": 103, "max": 1104}}, lambda one: (one["t"] >= 103) & (one["t"] <= 1104)),
    "both": ({"ok": 1, "@score": {"max": 1}}, lambda one: (one["ok"] == 1) & (one["score"] <= 1)),
}


@pytest.mark.parametrize("how", FILTERS)
def test_windows_never_reach_over_what_a_filter_leaves_out(folder, how):
    where, keeps = FILTERS[how]
    for length, stride in ((1, 1), (3, 1), (3, 2)):
        found = dataset(folder, where=where, window={"length": length, "stride": stride})
        expected = [
            each
            for one in episodes(folder)
            for each in windows_of(one, length, stride, np.broadcast_to(keeps(one), len(one["t"])).astype(int))
        ]
        assert len(found) == len(expected)
        for sample, (name, step, t, x) in zip(found.__getitems__(range(len(found))), expected, strict=True):
            assert (sample["segment"], sample["step"]) == (name, step)
            assert sample["t"].tolist() == t.tolist()
            assert np.array_equal(sample["x"], x)


@pytest.mark.parametrize("how", FILTERS)
def test_a_whole_segment_has_the_steps_that_a_filter_keeps(folder, how):
    where, keeps = FILTERS[how]
    found = dataset(folder, where=where, collate_fn="pad")
    expected = [one["t"][np.broadcast_to(keeps(one), len(one["t"]))] for one in episodes(folder)]
    expected = [steps.tolist() for steps in expected if len(steps)]
    batch = found.read_batch(range(len(found)))
    assert batch["length"].tolist() == [len(steps) for steps in expected]
    assert [row[:n].tolist() for row, n in zip(batch["t"], batch["length"], strict=True)] == expected


@given(st.data(), st.integers(1, 4), st.booleans())
@settings(max_examples=examples(30))
def test_any_steps_may_be_left_out_of_segments_by_value(make_h5, data, length, is_sorted):
    """Rows of scattered groups: filtered, sorted and cut into windows as NumPy does."""
    n = data.draw(st.integers(1, 30))
    groups = np.array(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    is_kept = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    order = np.random.default_rng(n).permutation(n) if is_sorted else np.arange(n)
    path = make_h5(x=np.arange(n), g=groups, order=order, keep=is_kept.astype("u1"))
    segments = {"key": "g", "sort_key": "order" if is_sorted else None}
    expected = []
    for group in dict.fromkeys(groups.tolist()):
        rows = np.flatnonzero(groups == group)
        one = {"name": group, "t": rows[np.argsort(order[rows], kind="stable")]}
        expected += [
            t.tolist() for _, _, t, _ in windows_of(one | {"x": one["t"]}, length, 1, is_kept[one["t"]].astype(int))
        ]
    options = {"segments": segments, "window": {"length": length, "stride": 1}, "where": {"keep": 1}, "dtype": None}
    if not expected:
        with pytest.raises(H5ValueError, match="no segment"):
            CombinedHDF5Dataset(path, ["x"], **options)
        return
    found = CombinedHDF5Dataset(path, ["x"], **options)
    assert [sample["x"].tolist() for sample in found.__getitems__(range(len(found)))] == expected


def test_a_label_keeps_the_steps_that_have_it(folder):
    found = dataset(folder, label=1, field_map={"target": "ok"}, collate_fn="pad", with_index=False)
    batch = found.read_batch(range(len(found)))
    expected = [one["t"][one["ok"] == 1].tolist() for one in episodes(folder)]
    steps = [row[:n].tolist() for row, n in zip(batch["t"], batch["length"], strict=True)]
    assert steps == [each for each in expected if each]
    assert set(batch) == {"x", "t", "length"}


def module(folder, names="ab", **options):
    given = {"fields": ["x", "t"], "segments": "data/*", "window": 3, "with_index": True, "batch_size": 4}
    files = {"train_path": [folder / f"{name}.h5" for name in names]} if names else {}
    return CombinedHDF5DataModule(**files, **given | options)


def segments_in(loader):
    return {
        (int(batch["t"][place][0]) // 1000, name) for batch in loader for place, name in enumerate(batch["segment"])
    }


SPLITS = [
    {"val_fraction": 0.3, "test_fraction": 0.3},
    {"val_fraction": 0.4, "group_key": "task"},
    {"num_folds": 3, "fold": 1},
    {"val_fraction": 0.5, "group_pattern": r"(demo_\d)"},
]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mixes", [False, True])
def test_splits_are_of_segments_and_the_same_with_any_filter(folder, split, mixes):
    sources = {"mixture": {"sources": {name: folder / f"{name}.h5" for name in "ab"}}, "names": ""} if mixes else {}
    found = {}
    for where in (None, {"ok": 1}):
        data = module(folder, **sources, split=split, where=where, window=1)
        data.setup()
        loaders = [data.train_dataloader(), data.val_dataloader()]
        loaders += [data.test_dataloader()] if "test_fraction" in split else []
        found[where is None] = [segments_in(loader) for loader in loaders]
    every = set().union(*found[True])
    assert sum(map(len, found[True])) == len(every) == sum(map(len, LENGTHS.values()))
    for few, all_of in zip(found[False], found[True], strict=True):
        assert few <= all_of


def test_by_time_no_step_is_in_two_splits_of_a_mixture(folder):
    data = module(
        folder, "", mixture={name: folder / f"{name}.h5" for name in "ab"}, split={"val_fraction": 0.4, "by": "time"}
    )
    data.setup("fit")
    steps = [
        {int(t) for batch in loader for t in batch["t"].reshape(-1)}
        for loader in (data.train_dataloader(), data.val_dataloader())
    ]
    assert not steps[0] & steps[1]
    assert all({step // 1000 for step in each} == {0, 1} for each in steps)


def test_a_mixture_names_the_source_and_the_segment_of_each_window(folder):
    data = module(folder, "", mixture={name: folder / f"{name}.h5" for name in "ab"})
    data.setup("fit")
    seen = []
    for batch in data.train_dataloader():
        for place, source in enumerate(batch["source"]):
            t = batch["t"][place]
            number, name, step = "ab".index(source), batch["segment"][place], int(batch["step"][place])
            assert t.tolist() == [1000 * number + 100 * int(name[-1]) + step + each for each in range(3)]
            seen.append((source, name, step))
    assert len(seen) == len(set(seen)) == sum(n // 3 for lengths in LENGTHS.values() for n in lengths)


def test_sources_that_share_some_files_are_not_split(folder):
    sources = {"one": [folder / "a.h5", folder / "b.h5"], "two": folder / "a.h5"}
    with pytest.raises(H5ValueError, match="two sources share only some of their files"):
        module(folder, "", mixture=sources, split=0.3).setup("fit")
    sources = {name: {"paths": folder / "a.h5", "where": {"ok": ok}} for ok, name in enumerate(["one", "two"])}
    data = module(folder, "", mixture=sources, split=0.5, window=1)
    data.setup("fit")
    assert not segments_in(data.train_dataloader()) & segments_in(data.val_dataloader())


def test_windows_are_drawn_as_often_as_their_segments_weigh(folder):
    data = module(folder, weights="@score", batch_size=50)
    data.setup("fit")
    seen = [name for _ in range(20) for batch in data.train_dataloader() for name in batch["segment"]]
    scores = {one["name"]: one["score"] for one in episodes(folder)}
    assert "data/demo_0" not in seen
    counts = {name: seen.count(name) for name in scores}
    n_windows = dict.fromkeys(scores, 0)
    for one in episodes(folder):
        n_windows[one["name"]] += len(one["t"]) // 3
    shares = {name: scores[name] * n_windows[name] for name in scores}
    for name, share in shares.items():
        assert counts[name] / len(seen) == pytest.approx(share / sum(shares.values()), abs=0.06)


@pytest.mark.parametrize("options", [{"window": 3}, {"collate_fn": "list"}])
def test_a_loader_for_other_loops_gives_each_sample_once(folder, options):
    loader = create_optimized_dataloader(dataset(folder, **options), 4)
    numbers = [int(number) for batch in loader for number in batch["index"]]
    assert sorted(numbers) == list(range(len(loader.dataset)))
    assert all(isinstance(batch["x"], torch.Tensor if "window" in options else list) for batch in loader)


PATCHES = {"window": None, "patch": {"shape": {"x": [2, None], "t": [2]}}}
REFUSED = [
    ({"row_cache": 5}, "row_cache caches single rows"),
    ({"where": lambda columns: columns["ok"] > 0}, "is a function of all columns"),
    ({"where": {"x": 1.0}}, "has rows of the shape"),
    ({"where": {"@score": {"min": 9}}}, "no segment passes all filters"),
    ({"fields": None}, "without fields"),
    ({"window": 99}, "no segment is as long as a window"),
    ({**PATCHES, "where": {"ok": 1}}, "Name an array with a value for each volume"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_makes_no_sense_with_segments_is_refused_before_training(folder, options, text):
    with pytest.raises(H5ValueError, match=text):
        module(folder, **options).setup("fit")


def test_text_that_no_segment_has_is_a_warning(folder):
    with pytest.warns(UserWarning, match="filters name 'c', which no segment has"):
        dataset(folder, where={"@site": ["a", "c"]}, window=3)


@pytest.mark.parametrize("split", [{"by": "segment"}, {"group_pattern": "(demo)"}])
def test_rows_are_not_split_by_what_segments_alone_have(folder, split):
    options = {"fields": ["data/demo_0/x"], "segments": None, "window": None}
    with pytest.raises(H5ValueError, match="divide segments, but samples are rows"):
        module(folder, "a", **options, split={"val_fraction": 0.3} | split).setup("fit")


VOLUMES = {"in groups": "scans/*", "files": None, "indices of an axis": {"axis": 0}}
OF_VOLUMES = {
    "an attribute": ({"@site": "b"}, lambda site, age: site == "b"),
    "a value": ({"age": {"min": 2}}, lambda site, age: age >= 2),
    "both": ({"age": lambda age: age % 2 == 0, "@site": ["a"]}, lambda site, age: age % 2 == 0 and site == "a"),
}


@pytest.mark.parametrize("kind", VOLUMES)
@pytest.mark.parametrize("how", OF_VOLUMES)
def test_patches_are_of_the_volumes_that_filters_keep(tmp_path, kind, how):
    where, is_kept = OF_VOLUMES[how]
    rng, expected = np.random.default_rng(0), []
    for number in range(4):
        site, ages = "ab"[number % 2], [number] if kind == "files" else [0, 3, 1]
        volumes = rng.normal(size=(len(ages), 4, 5)).astype("f4")
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            places = [file.require_group(f"scans/{at}") for at in range(3)] if kind == "in groups" else [file]
            for place, of_place in zip(places, np.split(np.arange(len(ages)), len(places)), strict=True):
                one = slice(None) if kind == "indices of an axis" else of_place[0]
                place.create_dataset("x", data=volumes[one], chunks=True, compression="gzip")
                place["age"], place.attrs["site"] = np.array(ages)[one], site
        kept = [one for one, age in zip(volumes, ages, strict=True) if is_kept(site, age)]
        expected += [one[y : y + 2, x : x + 2] for one in kept for y in (0, 2) for x in (0, 2)]
    options = {"segments": VOLUMES[kind], "patch": {"shape": [2, 2], "stride": 2, "border": "drop"}}
    found = CombinedHDF5Dataset(sorted(tmp_path.glob("*.h5")), ["x"], where=where, **options)
    np.testing.assert_array_equal([sample["x"] for sample in found.__getitems__(range(len(found)))], expected)


def test_the_index_of_a_dataset_has_the_file_and_row_of_each_window(folder):
    found = dataset(folder, window={"length": 2, "stride": 2})
    files, rows = found.index
    assert [int(t[0]) for t in (sample["t"] for sample in found.__getitems__(range(len(found))))] == [
        1000 * file + 100 * int(name[-1]) + row
        for file, row, name in zip(
            files.tolist(), rows.tolist(), found.read_batch(range(len(found)))["segment"], strict=True
        )
    ]
