"""``lightning-h5 rows``: the rows of a step from a checkpoint, as a table or JSON, and the batch again."""

import json
import re

import h5py
import numpy as np
import pytest
import torch
import yaml
from lightning_models import Recorder, quiet_trainer

from lightning_h5 import LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.cli import main

ROWS, BATCH = 100, 32


def doubled(x):
    return 2 * x


def as_list(samples):
    return samples


class Own(LazyH5DataModule):
    """A class that a checkpoint can only name."""


class Setting:
    """An object that torch does not load unasked."""


@pytest.fixture
def saved(make_h5, tmp_path, monkeypatch):
    """Trains, and gives the checkpoint and the batches of the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    make_h5(x=np.arange(ROWS * 1.0)[:, None], name="x.h5")

    def train(kind=LazyH5DataModule, accumulated=1, **options):
        class Keeps(Recorder):
            def training_step(self, batch, batch_idx):
                batches.append(batch)
                return self.layer(torch.ones(1, 1)).sum()

        batches = []
        datamodule = kind(
            options.pop("train_path", "x.h5"),
            **{"x_key": "x", "batch_size": BATCH, "with_index": True, "shuffle": "global"} | options,
        )
        trainer = quiet_trainer(max_epochs=3, accumulate_grad_batches=accumulated)
        trainer.fit(Keeps(), datamodule=datamodule)
        trainer.save_checkpoint("last.ckpt")
        return batches

    return train


@pytest.fixture
def run(capsys):
    def run(*arguments, code=0):
        capsys.readouterr()  # of the training
        with pytest.raises(SystemExit) as ended:
            main(["rows", *arguments])
        captured = capsys.readouterr()
        assert ended.value.code == code, captured.err
        return captured.out if code == 0 else captured.err

    return run


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule])
def test_the_table_and_json_name_the_rows_of_the_step(saved, run, kind):
    batches = saved(kind)
    rows = batches[5][1].tolist()
    report = json.loads(run("last.ckpt", "--step", "5", "--json"))
    assert (report["step"], report["epoch"], report["world_size"], report["n_batches"]) == (5, 1, 1, 1)
    assert [sample["row"] for sample in report["samples"]] == rows
    text = run("last.ckpt", "--step", "5")
    assert text.startswith("step 5: epoch 1, 32 samples of 1 file\n")
    assert re.search(r"\nrank +batch +samples +rows\n0 +1 +32 +\d", text)
    assert max(map(len, text.splitlines()[3:])) <= 80


def test_rows_that_follow_each_other_are_folded(saved, run):
    saved(shuffle=False)
    assert run("last.ckpt", "--step", "1").splitlines()[-1].split() == ["0", "1", "32", "32-63"]


@pytest.mark.wide
def test_samples_of_segments_have_a_line_for_each(tmp_path, saved, run):
    with h5py.File(tmp_path / "groups.h5", "w") as file:
        for number in range(60):
            file[f"g{number}/x"] = np.arange(6.0)[:, None]
    saved(train_path="groups.h5", segments="*", window=2, batch_size=180)
    lines = run("last.ckpt", "--step", "0").splitlines()
    assert lines[3].split() == ["rank", "batch", "segment", "samples", "steps"]
    assert len(lines) == 3 + 41 + 1
    assert "more lines; --json has all samples" in lines[-1]


def test_replay_writes_the_very_batch(saved, run):
    batches = saved()
    assert "wrote batch.pt: the batch" in run("last.ckpt", "--step", "7", "--replay", "batch.pt")
    for value, expected in zip(torch.load("batch.pt"), batches[7], strict=True):
        assert torch.equal(value, expected)
    assert "it exists" in run("last.ckpt", "--step", "7", "--replay", "batch.pt", code=1)
    run("last.ckpt", "--step", "8", "--rank", "0", "--replay", "batch.pt", "--force")
    assert torch.equal(torch.load("batch.pt")[1], batches[8][1])


@pytest.mark.wide
def test_replay_of_accumulated_batches_writes_a_list(saved, run):
    batches = saved(accumulated=3)
    assert "a list of 3 batches" in run("last.ckpt", "--step", "2", "--replay", "batch.pt")
    assert [index.tolist() for _, index in torch.load("batch.pt")] == [index.tolist() for _, index in batches[4:7]]


@pytest.mark.wide
def test_a_transform_is_not_needed_to_name_rows_and_needed_to_replay(saved, run):
    pytest.importorskip("jsonargparse")
    batches = saved(transform=doubled, collate_fn=as_list)
    assert "32 samples" in run("last.ckpt", "--step", "5")
    text = run("last.ckpt", "--step", "5", "--replay", "batch.pt", code=1)
    assert "does not hold functions: 'transform', 'collate_fn'" in text
    options = {"train_path": "x.h5", "x_key": "x", "batch_size": BATCH, "with_index": True, "shuffle": "global"}
    functions = {"transform": f"{__name__}.doubled", "collate_fn": f"{__name__}.as_list"}
    config = {"data": {"class_path": "lightning_h5.LazyH5DataModule", "init_args": options | functions}}
    with open("run.yaml", "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    run("last.ckpt", "--step", "5", "--replay", "batch.pt", "--config", "run.yaml")
    for (x, index), (expected, number) in zip(torch.load("batch.pt"), batches[5], strict=True):
        assert (x.tolist(), index) == (expected.tolist(), number)
    with open("run.yaml", "a", encoding="utf-8") as file:
        file.write("    colate_fn: null\n")
    assert "colate_fn" in run("last.ckpt", "--step", "5", "--config", "run.yaml", code=1)


def test_files_that_moved_are_named_by_set(saved, run, tmp_path):
    saved()
    rows = json.loads(run("last.ckpt", "--step", "5", "--json"))["samples"]
    (tmp_path / "x.h5").rename(tmp_path / "moved.h5")
    assert "pass --set train_path=PATH" in run("last.ckpt", "--step", "5", code=1)
    moved = json.loads(run("last.ckpt", "--step", "5", "--json", "--set", "train_path=moved.h5"))["samples"]
    assert [row["row"] for row in moved] == [row["row"] for row in rows]
    assert "not a setting" in run("last.ckpt", "--step", "5", "--set", "train_path", code=2)


def test_what_is_no_checkpoint_of_ours_is_an_error(saved, run):
    assert "cannot be opened: No such file" in run("none.ckpt", "--step", "1", code=1)
    assert "'x.h5' is not a checkpoint" in run("x.h5", "--step", "1", code=1)
    torch.save({"state_dict": {}}, "bare.ckpt")
    assert "it has none" in run("bare.ckpt", "--step", "1", code=1)
    saved(Own)
    assert "is not a class of lightning_h5" in run("last.ckpt", "--step", "1", code=1)


@pytest.mark.wide
def test_objects_of_other_classes_are_loaded_if_the_checkpoint_is_trusted(saved, run):
    saved()
    checkpoint = torch.load("last.ckpt", weights_only=True)
    torch.save(checkpoint | {"hyper_parameters": {"setting": Setting()}}, "own.ckpt")
    assert "Pass --trusted if you trust the checkpoint" in run("own.ckpt", "--step", "1", code=1)
    assert "step 1:" in run("own.ckpt", "--step", "1", "--trusted")


@pytest.mark.wide
def test_a_run_of_the_command_line_names_its_rows(saved, run, tmp_path):
    pytest.importorskip("jsonargparse")
    saved()
    data = {"train_path": "x.h5", "x_key": "x", "batch_size": 8, "split": {"val_fraction": 0.1}, "transform": None}
    config = {
        "seed_everything": 5,
        "model": {"class_path": "lightning_models.Ordinary"},
        "data": {"class_path": "LazyH5DataModule", "init_args": data | {"transform": f"{__name__}.doubled"}},
        "trainer": {
            "max_epochs": 1,
            "logger": False,
            "accelerator": "cpu",
            "callbacks": {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {"dirpath": str(tmp_path / "cli"), "save_last": True},
            },
        },
    }
    with open("run.yaml", "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    main(["fit", "--config", "run.yaml"])
    report = json.loads(run("cli/last.ckpt", "--step", "3", "--json"))
    assert report == json.loads(run("cli/last.ckpt", "--step", "3", "--json", "--config", "run.yaml"))
    assert len(report["samples"]) == 8
