"""Runs of rows are copied as a whole to the places that single rows have."""

import numpy as np
import pytest

from lightning_h5.readers import copies
from lightning_h5.readers.block_map import Pieces

ROWS = np.arange(400, dtype="f8").reshape(100, 4) * 1e300


class Halved:
    """A change of rows on the way."""

    def take(self, rows, places, out, out_places=None):
        out[slice(None) if out_places is None else out_places] = (rows if places is None else rows[places]) / 2


@pytest.mark.parametrize("change", [None, Halved()])
@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("are_there", [None, np.array([True, False, True, True])])
def test_runs_go_where_their_rows_do(monkeypatch, change, dtype, step, are_there):
    pieces, firsts = Pieces(np.zeros(4, int), np.zeros(4, int), np.array([5, 1, 0, 9])), np.array([40, 3, 7, 0])
    found = []
    for long_run in (0, 1 << 40):
        monkeypatch.setattr(copies, "LONG_RUN", long_run)
        out = np.zeros((15 * step, 4), dtype)[::step]
        with np.errstate(over="ignore"):
            copies.copy_pieces(copies.Copy(out, change), ROWS, firsts, pieces, are_there)
        found.append(out)
    assert found[1].any()
    assert np.array_equal(*found)
