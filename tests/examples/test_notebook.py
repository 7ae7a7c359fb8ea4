"""The notebook, executed in a kernel as Jupyter does."""

import json
import re
from pathlib import Path

import pytest
from scripts import run_script

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"

# In a process of its own: a client's threads, sockets and event loop are nobody else's.
PROGRAM = """
import sys
import nbformat
from nbclient import NotebookClient

source, folder, target = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
NotebookClient(notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, target)
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What the cells of the executed notebook gave: their text, and the kinds of the rest."""
    folder = tmp_path_factory.mktemp("notebook")
    target = folder / "executed.ipynb"
    run_script("-c", PROGRAM, NOTEBOOK, folder, target, PYTHONPATH=str(ROOT), IPYTHONDIR=str(folder / "ipython"))
    given = [given for cell in json.loads(target.read_text())["cells"] for given in cell.get("outputs", [])]
    text = "".join("".join(each.get("text", [])) for each in given)
    return text, [kind for each in given for kind in each.get("data", {})]


@pytest.mark.wide
def test_the_notebook_shows_the_file_the_batches_and_a_trained_model(outputs):
    text, kinds = outputs
    assert "chunks (64, 1, 8, 8), compression gzip" in text
    assert re.search(r"epoch 1: (\d+) rows, \1 different ones", text)
    assert float(re.search(r"accuracy on writers that were not trained on: ([\d.]+)", text)[1]) > 0.9
    assert int(re.search(r"(\d+) of 1797 digits are misread", text)[1]) < 90
    assert kinds.count("image/png") == 2


@pytest.mark.wide
def test_the_notebook_shows_how_fast_rows_came(outputs):
    for stage in ("train", "validate", "test", "predict"):
        assert re.search(rf"^ .* {stage}\b", outputs[0], re.MULTILINE), "the table has a column for each stage"


def test_the_notebook_is_stored_without_outputs():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
