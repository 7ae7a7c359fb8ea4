"""Files that cannot be opened say why, with the file's name and what to do."""

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from factories import Stored

from lightning_h5.errors import H5FileError
from lightning_h5.hdf5 import find_array, layout_of, open_h5


def test_a_file_that_is_not_hdf5_says_how_it_begins(tmp_path):
    path = str(tmp_path / "table.h5")
    with open(path, "w") as file:
        file.write("a,b,c\n1,2,3\n")
    with pytest.raises(H5FileError) as error:
        open_h5(path)
    assert f"{path!r} is not an HDF5 file: it has 12 bytes and begins with b'a,b,c\\n1,'" in str(error.value)


def test_an_empty_file_is_not_hdf5(tmp_path):
    (tmp_path / "empty.h5").touch()
    with pytest.raises(H5FileError, match=r"empty\.h5' is not an HDF5 file: it has 0 bytes"):
        open_h5(str(tmp_path / "empty.h5"))


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_truncated_file_says_so(make_h5, libver):
    path = make_h5(x=np.arange(1000), libver=libver)
    os.truncate(path, 3000)
    with pytest.raises(H5FileError, match=rf"'{path}' is truncated: it has 3,000 bytes.*again"):
        open_h5(path)


def test_a_directory_a_missing_file_and_a_forbidden_one_are_named(tmp_path):
    with pytest.raises(H5FileError, match="is not a regular file"):
        open_h5(str(tmp_path))
    with pytest.raises(H5FileError, match=r"gone\.h5' cannot be opened: No such file"):
        open_h5(str(tmp_path / "gone.h5"))


def test_a_file_that_is_locked_by_its_writer_names_the_locking_variable(make_h5, monkeypatch):
    path = make_h5(x=np.arange(3))
    writer = (
        "import sys, h5py\nfile = h5py.File(sys.argv[1], 'a', locking=True)\n"
        "print('open', flush=True)\nsys.stdin.read()\nfile.close()"
    )
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    with subprocess.Popen(
        [sys.executable, "-c", writer, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"open\n"
        with pytest.raises(H5FileError, match=r"cannot be locked.*HDF5_USE_FILE_LOCKING is None"):
            open_h5(path)
        process.stdin.close()
    with open_h5(path) as file:
        assert file["x"].shape == (3,)


def unknown_filter(path, number=500, options=(5, 1)):
    """An array that names a filter nobody has; being optional, it is skipped when writing."""
    with h5py.File(path, "a") as file:
        dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        dcpl.set_chunk((4,))
        dcpl.set_filter(number, h5py.h5z.FLAG_OPTIONAL, options)
        array = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((8,)), dcpl)
        h5py.Dataset(array)[:] = np.arange(8)


def look(path):
    with open_h5(path) as file:
        return layout_of(find_array(file, "x"), path, "x")


@pytest.mark.skipif(h5py.h5z.filter_avail(500), reason="this installation has the filter")
def test_a_missing_filter_names_its_number_and_the_cure(make_h5, monkeypatch):
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)  # as if it were not installed
    path = make_h5(other=np.arange(3))
    unknown_filter(path)
    with pytest.raises(H5FileError) as error:
        look(path)
    for part in (f"'x' in {path!r}", "500", "pip install 'lightning-h5[filters]'", "HDF5_PLUGIN_PATH"):
        assert part in str(error.value)


def test_a_missing_filter_is_named_as_the_file_names_it(make_h5, monkeypatch):
    path = make_h5(x=Stored(np.arange(8), "chunked", (4,), {"compression": "lzf"}))
    real = h5py.h5z.filter_avail
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: number != h5py.h5z.FILTER_LZF and real(number))
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    with pytest.raises(H5FileError, match=r"compressed with lzf \(number 32000\)"):
        look(path)


def test_the_plugin_package_is_loaded_where_it_brings_the_filter(make_h5, monkeypatch, tmp_path):
    """A stand-in for hdf5plugin, which registers its filters when it is imported."""
    (tmp_path / "hdf5plugin.py").write_text("import h5py\nh5py.h5z.filter_avail = lambda number: True\n")
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: number != h5py.h5z.FILTER_LZF)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hdf5plugin", raising=False)
    path = make_h5(x=Stored(np.arange(8), "chunked", (4,), {"compression": "lzf"}))
    assert [f.id for f in look(path).filters] == [h5py.h5z.FILTER_LZF]
    monkeypatch.delitem(sys.modules, "hdf5plugin")


def test_filters_are_listed_in_the_order_of_writing(make_h5):
    options = {"compression": "gzip", "compression_opts": 7, "shuffle": True, "fletcher32": True}
    filters = look(make_h5(x=Stored(np.arange(8, dtype="i4"), "chunked", (4,), options))).filters
    assert [f.name for f in filters] == ["shuffle", "deflate", "fletcher32"]
    assert filters[1].options == (7,)
