"""The mutants of ``mutants.py`` are still changes of this package."""

from mutants import MUTANTS, ROOT


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 20


def test_each_mutant_changes_one_place():
    for mutant in MUTANTS:
        source = (ROOT / "lightning_h5" / mutant.module).read_text()
        assert source.count(mutant.old) == 1, mutant.what
        assert mutant.old != mutant.new, mutant.what
        compile(source.replace(mutant.old, mutant.new), mutant.module, "exec")


def test_the_tests_of_each_mutant_are_there():
    for mutant in MUTANTS:
        assert all((ROOT / tests).exists() for tests in mutant.tests), mutant.what
