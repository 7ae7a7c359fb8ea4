"""Progress is a bar on a terminal and in a notebook, and lines in a log file; short work leaves nothing there."""

import io
import os
import pty
import re
import subprocess
import sys
import termios

import h5py
import numpy as np
import pytest
from arguments import nested
from guards import HANG
from hypothesis import given
from hypothesis import strategies as st
from lightning_models import Recorder, quiet_trainer
from processes import run_ranks, values

from lightning_h5 import CombinedHDF5DataModule, RankCachedH5DataModule, progress_bar
from lightning_h5.progress_bar import with_bar


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


def shown(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    assert "\r" not in err
    return err.splitlines()


def test_short_work_leaves_nothing_in_a_log_file(clock, capsys):
    for _ in with_bar(range(10), "looking at files", unit="file", shows_progress=True):
        clock(2.5)
    assert shown(capsys) == []


def test_long_work_has_a_line_every_thirty_seconds_and_one_at_its_end(clock, capsys):
    for _ in with_bar(range(10), "looking at files", unit="file", shows_progress=True):
        clock(10)
    assert shown(capsys) == [
        "looking at files: 3 of 10 files, 30 s",
        "looking at files: 6 of 10 files, 60 s",
        "looking at files: 9 of 10 files, 90 s",
        "looking at files: done, 10 files, 100 s",
    ]


def test_work_that_was_broken_off_is_not_said_to_be_done(clock, capsys):
    bar = progress_bar.progress_bar(4 << 30, "repacking", shows_progress=True)
    clock(40)
    bar.update(1 << 30)
    bar.close()
    assert shown(capsys) == ["repacking: 1.0 GiB of 4.0 GiB, 40 s", "repacking: ended, 1.0 GiB, 40 s"]


@given(
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1 << 40)), max_size=60),
    unit=st.sampled_from(["iB", "run"]),
)
def test_lines_are_whole_and_at_least_thirty_seconds_apart(steps, unit):
    file, now = io.StringIO(), [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress_bar.time, "monotonic", lambda: now[0])
        patch.setattr(sys, "stderr", file)
        with progress_bar.progress_bar(1 << 45, "work", shows_progress=True, unit=unit) as bar:
            for seconds, n in steps:
                now[0] += seconds
                bar.update(n)
    text = file.getvalue()
    assert text == "" or text.endswith(" s\n")
    assert all(line.startswith("work: ") for line in text.splitlines())
    assert len(text.splitlines()) <= now[0] // 30 + 1
    if any(seconds >= 30 for seconds, _ in steps):
        assert "work: ended" in text


class OfALogger:
    """What sends a standard error to a logger often has these two methods alone."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_a_standard_error_without_isatty_has_lines(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", file := OfALogger())
    for _ in with_bar(range(2), "looking at files", unit="file", shows_progress=True):
        clock(20)
    assert file.text == "looking at files: 2 of 2 files, 40 s\nlooking at files: done, 2 files, 40 s\n"


@pytest.mark.parametrize("shows_progress", [True, False])
@pytest.mark.parametrize("file", ["closed", "write alone", None])
def test_no_standard_error_ends_the_loading_of_rows(make_h5, clock, monkeypatch, file, shows_progress):
    if file == "closed":
        file = io.StringIO()
        file.close()
    elif file:
        file = type("Writer", (), {"write": lambda self, text: clock(40)})()
    monkeypatch.setattr(progress_bar, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", file)
    with progress_bar.progress_bar(2, "work", shows_progress=shows_progress, delay=0) as bar:
        bar.update(1)
        clock(40)
        bar.update(1)
    path = make_h5(x=np.ones((20, 4), "f4"))
    module = RankCachedH5DataModule(path, x_key="x", batch_size=4)
    module.setup("fit")
    assert len(list(module.train_dataloader())) == 5


def test_a_standard_error_that_is_missing_or_closed_does_not_end_the_work(clock, monkeypatch, tmp_path):
    with open(tmp_path / "log", "w") as closed, progress_bar.progress_bar(2, "work", shows_progress=True) as bar:
        monkeypatch.setattr(sys, "stderr", None)
        with progress_bar.progress_bar(2, "work", shows_progress=True, delay=0) as none:
            none.update(1)
        monkeypatch.setattr(bar, "_file", closed)
        closed.close()
        clock(31)
        bar.update(1)


REPACK = """
import sys, time
from lightning_h5 import progress_bar
progress_bar.SECONDS = 0.0
with progress_bar.progress_bar(3, "working", shows_progress=True, unit="run", delay=0) as bar:
    for _ in range(3):
        time.sleep(0.15)
        bar.update()
"""


def test_a_terminal_has_a_bar():
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with subprocess.Popen([sys.executable, "-c", REPACK], stderr=theirs) as process:
        process.wait(HANG)
        os.set_blocking(ours, False)
        text = os.read(ours, 1 << 16)  # less than a terminal holds for its reader
    os.close(ours)
    os.close(theirs)
    assert re.search(rb"\rworking:.*\| *\d/3 ", text)


def test_a_redirected_standard_error_has_lines():
    done = subprocess.run([sys.executable, "-c", REPACK], capture_output=True, text=True, check=True)
    assert "\r" not in done.stderr
    assert [re.sub(r"\d+ s$", "", line) for line in done.stderr.splitlines()] == [
        "working: 1 of 3 runs, ",
        "working: 2 of 3 runs, ",
        "working: 3 of 3 runs, ",
        "working: done, 3 runs, ",
    ]


@pytest.mark.wide
def test_a_notebook_has_a_bar_without_a_red_ground():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(REPACK)])
    nbclient.NotebookClient(notebook, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    assert {output.name for output in outputs} == {"stdout"}
    assert "working:" in "".join(output.text for output in outputs)
    assert "run of" not in "".join(output.text for output in outputs)


def fit(rank, path, kind):
    progress_bar.SECONDS = 0.0
    if kind != "cached":
        asked = {
            "a range": {"where": {"y": {"min": 3}}},
            "a function": {"where": {"y": lambda y: y >= 3}},
            "a label": {"where": {"y": lambda y: y >= 3}, "fields": {"x": "x", "target": "y"}, "label": 5},
        }[kind]
        data = CombinedHDF5DataModule(path, **nested(**{"fields": ["x"], "batch_size": 4, "with_index": True} | asked))
    else:
        data = RankCachedH5DataModule(path, x_key="x", batch_size=4, with_index=True)
    quiet_trainer(max_epochs=1, devices=2, strategy="ddp").fit(Recorder(), datamodule=data)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["cached", "a range", "a function", "a label"])
def test_two_ranks_do_not_report_the_same_work_twice(kind, tmp_path):
    path = str(tmp_path / "rows.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((64, 3), "f4")
        file.create_dataset("y", data=np.arange(64) % 8, chunks=(16,))  # one without chunks is read in one go
    outcomes = run_ranks(fit, 2, tmp_path, path, kind)
    values(outcomes)
    works = ["reading columns", "looking for the label"] if kind == "a label" else ["loading|reading columns"]
    for work in works:
        reports = [re.findall(rf"^(?:{work}).*: done.*$", each.output, re.MULTILINE) for each in outcomes]
        assert sorted(map(len, reports)) == [0, 1]
