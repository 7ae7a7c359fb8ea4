"""Training from objects of a store: the rows of the file, few requests, and one clear error for each failure."""

import gc
import logging
import os
import re
import signal
import struct
import subprocess
import sys
import time
import weakref
from contextlib import suppress

import h5py
import numpy as np
import pytest
import torch
from guards import HANG
from lightning_models import Recorder, quiet_trainer
from range_server import RangeServer

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5DataChangedError,
    H5FileError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    inspect_file,
    repack_file,
)
from lightning_h5.cli.text import file_text
from lightning_h5.hdf5 import process_pool
from lightning_h5.hdf5.remote_file import RemoteFile
from lightning_h5.staging import network, objects, policy, stores
from lightning_h5.staging.origin import ObjectOrigin
from lightning_h5.tools.index_file import write_index

pytest.importorskip("obstore")

ROWS, PER_CHUNK = 512, 16
CHUNKS = ROWS // PER_CHUNK
QUICK = {"retry_config": {"max_retries": 2, "backoff": {"init_backoff": 0.001, "max_backoff": 0.01, "base": 2}}}


def write(path, seed=0, libver=None):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (ROWS, 3, 24, 24), dtype="u1")
    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("x", data=x, chunks=(PER_CHUNK, 3, 24, 24), compression="gzip")
        file["y"] = np.arange(ROWS)
        file["name"] = [f"row {row}" for row in range(ROWS)]
    return x


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    """Each test asks the store anew."""
    for kept in (objects._recent, objects._absent, objects._staging):
        kept.clear()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "served").mkdir()
    return tmp_path / "served"


@pytest.fixture
def server(folder):
    with RangeServer(folder) as running:
        yield running


@pytest.fixture
def x(folder):
    return write(folder / "run.h5")


@pytest.fixture
def staging(tmp_path):
    return {"dir": tmp_path / "mirrors", "storage_options": QUICK}


def module(url, staging, kind=LazyH5DataModule, **options):
    return kind(url, **{"x_key": "x", "y_key": "y", "batch_size": 32, "staging": staging} | options)


def epoch(datamodule, x, loader=None):
    """All rows of an epoch, compared with what was written."""
    seen = []
    for rows, numbers in datamodule.train_dataloader() if loader is None else loader:
        assert torch.equal(rows, torch.from_numpy(x)[numbers].to(rows.dtype))
        seen += numbers.tolist()
    return seen


# Rows and requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_and_their_order_are_those_of_the_file(server, folder, x, staging, num_workers):
    orders = []
    for path in (str(folder / "run.h5"), server.url("run.h5")):
        given = staging if path.startswith("http") else None
        datamodule = module(path, given, num_workers=num_workers)
        datamodule.setup("fit")
        orders.append([epoch(datamodule, x) for _ in range(2)])
        datamodule.teardown("fit")
    assert orders[0] == orders[1]
    assert sorted(orders[1][0]) == list(range(ROWS))


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.wide), pytest.param("spawn", marks=pytest.mark.wide)],
)
def test_text_comes_through_the_library_also_in_workers(server, folder, x, staging, method):
    workers = {"start_method": method}
    datamodule = module(server.url("run.h5"), staging, y_key=["y", "name"], num_workers=2, workers=workers)
    datamodule.setup("fit")
    for _, (numbers, names) in datamodule.train_dataloader():
        assert names == [f"row {number}" for number in numbers.tolist()]
    datamodule.teardown("fit")


@pytest.mark.wide
def test_garbage_that_a_fetching_thread_finds_never_keeps_the_library_waiting(server, folder, x, staging, monkeypatch):
    class Garbage:
        def __init__(self):
            self.file, self.cycle = h5py.File(folder / "run.h5"), self

    def read(origin, *place, original=ObjectOrigin.read):
        if kept:
            kept.pop()
        gc.collect()
        return original(origin, *place)

    kept = [Garbage() for _ in range(16)]
    garbage = weakref.WeakSet(kept)
    monkeypatch.setattr(ObjectOrigin, "read", read)
    datamodule = module(server.url("run.h5"), staging)
    datamodule.setup("fit")
    assert sorted(epoch(datamodule, x)) == list(range(ROWS))
    gc.collect()
    assert len(garbage) == len(kept) < 16


def test_an_epoch_takes_a_request_a_chunk_at_most_and_the_next_one_none(server, folder, x, staging):
    datamodule = module(server.url("run.h5"), staging)
    datamodule.setup("fit")
    before = server.n_bytes
    server.clear()
    epoch(datamodule, x)
    assert server.count("HEAD") == 0
    assert 1 <= server.count("GET") <= CHUNKS
    assert before + server.n_bytes == os.path.getsize(folder / "run.h5")  # no byte twice
    server.clear()
    epoch(datamodule, x)
    assert server.requests == []
    datamodule.teardown("fit")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_later_job_on_the_node_asks_for_the_state_alone(server, folder, x, staging, num_workers):
    for _ in range(2):
        server.clear()
        objects._absent.clear()
        datamodule = module(server.url("run.h5"), staging, num_workers=num_workers)
        datamodule.setup("fit")
        assert sorted(epoch(datamodule, x)) == list(range(ROWS))
        datamodule.teardown("fit")
    assert [each.method for each in server.requests] == ["HEAD", "HEAD"]  # of the file and of its index
    assert {each.name for each in server.requests} == {"run.h5", "run.h5.index"}


def test_only_chunks_that_a_split_uses_are_fetched(server, folder, x, staging, stages_all):
    half = np.zeros(ROWS, dtype=int)
    half[: ROWS // 2] = 1
    with h5py.File(folder / "run.h5", "a") as file:
        file["half"] = half
    datamodule = CombinedHDF5DataModule(
        server.url("run.h5"), fields=["x", "y"], where={"half": 1}, batch_size=32, staging=staging
    )
    datamodule.setup("fit")
    server.clear()
    for batch in datamodule.train_dataloader():
        assert np.array_equal(batch["x"].numpy(), x[batch["y"].numpy()])
    assert server.n_bytes < 0.55 * os.path.getsize(folder / "run.h5")
    datamodule.teardown("fit")


@pytest.mark.parametrize("kind", [RankCachedH5DataModule, CombinedHDF5DataModule])
def test_all_data_modules_read_objects(server, folder, x, staging, kind):
    if kind is RankCachedH5DataModule:
        datamodule = module(server.url("run.h5"), staging, kind)
    else:
        datamodule = kind(server.url("run.h5"), fields=["x", "y"], batch_size=32, staging=staging)
    model = Seen()
    quiet_trainer(max_epochs=2).fit(model, datamodule=datamodule)
    assert [sorted(rows) for rows in model.epochs.values()] == [list(range(ROWS))] * 2


class Seen(Recorder):
    def __init__(self):
        super().__init__()
        self.epochs = {}

    def training_step(self, batch, batch_idx):
        numbers = batch["y"] if isinstance(batch, dict) else batch[1]
        self.epochs.setdefault(self.current_epoch, []).extend(numbers.tolist())
        return self.layer(torch.ones(1, 1)).sum()


def test_a_dataset_of_its_own_reads_objects(server, folder, x, staging):
    dataset = H5LazyDataset(server.url("run.h5"), "x", "y", files={"staging": staging})
    rows, numbers = torch.utils.data.default_collate([dataset[row] for row in (5, 500, 7)])
    assert np.array_equal(rows.numpy(), x[[5, 500, 7]])
    assert numbers.tolist() == [5, 500, 7]


def test_without_staging_mirrors_are_in_the_folder_for_temporary_files(
    server, folder, x, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        datamodule = module(server.url("run.h5"), None)
        datamodule.setup("fit")
        assert sorted(epoch(datamodule, x)) == list(range(ROWS))
    assert f"is read through {str(tmp_path / f'lightning_h5-{os.geteuid()}')!r}, which may take 18.6 GiB" in caplog.text
    datamodule.teardown("fit")


@pytest.mark.parametrize("room", [0, 40 << 10, 400 << 10])
def test_without_room_rows_come_from_the_store(server, folder, x, staging, room):
    datamodule = module(server.url("run.h5"), staging | {"max_bytes": 200_000 + room})
    datamodule.setup("fit")
    for _ in range(2):
        assert sorted(epoch(datamodule, x)) == list(range(ROWS))
    datamodule.teardown("fit")


def test_many_requests_are_in_flight(server, folder, x, staging):
    server.delay = 0.02
    datamodule = module(server.url("run.h5"), staging, batch_size=ROWS)
    datamodule.setup("fit")
    server.clear()
    with RangeServer(folder, delay=0.05):
        epoch(datamodule, x)
    assert server.most_at_once > 1
    assert server.most_at_once <= network.IN_FLIGHT
    datamodule.teardown("fit")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_requests_and_bytes_are_counted(server, folder, x, staging, num_workers, stages_all):
    datamodule = module(server.url("run.h5"), staging, num_workers=num_workers)
    datamodule.setup("fit")
    server.clear()
    loader = datamodule.train_dataloader()
    for _ in range(2):
        assert sorted(epoch(datamodule, x, loader)) == list(range(ROWS))
        counted = loader.counters.total()
        assert counted["origin_requests"] == server.count("GET") > 0
        assert counted["origin_bytes"] == server.n_bytes
        assert counted["origin_seconds"] > 0
    datamodule.teardown("fit")


def test_figures_of_requests_are_logged_and_shown_if_a_file_is_staged(server, folder, x, staging, capsys):
    shown = {}
    for path in (str(folder / "run.h5"), server.url("run.h5")):
        given = staging if path.startswith("http") else None
        trainer = quiet_trainer(max_epochs=1)
        trainer.fit(Seen(), datamodule=module(path, given, files={"cache_bytes": 0}))
        figures = {name for name in trainer.callback_metrics if "origin" in name or "mirror" in name}
        shown[path] = figures, capsys.readouterr().out
    (local, table_of_file), (remote, table_of_object) = shown.values()
    assert local == set()
    assert "origin" not in table_of_file
    for name in ("origin_mib", "origin_requests", "origin_wait_ms", "mirror_hit_rate"):
        assert f"h5/{name}_epoch" in remote
    for line in ("from the origin, MiB", "requests to the origin", "request, median, ms"):
        assert line in table_of_object


@pytest.mark.parametrize(("row_bytes", "is_said"), [(100, True), (70_000, False)])
def test_chunks_that_cost_a_request_for_little_are_noted(server, folder, staging, row_bytes, is_said, caplog):
    with h5py.File(folder / "run.h5", "w") as file:
        file.create_dataset("x", data=np.ones((1200, row_bytes), "u1"), chunks=(1, row_bytes))
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        datamodule = module(server.url("run.h5"), staging, y_key=None)
        datamodule.setup("fit")
    assert ("the chunks of 'x' have 100 B on average" in caplog.text) == is_said
    datamodule.teardown("fit")


# Opening ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("libver", "least"), [(None, 8), ("latest", 4)])
def test_nodes_below_a_node_of_a_tree_are_fetched_at_once(server, folder, staging, libver, least, monkeypatch):
    """The library reads one node after another: 60 of them, in three levels, would be as many rounds."""
    monkeypatch.setattr(
        "lightning_h5.hdf5.remote_file.SAMPLES", 2
    )  # of the identity, which are fetched at once as well
    with h5py.File(folder / "many.h5", "w", libver=libver) as file:
        # A row fills granules of the mirror, so that no two nodes share one.
        file.create_dataset("x", shape=(2000, 40_000), dtype="u1", chunks=(1, 40_000), maxshape=(None, 40_000))
        for row in range(2000):
            file["x"][row] = row % 251
    server.delay = 0.05
    datamodule = LazyH5DataModule(server.url("many.h5"), x_key="x", staging=staging, val_path=None)
    server.clear()
    datamodule.setup("fit")
    assert server.most_at_once > least
    datamodule.teardown("fit")


def test_a_file_whose_constructor_raised_closes():
    """Python closes it when it is collected, and from 3.13 on shows the errors of that."""
    file = RemoteFile.__new__(RemoteFile)
    file.close()
    assert file.closed


def test_a_tree_that_is_a_circle_ends(server, folder, staging):
    """A node of chunks whose children are itself, as damage or an attacker can make one."""
    width, place = 32, 4096
    node = struct.pack("<4sBBH16x", b"TREE", 1, 3, 64) + (bytes(width) + struct.pack("<Q", place)) * 64 + bytes(width)
    (folder / "circle.h5").write_bytes(bytes(place) + node + bytes(4096))
    objects.use_staging(server.url("circle.h5"), module(server.url("circle.h5"), staging)._options.files.staged)
    with RemoteFile(server.url("circle.h5")) as file:
        assert file.pread(len(node), place) == node


def test_repack_for_object_stores_writes_large_chunks_and_pages(folder, tmp_path):
    x = write(folder / "run.h5")
    with h5py.File(folder / "run.h5", "a") as file:
        file.create_dataset("long", data=np.zeros((3000, 4096), "u1"), chunks=(10, 4096))
    repack_file(folder / "run.h5", tmp_path / "cloud.h5", rows_per_chunk="auto", for_object_store=True)
    with h5py.File(tmp_path / "cloud.h5") as file:
        options = file.id.get_create_plist()
        assert options.get_file_space_strategy()[0] == h5py.h5f.FSPACE_STRATEGY_PAGE
        assert options.get_file_space_page_size() == 1 << 20
        assert file["long"].chunks == (1024, 4096)
        assert np.array_equal(file["x"][:], x)


def test_inspect_says_what_an_epoch_costs(server, folder, x, staging, capsys):
    objects.use_staging(server.url("run.h5"), module(server.url("run.h5"), staging)._options.files.staged)
    report = inspect_file(server.url("run.h5"))
    assert report.n_bytes == os.path.getsize(folder / "run.h5")
    assert report.store.n_requests == CHUNKS + 1  # and the target
    assert report.store.n_bytes >= x.nbytes
    assert inspect_file(folder / "run.h5").store is None
    assert f"at most {CHUNKS + 1} requests" in " ".join(" ".join(file_text(report, None)).split())


def test_an_index_of_no_file_is_an_error(tmp_path):
    with pytest.raises(H5FileError, match=r"nothing\.h5' cannot be opened: No such file or directory"):
        write_index(tmp_path / "nothing.h5")


def test_an_index_that_cannot_be_written_leaves_no_file(folder, x, monkeypatch):
    def fill(path, data):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", fill)
    with pytest.raises(H5FileError, match=r"run\.h5\.index': No space left on device"):
        write_index(folder / "run.h5")
    assert os.listdir(folder) == ["run.h5"]


@pytest.mark.parametrize("libver", [None, "latest"])
def test_with_a_published_index_no_table_of_the_file_is_read(server, folder, staging, libver):
    x = write(folder / "run.h5", libver=libver)
    report = write_index(folder / "run.h5")
    assert report.index == f"{folder / 'run.h5'}.index"
    assert report.n_arrays == 3
    datamodule = module(server.url("run.h5"), staging)
    datamodule.setup("fit")
    samples = [each for each in server.requests if each.method == "GET" and each.name == "run.h5"]
    assert len(samples) <= 18  # those of the identity, and values of a column
    assert sorted(epoch(datamodule, x)) == list(range(ROWS))
    datamodule.teardown("fit")


def test_an_index_of_an_object_is_that_of_the_file(server, folder, x, staging, tmp_path):
    write_index(folder / "run.h5", tmp_path / "a.index")
    write_index(server.url("run.h5"), tmp_path / "b.index")
    assert (tmp_path / "a.index").read_bytes() == (tmp_path / "b.index").read_bytes()


@pytest.mark.parametrize("damage", ["of another file", "cut", "changed"])
def test_an_index_that_does_not_fit_is_not_used(server, folder, staging, damage, caplog):
    write(folder / "run.h5", seed=1)
    write_index(folder / "run.h5")
    index = (folder / "run.h5.index").read_bytes()
    if damage == "of another file":
        x = write(folder / "run.h5", seed=2)
    else:
        x = np.zeros(())
        with h5py.File(folder / "run.h5") as file:
            x = file["x"][:]
        changed = index[:-50] if damage == "cut" else index[:60] + bytes([index[60] ^ 1]) + index[61:]
        (folder / "run.h5.index").write_bytes(changed)
    with caplog.at_level(logging.WARNING, "lightning_h5"):
        datamodule = module(server.url("run.h5"), staging)
        datamodule.setup("fit")
    assert re.search("run.h5.index' (belongs to another state|is no index, or damaged)", caplog.text)
    assert sorted(epoch(datamodule, x)) == list(range(ROWS))
    datamodule.teardown("fit")


# Errors -------------------------------------------------------------------------------------------------------------


def run_with(server, x, staging, fault, epochs=2):
    """Trains with faults; what went wrong, if anything did. Wrong rows are an assertion of their own."""
    datamodule = module(server.url("run.h5"), staging)
    try:
        datamodule.setup("fit")
        server.fault = fault
        for _ in range(epochs):
            assert sorted(epoch(datamodule, x)) == list(range(ROWS))
    except H5FileError as error:
        return error
    finally:
        server.fault = None
        datamodule.teardown("fit")
    return None


PASSING = ["500", "503", "reset", "short"]


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_is_tried_again(server, folder, x, staging, fault):
    """Each request fails once: the end of its range identifies it, also if the rest of an answer is asked for."""
    ends = set()

    def fails_once(number, request):
        is_new = request.stop not in ends
        ends.add(request.stop)
        return fault if is_new else None

    assert run_with(server, x, staging, fails_once) is None
    assert ends


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("500", "cannot be read: GenericError: .*Check the URL, the network and the credentials"),
        ("503", "the store refused requests because there were too many .*Let fewer jobs read at once"),
        ("reset", "cannot be read"),
        ("short", "cannot be read"),
        ("401", r"does not accept the credentials \(401\).*Check that they"),
        ("403", r"denies access \(403\).*Check that the credentials may read it"),
        ("404", r"there is no such object \(404\).*Check bucket and name"),
        ("whole", "does not answer requests for ranges of bytes"),
        ("wrong range", "cannot be read|the server sent bytes"),
        ("etag", "was written to since training was set up"),
        ("hang", "no bytes came for .*Check the network"),
    ],
)
def test_a_fault_that_stays_is_one_clear_error(server, folder, x, staging, fault, text):
    client = {"read_timeout": "300ms"} if fault == "hang" else {}
    staging = staging | {"storage_options": QUICK | {"client_options": client}}
    error = run_with(server, x, staging, lambda number, request: fault)
    assert re.search(f"{re.escape(server.url('run.h5'))}' .*{text}", str(error))
    assert isinstance(error, H5DataChangedError) == (fault == "etag")


def test_access_that_ends_during_training_is_an_error(server, folder, x, staging):
    begun = server.n_gets
    error = run_with(server, x, staging, lambda number, request: "403" if number > begun + 24 else None)
    assert "denies access (403)" in str(error)


def test_an_object_that_changes_during_training_is_noticed(server, folder, x, staging):
    datamodule = module(server.url("run.h5"), staging)
    datamodule.setup("fit")
    write(folder / "run.h5", seed=1)
    with pytest.raises(H5DataChangedError, match=r"run.h5' was written to since training was set up.*start again"):
        epoch(datamodule, x)
    datamodule.teardown("fit")


def test_an_object_that_changes_while_an_answer_is_continued_is_noticed(server, folder, x, staging):
    """The library asks again from the byte that it came to; that the state is another one is within its error."""

    def fault(number, request):
        os.utime(folder / "run.h5", ns=(number, number))  # another ETag, at once
        return "short"

    assert isinstance(run_with(server, x, staging, fault), H5DataChangedError)


def test_an_answer_that_breaks_off_is_asked_for_again_without_etags(server, folder, x, staging):
    server.has_etags = False
    assert run_with(server, x, staging, lambda number, request: "reset" if number % 3 == 0 else None) is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_object_without_etags_is_read_by_the_time_of_its_last_change(server, folder, x, staging, num_workers):
    server.has_etags = False
    datamodule = module(server.url("run.h5"), staging, num_workers=num_workers)
    datamodule.setup("fit")
    assert sorted(epoch(datamodule, x)) == list(range(ROWS))
    datamodule.teardown("fit")


def test_a_url_that_leads_nowhere_is_an_error_before_training(server, folder, staging):
    with pytest.raises(H5FileError, match=r"nothing.h5' cannot be read: there is no such object \(404\)"):
        module(server.url("nothing.h5"), staging).setup("fit")
    (folder / "text.h5").write_text("not HDF5" * 100)
    with pytest.raises(H5FileError, match="as an HDF5 file: it has 800 bytes and begins with b'not HDF5'"):
        module(server.url("text.h5"), staging).setup("fit")
    with pytest.raises(H5FileError, match="names files by a pattern, and a web server has no list"):
        module(server.url("*.h5"), staging).setup("fit")


def test_credentials_are_nowhere(server, folder, x, staging, tmp_path):
    """Neither in checkpoints nor in hyperparameters, texts, errors or the mirrors' folder."""
    secret = "open-sesame-1234"
    options = QUICK | {"client_options": {"default_headers": {"Authorization": f"Bearer {secret}"}}}
    datamodule = module(server.url("run.h5"), staging | {"storage_options": options})
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Seen(), datamodule=datamodule)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert secret.encode() not in (tmp_path / "last.ckpt").read_bytes()
    assert secret not in f"{datamodule.hparams}{datamodule!r}{datamodule._options}"
    for folder_of_mirrors, _, names in os.walk(tmp_path / "mirrors"):
        for name in names:
            assert secret.encode() not in (tmp_path / folder_of_mirrors / name).read_bytes()
    error = stores.explained("s3://b/k", options, RuntimeError(f"bad header {secret}"), "read", "few requests")
    assert secret not in str(error)


def test_without_the_library_the_error_names_the_extra(server, monkeypatch):
    monkeypatch.setattr(stores, "find_spec", lambda name: None)
    with pytest.raises(H5ValueError, match=r"read by the library obstore.*pip install 'lightning-h5\[remote\]'"):
        LazyH5DataModule("s3://bucket-of-this-test/run.h5", x_key="x").setup("fit")


# Resume, processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first_remote", [True, False])
def test_a_checkpoint_made_on_an_object_resumes_on_a_copy_and_the_reverse(
    server, folder, x, staging, tmp_path, is_first_remote
):
    paths = [server.url("run.h5"), str(folder / "run.h5")]
    first, second = paths if is_first_remote else paths[::-1]

    def fit(path, max_steps, ckpt_path=None):
        model, given = Seen(), staging if path.startswith("http") else None
        trainer = quiet_trainer(max_epochs=2, max_steps=max_steps)
        trainer.fit(model, datamodule=module(path, given), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return [number for rows in model.epochs.values() for number in rows]

    whole = fit(second, -1)
    assert fit(first, 21) + fit(second, -1, tmp_path / "last.ckpt") == whole


def test_a_forked_process_reads_through_its_parent(server, folder, x, staging):
    """The library hangs in a process that was forked after it was used."""
    datamodule = module(server.url("run.h5"), staging)
    datamodule.setup("fit")
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)  # OpenMP of GNU hangs in a forked child
            os._exit(0 if sorted(epoch(datamodule, x)) == list(range(ROWS)) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    datamodule.teardown("fit")


@pytest.mark.wide
def test_a_process_ends_in_peace_with_objects_open(server, folder, x, staging):
    """The HDF5 library would call Python after its end, and crash."""
    code = f"""
from lightning_h5 import LazyH5DataModule
datamodule = LazyH5DataModule({server.url("run.h5")!r}, x_key="y", y_key="name", staging={str(staging["dir"])!r})
datamodule.setup("fit")
print(len(next(iter(datamodule.train_dataloader()))[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=False)
    assert (done.returncode, done.stdout.strip().splitlines()[-1]) == (0, "32"), done.stderr


JOB = """
import sys
import h5py, numpy as np, torch
from lightning_h5 import LazyH5DataModule
url, folder, written, workers = sys.argv[1:]
x = torch.from_numpy(np.load(written))
staging = {"dir": folder, "max_bytes": 600_000}
datamodule = LazyH5DataModule(
    url, x_key="x", y_key="y", batch_size=32, num_workers=int(workers), staging=staging, files={"cache_bytes": 0}
)
datamodule.setup("fit")
loader = datamodule.train_dataloader()
print("ready", flush=True)
for epoch in range(1_000_000):
    loader.sampler.set_epoch(epoch)
    seen = []
    for rows, numbers in loader:
        assert torch.equal(rows, x[numbers].to(rows.dtype)), "wrong rows"
        seen += numbers.tolist()
    assert sorted(seen) == list(range(len(x)))
"""


def kill_at_random(server, folder, x, tmp_path, n_rounds, num_workers):
    """Two jobs share a mirror that has room for two thirds of the object; one after the other is killed."""
    np.save(tmp_path / "x.npy", x)
    rng = np.random.default_rng(0)
    arguments = [server.url("run.h5"), str(tmp_path / "mirrors"), str(tmp_path / "x.npy"), str(num_workers)]

    def start():
        return subprocess.Popen(
            [sys.executable, "-c", JOB, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    jobs = [start(), start()]
    try:
        for number in range(n_rounds):
            job = jobs[number % 2]
            assert job.stdout.readline() == "ready\n", job.stderr.read()
            time.sleep(rng.uniform(0, 0.5))
            assert job.poll() is None, job.stderr.read()
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
            jobs[number % 2] = start()
    finally:
        for job in jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            _, errors = job.communicate()
            assert "AssertionError" not in errors
    assert sorted(epoch_of(server, tmp_path, x)) == list(range(ROWS))


def epoch_of(server, tmp_path, x):
    datamodule = module(server.url("run.h5"), {"dir": tmp_path / "mirrors", "max_bytes": 600_000})
    datamodule.setup("fit")
    try:
        return epoch(datamodule, x)
    finally:
        datamodule.teardown("fit")


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
def test_jobs_that_are_killed_at_any_moment_leave_nothing_wrong(server, folder, x, tmp_path, num_workers):
    kill_at_random(server, folder, x, tmp_path, 4, num_workers)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_jobs_that_are_killed_at_more_moments_leave_nothing_wrong(server, folder, x, tmp_path, num_workers):
    kill_at_random(server, folder, x, tmp_path, 100, num_workers)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_small_disk_that_is_full_costs_requests_and_no_rows(server, folder, tmp_path, kind, caplog):
    """64 MiB, of which another program takes all but 2 after `setup`."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (600, 10_000), dtype="u1")
    with h5py.File(folder / "run.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(4, 10_000))
        file["y"] = np.arange(len(x))
    disk = tmp_path / "disk"
    disk.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    else:
        image = tmp_path / "image"
        with open(image, "wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=False, capture_output=True)
        command = ["mount", "-o", "loop", str(image), str(disk)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip(f"no {kind} can be mounted here")
    try:
        datamodule = module(server.url("run.h5"), {"dir": disk}, files={"cache_bytes": 0})
        datamodule.setup("fit")
        free = os.statvfs(disk)
        (disk / "other").write_bytes(bytes(free.f_bavail * free.f_frsize - (2 << 20)))
        with caplog.at_level(logging.WARNING, "lightning_h5"):
            for _ in range(2):
                assert sorted(epoch(datamodule, x)) == list(range(len(x)))
        assert caplog.text.count("No space left on device") == 1
        datamodule.teardown("fit")
        process_pool().close()
    finally:
        policy._close_copies()  # the folder's own files
        subprocess.run(["umount", str(disk)], check=True)


# Other schemes ------------------------------------------------------------------------------------------------------


def test_other_schemes_are_read_by_fsspec(folder, x, staging):
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.pipe_file("/runs/run.h5", (folder / "run.h5").read_bytes())
    url = "memory://runs/run.h5"
    staging = staging | {"storage_options": None}
    try:
        for path in (url, "memory://runs/*.h5"):
            datamodule = module(path, staging, num_workers=2)
            datamodule.setup("fit")
            assert sorted(epoch(datamodule, x)) == list(range(ROWS))
            datamodule.teardown("fit")
        datamodule = module(url, staging | {"dir": staging["dir"] / "others"})
        datamodule.setup("fit")
        files.pipe_file("/runs/run.h5", b"something else")
        with pytest.raises(H5DataChangedError, match=r"run.h5' was written to since .*it had .* and has 14 bytes"):
            epoch(datamodule, x)
        datamodule.teardown("fit")
        with pytest.raises(H5FileError, match=r"nothing.h5' cannot be read: there is no such object \(404\)"):
            module("memory://runs/nothing.h5", staging).setup("fit")
    finally:
        files.rm("/runs", recursive=True)
    with pytest.raises(H5ValueError, match=r"'no-such-scheme://a' cannot be read: Protocol not known"):
        module("no-such-scheme://a/b.h5", staging).setup("fit")
