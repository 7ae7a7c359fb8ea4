"""Files are checked in processes of their own: they may crash, hang and lie there, and nothing else is harmed."""

import ctypes
import faulthandler
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
from factories import Stored, edit, run_forked
from guards import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5.errors import H5KeyError, H5ValueError, H5WorkerError
from lightning_h5.tools.check import check, check_files, sandbox
from lightning_h5.tools.check.check_file import CheckOptions, Findings, check_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc as Linux has them")

ROWS, STEP = 40, 5
VALUES = np.resize(np.arange(11, dtype="i4"), (ROWS, 50))
GZIP = {"compression": "gzip"}
NOTHING = (
    '{"path": "", "is_open": true, "arrays": {}, "annotations": {}, "numbers": {}, "problems": [], "integrity": {}, '
    '"identity": null, "n_decoded": 0}'
)
LONG = 1000  # seconds, of something that has to be stopped


@pytest.fixture
def child_does(monkeypatch):
    """Instead of checking, the child is a shell that runs a script; ``{path}`` in it is the file's."""

    def does(script, *, only=""):
        real = sandbox._command

        def command(task):
            path = json.loads(task)["path"]
            return ["/bin/sh", "-c", script.replace("{path}", path)] if only in path else real(task)

        monkeypatch.setattr(sandbox, "_command", command)

    return does


def in_child(monkeypatch, code):
    """The child itself, all its limits set, does something else than checking."""
    start = sandbox.START.replace("import main", "import main; from lightning_h5.tools.check import sandbox")
    patched = f"import os, sys, time\n{start.replace('; main(', chr(10) + code + chr(10) + 'main(')}"
    monkeypatch.setattr(sandbox, "START", patched)


def problems(report):
    return [(p.severity, p.kind, p.array) for p in (*report.errors, *report.warnings)]


def is_gone(pid):
    """Whether a process ends soon; one that nobody has asked for its exit code has."""
    end = time.monotonic() + HANG
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def pids_in(path, n):
    """The numbers that processes write into a file, once there are as many."""
    end = time.monotonic() + HANG
    while time.monotonic() < end:
        found = path.read_text().split() if path.exists() else []
        if len(found) >= n:
            return [int(pid) for pid in found]
        time.sleep(0.01)
    raise AssertionError(f"{n} processes never started")


# The same as without ----------------------------------------------------------------------------------------


def folder_of_all_sorts(make_h5, tmp_path):
    """Good files, and files with something wrong with them that the check names."""
    usual = {"x": Stored(VALUES.astype("f4"), "chunked", (STEP, 50), GZIP), "y": np.arange(ROWS)}
    paths = [make_h5(usual, name=f"set/{name}.h5") for name in ("good", "twin")]
    damaged = make_h5({"x": Stored(VALUES.astype("f4"), "chunked", (STEP, 50), GZIP), "y": np.arange(ROWS) + 1})
    with h5py.File(damaged) as file:
        place = file["x"].id.get_chunk_info(3)
    edit(damaged, place.byte_offset + 5)
    other = make_h5(x=VALUES.astype("f8"), z=np.arange(ROWS - 1), name="set/other.h5")
    with h5py.File(other, "a") as file:
        file["out"] = h5py.ExternalLink("gone.h5", "/x")
        file[b"n\xffame"] = h5py.SoftLink("/nothing")
        file.create_dataset("s", data=["ä", "b"], dtype=h5py.string_dtype())
        file.create_dataset("never", (9,), "f4")
    (tmp_path / "set" / "junk.h5").write_text("a,b,c\n")
    return [*paths, damaged, other, str(tmp_path / "set" / "junk.h5")]


@pytest.mark.wide
def test_what_is_found_is_what_is_found_without_a_sandbox(make_h5, tmp_path):
    paths = folder_of_all_sorts(make_h5, tmp_path)
    plain, apart_from_us = check_files(paths), check_files(paths, sandbox=True)
    kinds = {problem.kind for problem in (*plain.errors, *plain.warnings)}
    assert kinds >= {"open", "decode", "schema", "missing", "duplicate", "link", "unwritten"}
    assert plain.n_bytes > 0
    assert plain.unchecked
    assert not plain.sandboxed
    assert apart_from_us == replace(plain, sandboxed=True)


def test_keys_and_metadata_alone_are_the_same_too(make_h5):
    paths = [make_h5(x=VALUES, y=VALUES), make_h5(x=VALUES + 1)]
    plain = check_files(paths, keys=["y"], decode=False)
    assert problems(plain) == [("error", "missing", "y")]
    assert check_files(paths, keys=["y"], decode=False, sandbox=True) == replace(plain, sandboxed=True)
    with pytest.raises(H5KeyError, match="Did you mean 'y'"):
        check_files(paths[0], keys="Y", sandbox=True)


def test_it_works_from_any_thread_and_directory(make_h5, monkeypatch, tmp_path):
    path = make_h5(x=VALUES)
    monkeypatch.chdir(tmp_path)
    found = []
    thread = threading.Thread(target=lambda: found.append(check_files(os.path.basename(path), sandbox=True)))
    thread.start()
    thread.join(HANG)
    assert problems(found[0]) == []
    assert found[0].n_bytes == VALUES.nbytes


# What a child may do ----------------------------------------------------------------------------------------

FATES = {
    "crash": ("kill -SEGV $$", "crashed", "ended by SIGSEGV"),
    "abort": ("kill -ABRT $$", "crashed", "ended by SIGABRT"),
    "signal without a name": ("kill -40 $$", "crashed", "ended by signal 40"),
    "told, then crashed": (f"echo '{NOTHING}'; kill -BUS $$", "crashed", "ended by SIGBUS"),
    "out of cpu time": ("kill -XCPU $$", "hung", "did not finish within"),
    "exit code": ("exit 7", "died", "exit code 7"),
    "nothing": ("exit 0", "died", "without a report"),
    "garbage": ("head -c 3000 /dev/urandom", "died", "without a report"),
    "half": (f"echo '{NOTHING[:50]}'", "died", "without a report"),
    "another value": ("echo 7", "died", "another report"),
    "deep": ("head -c 300000 /dev/zero | tr '\\0' '['", "died", "without a report"),
    "long number": ("head -c 300000 /dev/zero | tr '\\0' '7'", "died", "without a report"),
    "its own error": ("""echo '{"failed": "ZeroDivisionError: in the child"}'""", "died", "in the child"),
    "no memory": ("""echo '{"failed": "memory"}'""", "memory", "sandbox_memory=4,294,967,296 bytes"),
    "leaves something that holds its output": ("sleep 5 & exit 5", "died", "exit code 5"),
}


@pytest.mark.parametrize("fate", FATES)
def test_however_a_child_ends_its_file_is_named_and_no_other(make_h5, child_does, fate):
    script, kind, text = FATES[fate]
    good, bad = make_h5(x=VALUES, name="good.h5"), make_h5(x=VALUES, name="bad.h5")
    child_does(f"echo '{NOTHING}'")
    child_does(script, only="bad")
    (problem,) = check_files([good, bad], sandbox=True).errors
    assert (problem.file, problem.array, problem.kind) == (bad, None, kind)
    assert text in problem.text


@pytest.mark.wide
@pytest.mark.parametrize(
    "script",
    [f"exec sleep {LONG}", f"exec >&-; exec sleep {LONG}", f"sleep {LONG} & wait", f"echo '{NOTHING}'; sleep {LONG}"],
    ids=["silent", "closes its pipe", "in a child of its own", "told all"],
)
def test_a_child_that_does_not_end_is_stopped(make_h5, child_does, tmp_path, script):
    child_does(f"echo $$ >> {tmp_path}/pids; {script}")
    (problem,) = check_files(make_h5(x=VALUES), sandbox=True, sandbox_seconds=1).errors
    assert problem.kind == "hung"
    assert "sandbox_seconds=1;" in problem.text
    assert all(is_gone(pid) for pid in pids_in(tmp_path / "pids", 1))


@pytest.mark.wide
def test_a_child_that_hangs_or_spins_inside_of_its_check_is_stopped(make_h5, monkeypatch):
    in_child(monkeypatch, f"sandbox._check_in_child = lambda task: time.sleep({LONG})")
    assert problems(check_files(make_h5(x=VALUES), sandbox=True, sandbox_seconds=2)) == [("error", "hung", None)]


def test_a_child_that_crashes_inside_of_its_check_is_named(make_h5, monkeypatch):
    in_child(monkeypatch, "sandbox._check_in_child = lambda task: os.kill(os.getpid(), 11)")
    (problem,) = check_files(make_h5(x=VALUES), sandbox=True).errors
    assert (problem.kind, "SIGSEGV" in problem.text) == ("crashed", True)


def test_what_libraries_print_is_no_part_of_what_is_told(make_h5, monkeypatch):
    real = "real = sandbox._check_in_child"
    noise = f"{real}; sandbox._check_in_child = lambda task: os.system('echo noise') + os.write(1, b'x') and real(task)"
    in_child(monkeypatch, noise)
    assert problems(check_files(make_h5(x=VALUES), sandbox=True)) == []


def test_memory_over_the_limit_is_named_with_the_argument(make_h5):
    path = make_h5(y=VALUES)
    with h5py.File(path, "a") as file:
        n = 768 << 20
        array = file.create_dataset("x", (n,), "u1", chunks=(n,), **GZIP)
        array.id.write_direct_chunk((0,), b"a few bytes")
    report = check_files(path, sandbox=True, sandbox_memory="512 MiB")
    (problem,) = report.errors
    assert (problem.array, problem.kind) == ("x", "memory")
    assert "no memory is left to read it from row 0 on" in problem.text
    assert "more than sandbox_memory=536,870,912 bytes" in problem.text
    assert report.n_bytes == VALUES.nbytes


def test_a_child_cannot_take_more_than_its_limits(tmp_path):
    """What it is left with, asked in the child itself after it gave up the rest."""
    code = f"""
import json, os, resource, sys
from lightning_h5.tools.check import sandbox
assert not {{"numpy", "h5py"}} & set(sys.modules), "its limits come first"
sandbox._limit_process({{"memory": 1 << 30, "cpu": 7, "parent": os.getppid()}})
from lightning_h5.tools.check import check
import ctypes, numpy
found = {{n: resource.getrlimit(getattr(resource, n)) for n in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_CORE")}}
found["torch"] = "torch" in sys.modules
found["prctl"] = [ctypes.CDLL(None).prctl(n, 0, 0, 0, 0) for n in (3, 39)]
for name, what in {{
    "memory": lambda: numpy.ones(1 << 30, "u1"),
    "file": lambda: open({str(tmp_path / "written")!r}, "wb").write(bytes(17 << 20)),
    "more": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32)),
}}.items():
    try:
        what()
        found[name] = "done"
    except Exception as why:
        found[name] = type(why).__name__
print(json.dumps(found))
"""
    command = [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    found = json.loads(done.stdout or "{}")
    assert found, done.stderr
    assert found["RLIMIT_AS"] == [1 << 30] * 2
    assert found["RLIMIT_CPU"][0] == 7
    assert found["RLIMIT_CORE"] == [0, 0]
    assert found["torch"] is False
    assert found["prctl"] == [0, 1]  # no dumps; no new privileges
    assert "done" not in (found["memory"], found["file"])
    assert found["more"] != "done" or os.geteuid() == 0  # root may take back what it gave up


def test_a_child_has_a_pipe_and_nothing_else_of_ours(make_h5, child_does, tmp_path):
    path = make_h5(x=VALUES)
    child_does(f"ls -l /proc/$$/fd > {tmp_path}/fds")

    def check():
        with open(tmp_path / "secret", "wb") as file:
            for number in (0, 2, 70):
                os.dup2(file.fileno(), number, inheritable=True)
            check_files(path, sandbox=True)

    assert run_forked(check) == 0
    lines = [line.split()[-3:] for line in (tmp_path / "fds").read_text().splitlines()[1:]]
    opened = {number: target for number, _, target in lines}
    assert opened["0"] == opened["2"] == os.devnull
    assert "secret" not in str(opened)
    assert len(opened) <= 4  # the shell may hold one while it starts `ls`


def test_a_child_is_started_in_an_empty_folder_and_with_what_it_needs_of_the_environment_alone(
    make_h5, child_does, monkeypatch, tmp_path
):
    """Libraries look for plugins of theirs where they are started, by paths of the environment, and by `python`."""
    path = make_h5(x=VALUES)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "SECRET"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "BEST_EFFORT")
    child_does(f"env > {tmp_path}/env; ls -A > {tmp_path}/ls; echo > made")
    check_files(path, sandbox=True)
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert not names & {"PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "SECRET", "PATH", "HOME"}
    assert "HDF5_USE_FILE_LOCKING" in names
    assert (tmp_path / "ls").read_text() == ""
    assert os.listdir(tmp_path / "temporary") == []


def test_a_child_imports_nothing_from_where_it_is_started(make_h5, monkeypatch, tmp_path):
    path = make_h5(x=VALUES)
    (tmp_path / "h5py.py").write_text(f"open({str(tmp_path / 'was here')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    for place in ("", str(tmp_path)):
        monkeypatch.setattr(sys, "path", [place, *sys.path])
        assert problems(check_files(path, sandbox=True)) == []
    assert not (tmp_path / "was here").exists()


def test_what_lies_in_the_working_directory_is_known_to_a_child(make_h5, monkeypatch, tmp_path):
    """HDF5 looks for other files there, too, when the file is trained from."""
    path = make_h5(x=VALUES)
    with h5py.File(path, "a") as file:
        file["out"] = h5py.ExternalLink("other.h5", "/x")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for text in ("which does not exist", "it was not followed"):
        apart_found, found = (check_files(path, sandbox=sandbox).warnings for sandbox in (True, False))
        assert apart_found == found
        assert text in found[0].text
        (tmp_path / "here" / "other.h5").touch()


def test_a_child_whose_parent_is_gone_already_does_nothing():
    leave = os._exit

    def orphan():
        sandbox.os._exit = lambda code: leave(70 + code)
        sandbox._limit_process({"memory": 1 << 40, "cpu": 100, "parent": os.getpid()})

    assert run_forked(orphan) == 71


# Files that the library itself does not survive -------------------------------------------------------------


def make_crashing(path):
    """A wrong checksum in the header of a chunk index, on which HDF5 2.0 crashes when it is asked for the sizes."""
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", data=VALUES, chunks=(STEP, 20), maxshape=(None, None))
    edit(path, path.read_bytes().index(b"BTHD") + 34)


def make_hanging(path):
    """The free room of a heap of texts has the size 0, so that HDF5 2.0 goes on from there to there for ever."""
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("s", data=["abc", "x"] * 20, dtype=h5py.string_dtype())
    content = path.read_bytes()
    at = content.index(b"GCOL") + 16
    while struct.unpack_from("<H", content, at)[0]:
        at += 16 + -(-struct.unpack_from("<Q", content, at + 8)[0] // 8) * 8
    edit(path, at + 8, bytes(8))


def check_quietly(path):
    """A crash is expected, and no stack of it."""
    faulthandler.disable()
    check_files(path)


@pytest.mark.parametrize(("make", "seconds"), [(make_crashing, HANG), (make_hanging, 20)])
def test_a_file_that_ends_whoever_opens_it_gets_a_verdict(tmp_path, make_h5, make, seconds):
    """Which files these are depends on the library: a forked process shows what happens without a sandbox."""
    path = tmp_path / "bad.h5"
    make(path)
    code = run_forked(partial(check_quietly, path), seconds=seconds)
    report = check_files([make_h5(x=VALUES), path], sandbox=True, sandbox_seconds=seconds)
    kinds = [problem.kind for problem in report.errors if problem.file == str(path)]
    if code == -signal.SIGKILL:
        assert kinds == ["hung"]
    elif code < 0:
        assert kinds == ["crashed"]
        assert signal.Signals(-code).name in report.errors[0].text
    else:
        assert code == 0
        assert not {"hung", "crashed", "died"} & set(kinds)
    assert report.n_bytes >= VALUES.nbytes


# This process -----------------------------------------------------------------------------------------------


class Opened:
    """Counts how often a file is opened, by whomever, as the kernel tells it."""

    IN_OPEN, IN_NONBLOCK = 0x20, 0o4000

    def __init__(self, path):
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(self.IN_NONBLOCK)
        assert self._fd >= 0
        assert libc.inotify_add_watch(self._fd, os.fsencode(path), self.IN_OPEN) >= 0

    def times(self):
        """How often since the last time."""
        n = 0
        while True:
            try:
                content = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return n
            while content:
                n += 1
                content = content[16 + struct.unpack_from("=I", content, 12)[0] :]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._fd)


def test_this_process_never_opens_the_file(make_h5, child_does):
    path = make_h5(x=VALUES)
    with Opened(path) as opened:
        assert check_files(path, sandbox=True).n_bytes == VALUES.nbytes
        first = opened.times()
        assert first >= 1  # by the child, which shows that it would be seen
        child_does(f"echo '{NOTHING}'")
        check_files([path, make_h5(x=VALUES)], sandbox=True)
        assert opened.times() == 0
    assert path not in Path("/proc/self/maps").read_text()


@pytest.mark.wide
def test_many_files_are_checked_and_reported_in_order(make_h5, child_does, monkeypatch, tmp_path):
    path = make_h5(x=VALUES)
    (tmp_path / "many").mkdir()
    for n in range(20):
        shutil.copy(path, tmp_path / "many" / f"{n:02}.h5")
    for fate, script in (
        ("", f"echo '{NOTHING}'"),
        ("3.h5", "kill -SEGV $$"),
        ("7.h5", "exit 3"),
        ("9.h5", f"sleep {LONG}"),
    ):
        child_does(f"echo $$ >> {tmp_path}/pids; {script}", only=fate)
    report = check_files(tmp_path / "many", sandbox=True, sandbox_seconds=3)
    kinds = {"3": "crashed", "7": "died", "9": "hung"}
    expected = [(f"{n:02}.h5", kinds[str(n)[-1]]) for n in range(20) if str(n)[-1] in kinds]
    assert [(os.path.basename(problem.file), problem.kind) for problem in report.errors] == expected
    assert all(is_gone(pid) for pid in pids_in(tmp_path / "pids", 20))


def test_ctrl_c_ends_it_at_once_and_leaves_no_child(make_h5, child_does, monkeypatch, tmp_path):
    child_does(f"echo $$ >> {tmp_path}/pids; exec sleep {LONG}")
    paths = [make_h5(x=VALUES) for _ in range(5)]

    def check():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            check_files(paths, sandbox=True, sandbox_seconds=LONG)
        except KeyboardInterrupt:
            os._exit(42)

    ours = os.fork()
    if ours == 0:
        check()
        os._exit(1)
    try:
        pids = pids_in(tmp_path / "pids", 1)
        time.sleep(1)  # until it waits for the child; one that is just being started ends with the process instead
        os.kill(ours, signal.SIGINT)
        assert is_gone(ours)
    finally:
        os.kill(ours, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(ours, 0)[1])
    assert code == 42
    assert all(is_gone(pid) for pid in pids)


def test_a_child_ends_with_the_process_that_started_it(make_h5, monkeypatch, tmp_path):
    """Also where that is killed and can end nothing itself."""
    reader, writer = os.pipe()
    in_child(monkeypatch, f"sandbox._check_in_child = lambda task: time.sleep({LONG})")
    real = sandbox.subprocess.Popen

    def started(*arguments, **options):
        process = real(*arguments, **options)
        os.write(writer, f"{process.pid}\n".encode())
        return process

    monkeypatch.setattr(sandbox.subprocess, "Popen", started)
    path = make_h5(x=VALUES)
    ours = os.fork()
    if ours == 0:
        check_files(path, sandbox=True, sandbox_seconds=LONG)
        os._exit(1)
    os.close(writer)
    try:
        child = int(os.read(reader, 100))
        state = Path(f"/proc/{child}/stat")
        end = time.monotonic() + HANG  # until it sleeps: it has bound its life to ours by then
        while "sleep" not in Path(f"/proc/{child}/wchan").read_text() and time.monotonic() < end:
            time.sleep(0.05)
            assert state.exists()
    finally:
        os.close(reader)
        os.kill(ours, signal.SIGKILL)
        os.waitpid(ours, 0)
    assert is_gone(child)


def test_where_no_process_can_be_started_is_an_error_of_ours(make_h5, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(H5WorkerError, match="no process could be started"):
        check_files(make_h5(x=VALUES), sandbox=True)


@pytest.mark.parametrize(
    "options",
    [
        {"sandbox_memory": "much"},
        {"sandbox_memory": "100 MiB"},
        {"sandbox_seconds": 0},
        {"sandbox_seconds": -1.0},
        {"sandbox_seconds": float("nan")},
        {"sandbox_seconds": float("inf")},
        {"sandbox_seconds": True},
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused(make_h5, options):
    with pytest.raises(H5ValueError, match=next(iter(options))):
        check_files(make_h5(x=VALUES), sandbox=True, **options)


def test_large_files_get_more_time_and_files_that_claim_to_be_large_do_not(tmp_path):
    limits = sandbox.SandboxLimits.of("4 GiB", 60)
    (tmp_path / "full").write_bytes(os.urandom(5_000_000))
    (tmp_path / "claims").touch()
    os.truncate(tmp_path / "claims", 10**12)
    assert limits.seconds_of(tmp_path / "full") == 60.5
    assert limits.seconds_of(tmp_path / "claims") < 61
    assert limits.seconds_of(tmp_path / "gone") == 60


# What is reported -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """What a check of a file with all sorts of problems found, as it is reported."""
    path = str(tmp_path_factory.mktemp("reported") / "x.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(STEP, 50), compression="gzip")
        file["g/y"] = np.arange(100.0)
        file["out"] = h5py.ExternalLink("gone.h5", "/x")
        file.create_dataset("never", (99,), "f4")
    found = check_file(path, CheckOptions(), 1, lambda n: None)
    assert found.problems
    return path, json.loads(json.dumps(asdict(found)))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def places_in(value, at=()):
    """Every place in a value of lists and dicts."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places_in(inner, (*at, key))


@given(data=st.data())
@settings(max_examples=examples(150))
def test_whatever_is_reported_becomes_plain_values_or_a_problem(reported, data):
    path, value = reported
    for _ in range(data.draw(st.integers(1, 3))):
        value = with_changed(value, data.draw(st.sampled_from(list(places_in(value)))), data.draw(ANYTHING))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "run_in_sandbox", lambda *arguments: value)
        found = check._check_in_sandbox(path, CheckOptions(), sandbox.SandboxLimits.of("4 GiB", 60))
    assert all(problem.file == path for problem in found.problems)
    assert_plain(found)


def with_changed(value, at, new):
    """A copy of a value of lists and dicts, with something else at one place."""
    copy = json.loads(json.dumps(value))
    if not at:
        return new
    inner = copy
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = new
    return copy


def assert_plain(found):
    assert type(found) is Findings
    for problem in found.problems:
        assert type(problem.kind) is type(problem.text) is str
        assert problem.array is None or type(problem.array) is str
        assert problem.severity in ("error", "warning")
    for name, (look, n_rows) in found.arrays.items():
        assert type(name) is type(look) is str
        assert type(n_rows) is int
    assert type(found.n_decoded) is int
    assert all(type(name) is str and level in (0, 1, 2, 3) for name, level in found.integrity.items())


@pytest.mark.wide
def test_a_file_with_very_many_arrays_is_compared(make_h5, child_does, tmp_path):
    """A list as long as a child may tell."""
    arrays = {f"a{n}": ["u1 ()", 10_000 + n % 9000] for n in range(50_000)}
    text = json.dumps({**json.loads(NOTHING), "arrays": arrays})
    (tmp_path / "told").write_text(text)
    child_does(f"cat {tmp_path}/told")
    report = check_files(make_h5(x=VALUES), sandbox=True, sandbox_seconds=HANG)
    assert report.n_arrays == 50_000
