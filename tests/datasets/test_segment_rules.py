"""Ways to name segments: ranges with gaps and without rows, several levels of groups, arrays that some lack."""

import itertools

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5KeyError,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    inspect_file,
)
from lightning_h5.datasets import CombinedHDF5Dataset, H5LazyDataset, RankMemCachedH5Dataset

NUMBERS = itertools.count()
DATASETS = [H5LazyDataset, RankMemCachedH5Dataset, CombinedHDF5Dataset]
MODULES = [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule]


def make(kind, paths, *keys, **options):
    """A dataset, or a data module, of some arrays."""
    if kind is CombinedHDF5Dataset:
        return kind([paths] if isinstance(paths, str) else paths, list(keys), dtype=None, **options)
    if kind is CombinedHDF5DataModule:
        return kind(paths, fields=list(keys), **options)
    fields = {key: key for key in keys}
    return kind(paths, x_key=fields, **options) if kind in MODULES else kind(paths, fields, **options)


@given(st.data())
def test_pairs_name_segments_with_gaps_overlaps_and_without_rows(tmp_path, data):
    paths, expected, labels = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        n = data.draw(st.integers(1, 12))
        pairs = data.draw(st.lists(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted), min_size=1, max_size=5))
        paths.append(str(tmp_path / f"{next(NUMBERS):06}.h5"))
        rows = 100 * len(paths) + np.arange(n)
        with h5py.File(paths[-1], "w") as file:
            file["x"], file["spans"] = rows, np.array(pairs)
            file["label"] = 10 * len(paths) + np.arange(len(pairs))
        expected += [rows[start:stop].tolist() for start, stop in pairs]
        labels += (10 * len(paths) + np.arange(len(pairs))).tolist()
    segments = {data.draw(st.sampled_from(["spans", "offsets"])): "spans", "constants": ["label"]}
    kind = data.draw(st.sampled_from(DATASETS))
    if any(expected):
        options = {"where": {"label": lambda values: values % 10 != 1}} if kind is CombinedHDF5Dataset else {}
        stays = [bool(rows) and not (options and label % 10 == 1) for rows, label in zip(expected, labels, strict=True)]
        if any(stays):
            with make(kind, paths, "x", "label", segments=segments, collate_fn="list", **options) as dataset:
                batch = dataset.read_batch(range(len(dataset)))
                assert [each.tolist() for each in batch["x"]] == list(itertools.compress(expected, stays))
                assert [int(each) for each in batch["label"]] == list(itertools.compress(labels, stays))
    windows = [
        (rows[at : at + 2], label) for rows, label in zip(expected, labels, strict=True) for at in range(len(rows) - 1)
    ]
    if windows:
        with make(kind, paths, "x", "label", segments=segments, window=[0, 2]) as dataset:
            order = data.draw(st.permutations(range(len(windows))))
            batch = dataset.read_batch(order)
            assert batch["x"].tolist() == [windows[at][0] for at in order]
            assert batch["label"].tolist() == [windows[at][1] for at in order]


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("spans", [[0, 4], [4, 11]], r"the pair \[4, 11\] in row 1"),
        ("spans", [[3, 2]], r"the pair \[3, 2\]"),
        ("spans", [[-1, 2]], r"the pair \[-1, 2\]"),
        ("spans", [[0.0, 2.0]], "values of float64"),
        ("spans", [1, 2], "the shape"),
        ("ends", [3, 2, 10], r"\[3, 2, 10\]"),
        ("ends", [3, 9], r"\[3, 9\]"),
        ("ends", [2**63, 10], r"\[9223372036854775808, 10\]"),
    ],
)
def test_ranges_beyond_the_rows_are_an_error_with_their_values(make_h5, option, values, message):
    values = np.array(values, np.uint64 if max(np.ravel(values)) > 2**62 else None)
    with pytest.raises(H5ValueError, match=message):
        H5LazyDataset(make_h5(x=np.zeros(10), cut=values), "x", segments={option: "cut"}, collate_fn="list")


def write_levels(path, sizes):
    """Groups in groups, as many in each as its size, with a scalar and an array."""
    with h5py.File(path, "w") as file:
        file["notes/author/name"] = 1.0
        for subject, n in sizes.items():
            for session in range(8, 8 + n):
                group = file.create_group(f"{subject}/ses_{session}")
                group["x"] = np.full((session - 6, 2), 100 * int(subject[3:]) + session)
                group["score"] = float(100 * int(subject[3:]) + session)
    return str(path)


@pytest.mark.parametrize("kind", DATASETS)
def test_each_level_of_groups_has_a_star_and_a_name(tmp_path, kind):
    path = write_levels(tmp_path / "x.h5", {"sub9": 3, "sub10": 4})
    expected = [900 + at for at in (8, 9, 10)] + [1000 + at for at in (8, 9, 10, 11)]
    keys = ["x", "score", "@name[0]", "@name[1]"]
    options = {"segments": "sub*/ses_*", "collate_fn": "pad", "with_index": True}
    with make(kind, path, *keys, **options) as dataset:
        batch = dataset.read_batch(range(len(dataset)))
        assert batch["score"].tolist() == batch["x"][:, 0, 0].tolist() == expected
        assert batch["@name[0]"] == ["sub9"] * 3 + ["sub10"] * 4
        assert batch["@name[1]"] == [f"ses_{value % 100}" for value in expected]
        assert batch["segment"] == [f"sub{value // 100}/ses_{value % 100}" for value in expected]
    with H5LazyDataset(path, {"x": "sub*/ses_*/x", "score": "sub*/ses_*/score"}, collate_fn="list") as dataset:
        assert [int(value) for value in dataset.read_batch(range(len(dataset)))["score"]] == expected


def test_a_level_that_does_not_exist_or_matches_nothing_is_an_error(tmp_path):
    path = write_levels(tmp_path / "x.h5", {"sub9": 2})
    with pytest.raises(H5ValueError, match=r"'@name\[2\]' was given, and the pattern of segments .* has 2 of"):
        H5LazyDataset(path, {"x": "x", "name": "@name[2]"}, segments="*/ses_*")
    with pytest.raises(H5KeyError, match="matches no groups"):
        H5LazyDataset(path, "x", segments="sub*/run_*")
    with pytest.raises(H5ValueError, match=r"has 2 '\*' in a level.* such as '\*/s\*'"):
        H5LazyDataset(path, "x", segments="*/s*_*")


def test_splits_keep_the_groups_of_a_level_together(tmp_path):
    path = write_levels(tmp_path / "x.h5", {f"sub{at}": 1 + at % 3 for at in range(8)})
    split = {"val_fraction": 0.3, "group_key": "@name[0]"}
    module = LazyH5DataModule(
        path, x_key={"x": "x"}, segments="sub*/*", collate_fn="list", split=split, with_index=True
    )
    module.setup("fit")
    names = [
        {name.split("/")[0] for name in each.read_batch(range(len(each)))["segment"]}
        for each in module.datasets.values()
    ]
    assert names[0]
    assert names[1]
    assert not names[0] & names[1]


def test_inspect_proposes_a_pattern_of_two_levels(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        for batch, config in itertools.product(range(2), range(3)):
            group = file.create_group(f"batch_{batch}/config_{config}")
            group["positions"], group["energy"] = np.zeros((3 + config, 3)), float(config)
    settings = inspect_file(path).advice.settings
    assert settings["segments"] == "*/*"
    module = LazyH5DataModule(str(path), **{name: value for name, value in settings.items() if name != "train_path"})
    module.setup("fit")
    assert len(module.datasets["train"]) == 6


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("store", ["groups", "files"])
def test_segments_that_lack_an_array_are_dropped_and_counted(tmp_path, kind, store, caplog):
    for at in range(5):
        with h5py.File(tmp_path / ("0.h5" if store == "groups" else f"{at}.h5"), "a") as file:
            group = file.create_group(f"p{at}") if store == "groups" else file
            group["a"] = np.full(4, at)
            if at not in (1, 3):
                group["b"] = np.full(4, at)
    segments = {"missing": "drop"} | ({"groups": "p*"} if store == "groups" else {})
    options = {"segments": segments, "window": 2, "shuffle": False, "batch_size": 9}
    module = make(kind, str(tmp_path), "a", "b", **options)
    with caplog.at_level("INFO"):
        module.setup("fit")
    batch = next(iter(module.train_dataloader()))
    assert batch["a"][:, 0].tolist() == batch["b"][:, 0].tolist() == [0, 0, 2, 2, 4, 4]
    assert "2 segments or files lack an array and are left out" in caplog.text
    module.teardown()
    with pytest.raises(H5KeyError, match="'c'"):
        make(kind, str(tmp_path), "a", "c", **options).setup("fit")
    if kind is LazyH5DataModule:
        with pytest.raises(H5KeyError, match="b' is not in"):
            make(kind, str(tmp_path), "a", "b", **{**options, "segments": {**segments, "missing": "error"}}).setup(
                "fit"
            )


@pytest.mark.parametrize("kind", MODULES)
def test_rows_that_cannot_be_stacked_are_an_error_in_setup(make_h5, kind):
    shapes = {"m0": (4,), "m1": (4, 1), "m2": (4,)}
    arrays = {f"{name}/energy": np.zeros(shape) for name, shape in shapes.items()}
    arrays |= {f"{name}/pos": np.zeros((4, 3 + at)) for at, name in enumerate(shapes)}
    path = make_h5(arrays)
    options = {"segments": "m*", "sample": "row"}
    for collate in (None, "stack", "pad"):
        with pytest.raises(H5ValueError, match=r"'energy' has rows of the shape \(\) in 'm0' and \(1,\) in 'm1'"):
            make(kind, path, "energy", **options, collate_fn=collate).setup("fit")
    with pytest.raises(H5ValueError, match=r"'pos' has rows of the shape \(3,\) in 'm0' and \(4,\) in 'm1'"):
        make(kind, path, "pos", **options).setup("fit")
    for settings in ({"collate_fn": "pad"}, {"collate_fn": "list"}, {"batch_size": 1}):
        make(kind, path, "pos", **options, **settings).setup("fit")
    window = {"length": 2, "mask": True}  # fields with masks have more names than arrays
    with pytest.raises(H5ValueError, match="'pos' has rows of the shape"):
        make(kind, path, "pos", segments="m*", window=window).setup("fit")
    with pytest.raises(H5ValueError, match="'energy' has rows of the shape"):
        make(kind, path, "energy", segments="m*", window=window).setup("fit")


def test_constants_have_no_axis_of_segments_unless_it_is_named(make_h5):
    density, mask, scale = np.arange(3 * 8 * 4.0).reshape(3, 8, 4), np.arange(4.0), np.arange(3.0)
    path = make_h5(density=density, mask=mask, scale=scale)
    keys = {"density": "density", "mask": "mask", "scale": "scale"}
    for axis, keys in ((0, ["density", "mask"]), ({"density": 0, "scale": 0}, ["density", "mask", "scale"])):
        segments = {"axis": axis, "step_axis": 1, "constants": keys[1:]}
        with H5LazyDataset(path, {key: key for key in keys}, x_dtype=None, segments=segments, window=8) as dataset:
            batch = dataset.read_batch(range(3))
            np.testing.assert_array_equal(batch["density"], density)
            np.testing.assert_array_equal(batch["mask"], [mask] * 3)
            if "scale" in keys:
                assert torch.equal(batch["scale"], torch.from_numpy(scale))


@pytest.mark.parametrize("kind", [*DATASETS, *MODULES])
def test_naming_a_constant_makes_it_a_field(make_h5, kind):
    path = make_h5(density=np.zeros((3, 8, 4)), mask=np.arange(4.0))
    options = {"segments": {"axis": 0, "step_axis": 1, "constants": ["mask"]}, "window": 4}
    made = make(kind, path, "density", **options)
    if kind in MODULES:
        made.setup("fit")
        made = made.datasets["train"]
    assert made.read_batch([0, 1])["mask"].tolist() == [[0, 1, 2, 3]] * 2
    made.close()
    if kind is H5LazyDataset:
        density, mask = H5LazyDataset(path, "density", **options).read_batch([0])
        assert density.shape == (1, 4, 4)
        assert mask.tolist() == [[0, 1, 2, 3]]


def test_inspect_proposes_cumulative_ends(tmp_path):
    with h5py.File(tmp_path / "replay.h5", "w") as file:
        file["data/action"] = file["data/state"] = np.repeat(np.arange(3.0), [30, 40, 30])[:, None]
        file["meta/episode_ends"] = [30, 70, 100]
    settings = inspect_file(tmp_path / "replay.h5").advice.settings
    assert settings["segments"] == {"ends": "meta/episode_ends"}


@pytest.mark.parametrize(
    ("ends", "lengths"),
    [
        (np.array([0, 0, 1, 0, 1]), [3, 2]),
        (np.array([False, True, False, False, True]), [2, 3]),
        (np.array([0, 0, 1, 0, 1], "f4"), [3, 2]),
        (np.array([1, 2, 3, 4, 5]), [1, 1, 1, 1, 1]),
        (np.array([1, 3, 3, 4, 5]), [1, 2, 1, 1]),
        (np.array([2, 5]), [2, 3]),
    ],
)
def test_ends_are_flags_if_they_are_0_or_1_throughout(make_h5, ends, lengths):
    path = make_h5(x=np.arange(5), ends=ends)
    dataset = H5LazyDataset(path, "x", segments={"ends": "ends"}, sample="segment", collate_fn="list")
    assert [n for n in map(len, dataset.read_batch(range(len(dataset)))) if n] == lengths


@pytest.mark.parametrize("ends", [[0, 0, 2, 0, 1], [5, 4, 3, 2, 1], [0, 0, -1, 0, 1], [0.0, 0.5, 1, 0, 1]])
def test_ends_that_are_neither_flags_nor_positions_are_an_error(make_h5, ends):
    path = make_h5(x=np.arange(5), ends=np.array(ends))
    with pytest.raises(H5ValueError, match="flag for each step, 0 or 1"):
        H5LazyDataset(path, "x", segments={"ends": "ends"})
