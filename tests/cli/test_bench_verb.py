"""``python -m lightning_h5 bench``: what it prints, what it writes, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from factories import Stored

from lightning_h5.cli import main
from lightning_h5.tools import bench
from lightning_h5.tools.contest.contenders import Contender

ROOT = Path(__file__).parents[2]
QUICK = ["--seconds", "0.01", "--rounds", "1", "--batch-size", "8", "--num-workers", "0"]


@pytest.fixture
def run(capsys):
    """Runs the verb: exit code, standard output, standard error."""

    def runs(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["bench", *map(str, arguments)])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return runs


@pytest.fixture
def path(make_h5):
    x = np.random.default_rng(0).normal(size=(40, 3, 8)).astype("f4")
    stored = Stored(x, "chunked", (10, 3, 8), {"compression": "gzip"})
    return make_h5(x=stored, y=np.arange(40), name="data.h5")


@pytest.fixture
def never_measures(monkeypatch):
    monkeypatch.setattr(bench, "Measuring", None)


def test_a_table_shows_each_setting_and_the_end_is_yaml(run, path):
    code, out, err = run(path, *QUICK)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{path}  40 rows of 104 B, in shuffled batches of 8"
    assert lines[2].split() == ["rows/s", "MiB/s", "times", "plain", "first", "epoch", "spread"]
    names = [line[2:].split("  ")[0] for line in lines[3:8]]
    ours = ["LazyH5DataModule", "RankCachedH5DataModule"]
    assert names == ["plain recipe", *ours, *(f"{name}, prefetch_factor=8" for name in ours)]
    (starred,) = (line for line in lines if line.startswith("* "))
    name = starred[2:].split("  ")[0]
    assert next(line for line in lines if line.startswith("use  ")).startswith(f"use  {name} is the ")
    data = yaml.safe_load(out[out.index("\ndata:") :])["data"]
    assert data["class_path"] == name.split(",")[0]
    settings = {"prefetch_factor": 8} if "prefetch_factor" in name else {}
    assert data["init_args"] == {"train_path": path, "x_key": "x", "y_key": "y", "batch_size": 8} | settings


def test_json_has_the_same_and_nothing_else(run, path):
    code, out, err = run(path, "--x-key", "x", "--x-key", "y", "--no-plain", "--json", *QUICK)
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert (report["files"], report["x_key"], report["y_key"], report["n_rows"]) == ([path], ["x", "y"], None, 40)
    assert [each["datamodule"] for each in report["results"]] == 2 * ["LazyH5DataModule", "RankCachedH5DataModule"]
    assert report["chosen"] in [each["name"] for each in report["results"]]
    assert yaml.safe_load(report["yaml"])["data"] == {
        "class_path": report["datamodule"],
        "init_args": report["settings"],
    }
    assert all(each["times_plain"] is None for each in report["results"])


@pytest.mark.parametrize(
    "chosen",
    [
        Contender(way="lazy"),
        Contender(way="lazy", mmap=True, num_workers=1),
        Contender(way="lazy", shuffle_bytes=1000 << 20),
        Contender(way="cached", prefetch_factor=8),
    ],
    ids=lambda each: each.name,
)
def test_what_is_advised_is_a_config_that_trains(run, path, monkeypatch, capsys, tmp_path, chosen):
    monkeypatch.setattr(bench, "choose", lambda rates: chosen)
    monkeypatch.setattr(bench, "reasons_for", lambda *_, **__: ("since it was said so",))
    code, out, _ = run(path, *QUICK)
    assert code == 0
    config = tmp_path / "config.yaml"
    trainer = (
        f"seed_everything: 3\ntrainer: {{max_epochs: 1, default_root_dir: {tmp_path}}}\n"
        "model: {class_path: lightning_models.Recorder}"
    )
    config.write_text(trainer + out[out.index("\ndata:") :])
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    main(["fit", "--config", str(config), *quiet])
    (trained,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("train"))
    assert trained[2] == "40"


def test_several_files_are_one_data_set(run, make_h5):
    paths = [make_h5(x=np.zeros((20, 3)), y=np.arange(20)) for _ in range(2)]
    code, out, _ = run(*paths, *QUICK)
    assert code == 0
    assert out.startswith("2 files  40 rows of 32 B")


def test_what_was_not_measured_is_said(run, path, monkeypatch):
    monkeypatch.setattr(bench, "room", lambda: None)
    code, out, _ = run(path, *QUICK)
    assert code == 0
    assert "not measured: RankCachedH5DataModule: the system does not say how much memory is free" in out
    assert "The files were not read before" in out


def test_a_picture_is_written_and_never_over_another(run, path, tmp_path, monkeypatch):
    plot = tmp_path / "rates.png"
    code, out, _ = run(path, "--plot", plot, *QUICK)
    assert code == 0
    assert out.endswith(f"\nwrote {plot}\n")
    assert plot.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(bench, "Measuring", None)
    code, out, err = run(path, "--plot", plot)
    assert (code, out) == (1, "")
    assert "is there already and is never written over" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--x-key", "z"], "'z' is not in"),
        (["--x-key", "X"], "Did you mean 'x'?"),
        (["--x-key", "x", "--batch-size", "41"], "there are 40 rows. Pass a batch_size of at most 40"),
        (["--y-key", "y"], "y_key='y' was given without x_key"),
        (["--plot", "no/such/folder.png"], "there is no folder"),
        (["--plot", "rates.bmp"], "ends in no format that is known"),
    ],
    ids=str,
)
def test_a_problem_is_one_line_and_code_1(run, path, never_measures, arguments, text):
    code, out, err = run(path, *arguments)
    assert (code, out) == (1, "")
    assert text in err
    assert err.startswith("lightning_h5: ")
    assert err.count("\n") == 1


def test_no_file_is_a_problem_and_no_path_is_wrong_usage(run, tmp_path):
    code, _, err = run(tmp_path / "none.h5")
    assert code == 1
    assert "does not exist" in err
    assert run()[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch-size", "0"],
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--seconds", "soon"],
        ["--rounds", "0"],
        ["--num-workers", "-1"],
        ["--num-workers"],
        ["--colour"],
    ],
    ids=str,
)
def test_wrong_usage_is_code_2(run, path, never_measures, arguments):
    code, out, err = run(path, *arguments)
    assert (code, out) == (2, "")
    assert "usage: lightning-h5 bench" in err


def test_help_has_examples(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "lightning-h5 bench signals.h5\n" in out


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_ctrl_c_ends_it_in_one_line_and_leaves_no_worker(path):
    """While workers are at work; the signal goes to all of them, as from a terminal."""
    code = (
        "import sys\n"
        "from lightning_h5.tools.contest import runs as bench_runs\n"
        "real = bench_runs.take_for\n"
        "def tells(running, *args, **named):\n"
        "    if running._loader.num_workers:\n"
        "        running.take()\n"
        "        print('working', flush=True)\n"
        "        args = (60, 60)\n"
        "    return real(running, *args, **named)\n"
        "bench_runs.take_for = tells\n"
        "from lightning_h5.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "bench",
        path,
        "--num-workers",
        "2",
        "--seconds",
        "0.05",
        "--batch-size",
        "8",
    ]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdout.readline() == "working\n"
        time.sleep(0.2)
        assert len(members_of(child.pid)) == 3
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err == "lightning_h5: bench was interrupted.\n"
    assert members_of(child.pid) == []


def members_of(group):
    """Living processes of a process group."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            state, _, of_group = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of_group) == group and state != "Z":
            found.append(int(name))
    return found
