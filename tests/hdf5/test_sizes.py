"""Sizes that a file claims: what would exhaust memory is refused by name of file, array and opt-in."""

import h5py
import numpy as np
import pytest
from arguments import nested, nested_files

from lightning_h5 import CombinedHDF5DataModule, H5LazyDataset, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.readers.h5py_reader import H5pyReader

GIB = 1 << 30


def write(tmp_path, **how):
    path = str(tmp_path / "claims.h5")
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", **{"dtype": "u1", **how})
    return path


MODULES = {
    "lazy": lambda path, **more: LazyH5DataModule(path, **nested(x_key="x", **more)),
    "cached": lambda path, **more: RankCachedH5DataModule(path, **nested(x_key="x", **more)),
    "combined": lambda path, **more: CombinedHDF5DataModule(path, **nested(fields=["x"], **more)),
}


@pytest.mark.parametrize("kind", MODULES)
def test_arrays_that_are_next_to_empty_are_refused_by_all_data_modules(tmp_path, kind):
    path = write(tmp_path, shape=(1 << 40, 4), chunks=(1 << 24, 4))
    with pytest.raises(H5ValueError) as error:
        MODULES[kind](path).setup("fit")
    for part in (path, "'x'", "4.00 TiB", "trusted=True"):
        assert part in str(error.value)


@pytest.mark.parametrize("kind", MODULES)
def test_chunks_above_a_gibibyte_are_refused_by_all_data_modules(tmp_path, kind):
    path = write(tmp_path, shape=(GIB + 1, 1), chunks=(GIB + 1, 1))
    with pytest.raises(H5ValueError) as error:
        MODULES[kind](path).setup("fit")
    for part in (path, "'x'", "1.00 GiB", "repack", "trusted=True"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("how", "asked"),
    [
        ({"shape": (4 * GIB,), "chunks": (1 << 20,)}, {}),  # no more than 4 GiB
        ({"shape": (4 * GIB + 1,), "chunks": (1 << 20,)}, {"trusted": True}),
        ({"shape": (GIB,), "chunks": (GIB,)}, {}),  # no more than a GiB
        ({"shape": (GIB + 1,), "chunks": (GIB + 1,)}, {"trusted": True}),
    ],
    ids=str,
)
def test_what_is_at_the_bound_or_allowed_passes(tmp_path, how, asked):
    path = write(tmp_path, **how)
    assert len(H5LazyDataset(path, "x", **nested_files(**asked))) == how["shape"][0]
    if not asked:
        return
    with pytest.raises(H5ValueError, match=next(iter(asked))):
        H5LazyDataset(path, "x")


def test_an_array_of_which_a_thousandth_is_stored_passes(tmp_path):
    path = write(tmp_path, shape=(4096, 1 << 20 | 1), chunks=(1, 1 << 20 | 1))
    with h5py.File(path, "a") as file:
        for row in range(4):
            file["x"][row] = 7
    with pytest.raises(H5ValueError, match="trusted"):
        H5LazyDataset(path, "x")
    with h5py.File(path, "a") as file:
        file["x"][4] = 7
    assert H5LazyDataset(path, "x").read_batch([4, 5])[:, 0].tolist() == [7, 0]


def test_virtual_arrays_claim_what_their_sources_store(tmp_path):
    path = write(tmp_path, data=np.arange(100, dtype="u1"))
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout(shape=(5 * GIB,), dtype="u1")
        layout[:100] = h5py.VirtualSource(".", "x", shape=(100,))
        file.create_virtual_dataset("v", layout)
    with pytest.raises(H5ValueError, match=r"'v'.*only 100 B are stored.*trusted"):
        H5LazyDataset(path, "v")
    assert H5LazyDataset(
        path,
        "v",
        files={"trusted": True},
    ).read_batch([99, 100]).tolist() == [99, 0]


def test_more_chunks_than_a_table_can_have_are_read_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_h5.hdf5.describe.MAX_CHUNKS", 10)
    path = write(tmp_path, data=np.arange(100, dtype="u1"), chunks=(5,))
    assert H5LazyDataset(path, "x").read_batch([0, 99]).tolist() == [0, 99]


def test_rows_of_more_chunks_than_the_file_has_bytes_are_refused(tmp_path):
    path = write(tmp_path, shape=(2, 1 << 9, 1 << 8), chunks=(1, 1, 1))
    with pytest.raises(H5ValueError, match=r"'x' in .* has rows of 131,072 chunks .*trusted=True"):
        H5LazyDataset(path, "x")
    assert len(H5LazyDataset(path, "x", files={"trusted": True})) == 2


def test_few_chunks_are_read_by_one_call_of_the_library(tmp_path, monkeypatch):
    """It takes 3 KiB for each chunk of a call: 6 GB for rows of two million that were never written."""
    monkeypatch.setattr("lightning_h5.hdf5.describe.MAX_UNWRITTEN", 1)
    monkeypatch.setattr("lightning_h5.readers.h5py_reader.PIECE_CHUNKS", 64)
    pieces, read = [], H5pyReader._piece
    monkeypatch.setattr(H5pyReader, "_piece", lambda *given: pieces.append(given[3] - given[2]) or read(*given))
    path = write(tmp_path, shape=(500, 2), chunks=(1, 1))  # more chunks than bytes
    assert H5LazyDataset(path, "x").read_batch(range(500)).shape == (500, 2)
    assert max(pieces) == 32
