"""``LazyH5DataModule`` under a real Trainer, in one process."""

import json
import pickle

import h5py
import numpy as np
import pytest
import torch
from arguments import nested
from factories import Stored
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_models import Recorder, index_of, quiet_trainer

from lightning_h5 import H5LazyDataset, H5StatsMonitor, LazyH5DataModule, RankCachedH5DataModule, SetEpochCallback

ROWS = 60


@pytest.fixture
def file(make_h5):
    return make_h5(
        {
            "x": np.arange(ROWS * 2, dtype="f4").reshape(ROWS, 2),
            "y": np.arange(ROWS),
            "patient": Stored(np.array([f"p{row // 6}" for row in range(ROWS)], object), dtype=h5py.string_dtype()),
        }
    )


def module(file, **options):
    return LazyH5DataModule(
        file, **nested(**({"x_key": "x", "y_key": "y", "batch_size": 8, "with_index": True} | options))
    )


def batches(datamodule, stage):
    datamodule.setup(stage)
    split = {"fit": "train", "validate": "val"}.get(stage, stage)
    return list(getattr(datamodule, f"{split}_dataloader")())


def targets(datamodule, stage):
    return sorted(y for batch in batches(datamodule, stage) for y in batch[1].tolist())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_all_four_stages_see_every_row_once_an_epoch(file, num_workers):
    datamodule = module(file, val_path=file, test_path=file, predict_path=file, num_workers=num_workers)
    model, trainer = Recorder(), quiet_trainer(num_sanity_val_steps=0)
    trainer.fit(model, datamodule=datamodule)
    assert [sorted(rows) for rows in model.train_rows.values()] == [list(range(ROWS))] * 2
    assert model.train_rows[0] != model.train_rows[1]
    assert model.rows["val"] == [*range(ROWS), *range(ROWS)]
    trainer.test(model, datamodule=datamodule)
    predictions = trainer.predict(model, datamodule=datamodule)
    assert model.rows["test"] == model.rows["predict"] == torch.cat(predictions).tolist() == list(range(ROWS))


def test_a_file_that_leaves_no_doubt_needs_no_keys(make_h5):
    path = make_h5({"scans/images": np.zeros((5, 2, 2), "u1"), "scans/labels": np.arange(5), "who": np.full(5, b"a")})
    x, y = batches(LazyH5DataModule(path), "fit")[0]
    assert x.shape == (5, 2, 2)
    assert sorted(y.tolist()) == list(range(5))


def test_several_inputs_are_a_tuple_and_a_mapping_is_a_dict(file):
    (x, patients), y, _ = batches(module(file, x_key=["x", "patient"], shuffle=False), "fit")[0]
    assert x.shape == (8, 2)
    assert patients == ["p0"] * 6 + ["p1"] * 2
    batch = batches(module(file, x_key={"signal": "x", "who": "patient"}, y_key=None, shuffle=False), "fit")[0]
    assert set(batch) == {"signal", "who", "index"}
    assert y.tolist() == batch["index"].tolist() == list(range(8))


def test_splits_by_fraction_share_no_row_and_cover_all(file):
    splits = {
        s: targets(module(file, split={"val_fraction": 0.2, "test_fraction": 0.1}), s)
        for s in ("fit", "validate", "test")
    }
    assert [len(rows) for rows in splits.values()] == [42, 12, 6]
    assert sorted(row for rows in splits.values() for row in rows) == list(range(ROWS))


@pytest.mark.parametrize("split", [0.2, {"val_fraction": 0.2, "stratify_key": "jets/kind"}])
@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule])
def test_rows_of_stacked_members_and_of_other_files_are_split(tmp_path, kind, split):
    """The array that comes first has no rows of its own that a tensor could hold, or is in no file of the data."""
    jets = np.zeros(ROWS, [("pt", "f4"), ("kind", "i4")])
    jets["pt"], jets["kind"] = np.arange(ROWS), np.arange(ROWS) % 2
    for name, values in {"data.h5": {"jets": jets}, "weights.h5": {"w": np.arange(ROWS)}}.items():
        with h5py.File(tmp_path / name, "w") as file:
            for key, each in values.items():
                file[key] = each
    weights = {"path": str(tmp_path / "weights.h5"), "key": "w"}
    for x_key in ({"jets": ["jets/pt", "jets/kind"], "w": weights}, {"w": weights, "pt": "jets/pt"}):
        module = kind(tmp_path / "data.h5", x_key=x_key, y_key="jets/kind", split=split)
        rows = [x["w"].tolist() for stage in ("fit", "validate") for x, _ in batches(module, stage)]
        assert sorted(row for batch in rows for row in batch) == list(range(ROWS))


def test_a_new_training_seed_moves_no_row_between_splits(file):
    cuts = [targets(module(file, split=0.2, seed=seed), "validate") for seed in (0, 1)]
    assert cuts[0] == cuts[1] != targets(module(file, split={"val_fraction": 0.2, "seed": 1}), "validate")


def test_groups_are_never_cut_apart(file):
    val = targets(module(file, split={"val_fraction": 0.3, "group_key": "patient"}), "validate")
    train = targets(module(file, split={"val_fraction": 0.3, "group_key": "patient"}), "fit")
    assert not {row // 6 for row in val} & {row // 6 for row in train}
    assert sorted(val + train) == list(range(ROWS))
    assert len(val) == 18


def test_the_folds_validate_every_row_once(file):
    folds = [
        targets(module(file, split={"num_folds": 3, "fold": fold, "group_key": "patient"}), "validate")
        for fold in range(3)
    ]
    assert sorted(row for rows in folds for row in rows) == list(range(ROWS))


def test_splits_by_the_key(make_h5):
    arrays = {f"{split}/x": np.full((n, 1), n, "f4") for split, n in (("train", 9), ("val", 4), ("test", 3))}
    datamodule = LazyH5DataModule(make_h5(arrays), x_key="{split}/x")
    for stage, n in (("fit", 9), ("validate", 4), ("test", 3)):
        assert torch.cat(batches(datamodule, stage)).tolist() == [[n]] * n


def test_splits_by_file_and_many_files(make_h5, tmp_path):
    for name, rows in (("a", [0, 1, 2]), ("b", [3, 4]), ("val", [5])):
        make_h5({"x": np.array(rows)}, name=f"{name}.h5")
    datamodule = LazyH5DataModule(str(tmp_path / "[ab].h5"), tmp_path / "val.h5", shuffle=False)
    assert torch.cat(batches(datamodule, "fit")).tolist() == [0, 1, 2, 3, 4]
    assert torch.cat(batches(datamodule, "validate")).tolist() == [5]


def test_predicting_needs_no_target(make_h5, file):
    other = make_h5({"x": np.zeros((4, 2), "f4")}, name="new.h5")
    (batch,) = batches(module(file, predict_path=other), "predict")
    assert len(batch) == 2  # x and the index


def add_one(x):
    return x + 1


def add_ten(x):
    return x + 10


def double(batch):
    return (batch[0] * 2, *batch[1:])


def test_transforms_run_where_they_should(file):
    options = {"val_path": file, "test_path": file, "shuffle": False}
    plain = module(file, **options)
    assert batches(plain, "fit")[0][0][0].tolist() == [0, 1]
    datamodule = module(file, transform=add_one, eval_transform=add_ten, batch_transform=double, **options)
    assert batches(datamodule, "fit")[0][0][0].tolist() == [2, 4]
    assert batches(datamodule, "validate")[0][0][0].tolist() == [20, 22]
    assert batches(module(file, transform=add_one, **options), "test")[0][0][0].tolist() == [1, 2]


def test_drop_last_drops_the_ragged_end_and_its_absence_nothing(file):
    assert [len(b[1]) for b in batches(module(file, drop_last=True), "fit")] == [8] * 7
    assert [len(b[1]) for b in batches(module(file), "fit")] == [8] * 6 + [6, 6]


def test_callbacks_are_inserted_once_and_before_checkpoints(file, tmp_path):
    own = H5StatsMonitor(print_summary=False)
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path), own], max_epochs=1)
    datamodule = module(file)
    for _ in range(2):
        trainer.fit(Recorder(), datamodule=datamodule)
    kinds = [type(callback) for callback in trainer.callbacks]
    assert kinds.count(H5StatsMonitor) == kinds.count(SetEpochCallback) == 1
    assert kinds.index(SetEpochCallback) < kinds.index(ModelCheckpoint)


def test_setup_can_be_called_again_for_each_stage_and_for_none(file):
    datamodule = module(file, split={"val_fraction": 0.2, "test_fraction": 0.1}, predict_path=file)
    for stage in ("fit", "fit", None, "test", None):
        datamodule.setup(stage)
        assert len(datamodule.train_dataloader().dataset) == 42
        datamodule.teardown(stage)
    datamodule.setup(None)
    assert sum(len(batch[1]) for batch in datamodule.val_dataloader()) == 12


def test_the_global_seed_is_taken_and_a_seed_of_its_own_wins(file, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    first = [index_of(batch) for batch in batches(module(file), "fit")]
    assert first == [index_of(batch) for batch in batches(module(file, seed=11), "fit")]
    assert first != [index_of(batch) for batch in batches(module(file, seed=12), "fit")]


def test_it_pickles_before_and_after_a_run(file):
    datamodule = pickle.loads(pickle.dumps(module(file)))
    first = [index_of(batch) for batch in batches(datamodule, "fit")]
    again = pickle.loads(pickle.dumps(datamodule))
    assert [index_of(batch) for batch in batches(again, "fit")] == first


def test_overfit_batches_repeats_the_same_batches(file):
    model = Recorder()
    quiet_trainer(overfit_batches=2).fit(model, datamodule=module(file))
    assert model.train_rows == {0: list(range(16)), 1: list(range(16))}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [(0, 3), (1, 0), (1, 1), (1, 7)])
def test_a_run_broken_off_goes_on_with_exactly_the_rest(file, tmp_path, stop, num_workers):
    whole = Recorder()
    quiet_trainer().fit(whole, datamodule=module(file))
    keep = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1, save_top_k=0)
    broken, trainer = Recorder(fail_at=stop), quiet_trainer(enable_checkpointing=True, callbacks=[keep])
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(broken, datamodule=module(file, num_workers=num_workers))
    resumed = Recorder()
    quiet_trainer().fit(resumed, datamodule=module(file, num_workers=num_workers), ckpt_path=tmp_path / "last.ckpt")
    for epoch in (0, 1):
        assert broken.train_rows.get(epoch, []) + resumed.train_rows.get(epoch, []) == whole.train_rows[epoch]


def test_the_saved_position_is_plain_and_small(file, tmp_path):
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, save_last=True)])
    trainer.fit(Recorder(), datamodule=module(file))
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["LazyH5DataModule"]
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 1000
    assert state["segments"] == [[8, 1, 8]]


def test_files_are_closed_after_an_error(file):
    from lightning_h5.hdf5 import process_pool

    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer().fit(Recorder(fail_at=(0, 2)), datamodule=module(file))
    assert len(process_pool()) == 0


class Peeking(Callback):
    """Looks at a batch of the training loader in the middle of an epoch, as a callback that plots would."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 3:
            next(iter(trainer.train_dataloader))


def test_another_iteration_of_the_loader_does_not_move_the_position(file, tmp_path):
    whole = Recorder()
    quiet_trainer().fit(whole, datamodule=module(file))
    keep = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1, save_top_k=0)
    broken = Recorder(fail_at=(0, 6))
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=[keep, Peeking()])
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(broken, datamodule=module(file))
    resumed = Recorder()
    quiet_trainer().fit(resumed, datamodule=module(file), ckpt_path=tmp_path / "last.ckpt")
    assert broken.train_rows[0] + resumed.train_rows[0] == whole.train_rows[0]
    assert resumed.train_rows[1] == whole.train_rows[1]


def test_a_second_fit_does_not_go_on_where_the_first_was_resumed(file, tmp_path):
    keep = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1, save_top_k=0)
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(enable_checkpointing=True, callbacks=[keep]).fit(
            Recorder(fail_at=(0, 3)), datamodule=module(file)
        )
    datamodule, second = module(file), Recorder()
    quiet_trainer().fit(Recorder(), datamodule=datamodule, ckpt_path=tmp_path / "last.ckpt")
    quiet_trainer().fit(second, datamodule=datamodule)
    assert [len(rows) for rows in second.train_rows.values()] == [ROWS, ROWS]


def test_long_text_is_not_held(make_h5):
    text = Stored(np.array(["x" * 20_000 + str(row) for row in range(1100)], object), dtype=h5py.string_dtype())
    dataset = H5LazyDataset(make_h5({"x": np.arange(1100), "text": text}), "x", "text")
    assert [dataset[row][1][20_000:] for row in (1099, 0)] == ["1099", "0"]
    assert all(reader._values is None for (_, field), reader in dataset._readers.items() if field == 1)


def test_rows_of_a_file_under_a_live_writer_are_read_while_it_grows(tmp_path):
    with h5py.File(tmp_path / "live.h5", "w", libver="latest") as writer:
        rows = writer.create_dataset("x", data=np.arange(10), chunks=(5,), maxshape=(None,))
        writer.swmr_mode = True
        dataset = H5LazyDataset(tmp_path / "live.h5", "x", swmr=True)
        rows.resize((20,))
        rows[10:] = 7
        writer.flush()
        assert dataset.read_batch(range(10)).tolist() == list(range(10))
        assert len(dataset) == 10


def test_numbers_of_numpy_are_numbers(file):
    datamodule = module(file, batch_size=np.int64(6), seed=np.int32(3), num_workers=np.int8(0))
    assert len(batches(datamodule, "fit")) == 10
