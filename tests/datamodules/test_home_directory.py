"""A path may begin with ``~`` wherever one is taken: data, split files, statistics, caches, the command line."""

import json
import os
import re

import numpy as np
import pytest
from arguments import nested

import lightning_h5
from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5LazyDataset,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
    bench_file,
    check_files,
    compute_stats,
    create_optimized_dataloader,
    inspect_file,
    inspect_folder,
    repack_file,
)
from lightning_h5.cli import main
from lightning_h5.errors import H5FileError

STATS = '{"fields": {"x": {"mean": 1, "std": 2}}}'


@pytest.fixture(autouse=True)
def home(make_h5, tmp_path, monkeypatch):
    """A home directory with data and statistics; the working directory is another one, and stays empty."""
    make_h5({"x": np.arange(40, dtype="f4"), "y": np.arange(40)}, name="home/runs/a.h5")
    folder, here = tmp_path / "home", tmp_path / "here"
    (folder / "stats.json").write_text(STATS)
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    yield folder
    assert os.listdir(here) == []  # nothing was written to a folder that is called "~"


@pytest.mark.parametrize("path", ["~/runs/a.h5", "~/runs", "~/runs/*.h5", ["~/runs/a.h5"]], ids=str)
@pytest.mark.parametrize(
    "rows",
    [
        lambda path: H5LazyDataset(path, "x"),
        lambda path: RankMemCachedH5Dataset(path, "x"),
        lambda path: CombinedHDF5Dataset(path, ["x"]),
        lambda path: create_optimized_dataloader(hdf5_files=path, load_fields=["x"], num_workers=0).dataset,
        lambda path: rows_of(LazyH5DataModule(path, x_key="x")),
        lambda path: rows_of(RankCachedH5DataModule(path, x_key="x")),
        lambda path: rows_of(CombinedHDF5DataModule(path, fields=["x"], on_bad_file="skip")),
        lambda path: rows_of(CombinedHDF5DataModule(mixture={"a": path}, fields=["x"])),
    ],
    ids=["lazy", "cached", "combined", "loader", "lazy module", "cached module", "combined module", "mixture"],
)
def test_files_are_found_below_the_home_directory(path, rows):
    assert len(rows(path)) == 40


def rows_of(datamodule):
    datamodule.setup("fit")
    return datamodule.train_dataloader().dataset


@pytest.mark.parametrize("split", ["val", "test", "predict"])
def test_files_of_each_split_are_found(split):
    datamodule = LazyH5DataModule(**nested(**{f"{split}_path": "~/runs/a.h5"}, x_key="x"))
    datamodule.setup({"val": "validate"}.get(split, split))
    assert len(getattr(datamodule, f"{split}_dataloader")().dataset) == 40


@pytest.mark.parametrize("module", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
def test_split_files_are_written_and_read(module, home):
    names = {"fields": ["x"]} if module is CombinedHDF5DataModule else {"x_key": "x"}
    module("~/runs/a.h5", split={"val_fraction": 0.5, "file": "~/splits/a.json"}, **names).setup("fit")
    kept = json.loads((home / "splits" / "a.json").read_text())
    kept["splits"] = {"train": [[0, 30]], "val": [[30, 40]]}
    (home / "splits" / "a.json").write_text(json.dumps(kept))
    assert len(rows_of(module("~/runs/a.h5", split={"file": "~/splits/a.json"}, **names))) == 30


def test_statistics_are_read_and_written(home):
    assert H5LazyDataset("~/runs/a.h5", "x", normalize="~/stats.json")[3] == 1
    compute_stats("~/runs", "x").save("~/made.json")
    assert "x" in json.loads((home / "made.json").read_text())["fields"]
    lightning_h5.datasets.write_stats("~/by_hand.json", {"x": {"mean": 0.0, "std": 1.0}})
    assert (home / "by_hand.json").exists()


def test_tools_take_paths_below_the_home_directory(home):
    assert inspect_file("~/runs/a.h5").path == str(home / "runs" / "a.h5")
    assert inspect_folder("~/runs").paths == (str(home / "runs" / "a.h5"),)
    assert check_files("~/runs/a.h5").files == (str(home / "runs" / "a.h5"),)
    repack_file("~/runs/a.h5", "~/copy.h5")
    assert (home / "copy.h5").exists()
    os.mkfifo(home / "pipe")
    with pytest.raises(H5FileError, match=re.escape(f"{home / 'pipe'}")):
        check_files("~/pipe")
    report = bench_file("~/runs/a.h5", "x", batch_size=4, num_workers=0, seconds=0.01, rounds=1)
    assert report.files == (str(home / "runs" / "a.h5"),)


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "~/runs/a.h5"],
        ["inspect", "~/runs"],
        ["check", "~/runs/*.h5"],
        ["repack", "~/runs/a.h5", "~/copy.h5"],
        ["stats", "~/runs/a.h5", "--key=x", "--output=~/made.json"],
        ["stats", "~/runs/a.h5", "--key=x", "--split-file=~/splits.json"],
    ],
    ids=" ".join,
)
def test_the_command_line_takes_paths_below_the_home_directory(arguments, capsys):
    """A shell expands ``~`` itself, but not within ``--output=~/made.json``, nor in quotes."""
    LazyH5DataModule(
        "~/runs/a.h5",
        x_key="x",
        split={"val_fraction": 0.5, "file": "~/splits.json"},
    ).setup("fit")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0, capsys.readouterr().err


def test_variables_are_not_expanded_and_the_error_names_what_expands_them(home):
    with pytest.raises(H5FileError, match=r"'\$HOME/runs/a\.h5' does not exist.*os\.path\.expandvars"):
        H5LazyDataset("$HOME/runs/a.h5", "x")
    with pytest.raises(H5FileError, match=r"matches no file.*os\.path\.expandvars"):
        H5LazyDataset("${HOME}/runs/*.h5", "x")
    with pytest.raises(H5FileError) as error:
        H5LazyDataset("~/runs/b.h5", "x")
    assert "expandvars" not in str(error.value)
    os.rename(home / "runs" / "a.h5", home / "runs" / "$HOME.h5")
    assert len(H5LazyDataset("~/runs/$HOME.h5", "x")) == 40
