"""The mutants of ``mutants.py`` are still changes of this package."""

import pytest
from mutants import MUTANTS, ROOT


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.what for mutant in MUTANTS])
def test_a_mutant_changes_one_place(mutant):
    source = (ROOT / "lightning_h5" / mutant.module).read_text()
    assert source.count(mutant.old) == 1
    assert mutant.old != mutant.new
    compile(source.replace(mutant.old, mutant.new), mutant.module, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.what for mutant in MUTANTS])
def test_a_mutants_tests_are_there(mutant):
    assert all((ROOT / tests).exists() for tests in mutant.tests)
