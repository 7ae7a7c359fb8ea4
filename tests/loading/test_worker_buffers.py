"""Memory through which workers give batches: nothing in use is written to, nothing is kept for longer than needed."""

import gc
import multiprocessing
import os
import pickle
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import Stored
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tiers import examples
from torch.utils.data import get_worker_info

from lightning_h5 import H5Error, H5LazyDataset
from lightning_h5.loading import H5DataLoader
from lightning_h5.loading.worker_buffers import SMALL, TICKETS, WorkerMemory, starting_workers, worker_memory
from lightning_h5.order import OrderParameters, PlanSampler

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name is Linux's")

LARGE = SMALL + 1000


def through(buffers, tensor):
    """A tensor, or a batch, as the receiver gets it."""
    return pickle.loads(buffers.packed(tensor))


def place_of(buffers, tensor):
    """Where a tensor is sent from; None where it does not lie in the block."""
    reduced = buffers.reduced(tensor)
    return None if reduced is NotImplemented or len(reduced[1]) != 2 else reduced[1][1]


def leased(buffers, n_bytes, value=0):
    array = buffers.array((n_bytes,), np.dtype("u1"))
    return None if array is None else torch.from_numpy(array).fill_(value)


def mapped():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "h5_batches" in line]


class Post(RuleBasedStateMachine):
    """A worker's side and the receiver's, in one process; every tensor of either has what was written to it."""

    here, there = Bundle("here"), Bundle("there")

    def __init__(self):
        super().__init__()
        self.memory = WorkerMemory(2, 3 * LARGE)
        self.buffers = self.memory.buffers(1)
        self.held = {}
        self.number = 0

    def hold(self, tensor, value):
        self.number += 1
        self.held[self.number] = tensor, value
        return self.number

    @rule(target=here, size=st.sampled_from([1, 64, 1000, LARGE, 2 * LARGE]), value=st.integers(0, 255))
    def lease(self, size, value):
        tensor = leased(self.buffers, size, value)
        if tensor is None:  # no room: as with torch
            tensor = torch.full((size,), value, dtype=torch.uint8)
        return self.hold(tensor, value)

    @rule(target=there, one=here, cut=st.sampled_from([slice(None), slice(3, None), slice(None, None, 2)]))
    def send(self, one, cut):
        tensor, value = self.held[one]
        return self.hold(through(self.buffers, tensor[cut]), value)

    @rule(one=consumes(here))
    def forget_here(self, one):
        del self.held[one]

    @rule(one=consumes(there))
    def forget_there(self, one):
        del self.held[one]

    @invariant()
    def everything_is_as_it_was_written(self):
        for tensor, value in self.held.values():
            assert bool((tensor == value).all())


Post.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


class TestPost(Post.TestCase):
    pass


def test_parts_are_used_again_once_nobody_has_them():
    memory = WorkerMemory(1, 100 * LARGE)
    buffers, kept, starts = memory.buffers(0), [], set()
    for number in range(300):
        tensor = leased(buffers, LARGE, number % 256)
        starts.add(tensor.data_ptr())
        kept = [*kept[-2:], through(buffers, tensor)]
    assert len(starts) <= 4


def test_a_forked_child_that_forgets_a_batch_gives_nothing_back():
    memory = WorkerMemory(1, 4 * LARGE)
    buffers = memory.buffers(0)
    received = through(buffers, leased(buffers, LARGE, 7))
    with starting_workers():
        if (child := os.fork()) == 0:
            del received
            gc.collect()
            os._exit(0)
    os.waitpid(child, 0)
    again = leased(buffers, LARGE, 9)
    assert bool((received == 7).all())
    assert bool((again == 9).all())


def test_what_a_forked_child_looks_at_is_not_written_to():
    memory = WorkerMemory(1, 4 * LARGE)
    buffers = memory.buffers(0)
    received = through(buffers, leased(buffers, LARGE, 7))

    batch = [received]

    def look():
        time.sleep(0.5)
        assert bytes(memoryview(batch[0].numpy())) == b"\7" * LARGE  # torch's threads do not survive a fork

    child = multiprocessing.get_context("fork").Process(target=look)
    child.start()
    batch.clear()
    del received
    gc.collect()
    for value in range(20):
        through(buffers, leased(buffers, LARGE, value))
    memory.close()
    child.join()
    assert child.exitcode == 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch says so of what it rebuilds
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t(),
        torch.arange(40_000, dtype=torch.int64)[5:-5:3],
        torch.tensor(3.5),
        torch.ones(0, 4),
        torch.ones(1).expand(50_000),
        (torch.arange(3) * 1j).conj(),
        torch._neg_view(torch.arange(3.0)),
        torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(2 * 3 * 90 * 90.0).reshape(2, 3, 90, 90).to(memory_format=torch.channels_last),
        torch.ones(3, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=[
        "bfloat16",
        "strided",
        "scalar",
        "empty",
        "expanded",
        "conjugate",
        "negative",
        "channels last",
        "many",
        "grad",
        "sparse",
        "parameter",
    ],
)
def test_any_tensor_can_be_sent(tensor):
    memory = WorkerMemory(1, 1 << 20)
    received = through(memory.buffers(0), tensor)
    assert type(received) is type(tensor)
    assert received.requires_grad == tensor.requires_grad
    assert torch.equal(received.to_dense(), tensor.to_dense())
    assert tensor.is_sparse or torch.empty_like(tensor).stride() == torch.empty_like(received).stride()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_can_be_sent():
    memory = WorkerMemory(1, 1 << 20)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    received = through(memory.buffers(0), nested)
    assert [part.tolist() for part in received.unbind()] == [[1, 1], [0, 0, 0]]


class Attributes(dict):
    __getattr__ = dict.__getitem__


@dataclass
class Record:
    x: torch.Tensor


class Rows(list):
    def __init__(self, n, values):
        super().__init__(values)
        self.n = n

    def __reduce__(self):
        return Rows, (self.n, list(self))


@pytest.mark.parametrize("n", [4, LARGE])
def test_batches_come_as_what_they_were(n):
    memory = WorkerMemory(1, 40 * LARGE)
    buffers = memory.buffers(0)
    x = torch.arange(n)
    lengths = torch.tensor([n - 1, 2])
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.ones(2, n, 1), lengths, batch_first=True)
    batch = {
        "ordered": OrderedDict(x=x),
        "default": defaultdict(list, x=[x]),
        "attributes": Attributes(x=x),
        "record": Record(x),
        "rows": Rows(3, [x]),
        "packed": packed,
        "text": ["a", "b"],
        "array": np.arange(3),
    }
    batch["itself"] = [batch["text"]]
    batch["itself"].append(batch["itself"])
    received = through(buffers, batch)
    assert {name: type(value) for name, value in received.items()} == {name: type(v) for name, v in batch.items()}
    for value in (received["ordered"]["x"], received["default"]["x"][0], received["attributes"].x):
        assert torch.equal(value, x)
    assert torch.equal(received["record"].x, x)
    assert torch.equal(received["rows"][0], x)
    assert received["rows"].n == 3
    assert torch.equal(received["packed"].data, packed.data)
    assert received["itself"][1] is received["itself"]


def test_a_batch_that_cannot_be_pickled_gives_its_places_back():
    memory = WorkerMemory(1, 4 * LARGE)
    buffers = memory.buffers(0)
    for _ in range(30):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            through(buffers, [leased(buffers, LARGE), lambda: None])
    gc.collect()
    assert leased(buffers, 3 * LARGE) is not None


def test_more_tensors_than_tickets_go_the_usual_way(monkeypatch):
    memory = WorkerMemory(1, 40 * LARGE)
    buffers = memory.buffers(0)
    del buffers._tickets[3:]
    sent = [torch.full((LARGE,), number, dtype=torch.uint8) for number in range(6)]
    assert [place_of(buffers, tensor) is None for tensor in sent] == [False] * 3 + [True] * 3


def test_many_small_tensors_travel_with_the_message():
    memory = WorkerMemory(1, 1 << 20)
    buffers = memory.buffers(0)
    batch = [torch.tensor([number]) for number in range(3 * TICKETS)]
    assert [int(value) for value in through(buffers, batch)] == list(range(3 * TICKETS))
    assert len(buffers._tickets) == TICKETS
    assert not buffers._parts


def test_a_tensor_that_is_kept_lets_the_rest_go_without_a_collection():
    memory = WorkerMemory(1, 64 << 20)
    descriptor = os.dup(memory._memory.descriptor)
    buffers = memory.buffers(0)
    kept = through(buffers, leased(buffers, LARGE, 5))
    through(buffers, leased(buffers, 32 << 20, 6))
    del buffers
    gc.disable()
    try:
        del memory
        assert os.fstat(descriptor).st_blocks * 512 < 2 * LARGE + (4 << 20)
    finally:
        gc.enable()
        os.close(descriptor)
    assert bool((kept == 5).all())


def test_what_is_kept_stays_and_the_rest_goes_when_workers_end():
    memory = WorkerMemory(2, 64 << 20)
    descriptor = os.dup(memory._memory.descriptor)
    buffers = memory.buffers(1)
    kept = through(buffers, leased(buffers, LARGE, 5))
    passing = through(buffers, leased(buffers, 32 << 20, 6))
    del passing
    before = os.fstat(descriptor).st_blocks * 512
    memory.close()
    del memory, buffers
    gc.collect()
    assert before > 32 << 20
    assert os.fstat(descriptor).st_blocks * 512 < 2 * LARGE + (4 << 20)  # pages may be of two mebibytes
    assert bool((kept == 5).all())
    os.close(descriptor)


@pytest.mark.parametrize("call", ["ftruncate", "memfd_create"])
def test_where_the_system_has_no_memory_torch_is_left(monkeypatch, call):
    monkeypatch.setattr(f"lightning_h5.datasets.shard_memory.os.{call}", refuse)
    assert worker_memory(2, 1 << 20) is None


def refuse(*_):
    raise OSError(12, "no memory")


# Through a loader ------------------------------------------------------------------------------------------------

ROWS, ROW = 96, 8192


class InPlace:
    """A transform that says where it runs, and what it got."""

    def __call__(self, batch):
        x, y = batch
        return {"x": x, "half": x[:, ::2], "y": y, "who": [f"p{row}" for row in y.tolist()], "worker": worker()}


def worker():
    info = get_worker_info()
    return -1 if info is None else info.id


def loader_of(make_h5, **options):
    rows = (np.arange(ROWS)[:, None] + np.arange(ROW)).astype("f4")
    path = make_h5(x=Stored(rows, "chunked", (8, ROW), {"compression": "gzip"}), y=np.arange(ROWS))
    dataset = H5LazyDataset(path, "x", "y", batch_transform=InPlace())
    sampler = PlanSampler(dataset.blocks(), OrderParameters(mode="global", batch_size=8), batch_size=8)
    return H5DataLoader(dataset, sampler=sampler, **options)


def check(batches):
    for batch in batches:
        expected = batch["y"][:, None] + torch.arange(ROW)
        assert torch.equal(batch["x"], expected.float())
        assert torch.equal(batch["half"], expected.float()[:, ::2])
        assert batch["who"] == [f"p{row}" for row in batch["y"].tolist()]
    return sorted(row for batch in batches for row in batch["y"].tolist())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("method", "persistent"),
    [
        pytest.param("fork", True, id="fork-persistent"),
        pytest.param("fork", False, id="fork-new"),
        pytest.param("forkserver", True, id="forkserver-persistent"),
        pytest.param("forkserver", False, id="forkserver-new"),
        pytest.param("spawn", True, id="spawn-persistent"),
        pytest.param("spawn", False, id="spawn-new", marks=pytest.mark.slow),  # six interpreters
    ],
)
def test_batches_of_workers_lie_in_their_memory_and_stay_as_they_are(make_h5, method, persistent):
    loader = loader_of(make_h5, num_workers=2, multiprocessing_context=method, persistent_workers=persistent)
    kept = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        kept.append(list(loader))
    for batches in kept:
        assert check(batches) == list(range(ROWS))
        assert {batch["worker"] for batch in batches} == {0, 1}
    assert mapped()
    x = kept[0][0]["x"]
    x.zero_()
    assert not kept[0][0]["half"].any()  # as in the worker, where one is a view of the other
    assert check(kept[0][1:] + kept[1] + kept[2])
    del kept, batches, x, loader
    gc.collect()
    assert not mapped()


def test_more_batches_than_have_room_are_all_as_read(make_h5, monkeypatch):
    monkeypatch.setattr("lightning_h5.loading.workers.N_SHARED", 0)
    monkeypatch.setattr("lightning_h5.loading.workers.MIN_SHARED", 3 * 8 * ROW * 4)
    assert check(list(loader_of(make_h5, num_workers=2))) == list(range(ROWS))


def test_a_closed_loader_leaves_what_was_given_out(make_h5):
    loader = loader_of(make_h5, num_workers=2, persistent_workers=True)
    batches = iter(loader)
    kept = [next(batches) for _ in range(3)]
    loader.close()
    assert len(check(kept)) == 24
    with pytest.raises(H5Error, match="closed in the middle"):
        next(batches)
    del kept, batches
    gc.collect()
    assert not mapped()
    assert check(list(loader)) == list(range(ROWS))
