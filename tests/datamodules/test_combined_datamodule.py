"""``CombinedHDF5DataModule``: filtered rows of many files under the Trainer, on one rank and several, and resumed."""

import pickle
import re

import h5py
import numpy as np
import pytest
from arguments import nested
from lightning_models import Recorder, SaveOnException, quiet_trainer, together
from processes import run_ranks, values

from lightning_h5 import CombinedHDF5DataModule, H5Error, H5FileError, H5ValueError
from lightning_h5.__main__ import main

ROWS = 20  # of each of three files
GUIDS = [f"patient_{number}" for number in range(6)]


def write(path, first):
    rows = np.arange(first, first + ROWS)
    with h5py.File(path, "w", libver="latest") as file:
        for name, data in {
            "x": np.repeat(rows[:, None], 4, axis=1).astype("f4"),
            "target": (rows[:, None] % 3 * np.ones(5)).astype("f4"),
            "cs_label": (rows % 2).astype("u1"),
            "row": rows,
        }.items():
            file.create_dataset(name, data=data, chunks=(1, *data.shape[1:]), compression="lzf")
        file["guid"] = [GUIDS[row % 6] for row in rows]
    return str(path)


@pytest.fixture
def files(tmp_path):
    return [write(tmp_path / f"{number}.h5", number * ROWS) for number in range(3)]


def with_target(wanted):
    return [row for row in range(3 * ROWS) if row % 3 == wanted]


class RowRecorder(Recorder):
    """Remembers the rows' own numbers, and looks that each sample is whole."""

    def training_step(self, batch, batch_idx):
        assert batch["x"][:, 0].tolist() == batch["row"].tolist()
        assert batch["guid"] == [GUIDS[row % 6] for row in batch["row"].tolist()]
        return super().training_step({"index": batch["row"]}, batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step({"index": batch["row"]}, batch_idx)

    def test_step(self, batch, batch_idx):
        super().test_step({"index": batch["row"]}, batch_idx)


def test_each_epoch_has_the_rows_that_pass_once_and_from_the_second_on_they_are_in_the_cache(files):
    datamodule = CombinedHDF5DataModule(files, label=1, batch_size=4)
    model = RowRecorder()
    quiet_trainer(max_epochs=3).fit(model, datamodule=datamodule)
    assert [sorted(model.train_rows[epoch]) for epoch in range(3)] == [with_target(1)] * 3
    assert model.train_rows[0] != model.train_rows[1]
    stats = datamodule.train_dataloader().dataset.get_stats()
    assert stats["cache_hits"] + stats["cache_misses"] == 60
    assert 20 <= stats["cache_misses"] <= 40  # the second epoch is read while the first one still fills the cache


@pytest.mark.parametrize("least", [0, 12])
def test_another_filter_moves_no_row_between_training_and_test_and_groups_stay_whole(files, least):
    options = {"val_fraction": 0.2, "test_fraction": 0.2, "group_key": "guid", "batch_size": 4}
    model, datamodule = RowRecorder(), CombinedHDF5DataModule(files, **nested(**options, where={"row": {"min": least}}))
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0).fit(model, datamodule=datamodule)
    quiet_trainer().test(model, datamodule=datamodule, verbose=False)
    found = model.train_rows[0], model.rows["val"], model.rows["test"]
    assert sorted(row for rows in found for row in rows) == list(range(least, 3 * ROWS))
    groups = [{row % 6 for row in rows} for rows in found]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 6
    whole = CombinedHDF5DataModule(files, **nested(**options))
    whole.setup("fit")
    rows = whole.train_dataloader().dataset.read_batch(range(len_of(whole)))["row"].tolist()
    assert sorted(found[0]) == [row for row in rows if row >= least]


def len_of(datamodule):
    return len(datamodule.train_dataloader().dataset)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_was_broken_off_goes_on_exactly(files, tmp_path, num_workers):
    def data():
        return CombinedHDF5DataModule(files, where={"row": {"min": 5}}, batch_size=4, num_workers=num_workers)

    whole, broken, resumed = RowRecorder(), RowRecorder(fail_at=(1, 3)), RowRecorder()
    quiet_trainer().fit(whole, datamodule=data())
    saving = SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(callbacks=[saving]).fit(broken, datamodule=data())
    quiet_trainer().fit(resumed, datamodule=data(), ckpt_path=saving.path)
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows


def test_a_checkpoint_of_other_filters_is_refused(files, tmp_path):
    saving = SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(callbacks=[saving]).fit(
            RowRecorder(fail_at=(0, 2)), datamodule=CombinedHDF5DataModule(files, label=1, batch_size=4)
        )
    with pytest.raises(H5Error):
        quiet_trainer().fit(
            RowRecorder(), datamodule=CombinedHDF5DataModule(files, label=2, batch_size=4), ckpt_path=saving.path
        )


def fit_on_ranks(rank, world_size, files, options):
    model = RowRecorder()
    trainer = quiet_trainer(max_epochs=2, devices=world_size, strategy="ddp", num_sanity_val_steps=0)
    trainer.fit(model, datamodule=CombinedHDF5DataModule(files, **nested(val_path=files[:1], batch_size=4, **options)))
    return model.train_rows, model.rows["val"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_train_on_each_row_that_passes_once_an_epoch(files, tmp_path, world_size):
    ranks = values(run_ranks(fit_on_ranks, world_size, tmp_path, world_size, files, {"cs_label": True}))
    expected = [row for row in range(3 * ROWS) if row % 2]
    for epoch in range(2):
        found = sorted(row for train, _ in ranks for row in train[epoch])
        assert len(set(found)) == len(found) >= len(expected) - world_size + 1
        assert set(found) <= set(expected)
    assert sorted(row for _, val in ranks for row in val) == sorted([row for row in expected if row < ROWS] * 2)


def fit_where_a_file_is_missing(rank, world_size, files):
    mine = files if rank == 0 else [*files[:2], files[2] + ".gone"]
    return fit_on_ranks(rank, world_size, mine, {"on_bad_file": "skip"})


@pytest.mark.wide
def test_ranks_that_leave_out_other_files_all_stop(files, tmp_path):
    outcomes = run_ranks(fit_where_a_file_is_missing, 2, tmp_path, 2, files, patience=10)
    assert all("rows of 'train'" in outcome.error for outcome in outcomes), [one.error for one in outcomes]


def test_bad_files_are_errors_or_left_out_in_so_many_words(files, tmp_path, caplog):
    broken = tmp_path / "broken.h5"
    broken.write_bytes(b"nothing")
    with pytest.raises(H5FileError, match=r"broken\.h5"):
        CombinedHDF5DataModule([*files, str(broken)]).setup("fit")
    datamodule = CombinedHDF5DataModule(
        [*files, str(broken)],
        on_bad_file="skip",
        split=0.5,
    )
    datamodule.setup("fit")
    assert len_of(datamodule) == 30
    assert "broken.h5" in caplog.text


def test_a_split_without_data_or_rows_says_what_to_pass(files):
    with pytest.raises(H5ValueError, match=r"Pass val_path, or split with val_fraction"):
        CombinedHDF5DataModule(files).setup("validate")
    with pytest.raises(H5ValueError, match="not both"):
        CombinedHDF5DataModule(
            files,
            val_path=files,
            split=0.1,
        )
    with pytest.raises(H5ValueError, match="'train': no row of 60 passes"):
        CombinedHDF5DataModule(files, where={"row": {"min": 1000}}).setup("fit")


def test_a_data_module_travels_to_other_processes(files):
    datamodule = CombinedHDF5DataModule(files, label=1)
    datamodule.setup("fit")
    again = pickle.loads(pickle.dumps(datamodule))
    again.setup("fit")
    assert len_of(again) == len(with_target(1))


def test_a_config_says_all_of_it(files, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
seed_everything: 1
trainer: {{max_epochs: 1, logger: false, default_root_dir: {tmp_path}}}
model: {{class_path: lightning_models.Recorder}}
data:
  class_path: CombinedHDF5DataModule
  init_args:
    train_path: {files}
    fields: {{x: x, marks: row, target: {{key: target, layout: NT}}}}
    label: 1
    where: {{row: {{min: 3, max: 40}}, guid: [patient_1, patient_4]}}
    row_cache: 10
    with_index: true
"""
    )
    main(["fit", "--config", str(config), "--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"])
    (n_rows,) = re.findall(r"^rows +([\d,]+)", capsys.readouterr().out, re.MULTILINE)
    assert n_rows == str(sum(3 <= row <= 40 for row in with_target(1)))
