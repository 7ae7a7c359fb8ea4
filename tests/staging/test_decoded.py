"""Decoded chunks on a local disk: the same values, decoded once, whatever happens to the disk or the file."""

import ctypes
import dataclasses
import errno
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from factories import Stored, run_forked

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5DataChangedError,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    check_files,
)
from lightning_h5.datasets import file_dataset
from lightning_h5.hdf5 import ChangeGuard, handles, process_pool
from lightning_h5.options import StagingOptions
from lightning_h5.readers import kept_chunks, kept_rows
from lightning_h5.samples import row_table
from lightning_h5.staging import DecodedArray, DecodedMirror, checksums, decoded, folder, mirror_file

ROWS, WIDTH = 240, 500
rng = np.random.default_rng(0)
X = rng.integers(0, 9, (ROWS, WIDTH), dtype=np.int32)
GZIP = {"compression": "gzip", "shuffle": True}


@pytest.fixture(autouse=True)
def _small_arrays_are_kept(monkeypatch):
    monkeypatch.setattr(kept_chunks, "MIN_BYTES", 0)
    monkeypatch.setattr(kept_rows, "LEAST_BYTES", 1 << 60)
    for module in (row_table, file_dataset):
        monkeypatch.setattr(module, "HELD_BYTES", 0)  # they are read in each epoch


@pytest.fixture(scope="session")
def compiled_loops():
    return checksums._compile_loops()


@pytest.fixture(params=["by chunks", "by rows", "by rows in compiled code"])
def either_way(request, monkeypatch, compiled_loops):
    """Chunks are read as a whole, or rows by position, as large ones are."""
    is_compiled = request.param == "by rows in compiled code"
    monkeypatch.setattr(checksums, "_loops", [compiled_loops if is_compiled else None])
    if request.param != "by chunks":
        monkeypatch.setattr(kept_rows, "LEAST_BYTES", 0)


@pytest.fixture
def path(make_h5):
    return make_h5(x=Stored(X, "chunked", (8, WIDTH), GZIP), y=np.arange(ROWS))


@pytest.fixture
def staging(tmp_path):
    return {"dir": str(tmp_path / "local"), "decoded": True}


def small_cache(path, staging, **options):
    """A data module with memory for a few chunks, so that each epoch reads all of them."""
    options = {"x_key": "x", "y_key": "y", "batch_size": 20, "files": {"cache_bytes": 9 * 8 * WIDTH * 4}} | options
    return LazyH5DataModule(path, **options, staging=staging)


def epochs(datamodule, n=2):
    """The batches of epochs, and the chunks that each decoded."""
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    for epoch in range(n):
        loader.set_epoch(epoch)
        before = loader.counters.total()["chunks_decoded"]
        yield list(loader), loader.counters.total()["chunks_decoded"] - before


def assert_rows(batches, values=X):
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(len(values)))
    for x, y in batches:
        assert np.array_equal(x.numpy(), values[y.numpy()])


def mirrors(staging):
    return sorted(Path(staging["dir"]).rglob("*.mirror"))


def marked(path, n_chunks, n_bytes):
    """How many chunks a mirror's file has."""
    octets = Path(path).read_bytes()
    at = mirror_file.marks_at(n_bytes)
    return int((np.frombuffer(octets[at : at + 2 * n_chunks], "<u2") & 1).sum())


# The gain -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("shuffle", [True, "chunks", "global", False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_chunk_is_decoded_once(path, staging, shuffle, num_workers):
    (first, decoded_first), (second, decoded_second) = epochs(
        small_cache(path, staging, shuffle=shuffle, num_workers=num_workers)
    )
    assert_rows(first)
    assert_rows(second)
    assert decoded_first >= ROWS // 8
    assert decoded_second == 0
    assert shuffle is False or not torch.equal(first[0][1], second[0][1])


def test_the_cost_of_reading_says_once_all_chunks_are_kept_and_read_by_position(path, staging, monkeypatch):
    datamodule = small_cache(path, staging)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    monkeypatch.setattr(kept_rows, "LEAST_BYTES", 0)
    assert not loader.dataset.cost.is_kept
    assert_rows(list(loader))
    assert loader.dataset.cost.is_kept
    monkeypatch.setattr(kept_rows, "LEAST_BYTES", 1 << 60)
    assert not loader.dataset.cost.is_kept


def test_rows_of_a_sample_that_are_long_together_are_read_by_position(tmp_path, staging, monkeypatch):
    offsets = np.append(0, np.full(60, 50).cumsum())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("x")
        group.create_dataset("data", data=rng.random(3000, dtype="f4"), chunks=(640,), **GZIP)
        group.create_dataset("indices", data=np.tile(np.arange(50), 60), chunks=(640,), **GZIP)
        group["indptr"] = offsets
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (60, 50)})
    datamodule = LazyH5DataModule(tmp_path / "a.h5", x_key="x", files={"cache_bytes": 1 << 12}, staging=staging)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    list(loader)
    for n_bytes, is_kept in ((200, True), (201, False), (100, True)):
        monkeypatch.setattr(kept_rows, "LEAST_BYTES", n_bytes)
        assert loader.dataset.cost.is_kept == is_kept


@pytest.mark.usefixtures("either_way")
def test_a_chunk_that_is_lost_after_all_were_kept_is_decoded_and_kept_again(path, staging):
    datamodule = small_cache(path, staging, prefetch_factor=1)  # some of it is left to be read
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    n_decoded = []
    for epoch in range(5):
        loader.set_epoch(epoch)
        before, batches = loader.counters.total()["chunks_decoded"], []
        for batch in loader:
            if not batches and epoch == 2:
                assert loader.dataset.cost.is_kept == (kept_rows.LEAST_BYTES == 0)
                for entry in list(process_pool()._entries.values()):
                    if isinstance(entry.handle, handles.DecodedFile):
                        entry.handle.mirror._forget(np.arange(ROWS // 8))
            batches.append(batch)
        assert_rows(batches)
        n_decoded.append(loader.counters.total()["chunks_decoded"] - before)
    assert n_decoded[0] == ROWS // 8
    assert [n > 0 for n in n_decoded[1:3]] == [False, True]
    assert n_decoded[4] == 0


def test_orders_are_those_of_a_run_without(path, staging):
    with_it = [batches for batches, _ in epochs(small_cache(path, staging, seed=3))]
    without = [batches for batches, _ in epochs(small_cache(path, None, seed=3))]
    for found, expected in zip(with_it, without, strict=True):
        assert all(torch.equal(a, b) for pair in zip(found, expected, strict=True) for a, b in zip(*pair, strict=True))


def test_another_process_decodes_nothing(path, staging):
    def other_job():
        ((batches, n_decoded),) = epochs(small_cache(path, staging), 1)
        assert_rows(batches)
        assert n_decoded == 0

    assert [n for _, n in epochs(small_cache(path, staging), 1)] == [ROWS // 8]
    assert run_forked(other_job) == 0


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("kind", ["windows", "patches", "sparse rows", "rank cached", "combined", "packed", "table"])
def test_every_kind_of_sample_is_the_same_and_decoded_once(tmp_path, staging, kind):
    module, options = LazyH5DataModule, {"x_key": "x"}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if kind == "sparse rows":
            group = file.create_group("x")
            counts = rng.integers(0, 9, 300)
            n = int(counts.sum())
            group.create_dataset("data", data=np.arange(n, dtype="f4"), chunks=(64,), **GZIP)
            columns = [np.sort(rng.choice(50, count, replace=False)) for count in counts]
            group.create_dataset("indices", data=np.concatenate(columns), chunks=(64,), **GZIP)
            group["indptr"] = np.append(0, counts.cumsum())
            group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (300, 50)})
        elif kind == "patches":
            volume = rng.integers(0, 9, (20, 20, 20), dtype="i4")
            file.create_dataset("x", data=volume, chunks=(8, 8, 8), **GZIP)
            options["patch"] = {"shape": [8, 8, 8], "stride": [4, 4, 4]}
        elif kind == "table":
            table = np.zeros(300, [("a", "i4", (3,)), ("b", ">f4")])
            table["a"], table["b"] = rng.integers(0, 9, (300, 3)), rng.random(300)
            file.create_dataset("t", data=table, chunks=(16,), **GZIP)
            options = {"x_key": "t/a", "y_key": "t/b"}
        else:
            values = rng.integers(0, 9, (300, 40), dtype="i2")
            array = file.create_dataset("x", data=values, chunks=(16, 10), **GZIP)
            if kind == "packed":
                array.attrs.update({"scale_factor": 0.5, "add_offset": 2.0})
    options |= {"windows": {"window": {"length": 5}}, "packed": {"decode": {"x": "cf"}}}.get(kind, {})
    if kind == "rank cached":
        module = RankCachedH5DataModule
    elif kind == "combined":
        module = CombinedHDF5DataModule
    options |= {"batch_size": 16, "files": {"cache_bytes": 4096}}
    if module is RankCachedH5DataModule:
        del options["files"]
    expected = [batches for batches, _ in epochs(module(tmp_path / "a.h5", **options))]
    counts = []
    for _ in range(2):
        found = list(epochs(module(tmp_path / "a.h5", **options, staging=staging)))
        for (batches, _), wanted in zip(found, expected, strict=True):
            assert len(batches) == len(wanted)
            for batch, other in zip(batches, wanted, strict=True):
                assert values_of(batch) == values_of(other)
        counts.append([n for _, n in found])
    assert counts[1] == [0, 0]


def values_of(batch):
    parts = batch.values() if isinstance(batch, dict) else [batch] if isinstance(batch, torch.Tensor) else batch
    return [part.to_dense().tolist() if isinstance(part, torch.Tensor) else part for part in parts]


def test_half_of_the_space_keeps_half_of_the_chunks(path, staging):
    staging["max_bytes"] = X.nbytes // 2 + (128 << 10)
    n_decoded = [n for batches, n in epochs(small_cache(path, staging), 4) if assert_rows(batches) is None]
    assert all(n_decoded[0] / 4 < n < n_decoded[0] * 3 / 4 for n in n_decoded[1:])
    assert sum(os.stat(each).st_blocks * 512 for each in Path(staging["dir"]).rglob("*")) <= staging["max_bytes"]


@pytest.mark.parametrize("leaves_tables", [False, True])
@pytest.mark.parametrize("chunk_bytes", [16_384, 16_000, 5_000])
def test_a_full_folder_has_what_fits_into_its_limit(tmp_path, monkeypatch, chunk_bytes, leaves_tables):
    monkeypatch.setattr(folder, "TABLE_BYTES", 0)
    limit, n_chunks = 4 << 20, (8 << 20) // chunk_bytes
    memory = rng.integers(0, 256, 64 * chunk_bytes, dtype=np.uint8)
    array = DecodedArray(StagingOptions(dir=tmp_path), "an array", n_chunks, chunk_bytes, 4096)
    with closing(folder.MirrorFolder(str(tmp_path), limit)) as mirrors_of_job:
        mirror = DecodedMirror(mirrors_of_job, "key", array, leaves_tables=leaves_tables)
        for every in (64, 1):  # chunks of a put
            order = rng.permutation(n_chunks)
            for at in range(0, n_chunks, every):
                mirror._no_room_until = 0.0
                chunks = np.sort(order[at : at + every])
                mirror.put(chunks, memory, np.arange(len(chunks)) * chunk_bytes)
        assert mirrors_of_job.used() <= limit
        overhead = limit // 128 + leaves_tables * limit // 32
        most = limit - overhead
        assert most * 0.95 - (64 << 10) - 2 * 4096 - chunk_bytes < mirrors_of_job.used() <= most
        mirror.drop()


@pytest.mark.parametrize("is_staged", [False, True])
def test_decoded_chunks_leave_room_for_tables_if_their_file_is_staged(path, tmp_path, monkeypatch, is_staged):
    found, options = [], StagingOptions(dir=tmp_path)
    monkeypatch.setattr(handles, "DecodedMirror", lambda *_, leaves_tables: found.append(leaves_tables))
    guard = dataclasses.replace(ChangeGuard.of(str(path)), staging=options if is_staged else None)
    handles.DecodedFile(str(path), guard, DecodedArray(options, "an array", 1, 1, 1))
    assert found == [is_staged]


def test_setup_says_what_is_kept(path, make_h5, staging, caplog):
    with caplog.at_level(logging.INFO):
        small_cache(path, staging).setup("fit")
    assert f"staging: decoded chunks of 'x' are kept in {mirrors_folder(staging)!r}, which may take" in caplog.text
    assert "is not staged" not in caplog.text
    caplog.clear()
    plain = make_h5(x=X, y=np.arange(ROWS))
    with caplog.at_level(logging.INFO):
        small_cache(plain, staging).setup("fit")
    assert "staging: decoded=True has no effect: no array of 1 MiB or more has compressed chunks" in caplog.text


def mirrors_folder(staging):
    return str(next(Path(staging["dir"]).iterdir()))


@pytest.mark.parametrize(
    ("rate", "cached", "is_kept"), [(1e12, True, True), (1e12, False, True), (1e3, True, False), (1e3, False, False)]
)
def test_auto_keeps_what_is_read_faster_than_decoded(path, staging, monkeypatch, caplog, rate, cached, is_kept):
    forgets, read_rate = [], DecodedMirror.read_rate

    def rate_of(self, chunks, read, forget):
        forgets.append(forget is not None)
        assert read_rate(self, chunks, read, forget) > 0
        return rate

    monkeypatch.setattr(DecodedMirror, "read_rate", rate_of)
    monkeypatch.setattr(kept_chunks, "page_cache_memory", lambda: 1 << 40 if cached else 0)
    staging["decoded"] = "auto"
    with caplog.at_level(logging.INFO):
        (first, _), (second, n_decoded) = epochs(small_cache(path, staging))
    assert_rows(first)
    assert_rows(second)
    assert (n_decoded == 0) == is_kept
    assert forgets == [not cached]
    verdict = "kept" if is_kept else "not kept"
    assert f"staging: decoded chunks of 'x' are {verdict}: decoding gives" in caplog.text


def test_decoded_is_true_false_or_auto(path, staging):
    staging["decoded"] = "yes"
    with pytest.raises(H5ValueError, match=r"staging.decoded='yes' was given. Pass True, False or 'auto'."):
        small_cache(path, staging)


# Never a wrong value ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("seed", range(4))
def test_damage_on_the_local_disk_is_found_and_repaired(path, staging, caplog, seed):
    list(epochs(small_cache(path, staging), 1))
    process_pool().close()
    (file,) = mirrors(staging)
    places = np.random.default_rng(seed).integers(0, X.nbytes, 5).tolist()
    with open(file, "r+b") as target:
        for place in places:
            target.seek(place)
            octet = target.read(1)[0]
            target.seek(place)
            target.write(bytes([octet ^ 255]))
    n_damaged = len({place // (8 * WIDTH * 4) for place in places})
    (first, n_first), (second, n_second) = epochs(small_cache(path, staging))
    assert_rows(first)
    assert_rows(second)
    assert n_damaged <= n_first <= 4 * n_damaged  # batches that are read at the same time decode it, too
    assert n_second == 0
    assert caplog.text.count("differ from their checksums") == 1


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("is_silent", [False, True])
def test_damage_during_a_run_is_found_and_repaired(path, staging, monkeypatch, is_silent):
    """At once in whole chunks, or if the file's time tells of it; otherwise once rows are compared again."""
    is_by_rows = kept_rows.LEAST_BYTES == 0
    monkeypatch.setattr(decoded, "COMPARE_EVERY", 1e-6 if is_silent and is_by_rows else 1e9)
    datamodule = small_cache(path, staging)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    for epoch in range(6):
        loader.set_epoch(epoch)
        assert_rows(list(loader))
        (file,) = mirrors(staging)
        status = os.stat(file)
        with open(file, "r+b") as target:
            target.seek(epoch * 70_001)
            target.write(b"damage")
        if is_silent:  # as a disk does it
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("seconds", [1e9, 1e-6])
def test_pieces_are_compared_once_for_some_time(path, staging, monkeypatch, seconds):
    monkeypatch.setattr(kept_rows, "LEAST_BYTES", 0)
    monkeypatch.setattr(decoded, "COMPARE_EVERY", seconds)
    n_compared, sums_of_pieces = [], decoded.sums_of_pieces

    def counted(memory, starts, *rest):
        n_compared.append(len(starts))
        return sums_of_pieces(memory, starts, *rest)

    monkeypatch.setattr(checksums, "_loops", [None])  # the compiled loop calls another function
    monkeypatch.setattr(decoded, "sums_of_pieces", counted)
    for number, (batches, _) in enumerate(epochs(small_cache(path, staging), 4)):
        assert_rows(batches)
        assert number < 2 or (sum(n_compared) == 0) == (seconds > 1)
        n_compared.clear()


@pytest.mark.usefixtures("either_way")
def test_a_file_that_was_written_again_is_decoded_again(path, staging):
    for number in range(5):
        values = X + number
        with h5py.File(path, "r+") as file:
            file["x"][...] = values
        (batches, n_decoded), (again, n_again) = epochs(small_cache(path, staging))
        assert_rows(batches, values)
        assert_rows(again, values)
        assert (n_decoded, n_again) == (ROWS // 8, 0)


def test_a_file_that_changes_while_it_is_read_is_never_kept(path, staging):
    datamodule = small_cache(path, staging, prefetch_factor=1)  # some of it is left to be read
    datamodule.setup("fit")
    batches = iter(datamodule.train_dataloader())
    next(batches)
    with h5py.File(path, "r+") as file:
        file["x"][...] = X + 1
    with pytest.raises(H5DataChangedError):
        list(batches)
    datamodule.teardown()
    (found, _), (again, n_again) = epochs(small_cache(path, staging))
    assert_rows(found, X + 1)
    assert_rows(again, X + 1)
    assert n_again == 0


def write_again(path, values):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(8, WIDTH), **GZIP)
        file["y"] = np.arange(ROWS)


def replace(path, values):
    write_again(f"{path}.new", values)
    os.replace(f"{path}.new", path)


def change_in_place(path, values):
    with h5py.File(path, "r+") as file:
        file["x"][...] = values


def change_one_row(path, values):
    with h5py.File(path, "r+") as file:
        file["x"][...] = values
        status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.wide
def test_a_hundred_changes_of_a_file_bring_no_row_of_another_version(path, staging):
    changes, values, n_refused = np.random.default_rng(0), X, 0
    for number in range(100):
        datamodule = small_cache(path, staging, prefetch_factor=1)
        datamodule.setup("fit")
        loader = datamodule.train_dataloader()
        loader.set_epoch(number)
        batches = iter(loader)
        seen = [next(batches) for _ in range(changes.integers(0, 13))]
        after = values + changes.integers(1, 5)
        change = [write_again, replace, change_in_place, change_one_row][number % 4]
        change(path, after)
        try:
            seen += batches
        except H5DataChangedError:
            n_refused += 1
        for x, y in seen:
            assert np.array_equal(x.numpy(), values[y.numpy()])
        datamodule.teardown("fit")
        process_pool().close()
        values = after
    assert n_refused > 50
    for batches, _ in epochs(small_cache(path, staging)):
        assert_rows(batches, values)
    assert len(mirrors(staging)) == 1  # what was kept of earlier versions is gone


def test_chunks_without_digests_are_not_taken_for_those_with(path, staging):
    list(epochs(small_cache(path, staging), 1))
    assert check_files(path, write_digests=True).digested
    process_pool().close()
    options = {"files": {"verify": "digest", "cache_bytes": 9 * 8 * WIDTH * 4}}
    (batches, n_decoded), (_, n_again) = epochs(small_cache(path, staging, **options))
    assert_rows(batches)
    assert (n_decoded, n_again) == (ROWS // 8, 0)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_full_or_broken_disk_costs_speed_alone(path, staging, monkeypatch, caplog, error):
    n_calls, pwrite = [0], os.pwrite

    def fails(fd, data, at):
        n_calls[0] += 1
        if n_calls[0] > 6:
            raise OSError(error, os.strerror(error))
        return pwrite(fd, data, at)

    monkeypatch.setattr(checksums, "_loops", [None])  # the compiled loop calls another `pwrite`
    monkeypatch.setattr(mirror_file.os, "pwrite", fails)
    for batches, _ in epochs(small_cache(path, staging), 3):
        assert_rows(batches)
    monkeypatch.undo()
    assert caplog.text.count(f"failed: {os.strerror(error)}") == 1


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP])
def test_space_that_cannot_be_allocated_costs_speed_alone(path, staging, monkeypatch, caplog, error):
    def fails(*_):
        ctypes.set_errno(error)
        return -1

    monkeypatch.setattr(checksums, "_loops", [None])  # the compiled loop calls another `fallocate`
    monkeypatch.setattr(mirror_file, "ALLOCATED_BYTES", 0)
    monkeypatch.setattr(mirror_file, "_allocating_function", lambda: fails)
    n_decoded = [n for batches, n in epochs(small_cache(path, staging)) if assert_rows(batches) is None]
    is_full = error != errno.EOPNOTSUPP
    assert (n_decoded[1] > 0) == is_full
    assert caplog.text.count(f"failed: {os.strerror(error)}") == is_full


@pytest.mark.usefixtures("either_way")
def test_a_folder_that_is_deleted_meanwhile_costs_speed_alone(path, staging):
    datamodule = small_cache(path, staging)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    for epoch in range(3):
        loader.set_epoch(epoch)
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == 3 and epoch == 1:
                for each in Path(mirrors_folder(staging)).iterdir():
                    each.unlink()
        assert_rows(batches)


@pytest.mark.usefixtures("either_way")
def test_a_local_file_that_cannot_be_read_costs_speed_alone(path, staging, monkeypatch):
    list(epochs(small_cache(path, staging), 1))

    def fails(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(checksums, "_loops", [None])  # the compiled loop leaves to it what cannot be read
    monkeypatch.setattr(kept_chunks, "read_pieces", fails)
    ((batches, n_decoded),) = epochs(small_cache(path, staging), 1)
    assert_rows(batches)
    assert n_decoded >= ROWS // 8


@pytest.mark.usefixtures("either_way")
def test_chunks_that_were_never_written_take_no_space(make_h5, staging):
    stored = Stored(X, "chunked", (8, WIDTH), GZIP | {"fillvalue": 7})
    stored.written = 80
    path = make_h5(x=stored, y=np.arange(ROWS))
    values = np.where(np.arange(ROWS)[:, None] < 80, X, 7)
    for batches, _ in epochs(small_cache(path, staging)):
        assert_rows(batches, values)
    assert marked(mirrors(staging)[0], ROWS // 8, X.nbytes) == 10


# Processes that die -------------------------------------------------------------------------------------------------

JOB = """
import sys; sys.path[:] = {path!r}
import numpy as np, h5py
from lightning_h5.datasets import H5LazyDataset, file_dataset
from lightning_h5.hdf5.handles import DecodedFile, process_pool
from lightning_h5.readers import kept_chunks, kept_rows
from lightning_h5.samples import row_table
from lightning_h5.staging import compile_sums
file_dataset.HELD_BYTES = row_table.HELD_BYTES = kept_chunks.MIN_BYTES = 0
rng = np.random.default_rng(int(sys.argv[1]))
kept_rows.LEAST_BYTES = 0 if rng.integers(2) else 1 << 60
if rng.integers(2):
    compile_sums()
with h5py.File({file!r}) as file:
    values = file["x"][:]
dataset = H5LazyDataset({file!r}, "x", files={{"staging": {staging!r}, "cache_bytes": 9 * 8 * {width} * 4}})
print("ready", flush=True)
while True:
    rows = rng.integers(0, len(values), 20)
    assert np.array_equal(dataset.read_batch(rows).numpy(), values[rows])
    if not rng.integers(10):
        for entry in list(process_pool()._entries.values()):
            if isinstance(entry.handle, DecodedFile):
                entry.handle.mirror._forget(np.arange(5, 15))
"""


def start(path, staging, seed):
    code = JOB.format(path=sys.path, file=str(path), staging=staging, width=WIDTH)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill_at_random(path, staging, n_rounds, seed):
    """Two jobs fill the same mirror, drop parts of it and read it; one after the other is killed."""
    places = np.random.default_rng(seed)
    jobs = [start(path, staging, number) for number in range(2)]
    try:
        for number in range(n_rounds):
            which = number % 2
            assert jobs[which].stdout.readline() == "ready\n", jobs[which].stderr.read()
            time.sleep(places.uniform(0, 0.1))
            assert jobs[which].poll() is None, jobs[which].stderr.read()
            jobs[which].send_signal(signal.SIGKILL)
            jobs[which].communicate()
            for batches, _ in epochs(small_cache(path, staging), 1):
                assert_rows(batches)
            process_pool().close()
            jobs[which] = start(path, staging, 10 + number)
    finally:
        for job in jobs:
            job.kill()
            _, errors = job.communicate()
            assert "Error" not in errors, errors
    assert len(mirrors(staging)) == 1


def test_jobs_that_are_killed_at_any_moment_leave_nothing_wrong(path, staging):
    kill_at_random(path, staging, 2, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_jobs_that_are_killed_at_more_moments_leave_nothing_wrong(path, staging):
    kill_at_random(path, staging, 200, seed=1)
