"""The error of a broken file among others advises only what its class has."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from arguments import nested, nested_files

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule, create_optimized_dataloader
from lightning_h5.cli import main
from lightning_h5.datasets import CombinedHDF5Dataset, H5LazyDataset, RankMemCachedH5Dataset
from lightning_h5.errors import H5FileError

USES = {
    H5LazyDataset: lambda paths, **more: H5LazyDataset(paths, "x", **nested_files(**more)),
    RankMemCachedH5Dataset: lambda paths, **more: RankMemCachedH5Dataset(paths, "x", **nested_files(**more)),
    CombinedHDF5Dataset: lambda paths, **more: CombinedHDF5Dataset(paths, ["x"], **nested_files(**more)),
    "fields found": lambda paths, **more: CombinedHDF5Dataset(paths, **nested_files(**more)),
    create_optimized_dataloader: lambda paths, **more: create_optimized_dataloader(
        hdf5_files=paths, load_fields=["x"], num_workers=0, **more
    ),
    LazyH5DataModule: lambda paths, **more: LazyH5DataModule(paths, **nested(x_key="x", **more)).setup("fit"),
    "guessed keys": lambda paths, **more: LazyH5DataModule(paths, **nested(**more)).setup("fit"),
    RankCachedH5DataModule: lambda paths, **more: RankCachedH5DataModule(paths, **nested(x_key="x", **more)).setup(
        "fit"
    ),
    CombinedHDF5DataModule: lambda paths, **more: CombinedHDF5DataModule(paths, **nested(fields=["x"], **more)).setup(
        "fit"
    ),
    "a cut": lambda paths, **more: CombinedHDF5DataModule(
        paths, **nested(fields=["x"], val_fraction=0.5, **more)
    ).setup("fit"),
}
KINDS = {
    "fields found": CombinedHDF5Dataset,
    "guessed keys": LazyH5DataModule,
    "a cut": CombinedHDF5DataModule,
}


@pytest.fixture(params=["truncated", "no HDF5", "empty"])
def paths(request, make_h5, tmp_path):
    good = [make_h5(x=np.arange(40)) for _ in range(2)]
    content = {"truncated": Path(good[0]).read_bytes()[:-100], "no HDF5": b"no HDF5 at all", "empty": b""}
    (tmp_path / "broken.h5").write_bytes(content[request.param])
    return [good[0], str(tmp_path / "broken.h5"), good[1]]


@pytest.mark.parametrize("use", USES, ids=lambda use: getattr(use, "__name__", use))
def test_the_error_of_a_broken_file_advises_what_its_class_has(use, paths):
    with pytest.raises(H5FileError) as error:
        USES[use](paths)
    text = str(error.value)
    assert f"{paths[1]!r} is " in text
    assert "It is one of 3 files: `lightning-h5 check` finds all unreadable files." in text
    advised = dict(re.findall(r"(\w+)='(\w+)'", text.partition("It is one of")[2]))
    takes = inspect.signature(KINDS.get(use, use)).parameters
    assert ("on_bad_file" in takes) == (advised == {"on_bad_file": "skip"})
    USES[use](paths, **advised) if advised else USES[use]([paths[0], paths[2]])


def test_the_advised_command_finds_it(paths, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", *paths])
    assert ended.value.code == 1
    assert paths[1] in capsys.readouterr().out


def test_a_single_file_is_not_to_be_left_out(paths):
    for use in USES.values():
        with pytest.raises(H5FileError) as error:
            use(paths[1])
        assert "It is one of" not in str(error.value)
        assert re.search("(Copy|Pass|copy|Check)", str(error.value))
