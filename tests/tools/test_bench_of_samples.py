"""``bench_file`` measures windows, segments, patches and sparse rows as ``inspect`` recognizes them."""

import h5py
import numpy as np
import pytest

from lightning_h5 import inspect_file, inspect_folder
from lightning_h5.tools.bench import _samples_in, bench_file

FAST = {"seconds": 0.01, "rounds": 1, "num_workers": 0}
RNG = np.random.default_rng(0)


def write_windows(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        for number in range(12):
            n = 20 + number
            file[f"data/demo_{number}/actions"] = RNG.normal(size=(n, 2)).astype("f4")
            file[f"data/demo_{number}/obs/image"] = np.zeros((n, 4, 4), "u1")


def write_recordings(folder):
    for number in range(6):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["eeg"] = RNG.normal(size=(4, 600 + number)).astype("f4")


def write_segments(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        for number in range(30):
            file[f"features/slide_{number}"] = RNG.normal(size=(5 + number, 8)).astype("f4")


def write_pictures(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        for number in range(20):
            file[f"cell_{number}/image"] = np.zeros((20 + number, 24), "u1")


def write_patches(folder):
    for number in range(2):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["raw"], file["label"] = np.zeros((40, 48, 52), "f4"), np.zeros((40, 48, 52), "u1")


def write_sparse(folder):
    dense = RNG.poisson(0.3, (60, 20)).astype("f4")
    rows, columns = np.nonzero(dense)
    with h5py.File(folder / "a.h5", "w") as file:
        group = file.create_group("X")
        group.attrs["shape"] = dense.shape
        group["data"], group["indices"] = dense[rows, columns], columns.astype("i4")
        group["indptr"] = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=60))])


FILES = (write_windows, write_recordings, write_segments, write_pictures, write_patches, write_sparse)


@pytest.mark.parametrize("write", FILES, ids=lambda write: write.__name__)
def test_the_suggested_samples_are_measured_with_the_suggested_settings(write, tmp_path):
    write(tmp_path)
    files = sorted(tmp_path.glob("*.h5"))
    advice = inspect_file(files[0]).advice if len(files) == 1 else inspect_folder(tmp_path).example.advice
    report = bench_file(files[0] if len(files) == 1 else tmp_path, **FAST)
    assert report.unit == "sample"
    assert report.n_rows == advice.cost.n_samples
    assert report.chosen.rows_per_second > 0
    settings = {name: value for name, value in advice.settings.items() if name != "train_path"}
    assert all(report.chosen.settings[name] == value for name, value in settings.items())
    has_plain = write is not write_sparse
    assert any(result.datamodule is None for result in report.results) == has_plain
    assert ("plain h5py" in report.left_out) != has_plain


def test_samples_of_a_batch_of_lists_are_counted():
    ragged = [np.zeros((3, 2)), np.zeros((9, 2))]
    assert _samples_in(ragged, is_list=True) == 2
    assert _samples_in((ragged, np.zeros(2)), is_list=True) == 2
    assert _samples_in({"x": ragged}, is_list=True) == 2
    assert _samples_in((np.zeros((5, 2)), np.zeros(5)), is_list=False) == 5


def test_arrays_of_each_split_are_measured_by_the_training_rows(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for split, n in (("train", 60), ("test", 20)):
            file[f"{split}_x"], file[f"{split}_y"] = np.zeros((n, 8, 8), "f4"), np.arange(n) % 2
    report = bench_file(tmp_path / "a.h5", **FAST)
    assert (report.n_rows, report.chosen.settings["x_key"]) == (60, "train_x")
