"""``hparams`` of the data modules: plain values that loggers record and checkpoints keep, and their objects' texts."""

import functools
import gc
import json
import pathlib
import pickle
import weakref

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from lightning_models import Recorder, quiet_trainer, together

from lightning_h5 import CombinedHDF5DataModule, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.cli import main
from lightning_h5.datamodules.settings import plain_settings

ROWS = 24


def unchanged(x):
    return x


@pytest.fixture
def path(make_h5):
    return make_h5(x=np.arange(ROWS * 2.0).reshape(ROWS, 2), y=np.arange(ROWS), group=np.arange(ROWS) // 4)


CASES = {
    "lazy": (LazyH5DataModule, {"x_key": {"image": "x"}, "y_key": "y", "x_dtype": "float16", "weights": "group"}),
    "cached": (RankCachedH5DataModule, {"x_key": ["x", "y"], "memory": "interleave", "normalize": None}),
    "combined": (CombinedHDF5DataModule, {"where": {"y": {"min": 3}}, "fields": ["x", "y"], "label": None}),
}
ALL = pytest.mark.parametrize(("kind", "options"), CASES.values(), ids=list(CASES))


def make(kind, path, options):
    return kind(
        path, split={"val_fraction": 0.25, "group_key": "group"}, batch_size=5, with_index=True, seed=3, **options
    )


def fit(datamodule, folder, model=None, **options):
    keep = ModelCheckpoint(folder, filename="kept", every_n_train_steps=1)
    trainer = quiet_trainer(max_epochs=1, callbacks=[keep], enable_checkpointing=True, **options)
    trainer.fit(Recorder() if model is None else model, datamodule=datamodule)
    return folder / "kept.ckpt"


@ALL
def test_hparams_are_the_arguments_of_the_constructor(kind, options, path):
    hparams = make(kind, path, options).hparams
    assert hparams["train_path"] == path
    assert {name: hparams[name] for name in options} == options
    assert (hparams.batch_size, hparams.split["val_fraction"], hparams.num_workers, hparams.seed) == (5, 0.25, 0, 3)
    assert json.loads(json.dumps(hparams)) == hparams


@ALL
def test_a_checkpoint_gives_a_module_with_the_same_settings(kind, options, path, tmp_path):
    datamodule = make(kind, path, options)
    checkpoint = fit(datamodule, tmp_path)
    stored = torch.load(checkpoint, weights_only=True)
    assert stored[kind.CHECKPOINT_HYPER_PARAMS_KEY] == dict(datamodule.hparams)
    assert len(pickle.dumps(stored[kind.CHECKPOINT_HYPER_PARAMS_KEY])) < 4096
    loaded = kind.load_from_checkpoint(checkpoint)
    assert loaded.hparams == datamodule.hparams
    assert kind.load_from_checkpoint(checkpoint, batch_size=7).batch_size == 7
    batches = []
    for each in (datamodule, loaded):
        each.trainer = None
        each.setup("fit")
        batches.append([batch for loader in (each.train_dataloader(), each.val_dataloader()) for batch in loader])
    assert torch.equal(*(torch.cat(list(map(torch.flatten, tensors(each)))).double() for each in batches))


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value.double()]
    values = value.values() if isinstance(value, dict) else value
    return [one for each in values for one in tensors(each)]


FUNCTIONS = {
    "transform": unchanged,
    "eval_transform": functools.partial(unchanged),
    "batch_transform": lambda batch: batch,
    "collate_fn": torch.utils.data.default_collate,
}


@ALL
def test_functions_are_named_in_the_checkpoint_and_must_be_passed_again(kind, options, path, tmp_path):
    checkpoint = fit(make(kind, path, options | FUNCTIONS), tmp_path)
    stored = torch.load(checkpoint, weights_only=True)[kind.CHECKPOINT_HYPER_PARAMS_KEY]
    assert stored["transform"] == f"not stored: {__name__}.unchanged"
    with pytest.raises(
        H5ValueError, match=r"transform was .*unchanged.*load_from_checkpoint\(path, transform="
    ) as error:
        kind.load_from_checkpoint(checkpoint)
    assert all(f"{name}=..." in str(error.value) for name in FUNCTIONS)
    with pytest.raises(H5ValueError, match="eval_transform was"):
        kind.load_from_checkpoint(checkpoint, transform=unchanged)
    loaded = kind.load_from_checkpoint(checkpoint, **FUNCTIONS)
    assert loaded.hparams == stored


def test_functions_inside_of_settings_count_too(path, tmp_path):
    conditions = {"where": {"group": lambda column: column > 1}}
    checkpoint = fit(make(CombinedHDF5DataModule, path, conditions), tmp_path)
    with pytest.raises(H5ValueError, match=r"where was .*<lambda>"):
        CombinedHDF5DataModule.load_from_checkpoint(checkpoint)
    CombinedHDF5DataModule.load_from_checkpoint(checkpoint, **conditions)


def test_a_list_of_very_many_files_is_not_copied_into_every_checkpoint(path, tmp_path):
    paths = [f"{tmp_path}/{i}.h5" for i in range(5000)]
    datamodule = LazyH5DataModule(paths)
    assert len(pickle.dumps(dict(datamodule.hparams))) < 4096
    assert "a list of 5,000" in repr(datamodule)
    with pytest.raises(H5ValueError, match="train_path was a list of 5,000"):
        LazyH5DataModule(**datamodule.hparams)
    few = [path] * 20
    assert LazyH5DataModule(few, x_key="x").hparams.train_path == few


class Folder(LazyH5DataModule):
    """A constructor of its own."""

    def __init__(self, folder, scale=1.0, **options):
        super().__init__(f"{folder}/*.h5", x_key="x", **options)
        self.scale = scale


class Same(LazyH5DataModule):
    """Passes everything on."""

    def __init__(self, name, *arguments, **options):
        super().__init__(*arguments, **options)


class Saves(LazyH5DataModule):
    """As Lightning's documentation shows it."""

    def __init__(self, path, batch_size=4):
        super().__init__(path, x_key="x", batch_size=2 * batch_size, with_index=True)
        self.save_hyperparameters()


def test_a_subclass_is_made_again_by_its_own_constructor(path, tmp_path):
    folder = pathlib.Path(path).parent
    datamodule = Folder(folder, scale=2.0, batch_size=6, with_index=True)
    assert datamodule.hparams == {"folder": str(folder), "scale": 2.0, "batch_size": 6, "with_index": True}
    loaded = Folder.load_from_checkpoint(fit(datamodule, tmp_path / "a"))
    assert (loaded.scale, loaded.batch_size, loaded._paths) == (2.0, 6, datamodule._paths)
    loaded = Same.load_from_checkpoint(fit(Same("a", path, x_key="x", with_index=True), tmp_path / "b"))
    assert loaded.hparams == {"name": "a", "train_path": path, "x_key": "x", "with_index": True}
    saves = Saves(path)
    assert (saves.batch_size, saves.hparams.batch_size) == (8, 4)
    assert Saves.load_from_checkpoint(fit(saves, tmp_path / "c")).batch_size == 8


# Loggers -----------------------------------------------------------------------------------------------------


class Model(Recorder):
    """Has hyperparameters, some under names that data modules have too."""

    def __init__(self, width=3, batch_size=64, seed=3, transform="flip"):
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger])
@ALL
def test_loggers_record_the_settings(kind, options, path, tmp_path, logger):
    logger = logger(tmp_path)
    fit(make(kind, path, options | {"transform": unchanged}), tmp_path, logger=logger)
    logger.finalize("success")
    found = yaml.safe_load(pathlib.Path(logger.log_dir, "hparams.yaml").read_text())
    assert (found["batch_size"], found["seed"], found["split"]["val_fraction"]) == (5, 3, 0.25)
    assert found["transform"] == f"not stored: {__name__}.unchanged"


@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger])
@ALL
def test_a_model_may_have_other_values_under_the_same_names(kind, options, path, tmp_path, logger, caplog):
    logger, datamodule = logger(tmp_path), make(kind, path, options)
    with caplog.at_level("INFO"):
        fit(datamodule, tmp_path, Model(), logger=logger)
    logger.finalize("success")
    found = yaml.safe_load(pathlib.Path(logger.log_dir, "hparams.yaml").read_text())
    assert (found["width"], found["batch_size"], found["data/batch_size"], found["seed"]) == (3, 64, 5, 3)
    assert (found["transform"], found["data/transform"]) == ("flip", None)
    assert "data/seed" not in found
    assert (datamodule.batch_size, datamodule.hparams.batch_size) == (5, 5)
    assert torch.load(tmp_path / "kept.ckpt", weights_only=True)["hyper_parameters"]["batch_size"] == 64


def test_a_model_that_does_not_log_its_hyperparameters_changes_no_name(path, tmp_path):
    class Silent(Model):
        def __init__(self):
            LightningModule.__init__(self)
            Recorder.__init__(self)
            self.save_hyperparameters({"batch_size": 64}, logger=False)

    logger = CSVLogger(tmp_path)
    fit(make(LazyH5DataModule, path, {"x_key": "x"}), tmp_path, Silent(), logger=logger)
    found = yaml.safe_load(pathlib.Path(logger.log_dir, "hparams.yaml").read_text())
    assert found["batch_size"] == 5


# Batch size, resume ------------------------------------------------------------------------------------------


@ALL
def test_the_batch_size_and_its_hyperparameter_are_one_number(kind, options, path):
    datamodule = make(kind, path, options)
    datamodule.batch_size = 6
    assert datamodule.hparams.batch_size == 6
    datamodule.hparams.batch_size = 4
    assert datamodule.batch_size == 4
    datamodule.setup("fit")
    assert datamodule.train_dataloader().sampler.batch_size == 4
    assert datamodule.hparams_initial.batch_size == 5
    datamodule.hparams.batch_size = 2.5
    with pytest.raises(H5ValueError, match="batch_size"):
        datamodule.train_dataloader()


def test_the_batch_size_finder_changes_both(path, tmp_path):
    datamodule, model = make(LazyH5DataModule, path, {"x_key": "x"}), Model()
    trainer = quiet_trainer(default_root_dir=tmp_path)
    found = Tuner(trainer).scale_batch_size(model, datamodule=datamodule, init_val=2, max_trials=2, steps_per_trial=1)
    assert found == datamodule.batch_size == datamodule.hparams.batch_size == model.hparams.batch_size
    checkpoint = fit(datamodule, tmp_path)
    assert LazyH5DataModule.load_from_checkpoint(checkpoint).batch_size == found


@ALL
def test_a_resumed_run_has_the_settings_of_its_constructor_and_the_rows_that_are_left(kind, options, path, tmp_path):
    whole, broken, resumed = Recorder(), Recorder(fail_at=(0, 2)), Recorder()
    quiet_trainer(max_epochs=2).fit(whole, datamodule=make(kind, path, options))
    with pytest.raises(RuntimeError, match="stop here"):
        fit(make(kind, path, options), tmp_path, broken)
    datamodule = make(kind, path, options)
    quiet_trainer(max_epochs=2).fit(resumed, datamodule=datamodule, ckpt_path=tmp_path / "kept.ckpt")
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows
    other = make(kind, path, options)
    other.batch_size = 3
    if kind is not RankCachedH5DataModule:  # its position is one of its own batches' sizes, too
        quiet_trainer(max_epochs=2).fit(Recorder(), datamodule=other, ckpt_path=tmp_path / "kept.ckpt")
    assert other.batch_size == other.hparams.batch_size == 3


# Plain values ------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(),
    st.text(max_size=9),
    st.sampled_from([np.float32(2.5), np.int64(3), np.bool_(True), np.str_("a"), pathlib.Path("a/b"), np.dtype("f4")]),
    st.sampled_from([torch.bfloat16, np.int16, float, torch.device("cpu"), unchanged, object(), b"bytes", slice(3)]),
    st.sampled_from([np.arange(3), torch.ones(2, 2), np.zeros(9999), range(3), {1, 2}, np.array(["a"], object)]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.just(np.int64(7))), inner, max_size=3),
    ),
    max_leaves=9,
)


@given(values=st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
@settings(deadline=None)
def test_any_settings_become_plain_values_that_load_and_stay_the_same(values, tmp_path):
    plain = plain_settings(values)
    assert set(plain) == set(values)
    torch.save(plain, tmp_path / "plain.pt")
    assert repr(torch.load(tmp_path / "plain.pt", weights_only=True)) == repr(plain)
    assert repr(plain_settings(plain)) == repr(plain)
    assert all(len(json.dumps(value)) <= 4096 for value in plain.values())
    yaml.safe_load(yaml.dump(plain))


# Texts -------------------------------------------------------------------------------------------------------


@ALL
def test_a_data_module_prints_its_settings_and_what_it_holds(kind, options, path, tmp_path):
    missing = make(kind, f"{tmp_path}/missing.h5", options)
    assert "missing.h5" in repr(missing)
    assert "setup()" in str(missing)
    assert dict(missing.datasets) == {}
    datamodule = make(kind, path, options)
    datamodule.setup("fit")
    loaders = datamodule.train_dataloader(), datamodule._train_loader
    text = str(datamodule)
    assert loaders == (datamodule._train_loader,) * 2
    assert text == repr(datamodule)
    assert text.startswith(f"{kind.__name__}(")
    assert "split={'group_key': 'group', 'val_fraction': 0.25}" in text
    assert "num_workers" not in text  # as it is by default
    assert "batch_size 5, rank 0 of 1" in text
    assert [line.split(":")[0].strip() for line in text.splitlines()[2:]] == ["train", "val"]
    assert list(datamodule.datasets) == ["train", "val"]
    assert repr(datamodule.datasets["val"]) in text
    assert sum(dataset.n_rows for dataset in datamodule.datasets.values()) == (21 if "where" in options else ROWS)
    assert f"{len(loaders[0])} steps" in repr(loaders[0])
    assert repr(loaders[0].sampler) in repr(loaders[0])
    datamodule.teardown()
    assert repr(datamodule)


def test_the_mapping_of_datasets_is_not_for_writing(path):
    datamodule = make(LazyH5DataModule, path, {"x_key": "x"})
    datamodule.setup("validate")
    assert list(datamodule.datasets) == ["val"]
    with pytest.raises(TypeError):
        datamodule.datasets["train"] = None


# Command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def config(path, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
seed_everything: 3
trainer: {{max_epochs: 1, default_root_dir: {tmp_path}, accelerator: cpu, enable_progress_bar: false}}
model: {{class_path: lightning_models.Recorder}}
data:
  class_path: LazyH5DataModule
  init_args: {{train_path: {path}, x_key: x, with_index: true, batch_size: 6, transform: torch.nn.functional.softsign}}
"""
    )
    return config


def logging_to(folder):
    name = f"{CSVLogger.__module__}.CSVLogger"
    return [f"--trainer.logger.class_path={name}", f"--trainer.logger.init_args.save_dir={folder}"]


def test_the_command_line_stores_functions_by_name_and_resumes(config, tmp_path):
    main(["fit", "--config", str(config), *logging_to(tmp_path / "first")])
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    stored = torch.load(checkpoint, weights_only=True)["datamodule_hyper_parameters"]
    assert (stored["batch_size"], stored["transform"]) == (6, "torch.nn.functional.softsign")
    loaded = LazyH5DataModule.load_from_checkpoint(checkpoint)
    assert (loaded.batch_size, loaded._samples.transform) == (6, torch.nn.functional.softsign)
    more = ["--trainer.max_epochs=2", "--trainer.enable_checkpointing=false", "--data.batch_size=4"]
    main(["fit", "--config", str(config), *logging_to(tmp_path / "then"), *more, f"--ckpt_path={checkpoint}"])
    for folder, batch_size in (("first", 6), ("then", 4)):
        (found,) = (tmp_path / folder).rglob("hparams.yaml")
        assert yaml.safe_load(found.read_text())["batch_size"] == batch_size


def test_a_model_and_a_data_module_of_the_command_line_both_log(config, tmp_path):
    main(["fit", "--config", str(config), f"--model={__name__}.Model", *logging_to(tmp_path / "logs")])
    (found,) = (tmp_path / "logs").rglob("hparams.yaml")
    logged = yaml.safe_load(found.read_text())
    assert (logged["batch_size"], logged["data/batch_size"], logged["width"]) == (64, 6, 3)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert LazyH5DataModule.load_from_checkpoint(checkpoint).batch_size == 6
    main(["fit", "--config", str(config), f"--model={__name__}.Model", f"--ckpt_path={checkpoint}",
          "--trainer.logger=false", "--trainer.enable_checkpointing=false"])  # fmt: skip


def test_the_command_line_prints_a_config_with_plain_values(config, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(config), "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["batch_size"] == 6


@ALL
def test_a_data_module_that_is_dropped_is_forgotten_at_once(kind, options, path):
    gc.disable()  # by counting references alone
    try:
        datamodule = make(kind, path, options)
        datamodule.setup("fit")
        dropped = weakref.ref(datamodule), weakref.ref(datamodule.datasets["train"])
        del datamodule
        assert [each() for each in dropped] == [None, None]
    finally:
        gc.enable()


def test_a_spawned_process_gets_the_hyperparameters(path):
    datamodule = make(LazyH5DataModule, path, {"x_key": "x"})
    datamodule.batch_size = 6
    copy = pickle.loads(pickle.dumps(datamodule))
    assert (copy.hparams, copy.batch_size) == (datamodule.hparams, 6)
    copy.batch_size = 7
    assert (copy.hparams.batch_size, datamodule.hparams.batch_size) == (7, 6)


@ALL
def test_the_repr_shows_a_function_by_its_name_and_datasets_by_the_class_that_users_know(kind, options, path):
    datamodule = make(kind, path, {**options, "transform": unchanged})
    datamodule.setup("fit")
    text = repr(datamodule)
    assert f"transform=<{__name__}.unchanged>" in text
    assert "not stored" not in text
    dataset = {
        LazyH5DataModule: "H5LazyDataset",
        RankCachedH5DataModule: "RankMemCachedH5Dataset",
        CombinedHDF5DataModule: "CombinedHDF5Dataset",
    }[kind]
    assert f"  val: {dataset}(" in text
