"""A batch belongs to whoever asked for it: nothing that is done to it, or that happens later, is seen elsewhere."""

import gc
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from factories import Stored
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiers import examples

from lightning_h5.datasets import H5LazyDataset
from lightning_h5.readers.buffers import FREE_BYTES, MIN_FREE, SMALLEST, BufferPool

N, WIDTH = 64, 4096  # rows of 32 KiB: batches from four rows on come from recycled memory
VALUES = np.arange(N * WIDTH, dtype="f8").reshape(N, WIDTH)


@pytest.fixture(params=["contiguous", "chunked", "mmap", "held", "two files"])
def dataset(request, make_h5):
    if request.param != "held":
        request.getfixturevalue("nothing_held")
    if request.param == "two files":
        return H5LazyDataset([make_h5(x=VALUES[:40]), make_h5(x=VALUES[40:])], "x", with_index=True)
    stored = Stored(VALUES, "chunked", (8, WIDTH)) if request.param == "chunked" else VALUES
    return H5LazyDataset(
        make_h5(x=stored),
        "x",
        with_index=True,
        files={"mmap": request.param == "mmap"},
    )


@pytest.mark.parametrize("how", ["stack", "pad"])
def test_a_tensor_that_a_transform_keeps_is_not_changed_with_its_batch(make_h5, how):
    kept = torch.ones(3)
    dataset = H5LazyDataset(make_h5(x=VALUES[:4, :3]), "x", transform=lambda sample: kept, collate_fn=how)
    batch, *_ = dataset.read_batch([1])
    batch.zero_()
    assert kept.tolist() == [1, 1, 1]


def test_batches_that_are_kept_keep_their_values(dataset):
    """Kept whole, in part, as NumPy arrays, or as a view of a view, while many others come and go."""
    choose, kept = random.Random(1), []
    for _ in range(150):
        rows = [choose.randrange(N) for _ in range(choose.choice([1, 4, 8, 12]))]
        batch, _ = dataset.read_batch(rows)
        keep = choose.choice(
            [
                lambda b: b,
                lambda b: b[-1:],
                lambda b: b.numpy(),
                lambda b: b.T[7:].T,
                lambda b: b.view(torch.int64).view(torch.float64),
                lambda b: None,
            ]
        )(batch)
        if keep is not None:
            kept.append((torch.as_tensor(keep), torch.as_tensor(keep).clone()))
        del batch, keep
        if len(kept) > 12:
            kept.pop(choose.randrange(len(kept)))
    assert all(torch.equal(now, then) for now, then in kept)


class BufferMachine(RuleBasedStateMachine):
    """Memory is given out, looked at in many ways, dropped in any order, and never given out twice at a time."""

    def __init__(self):
        super().__init__()
        self.pool, self.kept, self.n = BufferPool(), [], 0

    @rule(
        n_bytes=st.sampled_from([0, 8, SMALLEST - 8, SMALLEST, 2 * SMALLEST, 3 * SMALLEST + 8]),
        dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.bfloat16]),
        look=st.sampled_from(["whole", "slice", "numpy", "reshaped", "storage"]),
    )
    def take(self, n_bytes, dtype, look):
        self.n += 1
        tensor = self.pool.tensor((2, n_bytes // dtype.itemsize // 2), dtype)
        assert tensor.shape == (2, n_bytes // dtype.itemsize // 2)
        assert tensor.is_contiguous()
        tensor.view(torch.uint8).fill_(self.n % 251)
        view = {
            "whole": lambda: tensor,
            "slice": lambda: tensor[1:, ::3],
            "numpy": lambda: tensor.view(torch.uint8).numpy()[:1],
            "reshaped": lambda: tensor.view(torch.uint8).reshape(-1)[5:],
            "storage": lambda: tensor.untyped_storage(),
        }[look]()
        self.kept.append((view, self.n % 251))

    @rule(at=st.integers(0, 1000))
    def drop(self, at):
        if self.kept:
            self.kept.pop(at % len(self.kept))

    @invariant()
    def what_is_kept_is_unchanged(self):
        for view, value in self.kept:
            if isinstance(view, torch.UntypedStorage):
                view = torch.empty(0, dtype=torch.uint8).set_(view)
            view = torch.as_tensor(view)
            copy = torch.empty(view.shape, dtype=view.dtype).copy_(view)
            assert bool((copy.view(torch.uint8) == value).all())


TestBuffers = BufferMachine.TestCase
TestBuffers.settings = settings(max_examples=examples(25), stateful_step_count=40)


def test_memory_is_used_again_once_nobody_looks_at_it():
    """What the pool is for; without this the tests above would hold for one that never recycles."""
    pool = BufferPool()
    tensor = pool.tensor((SMALLEST,), torch.uint8)
    address = tensor.data_ptr()
    view = tensor[10:20]
    del tensor
    assert pool.tensor((SMALLEST,), torch.uint8).data_ptr() != address
    del view
    assert pool.tensor((SMALLEST // 4,), torch.float32).data_ptr() == address


@pytest.mark.parametrize("n_bytes", [FREE_BYTES // 8, FREE_BYTES // 2])
def test_only_a_few_free_pieces_are_kept(n_bytes):
    pool = BufferPool()
    taken = [pool.tensor((n_bytes,), torch.uint8) for _ in range(20)]
    del taken
    gc.collect()
    assert len(pool._free) == max(MIN_FREE, FREE_BYTES // n_bytes)


def test_an_unpickled_pool_is_empty():
    pool = BufferPool()
    pool.tensor((SMALLEST,), torch.uint8)
    assert len(pool._free) == 1
    assert len(pickle.loads(pickle.dumps(pool))._free) == 0


def test_threads_never_get_the_same_memory():
    pool, failures = BufferPool(), []

    def work(mine):
        choose, kept = random.Random(mine), []
        for step in range(150):
            tensor = pool.tensor((SMALLEST + 8 * choose.randrange(3),), torch.uint8)
            value = (mine * 60 + step) % 251
            kept.append((tensor.fill_(value), value))
            del tensor
            if len(kept) > 3:
                tensor, value = kept.pop(choose.randrange(len(kept)))
                if not bool((tensor == value).all()):
                    failures.append((mine, step))
                del tensor

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
