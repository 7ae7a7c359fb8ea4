"""Plain rows that are split in time: each file is a segment, and its rows are cut in their order."""

import h5py
import numpy as np
import pytest

from lightning_h5 import CombinedHDF5DataModule, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.options import SplitOptions

MODULES = pytest.mark.parametrize("module", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
N_ROWS = {"a": 20, "b": 10}
SPLIT = {"val_fraction": 0.2, "test_fraction": 0.1, "by": "time"}


@pytest.fixture
def folder(tmp_path):
    """Two files with numbered rows, those of the second from 100."""
    for first, (name, n_rows) in zip((0, 100), N_ROWS.items(), strict=True):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(first, first + n_rows)
            file["odd"] = np.arange(n_rows) % 2
            file["guid"] = np.arange(first, first + n_rows)
    return tmp_path


def rows_of(module, path, split, **options):
    """The rows of each split, on all ranks together."""
    rows = {}
    for rank in range(world_size := options.pop("world_size", 1)):
        data = module(
            path,
            fields=["x"],
            split=split,
            batch_size=4,
            distributed={"rank": rank, "world_size": world_size},
            **options,
        )
        data.setup()
        for name in data.datasets:
            batches = getattr(data, f"{name}_dataloader")()
            rows.setdefault(name, []).extend(row for batch in batches for row in batch["x"].tolist())
        data.teardown()
    return {name: sorted(of_split) for name, of_split in rows.items()}


@MODULES
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_rows_of_each_file_are_cut_in_their_order(folder, module, world_size):
    assert rows_of(module, folder, SPLIT, world_size=world_size) == {
        "train": [*range(14), *range(100, 107)],
        "val": [*range(14, 18), *range(107, 109)],
        "test": [18, 19, 109],
    }


@MODULES
def test_rows_of_a_gap_are_in_no_split(folder, module):
    rows = rows_of(module, folder / "a.h5", {"val_fraction": 0.25, "by": "time", "gap": 4})
    assert rows == {"train": [*range(12)], "val": [*range(16, 20)]}


@MODULES
def test_filters_choose_among_rows_that_are_cut_before(folder, module):
    rows = rows_of(module, folder / "a.h5", SPLIT, where={"odd": 1})
    assert rows == {"train": [*range(1, 14, 2)], "val": [15, 17], "test": [19]}


@MODULES
def test_rows_without_a_line_count_for_no_split(folder, module):
    lines = [f"{guid},{guid}" for guid in range(10, 20)]
    (folder / "table.csv").write_text("\n".join(["guid,label", *lines]))
    table = {"path": str(folder / "table.csv"), "on": "guid", "missing": "drop"}
    data = module(folder / "a.h5", fields=["x", "table/label"], table=table, split={"val_fraction": 0.2, "by": "time"})
    data.setup("fit")
    assert sorted(data.val_dataset[row]["x"].item() for row in range(len(data.val_dataset))) == [18, 19]
    assert len(data.train_dataset) == 8


def test_each_source_of_a_mixture_is_cut(folder):
    mixture = {name: str(folder / f"{name}.h5") for name in N_ROWS}
    data = LazyH5DataModule(fields=["x"], mixture=mixture, split=SPLIT)
    data.setup("fit")
    rows = [row for batch in data.val_dataloader() for row in batch["x"].tolist()]
    assert sorted(rows) == [*range(14, 18), 107, 108]


def test_a_split_without_rows_is_an_error_that_says_what_is_cut(folder):
    with pytest.raises(H5ValueError, match=r"no row for 'val': it divides the rows of each file.* longest of 2 .* 20"):
        LazyH5DataModule(folder, fields=["x"], split={"val_fraction": 0.02, "by": "time"}).setup("fit")


@pytest.mark.parametrize(
    "more",
    [{"group_key": "g"}, {"group_pattern": "(a)"}, {"stratify_key": "y"}, {"num_folds": 2, "fold": 0}, {"file": "s"}],
)
def test_settings_that_a_split_in_time_cannot_follow_are_refused(more):
    with pytest.raises(H5ValueError, match=f"'time' cannot be combined with split.{next(iter(more))}"):
        SplitOptions(by="time", **({} if "fold" in more else {"val_fraction": 0.1}), **more)


def test_a_split_in_time_needs_fractions():
    with pytest.raises(H5ValueError, match="by='time' was given without fractions"):
        SplitOptions(by="time")
