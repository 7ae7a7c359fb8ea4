"""Bytes that are compared whole when a run resumes: a value that differs anywhere in them is noticed."""

import json
import os
import shutil
from contextlib import nullcontext

import h5py
import numpy as np
import pytest
from factories import Stored
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_models import Recorder, quiet_trainer
from tiers import examples

from lightning_h5 import H5LazyDataset, H5ResumeError, LazyH5DataModule, RankCachedH5DataModule, RankMemCachedH5Dataset
from lightning_h5.catalog import content_digest
from lightning_h5.datasets import held_rows

LAYOUTS = {
    "contiguous": {},
    "compact": {"storage": "compact"},
    "chunked": {"storage": "chunked", "chunks": (7, 2)},
    "gzip": {"storage": "chunked", "chunks": (7, 2), "options": {"compression": "gzip", "shuffle": True}},
    "lzf": {"storage": "chunked", "chunks": (40, 4), "options": {"compression": "lzf"}},
}
ROWS, COLUMNS = 300, 5
PAD = np.zeros(1 << 17, np.uint8)  # of which samples of the file are taken


@pytest.fixture
def large(monkeypatch):
    """Files are too large to be read whole, and only small arrays are."""
    monkeypatch.setattr(content_digest, "MAX_WHOLE_BYTES", 20_000)


def whole(path, x_key="x", y_key="y", **options):
    return H5LazyDataset(path, x_key, y_key, **options).identity().get("whole")


def change(path, key, index, value):
    with h5py.File(path, "a") as file:
        file[key][index] = value


@pytest.mark.property
@settings(max_examples=examples(60))
@given(
    layout=st.sampled_from([*LAYOUTS]),
    dtype=st.sampled_from(["u1", "i2", ">i4", "i8", "f2", "f4", ">f8"]),
    row=st.integers(0, ROWS - 1),
    column=st.integers(0, COLUMNS - 1),
)
def test_a_single_value_that_was_changed_in_place_refuses_a_resume(make_h5, layout, dtype, row, column):
    values = np.random.default_rng(row).integers(0, 100, (ROWS, COLUMNS)).astype(dtype)
    path = make_h5(x=Stored(values, **LAYOUTS[layout]), pad=PAD)
    module = LazyH5DataModule(path, x_key="x", batch_size=8)
    module.setup("fit")
    loader = module.train_dataloader()
    next(iter(loader))
    state = loader.state_dict()
    module.teardown()
    change(path, "x", (row, column), values[row, column] + 1)
    module = LazyH5DataModule(path, x_key="x", batch_size=8)
    module.setup("fit")
    with pytest.raises(H5ResumeError, match="files"):
        module.train_dataloader().load_state_dict(state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_arrays_of_large_files_are_compared_whole(make_h5, large, layout):
    y = Stored(np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS), **LAYOUTS[layout])
    path = make_h5(x=np.zeros((ROWS, 100)), y=y, pad=PAD)
    before = whole(path)
    change(path, "x", (150, 3), 1)  # 240,000 bytes
    assert whole(path) == before is not None
    change(path, "y", (150, 3), -1)
    assert whole(path) != before


def test_text_and_tables_of_large_files_are_compared_whole(make_h5, large):
    table = np.zeros(100, [("a", "i4"), ("b", "f4")])
    names = Stored(np.array([f"row {i}" for i in range(15)], object), dtype=h5py.string_dtype())
    path = make_h5(table=table, names=names, pad=PAD)
    found = [whole(path, "table/a", None), whole(path, ["names"], None)]
    change(path, "names", 7, "row X")  # of the same length
    assert whole(path, "table/a", None) == found[0]
    assert whole(path, ["names"], None) != found[1]
    change(path, "table", 7, (1, 0))
    assert whole(path, ["table/a", "table/b"], None) == whole(path, "table/a", None) != found[0]


def test_an_array_is_compared_as_it_is_stored_however_it_is_seen(make_h5, large):
    path = make_h5(x=np.arange(2_000).reshape(20, 2, 50).astype("u1"), pad=PAD)
    before, packed = whole(path, "x", None, decode={"x": "bits:400"}), whole(path, "x", None, select={"x": {2: [3]}})
    assert before == packed == whole(path, "x", None)
    change(path, "x", (3, 1, 7), 1)
    assert whole(path, "x", None, select={"x": {2: [3]}}) != packed


def test_copies_are_equal_and_each_file_counts(make_h5, tmp_path):
    paths = [make_h5(x=np.arange(10), y=np.arange(10) + i) for i in range(3)]
    os.makedirs(tmp_path / "copies")
    copies = [shutil.copy(path, tmp_path / "copies") for path in paths]
    assert whole(paths) == whole(copies) != whole(paths[::-1])
    change(copies[1], "y", 9, 1)
    assert whole(paths) != whole(copies)


def test_a_file_larger_than_what_is_read_at_a_time_is_read_to_its_end(make_h5, monkeypatch):
    monkeypatch.setattr(content_digest, "PIECE_BYTES", 1_000)
    path = make_h5(x=np.arange(1_000), y=np.arange(1_000))
    found = {whole(path)}
    for row in (0, 130, 999):
        change(path, "y", row, -1)
        found.add(whole(path))
    assert len(found) == 4


def test_the_largest_arrays_are_left_out(make_h5, large):
    path = make_h5(x=np.zeros(1_500), y=np.zeros(1_500, "i2"), z=np.zeros((1_500, 2)), pad=PAD)
    found = [whole(path, keys, None) for keys in ("z", ["z", "y"], ["z", "y", "x"], "y")]
    assert found[0] is None
    assert found[1] == found[3] != found[2]


def test_bytes_that_cannot_be_read_leave_the_samples(make_h5, monkeypatch):
    path = make_h5(x=np.arange(10))

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(content_digest, "_checksum", fail)
    assert [*H5LazyDataset(path, "x").identity()] == ["sampled"]


def held(path, n_ranks=1, **options):
    """Return what ranks keep of the rows that they hold."""
    ranks = [
        RankMemCachedH5Dataset(path, "x", **({"rank": rank, "world_size": n_ranks} | options), preload=True)
        for rank in range(n_ranks)
    ]
    ranks[0].note_digests([rank.digest_of_rank() for rank in ranks])
    return ranks[0].held_identity


@pytest.mark.parametrize("mode", ["contiguous", "interleave"])
def test_each_value_of_rows_in_memory_counts_on_the_same_ranks(make_h5, monkeypatch, mode):
    monkeypatch.setattr(held_rows, "DIGEST_BYTES", 100)
    path = make_h5(x=np.arange(400.0).reshape(100, 4))
    before = [held(path, n_ranks, mode=mode) for n_ranks in (1, 2, 3)]
    assert len({*before[0], *before[1], *before[2]}) == 3  # each is compared with as many ranks alone
    assert before[2] == held(path, 3, mode=mode)
    for row in (0, 50, 99):
        change(path, "x", (row, 3), -1)
        now = held(path, 3, mode=mode)
        assert now.keys() == before[2].keys()
        assert now != before[2]
        before[2] = now


def test_rows_in_memory_are_not_compared_with_those_of_another_form(make_h5, tmp_path):
    path = make_h5(x=np.arange(400.0).reshape(100, 4))
    statistics = tmp_path / "stats.json"
    statistics.write_text(json.dumps({"fields": {"x": {"mean": 1.0, "std": 2.0}}}))
    found = [held(path), held(path, x_dtype="float64"), held(path, normalize=statistics)]
    assert not found[0].keys() & found[1].keys()
    assert found[2] == {}  # other machines may round otherwise


def test_one_rank_of_several_that_loads_alone_keeps_nothing(make_h5):
    path = make_h5(x=np.arange(400.0).reshape(100, 4))
    dataset = RankMemCachedH5Dataset(path, "x", rank=0, world_size=2, preload=True)
    assert dataset.held_identity == {}


@pytest.mark.parametrize("changed", [True, False])
def test_a_value_in_a_large_file_that_is_held_refuses_a_resume(make_h5, large, tmp_path, changed):
    path = make_h5(x=np.zeros((ROWS, 1_000)), pad=PAD)

    def fit(steps, **options):
        trainer = quiet_trainer(max_steps=steps)
        trainer.fit(Recorder(), datamodule=RankCachedH5DataModule(path, x_key="x", with_index=True), **options)
        return trainer

    fit(3).save_checkpoint(tmp_path / "saved.ckpt")
    assert whole(path, y_key=None) is None
    change(path, "x", (123, 456), 1 if changed else 0)
    with pytest.raises(H5ResumeError, match="held by 1 ranks") if changed else nullcontext():
        fit(6, ckpt_path=tmp_path / "saved.ckpt")
