"""Damage that no checksum shows, and what vouches for values all the same: digests, a level of integrity, a user."""

import os

import h5py
from matrix_case import BOTH, CHUNKED, GZIP, REFUSED, RIGHT, ROWS, STEP, WIDTH, fault, values_of

from lightning_h5 import check_files

CHECKED = {"chunks": (STEP, WIDTH), "fletcher32": True}


def vouched(name, expected, storage, damage, *, key="x", cause="digest", middle=False, slow=False, cached=None):
    """Registers a file whose digests were written while it was whole."""

    def before(case):
        case.write(**storage)
        check_files(case.path, write_digests=True)
        damage(case)

    def during(case):
        case.write(**storage)
        check_files(case.path, write_digests=True)
        yield
        yield
        damage(case)

    steps = during if middle else before
    steps.__name__ = name
    is_refused = expected == REFUSED
    register = fault(
        expected, key=key if is_refused else None, cause=cause if is_refused else "", cached=cached, slow=slow,
        verify="digest",
    )  # fmt: skip
    register(steps)


def nothing(case):
    """Leaves the file as it is."""


def flip_in_rows(case):
    with h5py.File(case.path) as file:
        place = file["x"].id.get_offset()
    case.edit(place + 20 * WIDTH * 4 + 9)


def flip_in_labels(case):
    with h5py.File(case.path) as file:
        place = file["y"].id.get_offset()
    case.edit(place + 8 * 20)


def flip_in_a_chunk(case):
    case.edit(case.chunk().byte_offset + 9)


def zeros_in_a_chunk(case):
    found = case.chunk()
    case.edit(found.byte_offset, bytes(found.size))


def other_chunk(case):
    case.readdress(case.chunk().byte_offset, case.chunk(2).byte_offset)


def other_rows(case):
    kept = dict(case.truth)
    case.write(values_of(seed=1), **GZIP)
    case.truth = kept


def flip_back_in_time(case):
    """Where a file's time is set back as well, nothing tells that it was changed but its values."""
    found = os.stat(case.path)
    flip_in_rows(case)
    os.utime(case.path, ns=(found.st_atime_ns, found.st_mtime_ns))


def no_digests(case):
    os.unlink(f"{case.path}.digests.json")


def broken_digests(case):
    os.truncate(f"{case.path}.digests.json", 99)


def another_array(case):
    """The rows once more, under a name that no digest is of."""
    with h5py.File(case.path, "r+") as file:
        file["z"] = file["x"][:]
    case.x_key = "z"


vouched("contiguous_rows_as_their_digests_say", RIGHT, {}, nothing)
vouched("gzip_rows_as_their_digests_say", RIGHT, GZIP, nothing, slow=True)
vouched("scaled_rows_as_their_digests_say", RIGHT, CHUNKED | {"scaleoffset": 0}, nothing, slow=True)
vouched("bit_flip_in_contiguous_rows", REFUSED, {}, flip_in_rows)
vouched("bit_flip_in_the_labels", REFUSED, {}, flip_in_labels, key="y", slow=True)
vouched("bit_flip_in_an_unfiltered_chunk", REFUSED, CHUNKED, flip_in_a_chunk)
vouched("bit_flip_in_an_lzf_chunk", REFUSED, CHUNKED | {"compression": "lzf"}, flip_in_a_chunk, slow=True)
vouched("bit_flip_in_a_scaled_chunk", REFUSED, CHUNKED | {"scaleoffset": 0}, flip_in_a_chunk, slow=True)
vouched("zeros_in_a_fletcher32_chunk", REFUSED, CHECKED, zeros_in_a_chunk)
vouched("zeros_in_an_unfiltered_chunk", REFUSED, CHUNKED, zeros_in_a_chunk, slow=True)
vouched("two_chunks_at_the_same_place_with_digests", REFUSED, BOTH, other_chunk, cause="")
vouched("rows_that_were_written_anew", REFUSED, GZIP, other_rows, slow=True)
vouched(
    "bit_flip_in_the_middle_that_hides_itself",
    REFUSED,
    {},
    flip_back_in_time,
    middle=True,
    cached=RIGHT,
    key=None,
    cause="was written to",  # and had its time reset, unless a worker checks in between
)
vouched("digests_that_are_not_there", REFUSED, GZIP, no_digests, key=None)
vouched("digests_that_cannot_be_read", REFUSED, GZIP, broken_digests, key=None, slow=True)
vouched("digests_that_say_nothing_of_an_array", REFUSED, {}, another_array, key="z")


def lacks(name, level, **storage):
    """Registers a file that offers less integrity than is asked for."""

    def write(case):
        case.write(**storage)

    write.__name__ = name
    fault(REFUSED, key="x", cause=f"min_integrity={level}", files={"min_integrity": level})(write)


lacks("rows_without_any_checksum_where_one_is_asked", 1)
lacks("tables_without_checksums_where_they_are_asked", 2, **BOTH)
lacks("a_checksum_that_zeros_pass_where_more_is_asked", 3, **CHECKED, libver="latest")
lacks("no_digests_where_they_are_asked", 4, **BOTH, libver="latest")


@fault(RIGHT, files={"min_integrity": 3})
def all_checksums_where_they_are_asked(case):
    case.write(**BOTH, libver="latest")
    with h5py.File(case.path, "r+", libver="latest") as file:
        del file["y"]
        file.create_dataset("y", data=case.truth["y"], chunks=(ROWS,), compression="gzip", fletcher32=True)
