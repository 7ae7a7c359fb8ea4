"""The order ``chunks``: what mixes with what, how evenly, and that any place of it is reached alone."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import H5ValueError
from lightning_h5.order import (
    BlockTable,
    OrderParameters,
    PlanSampler,
    Position,
    Segment,
    WindowOrder,
    order_rows,
    permutation,
)
from lightning_h5.order import window as module
from lightning_h5.order.permutation import mix, shuffled_places, stream

block_sizes = st.lists(st.integers(1, 40) | st.just(1), max_size=30)
batch_sizes = st.integers(1, 12)
stream_counts = st.integers(1, 5)
windows = st.integers(1, 12) | st.sampled_from([100, 10**12])
epochs = st.integers(0, 3)


def window_order(sizes, batch_size=4, streams=1, window=4, seed=0, epoch=0):
    parameters = OrderParameters(mode="chunks", seed=seed, batch_size=batch_size, streams=streams, window=window)
    return order_rows(BlockTable.of_sizes(sizes), parameters, epoch)


def whole(sizes, *arguments, **options):
    return window_order(sizes, *arguments, **options)(0, sum(sizes)).tolist()


def permuted_rows(sizes, seed=0, epoch=0):
    """Each row with the place of its block among the permuted blocks, before rows are mixed."""
    starts = BlockTable.of_sizes(sizes).starts
    blocks = permutation(len(sizes), seed, epoch, module.BLOCKS)(0, len(sizes)).tolist()
    return [(row, place) for place, block in enumerate(blocks) for row in range(starts[block], starts[block + 1])]


def n_rows_of_a_stream(n_rows, batch_size, streams):
    return n_rows if streams == 1 else max(0, n_rows // (batch_size * streams) - 1) * batch_size


def plain_order(sizes, batch_size, streams, window, seed, epoch):
    """The same order by the shortest way to say it: draw all keys, sort."""
    sequence = permuted_rows(sizes, seed, epoch)
    words = stream(seed, epoch, module.KEYS).random_raw(11)
    n_rows = n_rows_of_a_stream(len(sequence), batch_size, streams)
    mixed = []
    for number in range(streams):
        pieces = {}
        for row, place in sequence[number * n_rows : (number + 1) * n_rows]:
            pieces.setdefault(place, []).append(row)
        keyed = []
        for piece, rows in enumerate(pieces.values()):
            low, high = max(0, 2 * piece - window), min(2 * len(pieces), 2 * piece + window)
            width, n_wider = divmod((high - low) << module.FRACTION, len(rows))
            seeds = np.full(len(rows), mix(np.array([rows[0]], dtype=np.uint64) ^ words[0]))
            ranks = np.arange(len(rows))
            places = shuffled_places(ranks, np.zeros_like(ranks), np.array([len(rows)]), seeds[:1], words[1:]).tolist()
            hashes = mix(seeds + ranks.astype(np.uint64) * module.GAMMA).tolist()
            for rank, (place, drawn) in enumerate(zip(places, hashes, strict=True)):
                stratum = rank * width + min(rank, n_wider)
                key = (low << module.FRACTION) + stratum + drawn % (width + (rank < n_wider))
                keyed.append((key, piece, rows[place]))
        mixed.append([row for _, _, row in sorted(keyed)])
    rest = permutation(len(sequence) - streams * n_rows, seed, epoch, module.REST)(0, len(sequence) - streams * n_rows)
    batches = [
        mixed[number][start : start + batch_size] for start in range(0, n_rows, batch_size) for number in range(streams)
    ]
    return [row for batch in batches for row in batch] + [sequence[streams * n_rows + i][0] for i in rest.tolist()]


@given(block_sizes, batch_sizes, stream_counts, windows, epochs)
def test_every_row_comes_exactly_once(sizes, batch_size, streams, window, epoch):
    assert sorted(whole(sizes, batch_size, streams, window, epoch=epoch)) == list(range(sum(sizes)))


@given(block_sizes, batch_sizes, stream_counts, windows, epochs, st.integers(0, 2**70))
def test_it_is_the_order_that_drawing_and_sorting_all_keys_gives(sizes, batch_size, streams, window, epoch, seed):
    assert whole(sizes, batch_size, streams, window, seed, epoch) == plain_order(
        sizes, batch_size, streams, window, seed, epoch
    )


@given(st.lists(st.integers(1, 4), max_size=40), batch_sizes, stream_counts, windows)
def test_rows_of_equal_keys_are_in_the_order_of_their_pieces(sizes, batch_size, streams, window):
    """With two bits below the point instead of 32 nearly all keys are met more than once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FRACTION", 2)
        assert whole(sizes, batch_size, streams, window) == plain_order(sizes, batch_size, streams, window, 0, 0)


@given(block_sizes, batch_sizes, stream_counts, windows, st.data())
def test_any_calls_in_any_order_give_the_same_rows(sizes, batch_size, streams, window, data):
    n_rows = sum(sizes)
    expected = whole(sizes, batch_size, streams, window)
    cuts = sorted(data.draw(st.lists(st.integers(0, n_rows), max_size=12)))
    calls = list(pairwise([0, *cuts, n_rows]))
    order = window_order(sizes, batch_size, streams, window)
    for start, stop in [*calls, *data.draw(st.permutations(calls))]:
        assert order(start, stop).tolist() == expected[start:stop]


@pytest.mark.parametrize("ahead", [0, 7, 64])
def test_reading_ahead_changes_nothing(ahead, monkeypatch):
    sizes = [13] * 60
    expected = whole(sizes, 5, 3, 8)
    monkeypatch.setattr(module, "AHEAD", ahead)
    order = window_order(sizes, 5, 3, 8)
    assert [row for start in range(0, 780, 5) for row in order(start, start + 5).tolist()] == expected


@given(block_sizes, stream_counts, windows, st.sampled_from([0.6, 1.6]))
def test_the_guess_where_rows_lie_decides_nothing(sizes, streams, window, power):
    """Here it is far too high, or too low."""
    with pytest.MonkeyPatch.context() as patch:
        guess = lambda self: sum(sizes) * np.linspace(0, 1, 2 * self._n_pieces + 1) ** power  # noqa: E731
        patch.setattr(module._BlockStream, "_expect", guess)
        patch.setattr(module, "AHEAD", 0)
        patched = window_order(sizes, 4, streams, window)
        rows = [row for start in range(0, sum(sizes), 4) for row in patched(start, start + 4).tolist()]
    assert rows == whole(sizes, 4, streams, window)


def test_rows_are_made_ahead_only_where_a_stream_is_read_on(monkeypatch):
    made, make = [], module._BlockStream._make
    monkeypatch.setattr(module._BlockStream, "_make", lambda self, *bounds: made.append(bounds) or make(self, *bounds))
    monkeypatch.setattr(module, "AHEAD", 1024)
    order = window_order([50] * 200, 64)
    for start in (6400, 6464, 6528, 7700, 0, 9984):
        order(start, start + 64)
    assert made == [(6400, 6464), (6464, 6464 + 1024), (7700, 7700 + 1024), (0, 64), (9984, 10_000)]


def test_what_a_caller_writes_into_its_rows_stays_with_it():
    order = window_order([8] * 20)
    expected = order(4, 8).tolist()
    order(4, 8)[:] = -1
    assert order(4, 8).tolist() == expected


def test_threads_may_share_an_order():
    sizes = [17] * 300
    expected = whole(sizes, 10, 3, 16)
    order = window_order(sizes, 10, 3, 16)
    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda start: order(start, start + 10).tolist(), [*range(0, 5100, 10)] * 4))
    assert [row for batch in batches for row in batch] == expected * 4


@given(block_sizes, st.integers(2, 12), stream_counts, windows, st.integers(1, 6), epochs)
def test_ranks_take_turns_in_one_sequence_whatever_their_number(sizes, batch_size, streams, window, world_size, epoch):
    if sum(sizes) < world_size:
        return
    parameters = OrderParameters(mode="chunks", batch_size=batch_size, streams=streams, window=window)
    ranks = [
        PlanSampler(BlockTable.of_sizes(sizes), parameters, batch_size=batch_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    steps = zip(*(one.tokens(epoch) for one in ranks), strict=True)
    rows = [row for tokens in steps for token in tokens for row in token.rows.tolist()]
    assert rows == whole(sizes, batch_size, streams, window, epoch=epoch)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(whole([5] * 9, seed=seed, epoch=epoch)) for epoch in range(5) for seed in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize(
    ("streams", "golden"),
    [
        (1, [5, 17, 4, 19, 16, 6, 9, 3, 18, 11, 8, 2, 1, 0, 13, 7, 15, 14, 20, 12, 25, 10, 23, 24, 21, 22]),
        (2, [4, 17, 3, 5, 9, 11, 19, 2, 16, 6, 8, 13, 18, 1, 0, 14, 7, 12, 23, 15, 20, 21, 25, 24, 10, 22]),
    ],
)
def test_the_order_of_version_1_never_changes(streams, golden):
    """Positions that were saved rely on it; another order is another version of the plan."""
    assert whole([7, 3, 1, 5, 4, 6], 3, streams, 3, seed=9, epoch=2) == golden


@given(block_sizes, batch_sizes, st.integers(2, 5), windows)
def test_each_batch_comes_from_one_stream_and_streams_share_no_rows(sizes, batch_size, streams, window):
    rows = whole(sizes, batch_size, streams, window)
    sequence = [row for row, _ in permuted_rows(sizes)]
    n_rows = n_rows_of_a_stream(len(rows), batch_size, streams)
    batches = [rows[start : start + batch_size] for start in range(0, streams * n_rows, batch_size)]
    for number in range(streams):
        of_stream = [row for batch in batches[number::streams] for row in batch]
        assert sorted(of_stream) == sorted(sequence[number * n_rows : (number + 1) * n_rows])


@given(block_sizes, batch_sizes, st.integers(2, 5), windows)
def test_a_consumer_with_a_stream_of_its_own_shares_no_block_but_at_its_ends(sizes, batch_size, streams, window):
    """Of the rounds of full batches; the rest, below two rounds, is in the last blocks alone."""
    rows = whole(sizes, batch_size, streams, window)
    place = dict(permuted_rows(sizes))
    end = streams * n_rows_of_a_stream(len(rows), batch_size, streams)
    needed = {(place[row], position // batch_size % streams) for position, row in enumerate(rows[:end])}
    assert len(needed) <= len({block for block, _ in needed}) + streams - 1
    assert len(rows) - end < 2 * streams * batch_size
    assert sorted(rows[end:]) == sorted(row for row, _ in permuted_rows(sizes)[end:])


@given(block_sizes, windows)
def test_no_more_blocks_are_begun_and_not_ended_than_the_window_has(sizes, window):
    """A key lies in the windows of ``window`` places: those ``j`` with ``2j - K <= key < 2j + K``."""
    begun, ended = when_begun_and_ended(whole(sizes, window=window), sizes)
    alive = [int(((begun <= p) & (p <= ended)).sum()) for p in range(sum(sizes))]
    assert max(alive, default=0) <= min(window, len(sizes))


def when_begun_and_ended(rows, sizes, epoch=0):
    """Positions of the first and of the last row of each block, in the order of the permuted blocks."""
    place = dict(permuted_rows(sizes, epoch=epoch))
    positions = [[] for _ in sizes]
    for position, row in enumerate(rows):
        positions[place[row]].append(position)
    return np.array([p[0] for p in positions]), np.array([p[-1] for p in positions])


@given(block_sizes, windows)
def test_a_row_comes_from_a_block_fewer_than_a_window_away(sizes, window):
    """Whatever the blocks' sizes: those whose windows lie before the row's key are used up, those after not begun."""
    place = dict(permuted_rows(sizes))
    places = list(place.values())
    assert all(abs(place[row] - places[i]) < window for i, row in enumerate(whole(sizes, window=window)))


def test_rows_of_equal_blocks_come_from_half_a_window_on_either_side():
    """And a row at most of each of 128 blocks away, which makes four blocks, and the one that is begun."""
    place = np.array([place for _, place in sorted(permuted_rows([32] * 625))])
    away = place[whole([32] * 625, window=128)] - np.arange(20_000) // 32
    inner = away[64 * 32 : -64 * 32]
    assert np.abs(inner).max() <= 64 + 5
    assert abs(inner.mean()) < 1
    assert inner.std() == pytest.approx(128 / 12**0.5, rel=0.05)


@given(st.integers(3, 40), st.integers(1, 40), epochs)
def test_blocks_are_begun_and_ended_as_evenly_as_rows_are_used(n_rows, window, epoch):
    """Away from the ends ``2d`` units of keys hold ``d * n`` rows on average, and fewer by less than 2 rows for each of
    the ``window + d + 1`` blocks that may have some. So ``d <= (rows + 2 * window + 2) / (n - 2)``. A window begins
    every 2 units, and its block within a stratum, ``2 * window / n`` units.
    """
    sizes = [n_rows] * (3 * window + 20)
    begun, ended = when_begun_and_ended(whole(sizes, window=window, epoch=epoch), sizes, epoch)
    for stretch in (1, n_rows, 5 * n_rows):
        bound = (stretch + 2 * window + 2) / (n_rows - 2) + window / n_rows + 1
        assert most_in(stretch, begun[window:-window]) <= bound
        assert most_in(stretch, ended[window:-window]) <= bound


def test_a_block_is_begun_for_each_that_is_used_up():
    """In numbers: 625 blocks of 32 rows, 128 at a time."""
    for positions in when_begun_and_ended(whole([32] * 625, window=128), [32] * 625):
        assert [most_in(stretch, positions[128:-128]) for stretch in (32, 320)] == pytest.approx([5, 14], abs=1)


def most_in(stretch, positions):
    """How many of the positions are in a stretch of rows, where they are the most."""
    positions = np.sort(positions)
    return (np.searchsorted(positions, positions + stretch) - np.arange(len(positions))).max()


@given(block_sizes, batch_sizes, epochs)
def test_a_window_of_one_block_mixes_within_blocks_only(sizes, batch_size, epoch):
    place = dict(permuted_rows(sizes, epoch=epoch))
    places = [place[row] for row in whole(sizes, batch_size, 1, 1, epoch=epoch)]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("streams", "window", "mean", "worst"), [(1, 128, 2.19, 2.04), (4, 32, 2.08, 1.6), (1, 32, 2.08, 1.8)]
)
@pytest.mark.parametrize("seed", range(3))
def test_batches_of_a_sorted_file_are_nearly_as_mixed_as_by_a_full_shuffle(streams, window, mean, worst, seed):
    """Ten labels: the entropy of a batch of 64 is 2.23 in a full shuffle, 2.13 in its worst percentile."""
    labels = np.array(whole([32] * 625, 64, streams, window, seed=seed)) // 2000
    shares = np.array([np.bincount(batch, minlength=10) / 64 for batch in labels[: 64 * 312].reshape(312, 64)])
    entropies = -(shares * np.log(np.maximum(shares, 1e-9))).sum(axis=1)
    assert entropies.mean() >= mean
    assert np.quantile(entropies, 0.01) >= worst


@pytest.mark.parametrize(
    ("n_blocks", "n_rows", "window", "streams", "most_mib"),
    [(10**6, 1000, 512, 64, 120), (10**6, 1000, 512, 1, 120), (20, 10**7, 64, 1, 2), (1, 10**7, 64, 1, 2)],
)
def test_memory_follows_the_blocks_and_not_their_rows(n_blocks, n_rows, window, streams, most_mib):
    blocks = BlockTable.of_sizes(np.full(n_blocks, n_rows))
    parameters = OrderParameters(mode="chunks", batch_size=64, streams=streams, window=window)
    tracemalloc.start()
    order = order_rows(blocks, parameters, 3)
    starts = [0, 64, 10**6 * 64, 10**9 // 7, n_blocks * n_rows - 64]
    rows = [order(start, start + 64).tolist() for start in starts if start < n_blocks * n_rows]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len({row for batch in rows for row in batch}) == 64 * len(rows)
    assert peak < most_mib << 20


@pytest.mark.parametrize("numbers", [{"window": 0}, {"window": 4, "streams": 0}, {"window": 4, "batch_size": 0}])
def test_numbers_below_one_are_refused(numbers):
    with pytest.raises(H5ValueError, match="each is at least 1"):
        order_rows(BlockTable.of_sizes([4]), OrderParameters(mode="chunks", **numbers), 0)


def test_a_block_with_more_rows_than_keys_is_refused():
    with pytest.raises(H5ValueError, match="over blocks of up to 4294967297 rows; the maximum is 4294967296"):
        window_order([3, 2**32 + 1])(0, 4)
    assert len(set(window_order([3, 2**32], window=1)(2**32 - 64, 2**32).tolist())) == 64


def test_the_tables_are_made_when_the_first_rows_are_asked_for():
    order = order_rows(BlockTable.of_sizes([4] * 9), OrderParameters(mode="chunks", window=2), 0)
    assert isinstance(order, WindowOrder)
    assert not {"_pieces", "_rest"} & set(vars(order))


def test_a_position_that_was_saved_with_the_old_word_for_the_order_is_read():
    order = OrderParameters(mode="chunks", seed=3, batch_size=4, streams=2, window=4)
    sampler = PlanSampler(BlockTable.of_sizes([8] * 20), order, batch_size=4)
    state = {
        "version": 2,
        "epoch": 1,
        "segments": [[4, 1, 2]],
        "finished": False,
        "order": {"mode": "window", "seed": 3, "batch_size": 4, "streams": 2, "window": 4, "version": 1},
        "drop_last": False,
        "shards": None,
        "n_rows": 160,
        "n_blocks": 20,
        "identity": {"sampled": "files"},
        "digest": "67820356205bf49c",
    }
    position = Position.from_state(state, sampler, {"sampled": "files"})
    assert position == Position(1, (Segment(4, 1, 2),), order)
    assert position.state(sampler, {"sampled": "files"})["order"] == state["order"] | {"mode": "chunks"}
