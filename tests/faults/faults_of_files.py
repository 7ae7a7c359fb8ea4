"""Faults of whole files, of the way to them, and of the tables in them."""

import errno
import os
import signal
import time

import h5py
import numpy as np
from matrix_case import BOTH, CHUNKED, GZIP, REFUSED, RIGHT, ROWS, fault, values_of

from lightning_h5.readers import raw_io

NOBODY = 65534


@fault(REFUSED, cause="truncated")
def truncated_by_one_byte(case):
    os.truncate(case.write(**GZIP), os.path.getsize(case.path) - 1)


@fault(REFUSED, cause="truncated", slow=True)
def truncated_by_half(case):
    os.truncate(case.write(), os.path.getsize(case.path) // 2)


@fault(RIGHT)
def trailing_junk(case):
    with open(case.write(**GZIP), "ab") as file:
        file.write(b"junk" * 999)


@fault(REFUSED, cause="does not exist")
def missing_file(case):
    os.rename(case.write(), case.at("other.h5"))


@fault(REFUSED, cause="not an HDF5 file")
def not_hdf5(case):
    with open(case.path, "w") as file:
        file.write("no HDF5 here " * 99)


@fault(REFUSED, cause="0 bytes")
def empty_file(case):
    os.close(os.open(case.path, os.O_CREAT | os.O_WRONLY))


@fault(REFUSED, cause="not a regular file")
def a_device_that_is_empty(case):
    case.paths, case.blamed = [os.devnull], os.devnull


@fault(REFUSED, cause="not a regular file", slow=True)
def a_device_without_end(case):
    os.symlink("/dev/zero", case.path)


@fault(REFUSED, cause="directory")
def a_directory_without_files(case):
    os.mkdir(case.path)


@fault(REFUSED, cause="not a regular file")
def fifo(case):
    os.mkfifo(case.path)


@fault(REFUSED, cause="symbolic links")
def symlink_loop(case):
    os.symlink(case.path, case.path)


@fault(REFUSED, cause="link to|nothing.h5")
def dangling_symlink(case):
    os.symlink(case.at("nothing.h5"), case.path)


@fault(RIGHT, slow=True)
def symlink_to_the_file(case):
    os.symlink(case.write(name="real.h5", **GZIP), case.path)


@fault(REFUSED, cause="[Pp]ermission")
def permission_denied(case):
    os.chmod(case.write(), 0)
    if os.geteuid() == 0:  # root may read everything
        os.seteuid(NOBODY)
        case.undo.append(lambda: os.seteuid(0))


@fault(RIGHT, slow=True)
def read_only_file(case):
    os.chmod(case.write(**GZIP), 0o444)


@fault(REFUSED, cause="locked.*Close the program")
def locked_by_a_writer(case):
    _write_elsewhere(case, libver=None)


@fault(REFUSED, cause="h5clear.*(writ|damaged)")
def writer_was_killed_in_the_newer_format(case):
    _write_elsewhere(case, libver="latest")
    case.undo.pop()()


@fault(REFUSED, slow=True)
def writer_was_killed_before_it_wrote(case):
    _write_elsewhere(case, libver=None, mode="w")
    case.undo.pop()()


def _write_elsewhere(case, libver, mode="r+"):
    """Has another process open the file for writing, until it is killed."""
    case.write(libver=libver)
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        file = h5py.File(case.path, mode, libver=libver)
        file["more"] = np.arange(9)
        os.write(sender, b"!")
        time.sleep(999)
    os.read(receiver, 1)
    os.close(receiver)
    os.close(sender)

    def end():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    case.undo.append(end)


@fault(REFUSED, cause="checksum")
def superblock_with_a_wrong_checksum(case):
    case.write(libver="latest", **GZIP)
    case.edit(12)


@fault(REFUSED, cause="superblock version.*(damaged|copy|newer)")
def superblock_of_an_unknown_version(case):
    case.write(**GZIP)
    case.edit(8, b"\x09")


@fault(REFUSED)
def root_group_with_a_wrong_checksum(case):
    case.write(libver="latest", **GZIP)
    with h5py.File(case.path) as file:
        place = h5py.h5o.get_info(file.id).addr
    case.edit(place + 12)


@fault(REFUSED, slow=True)
def root_group_whose_names_are_gone(case):
    case.write(**GZIP)
    case.edit(case.find(b"HEAP"), b"JUNK")


@fault(REFUSED, cause="checksum", key="x")
def header_with_a_wrong_checksum(case):
    _damage_header(case.write(libver="latest", **GZIP), case)


@fault(REFUSED, key="x", slow=True)
def header_of_an_unknown_version(case):
    _damage_header(case.write(**GZIP), case)


def _damage_header(path, case):
    with h5py.File(path) as file:
        place = h5py.h5o.get_info(file["x"].id).addr
    with open(path, "rb") as file:
        is_new = file.read()[place : place + 4] == b"OHDR"
    case.edit(place + (24 if is_new else 0))


@fault(REFUSED, cause="checksum", key="x")
def chunk_index_with_a_wrong_checksum(case):
    case.write(libver="latest", **GZIP)
    case.edit(case.find(b"FADB") + 20)


@fault(REFUSED, key="x", slow=True)
def chunk_index_that_is_none(case):
    case.write(**GZIP)
    case.edit(case.find(b"TREE\x01"), b"JUNK")


@fault(REFUSED, key="x")
def chunk_that_should_lie_behind_the_end_of_the_file(case):
    case.write(**GZIP)
    case.readdress(case.chunk().byte_offset, 1 << 40)


@fault(REFUSED, key="x", slow=True)
def unfiltered_chunk_that_should_lie_behind_the_end_of_the_file(case):
    case.write(**CHUNKED)
    case.readdress(case.chunk().byte_offset, os.path.getsize(case.path) - 8)


@fault(REFUSED, cause="same|overlap|lies on|both", key="x")
def two_chunks_at_the_same_place(case):
    case.write(**BOTH)
    case.readdress(case.chunk().byte_offset, case.chunk(2).byte_offset)


@fault(REFUSED, cause="same|overlap|lies on|both", key="x")
def two_unfiltered_chunks_at_the_same_place(case):
    case.write(**CHUNKED)
    case.readdress(case.chunk().byte_offset, case.chunk(2).byte_offset)


@fault(REFUSED, key="x")
def rows_that_should_lie_behind_the_end_of_the_file(case):
    case.write()
    place, n_bytes = _place(case, "x")
    case.readdress(place, 1 << 40, n_bytes)


@fault(REFUSED, key="y")
def target_at_the_place_of_the_input(case):
    case.write()
    place, n_bytes = _place(case, "y")
    case.readdress(place, _place(case, "x")[0] + 8, n_bytes)


def _place(case, key):
    """Where a contiguous array begins, and its bytes."""
    with h5py.File(case.path) as file:
        return file[key].id.get_offset(), file[key].nbytes


def failing(name, owner, attribute, write, *, slow=False):
    """Registers reads that fail on a disk that is ill; rows in memory are right whatever becomes of it."""

    def from_the_beginning(case):
        write(case)
        case.put_in_place(owner, attribute, _fail)

    def after_setup(case):
        write(case)
        yield
        case.put_in_place(owner, attribute, _fail)

    from_the_beginning.__name__, after_setup.__name__ = f"{name}_from_the_beginning", f"{name}_after_setup"
    # If two threads read, the first failure is reported.
    cause = "'[xy]'.*Input/output error.*disk"
    fault(REFUSED, cause=cause, slow=slow)(from_the_beginning)
    fault(REFUSED, cause=cause, slow=slow, cached=RIGHT)(after_setup)


def _fail(*args):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _virtual_in_the_same_file(file):
    layout = h5py.VirtualLayout((ROWS, 64), "i4")
    layout[:] = h5py.VirtualSource(file.create_dataset("real", data=values_of()))
    file.create_virtual_dataset("x", layout)


failing("a_disk_that_fails", raw_io, "read_pieces", lambda case: case.write(**CHUNKED))
failing("a_disk_that_fails_in_compressed_rows", raw_io, "read_pieces", lambda case: case.write(**GZIP), slow=True)
failing(
    "a_disk_that_fails_in_the_library",
    h5py.Dataset,
    "__getitem__",
    lambda case: case.write(inside=_virtual_in_the_same_file),
)


@fault(RIGHT)
def virtual_array_over_its_own_file(case):
    case.write(inside=_virtual_in_the_same_file)


@fault(RIGHT)
def user_block(case):
    with open(case.write(userblock=512, **GZIP), "r+b") as file:
        file.write(b"#!/bin/sh\n")


@fault(REFUSED)
def a_file_of_a_list_is_broken(case):
    _three_files(case)
    os.truncate(case.blamed, 999)


@fault(REFUSED, combined=RIGHT, on_bad_file="skip")
def a_file_of_a_list_is_broken_and_may_be_left_out(case):
    _three_files(case)
    os.truncate(case.blamed, 999)
    case.truth = {name: np.concatenate([values, values]) for name, values in case.truth.items()}


@fault(REFUSED, key="x")
def a_file_of_a_list_has_rows_of_another_shape(case):
    _three_files(case, values_of()[:, :40])


@fault(REFUSED, key="x", slow=True)
def a_file_of_a_list_has_rows_of_another_dtype(case):
    _three_files(case, values_of().astype("f4"))


@fault(REFUSED, key="x")
def a_file_of_a_list_lacks_an_array(case):
    _three_files(case)
    with h5py.File(case.blamed, "r+") as file:
        del file["x"]


@fault(REFUSED, key="y")
def a_file_of_a_list_has_a_target_too_short(case):
    _three_files(case)
    with h5py.File(case.blamed, "r+") as file:
        del file["y"]
        file["y"] = np.arange(ROWS - 1)


def _three_files(case, other=None):
    """The second one is to be blamed."""
    kept = dict(case.truth)
    case.paths = [case.write(name=f"{n}.h5", x=other if n == 1 and other is not None else kept["x"]) for n in range(3)]
    case.blamed, case.truth = case.paths[1], kept
