"""Columns of a side table are fields, filters, groups, classes, weights and splits; wrong joins end before training."""

import csv
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5FileError,
    H5KeyError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
    TableOptions,
)

pyarrow = pytest.importorskip("pyarrow")

N = 30
RNG = np.random.default_rng(0)
IDS = [f"{number:03}" for number in RNG.permutation(2 * N)]  # text that looks like numbers
LINES = {
    name: {
        "exam_id": name,
        "age": int(RNG.integers(20, 80)),
        "score": float(RNG.normal()),
        "sex": str(RNG.choice(["f", "m"])),
        "patient": f"p{int(name) // 4}",
        "split": ["train", "validation", "test"][int(name) % 3],
    }
    for name in IDS
}


def write_table(path: Path, lines: Any) -> str:
    """Write lines as CSV, TSV or Parquet, sorted so that no line is at the place of its row."""
    rows = sorted(lines, key=lambda line: line["age"])
    if path.suffix == ".parquet":
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for number in range(2):
        with h5py.File(tmp_path / f"part{number}.h5", "w") as file:
            file["x"] = np.arange(N) + N * number
            file["exam_id"] = np.array(IDS[N * number : N * number + N], dtype=h5py.string_dtype())
    return [str(tmp_path / f"part{number}.h5") for number in range(2)]


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    return {"path": write_table(tmp_path / "exams.csv", LINES.values()), "on": "exam_id"}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
@pytest.mark.parametrize("kind", ["lazy", "rank cached", "combined"])
def test_columns_are_fields_of_rows(tmp_path: Path, files: list[str], kind: str, suffix: str) -> None:
    given = TableOptions(path=write_table(tmp_path / f"exams{suffix}", LINES.values()), on="exam_id")
    keys = {"age": "table/age", "sex": "table/sex", "both": ["table/score", "table/age"]}
    rows = [3, 1, 2 * N - 1, 0]
    if kind == "combined":
        names, mapped = ["x", *keys], {"x": "x", **keys}
        batch = CombinedHDF5Dataset(files, names, field_map=mapped, table=given).read_batch(rows)
    else:
        dataset = {"lazy": H5LazyDataset, "rank cached": RankMemCachedH5Dataset}[kind](files, "x", keys, table=given)
        batch = dataset.read_batch(rows)[1]
    expected = [LINES[IDS[row]] for row in rows]
    assert batch["age"].tolist() == [line["age"] for line in expected]
    assert batch["sex"] == [line["sex"] for line in expected]
    both = torch.tensor([[line["score"], line["age"]] for line in expected], dtype=torch.float32)
    assert torch.allclose(batch["both"], both)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
def test_columns_divide_rows(files: list[str], table: Any, make: Any, num_workers: int) -> None:
    keys = {"fields": ["x", "table/age"]} if make is CombinedHDF5DataModule else {"x_key": {"x": "x"}}
    for split in (
        {"val_fraction": 0.3, "group_key": "table/patient"},
        {"val_fraction": 0.3, "stratify_key": "table/sex"},
        {"key": "table/split"},
    ):
        module = make(files, **keys, table=table, split=split, batch_size=7, num_workers=num_workers)
        module.setup("fit")
        train, val = (
            [LINES[IDS[int(x)]] for batch in loader for x in batch["x"]]
            for loader in (module.train_dataloader(), module.val_dataloader())
        )
        module.teardown("fit")
        if "group_key" in split:
            assert not {line["patient"] for line in train} & {line["patient"] for line in val}
        elif "key" in split:
            assert {line["split"] for line in train} == {"train"}
            assert [line["split"] for line in val] == ["validation"] * 20
        else:
            shares = [sum(line["sex"] == "f" for line in lines) / len(lines) for lines in (train, val)]
            assert abs(shares[0] - shares[1]) < 0.1
        assert "key" in split or len(train) + len(val) == 2 * N


def test_columns_filter_rows_and_weigh_them(files: list[str], table: Any) -> None:
    where = {"table/sex": "f", "table/age": {"min": 40}}
    dataset = CombinedHDF5Dataset(files, ["x"], where=where, table=table)
    expected = [row for row, name in enumerate(IDS) if LINES[name]["sex"] == "f" and LINES[name]["age"] >= 40]
    assert dataset.read_batch(range(len(dataset)))["x"].tolist() == expected
    module = LazyH5DataModule(
        files, x_key="x", table=table, weights={"weight_key": "table/heavy"}, batch_size=10, seed=1
    )
    lines = [line | {"heavy": float(line["age"] > 50)} for line in LINES.values()]
    write_table(Path(table["path"]), lines)
    module.setup("fit")
    assert {LINES[IDS[int(x)]]["age"] > 50 for batch in module.train_dataloader() for x in batch} == {True}


@pytest.mark.parametrize("on", ["@stem", "@name"])
def test_a_line_is_of_a_file_or_of_a_group(tmp_path: Path, on: str) -> None:
    names = [f"slide_{number}" for number in range(6)]
    for name in names:
        with h5py.File(tmp_path / ("all.h5" if on == "@name" else f"{name}.h5"), "a") as file:
            key = f"bags/{name}/features" if on == "@name" else "features"
            file[key] = np.full((int(name[-1]) + 1, 4), int(name[-1]), "f4")
    lines = [{"slide": n, "label": int(n[-1]) % 2, "age": 9 - int(n[-1]), "case": f"c{int(n[-1]) // 2}"} for n in names]
    path = write_table(tmp_path / "slides.csv", lines)
    module = LazyH5DataModule(
        str(tmp_path / ("all.h5" if on == "@name" else "slide_*.h5")),
        x_key={"features": "features", "label": "table/label"},
        segments={"groups": "bags/*"} if on == "@name" else None,
        sample="segment",
        table={"path": path, "on": {"slide": on}},
        split={"val_fraction": 0.34, "group_key": "table/case"},
        collate_fn="pad",
        batch_size=2,
    )
    module.setup("fit")
    seen = []
    for batch in (*module.train_dataloader(), *module.val_dataloader()):
        numbers = batch["features"][:, 0, 0].int()
        assert batch["label"].tolist() == (numbers % 2).tolist()
        seen.append(numbers.tolist())
    assert sorted(number for some in seen for number in some) == list(range(6))
    assert len({number // 2 for number in seen[-1]}) == 1


def test_lines_belong_to_rows_by_their_place(tmp_path: Path, files: list[str]) -> None:
    lines = [{"age": row, "label": row * 2} for row in range(2 * N)]
    path = write_table(tmp_path / "rows.csv", lines)
    assert H5LazyDataset(files, "x", "table/label", table=path).read_batch([0, 59])[1].tolist() == [0, 118]
    write_table(tmp_path / "rows.csv", lines[:-1])
    with pytest.raises(H5ValueError, match="59 lines and the data has 60 rows"):
        H5LazyDataset(files, "x", "table/label", table=path)


def test_names_of_columns_may_have_a_slash(tmp_path: Path, files: list[str]) -> None:
    lines = [{"Nucleus": row % 2, "Lysosome/Vacuole": row % 3} for row in range(2 * N)]
    path = write_table(tmp_path / "rows.csv", [line | {"age": row} for row, line in enumerate(lines)])
    stacked = {"both": ["table/Nucleus", "table/Lysosome/Vacuole"], "one": "table/Lysosome/Vacuole"}
    target = H5LazyDataset(files, "x", stacked, table=path).read_batch([5, 7])[1]
    assert target["both"].tolist() == [[1, 2], [1, 1]]
    assert target["one"].tolist() == [2, 1]


def changed(lines: Any, **changes: Any) -> list[dict[str, Any]]:
    return [line | changes if at == 3 else line for at, line in enumerate(lines)]


@pytest.mark.parametrize(
    ("lines", "on", "error", "says"),
    [
        (list(LINES.values())[4:], "exam_id", H5ValueError, "has no line in which 'exam_id' is .*4 of 30 keys"),
        ([*LINES.values(), LINES[IDS[0]]], "exam_id", H5ValueError, f"several lines in which 'exam_id' is '{IDS[0]}'"),
        (changed(LINES.values(), exam_id="999"), "exam_id", H5ValueError, "1 of 30 keys"),
        ([line | {"exam_id": f"x{n}"} for n, line in LINES.items()], "exam_id", H5ValueError, "30 of 30 keys"),
        (list(LINES.values()), "exam", H5ValueError, "names the column 'exam'.*Did you mean 'exam_id'"),
        (list(LINES.values()), {"sex": "x"}, H5ValueError, "has text such as 'f'.*has numbers"),
        (list(LINES.values()), {"exam_id": "@site"}, H5KeyError, "has no attributes"),
        (
            changed(LINES.values(), age=None),
            "exam_id",
            H5ValueError,
            "'table/age' has no value in 1 of the lines.*exam_id=",
        ),
    ],
)
def test_wrong_joins_end_before_training(
    tmp_path: Path, files: list[str], lines: Any, on: Any, error: Any, says: str
) -> None:
    path = tmp_path / "exams.parquet"
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(lines), path)

    def set_up() -> None:
        LazyH5DataModule(files, x_key="x", y_key="table/age", table={"path": str(path), "on": on}).setup("fit")

    with pytest.raises(error, match=says):
        set_up()


def test_what_is_not_there_is_named(files: list[str], table: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match=r"no column 'agee'.*Did you mean 'age'"):
        H5LazyDataset(files, "x", "table/agee", table=table)
    with pytest.raises(H5FileError, match="cannot be read"):
        H5LazyDataset(files, "x", "table/age", table=str(tmp_path / "none.csv"))
    with pytest.raises(H5ValueError, match="ends in"):
        H5LazyDataset(files, "x", "table/age", table=str(tmp_path / "exams.xlsx"))
    write_table(Path(table["path"]), [line | {"split": "somewhere"} for line in LINES.values()])
    module = LazyH5DataModule(files, x_key="x", table=table, split={"key": "table/split"})
    with pytest.raises(H5ValueError, match="has 'somewhere'"):
        module.setup("fit")


def test_rows_without_a_line_are_left_out_if_that_is_asked_for(files: list[str], table: Any) -> None:
    write_table(Path(table["path"]), list(LINES.values())[5:])
    dropping = table | {"missing": "drop"}
    assert H5LazyDataset(files, "x", "table/age", table=dropping).read_batch([0])[0].tolist() == [5]
    assert len(CombinedHDF5Dataset(files, ["x", "table/age"], table=dropping)) == 2 * N - 5
    module = LazyH5DataModule(files, x_key="x", y_key="table/age", table=dropping, split=0.2, batch_size=5)
    module.setup("fit")
    seen = [int(x) for loader in (module.train_dataloader(), module.val_dataloader()) for xs, _ in loader for x in xs]
    assert sorted(seen) == list(range(5, 2 * N))


def test_the_identity_follows_from_the_used_columns(files: list[str], table: Any) -> None:
    def identity() -> str:
        return H5LazyDataset(files, "x", "table/age", table=table).identity()

    first = identity()
    write_table(Path(table["path"]), [line | {"sex": "?"} for line in LINES.values()])
    assert identity() == first
    write_table(Path(table["path"]), changed(LINES.values(), age=81))
    assert identity() != first


def test_without_a_table_the_name_is_that_of_an_array(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["table/age"] = np.arange(4)
    assert H5LazyDataset(str(tmp_path / "a.h5"), "table/age").read_batch([2]).tolist() == [2]


def test_on_needs_no_quotes_in_yaml(files: list[str], table: Any) -> None:
    yaml = pytest.importorskip("yaml")
    given = yaml.safe_load(f"{{path: {table['path']}, on: exam_id}}")
    assert True in given  # YAML reads it so
    assert TableOptions.parse(given, "table") == TableOptions(path=table["path"], on="exam_id")
    module = LazyH5DataModule(files, x_key="x", y_key="table/age", table=given)
    module.setup("fit")
    assert len(module.datasets["train"]) == 2 * N
