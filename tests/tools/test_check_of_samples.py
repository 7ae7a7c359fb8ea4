"""``check`` recognizes samples as ``inspect`` does: what is no damage is no problem."""

import h5py
import numpy as np
import pytest

from lightning_h5 import check_files


def write(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name.replace("__", "/")] = values


def kinds_of(report):
    return [(problem.severity, problem.kind) for problem in (*report.errors, *report.warnings)]


def test_recordings_of_different_lengths_are_no_errors(tmp_path):
    for number in range(6):
        write(tmp_path / f"{number}.h5", eeg=np.random.default_rng(number).normal(size=(4, 600 + number)))
    assert kinds_of(check_files(tmp_path)) == []


def test_a_file_that_differs_from_most_is_an_error_still(tmp_path):
    for number in range(5):
        values = np.random.default_rng(number).normal(size=(10, 3 + (number == 2)))
        write(tmp_path / f"{number}.h5", x=values)
    assert kinds_of(check_files(tmp_path)) == [("error", "schema")]


def test_another_dtype_among_several_lengths_is_an_error(tmp_path):
    for number in range(6):
        values = np.random.default_rng(number).normal(size=(4, 600 + number))
        write(tmp_path / f"{number}.h5", eeg=values.astype("f4" if number == 3 else "f8"))
    assert ("error", "schema") in kinds_of(check_files(tmp_path))


def test_files_of_several_kinds_are_one_sentence(tmp_path):
    for number in range(5):
        rng = np.random.default_rng(number)
        write(tmp_path / f"signals{number}.h5", eeg=rng.normal(size=(50, 3)), time=rng.normal(size=50))
        write(tmp_path / f"labels{number}.h5", stage=rng.integers(0, 5, 50), rater=rng.integers(0, 9, 50))
    report = check_files(tmp_path)
    assert kinds_of(report) == [("warning", "kinds")]
    assert "2 kinds" in report.warnings[0].text
    assert "'stage'" in report.warnings[0].text


def test_a_file_that_lacks_an_array_is_an_error_still(tmp_path):
    for number in range(4):
        rng = np.random.default_rng(number)
        arrays = {"x": rng.normal(size=(50, 3)), **({} if number == 1 else {"y": rng.normal(size=50)})}
        write(tmp_path / f"{number}.h5", **arrays)
    assert kinds_of(check_files(tmp_path)) == [("error", "missing")]


def test_numbers_of_episodes_may_differ_from_file_to_file(tmp_path):
    for number, n_episodes in enumerate((3, 5, 9)):
        rng = np.random.default_rng(number)
        write(
            tmp_path / f"{number}.h5",
            **{f"data__demo_{episode}__actions": rng.normal(size=(100 + episode, 2)) for episode in range(n_episodes)},
        )
    assert kinds_of(check_files(tmp_path)) == []


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_text_that_is_not_utf8_is_no_damage(tmp_path, encoding):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.random.default_rng(0).normal(size=(4, 2))
        text = file.create_dataset("city", (4,), h5py.string_dtype())
        text[:] = np.array(["Zürich".encode(encoding)] * 4, object)
    assert not check_files(tmp_path).errors
