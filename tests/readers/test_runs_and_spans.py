"""The two pure functions that decide which rows are read in one piece."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.readers.plain import spans
from lightning_h5.readers.runs import runs

ROWS = st.lists(st.integers(0, 30), max_size=40).map(lambda rows: np.array(rows, dtype=np.int64))
SORTED = st.lists(st.integers(0, 60), min_size=1, max_size=60).map(lambda rows: np.array(sorted(rows), dtype=np.int64))


@given(ROWS)
def test_runs_tile_the_list_and_are_as_long_as_they_can_be(rows):
    starts, stops = runs(rows)
    assert np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)] or [[]]).tolist() == list(
        range(len(rows))
    )
    for start, stop in zip(starts, stops, strict=True):
        assert rows[start:stop].tolist() == list(range(rows[start], rows[start] + stop - start))
        assert start == 0 or rows[start] != rows[start - 1] + 1


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
