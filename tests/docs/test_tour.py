"""The page of the notebook shows outputs of the code that the notebook has."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from test_docs import ROOT

_spec = importlib.util.spec_from_file_location("tour_page", ROOT / "docs" / "tour.py")
tour = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tour)
NOTEBOOK = json.loads(tour.NOTEBOOK.read_text())
OUTPUTS = json.loads(tour.OUTPUTS.read_text())


def test_outputs_are_of_the_code_of_the_notebook():
    """If it has changed, run `python docs/tour.py`."""
    code = {cell["id"]: "".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"}
    assert {name: cell["source"] for name, cell in OUTPUTS.items()} == code


def test_the_page_has_all_cells_and_outputs():
    page = tour.page(NOTEBOOK, OUTPUTS)
    assert page.count("```python") == len(OUTPUTS)
    images = re.findall(r"_static/tour/(.*\.png)", page)
    assert len(images) == 2
    assert all((tour.IMAGES / name).exists() for name in images)
    assert "lightning_h5: rows from HDF5" in page
    assert "/home" not in page


def test_a_cell_without_stored_outputs_is_an_error():
    with pytest.raises(KeyError):
        tour.page(NOTEBOOK, {})
