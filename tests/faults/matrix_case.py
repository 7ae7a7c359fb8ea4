"""What a fault is, and the file that it befalls: small, with rows that tell themselves apart."""

import inspect
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import h5py
import numpy as np

ROWS, STEP, WIDTH = 48, 4, 64  # rows of the file, rows per chunk, numbers per row
BAD = 5  # the damaged chunk
BAD_ROW = BAD * STEP
REFUSED, RIGHT = "refused", "right"
GZIP = {"chunks": (STEP, WIDTH), "compression": "gzip"}
CHECKED = {"chunks": (STEP, WIDTH), "fletcher32": True}
BOTH = GZIP | CHECKED
CHUNKED = {"chunks": (STEP, WIDTH)}

FAULTS: dict[str, "Fault"] = {}


@dataclass(frozen=True)
class Fault:
    """One way in which a file, or an array in it, is not as it should be.

    ``steps`` befalls a ``Case``; where it is a generator it goes on to the first ``yield`` before ``setup``, to the
    second one between ``setup`` and the first batch, and to its end after some batches. ``expected`` is what each data
    module is to make of it, ``key`` the array that a refusal names, and ``cause`` a pattern that it fits: to name a
    wrong cause is worse than to name none.
    """

    name: str
    steps: Callable
    expected: dict[str, str]
    key: str | None
    cause: str
    slow: bool
    options: dict

    def befall(self, case):
        """The stages of the fault, one a ``next``."""
        if inspect.isgeneratorfunction(self.steps):
            yield from self.steps(case)
        else:
            self.steps(case)
        while True:
            yield


def fault(expected, *, key=None, cause="", cached=None, combined=None, slow=False, **options):
    """Registers a fault; ``cached`` and ``combined`` say where these modules' verdict is another.

    ``slow`` ones are like others, and left out where time is short. The ``options`` go to all data modules.
    """

    def register(steps):
        name = steps.__name__.replace("_", " ")
        verdicts = {"lazy": expected, "cached": cached or expected, "combined": combined or expected}
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, steps, verdicts, key, cause, slow, options)
        return steps

    return register


@dataclass
class Case:
    """The files of one cell, and what their rows really are."""

    folder: str
    paths: list = field(default_factory=list)
    truth: dict = field(default_factory=dict)
    x_key: str = "x"
    blamed: str = ""  # the file that a refusal must name
    undo: list = field(default_factory=list)  # calls to make before the cell is checked again

    def __post_init__(self):
        self.paths, self.blamed = [self.at("data.h5")], self.at("data.h5")
        self.truth = {"x": values_of(), "y": np.arange(ROWS) * 7 + 3}

    @property
    def path(self):
        return self.paths[0]

    def at(self, name):
        """The path of another file of this cell."""
        return os.path.join(self.folder, name)

    def write(self, x=None, *, name="data.h5", libver=None, userblock=0, inside=None, y=None, **storage):
        """Writes ``x`` and ``y``; ``inside`` makes ``x`` itself, in the open file."""
        if x is not None:
            self.truth["x"] = x
        if y is not None:
            self.truth["y"] = y
        with h5py.File(self.at(name), "w", libver=libver, userblock_size=userblock) as file:
            if inside is None:
                file.create_dataset("x", data=self.truth["x"], **storage)
            else:
                inside(file)
            file["y"] = self.truth["y"]
        return self.at(name)

    def chunk(self, number=BAD):
        """Where a chunk of ``x`` lies, as HDF5 says it."""
        with h5py.File(self.path) as file:
            return file["x"].id.get_chunk_info_by_coord((number * STEP, 0))

    def put_chunk(self, content, mask=0):
        """Stores bytes as the bad chunk, through the library: the index fits them."""
        with h5py.File(self.path, "r+") as file:
            file["x"].id.write_direct_chunk((BAD_ROW, 0), content, mask)

    def edit(self, offset, content=None):
        """Changes bytes in place: those given, or one bit."""
        with open(self.path, "r+b") as file:
            file.seek(offset)
            if content is None:
                content = bytes([file.read(1)[0] ^ 0x10])
                file.seek(offset)
            file.write(content)

    def find(self, content):
        """Where the only occurrence of some bytes is."""
        with open(self.path, "rb") as file:
            found = file.read()
        assert found.count(content) == 1, f"{content!r} is there {found.count(content)} times"
        return found.index(content)

    def readdress(self, old, new, n_bytes=None):
        """Has the file's own tables say another place; those of a contiguous array have its bytes after it."""
        tail = b"" if n_bytes is None else struct.pack("<Q", n_bytes)
        self.edit(self.find(struct.pack("<Q", old) + tail), struct.pack("<Q", new))

    def put_in_place(self, owner, attribute, other):
        """Has this process, and workers that it forks from now on, find another function under a name."""
        self.undo.append(partial(setattr, owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, other)

    def replace(self, *, x=None, **storage):
        """Puts another file in the place of the first one, as downloads do; the truth stays what it was."""
        kept = dict(self.truth)
        os.replace(self.write(values_of(seed=1) if x is None else x, name="new.h5", **storage), self.path)
        self.truth = kept


def values_of(seed=0, rows=ROWS, dtype="i4"):
    """Rows of few different numbers, so that each compressor makes them smaller; the first one is the row's own."""
    values = np.random.default_rng(seed).integers(0, 9, (rows, WIDTH)).astype(dtype)
    values[:, 0] = np.arange(rows) + 1000 * seed
    return values
