"""Rows as runs inside of blocks: the same blocks and rows as one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_h5.readers.block_map import BlockMap, Boxes, RowGrid


@st.composite
def _grids(draw: st.DrawFn) -> list[RowGrid]:
    """Arrays with one axis of rows or with two, whose last blocks may be cut off."""
    has_lines = draw(st.booleans())
    grids = []
    for _ in range(draw(st.integers(1, 4))):
        lines, across = (draw(st.integers(1, 5)), draw(st.integers(1, 3))) if has_lines else (1, 1)
        grids.append(RowGrid(lines, draw(st.integers(1, 90)), across, draw(st.integers(1, 40))))
    return grids


def _blocks_by_hand(grids: list[RowGrid], boxes: Boxes) -> tuple[list[int], list[int]]:
    """Return the block of each row, and its row there, by plain arithmetic."""
    first_blocks = np.cumsum([0, *(grid.n_blocks for grid in grids)]).tolist()
    blocks, within = [], []
    parts = np.broadcast_to(boxes.part_of_rows, boxes.rows.shape)
    for part, row in zip(parts.tolist(), boxes.rows.tolist(), strict=True):
        grid = grids[part]
        line, step = divmod(row, grid.size)
        per_line = -(-grid.size // grid.along)
        blocks.append(first_blocks[part] + line // grid.across * per_line + step // grid.along)
        within.append(line % grid.across * grid.along + step % grid.along)
    return blocks, within


@settings(max_examples=200, deadline=None)
@given(_grids(), st.data(), st.booleans())
def test_runs_have_the_blocks_and_rows_of_each_row(grids: list[RowGrid], data: st.DataObject, has_runs: bool) -> None:
    blocks = BlockMap(grids)
    spans = st.integers(0, len(grids) - 1).flatmap(
        lambda part: st.integers(0, grids[part].lines * grids[part].size - 1).flatmap(
            lambda first: st.tuples(
                st.just(part),
                st.just(first),
                st.integers(first + 1, min(first + 120, grids[part].lines * grids[part].size)),
            )
        )
    )
    drawn = data.draw(st.lists(spans, min_size=1, max_size=6))
    rows = np.concatenate([np.arange(first, stop) for _, first, stop in drawn])
    parts, sizes = np.array([part for part, _, _ in drawn]), np.array([stop - first for _, first, stop in drawn])
    boxes = Boxes(parts, rows, sizes) if has_runs else Boxes(np.repeat(parts, sizes), rows)
    expected, expected_within = _blocks_by_hand(grids, boxes)

    located, within = blocks.locate(boxes)
    runs = blocks.pieces(boxes)

    assert (located.tolist(), within.tolist()) == (expected, expected_within)
    assert runs.repeated(runs.blocks).tolist() == expected
    assert runs.of_rows(runs.within).tolist() == expected_within


def test_windows_are_as_many_runs_as_blocks_that_they_reach_into() -> None:
    blocks = BlockMap([RowGrid(3, 250, 1, 100), RowGrid(1, 80, 1, 32)])
    windows = [(0, 0, 100), (0, 80, 220), (0, 250 + 190, 250 + 250), (1, 0, 80)]
    rows = np.concatenate([np.arange(first, stop) for _, first, stop in windows])
    sizes = np.array([stop - first for _, first, stop in windows])
    parts = np.array([part for part, _, _ in windows])
    for boxes in (Boxes(parts, rows, sizes), Boxes(np.repeat(parts, sizes), rows)):
        runs = blocks.pieces(boxes)
        assert runs.sizes is not None
        assert runs.blocks.tolist() == [0, 0, 1, 2, 4, 5, 9, 10, 11]
        assert runs.within.tolist() == [0, 80, 0, 0, 90, 0, 0, 0, 0]
        assert runs.sizes.tolist() == [100, 20, 100, 20, 10, 50, 32, 32, 16]


@pytest.mark.parametrize(
    ("boxes", "row", "n_rows"),
    [
        (Boxes(0, np.array([3, -1])), "-1", 6),
        (Boxes(1, np.array([3, 4])), "4", 4),
        (Boxes(np.array([0, 1]), np.array([5, 4])), "4", 4),
        (Boxes(np.array([1, 0]), np.array([2, 3, 4, 5, 6]), np.array([2, 3])), "6", 6),
        (Boxes(np.array([0, -1]), np.array([0, -2])), "-2", 0),
        (Boxes(np.array([0, 1]), np.array([0, 1, 3, 4]), 2), "4", 4),
    ],
    ids=["negative", "beyond one array", "beyond its own array", "the end of a run", "before all arrays", "equal runs"],
)
def test_a_row_that_its_array_does_not_have_is_named(boxes: Boxes, row: str, n_rows: int) -> None:
    blocks = BlockMap([RowGrid(1, 6, 1, 4), RowGrid(2, 2, 1, 2)])
    with pytest.raises(IndexError, match=f"row {row} is out of range for 'x', which has {n_rows} rows"):
        blocks.check(boxes, "'x'")
