"""``rows_of_step``: the rows of any optimizer step, equal to what training recorded, however the run was resumed."""

import random

import pytest
from step_runs import Run, play, write_files, wrong_answers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def ask(seeds, n, tmp_path, monkeypatch):
    """The number of right answers about ``n`` steps of each run, and the wrong ones."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    n_right, n_resumed, wrong = 0, 0, []
    for seed in seeds:
        run, folder = Run.drawn(seed), tmp_path / str(seed)
        folder.mkdir()
        played = play(run, folder)
        n_resumed += played.n_resumed
        mistakes = wrong_answers(run, played, random.Random(seed), n)
        n_right += n - len(mistakes)
        wrong += [(seed, run, mistake) for mistake in mistakes]
    assert n_resumed >= len(seeds) // 2
    return n_right, wrong


def test_rows_of_random_steps_of_random_runs(tmp_path, monkeypatch):
    assert ask(range(6), 10, tmp_path, monkeypatch) == (60, [])


@pytest.mark.wide
def test_rows_of_random_steps_of_more_runs(tmp_path, monkeypatch):
    assert ask(range(6, 36), 10, tmp_path, monkeypatch) == (300, [])


@pytest.mark.slow
def test_a_thousand_answers_are_right(tmp_path, monkeypatch):
    n_right, wrong = ask(range(100, 200), 10, tmp_path, monkeypatch)
    print(f"{n_right} of 1,000 answers are right")
    assert (n_right, wrong) == (1000, [])
