"""Files that are looked at by position are described as through the HDF5 library."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import FileOptions, LazyH5DataModule
from lightning_h5.errors import H5Error
from lightning_h5.hdf5 import AlikeArrays, ArrayLayout, ChangeGuard, OpenFile, open_file, open_h5
from lightning_h5.hdf5.alike import _is_equal
from lightning_h5.hdf5.group_links import ObjectPlaces
from lightning_h5.hdf5.object_headers import HeaderFile, header_address

NAMES = st.text(st.sampled_from("ab_~"), min_size=1, max_size=3)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.dictionaries(NAMES, st.sampled_from(["array", "group", "soft"]), max_size=40),
    st.dictionaries(NAMES, st.sampled_from(["array", "group", "soft"]), max_size=40),
    st.lists(st.tuples(st.booleans(), NAMES), max_size=30),
)
@example(
    {f"{n}": "array" for n in range(3000)}, {f"{n:04}": "group" for n in range(999)}, [(False, "9"), (True, "998")]
)
def test_objects_are_where_the_library_finds_them(
    root: dict[str, str], inner: dict[str, str], asked: list[tuple[bool, str]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.h5"
        with h5py.File(path, "w") as file:
            file.create_group("g|")
            for group, kinds in ((file, root), (file["g|"], inner)):
                for name, kind in kinds.items():
                    if kind == "array":
                        group.create_dataset(name, (1,), "i1")
                    elif kind == "group":
                        group.create_group(name)
                    else:
                        group[name] = h5py.SoftLink("/nowhere")
        with h5py.File(path) as file:
            headers = HeaderFile.of(file)
            assert headers is not None
            places = ObjectPlaces(headers)
            for is_inner, name in [*asked, *((False, name) for name in root), *((True, name) for name in inner)]:
                found, kind = [b"g|"] * is_inner + [name.encode()], (inner if is_inner else root).get(name)
                if kind is None:
                    assert places.address_of(found) is None
                elif kind == "soft":
                    with pytest.raises(ValueError, match="soft link"):
                        places.address_of(found)
                else:
                    info = h5py.h5g.get_objinfo(file.id, b"/".join(found))
                    assert places.address_of(found) == header_address(info.objno)


def write(path: Path, n_rows: int, options: dict[str, Any]) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("g/x", data=np.arange(n_rows * 3.0, dtype="f4").reshape(-1, 3), **options)
        file["y"] = np.arange(n_rows)
        file["y"].attrs["units"] = "m"


def description(session: AlikeArrays, path: Path, key: str) -> ArrayLayout | str:
    try:
        guard = ChangeGuard.of(str(path))
        with OpenFile(str(path), guard) as file:
            return session.describe(file, str(path), key, FileOptions(), guard)
    except H5Error as error:
        return str(error)


@pytest.mark.property
@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from([{}, {"chunks": (4, 3), "compression": "gzip"}]), st.data())
def test_a_damaged_file_is_described_as_by_the_library_or_as_if_it_were_whole(
    options: dict[str, Any], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        paths = [Path(folder) / f"{number}.h5" for number in range(3)]
        for number, path in enumerate(paths):
            write(path, 9 + number, options)
        content = bytearray(paths[2].read_bytes())
        whole = [description(AlikeArrays(), paths[2], key) for key in ("g/x", "y")]
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        paths[2].write_bytes(content)
        found = []
        for by_position in (True, False):
            if not by_position:
                patch.setattr(HeaderFile, "by_position", lambda *_: None)
            session = AlikeArrays()
            found.append([[description(session, path, key) for path in paths][2] for key in ("g/x", "y")])
        for by_position, by_library, undamaged in zip(*found, whole, strict=True):
            if isinstance(by_position, str) or isinstance(undamaged, str):
                assert by_position == by_library
            else:
                same = [each for each in (by_library, undamaged) if isinstance(each, ArrayLayout)]
                assert any(_is_equal(by_position.guarded(each.guard), each) for each in same)


def test_thousands_of_alike_files_are_not_opened_through_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr(open_file, "open_h5", lambda path, **given: opened.append(path) or open_h5(path, **given))
    for number in range(9):
        write(tmp_path / f"{number}.h5", 5 + number, {"chunks": (4, 3), "compression": "gzip"})
    datamodule = LazyH5DataModule(str(tmp_path), x_key="g/x", y_key="y", batch_size=5, shuffle=False)
    datamodule.setup("fit")
    rows = [row for batch in datamodule.train_dataloader() for row in batch[1].tolist()]
    assert sorted(rows) == sorted(row for number in range(9) for row in range(5 + number))
    assert len(set(opened)) == 2  # which show that descriptions can be reused


def cut(path: Path, _: ExitStack) -> None:
    os.truncate(path, path.stat().st_size - 100)


def lock(path: Path, stack: ExitStack) -> None:
    fcntl.flock(stack.enter_context(path.open()), fcntl.LOCK_EX)


def replace_by_pipe(path: Path, _: ExitStack) -> None:
    path.unlink()
    os.mkfifo(path)


def prepend(path: Path, _: ExitStack) -> None:
    path.write_bytes(b"#" + path.read_bytes())


@pytest.mark.parametrize("harm", [cut, lock, replace_by_pipe, prepend])
def test_a_file_that_the_library_refuses_is_refused_among_alike_ones(
    tmp_path: Path, harm: Callable[[Path, ExitStack], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    paths = [tmp_path / f"{number}.h5" for number in range(4)]
    for path in paths:
        write(path, 9, {})
    with ExitStack() as stack:
        harm(paths[2], stack)
        with pytest.raises(H5Error) as expected:
            open_h5(str(paths[2]))
        with pytest.raises(H5Error) as error:
            LazyH5DataModule([str(path) for path in paths], x_key="g/x", y_key="y").setup("fit")
    assert str(expected.value) in str(error.value)
