"""``stats`` without a key reads the input that ``inspect`` suggests, and ends with the next command."""

import shlex

import h5py
import numpy as np
import pytest

from lightning_h5 import compute_stats
from lightning_h5.cli import main

RNG = np.random.default_rng(0)


def test_of_recordings_all_steps_are_read(tmp_path):
    signals = [RNG.normal(size=(4, 600 + number)) for number in range(6)]
    for number, signal in enumerate(signals):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["eeg"] = signal
    (array,) = compute_stats(tmp_path).arrays
    values = np.concatenate(signals, axis=1)
    np.testing.assert_allclose(array.mean, values.mean())
    assert array.n_values == values.size


def test_of_episodes_each_field_of_the_input_is_read(tmp_path):
    images, actions = [], []
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(12):
            n = 20 + number
            actions.append(RNG.normal(size=(n, 2)))
            images.append(RNG.integers(0, 255, (n, 4, 4)))
            file[f"data/demo_{number}/actions"], file[f"data/demo_{number}/obs/image"] = actions[-1], images[-1]
            file[f"data/demo_{number}/rewards"] = np.zeros(n)
    arrays = {array.key: array for array in compute_stats(tmp_path / "a.h5").arrays}
    assert set(arrays) == {"actions", "obs/image"}
    np.testing.assert_allclose(arrays["obs/image"].mean, np.concatenate(images).mean())


def test_the_last_line_is_a_command_that_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File("a.h5", "w") as file:
        file["x"], file["y"] = RNG.normal(size=(40, 3)), np.arange(40)
    for words in (["a.h5"], ["a.h5", "--key", "x", "--channel-axis", "0"], ["a.h5", "--segments", "{step_axis: 0}"]):
        with pytest.raises(SystemExit) as ended:
            main(["stats", *words])
        assert ended.value.code == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Next: "))
        program, *words = shlex.split(line.removeprefix("Next: "))
        with pytest.raises(SystemExit) as ended:
            main([*words, "--force"])
        assert (program, ended.value.code) == ("lightning-h5", 0)
        assert "Next: lightning-h5 inspect a.h5" in capsys.readouterr().out
