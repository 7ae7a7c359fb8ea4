"""Fixtures of tests that stage."""

import pytest

from lightning_h5.datasets import file_dataset
from lightning_h5.samples import row_table
from lightning_h5.staging import policy


@pytest.fixture
def stages_all(monkeypatch):
    """Files are staged however small they are, and to the disk that they are on; no array is held in memory."""
    monkeypatch.setattr(policy, "MIN_BYTES", 0)
    monkeypatch.setattr(policy, "_is_on", lambda device, folder: False)
    for module in (row_table, file_dataset):
        monkeypatch.setattr(module, "HELD_BYTES", 0)
