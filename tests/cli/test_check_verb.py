"""``python -m lightning_h5 check``: what it prints, and how it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from factories import Stored, edit

from lightning_h5.cli import main

ROOT = Path(__file__).parents[2]
GZIP = {"compression": "gzip"}


@pytest.fixture
def run(capsys):
    """Runs the verb: exit code, standard output, standard error."""

    def runs(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["check", *map(str, arguments)])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return runs


@pytest.fixture
def folder(make_h5, tmp_path):
    """Three files, the second of which has a damaged chunk, and the third the same data as the first."""
    for name in ("a", "b"):
        x = np.resize(np.arange(11 + ord(name)), (40, 50))
        make_h5(x=Stored(x, "chunked", (5, 50), GZIP), y=np.arange(40.0), name=f"set/{name}.h5")
    path = tmp_path / "set" / "b.h5"
    with h5py.File(path) as file:
        place = file["x"].id.get_chunk_info(3)
    edit(path, place.byte_offset + 5)
    (tmp_path / "set" / "c.h5").write_bytes((tmp_path / "set" / "a.h5").read_bytes())
    return tmp_path / "set"


def test_problems_are_grouped_by_file_and_summed_up(run, folder):
    code, out, err = run(folder)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == str(folder / "b.h5")
    assert lines[1].startswith("  error (decode): x: chunk 3 (rows 15 to 19) of 'x'")
    assert lines[2] == str(folder / "c.h5")
    assert lines[3].startswith("  warning (duplicate): it holds the same as")
    assert lines[4] == "3 files, 6 arrays, 45.9 KiB decoded: 1 error, 1 warning"
    assert lines[5] == "without checksums, so that most damage to their values would not show: y"
    assert len(lines) == 6


def test_json_has_the_report_and_nothing_else(run, folder):
    code, out, err = run(folder, "--json")
    assert (code, err) == (1, "")
    report = json.loads(out)
    assert [os.path.basename(path) for path in report["files"]] == ["a.h5", "b.h5", "c.h5"]
    assert [(p["kind"], p["array"], p["severity"]) for p in report["errors"]] == [("decode", "x", "error")]
    assert [(p["kind"], p["array"]) for p in report["warnings"]] == [("duplicate", None)]


def test_warnings_alone_end_with_0_unless_strict(run, folder):
    code, out, _ = run(folder / "a.h5", folder / "c.h5")
    assert code == 0
    assert out.splitlines()[-2].endswith("0 errors, 1 warning")
    assert run(folder / "a.h5", folder / "c.h5", "--strict")[0] == 1
    assert run(folder / "a.h5", "--strict")[0] == 0


def test_without_decoding_metadata_alone_are_read(run, folder):
    code, out, _ = run(folder / "b.h5", "--no-decode")
    assert code == 0
    assert out == "1 file, 2 arrays, metadata alone: 0 errors, 0 warnings\n"


def test_nan_is_an_error_when_asked(run, make_h5):
    path = make_h5(x=np.array([1.0, np.nan, np.inf]))
    assert run(path)[0] == 0
    code, out, _ = run(path, "--nan")
    assert code == 1
    assert "error (not finite): x: 1 NaN and 1 infinite values, the first in row 1" in out


def test_keys_choose_arrays(run, folder):
    assert run(folder / "b.h5", "--key", "y")[0] == 0
    code, out, err = run(folder / "b.h5", "--key", "z")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "'z' is not in" in err


def test_a_file_that_does_not_open_is_in_the_list(run, folder):
    (folder / "d.h5").write_text("no")
    code, out, err = run(folder / "a.h5", folder / "d.h5")
    assert (code, err) == (1, "")
    assert "  error (open): " in out
    assert "is not an HDF5 file" in out


@pytest.mark.parametrize("path", ["none.h5", "none*.h5"])
def test_a_path_that_matches_nothing_is_one_line(run, tmp_path, path):
    code, out, err = run(tmp_path / path)
    assert (code, out) == (1, "")
    assert err.startswith("lightning_h5: paths=")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["a.h5", "--nan", "--no-decode"], ["a.h5", "--fix"]], ids=str)
def test_wrong_usage_is_code_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "usage: lightning-h5 check" in err


def test_very_many_problems_are_cut_short(run, make_h5):
    path = make_h5({f"x{n}": Stored(np.zeros((4, 1)), "chunked", (1, 1), GZIP, written=2) for n in range(230)})
    code, out, _ = run(path)
    assert code == 0
    assert len(out.splitlines()) == 1 + 200 + 2
    assert "and 30 more problems" in out


def test_help_has_examples(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "lightning-h5 check data.h5\n" in out


def test_python_m_runs_it_and_shows_no_bar_where_nobody_watches(folder):
    command = [sys.executable, "-m", "lightning_h5", "check", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-2].startswith("3 files, 6 arrays")
