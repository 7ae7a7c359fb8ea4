"""Text is str however files store it: fixed or any length, ASCII or UTF-8, as an array or a member of a table."""

import itertools

import h5py
import numpy as np
import pytest
from arguments import nested
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import CombinedHDF5DataModule, inspect_folder
from lightning_h5.datasets import CombinedHDF5Dataset, H5LazyDataset, RankMemCachedH5Dataset
from lightning_h5.tools.check import check_files

STORAGES = {
    "any length, UTF-8": h5py.string_dtype("utf-8"),
    "any length, ASCII": h5py.string_dtype("ascii"),
    "3 bytes, ASCII": h5py.string_dtype("ascii", 3),
    "9 bytes, UTF-8": h5py.string_dtype("utf-8", 9),
}
WORDS = ["a", "bb", "", "ccc", "a", "bb"]


NUMBERS = itertools.count()  # of files: those of an example stay open


def write(folder, storage, words, *, in_table):
    dtype = STORAGES[storage]
    values = np.array(words, object) if dtype.kind == "O" else np.array(words, "S9").astype(dtype)
    path = folder / f"{next(NUMBERS)}.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(len(words) * 2, dtype="f4").reshape(-1, 2)
        if in_table:
            table = np.zeros(len(words), np.dtype([("g", dtype), ("n", "i4")]))
            table["g"] = values
            file["table"] = table
        else:
            file.create_dataset("g", data=values, dtype=dtype)
    return str(path)


@pytest.mark.wide
@given(
    storages=st.lists(st.sampled_from(sorted(STORAGES)), min_size=2, max_size=4),
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=6),
    in_table=st.booleans(),
)
def test_files_that_store_text_differently_belong_together(tmp_path, storages, words, in_table):
    key = "table/g" if in_table else "g"
    paths = [write(tmp_path, one, words, in_table=in_table) for one in storages]
    expected = words * len(paths)
    rows = range(len(expected))
    assert H5LazyDataset(paths, "x", key).read_batch(rows)[1] == expected
    assert RankMemCachedH5Dataset(paths, "x", key, rank=0, world_size=1).read_batch(rows)[1] == expected
    combined = CombinedHDF5Dataset(paths, ["x", key])
    assert combined.read_batch(rows)[key] == expected
    chosen = CombinedHDF5Dataset(paths, ["x", key], where={key: [words[0]]})
    assert chosen.read_batch(range(len(chosen)))[key] == [word for word in expected if word == words[0]]
    if not in_table:
        assert inspect_folder(paths).n_alike == len(paths)
        assert [one for one in check_files(paths).errors + check_files(paths).warnings if one.kind == "schema"] == []


@pytest.mark.parametrize("in_table", [False, True], ids=["array", "member of a table"])
@pytest.mark.parametrize(
    "arguments", [{}, {"sampling_strategy": "round_robin", "mix": "rows"}], ids=["concat", "mixed"]
)
def test_sources_that_store_text_differently_are_mixed_in_one_batch(tmp_path, in_table, arguments):
    key = "table/g" if in_table else "g"
    paths = {f"s{n}": write(tmp_path, one, WORDS, in_table=in_table) for n, one in enumerate(STORAGES)}
    datamodule = CombinedHDF5DataModule(
        **nested(sources=paths, fields=["x", key], batch_size=24, shuffle=False, **arguments)
    )
    datamodule.setup("fit")
    batches = list(datamodule.train_dataloader())
    assert sorted(word for batch in batches for word in batch[key]) == sorted(WORDS * len(STORAGES))


def test_members_of_tables_that_store_text_differently_are_no_problem_to_check(tmp_path):
    paths = [write(tmp_path, one, WORDS, in_table=True) for one in STORAGES]
    assert check_files(paths, keys=["table/g"]).errors == ()
