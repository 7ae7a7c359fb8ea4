"""How often chunks are decoded: once an epoch where the pool holds what is mixed at a time, and no more than needed."""

import numpy as np
import pytest
from factories import H5Factory, Stored, random_values
from guards import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import EVERYTHING, look, n_decoded, open_pool
from tiers import examples

from lightning_h5.counters import Counters
from lightning_h5.readers import TaskQueue

ROWS, STEP = 203, 5  # the last block has three rows
BLOCKS = -(-ROWS // STEP)
VALUES = random_values("i4", (ROWS, 6))


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """One array in chunks of whole rows, and one whose rows take part in two chunks each."""
    make = H5Factory(tmp_path_factory.mktemp("counts"))
    path = make(
        whole=Stored(VALUES, "chunked", (STEP, 6), {"compression": "gzip"}),
        split=Stored(VALUES, "chunked", (STEP, 4), {"compression": "lzf", "shuffle": True}),
    )
    return {key: look(path, key) for key in ("whole", "split")}


@pytest.fixture(params=["whole", "split"])
def layout(request, layouts):
    return layouts[request.param]


def batches_of(order, size):
    return [order[at : at + size] for at in range(0, len(order), size)]


def most_alive(batches, block_of=lambda rows: rows // STEP):
    """The most blocks of which, at a batch, a row was read before or in it and one in or after it."""
    blocks = [np.unique(block_of(rows)) for rows in batches]
    first, last = {}, {}
    for at, those in enumerate(blocks):
        for block in those.tolist():
            first.setdefault(block, at)
            last[block] = at
    return max(sum(first[block] <= at <= last[block] for block in first) for at in range(len(batches)))


def windowed(window, seed):
    """Rows by a random key from the window around their block (see the design, 4.3)."""
    random = np.random.default_rng(seed)
    place = random.permutation(BLOCKS)[np.arange(ROWS) // STEP]
    low, high = np.maximum(0, place - window // 2), np.minimum(BLOCKS, place + window // 2)
    return np.argsort(low + random.random(ROWS) * (high - low), kind="stable")


def run(reader, batches, epoch, ahead=0):
    for at, rows in enumerate(batches):
        for later in batches[at + 1 : at + 1 + ahead]:
            reader.prefetch(reader.map.boxes(later))
        assert np.array_equal(reader.read(rows, epoch=epoch), VALUES[rows])


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(("n_blocks", "size"), [(1, 1), (2, 5), (2, 3), (3, 10), (EVERYTHING, 64)])
def test_in_storage_order_a_chunk_is_decoded_once(layout, n_blocks, size, planned):
    counters = Counters()
    reader = open_pool(layout, n_blocks=n_blocks, counters=counters)
    run(reader, batches_of(np.arange(ROWS), size), 0 if planned else None)
    assert n_decoded(counters) == BLOCKS * layout.table.per_row
    assert counters.total()["bytes_decoded"] == n_decoded(counters) * layout.chunk_bytes
    assert counters.total()["blocks_loaded"] == BLOCKS


@pytest.mark.parametrize("retain", [None, False])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("window", [2, 4, 8, 20])
def test_in_a_windowed_order_a_chunk_is_decoded_once_by_a_pool_little_larger_than_the_window(
    layout, window, seed, retain
):
    counters = Counters()
    reader = open_pool(layout, n_blocks=window + 2, counters=counters, retain=retain)
    for epoch in range(3):
        before = n_decoded(counters)
        run(reader, batches_of(windowed(window, 10 * seed + epoch), 4), epoch)
        n = n_decoded(counters) - before
        # Of the next epoch's first blocks some are still there.
        assert n == BLOCKS * layout.table.per_row if epoch == 0 else n <= BLOCKS * layout.table.per_row


@given(
    order=st.one_of(st.permutations(range(ROWS)), st.integers(0, 999).map(lambda seed: windowed(9, seed).tolist())),
    size=st.integers(1, 30),
    cut=st.integers(1, ROWS),
)
@settings(max_examples=examples(40))
def test_in_any_order_a_chunk_is_decoded_once_where_all_blocks_that_are_mixed_at_a_time_have_a_place(
    layouts, order, size, cut
):
    """Also where a dataset has some of the rows: a block is done when those are out."""
    order = np.array(order)[:cut]
    batches = batches_of(order, size)
    counters, layout = Counters(), layouts["whole"]
    reader = open_pool(layout, n_blocks=most_alive(batches), counters=counters, rows=np.sort(order), retain=False)
    run(reader, batches, 0)
    assert n_decoded(counters) == len(np.unique(order // STEP))


@given(seed=st.integers(0, 999), size=st.integers(1, 9), ahead=st.integers(1, 3), has_team=st.booleans())
@settings(max_examples=examples(30))
def test_looking_ahead_decodes_nothing_twice_and_leaves_nothing_to_decode(layouts, seed, size, ahead, has_team):
    batches = batches_of(windowed(8, seed), size)
    # What is looked at ahead has to have a place, too.
    together = [np.concatenate(batches[at : at + 1 + ahead]) for at in range(len(batches))]
    counters, work = Counters(), TaskQueue()
    reader = open_pool(layouts["split"], n_blocks=most_alive(together), counters=counters, work=work)
    team = work.start_team(2 * has_team)
    run(reader, batches, 0, ahead)
    assert n_decoded(counters) == BLOCKS * 2
    work.end_team(len(team))
    for thread in team:
        thread.join(HANG)


@pytest.mark.parametrize("ahead", [0, 1, 4, 30])
@pytest.mark.parametrize("window", [2, 8, 20])
def test_the_next_epoch_begins_before_the_end_of_one_and_decodes_nothing_twice(layout, window, ahead):
    counters = Counters()
    reader = open_pool(layout, n_blocks=window + 2, counters=counters, retain=False)
    batches = [(epoch, rows) for epoch in range(4) for rows in batches_of(windowed(window, epoch), 4)]
    for at, (epoch, rows) in enumerate(batches):
        for later_epoch, later in batches[at + 1 : at + 1 + ahead]:
            if not reader.prefetch(reader.map.boxes(later), epoch=later_epoch):
                break
        assert np.array_equal(reader.read(rows, epoch=epoch), VALUES[rows])
    assert n_decoded(counters) <= 4 * BLOCKS * layout.table.per_row
    last = 4 * STEP * np.arange(window + 2) % (BLOCKS * STEP - STEP)
    assert reader.prefetch(reader.map.boxes(last), epoch=4), "a slot is still taken"


def test_reads_of_one_epoch_end_after_reads_of_the_next_began(layout):
    counters = Counters()
    reader = open_pool(layout, n_blocks=8, counters=counters, retain=False)
    first, *middle, last = batches_of(np.arange(ROWS), 2 * STEP)
    run(reader, [first], 0)
    for epoch in range(2):
        run(reader, middle, epoch, ahead=1)
        assert reader.prefetch(reader.map.boxes(first), epoch=epoch + 1)
        outs = [np.empty_like(VALUES[rows]) for rows in (last, first)]
        ending = reader.begin(reader.map.boxes(last), outs[0], epoch)
        reader.begin(reader.map.boxes(first), outs[1], epoch + 1).finish()
        ending.finish()
        assert np.array_equal(np.concatenate(outs), VALUES[np.concatenate([last, first])])
    run(reader, [*middle, last], 2)
    assert n_decoded(counters) <= 3 * BLOCKS * layout.table.per_row
    assert reader.prefetch(reader.map.boxes(STEP * np.arange(20, 28)), epoch=3), "a slot is still taken"


@pytest.mark.parametrize("retain", [None, True])
def test_where_everything_has_a_place_nothing_is_decoded_after_the_first_epoch(layout, retain):
    counters = Counters()
    reader = open_pool(layout, counters=counters, retain=retain)
    for epoch in range(4):
        order = np.random.default_rng(epoch).permutation(ROWS)
        run(reader, batches_of(order, 16), epoch, ahead=epoch % 2)
        assert n_decoded(counters) == BLOCKS * layout.table.per_row
    reader.close()
    run(reader, batches_of(np.arange(ROWS), 16), 4)
    assert n_decoded(counters) == 2 * BLOCKS * layout.table.per_row


def test_what_is_kept_is_what_fits_of_the_dataset_not_of_the_file(layouts):
    """A subset of rows that all have a place is kept, however many others the file has."""
    counters, rows = Counters(), np.arange(50, 80)
    reader = open_pool(layouts["whole"], n_blocks=6, counters=counters, rows=rows)
    for epoch in range(3):
        run(reader, batches_of(np.random.default_rng(epoch).permutation(rows), 4), epoch)
    assert n_decoded(counters) == 6


def test_unplanned_reads_keep_what_was_used_last(layouts):
    counters = Counters()
    reader = open_pool(layouts["whole"], n_blocks=3, counters=counters)
    for block in (0, 1, 2, 0, 2, 0, 2, 0):
        reader.read(np.array([block * STEP]))
    assert n_decoded(counters) == 3
    reader.read(np.array([10 * STEP]))  # takes the place of 1
    for block in (0, 2, 10):
        reader.read(np.array([block * STEP]))
    assert n_decoded(counters) == 4
    reader.read(np.array([1 * STEP]))
    assert n_decoded(counters) == 5


def test_what_is_too_large_to_be_kept_is_decoded_a_chunk_at_a_time(layout):
    counters = Counters()
    reader = open_pool(layout, n_blocks=0, counters=counters)
    rows = np.array([3, 0, 3, ROWS - 1, 4])
    assert np.array_equal(reader.read(rows), VALUES[rows])
    assert n_decoded(counters) == 2 * layout.table.per_row
    assert not reader.prefetch(reader.map.boxes(rows)) or n_decoded(counters) == 2 * layout.table.per_row
