"""What every reader is held to: any rows of any array, as h5py's ``array[row]`` gives them.

To hold a further reader to these claims, add it to ``WAYS``: a function that opens it for an array, or returns None if
it does not read such arrays. The strategies of this module make arrays of any layout.
"""

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import h5py
import numpy as np
import pytest
from factories import (
    Stored,
    assert_same_rows,
    in_threads,
    is_decodable,
    known_filters,
    random_values,
    rows_by_h5py,
)
from fake_decoding import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import (
    EVERYTHING,
    IS_COMPILED,
    OPTIONS,
    can_be_pooled,
    look,
    n_decoded,
    open_pool,
    open_pool_on_device,
)
from range_server import RangeServer
from tiers import examples

from lightning_h5 import H5CorruptError, StagingOptions
from lightning_h5.counters import Counters
from lightning_h5.hdf5 import Codec, find_array, is_out_of_proportion, kind_of, layout_of, open_h5, process_pool
from lightning_h5.readers import (
    ChunkedReader,
    ContiguousReader,
    H5pyReader,
    InMemoryReader,
    MappedReader,
    digest_tasks,
    empty_digests,
    fallback_reason,
    is_pooled,
    keeps_decoded,
    kept_chunks,
    kept_rows,
    open_reader,
)
from lightning_h5.staging import use_staging

# Readers ------------------------------------------------------------------------------------------------------------


kept_chunks.MIN_BYTES = 0  # small arrays are kept, too


@dataclass(frozen=True)
class AsStored(Codec):
    """Changes nothing."""

    def decoded(self, array):
        return array.dtype, array.row_shape

    def decode(self, rows, out):
        out[...] = rows


def as_coded(layout):
    """An array whose rows go through a codec that changes nothing."""
    return layout.decoded(AsStored()) if kind_of(layout.dtype) == "number" else layout


def with_digests(layout):
    """Return the array with digests of its chunks or rows; None for arrays that have none."""
    digests = empty_digests(layout)
    if digests is None or (layout.members and layout.stored.hasobject):  # none are made of tables with text
        return None
    for task in digest_tasks(layout, OPTIONS, digests):
        task.run()
    return replace(layout, digests=digests)


def compared(open_one):
    """Return a way to open a reader of rows that are compared with digests."""

    def open_compared(layout):
        described = with_digests(layout)
        return None if described is None else open_one(described)

    return open_compared


def pool(layout, **options):
    return open_pool(layout, **options) if can_be_pooled(layout) else None


def held(layout, **options):
    return open_reader(layout, OPTIONS, held_bytes=1 << 20, **options)


@cache
def folder_of_mirrors():
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def staged(layout):
    """The array, read through a mirror of its file."""
    return layout.guarded(replace(layout.guard, staging=StagingOptions(dir=folder_of_mirrors())))


def kept(layout, *, by_rows=True, **options):
    """The array, whose decoded chunks are on a local disk, read by rows if it can; None if there is none to decode."""
    kept_rows.LEAST_BYTES = 0 if by_rows else 1 << 60
    described = layout.guarded(replace(layout.guard, decoded=StagingOptions(dir=folder_of_mirrors(), decoded=True)))
    if not can_be_pooled(layout) or not keeps_decoded(described):
        return None
    with suppress(H5CorruptError):  # of an array with damaged chunks
        open_pool(described, n_blocks=EVERYTHING).read(np.arange(layout.n_rows))
    return open_pool(described, **options)


@cache
def store():
    """A web server for all files."""
    server = RangeServer("/").__enter__()
    atexit.register(server.__exit__)
    return server


def in_store(layout):
    """The array, described and read as an object of a store; None of a member of a table, and of values elsewhere."""
    if find_spec("obstore") is None or layout.members or layout.storage == "virtual" or layout.guard.others:
        return None
    url = store().url(layout.path.lstrip("/"))
    use_staging(url, StagingOptions(dir=folder_of_mirrors()))
    with open_h5(url) as file:
        found = layout_of(find_array(file, layout.key), url, layout.key)
    found = found.guarded(found.guard.staged(None))
    assert replace(found.with_changes(path=layout.path), guard=layout.guard) == layout.with_changes(key=found.key)
    return found


def of_store(open_one):
    """Return a way to open a reader of an object of a store."""

    def open_there(layout):
        found = in_store(layout)
        return None if found is None else open_one(found)

    return open_there


WAYS = {
    "chosen": lambda layout: open_reader(layout, OPTIONS),
    "plain": lambda layout: H5pyReader(layout, OPTIONS),
    "in blocks": lambda layout: open_reader(layout, OPTIONS, in_blocks=True),
    "mapped": lambda layout: open_reader(layout, OPTIONS, mmap=True),
    "held": held,
    "held, mapped": partial(held, mmap=True),
    **{f"pool of {n_blocks}": partial(pool, n_blocks=n_blocks) for n_blocks in (0, 1, 2, EVERYTHING)},
    "pool of a large array": lambda layout: pool(layout, n_blocks=2, is_large=True) if IS_COMPILED else None,
    "decoded": lambda layout: open_reader(as_coded(layout), OPTIONS),
    "decoded, pool of 2": lambda layout: pool(as_coded(layout), n_blocks=2),
    "compared": compared(lambda layout: open_reader(layout, OPTIONS)),
    "compared, pool of 2": compared(partial(pool, n_blocks=2)),
    "staged": lambda layout: open_reader(staged(layout), OPTIONS),
    "staged, pool of 2": lambda layout: pool(staged(layout), n_blocks=2),
    "staged, large": lambda layout: pool(staged(layout), n_blocks=2, is_large=True) if IS_COMPILED else None,
    "kept, pool of 2": partial(kept, n_blocks=2),
    "kept, by chunks": partial(kept, n_blocks=2, by_rows=False),
    "kept, pool of 0": partial(kept, n_blocks=0, by_rows=False),
    "kept, large": partial(kept, n_blocks=2, is_large=True),
    "kept, compared": compared(partial(kept, n_blocks=2)),
    "in a store": of_store(lambda layout: open_reader(layout, OPTIONS)),
    "in a store, plain": of_store(lambda layout: H5pyReader(layout, OPTIONS)),
    "in a store, pool of 2": of_store(partial(pool, n_blocks=2)),
    "staged, compared": compared(lambda layout: open_reader(staged(layout), OPTIONS)),
}


def on_device(layout, *, n_blocks):
    """The array, decoded on a device; None if that leaves it to the CPU."""
    device = FakeDevice(alignment=1 if n_blocks == 1 else 16)
    return open_pool_on_device(device, layout, n_blocks=n_blocks)


WAYS |= {
    f"on a device, pool of {n_blocks}": partial(on_device, n_blocks=n_blocks) for n_blocks in (0, 1, 2, EVERYTHING)
}
WAYS["on a device, staged"] = lambda layout: on_device(staged(layout), n_blocks=2)


def all_readers(layout, ways=WAYS):
    """Return every reader that an array can be given, by name."""
    opened = {name: way(layout) for name, way in ways.items()}
    readers = {name: reader for name, reader in opened.items() if reader is not None}
    assert isinstance(readers["held"], InMemoryReader)
    if layout.is_contiguous or not is_out_of_proportion(
        layout.filters
    ):  # the library decodes the latter without bounds
        assert type(readers["chosen"]) is (ContiguousReader if layout.is_contiguous else H5pyReader)
    if layout.offset is not None:
        assert type(readers["mapped"]) is MappedReader
    assert ("pool of 0" in readers) == can_be_pooled(layout)
    return readers


def assert_decoded_here(layout):
    """Chunks were decoded without the HDF5 library: the tests must not pass by always going through it."""
    counters = Counters()
    open_pool(layout, counters=counters).read(np.arange(layout.n_rows))
    is_there = layout.table.offsets >= 0
    assert n_decoded(counters) == np.count_nonzero(is_there)
    assert counters.total()["bytes_read"] == layout.table.sizes[is_there].sum()


# Arrays -------------------------------------------------------------------------------------------------------------

ENUM = h5py.enum_dtype({"NO": 0, "YES": 1}, basetype="i2")
BIG_ENUM = h5py.enum_dtype({"NO": 0, "YES": 1}, basetype=">i4")
INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i2", ">i4", ">i8", ">u2", ">u8"]
NUMBERS = [*INTEGERS, "f2", "f4", "f8", ">f2", ">f4", ">f8", "?", "c8", "c16", ">c8", ">c16", ENUM, BIG_ENUM]


def row_lists(n_rows):
    if not n_rows:
        return st.just([])
    one = st.integers(0, n_rows - 1)
    slices = st.tuples(one, one).map(lambda pair: list(range(min(pair), max(pair) + 1)))
    return st.one_of(st.lists(one, max_size=25), slices, st.permutations(range(n_rows)))


COMPRESSORS = ["gzip", "gzip 9", "lzf"]


def compressors():
    return [name for name in known_filters() if name not in ("shuffle", "fletcher32")]


@st.composite
def pipelines(draw):
    """Names of filters in the order of writing: at most one compressor, a checksum and a shuffle anywhere sensible."""
    compressor = draw(st.sampled_from([None, *COMPRESSORS, *compressors()]))
    filters = [] if compressor is None else [compressor]
    if draw(st.booleans()):
        filters.insert(0, "shuffle")
    checksum = draw(st.sampled_from([None, "first", "last"]))
    if checksum == "last":
        filters.append("fletcher32")
    elif checksum == "first" and (compressor or "gzip") in (*COMPRESSORS, "zstd"):  # the others want whole numbers
        filters.insert(0, "fletcher32")
    return tuple(filters)


@st.composite
def library_filters(draw, dtype):
    """Filters that only the HDF5 library undoes."""
    options = {}
    is_enum = h5py.check_enum_dtype(np.dtype(dtype)) is not None
    kind, size = np.dtype(dtype).kind, np.dtype(dtype).itemsize
    if kind in "iu" and not is_enum and size < 8 and draw(st.booleans()):
        return {"scaleoffset": 0}
    if kind in "iuf" and not is_enum:
        options["compression"] = "szip"
    return options | {"fletcher32": draw(st.booleans())}


@st.composite
def chunked(draw, values, dtype):
    """An array in chunks that split rows, and that hang over its edge."""
    stored = Stored(values, "chunked", dtype=dtype)
    shape = values.shape[: values.ndim - len(np.dtype(dtype).shape)]
    stored.maxshape = draw(st.sampled_from(["any", "first", "fixed"])) if all(shape) else "any"
    over = {"any": (2,) * len(shape), "first": (2, *[0] * (len(shape) - 1)), "fixed": (0,) * len(shape)}
    most = [max(1, size + more) for size, more in zip(shape, over[stored.maxshape], strict=True)]
    # Whole rows, single rows, and anything.
    kind = draw(st.sampled_from(["any", "whole rows", "any", "one row", "any"]))
    stored.chunks = tuple(
        1
        if axis == 0 and kind == "one row"
        else max(1, size)
        if axis and kind == "whole rows"
        else draw(st.integers(1, limit))
        for axis, (size, limit) in enumerate(zip(shape, most, strict=True))
    )
    by_library = draw(st.sampled_from([True, *[False] * 6]))
    if by_library:
        stored.options = draw(library_filters(dtype))
        if np.prod(stored.chunks) < 8 and stored.options.get("compression") == "szip":
            del stored.options["compression"]  # szip wants eight values a chunk
    else:
        stored.filters = draw(pipelines())
        stored.early = stored.maxshape == "fixed" and not stored.filters and draw(st.booleans())
    if "scaleoffset" not in stored.options and not np.dtype(dtype).shape and draw(st.booleans()):
        stored.options["fillvalue"] = values.dtype.type(1)
    grid = [-(-size // step) for size, step in zip(shape, stored.chunks, strict=True)]
    if by_library or not draw(st.booleans()):
        stored.written = draw(st.integers(0, shape[0]))
    else:
        # Any filter may be skipped, in any chunk; any chunk may never have been written.
        masks = st.one_of(st.none(), st.just(0), st.integers(0, (1 << len(stored.filters)) - 1))
        stored.masks = draw(st.lists(masks, min_size=int(np.prod(grid)), max_size=int(np.prod(grid))))
    return stored


# Zero rows and zero-length inner axes are legal, and people have them.
ANY_SHAPES = st.tuples(st.integers(0, 23), st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), max_size=2))
FULL_SHAPES = st.tuples(st.integers(2, 23), st.lists(st.sampled_from([5, 3, 8, 7, 2, 1]), max_size=3))


@st.composite
def arrays(draw, storages, shapes):
    dtype = draw(st.sampled_from(NUMBERS))
    n_rows, axes = draw(shapes)
    shape, storage = (n_rows, *axes), draw(st.sampled_from(storages))
    if storage == "virtual" and not all(shape):
        storage = "compact"
    # Values that a compressor makes smaller, and values that none does.
    values = random_values(dtype, shape, draw(st.integers(0, 99)))
    if values.dtype.kind != "b" and draw(st.booleans()):
        values = np.resize(values.reshape(-1)[:2], shape) if values.size else values
    stored = draw(chunked(values, dtype)) if storage == "chunked" else Stored(values, storage, dtype=dtype)
    if storage == "contiguous":
        if draw(st.booleans()):
            stored.options = {"fillvalue": values.dtype.type(1)}
        stored.written = draw(st.sampled_from([0, 1, shape[0], shape[0]])) if shape[0] else 0
    file = {
        "userblock": draw(st.sampled_from([0, 512, 2048])),
        "libver": draw(st.sampled_from(["earliest", "latest"])),
    }
    return stored, file


NUMBER_MEMBERS = [np.dtype(name) for name in ("i1", "<i4", ">i8", "<f4", ">f8", "f2", "?", "c8", "u2")]
MEMBERS = st.one_of(
    st.sampled_from(NUMBER_MEMBERS),
    st.builds(
        lambda base, shape: np.dtype((base, shape)),
        st.sampled_from(NUMBER_MEMBERS),
        st.sampled_from([(1,), (3,), (2, 3)]),
    ),
    st.sampled_from([np.dtype("S1"), np.dtype("S7")]),
)


def tables(members):
    names = st.lists(st.sampled_from(["a", "b", "name with blank", "ü"]), min_size=1, max_size=3, unique=True)
    fields = names.flatmap(lambda given: st.tuples(*[members.map(lambda m, n=n: (n, m)) for n in given]))
    return st.builds(lambda fields, align: np.dtype(list(fields), align=align), fields, st.booleans())


TABLES = tables(st.one_of(MEMBERS, tables(MEMBERS)))


def leaves(dtype, above=()):
    for name in dtype.names:
        if dtype[name].names:
            yield from leaves(dtype[name], (*above, name))
        else:
            yield (*above, name)


def fill(dtype, shape, seed):
    values = np.zeros(shape, dtype)
    for at, path in enumerate(leaves(dtype)):
        column = values
        for name in path:
            column = column[name]
        if column.dtype.kind == "S":
            column[...] = np.random.default_rng(seed + at).choice([b"", b"x", b"row", b"longer"], column.shape)
        else:
            column[...] = random_values(column.dtype, column.shape, seed + at)
    return values


TEXTS = ["", "a", "käse", "日本語", "x" * 30, "two words"]
LONG_TEXTS = np.array([f"{i} " + "long " * (i % 50) for i in range(300)], dtype=object)
INNER = np.dtype([("z", h5py.string_dtype()), ("k", "f8")])
WITH_TEXT = np.dtype([("n", "i4"), ("t", h5py.string_dtype()), ("u", h5py.string_dtype(), (2,)), ("m", INNER)])
TEXT_TABLE = np.array([(i, f"t{i}" * 20, [f"u{i}", f"w{i}"], (f"z{i}", i)) for i in range(100)], dtype=WITH_TEXT)
STORAGES = {
    "compact": {"storage": "compact"},
    "contiguous": {},
    "chunked": {"storage": "chunked", "chunks": (40,)},
    "gzip": {"storage": "chunked", "chunks": (40,), "options": {"compression": "gzip", "shuffle": True}},
}
FILES = {"": {}, "latest": {"libver": "latest"}, "user block": {"userblock": 1024}}


# Claims -------------------------------------------------------------------------------------------------------------


class ReaderConformance:
    """Claims about the readers of ``ways``, all of which read the same arrays."""

    ways: ClassVar = WAYS

    def check(self, path, key, rows, *, name=None, members=()):
        """All readers give what h5py gives, as a new array and into given memory, again and again, and once closed."""
        layout = look(path, key)
        rows = np.asarray(rows, dtype=np.int64)
        expected = rows_by_h5py(path, name or key, rows, members)
        for reader in all_readers(layout, self.ways).values():
            for _ in range(2):  # a second read meets warm caches
                assert_same_rows(reader.read(rows), expected)
            out = np.empty(expected.shape, expected.dtype)
            out[...] = None if expected.dtype.kind == "O" else random_values(out.dtype, out.shape, seed=9)
            assert reader.read(rows, out=out) is out
            assert_same_rows(out, expected)
            if isinstance(reader, MappedReader):
                assert_same_rows(reader.read_on_all_cores(rows, np.zeros_like(out)), expected)
            assert (len(reader), reader.row_shape, reader.dtype) == (layout.n_rows, expected.shape[1:], expected.dtype)
            reader.close()
            assert_same_rows(reader.read(rows), expected)
            reader.close()
        process_pool().close()
        return layout

    # Numbers

    @given(data=st.data(), drawn=arrays(["contiguous", "contiguous", "compact", "virtual", "chunked"], ANY_SHAPES))
    @settings(max_examples=examples(150))
    def test_any_reader_gives_any_rows_of_any_numbers_as_h5py_does(self, make_h5, data, drawn):
        self.check_drawn(make_h5, data, *drawn)

    @pytest.mark.wide
    @given(data=st.data(), drawn=arrays(["chunked"], FULL_SHAPES))
    @settings(max_examples=examples(200))
    def test_any_reader_gives_any_rows_of_any_chunks_as_h5py_does(self, make_h5, data, drawn):
        self.check_drawn(make_h5, data, *drawn)

    def check_drawn(self, make_h5, data, stored, file):
        path = make_h5({"deep/down/x": stored}, **file)
        layout = self.check(path, "deep/down/x", data.draw(row_lists(len(stored.values))))
        # Without this the test could pass by always going through the HDF5 library.
        is_there = stored.values.size > 0 and (stored.written is None or stored.written > 0)
        assert (layout.offset is not None) == (stored.storage == "contiguous" and is_there)
        assert (layout.plain_reason is None) == (stored.storage == "chunked" or layout.offset is not None)
        assert layout.storage == stored.storage
        if stored.storage == "chunked":
            here = not {"compression", "scaleoffset"} & set(stored.options) and all(
                map(is_decodable, stored.filters or ())
            )
            if layout.is_contiguous:
                assert layout.chunks[1:] == layout.axes
                assert fallback_reason(layout) is None
            elif layout.row_bytes:
                assert (fallback_reason(layout) is None) == here
                assert is_pooled(layout, OPTIONS) == (here or layout.chunks[0] > 1)
                if here:
                    assert_decoded_here(layout)
        os.unlink(path)

    def test_number_formats_that_numpy_does_not_have_are_left_to_the_library(self, make_h5):
        """Integers of 20 bits, eight bits up, look like int32 to NumPy; their bytes taken as int32 are nonsense."""
        path = make_h5(y=np.arange(3))
        with h5py.File(path, "a") as file:
            odd = h5py.h5t.STD_I32LE.copy()
            odd.set_precision(20)
            odd.set_offset(8)
            array = h5py.Dataset(h5py.h5d.create(file.id, b"x", odd, h5py.h5s.create_simple((5,))))
            array[:] = [-3, 2, 70000, 0, 1]
        self.check(path, "x", [2, 0, 4])
        assert look(path, "x").offset is None

    def test_large_rows_and_pieces_are_read_whole(self, make_h5, monkeypatch):
        """The same where a call may read only a few rows, and where the kernel gives less than was asked."""
        monkeypatch.setattr("lightning_h5.readers.h5py_reader.PIECE_BYTES", 100)
        real = os.preadv
        monkeypatch.setattr(
            os, "preadv", lambda fd, pieces, *at: real(fd, [pieces[0][: max(1, len(pieces[0]) // 2)]], *at)
        )
        values = random_values("f4", (40, 7))
        path = make_h5(x=values, y=Stored(values, "chunked", (1, 7)), z=Stored(values, "chunked", (16, 7)))
        for key in "xyz":
            self.check(path, key, [*range(5, 30), 3, 2, 39, 39, 0])

    # Members of tables, and elements that are arrays

    @pytest.mark.wide
    @given(
        dtype=TABLES,
        shape=st.sampled_from([(0,), (1,), (9,), (14,), (5, 2)]),
        storage=st.sampled_from(["contiguous", "chunked", "gzip"]),
        seed=st.integers(0, 50),
        data=st.data(),
    )
    def test_a_key_that_ends_in_a_member_of_a_table_gives_that_column(self, make_h5, dtype, shape, storage, seed, data):
        values = fill(dtype, shape, seed)
        if storage == "contiguous":
            stored = Stored(values)
        else:
            options = {"compression": "gzip", "shuffle": seed % 2 == 0} if storage == "gzip" else {}
            stored = Stored(values, "chunked", chunks=(4, *[1] * (len(shape) - 1)), options=options)
            stored.written = max(0, shape[0] - seed % 3)
        path = make_h5(table=stored)
        rows = data.draw(row_lists(shape[0]))
        for members in leaves(dtype):
            layout = self.check(path, "/".join(["table", *members]), rows, name="table", members=members)
            number = layout.dtype.kind != "S"
            assert (layout.offset is not None) == (storage == "contiguous" and number and shape[0] > 0)
        os.unlink(path)

    def test_a_member_that_is_text_of_any_length_is_read(self, make_h5):
        dtype = np.dtype([("n", "i4"), ("text", h5py.string_dtype()), ("deep", [("text", h5py.string_dtype())])])
        values = np.zeros(5, dtype)
        values["n"] = range(5)
        values["text"] = ["", "a", "ß", "long " * 50, "e"]
        values["deep"]["text"] = ["v", "w", "x", "y", "z"]
        path = make_h5(table=values)
        for key, members in {"table/n": ("n",), "table/text": ("text",), "table/deep/text": ("deep", "text")}.items():
            layout = self.check(path, key, [4, 0, 0, 3], name="table", members=members)
            assert layout.offset is None  # the rows hold references to text elsewhere

    def test_a_table_as_pandas_writes_it_is_read_by_its_blocks(self, make_h5):
        dtype = np.dtype([("index", "<i8"), ("values_block_0", "<f8", (3,)), ("values_block_1", "S4", (1,))])
        path = make_h5({"frame/table": Stored(fill(dtype, (50,), 3), "chunked", chunks=(16,))})
        for member in dtype.names:
            self.check(path, f"frame/table/{member}", [49, 0, 17, 17], name="frame/table", members=(member,))

    @pytest.mark.parametrize("storage", ["contiguous", "chunked"])
    @pytest.mark.parametrize("base", ["<f4", ">i2", "c8"])
    def test_elements_that_are_arrays_add_their_axes_to_the_row(self, make_h5, storage, base):
        element = np.dtype((base, (2, 3)))
        stored = Stored(
            random_values(base, (7, 4, 2, 3)), storage, (3, 2) if storage == "chunked" else None, dtype=element
        )
        path = make_h5(x=stored)
        layout = self.check(path, "x", [6, 0, 3, 3])
        assert layout.row_shape == (4, 2, 3)
        assert (layout.offset is not None) == (storage == "contiguous")

    # Text

    @pytest.mark.parametrize("shape", [(0,), (6,), (6, 2), (6, 0)], ids=str)
    @pytest.mark.parametrize("storage", ["contiguous", "chunked", "gzip"])
    @pytest.mark.parametrize(
        "dtype",
        [h5py.string_dtype(), h5py.string_dtype("utf-8", 32), h5py.string_dtype("ascii"), np.dtype("S9")],
        ids=["vlen utf-8", "fixed utf-8", "vlen ascii", "S9"],
    )
    def test_text_comes_as_str(self, make_h5, dtype, storage, shape):
        texts = [t for t in TEXTS if h5py.check_string_dtype(dtype).encoding == "utf-8" or t.isascii()]
        values = np.resize(np.array([t.encode() for t in texts], dtype), shape)
        stored = Stored(values, dtype=dtype)
        if storage != "contiguous":
            options = {"compression": "gzip"} if storage == "gzip" else {}
            stored = Stored(values, "chunked", (4, *[1] * (len(shape) - 1)), options, dtype, written=shape[0] // 2)
        path = make_h5(x=stored)
        rows = [5, 0, 0, 3, 1, 2, 4] if shape[0] else []
        layout = self.check(path, "x", rows)
        assert layout.plain_reason is not None
        if values.size:
            assert isinstance(open_reader(layout, OPTIONS).read(np.array([1])).flat[0], str)

    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("storage", STORAGES)
    def test_long_text_and_text_of_tables_are_read(self, make_h5, storage, file):
        stored = STORAGES[storage]
        path = make_h5(
            y=Stored(LONG_TEXTS, dtype=h5py.string_dtype(), **stored), tab=Stored(TEXT_TABLE, **stored), **FILES[file]
        )
        self.check(path, "y", [*range(300), 7, 7, 299, 0])
        for members in (("t",), ("m", "z"), ("n",)):
            self.check(path, "/".join(("tab", *members)), [*range(100), 3], name="tab", members=members)

    @given(text=st.lists(st.text(max_size=3000), min_size=1, max_size=60))
    def test_any_text_is_read(self, make_h5, text):
        text = np.array([one.replace("\0", "") for one in text], dtype=object)
        path = make_h5(y=Stored(text, dtype=h5py.string_dtype(), **STORAGES["gzip"]))
        layout = look(path, "y")
        for reader in all_readers(layout, self.ways).values():
            assert reader.read(np.arange(len(text))).tolist() == text.tolist()
        process_pool().close()
        os.unlink(path)

    # Rows that are asked for, and what becomes of them

    @pytest.mark.parametrize("chunks", [None, (4, 2)], ids=["contiguous", "chunked"])
    @pytest.mark.parametrize("rows", [[-1], [10], [0, 3, 10], [3, -2, 4]], ids=str)
    def test_rows_outside_the_array_raise(self, make_h5, chunks, rows):
        values = np.arange(20).reshape(10, 2)
        path = make_h5(x=Stored(values, "chunked" if chunks else "contiguous", chunks))
        for name, reader in all_readers(look(path, "x"), self.ways).items():
            where = " " if isinstance(reader, ChunkedReader) else r".*'x' in "  # one reader for all files of a field
            with pytest.raises(IndexError, match=rf"row -?\d+ .*{where}.*10 rows"):
                reader.read(np.array(rows))
            with pytest.raises(IndexError):
                reader.read(np.array(rows), out=np.empty((len(rows), 2), int))
            if isinstance(reader, MappedReader):
                with pytest.raises(IndexError, match=r"'x'.*10 rows"):
                    reader.read_on_all_cores(np.array(rows), np.empty((len(rows), 2), int))
            assert reader.read(np.array([9])).tolist() == [[18, 19]], name

    @pytest.mark.parametrize("storage", STORAGES)
    def test_rows_may_be_integers_of_any_kind(self, make_h5, storage):
        values = np.arange(60)
        for name, reader in all_readers(look(make_h5(x=Stored(values, **STORAGES[storage]))), self.ways).items():
            for rows in (np.array([3, 19], "i4"), np.array([3, 19], "u8"), np.arange(40)[3:20:16]):
                assert_same_rows(reader.read(rows), values[[3, 19]])
            assert reader.read(np.array([], dtype=np.int64)).shape == (0,), name

    @pytest.mark.parametrize("storage", STORAGES)
    def test_changes_to_rows_reach_neither_the_file_nor_later_reads(self, make_h5, storage):
        values = np.arange(60.0)
        path = make_h5(x=Stored(values, **STORAGES[storage]))
        before = Path(path).read_bytes()
        for reader in all_readers(look(path), self.ways).values():
            for rows in (np.array([2]), np.arange(60), np.array([2, 2])):
                found = reader.read(rows)
                assert_same_rows(found, values[rows])
                found[:] = -1
            reader.close()
            assert_same_rows(reader.read(np.array([59, 2])), values[[59, 2]])
        assert Path(path).read_bytes() == before

    @pytest.mark.parametrize("storage", STORAGES)
    @pytest.mark.parametrize("is_text", [False, True], ids=["numbers", "text"])
    def test_eight_threads_read_from_one_reader_at_a_time(self, make_h5, storage, is_text):
        values = LONG_TEXTS if is_text else random_values("f4", (300,), 3)
        path = make_h5(x=Stored(values, dtype=h5py.string_dtype() if is_text else None, **STORAGES[storage]))
        expected = rows_by_h5py(path, "x", range(300))

        def read(reader, seed):
            random = np.random.default_rng(seed)
            for _ in range(5):
                rows = random.integers(0, 300, random.integers(0, 20))
                assert_same_rows(reader.read(rows), expected[rows])

        for reader in all_readers(look(path), self.ways).values():
            in_threads(*[partial(read, reader, seed) for seed in range(8)])
