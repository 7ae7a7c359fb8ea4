"""A kind of sample of a user's own works in all data modules: with splits, a resume, ranks and filters."""

from itertools import chain, combinations

import h5py
import numpy as np
import pytest
from every_nth import EveryNth
from lightning_models import Recorder, SaveOnException, quiet_trainer, together

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule

LENGTHS = (7, 12, 1, 30, 9, 16, 5, 11)
N = 3


def expected(numbers=tuple(range(8))):
    """Values of all samples of some segments, in order."""
    rows = [1000 * number + np.arange(LENGTHS[number]) for number in numbers]
    return [of_segment[start::N].tolist() for of_segment in rows for start in range(min(N, len(of_segment)))]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for number, length in enumerate(LENGTHS):
            group = file.create_group(f"e{number}")
            group.create_dataset(
                "x", data=1000 * number + np.arange(length), chunks=(min(length, 4),), compression="gzip"
            )
            group["odd"] = number % 2
    return path


@pytest.fixture(params=["lazy", "cached", "combined"])
def module(request, path):
    kinds = {"lazy": LazyH5DataModule, "cached": RankCachedH5DataModule, "combined": CombinedHDF5DataModule}
    names = {"fields": ["x"]} if request.param == "combined" else {"x_key": {"x": "x"}}

    def made(train_path=path, *args, **options):
        given = {"sample": EveryNth(N), "segments": "e*", "collate_fn": "list", "with_index": True, "batch_size": 4}
        return kinds[request.param](train_path, *args, **names, **given | options)

    return made


def samples_of(loader):
    return [sample.tolist() for batch in loader for sample in batch["x"]]


def test_each_sample_comes_once_in_order(module, path):
    datamodule = module(None, path)
    datamodule.setup("validate")
    assert samples_of(datamodule.val_dataloader()) == expected()


@pytest.mark.parametrize("shuffle", [True, False, {"mode": "global"}])
def test_training_has_each_sample_once_an_epoch(module, shuffle):
    datamodule = module(shuffle=shuffle)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    orders = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        orders.append(samples_of(loader))
        assert sorted(orders[-1]) == sorted(expected())
    assert (orders[0] == orders[1]) == (shuffle is False)


def test_splits_are_of_segments(module):
    datamodule = module(split={"val_fraction": 0.25, "test_fraction": 0.25})
    datamodule.setup()
    loaders = [datamodule.train_dataloader(), datamodule.val_dataloader(), datamodule.test_dataloader()]
    each = [samples_of(loader) for loader in loaders]
    segments = [{sample[0] // 1000 for sample in of_split} for of_split in each]
    assert sorted(chain(*each)) == sorted(expected())
    assert not any(one & other for one, other in combinations(segments, 2))


def test_ranks_have_each_sample_once(module, path):
    seen = []
    for rank in range(2):
        datamodule = module(None, path, distributed={"rank": rank, "world_size": 2})
        datamodule.setup("validate")
        seen += samples_of(datamodule.val_dataloader())
    assert sorted(seen) == sorted(expected())


def test_a_run_goes_on_where_it_stopped(module, tmp_path):
    whole, broken, resumed = Recorder(), Recorder(fail_at=(1, 2)), Recorder()
    quiet_trainer(max_epochs=2).fit(whole, datamodule=module())
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(max_epochs=2, callbacks=[SaveOnException(tmp_path)]).fit(broken, datamodule=module())
    (saved,) = tmp_path.glob("*.ckpt")
    quiet_trainer(max_epochs=2).fit(resumed, datamodule=module(), ckpt_path=saved)
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows


def test_filters_of_combined_files(path):
    datamodule = CombinedHDF5DataModule(
        None,
        path,
        fields=["x"],
        where={"odd": 1},
        sample=EveryNth(N),
        segments="e*",
        collate_fn="list",
    )
    datamodule.setup("validate")
    assert samples_of(datamodule.val_dataloader()) == expected(range(1, len(LENGTHS), 2))
