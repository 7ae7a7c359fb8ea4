"""Other files that an array has rows from change under training: no wrong row, and an error that names them."""

import os
import shutil

import h5py
import numpy as np
import pytest
from arguments import nested as nested_arguments
from factories import make_older

from lightning_h5 import H5DataChangedError, H5LazyDataset, LazyH5DataModule, RankMemCachedH5Dataset
from lightning_h5.samples import row_table

ROWS, BATCH = 320, 8
VALUES = np.random.default_rng(0).integers(1, 256, (ROWS, 1024), "u1")
OTHER = np.random.default_rng(1).integers(1, 256, (ROWS, 1024), "u1")


def link(file, path):
    file["x"] = h5py.ExternalLink(path, "/x")


def virtual(file, path):
    layout = h5py.VirtualLayout(VALUES.shape, "u1")
    layout[:] = h5py.VirtualSource(path, "x", VALUES.shape, "u1")
    file.create_virtual_dataset("x", layout)


def storage(file, path):
    file.create_dataset("x", VALUES.shape, "u1", external=[(path, 0, VALUES.nbytes)])


def nested(file, path):
    with h5py.File(f"{path}.between", "w") as between:
        virtual(between, path)
    virtual(file, f"{path}.between")


WAYS = {"link": link, "virtual": virtual, "nested": nested, "storage": storage}


@pytest.fixture(params=WAYS)
def files(request, tmp_path):
    """A file whose rows lie in another one, that one, and what would take its place."""
    paths = [str(tmp_path / name) for name in ("main.h5", "there", "other")]
    for path, values in zip(paths[1:], (VALUES, OTHER), strict=True):
        if request.param == "storage":
            values.tofile(path)
        else:
            with h5py.File(path, "w") as file:
                file["x"] = values
    with h5py.File(paths[0], "w") as file:
        WAYS[request.param](file, paths[1])
    make_older(paths[1])
    return paths


def zero(path, other):
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        file.write(bytes(1000))


CHANGES = {
    "deleted": (lambda path, other: os.unlink(path), "cannot be found"),
    "truncated": (lambda path, other: os.truncate(path, os.path.getsize(path) // 2), "bytes and has"),
    "replaced": (lambda path, other: os.replace(other, path), "was replaced by another file"),
    "zeroed": (zero, "was written to"),
}


@pytest.mark.wide
@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_no_wrong_row_comes_of_another_file_that_changes_and_the_error_names_it(files, monkeypatch, change, n_workers):
    monkeypatch.setattr(row_table, "HELD_BYTES", -1)
    main, there, other = files
    options = {"batch_size": BATCH, "shuffle": False, "rank": 0, "world_size": 1, "num_workers": n_workers}
    module = LazyH5DataModule(main, **nested_arguments(x_key="x", files={"allow_external": True}, **options))
    module.setup("fit")
    loader = module.train_dataloader()
    act, words = CHANGES[change]

    def train():
        for epoch in range(2):  # the first may have been read by then
            for step, batch in enumerate(loader):
                assert np.array_equal(batch.numpy(), VALUES[step * BATCH : (step + 1) * BATCH])
                if (epoch, step) == (0, 2):
                    act(there, other)

    with pytest.raises(H5DataChangedError) as error:
        train()
    assert repr(there) in str(error.value)
    assert words in str(error.value)
    loader.close()
    module.teardown("fit")


@pytest.mark.parametrize("is_held", [False, True], ids=["read", "held"])
def test_rows_are_right_once_another_file_is_put_back(files, monkeypatch, is_held):
    monkeypatch.setattr(row_table, "HELD_BYTES", row_table.HELD_BYTES if is_held else -1)
    main, there, other = files
    dataset, rows = (
        H5LazyDataset(
            main,
            "x",
            files={"allow_external": True},
        ),
        np.arange(ROWS),
    )
    os.rename(there, f"{there}.away")
    shutil.copyfile(other, there)
    with pytest.raises(H5DataChangedError, match="there' was replaced by another file"):
        dataset.gather(rows)
    os.replace(f"{there}.away", there)
    assert np.array_equal(dataset.gather(rows).columns[0].numpy(), VALUES)
    dataset.close()


def test_a_shard_is_not_loaded_of_another_file_that_changed(files):
    main, there, other = files
    dataset = RankMemCachedH5Dataset(
        main, "x", x_dtype=None, files={"allow_external": True}, rank=0, world_size=1, preload=False
    )
    os.replace(other, there)
    with pytest.raises(H5DataChangedError, match="there' was replaced by another file"):
        dataset.load()
    dataset.close()


def test_data_are_others_where_another_file_holds_other_rows(files):
    """What a run was saved with is compared by it on resume, and among ranks."""
    main, there, other = files
    before = H5LazyDataset(
        main,
        "x",
        files={"allow_external": True},
    ).identity()
    shutil.copyfile(there, f"{there}.copy")
    os.replace(f"{there}.copy", there)
    assert (
        H5LazyDataset(
            main,
            "x",
            files={"allow_external": True},
        ).identity()
        == before
    )
    os.replace(other, there)
    assert (
        H5LazyDataset(
            main,
            "x",
            files={"allow_external": True},
        ).identity()
        != before
    )
