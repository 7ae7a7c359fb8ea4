"""What ``inspect`` prints is a call to copy first, and one line for groups that are alike."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from lightning_h5 import LazyH5DataModule, inspect_file, inspect_folder
from lightning_h5.cli import main
from lightning_h5.hdf5 import AlikeArrays

RNG = np.random.default_rng(0)
OBSERVATIONS = ("object", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "robot0_joint_pos")


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *map(str, arguments)])
    assert ended.value.code == 0
    return capsys.readouterr().out


def called(text):
    return re.match(r"LazyH5DataModule\(\n(?:    .*\n)+\)$", text, re.MULTILINE)[0]


def batch_of(call):
    module = eval(call, {"LazyH5DataModule": LazyH5DataModule})
    module.setup("fit")
    return next(iter(module.train_dataloader())), module


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """200 episodes as robomimic writes them."""
    path = tmp_path_factory.mktemp("demos") / "low_dim.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs.update({"env_args": '{"env_name": "Lift"}', "total": 1})
        for number in range(200):
            n = int(RNG.integers(20, 30))
            demo = data.create_group(f"demo_{number}")
            demo.attrs.update({"num_samples": n, "model_file": "<mujoco>" * 50})
            demo["actions"], demo["states"] = np.zeros((n, 7)), np.zeros((n, 32))
            demo["rewards"], demo["dones"] = np.zeros(n), np.r_[np.zeros(n - 1, int), 1]
            for group in ("obs", "next_obs"):
                for at, name in enumerate(OBSERVATIONS):
                    demo[f"{group}/{name}"] = np.zeros((n, 3 + at))
                demo[f"{group}/agentview_image"] = np.zeros((n, 8, 8, 3), "u1")
        names = np.array([f"demo_{number}" for number in range(200)], "S8")
        file["mask/train"], file["mask/valid"] = names[:180], names[180:]
    return path


def test_two_hundred_episodes_fit_a_screen_and_the_call_is_first(demos, capsys):
    text = printed(capsys, demos)
    assert text.count("\n") <= 40
    assert "demo_0 ... demo_199: 200 groups, each" in text
    assert re.search(r"actions \(2\d-2\d, 7\)\s+float64", text)
    batch, module = batch_of(called(text))
    assert set(batch) == {"actions", "agentview_image", *OBSERVATIONS}
    assert {str(tensor.dtype) for tensor in batch.values()} == {"torch.float32"}
    assert batch["actions"].shape[1:] == (8, 7)
    assert len(module.val_dataset.table.indexer.segments) == 20
    assert "by their names" in text.casefold()


def test_the_settings_alone_are_written_as_yaml_if_asked_for(tmp_path, capsys):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(12):
            file[f"data/demo_{number}/actions"] = np.zeros((20 + number, 7), "f4")
    assert "--yaml" in printed(capsys, tmp_path / "a.h5")
    text = printed(capsys, tmp_path / "a.h5", "--yaml")
    assert text.startswith("data:\n  class_path: LazyH5DataModule\n")


def test_alike_arrays_are_one_line_with_the_range_of_their_shapes(tmp_path, capsys):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(50):
            file[f"protein_{number}"] = np.zeros((10 + number, 4), "f2")
        for name in ("depth", "width"):
            file[f"info/{name}"] = np.zeros(3)
    text = printed(capsys, tmp_path / "a.h5")
    assert re.search(r"protein_0 \.\.\. protein_49: 50 arrays, each +\(10-59, 4\) float16", text)
    assert re.search(r"^    depth +\(3\)", text, re.MULTILINE)
    assert re.search(r"^\* ", text, re.MULTILINE)  # their cost is one line, too


def test_groups_that_differ_stay_apart(tmp_path, capsys):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, dtype in enumerate(("f4", "f4", "f8", "f4")):
            file[f"run_{number}/x"] = np.zeros((20, 3), dtype)
    text = printed(capsys, tmp_path / "a.h5")
    assert "run_0 ... run_3: 3 groups, each" in text
    assert re.search(r"^  run_2$", text, re.MULTILINE)


@pytest.mark.wide
def test_of_nine_thousand_objects_few_are_described_in_full(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for molecule in range(820):
            group = file.create_group(f"g/mol_{molecule:04}")
            for number in range(10):
                group[f"a{number}"] = np.zeros((5, 3), "f4")
    names = []
    describe = AlikeArrays._full_layout
    monkeypatch.setattr(
        AlikeArrays, "_full_layout", lambda self, *args, **more: names.append(args) or describe(self, *args, **more)
    )
    assert len(inspect_file(tmp_path / "a.h5").entries) == 9021
    assert 0 < len(names) < 100


def test_files_of_a_shell_become_a_glob_that_matches_no_other(tmp_path):
    for number in range(3):
        for name in (f"run{number}.h5", f"other{number}.h5"):
            with h5py.File(tmp_path / name, "w") as file:
                file["x"] = np.zeros((20, 3), "f4")
    runs = [tmp_path / f"run{number}.h5" for number in range(3)]
    assert inspect_folder(runs).example.advice.settings["train_path"] == f"{tmp_path}/run*.h5"
    assert inspect_folder(runs[:2]).example.advice.settings["train_path"] == [str(run) for run in runs[:2]]
    everything = sorted(tmp_path.glob("*.h5"))
    assert inspect_folder(everything).example.advice.settings["train_path"] == f"{tmp_path}/*.h5"


def write_recordings(folder: Path, columns):
    for number in range(12):
        with h5py.File(folder / f"s{number:02}.h5", "w") as file:
            file["eeg"] = np.zeros((4, 400 + number), "f4")
            file["eeg"].attrs["sfreq"] = 100.0
    lines = [",".join(columns), *(f"s{number:02},{number % 2},{30 + number}"[:None] for number in range(12))]
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")


def test_labels_in_a_table_beside_recordings_are_the_target(tmp_path, capsys, monkeypatch):
    pytest.importorskip("pyarrow")
    write_recordings(tmp_path, ("subject", "label", "age"))
    monkeypatch.chdir(tmp_path)
    text = printed(capsys, ".")
    (x, y), _ = batch_of(called(text))
    assert (x.shape[1:], str(y.dtype)) == ((4, 256), "torch.int64")
    assert set(y.tolist()) <= {0, 1}
    assert "'label' is a target by its name" in " ".join(text.split())
    assert "'labels.csv' has a line for each file" in " ".join(text.split())


def test_without_a_target_by_its_name_a_table_is_only_named(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    write_recordings(tmp_path, ("subject", "sex", "age"))
    text = printed(capsys, tmp_path)
    assert "y_key='table/COLUMN'" in " ".join(text.split())
    assert "y_key" not in called(text)


def test_arrays_for_each_split_are_one_call(tmp_path, capsys):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for split, n in (("train", 60), ("test", 20)):
            file[f"{split}_set_x"], file[f"{split}_set_y"] = np.zeros((n, 8, 8), "u1"), np.arange(n) % 2
    text = printed(capsys, tmp_path / "a.h5")
    assert "x_key='{split}_set_x'" in called(text)
    _, module = batch_of(called(text))
    module.setup("test")
    assert (len(module.train_dataset), len(module.val_dataset), len(module.test_dataset)) == (54, 6, 20)


def test_rows_of_one_value_are_a_target_and_whole_floats_are_classes(tmp_path, capsys):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["X"], file["labels"] = np.zeros((100, 5)), (np.arange(100) % 4).astype("f8")[:, None]
    text = printed(capsys, tmp_path / "a.h5")
    (_, y), _ = batch_of(called(text))
    assert (y.ndim, str(y.dtype)) == (1, "torch.int64")
    assert "If they are not, pass float32." in " ".join(text.split())


def test_floats_that_are_no_class_numbers_stay_floats(tmp_path):
    for values in (np.arange(100.0), np.arange(100) % 3 * 2.0, np.arange(100) % 3 - 1.0):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["X"], file["target"] = np.zeros((100, 5), "f4"), values
        assert inspect_file(tmp_path / "a.h5").advice.settings["y_dtype"] == "float32"


def test_volumes_of_several_depths_have_two_calls_that_run_with_any_batch(tmp_path):
    for depth in (40, 42, 44):
        with h5py.File(tmp_path / f"v{depth}.h5", "w") as file:
            file["raw"], file["label"] = np.zeros((depth, 48, 52), "f4"), np.zeros((depth, 48, 52), "u1")
    advice = inspect_folder(tmp_path).example.advice
    for suggestion in (advice, advice.other):
        module = LazyH5DataModule(**{**suggestion.settings, "batch_size": 2})
        module.setup("fit")
        assert len(next(iter(module.train_dataloader()))) >= 2
    assert advice.settings["y_key"] == advice.other.settings["y_key"] == "label"


@pytest.mark.parametrize("members", [("real", "imag"), ("r", "i")])
def test_tables_of_complex_numbers_are_read_with_both_parts(tmp_path, members):
    table = np.zeros((40, 6), [(member, "f8") for member in members])
    table[members[0]], table[members[1]] = 1, 2
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["Z"], file["labels"] = table, (np.arange(40) % 2).astype("f8")[:, None]
    advice = inspect_file(tmp_path / "a.h5").advice
    module = LazyH5DataModule(**advice.settings)
    module.setup("fit")
    x, y = next(iter(module.train_dataloader()))
    if members == ("real", "imag"):  # h5py has complex numbers of the other name
        assert advice.settings["x_key"] == {"Z": ["Z/real", "Z/imag"]}
        assert x["Z"].shape[1:] == (6, 2)
        assert x["Z"][0, 0].tolist() == [1, 2]
    assert (y.ndim, str(y.dtype)) == (1, "torch.int64")
