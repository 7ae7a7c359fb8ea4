"""A file that took the place of another one is read as it is now, by every tool, whatever is still open of the other.

Each test reads a file, so that handles of it stay open in this process, puts another one in its place, and asks a tool:
what it returns is of the second file, or it raises; it is never of the first.
"""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from factories import Stored

from lightning_h5 import (
    CombinedHDF5Dataset,
    H5LazyDataset,
    RankMemCachedH5Dataset,
    check_files,
    compute_stats,
    inspect_file,
    repack_file,
)
from lightning_h5.errors import H5DataChangedError
from lightning_h5.hdf5 import OpenOptions, find_array, layout_of, open_h5, process_pool
from lightning_h5.hdf5.digests import digests_path
from lightning_h5.readers import open_reader

N = 24
KINDS = ("contiguous", "chunks of rows", "parts of rows", "gzip", "scale-offset", "compact", "big-endian", "virtual")


def content(seed, kind):
    """The arrays of a file, by name, of which ``x`` is stored in the way that is tested."""
    random = np.random.default_rng(seed)
    x = random.integers(0, 1 << 20, (N, 6), dtype="i4")
    text = np.array([f"{value:07}" for value in random.integers(0, 10**7, N)], dtype=object)
    ways = {
        "contiguous": Stored(x),
        "chunks of rows": Stored(x, "chunked", (5, 6)),
        "parts of rows": Stored(x, "chunked", (5, 4)),
        "gzip": Stored(x, "chunked", (5, 4), {"compression": "gzip"}),
        "scale-offset": Stored(x, "chunked", (5, 4), {"scaleoffset": 0}),
        "compact": Stored(x, "compact"),
        "big-endian": Stored(x.astype(">i4"), "chunked", (5, 6), {"fletcher32": True}),
        "virtual": Stored(x, "virtual"),
    }
    y = Stored(text, dtype=h5py.string_dtype())
    return {"x": ways[kind], "y": y, "label": Stored(np.arange(N) % 2)}, x, text


WAYS = ("renamed over", "renamed over, time put back", "in place", "in place, time put back", "in place, other name")


def replace_file(path, other, way):
    """Puts the content of another file in the place of one."""
    before = os.stat(path)
    if way.startswith("renamed over"):
        os.replace(other, path)
    else:
        data = Path(other).read_bytes()
        changed = before.st_ctime_ns
        while changed == before.st_ctime_ns:  # the clock of file systems ticks some hundred times a second
            with open(path, "r+b") as file:
                file.write(data)
                file.truncate()
            changed = os.stat(path).st_ctime_ns
    if way.endswith("time put back"):
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# What is left open of the first file, and by what.


def read_by_dataset(path):
    H5LazyDataset(path, "x", "y").read_batch(range(N))


def read_by_library(path):
    with open_h5(path) as file:
        layouts = [layout_of(find_array(file, key), path, key) for key in ("x", "y")]
    for layout in layouts:
        with process_pool().h5(path, OpenOptions(), layout.guard) as handle:
            handle.array(layout)[...]
        with process_pool().descriptor(path, layout.guard) as fd:
            os.pread(fd, 1, 0)


def read_by_tools(path):
    assert check_files(path, write_digests=True).digested
    os.unlink(digests_path(path))
    compute_stats(path, "x")
    inspect_file(path)


READERS = (read_by_dataset, read_by_library, read_by_tools)


# What is asked of the second file. Each returns x, y or both, as far as they are of it.


def lazy(path, folder):
    x, y = H5LazyDataset(path, "x", "y").read_batch(range(N))
    return {"x": x.numpy(), "y": y}


def rank_cached(path, folder):
    dataset = RankMemCachedH5Dataset(path, "x", rank=0, world_size=1, x_dtype=None)
    return {"x": np.stack([dataset[row].numpy() for row in range(N)])}


def combined(path, folder):
    dataset = CombinedHDF5Dataset([path], load_fields=["x", "label"], where={"label": 1})
    return {"x odd": np.stack([dataset[row]["x"].numpy() for row in range(len(dataset))])}


def described(path, folder):
    """The rows of an array that was only described, as tools do it."""
    with open_h5(path) as file:
        layouts = {key: layout_of(find_array(file, key), path, key) for key in ("x", "y")}
    rows = np.arange(N)
    return {key: open_reader(layout, OpenOptions()).read(rows) for key, layout in layouts.items()}


def repacked(path, folder, **how):
    copy = os.path.join(folder, "copy.h5")
    Path(copy).unlink(missing_ok=True)
    repack_file(path, copy, **how)
    with h5py.File(copy) as file:
        return {"x": file["x"][...], "y": file["y"].asstr()[...]}


def rechunked(path, folder):
    return repacked(path, folder, rows_per_chunk=4, verify=True)


def compressed(path, folder):
    return repacked(path, folder, compression="lzf")


def stats(path, folder):
    found = compute_stats(path, "x").arrays[0]
    return {"sums": (int(found.min), int(found.max), round(float(found.mean), 6))}


def digested(path, folder):
    check_files(path, keys=["x", "y"], write_digests=True)
    assert not check_files(path).errors
    x, y = H5LazyDataset(
        path,
        "x",
        "y",
        files={"verify": "digest"},
    ).read_batch(range(N))
    return {"x": x.numpy(), "y": y}


def inspected(path, folder):
    arrays = {array.name: array for array in inspect_file(path).arrays}
    return {"chunks": np.array(arrays["x"].chunks or ())}


def checked(path, folder):
    assert check_files(path).errors == ()
    return {}


TOOLS = (lazy, rank_cached, combined, described, repacked, rechunked, compressed, stats, digested, inspected, checked)


def assert_is_of(x, text, chunks, found):
    expected = {"x": x, "y": text, "x odd": x[1::2], "sums": (x.min(), x.max(), round(float(x.mean()), 6))}
    expected["chunks"] = np.array(chunks or ())
    for key, value in found.items():
        assert np.array_equal(np.asarray(value), np.asarray(expected[key])), key


def ask_after_replacing(make_h5, folder, kind, other_kind, way, read, tool, seed):
    first, _, _ = content(seed, kind)
    second, x, text = content(seed + 1, other_kind)
    path, other = make_h5(first, name="data.h5"), make_h5(second, name="other.h5")
    name = path
    if way == "in place, other name":
        name = os.path.join(folder, "link.h5")
        Path(name).unlink(missing_ok=True)
        os.link(path, name)
    read(name)
    replace_file(path, other, way)
    try:
        assert_is_of(x, text, second["x"].chunks, tool(path, folder))
    finally:
        process_pool().close()
        for left in Path(folder).iterdir():
            left.unlink()


@pytest.mark.wide
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_reads_the_file_that_is_there_now(make_h5, tmp_path, nothing_held, tool, way):
    for at, kind in enumerate(KINDS):
        read = READERS[at % len(READERS)]
        ask_after_replacing(make_h5, str(tmp_path), kind, kind, way, read, tool, 10 * at)


@pytest.mark.wide
@pytest.mark.parametrize(
    "seeds",
    [range(100), pytest.param(range(100, 2200), marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["some", "many"],
)
def test_no_value_is_of_a_file_that_was_there_before(make_h5, tmp_path, nothing_held, seeds):
    for seed in seeds:
        random = np.random.default_rng(seed)
        kind, other, way, read, tool = (
            options[int(random.integers(len(options)))] for options in (KINDS, KINDS, WAYS, READERS, TOOLS)
        )
        other = kind if random.random() < 0.7 else other  # files of one kind have one size, and their arrays one place
        ask_after_replacing(make_h5, str(tmp_path), kind, other, way, read, tool, 10 * seed)


@pytest.mark.parametrize("way", WAYS[:4])
def test_what_was_described_before_is_read_of_that_file_or_not_at_all(make_h5, nothing_held, way):
    """With the time put back, a file that is rewritten in place is the same one for all but ``verify="digest"``."""
    for kind in KINDS:
        first, x, _ = content(1, kind)
        second, other_x, _ = content(2, kind)
        path, other = make_h5(first), make_h5(second)
        with open_h5(path) as file:
            layout = layout_of(find_array(file, "x"), path, "x")
        replace_file(path, other, way)
        try:
            found = open_reader(layout, OpenOptions()).read(np.arange(N))
        except H5DataChangedError:
            assert way != "in place, time put back" or os.stat(path).st_size != layout.guard.n_bytes
        else:
            assert way == "in place, time put back"
            assert not np.array_equal(found, x)
            assert np.array_equal(found, other_x)
        process_pool().close(path)
