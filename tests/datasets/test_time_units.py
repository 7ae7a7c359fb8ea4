"""Times of different units are compared as cftime compares them, or not at all."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import H5LazyDataset, H5ValueError
from lightning_h5.datasets.segment_cuts import TimeUnit

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
