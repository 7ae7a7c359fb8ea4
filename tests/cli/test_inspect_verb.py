"""``inspect`` as a command, and what all verbs have in common."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from factories import Stored
from guards import HANG

from lightning_h5.cli import main
from lightning_h5.cli.verbs import VERBS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(make_h5):
    rows = np.zeros((100, 8), "f4")
    path = make_h5(
        {
            "images/train": Stored(rows, "chunked", (10, 8), options={"compression": "gzip"}),
            "images/more/deep": rows,
            "labels": np.arange(100),
        }
    )
    with h5py.File(path, "a") as h5:
        h5["latest"] = h5py.SoftLink("/images/train")
    return path


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code, *capsys.readouterr()


def test_it_shows_tree_costs_and_advice(file, capsys):
    code, out, err = run(capsys, "inspect", file)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    at = lines.index("/")
    tree = [re.match(r" *\S+", line)[0] for line in lines[at + 1 : at + 7]]
    assert tree == ["  images", "    more", "      deep", "    train", "  labels", "  latest"]
    assert "-> /images/train  (soft link)" in lines[at + 6]
    train = next(line for line in lines if line.startswith("images/train "))
    assert train.split()[1:3] == ["32", "B"]
    assert "for all rows of" in next(line for line in lines if line.startswith("in memory"))
    config = yaml.safe_load("\n".join(lines[lines.index("data:") :]))["data"]
    assert config["init_args"]["x_key"] in ("images/train", "images/more/deep")
    assert config["init_args"]["y_key"] == "labels"


def test_long_names_stay_whole_in_the_tree_and_widen_no_line_beyond_them(make_h5, capsys):
    group, long = "a_group_of_the_laboratory_with_a_name_as_people_make_them", "signal_of_the_left_hand_sensor_" * 3
    name, target = f"{group}/{group}/{long}", f"{group}/{group}/{'y' * 60}"
    stored = Stored(np.zeros((64, 4, 256), "f4"), "chunked", (8, 4, 256), {"compression": "gzip", "shuffle": True})
    members = np.zeros(64, [(f"member_with_a_long_name_{i}", "f4") for i in range(6)])
    path = make_h5({name: stored, target: np.arange(64), "table": members})
    with h5py.File(path, "a") as h5:
        h5["again"] = h5py.SoftLink(f"/{target}")
    _, out, _ = run(capsys, "inspect", path)
    tree, rest = out.split("\na random row of")
    lines = tree.splitlines()
    assert sum(line.endswith(group) for line in lines) == 2
    at = next(at for at, line in enumerate(lines) if line.endswith(long))
    assert lines[at + 1].lstrip().startswith("(64, 4, 256)  float32  chunks (8, 4, 256)")
    assert all(f"member_with_a_long_name_{i}" in tree for i in range(6))
    assert f"-> /{target}  (soft link)" in tree
    assert max(len(line) for line in lines[lines.index("/") :] if target not in line and long not in line) <= 80
    costs = rest.split("\n\n")[0].splitlines()[1:]
    assert len(costs) == 3
    assert max(map(len, costs)) <= 80
    assert any(line.startswith("...") and " KiB " in line for line in costs)


def test_depth_leaves_out_what_lies_deeper(file, capsys):
    _, out, _ = run(capsys, "inspect", file, "--depth", "1")
    assert "deep" not in out[out.index("\n/\n") :].split("a random row of")[0]
    assert "... and 3 below" in out


def test_json_has_the_same_and_nothing_else(file, capsys):
    code, out, err = run(capsys, "inspect", file, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert {array["name"] for array in report["arrays"]} == {"images/train", "images/more/deep", "labels"}
    assert report["advice"]["settings"]["train_path"] == file


def test_a_directory_is_one_set(make_h5, capsys):
    for at in range(4):
        make_h5({"x": np.zeros((10, 3 + (at == 2)))}, name=f"set/{at}.h5")
    folder = str(Path(make_h5.folder) / "set")
    code, out, _ = run(capsys, "inspect", folder)
    assert code == 0
    assert "3 of 4 have the same arrays" in out
    assert f"{folder}/2.h5: 'x': 3 of 4 files have it as float64 (3,); here it is float64 (4,)" in out
    _, out, _ = run(capsys, "inspect", f"{folder}/0.h5", f"{folder}/2.h5", "--json")
    assert list(json.loads(out)["outliers"]) == [f"{folder}/2.h5"]


def test_names_that_no_terminal_shows_do_not_end_it(make_h5):
    path = make_h5(y=np.arange(3))
    with h5py.File(path, "a") as h5:
        h5.create_group(b"ma\xf1ana")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "lightning_h5", "inspect", path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=HANG, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ma\\udcf1ana" in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nothing.h5", None, "does not exist"),
        ("text.h5", b"hello there, no HDF5 here", "is not an HDF5 file: it has 25 bytes and begins with b'hello th'"),
        ("empty.h5", b"", "is not an HDF5 file: it has 0 bytes"),
    ],
)
def test_what_cannot_be_opened_is_one_line_and_exit_1(tmp_path, capsys, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(capsys, "inspect", str(path))
    assert (code, out) == (1, "")
    assert said in err
    assert err.startswith("lightning_h5: ")
    assert len(err.splitlines()) == 1


def test_a_pipe_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.h5")
    code, _, err = run(capsys, "inspect", str(tmp_path / "pipe.h5"))
    assert (code, "is not a regular file" in err) == (1, True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(file, capsys):
    os.chmod(file, 0)
    code, _, err = run(capsys, "inspect", file)
    assert (code, "Permission denied" in err) == (1, True)


def test_wrong_usage_is_exit_2(capsys):
    for arguments in (
        ["inspect"],
        ["inspect", "x.h5", "--colour"],
        ["inspect", "x.h5", "--depth", "deep"],
        ["guess"],
        [],
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, ""), arguments
        assert "usage: lightning-h5" in err


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself_with_examples(verb, capsys):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    assert out.startswith(f"usage: lightning-h5 {verb}")
    assert "--json" in out
    assert f"examples:\n  lightning-h5 {verb}" in out


def test_the_list_of_verbs_is_complete(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb in (*VERBS, "fit", "validate", "test", "predict"):
        assert f"\n  {verb} " in out


def shell(command, **environment):
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=HANG, check=False,
        env=os.environ | {"PY": sys.executable, **environment},
    )  # fmt: skip


@pytest.mark.wide
def test_a_reader_that_has_seen_enough_is_no_error(make_h5):
    path = make_h5({f"x{i}": np.arange(3) for i in range(2000)})
    done = shell(f"set -o pipefail; $PY -m lightning_h5 inspect {path} | head -n 1")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("no_color", "is_colored"), [("", True), ("1", False)], ids=["asked", "refused"])
def test_colours_give_way_to_no_color(file, no_color, is_colored):
    done = shell(f"script -qec '$PY -m lightning_h5 inspect {file}' /dev/null", NO_COLOR=no_color, TERM="xterm")
    if done.returncode == 127:
        pytest.skip("there is no `script` to make a terminal with")
    assert done.returncode == 0
    assert ("\x1b[" in done.stdout) == is_colored


def test_ctrl_c_is_one_line_and_exit_130(file):
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import lightning_h5.tools.inspect as tool\n"
        "tool.inspect_file = lambda path: os.kill(os.getpid(), signal.SIGINT)\n"
        "from lightning_h5.cli import main\n"
        f"main(['inspect', {file!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=HANG, check=False
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == "lightning_h5: inspect was interrupted.\n"


def test_a_name_cannot_reach_the_terminal(make_h5, capsys):
    path = make_h5({"\x1b[31mred\u0085": np.zeros((20, 2)), "a\nb": np.zeros(20)})
    for verb in (["inspect"], ["check"], ["stats", "--key", "a\nb"]):
        code, out, err = run(capsys, verb[0], path, *verb[1:])
        assert code == 0
        assert not {"\x1b", "\u0085"} & {*out, *err}


def test_a_full_disk_behind_the_output_is_one_line(file):
    done = shell(f"$PY -m lightning_h5 inspect {file} > /dev/full")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "lightning_h5: inspect has finished, but could not write its output: No space left on device."
    )
