"""Rows as runs inside of blocks: the same blocks and rows as one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_h5.readers.block_map import BlockMap, RowGrid


@st.composite
def _grids(draw: st.DrawFn) -> list[RowGrid]:
    """Arrays with one axis of rows or with two, whose last blocks may be cut off."""
    has_lines = draw(st.booleans())
    found = []
    for _ in range(draw(st.integers(1, 4))):
        lines, across = (draw(st.integers(1, 5)), draw(st.integers(1, 3))) if has_lines else (1, 1)
        size = draw(st.integers(1, 90))
        found.append(RowGrid(lines, size, across, draw(st.integers(1, 40)), size + draw(st.integers(0, 3)) * has_lines))
    return found


@settings(max_examples=200, deadline=None)
@given(_grids(), st.data())
def test_runs_have_the_blocks_and_rows_of_each_row(grids: list[RowGrid], data: st.DataObject) -> None:
    blocks = BlockMap(grids)
    spans = st.integers(0, blocks.n_rows - 1).flatmap(
        lambda first: st.tuples(st.just(first), st.integers(first, min(first + 120, blocks.n_rows)))
    )
    rows = np.concatenate([np.arange(*span) for span in data.draw(st.lists(spans, min_size=1, max_size=6))])
    expected, within = blocks.locate(rows)

    runs = blocks.pieces(rows)

    sizes = np.ones(len(rows), np.int64) if runs.sizes is None else runs.sizes
    np.testing.assert_array_equal(np.repeat(runs.blocks, sizes), expected)
    np.testing.assert_array_equal(runs.of_rows(runs.within), within)


def test_windows_are_as_many_runs_as_blocks_that_they_reach_into() -> None:
    blocks = BlockMap([RowGrid(3, 250, 1, 100, 260), RowGrid(1, 80, 1, 32, 80)])
    windows = [(0, 100), (80, 220), (260 + 190, 260 + 250), (780, 780 + 80)]
    runs = blocks.pieces(np.concatenate([np.arange(*window) for window in windows]))
    assert runs.sizes is not None
    assert runs.blocks.tolist() == [0, 0, 1, 2, 4, 5, 9, 10, 11]
    assert runs.within.tolist() == [0, 80, 0, 0, 90, 0, 0, 0, 0]
    assert runs.sizes.tolist() == [100, 20, 100, 20, 10, 50, 32, 32, 16]
