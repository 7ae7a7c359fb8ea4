"""Lines of a side table belong to segments by names, attributes, arrays and slices; matches by order to one split."""

import csv
import logging
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
)

pytest.importorskip("pyarrow")

N = 12
STEPS = [4 + number % 3 for number in range(N)]
LABELS = [(number * 7 + 3) % 50 for number in range(N)]
PLACES = [f"site {number % 3}" for number in range(N)]


def write_table(path: Path, lines: list[dict[str, Any]]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return str(path)


def lines_of(names: list[str]) -> list[dict[str, Any]]:
    """One line for each name, the last one first."""
    of_names = zip(names, LABELS, PLACES, strict=True)
    return [{"id": name, "label": label, "place": place} for name, label, place in of_names][::-1]


def step_values(number: int) -> np.ndarray:
    return np.arange(STEPS[number], dtype=np.float32) + 100 * number


class Groups:
    """A group for each segment."""

    samples: ClassVar[dict[str, Any]] = {"segments": "runs/*"}

    @staticmethod
    def write(path: str) -> None:
        with h5py.File(path, "w") as file:
            for number in range(N):
                group = file.create_group(f"runs/r{number}")
                group["x"] = step_values(number)
                group.attrs["patient"] = 500 + number
                group["who"] = f"w{number}"  # a scalar
                group["code"] = np.array([number])


class Lengths:
    """All segments in one array, cut by their lengths."""

    samples: ClassVar[dict[str, Any]] = {"segments": {"lengths": "n"}}

    @staticmethod
    def write(path: str) -> None:
        with h5py.File(path, "w") as file:
            file["x"] = np.concatenate([step_values(number) for number in range(N)])
            file["n"] = STEPS
            file["who"] = np.array([f"w{number}" for number in range(N)], dtype=h5py.string_dtype())
            file["owner"] = np.repeat(np.arange(N), STEPS)  # a value for each step


CASES = {
    "name of a group": (Groups, {"id": "@name"}, [f"r{n}" for n in range(N)]),
    "attribute of a group": (Groups, {"id": "@patient"}, [str(500 + n) for n in range(N)]),
    "scalar of a group": (Groups, {"id": "who"}, [f"w{n}" for n in range(N)]),
    "array of one value": (Groups, {"id": "code"}, [str(n) for n in range(N)]),
    "a value for each segment": (Lengths, {"id": "who"}, [f"w{n}" for n in range(N)]),
}


def batches(module: Any, split: str = "train") -> list[tuple[np.ndarray, Any]]:
    """The samples of a split: the steps and the label of each."""
    found = []
    for batch in getattr(module, f"{split}_dataloader")():
        for at in range(len(batch["label"])):
            n = int(batch["length"][at]) if "length" in batch else batch["x"].shape[1]
            label = batch["label"][at]
            found.append((batch["x"][at][:n].numpy(), int(label) if label.ndim == 0 else label.numpy()[:n]))
    return found


def make(kind: Any, path: str, table: Any, **given: Any) -> Any:
    if kind is CombinedHDF5DataModule:
        given |= {"fields": {"x": "x", "label": "table/label"}}
    else:
        given |= {"x_key": {"x": "x", "label": "table/label"}}
    module = kind(path, table=table, **given)
    module.setup("fit")
    return module


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.wide)])
def test_each_segment_has_its_line(tmp_path: Path, kind: Any, case: str, num_workers: int) -> None:
    layout, on, names = CASES[case]
    layout.write(path := str(tmp_path / "data.h5"))
    table = {"path": write_table(tmp_path / "t.csv", lines_of(names)), "on": on}
    split = {"val_fraction": 0.3, "group_key": "table/place"}
    given = {"batch_size": 5, "num_workers": num_workers, "split": split, **layout.samples}
    module = make(kind, path, table, sample="segment", collate_fn="pad", **given)
    of_splits = [batches(module, split) for split in ("train", "val")]
    numbers = [sorted(int(x[0]) // 100 for x, _ in found) for found in of_splits]
    assert sorted(chain(*numbers)) == list(range(N))
    assert not {PLACES[n] for n in numbers[0]} & {PLACES[n] for n in numbers[1]}
    for x, label in chain(*of_splits):
        assert np.array_equal(x, step_values(int(x[0]) // 100))
        assert label == LABELS[int(x[0]) // 100]
    module.teardown("fit")
    windows = make(kind, path, table, window=2, **given)
    for x, label in batches(windows):
        assert label == LABELS[int(x[0]) // 100]
        assert x[1] == x[0] + 1
    windows.teardown("fit")


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
def test_a_value_for_each_step_is_a_field_of_steps(tmp_path: Path, kind: Any) -> None:
    Lengths.write(path := str(tmp_path / "data.h5"))
    table = {"path": write_table(tmp_path / "t.csv", lines_of([str(n) for n in range(N)])), "on": {"id": "owner"}}
    module = make(kind, path, table, window=3, batch_size=4, **Lengths.samples)
    found = batches(module)
    assert len(found) == sum(n // 3 for n in STEPS)
    for x, label in found:
        assert label.tolist() == [LABELS[int(one) // 100] for one in x]


def test_segments_and_steps_without_a_line_are_left_out_if_asked(tmp_path: Path, caplog: Any) -> None:
    lines = [line for line in lines_of([str(n) for n in range(N)]) if line["id"] not in ("3", "8")]
    for layout, on in ((Groups, {"id": "code"}), (Lengths, {"id": "owner"})):
        layout.write(path := str(tmp_path / "data.h5"))
        table = {"path": write_table(tmp_path / "t.csv", lines), "on": on}
        with pytest.raises(H5ValueError, match=r"'id' is '?3'?, '?8'?, which"):
            make(LazyH5DataModule, path, table, window=2, **layout.samples)
        with caplog.at_level(logging.INFO):
            module = make(LazyH5DataModule, path, table | {"missing": "drop"}, window=2, batch_size=3, **layout.samples)
        assert "have no line in the table" in caplog.text
        caplog.clear()
        seen = {int(x[0]) // 100 for x, _ in batches(module)}
        assert seen == set(range(N)) - {3, 8}
        Path(path).unlink()


def test_lines_name_slices_of_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = {"bucket0": [600, 450, 599], "bucket1": [900, 30]}
    lines, path = [], str(tmp_path / "waveforms.hdf5")
    waves: dict[str, np.ndarray] = {}
    with h5py.File(path, "w") as file:
        for name, of_bucket in lengths.items():
            stored = np.zeros((len(of_bucket), 3, max(of_bucket)), np.float32)
            for row, n in enumerate(of_bucket):
                stored[row, :, :n] = rng.normal(size=(3, n))
                waves[f"{name}${row},:3,:{n}"] = stored[row, :, :n]
                lines.append({"trace_name": f"{name}${row},:3,:{n}", "label": len(lines) + 10})
            file.create_dataset(f"data/{name}", data=stored, chunks=(1, 3, 100), compression="gzip")
    table = {"path": write_table(tmp_path / "metadata.csv", lines[::-1]), "on": {"trace_name": "@name"}}
    segments = {"axis": 0, "step_axis": 2}
    dataset = H5LazyDataset(path, "data/*", "table/label", segments=segments, sample="segment", table=table)
    assert len(dataset) == len(lines)
    for number, line in enumerate(lines):
        wave, label = dataset[number]
        assert np.array_equal(wave.numpy(), waves[line["trace_name"]])
        assert int(label) == line["label"]
    windows = H5LazyDataset(path, "data/*", "table/label", segments=segments, window=100, table=table)
    expected = [
        (wave[:, first : first + 100], line["label"])
        for line, wave in zip(lines, waves.values(), strict=True)
        for first in range(0, wave.shape[1] - 99, 100)
    ]
    assert len(windows) == len(expected)
    for at, (wave, label) in enumerate(expected):
        assert np.array_equal(windows[at][0].numpy(), wave)
        assert int(windows[at][1]) == label
    for name, says in (
        ("bucket0$1,:3,:601", "has the shape"),
        ("bucket0$7,:3,:600", "has 3 segments along axis 0"),
        ("bucket0$0,:3,:600", "named twice at index 0"),
        ("bucket0$1,:2,:600", "taken whole along axis 1"),
        ("bucket0$:2,:3,:600", "needs an index"),
    ):
        wrong = [lines[0], lines[1] | {"trace_name": name}, *lines[2:]]
        table = table | {"path": write_table(tmp_path / "wrong.csv", wrong)}
        with pytest.raises(H5ValueError, match=says):
            H5LazyDataset(path, "data/*", "table/label", segments=segments, sample="segment", table=table)


def test_slices_need_segments_along_an_axis_and_equally_many_steps(tmp_path: Path) -> None:
    path = str(tmp_path / "waveforms.hdf5")
    with h5py.File(path, "w") as file:
        file["data/bucket0"], file["other/bucket0"] = np.zeros((2, 3, 10)), np.zeros((2, 3, 8))
    lines = [{"name": f"bucket0${row},:3,:{9 + row}", "label": row} for row in range(2)]
    table = {"path": write_table(tmp_path / "metadata.csv", lines), "on": {"name": "@name"}}
    with pytest.raises(H5ValueError, match="no field has segments along an axis"):
        H5LazyDataset(path, "data/*", "table/label", sample="segment", table=table)
    keys = {"x": "data/*", "z": "other/*"}
    segments = {"axis": 0, "step_axis": 2}
    with pytest.raises(H5ValueError, match="fields have 10, 8 steps in 'data/bucket0'"):
        H5LazyDataset(path, keys, "table/label", sample="segment", segments=segments, table=table)


def test_patches_take_one_value_for_each_volume(tmp_path: Path) -> None:
    with h5py.File(path := str(tmp_path / "data.h5"), "w") as file:
        file["v"], file["id"], file["three"] = np.zeros((4, 6, 6)), np.arange(4), np.arange(3)
    lines = [{"id": number, "label": 10 + number} for number in range(4)][::-1]
    table = {"path": write_table(tmp_path / "t.csv", lines), "on": "id"}
    keys = {"v": "v", "label": "table/label"}
    dataset = H5LazyDataset(path, keys, segments={"axis": 0}, patch={"shape": [3, 3]}, table=table)
    assert [int(dataset[at]["label"]) for at in range(16)] == [10 + at // 4 for at in range(16)]
    with pytest.raises(H5ValueError, match=r"'table/label' has 3 values .*one value for each volume"):
        H5LazyDataset(path, keys, patch={"shape": [2, 3, 3]}, table=table | {"on": {"id": "three"}})


def test_a_table_by_place_has_a_line_for_each_row_of_a_sparse_matrix(tmp_path: Path) -> None:
    with h5py.File(path := str(tmp_path / "cells.h5ad"), "w") as file:
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "shape": (4, 3)})
        matrix["data"], matrix["indices"], matrix["indptr"] = np.ones(4), np.array([0, 1, 2, 0]), np.arange(5)
    for n in (4, 3, 5):
        table = write_table(tmp_path / f"{n}.csv", [{"label": 10 + row} for row in range(n)])
        if n == 4:
            dataset = H5LazyDataset(path, "X", "table/label", table=table)
            assert [int(dataset[row][1]) for row in range(4)] == [10, 11, 12, 13]
        else:
            with pytest.raises(H5ValueError, match=f"has {n} lines and the data has 4 rows"):
                H5LazyDataset(path, "X", "table/label", table=table)


def test_rows_are_joined_on_an_attribute_of_their_file(tmp_path: Path) -> None:
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.arange(4) + 10 * number
            file.attrs["subject"] = f"s{number}"
    lines = [{"subject": f"s{number}", "age": 30 + number} for number in (2, 0, 1)]
    table = {"path": write_table(tmp_path / "t.csv", lines), "on": {"subject": "@subject"}}
    dataset = H5LazyDataset(str(tmp_path / "*.h5"), "x", "table/age", table=table)
    assert [int(dataset[row][1]) for row in range(12)] == [30 + row // 4 for row in range(12)]


@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
def test_what_is_matched_by_order_belongs_to_the_rows_of_one_split(tmp_path: Path, kind: Any) -> None:
    for at, split in enumerate(("train", "val", "test")):
        with h5py.File(tmp_path / f"{split}.h5", "w") as file:
            file["x"] = np.arange(6) + 100 * at
        with h5py.File(tmp_path / f"labels_{split}.h5", "w") as file:
            file["y"] = np.arange(6) + 1000 * at
        write_table(tmp_path / f"{split}.csv", [{"label": row + 500 * at} for row in range(6)])
    paths = [str(tmp_path / f"{split}.h5") for split in ("train", "val", "test")]

    def opened(table: str, labels: str, stages: tuple[str, ...]) -> Any:
        of_other = {"path": str(tmp_path / labels), "key": "y"}
        if kind is CombinedHDF5DataModule:
            given = {"fields": {"x": "x", "y": of_other, "t": "table/label"}}
        else:
            given = {"x_key": {"x": "x", "y": of_other, "t": "table/label"}}
        module = kind(*paths, **given, table=str(tmp_path / table), batch_size=6, shuffle=False)
        for stage in stages:
            module.setup(stage)
        return module

    module = opened("{split}.csv", "labels_{split}.h5", ("fit", "test"))
    for at, split in enumerate(("train", "val", "test")):
        (batch,) = getattr(module, f"{split}_dataloader")()
        assert batch["x"].tolist() == [row + 100 * at for row in range(6)]
        assert batch["y"].tolist() == [row + 1000 * at for row in range(6)]
        assert batch["t"].tolist() == [row + 500 * at for row in range(6)]
    with pytest.raises(H5ValueError, match=r"matched with rows by its order.*{split}"):
        opened("train.csv", "labels_{split}.h5", ("fit",))
    with pytest.raises(H5ValueError, match=r"matched with rows by its order.*{split}"):
        opened("{split}.csv", "labels_train.h5", ("fit",))
    with pytest.raises(H5ValueError, match=r"matched with rows by its order.*{split}"):
        opened("{split}.csv", "labels_train.h5", ("test", "fit"))
    module.setup("fit")  # once more, with the same files


def test_what_is_matched_by_order_is_that_of_the_same_files_in_all_splits(tmp_path: Path) -> None:
    with h5py.File(path := str(tmp_path / "data.h5"), "w") as file:
        file["x"] = np.arange(6)
        for split in ("train", "val"):
            file[f"{split}/x"] = np.arange(6)
    with h5py.File(tmp_path / "more.h5", "w") as file:
        file["z"] = np.arange(6) * 10
    more = {"path": str(tmp_path / "more.h5"), "key": "z"}
    module = LazyH5DataModule(path, predict_path=path, x_key={"x": "x", "z": more}, batch_size=6)
    for stage in ("fit", "predict"):
        module.setup(stage)
    batch = next(iter(module.predict_dataloader()))
    assert batch["z"].tolist() == (10 * batch["x"]).tolist()
    module = LazyH5DataModule(path, x_key={"x": "{split}/x", "z": more}, batch_size=6)
    with pytest.raises(H5ValueError, match=r"belongs to the rows of train .* was requested for val"):
        module.setup("fit")


def test_a_field_of_another_file_filters_groups_and_weighs_rows_by_its_own_values(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.arange(12), np.zeros(12, np.int64)
    with h5py.File(tmp_path / "labels.h5", "w") as file:
        file["y"] = np.arange(12) // 3
    given = {"fields": {"x": "x", "lab": {"path": str(tmp_path / "labels.h5"), "key": "y"}}}
    path = str(tmp_path / "data.h5")
    module = CombinedHDF5DataModule(path, **given, where={"lab": {"min": 2}}, batch_size=12)
    module.setup("fit")
    assert sorted(next(iter(module.train_dataloader()))["x"].tolist()) == list(range(6, 12))
    dataset = CombinedHDF5Dataset(
        path, ["x"], field_map={"lab": given["fields"]["lab"]}, where=lambda columns: columns["lab"] >= 2
    )
    assert dataset.indices.tolist() == list(range(6, 12))
    module = CombinedHDF5DataModule(path, **given, weights="lab", batch_size=12)
    module.setup("fit")
    assert 0 not in next(iter(module.train_dataloader()))["lab"].tolist()
    module = CombinedHDF5DataModule(path, **given, split={"val_fraction": 0.5, "group_key": "lab"}, batch_size=12)
    module.setup("fit")
    groups = [set(next(iter(loader()))["lab"].tolist()) for loader in (module.train_dataloader, module.val_dataloader)]
    assert not groups[0] & groups[1]
    assert groups[0] | groups[1] == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", [LazyH5DataModule, CombinedHDF5DataModule])
def test_rows_without_a_line_are_in_no_split(tmp_path: Path, kind: Any) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["id"] = np.arange(20)
    lines = [{"id": n, "part": "train" if n % 4 else "val", "g": n // 5, "ok": n % 2 == 0} for n in range(0, 20, 2)]
    table = {"path": write_table(tmp_path / "t.csv", lines), "on": "id", "missing": "drop"}
    keys = {"fields": ["id", "table/ok"]} if kind is CombinedHDF5DataModule else {"x_key": {"id": "id"}}
    for split in ({"key": "table/part"}, {"val_fraction": 0.5, "group_key": "table/g"}):
        module = kind(str(tmp_path / "data.h5"), **keys, table=table, split=split, batch_size=20)
        module.setup("fit")
        rows = [next(iter(loader()))["id"].tolist() for loader in (module.train_dataloader, module.val_dataloader)]
        assert sorted(chain(*rows)) == list(range(0, 20, 2))
        if "key" in split:
            assert sorted(rows[1]) == [n for n in range(0, 20, 2) if n % 4 == 0]


def test_a_target_in_another_file_needs_no_name(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.arange(5.0)
    with h5py.File(tmp_path / "labels.h5", "w") as file:
        file["y"] = np.arange(5) * 2
    y_key = {"path": str(tmp_path / "labels.h5"), "key": "y"}
    module = LazyH5DataModule(str(tmp_path / "data.h5"), x_key="x", y_key=y_key, batch_size=5, shuffle=False)
    module.setup("fit")
    x, y = next(iter(module.train_dataloader()))
    assert y.tolist() == (2 * x).tolist()
    # There may be no labels of what is predicted.
    predicts = LazyH5DataModule(predict_path=str(tmp_path / "data.h5"), x_key="x", y_key=y_key, batch_size=5)
    predicts.setup("predict")
    assert next(iter(predicts.predict_dataloader())).tolist() == x.tolist()


def test_values_of_a_column_keep_their_type(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["id"] = np.arange(3)
    columns = {
        "id": [0, 1, 2, None],
        "yes": [True, False, True, None],
        "n": [1, 2, 3, None],
        "price": pa.array([1, 2, 3, 4], pa.decimal128(9, 2)),
        "many": [[1], [2], [3], []],
    }
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    table = {"path": str(tmp_path / "t.parquet"), "on": "id"}
    path = str(tmp_path / "data.h5")
    dataset = H5LazyDataset(path, {"yes": "table/yes", "n": "table/n", "price": "table/price", "id": "id"}, table=table)
    batch = dataset.read_batch([2, 1])
    assert str(batch["yes"].dtype) == "torch.bool"
    assert batch["yes"].tolist() == [True, False]
    assert batch["n"].tolist() == [3, 2]
    assert batch["price"].tolist() == [3.0, 2.0]
    with pytest.raises(H5ValueError, match=r"'table/many'.* has values of the type list"):
        H5LazyDataset(path, "id", "table/many", table=table)


def test_a_table_may_be_compressed(tmp_path: Path) -> None:
    import gzip

    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["id"] = np.arange(3)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"id,label\n2,7\n0,5\n1,6\n"))
    table = {"path": str(tmp_path / "t.csv.gz"), "on": "id"}
    dataset = H5LazyDataset(str(tmp_path / "data.h5"), "id", "table/label", table=table)
    assert [int(dataset[row][1]) for row in range(3)] == [5, 6, 7]


NUMBERS = count()  # no example writes to a file that is open
MODULES = {
    LazyH5DataModule: {"x_key": {"x": "x", "label": "label", "value": "table/value"}},
    RankCachedH5DataModule: {"x_key": {"x": "x", "label": "label", "value": "table/value"}},
    CombinedHDF5DataModule: {
        "fields": {"x": "x", "label": "label", "value": "table/value"},
        "where": {"kept": 1},
    },
}


@pytest.mark.filterwarnings("ignore:.* no steps in at least one field")
@pytest.mark.parametrize("module", MODULES)
@given(
    of_files=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=4),
    by=st.sampled_from(["lengths", "offsets"]),
    sample=st.sampled_from(["row", "window", "segment"]),
    data=st.data(),
)
def test_labels_and_table_values_are_of_their_segment_whatever_others_are_empty(
    tmp_path, module, of_files, by, sample, data
):
    paths, lines, expected, first = [], [], {}, 0
    for lengths in of_files:
        paths.append(str(tmp_path / f"{next(NUMBERS):06}.h5"))
        ends = np.cumsum([0, *lengths])
        numbers = len(lines) + np.arange(len(lengths))
        kept = np.array([data.draw(st.integers(0, 1)) for _ in lengths], dtype=np.int64)
        with h5py.File(paths[-1], "w") as file:
            file["x"] = first + np.arange(ends[-1])
            file["lengths"], file["offsets"] = np.array(lengths, dtype=np.int64), ends
            file["label"], file["number"], file["kept"] = 100 + numbers, numbers, kept
        for number, start, stop, is_kept in zip(numbers.tolist(), ends[:-1], ends[1:], kept.tolist(), strict=True):
            lines.append({"number": number, "value": 1000 + number})
            if is_kept or "where" not in MODULES[module]:
                expected |= {first + step: (100 + number, 1000 + number) for step in range(start, stop)}
        first += int(ends[-1])
    assume(expected)
    table = write_table(tmp_path / f"{next(NUMBERS)}.csv", lines)
    datamodule = module(
        predict_path=paths,
        segments={by: by, "constants": ["label"]},
        table={"path": table, "on": "number"},
        **({"window": {"length": 2, "pad": "edge"}} if sample == "window" else {"sample": sample}),
        collate_fn="list",
        batch_size=3,
        **MODULES[module],
    )
    datamodule.setup("predict")
    found = {}
    for batch in datamodule.predict_dataloader():
        for x, label, value in zip(batch["x"], batch["label"], batch["value"], strict=True):
            found |= dict.fromkeys(x.reshape(-1).tolist(), (int(label), int(value)))
    assert found == expected
