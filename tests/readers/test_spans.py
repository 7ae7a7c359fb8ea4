"""The pure function that decides which rows the HDF5 library reads in one piece."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.readers.h5py_reader import spans

SORTED = st.lists(st.integers(0, 60), min_size=1, max_size=60).map(lambda rows: np.array(sorted(rows), dtype=np.int64))


@given(SORTED, st.integers(2, 20), st.integers(1, 20))
def test_spans_are_one_for_each_chunk_that_rows_are_wanted_of(rows, rows_per_chunk, most):
    pieces = list(spans(rows, rows_per_chunk, most))
    assert [at for start, stop in pieces for at in range(start, stop)] == list(range(len(rows)))
    chunks = [set((rows[start:stop] // rows_per_chunk).tolist()) for start, stop in pieces]
    assert all(len(chunk) == 1 for chunk in chunks)
    assert len(chunks) == len(set(rows // rows_per_chunk))


@given(SORTED, st.integers(1, 20))
def test_spans_without_shared_chunks_have_no_gap_and_no_more_than_the_most_rows(rows, most):
    pieces = list(spans(rows, 1, most))
    assert [at for start, stop in pieces for at in range(start, stop)] == list(range(len(rows)))
    for start, stop in pieces:
        piece = rows[start:stop]
        assert (np.diff(piece) <= 1).all()
        assert piece[-1] - piece[0] < most
    n_runs = 1 + np.count_nonzero(np.diff(rows) > 1)
    assert len(pieces) <= n_runs + (rows[-1] - rows[0]) // most
