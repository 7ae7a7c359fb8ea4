"""Splits of samples that are not rows: whole segments, or parts of each in time; never a step in two splits."""

from contextlib import nullcontext

import h5py
import numpy as np
import pytest

from lightning_h5 import CombinedHDF5DataModule, H5KeyError, H5ValueError, LazyH5DataModule, RankCachedH5DataModule

LENGTHS = [7, 12, 3, 9, 20, 5, 8, 11, 6, 4]


@pytest.fixture
def path(tmp_path):
    """Ten episodes whose steps are numbered over all, of five patients, with lists of names."""
    first = 0
    with h5py.File(tmp_path / "episodes.h5", "w") as file:
        for number, n in enumerate(LENGTHS):
            group = file.create_group(f"data/patient{number // 2}_run{number}")
            group["x"] = np.arange(first, first + n)
            group["patient"] = np.full(n, number // 2)
            group["label"] = [number % 2]
            first += n
        names = list(file["data"])
        file["mask/train"] = np.array(names[:6], "S")
        file["mask/val"] = np.array([f"data/{name}" for name in names[6:8]], "S")
        file["mask/test"] = np.array(names[8:9], "S")
        file["mask/twice"] = np.array(names[5:7], "S")
        file["mask/strange"] = np.array(["patient9_run9"], "S")
    return str(tmp_path / "episodes.h5")


def steps_of(path, split, kind=LazyH5DataModule, **options):
    """The steps that the samples of each split have, and the segments that they are of."""
    options = {"window": 3, "segments": "data/*"} | options
    module = kind(path, x_key={"x": "x"}, split=split, with_index=True, batch_size=4, **options)
    module.setup()
    found = {}
    for name, dataset in module.datasets.items():
        batch = dataset.read_batch(range(len(dataset)))
        found[name] = set(np.ravel(batch["x"]).tolist()), set(batch["segment"])
    module.teardown()
    return found


def assert_apart(found):
    for number, a in enumerate(found):
        for b in list(found)[number + 1 :]:
            assert not found[a][0] & found[b][0]
            assert not found[a][1] & found[b][1]


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule])
def test_fractions_and_folds_are_of_segments(path, kind):
    found = steps_of(path, {"val_fraction": 0.3, "test_fraction": 0.2}, kind)
    assert_apart(found)
    assert [len(segments) for _, segments in found.values()] == [5, 3, 2]
    folds = [steps_of(path, {"num_folds": 5, "fold": fold}, kind)["val"][1] for fold in range(5)]
    assert len(set.union(*folds)) == sum(map(len, folds)) == len(LENGTHS)


@pytest.mark.parametrize("groups", [{"group_key": "patient"}, {"group_pattern": r"(patient\d+)_"}])
def test_groups_of_segments_stay_together(path, groups):
    found = steps_of(path, {"val_fraction": 0.4, **groups})
    assert_apart(found)
    patients = [{name.partition("_")[0] for name in segments} for _, segments in found.values()]
    assert not patients[0] & patients[1]
    assert len(patients[1]) == 2


def test_classes_of_segments_have_the_same_share_in_each_split(path):
    found = steps_of(path, {"val_fraction": 0.4, "stratify_key": "label"})
    assert sorted(int(name[-1]) % 2 for name in found["val"][1]) == [0, 0, 1, 1]


@pytest.mark.parametrize("key", ["mask/{split}", {"train": "mask/train", "val": "mask/val", "test": "mask/test"}])
def test_lists_in_the_file_name_the_segments_of_splits(path, key):
    found = steps_of(path, {"key": key})
    assert_apart(found)
    with h5py.File(path) as file:
        names = [f"data/{name}" for name in file["data"]]
    assert {name: sorted(segments) for name, (_, segments) in found.items()} == {
        "train": names[:6],
        "val": names[6:8],
        "test": names[8:9],
    }


@pytest.mark.parametrize("gap", [None, 0, 4])
def test_segments_are_divided_in_time_with_a_gap(path, gap):
    split = {"val_fraction": 0.3, "by": "time"} | ({} if gap is None else {"gap": gap})
    found = steps_of(path, split, window=[0, 3])
    assert not found["train"][0] & found["val"][0]
    first = 0
    for n in LENGTHS:
        train, val = ([step for step in found[name][0] if first <= step < first + n] for name in ("train", "val"))
        if train and val:
            assert max(train) + (2 if gap is None else gap) < min(val)
        first += n
    assert found["train"][1] & found["val"][1]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"key": {"train": "mask/train", "val": "mask/twice"}}, "lists '.*_run5' for 'train' and 'val'"),
        ({"key": {"train": "mask/strange"}}, "lists 'patient9_run9' for 'train'.* has no such segment"),
        ({"val_fraction": 0.5, "group_pattern": r"(subject\d)"}, "finds nothing in the segment"),
        ({"val_fraction": 0.5, "group_pattern": r"patient\d"}, "has no group in parentheses"),
        ({"val_fraction": 0.5, "group_key": "x"}, "has several values in the segment"),
        ({"val_fraction": 0.02, "by": "time"}, "leaves no sample for 'val'"),
        ({"val_fraction": 0.5, "gap": 3}, "without split.by='time'"),
    ],
)
def test_splits_that_make_no_sense_are_refused(path, split, message):
    with pytest.raises(H5ValueError, match=message):
        steps_of(path, split)


def test_rows_have_no_lists_of_segments(path):
    module = LazyH5DataModule(path, x_key="data/patient0_run0/x", split={"key": "mask/{split}"})
    with pytest.raises(H5ValueError, match="names arrays that list segments, but samples are rows"):
        module.setup("fit")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"segments": "demo_*"}, H5KeyError, r"matches no groups in .*; the file has 'data', 'mask'"),
        (
            {"segments": "data/*", "split": {"key": {"train": "mask/no"}}},
            H5KeyError,
            "'mask/no', but no training file",
        ),
        ({"segments": "nothing/*"}, H5KeyError, "has no group 'nothing'"),
        ({"segments": "data/*", "window": 30}, H5ValueError, "windows reach over 30 steps, and the longest of 10"),
        (
            {"segments": "data/*", "window": {"steps": {"y": 3}}},
            H5ValueError,
            "window.steps names 'y'; the fields are 'x'",
        ),
        ({"segments": "data/*", "select": {"y": {1: 0}}}, H5ValueError, "select names 'y'"),
        ({"segments": {"groups": "data/*", "step_axis": {"z": 0}}}, H5ValueError, "step_axis names 'z'"),
        ({"segments": {"groups": "data/*", "bucket": True}, "window": 3}, H5ValueError, "are of whole segments"),
        (
            {"segments": "data/*", "window": 3, "split": {"val_fraction": 0.5, "by": "row"}},
            H5ValueError,
            "do not divide",
        ),
        ({"segments": {"groups": "data/*", "step_axis": 1}}, H5ValueError, "axis 1 of .* was named"),
        ({"segments": {"groups": "data"}}, H5ValueError, r"has no '\*' in a level"),
        ({"segments": "data/*", "sample": "window"}, H5ValueError, "without window"),
        ({"segments": "data/*", "window": 3, "sample": "row"}, H5ValueError, "with sample='row'"),
        ({"segments": {"groups": "data/*", "constants": ["z"]}}, H5KeyError, "'z' of segments.constants is not in"),
        ({"segments": "data/*", "window": [3, 1]}, H5ValueError, "are empty"),
    ],
)
def test_segments_and_windows_that_make_no_sense_are_refused(path, options, error, message):
    with pytest.raises(error, match=message):
        LazyH5DataModule(path, x_key={"x": "x"}, **options).setup("fit")


def test_segments_of_several_lengths_need_a_way_to_become_a_batch(path):
    with pytest.raises(H5ValueError, match="collate_fn='pad'"):
        LazyH5DataModule(path, x_key="x", segments="data/*").setup("fit")


def test_batches_of_similar_length_have_each_segment_once(path):
    module = LazyH5DataModule(
        path,
        x_key={"x": "x"},
        segments={"groups": "data/*", "bucket": True},
        collate_fn="pad",
        batch_size=3,
        with_index=True,
    )
    module.setup("fit")
    batches = list(module.train_dataloader())
    assert sorted(number for batch in batches for number in batch["index"].tolist()) == list(range(len(LENGTHS)))
    spread = [int(batch["length"].max() - batch["length"].min()) for batch in batches]
    assert np.mean(spread) < np.ptp(LENGTHS) / 2


def test_random_windows_are_others_in_each_epoch_and_the_same_after_a_restart(path):
    def epochs():
        window = {"length": 3, "stride": 2, "random": True}
        module = LazyH5DataModule(path, x_key={"x": "x"}, segments="data/*", window=window, with_index=True, seed=5)
        module.setup("fit")
        loader = module.train_dataloader()
        found = []
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            places = [pair for b in loader for pair in zip(b["index"].tolist(), b["step"].tolist(), strict=True)]
            found.append(set(places))
        module.teardown("fit")
        return found

    first, again = epochs(), epochs()
    assert first == again
    assert first[0] != first[1] != first[2]
    assert {len(epoch) for epoch in first} == {sum((n - 3) // 2 + 1 for n in LENGTHS)}


def test_a_file_that_changes_is_noticed(path):
    module = LazyH5DataModule(path, x_key={"x": "x"}, segments="data/*", window=3)
    module.setup("fit")
    with h5py.File(path, "a") as file:
        file["data/patient0_run0/x"][0] = 99
    with pytest.raises(Exception, match="was written to since training was set up"):
        list(module.train_dataloader())


def test_a_list_of_names_that_several_groups_have_is_refused(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for subject in "ab":
            file[f"{subject}/run"] = np.arange(5)
        file["mask/train"] = [b"run"]
    module = LazyH5DataModule(str(tmp_path / "x.h5"), x_key="*/run", window=2, split={"key": {"train": "mask/train"}})
    with pytest.raises(H5ValueError, match="lists 'run' for 'train'"):
        module.setup("fit")


def test_segments_that_are_too_short_are_counted_once(path, caplog):
    module = LazyH5DataModule(path, x_key={"x": "x"}, segments="data/*", window=8, split=0.3)
    with caplog.at_level("INFO"):
        module.setup("fit")
        module.setup("fit")
    left_out = [record.message for record in caplog.records if "shorter than a window" in record.message]
    assert len(left_out) == len(set(left_out)) > 0
    assert sum(int(text.split()[0]) for text in left_out) == sum(n < 8 for n in LENGTHS)


def empty_segments(folder, rule):
    """Three segments with steps and two without, and what names them."""
    lengths = [3, 0, 4, 2, 0]
    ends = np.cumsum(lengths)
    path = folder / "0.h5"
    if rule in ("groups", "arrays", "files"):
        for at, n in enumerate(lengths):
            with h5py.File(folder / f"{at}.h5" if rule == "files" else path, "a") as file:
                file[{"groups": f"g{at}/x", "arrays": f"x{at}", "files": "x"}[rule]] = np.ones(n)
        key = "x*" if rule == "arrays" else "x"
        return (str(folder) if rule == "files" else str(path)), key, {"groups": "g*"} if rule == "groups" else {}
    with h5py.File(path, "w") as file:
        file["x"] = np.ones(9)
        file["lengths"], file["offsets"] = lengths, [0, *ends]
    return str(path), "x", {rule: rule}


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
@pytest.mark.parametrize("sample", ["segment", "row"])
@pytest.mark.parametrize("rule", ["groups", "arrays", "files", "lengths", "offsets"])
def test_segments_without_steps_are_counted_in_evaluation(tmp_path, rule, sample, kind, caplog):
    path, key, segments = empty_segments(tmp_path, rule)
    if rule == "arrays" and kind is CombinedHDF5DataModule:
        pytest.skip("fields of this class have names without a pattern")
    fields = {"fields": [key]} if kind is CombinedHDF5DataModule else {"x_key": {key: key}}
    paths = {"test_path": path}
    module = kind(**paths, **fields, sample=sample, segments=segments or None, collate_fn="list", batch_size=9)
    says = pytest.warns(UserWarning, match="2 segments have no steps") if sample == "segment" else nullcontext()
    with caplog.at_level("INFO"), says:
        module.setup("test")
    assert len(module.datasets["test"]) == (3 if sample == "segment" else 9)
    if sample == "row" and rule != "files":  # rows of files are no steps of segments
        assert "2 of 5 segments have no steps and have no sample" in caplog.text
    module.teardown()


def test_padding_of_text_is_empty(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["word"] = np.arange(3), ["a", "b", "c"]
    window = {"steps": [-1, 2], "pad": "zeros"}
    module = LazyH5DataModule(str(tmp_path / "x.h5"), x_key={"x": "x", "word": "word"}, window=window)
    module.setup("fit")
    found = module.datasets["train"].read_batch([0, 1, 2])
    assert found["word"] == [["", "a", "b"], ["a", "b", "c"], ["b", "c", ""]]
    assert found["x"].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 0]]


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule])
def test_rows_are_listed_or_padded_if_that_is_asked_for(path, kind):
    def first(**options):
        key = {"x": "data/patient0_run0/x"}
        module = kind(path, x_key=key, batch_size=4, shuffle=False, x_dtype="int64", **options)
        module.setup("fit")
        return next(iter(module.train_dataloader()))

    assert [value.item() for value in first(collate_fn="list")["x"]] == [0, 1, 2, 3]
    cut = first(collate_fn="pad", transform=lambda sample: {"x": sample["x"].repeat(int(sample["x"]) + 1)})
    assert cut["length"].tolist() == [1, 2, 3, 4]
    assert cut["x"][1].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluation_gives_all_windows_of_a_segment_to_one_rank(path, kind, world_size):
    segments = {"groups": "data/*", "keep_together": True}
    windows, owners, sizes = [], {}, []
    for rank in range(world_size):
        distributed = {"rank": rank, "world_size": world_size}
        module = kind(
            val_path=path, x_key={"x": "x"}, segments=segments, window=1, batch_size=4, with_index=True,
            distributed=distributed, num_workers=2 if rank == 1 else 0,
        )  # fmt: skip
        module.setup("validate")
        batches = list(module.val_dataloader())
        windows += [int(x) for batch in batches for x in batch["x"].reshape(-1)]
        sizes.append(sum(len(batch["x"]) for batch in batches))
        for batch in batches:
            for name in batch["segment"]:
                assert owners.setdefault(name, rank) == rank
        module.teardown("validate")
    assert windows == list(range(sum(LENGTHS)))
    assert max(sizes) <= sum(LENGTHS) / world_size + max(LENGTHS)


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule])
@pytest.mark.parametrize(
    "samples",
    [
        {"window": 2},
        {"window": {"length": 2, "random": True}},
        {"sample": "segment", "collate_fn": "list"},
        {"sample": "row"},
        {"patch": {"shape": [2]}},
    ],
)
def test_a_split_without_segments_is_refused_whatever_a_sample_is(make_h5, kind, samples):
    path = make_h5({f"ep_{number}/x": np.arange(9.0) for number in range(3)})
    with pytest.raises(H5ValueError, match=r"the split 'val' has no rows. val_fraction=0.1 .* of 3 rows or segments"):
        kind(path, x_key="x", segments="ep_*", split=0.1, **samples).setup("fit")
