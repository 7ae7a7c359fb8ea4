"""Training from mirrors: the same rows, and the slow file system is read once."""

import json
import logging
import os
import stat
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from factories import Stored, edit, make_older
from lightning_models import Recorder, quiet_trainer
from origins import GRANULE
from processes import run_ranks, values

from lightning_h5 import (
    CombinedHDF5DataModule,
    FileOptions,
    H5DataChangedError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    StagingOptions,
    check_files,
)
from lightning_h5.datasets import file_dataset
from lightning_h5.readers import select
from lightning_h5.samples import row_table
from lightning_h5.staging import Mirror, PosixOrigin, policy
from lightning_h5.staging.granules import sums_at, sums_of

ROWS = 400
rng = np.random.default_rng(0)
PLAIN = rng.integers(0, 256, (ROWS, 700), dtype=np.uint8)
IMAGES = rng.integers(0, 9, (ROWS, 60, 50), dtype=np.uint8)
TEXT = np.array([f"row {row}" for row in range(ROWS)], dtype=object)


@pytest.fixture
def path(make_h5):
    images = Stored(IMAGES, "chunked", (8, 60, 50), {"compression": "gzip", "shuffle": True})
    return make_h5(x=PLAIN, images=images, y=np.arange(ROWS))


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "local")


@pytest.fixture
def requests(monkeypatch):
    """Ranges that were read of slow files, of this process."""
    read, ranges = Mirror._read, []

    def counted(self, start, stop, counters):
        ranges.append((start, stop))
        return read(self, start, stop, counters)

    monkeypatch.setattr(Mirror, "_read", counted)
    return ranges


def epochs_of(datamodule, n=2, stage="fit"):
    datamodule.setup(stage)
    loader = datamodule.train_dataloader()
    for epoch in range(n):
        loader.batch_sampler.set_epoch(epoch) if hasattr(loader.batch_sampler, "set_epoch") else None
        yield list(loader)


pytestmark = pytest.mark.usefixtures("stages_all")


@pytest.mark.parametrize("key", ["x", "images"])
@pytest.mark.parametrize("shuffle", [True, "global", "chunks", False])
def test_rows_are_those_of_the_file_and_a_second_epoch_reads_nothing_of_it(path, folder, requests, key, shuffle):
    datamodule = LazyH5DataModule(path, x_key=key, y_key="y", batch_size=32, shuffle=shuffle, staging=folder)
    expected = PLAIN if key == "x" else IMAGES
    for epoch, batches in enumerate(epochs_of(datamodule, 3)):
        assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(ROWS))
        for x, y in batches:
            assert np.array_equal(x.numpy(), expected[y.numpy()])
        if epoch == 0:
            assert requests
            requests.clear()
        assert not requests


def test_windows_are_those_of_the_file(path, folder, requests):
    datamodule = LazyH5DataModule(path, x_key="images", window=20, batch_size=3, seed=1, staging=folder)
    plain = LazyH5DataModule(path, x_key="images", window=20, batch_size=3, seed=1)
    for found, expected in zip(epochs_of(datamodule), epochs_of(plain), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert sum(stop - start for start, stop in requests) < os.path.getsize(path)


def test_only_the_chunks_of_the_splits_are_in_the_mirror(make_h5, folder):
    stored = rng.integers(0, 128, (60, 100_000), dtype=np.uint8)
    path = make_h5(x=Stored(stored, "chunked", (1, 100_000), {"compression": "gzip", "compression_opts": 1}))
    used = [1, 2, 31]
    dataset = H5LazyDataset(path, "x", indices=used, files={"staging": folder})
    assert np.array_equal(dataset.read_batch([0, 1, 2]).numpy(), stored[used])
    (mirror,) = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names if "mirror" in name]
    on_disk = os.stat(mirror).st_blocks * 512
    with h5py.File(path) as file, open(mirror, "rb") as copy, open(path, "rb") as source:
        n_bytes = sum(file["x"].id.get_chunk_info(row).size for row in used)
        assert n_bytes < on_disk < n_bytes + 4 * 2 * (16 << 10)
        for row in range(60):
            info = file["x"].id.get_chunk_info(row)
            copy.seek(info.byte_offset + (20 << 10))
            source.seek(info.byte_offset + (20 << 10))
            assert (copy.read(1000) == source.read(1000)) == (row in used)


def test_a_network_file_system_is_refused_as_the_local_disk(path, tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "_file_system", lambda path: "lustre")
    assert "cannot be used: it is on a network file system (lustre)" in refused(path, str(tmp_path))


@pytest.mark.parametrize(
    "start_method", ["fork", *(pytest.param(name, marks=pytest.mark.wide) for name in ("forkserver", "spawn"))]
)
def test_workers_share_the_mirror(path, folder, requests, start_method):
    datamodule = LazyH5DataModule(
        path,
        x_key="images",
        y_key="y",
        batch_size=25,
        num_workers=2,
        staging=folder,
        workers={"start_method": start_method},
    )
    for batches in epochs_of(datamodule):
        assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(ROWS))
        assert all(np.array_equal(x.numpy(), IMAGES[y.numpy()]) for x, y in batches)
    datamodule.teardown()
    assert not requests, "workers fetch what they need"
    later = LazyH5DataModule(path, x_key="images", y_key="y", batch_size=25, staging=folder)
    for batches in epochs_of(later, 1):
        assert all(np.array_equal(x.numpy(), IMAGES[y.numpy()]) for x, y in batches)
    assert not requests, "and a later job finds it"


def read_shard(rank, path, folder):
    """What a rank of two reads in two epochs, and its requests."""
    policy.MIN_BYTES, policy._is_on = 0, lambda device, folder: False
    row_table.HELD_BYTES = file_dataset.HELD_BYTES = 0
    datamodule = LazyH5DataModule(
        path,
        x_key="images",
        y_key="y",
        batch_size=8,
        staging=folder,
        distributed={"rank": rank, "world_size": 2},
        shuffle="chunks",
    )
    seen = []
    for batches in epochs_of(datamodule):
        assert all(np.array_equal(x.numpy(), IMAGES[y.numpy()]) for x, y in batches)
        seen.append(torch.cat([y for _, y in batches]).tolist())
    return seen, datamodule.datasets["train"].counters.total()


@pytest.mark.wide
def test_ranks_share_the_mirror(path, folder, tmp_path):
    (first, counted), (second, more) = values(run_ranks(read_shard, 2, tmp_path / "logs", path, folder))
    for a, b in zip(first, second, strict=True):
        assert sorted([*a, *b]) == list(range(ROWS))
    n_fetched = counted["origin_bytes"] + more["origin_bytes"]
    assert n_fetched == bytes_of(path, "images", "y")[0], "each byte once, whichever rank read it"


def test_broken_files_are_skipped_and_a_broken_folder_is_not(path, tmp_path):
    (tmp_path / "file").write_text("")
    staging = str(tmp_path / "file" / "folder")
    datamodule = CombinedHDF5DataModule([path], fields=["y"], on_bad_file="skip", staging=staging)
    with pytest.raises(H5ValueError, match="cannot be used: Not a directory"):
        datamodule.setup("fit")


def test_a_fit_is_the_same_with_a_mirror(path, folder):
    models = []
    for staging in (None, StagingOptions(dir=folder, max_bytes="100 KiB"), StagingOptions(dir=folder)):
        model = Recorder()
        datamodule = LazyH5DataModule(
            path, x_key="images", y_key="y", split=0.2, seed=3, with_index=True, staging=staging
        )
        quiet_trainer().fit(model, datamodule=datamodule)
        models.append(model)
    assert models[0].train_rows == models[1].train_rows == models[2].train_rows


def test_combined_files_are_staged(make_h5, folder, requests):
    paths = [make_h5(x=Stored(part, "chunked", (10, 60, 50), {"compression": "lzf"})) for part in np.split(IMAGES, 4)]
    datamodule = CombinedHDF5DataModule(paths, fields=["x"], x_dtype=None, staging={"dir": folder}, with_index=True)
    for epoch, batches in enumerate(epochs_of(datamodule)):
        assert all(np.array_equal(each["x"].numpy(), IMAGES[each["index"].numpy()]) for each in batches)
        assert bool(requests) == (epoch == 0)
        requests.clear()


def test_rows_in_memory_are_not_staged_unless_they_are_drawn_again(path, folder, requests, caplog):
    given = {"x_key": "images", "y_key": "y", "batch_size": 32, "staging": folder}
    with caplog.at_level(logging.INFO):
        list(epochs_of(RankCachedH5DataModule(path, **given)))
    assert not requests
    assert "staging has no effect: each row is read once, into memory" in caplog.text
    again = RankCachedH5DataModule(path, memory={"reshard_every_n_epochs": 1}, **given)
    for batches in epochs_of(again, 1):
        assert all(np.array_equal(x.numpy(), IMAGES[y.numpy()]) for x, y in batches)
    assert requests


def test_mapped_files_are_read_through_the_mirror(path, folder, requests):
    dataset = H5LazyDataset(path, "x", files={"mmap": True, "staging": folder})
    for _ in range(2):
        assert np.array_equal(dataset.read_batch(range(ROWS)).numpy(), PLAIN)
    assert 0 < sum(stop - start for start, stop in requests) < os.path.getsize(path)


# A file that changes ------------------------------------------------------------------------------------------------


def test_a_file_that_changes_under_its_mirror_ends_the_run(path, folder):
    dataset = H5LazyDataset(path, "x", files={"staging": folder})
    dataset.read_batch(range(ROWS))
    os.utime(path)
    with pytest.raises(H5DataChangedError, match="was written to since training was set up"):
        dataset.read_batch([3])


def test_the_next_run_from_a_file_that_changed_has_a_fresh_mirror(path, folder):
    dataset = H5LazyDataset(path, "x", files={"staging": folder})
    before = os.stat(path)
    assert np.array_equal(dataset.read_batch(range(ROWS)).numpy(), PLAIN)
    dataset.close()
    with h5py.File(path, "r+") as file:
        file["x"][7] = 0
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # a copy with its times, such as `rsync -t`
    changed = H5LazyDataset(path, "x", files={"staging": folder})
    assert not changed.read_batch([7]).any()


# What is said -------------------------------------------------------------------------------------------------------


def said(caplog, path, **given):
    with caplog.at_level(logging.INFO):
        LazyH5DataModule(path, batch_size=4, **given).setup("fit")
    return [line for line in caplog.messages if line.startswith("staging")]


def test_settings_of_object_stores_are_not_ignored_in_silence(path, folder, caplog):
    given = {"dir": folder, "storage_options": {"secret_access_key": "hunter2"}}
    lines = said(caplog, path, x_key="x", staging=given)
    assert "staging: storage_options have no effect, since all files are on file systems" in lines


def test_what_is_staged_is_logged(make_h5, folder, caplog):
    path = make_h5(x=PLAIN, names=Stored(TEXT, dtype=h5py.string_dtype()))
    given = {"x_key": {"x": "x", "names": "names"}, "staging": {"dir": folder, "max_bytes": "1 GiB"}}
    staged, by_library = said(caplog, path, **given)
    assert staged.startswith(f"staging: {path!r} is read through '{folder}/lightning_h5-")
    assert staged.endswith("', which may take 1.0 GiB")
    assert by_library == "staging: not of 'names', which only the HDF5 library can read"


def test_a_file_on_the_same_disk_is_not_staged(path, folder, caplog, monkeypatch, requests):
    monkeypatch.undo()
    monkeypatch.setattr("lightning_h5.staging.policy.MIN_BYTES", 0)
    assert said(caplog, path, x_key="x", staging=folder) == [
        f"staging: {path!r} is not staged: it is on the disk that it would be staged to"
    ]


def test_a_small_file_is_not_staged(path, folder, caplog, monkeypatch):
    monkeypatch.setattr("lightning_h5.staging.policy.MIN_BYTES", 1 << 20)
    small = {"x_key": "x", "staging": folder}
    assert said(caplog, path, **small) == [f"staging: {path!r} is not staged: it is smaller than 1 MiB"]


def test_variables_are_expanded_on_each_machine(path, folder, monkeypatch):
    monkeypatch.setenv("MY_DISK", folder)
    datamodule = LazyH5DataModule(path, x_key="x", staging="${MY_DISK}/mirrors")
    datamodule.setup("fit")
    assert datamodule.hparams["staging"] == "${MY_DISK}/mirrors"
    assert os.listdir(f"{folder}/mirrors") == [f"lightning_h5-{os.geteuid()}"]


# Errors -------------------------------------------------------------------------------------------------------------


def refused(path, staging):
    with pytest.raises(H5ValueError) as error:
        LazyH5DataModule(path, x_key="x", staging=staging).setup("fit")
    return str(error.value)


def test_a_variable_that_is_not_set_is_named(path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_DISK", raising=False)
    assert refused(path, "$NO_SUCH_DISK/x") == (
        "staging.dir='$NO_SUCH_DISK/x' names the environment variable NO_SUCH_DISK, which is not set on this machine. "
        "Set it in the job script, or pass the path of a folder on a local disk."
    )


def test_a_folder_that_cannot_be_made_is_refused_before_training(path, tmp_path):
    (tmp_path / "file").write_text("")
    text = refused(path, str(tmp_path / "file" / "folder"))
    assert "cannot be used: Not a directory" in text
    assert "Pass a folder on a local disk that is writable" in text


def test_a_read_only_folder_is_refused_before_training(path, tmp_path, monkeypatch):
    mkdir = os.mkdir

    def denied(path, mode=0o777, **options):
        if "lightning_h5-" in str(path):
            raise OSError(30, "Read-only file system")  # root may write to any folder
        return mkdir(path, mode, **options)

    monkeypatch.setattr(os, "mkdir", denied)
    assert "cannot be used: Read-only file system" in refused(path, str(tmp_path))


def test_a_folder_of_another_user_is_refused(path, tmp_path):
    (tmp_path / f"lightning_h5-{os.geteuid()}").mkdir(mode=0o777)
    os.chmod(tmp_path / f"lightning_h5-{os.geteuid()}", 0o777)
    assert "is not a folder of this user alone" in refused(path, str(tmp_path))


def test_other_users_cannot_read_a_mirror(path, folder):
    H5LazyDataset(path, "x", files={"staging": folder}).read_batch([0])
    ((own, _, names),) = list(os.walk(folder))[1:]
    assert stat.S_IMODE(os.stat(own).st_mode) == 0o700
    assert {stat.S_IMODE(os.stat(os.path.join(own, name)).st_mode) for name in names} == {0o600}


@pytest.mark.parametrize(
    ("staging", "text"),
    [
        ({"dir": ""}, "staging.dir='' was given"),
        ({"dir": "x", "max_bytes": "much"}, "staging.max_bytes='much' is not a size"),
        ({"dir": "x", "max_byte": 3}, "staging has no field 'max_byte'. Did you mean 'max_bytes'"),
        (3, "staging=3 was given. Pass the path of a folder"),
        ({"dir": "x", "storage_options": "key"}, "staging.storage_options is not a mapping"),
    ],
)
def test_options_that_make_no_sense_are_refused(path, staging, text):
    with pytest.raises(H5ValueError, match=text.replace("(", r"\(")):
        LazyH5DataModule(path, x_key="x", staging=staging)


def test_a_folder_without_a_name_is_refused_for_datasets_too(path):
    with pytest.raises(H5ValueError, match=r"staging\.dir='' was given"):
        H5LazyDataset(path, "x", files={"staging": ""})


def test_one_setting_is_given_once(path, folder):
    with pytest.raises(H5ValueError, match=r"staging and files\.staging are the same setting"):
        LazyH5DataModule(path, x_key="x", staging=folder, files={"staging": folder})


@pytest.mark.parametrize("as_files", [True, False])
def test_a_checkpoint_gives_a_module_that_stages(path, folder, as_files, tmp_path, requests):
    staging = StagingOptions(dir=folder, max_bytes="1 GiB")
    given = {"files": {"staging": staging}} if as_files else {"staging": staging}
    datamodule = LazyH5DataModule(path, x_key="x", y_key="y", with_index=True, **given)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Recorder(), datamodule=datamodule)
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    loaded = LazyH5DataModule.load_from_checkpoint(tmp_path / "kept.ckpt")
    assert loaded._options.files.staged == staging
    requests.clear()
    assert sorted(torch.cat([y for _, y, _ in next(epochs_of(loaded, 1))]).tolist()) == list(range(ROWS))
    assert not requests, "the mirror has all"


def test_a_mapping_is_refused_where_options_are_compared(folder):
    """Without its content, which may be secret."""
    with pytest.raises(H5ValueError, match="staging is a mapping"):
        FileOptions(staging={"dir": folder})


@pytest.mark.parametrize("as_object", [True, False])
def test_credentials_are_recorded_nowhere(path, folder, as_object, tmp_path):
    given = {"dir": folder, "storage_options": {"secret_access_key": "hunter2"}}
    datamodule = LazyH5DataModule(
        path, x_key="x", y_key="y", staging=StagingOptions(**given) if as_object else given, with_index=True
    )
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Recorder(), datamodule=datamodule)
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    assert b"hunter2" not in (tmp_path / "kept.ckpt").read_bytes()
    assert "hunter2" not in json.dumps(datamodule.hparams) + repr(datamodule) + repr(datamodule._options)
    assert datamodule.hparams["staging"]["storage_options"] == "not stored: credentials"
    with pytest.raises(H5ValueError, match=r"staging was credentials"):
        LazyH5DataModule.load_from_checkpoint(tmp_path / "kept.ckpt")
    LazyH5DataModule.load_from_checkpoint(tmp_path / "kept.ckpt", staging=folder)


# What is counted -----------------------------------------------------------------------------------------------------

COUNTS = ("origin_requests", "origin_bytes", "mirror_bytes", "missed_bytes")
COUNTED = {"y_key": "y", "batch_size": 16, "shuffle": False, "files": {"cache_bytes": "200 KiB"}}


def bytes_of(path, *keys):
    """Bytes of the granules that some arrays lie in, and of the arrays."""
    ranges = []
    with h5py.File(path) as file:
        for array in map(file.__getitem__, keys):
            chunks = [array.id.get_chunk_info(n) for n in range(array.id.get_num_chunks())] if array.chunks else []
            ranges += [(chunk.byte_offset, chunk.size) for chunk in chunks] or [(array.id.get_offset(), array.nbytes)]
    granules = {granule for at, n in ranges for granule in range(at // GRANULE, -(-(at + n) // GRANULE))}
    n_bytes = os.path.getsize(path)
    return sum(min(GRANULE, n_bytes - each * GRANULE) for each in granules), sum(n for _, n in ranges)


def counts_of(datamodule, n=2):
    """What each epoch counted."""
    datamodule.setup("fit")
    loader, found = datamodule.train_dataloader(), []
    for _ in range(n):
        before = loader.counters.total()
        times = loader.counters.request_times().sum()
        assert sum(len(y) for _, y in loader) == ROWS
        now = loader.counters.total()
        found.append({name: int(now[name] - before[name]) for name in COUNTS})
        assert loader.counters.request_times().sum() - times == found[-1]["origin_requests"]
        seconds = {name: now[name] - before[name] for name in now if name.endswith("_seconds")}
        assert 0 <= seconds["origin_seconds"] <= seconds["read_seconds"], "waiting is a part of reading"
        assert seconds["decode_seconds"] >= 0
        assert found[-1]["origin_requests"] or not seconds["origin_seconds"]
    return found


@pytest.fixture
def slow_origin(monkeypatch):
    """What waiting for it takes is more than what else is counted with it."""
    read = PosixOrigin.read
    monkeypatch.setattr(PosixOrigin, "read", lambda *given: time.sleep(0.005) or read(*given))


@pytest.fixture(params=[False, True], ids=["", "compiled"])
def loops(request, monkeypatch):
    """Chunks are read and decoded by compiled code, if Numba is installed, or not."""
    monkeypatch.setattr(select, "MIN_COMPILED", 0 if request.param else 1 << 60)


@pytest.mark.usefixtures("slow_origin", "loops")
@pytest.mark.parametrize(("key", "num_workers"), [("images", 0), ("images", 2), ("x", 0)])
def test_an_epoch_counts_each_granule_once_and_the_next_one_none(path, folder, requests, key, num_workers):
    first, second = counts_of(LazyH5DataModule(path, x_key=key, staging=folder, num_workers=num_workers, **COUNTED))
    fetched, needed = bytes_of(path, key, "y")
    assert (first["origin_bytes"], first["missed_bytes"]) == (fetched, 0)
    assert second == {"origin_requests": 0, "origin_bytes": 0, "missed_bytes": 0, "mirror_bytes": needed}
    if num_workers == 0:
        assert first["mirror_bytes"] == needed
        assert first["origin_requests"] == len(requests)
        assert fetched == sum(stop - start for start, stop in requests)


@pytest.mark.usefixtures("slow_origin", "loops")
def test_what_the_mirror_has_no_room_for_is_counted_in_each_epoch(path, folder, requests):
    staging = StagingOptions(dir=folder, max_bytes="200 KiB")
    epochs = counts_of(LazyH5DataModule(path, x_key="images", staging=staging, **COUNTED), 3)
    for counted in epochs:
        assert counted["mirror_bytes"] > 0
        assert 0 < counted["missed_bytes"] <= counted["origin_bytes"]
        assert counted["mirror_bytes"] + counted["missed_bytes"] == bytes_of(path, "images", "y")[1]
    assert sum(counted["origin_bytes"] for counted in epochs) == sum(stop - start for start, stop in requests)
    assert sum(counted["origin_requests"] for counted in epochs) == len(requests)


def test_nothing_is_counted_of_files_that_are_not_staged(path):
    assert counts_of(LazyH5DataModule(path, x_key="images", **COUNTED), 1) == [dict.fromkeys(COUNTS, 0)]


def test_rows_with_digests_are_counted_too(path, folder, requests):
    assert check_files(path, write_digests=True).digested
    dataset = H5LazyDataset(path, "x", files={"staging": folder, "verify": "digest"})
    assert np.array_equal(dataset.read_batch(range(ROWS)).numpy(), PLAIN)
    counted = dataset.counters.total()
    assert counted["origin_bytes"] == sum(stop - start for start, stop in requests) > 0
    assert counted["mirror_bytes"] == 2 * PLAIN.nbytes, "read to be compared, and read"


def test_requests_of_an_epoch_are_at_most_the_chunks(path, folder, requests):
    datamodule = LazyH5DataModule(path, x_key="images", batch_size=16, shuffle="chunks", staging=folder)
    next(epochs_of(datamodule, 1))
    assert len(requests) <= ROWS / 8
    ranges = sorted(requests)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges)), "no byte twice"


def test_a_closed_dataset_leaves_no_descriptor(path, folder):
    def n_open():
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                name = os.readlink(f"/proc/self/fd/{fd}")
                found += name == path or (name.startswith(folder) and name.endswith(".mirror"))
        return found

    dataset = H5LazyDataset(path, "x", files={"staging": folder})
    dataset.read_batch([0])
    assert n_open() >= 2
    dataset.close()
    assert n_open() == 0


def test_an_older_time_is_another_version(path, folder):
    def mirrors():
        return [name for _, _, names in os.walk(folder) for name in names if name.endswith(".mirror")]

    H5LazyDataset(path, "x", files={"staging": folder}).read_batch([0])
    (first,) = mirrors()
    make_older(path)
    H5LazyDataset(path, "x", files={"staging": folder}).read_batch([0])
    (second,) = mirrors()  # in the place of the other, which is never read again
    assert first.split("-")[0] == second.split("-")[0]
    assert first != second


def test_the_setting_of_a_configuration_file_may_be_a_folder(path, folder):
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    for staging in (folder, {"dir": folder, "max_bytes": "1 GiB"}):
        config = {"seed_everything": 1, "data": {"train_path": path, "x_key": "x", "staging": staging}}
        cli = LightningCLI(BoringModel, LazyH5DataModule, save_config_callback=None, run=False, args=config)
        cli.datamodule.setup("fit")
        assert cli.datamodule._options.files.staged.folder == folder


def test_a_chunk_that_does_not_decode_is_read_from_the_file_once_more(path, folder, requests):
    datamodule = LazyH5DataModule(path, x_key="images", batch_size=32, shuffle=False, staging=folder)
    (before,) = epochs_of(datamodule, 1)
    datamodule.teardown("fit")
    (name,) = Path(folder).glob("*/*.mirror")
    with h5py.File(path) as file:
        chunk = file["images"].id.get_chunk_info(7)
    edit(name, chunk.byte_offset + chunk.size // 2)
    with open(name, "r+b") as file:  # a checksum that is right for the wrong bytes
        size = os.stat(path).st_size
        data = os.pread(file.fileno(), size, 0)[:size]
        os.pwrite(file.fileno(), sums_of(data).tobytes(), sums_at(size))
    requests.clear()
    (after,) = epochs_of(datamodule, 1)
    assert all(map(torch.equal, before, after))
    assert requests
    requests.clear()
    datamodule.teardown("fit")
    (again,) = epochs_of(datamodule, 1)
    assert all(map(torch.equal, before, again))
    assert not requests
