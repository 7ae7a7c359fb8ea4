"""Times of different units are compared as cftime compares them, or not at all."""

import itertools
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import H5LazyDataset, H5ValueError
from lightning_h5.samples.segment_cuts import TimeUnit

NUMBERS = itertools.count()
NAMES = ["seconds", "second", "s", "minutes", "min", "hours", "h", "hr", "days", "day", "d", "ms", "microseconds"]
CLOCKS = ["", " 06:30", " 00:00:00", "T12:00:01.5", " 00:00:00 UTC", " 00:00:00Z", " 03:00:00 +02:00", " 0:0:0 -0530"]


@pytest.mark.parametrize("name", NAMES)
@given(
    st.tuples(st.integers(1583, 2100), st.integers(1, 12), st.integers(1, 28)),
    st.sampled_from(CLOCKS),
    st.sampled_from(["", "standard", "gregorian", "proleptic_gregorian"]),
    st.integers(-1000, 100_000),
)
def test_a_number_is_the_time_that_cftime_makes_of_it(
    name: str, date: tuple[int, int, int], clock: str, calendar: str, number: int
) -> None:
    cftime = pytest.importorskip("cftime")
    units = f"{name} since {date[0]}-{date[1]}-{date[2]}{clock}"
    scale = TimeUnit(units, calendar).scale()
    assert scale is not None
    time = cftime.num2date(number, units, calendar or "standard")
    expected = cftime.date2num(time, "microseconds since 1970-01-01", calendar or "standard")
    assert round(number * scale[0] * 1e6) + scale[1] == pytest.approx(expected, abs=50)


@pytest.mark.parametrize(
    "unit",
    [
        TimeUnit("hours since 1-1-1 00:00:0.0"),  # days of the Julian calendar
        TimeUnit("days since 2000-01-01", "noleap"),
        TimeUnit("months since 2000-01-01"),
        TimeUnit("hours"),
        TimeUnit("days since 2000-02-31"),
        TimeUnit(),
    ],
)
def test_other_units_are_not_compared(unit: TimeUnit) -> None:
    assert unit.scale() is None


def months(folder: Path, *times: tuple[str, Any]) -> str:
    for number, (units, values) in enumerate(times):
        with h5py.File(folder / f"{number}.nc", "w") as file:
            file["x"] = np.asarray(values, "f4")
            file["time"] = np.asarray(values, "i4")
            file["time"].attrs.update({"units": units, "calendar": "standard"})
    return str(folder / "*.nc")


@pytest.mark.parametrize(
    ("units", "first", "n_windows"),
    [
        ("hours since 2020-02-01", 0, 61),  # goes on, and its numbers begin again
        ("hours since 2020-02-01", 31 * 24, 60),  # numbers go on, and a month is missing
        ("hours since 2020-01-01", 31 * 24, 61),
        ("days since 2020-02-01", 0, 31),  # 24 days from one to the next, and one to the first
    ],
)
def test_windows_reach_from_file_to_file_by_their_times(tmp_path: Path, units: str, first: int, n_windows: int) -> None:
    january = 24 * np.arange(31)
    path = months(tmp_path, ("hours since 2020-01-01", january), (units, first + 24 * np.arange(31)))
    assert len(H5LazyDataset(path, "x", segments={"join": "time"}, window={"length": 2, "stride": 1})) == n_windows


def test_steps_of_a_microsecond_join(tmp_path: Path) -> None:
    starts = ("us since 2020-01-01", np.arange(1000)), ("us since 2020-01-01 00:00:00.001", np.arange(1000))
    path = months(tmp_path, *starts)
    assert len(H5LazyDataset(path, "x", segments={"join": "time"}, window={"length": 2, "stride": 1})) == 1999


def test_units_that_are_not_compared_are_an_error(tmp_path: Path) -> None:
    path = months(tmp_path, ("months since 2020-01-01", [0, 1]), ("months since 2020-03-01", [0, 1]))
    with pytest.raises(H5ValueError, match=r"'months since 2020-01-01' .standard. in .*0.nc.*are not compared"):
        H5LazyDataset(path, "x", segments={"join": "time"}, window=2)


@given(st.data())
def test_files_are_joined_in_the_order_of_their_coordinate(tmp_path: Path, data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=12))
    has_units = data.draw(st.booleans())
    n, folder = sum(lengths), tmp_path / str(next(NUMBERS))
    folder.mkdir()
    names = [f"m_{number}.h5" for number in range(1, 1 + len(lengths))]
    names = data.draw(st.just(names) | st.permutations(names))
    for name, rows in zip(names, np.split(np.arange(n), np.cumsum(lengths)[:-1]), strict=True):
        with h5py.File(folder / name, "w") as file:
            file["x"], file["time"] = rows, rows - (rows[0] if has_units and len(rows) else 0)
            if has_units:
                since = f"2020-01-{1 + rows[0] // 24:02} {rows[0] % 24:02}:00" if len(rows) else "2021-01-01"
                file["time"].attrs["units"] = f"hours since {since}"
    if n < 2:
        return
    with H5LazyDataset(str(folder / "m_*.h5"), "x", segments={"join": "time"}, window=[0, 2]) as dataset:
        batch = dataset.read_batch(range(len(dataset)))
        assert batch.tolist() == [[row, row + 1] for row in range(n - 1)]
        assert [os.path.basename(path) for path, _ in dataset.places_of([0, n - 2])] == [
            next(name for name, size in zip(names, lengths, strict=True) if size),
            next(name for name, end in zip(names, np.cumsum(lengths), strict=True) if end > n - 2),
        ]
