"""Every reader is held to the claims of ``ReaderConformance``; arrays that can be read fast are."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import numpy as np
import pytest
from factories import Stored, random_values
from pools import OPTIONS, look
from reader_conformance import NUMBERS, ReaderConformance, all_readers

import lightning_h5.readers
from lightning_h5.readers import ContiguousReader, MappedReader, open_reader
from lightning_h5.readers.base import ValueReader
from lightning_h5.readers.contiguous import RunsReader
from lightning_h5.readers.decoded import EncodedReader
from lightning_h5.readers.stacked import StackReader


class TestReaders(ReaderConformance):
    """All readers of the package, those of one file's array and those of blocks."""


def test_every_class_that_reads_rows_is_held_to_these_claims(make_h5):
    found = set()
    for module in pkgutil.walk_packages(lightning_h5.readers.__path__, "lightning_h5.readers."):
        for _, one in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if one.__module__ == module.name and {"read", "close", "__len__"} <= set(dir(one)):
                found.add(one)
    path = make_h5(x=np.arange(40.0), y=Stored(np.arange(40.0), "chunked", (7,), {"compression": "gzip"}))
    tried = {type(reader) for key in "xy" for reader in all_readers(look(path, key)).values()}
    # Not of arrays; of rows that h5py does not decode, of several arrays (tests of datasets); of parts of rows (views).
    others = {ValueReader, EncodedReader, StackReader, RunsReader}
    assert not {one for one in found - tried - others if not one.__subclasses__()}  # the rest are shared bases


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("userblock", [0, 1024])
def test_written_contiguous_numbers_take_the_fast_path(make_h5, dtype, userblock):
    values = random_values(dtype, (6, 3))
    path = make_h5(x=Stored(values, dtype=dtype), userblock=userblock)
    layout = look(path, "x")
    assert layout.plain_reason is None
    assert Path(path).read_bytes()[layout.offset :][: values.nbytes] == values.tobytes()
    assert type(open_reader(layout, OPTIONS)) is ContiguousReader
    assert type(open_reader(layout, OPTIONS, mmap=True)) is MappedReader


def test_text_that_is_not_utf_8_raises_and_names_file_and_array(make_h5):
    path = make_h5(x=np.array([b"ok", b"\xff\xfe"]))
    reader = open_reader(look(path, "x"), OPTIONS)
    with pytest.raises(OSError, match=r"'x' in .*data1\.h5.* UTF-8"):
        reader.read(np.array([1]))


def test_a_map_cannot_be_written_to(make_h5):
    reader = open_reader(look(make_h5(x=np.arange(6.0))), OPTIONS, mmap=True)
    with pytest.raises(ValueError, match="read-only"):
        reader._map()[:] = 1
