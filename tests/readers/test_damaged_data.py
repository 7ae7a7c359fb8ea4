"""Bytes that are not there, or not right, raise an error that names file, rows and array. Never zeros."""

import os

import h5py
import numpy as np
import pytest
from factories import Stored, edit

from lightning_h5.errors import H5CorruptError, H5FileError
from lightning_h5.hdf5 import OpenOptions, find_array, layout_of, open_h5
from lightning_h5.readers import ContiguousReader, H5pyReader, MappedReader, open_reader


def look(path, key="x"):
    with open_h5(path) as file:
        return layout_of(find_array(file, key), path, key)


@pytest.fixture
def truncated(make_h5):
    """A reader with its file open, whose file then lost all bytes from the middle of row 5 on."""
    values = np.arange(1, 41, dtype="i8").reshape(10, 4)
    path = make_h5(x=values)
    layout = look(path)
    reader = open_reader(layout, OpenOptions())
    assert type(reader) is ContiguousReader
    assert np.array_equal(reader.read(np.arange(10)), values)
    os.truncate(path, layout.offset + 5 * 32 + 8)
    return reader, values, path


@pytest.mark.parametrize("rows", [[5], [9], [0, 1, 2, 3, 4, 5], [7, 2], [4, 5, 6]], ids=str)
def test_a_file_truncated_while_open_raises_and_names_file_row_and_array(truncated, rows):
    reader, _, path = truncated
    first = next(row for row in rows if row >= 5)
    with pytest.raises(H5CorruptError) as error:
        reader.read(np.array(rows))
    for part in (path, f"row {first} of 'x'", "truncated"):
        assert part in str(error.value)


def test_rows_before_the_cut_are_still_read(truncated):
    reader, values, _ = truncated
    assert np.array_equal(reader.read(np.array([4, 0, 2])), values[[4, 0, 2]])


def test_a_held_array_that_cannot_be_read_whole_gives_the_rows_that_can_be(truncated):
    reader, values, path = truncated
    held = open_reader(reader.layout, OpenOptions(), held_bytes=1 << 20)
    for _ in range(2):
        assert np.array_equal(held.read(np.array([4, 0])), values[[4, 0]])
        with pytest.raises(H5CorruptError, match=path):
            held.read(np.array([0, 5]))


def test_a_map_of_a_file_that_became_too_short_is_refused(truncated):
    reader, _, path = truncated
    with pytest.raises(H5CorruptError, match=rf"{path}.*'x' needs"):
        MappedReader(reader.layout).read(np.array([0]))


def test_an_error_of_the_disk_names_file_and_array(make_h5, monkeypatch, single_reads):
    path = make_h5(x=np.arange(8))
    reader = open_reader(look(path), OpenOptions())

    def broken(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(H5FileError, match=rf"'x' from '{path}'.*Input/output error"):
        reader.read(np.array([0]))


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"fletcher32": True}], ids=["gzip", "checksum"])
def test_a_damaged_chunk_raises_and_the_others_are_still_read(make_h5, options):
    values = np.random.default_rng(0).integers(0, 9, (20, 50))
    path = make_h5(x=Stored(values, "chunked", (5, 50), options))
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(2)
    edit(path, chunk.byte_offset + chunk.size // 2)
    reader = open_reader(look(path), OpenOptions())
    assert type(reader) is H5pyReader
    with pytest.raises(H5CorruptError, match=rf"rows 11 to 12 of 'x' in '{path}'"):
        reader.read(np.array([12, 0, 11]))
    assert np.array_equal(reader.read(np.array([19, 0])), values[[19, 0]])


def test_a_file_that_vanished_before_its_first_read_is_named(make_h5):
    path = make_h5(x=np.arange(8), y=Stored(np.arange(8), "chunked", (2,)))
    readers = [open_reader(look(path, key), OpenOptions()) for key in "xy"]
    os.unlink(path)
    for reader in readers:
        with pytest.raises(H5FileError, match=path):
            reader.read(np.array([0]))


def test_a_read_that_is_interrupted_at_its_end_is_not_taken_for_a_truncated_file(make_h5, monkeypatch, single_reads):
    path = make_h5(x=np.arange(100))
    reader = open_reader(look(path), OpenOptions())
    real, calls = os.preadv, []

    def short_at_first(fd, pieces, at, *flags):
        if flags:  # a look into the page cache
            return real(fd, pieces, at, *flags)
        calls.append(at)
        return real(fd, [pieces[0][:3]] if len(calls) == 1 else pieces, at)

    monkeypatch.setattr(os, "preadv", short_at_first)
    assert reader.read(np.arange(100)).tolist() == list(range(100))
    assert len(calls) == 1  # the rest was read by another call
