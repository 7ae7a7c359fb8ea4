"""Many runs in which a worker meets its end in some way, at some batch: one error that says how, and then on again."""

import ctypes
import itertools
import mmap
import os
import random
import re
import resource
import signal
import statistics
import time
from dataclasses import dataclass
from multiprocessing import active_children

import h5py
import numpy as np
import processes  # noqa: F401  # whose server of processes has imported everything
import pytest
from arguments import nested
from guards import HANG
from leftovers import nothing_is_left

from lightning_h5 import CombinedHDF5DataModule, H5WorkerError, LazyH5DataModule
from lightning_h5.hdf5 import process_pool

ROWS, BATCH = 240, 8
STEPS = ROWS // BATCH
HANG_SECONDS = 10  # a worker that is well gives a batch in a hundredth of that
TRUTH = np.arange(ROWS, dtype="f4")[:, None] * [1, 2, 3]
WIDTHS = (3, 1024, 2048)
"""Of a row: batches of a few bytes, and of 32 and 64 KiB. These go with their message, and a pipe holds 64 KiB."""


class OwnError(Exception):
    """What a user's transform raises."""


def die_by(number):
    os.kill(os.getpid(), number)


def crash():
    ctypes.string_at(0)


def touch_what_is_gone():
    """Looks at a mapped file that was truncated."""
    fd = os.memfd_create("gone")
    os.ftruncate(fd, mmap.PAGESIZE)
    gone = mmap.mmap(fd, mmap.PAGESIZE)
    os.ftruncate(fd, 0)
    gone[0]


def take_all_memory():
    with open("/proc/self/statm") as file:
        n_bytes = int(file.read().split()[0]) * mmap.PAGESIZE + (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
    bytearray(1 << 40)  # more than any heap has free


def fail():
    raise OwnError("of my own")


FATES = {
    "SIGKILL": lambda: die_by(signal.SIGKILL),
    "SIGSEGV": crash,
    "SIGBUS": touch_what_is_gone,
    "SIGABRT": os.abort,
    "exit": lambda: os._exit(7),
    "hang": lambda: time.sleep(3600),
    "no memory": take_all_memory,
    "an error of its own": fail,
    "SIGKILL from outside": None,
}
RAISED = {"no memory": MemoryError, "an error of its own": OwnError}
CAUSES = {
    "exit": "ended with exit code 7",
    "hang": f"returned no batch for {HANG_SECONDS} s (timeout)",
    "SIGKILL from outside": "was ended by SIGKILL",
}


@dataclass(frozen=True)
class Run:
    """One run, drawn by its number."""

    number: int
    kind: str
    fate: str
    row: int  # at which a worker meets its fate
    step: int  # after which it is killed from outside
    n_workers: int
    is_persistent: bool
    method: str
    width: int
    pause: float  # seconds that the consumer takes for a batch


def draw(number, methods=("fork",)):
    fates = list(FATES)
    random.Random(number // len(fates)).shuffle(fates)  # each of them comes equally often
    chosen = random.Random(10_000 + number)
    fate = fates[number % len(fates)]
    return Run(
        number,
        kind=chosen.choice(["lazy", "combined"]),
        fate=fate,
        row=chosen.randrange(ROWS),
        step=chosen.randrange(STEPS // 2),
        n_workers=chosen.randint(1, 3),
        is_persistent=chosen.random() < 0.5,
        method="fork" if fate == "hang" else chosen.choice(methods),  # others take longer to start than its limit
        width=chosen.choice(WIDTHS),
        pause=chosen.choice([0, 0.005, 0.05]),
    )


class Fate:
    """A transform that brings a worker's end at a row, once: a file says when."""

    def __init__(self, run, told):
        self.fate, self.row, self.told = run.fate, run.row, str(told)

    def __call__(self, sample):
        x = x_of(sample)
        if int(x[0]) == self.row and FATES[self.fate] is not None and not os.path.exists(self.told):
            with open(self.told, "w") as file:
                file.write(repr(time.monotonic()))
            FATES[self.fate]()
        return sample


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for part, rows in enumerate(np.split(np.arange(ROWS), [100])):
        with h5py.File(folder / f"{part}.h5", "w") as file:
            for width in WIDTHS:
                data = np.resize(TRUTH.T, (width, ROWS)).T[rows]
                file.create_dataset(f"x{width}", data=data, chunks=(16, width), compression="lzf")
            file["row"] = rows
    return sorted(map(str, folder.glob("*.h5")))


def loader_of(run, files, told):
    options = {
        "batch_size": BATCH,
        "num_workers": run.n_workers,
        "persistent_workers": run.is_persistent,
        "multiprocessing_context": run.method,
        "transform": Fate(run, told),
        "timeout": HANG_SECONDS if run.fate == "hang" else HANG,
        "rank": 0,
        "world_size": 1,
    }
    if run.kind == "lazy":
        module = LazyH5DataModule(files, **nested(x_key=f"x{run.width}", **options))
    else:
        fields = [f"x{run.width}", *([f"x{WIDTHS[1]}"] if run.width > WIDTHS[1] else []), "row"]
        module = CombinedHDF5DataModule(files, **nested(fields=fields, **options))
    module.setup("fit")
    return module, module.train_dataloader()


def x_of(batch):
    """The first field: of a sample, or of a batch."""
    return next(iter(batch.values())) if isinstance(batch, dict) else batch


def assert_right(batch, rows):
    x = x_of(batch).numpy()
    assert np.array_equal(x, np.resize(TRUTH.T, (x.shape[1], ROWS)).T[rows])
    if isinstance(batch, dict):
        assert batch["row"].tolist() == rows.tolist()


class Told:
    """What the runs have shown."""

    def __init__(self):
        self.n, self.n_named, self.n_rows_named, self.seconds, self.hang_seconds = 0, 0, 0, [], []

    def __str__(self):
        seconds, hang = self.seconds or [0], self.hang_seconds or [0]
        return (
            f"worker runs: {self.n}; cause named in {self.n_named} of {self.n}; the very rows named in "
            f"{self.n_rows_named}; seconds until the error: median {statistics.median(seconds):.3f}, "
            f"most {max(seconds):.3f}; of hangs beyond the limit: most {max(hang):.3f}"
        )


def play(run, files, folder, told):
    """One run: what was handed out, the error, and the epoch after it."""
    stamp = folder / f"{run.number}.told"
    module, loader = loader_of(run, files, stamp)
    expected = [token.rows for token in loader.sampler.tokens(loader.sampler.starting_epoch())]
    given = []

    def train():
        for batch in loader:
            assert_right(batch, expected[len(given)])
            given.append(time.monotonic())
            if run.fate == "SIGKILL from outside" and len(given) == run.step + 1:
                stamp.write_text(repr(time.monotonic()))
                os.kill(random.Random(run.number).choice(active_children()).pid, signal.SIGKILL)
            time.sleep(run.pause)

    assert not active_children()
    with pytest.raises((H5WorkerError, *RAISED.values())) as caught:
        train()
    assert stamp.exists(), caught.value
    seconds = time.monotonic() - float(stamp.read_text())
    (told.hang_seconds if run.fate == "hang" else told.seconds).append(seconds - HANG_SECONDS * (run.fate == "hang"))
    judge(run, caught.value, expected, len(given), files, told)
    rows = [token.rows for token in loader.sampler.tokens(loader.sampler.starting_epoch())]
    n_again = 0
    for batch, some in itertools.zip_longest(loader, rows):
        assert_right(batch, some)
        n_again += len(some)
    assert n_again == ROWS
    loader.close()
    module.teardown("fit")


def judge(run, error, expected, n_given, files, told):
    """That an error says how it came to it, and over which rows."""
    text = str(error)
    told.n += 1
    if run.fate in RAISED:
        assert type(error) is RAISED[run.fate], text
        told.n_named += 1
        told.n_rows_named += 1
        return
    assert isinstance(error, H5WorkerError), text
    told.n_named += CAUSES.get(run.fate, f"was ended by {run.fate}") in text
    assert re.match(r"worker [0-2] ", text)
    step, rows = re.search(r"it was loading step (\d+) of epoch 0, rows ([\d, ]+) of ", text).groups()
    assert int(step) >= n_given, text
    named = [int(row) for row in rows.split(",")]
    assert named == expected[int(step)].tolist(), text
    assert [path for path in files if repr(path) in text] == sorted({files[row >= 100] for row in named}), text
    told.n_rows_named += run.row in named or run.fate == "SIGKILL from outside"


def play_all(runs, files, folder):
    told = Told()
    for run in runs:
        try:
            with nothing_is_left():
                play(run, files, folder, told)
                process_pool().close()
        except BaseException:
            print("failed:", run)
            raise
    print(told)
    return told


def warm(methods, files, folder):
    """Has Python and torch open what they open once for all."""
    for method in set(methods):
        run = Run(0, "lazy", "SIGKILL from outside", 0, 0, 1, False, method, WIDTHS[0], 0)
        assert len(list(loader_of(run, files, folder / "told")[1])) == STEPS
    process_pool().close()


@pytest.mark.parametrize(
    ("numbers", "methods"),
    [
        pytest.param(range(5), ("fork",), marks=pytest.mark.wide),
        pytest.param(
            range(20, 220),
            ("fork",) * 97 + ("forkserver",) * 2 + ("spawn",),
            marks=[pytest.mark.slow, pytest.mark.timeout(1800)],
        ),
    ],
    ids=["5 runs", "200 runs"],
)
def test_a_worker_that_meets_its_end_is_one_error_that_says_how_and_the_next_epoch_is_whole(
    files, tmp_path, numbers, methods
):
    warm(methods, files, tmp_path)
    told = play_all([draw(number, methods) for number in numbers], files, tmp_path)
    assert told.n_named == told.n
    assert told.n_rows_named == told.n
