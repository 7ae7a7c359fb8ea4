"""Every layout, by every data module: the samples that its project trains on, each once, also after a kill."""

import os

import decoded_values  # noqa: F401  # more projects
import numpy as np
import pytest
import single_cells  # noqa: F401
import torch
from lightning_models import Recorder, SaveOnException, quiet_trainer, together
from projects import PROJECTS, Layout, warning_of
from range_server import RangeServer

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.hdf5 import expand_paths


def combined(path, *, x_key, **options):
    """A data module of many files with the fields of ``x_key``, as they are stored."""
    keys = x_key if isinstance(x_key, dict) else {name: name for name in [x_key]}
    return CombinedHDF5DataModule(path, fields=keys, **options)


MODULES = {"lazy": LazyH5DataModule, "rank cached": RankCachedH5DataModule, "combined": combined}
SEVERAL_SHAPES = {"clam", "image_per_file", "protein_embeddings", "fastmri", "spice", "ragged_by_offsets", "molecules"}


@pytest.fixture
def layout(request, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    with warning_of(request.param):
        yield PROJECTS[request.param](folder)


def data_module(kind, layout, **options):
    given = {"x_dtype": None} | layout.arguments
    return MODULES[kind](given.pop("path"), batch_size=4, with_index=True, **given, **options)


def assert_sample(batch, place, expected):
    """A place of a batch, padded or not, has the values of a sample, and nothing but zeros after them."""
    for name, value in expected.items():
        found = batch[name][place]
        if not isinstance(found, torch.Tensor):
            assert found == value
            continue
        found, value = found.numpy(), np.asarray(value)
        inside = tuple(map(slice, value.shape))
        np.testing.assert_array_equal(found[inside], value)
        assert found.dtype == value.dtype
        rest = found.copy()
        rest[inside] = 0
        assert not rest.any()
        assert found.shape == value.shape or "length" in batch


def assert_epoch(batches, samples):
    """Batches have each sample once, whatever their order; return that order."""
    order = []
    for batch in batches:
        for place, number in enumerate(batch["index"].tolist()):
            assert_sample(batch, place, samples[number])
            order.append(number)
    assert sorted(order) == list(range(len(samples)))
    return order


@pytest.mark.parametrize("shuffle", [False, True, "chunks"])
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("layout", PROJECTS, indirect=True)
def test_an_epoch_has_each_sample_of_a_layout_once(layout, kind, shuffle):
    module = data_module(kind, layout, shuffle=shuffle)
    module.setup("fit")
    loader = module.train_dataloader()
    orders = [assert_epoch(loader, layout.samples) for _ in range(2)]
    if not shuffle:
        assert orders == [list(range(len(layout.samples)))] * 2
    assert ("step" in next(iter(loader))) != layout.are_rows
    module.teardown("fit")


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("layout", PROJECTS, indirect=True)
def test_workers_give_the_same_samples_of_a_layout(layout, kind):
    module = data_module(kind, layout, num_workers=2)
    module.setup("fit")
    assert_epoch(module.train_dataloader(), layout.samples)
    module.teardown("fit")


@pytest.fixture
def in_store(layout, tmp_path):
    """The layout with the URLs of its files."""
    pytest.importorskip("obstore")
    with RangeServer(tmp_path / "data") as server:
        paths = expand_paths(layout.arguments["path"])
        urls = [server.url(os.path.relpath(path, tmp_path / "data")) for path in paths]
        staging = tmp_path / "mirrors"
        yield Layout(layout.arguments | {"path": urls, "staging": staging}, layout.samples, layout.are_rows)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("layout", PROJECTS, indirect=True)
def test_an_object_store_gives_the_samples_of_a_layout(in_store, kind, num_workers):
    module = data_module(kind, in_store, num_workers=num_workers)
    module.setup("fit")
    assert_epoch(module.train_dataloader(), in_store.samples)
    module.teardown("fit")


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("layout", PROJECTS, indirect=True)
def test_a_run_on_a_layout_that_was_killed_goes_on_where_it_was(layout, kind, tmp_path):
    whole, broken, resumed = Recorder(), Recorder(fail_at=(1, 1)), Recorder()
    quiet_trainer(max_epochs=3).fit(whole, datamodule=data_module(kind, layout))
    if all(len(rows) <= 4 for rows in whole.train_rows.values()):
        return  # epochs of one batch have no middle
    stopped = quiet_trainer(max_epochs=3, callbacks=[SaveOnException(tmp_path)])
    with pytest.raises(RuntimeError, match="stop here"):
        stopped.fit(broken, datamodule=data_module(kind, layout))
    quiet_trainer(max_epochs=3).fit(
        resumed, datamodule=data_module(kind, layout), ckpt_path=tmp_path / "exception.ckpt"
    )
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows
