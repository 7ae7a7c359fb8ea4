"""What is wrong with files is found and named; what is not wrong is left alone; nothing stops the check of the rest."""

import os
import pickle
import shutil
from contextlib import suppress
from functools import partial

import h5py
import numpy as np
import pytest
from factories import Stored, edit, random_values, run_forked
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import H5LazyDataset
from lightning_h5.errors import H5FileError, H5KeyError, H5ValueError
from lightning_h5.hdf5 import process_pool
from lightning_h5.tools.check import check_files, check_rows
from lightning_h5.tools.check.check_rows import ArrayDecoder

ROWS, STEP = 40, 5
VALUES = np.resize(np.arange(11, dtype="i4"), (ROWS, 50))
GZIP = {"compression": "gzip"}


def found(report):
    """Severity, kind and array of all problems."""
    return [(p.severity, p.kind, p.array) for p in (*report.errors, *report.warnings)]


def chunk_at(path, number, key="x"):
    with h5py.File(path) as file:
        return file[key].id.get_chunk_info(number)


# Files that are right ---------------------------------------------------------------------------------------

FILTERS = [(), ("shuffle",), ("gzip",), ("shuffle", "lzf"), ("shuffle", "gzip", "fletcher32"), ("fletcher32", "gzip")]
STORAGES = ["contiguous", "chunked", "compact", "virtual"]


@given(data=st.data())
@settings(max_examples=examples(60))
def test_a_file_as_it_should_be_has_no_problem(make_h5, data):
    shape = (data.draw(st.integers(1, 30)), *data.draw(st.lists(st.integers(1, 5), max_size=2)))
    dtype = data.draw(st.sampled_from(["f2", "f4", ">f8", "i1", ">u2", "i8", "?", "c8", "S3"]))
    storage = data.draw(st.sampled_from(STORAGES))
    filters = data.draw(st.sampled_from(FILTERS))
    stored = Stored(np.zeros(shape, dtype) if dtype == "S3" else random_values(dtype, shape), storage)
    if storage == "chunked":
        stored.chunks = tuple(data.draw(st.integers(1, size)) for size in shape)
        stored.filters = filters
    path = make_h5(
        x=stored, userblock=data.draw(st.sampled_from([0, 512])), libver=data.draw(st.sampled_from([None, "latest"]))
    )
    report = check_files(path)
    assert found(report) == []
    assert report.files == (path,)
    assert report.n_arrays == (1 if storage != "virtual" else 2 + (len(stored.values) > 1))
    assert report.n_bytes == stored.values.nbytes or storage in ("virtual",) or dtype == "S3"
    process_pool().close()


def test_tables_text_lists_and_references_are_read_as_well(make_h5):
    table = np.zeros(50, dtype=[("a", "f4"), ("b", ">i2", (3,))])
    path = make_h5(t=Stored(table, "chunked", (7,), GZIP))
    with h5py.File(path, "a") as file:
        file.create_dataset("s", data=["ä", "b"] * 25, dtype=h5py.string_dtype())
        lists = file.create_dataset("l", (50,), h5py.vlen_dtype("i4"))
        lists[0] = [1, 2]
        references = file.create_dataset("r", (50,), h5py.ref_dtype)
        references[:] = file["t"].ref
        file["scalar"] = 3
        file["nothing"] = h5py.Empty("f4")
    report = check_files(path)
    assert found(report) == [("warning", "no field", "r")]  # lists of numbers are samples of several lengths
    assert report.n_arrays == 4
    assert report.n_bytes == table.nbytes + 3 * 50 * 8


def test_text_in_an_older_encoding_is_a_warning(make_h5):
    """It is no damage: no checksum and no reader of numbers is concerned."""
    report = check_files(make_h5(x=np.arange(6.0), operator=np.array(["J\u00f6rg".encode("latin-1"), b"Ada"])))
    assert found(report) == [("warning", "text", "operator")]
    assert "is not UTF-8" in report.warnings[0].text


def test_many_files_that_are_alike_have_no_problem(make_h5):
    paths = [make_h5(x=VALUES[: 20 + n], y=np.arange(20 + n)) for n in range(5)]
    report = check_files(paths)
    assert found(report) == []
    assert report.files == tuple(paths)
    assert (report.n_arrays, report.unchecked) == (10, ("x", "y"))


# Files that do not open -------------------------------------------------------------------------------------


def test_files_that_do_not_open_are_named_and_the_others_checked(make_h5, tmp_path):
    good = make_h5(x=Stored(VALUES, "chunked", (STEP, 50), GZIP), name="good.h5")
    (tmp_path / "empty.h5").touch()
    (tmp_path / "junk.h5").write_text("a,b,c\n")
    os.mkfifo(tmp_path / "pipe.h5")
    shutil.copy(good, tmp_path / "short.h5")
    os.truncate(tmp_path / "short.h5", 1000)
    report = check_files(tmp_path)
    texts = {os.path.basename(problem.file): problem.text for problem in report.errors}
    assert found(report) == [("error", "open", None)] * 4
    assert "is not an HDF5 file: it has 0 bytes" in texts["empty.h5"]
    assert "is not an HDF5 file: it has 6 bytes" in texts["junk.h5"]
    assert "is not a regular file" in texts["pipe.h5"]
    assert "is truncated" in texts["short.h5"]
    assert (len(report.files), report.n_bytes) == (5, VALUES.nbytes)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(make_h5):
    path = make_h5(x=VALUES)
    os.chmod(path, 0)
    assert found(check_files(path)) == [("error", "open", None)]


def test_a_file_that_is_marked_as_open_for_writing_is_named(make_h5):
    path = make_h5(x=VALUES, libver="latest")

    def crash():
        file = h5py.File(path, "a", libver="latest")
        file["y"] = 3
        file.flush()
        os._exit(0)

    assert run_forked(crash) == 0
    (problem,) = check_files(path).errors
    assert problem.kind == "open"
    assert "marked as being written to" in problem.text
    assert "h5clear -s" in problem.text


@pytest.mark.parametrize("path", ["none.h5", "none*.h5", "."])
def test_a_path_that_matches_nothing_is_raised(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(H5FileError):
        check_files(path)


def test_arguments_that_make_no_sense_are_refused(make_h5):
    with pytest.raises(H5ValueError, match="decode=False"):
        check_files(make_h5(x=VALUES), decode=False, write_digests=True)
    with pytest.raises(H5ValueError, match=r"paths=\[\] names no file"):
        check_files([])


# Chunks -----------------------------------------------------------------------------------------------------

DECODED = [("gzip",), ("lzf",), ("shuffle", "gzip"), ("fletcher32",), ("gzip", "fletcher32")]


@pytest.mark.parametrize("chunks", [(STEP, 50), (STEP, 20)], ids=["whole rows", "split rows"])
@pytest.mark.parametrize("filters", DECODED, ids=" + ".join)
def test_each_chunk_that_does_not_decode_is_named(make_h5, filters, chunks):
    path = make_h5(a=VALUES, x=Stored(VALUES, "chunked", chunks, filters=filters), z=Stored(VALUES, "chunked", chunks))
    per_row = -(-50 // chunks[1])
    for row_of_chunks in (2, 6):
        place = chunk_at(path, row_of_chunks * per_row)
        edit(path, place.byte_offset + 3, bytes([255] * min(20, place.size - 3)))
    report = check_files(path)
    assert found(report) == [("error", "decode", "x")] * 2
    for problem, row in zip(report.errors, (10, 30), strict=True):
        assert f"(rows {row} to {row + 4}) of 'x' in {path!r}" in problem.text
    assert report.n_bytes == 3 * VALUES.nbytes - 2 * STEP * 200
    assert found(check_files(path, decode=False)) == []


def test_a_chunk_of_zeros_does_not_decode(make_h5):
    path = make_h5(x=Stored(VALUES, "chunked", (STEP, 50), GZIP))
    place = chunk_at(path, 3)
    edit(path, place.byte_offset, bytes(place.size))
    assert found(check_files(path)) == [("error", "decode", "x")]


def test_chunks_that_the_library_decodes_are_checked_too(make_h5):
    path = make_h5(x=Stored(VALUES, "chunked", (STEP, 50), {"compression": "szip", "fletcher32": True}))
    edit(path, chunk_at(path, 3).byte_offset + 5)
    (problem,) = check_files(path).errors
    assert (problem.kind, problem.array) == ("decode", "x")
    assert "rows 15 to 19" in problem.text


def test_many_damaged_chunks_are_counted(make_h5):
    path = make_h5(x=Stored(VALUES, "chunked", (1, 50), GZIP))
    for number in range(ROWS):
        edit(path, chunk_at(path, number).byte_offset)
    report = check_files(path)
    assert found(report) == [("error", "decode", "x")] * (check_rows.MAX_PROBLEMS + 1)
    assert report.errors[-1].text == "30 more pieces of it cannot be read"


def test_chunks_behind_the_end_of_the_file_are_named_without_reading(make_h5):
    path = make_h5(x=Stored(VALUES, "chunked", (STEP, 50), GZIP), y=VALUES)
    with h5py.File(path) as file:
        end = file["y"].id.get_offset()
    real = os.path.getsize
    for size, kinds in ((end + 10, [("error", "place", "y")]), (chunk_at(path, 3).byte_offset + 1, None)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os.path, "getsize", lambda name, n=size: n if name == path else real(name))
            report = check_files(path, decode=False)
            assert found(report) == kinds or kinds is None
            assert all(problem.kind == "place" for problem in report.errors)
            assert "which is the end of the file" in report.errors[0].text


def write_index(path, number, offset):
    """Makes the index of an array say that a chunk lies elsewhere."""
    place = chunk_at(path, number)
    with open(path, "rb") as file:
        content = file.read()
    old = int(place.byte_offset).to_bytes(8, "little")
    assert content.count(old) == 1
    edit(path, content.index(old), int(offset).to_bytes(8, "little"))


def test_an_index_that_names_the_same_bytes_twice_is_found(make_h5):
    path = make_h5(x=Stored(VALUES, "chunked", (STEP, 50), GZIP), y=Stored(VALUES, "chunked", (STEP, 50), GZIP))
    write_index(path, 3, chunk_at(path, 5).byte_offset)
    report = check_files(path, decode=False)
    assert found(report) == [("error", "place", "x")]
    assert "two chunks of 'x' have the same bytes of the file" in report.errors[0].text
    path = make_h5(x=Stored(VALUES, "chunked", (STEP, 50), GZIP), y=Stored(VALUES, "chunked", (STEP, 50), GZIP))
    write_index(path, 3, chunk_at(path, 5, "y").byte_offset)
    assert [(p.kind, p.array) for p in check_files(path, decode=False).errors] in ([("place", "y")], [("place", "x")])


def test_an_index_that_leads_behind_the_file_is_found(make_h5):
    path = make_h5(x=Stored(VALUES, "chunked", (STEP, 50), GZIP))
    write_index(path, 3, os.path.getsize(path) + 1000)
    for decode in (False, True):
        (problem,) = check_files(path, decode=decode).errors
        assert (problem.kind, problem.array) == ("place", "x")
        assert "chunk 3 (rows 15 to 19) should begin at byte" in problem.text


def test_an_index_with_a_chunk_outside_of_the_shape_is_found(make_h5):
    path = make_h5(x=Stored(VALUES, "chunked", (STEP, 50), GZIP))
    with open(path, "rb") as file:
        content = file.read()
    tree = content.index(b"TREE", content.index(b"TREE") + 4)  # the second one: the first is that of the group
    corner = content.index((35).to_bytes(8, "little") + bytes(16), tree)
    edit(path, corner, (5000).to_bytes(8, "little"))
    (problem,) = check_files(path).errors
    assert (problem.kind, problem.array) == ("chunk index", "x")


def test_a_missing_filter_is_named_with_the_cure(make_h5, monkeypatch):
    path = make_h5(x=Stored(VALUES, "chunked", (STEP, 50), {"compression": "lzf"}), y=VALUES)
    real = h5py.h5z.filter_avail
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: number != h5py.h5z.FILTER_LZF and real(number))
    monkeypatch.setitem(__import__("sys").modules, "hdf5plugin", None)
    (problem,) = check_files(path).errors
    assert (problem.kind, problem.array) == ("filter", "x")
    assert "pip install" in problem.text


@pytest.mark.parametrize("chunks", [(STEP, 50), (STEP, 20)], ids=["whole rows", "split rows"])
def test_rows_that_were_never_written_are_a_warning(make_h5, chunks):
    stored = Stored(VALUES, "chunked", chunks, {"fillvalue": 7, **GZIP}, written=13)
    path = make_h5(x=stored)
    with h5py.File(path, "a") as file:
        file.create_dataset("y", (9,), "f4")
    report = check_files(path)
    assert found(report) == [("warning", "unwritten", "x"), ("warning", "unwritten", "y")]
    part = "parts of " * (chunks[1] < 50)
    assert f"{part}25 of 40 rows read as the fill value 7" in report.warnings[0].text


def test_a_truncated_contiguous_array_is_found_once(make_h5):
    path = make_h5(x=np.arange(100_000), libver="latest")
    with h5py.File(path) as file:
        place = file["x"].id.get_offset()
    real = os.path.getsize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os.path, "getsize", lambda name: place + 999 if name == path else real(name))
        assert found(check_files(path)) == [("error", "place", "x")]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(make_h5, monkeypatch):
    path = make_h5(x=np.arange(100_000))
    real = ArrayDecoder.tasks

    def tasks(self):
        made = list(real(self))
        os.truncate(path, 10_000)
        return iter(made)

    monkeypatch.setattr(ArrayDecoder, "tasks", tasks)
    kinds = {problem.kind for problem in check_files(path).errors}
    assert kinds == {"decode", "changed"}


def test_a_file_that_vanishes_is_named_once(make_h5, monkeypatch):
    path = make_h5(x=Stored(VALUES, "chunked", (1, 50), GZIP))
    real = ArrayDecoder.tasks

    def tasks(self):
        made = list(real(self))
        os.unlink(path)
        return iter(made)

    monkeypatch.setattr(ArrayDecoder, "tasks", tasks)
    assert [problem.kind for problem in check_files(path).errors] == ["decode", "changed"]


# Files that do not go together ------------------------------------------------------------------------------


def test_a_file_whose_arrays_are_others_is_named_against_the_majority(make_h5):
    usual = {"x": VALUES.astype("f4"), "y": np.arange(ROWS)}
    paths = [make_h5(x=usual["x"] + n, y=usual["y"]) for n in range(4)]
    other = make_h5(x=usual["x"].astype("f8"), y=usual["y"].reshape(-1, 1))
    without = make_h5(x=usual["x"] - 1, more=usual["y"])
    report = check_files([*paths, other, without])
    assert found(report) == [
        ("error", "schema", "x"),
        ("error", "schema", "y"),
        ("error", "missing", "y"),
        ("warning", "extra", "more"),
    ]
    assert report.errors[0].text == "5 of 6 files have it as float32 (50,); here it is float64 (50,)"
    assert [problem.file for problem in report.errors] == [other, other, without]
    assert report.errors[2].text == "5 of 6 files have it, but this one does not"


def test_a_file_whose_arrays_have_different_lengths_is_named(make_h5):
    good = [make_h5(x=VALUES + n, y=np.arange(ROWS), names=np.full(3, b"a")) for n in range(2)]
    bad = make_h5(x=VALUES - 1, y=np.arange(ROWS - 1), names=np.full(3, b"a"))
    for paths in ([*good, bad], [bad, *good], [good[0], bad], [bad, good[0]]):
        (problem,) = check_files(paths).errors
        assert (problem.kind, problem.file) == ("rows", bad)
        assert "it has 'x' 40, 'y' 39 rows" in problem.text


def test_a_file_alone_whose_arrays_nearly_have_the_same_length_is_a_warning(make_h5):
    report = check_files(make_h5(x=np.arange(1000), y=np.arange(999), train=np.arange(600), test=np.arange(400)))
    assert found(report) == [("warning", "rows", "y")]
    assert "it has 999 rows, 'x' has 1,000" in report.warnings[0].text


def test_the_same_data_twice_is_a_warning(make_h5, tmp_path):
    path = make_h5(x=VALUES, name="a.h5")
    shutil.copy(path, tmp_path / "copy.h5")
    report = check_files([path, tmp_path / "copy.h5"])
    assert found(report) == [("warning", "duplicate", None)]
    assert report.warnings[0].text == (
        f"its size, arrays and samples of its bytes equal those of {path!r}: if it is a copy, training would use its "
        "rows twice"
    )


def test_a_file_that_is_named_twice_is_refused_as_in_training(make_h5, tmp_path):
    path = make_h5(x=VALUES, name="a.h5")
    os.symlink(path, tmp_path / "link.h5")
    os.link(path, tmp_path / "hard.h5")
    for other in (path, tmp_path / "link.h5", tmp_path / "hard.h5"):
        with pytest.raises(H5ValueError, match=r"paths names .* more than once .* Name each file once"):
            check_files([path, other])


def test_text_of_different_lengths_is_alike(make_h5):
    paths = [make_h5(t=np.array(["ab"] * n, f"S{n}")) for n in (2, 5)]
    with h5py.File(paths[0], "a") as file:
        del file["t"]
        file.create_dataset("t", data=["a", "b"], dtype=h5py.string_dtype())
    assert found(check_files(paths)) == []


# Links ------------------------------------------------------------------------------------------------------


def test_links_that_lead_nowhere_or_out_of_the_file_are_warnings(make_h5, tmp_path):
    path = make_h5(**{"g/x": VALUES})
    other = make_h5(x=VALUES, name="other.h5")
    with h5py.File(path, "a") as file:
        file["soft"] = h5py.SoftLink("/g/x")
        file["to group"] = h5py.SoftLink("g")
        file["dead"] = h5py.SoftLink("/g/y")
        file["circle"] = h5py.SoftLink("/circle")
        file["hard"] = file["g/x"]
        file["out"] = h5py.ExternalLink("other.h5", "/x")
        file["lost"] = h5py.ExternalLink("gone.h5", "/x")
        layout = h5py.VirtualLayout((ROWS, 50), "i4")
        layout[:] = h5py.VirtualSource("gone.h5", "x", (ROWS, 50))
        file.create_virtual_dataset("virtual lost", layout)
        layout = h5py.VirtualLayout((ROWS, 50), "i4")
        layout[:] = h5py.VirtualSource("other.h5", "x", (ROWS, 50))
        file.create_virtual_dataset("virtual out", layout)
        file.create_dataset("external", (10,), "u1", external=[("gone.bin", 0, 10)])
    before = os.stat(other).st_atime_ns
    report = check_files(path)
    texts = {problem.array: problem.text for problem in report.warnings}
    assert not report.errors
    assert set(texts) == {"dead", "circle", "out", "lost", "virtual lost", "virtual out", "external"}
    assert "leads to '/g/y', which does not exist" in texts["dead"]
    assert "'other.h5': it was not followed" in texts["out"]
    assert texts["lost"].endswith("'gone.h5': which does not exist")
    for lost in ("virtual lost", "external"):
        assert "is missing: HDF5 itself would read them as fill values" in texts[lost]
    assert "its rows lie in 'other.h5', and were not read" in texts["virtual out"]
    assert os.stat(other).st_atime_ns == before
    assert report.n_bytes == VALUES.nbytes


# Which arrays -----------------------------------------------------------------------------------------------


def test_keys_choose_the_arrays(make_h5):
    table = np.zeros(ROWS, dtype=[("a", "f4"), ("b", "i2")])
    path = make_h5(x=Stored(VALUES, "chunked", (STEP, 50), GZIP), y=VALUES, t=table)
    edit(path, chunk_at(path, 3).byte_offset)
    assert found(check_files(path, keys="y")) == []
    assert found(check_files(path, keys=["/x", "t/a"])) == [("error", "decode", "x")]
    assert check_files(path, keys=["y", "t/a"]).n_arrays == 2
    with pytest.raises(H5KeyError, match="Did you mean 'y'"):
        check_files(path, keys="Y")


def test_a_key_that_some_file_has_is_missing_in_the_others(make_h5):
    paths = [make_h5(x=VALUES, y=VALUES), make_h5(x=VALUES)]
    report = check_files(paths, keys=["y"])
    assert found(report) == [("error", "missing", "y")]
    assert report.errors[0].file == paths[1]


# Layouts that cost ------------------------------------------------------------------------------------------


def test_layouts_that_make_training_slow_are_a_warning_for_all_files_at_once(make_h5, monkeypatch):
    monkeypatch.setattr("lightning_h5.tools.check.check_file.SLOW_BYTES", 100)
    monkeypatch.setattr("lightning_h5.tools.check.check_file.LARGE_BLOCK", 1000)
    monkeypatch.setattr("lightning_h5.tools.check.check_file.MANY_CHUNKS", 5)

    def make(seed):
        values = VALUES + seed
        return make_h5(
            split=Stored(values, "chunked", (1, 5), GZIP),
            large=Stored(values, "chunked", (20, 50), GZIP),
            fine=Stored(values, "chunked", (2, 50), GZIP),
            szip=Stored(values, "chunked", (2, 50), {"scaleoffset": 0}),
        )

    report = check_files([make(1), make(2)])
    texts = {problem.array: problem.text for problem in report.warnings}
    assert not report.errors
    assert set(texts) == {"split", "large", "szip"}
    assert texts["split"].startswith("a row spans 10 chunks")
    assert texts["large"].startswith("20 rows share chunks of")
    assert "only the HDF5 library can read it" in texts["szip"]
    assert all("(the same in 1 more files)" in text for text in texts.values())
    assert len(report.warnings) == 3


# Damage of any kind -----------------------------------------------------------------------------------------


@pytest.mark.wide
@given(data=st.data())
@settings(max_examples=examples(40))
def test_whatever_bytes_are_changed_the_check_ends_with_a_report(make_h5, data):
    """In a process of its own: on some damaged metadata the HDF5 library crashes, and then it does so without us."""
    libver = data.draw(st.sampled_from([None, "latest"]))
    path = make_h5(
        {
            "g/a": Stored(VALUES, "chunked", (STEP, 50), {"shuffle": True, **GZIP}),
            "b": Stored(VALUES, "chunked", (STEP, 20), {"fletcher32": True}),
            "c": VALUES,
            "t": np.array(["abc", "de"] * 20, "S4"),
        },
        libver=libver,
    )
    size = os.path.getsize(path)
    for part, content in data.draw(
        st.lists(st.tuples(st.floats(0, 0.9999), st.binary(min_size=1, max_size=16)), min_size=1, max_size=3)
    ):
        edit(path, int(part * size), content)
    if data.draw(st.integers(0, 9)) == 0:
        os.truncate(path, data.draw(st.integers(0, size)))
    code = run_forked(partial(check_and_compare, path, libver is not None))
    assert code == 0 or (code < 0 and run_forked(partial(read_with_h5py, path)) == code)
    os.unlink(path)


def read_with_h5py(path):
    """Looks at everything in a file."""
    with suppress(Exception), h5py.File(path) as file:
        file.visititems(lambda name, item: None)
        for key in ("g/a", "b", "c", "t"):
            with suppress(Exception):
                file[key][()]


def check_and_compare(path, is_checked):
    """What is wrong is said of this file; where nothing is, and all bytes have a checksum, rows are as they were."""
    report = check_files(path)
    assert all(problem.file == path and problem.text for problem in (*report.errors, *report.warnings))
    if is_checked and not report.errors:
        assert report.n_arrays == 4
        for key in ("g/a", "b"):
            dataset = H5LazyDataset(path, key)
            assert np.array_equal(dataset.read_batch(np.arange(ROWS)), VALUES)


@pytest.mark.parametrize("options", [{}, {"sandbox": True}])
def test_numbers_that_mean_something_else_are_reported(options, tmp_path):
    for at, (units, names) in enumerate([("K", ["a", "b"]), ("K", ["a", "b"]), ("degC", ["b", "a"])]):
        with h5py.File(tmp_path / f"{at}.h5", "w") as file:
            file["t"] = np.arange(4.0) + at
            file["t"].attrs["units"] = units
            file["df/block0_values"] = np.zeros((4, 2)) + at
            file["df/block0_items"] = np.array(names, "S1")
            file["df/table"] = np.zeros(4, [("values_block_0", "f8", (2,))])
            file["df/table"].attrs["values_block_0_kind"] = np.bytes_(pickle.dumps(names, 0))
            dtype = h5py.enum_dtype({name: code for code, name in enumerate(names)}, "i1")
            file.create_dataset("y", data=[0, 1, 1, 0], dtype=dtype)
            file["time"] = np.arange(4.0)
            file["time"].attrs["units"] = f"days since 200{at}-01-01"
    report = check_files(str(tmp_path), **options)
    errors = [(os.path.basename(problem.file), problem.array, problem.kind) for problem in report.errors]
    assert errors == [("2.h5", name, "meaning") for name in ("df/block0_values", "df/table/values_block_0", "t", "y")]
    texts = " ".join(problem.text for problem in report.errors)
    for part in ("the units 'K'", "'df/block0_items'", "{0: 'b', 1: 'a'}"):
        assert part in texts
    assert not [problem for problem in report.warnings if problem.kind == "meaning"]
