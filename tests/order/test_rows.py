"""Sets of rows: what shards hold together, and where a row stands among those."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.order import BlockTable, RankShard, condensed, find_places, places_in, rows_at, union


@st.composite
def shards(draw):
    """The rows of some ranks, one or all of them among these, as any draw gives them."""
    world_size = draw(st.integers(1, 7))
    blocks = BlockTable.of_sizes(draw(st.lists(st.integers(1, 5), max_size=12)))
    shard = RankShard(blocks, world_size, 0, draw(st.sampled_from(["contiguous", "interleave"])), 1, 3)
    ranks = draw(st.sets(st.integers(0, world_size - 1), min_size=1) | st.just(set(range(world_size))))
    number = draw(st.integers(0, 2))
    return [shard.rows(number, rank) for rank in sorted(ranks)]


@given(shards())
def test_the_union_of_shards_is_all_their_rows_in_ascending_order(each):
    found = union(each)
    assert list(found) == sorted(row for rows in each for row in rows)


@given(st.integers(0, 40), st.integers(1, 9), st.sampled_from(["contiguous", "interleave"]))
def test_the_union_of_all_shards_takes_no_memory_as_long_as_none_was_drawn_anew(n_rows, world_size, mode):
    shard = RankShard(BlockTable.of_sizes([n_rows]), world_size, 0, mode)
    assert union([shard.rows(0, rank) for rank in range(world_size)]) == range(n_rows)


@given(shards(), st.data())
def test_places_are_where_rows_stand_among_those_held(each, data):
    held, rows = union(each), data.draw(st.sampled_from(each))
    places = np.asarray(places_in(held, rows), dtype=np.int64)
    assert np.asarray(held, dtype=np.int64)[places].tolist() == list(rows)
    assert rows_at(held, places).tolist() == list(rows)
    assert find_places(held, np.array(rows, dtype=np.int64)).tolist() == places.tolist()
    if isinstance(held, range) and isinstance(rows, range):
        assert isinstance(places_in(held, rows), range)


@given(st.sets(st.integers(0, 60), min_size=1).map(sorted), st.data())
def test_places_of_picked_rows_may_come_in_any_order_and_again(held, data):
    rows = np.array(data.draw(st.lists(st.sampled_from(held), max_size=30)), dtype=np.int64)
    places = places_in(np.array(held), rows)
    assert np.array(held)[places].tolist() == rows.tolist()


@given(
    st.lists(st.integers(0, 9), max_size=6)
    | st.builds(lambda first, n: [*range(first, first + n)], *[st.integers(0, 9)] * 2)
)
def test_rows_that_follow_each_other_are_condensed_to_a_range(rows):
    made = condensed(np.array(rows, dtype=np.int64))
    assert list(made) == rows
    assert isinstance(made, range) == all(after == row + 1 for row, after in pairwise(rows))
    assert condensed(range(2, 9, 3)) == range(2, 9, 3)
