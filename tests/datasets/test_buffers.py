"""Memory for batches is used again; where there is none, the error says what was asked for, and what to do."""

import h5py
import numpy as np
import pytest
import torch

from lightning_h5 import H5Error, LazyH5DataModule
from lightning_h5.datasets.sample_layout import collated
from lightning_h5.readers.buffers import BufferPool, tensor_of

FLOATS = np.dtype("f4")
ASKED = r"a batch of 3 rows needs an array of 13,510,798,882,111,488 bytes \(12,288\.0 TiB\).* smaller batch_size"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: BufferPool().array((3, 2**50), FLOATS),
        lambda: BufferPool().array((3, 2**49), np.dtype(object)),
        lambda: BufferPool().tensor((3, 2**50), torch.float32),
    ],
    ids=["numbers", "objects", "tensor"],
)
def test_a_batch_without_room_in_memory_is_an_error_of_ours_and_a_memory_error(ask):
    for kind in (H5Error, MemoryError):
        with pytest.raises(kind, match=ASKED):
            ask()


def test_a_pool_gives_the_same_memory_again_and_none_that_is_too_small():
    pool = BufferPool()
    first = pool.array((64, 1 << 12), FLOATS)
    place = first.__array_interface__["data"][0]
    del first
    assert pool.tensor((64, 1 << 12), torch.bfloat16).data_ptr() == place
    larger = pool.tensor((65, 1 << 12), torch.float32)
    assert (larger.shape, larger.dtype) == ((65, 1 << 12), torch.float32)
    larger[:] = 1  # all of it is there


def padded_with_zeros(values):
    """Pad with zeros up to the longest of each axis."""
    batch = torch.zeros((len(values), *map(max, zip(*(value.shape for value in values), strict=True))))
    for place, value in zip(batch, values, strict=True):
        place[tuple(map(slice, value.shape))] = value
    return batch


def test_padded_batches_use_the_memory_of_those_that_were_freed_and_have_zeros_beyond_each_sample():
    pool, rng, places = BufferPool(), np.random.default_rng(0), []
    kept = None
    for number in range(6):
        shapes = [(400 - number, 64, 3), *rng.integers(0, [300, 64, 3], (9, 3)).tolist()]
        values = [torch.from_numpy(rng.standard_normal(shape, dtype="f4")) for shape in shapes]
        batch = collated(values, "pad", pool)
        torch.testing.assert_close(batch, padded_with_zeros(values), rtol=0, atol=0)
        places.append(batch.data_ptr())
        if number == 2:
            kept, expected = batch, batch.clone()
        del batch
    assert len(set(places)) == 2, "the one that is kept, and another"
    assert places[2] not in places[3:]
    torch.testing.assert_close(kept, expected, rtol=0, atol=0)
    assert collated([torch.zeros(0, 3), torch.zeros(0, 2)], "pad", pool).shape == (2, 0, 3)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_whose_batch_finds_no_room_says_so_from_a_worker_too(tmp_path, num_workers):
    path = tmp_path / "wide.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (6, 2**50), "f4")
    module = LazyH5DataModule(
        path,
        x_key="x",
        batch_size=3,
        num_workers=num_workers,
        files={"trusted": True},
    )
    module.setup("fit")
    try:
        with pytest.raises(MemoryError, match=ASKED):
            next(iter(module.train_dataloader()))
    finally:
        module.teardown("fit")


@pytest.mark.parametrize("dtype", ["u1", "f2", "i8", "c8"])
def test_page_locked_memory_stays_a_view_of_what_torch_allocated(dtype, monkeypatch):
    empty, made = torch.empty, []

    def locked(*sizes, pin_memory=False, **options):
        made.append(empty(*sizes, **options))
        assert pin_memory
        return made[-1]

    monkeypatch.setattr("lightning_h5.readers.buffers.torch.empty", locked)
    pool = BufferPool()
    pool.pins = True
    rows = pool.array((1 << 10, 1 << 8), np.dtype(dtype))
    rows[:] = np.arange(1 << 8).astype(dtype)
    (block,) = made
    for part in (rows, rows[3:], rows[5:9].reshape(2, -1)):
        tensor = tensor_of(part)
        assert tensor.untyped_storage()._cdata == block.untyped_storage()._cdata  # the storage that torch knows
        assert np.array_equal(tensor.numpy(), part)
    assert np.array_equal(tensor_of(rows[:, ::2]).numpy(), rows[:, ::2])


def test_where_no_more_pages_can_be_locked_memory_is_ordinary(monkeypatch):
    def refuses(*sizes, **options):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("lightning_h5.readers.buffers.torch.empty", refuses)
    pool = BufferPool()
    pool.pins = True
    assert pool.array((1 << 10, 1 << 8), FLOATS).shape == (1 << 10, 1 << 8)
