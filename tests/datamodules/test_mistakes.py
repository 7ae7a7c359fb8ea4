"""Mistakes that users make: each is an error that says what is wrong, names what is near, and proposes what works."""

import inspect
import tarfile
from importlib.metadata import version

import h5py
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_models import SaveOnException, quiet_trainer
from torch.nn import functional as F

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5Error,
    H5LazyDataset,
    H5StatsMonitor,
    LazyH5DataModule,
    RankCachedH5DataModule,
    SegmentOptions,
)
from lightning_h5.cli import main

IS_OLD_PARSER = int(version("jsonargparse").split(".")[1]) < 28  # of settings in YAML, it says so in its own words

N_ROWS = 60


CONTENTS = {
    "lfs.h5": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "annex.h5": b"/annex/objects/MD5E-s12345--abc.h5\n",
    "page.h5": b"\n<!DOCTYPE html><html><head><title>404</title></head></html>",
    "denied.h5": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "answer.h5": b'{"message": "not found"}',
    "digits.h5.gz": b"\x1f\x8b\x08\x00",
    "arrays.npz": b"PK\x03\x04-\x00",
    "array.npy": b"\x93NUMPY\x01\x00",
    "old.mat": b"MATLAB 5.0 MAT-file, Platform: GLNXA64".ljust(128),
    "classic.nc": b"CDF\x01\x00\x00",
    "hdf4.hdf": b"\x0e\x03\x13\x01",
    "table.parquet": b"PAR1",
    "pickle.h5": b"\x80\x04\x95",
    "zeros.h5": bytes(4096),
    "nothing.h5": b"",
}
"""Files that are not HDF5, some by their names."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small files of the kinds that users have."""
    path = tmp_path_factory.mktemp("mistakes")
    write(
        path / "digits.h5",
        {
            "images": np.ones((N_ROWS, 8, 8), "u1"),
            "features": np.ones((N_ROWS, 5)),
            "labels": np.arange(N_ROWS) % 3,
            "small": (np.arange(N_ROWS) % 3).astype("i4"),
            "scores": np.ones(N_ROWS, "f4"),
            "names": np.array([f"name {row % 4}" for row in range(N_ROWS)], object),
            "patient": np.arange(N_ROWS) // 10,
            "short": np.arange(N_ROWS - 1),
            "scale": 3.0,
            "people": np.zeros(N_ROWS, [("age", "i4"), ("mass", "f4")]),
            "meta/info": np.zeros(3),
        },
    )
    write(path / "pair.h5", {"images": np.zeros((30, 4), "f4"), "labels": np.zeros(30, "i8")})
    write(path / "unlike.h5", {"images": np.zeros((30, 5), "f4"), "classes": np.zeros(30, "i8")})
    write(path / "parts.h5", {"train/x": np.zeros((40, 4), "f4"), "valid/x": np.zeros((10, 4), "f4")})
    demos = {
        f"data/demo_{number}/{name}": np.zeros((20 + number, size), "f4")
        for number in range(4)
        for name, size in (("obs", 3), ("actions", 2))
    }
    write(path / "robot.h5", demos | {"mask/valid": np.array(["demo_2", "demo_3"], object)})
    write(path / "numbered.h5", {f"rec_{number}": np.zeros((30 + number, 2), "f4") for number in range(3)})
    write(path / "night.h5", {"signal": np.zeros((1000, 2), "f4"), "stages": np.zeros(10, "i8")})
    write(path / "channels.h5", {"signal": np.zeros((8, 500), "f4"), "stages": np.zeros(500, "i8")})
    write(path / "trials.h5", {"obs": np.zeros((4, 50, 3), "f4")})
    write(path / "packed.h5", {"x": np.zeros((20, 4), "i2")})
    with h5py.File(path / "packed.h5", "a") as file:
        file["x"].attrs["scale_factor"] = 0.1
    for number in range(3):
        write(path / f"volumes/vol_{number}.h5", {"image": np.zeros((16, 16, 16), "f4")})
        write(path / f"slides/slide_{number}.h5", {"features": np.zeros((10, 4), "f4")})
    (path / "slides.csv").write_text("slide,label\nslide_0.h5,0\nslide_1.h5,1\nslide_2.h5,0\n")
    (path / "rows.csv").write_text("row,score\n" + "".join(f"{row},{row}\n" for row in range(50)))
    (path / "notes.txt").write_text("no HDF5")
    for name, content in CONTENTS.items():
        (path / name).write_bytes(content)
    with tarfile.open(path / "archive.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(path / "pair.h5", "pair.h5")
    (path / "store.zarr").mkdir()
    (path / "store.zarr" / "zarr.json").write_text("{}")
    (path / "empty").mkdir()
    (path / "fit.yaml").write_text(
        "seed_everything: false\nmodel:\n  class_path: lightning.pytorch.demos.boring_classes.BoringModel\n"
        "data:\n  class_path: LazyH5DataModule\n  init_args:\n    train_path: digits.h5\n    split: {val_frac: 0.1}\n"
    )
    return path


def write(path, arrays):
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        for key, values in arrays.items():
            file[key] = values


def setup(*paths, stage="fit", kind=LazyH5DataModule, **arguments):
    """Set up a data module; of the digits unless paths are given."""
    module = kind(*(paths or ["digits.h5"]), **arguments)
    module.setup(stage)
    return module


def of_images(**arguments):
    return setup(x_key="images", **arguments)


def of_robot(**arguments):
    return setup("robot.h5", **{"x_key": "obs", "segments": "data/*"} | arguments)


def of_volumes(**arguments):
    return setup("volumes/*.h5", x_key="image", **arguments)


def of_slides(table, y_key="table/label"):
    return setup("slides/*.h5", x_key="features", y_key=y_key, sample="segment", table=table)


def mixed(**options):
    sources = {"a": "pair.h5", "b": "pair.h5"}
    return LazyH5DataModule(x_key="images", mixture={"sources": sources, **options})


class Model(LightningModule):
    """A layer and a loss, as users write them."""

    def __init__(self, layer, loss=lambda output, _: output.mean()):
        super().__init__()
        self.layer, self.loss = layer, loss

    def training_step(self, batch, batch_idx):
        x, y = batch if isinstance(batch, tuple | list) else (batch, None)
        return self.loss(self.layer(x), y)

    def validation_step(self, batch, batch_idx):
        """Nothing: there is no validation data."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(model, **arguments):
    quiet_trainer(fast_dev_run=True).fit(model, datamodule=LazyH5DataModule("digits.h5", **arguments))


def train_on(loss, n_outputs=3, **arguments):
    train(Model(torch.nn.Linear(5, n_outputs), loss), x_key="features", **arguments)


def of_one_output(loss):
    return lambda output, y: loss(output[:, 0], y)


class Broken(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx:
            raise RuntimeError("stop here")
        return self.layer(torch.ones(1, 1)).mean()


def resumed_with(tmp_path, **arguments):
    """Resume a run that trained on images with other arguments."""
    module = LazyH5DataModule("digits.h5", x_key="images", batch_size=8)
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(callbacks=[SaveOnException(tmp_path)]).fit(Broken(torch.nn.Linear(1, 1)), datamodule=module)
    changed = LazyH5DataModule("digits.h5", batch_size=8, **{"x_key": "images"} | arguments)
    quiet_trainer().fit(Broken(torch.nn.Linear(1, 1)), datamodule=changed, ckpt_path=tmp_path / "exception.ckpt")


def run(*words):
    """Run the command line; its text on stderr becomes the error's."""
    main(words)


PATHS = {
    "a misspelled file": (lambda: setup("digit.h5"), ["train_path='digit.h5'", "Did you mean 'digits.h5'"]),
    "a glob without a match": (lambda: setup("digits_*.h5"), ["matches no file", "'digits.h5'"]),
    "a folder without files": (lambda: setup("empty"), ["directory without HDF5 files", "Pass an HDF5 file"]),
    "another format": (lambda: setup("notes.txt"), ["not an HDF5 file", "begins with b'no HDF5'"]),
    "an open file": (lambda: setup(h5py.File("digits.h5")), ["Pass the path", "not an open file"]),
    "keys by position": (
        lambda: setup("digits.h5", "images", "labels"),
        ["val_path='images', test_path='labels'", "x_key='images', y_key='labels'"],
    ),
    "a key by position": (lambda: setup("digits.h5", "images"), ["no such file", "Pass keys by name: x_key='images'"]),
    "more values than paths": (
        lambda: LazyH5DataModule("a.h5", "b.h5", "c.h5", "d.h5", "x"),
        ["5 positional arguments", "'predict_path'", "such as x_key=..."],
    ),
    "a key behind the path": (lambda: setup("digits.h5/images"), ["pass 'digits.h5', and 'images' as the key"]),
    "a key behind colons": (lambda: setup("digits.h5::images"), ["pass 'digits.h5', and 'images' as the key"]),
    "a file twice": (lambda: setup(["digits.h5", "digits.h5"]), ["more than once", "Name each file once"]),
    "no path": (lambda: LazyH5DataModule(x_key="x").setup("fit"), ["no data for 'train'", "Pass train_path"]),
}
OTHER_FILES = {
    "a pointer of Git LFS": (lambda: setup("lfs.h5"), ["is not an HDF5 file", "run `git lfs pull`"]),
    "a pointer of git-annex": (lambda: setup("annex.h5"), ["run `git annex get` or `datalad get`"]),
    "a web page": (lambda: setup("page.h5"), ["It is a web page", "Download the file again"]),
    "an error of a store": (lambda: setup("denied.h5"), ["It is XML", "Download the file again"]),
    "an error of a server": (lambda: setup("answer.h5"), ["It is JSON", "Download the file again"]),
    "a compressed file": (lambda: setup("digits.h5.gz"), ["compressed with gzip", "`gunzip`"]),
    "arrays of NumPy": (lambda: setup("arrays.npz"), ["ZIP archive, such as .npz", "write its arrays to an HDF5 file"]),
    "an array of NumPy": (lambda: setup("array.npy"), ["an array of NumPy", "np.load"]),
    "an old MAT file": (lambda: setup("old.mat"), ["older format than 7.3", "'-v7.3'"]),
    "classic netCDF": (lambda: setup("classic.nc"), ["netCDF in its classic format", "nccopy -k nc4"]),
    "HDF4": (lambda: setup("hdf4.hdf"), ["It is HDF4", "h4toh5convert"]),
    "a table of columns": (lambda: setup("table.parquet"), ["It is Parquet", "as the argument table"]),
    "a pickle": (lambda: setup("pickle.h5"), ["a pickle of Python", "write its arrays to an HDF5 file"]),
    "a download that did not end": (lambda: setup("zeros.h5"), ["first bytes are zeros", "Copy or download it again"]),
    "an empty file": (lambda: setup("nothing.h5"), ["It is empty", "Copy or download it again"]),
    "an archive": (lambda: setup("archive.tar", x_key="images"), ["is a tar archive", "`tar xf`"]),
    "a store of Zarr": (lambda: setup("store.zarr"), ["It is a Zarr store", "Write its arrays to an HDF5 file"]),
    "an array of a file": (
        lambda: setup(h5py.File("digits.h5")["images"]),
        ["neither a path", "Pass the path, 'digits.h5'"],
    ),
    "an array in memory": (lambda: setup(np.zeros((100, 100))), ["neither a path", "TensorDataset"]),
    "bytes as a path": (lambda: setup(b"digits.h5"), ["Pass text: 'digits.h5'"]),
    "a set of paths": (lambda: setup({"digits.h5"}), ["Pass a list, whose order"]),
    "a generator of paths": (lambda: setup(path for path in ["digits.h5"]), ["Pass list(...) of it"]),
    "named paths": (lambda: setup({"a": "digits.h5"}), ["several sources as mixture"]),
    "lists in a list": (lambda: setup([["digits.h5"]]), ["Pass a flat list"]),
    "a path of Windows": (lambda: setup(r"volumes\vol_0.h5"), ["Did you mean 'volumes/vol_0.h5'"]),
    "a drive of Windows": (lambda: setup(r"C:\data\digits.h5"), ["Folders are separated by '/'"]),
    "several paths as text": (lambda: setup("digits.h5, pair.h5"), ["Pass a list of files: ['digits.h5', 'pair.h5']"]),
    "a list as text": (lambda: setup("['digits.h5', 'pair.h5']"), ["Pass a list of files: ['digits.h5', 'pair.h5']"]),
    "a path in quotes": (lambda: setup("'digits.h5'"), ["Did you mean 'digits.h5'"]),
    "a path without its suffix": (lambda: setup("digits"), ["Did you mean 'digits.h5'"]),
    "a variable that is not set": (
        lambda: setup("${NO_SUCH_FOLDER}/digits.h5"),
        ["Variables are not expanded, and this one is not set", "Write the path out"],
    ),
}
KEYS = {
    "a misspelled key": (lambda: setup(x_key="image"), ["x_key='image' is not in", "Did you mean 'images'"]),
    "a key in other letters": (lambda: setup(x_key="Images"), ["Did you mean 'images'"]),
    "a group": (lambda: setup(x_key="meta"), ["is a group", "such as 'meta/info'"]),
    "no key": (setup, ["x_key was not given", "'images': shape (60, 8, 8), uint8", "x_key="]),
    "a target alone": (lambda: setup(y_key="labels"), ["without x_key", "Pass both"]),
    "text as input": (lambda: setup(x_key="names"), ["holds text", "y_key"]),
    "a scalar": (lambda: setup(x_key="scale"), ["is a scalar", "Name an array with an axis"]),
    "a misspelled member": (lambda: setup(x_key="people/agee"), ["'age', 'mass'", "Did you mean 'age'"]),
    "a table as a whole": (lambda: setup(x_key="people"), ["is a table", "'people/age'", "or several as a list"]),
    "fields and keys": (lambda: of_images(fields=["labels"]), ["fields cannot be combined with x_key", "flat dicts"]),
    "a number as key": (lambda: setup(x_key=3), ["x_key=3", "such as 'group/images'"]),
    "a misspelled field": (lambda: setup(fields={"x": "imagess"}), ["fields['x']='imagess'", "Did you mean 'images'"]),
    "another word for a split": (lambda: setup("parts.h5", x_key="{part}/x"), ["{part} stands for nothing; {split}"]),
    "a point for a slash": (lambda: setup("parts.h5", x_key="train.x"), ["Did you mean 'train/x'"]),
    "a file without the target": (
        lambda: setup(["pair.h5", "unlike.h5"], x_key="images", y_key="labels"),
        ["y_key='labels' is not in", "unlike.h5", "'classes'"],
    ),
    "files of other shapes": (
        lambda: setup(["pair.h5", "unlike.h5"], x_key="images"),
        ["(4,)", "(5,)", "a data module for each"],
    ),
    "packed integers": (lambda: setup("packed.h5", x_key="x"), ["packed", "decode={'x': 'cf'}", "x_dtype='int16'"]),
}
SEGMENTS = {
    "a row too few": (
        lambda: of_images(y_key="short"),
        ["60 rows and 'short' has 59", "segments={'constants': ['short']}"],
    ),
    "another rate": (
        lambda: setup("night.h5", x_key="signal", y_key="stages"),
        ["1000 rows", "segments={'steps_per': {'stages': 100}}"],
    ),
    "steps along another axis": (
        lambda: setup("channels.h5", x_key="signal", y_key="stages"),
        ["Axis 1 of 'signal'", "segments={'step_axis': {'signal': 1}}"],
    ),
    "episodes without segments": (
        lambda: of_robot(segments=None),
        ["x_key='obs' is not in", "segments='data/*'", "such as 'obs'"],
    ),
    "a group of episodes": (lambda: of_robot(segments=None, x_key="data"), ["is a group", "segments='data/*'"]),
    "episodes as fields": (
        lambda: setup("robot.h5", kind=CombinedHDF5DataModule),
        ["unclear what a row", "segments='data/*'"],
    ),
    "a pattern in another group": (lambda: of_robot(segments="demo_*"), ["the file has 'data'", "'data/demo_*'"]),
    "a pattern of other names": (lambda: of_robot(segments="data/episode_*"), ["'demo_0'", "such as 'data/demo_*'"]),
    "a misspelled group": (lambda: of_robot(segments="dat/*"), ["no group 'dat'", "Did you mean 'data'", "'data/*'"]),
    "a pattern of arrays": (
        lambda: of_robot(segments="data/*/obs"),
        ["matches arrays", "Pass segments='data/*', and 'obs' as the key"],
    ),
    "no pattern": (lambda: of_robot(segments="data"), ["no '*'", "'data/*'", "{'key': 'data'}"]),
    "a name that groups lack": (
        lambda: of_robot(x_key="observations"),
        ["x_key='observations'", "'data/demo_0' has the arrays 'actions', 'obs'", "Did you mean 'obs'"],
    ),
    "a name of the whole file": (
        lambda: of_robot(x_key="data/demo_0/obs"),
        ["x_key='data/demo_0/obs'", "relative to a group", "pass 'obs'"],
    ),
    "a pattern of other arrays": (lambda: setup("numbered.h5", x_key="record_*"), ["'rec_0'", "such as 'rec_*'"]),
    "two definitions of segments": (
        lambda: of_images(segments={"key": "patient", "lengths": "short"}),
        ["'key', 'lengths'", "Pass one"],
    ),
    "a list of groups": (
        lambda: of_robot(segments={"groups": ["data/demo_0", "data/demo_1"]}),
        ["groups=['data/demo_0', 'data/demo_1']", "Pass text"],
    ),
    "an axis by name": (lambda: of_images(segments={"axis": "time"}), ["segments.axis='time'", "number of an axis"]),
    "ends by number": (lambda: of_images(segments={"ends": 3}), ["segments.ends=3", "the name of an array"]),
    "rows with a length": (
        lambda: of_images(segments={"max_length": 5}),
        ["segments.max_length", "samples are rows", "sample='segment'"],
    ),
    "a misspelled option": (lambda: of_images(segments={"group": "*"}), ["no field 'group'", "Did you mean 'groups'"]),
    "an axis that is not there": (
        lambda: setup("trials.h5", x_key="obs", segments={"axis": 5}),
        ["axis 5 of 'obs'", "(4, 50, 3)", "Name one of its axes"],
    ),
    "an axis twice": (
        lambda: setup("trials.h5", x_key="obs", segments={"axis": 0}),
        ["segments.step_axis=0", "twice", "step_axis=1"],
    ),
    "segments of several lengths": (
        lambda: of_robot(sample="segment"),
        ["20 steps", "21 in another", "collate_fn='pad'", "a window"],
    ),
    "a window longer than its segments": (lambda: of_images(window=100), ["100 steps", "has 60", "window.pad"]),
    "a window as text": (lambda: of_images(window="-1:3"), ["window='-1:3'", "[start, stop] such as [-1, 3]"]),
    "a window from right to left": (lambda: of_images(window=[3, -1]), ["[3, -1]", "a stop after the start"]),
    "a window of another field": (
        lambda: of_robot(y_key="actions", window={"obs": 0, "action": [0, 5]}),
        ["window.steps names 'action'", "Did you mean 'actions'"],
    ),
    "a window without an option": (lambda: of_images(window={"size": 10}), ["names 'size'", "'length'"]),
    "padding by another name": (
        lambda: of_images(window={"length": 5, "pad": "zero"}),
        ["window.pad='zero'", "Did you mean 'zeros'"],
    ),
    "a sample of another kind": (lambda: of_images(sample="windows"), ["sample='windows'", "'window'"]),
    "a patch as a number": (lambda: of_volumes(patch=8), ["patch={'shape': [8, 8, 8]}"]),
    "a patch with a size": (lambda: of_volumes(patch={"size": [8, 8, 8]}), ["no field 'size'", "Did you mean 'shape'"]),
    "a patch larger than volumes": (
        lambda: of_volumes(patch={"shape": [32, 32, 32]}),
        ["(16, 16, 16)", "patch.border='pad'"],
    ),
    "an index out of range": (
        lambda: of_images(select={"images": {1: [0, 9]}}),
        ["index 9 of axis 1", "length 8"],
    ),
    "a decoder of another field": (
        lambda: of_images(decode={"image": "image"}),
        ["decode names 'image'", "Did you mean 'images'"],
    ),
}
SPLITS = {
    "a fraction as an argument": (
        lambda: of_images(val_fraction=0.1),
        ["no argument 'val_fraction'", "Pass split={'val_fraction': 0.1}"],
    ),
    "a percentage": (lambda: of_images(split=10), ["10 was given", "Did you mean 0.1"]),
    "fractions beyond 1": (lambda: of_images(split=[0.8, 0.3]), ["sum to 1.1", "[train, val]"]),
    "a misspelled fraction": (lambda: of_images(split={"val_frac": 0.1}), ["Did you mean 'val_fraction'"]),
    "two sources of validation": (
        lambda: setup("digits.h5", "pair.h5", x_key="images", split=0.1),
        ["val_path was given", "not both"],
    ),
    "a misspelled group of rows": (
        lambda: of_images(split={"val_fraction": 0.2, "group_key": "patients"}),
        ["split.group_key='patients'", "Did you mean 'patient'"],
    ),
    "a fold too high": (lambda: of_images(split={"num_folds": 5, "fold": 5}), ["counted from 0", "pass 0 to 4"]),
    "a mask that is missing": (
        lambda: of_robot(split={"key": "mask/{split}"}),
        ["'mask/train'", "'mask/valid' in 'mask'", "split=0.1"],
    ),
    "no list of training segments": (
        lambda: of_robot(split={"key": {"val": "mask/valid"}}),
        ["no data for 'train'", "Add the array that lists its segments"],
    ),
    "no validation data": (lambda: of_images(stage="validate"), ["no data for 'val'", "Pass val_path"]),
}
FILTERS = {
    "a class that is not there": (
        lambda: of_images(y_key="labels", label=9),
        ["label=9 keeps 0", "the classes are 0, 1, 2"],
    ),
    "a class without a target": (lambda: of_images(label=1), ["label=1", "pass the target as y_key"]),
    "a class of text": (lambda: of_images(y_key="names", label=1), ["holds text", "where={'names': ...}"]),
    "a misspelled condition": (lambda: of_images(where={"label": 1}), ["'label' of where", "Did you mean 'labels'"]),
    "a value that no row has": (lambda: of_images(where={"labels": 7}), ["keeps 0", "the values are 0, 1, 2"]),
    "a condition as text": (lambda: of_images(where="labels == 1"), ["where='labels == 1'", "where={'age'"]),
    "a mask without a class": (lambda: of_images(valid_mask="labels"), ["valid_mask='labels'", "Pass label"]),
    "statistics of another field": (
        lambda: of_images(normalize={"image": {"mean": 0, "std": 1}}),
        ["no 'image'", "Did you mean 'images'"],
    ),
    "statistics as a pair": (lambda: of_images(normalize=(0, 1)), ["normalize=(0, 1)", "{'mean': 0.5, 'std': 0.2}"]),
    "several transforms": (lambda: of_images(transform=[abs, abs]), ["is not callable", "Compose"]),
    "a transform of no target": (lambda: of_images(target_transform=abs), ["without y_key", "Pass y_key"]),
    "a misspelled way to collate": (lambda: of_images(collate_fn="pead"), ["Did you mean 'pad'"]),
    "a class as a transform": (
        lambda: of_images(transform=torch.nn.Identity),
        ["transform=Identity is a class", "Pass an object of it: transform=Identity(...)"],
    ),
    "a transform of input and target": (
        lambda: of_images(transform=lambda x, y: (x, y)),
        ["requires the arguments 'x', 'y'", "called with one, the input of a sample", "batch_transform with a batch"],
    ),
    "a dtype of no target": (lambda: of_images(y_dtype="int64"), ["y_dtype was given without y_key", "Pass y_key"]),
    "a dtype of text": (
        lambda: of_images(y_key="names", y_dtype="int64"),
        ["y_dtype='int64' was given", "holds text", "Pass decode={'names': 'category'}"],
    ),
    "a misspelled decoder": (lambda: of_images(decode={"images": "imge"}), ["Did you mean 'image'"]),
    "numbers as categories": (
        lambda: of_images(y_key="labels", decode={"labels": "category"}),
        ["decodes text", "Leave this field out of decode"],
    ),
    "indices without an axis": (
        lambda: of_images(select={"images": [0, 2]}),
        ["select={'images': [0, 2]}", "such as select={'images': {1: [0, 2]}}"],
    ),
    "indices without a field": (lambda: of_images(select=[0, 2]), ["select=[0, 2]", "{'image': {1: [0, 2]}}"]),
    "no indices": (lambda: of_images(select={"images": {1: []}}), ["select takes []", "a list of indices"]),
    "a set of fields": (lambda: setup(fields={"images", "labels"}), ["is a set, which has no order", "Pass a list"]),
    "a misspelled dtype": (lambda: of_images(x_dtype="flaot32"), ["x_dtype='flaot32'", "Did you mean 'float32'"]),
}
TORCH = {
    "float64 in a layer": (
        lambda: train_on(lambda output, _: output.mean(), x_dtype=None),
        ["'features' is loaded as float64", "Pass x_dtype='float32'"],
    ),
    "images in a convolution": (
        lambda: train(Model(torch.nn.Conv1d(8, 3, 1)), x_key="images"),
        ["'images' is loaded as uint8", "Pass x_dtype='float32'"],
    ),
    "classes of 32 bits": (
        lambda: train_on(F.cross_entropy, y_key="small"),
        ["'small' is loaded as int32", "Pass y_dtype='int64' to"],
    ),
    "classes as floats": (
        lambda: train_on(F.cross_entropy, y_key="scores"),
        ["'scores' is loaded as float32", "Pass y_dtype='int64' to"],
    ),
    "whole numbers as probabilities": (
        lambda: train_on(of_one_output(F.binary_cross_entropy_with_logits), y_key="labels"),
        ["'labels' is loaded as int64", "Pass y_dtype='float32' to"],
    ),
    "text as classes": (
        lambda: train_on(F.cross_entropy, y_key="names"),
        ["'names' is text", "pass decode={'names': 'category'}"],
    ),
}
RUNNING = {
    "workers by number": (lambda: of_images(workers=4), ["workers=4", "Pass num_workers=4"]),
    "a misspelled option of workers": (lambda: of_images(workers={"persistnt": 1}), ["Did you mean 'persistent'"]),
    "a flag as text": (lambda: of_images(drop_last="false"), ["drop_last='false'", "Pass True or False"]),
    "a flag of an option as text": (
        lambda: of_images(files={"trusted": "no"}),
        ["FileOptions was given trusted='no'", "Pass True or False"],
    ),
    "a time as text": (lambda: of_images(distributed={"setup_timeout": "5m"}), ["'5m'", "Pass seconds"]),
    "a batch size that is set as text": (
        lambda: setattr(of_images(), "batch_size", "8"),
        ["batch_size='8'", "a whole number"],
    ),
    "an argument inside of an option": (
        lambda: of_images(workers={"num_workers": 4}),
        ["no field 'num_workers'", "an argument of its own. Pass num_workers=4"],
    ),
    "a field of another option": (
        lambda: of_images(split={"val_fraction": 0.1, "groups": "data/*"}),
        ["split has no field 'groups'", "SegmentOptions has it"],
    ),
    "the class of a data module": (
        lambda: quiet_trainer(fast_dev_run=True).fit(BoringModel(), datamodule=RankCachedH5DataModule),
        ["the class of a data module instead of an instance", "datamodule=LazyH5DataModule("],
    ),
    "a row cache of another class": (lambda: of_images(row_cache=10), ["'row_cache'", "CombinedHDF5DataModule has it"]),
    "a misspelled mode": (
        lambda: of_images(kind=RankCachedH5DataModule, memory="interleaved"),
        ["Did you mean 'interleave'"],
    ),
    "a size that is none": (lambda: of_images(files={"cache_bytes": "4 gigs"}), ["'4 gigs'", "such as '512 MiB'"]),
    "a misspelled order": (lambda: of_images(shuffle="globl"), ["shuffle.mode='globl'", "Did you mean 'global'"]),
    "an order of the seeds": (lambda: of_images(shuffle="window"), ["Pass shuffle='chunks'"]),
    "an empty batch": (lambda: of_images(batch_size=0), ["batch_size=0", "at least 1"]),
    "batches larger than the data": (
        lambda: of_images(batch_size=100, drop_last=True),
        ["drop_last drops all 60 rows", "Make batch_size smaller"],
    ),
    "a misspelled strategy": (lambda: mixed(strategy="weightd"), ["Did you mean 'weighted'"]),
    "a loader before setup": (
        lambda: LazyH5DataModule("digits.h5", x_key="images").train_dataloader(),
        ["setup() was not called", "Call setup('fit')"],
    ),
    "a stage by its split": (lambda: of_images(stage="train"), ["setup('train')", "'fit'"]),
    "a misspelled verb": (lambda: run("inspct", "digits.h5"), ["'inspct' is not a verb", "Did you mean 'inspect'"]),
    "a misspelled setting in YAML": (
        lambda: run("fit", "--config", "fit.yaml"),
        ["val_frac" if IS_OLD_PARSER else "Did you mean 'val_fraction'"],
    ),
}
ARGUMENTS = {
    "batchsize": (lambda: of_images(batchsize=4), ["LazyH5DataModule has no argument 'batchsize'", "'batch_size'"]),
    "paths": (lambda: of_images(paths="digits.h5"), ["Did you mean 'train_path'"]),
    "shuffel": (lambda: of_images(shuffel=True), ["Did you mean 'shuffle'"]),
    "transforms": (lambda: of_images(transforms=abs), ["Did you mean 'transform'"]),
    "worker": (lambda: of_images(worker=4), ["Did you mean 'num_workers'"]),
    "h5_path": (lambda: of_images(h5_path="digits.h5"), ["Did you mean 'train_path'"]),
    "obs_keys": (lambda: of_images(obs_keys=["obs"]), ["Did you mean 'fields'"]),
    "seq_length": (lambda: of_images(seq_length=10), ["Did you mean 'window'"]),
    "frame_stack": (lambda: of_images(frame_stack=2), ["Did you mean window=[-1, 1]"]),
    "hdf5_cache_mode": (lambda: of_images(hdf5_cache_mode="all"), ["RankCachedH5DataModule", "in memory"]),
    "in_memory": (lambda: of_images(in_memory=True), ["RankCachedH5DataModule", "in memory"]),
    "sampler": (lambda: of_images(sampler=None), ["shuffle, weights, mixture"]),
    "mean": (lambda: of_images(mean=0.5), ["Did you mean normalize="]),
    "train_size": (lambda: of_images(train_size=0.8), ["Did you mean split=[0.8, 0.2]"]),
    "load_fields": (lambda: of_images(load_fields=["x"]), ["Did you mean 'fields'"]),
    "allowed_guids": (lambda: of_images(allowed_guids=["a"]), ["Did you mean where={'guid': [...]}"]),
    "an argument of a dataset": (lambda: H5LazyDataset("digits.h5", "images", indexes=[1]), ["'indices'"]),
    "fields of a dataset": (lambda: CombinedHDF5Dataset("digits.h5", fields=["images"]), ["'load_fields'"]),
    "an option's field": (lambda: SegmentOptions(group="data/*"), ["SegmentOptions has no argument", "'groups'"]),
    "an argument of a callback": (lambda: H5StatsMonitor(log_every=5), ["Did you mean 'log_every_n_steps'"]),
}
TABLES = {
    "names with suffixes": (
        lambda: of_slides({"path": "slides.csv", "on": {"slide": "@stem"}}),
        ["no line in which 'slide' is 'slide_0'", "'slide_0.h5', with a suffix", "Pass on={'slide': '@file'}"],
    ),
    "a misspelled column": (
        lambda: of_slides({"path": "slides.csv", "on": {"slides": "@file"}}),
        ["table.on names the column 'slides'", "Did you mean 'slide'"],
    ),
    "a column without its prefix": (
        lambda: of_slides({"path": "slides.csv", "on": {"slide": "@file"}}, y_key="label"),
        ["y_key='label' is not in", "pass 'table/label'"],
    ),
    "a table of fewer lines": (
        lambda: of_images(y_key="table/score", table="rows.csv"),
        ["50 lines and the data has 60 rows", "table.on"],
    ),
}
MISTAKES = PATHS | OTHER_FILES | KEYS | SEGMENTS | SPLITS | FILTERS | RUNNING | ARGUMENTS | TABLES


def message_of(call, capsys, kinds):
    """The message of a mistake, with its notes and what was printed."""
    with pytest.raises(kinds) as caught:
        call()
    notes = getattr(caught.value, "__notes__", [])
    printed = capsys.readouterr().err if isinstance(caught.value, SystemExit) else ""
    return "\n".join([str(caught.value), *notes, printed])


def problems_of(message, words):
    missing = [word for word in words if word not in message]
    return [f"lacks {missing}: {message}"] * bool(missing) + [f"{len(message)} letters"] * (len(message) >= 2000)


def test_a_mistake_is_an_error_before_training_with_its_cause_and_remedy(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for name, (call, words) in MISTAKES.items():
        message = message_of(call, capsys, (H5Error, TypeError, SystemExit))
        assert problems_of(message, words) == [], name


def test_a_dtype_that_torch_refuses_at_the_first_batch_is_explained(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for name, (call, words) in TORCH.items():
        assert problems_of(message_of(call, capsys, (RuntimeError, TypeError)), words) == [], name


def test_a_resume_with_another_key_names_it(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    message = message_of(lambda: resumed_with(tmp_path, x_key="features"), capsys, H5Error)
    assert problems_of(message, ["x_key was 'images' and is 'features'", "restart_epoch"]) == []


REMEDIES = {
    "keys by name": lambda: of_images(y_key="labels"),
    "another rate": lambda: setup("night.h5", x_key="signal", y_key="stages", segments={"steps_per": {"stages": 100}}),
    "steps along another axis": lambda: setup(
        "channels.h5", x_key="signal", y_key="stages", segments={"step_axis": {"signal": 1}}
    ),
    "a constant": lambda: of_images(y_key="short", segments={"constants": ["short"]}),
    "episodes": lambda: of_robot(window=3),
    "a pattern that matches": lambda: of_robot(segments="data/demo_*", window=3),
    "arrays that match": lambda: setup("numbered.h5", x_key="rec_*", window=3),
    "names with suffixes": lambda: of_slides({"path": "slides.csv", "on": {"slide": "@file"}}),
    "an axis of steps": lambda: setup("trials.h5", x_key="obs", segments={"axis": 0, "step_axis": 1}),
    "padding": lambda: of_robot(sample="segment", collate_fn="pad"),
}


def test_what_messages_propose_works(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name, call in REMEDIES.items():
        batch = next(iter(call().train_dataloader()))
        assert batch is not None, name


@pytest.mark.parametrize("kind", [LazyH5DataModule, CombinedHDF5Dataset, SegmentOptions, H5StatsMonitor])
def test_a_checked_constructor_keeps_its_signature(kind):
    parameters = inspect.signature(kind).parameters
    assert [*parameters] == [*inspect.signature(kind.__init__.__wrapped__).parameters][1:]
    assert "kwargs" not in parameters


def test_a_subclass_that_passes_keywords_on_is_checked():
    class Own(LazyH5DataModule):
        def __init__(self, *paths, size=8, **arguments):
            super().__init__(*paths, **arguments)
            self.size = size

    assert Own("digits.h5", size=4, x_key="images").size == 4
    with pytest.raises(TypeError, match="Did you mean 'batch_size'"):
        Own("digits.h5", batchsize=4)


def test_an_unknown_argument_shows_no_credentials():
    with pytest.raises(TypeError, match=r"staging=\{'storage_options': \.\.\.\}") as caught:
        LazyH5DataModule("digits.h5", storage_options={"key": "secret"})
    assert "secret" not in str(caught.value).replace("'storage_options'", "")
