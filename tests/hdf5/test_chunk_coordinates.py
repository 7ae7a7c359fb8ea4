"""Chunks are read for the coordinates they have, whichever axes of an array grow, shrink or were partly written.

HDF5 reports wrong coordinates of chunks for some arrays, and reads them right: what is read here is compared with what
h5py reads, and the chunk table with the chunks that h5py finds one by one.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pytest
from factories import known_filters

from lightning_h5 import H5LazyDataset, check_files, compute_stats, inspect_file, repack_file
from lightning_h5.errors import H5CorruptError, H5FileError, H5ValueError
from lightning_h5.hdf5 import chunk_index, find_array, layout_of, open_h5
from lightning_h5.readers import fallback_reason

GROWS_ELSEWHERE = {"shape": (6, 10), "chunks": (2, 3), "maxshape": (9, None)}
VERSIONS = ("earliest", "latest", ("v108", "latest"), ("v110", "v110"), ("v110", "latest"))


def look(path, key="x"):
    with open_h5(path) as file:
        return layout_of(find_array(file, key), path, key)


@dataclass
class Chunked:
    """How an array is stored."""

    chunks: tuple
    filters: tuple
    maxshape: tuple
    early: bool = False


def some(random, options):
    return options[int(random.integers(len(options)))]


def write_any(path, seed):
    """Writes an array ``x`` of any chunk index, growth, filters and history; what it reads as is left to h5py."""
    random = np.random.default_rng(seed)
    n_axes = int(random.integers(1, 5))
    shape = tuple(random.integers(1, 8, n_axes).tolist())
    chunks = tuple(int(random.integers(1, size + 1)) for size in shape)
    kinds = random.choice(["fixed", "limited", "unlimited"], n_axes).tolist()
    if random.random() < 0.5:  # exactly one axis without limit, most of them not the first
        kinds = random.choice(["fixed", "limited"], n_axes).tolist()
        kinds[random.integers(n_axes)] = "unlimited"
    more = random.integers(1, 6, n_axes).tolist()
    limits = {"fixed": lambda at: shape[at], "limited": lambda at: shape[at] + more[at], "unlimited": lambda at: None}
    maxshape = tuple(limits[kind](at) for at, kind in enumerate(kinds))
    # Blosc2 is refused if only the library knows where its chunks are.
    names = [name for name in known_filters() if not name.startswith("blosc2")]
    filters = some(random, [(), (), ("gzip",), ("shuffle", "lzf"), ("gzip", "fletcher32"), (some(random, names),)])
    stored = Chunked(chunks, filters, maxshape, early=bool(random.random() < 0.2))
    version = some(random, VERSIONS)
    with h5py.File(path, "w", libver=version, userblock_size=some(random, [0, 0, 512])) as file:
        array = create(file, shape, stored)
        write_some(array, random, some(random, [0.0, 0.3, 0.7, 1.0]))
        for _ in range(int(random.integers(0, 4))):
            for axis in random.permutation(n_axes).tolist():
                array.resize(int(random.integers(1, 1 + (maxshape[axis] or 12))), axis)
            write_some(array, random, some(random, [0.0, 0.2, 0.6]))


def create(file, shape, stored):
    """An array with limits of its own, which the factories' arrays have not."""
    dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    dcpl.set_chunk(stored.chunks)
    for name in stored.filters:
        number, options = known_filters()[name]
        dcpl.set_filter(number, 0 if name == "fletcher32" else h5py.h5z.FLAG_OPTIONAL, options)
    if stored.early:
        dcpl.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    limits = tuple(h5py.h5s.UNLIMITED if limit is None else limit for limit in stored.maxshape)
    space = h5py.h5s.create_simple(shape, limits)
    return h5py.Dataset(h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, dcpl))


def write_some(array, random, share):
    """Writes a share of the chunks, in any order, and a box that begins anywhere."""
    corners = list(itertools.product(*(range(0, n, step) for n, step in zip(array.shape, array.chunks, strict=True))))
    for at in random.permutation(len(corners)).tolist():
        if random.random() < share:
            box = tuple(slice(a, a + step) for a, step in zip(corners[at], array.chunks, strict=True))
            array[box] = random.integers(1, 1 << 30, array[box].shape)
    if random.random() < share:
        box = tuple(slice(int(random.integers(n)), None) for n in array.shape)
        array[box] = random.integers(1, 1 << 30, array[box].shape)


def read_by_h5py(path, key="x"):
    with h5py.File(path) as file:
        return file[key][...]


def assert_table_is_right(path, table, key="x"):
    """Every chunk lies where the table has it: its bytes there are those that h5py finds for its coordinates."""
    content = Path(path).read_bytes()
    with h5py.File(path) as file:
        array = file[key]
        assert (table.offsets >= 0).sum() == array.id.get_num_chunks()
        for at in np.flatnonzero(table.offsets >= 0):
            place = np.unravel_index(at, table.grid)
            mask, stored = array.id.read_direct_chunk(tuple(np.multiply(place, array.chunks).tolist()))
            offset, size = int(table.offsets[at]), int(table.sizes[at])
            assert (content[offset : offset + size], int(table.masks[at])) == (stored, mask)


def assert_read_right(path, seed):
    expected = read_by_h5py(path)
    layout = look(path)
    if layout.table is None:
        assert "grows along an axis other than the first" in fallback_reason(layout)
    else:
        assert_table_is_right(path, layout.table)
    rows = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(expected)), 2))
    dataset = H5LazyDataset(path, "x", files={"trusted": True})  # the library decodes some, too
    np.testing.assert_array_equal(dataset.read_batch(rows).numpy(), expected[rows])
    dataset.close()


def fuzzed(small, large):
    """Seeds of a test: a few, and many that are left to the slow run."""
    marks = [pytest.mark.slow, pytest.mark.timeout(1800)]
    return pytest.mark.parametrize(
        "seeds", [range(small), pytest.param(range(small, small + large), marks=marks)], ids=["some", "many"]
    )


@pytest.mark.wide
@fuzzed(100, 2500)
def test_any_chunked_array_reads_as_by_h5py(tmp_path, nothing_held, seeds):
    path = str(tmp_path / "x.h5")
    for seed in seeds:
        write_any(path, seed)
        assert_read_right(path, seed)


@fuzzed(8, 250)
def test_a_repacked_copy_of_any_chunked_array_reads_as_the_original_by_h5py(tmp_path, seeds):
    for seed in seeds:
        path, copy = str(tmp_path / f"{seed}.h5"), str(tmp_path / f"{seed} copy.h5")
        write_any(path, seed)
        if seed % 2:
            repack_file(path, copy, rows_per_chunk=1 + seed % 3, compression=("keep", "gzip")[seed % 4 > 1])
        else:
            repack_file(path, copy, verify=True)
        np.testing.assert_array_equal(read_by_h5py(copy), read_by_h5py(path))


@pytest.mark.parametrize("n_axes", range(2, 9))
def test_every_growing_axis_of_every_rank_is_read_right(tmp_path, nothing_held, n_axes):
    path = str(tmp_path / "x.h5")
    for axis in range(n_axes):
        shape = [2] * n_axes
        shape[axis] = 3
        limits = [3 + at % 2 if at != axis else None for at in range(n_axes)]
        with h5py.File(path, "w", libver="latest") as file:
            values = 1 + np.arange(np.prod(shape)).reshape(shape)
            file.create_dataset("x", data=values, chunks=(1,) * n_axes, maxshape=limits, compression="gzip")
        assert_read_right(path, axis)


def grown(path, **more):
    """An array that grows along its second axis, each chunk of which is there, and was enlarged."""
    with h5py.File(path, "w", libver="latest") as file:
        array = file.create_dataset("x", dtype="i4", **(GROWS_ELSEWHERE | more))
        array[:4, 3:9] = 1 + np.arange(24).reshape(4, 6)
        array.resize((8, 17))
        array[6:, 11:] = 100 + np.arange(12).reshape(2, 6)
    return read_by_h5py(path)


COMPRESSIONS = {"none": {}, "gzip": {"compression": "gzip"}, "scale-offset": {"scaleoffset": 0}}
"""Chunks that are not decoded, that are decoded here, and that the library decodes."""


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_tool_reads_an_array_that_grows_along_another_axis(tmp_path, compression):
    path = str(tmp_path / "x.h5")
    expected = grown(path, **COMPRESSIONS[compression])
    assert check_files(path).errors == ()
    assert len(inspect_file(path).arrays) == 1
    stats = compute_stats(path, "x").arrays[0]
    assert (stats.min, stats.max) == (expected.min(), expected.max())
    np.testing.assert_allclose(stats.mean, expected.mean())
    assert check_files(path, write_digests=True).digested
    assert not check_files(path).errors
    rows = (
        H5LazyDataset(
            path,
            "x",
            files={"verify": "digest"},
        )
        .read_batch(range(8))
        .numpy()
    )
    np.testing.assert_array_equal(rows, expected)
    ways = [{}, {"verify": True}, {"rows_per_chunk": 3, "verify": True}, {"shuffle_rows": 1, "verify": True}]
    if compression == "scale-offset":  # which may lose digits, and which HDF5 does not copy safely as it is stored
        with pytest.raises(H5ValueError, match=r"may lose digits .* Name a compression, or use `h5repack`"):
            repack_file(path, str(tmp_path / "refused.h5"))
        ways = [{"compression": "gzip", "verify": True}]
    for way in ways:
        copy = str(tmp_path / f"copy {len(list(tmp_path.iterdir()))}.h5")
        repack_file(path, copy, **way)
        found = read_by_h5py(copy)
        if "shuffle_rows" in way:
            expected, found = expected[np.lexsort(expected.T)], found[np.lexsort(found.T)]
        np.testing.assert_array_equal(found, expected)


def test_without_a_way_to_ask_for_the_kind_of_index_the_library_reads_what_may_be_wrong(
    tmp_path, monkeypatch, nothing_held
):
    path = str(tmp_path / "x.h5")
    expected = grown(path, compression="gzip")
    monkeypatch.setattr(chunk_index, "index_type", lambda array_id: None)
    assert look(path).table is None
    np.testing.assert_array_equal(H5LazyDataset(path, "x").read_batch(range(8)).numpy(), expected)


@pytest.mark.parametrize("kind", ["text", "scale-offset"])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_what_a_copy_keeps_as_it_is_is_copied_also_while_the_array_is_open_and_was_read(tmp_path, kind, libver):
    """HDF5's own copy of an array that grows along another axis crashes the process then; its values are copied."""
    path, copy = str(tmp_path / "x.h5"), str(tmp_path / "copy.h5")
    dtype, options = (h5py.string_dtype(), {}) if kind == "text" else ("f4", {"scaleoffset": 3})
    with h5py.File(path, "w", libver=libver) as file:
        array = file.create_dataset("x", dtype=dtype, **GROWS_ELSEWHERE, **options)
        array.attrs["unit"] = "V"
        values = 1 + np.arange(24).reshape(4, 6)
        array[:4, 3:9] = values.astype(str).astype(object) if kind == "text" else values / 4
        array.resize((8, 17))
    with h5py.File(path) as file:
        expected = file["x"][...]
        if (kind, libver) == ("scale-offset", "latest"):
            with pytest.raises(H5ValueError, match=r"may lose digits .* use `h5repack`"):
                repack_file(path, copy)
            return
        repack_file(path, copy, verify=True)
    np.testing.assert_array_equal(read_by_h5py(copy), expected)
    with h5py.File(copy) as made, h5py.File(path) as file:
        assert dict(made["x"].attrs) == {"unit": "V"}
        assert (made["x"].chunks, made["x"].scaleoffset) == (file["x"].chunks, file["x"].scaleoffset)


def test_a_chunk_that_is_not_found_is_no_chunk_that_was_never_written(tmp_path, monkeypatch):
    path, copy = str(tmp_path / "x.h5"), str(tmp_path / "copy.h5")
    grown(path, compression="gzip")
    content = bytearray(Path(path).read_bytes())
    content[content.index(b"EAIB") + 8] ^= 255  # its chunk index, which has a checksum
    Path(path).write_bytes(content)
    with pytest.raises((H5CorruptError, H5FileError), match="damage"):
        repack_file(path, copy)
