"""Columns of text as targets: inspect suggests class numbers, by the call that makes them."""

import numpy as np
import pytest
import torch

from lightning_h5 import LazyH5DataModule
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
