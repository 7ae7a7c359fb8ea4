"""What tests make: HDF5 files of any kind, the rows that h5py reads from them, and child processes."""

import os
import traceback
from dataclasses import dataclass, field

import h5py
import numpy as np


@dataclass
class Stored:
    """An array and how it is to lie in the file; plain arrays may be given instead.

    ``written`` is the number of leading rows that are written at all; the others read as the fill value.
    """

    values: np.ndarray
    storage: str = "contiguous"  # or chunked, compact, virtual
    chunks: tuple | None = None
    options: dict = field(default_factory=dict)  # of create_dataset: compression, shuffle, fillvalue ...
    dtype: object = None
    written: int | None = None


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
        options |= {"chunks": array.chunks, "maxshape": (None,) * len(shape)}
    if array.storage == "compact":
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


def run_forked(function):
    """Runs a function in a forked child; the child's exit code (its traceback goes to stderr)."""
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
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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
