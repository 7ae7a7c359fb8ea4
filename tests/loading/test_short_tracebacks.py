"""A row that cannot be read shows the caller's line, not the frames of this package; other errors keep theirs."""

import traceback
from pathlib import Path

import h5py
import numpy as np
import pytest
from arguments import nested_files
from torch.utils.data import DataLoader

import lightning_h5
from lightning_h5 import (
    CombinedHDF5Dataset,
    H5CorruptError,
    H5LazyDataset,
    LazyH5DataModule,
    create_optimized_dataloader,
)

PACKAGE = str(Path(lightning_h5.__file__).parent)
DATASETS = {
    "lazy": lambda path, **options: H5LazyDataset(path, "x", **nested_files(**options)),
    "combined": lambda path, **options: CombinedHDF5Dataset(path, **nested_files(load_fields=["x"], **options)),
}
READS = {
    "one row": lambda dataset: dataset[17],
    "several rows": lambda dataset: dataset[[17, 3]],
    "a slice": lambda dataset: dataset[10:20],
    "samples": lambda dataset: dataset.__getitems__([17]),
    "read_batch": lambda dataset: dataset.read_batch([3, 17]),
    "torch's loader": lambda dataset: list(DataLoader(dataset, batch_size=8)),
    "our loader": lambda dataset: list(create_optimized_dataloader(dataset, 8)),
    "our loader, workers": lambda dataset: list(create_optimized_dataloader(dataset, 8, num_workers=1)),
}


@pytest.fixture
def damaged(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        array = file.create_dataset(
            "x", data=np.random.default_rng(0).random((40, 50)), chunks=(5, 50), compression="gzip"
        )
        start = array.id.get_chunk_info(3).byte_offset
    with path.open("r+b") as raw:
        raw.seek(start + 5)
        raw.write(bytes(35))
    return path


def frames_of_the_package(error):
    return [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)]


def check_short(error):
    assert len(frames_of_the_package(error)) == 1, "the one that raised it last"
    assert error.__cause__ is None
    assert error.__suppress_context__


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_a_damaged_row_shows_the_callers_line(damaged, make, read):
    with pytest.raises(H5CorruptError, match=r"rows\.h5") as found:
        read(make(damaged))
    check_short(found.value)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_row_in_training_shows_no_frames_inside(damaged, num_workers):
    datamodule = LazyH5DataModule(damaged, x_key="x", x_dtype="float32", batch_size=8, num_workers=num_workers)
    datamodule.setup("fit")
    with pytest.raises(H5CorruptError) as found:
        list(datamodule.train_dataloader())
    check_short(found.value)


@pytest.mark.parametrize("read", [READS["one row"], READS["read_batch"], READS["our loader"]])
def test_an_error_of_the_users_code_keeps_its_traceback(tmp_path, read):
    def fails(sample):
        return {}["missing"]

    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.zeros((40, 2))
    with pytest.raises(KeyError, match="missing") as found:
        read(H5LazyDataset(tmp_path / "rows.h5", "x", transform=fails))
    assert traceback.extract_tb(found.value.__traceback__)[-1].name == "fails"
    assert len(frames_of_the_package(found.value)) > 1
