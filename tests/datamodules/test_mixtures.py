"""Several sources in one training stream, under the Trainer: which rows come, where a run goes on, what is refused."""

import csv
import itertools
import os
import pickle
import re

import h5py
import numpy as np
import pytest
import torch
from arguments import nested
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger
from lightning_models import Recorder, SaveOnException, quiet_trainer, together

from lightning_h5 import CombinedHDF5DataModule, H5ResumeError, H5StatsMonitor, H5ValueError
from lightning_h5.__main__ import main

SIZES = {"a": 60, "b": 22, "c": 9}
FIRST = {"a": 0, "b": 1000, "c": 2000}
BATCH = 4


def write(path, first, n_rows, *, width=3, **more):
    rows = np.arange(first, first + n_rows)
    with h5py.File(path, "w", libver="latest") as file:
        x = np.repeat(rows[:, None], width, axis=1).astype("f4")
        file.create_dataset("x", data=x, chunks=(4, width), compression="gzip")
        file["row"], file["parity"] = rows, rows % 2
        file["guid"] = [f"patient_{row % 7}" for row in rows]
        for name, data in more.items():
            file[name] = data
    return str(path)


@pytest.fixture
def sources(tmp_path):
    return {name: write(tmp_path / f"{name}.h5", FIRST[name], n) for name, n in SIZES.items()}


def rows_of(name):
    return list(range(FIRST[name], FIRST[name] + SIZES[name]))


ALL_ROWS = sorted(row for name in SIZES for row in rows_of(name))


class SourceRecorder(Recorder):
    """Remembers the rows' own numbers and the sources of each batch, and looks that they belong together."""

    def __init__(self, fail_at=None):
        super().__init__(fail_at)
        self.sources = {}

    def training_step(self, batch, batch_idx):
        rows = self.look_at(batch)
        self.sources.setdefault(self.current_epoch, []).append(list(batch["source"]))
        return super().training_step({"index": rows}, batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step({"index": self.look_at(batch)}, batch_idx)

    def look_at(self, batch):
        rows = batch["row"]
        assert batch["x"][:, 0].tolist() == rows.tolist()
        assert [FIRST[name] for name in batch["source"]] == [row // 1000 * 1000 for row in rows.tolist()]
        return rows


MIXTURES = {
    "concat": {},
    "sequential": {"sampling_strategy": "sequential"},
    "round robin": {"sampling_strategy": "round_robin", "epoch_length": "max"},
    "alternating": {"sampling_strategy": "alternating", "pattern": ["a", "a", "b", "c"], "epoch_length": 13},
    "weighted by size": {"sampling_strategy": "weighted"},
    "weighted rows": {"sampling_strategy": "weighted", "weights": {"a": 0.5, "b": 0.3, "c": 0.2}, "mix": "rows"},
    "weights that change": {
        "sampling_strategy": "weighted",
        "weights": {0: {"a": 1, "b": 1, "c": 0}, 11: {"a": 1, "b": 2, "c": 3}},
        "between": "linear",
        "epoch_length": 9,
    },
    "in chunks": {"sampling_strategy": "round_robin", "shuffle": "chunks", "shuffle_bytes": 1024},
    "full batches": {"sampling_strategy": "round_robin", "drop_last": True},
}


@pytest.fixture
def module(sources):
    return lambda **options: CombinedHDF5DataModule(**nested(**({"sources": sources, "batch_size": BATCH} | options)))


def fitted(datamodule, model=None, **options):
    model = model or SourceRecorder()
    quiet_trainer(**({"num_sanity_val_steps": 0} | options)).fit(model, datamodule=datamodule)
    return model


def dataset_of(datamodule):
    datamodule.setup("fit")
    return datamodule.train_dataloader().dataset


# Rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixture", ["concat", "sequential", "weighted by size"])
def test_as_much_as_all_sources_have_is_each_row_once_in_every_epoch(module, mixture):
    model = fitted(module(**MIXTURES[mixture]), max_epochs=3)
    assert [sorted(model.train_rows[epoch]) for epoch in range(3)] == [ALL_ROWS] * 3
    assert model.train_rows[0] != model.train_rows[1]


@pytest.mark.parametrize("mixture", [name for name in MIXTURES if name not in ("concat", "weighted rows")])
def test_each_batch_is_of_one_source_and_names_it(module, mixture):
    model = fitted(module(**MIXTURES[mixture]))
    assert all(len(set(names)) == 1 for epoch in model.sources.values() for names in epoch)


def test_rows_that_take_turns_have_batches_of_several_sources(module):
    model = fitted(module(**MIXTURES["weighted rows"]), max_epochs=1)
    assert all(len(set(names)) > 1 for names in model.sources[0])


def test_a_pattern_says_whose_turn_it_is(module):
    model = fitted(module(**MIXTURES["alternating"]))
    for epoch in range(2):
        assert [names[0] for names in model.sources[epoch]] == [*"aabc" * 3, "a"]


def test_sources_go_on_over_epochs_and_give_each_row_once_before_any_comes_again(module):
    model = fitted(module(sampling_strategy="round_robin", epoch_length=6), max_epochs=9)
    rows = [row for epoch in range(9) for row in model.train_rows[epoch]]
    for name in SIZES:
        found = [row for row in rows if row in rows_of(name)]
        assert len(found) >= SIZES[name]
        for start in range(0, len(found) - SIZES[name] + 1, SIZES[name]):
            assert sorted(found[start : start + SIZES[name]]) == rows_of(name)


def test_a_number_of_steps_is_the_length_of_an_epoch_of_one_source_too(sources):
    datamodule = CombinedHDF5DataModule(
        mixture={"sources": {"a": sources["a"]}, "epoch_length": 7}, batch_size=BATCH, with_index=True
    )
    model = Recorder()
    quiet_trainer(max_epochs=4).fit(model, datamodule=datamodule)
    assert [len(model.train_rows[epoch]) for epoch in range(4)] == [28] * 4
    rows = [row for epoch in range(4) for row in model.train_rows[epoch]]
    assert sorted(rows[:60]) == list(range(60))


def test_the_index_is_a_number_below_the_number_of_rows_also_where_rows_come_again(module):
    loader = module(sampling_strategy="round_robin", epoch_length="max", with_index=True)
    loader.setup("fit")
    seen = {}
    for batch in loader.train_dataloader():
        for index, row in zip(batch["index"].tolist(), batch["row"].tolist(), strict=True):
            assert seen.setdefault(index, row) == row, "an index is of one row"
    assert sorted(seen) == list(range(sum(SIZES.values())))


def drawn(sample, rng):
    return sample | {"drawn": torch.tensor(rng.random(), dtype=torch.float64)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_transform_draws_anew_when_a_row_comes_again_in_an_epoch(module, num_workers):
    datamodule = module(sampling_strategy="round_robin", epoch_length="max", transform=drawn, num_workers=num_workers)
    datamodule.setup("fit")
    seen = {}
    for batch in datamodule.train_dataloader():
        for row, value in zip(batch["row"].tolist(), batch["drawn"].tolist(), strict=True):
            seen.setdefault(row, []).append(value)
    assert all(len(seen[row]) >= 4 for row in rows_of("c"))
    draws = [value for values in seen.values() for value in values]
    assert len(draws) == len(set(draws))


def test_overfitting_has_the_same_batches_in_every_epoch(module):
    model = fitted(module(sampling_strategy="round_robin"), max_epochs=3, overfit_batches=5)
    assert len(model.train_rows[0]) == 5 * BATCH
    assert model.train_rows[0] == model.train_rows[1] == model.train_rows[2]
    assert len({names[0] for names in model.sources[0]}) == 3


def test_sources_may_have_filters_of_their_own_over_one_file(sources):
    mixed = {
        "odd": {"paths": sources["a"], "where": {"parity": 1}},
        "few": {"paths": sources["a"], "where": {"row": {"max": 9}, "parity": 0}},
    }
    datamodule = CombinedHDF5DataModule(mixture={"sources": mixed, "strategy": "sequential"}, batch_size=BATCH)
    datamodule.setup("fit")
    found = {"odd": [], "few": []}
    for batch in datamodule.train_dataloader():
        found[batch["source"][0]] += batch["row"].tolist()
    assert {name: sorted(rows) for name, rows in found.items()} == {
        "odd": list(range(1, 60, 2)),
        "few": list(range(0, 10, 2)),
    }


def test_a_dataset_of_several_sources_travels_to_other_processes(module):
    datamodule = module(sampling_strategy="round_robin")
    dataset = dataset_of(datamodule)
    rows = [0, 70, 90, 5]
    for again in (pickle.loads(pickle.dumps(dataset)), dataset_of(pickle.loads(pickle.dumps(datamodule)))):
        assert again.read_batch(rows)["row"].tolist() == dataset.read_batch(rows)["row"].tolist() == [0, 1010, 2008, 5]
        assert list(again.read_batch(rows)["source"]) == ["a", "b", "c", "a"]


def test_samples_to_be_collated_name_their_source(module):
    datamodule = module(sampling_strategy="round_robin", mix="rows", collate_fn=list)
    datamodule.setup("fit")
    found = [
        (sample["source"], sample["row"].item() // 1000) for batch in datamodule.train_dataloader() for sample in batch
    ]
    assert found[:4] == [("a", 0), ("b", 1), ("c", 2), ("a", 0)]
    assert all("abc"[number] == name for name, number in found)


# Where a run goes on -------------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_run_that_was_broken_off_goes_on_exactly(module, tmp_path, mixture, num_workers):
    def data():
        return module(num_workers=num_workers, **MIXTURES[mixture])

    whole, broken, saving = fitted(data()), SourceRecorder(fail_at=(1, 3)), SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        fitted(data(), broken, callbacks=[saving])
    resumed = SourceRecorder()
    quiet_trainer().fit(resumed, datamodule=data(), ckpt_path=saving.path)
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows


OTHERS = {
    "weights": {"weights": [1, 3, 2]},
    "when weights change": {"weights": {0: [3, 2, 1], 5: [1, 2, 3]}},
    "what takes turns": {"mix": "rows"},
    "the strategy": {"sampling_strategy": "sequential", "weights": None},
}


def stopped_by_an_error(module, tmp_path, **options):
    saving = SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        fitted(module(**options), SourceRecorder(fail_at=(0, 3)), callbacks=[saving])
    return saving.path


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_mixture_is_refused(module, tmp_path, other):
    options = {"sampling_strategy": "weighted", "weights": [3, 2, 1]}
    saved = stopped_by_an_error(module, tmp_path, **options)
    with pytest.raises(H5ResumeError, match=r"recipe: saved .weighted"):
        quiet_trainer().fit(SourceRecorder(), datamodule=module(**options | OTHERS[other]), ckpt_path=saved)


def test_another_batch_size_in_mid_epoch_is_refused_where_batches_are_of_one_source(module, tmp_path):
    saved = stopped_by_an_error(module, tmp_path, sampling_strategy="round_robin")
    with pytest.raises(H5ResumeError, match=r"begun with batches of 4 rows.*batches of 5"):
        quiet_trainer().fit(
            SourceRecorder(), datamodule=module(sampling_strategy="round_robin", batch_size=5), ckpt_path=saved
        )


def test_another_batch_size_goes_on_with_the_rest_where_rows_take_turns(module, tmp_path):
    options = MIXTURES["weighted rows"]
    whole, broken, saving = fitted(module(**options)), SourceRecorder(fail_at=(1, 3)), SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        fitted(module(**options), broken, callbacks=[saving])
    resumed = SourceRecorder()
    quiet_trainer().fit(resumed, datamodule=module(**options, batch_size=7), ckpt_path=saving.path)
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows


@pytest.mark.parametrize("then", [6, 20])
def test_another_length_of_an_epoch_holds_from_the_next_epoch_on(module, tmp_path, then):
    options, saving = {"sampling_strategy": "round_robin"}, SaveOnException(tmp_path)
    whole, broken = fitted(module(**options, epoch_length=9)), SourceRecorder(fail_at=(0, 4))
    with pytest.raises(RuntimeError, match="stop here"):
        fitted(module(**options, epoch_length=9), broken, callbacks=[saving])
    resumed = SourceRecorder()
    quiet_trainer().fit(resumed, datamodule=module(**options, epoch_length=then), ckpt_path=saving.path)
    assert together(broken.train_rows, resumed.train_rows)[0] == whole.train_rows[0]
    assert len(resumed.sources[1]) == then


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_loop_of_ones_own_goes_on_exactly(module, mixture):
    def loader():
        datamodule = module(rank=0, world_size=1, **MIXTURES[mixture])
        datamodule.setup("fit")
        made = datamodule.train_dataloader()
        made.sampler.set_epoch(1)
        return made

    whole, broken, resumed = ([] for _ in range(3))
    first, second = loader(), loader()
    whole += [batch["row"].tolist() for batch in loader()]
    for _, batch in zip(range(5), first, strict=False):
        broken.append(batch["row"].tolist())
        state = first.state_dict()
    second.load_state_dict(state)
    resumed += [batch["row"].tolist() for batch in second]
    assert broken + resumed == whole


# Validation ----------------------------------------------------------------------------------------------------


def sides_of(model):
    return set(model.train_rows[0]), set(model.rows["val"])


def test_groups_that_are_in_several_sources_are_on_one_side(sources):
    mixed = {
        "a": {"paths": [sources["a"], sources["b"]], "where": {"row": {"max": 1010}}},
        "b": {"paths": [sources["b"], sources["c"]]},
    }
    datamodule = CombinedHDF5DataModule(
        mixture={"sources": mixed, "strategy": "sequential"},
        split={"val_fraction": 0.3, "group_key": "guid"},
        batch_size=BATCH,
    )
    model = RowsAlone()
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0).fit(model, datamodule=datamodule)
    train, val = sides_of(model)
    assert sorted(train | val) == ALL_ROWS
    groups = [{row % 7 for row in rows} for rows in (train, val)]
    assert all(groups)
    assert not groups[0] & groups[1]


class RowsAlone(Recorder):
    """Remembers the rows' own numbers, whatever their source is called."""

    def training_step(self, batch, batch_idx):
        return super().training_step({"index": batch["row"]}, batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step({"index": batch["row"]}, batch_idx)


@pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["as it is", "by a link", "by a hard link"])
def test_a_row_of_two_sources_is_on_one_side(sources, tmp_path, link):
    again = sources["a"]
    if link is not None:
        again = str(tmp_path / "link.h5")
        link(sources["a"], again)
    mixed = {"all": sources["a"], "odd": {"paths": again, "where": {"parity": 1}}}
    datamodule = CombinedHDF5DataModule(mixture=mixed, split=0.3, batch_size=BATCH)
    model = RowsAlone()
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0).fit(model, datamodule=datamodule)
    train, val = sides_of(model)
    assert val
    assert not train & val
    assert sorted(train | val) == rows_of("a")


def test_rows_that_validate_are_of_all_sources_and_never_trained_on(module):
    model = fitted(module(sampling_strategy="round_robin", epoch_length="max", split=0.4), max_epochs=1)
    train, val = sides_of(model)
    assert sorted(train | val) == ALL_ROWS
    assert not train & val
    assert {row // 1000 for row in val} == {0, 1, 2}


@pytest.mark.parametrize("split_seed", range(4))
def test_a_small_source_may_have_no_row_that_passes_among_those_that_validate(module, sources, split_seed):
    mixed = sources | {"c": {"paths": sources["c"], "where": {"row": {"min": 2007}}}}
    model = fitted(module(sources=mixed, split={"val_fraction": 0.1, "seed": split_seed}), max_epochs=1)
    train, val = sides_of(model)
    assert sorted(train | val) == [row for row in ALL_ROWS if row < 2000 or row >= 2007]
    assert not train & val


def test_files_of_their_own_validate_without_a_mixture(module, sources):
    model = fitted(module(sampling_strategy="round_robin", val_path=sources["b"]), RowsOfEach(), max_epochs=1)
    assert sorted(model.rows["val"]) == rows_of("b")


class RowsOfEach(SourceRecorder):
    def validation_step(self, batch, batch_idx):
        Recorder.validation_step(self, {"index": batch["row"]}, batch_idx)


# Shares --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_shares_that_are_logged_add_up_and_are_those_that_were_asked_for(module, tmp_path, num_workers):
    datamodule = module(
        sampling_strategy="weighted", weights=[0.5, 0.3, 0.2], mix="rows", epoch_length=50, num_workers=num_workers
    )
    trainer = quiet_trainer(
        logger=CSVLogger(tmp_path), callbacks=[H5StatsMonitor(print_summary=False)], log_every_n_steps=10
    )
    trainer.fit(SourceRecorder(), datamodule=datamodule)
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        lines = list(csv.DictReader(text))
    for suffix, times in (("", 10), ("_epoch", 2)):
        keys = [[f"h5/{kind}/{name}{suffix}" for name in SIZES] for kind in ("share", "expected_share")]
        shown = [[[float(line[key]) for key in of_kind] for of_kind in keys] for line in lines if line.get(keys[0][0])]
        assert len(shown) == times
        for found, expected in shown:
            assert sum(found) == pytest.approx(1)
            assert expected == pytest.approx([0.5, 0.3, 0.2])
            # Workers count the rows that they have read, up to 4 batches ahead: 24 rows or more between two logs.
            assert found == pytest.approx(expected, abs=2 / 24 if num_workers else 0.03)


@pytest.mark.parametrize("mix", ["batches", "rows"])
def test_expected_shares_follow_weights_that_change(module, tmp_path, mix):
    weights = {0: [1, 1, 0], 25: [1, 1, 2], 35: [0, 1, 3]}
    datamodule = module(sampling_strategy="weighted", weights=weights, mix=mix, epoch_length=30)
    trainer = quiet_trainer(
        logger=CSVLogger(tmp_path), callbacks=[H5StatsMonitor(print_summary=False)], log_every_n_steps=10, max_epochs=2
    )
    trainer.fit(SourceRecorder(), datamodule=datamodule)
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        lines = list(csv.DictReader(text))
    shown = {
        suffix: [
            [float(line[f"h5/expected_share/{name}{suffix}"]) for name in SIZES]
            for line in lines
            if line.get(f"h5/expected_share/a{suffix}")
        ]
        for suffix in ("", "_epoch")
    }
    by_step = [[0.5, 0.5, 0], [0.5, 0.5, 0], [0.375, 0.375, 0.25], [0.125, 0.25, 0.625], *[[0, 0.25, 0.75]] * 2]
    assert np.abs(np.array(shown[""]) - by_step).max() < 0.04  # a batch may have been fetched before the log
    assert np.abs(np.array(shown["_epoch"]) - [np.mean(by_step[:3], axis=0), np.mean(by_step[3:], axis=0)]).max() < 1e-6


def test_weights_that_change_are_kept_by_the_step(module):
    names = []
    datamodule = module(
        sampling_strategy="weighted",
        weights={"0": {"a": 1, "b": 1, "c": 0}, "20": {"a": 0, "b": 1, "c": 3}},
        epoch_length=30,
    )
    model = fitted(datamodule, max_epochs=2)
    names = [batch[0] for epoch in range(2) for batch in model.sources[epoch]]
    assert [[names[low:high].count(name) for name in SIZES] for low, high in ((0, 20), (20, 60))] == [
        [10, 10, 0],
        [0, 10, 30],
    ]


def test_rows_of_one_set_of_files_are_no_share_of_nothing(sources, tmp_path):
    datamodule = CombinedHDF5DataModule(
        mixture={"sources": {"a": sources["a"]}, "epoch_length": 6}, batch_size=BATCH, with_index=True
    )
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), log_every_n_steps=3)
    trainer.fit(Recorder(), datamodule=datamodule)
    shown = {name: value.item() for name, value in trainer.callback_metrics.items() if "/share/" in name}
    assert set(shown.values()) <= {1.0}, shown


# A config ------------------------------------------------------------------------------------------------------


def test_a_config_says_all_of_it(sources, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
seed_everything: 1
trainer: {{max_epochs: 1, logger: false, default_root_dir: {tmp_path}}}
model: {{class_path: lightning_models.Recorder}}
data:
  class_path: CombinedHDF5DataModule
  init_args:
    fields: [x, row]
    mixture:
      sources:
        first: {sources["a"]}
        second: {{paths: [{sources["b"]}, {sources["c"]}], where: {{parity: 0}}, fields: [x, row]}}
      strategy: alternating
      pattern: [first, first, second]
      epoch_length: 9
      mix: rows
    batch_size: 10
    with_index: true
"""
    )
    main(["fit", "--config", str(config), "--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"])
    cells = dict(re.findall(r"^(batches|rows) +([\d,]+)", capsys.readouterr().out, re.MULTILINE))
    assert cells == {"batches": "9", "rows": "90"}


@pytest.mark.parametrize("weights", ["{0: {a: 1, b: 0}, 5: {a: 0, b: 1}}", "{0: [1, 0], 5: [0, 1]}"])
def test_a_config_changes_weights(sources, tmp_path, capsys, weights):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
seed_everything: 1
trainer: {{max_epochs: 1, logger: false, default_root_dir: {tmp_path}}}
model: {{class_path: test_mixtures.SourcesPrinter}}
data:
  class_path: LazyH5DataModule
  init_args:
    fields: [x, row]
    mixture:
      sources: {{a: {sources["a"]}, b: {sources["b"]}}}
      strategy: weighted
      weights: {weights}
      epoch_length: 9
    batch_size: 4
"""
    )
    flags = ["--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"]
    main(["fit", "--config", str(config), *flags])
    assert "sources aaaaabbbb" in capsys.readouterr().out


class SourcesPrinter(SourceRecorder):
    """Prints the source of each batch."""

    def on_train_end(self):
        print("sources", "".join(names[0] for names in self.sources[0]))


# What is refused -----------------------------------------------------------------------------------------------

ROUND = {"sampling_strategy": "round_robin"}
WEIGHTED = {"sampling_strategy": "weighted"}
ALTERNATING = {"sampling_strategy": "alternating"}
FILES = {name: f"{name}.h5" for name in SIZES}

BAD = {
    "a source without rows that pass": (
        {"sources": FILES | {"b": {"paths": "b.h5", "where": {"row": {"max": 3}}}}},
        ["'b'", "no row of 22 passes"],
    ),
    "a source without files": ({"sources": FILES | {"b": {"where": {"parity": 0}}}}, ["'b' has no files", "paths"]),
    "a negative weight": (WEIGHTED | {"weights": [1, -2, 1]}, ["'b'", "-2"]),
    "a weight that is no number": (WEIGHTED | {"weights": [1, "2", 1]}, ["'b'", "'2'"]),
    "a weight without end": (WEIGHTED | {"weights": [1, float("inf"), 1]}, ["'b'", "inf"]),
    "a weight that is not one": (WEIGHTED | {"weights": [1, float("nan"), 1]}, ["'b'", "nan"]),
    "weights of nothing": (WEIGHTED | {"weights": [0, 0, 0]}, ["[0, 0, 0]", "all 0"]),
    "a step that is no number": (
        WEIGHTED | {"weights": {0: [1, 1, 1], "later": [1, 2, 3]}},
        ["step 'later'", "whole numbers of 0 or more"],
    ),
    "a step before the first": (WEIGHTED | {"weights": {-1: [1, 1, 1], 5: [1, 2, 3]}}, ["step -1", "0 or more"]),
    "a part of a step": (WEIGHTED | {"weights": {0: [1, 1, 1], 0.5: [1, 2, 3]}}, ["step 0.5", "whole numbers"]),
    "steps that do not ascend": (
        WEIGHTED | {"weights": {0: [1, 1, 1], 500: [1, 1, 1], 20: [1, 2, 3]}},
        ["step 20 after step 500", "ascending"],
    ),
    "a step twice": (WEIGHTED | {"weights": {0: [1, 1, 1], "0": [1, 2, 3]}}, ["step 0 after step 0", "once"]),
    "no step 0": (WEIGHTED | {"weights": {100: [1, 1, 1], 200: [1, 2, 3]}}, ["no step 0", "first step is 100"]),
    "weights of others at a step": (
        WEIGHTED | {"weights": {0: [1, 1, 1], 10: {"a": 1, "bb": 1, "c": 1}}},
        ["weights at step 10", "'bb'", "'a', 'b', 'c'", "Did you mean 'b'?"],
    ),
    "weights of nothing at a step": (
        WEIGHTED | {"weights": {0: [1, 1, 1], 10: [0, 0, 0]}},
        ["at step 10", "all 0"],
    ),
    "a negative weight at a step": (WEIGHTED | {"weights": {0: [1, -1, 1], 10: [1, 1, 1]}}, ["'b' at step 0", "-1"]),
    "too few weights at a step": (
        WEIGHTED | {"weights": {0: [1, 1], 10: [1, 1, 1]}},
        ["[1, 1] at step 0", "3 sources"],
    ),
    "weights and steps": (WEIGHTED | {"weights": {"a": 1, "b": {"c": 2}}}, ["step 'a'", "whole numbers"]),
    "an epoch whose length would change": (
        WEIGHTED | {"weights": {0: [1, 1, 1], 10: [1, 2, 3]}, "epoch_length": "max"},
        ["epoch_length='max'", "'sum' or a number of steps"],
    ),
    "a change between the same weights": (
        WEIGHTED | {"weights": [1, 2, 3], "between": "linear"},
        ["between='linear'", "[1, 2, 3] does not change", "leave between out"],
    ),
    "an unknown change": (
        WEIGHTED | {"weights": {0: [1, 1, 1], 10: [1, 2, 3]}, "between": "linea"},
        ["between='linea'", "Did you mean 'linear'?"],
    ),
    "steps where nothing is weighted": (ROUND | {"weights": {0: [1, 1, 1], 9: [1, 2, 3]}}, ["'round_robin'"]),
    "too few weights": (WEIGHTED | {"weights": [1, 2]}, ["[1, 2]", "has 2 values", "3 sources", "'a', 'b', 'c'"]),
    "weights of others": (WEIGHTED | {"weights": {"a": 1, "d": 2}}, ["'a', 'd'", "'a', 'b', 'c'"]),
    "weights where nothing is weighted": (ROUND | {"weights": [1, 2, 3]}, ["weights=[1, 2, 3]", "'round_robin'"]),
    "a pattern of others": (ALTERNATING | {"pattern": ["a", "d"]}, ["pattern names 'd'", "'a', 'b', 'c'"]),
    "no pattern": (ALTERNATING, ["pattern=None", "['a', 'a', 'b', 'c']"]),
    "an empty pattern": (ALTERNATING | {"pattern": []}, ["pattern=[]"]),
    "a pattern that is text": (ALTERNATING | {"pattern": "abc"}, ["pattern='abc'"]),
    "a pattern where nothing alternates": (ROUND | {"pattern": ["a"]}, ["pattern=['a']", "'round_robin'"]),
    "a name twice": (
        {"sources": [{"name": "a", "paths": "a.h5"}, {"name": "a", "paths": "b.h5"}]},
        ["several sources named 'a'"],
    ),
    "a name twice in a mapping": (
        {"sources": {"a": "a.h5", "b": {"name": "a", "paths": "b.h5"}}},
        ["several sources named 'a'"],
    ),
    "an argument that no source has": (
        {"sources": FILES | {"b": {"paths": "b.h5", "batch_size": 3}}},
        ["'b' has the unknown settings 'batch_size'", "'label'", "'where'"],
    ),
    "files beside sources": ({"train_path": "a.h5"}, ["train_path and mixture"]),
    "no source": ({"sources": {}}, ["sources={}", "names no source"]),
    "text as sources": ({"sources": "a.h5"}, ["sources='a.h5'"]),
    "an unknown strategy": ({"sampling_strategy": "roundrobin"}, ["'roundrobin'", "'round_robin'"]),
    "an unknown unit": (ROUND | {"mix": "files"}, ["mix='files'", "'batches'", "'rows'"]),
    "an unknown length": (ROUND | {"epoch_length": "mean"}, ["epoch_length='mean'", "'max'"]),
    "a length of nothing": (ROUND | {"epoch_length": 0}, ["epoch_length=0"]),
    "a batch larger than a source": (
        ROUND | {"batch_size": 10, "drop_last": True},
        ["'c' has 9 rows", "batch_size is 10", "drop_last"],
    ),
    "a mixture of nothing": ({"sources": None} | ROUND, ["sources=None", "names no source"]),
    "a field of the source's name": (
        {"sources": FILES, "fields": {"source": "parity"}},
        ["'source'", "the name of their source", "fields"],
    ),
    "files that are not there": ({"sources": FILES | {"b": "gone.h5"}}, ["'b'", "gone.h5"]),
    "fewer rows than ranks": (
        ROUND | {"sources": {"c": "c.h5"}, "world_size": 10, "rank": 0},
        ["no step", "10 ranks", "batch_size 4"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name_and_number_before_training_starts(sources, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    options, words = BAD[case]
    with pytest.raises((H5ValueError, OSError)) as refused:
        CombinedHDF5DataModule(**nested(**({"sources": FILES, "batch_size": BATCH} | options))).setup("fit")
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)


@pytest.fixture
def two_shapes(tmp_path):
    return {"narrow": write(tmp_path / "n.h5", 0, 20), "wide": write(tmp_path / "w.h5", 100, 12, width=5)}


def test_sources_with_rows_of_other_shapes_may_take_turns_by_batches(two_shapes):
    datamodule = CombinedHDF5DataModule(mixture={"sources": two_shapes, "strategy": "sequential"}, batch_size=BATCH)
    datamodule.setup("fit")
    shapes = {"narrow": [], "wide": []}
    for batch in datamodule.train_dataloader():
        assert batch["x"][:, 0].tolist() == batch["row"].tolist()
        shapes[batch["source"][0]].append(tuple(batch["x"].shape))
    assert shapes == {"narrow": [(4, 3)] * 5, "wide": [(4, 5)] * 3}


@pytest.mark.parametrize("options", ["rows", "concat", "validation"])
def test_sources_with_rows_of_other_shapes_cannot_be_in_one_batch(two_shapes, options):
    given = {"rows": ROUND | {"mix": "rows"}, "concat": {}, "validation": ROUND | {"val_fraction": 0.25}}[options]
    with pytest.raises(H5ValueError, match=r"'x' is .*3.* in the source 'narrow', and .*5.* in 'wide'"):
        CombinedHDF5DataModule(**nested(sources=two_shapes, batch_size=BATCH, **given)).setup("fit")


NUMBERS = itertools.count()  # no example writes to a file that is open
DTYPES = ["<i8", "<f8", ">f8", "<i4", "<f4", "<u4", "<i2", "<u2", "<f2", "i1", "u1"]
BY_BATCHES = [
    {"strategy": "round_robin"},
    {"strategy": "weighted"},
    {"strategy": "sequential"},
    {"strategy": "alternating", "pattern": ["a", "b", "b"]},
]
BY_ROWS = [{"strategy": "concat"}, {"strategy": "round_robin", "mix": "rows"}, {"strategy": "weighted", "mix": "rows"}]


@st.composite
def mixed_segments(draw):
    """Segments of two sources, how they are mixed, and what a sample of them is."""
    sample = draw(st.sampled_from(["row", "window", "segment"]))
    mixture = draw(st.sampled_from(BY_BATCHES + BY_ROWS))
    shape = st.sampled_from([(), (1,), (6,), (2, 3), (3, 2)])
    kinds = [(draw(st.sampled_from(DTYPES)), draw(shape)) for _ in "ab"]
    if mixture in BY_ROWS:
        kinds[1] = kinds[0]
    lengths = [draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)) for _ in "ab"]
    if draw(st.booleans()):
        lengths = [[n[0]] * len(n) for n in lengths]  # a tensor each, not a list
    return sample, mixture, kinds, lengths, draw(st.integers(1, 4)), draw(st.sampled_from(["pad", "list"]))


@given(case=mixed_segments())
def test_samples_of_sources_with_other_dtypes_shapes_and_lengths_are_those_of_their_files(tmp_path, case):
    sample, mixture, kinds, lengths, batch_size, collate = case
    stored, sources = {}, {}
    for name, (dtype, shape), sizes in zip("ab", kinds, lengths, strict=True):
        sources[name] = str(tmp_path / f"{next(NUMBERS)}.h5")
        with h5py.File(sources[name], "w") as file:
            for at, n in enumerate(sizes):
                size = n * int(np.prod(shape))
                x = np.random.default_rng([at, *map(ord, name)]).integers(1, 100, size).reshape(n, *shape).astype(dtype)
                file[f"ep_{at}/x"] = x
                stored[name, f"ep_{at}"] = x
    options = {"window": {"length": 2, "stride": 1, "pad": "edge"}} if sample == "window" else {"sample": sample}
    if sample == "segment":
        options["collate_fn"] = collate
    datamodule = CombinedHDF5DataModule(
        mixture={"sources": sources, **mixture},
        fields=["x"],
        segments="ep_*",
        x_dtype=None,
        with_index=True,
        batch_size=batch_size,
        **options,
    )
    datamodule.setup("fit")
    seen = set()
    for batch in datamodule.train_dataloader():
        for at, (source, segment, step) in enumerate(
            zip(batch["source"], batch["segment"], batch["step"].tolist(), strict=True)
        ):
            x = stored[source, segment]
            wanted = {"row": x[step], "segment": x, "window": x[np.minimum([step, step + 1], len(x) - 1)]}[sample]
            value = batch["x"][at].numpy()
            if sample == "segment" and collate == "pad":
                value = value[: batch["length"][at]]
            assert (value.dtype, value.shape) == (wanted.dtype.newbyteorder("="), wanted.shape)
            assert np.array_equal(value, wanted)
            seen.add(source)
    assert seen == {"a", "b"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sources_of_other_dtypes_and_shapes_keep_their_own_for_transforms_and_in_workers(make_h5, num_workers):
    sources = {
        name: make_h5({"x": (first + np.arange(24)).reshape(shape).astype(dtype)})
        for name, first, shape, dtype in (("a", 0, (8, 3), "f4"), ("b", 100, (8, 3), "i4"), ("c", 200, (8, 3, 1), "i4"))
    }
    seen = []
    datamodule = CombinedHDF5DataModule(
        mixture={"sources": sources, "strategy": "round_robin", "epoch_length": "max"},
        transform=lambda sample: sample | {"first": sample["x"].flatten()[0]},
        batch_size=2,
        num_workers=num_workers,
        workers={"start_method": "fork"} if num_workers else None,
    )
    datamodule.setup("fit")
    for batch in datamodule.train_dataloader():
        seen.append((batch["source"][0], batch["x"].dtype, tuple(batch["x"].shape[1:])))
        with h5py.File(sources[batch["source"][0]]) as file:
            rows = {row.flat[0]: row for row in file["x"][:]}
        for x, first in zip(batch["x"].numpy(), batch["first"].tolist(), strict=True):
            assert np.array_equal(x, rows[first])
    kinds = {("a", torch.float32, (3,)), ("b", torch.int32, (3,)), ("c", torch.int32, (3, 1))}
    assert set(seen) == kinds


def matrix(path, n_columns):
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs["shape"] = (6, n_columns)
        group["data"], group["indices"] = np.arange(1, 7, dtype="f4"), np.full(6, n_columns - 1, "i4")
        group["indptr"] = np.arange(7)
    return str(path)


@pytest.mark.parametrize("decode", ["dense", "csr"])
def test_sparse_matrices_of_several_widths_take_turns_by_batches_and_cannot_be_in_one(tmp_path, decode):
    sources = {name: matrix(tmp_path / f"{name}.h5", n) for name, n in (("narrow", 3), ("wide", 50))}
    options = {"fields": ["X"], "decode": {"X": decode}, "batch_size": 2}
    datamodule = CombinedHDF5DataModule(mixture={"sources": sources, "strategy": "round_robin"}, **options)
    datamodule.setup("fit")
    for batch in datamodule.train_dataloader():
        x = batch["X"].to_dense()
        assert x.shape == (2, {"narrow": 3, "wide": 50}[batch["source"][0]])
        assert (x[:, -1] > 0).all()
        assert not x[:, :-1].any()
    with pytest.raises(H5ValueError, match=r"'X' is float32 of 3 columns in the source 'narrow', and .*50 columns"):
        CombinedHDF5DataModule(mixture={"sources": sources, "strategy": "concat"}, **options).setup("fit")


def test_sources_with_other_fields_are_refused_until_the_fields_are_named(sources, tmp_path):
    mixed = {"a": sources["a"], "more": write(tmp_path / "more.h5", 0, 8, extra=np.zeros(8))}
    with pytest.raises(H5ValueError, match=r"'a' has the fields .*, and 'more' has .*'extra'.*fields"):
        CombinedHDF5DataModule(mixture=mixed).setup("fit")
    assert len(dataset_of(CombinedHDF5DataModule(mixture=mixed, fields=["x", "row"]))) == 68


def test_sources_may_call_their_fields_otherwise(sources, tmp_path):
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["signal"], file["number"] = np.ones((6, 3), "f4"), np.arange(6)
    mixed = {"a": sources["a"], "other": {"paths": str(other), "fields": {"x": "signal", "row": "number"}}}
    dataset = dataset_of(CombinedHDF5DataModule(mixture=mixed, fields=["x", "row"], batch_size=BATCH))
    batch = dataset.read_batch([59, 60, 65])
    assert batch["row"].tolist() == [59, 0, 5]
    assert list(batch["source"]) == ["a", "other", "other"]


@pytest.mark.parametrize("weights", [[1000.0, 2**0.5, 1 / 3], [1, 1e-7, 1], [1, 1e-12, 0.5]])
@pytest.mark.parametrize("mix", ["batches", "rows"])
def test_weights_of_any_size_are_dealt_at_once(make_h5, weights, mix):
    sources = {name: make_h5({"x": np.arange(20.0)}, name=f"{name}.h5") for name in "abc"}
    module = CombinedHDF5DataModule(
        mixture={"sources": sources, "strategy": "weighted", "mix": mix, "epoch_length": 50, "weights": weights},
        batch_size=4,
    )
    module.setup("fit")
    names = [name for batch in module.train_dataloader() for name in batch["source"]]
    shares = np.array(weights) / sum(weights)
    assert np.abs(np.array([names.count(name) for name in "abc"]) - shares * 200).max() < (4 if mix == "batches" else 1)


@pytest.mark.parametrize("dtype", ["u2", "u4", "u8"])
def test_rows_of_sources_are_mixed_whatever_their_dtype(make_h5, dtype):
    sources = {
        name: make_h5({"x": np.arange(first, first + 20).astype(dtype)}, name=f"{name}.h5")
        for name, first in (("a", 0), ("b", 100))
    }
    module = CombinedHDF5DataModule(mixture=sources, batch_size=8)
    module.setup("fit")
    batches = list(module.train_dataloader())
    assert sorted(int(x) for batch in batches for x in batch["x"].numpy()) == [*range(20), *range(100, 120)]
    for batch in batches:
        assert [name == "b" for name in batch["source"]] == [int(x) >= 100 for x in batch["x"].numpy()]


def test_batches_that_a_tuner_made_too_large_are_refused(make_h5):
    sources = {name: make_h5({"x": np.arange(20.0)}, name=f"{name}.h5") for name in "ab"}
    module = CombinedHDF5DataModule(mixture={"sources": sources, "strategy": "weighted"}, batch_size=4, drop_last=True)
    module.setup("fit")
    module.batch_size = 32
    with pytest.raises(H5ValueError, match=r"'a' has 20 rows, and batch_size is 32"):
        module.train_dataloader()


@pytest.mark.parametrize("sources", [[1, 2], {"a": 3}, {"a": {"paths": 3.5}}])
def test_sources_that_are_no_files_are_refused(sources):
    with pytest.raises(H5ValueError, match=r"source"):
        CombinedHDF5DataModule(mixture=sources)


def test_names_of_sources_may_be_numbers(make_h5):
    sources = {year: make_h5({"x": np.arange(20.0)}, name=f"{year}.h5") for year in (2020, 2021)}
    options = {"sampling_strategy": "weighted", "weights": {2020: 1, 2021: 3}, "epoch_length": 8, "batch_size": 2}
    module = CombinedHDF5DataModule(**nested(sources=sources, **options))
    module.setup("fit")
    names = [batch["source"][0] for batch in module.train_dataloader()]
    assert (names.count("2020"), names.count("2021")) == (2, 6)
