"""Rows that are compared with digests are the rows, or an error: whatever byte of a file is another one."""

import os
import signal
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from arguments import nested, nested_files
from factories import Stored, random_values
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import (
    CombinedHDF5Dataset,
    H5CorruptError,
    H5Error,
    H5FileError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
    check_files,
)
from lightning_h5.hdf5 import digests_path

N = 40
ROWS = random_values("<f4", (N, 6, 5))
TABLE = np.zeros(N, dtype=[("a", "<i4"), ("b", "<f8", (2,))])
TABLE["a"], TABLE["b"] = np.arange(N), np.arange(2 * N).reshape(N, 2)

KINDS = {
    "contiguous": Stored(ROWS),
    "big-endian": Stored(ROWS.astype(">f4")),
    "gzip": Stored(ROWS, "chunked", (7, 6, 5), {"compression": "gzip"}),
    "parts of rows": Stored(ROWS, "chunked", (7, 4, 2), {"compression": "lzf", "shuffle": True}),
    "chunks of rows": Stored(ROWS, "chunked", (8, 6, 5)),
    "half written": Stored(ROWS, "chunked", (7, 6, 5), {"compression": "gzip"}, written=20),
    "never written": Stored(ROWS, written=0),
    "compact": Stored(ROWS[:, :2], "compact"),
    "virtual": Stored(ROWS, "virtual"),
    "table": Stored(TABLE),
    "table in chunks": Stored(TABLE, "chunked", (9,), {"compression": "gzip"}),
    "rows of no bytes": Stored(np.zeros((N, 0)), "chunked", (7, 1)),
    "scale-offset": Stored(np.arange(N), "chunked", (7,), {"scaleoffset": 0}),
}
KEY = {"table": "x/b", "table in chunks": "x/b"}


def digest(path):
    assert check_files(path, write_digests=True).digested


def datasets(path, key):
    """Each kind of dataset that compares rows with digests; a function gives all rows of it."""
    return {
        "lazy": lambda: all_rows(
            H5LazyDataset(
                path,
                key,
                files={"verify": "digest"},
            )
        ),
        "lazy, mapped": lambda: all_rows(
            H5LazyDataset(
                path,
                key,
                files={"verify": "digest", "mmap": True},
            )
        ),
        "cached": lambda: all_rows(
            RankMemCachedH5Dataset(
                path,
                key,
                x_dtype=None,
                files={"verify": "digest"},
            )
        ),
        "combined": lambda: all_rows(
            CombinedHDF5Dataset(
                path,
                [key],
                dtype=None,
                files={"verify": "digest"},
            )
        )[key],
    }


def all_rows(dataset):
    with closing(dataset):
        return dataset.read_batch(np.arange(len(dataset)))


def expected(path, key):
    with h5py.File(path) as file:
        array, _, member = key.partition("/")
        return file[array][member] if member else file[array][:]


@pytest.mark.parametrize("small", [False, True], ids=["", "held"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_files_are_read_as_without(make_h5, request, kind, small):
    if not small:
        request.getfixturevalue("nothing_held")
    path, key = make_h5(x=KINDS[kind]), KEY.get(kind, "x")
    digest(path)
    for read in datasets(path, key).values():
        np.testing.assert_array_equal(read().numpy(), expected(path, key))


@pytest.mark.wide
@given(data=st.data())
@settings(max_examples=examples(15))
@pytest.mark.parametrize("kind", KINDS)
def test_no_row_is_wrong_whatever_byte_of_a_file_is_another_one(make_h5, nothing_held, kind, data):
    path, key = make_h5(x=KINDS[kind]), KEY.get(kind, "x")
    digest(path)
    right = expected(path, key)
    where = data.draw(st.integers(0, os.path.getsize(path) - 1))
    with open(path, "r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ data.draw(st.integers(1, 255))]))
    assert fate_of(path, key, right) in (0, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGFPE)


WRONG = 17


def fate_of(path, key, right):
    """How a process ends that reads the rows by all datasets; some flips end it in the HDF5 library, by a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    fate = 1
    try:
        fate = WRONG if any(is_wrong(read, right) for read in datasets(path, key).values()) else 0
    finally:
        os._exit(fate)


def is_wrong(read, right):
    try:
        return not np.array_equal(read().numpy(), right, equal_nan=True)
    except H5Error:
        return False


def test_text_is_compared_too(make_h5):
    text = np.array([f"name {i}" for i in range(N)], dtype=object)
    path = make_h5(x=ROWS, y=Stored(text, dtype=h5py.string_dtype()))
    digest(path)
    assert (
        list(
            H5LazyDataset(
                path,
                "x",
                "y",
                files={"verify": "digest"},
            ).read_batch(range(N))[1]
        )
        == text.tolist()
    )
    place = Path(path).read_bytes().index(b"name 17")
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(b"gone")
    with pytest.raises(H5CorruptError, match=r"rows 0 to 39 of 'y' in .* differ from their digest"):
        H5LazyDataset(
            path,
            "x",
            "y",
            files={"verify": "digest"},
        ).read_batch([3])


def flip(path, array="x", chunk=3):
    """Changes a byte of an array's rows."""
    with h5py.File(path) as file:
        stored = file[array]
        at = stored.id.get_chunk_info(chunk).byte_offset if stored.chunks else stored.id.get_offset() + 100
    with open(path, "r+b") as file:
        file.seek(at + 5)
        byte = file.read(1)[0]
        file.seek(at + 5)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("kind", ["contiguous", "gzip", "chunks of rows"])
def test_the_error_names_rows_array_file_and_what_to_do(make_h5, nothing_held, kind):
    path = make_h5(x=KINDS[kind])
    digest(path)
    flip(path)
    for read in datasets(path, "x").values():
        with pytest.raises(H5CorruptError) as error:
            read()
        for part in (path, "'x'", "rows ", "differ from their digest", "Copy the file again", "--write-digests"):
            assert part in str(error.value)
    problem = check_files(path).errors[-1]
    assert (problem.kind, problem.array) == ("digest", "x")


def test_chunks_are_compared_when_they_are_read_and_not_before(make_h5, nothing_held):
    path = make_h5(x=KINDS["gzip"])
    digest(path)
    flip(path, chunk=3)
    dataset = H5LazyDataset(
        path,
        "x",
        files={"verify": "digest"},
    )
    assert dataset.counters.total()["bytes_read"] == 0
    np.testing.assert_array_equal(dataset.read_batch([0, 20, 39]).numpy(), ROWS[[0, 20, 39]])
    with pytest.raises(H5CorruptError, match="rows 21 to 27"):
        dataset.read_batch([22])


@pytest.mark.parametrize("kind", ["contiguous", "gzip", "parts of rows", "chunks of rows"])
@pytest.mark.parametrize("mode", ["contiguous", "interleave"])
def test_a_shard_is_compared_while_it_is_loaded_and_nothing_is_read_for_it(make_h5, kind, mode):
    path = make_h5(x=KINDS[kind])
    digest(path)

    def bytes_read(**how):
        dataset = RankMemCachedH5Dataset(path, "x", **nested_files(mode=mode, rank=0, world_size=1, **how))
        return dataset.counters.total()["bytes_read"]

    assert bytes_read(verify="digest") == bytes_read() > 0


def test_files_without_digests_are_refused_with_the_command_that_writes_them(make_h5):
    path = make_h5(x=ROWS, y=np.arange(N))
    with pytest.raises(H5FileError, match=r"digests.json'.*check --write-digests"):
        H5LazyDataset(
            path,
            "x",
            files={"verify": "digest"},
        )
    assert check_files(path, keys="x", write_digests=True).digested
    with pytest.raises(H5ValueError, match=r"no digests of 'y'.*check --write-digests"):
        H5LazyDataset(
            path,
            "x",
            "y",
            files={"verify": "digest"},
        )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2, "arrays": {}}', '{"version": 1, "arrays": {"/x": {}}}']
)
def test_digests_that_are_none_are_refused(make_h5, text):
    path = make_h5(x=ROWS)
    with open(digests_path(path), "w") as file:
        file.write(text)
    with pytest.raises(H5ValueError, match="is not a file of digests"):
        H5LazyDataset(
            path,
            "x",
            files={"verify": "digest"},
        )


def test_an_array_of_the_same_bytes_and_another_meaning_is_refused(make_h5):
    path = make_h5(x=ROWS)
    digest(path)
    other = make_h5(x=ROWS.view("<i4"))
    os.rename(digests_path(path), digests_path(other))
    with pytest.raises(H5CorruptError, match=r"does not match its digests.*<f4.*int32"):
        H5LazyDataset(
            other,
            "x",
            files={"verify": "digest"},
        )


@pytest.mark.parametrize("kind", ["contiguous", "scale-offset"])
def test_rows_are_compared_when_they_are_read_and_other_rows_are_read(make_h5, nothing_held, monkeypatch, kind):
    monkeypatch.setattr("lightning_h5.readers.digest_reader.RUN_BYTES", 240)
    path = make_h5(x=KINDS[kind])
    digest(path)
    right = expected(path, "x")
    flip(path, chunk=0)
    dataset = H5LazyDataset(
        path,
        "x",
        files={"verify": "digest"},
    )
    np.testing.assert_array_equal(dataset.read_batch([36, 39]).numpy(), right[[36, 39]])
    with pytest.raises(H5CorruptError, match="differ from their digest"):
        dataset.read_batch([0, 1, 36])


def test_a_run_goes_on_with_or_without_digests(make_h5):
    """They say whether rows are whole, and not which rows these are."""
    path = make_h5(x=KINDS["gzip"])
    digest(path)
    assert (
        H5LazyDataset(path, "x").identity()
        == H5LazyDataset(
            path,
            "x",
            files={"verify": "digest"},
        ).identity()
    )


# Integrity levels ---------------------------------------------------------------------------------------------


LEVELS = {
    0: Stored(ROWS),
    1: Stored(ROWS, "chunked", (7, 6, 5), {"compression": "gzip"}),
    2: Stored(ROWS, "chunked", (7, 6, 5), {"fletcher32": True}),
    3: Stored(ROWS, "chunked", (7, 6, 5), {"fletcher32": True, "compression": "gzip"}),
}


@pytest.mark.parametrize("wanted", range(5))
@pytest.mark.parametrize("level", LEVELS)
def test_files_below_the_wanted_level_are_refused(make_h5, level, wanted):
    path = make_h5(x=LEVELS[level], libver="latest")
    module = LazyH5DataModule(
        path,
        x_key="x",
        files={"min_integrity": wanted},
    )
    if level >= wanted:
        module.setup("fit")
        return
    with pytest.raises(H5ValueError, match=rf"min_integrity={wanted} was requested, but 'x' .* has level {level}:"):
        module.setup("fit")
    digest(path)
    LazyH5DataModule(
        path,
        x_key="x",
        files={"min_integrity": wanted, "verify": "digest"},
    ).setup("fit")


@pytest.mark.parametrize(("name", "value"), [("min_integrity", 5), ("min_integrity", -1), ("min_integrity", True)])
def test_levels_that_are_none_are_refused_at_once(name, value):
    with pytest.raises(H5ValueError, match=r"min_integrity=.* was given\. Pass 0, 1, 2, 3, 4"):
        LazyH5DataModule("none.h5", **nested(**{name: value}))


def test_other_ways_to_verify_are_refused_at_once():
    with pytest.raises(H5ValueError, match=r"verify='sha256' was given\. Pass 'digest'"):
        LazyH5DataModule(
            "none.h5",
            files={"verify": "sha256"},
        )


@pytest.mark.parametrize("module", [LazyH5DataModule, RankCachedH5DataModule])
def test_integrity_levels_are_logged_once_and_for_debugging_alone(module, make_h5, caplog):
    path = make_h5(x=LEVELS[1], y=np.arange(N), libver="latest")
    data = module(path, x_key="x", y_key="y", split=0.5)
    with caplog.at_level("DEBUG", "lightning_h5"):
        data.setup("fit")
        data.setup("validate")
    (record,) = [record for record in caplog.records if "integrity levels" in record.getMessage()]
    assert record.levelname == "DEBUG"
    assert "y: 0, x: 1 (level 0: most damage to values would go unnoticed)" in record.getMessage()
