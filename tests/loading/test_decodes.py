"""How often chunks are decoded: once an epoch, whoever reads, in windows that fit the cache to the byte."""

import numpy as np
import pytest
from arguments import nested
from factories import Stored

from lightning_h5 import LazyH5DataModule

ROWS, WIDTH, PER_CHUNK = 20_011, 24, 32
BLOCK = PER_CHUNK * WIDTH
CHUNKS = -(-ROWS // PER_CHUNK)
VALUES = np.random.default_rng(0).integers(0, 9, (ROWS, WIDTH), dtype="u1")
BUDGET = 160 * BLOCK  # of 626 chunks

pytestmark = pytest.mark.usefixtures("nothing_held")


@pytest.fixture
def file(make_h5):
    return make_h5(x=Stored(VALUES, "chunked", (PER_CHUNK, WIDTH), {"compression": "gzip"}))


def decodes(file, epochs, *, world_size=1, num_workers=0, n_expected=ROWS, **options):
    """Chunks that all ranks decode in each epoch; checks that each row comes once."""
    common = {"x_key": "x", "batch_size": 64, "with_index": True, "shuffle_bytes": BUDGET, "cache_bytes": BUDGET}
    found = np.zeros(epochs)
    seen = [[] for _ in range(epochs)]
    for rank in range(world_size):
        module = LazyH5DataModule(
            file, **nested(**(common | options), num_workers=num_workers, world_size=world_size, rank=rank)
        )
        module.setup("fit")
        loader = module.train_dataloader()
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            before = loader.counters.total()["chunks_decoded"]
            for _, rows in loader:
                seen[epoch] += rows.tolist()
            found[epoch] += loader.counters.total()["chunks_decoded"] - before
        module.teardown()
    assert all(sorted(rows) == list(range(n_expected)) for rows in seen)
    return found


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("together", ["32 rows a chunk", "coarser blocks than the cache was cut for"])
def test_one_rank_decodes_each_chunk_once_an_epoch(file, shuffle, together):
    options = {} if together.startswith("32") else {"batch_size": 500}
    found = decodes(file, 4, shuffle=shuffle, **options)
    assert found[0] == CHUNKS
    assert (found[1:] <= CHUNKS).all()  # what is left of the epoch before need not be decoded again
    assert (found[1:] >= CHUNKS - BUDGET // BLOCK).all()


def test_an_epoch_that_is_read_again_decodes_each_chunk_once_again(file):
    module = LazyH5DataModule(
        file,
        x_key="x",
        batch_size=64,
        shuffle={"buffer": BUDGET},
        files={"cache_bytes": BUDGET},
    )
    module.setup("fit")
    loader = module.train_dataloader()
    for _ in range(3):
        loader.sampler.set_epoch(4)
        before = loader.counters.total()["chunks_decoded"]
        assert sum(len(x) for x in loader) == ROWS
        assert loader.counters.total()["chunks_decoded"] - before <= CHUNKS
    module.teardown()


FILTERED = {"all rows": {}, "half of the rows": {"val_fraction": 0.5}}


@pytest.mark.wide
@pytest.mark.parametrize("rows", FILTERED)
@pytest.mark.parametrize(("world_size", "num_workers"), [(2, 2), (2, 0), (1, 2), (3, 1)])
def test_several_ranks_and_workers_decode_little_twice(file, rows, world_size, num_workers):
    n_expected = ROWS if rows == "all rows" else 10_006
    found = decodes(file, 2, world_size=world_size, num_workers=num_workers, n_expected=n_expected, **FILTERED[rows])
    assert (found <= 1.1 * CHUNKS).all()


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_however_workers_start(file, method):
    found = decodes(file, 1, world_size=2, num_workers=2, multiprocessing_context=method)
    assert found[0] <= 1.1 * CHUNKS


def test_where_all_decoded_rows_fit_later_epochs_decode_nothing(file):
    found = decodes(file, 3, shuffle={"buffer": VALUES.nbytes + BLOCK}, files={"cache_bytes": "auto"})
    assert found.tolist() == [CHUNKS, 0, 0]


def test_evaluation_decodes_each_chunk_once_and_keeps_little(file):
    module = LazyH5DataModule(
        val_path=file,
        x_key="x",
        batch_size=64,
        files={"cache_bytes": BUDGET},
    )
    module.setup("validate")
    loader = module.val_dataloader()
    for epoch in range(2):
        for _ in loader:
            pass
        assert loader.counters.total()["chunks_decoded"] >= (epoch + 1) * (CHUNKS - BUDGET // BLOCK)
        assert loader.counters.total()["chunks_decoded"] <= (epoch + 1) * CHUNKS
    module.teardown()
