"""Fixtures for tests of data modules."""

import numpy as np
import pytest
from sixty_rows import ROWS, VAL_ROWS


@pytest.fixture
def files(make_h5):
    """A file to train on, and one for all other stages; see ``sixty_rows``."""
    return make_h5({"x": np.arange(ROWS)}), make_h5({"x": np.arange(VAL_ROWS)})
