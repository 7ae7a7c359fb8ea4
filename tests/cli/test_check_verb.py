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
from guards import HANG

from lightning_h5.cli import main
from lightning_h5.hdf5 import library_text
from lightning_h5.tools.check import sandbox

ROOT = Path(__file__).parents[2]
GZIP = {"compression": "gzip"}


@pytest.fixture
def run(capsys):
    """Runs the verb: exit code, standard output without the line about the library, standard error."""

    def runs(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["check", *map(str, arguments)])
        printed = capsys.readouterr()
        return ended.value.code, printed.out.removesuffix(library_text() + "\n"), printed.err

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
    assert lines[3].startswith("  warning (duplicate): its size, arrays and samples of its bytes equal those of")
    assert lines[4] == "3 files, 6 arrays, 45.9 KiB decoded: 1 error, 1 warning"
    assert lines[5] == "integrity level 0 of 4: most damage to the values of 'y' would go unnoticed (no checksums)"
    assert len(lines) == 6


FLETCHER = {"fletcher32": True}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("how", "libver", "level"),
    [({}, "earliest", 0), (GZIP, "earliest", 1), (FLETCHER, "v110", 2), (GZIP | FLETCHER, "v110", 3)],
)
@pytest.mark.parametrize("apart", [(), ("--sandbox",), ("--no-decode",)], ids=["here", "sandbox", "metadata alone"])
def test_how_surely_damage_shows_is_the_last_line(run, tmp_path, how, libver, level, apart):
    """The least of all arrays of all files."""
    for name, more in (("a", {}), ("b", GZIP | FLETCHER)):
        with h5py.File(tmp_path / f"{name}.h5", "w", libver=("v110" if more else libver, "latest")) as file:
            file.create_dataset("x", data=np.arange(100.0), chunks=(10,), maxshape=(None,), **(more or how))
    code, out, _ = run(tmp_path / "a.h5", tmp_path / "b.h5", *apart)
    assert code == 0
    assert out.splitlines()[-1].startswith(f"integrity level {level} of 4: ")


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
    assert out.splitlines() == [
        "1 file, 2 arrays, only metadata: 0 errors, 0 warnings",
        "integrity level 0 of 4: most damage to the values of 'y' would go unnoticed (no checksums)",
    ]


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


@pytest.mark.parametrize("arguments", [[], ["a.h5", "--sandbox-seconds", "soon"], ["a.h5", "--fix"]], ids=str)
def test_wrong_usage_is_code_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "usage: lightning-h5 check" in err


@pytest.mark.wide
def test_very_many_problems_are_cut_short(run, make_h5):
    path = make_h5({f"x{n}": Stored(np.zeros((4, 1)), "chunked", (1, 1), GZIP, written=2) for n in range(230)})
    code, out, _ = run(path)
    assert code == 0
    assert len(out.splitlines()) == 1 + 200 + 3
    assert "and 30 more problems" in out


def test_a_sandbox_finds_the_same_and_says_that_it_was_one(run, folder):
    code, out, err = run(folder, "--sandbox", "--sandbox-memory", "2 GiB", "--sandbox-seconds", "90")
    assert (code, err) == (1, "")
    plain = run(folder)[1].splitlines()
    plain[4] = "3 files, 6 arrays, 45.9 KiB decoded, each file in its own process: 1 error, 1 warning"
    assert out.splitlines() == plain
    assert run(folder / "a.h5", "--sandbox")[0] == 0


def test_a_file_that_crashes_in_a_sandbox_is_in_the_list(run, folder, monkeypatch):
    real = sandbox._command
    crash = ["/bin/sh", "-c", "kill -SEGV $$"]
    monkeypatch.setattr(sandbox, "_command", lambda task: crash if "a.h5" in task else real(task))
    code, out, err = run(folder / "a.h5", folder / "c.h5", "--sandbox")
    assert (code, err) == (1, "")
    assert out.splitlines()[1].startswith("  error (crashed): its check was ended by SIGSEGV.")
    assert out.splitlines()[2].startswith("2 files, 2 arrays")
    code, out, _ = run(folder / "a.h5", "--sandbox", "--json")
    report = json.loads(out)
    assert (code, report["sandboxed"], [problem["kind"] for problem in report["errors"]]) == (1, True, ["crashed"])
    assert json.loads(run(folder / "c.h5", "--json")[1])["sandboxed"] is False


def test_what_a_hostile_process_tells_is_one_line_without_codes(run, folder, monkeypatch):
    """Were it written as it is, it could say that all is well, or move the cursor over what is not."""
    text = "fine\n1 file, 2 arrays: 0 errors, 0 warnings\x1b[1A\x1b[1m\r\u202e"
    told = {"is_open": True, "arrays": {}, "order": [], "integrity": {"u\nv": 0}, "identity": None, "unknown": None}
    told |= {"n_decoded": 0, "annotations": {}, "numbers": {}}
    told["problems"] = [{"array": "x\ny", "kind": "open", "text": text, "severity": "error"}]
    fake = [sys.executable, "-I", "-S", "-c", f"print({json.dumps(told)!r})"]
    monkeypatch.setattr(sandbox, "_command", lambda task: fake)
    code, out, _ = run(folder / "a.h5", "--sandbox")
    assert code == 1
    assert out.splitlines() == [
        str(folder / "a.h5"),
        "  error (open): x\\ny: fine\\n1 file, 2 arrays: 0 errors, 0 warnings\\x1b[1A\\x1b[1m\\r\\u202e",
        "1 file, 0 arrays, 0 B decoded, each file in its own process: 1 error, 0 warnings",
        "integrity level 0 of 4: most damage to the values of 'u\\nv' would go unnoticed (no checksums)",
    ]


def test_limits_without_a_sandbox_and_limits_that_make_no_sense_are_one_line(run, folder):
    for arguments in (
        ["--sandbox-memory", "1 GiB"],
        ["--sandbox-seconds", "3"],
        ["--sandbox", "--sandbox-memory", "1 KiB"],
        ["--sandbox", "--sandbox-seconds", "0"],
    ):
        code, out, err = run(folder / "a.h5", *arguments)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "sandbox" in err


def test_ctrl_c_during_a_sandbox_ends_with_130_and_one_line(run, folder, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox.subprocess, "run", interrupted)
    code, out, err = run(folder, "--sandbox")
    assert (code, out, err) == (130, "", "lightning_h5: check was interrupted.\n")


def test_help_has_examples(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "lightning-h5 check data.h5\n" in out
    assert "untrusted files, and files that crashed a program" in " ".join(out.split())


@pytest.mark.wide
def test_python_m_runs_it_and_shows_no_bar_where_nobody_watches(folder):
    command = [sys.executable, "-m", "lightning_h5", "check", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-3].startswith("3 files, 6 arrays")
    assert done.stdout.splitlines()[-1] == library_text()
