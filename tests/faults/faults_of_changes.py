"""Files that change after they were looked at: before the first batch, or in the middle of an epoch."""

import os
import shutil

import h5py
import numpy as np
from matrix_case import BOTH, CHUNKED, GZIP, REFUSED, RIGHT, ROWS, STEP, WIDTH, fault, values_of

HALF = ROWS * WIDTH * 2  # bytes: half of x


def changes(name, change, *, slow=False, **storage):
    """Registers a change that happens before the first batch, and in the middle.

    Rows that are in memory already are right whatever becomes of their file.
    """

    def before(case):
        case.write(**storage)
        yield
        change(case)

    def during(case):
        case.write(**storage)
        yield
        yield
        change(case)

    before.__name__, during.__name__ = f"{name}_before_the_first_batch", f"{name}_in_the_middle"
    expected = change.__dict__.get("expected", REFUSED)
    for steps in (before, during):
        fault(expected, cause="H5DataChangedError" if expected == REFUSED else "", cached=RIGHT, slow=slow)(steps)


def truncate(case):
    os.truncate(case.path, HALF)


def empty(case):
    os.truncate(case.path, 0)


def edit_rows(case):
    with h5py.File(case.path, "r+") as file:
        file["x"][ROWS // 2 :] = -1


def overwrite(case):
    """As `cp` over the file does."""
    kept = dict(case.truth)
    shutil.copyfile(case.write(values_of(seed=1), name="new.h5"), case.path)
    case.truth = kept


def touch(case):
    os.utime(case.path)


def delete(case):
    os.unlink(case.path)


def move_away(case):
    os.rename(case.path, case.at("elsewhere.h5"))


def append(case):
    with open(case.path, "ab") as file:
        file.write(b"more")


def append_rows(case):
    with h5py.File(case.path, "r+") as file:
        file["x"].resize(ROWS + STEP, axis=0)
        file["x"][ROWS:] = 1


def other_rows(case):
    case.replace(**GZIP)


def other_rows_same_layout(case):
    case.replace()


def other_shape(case):
    case.replace(x=np.zeros((ROWS // 2, 3)))


def no_hdf5(case):
    with open(case.at("new"), "wb") as file:
        file.write(b"x" * 9999)
    os.replace(case.at("new"), case.path)


def same_copy(case):
    shutil.copy2(case.path, case.at("copy.h5"))
    os.replace(case.at("copy.h5"), case.path)


def fifo_instead(case):
    os.unlink(case.path)
    os.mkfifo(case.path)


def directory_instead(case):
    os.unlink(case.path)
    os.mkdir(case.path)


def device_instead(case):
    os.unlink(case.path)
    os.symlink("/dev/zero", case.path)


def loop_instead(case):
    os.unlink(case.path)
    os.symlink(case.path, case.path)


def make_unreadable(case):
    os.chmod(case.path, 0o200)


def hard_link(case):
    os.link(case.path, case.at("other-name.h5"))


hard_link.expected = RIGHT
make_unreadable.expected = RIGHT

changes("truncated_contiguous_file", truncate)
changes("truncated_gzip_file", truncate, **GZIP)
changes("truncated_chunked_file", truncate, slow=True, **CHUNKED)
changes("emptied_file", empty, slow=True, **BOTH)
changes("contiguous_rows_edited_in_place", edit_rows)
changes("gzip_rows_edited_in_place", edit_rows, slow=True, **GZIP)
changes("file_overwritten_by_another", overwrite, slow=True)
changes("file_touched", touch, **GZIP)
changes("file_deleted", delete, **GZIP)
changes("file_moved_away", move_away, slow=True)
changes("bytes_appended", append)
changes("rows_appended", append_rows, slow=True, maxshape=(None, WIDTH), **GZIP)
changes("file_replaced_by_one_of_other_rows", other_rows, slow=True, **GZIP)
changes("contiguous_file_replaced_by_one_of_other_rows", other_rows_same_layout)
changes("file_replaced_by_one_of_another_shape", other_shape, slow=True, **GZIP)
changes("file_replaced_by_one_that_is_no_HDF5", no_hdf5, slow=True, **GZIP)
changes("file_replaced_by_a_copy_of_itself", same_copy)
changes("contiguous_file_replaced_by_a_FIFO", fifo_instead)
changes("gzip_file_replaced_by_a_FIFO", fifo_instead, **GZIP)
changes("scaled_file_replaced_by_a_FIFO", fifo_instead, slow=True, chunks=(STEP, WIDTH), scaleoffset=0)
changes("file_replaced_by_a_directory", directory_instead, slow=True)
changes("file_replaced_by_a_device", device_instead, slow=True, **CHUNKED)
changes("file_replaced_by_a_symlink_loop", loop_instead, slow=True)
changes("file_made_unreadable", make_unreadable, slow=True)
changes("file_that_gets_a_second_name", hard_link, slow=True, **GZIP)
