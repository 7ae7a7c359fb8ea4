"""Random cases of bad samples: only these are missing, ledgers have all of them, resumed runs are the same."""

import pytest
from bad_row_runs import check_ranks, run
from random_bad_rows import KINDS, Case

from lightning_h5 import H5FileError


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_case_of_each_kind(tmp_path, kind):
    run(11, tmp_path, kinds=(kind,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused_before_training(tmp_path, kind):
    """Also if bad rows are to be left out: HDF5 opens no file that is shorter than it says."""
    case = Case(11, tmp_path, kinds=(kind,))
    case.truncate()
    with pytest.raises(H5FileError, match="truncated"):
        case.datamodule(0, is_bad=True).setup("fit")


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(30))
def test_random_cases(tmp_path, seed):
    run(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(30, 1000, 50))
def test_a_thousand_random_cases(tmp_path, first):
    for seed in range(first, min(first + 50, 1000)):
        run(seed, tmp_path / str(seed))


@pytest.mark.wide
@pytest.mark.parametrize(("world_size", "other_size"), [(2, 3), (3, 1)])
def test_random_cases_on_real_ranks(tmp_path, world_size, other_size):
    """Each is trained unbroken, stopped after a step, and resumed by as many ranks and by others.

    All ranks have the ledger of all.
    """
    assert check_ranks(range(8), tmp_path, world_size, other_size) > 4


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "other_size"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("first", range(8, 72, 16))
def test_more_random_cases_on_real_ranks(tmp_path, first, world_size, other_size):
    assert check_ranks(range(first, first + 16), tmp_path, world_size, other_size)
