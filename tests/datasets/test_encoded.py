"""Images come as their own library decodes them, from bytes of any form; damaged ones are errors that name the row."""

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_models import Recorder, SaveOnException, quiet_trainer, together
from tiers import examples

from lightning_h5 import (
    CombinedHDF5DataModule,
    CombinedHDF5Dataset,
    H5CorruptError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
)

imagecodecs = pytest.importorskip("imagecodecs")
N = 24


def encoded(pixels: Any, form: str) -> bytes:
    """An image as Pillow writes it."""
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.fromarray(pixels).save(out, form)
    return out.getvalue()


@pytest.fixture(scope="module")
def pictures() -> Any:
    rng = np.random.default_rng(0)
    return [np.kron(rng.integers(0, 256, (4, 5, 3)), np.ones((8, 8, 1))).astype("u1") for _ in range(N)]


def padded(files: list[bytes]) -> Any:
    made = np.zeros((len(files), max(map(len, files))), "u1")
    for row, data in zip(made, files, strict=True):
        row[: len(data)] = np.frombuffer(data, "u1")
    return made


@pytest.fixture
def path(tmp_path: Path, pictures: Any) -> str:
    jpeg, png = ([encoded(one, form) for one in pictures] for form in ("JPEG", "PNG"))
    with h5py.File(tmp_path / "pictures.h5", "w") as file:
        for name, files in (("jpeg", jpeg), ("png", png)):
            array = file.create_dataset(name, (N,), h5py.vlen_dtype("u1"), chunks=(5,))
            for row, data in enumerate(files):
                array[row] = np.frombuffer(data, "u1")
        file.create_dataset("padded", data=padded(jpeg), chunks=(1, padded(jpeg).shape[1]), compression="gzip")
        file["opaque"] = padded(png).view(f"V{padded(png).shape[1]}")[:, 0]
        file.create_dataset("strings", data=np.array(png), chunks=(5,), compression="gzip")  # padded to one length
        file["labels"] = np.arange(N)
    return str(tmp_path / "pictures.h5")


def expected_of(path: str, key: str, pictures: Any) -> Any:
    if key in ("png", "opaque", "strings"):
        return np.stack(pictures).transpose(0, 3, 1, 2)
    with h5py.File(path) as file:
        return np.stack([imagecodecs.jpeg8_decode(one.tobytes()) for one in file["jpeg"]]).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("key", ["jpeg", "png", "padded", "opaque", "strings"])
@pytest.mark.parametrize("make", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
def test_images_of_any_form_are_decoded(path: str, pictures: Any, make: Any, key: str, num_workers: int) -> None:
    keys = {"fields": [key, "labels"]} if make is CombinedHDF5DataModule else {"x_key": {key: key, "labels": "labels"}}
    module = make(path, **keys, decode={key: "image"}, batch_size=10, num_workers=num_workers)
    module.setup("fit")
    expected, seen = expected_of(path, key, pictures), []
    for batch in module.train_dataloader():
        assert batch[key].dtype == torch.uint8
        np.testing.assert_array_equal(batch[key].numpy(), expected[batch["labels"].numpy()])
        seen += batch["labels"].tolist()
    assert sorted(seen) == list(range(N))
    module.teardown("fit")


def test_pixels_are_close_to_those_of_pillow(path: str, pictures: Any) -> None:
    batch = H5LazyDataset(path, "jpeg", decode={"jpeg": "image"}).read_batch(range(N)).numpy()
    difference = batch.astype(int) - np.stack(pictures).transpose(0, 3, 1, 2)
    assert np.abs(difference).mean() < 12


def test_windows_of_images_have_an_axis_of_steps(tmp_path: Path, pictures: Any) -> None:
    files = [encoded(one, "PNG") for one in pictures]
    with h5py.File(tmp_path / "episodes.h5", "w") as file:
        for number in range(2):
            group = file.create_group(f"data/demo_{number}")
            group["image"] = padded(files)[12 * number : 12 * number + 12]
            group["action"] = np.arange(12.0) + 12 * number
    expected = np.stack(pictures).transpose(0, 3, 1, 2)
    for make in (H5LazyDataset, RankMemCachedH5Dataset):
        dataset = make(
            str(tmp_path / "episodes.h5"),
            {"image": "image", "action": "action"},
            segments="data/*",
            window={"image": [-1, 1], "action": 0},
            decode={"image": "image"},
            x_dtype=None,
        )
        batch = dataset.read_batch([0, 11, 12])
        steps = batch["action"].int().numpy()
        np.testing.assert_array_equal(batch["image"].numpy(), np.stack([expected[steps - 1], expected[steps]], axis=1))


def test_bytes_without_a_decoder_are_lists(path: str) -> None:
    with h5py.File(path) as file:
        stored = [one.tobytes() for one in file["jpeg"][:3]]
    dataset = H5LazyDataset(path, "jpeg", collate_fn="list")
    assert [bytes(one.numpy()) for one in dataset.read_batch(range(3))] == stored
    batch = H5LazyDataset(path, "jpeg", collate_fn="pad").read_batch(range(3))
    assert batch.shape == (3, max(map(len, stored)))


def test_functions_decode_what_is_stored(path: str) -> None:
    dataset = H5LazyDataset(path, "jpeg", "padded", decode={"jpeg": len, "padded": lambda row: row[:2].astype("i4")})
    x, y = dataset.read_batch([4, 2])
    with h5py.File(path) as file:
        assert x.tolist() == [len(file["jpeg"][4]), len(file["jpeg"][2])]
    assert y.tolist() == [[255, 216]] * 2


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "neither JPEG nor PNG"), (b"GIF89a", "neither JPEG nor PNG"), ("half", "has no end"), ("short", "row 7")],
)
def test_a_damaged_image_names_its_row(path: str, data: Any, says: str) -> None:
    with h5py.File(path, "a") as file:
        whole = file["jpeg"][7].tobytes()
        key = "png" if data == "short" else "jpeg"
        cut = {"half": whole[:-30], "short": file["png"][7].tobytes()[:-30]}.get(data, data)
        file[key][7] = np.frombuffer(cut, "u1")
    for make in (H5LazyDataset, RankMemCachedH5Dataset):
        with pytest.raises(H5CorruptError, match=f"row 7 of '{key}'.*") as error:
            make(path, key, decode={key: "image"}, x_dtype=None).read_batch(range(N))
        assert says in str(error.value)


def test_an_error_of_a_function_names_the_row(path: str) -> None:
    def broken(row: Any) -> Any:
        raise KeyError("no such thing")

    with pytest.raises(H5CorruptError, match=r"row 3 of 'jpeg'.*no such thing"):
        H5LazyDataset(path, "jpeg", decode={"jpeg": broken}).read_batch([3])


def test_numbers_are_no_images(path: str) -> None:
    with pytest.raises(H5ValueError, match="not bytes"):
        H5LazyDataset(path, "labels", decode={"labels": "image"})


def test_a_run_on_images_resumes_in_the_middle(path: str, tmp_path: Path) -> None:
    def module() -> LazyH5DataModule:
        return LazyH5DataModule(
            path, x_key={"image": "jpeg"}, decode={"image": "image"}, batch_size=5, with_index=True, seed=3
        )

    whole, broken, resumed = Recorder(), Recorder(fail_at=(1, 1)), Recorder()
    quiet_trainer(max_epochs=3).fit(whole, datamodule=module())
    stopped = quiet_trainer(max_epochs=3, callbacks=[SaveOnException(tmp_path)])
    with pytest.raises(RuntimeError, match="stop here"):
        stopped.fit(broken, datamodule=module())
    quiet_trainer(max_epochs=3).fit(resumed, datamodule=module(), ckpt_path=tmp_path / "exception.ckpt")
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows


def test_rows_that_were_used_last_are_not_changed_by_transforms(path: str) -> None:
    dataset = CombinedHDF5Dataset(path, ["png"], decode={"png": "image"}, cache_size=N)
    first = dataset.read_batch([2])["png"].clone()
    dataset.read_batch([2])["png"].zero_()
    dataset[2]["png"].zero_()
    assert torch.equal(dataset.read_batch([2])["png"], first)


@pytest.mark.parametrize("at", [0, 8, 16])
def test_a_damaged_heap_is_an_error_that_names_the_row(path: str, at: int) -> None:
    content = Path(path).read_bytes()
    first = content.index(b"GCOL")
    Path(path).write_bytes(content[: first + at] + bytes(8) + content[first + at + 8 :])
    with pytest.raises(H5CorruptError, match="are not in the heap at byte"):
        H5LazyDataset(path, ["jpeg", "png"]).read_batch(range(N))


@pytest.mark.parametrize("userblock", [0, 512])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_lists_of_bytes_are_those_that_h5py_reads(tmp_path: Path, userblock: int, libver: str) -> None:
    rng = np.random.default_rng(1)
    with h5py.File(tmp_path / "lists.h5", "w", userblock_size=userblock, libver=libver) as file:
        for name, options in (("plain", {}), ("gzip", {"chunks": (7,), "compression": "gzip"})):
            array = file.create_dataset(name, (50,), h5py.vlen_dtype("u1"), **options)
            for row in range(0, 50, 2):  # the others were never written
                array[row] = rng.integers(0, 256, rng.choice([0, 1, 9, 5000, 70_000]), dtype="u1")
    with h5py.File(tmp_path / "lists.h5") as file:
        expected = {name: [row.tobytes() for row in file[name]] for name in file}
    rows = [49, 3, 3, 0, *range(50)]
    for name in ("plain", "gzip"):
        batch = H5LazyDataset(str(tmp_path / "lists.h5"), name, collate_fn="list").read_batch(rows)
        assert [one.numpy().tobytes() for one in batch] == [expected[name][row] for row in rows]


SHAPES = [(40, 48, 3), (48, 40, 3), (40, 48), (40, 48, 4), (1, 40, 3), (40, 3), (200, 300, 3)]


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.sampled_from(range(len(SHAPES))), st.integers(1, 6)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([0, 5]),
)
def test_images_are_their_own_whatever_shapes_came_before(
    tmp_path_factory: Any, runs: list[tuple[int, int]], n_files: int, cache_size: int
) -> None:
    folder, rng = tmp_path_factory.mktemp("shapes"), np.random.default_rng(0)
    shapes = [SHAPES[number] for number, n in runs for _ in range(n)] * n_files
    wanted = [rng.integers(0, 256, shape).astype("u1") for shape in shapes]
    paths = [str(folder / f"{number}.h5") for number in range(n_files)]
    for number, path in enumerate(paths):
        some = wanted[number * len(wanted) // n_files : (number + 1) * len(wanted) // n_files]
        with h5py.File(path, "w") as file:
            array = file.create_dataset("image", (len(some),), h5py.vlen_dtype("u1"))
            for row, pixels in enumerate(some):
                array[row] = np.frombuffer(imagecodecs.png_encode(pixels), "u1")
    dataset = CombinedHDF5Dataset(paths, ["image"], decode={"image": "image"}, cache_size=cache_size, collate_fn="list")
    batches, rows = [], []
    for size in (1, 2, 3, 4):
        order = [*range(len(wanted)), *rng.integers(0, len(wanted), 6).tolist()]
        for at in range(0, len(order), size):
            rows.append(order[at : at + size])
            batches.append(dataset.read_batch(rows[-1])["image"])
    for batch, some in zip(batches, rows, strict=True):  # also those that were read first, and kept
        for image, row in zip(batch, some, strict=True):
            pixels = wanted[row] if wanted[row].ndim == 3 else wanted[row][..., None]
            np.testing.assert_array_equal(image.numpy(), pixels.transpose(2, 0, 1))
