"""Bad input ends in a clear error before training starts: what was asked, what is there, what to do."""

import copy
import re
import shutil
import warnings
from itertools import combinations

import h5py
import numpy as np
import pytest
from arguments import nested
from lightning_models import Recorder, quiet_trainer
from processes import run_program

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5Error,
    H5FileError,
    H5KeyError,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
)


@pytest.fixture
def folder(tmp_path):
    with h5py.File(tmp_path / "good.h5", "w") as h5:
        h5["scans/images"] = np.zeros((20, 2, 2), "u1")
        h5["scans/labels"] = np.arange(20)
        h5["scans/short"] = np.arange(19)
        h5["scans/text"] = np.array(["a"] * 20, dtype=object)
        h5["scans/table"] = np.zeros(20, dtype=[("age", "i4"), ("weight", "f4")])
        h5["scans/scalar"] = 3.0
        h5["scans/wide"] = np.zeros((20, 2), dtype=np.longdouble)
        h5.create_dataset("scans/lists", (20,), dtype=h5py.vlen_dtype(np.float32))
        h5["none/images"] = np.zeros((0, 2, 2), "u1")
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        plist.set_filter(500, h5py.h5z.FLAG_OPTIONAL, (0, 0, 4))
        space = h5py.h5s.create_simple((20,))
        h5py.h5d.create(h5["scans"].id, b"blosc2", h5py.h5t.NATIVE_INT32, space, plist)
    good = (tmp_path / "good.h5").read_bytes()
    (tmp_path / "cut.h5").write_bytes(good[:-100])
    (tmp_path / "notes.txt").write_text("no HDF5 here")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("nor here")
    return tmp_path


IMAGES = {"x_key": "scans/images"}
CASES = {
    "no file": ("god.h5", IMAGES, H5FileError, ["god.h5", "does not exist", "Did you mean 'good.h5'"]),
    "a directory without HDF5 files": ("empty", IMAGES, H5FileError, ["without HDF5 files", "Pass an HDF5 file"]),
    "not an HDF5 file": ("notes.txt", IMAGES, H5FileError, ["not an HDF5 file", "b'no HDF5 '"]),
    "a truncated file": ("cut.h5", IMAGES, H5FileError, ["cut.h5", "truncated", "again"]),
    "a missing key": (
        "good.h5",
        {"x_key": "scans/image"},
        H5KeyError,
        ["Did you mean 'scans/images'", "'scans/labels'"],
    ),
    "a group": ("good.h5", {"x_key": "scans"}, H5ValueError, ["is a group", "'scans/images'"]),
    "a scalar": ("good.h5", {"x_key": "scans/scalar"}, H5ValueError, ["is a scalar", "pass segments"]),
    "different row counts": (
        "good.h5",
        IMAGES | {"y_key": "scans/short"},
        H5ValueError,
        ["'scans/images' has 20 rows and 'scans/short' has 19"],
    ),
    "no rows": ("good.h5", {"x_key": "none/images"}, H5ValueError, ["'train' has no rows"]),
    "no rows in a split": (
        "good.h5",
        IMAGES | {"val_fraction": 0.01},
        H5ValueError,
        ["'val' has no rows", "val_fraction=0.01", "of 20 rows", "0.05"],
    ),
    "text for a number": ("good.h5", IMAGES | {"num_workers": "2"}, H5ValueError, ["num_workers='2'", "whole number"]),
    "text for a share": ("good.h5", IMAGES | {"val_fraction": "0.1"}, H5ValueError, ["val_fraction='0.1'"]),
    "a transform that is none": ("good.h5", IMAGES | {"transform": "x"}, H5ValueError, ["transform='x'", "callable"]),
    "an unknown start method": (
        "good.h5",
        IMAGES | {"multiprocessing_context": "threads"},
        H5ValueError,
        ["'threads'", "spawn"],
    ),
    "an open file": (5, IMAGES, H5ValueError, ["train_path=5", "not an open file"]),
    "nothing left by drop_last": (
        "good.h5",
        IMAGES | {"drop_last": True, "batch_size": 21},
        H5ValueError,
        ["drop_last drops all 20 rows", "batch_size 21 x 1 ranks"],
    ),
    "fractions that do not add up": (
        "good.h5",
        IMAGES | {"val_fraction": 0.7, "test_fraction": 0.5},
        H5ValueError,
        ["0.7", "0.5"],
    ),
    "a dtype that does not exist": (
        "good.h5",
        IMAGES | {"x_dtype": "float31"},
        H5ValueError,
        ["'float31'", "'float32'"],
    ),
    "text as x": ("good.h5", {"x_key": "scans/text"}, H5ValueError, ["'scans/text'", "holds text", "y_key"]),
    "a whole table as x": (
        "good.h5",
        {"x_key": "scans/table"},
        H5ValueError,
        ["is a table", "'scans/table/age'", "'scans/table/weight'"],
    ),
    "long doubles as x": ("good.h5", {"x_key": "scans/wide"}, H5ValueError, ["'scans/wide'", "float128"]),
    "a filter that is not installed": (
        "good.h5",
        {"x_key": "scans/blosc2"},
        H5FileError,
        ["number 500", "the plugin for that number"],
    ),
    "batch_size=0": ("good.h5", IMAGES | {"batch_size": 0}, H5ValueError, ["batch_size=0", "at least 1"]),
    "no key, and a doubt": (
        "good.h5",
        {},
        H5KeyError,
        ["x_key was not given", "'scans/images': shape (20, 2, 2)", "x_key="],
    ),
    "two sources for one split": (
        "good.h5",
        IMAGES | {"val_path": "good.h5", "val_fraction": 0.5},
        H5ValueError,
        ["val_path", "not both"],
    ),
    "a fold without folds": ("good.h5", IMAGES | {"fold": 1}, H5ValueError, ["num_folds=None and fold=1"]),
    "groups of another length": (
        "good.h5",
        IMAGES | {"val_fraction": 0.5, "group_key": "scans/short"},
        H5ValueError,
        ["'scans/short' has 19 rows and the data has 20"],
    ),
    "a group that cuts nothing": ("good.h5", IMAGES | {"group_key": "scans/text"}, H5ValueError, ["nothing is split"]),
    "a target without its transform's key": (
        "good.h5",
        IMAGES | {"target_transform": abs},
        H5ValueError,
        ["target_transform was given without y_key"],
    ),
    "a size that is none": ("good.h5", IMAGES | {"shuffle_bytes": "many"}, H5ValueError, ["shuffle.buffer='many'"]),
    "an unknown shuffle": ("good.h5", IMAGES | {"shuffle": "globl"}, H5ValueError, ["'globl'", "'global'"]),
    "half a replica": ("good.h5", IMAGES | {"rank": 0}, H5ValueError, ["both, or neither"]),
    "a negative seed": ("good.h5", IMAGES | {"seed": -1}, H5ValueError, ["seed=-1"]),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_before_training_starts(folder, case, monkeypatch):
    monkeypatch.chdir(folder)
    path, options, kind, words = CASES[case]
    model = Recorder()
    with pytest.raises(kind) as caught:
        quiet_trainer().fit(model, datamodule=LazyH5DataModule(path, **nested(**options)))
    assert isinstance(caught.value, H5Error)
    assert isinstance(caught.value, {H5FileError: OSError, H5KeyError: KeyError, H5ValueError: ValueError}[kind])
    assert not model.train_rows
    text = str(caught.value)
    assert [word for word in words if word not in text] == []
    assert "\\n" not in text  # a KeyError of the usual kind would print its repr


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("validate", "val_path, or split with val_fraction"),
        ("test", "test_path, or split with test_fraction"),
        ("predict", "predict_path"),
    ],
)
def test_a_stage_without_data_says_what_to_pass(folder, stage, words):
    with pytest.raises(H5ValueError, match=words):
        getattr(quiet_trainer(), stage)(Recorder(), datamodule=LazyH5DataModule(folder / "good.h5", **nested(**IMAGES)))


def test_fitting_without_training_data_says_what_to_pass(folder):
    with pytest.raises(H5ValueError, match="train_path"):
        quiet_trainer().fit(Recorder(), datamodule=LazyH5DataModule(**nested(val_path=folder / "good.h5", **IMAGES)))


TWO_PACKAGES = """
import warnings
warnings.simplefilter("ignore")
import {first}
import {second}
import lightning_h5, torch
dm = lightning_h5.LazyH5DataModule({file!r}, x_key="scans/images")
import {trainer} as package
class Model(package.LightningModule):
    def training_step(self, batch, i): return torch.zeros((), requires_grad=True)
    def configure_optimizers(self): return None
trainer = package.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                          enable_progress_bar=False, enable_model_summary=False)
try:
    trainer.fit(Model(), datamodule=dm)
    print("trained")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.wide
@pytest.mark.parametrize(
    ("first", "trainer", "environment", "words"),
    [
        ("lightning.pytorch", "lightning.pytorch", {}, ["trained"]),
        ("pytorch_lightning", "pytorch_lightning", {}, ["trained"]),
        ("lightning.pytorch", "pytorch_lightning", {"LIGHTNING_H5_IMPORT": "pytorch_lightning"}, ["trained"]),
        (
            "lightning.pytorch",
            "pytorch_lightning",
            {},
            ["H5ValueError a Trainer of 'pytorch_lightning'", "for 'lightning'"],
        ),
        (
            "pytorch_lightning",
            "lightning.pytorch",
            {"LIGHTNING_H5_IMPORT": "pytorch_lightning"},
            ["H5ValueError a Trainer of 'lightning'", "for 'pytorch_lightning'"],
        ),
    ],
)
def test_the_two_lightning_packages_are_told_apart(folder, first, trainer, environment, words):
    code = TWO_PACKAGES.format(first=first, second=first, trainer=trainer, file=str(folder / "good.h5"))
    done = run_program(code, folder / "logs", cwd=folder, **environment)
    assert [word for word in words if word not in done.stdout] == [], done.stdout[-500:] + done.stderr[-2000:]


@pytest.mark.wide
def test_a_model_of_the_other_package_is_named_before_the_trainer_refuses_it(folder):
    code = f"""
import warnings
warnings.simplefilter("ignore")
import lightning.pytorch, pytorch_lightning, lightning_h5
class Theirs(pytorch_lightning.LightningModule): pass
datamodule = lightning_h5.LazyH5DataModule({str(folder / "good.h5")!r}, x_key="scans/images")
try:
    lightning.pytorch.Trainer(accelerator="cpu", logger=False).fit(Theirs(), datamodule=datamodule)
except TypeError as error:
    print("refused", error)
"""
    done = run_program(code, folder / "logs", cwd=folder)
    assert "refused" in done.stdout, done.stderr[-1000:]
    assert "__main__.Theirs and this data module come from different Lightning packages" in done.stderr
    assert "use 'lightning.pytorch'" in done.stderr


def test_nothing_warns_in_an_ordinary_run(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*logging interval.*")
        warnings.filterwarnings("ignore", message="The .srun. command is available")
        datamodule = LazyH5DataModule(folder / "good.h5", folder / "good.h5", **nested(**IMAGES, with_index=True))
        quiet_trainer(max_epochs=1).fit(Recorder(), datamodule=datamodule)


STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
MODULES = {
    LazyH5DataModule: ("path", IMAGES),
    RankCachedH5DataModule: ("path", IMAGES),
    CombinedHDF5DataModule: ("path", {"fields": ["scans/images"]}),
}


@pytest.mark.parametrize("done", [stages for n in range(3) for stages in combinations(STAGES, n)], ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_a_loader_of_what_was_not_set_up_names_what_was_and_what_to_call(folder, kind, done):
    argument, names = MODULES[kind]
    splits = ("train", "val", "test", "predict")
    datamodule = kind(**{f"{split}_{argument}": folder / "good.h5" for split in splits}, **names)
    for stage in done:
        datamodule.setup(stage)
    ready = [split for split in splits if any(split in STAGES[stage] for stage in done)]
    for split in splits:
        load = getattr(datamodule, f"{split}_dataloader")
        if split in ready:
            assert len(load()) == 1
            continue
        with pytest.raises(H5ValueError, match=rf"{split}_dataloader\(\) was called") as error:
            load()
        assert (f"has set up {', '.join(map(repr, ready))} only" if ready else "was not called") in str(error.value)
        advised = re.search(r"Call setup\('(\w+)'\).*trainer\.(\w+)\(", str(error.value))
        assert advised[1] == advised[2]
        with_it = copy.deepcopy(datamodule)
        with_it.setup(advised[1])
        assert len(getattr(with_it, f"{split}_dataloader")()) == 1


@pytest.mark.parametrize("stage", [None, "fit", "test"])
@pytest.mark.parametrize("kind", MODULES)
def test_a_loader_of_a_split_that_no_argument_names_says_what_its_setup_would(folder, kind, stage):
    argument, names = MODULES[kind]
    datamodule = kind(
        folder / "good.h5", **{f"test_{argument}": folder / "good.h5"} if stage == "test" else {}, **names
    )
    if stage is not None:
        datamodule.setup(stage)
    for split in ("val", "test", "predict"):
        if stage is not None and split in STAGES[stage]:
            continue
        wanted = next(name for name in ("validate", "test", "predict") if split in STAGES[name])
        with pytest.raises(H5ValueError) as of_setup:
            copy.deepcopy(datamodule).setup(wanted)
        with pytest.raises(H5ValueError) as of_loader:
            getattr(datamodule, f"{split}_dataloader")()
        assert str(of_loader.value) == f"{split}_dataloader() was called, and {of_setup.value}"
        assert f"there is no data for {split!r}. Pass {split}_path" in str(of_setup.value)


@pytest.mark.parametrize("options", [{"test_fraction": 0.5}, {"split_file": "split.json"}, {"x_key": "{split}/x"}])
def test_a_split_that_the_arguments_may_name_asks_for_its_setup(folder, options):
    datamodule = LazyH5DataModule(folder / "good.h5", **nested(**IMAGES | options))
    with pytest.raises(H5ValueError, match=r"Call setup\('test'\)"):
        datamodule.test_dataloader()


@pytest.mark.parametrize("done", [stages for n in range(3) for stages in combinations(STAGES, n)], ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_the_dataset_of_a_split_is_there_from_its_setup_on(folder, kind, done):
    argument, names = MODULES[kind]
    splits = ("train", "val", "test", "predict")
    datamodule = kind(**{f"{split}_{argument}": folder / "good.h5" for split in splits}, **names)
    for stage in done:
        datamodule.setup(stage)
    for split in splits:
        if any(split in STAGES[stage] for stage in done):
            assert getattr(datamodule, f"{split}_dataset") is datamodule.datasets[split]
            continue
        stage = {"train": "fit", "val": "validate"}.get(split, split)
        with pytest.raises(H5ValueError, match=rf"^{split}_dataset was read, and .* Call setup\('{stage}'\) first"):
            getattr(datamodule, f"{split}_dataset")


@pytest.mark.parametrize("kind", MODULES)
def test_the_dataset_of_a_split_without_data_is_none_once_it_is_set_up(folder, kind):
    argument, names = MODULES[kind]
    datamodule = kind(folder / "good.h5", **names)
    with pytest.raises(
        H5ValueError, match=rf"test_dataset was read, and there is no data for 'test'. Pass test_{argument}"
    ):
        datamodule.test_dataset  # noqa: B018
    datamodule.setup()
    assert datamodule.train_dataset is datamodule.datasets["train"]
    assert datamodule.val_dataset is datamodule.test_dataset is datamodule.predict_dataset is None
    datamodule.batch_size = 7
    datamodule.seed = 3  # the datasets are those of other arguments
    with pytest.raises(H5ValueError, match=r"train_dataset was read, and .* was not called after 'seed' was set"):
        datamodule.train_dataset  # noqa: B018
    with pytest.raises(AttributeError):
        datamodule.train_dataset = None


def test_a_setup_that_failed_leaves_no_loader_without_rows(folder):
    datamodule = LazyH5DataModule(folder / "good.h5", folder / "god.h5", **nested(**IMAGES))
    for _ in range(2):
        with pytest.raises(H5FileError, match="god"):
            datamodule.setup("fit")
        for load in (datamodule.train_dataloader, datamodule.val_dataloader):
            with pytest.raises(H5ValueError, match="was not called, or failed"):
                load()
        shutil.copy(folder / "good.h5", folder / "god.h5")
        datamodule.setup("fit")
        assert len(datamodule.train_dataloader()) == len(datamodule.val_dataloader()) == 1
        (folder / "god.h5").unlink()


def test_an_unknown_stage_is_refused(folder):
    with pytest.raises(H5ValueError, match="'fit', 'validate'"):
        LazyH5DataModule(folder / "good.h5", **nested(**IMAGES)).setup("train")


@pytest.mark.parametrize(
    ("make", "given", "begins"),
    [
        (LazyH5DataModule, {"x_key": "scans"}, "x_key='scans' is not in "),
        (LazyH5DataModule, {"x_key": {"a": "scans"}}, "x_key['a']='scans' is not in "),
        (LazyH5DataModule, {"x_key": "x", "y_key": "scans"}, "y_key='scans' is not in "),
        (
            LazyH5DataModule,
            {"x_key": "x", "split": {"val_fraction": 0.2, "group_key": "scans"}},
            "split.group_key='scans' is not in ",
        ),
        (LazyH5DataModule, {"x_key": "x", "weights": "scans"}, "weights='scans' is not in "),
        (CombinedHDF5DataModule, {"fields": ["x", "scans"]}, "'scans' of fields is not in "),
        (CombinedHDF5DataModule, {"fields": ["x"], "where": {"scans": 1}}, "'scans' of where is not in "),
        (
            CombinedHDF5DataModule,
            {"fields": {"x": "x", "g": "scans"}},
            "fields['g']='scans' is not in ",
        ),
    ],
)
def test_an_array_that_is_missing_is_named_with_its_argument(make_h5, make, given, begins):
    module = make(make_h5({"x": np.arange(12), "y": np.arange(12)}), **given)
    with pytest.raises(H5KeyError) as error:
        module.setup("fit")
    assert str(error.value).startswith(begins)
