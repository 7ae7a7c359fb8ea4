"""The block table: which rows of a dataset lie together on disk."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from factories import Stored
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.datasets import H5LazyDataset
from lightning_h5.datasets.file_dataset import FileDataset
from lightning_h5.hdf5 import OpenOptions
from lightning_h5.options import StepRange
from lightning_h5.samples.row_table import RUN_BYTES
from lightning_h5.samples.segments import Segments, Steps
from lightning_h5.samples.windows import Windows


def sizes(dataset):
    table = dataset.blocks()
    assert table.n_rows == len(dataset)
    assert table.starts[0] == 0
    return np.diff(table.starts).tolist()


def chunked(n_rows, rows_per_chunk, width=2):
    return Stored(np.zeros((n_rows, width)), "chunked", (rows_per_chunk, 1))


@pytest.mark.usefixtures("nothing_held")
class TestNothingHeld:
    def test_a_block_is_a_chunk_and_the_last_may_be_smaller(self, make_h5):
        assert sizes(H5LazyDataset(make_h5(x=chunked(25, 10)), "x")) == [10, 10, 5]

    def test_the_coarsest_array_decides(self, make_h5):
        path = make_h5(x=chunked(25, 4), y=chunked(25, 10), z=np.zeros(25))
        assert sizes(H5LazyDataset(path, "x", "y")) == [10, 10, 5]
        assert sizes(H5LazyDataset(path, ["z", "x"])) == [4] * 6 + [1]

    def test_rows_without_chunks_are_cut_into_runs_of_a_megabyte(self, make_h5):
        path = make_h5(x=np.zeros((20, RUN_BYTES // 8 // 8), "f8"), y=np.zeros((20, RUN_BYTES // 8 // 8), "f8"))
        assert sizes(H5LazyDataset(path, "x")) == [8, 8, 4]
        assert sizes(H5LazyDataset(path, "x", "y")) == [4] * 5
        assert sizes(H5LazyDataset(make_h5(x=np.zeros((3, RUN_BYTES // 4), "f8")), "x")) == [1, 1, 1]

    def test_one_row_a_chunk_is_like_no_chunks(self, make_h5):
        assert sizes(H5LazyDataset(make_h5(x=chunked(25, 1)), "x")) == [25]

    def test_blocks_never_cross_files(self, make_h5):
        paths = [make_h5(x=chunked(n, 10)) for n in (25, 10, 3)]
        assert sizes(H5LazyDataset(paths, "x")) == [10, 10, 5, 10, 3]

    def test_files_may_have_chunks_of_different_sizes(self, make_h5):
        paths = [make_h5(x=chunked(12, 5)), make_h5(x=chunked(12, 8))]
        assert sizes(H5LazyDataset(paths, "x")) == [5, 5, 2, 8, 4]

    def test_a_subset_keeps_what_is_left_of_each_block(self, make_h5):
        path = make_h5(x=chunked(30, 10))
        assert sizes(H5LazyDataset(path, "x", indices=[1, 2, 9, 10, 25, 29])) == [3, 1, 2]
        assert sizes(H5LazyDataset(path, "x", indices=[])) == []
        assert sizes(H5LazyDataset(path, "x", indices=[25, 1, 29])) == [1, 1, 1]

    @given(data=st.data())
    def test_rows_of_a_block_share_file_and_chunk_and_neighbours_do_not(self, make_h5, data):
        n_rows = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
        rows_per_chunk = data.draw(st.integers(2, 7))
        path = [make_h5(x=chunked(n, rows_per_chunk)) for n in n_rows]
        rows = data.draw(st.none() | st.lists(st.integers(0, sum(n_rows) - 1), max_size=30)) if sum(n_rows) else None
        rows = None if rows is None else sorted(rows)
        starts = H5LazyDataset(path, "x", indices=rows).blocks().starts.tolist()
        place = [(file, row // rows_per_chunk) for file, n in enumerate(n_rows) for row in range(n)]
        place = place if rows is None else [place[row] for row in rows]
        blocks = [place[start:stop] for start, stop in pairwise(starts)]
        assert [where for block in blocks for where in block] == place
        assert all(len(set(block)) == 1 for block in blocks)
        assert all(a[-1] != b[0] for a, b in pairwise(blocks))


@pytest.mark.usefixtures("nothing_held")
@pytest.mark.parametrize("storage", ["chunked", "contiguous"])
@pytest.mark.parametrize("indices", [None, [7, 0, 4, 4]])
def test_samples_are_found_through_segments(make_h5, storage, indices):
    """Rows are the case of one segment a file; the base of datasets knows samples by (segment, start) alone."""
    parts = np.arange(25.0), np.arange(100.0, 112)
    paths = [make_h5(x=Stored(part[:, None], storage, (10, 1) if storage == "chunked" else None)) for part in parts]
    plain = H5LazyDataset(paths, "x")
    segments = Segments((Steps(np.array([9, 0, 24]), np.array([3, 2, 3])),), (0,))
    windows = Windows(segments, (StepRange(0, 1, is_single=True),))
    table = replace(plain.table, indexer=windows, has_steps=(True,), step_places=(0,))
    found = FileDataset(
        table, plain.fields, batch_transform=None, indices=indices, options=OpenOptions(), cache_bytes=1 << 20
    )
    values = np.concatenate(parts)
    rows = np.array([9, 10, 11, 0, 1, 24, 25, 26])[slice(None) if indices is None else indices]
    assert found.read_batch(range(len(found))).flatten().tolist() == values[rows].tolist()
    assert found.places_of(np.arange(len(found))) == [
        (paths[row >= 25], row if row < 25 else row - 25) for row in rows.tolist()
    ]
    assert found.blocks().n_rows == len(rows)
    assert found.identity() != plain.identity()


def test_arrays_held_in_memory_do_not_decide(make_h5, monkeypatch):
    monkeypatch.setattr("lightning_h5.samples.row_table.HELD_BYTES", 25 * 8)
    path = make_h5(x=chunked(25, 10), label=Stored(np.zeros(25), "chunked", (25,)), wide=chunked(25, 5))
    dataset = H5LazyDataset(path, ["x", "label"])
    assert dataset.table.held == [False, True]
    assert sizes(dataset) == [10, 10, 5]


def test_what_is_held_counts_over_all_files(make_h5, monkeypatch):
    monkeypatch.setattr("lightning_h5.samples.row_table.HELD_BYTES", 100 * 8)
    parts = [make_h5(x=np.zeros(n)) for n in (60, 41)]
    assert H5LazyDataset(parts, "x").table.held == [False]
    assert H5LazyDataset(parts[:1], "x").table.held == [True]


def test_the_identity_of_a_dataset_follows_the_files_and_their_order(make_h5):
    a, b = make_h5(x=np.arange(5)), make_h5(x=np.arange(5, 10))
    found = [H5LazyDataset(paths, "x").table.identity for paths in (a, b, [a, b], [b, a], [a, b])]
    assert found[2] == found[4]
    assert len(set(found)) == 4
