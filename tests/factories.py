"""What tests make: HDF5 files of any kind, the rows that h5py reads from them, child processes and threads."""

import itertools
import os
import signal
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import h5py
import numpy as np
from guards import HANG


@dataclass
class Stored:
    """An array and how it is to lie in the file; plain arrays may be given instead.

    ``written`` is the number of leading rows that are written at all; the others read as the fill value.

    ``filters`` are names of ``known_filters`` in the order of writing, where h5py's own order will not do. ``masks``
    then says for each chunk, in the order of the grid, which filters it is to skip (bit ``i`` for filter ``i``), or
    None for one that is never written.
    """

    values: np.ndarray
    storage: str = "contiguous"  # or chunked, compact, virtual
    chunks: tuple | None = None
    options: dict = field(default_factory=dict)  # for create_dataset: compression, shuffle, fillvalue ...
    dtype: object = None
    written: int | None = None
    maxshape: object = "any"  # or first, fixed: the axes that may grow, which choose the kind of chunk index
    early: bool = False  # allocate chunks when the array is created
    filters: tuple | None = None
    masks: list | None = None


class H5Factory:
    """Writes files into one directory: ``make_h5(x=array, labels=Stored(...))`` gives the path."""

    def __init__(self, folder):
        self.folder = str(folder)
        self._made = 0

    def __call__(self, arrays=None, *, name=None, userblock=0, libver=None, **more):
        self._made += 1
        path = os.path.join(self.folder, name or f"data{self._made}.h5")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with h5py.File(path, "w", userblock_size=userblock, libver=libver) as file:
            for key, array in {**(arrays or {}), **more}.items():
                write_array(file, key, array if isinstance(array, Stored) else Stored(np.asarray(array)))
        return path


def write_array(file, key, array):
    if array.storage == "virtual":
        return _write_virtual(file, key, array)
    values = array.values
    dtype = values.dtype if array.dtype is None else array.dtype
    base = np.dtype(dtype)
    shape = values.shape[: values.ndim - len(base.shape)]
    options = dict(array.options)
    if array.storage == "chunked":
        options |= {"chunks": array.chunks, "maxshape": _maxshape(array, shape)}
    if array.filters is not None or array.early:
        dataset = create_chunked(file, key, shape, base, array)
        if array.masks is not None:
            _write_with_masks(dataset, values, array)
            return dataset
    elif array.storage == "compact":
        group = file.require_group(os.path.dirname(key) or "/")
        dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        dcpl.set_layout(h5py.h5d.COMPACT)
        space, stored = h5py.h5s.create_simple(shape), h5py.h5t.py_create(base, logical=True)
        dataset = h5py.Dataset(h5py.h5d.create(group.id, os.path.basename(key).encode(), stored, space, dcpl))
    else:
        dataset = file.create_dataset(key, shape, dtype, **options)
    if not shape:
        dataset[()] = values
        return dataset
    written = len(values) if array.written is None else array.written
    if written and values.size:
        dataset[:written] = values[:written]
    return dataset


def _maxshape(array, shape):
    return {"any": (None,) * len(shape), "first": (None, *shape[1:]), "fixed": shape}[array.maxshape]


@cache
def known_filters():
    """For each filter that can be written here: its number and options."""
    known = {"shuffle": (2, ()), "fletcher32": (3, ()), "gzip": (1, (4,)), "gzip 9": (1, (9,)), "lzf": (32000, ())}
    with suppress(ImportError):
        import hdf5plugin as plugin

        made = {
            "zstd": plugin.Zstd(),
            "zstd 15": plugin.Zstd(15),
            "blosc": plugin.Blosc(),
            "blosc zstd, bits": plugin.Blosc(cname="zstd", clevel=3, shuffle=plugin.Blosc.BITSHUFFLE),
            "blosc zlib": plugin.Blosc(cname="zlib", clevel=9, shuffle=plugin.Blosc.NOSHUFFLE),
            "blosc lz4hc": plugin.Blosc(cname="lz4hc", clevel=1),
            "blosc2": plugin.Blosc2(),
            "blosc2 zstd, delta": plugin.Blosc2(cname="zstd", clevel=7, filters=plugin.Blosc2.DELTA),
            "blosc2 lz4, bits": plugin.Blosc2(cname="lz4", filters=plugin.Blosc2.BITSHUFFLE),
            "lz4": plugin.LZ4(),
            "lz4, 64 bytes": plugin.LZ4(nbytes=64),
            "bitshuffle": plugin.Bitshuffle(cname="none"),
            "bitshuffle lz4": plugin.Bitshuffle(),
            "bitshuffle lz4, 16": plugin.Bitshuffle(nelems=16),
            "bitshuffle zstd": plugin.Bitshuffle(cname="zstd"),
            "bzip2": plugin.BZip2(),
        }
        known |= {name: (o["compression"], o["compression_opts"]) for name, o in map(_as_options, made.items())}
    return known


def _as_options(item):
    return item[0], dict(item[1])


COMES_WITH_THE_PACKAGE = ("shuffle", "fletcher32", "gzip", "gzip 9", "lzf")


def is_decodable(name):
    """Whether this installation has a decoder for a filter, apart from the HDF5 library."""
    if name in COMES_WITH_THE_PACKAGE or name == "bzip2":
        return True
    return find_spec("blosc2" if name.startswith("blosc2") else "imagecodecs") is not None


def create_chunked(file, key, shape, dtype, array):
    """A chunked array with filters in any order, through h5py's low level."""
    dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    dcpl.set_chunk(array.chunks)
    for name in array.filters or ():
        number, options = known_filters()[name]
        dcpl.set_filter(number, 0 if name == "fletcher32" else h5py.h5z.FLAG_OPTIONAL, options)
    if array.early:
        dcpl.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if (fill := array.options.get("fillvalue")) is not None:
        dcpl.set_fill_value(np.asarray(fill, dtype))
    maxshape = tuple(h5py.h5s.UNLIMITED if size is None else size for size in _maxshape(array, shape))
    space, stored = h5py.h5s.create_simple(shape, maxshape), h5py.h5t.py_create(dtype, logical=True)
    group = file.require_group(os.path.dirname(key) or "/")
    return h5py.Dataset(h5py.h5d.create(group.id, os.path.basename(key).encode(), stored, space, dcpl))


def _write_with_masks(dataset, values, array):
    """Chunk by chunk; what a chunk without some of the filters looks like is found out with the HDF5 library, too."""
    grid = [range(0, size, step) for size, step in zip(dataset.shape, array.chunks, strict=True)]
    random = np.random.default_rng(0)
    for corner, mask in zip(itertools.product(*grid), array.masks, strict=True):
        if mask is None:
            continue
        # Values beyond the edge may be anything.
        piece = random.integers(0, 2, (*array.chunks, *values.shape[len(array.chunks) :])).astype(values.dtype)
        part = values[tuple(slice(at, at + step) for at, step in zip(corner, array.chunks, strict=True))]
        piece[tuple(map(slice, part.shape))] = part
        skipped, content = encode(piece, array, mask, dataset.dtype)
        dataset.id.write_direct_chunk(corner, content, skipped)


def encode(piece, array, mask=0, dtype=None):
    """A chunk of an array as it would be stored, and the mask of the filters that it skips; some skip by themselves."""
    at = [i for i in range(len(array.filters)) if not mask >> i & 1]
    alone = Stored(piece, "chunked", array.chunks, filters=tuple(array.filters[i] for i in at))
    shape = piece.shape[: len(array.chunks)]
    alone.chunks = shape
    with h5py.File("encoded", "w", driver="core", backing_store=False) as scratch:
        dataset = create_chunked(scratch, "x", shape, piece.dtype if dtype is None else dtype, alone)
        dataset[...] = piece
        skipped, content = dataset.id.read_direct_chunk((0,) * len(shape))
    return mask | sum(1 << i for place, i in enumerate(at) if skipped >> place & 1), content


def _write_virtual(file, key, array):
    """The rows in two arrays, and a virtual array over both, all in one file."""
    half = len(array.values) // 2
    layout = h5py.VirtualLayout(array.values.shape, array.values.dtype)
    for name, rows in (("first", slice(0, half)), ("second", slice(half, None))):
        if len(array.values[rows]):
            part = file.create_dataset(f"{key}_{name}", data=array.values[rows])
            layout[rows] = h5py.VirtualSource(part)
    return file.create_virtual_dataset(key, layout)


def rows_by_h5py(path, key, rows, members=()):
    """What h5py's ``array[i]`` gives for each row, in native byte order; text as str. The oracle of all readers."""
    with h5py.File(path) as file:
        array = file[key]
        found = [array[int(row)] for row in rows]
        empty = array[:0]
    for member in members:
        found, empty = [value[member] for value in found], empty[member]
    is_text = empty.dtype.kind in "OS"
    dtype = np.dtype(object) if is_text else np.dtype(empty.dtype.newbyteorder("=").str)
    expected = np.empty((len(found), *empty.shape[1:]), dtype=dtype)
    for at, value in enumerate(found):
        if is_text:
            value = np.vectorize(bytes.decode, otypes=[object])(np.asarray(value, object)) if np.size(value) else value
        expected[at] = value
    return expected


def assert_same_rows(found, expected):
    """Bit by bit, so that NaN equals NaN and nothing was rounded on the way."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.dtype.isnative
    if expected.dtype.kind == "O":
        assert found.tolist() == expected.tolist()
    else:
        assert found.tobytes() == expected.tobytes()


def random_values(dtype, shape, seed=0):
    """Values over the whole range of a dtype (NaN and infinity among them), the same for the same seed."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(seed)
    if dtype.kind == "b" or h5py.check_enum_dtype(dtype):
        return rng.integers(0, 2, shape).astype(dtype)
    n = int(np.prod(shape, dtype=int)) * dtype.itemsize
    return rng.integers(0, 256, n, dtype=np.uint8).view(dtype).reshape(shape)


def run_forked(function, seconds=HANG):
    """Runs a function in a forked child; the child's exit code (its traceback goes to stderr), -9 where it hangs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


def edit(path, offset, content=None):
    """Changes bytes of a file in place: given ones, or the one byte at ``offset`` to its complement."""
    with open(path, "r+b") as file:
        file.seek(offset)
        if content is None:
            content = bytes([file.read(1)[0] ^ 0xFF])
            file.seek(offset)
        file.write(content)


def make_older(path):
    """Sets a file's time back: the kernel's clock for files ticks every few milliseconds, slower than a test."""
    found = os.stat(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - 10**9))


def in_threads(*functions):
    """Runs functions in a thread each, starting them together; gives what they give, or raises what one of them raises.

    Threads that do not end in time are a failure, and no reason to wait for ever.
    """
    found, errors, start = [None] * len(functions), [], threading.Barrier(len(functions))

    def run(number):
        try:
            start.wait()
            found[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    end = time.monotonic() + HANG
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "threads wait for ever"
    return found
