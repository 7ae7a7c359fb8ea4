"""Counters: batches are summed when someone looks, and each process counts its own."""

import pickle

from factories import run_forked
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.counters import MAX_DELIVERED, Counters


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9), st.booleans()), max_size=MAX_DELIVERED + 40))
def test_delivered_batches_are_all_counted_whenever_someone_looks(batches):
    counters, rows, seconds = Counters(), 0, 0
    for n, (n_rows, waited, looks) in enumerate(batches, 1):
        counters.add_batch(n_rows, waited)
        rows, seconds = rows + n_rows, seconds + waited
        if looks:
            assert counters.own("rows", "batches", "wait_seconds") == (rows, n, seconds)
    total = counters.total()
    assert (total["rows"], total["batches"], total["wait_seconds"]) == (rows, len(batches), seconds)


def test_a_pickled_counter_has_the_batches_that_were_delivered():
    counters = Counters()
    counters.add_batch(3, 0.5)
    assert pickle.loads(pickle.dumps(counters)).total()["rows"] == 3


def test_a_forked_process_does_not_count_its_parents_batches_again():
    counters = Counters(n_workers=1)  # in memory that a child shares
    counters.add_batch(3, 0.0)
    for _ in range(2):

        def count():
            counters.add_batch(5, 0.0)
            counters.total()

        assert run_forked(count) == 0
    assert counters.total()["rows"] == 13
