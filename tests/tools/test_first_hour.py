"""What a newcomer meets in the first hour: the suggested call, and what the other verbs do with the same file."""

import h5py
import numpy as np
import pytest
import torch

import lightning_h5
from lightning_h5.cli import main
from lightning_h5.tools.inspect import inspect_file, inspect_folder
from lightning_h5.tools.repack import repack_file
from lightning_h5.tools.stats import compute_stats

RNG = np.random.default_rng(0)


def module_of(advice):
    """The data module of the suggested call, set up."""
    module = eval(advice.python, {advice.datamodule: getattr(lightning_h5, advice.datamodule)})
    module.setup("fit")
    return module


def write_table(path):
    """A table with a column of text, as a frame of pandas in table format has it, and PyTables' index of it."""
    rows = np.zeros(100, [("index", "i8"), ("a", "f8"), ("b", "f8"), ("label", "S3")])
    rows["label"], rows["a"] = np.array(["cat", "dog"])[np.arange(100) % 2], RNG.normal(size=100)
    with h5py.File(path, "w") as file:
        file.create_dataset("df/table", data=rows, chunks=(50,), maxshape=(None,))
        file.create_dataset("df/_i_table/a/sortedLR", data=np.sort(rows["a"]), chunks=(10,), maxshape=(None,))


def test_the_index_of_a_table_of_pytables_keeps_its_chunks_in_a_copy(tmp_path):
    write_table(tmp_path / "a.h5")
    repack_file(tmp_path / "a.h5", tmp_path / "b.h5", rows_per_chunk=25, compression="gzip")
    with h5py.File(tmp_path / "b.h5") as copy:
        assert copy["df/table"].chunks == (25,)
        assert copy["df/_i_table/a/sortedLR"].chunks == (10,)
        assert copy["df/_i_table/a/sortedLR"].compression is None
    with pytest.raises(lightning_h5.H5ValueError, match="its index of PyTables would refer to other rows"):
        repack_file(tmp_path / "a.h5", tmp_path / "c.h5", shuffle_rows=1, shuffle_keys=["df/table"])
    with pytest.raises(lightning_h5.H5FileError, match="is a directory, but repack copies one file at a time"):
        repack_file(tmp_path, tmp_path / "c.h5")


def test_statistics_are_of_the_input_beside_a_target_of_text(tmp_path):
    write_table(tmp_path / "a.h5")
    assert [array.key for array in compute_stats(tmp_path / "a.h5").arrays] == ["df/table/a", "df/table/b"]


def test_labels_in_a_table_beside_recordings_are_class_numbers_and_patients_stay_together(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    lines = ["recording,patient,diagnosis"]
    for number in range(30):
        with h5py.File(f"rec_{number}.h5", "w") as file:
            file["ecg"] = RNG.normal(size=(2, 600 + number)).astype("f4")
        lines.append(f"rec_{number},p{number // 3},{('normal', 'afib')[number % 2]}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    advice = inspect_folder(["*.h5"]).example.advice
    assert advice.settings["y_key"] == "table/diagnosis"
    assert advice.settings["split"] == {"val_fraction": 0.1, "group_key": "table/patient"}
    module = module_of(advice)
    x, y = next(iter(module.train_dataloader()))
    assert (x.shape[1:], y.dtype) == ((2, 256), torch.int64)
    assert module.categories["table/diagnosis"] == ("afib", "normal")


def test_trials_of_matlab_are_samples_though_other_axes_are_longer(tmp_path):
    with h5py.File(tmp_path / "a.mat", "w") as file:
        file["X"], file["y"] = RNG.normal(size=(250, 4, 200)), RNG.integers(1, 4, (1, 200)).astype("f8")
        file["X"].attrs["MATLAB_class"] = file["y"].attrs["MATLAB_class"] = np.bytes_("double")
    x, y = next(iter(module_of(inspect_file(tmp_path / "a.mat").advice).train_dataloader()))
    assert (x.shape[1:], y.shape, y.dtype) == ((250, 4), x.shape[:1], torch.int64)


def test_images_with_their_channels_last_are_pointed_out(make_h5):
    images = RNG.integers(0, 255, (40, 16, 16, 3)).astype("u1")
    reasons = " ".join(inspect_file(make_h5(image=images)).advice.reasons)
    assert "(16, 16, 3) have the channels last" in reasons
    assert "channels last" not in " ".join(inspect_file(make_h5(image=images[..., 0])).advice.reasons)


def test_a_copy_of_many_arrays_shows_those_that_were_written_again(make_h5, tmp_path, capsys):
    arrays = {f"a{number}": np.arange(9) for number in range(40)}
    path = make_h5(arrays)
    with h5py.File(path, "a") as file:
        file.create_dataset("x", data=np.zeros((64, 8)), chunks=(1, 8))
    with pytest.raises(SystemExit):
        main(["repack", str(path), str(tmp_path / "copy.h5"), "--keys", "x"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("x ")
    assert lines[3] == "... and 40 other arrays, smaller or as before; --json has all"


def test_files_with_nothing_in_common_are_no_data_set(tmp_path):
    for name in "abc":
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file[name] = np.zeros((40, 3), "f4")
    advice = inspect_folder(tmp_path).example.advice
    assert advice.datamodule is None
    assert "have different arrays and are not one dataset" in advice.reasons[0]
    with h5py.File(tmp_path / "b.h5", "a") as file:
        file["a"] = np.zeros((40, 3), "f4")
    assert inspect_folder(tmp_path).example.advice.datamodule is not None


def test_a_missing_file_is_answered_with_those_that_there_are(make_h5):
    path = make_h5(x=np.zeros(3))
    with pytest.raises(lightning_h5.H5FileError, match=r"does not exist; .* has the HDF5 file"):
        inspect_file(f"{path}.hdf5")
