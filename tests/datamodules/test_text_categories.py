"""Text that is decoded as a category is a class number, the same in all files and splits."""

import h5py
import numpy as np
import pytest
import torch

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5LazyDataset,
    H5ResumeError,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
)

MODULES = pytest.mark.parametrize("module", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
NAMES = {"a": ["b", "a", "b", "c"], "b": ["z", "a", "b"], "val": ["zz", "a", "0"]}
CLASSES = ("a", "b", "c", "z", "0", "zz")  # names of training come first
STEPS = {"demo_1": ["up", "down", "up", "up"], "demo_2": ["down", "stay", "up"], "demo_10": ["up"] * 5}
TASKS = {"demo_1": "pick", "demo_2": "place", "demo_10": "pick"}


def text(values, storage):
    return np.array(values, "S4") if storage == "fixed" else np.array(values, object)


@pytest.fixture(params=["fixed", "any length"])
def paths(tmp_path, request):
    for name, values in NAMES.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.ones((len(values), 2), "f4")
            file["y"] = text(values, request.param)
            table = np.zeros(len(values), [("kind", "S4"), ("mass", "f4")])
            table["kind"] = values
            file["table"] = table
    return {name: str(tmp_path / f"{name}.h5") for name in NAMES}


@pytest.fixture
def robots(tmp_path):
    for file_name, demos in (("first.h5", ["demo_1", "demo_2"]), ("second.h5", ["demo_10"])):
        with h5py.File(tmp_path / file_name, "w") as file:
            for demo in demos:
                group = file.create_group(f"data/{demo}")
                group["x"] = np.ones((len(STEPS[demo]), 2), "f4")
                group["move"] = np.array(STEPS[demo], object)
                group["task"] = TASKS[demo]
                group.attrs["task"] = TASKS[demo]
    lines = [f"{demo},{task}\n" for demo, task in TASKS.items()]
    (tmp_path / "demos.csv").write_text("demo,task\n" + "".join(lines))
    return tmp_path


def batch_of(module, stage="fit"):
    module.setup(stage)
    loader = {"fit": module.train_dataloader, "validate": module.val_dataloader}[stage]()
    return next(iter(loader))


def classes_of(*names):
    return [CLASSES.index(value) for name in names for value in NAMES[name]]


@MODULES
@pytest.mark.parametrize("key", ["y", "table/kind"])
def test_classes_are_the_same_in_all_files_and_splits(paths, module, key):
    for stages in (("fit",), ("validate", "fit")):
        arguments = {"x_key": "x", "y_key": key, "decode": {key: "category"}, "shuffle": False}
        data = module([paths["a"], paths["b"]], paths["val"], **arguments)
        for stage in stages:
            data.setup(stage)
        (_, y), (_, y_val) = (next(iter(loader)) for loader in (data.train_dataloader(), data.val_dataloader()))
        assert y.dtype == torch.int64
        assert (y.tolist(), y_val.tolist()) == (classes_of("a", "b"), classes_of("val"))
        assert data.categories == {key: CLASSES}


@MODULES
def test_an_input_a_field_and_a_share_of_rows_have_classes(paths, module):
    files = [paths["a"], paths["b"]]
    fields = batch_of(module(files, fields={"x": "x", "kind": "y"}, decode={"kind": "category"}, shuffle=False))
    assert fields["kind"].tolist() == classes_of("a", "b")
    x = batch_of(module(files, x_key="y", decode={"y": "category"}, x_dtype="float32", shuffle=False))
    assert x.tolist() == classes_of("a", "b")
    data = module(files, x_key="x", y_key="y", decode={"y": "category"}, split=0.5)
    data.setup("fit")
    assert data.categories == {"y": CLASSES[:4]}


@MODULES
def test_filters_compare_names_and_labels_are_classes(paths, module):
    arguments = {"x_key": "x", "y_key": "y", "decode": {"y": "category"}}
    assert batch_of(module(paths["a"], where={"y": "b"}, **arguments))[1].tolist() == [1, 1]
    assert batch_of(module(paths["a"], label=2, **arguments))[1].tolist() == [2]


@MODULES
@pytest.mark.parametrize("key", ["@task", "task", "table/task"])
def test_segments_have_a_class_of_an_attribute_a_scalar_or_a_column(robots, module, key):
    table = {"path": robots / "demos.csv", "on": {"demo": "@name"}} if key == "table/task" else None
    arguments = {"x_key": "x", "y_key": key, "decode": {key: "category"}, "segments": "data/*", "window": 2}
    arguments |= {"table": table, "shuffle": False}
    _, y = batch_of(module([robots / "first.h5", robots / "second.h5"], **arguments))
    assert y.tolist() == [0, 0, 1, 0, 0]
    _, y = batch_of(module(robots / "second.h5", robots / "first.h5", **arguments), "validate")
    classes = {"pick": 0, "place": 1}
    assert y.tolist() == [classes[TASKS[demo]] for demo in ("demo_1", "demo_1", "demo_2")]


@MODULES
def test_steps_have_classes_in_rows_windows_and_segments(robots, module):
    classes = [[["down", "stay", "up"].index(move) for move in moves] for moves in STEPS.values()]
    files, decode = [robots / "first.h5", robots / "second.h5"], {"move": "category"}
    arguments = {"fields": ["x", "move"], "decode": decode, "segments": "data/*", "shuffle": False}
    rows = batch_of(module(files, sample="row", **arguments))
    assert rows["move"].tolist() == [number for of_demo in classes for number in of_demo]
    windows = batch_of(module(files, window=[0, 2], **arguments))
    assert windows["move"].tolist() == [of_demo[at : at + 2] for of_demo in classes for at in range(len(of_demo) - 1)]
    segments = batch_of(module(files, sample="segment", collate_fn="list", **arguments))
    assert [moves.tolist() for moves in segments["move"]] == classes


@MODULES
def test_arrays_of_each_split_have_the_classes_of_training(make_h5, module):
    path = make_h5(
        {
            "train/x": np.zeros((3, 1), "f4"),
            "train/y": np.array(["q", "p", "q"], h5py.string_dtype()),
            "val/x": np.zeros((2, 1), "f4"),
            "val/y": np.array(["a", "q"], h5py.string_dtype()),
        }
    )
    data = module(path, x_key="{split}/x", y_key="{split}/y", decode={"{split}/y": "category"})
    _, y = batch_of(data, "validate")
    assert y.tolist() == [2, 1]


@MODULES
def test_rows_to_predict_need_no_target_and_training_files_may_be_left_out(paths, module, tmp_path):
    with h5py.File(tmp_path / "new.h5", "w") as file:
        file["x"] = np.ones((3, 2), "f4")
    (tmp_path / "broken.h5").write_text("no HDF5")
    arguments = {"x_key": "x", "y_key": "y", "decode": {"y": "category"}, "on_bad_file": "skip", "shuffle": False}
    files = [tmp_path / "broken.h5", paths["a"], paths["b"]]
    data = module(files, paths["val"], predict_path=tmp_path / "new.h5", **arguments)
    data.setup("predict")
    assert next(iter(data.predict_dataloader())).shape == (3, 2)
    _, y = batch_of(data, "validate")
    assert y.tolist() == classes_of("val")


@MODULES
@pytest.mark.parametrize("key", ["move", "@task"])
def test_segments_to_predict_have_the_target_that_files_have(robots, module, key):
    path = robots / "first.h5"
    data = module(path, predict_path=path, x_key="x", y_key=key, decode={key: "category"}, segments="data/*", window=2)
    data.setup("predict")
    _, y = next(iter(data.predict_dataloader()))
    assert y.tolist() == {"move": [[2, 0], [2, 2], [0, 1]], "@task": [0, 0, 1]}[key]


def test_datasets_decode_classes(paths):
    for kind in (H5LazyDataset, RankMemCachedH5Dataset):
        dataset = kind([paths["a"], paths["b"]], "x", "y", decode={"y": "category"})
        assert [int(dataset[at][1]) for at in range(len(dataset))] == classes_of("a", "b")


def test_a_checkpoint_refuses_other_classes(paths):
    arguments = {"x_key": "x", "y_key": "y", "decode": {"y": "category"}}
    data = LazyH5DataModule(paths["a"], **arguments)
    batch_of(data)
    state = {"categories": data._categories.digests()}
    other = LazyH5DataModule(paths["val"], **arguments)
    batch_of(other)
    with pytest.raises(H5ResumeError, match="'y' stood for 3 other categories"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x_key": "x", "decode": {"x": "category"}}, "'x' in .* decodes text"),
        ({"x_key": {"x": "x", "y": ["y", "y2"]}, "decode": {"y": "category"}}, "Name each as a separate field"),
        ({"x_key": "x", "y_key": "y", "decode": {"y": "categories"}}, "Did you mean 'category'"),
    ],
)
def test_what_has_no_classes_is_an_error(paths, arguments, message):
    with pytest.raises(H5ValueError, match=message):
        LazyH5DataModule(paths["a"], **arguments).setup("fit")
