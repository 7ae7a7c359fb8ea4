"""The examples, as a newcomer runs them: what they print is what they promise."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from scripts import as_commands, fork, run_forked, run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(params=["forked", pytest.param("alone", marks=pytest.mark.slow)])
def run(request, tmp_path):
    """Runs an example in a folder of its own: forked from a process that has imported what all of them import.

    With ``-m slow`` from nothing, as a user's shell does; then Lightning starts the second rank.
    """

    def run(name, *more, world_size=1):
        if request.param == "alone":
            return run_script(EXAMPLES / name, tmp_path, *more, PYTHONPATH=str(ROOT))
        return run_forked(tmp_path / "logs", EXAMPLES / name, tmp_path, *more, world_size=world_size)

    return run


def number(pattern, text):
    return float(re.search(pattern, text)[1])


@pytest.fixture
def clone(tmp_path):
    """A folder like a fresh clone: the package and the examples, and no data yet."""
    (tmp_path / "examples").mkdir()
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.yaml")]:
        (tmp_path / "examples" / path.name).write_text(path.read_text())
    (tmp_path / "lightning_h5").symlink_to(ROOT / "lightning_h5")
    return tmp_path


@pytest.mark.wide
@pytest.mark.parametrize(("name", "n_predicted"), [("lazy", 1797), ("rank_cached", 1797), ("combined", 484)])
def test_a_config_fits_tests_and_predicts_from_the_command_line(clone, name, n_predicted):
    config, checkpoint = f"examples/{name}.yaml", f"checkpoints/{name}/last.ckpt"
    commands = [
        ("FITTING", ["fit", "--config", config]),
        ("TESTING", ["test", "--config", config, "--ckpt_path", checkpoint]),
        ("PREDICTING", ["predict", "--config", config, "--ckpt_path", checkpoint]),
    ]
    out = fork(clone / "logs", as_commands, str(clone), commands)
    fit, rest = out.split("TESTING")
    test, predict = rest.split("PREDICTING")
    for stage, text in {"train": fit, "validate": fit, "test": test}.items():
        assert re.search(rf"^ .* {stage}\b", text, re.MULTILINE), "the table has a column for each stage"
    assert number(r"test/accuracy\D+([\d.]+)", test) > 0.8
    assert number(r"\nrows +(\d+)", predict.replace(",", "")) == n_predicted


def test_two_ranks_have_every_row_once_between_them(run):
    out = run("two_ranks.py", world_size=2)
    for stage in ("epoch 0", "epoch 1", "epoch 2", "test"):
        assert f"{stage}: together 1001 of 1001 rows, each of them once: True" in out
        counts = [number(rf"{stage}: rank {rank} \D*(\d+) rows", out) for rank in range(2)]
        assert counts == [501, 500]
    assert len(set(re.findall(r"the first are \[(.*)\]", out))) == 8, "ranks and epochs have rows of their own"
    assert abs(number(r"slope ([\d.-]+)", out) - 3) < 0.05


@pytest.mark.wide
def test_a_killed_run_resumes_to_the_rows_and_weights_of_an_unbroken_one(run):
    out = run("resume.py")
    assert "ended with SIGKILL in step 34" in out
    assert "its last checkpoint is of step 30," in out
    assert "rows: 1920 of 1920 are those of the unbroken run" in out
    assert number(r"the largest difference to the unbroken run is (\S+)", out) == 0


@pytest.mark.wide
def test_patients_are_whole_where_their_key_is_named(run):
    out = run("patients.py")
    pattern = r"cut {}: mean accuracy ([\d.]+) .*patients on both sides: (\d+)"
    by_patient, by_row = (re.search(pattern.format(way), out).groups() for way in ("by patient", "by row"))
    assert int(by_patient[1]) == 0
    assert int(by_row[1]) > 40, "nearly all 50 patients are on both sides"
    assert 0.6 < float(by_patient[0]) < 0.9, "better than chance, and not too good to be true"
    assert float(by_row[0]) > 0.95


@pytest.mark.wide
def test_a_mixture_has_the_shares_that_were_asked_for(run):
    lines = re.findall(r"^(\S.*?) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", run("mixture.py"), re.MULTILINE)
    found = {name: tuple(map(float, numbers)) for name, *numbers in lines}
    share_of_home = {name: numbers[1] for name, numbers in found.items()}
    assert share_of_home == pytest.approx(
        {"concat": 0.09, "weighted 0.7 : 0.3": 0.3, "the same, in each batch": 0.3, "round_robin": 0.5}, abs=0.02
    )
    right_at_home = {name: numbers[3] for name, numbers in found.items()}
    assert right_at_home["round_robin"] > right_at_home["concat"] + 0.05
    assert found["concat"][2] > 0.9


@pytest.mark.wide
def test_images_are_learned_and_their_augmentation_follows_the_row(run):
    out = run("images.py")
    assert number(r"accuracy on the validation rows: ([\d.]+)", out) > 0.8
    assert "900 of 900 images are augmented alike" in out
    assert number(r"in the next epoch (\d+) of 900", out) > 800


@pytest.mark.wide
def test_a_regression_on_normalised_signals_is_far_better_than_the_mean(run, tmp_path):
    out = run("signals.py")
    error, guessing = re.search(r"mean error on the test rows: ([\d.]+) s; .* mean: ([\d.]+) s", out).groups()
    assert float(error) < float(guessing) / 4
    with h5py.File(tmp_path / "monitor.h5") as file:
        expected = file["train/signal"][:].mean(axis=(0, 2), dtype="f8")
    printed = re.search(r"heart rate: ([\d.]+) .* contractions: ([\d.]+)", out).groups()
    np.testing.assert_allclose(np.array(printed, dtype="f8"), expected, atol=0.06)


@pytest.mark.wide
def test_actions_of_held_out_episodes_are_predicted_from_two_images(run):
    error, still = re.search(r"held-out episodes: ([\d.]+); of standing still: ([\d.]+)", run("episodes.py")).groups()
    assert float(error) < float(still) / 4


@pytest.mark.wide
def test_windows_of_eeg_tell_closed_eyes_of_other_subjects(run, tmp_path):
    out = run("eeg.py")
    assert number(r"accuracy for other subjects: ([\d.]+)", out) > 0.9
    assert number(r"of a constant answer: ([\d.]+)", out) < 0.7
    with h5py.File(tmp_path / "eeg.h5") as file:
        n_steps = sum(file[f"{name}/eeg"].shape[1] for name in file["splits/train"].asstr())
    assert number(r"(\d+) steps of 12 training subjects", out) == n_steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_features_lie_at_their_rows(run, ranks, tmp_path):
    out = run("features.py", "--ranks", str(ranks), world_size=ranks)
    assert "1501 of 1501 features lie at their rows" in out
    counts = [int(count) for count in re.findall(r"rank \d had (\d+) rows", out)]
    assert counts == ([1501] if ranks == 1 else [751, 750])
    with h5py.File(tmp_path / "features.h5") as file:
        assert np.isfinite(file["features"][:]).all()
    assert not list(tmp_path.glob("*.part")), "the ranks' parts are gone"


@pytest.mark.wide
def test_repacked_rows_are_equal_and_lie_in_other_chunks(run):
    out = run("repack.py")
    assert "rows are equal: True" in out
    before, after = re.findall(r"in chunks of \((\d+), (.*)\)", out)
    assert int(after[0]) == 8
    assert after[1] == "3, 64, 64"
    assert before[1] != after[1], "h5py guesses chunks that cut rows"
    assert len(re.findall(r"^(?:h5py|lightning_h5), .*[\d.]$", out, re.MULTILINE)) == 2


def test_the_list_of_examples_is_complete():
    listed = set(re.findall(r"\]\((\w+\.(?:py|yaml|ipynb))\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml", ".ipynb")}
