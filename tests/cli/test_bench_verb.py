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
from guards import HANG

from lightning_h5.cli import main
from lightning_h5.tools import bench

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
    monkeypatch.setattr(bench, "_measure", None)


def test_a_table_shows_each_setting_and_the_end_is_yaml(run, path):
    code, out, err = run(path, *QUICK)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{path}  40 rows of 104 B, in shuffled batches of 8, warm"
    assert lines[2].split() == ["rows/s", "MiB/s", "vs", "h5py"]
    names = [line[2:].split("  ")[0] for line in lines[3:6]]
    assert names == ["plain h5py", "LazyH5DataModule", "RankCachedH5DataModule"]
    assert max(map(len, lines[1:6])) <= 80
    (starred,) = (line for line in lines if line.startswith("* "))
    name = starred[2:].split("  ")[0]
    assert next(line for line in lines if line.startswith("use  ")).startswith(f"use  {name} is the ")
    data = yaml.safe_load(out[out.index("\ndata:") :])["data"]
    assert data["class_path"] == name.split(",")[0]
    given = {"train_path": path, "x_key": "x", "y_key": "y"}
    assert data["init_args"] == given | {"split": 0.1, "batch_size": 8}


def test_json_has_the_same_and_nothing_else(run, path):
    code, out, err = run(path, "--x-key", "x", "--x-key", "y", "--json", *QUICK)
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert (report["files"], report["n_rows"]) == ([path], 40)
    assert [each["name"] for each in report["results"]] == ["plain h5py", "LazyH5DataModule", "RankCachedH5DataModule"]
    chosen = report["chosen"]
    assert chosen in report["results"]
    assert (chosen["settings"]["x_key"], "y_key" in chosen["settings"]) == (["x", "y"], False)
    data = yaml.safe_load(report["yaml"])["data"]
    assert data == {"class_path": chosen["datamodule"], "init_args": chosen["settings"]}


def test_several_files_are_one_data_set(run, make_h5):
    paths = [make_h5(x=np.zeros((20, 3)), y=np.arange(20)) for _ in range(2)]
    code, out, _ = run(*paths, *QUICK)
    assert code == 0
    assert out.startswith("2 files  40 rows of 32 B")


def test_what_was_not_measured_is_said(run, path, monkeypatch):
    monkeypatch.setattr(bench, "available_memory", lambda: None)
    code, out, _ = run(path, *QUICK)
    assert code == 0
    assert "not measured: RankCachedH5DataModule: the system does not report its free memory" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--x-key", "z"], "'z' is not in"),
        (["--x-key", "X"], "Did you mean 'x'?"),
        (["--x-key", "x", "--batch-size", "41"], "there are 40 rows. Pass a batch_size of at most 40"),
        (["--y-key", "y"], "y_key='y' was given without x_key"),
        (["--batch-size", "0"], "batch_size=0 was given"),
        (["--seconds", "nan"], "seconds=nan was given"),
        (["--rounds", "0"], "rounds=0 was given"),
        (["--num-workers", "-1"], "num_workers=-1 was given"),
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
        ["--batch-size", "many"],
        ["--seconds", "soon"],
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


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_ctrl_c_ends_it_in_one_line_and_leaves_no_worker(path):
    """While workers are at work; the signal goes to all of them, as from a terminal."""
    code = (
        "import sys\n"
        "from lightning_h5.tools import bench\n"
        "real = bench._rate\n"
        "def works(batches, seconds, **more):\n"
        "    next(batches)\n"
        "    print('working', flush=True)\n"
        "    return real(batches, 60)\n"
        "bench._rate = works\n"
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
        _, err = child.communicate(timeout=HANG)
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


def test_an_error_of_several_lines_is_written_as_lines_and_the_names_in_it_end_none(make_h5, capsys):
    arrays = {name: np.array([b"a"] * 4) for name in ("a", "b", "c", "d\nlightning_h5: all is well")}
    with pytest.raises(SystemExit):
        main(["bench", str(make_h5(arrays))])
    err = capsys.readouterr().err
    first, *more = err.splitlines()
    assert first.startswith("lightning_h5: x_key was not given")
    assert [line[:5] for line in more[:3]] == ["  'a'", "  'b'", "  'c'"]
    assert len(more) == 5
    assert all(line.startswith("  ") for line in more)


def test_an_error_of_several_lines_is_written_in_lines(run, make_h5, never_measures):
    code, _, err = run(make_h5({"names": np.array([b"a"] * 4)}), *QUICK)
    assert code == 1
    assert "\\n" not in err
    assert "\n  'names': shape (4,)" in err


def test_one_row_is_written_as_one(run, make_h5):
    _, out, _ = run(make_h5({"x": np.zeros((1, 8), "f4")}), *QUICK, "--batch-size", "1")
    assert "  1 row of 32 B, " in out.splitlines()[0]
