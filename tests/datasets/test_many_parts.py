"""Files with very many parts: arrays that are alike are noted as numbers, and described when they are asked for."""

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
from guards import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import H5LazyDataset, LazyH5DataModule
from lightning_h5.catalog import kept_parts, segment_parts
from lightning_h5.datasets import file_dataset
from lightning_h5.errors import H5CorruptError, H5ValueError
from lightning_h5.hdf5 import (
    ArrayColumns,
    ChangeGuard,
    LayoutTable,
    check_no_overlap,
    describe_array,
    file_identity,
    open_h5,
)
from lightning_h5.options import FileOptions
from lightning_h5.readers import TaskQueue, block_sources

KEYS = ("x", "y", "name", "@scale")
STORED = [{}, {"chunks": (2, 3)}, {"chunks": (2, 3), "compression": "gzip"}, {"chunks": (3, 2), "maxshape": (None, 3)}]
NAMES = h5py.string_dtype()


def write(path, parts):
    """Groups with the arrays that ``KEYS`` name; all values differ."""
    with h5py.File(path, "w") as file:
        for number, (n, stored, kind) in enumerate(parts):
            group = file.create_group(f"data/p{number}")
            values = (1000 * number + np.arange(3 * n)).reshape(n, 3)
            array = group.create_dataset("x", (n, 3), "f4", **STORED[stored])
            array[: n - (kind == "unwritten")] = values[: n - (kind == "unwritten")]
            group["y"] = np.arange(n + 1, dtype="i2") + 10 * number
            if kind == "linked":
                group["other"] = group["y"]
                del group["y"]
                group["y"] = h5py.SoftLink(f"/data/p{number}/other")
            group.create_dataset("name", data=[f"{number}/{row}" for row in range(n)], dtype=NAMES)
            group.attrs["scale"] = float(number)


def opened(path, **given):
    """Whole groups as samples."""
    segments = {"groups": "data/*", **given.pop("segments", {})}
    keys = {"a": "x", "b": "y", "c": "name", "d": "@scale"}
    return H5LazyDataset(str(path), keys, segments=segments, collate_fn="list", **given)


def described(dataset, path, part):
    """The arrays of a part as full descriptions say, seen as the dataset sees them."""
    layouts = dataset.table.layouts
    with open_h5(str(path)) as file:
        guard = ChangeGuard.of(str(path))
        for field, segment_field in enumerate(layouts.fields):
            key = layouts.stored.names.key(field, layouts.stored.stars[part])
            if "@" in key:
                full = segment_parts.attribute_of(file, str(path), f"data/p{part}", key, guard)
            else:
                full = describe_array(file, str(path), key, FileOptions())
            yield segment_field.seen(full, 1, None)


def same(a, b):
    tables = [layout.table if layout.table is not None else None for layout in (a, b)]
    assert a == b
    assert (tables[0] is None) == (tables[1] is None)
    if tables[0] is not None:
        for name in ("grid", "offsets", "sizes", "masks"):
            assert np.array_equal(getattr(tables[0], name), getattr(tables[1], name))
    assert (a.references is None) == (b.references is None)
    assert (a.value is None) == (b.value is None)
    if a.value is not None:
        assert a.value.tolist() == b.value.tolist()
    if a.references is not None:
        same(a.references, b.references)


PARTS = st.lists(
    st.tuples(
        st.integers(2, 7),
        st.integers(0, len(STORED) - 1),
        st.sampled_from(["plain", "plain", "unwritten", "linked"]),
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=examples(12), deadline=None)
@given(PARTS, st.sampled_from([{}, {"constants": ["a"]}, {"step_axis": {"a": 1, "*": 0}}]))
def test_they_equal_full_descriptions_and_read_the_same(tmp_path_factory, parts, segments):
    path = tmp_path_factory.mktemp("parts") / "parts.h5"
    write(path, parts)
    dataset = opened(path, segments=segments)
    layouts, full = dataset.table.layouts, []
    assert len(layouts) == len(parts)
    for part in range(len(parts)):
        each = list(described(dataset, path, part))
        for field, one in enumerate(each):
            same(layouts.one(part, field), one)
            assert layouts.n_rows(field)[part] == one.n_rows
        full += each
    assert dataset.table.identity == file_identity(str(path), full)
    samples = dataset.read_batch(list(range(len(dataset))))
    with h5py.File(path) as file:
        for part in range(len(parts)):
            group = file[f"data/p{part}"]
            stored = group["x"][:].T if "step_axis" in segments else group["x"][:]
            assert np.array_equal(np.moveaxis(samples["a"][part].numpy(), 0, 0).reshape(-1), group["x"][:].reshape(-1))
            assert stored.size == samples["a"][part].numel()
            assert np.array_equal(samples["b"][part].numpy(), group["y"][:])
            assert samples["c"][part] == [one.decode() for one in group["name"][:]]


def test_a_group_of_another_dtype_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "parts.h5"
    write(path, [(4, 0, "plain")] * 5)
    for name, dtype in (("x", "f8"), ("y", "u2")):
        with h5py.File(path, "r+") as file:
            old = file["data/p3"].pop(name)[:]
            file["data/p3"][name] = old.astype(dtype)
        with pytest.raises(H5ValueError, match=rf"'data/p0/{name}' has the dtype .* and 'data/p3/{name}' has"):
            opened(path)
        with h5py.File(path, "r+") as file:
            del file["data/p3"][name]
            file["data/p3"][name] = old


def test_rows_of_another_shape_are_read_as_they_are(tmp_path):
    path = tmp_path / "parts.h5"
    write(path, [(4, 0, "plain")] * 4)
    with h5py.File(path, "r+") as file:
        del file["data/p2/x"]
        file["data/p2/x"] = np.arange(20, dtype="f4").reshape(4, 5)
    samples = opened(path).read_batch([0, 1, 2, 3])["a"]
    assert [sample.shape[1] for sample in samples] == [3, 3, 5, 3]
    assert samples[2].flatten().tolist() == list(range(20))


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(PARTS, min_size=1, max_size=3),
    st.sampled_from([0, 16 << 20]),
    st.sampled_from([1, 2]),
    st.randoms(use_true_random=False),
)
def test_windows_of_many_arrays_of_many_files_are_what_h5py_reads(tmp_path_factory, files, held_bytes, n, random):
    folder = tmp_path_factory.mktemp("files")
    for number, parts in enumerate(files):
        write(folder / f"{number}.h5", parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_h5.samples.row_table.HELD_BYTES", held_bytes)
        segments = {"groups": "data/*", "constants": ["@scale"]}
        dataset = H5LazyDataset(str(folder), ["x", "@scale"], segments=segments, window=[0, n])
        wanted = []
        for path in sorted(folder.glob("*.h5")):
            with h5py.File(path) as file:
                for part in range(len(file["data"])):
                    group = file[f"data/p{part}"]
                    rows = group["x"][:]
                    wanted += [(rows[at : at + n], group.attrs["scale"]) for at in range(len(rows) - n + 1)]
        order = [random.randrange(len(wanted)) for _ in range(3 * len(wanted))]
        for some in np.array_split(order, 4):
            x, scale = dataset.read_batch(some.tolist())
            assert np.array_equal(x.numpy().reshape(len(some), n, 3), np.stack([wanted[at][0] for at in some]))
            assert scale.flatten().tolist() == [wanted[at][1] for at in some]
    assert len(dataset) == len(wanted)


@pytest.mark.parametrize("stored", [{}, {"chunks": (2, 3), "compression": "gzip"}])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", [("a", ">i2"), ("x", "<f4", (3,))]])
def test_rows_that_are_stored_otherwise_are_read_together_too(tmp_path, monkeypatch, stored, dtype):
    rng, paths, wanted = np.random.default_rng(0), [], []
    key = "x/x" if isinstance(dtype, list) else "x"
    for number in range(5):
        paths.append(str(tmp_path / f"{number}.h5"))
        rows = rng.normal(size=(4, 3)).astype("f4")
        values = rows
        if isinstance(dtype, list):
            values = np.zeros(4, dtype)
            values["x"] = rows
        with h5py.File(paths[-1], "w") as file:
            given = {**stored, "chunks": (2, 3)[: values.ndim]} if stored else {}
            file.create_dataset("x", data=values.astype(dtype), **given)
        wanted += [*rows]
    for held_bytes in (0, 16 << 20):
        monkeypatch.setattr("lightning_h5.samples.row_table.HELD_BYTES", held_bytes)
        dataset = H5LazyDataset(paths, key)
        order = rng.permutation(len(wanted)).tolist()
        assert np.array_equal(dataset.read_batch(order), np.stack([wanted[at] for at in order]))
        assert np.array_equal(dataset.read_batch(order[::-1]), np.stack([wanted[at] for at in order[::-1]]))


def test_rows_of_many_arrays_are_asked_for_ahead_on_a_slow_disk(make_h5, monkeypatch):
    monkeypatch.setattr("lightning_h5.samples.row_table.HELD_BYTES", 0)
    monkeypatch.setattr(type(TaskQueue().pace), "is_slow", True)
    asked = {}

    def note(layout, places, sizes, counters):
        asked[layout.path] = list(zip(places.tolist(), sizes.tolist(), strict=True))

    monkeypatch.setattr("lightning_h5.readers.many_arrays.prefetch_stored", note)
    paths = [str(make_h5(x=np.zeros((4, 2), "f4"))) for _ in range(3)]
    H5LazyDataset(paths, "x").prefetch(np.array([9, 1, 2, 8]))
    with h5py.File(paths[0]) as first, h5py.File(paths[2]) as last:
        starts = [file["x"].id.get_offset() for file in (first, last)]
    row = 2 * 4
    assert asked == {
        paths[0]: [(starts[0] + row, 2 * row)],  # rows 1 and 2 are neighbors
        paths[2]: [(starts[1] + row, row), (starts[1], row)],
    }


def test_a_damaged_one_of_many_small_arrays_spoils_no_other(tmp_path):
    paths = [tmp_path / f"{number}.h5" for number in range(6)]
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.full((4, 64), number, "f4"), chunks=(2, 64), compression="gzip")
            place = file["x"].id.get_chunk_info(1)
    with open(paths[3], "r+b") as file:
        file.seek(place.byte_offset)
        file.write(b"damage" * (place.size // 6))
    dataset = H5LazyDataset([str(path) for path in paths], "x")
    assert dataset.read_batch([0, 23, 12, 13])[:, 0].tolist() == [0, 5, 3, 3]
    with pytest.raises(H5CorruptError, match=r"chunk 1 \(rows 2 to 3\) of 'x' in '.*3\.h5'"):
        dataset.read_batch([1, 14])
    assert dataset.read_batch([13, 22, 12])[:, 0].tolist() == [3, 5, 3]


@pytest.mark.parametrize("stored", [0, 2])
def test_readers_that_were_dropped_are_opened_again(tmp_path, monkeypatch, stored):
    monkeypatch.setattr(file_dataset, "MAX_READERS", 3)
    monkeypatch.setattr(block_sources, "MAX_OPEN", 2)
    monkeypatch.setattr("lightning_h5.samples.row_table.HELD_BYTES", 0)
    path = tmp_path / "parts.h5"
    write(path, [(3 + number % 4, stored, "plain") for number in range(12)])
    dataset = H5LazyDataset(str(path), ["x", "y"], segments="data/*", window=[0, 2])
    monkeypatch.setattr(dataset.table.layouts, "places", lambda field: np.full(12, -1))  # each array has a reader
    order = np.random.default_rng(0).permutation(np.tile(np.arange(len(dataset)), 2))
    with h5py.File(path) as file:
        wanted = [file[f"data/p{part}/x"][at : at + 2] for part in range(12) for at in range(2 + part % 4)]
    for some in np.array_split(order, 4):
        assert np.array_equal(dataset.read_batch(some.tolist())[0].numpy(), np.stack([wanted[at] for at in some]))
    assert len(dataset._readers) <= 3


@pytest.mark.parametrize(
    ("n_files", "small_bytes", "is_slow", "at_once"),
    [(20, 64 << 10, False, False), (4, 64 << 10, False, True), (20, 0, False, True), (20, 64 << 10, True, True)],
)
def test_rows_of_many_small_arrays_are_read_by_one_thread_at_a_time(
    make_h5, monkeypatch, n_files, small_bytes, is_slow, at_once
):
    """Two would wait for the interpreter's lock longer than they read, unless a disk keeps them waiting anyway."""
    monkeypatch.setattr(file_dataset, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(type(TaskQueue().pace), "is_slow", is_slow)
    dataset = H5LazyDataset([make_h5(x=np.full((4, 2), number)) for number in range(n_files)], "x")
    rows, seen = np.arange(0, 4 * n_files, 4), []
    both = threading.Barrier(2, timeout=HANG if at_once else 1)
    read = dataset._read

    def meet(*arguments, **named):
        try:
            both.wait()
            seen.append(True)
        except threading.BrokenBarrierError:
            seen.append(False)
        return read(*arguments, **named)

    monkeypatch.setattr(dataset, "_read", meet)
    with ThreadPoolExecutor(2) as threads:
        for batch in threads.map(dataset.read_batch, [rows.tolist()] * 2):
            assert batch[:, 0].tolist() == [*range(n_files)]
    assert seen == [at_once] * 2


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5), st.integers(0, 60)), min_size=1, max_size=6))
def test_arrays_of_a_part_that_share_bytes_or_lie_outside_of_the_file_are_found(tmp_path_factory, parts):
    path = tmp_path_factory.getbasetemp() / "one.h5"
    if not path.exists():
        with h5py.File(path, "w") as file:
            file["a"], file["b"] = np.zeros(1, "u1"), np.zeros((1, 2), "u1")
    with open_h5(str(path)) as file:
        templates = [describe_array(file, str(path), key, FileOptions()) for key in ("a", "b")]
    columns, wanted = ArrayColumns(), []
    for number, (first, n_rows, second) in enumerate(parts):
        places = zip(templates, (first, second), strict=True)
        arrays = [one.moved(str(path), one.key, n_rows, place, None, one.guard) for one, place in places]
        for at, array in enumerate(arrays):
            columns.append(array, at)
        try:
            check_no_overlap(arrays)
            assert max(first + n_rows, second + 2 * n_rows) <= 55
        except (H5CorruptError, AssertionError):
            wanted.append(number)
    n_bytes = np.full(len(parts), 55)
    assert LayoutTable.of([columns], 2, templates).suspicious([0, 1], n_bytes).tolist() == wanted


def test_a_segment_takes_few_bytes_in_workers(tmp_path):
    sizes = {}
    for n in (100, 600):
        write(path := tmp_path / f"{n}.h5", [(2 + number % 5, 0, "plain") for number in range(n)])
        dataset = H5LazyDataset(str(path), ["x", "y"], segments="data/*", window=[0, 2])
        sizes[n] = len(pickle.dumps(dataset))
    assert (sizes[600] - sizes[100]) / 500 < 2 * 20 + 60


# Kept on disk ----------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """Counts arrays that are described, and keeps the contents of the smallest files."""
    monkeypatch.setattr(kept_parts, "MIN_ARRAYS", 1)
    count = []
    describe = segment_parts.AlikeArrays.describe_alike
    monkeypatch.setattr(
        segment_parts.AlikeArrays, "describe_alike", lambda *a, **k: count.append(a) or describe(*a, **k)
    )
    return count


def values_of(dataset):
    read = dataset.read_batch(list(range(len(dataset))))
    return [[np.asarray(one).tolist() for one in read[name]] for name in "abcd"], dataset.identity()


@pytest.mark.parametrize("stored", range(len(STORED)))
def test_a_second_setup_describes_one_array_of_each_kind(tmp_path, counted, stored):
    parts = [(2 + number % 3, stored, kind) for number, kind in enumerate(["plain"] * 20 + ["unwritten", "linked"])]
    write(tmp_path / "parts.h5", parts)
    files = {"catalog_dir": str(tmp_path / "kept")}
    first = values_of(opened(tmp_path / "parts.h5", files=files))
    assert len(counted) == 3 * len(parts)
    counted.clear()
    second = opened(tmp_path / "parts.h5", files=files)
    assert values_of(second) == first == values_of(opened(tmp_path / "parts.h5", files={"catalog_dir": None}))
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".catalog"]
    for part in range(len(parts)):
        for field, one in enumerate(described(second, tmp_path / "parts.h5", part)):
            same(second.table.layouts.one(part, field), one)
    assert len(counted) < 12 + 3 * len(parts)


def damaged(content, how):
    middle = len(content) // 2
    return {
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "truncated": content[:middle],
        "empty": b"",
        "of another kind": b"x" * len(content),
    }[how]


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "of another kind"])
def test_a_damaged_file_is_not_used_and_written_again(tmp_path, counted, how):
    write(tmp_path / "parts.h5", [(3, 0, "plain")] * 6)
    files = {"catalog_dir": str(tmp_path / "kept")}
    wanted = values_of(opened(tmp_path / "parts.h5", files=files))
    (kept,) = (tmp_path / "kept").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damaged(whole, how))
    counted.clear()
    assert values_of(opened(tmp_path / "parts.h5", files=files)) == wanted
    assert len(counted) >= 18
    assert kept.read_bytes() == whole


@pytest.mark.parametrize("change", ["values", "lengths", "replaced", "time reset", "other keys"])
def test_what_was_kept_of_another_state_is_not_used(tmp_path, counted, change):
    path, files = tmp_path / "parts.h5", {"catalog_dir": str(tmp_path / "kept")}
    write(path, [(3, 0, "plain")] * 6)
    before = values_of(opened(path, files=files))
    stat = os.stat(path)
    if change == "replaced":
        write(tmp_path / "other.h5", [(3, 0, "plain")] * 6)
        os.replace(tmp_path / "other.h5", path)
    elif change == "lengths":
        write(path, [(4, 0, "plain")] * 6)
    elif change != "other keys":
        with h5py.File(path, "r+") as file:
            file["data/p4/y"][0] = 77
    if change == "time reset":
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    counted.clear()
    if change == "other keys":
        dataset = H5LazyDataset(str(path), {"a": "y"}, segments="data/*", collate_fn="list", files=files)
        assert dataset.read_batch([5])["a"][0].tolist() == [50, 51, 52, 53]
        assert len(counted) >= 6
        return
    after = values_of(opened(path, files=files))
    assert len(counted) >= 18
    assert after == values_of(opened(path, files={"catalog_dir": None}))
    assert (after == before) == (change == "replaced")


def test_nothing_is_kept_of_small_files_or_if_it_is_turned_off_or_cannot_be_written(tmp_path, monkeypatch):
    write(tmp_path / "parts.h5", [(3, 0, "plain")] * 6)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    opened(tmp_path / "parts.h5")
    monkeypatch.setattr(kept_parts, "MIN_ARRAYS", 1)
    opened(tmp_path / "parts.h5", files={"catalog_dir": None})
    assert not (tmp_path / "cache").exists()
    Path(tmp_path / "file").touch()
    assert len(opened(tmp_path / "parts.h5", files={"catalog_dir": str(tmp_path / "file")})) == 6
    opened(tmp_path / "parts.h5")
    assert len(list((tmp_path / "cache" / "lightning_h5").iterdir())) == 1


@pytest.mark.parametrize("given", ["", 3, True])
def test_a_folder_that_is_none_is_refused(given):
    with pytest.raises(H5ValueError, match=r"catalog_dir=.*\. Pass (the path of a folder, 'auto'|text,) or None\."):
        FileOptions(catalog_dir=given)


def test_splits_and_ranks_see_the_same_from_what_was_kept(tmp_path, counted):
    write(tmp_path / "parts.h5", [(3 + number % 3, 2, "plain") for number in range(30)])
    found = []
    for _ in range(2):
        datamodule = LazyH5DataModule(
            str(tmp_path / "parts.h5"),
            x_key={"a": "x", "b": "y"},
            segments="data/*",
            window=[0, 2],
            split=0.2,
            files={"catalog_dir": str(tmp_path / "kept")},
            batch_size=4,
        )
        datamodule.setup("fit")
        batches = [batch["a"].tolist() for batch in datamodule.train_dataloader()]
        found.append((batches, [dataset.identity() for dataset in datamodule._datasets.values()]))
    assert found[0] == found[1]
    assert len(counted) <= 60 + 2 + 2 * 2  # and twice whether the file itself has such arrays
