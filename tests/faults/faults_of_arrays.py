"""Faults of one array: damaged chunks, claims that cannot be true, kinds of numbers, links."""

import zlib

import h5py
import numpy as np
from matrix_case import (
    BAD,
    BAD_ROW,
    BOTH,
    CHECKED,
    CHUNKED,
    GZIP,
    REFUSED,
    RIGHT,
    ROWS,
    STEP,
    WIDTH,
    fault,
    values_of,
)

from lightning_h5.readers.filters.decoders import fletcher32

LZF = {"chunks": (STEP, WIDTH), "compression": "lzf"}
UNKNOWN = 32_999  # a filter that does not exist
MANY = 1 << 40


# Damaged chunks ----------------------------------------------------------------------------------------------------


def damaged(name, storage, change, *, slow=False):
    """Registers a fault of the bytes of one chunk."""

    def damage(case):
        case.write(**storage)
        found = case.chunk()
        change(case, found)

    damage.__name__ = name
    fault(REFUSED, key="x", cause="H5CorruptError: chunk 5|H5CorruptError.*rows 20 to", slow=slow)(damage)


def flip(case, found):
    case.edit(found.byte_offset + found.size // 2)


def zero(case, found):
    case.edit(found.byte_offset, bytes(found.size))


def noise(case, found):
    case.edit(found.byte_offset, np.random.default_rng(1).bytes(found.size))


STORED = {"gzip": GZIP, "fletcher32": CHECKED, "gzip_and_fletcher32": BOTH, "lzf_and_fletcher32": LZF | CHECKED}
for _name, _storage in STORED.items():
    damaged(f"bit_flip_in_a_{_name}_chunk", _storage, flip)
    damaged(f"noise_in_a_{_name}_chunk", _storage, noise, slow=True)
for _name in ("gzip", "gzip_and_fletcher32"):  # the checksum of zeros is zero, so the decompressor has to notice
    damaged(f"zeros_in_a_{_name}_chunk", STORED[_name], zero)
damaged("bit_flip_in_a_gzip_chunk_in_the_newer_format", GZIP | {"libver": "latest"}, flip)
damaged("bit_flip_in_a_shuffled_gzip_chunk", GZIP | {"shuffle": True}, flip, slow=True)


def _chunk_of(rows):
    return values_of()[BAD_ROW : BAD_ROW + rows].tobytes()


@fault(RIGHT)
def chunk_that_skips_the_checksum(case):
    case.write(**CHECKED)
    case.put_chunk(_chunk_of(STEP), mask=1)


@fault(RIGHT, slow=True)
def chunk_that_skips_the_compressor(case):
    case.write(**GZIP)
    case.put_chunk(_chunk_of(STEP), mask=1)


@fault(REFUSED, key="x", slow=True)
def unfiltered_chunk_shorter_than_declared(case):
    case.write(**GZIP)
    case.put_chunk(_chunk_of(STEP)[:-9], mask=1)


@fault(REFUSED, key="x")
def gzip_chunk_shorter_than_declared(case):
    case.write(**GZIP)
    case.put_chunk(zlib.compress(_chunk_of(STEP)[:28]))


@fault(REFUSED, key="x", slow=True)
def gzip_chunk_that_was_cut_off(case):
    case.write(**GZIP)
    case.put_chunk(zlib.compress(_chunk_of(STEP))[:-6])


@fault(REFUSED, key="x")
def gzip_chunk_that_inflates_beyond_its_size(case):
    case.write(**GZIP)
    case.put_chunk(zlib.compress(_chunk_of(STEP + 1)))


@fault(REFUSED, key="x")
def gzip_chunk_that_inflates_to_32_mebibytes(case):
    case.write(**GZIP)
    case.put_chunk(zlib.compress(bytes(32 << 20), 1))


@fault(REFUSED, key="x")
def checksummed_chunk_that_inflates_beyond_its_size(case):
    case.write(**BOTH)
    packed = zlib.compress(_chunk_of(STEP + 1))
    case.put_chunk(packed + fletcher32(packed).to_bytes(4, "little"))


@fault(RIGHT)
def chunk_that_was_never_written(case):
    case.truth["x"][BAD_ROW : BAD_ROW + STEP] = 7  # the fill value
    case.write(inside=_with_a_hole)


def _with_a_hole(file):
    x = file.create_dataset("x", (ROWS, WIDTH), "i4", fillvalue=7, **BOTH)
    for chunk in range(ROWS // STEP):
        if chunk != BAD:
            rows = slice(chunk * STEP, chunk * STEP + STEP)
            x[rows] = values_of()[rows]


# Claims ------------------------------------------------------------------------------------------------------------


@fault(REFUSED, key="x")
def pebibytes_of_which_nothing_is_stored(case):
    _declare(case, (MANY, WIDTH), (STEP, WIDTH))


@fault(REFUSED, key="x", slow=True)
def pebibytes_in_one_piece_of_which_nothing_is_stored(case):
    _declare(case, (MANY, WIDTH), None)


@fault(REFUSED, key="x")
def rows_of_terabytes_of_which_nothing_is_stored(case):
    _declare(case, (ROWS, MANY // 4), (1, WIDTH))


@fault(REFUSED, key="x")
def chunk_of_more_than_a_gibibyte(case):
    _declare(case, (ROWS, WIDTH), (ROWS, (1 << 30) // 4 // ROWS + 1))


def _declare(case, shape, chunks):
    def inside(file):
        maxshape = chunks and (None, None)
        file.create_dataset("x", shape, "i4", chunks=chunks, maxshape=maxshape, compression=chunks and "gzip")
        del file["y"]
        # The same number, so that nothing else is wrong.
        file.create_dataset("y", shape[:1], "u1", chunks=chunks and (1 << 20,) if shape[0] > ROWS else None)

    case.write()
    with h5py.File(case.path, "r+") as file:
        del file["x"]
        inside(file)


@fault(REFUSED, key="x")
def filter_that_nobody_has(case):
    case.write(inside=_with_an_unknown_filter)


def _with_an_unknown_filter(file):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((STEP, WIDTH))
    plist.set_filter(UNKNOWN, h5py.h5z.FLAG_OPTIONAL, (1,))
    x = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((ROWS, WIDTH)), plist)
    for row in range(0, ROWS, STEP):
        x.write_direct_chunk((row, 0), zlib.compress(_chunk_of(STEP)))


@fault(REFUSED, key="x")
def target_shorter_than_the_input(case):
    case.write(y=np.arange(ROWS - 1))


@fault(REFUSED, key="x", slow=True)
def target_longer_than_the_input(case):
    case.write(y=np.arange(ROWS + 1), **GZIP)


@fault(REFUSED)
def no_rows(case):
    case.write(x=np.zeros((0, WIDTH)), y=np.zeros(0))


# Kinds -------------------------------------------------------------------------------------------------------------


def kind(name, expected, x, y=None, *, slow=False, **more):
    """Registers an input, or a target, of some kind."""

    def write(case):
        if callable(x):
            case.write(inside=x, y=y)
        else:
            case.write(x, y=y, **more)

    write.__name__ = name
    fault(expected, key="x" if expected == REFUSED else None, slow=slow)(write)


def made(*args, **options):
    """What makes ``x`` in an open file."""
    return lambda file: file.create_dataset("x", *args, **options)


def _time_of_hdf5s_own(file):
    space = h5py.h5s.create_simple((ROWS, WIDTH))
    h5py.h5d.create(file.id, b"x", h5py.h5t.UNIX_D32LE, space)


def _with_references(file):
    x = file.create_dataset("x", (ROWS,), dtype=h5py.ref_dtype)
    x[0] = file.ref


TABLE = np.dtype([("a", "i4"), ("b", "f4", 3)])
TIMES = np.arange(ROWS).astype("M8[s]")
ROUGH = np.where(values_of() == 3, np.nan, np.where(values_of() == 4, -np.inf, values_of() * -0.0)).astype("f4")

kind("an_array_without_a_shape", REFUSED, made(data=h5py.Empty("i4")))
kind("a_scalar", REFUSED, made(data=3))
kind("references", REFUSED, _with_references)
kind("opaque_times", REFUSED, made(data=TIMES.astype(h5py.opaque_dtype(TIMES.dtype))))
kind("opaque_bytes", REFUSED, made(data=np.zeros(ROWS, "V5")), slow=True)
kind("times_of_HDF5s_own", REFUSED, _time_of_hdf5s_own)
kind("long_doubles", REFUSED, made(data=values_of().astype(np.longdouble)), slow=True)
kind("a_whole_table", REFUSED, made(data=np.zeros(ROWS, TABLE)))
kind("a_named_datatype", REFUSED, lambda file: file.__setitem__("x", np.dtype("i4")))
kind("big_endian_integers", RIGHT, values_of().astype(">i4"), **GZIP)
kind("big_endian_floats", RIGHT, values_of().astype(">f8"), slow=True)
kind("half_floats", RIGHT, values_of().astype("f2"), **GZIP)
kind("bools", RIGHT, values_of() > 4, **GZIP)
kind("enums", RIGHT, values_of().clip(0, 1).astype(h5py.enum_dtype({"NO": 0, "YES": 1}, "i1")), **CHUNKED, slow=True)
kind("integers_of_16_bits_without_a_sign", RIGHT, values_of().astype("u2"), slow=True)
kind("integers_of_64_bits_without_a_sign", RIGHT, values_of().astype("u8") << np.uint64(60), **GZIP)
kind("complex_numbers", RIGHT, values_of().astype("c8"), slow=True)
kind("inputs_that_are_not_finite", RIGHT, ROUGH, **GZIP)
kind("targets_that_are_no_number", RIGHT, values_of(), y=np.where(np.arange(ROWS) % 5, 1.0, np.nan), slow=True)
kind("rows_of_no_numbers", RIGHT, np.zeros((ROWS, 0), "f4"))
kind("rows_of_one_number", RIGHT, np.arange(ROWS, dtype="i4"), chunks=(STEP,), compression="gzip", slow=True)
kind("chunks_that_hang_over_the_edge", RIGHT, values_of(), chunks=(5, 60), compression="gzip", fletcher32=True)
kind("rows_in_the_newer_format", RIGHT, values_of(), libver="latest", **BOTH)
