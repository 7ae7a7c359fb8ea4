"""Rows of the tables in "From 0.1 to 0.2" are true: new code runs, and old code raises the error in its row."""

from __future__ import annotations

import re
from typing import Any

import h5py
import lightning
import numpy as np
import pytest
import torch
from test_docs import ROOT

import lightning_h5
from lightning_h5 import CombinedHDF5DataModule
from lightning_h5.cli import main

PAGE = (ROOT / "docs" / "upgrading.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[Any]:
    """Return old code, new code and pieces of the error for each row of the tables under a heading.

    If the head of a table has a call with three dots, cells stand for the dots.
    """
    section = re.search(rf"^### {heading}\n(.*?)^(### |```)", PAGE, flags=re.M | re.S)[1]
    found = []
    for head, body in re.findall(r"^(\|.*)\n\|---\|---\|---\|\n((?:\|.*\n)+)", section, flags=re.M):
        call = re.search(r"`(.*)`", head)
        for row in body.splitlines():
            old, new, error = re.fullmatch(r"\| `([^`]*)` \| `([^`]*)` \| (.*) \|", row).groups()
            if call is not None:
                old, new = (call[1].replace("...", code) for code in (old, new))
            found.append(pytest.param(old, new, re.findall(r"`([^`]*)`", error), id=old))
    assert found
    return found


@pytest.fixture
def names(tmp_path, monkeypatch):
    """The names of the package, and those that the page uses beside them; in a folder with a.h5."""
    monkeypatch.chdir(tmp_path)
    with h5py.File("a.h5", "w") as file:
        file.create_dataset("x", data=np.ones((400, 8), "f4"), chunks=(20, 8))
        file["meta/id"] = np.arange(400)
        for number in range(3):
            file[f"episodes/{number}/obs"] = np.ones((20 + number, 3), "f4")
            file[f"episodes/{number}/action"] = np.ones((20 + number, 2), "f4")
    package = {name: getattr(lightning_h5, name) for name in lightning_h5.__all__}
    return package | {
        "cost": lightning_h5.inspect_file("a.h5").advice.cost,
        "datasets": {"a": lightning_h5.H5LazyDataset("a.h5", x_key="x")},
    }


@pytest.mark.parametrize(("old", "new", "error"), [*rows("In Python"), *rows("For extenders")])
def test_old_python_raises_and_new_python_runs(old, new, error, names):
    kind, text = error
    with pytest.raises(Exception, match=re.escape(text)) as raised:
        exec(old, names)
    assert type(raised.value).__name__ == kind
    exec(new, names)


@pytest.mark.parametrize(("old", "new", "error"), rows("In YAML"))
@pytest.mark.usefixtures("names")
def test_old_yaml_is_refused_and_new_yaml_is_accepted(old, new, error, tmp_path, capsys):
    pytest.importorskip("jsonargparse")
    (text,) = error

    def fit(line, *arguments):
        path = "" if "train_path" in line else "    train_path: a.h5\n"
        config = tmp_path / "config.yaml"
        config.write_text(
            "seed_everything: 1\n"
            "model: {class_path: lightning.pytorch.demos.boring_classes.BoringModel}\n"
            f"data:\n  class_path: CombinedHDF5DataModule\n  init_args:\n{path}    {line}\n"
        )
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--config", str(config), *arguments])
        return ended.value.code, "".join(capsys.readouterr())

    code, printed = fit(new, "--print_config")
    assert code == 0
    assert new.partition(":")[0] in printed
    code, printed = fit(old)
    assert code != 0
    key = re.findall(r"(\w+):", old)[-1]
    assert text in printed or f'No action for key "{key}"' in printed  # from older versions of jsonargparse


def test_data_modules_of_old_checkpoints_are_refused_by_their_old_names(tmp_path):
    checkpoint = {
        "datamodule_hyper_parameters": {"train_paths": "a.h5", "load_fields": ["x"]},
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": {},
    }
    torch.save(checkpoint, tmp_path / "last.ckpt")
    with pytest.raises(TypeError, match="Did you mean 'train_path'"):
        CombinedHDF5DataModule.load_from_checkpoint(tmp_path / "last.ckpt")
