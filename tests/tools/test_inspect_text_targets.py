"""Columns of text as targets: inspect suggests class numbers, by the call that makes them."""

import re

import h5py
import numpy as np
import pytest
import torch

from lightning_h5 import LazyH5DataModule
from lightning_h5.cli import main
from lightning_h5.tools.inspect import inspect_file

ROWS = np.random.default_rng(0).normal(size=(100, 6)).astype("f4")
LABELS = np.array(["cat", "dog"] * 50, "S")


def table():
    rows = np.zeros(100, [("a", "f4"), ("b", "f4"), ("label", "S3")])
    rows["label"] = LABELS
    return rows


FILES = {
    "an array": ({"x": ROWS, "label": LABELS}, "x", "label"),
    "beside a column that is not called a target": ({"x": ROWS, "age": np.arange(100), "label": LABELS}, "x", "label"),
    "a member of a table": ({"t": table()}, ["t/a", "t/b"], "t/label"),
    "arrays of each split": (
        {"train/x": ROWS, "train/label": LABELS, "val/x": ROWS[:20], "val/label": LABELS[:20]},
        "{split}/x",
        "{split}/label",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_call_gives_class_numbers(make_h5, name):
    arrays, x_key, y_key = FILES[name]
    advice = inspect_file(make_h5(arrays)).advice
    settings = advice.settings
    assert (settings["x_key"], settings["y_key"], settings["decode"]) == (x_key, y_key, {y_key: "category"})
    assert ("split" in settings) == ("{split}" not in y_key)
    assert any("stratify_key" in reason for reason in advice.reasons) == ("split" in settings)
    module = eval(advice.python, {"LazyH5DataModule": LazyH5DataModule})
    module.setup("fit")
    for loader in (module.train_dataloader(), module.val_dataloader()):
        _, y = next(iter(loader))
        assert y.dtype == torch.int64
        assert set(y.tolist()) <= {0, 1}
    module.teardown()


@pytest.mark.parametrize(
    "column", [np.array([f"n{at}" for at in range(100)], "S"), np.array(["2020-01-31"] * 100, "S")]
)
def test_text_that_names_each_row_or_has_dates_is_no_target(make_h5, column):
    settings = inspect_file(make_h5({"x": ROWS, "label": column})).advice.settings
    assert not {"y_key", "decode"} & settings.keys()


def text_of_groups(folder, shape):
    """Groups of one array each, with a text called label: an attribute, a scalar, an array of one or of each step."""
    with h5py.File(folder / "groups.h5", "w") as file:
        for number in range(20):
            group = file.create_group(f"rec_{number}")
            group["signal"] = np.zeros((40 + number, 4), "f4")
            text = ("cat", "dog")[number % 2]
            if shape is None:
                group.attrs["label"] = text
            else:
                group["label"] = {(): text, (1,): [text]}.get(shape, [text] * (40 + number))
    return folder / "groups.h5"


def attributes_of_arrays(folder, n_rows):
    with h5py.File(folder / "arrays.h5", "w") as file:
        for number in range(20):
            file[f"rec_{number}"] = np.zeros((n_rows + number, 4), "f4")
            file[f"rec_{number}"].attrs["class"] = ("cat", "dog")[number % 2]
    return folder / "arrays.h5"


def attributes_of_files(folder, key):
    (folder / "files").mkdir()
    for number in range(20):
        with h5py.File(folder / "files" / f"{number}.h5", "w") as file:
            file["eeg"] = np.zeros((4, 400 + number), "f4")
            file.attrs["sfreq"] = 100.0
            (file if key == "@target" else file["eeg"]).attrs["target"] = ("cat", "dog")[number % 2]
    return folder / "files"


def episodes_in_one_array(folder, n_texts):
    with h5py.File(folder / "episodes.h5", "w") as file:
        file["obs"], file["episode_lengths"] = np.zeros((200, 4), "f4"), np.full(20, 10)
        file["labels"] = ["cat", "dog"] * (n_texts // 2)
    return folder / "episodes.h5"


LAYOUTS = {
    "attributes of groups": (text_of_groups, None, "@label"),
    "scalars in groups": (text_of_groups, (), "label"),
    "arrays of one text in groups": (text_of_groups, (1,), "label"),
    "texts of steps in groups": (text_of_groups, ("steps",), "label"),
    "attributes of arrays": (attributes_of_arrays, 40, "@class"),
    "attributes of files": (attributes_of_files, "@target", "@target"),
    "attributes of an array in each file": (attributes_of_files, "eeg@target", "eeg@target"),
    "texts of episodes": (episodes_in_one_array, 20, "labels"),
    "texts of steps of episodes": (episodes_in_one_array, 200, "labels"),
}


def call_that_is_printed(capsys, path):
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(path)])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    return re.match(r"LazyH5DataModule\(\n(?:    .*\n)+\)$", text, re.MULTILINE)[0], " ".join(text.split())


@pytest.mark.parametrize("name", LAYOUTS)
def test_text_of_segments_is_the_target_in_the_call_that_is_printed(tmp_path, capsys, name):
    write, variant, y_key = LAYOUTS[name]
    call, text = call_that_is_printed(capsys, write(tmp_path, variant))
    assert f"y_key={y_key!r}," in call
    assert f"decode={{{y_key!r}: 'category'}}," in call
    assert f"{y_key!r}, a target by its name" in text or f"{y_key!r} is a target by its name" in text
    module = eval(call, {"LazyH5DataModule": LazyH5DataModule})
    module.setup("fit")
    for _, y, *_lengths in module.train_dataloader():
        assert y.dtype == torch.int64
        assert set(y.unique().tolist()) <= {0, 1}
    assert module.categories == {y_key: ("cat", "dog")}
    module.teardown()


@pytest.mark.parametrize("values", [[f"subject {number}" for number in range(20)], ["2020-01-31", "2020-02-01"] * 10])
def test_text_that_names_each_segment_or_has_dates_is_no_target(tmp_path, values):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, value in enumerate(values):
            file[f"rec_{number}/signal"] = np.zeros((40 + number, 4), "f4")
            file[f"rec_{number}"].attrs["label"] = value
            file[f"rec_{number}/labels"] = value
    assert "y_key" not in inspect_file(tmp_path / "a.h5").advice.settings


def test_actions_have_no_class_of_their_episode_as_target(tmp_path):
    path = text_of_groups(tmp_path, None)
    with h5py.File(path, "a") as file:
        for group in file.values():
            group["actions"] = np.zeros((len(group["signal"]), 2), "f4")
    settings = inspect_file(path).advice.settings
    assert "y_key" not in settings
    assert "actions" in settings["x_key"]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("name", ["rec_{}", "rec_{}/signal", "records/rec_{}/signal"])
def test_a_table_beside_one_file_has_the_targets_of_its_segments(tmp_path, capsys, name, suffix):
    pa = pytest.importorskip("pyarrow")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(20):
            file[name.format(number)] = np.zeros((40 + number, 4), "f4")
    columns = {
        "id": [f"rec_{number}" for number in range(20)],
        "patient": [number // 2 for number in range(20)],
        "label": ["cat", "dog"] * 10,
    }
    if suffix == "parquet":
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table(columns), tmp_path / "labels.parquet")
    else:
        lines = [columns.keys(), *zip(*columns.values(), strict=True)]
        separator = "," if suffix == "csv" else "\t"
        (tmp_path / f"labels.{suffix}").write_text("\n".join(separator.join(map(str, line)) for line in lines))
    call, text = call_that_is_printed(capsys, tmp_path / "a.h5")
    assert "y_key='table/label'," in call
    assert "'on': {'id': '@name'}" in call
    assert "'group_key': 'table/patient'" in call
    assert f"labels.{suffix}' has a line for each segment, by its column 'id'" in text
    module = eval(call, {"LazyH5DataModule": LazyH5DataModule})
    module.setup("fit")
    assert module.categories == {"table/label": ("cat", "dog")}
    assert {int(y) for _, ys, *_lengths in module.train_dataloader() for y in ys} == {0, 1}
    module.teardown()


def test_a_table_that_lacks_a_segment_or_cannot_be_read_is_no_target(tmp_path):
    pytest.importorskip("pyarrow")
    path = attributes_of_arrays(tmp_path, 40)
    with h5py.File(path, "a") as file:
        for array in file.values():
            del array.attrs["class"]
    lines = ["id,label", *(f"rec_{number},{number % 2}" for number in range(19))]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and no table")
    assert "y_key" not in inspect_file(path).advice.settings


def test_attributes_of_the_root_are_listed(tmp_path, capsys):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((20, 4), "f4")
        values = {"site": "Berlin", "sfreq": 100.0, "gains": [1, 2], "many": np.arange(1000), "none": h5py.Empty("f4")}
        file.attrs.update(values | {"two\nlines": "a\nb", "bytes": np.bytes_("b"), "array": file["x"].ref})
    attributes = inspect_file(tmp_path / "a.h5").attributes
    assert attributes == {
        "array": "<HDF5 object reference>",
        "bytes": "'b'",
        "gains": "[1, 2]",
        "many": "(1000,) int64",
        "none": "empty",
        "sfreq": "100.0",
        "site": "'Berlin'",
        "two\nlines": "'a\\nb'",
    }
    _, text = call_that_is_printed(capsys, tmp_path / "a.h5")
    assert "/ @array <HDF5 object reference> @bytes 'b'" in text
    assert "... and 2 more of 8 attributes; --json has all of them" in text


def test_one_field_is_stored_and_several_are(tmp_path):
    reasons = []
    for names in (["signal"], ["signal", "other"]):
        path = tmp_path / f"{len(names)}.h5"
        with h5py.File(path, "w") as file:
            for number in range(20):
                for name in names:
                    file[f"rec_{number}/{name}"] = np.zeros((40 + number, 4), "f8")
                file[f"rec_{number}"].attrs["age"] = number % 3
        reasons.append(" ".join(inspect_file(path).advice.reasons))
    assert "since 'signal' is stored as float64" in reasons[0]
    assert "since 'signal', 'other' are stored as" in reasons[1] or "'other', 'signal' are stored as" in reasons[1]
    assert "The segments have 40 to 59 steps." in reasons[0]
