"""Which order training takes: from how dear single rows are, and from the memory that may mix them."""

import logging
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from arguments import nested
from factories import Stored
from hypothesis import given
from hypothesis import strategies as st
from lightning_models import Recorder, SaveOnException, quiet_trainer, together

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5LazyDataset,
    H5ResumeError,
    H5ValueError,
    LazyH5DataModule,
    ShuffleOptions,
    create_optimized_dataloader,
)
from lightning_h5.loading.choose_order import FEW_BLOCKS, LARGE_ROW, choose_order
from lightning_h5.memory import FREE_SHARE
from lightning_h5.order.position import _digest_of_state
from lightning_h5.samples.read_costs import ReadCost

ROWS, WIDTH, PER_CHUNK = 400, 25, 8
BLOCK = PER_CHUNK * WIDTH * 8
VALUES = np.arange(ROWS * WIDTH, dtype="i8").reshape(ROWS, WIDTH)
LAYOUTS = {
    "contiguous": Stored(VALUES),
    "no filter": Stored(VALUES, "chunked", (PER_CHUNK, WIDTH)),
    "gzip, one row a chunk": Stored(VALUES, "chunked", (1, WIDTH), {"compression": "gzip"}),
    "gzip": Stored(VALUES, "chunked", (PER_CHUNK, WIDTH), {"compression": "gzip"}),
    "no filter, rows over several chunks": Stored(VALUES, "chunked", (PER_CHUNK, 10)),
    "scale-offset": Stored(VALUES, "chunked", (PER_CHUNK, WIDTH), {"scaleoffset": 0}),
}

pytestmark = pytest.mark.usefixtures("nothing_held")


@pytest.fixture
def module(make_h5):
    def make(layout="gzip", **options):
        path = make_h5(x=LAYOUTS[layout])
        common = {"x_key": "x", "batch_size": 16, "with_index": True, "shuffle_bytes": 10 * BLOCK}
        return LazyH5DataModule(path, **nested(**(common | options)))

    return make


def order_of(datamodule):
    datamodule.setup("fit")
    return datamodule.train_dataloader().sampler.present_order()


def rows_of(datamodule, epoch=0):
    """Rows of each batch."""
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    loader.sampler.set_epoch(epoch)
    batches = []
    for x, rows in loader:
        assert np.array_equal(x.numpy(), VALUES[rows])
        batches.append(rows.tolist())
    datamodule.teardown()
    return batches


@pytest.mark.parametrize("layout", LAYOUTS)
def test_true_takes_the_global_order_where_single_rows_cost_no_more(module, layout):
    is_dear = layout in ("gzip", "no filter, rows over several chunks", "scale-offset")
    assert order_of(module(layout)).mode == ("chunks" if is_dear else "global")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_true_takes_the_global_order_where_all_rows_fit(module, layout):
    assert order_of(module(layout, shuffle={"buffer": VALUES.nbytes})).mode == "global"


def test_workers_that_each_have_a_cache_of_their_own_do_not_hold_all_rows(module):
    assert order_of(module(shuffle={"buffer": VALUES.nbytes}, num_workers=2)).mode == "chunks"
    assert order_of(module(shuffle={"buffer": 2 * VALUES.nbytes}, num_workers=2)).mode == "global"


@pytest.mark.parametrize("mode", ["global", "chunks"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_either_order_gives_every_row_once_for_any_layout(module, mode, layout, num_workers):
    epochs = [rows_of(module(layout, shuffle=mode, num_workers=num_workers), epoch) for epoch in range(2)]
    assert epochs[0] != epochs[1]
    for batches in epochs:
        assert sorted(row for batch in batches for row in batch) == list(range(ROWS))


def test_it_says_once_which_order_it_took_and_why(module, caplog):
    with caplog.at_level(logging.INFO):
        datamodule = module()
        for _ in range(2):
            rows_of(datamodule)
    said = [record.getMessage() for record in caplog.records if "training order" in record.getMessage()]
    assert len(said) == 1
    assert "chunks over 400 rows" in said[0]
    assert "8 blocks mixed at a time" in said[0]
    assert "a single row costs a block" in said[0]
    assert said[0].endswith("; integrity level 1 of 4")


@pytest.mark.parametrize(
    ("layout", "reason"),
    [("no filter", "random access is as cheap as sequential access"), ("gzip", "a single row costs a block")],
)
def test_the_order_is_logged_with_its_reason(module, caplog, layout, reason):
    with caplog.at_level(logging.INFO):
        rows_of(module(layout))
    assert reason in caplog.text


def test_a_small_window_is_named_with_its_cure(module, caplog):
    with caplog.at_level(logging.INFO):
        order_of(module())
        order_of(module(shuffle={"buffer": 43 * BLOCK}))
    told = [record.getMessage() for record in caplog.records if "neighboring" in record.getMessage()]
    assert len(told) == 1  # 33 blocks of the 43 are enough
    assert "mixes 8 blocks" in told[0]
    assert "Raise shuffle.buffer to '1 MiB'" in told[0]


def test_memory_that_cannot_hold_all_rows_in_random_order_is_named(module, caplog):
    with caplog.at_level(logging.INFO):
        for layout, mode, size in (("gzip", "global", VALUES.nbytes - 1), ("gzip", "global", VALUES.nbytes)):
            order_of(module(layout, shuffle=mode, files={"cache_bytes": size}))
        order_of(module("gzip", shuffle="chunks", files={"cache_bytes": BLOCK}))
        order_of(module("contiguous", shuffle="global", files={"cache_bytes": BLOCK}))
        order_of(module("gzip", shuffle="global"))
    (told,) = [record.getMessage() for record in caplog.records if "cache_bytes" in record.getMessage()]
    assert "chunks are decoded several times in each epoch" in told
    assert "pass shuffle='chunks'" in told


@pytest.mark.parametrize("decoded", [False, True])
def test_memory_for_few_rows_is_not_named_if_a_disk_keeps_decoded_chunks(make_h5, tmp_path, caplog, decoded):
    x = np.zeros((256, 8192), "u1")
    path = make_h5(x=Stored(x, "chunked", (8, 8192), {"compression": "gzip"}))
    options = {
        "shuffle": "global",
        "cache_bytes": "1 MiB",
        "staging": {"dir": str(tmp_path / "node"), "decoded": decoded},
    }
    with caplog.at_level(logging.INFO):
        order_of(LazyH5DataModule(path, **nested(x_key="x", batch_size=16, **options)))
    assert ("files.cache_bytes (1.0 MiB) cannot hold" in caplog.text) != decoded


@given(
    rows_per_chunk=st.integers(1, 3),
    n_chunks=st.integers(10, 80),
    buffer=st.integers(1, 64 << 20),
    num_workers=st.integers(0, 3),
    streams=st.none() | st.integers(1, 4),
    mode=st.sampled_from(["auto", "chunks"]),
)
def test_the_buffer_that_is_advised_is_enough(rows_per_chunk, n_chunks, buffer, num_workers, streams, mode):
    cost = ReadCost(1 << 20, False, rows_per_chunk << 20, n_chunks * rows_per_chunk << 20)
    dataset = SimpleNamespace(cost=cost)

    def order(buffer):
        shuffle = ShuffleOptions(mode=mode, buffer=buffer, streams=streams)
        return choose_order(dataset, shuffle, world_size=2, num_workers=num_workers)

    def is_advised(order):
        return order.mode == "chunks" and order.window < FEW_BLOCKS

    if is_advised(found := order(buffer)):
        advised = -(-found.enough >> 20) << 20
        assert not is_advised(order(advised))
        assert is_advised(order(found.enough - 1))  # no less is enough


def test_setting_what_is_advised_removes_the_advice(module, make_h5, caplog):
    stored = Stored(np.zeros((120, 1 << 18), "u1"), "chunked", (2, 1 << 18), {"compression": "gzip"})
    path = make_h5(x=stored)

    def told(**options):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            order_of(LazyH5DataModule(path, **nested(x_key="x", batch_size=4, seed=1, **options)))
        return [record.getMessage() for record in caplog.records if "neighboring" in record.getMessage()]

    for more in ({}, {"num_workers": 2}, {"streams": 3}, {"shuffle": "chunks"}):
        (advice,) = told(shuffle_bytes="4 MiB", **more)
        advised = re.search(r"Raise shuffle.buffer to '(\d+ MiB)'", advice)[1]
        assert told(shuffle_bytes=advised, **more) == []


def test_the_buffer_decides_how_many_blocks_are_mixed_and_cache_bytes_does_not(module):
    assert order_of(module()).window == 8
    assert order_of(module(shuffle={"buffer": 20 * BLOCK})).window == 15
    assert order_of(module(shuffle={"buffer": 1})).window == 1
    for cache_bytes in (0, BLOCK, 10**6):
        assert rows_of(module(files={"cache_bytes": cache_bytes})) == rows_of(module())


@pytest.mark.parametrize("cache_bytes", [0, 3 * BLOCK])
def test_given_cache_bytes_are_what_train_and_validation_data_may_take(module, make_h5, cache_bytes):
    datamodule = module(files={"cache_bytes": cache_bytes}, split=0.5)
    datamodule.setup("fit")
    for loader in (datamodule.train_dataloader(), datamodule.val_dataloader()):
        assert loader.dataset.cache_bytes == cache_bytes
        assert len(loader.dataset) == sum(len(rows) for _, rows in loader)
    datamodule.teardown()


def test_each_consumer_has_a_lane_and_shares_the_window(module):
    order = order_of(module(num_workers=2, world_size=3, rank=1, shuffle={"buffer": 40 * BLOCK}))
    assert (order.streams, order.window) == (6, 15)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_given_streams_fix_the_order_for_any_number_of_ranks_and_workers(module, world_size, num_workers):
    batches = {}
    for rank in range(world_size):
        mine = rows_of(module(streams=4, num_workers=num_workers, world_size=world_size, rank=rank, drop_last=True))
        batches |= {step * world_size + rank: rows for step, rows in enumerate(mine)}
    alone = rows_of(module(streams=4, drop_last=True))
    assert [batches[place] for place in sorted(batches)] == alone[: len(batches)]


def test_labels_sorted_in_the_file_are_mixed_in_each_batch(make_h5):
    path = make_h5(x=LAYOUTS["gzip"], y=np.arange(ROWS) // (ROWS // 4))
    datamodule = LazyH5DataModule(
        path,
        x_key="x",
        y_key="y",
        batch_size=16,
        shuffle={"buffer": 43 * BLOCK},
    )
    datamodule.setup("fit")
    assert all(len(set(y.tolist())) > 1 for _, y in datamodule.train_dataloader())


def fit(datamodule, folder=None, fail_at=None, ckpt_path=None, epochs=2):
    model = Recorder(fail_at=fail_at)
    callbacks = [SaveOnException(folder)] if folder else []
    trainer = quiet_trainer(max_epochs=epochs, callbacks=callbacks)
    if fail_at is None:
        trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    else:
        with pytest.raises(RuntimeError, match="stop here"):
            trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    return model.train_rows


@pytest.mark.wide
@pytest.mark.parametrize("stop", [(0, 1), (0, 24), (1, 7)])
@pytest.mark.parametrize("workers", [(0, 0), (2, 2)])
def test_a_window_goes_on_exactly_where_it_was_broken_off(tmp_path, make_h5, stop, workers):
    path = make_h5(x=LAYOUTS["gzip"])

    def make(num_workers):
        return LazyH5DataModule(
            path, x_key="x", batch_size=16, with_index=True, shuffle={"buffer": 10 * BLOCK}, num_workers=num_workers
        )

    before = fit(make(workers[0]), tmp_path, fail_at=stop)
    (saved,) = tmp_path.glob("*.ckpt")
    after = fit(make(workers[1]), ckpt_path=saved)
    assert together(before, after) == fit(make(workers[0]))


CHANGES = {
    "more workers": {"num_workers": 2},
    "another window": {"shuffle_bytes": 30 * BLOCK},
    "room for all rows": {"shuffle_bytes": "1 GiB"},
    "another batch size": {"batch_size": 10},
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_epoch_that_was_broken_off_keeps_its_own_order(tmp_path, make_h5, change):
    path = make_h5(x=LAYOUTS["gzip"])
    common = {"x_key": "x", "batch_size": 16, "with_index": True, "shuffle_bytes": 10 * BLOCK}
    before = fit(LazyH5DataModule(path, **nested(**common)), tmp_path, fail_at=(0, 9))
    (saved,) = tmp_path.glob("*.ckpt")
    after = fit(LazyH5DataModule(path, **nested(**(common | CHANGES[change]))), ckpt_path=saved)
    whole = fit(LazyH5DataModule(path, **nested(**common)))
    assert before[0] + after[0] == whole[0]
    assert sorted(after[1]) == list(range(ROWS))


def test_another_order_that_was_asked_for_by_name_is_refused(tmp_path, make_h5):
    path = make_h5(x=LAYOUTS["gzip"])
    common = {"x_key": "x", "batch_size": 16, "with_index": True, "shuffle_bytes": 10 * BLOCK}
    fit(LazyH5DataModule(path, **nested(**common)), tmp_path, fail_at=(0, 9))
    (saved,) = tmp_path.glob("*.ckpt")
    with pytest.raises(H5ResumeError, match="order: saved 'chunks', present 'global'"):
        fit(LazyH5DataModule(path, **nested(shuffle="global", **common)), ckpt_path=saved)


def test_a_checkpoint_that_has_the_old_word_for_the_order_is_resumed(tmp_path, make_h5):
    path = make_h5(x=LAYOUTS["gzip"])
    common = {"x_key": "x", "batch_size": 16, "with_index": True, "shuffle_bytes": 10 * BLOCK}
    before = fit(LazyH5DataModule(path, **nested(**common)), tmp_path, fail_at=(0, 9))
    (saved,) = tmp_path.glob("*.ckpt")
    checkpoint = torch.load(saved, weights_only=True)
    state = checkpoint["LazyH5DataModule"]
    assert state["order"]["mode"] == "chunks"
    state["order"]["mode"] = "window"
    state["digest"] = _digest_of_state(state)
    torch.save(checkpoint, saved)
    for shuffle in ({}, {"shuffle": "chunks"}):
        after = fit(LazyH5DataModule(path, **nested(**common, **shuffle)), ckpt_path=saved)
        assert together(before, after) == fit(LazyH5DataModule(path, **nested(**common, **shuffle)))


@pytest.mark.parametrize("shuffle", ["window", {"mode": "window"}])
def test_the_old_word_as_an_argument_is_an_error_that_names_the_new_one(shuffle):
    with pytest.raises(H5ValueError, match="Pass shuffle='chunks'"):
        LazyH5DataModule("x.h5", shuffle=shuffle)
    with pytest.raises(
        H5ValueError, match=r"shuffle.mode='chunk' was given\. Did you mean 'chunks'\? Pass .*'chunks', 'none'"
    ):
        LazyH5DataModule("x.h5", shuffle="chunk")


# Files larger than memory -----------------------------------------------------------------------------------------


def rows_in_place(stored, row_bytes=4096, cheap=True):
    """A data set of rows at known places, as far as an order asks for it."""
    return SimpleNamespace(cost=ReadCost(row_bytes, cheap, 1 << 20, stored, stored))


@given(
    stored=st.integers(1, 1 << 44),
    memory=st.none() | st.integers(0, 1 << 44),
    row_bytes=st.integers(1, 1 << 22),
    world_size=st.integers(1, 8),
    num_workers=st.integers(0, 4),
)
def test_single_rows_are_cheap_if_memory_can_keep_them(stored, memory, row_bytes, world_size, num_workers):
    shuffle = ShuffleOptions()
    order = choose_order(
        rows_in_place(stored, row_bytes), shuffle, world_size=world_size, num_workers=num_workers, memory=memory
    )
    exceeds = memory is not None and stored > memory * FREE_SHARE
    fits_buffer = stored * max(1, num_workers) <= shuffle.buffer_bytes
    assert order.exceeds_memory == exceeds
    assert order.mode == ("chunks" if exceeds and row_bytes < LARGE_ROW and not fits_buffer else "global")
    assert "free to keep them" in order.why or order.mode == "global"


def test_a_mode_that_was_asked_for_is_kept_whatever_memory_there_is():
    for mode in ("global", "chunks", "none"):
        for memory in (1, 1 << 40):
            order = choose_order(
                rows_in_place(1 << 35), ShuffleOptions(mode=mode), world_size=1, num_workers=0, memory=memory
            )
            assert order.mode == mode


@pytest.mark.parametrize("kept", ["global", "chunks"])
def test_the_mode_of_an_interrupted_run_is_kept(kept):
    for memory in (None, 1, 1 << 40):
        order = choose_order(
            rows_in_place(1 << 35), ShuffleOptions(), world_size=2, num_workers=0, memory=memory, saved_mode=kept
        )
        assert order.mode == kept
        assert "resumed" in order.why


def test_the_log_has_the_reason_and_both_rates(make_h5, monkeypatch, caplog):
    monkeypatch.setattr("lightning_h5.datamodules.base.page_cache_memory", lambda: 1 << 20)
    path = make_h5(x=np.arange(3000.0 * 256).reshape(3000, 256))
    with caplog.at_level(logging.INFO):
        order_of(LazyH5DataModule(path, x_key="x", shuffle={"buffer": "1 MiB"}))
    assert "the rows (5.9 MiB) exceed 80% of the 1.0 MiB that are free to keep them" in caplog.text
    assert re.search(
        r"the disk reads about [\d,]+ single rows per second of 'x', and [\d,]+ in runs of rows", caplog.text
    )


@pytest.mark.parametrize("kind", [LazyH5DataModule, CombinedHDF5DataModule])
@pytest.mark.parametrize("began_with", [1, 1 << 40])
def test_a_resume_on_another_machine_continues_the_order(tmp_path, make_h5, monkeypatch, kind, began_with):
    """As a run without an interruption: the rest of the epoch, and the next one."""
    path = make_h5(x=np.arange(3000.0 * 256).reshape(3000, 256))
    keys = {"x_key": "x"} if kind is LazyH5DataModule else {"fields": {"x": "x"}}

    def module(memory):
        monkeypatch.setattr("lightning_h5.datamodules.base.page_cache_memory", lambda: memory)
        return kind(path, **keys, batch_size=100, with_index=True, seed=3, shuffle={"buffer": "1 MiB"})

    whole = fit(module(began_with))
    assert all(sorted(rows) == list(range(3000)) for rows in whole.values())
    first = fit(module(began_with), tmp_path, fail_at=(0, 11))
    other = module(1 if began_with > 1 else 1 << 40)
    rest = fit(other, ckpt_path=tmp_path / "exception.ckpt")
    assert together(first, rest) == whole
    assert other.train_dataloader().sampler.parameters.mode == ("chunks" if began_with == 1 else "global")


@pytest.mark.parametrize("began_with", [1, 1 << 40])
def test_a_loop_that_goes_on_on_another_machine_continues_the_order(make_h5, monkeypatch, began_with):
    path = make_h5(x=np.arange(3000.0 * 256).reshape(3000, 256))

    def loader(memory):
        monkeypatch.setattr("lightning_h5.loading.factory.page_cache_memory", lambda: memory)
        return create_optimized_dataloader(
            H5LazyDataset(path, "x", with_index=True), batch_size=100, shuffle={"buffer": "1 MiB"}, num_workers=0
        )

    def rows(batches):
        return [batch[-1].tolist() for batch in batches]

    first = loader(began_with)
    whole = rows(first)
    first.sampler.set_epoch(1)
    whole += rows(first)
    broken, seen = loader(began_with), []
    for batch in broken:
        seen += rows([batch])
        if len(seen) == 11:
            state = broken.state_dict()
            break
    other = loader(1 if began_with > 1 else 1 << 40)
    other.load_state_dict(state)
    seen += rows(other)
    other.sampler.set_epoch(1)
    assert seen + rows(other) == whole
    assert other.dataset.in_runs == (began_with == 1)
