"""Files that others have put in the place of those that were read: what comes is what is there now."""

import os

import h5py
import numpy as np
import pytest

from lightning_h5 import CombinedHDF5DataModule, CombinedHDF5Dataset, H5LazyDataset, LazyH5DataModule

STORAGE = {"contiguous": {}, "compressed": {"chunks": (4, 2), "compression": "gzip"}}


def replace(path, first, storage):
    """Puts another file in the place of one, as downloads and `os.replace` do."""
    with h5py.File(f"{path}.new", "w") as file:
        rows = np.arange(first, first + 40)
        file.create_dataset("x", data=rows[:, None] * np.ones(2), **STORAGE[storage])
        file["row"] = rows
        file["w"] = (rows % 40 >= first // 1000 * 10).astype("f8")
    os.replace(f"{path}.new", path)
    return str(path)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("held", [False, True])
def test_a_dataset_made_after_a_file_was_replaced_has_the_new_rows(tmp_path, storage, held, request):
    if not held:
        request.getfixturevalue("nothing_held")
    kept = []
    for first in (0, 1000, 2000):
        path = replace(tmp_path / "a.h5", first, storage)
        for dataset in (H5LazyDataset(path, {"x": "x"}), CombinedHDF5Dataset(path, where={"w": 1})):
            found = dataset[len(dataset) - 1]["x"].tolist()
            assert found == [first + 39] * 2
            kept.append(dataset)  # which still have the file before open


@pytest.mark.parametrize("storage", STORAGE)
def test_another_setup_has_weights_and_filters_of_the_new_file(tmp_path, storage, nothing_held):
    path = replace(tmp_path / "a.h5", 0, storage)
    weighted = LazyH5DataModule(path, x_key="x", y_key="row", weights="w", batch_size=40)
    filtered = CombinedHDF5DataModule(path, where={"w": 1}, batch_size=40)
    for first in (0, 1000, 2000):
        replace(path, first, storage)
        expected = set(range(first + first // 1000 * 10, first + 40))
        for module, key in ((weighted, 1), (filtered, "row")):
            module.setup("fit")
            (batch,) = module.train_dataloader()
            found = set(batch[key].tolist())
            assert found == expected if module is filtered else found <= expected
