"""Lists of numbers, and bytes that have names of their own: each row has its own length."""

import io

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightning_h5 import CombinedHDF5DataModule, H5ValueError, LazyH5DataModule, RankCachedH5DataModule, inspect_file

MODULES = [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule]


def keys_of(module, **fields):
    """Return the arguments that name fields."""
    if module is CombinedHDF5DataModule:
        return {"fields": fields}
    return {"x_key": fields}


def batches_of(datamodule):
    datamodule.setup("fit")
    yield from datamodule.train_dataloader()
    datamodule.teardown("fit")


def write_lists(path, rows, dtype):
    with h5py.File(path, "w") as file:
        lists = file.create_dataset("hits", (len(rows),), h5py.vlen_dtype(np.dtype(dtype)))
        for at, row in enumerate(rows):
            if len(row):  # a row that was never written is empty
                lists[at] = np.array(row, dtype)
        file["label"] = np.arange(len(rows))


@pytest.mark.parametrize("module", MODULES)
@given(
    rows=st.lists(st.lists(st.integers(0, 100), max_size=6), min_size=1, max_size=7),
    dtype=st.sampled_from(["<f4", ">f4", "f8", "i8", ">i2", "u1", "u2", "?"]),
)
def test_rows_of_lists_come_as_h5py_has_them(tmp_path_factory, module, rows, dtype):
    path = str(tmp_path_factory.mktemp("lists") / "lists.h5")
    write_lists(path, rows, dtype)
    with h5py.File(path) as file:
        expected = [row.astype(row.dtype.newbyteorder("=")) for row in file["hits"][:]]
    common = {"shuffle": False, "batch_size": 3, "x_dtype": None, **keys_of(module, hits="hits", label="label")}
    listed = [row for batch in batches_of(module(path, collate_fn="list", **common)) for row in batch["hits"]]
    assert [row.numpy().dtype for row in listed] == [row.dtype for row in expected]
    assert [row.tolist() for row in listed] == [row.tolist() for row in expected]
    at = 0
    for batch in batches_of(module(path, collate_fn="pad", **common)):
        lengths = (
            batch["length"].tolist()
            if "length" in batch
            else [len(row) for row in expected[at : at + len(batch["hits"])]]
        )
        assert ("length" in batch) == (dtype != "u1"), "batches of bytes have none"
        for row, length in zip(batch["hits"], lengths, strict=True):
            assert row[:length].tolist() == expected[at].tolist()
            assert not row[length:].any()
            at += 1
    assert at == len(rows)


@pytest.mark.parametrize("module", MODULES)
def test_windows_of_lists_are_lists_or_an_error(tmp_path, module):
    path = str(tmp_path / "lists.h5")
    write_lists(path, [range(at) for at in range(6)], "f4")
    common = {"window": 2, "shuffle": False, "batch_size": 2, **keys_of(module, hits="hits")}
    batch = next(batches_of(module(path, collate_fn="list", **common)))
    assert [[len(row) for row in window] for window in batch["hits"]] == [[0, 1], [2, 3]]
    for collate in ("pad", None):
        with pytest.raises(H5ValueError, match="collate_fn='list'"):
            next(batches_of(module(path, collate_fn=collate, **common)))


def picture(at):
    pixels = np.random.default_rng(at).integers(0, 255, (4 + at % 3, 5, 3), "u1")
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue(), pixels


def write_opaque(file, name, data):
    file[name] = np.void(data)


def write_string(file, name, data):
    file.create_dataset(name, data=np.bytes_(data))


def write_list(file, name, data):
    file.create_dataset(name, (), h5py.vlen_dtype("u1"))[()] = np.frombuffer(data, "u1")


def write_bytes(file, name, data):
    file[name] = np.frombuffer(data, "u1")


def write_chunks(file, name, data):
    file.create_dataset(name, data=np.frombuffer(data, "u1"), chunks=(32,), compression="gzip")


WRITERS = [write_opaque, write_string, write_list, write_bytes, write_chunks]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_bytes_with_names_of_their_own_decode_as_images(tmp_path, module, write, libver):
    path = str(tmp_path / "pictures.h5")
    with h5py.File(path, "w", libver=libver, userblock_size=512) as file:
        for at in range(9):
            write(file, f"picture_{at}", picture(at)[0])
    common = {"sample": "segment", "collate_fn": "list", "shuffle": False, "batch_size": 2}
    datamodule = module(path, decode={"image": "image"}, **common, **keys_of(module, image="*"))
    images = [image for batch in batches_of(datamodule) for image in batch["image"]]
    for at, image in enumerate(images):
        assert torch.equal(image, torch.from_numpy(picture(at)[1]).movedim(-1, 0))
    assert len(images) == 9


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_opaque_values_beside_labels_come_as_bytes_to_functions_and_as_tensors(tmp_path, module, num_workers):
    path = str(tmp_path / "blobs.h5")
    blobs = [bytes(range(1, at + 2)) for at in range(7)]
    with h5py.File(path, "w") as file:
        for at, blob in enumerate(blobs):
            file[f"event_{at}/blob"] = np.void(blob)
            file[f"event_{at}/label"] = at
    common = {"segments": "event_*", "shuffle": False, "batch_size": 7, "num_workers": num_workers}
    common |= keys_of(module, blob="blob", label="label")
    (batch,) = batches_of(module(path, collate_fn="pad", **common))
    assert batch["length"].tolist() == [len(blob) for blob in blobs]
    assert [bytes(row[:n].tolist()) for row, n in zip(batch["blob"], batch["length"], strict=True)] == blobs
    assert batch["label"].tolist() == list(range(7))
    (batch,) = batches_of(module(path, decode={"blob": sum_of_bytes}, **common))
    assert batch["blob"].tolist() == [sum(blob) for blob in blobs]


def sum_of_bytes(stored: bytes) -> int:
    assert isinstance(stored, bytes)
    return sum(stored)


def test_setup_reads_and_keeps_no_opaque_value(tmp_path):
    """Kaggle's ISIC 2024 has 401,059 of them in a file."""
    path = str(tmp_path / "many.h5")
    with h5py.File(path, "w") as file:
        for at in range(50):
            file[f"image_{at}"] = np.void(bytes([at + 1]) * (1000 + at))
    datamodule = LazyH5DataModule(path, x_key={"image": "*"}, sample="segment", collate_fn="list")
    dataset = datamodule.build_dataset("train")
    table = dataset.table.layouts.stored.table
    assert dataset.table.n_samples == 50
    assert not table.values
    assert len(table.others) <= 2, "their sizes are all that tells them apart"
    assert [len(dataset[at]["image"]) for at in (0, 49)] == [1000, 1049]
    dataset.close()


@pytest.mark.parametrize("module", MODULES)
def test_numbers_with_names_of_their_own_are_samples(tmp_path, module):
    path = str(tmp_path / "numbers.h5")
    with h5py.File(path, "w") as file:
        for at in range(5):
            file[f"energy_{at}"] = at / 2
    datamodule = module(path, sample="segment", shuffle=False, batch_size=5, **keys_of(module, energy="*"))
    (batch,) = batches_of(datamodule)
    assert batch["energy"].tolist() == [0, 0.5, 1, 1.5, 2]


def test_inspect_suggests_lists_and_named_images_as_the_input(tmp_path):
    path = str(tmp_path / "lists.h5")
    write_lists(path, [range(at) for at in range(20)], "f4")
    settings = inspect_file(path).advice.settings
    assert settings.items() >= {"x_key": "hits", "y_key": "label", "collate_fn": "pad"}.items()
    named = str(tmp_path / "named.h5")
    with h5py.File(named, "w") as file:
        for at in range(12):
            file[f"images/{at}"] = np.void(picture(at)[0])
    settings = inspect_file(named).advice.settings
    assert settings.items() >= {"x_key": {"image": "images/*"}, "decode": {"image": "image"}}.items()
    assert next(batches_of(LazyH5DataModule(**settings)))["image"]
