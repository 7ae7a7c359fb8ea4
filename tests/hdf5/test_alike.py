"""An array that is described from another file's is described as it would be in full."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import FileOptions
from lightning_h5.errors import H5Error
from lightning_h5.hdf5 import AlikeArrays, ArrayLayout, ChangeGuard, OpenFile, alike, describe_array, open_h5
from lightning_h5.hdf5.alike import _is_equal
from lightning_h5.hdf5.object_headers import HeaderFile
from lightning_h5.hdf5.packing import file_format

TRUST = FileOptions(allow_external=True, trusted=True)


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    """Few values of each setting, so that two arrays often differ in one thing alone."""
    n_rows = draw(st.integers(1, 9))
    inner = draw(st.sampled_from([(), (3,), (2, 3)]))
    storage = draw(st.sampled_from(["contiguous", "chunked", "chunked", "compact", "external", "virtual"]))
    dtype = draw(st.sampled_from(["<i2", ">i2", "<u2", "<f4", "S4", "text", "<i2"]))
    made: dict[str, Any] = {"shape": (n_rows, *inner), "storage": storage, "dtype": dtype, "options": {}}
    if storage == "chunked":
        made["options"] = {
            "chunks": (draw(st.sampled_from([2, 3])), *inner),
            "maxshape": (draw(st.sampled_from([None, n_rows, n_rows + 5])), *inner),
            **draw(st.sampled_from([{}, {"compression": "gzip"}, {"compression": "gzip", "shuffle": True}])),
            "fletcher32": draw(st.booleans()),
        }
    if dtype not in ("text", "S4") and storage != "virtual":
        made["options"]["fillvalue"] = draw(st.sampled_from([None, 1]))
    made["written"] = draw(st.sampled_from([True, True, False]))
    made["attributes"] = draw(
        st.sampled_from([{}, {"units": "K"}, {"scale_factor": 0.5}, {"scale_factor": 2.0}, {"_FillValue": 3}])
    )
    made["many"] = draw(st.sampled_from([0, 0, 20]))
    made["group"] = draw(st.sampled_from(["hard", "hard", "soft", "external"]))
    made["file"] = draw(st.sampled_from([{}, {"libver": "latest"}, {"userblock_size": 512}]))
    return made


def write(path: Path, made: dict[str, Any]) -> None:
    shape, kind = made["shape"], made["dtype"]
    dtype = h5py.string_dtype() if kind == "text" else np.dtype(kind)
    with h5py.File(path, "w", **made["file"]) as file:
        group, storage = file.create_group("real"), made["storage"]
        values = np.full(shape, "a" if kind in ("text", "S4") else 1, dtype=object if kind == "text" else dtype)
        if storage == "virtual":
            group.create_dataset("source", data=values, dtype=dtype)
            layout = h5py.VirtualLayout(shape, dtype)
            layout[:] = h5py.VirtualSource(".", "real/source", shape)
            array = group.create_virtual_dataset("a", layout)
        elif storage == "compact":
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.COMPACT)
            kind_id = h5py.h5t.py_create(dtype, logical=True)
            array = h5py.Dataset(h5py.h5d.create(group.id, b"a", kind_id, h5py.h5s.create_simple(shape), dcpl=plist))
        else:
            options = made["options"]
            if storage == "external":
                options = options | {"external": [(str(path) + ".raw", 0, h5py.h5f.UNLIMITED)]}
            array = group.create_dataset("a", shape, dtype, **options)
        if made["written"] and storage != "virtual":
            array[...] = values
        for name, value in made["attributes"].items():
            array.attrs[name] = value
        for number in range(made["many"]):  # so many that they lie outside of the header
            array.attrs[f"note {number}"] = number
        if made["group"] == "hard":
            file["g"] = group
        elif made["group"] == "soft":
            file["g"] = h5py.SoftLink("/real")
        else:
            with h5py.File(f"{path}.other", "w") as other:
                file.copy(group, other, "real")
            file["g"] = h5py.ExternalLink(f"{path}.other", "/real")


def described(find: Any) -> ArrayLayout | str:
    try:
        found: ArrayLayout = find()
    except H5Error as error:
        return f"{type(error).__name__}: {error}"
    return found


@pytest.mark.wide
@settings(max_examples=examples(120), deadline=None)
@given(st.lists(arrays(), min_size=2, max_size=4), st.booleans())
def test_it_equals_the_full_description(made: list[dict[str, Any]], repeats: bool) -> None:
    session = AlikeArrays()
    with tempfile.TemporaryDirectory() as folder:
        more = [made[0] | {"shape": (n_rows, *made[0]["shape"][1:])} for n_rows in (7, 9)] if repeats else []
        for number, one in enumerate([*made, *more]):
            path = Path(folder) / f"{number}.h5"
            try:
                write(path, one)
            except (ValueError, TypeError, OSError):  # h5py has no such combination
                continue
            with open_h5(str(path)) as file:
                guard = ChangeGuard.of(str(path))
                quick = described(
                    partial(session.describe, OpenFile(str(path), guard, file), str(path), "g/a", TRUST, guard)
                )
                full = described(partial(describe_array, file, str(path), "g/a", TRUST))
            assert isinstance(quick, str) == isinstance(full, str)
            if isinstance(quick, str) or isinstance(full, str):
                assert quick == full
            else:
                assert _is_equal(quick, full)
                assert quick.guard == guard
                assert quick.references is None or quick.references.guard == guard


@pytest.mark.parametrize("options", [{}, {"chunks": (2, 3), "compression": "gzip"}])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_the_third_array_of_a_structure_is_not_described_in_full(
    tmp_path: Path, options: dict[str, Any], libver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, full = AlikeArrays(), []
    in_full = alike.layout_at
    monkeypatch.setattr(alike, "layout_at", lambda *given: full.append(given) or in_full(*given))
    for number in range(4):
        path = str(tmp_path / f"{number}.h5")
        with h5py.File(path, "w", libver=libver) as file:
            file.create_dataset("a/b", data=np.ones((5 + 4 * number, 3), "f4"), **options)
        with open_h5(path) as file:
            guard = ChangeGuard.of(path)
            found = session.describe(OpenFile(path, guard, file), path, "a/b", TRUST, guard)
            assert found.n_rows == 5 + 4 * number
            assert _is_equal(found, describe_array(file, path, "a/b", TRUST))
    assert len(full) == 2


@pytest.mark.parametrize("options", [{}, {"chunks": (2,), "compression": "gzip"}], ids=["contiguous", "gzip"])
def test_a_table_is_described_once_for_all_its_numbers(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [(f"m{at}", "f4", (3,) if at % 2 else ()) for at in range(9)]
    kind = np.dtype([*members, ("flag", "?"), ("word", "S4"), ("part", [("a", "i2")])])
    session, full, in_full = AlikeArrays(), [], alike.layout_at
    monkeypatch.setattr(alike, "layout_at", lambda *given: full.append(given) or in_full(*given))
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        table = file.create_dataset("g/a", data=np.zeros(5, kind), **options)
        table.attrs["scale_factor"] = 2.0
    with open_h5(path) as file:
        guard = ChangeGuard.of(path)
        for name in ("m0", *kind.names, "part/a", "m10"):
            ask = partial(session.describe, OpenFile(path, guard, file), path, f"g/a/{name}", TRUST, guard)
            found, expected = described(ask), described(partial(describe_array, file, path, f"g/a/{name}", TRUST))
            assert isinstance(found, str) == isinstance(expected, str)
            assert found == expected if isinstance(found, str) else _is_equal(found, expected)
        assert len(full) == 6  # the first member, the table, text, a member with members, one of these, no member


def test_a_description_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    path, files, described = str(tmp_path / "a.h5"), FileOptions(), AlikeArrays(remembers=True)
    with h5py.File(path, "w") as file:
        for number in range(4):
            file[f"x{number}"] = np.zeros((9, 2))

    def describe(alike_name: str) -> ArrayLayout:
        with open_h5(path) as file:
            guard = ChangeGuard.of_open(file, path)
            opened = OpenFile(path, guard, file)
            return [described.describe(opened, path, f"x{n}", files, guard, alike=alike_name) for n in range(4)][-1]

    first = describe("x*")
    assert describe("another name") is first
    with h5py.File(path, "a") as file:
        file["x3"][0] = 1
    assert describe("x*") is not first


@pytest.mark.parametrize("libver", ["earliest", "latest", ("v108", "v108"), ("v110", "v110")], ids=str)
@pytest.mark.parametrize("user_block", [0, 512])
@pytest.mark.parametrize("attributes", [[], ["note"], ["Conventions"], [f"note {n}" for n in range(30)]], ids=len)
def test_a_file_is_known_by_its_first_bytes_as_by_the_library(
    tmp_path: Path, libver: Any, user_block: int, attributes: list[str]
) -> None:
    path = tmp_path / "x.h5"
    for n_arrays in (0, 3, 60):
        with h5py.File(path, "w", libver=libver, userblock_size=user_block) as file:
            for number in range(n_arrays):
                file[f"x{number}"] = np.arange(3)
            file.attrs.update(dict.fromkeys(attributes, "CF-1.8"))
        with h5py.File(path) as file:
            found, options = HeaderFile.of(file), file.id.get_create_plist()
            assert found is not None
            assert (found.version, found.user_block) == (options.get_version()[0], options.get_userblock())
            assert found.format == file_format(file)
            assert found.n_bytes == path.stat().st_size
            is_clear = not attributes or (libver == "earliest" and "Conventions" not in attributes)
            assert bool(found.window) == (is_clear and not user_block)  # otherwise the library was asked
