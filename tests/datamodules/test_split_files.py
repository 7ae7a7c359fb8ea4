"""Splits that are stratified, and splits that are kept in a file, in all data modules, from Python and YAML."""

import ast
import json
import re

import h5py
import numpy as np
import pytest
from arguments import nested
from lightning.pytorch.cli import LightningCLI
from lightning_models import Recorder

from lightning_h5 import CombinedHDF5DataModule, H5FileError, H5ValueError, LazyH5DataModule, RankCachedH5DataModule

ROWS = 120
GUIDS = np.array([f"p{row // 6:02}" for row in range(ROWS)])
LABELS = np.array([1 if int(guid[1:]) % 5 == 0 else 0 for guid in GUIDS])


@pytest.fixture
def file(make_h5):
    return make_h5(x=np.arange(ROWS), guid=np.array(GUIDS, "S"), label=LABELS)


def lazy(file, **options):
    return LazyH5DataModule(file, **nested(x_key={"x": "x"}, **options))


def cached(file, **options):
    return RankCachedH5DataModule(file, **nested(x_key={"x": "x"}, x_dtype=None, **options))


def combined(file, **options):
    return CombinedHDF5DataModule(file, **nested(**{"fields": ["x"]} | options))


KINDS = pytest.mark.parametrize("make", [lazy, cached, combined], ids=["lazy", "cached", "combined"])


def rows_of(datamodule):
    """The rows of each split that there is."""
    datamodule.setup("fit")
    datamodule.setup("test" if datamodule._split.may_fill("test") and datamodule.build_dataset("test") else "fit")
    rows = {}
    for split, loader in (
        ("train", datamodule.train_dataloader()),
        ("val", datamodule.val_dataloader()),
        ("test", datamodule.test_dataloader() if "test" in datamodule._datasets else []),
    ):
        rows[split] = sorted(row for batch in loader for row in batch["x"].tolist())
    datamodule.teardown()
    return rows


@KINDS
def test_shares_of_a_class_are_alike_and_groups_whole(file, make):
    rows = rows_of(
        make(file, split={"val_fraction": 0.25, "test_fraction": 0.25, "group_key": "guid", "stratify_key": "label"})
    )
    assert sorted(row for mine in rows.values() for row in mine) == list(range(ROWS))
    for split, share in (("train", 0.5), ("val", 0.25), ("test", 0.25)):
        assert abs(LABELS[rows[split]].sum() - share * LABELS.sum()) <= 6
    guids = [set(GUIDS[mine]) for mine in rows.values()]
    assert len(set.union(*guids)) == sum(map(len, guids))


@KINDS
def test_stratified_folds_are_everything_once(file, make):
    held_out = [
        rows_of(make(file, split={"num_folds": 4, "fold": fold, "group_key": "guid", "stratify_key": "label"}))["val"]
        for fold in range(4)
    ]
    assert sorted(row for rows in held_out for row in rows) == list(range(ROWS))
    assert {int(LABELS[rows].sum()) for rows in held_out} == {6}


@KINDS
@pytest.mark.parametrize("group_key", [None, "guid"])
def test_a_file_that_was_written_says_the_same_whatever_is_drawn_now(file, make, group_key, tmp_path, monkeypatch):
    path = tmp_path / "folder" / "splits.json"
    options = {"val_fraction": 0.2, "test_fraction": 0.1, "group_key": group_key, "split_file": path}
    first = rows_of(make(file, **options))
    monkeypatch.setattr("lightning_h5.datamodules.cut_splits.group_split", None)  # nothing is cut any more
    assert rows_of(make(file, **options)) == first
    assert rows_of(make(file, split={"group_key": group_key, "file": str(path)})) == first
    assert [one.name for one in path.parent.iterdir()] == ["splits.json"]


@KINDS
def test_a_file_of_ones_own_need_not_have_all_splits(file, make, tmp_path):
    guids = sorted(set(GUIDS))
    splits = {"train": guids[:15], "val": [*guids[15:], "a patient of another file"]}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"format": "lightning_h5 splits", "group_key": "guid", "splits": splits}))
    rows = rows_of(make(file, split={"group_key": "guid", "file": path}))
    assert {split: sorted(set(GUIDS[mine])) for split, mine in rows.items()} == {
        "train": guids[:15],
        "val": guids[15:],
        "test": [],
    }


def test_groups_may_be_numbers(make_h5, tmp_path):
    file = make_h5(x=np.arange(30), guid=np.arange(30) // 3)
    options = {"group_key": "guid", "split_file": tmp_path / "s.json"}
    first = rows_of(lazy(file, split=0.3, **options))
    assert json.loads((tmp_path / "s.json").read_text())["splits"]["val"] == sorted({row // 3 for row in first["val"]})
    assert rows_of(lazy(file, **options)) == first


def write(path, text):
    path.write_text(text if isinstance(text, str) else json.dumps({"format": "lightning_h5 splits"} | text))


BY_GUID = {"group_key": "guid", "splits": {"train": sorted(set(GUIDS))[:-1], "val": ["p19"]}}
BY_ROW = {"group_key": None, "splits": {"train": [[0, 100]], "val": [[100, ROWS]]}}


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("{", {}, "cannot be read as JSON"),
        ("[1]", {}, "is not a file of splits"),
        ({"splits": {"training": []}}, {}, "is not a file of splits"),
        (BY_GUID, {}, "was made with group_key='guid', but group_key=None"),
        (BY_ROW, {"group_key": "guid"}, "was made with group_key=None, but group_key='guid'"),
        (BY_ROW | {"settings": {"fold": 0}}, {"num_folds": 3, "fold": 1}, "made with fold=0, and fold=1"),
        ({"splits": {"train": [[0, 100]], "val": [[101, ROWS]]}}, {}, "has 119 rows, of which 119 differ"),
        ({"splits": {"train": [[0, 101]], "val": [[100, ROWS]]}}, {}, "has 121 rows, of which 120 differ"),
        ({"splits": {"train": [5]}}, {}, "not a list of ranges"),
        (
            {"group_key": "guid", "splits": {"train": sorted(set(GUIDS))[:-2]}},
            {"group_key": "guid"},
            "lacks 2 of 20 groups: 'p18', 'p19'",
        ),
        (
            {"group_key": "guid", "splits": {"train": sorted(set(GUIDS)), "val": ["p03"]}},
            {"group_key": "guid"},
            "has 'p03' in several splits",
        ),
        (BY_ROW, {"val_path": True}, "assigns 20 rows to 'val', which has its own files"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(file, tmp_path, text, options, words):
    write(tmp_path / "s.json", text)
    if "val_path" in options:
        options = {"val_path": file}
    with pytest.raises(H5ValueError) as caught:
        lazy(file, split={"file": tmp_path / "s.json"}, **options).setup("fit")
    assert words in str(caught.value)


def test_a_file_that_is_not_there_is_made_only_where_it_is_said_how(file, tmp_path):
    with pytest.raises(H5FileError, match="does not exist, and no setting describes how to create it"):
        lazy(file, split={"file": tmp_path / "s.json"}).setup("fit")
    (tmp_path / "not a folder").write_text("")
    with pytest.raises(H5FileError, match="cannot be written"):
        lazy(file, split={"val_fraction": 0.5, "file": tmp_path / "not a folder" / "s.json"}).setup("fit")


def test_labels_that_are_missing_are_refused(make_h5):
    file = make_h5(x=np.arange(4), label=np.array([0.0, 1.0, np.nan, 1.0]))
    with pytest.raises(H5ValueError, match=r"the label is missing .* row 2"):
        lazy(file, split={"val_fraction": 0.5, "stratify_key": "label"}).setup("fit")
    with pytest.raises(H5ValueError, match="stratify_key='label' was given, but nothing is split"):
        lazy(file, split={"stratify_key": "label"})


def test_names_of_ours_are_found_in_the_files(make_h5):
    file = make_h5({"x": np.arange(40), "meta/patient": np.arange(40) // 4, "meta/class": np.arange(40) // 20})
    datamodule = combined(
        file,
        fields={"x": "x", "guid": "meta/patient", "class": "meta/class"},
        split={"val_fraction": 0.2, "group_key": "guid", "stratify_key": "class"},
    )
    rows = rows_of(datamodule)
    assert sum(row < 20 for row in rows["val"]) == sum(row >= 20 for row in rows["val"]) == 4


@KINDS
@pytest.mark.parametrize(
    ("fractions", "named"),
    [
        ([0.6, 0.4], {"val_fraction": 0.4}),
        ((0.5, 0.25, 0.25), {"val_fraction": 0.25, "test_fraction": 0.25}),
        ([0.7, 0, 0.3], {"test_fraction": 0.3}),
        ([0.333333, 0.333333, 0.333333], {"val_fraction": 0.333333, "test_fraction": 0.333333}),
    ],
    ids=str,
)
def test_a_list_has_the_fractions_of_all_splits(file, make, fractions, named):
    assert rows_of(make(file, split=fractions)) == rows_of(make(file, split=named))


@KINDS
@pytest.mark.parametrize(
    ("fractions", "words"),
    [
        ([0.8, 0.1], "sum to 0.9. Pass fractions [train, val] or [train, val, test] that sum to 1"),
        ([0.8, 0.1, 0.10001], "sum to 1.00001"),
        ([800, 100, 100], "sum to 1000"),
        ([1.0], "Pass the fractions [train, val] or [train, val, test]"),
        ([0.4, 0.2, 0.2, 0.2], "Pass the fractions"),
        ([1.2, -0.2], "Pass the fractions"),
        ([True, False], "Pass the fractions"),
        (["0.8", "0.2"], "Pass the fractions"),
        ([float("nan"), 0.5], "Pass the fractions"),
        ([0, 0.5, 0.5], "leave 0 for training"),
        ([0.0, 1.0], "val_fraction=1.0 was given"),
        ("0.8", "SplitOptions, or a mapping"),
    ],
    ids=str,
)
def test_fractions_that_are_no_split_are_refused(file, make, fractions, words):
    with pytest.raises(H5ValueError, match=re.escape(words)):
        make(file, split=fractions)


def test_from_yaml(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(
        f"data:\n  train_path: {file}\n  x_key: x\n  with_index: true\n"
        "  split:\n    val_fraction: 0.2\n    group_key: guid\n    stratify_key: label\n    file: splits.json\n"
        "trainer:\n  max_epochs: 1\n  logger: false\n  enable_progress_bar: false\n  accelerator: cpu\n"
        "  enable_checkpointing: false\n  enable_model_summary: false\n"
    )
    cli = LightningCLI(
        Recorder,
        LazyH5DataModule,
        args=["fit", "--config", "c.yaml"],
        save_config_callback=None,
        seed_everything_default=1,
    )
    assert sorted(set(cli.model.train_rows)) == list(range(len(cli.model.train_rows)))
    assert (tmp_path / "splits.json").is_file()


def test_fractions_from_yaml(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(
        f"data:\n  train_path: {file}\n  x_key: x\n  with_index: true\n  split: [0.7, 0.1, 0.2]\n"
        "trainer:\n  max_epochs: 1\n  logger: false\n  enable_progress_bar: false\n  accelerator: cpu\n"
        "  enable_checkpointing: false\n  enable_model_summary: false\n"
    )
    cli = LightningCLI(
        Recorder,
        LazyH5DataModule,
        args=["fit", "--config", "c.yaml"],
        save_config_callback=None,
        seed_everything_default=1,
    )
    cli.trainer.test(cli.model, datamodule=cli.datamodule)
    assert [len(cli.datamodule.datasets[split]) for split in ("train", "val", "test")] == [84, 12, 24]
    assert cli.datamodule.hparams["split"] == [0.7, 0.1, 0.2]


def with_segments_as_groups(folder):
    with h5py.File(folder / "groups.h5", "w") as file:
        for number in range(10):
            group = file.create_group(f"episode_{number}")
            group["x"] = np.full(4, number)
            group.attrs["split"] = "training" if number < 7 else "held out"
        file["split"] = ["training"] * 7 + ["held out"] * 3
    return folder / "groups.h5", {"segments": "episode_*"}


def with_ends_of_segments(folder):
    with h5py.File(folder / "ends.h5", "w") as file:
        file["x"], file["ends"] = np.repeat(np.arange(10), 4), np.arange(4, 41, 4)
        file["split"] = ["training"] * 7 + ["held out"] * 3
    return folder / "ends.h5", {"segments": {"ends": "ends"}}


def with_rows(folder):
    with h5py.File(folder / "rows.h5", "w") as file:
        file["x"], file["split"] = np.arange(10), ["training"] * 7 + ["held out"] * 3
    return folder / "rows.h5", {}


def with_a_table(folder):
    with h5py.File(folder / "joined.h5", "w") as file:
        file["x"] = file["id"] = np.arange(10)
    lines = [f"{row},{'training' if row < 7 else 'held out'}" for row in range(10)]
    (folder / "table.csv").write_text("\n".join(["id,split", *lines]))
    return folder / "joined.h5", {"table": {"path": folder / "table.csv", "on": "id"}}


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (with_rows, "split"),
        (with_a_table, "table/split"),
        (with_ends_of_segments, "split"),
        (with_segments_as_groups, "split"),
        (with_segments_as_groups, "@split"),
    ],
    ids=["rows", "a table", "segments of an array", "groups", "attributes of groups"],
)
def test_a_key_with_the_split_of_each_row_leads_to_a_file_of_splits_that_works(tmp_path, make, key):
    path, options = make(tmp_path)
    with pytest.raises(H5ValueError, match=r"list (its|the) values (of|for) each split in a JSON file") as caught:
        LazyH5DataModule(path, x_key="x", split={"key": key}, **options).setup("fit")
    proposal = ast.literal_eval(re.search(r"split=({'file'.*?})", str(caught.value))[1])
    write(
        tmp_path / proposal["file"],
        {"group_key": proposal["group_key"], "splits": {"train": ["training"], "val": ["held out"]}},
    )
    split = proposal | {"file": tmp_path / proposal["file"]}
    datamodule = LazyH5DataModule(path, x_key={"x": "x"}, split=split, **options)
    datamodule.setup("fit")
    values = {
        name: set(np.concatenate([np.ravel(dataset[index]["x"]) for index in range(len(dataset))]).tolist())
        for name, dataset in datamodule.datasets.items()
    }
    assert values == {"train": {*range(7)}, "val": {7, 8, 9}}


@KINDS
@pytest.mark.parametrize(
    ("n_groups", "fractions", "text"),
    [
        (1, {"val_fraction": 0.2}, "'val' has no rows.* has 1 group, and 'train', 'val' need one each"),
        (1, {"val_fraction": 0.9}, "'train' has no rows.* has 1 group, and 'train', 'val' need one each"),
        (2, {"val_fraction": 0.2, "test_fraction": 0.1}, "has 2 groups, and 'train', 'val', 'test' need one each"),
        (3, {"val_fraction": 0.05}, "has 3 groups, and val_fraction=0.05 .* leave none for this split. Pass other"),
        (2, {"num_folds": 3, "fold": 0}, "for 2 groups. Pass num_folds from 2 to 2"),
        (1, {"num_folds": 3, "fold": 0}, "for 1 group. Each fold needs at least one group"),
    ],
)
def test_too_few_groups_are_counted_as_groups(make_h5, make, n_groups, fractions, text):
    path = make_h5(x=np.arange(60), patient=np.arange(60) % n_groups)
    with pytest.raises(H5ValueError, match=text) as caught:
        make(path, split={"group_key": "patient", **fractions}).setup()
    assert "rows or segments" not in str(caught.value)


def test_too_few_groups_of_segments_are_counted_as_groups(tmp_path):
    path, options = with_segments_as_groups(tmp_path)
    for groups in ({"group_key": "@split"}, {"group_pattern": "(episode)_"}):
        with pytest.raises(H5ValueError, match=r"has (1 group|2 groups), and 'train', 'val', 'test' need one each"):
            LazyH5DataModule(
                path, x_key="x", split={"val_fraction": 0.2, "test_fraction": 0.2, **groups}, **options
            ).setup()


def test_a_split_without_training_rows_names_the_fractions(make_h5):
    path = make_h5(x=np.arange(60))
    with pytest.raises(
        H5ValueError, match=r"'train' has no rows. val_fraction=0.999 .* of 60 rows or segments leave none"
    ):
        LazyH5DataModule(path, x_key="x", split=0.999).setup("fit")
