"""Running the examples: as a user does, in an interpreter of their own, or forked from one that has imported much."""

import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from guards import HANG
from processes import run_ranks

from lightning_h5.cli import main


def run_script(*arguments, cwd=None, **environment):
    """What a script prints in an interpreter of its own; it must not fail."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_forked(logs, path, *arguments, world_size=1, cwd=None, **environment):
    """What a script prints, and its errors, in a process that has imported what all of them import.

    That takes seconds less than an interpreter of its own. With more than one rank, each runs the script, as a
    launcher would start them; the text is that of all of them. ``logs`` is a folder for what they print.
    """
    return fork(logs, as_a_script, str(path), [*map(str, arguments)], cwd, environment, world_size=world_size)


def fork(logs, target, *arguments, world_size=1):
    """What a function prints in such a process; it must not fail."""
    outcomes = run_ranks(target, world_size, logs, *arguments)
    for outcome in outcomes:
        assert outcome.exitcode == 0, outcome.output[-3000:]
    return "".join(outcome.output for outcome in outcomes)


def as_a_script(rank, path, arguments, cwd, environment):
    """Runs a script in this process, as ``python path arguments`` does in another."""
    os.environ |= environment
    tempfile.tempdir = None  # it is cached, and TMPDIR may have changed
    if cwd is not None:
        os.chdir(cwd)
    folder = Path(path).parent
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(folder))
    for module in ("ranks", "lines"):  # of the benchmarks, whose processes would import everything again
        if (folder / f"{module}.py").exists():
            importlib.import_module(module).CONTEXT = multiprocessing.get_context("fork")
    runpy.run_path(path, run_name="__main__")


def as_commands(rank, folder, commands):
    """Runs commands of ``lightning-h5`` one after the other in a folder, as from a clone of the repository."""
    os.chdir(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    for said, command in commands:
        print(said, flush=True)
        main(command)
