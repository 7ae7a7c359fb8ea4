"""A repacked file is the file it came from, laid out otherwise; h5py is the oracle."""

import ctypes
import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import h5py
import numpy as np
import pytest
from factories import Stored, edit, known_filters, random_values
from guards import HANG
from hypothesis import given
from hypothesis import strategies as st

import lightning_h5.tools.repack.repack as repack_module
from lightning_h5.cli.terminal import ends_at_signals
from lightning_h5.errors import H5CorruptError, H5DataChangedError, H5FileError, H5KeyError, H5ValueError
from lightning_h5.hdf5 import create_h5, open_h5
from lightning_h5.order.permutation import permutation
from lightning_h5.tools.inspect import inspect_file
from lightning_h5.tools.repack import COMPRESSIONS, compression, repack_file, row_io
from lightning_h5.tools.repack.copy import FileCopy

ROOT = Path(__file__).parents[2]

HAS_PLUGIN = any(name.startswith("zstd") for name in known_filters())
NAMES = [name for name in COMPRESSIONS if name in ("keep", "none", "gzip", "lzf") or HAS_PLUGIN]


def places(n, seed):
    """Where rows go; never changes."""
    return permutation(n, seed, 0, 15)(0, n)


# The oracle.


def assert_same_file(one, other, moved=(), order=None):
    """Every object, link, attribute and value of one file is in the other, and nothing else.

    Rows of the arrays ``moved`` lie where ``order`` says.
    """
    with h5py.File(one) as a, h5py.File(other) as b:
        assert a.userblock_size == b.userblock_size
        assert_same_object(a["/"], b["/"], "/", {}, moved, order)


def assert_same_object(a, b, name, seen, moved, order):
    one, other = a[name], b[name]
    address, found = (h5py.h5o.get_info(x.id).addr for x in (one, other))
    if address in seen:
        assert seen[address] == found, f"{name} is another object than its other name"
        return
    assert found not in seen.values(), name
    seen[address] = found
    assert type(one) is type(other)
    assert_same_attributes(one, other)
    assert a.id.get_comment(name.encode()) == b.id.get_comment(name.encode())
    if isinstance(one, h5py.Datatype):
        assert one.id == other.id
    elif isinstance(one, h5py.Dataset):
        assert_same_array(one, other, order if name.strip("/") in moved else None)
    else:
        assert list(one) == list(other), "names, and their order"
        for key in one:
            link, copy = one.get(key, getlink=True), other.get(key, getlink=True)
            assert type(link) is type(copy)
            if isinstance(link, h5py.SoftLink):
                assert link.path == copy.path
            elif isinstance(link, h5py.ExternalLink):
                assert (link.path, link.filename) == (copy.path, copy.filename)
            else:
                assert_same_object(a, b, f"{name.rstrip('/')}/{key}", seen, moved, order)


def assert_same_attributes(one, other):
    assert list(one.attrs) == list(other.attrs)
    for key in one.attrs:
        first, second = one.attrs.get_id(key), other.attrs.get_id(key)
        assert first.get_type() == second.get_type(), key
        assert first.shape == second.shape, key
        assert plain(one.file, one.attrs[key]) == plain(other.file, other.attrs[key]), key


def assert_same_array(one, other, order):
    assert one.id.get_type() == other.id.get_type()
    assert one.shape == other.shape
    assert one.maxshape == other.maxshape
    if one.shape is None:
        return
    if not one.dtype.hasobject:
        assert np.asarray(one.fillvalue).tobytes() == np.asarray(other.fillvalue).tobytes()
    first, second = one[()], other[()]
    if order is not None:
        second = second[order]
    assert plain(one.file, first) == plain(other.file, second)


def plain(file, value):
    """A value as something that compares by what it means; references as the names of what they point at."""
    if isinstance(value, h5py.RegionReference):
        return ("region", file[value].name, plain(file, file[value][value])) if value else None
    if isinstance(value, h5py.Reference):
        return sorted(names_of(file, value)) if value else None
    if isinstance(value, np.ndarray | np.generic) and value.dtype.names:
        return [plain(file, value[name]) for name in value.dtype.names]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject:
        return [plain(file, item) for item in np.asarray(value).reshape(-1)]
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes(), value.dtype.str, value.shape
    return "empty" if isinstance(value, h5py.Empty) else value


def names_of(file, reference):
    """All names of what a reference points at."""
    address, names = h5py.h5o.get_info(file[reference].id).addr, []

    def walk(group, above):
        for key in group:
            if isinstance(group.get(key, getlink=True), h5py.HardLink):
                item = group[key]
                if h5py.h5o.get_info(item.id).addr == address:
                    names.append(f"{above}/{key}")
                if isinstance(item, h5py.Group) and item.name.count("/") < 4:
                    walk(item, f"{above}/{key}")

    walk(file["/"], "")
    return names or ["/"]


# A file with a bit of everything.


def write_zoo(path, *, libver=None, userblock=0, track_order=False, n=60):
    rng = np.random.default_rng(0)
    with h5py.File(path, "w", libver=libver, userblock_size=userblock, track_order=track_order) as file:
        x = file.create_dataset("x", data=rng.random((n, 4, 3)), chunks=(7, 2, 3), compression="gzip", shuffle=True)
        file.create_dataset(
            "big_endian", data=np.arange(n, dtype=">i2"), chunks=(16,), maxshape=(None,), fletcher32=True
        )
        file.create_dataset("sparse", (n, 5), "f4", chunks=(4, 5), fillvalue=2.5, compression="lzf")[20:23] = 1
        file.create_dataset("never", (n,), "i8", chunks=(4,), fillvalue=-1)
        file.create_dataset("never contiguous", (n,), "i8", fillvalue=-1)
        file.create_dataset("plain", data=rng.integers(0, 99, (n, 2)))
        table = np.dtype([("a", "<f4"), ("b", "i8", (2,)), ("c", "S3")], align=True)
        file.create_dataset("table", data=rng.integers(0, 2, n).astype(table), chunks=(9,), compression="gzip")
        enum = h5py.enum_dtype({"cat": 1, "dog": 2}, basetype="u1")
        file.create_dataset("enum", data=rng.integers(1, 3, n), dtype=enum, compression="gzip")
        file.create_dataset("flags", data=rng.integers(0, 2, n).astype(bool), chunks=(10,))
        file.create_dataset("complex", data=rng.random(n) + 1j, chunks=(10,), compression="gzip")
        file.create_dataset("fixed", data=np.array([b"ab", b"cde"] * (n // 2)), chunks=(8,), compression="gzip")
        file.create_dataset("opaque", data=np.zeros(n, dtype="V5"), chunks=(8,), compression="gzip")
        file.create_dataset("text", data=[f"row {i}é" for i in range(n)], dtype=h5py.string_dtype(), chunks=(8,))
        lists = file.create_dataset("lists", (n,), h5py.vlen_dtype("f4"))
        for i in range(0, n, 2):
            lists[i] = np.arange(i, dtype="f4")
        nested = np.dtype([("name", h5py.string_dtype()), ("n", "i4")])
        file.create_dataset("text in table", data=np.array([(f"r{i}", i) for i in range(n)], dtype=nested))
        file.create_dataset("array elements", (n,), np.dtype(("i2", (3,))), chunks=(8,), compression="gzip")[...] = (
            np.full((n, 3), 7, "i2")
        )
        write_compact(file, "compact", np.arange(n, dtype="u1"))
        file.create_dataset("scalar", data=3.5)
        file.create_dataset("scalar text", data="hello")
        file.create_dataset("null", data=h5py.Empty("f4"))
        file.create_dataset("no rows", (0, 4), "f4", maxshape=(None, 4), chunks=(5, 4))
        group = file.create_group("group", track_order=True)
        for name in "zya":
            group.create_group(name).attrs["n"] = name
        group["another name"] = x
        group["loop"] = file["/"]
        group["soft"] = h5py.SoftLink("../plain")
        group["dangling"] = h5py.SoftLink("/nowhere")
        group["other file"] = h5py.ExternalLink("elsewhere.h5", "/x")
        file["named type"] = np.dtype([("p", "f4"), ("q", "i2")])
        file["named type"].attrs["unit"] = "mm"
        file.create_dataset("of named type", (n,), file["named type"], chunks=(8,), compression="gzip")[3] = (1, 2)
        x.attrs.create("typed", np.zeros(3, file["named type"].dtype), dtype=file["named type"])
        scale = file.create_dataset("time", data=np.arange(n))
        scale.make_scale("time")
        x.dims[0].attach_scale(scale)
        x.dims[0].label = "row"
        file["/"].id.set_comment(b"x", b"a remark")
        half = h5py.VirtualLayout((n, 2), "i8")
        half[: n // 2], half[n // 2 :] = (
            h5py.VirtualSource(file["plain"])[n // 2 :],
            h5py.VirtualSource(file["plain"])[: n // 2],
        )
        file.create_virtual_dataset("virtual", half, fillvalue=-5)
        references = file.create_dataset("references", (n,), h5py.ref_dtype)
        references[0], references[1], references[2] = x.ref, group.ref, file["group/a"].ref
        write_attributes(file, x, group)
    if userblock:
        edit(path, 3, b"my own header")


def write_regions(path):
    with h5py.File(path, "a") as file:
        regions = file.create_dataset("regions", (3,), h5py.regionref_dtype)
        regions[0], regions[1] = file["plain"].regionref[2:9, 1], file["x"].regionref[[1, 5], :, 2]
        file.attrs["region"] = file["plain"].regionref[0:2]


def write_compact(file, name, values):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    made = h5py.h5d.create(
        file.id, name.encode(), h5py.h5t.py_create(values.dtype), h5py.h5s.create_simple(values.shape), plist
    )
    h5py.Dataset(made)[...] = values


def write_attributes(file, x, group):
    for owner in (file, x, group):
        owner.attrs["number"] = 3
        owner.attrs["text"] = "größe"
        owner.attrs["texts"] = ["a", "", "ccc"]
        owner.attrs["bytes"] = np.bytes_("fixed")
        owner.attrs["empty"] = h5py.Empty("i4")
        owner.attrs["no values"] = np.zeros((0, 3))
        owner.attrs["reference"] = x.ref
        owner.attrs.create("references", [[x.ref, group.ref]], dtype=h5py.ref_dtype)
        owner.attrs["null reference"] = h5py.Reference()
        owner.attrs["table"] = np.array([(1, 2.5)], dtype=[("i", ">i4"), ("f", "f8")])
        pairs = np.zeros(2, dtype=np.dtype([("to", h5py.ref_dtype), ("n", "i4")]))
        pairs["to"], pairs["n"] = x.ref, 7
        owner.attrs["pairs"] = pairs
        owner.attrs.create("lists", [np.arange(2), np.arange(3)], dtype=h5py.vlen_dtype("i8"), shape=(2,))
        owner.attrs["enum"] = np.array([1, 0]).astype(h5py.enum_dtype({"no": 0, "yes": 1}))


ALIGNED = [
    *("x", "big_endian", "sparse", "never", "never contiguous", "plain", "table", "enum", "flags", "complex", "fixed"),
    *("opaque", "text", "lists", "text in table", "array elements", "compact", "of named type", "time"),
]


@pytest.fixture(params=[None, "v108", "latest"], ids=["superblock 0", "superblock 2", "superblock 3"])
def zoo(request, tmp_path):
    path = tmp_path / "zoo.h5"
    write_zoo(path, libver=request.param, track_order=request.param == "v108", userblock=512 if request.param else 0)
    return path


OPTIONS = {
    "as it is": {},
    "one row a chunk": {"rows_per_chunk": 1},
    "13 rows a chunk, gzip": {"rows_per_chunk": 13, "compression": "gzip", "level": 1},
    "contiguous": {"compression": "none"},
    "chunks without compression": {"compression": "none", "rows_per_chunk": 4, "checksum": True},
    "shuffle, lzf": {"compression": "lzf", "shuffle_filter": True, "rows_per_chunk": "auto"},
}


@pytest.mark.wide
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_everything_is_in_the_copy(zoo, tmp_path, options):
    repack_file(zoo, tmp_path / "copy.h5", **options, verify=True)
    assert_same_file(zoo, tmp_path / "copy.h5")
    assert sorted(os.listdir(tmp_path)) == ["copy.h5", "zoo.h5"]
    if options.get("rows_per_chunk") == 13:
        with h5py.File(tmp_path / "copy.h5") as file:
            assert file["x"].chunks == (13, 4, 3)
            assert (file["plain"].compression, file["plain"].compression_opts) == ("gzip", 1)


def test_the_user_block_and_the_format_stay(zoo, tmp_path):
    """The format is that of HDF5 1.8 for older files."""
    repack_file(zoo, tmp_path / "copy.h5")
    heads, versions = [], []
    for path in (zoo, tmp_path / "copy.h5"):
        with h5py.File(path) as file:
            n = file.userblock_size
        with open(path, "rb") as file:
            heads.append(file.read(n + 8))
            versions.append(file.read(1)[0])
    assert heads[0] == heads[1]
    assert versions[1] == max(2, versions[0])


@pytest.mark.parametrize("n_bytes", [512, 4 << 20])
def test_a_user_block_stays_in_a_copy_for_object_stores(tmp_path, n_bytes):
    """MATLAB's files begin with one of 512 bytes, and HDF5 wants at least a page."""
    source, copy = tmp_path / "a.mat", tmp_path / "b.mat"
    write_zoo(source, userblock=n_bytes)
    head = b"MATLAB 7.3 MAT-file".ljust(512, b"\0")
    edit(source, 0, head)
    repack_file(source, copy, for_object_store=True, verify=True)
    with h5py.File(copy) as file:
        assert file.userblock_size == max(n_bytes, 1 << 20)
        assert file.id.get_create_plist().get_file_space_strategy()[0] == h5py.h5f.FSPACE_STRATEGY_PAGE
    with open(copy, "rb") as file:
        assert file.read(512) == head


@given(
    st.sampled_from(["u1", "i2", "f4", "f8"]),
    st.lists(st.integers(1, 9), max_size=2),
    st.sampled_from([2, 8, 32]),
    st.integers(1, 50),
    st.sampled_from([1, 2, 3, 7, "auto"]),
    st.sampled_from([{}, {"shuffle_rows": 3}, {"shuffle_filter": True}, {"checksum": True}]),
)
def test_szip_is_applied_again_to_chunks_of_any_size(tmp_path_factory, dtype, axes, pixels, n_rows, rows, options):
    folder = tmp_path_factory.mktemp("szip")
    values = random_values(np.dtype(dtype), (n_rows, *axes))
    with h5py.File(folder / "a.h5", "w") as file:
        chunks = (64, *axes)
        maxshape = (None, *axes)
        file.create_dataset(
            "x", data=values, chunks=chunks, maxshape=maxshape, compression="szip", compression_opts=("nn", pixels)
        )
    repack_file(folder / "a.h5", folder / "b.h5", keys=["x"], rows_per_chunk=rows, verify=True, **options)
    with h5py.File(folder / "b.h5") as file:
        found = file["x"][:]
        assert file["x"].compression == (None if file["x"].chunks in ((1,), (1, 1), (1, 1, 1)) else "szip")
    expected = values.copy()
    if "shuffle_rows" in options:
        expected[places(n_rows, 3)] = values
    assert found.tobytes() == expected.tobytes()


@pytest.mark.wide
def test_rows_are_shuffled_together_and_nothing_else_is(zoo, tmp_path):
    with h5py.File(zoo, "a") as file:
        del file["virtual"]  # which shows rows that move
    repack_file(
        zoo, tmp_path / "copy.h5", compression="gzip", shuffle_rows=5, shuffle_keys=ALIGNED, verify=True, checksum=True
    )
    assert_same_file(zoo, tmp_path / "copy.h5", [*ALIGNED, "group/another name"], places(60, 5))


@pytest.mark.wide
def test_a_copy_of_a_copy_is_the_same_file(zoo, tmp_path):
    for at, (one, other) in enumerate([("zoo.h5", "a.h5"), ("a.h5", "b.h5")]):
        repack_file(tmp_path / one, tmp_path / other, compression="gzip", verify=at == 1)
    assert_same_file(zoo, tmp_path / "b.h5")


# Arrays of all kinds.

DTYPES = ["u1", "<i2", ">f4", "<f8", "<c8", "S3", "bool", "<u8"]
FILTERS = [(), ("gzip",), ("shuffle", "gzip"), ("lzf",), ("shuffle", "lzf", "fletcher32"), ("fletcher32",)]
FILTERS += [(name,) for name in known_filters() if name not in ("shuffle", "gzip", "lzf", "fletcher32")]


@st.composite
def stored_arrays(draw):
    shape = (draw(st.integers(1, 23)), *draw(st.lists(st.integers(1, 5), max_size=2)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    is_text = dtype.kind == "S"
    values = np.char.mod("%03d", random_values("u1", shape)).astype(dtype) if is_text else random_values(dtype, shape)
    if draw(st.booleans()):
        values[...] = values.reshape(-1)[0]  # compresses
    if draw(st.integers(0, 3)) == 0:
        return Stored(values, "contiguous", options={"fillvalue": values.reshape(-1)[0]} if draw(st.booleans()) else {})
    chunks = tuple(draw(st.integers(1, size)) for size in shape)
    filters = draw(st.sampled_from(FILTERS))
    grid = np.prod([-(-size // step) for size, step in zip(shape, chunks, strict=True)])
    masks = draw(st.none() | st.lists(st.sampled_from([0, 0, None]), min_size=int(grid), max_size=int(grid)))
    options = {"fillvalue": values.reshape(-1)[-1]} if draw(st.booleans()) else {}
    maxshape = draw(st.sampled_from(["any", "first", "fixed"]))
    return Stored(values, "chunked", chunks, options, filters=filters, masks=masks, maxshape=maxshape)


@given(
    array=stored_arrays(),
    rows=st.none() | st.just("auto") | st.integers(1, 30),
    name=st.sampled_from(NAMES),
    extra=st.fixed_dictionaries({"checksum": st.booleans(), "shuffle_rows": st.none() | st.integers(-3, 9)}),
    data=st.data(),
)
def test_any_array_has_the_same_rows_in_the_copy(make_h5, array, rows, name, extra, data):
    path = make_h5({"x": array})
    shuffles = name in ("keep", "gzip", "lzf", "zstd", "lz4") and data.draw(st.booleans())
    repack_file(
        path, path + ".copy", rows_per_chunk=rows, compression=name, shuffle_filter=shuffles, verify=True, **extra
    )
    n, seed = len(array.values), extra["shuffle_rows"]
    assert_same_file(path, path + ".copy", ["x"], None if seed is None else places(n, seed))
    with h5py.File(path) as file, h5py.File(path + ".copy") as copy:
        if rows not in (None, "auto") and file["x"].maxshape[0] is not None:
            assert copy["x"].chunks == (min(rows, n), *file["x"].shape[1:])
        assert not copy["x"].chunks or copy["x"].chunks[1:] == file["x"].shape[1:]


@pytest.mark.wide
@given(array=stored_arrays(), rows=st.integers(1, 30), more=st.integers(1, 20), name=st.sampled_from(NAMES))
def test_rows_that_are_added_later_are_fill_values(make_h5, array, rows, more, name):
    """What hangs over the edge of the last chunk shows when the array is made longer."""
    array.maxshape = "first"
    path = make_h5({"x": array})
    repack_file(path, path + ".copy", rows_per_chunk=rows, compression=name)
    with h5py.File(path, "a") as file, h5py.File(path + ".copy", "a") as copy:
        if file["x"].maxshape[0] is not None:
            return
        x = copy["x"]
        x.resize(len(x) + more, axis=0)
        assert x[:-more].tobytes() == file["x"][:].tobytes()
        assert x[-more:].tobytes() == np.full((more, *x.shape[1:]), file["x"].fillvalue, x.dtype).tobytes()


@pytest.mark.wide
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("keep", "none")])
@pytest.mark.parametrize("shape", [(50, 3, 17, 11), (3, 5), (1, 1), (700,)], ids=str)
@pytest.mark.parametrize("dtype", ["u1", "<f4", ">i8", "<c16"])
def test_the_hdf5_library_reads_what_each_compression_writes(make_h5, name, shape, dtype):
    smooth = np.arange(np.prod(shape)).reshape(shape).astype(dtype) // 3 if dtype != "<c16" else np.ones(shape, dtype)
    path = make_h5({"smooth": smooth, "noise": random_values(dtype, shape)})
    report = repack_file(path, path + ".copy", rows_per_chunk=4, compression=name)
    assert_same_file(path, path + ".copy")
    assert all(array.after.filters for array in report.arrays)


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("kind", ["long double", "complex", "of 128 bits", "big-endian of 80 bits"])
def test_numbers_that_not_every_platform_has_keep_their_bytes(make_h5, kind, seed):
    """Each byte of an element is kept, also those that are no part of its number."""
    stored = h5py.h5t.py_create(np.dtype(np.clongdouble if kind == "complex" else np.longdouble)).copy()
    if kind == "of 128 bits":
        stored = h5py.h5t.IEEE_F64LE.copy()
        stored.set_size(16)
        stored.set_precision(128)
        stored.set_fields(127, 112, 15, 0, 112)
    elif kind == "big-endian of 80 bits":
        stored.set_order(h5py.h5t.ORDER_BE)
    path, size = make_h5({"y": np.arange(90)}), stored.get_size()
    rows = random_values("u1", (90, 2, size))
    with h5py.File(path, "a") as file:
        for name, chunks in (("chunks", (7, 1)), ("gzip", (7, 1)), ("contiguous", None)):
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if chunks:
                plist.set_chunk(chunks)
            if name == "gzip":
                plist.set_deflate(4)
            made = h5py.h5d.create(file.id, name.encode(), stored, h5py.h5s.create_simple((90, 2)), plist)
            made.write(h5py.h5s.ALL, h5py.h5s.ALL, rows.reshape(-1).view(f"V{size}").reshape(90, 2), stored)
    repack_file(path, path + ".copy", rows_per_chunk=4, compression="gzip", shuffle_rows=seed, verify=True)
    order = np.arange(90) if seed is None else places(90, seed)
    with h5py.File(path + ".copy") as copy:
        for name in ("chunks", "gzip", "contiguous"):
            found = np.zeros((90, 2), f"V{size}")
            copy[name].id.read(h5py.h5s.ALL, h5py.h5s.ALL, found, copy[name].id.get_type())
            assert copy[name].id.get_type() == stored
            assert copy[name].chunks == (4, 2)
            assert found[order].tobytes() == rows.tobytes()


# What vouches for chunks.


def test_a_checksum_makes_all_damage_show(make_h5):
    path = make_h5({"x": Stored(random_values("f4", (100, 9)), "chunked", (10, 9), {"compression": "gzip"})})
    repack_file(path, path + ".copy", checksum=True, verify=True)
    assert inspect_file(path).arrays[0].integrity == 1
    assert inspect_file(path + ".copy").arrays[0].integrity == 3


@pytest.mark.parametrize("without", [(), ("deflate",)], ids=str)
def test_gzip_that_saves_nothing_is_applied_all_the_same(make_h5, monkeypatch, without):
    """Its checksum vouches for the chunk; HDF5 itself does so."""
    for name in without:
        monkeypatch.setitem(sys.modules, name, None)
    for shape in [(40, 3), (40, 30_000)]:
        path = make_h5({"x": random_values("u1", shape)})
        repack_file(path, path + ".copy", compression="gzip", rows_per_chunk=9, verify=True)
        assert_same_file(path, path + ".copy")
        assert inspect_file(path + ".copy").arrays[0].integrity == 1
        with h5py.File(path + ".copy") as copy:
            x = copy["x"].id
            assert {x.get_chunk_info(at).filter_mask for at in range(x.get_num_chunks())} == {0}
            assert x.get_storage_size() > 40 * shape[1]


@pytest.mark.parametrize(
    ("masks", "level"), [([0, 0, None], 1), ([0, 1, None], 0), ([0, 2, 0], 1), ([None, None, None], 1)], ids=str
)
def test_a_filter_that_a_chunk_passed_over_vouches_for_nothing(make_h5, masks, level):
    array = Stored(random_values("u1", (30, 4)), "chunked", (10, 4), filters=("gzip", "lzf"), masks=masks)
    assert inspect_file(make_h5({"x": array})).arrays[0].integrity == level


# Rows in random order.


def test_shuffled_rows_stay_beside_their_labels(make_h5):
    x = random_values("f4", (1000, 9))
    path = make_h5({"x": Stored(x, "chunked", (32, 4), {"compression": "gzip"}), "y": np.arange(1000)})
    report = repack_file(path, path + ".copy", shuffle_rows=11)
    with h5py.File(path + ".copy") as copy:
        y = copy["y"][:]
        assert copy["x"][:].tobytes() == x[y].tobytes()
    assert np.array_equal(y[places(1000, 11)], np.arange(1000))
    assert not np.array_equal(y, np.arange(1000))
    assert [array.is_shuffled for array in report.arrays] == [True, True]


def test_the_order_of_shuffled_rows_never_changes(make_h5):
    path = make_h5({"y": np.arange(12)})
    repack_file(path, path + ".copy", shuffle_rows=0)
    with h5py.File(path + ".copy") as copy:
        assert copy["y"][:6].tolist() == [10, 0, 7, 3, 8, 9]


@pytest.mark.parametrize("rows_per_chunk", [1, 5, None])
def test_rows_that_do_not_fit_in_memory_are_shuffled_by_way_of_a_file(make_h5, monkeypatch, rows_per_chunk):
    monkeypatch.setattr(row_io, "MAX_IN_MEMORY", 300)
    monkeypatch.setattr(row_io, "PIECE_BYTES", 500)
    x = random_values("i4", (333, 7))
    path = make_h5({"x": Stored(x, "chunked", (10, 7), {"compression": "gzip"}), "y": np.arange(333)})
    repack_file(path, path + ".copy", shuffle_rows=2, rows_per_chunk=rows_per_chunk, verify=True)
    assert_same_file(path, path + ".copy", ["x", "y"], places(333, 2))
    assert len(os.listdir(os.path.dirname(path))) == 2


def test_arrays_of_different_lengths_are_never_shuffled_unasked(make_h5):
    path = make_h5({"x": np.arange(10), "y": np.arange(10), "z": np.arange(3)})
    with pytest.raises(
        H5ValueError, match=r"different numbers of rows: 'x', 'y', 'z' with 10, 10, 3 rows.*\['x', 'y'\]"
    ):
        repack_file(path, path + ".copy", shuffle_rows=0)
    with pytest.raises(H5ValueError, match=r"different numbers of rows: '[xz]'"):
        repack_file(path, path + ".copy", shuffle_rows=0, shuffle_keys=["x", "z"])
    with pytest.raises(H5KeyError, match=r"Did you mean 'x'"):
        repack_file(path, path + ".copy", shuffle_rows=0, shuffle_keys=["X"])
    report = repack_file(path, path + ".copy", shuffle_rows=0, shuffle_keys=["x", "y"])
    assert [array.name for array in report.arrays if array.is_shuffled] == ["x", "y"]
    assert_same_file(path, path + ".copy", ["x", "y"], places(10, 0))


def write_swapped(path, kind, *, grows=False):
    """An array ``v`` that shows the halves of ``t`` the other way round; ``n`` numbers the rows of ``t``."""
    with h5py.File(path, "a") as file:
        file["n"] = np.arange(50)
        if kind == "references":
            values = [file.create_group(f"r{i}").ref for i in range(50)]
            file.create_dataset("t", data=values, dtype=h5py.ref_dtype)
        elif kind == "lists":
            file.create_dataset("t", (50,), h5py.vlen_dtype("i4"))
            for i in range(50):
                file["t"][i] = np.arange(i)
        else:
            values = [f"r{i}" for i in range(50)] if kind == "text" else np.arange(50) * 10
            file.create_dataset("t", data=values, dtype=h5py.string_dtype() if kind == "text" else "i8")
        source = h5py.VirtualSource(file["t"])
        layout = h5py.VirtualLayout((50,), file["t"].dtype, maxshape=(99,) if grows else None)
        layout[:25], layout[25:] = source[25:], source[:25]
        file.create_virtual_dataset("v", layout)


@pytest.mark.parametrize("kind", ["references", "text", "lists", "numbers"])
def test_a_virtual_array_stays_one_where_nothing_is_shuffled(make_h5, kind):
    path = make_h5({"other": np.arange(3)})
    write_swapped(path, kind)
    repack_file(path, path + ".copy", compression="gzip", verify=True)
    assert_same_file(path, path + ".copy")
    with h5py.File(path + ".copy") as copy:
        assert copy["v"].is_virtual


def test_a_virtual_array_over_other_files_and_shuffled_rows_is_refused(make_h5):
    other = make_h5({"x": np.arange(10)}, name="other.h5")
    path = make_h5({"x": np.arange(10), "y": np.arange(10), "z": np.arange(3)})
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout((20,), "i8")
        layout[:10], layout[10:] = h5py.VirtualSource(other, "x", (10,)), h5py.VirtualSource(file["x"])
        file.create_virtual_dataset("v", layout)
    for key in ("x", "y"):
        with pytest.raises(
            H5ValueError, match=r"'v' is virtual and shows rows of this file, which shuffling would move"
        ):
            repack_file(path, path + ".copy", shuffle_rows=0, shuffle_keys=[key])


@pytest.mark.parametrize("seed", [None, 2])
def test_many_small_chunks_are_written_a_few_at_a_time(make_h5, monkeypatch, seed):
    for name, value in [("ENCODE_BYTES", 40), ("MAX_CHUNKS", 4), ("MAX_TASKS", 3), ("MAX_ROWS", 7)]:
        monkeypatch.setattr(row_io, name, value)
    x = random_values("u1", (1003, 3))
    path = make_h5({"x": x, "y": Stored(x[:, 0], "chunked", (100,), {"compression": "gzip"})})
    for rows_per_chunk in (1, 3, 50):
        target = f"{path}.{rows_per_chunk}"
        repack_file(path, target, compression="gzip", rows_per_chunk=rows_per_chunk, shuffle_rows=seed, verify=True)
        assert_same_file(path, target, ["x", "y"], None if seed is None else places(1003, seed))


def test_values_of_large_rows_are_copied_and_compared_in_parts(make_h5, monkeypatch):
    monkeypatch.setattr("lightning_h5.tools.repack.copy.MAX_OBJECTS", 2 * 21)
    path = make_h5({"other": np.arange(3)})
    with h5py.File(path, "a") as file:
        values = np.array([file["other"].ref, file.ref, None] * 28, dtype=h5py.ref_dtype).reshape(4, 3, 7)
        file.create_dataset("references", data=values, chunks=(2, 2, 2))
        file["text"] = np.array([f"t{i}" for i in range(84)], dtype=h5py.string_dtype()).reshape(4, 3, 7)
        file.create_dataset("numbers", data=random_values("i4", (4, 50)), chunks=(3, 30), compression="gzip")
    repack_file(path, path + ".copy", keys=["other"], verify=True)
    assert_same_file(path, path + ".copy")
    moved = ["text"]
    repack_file(path, path + ".moved", keys=["other"], shuffle_rows=1, shuffle_keys=moved, verify=True)
    assert_same_file(path, path + ".moved", moved, places(4, 1))


# Chunks that are chosen, rows that are large.


@pytest.mark.parametrize(
    ("row", "expected"),
    [((3, 64, 64), 32), ((1,), 1000), ((600_000,), 1), ((100_000,), 4)],
    ids=["12 KiB", "1 B", "600 KB", "100 KB"],
)
def test_chunks_hold_whole_rows_of_256_to_512_kib(make_h5, row, expected):
    path = make_h5({"x": Stored(np.zeros((1000 if row == (1,) else 40, *row), "u1"), "chunked", (1, *row))})
    (array,) = repack_file(path, path + ".copy").arrays
    assert array.after.chunks == (expected, *row)


@pytest.mark.parametrize("seed", [None, 3])
def test_chunks_that_span_many_rows_are_put_together_in_a_file(make_h5, monkeypatch, seed):
    """Rows that share chunks and are too many for memory."""
    monkeypatch.setattr(row_io, "PIECE_BYTES", 100)
    monkeypatch.setattr(row_io, "MAX_IN_MEMORY", 50)
    x = random_values("i2", (130, 3, 4))
    for filters in (("gzip",), ("shuffle", "gzip"), ()):
        path = make_h5({"x": Stored(x, "chunked", (50, 1, 3), filters=filters)})
        repack_file(path, path + ".copy", rows_per_chunk=7, compression="gzip", verify=True, shuffle_rows=seed)
        assert_same_file(path, path + ".copy", ["x"], None if seed is None else places(130, seed))


def test_chunks_that_are_too_large_are_refused(make_h5):
    path = make_h5({"x": Stored(np.zeros((100, 1 << 20), "u1"), "chunked", (1, 1 << 20), {"compression": "gzip"})})
    with pytest.raises(H5ValueError, match=r"rows_per_chunk=50 makes chunks of 50 MiB of 'x'.* Pass 32 or fewer"):
        repack_file(path, path + ".copy", rows_per_chunk=50)


@pytest.mark.wide
@pytest.mark.parametrize("compression", ["keep", "none", "gzip"])
@given(
    rows=st.integers(1, 600),
    row_shape=st.sampled_from([(), (1,), (7,), (64,), (16, 16), (50,)]),
    n_rows=st.integers(2, 700),
    chunk=st.none() | st.integers(1, 50),
    seed=st.none() | st.integers(0, 9),
    has_others=st.booleans(),
)
def test_rows_per_chunk_is_for_every_array_with_rows(
    make_h5, compression, rows, row_shape, n_rows, chunk, seed, has_others
):
    values = np.arange(n_rows * math.prod(row_shape), dtype="f4").reshape(n_rows, *row_shape)
    chunked = Stored(values, "chunked", (min(n_rows, chunk or 1), *row_shape), maxshape="fixed")
    others = {"images": np.zeros((n_rows, 500), "f4")} if has_others else {}
    arrays = {"x": values if chunk is None else chunked} | others
    path = make_h5(arrays)
    options = {"rows_per_chunk": rows, "compression": compression, "shuffle_rows": seed, "verify": True}
    report = repack_file(path, path + ".any", **options)
    repack_file(path, path + ".named", keys=["x"], **options)
    is_left = has_others and row_shape == ()
    (noted,) = [array.note for array in report.arrays if array.name == "x"]
    assert (f"is not written in chunks of {rows} rows" in noted) == is_left
    with h5py.File(path + ".any") as file, h5py.File(path + ".named") as named:
        order = slice(None) if seed is None else np.argsort(places(n_rows, seed))
        assert np.array_equal(file["x"], values[order])
        assert named["x"].chunks == (min(rows, n_rows), *row_shape)
        if not is_left:
            assert file["x"].chunks == named["x"].chunks
        elif chunk is not None:
            assert file["x"].chunks == chunked.chunks
        else:
            assert file["x"].chunks == ((n_rows, *row_shape) if compression == "gzip" else None)
        if has_others:
            assert file["images"].chunks == (min(rows, n_rows), 500)


def test_features_get_the_chunks_that_were_asked_and_labels_stay_as_they_are(make_h5):
    arrays = {
        "images": Stored(np.zeros((2000, 28, 28), "u1"), "chunked", (100, 28, 28), {"compression": "gzip"}),
        "features": np.zeros((2000, 50), "f4"),
        "tables": np.zeros(2000, [("a", "f4", (50,)), ("b", "i8")]),
        "labels": np.arange(2000),
        "ids": Stored(np.arange(2000), "chunked", (300,), {"compression": "lzf"}),
        "few": np.zeros((2000, 2), "f4"),
    }
    path = make_h5(arrays)
    expected = {
        "images": (8, 28, 28),
        "features": (8, 50),
        "tables": (8,),
        "labels": None,
        "ids": (300,),
        "few": (8, 2),
    }
    report = repack_file(path, path + ".copy", rows_per_chunk=8)
    with h5py.File(path + ".copy") as copy:
        assert {name: copy[name].chunks for name in arrays} == expected
        assert copy["ids"].compression == "lzf"
    assert {array.name for array in report.arrays if array.note} == {"labels", "ids"}
    assert not any(array.is_rewritten for array in report.arrays if array.name in ("labels", "ids"))
    repack_file(path, path + ".gzip", rows_per_chunk=8, compression="gzip")
    with h5py.File(path + ".gzip") as copy:
        assert {name: copy[name].chunks for name in arrays} == expected | {"labels": (2000,)}
        assert {copy[name].compression for name in arrays} == {"gzip"}


def test_columns_are_cut_in_a_file_that_has_nothing_else(make_h5):
    path = make_h5({"signal": np.arange(5000, dtype="f4"), "flags": np.zeros(5000, "u1")})
    repack_file(path, path + ".copy", rows_per_chunk=100)
    with h5py.File(path + ".copy") as copy:
        assert [copy[name].chunks for name in ("signal", "flags")] == [(100,), (100,)]


def test_only_named_arrays_are_laid_out_anew(make_h5):
    array = Stored(np.arange(100.0), "chunked", (10,), {"compression": "gzip"})
    path = make_h5({"x": array, "y": array, "s": Stored(np.array(["a"] * 100, object), dtype=h5py.string_dtype())})
    report = repack_file(path, path + ".copy", keys=["x"], compression="lzf", rows_per_chunk=50)
    assert [array.is_rewritten for array in report.arrays if array.name in "xy"] == [True, False]
    with h5py.File(path + ".copy") as copy:
        assert (copy["x"].chunks, copy["x"].compression) == ((50,), "lzf")
        assert (copy["y"].chunks, copy["y"].compression) == ((10,), "gzip")
    with pytest.raises(H5ValueError, match=r"'s' is in keys, but is variable-length"):
        repack_file(path, path + ".other", keys=["x", "s"])
    with pytest.raises(H5KeyError, match=r"'q' is not in"):
        repack_file(path, path + ".other", keys=["q"])


def test_a_filter_that_loses_digits_is_not_applied_twice(make_h5):
    x = np.random.default_rng(0).random(100).astype("f4")
    path = make_h5({"x": Stored(x, "chunked", (10,), {"scaleoffset": 3})})
    (array,) = repack_file(path, path + ".copy", verify=True).arrays
    assert not array.is_rewritten
    assert "may lose digits" in array.note
    assert_same_file(path, path + ".copy")
    (array,) = repack_file(path, path + ".gzip", compression="gzip").arrays
    assert array.after.filters == ("gzip",)
    assert_same_file(path, path + ".gzip")
    with pytest.raises(H5ValueError, match=r"'x' .* has a filter that may lose digits.* Name a compression"):
        repack_file(path, path + ".more", shuffle_rows=0)


def test_what_lies_in_other_files_stays_a_link(make_h5, tmp_path):
    other = make_h5({"x": np.arange(10)}, name="other.h5")
    path = make_h5({"y": np.arange(10)})
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout((10,), "i8")
        layout[:] = h5py.VirtualSource(other, "x", (10,))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", (10,), "u1", external=[(str(tmp_path / "raw.bin"), 0, 10)])[:] = 5
    before = os.stat(tmp_path / "raw.bin").st_mtime_ns
    report = repack_file(path, path + ".copy", compression="gzip", verify=True)
    assert {array.name for array in report.arrays if array.note} == {"virtual", "external"}
    with h5py.File(path + ".copy") as copy:
        assert copy["virtual"].is_virtual
        assert copy["virtual"][:].tolist() == list(range(10))
        assert copy["external"].external[0][0] == str(tmp_path / "raw.bin")
    assert os.stat(tmp_path / "raw.bin").st_mtime_ns == before
    with pytest.raises(H5ValueError, match=r"cannot be shuffled: it is in other files"):
        repack_file(path, path + ".more", shuffle_rows=0)


def test_objects_newer_than_their_file_are_copied(make_h5):
    """Their attributes may be larger than those of old objects."""
    path = make_h5({"x": np.arange(10)})
    with h5py.File(path, "a", libver="latest") as file:
        file.create_dataset("new", data=np.arange(10.0)).attrs["large"] = np.arange(20_000)
    repack_file(path, path + ".copy", verify=True)
    assert_same_file(path, path + ".copy")


def test_what_is_not_copied_names_another_tool(zoo, make_h5, tmp_path):
    path = make_h5({"x": np.arange(3)})
    with h5py.File(path, "a") as file:
        file["references"] = np.array([file["x"].ref] * 3, dtype=h5py.ref_dtype)
    with pytest.raises(H5ValueError, match="'references' cannot be shuffled: it holds references"):
        repack_file(path, path + ".copy", shuffle_rows=1)
    with pytest.raises(H5ValueError, match="'virtual' is virtual and shows rows of this file"):
        repack_file(zoo, tmp_path / "copy.h5", shuffle_rows=1, shuffle_keys=["x"])
    write_regions(zoo)
    with pytest.raises(H5ValueError, match=r"references to regions of arrays, which are not copied. .*h5repack"):
        repack_file(zoo, tmp_path / "copy.h5")
    assert {*os.listdir(tmp_path)} == {"zoo.h5", os.path.basename(path)}


def test_rows_that_are_too_large_for_a_chunk_stay_as_they_are(make_h5, monkeypatch):
    monkeypatch.setattr("lightning_h5.tools.repack.plan.MAX_CHUNK_BYTES", 100)
    x = random_values("i4", (6, 5, 7))
    path = make_h5({"x": Stored(x, "chunked", (2, 3, 5), {"compression": "gzip"})})
    (array,) = repack_file(path, path + ".copy", compression="none", verify=True).arrays
    assert "has rows of more than" in array.note
    assert_same_file(path, path + ".copy")
    with pytest.raises(H5ValueError, match="'x' cannot be shuffled: it has rows of more than"):
        repack_file(path, path + ".more", shuffle_rows=0)


# What cannot be, and what must not be left behind.


def test_bad_input_is_one_line_that_helps(make_h5, tmp_path):
    path = make_h5({"x": np.arange(10)})
    target = str(tmp_path / "copy.h5")
    wrong = tmp_path / "text.h5"
    wrong.write_text("no HDF5 file at all")
    for arguments, options, kind, text in [
        ((str(tmp_path / "no.h5"), target), {}, H5FileError, "cannot be opened: No such file"),
        ((wrong, target), {}, H5FileError, "is not an HDF5 file"),
        ((path, path), {}, H5FileError, "is the file to be repacked"),
        ((path, wrong), {}, H5FileError, "cannot be written: it exists"),
        ((path, tmp_path / "no" / "copy.h5"), {}, H5FileError, "there is no directory"),
        ((path, target), {"rows_per_chunk": 0}, H5ValueError, "a chunk has at least one row"),
        ((path, target), {"compression": "gzpi"}, H5ValueError, "Did you mean 'gzip'"),
        ((path, target), {"compression": "gzip", "level": 10}, H5ValueError, "has 1 to 9"),
        ((path, target), {"compression": "lzf", "level": 1}, H5ValueError, "has no levels"),
        ((path, target), {"compression": "none", "shuffle_filter": True}, H5ValueError, "stores bytes as they are"),
        ((path, target), {"shuffle_keys": ["x"]}, H5ValueError, "without shuffle_rows"),
    ]:
        with pytest.raises(kind, match=text) as caught:
            repack_file(*arguments, **options)
        assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["data1.h5", "text.h5"]


def test_types_that_h5py_cannot_read_are_named(make_h5):
    path = make_h5({"x": np.arange(10)})
    with h5py.File(path, "a") as file:
        listed = h5py.h5t.vlen_create(h5py.h5t.UNIX_D32LE)
        h5py.h5d.create(file.id, b"times", listed, h5py.h5s.create_simple((10,)))
    repack_file(path, path + ".copy")
    path = make_h5({"x": np.arange(10)})
    with h5py.File(path, "a") as file:
        library = ctypes.CDLL(h5py.h5d.__file__)
        make, close = library.H5Dcreate2, library.H5Dclose
        make.argtypes, make.restype = [ctypes.c_int64, ctypes.c_char_p, *[ctypes.c_int64] * 5], ctypes.c_int64
        close.argtypes = [ctypes.c_int64]
        kind, space = ctypes.c_int64.in_dll(library, "H5T_STD_REF_g").value, h5py.h5s.create_simple((10,))
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        close(make(file.id.id, b"pointers", kind, space.id, 0, early.id, 0))
    with pytest.raises(H5FileError, match=r"'pointers' holds values .* cannot read .* cannot be copied"):
        repack_file(path, path + ".copy")


def test_a_compression_that_is_not_installed_names_what_there_is(make_h5, monkeypatch):
    monkeypatch.setattr("lightning_h5.tools.repack.compression._is_installed", lambda known: known.id in (1, 32000))
    path = make_h5({"x": np.arange(10)})
    with pytest.raises(H5ValueError, match=r"'zstd' is not installed; none, gzip, lzf are. Run `pip install"):
        repack_file(path, path + ".copy", compression="zstd")


def test_a_filter_that_cannot_be_read_is_named(make_h5, monkeypatch):
    path = make_h5({"x": Stored(np.arange(10), "chunked", (5,), filters=("gzip",))})
    monkeypatch.setattr("h5py.h5z.filter_avail", lambda number: number != 1)
    with pytest.raises(H5FileError, match=r"'x' in .* is compressed with deflate .number 1., which this installation"):
        repack_file(path, path + ".copy")
    assert not os.path.exists(path + ".copy")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_named(make_h5, tmp_path):
    path = make_h5({"x": np.arange(10)})
    (tmp_path / "theirs").mkdir(mode=0o500)
    with pytest.raises(H5FileError, match=r"you have no permission to write to .*theirs"):
        repack_file(path, tmp_path / "theirs" / "copy.h5")


def test_a_target_that_appears_meanwhile_is_left_alone(make_h5, tmp_path, monkeypatch):
    path, target = make_h5({"x": np.arange(10)}), tmp_path / "copy.h5"
    monkeypatch.setattr(repack_module, "_is_unchanged", lambda guard: target.write_text("mine"))
    for errors in (None, errno.EPERM):  # and on a file system without hard links
        if errors:
            monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
        with pytest.raises(H5FileError, match=r"was created by another program in the meantime"):
            repack_file(path, target)
        assert target.read_text() == "mine"
        assert sorted(os.listdir(tmp_path)) == ["copy.h5", "data1.h5"]
        target.unlink()


def test_file_systems_without_hard_links_do(make_h5, tmp_path, monkeypatch):
    path = make_h5({"x": np.arange(10)})
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    repack_file(path, tmp_path / "copy.h5")
    assert_same_file(path, tmp_path / "copy.h5")
    assert sorted(os.listdir(tmp_path)) == ["copy.h5", "data1.h5"]


def test_a_source_that_changes_meanwhile_is_an_error(make_h5, tmp_path, monkeypatch):
    path = make_h5({"x": np.arange(10)})
    copy_rows = FileCopy.copy_rows

    def copy_and_touch(*arguments):
        os.utime(path, ns=(0, 0))
        copy_rows(*arguments)

    monkeypatch.setattr(FileCopy, "copy_rows", copy_and_touch)
    with pytest.raises(H5DataChangedError, match=r"was written to, replaced or deleted while it was copied"):
        repack_file(path, tmp_path / "copy.h5")
    assert os.listdir(tmp_path) == ["data1.h5"]


def test_a_damaged_source_leaves_nothing(make_h5, tmp_path):
    x = np.random.default_rng(0).integers(0, 9, (1000, 10))
    path = make_h5({"x": Stored(x, "chunked", (100, 10), {"compression": "gzip"})})
    with h5py.File(path) as file:
        offset = file["x"].id.get_chunk_info(4).byte_offset
    edit(path, offset + 40)
    with pytest.raises(H5CorruptError, match=r"does not decode"):
        repack_file(path, tmp_path / "copy.h5")
    assert os.listdir(tmp_path) == ["data1.h5"]


def test_verification_finds_what_was_written_wrongly(make_h5, tmp_path, monkeypatch):
    path = make_h5({"x": np.arange(1000)})

    def deflate(data, *, level):
        wrong = data.copy()
        wrong[17] ^= 1
        return deflate_rightly(wrong, level=level)

    deflate_rightly = compression._deflated
    monkeypatch.setattr(compression, "_deflated", deflate)
    with pytest.raises(H5CorruptError, match=r"the copy of 'x' in .* differs from it in its rows 0 to"):
        repack_file(path, tmp_path / "copy.h5", compression="gzip", rows_per_chunk=100, verify=True)
    assert os.listdir(tmp_path) == ["data1.h5"]


def test_verification_finds_an_attribute_that_differs(zoo, tmp_path, monkeypatch):
    copy_attributes = FileCopy.copy_attributes

    def spoil(self):
        copy_attributes(self)
        self.copy["x"].attrs["number"] = np.int64(4)

    monkeypatch.setattr(FileCopy, "copy_attributes", spoil)
    with pytest.raises(H5CorruptError, match=r"differs from it in its attribute"):
        repack_file(zoo, tmp_path / "copy.h5", verify=True)


def test_a_new_file_is_never_opened_over_another(make_h5, tmp_path):
    path = make_h5({"x": np.arange(10)})
    with pytest.raises(H5FileError, match="exists already"):
        create_h5(path)
    with pytest.raises(H5FileError, match="cannot be created"):
        create_h5(str(tmp_path / "no" / "a.h5"))
    with create_h5(str(tmp_path / "b.h5")) as file:
        file["y"] = 1
    with open_h5(str(tmp_path / "b.h5")) as file:
        assert file["y"][()] == 1


# Real processes.

SLOW_ENCODER = """
    import os, sys, time
    from lightning_h5.tools.repack import compression, row_io
    row_io.MAX_CHUNKS = 1  # a task is not broken off
    deflated = compression._deflated
    def slowly(data, level):
        os.write(1, b"encoding\\n")
        time.sleep(0.2)
        return deflated(data, level=level)
    compression._deflated = slowly
    from lightning_h5.cli import main
    main(["repack", *sys.argv[1:]])
"""


@pytest.mark.wide
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_copy_that_is_broken_off_leaves_nothing(make_h5, tmp_path, number, code):
    path = make_h5({"x": np.zeros((400, 10))})
    heeds = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # these tests may be run under nohup
    command = [sys.executable, "-c", heeds + textwrap.dedent(SLOW_ENCODER), path, str(tmp_path / "copy.h5")]
    command += ["--compression", "gzip", "--rows-per-chunk", "1"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "encoding\n"
        assert any(name.endswith(".partial") for name in os.listdir(tmp_path))
        child.send_signal(number)
        _, errors = child.communicate(timeout=HANG)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == code
    assert os.listdir(tmp_path) == ["data1.h5"]
    assert "Traceback" not in errors


@pytest.mark.parametrize(("number", "ends_with"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_a_verb_whatever_error_it_causes(number, ends_with):
    @ends_at_signals()
    def release():
        try:
            signal.raise_signal(number)
        except BaseException:
            raise RuntimeError("release unlocked lock") from None  # as a lock does that was being released

    before = signal.getsignal(number)
    with pytest.raises(ends_with):
        release()
    assert signal.getsignal(number) is before


@pytest.mark.wide
def test_a_copy_goes_on_after_a_closed_terminal_that_is_ignored(make_h5, tmp_path):
    path = make_h5({"x": np.zeros((10, 10))})
    ignores = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as nohup does
    command = [sys.executable, "-c", ignores + textwrap.dedent(SLOW_ENCODER), path, str(tmp_path / "copy.h5")]
    child = subprocess.Popen(
        [*command, "--compression", "gzip", "--rows-per-chunk", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "encoding\n"
        child.send_signal(signal.SIGHUP)
        child.communicate(timeout=HANG)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 0
    assert_same_file(path, tmp_path / "copy.h5")


FULL_DISK = """
    import resource, sys
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    from lightning_h5.cli import main
    main(["repack", *sys.argv[1:]])
"""


@pytest.mark.wide
@pytest.mark.parametrize("compression", ["gzip", "none"])
def test_a_full_disk_leaves_nothing(make_h5, tmp_path, compression):
    path = make_h5({"x": random_values("u1", (1000, 1000))})
    command = [sys.executable, "-c", textwrap.dedent(FULL_DISK), path, str(tmp_path / "copy.h5")]
    done = subprocess.run(
        [*command, "--compression", compression], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 1
    assert "could not be copied to" in done.stderr
    assert "File too large. Nothing is left" in done.stderr  # as "No space left on device" would be
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["data1.h5"]


MEMORY = """
    import json, re, sys, threading, time
    from lightning_h5.tools.repack import repack_file
    most, over = 0, threading.Event()
    def watch():
        global most
        while not over.wait(0.01):
            text = open("/proc/self/status").read()
            most = max(most, int(re.search(r"RssAnon:\\s+(\\d+)", text)[1]))
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        repack_file(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
    finally:
        over.set()
        thread.join()
    print(most / 1024)
"""


def most_memory(path, options):
    """MiB that a process holds at most while it repacks a file."""
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(path), f"{path}.copy", json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=True)
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (np.zeros(30_000_000, "u1"), {"shuffle_rows": 0}),
        (np.zeros(34_000_000, "u1"), {"shuffle_rows": 0}),
        (np.arange(500_000), {"rows_per_chunk": 1, "compression": "lzf"}),
        (np.arange(2_000_000), {"rows_per_chunk": 4, "compression": "gzip", "shuffle_rows": 0}),
    ],
    ids=["labels in one bucket", "labels", "a row a chunk", "small chunks"],
)
def test_memory_is_bounded_for_many_small_rows(make_h5, rows, options):
    assert most_memory(make_h5({"y": rows}), options) < 512


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
def test_memory_is_bounded_where_a_large_row_is_compared(make_h5):
    path = make_h5({"x": np.zeros((10, 4))})
    with h5py.File(path, "a") as file:
        large = file.create_dataset("large", (1, 250_000_000), "u1", chunks=(1, 1 << 20), compression="gzip")
        large[0, : 1 << 20] = 1
    assert most_memory(path, {"keys": ["x"], "rows_per_chunk": 5, "verify": True}) < 512


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
@pytest.mark.parametrize("options", [{}, {"shuffle_rows": 1}, {"compression": "none"}], ids=str)
@pytest.mark.parametrize(
    "chunks",
    [(10_000, 3, 8, 8), (5000, 3, 64, 64), (5000, 1, 64, 64), (16, 3, 64, 64), None],
    ids=["wide", "large chunks", "large blocks", "rows", "contiguous"],
)
def test_memory_is_bounded(tmp_path, options, chunks):
    path = tmp_path / "large.h5"
    rows = random_values("u1", (1000, 3, 64, 64)) & 7
    with h5py.File(path, "w") as file:
        more = {} if chunks is None else {"chunks": chunks, "compression": "lzf"}
        x = file.create_dataset("x", (70_000, 3, 64, 64), "u1", **more)  # 820 MiB
        if chunks is None or chunks[0] < 1000:
            for first in range(0, 70_000, 1000):
                x[first : first + 1000] = rows
        else:
            for first in range(0, 70_000, chunks[0]):
                x[first : first + chunks[0]] = np.resize(rows, (chunks[0], 3, 64, 64))
    assert most_memory(path, options) < 512


def test_text_whose_heap_has_a_hole_is_refused_and_no_endless_loop(tmp_path):
    text = np.array(["some words"] * 500, dtype=object)
    path = tmp_path / "text.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=text, dtype=h5py.string_dtype())
    with open(path, "r+b") as file:
        file.seek(file.read().index(b"GCOL") + 512)
        file.write(bytes(512))
    with pytest.raises(H5CorruptError, match="heap of text at byte"):
        repack_file(path, tmp_path / "copy.h5")
    assert not (tmp_path / "copy.h5").exists()


def test_blosc2_that_only_the_library_would_decode_is_not_compared(tmp_path):
    """Its filter runs code that a chunk names; this package looks at each chunk that it decodes itself."""
    plugin = pytest.importorskip("hdf5plugin")
    path, values = tmp_path / "x.h5", np.arange(4000).reshape(400, 10)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(50, 10), **plugin.Blosc2())
        file["y"] = np.arange(400)
    with pytest.raises(H5ValueError, match=r"'/?x'.*Blosc2.*compared"):
        repack_file(path, tmp_path / "refused.h5", keys=["y"], verify=True)
    assert not (tmp_path / "refused.h5").exists()
    for name, options in {"all": {"verify": True, "compression": "gzip"}, "some": {"keys": ["y"]}}.items():
        repack_file(path, tmp_path / f"{name}.h5", **options)
        with h5py.File(tmp_path / f"{name}.h5") as file:
            assert (file["x"][()] == values).all()
