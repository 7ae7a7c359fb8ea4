"""``python -m lightning_h5``."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import h5py
import lightning_models
import numpy as np
import pytest
import yaml
from processes import run_program

from lightning_h5 import (
    BadRowOptions,
    FileOptions,
    H5ValueError,
    LazyH5DataModule,
    ShuffleOptions,
    SplitOptions,
    WeightOptions,
)
from lightning_h5.cli import main

ROOT = Path(__file__).parents[2]
QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]


@pytest.fixture
def arguments(make_h5, tmp_path):
    path = make_h5({"x": np.arange(40, dtype="f4"), "y": np.arange(40)})
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
seed_everything: 3
trainer: {{max_epochs: 1, default_root_dir: {tmp_path}}}
model: {{class_path: lightning_models.Recorder}}
data:
  class_path: LazyH5DataModule
  init_args:
    train_path: [{path}]
    val_path: {path}
    test_path: {path}
    predict_path: {path}
    x_key: {{signal: x}}
    y_key: y
    x_dtype: float16
    shuffle:
      mode: global
      buffer: 64 MiB
    with_index: true
"""
    )
    return ["--config", str(config), *QUIET]


@pytest.mark.wide
@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_each_verb_runs_from_a_config_with_the_short_name(verb, arguments, capsys):
    main([verb, *arguments])
    out = capsys.readouterr().out
    assert re.search(rf"^ .* {'train' if verb == 'fit' else verb}\b", out, re.MULTILINE)
    assert re.findall(r"^rows +([\d,]+)", out, re.MULTILINE)[0] == "40"


def test_a_config_can_name_a_transform(arguments, capsys):
    main(["fit", *arguments, "--data.x_key=x", "--data.transform=torch.nn.functional.softsign", "--data.num_workers=0"])
    assert "train" in capsys.readouterr().out


@pytest.mark.wide
def test_what_print_config_prints_is_a_config(arguments, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--print_config"])
    text = capsys.readouterr().out
    assert "buffer: 64 MiB" in text
    again = tmp_path / "again.yaml"
    again.write_text(text)
    main(["fit", "--config", str(again)])


def test_a_printed_config_is_complete_and_explains_each_argument(arguments, capsys):
    pytest.importorskip("ruamel.yaml", reason="the oldest jsonargparse explains some arguments alone")
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--print_config"])
    lines = capsys.readouterr().out.splitlines()
    names = inspect.signature(LazyH5DataModule).parameters
    where = {line.strip().partition(":")[0]: at for at, line in enumerate(lines) if not line.lstrip().startswith("#")}
    assert set(names) <= set(where)
    assert [name for name in names if not lines[where[name] - 1].lstrip().startswith("# ")] == []


def test_the_help_of_the_data_module_explains_every_argument(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--data.help=LazyH5DataModule"])
    text = capsys.readouterr().out
    assert "Untyped" not in text
    for name in ("train_path", "x_key", "split", "shuffle", "files", "workers"):
        assert f"--data.init_args.{name}" in text or f"--data.{name}" in text


def test_the_help_of_the_data_module_names_the_fields_of_option_objects(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--data.help=LazyH5DataModule"])
    text = capsys.readouterr().out
    for name in inspect.signature(SplitOptions).parameters:
        assert f"``{name}``" in text


@pytest.mark.parametrize(
    ("option", "name", "expected"),
    [
        ("split.val_fraction=0.1", "split", SplitOptions(val_fraction=0.1)),
        ("split=0.1", "split", SplitOptions(val_fraction=0.1)),
        ("split=[0.7, 0.1, 0.2]", "split", SplitOptions(val_fraction=0.1, test_fraction=0.2)),
        ("shuffle.buffer=1 GiB", "shuffle", ShuffleOptions(mode="global", buffer="1 GiB")),
        ("shuffle=chunks", "shuffle", ShuffleOptions(mode="chunks")),
        ("weights=w", "weights", WeightOptions(weight_key="w")),
        ("files.mmap=true", "files", FileOptions(mmap=True)),
        ("on_bad_row=skip", "on_bad_row", BadRowOptions()),
        ("on_bad_row={limit: 7, stages: [train, val]}", "on_bad_row", BadRowOptions(limit=7, stages=("train", "val"))),
        ("on_bad_row.limit=7", "on_bad_row", BadRowOptions(limit=7)),
    ],
)
def test_option_objects_are_given_on_the_command_line(option, name, expected, arguments, capsys):
    with pytest.raises(SystemExit):
        main(["fit", *arguments, f"--data.{option}", "--print_config"])
    given = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"][name]
    given = given.get("init_args", given) if isinstance(given, dict) else given
    assert type(expected).parse(given, name) == expected


def test_the_prefetch_depth_is_given_on_the_command_line(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--data.prefetch_factor=3", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["prefetch_factor"] == 3


def test_statistics_are_given_on_the_command_line(arguments, capsys):
    for normalize in ("stats.json", {"x": {"mean": [1.0, 2.0], "std": [3.0, 4.0]}}):
        with pytest.raises(SystemExit):
            main(["fit", *arguments, f"--data.normalize={normalize}", "--print_config"])
        assert yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["normalize"] == normalize


def test_an_unknown_field_of_an_option_object_is_named(arguments, capsys):
    with pytest.raises((SystemExit, ValueError)) as ended:
        main(["fit", *arguments, "--data.split.val_fracton=0.1"])
    assert "val_fracton" in f"{ended.value}{capsys.readouterr().err}"  # older jsonargparse says so in its own words
    for wrong in ("val_fracton", "val"):
        with pytest.raises(H5ValueError, match=rf"split has no field '{wrong}'\. Did you mean 'val_fraction'\?"):
            LazyH5DataModule("x.h5", split={wrong: 0.1})


def test_an_unknown_argument_is_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", *arguments, "--data.batchsize=3"])
    assert ended.value.code == 2
    assert "batchsize" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("batchsize: 3", "has no argument 'batchsize'. Did you mean 'batch_size'?"),
        ("val_fraction: 0.1", "it is a field of an option. Pass split={'val_fraction': ...}."),
    ],
)
def test_an_unknown_argument_in_a_config_is_answered_last_with_the_nearest(tmp_path, capsys, line, remedy):
    config = tmp_path / "config.yaml"
    config.write_text(f"data:\n  class_path: lightning_h5.LazyH5DataModule\n  init_args:\n    {line}\n")
    model = "lightning.pytorch.demos.boring_classes.BoringModel"
    with pytest.raises(SystemExit) as ended:
        main(["fit", f"--config={config}", f"--model={model}"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(remedy)


def command(folder, *arguments, more_path):
    """Runs a command where neither Lightning nor this package is imported yet, as in a shell."""
    code = (
        f"import warnings; warnings.simplefilter('ignore'); from lightning_h5.cli import main; main({[*arguments]!r})"
    )
    return run_program(code, folder / "logs", cwd=folder, path=[ROOT, more_path])


@pytest.mark.wide
def test_a_model_of_the_other_lightning_package_is_told_apart(tmp_path):
    (tmp_path / "their_model.py").write_text(
        "import pytorch_lightning\nclass Theirs(pytorch_lightning.LightningModule): pass"
    )
    options = ["--model=their_model.Theirs", "--data=LazyH5DataModule"]
    done = command(tmp_path, "fit", *options, more_path=tmp_path)
    assert done.returncode == 2
    assert "their_model.Theirs derives from 'pytorch_lightning'" in done.stderr
    assert "runs the Trainer of 'lightning'" in done.stderr
    assert "LIGHTNING_H5_IMPORT=pytorch_lightning" in done.stderr


@pytest.mark.wide
def test_data_that_are_not_as_they_should_be_end_in_one_line(arguments, tmp_path):
    more_path = Path(lightning_models.__file__).parent
    done = command(tmp_path, "fit", *arguments, "--data.x_key=z", more_path=more_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("lightning_h5: H5KeyError: x_key='z' is not in")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("given", "code"), [([], 2), (["--help"], 0), (["fly"], 2)])
def test_usage_lists_the_verbs(given, code, capsys):
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == code
    printed = capsys.readouterr()
    assert "fit" in printed.out + printed.err
    assert "predict" in printed.out + printed.err


def test_python_m_runs_it():
    done = subprocess.run(
        [sys.executable, "-m", "lightning_h5", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("lightning_h5 0.")


def test_advice_that_no_verb_takes_is_marked_as_that_of_data_modules(make_h5, capsys):
    path = make_h5(y=np.arange(64.0))
    with h5py.File(path, "a") as file:
        file["x"] = h5py.ExternalLink("other.h5", "/x")
    with pytest.raises(SystemExit):
        main(["stats", path, "--key", "x"])
    assert "`lightning-h5 stats` opens only files that you name" in capsys.readouterr().err


def test_a_verb_that_finds_no_memory_says_so_in_a_line(make_h5, capsys, monkeypatch):
    def fail(path):
        raise MemoryError

    monkeypatch.setattr("lightning_h5.tools.inspect.inspect_file", fail)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", make_h5(x=np.zeros(3))])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "lightning_h5: inspect ran out of memory. Run it on a machine with more.\n"
