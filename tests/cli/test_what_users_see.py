"""What a user sees of an error: in a script the line that was wrong and one message, on the command line one line."""

import re
from pathlib import Path

import numpy as np
import pytest
from processes import run_program

import lightning_h5
from lightning_h5.cli import main

TESTS = str(Path(__file__).parents[1])
HERE = str(Path(lightning_h5.__file__).parent)
START = """
import logging
import warnings
import lightning.pytorch
from lightning_models import Recorder, quiet_trainer
from lightning_h5 import *

warnings.simplefilter("ignore")
"""
SCRIPTS = {
    "a missing file": "LazyH5DataModule('gone.h5', x_key='x')",
    "a truncated file": "LazyH5DataModule('cut.h5', x_key='x')",
    "a missing key": "LazyH5DataModule('a.h5', x_key='z')",
    "a truncated file for memory": "RankCachedH5DataModule('cut.h5', x_key='x')",
    "a truncated file among others": "CombinedHDF5DataModule(['a.h5', 'cut.h5'])",
    "different files": "LazyH5DataModule(['a.h5', 'other.h5'], x_key='x')",
}


@pytest.fixture
def folder(make_h5, tmp_path):
    whole = make_h5({"x": np.arange(40, dtype="f4"), "y": np.arange(40)}, name="a.h5")
    make_h5({"x": np.zeros((40, 3))}, name="other.h5")
    (tmp_path / "cut.h5").write_bytes(Path(whole).read_bytes()[:-100])
    (tmp_path / "notes.txt").write_text("no HDF5")
    return tmp_path


@pytest.mark.wide
@pytest.mark.parametrize("which", SCRIPTS)
def test_the_traceback_of_a_script_ends_with_one_message_after_few_lines_of_ours(which, folder):
    fit = f"quiet_trainer().fit(Recorder(), datamodule={SCRIPTS[which]})"
    done = run_program(f"{START}\n{fit}\n", folder / "logs", cwd=folder, path=[TESTS])
    seen = done.stderr[done.stderr.index("Traceback") :]
    assert done.returncode == 1
    assert seen.count("Traceback (most recent call last)") == 1, "no other errors before it"
    frames = re.findall(r'File "([^"]+)", line', seen)
    assert sum(frame.startswith(HERE) for frame in frames) <= 3, seen
    assert seen.strip().splitlines()[-1].startswith("lightning_h5.errors.H5")


@pytest.mark.parametrize(
    "line",
    [
        "H5LazyDataset('cut.h5', 'x')",
        "H5LazyDataset('a.h5', 'z')",
        "RankMemCachedH5Dataset('cut.h5', 'x')",
        "CombinedHDF5Dataset(['a.h5', 'cut.h5'], ['x'])",
    ],
)
def test_the_traceback_of_a_dataset_is_short_too(line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(lightning_h5.H5Error) as error:
        eval(line, vars(lightning_h5) | {name: getattr(lightning_h5, name) for name in lightning_h5.__all__})
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__
    assert sum(str(entry.path).startswith(HERE) for entry in error.traceback) <= 3


def test_an_error_that_is_none_of_ours_keeps_its_traceback(folder, monkeypatch):
    """A fault of this package, or of a library, is to be found by its frames."""

    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("lightning_h5.hdf5.alike.layout_at", fail)
    with pytest.raises(ZeroDivisionError) as error:
        lightning_h5.LazyH5DataModule(folder / "a.h5", x_key="x").setup("fit")
    assert [entry.name for entry in error.traceback][-1] == "fail"
    assert any(entry.name == "_look" for entry in error.traceback)


FIT = [
    "fit",
    "--seed_everything=1",
    "--trainer.logger=false",
    "--trainer.accelerator=cpu",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--model=lightning_models.Recorder",
    "--data=LazyH5DataModule",
]
COMMANDS = [
    *[[verb, "gone.h5"] for verb in ("inspect", "check", "bench", "stats")],
    *[[verb, path] for verb in ("inspect", "bench", "stats") for path in ("cut.h5", "notes.txt", ".git", "gone/*.h5")],
    ["stats", "a.h5", "--key=z"],
    ["stats", "a.h5", "--output=gone/stats.json"],
    ["stats", "a.h5", "--split-file=notes.txt"],
    ["bench", "a.h5", "--x-key=z"],
    ["bench", "a.h5", "--batch-size=4000"],
    ["check", "a.h5", "--key=z"],
    ["check", "a.h5", "--sandbox-memory=4 GiB"],
    ["repack", "gone.h5", "copy.h5"],
    ["repack", "cut.h5", "copy.h5"],
    ["repack", "a.h5", "a.h5"],
    ["repack", "a.h5", "gone/copy.h5"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_ends_with_one_message_and_a_code(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(command)
    ends_well(ended.value.code, capsys.readouterr().err)


@pytest.mark.wide
@pytest.mark.parametrize(
    "arguments",
    [
        ["--data.train_path=gone.h5"],
        ["--data.train_path=cut.h5"],
        ["--data.train_path=a.h5", "--data.x_key=z"],
        ["--data.train_path=a.h5", "--data.split.val_fraction=2"],
    ],
    ids=" ".join,
)
def test_training_from_the_command_line_ends_with_one_message_and_a_code(arguments, folder):
    code = f"from lightning_h5.cli import main\nmain({[*FIT, *arguments]!r})"
    done = run_program(code, folder / "logs", cwd=folder, path=[TESTS])
    ends_well(done.returncode, done.stderr)


def ends_well(code, seen):
    assert code in (1, 2)
    assert "Traceback" not in seen
    messages = [line for line in seen.splitlines() if line.startswith(("lightning_h5: ", "error: "))]
    assert len(messages) == 1, seen
