"""Files that are made to do harm: refused with the argument that would let them pass, or read rightly.

What they reach for is never opened, not even to be refused: inotify tells of each opening of a file.
"""

import faulthandler
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import chain

import crafting
import h5py
import numpy as np
import pytest
import torch
from arguments import nested
from crafting import ANY, CASES, ESCAPE, MINE, ROWS, SECRET, Watch
from factories import run_forked
from guards import HANG

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5LazyDataset,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
    check_files,
    compute_stats,
    inspect_file,
    repack_file,
)
from lightning_h5.cli import main
from lightning_h5.errors import H5Error, H5FileError, H5KeyError, H5ValueError
from lightning_h5.hdf5 import find_array, open_h5, process_pool

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify")

RAW = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]")  # what moves a cursor or ends a line; not "\n"


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return CASES[request.param]


@pytest.fixture
def path(case, tmp_path):
    return crafting.write(case, tmp_path)


@pytest.fixture
def elsewhere(path, tmp_path):
    """A watch on what the file reaches for. A FIFO is held open, so that who opens it does not hang."""
    fifo = os.open(tmp_path / "elsewhere" / "fifo", os.O_RDWR | os.O_NONBLOCK)
    watch = Watch(str(tmp_path / "elsewhere"))
    yield watch
    watch.close()
    os.close(fifo)


def rows_of(module):
    """All rows of a data module, as it is used."""
    try:
        module.setup("fit")
        batches = list(module.train_dataloader())
        values = [next(iter(batch.values())) if isinstance(batch, dict) else batch for batch in batches]
        return torch.cat(values).numpy() if torch.is_tensor(values[0]) else list(chain.from_iterable(values))
    finally:
        module.teardown()
        process_pool().close()


QUIET = {"shuffle": False, "batch_size": 4}
MODULES = {
    "lazy": lambda path, key, **more: rows_of(LazyH5DataModule(path, **nested(x_key={"x": key}, **QUIET, **more))),
    "cached": lambda path, key, **more: rows_of(
        RankCachedH5DataModule(path, **nested(x_key={"x": key}, **QUIET, **more))
    ),
    "combined": lambda path, key, **more: rows_of(
        CombinedHDF5DataModule(path, **nested(fields={"x": key}, x_dtype=None, **QUIET, **more))
    ),
}
OTHERS = {
    "lazy, no key": lambda path, key: rows_of(LazyH5DataModule(path, **nested(**QUIET))),
    "combined, no key": lambda path, key: rows_of(CombinedHDF5DataModule(path, **nested(**QUIET))),
    "a key that is not there": lambda path, key: H5LazyDataset(path, "no such key"),
    "inspect": lambda path, key: inspect_file(path),
    "check": lambda path, key: check_files(path),
    "check of a key": lambda path, key: check_files(path, keys=key),
    "stats": lambda path, key: compute_stats(path, key),
    "stats, no key": lambda path, key: compute_stats(path),
    "repack": lambda path, key: repack_file(path, f"{path}.copy", verify=True),
    "repack, all anew": lambda path, key: repack_file(path, f"{path}.copy2", compression="gzip", rows_per_chunk=2),
}
MEMORY = 2 << 30  # bytes of addresses
BOMBS = [name for name in CASES if name.startswith(("bomb", "large"))]


@pytest.mark.wide
def test_data_modules_refuse_by_name_or_read_rightly_and_open_no_other_file(case, path, elsewhere, tmp_path):
    """In a child, which may crash."""

    def use():
        faults = []
        for name, module in MODULES.items():
            error = values = None
            try:
                values = module(path, case.key)
            except H5Error as refused:
                error = refused
            if opened := elsewhere.opened():
                faults.append(f"{name}: {opened} were opened; the answer was {error!r}")
            faults += [f"{name}: {fault}" for fault in faults_of(case, path, values, error)]
        assert not faults, "\n".join(faults)

    assert run_limited(use) == 0
    assert not (tmp_path / "elsewhere" / "owned").exists(), "a payload was unpickled"


def run_limited(function):
    """Runs it in a child with 2 GiB more than this process has; its exit code."""

    def work():
        with open("/proc/self/statm") as file:
            n_bytes = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        function()

    return run_forked(work)


def faults_of(case, path, values, error):
    """What is wrong with an answer."""
    has_cheap_random_access = case.opt_in is None and case.refusal is None
    if error is None:
        if not has_cheap_random_access:
            yield f"it was not refused, and gave {values[:1]}"
        elif case.values is not ANY and not np.array_equal(values, case.values, equal_nan=True):
            yield f"it gave {values}"
        return
    text = str(error)
    if has_cheap_random_access and case.values is not ANY:
        yield f"it was refused: {text!r}"
    if path not in text or (repr(case.key) not in text and not isinstance(error, H5FileError)):
        yield f"file or array are not named: {text!r}"
    if case.opt_in is not None and f"{case.opt_in}=True" not in text:
        yield f"{case.opt_in} is not named: {text!r}"
    if case.refusal is not None and not re.search(case.refusal, text):
        yield f"that is not the reason: {text!r}"
    yield from faults_of_text(text)


def faults_of_text(text):
    """What is wrong with any message."""
    if RAW.search(text):
        yield f"there are escapes in {text!r}"
    if len(text) > 4_000:
        yield f"it has {len(text):,} characters"


@pytest.mark.wide
def test_nothing_else_opens_another_file_or_ends_in_another_error(case, path, elsewhere, tmp_path):
    is_bomb = case in [CASES[name] for name in BOMBS]  # what these take is measured below

    def use():
        faults = []
        for name, way in OTHERS.items():
            if is_bomb and name.startswith(("check", "repack", "stats")):
                continue
            try:
                way(path, case.key)
            except H5Error as refused:
                faults += [f"{name}: {fault}" for fault in faults_of_text(str(refused))]
            except Exception as error:
                faults.append(f"{name}: {type(error).__name__}: {error}")
            if opened := elsewhere.opened():
                faults.append(f"{name}: {opened} were opened")
            process_pool().close()
        assert not faults, "\n".join(faults)

    assert run_limited(use) == 0
    assert not (tmp_path / "elsewhere" / "owned").exists(), "a payload was unpickled"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.leaves])
def test_the_watch_sees_what_is_opened_with_leave(name, tmp_path):
    """And that the file would have led there: without that, the tests above show nothing."""
    case, path = CASES[name], crafting.write(CASES[name], tmp_path)
    watch = Watch(str(tmp_path / "elsewhere"))
    for module in MODULES.values():
        values = module(path, case.key, files={"allow_external": True})
        assert watch.opened() & {"secret.h5", "secret.bin"}
        np.testing.assert_array_equal(values, SECRET)
    watch.close()


def test_a_relative_name_of_a_virtual_source_is_another_file(tmp_path, monkeypatch):
    """HDF5 looks beside the file first: "sub/data.h5", named in "sub/data.h5", is "sub/sub/data.h5"."""
    (tmp_path / "sub" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with h5py.File("sub/sub/data.h5", "w") as file:
        file["y"] = SECRET
    with h5py.File("sub/data.h5", "w") as file:
        file["y"] = MINE
        crafting.virtual(file, "x", [(crafting.whole(), "sub/data.h5", "y", crafting.whole())])
    watch = Watch("sub/sub")
    with open_h5("sub/data.h5") as file, pytest.raises(H5ValueError, match="allow_external=True"):
        find_array(file, "x")
    repack_file("sub/data.h5", "copy.h5")
    inspect_file("sub/data.h5")
    assert not watch.opened()
    watch.close()


@pytest.mark.wide
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_no_system_call_opens_another_file(tmp_path):
    """Once more from outside, for all files together: no open of any kind has a name of ``elsewhere`` in it."""
    cases = {name: case for name, case in CASES.items() if case.opt_in == "allow_external"}
    paths = {name: crafting.write(case, tmp_path / name) for name, case in cases.items()}
    control = paths["link_absolute"]
    log, (receiver, sender) = tmp_path / "calls", os.pipe()

    def work():
        os.read(receiver, 1)
        for name, path in paths.items():
            for way in (*MODULES.values(), OTHERS["inspect"], OTHERS["check"], OTHERS["lazy, no key"]):
                with suppress(H5Error):
                    way(path, cases[name].key)
        os.close(os.open(tmp_path, os.O_RDONLY))  # from here on it is allowed
        MODULES["lazy"](control, "x", files={"allow_external": True})

    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-e", "trace=open,openat,openat2,creat,execve", "-o", str(log), "-p", str(pid)],
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + HANG
        while _tracer_of(pid) == 0 and tracer.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        attached = _tracer_of(pid) != 0
        os.write(sender, b"x")
        if not attached:
            pytest.skip("strace may not look at other processes here")
        tracer.wait(HANG)
    finally:
        tracer.kill()
        tracer.wait()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(receiver), os.close(sender)
    calls = log.read_text().splitlines()
    allowed_from = max(at for at, call in enumerate(calls) if f'"{tmp_path}", O_RDONLY' in call)
    reached = [at for at, call in enumerate(calls) if re.search(r"elsewhere/|/dev/zero", call)]
    assert [calls[at] for at in reached if at < allowed_from] == []
    assert any("elsewhere/secret.h5" in calls[at] for at in reached), "strace saw nothing"


def _tracer_of(pid):
    with open(f"/proc/{pid}/status") as file:
        return int(re.search(r"TracerPid:\s*(\d+)", file.read())[1])


# The file itself ---------------------------------------------------------------------------------------------------


def special_files(folder):
    os.mkfifo(folder / "fifo.h5")
    os.symlink(folder / "loop.h5", folder / "loop.h5")
    os.symlink(folder / "fifo.h5", folder / "to_fifo.h5")
    os.mkdir(folder / "folder.h5")
    return ["fifo.h5", "loop.h5", "to_fifo.h5", "folder.h5", "/dev/zero", "/dev/null", "/proc/self/mem"]


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    for name in special_files(tmp_path):
        path = str(tmp_path / name)  # an absolute name stays one
        for way in (*MODULES.values(), *OTHERS.values()):
            if way in (OTHERS["check"], OTHERS["check of a key"]):
                with suppress(H5FileError):  # or their answer is a report
                    assert way(path, "x").errors
                continue
            with pytest.raises(H5FileError, match=re.escape(os.path.basename(name))):
                way(path, "x")


# Sizes ---------------------------------------------------------------------------------------------------------------

WAYS_OF_BOMBS = {**MODULES, **OTHERS}


@pytest.mark.wide
@pytest.mark.parametrize("name", [*BOMBS, "chunk_that_is_too_short"])
def test_bombs_take_little_memory_whoever_looks_at_them(name, tmp_path):
    """In a child with 2 GiB more than it has; touching 256 MiB of it is too much."""
    path = crafting.write(CASES[name], tmp_path)

    def look():
        for way, function in WAYS_OF_BOMBS.items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                function(path, CASES[name].key)
            except H5Error:
                pass
            except BaseException as error:
                raise AssertionError(f"{way}: {type(error).__name__}: {error}") from error
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < 256 << 10, f"{way} took {grown:,} KiB"

    assert run_limited(look) == 0


@pytest.mark.wide
def test_many_arrays_below_the_limit_are_no_way_around_it(tmp_path):
    """300 arrays of 3.9 GiB each, of which nothing is stored: rows are read one by one, and never held at a time."""
    path, names = tmp_path / "many.h5", [f"x{at}" for at in range(300)]
    with h5py.File(path, "w") as file:
        for name in names:
            file.create_dataset(name, (65_000_000, 8), "f8", chunks=(1 << 16, 8))

    def look():
        H5LazyDataset(path, names)[0]
        for load in (
            lambda: RankMemCachedH5Dataset(path, names, x_dtype=None),
            lambda: rows_of(RankCachedH5DataModule(str(path), x_key=names, batch_size=4)),
        ):
            with pytest.raises(H5Error):
                load()
        inspect_file(path)

    assert run_limited(look) == 0


@pytest.mark.wide
def test_ten_thousand_groups_in_groups_end_in_an_answer(tmp_path):
    """In a child, since the HDF5 library calls itself for each level."""
    path = tmp_path / "deep.h5"
    with h5py.File(path, "w", libver="latest") as file:
        crafting.deep(file, None)
        file["x"] = MINE

    def look(way):
        with suppress(H5Error):
            way(str(path), "x")

    for name, way in WAYS_OF_BOMBS.items():
        assert run_limited(partial(look, way)) == 0, name


# Names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["inspect", "inspect --json", "check", "stats", "repack"])
@pytest.mark.parametrize(
    "name", ["names_with_escapes", "filter_with_escapes", "enum_of_long_names", "unprintable_storage"]
)
def test_no_escape_of_a_file_reaches_a_terminal(name, verb, tmp_path, capfd):
    path = os.path.join(tmp_path, f"{ESCAPE}.h5")
    os.rename(crafting.write(CASES[name], tmp_path), path)
    arguments = [*verb.split(), path, *([f"{path}.copy"] if verb == "repack" else [])]
    if verb == "inspect --json":
        arguments = ["inspect", path, "--json"]
    with pytest.raises(SystemExit):
        main(arguments)
    shown = capfd.readouterr()
    for text in (shown.out, shown.err):
        assert not RAW.search(re.sub(r"\r", "", text)), text[:2000]
    assert name != "names_with_escapes" or verb not in ("inspect", "inspect --json") or "bad" in shown.out
    assert ESCAPE not in shown.out + shown.err


def test_an_error_that_lists_names_has_no_raw_escape_and_ends(tmp_path):
    path = crafting.write(CASES["names_with_escapes"], tmp_path)
    with pytest.raises(H5KeyError) as error:
        H5LazyDataset(path, f"bad{ESCAPE}d")
    assert not RAW.search(str(error.value))
    assert "bad" in str(error.value)
    path = crafting.write(CASES["very_many_links"], tmp_path / "links")
    with pytest.raises(H5KeyError) as error:
        H5LazyDataset(path, "nothing")
    assert len(str(error.value)) < 1000


def test_there_are_cases_enough():
    assert len(CASES) >= 50
    assert sum(case.leaves for case in CASES.values()) >= 12
    assert len(MINE) == len(SECRET) == ROWS
