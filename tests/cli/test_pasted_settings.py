"""The settings that ``inspect`` and ``bench`` print train an ordinary float32 model as they are."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from factories import Stored
from jsonargparse import ActionConfigFile
from lightning_models import Ordinary

import lightning_h5.datamodules
from lightning_h5 import inspect_file
from lightning_h5._lightning import PACKAGE, LightningDataModule
from lightning_h5.cli import main

BENCH = ["--seconds", "0.01", "--rounds", "1", "--num-workers", "0"]


def packed(values, rows=16):
    return Stored(values, "chunked", (rows, *values.shape[1:]), {"compression": "gzip"})


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape)


def write_float64(folder):
    return {"x": packed(normal(200, 8)), "y": normal(200)}


def write_images(folder):
    rng = np.random.default_rng(0)
    return {"images": packed(rng.integers(0, 256, (300, 3, 8, 8), "u1")), "labels": rng.integers(0, 10, 300, "u1")}


def write_recordings(folder):
    """Three recordings of different lengths, named by text."""
    names = np.repeat(np.array(["night 1", "night 2", "night 3"], object), [150, 30, 60])
    return {
        "signal": packed(normal(240, 2, 16).astype("f4")),
        "recording_id": Stored(names, dtype=h5py.string_dtype()),
        "stage": np.arange(240, dtype="u1") % 5,
    }


def write_table(folder):
    rows = np.zeros(120, [("energy", "f8"), ("hits", "i4"), ("event_id", "i8"), ("name", "S4"), ("class", "u1")])
    rows["energy"], rows["class"] = normal(120), np.arange(120) % 3
    return {"events": rows}


def write_text(folder):
    labels = np.array(["cat", "dog"] * 50, object)
    return {"features": normal(100, 6).astype("f4"), "label": Stored(labels, dtype=h5py.string_dtype())}


def write_sorted(folder):
    return {"x": packed(normal(1000, 4)), "label": np.sort(np.arange(1000, dtype="i4") % 20)}


def write_many(folder):
    for at in range(5):
        with h5py.File(folder / f"{at}.h5", "w") as file:
            file["x"], file["target"], file["subject"] = normal(40, 5), np.arange(40) % 4, np.full(40, at)


def write_one_array(folder):
    return {"data": np.arange(3000, dtype="i2").reshape(300, 10)}


def write_inputs(folder):
    return {
        "camera": np.zeros((90, 16, 16), "u1"),
        "lidar": normal(90, 30),
        "speed": normal(90),
        "label": np.arange(90, dtype="i8") % 2,
    }


def write_anndata(folder):
    with h5py.File(folder / "cells.h5ad", "w") as file:
        file["X"] = normal(200, 50).astype("f4")
        text = h5py.string_dtype()
        for name, categories in (("cell_type", ["B", "T", "NK"]), ("donor", ["a", "b", "c", "d"])):
            file[f"obs/{name}/codes"] = (np.arange(200) // 7 % len(categories)).astype("i1")
            file.create_dataset(f"obs/{name}/categories", data=categories, dtype=text)
        file.create_dataset("obs/_index", data=[f"cell {at}" for at in range(200)], dtype=text)
        file.create_dataset("var/_index", data=[f"gene {at}" for at in range(50)], dtype=text)
        file["obsm/X_pca"] = normal(200, 10)


def write_few(folder):
    return {"x": normal(12, 3), "y": np.arange(12) % 2}


FILES = {
    "float64": write_float64,
    "uint8 images": write_images,
    "grouped recordings": write_recordings,
    "table": write_table,
    "text targets": write_text,
    "sorted labels": write_sorted,
    "many files": write_many,
    "one array": write_one_array,
    "several inputs": write_inputs,
    "AnnData": write_anndata,
    "twelve rows": write_few,
}


@pytest.fixture(params=FILES)
def path(request, make_h5, tmp_path):
    return write(request.param, make_h5, tmp_path)


def write(name, make_h5, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    arrays = FILES[name](folder)
    if arrays is not None:
        return make_h5(arrays, name="data/file.h5")
    found = sorted(map(str, folder.iterdir()))
    return str(folder) if len(found) > 1 else found[0]


@pytest.fixture
def run(capsys):
    """Runs a verb; its standard output."""

    def runs(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert (ended.value.code, err) == (0, "")
        return out

    return runs


def pasted(out):
    """The YAML at the end of what a verb printed, comments and all."""
    return re.search(r"(?:^#.*\n)*^data:\n(?:.*\n?)*", out, re.MULTILINE)[0]


def settings_of(out):
    return flat(yaml.safe_load(pasted(out))["data"]["init_args"])


def flat(settings):
    """Settings with the fields of ``split`` beside the others."""
    split = settings.get("split", {})
    fields = split if hasattr(split, "keys") else {"val_fraction": split}
    return {name: value for name, value in settings.items() if name != "split"} | {k: fields[k] for k in fields}


def fit(tmp_path, text, monkeypatch):
    """Trains an ordinary model for a step; what it got."""
    monkeypatch.setattr(Ordinary, "batches", [])
    config = tmp_path / "config.yaml"
    trainer = (
        "trainer: {fast_dev_run: true, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}\n"
    )
    config.write_text(f"seed_everything: 1\n{trainer}model: {{class_path: lightning_models.Ordinary}}\n{text}")
    main(["fit", "--config", str(config)])
    return Ordinary.batches


@pytest.mark.wide
def test_what_inspect_prints_trains_as_it_is(path, run, tmp_path, monkeypatch):
    text = pasted(run("inspect", path))
    batches = fit(tmp_path, text, monkeypatch)
    assert len(batches) == 2  # of training and validation
    assert all(x.dtype.is_floating_point for x, _ in batches)


@pytest.mark.wide
def test_what_bench_prints_trains_as_it_is_and_agrees_with_inspect(path, run, tmp_path, monkeypatch):
    inspected = settings_of(run("inspect", path))
    x_keys = inspected["x_key"] if isinstance(inspected["x_key"], list) else [inspected["x_key"]]
    keys = [part for key in x_keys for part in ("--x-key", key)]
    keys += ["--y-key", inspected["y_key"]] if "y_key" in inspected else []
    text = pasted(run("bench", path, *keys, *BENCH))
    benched = flat(yaml.safe_load(text)["data"]["init_args"])
    chosen = {"files", "shuffle", "num_workers"}
    assert {k: v for k, v in benched.items() if k not in chosen} == {
        k: v for k, v in inspected.items() if k not in chosen
    }
    assert len(fit(tmp_path, text, monkeypatch)) == 2


def write_episodes(folder):
    for at in range(3):
        with h5py.File(folder / f"{at}.h5", "w") as file:
            file["obs"], file["action"] = normal(50, 14).astype("f4"), normal(50, 14).astype("f4")


def test_settings_for_files_that_look_like_images_say_that_rows_are_samples(run, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    write_episodes(folder)
    text = pasted(run("bench", folder, "--x-key", "obs", "--y-key", "action", *BENCH))
    assert yaml.safe_load(text)["data"]["init_args"]["sample"] == "row"
    comments = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    assert "sample: row takes an index along axis 0 as a sample. All arrays have the shape (50, 14)" in comments
    assert "sample" not in settings_of(run("inspect", folder))  # the input alone, which is taken
    arguments = yaml.safe_load(text)["data"]["init_args"]
    datamodule = getattr(lightning_h5, yaml.safe_load(text)["data"]["class_path"])
    datamodule(**arguments).setup("fit")
    with pytest.raises(lightning_h5.H5ValueError, match="sample='row'"):
        datamodule(**{name: value for name, value in arguments.items() if name != "sample"}).setup("fit")


def test_json_has_the_same_settings(path, run):
    report = json.loads(run("inspect", path, "--json"))
    advice = report["advice"] if "advice" in report else report["example"]["advice"]
    assert {"class_path": advice["datamodule"], "init_args": advice["settings"]} == yaml.safe_load(
        pasted(run("inspect", path))
    )["data"]


EXPECTED = {
    "float64": {"x_key": "x", "y_key": "y", "x_dtype": "float32", "y_dtype": "float32"},
    "uint8 images": {"x_dtype": "float32", "y_dtype": "int64", "stratify_key": "labels"},
    "grouped recordings": {"y_key": "stage", "group_key": "recording_id", "stratify_key": "stage"},
    "table": {"x_key": ["events/energy", "events/hits"], "y_key": "events/class", "x_dtype": "float32"},
    "text targets": {"y_key": "label", "decode": {"label": "category"}, "stratify_key": "label"},
    "sorted labels": {"stratify_key": "label", "y_dtype": "int64"},
    "many files": {"group_key": "subject", "y_key": "target", "x_dtype": "float32"},
    "one array": {"x_key": "data", "x_dtype": "float32", "batch_size": 64},
    "several inputs": {"x_key": "camera", "y_key": "label", "x_dtype": "float32"},
    "AnnData": {"x_key": "X", "y_key": "obs/cell_type/codes", "group_key": "obs/donor/codes", "y_dtype": "int64"},
    "twelve rows": {"batch_size": 2},
}


@pytest.mark.parametrize("name", FILES)
def test_the_settings_suit_the_file(make_h5, tmp_path, run, name):
    found = settings_of(run("inspect", write(name, make_h5, tmp_path)))
    assert found.items() >= EXPECTED[name].items()
    assert found["batch_size"] in (1, 2, 4, 8, 16, 32, 64)
    absent = {"text targets": {"x_dtype"}, "one array": {"y_key", "group_key"}, "AnnData": {"x_dtype"}}
    assert not absent.get(name, set()) & found.keys()


def module_of(out):
    config = yaml.safe_load(pasted(out))["data"]
    module = getattr(lightning_h5, config["class_path"])(**config["init_args"], with_index=True)
    module.setup("fit")
    return module


@pytest.mark.parametrize("name", ["sorted labels", "uint8 images", "grouped recordings", "AnnData", "many files"])
def test_training_and_validation_have_all_classes_shuffled_and_no_group_of_both(make_h5, tmp_path, run, name):
    path = write(name, make_h5, tmp_path)
    out = run("inspect", path)
    module = module_of(out)
    train, val = (list(loader) for loader in (module.train_dataloader(), module.val_dataloader()))
    classes = [set(np.concatenate([y for _, y, _ in batches]).tolist()) for batches in (train, val)]
    assert classes[0] == classes[1]
    rows = [np.concatenate([index for *_, index in batches]) for batches in (train, val)]
    assert (np.diff(rows[0]) < 0).any()
    settings = settings_of(out)
    if key := settings.get("group_key"):
        files = [path] if Path(path).is_file() else sorted(Path(path).iterdir())
        groups = np.concatenate([h5py.File(file)[key][:] for file in files]).astype(str)
        n_rows = len(groups)
        (train,), (val,) = module._cut.parts["train"], module._cut.parts["val"]
        assert not {*groups[train].tolist()} & {*groups[val].tolist()}
        assert len(train) + len(val) == n_rows
    module.teardown("fit")


def test_text_that_does_not_repeat_is_left_out_with_the_call_that_takes_it(make_h5, run):
    path = make_h5(features=normal(100, 6), label=np.array([f"n{number}" for number in range(100)], "S"))
    text = pasted(run("inspect", path))
    assert text.startswith("# 'label' is text and left out")
    assert "decode={'label': 'category'}" in " ".join(text.replace("#", " ").split())


def test_codes_with_missing_values_are_no_target(make_h5, run):
    codes = np.arange(100, dtype="i1") % 4 - 1
    path = make_h5({"X": normal(100, 5).astype("f4"), "obs/cell_type/codes": codes})
    assert "y_key" not in settings_of(run("inspect", path))


@pytest.mark.wide
def test_rows_of_50_mb_come_one_at_a_time(make_h5, run):
    stored = Stored(np.zeros((1, 1), "f4"), "chunked", (1, 1))
    path = make_h5({"x": stored})
    with h5py.File(path, "a") as file:  # without writing 600 MB
        file.create_dataset("volume", (12, 12 << 20), "f4", chunks=(1, 12 << 20), compression="gzip")
        file["volume"][:] = 0
        del file["x"]
    assert settings_of(run("inspect", path))["batch_size"] == 1


def test_a_column_that_cannot_be_read_costs_no_more_than_the_split_by_it(make_h5, run):
    path = make_h5({"x": normal(50, 4), "label": packed(np.arange(50) % 5, rows=50)})
    with h5py.File(path) as file:
        place = file["label"].id.get_chunk_info(0).byte_offset
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(b"\xff" * 8)
    found = settings_of(run("inspect", path))
    assert found["y_key"] == "label"
    assert "stratify_key" not in found


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_of_sentences_fit_the_terminal(path, run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    printed = run("inspect", path)
    sentences = printed[printed.index("\nuse ") : printed.index("\n\n", printed.index("\nuse "))].splitlines()
    assert max(map(len, sentences)) <= columns


NUMBERS = ["1e3", "1_0e-2", "12", "0x1f", "0o17", ".5", "-1", ".inf", "nan", "1:30", "2020-01-01"]
WORDS = ["no", "true", "null", "~", "=", "<<", "it's", '"q"', "x*", "ü", "a\tb", "a\nb", "x # y"]
MARKS = [
    "# x",
    "&a",
    "[a]",
    "- x",
    "-",
    "---",
    "?",
    "!x",
    "%a",
    "@a",
    "|",
    "> a",
    "{a}",
    "x:",
    "a,b",
    "$HOME",
    "? a: b",
]
UNNAMEABLE = ["x: y", "{a: b}", "x :", "a{split}"]


def parsed(text, tmp_path):
    """What the parser of LightningCLI makes of a configuration."""
    parser = import_module(f"{PACKAGE}.cli").LightningArgumentParser()
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    config = tmp_path / "data.yaml"
    config.write_text(text)
    return parser.parse_args(["--config", str(config)]).data.init_args


@pytest.mark.wide
@pytest.mark.parametrize("name", [*NUMBERS, *WORDS, *MARKS, *UNNAMEABLE])
def test_a_name_in_pasted_settings_is_that_array_or_is_left_out_with_a_comment(make_h5, tmp_path, run, name):
    groups = np.arange(200) // 10
    path = make_h5({name: normal(200, 4), "y": np.arange(200) % 2})
    by_group = make_h5({"x": normal(200, 4), f"{name} patient": groups, name: np.arange(200) % 2})
    for file, arguments in ((path, ["x_key"]), (by_group, ["y_key", "group_key", "stratify_key"])):
        text = pasted(run("inspect", file))
        settings, found = flat(inspect_file(file).advice.settings), flat(parsed(text, tmp_path).as_dict())
        for argument in settings.keys() - {"batch_size", "x_dtype", "y_dtype", "val_fraction"}:
            if found[argument] is None:
                assert re.search(rf"^# {argument} is left out: ", text, re.MULTILINE)
            else:
                assert isinstance(found[argument], str)
                assert found[argument].removeprefix("/") == settings[argument].removeprefix("/")
        if name in UNNAMEABLE:
            assert all(found[argument] is None for argument in arguments if settings.get(argument) == name)
        else:
            assert None not in (found[argument] for argument in arguments if settings.get(argument) == name)


def test_a_file_whose_name_is_a_mapping_in_yaml_is_that_file(make_h5, tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_h5({"x": normal(40, 4)}, name="a: b.h5")
    assert parsed(pasted(run("inspect", "a: b.h5")), tmp_path).train_path == ["a: b.h5"]


def test_a_name_that_needs_another_form_trains(make_h5, tmp_path, run, monkeypatch):
    path = make_h5({"null": normal(200, 4), "y": np.arange(200) % 2})
    assert len(fit(tmp_path, pasted(run("inspect", path)), monkeypatch)) == 2
