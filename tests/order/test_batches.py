"""Where a sequence is cut into batches."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.order import EvaluationBatches, TrainBatches

sizes = st.tuples(st.integers(0, 400), st.integers(1, 20), st.integers(1, 9))


epochs = st.integers(0, 50)


@given(sizes, st.booleans(), epochs)
def test_training_batches_follow_each_other_without_gap_or_overlap(size, drop_last, epoch):
    """But for one gap where batches of one row cannot be made smaller."""
    cut = TrainBatches(*size, drop_last, epoch)
    bounds = [(cut.start(q), cut.stop(q)) for q in range(cut.n_steps * cut.world_size)]
    gaps = [start - stop for start, stop in zip([b[0] for b in bounds], [0, *(b[1] for b in bounds)], strict=False)]
    assert sorted(gaps)[:-1] == [0] * (len(bounds) - 1) if bounds else True
    assert max(gaps, default=0) in ({0} if drop_last or cut.batch_size > 1 else {0, cut.n_left_out})
    assert all(0 < stop - start <= cut.batch_size for start, stop in bounds)
    assert sum(stop - start for start, stop in bounds) == cut.n_rows - cut.n_left_out


@given(st.integers(1, 60), st.integers(1, 9), epochs)
def test_with_batches_of_one_row_others_sit_out_each_epoch(n_rows, world_size, epoch):
    out = []
    for each in (epoch, epoch + 1):
        cut = TrainBatches(n_rows, 1, world_size, False, each)
        out.append(set(range(n_rows)) - {cut.start(q) for q in range(cut.n_steps * world_size)})
    assert len(out[0]) == len(out[1]) == (n_rows if n_rows < world_size else n_rows % world_size)
    if n_rows >= 2 * world_size:
        assert not out[0] & out[1]


@given(st.integers(1, 60), st.integers(2, 9))
def test_with_batches_of_one_row_nobody_sits_out_for_ever(n_rows, world_size):
    seen = set()
    for epoch in range(n_rows + 1):
        cut = TrainBatches(n_rows, 1, world_size, False, epoch)
        seen |= {cut.start(q) for q in range(cut.n_steps * world_size)}
    assert seen == (set(range(n_rows)) if n_rows >= world_size else set())


@given(sizes)
def test_training_without_drop_last_uses_every_row_where_batches_can_be_smaller(size):
    n_rows, batch_size, world_size = size
    cut = TrainBatches(n_rows, batch_size, world_size)
    if n_rows < world_size:
        assert cut.n_steps == 0
    elif batch_size > 1:
        assert cut.n_left_out == 0
    else:
        assert cut.n_left_out < world_size  # fewer rows than ranks cannot make a step


@given(sizes)
def test_no_training_batch_is_tiny(size):
    n_rows, batch_size, world_size = size
    cut = TrainBatches(n_rows, batch_size, world_size)
    taken = [cut.stop(q) - cut.start(q) for q in range(cut.n_steps * world_size)]
    if n_rows >= batch_size * world_size:
        assert all(n >= batch_size // 2 for n in taken)
    assert max(taken[-2 * world_size :], default=0) - min(taken[-2 * world_size :], default=0) <= 1 or (
        n_rows >= 2 * batch_size * world_size and set(taken[: -2 * world_size]) <= {batch_size}
    )


@given(sizes)
def test_drop_last_gives_full_batches_alone(size):
    n_rows, batch_size, world_size = size
    cut = TrainBatches(n_rows, batch_size, world_size, drop_last=True)
    assert {cut.stop(q) - cut.start(q) for q in range(cut.n_steps * world_size)} <= {batch_size}
    assert cut.n_left_out < batch_size * world_size


@given(sizes)
def test_evaluation_takes_every_row_once_in_storage_order(size):
    n_rows, batch_size, world_size = size
    rows = []
    for rank in range(world_size):
        cut = EvaluationBatches(n_rows, batch_size, world_size, rank)
        for step in range(cut.n_steps):
            start, stop = cut.bounds(step)
            assert 0 < stop - start <= batch_size
            rows += range(start, stop)
    assert rows == list(range(n_rows))


@given(sizes)
def test_evaluation_takes_equally_many_batches_on_all_ranks(size):
    n_rows, batch_size, world_size = size
    counts = {EvaluationBatches(n_rows, batch_size, world_size, rank).n_steps for rank in range(world_size)}
    if batch_size > 1 and n_rows >= world_size:
        assert len(counts) == 1
    else:
        assert max(counts) - min(counts) <= 1


@given(sizes, st.data(), epochs)
def test_the_rest_of_an_epoch_is_cut_as_the_whole_would_have_been(size, data, epoch):
    """Resuming under the same settings changes no batch."""
    whole = TrainBatches(*size, False, epoch)
    done = data.draw(st.integers(0, whole.n_steps))
    consumed = whole.stop(done * whole.world_size - 1)
    rest = TrainBatches(whole.n_rows - consumed, whole.batch_size, whole.world_size, False, epoch, consumed)
    left = range(done * whole.world_size, whole.n_steps * whole.world_size)
    assert rest.n_steps == whole.n_steps - done
    assert [rest.start(q) + consumed for q in range(len(left))] == [whole.start(q) for q in left]
