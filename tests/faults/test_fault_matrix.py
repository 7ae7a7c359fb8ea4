"""Every fault that can befall a file or an array, in every data module: refused with reason, or harmless."""

import os
import time
from collections import Counter

import cells
import faults_of_arrays
import faults_of_changes
import faults_of_files
import faults_of_links
import faults_of_trust
import pytest
from cells import run_cell
from matrix_case import FAULTS, REFUSED, RIGHT

from lightning_h5 import H5DataChangedError, LazyH5DataModule
from lightning_h5.hdf5 import ChangeGuard

MODULES = (
    faults_of_arrays,
    faults_of_changes,
    faults_of_files,
    faults_of_links,
    faults_of_trust,
)  # imported, each adds to FAULTS
KINDS = ("lazy", "cached", "combined")
WORKERS = (0, 2)
WRONG = {
    "silent": "silent",
    "foreign": "foreign",
    "unnamed": "unnamed",
    "hang": "hangs",
    "crash": "crashes",
    "leak": "leaks",
}


@pytest.fixture(scope="module")
def verdicts():
    """What became of the cells; a line at the end, which ``-s`` shows."""
    found = Counter()
    yield found
    print(f"\n{summary(found)}")


def summary(found):
    """The figures of a run, in one line."""
    wrong = ", ".join(f"{found[verdict]} {name}" for verdict, name in WRONG.items())
    return f"{found.total()} cells: {found[REFUSED]} refused, {found[RIGHT]} right, {wrong}"


def cases():
    """All faults; those that are slow by name."""
    return [pytest.param(name, marks=pytest.mark.slow if fault.slow else ()) for name, fault in FAULTS.items()]


@pytest.mark.wide
@pytest.mark.parametrize("name", cases())
def test_a_fault_is_refused_with_reason_or_harmless(name, tmp_path, verdicts):
    fault, wrong = FAULTS[name], []
    for kind in KINDS:
        for n_workers in WORKERS:
            cell = run_cell(fault, kind, n_workers, tmp_path / f"{kind}{n_workers}")
            verdicts[cell.verdict] += 1
            if cell.verdict != fault.expected[kind]:
                wrong.append(f"{kind}, {n_workers} workers: {cell.verdict}, not {fault.expected[kind]}: {cell.text}")
    assert not wrong, "\n".join([f"{name}:", *wrong])


def test_there_are_as_many_faults_and_cells_as_promised():
    quick = [fault for fault in FAULTS.values() if not fault.slow]
    assert len(quick) >= 45
    assert len(quick) * len(KINDS) * len(WORKERS) >= 270
    assert {each for fault in FAULTS.values() for each in fault.expected.values()} == {REFUSED, RIGHT}


def nothing(*args):
    """In the place of what would do something."""


def foreign(*args):
    raise RuntimeError("of somebody else's")


def without_remedy(guard):
    raise H5DataChangedError(f"{guard.path!r} is another one.")


def without_name(*args):
    raise H5DataChangedError("Something is wrong. Look at it.")


def leaking(module, teardown=LazyH5DataModule.teardown):
    teardown(module)
    os.open(os.devnull, os.O_RDONLY)


BROKEN = {
    "silent": (ChangeGuard, "check", nothing),
    "foreign": (ChangeGuard, "check", foreign),
    "unnamed": (ChangeGuard, "check", without_remedy),
    "unnamed, too": (ChangeGuard, "check", without_name),
    "leak": (LazyH5DataModule, "teardown", leaking),
    "crash": (LazyH5DataModule, "train_dataloader", lambda module: os.abort()),
    "hang": (LazyH5DataModule, "train_dataloader", lambda module: time.sleep(99)),
}


@pytest.mark.wide
@pytest.mark.parametrize("verdict", [pytest.param(v, marks=pytest.mark.slow if v == "hang" else ()) for v in BROKEN])
def test_the_matrix_notices_what_is_wrong(verdict, tmp_path, monkeypatch):
    monkeypatch.setattr(*BROKEN[verdict])
    monkeypatch.setattr(cells, "LEAVE", 0.5)
    if verdict == "hang":
        monkeypatch.setattr(cells, "LIMIT", 10)
    fault = FAULTS["contiguous rows edited in place in the middle"]
    found = [run_cell(fault, "lazy", n_workers, tmp_path / str(n_workers)) for n_workers in WORKERS]
    assert {cell.verdict for cell in found} == {verdict.split(",")[0]}, found
