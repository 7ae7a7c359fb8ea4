"""``python -m lightning_h5 stats``: what it prints, what it writes, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from factories import Stored
from guards import HANG

from lightning_h5.cli import main
from lightning_h5.datasets import read_stats

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capsys):
    """Runs the verb: exit code, standard output, standard error."""

    def runs(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["stats", *map(str, arguments)])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return runs


@pytest.fixture
def path(make_h5):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(100, 3, 8)) * [[1], [5], [20]]).astype("f4")
    return make_h5(x=Stored(x, "chunked", (10, 3, 8), {"compression": "gzip"}), y=np.arange(100), name="data.h5")


def test_a_table_shows_each_channel(run, path):
    code, out, err = run(path, "--key", "x", "--channel-axis", 0)
    assert (code, err) == (0, "")
    lines = out.split("\n\nNext: ")[0].splitlines()
    assert lines[0] == "x: 100 rows, each 3x8 of float32"
    assert lines[1].split() == ["channel", "mean", "std", "min", "max"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2"]
    assert [round(float(line.split()[2])) for line in lines[2:]] == [1, 5, 20]


def test_json_has_the_same_numbers_and_nothing_else(run, path):
    code, out, err = run(path, "--key", "x", "--key", "y", "--channel-axis", 0, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["files"] == [path]
    x, y = report["arrays"]
    assert (x["key"], x["channel_axis"], len(x["mean"])) == ("x", 0, 3)
    assert (y["key"], y["channel_axis"], y["min"], y["max"]) == ("y", None, 0, 99)


def test_the_output_is_what_normalize_reads(run, path, tmp_path):
    output = tmp_path / "stats.json"
    code, out, err = run(path, "--channel-axis", -2, "--output", output)
    assert (code, err) == (0, "")
    assert f"wrote {output}: pass it as normalize=" in out
    assert read_stats(output)["x"].mean.shape == (3,)
    code, out, err = run(path, "--output", output)
    assert (code, out) == (1, "")
    assert "it exists" in err
    assert run(path, "--output", output, "--force")[0] == 0
    assert read_stats(output)["x"].mean.shape == ()


def test_rows_of_a_range_or_of_a_split(run, path, tmp_path):
    code, out, _ = run(path, "--key", "y", "--rows", "10:20", "--json")
    assert code == 0
    assert json.loads(out)["arrays"][0]["mean"] == 14.5
    splits = {"train": [[0, 80]], "val": [[80, 100]]}
    (tmp_path / "splits.json").write_text(json.dumps({"format": "lightning_h5 splits", "splits": splits}))
    found = [
        json.loads(run(path, "--key", "y", "--split-file", tmp_path / "splits.json", "--split", split, "--json")[1])
        for split in ("train", "val")
    ]
    assert [each["arrays"][0]["mean"] for each in found] == [39.5, 89.5]
    code, _, err = run(path, "--key", "y", "--split-file", tmp_path / "splits.json", "--split", "test")
    assert code == 1
    assert "no row in the split 'test'" in err
    assert run(path, "--split-file", tmp_path / "none.json")[0] == 1


def test_a_split_of_groups_takes_the_rows_of_its_groups(run, make_h5, tmp_path):
    groups = np.array(["a", "b", "c", "d"] * 5, "S1")
    path = make_h5(x=np.tile([1.0, 2, 3, 4], 5), who=groups)
    splits = {"train": ["a", "d"], "val": ["b", "c"]}
    text = {"format": "lightning_h5 splits", "group_key": "who", "splits": splits}
    (tmp_path / "splits.json").write_text(json.dumps(text))
    code, out, err = run(path, "--key", "x", "--split-file", tmp_path / "splits.json", "--json")
    assert (code, err) == (0, "")
    array = json.loads(out)["arrays"][0]
    assert (array["n_rows"], array["mean"]) == (10, 2.5)


def test_what_is_doubtful_is_said_on_the_standard_error(run, make_h5):
    x = np.ones((10, 3), "f4")
    x[:, 0] = np.arange(10)
    x[2, 2] = np.nan
    x[3, 2] = np.inf
    code, out, err = run(make_h5(x=x), "--channel-axis", 0)
    assert code == 0
    assert "'x' has 1 NaN and 1 infinite values, which the statistics exclude" in err
    assert "channels 1, 2 of 'x': all values are equal (std 0)" in err
    assert "nan" not in out


def test_what_cannot_normalise_is_shown_and_not_written(run, make_h5, tmp_path):
    code, out, err = run(make_h5(x=np.full(5, np.nan)), "--output", tmp_path / "stats.json")
    assert code == 1
    assert out.splitlines()[2].split() == ["all", "values", "-", "-", "-", "-", "5"]
    assert "'x' cannot be normalized" in err
    assert not (tmp_path / "stats.json").exists()


def test_many_channels_are_cut_short(run, make_h5):
    code, out, _ = run(make_h5(x=np.ones((3, 100)) * np.arange(100)), "--channel-axis", 0)
    assert code == 0
    assert "and 76 more channels" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--key", "z"], "'z' is not in"),
        (["--key", "Y"], "Did you mean 'y'?"),
        (["--key", "x", "--rows", "0:1000"], "row 999 is out of range for 'x', which has 100 rows"),
        (["--key", "x", "--channel-axis", "7"], "channel_axis=7"),
        (["--output", "no/such/folder.json"], "there is no directory"),
    ],
    ids=str,
)
def test_a_problem_is_one_line_and_code_1(run, path, arguments, text):
    code, out, err = run(path, *arguments)
    assert (code, out) == (1, "")
    assert text in err
    assert err.startswith("lightning_h5: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--channel-axis", "first"],
        ["--rows", "5"],
        ["--rows", "5:"],
        ["--rows", "1:2:3:4"],
        ["--rows", "0:5", "--split-file", "s.json"],
        ["--colour"],
    ],
    ids=str,
)
def test_wrong_usage_is_code_2(run, path, arguments):
    code, out, err = run(path, *arguments)
    assert (code, out) == (2, "")
    assert "usage: lightning-h5 stats" in err


def test_no_file_is_a_problem_and_no_path_is_wrong_usage(run, tmp_path):
    code, _, err = run(tmp_path / "none.h5")
    assert code == 1
    assert "does not exist" in err
    assert run()[0] == 2


def test_help_has_examples(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "lightning-h5 stats data.h5\n" in out


@pytest.mark.wide
def test_ctrl_c_ends_it_in_one_line_and_leaves_nothing(path, tmp_path):
    """A pass that never ends, so that the signal finds it at work."""
    code = (
        "import sys, time\n"
        "from lightning_h5.tools import stats\n"
        "def forever(*args, **named):\n"
        "    print('working', flush=True)\n"
        "    time.sleep(60)\n"
        "stats.do_tasks = forever\n"
        "from lightning_h5.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", code, "stats", path, "--output", str(tmp_path / "stats.json")]
    before = set(os.listdir(tmp_path))
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "working\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=HANG)
    assert child.returncode == 130
    assert err == "lightning_h5: stats was interrupted.\n"
    assert set(os.listdir(tmp_path)) == before
