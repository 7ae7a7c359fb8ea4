"""Objects by the protocol of S3: patterns, folders, conditions, missing names, against a server with that protocol."""

import h5py
import numpy as np
import pytest
from s3_server import BUCKET, moto_server, s3_server

from lightning_h5 import H5DataChangedError, H5FileError, LazyH5DataModule
from lightning_h5.staging import objects

pytest.importorskip("obstore")
if moto_server() is None:
    pytest.skip("moto is not installed", allow_module_level=True)

ROWS = 40


@pytest.fixture(scope="module")
def options():
    with s3_server() as found:
        yield found


@pytest.fixture
def put(options, tmp_path):
    from obstore.store import S3Store

    for kept in (objects._recent, objects._absent, objects._staging):
        kept.clear()
    store = S3Store(BUCKET, client_options={"allow_http": True}, **options)

    def put_file(name, number):
        with h5py.File(tmp_path / "file.h5", "w") as file:
            file["x"] = np.arange(ROWS) + 1000 * number
        store.put(name, tmp_path / "file.h5")

    return put_file


@pytest.fixture
def module(options, tmp_path):
    def make(path, **more):
        staging = {"dir": tmp_path / "mirrors", "storage_options": options | more}
        return LazyH5DataModule(path, x_key="x", batch_size=8, shuffle=False, staging=staging)

    return make


def rows(datamodule):
    datamodule.setup("fit")
    found = [int(row) for batch in datamodule.train_dataloader() for row in batch]
    datamodule.teardown("fit")
    return found


def expected(*numbers):
    return [row + 1000 * number for number in numbers for row in range(ROWS)]


def test_patterns_and_folders_name_objects_in_order(put, module):
    for number, name in enumerate(["a/run1.h5", "a/run2.h5", "a/b/run3.h5", "a/other.hdf5", "a/run1.txt"]):
        put(f"names/{name}", number)
    root = f"s3://{BUCKET}/names"
    assert rows(module(f"{root}/a/run*.h5")) == expected(0, 1)
    assert rows(module(f"{root}/a/run[2-9].h5")) == expected(1)
    assert rows(module(f"{root}/**/run?.h5")) == expected(2, 0, 1)
    assert rows(module(f"{root}/a/")) == expected(3, 0, 1)
    assert rows(module([f"{root}/a/run2.h5", f"{root}/a/run1.h5"])) == expected(1, 0)


def test_names_that_are_not_there_are_errors_before_training(put, module):
    put("errors/run1.h5", 1)
    root = f"s3://{BUCKET}/errors"
    with pytest.raises(H5FileError, match=r"train_path='s3://.*nope\*.h5' matches no object; the store has .*run1.h5"):
        module(f"{root}/nope*.h5").setup("fit")
    with pytest.raises(H5FileError, match=r"nope.h5' cannot be read: there is no such object \(404\)"):
        module(f"{root}/nope.h5").setup("fit")
    with pytest.raises(H5FileError, match=r"'s3://no-such-bucket/run1.h5' cannot be read: there is no such object"):
        module("s3://no-such-bucket/run1.h5").setup("fit")
    with pytest.raises(H5FileError, match=r"has no files \*.h5, .*; the store has nothing that begins so"):
        module(f"s3://{BUCKET}/empty/").setup("fit")


def test_an_object_that_was_written_again_is_noticed(put, module):
    put("changes/run.h5", 1)
    datamodule = module(f"s3://{BUCKET}/changes/run.h5")
    datamodule.setup("fit")
    put("changes/run.h5", 2)
    # The mirror has all of this small file from `setup` on; its rows are those of the first state.
    assert [int(row) for batch in datamodule.train_dataloader() for row in batch] == expected(1)
    datamodule.teardown("fit")
    objects._recent.clear()
    assert rows(module(f"s3://{BUCKET}/changes/run.h5")) == expected(2)


def test_a_state_that_is_gone_raises(put, module, options):
    put("gone/run.h5", 1)
    url = f"s3://{BUCKET}/gone/run.h5"
    objects.use_staging(url, module(url)._options.files.staged)
    status = objects.object_status(url)
    put("gone/run.h5", 2)
    with pytest.raises(H5DataChangedError, match="was written to since training was set up"):
        objects.ask_store("read", url, 0, 100, status, options)
