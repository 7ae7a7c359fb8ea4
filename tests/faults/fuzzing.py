"""A fuzzer: damaged copies of small files through the loaders, in forked children, against what h5py read before.

A mutant is a pure function of its base file's name and its number: ``mutant_of(base, number)`` makes it again. A child
takes many of them, one after the other; where it crashes or hangs, that mutant is noted and a new child goes on.
"""

import faulthandler
import json
import logging
import os
import resource
import shutil
import signal
import struct
import time
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import wait
from zlib import crc32

import h5py
import numpy as np
from arguments import nested, nested_files
from factories import Stored, known_filters, write_array
from guards import HANG

from lightning_h5 import H5LazyDataset, LazyH5DataModule, RankMemCachedH5Dataset, inspect_file
from lightning_h5.errors import H5Error
from lightning_h5.hdf5 import process_pool
from lightning_h5.samples import row_table

ROWS = 160
SEED = 20
HANG_SECONDS = HANG
MORE_MEMORY = 3 << 30  # address space that a child may add to what it has at the fork
MAX_KEPT = 10  # mutants per outcome that are written for inspection
PER_CHILD = 250  # mutants, which bounds what HDF5 leaks after errors

VERDICTS = ("right", "refused", "wrong", "moved", "crash", "memory", "foreign", "hang")
"""How a mutant ended. "moved": wrong, where a whole valid chunk took another's place, which no checksum can show."""


# Base files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Base:
    """An undamaged file: its bytes, what its arrays hold, and where what lies.

    ``levels`` are those of x and y. ``chunks`` are ``(offset, size)`` of what the file stores of values; ``masks`` are
    places of the chunks' filter masks; ``tables`` are the places of all bytes that are no values.
    """

    name: str
    content: bytes
    truth: tuple
    levels: tuple
    chunks: list
    masks: list
    tables: np.ndarray
    digests: bytes | None = None

    @property
    def has_heap(self):
        """Whether values lie in a heap of the file, as text of any length does."""
        return self.name.startswith("text,") and "fixed" not in self.name


def _arrays(x_chunks, filters, y=None, *, shape=(ROWS, 64), y_filters=None):
    random = np.random.default_rng(SEED)
    x = random.integers(0, 60, shape).astype("i2")
    y = random.integers(0, 1000, shape[0]) if y is None else y
    if filters is None:
        return {"x": Stored(x), "y": Stored(y)}
    y_type = h5py.string_dtype() if y.dtype == object else None
    return {
        "x": Stored(x, "chunked", x_chunks, filters=filters, maxshape="first"),
        "y": Stored(y, "chunked", (20,), filters=y_filters or filters, maxshape="fixed", dtype=y_type),
    }


def _words(kind):
    words = [f"sleep stage {row % 5} of {row}" for row in range(ROWS)]
    return np.array(words, dtype=object) if kind == "text" else np.array(words, dtype="S")


def recipes():
    """For each base its arrays; with the filters that can be written here."""
    found = {
        "contiguous": _arrays(None, None),
        "chunks without filters": _arrays((8, 64), ()),
        "gzip": _arrays((8, 64), ("gzip",)),
        "lzf": _arrays((8, 64), ("lzf",)),
        "fletcher32": _arrays((8, 64), ("fletcher32",)),
        "shuffle + lzf + fletcher32": _arrays((8, 64), ("shuffle", "lzf", "fletcher32")),
        "shuffle + gzip + fletcher32": _arrays((8, 64), ("shuffle", "gzip", "fletcher32")),
        "parts of rows": _arrays((16, 5, 7), ("gzip", "fletcher32"), shape=(64, 12, 16)),
        "text, fixed": _arrays((8, 64), ("gzip", "fletcher32"), _words("bytes")),
        "text": _arrays((8, 64), ("gzip", "fletcher32"), _words("text"), y_filters=("gzip",)),
    }
    if "zstd" in known_filters():
        found["zstd + fletcher32"] = _arrays((8, 64), ("zstd", "fletcher32"))
    return found


def make_bases(folder, *, digests=None):
    """Base files, each in the oldest and the newest file format.

    ``digests`` is a function that writes a file's digests beside it and gives their path; None writes none.
    """
    bases = []
    for name, arrays in recipes().items():
        for libver in ("earliest", "latest"):
            path = os.path.join(folder, f"base{len(bases)}.h5")
            with h5py.File(path, "w", libver=libver) as file:
                for key, array in arrays.items():
                    write_array(file, key, array)
            beside = None
            if digests is not None:
                with open(digests(path), "rb") as written:
                    beside = written.read()
            bases.append(_base(f"{name}, {libver}", path, beside))
    return bases


def _base(name, path, digests):
    with h5py.File(path) as file:
        truth = tuple(_plain(file[key].asstr()[:] if file[key].dtype.kind in "OS" else file[key][:]) for key in "xy")
        chunks = [piece for key in "xy" for piece in _pieces(file[key].id)]
    with open(path, "rb") as file:
        content = file.read()
    is_table = np.ones(len(content), dtype=bool)
    for offset, size in chunks:
        is_table[offset : offset + size] = False
    levels = {array.name: array.integrity for array in inspect_file(path).arrays}
    masks = [place for offset, size in chunks for place in _mask_places(content, offset, size)] if chunks[2:] else []
    return Base(name, content, truth, (levels["x"], levels["y"]), chunks, masks, np.flatnonzero(is_table), digests)


def _pieces(array_id):
    if array_id.get_create_plist().get_layout() != h5py.h5d.CHUNKED:
        return [(array_id.get_offset(), array_id.get_storage_size())]
    infos = [array_id.get_chunk_info(at) for at in range(array_id.get_num_chunks())]
    return [(info.byte_offset, info.size) for info in infos]


def _mask_places(content, offset, size):
    """Where the mask of a chunk is kept: behind its size in the old index, behind address and size in the new ones."""
    address = struct.pack("<Q", offset)
    at = content.find(address)
    while at >= 0:
        before = content.rfind(struct.pack("<II", size, 0), max(0, at - 48), at)  # size, mask, place, 0, address
        if before >= 0:
            return [before + 4]
        for width in range((size.bit_length() + 7) // 8, 9):  # address, size, mask
            behind = at + 8 + width
            if content[at + 8 : behind] == size.to_bytes(width, "little") and not any(content[behind : behind + 4]):
                return [behind]
        at = content.find(address, at + 1)
    return []


def _plain(values):
    """Values as they are compared: arrays, and text as a list of str."""
    return values.tolist() if values.dtype == object else np.ascontiguousarray(values)


# Mutants ---------------------------------------------------------------------------------------------------------


def _flip(base, data, random, places=None):
    at = int(random.integers(len(data)) if places is None else random.choice(places))
    data[at] ^= 1 << int(random.integers(8))


def _flips(base, data, random):
    for _ in range(int(random.integers(2, 33))):
        _flip(base, data, random)


def _noise(base, data, random):
    at, n = int(random.integers(len(data))), int(2 ** random.uniform(0, 9))
    data[at : at + n] = random.bytes(len(data[at : at + n]))


def _truncated(base, data, random):
    del data[int(random.integers(len(data))) :]


def _zero_chunk(base, data, random):
    offset, size = base.chunks[int(random.integers(len(base.chunks)))]
    data[offset : offset + size] = bytes(size)


def _noisy_chunk(base, data, random):
    offset, size = base.chunks[int(random.integers(len(base.chunks)))]
    data[offset : offset + size] = random.bytes(size)


def _zero_sectors(base, data, random):
    at = int(random.integers(len(data))) // 512 * 512
    n = 512 * int(random.integers(1, 9))
    data[at : at + n] = bytes(len(data[at : at + n]))


def _table_bit(base, data, random):
    _flip(base, data, random, base.tables)


def _table_bytes(base, data, random):
    """Bytes of the file's own tables; often such that numbers become extreme, or others of this file."""
    at = int(random.choice(base.tables))
    n = int(random.choice([1, 2, 4, 8]))
    other = int(random.choice(base.tables))
    values = (bytes(n), b"\xff" * n, b"\x7f" * n, random.bytes(n), base.content[other : other + n])
    new = values[int(random.integers(len(values)))]
    data[at : at + len(new)] = new


def _mask(base, data, random):
    if not base.masks:
        return _table_bit(base, data, random)
    data[int(random.choice(base.masks))] ^= int(random.integers(1, 8))
    return None


def _exchanged(base, data, random):
    """Two chunks in each other's place, of the same size if there are such."""
    first = base.chunks[int(random.integers(len(base.chunks)))]
    same = [each for each in base.chunks if each[1] == first[1] and each != first]
    others = same or [each for each in base.chunks if each != first]
    second = others[int(random.integers(len(others)))]
    n = min(first[1], second[1])
    for target, source in ((first[0], second[0]), (second[0], first[0])):
        data[target : target + n] = base.content[source : source + n]


def _repeated(base, data, random):
    n = int(2 ** random.uniform(0, 11))
    source, target = (int(at) for at in random.integers(max(1, len(data) - n), size=2))
    data[target : target + n] = base.content[source : source + n]


def _inserted(base, data, random):
    at = int(random.integers(len(data)))
    data[at:at] = random.bytes(int(random.integers(1, 64)))


def _removed(base, data, random):
    at = int(random.integers(len(data)))
    del data[at : at + int(random.integers(1, 64))]


def _trailing(base, data, random):
    data += random.bytes(int(random.integers(1, 4096)))


MUTATORS = {
    "a bit": _flip,
    "some bits": _flips,
    "noise": _noise,
    "truncated": _truncated,
    "a chunk of zeros": _zero_chunk,
    "a chunk of noise": _noisy_chunk,
    "sectors of zeros": _zero_sectors,
    "a bit of the tables": _table_bit,
    "bytes of the tables": _table_bytes,
    "a filter mask": _mask,
    "exchanged chunks": _exchanged,
    "a region twice": _repeated,
    "bytes inserted": _inserted,
    "bytes removed": _removed,
    "trailing bytes": _trailing,
}
OFTEN = ("a bit of the tables", "bytes of the tables", "bytes of the tables")
_TURNS = (*MUTATORS, *OFTEN)  # the file's tables are the most likely to mislead a reader


def mutant_of(base, number):
    """The name of a mutator, and the bytes that it made of a base file; the same for the same number."""
    name = _TURNS[number % len(_TURNS)]
    random = np.random.default_rng([SEED, crc32(base.name.encode()), number])
    data = bytearray(base.content)
    MUTATORS[name](base, data, random)
    return name, bytes(data)


# Reading -----------------------------------------------------------------------------------------------------------


def _by_lazy(path, **options):
    dataset = H5LazyDataset(path, "x", "y", **nested_files(**options))
    try:
        return dataset.read_batch(np.arange(len(dataset)))
    finally:
        dataset.close()


def _by_module(path, **options):
    module = LazyH5DataModule(path, **nested(x_key="x", y_key="y", shuffle=False, batch_size=48, **options))
    try:
        module.setup("fit")
        batches = list(module.train_dataloader())
        return tuple(_joined([batch[part] for batch in batches]) for part in (0, 1))
    finally:
        module.teardown()


def _joined(parts):
    if isinstance(parts[0], list):
        return list(chain.from_iterable(parts))
    return np.concatenate([part.numpy() for part in parts])


def _by_cached(path, **options):
    quiet = {"pin_host_memory": False, "log_fn": lambda line: None}
    dataset = RankMemCachedH5Dataset(path, "x", "y", **nested_files(x_dtype=None, **quiet, **options))
    try:
        return dataset.read_batch(np.arange(len(dataset)))
    finally:
        dataset.close()


READERS = {"lazy": (_by_lazy, True), "lazy, in pieces": (_by_lazy, False), "module": (_by_module, False)}
READERS["cached"] = (_by_cached, True)
_HELD_BYTES = row_table.HELD_BYTES


def reader_of(number):
    """The name of the reader whose turn it is; each gets every mutator."""
    return list(READERS)[number // len(_TURNS) % len(READERS)]


def judge(base, number, path, options):
    """Reads a mutant; its verdict, the level that a wrong array has, and what was raised."""
    read, is_held = READERS[reader_of(number)]
    try:
        row_table.HELD_BYTES = _HELD_BYTES if is_held else -1
        found = read(path, **options)
    except H5Error as error:
        return "refused", None, f"{type(error).__name__}: {error}"
    except MemoryError as error:
        return "memory", None, f"{error}"
    except BaseException as error:
        return "foreign", None, f"{type(error).__name__}: {error}"
    finally:
        row_table.HELD_BYTES = _HELD_BYTES
        process_pool().close()
    wrong = [
        level for values, true, level in zip(found, base.truth, base.levels, strict=True) if not _is_equal(values, true)
    ]
    if not wrong:
        return "right", None, ""
    return ("moved" if _TURNS[number % len(_TURNS)] == "exchanged chunks" else "wrong"), max(wrong), ""


def _is_equal(found, true):
    if isinstance(true, list):
        return isinstance(found, list) and found == true
    if isinstance(found, list):
        return False
    found = np.asarray(found)
    return found.dtype == true.dtype and found.shape == true.shape and found.tobytes() == true.tobytes()


# Children ----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of mutants: counts by ``(file, level of the file, verdict)``, and each that is to be looked at."""

    counts: Counter = field(default_factory=Counter)
    found: list = field(default_factory=list)

    def add(self, base, number, verdict, level, text):
        """Notes a verdict; ``level`` is that of the array that came wrong, if one did."""
        self.counts[base.name, min(base.levels), verdict] += 1
        if verdict not in ("right", "refused", "moved"):
            self.found.append((base.name, number, mutant_of(base, number)[0], reader_of(number), verdict, level, text))

    def of(self, verdict, level=None):
        """How many mutants ended so, of files whose arrays have a level, or any."""
        return sum(n for (_, lev, v), n in self.counts.items() if v == verdict and level in (None, lev))

    def listed(self, verdict, level=None):
        """Those that ended so, where an array of that level came wrong, as a list of 20 lines at most."""
        return [f"{each}" for each in self.found if each[4] == verdict and level in (None, each[5])][:20]


def fuzz(bases, numbers, folder, *, keep=None, **options):
    """Puts mutants of all bases through the readers, in forked children; nothing that they do reaches this process.

    Args:
        bases: see ``make_bases``.
        numbers: of mutants, for each base.
        folder: for the mutants.
        keep: a folder for copies of those that are wrong, crash, hang or raise what they should not.
        options: of the readers.
    """
    tally = Tally()
    jobs = [(base, number) for base in bases for number in numbers]
    done = 0
    while done < len(jobs):
        done += _run_child(jobs[done : done + PER_CHILD], folder, tally, options)
    if keep is not None:
        _keep(tally, {base.name: base for base in bases}, keep)
    return tally


def _keep(tally, bases, folder):
    """Writes some mutants of each kind of end into a folder."""
    os.makedirs(folder, exist_ok=True)
    n_kept = Counter()
    for name, number, _, _, verdict, level, _ in tally.found:
        n_kept[verdict, level] += 1
        if n_kept[verdict, level] <= MAX_KEPT:
            with open(os.path.join(folder, f"{verdict} {level} {name} {number}.h5".replace(" ", "_")), "wb") as file:
                file.write(mutant_of(bases[name], number)[1])


def _run_child(jobs, folder, tally, options):
    """Has a child go through jobs; how many are done, with one that the child did not survive."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(receiver)
            errors = os.fdopen(os.dup(2), "w")
            _be_careful()
            _work(jobs, folder, sender, options)
            code = 0
        except BaseException:
            traceback.print_exc(file=errors)
            errors.flush()
        finally:
            os._exit(code)
    os.close(sender)
    done, is_hanging = 0, False
    try:
        with open(receiver, "rb") as lines:
            while True:
                if not wait([lines], HANG_SECONDS):
                    is_hanging = True
                    break
                if not (line := lines.readline()):
                    break
                tally.add(*jobs[done], *json.loads(line))
                done += 1
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if done < len(jobs):
        assert is_hanging or code < 0, f"the fuzzer itself failed at {jobs[done][0].name}, {jobs[done][1]}: exit {code}"
        verdict = "hang" if is_hanging else "crash"
        tally.add(*jobs[done], verdict, None, "" if is_hanging else f"exit code {code}")
        done += 1
    shutil.rmtree(os.path.join(folder, f"of {pid}"), ignore_errors=True)
    return done


def _be_careful():
    """What a child sets for itself: it may crash without a word, take so much memory, and write no cores."""
    faulthandler.disable()
    with open("/proc/self/statm") as file:
        n_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes + MORE_MEMORY, n_bytes + MORE_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def _work(jobs, folder, sender, options):
    own = os.path.join(folder, f"of {os.getpid()}")
    os.mkdir(own)
    for base, number in jobs:
        # A unique name, so that nothing cached for one file is used for another.
        path = os.path.join(own, f"{number} {crc32(base.name.encode())}.h5")
        with open(path, "wb") as file:
            file.write(mutant_of(base, number)[1])
        if base.digests is not None:
            with open(f"{path}.digests.json", "wb") as file:
                file.write(base.digests)
        told = judge(base, number, path, options)
        os.write(sender, json.dumps([told[0], told[1], told[2][:600]]).encode() + b"\n")
        os.remove(path)


# Outcomes ------------------------------------------------------------------------------------------------------------


def report(tally, seconds):
    """A table in Markdown, by level, and the bound that follows from 0 wrong of N."""
    total = sum(tally.counts.values())
    lines = [
        f"{total:,} mutants of {len({name for name, _, _ in tally.counts})} files in {seconds:.0f} seconds",
        "",
        "| level | mutants | " + " | ".join(VERDICTS) + " | wrong: upper 95 % limit |",
        "|---|" + "---|" * (len(VERDICTS) + 2),
    ]
    for level in sorted({level for _, level, _ in tally.counts}):
        n = {verdict: tally.of(verdict, level) for verdict in VERDICTS}
        lines.append(_line(f"{level}", n))
    lines += ["", "| file | mutants | " + " | ".join(VERDICTS) + " | |", "|---|" + "---|" * (len(VERDICTS) + 2)]
    for name in dict.fromkeys(name for name, _, _ in tally.counts):
        n = {verdict: sum(tally.counts[name, level, verdict] for level in range(5)) for verdict in VERDICTS}
        lines.append(_line(name, n))
    return "\n".join(lines)


def _line(name, n):
    total = sum(n.values())
    limit = f"{3 / total:.1e}" if not n["wrong"] and total else ""
    return f"| {name} | {total:,} | " + " | ".join(f"{n[verdict]:,}" for verdict in VERDICTS) + f" | {limit} |"


def timed_fuzz(*arguments, **options):
    """``fuzz`` and its table."""
    began = time.monotonic()
    tally = fuzz(*arguments, **options)
    return tally, report(tally, time.monotonic() - began)
